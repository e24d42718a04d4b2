"""The report's charts, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oncelog_devtools.svg_charts import (
    BAD,
    BLUE,
    GOOD,
    GRID,
    INK,
    MUTED,
    VIOLET,
    WARN,
    Svg,
    bar_chart,
    mix,
    nice_ticks,
)

from oncelog_demo.sink_attempts import Attempt, AttemptResult
from oncelog_demo.timeline import BatchEvent, Mark

_LOOKS = {
    BatchEvent.ACK_LOST: ("cross", BAD),
    BatchEvent.REQUEST_LOST: ("diamond", WARN),
    BatchEvent.UNANSWERED: ("diamond", WARN),
    BatchEvent.DUPLICATE: ("dot", GOOD),
    BatchEvent.REJECTED: ("triangle", VIOLET),
}
_LEGEND = (
    ("stored", "line", BLUE),
    ("acknowledgement lost", "cross", BAD),
    ("request lost or failed", "diamond", WARN),
    ("retry recognised, not stored", "dot", GOOD),
    ("out of order, rejected", "triangle", VIOLET),
)

WIDTH, PANEL_WIDTH, PANEL_HEIGHT, TOP = 960.0, 290.0, 170.0, 76.0


def sequences_picture(marks: Sequence[Mark], killed_at_s: float) -> str:
    """Draw a panel per partition: sequence numbers over time, with a mark for each fault."""
    partitions = sorted({mark.partition for mark in marks})
    rows = (len(partitions) + 2) // 3
    title = "Sequence numbers by partition, with the faults of the network"
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
    """One partition's plot at (x, y). All panels share their time and sequence scales."""

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
        stored = [m for m in marks if m.event in (BatchEvent.STORED, BatchEvent.ACK_LOST)]
        svg.polyline(((self.across(m.time_ms), self.up(m.sequence)) for m in _thinned(stored)), "#2a6fb8")
        kill = self.across(killed_at_s * 1000)
        svg.line(kill, self.y + 18, kill, self.y + PANEL_HEIGHT, INK, dash="3 2")
        for mark in marks:
            if mark.event in _LOOKS:
                shape, colour = _LOOKS[mark.event]
                svg.mark(shape, self.across(mark.time_ms), self.up(mark.sequence), colour, tip=_tip(mark))


