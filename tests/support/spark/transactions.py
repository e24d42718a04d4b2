"""Topics with committed, aborted, open and compacted transactions, for Spark to read."""

from __future__ import annotations

from typing import Any

from oncelog import Admin, Consumer
from oncelog.types import Isolation, TopicPartition
from support.broker import wait_until
from support.spark.topics import START_MS, create_topic

RECORDS = 10
"""Records per transaction. Its marker takes one more offset."""


def write_transactions(bootstrap: str, topic: str, outcomes: str, *, same_keys: bool = False) -> list[Any]:
    """Write one transaction of ten records for each letter: c (committed), a (aborted) or o (open).

    Return the producers of the open ones. With `same_keys`, each transaction has the same keys as the one
    before.
    """
    from confluent_kafka import Producer

    still_open = []
    for number, outcome in enumerate(outcomes):
        settings = {"bootstrap.servers": bootstrap, "transactional.id": f"{topic}-{number}"}
        # Open transactions must not time out on a slow machine.
        producer = Producer(settings | {"transaction.timeout.ms": 600_000})
        producer.init_transactions(60)
        producer.begin_transaction()
        for n in range(RECORDS):
            key = f"{n}" if same_keys else f"{number}-{n}"
            when = START_MS + RECORDS * number + n
            producer.produce(topic, key=key, value=f"{outcome}{number}", partition=0, timestamp=when)
        producer.flush(60)
        if outcome == "c":
            producer.commit_transaction(60)
        elif outcome == "a":
            producer.abort_transaction(60)
        else:
            still_open.append(producer)
    return still_open


def wait_for_stable_end(bootstrap: str, topic: str, offset: int) -> None:
    """Wait until `offset` is the last stable offset. Apache Kafka may answer a commit before it has written
    the markers.
    """
    tp = TopicPartition(topic, 0)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        wait_until(
            lambda: admin.list_offsets({tp: "latest"}, Isolation.READ_COMMITTED)[tp].offset == offset, 60
        )


def committed_offsets(bootstrap: str, topic: str) -> list[int]:
    """Return the offsets that our own read_committed consumer gets from partition 0."""
    tp = TopicPartition(topic, 0)
    with Consumer({"bootstrap.servers": bootstrap, "isolation.level": "read_committed"}) as consumer:
        pieces = consumer.fetch_range(tp, 0, consumer.end_offsets([tp])[tp])
        return [offset for piece in pieces for offset in piece.column("offset").to_pylist()]


def create_compacted(bootstrap: str, topic: str, outcomes: str) -> list[int]:
    """Create a topic with transactions, and wait until compaction has removed half of the committed records.

    Return the offsets that a read_committed reader gets.
    """
    create_topic(
        bootstrap, topic, cleanup_policy="compact", segment_ms=RECORDS // 2, min_cleanable_dirty_ratio=0.001
    )
    write_transactions(bootstrap, topic, outcomes, same_keys=True)
    wait_for_stable_end(bootstrap, topic, (RECORDS + 1) * len(outcomes))
    before = RECORDS * outcomes.count("c")
    wait_until(lambda: len(committed_offsets(bootstrap, topic)) <= before // 2, 200)
    return committed_offsets(bootstrap, topic)
