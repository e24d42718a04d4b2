"""Throughput, latency, processor time and memory with idempotence off and on (behaviour I24,
docs/behaviours.md).

All settings but `enable.idempotence` are equal: acks=all, five requests in flight, linger, batch size. Each
sample has a new broker process on a new directory and a new load generator process. Off and on alternate, and
each of them is first in every second pair, so that a change of the machine's speed affects both equally.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oncelog_devtools.svg_charts import BLUE, INK, MUTED, VIOLET, Svg

from oncelog.testing.broker_process import BrokerProcess
from oncelog_bench.framework import Metric, OnSample, Result, Target, compare, figure, interleaved, result_of
from oncelog_bench.generators import WorkerSpec, generate
from oncelog_bench.page import markdown_table, number
from oncelog_bench.process import cpu_seconds, rss_mb

NAME = "idempotence"
SUMMARY = "Cost of idempotence, end to end: our producer and librdkafka, with idempotence off and on."
TOPIC = "bench"
RATIO = "on / off"

# These are the Java client's defaults. With equal settings, the two clients differ only in their code.
SETTINGS = {
    "acks": "all",
    "max.in.flight.requests.per.connection": 5,
    "linger.ms": 5,
    "batch.size": 16_384,
    "compression.type": "none",
}


def available_clients() -> tuple[str, ...]:
    """Return the installed load generators. Oncelog's is always installed."""
    return ("oncelog", "confluent-kafka") if importlib.util.find_spec("confluent_kafka") else ("oncelog",)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size: `repeats` pairs per client.

    A median of fewer than five pairs has no meaning.
    """

    clients: tuple[str, ...] = field(default_factory=available_clients)
    repeats: int = 5
    records: int = 1_000_000
    record_bytes: int = 1_024
    partitions: int = 3
    paced_per_s: int = 1_000
    paced_seconds: float = 5.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.clients) * 2


QUICK = Plan(repeats=1, records=3_000, paced_seconds=0.2)

METRICS = (
    Metric("records_per_s", "records/s", True),
    Metric("mb_per_s", "MB/s", True),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("broker_cpu_s_per_gb", "broker CPU s/GB"),
    Metric("client_cpu_s_per_gb", "client CPU s/GB"),
    Metric("broker_rss_mb", "broker MB"),
    Metric("client_rss_mb", "client MB"),
)


def _lost_percent(result: Result) -> float | None:
    ratio = figure(result, "records_per_s", client="oncelog", idempotence=RATIO)
    return None if ratio is None else (1 - ratio) * 100


TARGETS = (
    Target("throughput that idempotence costs our producer, 1 KB records", 1.0, "%", False, _lost_percent),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    for repeat, client, mode in interleaved(plan.clients, ("off", "on"), plan.repeats):
        head = {"repeat": repeat, "client": client, "idempotence": mode}
        samples.append({**head, **_take(plan, client, mode)})
        on_sample(len(samples))
    rows = compare(samples, by=["client"], side="idempotence", base="off", metrics=METRICS)
    return result_of(NAME, plan, samples, rows, settings=SETTINGS)


def _take(plan: Plan, client: str, mode: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory:
        broker = BrokerProcess(Path(directory) / "broker", settings={"num.partitions": plan.partitions})
        with broker:
            paced = round(plan.paced_per_s * plan.paced_seconds)
            slow = generate(_spec(plan, client, mode, broker, paced, plan.paced_per_s))
            cpu_before = cpu_seconds(broker.pid)
            fast = generate(_spec(plan, client, mode, broker, plan.records, None))
            broker_cpu = cpu_seconds(broker.pid) - cpu_before
            broker_rss_mb = rss_mb(broker.pid)
    gigabytes = plan.records * plan.record_bytes / 1e9
    quantiles = statistics.quantiles(slow.latencies_ms, n=100, method="inclusive")
    return {
        "mb_per_s": gigabytes * 1000 / fast.seconds,
        "records_per_s": plan.records / fast.seconds,
        "p50_ms": quantiles[49],
        "p99_ms": quantiles[98],
        "broker_cpu_s_per_gb": broker_cpu / gigabytes,
        "client_cpu_s_per_gb": fast.cpu_seconds / gigabytes,
        "broker_rss_mb": broker_rss_mb,
        "client_rss_mb": fast.max_rss_bytes / 1e6,
    }


def _spec(
    plan: Plan, client: str, mode: str, broker: BrokerProcess, records: int, rate: int | None
) -> WorkerSpec:
    settings: dict[str, Any] = {
        **SETTINGS,
        "bootstrap.servers": broker.bootstrap_servers,
        "enable.idempotence": "true" if mode == "on" else "false",
    }
    if rate is not None:
        settings["linger.ms"] = 0
    return WorkerSpec(client, settings, TOPIC, plan.partitions, records, plan.record_bytes, rate)


def section(result: Result) -> str:
    """Return, as Markdown, the section on idempotence off and on (behaviour I24, docs/behaviours.md)."""
    plan = result["plan"]
    settings = ", ".join(f"`{key}={value}`" for key, value in result["settings"].items())
    table = markdown_table(result["medians"], by={"client": "client"}, side="idempotence", metrics=METRICS)
    return f"""\
