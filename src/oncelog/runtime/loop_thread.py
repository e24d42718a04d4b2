"""A thread with an asyncio loop, on which the synchronous faces run the asynchronous ones."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import queue
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from oncelog.errors import MisuseError, TimedOut

T = TypeVar("T")
_CLOSED = "this client is closed; make a new one"
_CLOSED_MEANWHILE = "this client was closed by another thread during this call; make a new one"
_FINALIZED = "the interpreter is ending, and this client's thread with it: close clients before, or by atexit"
_SIGNAL_SECONDS = 0.5
"""The longest time that the exception of a signal handler may wait for a blocking call."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def check_running_loop(own: asyncio.AbstractEventLoop | None, client: str) -> asyncio.AbstractEventLoop:
    """Return the running loop. Raises MisuseError when it is not the client's own.

    Futures and connections of one loop never end in another: every call would wait for ever.
    """
    running = asyncio.get_running_loop()
    if own is not None and running is not own:
        state = "closed" if own.is_closed() else "still there"
        raise MisuseError(
            f"this {client} was first used in another event loop (which is {state}), as by an earlier "
            f"asyncio.run(); make a new {client} in each"
        )
    return running


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """End a loop. A client that is amid TLS' handshake cannot be told; uvloop then says "busy" (EBUSY)."""
    try:
        loop.close()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise


class ClientThread(Protocol):
    """What the blocking faces need of the thread that carries their asyncio ones; see LoopThread."""

    @property
    def is_running(self) -> bool: ...

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]: ...

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T: ...

    def wait_for(self, news: queue.SimpleQueue[None], timeout: float) -> None: ...

    def call_soon(self, function: Callable[..., object], *args: Any) -> None: ...

    def stop(self) -> None: ...


def bounded(timeout: float | None) -> float | None:
    """Return a time-out that threads can wait for; the longest one stands for infinity."""
    return None if timeout is None else min(timeout, threading.TIMEOUT_MAX)


def result_of(submitted: concurrent.futures.Future[T]) -> T:
    """Wait for what `ClientThread.submit` began. Raises MisuseError when another thread closes the client."""
    try:
        return submitted.result()
    except concurrent.futures.CancelledError:
        raise MisuseError(_CLOSED_MEANWHILE) from None


class _Call(Generic[T]):
    """A coroutine that runs on a loop's thread while the caller's thread waits.

    The caller may be interrupted at any moment, so it takes no lock: Condition and Future lose one that a
    signal handler's exception leaves held, and the loop's thread would then wait for it without end. What
    happened stands in attributes that the loop's thread writes; the queue says only that there is news.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = self._has_ended = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Hand the coroutine over. Raises MisuseError when the loop has been closed."""
        try:
            self._loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            self._coroutine.close()
            raise MisuseError(_CLOSED_MEANWHILE) from None

    def _start(self) -> None:
        if self._is_cancelled:
            return
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        self._has_ended = True
        self._news.put(None)

    def cancel(self) -> None:
        """Cancel the coroutine, if it was started; calls of this and `start` keep their order."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
        else:
            self._coroutine.close()
            self._end()

    def wait(self, timeout: float | None, is_over: Callable[[], bool]) -> bool:
        """Wait until the coroutine has ended; false after `timeout` seconds, or when the loop is over."""
        # A signal that comes after the last bytecode and before the wait begins does not end the wait.
        while not self._has_ended and (timeout is None or timeout > 0):
            if is_over():  # it was stopped before it came to this call
                return self._has_ended
            seconds = _SIGNAL_SECONDS if timeout is None else min(_SIGNAL_SECONDS, timeout)
            with suppress(queue.Empty):
                self._news.get(timeout=seconds)
            timeout = None if timeout is None else timeout - seconds
        return self._has_ended

    def result(self) -> T:
        """Return what the coroutine returned, or raise what it raised."""
        if self._task is None or not self._task.done():  # the loop ended before it came to this call
            raise MisuseError(_CLOSED_MEANWHILE)
        return self._task.result()


class LoopThread:
    """One daemon thread that runs one loop until `stop`. Its methods may be called from any other thread.

    `loop`: a new event loop by default; the simulator gives one of its own.
    """

    def __init__(self, name: str = "oncelog-client", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._process_id = os.getpid()
        self._loop = loop or new_event_loop()
        self._stopped = False
        # Not Thread.is_alive: a signal handler that raises in there makes a running thread look ended.
        self._is_over = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            try:
                self._drain()
                close_loop(self._loop)
            finally:
                self._is_over = True

    def _drain(self) -> None:
        # Cancelled tasks, and calls of other threads that came last, may start further ones.
        self._loop.run_until_complete(asyncio.sleep(0))
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_running(self) -> bool:
        return not self._stopped and self._process_id == os.getpid() and not sys.is_finalizing()

    def _check(self) -> None:
        if sys.is_finalizing():  # the thread stands still, wherever it is: a call would wait without end
            raise MisuseError(_FINALIZED)
        if self._process_id != os.getpid():
            raise MisuseError(
                "this client was made before a fork and its thread is not here; make one in the child process"
            )
        if self._stopped:
            raise MisuseError(_CLOSED)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop. Raises MisuseError when closed or after a fork."""
        try:
            self._check()
        except MisuseError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait `timeout` seconds for it (None: as long as it takes).

        An exception of a signal handler, such as KeyboardInterrupt, cancels the coroutine, waits for its
        end, and is raised then. Nothing of it goes on unseen.

        Raises TimedOut after cancelling it; MisuseError when called on the loop's own thread,
        which would wait for itself (a blocking call inside a delivery callback).
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise MisuseError(
                "a blocking call on the client's own thread (inside a callback?) would never return"
            )
        try:
            self._check()
        except MisuseError:
            coroutine.close()
            raise
        call = _Call(self._loop, coroutine)
        try:
            call.start()
            has_ended = call.wait(timeout, self._loop_is_over)
        except BaseException:
            with suppress(RuntimeError):  # the loop has ended, and the coroutine with it
                call.cancel()
                call.wait(None, self._loop_is_over)
            raise
        if not has_ended and not self._is_over:
            call.cancel()
            raise TimedOut(f"not finished within {timeout:g} s")
        return self._result_of(call)

    def _stop_loop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._loop.stop()

    def _loop_is_over(self) -> bool:
        return self._is_over

    def _result_of(self, call: _Call[T]) -> T:
        try:
            return call.result()
        except asyncio.CancelledError:
            if self._stopped:  # by another thread, which has cancelled every task
                raise MisuseError(_CLOSED_MEANWHILE) from None
            raise

    def wait_for(self, news: queue.SimpleQueue[None], timeout: float) -> None:
        """Wait for an entry, `timeout` seconds at most, and briefly: a signal may come before the wait."""
        with suppress(queue.Empty):
            news.get(timeout=min(timeout, _SIGNAL_SECONDS))

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop's thread, soon; calls keep their order."""
        self._check()
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            raise MisuseError(_CLOSED_MEANWHILE) from None

    def stop(self) -> None:
        """End the thread; tasks still running are cancelled. Safe to call twice, after a fork and at exit."""
        if self._process_id != os.getpid() or sys.is_finalizing():
            self._stopped = True
            return
        self._stopped = True
        with suppress(RuntimeError):  # it has been closed
            self._loop.call_soon_threadsafe(self._stop_loop)  # again, if an interrupt came before this line
        if threading.current_thread() is not self._thread:
            self._thread.join()
