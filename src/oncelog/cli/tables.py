"""Tables of text: columns side by side, or one block for each row if the terminal is too narrow."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import click

_GAP = "  "
_MIN_CELL = 14
"""Cells up to this width are not cut in a table. If the terminal is too narrow for that, rows are printed as
blocks.
"""
_MAX_UNFOLDED = 400
"""Columns of piped output are padded up to this width, so that one long name does not lengthen each row."""


def text_width(text: str) -> int:
    """Return the number of terminal columns of text without control characters."""
    return len(text) if text.isascii() else sum(map(_char_width, text))


@lru_cache(maxsize=4_096)
def _char_width(char: str) -> int:
    """Return 2 for wide characters, and 0 for accents and joiners, which belong to the character before."""
    # Vowels and final consonants of decomposed Korean syllables have no category of their own.
    if unicodedata.category(char) in ("Mn", "Mc", "Me", "Cf") or "\u1160" <= char <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def padded(text: str, width: int) -> str:
    """Return text padded with spaces to `width` terminal columns. A wide character takes two."""
    return text + " " * (width - text_width(text))


def fold(text: str, width: int) -> list[str]:
    """Return text as lines of at most `width` terminal columns, which end at spaces if possible."""
    if text_width(text) <= width:
        return [text]
    lines, line, used = [], "", 0
    for word in re.findall(" *[^ ]+| +$", text):
        if line and used + text_width(word) > width:
            lines.append(line)
            line, used, word = "", 0, word.lstrip(" ")
        word_width = text_width(word)
        if used + word_width <= width:
            line, used = line + word, used + word_width
            continue
        for char in word:
            char_width = _char_width(char)
            if line and used + char_width > width:
                lines.append(line)
                line, used = "", 0
            line, used = line + char, used + char_width
    return [*lines, line]


def table(
    titles: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    numeric: Sequence[bool],
    columns: int | None,
    bold: bool = False,
) -> str:
    """Return rows of cells below titles, as text that fits in `columns` of a terminal.

    Cells of `numeric` columns are right-aligned. Without `columns`, each row is one line of any width. `bold`
    makes titles bold with a control sequence.
    """
    widths = [max(map(text_width, cells_of)) for cells_of in zip(titles, *cells, strict=True)]
    if columns is None:
        widths = [min(width, _MAX_UNFOLDED) for width in widths]
    elif needed_columns(titles, cells) > columns:
        return blocks(titles, cells)
    else:
        widths = _narrowed(widths, _least_widths(titles, cells), columns)
    lines = []
    for row in [titles, *cells]:
        parts = [[cell] if columns is None else fold(cell, at) for cell, at in zip(row, widths, strict=True)]
        for index in range(max(map(len, parts), default=0)):
            line = [part[index] if index < len(part) else "" for part in parts]
            text = _GAP.join(map(_aligned, line, widths, numeric)).rstrip()
            lines.append(click.style(text, bold=True) if bold and row is titles else text)
    return "".join(f"{line}\n" for line in lines)


def _aligned(text: str, width: int, is_numeric: bool) -> str:
    return " " * (width - text_width(text)) + text if is_numeric else padded(text, width)


def _least_widths(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    """Return the least width of each column that cuts no word of its title and no short cell."""
    return [
        max(*map(text_width, title.split()), min(max(map(text_width, cells_of), default=0), _MIN_CELL), 1)
        for title, *cells_of in zip(titles, *cells, strict=True)
    ]


def needed_columns(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Return the width of the narrowest table in which no word of a title and no short cell (`_MIN_CELL`) is
    cut.
    """
    return sum(_least_widths(titles, cells)) + len(_GAP) * max(len(titles) - 1, 0)


def _narrowed(widths: Sequence[int], least: Sequence[int], columns: int) -> list[int]:
    """Return the widths of columns that fit in a terminal. The widest column loses space first."""
    narrowed = [min(width, columns) for width in widths]
    available = columns - len(_GAP) * (len(widths) - 1)
    while sum(narrowed) > available:
        widest = max(range(len(widths)), key=lambda index: (narrowed[index] > least[index], narrowed[index]))
        narrowed[widest] -= 1
    return narrowed


def blocks(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return the rows as text: one line with title and value per cell, and an empty line between rows."""
    width = max(map(len, titles), default=0)
    return "\n".join(
        "".join(f"{padded(title, width)}  {cell}\n" for title, cell in zip(titles, line, strict=True))
        for line in cells
    )
