"""`--watch` repeats commands that list or describe until Ctrl-C. No test waits."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import click
import pytest
from rich.console import Console
from support.cli import oncelog
from support.topics import new_topic

from oncelog.cli import watch
from oncelog.cli.main import COMMANDS, cli
from oncelog.errors import NotConnectedError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which each pause between two rounds is added, in seconds. Ctrl-C comes in the third
    pause.
    """
    seen: list[float] = []

    def pause(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == 3:
            raise KeyboardInterrupt

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


def test_a_terminal_shows_the_newest_output_in_place(pauses: list[float]) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=20)
    with pytest.raises(KeyboardInterrupt):
        watch._show_in_place(watch._Rounds(failing_after(2)), 7, console)
    text = screen.getvalue()
    assert "every 7 s, " in text and "Ctrl-C ends" in text
    assert text.count("fine") >= 2 and text.rindex("the broker is away") > text.rindex("fine")
    assert "\x1b[2K" in text, "earlier lines are erased"
