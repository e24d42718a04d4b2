"""A producer in a separate process that sends for a given time, with or without transactions.

`python -m oncelog_bench.transactions_worker JSON` reads a WorkerSpec, sends, and prints a Report as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog_bench.clients import Report
from oncelog_bench.process import max_rss_bytes

BURST_RECORDS = 1_000
"""The number of records between two readings of the clock."""
CLIENT_SECONDS = 60.0
SETTINGS = {"acks": "all", "linger.ms": 5, "batch.size": 16_384, "compression.type": "none"}


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The worker's parameters. `client` is a key of CLIENTS.

    A transaction is committed after `commit_ms` or after `commit_records`, whichever comes first; 0 means no
    such limit. With both 0, the producer is idempotent and has no transactions.
    """

    client: str
    bootstrap_servers: str
    topic: str
    partitions: int
    record_bytes: int
    seconds: float
    commit_ms: float = 0.0
    commit_records: int = 0

    @property
    def is_transactional(self) -> bool:
        return bool(self.commit_ms or self.commit_records)

    @property
    def settings(self) -> dict[str, Any]:
        own = {"transactional.id": self.topic} if self.is_transactional else {}
        return {**SETTINGS, **own, "bootstrap.servers": self.bootstrap_servers}


class Client(NamedTuple):
    """The functions of a client.

    `begin` begins a transaction, if there are transactions. `burst` sends BURST_RECORDS records to the
    partition with the given number. `end` waits until all records are committed or, without transactions,
    acknowledged.
    """

    begin: Callable[[], None]
    burst: Callable[[int], None]
    end: Callable[[], None]


def _oncelog(spec: WorkerSpec) -> Client:
    from oncelog import Producer

    producer, values = Producer(spec.settings), [bytes(spec.record_bytes)] * BURST_RECORDS

    def burst(partition: int) -> None:
        producer.send_many(spec.topic, values, partition=partition)

    if not spec.is_transactional:
        return Client(lambda: None, burst, lambda: producer.flush(CLIENT_SECONDS))
    producer.init_transactions()
    return Client(producer.begin_transaction, burst, lambda: producer.commit_transaction(CLIENT_SECONDS))


def _confluent(spec: WorkerSpec) -> Client:
    import confluent_kafka

    producer, value = confluent_kafka.Producer(spec.settings), bytes(spec.record_bytes)
    if not spec.is_transactional:
        producer = confluent_kafka.Producer({**spec.settings, "enable.idempotence": True})

    def burst(partition: int) -> None:
        for _ in range(BURST_RECORDS):
            while True:
                try:
                    producer.produce(spec.topic, value, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)

    if not spec.is_transactional:
        return Client(lambda: None, burst, lambda: producer.flush(CLIENT_SECONDS))
    producer.init_transactions(CLIENT_SECONDS)
    return Client(producer.begin_transaction, burst, lambda: producer.commit_transaction(CLIENT_SECONDS))


CLIENTS: dict[str, Callable[[WorkerSpec], Client]] = {"oncelog": _oncelog, "confluent-kafka": _confluent}


def run(spec: WorkerSpec) -> Report:
    """Send a burst to every partition as a warm-up. Then send and commit until the time has passed."""
    client = CLIENTS[spec.client](spec)
    client.begin()
    for partition in range(spec.partitions):
        client.burst(partition)
    client.end()
    began, cpu_began = time.perf_counter(), time.process_time()
    until, bursts = began + spec.seconds, 0
    while time.perf_counter() < until:
        bursts += _transaction(spec, client, bursts, until)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Report(bursts * BURST_RECORDS, seconds, cpu_seconds, max_rss_bytes())


def _transaction(spec: WorkerSpec, client: Client, first: int, until: float) -> int:
    """Run one transaction, or send until the time `until` if the producer has no transactions.

    A transaction ends no later than at `until`. Return the number of bursts.
    """
    if spec.commit_ms:
        until = min(until, time.perf_counter() + spec.commit_ms / 1000)
    max_bursts = max(spec.commit_records // BURST_RECORDS, 1) if spec.commit_records else sys.maxsize
    bursts = 0
    client.begin()
    while bursts < max_bursts and time.perf_counter() < until:
        client.burst((first + bursts) % spec.partitions)
        bursts += 1
    client.end()
    return bursts


if __name__ == "__main__":
    print(json.dumps(asdict(run(WorkerSpec(**json.loads(sys.argv[1]))))))
