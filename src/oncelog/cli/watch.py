"""The option `--watch`: run a command again and again until Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import click

from oncelog.errors import OncelogError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_SECONDS = 2.0
_MIN_SECONDS, _MAX_SECONDS = 0.1, 86_400.0
_pause = time.sleep


class _SecondsType(click.ParamType):  # type: ignore[type-arg]
    name = "seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(str(value))
        except ValueError:
            # In `describe --watch NAME`, click takes NAME as the value of --watch.
            self.fail(f"{value!r} is not a number of seconds; put --watch after the names", param, ctx)
        if not _MIN_SECONDS <= seconds <= _MAX_SECONDS:
            self.fail(f"{value!r}: expected {_MIN_SECONDS:g} to {_MAX_SECONDS:g} seconds", param, ctx)
        return seconds


def watch_option(function: F) -> F:
    """Add `--watch [SECONDS]` to a read-only command."""

    @click.option(
        "--watch",
        "watch_seconds",
        type=_SecondsType(),
        is_flag=False,
        flag_value=str(DEFAULT_SECONDS),
        metavar="[SECONDS]",
        help=f"Repeat every {DEFAULT_SECONDS:g} or SECONDS seconds until Ctrl-C.",
    )
    @functools.wraps(function)
    def wrapper(*args: Any, watch_seconds: float | None, **kwargs: Any) -> Any:
        if watch_seconds is None:
            return function(*args, **kwargs)
        repeat(lambda: function(*args, **kwargs), watch_seconds)
        return None

    return wrapper  # type: ignore[return-value]


def repeat(show: Callable[[], object], seconds: float) -> None:
    """Call `show` every `seconds` until Ctrl-C. On a terminal each output replaces the previous one;
    otherwise each output is appended.
    """
    first = _Rounds(show)
    with contextlib.suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            from rich.console import Console

            _show_in_place(first, seconds, Console())
            return
        while True:
            first.show()
            sys.stdout.flush()
            _pause(seconds)


class _Rounds:
    """The repetitions (rounds) of a watched command. Only an error in the first round ends the command.

    In later rounds the error is printed, because the broker may be unavailable for a while.
    """

    def __init__(self, show: Callable[[], object]) -> None:
        self._show = show
        self._is_first = True

    def show(self) -> None:
        try:
            self._show()
        except SystemExit:
            pass  # an exit code, such as 3 of find-hanging, does not end the repetition
        except (OncelogError, click.ClickException) as error:
            if self._is_first:
                raise
            from oncelog.cli.common import say

            say(f"oncelog: {error}", err=True)
        self._is_first = False


class _Screen(io.StringIO):
    """A buffer for the output of one repetition. It claims to be a terminal, so that tables get the
    terminal's width and bold heads.
    """

    def isatty(self) -> bool:
        return True


def _show_in_place(rounds: _Rounds, seconds: float, console: Any) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        while True:
            screen = _Screen()
            with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
                rounds.show()
            head = f"every {seconds:g} s, {datetime.now().strftime('%H:%M:%S')}; Ctrl-C ends\n\n"
            live.update(Text.assemble((head, "dim"), Text.from_ansi(screen.getvalue())), refresh=True)
            _pause(seconds)
