"""Control characters and markup in names are printed as text, and have no effect on a terminal."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from oncelog.cli.common import emit, printable, say
from oncelog.runtime.event_log import _format_value

HOSTILE = [
    "[bold red]admin[/bold red]",
    "[/x]",
    "[link=http://evil.example]click[/link]",
    "esc\x1b[2J",
    "\x9b2J",
]


def test_markup_in_names_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    emit([{"group": name} for name in HOSTILE], "table")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["GROUP", *HOSTILE[:3], r"esc\x1b[2J", r"\x9b2J"]


def test_a_name_with_line_breaks_is_printed_in_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    emit([{"group": "two\nrows", "state": "a\tb"}], "table")
    assert r"two\nrows" in capsys.readouterr().out


def test_control_characters_of_names_are_escaped_in_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    for name in HOSTILE:
        say(f"deleted {name}")
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out
    assert printable("größe 日本\n\t") == "größe 日本\n\t"


def test_an_error_text_is_escaped() -> None:
    from oncelog.cli.main import _fail

    runner = CliRunner()
    with runner.isolation() as streams, pytest.raises(SystemExit):
        _fail(ValueError("topic \x1b[2J"), 1)
    assert b"\x1b" not in streams[1].getvalue() + streams[0].getvalue()


def test_the_log_quotes_control_characters() -> None:
    assert _format_value("a\x1b[2J") == r'"a\u001b[2J"'
    assert _format_value("plain") == "plain"
