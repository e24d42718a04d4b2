"""The file checkpoints of all loads: a compacted topic, written in the transactions that store the records.

They are not committed offsets of a group: those expire offsets.retention.minutes (a week) after the last
commit. A load that is repeated after that would store everything twice. Checkpoints are read only after
`init_transactions`, up to the high watermark and not the last stable offset: another application's open
transaction must hide none. See test_another_open_transaction_hides_no_mark.
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
"""Fixed: the checkpoints of a load must stay in one partition when the topic gets more."""
_FORMAT = 1
_TIMEOUT_MS = 90_000
"""Longer than the transaction of a killed loader lasts with the default of transaction.timeout.ms."""


def checkpoint_partition(load_id: str) -> TopicPartition:
    """Return the partition that has the checkpoints of a load."""
    return TopicPartition(CHECKPOINT_TOPIC, positive_murmur2(load_id.encode()) % PARTITIONS)


def encode_checkpoint(load_id: str, index: int, checkpoint: FileCheckpoint) -> tuple[bytes, bytes]:
    """Return the key and value of the record for file number `index`."""
    return f"{load_id}/{index}".encode(), json.dumps({"version": _FORMAT, **checkpoint._asdict()}).encode()


def decode_checkpoint(value: bytes) -> FileCheckpoint:
    """Return the checkpoint in a record's value. Raises PeerError if a later version has written it."""
    fields = json.loads(value)
    if fields.pop("version", None) != _FORMAT:
        raise PeerError(f"a checkpoint in {CHECKPOINT_TOPIC} was written by another version: {value[:200]!r}")
    return FileCheckpoint(**fields)


def read_checkpoints(
    config: Mapping[str, Any], load_id: str, topic: str
) -> tuple[list[FileCheckpoint], str | None]:
    """Return the checkpoints of a load's files, in order, and the topic's present id.

    The id is None on a cluster without topic ids. Call it after older loaders have been fenced. It waits for
    the end of transactions that others began before.

    Raises TimedOut, UnknownTopicOrPartition (`topic`), and MisuseError if the checkpoint topic is not
    compacted.
    """
    tp = checkpoint_partition(load_id)
    with Admin(_settings_of(ADMIN, config)) as admin:
        topic_id = admin.describe_topics([topic])[topic].topic_id
        _ensure_topic(admin)
        end = admin.list_offsets({tp: "latest"})[tp].offset or 0
    return _latest_checkpoints(config, load_id, tp, end), topic_id


@contextmanager
def topic_id_lookup(config: Mapping[str, Any]) -> Iterator[Callable[[str], str | None]]:
    """Provide a function that returns a topic's present id, or raises UnknownTopicOrPartition or TimedOut."""
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
                name, _, index = key.decode().rpartition("/")
                if name == load_id:
                    latest[int(index)] = decode_checkpoint(value)
    return [latest[index] for index in sorted(latest)]


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
            pass  # another load has created it meanwhile
    elif description.error is not None:
        raise description.error
    resource = ConfigResource("topic", CHECKPOINT_TOPIC)
    try:
        policy = admin.describe_configs([resource])[resource].entries["cleanup.policy"].value
    except UnknownTopicOrPartition:
        return  # another load is creating it, and not every broker knows it yet
    if policy != "compact":
        raise MisuseError(
            f"topic {CHECKPOINT_TOPIC} has cleanup.policy={policy}, which loses the checkpoints of loads; "
            "it must be compact"
        )
