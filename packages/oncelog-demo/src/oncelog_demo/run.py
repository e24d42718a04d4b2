"""Run the whole demonstration, step by step. The result is a value; nothing is printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from oncelog_devtools.progress import Progress

from oncelog.errors import OncelogError
from oncelog.spark.session import check_spark, local_session
from oncelog.testing.broker_process import BrokerProcess
from oncelog_demo import pipeline
from oncelog_demo.driver_kill import OURS, SPARKS, Enrichment, SparkSink, run_enrichment
from oncelog_demo.flights import Flights, delays_by_carrier_and_hour, enriched_truth, load_flights
from oncelog_demo.loading import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    EXACTLY_ONCE,
    Load,
    Semantics,
    fault_rules,
    run_load,
)
from oncelog_demo.pipeline import KeyCounts, PipelineResult
from oncelog_demo.sink_attempts import AttemptResult, rows_with_result
from oncelog_demo.timeline import FaultCounts, Mark, count_faults, list_marks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from oncelog.spark.audit.audit import AuditResult

PARTITIONS = 6


@dataclass(frozen=True, slots=True)
class CheckedLoad:
    """One load: its faults and batches as the proxy recorded them, and Spark's count of its topic."""

    load: Load
    faults: FaultCounts
    marks: Sequence[Mark]
    counts: KeyCounts


@dataclass(frozen=True, slots=True)
class CheckedEnrichment:
    """One enrichment: its faults as the proxy recorded them, and Spark's count of its topic."""

    enrichment: Enrichment
    faults: FaultCounts
    counts: KeyCounts

    @property
    def aborted(self) -> int:
        """Return the number of rows in the log that no read_committed consumer returns."""
        return rows_with_result(self.enrichment.attempts, AttemptResult.ABORTED)


@dataclass(slots=True)
class DemoResult:
    """The content of the table and the report. `problems` has the sentences of `find_problems`."""

    flights: int
    seed: int
    loads: list[CheckedLoad] = field(default_factory=list)
    enriched: CheckedEnrichment | None = None
    control: CheckedEnrichment | None = None
    """The enrichment by Spark's own Kafka sink, or None if it was left out.

    `control_left_out` is the reason.
    """
    control_left_out: str = "it was not requested, or Maven, which fetches its jars, is not installed"
    pipeline: PipelineResult | None = None
    truth: pa.Table | None = None
    audit: AuditResult | None = None
    step_seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def total_seconds(self) -> float:
        return sum(self.step_seconds.values())


def run_demo(
    *, seed: int, rows: int | None, with_control: bool, work_dir: Path, progress: Progress
) -> DemoResult:
    """Run all steps under `work_dir`, which must be empty or new. Raises OncelogError if a step fails.

    With `with_control`, the enrichment also runs with Spark's own Kafka sink. Maven downloads that sink's
    jars once.
    """
    check_spark()
    steps = _Steps(progress)
    with steps.step("read the flights"):
        flights = load_flights(rows)
    result = DemoResult(len(flights), seed, step_seconds=steps.seconds)
    with BrokerProcess(work_dir / "broker") as broker:
        create_topics(broker.bootstrap_servers)
        loads = [
            _load(semantics, flights, broker, seed, steps)
            for semantics in (EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE)
        ]
        enrichments = [_enrich(OURS, flights, broker, seed, work_dir, steps)]
        if with_control:
            try:
                enrichments.append(_enrich(SPARKS, flights, broker, seed, work_dir, steps))
            except (
                OncelogError
            ) as error:  # Spark's own sink or its download may fail. Neither breaks a guarantee of Oncelog.
                result.control_left_out = str(error)
        _work_on_spark(result, loads, enrichments, flights, broker.bootstrap_servers, work_dir, steps)
    result.problems = find_problems(result)
    return result


class _Steps:
    """The steps of the demonstration. Each is shown on the terminal while it runs.

    `seconds` maps each step's name to its duration, in order.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Run and time one step. `total` and the yielded function are those of `Progress.step`."""
        began = time.monotonic()
        try:
            with self._progress.step(f"{name[0].upper()}{name[1:]}", total) as advance_to:
                yield advance_to
        finally:
            self.seconds[name] = time.monotonic() - began


def create_topics(bootstrap_servers: str) -> None:
    """Create all topics without retention by time, which would delete the records with timestamps of 2013."""
    from oncelog import Admin, NewTopic

    writers = (EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE, OURS, SPARKS)
    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.create_topics(
            [
                NewTopic(writer.topic, num_partitions=PARTITIONS, configs={"retention.ms": "-1"})
                for writer in writers
            ]
        )


def _load(semantics: Semantics, flights: Flights, broker: BrokerProcess, seed: int, steps: _Steps) -> Load:
    with steps.step(f"load {semantics.name}", len(flights)) as advance_to:
        return run_load(
            semantics,
            flights,
            broker,
            seed=seed,
            rules=fault_rules(),
            on_progress=lambda load: advance_to(load.sent),
        )


