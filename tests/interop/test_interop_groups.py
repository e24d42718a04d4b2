"""Consumer groups of other clients on our broker: sharing, rebalances, commits, and a killed broker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import pytest
from aiokafka.coordinator.assignors.range import RangePartitionAssignor as AiokafkaRange
from kafka.coordinator.assignors.range import RangePartitionAssignor as KafkaPythonRange
from support.foreign.functions import make_topic
from support.wait import attempts

from oncelog import Producer
from oncelog.testing.broker_process import BrokerProcess

PARTITIONS = 4
SECONDS = 120.0


@pytest.fixture
def topic(ours: str) -> str:
    name = f"g-{uuid.uuid4().hex[:8]}"
    make_topic(ours, name, PARTITIONS)
    return name


def fill(ours: str, topic: str, first: int, count: int) -> None:
    with Producer({"bootstrap.servers": ours}) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
        producer.flush()


def member(ours: str, group: str, **settings: object) -> confluent_kafka.Consumer:
    config: dict[str, Any] = {
        "bootstrap.servers": ours,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": 6_000,
        "heartbeat.interval.ms": 300,
    }
    return confluent_kafka.Consumer(config | settings)


def poll_until(members: list[confluent_kafka.Consumer], is_done: Callable[[], bool]) -> list[list[int]]:
    """Poll all members in turn until the condition is true, and return the values that each member read."""
    got: list[list[int]] = [[] for _ in members]
    for _ in attempts(lambda: [consumer.assignment() for consumer in members], SECONDS):
        if is_done():
            break
        for consumer, values in zip(members, got, strict=True):
            message = consumer.poll(0.05)
            if message is not None and not message.error():
                values.append(int(message.value()))
    return got


@pytest.mark.parametrize("strategy", ["range,roundrobin", "cooperative-sticky"])
def test_librdkafka_shares_and_takes_over(ours: str, topic: str, strategy: str) -> None:
    group = f"group-{topic}"
    first, second = (member(ours, group, **{"partition.assignment.strategy": strategy}) for _ in range(2))
    first.subscribe([topic])
    poll_until([first], lambda: len(first.assignment()) == PARTITIONS)
    second.subscribe([topic])
    poll_until([first, second], lambda: len(first.assignment()) == len(second.assignment()) == 2)
    shared = {each.partition for each in [*first.assignment(), *second.assignment()]}
    assert shared == set(range(PARTITIONS))
    first.close()
    poll_until([second], lambda: len(second.assignment()) == PARTITIONS)
    second.close()


def test_commits_carry_a_group_over_its_members(ours: str, topic: str) -> None:
    """A member starts after the records that an earlier member of the group has committed."""
    fill(ours, topic, 0, 40)
    group = f"group-{topic}"
    seen: list[int] = []
    for part in range(2):
        consumer = member(ours, group)
        consumer.subscribe([topic])
        for _ in attempts(lambda seen=seen: seen, SECONDS):
            if len(seen) >= 40 * (part + 1):
                break
            message = consumer.poll(0.2)
            if message is not None and not message.error():
                seen.append(int(message.value()))
                consumer.commit(message, asynchronous=False)
        consumer.close()
        fill(ours, topic, 40, 40 if part == 0 else 0)
    assert sorted(seen) == list(range(80))


def test_a_group_outlives_a_killed_broker(tmp_path: Path) -> None:
    """After a kill of the broker, members continue in their generation, and no member reads committed records
    again.
    """
    with BrokerProcess(tmp_path / "data") as broker:
        make_topic(broker.bootstrap_servers, "topic", PARTITIONS)
        fill(broker.bootstrap_servers, "topic", 0, 40)
        rebalances: list[str] = []
        # The other tests' sessions last six seconds. On a busy machine, the restart of a broker takes longer.
        patient = {"reconnect.backoff.max.ms": 200, "session.timeout.ms": 60_000}
        consumer = member(broker.bootstrap_servers, "group", **patient)
        consumer.subscribe(["topic"], on_assign=lambda *_: rebalances.append("assign"))
        seen: list[int] = []

        def take(count: int) -> None:
            for _ in attempts(lambda: seen, SECONDS):
                if len(seen) >= count:
                    return
                message = consumer.poll(0.2)
                if message is not None and not message.error():
                    seen.append(int(message.value()))

        take(40)
        consumer.commit(asynchronous=False)
        broker.kill()
        broker.start()
        fill(broker.bootstrap_servers, "topic", 40, 40)
        take(80)
        consumer.commit(asynchronous=False)
        consumer.close()
        assert sorted(seen) == list(range(80))
        assert rebalances == ["assign"]


def test_kafka_python_and_aiokafka_share_with_each_other(ours: str, topic: str) -> None:
    fill(ours, topic, 0, 40)
    group = f"group-{topic}"

    async def work() -> set[int]:
        reader = aiokafka.AIOKafkaConsumer(
            topic,
            bootstrap_servers=ours,
            group_id=group,
            auto_offset_reset="earliest",
            heartbeat_interval_ms=200,
            partition_assignment_strategy=[AiokafkaRange],
        )
        await reader.start()
        other = await asyncio.to_thread(
            lambda: kafka.KafkaConsumer(
                topic,
                bootstrap_servers=ours,
                group_id=group,
                auto_offset_reset="earliest",
                heartbeat_interval_ms=200,
                partition_assignment_strategy=[KafkaPythonRange],
            )
        )
        seen: set[int] = set()
        for _ in attempts(seconds=SECONDS):
            if (len(seen), len(reader.assignment()), len(other.assignment())) == (40, 2, 2):
                break
            # A poll of kafka-python that ends in a rebalance may lose the assignment (docs/conformance.md).
            mine, theirs = await asyncio.gather(
                reader.getmany(timeout_ms=200), asyncio.to_thread(other.poll, 2_000)
            )
            for records in [*mine.values(), *theirs.values()]:
                seen |= {int(record.value) for record in records}
        await reader.stop()
        await asyncio.to_thread(other.close)
        return seen

    assert asyncio.run(work()) == set(range(40))
