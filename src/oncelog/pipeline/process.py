"""The supervisor's view of the child process: its events, requests to stop it, and its end."""

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
from typing import IO, Any, Self

CHILD = (sys.executable, "-m", "oncelog.pipeline.child")
_GRACE_S = 30.0
"""Time in seconds that a Spark session gets to stop after its query has ended."""
_JVM_EXIT_S = 5.0
"""Time in seconds that a JVM gets to exit after its driver has ended."""
_POLL_S = 0.05
_EXIT_POLL_S = 1.0
"""Interval in seconds at which the supervisor checks that the process is running."""


class ChildProcess:
    """The child process, as a context manager. It has its own session, so Ctrl-C in the terminal does not
    reach it.

    The exit of the `with` block waits until the process, its JVM and all others in its process group have
    ended, and kills them if they do not end in time. A restarted query must not run beside the old JVM. The
    constructor raises OSError if the process cannot be started. `output`: the file for the child's standard
    output and error; by default the child writes to those of this process.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        settings: Mapping[str, str],
        command: Sequence[str],
        *,
        output: IO[bytes] | None = None,
    ) -> None:
        self._reports, reports = os.pipe()
        self._partial = b""
        self._deadline: float | None = None
        self._is_stop_requested = False
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[reports],
                env={**os.environ, **settings},
                start_new_session=True,
            )
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(reports)
        self._send_line(json.dumps({**job, "report_fd": reports}))

    def _send_line(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # Ignore the error: the child has died, and `events` will return None.
            pass

    def stop(self) -> None:
        """Request a stop after the running micro-batch. Calls after the first one do nothing."""
        if not self._is_stop_requested:
            self._is_stop_requested = True
            self._send_line("stop")

    def kill(self) -> None:
        """Kill the process and its JVM with SIGKILL."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def events(self, wake: socket.socket, *, is_ending: bool) -> list[dict[str, Any]] | None:
        """Wait for events of the child and return them. Return None if the child will send no more.

        The list is empty if `wake` becomes readable first, which happens after a signal. `is_ending`: True if
        the query has ended. The process is then killed if it does not end within _GRACE_S.
        """
        if is_ending and self._deadline is None:
            self._deadline = time.monotonic() + _GRACE_S
        while True:
            # Poll the process. The pipe's end is not enough, because a process that the child forked may keep
            # the pipe open. See test_a_query_whose_helper_process_survives_it_is_started_again. This check
            # comes before the select, so that the process's last events are still read.
            has_exited = self._process.poll() is not None
            timeout_s = 0.0 if has_exited else _EXIT_POLL_S
            if self._deadline is not None:
                timeout_s = min(timeout_s, max(0.0, self._deadline - time.monotonic()))
            readable, _, _ = select.select([self._reports, wake.fileno()], [], [], timeout_s)
            if self._reports in readable:
                return self._read_events()
            if readable:
                return []
            if has_exited:
                return None
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.kill()
                return None

    def _read_events(self) -> list[dict[str, Any]] | None:
        """Return the complete events in the pipe, or None at its end."""
        data = os.read(self._reports, 1 << 16)
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def exit_text(self) -> str:
        """The child's exit code, or the name of the signal that killed it."""
        code = self._process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.kill()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        # Without its driver, the JVM cleans up and exits. Wait for this, and kill the processes that remain:
        # the next run must not start before the JVM has exited.
        self._wait_for_group()
        self.kill()
        self._wait_for_group()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._reports)

    def _wait_for_group(self) -> None:
        deadline = time.monotonic() + _JVM_EXIT_S
        while self._is_group_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _is_group_alive(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True
