"""Runs look-ups in threads of their own, so that every wait for the registry has a limit.

An HTTP client limits single steps, but neither the resolution of names nor a response that arrives byte by
byte. So a look-up runs in a daemon thread, and each caller waits for at most `timeout_ms`. Callers that wait
for the same key share one thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from _thread import start_new_thread
from collections.abc import Callable, Hashable
from contextvars import copy_context
from typing import Any, Generic, NamedTuple, TypeVar

from oncelog.errors import SchemaRegistryError

T = TypeVar("T")


class About(NamedTuple):
    """The schema that is looked up, for the error of a wait that takes too long."""

    text: str
    url: str
    subject: str | None = None
    schema_id: int | None = None


class _Lookup(Generic[T]):
    """A look-up that runs in a thread, and the callers that wait for it.

    A signal handler may raise in a waiting caller at any moment. So callers take no lock that the thread
    needs before it wakes them. A concurrent.futures.Future has such a lock.
    """

    def __init__(self) -> None:
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.has_ended = False
        self._listeners: list[Callable[[], object]] = []

    def run(self, look_up: Callable[[], T]) -> None:
        """Call `look_up`, and keep its result or its error."""
        try:
            self._result.append(look_up())
        except BaseException as error:
            self._error = error

    def fail(self, error: BaseException) -> None:
        """End the look-up with an error."""
        self._error = error
        self.end()

    def end(self) -> None:
        """Wake the callers."""
        self.has_ended = True
        while self._listeners:
            try:
                listener = self._listeners.pop(0)
            except IndexError:  # a caller has taken back the last one
                return
            listener()

    def add_listener(self, listener: Callable[[], object]) -> None:
        """Call `listener` at the end of the look-up, or now if it has ended."""
        self._listeners.append(listener)
        if self.has_ended:
            try:
                self._listeners.remove(listener)
            except ValueError:  # `end` calls it
                return
            listener()

    def result(self) -> T:
        """Return the result of an ended look-up, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result[0]


class Lookups:
    """The look-ups that are running. `timeout_ms` limits each wait for one of them."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._reset()

    def _reset(self) -> None:
        self._process_id = os.getpid()
        self._running: dict[Hashable, _Lookup[Any]] = {}
        # Reentrant: a signal handler may start a look-up while it interrupts another call.
        self._lock = threading.RLock()

    def wait(self, key: Hashable, look_up: Callable[[], T], about: About) -> T:
        """Return the result of `look_up`, or raise its error.

        Raises SchemaRegistryError after `timeout_ms`.
        """
        running = self._start(key, look_up, about)
        ended = threading.Lock()
        ended.acquire()
        running.add_listener(ended.release)
        if not ended.acquire(timeout=self._timeout_ms / 1000):
            raise self._late(about)
        return running.result()

    async def wait_async(self, key: Hashable, look_up: Callable[[], T], about: About) -> T:
        """Do the same as `wait`, without blocking the event loop. A cancellation ends only the wait."""
        running = self._start(key, look_up, about)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        running.add_listener(wake)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await ended.wait()
        except TimeoutError as error:
            raise self._late(about) from error
        return running.result()

    def _start(self, key: Hashable, look_up: Callable[[], T], about: About) -> _Lookup[T]:
        if self._process_id != os.getpid():
            # After a fork, the threads of these look-ups do not exist, and another thread may have the lock.
            self._reset()
        with self._lock:
            running = self._running.get(key)
            if running is not None and not running.has_ended:
                return running
            started = _Lookup[T]()
            context = copy_context()
            try:
                # Thread.start waits for the thread. If a signal handler raised in this wait, it would be
                # unknown whether the thread runs.
                start_new_thread(context.run, (self._run, key, look_up, started))
            except RuntimeError as error:
                # The system refuses threads, or Python exits.
                started.fail(self._error(about, str(error)))
            else:
                # Start the thread first. If a signal handler raises here, the key must not refer to a look-up
                # that does not run, because all later callers would wait for it. Guards:
                # test_an_interrupt_at_any_call_of_a_look_up_blocks_nobody,
                # test_a_look_up_that_gets_no_thread_fails.
                self._running[key] = started
            return started

    def _run(self, key: Hashable, look_up: Callable[[], T], own: _Lookup[T]) -> None:
        own.run(look_up)
        # Wake the callers first: one may be a signal handler that has interrupted the owner of the lock.
        own.end()
        with self._lock:
            if self._running.get(key) is own:
                del self._running[key]

    def _late(self, about: About) -> SchemaRegistryError:
        return self._error(about, f"no result within request.timeout.ms={self._timeout_ms}")

    def _error(self, about: About, reason: str) -> SchemaRegistryError:
        return SchemaRegistryError(
            f"{about.text}: {reason}",
            url=about.url,
            subject=about.subject,
            schema_id=about.schema_id,
        )
