"""Draws a sequence diagram in Unicode text, with three columns and two lines per message."""

from __future__ import annotations

from collections.abc import Iterable

from oncelog.explain.diagram import Arrow, Column, Note, Step, Tone

_GAP = 38
"""Number of characters between two columns."""

_MARGIN = 2
_WIDTH = _MARGIN + 2 * _GAP + 1
_HEADS = {Column.PRODUCER: "producer", Column.NETWORK: "network", Column.BROKER: "broker"}
_LOST, _HELD = "✗", "◍"
_LINE = {Tone.LOST: "╌", Tone.REFUSED: "─", Tone.REPEAT: "═"}


def draw_text(steps: Iterable[Step]) -> str:
    """Return the diagram as text that ends in a newline."""
    lines = [_head(), _columns()]
    for step in steps:
        lines += _note(step) if isinstance(step, Note) else _arrow(step)
    lines.append(_columns())
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _column(column: Column) -> int:
    return _MARGIN + _GAP * column


def _columns() -> str:
    return "".join("│" if index in {_column(column) for column in Column} else " " for index in range(_WIDTH))


def _head() -> str:
    line = [" "] * (_WIDTH + 8)
    for column, name in _HEADS.items():
        start = max(0, _column(column) - len(name) // 2)
        line[start : start + len(name)] = name
    return "".join(line)


def _note(note: Note) -> list[str]:
    text = f" {note} "
    return [_columns(), f"{text:┄^{_WIDTH + _MARGIN}}", _columns()]


def _arrow(arrow: Arrow) -> list[str]:
    return [*_label(arrow), _shaft(arrow) + ("  " + arrow.remark if arrow.remark else "")]


def _label(arrow: Arrow) -> list[str]:
    """Return the line above an arrow, with the arrow's text. The text begins at the arrow's left end, and is
    cut if it is too long.
    """
    left = min(arrow.start, arrow.end)
    line = list(_columns())
    room = _WIDTH - _column(left) - 2
    text = arrow.text if len(arrow.text) <= room else arrow.text[: room - 1] + "…"
    start = _column(left) + 2
    line[start : start + len(text)] = text
    return ["".join(line)]


def _shaft(arrow: Arrow) -> str:
    line = list(_columns())
    # A message that was held at the proxy and then lost there has an arrow without length: draw only a cross.
    if arrow.start is arrow.end:
        line[_column(arrow.end)] = _LOST
        return "".join(line)
    first, last = sorted((_column(arrow.start), _column(arrow.end)))
    stroke = _LINE.get(arrow.tone, "─")
    line[first + 1 : last] = stroke * (last - first - 1)
    middle = _column(Column.NETWORK)
    if first < middle < last:
        line[middle] = "┼"
    is_right = arrow.end > arrow.start
    line[_column(arrow.start)] = "├" if is_right else "┤"
    if arrow.start is Column.NETWORK:
        line[middle] = _HELD
    line[last - 1 if is_right else first + 1] = "►" if is_right else "◄"
    if arrow.end is Column.NETWORK:
        line[middle] = _HELD if arrow.tone is Tone.HELD else _LOST
    return "".join(line)
