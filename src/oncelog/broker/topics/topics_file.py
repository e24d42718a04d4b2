"""Access to the file `oncelog-topics.json`: topics with their ids, partition counts and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oncelog.broker.state_file import read_state, write_state
from oncelog.log.disk import Disk

FILE_NAME = "oncelog-topics.json"


class TopicEntry(NamedTuple):
    """The entry of a topic in the file."""

    topic_id: bytes
    partition_count: int
    settings: dict[str, str]
    is_deleting: bool
    leader_epoch: int = 0
    """The lowest leader epoch that the partitions may have: one above those in Apache Kafka's metadata, if
    the topic was taken over.

    If the epoch were lower than before, clients that have used the partitions would wait forever. See
    test_the_leader_epoch_is_above_kafkas.
    """


def read_topics(disk: Disk) -> dict[str, TopicEntry]:
    """Return the topics by name; an empty dict without a file.

    Raises StorageError if the file is unreadable.
    """
    return read_state(disk, FILE_NAME, parse_topics) or {}


def parse_topics(content: dict[str, Any]) -> dict[str, TopicEntry]:
    """Return the topics in the file's content by name.

    Raises ValueError, KeyError or TypeError if it is invalid.
    """
    return {
        entry["name"]: TopicEntry(
            bytes.fromhex(entry["topic_id"]),
            entry["partitions"],
            entry["settings"],
            entry["is_deleting"],
            entry.get("leader_epoch", 0),
        )
        for entry in content["topics"]
    }


def write_topics(disk: Disk, topics: Mapping[str, TopicEntry]) -> None:
    """Replace the topics in the file durably. Other content of the file stays. Raises StorageError."""
    rows = [
        {
            "name": name,
            "topic_id": entry.topic_id.hex(),
            "partitions": entry.partition_count,
            "settings": entry.settings,
            "is_deleting": entry.is_deleting,
            "leader_epoch": entry.leader_epoch,
        }
        for name, entry in topics.items()
    ]
    others = read_state(disk, FILE_NAME, dict) or {}
    write_state(disk, FILE_NAME, {**others, "topics": rows})
