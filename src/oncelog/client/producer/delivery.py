"""The futures that `send` returns: small objects that refer to the result of a whole batch."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from oncelog.client.producer.batch import BatchResult, OffsetRange
from oncelog.errors import MisuseError, TimedOut, copy_to_raise
from oncelog.runtime.loop_thread import bounded
from oncelog.types import RecordMetadata

_LOG = logging.getLogger("oncelog.producer")


def _wait(result: BatchResult, timeout: float | None) -> None:
    if result.is_done:
        return
    if sys.is_finalizing():
        raise MisuseError("the interpreter is exiting: records without a result get none")
    # Do not use an Event: an interrupt can leave the Event's lock held, and `set` would then block the
    # producer's thread. Guard: test_an_interrupt_at_any_call_of_a_waiting_method_blocks_nobody.
    done = threading.Lock()
    done.acquire()
    result.add_listener(done.release)
    if not done.acquire(timeout=-1 if timeout is None else max(bounded(timeout) or 0, 0)):
        raise TimedOut(f"no result within {timeout} s; the record is still being sent")


_STATE = frozenset(vars(Future()))
"""Attributes of every concurrent.futures.Future.

A RecordFuture creates them at the first access to one of them.
"""


def _is_condition(item: tuple[str, Any]) -> bool:
    return item[0] == "_condition"


class RecordFuture(Future[RecordMetadata]):
    """The future of one record: a small concurrent.futures.Future that cannot be cancelled.

    It raises TimedOut if delivery.timeout.ms has passed and the record is certainly not stored. It raises
    DeliveryUnknown or OutcomeUnknown if the record may be stored. Otherwise it raises the cause of the
    failure, such as the broker's error or TransactionAborted. Its lock and lists are created only for
    `concurrent.futures.wait` and `as_completed`.
    """

    __slots__ = ("_batch_result", "_index")

    def __init__(self, result: BatchResult, index: int) -> None:
        self._batch_result = result
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if name not in _STATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Add the listener first: if this thread is interrupted after that, the future still completes.
        self._batch_result.add_listener(self._complete)
        self._make_state()
        return self.__dict__[name]

    def _make_state(self) -> None:
        """Create the attributes of a Future that are missing. All threads get the same objects.

        This takes no lock, because a fork, a signal or another thread may interrupt it at any moment.
        """
        attributes = self.__dict__
        made = attributes.setdefault("_made", vars(Future()))
        # Set the condition last, so that a thread that sees the condition sees all attributes. Otherwise
        # `concurrent.futures.wait` in that thread could count this future as pending, and then call
        # `__getattr__` for `_waiters`. That call may complete the future before the thread has added its
        # waiter, so `wait` would never wake up. Guard:
        # test_a_half_initialized_future_loses_no_waiter.
        for name, value in sorted(made.items(), key=_is_condition):
            attributes.setdefault(name, value)

    def _complete(self) -> None:
        self._make_state()
        if super().done():
            return
        error = self._batch_result.error_of(self._index)
        with suppress(InvalidStateError):  # two threads may set the result at the same time
            if error is None:
                self.set_result(self._batch_result.metadata(self._index))
            else:
                self.set_exception(error)

    def done(self) -> bool:
        """Return True once the record was delivered or has failed."""
        return self._batch_result.is_done

    def cancel(self) -> bool:
        """Return False: a record cannot be cancelled after `send`."""
        return False

    def cancelled(self) -> bool:
        """Return False, because a record cannot be cancelled."""
        return False

    def running(self) -> bool:
        """Return True until the record was delivered or has failed."""
        return not self._batch_result.is_done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Return the record's partition, offset and timestamp.

        Raises the error of a failed record, and TimedOut if there is no result within `timeout` seconds.
        """
        error = self.exception(timeout)
        if error is not None:
            raise copy_to_raise(error)
        return self._batch_result.metadata(self._index)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Return the error of a failed record, None for a delivered one.

        Raises TimedOut if there is no result within `timeout` seconds.
        """
        _wait(self._batch_result, timeout)
        return self._batch_result.error_of(self._index)

    def add_done_callback(self, fn: Callable[[Future[RecordMetadata]], object]) -> None:
        """Call `fn(self)` when there is a result, on the producer's thread.

        If there is one already, call `fn` now. Exceptions of `fn` are logged, as in concurrent.futures.
        """

        def call() -> None:
            try:
                fn(self)
            except Exception:  # other exceptions reach `notify`, which logs them, or the caller
                _LOG.exception("a done callback raised")

        self._batch_result.add_listener(call)


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """The results of many records.

    `delivered` has offset ranges. `failed` has pairs of a record count and the error of these records.
    """

    delivered: list[OffsetRange]
    failed: list[tuple[int, Exception]]

    @property
    def delivered_count(self) -> int:
        """Return the number of records that were delivered."""
        return sum(offsets.record_count for offsets in self.delivered)

    @property
    def failed_count(self) -> int:
        """Return the number of records that failed."""
        return sum(count for count, _ in self.failed)


class Delivery:
    """The future of many records that were sent by one call. `len` is their number.

    `parts` are (batch result, index of the first record in it, record count).
    """

    def __init__(self, parts: list[tuple[BatchResult, int, int]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(count for _, _, count in self._parts)

    def done(self) -> bool:
        """Return True once every record was delivered or has failed."""
        return all(result.is_done for result, _, _ in self._parts)

    def outcome(self, timeout: float | None = None) -> DeliveryResult:
        """Return all results, failures included.

        Raises TimedOut if the wait for the result of one batch takes longer than `timeout` seconds.
        """
        delivered: list[OffsetRange] = []
        failed: list[tuple[int, Exception]] = []
        for result, first, count in self._parts:
            _wait(result, timeout)
            for part in result.ranges(first, count):
                if isinstance(part, OffsetRange):
                    delivered.append(part)
                else:
                    failed.append(part)
        return DeliveryResult(delivered, failed)

    def result(self, timeout: float | None = None) -> DeliveryResult:
        """Return all results if every record was delivered.

        Raises the error of the first failed record, and TimedOut like `outcome`.
        """
        result = self.outcome(timeout)
        if result.failed:
            raise copy_to_raise(result.failed[0][1])
        return result


class AsyncDelivery:
    """The outcome of many records that were sent by one call of the asyncio producer. `len` is their number.

    `await delivery` returns a DeliveryResult, and raises the error of the first failed record.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def __len__(self) -> int:
        return len(self._delivery)

    def __await__(self) -> Generator[Any, None, DeliveryResult]:
        return self.result().__await__()

    def done(self) -> bool:
        """Return True once every record was delivered or has failed."""
        return self._delivery.done()

    async def outcome(self) -> DeliveryResult:
        """Return all results, failures included."""
        for result, _, _ in self._delivery._parts:
            await _until_done(result)
        return self._delivery.outcome()

    async def result(self) -> DeliveryResult:
        """Return all results if every record was delivered. Raises the error of the first failed record."""
        await self.outcome()
        return self._delivery.result()


