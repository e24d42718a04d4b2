"""Producers, consumers and loops with a schema registry, on our broker and on Apache Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.schema_registry import Registry
from support.schemas import ORDER, ORDER_ROW
from support.topics import new_topic, producer_of, read
from support.wait import until

import oncelog
from oncelog import Consumer, Producer, ProducerRecord, Record, TopicPartition, aio
from oncelog.errors import DeserializationError, MisuseError, SchemaRegistryError, SerializationError
from oncelog.schema_registry import AvroDeserializer, AvroSerializer, SchemaRegistryClient


def polled(consumer: Consumer, count: int) -> list[Record]:
    records: list[Record] = []
    while len(records) < count:
        records += consumer.poll(1)
    return records


def test_keys_and_values_go_through_the_registry(
    servers: str, registry: Registry, client: SchemaRegistryClient
) -> None:
    topic = new_topic(servers)
    key, value = AvroSerializer(client, '"string"', is_key=True), AvroSerializer(client, ORDER)
    with producer_of(servers, key_serializer=key, value_serializer=value) as producer:
        producer.send(topic, ORDER_ROW, "a").result(60)
        producer.send_many(topic, [ORDER_ROW, None], keys=["b", "c"]).result(60)
    assert registry.subjects == {f"{topic}-value": [1], f"{topic}-key": [2]}
    read_avro = AvroDeserializer(client)
    config = {"bootstrap.servers": servers, "auto.offset.reset": "earliest"}
    with Consumer(config, key_deserializer=read_avro, value_deserializer=read_avro) as consumer:
        consumer.assign(TopicPartition(topic, 0))
        records = [(record.key, record.value) for record in polled(consumer, 3)]
    assert records == [("a", ORDER_ROW), ("b", ORDER_ROW), ("c", None)]


def test_a_registry_that_is_down_fails_the_send_and_the_poll(ours: str, registry: Registry) -> None:
    topic = new_topic(ours)
    registry.gate.clear()
    late = SchemaRegistryClient({"schema.registry.url": registry.url, "request.timeout.ms": 100})
    with producer_of(ours, value_serializer=AvroSerializer(late, ORDER)) as producer:
        with pytest.raises(SerializationError, match="no result within") as sending:
            producer.send(topic, ORDER_ROW)
        cause = sending.value.__cause__
        assert isinstance(cause, SchemaRegistryError)
        assert cause.subject == f"{topic}-value"
        assert cause.url is not None and cause.url.startswith(registry.url)
    assert read(ours, topic) == []
    with producer_of(ours) as producer:
        producer.send(topic, b"\0\0\0\0\x01x").result(60)
    config = {"bootstrap.servers": ours, "auto.offset.reset": "earliest"}
    with Consumer(config, value_deserializer=AvroDeserializer(late)) as consumer:
        consumer.assign(TopicPartition(topic, 0))
        with pytest.raises(DeserializationError, match=f"the value of {topic}-0 at offset 0") as polling:
            polled(consumer, 1)
        assert isinstance(polling.value.__cause__, SchemaRegistryError)
        assert consumer.position(TopicPartition(topic, 0)) == 0
    late.close()


def test_asyncio_clients_leave_the_loop_free_while_they_wait(
    ours: str, registry: Registry, client: SchemaRegistryClient
) -> None:
    topic = new_topic(ours)
    at = {"bootstrap.servers": ours}

    async def run() -> Any:
        registry.gate.clear()
        async with aio.Producer(at, value_serializer=AvroSerializer(client, ORDER)) as producer:
            sending = asyncio.ensure_future(producer.send(topic, ORDER_ROW))
            await until(lambda: registry.requests)
            assert not sending.done()
            registry.gate.set()
            await (await sending)
        registry.requests.clear()
        registry.gate.clear()
        config = {**at, "auto.offset.reset": "earliest"}
        async with aio.Consumer(config, value_deserializer=AvroDeserializer(client)) as consumer:
            consumer.assign(TopicPartition(topic, 0))
            polling = asyncio.ensure_future(consumer.poll(60))
            await until(lambda: registry.requests)
            assert not polling.done()
            registry.gate.set()
            return [record.value for record in await polling]

    assert asyncio.run(run()) == [ORDER_ROW]


def test_a_cancelled_send_leaves_the_look_up_to_others(
    ours: str, registry: Registry, client: SchemaRegistryClient
) -> None:
    topic = new_topic(ours)

    async def run() -> None:
        registry.gate.clear()
        serializer = AvroSerializer(client, ORDER)
        async with aio.Producer({"bootstrap.servers": ours}, value_serializer=serializer) as producer:
            first, second = (asyncio.ensure_future(producer.send(topic, ORDER_ROW)) for _ in range(2))
            await until(lambda: registry.requests)
            first.cancel()
            await asyncio.wait([first])
            registry.gate.set()
            await (await second)

    asyncio.run(run())
    assert len(read(ours, topic)) == 1
    assert registry.requests == [f"POST /subjects/{topic}-value/versions"]


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_loop_reads_and_writes_with_schemas(ours: str, client: SchemaRegistryClient, kind: str) -> None:
    source, target = new_topic(ours), new_topic(ours)
    with producer_of(ours, value_serializer=AvroSerializer(client, ORDER)) as producer:
        producer.send_many(source, [ORDER_ROW, {**ORDER_ROW, "id": 8}]).result(60)
    options: dict[str, Any] = {
        "group_id": source,
        "transactional_id": source,
        "config": {"bootstrap.servers": ours, "consumer.timeout.ms": 500, "linger.ms": 0},
        "value_deserializer": AvroDeserializer(client),
        "value_serializer": AvroSerializer(client, ORDER),
    }

    def transform(record: Record) -> ProducerRecord:
        return ProducerRecord(target, {**record.value, "item": "book"})

    async def transform_async(record: Record) -> ProducerRecord:
        return transform(record)

    if kind == "blocking":
        oncelog.process(source, transform, **options)
    else:
        asyncio.run(aio.process(source, transform_async, **options))
    reader = AvroDeserializer(client)
    values = [reader.deserialize(target, record.value or b"") for record in read(ours, target)]
    assert values == [{**ORDER_ROW, "item": "book"}, {**ORDER_ROW, "id": 8, "item": "book"}]


@pytest.mark.parametrize("iterates", [False, True], ids=["poll", "iteration"])
def test_a_poll_that_waits_for_a_schema_returns_nothing_after_a_close(
    ours: str, registry: Registry, client: SchemaRegistryClient, iterates: bool
) -> None:
    """Regression: it returned records after `on_revoked`, while the close left the group."""
    topic = new_topic(ours)
    with Producer({"bootstrap.servers": ours}, value_serializer=AvroSerializer(client, ORDER)) as producer:
        producer.send(topic, ORDER_ROW)

    async def run() -> BaseException | None:
        consumer = aio.Consumer(
            {"bootstrap.servers": ours, "group.id": topic, "auto.offset.reset": "earliest"},
            value_deserializer=AvroDeserializer(client),
        )

        async def revoked(partitions: list[TopicPartition]) -> None:
            registry.gate.set()
            await asyncio.wait([reading], timeout=5)

        async def read_one() -> object:
            return await anext(aiter(consumer)) if iterates else await consumer.poll(60)

        consumer.subscribe(topic, on_revoked=revoked)
        registry.requests.clear()
        registry.gate.clear()
        reading = asyncio.ensure_future(read_one())
        await until(lambda: registry.requests)
        await consumer.close()
        await asyncio.wait([reading])
        return reading.exception()

    assert isinstance(asyncio.run(run()), MisuseError)


class Forgetful:
    """A deserializer that is never ready."""

    def __init__(self) -> None:
        self.prepared = 0

    def deserialize(self, topic: str, data: bytes) -> bytes:
        return data

    def is_ready(self, topic: str, data: bytes) -> bool:
        return False

    async def prepare(self, topic: str, data: bytes) -> None:
        self.prepared += 1


def test_a_deserializer_that_forgets_what_it_prepared_ends_the_poll(ours: str) -> None:
    """Regression: the poll prepared the same record forever."""
    topic, deserializer = new_topic(ours), Forgetful()
    with Producer({"bootstrap.servers": ours}) as producer:
        producer.send_many(topic, [b"a", b"b", b"c"])

    async def run() -> list[Any]:
        config = {"bootstrap.servers": ours, "auto.offset.reset": "earliest"}
        async with aio.Consumer(config, value_deserializer=deserializer) as consumer, asyncio.timeout(60):
            consumer.assign(TopicPartition(topic, 0))
            polled = await consumer.poll(60)
            return [*polled, await anext(aiter(consumer)), *await consumer.poll(60)]

    assert [record.value for record in asyncio.run(run())] == [b"a", b"b", b"c"]
    assert deserializer.prepared == 3
