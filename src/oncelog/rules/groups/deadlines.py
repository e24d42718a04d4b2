"""A priority queue of deadlines by key, such as a group id or a member id.

A key has one deadline at a time. `take` returns the keys whose deadlines have passed, each once. An operation
costs O(log n) for n keys. If a key gets another deadline or is removed, its old heap entry becomes outdated.
Outdated entries are skipped. They are removed once they are more than half of the heap, so a key whose
deadline changes often does not fill the heap.
"""

from __future__ import annotations

import heapq

MAX_GROUPS_AT_ONCE = 200
"""Largest number of groups whose deadlines the coordinator handles at once. It takes 10 ms.

After a restart, the sessions of all members that are gone end at the same time. See
test_groups_whose_members_expire_together_are_handled_a_few_at_once.
"""
_SPARE_ENTRIES = 64
"""The number of outdated entries that the heap may always have, so that a small heap is not rebuilt often."""


class Deadlines:
    """Deadlines in ms, at most one for each key."""

    __slots__ = ("_due_ms", "_heap")

    def __init__(self) -> None:
        self._due_ms: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._due_ms)

    def __contains__(self, key: str) -> bool:
        return key in self._due_ms

    @property
    def heap_size(self) -> int:
        """The number of heap entries, including outdated ones."""
        return len(self._heap)

    def set(self, key: str, due_ms: int) -> None:
        """Set the key's deadline, replacing any other."""
        self._due_ms[key] = due_ms
        heapq.heappush(self._heap, (due_ms, key))
        if len(self._heap) > 2 * len(self._due_ms) + _SPARE_ENTRIES:
            self._heap = [(due, live_key) for live_key, due in self._due_ms.items()]
            heapq.heapify(self._heap)

    def set_if_earlier(self, key: str, due_ms: int) -> None:
        """Set the key's deadline unless it already has an earlier or equal one."""
        existing_ms = self._due_ms.get(key)
        if existing_ms is None or due_ms < existing_ms:
            self.set(key, due_ms)

    def remove(self, key: str) -> None:
        """Remove the key and its deadline. Raises KeyError if the key has no deadline."""
        del self._due_ms[key]

    def discard(self, key: str) -> None:
        """Remove the key and its deadline, if it has one."""
        self._due_ms.pop(key, None)

    @property
    def next_ms(self) -> int | None:
        """The earliest deadline in ms; None if there is none."""
        heap = self._heap
        while heap and self._due_ms.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take(self, now_ms: int, max_count: int | None = None) -> list[str]:
        """Remove and return the keys whose deadlines have passed, at most `max_count` of them, the earliest
        first.

        The result is a list and not a generator. A caller may set a deadline in the past for a key that it
        handles; with a generator its loop would never end.
        """
        keys: list[str] = []
        while (due_ms := self.next_ms) is not None and due_ms <= now_ms:
            if max_count is not None and len(keys) >= max_count:
                break
            _, key = heapq.heappop(self._heap)
            del self._due_ms[key]
            keys.append(key)
        return keys
