"""The fate of every record of a partition, as an array with one code per offset.

Normally only batch headers and markers are read, because all records of a batch have the same fate. If
compaction has removed some records of a batch, the other ones are decoded to find their offsets.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oncelog.audit.table_rows import Codes, RecordFate
from oncelog.client.consumer.blocking import Consumer
from oncelog.client.consumer.fetch_messages import FetchedBatch
from oncelog.client.consumer.range_reader import RangeChunk
from oncelog.errors import OffsetOutOfRange, TimedOut
from oncelog.rules.storage.read_committed import Verdict
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.batch import BatchHeader
from oncelog.wire.columns import batches_to_arrow
from oncelog.wire.control import ControlType, decode_control


@dataclass(slots=True)
class PartitionSnapshot:
    """The offsets of a partition shortly before and after the table was opened.

    - `log_start`: records below it are removed. It moves up if the log start overtakes the audit.
    - `expected_end`: committed records below it were visible before the table was opened.
    - `stable_end`, `end`: the last stable offset and the high watermark after the table was opened.
    """

    log_start: int
    expected_end: int
    stable_end: int
    end: int
    is_compacted: bool


class _Ends(NamedTuple):
    """The markers of one producer at or above the last stable offset, in the order of their offsets."""

    offsets: array[int]
    commits: array[int]


class RecordFates:
    """A reader of the fates of the records of one partition, for one range of offsets at a time."""

    def __init__(self, consumer: Consumer, tp: TopicPartition, snapshot: PartitionSnapshot) -> None:
        self.snapshot = snapshot
        self._consumer, self._tp = consumer, tp
        self._ends: dict[int, _Ends] | None = None

    def window(self, start: int, end: int) -> Codes:
        """Return the fate of each offset in [start, end), as codes of RecordFate.

        Raises CorruptMessage or InvalidRecord for a damaged batch.
        """
        while True:
            try:
                return self._window(start, end)
            except OffsetOutOfRange:
                log_start = self._consumer.beginning_offsets([self._tp])[self._tp]
                if log_start <= self.snapshot.log_start:
                    raise
                self.snapshot.log_start = log_start

    def _window(self, start: int, end: int) -> Codes:
        s = self.snapshot
        fates = np.full(end - start, RecordFate.REMOVED if s.is_compacted else RecordFate.NONE, np.uint8)
        fates[: max(0, s.log_start - start)] = RecordFate.REMOVED
        low, high = max(start, s.log_start), min(end, s.end)
        stable = max(low, min(high, s.stable_end))
        for chunk in self._committed_chunks(low, stable):
            _fill(fates, start, (low, stable), chunk, [(b, _fate_if_stable(b)) for b in chunk.batches])
        if stable < high:
            ends = self._find_ends()
            for chunk in self._consumer.fetch_chunks(self._tp, stable, high, Isolation.READ_UNCOMMITTED):
                pairs = [(b, _fate_if_unstable(b.header, ends)) for b in chunk.batches]
                _fill(fates, start, (stable, high), chunk, pairs)
        later = fates[max(0, s.expected_end - start) :]
        later[later == RecordFate.COMMITTED] = RecordFate.LATER
        return fates

    def _committed_chunks(self, start: int, end: int) -> Iterator[RangeChunk]:
        position = start
        try:
            for chunk in self._consumer.fetch_chunks(self._tp, start, end, Isolation.READ_COMMITTED):
                yield chunk
                position = chunk.next_offset
        except TimedOut:
            # A read_committed fetch gets nothing if compaction removed all records from `position` to the
            # last stable offset. If a batch is stored in this range, the broker was only slow. Then raise the
            # error, so that the audit does not report a gap. Guard:
            # test_a_broker_that_stalls_ends_the_audit_with_an_error.
            for chunk in self._consumer.fetch_chunks(self._tp, position, end, Isolation.READ_UNCOMMITTED):
                headers = [batch.header for batch in chunk.batches]
                if any(h.base_offset < end and h.last_offset >= position for h in headers):
                    raise
                if any(h.last_offset >= end for h in headers):
                    return

    def _find_ends(self) -> dict[int, _Ends]:
        """Return the markers from the last stable offset to the end, by producer id. The result is cached."""
        if self._ends is not None:
            return self._ends
        found: dict[int, _Ends] = {}
        s = self.snapshot
        start = max(s.stable_end, s.log_start)
        for chunk in self._consumer.fetch_chunks(self._tp, start, s.end, Isolation.READ_UNCOMMITTED):
            for position, header, _ in chunk.batches:
                if not header.is_control or header.producer_id is None or header.last_offset >= s.end:
                    continue
                control = decode_control(chunk.records, position)
                if control is None or control.coordinator_epoch is None:
                    continue
                ends = found.setdefault(header.producer_id, _Ends(array("q"), array("b")))
                ends.offsets.append(header.base_offset)
                ends.commits.append(control.type is ControlType.COMMIT)
        self._ends = found
        return found


def _fate_if_stable(batch: FetchedBatch) -> RecordFate | None:
    if batch.verdict is Verdict.DELIVER:
        return RecordFate.COMMITTED
    return RecordFate.ABORTED if batch.verdict is Verdict.ABORTED else None


def _fate_if_unstable(header: BatchHeader, ends: dict[int, _Ends]) -> RecordFate | None:
    """Return the fate of a batch at or above the last stable offset: the outcome in the next marker of its
    producer.
    """
    if header.is_control:
        return None
    if not header.is_transactional or header.producer_id is None:
        return RecordFate.LATER
    of_producer = ends.get(header.producer_id)
    if of_producer is None:
        return RecordFate.OPEN
    index = bisect_right(of_producer.offsets, header.last_offset)
    if index == len(of_producer.offsets):
        return RecordFate.OPEN
    return RecordFate.LATER if of_producer.commits[index] else RecordFate.ABORTED


def _fill(
    fates: Codes,
    start: int,
    bounds: tuple[int, int],
    chunk: RangeChunk,
    batches: list[tuple[FetchedBatch, RecordFate | None]],
) -> None:
    """Set the fates of a chunk's records with offsets within `bounds`. `start` is the offset of fates[0].

    Batches with fate None are markers: their offsets have no record.
    """
    low, end = bounds
    sparse: dict[RecordFate, list[tuple[int, BatchHeader]]] = {}
    for (position, header, _), fate in batches:
        first, last = max(header.base_offset, low), min(header.last_offset, end - 1)
        if first > last:
            continue
        if fate is None:
            fates[first - start : last + 1 - start] = RecordFate.NONE
        elif header.records_count > header.last_offset_delta:
            fates[first - start : last + 1 - start] = fate
        elif header.records_count > 0:
            sparse.setdefault(fate, []).append((position, header))
    for fate, listed in sparse.items():
        rows = batches_to_arrow(
            chunk.records,
            topic=chunk.tp.topic,
            partition=chunk.tp.partition,
            start_offset=low,
            end_offset=end,
            batches=listed,
        )
        fates[rows["offset"].to_numpy() - start] = fate
