"""Our producer and our read_committed consumer on one loop in a process of their own: from send to delivery.

`python -m oncelog_bench.delivery_worker JSON` reads an Order, sends, and prints a Report as JSON.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from dataclasses import asdict, dataclass

from oncelog.aio import Consumer, Producer
from oncelog.errors import OncelogError
from oncelog.types import TopicPartition

WARM_UP_TRANSACTIONS, WARM_UP_RECORDS = 10, 10
_PATIENCE_S = 30.0
_NUMBER = struct.Struct(">i")
_WARM_UP_NUMBER = -1


@dataclass(frozen=True, slots=True)
class Order:
    """`rate_per_s` records fall due evenly over `seconds`; a transaction ends at every multiple of
    `commit_ms` after the first one. Each partition in turns."""

    bootstrap_servers: str
    topic: str
    partitions: int
    record_bytes: int
    rate_per_s: float
    commit_ms: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """`delivery_ms`: of each record, from when it fell due until `poll` gave it.

    `commit_ms`: of each transaction, from its commit's call until its last record was given.
    """

    delivery_ms: list[float]
    commit_ms: list[float]


@dataclass(slots=True)
class Course:
    """What happened when, in seconds of one clock. `commits`: (how many records so far, when)."""

    due: list[float]
    delivered: list[float]
    commits: list[tuple[int, float]]
    left: int


async def run(order: Order) -> Report:
    """Warm up, then send, commit and read."""
    servers = {"bootstrap.servers": order.bootstrap_servers}
    count = round(order.rate_per_s * order.seconds)
    course = Course([], [0.0] * count, [], count)
    async with (
        Producer({**servers, "transactional.id": order.topic, "linger.ms": 0}) as producer,
        Consumer({**servers, "isolation.level": "read_committed"}) as consumer,
    ):
        await producer.init_transactions()
        parts = [TopicPartition(order.topic, index) for index in range(order.partitions)]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        await _warm_up(order, producer, consumer)
        reading = asyncio.create_task(_read(consumer, course))
        await _send(order, producer, course, count)
        await asyncio.wait_for(reading, _PATIENCE_S)
    return _report(course)


async def _warm_up(order: Order, producer: Producer, consumer: Consumer) -> None:
    left = WARM_UP_TRANSACTIONS * WARM_UP_RECORDS
    value = _NUMBER.pack(_WARM_UP_NUMBER)
    for _ in range(WARM_UP_TRANSACTIONS):
        async with producer.transaction():
            for index in range(WARM_UP_RECORDS):
                await producer.send(order.topic, value, partition=index % order.partitions)
    while left:
        records = await consumer.poll(_PATIENCE_S)
        if not records:
            raise OncelogError("a read_committed consumer was not given what was committed")
        left -= len(records)


async def _send(order: Order, producer: Producer, course: Course, count: int) -> None:
    """Transaction after transaction; what falls due while one is ending goes into the next."""
    clock, commit_s = time.perf_counter, order.commit_ms / 1000
    padding = bytes(max(order.record_bytes - _NUMBER.size, 0))
    began = clock()
    course.due += [began + index / order.rate_per_s for index in range(count)]
    index = 0
    while index < count:
        await producer.begin_transaction()
        end = began + ((clock() - began) // commit_s + 1) * commit_s
        while index < count and course.due[index] < end:
            await _until(course.due[index])
            value = _NUMBER.pack(index) + padding
            await producer.send(order.topic, value, partition=index % order.partitions)
            index += 1
        await _until(end)
        course.commits.append((index, clock()))
        await producer.commit_transaction()


async def _until(moment: float) -> None:
    while (wait := moment - time.perf_counter()) > 0:
        await asyncio.sleep(wait)


async def _read(consumer: Consumer, course: Course) -> None:
    while course.left:
        records = await consumer.poll(_PATIENCE_S)
        now = time.perf_counter()
        for record in records:
            (number,) = _NUMBER.unpack_from(record.value or b"")
            if course.delivered[number]:
                raise OncelogError(f"record {number} was delivered twice")
            course.delivered[number] = now
        course.left -= len(records)


def _report(course: Course) -> Report:
    delivery_ms = [(got - due) * 1000 for got, due in zip(course.delivered, course.due, strict=True)]
    firsts = [0, *(after for after, _ in course.commits)]
    commit_ms = [
        (max(course.delivered[first:after]) - called) * 1000
        for first, (after, called) in zip(firsts, course.commits, strict=False)
        if after > first
    ]
    return Report(delivery_ms, commit_ms)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(Order(**json.loads(sys.argv[1])))))))
