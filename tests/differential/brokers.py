"""Start and stop the two brokers of a run: ours and Apache Kafka."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oncelog_devtools.apache_kafka import ApacheKafka

from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.process import free_ports

SETTINGS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 200}
SHORT = {
    "group.min.session.timeout.ms": 1_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.min.heartbeat.interval.ms": 300,
    "group.consumer.heartbeat.interval.ms": 300,
}
"""Settings that permit members to request short time-outs, which can expire during a sequence."""
PROMPT = {
    "group.consumer.assignment.interval.ms": 0,
    "group.consumer.assignor.offload.enable": "false",
}
SMALL = {"log.index.size.max.bytes": 65_536, "log.segment.delete.delay.ms": 1_000}
"""Small indexes and an early removal of deleted files, because the runs create and delete thousands of
topics.

Both brokers need the same values, because descriptions of topics show these settings as defaults.
"""

AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
SECURITY = {
    "authorizer.class.name": AUTHORIZER,
    "super.users": "User:ANONYMOUS",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256",
}
"""Settings for an authorizer. Clients of the listener without authentication, which are anonymous, may do
everything.
"""
ONE_COORDINATOR = {"offsets.topic.num.partitions": 1}
"""One partition of the offsets topic, so that all groups have the same coordinator.

That coordinator looks a topic up when a group first needs the topic, and then knows it for all groups
(support/groups/topics.py).
"""
COMMON = SETTINGS | SHORT | SMALL | SECURITY | ONE_COORDINATOR
"""The settings of both brokers."""
SASL = "SASL_PLAINTEXT"
SASL_MODULE = "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config"


class SecuredBroker(BrokerProcess):
    """Our broker with a second listener, on which clients authenticate."""

    sasl_port = 0

    def _command(self) -> list[str]:
        ports = free_ports(2) if not self.sasl_port else [self.port, self.sasl_port]
        self.port, self.sasl_port = ports
        listen = [f"PLAINTEXT://127.0.0.1:{self.port}", f"{SASL}://127.0.0.1:{self.sasl_port}"]
        plain = super()._command()
        place = plain.index("--listen")
        return [
            *plain[:place],
            *(part for each in listen for part in ("--listen", each)),
            *plain[place + 2 :],
        ]


class OncelogUnderTest:
    """Our broker, run in a process by the fuzzer."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker

    @property
    def bootstrap_servers(self) -> str:
        return self._broker.bootstrap_servers

    @property
    def sasl_servers(self) -> str:
        return f"127.0.0.1:{self._broker.sasl_port}" if isinstance(self._broker, SecuredBroker) else ""

    def restart(self, *, kill: bool) -> None:
        self._broker.kill() if kill else self._broker.stop()
        self._broker.start()


class ApacheUnderTest:
    """Apache Kafka with one node, run by the fuzzer."""

    def __init__(self, kafka: ApacheKafka) -> None:
        self._kafka = kafka

    @property
    def bootstrap_servers(self) -> str:
        return self._kafka.bootstrap_servers

    @property
    def sasl_servers(self) -> str:
        port = self._kafka.nodes[0].ports.get(SASL)
        return f"127.0.0.1:{port}" if port else ""

    def restart(self, *, kill: bool) -> None:
        (node,) = self._kafka.nodes
        node.kill() if kill else node.stop()
        node.start()


@contextmanager
def oncelog_broker(directory: Path | None = None) -> Iterator[OncelogUnderTest]:
    """Run our broker with both listeners and its data below `directory`."""
    with (
        tempfile.TemporaryDirectory(prefix="oncelog-differential-") as own,
        SecuredBroker((directory or Path(own)) / "data", settings=COMMON) as broker,
    ):
        yield OncelogUnderTest(broker)


@contextmanager
def apache_broker() -> Iterator[ApacheUnderTest]:
    """Run Apache Kafka with both listeners. Raises MissingDependency if its jars or Java are missing."""
    module = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    properties = COMMON | PROMPT | {SASL_MODULE: module}
    with ApacheKafka(properties=properties, also_listen=[SASL]) as kafka:
        yield ApacheUnderTest(kafka)
