"""The list of a partition's segments, ordered by base offset. The last segment is the active one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from oncelog.log.index import AbortedTransaction
from oncelog.log.segment import Segment


class SegmentList:
    """An ordered list of at least one segment. `active` is the last one, to which appends go."""

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self.active = segments[-1]
        self._bases = [segment.base_offset for segment in segments]

    def __iter__(self) -> Iterator[Segment]:
        """Iterate over a copy, so that segments may be added or dropped during the iteration."""
        return iter(self._segments[:])

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment: Segment) -> bool:
        """Return True if this very segment is in the list. The time hardly grows with the list."""
        index = bisect_right(self._bases, segment.base_offset) - 1
        return 0 <= index < len(self._segments) and self._segments[index] is segment

    @property
    def first(self) -> Segment:
        return self._segments[0]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    def from_offset(self, offset: int) -> list[Segment]:
        """Return the segment that may contain `offset`, and all later segments."""
        return self._segments[max(bisect_right(self._bases, offset) - 1, 0) :]

    def aborted_transactions(self, from_offset: int, upper_offset: int) -> list[AbortedTransaction]:
        """Return the aborted transactions that overlap [`from_offset`, `upper_offset`), in any order."""
        return list(self.iter_aborted(from_offset, upper_offset))

    def iter_aborted(self, from_offset: int, upper_offset: int) -> Iterator[AbortedTransaction]:
        """Yield the elements of `aborted_transactions` one by one. Segments may be added or dropped between
        two elements.
        """
        for segment in self.from_offset(from_offset):
            for entry in segment.transactions.from_offset(from_offset):
                if entry.first_offset < upper_offset:
                    yield entry
                if entry.last_stable_offset >= upper_offset:
                    return

    def add(self, segment: Segment) -> None:
        """Append a segment, which becomes the active one."""
        self._segments.append(segment)
        self.active = segment
        self._bases.append(segment.base_offset)

    def drop_first(self) -> Segment:
        """Remove the oldest segment from the list and return it. Its files are not touched."""
        del self._bases[0]
        return self._segments.pop(0)

    def replace(self, old: list[Segment], new: Segment) -> None:
        """Replace neighbouring segments with one segment in the list. The caller replaces the files."""
        index = self._segments.index(old[0])
        # Change `_bases` first, because a flush in another thread may call `from_offset` between the two
        # lines. The flush may then sync segments that are synced already, but it never misses one. See
        # test_a_flush_misses_no_segment_while_others_are_replaced.
        self._bases[index : index + len(old)] = [new.base_offset]
        self._segments[index : index + len(old)] = [new]
        self.active = self._segments[-1]
