"""Small charts in rows. Each chart has one line per compared side. The x values are evenly spaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oncelog_devtools.svg_charts import BAD, BLUE, GOOD, GRID, MUTED, VIOLET, WARN, Svg, nice_ticks

from oncelog_bench.framework import Result

COLOURS = (BLUE, WARN, GOOD, VIOLET, BAD)
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250.0, 170.0, 64.0, 92.0, 84.0
_MAX_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. `lines` maps a line's name to its points (x, y); the y axis starts at zero."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def draw_curves(title: str, charts: Sequence[Chart]) -> str:
    """Draw the charts under one legend, as SVG: up to three in a row, and rows of about equal length."""
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    columns = next(n for n in range(min(_MAX_COLUMNS, len(charts)), 0, -1) if len(charts) % n == 0 or n == 2)
    rows = -(-len(charts) // columns)
    svg = Svg(columns * (_WIDTH + _GAP) + 20, _TOP + rows * (_HEIGHT + _GAP), title)
    svg.text(14, 26, title, size=15, bold=True)
    x = 14.0
    for name, colour in colours.items():
        svg.rect(x, 40, 12, 12, colour, rx=2)
        svg.text(x + 18, 50, name, size=12)
        x += 34 + 7.5 * len(name)
    for index, chart in enumerate(charts):
        row, column = divmod(index, columns)
        _draw(svg, _LEFT + column * (_WIDTH + _GAP), _TOP + row * (_HEIGHT + _GAP), chart, colours)
    return svg.render()


def _draw(svg: Svg, left: float, top: float, chart: Chart, colours: Mapping[str, str]) -> None:
    steps = sorted({x for points in chart.lines.values() for x, _ in points})
    greatest = max((y for points in chart.lines.values() for _, y in points), default=0.0) or 1.0
    svg.text(left, top - 10, chart.title, size=12, bold=True)
    for tick in nice_ticks(greatest):
        y = top + _HEIGHT * (1 - tick / greatest)
        svg.line(left, y, left + _WIDTH, y, GRID)
        svg.text(left - 6, y + 4, f"{tick:,g}", size=10, fill=MUTED, anchor="end")
    places = {x: left + _WIDTH * (i + 0.5) / len(steps) for i, x in enumerate(steps)}
    for x, place in places.items():
        svg.text(place, top + _HEIGHT + 16, f"{x:,g}", size=10, fill=MUTED, anchor="middle")
    words = f"{chart.x_label} → {chart.y_label}"
    svg.text(left + _WIDTH / 2, top + _HEIGHT + 34, words, size=10, fill=MUTED, anchor="middle")
    for name, points in chart.lines.items():
        placed = [(places[x], top + _HEIGHT * (1 - y / greatest)) for x, y in sorted(points)]
        svg.polyline(placed, colours[name], width=2)
        for (x, y), (px, py) in zip(sorted(points), placed, strict=True):
            svg.mark("dot", px, py, colours[name], tip=f"{name}: {x:,g} → {y:,.4g}", size=5)


def lines_of(
    result: Result, x: str, y: str, *, side: str = "broker", **where: Any
) -> dict[str, list[tuple[float, float]]]:
    """Return one line per side. Its points are the fields `x` and `y` of the median rows that match `where`.

    Rows of ratios (`value / base`) are left out.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in result["medians"]:
        is_here = all(row[name] == value for name, value in where.items())
        if is_here and y in row and " / " not in row[side]:
            lines.setdefault(row[side], []).append((row[x], row[y]))
    return lines
