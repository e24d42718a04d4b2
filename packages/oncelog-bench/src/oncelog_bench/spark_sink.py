"""Writing to both brokers with Spark: Oncelog's exactly-once sinks and Spark's at-least-once sink."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from oncelog.errors import OncelogError
from oncelog.types import TopicPartition
from oncelog_bench.brokers import BROKERS, Side, running
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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME = "spark_sink"
SUMMARY = "Writing to a topic with Spark: Oncelog's exactly-once sinks and Spark's own at-least-once sink."
LANE, ATOMIC = "lane", "write_atomic"
RATIOS = tuple(f"{sink} / {CONNECTOR}" for sink in (LANE, ATOMIC))
BY = {"broker": "broker", "record_bytes": "record bytes"}
METRICS = (
    Metric("mb_per_s", "MB/s", True),
    Metric("records_per_s", "records/s", True),
    Metric("cpu_s_per_gb", "Spark's CPU s/GB"),
)
_KEY_BYTES = 12


class Case(NamedTuple):
    broker: str
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    `frame_bytes` is the total size of the values. `warm_ups` is the number of unmeasured writes with each
    sink.
    """

    sinks: tuple[str, ...] = (LANE, ATOMIC, CONNECTOR)
    brokers: tuple[str, ...] = BROKERS
    record_bytes: tuple[int, ...] = (100, 1_000)
    frame_bytes: int = 100_000_000
    partitions: int = 4
    repeats: int = 5
    warm_ups: int = 1
    warm_up_seconds: float = 3.0

    def cases(self) -> Iterator[Case]:
        for broker in self.brokers:
            for size in self.record_bytes:
                yield Case(broker, size)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cases())) * len(self.sinks)


QUICK = Plan(brokers=(OURS,), record_bytes=(100,), frame_bytes=500_000, repeats=1, warm_ups=0,
             warm_up_seconds=0.1)  # fmt: skip


def _ratio(sink: str, broker: str, record_bytes: int) -> Any:
    where = {"broker": broker, "record_bytes": record_bytes}
    return lambda result: figure(result, "mb_per_s", sink=f"{sink} / {CONNECTOR}", **where)


TARGETS = tuple(
    Target(
        f"Spark sink ({sink}, exactly once), records of {case.record_bytes} B, against Spark's own "
        f"at least once ({case.broker})",
        limit, "times", True, _ratio(sink, *case),
    )
    for sink, limit in ((LANE, 1.0), (ATOMIC, 0.85))
    for case in Plan().cases()
)  # fmt: skip


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        brokers = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        engine = stack.enter_context(spark_engine(plan.sinks))
        frames = {size: stack.enter_context(_cached(plan, engine, size)) for size in plan.record_bytes}
        cases = [case for case in plan.cases() if case.broker in brokers.names]
        sinks = engine.sides(plan.sinks)
        for _, case, sink in interleaved(cases, sinks, plan.warm_ups):
            _take(plan, engine, brokers[case.broker], frames[case.record_bytes], case, sink)
        for repeat, case, sink in interleaved(cases, sinks, plan.repeats):
            figures = _take(plan, engine, brokers[case.broker], frames[case.record_bytes], case, sink)
            samples.append({"repeat": repeat, **case._asdict(), "sink": sink, **figures})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="sink", base=CONNECTOR, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out={**brokers.left_out, **engine.left_out})


def _records(plan: Plan, record_bytes: int) -> int:
    return plan.frame_bytes // record_bytes


@contextmanager
def _cached(plan: Plan, engine: Engine, record_bytes: int) -> Iterator[DataFrame]:
    """Yield a DataFrame of keys and values, in two partitions, cached in memory for the `with` block."""
    text = f"lpad(CAST(id AS STRING), {_KEY_BYTES}, '0')"
    frame = (
        engine.spark.range(0, _records(plan, record_bytes), numPartitions=2)
        .selectExpr(
            f"CAST({text} AS BINARY) AS key",
            f"CAST({text} || repeat('.', {record_bytes - _KEY_BYTES}) AS BINARY) AS value",
        )
        .cache()
    )
    frame.count()
    yield frame
    frame.unpersist()


def _take(
    plan: Plan, engine: Engine, side: Side, frame: DataFrame, case: Case, sink: str
) -> dict[str, float]:
    records = _records(plan, case.record_bytes)
    with side.topic(plan.partitions) as topic:
        options = {"kafka.bootstrap.servers": side.bootstrap_servers, "topic": topic}
        seconds, cpu_seconds = engine.timed(lambda: _write(frame, sink, options))
        _check(side, topic, plan.partitions, records)
    total_bytes = records * case.record_bytes
    return {
        "mb_per_s": total_bytes / 1e6 / seconds,
        "records_per_s": records / seconds,
        "cpu_s_per_gb": cpu_seconds / (total_bytes / 1e9),
    }


def _write(frame: DataFrame, sink: str, options: dict[str, str]) -> None:
    from oncelog.spark import write_atomic

    if sink == ATOMIC:
        write_atomic(frame, 0, options, name=f"bench-{uuid.uuid4()}")
    else:
        frame.write.format(FORMATS.get(sink, OURS)).options(**options).mode("append").save()


def _check(side: Side, topic: str, partitions: int, records: int) -> None:
    """Raise OncelogError if the topic has fewer offsets than `records`, or more than markers can add.

    Each transaction adds one marker, which takes an offset, to each of its partitions.
    """
    ends = side.admin.list_offsets({TopicPartition(topic, index): "latest" for index in range(partitions)})
    written = sum(end.offset or 0 for end in ends.values())
    if not records <= written <= records + 4 * partitions:
        raise OncelogError(f"{topic} has {written} offsets after {records} records were written")


def section(result: Result) -> str:
    """Return, as Markdown, the section on the sinks by broker and size."""
    plan = result["plan"]
    sentences = " ".join(range_of_ratios(result, ratio, "mb_per_s", "MB/s", side="sink") for ratio in RATIOS)
    return f"""\
## Writing with Spark

A batch query of `{MASTER}` writes {plan["frame_bytes"] / 1e6:g} MB of values with keys of {_KEY_BYTES} bytes
from a cached DataFrame of two partitions to {plan["partitions"]} partitions. `{LANE}`: `format("oncelog")`,
exactly once, a transaction and a marker per task. `{ATOMIC}`: exactly once, one transaction, after a
shuffle by Kafka's partition. `{CONNECTOR}`: `format("kafka")`, at least once. All with their defaults; the
time is the query's, the commit included; the processor time is that of the virtual machine and its Python
workers. Medians of {plan["repeats"]} writes in turns after {plan["warm_ups"]} that do not count.

{markdown_table(result["medians"], by=BY, side="sink", metrics=METRICS)}

**What this shows.** {sentences}
"""


def picture(result: Result) -> str:
    """Return an SVG of MB/s by record size."""
    charts = [
        Chart(f"MB/s to {broker}", "record bytes", "MB/s",
              lines_of(result, "record_bytes", "mb_per_s", side="sink", broker=broker))
        for broker in result["plan"]["brokers"]
    ]  # fmt: skip
    return draw_curves("Writing with Spark", charts)
