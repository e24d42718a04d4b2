"""The time of a micro-batch with a few rows, by its number of tasks, for Oncelog's sinks and Spark's own.

Samples and stored results call a task a lane, so the fields here do too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from oncelog.errors import OncelogError
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
from oncelog_bench.page import markdown_table, number
from oncelog_bench.spark_engine import CONNECTOR, DISCARDING, FORMATS, MASTER, Engine, spark_engine
from oncelog_bench.spark_sink import ATOMIC, LANE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "spark_lanes"
SUMMARY = "Seconds of a micro-batch with a few rows, by its number of tasks: Oncelog's sinks and Spark's own."
BY = {"broker": "broker", "lanes": "lanes"}
METRICS = (Metric("trigger_s", "s per micro-batch"), Metric("write_s", "of it writing s"))
_ROWS_PER_LANE = 10
_TRIGGER_TIMEOUT_S = 120.0


class Case(NamedTuple):
    broker: str
    lanes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    A sample is a query with `warm_triggers` micro-batches to warm up and `triggers` measured ones.
    """

    sinks: tuple[str, ...] = (LANE, ATOMIC, CONNECTOR, DISCARDING)
    brokers: tuple[str, ...] = BROKERS
    lanes: tuple[int, ...] = (1, 8, 32)
    repeats: int = 5
    triggers: int = 2
    warm_triggers: int = 1
    partitions: int = 4
    warm_up_seconds: float = 3.0

    def cases(self) -> Iterator[Case]:
        for broker in self.brokers:
            for lanes in self.lanes:
                yield Case(broker, lanes)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cases())) * len(self.sinks)


QUICK = Plan((LANE, CONNECTOR), (OURS,), (2,), repeats=1, triggers=1, warm_up_seconds=0.1)


def _per_lane(result: Result, sink: str, broker: str) -> float | None:
    """Return the milliseconds that one more task adds to a micro-batch; None if that was not measured."""
    few, many = min(result["plan"]["lanes"]), max(result["plan"]["lanes"])
    low, high = (figure(result, "trigger_s", broker=broker, lanes=n, sink=sink) for n in (few, many))
    return None if low is None or high is None or few == many else (high - low) * 1000 / (many - few)


def _lane_cost(broker: str) -> Any:
    return lambda result: _per_lane(result, LANE, broker)


def _own_cost(broker: str) -> Any:
    """Return the milliseconds that a task of Oncelog's sink adds to a task of a sink that writes nothing."""

    def measured(result: Result) -> float | None:
        ours, floor = (_per_lane(result, sink, broker) for sink in (LANE, DISCARDING))
        return None if ours is None or floor is None else ours - floor

    return measured


TARGETS = (
    *(
        Target(f"what a further lane adds to a micro-batch ({broker})", 50.0, "ms", False, _lane_cost(broker))
        for broker in BROKERS
    ),
    *(
        Target(f"the same above a discarding sink in Python ({broker})", 8.0, "ms", False, _own_cost(broker))
        for broker in BROKERS
    ),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        brokers = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        engine = stack.enter_context(spark_engine(plan.sinks))
        cases = [case for case in plan.cases() if case.broker in brokers.names]
        for repeat, case, sink in interleaved(cases, engine.sides(plan.sinks), plan.repeats):
            figures = _take(plan, engine, brokers[case.broker], case, sink)
            samples.append({"repeat": repeat, **case._asdict(), "sink": sink, **figures})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="sink", base=CONNECTOR, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out={**brokers.left_out, **engine.left_out})


