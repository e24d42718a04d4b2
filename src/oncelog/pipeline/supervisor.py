"""Keeps a streaming query running in a child process. `restart_policy` decides what follows each exit.

After the first SIGTERM or SIGINT, the running micro-batch finishes. The second signal kills the query.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, assert_never

from oncelog.pipeline.process import CHILD, ChildProcess
from oncelog.pipeline.restart_policy import (
    EXIT_DONE,
    EXIT_REFUSED,
    ExitInfo,
    ExitKind,
    History,
    Limits,
    Restart,
    Stop,
    decide_next,
)
from oncelog.runtime.event_log import log_event

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KILLED_BY_SIGNAL = 128
"""The exit code for a process killed by a signal is this number plus the signal's number, as in shells."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline to run.

    `settings`: environment variables of the child, added to the supervisor's. `conf`: Spark's configuration.
    """

    file: Path
    settings: dict[str, str] = field(default_factory=dict)
    master: str = "local[*]"
    conf: dict[str, str] = field(default_factory=dict)
    status_file: Path | None = None


class Supervisor:
    """Runs one pipeline until it ends. It installs signal handlers, so it works only in the main thread."""

    def __init__(self, pipeline: Pipeline, limits: Limits, child: Sequence[str] = CHILD) -> None:
        self._pipeline, self._limits, self._child = pipeline, limits, child
        self._history = History()
        self._query_id: str | None = None
        self._signals: list[int] = []
        self._wake = socket.socketpair()
        self._status: dict[str, Any] = {"pipeline": str(pipeline.file), "pid": os.getpid(), "runs": 0}

    def run(self) -> int:
        """Run the pipeline and return the exit code.

        0: ended or stopped. 1: gave up. 2: cannot succeed without a change. 128+N: signal N was the second
        signal, and the query was killed.
        """
        with self._handling_signals():
            while True:
                exit_info = self._run_once()
                if exit_info.kind is ExitKind.DIED and len(self._signals) > 1:
                    self._set_state("warning", "broken_off")
                    return _KILLED_BY_SIGNAL + self._signals[-1]
                verdict = decide_next(
                    exit_info.kind,
                    History(self._history.failed_at_ms, self._query_id is not None, bool(self._signals)),
                    self._limits,
                    now_ms=time.monotonic_ns() // 1_000_000,
                    jitter=random.random(),
                )
                match verdict:
                    case Stop(code):
                        self._report_stop(code, exit_info.error)
                        return code
                    case Restart(pause_ms, failed_at_ms):
                        self._history = History(failed_at_ms)
                        self._set_state("warning", "waiting", error=exit_info.error, restart_in_ms=pause_ms)
                        if self._sleep_until_signal(pause_ms / 1000):
                            self._set_state("info", "stopped", error=None)
                            return EXIT_DONE
                    case _:
                        assert_never(verdict)

    def _report_stop(self, code: int, error: str | None) -> None:
        if code == EXIT_DONE:
            self._set_state("info", "stopped" if self._signals else "finished", error=None)
        else:
            self._set_state("error", "refused" if code == EXIT_REFUSED else "gave_up", error=error)

    def _run_once(self) -> ExitInfo:
        """Run the child once, and return the kind of its exit and its error."""
        self._set_state("info", "starting", runs=self._status["runs"] + 1)
        pipeline = self._pipeline
        job = {
            "file": str(pipeline.file),
            "master": pipeline.master,
            "conf": pipeline.conf,
            "query_id": self._query_id,
        }
        try:
            child = ChildProcess(job, pipeline.settings, self._child)
        except OSError as error:
            # Count this as a failure and retry: the machine may be short of memory or file descriptors only
            # for a moment. See test_a_process_that_cannot_be_started_counts_as_a_failure.
            return ExitInfo(ExitKind.DIED, f"the process of the query could not be started: {error}")
        exit_info: ExitInfo | None = None
        with child:
            while (events := child.events(self._wake[0], is_ending=exit_info is not None)) is not None:
                for event in events:
                    event_exit = self._handle(event)
                    # The first event "ended" decides. Later errors do not change the result.
                    exit_info = exit_info or event_exit
                self._forward_signals(child)
        return exit_info or ExitInfo(ExitKind.DIED, f"the process of the query died ({child.exit_text})")

    def _handle(self, event: dict[str, Any]) -> ExitInfo | None:
        match event.pop("event"):
            case "started":
                self._query_id = event["query_id"]
                self._set_state("info", "stopping" if self._signals else "running", **event)
            case "batch":
                self._status["batch"] = event
                log_event("info", "batch", **event)
                self._write_status()
            case "ended":
                return ExitInfo(ExitKind(event["ending"]), event.get("error"))
        return None

    def _forward_signals(self, child: ChildProcess) -> None:
        self._drain_wake()
        if len(self._signals) > 1:
            child.kill()
        elif self._signals:
            if self._status["state"] != "stopping":
                self._set_state("info", "stopping")
            # Call `stop` even if the state is already "stopping": after a signal, the event "started" sets
            # that state before the child is asked to stop. See
            # test_a_signal_that_comes_together_with_the_start_stops_it.
            child.stop()

    def _set_state(self, level: str, state: str, **fields: Any) -> None:
        """Set the state and `fields`, log them and write the status file. A field that is None is removed."""
        self._status |= {"state": state, **fields}
        for name in [name for name, value in self._status.items() if value is None]:
            del self._status[name]
        log_event(level, state, **{name: value for name, value in fields.items() if value is not None})
        self._write_status()

    def _write_status(self) -> None:
        path = self._pipeline.status_file
        if path is None:
            return
        status = {**self._status, "at": datetime.now(UTC).isoformat(timespec="milliseconds")}
        new = path.with_name(f"{path.name}.new")
        try:
            new.write_text(json.dumps(status, indent=2) + "\n")
            # Rename a complete file: a reader then finds either the old or the new status, never a partial
            # one.
            new.replace(path)
        except OSError as error:
            log_event("warning", "status_not_written", error=error)

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        for end in self._wake:
            end.setblocking(False)
        previous_fd = signal.set_wakeup_fd(self._wake[1].fileno())
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            for end in self._wake:
                end.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _drain_wake(self) -> None:
        try:
            self._wake[0].recv(1024)
        except BlockingIOError:
            pass

    def _sleep_until_signal(self, seconds: float) -> bool:
        select.select([self._wake[0]], [], [], seconds)
        self._drain_wake()
        return bool(self._signals)
