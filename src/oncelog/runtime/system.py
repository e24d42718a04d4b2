"""The runtime of a process: its clocks, its random numbers and the threads of the blocking clients.

An object that needs them calls `current()` in its constructor and keeps the result, as with asyncio's running
loop. In production this is always `SYSTEM`. The simulator sets one runtime per simulated process, in that
process's context, so that every time and every random number follows from one seed.
"""

from __future__ import annotations

import random
import time
import uuid
from contextvars import ContextVar
from typing import Protocol

from oncelog.runtime.loop_thread import ClientThread, LoopThread


class RandomSource(Protocol):
    """The methods of `random.Random` that Oncelog uses."""

    def random(self) -> float: ...

    def uniform(self, a: float, b: float) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


class Runtime(Protocol):
    """Clocks, random numbers, and threads for the blocking clients."""

    @property
    def rng(self) -> RandomSource: ...

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970. An administrator may set this clock forward or back."""
        ...

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary moment. This clock never goes back."""
        ...

    def work_seconds(self) -> float:
        """Return seconds of a clock that measures how long work takes."""
        ...

    def new_uuid(self) -> bytes:
        """Return a random UUID (version 4) as 16 bytes."""
        ...

    def loop_thread(self, name: str) -> ClientThread:
        """Return a new thread with an event loop, for one client."""
        ...


class SystemRuntime:
    """The runtime of the operating system on which this process runs."""

    rng: RandomSource = random
    wall_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)
    work_seconds = staticmethod(time.perf_counter)
    loop_thread = staticmethod(LoopThread)

    @staticmethod
    def new_uuid() -> bytes:
        return uuid.uuid4().bytes


SYSTEM = SystemRuntime()
_runtime: ContextVar[Runtime] = ContextVar("runtime", default=SYSTEM)
current = _runtime.get
set_runtime = _runtime.set
