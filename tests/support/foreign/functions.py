"""Clients of other projects, each behind two functions: write records, and read a topic from its beginning.

A writer calls `on_ack` once per acknowledged record, and returns when all are acknowledged. It raises if a
record failed. A reader is in no group: it assigns the partitions itself and stops at their ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from support.wait import attempts

MAX_BYTES = 4_000_000
"""Size limit in bytes for every client, above a record of 1 MiB."""

TIMEOUT_S = 180.0

Headers = tuple[tuple[str, bytes | None], ...]


class Row(NamedTuple):
    """A record to write. With `partition` None, the client chooses the partition by the key."""

    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class ReadRow(NamedTuple):
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers

    def without_offset(self) -> Row:
        return Row(self.partition, self.key, self.value, self.headers)


OnAck = Callable[[], None]
Writer = Callable[[str, str, Iterable[Row], str, OnAck], None]
Reader = Callable[[str, str, int], list[ReadRow]]


def _nothing() -> None:
    return None


# -- confluent-kafka (librdkafka) --------------------------------------------------------------------


def write_confluent(
    bootstrap: str, topic: str, rows: Iterable[Row], codec: str = "none", on_ack: OnAck = _nothing
) -> None:
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "compression.type": codec,
            "message.max.bytes": MAX_BYTES,
            "partitioner": "murmur2_random",
            "reconnect.backoff.max.ms": 200,
            "retry.backoff.ms": 50,
            "linger.ms": 5,
        }
    )
    errors: list[Any] = []

    def delivered(error: Any, message: Any) -> None:
        errors.append(error) if error else on_ack()

    for row in rows:
        place = {} if row.partition is None else {"partition": row.partition}
        producer.produce(
            topic, row.value, row.key, headers=list(row.headers) or None, on_delivery=delivered, **place
        )
        producer.poll(0)
    left = producer.flush(TIMEOUT_S)
    if left or errors:
        raise RuntimeError(f"confluent-kafka: {left} left, errors {errors[:3]}")


def read_confluent(bootstrap: str, topic: str, partitions: int) -> list[ReadRow]:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )
    consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in range(partitions)])
    rows: list[ReadRow] = []
    ended: set[int] = set()
    try:
        for _ in attempts(seconds=TIMEOUT_S):
            if len(ended) == partitions:
                break
            for m in consumer.consume(1000, timeout=0.2):
                if m.error() is None:
                    headers = tuple(m.headers() or ())
                    rows.append(ReadRow(m.partition(), m.offset(), m.key(), m.value(), headers))
                elif m.error().code() == KafkaError._PARTITION_EOF:
                    ended.add(m.partition())
                elif m.topic() is not None:
                    raise RuntimeError(str(m.error()))
                # Ignore errors without a topic: they are from the look-up of the group's coordinator.
                # librdkafka requires a group.id and looks its coordinator up, although this reader is in no
                # group.
    finally:
        consumer.close()
    return rows


# -- aiokafka ----------------------------------------------------------------------------------------


def write_aiokafka(
    bootstrap: str, topic: str, rows: Iterable[Row], codec: str = "none", on_ack: OnAck = _nothing
) -> None:
    asyncio.run(_write_aiokafka(bootstrap, topic, rows, codec, on_ack))


async def _write_aiokafka(bootstrap: str, topic: str, rows: Iterable[Row], codec: str, on_ack: OnAck) -> None:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=True,
        compression_type=None if codec == "none" else codec,
        max_request_size=MAX_BYTES,
        retry_backoff_ms=50,
        linger_ms=5,
    )
    await producer.start()
    try:
        futures = []
        for row in rows:
            future = await producer.send(
                topic, row.value, row.key, partition=row.partition, headers=list(row.headers)
            )
            future.add_done_callback(lambda done: None if done.exception() else on_ack())
            futures.append(future)
        await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
    finally:
        await producer.stop()


def read_aiokafka(bootstrap: str, topic: str, partitions: int) -> list[ReadRow]:
    return asyncio.run(_read_aiokafka(bootstrap, topic, partitions))


async def _read_aiokafka(bootstrap: str, topic: str, partitions: int) -> list[ReadRow]:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, fetch_max_wait_ms=50, group_id=None
    )
    await consumer.start()
    try:
        places = [TopicPartition(topic, p) for p in range(partitions)]
        consumer.assign(places)
        await consumer.seek_to_beginning(*places)
        ends = await consumer.end_offsets(places)
        rows: list[ReadRow] = []
        for _ in attempts(seconds=TIMEOUT_S):
            if all([await consumer.position(p) >= ends[p] for p in places]):
                break
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                rows += [ReadRow(m.partition, m.offset, m.key, m.value, tuple(m.headers)) for m in batch]
        return rows
    finally:
        await consumer.stop()


# -- kafka-python ------------------------------------------------------------------------------------


def write_kafka_python(
    bootstrap: str, topic: str, rows: Iterable[Row], codec: str = "none", on_ack: OnAck = _nothing
) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=True,
        compression_type=None if codec == "none" else codec,
        max_request_size=MAX_BYTES,
        reconnect_backoff_max_ms=200,
        retry_backoff_ms=50,
        linger_ms=5,
    )
    try:
        futures = []
        for row in rows:
            future = producer.send(
                topic, value=row.value, key=row.key, partition=row.partition, headers=list(row.headers)
            )
            future.add_callback(lambda _metadata: on_ack())
            futures.append(future)
        producer.flush(timeout=TIMEOUT_S)
        for future in futures:
            future.get(timeout=TIMEOUT_S)
    finally:
        producer.close(timeout=5)


def read_kafka_python(bootstrap: str, topic: str, partitions: int) -> list[ReadRow]:
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, fetch_max_wait_ms=50, group_id=None
    )
    try:
        places = [TopicPartition(topic, p) for p in range(partitions)]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        rows: list[ReadRow] = []
        for _ in attempts(seconds=TIMEOUT_S):
            if all(consumer.position(p) >= ends[p] for p in places):
                break
            for batch in consumer.poll(timeout_ms=200, max_records=5000).values():
                rows += [ReadRow(m.partition, m.offset, m.key, m.value, tuple(m.headers)) for m in batch]
        return rows
    finally:
        consumer.close()


# -- ours --------------------------------------------------------------------------------------------


def write_oncelog(
    bootstrap: str, topic: str, rows: Iterable[Row], codec: str = "none", on_ack: OnAck = _nothing
) -> None:
    from oncelog import Producer

    errors: list[Exception] = []

    def delivered(metadata: object, error: Exception | None) -> None:
        errors.append(error) if error else on_ack()

    config = {"bootstrap.servers": bootstrap, "compression.type": codec, "max.request.size": MAX_BYTES}
    with Producer(config) as producer:
        for row in rows:
            producer.send(
                topic,
                row.value,
                row.key,
                partition=row.partition,
                headers=row.headers,
                on_delivery=delivered,
            )
        producer.flush(TIMEOUT_S)
    if errors:
        raise errors[0]


def read_oncelog(bootstrap: str, topic: str, partitions: int) -> list[ReadRow]:
    from oncelog import Consumer, TopicPartition

    with Consumer({"bootstrap.servers": bootstrap, "max.poll.records": 5000}) as consumer:
        places = [TopicPartition(topic, p) for p in range(partitions)]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        rows: list[ReadRow] = []
        for _ in attempts(seconds=TIMEOUT_S):
            if all(consumer.position(p) >= ends[p] for p in places):
                break
            rows += [ReadRow(r.partition, r.offset, r.key, r.value, r.headers) for r in consumer.poll(0.2)]
        return rows


WRITERS: dict[str, Writer] = {
    "confluent": write_confluent,
    "aiokafka": write_aiokafka,
    "kafka-python": write_kafka_python,
    "oncelog": write_oncelog,
}
READERS: dict[str, Reader] = {
    "confluent": read_confluent,
    "aiokafka": read_aiokafka,
    "kafka-python": read_kafka_python,
    "oncelog": read_oncelog,
}


def make_topic(bootstrap: str, name: str, partitions: int) -> None:
    """Create a topic that takes messages of MAX_BYTES and keeps all records."""
    from oncelog import Admin, NewTopic

    configs = {"max.message.bytes": str(MAX_BYTES), "retention.ms": "-1"}
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics([NewTopic(name, num_partitions=partitions, configs=configs)])


def stored_batches(bootstrap: str, topic: str, partitions: int) -> list[list[Any]]:
    """Return the headers of each partition's stored batches, in offset order."""
    from oncelog import Consumer, TopicPartition
    from oncelog.wire.batch import iter_batches

    headers: list[list[Any]] = []
    with Consumer({"bootstrap.servers": bootstrap}) as consumer:
        places = [TopicPartition(topic, p) for p in range(partitions)]
        ends = consumer.end_offsets(places)
        for place in places:
            chunks = consumer.fetch_batches(place, 0, ends[place])
            headers.append([header for chunk in chunks for _, header in iter_batches(chunk)])
    return headers


def by_partition(rows: Sequence[Row | ReadRow]) -> dict[int | None, list[Row]]:
    """Return the rows of each partition, in order and without their offsets."""
    groups: dict[int | None, list[Row]] = {}
    for row in rows:
        plain = row.without_offset() if isinstance(row, ReadRow) else row
        groups.setdefault(plain.partition, []).append(plain)
    return groups
