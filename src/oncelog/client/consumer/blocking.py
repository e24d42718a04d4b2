"""The blocking consumer: AsyncConsumer on a thread of its own."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from oncelog.client.consumer.aio import SECOND_POLL, AsyncConsumer, Prepare
from oncelog.client.consumer.fetch_messages import FetchOptions
from oncelog.client.consumer.list_offsets import OffsetAt
from oncelog.client.consumer.range_reader import RangePiece, check_range, range_options
from oncelog.client.group.aio import Rebalance
from oncelog.client.group.rebalance_callbacks import Listener, Listeners, Offsets
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
    """Reads assigned partitions; every call blocks until it is done. For one thread at a time.

        with Consumer({"bootstrap.servers": "127.0.0.1:9092", "auto.offset.reset": "earliest"}) as consumer:
            consumer.assign([TopicPartition("flights", 0)])
            for record in consumer:
                ...

    Settings: a mapping with Kafka's keys, or keywords with underscores for the dots.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self._async = AsyncConsumer(config, **settings)
        self._thread = system.current().loop_thread("oncelog-consumer")
        self._core = self._async.core
        self._listeners = Listeners()
        # The thread whose poll lasts; steps refuse each other as well, so this need not be exact.
        self._polled_by: int | None = None

    @property
    def settings(self) -> Settings:
        """The settings, parsed and completed with defaults."""
        return self._async.settings

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

    def _call(self, function: Any, *args: Any) -> Any:
        """Run a plain function where the consumer's state lives."""

        async def call() -> Any:
            return function(*args)

        return self._thread.run(call())

    def close(self) -> None:
        """Commit what was handed out if that is automatic, leave the group, end all work and connections.

        Not committed is a record at which a loop ended, by `break` or an exception. Calls `on_revoked` (or
        `on_lost`) with the partitions that are given up. Safe to call twice.
        """
        if not self._thread.is_running:
            return
        try:
            self._tell_of_leaving()
        finally:
            try:
                if self._thread.is_running:  # else the callback has closed this consumer
                    self._close_or_end_at_once()
            finally:
                self._thread.stop()

    def _close_or_end_at_once(self) -> None:
        """End all, also when a second Ctrl-C ends the wait for the commit or for the group's answer."""
        try:
            self._thread.run(self._async.close(), _CLOSE_SECONDS)
        except BaseException:
            # Without the leave the group waits for the end of the session. With connections left open and
            # warnings as errors, uvloop's close() of the loop never returns. See
            # test_an_interrupt_of_a_close_keeps_no_member_in_the_group.
            with suppress(OncelogError):
                self._thread.run(self._async.end_at_once(), _CLOSE_SECONDS)
            raise

    def _tell_of_leaving(self) -> None:
        """Commit if that is automatic, and call the application's callback, in this thread."""
        self._thread.run(self._async.end_polling(), _CLOSE_SECONDS)
        rebalance = self._thread.run(self._async.give_up(), _CLOSE_SECONDS)
        if rebalance is not None:
            self._listeners.tell(rebalance)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def assign(self, partitions: Collection[TopicPartition] | TopicPartition) -> None:
        """Read these partitions and no others; those assigned before keep their positions.

        With a group.id new ones begin at its committed offsets: see AsyncConsumer.assign.
        """
        self._call(self._async.assign, partitions)

    def subscribe(
        self,
        topics: Collection[str] | str = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: Listener | None = None,
        on_revoked: Listener | None = None,
        on_lost: Listener | None = None,
    ) -> None:
        """Read the topics as the group shares them out: see AsyncConsumer.subscribe.

        The callbacks run in the thread that polls, and may call the consumer.
        """
        self._call(lambda: self._async.subscribe(topics, pattern=pattern))
        self._listeners = Listeners(on_assigned, on_revoked, on_lost)

    def unsubscribe(self) -> None:
        """Leave the group, committing first if that is automatic, and read nothing.

        Calls `on_revoked` (or `on_lost`) with the partitions that are given up.
        """
        try:
            self._tell_of_leaving()
        finally:
            if self._thread.is_running:  # else the callback has closed this consumer
                self._run(self._async.unsubscribe())
            self._listeners = Listeners()

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return who this consumer is in its group, for `Producer.send_offsets_to_transaction`.

        Raises MisuseError with enable.auto.commit=true: see AsyncConsumer.group_metadata.
        """
        return self._async.group_metadata()

    def commit(self, offsets: Offsets | None = None) -> None:
        """Commit positions for the group: see AsyncConsumer.commit."""
        self._run(self._async.commit(offsets))

    def committed(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The group's committed position of each partition; None without one."""
        return self._run(self._async.committed(partitions))

    def seek_to_committed(self, *partitions: TopicPartition) -> None:
        """Go back to the group's committed positions: see AsyncConsumer.seek_to_committed."""
        self._run(self._async.seek_to_committed(*partitions))

    def assignment(self) -> list[TopicPartition]:
        """The partitions being read."""
        return self._async.assignment()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset` (0 or above). Raises MisuseError when the partition is not assigned."""
        self._call(self._async.seek, tp, offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go on at the first record; without arguments in every assigned partition."""
        self._call(self._async.seek_to_beginning, *partitions)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go on behind the last record a reader of this isolation may see."""
        self._call(self._async.seek_to_end, *partitions)

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these until `resume`; positions stay."""
        self._call(self._async.pause, *partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        """End a `pause`."""
        self._call(self._async.resume, *partitions)

    def paused(self) -> list[TopicPartition]:
        """The partitions that are paused."""
        return self._async.paused()

    def position(self, tp: TopicPartition) -> int:
        """The offset of the next record `poll` would give, looked up if need be."""
        return self._run(self._async.position(tp))

    def lag(self, tp: TopicPartition) -> int | None:
        """Records between position and end as of the last fetch; None while unknown."""
        return self._async.lag(tp)

    def poll(self, timeout: float = 1.0, *, max_records: int | None = None) -> list[Record]:
        """Records that wait, or come within `timeout` seconds: see AsyncConsumer.poll.

        A poll that Ctrl-C or another signal's exception interrupts has handed out nothing, and the next one
        returns what it would have returned.
        """
        limit = self._async.poll_limit(max_records)
        is_ready = self._ready(timeout, lambda now_ms: self._core.prepare_rows(limit, now_ms))
        return self._core.delivery.take(limit) if is_ready else []

    def poll_arrow(self, timeout: float = 1.0, *, include_headers: bool = False) -> Any | None:
        """All records of one fetched piece of one partition as a pyarrow.RecordBatch; None if none came."""
        is_ready = self._ready(
            timeout, lambda now_ms: self._core.prepare_columns(now_ms, include_headers=include_headers)
        )
        return self._core.delivery.take_columns() if is_ready else None

    def _ready(self, timeout: float, prepare: Prepare) -> bool:
        """Wait until records are ready in the core's `delivery`; false when the time is over.

        This thread tells the application of rebalances. A callback that an interrupt ends is called again
        by the next poll; one that raises an Exception is not, and poll raises that.
        """
        # A poll is refused for as long as another thread's lasts, its callbacks included, as by Java's
        # `acquire`. Between two steps it could get in, and ended the other thread's poll instead.
        # Guard: test_a_second_thread_is_refused_while_a_callback_of_the_first_runs.
        thread, outer = threading.get_ident(), self._polled_by  # a callback may poll itself
        if outer not in (None, thread):
            raise MisuseError(SECOND_POLL)
        deadline_ms = self._async.begin_poll(timeout)
        self._polled_by = thread
        try:
            while isinstance(step := self._run(self._async.poll_step(deadline_ms, prepare)), Rebalance):
                try:
                    self._listeners.tell(step)
                except Exception:
                    self._async.note_told()
                    raise
                self._async.note_told()
            return step
        finally:
            self._polled_by = outer

    def __iter__(self) -> Iterator[Record]:
        """Record after record; ends after consumer.timeout.ms without one, if that is set.

        Each record counts as handed out when the loop gets it. A loop that is left, by `break` or an
        exception, skips nothing: the next loop or poll goes on behind the last record that was handed out.
        Automatic commits leave out the record at which a loop was left, until the application asks for more.
        """
        timeout, limit = self._async.iteration_timeout, self._async.poll_limit()

        def prepare(now_ms: float) -> bool:
            return self._core.prepare_rows(limit, now_ms)

        self._run(self._async.start())  # connecting does not count as time without a record
        # No jump backwards between taking a row and giving it: a signal handler may run there and raise.
        while True:
            row = self._core.delivery.next_row()
            if row is not None:
                yield row
            elif not self._ready(timeout, prepare):
                return

    def fetch_range(
        self, tp: TopicPartition, start: int, end: int, *, include_headers: bool = False
    ) -> Iterator[Any]:
        """What a reader of this isolation sees of offsets [start, end), as pyarrow.RecordBatches.

        Stateless: independent of assignment and positions. Ends when everything below `end` was read, also
        if only markers and aborted records are left. The next piece is fetched while one is worked on.
        Raises OffsetOutOfRange naming what exists, and TimedOut when request.timeout.ms passes without
        anything new below `end`.
        """
        check_range(tp, start, end)
        return self._arrow_pieces(tp, start, end, include_headers)

    def _arrow_pieces(self, tp: TopicPartition, start: int, end: int, include_headers: bool) -> Iterator[Any]:
        options = range_options(self.settings)
        for offset, piece in self._pieces(tp, start, end, options):
            batch = piece.arrow(offset, end, check_crcs=options.check_crcs, include_headers=include_headers)
            if batch is not None:
                yield batch

    def fetch_batches(self, tp: TopicPartition, start: int, end: int) -> Iterator[memoryview]:
        """The stored batches that hold offsets [start, end), markers and aborted ones included.

        Each view is one or more whole batches, byte for byte as stored; checksums are left to the caller.
        """
        check_range(tp, start, end)
        return self._raw_pieces(tp, start, end)

    def _raw_pieces(self, tp: TopicPartition, start: int, end: int) -> Iterator[memoryview]:
        options = range_options(self.settings, Isolation.READ_UNCOMMITTED)
        for offset, piece in self._pieces(tp, start, end, options):
            if len(raw := piece.raw(offset, end)):
                yield raw

    def fetch_pieces(
        self, tp: TopicPartition, start: int, end: int, isolation: Isolation
    ) -> Iterator[RangePiece]:
        """The same batches, each with what a reader of that isolation sees of it by the broker's answers.

        A piece may begin below `start` and end behind `end`. READ_COMMITTED: `end` must be at most the last
        stable offset.
        """
        check_range(tp, start, end)
        return (piece for _, piece in self._pieces(tp, start, end, range_options(self.settings, isolation)))

    def _pieces(
        self, tp: TopicPartition, start: int, end: int, options: FetchOptions
    ) -> Iterator[tuple[int, RangePiece]]:
        """Piece after piece, decoded by the caller's thread while the loop's thread receives the next."""

        def fetch(offset: int) -> concurrent.futures.Future[RangePiece]:
            return self._thread.submit(self._async.fetch_piece(tp, offset, end, options))

        offset, following = start, None
        try:
            while offset < end:
                piece = result_of(following or fetch(offset))
                following = fetch(piece.next_offset) if piece.next_offset < end else None
                yield offset, piece
                offset = piece.next_offset
        finally:
            if following:
                following.cancel()

    def beginning_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """The first offset that exists, per partition."""
        return self._run(self._async.beginning_offsets(partitions))

    def end_offsets(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, int]:
        """The offset behind the last record this isolation may see (LSO or high watermark), per partition."""
        return self._run(self._async.end_offsets(partitions))

    def offsets_for_times(
        self, times_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAt | None]:
        """The first record at or after a time (ms since the epoch), per partition; None where none is."""
        return self._run(self._async.offsets_for_times(times_ms))

    def partitions_for(self, topic: str) -> tuple[PartitionInfo, ...]:
        """The topic's partitions. Raises UnknownTopicOrPartition when it does not exist."""
        return self._run(self._async.partitions_for(topic))

    def metrics(self) -> dict[str, float]:
        """Numbers under Kafka's names (records-consumed-rate, fetch-latency-avg, records-lag-max, ...)."""
        values: dict[str, float] = self._call(self._async.metrics)
        return values
