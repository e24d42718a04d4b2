"""Transactional clients of other projects on our broker: commit, abort, offsets, fencing, and both isolation
levels.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka.structs import OffsetAndMetadata as KafkaPythonOffset

from oncelog.server.embedded import Broker

SECONDS = 120


@pytest.fixture
def topic(broker: Broker) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(SECONDS)
    return name


def read(broker: Broker, topic: str, isolation: str) -> list[bytes]:
    """Return all values that librdkafka reads, ordered by partition."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": f"read-{uuid.uuid4().hex}",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    partitions = [confluent_kafka.TopicPartition(topic, index, 0) for index in range(2)]
    consumer.assign(partitions)
    values: dict[int, list[bytes]] = {0: [], 1: []}
    ended: set[int] = set()
    while len(ended) < len(partitions):
        message = consumer.poll(SECONDS)
        assert message is not None
        if message.error():
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
            ended.add(message.partition())
        else:
            values[message.partition()].append(message.value())
    consumer.close()
    return values[0] + values[1]


def confluent_committed(broker: Broker, group: str, topic: str) -> int:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    (found,) = consumer.committed([confluent_kafka.TopicPartition(topic, 0)], SECONDS)
    consumer.close()
    return int(found.offset)


def confluent_producer(broker: Broker, transactional_id: str, **settings: object) -> Any:
    config = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": transactional_id}
    return confluent_kafka.Producer({**config, **settings})


@pytest.mark.behaviour("T3", "T4", "T6", "T10")
def test_librdkafka_commits_aborts_and_is_fenced(broker: Broker, topic: str) -> None:
    producer = confluent_producer(broker, topic)
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    for index in range(2):
        producer.produce(topic, b"kept", partition=index)
    producer.commit_transaction(SECONDS)
    producer.begin_transaction()
    for index in range(2):
        producer.produce(topic, b"dropped", partition=index)
    producer.flush(SECONDS)
    assert read(broker, topic, "read_committed") == [b"kept"] * 2
    producer.abort_transaction(SECONDS)
    assert read(broker, topic, "read_committed") == [b"kept"] * 2
    assert read(broker, topic, "read_uncommitted") == [b"kept", b"dropped"] * 2

    successor = confluent_producer(broker, topic)
    successor.init_transactions(SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"zombie", partition=0)
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        producer.commit_transaction(SECONDS)
    assert raised.value.args[0].fatal()
    assert read(broker, topic, "read_committed") == [b"kept"] * 2


@pytest.mark.behaviour("T7")
def test_librdkafka_consumes_transforms_and_produces(broker: Broker, topic: str) -> None:
    """The group's offsets are committed in the transaction with the group's generation. They change only if
    the transaction commits.
    """
    plain = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers})
    plain.produce(topic, b"in", partition=0)
    plain.flush(SECONDS)
    group = f"group-{topic}"
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    message = consumer.poll(SECONDS)
    assert message.value() == b"in"
    producer = confluent_producer(broker, f"ctp-{topic}")
    producer.init_transactions(SECONDS)
    moved = []
    for finish in (producer.abort_transaction, producer.commit_transaction):
        producer.begin_transaction()
        producer.produce(topic, b"out", partition=1)
        positions = [confluent_kafka.TopicPartition(topic, 0, message.offset() + 1)]
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), SECONDS)
        finish(SECONDS)
        moved.append(confluent_committed(broker, group, topic))
    assert moved == [confluent_kafka.OFFSET_INVALID, 1]
    assert read(broker, topic, "read_committed") == [b"in", b"out"]
    consumer.close()


@pytest.mark.behaviour("T4", "T6", "T7")
def test_aiokafka_commits_and_aborts(broker: Broker, topic: str) -> None:
    async def work() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=broker.bootstrap_servers, transactional_id=f"aio-{topic}"
        )
        async with producer:
            async with producer.transaction():
                await producer.send_and_wait(topic, b"kept", partition=0)
                offsets = {aiokafka.TopicPartition(topic, 0): 5}
                await producer.send_offsets_to_transaction(offsets, f"aio-{topic}")
            with pytest.raises(ValueError, match="no"):  # noqa: PT012
                async with producer.transaction():
                    await producer.send_and_wait(topic, b"dropped", partition=0)
                    offsets = {aiokafka.TopicPartition(topic, 0): 9}
                    await producer.send_offsets_to_transaction(offsets, f"aio-{topic}")
                    raise ValueError("no")

    asyncio.run(work())
    assert read(broker, topic, "read_committed") == [b"kept"]
    assert read(broker, topic, "read_uncommitted") == [b"kept", b"dropped"]
    assert confluent_committed(broker, f"aio-{topic}", topic) == 5


@pytest.mark.behaviour("T4", "T6", "T7")
def test_kafka_python_commits_and_aborts(broker: Broker, topic: str) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=f"kp-{topic}")
    producer.init_transactions()
    at = kafka.TopicPartition(topic, 0)
    producer.begin_transaction()
    producer.send(topic, b"kept", partition=0)
    producer.send_offsets_to_transaction({at: KafkaPythonOffset(5, "", -1)}, f"kp-{topic}")
    producer.commit_transaction()
    producer.begin_transaction()
    producer.send(topic, b"dropped", partition=0)
    producer.flush()
    producer.abort_transaction()
    producer.close()
    assert read(broker, topic, "read_committed") == [b"kept"]
    assert confluent_committed(broker, f"kp-{topic}", topic) == 5


@pytest.mark.behaviour("T8")
def test_librdkafka_learns_that_its_transaction_timed_out(topic: str, broker: Broker) -> None:
    quick = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 100}
    with Broker(config=quick) as short:
        producer = confluent_producer(
            short, "late", **{"transaction.timeout.ms": 1_000, "message.timeout.ms": 1_000}
        )
        producer.init_transactions(SECONDS)
        producer.begin_transaction()
        producer.produce("late", b"x", partition=0)
        producer.flush(SECONDS)
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=short.bootstrap_servers,
            isolation_level="read_committed",
            consumer_timeout_ms=4_000,
        )
        consumer.assign([kafka.TopicPartition("late", 0)])
        consumer.seek_to_beginning()
        assert list(consumer) == []
        consumer.close()
        with pytest.raises(confluent_kafka.KafkaException) as raised:
            producer.commit_transaction(SECONDS)
        assert raised.value.args[0].fatal()
