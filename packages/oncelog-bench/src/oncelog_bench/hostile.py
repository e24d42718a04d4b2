"""A well-behaved producer while hostile clients attack: its send latency, and the broker's memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from oncelog_devtools.svg_charts import BLUE, WARN, bar_chart

from oncelog_bench.attacks import IDLE, NEVER_READS, SLOW_LORIS, AttackSpec, attacked
from oncelog_bench.brokers import BROKERS, Side, fill_topic, raw_produce, running
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
from oncelog_bench.page import markdown_table, number, range_of_ratios
from oncelog_bench.process import rss_mb

NAME = "hostile"
SUMMARY = "A producer's latency and the broker's memory beside hostile clients; Oncelog and Apache Kafka."
RATIO = f"{OURS} / {KAFKA}"
QUIET = "nobody"
BESIDE = (QUIET, IDLE, SLOW_LORIS, NEVER_READS)
BY = {"beside": "beside"}
METRICS = (
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("rss_mb", "broker memory MB"),
    Metric("cpu_us_per_send", "broker CPU µs per send"),
)
_BULK_BYTES = 16_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    `idle` connections do nothing, `slow` connections send one byte per second, and `deaf` connections never
    read.
    """

    brokers: tuple[str, ...] = BROKERS
    repeats: int = 5
    seconds: float = 4.0
    rate_per_s: float = 200.0
    idle: int = 10_000
    slow: int = 1_000
    deaf: int = 200
    warm_up_seconds: float = 5.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(BESIDE)


QUICK = Plan((OURS,), repeats=1, seconds=0.2, idle=50, slow=20, deaf=4, warm_up_seconds=0.1)


def _to_quiet(beside: str) -> Any:
    def ratio(result: Result) -> float | None:
        figures = [figure(result, "p99_ms", broker=OURS, beside=kind) for kind in (beside, QUIET)]
        return figures[0] / figures[1] if figures[0] and figures[1] else None

    return ratio


TARGETS = (
    Target("p99 of a send beside 10,000 idle connections, to quiet", 2.0, "times", False, _to_quiet(IDLE)),
    Target("the same beside 1,000 slow-loris", 2.0, "times", False, _to_quiet(SLOW_LORIS)),
    Target(
        "memory beside clients that never read", 400.0, "MB", False,
        lambda result: figure(result, "rss_mb", broker=OURS, beside=NEVER_READS),
    ),
)  # fmt: skip


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds, are_fresh=True) as sides:
        for repeat, beside, name in interleaved(BESIDE, sides.names, plan.repeats):
            taken = _take(plan, beside, sides[name])
            samples.append({"repeat": repeat, "broker": name, "beside": beside, **taken})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


def _take(plan: Plan, beside: str, side: Side) -> dict[str, float]:
    count = {IDLE: plan.idle, SLOW_LORIS: plan.slow, NEVER_READS: plan.deaf}
    with side.topic(1) as topic, side.topic(1) as bulk, contextlib.ExitStack() as stack:
        if beside == NEVER_READS:
            fill_topic(side, bulk, 1, 1_000, _BULK_BYTES)
        if beside != QUIET:
            stack.enter_context(attacked(AttackSpec(side.bootstrap_servers, beside, count[beside], bulk)))
        report = raw_produce(side.spec(topic, seconds=plan.seconds, rate_per_s=plan.rate_per_s))
        return {
            **report.quantiles,
            "rss_mb": rss_mb(side.pid),
            "cpu_us_per_send": report.broker_cpu_seconds / report.requests * 1e6,
        }


def section(result: Result) -> str:
    """Return, as Markdown, the section on latency and memory during attacks."""
    plan = result["plan"]
    return f"""\
## Beside hostile clients

One idempotent producer with `acks=all` sends one record of 1,024 bytes per request, one in flight,
{plan["rate_per_s"]:g} per second for {plan["seconds"]:g} s. Beside it run no other clients;
{plan["idle"]:,} connections that do nothing ("{IDLE}");
{plan["slow"]:,} that announce a request of 100,000 bytes and send one byte per second ("{SLOW_LORIS}"); or
{plan["deaf"]:,} that fetch 16 MB fifty times and never read a response ("{NEVER_READS}").
Clients reconnect if the broker closes their connection. Memory is the broker's resident memory meanwhile.
Apache Kafka's heap is 1 GB, and it does not return what it has once allocated.
Medians of {plan["repeats"]} interleaved samples.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {_sentence(result)} {range_of_ratios(result, RATIO, "p99_ms", "p99")}
"""


def _sentence(result: Result) -> str:
    sentences = []
    for broker in dict.fromkeys(row["broker"] for row in result["medians"] if " / " not in row["broker"]):
        p99 = [number(figure(result, "p99_ms", broker=broker, beside=beside)) for beside in BESIDE]
        memory = [number(figure(result, "rss_mb", broker=broker, beside=beside)) for beside in BESIDE]
        sentences.append(
            f"In this order {broker}'s p99 is {', '.join(p99)} ms and its memory {', '.join(memory)} MB."
        )
    return " ".join(sentences)


def picture(result: Result) -> str:
    """Return an SVG with the 99th percentile as a bar per broker and attack."""
    bars = [
        (
            f"{row['broker']}, {row['beside']}",
            row["p99_ms"],
            f"{number(row['p99_ms'])} ms, {number(row['rss_mb'])} MB",
            BLUE if row["broker"] == OURS else WARN,
        )
        for row in result["medians"]
        if " / " not in row["broker"]
    ]
    return bar_chart("p99 of a send, beside", bars)
