"""The child process as its supervisor holds it: events from it, the word to stop, and its end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

CHILD = (sys.executable, "-m", "oncelog.pipeline.child")
_GRACE_S = 30.0
"""For a session to stop after the query has ended."""
_LEFT_BEHIND_S = 5.0
"""For a JVM to notice that its driver has gone."""
_POLL_S = 0.05


class ChildProcess:
    """Starts `command` in a session of its own, out of reach of the terminal's Ctrl-C.

    A context manager: behind it, the process, its JVM and whatever else was in its group are gone.
    """

    def __init__(self, job: Mapping[str, Any], settings: Mapping[str, str], command: Sequence[str]) -> None:
        self._reports, reports = os.pipe()
        self._held = b""
        self._deadline: float | None = None
        self._is_told_to_stop = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[reports],
            env={**os.environ, **settings},
            start_new_session=True,
        )
        os.close(reports)
        self._say(json.dumps({**job, "report_fd": reports}))

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died, and its events end

    def stop(self) -> None:
        """After the micro-batch that runs. Only the first call counts."""
        if not self._is_told_to_stop:
            self._is_told_to_stop = True
            self._say("stop")

    def kill(self) -> None:
        """Now, JVM included."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def events(self, wake: socket.socket, *, is_ending: bool) -> list[dict[str, Any]] | None:
        """Wait for events, or until `wake` can be read (then perhaps none); None: there are no more.

        `is_ending`: the query has ended, so the process must end soon too.
        """
        if is_ending and self._deadline is None:
            self._deadline = time.monotonic() + _GRACE_S
        patience = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        readable, _, _ = select.select([self._reports, wake.fileno()], [], [], patience)
        if not readable:
            self.kill()
            return None
        if self._reports not in readable:
            return []
        data = os.read(self._reports, 1 << 16)
        if not data:
            return None
        *lines, self._held = (self._held + data).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def how_it_died(self) -> str:
        """Its exit code or signal."""
        code = self._process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            self.kill()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        # The JVM notices by itself that it is alone and clears up; the next run must not meet it.
        self._await_group()
        self.kill()
        self._await_group()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._reports)

    def _await_group(self) -> None:
        deadline = time.monotonic() + _LEFT_BEHIND_S
        while self._group_lives() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _group_lives(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True
