"""A transactional producer in a process of its own: as many transactions as it commits in a while.

`python -m oncelog_bench.commit_worker JSON` reads an Order, commits, and prints a Report as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

CLIENT_SECONDS = 30.0
WARM_UP_TRANSACTIONS = 10


@dataclass(frozen=True, slots=True)
class Order:
    """`client` is a key of CLIENTS. A transaction's records go to the partitions in turns."""

    client: str
    bootstrap_servers: str
    topic: str
    partitions: int
    records: int
    record_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """`begin_to_commit_ms`: of each transaction, from its begin to the commit's answer."""

    seconds: float
    begin_to_commit_ms: list[float]


Commit = Callable[[int], None]
"""One transaction, whose records begin with the partition of that number."""


def _oncelog(order: Order) -> Commit:
    from oncelog import Producer

    config = {"bootstrap.servers": order.bootstrap_servers, "transactional.id": order.topic}
    producer, value = Producer(config, linger_ms=0), bytes(order.record_bytes)
    producer.init_transactions()

    def commit(first: int) -> None:
        with producer.transaction():
            for index in range(first, first + order.records):
                producer.send(order.topic, value, partition=index % order.partitions)

    return commit


def _confluent(order: Order) -> Commit:
    import confluent_kafka

    config = {"bootstrap.servers": order.bootstrap_servers, "transactional.id": order.topic, "linger.ms": 0}
    producer, value = confluent_kafka.Producer(config), bytes(order.record_bytes)
    producer.init_transactions(CLIENT_SECONDS)

    def commit(first: int) -> None:
        producer.begin_transaction()
        for index in range(first, first + order.records):
            producer.produce(order.topic, value, partition=index % order.partitions)
        producer.commit_transaction(CLIENT_SECONDS)

    return commit


CLIENTS: dict[str, Callable[[Order], Commit]] = {"oncelog": _oncelog, "confluent-kafka": _confluent}


def run(order: Order) -> Report:
    """Commit until the time is over."""
    commit = CLIENTS[order.client](order)
    first = 0
    for _ in range(WARM_UP_TRANSACTIONS):
        commit(first)
        first += order.records
    taken: list[float] = []
    started = time.perf_counter()
    while (now := time.perf_counter()) - started < order.seconds:
        commit(first)
        first += order.records
        taken.append((time.perf_counter() - now) * 1000)
    return Report(time.perf_counter() - started, taken)


if __name__ == "__main__":
    print(json.dumps(asdict(run(Order(**json.loads(sys.argv[1]))))))
