"""Runs look-ups in threads of their own, so that every wait for the registry has a limit.

An HTTP client limits single steps, and neither the resolution of names nor a response that arrives byte by
byte. So a look-up runs in a daemon thread, and a caller waits at most its own time. There is at most one
thread for each key: callers of the same key share it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

from oncelog.errors import SchemaRegistryError

T = TypeVar("T")


class About(NamedTuple):
    """The schema that is looked up, for the error of a wait that takes too long."""

    text: str
    url: str
    subject: str | None = None
    schema_id: int | None = None


class Lookups:
    """The look-ups that are running. `timeout_ms` limits each wait for one of them."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._running: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()

    def wait(self, key: Hashable, look_up: Callable[[], T], about: About) -> T:
        """Return the result of `look_up`, or raise its error.

        Raises SchemaRegistryError after `timeout_ms`.
        """
        try:
            return self._start(key, look_up, about).result(self._timeout_ms / 1000)
        except FutureTimeout as error:
            raise self._late(about) from error

    async def wait_async(self, key: Hashable, look_up: Callable[[], T], about: About) -> T:
        """Do the same without blocking the event loop. A cancellation ends only the wait."""
        future = self._start(key, look_up, about)
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise self._late(about) from error

    def _start(self, key: Hashable, look_up: Callable[[], T], about: About) -> Future[T]:
        with self._lock:
            if (running := self._running.get(key)) is not None:
                return running
            future: Future[T] = Future()
            # From now on, a cancelled caller cannot cancel the look-up of the others.
            future.set_running_or_notify_cancel()
            self._running[key] = future
        context = copy_context()
        thread = threading.Thread(
            target=context.run,
            args=(self._run, key, look_up, future),
            name="oncelog-schema-lookup",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:
            # The system refuses threads, or Python exits. Without this, all later callers of the same key
            # would wait for a look-up that does not run. Guard: test_a_look_up_that_gets_no_thread_fails.
            self._forget(key)
            future.set_exception(self._error(about, str(error)))
        return future

    def _run(self, key: Hashable, look_up: Callable[[], T], future: Future[T]) -> None:
        try:
            result = look_up()
        except BaseException as error:
            self._forget(key)
            future.set_exception(error)
        else:
            self._forget(key)
            future.set_result(result)

    def _forget(self, key: Hashable) -> None:
        with self._lock:
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
