"""The blocking consumer: AsyncConsumer on a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import re
from collections.abc import Collection, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from oncelog.client.fetching import FetchOptions
from oncelog.client.offsets import OffsetAt
from oncelog.edge import machine
from oncelog.edge.async_consumer import AsyncConsumer
from oncelog.edge.group import Change, Rebalance
from oncelog.edge.ranges import RangePiece, check_range, range_options
from oncelog.edge.subscribing import Listener, Listeners, Offsets
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
_POLL_FOREVER_SECONDS = 3600.0
_CLOSE_SECONDS = 10.0
_CALLBACKS = ("on_assigned", "on_revoked", "on_lost")


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
        self._thread = machine.current().loop_thread("oncelog-consumer")
        self._listeners: Listeners | None = None
        self._told: queue.SimpleQueue[tuple[Rebalance, asyncio.Future[None]] | None] = queue.SimpleQueue()

    @property
    def settings(self) -> Settings:
        return self._async.settings

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

    def _call(self, function: Any, *args: Any) -> Any:
        """Run a plain function where the consumer's state lives."""

        async def call() -> Any:
            return function(*args)

        return self._thread.run(call())

    def close(self) -> None:
        """End all work and connections; safe to call twice."""
        if self._thread.is_running:
            try:
                self._thread.run(self._async.close(), _CLOSE_SECONDS)
            finally:
                self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def assign(self, partitions: Collection[TopicPartition] | TopicPartition) -> None:
        """Read these partitions and no others; those assigned before keep their positions."""
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
        self._listeners = Listeners(on_assigned, on_revoked, on_lost)
        relays = (self._relay(change) for change in (Change.ASSIGNED, Change.REVOKED, Change.LOST))
        listeners = dict(zip(_CALLBACKS, relays, strict=True))
        self._call(lambda: self._async.subscribe(topics, pattern=pattern, **listeners))

    def _relay(self, change: Change) -> Listener:
        """What tells the thread that polls, and waits until it has been told."""

        async def relay(partitions: list[TopicPartition]) -> None:
            told = asyncio.get_running_loop().create_future()
            self._told.put((Rebalance(change, partitions), told))
            await told

        return relay

    def unsubscribe(self) -> None:
        """Leave the group, committing first if that is automatic, and read nothing."""
        self._listeners = None
        self._run(self._async.unsubscribe())

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
        """Records that wait, or come within `timeout` seconds: see AsyncConsumer.poll."""
        return self._poll(self._async.poll(timeout, max_records=max_records))

    def poll_arrow(self, timeout: float = 1.0, *, include_headers: bool = False) -> Any | None:
        """All records of one fetched piece of one partition as a pyarrow.RecordBatch; None if none came."""
        return self._poll(self._async.poll_arrow(timeout, include_headers=include_headers))

    def _poll(self, polling: Coroutine[Any, Any, T]) -> T:
        """Run a poll; what the group has to tell meanwhile is told by this thread."""
        if self._listeners is None:
            return self._run(polling)
        future = self._thread.submit(polling)
        future.add_done_callback(lambda _: self._told.put(None))
        while (told := self._told.get()) is not None:
            rebalance, waiting = told
            try:
                self._listeners.tell(rebalance)
            except Exception as error:
                self._thread.call_soon(waiting.set_exception, error)
            else:
                self._thread.call_soon(waiting.set_result, None)
        return future.result()

    def __iter__(self) -> Iterator[Record]:
        """Record after record; ends after consumer.timeout.ms without one, if that is set."""
        limit_ms = self.settings["consumer.timeout.ms"]
        while rows := self.poll(_POLL_FOREVER_SECONDS if limit_ms is None else limit_ms / 1000):
            yield from rows

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
                piece = (following or fetch(offset)).result()
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
