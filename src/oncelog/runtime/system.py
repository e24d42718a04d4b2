"""What the edge takes from its machine besides files and sockets: time, chance and threads.

Whoever needs it asks `current()` when it is made, as it asks asyncio for the running loop, and keeps what it
got: there is one real machine, and the simulator gives every process it runs one of its own.
"""

from __future__ import annotations

import random
import time
import uuid
from contextvars import ContextVar
from typing import Protocol

from oncelog.runtime.loop_thread import ClientThread, LoopThread


class Chance(Protocol):
    """The part of `random.Random` that is used."""

    def random(self) -> float: ...

    def uniform(self, a: float, b: float) -> float: ...

    def randrange(self, stop: int, /) -> int: ...


class Machine(Protocol):
    """Clocks, dice, and threads for the clients' blocking faces."""

    @property
    def chance(self) -> Chance: ...

    def wall_ns(self) -> int:
        """Since 1970; may be set back and forth."""
        ...

    def monotonic_ns(self) -> int:
        """Since some time; never goes back."""
        ...

    def work_seconds(self) -> float:
        """For measuring how long work takes."""
        ...

    def new_uuid(self) -> bytes:
        """16 bytes that nobody else has."""
        ...

    def loop_thread(self, name: str) -> ClientThread:
        """A new one, for one client."""
        ...


class RealMachine:
    """The machine that this process runs on."""

    chance: Chance = random
    wall_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)
    work_seconds = staticmethod(time.perf_counter)
    loop_thread = staticmethod(LoopThread)

    @staticmethod
    def new_uuid() -> bytes:
        return uuid.uuid4().bytes


REAL = RealMachine()
_machine: ContextVar[Machine] = ContextVar("machine", default=REAL)
current = _machine.get
become = _machine.set
