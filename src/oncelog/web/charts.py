"""Small charts as SVG and HTML text, drawn on the server so that the pages need no script for them. No I/O.

Colours come from the CSS classes of base.html, which has a light and a dark scheme. Each chart has a text for
screen readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from oncelog.client.consumer.partition_ends import PartitionEnds
from oncelog.web.display import duration_text, number_text, time_text
from oncelog.web.fates import StoredBatch
from oncelog.web.timeline import PastTransaction

_WIDTH, _HEIGHT = 160, 36


def sparkline(values: Sequence[float | None], label: str) -> str:
    """Return a line chart of values over time, scaled from 0 to their maximum. Unknown values leave a gap.
    Return an empty text if fewer than two values are known.
    """
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    top = max(known) or 1.0
    step = _WIDTH / (len(values) - 1)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{index * step:.1f},{_HEIGHT - 2 - (_HEIGHT - 4) * value / top:.1f}")
    lines = "".join(f'<polyline points="{" ".join(run)}"/>' for run in runs if len(run) > 1)
    text = f"{label}: now {number_text(known[-1])}, at most {number_text(max(known))}"
    return _svg(_WIDTH, _HEIGHT, "spark", text, lines)


def offsets_bar(ends: PartitionEnds) -> str:
    """Return a bar of the offsets from start to end. The part above the last stable offset is marked."""
    start, end, stable = ends.start, ends.end, ends.stable_end
    if start is None or end is None or stable is None or end <= start:
        return ""
    visible = 100 * (min(max(stable, start), end) - start) / (end - start)
    held = 100 - visible
    text = f"offsets {start} to {end}; read_committed readers see up to {stable}"
    # Draw the part that is held back with a width of at least 3 %, so that it is visible even if it is one
    # record of a million.
    if held:
        held, visible = max(held, 3.0), min(visible, 97.0)
    parts = f'<rect class="seen" width="{visible:.2f}" height="10"/>'
    if held:
        parts += f'<rect class="held" x="{visible:.2f}" width="{held:.2f}" height="10"/>'
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        f"aria-label={quoteattr(text)}>{parts}</svg>"
    )


_BLOCK, _GAP, _ROW = 118, 6, 40


def batch_blocks(batches: Sequence[StoredBatch]) -> str:
    """Return the remembered batches of a producer as blocks with their sequences and offsets."""
    parts = []
    for index, batch in enumerate(batches):
        x = index * (_BLOCK + _GAP)
        sequences = f"{batch.base_sequence}–{batch.last_sequence}"
        offsets = f"offset {batch.base_offset}"
        parts.append(
            f'<rect class="block" x="{x + 0.5}" y="0.5" width="{_BLOCK}" height="{_ROW - 1}" rx="4"/>'
            f'<text x="{x + _BLOCK / 2}" y="16" class="seq">{escape(sequences)}</text>'
            f'<text x="{x + _BLOCK / 2}" y="31" class="off">{escape(offsets)}</text>'
        )
    width = len(batches) * (_BLOCK + _GAP)
    text = "remembered batches, oldest first: " + "; ".join(
        f"sequences {batch.base_sequence} to {batch.last_sequence} at offset {batch.base_offset}"
        for batch in batches
    )
    return _svg(width, _ROW, "blocks", text, "".join(parts))


_SPAN, _LANE = 560, 16


def transaction_lanes(past: Sequence[PastTransaction], now_ms: int) -> str:
    """Return a chart with a lane for each transaction, on a common time axis. Ticks show when partitions
    joined.

    The colour shows the outcome: committed, aborted or open. Only the bars are SVG and take the width of the
    window; the labels are text, so that they keep their size. In a narrow window, base.html puts the labels
    above their bar. Guard: test_the_labels_of_past_transactions_are_readable_in_a_narrow_window.
    """
    if not past:
        return ""
    first_ms = min(txn.start_ms for txn in past)
    last_ms = max([txn.last_ms if txn.outcome else now_ms for txn in past] + [first_ms + 1])
    scale = _SPAN / max(last_ms - first_ms, 1)
    lanes = []
    for txn in past:
        end_ms = txn.last_ms if txn.outcome else max(now_ms, txn.last_ms)
        x, width = (txn.start_ms - first_ms) * scale, max((end_ms - txn.start_ms) * scale, 3.0)
        state = {"commit": "committed", "abort": "aborted", None: "open"}[txn.outcome]
        label = f"{time_text(txn.start_ms)[11:]} epoch {txn.producer_epoch}"
        length = duration_text(end_ms - txn.start_ms)
        # A bar that begins at the end of the axis is drawn to the left of it.
        x = min(x, _SPAN - width)
        bar = f'<rect class="txn {state}" x="{x:.1f}" width="{width:.1f}" height="{_LANE}"/>'
        ticks = "".join(
            f'<line class="tick" x1="{t:.1f}" x2="{t:.1f}" y1="0" y2="{_LANE}"/>'
            for t in sorted({(added_ms - first_ms) * scale for added_ms, _ in txn.added})
        )
        lanes.append(
            f'<div class="lane"><span>{escape(label)}</span>'
            f'<svg viewBox="0 0 {_SPAN} {_LANE}" preserveAspectRatio="none">{bar}{ticks}</svg>'
            f"<span>{escape(f'{state}, {length}')}</span></div>"
        )
    text = f"{len(past)} transactions from {time_text(first_ms)} to {time_text(last_ms)}"
    return f'<div class="lanes" role="img" aria-label={quoteattr(text)}>{"".join(lanes)}</div>'


def _svg(width: float, height: float, kind: str, label: str, content: str) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img" aria-label={quoteattr(label)}>{content}</svg>'
    )