def _thinned(marks: Sequence[Mark], max_marks: int = 400) -> Sequence[Mark]:
    return marks[:: max(1, len(marks) // max_marks)]


def _tip(mark: Mark) -> str:
    last = mark.sequence + mark.records - 1
    offset = f", offset {mark.offset}" if mark.offset is not None else ""
    return f"{mark.time_ms / 1000:.2f} s: sequences {mark.sequence}-{last}: {mark.event}{offset}"


_RESULTS = (
    (AttemptResult.COMMITTED, BLUE, "transaction of a task, committed"),
    (AttemptResult.ABORTED, BAD, "open when the driver was killed: aborted"),
    (AttemptResult.SKIPPED, GOOD, "already committed, not written again"),
)
_TASK_LEFT, _TASK_HIGH, _TASK_TOP, _RESTART_WIDTH = 60.0, 28.0, 96.0, 110.0


def tasks_picture(attempts: Sequence[Attempt], killed_at_ms: float) -> str:
    """Draw a row per task over time, and a band per micro-batch.

    The time axis omits the driver's restart.
    """
    tasks = max((attempt.task for attempt in attempts), default=0) + 1
    bottom = _TASK_TOP + tasks * _TASK_HIGH
    title = "The sink's transactions by task and micro-batch, before and after the driver was killed"
    svg = Svg(WIDTH, bottom + 34, title)
    svg.text(14, 26, title, size=15, bold=True)
    _draw_tasks_legend(svg)
    for task in range(tasks):
        middle = _TASK_TOP + (task + 0.5) * _TASK_HIGH
        svg.text(_TASK_LEFT - 8, middle + 4, f"task {task}", size=11, fill=MUTED, anchor="end")
    runs = [
        [attempt for attempt in attempts if (attempt.begin_ms > killed_at_ms) == is_second]
        for is_second in (False, True)
    ]
    spans = [_span(runs[0], killed_at_ms), _span(runs[1], None)]
    scale = (WIDTH - _TASK_LEFT - _RESTART_WIDTH - 16) / (sum(end - begin for begin, end in spans) or 1)
    x, before = _TASK_LEFT, set[int]()
    for run, (begin, end) in zip(runs, spans, strict=True):
        _TasksPanel(svg, x, begin, end, scale, bottom).draw(run, before)
        before = {attempt.batch for attempt in run}
        x += (end - begin) * scale + _RESTART_WIDTH
    x = _TASK_LEFT + (spans[0][1] - spans[0][0]) * scale
    svg.line(x, _TASK_TOP - 22, x, bottom, INK, width=2, dash="5 3")
    svg.text(x + 6, _TASK_TOP + 14, "SIGKILL", size=12, bold=True)
    svg.text(x + 6, _TASK_TOP + 32, "and, after", size=11, fill=MUTED)
    svg.text(
        x + 6, _TASK_TOP + 47, f"{(spans[1][0] - spans[0][1]) / 1000:.1f} s, restarted", size=11, fill=MUTED
    )
    svg.text(x + 6, _TASK_TOP + 62, "from the", size=11, fill=MUTED)
    svg.text(x + 6, _TASK_TOP + 77, "checkpoint", size=11, fill=MUTED)
    return svg.render()


def _draw_tasks_legend(svg: Svg) -> None:
    x = 16.0
    for result, colour, words in _RESULTS:
        if result is AttemptResult.SKIPPED:
            svg.mark("dot", x + 6, 46, colour, size=6)
        else:
            svg.rect(x, 40, 14, 12, colour, rx=2)
        svg.text(x + 20, 50, words, size=12, fill=MUTED)
        x += 44 + 6.2 * len(words)


def _span(run: Sequence[Attempt], killed_at_ms: float | None) -> tuple[float, float]:
    begin = min((attempt.begin_ms for attempt in run), default=0.0)
    return begin, killed_at_ms or max((attempt.end_ms or attempt.begin_ms for attempt in run), default=begin)


class _TasksPanel:
    """The panel of one run of the driver, from `begin` to `end` (milliseconds).

    The panel starts at pixel `x`. `scale` is in pixels per millisecond.
    """

    def __init__(self, svg: Svg, x: float, begin: float, end: float, scale: float, bottom: float) -> None:
        self.svg, self.x, self.begin, self.end, self.scale, self.bottom = svg, x, begin, end, scale, bottom

    def across(self, time_ms: float) -> float:
        return self.x + (min(time_ms, self.end) - self.begin) * self.scale

    def draw(self, run: Sequence[Attempt], before: set[int]) -> None:
        """Draw the run. `before` contains the batch ids of the previous run."""
        for batch in sorted({attempt.batch for attempt in run}):
            begin, end = _batch_span([attempt for attempt in run if attempt.batch == batch], self.end)
            left, width = self.across(begin) - 2, self.across(end) - self.across(begin) + 4
            self.svg.rect(left, _TASK_TOP, width, self.bottom - _TASK_TOP, "#eef2f6", rx=3)
            words = f"batch {batch} again" if batch in before else f"batch {batch}"
            self.svg.text(left + width / 2, _TASK_TOP - 8, words, size=12, anchor="middle", fill=MUTED)
        for attempt in run:
            self._draw_attempt(attempt)
        for tick in nice_ticks((self.end - self.begin) / 1000, 4):
            words = f"{tick:g} s"
            self.svg.text(self.across(self.begin + tick * 1000), self.bottom + 16, words, size=10, fill=MUTED)

    def _draw_attempt(self, attempt: Attempt) -> None:
        colour = next(colour for result, colour, _ in _RESULTS if result is attempt.result)
        y = _TASK_TOP + attempt.task * _TASK_HIGH
        tip = (
            f"task {attempt.task}, batch {attempt.batch}: {attempt.result}, {attempt.rows:,} rows in the log"
        )
        left = self.across(attempt.begin_ms)
        if attempt.result is AttemptResult.SKIPPED:
            self.svg.mark("dot", left + 5, y + _TASK_HIGH / 2, colour, tip=tip, size=6)
            return
        right = self.across(self.end if attempt.end_ms is None else attempt.end_ms)
        self.svg.rect(left, y + 5, max(right - left, 2), _TASK_HIGH - 10, colour, rx=2, tip=tip)


def _batch_span(attempts: Sequence[Attempt], killed_at_ms: float) -> tuple[float, float]:
    ends = (
        killed_at_ms if attempt.result is AttemptResult.ABORTED else attempt.end_ms or attempt.begin_ms
        for attempt in attempts
    )
    return min(attempt.begin_ms for attempt in attempts), max(ends)


def delay_picture(rows: Sequence[Mapping[str, Any]], airlines: Mapping[str, str]) -> str:
    """Draw the mean departure delay: a row per carrier, a column per hour of the day."""
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
    """Draw (semantics, lost records, doubled records) of each load as bars on one scale."""
    bars = []
    for name, lost, doubled in rows:
        bars.append((f"{name}: doubled", float(doubled), f"{doubled:,}", BAD if doubled else GOOD))
        bars.append((f"{name}: lost", float(lost), f"{lost:,}", WARN if lost else GOOD))
    return bar_chart("Records lost and doubled under the same faults", bars, width=760)
