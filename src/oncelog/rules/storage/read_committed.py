"""Decide which batches of a fetch response reach the application, by the consumer's isolation level.

    batch                                   read_uncommitted   read_committed
    control (marker)                        MARKER             MARKER
    transactional, its transaction aborted  DELIVER            ABORTED
    anything else                           DELIVER            DELIVER

Only a batch with DELIVER reaches the application. Each of the three verdicts moves the consumer's position to
the batch's last offset + 1. The broker never sends read_committed consumers records at or above the last
stable offset. So every transaction in a response has an outcome, and the response lists the aborted
transactions that overlap its records. Source: Kafka's CompletedFetch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from oncelog.types import Isolation


class Verdict(Enum):
    """The decision about one batch: deliver its records, or skip it because it is a marker or belongs to an
    aborted transaction.
    """

    DELIVER = "deliver"
    MARKER = "marker"
    ABORTED = "aborted"


class StoredBatch(Protocol):
    """The fields of a batch header that the filter uses."""

    @property
    def last_offset(self) -> int: ...
    @property
    def producer_id(self) -> int | None: ...
    @property
    def is_transactional(self) -> bool: ...
    @property
    def is_control(self) -> bool: ...


class VisibilityFilter:
    """The filter for the batches of one response, in offset order. Each response needs a new filter.

    `aborted` are the (producer id, first offset) pairs of aborted transactions in the response, in any order.
    A producer id may occur several times.
    """

    __slots__ = ("_aborting", "_isolation", "_upcoming")

    def __init__(self, isolation: Isolation, aborted: Iterable[tuple[int, int]] = ()) -> None:
        self._isolation = isolation
        self._upcoming = [(first_offset, producer_id) for producer_id, first_offset in aborted]
        heapq.heapify(self._upcoming)
        self._aborting: set[int] = set()

    def decide(self, batch: StoredBatch, *, is_abort_marker: bool) -> Verdict:
        """Return the decision about the next batch. `is_abort_marker` matters only for control batches."""
        producer_id = batch.producer_id
        if self._isolation is Isolation.READ_COMMITTED and producer_id is not None:
            self._begin_aborted(batch.last_offset)
            if batch.is_control and is_abort_marker:
                self._aborting.discard(producer_id)
            elif not batch.is_control and batch.is_transactional and producer_id in self._aborting:
                return Verdict.ABORTED
        return Verdict.MARKER if batch.is_control else Verdict.DELIVER

    def _begin_aborted(self, last_offset: int) -> None:
        while self._upcoming and self._upcoming[0][0] <= last_offset:
            self._aborting.add(heapq.heappop(self._upcoming)[1])
