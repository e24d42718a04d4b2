"""Code that blocks, in a world of one loop: it has a thread of its own, which runs only while the loop waits
for it, and the loop only while it waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

from oncelog.errors import MisuseError, TimedOut
from oncelog.testing.memory_disk import SimulatedCrash

T = TypeVar("T")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.1


class _Turns:
    """A thread and the loop, which take turns. `asked`: what the thread waits for; None: it is over."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.asked: Coroutine[Any, Any, Any] | None = None
        self.result: object = None
        self.failure: BaseException | None = None
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._answer: object = None
        self._error: Exception | None = None
        self._is_abandoned = self._is_over = False
        context = copy_context()
        context.run(_TURNS.set, self)
        self._thread = threading.Thread(target=context.run, args=(self._main,), daemon=True)

    # What the loop calls

    def begin(self) -> None:
        """Run the thread until it waits for something."""
        self._thread.start()
        self._back.acquire()

    def go_on(self, answer: object, error: Exception | None) -> None:
        """What it waited for is done; run it until it waits again."""
        self.asked, self._answer, self._error = None, answer, error
        self._go.release()
        self._back.acquire()

    def end(self) -> None:
        """Of a killed process: what it still does on its way out, it does to a world that is over."""
        self._is_abandoned = True
        while not self._is_over:
            self.go_on(None, None)
        self._thread.join()

    # What the thread calls

    def wait(self, asked: Coroutine[Any, Any, T]) -> T:
        """Until that is done. Raises its error."""
        if self._is_abandoned:
            asked.close()
            raise SimulatedCrash
        self.asked = asked
        self._back.release()
        self._go.acquire()
        if self._is_abandoned:
            raise SimulatedCrash
        if self._error is not None:
            raise self._error
        answer: Any = self._answer
        found: T = answer
        return found

    def _main(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.failure = error
        self._is_over = True
        self._back.release()


async def _until_done(future: concurrent.futures.Future[Any]) -> None:
    await asyncio.wait([asyncio.wrap_future(future)])


_TURNS: ContextVar[_Turns | None] = ContextVar("turns", default=None)


def _own_turns() -> _Turns:
    turns = _TURNS.get()
    if turns is None:
        raise MisuseError("blocking code of a simulated process must run within in_thread()")
    return turns


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run code that blocks on clients of this process; time is virtual for it too."""
    turns = _Turns(partial(work, *args))
    try:
        turns.begin()
        while turns.asked is not None:
            try:
                answer, failure = await turns.asked, None
            except Exception as error:
                answer, failure = None, error
            turns.go_on(answer, failure)
    finally:
        turns.end()
    if turns.failure is not None:
        raise turns.failure
    result: Any = turns.result
    return result  # type: ignore[no-any-return]


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop for code within in_thread(). Raises its error."""
    try:
        return _own_turns().wait(coroutine)
    finally:
        coroutine.close()  # it may not have begun: there is no thread, or the simulation is over


def sleep(seconds: float) -> None:
    """Of code within in_thread()."""
    wait(asyncio.sleep(seconds))


class SimLoopThread:
    """A ClientThread (runtime/loop_thread.py) for a client that is made and used within in_thread()."""

    def __init__(self, loop: Any) -> None:
        self._loop, self._turns = loop, _own_turns()
        self.is_running = True

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; the thread may wait for its future's result."""
        future: Any = asyncio.run_coroutine_threadsafe(coroutine, self._loop)

        def result(timeout: float | None = None) -> T:
            if not future.done():
                self.run(_until_done(future), timeout)
            found: T = concurrent.futures.Future.result(future, 0)
            return found

        future.result = result
        return future  # type: ignore[no-any-return]

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        async def within() -> T:
            if timeout is None:
                return await coroutine
            try:
                return await asyncio.wait_for(coroutine, timeout)
            except TimedOut:
                raise
            except TimeoutError:
                raise TimedOut(f"not finished within {timeout:g} s") from None

        call = within()
        try:
            return self._turns.wait(call)
        finally:
            call.close()
            coroutine.close()

    def wait_for(self, news: queue.SimpleQueue[None], timeout: float) -> None:
        async def look() -> None:
            pause_s, left_s = _FIRST_PAUSE_S, timeout
            while news.empty() and left_s > 0:
                await asyncio.sleep(pause_s)
                left_s -= pause_s
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

        wait(look())
        with suppress(queue.Empty):
            news.get_nowait()

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon(function, *args)

    def stop(self) -> None:
        self.is_running = False
