"""A thread with an event loop. The blocking clients run the asyncio clients on such a thread."""

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
_CLOSED_BY_OTHER_THREAD = "this client was closed by another thread during this call; make a new one"
_FINALIZED = (
    "the interpreter is exiting and has stopped this client's thread: close clients earlier, for "
    "example with atexit"
)
_SIGNAL_SECONDS = 0.5
"""Maximum length of one wait in a blocking call, in seconds. Between two waits, signal handlers can run and
raise exceptions.
"""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's if uvloop is installed, otherwise asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def check_running_loop(own: asyncio.AbstractEventLoop | None, client: str) -> asyncio.AbstractEventLoop:
    """Return the running loop. Raises MisuseError if `own`, the loop in which the client was first used, is a
    different loop.

    Futures and connections of one loop never complete in another loop, so every call would wait forever.
    """
    running = asyncio.get_running_loop()
    if own is not None and running is not own:
        state = "closed" if own.is_closed() else "still open"
        raise MisuseError(
            f"this {client} was first used in another event loop (which is {state}), for "
            f"example by an earlier asyncio.run(); make a new {client} in each loop"
        )
    return running


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop. uvloop raises EBUSY if a TLS handshake is in progress; this error is ignored."""
    try:
        loop.close()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise


class ClientThread(Protocol):
    """The thread on which a blocking client runs its asyncio client. LoopThread documents the methods."""

    @property
    def is_running(self) -> bool: ...

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]: ...

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T: ...

    def wait_for(self, news: queue.SimpleQueue[None], timeout: float) -> None: ...

    def call_soon(self, function: Callable[..., object], *args: Any) -> None: ...

    def stop(self) -> None: ...


def bounded(timeout: float | None) -> float | None:
    """Return `timeout`, but at most threading.TIMEOUT_MAX, the largest value that threading accepts.

    None stays None.
    """
    return None if timeout is None else min(timeout, threading.TIMEOUT_MAX)


def result_of(submitted: concurrent.futures.Future[T]) -> T:
    """Wait for a future that `ClientThread.submit` returned, and return its result.

    Raises MisuseError if another thread closes the client.
    """
    try:
        return submitted.result()
    except concurrent.futures.CancelledError:
        raise MisuseError(_CLOSED_BY_OTHER_THREAD) from None


class _Call(Generic[T]):
    """A coroutine that runs on a loop's thread while the caller's thread waits.

    A signal handler may raise an exception in the caller's thread at any moment, so the caller must not take
    a lock. The lock of a Condition or Future would stay locked after the exception, and the loop's thread
    would wait for this lock forever. Instead, the loop's thread writes attributes, and a queue wakes the
    caller.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = self._has_ended = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the coroutine on the loop. Raises MisuseError if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            self._coroutine.close()
            raise MisuseError(_CLOSED_BY_OTHER_THREAD) from None

    def _start(self) -> None:
        if self._is_cancelled:
            return
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        self._has_ended = True
        self._news.put(None)

    def cancel(self) -> None:
        """Cancel the coroutine's task, or close the coroutine if it has no task yet.

        Raises RuntimeError if the loop is closed.
        """
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
        else:
            self._coroutine.close()
            self._end()

    def wait(self, timeout: float | None, has_loop_ended: Callable[[], bool]) -> bool:
        """Wait until the coroutine has ended, and return True.

        Return False after `timeout` seconds, or if the loop has ended before the coroutine.
        """
        # Wait in short pieces, because a signal that arrives just before a wait begins does not interrupt the
        # wait.
        while not self._has_ended and (timeout is None or timeout > 0):
            # A loop that has ended will never complete this call.
            if has_loop_ended():
                return self._has_ended
            seconds = _SIGNAL_SECONDS if timeout is None else min(_SIGNAL_SECONDS, timeout)
            with suppress(queue.Empty):
                self._news.get(timeout=seconds)
            timeout = None if timeout is None else timeout - seconds
        return self._has_ended

    def result(self) -> T:
        """Return the coroutine's result, or raise its exception."""
        # If the task is not done, the loop ended before this call was complete.
        if self._task is None or not self._task.done():
            raise MisuseError(_CLOSED_BY_OTHER_THREAD)
        return self._task.result()


