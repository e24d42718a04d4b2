"""Metrics of the process: processor time, memory, file descriptors, its version, and the event loop's lag.

The names are those of Prometheus' client libraries. Memory and open file descriptors come from /proc, so they
are left out on systems other than Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version

from oncelog.broker.metrics import Family
from oncelog.compiled import form

LAG_INTERVAL_S = 0.25
LAG_WINDOW_S = 60.0
PROCESS = {
    "process_cpu_seconds_total": ("counter", "seconds", "Processor time of the process, user and system."),
    "process_start_time_seconds": ("gauge", "seconds", "Start of the process, since the epoch."),
    "process_resident_memory_bytes": ("gauge", "bytes", "Resident memory of the process."),
    "process_open_fds": ("gauge", "descriptors", "Open file descriptors."),
    "process_max_fds": ("gauge", "descriptors", "Limit of open file descriptors."),
    "oncelog_event_loop_lag_seconds": (
        "gauge",
        "seconds",
        "Longest delay of the event loop in the last 60 s: for so long no request was served.",
    ),
    "oncelog_build_info": ("gauge", "1", "Always 1. The labels tell the version and the form of the code."),
}
"""Metric name -> kind, unit and meaning."""
_START_S = time.time()
_VERSION = version("oncelog")


class LoopLag:
    """Measures the delay of the event loop: how much later than planned a timer is called."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._delays: deque[tuple[float, float]] = deque()
        """The (time, delay) pairs of the last LAG_WINDOW_S seconds. A pair is removed when a delay that is
        not smaller follows, so the first delay is the largest.
        """

    def start(self) -> None:
        """Begin to measure on the running event loop."""
        self._plan()

    def stop(self) -> None:
        """End the measurement."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def max_seconds(self) -> float:
        """The longest delay within the last LAG_WINDOW_S seconds, in seconds."""
        return self._delays[0][1] if self._delays else 0.0

    def note(self, now_s: float, delay_s: float) -> None:
        """Add a delay, and remove delays that are older than LAG_WINDOW_S."""
        while self._delays and self._delays[-1][1] <= delay_s:
            self._delays.pop()
        self._delays.append((now_s, delay_s))
        while self._delays[0][0] < now_s - LAG_WINDOW_S:
            self._delays.popleft()

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + LAG_INTERVAL_S
        self._timer = loop.call_at(due_s, self._called, due_s)

    def _called(self, due_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        self.note(now_s, max(now_s - due_s, 0.0))
        self._plan()


def process_families(loop_lag_s: float) -> Iterator[Family]:
    """Yield the metric families of the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    values: dict[str, float] = {
        "process_cpu_seconds_total": used.ru_utime + used.ru_stime,
        "process_start_time_seconds": _START_S,
        "oncelog_event_loop_lag_seconds": loop_lag_s,
        "process_max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            values["process_resident_memory_bytes"] = float(file.read().split()[1]) * resource.getpagesize()
        values["process_open_fds"] = float(len(os.listdir("/proc/self/fd")))
    for name, value in values.items():
        kind, _, text = PROCESS[name]
        yield Family(name, kind, text, (("", (), value),))
    labels = (("form", form), ("version", _VERSION))
    kind, _, text = PROCESS["oncelog_build_info"]
    yield Family("oncelog_build_info", kind, text, (("", labels, 1.0),))
