"""Reading a fixed range of one partition, stateless and in bounded memory: for Spark tasks and audits.

At most two pieces are held: the one being worked on and the next, which is fetched meanwhile.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from oncelog.client.arguments import offset_of
from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.completed_fetch import arrow_of
from oncelog.client.consumer.fetch_messages import (
    MAX_FETCH_VERSION,
    FetchedPartition,
    FetchOptions,
    PlacedBatch,
    end_offset,
    fetch_request,
    fetched_partitions,
    place_batches,
)
from oncelog.errors import (
    BrokerError,
    CorruptMessage,
    DisconnectedError,
    MisuseError,
    OffsetOutOfRange,
    OncelogError,
    TimedOut,
    error_for_code,
)
from oncelog.settings import Settings
from oncelog.types import Isolation, TopicPartition

RANGE_FETCH_BYTES = 4 * 1024 * 1024
"""How much one fetch of a range asks for, unless max.partition.fetch.bytes is set."""

_CHANNEL = "range"


@dataclass(frozen=True, slots=True)
class RangeChunk:
    """Whole batches as they are stored, judged for the reader; `next_offset` is where to go on."""

    tp: TopicPartition
    records: memoryview
    batches: list[PlacedBatch]
    next_offset: int

    def arrow(self, start: int, end: int, *, check_crcs: bool, include_headers: bool) -> Any:
        """The visible records in [start, end) as a pyarrow.RecordBatch; None without any."""
        if not self.batches:
            return None
        size = self.batches[-1].position + self.batches[-1].header.size_bytes
        batch = arrow_of(
            self.tp,
            self.records[:size],
            self.batches,
            start_offset=start,
            end_offset=end,
            check_crcs=check_crcs,
            include_headers=include_headers,
        )
        return batch if batch.num_rows else None

    def raw(self, start: int, end: int) -> memoryview:
        """The bytes of the batches that hold offsets of [start, end)."""
        inside = [b for b in self.batches if b.header.base_offset < end and b.header.last_offset >= start]
        if not inside:
            return self.records[:0]
        return self.records[inside[0].position : inside[-1].position + inside[-1].header.size_bytes]


def range_options(settings: Settings, isolation: Isolation | None = None) -> FetchOptions:
    """Fetch options for ranges; `isolation` None is the setting's."""
    options = FetchOptions.from_settings(settings)
    if not settings.is_user_set("max.partition.fetch.bytes"):
        options = replace(options, partition_max_bytes=RANGE_FETCH_BYTES)
    return replace(options, isolation=options.isolation if isolation is None else isolation)


def check_range(tp: TopicPartition, start: int, end: int) -> None:
    """Raises MisuseError for a range that cannot be."""
    if offset_of(tp, start) > offset_of(tp, end):
        raise MisuseError(f"range {start} to {end} of {tp}: it needs start <= end")


