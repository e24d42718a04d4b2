"""The example on a Spark cluster and three Apache Kafka brokers that are killed in turn (behaviour P3)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from oncelog_devtools.spark_cluster import SparkCluster
from support.cli import oncelog
from support.spark.enrich_cluster import create_topics, expected, launch_forward, read_values, send_orders
from support.wait import attempts, pause

from oncelog import Admin, Consumer, Producer, TopicPartition

pytestmark = [pytest.mark.soak, pytest.mark.spark, pytest.mark.timeout(3600)]
PROPERTIES = {
    "broker.session.timeout.ms": 6000,
    "broker.heartbeat.interval.ms": 500,
    "offsets.topic.num.partitions": 6,
    "transaction.state.log.num.partitions": 6,
}
"""Settings with which the death of a client or node is noticed soon. Few partitions, so that a restarted
broker opens few files.
"""
ROUNDS = 6
PATIENCE_S = 900
MOST_STARTS = 20


class Feed:
    """A thread whose producer sends orders continuously. `sent` counts the orders."""

    def __init__(self, servers: str, topic: str) -> None:
        self.servers, self.topic, self.sent = servers, topic, 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        settings = {"bootstrap.servers": self.servers, "delivery.timeout.ms": PATIENCE_S * 1000}
        with Producer(settings) as producer:
            while not self._ends.wait(0.2):
                send_orders(producer, self.topic, range(self.sent, self.sent + 50))
                self.sent += 50

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and wait until all sent orders are stored."""
        self._ends.set()
        self._thread.join()


def is_whole(admin: Admin) -> bool:
    """Return True if every replica of every topic, internal ones included, is in sync."""
    names = [topic.name for topic in admin.list_topics(include_internal=True)]
    described = admin.describe_topics(names)
    return all(len(part.in_sync_replicas) == 3 for each in described.values() for part in each.partitions)


class Run:
    """A run of the example. The test kills brokers and workers during it, and it is started again after each
    failure.
    """

    def __init__(self, kafka: ApacheKafka, spark: SparkCluster, directory: Path, *told: str) -> None:
        self.kafka, self.spark, self.directory = kafka, spark, directory
        self._told, self.starts = told, 0

    def __enter__(self) -> Run:
        self._launch()
        return self

    def __exit__(self, *_: object) -> None:
        self._program.terminate()
        self._program.wait(200)

    def _launch(self) -> None:
        self.starts += 1
        assert self.starts <= MOST_STARTS, self.log[-6000:]
        self._program = launch_forward(self.directory, *self._told)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def batches_done(self) -> int:
        commits = self.directory / "checkpoint" / "commits"
        return sum(path.name.isdecimal() for path in commits.glob("*"))

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait until the condition is true. Start the example again whenever it has ended."""
        for _ in attempts(lambda: self.log[-6000:], PATIENCE_S):
            if is_done():
                return
            if self._program.poll() is not None:
                print(
                    f"failed: {[line for line in self.log.splitlines() if line.startswith('Caused by')][-1:]}"
                )
                self._launch()
            pause(0.5)

    def advance(self) -> None:
        """Wait until two more micro-batches are committed."""
        wanted = self.batches_done + 2
        self.until(lambda: self.batches_done >= wanted)

    def kill_in_turn(self, chance: random.Random) -> None:
        """Kill one broker after another, and a worker in every third round.

        Each one is running again before the next kill.
        """
        with Admin({"bootstrap.servers": self.kafka.bootstrap_servers}) as admin:
            for number in range(ROUNDS):
                broker = self.kafka.nodes[number % 3]
                killed = [broker, self.spark.workers[number % 2]] if number % 3 == 1 else [broker]
                for node in killed:
                    pause(chance.uniform(0, 2))
                    node.kill()
                self.advance()
                for node in killed:
                    node.start()
                self.spark.wait_until_formed()
                self.until(lambda: is_whole(admin))
                print(f"killed {[node.name for node in killed]} after {self.batches_done} micro-batches")


@pytest.fixture(scope="module")
def kafka(kafka_class_path: str) -> Iterator[ApacheKafka]:
    with ApacheKafka(nodes=3, heap_mb=320, properties=PROPERTIES) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def spark_cluster() -> Iterator[SparkCluster]:
    with SparkCluster(memory_mb=512) as spark:
        yield spark


@pytest.mark.behaviour("P3")
@pytest.mark.parametrize("options", [(), ("--atomic",)], ids=["lane", "atomic"])
def test_the_example_is_exactly_once_while_brokers_and_workers_are_killed(
    kafka: ApacheKafka, spark_cluster: SparkCluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    servers, source, target = kafka.bootstrap_servers, f"orders{len(options)}", f"taxed{len(options)}"
    create_topics(servers, source, target, replicas=3)
    told = (servers, source, target, *options)
    with Run(kafka, spark_cluster, tmp_path, spark_cluster.master_url, *told, "--follow") as run:
        with Feed(servers, source) as feed:
            run.advance()
            run.kill_in_turn(random.Random(3))
        run.until(lambda: read_values(servers, target).total() >= feed.sent)
    # The example runs once more, only to complete the last micro-batch.
    with launch_forward(tmp_path, "local[2]", *told) as program:
        assert program.wait(PATIENCE_S) == 0, run.log[-6000:]
    assert read_values(servers, target) == expected(feed.sent)
    report(run, target, feed.sent)
    audited = oncelog("audit", source, target, servers=servers)
    assert audited.code == 0, audited.out + audited.err


def report(run: Run, target: str, sent: int) -> None:
    """Print the figures for docs/clusters.md (visible with pytest -s)."""
    servers = {"bootstrap.servers": run.kafka.bootstrap_servers}
    with Consumer(servers, isolation_level="read_uncommitted") as consumer:
        ends = consumer.end_offsets([TopicPartition(target, number) for number in range(3)])
        stored = sum(batch.num_rows for at, end in ends.items() for batch in consumer.fetch_range(at, 0, end))
    print(f"{sent} orders, {run.batches_done} micro-batches, {stored - sent} rows of aborted transactions")
    print(f"{run.starts} starts, {run.log.count('Lost task')} lost tasks")
    print(f"{run.log.count('is written again')} micro-batches written again")
