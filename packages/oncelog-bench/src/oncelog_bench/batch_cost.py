"""Processor time of the broker per batch, with idempotence off and on, for Oncelog and Apache Kafka."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from oncelog_devtools.svg_charts import BLUE, MUTED, bar_chart

from oncelog_bench.brokers import ALL_BROKERS, raw_produce, records_per_batch, running
from oncelog_bench.framework import (
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
from oncelog_bench.page import markdown_table, number

NAME = "batch_cost"
SUMMARY = "Cost of idempotence in processor time per batch, for our broker and Apache Kafka."
RATIO = "on / off"
BY = {"broker": "broker", "batch_records": "records in a batch"}
METRICS = (
    Metric("cpu_us_per_batch", "broker CPU µs per batch"),
    Metric("mb_per_s", "MB/s", True),
    Metric("p99_ms", "p99 ms"),
    Metric("generator_cpu_share", "generator CPU share"),
)


class Case(NamedTuple):
    broker: str
    batch_records: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. `batch_records` are the batch sizes: single records and full batches."""

    brokers: tuple[str, ...] = ALL_BROKERS
    repeats: int = 5
    seconds: float = 5.0
    record_bytes: int = 1_024
    batch_records: tuple[int, ...] = (1, records_per_batch(1_024))
    depth: int = 5
    warm_up_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(self.batch_records) * 2


QUICK = Plan((OURS,), repeats=1, seconds=0.1, warm_up_seconds=0.1)


def _added_percent(result: Result) -> float | None:
    largest = max(row["batch_records"] for row in result["medians"])
    ratio = figure(result, "cpu_us_per_batch", broker=OURS, batch_records=largest, idempotence=RATIO)
    return None if ratio is None else (ratio - 1) * 100


TARGETS = (
    Target(
        "broker CPU that idempotence adds to a 16 KB batch of 1 KB records", 5.0, "%", False, _added_percent
    ),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        cases = [Case(name, count) for count in plan.batch_records for name in sides.names]
        for repeat, case, mode in interleaved(cases, ("off", "on"), plan.repeats):
            side = sides[case.broker]
            with side.topic(1) as topic:
                sizes = {"record_bytes": plan.record_bytes, "batch_records": case.batch_records}
                report = raw_produce(
                    side.spec(
                        topic, seconds=plan.seconds, depth=plan.depth, idempotence=mode == "on", **sizes
                    )
                )
            taken = {
                "cpu_us_per_batch": report.broker_cpu_seconds / report.batches * 1e6,
                "mb_per_s": report.records * plan.record_bytes / 1e6 / report.seconds,
                **report.quantiles,
                "generator_cpu_share": report.cpu_seconds / report.seconds,
            }
            samples.append({"repeat": repeat, "idempotence": mode, **case._asdict(), **taken})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="idempotence", base="off", metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


def section(result: Result) -> str:
    """Return, as Markdown, the section on processor time per batch, off and on."""
    plan = result["plan"]
    return f"""\
## What idempotence costs a broker, per batch

The raw generator sends batches of {plan["record_bytes"]:,}-byte records to one partition on one
connection, {plan["depth"]} in flight, for {plan["seconds"]:g} s. It writes sequence number and checksum into
every batch in both modes, so that both cost it the same. Medians of {plan["repeats"]} pairs.

{markdown_table(result["medians"], by=BY, side="idempotence", metrics=METRICS)}

**What this shows.** {" ".join(_sentences(result))}
"""


def _sentences(result: Result) -> list[str]:
    return [
        f"In batches of {row['batch_records']} idempotence changes the processor time of {row['broker']} "
        f"by {(row['cpu_us_per_batch'] - 1) * 100:+.1f} %."
        for row in result["medians"]
        if row["idempotence"] == RATIO
    ]


def picture(result: Result) -> str:
    """Return an SVG with a bar per broker, batch size and mode (idempotence off or on)."""
    rows = [row for row in result["medians"] if row["idempotence"] != RATIO]
    bars = [
        (
            f"{row['broker']}, {row['batch_records']} in a batch",
            row["cpu_us_per_batch"],
            f"{row['idempotence']}: {number(row['cpu_us_per_batch'])} µs",
            BLUE if row["idempotence"] == "on" else MUTED,
        )
        for row in rows
    ]
    return bar_chart("Broker CPU per batch, idempotence off and on", bars)
