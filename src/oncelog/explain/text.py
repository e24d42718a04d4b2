"""A sequence diagram in Unicode text: three columns, one message on two lines."""

from __future__ import annotations

from collections.abc import Iterable

from oncelog.explain.diagram import Arrow, Lane, Note, Step, Tone

_GAP = 38
"""Characters between two columns."""

_MARGIN = 2
_WIDTH = _MARGIN + 2 * _GAP + 1
_HEADS = {Lane.PRODUCER: "producer", Lane.NETWORK: "network", Lane.BROKER: "broker"}
_LOST, _HELD = "✗", "◍"
_LINE = {Tone.LOST: "╌", Tone.REFUSED: "─", Tone.REPEAT: "═"}


def draw_text(steps: Iterable[Step]) -> str:
    """The whole diagram, ending with a newline."""
    lines = [_head(), _lanes()]
    for step in steps:
        lines += _note(step) if isinstance(step, Note) else _arrow(step)
    lines.append(_lanes())
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _column(lane: Lane) -> int:
    return _MARGIN + _GAP * lane


def _lanes() -> str:
    return "".join("│" if index in {_column(lane) for lane in Lane} else " " for index in range(_WIDTH))


def _head() -> str:
    line = [" "] * (_WIDTH + 8)
    for lane, name in _HEADS.items():
        start = max(0, _column(lane) - len(name) // 2)
        line[start : start + len(name)] = name
    return "".join(line)


def _note(note: Note) -> list[str]:
    text = f" {note} "
    return [_lanes(), f"{text:┄^{_WIDTH + _MARGIN}}", _lanes()]


def _arrow(arrow: Arrow) -> list[str]:
    return [*_label(arrow), _shaft(arrow) + ("  " + arrow.remark if arrow.remark else "")]


def _label(arrow: Arrow) -> list[str]:
    """The text above the shaft, from the left column it touches."""
    left = min(arrow.start, arrow.end)
    line = list(_lanes())
    room = _WIDTH - _column(left) - 2
    text = arrow.text if len(arrow.text) <= room else arrow.text[: room - 1] + "…"
    start = _column(left) + 2
    line[start : start + len(text)] = text
    return ["".join(line)]


def _shaft(arrow: Arrow) -> str:
    line = list(_lanes())
    if arrow.start is arrow.end:  # it waited there and is lost
        line[_column(arrow.end)] = _LOST
        return "".join(line)
    first, last = sorted((_column(arrow.start), _column(arrow.end)))
    stroke = _LINE.get(arrow.tone, "─")
    line[first + 1 : last] = stroke * (last - first - 1)
    middle = _column(Lane.NETWORK)
    if first < middle < last:
        line[middle] = "┼"
    is_right = arrow.end > arrow.start
    line[_column(arrow.start)] = "├" if is_right else "┤"
    if arrow.start is Lane.NETWORK:
        line[middle] = _HELD
    line[last - 1 if is_right else first + 1] = "►" if is_right else "◄"
    if arrow.end is Lane.NETWORK:
        line[middle] = _HELD if arrow.tone is Tone.HELD else _LOST
    return "".join(line)
