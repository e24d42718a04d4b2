"""What a micro-batch of a few rows costs by its number of lanes: our sinks and Spark's own."""

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
from oncelog_bench.spark_engine import CONNECTOR, FORMATS, MASTER, Engine, spark_engine
from oncelog_bench.spark_sink import ATOMIC, LANE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NAME = "spark_lanes"
SUMMARY = "Seconds of a micro-batch of a few rows by its lanes (tasks): our sinks and Spark's own."
BY = {"broker": "broker", "lanes": "lanes"}
METRICS = (Metric("trigger_s", "s per micro-batch"), Metric("write_s", "of it writing s"))
_ROWS_PER_LANE = 10
_TRIGGER_TIMEOUT_S = 120.0


class Cell(NamedTuple):
    broker: str
    lanes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A sample is a query of `warm_triggers` micro-batches that do not count and `triggers` that do."""

    sinks: tuple[str, ...] = (LANE, ATOMIC, CONNECTOR)
    brokers: tuple[str, ...] = BROKERS
    lanes: tuple[int, ...] = (1, 8, 32)
    repeats: int = 5
    triggers: int = 2
    warm_triggers: int = 1
    partitions: int = 4
    warm_up_seconds: float = 3.0

    def cells(self) -> Iterator[Cell]:
        for broker in self.brokers:
            for lanes in self.lanes:
                yield Cell(broker, lanes)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cells())) * len(self.sinks)


QUICK = Plan((LANE, CONNECTOR), (OURS,), (2,), repeats=1, triggers=1, warm_up_seconds=0.1)


def _per_lane(result: Result, sink: str, broker: str) -> float | None:
    """Milliseconds that a further lane adds."""
    few, many = min(result["plan"]["lanes"]), max(result["plan"]["lanes"])
    low, high = (figure(result, "trigger_s", broker=broker, lanes=n, sink=sink) for n in (few, many))
    return None if low is None or high is None or few == many else (high - low) * 1000 / (many - few)


def _lane_cost(broker: str) -> Any:
    return lambda result: _per_lane(result, LANE, broker)


TARGETS = tuple(
    Target(f"what a further lane adds to a micro-batch ({broker})", 50.0, "ms", False, _lane_cost(broker))
    for broker in BROKERS
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Run the plan; returns what goes into the JSON file."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        brokers = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        engine = stack.enter_context(spark_engine(plan.sinks))
        cells = [cell for cell in plan.cells() if cell.broker in brokers.names]
        for repeat, cell, sink in interleaved(cells, engine.sides(plan.sinks), plan.repeats):
            figures = _take(plan, engine, brokers[cell.broker], cell, sink)
            samples.append({"repeat": repeat, **cell._asdict(), "sink": sink, **figures})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="sink", base=CONNECTOR, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out={**brokers.left_out, **engine.left_out})


def _take(plan: Plan, engine: Engine, side: Side, cell: Cell, sink: str) -> dict[str, float]:
    wanted = plan.warm_triggers + plan.triggers
    rows = (
        engine.spark.readStream.format("rate-micro-batch")
        .options(rowsPerBatch=cell.lanes * _ROWS_PER_LANE, numPartitions=cell.lanes)
        .load()
        .selectExpr("CAST(CAST(value AS STRING) AS BINARY) AS value")
    )
    with side.topic(plan.partitions) as topic, tempfile.TemporaryDirectory(prefix="oncelog-bench-") as place:
        query = _start(rows, sink, {"kafka.bootstrap.servers": side.bootstrap_servers, "topic": topic}, place)
        try:
            done = _wait(query, wanted)
        finally:
            _stop(engine, query)
    counted = done[plan.warm_triggers : wanted]
    return {
        "trigger_s": statistics.median(each["triggerExecution"] for each in counted) / 1000,
        "write_s": statistics.median(each["addBatch"] for each in counted) / 1000,
    }


def _start(rows: DataFrame, sink: str, options: dict[str, str], place: str) -> Any:
    from oncelog.spark import write_atomic

    def write(frame: DataFrame, batch_id: int) -> None:
        write_atomic(frame, batch_id, options)

    writer = rows.writeStream.option("checkpointLocation", place).trigger(processingTime="0 seconds")
    if sink == ATOMIC:
        return writer.foreachBatch(write).start()
    return writer.format(FORMATS.get(sink, OURS)).options(**options).start()


def _stop(engine: Engine, query: Any) -> None:
    """In the midst of a micro-batch, which Spark would log as errors."""
    context = engine.spark.sparkContext
    context.setLogLevel("OFF")
    query.stop()
    context.setLogLevel("ERROR")


def _wait(query: Any, wanted: int) -> list[dict[str, int]]:
    """The durations (ms) of the first micro-batches, by phase. Raises OncelogError."""
    deadline = time.monotonic() + _TRIGGER_TIMEOUT_S
    while time.monotonic() < deadline:
        done = [p["durationMs"] for p in query.recentProgress if "addBatch" in p["durationMs"]]
        if len(done) >= wanted:
            return done
        if (error := query.exception()) is not None:
            raise OncelogError(f"the query failed: {error}")
        time.sleep(0.02)
    raise OncelogError(f"not {wanted} micro-batches within {_TRIGGER_TIMEOUT_S:g} s")


def section(result: Result) -> str:
    """The sinks by lanes."""
    plan = result["plan"]
    return f"""\
## A micro-batch and its lanes

A streaming query of `{MASTER}` writes micro-batches of {_ROWS_PER_LANE} tiny rows per task, as fast as they
come, with 1 to {max(plan["lanes"])} tasks: as many lanes, each a transaction of its own. Spark's own sink
(`{CONNECTOR}`) keeps its producer from one micro-batch to the next and has no transactions. Times are
Spark's own (`triggerExecution` and its part `addBatch`), which include its two writes of the checkpoint;
the median of {plan["triggers"]} micro-batches of a query after {plan["warm_triggers"]} that do not count,
and of that the median of {plan["repeats"]} queries in turns.

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
    """Seconds by lanes."""
    charts = [
        Chart(f"to {broker}", "lanes", "s per micro-batch",
              lines_of(result, "lanes", "trigger_s", side="sink", broker=broker))
        for broker in result["plan"]["brokers"]
    ]  # fmt: skip
    return draw_curves("A micro-batch and its lanes", charts)
