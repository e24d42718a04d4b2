"""A small SVG writer for charts that are readable on light and dark pages. It needs no other package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from unicodedata import east_asian_width

INK, MUTED, GRID = "#1f2933", "#66788a", "#d9e2ec"
GOOD, BAD, WARN, BLUE, VIOLET = "#1b7f5c", "#c62f3b", "#d98c00", "#2a6fb8", "#7048a8"
FONT = "font-family='system-ui, -apple-system, Segoe UI, sans-serif'"


class Svg:
    """An SVG drawing under construction. Positions are in pixels from the upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height = width, height
        self._parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
            f"role='img' aria-label='{escape(title, quote=True)}' {FONT}>",
            f"<rect width='{width:g}' height='{height:g}' fill='#ffffff' rx='8'/>",
        ]

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, *, tip: str = "", rx: float = 0
    ) -> None:
        self._add(
            "rect", f"x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' rx='{rx:g}' fill='{fill}'", tip
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, *, width: float = 1, dash: str = ""
    ) -> None:
        dashes = f" stroke-dasharray='{dash}'" if dash else ""
        self._add(
            "line",
            f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' "
            f"stroke='{stroke}' stroke-width='{width:g}'{dashes}",
        )

    def polyline(self, points: Iterable[tuple[float, float]], stroke: str, *, width: float = 1.5) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polyline", f"points='{path}' fill='none' stroke='{stroke}' stroke-width='{width:g}'")

    def mark(self, shape: str, x: float, y: float, colour: str, *, tip: str = "", size: float = 4) -> None:
        """Draw a `cross`, `diamond`, `triangle` or `dot`. `tip` is the tooltip."""
        left, right, up, down = f"{x - size:.1f}", f"{x + size:.1f}", f"{y - size:.1f}", f"{y + size:.1f}"
        paths = {
            "cross": f"M{left},{up}L{right},{down}M{left},{down}L{right},{up}",
            "diamond": f"M{x:.1f},{up}L{right},{y:.1f}L{x:.1f},{down}L{left},{y:.1f}Z",
            "triangle": f"M{x:.1f},{up}L{right},{down}L{left},{down}Z",
        }
        if shape == "dot":
            self._add("circle", f"cx='{x:.1f}' cy='{y:.1f}' r='{size * 0.75:.1f}' fill='{colour}'", tip)
        else:
            fill = "none" if shape == "cross" else colour
            self._add("path", f"d='{paths[shape]}' stroke='{colour}' stroke-width='1.6' fill='{fill}'", tip)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = " font-weight='600'" if bold else ""
        self._parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{fill}' "
            f"text-anchor='{anchor}'{weight}>{escape(words)}</text>"
        )

    def _add(self, name: str, attributes: str, tip: str = "") -> None:
        if tip:
            self._parts.append(f"<{name} {attributes}><title>{escape(tip)}</title></{name}>")
        else:
            self._parts.append(f"<{name} {attributes}/>")

    def render(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def mix(low: str, high: str, share: float) -> str:
    """Return a colour between `low` and `high`, which are given as `#rrggbb`.

    A `share` of 0 returns `low` and 1 returns `high`. Other values are clipped to that range.
    """
    share = min(1.0, max(0.0, share))
    channels = (
        round(int(low[i : i + 2], 16) * (1 - share) + int(high[i : i + 2], 16) * share) for i in (1, 3, 5)
    )
    return "#" + "".join(f"{c:02x}" for c in channels)


def nice_ticks(top: float, count: int = 4) -> list[float]:
    """Return at most `count` + 1 evenly spaced round numbers, from 0 to at most `top`."""
    if top <= 0:
        return [0.0]
    raw = top / count
    unit = 10.0 ** (len(str(int(raw))) - 1) if raw >= 1 else 10.0 ** -len(f"{1 / raw:.0f}")
    step = next(unit * f for f in (1, 2, 2.5, 5, 10, 20) if unit * f >= raw)
    return [step * i for i in range(int(top / step) + 1)]


def text_width(text: str, size: float) -> float:
    """Return an upper bound, in pixels, of the text's width in the fonts of `FONT`."""
    wide = sum(east_asian_width(char) in "WF" for char in text)
    return size * (0.62 * (len(text) - wide) + 1.05 * wide)


def bar_chart(
    title: str, bars: Sequence[tuple[str, float, str, str]], *, width: float = 640, note: str = ""
) -> str:
    """Draw horizontal bars. The greatest value has the longest bar.

    `bars` contains (label, value, text beside the bar, colour).
    """
    row, top = 34.0, 46.0
    # The left margin must fit the longest label, because the edge of the drawing would cut it off.
    left = max(190.0, 24.0 + max((text_width(label, 13) for label, *_ in bars), default=0.0))
    width += left - 190.0
    svg = Svg(width, top + row * len(bars) + 26, title)
    svg.text(14, 26, title, size=15, bold=True)
    greatest = max((value for _, value, _, _ in bars), default=0) or 1
    for index, (label, value, words, colour) in enumerate(bars):
        y = top + row * index
        length = (width - left - 190) * value / greatest
        svg.text(left - 10, y + 16, label, anchor="end", size=13)
        svg.rect(left, y, max(length, 1.5), 22, colour, rx=3, tip=f"{label}: {words}")
        svg.text(left + length + 8, y + 16, words, size=13, fill=MUTED)
    if note:
        svg.text(14, top + row * len(bars) + 14, note, size=11, fill=MUTED)
    return svg.render()
