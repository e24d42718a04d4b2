"""Builds Fetch requests, and reads the batches and the next fetch offset from the responses.

Fetch sessions are not used (session id 0, epoch -1), so each request names all its partitions. Topics are
identified by name; MAX_FETCH_VERSION is the last version with names. Every broker supports version 4 or
later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from oncelog.config import INT64_MAX
from oncelog.errors import BrokerError, CorruptMessage, InvalidRecord, PeerError
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.settings import Settings
from oncelog.types import Isolation, Record, TopicPartition
from oncelog.wire.batch import BatchHeader, iter_batches, verify_crc
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.fetched_records import append_plain_batches, iter_rows, read_rows
from oncelog.wire.messages import FetchRequest, FetchResponse
from oncelog.wire.records import payload_of

MAX_FETCH_VERSION = 12


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """The consumer settings for a fetch. Sizes are in bytes; a single batch may exceed the maxima."""

    isolation: Isolation
    min_bytes: int
    max_wait_ms: int
    max_bytes: int
    partition_max_bytes: int
    check_crcs: bool

    @classmethod
    def from_settings(cls, settings: Settings) -> FetchOptions:
        """Return the options from parsed consumer settings."""
        return cls(
            isolation=isolation_of(settings["isolation.level"]),
            min_bytes=settings["fetch.min.bytes"],
            max_wait_ms=settings["fetch.max.wait.ms"],
            max_bytes=settings["fetch.max.bytes"],
            partition_max_bytes=settings["max.partition.fetch.bytes"],
            check_crcs=settings["check.crcs"],
        )


def isolation_of(name: str) -> Isolation:
    """Return the isolation level for a value of isolation.level: read_committed or read_uncommitted."""
    return Isolation[name.upper()]


def fetch_request(positions: Iterable[tuple[TopicPartition, int]], options: FetchOptions) -> FetchRequest:
    """Return a Fetch request for partitions with the same leader. `positions` has the offset for each of
    them.

    The broker fills the response in the order of `positions`, except that it groups partitions by topic.
    """
    topics: dict[str, list[FetchRequest.FetchPartition]] = {}
    for tp, offset in positions:
        partition = FetchRequest.FetchPartition(
            partition=tp.partition, fetch_offset=offset, partition_max_bytes=options.partition_max_bytes
        )
        topics.setdefault(tp.topic, []).append(partition)
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=options.max_wait_ms,
        min_bytes=options.min_bytes,
        max_bytes=options.max_bytes,
        isolation_level=int(options.isolation),
        session_id=0,
        session_epoch=-1,
        topics=[
            FetchRequest.FetchTopic(topic=name, partitions=partitions) for name, partitions in topics.items()
        ],
    )


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """One partition of a fetch response.

    `aborted` has the (producer id, first offset) of aborted transactions.
    """

    tp: TopicPartition
    error_code: int
    records: memoryview
    aborted: tuple[tuple[int, int], ...]
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


def fetched_partitions(response: FetchResponse) -> Iterator[FetchedPartition]:
    """Yield the partitions of a response, in its order."""
    for topic in response.responses:
        for partition in topic.partitions:
            aborted = partition.aborted_transactions or ()
            yield FetchedPartition(
                tp=TopicPartition(topic.topic, partition.partition_index),
                error_code=partition.error_code,
                records=memoryview(partition.records if partition.records is not None else b""),
                aborted=tuple((entry.producer_id, entry.first_offset) for entry in aborted),
                high_watermark=partition.high_watermark,
                last_stable_offset=partition.last_stable_offset,
                log_start_offset=partition.log_start_offset,
            )


class FetchedBatch(NamedTuple):
    """A whole batch in fetched data: its position in the data in bytes, its header, and its visibility."""

    position: int
    header: BatchHeader
    verdict: Verdict


def decode_headers(fetched: FetchedPartition, fetch_offset: int, isolation: Isolation) -> list[FetchedBatch]:
    """Return the whole batches with their visibility, up to the first damaged or incomplete batch.

    If the first batch is damaged, raises CorruptMessage or InvalidRecord with partition and offset in the
    text. Raises PeerError if the broker sent bytes that do not contain a whole batch.
    """
    visibility = VisibilityFilter(isolation, fetched.aborted)
    batches: list[FetchedBatch] = []
    plain_bytes = 0
    # With read_uncommitted or without aborted transactions, every batch that is not a marker is delivered.
    if isolation is Isolation.READ_UNCOMMITTED or not fetched.aborted:
        plain_bytes = append_plain_batches(fetched.records, batches, FetchedBatch, Verdict.DELIVER)
    try:
        for position, header in iter_batches(fetched.records, plain_bytes):
            # No offset follows 2^63-1, so no position could be after such a batch. Guard:
            # test_a_batch_that_ends_at_the_last_offset_is_an_error.
            if not header.base_offset <= header.last_offset < INT64_MAX:
                raise CorruptMessage(
                    f"a batch has the base offset {header.base_offset} and the last offset "
                    f"{header.last_offset}"
                )
            is_abort = header.is_control and _is_abort_marker(fetched.records, position)
            verdict = visibility.decide(header, is_abort_marker=is_abort)
            if verdict is Verdict.ABORTED and not verify_crc(fetched.records, position, header.size_bytes):
                # An aborted batch is not decoded, but its last offset moves the position. A damaged last
                # offset would skip the records that follow.
                raise CorruptMessage(f"the checksum of the batch at offset {header.base_offset} is wrong")
            batches.append(FetchedBatch(position, header, verdict))
    except (CorruptMessage, InvalidRecord) as error:
        if batches:
            return batches  # deliver the valid batches first; the next fetch starts with the damaged one
        raise type(error)(f"{fetched.tp} at offset {fetch_offset}: {error.detail}") from error
    if len(fetched.records) and not batches:
        raise PeerError(
            f"{fetched.tp}: the {len(fetched.records)} bytes that the broker sent for offset "
            f"{fetch_offset} contain no whole batch; raise max.partition.fetch.bytes and "
            "fetch.max.bytes"
        )
    return batches


def _is_abort_marker(records: memoryview, position: int) -> bool:
    """Return True for an abort marker. The checksum of the marker is always verified.

    If damage changed an abort marker to a commit marker, the producer's later records would stay hidden.
    """
    control = decode_control(records, position)
    return control is not None and control.type is ControlType.ABORT


def end_offset(batches: list[FetchedBatch], fetch_offset: int, high_watermark: int) -> int:
    """Return the next fetch offset. It is after all batches, even if none of their records was visible."""
    if not batches:
        return fetch_offset
    last_offsets = [batch.header.last_offset for batch in batches]
    # Do not stop at the high watermark: Apache Kafka reads it before the data, so batches may be beyond it. A
    # fetch from the high watermark would deliver the records of these batches twice. Guard:
    # test_records_above_the_reported_high_watermark_are_delivered_once.
    highest = last_offsets[-1]
    # In a damaged log with batches in the wrong order, the last batch need not have the highest offset. A
    # fetch after the last batch could return the same data again and again. Only in such a log, batches at or
    # above the high watermark are treated as damaged and ignored here. Guard:
    # test_batches_in_wrong_order_are_fetched_once.
    if any(after <= before for before, after in pairwise(last_offsets)):
        highest = max((offset for offset in last_offsets if offset < high_watermark), default=highest)
    return max(fetch_offset, highest + 1)


def decode_batch(
    tp: TopicPartition, records: memoryview, batch: FetchedBatch, start_offset: int, *, check_crcs: bool
) -> list[Record]:
    """Return the records of one batch from `start_offset` on.

    Raises CorruptMessage or InvalidRecord, with the batch's offsets in the text.
    """
    header = batch.header
    try:
        payload = payload_of(records, batch.position, header, check_crcs)
        return read_rows(payload, header, tp, start_offset)
    except (CorruptMessage, InvalidRecord) as error:
        raise _unreadable(tp, header, error) from error


def decode_parts(
    tp: TopicPartition, records: memoryview, batch: FetchedBatch, start_offset: int, *, check_crcs: bool
) -> Iterator[tuple[list[Record], bool]]:
    """Yield the records of one batch from `start_offset` on, in parts: (records, True for the last part).

    Only one part of a large batch needs to be in memory. Raises the same errors as `decode_batch`.
    """
    header = batch.header
    try:
        payload = payload_of(records, batch.position, header, check_crcs)
        yield from iter_rows(payload, header, tp, start_offset)
    except (CorruptMessage, InvalidRecord) as error:
        raise _unreadable(tp, header, error) from error


def _unreadable(tp: TopicPartition, header: BatchHeader, error: BrokerError) -> BrokerError:
    return type(error)(
        f"{tp}, batch of offsets {header.base_offset} to {header.last_offset}: "
        f"{error.detail}; seek past it to continue"
    )
