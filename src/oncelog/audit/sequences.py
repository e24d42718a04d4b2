"""Audit the sequence numbers of one partition: no gap, no repetition and no disorder.

Source: behaviours I5 to I8 and I14 (docs/behaviours.md).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from oncelog.audit.findings import Finding, FindingKind, Findings, StoredBatch
from oncelog.rules.idempotence.sequence import SEQUENCE_MAX, advance

_SEQUENCES = SEQUENCE_MAX + 1


class _Hole(NamedTuple):
    """Missing positions (see `_Epoch`) from `first` to below `end`. `offset` is the base offset of the batch
    that was stored after them.
    """

    first: int
    end: int
    offset: int


class _Epoch:
    """The batches of one producer id and epoch.

    Sequence numbers wrap around after 2147483647. They are converted to positions, which do not wrap.
    `starts`, `ends` and `offsets` are parallel arrays, ordered by position. Arrays are used because they take
    only 24 bytes per batch, and an audited partition may have millions of batches.
    """

    __slots__ = ("ends", "epoch", "holes", "longest", "next", "offsets", "starts", "starts_anywhere")

    def __init__(self, epoch: int, *, starts_anywhere: bool) -> None:
        self.epoch = epoch
        self.starts_anywhere = starts_anywhere
        self.next = self.longest = 0
        self.holes: list[_Hole] = []
        self.starts, self.ends, self.offsets = array("q"), array("q"), array("q")

    def place(self, sequence: int) -> int:
        """Return the position of a sequence number.

        Because numbers wrap around, several positions have the same number. Return the one nearest to `next`
        that is not negative.
        """
        delta = advance(sequence, -advance(self.next, 0))
        if delta >= _SEQUENCES // 2 and self.next + delta >= _SEQUENCES:
            delta -= _SEQUENCES
        return self.next + delta

    def keep(self, start: int, end: int, offset: int) -> None:
        # Batches at equal positions stay in stored order, so that searches return the earliest one.
        index = bisect_right(self.starts, start)
        self.starts.insert(index, start)
        self.ends.insert(index, end)
        self.offsets.insert(index, offset)
        self.longest = max(self.longest, end - start)

    def _index(self, start: int) -> int:
        return bisect_left(self.starts, start)

    def same_batch(self, start: int, end: int) -> int | None:
        """Return the base offset of the first stored batch with exactly these positions, or None if there is
        none.
        """
        index = self._index(start)
        while index < len(self.starts) and self.starts[index] == start:
            if self.ends[index] == end:
                return self.offsets[index]
            index += 1
        return None

    def touching(self, start: int, end: int) -> int | None:
        """Return the base offset of a stored batch that shares a position with [start, end), or None if there
        is none.
        """
        following = before = self._index(start)
        # Stored batches may overlap. So a batch that starts earlier may still end after `start`.
        while before > 0 and self.starts[before - 1] + self.longest > start:
            before -= 1
            if self.ends[before] > start:
                return self.offsets[before]
        is_touching = following < len(self.starts) and self.starts[following] < end
        return self.offsets[following] if is_touching else None

    def hole_around(self, start: int, end: int) -> _Hole | None:
        return next((hole for hole in self.holes if hole.first <= start and end <= hole.end), None)

    def cover(self, start: int, end: int) -> None:
        """Remove the positions from `start` to below `end` from the holes."""
        remaining: list[_Hole] = []
        for hole in self.holes:
            parts = (hole._replace(end=min(start, hole.end)), hole._replace(first=max(end, hole.first)))
            remaining.extend(part for part in parts if part.first < part.end)
        self.holes = remaining


class SequenceAudit:
    """The audit of the sequence numbers of one partition, batch by batch.

    `beginning_is_gone`: the first batches of a producer may be missing. `is_compacted`: any batch may be
    missing.
    """

    def __init__(self, findings: Findings, *, beginning_is_gone: bool, is_compacted: bool) -> None:
        self._findings = findings
        self._beginning_is_gone = beginning_is_gone
        self._is_compacted = is_compacted
        self._producers: dict[int, _Epoch] = {}
        self.unknown_starts = 0

    @property
    def producers(self) -> int:
        """The number of producer ids in the audited batches."""
        return len(self._producers)

    def see(self, batch: StoredBatch, producer_id: int, epoch: int) -> bool:
        """Audit the next batch. Return False if its epoch is below an earlier epoch of its producer id."""
        state = self._producers.get(producer_id)
        if state is not None and epoch < state.epoch:
            text = f"epoch {epoch} after epoch {state.epoch}: a fenced producer's batch was stored"
            self._findings.report(FindingKind.EPOCH_WENT_BACK, batch, text)
            return False
        if state is None or epoch > state.epoch:
            state = self._begin_epoch(producer_id, epoch, state)
        if batch.base_sequence is not None:
            self._check_sequence(batch, state, batch.base_sequence)
        return True

    def is_expected(self, batch: StoredBatch) -> bool:
        """Return True if a damaged batch's header can be trusted, because it has exactly the expected
        sequence.
        """
        if batch.producer_id is None or batch.base_sequence is None:
            return False
        state = self._producers.get(batch.producer_id)
        return (
            state is not None
            and state.epoch == batch.producer_epoch
            and state.place(batch.base_sequence) == state.next
        )

    def finish(self) -> None:
        """Report the holes that no batch has filled. In a compacted log, report none."""
        for producer_id, state in self._producers.items():
            self._report_holes(producer_id, state)

    def _begin_epoch(self, producer_id: int, epoch: int, before: _Epoch | None) -> _Epoch:
        if before is not None:
            self._report_holes(producer_id, before)
        state = _Epoch(epoch, starts_anywhere=before is None and self._beginning_is_gone)
        self._producers[producer_id] = state
        return state

    def _check_sequence(self, batch: StoredBatch, state: _Epoch, sequence: int) -> None:
        if state.starts_anywhere:
            # The producer's first batches may be gone, so accept any first sequence. `_begin_epoch` cannot
            # set `next` itself: it also runs for a marker, which has no sequence.
            state.starts_anywhere = False
            state.next = sequence
            self.unknown_starts += sequence != 0
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
            self._findings.report(FindingKind.OUT_OF_ORDER, batch, text, other_offset=hole.offset)
        elif state.touching(start, end) is None:
            # The sequences are below those of the producer's first remaining batch. This is only possible if
            # the beginning of the log was deleted.
            self._findings.report(
                FindingKind.OUT_OF_ORDER, batch, "stored after later batches of its producer"
            )
        else:
            self._report_repetition(batch, state, start, end)

    def _report_repetition(self, batch: StoredBatch, state: _Epoch, start: int, end: int) -> None:
        if (first := state.same_batch(start, end)) is not None:
            text = f"the batch at offset {first} is stored again"
            self._findings.report(FindingKind.DUPLICATE_BATCH, batch, text, other_offset=first)
            return
        other = state.touching(start, end)
        text = f"some of its sequences are already stored in the batch at offset {other}"
        self._findings.report(FindingKind.OVERLAP, batch, text, other_offset=other)

    def _report_holes(self, producer_id: int, state: _Epoch) -> None:
        holes, state.holes = state.holes, []
        for hole in holes if not self._is_compacted else ():
            first, last = advance(hole.first, 0), advance(hole.end, -1)
            text = f"{hole.end - hole.first} records are missing before offset {hole.offset}"
            self._findings.add(
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
