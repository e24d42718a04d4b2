"""Acknowledgements after the data is on disk (`flush.messages=1` on both brokers), by connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oncelog_bench.brokers import BROKERS, raw_produce, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.framework import KAFKA, OURS, Metric, OnSample, Result, compare, interleaved, result_of
from oncelog_bench.page import markdown_table, range_of_ratios

NAME = "durable"
SUMMARY = (
    "Durable requests per second: one fdatasync for all acknowledgements that wait; Oncelog and Apache Kafka."
)
RATIO = f"{OURS} / {KAFKA}"
BY = {"connections": "connections"}
SETTINGS = {"flush.messages": 1}
PARTITIONS = 3
METRICS = (
    Metric("requests_per_s", "requests/s", True),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("cpu_us_per_request", "broker CPU µs per request"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    brokers: tuple[str, ...] = BROKERS
    repeats: int = 5
    seconds: float = 5.0
    record_bytes: int = 1_024
    connections: tuple[int, ...] = (1, 10, 50)
    warm_up_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(self.connections)


QUICK = Plan((OURS,), repeats=1, seconds=0.1, connections=(1, 10), warm_up_seconds=0.1)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        for repeat, connections, name in interleaved(plan.connections, sides.names, plan.repeats):
            side = sides[name]
            with side.topic(PARTITIONS, SETTINGS) as topic:
                sizes = {"connections": connections, "partitions": PARTITIONS}
                report = raw_produce(
                    side.spec(topic, seconds=plan.seconds, depth=1, record_bytes=plan.record_bytes, **sizes)
                )
            taken = {
                "requests_per_s": report.requests / report.seconds,
                **report.quantiles,
                "cpu_us_per_request": report.broker_cpu_seconds / report.requests * 1e6,
            }
            samples.append({"repeat": repeat, "broker": name, "connections": connections, **taken})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, settings=SETTINGS, left_out=sides.left_out)


def section(result: Result) -> str:
    """Return, as Markdown, the section on durable requests per second."""
    plan = result["plan"]
    return f"""\
## Acknowledged by the disk

With `flush.messages=1` a request is acknowledged only after fdatasync. Each request has one record of
{plan["record_bytes"]:,} bytes, idempotent, one in flight per connection, to {PARTITIONS} partitions in turn
for {plan["seconds"]:g} s. Medians of {plan["repeats"]} interleaved samples.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "requests_per_s", "acknowledged requests a second")}
{range_of_ratios(result, RATIO, "p99_ms", "p99")}
"""


def picture(result: Result) -> str:
    """Return an SVG of durable requests per second by the number of connections."""
    charts = [
        Chart(metric.heading, "connections", metric.heading, lines_of(result, "connections", metric.name))
        for metric in METRICS
    ]
    return draw_curves("Acknowledged by the disk", charts)
