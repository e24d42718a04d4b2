"""The topics in `oncelog-topics.json` with ids, partition counts and settings, as a takeover sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from oncelog.broker.state_file import read_state, write_state
from oncelog.errors import StorageError
from oncelog.log.disk import Disk

FILE_NAME = "oncelog-topics.json"


class TopicEntry(NamedTuple):
    """A topic as the file has it."""

    topic_id: bytes
    partition_count: int
    settings: dict[str, str]
    is_deleting: bool


def read_topics(disk: Disk) -> dict[str, TopicEntry]:
    """By name; empty without a file. Raises StorageError on an unreadable one."""
    content = _read(disk)
    try:
        return {
            entry["name"]: TopicEntry(
                bytes.fromhex(entry["topic_id"]), entry["partitions"], entry["settings"], entry["is_deleting"]
            )
            for entry in content["topics"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{FILE_NAME} is unreadable ({error!r}); restore it from a backup") from error


def _read(disk: Disk) -> dict[str, Any]:
    text = read_state(disk, FILE_NAME)
    if text is None:
        return {"version": 1, "topics": []}
    try:
        content: dict[str, Any] = json.loads(text)
        if content["version"] != 1:
            raise ValueError(f"version {content['version']}")
        return content
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{FILE_NAME} is unreadable ({error!r}); restore it from a backup") from error


def write_topics(disk: Disk, topics: Mapping[str, TopicEntry]) -> None:
    """Replace the topics in the file, durably; what else is in it stays. Raises StorageError."""
    rows = [
        {
            "name": name,
            "topic_id": entry.topic_id.hex(),
            "partitions": entry.partition_count,
            "settings": entry.settings,
            "is_deleting": entry.is_deleting,
        }
        for name, entry in topics.items()
    ]
    write_state(disk, FILE_NAME, json.dumps({**_read(disk), "topics": rows}, indent=1))
