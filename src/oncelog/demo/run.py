"""The whole demonstration, step by step. What it found is a value; nothing is printed here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from oncelog.demo import pipeline
from oncelog.demo.flights import Flights, delays_by_carrier_and_hour, load_flights
from oncelog.demo.loading import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    EXACTLY_ONCE,
    Load,
    Semantics,
    fault_rules,
    run_load,
)
from oncelog.demo.pipeline import KeyCounts, PipelineResult
from oncelog.demo.showing import Showing
from oncelog.demo.story import FaultCounts, Mark, count_faults, tell
from oncelog.dev.served import ServedBroker
from oncelog.spark.session import check_spark, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncelog.spark.audit import AuditResult

PARTITIONS = 6


@dataclass(frozen=True, slots=True)
class Judged:
    """One load with what the network did to it and what Spark found in its topic."""

    load: Load
    faults: FaultCounts
    marks: Sequence[Mark]
    counts: KeyCounts


@dataclass(slots=True)
class DemoResult:
    """Everything the table and the report show. `problems` is empty when every promise was kept."""

    flights: int
    seed: int
    judged: list[Judged] = field(default_factory=list)
    pipeline: PipelineResult | None = None
    truth: pa.Table | None = None
    audit: AuditResult | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(self.step_seconds.values())


def run_demo(*, seed: int, rows: int | None, work_dir: Path, showing: Showing) -> DemoResult:
    """Run everything under `work_dir` (which must be empty or new). Raises OncelogError when it cannot."""
    check_spark()
    timer = _Timer()
    with timer.step("read the flights"), showing.step("Reading the flights", None):
        flights = load_flights(rows)
    result = DemoResult(len(flights), seed, step_seconds=timer.seconds)
    with ServedBroker(work_dir / "broker") as broker:
        create_topics(broker.bootstrap_servers)
        loads = []
        for semantics in (EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE):
            with timer.step(f"load, {semantics.name}"):
                loads.append(_load(semantics, flights, broker, seed, showing))
        _work_on_spark(result, loads, flights, broker.bootstrap_servers, work_dir, timer, showing)
    result.problems = find_problems(result)
    return result


class _Timer:
    """Seconds per named step, in the order they were taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - began


def create_topics(bootstrap_servers: str) -> None:
    """The three topics. The flights are of 2013, so time-based retention is off."""
    from oncelog import Admin, NewTopic

    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.create_topics(
            [
                NewTopic(semantics.topic, num_partitions=PARTITIONS, configs={"retention.ms": "-1"})
                for semantics in (EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE)
            ]
        )


def _load(semantics: Semantics, flights: Flights, broker: ServedBroker, seed: int, showing: Showing) -> Load:
    with showing.step(f"Loading {semantics.name}", len(flights)) as advance_to:
        return run_load(
            semantics,
            flights,
            broker,
            seed=seed,
            rules=fault_rules(),
            on_progress=lambda load: advance_to(load.sent),
        )


def _work_on_spark(
    result: DemoResult,
    loads: Sequence[Load],
    flights: Flights,
    bootstrap_servers: str,
    work_dir: Path,
    timer: _Timer,
    showing: Showing,
) -> None:
    with ExitStack() as stack:
        with timer.step("start Spark"), showing.step("Starting Spark", None):
            spark = stack.enter_context(local_session("oncelog demo", "local[2]"))
        with timer.step("stream on Spark"), showing.step("Streaming on Spark", len(flights)) as advance_to:
            result.pipeline = pipeline.run_delay_pipeline(
                spark, bootstrap_servers, EXACTLY_ONCE.topic, work_dir, on_progress=advance_to
            )
        result.truth = delays_by_carrier_and_hour(flights.table)
        with timer.step("audit on Spark"), showing.step("Auditing sequences on Spark", None):
            result.audit = _audit(spark, bootstrap_servers)
        with (
            timer.step("count on Spark"),
            showing.step("Counting every flight on Spark", len(loads)) as advance_to,
        ):
            for number, load in enumerate(loads, 1):
                counts = pipeline.count_keys(spark, bootstrap_servers, load.semantics.topic, flights.keys)
                marks = tell(load.events)
                result.judged.append(Judged(load, count_faults(load.events, marks), marks, counts))
                advance_to(number)


def _audit(spark: SparkSession, bootstrap_servers: str) -> AuditResult:
    from oncelog.spark.audit import audit_topic

    return audit_topic(spark, bootstrap_servers, [EXACTLY_ONCE.topic])


def find_problems(result: DemoResult) -> list[str]:
    """Every promise that was not kept, as a sentence; the demonstration failed unless this is empty."""
    problems = []
    exact, at_least, at_most = result.judged
    if not exact.counts.is_exactly_once:
        c = exact.counts
        problems.append(
            f"exactly once: {c.lost} flights lost, {c.doubled} doubled, {c.foreign} foreign records"
        )
    if exact.load.failed:
        problems.append(f"exactly once: {exact.load.failed} records failed to be delivered")
    if result.audit is None or result.audit.findings:
        problems.append("the audit of the sequences found violations")
    if result.pipeline is None or result.truth is None:
        problems.append("the pipeline did not run")
    elif not pipeline.same_result(result.pipeline.table, result.truth):
        problems.append("the pipeline's Parquet differs from the same aggregation over the source")
    if exact.faults.acknowledgements_lost == 0:
        problems.append(
            "no acknowledgement was lost: the faults were too few to show anything; use more rows"
        )
    if at_least.counts.doubled == 0:
        problems.append(
            "with idempotence off nothing was doubled: the comparison shows nothing; try another seed"
        )
    if at_most.counts.lost == 0:
        problems.append("with acks=0 nothing was lost: the comparison shows nothing; try another seed")
    return problems
