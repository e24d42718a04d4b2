"""The driver of the pipeline under trial: a process that is started and killed."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from oncelog.pipeline.process import ChildProcess
from oncelog.pipeline.restart_policy import ExitInfo, ExitKind
from oncelog.trial.plan import Strike


class Driver:
    """The process of a pipeline and its JVM. Use it as a context manager, which kills both at the end.

    Output of all starts is appended to `log_file`. `control` is the directory for `fault_point`.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        settings: Mapping[str, str],
        log_file: Path,
        control: Path,
        strike: Strike | None,
    ) -> None:
        self._job, self._settings, self._log_file = job, settings, log_file
        command = (sys.executable, "-m", "oncelog.trial.child", str(control))
        self._command = command if strike is None else (*command, strike.value)
        self._stack = ExitStack()
        self._child: ChildProcess | None = None
        self._thread: threading.Thread | None = None
        self.query_id: str | None = None
        self.exit_info: ExitInfo | None = None
        """The way in which the last process ended; None while a process is running."""

    def start(self) -> None:
        """Start the process. Raises OSError if this fails."""
        self.exit_info = None
        with self._log_file.open("ab") as log:
            job = {**self._job, "query_id": self.query_id}
            child = ChildProcess(job, self._settings, self._command, output=log)
        self._child = self._stack.enter_context(child)
        wake, other_end = socket.socketpair()
        self._stack.enter_context(wake)
        self._stack.enter_context(other_end)
        self._thread = threading.Thread(target=self._watch, args=(child, wake), daemon=True)
        self._thread.start()

    def _watch(self, child: ChildProcess, wake: socket.socket) -> None:
        """Read the process's events until it has ended, and set `query_id` and `exit_info`."""
        exit_info: ExitInfo | None = None
        while (events := child.events(wake, is_ending=exit_info is not None)) is not None:
            for event in events:
                match event["event"]:
                    case "started":
                        self.query_id = event["query_id"]
                    case "ended":
                        exit_info = exit_info or ExitInfo(ExitKind(event["ending"]), event.get("error"))
        self.exit_info = exit_info or ExitInfo(ExitKind.DIED, "the driver's process died")

    def kill(self) -> None:
        """Kill the process and its JVM with SIGKILL, and wait until both have ended."""
        if self._child is None or self._thread is None:
            return
        self._child.kill()
        self._thread.join()
        self._child = self._thread = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
