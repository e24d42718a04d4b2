"""Throughput of Oncelog and Apache Kafka by record size, partitions, connections, client and linger."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncelog_devtools.apache_kafka import MissingDependency, fetch_jars

from oncelog.errors import OncelogError
from oncelog_bench.brokers import BROKERS, Side, Sides, raw_produce, records_per_batch, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.framework import (
    KAFKA,
    OURS,
    Metric,
    OnSample,
    Result,
    Target,
    compare,
    figure,
    interleaved,
    result_of,
)
from oncelog_bench.generators import WorkerSpec, generate
from oncelog_bench.page import markdown_table, number
from oncelog_bench.process import cpu_seconds, rss_mb

NAME = "throughput"
SUMMARY = "Write throughput of our broker and Apache Kafka by record size, partitions, connections, clients."
RAW = "raw"
RATIO = f"{OURS} / {KAFKA}"
BY = {
    "generator": "generator",
    "record_bytes": "record bytes",
    "partitions": "partitions",
    "connections": "connections",
}

METRICS = (
    Metric("mb_per_s", "MB/s", True),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("p999_ms", "p99.9 ms"),
    Metric("cpu_s_per_gb", "broker CPU s/GB"),
    Metric("cpu_s_per_million_requests", "broker CPU s/10^6 requests"),
    Metric("generator_cpu_share", "generator CPU share"),
    Metric("rss_mb", "broker MB"),
)

SETTINGS = {
    "acks": "all",
    "enable.idempotence": "true",
    "max.in.flight.requests.per.connection": 5,
    "batch.size": 16_384,
    "compression.type": "none",
}


class Case(NamedTuple):
    """The parameters of a sample. `generator` is RAW, or a client and its linger: "NAME, linger 5 ms"."""

    generator: str
    record_bytes: int
    partitions: int
    connections: int
    linger_ms: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    The raw producer runs every record size, every number of partitions and every number of connections, each
    with the middle values of the others, except for one connection. The clients run these values with every
    linger.
    """

    brokers: tuple[str, ...] = BROKERS
    repeats: int = 5
    seconds: float = 5.0
    record_bytes: tuple[int, ...] = (100, 1_024, 10_240)
    partitions: tuple[int, ...] = (1, 3, 50)
    connections: tuple[int, ...] = (1, 10, 50)
    linger_ms: tuple[int, ...] = (5,)
    client_records: int = 1_000_000
    warm_up_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(list(self.cases()))

    def cases(self) -> Iterator[Case]:
        middle = self.middle("record_bytes"), self.middle("partitions")
        sizes = [(record_bytes, middle[1]) for record_bytes in self.record_bytes]
        sizes += [(middle[0], partitions) for partitions in self.partitions if partitions != middle[1]]
        for record_bytes, partitions in sizes:
            yield Case(RAW, record_bytes, partitions, self.connections[0])
        for connections in self.connections[1:]:
            yield Case(RAW, *middle, connections)
        for client in _clients(self.brokers):
            for linger_ms in self.linger_ms:
                yield Case(f"{client}, linger {linger_ms} ms", *middle, 1, linger_ms)

    def middle(self, name: str) -> int:
        values: tuple[int, ...] = getattr(self, name)
        return values[len(values) // 2]


QUICK = Plan(
    brokers=(OURS,), repeats=1, seconds=0.1, record_bytes=(1_024,), partitions=(1, 3), connections=(1, 10),
    linger_ms=(5,), client_records=5_000, warm_up_seconds=0.1,
)  # fmt: skip


def _clients(brokers: Sequence[str]) -> list[str]:
    """Return the installed clients. Kafka's own client is included if Apache Kafka is among `brokers`."""
    clients = ["confluent-kafka"] if importlib.util.find_spec("confluent_kafka") else []
    if KAFKA in brokers:
        with suppress(MissingDependency):
            fetch_jars()
            clients.append("producer-perf-test")
    return clients


def _ratio(metric: str) -> Any:
    return lambda result: figure(
        result, metric, broker=RATIO, generator=RAW, record_bytes=1_024, partitions=3, connections=1
    )


_CELL = "1 KB records, 3 partitions, 1 connection"
TARGETS = (
    Target(f"throughput to Apache Kafka's: {_CELL}", 1.5, "times", True, _ratio("mb_per_s")),
    Target(f"broker CPU per GB to Apache Kafka's: {_CELL}", 0.45, "times", False, _ratio("cpu_s_per_gb")),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        for repeat, case, name in interleaved(plan.cases(), sides.names, plan.repeats):
            head = {"repeat": repeat, "broker": name, **case._asdict()}
            samples.append({**head, **_take(plan, case, sides, name)})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, settings=SETTINGS, left_out=sides.left_out)


def _take(plan: Plan, case: Case, sides: Sides, name: str) -> dict[str, float]:
    side = sides[name]
    with side.topic(case.partitions) as topic:
        if case.generator == RAW:
            taken = _raw(plan, case, side, topic)
        else:
            taken = _client(plan, case, side, topic, sides.run_tool)
        return {**taken, "rss_mb": rss_mb(side.pid)}


def _client(plan: Plan, case: Case, side: Side, topic: str, run_tool: Callable[..., str]) -> dict[str, float]:
    """Return a client's throughput, and the broker's processor time per GB.

    The processor time excludes the time that the idle broker uses while the client starts.
    """
    began, before = time.perf_counter(), cpu_seconds(side.pid)
    if case.generator.startswith("confluent-kafka"):
        figures = _confluent(plan, case, side, topic)
    else:
        figures = _perf_test(plan, case, side, topic, run_tool)
    seconds, used = time.perf_counter() - began, cpu_seconds(side.pid) - before
    gigabytes = plan.client_records * case.record_bytes / 1e9
    waited = seconds - gigabytes * 1000 / figures["mb_per_s"]
    return {**figures, "cpu_s_per_gb": (used - waited * side.idle_cores) / gigabytes}


def _raw(plan: Plan, case: Case, side: Side, topic: str) -> dict[str, float]:
    sizes = {
        "record_bytes": case.record_bytes,
        "batch_records": records_per_batch(case.record_bytes),
        "batches": case.partitions,
        "partitions": case.partitions,
        "connections": case.connections,
    }
    report = raw_produce(side.spec(topic, seconds=plan.seconds, **sizes))
    gigabytes = report.records * case.record_bytes / 1e9
    return {
        "mb_per_s": gigabytes * 1000 / report.seconds,
        **report.quantiles,
        "cpu_s_per_gb": report.broker_cpu_seconds / gigabytes,
        "cpu_s_per_million_requests": report.broker_cpu_seconds / report.requests * 1e6,
        "generator_cpu_share": report.cpu_seconds / report.seconds,
    }


def _confluent(plan: Plan, case: Case, side: Side, topic: str) -> dict[str, float]:
    settings = {**SETTINGS, "bootstrap.servers": side.bootstrap_servers, "linger.ms": case.linger_ms}
    spec = WorkerSpec(
        "confluent-kafka", settings, topic, case.partitions, plan.client_records, case.record_bytes, None
    )
    report = generate(spec)
    return {
        "mb_per_s": plan.client_records * case.record_bytes / 1e6 / report.seconds,
        "generator_cpu_share": report.cpu_seconds / report.seconds,
    }


_LAST_LINE = re.compile(
    r"(?P<records>\d+) records sent, (?P<rate>[\d.]+) records/sec .*? ms max latency, "
    r"(?P<p50>\d+) ms 50th, \d+ ms 95th, (?P<p99>\d+) ms 99th, (?P<p999>\d+) ms 99.9th"
)


def _perf_test(
    plan: Plan, case: Case, side: Side, topic: str, run_tool: Callable[..., str]
) -> dict[str, float]:
    sizes = ["--topic", topic, "--num-records", str(plan.client_records), "--throughput", "-1"]
    sizes += ["--record-size", str(case.record_bytes), "--producer-props"]
    sizes += [f"bootstrap.servers={side.bootstrap_servers}", f"linger.ms={case.linger_ms}"]
    sizes += [f"{key}={value}" for key, value in SETTINGS.items()]
    printed = run_tool("org.apache.kafka.tools.ProducerPerformance", *sizes)
    return read_perf_test(printed, case.record_bytes)


def read_perf_test(printed: str, record_bytes: int) -> dict[str, float]:
    """Return the figures of kafka-producer-perf-test's last line. Raises OncelogError if it is missing."""
    lines = list(_LAST_LINE.finditer(printed))
    if not lines:
        raise OncelogError(f"kafka-producer-perf-test did not print its summary line: {printed[-500:]}")
    last = lines[-1]
    return {
        "mb_per_s": float(last["rate"]) * record_bytes / 1e6,
        "p50_ms": float(last["p50"]),
        "p99_ms": float(last["p99"]),
        "p999_ms": float(last["p999"]),
    }


def section(result: Result) -> str:
    """Return, as Markdown, the section on throughput and processor time of both brokers."""
    plan, machine = result["plan"], result["machine"]
    table = markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)
    return f"""\
## Throughput

Our broker and Apache Kafka {machine["apache-kafka"]} both run all the time on one machine and are loaded in
turn, each sample on a new topic. Medians of {plan["repeats"]} samples; `{RATIO}` is the median of
the pairs' ratios. Records are idempotent with `acks=all`, in batches of 16 KB, five requests in flight per
connection. The raw generator patches and sends prebuilt frames, one batch per partition in a request,
for {plan["seconds"]:g} s; confluent-kafka and `kafka-producer-perf-test` send
{plan["client_records"]:,} records. Broker and generator share {machine["cores"]} cores, so processor
seconds matter as much as MB/s. An idle broker's use while such a client starts is subtracted.

{table}

{_what_it_shows(result)}
"""