class RangeFetcher:
    """Fetches pieces of one partition, finding its leader again when that moves."""

    def __init__(self, cluster: ClusterConnection, tp: TopicPartition, options: FetchOptions) -> None:
        self.tp, self.options = tp, options
        self._cluster = cluster

    async def fetch(self, offset: int, end: int) -> RangeChunk:
        """The piece from `offset` on, with at least one batch.

        Raises OffsetOutOfRange naming what exists, TimedOut when request.timeout.ms passes without anything
        to read, CorruptMessage, and the last error when the partition cannot be reached for that long.
        """
        cluster = self._cluster
        deadline_ms = cluster.now_ms() + cluster.settings["request.timeout.ms"]
        attempt = 0
        while True:
            try:
                fetched = await self._fetch_once(offset)
            except (DisconnectedError, TimedOut, BrokerError) as error:
                # CORRUPT_MESSAGE is retriable for a produced batch, but what is stored stays damaged: Kafka's
                # consumer raises it at once, too. Retries made each reader wait for request.timeout.ms.
                # Guard: test_a_damaged_partition_is_asked_once.
                is_damaged = isinstance(error, CorruptMessage)
                final = is_damaged or (isinstance(error, BrokerError) and not error.retriable)
                pause_ms = cluster.retry_pause_ms(attempt)
                if final or cluster.now_ms() + pause_ms > deadline_ms:
                    raise
                cluster.metadata.mark_stale([self.tp])
                attempt += 1
                await asyncio.sleep(pause_ms / 1000)
                continue
            placed = place_batches(fetched, offset, self.options.isolation)
            if placed:
                await self._check_claims(fetched, placed)
                next_offset = end_offset(placed, offset, fetched.high_watermark)
                return RangeChunk(self.tp, fetched.records, placed, next_offset)
            if cluster.now_ms() > deadline_ms:
                raise self._nothing_there(fetched, offset, end)

    async def _fetch_once(self, offset: int) -> FetchedPartition:
        cluster = self._cluster
        node_id = await cluster.leader(self.tp, allow_auto_topic_creation=False)
        timeout_ms = cluster.settings["request.timeout.ms"] + self.options.max_wait_ms
        response = await cluster.request(
            node_id,
            fetch_request([(self.tp, offset)], self.options),
            timeout_ms=timeout_ms,
            max_version=MAX_FETCH_VERSION,
            channel=_CHANNEL,
        )
        if response.error_code:
            raise error_for_code(response.error_code, f"fetching {self.tp} at offset {offset}")
        fetched = next((piece for piece in fetched_partitions(response) if piece.tp == self.tp), None)
        if fetched is None:
            raise DisconnectedError(f"the answer to a fetch of {self.tp} does not name it")
        if fetched.error_code:
            raise await self._error_of(fetched, offset)
        return fetched

    async def _check_claims(self, fetched: FetchedPartition, placed: list[PlacedBatch]) -> None:
        """Raise CorruptMessage for a batch that claims offsets which the log does not have.

        No checksum covers a batch's base offset. Behind such a claim the range would be over, and what is
        left of it would be missing without a word. Guard: test_a_segment_that_ends_with_changed_offsets.
        """
        claimed = max(batch.header.last_offset for batch in placed)
        if claimed < fetched.high_watermark:
            return
        # Apache Kafka notes the high watermark before it reads, so what came meanwhile may be beyond.
        from oncelog.client.consumer.offset_lookup import list_offsets

        found = (await list_offsets(self._cluster, {self.tp: "latest"}, Isolation.READ_UNCOMMITTED))[self.tp]
        if isinstance(found, OncelogError):
            raise found
        if claimed >= (found.offset or 0):
            raise CorruptMessage(
                f"{self.tp}: a batch claims offsets up to {claimed}, and the log ends before {found.offset}"
            )

    async def _error_of(self, fetched: FetchedPartition, offset: int) -> OncelogError:
        from oncelog.client.consumer.offset_lookup import list_offsets

        if fetched.error_code != OffsetOutOfRange.code:
            return error_for_code(fetched.error_code, f"fetching {self.tp} at offset {offset}")
        bounds = []
        for spec in ("earliest", "latest"):
            found = (await list_offsets(self._cluster, {self.tp: spec}, Isolation.READ_UNCOMMITTED))[self.tp]
            bounds.append("?" if isinstance(found, OncelogError) else str(found.offset))
        return OffsetOutOfRange(
            f"{self.tp} holds offsets {bounds[0]} up to (not including) {bounds[1]}, offset {offset} was "
            "asked for; retention, delete-records or a re-created topic may have removed it"
        )

    def _nothing_there(self, fetched: FetchedPartition, offset: int, end: int) -> TimedOut:
        return TimedOut(
            f"{self.tp}: nothing to read at offset {offset} of a range that ends at {end} within "
            f"request.timeout.ms; high watermark {fetched.high_watermark}, "
            f"last stable offset {fetched.last_stable_offset}"
        )
