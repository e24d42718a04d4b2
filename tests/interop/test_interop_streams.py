"""Kafka Streams with exactly_once_v2 on our broker: the results are exact although instances and the broker
are killed.
"""

from __future__ import annotations

import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import VERSION
from support.foreign.clients import CACHE, Command, compiled_java, prepare
from support.foreign.functions import make_topic
from support.topics import read
from support.wait import LIMIT_S, pause, wait_until

from oncelog import Producer
from oncelog.testing.broker_process import BrokerProcess

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>oncelog</groupId><artifactId>streams</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-streams</artifactId><version>{VERSION}</version></dependency>
</dependencies></project>
"""
PARTITIONS = 2
pytestmark = pytest.mark.timeout(400)  # the first run downloads 73 MB


@pytest.fixture(scope="module")
def streams(kafka_class_path: str, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Download the jars that Streams needs in addition to Kafka's own, and compile the application, once."""
    home = CACHE / f"kafka-streams-{VERSION}"
    if not (home / "complete").exists():
        home.mkdir(parents=True, exist_ok=True)
        (home / "pom.xml").write_text(POM)
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
        prepare([*command, "-DincludeArtifactIds=kafka-streams,rocksdbjni"], "Kafka Streams", home)
        (home / "complete").touch()
    # RocksDB unpacks its library into this directory at each start. A killed process does not remove it.
    temporary = f"-Djava.io.tmpdir={tmp_path_factory.mktemp('rocksdb')}"
    return compiled_java("Streams", f"{kafka_class_path}:{home}/jars/*", temporary)


class Numbers:
    """Send 0, 1, 2 ... to the topic until stopped, five hundred a second."""

    def __init__(self, servers: str) -> None:
        self.count = 0
        self._servers, self._is_over = servers, threading.Event()
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        with Producer({"bootstrap.servers": self._servers}) as producer:
            while not self._is_over.wait(0.01):
                for _ in range(5):
                    producer.send("numbers", b"%d" % self.count, partition=self.count % PARTITIONS)
                    self.count += 1

    def __enter__(self) -> Numbers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the application. Kill it at the end if it is still running."""
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def wait_for(holds: Callable[[], bool], logs: dict[str, Path]) -> None:
    wait_until(holds, LIMIT_S, lambda: [log.read_text(errors="replace")[-3000:] for log in logs.values()])


def passed(servers: str) -> list[int]:
    """Return the committed numbers of the topic `passed`, in no particular order."""
    return [int(record.value or b"") for record in read(servers, "passed")]


@pytest.mark.behaviour("T6", "T7")
def test_counts_and_copies_are_exact_over_kills(streams: Command, tmp_path: Path) -> None:
    """Kill and restart one instance, add a second, kill the first for good, and kill the broker.

    The remaining instance takes over the tasks and restores their state from its changelog.
    """
    chance = random.Random(5)
    logs = {name: tmp_path / f"{name}.log" for name in ("first", "second")}
    settings = {"group.min.session.timeout.ms": 500}
    with BrokerProcess(tmp_path / "data", settings=settings) as broker, ExitStack() as stack:
        servers = broker.bootstrap_servers
        for topic in ("numbers", "passed", "counts"):
            make_topic(servers, topic, PARTITIONS)

        def instance(name: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
            return running(streams(servers, name, str(tmp_path / name)), logs[name])

        def goes_on() -> None:
            before = len(passed(servers))
            wait_for(lambda: len(passed(servers)) > before, logs)

        with Numbers(servers) as numbers:
            with instance("first"):
                goes_on()
                pause(chance.uniform(0, 0.4))
            with instance("first"):
                goes_on()
                second = stack.enter_context(instance("second"))
                wait_for(lambda: "RUNNING" in logs["second"].read_text(), logs)
                pause(chance.uniform(0, 0.4))
            goes_on()
            broker.kill()
            broker.start()
            goes_on()
        wait_for(lambda: is_finished(servers, numbers.count), logs)
        second.communicate(timeout=200)
        assert second.returncode == 0
        check_exact(servers, numbers.count)


def counts(servers: str) -> dict[bytes | None, list[int]]:
    """Return the values in the topic `counts` by digit, in the order in which they were written."""
    told: dict[bytes | None, list[int]] = {}
    for record in read(servers, "counts"):
        told.setdefault(record.key, []).append(int(record.value or b""))
    return told


def is_finished(servers: str, count: int) -> bool:
    """Return True if all copies and counts have arrived.

    Copies and counts have different topics, so either may arrive last.
    """
    return len(passed(servers)) >= count <= sum(each[-1] for each in counts(servers).values())


def check_exact(servers: str, count: int) -> None:
    assert sorted(passed(servers)) == list(range(count))
    told = counts(servers)
    assert all(each == sorted(set(each)) for each in told.values()), "counts do not only grow"
    assert {key: each[-1] for key, each in told.items()} == Counter(b"%d" % (n % 10) for n in range(count))
