"""Producer ids in blocks: the next free id is on disk before the first of a block is handed out.

A crash leaves a gap, never a repeat (row I4). Every start begins a new range at the clock's milliseconds
times 1024. A broker hands out fewer than 1024 ids a millisecond, so two incarnations of a data directory (a
restored backup and what it is a backup of, say) never share an id, though the file is of another moment or
missing. Ids stay below 2^53 until the year 2255, so that readers of JSON keep them exactly.
Source: Kafka's ProducerIdManager for the blocks.
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
"""No range begins above it: clients choose the ids of the batches they send, and one near 2^63 must not
leave none to hand out. A test holds it: test_an_id_near_the_end_does_not_use_up_all_others."""


def first_producer_id(stored: int, seen: int, now_ms: int) -> int:
    """Where the ids of a start begin: above what is stored, above the largest id seen, and by the clock."""
    by_clock = now_ms << IDS_PER_MS_BITS
    return max(start for start in (0, stored, seen + 1, by_clock) if start <= MAX_START or start == stored)


class ProducerIds:
    """Hands out ids, unique over all incarnations of the data directory."""

    def __init__(self, disk: Disk, now_ms: int, block_size: int = DEFAULT_LIMITS.producer_id_block) -> None:
        self._disk = disk
        self._block_size = block_size
        self._stored = stored_next_id(disk)
        self._now_ms = now_ms
        self._next = self._block_end = first_producer_id(self._stored, -1, now_ms)

    def begin_above(self, seen: int) -> None:
        """Hand out larger ids than `seen`, the largest one in the logs; called once, before the first id."""
        self._next = self._block_end = first_producer_id(self._stored, seen, self._now_ms)

    def take(self) -> ProducerId:
        """A new id. Raises StorageError (nothing handed out) when a new block cannot be written down."""
        if self._next > INT64_MAX - self._block_size:
            raise StorageError(f"no producer id is left: {FILE_NAME} says {self._stored}")
        if self._next >= self._block_end:
            block_end = self._block_end + self._block_size
            write_next_id(self._disk, block_end)
            self._block_end = block_end
        taken = ProducerId(self._next)
        self._next += 1
        return taken


def stored_next_id(disk: Disk) -> int:
    """The first id that is not in a block yet; 0 without a file. Raises StorageError."""
    # Starting again at 0 would give ids twice, so an unreadable file stops the broker.
    return read_state(disk, FILE_NAME, _parse) or 0


def write_next_id(disk: Disk, next_producer_id: int) -> None:
    """Raises StorageError."""
    write_state(disk, FILE_NAME, {"next_producer_id": next_producer_id})


def _parse(content: dict[str, Any]) -> int:
    next_id = content["next_producer_id"]
    if type(next_id) is not int or not 0 <= next_id <= INT64_MAX:
        raise ValueError(f"next_producer_id {next_id!r}")
    return next_id
