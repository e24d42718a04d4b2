"""Responses that are not ready yet: pending responses, and fetches that wait for records.

No code here blocks or sleeps. `FetchPurgatory` completes a delayed fetch when enough bytes were appended to
its partitions, at its deadline, or when a partition is deleted or its log start moves. Source: Kafka's
DelayedOperationPurgatory and DelayedFetch.
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
    """An answer that makes the server close the connection without a response.

    Kafka does this after a failed append with acks=0, for example.
    """

    reason: str


class PendingResponse:
    """A response that will be ready later.

    - `blocks_pipeline`: later requests of the connection are handled only after this response is ready, for
      example after a fetch. If false, they are handled immediately, and only their responses wait.
    - `runs_next_request`: the next request is handled even if the client disconnects before this response is
      ready.
    """

    __slots__ = (
        "_callback", "_response", "blocks_pipeline", "encode", "is_cancelled", "is_done", "measure",
        "on_cancelled", "outlives_client", "request_bytes", "runs_next_request",
    )  # fmt: skip

    def __init__(self, *, blocks_pipeline: bool, runs_next_request: bool = False) -> None:
        self.blocks_pipeline = blocks_pipeline
        self.runs_next_request = runs_next_request
        self.is_done = False
        self.is_cancelled = False
        self.measure: Callable[[Callable[[], Any]], Any] | None = None
        """A function that calls its argument and charges the duration to the client. The server sets it."""
        self.encode: Callable[[Any], Any] | None = None
        """A function that returns the work that encodes a response in steps, or None if it must be encoded at
        once. The server sets it.
        """
        self._response: Any = None
        self._callback: Callable[[Any], None] | None = None
        self.on_cancelled: Callable[[], None] | None = None
        """Called once if the response is cancelled before it is ready."""
        self.request_bytes = 0
        """The bytes of memory that the request keeps until the response is ready. The connection counts them
        like the bytes of an unhandled request.
        """
        self.outlives_client = False
        """True if the request is handled to its end even after its client disconnects (acks=0)."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the response once it is ready; immediately if it is ready already.

        At most one callback is kept.
        """
        if self.is_done:
            callback(self._response)
        else:
            self._callback = callback

    def build(self, make: Callable[[], Any]) -> Any:
        """Call `make`, charge its time to the client, and return its result. `make` builds a part of the
        response.
        """
        return make() if self.measure is None else self.measure(make)

    def resolve(self, response: Any) -> None:
        """Set the response: a message, Disconnect, or None for no response. Only the first call has an
        effect.
        """
        if self.is_done or self.is_cancelled:
            return
        self.is_done, self.on_cancelled = True, None
        if self._callback is None:
            self._response = response
            return
        # Keep neither the response nor `on_cancelled`, which may refer to this object: a response may have
        # many megabytes. See test_the_response_of_a_delayed_fetch_is_freed_at_once.
        callback, self._callback = self._callback, None
        callback(response)

    def resolve_with(self, response: Any) -> None:
        """Set the response, or wait for it if `response` is itself a PendingResponse.

        Work on `response` is then charged to the client of this request. Cancelling this PendingResponse also
        cancels `response`.
        """
        if not isinstance(response, PendingResponse):
            self.resolve(response)
        elif self.is_cancelled:
            response.cancel()
        else:
            response.measure, response.encode = self.measure, self.encode
            self.request_bytes = response.request_bytes
            self.outlives_client |= response.outlives_client
            self.runs_next_request |= response.runs_next_request
            self.on_cancelled = response.cancel
            response.add_done_callback(self.resolve)

    def cancel(self) -> None:
        """Cancel the response, because the connection has ended."""
        is_first, self.is_cancelled = not (self.is_cancelled or self.is_done), True
        self._callback = None
        if is_first and self.on_cancelled is not None:
            on_cancelled, self.on_cancelled = self.on_cancelled, None
            on_cancelled()


MAX_PARTITIONS_AT_ONCE = 2_000
"""Maximum number of partitions of delayed fetches that are read immediately in a round. It takes 12 ms.

