"""A consumer client in a separate process. It reads one topic from the beginning repeatedly for a given time.

`python -m oncelog_bench.consumer_worker JSON` reads a WorkerSpec, consumes, and prints a Report as JSON. The
clock starts with the first records, so neither imports nor connecting count.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oncelog.errors import OncelogError
from oncelog.types import TopicPartition
from oncelog_bench.clients import Report
from oncelog_bench.process import max_rss_bytes

MAX_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The worker's parameters.

    `client` is a key of CLIENTS. The topic has `records` records. The worker stops after `seconds`.
    """

    client: str
    bootstrap_servers: str
    topic: str
    partitions: int
    records: int
    seconds: float


def _passes(records: int, counts: Iterator[int], rewind: Callable[[], object]) -> Iterator[int]:
    """Yield `counts`, the numbers of records that successive polls returned.

    Call `rewind` each time that all of the topic's `records` records were read. Raises OncelogError if more
    records were read.
    """
    seen = 0
    for count in counts:
        seen += count
        if seen > records:
            raise OncelogError(f"{seen} records were read from a topic of {records}")
        yield count
        if seen == records:
            seen = 0
            rewind()


def _oncelog_rows(spec: WorkerSpec, settings: dict[str, object]) -> Iterator[int]:
    from oncelog import Consumer

    with Consumer({"bootstrap.servers": spec.bootstrap_servers, **settings}) as consumer:
        parts = [TopicPartition(spec.topic, index) for index in range(spec.partitions)]
        consumer.assign(parts)
        consumer.seek_to_beginning()
        counts = (len(consumer.poll(1.0, max_records=MAX_RECORDS)) for _ in itertools.count())
        yield from _passes(spec.records, counts, consumer.seek_to_beginning)


def _oncelog_arrow(spec: WorkerSpec) -> Iterator[int]:
    from oncelog import Consumer

    with Consumer({"bootstrap.servers": spec.bootstrap_servers}) as consumer:
        parts = [TopicPartition(spec.topic, index) for index in range(spec.partitions)]
        ends = consumer.end_offsets(parts)
        while True:
            for tp, end in ends.items():
                for batch in consumer.fetch_range(tp, 0, end):
                    yield batch.num_rows


def _confluent(
    spec: WorkerSpec, take: Callable[[list[Any]], int], settings: dict[str, object]
) -> Iterator[int]:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": spec.bootstrap_servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            **settings,
        }
    )
    start = confluent_kafka.OFFSET_BEGINNING
    parts = [confluent_kafka.TopicPartition(spec.topic, index, start) for index in range(spec.partitions)]
    consumer.assign(parts)

    def rewind() -> None:
        for part in parts:
            consumer.seek(part)

    counts = (take(consumer.consume(MAX_RECORDS, 1.0)) for _ in itertools.count())
    yield from _passes(spec.records, counts, rewind)


def _confluent_arrow(messages: list[Any]) -> int:
    import pyarrow as pa

    columns = {
        "partition": pa.array([m.partition() for m in messages], pa.int32()),
        "offset": pa.array([m.offset() for m in messages], pa.int64()),
        "timestamp": pa.array([m.timestamp()[1] for m in messages], pa.int64()),
        "key": pa.array([m.key() for m in messages], pa.binary()),
        "value": pa.array([m.value() for m in messages], pa.binary()),
    }
    return int(pa.table(columns).num_rows)


def _aiokafka(spec: WorkerSpec, take: Callable[[list[Any]], int]) -> Iterator[int]:
    import asyncio

    import aiokafka

    loop = asyncio.new_event_loop()

    parts = [aiokafka.TopicPartition(spec.topic, index) for index in range(spec.partitions)]

    async def start() -> Any:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=spec.bootstrap_servers, enable_auto_commit=False
        )
        await consumer.start()
        consumer.assign(parts)
        await consumer.seek_to_beginning(*parts)
        return consumer

    consumer = loop.run_until_complete(start())

    def poll() -> int:
        batches = loop.run_until_complete(consumer.getmany(timeout_ms=1000, max_records=MAX_RECORDS))
        return take([message for messages in batches.values() for message in messages])

    yield from _passes(
        spec.records,
        (poll() for _ in itertools.count()),
        lambda: loop.run_until_complete(consumer.seek_to_beginning(*parts)),
    )


