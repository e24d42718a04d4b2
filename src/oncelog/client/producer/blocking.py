"""The producer's two faces over one core: blocking (`Producer`) and asyncio (`AsyncProducer`)."""

from __future__ import annotations

import asyncio
import queue
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from oncelog.client.arguments import headers_of
from oncelog.client.connection.cluster import parse_bootstrap
from oncelog.client.producer.batch import RECORD_OVERHEAD_BYTES, Callback, Outcome, Row, row_size_bytes
from oncelog.client.producer.core import ProducerCore
from oncelog.client.producer.delivery import Delivery, RecordFuture
from oncelog.client.producer.driver import ProducerDriver
from oncelog.client.producer.options import IdempotenceReport, ProducerOptions, resolve
from oncelog.client.producer.partitioner import Partitions
from oncelog.client.producer.record_forms import make_row
from oncelog.client.producer.transaction_requests import Transactions
from oncelog.client.producer.transactional_calls import (
    AsyncTransactionalCalls,
    TransactionalCalls,
    session_of,
)
from oncelog.config import PRODUCER
from oncelog.errors import MisuseError, TimedOut
from oncelog.runtime import system
from oncelog.runtime.loop_thread import check_running_loop
from oncelog.settings import Settings
from oncelog.types import Header, Headers, RecordMetadata

if TYPE_CHECKING:
    from oncelog.client.producer.arrow_encoding import EncodedBatch

__all__ = ["AsyncProducer", "Delivery", "Producer", "RecordFuture"]

T = TypeVar("T")
_CLOSED = "this producer is closed; make a new one"


def prepare(
    config: Mapping[str, object] | None, keywords: Mapping[str, object]
) -> tuple[Settings, ProducerOptions]:
    """Settings checked against each other (row I3); warns when defaulted idempotence had to go."""
    settings = PRODUCER.parse({**(config or {}), **keywords})
    options = resolve(settings)
    parse_bootstrap(settings["bootstrap.servers"])
    if settings["enable.idempotence"] and not options.is_idempotent:
        warnings.warn(f"idempotence is {options.reason}; records may be doubled", UserWarning, stacklevel=4)
    return settings, options


class AsyncProducer(AsyncTransactionalCalls):
    """Sends records from asyncio code. `await send(...)` waits for room, and gives an awaitable outcome.

        async with AsyncProducer({"bootstrap.servers": "127.0.0.1:9092"}) as producer:
            outcome = await producer.send("payments", b"42.00", b"account-1")
            metadata = await outcome

    Settings: a mapping with Kafka's keys, or keywords with underscores for the dots.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self.settings, self.options = prepare(config, settings)
        self._driver: ProducerDriver | None = None
        self._transactions: Transactions | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _started(self) -> ProducerDriver:
        if self._closed:
            raise MisuseError(_CLOSED)
        check_running_loop(self._driver.loop if self._driver else None, "producer")
        if self._driver is None:
            self._driver = ProducerDriver(self.settings, self.options)
            self._driver.start()
            self._transactions = session_of(self._driver)
        return self._driver

    async def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
        on_delivery: Callback | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Take a record. Raises TimedOut after max.block.ms without metadata or room in the buffer."""
        driver = self._started()
        row = make_row(value, key, timestamp_ms, headers)
        size_bytes = row_size_bytes(row[1], row[2], row[3])
        joined = driver.state.join(topic, partition, row, size_bytes, on_delivery)
        if joined is not None:
            return _as_asyncio(RecordFuture(*joined))
        was_asked_again = False
        while True:
            await self._wait_for_room(driver, size_bytes)
            with driver.state.lock:
                core = driver.state.peek
                is_known = core.topic(topic) is not None
                ask_again = is_known and not was_asked_again and core.may_know_too_few(topic, partition)
                if (is_known and not ask_again) or core.fatal is not None:
                    outcome, index, wake = core.append(
                        topic, partition, row, size_bytes, driver.now_ms(), on_delivery
                    )
                    break
            await (driver.look_up_again(topic) if ask_again else driver.learn(topic))
            was_asked_again |= ask_again
        if wake:
            driver.wake()
        return _as_asyncio(RecordFuture(outcome, index))

    async def _wait_for_room(self, driver: ProducerDriver, size_bytes: int) -> None:
        core = driver.state.peek
        if core.can_append(size_bytes):
            return
        deadline = driver.now_ms() + self.options.max_block_ms
        core.room_waiter_count += 1
        try:
            while not core.can_append(size_bytes):
                driver.wake()
                left_s = (deadline - driver.now_ms()) / 1000
                try:
                    async with asyncio.timeout(max(left_s, 0)):
                        await driver.next_settled()
                except TimeoutError:
                    raise _no_room(self.options) from None
        finally:
            core.room_waiter_count -= 1

    async def flush(self) -> None:
        """Send what was taken so far now, and wait until its outcomes were told and callbacks returned."""
        await self._started().flush()
        # asyncio sets the futures of `send` one turn of the loop after their outcomes:
        # test_futures_are_done_when_an_asyncio_flush_returns.
        await asyncio.sleep(0)

    def metrics(self) -> dict[str, float]:
        """Numbers under Kafka's names (producer-metrics); empty before the first send."""
        return _metrics(self._driver) if self._driver else {}

    def idempotence(self) -> IdempotenceReport:
        """Whether idempotence is on, and with which settings (row I22)."""
        return _report(self.options, self._driver)

    async def close(self) -> None:
        """Abort an open transaction or flush, then end the connections; safe to call twice.

        The abort takes max.block.ms at most. A transaction that another producer began is left to that one.
        """
        if self._closed:
            if self._driver is not None:
                await self._driver.close()
            return
        check_running_loop(self._driver.loop if self._driver else None, "producer")
        try:
            if self._driver is not None:
                await self._driver.refuse_appends(MisuseError(_CLOSED))
                if self._transactions is not None:
                    await self._transactions.end_open()
                await self._driver.flush()
        finally:
            self._closed = True
            if self._driver is not None:
                await self._driver.close()