Further fetches are read in background steps.
"""


@dataclass(eq=False, slots=True)
class DelayedFetch:
    """A fetch that has not found `min_bytes` yet. Each append to its partitions reduces `missing_bytes`."""

    pending: PendingResponse
    partitions: Collection[TopicPartition]
    missing_bytes: int
    deadline_ms: int
    answer: Callable[[bool], Any] = field(repr=False)
    """A function that reads the partitions again and builds the response. Its argument is `is_due`.

    If `is_due` is false, the function may return None, and the fetch continues to wait: a read_committed
    reader may not see the appended bytes yet. See
    test_a_read_committed_fetch_keeps_waiting_while_nothing_is_committed. If `is_due` is true, the function
    always returns a response.
    """
    begin: Callable[[DelayedFetch], None] | None = field(default=None, repr=False)
    """A function that is called instead of `answer` if `reads_in_steps` is true, or if many other fetches
    were completed in this round. It reads the partitions again in steps, then resolves `pending` or calls
    `watch_again`. See test_a_waiting_fetch_of_many_partitions_is_read_again_in_steps.
    """
    reads_in_steps: bool = False
    """True for a fetch of many partitions."""
    is_committed_only: bool = False
    is_due: bool = False
    """If true, a response must be sent: the deadline has passed, a partition was deleted, or a log start
    moved.
    """
    is_reading: bool = False
    """True while `begin` reads the partitions in steps."""

    @property
    def is_open(self) -> bool:
        """True until the fetch is answered or cancelled."""
        return not (self.pending.is_done or self.pending.is_cancelled)


class FetchPurgatory:
    """The delayed fetches of a broker, by partition and by deadline."""

    def __init__(self) -> None:
        self._by_partition: dict[TopicPartition, dict[DelayedFetch, None]] = {}
        self._deadlines: list[tuple[int, int, DelayedFetch]] = []
        """A heap of (deadline in ms, serial number, fetch). A completed fetch stays, without its response,
        until it is at the top or the heap is rebuilt.
        """
        self._serial = count()
        self._closed_count = 0
        """Number of fetches that were completed or cancelled since the heap was rebuilt."""
        self._stable_ends: dict[TopicPartition, int] = {}
        """The last stable offset after the last append, for partitions with delayed fetches."""
        self._partitions_at_once = MAX_PARTITIONS_AT_ONCE

    def __len__(self) -> int:
        return sum(1 for _, _, fetch in self._deadlines if fetch.is_open)

    @property
    def is_watching(self) -> bool:
        """True if any delayed fetch waits for appends."""
        return bool(self._by_partition)

    def is_watched(self, tp: TopicPartition) -> bool:
        """Return True if a delayed fetch waits for appends to the partition."""
        return tp in self._by_partition

    @property
    def next_deadline_ms(self) -> int | None:
        """The time in ms at which `expire` must be called; None if no fetch is delayed."""
        while self._deadlines and not self._deadlines[0][2].is_open:
            self._forget(heapq.heappop(self._deadlines)[2])
        return self._deadlines[0][0] if self._deadlines else None

    def end_round(self) -> None:
        """Allow MAX_PARTITIONS_AT_ONCE partitions to be read immediately again."""
        self._partitions_at_once = MAX_PARTITIONS_AT_ONCE

    def watch(self, fetch: DelayedFetch) -> None:
        """Delay a fetch until enough bytes are appended to its partitions, or until its deadline."""
        for tp in fetch.partitions:
            self._by_partition.setdefault(tp, {})[fetch] = None
        fetch.pending.on_cancelled = lambda: self._release(fetch)
        heapq.heappush(self._deadlines, (fetch.deadline_ms, next(self._serial), fetch))

    def watch_again(self, fetch: DelayedFetch, missing_bytes: int) -> None:
        """Delay a fetch again until `missing_bytes` more bytes are appended. Called after `begin` has read
        its partitions in steps.
        """
        fetch.is_reading, fetch.missing_bytes = False, missing_bytes

    def remove(self, fetch: DelayedFetch) -> None:
        """Remove a fetch after `begin` has read its partitions in steps and answered it."""
        self._release(fetch)

    def check_and_complete(self, tp: TopicPartition, size_bytes: int, stable_end: int | None = None) -> None:
        """Complete the fetches that have enough bytes after an append of `size_bytes` to a partition.

        `stable_end` is the partition's last stable offset. If it has not moved, the append is not visible to
        read_committed readers.
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
        """Complete all fetches of a partition that was deleted, or whose log start moved."""
        for fetch in list(self._by_partition.get(tp, ())):
            self._force_complete(fetch)

    def expire(self, now_ms: int) -> None:
        """Complete all fetches whose max_wait_ms has passed, with the available records."""
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            self._force_complete(heapq.heappop(self._deadlines)[2])

    def _try_complete(self, fetch: DelayedFetch) -> None:
        if fetch.is_open and self._takes_steps(fetch):
            self._begin(fetch)
            return
        response = fetch.pending.build(lambda: fetch.answer(False)) if fetch.is_open else None
        if fetch.is_open and response is None:
            # `missing_bytes` also counts bytes that this reader may not see yet: a read_committed reader does
            # not see an open transaction. So let the fetch wait for the next append, of any size. See
            # test_a_read_committed_fetch_keeps_waiting_while_nothing_is_committed.
            fetch.missing_bytes = 1
            return
        self._release(fetch)
        fetch.pending.resolve(response)

    def _takes_steps(self, fetch: DelayedFetch) -> bool:
        """Return True if the partitions of the fetch must be read in steps.

        One append, deadline or deletion may complete hundreds of fetches, so only some of them are read
        immediately. See test_many_fetches_that_are_completed_together_are_read_in_steps.
        """
        if fetch.begin is None:
            return False
        if fetch.reads_in_steps or fetch.is_reading or self._partitions_at_once <= 0:
            return True
        self._partitions_at_once -= len(fetch.partitions)
        return False

    def _begin(self, fetch: DelayedFetch) -> None:
        """Start to read the partitions of a fetch again in steps, unless such a read is in progress.

        A read in progress checks for newer appends after its last step.
        """
        assert fetch.begin is not None
        if not fetch.is_reading:
            fetch.is_reading = True
            fetch.begin(fetch)

    def _force_complete(self, fetch: DelayedFetch) -> None:
        fetch.is_due = True
        if fetch.is_open and self._takes_steps(fetch):
            self._begin(fetch)
            return
        self._forget(fetch)
        response = fetch.pending.build(lambda: fetch.answer(True)) if fetch.is_open else None
        self._release(fetch)
        fetch.pending.resolve(response)

    def _release(self, fetch: DelayedFetch) -> None:
        """Release the memory of a completed or cancelled fetch now, because its deadline may be far away."""
        self._forget(fetch)
        fetch.partitions, fetch.answer, fetch.begin = (), _no_answer, None
        self._closed_count += 1
        if self._closed_count > len(self._deadlines) // 2:
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_open]
            heapq.heapify(self._deadlines)
            self._closed_count = 0

    def _forget(self, fetch: DelayedFetch) -> None:
        for tp in fetch.partitions:
            fetches = self._by_partition.get(tp)
            if fetches is not None:
                fetches.pop(fetch, None)
                if not fetches:
                    del self._by_partition[tp]
                    self._stable_ends.pop(tp, None)


def _no_answer(is_due: bool) -> None:
    """Return no response. This function replaces the `answer` of a completed or cancelled fetch, to free the
    memory of its own function.
    """
