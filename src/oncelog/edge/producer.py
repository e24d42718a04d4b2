"""The producer's two faces over one core: blocking (`Producer`) and asyncio (`AsyncProducer`)."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from oncelog.client.producer_batch import RECORD_OVERHEAD_BYTES, Callback, Outcome, Row, row_size_bytes
from oncelog.client.producer_options import IdempotenceReport, ProducerOptions, resolve
from oncelog.config import PRODUCER
from oncelog.edge import machine
from oncelog.edge.cluster import parse_bootstrap
from oncelog.edge.delivery import Delivery, RecordFuture
from oncelog.edge.loop import check_running_loop
from oncelog.edge.producer_driver import ProducerDriver
from oncelog.edge.producer_sender import Sender, make_row
from oncelog.edge.transactional import AsyncTransactionalCalls, TransactionalCalls, session_of
from oncelog.edge.transactions import Transactions
from oncelog.errors import MisuseError, TimedOut
from oncelog.settings import Settings
from oncelog.types import Header, RecordMetadata, TopicPartition

__all__ = ["AsyncProducer", "Delivery", "Producer", "RecordFuture"]


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
        self._sender: Sender | None = None
        self._transactions: Transactions | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _started(self) -> Sender:
        if self._closed:
            raise MisuseError("this producer is closed; make a new one")
        check_running_loop(self._driver.loop if self._driver else None, "producer")
        if self._sender is None:
            self._driver = ProducerDriver(self.settings, self.options)
            self._driver.start()
            self._transactions = session_of(self._driver)
            self._sender = Sender(self._driver)
        return self._sender

    async def send(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Iterable[Header] = (),
        on_delivery: Callback | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Take a record. Raises TimedOut after max.block.ms without metadata or room in the buffer."""
        sender = self._started()
        row = make_row(value, key, timestamp_ms, headers)
        driver = sender.driver
        if topic not in sender.partitions:
            sender.learn(topic, await driver.partition_count(topic))
        size_bytes = row_size_bytes(row[1], row[2], row[3])
        await self._wait_for_room(driver, size_bytes)
        with driver.lock:
            outcome, index, wake = sender.append(
                topic, partition, row, size_bytes, on_delivery, driver.now_ms()
            )
        if wake:
            driver.wake()
        return _as_asyncio(RecordFuture(outcome, index))

    async def _wait_for_room(self, driver: ProducerDriver, size_bytes: int) -> None:
        deadline = driver.now_ms() + self.options.max_block_ms
        while not driver.core.has_room(size_bytes):
            driver.wake()
            left_s = (deadline - driver.now_ms()) / 1000
            try:
                await asyncio.wait_for(driver.next_settled(), max(left_s, 0))
            except TimeoutError:
                raise _no_room(self.options) from None

    async def flush(self) -> None:
        """Send everything now and wait until all of it has its outcome."""
        driver = self._started().driver
        with driver.lock:
            driver.core.flush()
        driver.wake()
        while not driver.core.is_idle:
            await driver.next_settled()

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
            return
        check_running_loop(self._driver.loop if self._driver else None, "producer")
        try:
            if self._transactions is not None:
                await self._transactions.end_open()
            if self._driver is not None:
                await self.flush()
        finally:
            self._closed = True
            if self._driver is not None:
                await self._driver.close()


