"""A producer client in a separate process. It sends as many acknowledged records as it can in a given time.

`python -m oncelog_bench.producer_worker JSON` reads a WorkerSpec, sends, and prints a Report as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from oncelog_bench.clients import Report
from oncelog_bench.process import max_rss_bytes

TABLE_ROWS = 20_000
BURST_RECORDS = 1_000
"""The number of records between two readings of the clock."""
FLUSH_S = 120.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The worker's parameters.

    `client` is a key of CLIENTS. `settings` are producer settings by their Kafka names.
    """

    client: str
    settings: dict[str, Any]
    topic: str
    partitions: int
    record_bytes: int
    seconds: float
    has_callbacks: bool = False
    """True if each record has a delivery callback. Only `oncelog rows` and `confluent-kafka` allow it."""


Burst = Callable[[int], int]
"""A function that sends records to one partition and returns their number. The argument is the partition."""


_acknowledged = 0


def _on_delivery(*result: object) -> None:
    global _acknowledged
    _acknowledged += 1


def _oncelog(spec: WorkerSpec) -> tuple[Burst, Callable[[], None]]:
    from oncelog import Producer

    producer, topic, value = Producer(spec.settings), spec.topic, bytes(spec.record_bytes)

    callback = _on_delivery if spec.has_callbacks else None

    def rows(partition: int) -> int:
        send = producer.send
        for _ in range(BURST_RECORDS):
            send(topic, value, partition=partition, on_delivery=callback)
        return BURST_RECORDS

    def many(partition: int) -> int:
        producer.send_many(topic, [value] * BURST_RECORDS, partition=partition)
        return BURST_RECORDS

    def table(partition: int) -> int:
        producer.send_table(topic, columns, partition=partition)
        return TABLE_ROWS

    if spec.client == "oncelog Arrow":
        import pyarrow as pa

        columns = pa.table({"value": pa.array([value] * TABLE_ROWS, pa.binary())})
    ways = {"oncelog rows": rows, "oncelog send_many": many, "oncelog Arrow": table}
    return ways[spec.client], lambda: producer.flush(FLUSH_S)


def _confluent(spec: WorkerSpec) -> tuple[Burst, Callable[[], None]]:
    import confluent_kafka

    producer, topic, value = confluent_kafka.Producer(spec.settings), spec.topic, bytes(spec.record_bytes)
    keywords = {"on_delivery": _on_delivery} if spec.has_callbacks else {}

    def rows(partition: int) -> int:
        produce = producer.produce
        for _ in range(BURST_RECORDS):
            while True:
                try:
                    produce(topic, value, partition=partition, **keywords)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)
        return BURST_RECORDS

    return rows, lambda: producer.flush(FLUSH_S)


def _kafka_python(spec: WorkerSpec) -> tuple[Burst, Callable[[], None]]:
    from kafka import KafkaProducer

    settings = _python_names(spec.settings)
    producer = KafkaProducer(**settings)
    topic, value = spec.topic, bytes(spec.record_bytes)

    def rows(partition: int) -> int:
        for _ in range(BURST_RECORDS):
            producer.send(topic, value, partition=partition)
        return BURST_RECORDS

    return rows, lambda: producer.flush(FLUSH_S)


def _aiokafka(spec: WorkerSpec) -> tuple[Burst, Callable[[], None]]:
    import asyncio

    from aiokafka import AIOKafkaProducer

    loop = asyncio.new_event_loop()
    settings = _python_names(spec.settings)
    if "batch_size" in settings:
        settings["max_batch_size"] = settings.pop("batch_size")
    settings.pop("max_in_flight_requests_per_connection", None)
    topic, value = spec.topic, bytes(spec.record_bytes)

    async def start() -> Any:
        producer = AIOKafkaProducer(**settings)
        await producer.start()
        return producer

    producer = loop.run_until_complete(start())

    async def send(partition: int) -> None:
        for _ in range(BURST_RECORDS):
            await producer.send(topic, value, partition=partition)

    def rows(partition: int) -> int:
        loop.run_until_complete(send(partition))
        return BURST_RECORDS

    return rows, lambda: loop.run_until_complete(producer.flush())


def _python_names(settings: dict[str, Any]) -> dict[str, Any]:
    named = {key.replace(".", "_"): value for key, value in settings.items()}
    named["enable_idempotence"] = named["enable_idempotence"] == "true"
    if named["compression_type"] == "none":
        named["compression_type"] = None
    return named


CLIENTS: dict[str, Callable[[WorkerSpec], tuple[Burst, Callable[[], None]]]] = {
    "oncelog rows": _oncelog,
    "oncelog send_many": _oncelog,
    "oncelog Arrow": _oncelog,
    "confluent-kafka": _confluent,
    "aiokafka": _aiokafka,
    "kafka-python": _kafka_python,
}


def run(spec: WorkerSpec) -> Report:
    """Warm up, send bursts to successive partitions until the time has passed, and wait for all
    acknowledgements.
    """
    burst, flush = CLIENTS[spec.client](spec)
    for partition in range(spec.partitions):
        burst(partition)
    flush()
    records = number = 0
    began, cpu_began = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < spec.seconds:
        records += burst(number % spec.partitions)
        number += 1
    flush()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Report(records, seconds, cpu_seconds, max_rss_bytes())


def main() -> None:
    """Run the load of the WorkerSpec on the command line, and print the report. Both are JSON."""
    print(json.dumps(asdict(run(WorkerSpec(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
