"""Latency from send to a read_committed consumer, by commit interval, with Oncelog and Apache Kafka."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from oncelog_bench.brokers import BROKERS, Side, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.delivery_worker import Report, WorkerSpec
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
from oncelog_bench.generators import run_child
from oncelog_bench.page import markdown_table, number, range_of_ratios

NAME = "read_committed"
SUMMARY = "The time from send to a read_committed consumer, by commit interval; Oncelog and Apache Kafka."
RATIO = f"{OURS} / {KAFKA}"
BY = {"commit_interval_ms": "commit every ms"}
METRICS = (
    Metric("p50_ms", "send to delivery p50 ms"),
    Metric("p99_ms", "send to delivery p99 ms"),
    Metric("commit_p50_ms", "commit to delivery p50 ms"),
    Metric("commit_p99_ms", "commit to delivery p99 ms"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. `seconds` must be long enough for several commits at the longest interval."""

    brokers: tuple[str, ...] = BROKERS
    commit_intervals_ms: tuple[int, ...] = (10, 100, 1_000)
    rate_per_s: float = 500.0
    record_bytes: int = 1_024
    partitions: int = 3
    seconds: float = 3.0
    repeats: int = 5
    warm_up_seconds: float = 5.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(self.commit_intervals_ms)


QUICK = Plan((OURS,), (10, 50), rate_per_s=200.0, seconds=0.2, repeats=1, warm_up_seconds=0.1)


def _ratio(metric: str, interval_ms: int) -> Any:
    return lambda result: figure(result, metric, broker=RATIO, commit_interval_ms=interval_ms)


TARGETS = tuple(
    Target(
        f"{text} from send to a read_committed reader to Apache Kafka's: commit every {interval_ms:g} ms",
        1.0,
        "times",
        False,
        _ratio(metric, interval_ms),
    )
    for interval_ms in Plan().commit_intervals_ms
    for metric, text in (("p50_ms", "p50"), ("p99_ms", "p99"))
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    shortest_ms = min(plan.commit_intervals_ms)
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        # Warm up with transactions as well, because the warm-up of `running` has none.
        for side in sides.every:
            _take(plan, shortest_ms, side, plan.warm_up_seconds)
        for repeat, interval_ms, name in interleaved(plan.commit_intervals_ms, sides.names, plan.repeats):
            taken = _take(plan, interval_ms, sides[name], plan.seconds)
            samples.append({"repeat": repeat, "broker": name, "commit_interval_ms": interval_ms, **taken})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


def _take(plan: Plan, interval_ms: int, side: Side, seconds: float) -> dict[str, float]:
    with side.topic(plan.partitions) as topic:
        spec = WorkerSpec(
            side.bootstrap_servers, topic, plan.partitions, plan.record_bytes, plan.rate_per_s, interval_ms,
            seconds,
        )  # fmt: skip
        report = Report(**run_child("oncelog_bench.delivery_worker", asdict(spec)))
    p50_ms, p99_ms = _quantiles(report.delivery_ms)
    commit_p50_ms, commit_p99_ms = _quantiles(report.commit_ms)
    return {
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "commit_p50_ms": commit_p50_ms,
        "commit_p99_ms": commit_p99_ms,
    }


def _quantiles(taken_ms: list[float]) -> tuple[float, float]:
    """Return the 50th and the 99th percentile. If there is only one value, both are that value."""
    if len(taken_ms) < 2:
        return taken_ms[0], taken_ms[0]
    cuts = statistics.quantiles(taken_ms, n=100, method="inclusive")
    return cuts[49], cuts[98]


def section(result: Result) -> str:
    """Return, as Markdown, the section on the time to delivery by commit interval."""
    plan = result["plan"]
    return f"""\
## From send to a read_committed reader

Our producer sends {plan["rate_per_s"]:g} records of {plan["record_bytes"]:,} bytes per second, evenly spaced,
to {plan["partitions"]} partitions and commits at fixed intervals. Our consumer reads them with
`isolation.level=read_committed`. Both share one event loop in one process, and are the same for both brokers.
"Send to delivery" runs from the time when a record falls due until `poll` returns it. Half the interval of it
is waiting for the commit; a record due during a commit waits for the next one. "Commit to delivery" runs from
the call of commit until the transaction's last record is returned: the time that broker and client add.
Samples of {plan["seconds"]:g} s, medians of {plan["repeats"]}, interleaved.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {_added(result)} {range_of_ratios(result, RATIO, "p99_ms", "p99 from send to delivery")}
"""


def _added(result: Result) -> str:
    """Return a sentence per broker on the median time from a transaction's commit to its delivery."""
    sentences = []
    for broker in dict.fromkeys(row["broker"] for row in result["medians"] if " / " not in row["broker"]):
        taken = [row["commit_p50_ms"] for row in result["medians"] if row["broker"] == broker]
        low, high = number(min(taken)), number(max(taken))
        sentences.append(
            f"Through {broker} half of the transactions are read {low} to {high} ms after their commit."
        )
    return " ".join(sentences)


def picture(result: Result) -> str:
    """Return an SVG of the time to delivery by commit interval."""
    charts = [
        Chart(title, "commit every ms", "ms", lines_of(result, "commit_interval_ms", name))
        for name, title in (
            ("p50_ms", "send to delivery, p50"),
            ("p99_ms", "send to delivery, p99"),
            ("commit_p99_ms", "commit to delivery, p99"),
        )
    ]
    return draw_curves("From send to a read_committed reader", charts)
