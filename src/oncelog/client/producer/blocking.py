"""The blocking producer: `send` appends records on the caller's thread; a background thread sends them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from oncelog.client.arguments import headers_of
from oncelog.client.producer.batch import BatchResult, Callback
from oncelog.client.producer.core import ProducerCore
from oncelog.client.producer.delivery import Delivery, Parts, RecordFuture, delivery_on_error
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
from oncelog.client.serialization import Serializer, record_serializer
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.runtime import system
from oncelog.runtime.optional import check_pyarrow
from oncelog.types import ConsumerGroupMetadata, Headers, TransactionShare

if TYPE_CHECKING:
    from oncelog.client.producer.arrow_encoding import EncodedBatch
    from oncelog.client.producer.column_partitions import Partitions

__all__ = ["Delivery", "Producer", "RecordFuture"]

T = TypeVar("T")


class Producer:
    """A blocking producer. Each record is stored once and in order within its partition.

    This guarantee holds as long as the Producer object lives (behaviour I2, docs/behaviours.md).

        with Producer({"bootstrap.servers": "127.0.0.1:9092"}) as producer:
            future = producer.send("payments", b"42.00", b"account-1")
            print(future.result(timeout=10).offset)

    `send` returns without waiting for the broker, and a background thread sends the records. Threads may
    share a Producer. Settings are Kafka's keys in a mapping, or keywords with underscores for the dots. The
    constructor raises ConfigError for invalid settings. `key_serializer` and `value_serializer` convert the
    arguments of `send` and `send_many` to bytes, for example `str.encode`. They run in the caller's thread,
    and are not called for None.

    A signal handler should raise or set a flag. If the handler has interrupted a call of this producer, its
    own calls of the producer raise MisuseError.
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
        self._closed = False
        self._thread = system.current().loop_thread("oncelog-producer")
        try:
            self._driver: ProducerDriver = self._thread.run(self._make_driver())
        except BaseException:
            self._thread.stop()
            raise
        self._transactions = transaction_manager_of(self._driver)
        self._wall_ns = self._driver.runtime.wall_ns
        appender = self._driver.core.appender
        appender.prepare(
            self._driver.lock,
            self._wall_ns,
            RecordFuture,
            is_system_clock=self._wall_ns is time.time_ns,
        )
        # Choose the function once, because `send` calls it for each record.
        self._send = appender.send if self._serializer is None else self._serialize_and_send

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
        value: Any = None,
        key: Any = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
        on_delivery: Callback | None = None,
    ) -> RecordFuture:
        """Append a record to its partition's open batch, and return the future of its delivery.

        Blocks only for the topic's metadata and for room in buffer.memory. Raises TimedOut if that takes
        longer than max.block.ms, MessageTooLarge for a record above max.request.size, and
        UnknownTopicOrPartition. Raises MisuseError for a closed producer, a partition that does not exist, or
        data that is not bytes. With serializers, `value` and `key` have the types that these accept. If a
        serializer fails, SerializationError is raised.

        If the delivery fails, the future raises the error; see `RecordFuture`. After a delivery or a failure,
        the producer's thread calls `on_delivery(metadata, error)`, and one of the two arguments is None. The
        callback must not block. `timestamp_ms` is milliseconds since the epoch, by default the current time.
        """
        future: RecordFuture | None = self._send(
            topic, value, key, partition, timestamp_ms, headers, on_delivery
        )
        if future is not None:
            return future
        return self._send_slowly(topic, value, key, partition, timestamp_ms, headers, on_delivery)

    def _send_slowly(
        self,
        topic: str,
        value: Any,
        key: Any,
        partition: int | None,
        timestamp_ms: int | None,
        headers: Headers,
        on_delivery: Callback | None,
    ) -> RecordFuture:
        """Append a record that needs a check, the topic's metadata, room in the buffer, or a new batch."""
        row = make_row(value, key, timestamp_ms, headers, self._wall_ns)
        size_bytes = row_size_bytes(row[1], row[2], row[3])
        return RecordFuture(*self._append_row(topic, partition, row, size_bytes, on_delivery))

    def _serialize_and_send(
        self,
        topic: str,
        value: Any,
        key: Any,
        partition: int | None,
        timestamp_ms: int | None,
        headers: Headers,
        on_delivery: Callback | None,
    ) -> RecordFuture:
        assert self._serializer is not None
        value = self._serializer.value(topic, value, partition)
        key = self._serializer.key(topic, key, partition)
        record = (topic, value, key, partition, timestamp_ms, headers, on_delivery)
        future: RecordFuture | None = self._driver.core.appender.send(*record)
        return self._send_slowly(*record) if future is None else future

    def _append_row(
        self, topic: str, partition: int | None, row: Row, size_bytes: int, callback: Callback | None
    ) -> tuple[BatchResult, int]:
        with self._driver.lock:
            appended = self._driver.core.append_to_open_batch(topic, partition, row, size_bytes, callback)
        return appended or self._append(topic, partition, row, size_bytes, callback)

    def _append(
        self, topic: str, partition: int | None, row: Row, size_bytes: int, callback: Callback | None
    ) -> tuple[BatchResult, int]:
        """Append a record that needs the topic's metadata, room in the buffer, or a new batch."""
        try:
            result, index, needs_drain = self._with_room(
                topic,
                size_bytes,
                lambda core: core.append(topic, partition, row, size_bytes, self._driver.now_ms(), callback),
                partition,
            )
            if needs_drain:
                self._wake()
        except BaseException:
            # Drain even after an interrupt, which may have happened after the append. Otherwise the record
            # would wait for up to a minute.
            self._wake()
            raise
        return result, index

    def _with_room(
        self, topic: str, size_bytes: int, act: Callable[[ProducerCore], T], partition: int | None = None
    ) -> T:
        """Call `act` with the lock held, when the core knows the topic and has room, or has a fatal error.

        If the topic has no such `partition`, look the topic up once more, as the Java client does. Otherwise
        a partition that was just added would be refused for up to metadata.max.age.ms. Guard:
        test_a_partition_that_was_added_takes_records_at_once.
        """
        was_looked_up_again = self._driver.is_own_thread()
        core, deadline_ms = self._driver.core, None
        while True:
            self._check()
            if not core.can_append(size_bytes):
                deadline_ms = deadline_ms or self._driver.now_ms() + self.options.max_block_ms
                self._wait_for_room(core, size_bytes, deadline_ms)
            with self._driver.lock:
                if not core.can_append(size_bytes):
                    continue  # another thread has used the room that this thread waited for
                is_known = core.topic(topic) is not None
                is_stale = (
                    is_known and not was_looked_up_again and core.may_have_more_partitions(topic, partition)
                )
                if (is_known and not is_stale) or core.fatal is not None:
                    core.appender.is_changing = True
                    try:
                        try:
                            return act(core)
                        finally:
                            if core.is_append_unfinished:  # a signal handler has raised an error within `act`
                                core.repair()
                    finally:
                        core.appender.is_changing = False
            self._thread.run(
                self._driver.refresh_topic(topic) if is_stale else self._driver.look_up_topic(topic)
            )
            was_looked_up_again |= is_stale

    def _check(self) -> None:
        self._driver.check_lock_not_held()
        if self._closed or not self._thread.is_running:
            raise MisuseError(
                "this producer is closed (or was made before a fork, or the interpreter is "
                "exiting); make a new one"
            )

    def _wake(self) -> None:
        with suppress(MisuseError, RuntimeError):  # if the thread has ended, close() has sent the record
            self._thread.call_soon(self._driver.wake)

    def _wait_for_room(self, core: ProducerCore, size_bytes: int, deadline_ms: float) -> None:
        """Wait until there may be room in buffer.memory. The caller checks again with the lock held."""
        if self._driver.is_own_thread():
            # This is a delivery callback on the producer's thread. If it waited, it would block the thread
            # that makes room.
            raise no_room_error(self.options)
        completions: queue.SimpleQueue[None] = queue.SimpleQueue()
        is_counted = False
        try:
            with self._driver.lock:
                core.room_waiter_count += 1
                is_counted = True
            self._driver.room_waiters.append(completions)
            self._thread.call_soon(self._driver.wake)
            while not core.can_append(size_bytes):
                left_s = (deadline_ms - self._driver.now_ms()) / 1000
                if left_s <= 0:
                    raise no_room_error(self.options)
                self._thread.wait_for(completions, left_s)
        finally:
            with suppress(ValueError):
                self._driver.room_waiters.remove(completions)
            if is_counted:
                with self._driver.lock:
                    core.room_waiter_count -= 1

    def send_many(
        self,
        topic: str,
        values: Iterable[Any],
        keys: Iterable[Any] | None = None,
        *,
        partition: int | None = None,
        timestamps_ms: Iterable[int] | int | None = None,
        headers: Headers = (),
    ) -> Delivery:
        """Append many records, and return one Delivery for all of them. Blocks and raises like `send`.

        `keys` and `timestamps_ms` have one item per value, in the same order. Timestamps are milliseconds
        since the epoch. A single timestamp, and `headers`, apply to every record. If `values` and
        `keys` are lists or tuples, they are checked before any record is appended. If an error occurs after
        some records were appended, its attribute `delivery` is the Delivery of these records.
        """
        now_ms = self._wall_ns() // 1_000_000
        shared = headers_of(headers)
        parts = Parts()
        check_arguments(values, keys, timestamps_ms)
        with delivery_on_error(parts.delivery):
            if self._serializer is not None:
                values = self._serializer.values(topic, values, partition)
                keys = self._serializer.keys(topic, keys, partition)
            core = self._driver.core
            check_rows(core, values, keys, shared, self.options.max_request_bytes, self._wall_ns)
            columns = columns_of(values, keys, timestamps_ms, shared, now_ms)
            if columns is not None:
                self._send_lists(topic, partition, columns, now_ms, parts)
                return parts.delivery()
            for row in rows_of(values, keys, timestamps_ms, shared, now_ms, self._wall_ns):
                parts.add(*self._append_row(topic, partition, row, row_size_bytes(*row[1:]), None), 1)
        return parts.delivery()

    def _send_lists(
        self, topic: str, partition: int | None, columns: Columns, now_ms: int, parts: Parts
    ) -> None:
        """Append the rows of lists: with `append_many` while they fit into open batches, and otherwise one by
        one.
        """
        appender, count = self._driver.core.appender, len(columns.values)
        number = 0
        while number < count:
            last = min(number + CHUNK_ROWS, count)
            with self._driver.lock:
                number = appender.append_many(topic, partition, *columns, number, last, parts.added)
            parts.merge()
            if number < last:
                row = columns.row(number, now_ms, self._wall_ns)
                parts.add(*self._append_row(topic, partition, row, row_size_bytes(*row[1:]), None), 1)
                number += 1

    def send_table(self, topic: str, table: Any, *, partition: int | None = None) -> Delivery:
        """Append the rows of a table, which is encoded column by column. Blocks and raises like `send`.

        `table` is an Arrow table, record batch or reader, or any object with `__arrow_c_stream__`, such as a
        data frame of Polars or pandas. Columns: value and optionally key (both bytes or text), timestamp
        (timestamp or int64 ms since the epoch) and headers. Raises MisuseError for other objects and columns,
        and for a time before 1970.

        Partitions are chosen as in `send`, except for rows without a key. Unless `partitioner` is
        round_robin, the rows without a key among 1,048,576 consecutive rows go to one partition. If an error
        occurs after some rows were appended, its attribute `delivery` is the Delivery of these rows.
        """
        check_pyarrow("send_table")
        from oncelog.client.producer.arrow_encoding import encode_table
        from oncelog.client.producer.column_partitions import partitions_of_rows

        queues = self._with_room(topic, 0, lambda core: core.topic_to_append(topic), partition)
        if partition is not None:
            queues.queue(partition, None, 0)

        def choose(keys: Any, rows: int) -> Partitions | int:
            with self._driver.lock:
                return partitions_of_rows(queues, keys, rows)

        parts = Parts()
        with delivery_on_error(parts.delivery):
            for batch in encode_table(table, self.options, partition, choose):
                result = self._append_sealed(topic, batch)
                parts.add(result, 0, batch.record_count)
                self._wake()
        return parts.delivery()

    def _append_sealed(self, topic: str, batch: EncodedBatch) -> BatchResult:
        return self._with_room(
            topic,
            len(batch.data),
            lambda core: core.append_sealed(
                topic, batch.partition, batch.data, batch.record_count, batch.times, self._driver.now_ms()
            ),
        )

    def flush(self, timeout: float | None = None) -> None:
        """Send all records of earlier calls without lingering, and wait until their callbacks have returned.

        Records that other threads send later are not waited for. Failures are raised by the records' futures,
        not by this call. Raises TimedOut after `timeout` seconds; the producer continues to send the records.
        Raises MisuseError in a delivery callback or a forked process.
        """
        if self._closed:
            return
        self._driver.check_lock_not_held()
        if not self._thread.is_running or self._driver.is_own_thread():
            raise MisuseError(
                "flush() cannot wait in a callback, in a forked process or while the interpreter exits"
            )
        with self._driver.lock:
            if self._driver.is_flushed:
                return
        try:
            self._thread.run(self._driver.flush(), timeout)
        except TimedOut:
            raise TimedOut(f"some records have no result after {timeout} s") from None

    def metrics(self) -> dict[str, float]:
        """Return the metrics under Kafka's names (producer-metrics).

        Rates are per second over the last 30 s, times in milliseconds.
        """
        return self._driver.metrics()

    def idempotence(self) -> IdempotenceReport:
        """Return whether idempotence is on, and the settings that decide it (behaviour I22)."""
        return self._driver.idempotence()

    def close(self, timeout: float | None = None) -> None:
        """End an open transaction, flush, and close the connections. Safe to call twice.

        An open transaction is aborted. If a commit was called and has not ended, the commit is repeated
        instead. A joined transaction stays open for the producer that began it. If the abort or commit fails,
        the failure is logged, and the coordinator aborts the transaction after transaction.timeout.ms.

        `timeout` limits the transaction's end and the flush together, in seconds. If it is None, max.block.ms
        limits the end of the transaction, and delivery.timeout.ms the flush. Raises TimedOut if records are
        left, and MisuseError in a delivery callback.
        """
        self._driver.check_lock_not_held()
        if self._closed:
            self._end()
            return
        if self._driver.is_own_thread():
            raise MisuseError("close() cannot wait in a delivery callback; call it from another thread")
        try:
            if self._thread.is_running:
                self._thread.run(self._driver.refuse_appends(MisuseError(CLOSED)))
                if self._transactions is not None:
                    timeout = self._end_open(self._transactions, timeout)
                self.flush(timeout)
        finally:
            self._closed = True
            self._end()

    def _end(self) -> None:
        """Close the connections and stop the producer's thread.

        An interrupted close() may have started this already.
        """
        if self._driver.is_own_thread():
            return
        if self._thread.is_running:
            with suppress(MisuseError):  # raised if another thread has closed the connections
                self._thread.run(self._driver.close())
        self._thread.stop()

    def _end_open(self, transactions: TransactionManager, timeout: float | None) -> float | None:
        """End an open transaction. Return the seconds that are left of `timeout`."""
        started_ms = self._driver.now_ms()
        self._thread.run(transactions.end_open(timeout))
        return None if timeout is None else max(timeout - (self._driver.now_ms() - started_ms) / 1000, 0)

    # Transactions. A `timeout` is in seconds, None for max.block.ms. Every call raises MisuseError in a state
    # that does not allow it. If the producer cannot continue, every call raises its fatal error.

    def init_transactions(self, timeout: float | None = None) -> None:
        """Get an epoch that fences every other producer of this transactional.id.

        Call it once, before other calls. The coordinator first aborts an open transaction of an earlier
        producer, or completes a transaction that is already decided. Raises ProducerFenced, and
        NotConnectedError if no broker responds. After TimedOut, call it again.
        """
        self._thread.run(require_manager(self._transactions).init(timeout))

    def _change_transactional_id(self, transactional_id: str, *, forgets_topics: bool = False) -> None:
        """Take another transactional.id on the same connections, for the next `init_transactions`.

        With `forgets_topics`, look up the partitions of topics again. The tasks of the Spark sink call this
        method.

        Raises MisuseError while a transaction is open, and the error of a producer that cannot continue.
        """
        manager = require_manager(self._transactions)
        self._thread.run(manager.change_id(transactional_id, forgets_topics=forgets_topics))

    def _look_up_topic(self, topic: str) -> None:
        """Find a topic as the first `send` to it does: the broker may create the topic.

        Raises TimedOut or UnknownTopicOrPartition after max.block.ms.
        """
        self._thread.run(self._driver.look_up_topic(topic))

    def begin_transaction(self) -> None:
        """Begin a transaction. All records from now on belong to it. Sends no request."""
        require_manager(self._transactions).begin()

    def send_offsets_to_transaction(
        self, offsets: Offsets, group: ConsumerGroupMetadata | str, timeout: float | None = None
    ) -> None:
        """Commit a consumer's positions (the next offsets to read) with the transaction.

        Pass `consumer.group_metadata()` as `group`, so that a member that has lost its partitions is fenced.
        A group id alone fences no member. Raises IllegalGeneration, UnknownMemberId, UnknownTopicOrPartition
        and other errors. After these errors, abort the transaction. Raises MisuseError if a consumer of this
        process commits automatically for the group (enable.auto.commit=true).

        After TimedOut or an interruption, the offsets may be missing from the transaction. Repeat the same
        call until it returns, or abort: until then `commit_transaction` raises TransactionAbortable.
        """
        self._thread.run(require_manager(self._transactions).send_offsets(offsets, group, timeout))

    def share_transaction(self) -> TransactionShare:
        """Return the TransactionShare with which other producers, even in other processes, join the
        transaction.

        Call `commit_transaction` when their records are stored. `abort_transaction` fences them. This
        producer cannot hand the transaction over. If the brokers keep the epoch (before Kafka 4.0),
        `begin_transaction` raises MisuseError after the commit. This method then also raises MisuseError if
        this producer has sent records in an earlier transaction.
        """
        return require_manager(self._transactions).share()

    def join_transaction(self, share: TransactionShare) -> None:
        """Join the transaction of another producer. That producer will end it. Replaces `init_transactions`.

        Only `send` and `flush` may follow: other calls raise MisuseError. Only one of the producers may write
        to a partition, because the sequences of two producers would collide.
        """
        self._thread.run(require_manager(self._transactions).join(share))

    def hand_over_transaction(self, timeout: float | None = None) -> TransactionShare:
        """Send the remaining records, and hand the open transaction over to another producer.

        That producer must call `take_over_transaction`. Closing this producer no longer ends the transaction,
        and it begins no other one. Raises the same errors as `commit_transaction`, and MisuseError if this
        producer has shared the transaction.
        """
        return self._thread.run(require_manager(self._transactions).hand_over(timeout))

    def take_over_transaction(self, share: TransactionShare) -> None:
        """Take over a transaction from another producer, to commit or abort it. Replaces `init_transactions`.

        This fences no producer. If another producer of the transactional.id calls `init_transactions` before
        this producer ends the transaction, the broker refuses the commit or abort of this producer.
        `send` raises MisuseError, because the sequences of the two producers would collide. Afterwards,
        `begin_transaction` raises MisuseError if the brokers keep the epoch (before Kafka 4.0).
        """
        self._thread.run(require_manager(self._transactions).take_over(share))

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Send the remaining records, and commit: all records and offsets become visible together.

        After the error of a failed record or TransactionAbortable, call `abort_transaction`. After
        ProducerFenced, make a new producer. After TimedOut it is unknown whether the transaction is
        committed: call `commit_transaction` again.
        """
        self._thread.run(require_manager(self._transactions).commit(timeout))

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Abort the transaction: no read_committed reader will see its records.

        After ProducerFenced, the records do not become visible either. After TimedOut, call
        `abort_transaction` again.
        """
        self._thread.run(require_manager(self._transactions).abort(timeout))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin a transaction for the `with` block, and commit it. Abort it if the block or the commit
        raises.

        with producer.transaction():
            producer.send("payments", b"42.00")
            offsets = {TopicPartition("orders", 0): 17}
            producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
        """
        manager = require_manager(self._transactions)
        self.begin_transaction()
        try:
            yield
            self.commit_transaction()
        except BaseException:
            if manager.is_open:
                with suppress(OncelogError):  # raise the first error below, not this one
                    self.abort_transaction()
            raise
