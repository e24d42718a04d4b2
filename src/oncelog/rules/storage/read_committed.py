"""Which stored batches a reader may see: the filter of a consumer over one fetched piece of a partition.

    batch                                   read_uncommitted   read_committed
    control (marker)                        MARKER             MARKER
    transactional, its transaction aborted  DELIVER            ABORTED
    anything else                           DELIVER            DELIVER

Only DELIVER reaches the application; all three move the position to the batch's last offset + 1.
The broker never sends read_committed readers anything at or above the last stable offset, so every
transaction in the piece has an outcome, and the answer lists the aborted ones that touch it.
Source: Kafka's CompletedFetch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from oncelog.types import Isolation


class Verdict(Enum):
    """What becomes of a batch on its way to the application."""

    DELIVER = "deliver"
    MARKER = "marker"
    ABORTED = "aborted"


class StoredBatch(Protocol):
    """What the filter reads of a batch's header."""

    @property
    def last_offset(self) -> int: ...
    @property
    def producer_id(self) -> int | None: ...
    @property
    def is_transactional(self) -> bool: ...
    @property
    def is_control(self) -> bool: ...


class VisibilityFilter:
    """Takes the batches of one answer in offset order. Make a new one per answer: nothing carries over.

    `aborted` are the answer's (producer id, first offset) pairs, in any order; a producer id may occur
    several times.
    """

    __slots__ = ("_aborted_now", "_isolation", "_to_come")

    def __init__(self, isolation: Isolation, aborted: Iterable[tuple[int, int]] = ()) -> None:
        self._isolation = isolation
        self._to_come = [(first_offset, producer_id) for producer_id, first_offset in aborted]
        heapq.heapify(self._to_come)
        self._aborted_now: set[int] = set()

    def decide(self, batch: StoredBatch, *, is_abort_marker: bool) -> Verdict:
        """The verdict on the next batch; `is_abort_marker` only matters for control batches."""
        producer_id = batch.producer_id
        if self._isolation is Isolation.READ_COMMITTED and producer_id is not None:
            self._enter_aborted(batch.last_offset)
            if batch.is_control and is_abort_marker:
                self._aborted_now.discard(producer_id)
            elif not batch.is_control and batch.is_transactional and producer_id in self._aborted_now:
                return Verdict.ABORTED
        return Verdict.MARKER if batch.is_control else Verdict.DELIVER

    def _enter_aborted(self, last_offset: int) -> None:
        while self._to_come and self._to_come[0][0] <= last_offset:
            self._aborted_now.add(heapq.heappop(self._to_come)[1])
