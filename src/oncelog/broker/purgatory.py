"""Answers that come later, as data: a long-poll fetch, an append that waits for the disk.

Nothing here blocks or sleeps. Who holds a `Deferred` is told once; `FetchWaits` knows which
of them an append may complete and when each must be answered at the latest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from oncelog.types import TopicPartition


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Instead of an answer: end the connection, and why. Kafka's way with a failed acks=0 append."""

    reason: str


class Deferred:
    """One answer to come.

    `holds_later_requests`: requests behind it on its connection are not begun before it is
    answered (a fetch); otherwise they are carried out and only their answers wait (an append).
    `keeps_later_requests`: the first request behind it is carried out though the client goes away meanwhile.
    """

    __slots__ = (
        "_answer", "_listener", "holds_later_requests", "is_cancelled", "is_done", "keeps_later_requests",
        "measure", "on_cancelled", "outlives_client", "request_bytes",
    )  # fmt: skip

    def __init__(self, *, holds_later_requests: bool, keeps_later_requests: bool = False) -> None:
        self.holds_later_requests = holds_later_requests
        self.keeps_later_requests = keeps_later_requests
        self.is_done = False
        self.is_cancelled = False
        self.measure: Callable[[Callable[[], Any]], Any] | None = None
        """Set by who charges the client for the time in which its answer is made: calls what it is given."""
        self._answer: Any = None
        self._listener: Callable[[Any], None] | None = None
        self.on_cancelled: Callable[[], None] | None = None
        """Called once if nobody waits any more."""
        self.request_bytes = 0
        """What is kept of the request until then; its connection counts it as a request that waits."""
        self.outlives_client = False
        """True if the request is carried out though its client goes away, which expects no answer."""

    def listen(self, listener: Callable[[Any], None]) -> None:
        """Call `listener` with the answer, at once when it is there. One listener only."""
        if self.is_done:
            listener(self._answer)
        else:
            self._listener = listener

    def build(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns: the answer, or part of the work for it."""
        return make() if self.measure is None else self.measure(make)

    def resolve(self, answer: Any) -> None:
        """Give the answer: a response message, None (no response) or Disconnect. Later calls do nothing."""
        if self.is_done or self.is_cancelled:
            return
        self.is_done, self._answer = True, answer
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener(answer)

    def resolve_with(self, answer: Any) -> None:
        """Resolve with an answer, or with that of another Deferred.

        The other one is charged and cancelled as this one is.
        """
        if not isinstance(answer, Deferred):
            self.resolve(answer)
        elif self.is_cancelled:
            answer.cancel()
        else:
            answer.measure, self.on_cancelled = self.measure, answer.cancel
            answer.listen(self.resolve)

    def cancel(self) -> None:
        """Nobody waits any more: the connection is gone."""
        is_first, self.is_cancelled = not (self.is_cancelled or self.is_done), True
        self._listener = None
        if is_first and self.on_cancelled is not None:
            self.on_cancelled()


@dataclass(eq=False, slots=True)
class FetchWait:
    """A fetch that did not find `min_bytes`. `missing_bytes` shrinks with every append it waits for."""

    deferred: Deferred
    partitions: Collection[TopicPartition]
    missing_bytes: int
    deadline_ms: int
    answer: Callable[[bool], Any] = field(repr=False)
    """Read again and build the response. Told False it may return None: too little of what was appended is
    for this reader, which sees committed records only. Told True it is due, whatever there is."""
    begin: Callable[[FetchWait], None] | None = field(default=None, repr=False)
    """Instead of `answer`, for a fetch of many partitions: read again in steps, and resolve `deferred` or
    wait again. See test_a_waiting_fetch_of_many_partitions_is_read_again_in_steps."""
    is_committed_only: bool = False
    is_due: bool = False
    """True once there must be an answer, whatever there is."""
    is_reading: bool = False
    """True while it is read again in steps."""


class FetchWaits:
    """The waiting fetches, found by partition and by deadline."""

    def __init__(self) -> None:
        self._by_partition: dict[TopicPartition, dict[FetchWait, None]] = {}
        self._deadlines: list[tuple[int, int, FetchWait]] = []
        self._serial = count()
        self._abandoned_count = 0
        self._stable_ends: dict[TopicPartition, int] = {}
        """The last stable offset at the last append, of partitions that fetches wait for."""

    def __len__(self) -> int:
        return sum(1 for _, _, wait in self._deadlines if _is_open(wait))

    def is_awaited(self, partition: TopicPartition) -> bool:
        """Whether an append to the partition may complete a fetch."""
        return partition in self._by_partition

    @property
    def next_deadline_ms(self) -> int | None:
        """When `expire` has something to do; None when nothing waits."""
        while self._deadlines and not _is_open(self._deadlines[0][2]):
            self._forget(heapq.heappop(self._deadlines)[2])
        return self._deadlines[0][0] if self._deadlines else None

    def add(self, wait: FetchWait) -> None:
        """Wait for appends to the wait's partitions, until its deadline."""
        for partition in wait.partitions:
            self._by_partition.setdefault(partition, {})[wait] = None
        wait.deferred.on_cancelled = lambda: self._abandon(wait)
        heapq.heappush(self._deadlines, (wait.deadline_ms, next(self._serial), wait))

    def add_again(self, wait: FetchWait, missing_bytes: int) -> None:
        """Wait again: it was read in steps, and there was too little."""
        wait.is_reading, wait.missing_bytes = False, missing_bytes

    def end(self, wait: FetchWait) -> None:
        """Forget a fetch that was read in steps and is answered."""
        self._forget(wait)

    def appended(self, partition: TopicPartition, size_bytes: int, stable_end: int | None = None) -> None:
        """`size_bytes` were stored in the partition: answer the fetches that now have enough.

        `stable_end`: the last stable offset. While it stays, readers of committed records see nothing new.
        """
        waits = list(self._by_partition.get(partition, ()))
        is_stable = stable_end is None or self._stable_ends.get(partition) != stable_end
        if stable_end is not None and waits:
            self._stable_ends[partition] = stable_end
        for wait in waits:
            wait.missing_bytes -= size_bytes
            is_for_it = is_stable or not wait.is_committed_only
            if not _is_open(wait) or (wait.missing_bytes <= 0 and is_for_it):
                self._try(wait)

    def changed(self, partition: TopicPartition) -> None:
        """The partition went away or lost its head: whoever waits for it is answered now."""
        for wait in list(self._by_partition.get(partition, ())):
            self._complete(wait)

    def expire(self, now_ms: int) -> None:
        """Answer every fetch whose max_wait_ms has passed, with what there is."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            self._complete(heapq.heappop(self._deadlines)[2])

    def _try(self, wait: FetchWait) -> None:
        if wait.begin is not None and _is_open(wait):
            self._begin(wait)
            return
        answer = wait.deferred.build(lambda: wait.answer(False)) if _is_open(wait) else None
        if _is_open(wait) and answer is None:
            wait.missing_bytes = 1
            return
        self._forget(wait)
        wait.deferred.resolve(answer)

    def _begin(self, wait: FetchWait) -> None:
        """Have it read again in steps; what is appended meanwhile it notices at the end of them."""
        assert wait.begin is not None
        if not wait.is_reading:
            wait.is_reading = True
            wait.begin(wait)

    def _complete(self, wait: FetchWait) -> None:
        wait.is_due = True
        if _is_open(wait) and wait.begin is not None:
            self._begin(wait)
            return
        self._forget(wait)
        if _is_open(wait):
            wait.deferred.resolve(wait.deferred.build(lambda: wait.answer(True)))

    def _abandon(self, wait: FetchWait) -> None:
        """Forget a fetch whose connection is gone, with all that it holds; its deadline may be far."""
        self._forget(wait)
        wait.partitions, wait.answer, wait.begin = (), _no_answer, None
        self._abandoned_count += 1
        if self._abandoned_count > len(self._deadlines) // 2:
            self._deadlines = [entry for entry in self._deadlines if _is_open(entry[2])]
            heapq.heapify(self._deadlines)
            self._abandoned_count = 0

    def _forget(self, wait: FetchWait) -> None:
        for partition in wait.partitions:
            waits = self._by_partition.get(partition)
            if waits is not None:
                waits.pop(wait, None)
                if not waits:
                    del self._by_partition[partition]
                    self._stable_ends.pop(partition, None)


def _no_answer(is_due: bool) -> None:
    """Answer nobody."""


def _is_open(wait: FetchWait) -> bool:
    return not (wait.deferred.is_done or wait.deferred.is_cancelled)
