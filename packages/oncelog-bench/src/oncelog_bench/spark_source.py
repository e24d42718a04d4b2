"""Reading topics with Spark: our source and Spark's own Kafka source, from both brokers."""

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
SUMMARY = "Reading a topic with Spark: our source and Spark's own Kafka source, from both brokers."
RATIO = f"{OURS} / {CONNECTOR}"
BY = {"broker": "broker", "record_bytes": "record bytes"}
METRICS = (
    Metric("mb_per_s", "MB/s", True),
    Metric("records_per_s", "records/s", True),
    Metric("cpu_s_per_gb", "Spark's CPU s/GB"),
)


class Cell(NamedTuple):
    broker: str
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`topic_bytes`: what a topic holds in values. `warm_ups`: reads of each kind that do not count."""

    sources: tuple[str, ...] = (OURS, CONNECTOR)
    brokers: tuple[str, ...] = BROKERS
    record_bytes: tuple[int, ...] = (100, 1_000)
    topic_bytes: int = 300_000_000
    partitions: int = 4
    repeats: int = 5
    warm_ups: int = 2
    warm_up_seconds: float = 3.0

    def cells(self) -> Iterator[Cell]:
        for broker in self.brokers:
            for size in self.record_bytes:
                yield Cell(broker, size)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cells())) * len(self.sources)


QUICK = Plan(brokers=(OURS,), record_bytes=(100,), topic_bytes=500_000, repeats=1, warm_ups=0,
             warm_up_seconds=0.1)  # fmt: skip


def _ratio(broker: str, record_bytes: int) -> Any:
    where = {"broker": broker, "record_bytes": record_bytes}
    return lambda result: figure(result, "mb_per_s", source=RATIO, **where)


TARGETS = tuple(
    Target(
        f"Spark source, records of {cell.record_bytes} B, against Spark's own ({cell.broker})",
        1.0, "times", True, _ratio(*cell),
    )
    for cell in Plan().cells()
)  # fmt: skip


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Run the plan; returns what goes into the JSON file."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        brokers = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        engine = stack.enter_context(spark_engine(plan.sources))
        cells = [cell for cell in plan.cells() if cell.broker in brokers.names]
        topics = {}
        for cell in cells:
            topic = stack.enter_context(brokers[cell.broker].topic(plan.partitions))
            records = fill_topic(
                brokers[cell.broker], topic, plan.partitions, cell.record_bytes, plan.topic_bytes
            )
            topics[cell] = brokers[cell.broker].bootstrap_servers, topic, records
        sources = engine.sides(plan.sources)
        for _, cell, source in interleaved(cells, sources, plan.warm_ups):
            _take(engine, cell, source, *topics[cell])
        for repeat, cell, source in interleaved(cells, sources, plan.repeats):
            figures = _take(engine, cell, source, *topics[cell])
            samples.append({"repeat": repeat, **cell._asdict(), "source": source, **figures})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="source", base=CONNECTOR, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out={**brokers.left_out, **engine.left_out})


def _take(
    engine: Engine, cell: Cell, source: str, bootstrap_servers: str, topic: str, records: int
) -> dict[str, float]:
    reader = engine.spark.read.format(FORMATS.get(source, OURS))
    options = {"kafka.bootstrap.servers": bootstrap_servers, "subscribe": topic}

    def read() -> None:
        reader.options(**options).load().write.format("noop").mode("overwrite").save()

    seconds, cpu_seconds = engine.timed(read)
    total_bytes = records * cell.record_bytes
    return {
        "mb_per_s": total_bytes / 1e6 / seconds,
        "records_per_s": records / seconds,
        "cpu_s_per_gb": cpu_seconds / (total_bytes / 1e9),
    }


def section(result: Result) -> str:
    """Both sources by broker and size."""
    plan = result["plan"]
    ratio = {"ratio": RATIO, "side": "source"}
    return f"""\
## Reading with Spark

A batch query of `{MASTER}` reads {plan["topic_bytes"] / 1e6:g} MB of values in {plan["partitions"]}
partitions, in batches of 16 KB, all columns, into `noop`; our source (`format("oncelog")`, a Python data
source) and Spark's own (`format("kafka")`, in the virtual machine), both with their defaults. The time is
the query's, planning included; the processor time is that of the virtual machine and its Python workers.
Medians of {plan["repeats"]} reads in turns after {plan["warm_ups"]} that do not count.

{markdown_table(result["medians"], by=BY, side="source", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, metric="mb_per_s", words="MB/s", **ratio)}
{range_of_ratios(result, metric="cpu_s_per_gb", words="processor time", **ratio)}
"""


def picture(result: Result) -> str:
    """MB/s by record size."""
    charts = [
        Chart(f"MB/s from {broker}", "record bytes", "MB/s",
              lines_of(result, "record_bytes", "mb_per_s", side="source", broker=broker))
        for broker in result["plan"]["brokers"]
    ]  # fmt: skip
    return draw_curves("Reading with Spark", charts)
