"""Allocation of producer ids, unique over all incarnations of a data directory.

Ids are allocated in blocks: the end of a block is on disk before its first id is handed out. A crash leaves a
gap, never a repeated id: behaviour I4 (docs/behaviours.md).

An incarnation is the data directory or a copy of it, such as a restored backup. Each start of the broker
begins a new range at the current time in milliseconds times 1024, even if the file of blocks,
`oncelog-producer-ids.json`, is old or missing. Since a broker hands out fewer than 1024 ids a millisecond,
two incarnations never share an id. Ids stay below 2^53 until the year 2248, so JSON readers keep them
exactly.
Source: kafka ProducerIdManager for the blocks.
"""

from __future__ import annotations

from typing import Any

from oncelog.broker.state_file import read_state, write_state
from oncelog.config import INT64_MAX
from oncelog.errors import StorageError
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.disk import Disk
from oncelog.types import ProducerId

FILE_NAME = "oncelog-producer-ids.json"
IDS_PER_MS_BITS = 10
MAX_START = 1 << 62
"""Largest start of a range, unless the file has a larger one.

Clients choose the ids in their batches. Without this limit, a batch with an id near 2^63 would leave no ids
for new producers. See test_an_id_near_the_end_does_not_use_up_all_others.
"""


def first_producer_id(stored: int, seen: int, now_ms: int) -> int:
    """Return the first id that a start hands out: the largest of `stored`, `seen` + 1 and the clock's value.

    A value above MAX_START is ignored unless it is `stored`.
    """
    by_clock = now_ms << IDS_PER_MS_BITS
    return max(start for start in (0, stored, seen + 1, by_clock) if start <= MAX_START or start == stored)


class ProducerIds:
    """A source of producer ids that are unique over all incarnations of the data directory."""

    def __init__(self, disk: Disk, now_ms: int, block_size: int = DEFAULT_LIMITS.producer_id_block) -> None:
        self._disk = disk
        self._block_size = block_size
        self._stored = stored_next_id(disk)
        self._now_ms = now_ms
        self._next = self._block_end = first_producer_id(self._stored, -1, now_ms)

    def begin_above(self, seen: int) -> None:
        """Hand out only ids above `seen`, the largest id in the logs.

        Call this once, before the first `take`.
        """
        self._next = self._block_end = first_producer_id(self._stored, seen, self._now_ms)

    def take(self) -> ProducerId:
        """Return a new id. Raises StorageError if a block cannot be stored; then no id is handed out."""
        if self._next > INT64_MAX - self._block_size:
            raise StorageError(f"no producer ids are left: {FILE_NAME} contains {self._stored}")
        if self._next >= self._block_end:
            block_end = self._block_end + self._block_size
            write_next_id(self._disk, block_end)
            self._block_end = block_end
        producer_id = ProducerId(self._next)
        self._next += 1
        return producer_id


def stored_next_id(disk: Disk) -> int:
    """Return the stored end of the last block; 0 without a file. Raises StorageError if it is unreadable."""
    # An unreadable file must stop the broker: with 0 instead, ids might be handed out twice.
    return read_state(disk, FILE_NAME, _parse) or 0


def write_next_id(disk: Disk, next_producer_id: int) -> None:
    """Store the end of a new block. Raises StorageError."""
    write_state(disk, FILE_NAME, {"next_producer_id": next_producer_id})


def _parse(content: dict[str, Any]) -> int:
    next_id = content["next_producer_id"]
    if type(next_id) is not int or not 0 <= next_id <= INT64_MAX:
        raise ValueError(f"next_producer_id {next_id!r}")
    return next_id
