"""The clocks, the random generator and the threads of one simulated process."""

from __future__ import annotations

from random import Random

from oncelog_simulator.event_loop import SimLoop
from oncelog_simulator.threads import SimLoopThread

EPOCH_NS = 1_767_225_600 * 10**9
"""1 January 2026 in nanoseconds since 1970: the wall clock at the start of every simulation."""


class SimRuntime:
    """A Runtime (runtime/system.py) in virtual time.

    `wall_offset_ns` is the current error of its wall clock in nanoseconds.
    """

    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self.rng = rng
        self.wall_offset_ns = 0
        self._loop = loop
        self._worked_s = 0.0

    def wall_ns(self) -> int:
        return EPOCH_NS + self.wall_offset_ns + self._loop.now_us * 1000

    def monotonic_ns(self) -> int:
        return self._loop.now_us * 1000

    def work_seconds(self) -> float:
        """Return seconds of processor time. Each call adds a drawn time, because virtual time stands still
        during work.
        """
        self._worked_s += self.rng.uniform(0.0, 0.002)
        return self._worked_s

    def new_uuid(self) -> bytes:
        return self.rng.randbytes(16)

    def loop_thread(self, name: str) -> SimLoopThread:
        return SimLoopThread(self._loop)