def _kafka_python(spec: WorkerSpec) -> Iterator[int]:
    import kafka

    consumer = kafka.KafkaConsumer(bootstrap_servers=spec.bootstrap_servers, enable_auto_commit=False)
    parts = [kafka.TopicPartition(spec.topic, index) for index in range(spec.partitions)]
    consumer.assign(parts)
    consumer.seek_to_beginning(*parts)

    def poll() -> int:
        batches = consumer.poll(timeout_ms=1000, max_records=MAX_RECORDS)
        return sum(map(len, batches.values()))

    counts = (poll() for _ in itertools.count())
    yield from _passes(spec.records, counts, lambda: consumer.seek_to_beginning(*parts))


def _rows_to_arrow(messages: list[Any]) -> int:
    import pyarrow as pa

    columns = {
        "partition": pa.array([m.partition for m in messages], pa.int32()),
        "offset": pa.array([m.offset for m in messages], pa.int64()),
        "timestamp": pa.array([m.timestamp for m in messages], pa.int64()),
        "key": pa.array([m.key for m in messages], pa.binary()),
        "value": pa.array([m.value for m in messages], pa.binary()),
    }
    return int(pa.table(columns).num_rows)


_MANY: dict[str, object] = {"max.poll.records": MAX_RECORDS}
_AT_ONCE: dict[str, object] = {"fetch.queue.backoff.ms": 0}
"""Without this setting, librdkafka pauses 1 s each time that its queue has 100,000 records or 64 MB."""

CLIENTS: dict[str, Callable[[WorkerSpec], Iterator[int]]] = {
    "oncelog rows": lambda spec: _oncelog_rows(spec, _MANY),
    "oncelog rows by 500": lambda spec: _oncelog_rows(spec, {}),
    "oncelog Arrow": _oncelog_arrow,
    "confluent-kafka rows": lambda spec: _confluent(spec, len, {}),
    "confluent-kafka rows without pause": lambda spec: _confluent(spec, len, _AT_ONCE),
    "confluent-kafka to Arrow": lambda spec: _confluent(spec, _confluent_arrow, _AT_ONCE),
    "aiokafka rows": lambda spec: _aiokafka(spec, len),
    "aiokafka to Arrow": lambda spec: _aiokafka(spec, _rows_to_arrow),
    "kafka-python rows": _kafka_python,
}


_MODULES = {
    "oncelog": ("oncelog.client.consumer.blocking", "oncelog.client.consumer.range_reader", "numpy"),
    "confluent-kafka": ("confluent_kafka",),
    "aiokafka": ("asyncio", "aiokafka"),
    "kafka-python": ("kafka",),
}
"""The modules that each client imports. They are loaded before the clock starts."""


def run(spec: WorkerSpec) -> Report:
    """Read until the given time has passed since the first records. The first records are not counted."""
    for module in _MODULES[spec.client.split(" ")[0]]:
        importlib.import_module(module)
    if "Arrow" in spec.client:
        importlib.import_module("pyarrow")
    counts = CLIENTS[spec.client](spec)
    while not next(counts):
        pass
    began, cpu_began = time.perf_counter(), time.process_time()
    records, last = 0, began
    for count in counts:
        now = time.perf_counter()
        if count:
            records, last = records + count, now
        if now - began >= spec.seconds:
            break
    return Report(records, last - began, time.process_time() - cpu_began, max_rss_bytes())


def main() -> None:
    """Run the load of the WorkerSpec on the command line, and print the report. Both are JSON."""
    print(json.dumps(asdict(run(WorkerSpec(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
