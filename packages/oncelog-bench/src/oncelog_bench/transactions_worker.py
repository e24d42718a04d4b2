"""Producers in a process of their own, without transactions or with one after the other, for a while.

`python -m oncelog_bench.transactions_worker JSON` reads an Order, sends, and prints a Report as JSON.
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
"""Records between two looks at the clock."""
CLIENT_SECONDS = 60.0
SETTINGS = {"acks": "all", "linger.ms": 5, "batch.size": 16_384, "compression.type": "none"}


@dataclass(frozen=True, slots=True)
class Order:
    """`client` is a key of CLIENTS. A commit after `commit_ms` or `commit_records`, whichever is first; 0:
    not for that; both 0: an idempotent producer without transactions."""

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
    """`burst` sends BURST_RECORDS to the partition of that number; `end` waits until all are committed,
    without transactions until all are acknowledged."""

    begin: Callable[[], None]
    burst: Callable[[int], None]
    end: Callable[[], None]


def _oncelog(order: Order) -> Client:
    from oncelog import Producer

    producer, values = Producer(order.settings), [bytes(order.record_bytes)] * BURST_RECORDS

    def burst(partition: int) -> None:
        producer.send_many(order.topic, values, partition=partition)

    if not order.is_transactional:
        return Client(lambda: None, burst, lambda: producer.flush(CLIENT_SECONDS))
    producer.init_transactions()
    return Client(producer.begin_transaction, burst, lambda: producer.commit_transaction(CLIENT_SECONDS))


def _confluent(order: Order) -> Client:
    import confluent_kafka

    producer, value = confluent_kafka.Producer(order.settings), bytes(order.record_bytes)
    if not order.is_transactional:
        producer = confluent_kafka.Producer({**order.settings, "enable.idempotence": True})

    def burst(partition: int) -> None:
        for _ in range(BURST_RECORDS):
            while True:
                try:
                    producer.produce(order.topic, value, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)

    if not order.is_transactional:
        return Client(lambda: None, burst, lambda: producer.flush(CLIENT_SECONDS))
    producer.init_transactions(CLIENT_SECONDS)
    return Client(producer.begin_transaction, burst, lambda: producer.commit_transaction(CLIENT_SECONDS))


CLIENTS: dict[str, Callable[[Order], Client]] = {"oncelog": _oncelog, "confluent-kafka": _confluent}


def run(order: Order) -> Report:
    """A burst to every partition first; then send and commit until the time is over."""
    client = CLIENTS[order.client](order)
    client.begin()
    for partition in range(order.partitions):
        client.burst(partition)
    client.end()
    began, cpu_began = time.perf_counter(), time.process_time()
    until, bursts = began + order.seconds, 0
    while time.perf_counter() < until:
        bursts += _transaction(order, client, bursts, until)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Report(bursts * BURST_RECORDS, seconds, cpu_seconds, max_rss_bytes())


def _transaction(order: Order, client: Client, first: int, until: float) -> int:
    """One of them, or all there is to send without; how many bursts."""
    if order.commit_ms:
        until = min(until, time.perf_counter() + order.commit_ms / 1000)
    most = max(order.commit_records // BURST_RECORDS, 1) if order.commit_records else sys.maxsize
    bursts = 0
    client.begin()
    while bursts < most and time.perf_counter() < until:
        client.burst((first + bursts) % order.partitions)
        bursts += 1
    client.end()
    return bursts


if __name__ == "__main__":
    print(json.dumps(asdict(run(Order(**json.loads(sys.argv[1]))))))
