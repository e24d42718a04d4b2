"""Run real threads one at a time in virtual time. The seed draws which thread runs, and where it is
suspended.

Within `patched()` the standard library creates the locks, threads and queues of this module. Conditions,
events, futures and the product's own threads use these, so no part of the product is replaced. A thread
yields when it waits. With the probability `line_chance` it also yields before a line of traced code.

    simulation  the loop of the simulation runs when no thread can; only then does time advance
    SimThread   a thread of an application, or a thread that runs a client's loop (a ThreadLoop)
    signal      an exception that a waiting application thread gets, as from a signal handler
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from asyncio import events
from collections.abc import Callable, Iterable, Iterator, MutableSet
from concurrent.futures import _base as futures
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from random import Random
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest.mock import patch

from oncelog.testing.memory_disk import SimulatedCrash
from oncelog_simulator.event_loop import PROCESS, Livelock, SimLoop, close_tasks

MAX_SWITCHES_AT_ONCE = 50_000
TRACED = ("oncelog/client/", "oncelog/runtime/", "oncelog_simulator/mutants/")
UNTRACED = ("client/connection/broker_", "client/connection/cluster", "client/connection/coordinator")
"""Modules that run in one thread only. They are not traced, because they have many lines."""
STALL_SECONDS = 0.02
_END_SECONDS = 10.0
_new_lock, _start_new_thread = threading._allocate_lock, threading._start_new_thread  # type: ignore[attr-defined]
_LOCK = _new_lock()


class Signal(Exception):
    """The exception that a signal handler raises, other than KeyboardInterrupt."""


class SimThread(threading.Thread):
    """A thread that runs only when the scheduler chooses it.

    `signal_chance` is the probability that a signal interrupts a wait of the thread.
    """

    def __init__(self, scheduler: Scheduler, **how: Any) -> None:
        super().__init__(**how)
        self.daemon = True
        self.scheduler = scheduler
        self.signal_chance = 0.0
        self.failure: BaseException | None = None
        self.is_over = False
        self.until: Callable[[], bool] | None = None
        """The condition that the thread waits for; None if the thread can run."""
        self.turn = _new_lock()
        self.turn.acquire()
        self._context = copy_context()
        self.process = self._context.get(PROCESS)

    def start(self) -> None:
        self.scheduler.threads.append(self)
        _start_new_thread(self._live, ())

    def _live(self) -> None:
        self.turn.acquire()
        identity = threading.get_ident()
        threading._active[identity] = self  # type: ignore[attr-defined]
        try:
            self.scheduler.check_over()
            sys.settrace(self.scheduler.trace)
            self._context.run(self.run)
        except SimulatedCrash:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            sys.settrace(None)
            del threading._active[identity]  # type: ignore[attr-defined]
            self.is_over = True
            self.scheduler.leave(self)

    def is_alive(self) -> bool:
        return not self.is_over

    def can_run(self) -> bool:
        """Return True if the thread does not wait and its process is not paused."""
        if self.process is not None and self.process.paused_until_us > self.scheduler.loop.now_us:
            return False
        return self.until is None or self.until()

    def join(self, timeout: float | None = None) -> None:
        self.scheduler.wait(lambda: self.is_over, timeout)


class SimLock:
    """A threading.Lock whose waits go through the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False
        self._holder: SimThread | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._is_held:
            if not blocking:
                return False
            limit = None if timeout < 0 else timeout
            # threading.Condition waits by acquiring a lock that its own thread already holds. A signal may
            # interrupt only such a wait. All other waits are for short critical sections of other threads,
            # and a signal there would corrupt the condition, as it would in CPython.
            is_condition = self._holder is self._scheduler.running
            if not self._scheduler.wait(lambda: not self._is_held, limit, may_signal=is_condition):
                return False
        self._is_held, self._holder = True, self._scheduler.running
        return True

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Scheduler:
    """The threads of one simulation.

    `line_chance` is the probability that a thread yields before a line of traced code.
    """

    def __init__(self, loop: SimLoop, rng: Random, line_chance: float) -> None:
        self.loop, self.rng, self.line_chance = loop, rng, line_chance
        self.threads: list[SimThread] = []
        self.running: SimThread | None = None
        self.is_over = False
        self.switch_count = 0
        self.signal_count = 0
        self._world_turn = _new_lock()
        self._world_turn.acquire()
        self._error: BaseException | None = None
        self._at_once, self._now_us = 0, -1
        self._is_traced: dict[CodeType, bool] = {}
        loop.run_threads = self.run

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Make new locks, threads and queues wait in virtual time. End the remaining threads at exit."""

        def new_lock() -> SimLock:
            return SimLock(self)

        def new_thread(**how: Any) -> SimThread:
            return SimThread(self, **how)

        def seconds() -> float:
            return self.loop.now_us / 1e6

        replaced = [
            (futures, "set", _OrderedSet),
            (futures, "id", _Numbers().number_of),
            (threading, "Lock", new_lock),
            (threading, "_allocate_lock", new_lock),
            (threading, "RLock", threading._PyRLock),  # type: ignore[attr-defined]
            (threading, "_time", seconds),
            (threading, "Thread", new_thread),
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
            (queue, "time", seconds),
            *((module, name, new_lock()) for module, name in _locks_of_modules()),
        ]
        with ExitStack() as stack:
            for owner, name, instead in replaced:
                stack.enter_context(patch.object(owner, name, instead, create=owner is futures))
            try:
                yield
            finally:
                self._end()

    # Called by the simulation's loop

    def run(self) -> bool:
        """Run threads until none can run. Return True if any ran.

        Raises Livelock if threads keep running but virtual time does not advance.
        """
        following = self._choose()
        if following is None:
            return False
        self._pass_to(following)
        self._world_turn.acquire()
        if self._error is not None:
            raise self._error
        return True

    def _end(self) -> None:
        """End the remaining threads one after the other: each runs until it has unwound."""
        self.is_over = True
        for thread in list(self.threads):
            self.running = thread
            thread.turn.release()
            if not self._world_turn.acquire(timeout=_END_SECONDS):
                raise RuntimeError(f"{thread} does not end")
        self.running = None

    # Called by threads

    def check_over(self) -> None:
        """Raise SimulatedCrash if the simulation is over."""
        if self.is_over:
            raise SimulatedCrash

    def sleep(self, seconds: float) -> None:
        """Sleep in virtual time. Called by an application's thread."""
        self.wait(lambda: False, seconds)

    def wait(
        self, until: Callable[[], bool], timeout: float | None = None, *, may_signal: bool = True
    ) -> bool:
        """Let other threads run until the condition holds.

        Return False if it does not hold after `timeout` seconds. Raises KeyboardInterrupt or Signal if a
        signal is drawn and `may_signal` is True.
        """
        self.check_over()
        thread = self.running
        if thread is None:
            raise RuntimeError("the world would wait for a thread")
        signal_us = self._draw_signal(thread, timeout) if may_signal else None
        limit_us = None if timeout is None else self.loop.now_us + int(timeout * 1e6) + 1

        def is_awake() -> bool:
            now_us = self.loop.now_us
            late = (limit_us is not None and now_us >= limit_us) or (
                signal_us is not None and now_us >= signal_us
            )
            return late or until()

        timers = [
            self.loop.call_at(at_us / 1e6, _nothing) for at_us in (signal_us, limit_us) if at_us is not None
        ]
        thread.until = is_awake
        try:
            self.switch()
        finally:
            thread.until = None
            for timer in timers:
                timer.cancel()
        if signal_us is not None and self.loop.now_us >= signal_us:
            self.signal_count += 1
            thread.signal_chance = 0.0
            raise self.rng.choice((KeyboardInterrupt, Signal))
        return until()

    def _draw_signal(self, thread: SimThread, timeout: float | None) -> int | None:
        if not thread.signal_chance or self.rng.random() >= thread.signal_chance:
            return None
        seconds = self.rng.choice((0.0, self.rng.uniform(0.0, 0.02), self.rng.uniform(0.0, 2.0)))
        if timeout is not None and seconds > timeout:
            return None
        return self.loop.now_us + int(seconds * 1e6)

    def give_way(self) -> None:
        """Let other threads run first.

        Sometimes the thread also sleeps, as if the operating system had suspended it.
        """
        if self.rng.random() < 0.3:
            self.wait(lambda: False, self.rng.uniform(0.0, STALL_SECONDS), may_signal=False)
        else:
            self.switch()

    def switch(self) -> None:
        """Switch to a thread that the seed draws, which may be the current one."""
        mine, following = self.running, self._choose()
        assert mine is not None
        if following is not mine:
            self._pass_to(following)
            mine.turn.acquire()
        self.check_over()

    def leave(self, thread: SimThread) -> None:
        """Remove a thread that has ended, and let another thread or the simulation's loop run."""
        self.threads.remove(thread)
        self._pass_to(None if self.is_over else self._choose())

    def _choose(self) -> SimThread | None:
        """Draw a thread that can run. Return None if the simulation's loop must run."""
        able = [thread for thread in self.threads if thread.can_run()]
        if not able or self._is_restless():
            return None
        return able[0] if len(able) == 1 else self.rng.choice(able)

    def _is_restless(self) -> bool:
        self.switch_count += 1
        if self.loop.now_us != self._now_us:
            self._now_us, self._at_once = self.loop.now_us, 0
        self._at_once += 1
        if self._at_once > MAX_SWITCHES_AT_ONCE and self._error is None:
            self._error = Livelock(f"the threads do not come to rest: {self.running}")
        return self._error is not None

    def _pass_to(self, following: SimThread | None) -> None:
        self.running = following
        (self._world_turn if following is None else following.turn).release()

    # Tracing of lines

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace a call, as `sys.settrace` requires. Lines are traced only in the modules of TRACED."""
        code = frame.f_code
        is_traced = self._is_traced.get(code)
        if is_traced is None:
            name = code.co_filename
            is_traced = any(path in name for path in TRACED) and not any(path in name for path in UNTRACED)
            self._is_traced[code] = is_traced
        return self._trace_line if is_traced else None

    def _trace_line(self, _: FrameType, event: str, __: Any) -> Any:
        if event == "line" and not self.is_over and self.rng.random() < self.line_chance:
            self.give_way()
        return self._trace_line


class ThreadLoop(SimLoop):
    """The event loop of one thread.

    Time, timers and the network belong to the simulation's loop. Callbacks that are due run in this thread.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.rng)
        self._scheduler, world = scheduler, scheduler.loop
        self._world = world
        self._timers, self._sequence, self.network = world._timers, world._sequence, world.network
        self.on_error = world.on_error
        self._is_stopping = False

    @property
    def now_us(self) -> int:
        return self._world.now_us

    @now_us.setter
    def now_us(self, _: int) -> None:
        """Ignore an assigned value, because only the simulation's loop sets the time."""

    def run_forever(self) -> None:
        self._run(lambda: self._is_stopping)
        self._is_stopping = False

    def run_until_complete(self, work: Any) -> Any:
        future = asyncio.ensure_future(work, loop=self)
        self._run(future.done)
        return future.result()

    def _run(self, is_done: Callable[[], bool]) -> None:
        events._set_running_loop(self)
        try:
            while not is_done():
                if not self._ready:
                    self._scheduler.wait(lambda: bool(self._ready))
                self._scheduler.check_over()
                self._step(self._ready.popleft())
        finally:
            events._set_running_loop(None)

    def _step(self, handle: Any) -> None:
        if handle.is_cancelled:
            return
        self._world.step_count += 1
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self.on_error(repr(error), error)

    def stop(self) -> None:
        self._is_stopping = True

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: the loop keeps no asynchronous generators."""

    def close(self) -> None:
        """Close the loop's tasks. The timers belong to the simulation's loop."""
        self._is_closed = True
        self._ready.clear()
        close_tasks(self, self._tasks)


def _locks_of_modules() -> list[tuple[ModuleType, str]]:
    """Return (module, name) of each lock that a module of the product created at import."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("oncelog.")]
    return [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type(_LOCK))
    ]


class _OrderedSet(MutableSet[Any]):
    """A set in the order of insertion. It replaces `set` in concurrent.futures.

    The built-in set iterates over futures in the order of their memory addresses, which no seed determines.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: Any) -> None:
        self._items[value] = None

    def discard(self, value: Any) -> None:
        self._items.pop(value, None)


class _Numbers:
    """Numbers of objects, in the order of their first use. They replace `id` in concurrent.futures.

    `concurrent.futures.wait` locks futures in the order of their ids, which are memory addresses and so
    differ from process to process.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[object, int]] = {}

    def number_of(self, item: object) -> int:
        """Return the same number for the same object. The object stays alive, so its id is not used again."""
        return self._numbers.setdefault(id(item), (item, len(self._numbers)))[1]


def _nothing() -> None:
    return None
