"""`oncelog dev kafka`: clusters of Apache Kafka with one node and with three replicating nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka, KafkaNode
from support.broker import wait_until
from support.cli import oncelog

from oncelog import Admin, Consumer, NewTopic, Producer, TopicPartition
from oncelog.client.admin.types import ConfigResource
from oncelog.client.producer.delivery import RecordFuture
from oncelog.errors import OncelogError, TimedOut

TOPIC = "replicated"


@pytest.fixture
def directory(tmp_path: Path, kafka_class_path: str) -> Iterator[str]:
    yield str(tmp_path / "kafka")
    oncelog("dev", "kafka", "stop", "--directory", str(tmp_path / "kafka"))


def test_a_node_starts_reports_its_status_and_stops(directory: str) -> None:
    started = oncelog("dev", "kafka", "start", "--directory", directory, "-X", "num.partitions=4")
    assert started.code == 0, started.err
    bootstrap_servers = started.out.strip()
    oncelog("topics", "create", "kept", servers=bootstrap_servers)

    def listed() -> list[tuple[str, int]]:
        rows = json.loads(oncelog("topics", "list", "-o", "json", servers=bootstrap_servers).out)
        return [(row["topic"], row["partitions"]) for row in rows]

    # Apache Kafka's broker gets a new topic from the controller a moment after the creation is answered.
    wait_until(lambda: listed() == [("kept", 4)])

    (node,) = json.loads(oncelog("dev", "kafka", "status", "--directory", directory, "-o", "json").out)
    assert (node["address"], node["state"]) == (bootstrap_servers, "running")
    again = oncelog("dev", "kafka", "start", "--directory", directory)
    assert again.code == 2 and "oncelog dev kafka stop" in again.err

    stopped = oncelog("dev", "kafka", "stop", "--directory", directory)
    assert stopped.out == f"stopped node 1 (pid {node['pid']})\n"
    (node,) = json.loads(oncelog("dev", "kafka", "status", "--directory", directory, "-o", "json").out)
    assert node["state"] == "stopped"
    assert oncelog("dev", "kafka", "stop", "--directory", directory).out == ""
    other = oncelog("dev", "kafka", "start", "--directory", directory, "--nodes", "3")
    assert other.code == 2 and "another directory" in other.err


def test_a_process_id_that_is_someone_elses_is_left_alone(tmp_path: Path) -> None:
    row = [1, 9092, os.getpid(), str(tmp_path / "server.properties")]
    (tmp_path / "cluster.json").write_text(json.dumps({"version": "4", "nodes": [row]}))
    assert oncelog("dev", "kafka", "stop", "--directory", str(tmp_path)).out == ""
    (tmp_path / "cluster.json").write_text("not json")
    broken = oncelog("dev", "kafka", "status", "--directory", str(tmp_path))
    assert broken.code == 1 and "cluster.json" in broken.err


def test_without_java_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = oncelog("dev", "kafka", "start", "--directory", str(tmp_path / "kafka"))
    assert refused.code == 1 and "needs java" in refused.err


def test_a_node_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path, kafka_class_path: str) -> None:
    (tmp_path / "broken.properties").write_text("process.roles=nonsense\n")
    command = ["java", "-cp", kafka_class_path, "kafka.Kafka", str(tmp_path / "broken.properties")]
    node = KafkaNode(1, 1, tmp_path, command)
    with pytest.raises(TimedOut, match="nonsense"):
        node.start()
    with pytest.raises(OncelogError, match="not running"):
        _ = node.pid


class Load:
    """Numbered records, produced in turn to three partitions. Each must be stored once, in order."""

    def __init__(self, producer: Producer) -> None:
        self.producer, self.sent, self.futures = producer, 0, list[RecordFuture]()

    def send(self, count: int) -> None:
        for _ in range(count):
            future = self.producer.send(TOPIC, b"%d" % self.sent, partition=self.sent % 3)
            self.futures.append(future)
            self.sent += 1

    def check(self, bootstrap_servers: str) -> None:
        self.producer.flush(60)
        assert [future.exception(0) for future in self.futures] == [None] * self.sent
        with Consumer({"bootstrap.servers": bootstrap_servers}) as consumer:
            for partition in range(3):
                at = TopicPartition(TOPIC, partition)
                end = consumer.end_offsets([at])[at]
                batches = consumer.fetch_range(at, 0, end)
                values = [value for batch in batches for value in batch["value"].to_pylist()]
                assert values == [b"%d" % number for number in range(partition, self.sent, 3)]


@pytest.mark.soak
@pytest.mark.behaviour("I26")
def test_our_producer_loses_nothing_while_nodes_are_stopped_and_killed(kafka_class_path: str) -> None:
    quick = {"broker.session.timeout.ms": 3000, "broker.heartbeat.interval.ms": 500}
    with ApacheKafka(nodes=3, heap_mb=256, properties=quick) as cluster:
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        with Admin(servers) as admin, Producer({**servers, "linger.ms": 2}) as producer:
            wait_until(lambda: len(admin.describe_cluster().brokers) == 3)
            topic = NewTopic(TOPIC, 3, 3, {"min.insync.replicas": 2})
            admin.create_topics([topic])
            load = Load(producer)
            for end in (KafkaNode.stop, KafkaNode.kill, KafkaNode.kill):
                node = cluster.nodes[load.sent % 3]
                load.send(300)
                end(node)
                load.send(301)
                producer.flush(60)
                node.start()
            load.check(cluster.bootstrap_servers)

            # With too few replicas in sync, the broker rejects batches without storing them, and the producer
            # retries.
            admin.alter_configs({ConfigResource("topic", TOPIC): {"min.insync.replicas": 3}})
            cluster.nodes[2].stop()
            load.send(30)
            with pytest.raises(TimedOut):
                producer.flush(3)
            assert not any(future.done() for future in load.futures[-30:])
            assert producer.metrics()["record-retry-total"] > 0
            cluster.nodes[2].start()
            load.check(cluster.bootstrap_servers)
