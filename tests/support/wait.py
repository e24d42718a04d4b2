"""The only functions in which a test sleeps or reads a clock; tests/test_tidy.py checks that.

A test waits for a condition, with a limit that only a fault of the product reaches. No result may depend on
`pause`: the asserts of a test must hold for any length of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakSet

import pytest

from oncelog import Broker
from oncelog.runtime.clock import Clock
from oncelog.runtime.system import SystemRuntime

T = TypeVar("T")
LIMIT_S = 60.0
_STEP_S = 0.01


def wait_until(
    is_so: Callable[[], object], seconds: float = LIMIT_S, what: Callable[[], object] | None = None
) -> None:
    """Poll until the condition is true. Fail the test if it never is, with the result of `what`."""
    for _ in attempts(what, seconds, _STEP_S):
        if is_so():
            return


async def until(
    is_so: Callable[[], object], seconds: float = LIMIT_S, what: Callable[[], object] | None = None
) -> None:
    """Poll as `wait_until` does, but let the event loop run other tasks between two polls."""
    for _ in attempts(what, seconds):
        if is_so():
            return
        await asyncio.sleep(_STEP_S / 10)


def attempts(
    what: Callable[[], object] | None = None, seconds: float = LIMIT_S, step_s: float = 0.0
) -> Iterator[int]:
    """Yield the number of each attempt, and pause after it. The caller leaves the loop after a success.

    At the limit, fail the test with the result of `what`.
    """
    deadline, count = time.monotonic() + seconds, 0
    while True:
        yield count
        count += 1
        assert time.monotonic() < deadline, what() if what else "the condition never came true"
        time.sleep(step_s)


def pause(seconds: float) -> None:
    """Let real time pass before a fault or between two requests. A test's result may not depend on the
    length.
    """
    time.sleep(seconds)


async def rest(seconds: float) -> None:
    """Pause as `pause` does, within an event loop.

    Timers of one loop keep their order, however late they fire.
    """
    await asyncio.sleep(seconds)


def clock_ms() -> float:
    """Return the monotonic time in milliseconds, for test doubles of parts of the product."""
    return time.monotonic() * 1000


async def hang(*streams: object) -> None:
    """Wait forever, unless cancelled. As the handler of a server, then end the connection."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        for stream in streams:
            if isinstance(stream, asyncio.StreamWriter):
                stream.transport.abort()


def stop_clock(broker: Broker) -> None:
    """Stop the clock of a broker in this process. Only `pass_time` moves it."""
    assert broker._running is not None
    clock = broker._running.clock
    monotonic_ns, wall_ns = clock._monotonic_ns(), clock._wall_ns()
    clock._monotonic_ns, clock._wall_ns = lambda: monotonic_ns, lambda: wall_ns


class ShiftedTime:
    """A function that returns another function's time in ns, shifted."""

    def __init__(self, original_ns: Callable[[], int]) -> None:
        self.original_ns, self.shift_ns = original_ns, 0

    def __call__(self) -> int:
        return self.original_ns() + self.shift_ns


def set_wall_clock(clock: Clock, by_ms: int) -> None:
    """Set the wall clock of a broker in this process forward or back. May be called any number of times."""
    if not isinstance(clock._wall_ns, ShiftedTime):
        clock._wall_ns = ShiftedTime(clock._wall_ns)
    clock._wall_ns.shift_ns += by_ms * 1_000_000
    clock.now_ms()  # the broker's clock reads the wall clock in its next tick, so run that tick now


def pass_time(broker: Broker, ms: int) -> None:
    """Move the clock of a broker in this process forward, and let the broker do what is due then.

    Deadlines of the node and of its connections pass. Time that a client measures does not pass.
    """
    running, thread = broker._running, broker._thread
    assert running is not None and thread is not None

    def sweep() -> None:
        if running.server._sweeper is not None:
            running.server._sweeper.cancel()
        running.server._sweep()

    async def go_on() -> None:
        sweep()  # record the activity of connections at the old time
        monotonic_ns = running.clock._monotonic_ns
        running.clock._monotonic_ns = lambda: monotonic_ns() + ms * 1_000_000
        set_wall_clock(running.clock, ms)
        running.server._tick()
        sweep()

    thread.run(go_on(), LIMIT_S)


class JumpingClock:
    """A clock that can jump forward. Clients and brokers that this process makes after its installation use
    it.

    Their timers jump with the clock. Call `jump` only if no other pending operation would time out because of
    the jump.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_ns = 0
        self._loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        for name in ("monotonic_ns", "wall_ns"):
            clock = getattr(SystemRuntime, name)
            monkeypatch.setattr(
                SystemRuntime, name, staticmethod(lambda clock=clock: clock() + self._ahead_ns)
            )
        monkeypatch.setattr("oncelog.runtime.loop_thread.new_event_loop", self._new_event_loop)

    def _new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop()  # a uvloop loop has its own time, which cannot be replaced
        loop.time = lambda: (time.monotonic_ns() + self._ahead_ns) / 1e9  # type: ignore[method-assign]
        self._loops.add(loop)
        return loop

    def jump(self, seconds: float) -> None:
        self._ahead_ns += round(seconds * 1e9)
        for loop in list(self._loops):
            with suppress(RuntimeError):  # the loop is closed, so it has no timers to wake
                loop.call_soon_threadsafe(lambda: None)

    def outcome_of(self, call: Callable[[], T], step_s: float) -> T:
        """Run a call that waits for a time-out in another thread. Return its result, or raise its
        exception.
        """
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(call)
            self.jump_until(future.done, step_s)
            return future.result()

    def jump_until(self, is_so: Callable[[], object], step_s: float) -> None:
        """Jump repeatedly until the condition is true."""
        for _ in attempts(step_s=_STEP_S):
            if is_so():
                return
            self.jump(step_s)


class HeldTimers:
    """Captures the timers that a module sets on its event loop. They run only when the test calls `fire`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.delays_s: list[float] = []
        self._held: list[tuple[Any, asyncio.TimerHandle, partial[object]]] = []
        monkeypatch.setattr(module, "asyncio", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def get_running_loop(self) -> Any:
        """Return the running loop with a `call_later` that captures timers."""
        call_soon = asyncio.get_running_loop().call_soon
        return SimpleNamespace(call_later=self._call_later, call_soon=call_soon)

    def _call_later(self, delay_s: float, function: Callable[..., object], *args: object) -> object:
        loop = asyncio.get_running_loop()
        handle = loop.call_later(86_400, function, *args)
        self._held.append((loop, handle, partial(function, *args)))
        self.delays_s.append(delay_s)
        return handle

    def fire(self) -> None:
        """Run the timers that were not cancelled, each in its event loop."""
        held, self._held = self._held, []
        for loop, handle, call in held:
            if not handle.cancelled():
                handle.cancel()
                loop.call_soon_threadsafe(call)
