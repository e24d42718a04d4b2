"""What one fetch brought of one partition, until it is handed out as rows or as Arrow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from oncelog.client.consumer.fetch_messages import PlacedBatch, decode_batch, decode_parts
from oncelog.errors import OncelogError
from oncelog.rules.storage.read_committed import Verdict
from oncelog.types import Record, TopicPartition
from oncelog.wire.batch import BatchHeader
from oncelog.wire.records import SLICE_RECORDS


class Piece:
    """Stored batches of one partition in offset order; `end_offset` is where the next piece starts."""

    __slots__ = ("_batches", "_is_last", "_parts", "_records", "_rows", "_rows_taken", "end_offset", "tp")

    def __init__(
        self, tp: TopicPartition, records: memoryview, batches: deque[PlacedBatch], end_offset: int
    ) -> None:
        self.tp = tp
        self.end_offset = end_offset
        self._records = records
        self._batches = batches
        # The first batch, part by part: its rows at hand, and whether they are its last.
        self._parts: Iterator[tuple[list[Record], bool]] | None = None
        self._rows: list[Record] = []
        self._rows_taken = 0
        self._is_last = True

    @property
    def size_bytes(self) -> int:
        """What of the fetched bytes is not handed out yet."""
        return len(self._records) - (self._batches[0].position if self._batches else len(self._records))

    @property
    def is_empty(self) -> bool:
        return not self._batches

    def take_rows(self, position: int, max_records: int, *, check_crcs: bool) -> tuple[list[Record], int]:
        """At most `max_records` records from `position` on, and the position after them.

        Raises CorruptMessage when the very first batch cannot be read.
        """
        taken: list[Record] = []
        while self._batches and len(taken) < max_records:
            batch = self._batches[0]
            try:
                self._decode(batch, position, check_crcs)
            except OncelogError:
                self._parts = None
                if taken:  # what stands before the damage goes out first; the error comes next time
                    return taken, position
                raise
            start, self._rows_taken = self._rows_taken, self._rows_taken + max_records - len(taken)
            taken += self._rows[start : self._rows_taken]
            if self._rows_taken < len(self._rows):
                return taken, taken[-1].offset + 1
            if self._rows:
                position = max(position, self._rows[-1].offset + 1)
            self._rows, self._rows_taken = [], 0
            if self._is_last:
                self._parts = None
                self._batches.popleft()
                position = max(position, batch.header.last_offset + 1)
        return taken, position

    def _decode(self, batch: PlacedBatch, position: int, check_crcs: bool) -> None:
        """Have the batch's next rows at hand, if the reader may see it and they are not there already."""
        if self._rows:
            return
        self._is_last = True
        if batch.verdict is not Verdict.DELIVER or batch.header.last_offset < position:
            return
        if self._parts is None:
            if batch.header.records_count <= SLICE_RECORDS:
                self._rows = decode_batch(self.tp, self._records, batch, position, check_crcs=check_crcs)
                return
            self._parts = decode_parts(self.tp, self._records, batch, position, check_crcs=check_crcs)
        self._rows, self._is_last = next(self._parts, ([], True))

    def take_arrow(self, position: int, *, check_crcs: bool, include_headers: bool) -> Any:
        """Everything from `position` on as one pyarrow.RecordBatch (perhaps without rows)."""
        start = self._batches[0].position
        stop = self._batches[-1].position + self._batches[-1].header.size_bytes
        return arrow_of(
            self.tp,
            self._records[start:stop],
            self._batches,
            start_offset=position,
            check_crcs=check_crcs,
            include_headers=include_headers,
        )


def arrow_of(
    tp: TopicPartition,
    records: memoryview,
    batches: deque[PlacedBatch] | list[PlacedBatch],
    *,
    start_offset: int,
    end_offset: int | None = None,
    check_crcs: bool,
    include_headers: bool,
) -> Any:
    """The visible records of whole batches in [start_offset, end_offset) as a pyarrow.RecordBatch."""
    from oncelog.wire.columns import batches_to_arrow  # loads pyarrow: only for those who ask for Arrow

    hidden = {b.header.base_offset for b in batches if b.verdict is not Verdict.DELIVER}

    def skip(header: BatchHeader) -> bool:
        return header.base_offset in hidden

    return batches_to_arrow(
        records,
        topic=tp.topic,
        partition=tp.partition,
        start_offset=start_offset,
        end_offset=end_offset,
        include_headers=include_headers,
        skip=skip if hidden else None,
        verify=check_crcs,
    )