_alive: weakref.WeakSet[Producer] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child no thread carries records: every `send` there must come to the check that says so."""
    for producer in _alive:
        producer._lanes, producer._sticky_lanes = {}, {}
        producer._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _as_asyncio(record: RecordFuture) -> asyncio.Future[RecordMetadata]:
    return asyncio.wrap_future(record)


def _no_room(options: ProducerOptions) -> TimedOut:
    return TimedOut(
        f"no room in buffer.memory={options.buffer_bytes} within max.block.ms={options.max_block_ms}: "
        "records come in faster than the broker acknowledges them"
    )


def _metrics(driver: ProducerDriver) -> dict[str, float]:
    with driver.lock:
        core = driver.core
        return core.metrics.to_dict(driver.now_ms(), core.buffered_bytes, driver.options.buffer_bytes)


def _report(options: ProducerOptions, driver: ProducerDriver | None) -> IdempotenceReport:
    identity = driver.core.identity if driver else None
    return options.report(*(identity or (None, None)))


class Producer(TransactionalCalls):
    """Sends records; each is stored once, in order per partition, as long as this object lives (row I2).

        with Producer({"bootstrap.servers": "127.0.0.1:9092"}) as producer:
            future = producer.send("payments", b"42.00", b"account-1")
            print(future.result(timeout=10).offset)

    `send` returns at once; a thread of its own carries the records. Safe to use from many threads.
    Settings: a mapping with Kafka's keys, or keywords with underscores for the dots. Raises ConfigError.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self.settings, self.options = prepare(config, settings)
        self._thread = machine.current().loop_thread("oncelog-producer")
        self._driver: ProducerDriver = self._thread.run(self._make_driver())
        self._transactions = session_of(self._driver)
        self._sender = Sender(self._driver)
        self._closed = False
        # What `send` looks at for each record, one step away.
        self._lock, self._core = self._driver.lock, self._driver.core
        self._lanes, self._sticky_lanes = self._sender.lanes, self._sender.sticky_lanes
        self._join_bytes = min(self.options.batch_bytes, self.options.max_request_bytes)
        self._buffer_bytes = self.options.buffer_bytes
        self._wall_ns = self._driver.machine.wall_ns
        _alive.add(self)

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
        headers: Iterable[Header] = (),
        on_delivery: Callback | None = None,
    ) -> RecordFuture:
        """Take a record for sending.

        Blocks only for the topic's metadata and for room in buffer.memory, at most max.block.ms, then
        TimedOut. Raises MessageTooLarge, MisuseError (closed, no such partition, not bytes).
        `on_delivery(metadata, error)` is called on the producer's thread; it must not block.
        """
        # Nearly every record joins a batch that is open: that way is short, everything else is in `_append`.
        is_plain = type(value) is bytes and (key is None or type(key) is bytes)
        if is_plain and timestamp_ms is None and not headers:
            row: Row = (self._wall_ns() // 1_000_000, key, value, ())
            size_bytes = RECORD_OVERHEAD_BYTES + len(value) + (len(key) if key else 0)  # type: ignore[arg-type]
        else:
            row = make_row(value, key, timestamp_ms, headers)
            size_bytes = row_size_bytes(row[1], row[2], row[3])
        with self._lock:
            lanes = self._lanes.get(topic, ())
            if partition is None and key is not None and lanes:
                partition = self._sender.choose(topic, row[1], size_bytes)
            if partition is None:
                lane = self._sticky_lanes.get(topic)
            else:
                lane = lanes[partition] if 0 <= partition < len(lanes) else None
            batch = None if lane is None else lane.open
            if batch is not None and batch.size_bytes + size_bytes <= self._join_bytes:
                core = self._core
                if core.buffered_bytes + size_bytes <= self._buffer_bytes:
                    outcome, rows = batch.outcome, batch.rows
                    if on_delivery is not None:
                        outcome.callbacks.append((len(rows), on_delivery))
                    rows.append(row)
                    batch.size_bytes += size_bytes
                    core.buffered_bytes += size_bytes
                    return RecordFuture(outcome, len(rows) - 1)
        self._check(topic)
        return RecordFuture(*self._append(topic, partition, row, size_bytes, on_delivery))

    def _check(self, topic: str) -> None:
        if self._closed or not self._thread.is_running:
            raise MisuseError("this producer is closed (or was made before a fork); make a new one")
        if topic not in self._sender.partitions:
            self._sender.learn(topic, self._thread.run(self._driver.partition_count(topic)))

    def _append(
        self, topic: str, partition: int | None, row: Row, size_bytes: int, callback: Callback | None
    ) -> tuple[Outcome, int]:
        """The long way: room is waited for, a partition chosen, a batch begun."""
        driver = self._driver
        with driver.lock:
            if not driver.core.has_room(size_bytes):
                self._wait_for_room(size_bytes)
            outcome, index, wake = self._sender.append(
                topic, partition, row, size_bytes, callback, driver.now_ms()
            )
        if wake:
            self._thread.call_soon(driver.wake)
        return outcome, index

    def _wait_for_room(self, size_bytes: int) -> None:
        """Holding the lock, which the wait lets go of."""
        if self._driver.is_own_thread():
            raise _no_room(self.options)  # a callback that waits would stop what it waits for
        self._thread.call_soon(self._driver.wake)
        seconds = self.options.max_block_ms / 1000
        core, settled = self._driver.core, self._driver.settled
        if not self._thread.wait_for(settled, lambda: core.has_room(size_bytes), seconds):
            raise _no_room(self.options)

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | None],
        keys: Iterable[bytes | None] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: Iterable[int] | int | None = None,
        headers: Iterable[Header] = (),
    ) -> Delivery:
        """Take many records; one outcome for all. `headers` are those of every record."""
        self._check(topic)
        now_ms = self._wall_ns() // 1_000_000
        stamps = iter(timestamps_ms) if isinstance(timestamps_ms, Iterable) else None
        fixed = timestamps_ms if isinstance(timestamps_ms, int) else now_ms
        key_iterator = iter(keys) if keys is not None else None
        shared = tuple(headers)
        parts: dict[int, tuple[Outcome, int, int]] = {}
        for value in values:
            key = next(key_iterator, None) if key_iterator else None
            row = make_row(value, key, next(stamps, fixed) if stamps else fixed, shared)
            outcome, index = self._append(topic, partition, row, row_size_bytes(*row[1:]), None)
            known = parts.get(id(outcome))
            parts[id(outcome)] = (outcome, known[1], known[2] + 1) if known else (outcome, index, 1)
        return Delivery(list(parts.values()))

    def send_table(self, topic: str, table: Any, *, partition: int | None = None) -> Delivery:
        """Take an Arrow table or record batch: column value and, if wanted, key, timestamp, headers.

        Encoded in whole columns. Partitions are chosen as in `send`; records without a key go to one
        partition per table.
        """
        from oncelog.edge.tables import encode_table

        self._check(topic)
        driver, sender = self._driver, self._sender
        if partition is not None:
            sender.named(topic, partition)
        parts: list[tuple[Outcome, int, int]] = []
        for batch in encode_table(
            table, self.options, partition, lambda keys, rows: sender.choose_many(topic, keys, rows)
        ):
            with driver.lock:
                if not driver.core.has_room(len(batch.data)):
                    self._wait_for_room(len(batch.data))
                tp = TopicPartition(topic, batch.partition)
                outcome = driver.core.append_sealed(
                    tp, batch.data, batch.record_count, batch.times, driver.now_ms()
                )
            parts.append((outcome, 0, batch.record_count))
            self._thread.call_soon(driver.wake)
        return Delivery(parts)

    def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until all of it has its outcome. Raises TimedOut, MisuseError."""
        if self._closed:
            return
        if not self._thread.is_running or self._driver.is_own_thread():
            raise MisuseError("flush() cannot wait here: in a delivery callback, or in a forked process")
        with self._driver.lock:
            self._driver.core.flush()
            self._thread.call_soon(self._driver.wake)
            core, settled = self._driver.core, self._driver.settled
            if not self._thread.wait_for(settled, lambda: core.is_idle, timeout):
                raise TimedOut(f"records are still under way after {timeout:g} s")

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
        if self._closed:
            return
        try:
            if self._thread.is_running and self._transactions is not None:
                timeout = self._end_open(self._transactions, timeout)
            if self._thread.is_running:
                self.flush(timeout)
        finally:
            self._closed = True
            if self._thread.is_running:
                self._thread.run(self._driver.close())
                self._thread.stop()

    def _end_open(self, transactions: Transactions, timeout: float | None) -> float | None:
        """End an open transaction; return what is left of the timeout."""
        started_ms = self._driver.now_ms()
        self._thread.run(transactions.end_open(timeout))
        return None if timeout is None else max(timeout - (self._driver.now_ms() - started_ms) / 1000, 0)
