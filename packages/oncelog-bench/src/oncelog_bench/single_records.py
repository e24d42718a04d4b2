"""Requests with one record: the cost of a request apart from its bytes, for Oncelog and Apache Kafka."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncelog_bench.brokers import ALL_BROKERS, raw_produce, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.framework import (
    COMPILED,
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
from oncelog_bench.page import markdown_table, range_of_ratios

NAME = "single_records"
SUMMARY = "Requests with one record, per second and per processor second; Oncelog and Apache Kafka."
RATIO, COMPILED_RATIO = f"{OURS} / {KAFKA}", f"{COMPILED} / {KAFKA}"
BY = {"depth": "in flight", "connections": "connections"}
PARTITIONS = 3

METRICS = (
    Metric("requests_per_s", "requests/s", True),
    Metric("requests_per_cpu_s", "requests per broker CPU s", True),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("p999_ms", "p99.9 ms"),
    Metric("generator_cpu_share", "generator CPU share"),
)


class Case(NamedTuple):
    depth: int
    connections: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size: every depth (requests in flight per connection) with every number of
    connections.
    """

    brokers: tuple[str, ...] = ALL_BROKERS
    repeats: int = 5
    seconds: float = 5.0
    record_bytes: int = 1_024
    depths: tuple[int, ...] = (1, 5)
    connections: tuple[int, ...] = (1, 10, 50)
    warm_up_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(self.cases())

    def cases(self) -> list[Case]:
        return [Case(depth, connections) for depth in self.depths for connections in self.connections]


QUICK = Plan((OURS,), repeats=1, seconds=0.1, connections=(1, 10), warm_up_seconds=0.1)


def _ratio(metric: str, broker: str, connections: int) -> Callable[[Result], float | None]:
    return lambda result: figure(result, metric, broker=broker, depth=5, connections=connections)


_CODES = {RATIO: "", COMPILED_RATIO: ", with the modules that mypyc compiles"}
TARGETS = tuple(
    Target(
        f"{what} to Apache Kafka's: {connections} connections, 5 in flight{code}",
        limit, "times", True, _ratio(metric, ratio, connections),
    )
    for ratio, code in _CODES.items()
    for what, metric, limit, counts in (
        ("one-record requests/s", "requests_per_s", 1.0, (1, 10, 50)),
        ("one-record requests per broker CPU second", "requests_per_cpu_s", round(1 / 0.6, 2), (10,)),
    )
    for connections in counts
)  # fmt: skip


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        for repeat, case, name in interleaved(plan.cases(), sides.names, plan.repeats):
            side = sides[name]
            with side.topic(PARTITIONS) as topic:
                sizes = {"record_bytes": plan.record_bytes, "partitions": PARTITIONS, **case._asdict()}
                report = raw_produce(side.spec(topic, seconds=plan.seconds, **sizes))
            taken = {
                "requests_per_s": report.requests / report.seconds,
                "requests_per_cpu_s": report.requests / report.broker_cpu_seconds,
                **report.quantiles,
                "generator_cpu_share": report.cpu_seconds / report.seconds,
            }
            samples.append({"repeat": repeat, "broker": name, **case._asdict(), **taken})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


def section(result: Result) -> str:
    """Return, as Markdown, the section on requests per second and per processor second."""
    plan = result["plan"]
    return f"""\
## One-record requests

The raw generator sends idempotent requests of one record of {plan["record_bytes"]:,} bytes with `acks=all` to
{PARTITIONS} partitions in turn for {plan["seconds"]:g} s. Medians of {plan["repeats"]} interleaved samples.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "requests_per_cpu_s", "requests per processor second")}
{range_of_ratios(result, RATIO, "requests_per_s", "requests a second")}
{range_of_ratios(result, COMPILED_RATIO, "requests_per_cpu_s", "requests per processor second")}
"""


def picture(result: Result) -> str:
    """Return an SVG of the figures by the number of connections, with a chart per figure and depth."""
    charts = [
        Chart(
            f"{depth} in flight", "connections", metric.heading,
            lines_of(result, "connections", metric.name, depth=depth),
        )
        for metric in METRICS[:2]
        for depth in result["plan"]["depths"]
    ]  # fmt: skip
    return draw_curves("One-record requests", charts)
