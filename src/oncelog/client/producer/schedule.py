"""The schedule of a producer: partitions that have batches to send, grouped by what they wait for.

    ready            for a place among the requests in flight to their leader
    without leader   for metadata that names a leader
    timed            for a time: the end of linger.ms or of a retry's backoff

A partition is in one of these groups, or in none if it has no batch to send or waits for a response. So the
cost of a drain depends on the partitions that have batches to send, not on all partitions that were ever
used. Source: Kafka's RecordAccumulator.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from oncelog.client.producer.queues import PartitionQueue

_COMPACT_FROM = 64
"""The minimum number of entries of a heap that is worth rebuilding."""

Timer = tuple[float, int, PartitionQueue]


class SendSchedule:
    """Partition queues, grouped by what they wait for.

    Moving one queue takes O(log n) for n timed queues, amortized.
    """

    def __init__(self) -> None:
        self._ready: dict[int, OrderedDict[PartitionQueue, None]] = {}
        self._node_of: dict[PartitionQueue, int] = {}
        self._without_leader: dict[PartitionQueue, None] = {}
        self._timers: dict[PartitionQueue, Timer] = {}
        self._lingering: dict[PartitionQueue, None] = {}
        self._heap: list[Timer] = []
        """A heap of timers, the earliest first. A timer that is no longer in `_timers` is ignored."""
        self._timer_count = 0

    def remove(self, queue: PartitionQueue) -> None:
        """Remove a queue from the schedule, if it is there."""
        node_id = self._node_of.pop(queue, None)
        if node_id is not None:
            del self._ready[node_id][queue]
        elif self._timers.pop(queue, None) is not None:
            self._lingering.pop(queue, None)
        else:
            self._without_leader.pop(queue, None)

    def put_ready(self, queue: PartitionQueue, node_id: int | None) -> None:
        """Put a queue after the other queues that are ready for its leader.

        A `node_id` of None is an unknown leader.
        """
        if node_id is not None and self._node_of.get(queue) == node_id:
            return
        self.remove(queue)
        if node_id is None:
            self._without_leader[queue] = None
            return
        self._node_of[queue] = node_id
        self._ready.setdefault(node_id, OrderedDict())[queue] = None

    def put_timed(self, queue: PartitionQueue, due_ms: float, *, is_lingering: bool) -> None:
        """Put a queue whose next batch may be sent from `due_ms` on.

        `is_lingering` is True if the queue waits only for linger.ms; `take_lingering` takes it earlier.
        """
        self.remove(queue)
        self._timer_count += 1
        timer = (due_ms, self._timer_count, queue)
        self._timers[queue] = timer
        if is_lingering:
            self._lingering[queue] = None
        heapq.heappush(self._heap, timer)
        if len(self._heap) > max(_COMPACT_FROM, 2 * len(self._timers)):
            self._heap = list(self._timers.values())
            heapq.heapify(self._heap)

    def take_due(self, now_ms: float) -> list[PartitionQueue]:
        """Remove and return the queues whose time has passed."""
        due = []
        while (first_ms := self.next_due_ms()) is not None and first_ms <= now_ms:
            queue = heapq.heappop(self._heap)[2]
            self.remove(queue)
            due.append(queue)
        return due

    def take_lingering(self) -> list[PartitionQueue]:
        """Remove and return the queues that wait only for the end of linger.ms."""
        lingering = list(self._lingering)
        for queue in lingering:
            self.remove(queue)
        return lingering

    def take_all_ready(self) -> list[PartitionQueue]:
        """Remove and return all queues that are ready or have no leader."""
        queues = [*self._node_of, *self._without_leader]
        for queue in queues:
            self.remove(queue)
        return queues

    def take_ready(self, node_id: int) -> PartitionQueue | None:
        """Remove and return the queue that has been ready for this node longest; None if there is none."""
        ready = self._ready.get(node_id)
        if not ready:
            return None
        queue, _ = ready.popitem(last=False)
        del self._node_of[queue]
        return queue

    def put_first(self, queue: PartitionQueue, node_id: int) -> None:
        """Put back a queue that `take_ready` returned, before all others."""
        self.put_ready(queue, node_id)
        self._ready[node_id].move_to_end(queue, last=False)

    def ready_nodes(self) -> list[int]:
        """Return the ids of the nodes for which at least one queue is ready."""
        return [node_id for node_id, ready in self._ready.items() if ready]

    def without_leader(self) -> Iterator[PartitionQueue]:
        """Return the queues whose leader is unknown."""
        return iter(self._without_leader)

    def next_due_ms(self) -> float | None:
        """Return the earliest time (ms) of a timed queue; None if there is none."""
        while self._heap and self._timers.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
