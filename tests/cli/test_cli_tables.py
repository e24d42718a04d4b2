"""Tables of text: widths of characters, folded cells, and columns that fit in a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.cli.tables import blocks, fold, needed_columns, padded, table, text_width

NARROW, WIDE, COMBINING = "aZ0-_.[]ß", "日本語한국あ", "\u0301\u200d"
TEXTS = st.text(st.sampled_from(NARROW + WIDE + COMBINING + "  "), max_size=60)


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("flights", 7),
        ("größe", 5),
        ("日本語", 6),
        ("한국", 4),
        ("\u1112\u1161\u11ab", 2),  # one syllable, decomposed
        ("e\u0301", 1),
        ("ａ", 2),
        ("a\u200db", 2),
        ("नमस्ते", 4),
        ("🚀", 2),
    ],
)
def test_text_is_as_wide_as_a_terminal_shows_it(text: str, width: int) -> None:
    assert text_width(text) == width
    assert padded(text, 12) == text + " " * (12 - width)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("transactions", ["transa", "ctions"]),
        ("ab cd ef", ["ab cd", "ef"]),
        ("ab transactions", ["ab", "transa", "ctions"]),
        ("a日本語", ["a日本", "語"]),
        ("日本語東京", ["日本語", "東京"]),
        ("abcdee\u0301f", ["abcdee\u0301", "f"]),
    ],
)
def test_text_is_folded_at_spaces_or_else_anywhere(text: str, lines: list[str]) -> None:
    assert fold(text, 6) == lines


@given(TEXTS, st.integers(2, 20))
def test_folding_loses_nothing_but_spaces(text: str, width: int) -> None:
    lines = fold(text, width)
    assert all(text_width(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_columns_are_aligned_and_numbers_are_on_the_right() -> None:
    cells = [["日本", "7", "x"], ["flights", "1234", "[y]"]]
    assert table(["TOPIC", "LAG", "GROUP"], cells, numeric=[False, True, False], columns=80) == (
        "TOPIC     LAG  GROUP\n日本        7  x\nflights  1234  [y]\n"
    )


def test_the_widest_column_is_folded_first() -> None:
    cells = [["a" * 30, "7", "two words of a name"]]
    assert table(["TOPIC", "LAG", "GROUP NAME"], cells, numeric=[False, True, False], columns=38) == (
        "TOPIC            LAG  GROUP NAME\naaaaaaaaaaaaaaa    7  two words of a\naaaaaaaaaaaaaaa       name\n"
    )


def test_only_titles_are_bold() -> None:
    text = table(["A", "B"], [["x", "y"]], numeric=[False, False], columns=80, bold=True)
    assert text == "\x1b[1mA  B\x1b[0m\nx  y\n"


def test_without_a_width_each_row_is_one_line_and_a_long_name_does_not_widen_others() -> None:
    cells = [["a" * 30_000, "x"], ["b", "y"]]
    lines = table(["GROUP", "STATE"], cells, numeric=[False, False], columns=None).splitlines()
    assert lines[1] == f"{cells[0][0]}  x"
    assert [len(lines[0]), len(lines[2])] == [400 + 2 + 5, 400 + 2 + 1]


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=4), st.integers(5, 60))
def test_a_table_fits_or_its_rows_are_blocks(rows: list[tuple[str, str, str]], columns: int) -> None:
    titles = ["TOPIC", "END OFFSET", "HELD BACK BY"]
    text = table(titles, rows, numeric=[False, True, False], columns=columns)
    if needed_columns(titles, rows) > columns:
        assert text == blocks(titles, rows)
    else:
        assert max(map(text_width, text.splitlines())) <= columns


def test_the_narrowest_table_keeps_words_of_titles_and_short_cells() -> None:
    assert needed_columns(["A B", "CC"], [["x", "y" * 50]]) == 1 + 2 + 14
    assert needed_columns(["LONG TITLE"], []) == 5
    assert needed_columns([], []) == 0
    assert blocks([], []) == "" == blocks(["A"], [])
    assert table([], [], numeric=[], columns=80) == ""