class LoopThread:
    """A daemon thread that runs one event loop until `stop`. Its methods may be called from any other thread.

    `loop` defaults to a new event loop. The simulator passes its own loop.
    """

    def __init__(self, name: str = "oncelog-client", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._process_id = os.getpid()
        self._loop = loop or new_event_loop()
        self._stopped = False
        # Set when `_run` ends. Thread.is_alive is not used, because it can be wrong: if a signal
        # handler raises during is_alive() or join(), is_alive() later returns False although the thread is
        # running.
        self._is_loop_closed = False
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
                self._is_loop_closed = True

    def _drain(self) -> None:
        # Repeat until no task is left: cancelled tasks, and the last calls from other threads, may start
        # further tasks.
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
        # While Python exits, its daemon threads no longer run, so a call would wait forever.
        if sys.is_finalizing():
            raise MisuseError(_FINALIZED)
        if self._process_id != os.getpid():
            raise MisuseError(
                "this client was made before a fork, and its thread does not exist in this "
                "process; make a new client in the child process"
            )
        if self._stopped:
            raise MisuseError(_CLOSED)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop, and return its future.

        Raises MisuseError if the client is closed, if the process was forked after the client was created, or
        while Python exits.
        """
        try:
            self._check()
        except MisuseError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and return its result. Wait at most `timeout` seconds; None means no
        limit.

        If a signal handler raises, for example KeyboardInterrupt, `run` cancels the coroutine, waits for its
        end, and then raises the exception. No part of the call continues in the background.

        Raises TimedOut after `timeout`; the coroutine is then cancelled. Raises MisuseError on the loop's own
        thread, for example for a blocking call inside a delivery callback: the thread would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise MisuseError(
                "a blocking call on the client's own thread would never return; in a "
                "callback, do not call the client's blocking methods"
            )
        try:
            self._check()
        except MisuseError:
            coroutine.close()
            raise
        call = _Call(self._loop, coroutine)
        try:
            call.start()
            has_ended = call.wait(timeout, self._has_loop_ended)
        except BaseException:
            # Ignore RuntimeError: the loop is closed, so the coroutine has ended.
            with suppress(RuntimeError):
                call.cancel()
                call.wait(None, self._has_loop_ended)
            raise
        if not has_ended and not self._is_loop_closed:
            call.cancel()
            raise TimedOut(f"not finished within {timeout:g} s")
        return self._result_of(call)

    def _stop_loop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._loop.stop()

    def _has_loop_ended(self) -> bool:
        return self._is_loop_closed

    def _result_of(self, call: _Call[T]) -> T:
        try:
            return call.result()
        except asyncio.CancelledError:
            # If the client is stopped, another thread called `stop`, which cancels every task.
            if self._stopped:
                raise MisuseError(_CLOSED_BY_OTHER_THREAD) from None
            raise

    def wait_for(self, news: queue.SimpleQueue[None], timeout: float) -> None:
        """Wait for an entry of `news` and remove it. May return without an entry, so call this in a loop.

        One call waits at most `timeout` seconds and at most _SIGNAL_SECONDS, so that signal handlers run.
        """
        with suppress(queue.Empty):
            news.get(timeout=min(timeout, _SIGNAL_SECONDS))

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop's thread. Functions are called in the order of these calls."""
        self._check()
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            raise MisuseError(_CLOSED_BY_OTHER_THREAD) from None

    def stop(self) -> None:
        """Cancel all tasks and end the thread. May be called twice, after a fork, and when Python exits."""
        if self._process_id != os.getpid() or sys.is_finalizing():
            self._stopped = True
            return
        self._stopped = True
        # Ignore RuntimeError: the loop is already closed.
        with suppress(RuntimeError):
            # Stop the loop even if `_stopped` was already True: an interrupt may have ended an earlier call
            # before this line.
            self._loop.call_soon_threadsafe(self._stop_loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
