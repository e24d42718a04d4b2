"""The lines at which a function of foreachBatch waits: the driver can be killed, or a line can fail.

The driver announces each line before it executes it, in a file `at-line` of the control directory, and waits.
The trial counts the writes, and removes the file unless it kills the driver. So a step that directly follows
the write is not done before the kill. A line is announced once for each line that it can follow, because a
loop would take too long. It is also announced again when a function of the user that it has called returns.
Only code of the user is announced, not that of installed packages.

The place that writes is found in an earlier micro-batch: it is the last one that was announced before there
was a write. Guard: test_the_line_that_writes_is_the_last_one_before_there_is_a_write. A place is a line with
the number of its announcements so far. A `with` line begins a transaction at its first one, and commits at
its second one. The file `fail` of the control directory lets the announced line raise an error instead of
executing it.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import oncelog

AT_LINE, FAIL, FAILED, FUNCTION = "at-line", "fail", "failed", "function"
_POLL_S = 0.002
_TIMEOUT_S = 60.0
"""The longest wait for the trial, in seconds. It looks every few milliseconds unless it has ended."""


_PACKAGES = ("site-packages", "dist-packages")
_announcing = threading.Lock()
"""Only one line at a time is announced, because a file may start several queries."""
_FIRST = "1: "
"""The beginning of the text of a place whose line was not announced before in the micro-batch."""
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class WriteFault(ConnectionError):
    """The error of a line that the trial makes fail."""


def _directories_of_packages() -> tuple[str, ...]:
    """Return directories whose code is not the user's, in addition to _PACKAGES."""
    paths = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(oncelog.__file__).parent),
    ]
    if home := os.environ.get("SPARK_HOME"):
        paths.append(os.path.join(home, "python"))
    return tuple(os.path.join(path, "") for path in paths)


class LineAnnouncer:
    """Calls functions, and announces each line of them and of the user's functions that they call."""

    def __init__(self, control: Path) -> None:
        self._control, self._file = control, control / AT_LINE
        self._packages = _directories_of_packages()
        self._seen: set[tuple[str, str]] = set()
        self._times: Counter[str] = Counter()
        """Line -> the number of its announcements in this micro-batch."""
        self._last = ""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result. Only this thread is traced."""
        before, self._last = sys.gettrace(), ""
        self._seen.clear()
        self._times.clear()
        sys.settrace(self._trace_call)
        try:
            return function(*arguments)
        finally:
            sys.settrace(before)

    def _trace_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._trace_line if self._is_users(frame) else None

    def _trace_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            self._announce("", frame)
        elif event == "return" and not frame.f_code.co_flags & _GENERATORS:
            # The calling line may write now. Leave out generators, whose `yield` is a return, too.
            self._announce(f"{frame.f_code.co_name}() has returned to ", frame.f_back)
        return self._trace_line

    def _is_users(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        return not name.startswith(("<", *self._packages)) and not any(map(name.__contains__, _PACKAGES))

    def _announce(self, what: str, frame: FrameType | None) -> None:
        """Announce the line of a frame and the lines that have called it, and wait for the trial."""
        if frame is None or frame.f_code is _CALL:
            # The function of foreachBatch has returned, and nothing follows it.
            return
        lines = []
        above: FrameType | None = frame
        while above is not None and above.f_code is not _CALL:
            if self._is_users(above):
                lines.append(f"{above.f_code.co_filename}:{above.f_lineno}")
            above = above.f_back
        # Without lines, a package has called the user's function, and may commit now. Guard:
        # test_a_place_is_also_the_end_of_a_function_that_a_package_has_called.
        line = what + (" < ".join(lines) or "a package")
        step, self._last = (self._last, line), line
        if step in self._seen:
            return
        self._seen.add(step)
        self._times[line] += 1
        with _announcing:
            self._wait_at(f"{self._times[line]}: {line}")

    def _wait_at(self, line: str) -> None:
        temporary = self._file.with_name(f".{AT_LINE}")
        temporary.write_text(line)
        temporary.rename(self._file)
        deadline = time.monotonic() + _TIMEOUT_S
        while self._file.exists() and time.monotonic() < deadline:
            _pause()
        if (self._control / FAIL).exists():
            (self._control / FAIL).rename(self._control / FAILED)
            raise WriteFault("oncelog trial: the line that writes rows fails once")


_CALL = LineAnnouncer.call.__code__


def _pause() -> None:
    time.sleep(_POLL_S)


class HeldLines:
    """The trial's view of these lines."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self._line: str | None = None
        self._last_lines: tuple[str | None, str | None] = (None, None)
        """The last two lines that were announced, the newer one last."""
        self._writes = 0
        self._is_armed = False
        self._writing_line: str | None = None
        self._failing_line: str | None = None

    def read(self) -> None:
        """Read the line at which the driver waits. Call this before the writes are counted."""
        try:
            self._line = (self._control / AT_LINE).read_text()
        except FileNotFoundError:
            self._line = None

    def look(self, writes: int | None) -> None:
        """Note the number of writes, which was counted after `read`; None if they cannot be counted now,
        because the function locks the target. Guard: test_a_line_within_a_lock_may_be_the_line_that_writes.
        """
        if writes is not None and writes > self._writes and self._writing_line is None:
            before, self._writing_line = self._last_lines
            # At the end of a `with` block, the error would leave its transaction open, and a later
            # micro-batch might commit it. So the last line in the block fails. Guard:
            # test_the_line_before_the_end_of_a_with_block_fails.
            is_first = self._writing_line is None or self._writing_line.startswith(_FIRST)
            self._failing_line = self._writing_line if is_first else before
        self._writes = self._writes if writes is None else writes
        if self._line is not None and self._line != self._last_lines[1]:
            self._last_lines = self._last_lines[1], self._line

    def arm(self) -> None:
        """Let the line that writes raise an error, once; at the end of a `with` block, the line before."""
        self._is_armed = True

    def release(self) -> None:
        """Let the driver execute the line that `read` has found."""
        if self._is_armed and self._line is not None and self._line == self._failing_line:
            self._is_armed = False
            (self._control / FAIL).touch()
        if self._line is not None:
            (self._control / AT_LINE).unlink(missing_ok=True)

    @property
    def is_before_write(self) -> bool:
        """True if the driver waits at the line that wrote rows in an earlier micro-batch."""
        return self._line is not None and self._line == self._writing_line

    @property
    def has_failed(self) -> bool:
        """True if the line that writes has raised an error."""
        return (self._control / FAILED).exists()

    @property
    def has_function(self) -> bool:
        """True if the query has a function of foreachBatch."""
        return (self._control / FUNCTION).exists()
