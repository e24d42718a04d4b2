"""The runtime of a process: its clocks, its random numbers and the threads of the blocking clients.

An object that needs the runtime calls `current()` in its constructor and keeps the result. In production, the
runtime is always `SYSTEM`. The simulator sets one runtime for each simulated process, in the contextvars
context in which it runs the process. There, one seed determines all times and random numbers.
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
        """Return the wall clock's time in nanoseconds since 1970. This clock may be set forward or back."""
        ...

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary moment. This clock never goes back."""
        ...

    def work_seconds(self) -> float:
        """Return seconds of a clock that is used only to measure how long work takes."""
        ...

    def new_uuid(self) -> bytes:
        """Return a random UUID (version 4) as 16 bytes."""
        ...

    def loop_thread(self, name: str) -> ClientThread:
        """Return a new thread with an event loop, for one blocking client."""
        ...


class SystemRuntime:
    """The runtime of a real process, with the clocks and random numbers of the operating system."""

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
