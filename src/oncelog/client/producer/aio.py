"""The asyncio producer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from oncelog.client.arguments import headers_of
from oncelog.client.producer.batch import BatchResult, Callback
from oncelog.client.producer.core import ProducerCore
from oncelog.client.producer.delivery import AsyncDelivery, Parts, RecordFuture, delivery_on_error
from oncelog.client.producer.driver import CLOSED, ProducerDriver, no_room_error, parse_settings
from oncelog.client.producer.many import (
    CHUNK_ROWS,
    Columns,
    check_arguments,
    check_rows,
    columns_of,
    rows_of,
)
from oncelog.client.producer.options import IdempotenceReport
from oncelog.client.producer.rows import Row, make_row, row_size_bytes
from oncelog.client.producer.transaction_manager import (
    Offsets,
    TransactionManager,
    require_manager,
    transaction_manager_of,
)
from oncelog.client.serialization import RecordSerializer, Serializer, record_serializer
from oncelog.errors import MisuseError, OncelogError
from oncelog.runtime.loop_thread import check_running_loop
from oncelog.runtime.optional import check_pyarrow
from oncelog.types import ConsumerGroupMetadata, Headers, RecordMetadata, TransactionShare

if TYPE_CHECKING:
    from oncelog.client.producer.arrow_encoding import EncodedBatch
    from oncelog.client.producer.column_partitions import Partitions

T = TypeVar("T")


class AsyncProducer:
    """A producer for asyncio. `await send(...)` waits for room and returns a future of the record's metadata.

        async with AsyncProducer({"bootstrap.servers": "127.0.0.1:9092"}) as producer:
            future = await producer.send("payments", b"42.00", b"account-1")
            metadata = await future

    Settings are Kafka's keys in a mapping, or keywords with underscores for the dots. The constructor raises
    ConfigError for invalid settings. A producer belongs to the event loop that uses it first; a call on
    another loop raises MisuseError. `key_serializer` and `value_serializer` work as in `oncelog.Producer`.
    """

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        key_serializer: Serializer | None = None,
        value_serializer: Serializer | None = None,
        **settings: object,
    ) -> None:
        self._serializer = record_serializer(key_serializer, value_serializer)
        self.settings, self.options = parse_settings(config, settings)
        self._driver: ProducerDriver | None = None
        self._transactions: TransactionManager | None = None
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
            raise MisuseError(CLOSED)
        check_running_loop(self._driver.loop if self._driver else None, "producer")
        if self._driver is None:
            self._driver = ProducerDriver(self.settings, self.options)
            self._driver.start()
            self._transactions = transaction_manager_of(self._driver)
        return self._driver

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
        on_delivery: Callback | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Append a record to its partition's open batch, and return the future of its delivery.

        Awaits only the topic's metadata and room in buffer.memory. Raises TimedOut if that takes longer than
        max.block.ms, MessageTooLarge for a record above max.request.size, and UnknownTopicOrPartition. Raises
        MisuseError for a closed producer, a partition that does not exist, or data that is not bytes. With
        serializers, `value` and `key` have the types that these accept. If a serializer fails,
        SerializationError is raised.

        If the delivery fails, the future raises the error; see `RecordFuture`. After a delivery or a failure,
        the event loop calls `on_delivery(metadata, error)`, and one of the two arguments is None. The
        callback must not block. `timestamp_ms` is milliseconds since the epoch, by default the current time.
        """
        driver = self._started()
        if (serializer := self._serializer) is not None:
            if serializer.may_wait and not serializer.is_ready(topic, value, key):
                await serializer.prepare(topic, value, key, partition)
                driver = self._started()  # raises if the producer was closed meanwhile
            value = serializer.value(topic, value, partition)
            key = serializer.key(topic, key, partition)
        row = make_row(value, key, timestamp_ms, headers, driver.runtime.wall_ns)
        size_bytes = row_size_bytes(row[1], row[2], row[3])
        with driver.lock:
            appended = driver.core.append_to_open_batch(topic, partition, row, size_bytes, on_delivery)
        if appended is not None:
            return asyncio.wrap_future(RecordFuture(*appended))
        result, index = await self._append(driver, topic, partition, row, size_bytes, on_delivery)
        return asyncio.wrap_future(RecordFuture(result, index))

    async def _append(
        self,
        driver: ProducerDriver,
        topic: str,
        partition: int | None,
        row: Row,
        size_bytes: int,
        callback: Callback | None = None,
    ) -> tuple[BatchResult, int]:
        """Append a record that needs the topic's metadata, room in the buffer, or a new batch."""
        result, index, needs_drain = await self._with_room(
            driver,
            topic,
            size_bytes,
            lambda core: core.append(topic, partition, row, size_bytes, driver.now_ms(), callback),
            partition,
        )
        if needs_drain:
            driver.wake()
        return result, index

    async def _with_room(
        self,
        driver: ProducerDriver,
        topic: str,
        size_bytes: int,
        act: Callable[[ProducerCore], T],
        partition: int | None = None,
    ) -> T:
        """Call `act` with the lock held, when the core knows the topic and has room, or has a fatal error.

        If the topic has no such `partition`, look the topic up once more. See `Producer._with_room`.
        """
        was_looked_up_again = False
        core = driver.core
        while True:
            await self._wait_for_room(driver, size_bytes)
            with driver.lock:
                is_known = core.topic(topic) is not None
                is_stale = (
                    is_known and not was_looked_up_again and core.may_have_more_partitions(topic, partition)
                )
                if (is_known and not is_stale) or core.fatal is not None:
                    return act(core)
            await (driver.refresh_topic(topic) if is_stale else driver.look_up_topic(topic))
            was_looked_up_again |= is_stale

    async def _wait_for_room(self, driver: ProducerDriver, size_bytes: int) -> None:
        core = driver.core
        if core.can_append(size_bytes):
            return
        deadline_ms = driver.now_ms() + self.options.max_block_ms
        core.room_waiter_count += 1
        try:
            while not core.can_append(size_bytes):
                driver.wake()
                left_s = (deadline_ms - driver.now_ms()) / 1000
                try:
                    async with asyncio.timeout(max(left_s, 0)):
                        await driver.next_completion()
                except TimeoutError:
                    raise no_room_error(self.options) from None
        finally:
            core.room_waiter_count -= 1

    async def send_many(
        self,
        topic: str,
        values: Iterable[Any],
        keys: Iterable[Any] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: Iterable[int] | int | None = None,
        headers: Headers = (),
    ) -> AsyncDelivery:
        """Append many records, and return one AsyncDelivery for all of them. Awaits and raises like `send`.

        The arguments, and the attribute `delivery` of an error, are as in `Producer.send_many`. Other
        tasks run after each 2048 records.
        """
        driver = self._started()
        check_arguments(values, keys, timestamps_ms)
        core, wall_ns = driver.core, driver.runtime.wall_ns
        now_ms, shared, parts = wall_ns() // 1_000_000, headers_of(headers), Parts()
        with delivery_on_error(lambda: AsyncDelivery(parts.delivery())):
            if (serializer := self._serializer) is not None:
                values = await _in_pieces(
                    values,
                    lambda piece: serializer.values(topic, piece, partition),
                    _Readiness(serializer, topic, partition, is_key=False),
                )
                if keys is not None:
                    keys = await _in_pieces(
                        keys,
                        lambda piece: serializer.keys(topic, piece, partition),
                        _Readiness(serializer, topic, partition, is_key=True),
                    )
                driver = self._started()  # raises if the producer was closed meanwhile
            check_rows(core, values, keys, shared, self.options.max_request_bytes, wall_ns)
            columns = columns_of(values, keys, timestamps_ms, shared, now_ms)
            if columns is not None:
                await self._send_lists(driver, topic, partition, columns, parts, now_ms)
                return AsyncDelivery(parts.delivery())
            rows = rows_of(values, keys, timestamps_ms, shared, now_ms, wall_ns)
            for number, row in enumerate(rows, start=1):
                await self._append_row(driver, topic, partition, row, parts)
                if number % CHUNK_ROWS == 0:
                    await asyncio.sleep(0)
        return AsyncDelivery(parts.delivery())

    async def _send_lists(
        self,
        driver: ProducerDriver,
        topic: str,
        partition: int | None,
        columns: Columns,
        parts: Parts,
        now_ms: int,
    ) -> None:
        """Append the rows of lists: with `append_many` while they fit into open batches, and otherwise one by
        one.
        """
        appender, count = driver.core.appender, len(columns.values)
        number = 0
        while number < count:
            last = min(number + CHUNK_ROWS, count)
            with driver.lock:
                number = appender.append_many(topic, partition, *columns, number, last, parts.added)
            parts.merge()
            if number < last:
                row = columns.row(number, now_ms, driver.runtime.wall_ns)
                await self._append_row(driver, topic, partition, row, parts)
                number += 1
            else:
                await asyncio.sleep(0)

    async def _append_row(
        self, driver: ProducerDriver, topic: str, partition: int | None, row: Row, parts: Parts
    ) -> None:
        size_bytes = row_size_bytes(*row[1:])
        with driver.lock:
            appended = driver.core.append_to_open_batch(topic, partition, row, size_bytes, None)
        parts.add(*(appended or await self._append(driver, topic, partition, row, size_bytes)), 1)

    async def send_table(self, topic: str, table: Any, *, partition: int | None = None) -> AsyncDelivery:
        """Append the rows of a table, which is encoded column by column. Awaits and raises like `send`.

        `table`, and the choice of partitions, are as in `Producer.send_table`. The event loop's thread
        encodes the table batch by batch, and other tasks run after each batch.
        """
        check_pyarrow("send_table")
        from oncelog.client.producer.arrow_encoding import encode_table
        from oncelog.client.producer.column_partitions import partitions_of_rows

        driver = self._started()
        queues = await self._with_room(driver, topic, 0, lambda core: core.topic_to_append(topic), partition)
        if partition is not None:
            queues.queue(partition, None, 0)

        def choose(keys: Any, rows: int) -> Partitions | int:
            with driver.lock:
                return partitions_of_rows(queues, keys, rows)

        parts = Parts()
        with delivery_on_error(lambda: AsyncDelivery(parts.delivery())):
            for batch in encode_table(table, self.options, partition, choose):
                parts.add(await self._append_sealed(driver, topic, batch), 0, batch.record_count)
                driver.wake()
                await asyncio.sleep(0)
        return AsyncDelivery(parts.delivery())

    async def _append_sealed(self, driver: ProducerDriver, topic: str, batch: EncodedBatch) -> BatchResult:
        return await self._with_room(
            driver,
            topic,
            len(batch.data),
            lambda core: core.append_sealed(
                topic, batch.partition, batch.data, batch.record_count, batch.times, driver.now_ms()
            ),
        )

    async def flush(self) -> None:
        """Send all records of earlier calls without lingering, and wait until their callbacks have returned.

        Later records are not waited for. Failures are raised by the records' futures, not by this call.
        """
        await self._started().flush()
        # asyncio sets the futures of `send` one iteration of the loop after the batch completes. Guard:
        # test_futures_are_done_when_an_asyncio_flush_returns.
        await asyncio.sleep(0)

    def metrics(self) -> dict[str, float]:
        """Return the metrics under Kafka's names (producer-metrics); empty before the producer's first use.

        Rates are per second over the last 30 s, times in milliseconds.
        """
        return self._driver.metrics() if self._driver else {}

    def idempotence(self) -> IdempotenceReport:
        """Return whether idempotence is on, and the settings that decide it (behaviour I22)."""
        return self._driver.idempotence() if self._driver else self.options.report(None, None)

    async def close(self) -> None:
        """Abort an open transaction, flush, and close the connections. Safe to call twice.

        If a commit was called and has not ended, the commit is repeated instead. The abort or commit takes at
        most max.block.ms. A joined transaction stays open for the producer that began it.
        """
        if self._closed:
            if self._driver is not None:
                await self._driver.close()
            return
        check_running_loop(self._driver.loop if self._driver else None, "producer")
        try:
            if self._driver is not None:
                await self._driver.refuse_appends(MisuseError(CLOSED))
                if self._transactions is not None:
                    await self._transactions.end_open()
                await self._driver.flush()
        finally:
            self._closed = True
            if self._driver is not None:
                await self._driver.close()

    # Transactions. Every call raises MisuseError in a state that does not allow it.

    def _transaction_manager(self) -> TransactionManager:
        self._started()
        return require_manager(self._transactions)

    async def init_transactions(self, timeout: float | None = None) -> None:
        """Get an epoch that fences every other producer of this transactional.id.

        Call it once, before other calls. See `Producer.init_transactions`. `timeout` is in seconds, None for
        max.block.ms.
        """
        await self._transaction_manager().init(timeout)

    async def begin_transaction(self) -> None:
        """Begin a transaction. All records from now on belong to it. Sends no request."""
        self._transaction_manager().begin()

    async def send_offsets_to_transaction(
        self, offsets: Offsets, group: ConsumerGroupMetadata | str, timeout: float | None = None
    ) -> None:
        """Commit a consumer's positions with the transaction. See `Producer.send_offsets_to_transaction`."""
        await self._transaction_manager().send_offsets(offsets, group, timeout)

    async def share_transaction(self) -> TransactionShare:
        """Return the TransactionShare with which other producers join. See `Producer.share_transaction`."""
        return self._transaction_manager().share()

    async def join_transaction(self, share: TransactionShare) -> None:
        """Join the transaction of another producer. See `Producer.join_transaction`."""
        await self._transaction_manager().join(share)

    async def hand_over_transaction(self, timeout: float | None = None) -> TransactionShare:
        """Send the remaining records, and hand the open transaction over to another producer.

        See `Producer.hand_over_transaction`.
        """
        return await self._transaction_manager().hand_over(timeout)

    async def take_over_transaction(self, share: TransactionShare) -> None:
        """Take over a transaction from another producer, to commit or abort it.

        See `Producer.take_over_transaction`.
        """
        await self._transaction_manager().take_over(share)

    async def commit_transaction(self, timeout: float | None = None) -> None:
        """Send the remaining records, and commit: all records and offsets become visible together.

        See `Producer.commit_transaction`.
        """
        await self._transaction_manager().commit(timeout)

    async def abort_transaction(self, timeout: float | None = None) -> None:
        """Abort the transaction: no read_committed reader will see its records.

        See `Producer.abort_transaction`.
        """
        await self._transaction_manager().abort(timeout)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Begin a transaction for the `with` block, and commit it. Abort it if the block or the commit
        raises.
        """
        manager = self._transaction_manager()
        await self.begin_transaction()
        try:
            yield
            await self.commit_transaction()
        except BaseException:
            if manager.is_open:
                with suppress(OncelogError):  # raise the first error below, not this one
                    await self.abort_transaction()
            raise


class _Readiness(NamedTuple):
    """Lets the serializers of one argument of `send_many` wait for data that they need, such as schemas."""

    serializer: RecordSerializer
    topic: str
    partition: int | None
    is_key: bool

    async def prepare(self, items: Iterable[Any]) -> None:
        """Wait until all items can be converted without a wait. Raises SerializationError."""
        serializer, topic = self.serializer, self.topic
        for item in items if serializer.may_wait else ():
            value, key = (None, item) if self.is_key else (item, None)
            if not serializer.is_ready(topic, value, key):
                await serializer.prepare(topic, value, key, self.partition)


async def _in_pieces(
    items: Iterable[Any],
    convert: Callable[[Iterable[Any]], Iterable[Any] | None],
    readiness: _Readiness,
) -> Iterable[Any]:
    """Return converted items. Convert a list or tuple in pieces, and let other tasks run after each piece.

    Of another iterable, only the first item that is not None is prepared: the others are not known yet.

    A serializer takes microseconds for an item, and would stop the event loop for the whole list. Guard:
    test_other_tasks_run_while_a_list_is_serialized.
    """
    if not isinstance(items, (list, tuple)):
        if readiness.serializer.may_wait:
            items = iter(items)
            first = list(_up_to_data(items))
            await readiness.prepare(first)
            items = chain(first, items)
        return convert(items) or ()
    given = list(items)  # another task may change the caller's list during the conversion
    converted: list[Any] = []
    for start in range(0, len(given), CHUNK_ROWS):
        piece = given[start : start + CHUNK_ROWS]
        await readiness.prepare(piece)
        converted += convert(piece) or ()
        await asyncio.sleep(0)
    return converted


def _up_to_data(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items up to the first one that is not None."""
    for item in items:
        yield item
        if item is not None:
            return
