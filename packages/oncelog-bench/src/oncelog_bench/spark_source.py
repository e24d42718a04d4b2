"""Reading topics of both brokers with Spark: Oncelog's source and Spark's own Kafka source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncelog_bench.brokers import BROKERS, fill_topic, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
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
from oncelog_bench.page import markdown_table, range_of_ratios
from oncelog_bench.spark_engine import CONNECTOR, FORMATS, MASTER, Engine, spark_engine

NAME = "spark_source"
SUMMARY = "Reading a topic with Spark: Oncelog's source and Spark's own Kafka source, from both brokers."
RATIO = f"{OURS} / {CONNECTOR}"
BY = {"broker": "broker", "record_bytes": "record bytes"}
METRICS = (
    Metric("mb_per_s", "MB/s", True),
    Metric("records_per_s", "records/s", True),
    Metric("cpu_s_per_gb", "Spark's CPU s/GB"),
)


class Case(NamedTuple):
    broker: str
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    A topic has values of `topic_bytes` in total. `warm_ups` is the number of unmeasured reads with each
    source.
    """

    sources: tuple[str, ...] = (OURS, CONNECTOR)
    brokers: tuple[str, ...] = BROKERS
    record_bytes: tuple[int, ...] = (100, 1_000)
    topic_bytes: int = 300_000_000
    partitions: int = 4
    repeats: int = 5
    warm_ups: int = 2
    warm_up_seconds: float = 3.0

    def cases(self) -> Iterator[Case]:
        for broker in self.brokers:
            for size in self.record_bytes:
                yield Case(broker, size)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cases())) * len(self.sources)


QUICK = Plan(brokers=(OURS,), record_bytes=(100,), topic_bytes=500_000, repeats=1, warm_ups=0,
             warm_up_seconds=0.1)  # fmt: skip


def _ratio(broker: str, record_bytes: int) -> Any:
    where = {"broker": broker, "record_bytes": record_bytes}
    return lambda result: figure(result, "mb_per_s", source=RATIO, **where)


TARGETS = tuple(
    Target(
        f"Spark source, records of {case.record_bytes} B, against Spark's own ({case.broker})",
        1.0, "times", True, _ratio(*case),
    )
    for case in Plan().cases()
)  # fmt: skip


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        brokers = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        engine = stack.enter_context(spark_engine(plan.sources))
        cases = [case for case in plan.cases() if case.broker in brokers.names]
        topics = {}
        for case in cases:
            topic = stack.enter_context(brokers[case.broker].topic(plan.partitions))
            records = fill_topic(
                brokers[case.broker], topic, plan.partitions, case.record_bytes, plan.topic_bytes
            )
            topics[case] = brokers[case.broker].bootstrap_servers, topic, records
        sources = engine.sides(plan.sources)
        for _, case, source in interleaved(cases, sources, plan.warm_ups):
            _take(engine, case, source, *topics[case])
        for repeat, case, source in interleaved(cases, sources, plan.repeats):
            figures = _take(engine, case, source, *topics[case])
            samples.append({"repeat": repeat, **case._asdict(), "source": source, **figures})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="source", base=CONNECTOR, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out={**brokers.left_out, **engine.left_out})


def _take(
    engine: Engine, case: Case, source: str, bootstrap_servers: str, topic: str, records: int
) -> dict[str, float]:
    reader = engine.spark.read.format(FORMATS.get(source, OURS))
    options = {"kafka.bootstrap.servers": bootstrap_servers, "subscribe": topic}

    def read() -> None:
        reader.options(**options).load().write.format("noop").mode("overwrite").save()

    seconds, cpu_seconds = engine.timed(read)
    total_bytes = records * case.record_bytes
    return {
        "mb_per_s": total_bytes / 1e6 / seconds,
        "records_per_s": records / seconds,
        "cpu_s_per_gb": cpu_seconds / (total_bytes / 1e9),
    }


def section(result: Result) -> str:
    """Return, as Markdown, the section on both sources by broker and size."""
    plan = result["plan"]
    ratio = {"ratio": RATIO, "side": "source"}
    return f"""\
## Reading with Spark

A batch query of `{MASTER}` reads {plan["topic_bytes"] / 1e6:g} MB of values in {plan["partitions"]}
partitions, in batches of 16 KB, all columns, into `noop`. Our source (`format("oncelog")`) is a Python data
source; Spark's own (`format("kafka")`) runs in the JVM. Both have their defaults. The time is the query's,
including planning; the processor time is that of the JVM and its Python workers.
Medians of {plan["repeats"]} interleaved reads after {plan["warm_ups"]} unmeasured.

{markdown_table(result["medians"], by=BY, side="source", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, metric="mb_per_s", words="MB/s", **ratio)}
{range_of_ratios(result, metric="cpu_s_per_gb", words="processor time", **ratio)}
"""


def picture(result: Result) -> str:
    """Return an SVG of MB/s by record size."""
    charts = [
        Chart(f"MB/s from {broker}", "record bytes", "MB/s",
              lines_of(result, "record_bytes", "mb_per_s", side="source", broker=broker))
        for broker in result["plan"]["brokers"]
    ]  # fmt: skip
    return draw_curves("Reading with Spark", charts)
