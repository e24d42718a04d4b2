"""Load generators, each in a separate process, so that the process's cost can be measured alone.

`python -m oncelog_bench.generators JSON` reads a WorkerSpec, sends, and prints a Report as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from oncelog.errors import OncelogError
from oncelog_bench.process import max_rss_bytes

WARM_UP_RECORDS = 1_000
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The load to send.

    `rate_per_s` is an even pace in records per second. If it is None, the client sends as fast as it can.
    `settings` are producer settings by their Kafka names, including `bootstrap.servers`.
    """

    client: str
    settings: dict[str, Any]
    topic: str
    partitions: int
    records: int
    record_bytes: int
    rate_per_s: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """The cost of the load: wall and processor seconds from the first send to the last acknowledgement.

    `latencies_ms` (from send to acknowledgement) are recorded only for a load with a pace: at full speed,
    records wait in the client's own queue. `failed` counts records that were not acknowledged.
    """

    seconds: float
    cpu_seconds: float
    records: int
    failed: int
    max_rss_bytes: int
    latencies_ms: list[float]


class Client(Protocol):
    """The part of a producer that a load generator needs."""

    def send(self, topic: str, partition: int, value: bytes, done: Callable[[bool], None]) -> None:
        """Queue one record. `done(failed)` is called when the record's outcome is known."""

    def flush(self) -> None:
        """Wait until the outcome of every record is known."""


class OncelogClient:
    """Oncelog's producer, with one `send()` per record."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from oncelog import Producer

        self._producer = Producer(settings)

    def send(self, topic: str, partition: int, value: bytes, done: Callable[[bool], None]) -> None:
        self._producer.send(
            topic, value, partition=partition, on_delivery=lambda _, error: done(error is not None)
        )

    def flush(self) -> None:
        self._producer.flush(120.0)


class ConfluentClient:
    """librdkafka through confluent-kafka."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import confluent_kafka

        self._producer = confluent_kafka.Producer(settings)
        self._full = BufferError

    def send(self, topic: str, partition: int, value: bytes, done: Callable[[bool], None]) -> None:
        def delivered(error: object, _message: object) -> None:
            done(error is not None)

        while True:
            try:
                self._producer.produce(topic, value, partition=partition, on_delivery=delivered)
                self._producer.poll(0)
                return
            except self._full:
                self._producer.poll(0.01)

    def flush(self) -> None:
        self._producer.flush(120.0)


CLIENTS: dict[str, Callable[[dict[str, Any]], Client]] = {
    "oncelog": OncelogClient,
    "confluent-kafka": ConfluentClient,
}


def run(spec: WorkerSpec) -> Report:
    """Warm up, then send the load, and measure."""
    client = CLIENTS[spec.client](spec.settings)
    value = bytes(spec.record_bytes)
    failures = 0

    def count(failed: bool) -> None:
        nonlocal failures
        failures += failed

    for index in range(min(WARM_UP_RECORDS, spec.records)):
        client.send(spec.topic, index % spec.partitions, value, count)
    client.flush()
    latencies_ms: list[float] = []
    began, cpu_began = time.perf_counter(), time.process_time()
    if spec.rate_per_s is None:
        for index in range(spec.records):
            client.send(spec.topic, index % spec.partitions, value, count)
    else:
        _send_paced(client, spec, value, count, latencies_ms)
    client.flush()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return Report(seconds, cpu_seconds, spec.records, failures, max_rss_bytes(), latencies_ms)


def _send_paced(
    client: Client, spec: WorkerSpec, value: bytes, count: Callable[[bool], None], latencies_ms: list[float]
) -> None:
    assert spec.rate_per_s is not None
    clock = time.perf_counter
    began = clock()
    for index in range(spec.records):
        due = began + index / spec.rate_per_s
        while (wait := due - clock()) > 0:
            time.sleep(wait)

        def done(failed: bool, sent: float = clock()) -> None:
            latencies_ms.append((clock() - sent) * 1000)
            count(failed)

        client.send(spec.topic, index % spec.partitions, value, done)


def generate(spec: WorkerSpec) -> Report:
    """Run a load in a separate process. Raises OncelogError if the process or any record failed."""
    report = Report(**run_child("oncelog_bench.generators", asdict(spec)))
    if report.failed:
        raise OncelogError(f"{spec.client}: {report.failed} records failed, so nothing was measured")
    return report


def run_child(module: str, spec: Mapping[str, Any]) -> Any:
    """Run `python -m module SPEC` and return its output. SPEC and output are JSON.

    If the process fails, raises OncelogError with the end of the process's standard error.
    """
    command = [sys.executable, "-m", module, json.dumps(spec)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise OncelogError(f"{module} failed:\n{error.stderr[-2000:]}") from None
    except subprocess.TimeoutExpired:
        raise OncelogError(f"{module} did not end within {TIMEOUT_S:g} s") from None
    return json.loads(done.stdout)


def main() -> None:
    """Run the load of the WorkerSpec on the command line, and print the report. Both are JSON."""
    print(json.dumps(asdict(run(WorkerSpec(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
