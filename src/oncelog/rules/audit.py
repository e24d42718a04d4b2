"""Is every producer's sequence in a stored log unbroken, unrepeated and in order? An independent check.

It sees only batch headers, in offset order, and shares nothing with the append rule but the arithmetic
of sequence numbers, so that it can prove the append rule wrong.

    what a batch of (producer id, epoch) is                       finding
    the next sequence of its epoch                                -
    sequence 0 of a higher epoch                                  -
    the first of its id, in a log whose beginning is gone         - (counted as an unknown start)
    ahead of the next sequence, and the hole is never filled      sequence_gap, where the hole was noticed
    fills a hole left before it                                   out_of_order
    exactly a batch that is stored already                        duplicate_batch
    sequences that are stored already, in other batches           overlap
    of a lower epoch than one seen before                         epoch_went_back
    base offset at or below the last offset before it             offset_overlap
    base offset beyond the next one, in a log not compacted       offset_gap
    its bytes do not fit its checksum                             crc_damage
    no batch at all                                               unreadable

In a compacted log the cleaner removes batches, so holes there prove nothing and are not reported.
Batches without a producer id are counted: nothing can be proven about them.
Source: rows I5 to I8, I14, P5.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from oncelog.rules.sequence import SEQUENCE_MAX, advance

_SEQUENCES = SEQUENCE_MAX + 1


class FindingKind(Enum):
    """What is wrong; the values are stable names for tables and JSON."""

    DUPLICATE_BATCH = "duplicate_batch"
    SEQUENCE_GAP = "sequence_gap"
    OUT_OF_ORDER = "out_of_order"
    OVERLAP = "overlap"
    EPOCH_WENT_BACK = "epoch_went_back"
    OFFSET_OVERLAP = "offset_overlap"
    OFFSET_GAP = "offset_gap"
    CRC_DAMAGE = "crc_damage"
    UNREADABLE = "unreadable"


class StoredBatch(NamedTuple):
    """A batch's header. None: no producer id, no epoch, no sequence.

    `sequence_count` is how many sequence numbers the batch covers; in a compacted batch that is more
    than the records left. `crc_ok` None: the bytes are no batch, and only the offsets mean something.
    """

    base_offset: int
    last_offset: int
    producer_id: int | None
    producer_epoch: int | None
    base_sequence: int | None
    sequence_count: int
    records_count: int
    is_control: bool
    crc_ok: bool | None


class Finding(NamedTuple):
    """One violation and where it stands.

    Sequences are those of the offending batch, for a gap the missing ones. `other_offset` is the base
    offset of the batch it collides with, None where there is no such batch.
    """

    kind: FindingKind
    base_offset: int
    last_offset: int
    producer_id: int | None
    producer_epoch: int | None
    first_sequence: int | None
    last_sequence: int | None
    other_offset: int | None
    explanation: str


@dataclass(frozen=True, slots=True)
class PartitionTotals:
    """What an audit of one partition has seen.

    `unnumbered_*`: batches without a producer id. `unknown_starts`: producers whose beginning was
    removed with the beginning of the log. `findings` counts all, also those beyond the limit.
    """

    batches: int = 0
    records: int = 0
    control_batches: int = 0
    producers: int = 0
    unnumbered_batches: int = 0
    unnumbered_records: int = 0
    unknown_starts: int = 0
    findings: int = 0


class _Hole(NamedTuple):
    """Positions [first, end) that are missing, noticed at the batch at `offset`."""

    first: int
    end: int
    offset: int


class _Epoch:
    """What one producer id has stored under one epoch, on a number line without wrap.

    Batches are kept as three packed columns ordered by position (24 bytes each): an audited partition
    may hold millions.
    """

    __slots__ = ("ends", "epoch", "holes", "lowest", "next", "offsets", "starts")

    def __init__(self, epoch: int, next_position: int) -> None:
        self.epoch = epoch
        self.next = self.lowest = next_position
        self.holes: list[_Hole] = []
        self.starts, self.ends, self.offsets = array("q"), array("q"), array("q")

    def place(self, sequence: int) -> int:
        """The position meant by a sequence: the one nearest to the next, never below what can be."""
        delta = advance(sequence, -advance(self.next, 0))
        if delta >= _SEQUENCES // 2 and self.next + delta - _SEQUENCES >= min(self.lowest, 0):
            delta -= _SEQUENCES
        return self.next + delta

    def keep(self, start: int, end: int, offset: int) -> None:
        # Equal ones stay in stored order, so that the first is found first.
        index = bisect_right(self.starts, start)
        self.starts.insert(index, start)
        self.ends.insert(index, end)
        self.offsets.insert(index, offset)

    def _index(self, start: int) -> int:
        return bisect_left(self.starts, start)

    def same_batch(self, start: int, end: int) -> int | None:
        """Base offset of the first stored batch with exactly these positions."""
        index = self._index(start)
        while index < len(self.starts) and self.starts[index] == start:
            if self.ends[index] == end:
                return self.offsets[index]
            index += 1
        return None

    def touching(self, start: int, end: int) -> int | None:
        """Base offset of a stored batch that shares a position with [start, end)."""
        index = self._index(start)
        if index > 0 and self.ends[index - 1] > start:
            return self.offsets[index - 1]
        return self.offsets[index] if index < len(self.starts) and self.starts[index] < end else None

    def hole_around(self, start: int, end: int) -> _Hole | None:
        return next((hole for hole in self.holes if hole.first <= start and end <= hole.end), None)

    def cover(self, start: int, end: int) -> None:
        """Take [start, end) out of the holes."""
        pieces = []
        for hole in self.holes:
            if end <= hole.first or hole.end <= start:
                pieces.append(hole)
                continue
            rest = (hole._replace(end=min(start, hole.end)), hole._replace(first=max(end, hole.first)))
            pieces.extend(piece for piece in rest if piece.first < piece.end)
        self.holes = pieces


class PartitionAudit:
    """Takes the batches of one partition in the order they are stored; `finish` gives the findings.

    `log_start_offset` above 0, or `is_compacted`: the beginning of a sequence may be gone rightly.
    At most `max_findings` are kept; all are counted.
    """

    def __init__(
        self, *, log_start_offset: int = 0, is_compacted: bool = False, max_findings: int = 1000
    ) -> None:
        self._beginning_is_gone = log_start_offset > 0 or is_compacted
        self._is_compacted = is_compacted
        self._max_findings = max_findings
        self._next_offset: int | None = None if log_start_offset > 0 else 0
        self._producers: dict[int, _Epoch] = {}
        self._findings: list[Finding] = []
        self._finding_count = 0
        self._counts = dict.fromkeys(
            ("batches", "records", "control_batches", "unnumbered_batches", "unnumbered_records"), 0
        )
        self._unknown_starts = 0

    def see(self, batch: StoredBatch) -> None:
        """The next batch of the log."""
        self._check_offsets(batch)
        if not batch.crc_ok:
            self._report_damage(batch)
            if batch.crc_ok is None or not self._is_expected(batch):
                return
        self._count(batch)
        if batch.producer_id is not None and batch.producer_epoch is not None:
            self._check_producer(batch, batch.producer_id, batch.producer_epoch)

    def finish(self) -> tuple[list[Finding], PartitionTotals]:
        """The findings by offset, and the totals. Call it once, after the last batch."""
        for producer_id, state in self._producers.items():
            self._report_holes(producer_id, state)
        self._findings.sort(key=lambda finding: finding.base_offset)
        totals = PartitionTotals(
            **self._counts,
            producers=len(self._producers),
            unknown_starts=self._unknown_starts,
            findings=self._finding_count,
        )
        return self._findings, totals

    def _count(self, batch: StoredBatch) -> None:
        counts = self._counts
        counts["batches"] += 1
        if batch.is_control:
            counts["control_batches"] += 1
            return
        counts["records"] += batch.records_count
        if batch.producer_id is None:
            counts["unnumbered_batches"] += 1
            counts["unnumbered_records"] += batch.records_count

    # Offsets and bytes

    def _check_offsets(self, batch: StoredBatch) -> None:
        due, self._next_offset = self._next_offset, max(self._next_offset or 0, batch.last_offset + 1)
        if due is None or batch.base_offset == due:
            return
        if batch.base_offset < due:
            text = f"offsets {batch.base_offset} to {batch.last_offset} come after offset {due - 1}"
            self._report(FindingKind.OFFSET_OVERLAP, batch, text, other_offset=due - 1)
        elif not self._is_compacted:
            text = f"offsets {due} to {batch.base_offset - 1} are missing before this batch"
            self._report(FindingKind.OFFSET_GAP, batch, text)

    def _report_damage(self, batch: StoredBatch) -> None:
        if batch.crc_ok is None:
            text = f"no record batch can be read here; nothing up to offset {batch.last_offset} was audited"
            self._report(FindingKind.UNREADABLE, batch, text)
        else:
            self._report(FindingKind.CRC_DAMAGE, batch, "the bytes of this batch do not fit its CRC-32C")

    def _is_expected(self, batch: StoredBatch) -> bool:
        """Whether a damaged batch's header says just what was due, so that it can be believed."""
        if batch.producer_id is None or batch.base_sequence is None:
            return False
        state = self._producers.get(batch.producer_id)
        return (
            state is not None
            and state.epoch == batch.producer_epoch
            and state.place(batch.base_sequence) == state.next
        )

    # Sequences

    def _check_producer(self, batch: StoredBatch, producer_id: int, epoch: int) -> None:
        state = self._producers.get(producer_id)
        if state is not None and epoch < state.epoch:
            text = f"epoch {epoch} after epoch {state.epoch}: a fenced producer's batch was stored"
            self._report(FindingKind.EPOCH_WENT_BACK, batch, text)
            return
        if state is None or epoch > state.epoch:
            state = self._begin_epoch(batch, producer_id, epoch, state)
        if batch.base_sequence is not None:
            self._check_sequence(batch, state, batch.base_sequence)

    def _begin_epoch(self, batch: StoredBatch, producer_id: int, epoch: int, before: _Epoch | None) -> _Epoch:
        first = 0
        if before is not None:
            self._report_holes(producer_id, before)
        elif self._beginning_is_gone and batch.base_sequence:
            first = batch.base_sequence
            self._unknown_starts += 1
        state = self._producers[producer_id] = _Epoch(epoch, first)
        return state

    def _check_sequence(self, batch: StoredBatch, state: _Epoch, sequence: int) -> None:
        start = state.place(sequence)
        end = start + batch.sequence_count
        if start >= state.next:
            if start > state.next:
                state.holes.append(_Hole(state.next, start, batch.base_offset))
            state.next = end
        else:
            self._report_behind(batch, state, start, end)
            state.cover(start, end)
            state.next = max(state.next, end)
        state.keep(start, end, batch.base_offset)

    def _report_behind(self, batch: StoredBatch, state: _Epoch, start: int, end: int) -> None:
        if (hole := state.hole_around(start, end)) is not None:
            text = f"stored after the later batch at offset {hole.offset}"
            self._report(FindingKind.OUT_OF_ORDER, batch, text, other_offset=hole.offset)
        elif state.touching(start, end) is None:
            # Only below the first batch of a log whose beginning is gone.
            self._report(FindingKind.OUT_OF_ORDER, batch, "stored after later batches of its producer")
        else:
            self._report_repetition(batch, state, start, end)

    def _report_repetition(self, batch: StoredBatch, state: _Epoch, start: int, end: int) -> None:
        if (first := state.same_batch(start, end)) is not None:
            text = f"the batch at offset {first} is stored again"
            self._report(FindingKind.DUPLICATE_BATCH, batch, text, other_offset=first)
            return
        other = state.touching(start, end)
        text = f"some of its sequences are stored already, in the batch at offset {other}"
        self._report(FindingKind.OVERLAP, batch, text, other_offset=other)

    def _report_holes(self, producer_id: int, state: _Epoch) -> None:
        holes, state.holes = state.holes, []
        for hole in holes if not self._is_compacted else ():
            first, last = advance(hole.first, 0), advance(hole.end, -1)
            text = f"{hole.end - hole.first} records are missing before offset {hole.offset}"
            self._add(
                Finding(
                    FindingKind.SEQUENCE_GAP,
                    hole.offset,
                    hole.offset,
                    producer_id,
                    state.epoch,
                    first,
                    last,
                    None,
                    text,
                )
            )

    def _report(
        self, kind: FindingKind, batch: StoredBatch, text: str, *, other_offset: int | None = None
    ) -> None:
        first = batch.base_sequence
        last = None if first is None else advance(first, batch.sequence_count - 1)
        self._add(
            Finding(
                kind,
                batch.base_offset,
                batch.last_offset,
                batch.producer_id,
                batch.producer_epoch,
                first,
                last,
                other_offset,
                text,
            )
        )

    def _add(self, finding: Finding) -> None:
        self._finding_count += 1
        if len(self._findings) < self._max_findings:
            self._findings.append(finding)