def _take(plan: Plan, engine: Engine, side: Side, case: Case, sink: str) -> dict[str, float]:
    batches_count = plan.warm_triggers + plan.triggers
    rows = (
        engine.spark.readStream.format("rate-micro-batch")
        .options(rowsPerBatch=case.lanes * _ROWS_PER_LANE, numPartitions=case.lanes)
        .load()
        .selectExpr("CAST(CAST(value AS STRING) AS BINARY) AS value")
    )
    with (
        side.topic(plan.partitions) as topic,
        tempfile.TemporaryDirectory(prefix="oncelog-bench-") as checkpoint_dir,
    ):
        query = start_query(
            rows, sink, {"kafka.bootstrap.servers": side.bootstrap_servers, "topic": topic}, checkpoint_dir
        )
        try:
            done = wait_for_batches(query, batches_count)
        finally:
            stop_query(engine.spark, query)
    counted = done[plan.warm_triggers : batches_count]
    return {
        "trigger_s": statistics.median(durations["triggerExecution"] for durations in counted) / 1000,
        "write_s": statistics.median(durations["addBatch"] for durations in counted) / 1000,
    }


def start_query(rows: DataFrame, sink: str, options: dict[str, str], checkpoint_dir: str) -> Any:
    """Start a query that writes `rows` with `sink`, one micro-batch directly after the other."""
    from oncelog.spark import write_atomic

    def write(frame: DataFrame, batch_id: int) -> None:
        write_atomic(frame, batch_id, options)

    writer = rows.writeStream.option("checkpointLocation", checkpoint_dir).trigger(processingTime="0 seconds")
    if sink == ATOMIC:
        return writer.foreachBatch(write).start()
    return writer.format(FORMATS.get(sink, OURS)).options(**options).start()


def stop_query(spark: SparkSession, query: Any) -> None:
    """Stop the query, perhaps during a micro-batch. Suppress the errors that Spark logs about that."""
    context = spark.sparkContext
    context.setLogLevel("OFF")
    query.stop()
    context.setLogLevel("ERROR")


def wait_for_batches(query: Any, batches_count: int) -> list[dict[str, int]]:
    """Wait for `batches_count` micro-batches. Return the durations in ms of the phases of every micro-batch.

    Raises OncelogError if the query fails or takes too long.
    """
    deadline = time.monotonic() + _TRIGGER_TIMEOUT_S
    while time.monotonic() < deadline:
        done = [p["durationMs"] for p in query.recentProgress if "addBatch" in p["durationMs"]]
        if len(done) >= batches_count:
            return done
        if (error := query.exception()) is not None:
            raise OncelogError(f"the query failed: {error}")
        time.sleep(0.02)
    raise OncelogError(f"fewer than {batches_count} micro-batches within {_TRIGGER_TIMEOUT_S:g} s")


def section(result: Result) -> str:
    """Return, as Markdown, the section that compares the sinks for each number of tasks."""
    plan = result["plan"]
    return f"""\
## A micro-batch and its lanes

A streaming query of `{MASTER}` writes micro-batches of {_ROWS_PER_LANE} tiny rows per task without pause,
with 1 to {max(plan["lanes"])} tasks, called lanes in the table. Each task of ours writes its own transaction.
Spark's own sink (`{CONNECTOR}`) keeps its producer from one micro-batch to the next and has no transactions.
The `{DISCARDING}` is written in Python, as ours is, and writes nothing: its time is Spark's.
Times are Spark's own (`triggerExecution` and its part `addBatch`). They include two checkpoint writes.
A sample is the median of {plan["triggers"]} micro-batches after {plan["warm_triggers"]} unmeasured;
the figures are medians of {plan["repeats"]} interleaved queries.

{markdown_table(result["medians"], by=BY, side="sink", metrics=METRICS)}

**What this shows.** {_sentences(result)}
"""


def _sentences(result: Result) -> str:
    added = {
        (broker, sink): cost
        for broker in result["plan"]["brokers"]
        for sink in result["plan"]["sinks"]
        if (cost := _per_lane(result, sink, broker)) is not None
    }
    return " ".join(
        f"To {broker}, a further lane adds {number(cost)} ms with {sink}."
        for (broker, sink), cost in added.items()
    )


def picture(result: Result) -> str:
    """Return an SVG of a micro-batch's seconds by the number of tasks."""
    charts = [
        Chart(f"to {broker}", "lanes", "s per micro-batch",
              lines_of(result, "lanes", "trigger_s", side="sink", broker=broker))
        for broker in result["plan"]["brokers"]
    ]  # fmt: skip
    return draw_curves("A micro-batch and its lanes", charts)
