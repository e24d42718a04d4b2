"""A pseudo-terminal in which a command runs, and a screen that shows what was printed on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Sequence
from typing import Any, Self

from support.wait import LIMIT_S

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|(?s:.)")
_IN_SESSION = """
import fcntl, os, sys, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Screen:
    """The rows that a terminal shows, and those that it has scrolled away.

    It knows narrow characters and the control sequences that commands print. Styles are ignored.
    """

    def __init__(self, text: str, columns: int, lines: int) -> None:
        self._columns, self._lines = columns, lines
        self._cells: list[list[str]] = [[]]
        self._row = self._column = 0
        for match in _TOKEN.finditer(text):
            if match[2] is None:
                self._put(match[0])
            else:
                self._control(match[1], match[2])

    @property
    def rows(self) -> list[str]:
        """All rows, from the oldest one down to the lowest one that the cursor reached."""
        return ["".join(cells).rstrip() for cells in self._cells]

    @property
    def visible(self) -> list[str]:
        return self.rows[self._top :]

    @property
    def _top(self) -> int:
        return max(len(self._cells) - self._lines, 0)

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._row, self._column = self._row + 1, 0
            self._cells += [[] for _ in range(self._row + 1 - len(self._cells))]
        else:
            assert char.isprintable() and char.isascii(), repr(char)
            if self._column == self._columns:
                self._put("\n")
            cells = self._cells[self._row]
            cells += " " * (self._column + 1 - len(cells))
            cells[self._column] = char
            self._column += 1

    def _control(self, arguments: str, name: str) -> None:
        cells = self._cells
        match name, arguments:
            case "A", count:
                self._row = max(self._row - int(count), self._top)
            case "K", "":
                del cells[self._row][self._column :]
            case "K", "2":
                cells[self._row].clear()
            case "J", "":
                del cells[self._row][self._column :]
                for row in cells[self._row + 1 :]:
                    row.clear()
            case "J", "2":
                for row in cells[self._top :]:
                    row.clear()
            case "H", "1;1":
                self._row, self._column = self._top, 0
            case "m", _:
                pass
            case _:
                raise AssertionError(f"unknown control sequence {arguments}{name}")


class PseudoTerminal:
    """A pseudo-terminal. `start` runs one command in it, in a session of its own, as a shell does."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self._controller, self.device = pty.openpty()
        termios.tcsetwinsize(self.device, (lines, columns))
        self.printed = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        os.close(self.device)
        os.close(self._controller)

    def start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        """Run a command whose standard streams are the terminal, except those in `streams`."""
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_SESSION, *command],
            **{"stdin": self.device, "stdout": self.device, "stderr": self.device, **streams},
            env=environment | {"TERM": "xterm"},
            text=True,
            start_new_session=True,
        )
        return self._process

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, of which the system sends the command a signal.

        `screen` then knows only what is printed from now on.
        """
        self.screen()
        self.columns, self.lines, self.printed = columns, lines, ""
        termios.tcsetwinsize(self._controller, (lines, columns))

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def read_until(self, text: str, count: int = 1) -> None:
        """Read what the command prints until all of it has the text `count` times."""
        while self.printed.count(text) < count:
            assert self._read(LIMIT_S), f"no {text!r} in {self.printed!r}"

    def screen(self) -> Screen:
        """Return the screen after everything that has been printed up to now."""
        while self._read(0):
            pass
        return Screen(self.printed, self.columns, self.lines)

    def _read(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._controller], [], [], seconds)
        if readable:
            self.printed += os.read(self._controller, 65_536).decode()
        return bool(readable)
