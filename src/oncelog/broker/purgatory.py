"""Responses that are not ready yet: pending responses, and long-poll fetches that wait for records.

Nothing here blocks or sleeps. `FetchPurgatory` completes a delayed fetch when enough has been appended to its
partitions or its deadline has passed. Source: Kafka's DelayedOperationPurgatory and DelayedFetch.
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
    """Closes the connection in place of a response, as Kafka does after a failed append with acks=0."""

    reason: str


class PendingResponse:
    """One response that will be ready later.

    `blocks_pipeline`: later requests of the connection wait until it is ready, as behind a fetch. Otherwise
    they are carried out and only their responses wait, as behind an append.
    `runs_next_request`: the next request is carried out even if the client disconnects meanwhile.
    """

    __slots__ = (
        "_callback", "_response", "blocks_pipeline", "is_cancelled", "is_done", "measure", "on_cancelled",
        "outlives_client", "request_bytes", "runs_next_request",
    )  # fmt: skip

    def __init__(self, *, blocks_pipeline: bool, runs_next_request: bool = False) -> None:
        self.blocks_pipeline = blocks_pipeline
        self.runs_next_request = runs_next_request
        self.is_done = False
        self.is_cancelled = False
        self.measure: Callable[[Callable[[], Any]], Any] | None = None
        """Calls the given function and charges its time to the client's request quota. The server sets it."""
        self._response: Any = None
        self._callback: Callable[[Any], None] | None = None
        self.on_cancelled: Callable[[], None] | None = None
        """Called once when the response is no longer needed."""
        self.request_bytes = 0
        """Memory of the request that is kept until then. The connection counts it as a waiting request."""
        self.outlives_client = False
        """True if the request is carried out even if its client disconnects: it expects no response."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the response, at once if it is ready. There can be only one callback."""
        if self.is_done:
            callback(self._response)
        else:
            self._callback = callback

    def build(self, make: Callable[[], Any]) -> Any:
        """Return `make()`, which makes the response or a part of it, and charge its time to the client."""
        return make() if self.measure is None else self.measure(make)

    def resolve(self, response: Any) -> None:
        """Set the response: a message, None (no response) or Disconnect. Later calls do nothing."""
        if self.is_done or self.is_cancelled:
            return
        self.is_done, self._response = True, response
        if self._callback is not None:
            callback, self._callback = self._callback, None
            callback(response)

    def resolve_with(self, response: Any) -> None:
        """Resolve with a response, or with that of another PendingResponse once it is ready.

        Its work is charged to this request's client, and a cancellation of this one cancels it.
        """
        if not isinstance(response, PendingResponse):
            self.resolve(response)
        elif self.is_cancelled:
            response.cancel()
        else:
            response.measure, self.on_cancelled = self.measure, response.cancel
            response.add_done_callback(self.resolve)

    def cancel(self) -> None:
        """Give up the response: the connection has ended."""
        is_first, self.is_cancelled = not (self.is_cancelled or self.is_done), True
        self._callback = None
        if is_first and self.on_cancelled is not None:
            self.on_cancelled()


@dataclass(eq=False, slots=True)
class DelayedFetch:
    """A fetch that did not find `min_bytes`. Each append to its partitions reduces `missing_bytes`."""

    pending: PendingResponse
    partitions: Collection[TopicPartition]
    missing_bytes: int
    deadline_ms: int
    answer: Callable[[bool], Any] = field(repr=False)
    """Read again and build the response.

    With False it may return None: for a read_committed reader too few of the appended bytes may be visible.
    The fetch then waits further. See test_a_read_committed_fetch_keeps_waiting_while_nothing_is_committed.
    With True the deadline has passed, and it returns whatever there is.
    """
    begin: Callable[[DelayedFetch], None] | None = field(default=None, repr=False)
    """Called instead of `answer` for a fetch of many partitions: reads again in steps, then resolves
    `pending` or watches again. See test_a_waiting_fetch_of_many_partitions_is_read_again_in_steps."""
    is_committed_only: bool = False
    is_due: bool = False
    """True once the deadline has passed or a partition is gone, so that a response must be sent."""
    is_reading: bool = False
    """True while `begin` reads in steps."""

    @property
    def is_open(self) -> bool:
        """True until the fetch is answered or cancelled."""
        return not (self.pending.is_done or self.pending.is_cancelled)


