"""The data of one partition from one fetch, until the application takes its records or an Arrow batch of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from oncelog.client.consumer.fetch_messages import FetchedBatch, decode_batch, decode_parts
from oncelog.errors import OncelogError
from oncelog.rules.storage.read_committed import Verdict
from oncelog.runtime.optional import check_pyarrow
from oncelog.types import Record, TopicPartition
from oncelog.wire.fetched_records import append_whole_batches, value_bytes_of
from oncelog.wire.records import SLICE_RECORDS


class TakenRecords(NamedTuple):
    """Records, the position after them, and the size of their values in bytes."""

    records: list[Record]
    position: int
    value_bytes: int


class CompletedFetch:
    """Stored batches of one partition in offset order. `end_offset` is the offset of the next fetch."""

    __slots__ = (
        "_batches",
        "_data",
        "_decoded",
        "_is_last",
        "_next",
        "_parts",
        "_taken_count",
        "end_offset",
        "tp",
    )

    def __init__(
        self, tp: TopicPartition, data: memoryview, batches: Sequence[FetchedBatch], end_offset: int
    ) -> None:
        self.tp = tp
        self.end_offset = end_offset
        self._data = data
        self._batches = list(batches)
        # The index of the first batch that was not delivered completely.
        self._next = 0
        # The iterator that decodes the first batch in parts. A part is a pair: a list of records, and True if
        # they are the batch's last ones.
        self._parts: Iterator[tuple[list[Record], bool]] | None = None
        # The current part, the number of its records that were taken, and True if it is the last part of the
        # batch.
        self._decoded: list[Record] = []
        self._taken_count = 0
        self._is_last = True

    @property
    def size_bytes(self) -> int:
        """The size in bytes of the batches that were not delivered yet."""
        return 0 if self.is_empty else len(self._data) - self._batches[self._next].position

    @property
    def is_empty(self) -> bool:
        """True if all batches were delivered."""
        return self._next == len(self._batches)

    def take_records(self, position: int, max_records: int, *, check_crcs: bool) -> TakenRecords:
        """Return up to `max_records` records from `position` on, and the position after them.

        Raises CorruptMessage or InvalidRecord if the first batch cannot be decoded.
        """
        taken: list[Record] = []
        value_bytes = 0
        while True:
            position, size_bytes = self._take_whole_batches(taken, position, max_records, check_crcs)
            value_bytes += size_bytes
            if self.is_empty or len(taken) >= max_records:
                return TakenRecords(taken, position, value_bytes)
            batch = self._batches[self._next]
            try:
                self._decode(batch, position, check_crcs)
            except OncelogError:
                self._parts = None
                # Deliver the records that precede the damaged batch. The next call raises the error.
                if taken:
                    return TakenRecords(taken, position, value_bytes)
                raise
            start, self._taken_count = self._taken_count, self._taken_count + max_records - len(taken)
            rows = self._decoded[start : self._taken_count]
            value_bytes += value_bytes_of(rows)
            taken += rows
            if self._taken_count < len(self._decoded):
                return TakenRecords(taken, taken[-1].offset + 1, value_bytes)
            if self._decoded:
                position = max(position, self._decoded[-1].offset + 1)
            self._decoded, self._taken_count = [], 0
            if self._is_last:
                self._parts = None
                self._next += 1
                position = max(position, batch.header.last_offset + 1)

    def _take_whole_batches(
        self, taken: list[Record], position: int, max_records: int, check_crcs: bool
    ) -> tuple[int, int]:
        """Append the records of whole batches to `taken`; none if the first batch is partly delivered.

        Return the position after these records, and the size of their values in bytes.
        """
        if self._decoded or self._parts is not None:
            return position, 0
        self._next, position, value_bytes = append_whole_batches(
            taken,
            self._data,
            self._batches,
            self._next,
            tp=self.tp,
            start_offset=position,
            max_records=max_records,
            verdict=Verdict.DELIVER,
            verify=check_crcs,
        )
        return position, value_bytes

    def _decode(self, batch: FetchedBatch, position: int, check_crcs: bool) -> None:
        """Decode the next part of a visible batch, unless records of the current part are left."""
        if self._decoded:
            return
        self._is_last = True
        if batch.verdict is not Verdict.DELIVER or batch.header.last_offset < position:
            return
        if self._parts is None:
            if batch.header.records_count <= SLICE_RECORDS:
                self._decoded = decode_batch(self.tp, self._data, batch, position, check_crcs=check_crcs)
                return
            self._parts = decode_parts(self.tp, self._data, batch, position, check_crcs=check_crcs)
        self._decoded, self._is_last = next(self._parts, ([], True))

    def take_arrow(self, position: int, *, check_crcs: bool, include_headers: bool) -> Any:
        """Return all visible records from `position` on as one pyarrow.RecordBatch, which may be empty."""
        return arrow_of(
            self.tp,
            self._data,
            self._batches[self._next :],
            start_offset=position,
            check_crcs=check_crcs,
            include_headers=include_headers,
        )


def arrow_of(
    tp: TopicPartition,
    data: memoryview,
    batches: Sequence[FetchedBatch],
    *,
    start_offset: int,
    end_offset: int | None = None,
    check_crcs: bool,
    include_headers: bool,
) -> Any:
    """Return the visible records with offsets in [start_offset, end_offset) as a pyarrow.RecordBatch.

    `batches` have positions in `data`. With `end_offset` None, there is no upper limit.
    """
    # Imported here, because this import loads PyArrow, which only users of Arrow need.
    check_pyarrow("a record batch of Arrow")
    from oncelog.wire.columns import batches_to_arrow

    visible = [(batch.position, batch.header) for batch in batches if batch.verdict is Verdict.DELIVER]
    return batches_to_arrow(
        data,
        topic=tp.topic,
        partition=tp.partition,
        start_offset=start_offset,
        end_offset=end_offset,
        include_headers=include_headers,
        batches=visible,
        verify=check_crcs,
    )
