"""`send_many` and `send_table` of the asyncio producer, which behave like those of the blocking producer."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from support.topics import new_topic, read

from oncelog.aio import Producer
from oncelog.client.producer.many import CHUNK_ROWS
from oncelog.errors import MessageTooLarge, MisuseError, UnknownTopicOrPartition


def run_with(servers: str, act: Any, **settings: Any) -> Any:
    async def run() -> Any:
        async with Producer({"bootstrap.servers": servers}, **{"linger_ms": 0, **settings}) as producer:
            return await act(producer)

    return asyncio.run(run())


def test_send_many_takes_lists_and_iterables(ours: str) -> None:
    topic = new_topic(ours)

    async def act(producer: Producer) -> list[int]:
        first = await producer.send_many(topic, [b"a", b"b"], keys=[b"1", b"2"], headers={"h": b"x"})
        second = await producer.send_many(topic, (value for value in (b"c", b"d")), timestamps_ms=[7, 8])
        assert (len(first), len(second)) == (2, 2)
        counts = [(await first).delivered_count, (await second.outcome()).delivered_count]
        assert first.done() and second.done()
        return counts

    assert run_with(ours, act) == [2, 2]
    records = read(ours, topic)
    assert [(r.key, r.value, r.headers) for r in records[:2]] == [
        (b"1", b"a", (("h", b"x"),)),
        (b"2", b"b", (("h", b"x"),)),
    ]
    assert [(r.value, r.timestamp_ms) for r in records[2:]] == [(b"c", 7), (b"d", 8)]


def test_send_many_of_more_than_a_buffer_waits_for_room_and_keeps_the_order(ours: str) -> None:
    topic = new_topic(ours)
    values = [b"%06d" % number for number in range(12_000)]

    async def act(producer: Producer) -> int:
        return (await (await producer.send_many(topic, values))).delivered_count

    assert run_with(ours, act, buffer_memory=65_536, batch_size=16_384) == len(values)
    assert [record.value for record in read(ours, topic)] == values


def test_send_table_takes_arrow_tables(ours: str) -> None:
    topic = new_topic(ours, 2)
    table = pa.table({"key": ["a", "b", "c"], "value": [b"1", b"2", b"3"]})

    async def act(producer: Producer) -> Any:
        both = await producer.send_table(topic, table)
        one = await producer.send_table(topic, table, partition=1)
        return (await both).delivered_count, [part.partition for part in (await one).delivered]

    assert run_with(ours, act) == (3, [1])
    assert sorted(record.value for record in read(ours, topic)) == [b"1", b"1", b"2", b"2", b"3", b"3"]


def test_an_error_has_the_delivery_of_what_was_appended(ours: str) -> None:
    topic = new_topic(ours)

    async def act(producer: Producer) -> int:
        with pytest.raises(MisuseError) as raised:
            await producer.send_many(topic, iter([b"a", "text"]))
        with pytest.raises(MisuseError):
            # A list, unlike an iterator, is checked before any record is sent.
            await producer.send_many(topic, [b"b", "text"])
        with pytest.raises(MessageTooLarge):
            await producer.send_many(topic, [b"x" * 2_000_000])
        with pytest.raises(MisuseError, match="Arrow table"):
            await producer.send_table(topic, [b"x"])
        return (await raised.value.delivery).delivered_count

    assert run_with(ours, act) == 1
    assert [record.value for record in read(ours, topic)] == [b"a"]


def test_records_of_a_refused_batch_raise_their_error_when_awaited(ours: str) -> None:
    topic = new_topic(ours, max_message_bytes=1_000)

    async def act(producer: Producer) -> int:
        delivery = await producer.send_many(topic, [b"x" * 5_000])
        with pytest.raises(MessageTooLarge):
            await delivery
        return (await delivery.outcome()).failed_count

    assert run_with(ours, act) == 1


def test_a_missing_partition_is_refused(ours: str) -> None:
    topic = new_topic(ours)

    async def act(producer: Producer) -> None:
        with pytest.raises((MisuseError, UnknownTopicOrPartition)):
            await producer.send_many(topic, [b"x"], partition=7)
        with pytest.raises((MisuseError, UnknownTopicOrPartition)):
            await producer.send_table(topic, pa.table({"value": [b"x"]}), partition=7)

    run_with(ours, act)


def test_other_tasks_run_while_a_list_is_serialized(ours: str) -> None:
    topic = new_topic(ours)
    turns = 0
    seen: set[int] = set()

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def serialize(text: str) -> bytes:
        seen.add(turns)
        return text.encode()

    async def act(producer: Producer) -> int:
        other = asyncio.create_task(take_turns())
        delivery = await producer.send_many(topic, ["x"] * (2 * CHUNK_ROWS + 1))
        other.cancel()
        return (await delivery).delivered_count

    assert run_with(ours, act, value_serializer=serialize) == 2 * CHUNK_ROWS + 1
    assert len(seen) >= 3