class FetchPurgatory:
    """The delayed fetches of a broker, by partition and by deadline."""

    def __init__(self) -> None:
        self._by_partition: dict[TopicPartition, dict[DelayedFetch, None]] = {}
        self._deadlines: list[tuple[int, int, DelayedFetch]] = []
        """A heap of (deadline, serial number, fetch). Completed fetches stay until they come to its top."""
        self._serial = count()
        self._abandoned_count = 0
        self._stable_ends: dict[TopicPartition, int] = {}
        """The last stable offset at the last append, for watched partitions."""

    def __len__(self) -> int:
        return sum(1 for _, _, fetch in self._deadlines if fetch.is_open)

    def is_watched(self, tp: TopicPartition) -> bool:
        """Return True if an append to the partition may complete a fetch."""
        return tp in self._by_partition

    @property
    def next_deadline_ms(self) -> int | None:
        """The next time at which `expire` must run; None if no fetch waits."""
        while self._deadlines and not self._deadlines[0][2].is_open:
            self._forget(heapq.heappop(self._deadlines)[2])
        return self._deadlines[0][0] if self._deadlines else None

    def watch(self, fetch: DelayedFetch) -> None:
        """Let the fetch wait for appends to its partitions, at most until its deadline."""
        for tp in fetch.partitions:
            self._by_partition.setdefault(tp, {})[fetch] = None
        fetch.pending.on_cancelled = lambda: self._abandon(fetch)
        heapq.heappush(self._deadlines, (fetch.deadline_ms, next(self._serial), fetch))

    def watch_again(self, fetch: DelayedFetch, missing_bytes: int) -> None:
        """Let a fetch that was read in steps wait for `missing_bytes` more."""
        fetch.is_reading, fetch.missing_bytes = False, missing_bytes

    def remove(self, fetch: DelayedFetch) -> None:
        """Remove a fetch that was read in steps and is answered."""
        self._forget(fetch)

    def check_and_complete(self, tp: TopicPartition, size_bytes: int, stable_end: int | None = None) -> None:
        """Complete the fetches that have enough after an append of `size_bytes` to the partition.

        `stable_end` is the last stable offset. While it does not move, read_committed readers see nothing
        new.
        """
        fetches = list(self._by_partition.get(tp, ()))
        is_stable = stable_end is None or self._stable_ends.get(tp) != stable_end
        if stable_end is not None and fetches:
            self._stable_ends[tp] = stable_end
        for fetch in fetches:
            fetch.missing_bytes -= size_bytes
            sees_append = is_stable or not fetch.is_committed_only
            if not fetch.is_open or (fetch.missing_bytes <= 0 and sees_append):
                self._try_complete(fetch)

    def complete_all(self, tp: TopicPartition) -> None:
        """Complete every fetch of a partition that was deleted or whose log start moved."""
        for fetch in list(self._by_partition.get(tp, ())):
            self._force_complete(fetch)

    def expire(self, now_ms: int) -> None:
        """Complete every fetch whose max_wait_ms has passed, with whatever there is."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            self._force_complete(heapq.heappop(self._deadlines)[2])

    def _try_complete(self, fetch: DelayedFetch) -> None:
        if fetch.begin is not None and fetch.is_open:
            self._begin(fetch)
            return
        response = fetch.pending.build(lambda: fetch.answer(False)) if fetch.is_open else None
        if fetch.is_open and response is None:
            # Appends are counted in bytes, and some are not visible to this reader: those of an open
            # transaction to read_committed. It waits for the next append. See
            # test_a_read_committed_fetch_keeps_waiting_while_nothing_is_committed.
            fetch.missing_bytes = 1
            return
        self._forget(fetch)
        fetch.pending.resolve(response)

    def _begin(self, fetch: DelayedFetch) -> None:
        """Read the fetch again in steps. At their end it notices what was appended meanwhile."""
        assert fetch.begin is not None
        if not fetch.is_reading:
            fetch.is_reading = True
            fetch.begin(fetch)

    def _force_complete(self, fetch: DelayedFetch) -> None:
        fetch.is_due = True
        if fetch.is_open and fetch.begin is not None:
            self._begin(fetch)
            return
        self._forget(fetch)
        if fetch.is_open:
            fetch.pending.resolve(fetch.pending.build(lambda: fetch.answer(True)))

    def _abandon(self, fetch: DelayedFetch) -> None:
        """Release everything that a fetch holds when its connection ends: its deadline may be far away."""
        self._forget(fetch)
        fetch.partitions, fetch.answer, fetch.begin = (), _no_answer, None
        self._abandoned_count += 1
        if self._abandoned_count > len(self._deadlines) // 2:
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_open]
            heapq.heapify(self._deadlines)
            self._abandoned_count = 0

    def _forget(self, fetch: DelayedFetch) -> None:
        for tp in fetch.partitions:
            fetches = self._by_partition.get(tp)
            if fetches is not None:
                fetches.pop(fetch, None)
                if not fetches:
                    del self._by_partition[tp]
                    self._stable_ends.pop(tp, None)


def _no_answer(is_due: bool) -> None:
    """Build no response: the client is gone."""
