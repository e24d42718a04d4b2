"""The next deadline of each of many keys, such as groups or member ids.

A key has one deadline at a time, and `take` hands it out once. Setting, removing and taking cost the
logarithm of their number. A heap entry that a later call replaced is passed over when it is met, and entries
like that never outnumber the others for long: a key whose deadline changes often must not cost more with
every change.
"""

from __future__ import annotations

import heapq

_SPARE_ENTRIES = 64
"""Heap entries without a meaning that are never worth a clean-up."""


class Deadlines:
    """Deadlines in milliseconds, by key."""

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
        """Entries in the heap, including those that have lost their meaning."""
        return len(self._heap)

    def set(self, key: str, due_ms: int) -> None:
        """Give the key this deadline in place of any other."""
        self._due_ms[key] = due_ms
        heapq.heappush(self._heap, (due_ms, key))
        if len(self._heap) > 2 * len(self._due_ms) + _SPARE_ENTRIES:
            self._heap = [(due, each) for each, due in self._due_ms.items()]
            heapq.heapify(self._heap)

    def set_if_earlier(self, key: str, due_ms: int) -> None:
        """Give the key this deadline unless it has one that is no later."""
        present_ms = self._due_ms.get(key)
        if present_ms is None or due_ms < present_ms:
            self.set(key, due_ms)

    def remove(self, key: str) -> None:
        """Forget the key's deadline. Raises KeyError without one."""
        del self._due_ms[key]

    @property
    def next_ms(self) -> int | None:
        """The first deadline; None without any."""
        heap = self._heap
        while heap and self._due_ms.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take(self, now_ms: int) -> list[str]:
        """Return the keys whose deadlines have come, which have none from then on.

        It is a list because a key that gets a deadline in the past meanwhile waits for the next call.
        Otherwise the loop of the caller might never end.
        """
        keys = []
        while (due_ms := self.next_ms) is not None and due_ms <= now_ms:
            _, key = heapq.heappop(self._heap)
            del self._due_ms[key]
            keys.append(key)
        return keys
