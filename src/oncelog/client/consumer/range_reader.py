"""Reads a fixed offset range of one partition, without a consumer's state, for Spark tasks and audits.

At most two chunks are in memory: the caller processes one while the next one is fetched.
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
    FetchedBatch,
    FetchedPartition,
    FetchOptions,
    decode_headers,
    end_offset,
    fetch_request,
    fetched_partitions,
)
from oncelog.errors import (
    BrokerError,
    CorruptMessage,
    DisconnectedError,
    MisuseError,
    OffsetOutOfRange,
    OncelogError,
    TimedOut,
    UnknownServerError,
    error_for_code,
)
from oncelog.settings import Settings
from oncelog.types import Isolation, TopicPartition

RANGE_FETCH_BYTES = 4 * 1024 * 1024
"""The number of bytes that a fetch of a range requests, unless max.partition.fetch.bytes is set."""

_CHANNEL = "range"


@dataclass(frozen=True, slots=True)
class RangeChunk:
    """Whole stored batches with their visibility. `next_offset` is the start of the next chunk."""

    tp: TopicPartition
    records: memoryview
    batches: list[FetchedBatch]
    next_offset: int

    def arrow(self, start: int, end: int, *, check_crcs: bool, include_headers: bool) -> Any:
        """Return the visible records with offsets in [start, end) as a pyarrow.RecordBatch.

        Return None if there are none.
        """
        if not self.batches:
            return None
        batch = arrow_of(
            self.tp,
            self.records,
            self.batches,
            start_offset=start,
            end_offset=end,
            check_crcs=check_crcs,
            include_headers=include_headers,
        )
        return batch if batch.num_rows else None

    def raw(self, start: int, end: int) -> memoryview:
        """Return the bytes of the batches that contain offsets in [start, end)."""
        inside = [
            batch
            for batch in self.batches
            if batch.header.base_offset < end and batch.header.last_offset >= start
        ]
        if not inside:
            return self.records[:0]
        return self.records[inside[0].position : inside[-1].position + inside[-1].header.size_bytes]


def range_options(settings: Settings, isolation: Isolation | None = None) -> FetchOptions:
    """Return fetch options for ranges. With `isolation` None, isolation.level applies."""
    options = FetchOptions.from_settings(settings)
    if not settings.is_user_set("max.partition.fetch.bytes"):
        options = replace(options, partition_max_bytes=RANGE_FETCH_BYTES)
    return replace(options, isolation=options.isolation if isolation is None else isolation)


def check_range(tp: TopicPartition, start: int, end: int) -> None:
    """Raise MisuseError if an offset is invalid, or if `start` is above `end`."""
    if offset_of(tp, start) > offset_of(tp, end):
        raise MisuseError(f"range {start} to {end} of {tp}: start must not be above end")


class RangeFetcher:
    """Fetches chunks of one partition. After an error it looks the partition's leader up again."""

    def __init__(self, cluster: ClusterConnection, tp: TopicPartition, options: FetchOptions) -> None:
        self.tp, self.options = tp, options
        self._cluster = cluster

    async def fetch(self, offset: int, end: int) -> RangeChunk:
        """Return the chunk from `offset` on, with at least one batch. `end` is for error texts.

        Raises OffsetOutOfRange with the available offsets, CorruptMessage or InvalidRecord for a damaged
        batch, and TimedOut if no batch arrives within request.timeout.ms. If the partition is unreachable for
        that time, raises the last error.
        """
        cluster = self._cluster
        deadline_ms = cluster.now_ms() + cluster.settings["request.timeout.ms"]
        attempt = 0
        while True:
            try:
                fetched = await self._fetch_once(offset)
            except (DisconnectedError, TimedOut, BrokerError) as error:
                # Do not retry CORRUPT_MESSAGE. It is retriable for a produced batch, but a stored batch stays
                # damaged, and each reader would wait for request.timeout.ms. Kafka's consumer also raises it
                # immediately. Guard: test_a_damaged_partition_is_asked_once.
                is_damaged = isinstance(error, CorruptMessage)
                # The broker may have failed to read a segment from remote storage. Java's consumer repeats
                # UNKNOWN_SERVER_ERROR, too.
                is_lasting = isinstance(error, BrokerError) and not error.retriable
                is_final = is_damaged or (is_lasting and not isinstance(error, UnknownServerError))
                pause_ms = cluster.retry_pause_ms(attempt)
                if is_final or cluster.now_ms() + pause_ms > deadline_ms:
                    raise
                cluster.metadata.mark_stale([self.tp])
                attempt += 1
                await asyncio.sleep(pause_ms / 1000)
                continue
            batches = decode_headers(fetched, offset, self.options.isolation)
            if batches:
                await self._check_last_offset(fetched, batches)
                next_offset = end_offset(batches, offset, fetched.high_watermark)
                return RangeChunk(self.tp, fetched.records, batches, next_offset)
            if cluster.now_ms() > deadline_ms:
                raise self._nothing_to_read(fetched, offset, end)

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
        fetched = next(
            (partition for partition in fetched_partitions(response) if partition.tp == self.tp), None
        )
        if fetched is None:
            raise DisconnectedError(f"the response to a fetch of {self.tp} has no entry for this partition")
        if fetched.error_code:
            raise await self._error_of(fetched, offset)
        return fetched

    async def _check_last_offset(self, fetched: FetchedPartition, batches: list[FetchedBatch]) -> None:
        """Raise CorruptMessage for a batch that claims offsets beyond the end of the log.

        No checksum covers a batch's base offset. A wrong base offset would end the range early, and the
        remaining records would be missing without an error.
        """
        # Guard: test_a_range_ends_although_a_segment_ends_with_changed_offsets.
        claimed = max(batch.header.last_offset for batch in batches)
        if claimed < fetched.high_watermark:
            return
        # Compare with the current end of the log as well. Apache Kafka reads the high watermark before the
        # data, so the data may have records from beyond the high watermark.
        from oncelog.client.consumer.offset_lookup import list_offsets

        latest = (await list_offsets(self._cluster, {self.tp: "latest"}, Isolation.READ_UNCOMMITTED))[self.tp]
        if isinstance(latest, OncelogError):
            raise latest
        if claimed >= (latest.offset or 0):
            raise CorruptMessage(
                f"{self.tp}: a batch has offsets up to {claimed}, but the log ends before {latest.offset}"
            )

    async def _error_of(self, fetched: FetchedPartition, offset: int) -> OncelogError:
        from oncelog.client.consumer.offset_lookup import list_offsets

        if fetched.error_code != OffsetOutOfRange.code:
            return error_for_code(fetched.error_code, f"fetching {self.tp} at offset {offset}")
        bounds = []
        for spec in ("earliest", "latest"):
            bound = (await list_offsets(self._cluster, {self.tp: spec}, Isolation.READ_UNCOMMITTED))[self.tp]
            bounds.append("?" if isinstance(bound, OncelogError) else str(bound.offset))
        return OffsetOutOfRange(
            f"{self.tp} contains offsets {bounds[0]} to {bounds[1]} (exclusive), but offset "
            f"{offset} was requested; retention, delete-records or a re-created topic may "
            "have removed it"
        )

    def _nothing_to_read(self, fetched: FetchedPartition, offset: int, end: int) -> TimedOut:
        return TimedOut(
            f"{self.tp}: no records at offset {offset} of a range that ends at {end} within "
            f"request.timeout.ms; high watermark {fetched.high_watermark}, last stable offset "
            f"{fetched.last_stable_offset}"
        )
