"""Run blocking code in a simulation with one event loop.

The code runs in its own thread. The thread and the loop take turns: the thread runs only while the loop waits
for it, and the loop runs only while the thread waits.
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


class _BlockingThread:
    """A thread that takes turns with the loop.

    `requested` is the coroutine that the thread waits for, None when the thread has ended.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.requested: Coroutine[Any, Any, Any] | None = None
        self.result: object = None
        self.failure: BaseException | None = None
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._answer: object = None
        self._error: Exception | None = None
        self._is_abandoned = self._is_over = False
        context = copy_context()
        context.run(_CURRENT_THREAD.set, self)
        self._thread = threading.Thread(target=context.run, args=(self._main,), daemon=True)

    # Called by the loop

    def begin(self) -> None:
        """Start the thread, and run it until it waits for a coroutine or ends."""
        self._thread.start()
        self._back.acquire()

    def resume(self, answer: object, error: Exception | None) -> None:
        """Pass the coroutine's result or error to the thread. Run the thread until it waits again or ends."""
        self.requested, self._answer, self._error = None, answer, error
        self._go.release()
        self._back.acquire()

    def end(self) -> None:
        """End the thread, even if its process was killed.

        Each `wait` of the thread now raises SimulatedCrash, so the code that unwinds has no effect.
        """
        self._is_abandoned = True
        while not self._is_over:
            self.resume(None, None)
        self._thread.join()

    # Called by the thread

    def wait(self, requested: Coroutine[Any, Any, T]) -> T:
        """Wait until the loop has run a coroutine. Raises the coroutine's error."""
        if self._is_abandoned:
            requested.close()
            raise SimulatedCrash
        self.requested = requested
        self._back.release()
        self._go.acquire()
        if self._is_abandoned:
            raise SimulatedCrash
        if self._error is not None:
            raise self._error
        answer: Any = self._answer
        value: T = answer
        return value

    def _main(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.failure = error
        self._is_over = True
        self._back.release()


async def _until_done(future: concurrent.futures.Future[Any]) -> None:
    await asyncio.wait([asyncio.wrap_future(future)])


_CURRENT_THREAD: ContextVar[_BlockingThread | None] = ContextVar("turns", default=None)


def _current_thread() -> _BlockingThread:
    turns = _CURRENT_THREAD.get()
    if turns is None:
        raise MisuseError("blocking code of a simulated process must run within in_thread()")
    return turns


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run blocking code in its own thread and in virtual time, and return its result.

    The code may use blocking clients, which belong to the simulated process that calls this function.
    """
    turns = _BlockingThread(partial(work, *args))
    try:
        turns.begin()
        while turns.requested is not None:
            try:
                answer, failure = await turns.requested, None
            except Exception as error:
                answer, failure = None, error
            turns.resume(answer, failure)
    finally:
        turns.end()
    if turns.failure is not None:
        raise turns.failure
    result: Any = turns.result
    return result  # type: ignore[no-any-return]


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop, for code within in_thread(). Raises the coroutine's error."""
    try:
        return _current_thread().wait(coroutine)
    finally:
        # Close the coroutine, because it never began if there is no thread or the simulation is over.
        coroutine.close()


def sleep(seconds: float) -> None:
    """Sleep in virtual time, in code within in_thread()."""
    wait(asyncio.sleep(seconds))


class SimLoopThread:
    """A ClientThread (runtime/loop_thread.py) for a client that is created and used within in_thread().

    A process may keep the client and use it in another call of in_thread().
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.is_running = True

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine. The thread may wait for the result of the returned future."""
        future: Any = asyncio.run_coroutine_threadsafe(coroutine, self._loop)

        def result(timeout: float | None = None) -> T:
            if not future.done():
                self.run(_until_done(future), timeout)
            value: T = concurrent.futures.Future.result(future, 0)
            return value

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
            return _current_thread().wait(call)
        finally:
            call.close()
            coroutine.close()

    def wait_for(self, news: queue.SimpleQueue[None], timeout: float) -> None:
        async def poll_queue() -> None:
            pause_s, left_s = _FIRST_PAUSE_S, timeout
            while news.empty() and left_s > 0:
                await asyncio.sleep(pause_s)
                left_s -= pause_s
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

        wait(poll_queue())
        with suppress(queue.Empty):
            news.get_nowait()

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon(function, *args)

    def stop(self) -> None:
        self.is_running = False