def _as_asyncio(record: RecordFuture) -> asyncio.Future[RecordMetadata]:
    return asyncio.wrap_future(record)


def _no_room(options: ProducerOptions) -> TimedOut:
    return TimedOut(
        f"no room in buffer.memory={options.buffer_bytes} within max.block.ms={options.max_block_ms}: "
        "records come in faster than the broker acknowledges them"
    )


def _metrics(driver: ProducerDriver) -> dict[str, float]:
    with driver.state.lock:
        core = driver.state.peek
        return core.metrics.to_dict(driver.now_ms(), core.buffered_bytes, driver.options.buffer_bytes)


def _report(options: ProducerOptions, driver: ProducerDriver | None) -> IdempotenceReport:
    identity = driver.state.peek.identity if driver else None
    return options.report(*(identity or (None, None)))


class Producer(TransactionalCalls):
    """Sends records; each is stored once, in order per partition, as long as this object lives (row I2).

        with Producer({"bootstrap.servers": "127.0.0.1:9092"}) as producer:
            future = producer.send("payments", b"42.00", b"account-1")
            print(future.result(timeout=10).offset)

    `send` returns at once; a thread of its own carries the records. Safe to use from many threads. A signal
    handler should raise or set a flag: its calls get MisuseError where it has interrupted one of the same.
    Settings: a mapping with Kafka's keys, or keywords with underscores for the dots. Raises ConfigError.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self.settings, self.options = prepare(config, settings)
        self._closed = False
        self._thread = system.current().loop_thread("oncelog-producer")
        try:
            self._driver: ProducerDriver = self._thread.run(self._make_driver())
        except BaseException:
            self._thread.stop()
            raise
        self._transactions = session_of(self._driver)
        self._state = self._driver.state
        self._join = self._state.join  # one step away for each record
        self._wall_ns = self._driver.runtime.wall_ns

    async def _make_driver(self) -> ProducerDriver:
        driver = ProducerDriver(self.settings, self.options)
        driver.start()
        return driver

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
        on_delivery: Callback | None = None,
    ) -> RecordFuture:
        """Take a record for sending.

        Blocks only for the topic's metadata and for room in buffer.memory, at most max.block.ms, then
        TimedOut. Raises MessageTooLarge, MisuseError (closed, no such partition, not bytes).
        `on_delivery(metadata, error)` is called on the producer's thread; it must not block.
        """
        if (
            type(value) is bytes
            and (key is None or type(key) is bytes)
            and timestamp_ms is None
            and not headers
        ):
            row: Row = (self._wall_ns() // 1_000_000, key, value, ())
            size_bytes = RECORD_OVERHEAD_BYTES + len(value) + (len(key) if key else 0)
        else:
            row = make_row(value, key, timestamp_ms, headers)
            size_bytes = row_size_bytes(row[1], row[2], row[3])
        # Nearly every record joins a batch that is open: that way is short, everything else is in `_append`.
        joined = self._join(topic, partition, row, size_bytes, on_delivery)
        if joined is None:
            joined = self._append(topic, partition, row, size_bytes, on_delivery)
        outcome, index = joined
        return RecordFuture(outcome, index)

    def _append(
        self, topic: str, partition: int | None, row: Row, size_bytes: int, callback: Callback | None
    ) -> tuple[Outcome, int]:
        """The long way: the topic is looked up, room is waited for, a partition chosen, a batch begun."""
        try:
            outcome, index, wake = self._with_room(
                topic,
                size_bytes,
                lambda core: core.append(topic, partition, row, size_bytes, self._driver.now_ms(), callback),
                partition,
            )
            if wake:
                self._wake()
        except BaseException:
            self._wake()  # an interrupt may have come between: what was taken must not lie there for a minute
            raise
        return outcome, index

    def _with_room(
        self, topic: str, size_bytes: int, act: Callable[[ProducerCore], T], partition: int | None = None
    ) -> T:
        """Act on a core that knows the topic and has room (or raises its fatal error), holding its lock.

        The topic is looked up once more for a `partition` that it does not have, as the Java client does:
        one that was added was refused until metadata.max.age.ms. Guard:
        test_a_partition_that_was_added_takes_records_at_once.
        """
        was_asked_again = self._driver.is_own_thread()
        core, deadline_ms = self._state.peek, None
        while True:
            self._check()
            if not core.can_append(size_bytes):
                deadline_ms = deadline_ms or self._driver.now_ms() + self.options.max_block_ms
                self._wait_for_room(core, size_bytes, deadline_ms)
            with self._state.lock:
                if not core.can_append(size_bytes):
                    continue  # another thread has taken it
                is_known = core.topic(topic) is not None
                ask_again = is_known and not was_asked_again and core.may_know_too_few(topic, partition)
                if (is_known and not ask_again) or core.fatal is not None:
                    self._state.is_changing = True
                    try:
                        try:
                            return act(core)
                        finally:
                            if core.is_half_done:  # by what a signal handler raised, at any call within
                                core.put_right()
                    finally:
                        self._state.is_changing = False
            self._thread.run(self._driver.look_up_again(topic) if ask_again else self._driver.learn(topic))
            was_asked_again |= ask_again

    def _check(self) -> None:
        self._state.check_not_held()
        if self._closed or not self._thread.is_running:
            raise MisuseError(
                "this producer is closed (or was made before a fork, or the interpreter ends); make a new one"
            )

    def _wake(self) -> None:
        with suppress(MisuseError, RuntimeError):  # closed since: the record was sent by close()
            self._thread.call_soon(self._driver.wake)

    def _wait_for_room(self, core: ProducerCore, size_bytes: int, deadline_ms: float) -> None:
        """Return when there may be room: the caller looks again, holding the lock."""
        if self._driver.is_own_thread():
            raise _no_room(self.options)  # a callback that waits would stop what it waits for
        news: queue.SimpleQueue[None] = queue.SimpleQueue()
        is_counted = False
        try:
            with self._state.lock:
                core.room_waiter_count += 1
                is_counted = True
            self._state.room_waiters.append(news)
            self._thread.call_soon(self._driver.wake)
            while not core.can_append(size_bytes):
                left_s = (deadline_ms - self._driver.now_ms()) / 1000
                if left_s <= 0:
                    raise _no_room(self.options)
                self._thread.wait_for(news, left_s)
        finally:
            with suppress(ValueError):
                self._state.room_waiters.remove(news)
            if is_counted:
                with self._state.lock:
                    core.room_waiter_count -= 1

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | None],
        keys: Iterable[bytes | None] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: Iterable[int] | int | None = None,
        headers: Headers = (),
    ) -> Delivery:
        """Take many records; one outcome for all. `headers` are those of every record.

        Lists are checked before their first record is taken. Any other error after some records were taken
        has their outcome as its `delivery`.
        """
        now_ms = self._wall_ns() // 1_000_000
        stamps = iter(timestamps_ms) if isinstance(timestamps_ms, Iterable) else None
        fixed = timestamps_ms if isinstance(timestamps_ms, int) else now_ms
        key_iterator = iter(keys) if keys is not None else None
        shared = headers_of(headers)
        self._check_rows(values, keys, shared)
        parts: dict[int, tuple[Outcome, int, int]] = {}
        with _telling_what_was_taken(parts):
            for value in values:
                key = next(key_iterator, None) if key_iterator else None
                row = make_row(value, key, next(stamps, fixed) if stamps else fixed, shared)
                size_bytes = row_size_bytes(*row[1:])
                joined = self._state.join(topic, partition, row, size_bytes, None)
                outcome, index = joined or self._append(topic, partition, row, size_bytes, None)
                known = parts.get(id(outcome))
                parts[id(outcome)] = (outcome, known[1], known[2] + 1) if known else (outcome, index, 1)
        return Delivery(list(parts.values()))

    def _check_rows(
        self, values: Iterable[bytes | None], keys: Iterable[bytes | None] | None, headers: tuple[Header, ...]
    ) -> None:
        """Raise for records that can never be taken, before the first one is."""
        if not isinstance(values, (list, tuple)):
            return  # it can be read only once
        known_keys = keys if isinstance(keys, (list, tuple)) else ()
        for value, key in zip_longest(values, known_keys[: len(values)]):
            row = make_row(value, key, 0, headers)
            self._state.peek.check_size(row_size_bytes(*row[1:]))

    def send_table(self, topic: str, table: Any, *, partition: int | None = None) -> Delivery:
        """Take a table: column value and, if wanted, key, timestamp, headers.

        An Arrow table, record batch or reader, or any object with `__arrow_c_stream__`: data frames of
        Polars and pandas have it. Raises MisuseError on another object.

        Encoded in whole columns. Partitions are chosen as in `send`; records without a key go to one
        partition per table. An error after part of it was taken has that part as its `delivery`.
        """
        from oncelog.client.producer.arrow_encoding import encode_table

        queues = self._with_room(topic, 0, lambda core: core.current_topic(topic), partition)
        if partition is not None:
            queues.queue(partition, None, 0, 0)

        def choose(keys: Any, rows: int) -> Partitions | int:
            with self._state.lock:
                return queues.choose_many(keys, rows)

        parts: dict[int, tuple[Outcome, int, int]] = {}
        with _telling_what_was_taken(parts):
            for batch in encode_table(table, self.options, partition, choose):
                outcome = self._append_sealed(topic, batch)
                parts[id(outcome)] = (outcome, 0, batch.record_count)
                self._wake()
        return Delivery(list(parts.values()))

    def _append_sealed(self, topic: str, batch: EncodedBatch) -> Outcome:
        return self._with_room(
            topic,
            len(batch.data),
            lambda core: core.append_sealed(
                topic, batch.partition, batch.data, batch.record_count, batch.times, self._driver.now_ms()
            ),
        )

    def flush(self, timeout: float | None = None) -> None:
        """Send what was taken so far now, and wait until its outcomes were told and callbacks have returned.

        Records that others send meanwhile are not waited for. Raises TimedOut, MisuseError.
        """
        if self._closed:
            return
        self._state.check_not_held()
        if not self._thread.is_running or self._driver.is_own_thread():
            raise MisuseError(
                "flush() cannot wait here: in a callback, in a forked process, or as the interpreter ends"
            )
        with self._state.lock:
            if self._state.is_told:
                return
        try:
            self._thread.run(self._driver.flush(), timeout)
        except TimedOut:
            raise TimedOut(f"records are still under way after {timeout:g} s") from None

    def metrics(self) -> dict[str, float]:
        """Numbers under Kafka's names (producer-metrics)."""
        return _metrics(self._driver)

    def idempotence(self) -> IdempotenceReport:
        """Whether idempotence is on, and with which settings (row I22)."""
        return _report(self.options, self._driver)

    def close(self, timeout: float | None = None) -> None:
        """Flush within `timeout` seconds (None: as long as delivery.timeout.ms allows), then end.

        An open transaction is aborted instead, within the same time (None: max.block.ms); one that another
        producer began is left to that one. What cannot be aborted in time is logged; its coordinator aborts
        it after transaction.timeout.ms.
        """
        self._state.check_not_held()
        if self._closed:
            self._end()
            return
        if self._driver.is_own_thread():
            raise MisuseError("close() cannot wait here, in a delivery callback; call it from another thread")
        try:
            if self._thread.is_running:
                self._thread.run(self._driver.refuse_appends(MisuseError(_CLOSED)))
                if self._transactions is not None:
                    timeout = self._end_open(self._transactions, timeout)
                self.flush(timeout)
        finally:
            self._closed = True
            self._end()

    def _end(self) -> None:
        """End connections and the thread, which an interrupt, or another thread, may have begun to do."""
        if self._driver.is_own_thread():
            return
        if self._thread.is_running:
            with suppress(MisuseError):  # another thread has ended them
                self._thread.run(self._driver.close())
        self._thread.stop()

    def _end_open(self, transactions: Transactions, timeout: float | None) -> float | None:
        """End an open transaction; return what is left of the timeout."""
        started_ms = self._driver.now_ms()
        self._thread.run(transactions.end_open(timeout))
        return None if timeout is None else max(timeout - (self._driver.now_ms() - started_ms) / 1000, 0)


@contextmanager
def _telling_what_was_taken(parts: Mapping[int, tuple[Outcome, int, int]]) -> Iterator[None]:
    """Give an error that ends a call half-way the outcome of the records that it took, as `delivery`."""
    try:
        yield
    except BaseException as error:
        if parts:
            with suppress(AttributeError):  # an exception with slots, raised by the caller's iterator
                error.delivery = Delivery(list(parts.values()))  # type: ignore[attr-defined]
        raise
