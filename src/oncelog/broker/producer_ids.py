"""Producer ids in blocks: the next free id is on disk before the first of a block is handed out.

A crash leaves a gap, never a repeat (row I4). Source: Kafka's ProducerIdManager.
"""

from __future__ import annotations

import json

from oncelog.broker.state_file import read_state, write_state
from oncelog.errors import StorageError
from oncelog.log.disk import Disk
from oncelog.types import ProducerId

BLOCK_SIZE = 1000
FILE_NAME = "oncelog-producer-ids.json"


class ProducerIds:
    """Hands out ids, unique for the life of the data directory."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._next, self._block_end = 0, 0
        text = read_state(disk, FILE_NAME)
        if text is not None:
            self._next = self._block_end = _parse(text)

    def take(self) -> ProducerId:
        """A new id. Raises StorageError (nothing handed out) when a new block cannot be written down."""
        if self._next >= self._block_end:
            block_end = self._block_end + BLOCK_SIZE
            write_state(self._disk, FILE_NAME, json.dumps({"version": 1, "next_producer_id": block_end}))
            self._block_end = block_end
        taken = ProducerId(self._next)
        self._next += 1
        return taken


def _parse(text: str) -> int:
    try:
        content = json.loads(text)
        if content["version"] != 1:
            raise ValueError(f"version {content['version']}")
        return int(content["next_producer_id"])
    except (ValueError, KeyError, TypeError) as error:
        # Starting again at 0 would give ids twice, so an unreadable file stops the broker.
        raise StorageError(f"{FILE_NAME} is unreadable ({error!r}); restore it from a backup") from error
