"""The segments of a partition in order, the last one active."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from oncelog.log.index import AbortedTransaction
from oncelog.log.segment import Segment


class SegmentList:
    """At least one segment, by growing base offset."""

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]

    def __iter__(self) -> Iterator[Segment]:
        """Iterate over a copy: segments may come and go meanwhile."""
        return iter(self._segments[:])

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def active(self) -> Segment:
        return self._segments[-1]

    @property
    def first(self) -> Segment:
        return self._segments[0]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    def from_offset(self, offset: int) -> list[Segment]:
        """Return the segment that may hold the offset, and all after it."""
        return self._segments[max(bisect_right(self._bases, offset) - 1, 0) :]

    def aborted_transactions(self, from_offset: int, upper_offset: int) -> list[AbortedTransaction]:
        """Return the aborted transactions that overlap a range of offsets, in no order."""
        aborted = []
        for segment in self.from_offset(from_offset):
            for entry in segment.transactions.from_offset(from_offset):
                if entry.first_offset < upper_offset:
                    aborted.append(entry)
                if entry.last_stable_offset >= upper_offset:
                    return aborted
        return aborted

    def add(self, segment: Segment) -> None:
        """Append a segment, which becomes the active one."""
        self._segments.append(segment)
        self._bases.append(segment.base_offset)

    def drop_first(self) -> Segment:
        """Take the oldest segment out of the list; its files stay."""
        del self._bases[0]
        return self._segments.pop(0)

    def replace(self, old: list[Segment], new: Segment) -> None:
        """Put one segment in the place of neighbours; the caller takes care of their files."""
        index = self._segments.index(old[0])
        # The bases first: a flush in its thread may look between the two lines. It then meets segments that
        # it need not sync, never too few. See test_a_flush_misses_no_segment_while_others_are_replaced.
        self._bases[index : index + len(old)] = [new.base_offset]
        self._segments[index : index + len(old)] = [new]
