"""Clients on a cluster that loses its majority, its leaders and many nodes (behaviour I26)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka, KafkaNode
from support.broker import wait_until
from support.foreign.functions import stored_batches

from oncelog import Admin, Consumer, NewTopic, Producer, TopicPartition
from oncelog.audit.partition import Finding, PartitionAudit, StoredBatch
from oncelog.client.producer.delivery import RecordFuture
from oncelog.errors import TimedOut
from oncelog.wire.header import iter_batches

PARTITIONS = 3
QUICK = {"broker.session.timeout.ms": 3000, "broker.heartbeat.interval.ms": 500}


@pytest.fixture(scope="module")
def cluster(kafka_class_path: str) -> Iterator[ApacheKafka]:
    with ApacheKafka(nodes=3, heap_mb=256, properties=QUICK) as cluster:
        yield cluster


class Load:
    """Numbered records, produced in turn to the partitions of a new topic."""

    def __init__(self, cluster: ApacheKafka, topic: str, producer: Producer, admin: Admin) -> None:
        self.servers, self.topic, self.producer = cluster.bootstrap_servers, topic, producer
        self.futures: list[RecordFuture] = []
        admin.create_topics([NewTopic(topic, PARTITIONS, 3, {"min.insync.replicas": 2})])

    def send(self, count: int) -> None:
        for _ in range(count):
            number = len(self.futures)
            self.futures.append(self.producer.send(self.topic, b"%d" % number, partition=number % PARTITIONS))

    def expected(self, partition: int) -> list[bytes]:
        return [b"%d" % number for number in range(partition, len(self.futures), PARTITIONS)]

    def check(self) -> None:
        """Check that all records are stored once and in order, and that the audit finds no violation."""
        self.producer.flush(60)
        assert [future.exception(0) for future in self.futures] == [None] * len(self.futures)
        with Consumer({"bootstrap.servers": self.servers}) as consumer:
            for partition in range(PARTITIONS):
                at = TopicPartition(self.topic, partition)
                batches = consumer.fetch_range(at, 0, consumer.end_offsets([at])[at])
                values = [value for batch in batches for value in batch["value"].to_pylist()]
                assert values == self.expected(partition)
        assert audit(self.servers, self.topic) == []


def audit(servers: str, topic: str) -> list[Finding]:
    """Return the findings of an audit of the batch headers. Reading the values verifies the checksums."""
    findings: list[Finding] = []
    for headers in stored_batches(servers, topic, PARTITIONS):
        judge = PartitionAudit()
        for header in headers:
            count = header.last_offset_delta + 1
            last = header.base_offset + header.last_offset_delta
            who = (header.producer_id, header.producer_epoch, header.base_sequence)
            judge.see(StoredBatch(header.base_offset, last, *who, count, header.records_count, False, True))
        findings += judge.finish()[0]
    return findings


def is_whole(admin: Admin, topic: str) -> bool:
    """Return True if every replica is in sync."""
    described = admin.describe_topics([topic])[topic]
    return all(len(part.in_sync_replicas) == 3 for part in described.partitions)


def records_in_files(node: KafkaNode, topic: str) -> int:
    logs = [path.read_bytes() for path in node.data_dir.glob(f"{topic}-*/*.log")]
    return sum(header.records_count for log in logs for _, header in iter_batches(log))


@pytest.mark.behaviour("I26")
def test_without_a_majority_no_record_is_acknowledged(cluster: ApacheKafka) -> None:
    """Records that only the last node stored must not be doubled by the retries that later succeed."""
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    quick = {"request.timeout.ms": 2000, "linger.ms": 2}
    with Admin(servers) as admin, Producer({**servers, **quick}) as producer:
        load = Load(cluster, "majority", producer, admin)
        load.send(90)
        producer.flush(60)
        for node in cluster.nodes[:2]:
            node.kill()
        load.send(90)
        with pytest.raises(TimedOut):
            producer.flush(5)
        wait_until(lambda: producer.metrics()["record-retry-total"] > 0)
        # The last node has stored these records, but not acknowledged them.
        wait_until(lambda: records_in_files(cluster.nodes[2], "majority") > 90)
        assert not any(future.done() for future in load.futures[90:])
        for node in cluster.nodes[:2]:
            node.launch()
        for node in cluster.nodes[:2]:
            node.wait_until_ready()
        load.check()
        wait_until(lambda: is_whole(admin, "majority"), 200)


@pytest.mark.behaviour("I26")
def test_consumer_and_admin_follow_leaders(cluster: ApacheKafka) -> None:
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(servers) as admin, Producer(servers) as producer, Consumer(servers) as consumer:
        load = Load(cluster, "followed", producer, admin)
        places = [TopicPartition("followed", partition) for partition in range(PARTITIONS)]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        seen: dict[int, list[bytes | None]] = {partition: [] for partition in range(PARTITIONS)}

        def has_read_all() -> bool:
            for record in consumer.poll(0.2):
                seen[record.partition].append(record.value)
            return sum(map(len, seen.values())) >= len(load.futures)

        def first_leader() -> int | None:
            return admin.describe_topics(["followed"])["followed"].partitions[0].leader

        for end in (KafkaNode.stop, KafkaNode.kill):
            load.send(90)
            wait_until(has_read_all, 200)
            leader = first_leader()
            node = cluster.nodes[(leader or 0) - 1]
            end(node)
            load.send(90)
            wait_until(has_read_all, 200)
            # Wait, because the metadata of these clients may still name the old leader, and the third node
            # may learn of the new one late.
            wait_until(lambda before=leader: first_leader() not in (before, None))  # type: ignore[misc]
            assert sum(consumer.end_offsets(places).values()) == len(load.futures)
            node.start()
            wait_until(lambda: is_whole(admin, "followed"), 200)
        assert [seen[partition] for partition in seen] == [load.expected(partition) for partition in seen]
        load.check()


@contextmanager
def frozen(nodes: Sequence[KafkaNode]) -> Iterator[None]:
    """Stop the processes of these nodes, and let them continue at the end of the `with` statement."""
    for node in nodes:
        os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for node in nodes:
            os.kill(node.pid, signal.SIGCONT)


def values_of(servers: dict[str, str], topic: str) -> list[bytes]:
    with Consumer(servers) as consumer:
        tp = TopicPartition(topic, 0)
        batches = consumer.fetch_range(tp, 0, consumer.end_offsets([tp])[tp])
        return [value for batch in batches for value in batch["value"].to_pylist()]


@pytest.mark.behaviour("I30")
def test_acks_1_loses_acknowledged_records_with_their_leader(cluster: ApacheKafka) -> None:
    """The followers are frozen, so they do not copy the records that the leader acknowledges before it is
    killed.

    A follower's fetch that already waits at the leader may still return the first of these records.
    """
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    hasty_settings = {**servers, "acks": "1", "enable.idempotence": "false"}
    with Admin(servers) as admin, Producer(servers) as safe, Producer(hasty_settings) as hasty:
        admin.create_topics([NewTopic("hasty", 1, 3, {"min.insync.replicas": 2})])
        for producer in (hasty, safe):
            producer.send("hasty", b"first").result(60)
        wait_until(lambda: is_whole(admin, "hasty"))
        leader = cluster.nodes[(admin.describe_topics(["hasty"])["hasty"].partitions[0].leader or 0) - 1]
        with frozen([node for node in cluster.nodes if node is not leader]):
            for number in range(5):
                hasty.send("hasty", b"hasty %d" % number).result(60)
            waiting = [safe.send("hasty", b"safe %d" % number) for number in range(5)]
            wait_until(lambda: records_in_files(leader, "hasty") == 12)
            assert not any(future.done() for future in waiting)
            leader.kill()
        safe.flush(60)
        assert [future.exception(0) for future in waiting] == [None] * 5
        kept = values_of(servers, "hasty")
        assert b"hasty 4" not in kept
        assert [value for value in kept if value.startswith(b"safe")] == [b"safe %d" % n for n in range(5)]
        leader.start()
        wait_until(lambda: is_whole(admin, "hasty"), 200)
        assert values_of(servers, "hasty") == kept


@pytest.mark.soak
@pytest.mark.behaviour("I26")
def test_no_record_is_lost_or_doubled_over_thirty_node_failures(cluster: ApacheKafka) -> None:
    chance = random.Random(26)
    servers = {"bootstrap.servers": cluster.bootstrap_servers}
    with Admin(servers) as admin, Producer({**servers, "linger.ms": 2}) as producer:
        load = Load(cluster, "soaked", producer, admin)
        for _ in range(30):
            node = chance.choice(cluster.nodes)
            load.send(2_000)
            chance.choice([KafkaNode.stop, KafkaNode.kill])(node)
            load.send(2_000)
            node.start()
            wait_until(lambda: is_whole(admin, "soaked"), 200)
        load.check()
