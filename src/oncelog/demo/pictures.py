"""The report's pictures as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog.demo.story import Happened, Mark
from oncelog.demo.svg import BAD, BLUE, GOOD, GRID, INK, MUTED, VIOLET, WARN, Svg, bar_chart, mix, nice_ticks

_LOOKS = {
    Happened.ACK_LOST: ("cross", BAD),
    Happened.REQUEST_LOST: ("diamond", WARN),
    Happened.UNANSWERED: ("diamond", WARN),
    Happened.DUPLICATE: ("dot", GOOD),
    Happened.REFUSED: ("triangle", VIOLET),
}
_LEGEND = (
    ("stored", "line", BLUE),
    ("acknowledgement lost", "cross", BAD),
    ("request lost or unanswered", "diamond", WARN),
    ("repeat recognised, not stored", "dot", GOOD),
    ("out of order, refused", "triangle", VIOLET),
)

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, TOP = 960.0, 290.0, 170.0, 76.0


def sequences_picture(marks: Sequence[Mark], killed_at_s: float) -> str:
    """A panel per partition: sequence number over time, each fault where it struck."""
    partitions = sorted({mark.partition for mark in marks})
    rows = (len(partitions) + 2) // 3
    title = "Sequence numbers by partition, and what the network did to them"
    svg = Svg(WIDTH, TOP + rows * (PANEL_HEIGHT + 46), title)
    svg.text(14, 26, title, size=15, bold=True)
    _draw_legend(svg)
    end_ms = max((mark.time_ms for mark in marks), default=1.0)
    top_sequence = max((mark.sequence + mark.records for mark in marks), default=1)
    for index, partition in enumerate(partitions):
        x = 50 + (index % 3) * (PANEL_WIDTH + 16)
        y = TOP + (index // 3) * (PANEL_HEIGHT + 46)
        panel = _Panel(svg, x, y, end_ms, top_sequence)
        panel.draw(partition, [m for m in marks if m.partition == partition], killed_at_s)
    return svg.render()


def _draw_legend(svg: Svg) -> None:
    x = 16.0
    for words, shape, colour in _LEGEND:
        if shape == "line":
            svg.line(x - 4, 46, x + 8, 46, colour, width=2)
        else:
            svg.mark(shape, x + 2, 46, colour)
        svg.text(x + 14, 50, words, size=12, fill=MUTED)
        x += 34 + 6.6 * len(words)
    svg.line(x, 40, x, 52, INK, dash="3 2")
    svg.text(x + 8, 50, "SIGKILL", size=12, fill=MUTED)


class _Panel:
    """One partition's plot at (x, y); time and sequence scales are shared by all panels."""

    def __init__(self, svg: Svg, x: float, y: float, end_ms: float, top_sequence: int) -> None:
        self.svg, self.x, self.y = svg, x, y
        self.end_ms, self.top_sequence = end_ms, top_sequence

    def across(self, time_ms: float) -> float:
        return self.x + (PANEL_WIDTH - 40) * time_ms / self.end_ms

    def up(self, sequence: float) -> float:
        return self.y + PANEL_HEIGHT - (PANEL_HEIGHT - 20) * sequence / self.top_sequence

    def draw(self, partition: int, marks: Sequence[Mark], killed_at_s: float) -> None:
        svg = self.svg
        svg.text(self.x, self.y + 10, f"partition {partition}", size=12, bold=True)
        for tick in nice_ticks(self.top_sequence, 3):
            svg.line(self.x, self.up(tick), self.x + PANEL_WIDTH - 40, self.up(tick), GRID)
            svg.text(self.x - 4, self.up(tick) + 4, f"{tick / 1000:g}k", size=10, fill=MUTED, anchor="end")
        for tick in nice_ticks(self.end_ms / 1000, 4):
            words = f"{tick:g} s"
            svg.text(self.across(tick * 1000), self.y + PANEL_HEIGHT + 14, words, size=10, fill=MUTED)
        stored = [m for m in marks if m.happened in (Happened.STORED, Happened.ACK_LOST)]
        svg.polyline(((self.across(m.time_ms), self.up(m.sequence)) for m in _thinned(stored)), "#2a6fb8")
        kill = self.across(killed_at_s * 1000)
        svg.line(kill, self.y + 18, kill, self.y + PANEL_HEIGHT, INK, dash="3 2")
        for mark in marks:
            if mark.happened in _LOOKS:
                shape, colour = _LOOKS[mark.happened]
                svg.mark(shape, self.across(mark.time_ms), self.up(mark.sequence), colour, tip=_tip(mark))


def _thinned(marks: Sequence[Mark], most: int = 400) -> Sequence[Mark]:
    return marks[:: max(1, len(marks) // most)]


def _tip(mark: Mark) -> str:
    last = mark.sequence + mark.records - 1
    where = f", offset {mark.offset}" if mark.offset is not None else ""
    return f"{mark.time_ms / 1000:.2f} s: sequences {mark.sequence}-{last}: {mark.happened}{where}"


def delay_picture(rows: Sequence[Mapping[str, Any]], airlines: Mapping[str, str]) -> str:
    """Mean departure delay: a row per carrier, a column per hour of the day."""
    means = {
        (row["carrier"], row["hour"]): row["dep_delay_min"] / row["departed"]
        for row in rows
        if row["departed"]
    }
    carriers = sorted({carrier for carrier, _ in means})
    hours = list(range(min(hour for _, hour in means), max(hour for _, hour in means) + 1))
    left, top, cell, high = 220.0, 66.0, 37.0, 24.0
    title = "Mean departure delay in minutes, by carrier and scheduled hour"
    svg = Svg(left + cell * len(hours) + 20, top + high * len(carriers) + 30, title)
    svg.text(14, 26, title, size=15, bold=True)
    for column, hour in enumerate(hours):
        svg.text(left + cell * (column + 0.5), top - 8, f"{hour}", size=11, fill=MUTED, anchor="middle")
    for index, carrier in enumerate(carriers):
        y = top + high * index
        name = airlines.get(carrier, "")
        svg.text(left - 10, y + 16, f"{name} {carrier}".strip(), size=12, anchor="end")
        for column, hour in enumerate(hours):
            mean = means.get((carrier, hour))
            if mean is not None:
                x = left + cell * column
                svg.rect(
                    x, y, cell - 2, high - 2, _heat(mean), rx=2, tip=f"{carrier} {hour} h: {mean:.1f} min"
                )
                ink = "#ffffff" if mean > 26 else INK
                svg.text(x + cell / 2 - 1, y + 15, f"{round(mean)}", size=10, fill=ink, anchor="middle")
    return svg.render()


def _heat(minutes: float) -> str:
    return (
        mix("#eef4fa", "#f3c969", minutes / 15)
        if minutes < 15
        else mix("#f3c969", "#a3222c", (minutes - 15) / 30)
    )


def counts_picture(rows: Sequence[tuple[str, int, int]]) -> str:
    """(semantics, lost, doubled) of each load as bars on one scale."""
    bars = []
    for name, lost, doubled in rows:
        bars.append((f"{name}: doubled", float(doubled), f"{doubled:,}", BAD if doubled else GOOD))
        bars.append((f"{name}: lost", float(lost), f"{lost:,}", WARN if lost else GOOD))
    return bar_chart("Records lost and doubled under the same faults", bars, width=760)
