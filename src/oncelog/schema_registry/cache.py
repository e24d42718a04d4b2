"""A bounded cache that several threads may use. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(Generic[K, V]):
    """The most recently used entries, at most `capacity` of them.

    Keys must be text, numbers, or tuples of these.
    """

    # There is no lock. A signal handler that interrupted its owner would wait for it forever, and so would a
    # process that was forked while another thread had it. Each call of the dict runs as a whole, because the
    # hashes and comparisons of these keys run no Python code. Guard:
    # test_an_interrupt_at_any_call_of_a_look_up_blocks_nobody.

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        value = self._entries.get(key)
        if value is not None:
            self._note_use(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Set the value of a key. If the cache is full, drop the entry that was not used for longest."""
        self._entries[key] = value
        self._note_use(key)
        while len(self._entries) > self._capacity:
            try:
                self._entries.popitem(last=False)
            except KeyError:  # other threads have dropped all entries meanwhile
                return

    def _note_use(self, key: K) -> None:
        try:
            self._entries.move_to_end(key)
        except KeyError:  # another thread has dropped the entry meanwhile
            return

    def __len__(self) -> int:
        return len(self._entries)