def _what_it_shows(result: Result) -> str:
    ratios = [row for row in result["medians"] if row["broker"] == RATIO]
    raw = [row for row in ratios if row["generator"] == RAW]
    if not raw:
        return "**What this shows.** Without Apache Kafka beside it there is nothing to compare."
    faster = sum(row["mb_per_s"] > 1 for row in ratios)
    speeds, costs = ([row[name] for row in raw] for name in ("mb_per_s", "cpu_s_per_gb"))
    return (
        f"**What this shows.** In {faster} of {len(ratios)} rows our broker takes more MB/s than Kafka's. "
        f"Under the raw generator it reaches {number(min(speeds))} to {number(max(speeds))} times Kafka's "
        f"throughput at {number(min(costs))} to {number(max(costs))} times its processor time per GB."
    )


def picture(result: Result) -> str:
    """Return an SVG of MB/s and processor seconds per GB by record size, partitions and connections."""
    plan = Plan(**{name: _tuple(value) for name, value in result["plan"].items()})
    fixed = {
        "record_bytes": plan.middle("record_bytes"),
        "partitions": plan.middle("partitions"),
        "connections": plan.connections[0],
    }
    charts = [
        Chart(
            f"{heading} by {BY[name]}",
            BY[name],
            heading,
            lines_of(result, name, metric, generator=RAW, **_without(fixed, name)),
        )
        for metric, heading in (("mb_per_s", "MB/s"), ("cpu_s_per_gb", "broker CPU s/GB"))
        for name in fixed
    ]
    return draw_curves("Throughput and processor time", charts)


def _without(fixed: dict[str, int], name: str) -> dict[str, Any]:
    return {key: value for key, value in fixed.items() if key != name}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
