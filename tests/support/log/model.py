"""A model of a log: a plain list of batches.

The records that readers see and the producers' state follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from oncelog.log.partition import Partition
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.types import Isolation
from oncelog.wire.batch import BatchHeader, iter_batches, read_header
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.records import decode_records

REMEMBERED = 5


class Row(NamedTuple):
    """A record as a consumer gets it."""

    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True)
class Written:
    """An acknowledged batch. `is_commit` is None for data and True or False for a marker."""

    base_offset: int
    rows: tuple[tuple[bytes | None, bytes | None], ...]
    timestamp_ms: int
    append_ms: int
    pid: int | None = None
    epoch: int = 0
    sequence: int = 0
    is_transactional: bool = False
    is_commit: bool | None = None

    @property
    def end_offset(self) -> int:
        return self.base_offset + len(self.rows)

    def records(self) -> Iterator[Row]:
        for index, (key, value) in enumerate(self.rows):
            yield Row(self.base_offset + index, key, value)


@dataclass
class KnownProducer:
    """The expected state of one producer id. `batches` has (last sequence, last offset) of each remembered
    batch.
    """

    epoch: int
    append_ms: int
    batches: list[tuple[int, int]] = field(default_factory=list)
    open_offset: int | None = None


class LogModel:
    """Every batch ever stored, in order. `start` is the log start offset."""

    def __init__(self) -> None:
        self.batches: list[Written] = []
        self.start = 0

    @property
    def end(self) -> int:
        return self.batches[-1].end_offset if self.batches else 0

    def add(self, batch: Written) -> None:
        assert batch.base_offset == self.end
        self.batches.append(batch)

    def cut(self, end: int) -> None:
        """Remove the batches that a power loss took: those that end after offset `end`."""
        self.batches = [batch for batch in self.batches if batch.end_offset <= end]

    def producers(self) -> dict[int, KnownProducer]:
        """Return the producer state that follows from all batches, including deleted and compacted ones."""
        known: dict[int, KnownProducer] = {}
        for batch in self.batches:
            if batch.pid is None:
                continue
            one = known.get(batch.pid)
            if one is None:
                one = known[batch.pid] = KnownProducer(batch.epoch, batch.append_ms)
            if one.epoch != batch.epoch:
                one.epoch, one.batches = batch.epoch, []
            one.append_ms = batch.append_ms
            if batch.is_commit is not None:
                one.open_offset = None
                continue
            one.batches.append((batch.sequence + len(batch.rows) - 1, batch.end_offset - 1))
            if batch.is_transactional and one.open_offset is None:
                one.open_offset = batch.base_offset
        return known

    def next_of(self, pid: int) -> tuple[int, int]:
        """Return the epoch and the next sequence of a producer."""
        one = self.producers().get(pid)
        if one is None:
            return 0, 0
        return one.epoch, one.batches[-1][0] + 1 if one.batches else 0

    def open_offsets(self) -> dict[int, int]:
        """Return the first offset of each open transaction, by producer id."""
        known = self.producers()
        return {pid: one.open_offset for pid, one in known.items() if one.open_offset is not None}

    def uncommitted(self) -> set[int]:
        """Return the base offsets of data batches in aborted or open transactions."""
        found: set[int] = set()
        open_batches: dict[int, list[int]] = {}
        for batch in self.batches:
            if batch.pid is None:
                continue
            if batch.is_commit is not None:
                ended = open_batches.pop(batch.pid, [])
                found.update(() if batch.is_commit else ended)
            elif batch.is_transactional:
                open_batches.setdefault(batch.pid, []).append(batch.base_offset)
        return found.union(*open_batches.values())

    def unstable_offsets(self, high_watermark: int) -> list[int]:
        """Return the first offset of each transaction whose marker is not yet below the high watermark."""
        unseen, open_from = list[int](), dict[int, int]()
        for batch in self.batches:
            if batch.pid is None:
                continue
            if batch.is_commit is not None:
                begun = open_from.pop(batch.pid, None)
                if begun is not None and batch.base_offset >= high_watermark:
                    unseen.append(begun)
            elif batch.is_transactional:
                open_from.setdefault(batch.pid, batch.base_offset)
        return [*unseen, *open_from.values()]

    def stable_offset(self, high_watermark: int) -> int:
        """Return the last stable offset."""
        return max(min([high_watermark, *self.unstable_offsets(high_watermark)]), self.start)

    def visible(self, upper: int, *, is_committed_only: bool) -> list[Row]:
        """Return the records that a reader gets from the log start to below `upper`."""
        hidden = self.uncommitted() if is_committed_only else set()
        return [
            row
            for batch in self.batches
            if batch.is_commit is None and batch.base_offset not in hidden
            for row in batch.records()
            if self.start <= row.offset < upper
        ]


def newest(rows: Iterable[Row]) -> dict[bytes | None, Row]:
    """Return each key's newest record. Keys whose newest record is a tombstone are left out."""
    found = {row.key: row for row in rows}
    return {key: row for key, row in found.items() if row.value is not None}


class Stored(NamedTuple):
    """A stored batch with decoded records. `is_abort` is None for data, and True or False for a marker."""

    header: BatchHeader
    records: list[tuple[int, int, bytes | None, bytes | None]]
    is_abort: bool | None


def stored_batches(data: bytes | memoryview) -> Iterator[Stored]:
    """Decode the batches of a fetch, and verify their checksums."""
    view = memoryview(data)
    for position, header in iter_batches(view):
        whole = view[position : position + header.size_bytes]
        if header.is_control:
            record = decode_control(whole, verify=True)
            times = [] if record is None else [(header.base_offset, record.timestamp_ms, None, None)]
            yield Stored(header, times, record is not None and record.type is ControlType.ABORT)
        else:
            records = decode_records(whole)
            yield Stored(header, [(r.offset, r.timestamp_ms, r.key, r.value) for r in records], None)


def read_rows(partition: Partition, offset: int, isolation: Isolation, max_bytes: int = 1 << 20) -> list[Row]:
    """Return the records that a consumer with this isolation level gets from `offset` on.

    With a small `max_bytes`, it reads in many small fetches.
    """
    rows: list[Row] = []
    is_committed_only = isolation is Isolation.READ_COMMITTED
    upper = partition.last_stable_offset if is_committed_only else partition.high_watermark
    while offset < upper:
        found = partition.read(offset, max_bytes, upper_offset=upper)
        if not found.records:
            # No records are left below `upper`, for example after compaction or a power loss. Check that, and
            # stop.
            behind = partition.read(offset, 1)
            assert read_header(behind.records).base_offset >= upper, f"nothing can be read at offset {offset}"
            break
        aborted = []
        if is_committed_only:
            entries = partition.aborted_transactions(offset, found.next_offset)
            aborted = [(entry.producer_id, entry.first_offset) for entry in entries]
        reader = VisibilityFilter(isolation, aborted)
        for batch in stored_batches(found.records):
            is_abort = bool(batch.is_abort)
            if reader.decide(batch.header, is_abort_marker=is_abort) is Verdict.DELIVER:
                rows += [Row(at, key, value) for at, _, key, value in batch.records if at >= offset]
        offset = found.next_offset
    return rows


def read_stored(partition: Partition) -> list[Stored]:
    """Return every stored batch in order, even if readers do not see it."""
    found: list[Stored] = []
    offset = partition.log_start_offset
    while offset < partition.log_end_offset:
        piece = partition.read(offset, 1 << 20)
        assert piece.next_offset > offset, f"nothing can be read at offset {offset}"
        found += stored_batches(piece.records)
        offset = piece.next_offset
    return found
