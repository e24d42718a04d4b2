"""Groups of the consumer protocol on our broker, with librdkafka and the Java client, also after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from support.foreign.clients import INTEROP, run
from support.groups.members import SECONDS, fill
from support.topics import new_topic
from support.wait import attempts

from oncelog import Broker
from oncelog.testing.broker_process import BrokerProcess

QUICK = {"group.consumer.heartbeat.interval.ms": 100}


def member(servers: str, **settings: Any) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": "group", "group.protocol": "consumer",
         "auto.offset.reset": "earliest", "enable.auto.commit": False,
         "reconnect.backoff.max.ms": 200, **settings}
    )  # fmt: skip


def poll_until(members: list[confluent_kafka.Consumer], is_done: Callable[[], bool]) -> list[int]:
    """Poll all members in turn, and return the values that they got."""
    got: list[int] = []
    for _ in attempts(lambda: [each.assignment() for each in members], SECONDS):
        if is_done():
            break
        for member in members:
            message = member.poll(0.05)
            if message is not None and not message.error():
                got.append(int(message.value()))
    return got


def sizes(*members: confluent_kafka.Consumer) -> list[int]:
    return [len(member.assignment()) for member in members]


def test_librdkafka_shares_and_takes_over() -> None:
    with Broker(config=QUICK) as broker:
        servers = broker.bootstrap_servers
        topic = new_topic(servers, 4)
        first, second = member(servers), member(servers, **{"group.remote.assignor": "range"})
        first.subscribe([topic])
        poll_until([first], lambda: sizes(first) == [4])
        second.subscribe([f"^{topic}$"])
        poll_until([first, second], lambda: sizes(first, second) == [2, 2])
        shared = {each.partition for each in [*first.assignment(), *second.assignment()]}
        assert shared == set(range(4))
        first.close()
        poll_until([second], lambda: sizes(second) == [4])
        second.close()


def test_a_group_outlives_a_killed_broker(tmp_path: Path) -> None:
    """After a kill, the broker restores members and epochs: partitions stay assigned, and commits succeed."""
    with BrokerProcess(tmp_path / "data", settings=QUICK) as broker:
        servers = broker.bootstrap_servers
        topic = new_topic(servers, 4)
        rebalances: list[str] = []
        members = [member(servers), member(servers)]
        for each in members:
            each.subscribe(
                [topic],
                on_assign=lambda *_: rebalances.append("assign"),
                on_revoke=lambda *_: rebalances.append("revoke"),
            )
        poll_until(members, lambda: sizes(*members) == [2, 2])
        settled = list(rebalances)
        broker.kill()
        broker.start()
        fill(servers, topic, 0, 40, 4)
        got: list[int] = []
        for _ in attempts(lambda got=got: got, SECONDS):
            if len(got) >= 40:
                break
            got += poll_until(members, iter([False, True]).__next__)  # polls each member once
        for each in members:
            each.commit(asynchronous=False)
        assert sorted(got) == list(range(40))
        assert rebalances == settled
        for each in members:
            each.close()


def test_java_shares_and_takes_over(kafka_class_path: str) -> None:
    if not shutil.which("javac"):
        pytest.skip("the program is compiled as it starts, which needs a JDK, not only Java")
    with Broker(config=QUICK) as broker:
        topic = new_topic(broker.bootstrap_servers, 4)
        fill(broker.bootstrap_servers, topic, 0, 40, 4)
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
        program = str(INTEROP / "java" / "Groups.java")
        java = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", quiet, "-cp", kafka_class_path, program]
        lines = run([*java, broker.bootstrap_servers, topic, "4"])
    assert lines == [
        "one reads all and commits",
        "two share",
        "described as Consumer",
        "the other takes over",
    ]
