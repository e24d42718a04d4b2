"""The clocks, dice and threads of one simulated process."""

from __future__ import annotations

from random import Random

from oncelog_simulator.event_loop import SimLoop
from oncelog_simulator.threads import SimLoopThread

EPOCH_NS = 1_767_225_600 * 10**9
"""1 January 2026, when every simulation begins."""


class SimRuntime:
    """A Runtime (runtime/system.py). `wall_offset_ns`: how far its wall clock is off, at present."""

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
        """Work takes some time each time one looks, though virtual time stands still meanwhile."""
        self._worked_s += self.rng.uniform(0.0, 0.002)
        return self._worked_s

    def new_uuid(self) -> bytes:
        return self.rng.randbytes(16)

    def loop_thread(self, name: str) -> SimLoopThread:
        return SimLoopThread(self._loop)