## What idempotence costs, end to end

{plan["record_bytes"]:,}-byte records to our broker, {plan["partitions"]} partitions, {plan["records"]:,}
records a run at full speed, then latency at {plan["paced_per_s"]:,} records a second with `linger.ms=0`.
Off and on alternate, each on a fresh broker and in a fresh process; medians of {plan["repeats"]} pairs,
and `on / off` is the median of the pairs' ratios.
Equal for all: {settings}.

{table}

{_what_it_shows(result)}
"""


def _what_it_shows(result: Result) -> str:
    sentences = []
    for client in dict.fromkeys(row["client"] for row in result["medians"]):
        speed = figure(result, "records_per_s", client=client, idempotence=RATIO)
        cost = figure(result, "broker_cpu_s_per_gb", client=client, idempotence=RATIO)
        sentences.append(
            f"{client} keeps {number((speed or 0) * 100)} % of its throughput with idempotence on, at "
            f"{number(cost)} times the broker's processor time."
        )
    return "**What this shows.** " + " ".join(sentences)


def picture(result: Result) -> str:
    """Return an SVG with a pair of bars (off, on) per metric and client, each pair on its own scale."""
    rows = {(row["client"], row["idempotence"]): row for row in result["medians"]}
    clients = list(dict.fromkeys(client for client, _ in rows))
    left, pair, column = 150.0, 42.0, 380.0
    svg = Svg(left + column * len(clients), 76 + pair * len(METRICS), "Idempotence off and on")
    svg.rect(14, 12, 12, 12, MUTED, rx=2)
    svg.text(32, 22, "off", size=12)
    svg.rect(66, 12, 12, 12, BLUE, rx=2)
    svg.text(84, 22, "on", size=12)
    for index, client in enumerate(clients):
        svg.text(left + column * index, 50, client, size=14, bold=True)
    for line, metric in enumerate(METRICS):
        y = 64 + pair * line
        better = "more is better" if metric.more_is_better else "less is better"
        svg.text(left - 12, y + 14, metric.heading, size=12, anchor="end")
        svg.text(left - 12, y + 28, better, size=9, fill=MUTED, anchor="end")
        for index, client in enumerate(clients):
            values = [rows[client, mode][metric.name] for mode in ("off", "on")]
            _pair(svg, left + column * index, y, values, rows[client, RATIO][metric.name])
    return svg.render()


def _pair(svg: Svg, x: float, y: float, values: list[float], ratio: float) -> None:
    longest = max(values) or 1.0
    for offset, (value, colour) in enumerate(zip(values, (MUTED, BLUE), strict=True)):
        length = 190 * value / longest
        svg.rect(x, y + 15 * offset, max(length, 1.5), 12, colour, rx=2)
        svg.text(x + length + 6, y + 15 * offset + 10, number(value), size=10, fill=INK)
    svg.text(x + 262, y + 18, f"× {ratio:.2f}", size=12, fill=VIOLET, bold=True)
