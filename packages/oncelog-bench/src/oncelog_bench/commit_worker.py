"""A transactional producer in a separate process. It commits as many transactions as it can in a given time.

`python -m oncelog_bench.commit_worker JSON` reads a WorkerSpec, commits, and prints a Report as JSON.
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
class WorkerSpec:
    """The worker's parameters.

    `client` is a key of CLIENTS. Successive records go to successive partitions.
    """

    client: str
    bootstrap_servers: str
    topic: str
    partitions: int
    records: int
    record_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result. `begin_to_commit_ms` has one time per transaction, from its start to the response to the
    commit.
    """

    seconds: float
    begin_to_commit_ms: list[float]


Commit = Callable[[int], None]
"""A function that runs one transaction. Its argument is the partition of the first record."""


def _oncelog(spec: WorkerSpec) -> Commit:
    from oncelog import Producer

    config = {"bootstrap.servers": spec.bootstrap_servers, "transactional.id": spec.topic}
    producer, value = Producer(config, linger_ms=0), bytes(spec.record_bytes)
    producer.init_transactions()

    def commit(first: int) -> None:
        with producer.transaction():
            for index in range(first, first + spec.records):
                producer.send(spec.topic, value, partition=index % spec.partitions)

    return commit


def _confluent(spec: WorkerSpec) -> Commit:
    import confluent_kafka

    config = {"bootstrap.servers": spec.bootstrap_servers, "transactional.id": spec.topic, "linger.ms": 0}
    producer, value = confluent_kafka.Producer(config), bytes(spec.record_bytes)
    producer.init_transactions(CLIENT_SECONDS)

    def commit(first: int) -> None:
        producer.begin_transaction()
        for index in range(first, first + spec.records):
            producer.produce(spec.topic, value, partition=index % spec.partitions)
        producer.commit_transaction(CLIENT_SECONDS)

    return commit


CLIENTS: dict[str, Callable[[WorkerSpec], Commit]] = {"oncelog": _oncelog, "confluent-kafka": _confluent}


def run(spec: WorkerSpec) -> Report:
    """Commit a few transactions as a warm-up. Then measure commits until `spec.seconds` have passed."""
    commit = CLIENTS[spec.client](spec)
    first = 0
    for _ in range(WARM_UP_TRANSACTIONS):
        commit(first)
        first += spec.records
    taken: list[float] = []
    started = time.perf_counter()
    while (now := time.perf_counter()) - started < spec.seconds:
        commit(first)
        first += spec.records
        taken.append((time.perf_counter() - now) * 1000)
    return Report(time.perf_counter() - started, taken)


if __name__ == "__main__":
    print(json.dumps(asdict(run(WorkerSpec(**json.loads(sys.argv[1]))))))
