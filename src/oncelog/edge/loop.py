"""A thread with an asyncio loop, on which the synchronous faces run the asynchronous ones."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from oncelog.errors import MisuseError, TimedOut

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


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

    def wait_for(
        self, told: threading.Condition, is_so: Callable[[], bool], timeout: float | None
    ) -> bool: ...

    def call_soon(self, function: Callable[..., object], *args: Any) -> None: ...

    def stop(self) -> None: ...


class LoopThread:
    """One daemon thread that runs one loop until `stop`. Its methods may be called from any other thread.

    `loop`: a new event loop by default; the simulator gives one of its own.
    """

    def __init__(self, name: str = "oncelog-client", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._process_id = os.getpid()
        self._loop = loop or new_event_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._drain()
            close_loop(self._loop)

    def _drain(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_running(self) -> bool:
        return not self._stopped and self._process_id == os.getpid()

    def _check(self) -> None:
        if self._process_id != os.getpid():
            raise MisuseError(
                "this client was made before a fork and its thread is not here; make one in the child process"
            )
        if self._stopped:
            raise MisuseError("this client is closed; make a new one")

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

        Raises TimedOut after cancelling it; MisuseError when called on the loop's own thread,
        which would wait for itself (a blocking call inside a delivery callback).
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise MisuseError(
                "a blocking call on the client's own thread (inside a callback?) would never return"
            )
        future = self.submit(coroutine)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():  # finished in the last moment, perhaps with a TimedOut of its own
                return future.result()
            future.cancel()
            raise TimedOut(f"not finished within {timeout:g} s") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def wait_for(self, told: threading.Condition, is_so: Callable[[], bool], timeout: float | None) -> bool:
        """Holding the lock of `told`, wait until something is so; false after `timeout` seconds."""
        return told.wait_for(is_so, timeout)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop's thread, soon; calls keep their order."""
        self._check()
        self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the thread; tasks still running are cancelled. Safe to call twice and after a fork."""
        if self._stopped or self._process_id != os.getpid():
            self._stopped = True
            return
        self._stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
