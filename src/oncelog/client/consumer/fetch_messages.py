"""Fetch as a client asks it, and what an answer holds: batches, who may see them, where to go on.

Sessions are not used (session id 0, epoch -1: every request names all its partitions), and topics go
by name: MAX_FETCH_VERSION is the last version that does so, and 4 or above is what any broker has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from oncelog.errors import BrokerError, CorruptMessage, InvalidRecord, PeerError
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.settings import Settings
from oncelog.types import Isolation, Record, TopicPartition
from oncelog.wire.batch import BatchHeader, iter_batches, verify_crc
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.messages import FetchRequest, FetchResponse
from oncelog.wire.records import READING, DecodedRecord, decode_records, iter_records

MAX_FETCH_VERSION = 12


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """The consumer settings a fetch needs. Sizes are bytes; one batch may exceed each of them."""

    isolation: Isolation
    min_bytes: int
    max_wait_ms: int
    max_bytes: int
    partition_max_bytes: int
    check_crcs: bool

    @classmethod
    def from_settings(cls, settings: Settings) -> FetchOptions:
        """From parsed consumer settings."""
        return cls(
            isolation=isolation_of(settings["isolation.level"]),
            min_bytes=settings["fetch.min.bytes"],
            max_wait_ms=settings["fetch.max.wait.ms"],
            max_bytes=settings["fetch.max.bytes"],
            partition_max_bytes=settings["max.partition.fetch.bytes"],
            check_crcs=settings["check.crcs"],
        )


def isolation_of(name: str) -> Isolation:
    """read_committed or read_uncommitted, as the setting isolation.level spells them."""
    return Isolation[name.upper()]


def fetch_request(positions: Iterable[tuple[TopicPartition, int]], options: FetchOptions) -> FetchRequest:
    """A full fetch of partitions that one broker leads, each from its offset; their order matters."""
    topics: dict[str, list[FetchRequest.FetchPartition]] = {}
    for tp, offset in positions:
        row = FetchRequest.FetchPartition(
            partition=tp.partition, fetch_offset=offset, partition_max_bytes=options.partition_max_bytes
        )
        topics.setdefault(tp.topic, []).append(row)
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=options.max_wait_ms,
        min_bytes=options.min_bytes,
        max_bytes=options.max_bytes,
        isolation_level=int(options.isolation),
        session_id=0,
        session_epoch=-1,
        topics=[FetchRequest.FetchTopic(topic=name, partitions=rows) for name, rows in topics.items()],
    )


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """One partition of a fetch answer. `aborted` are (producer id, first offset) pairs."""

    tp: TopicPartition
    error_code: int
    records: memoryview
    aborted: tuple[tuple[int, int], ...]
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


def fetched_partitions(response: FetchResponse) -> Iterator[FetchedPartition]:
    """The partitions of an answer, in its order."""
    for topic in response.responses:
        for row in topic.partitions:
            aborted = row.aborted_transactions or ()
            yield FetchedPartition(
                tp=TopicPartition(topic.topic, row.partition_index),
                error_code=row.error_code,
                records=memoryview(row.records if row.records is not None else b""),
                aborted=tuple((entry.producer_id, entry.first_offset) for entry in aborted),
                high_watermark=row.high_watermark,
                last_stable_offset=row.last_stable_offset,
                log_start_offset=row.log_start_offset,
            )


class PlacedBatch(NamedTuple):
    """A whole batch in a fetched piece: where it starts, its header, whether the reader sees it."""

    position: int
    header: BatchHeader
    verdict: Verdict


def place_batches(piece: FetchedPartition, fetch_offset: int, isolation: Isolation) -> list[PlacedBatch]:
    """The whole batches of a piece, judged; a batch cut short at its end is left for the next fetch.

    Raises CorruptMessage or InvalidRecord naming partition and offset, PeerError for bytes without
    one whole batch.
    """
    judge = VisibilityFilter(isolation, piece.aborted)
    placed: list[PlacedBatch] = []
    try:
        for position, header in iter_batches(piece.records):
            if header.last_offset < header.base_offset:
                raise CorruptMessage(f"a batch claims offsets {header.base_offset} to {header.last_offset}")
            abort = header.is_control and _is_abort_marker(piece.records, position)
            verdict = judge.decide(header, is_abort_marker=abort)
            if verdict is Verdict.ABORTED and not verify_crc(piece.records, position, header.size_bytes):
                # Nobody decodes it, and its last offset would move the position over records that follow.
                raise CorruptMessage(f"the checksum of the batch at offset {header.base_offset} is wrong")
            placed.append(PlacedBatch(position, header, verdict))
    except (CorruptMessage, InvalidRecord) as error:
        if placed:
            return placed  # what is whole comes first; the next fetch begins with the damage
        raise type(error)(f"{piece.tp} at offset {fetch_offset}: {error.detail}") from error
    if len(piece.records) and not placed:
        raise PeerError(
            f"{piece.tp}: the broker sent {len(piece.records)} bytes for offset {fetch_offset} "
            "without one whole batch; raise max.partition.fetch.bytes and fetch.max.bytes"
        )
    return placed


def _is_abort_marker(records: memoryview, position: int) -> bool:
    """Always checked: a marker that says the contrary would hide what comes after it."""
    control = decode_control(records, position)
    return control is not None and control.type is ControlType.ABORT


def end_offset(placed: list[PlacedBatch], fetch_offset: int, high_watermark: int) -> int:
    """Return where to go on after a piece: behind all of its batches, also if nothing of it was visible.

    A leader may note its high watermark before it reads, as Apache Kafka does. So batches of a sound piece
    may be beyond it, and to stop in front of one that is handed out would bring its records twice. Guard:
    test_a_piece_beyond_its_high_watermark_is_given_once.
    Where batches have changed places the last one is not the highest, and a fetch behind it could bring the
    same piece without end. Only there a batch that claims offsets from the high watermark on counts as
    damaged. Guard: test_batches_in_wrong_order_are_fetched_once.
    """
    if not placed:
        return fetch_offset
    lasts = [batch.header.last_offset for batch in placed]
    highest = lasts[-1]
    if any(after <= before for before, after in pairwise(lasts)):
        highest = max((at for at in lasts if at < high_watermark), default=highest)
    return max(fetch_offset, highest + 1)


def decode_batch(
    tp: TopicPartition, records: memoryview, batch: PlacedBatch, start_offset: int, *, check_crcs: bool
) -> list[Record]:
    """The records of one batch from `start_offset` on. Raises CorruptMessage naming the batch."""
    try:
        decoded = decode_records(records, batch.position, verify=check_crcs, name_errors=READING)
    except (CorruptMessage, InvalidRecord) as error:
        raise _unreadable(tp, batch.header, error) from error
    return _rows(tp, batch.header, decoded, start_offset)


def decode_parts(
    tp: TopicPartition, records: memoryview, batch: PlacedBatch, start_offset: int, *, check_crcs: bool
) -> Iterator[tuple[list[Record], bool]]:
    """Yield the records of one batch from `start_offset` on in parts, and with each whether it is the last.

    For batches of many records: few are in memory at once. Raises as `decode_batch`.
    """
    header, count = batch.header, 0
    try:
        for decoded in iter_records(records, batch.position, verify=check_crcs, name_errors=READING):
            count += len(decoded)
            yield _rows(tp, header, decoded, start_offset), count == header.records_count
    except (CorruptMessage, InvalidRecord) as error:
        raise _unreadable(tp, header, error) from error


def _unreadable(tp: TopicPartition, header: BatchHeader, error: BrokerError) -> BrokerError:
    return type(error)(
        f"{tp}, batch of offsets {header.base_offset} to {header.last_offset}: "
        f"{error.detail}; seek past it to go on"
    )


def _rows(
    tp: TopicPartition, header: BatchHeader, decoded: list[DecodedRecord], start_offset: int
) -> list[Record]:
    topic, partition = tp
    timestamp_type = header.timestamp_type
    if header.base_offset < start_offset:
        decoded = [record for record in decoded if record.offset >= start_offset]
    # Half the cost of calling Record: its own __new__ is a Python function that ends in this call.
    make = tuple.__new__
    return [
        make(Record, (topic, partition, offset, timestamp_ms, timestamp_type, key, value, headers))
        for offset, timestamp_ms, key, value, headers in decoded
    ]
