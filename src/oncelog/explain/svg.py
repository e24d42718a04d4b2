"""Draws a sequence diagram as one self-contained SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from oncelog.explain.diagram import Arrow, Column, Note, Step, Tone

_LEFT, _GAP, _REMARKS = 70, 330, 280
_TOP, _ROW = 96, 44
_WIDTH = _LEFT + 2 * _GAP + _REMARKS
_NAMES = {Column.PRODUCER: "producer", Column.NETWORK: "network", Column.BROKER: "broker"}
_COLOURS = {
    Tone.PLAIN: "#3d4654",
    Tone.GOOD: "#1a7f4b",
    Tone.REPEAT: "#8250df",
    Tone.LOST: "#cf222e",
    Tone.REFUSED: "#bc4c00",
    Tone.HELD: "#9a6700",
    Tone.NOTE: "#57606a",
}
_STYLE = (
    "text{font:13px ui-sans-serif,system-ui,sans-serif;fill:#1f2328}"
    "text.t{font-size:17px;font-weight:600}text.h{font-weight:600}text.r{font-size:12px}text.n{font-style:italic}"
)


def draw_svg(steps: Sequence[Step], title: str, verdict: Sequence[str] = ()) -> str:
    """Return the SVG document. The lines of `verdict` are written below the diagram."""
    height = _TOP + _ROW * (len(steps) + 1) + 22 * len(verdict) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(20, 32, title, "t"),
        *_columns(_TOP + _ROW * (len(steps) + 0.4)),
    ]
    for index, step in enumerate(steps):
        y = _TOP + _ROW * (index + 0.8)
        parts.append(_note(step, y) if isinstance(step, Note) else _arrow(step, y))
    bottom = _TOP + _ROW * (len(steps) + 1)
    parts += [_text(20, bottom + 22 * index, line) for index, line in enumerate(verdict)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(column: Column) -> int:
    return _LEFT + _GAP * column


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start", fill: str = "") -> str:
    colour = f' style="fill:{fill}"' if fill else ""
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}"{colour}>{escape(text)}</text>'


def _columns(bottom: float) -> list[str]:
    parts = []
    for column, name in _NAMES.items():
        parts.append(_text(_x(column), 68, name, "h", "middle"))
        parts.append(
            f'<line x1="{_x(column)}" y1="78" x2="{_x(column)}" y2="{bottom:g}" stroke="#afb8c1" '
            f'stroke-width="{1 if column is Column.NETWORK else 2}"/>'
        )
    return parts


def _note(note: Note, y: float) -> str:
    width = _x(Column.BROKER) - _x(Column.PRODUCER) + 40
    return (
        f'<rect x="{_LEFT - 20}" y="{y - 16:g}" width="{width}" height="24" fill="#f6f8fa" stroke="#d0d7de"/>'
        + _text(_x(Column.NETWORK), y, str(note), "n", "middle", _COLOURS[Tone.NOTE])
    )


def _arrow(arrow: Arrow, y: float) -> str:
    colour = _COLOURS[arrow.tone]
    start, end = _x(arrow.start), _x(arrow.end)
    dash = ' stroke-dasharray="6 4"' if arrow.tone is Tone.LOST else ""
    shaft = (
        f'<line x1="{start}" y1="{y:g}" x2="{end}" y2="{y:g}" stroke="{colour}" stroke-width="1.6"{dash}/>'
    )
    parts = [shaft, _tip(arrow, end, y, colour)]
    parts.append(_text(min(start, end) + 12, y - 6, arrow.text))
    if arrow.remark:
        parts.append(_text(_x(Column.BROKER) + 14, y + 4, arrow.remark, "r", fill=colour))
    return "".join(parts)


def _tip(arrow: Arrow, end: int, y: float, colour: str) -> str:
    """Return the SVG for the tip of an arrow: a head if the message arrives, a cross if it is lost, a circle
    if it is held.
    """
    if arrow.end is Column.NETWORK and arrow.tone is Tone.HELD:
        return f'<circle cx="{end}" cy="{y:g}" r="6" fill="#fff" stroke="{colour}" stroke-width="2"/>'
    if arrow.end is Column.NETWORK:
        cross = f"M{end - 6} {y - 6:g}l12 12m0 -12l-12 12"
        return f'<path d="{cross}" stroke="{colour}" stroke-width="2.4" fill="none"/>'
    back = -9 if arrow.end > arrow.start else 9
    return f'<path d="M{end} {y:g}l{back} -5v10z" fill="{colour}"/>'
