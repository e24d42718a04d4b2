"""Stores the file checkpoints of all loads in a compacted topic.

The transaction that stores a file's records also stores the file's checkpoint. Committed offsets of a group
would not work: they expire offsets.retention.minutes (a week) after the last commit, and a load that is
repeated later would store everything twice.

Checkpoints are read only after `init_transactions`, up to the high watermark. The last stable offset is not
enough: another loader's open transaction in the same partition would hide later checkpoints. See
test_another_open_transaction_hides_no_mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.client.admin.types import ConfigResource
from oncelog.client.consumer.blocking import Consumer
from oncelog.client.producer.partitioner import positive_murmur2
from oncelog.config import ADMIN, CONSUMER
from oncelog.errors import MisuseError, PeerError, TopicAlreadyExists, UnknownTopicOrPartition
from oncelog.load.decisions import FileCheckpoint
from oncelog.types import TopicPartition

CHECKPOINT_TOPIC = "oncelog-loads"
PARTITIONS = 16
"""Number of partitions of the checkpoint topic.

It must never change: a load's checkpoints must stay in one partition, even if the topic gets more partitions.
"""
_FORMAT = 1
_TIMEOUT_MS = 90_000
"""The time-out for reading checkpoints. With the default transaction.timeout.ms, the open transaction of a
killed loader ends before it.
"""


def checkpoint_partition(load_id: str) -> TopicPartition:
    """Return the partition that contains the checkpoints of a load."""
    return TopicPartition(CHECKPOINT_TOPIC, positive_murmur2(load_id.encode()) % PARTITIONS)


def encode_checkpoint(load_id: str, index: int, checkpoint: FileCheckpoint) -> tuple[bytes, bytes]:
    """Return the key and value of the record that stores the checkpoint of file number `index`."""
    return f"{load_id}/{index}".encode(), json.dumps({"version": _FORMAT, **checkpoint._asdict()}).encode()


def decode_checkpoint(value: bytes) -> FileCheckpoint:
    """Return the checkpoint in a record's value. Raises PeerError if another version or program wrote it."""
    try:
        fields = json.loads(value)
        if fields.pop("version") == _FORMAT:
            return FileCheckpoint(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise PeerError(
        f"a checkpoint in {CHECKPOINT_TOPIC} was written by another version or program: {value[:200]!r}"
    )


def read_checkpoints(
    config: Mapping[str, Any], load_id: str, topic: str
) -> tuple[list[FileCheckpoint], str | None]:
    """Return the checkpoints of a load's files, in order, and the current id of `topic`.

    The id is None on a cluster without topic ids. The caller must have fenced older loaders. Waits for the
    end of transactions that other producers have open in the checkpoint partition.

    Raises TimedOut. Raises UnknownTopicOrPartition if `topic` does not exist, and MisuseError if the
    checkpoint topic is not compacted.
    """
    tp = checkpoint_partition(load_id)
    with Admin(_settings_of(ADMIN, config)) as admin:
        topic_id = admin.describe_topics([topic])[topic].topic_id
        _ensure_topic(admin)
        end = admin.list_offsets({tp: "latest"})[tp].offset or 0
    return _latest_checkpoints(config, load_id, tp, end), topic_id


@contextmanager
def topic_id_lookup(config: Mapping[str, Any]) -> Iterator[Callable[[str], str | None]]:
    """Yield a function that returns the current id of a topic.

    The function raises UnknownTopicOrPartition and TimedOut.
    """
    with Admin(_settings_of(ADMIN, config)) as admin:
        yield lambda topic: admin.describe_topics([topic])[topic].topic_id


def _latest_checkpoints(
    config: Mapping[str, Any], load_id: str, tp: TopicPartition, end: int
) -> list[FileCheckpoint]:
    latest: dict[int, FileCheckpoint] = {}
    settings = {"isolation.level": "read_committed", "request.timeout.ms": _TIMEOUT_MS}
    with Consumer({**_settings_of(CONSUMER, config), **settings}) as consumer:
        start = consumer.beginning_offsets([tp])[tp]
        for batch in consumer.fetch_range(tp, start, end) if start < end else ():
            for key, value in zip(
                batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True
            ):
                if (index := _file_number(key, load_id)) is None:
                    continue
                if value is None:
                    # A tombstone: somebody deleted the checkpoint. Ignore the checkpoint, as after
                    # compaction.
                    latest.pop(index, None)
                else:
                    latest[index] = decode_checkpoint(value)
    if missing := set(range(len(latest))) - latest.keys():
        raise PeerError(
            f"the checkpoint of file number {min(missing)} of load {load_id!r} is missing in "
            f"{CHECKPOINT_TOPIC}: delete the load's other checkpoints too, or use another load id"
        )
    return [latest[index] for index in range(len(latest))]


def _file_number(key: bytes | None, load_id: str) -> int | None:
    """Return the file number in a record's key, or None if the key is not of a checkpoint of this load.

    Any program may write to the topic. A foreign key must not stop the loads whose checkpoints are in the
    same partition. See test_foreign_records_beside_checkpoints_do_not_stop_a_load.
    """
    name, _, number = (key or b"").rpartition(b"/")
    return int(number) if name == load_id.encode() and number.isdigit() and len(number) <= 9 else None


def _settings_of(table: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if table.get(key)}


def _ensure_topic(admin: Admin) -> None:
    description = admin.describe_topics([CHECKPOINT_TOPIC], raise_errors=False)[CHECKPOINT_TOPIC]
    if isinstance(description.error, UnknownTopicOrPartition):
        try:
            admin.create_topics(
                [NewTopic(CHECKPOINT_TOPIC, PARTITIONS, configs={"cleanup.policy": "compact"})]
            )
            return
        except TopicAlreadyExists:
            # Another load has created the topic after it was looked up.
            pass
    elif description.error is not None:
        raise description.error
    resource = ConfigResource("topic", CHECKPOINT_TOPIC)
    try:
        policy = admin.describe_configs([resource])[resource].entries["cleanup.policy"].value
    except UnknownTopicOrPartition:
        # Another load is creating the topic, and this broker does not know about it yet.
        return
    if policy != "compact":
        raise MisuseError(
            f"topic {CHECKPOINT_TOPIC} has cleanup.policy={policy}, which loses the "
            "checkpoints of loads; set cleanup.policy=compact"
        )