async def _until_done(result: BatchResult) -> None:
    if result.is_done:
        return
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def complete() -> None:
        if not done.done():  # if the waiting task was cancelled, `done` is done
            done.set_result(None)

    def notify() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(complete)

    result.add_listener(notify)
    await done


@contextmanager
def delivery_on_error(delivery: Callable[[], Delivery | AsyncDelivery]) -> Iterator[None]:
    """If the `with` block raises, set the error's attribute `delivery` to the records appended so far."""
    try:
        yield
    except BaseException as error:
        appended = delivery()
        if len(appended):
            with suppress(AttributeError):
                # The exception of the caller's iterator may have slots, and accept no other attribute.
                error.delivery = appended  # type: ignore[attr-defined]
        raise


class Parts:
    """The parts of a Delivery while records are appended.

    Consecutive records of a batch become one part. Records of another thread separate two parts of the same
    batch.
    """

    def __init__(self) -> None:
        self.added: list[tuple[BatchResult, int, int]] = []
        """Parts that `merge` has not seen yet: a batch result, the index of the first record, and a count."""
        self._merged: list[tuple[BatchResult, int, int]] = []
        self._ends: dict[tuple[int, int], int] = {}
        """(identity of a result, index after a part's last record) -> place of the part in `_merged`."""

    def add(self, result: BatchResult, first: int, count: int) -> None:
        """Add records of a batch."""
        self.added.append((result, first, count))
        self.merge()

    def merge(self) -> None:
        """Move the parts of `added` to `_merged`, and join consecutive parts of one batch."""
        while self.added:
            result, first, count = self.added[0]
            begin, end = (id(result), first), (id(result), first + count)
            place = self._ends.get(begin, len(self._merged))
            if place < len(self._merged):
                _, first, before = self._merged[place]
                count += before
            # No signal handler can run between these two statements, because neither is a call. If a handler
            # raised there, records would count twice.
            self._merged[place : place + 1] = [(result, first, count)]
            del self.added[0]
            self._ends[end] = place
            self._ends.pop(begin, None)

    def delivery(self) -> Delivery:
        """Return the Delivery of all parts."""
        return Delivery([*self._merged, *self.added])