def _enrich(
    sink: SparkSink, flights: Flights, broker: BrokerProcess, seed: int, work_dir: Path, steps: _Steps
) -> Enrichment:
    with steps.step(f'enrich into format("{sink.format}"), driver killed', len(flights)) as advance_to:
        return run_enrichment(
            sink,
            broker.bootstrap_servers,
            EXACTLY_ONCE.topic,
            len(flights),
            work_dir,
            tasks=PARTITIONS,
            seed=seed,
            on_progress=lambda rows: advance_to(min(rows, len(flights))),
        )


def _work_on_spark(
    result: DemoResult,
    loads: Sequence[Load],
    enrichments: Sequence[Enrichment],
    flights: Flights,
    bootstrap_servers: str,
    work_dir: Path,
    steps: _Steps,
) -> None:
    with ExitStack() as stack:
        with steps.step("start Spark"):
            spark = stack.enter_context(local_session("oncelog demo", "local[2]", is_short=True))
        with steps.step("aggregate on Spark", len(flights)) as advance_to:
            result.pipeline = pipeline.run_delay_pipeline(
                spark, bootstrap_servers, OURS.topic, work_dir, on_progress=advance_to
            )
        result.truth = delays_by_carrier_and_hour(flights.table)
        with steps.step("audit on Spark"):
            result.audit = _audit(spark, bootstrap_servers)
        with steps.step("count every flight on Spark", len(loads) + len(enrichments)) as advance_to:
            keys = pa.table({"key": flights.keys})
            for number, load in enumerate(loads, 1):
                counts = pipeline.count_keys(spark, bootstrap_servers, load.semantics.topic, keys)
                marks = list_marks(load.events)
                result.loads.append(CheckedLoad(load, count_faults(load.events, marks), marks, counts))
                advance_to(number)
            truth = enriched_truth(flights)
            checked = [
                _check_enrichment(spark, bootstrap_servers, enrichment, truth) for enrichment in enrichments
            ]
            result.enriched, result.control = checked[0], checked[1] if len(checked) > 1 else None


def _check_enrichment(
    spark: SparkSession, bootstrap_servers: str, enrichment: Enrichment, truth: pa.Table
) -> CheckedEnrichment:
    counts = pipeline.count_keys(spark, bootstrap_servers, enrichment.sink.topic, truth)
    return CheckedEnrichment(
        enrichment, count_faults(enrichment.events, list_marks(enrichment.events)), counts
    )


def _audit(spark: SparkSession, bootstrap_servers: str) -> AuditResult:
    from oncelog.spark.audit.audit import audit_topic

    return audit_topic(spark, bootstrap_servers, [EXACTLY_ONCE.topic, OURS.topic])


def find_problems(result: DemoResult) -> list[str]:
    """Return a sentence for each problem: a broken guarantee, or a comparison that shows nothing.

    The demonstration succeeded if the list is empty.
    """
    exact, at_least, at_most = result.loads
    problems = []
    if not exact.counts.is_exactly_once:
        problems.append(f"exactly once: {exact.counts}")
    if exact.load.failed:
        problems.append(f"exactly once: {exact.load.failed} records could not be delivered")
    problems += _problems_on_spark(result)
    if exact.faults.acknowledgements_lost == 0:
        problems.append("no acknowledgement was lost: too few faults for a comparison; use more rows")
    if at_least.counts.doubled == 0:
        problems.append(
            "without idempotence no record was doubled: the comparison shows nothing; try another seed"
        )
    if at_most.counts.lost == 0:
        problems.append("with acks=0 no record was lost: the comparison shows nothing; try another seed")
    return problems


def _problems_on_spark(result: DemoResult) -> list[str]:
    problems = []
    if result.audit is None or result.audit.findings:
        problems.append("the audit of the sequence numbers found violations")
    if result.pipeline is None or result.truth is None:
        problems.append("the aggregation did not run")
    elif not pipeline.same_result(result.pipeline.table, result.truth):
        problems.append("the aggregation's Parquet files differ from the same aggregation of the source")
    if result.enriched is None:
        problems.append("the enrichment did not run")
        return problems
    checked = result.enriched
    if not checked.counts.is_exactly_once:
        problems.append(f"enriched on Spark: {checked.counts}")
    if checked.enrichment.rows_stored != checked.counts.records + checked.aborted:
        problems.append(
            f"enriched on Spark: the log has {checked.enrichment.rows_stored} rows, but "
            f"{checked.counts.records} are committed and {checked.aborted} aborted"
        )
    if checked.aborted == 0:
        problems.append("no transaction was aborted: the kill had no effect; try another seed")
    if result.control is not None and result.control.counts.doubled == 0:
        problems.append("Spark's own sink doubled no record: the comparison shows nothing; try another seed")
    return problems
