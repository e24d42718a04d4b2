"""Topics, producers and readers for tests over real sockets."""

from __future__ import annotations

import itertools
from typing import Any

from oncelog import Admin, Consumer, NewTopic, Producer, Record, TopicPartition
from oncelog.testing.proxy import Proxy, WireEvent
from support.wait import wait_until

_numbers = itertools.count()


def new_topic(servers: str, partitions: int = 1, **configs: object) -> str:
    """Create a topic that no other test uses. Keywords are topic settings with underscores for dots."""
    name = f"produced-{next(_numbers)}"
    settings = {key.replace("_", "."): str(value) for key, value in configs.items()}
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic(name, partitions, configs=settings)])
    return name


def producer_of(servers: str, **settings: Any) -> Producer:
    """Return a producer with short waits. Keywords are settings with underscores for dots."""
    quick = {"linger_ms": 0, "retry_backoff_ms": 10, "retry_backoff_max_ms": 50, "max_block_ms": 60_000}
    return Producer({"bootstrap.servers": servers}, **{**quick, **settings})


def read(servers: str, topic: str) -> list[Record]:
    """Return every committed record of the topic, ordered by partition and offset."""
    with Consumer({"bootstrap.servers": servers}) as consumer:
        tps = [TopicPartition(topic, part.partition) for part in consumer.partitions_for(topic)]
        wait_for_markers(servers, tps, consumer)
        consumer.assign(tps)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(tps)
        records: list[Record] = []
        while any(consumer.position(tp) < end for tp, end in ends.items()):
            records += consumer.poll(1)
    return sorted(records, key=lambda record: (record.partition, record.offset))


def wait_for_markers(servers: str, tps: list[TopicPartition], committed: Consumer) -> None:
    """Wait until all ended transactions in these partitions have their markers.

    Apache Kafka may answer a commit before its markers are written, and our broker before they are synced.
    """
    uncommitted = {"bootstrap.servers": servers, "isolation.level": "read_uncommitted"}
    with Consumer(uncommitted) as everything, Admin({"bootstrap.servers": servers}) as admin:

        def are_written() -> bool:
            ends, stable = everything.end_offsets(tps), committed.end_offsets(tps)
            behind = [tp for tp in tps if stable[tp] < ends[tp]]
            return not behind or _are_begun(admin, behind)

        wait_until(are_written)


def _are_begun(admin: Admin, tps: list[TopicPartition]) -> bool:
    """Return True if each partition has a transaction that its application has not ended."""
    ongoing = {transaction.producer_id for transaction in admin.list_transactions("Ongoing")}
    described = admin.describe_producers(tps).values()
    return all(
        ongoing & {transaction.producer_id for transaction in found.open_transactions()}
        for found in described
    )


def values(servers: str, topic: str) -> list[bytes | None]:
    """Return every committed value of the topic, ordered by partition and offset."""
    return [record.value for record in read(servers, topic)]


def requests(proxy: Proxy, api: str = "Produce") -> list[WireEvent]:
    """Return the requests of one API that clients sent to the proxy, without the copies and releases that it
    made itself.
    """
    return [
        event
        for event in proxy.events
        if event.direction == "request" and event.api == api and event.fate not in ("released", "copy")
    ]


def sequences(proxy: Proxy) -> list[int | None]:
    """Return the base sequences of all batches that clients sent to the proxy, in order."""
    return [batch.base_sequence for event in requests(proxy) for batch in event.batches]
