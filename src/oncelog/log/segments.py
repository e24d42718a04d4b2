"""The segments of a partition in order, the last one active."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from oncelog.log.segment import Segment


class Segments:
    """At least one segment; bases grow."""

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]

    def __iter__(self) -> Iterator[Segment]:
        """Over a copy: segments may come and go meanwhile."""
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
        """The segment that may hold the offset, and all after it."""
        return self._segments[max(bisect_right(self._bases, offset) - 1, 0) :]

    def add(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._bases.append(segment.base_offset)

    def drop_first(self) -> Segment:
        """Take the oldest out of the list; its files stay."""
        del self._bases[0]
        return self._segments.pop(0)

    def replace(self, old: list[Segment], new: Segment) -> None:
        """Put one in the place of neighbours; their files are the caller's business."""
        at = self._segments.index(old[0])
        # The bases first: a flush that looks in its thread between the two lines then meets segments that it
        # need not sync, never too few. Guarded by test_a_flush_misses_no_segment_while_others_are_replaced.
        self._bases[at : at + len(old)] = [new.base_offset]
        self._segments[at : at + len(old)] = [new]
