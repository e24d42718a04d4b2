"""The option `--watch`: run a command again and again until Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import io
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import click

from oncelog.cli.common import can_move_cursor, has_styles, say
from oncelog.cli.tables import fold, text_width
from oncelog.errors import OncelogError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_SECONDS = 2.0
_MIN_SECONDS, _MAX_SECONDS = 0.1, 86_400.0
_SETTLED_SECONDS = 0.1
"""Seconds for which a terminal must keep a new size before the next round begins."""


def _pause(seconds: float, *wake: socket.socket) -> bool:
    """Wait for `seconds`, or until one of the sockets is readable. Return whether one is."""
    if not wake:
        time.sleep(seconds)
        return False
    return bool(select.select(wake, [], [], seconds)[0])


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
        if sys.stdout.isatty() and can_move_cursor():
            _show_in_place(first, seconds)
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
            say(f"oncelog: {error}", err=True)
        self._is_first = False


class _Screen(io.StringIO):
    """A buffer for the output of one repetition. It claims to be a terminal, so that tables get the
    terminal's width and bold heads.
    """

    def isatty(self) -> bool:
        return True


def _show_in_place(rounds: _Rounds, seconds: float) -> None:
    frame, resized = _Frame(), _ResizeSignal()
    try:
        while True:
            screen = _Screen()
            with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
                rounds.show()
            head = f"every {seconds:g} s, {datetime.now().strftime('%H:%M:%S')}; Ctrl-C ends"
            head = click.style(head, dim=True) if has_styles() else head
            frame.show(f"{head}\n\n{screen.getvalue()}")
            resized.pause(seconds)
    finally:
        resized.close()
        frame.end()


class _ResizeSignal:
    """The terminal's SIGWINCH, which ends a pause: until the next round, the terminal would show rows that
    were made for its old size. Windows has no such signal.
    """

    def __init__(self) -> None:
        self._sockets: tuple[socket.socket, ...] = ()
        # Only the main thread may set a signal handler.
        if hasattr(signal, "SIGWINCH") and threading.current_thread() is threading.main_thread():
            self._sockets = socket.socketpair()
            for end in self._sockets:
                end.setblocking(False)
            self._previous = signal.signal(signal.SIGWINCH, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):  # enough signals are waiting
            self._sockets[1].send(b"\0")

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the terminal has a new size and keeps it for a moment."""
        # A window that is dragged to another size sends many signals.
        while _pause(seconds, *self._sockets[:1]):
            self._sockets[0].recv(4096)
            seconds = _SETTLED_SECONDS

    def close(self) -> None:
        """Restore the previous handler."""
        if self._sockets:
            signal.signal(signal.SIGWINCH, self._previous or signal.SIG_DFL)
        for end in self._sockets:
            end.close()


class _Frame:
    """Text at the cursor of a terminal, which the next text replaces."""

    def __init__(self) -> None:
        self._text = ""
        self._height = 0
        self._size = shutil.get_terminal_size()

    def show(self, text: str) -> None:
        """Replace the previous text. Rows that the terminal is not high enough for are left out."""
        self._text = text
        self._replace(is_cropped=True)

    def end(self) -> None:
        """Show the newest text with all its rows. This also overwrites the `^C` of the terminal."""
        if self._text:
            self._replace(is_cropped=False)

    def _replace(self, is_cropped: bool) -> None:
        size = shutil.get_terminal_size()
        if size != self._size and self._height:
            # The terminal may have moved the previous text while its size changed.
            click.clear()
            self._height = 0
        rows = [row for line in self._text.splitlines() for row in _rows(line, size.columns)]
        if is_cropped and len(rows) >= size.lines:
            rows = [*rows[: max(size.lines - 2, 0)], "..."[: size.columns]]
        up = f"\x1b[{self._height}A" if self._height else ""
        # Each row is erased just before it is written, and all rows are written together, to avoid flicker.
        frame = f"\r{up}" + "".join(f"\x1b[2K{row}\n" for row in rows) + "\x1b[J"
        click.echo(frame, nl=False, color=True)
        self._height, self._size = len(rows), size


def _rows(line: str, columns: int) -> list[str]:
    """Return the rows of a terminal that a line takes. A line loses its style if it takes several."""
    plain = click.unstyle(line)
    return [line] if text_width(plain) <= columns else fold(plain, columns)
