"""Keeps a streaming query running in a child process; `restart_policy` decides what follows its end.

The first SIGTERM or SIGINT lets the micro-batch that runs come to its end, the second one breaks it off.
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
    Ending,
    History,
    Leave,
    Limits,
    Restart,
    decide_next,
)
from oncelog.runtime.event_log import log_event

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BROKEN_OFF = 128
"""Plus the signal's number: what shells call the exit code of a process that a signal ended."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What to run. `settings`: for the pipeline, over the environment; `conf`: for Spark."""

    file: Path
    settings: dict[str, str] = field(default_factory=dict)
    master: str = "local[*]"
    conf: dict[str, str] = field(default_factory=dict)
    status_file: Path | None = None


class Supervisor:
    """Runs one pipeline to its end. In a main thread only: it takes the signals."""

    def __init__(self, pipeline: Pipeline, limits: Limits, child: Sequence[str] = CHILD) -> None:
        self._pipeline, self._limits, self._child = pipeline, limits, child
        self._history = History()
        self._query_id: str | None = None
        self._signals: list[int] = []
        self._wake = socket.socketpair()
        self._status: dict[str, Any] = {"pipeline": str(pipeline.file), "pid": os.getpid(), "runs": 0}

    def run(self) -> int:
        """The exit code: 0 ended or stopped, 1 given up, 2 cannot succeed, 128+N broken off by signal N."""
        with self._taking_signals():
            while True:
                ending, error = self._run_once()
                if ending is Ending.DIED and len(self._signals) > 1:
                    self._tell("warning", "broken_off")
                    return _BROKEN_OFF + self._signals[-1]
                verdict = decide_next(
                    ending,
                    History(self._history.failed_at_ms, self._query_id is not None, bool(self._signals)),
                    self._limits,
                    now_ms=time.monotonic_ns() // 1_000_000,
                    chance=random.random(),
                )
                match verdict:
                    case Leave(code):
                        self._tell_left(code, error)
                        return code
                    case Restart(pause_ms, failed_at_ms):
                        self._history = History(failed_at_ms)
                        self._tell("warning", "waiting", error=error, restart_in_ms=pause_ms)
                        if self._waits_for_signal(pause_ms / 1000):
                            self._tell("info", "stopped", error=None)
                            return EXIT_DONE
                    case _:
                        assert_never(verdict)

    def _tell_left(self, code: int, error: str | None) -> None:
        if code == EXIT_DONE:
            self._tell("info", "stopped" if self._signals else "finished", error=None)
        else:
            self._tell("error", "refused" if code == EXIT_REFUSED else "gave_up", error=error)

    def _run_once(self) -> tuple[Ending, str | None]:
        """How a run ended, and the error if it was one."""
        self._tell("info", "starting", runs=self._status["runs"] + 1)
        pipeline = self._pipeline
        child = ChildProcess(
            {
                "file": str(pipeline.file),
                "master": pipeline.master,
                "conf": pipeline.conf,
                "query_id": self._query_id,
            },
            pipeline.settings,
            self._child,
        )
        ended: tuple[Ending, str | None] | None = None
        with child:
            while (events := child.events(self._wake[0], is_ending=ended is not None)) is not None:
                for event in events:
                    taken = self._take(event)
                    ended = ended or taken  # what goes wrong after the end is no other end
                self._heed_signals(child)
        return ended or (Ending.DIED, f"the process of the query died ({child.how_it_died})")

    def _take(self, event: dict[str, Any]) -> tuple[Ending, str | None] | None:
        match event.pop("event"):
            case "started":
                self._query_id = event["query_id"]
                self._tell("info", "stopping" if self._signals else "running", **event)
            case "batch":
                self._status["batch"] = event
                log_event("info", "batch", **event)
                self._write_status()
            case "ended":
                return Ending(event["ending"]), event.get("error")
        return None

    def _heed_signals(self, child: ChildProcess) -> None:
        self._drain()
        if len(self._signals) > 1:
            child.kill()
        elif self._signals:
            if self._status["state"] != "stopping":
                self._tell("info", "stopping")
            # The state does not say whether the child was told: a signal may come together with its start.
            # Guard: test_a_signal_that_comes_together_with_the_start_stops_it.
            child.stop()

    def _tell(self, level: str, state: str, **fields: Any) -> None:
        """A line in the log, and the new state in the status. A field that is None is forgotten."""
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
            new.replace(path)  # a reader finds the old one or the new one, never a half
        except OSError as error:
            log_event("warning", "status_not_written", error=error)

    @contextmanager
    def _taking_signals(self) -> Iterator[None]:
        for end in self._wake:
            end.setblocking(False)
        before_fd = signal.set_wakeup_fd(self._wake[1].fileno())
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)
            for end in self._wake:
                end.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _drain(self) -> None:
        try:
            self._wake[0].recv(1024)
        except BlockingIOError:
            pass

    def _waits_for_signal(self, seconds: float) -> bool:
        select.select([self._wake[0]], [], [], seconds)
        self._drain()
        return bool(self._signals)
