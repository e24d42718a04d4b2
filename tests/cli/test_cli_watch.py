"""`--watch` repeats commands that list or describe until Ctrl-C. No test waits."""

from __future__ import annotations

import io
import re
import socket
import sys
import termios
from collections.abc import Callable, Iterator

import click
import pytest
from support.cli import oncelog
from support.terminal import PseudoTerminal, Screen
from support.topics import new_topic

from oncelog.cli import watch
from oncelog.cli.common import emit
from oncelog.cli.main import COMMANDS, cli
from oncelog.errors import NotConnectedError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which each pause between two rounds is added, in seconds. Ctrl-C comes in the third
    pause.
    """
    seen: list[float] = []

    def pause(seconds: float, *wake: socket.socket) -> bool:
        seen.append(seconds)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(watch, "_pause", pause)
    return seen


def reading_commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in COMMANDS:
        group = cli.get_command(context, name)
        if isinstance(group, click.Group) and name != "profile":
            for verb, command in group.commands.items():
                if verb in ("list", "describe", "find-hanging", "sizes", "features", "versions"):
                    yield f"{name} {verb}", command


def test_every_command_that_lists_or_describes_can_be_repeated() -> None:
    found = dict(reading_commands())
    assert len(found) >= 17
    for name, command in found.items():
        assert any("--watch" in option.opts for option in command.params), name


@pytest.mark.parametrize(("arguments", "seconds"), [(["--watch"], 2.0), (["--watch", "0.5"], 0.5)])
def test_a_command_is_repeated_until_ctrl_c(
    arguments: list[str], seconds: float, ours: str, pauses: list[float]
) -> None:
    topic = new_topic(ours)
    got = oncelog("topics", "describe", topic, "-o", "jsonl", "-b", ours, *arguments)
    assert got.code == 0 and got.out.count(f'"topic": "{topic}"') == 3
    assert pauses == [seconds] * 3


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "my-group"])
def test_an_invalid_number_of_seconds_is_a_usage_error(seconds: str, ours: str) -> None:
    got = oncelog("groups", "describe", "--watch", seconds, "-b", ours)
    assert got.code == 2 and seconds in got.err
    if seconds == "my-group":
        assert "put --watch after the names" in got.err


def failing_after(rounds: int) -> Callable[[], None]:
    count = 0

    def show() -> None:
        nonlocal count
        count += 1
        if count > rounds:
            raise NotConnectedError("the broker is away")
        click.echo("fine")

    return show


def test_only_the_first_round_may_fail(pauses: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    watch.repeat(failing_after(1), 1)
    assert capsys.readouterr() == ("fine\n", "oncelog: the broker is away\n" * 2)
    with pytest.raises(NotConnectedError):
        watch.repeat(failing_after(0), 1)


def test_an_exit_code_does_not_end_the_repetition(pauses: list[float]) -> None:
    def show() -> None:
        raise SystemExit(3)

    watch.repeat(show, 1)
    assert len(pauses) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def new_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return the new standard output, which claims to be a terminal of 40 columns and 8 lines."""
    stdout = Terminal()
    for name, value in {"COLUMNS": "40", "LINES": "8", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", stdout)
    return stdout


def test_a_terminal_shows_the_newest_output_in_place(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = new_terminal(monkeypatch)
    click.echo("$ oncelog")
    watch.repeat(failing_after(2), 7)
    shown = Screen(terminal.getvalue(), 40, 8).rows
    assert shown[0] == "$ oncelog" and shown[1].startswith("every 7 s, ") and shown[1].endswith("Ctrl-C ends")
    assert shown[2:] == ["", "oncelog: the broker is away", ""]


def test_output_in_place_keeps_styles_unless_no_color(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = new_terminal(monkeypatch)
    watch.repeat(lambda: emit([{"topic": "flights"}], "table"), 1)
    assert "\x1b[1mTOPIC\x1b[0m" in terminal.getvalue() and "\x1b[2mevery" in terminal.getvalue()
    terminal = new_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    pauses.clear()
    watch.repeat(lambda: emit([{"topic": "flights"}], "table"), 1)
    assert "TOPIC\n" in terminal.getvalue() and not re.search(r"\x1b\[\d*m", terminal.getvalue())


def test_long_output_is_cropped_until_the_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    frame = watch._Frame()
    for round_ in "abc":
        frame.show("\n".join(f"{round_}{number}" for number in range(20)))
        assert Screen(terminal.getvalue(), 40, 8).rows == [
            *(f"{round_}{number}" for number in range(6)),
            "...",
            "",
        ]
    frame.end()
    assert Screen(terminal.getvalue(), 40, 8).rows == [*(f"c{number}" for number in range(20)), ""]


def test_shorter_output_leaves_nothing_of_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    frame = watch._Frame()
    frame.show("long line\nsecond\nthird")
    frame.show("short")
    assert Screen(terminal.getvalue(), 40, 8).rows == ["short", "", "", ""]


def test_lines_longer_than_the_terminal_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    frame = watch._Frame()
    for _ in range(3):
        frame.show("x" * 40 + "\n" + "y" * 50)
    assert Screen(terminal.getvalue(), 40, 8).rows == ["x" * 40, "y" * 40, "y" * 10, ""]


def test_a_terminal_of_a_new_size_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    frame = watch._Frame()
    frame.show("wide")
    monkeypatch.setenv("COLUMNS", "20")
    frame.show("narrow")
    assert terminal.getvalue().count("\x1b[2J") == 1
    assert Screen(terminal.getvalue(), 20, 8).visible == ["narrow", ""]


def test_a_terminal_without_control_sequences_gets_one_output_after_the_other(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = new_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    watch.repeat(failing_after(3), 1)
    assert terminal.getvalue() == "fine\n" * 3


def test_ctrl_c_leaves_the_newest_output_and_a_usable_terminal(ours: str) -> None:
    topic = new_topic(ours)
    command = [sys.executable, "-m", "oncelog.cli.main", "topics", "describe", topic, "--watch", "0.1"]
    with PseudoTerminal(100, 12) as terminal:
        before = termios.tcgetattr(terminal.device)
        process = terminal.start([*command, "-b", ours])
        terminal.read_until("Ctrl-C ends", count=3)
        terminal.type("\x03")
        assert process.wait(120) == 0
        assert termios.tcgetattr(terminal.device) == before
        head, empty, titles, *rows = terminal.screen().rows
        assert "\x1b[?" not in terminal.printed, "no mode of the terminal is changed"
    assert head.startswith("every 0.1 s, ") and empty == "" and titles.startswith("TOPIC ")
    assert rows[0].startswith(f"{topic} ") and rows[-1] == ""


def test_a_terminal_of_a_new_size_is_filled_again_at_once(ours: str) -> None:
    """With an hour between two rounds, only the change of the size can begin the next one."""
    topic = new_topic(ours)
    command = [sys.executable, "-m", "oncelog.cli.main", "configs", "describe", "--topic", topic, "--all"]
    with PseudoTerminal(100, 24) as terminal:
        process = terminal.start([*command, "--watch", "3600", "-b", ours])
        terminal.read_until("Ctrl-C ends")
        for columns, lines in ((44, 10), (120, 30), (120, 6), (36, 40)):
            terminal.resize(columns, lines)
            terminal.read_until("Ctrl-C ends")
            terminal.read_until("\n\x1b[J")
            visible = terminal.screen().visible
            assert len(visible) == lines and max(map(len, visible)) <= columns
            assert visible[0].startswith("every 3600 s, ") and visible[-2:] == ["...", ""]
            assert ("NAME" in visible[2]) == (columns == 120), "blocks replace a table that is too wide"
        terminal.type("\x03")
        assert process.wait(120) == 0


def test_the_mark_of_cropped_output_fits_a_terminal_of_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "1")
    monkeypatch.setenv("LINES", "4")
    frame = watch._Frame()
    for _ in range(3):
        frame.show("abcdefgh")
    assert Screen(terminal.getvalue(), 1, 4).rows == ["a", "b", ".", ""]
