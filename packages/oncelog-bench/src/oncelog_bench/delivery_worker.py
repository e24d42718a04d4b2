"""A producer and a read_committed consumer of Oncelog in a separate process, to measure the time to delivery.

Both run on one event loop. `python -m oncelog_bench.delivery_worker JSON` reads a WorkerSpec, sends, and
prints a Report as JSON.
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
class WorkerSpec:
    """The worker's parameters.

    `rate_per_s` records per second are due at even intervals for `seconds`. Successive records go to
    successive partitions. Transactions are committed at the multiples of `commit_ms`.
    """

    bootstrap_servers: str
    topic: str
    partitions: int
    record_bytes: int
    rate_per_s: float
    commit_ms: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result.

    `delivery_ms` has one time per record: from the moment at which the record was due until `poll` returned
    it. `commit_ms` has one time per transaction: from the call of commit until `poll` returned the
    transaction's last record.
    """

    delivery_ms: list[float]
    commit_ms: list[float]


@dataclass(slots=True)
class Course:
    """The times of the run, in seconds of one clock.

    `commits` has a pair for each commit: the number of records sent so far, and the time. `left` is the
    number of records that are not yet delivered.
    """

    due: list[float]
    delivered: list[float]
    commits: list[tuple[int, float]]
    left: int


async def run(spec: WorkerSpec) -> Report:
    """Warm up, then send, commit and read."""
    servers = {"bootstrap.servers": spec.bootstrap_servers}
    count = round(spec.rate_per_s * spec.seconds)
    course = Course([], [0.0] * count, [], count)
    async with (
        Producer({**servers, "transactional.id": spec.topic, "linger.ms": 0}) as producer,
        Consumer({**servers, "isolation.level": "read_committed"}) as consumer,
    ):
        await producer.init_transactions()
        parts = [TopicPartition(spec.topic, index) for index in range(spec.partitions)]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        await _warm_up(spec, producer, consumer)
        reading = asyncio.create_task(_read(consumer, course))
        await _send(spec, producer, course, count)
        await asyncio.wait_for(reading, _PATIENCE_S)
    return _report(course)


async def _warm_up(spec: WorkerSpec, producer: Producer, consumer: Consumer) -> None:
    left = WARM_UP_TRANSACTIONS * WARM_UP_RECORDS
    value = _NUMBER.pack(_WARM_UP_NUMBER)
    for _ in range(WARM_UP_TRANSACTIONS):
        async with producer.transaction():
            for index in range(WARM_UP_RECORDS):
                await producer.send(spec.topic, value, partition=index % spec.partitions)
    while left:
        records = await consumer.poll(_PATIENCE_S)
        if not records:
            raise OncelogError("a read_committed consumer did not receive the committed records")
        left -= len(records)


async def _send(spec: WorkerSpec, producer: Producer, course: Course, count: int) -> None:
    """Send one transaction after the other.

    Records that become due during a commit belong to the next transaction.
    """
    clock, commit_s = time.perf_counter, spec.commit_ms / 1000
    padding = bytes(max(spec.record_bytes - _NUMBER.size, 0))
    began = clock()
    course.due += [began + index / spec.rate_per_s for index in range(count)]
    index = 0
    while index < count:
        await producer.begin_transaction()
        end = began + ((clock() - began) // commit_s + 1) * commit_s
        while index < count and course.due[index] < end:
            await _until(course.due[index])
            value = _NUMBER.pack(index) + padding
            await producer.send(spec.topic, value, partition=index % spec.partitions)
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
    print(json.dumps(asdict(asyncio.run(run(WorkerSpec(**json.loads(sys.argv[1])))))))
