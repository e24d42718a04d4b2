"""Reads the checkpoint of a streaming query: planned and committed micro-batches, and offsets.

Spark writes `offsets/N` before it runs micro-batch N, and `commits/N` after the sink has finished it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_DEPTH = 8
"""The maximum depth to search. The offsets of a source may be JSON text within strings of other JSON."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The newest micro-batches in the two logs, and the next offset of each partition of one topic.

    The numbers are None while a log has no micro-batch. `positions` are the offsets after the last committed
    micro-batch. `has_rows` is True if that micro-batch read rows of the topic.
    """

    planned: int | None = None
    committed: int | None = None
    positions: Mapping[int, int] | None = None
    has_rows: bool = False

    @property
    def is_planned(self) -> bool:
        """True if a micro-batch is planned and not committed."""
        return self.planned is not None and (self.committed is None or self.planned > self.committed)

    def covers(self, ends: Mapping[int, int]) -> bool:
        """Return True if committed micro-batches contain all records below these end offsets."""
        positions = self.positions or {}
        return all(positions.get(partition, 0) >= end for partition, end in ends.items())


def read_checkpoint(directory: Path, topic: str) -> CheckpointState:
    """Read the logs of a checkpoint, which need not exist yet."""
    committed = newest_entry(_names(directory / "commits"))
    planned = newest_entry(_names(directory / "offsets"))
    positions, has_rows = None, False
    if committed is not None:
        # Spark removes old entries, but never the last committed one.
        positions = _positions_after(directory, committed, topic)
        before = _positions_after(directory, committed - 1, topic) or {}
        has_rows = any(end > before.get(partition, 0) for partition, end in (positions or {}).items())
    return CheckpointState(planned, committed, positions, has_rows)


def _positions_after(directory: Path, batch: int, topic: str) -> dict[int, int] | None:
    """Return the next offset of each partition after a micro-batch; None if it is unknown."""
    try:
        return positions_of((directory / "offsets" / str(batch)).read_text(), topic)
    except FileNotFoundError:
        return None


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []


def newest_entry(names: Iterable[str]) -> int | None:
    """Return the highest micro-batch among the file names of a log. Temporary files do not count."""
    return max((int(name) for name in names if name.isdecimal()), default=None)


def positions_of(entry: str, topic: str) -> dict[int, int] | None:
    """Return the next offset of each partition from the text of `offsets/N`; None if it lacks the topic.

    This project's source and Spark's Kafka source write {"TOPIC": {"0": 120}}, each source on its own line.
    """
    for line in entry.splitlines():
        for found in _objects(line):
            partitions = found.get(topic)
            if isinstance(partitions, dict) and all(_is_position(item) for item in partitions.items()):
                return {int(partition): offset for partition, offset in partitions.items()}
    return None


def _is_position(item: tuple[str, Any]) -> bool:
    return item[0].isdecimal() and isinstance(item[1], int)


def _objects(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a value at any depth, including objects in strings of JSON text."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _objects(item, depth + 1)


def remove_last_commit(directory: Path) -> int | None:
    """Remove the last entry of the commit log and its checksum. Return the number of its micro-batch; None if
    the log is empty.
    """
    last = newest_entry(_names(directory / "commits"))
    if last is not None:
        (directory / "commits" / str(last)).unlink()
        (directory / "commits" / f".{last}.crc").unlink(missing_ok=True)
    return last
