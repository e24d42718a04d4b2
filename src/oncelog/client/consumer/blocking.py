"""The blocking consumer: it runs an AsyncConsumer on an event loop in a background thread."""

from __future__ import annotations

import concurrent.futures
import re
import threading
import warnings
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from oncelog.client.consumer.aio import POLL_IN_CALLBACK, SECOND_POLL, AsyncConsumer, Prepare
from oncelog.client.consumer.fetch_messages import FetchOptions
from oncelog.client.consumer.list_offsets import OffsetAt
from oncelog.client.consumer.range_reader import RangeChunk, check_range, range_options
from oncelog.client.group.membership import Rebalance
from oncelog.client.group.rebalance_callbacks import Offsets, RebalanceCallback, RebalanceListener
from oncelog.client.serialization import Deserializer
from oncelog.errors import MisuseError, OncelogError
from oncelog.runtime import system
from oncelog.runtime.loop_thread import result_of
from oncelog.settings import Settings
from oncelog.types import (
    ConsumerGroupMetadata,
    Isolation,
    OffsetAndMetadata,
    PartitionInfo,
    Record,
    TopicPartition,
)

__all__ = ["AsyncConsumer", "Consumer"]

T = TypeVar("T")
_CLOSE_SECONDS = 10.0


class Consumer:
    """A blocking Kafka consumer that reads assigned partitions, or its share of a group's topics.

        with Consumer({"bootstrap.servers": "127.0.0.1:9092", "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([TopicPartition("flights", 0)])
            for record in consumer:
                ...

    Settings: a mapping with Kafka's keys, or keyword arguments with underscores instead of dots.
    `key_deserializer` and `value_deserializer` convert the bytes of the records that `poll` and iteration
    return, for example `json.loads`. They run in the polling thread, and are not called for None.

    Only one thread at a time may use a consumer.
    """

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        **settings: object,
    ) -> None:
        self._async = AsyncConsumer(
            config, key_deserializer=key_deserializer, value_deserializer=value_deserializer, **settings
        )
        self._deserializer = self._async.deserializer
        self._thread = system.current().loop_thread("oncelog-consumer")
        self._core = self._async.core
        self._listener = RebalanceListener()
        # The id of the thread that is inside a poll. It need not be exact, because `poll_step` also refuses a
        # second poll.
        self._polling_thread: int | None = None

    @property
    def settings(self) -> Settings:
        """The settings, parsed and completed with defaults."""
        return self._async.settings

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

    def _call(self, function: Any, *args: Any) -> Any:
        """Run a plain function on the event loop's thread, which owns the consumer's state."""

        async def call() -> Any:
            return function(*args)

        return self._thread.run(call())

    def close(self) -> None:
        """Commit if enable.auto.commit is set, leave the group, and close all connections.

        The commit covers all delivered records. If a `for` loop was left by `break` or an exception, the
        commit excludes the record of that iteration. Calls `on_revoked` (or `on_lost`) with the assigned
        partitions. It is safe to call `close` twice.
        """
        if not self._thread.is_running:
            return
        try:
            self._notify_of_leaving()
        finally:
            try:
                # If the callback has closed this consumer, its thread is no longer running.
                if self._thread.is_running:
                    self._close_or_end_at_once()
            finally:
                self._thread.stop()

    def _close_or_end_at_once(self) -> None:
        """Close the consumer. If that fails or Ctrl-C interrupts it, leave and close without a commit."""
        try:
            self._thread.run(self._async.close(), _CLOSE_SECONDS)
        except BaseException:
            # A member that does not leave keeps its partitions until its session times out. And if
            # connections stay open while Python turns warnings into errors, uvloop's Loop.close never
            # returns. Guard: test_an_interrupt_of_a_close_keeps_no_member_in_the_group.
            with suppress(OncelogError):
                self._thread.run(self._async.end_at_once(), _CLOSE_SECONDS)
            raise

    def _notify_of_leaving(self) -> None:
        """Commit if enable.auto.commit is set, and call the rebalance callback in this thread."""
        thread = threading.get_ident()
        ending = self._async.until_callback_ends(lambda: self._polling_thread in (None, thread))
        self._thread.run(ending, _CLOSE_SECONDS)
        rebalance = self._thread.run(self._async.prepare_to_leave(), _CLOSE_SECONDS)
        if rebalance is not None:
            self._listener.notify(rebalance)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def assign(self, partitions: Collection[TopicPartition] | TopicPartition) -> None:
        """Read exactly these partitions. Partitions that are already assigned keep their positions.

        With a group.id, new partitions start at the group's committed offsets, and enable.auto.commit commits
        the positions of all assigned partitions. The coordinator refuses such commits while the group has
        members. Without a group.id or a committed offset, auto.offset.reset decides where a new partition
        starts.

        Raises MisuseError while the consumer is subscribed.
        """
        self._call(self._async.assign, partitions)

    def subscribe(
        self,
        topics: Collection[str] | str = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: RebalanceCallback | None = None,
        on_revoked: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Subscribe to topics: polls join the group of group.id, and read this member's share of partitions.

        With `pattern` instead of names, read every topic whose whole name matches, except Kafka's internal
        topics. The matching topics are looked up again every metadata.max.age.ms.

        The callbacks run during `poll`, in the polling thread, and get lists of partitions. They may call the
        consumer, but not poll it. `on_revoked` may still commit positions. A second call replaces the
        subscription.

        Raises MisuseError if group.id is not set, no topic is given, or partitions are assigned manually.
        """
        self._call(lambda: self._async.subscribe(topics, pattern=pattern))
        self._listener = RebalanceListener(on_assigned, on_revoked, on_lost)

    def unsubscribe(self) -> None:
        """Commit if enable.auto.commit is set, leave the group, and unassign all partitions.

        Calls `on_revoked` (or `on_lost`) with the partitions.
        """
        try:
            self._notify_of_leaving()
        finally:
            # If the callback has closed this consumer, its thread is no longer running.
            if self._thread.is_running:
                self._run(self._async.unsubscribe())
            self._listener = RebalanceListener()

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return this consumer's identity in its group, for `Producer.send_offsets_to_transaction`.

        Raises MisuseError with enable.auto.commit=true. Otherwise poll() and close() would also commit the
        positions of records whose transaction was aborted, and those records would never be processed.
        """
        return self._async.group_metadata()

    def commit(self, offsets: Offsets | None = None) -> None:
        """Commit positions for the group.

        `offsets` has the offset of the next record to read, for each partition. By default, the positions
        after all delivered records are committed.

        Raises IllegalGeneration, UnknownMemberId or RebalanceInProgress if the group has rebalanced without
        this member. The new owners of its partitions then read again from the last commit.
        """
        self._run(self._async.commit(offsets))

    def committed(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offset of each partition; None if there is none.

        Raises MisuseError if group.id is not set.
        """
        return self._run(self._async.committed(partitions))

    def seek_to_committed(self, *partitions: TopicPartition) -> None:
        """Move these partitions (none given: all assigned ones) to the group's committed offsets.

        Call it after an aborted transaction, to read again the records that the transaction consumed
        (KAFKA-17582). For partitions without a committed offset, auto.offset.reset decides. If
        auto.offset.reset is `none`, the call raises MisuseError for them.
        """
        self._run(self._async.seek_to_committed(*partitions))

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are assigned now, by `assign` or by the group."""
        return self._async.assignment()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Read next from `offset` (0 or above). Raises MisuseError if the partition is not assigned."""
        self._call(self._async.seek, tp, offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Move these partitions (none given: all assigned ones) to their first available record."""
        self._call(self._async.seek_to_beginning, *partitions)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Move these partitions (none given: all assigned ones) to their end offset: see `end_offsets`."""
        self._call(self._async.seek_to_end, *partitions)

    def pause(self, *partitions: TopicPartition) -> None:
        """Stop returning records from these partitions until `resume`. Positions are kept."""
        self._call(self._async.pause, *partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        """Return records from these partitions again after `pause`."""
        self._call(self._async.resume, *partitions)

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions."""
        return self._async.paused()

    def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record that `poll` would return. Look the position up if necessary.

        Raises TimedOut after request.timeout.ms, and MisuseError if the partition is not assigned.
        """
        return self._run(self._async.position(tp))

    def lag(self, tp: TopicPartition) -> int | None:
        """Return the partition's end offset (as of the last fetch) minus its position; None if unknown."""
        return self._async.lag(tp)

    def poll(self, timeout: float = 1.0, *, max_records: int | None = None) -> list[Record]:
        """Return up to max.poll.records records, or up to `max_records` if that is less.

        If there are none, wait up to `timeout` seconds. Returned records count as delivered: the positions
        and automatic commits move past them. If Ctrl-C or another signal interrupts a poll, that poll
        delivers nothing, and the next poll returns its records.

        Raises OffsetOutOfRange with auto.offset.reset=none, CorruptMessage or InvalidRecord for a batch that
        cannot be decoded, DeserializationError, and any error that has kept a partition unreachable for
        longer than request.timeout.ms. You may poll again after any of these errors.
        """
        limit = self._async.poll_limit(max_records)
        is_ready = self._wait_for_records(timeout, lambda now_ms: self._core.prepare_records(limit, now_ms))
        if not is_ready:
            return []
        if self._deserializer is not None:
            return self._core.delivery.take_converted(limit, self._deserializer)
        return self._core.delivery.take(limit)

    def poll_arrow(self, timeout: float = 1.0, *, include_headers: bool = False) -> Any | None:
        """Return the records of one partition from one fetch as a pyarrow.RecordBatch.

        Returns None if no records arrive within `timeout` seconds. Raises the same errors as `poll`.
        """
        is_ready = self._wait_for_records(
            timeout, lambda now_ms: self._core.prepare_columns(now_ms, include_headers=include_headers)
        )
        return self._core.delivery.take_columns() if is_ready else None

    def _wait_for_records(self, timeout: float, prepare: Prepare) -> bool:
        """Wait until the core's `delivery` has records; return False after `timeout` seconds.

        Rebalance callbacks run in this thread. If a signal interrupts a callback, the next poll calls it
        again. If a callback raises an Exception, this poll raises the same Exception, and no poll calls the
        callback again.
        """
        # Like Java's `acquire`, refuse a second thread during the whole poll of the first thread, callbacks
        # included. Otherwise the second thread could poll between two steps, and make the first thread's poll
        # fail. A callback that polls is refused, too. It would call itself again. Guards:
        # test_a_second_thread_is_refused_while_a_callback_of_the_first_runs and
        # test_a_callback_that_polls_is_refused.
        thread = threading.get_ident()
        if self._polling_thread is not None:
            raise MisuseError(POLL_IN_CALLBACK if self._polling_thread == thread else SECOND_POLL)
        deadline_ms = self._async.begin_poll(timeout)
        self._polling_thread = thread
        try:
            while isinstance(step := self._run(self._async.poll_step(deadline_ms, prepare)), Rebalance):
                try:
                    self._listener.notify(step)
                except Exception:
                    self._async.finish_rebalance()
                    raise
                self._async.finish_rebalance()
            return step
        finally:
            self._polling_thread = None

    def __iter__(self) -> Iterator[Record]:
        """Iterate over records. If consumer.timeout.ms is set, end after that time without a record.

        A record counts as delivered when the loop gets it. After a loop was left by `break` or an exception,
        the next loop or poll continues after the last delivered record. Until then, automatic commits exclude
        the last delivered record, because the application may not have processed it completely.
        """
        timeout, limit = self._async.iteration_timeout, self._async.poll_limit()

        def prepare(now_ms: float) -> bool:
            return self._core.prepare_records(limit, now_ms)

        # Connect first: the time that connecting takes does not count as time without a record.
        self._run(self._async.start())

        # A signal handler may run at a backward jump of the bytecode, and raise. So there is no such jump
        # between taking a record and yielding it.
        while True:
            record = self._core.delivery.next_record(self._deserializer)
            if record is not None:
                yield record
            elif not self._wait_for_records(timeout, prepare) and self._async.iteration_ends:
                return

    def fetch_range(
        self, tp: TopicPartition, start: int, end: int, *, include_headers: bool = False
    ) -> Iterator[Any]:
        """Yield the records with offsets in [start, end) as pyarrow.RecordBatches.

        isolation.level decides which records are visible. The assignment and positions are neither used nor
        changed. The iteration ends when all offsets below `end` were read, even if the last of these offsets
        belong only to markers and aborted records. While the caller processes a RecordBatch, the next data is
        fetched.

        Raises OffsetOutOfRange with the available offsets in its text. Raises TimedOut if no batch below
        `end` arrives within request.timeout.ms.
        """
        check_range(tp, start, end)
        return self._arrow_batches(tp, start, end, include_headers)

    def _arrow_batches(
        self, tp: TopicPartition, start: int, end: int, include_headers: bool
    ) -> Iterator[Any]:
        options = range_options(self.settings)
        for offset, chunk in self._chunks(tp, start, end, options):
            batch = chunk.arrow(offset, end, check_crcs=options.check_crcs, include_headers=include_headers)
            if batch is not None:
                yield batch

    def fetch_batches(self, tp: TopicPartition, start: int, end: int) -> Iterator[memoryview]:
        """Yield the stored batches that contain offsets in [start, end), including markers and aborted
        batches.

        Each memoryview has one or more whole batches, byte for byte as stored. The caller must verify their
        checksums. Raises the same errors as `fetch_range`.
        """
        check_range(tp, start, end)
        return self._raw_batches(tp, start, end)

    def _raw_batches(self, tp: TopicPartition, start: int, end: int) -> Iterator[memoryview]:
        options = range_options(self.settings, Isolation.READ_UNCOMMITTED)
        for offset, chunk in self._chunks(tp, start, end, options):
            if len(raw := chunk.raw(offset, end)):
                yield raw

    def fetch_chunks(
        self, tp: TopicPartition, start: int, end: int, isolation: Isolation
    ) -> Iterator[RangeChunk]:
        """Yield the stored batches that contain offsets in [start, end) as chunks, with the visibility of
        each batch.

        `isolation` decides the visibility. With READ_COMMITTED, `end` must not be above the last stable
        offset. A chunk may begin before `start` and end after `end`.
        """
        check_range(tp, start, end)
        return (chunk for _, chunk in self._chunks(tp, start, end, range_options(self.settings, isolation)))

    def fetch_pieces(
        self, tp: TopicPartition, start: int, end: int, isolation: Isolation
    ) -> Iterator[RangeChunk]:
        """Yield chunks. Deprecated: use `fetch_chunks`."""
        warnings.warn(
            "Consumer.fetch_pieces is deprecated; use fetch_chunks", DeprecationWarning, stacklevel=2
        )
        return self.fetch_chunks(tp, start, end, isolation)

    def _chunks(
        self, tp: TopicPartition, start: int, end: int, options: FetchOptions
    ) -> Iterator[tuple[int, RangeChunk]]:
        """Yield each chunk as a pair: the offset from which it was fetched, and the chunk.

        While the caller processes a chunk, the background thread fetches the next one.
        """

        def fetch(offset: int) -> concurrent.futures.Future[RangeChunk]:
            return self._thread.submit(self._async.fetch_chunk(tp, offset, end, options))

        offset, following = start, None
        try:
            while offset < end:
                chunk = result_of(following or fetch(offset))
                following = fetch(chunk.next_offset) if chunk.next_offset < end else None
                yield offset, chunk
                offset = chunk.next_offset
        finally:
            if following:
                following.cancel()

    def beginning_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """Return the first available offset of each partition."""
        return self._run(self._async.beginning_offsets(partitions))

    def end_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """Return the end offset of each partition, where readers stop.

        This is the high watermark, or with isolation.level=read_committed the last stable offset.
        """
        return self._run(self._async.end_offsets(partitions))

    def offsets_for_times(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAt | None]:
        """Return, for each partition, the offset of the first record at or after the partition's time.

        None means that there is no such record. Times are milliseconds since the epoch.
        """
        return self._run(self._async.offsets_for_times(times_ms))

    def partitions_for(self, topic: str) -> tuple[PartitionInfo, ...]:
        """Return the topic's partitions. Raises UnknownTopicOrPartition if the topic does not exist."""
        return self._run(self._async.partitions_for(topic))

    def metrics(self) -> dict[str, float]:
        """Return metrics under Kafka's names, such as records-consumed-rate and records-lag-max."""
        values: dict[str, float] = self._call(self._async.metrics)
        return values
