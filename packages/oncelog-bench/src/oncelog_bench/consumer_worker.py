"""A consumer client in a separate process. It reads one topic from the beginning for a given time.

`python -m oncelog_bench.consumer_worker JSON` reads a WorkerSpec, consumes, and prints a Report as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from oncelog.types import TopicPartition
from oncelog_bench.clients import Report
from oncelog_bench.process import max_rss_bytes

MAX_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The worker's parameters.

    `client` is a key of CLIENTS. The worker stops after `records` or after `seconds`.
    """

    client: str
    bootstrap_servers: str
    topic: str
    partitions: int
    records: int
    seconds: float


def _oncelog_rows(spec: WorkerSpec) -> Iterator[int]:
    from oncelog import Consumer

    with Consumer({"bootstrap.servers": spec.bootstrap_servers}) as consumer:
        parts = [TopicPartition(spec.topic, index) for index in range(spec.partitions)]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        while True:
            yield len(consumer.poll(1.0, max_records=MAX_RECORDS))


def _oncelog_arrow(spec: WorkerSpec) -> Iterator[int]:
    from oncelog import Consumer

    with Consumer({"bootstrap.servers": spec.bootstrap_servers}) as consumer:
        parts = [TopicPartition(spec.topic, index) for index in range(spec.partitions)]
        for at, end in consumer.end_offsets(parts).items():
            for batch in consumer.fetch_range(at, 0, end):
                yield batch.num_rows


def _confluent(spec: WorkerSpec, take: Callable[[list[Any]], int]) -> Iterator[int]:
    import confluent_kafka

    settings = {
        "bootstrap.servers": spec.bootstrap_servers,
        "group.id": "bench",
        "enable.auto.commit": False,
    }
    consumer = confluent_kafka.Consumer(settings)
    start = confluent_kafka.OFFSET_BEGINNING
    consumer.assign(
        [confluent_kafka.TopicPartition(spec.topic, index, start) for index in range(spec.partitions)]
    )
    while True:
        yield take(consumer.consume(MAX_RECORDS, 1.0))


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

    async def start() -> Any:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=spec.bootstrap_servers, enable_auto_commit=False
        )
        await consumer.start()
        parts = [aiokafka.TopicPartition(spec.topic, index) for index in range(spec.partitions)]
        consumer.assign(parts)
        await consumer.seek_to_beginning(*parts)
        return consumer

    consumer = loop.run_until_complete(start())
    while True:
        batches = loop.run_until_complete(consumer.getmany(timeout_ms=1000, max_records=MAX_RECORDS))
        yield take([message for messages in batches.values() for message in messages])


def _kafka_python(spec: WorkerSpec) -> Iterator[int]:
    import kafka

    consumer = kafka.KafkaConsumer(bootstrap_servers=spec.bootstrap_servers, enable_auto_commit=False)
    parts = [kafka.TopicPartition(spec.topic, index) for index in range(spec.partitions)]
    consumer.assign(parts)
    consumer.seek_to_beginning(*parts)
    while True:
        batches = consumer.poll(timeout_ms=1000, max_records=MAX_RECORDS)
        yield sum(map(len, batches.values()))


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


CLIENTS: dict[str, Callable[[WorkerSpec], Iterator[int]]] = {
    "oncelog rows": _oncelog_rows,
    "oncelog Arrow": _oncelog_arrow,
    "confluent-kafka rows": lambda spec: _confluent(spec, len),
    "confluent-kafka to Arrow": lambda spec: _confluent(spec, _confluent_arrow),
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
"""Modules that a client imports, loaded before the clock starts."""


def run(spec: WorkerSpec) -> Report:
    """Read until all records are read or the given time has passed."""
    for module in _MODULES[spec.client.split(" ")[0]]:
        importlib.import_module(module)
    if "Arrow" in spec.client:
        importlib.import_module("pyarrow")
    began, cpu_began = time.perf_counter(), time.process_time()
    records, last = 0, began
    for count in CLIENTS[spec.client](spec):
        now = time.perf_counter()
        if count:
            records, last = records + count, now
        if records >= spec.records or now - began >= spec.seconds:
            break
    return Report(records, last - began, time.process_time() - cpu_began, max_rss_bytes())


def main() -> None:
    """Run the child process."""
    print(json.dumps(asdict(run(WorkerSpec(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
