"""An event loop without sockets or a clock: virtual time jumps to the next timer.

Every callback belongs to a process, which its context names. A process can be killed between any two
callbacks. The loop then drops the callbacks that the process has scheduled, as SIGKILL would.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any

from oncelog.testing.memory_disk import SimulatedCrash
from oncelog_simulator.jobs import Jobs

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
MAX_STEPS_AT_ONCE = 100_000


class Livelock(Exception):
    """Callbacks keep running, but virtual time does not advance."""


class Process:
    """A simulated process. The functions in `on_kill` are called when it is killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.paused_until_us = 0
        self.on_kill: list[Callable[[], object]] = []

    def kill(self) -> None:
        """Kill the process. None of its callbacks runs after that."""
        if self.is_alive:
            self.is_alive = False
            for callback in self.on_kill:
                callback()


class _Handle:
    """A scheduled call, with the methods of `asyncio.Handle` that asyncio and the product use."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "ready")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context,
        ready: deque[_Handle],
    ) -> None:
        self.callback, self.args, self.context = callback, args, context
        self.ready = ready
        """The queue of the loop that will run the call when it is due."""
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel the call."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def __repr__(self) -> str:
        return f"{self.callback!r}{self.args!r}"


_Loop: Any = asyncio.AbstractEventLoop
"""Base class of SimLoop.

It is typed Any because SimLoop implements only the methods that asyncio and the product call.
"""


def close_tasks(loop: Any, tasks: list[asyncio.Task[Any]]) -> None:
    """Close the coroutines of a stopped loop's tasks, and of the tasks that they start while closing."""
    events._set_running_loop(loop)
    try:
        while tasks:
            with contextlib.suppress(BaseException):
                tasks.pop().get_coro().close()
    finally:
        events._set_running_loop(None)


class SimLoop(_Loop):  # type: ignore[misc]
    """An event loop in virtual time, which it counts in whole microseconds.

    `pause_limit_s` is the longest wait in seconds before an executor job runs, and again before its result is
    set.
    """

    usual_pause_limit_s = 0.002

    def __init__(self, rng: Random) -> None:
        self.now_us = 0
        self.step_count = 0
        self.on_error: Callable[[str, BaseException | None], object] = lambda text, error: None
        """Called with the text and exception of each error that nothing handled."""
        self.pause_limit_s = self.usual_pause_limit_s
        self._chance = rng
        self.network: Any = None
        """The Network (network.py) on which connections are made."""
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[int, int, _Handle]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        """References to all tasks. Python closes an unreferenced task and runs its `finally` blocks, which a
        killed process never does.
        """
        self._sequence = itertools.count()
        self._is_closed = False
        self.run_step: Callable[[Process | None, Callable[[], object]], None] | None = None
        """If set, the loop passes each callback to this function, which runs and measures it."""
        self.jobs: Jobs = Jobs(self, Random(0))
        self.run_threads: Callable[[], bool] = lambda: False
        """Runs threads before time advances (scheduler.py). Returns True if any thread ran."""

    # Running the loop

    def run_until(self, future: asyncio.Future[Any], limit_us: int) -> bool:
        """Run until the future is done. Return False if it is not done at `limit_us`, or if nothing is left
        to run.
        """
        events._set_running_loop(self)
        try:
            while not future.done() and (self._ready or self.run_threads() or self._advance(limit_us)):
                self._run_ready(future)
        finally:
            events._set_running_loop(None)
        return future.done()

    def _advance(self, limit_us: int) -> bool:
        """Advance time to the next timer. Return False if there is no timer up to `limit_us`."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heappop(timers)
        if not timers or timers[0][0] > limit_us:
            return False
        now_us = self.now_us = timers[0][0]
        while timers and timers[0][0] <= now_us:
            handle = heappop(timers)[2]
            handle.ready.append(handle)
        return True

    def _run_ready(self, future: asyncio.Future[Any]) -> None:
        steps_left = MAX_STEPS_AT_ONCE
        ready, is_done = self._ready, future.done
        while ready and not is_done():
            handle = ready.popleft()
            if handle.is_cancelled:
                continue
            context = handle.context
            process = context.get(PROCESS)
            if process is not None and (not process.is_alive or process.paused_until_us > self.now_us):
                if process.is_alive:
                    heappush(self._timers, (process.paused_until_us, next(self._sequence), handle))
                continue
            self.step_count += 1
            steps_left -= 1
            if not steps_left:
                raise Livelock(
                    f"{process.name if process else 'the simulator'} does not come to rest: {handle}"
                )
            try:
                if self.run_step is None:
                    context.run(handle.callback, *handle.args)
                else:
                    self.run_step(process, partial(context.run, handle.callback, *handle.args))
            except SimulatedCrash:
                # The code that raises SimulatedCrash has killed the process already.
                pass
            except Exception as error:
                self.on_error(f"{process.name if process else 'simulator'}: {error!r}", error)

    # Methods that asyncio and the product call

    def time(self) -> float:
        return self.now_us / 1e6

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        handle = _Handle(callback, args, context or copy_context(), self._ready)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        return self._call_at(self.now_us / 1e6 + delay, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        return self._call_at(when, callback, args, context)

    def _call_at(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> _Handle:
        # Round up. Code that sees its timer fire slightly early sets it again, and would do so forever.
        when_us = int(when * 1e6) + 1
        handle = _Handle(callback, args, context or copy_context(), self._ready)
        if when_us <= self.now_us:
            when_us = self.now_us + 1
        heappush(self._timers, (when_us, next(self._sequence), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) % 512 == 0:
            self._tasks = [task for task in self._tasks if not task.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run the work after a pause, and set the future's result after another pause.

        The work takes no virtual time, unless `jobs` divides it into steps (jobs.py).
        """
        done = self.create_future()

        def set_result(result: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result(result) if error is None else done.set_exception(error)

        def set_result_later(result: Any, failure: BaseException | None) -> None:
            self.call_later(self._pause_s(), set_result, result, failure)

        def work() -> None:
            if self.jobs.is_split():
                self.jobs.begin(partial(func, *args), set_result_later)
                return
            result, failure = None, None
            try:
                result = func(*args)
            except Exception as error:
                failure = error
            set_result_later(result, failure)

        self.call_later(self._pause_s(), work)
        return done

    def may_run(self, context: Context) -> bool:
        """Return True if the process that `context` names is the current process and is alive."""
        process = context.get(PROCESS)
        return process is not None and process is PROCESS.get() and process.is_alive

    def _pause_s(self) -> float:
        return self._chance.uniform(0.0, self.pause_limit_s)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        """Return one address: the host's name."""
        return [(0, 0, 0, "", (host, port))]

    async def create_connection(
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> tuple[Any, Any]:
        made: tuple[Any, Any] = await self.network.connect(protocol_factory, host, port)
        return made

    async def create_server(self, protocol_factory: Callable[[], Any], host: str, port: int, **_: Any) -> Any:
        return self.network.listen(protocol_factory, host, port)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        process, error = PROCESS.get(), context.get("exception")
        is_of_the_dead = self._is_closed or (process is not None and not process.is_alive)
        if not is_of_the_dead and not isinstance(error, SimulatedCrash):
            self.on_error(str(context.get("message")), context.get("exception"))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Close the loop and its tasks. Their `finally` blocks have no effect, as the simulation is over."""
        self._is_closed = True
        self.jobs.abandon()
        self._ready.clear()
        self._timers.clear()
        close_tasks(self, self._tasks)
