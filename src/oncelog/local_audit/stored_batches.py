"""Read the stored batches of an offset range from a broker, for an audit of their headers.

Below the last stable offset, batches are fetched with read_committed, so that the audit learns whether a
read_committed reader gets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from oncelog.audit.findings import StoredBatch
from oncelog.client.consumer.blocking import Consumer
from oncelog.client.consumer.range_reader import RangeChunk
from oncelog.errors import CorruptMessage, InvalidRecord, OffsetOutOfRange, TimedOut
from oncelog.local_audit.batch_records import records_problem
from oncelog.rules.storage.read_committed import Verdict
from oncelog.spark.source.offset_ranges import Available
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.batch import BatchHeader, verify_crc
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.primitives import Buffer

_FETCH_BYTES = "max.partition.fetch.bytes"


def read_stored_batches(
    client: Mapping[str, object],
    tp: TopicPartition,
    start: int,
    end: int,
    isolation: Isolation,
    *,
    check_records: bool = False,
) -> Iterator[StoredBatch]:
    """Yield the stored batches whose last offset is in [start, end), in the order in which they are stored.

    `client` contains consumer settings. If the log start overtakes the read, one item with `is_removed`
    covers the removed offsets. If a batch cannot be read, the last item has the problem, and covers all
    offsets from this batch to `end`.

    The client rejects a whole fetch response if it contains bytes that are not a batch. The batches are then
    fetched one at a time, up to the bad one. The batches are never sorted by offset, because then a wrong
    stored order would not be found. See test_batches_in_the_wrong_order_are_found.
    """
    position = start
    settings, problem = dict(client), None
    timed_out: TimedOut | None = None
    while position < end and problem is None:
        with Consumer(settings) as consumer:
            try:
                for piece in consumer.fetch_chunks(tp, position, end, isolation):
                    for batch in _batches_of(piece, isolation, check_records):
                        position = max(position, batch.last_offset + 1)
                        if start < position <= end:
                            if timed_out is not None:
                                # The broker was only slow, or it withholds committed data. Guard:
                                # test_a_broker_that_stalls_ends_the_audit_of_its_topic_with_an_error.
                                raise timed_out
                            yield batch
                position = max(position, end)
            except (CorruptMessage, InvalidRecord) as error:
                problem = error.detail if settings.get(_FETCH_BYTES) == 1 else None
                settings[_FETCH_BYTES] = 1
            except OffsetOutOfRange:
                log_start = consumer.beginning_offsets([tp])[tp]
                if log_start <= position:
                    # The log start is not the reason. `position` is above the end of the log: the topic was
                    # re-created, or its log was truncated.
                    raise
                yield no_batch(position, log_start - 1, "")._replace(problem=None, is_removed=True)
                position = log_start
            except TimedOut as error:
                if isolation is Isolation.READ_UNCOMMITTED:
                    raise
                # A read_committed fetch gets nothing if compaction removed all records from this position to
                # the last stable offset. So continue with read_uncommitted, which reads the batches above
                # that offset. If a batch is stored below it, the visibility for readers is not known, so the
                # audit must not continue without it.
                isolation, timed_out = Isolation.READ_UNCOMMITTED, error
    if problem is not None:
        yield no_batch(position, end - 1, problem)


def read_partition(
    client: Mapping[str, object], now: Available, tp: TopicPartition, *, check_records: bool = False
) -> Iterator[StoredBatch]:
    """Yield a partition's batches with offsets in `now`, in stored order.

    Up to the last stable offset, fetch them with read_committed, to learn which batches a read_committed
    reader gets.
    """
    stable = max(now.latest[tp], now.earliest[tp])
    for start, end, isolation in (
        (now.earliest[tp], stable, Isolation.READ_COMMITTED),
        (stable, now.written[tp], Isolation.READ_UNCOMMITTED),
    ):
        yield from read_stored_batches(client, tp, start, end, isolation, check_records=check_records)


def _batches_of(piece: RangeChunk, isolation: Isolation, check_records: bool) -> Iterator[StoredBatch]:
    for position, header, verdict in piece.batches:
        seen = verdict if isolation is Isolation.READ_COMMITTED else None
        yield stored_batch(piece.records, position, header, seen, check_records=check_records)


def stored_batch(
    data: Buffer, position: int, h: BatchHeader, verdict: Verdict | None, *, check_records: bool = False
) -> StoredBatch:
    """Return the StoredBatch for the batch at `position` of `data`, whose header is `h`.

    `verdict` says whether a read_committed reader gets the batch; None means unknown.
    """
    is_commit = coordinator_epoch = None
    crc_ok = verify_crc(data, position, h.size_bytes)
    if h.is_control and crc_ok:
        try:
            control = decode_control(data, position, verify=False)
        except (CorruptMessage, InvalidRecord) as error:
            return no_batch(h.base_offset, h.last_offset, error.detail)
        if control is not None and control.coordinator_epoch is not None:
            is_commit, coordinator_epoch = control.type is ControlType.COMMIT, control.coordinator_epoch
    return StoredBatch(
        base_offset=h.base_offset,
        last_offset=h.last_offset,
        producer_id=h.producer_id,
        producer_epoch=h.producer_epoch,
        base_sequence=h.base_sequence,
        sequence_count=h.last_offset_delta + 1,
        records_count=h.records_count,
        is_control=h.is_control,
        crc_ok=crc_ok,
        is_transactional=h.is_transactional,
        is_commit=is_commit,
        coordinator_epoch=coordinator_epoch,
        is_visible=None if verdict is None else verdict is Verdict.DELIVER,
        records_problem=records_problem(data, position, h)
        if check_records and crc_ok and not h.is_control
        else None,
    )


def no_batch(base_offset: int, last_offset: int, problem: str, *, is_torn: bool = False) -> StoredBatch:
    """Return a StoredBatch for a range of offsets without a readable batch. `problem` is the reason."""
    nothing = StoredBatch(base_offset, last_offset, None, None, None, 0, 0, is_control=False, crc_ok=None)
    return nothing._replace(is_torn=is_torn, problem=problem)
