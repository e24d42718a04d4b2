"""Serializers and deserializers of applications: functions, and objects that get the topic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.topics import new_topic, producer_of, read
from support.wait import until

import oncelog
from oncelog import Consumer, Producer, ProducerRecord, Record, TopicPartition, aio
from oncelog.client.consumer.delivery_buffer import DeliveryBuffer
from oncelog.client.serialization import record_deserializer, record_serializer
from oncelog.errors import ConfigError, DeserializationError, MisuseError, SerializationError
from oncelog.types import TimestampType


class OfTopic:
    """A converter that writes the topic's name in front of the data."""

    def serialize(self, topic: str, data: Any) -> bytes:
        return f"{topic}/{data}".encode()

    def deserialize(self, topic: str, data: bytes) -> str:
        return data.decode().removeprefix(f"{topic}/")


def to_json(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def producer(ours: str) -> Iterator[Producer]:
    with producer_of(ours, key_serializer=str.encode, value_serializer=to_json) as running:
        yield running


def reader(servers: str, topic: str, **settings: Any) -> Consumer:
    consumer = Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest"}, **settings)
    consumer.assign(TopicPartition(topic, 0))
    return consumer


def polled(consumer: Consumer, count: int) -> list[Record]:
    records: list[Record] = []
    while len(records) < count:
        records += consumer.poll(1)
    return records


def test_serializers_make_bytes_of_keys_and_values(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    producer.send(topic, {"price": 42}, "book").result(60)
    producer.send(topic, [1], "lamp").result(60)  # the batch is open, so send() takes its fast path
    producer.send(topic, None, "book").result(60)
    assert [(record.key, record.value) for record in read(ours, topic)] == [
        (b"book", b'{"price": 42}'),
        (b"lamp", b"[1]"),
        (b"book", None),
    ]


def test_send_many_serializes_lists_and_generators(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    producer.send_many(topic, [1, None], keys=["a", "b"]).result(60)
    producer.send_many(topic, (number for number in (2, 3)), keys=iter("cd")).result(60)
    assert [(record.key, record.value) for record in read(ours, topic)] == [
        (b"a", b"1"),
        (b"b", None),
        (b"c", b"2"),
        (b"d", b"3"),
    ]


def test_deserializers_convert_what_poll_and_iteration_return(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    producer.send_many(topic, [{"n": 1}, {"n": 2}, None], keys=["a", "b", "c"]).result(60)
    converters: dict[str, Any] = {"key_deserializer": bytes.decode, "value_deserializer": json.loads}
    expected = [("a", {"n": 1}), ("b", {"n": 2}), ("c", None)]
    with reader(ours, topic, **converters) as consumer:
        assert [(record.key, record.value) for record in polled(consumer, 3)] == expected
    with reader(ours, topic, consumer_timeout_ms=60_000, **converters) as consumer:
        records = iter(consumer)
        assert [(record.key, record.value) for record in (next(records) for _ in range(3))] == expected


def test_an_object_gets_the_topic(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours, value_serializer=OfTopic()) as producer:
        producer.send(topic, "v", partition=0).result(60)
    assert read(ours, topic)[0].value == f"{topic}/v".encode()
    with reader(ours, topic, value_deserializer=OfTopic()) as consumer:
        assert polled(consumer, 1)[0].value == "v"


def test_an_error_of_a_serializer_names_the_topic_and_sends_nothing(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    with pytest.raises(SerializationError, match=f"the value of a record for {topic}-0 ") as raised:
        producer.send(topic, object(), partition=0)
    assert (raised.value.topic, raised.value.partition, raised.value.part) == (topic, 0, "value")
    assert isinstance(raised.value.__cause__, TypeError)
    with pytest.raises(SerializationError, match=f"the key of a record for {topic} "):
        producer.send_many(topic, [1, 2], keys=["a", 7])  # type: ignore[list-item]
    with (
        producer_of(ours, value_serializer=str.upper) as other,  # type: ignore[arg-type]
        pytest.raises(SerializationError, match="value_serializer returned str"),
    ):
        other.send(topic, "v")
    assert read(ours, topic) == []


def test_a_generator_keeps_the_records_before_a_failed_one(ours: str, producer: Producer) -> None:
    topic = new_topic(ours)
    with pytest.raises(SerializationError) as raised:
        producer.send_many(topic, iter([1, object()]))
    assert raised.value.delivery.result(60).delivered_count == 1


def test_a_record_that_cannot_be_deserialized_is_named_and_can_be_skipped(ours: str) -> None:
    topic = new_topic(ours)
    tp = TopicPartition(topic, 0)
    with producer_of(ours) as producer:
        producer.send_many(topic, [b"1", b"{", b"3"]).result(60)
    with reader(ours, topic, value_deserializer=json.loads) as consumer:
        assert [record.value for record in polled(consumer, 1)] == [1]
        for _ in range(2):  # each poll fails, and the position stays
            with pytest.raises(DeserializationError, match=f"the value of {topic}-0 at offset 1") as raised:
                polled(consumer, 1)
            assert consumer.position(tp) == 1
        error = raised.value
        assert (error.topic, error.partition, error.offset, error.part) == (topic, 0, 1, "value")
        assert error.record.value == b"{" and isinstance(error.__cause__, json.JSONDecodeError)
        consumer.seek(tp, 2)
        assert [record.value for record in polled(consumer, 1)] == [3]


def test_a_loop_that_meets_such_a_record_commits_what_it_processed(ours: str) -> None:
    topic = new_topic(ours)
    tp = TopicPartition(topic, 0)
    with producer_of(ours) as producer:
        producer.send_many(topic, [b"1", b"{"]).result(60)
    with reader(ours, topic, value_deserializer=json.loads, group_id=topic) as consumer:
        records = iter(consumer)
        assert next(records).value == 1
        with pytest.raises(DeserializationError):
            next(records)
    with reader(ours, topic, group_id=topic) as consumer:
        committed = consumer.committed(tp)[tp]
    assert committed is not None and committed.offset == 1


def test_a_deserializer_that_uses_its_consumer_is_refused() -> None:
    buffer = DeliveryBuffer()
    tp = TopicPartition("t", 0)
    buffer.put({tp: [Record("t", 0, 0, 0, TimestampType.CREATE_TIME, None, b"v", ())]})

    def drop(record: Record) -> Record:
        buffer.drop(tp)
        return record

    with pytest.raises(MisuseError, match="own consumer"):
        buffer.take_converted(10, drop)


def test_a_deserializer_that_polls_its_consumer_in_an_iteration_is_refused() -> None:
    buffer = DeliveryBuffer()
    record = Record("t", 0, 0, 0, TimestampType.CREATE_TIME, None, b"v", ())
    buffer.put({TopicPartition("t", 0): [record]})

    def poll(record: Record) -> Record:
        buffer.take(10)
        return record

    with pytest.raises(MisuseError, match="own consumer"):
        buffer.next_record(poll)


def test_an_error_without_a_text_is_named_like_any_other(ours: str) -> None:
    class NoText(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def convert(data: bytes) -> bytes:
        if data == b"bad":
            raise NoText
        return data

    topic = new_topic(ours)
    with producer_of(ours) as producer:
        producer.send_many(topic, [b"1", b"bad"]).result(60)
    with reader(ours, topic, value_deserializer=convert) as consumer:
        # the record before the failed one is delivered
        assert [record.value for record in polled(consumer, 1)] == [b"1"]
        with pytest.raises(DeserializationError, match="NoText") as raised:
            polled(consumer, 1)
        assert raised.value.offset == 1
    with producer_of(ours, value_serializer=convert) as other, pytest.raises(SerializationError):
        other.send(topic, b"bad")


def test_what_is_no_converter_is_refused(ours: str) -> None:
    for argument in ("key_serializer", "value_serializer"):
        with pytest.raises(ConfigError, match=argument):
            producer_of(ours, **{argument: "org.apache.kafka.StringSerializer"})
    for argument in ("key_deserializer", "value_deserializer"):
        with pytest.raises(ConfigError, match=argument):
            Consumer({"bootstrap.servers": ours}, **{argument: 5})  # type: ignore[arg-type]
    assert record_serializer(None, None) is None and record_deserializer(None, None) is None


def test_asyncio_clients_convert_in_the_same_way(ours: str) -> None:
    topic = new_topic(ours)
    config = {"bootstrap.servers": ours, "auto.offset.reset": "earliest"}

    async def run() -> list[Any]:
        at = {"bootstrap.servers": ours}
        async with aio.Producer(at, key_serializer=str.encode, value_serializer=to_json) as producer:
            await (await producer.send(topic, {"n": 1}, "a"))
            await (await producer.send_many(topic, [{"n": 2}, None], keys=["b", "c"]))
            with pytest.raises(SerializationError, match=topic):
                await producer.send(topic, object())
        seen = []
        async with aio.Consumer(
            config, key_deserializer=bytes.decode, value_deserializer=json.loads
        ) as consumer:
            consumer.assign(TopicPartition(topic, 0))
            async for record in consumer:
                seen.append((record.key, record.value))
                if len(seen) == 3:
                    break
            consumer.seek(TopicPartition(topic, 0), 0)
            while len(seen) < 6:
                seen += [(record.key, record.value) for record in await consumer.poll(1)]
        return seen

    assert asyncio.run(run()) == 2 * [("a", {"n": 1}), ("b", {"n": 2}), ("c", None)]


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_loop_converts_around_its_transform_and_keeps_bytes_in_dead_letters(ours: str, kind: str) -> None:
    source, target, dead = (new_topic(ours) for _ in range(3))
    with producer_of(ours) as producer:
        producer.send_many(source, [b"20", b"{", b"22"], keys=[b"a", b"b", b"c"]).result(60)
    options: dict[str, Any] = {
        "group_id": source,
        "transactional_id": source,
        "config": {"bootstrap.servers": ours, "consumer.timeout.ms": 500, "linger.ms": 0},
        "dead_letter_topic": dead,
        "max_attempts": 1,
        "key_deserializer": bytes.decode,
        "value_deserializer": json.loads,
        "key_serializer": str.encode,
        "value_serializer": to_json,
    }

    def transform(record: Record) -> ProducerRecord:
        return ProducerRecord(target, {"sum": record.value + 1}, record.key + "!")

    async def transform_async(record: Record) -> ProducerRecord:
        return transform(record)

    if kind == "blocking":
        oncelog.process(source, transform, **options)
    else:
        asyncio.run(aio.process(source, transform_async, **options))
    assert [(r.key, r.value) for r in read(ours, target)] == [
        (b"a!", b'{"sum": 21}'),
        (b"c!", b'{"sum": 23}'),
    ]
    letter = read(ours, dead)[0]
    assert (letter.key, letter.value) == (b"b", b"{")
    assert dict(letter.headers)["__oncelog.errors.exception"] == b"oncelog.errors.DeserializationError"


class Waiting:
    """A converter that waits once for each topic, until the test sets `go`. The wait raises `failure`."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.failure: Exception | None = None

    def is_ready(self, topic: str, data: Any) -> bool:
        assert data is not None
        return topic in self.known

    async def prepare(self, topic: str, data: Any) -> None:
        self.asked.append(topic)
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        self.known.add(topic)

    def serialize(self, topic: str, data: Any) -> bytes:
        assert topic in self.known
        return to_json(data)

    def deserialize(self, topic: str, data: bytes) -> Any:
        assert topic in self.known
        return json.loads(data)


def test_an_asyncio_producer_awaits_a_serializer_that_waits(ours: str) -> None:
    topics = [new_topic(ours) for _ in range(3)]

    async def run() -> None:
        key, value = Waiting(), Waiting()
        async with aio.Producer(
            {"bootstrap.servers": ours}, key_serializer=key, value_serializer=value
        ) as producer:
            sending = [
                asyncio.ensure_future(producer.send(topics[0], 1, "a")),
                asyncio.ensure_future(producer.send_many(topics[1], [None, 2], keys=["a", "b"])),
                asyncio.ensure_future(producer.send_many(topics[2], (item for item in (None, 3)))),
            ]
            # The event loop runs while the serializers wait.
            await until(lambda: len(value.asked) == 3)
            assert not any(task.done() for task in sending)
            value.go.set()
            await until(lambda: len(key.asked) == 2)
            key.go.set()
            await asyncio.gather(*sending)
            await producer.flush()

    asyncio.run(run())
    values = [[(record.key, record.value) for record in read(ours, topic)] for topic in topics]
    assert values == [[(b'"a"', b"1")], [(b'"a"', None), (b'"b"', b"2")], [(None, None), (None, b"3")]]


def test_an_asyncio_producer_that_is_closed_during_the_wait_sends_nothing(ours: str) -> None:
    topic = new_topic(ours)

    async def run() -> None:
        value = Waiting()
        producer = aio.Producer({"bootstrap.servers": ours}, value_serializer=value)
        sending = asyncio.ensure_future(producer.send(topic, 1))
        await until(lambda: value.asked)
        await producer.close()
        value.go.set()
        with pytest.raises(MisuseError):
            await sending

    asyncio.run(run())
    assert read(ours, topic) == []


def test_a_failed_wait_is_an_error_of_the_serializer(ours: str) -> None:
    topic = new_topic(ours)

    async def run() -> None:
        value = Waiting()
        value.failure = OSError("no schema")
        value.go.set()
        async with aio.Producer({"bootstrap.servers": ours}, value_serializer=value) as producer:
            with pytest.raises(SerializationError, match=f"the value of a record for {topic}-0 .*no schema"):
                await producer.send(topic, 1, partition=0)
            value.failure = None
            await (await producer.send(topic, 1))

    asyncio.run(run())
    assert len(read(ours, topic)) == 1


@pytest.mark.parametrize("way", ["poll", "iteration"])
def test_an_asyncio_consumer_awaits_a_deserializer_that_waits(ours: str, way: str) -> None:
    topics = [new_topic(ours) for _ in range(2)]
    with producer_of(ours) as producer:
        for topic in topics:
            producer.send_many(topic, [b"1", b"2"], keys=[b"3", b"4"]).result(60)

    async def run() -> None:
        converter = Waiting()
        config = {"bootstrap.servers": ours, "auto.offset.reset": "earliest"}
        async with aio.Consumer(config, key_deserializer=converter, value_deserializer=converter) as consumer:
            consumer.assign([TopicPartition(topic, 0) for topic in topics])
            records: list[Record] = []

            async def take() -> None:
                if way == "poll":
                    while len(records) < 4:
                        records.extend(await consumer.poll(1))
                else:
                    async for record in consumer:
                        records.append(record)
                        if len(records) == 4:
                            break

            taking = asyncio.ensure_future(take())
            await until(lambda: converter.asked)
            assert not taking.done() and records == []
            converter.go.set()
            await taking
        assert sorted(converter.asked) == sorted(topics)
        assert sorted((r.topic, r.key, r.value) for r in records) == [
            (topic, *pair) for topic in topics for pair in ((3, 1), (4, 2))
        ]

    asyncio.run(run())


@pytest.mark.parametrize("way", ["poll", "iteration"])
def test_a_record_whose_deserializer_fails_to_wait_stays_the_next_one(ours: str, way: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        producer.send(topic, b"1").result(60)

    async def run() -> None:
        converter = Waiting()
        converter.failure = OSError("no schema")
        converter.go.set()
        config = {"bootstrap.servers": ours, "auto.offset.reset": "earliest"}
        async with aio.Consumer(config, value_deserializer=converter) as consumer:
            consumer.assign(TopicPartition(topic, 0))

            async def one() -> Record:
                if way == "iteration":
                    async for record in consumer:
                        return record
                while not (records := await consumer.poll(1)):
                    pass
                return records[0]

            for _ in range(2):
                with pytest.raises(DeserializationError, match="no schema") as raised:
                    await one()
                assert (raised.value.offset, raised.value.part) == (0, "value")
            converter.failure = None
            assert (await one()).value == 1

    asyncio.run(run())


def test_an_asyncio_loop_awaits_its_converters(ours: str) -> None:
    source, target = new_topic(ours), new_topic(ours)
    with producer_of(ours) as producer:
        producer.send_many(source, [b"1", b"2"]).result(60)

    async def transform(record: Record) -> ProducerRecord:
        return ProducerRecord(target, record.value * 10)

    async def run() -> None:
        reads, writes = Waiting(), Waiting()
        processor = aio.Processor(
            source, transform, group_id=source, transactional_id=source,
            config={"bootstrap.servers": ours, "consumer.timeout.ms": 500, "linger.ms": 0},
            value_deserializer=reads, value_serializer=writes,
        )  # fmt: skip
        running = asyncio.ensure_future(processor.run())
        await until(lambda: reads.asked)
        reads.go.set()
        await until(lambda: writes.asked)
        writes.go.set()
        await running

    asyncio.run(run())
    assert [record.value for record in read(ours, target)] == [b"10", b"20"]
