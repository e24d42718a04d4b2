"""The marks of all loads: a compacted topic, written in the transactions that store the records.

Not a group's offsets: those are forgotten offsets.retention.minutes (a week) after the last commit, and a
load repeated then would double everything.
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
from oncelog.load.decisions import Mark
from oncelog.types import TopicPartition

MARKS_TOPIC = "oncelog-loads"
PARTITIONS = 16
"""Fixed: a load's partition must not move when the topic gets more."""
_FORMAT = 1
_PATIENCE_MS = 90_000
"""Longer than the transaction of a loader that was killed, by the default of transaction.timeout.ms."""


def marks_partition(load_id: str) -> TopicPartition:
    """Where a load's marks stand."""
    return TopicPartition(MARKS_TOPIC, positive_murmur2(load_id.encode()) % PARTITIONS)


def encode_mark(load_id: str, index: int, mark: Mark) -> tuple[bytes, bytes]:
    """Key and value of the record for file number `index`."""
    return f"{load_id}/{index}".encode(), json.dumps({"version": _FORMAT, **mark._asdict()}).encode()


def decode_mark(value: bytes) -> Mark:
    """Raises PeerError for what a later version wrote."""
    fields = json.loads(value)
    if fields.pop("version", None) != _FORMAT:
        raise PeerError(f"a mark in {MARKS_TOPIC} was written by another version: {value[:200]!r}")
    return Mark(**fields)


def read_marks(config: Mapping[str, Any], load_id: str, topic: str) -> tuple[list[Mark], str | None]:
    """The marks of the files of a load, in order, and the id that its topic has now (None: no such ids).

    Call it when older loaders are fenced. Waits for transactions of others that were begun before. Raises
    TimedOut, UnknownTopicOrPartition (`topic`), MisuseError (the marks' topic loses records).
    """
    at = marks_partition(load_id)
    with Admin(_settings_of(ADMIN, config)) as admin:
        topic_id = admin.describe_topics([topic])[topic].topic_id
        _ensure_topic(admin)
        end = admin.list_offsets({at: "latest"})[at].offset or 0
    return _newest(config, load_id, at, end), topic_id


@contextmanager
def topic_ids(config: Mapping[str, Any]) -> Iterator[Callable[[str], str | None]]:
    """Return a function for the id that a topic has now. It raises UnknownTopicOrPartition, TimedOut."""
    with Admin(_settings_of(ADMIN, config)) as admin:
        yield lambda topic: admin.describe_topics([topic])[topic].topic_id


def _newest(config: Mapping[str, Any], load_id: str, at: TopicPartition, end: int) -> list[Mark]:
    newest: dict[int, Mark] = {}
    settings = {"isolation.level": "read_committed", "request.timeout.ms": _PATIENCE_MS}
    with Consumer({**_settings_of(CONSUMER, config), **settings}) as consumer:
        start = consumer.beginning_offsets([at])[at]
        for batch in consumer.fetch_range(at, start, end) if start < end else ():
            for key, value in zip(
                batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True
            ):
                name, _, index = key.decode().rpartition("/")
                if name == load_id:
                    newest[int(index)] = decode_mark(value)
    return [newest[index] for index in sorted(newest)]


def _settings_of(table: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if table.get(key)}


def _ensure_topic(admin: Admin) -> None:
    found = admin.describe_topics([MARKS_TOPIC], raise_errors=False)[MARKS_TOPIC]
    if isinstance(found.error, UnknownTopicOrPartition):
        try:
            admin.create_topics([NewTopic(MARKS_TOPIC, PARTITIONS, configs={"cleanup.policy": "compact"})])
            return
        except TopicAlreadyExists:
            pass  # another load was quicker
    elif found.error is not None:
        raise found.error
    resource = ConfigResource("topic", MARKS_TOPIC)
    try:
        policy = admin.describe_configs([resource])[resource].entries["cleanup.policy"].value
    except UnknownTopicOrPartition:
        return  # another load makes it just now, and not every broker has heard of it
    if policy != "compact":
        raise MisuseError(
            f"topic {MARKS_TOPIC} has cleanup.policy={policy}, which loses the marks of loads; "
            "it must be compact"
        )
