"""The costs of the exactly-once sink for a cluster: transactions, markers, processor time and more.

Three nodes of Apache Kafka and a standalone cluster of Spark run on this machine. The costs are fitted as a
linear model (`cluster_model`), which is compared with cases that it was not fitted to.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from oncelog_devtools.apache_kafka import ApacheKafka, MissingDependency
from oncelog_devtools.spark_cluster import SparkCluster

from oncelog.broker.coordinators.transaction_log import decode_key, decode_value
from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.client.consumer.blocking import Consumer
from oncelog.rules.transactions.entry import TransactionState
from oncelog.spark.session import local_session
from oncelog.types import TopicPartition
from oncelog_bench.brokers import KAFKA_HEAP_MB
from oncelog_bench.cluster_model import Costs, Shape, fit
from oncelog_bench.curves import Chart, draw_curves
from oncelog_bench.framework import Metric, OnSample, Result, compare, result_of
from oncelog_bench.page import number
from oncelog_bench.process import cpu_seconds, tree_cpu_seconds
from oncelog_bench.spark_lanes import start_query, stop_query, wait_for_batches
from oncelog_bench.spark_sink import LANE

NAME = "cluster"
SUMMARY = "Costs of the exactly-once sink for a cluster, by tasks and partitions of each task."
METRICS = (
    Metric("transactions", "transactions"),
    Metric("markers", "markers"),
    Metric("state_records", "transaction log records"),
    Metric("state_kb", "transaction log kB"),
    Metric("kafka_cpu_ms", "Kafka's CPU ms"),
    Metric("spark_cpu_ms", "Spark's CPU ms"),
    Metric("trigger_ms", "duration ms"),
    Metric("open_p50_ms", "open p50 ms"),
    Metric("open_max_ms", "open max ms"),
)
FITTED = ("state_records", "state_kb", "kafka_cpu_ms", "spark_cpu_ms")
"""The figures of a micro-batch for which the model is fitted."""
KNOWN = {"transactions": Costs(1, 1, 0), "markers": Costs(1, 1, 1)}
"""The figures that follow from the protocol: each transaction writes a marker to each of its partitions.

A task's transaction has one more partition, that of its group in `__consumer_offsets`. The driver's
transaction has only that one.
"""
MEASURED, MODEL, EXTRAPOLATED = "measured", "model", "extrapolated"
_DRAWN = {
    "kafka_cpu_ms": "Kafka's CPU ms",
    "state_kb": "transaction log kB",
    "trigger_ms": "duration ms",
}
_TRANSACTION_LOG = "__transaction_state"


class Case(NamedTuple):
    """`tasks` of a micro-batch, each of which writes to `partitions_each` partitions."""

    tasks: int
    partitions_each: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    Every combination of `tasks` and `partitions_each` is a case. The model is fitted to all cases but those
    with the most tasks. It is then used for `larger_tasks` and `larger_partitions_each`.
    """

    tasks: tuple[int, ...] = (2, 8, 32)
    partitions_each: tuple[int, ...] = (1, 16)
    larger_tasks: tuple[int, ...] = (1_000, 10_000)
    larger_partitions_each: tuple[int, ...] = (1, 10, 100)
    topic_partitions: int = 96
    rows_per_partition: int = 4
    nodes: int = 3
    workers: int = 2
    repeats: int = 5
    triggers: int = 2
    warm_triggers: int = 1

    def cases(self) -> Iterator[Case]:
        for tasks in self.tasks:
            for partitions_each in self.partitions_each:
                yield Case(tasks, partitions_each)

    def larger_cases(self) -> Iterator[Case]:
        for tasks in self.larger_tasks:
            for partitions_each in self.larger_partitions_each:
                yield Case(tasks, partitions_each)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cases()))


QUICK = Plan(
    (1, 2, 3), (1, 2), topic_partitions=4, nodes=1, workers=1, repeats=1, triggers=1, warm_triggers=1
)


class Reading(NamedTuple):
    """The processor time of both clusters so far, and the end offsets of the transaction log."""

    kafka_cpu_s: float
    spark_cpu_s: float
    log_ends: dict[TopicPartition, int]


class Entry(NamedTuple):
    """A record of the transaction log.

    `partitions` counts those of the transaction, and `size_bytes` is the size of key and value. `is_of_task`
    is False for the transactions of the sink's driver.
    """

    state: TransactionState
    is_of_task: bool
    partitions: int
    start_ms: int
    last_update_ms: int
    size_bytes: int


class Cluster(NamedTuple):
    """The running parts, and a consumer and an admin client of the Kafka cluster."""

    kafka: ApacheKafka
    spark_cluster: SparkCluster
    spark: Any
    admin: Admin
    consumer: Consumer

    def read(self) -> Reading:
        """Return the processor time so far, and the ends of the transaction log."""
        driver = self.spark._jvm.ProcessHandle.current().pid()
        spark_pids = (driver, *(node.pid for node in self.spark_cluster.nodes))
        count = len(self.consumer.partitions_for(_TRANSACTION_LOG))
        log = [TopicPartition(_TRANSACTION_LOG, index) for index in range(count)]
        return Reading(
            sum(cpu_seconds(node.pid) for node in self.kafka.nodes),
            sum(map(tree_cpu_seconds, spark_pids)),
            self.consumer.end_offsets(log),
        )

    def entries(self, before: Reading, after: Reading) -> list[Entry]:
        """Return the records of the transaction log between two readings."""
        return [
            _entry(key, value)
            for tp, end in after.log_ends.items()
            for rows in self.consumer.fetch_range(tp, before.log_ends[tp], end)
            for key, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
            if value is not None
        ]


def _entry(key: bytes, value: bytes) -> Entry:
    name = decode_key(key)
    entry = decode_value(name, value)
    # The transactional id of a task ends with its number.
    is_of_task = name.rpartition("/")[2].isdecimal()
    size_bytes = len(key) + len(value)
    return Entry(
        entry.state, is_of_task, len(entry.partitions), entry.start_ms, entry.last_update_ms, size_bytes
    )


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file. Without Java, take none."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        try:
            cluster = _start(plan, stack)
        except MissingDependency as error:
            return result_of(NAME, plan, [], [], left_out={"apache-kafka": str(error)})
        for repeat in range(plan.repeats):
            for case in plan.cases():
                figures = _take(plan, cluster, case)
                samples.append({"repeat": repeat, **case._asdict(), **figures})
                on_sample(len(samples))
    return result_of(NAME, plan, samples, _medians(plan, samples))


def _start(plan: Plan, stack: ExitStack) -> Cluster:
    kafka = stack.enter_context(ApacheKafka(nodes=plan.nodes, heap_mb=KAFKA_HEAP_MB))
    spark_cluster = stack.enter_context(SparkCluster(workers=plan.workers))
    # The session starts its own JVM, which must not be the active one of this process.
    spark = stack.enter_context(local_session("oncelog bench", spark_cluster.master_url))
    settings = {"bootstrap.servers": kafka.bootstrap_servers}
    admin = stack.enter_context(Admin(settings))
    consumer = stack.enter_context(Consumer({**settings, "isolation.level": "read_uncommitted"}))
    return Cluster(kafka, spark_cluster, spark, admin, consumer)


def _take(plan: Plan, cluster: Cluster, case: Case) -> dict[str, float]:
    """Run a query for some micro-batches, and return the figures of one micro-batch.

    The micro-batches between two readings are counted by their committed transactions, so their number may
    be a fraction.
    """
    topic = f"cluster-{os.urandom(4).hex()}"
    cluster.admin.create_topics([NewTopic(topic, plan.topic_partitions, min(plan.nodes, 3), {})])
    options = {"kafka.bootstrap.servers": cluster.kafka.bootstrap_servers, "topic": topic}
    with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as checkpoint_dir:
        query = start_query(_rows(plan, cluster, case), LANE, options, checkpoint_dir)
        try:
            warm = wait_for_batches(query, plan.warm_triggers)
            before = cluster.read()
            done = wait_for_batches(query, len(warm) + plan.triggers)
            after = cluster.read()
        finally:
            stop_query(cluster.spark, query)
    cluster.admin.delete_topics([topic])
    trigger_ms = statistics.median(durations["triggerExecution"] for durations in done[len(warm) :])
    return {**_figures(cluster.entries(before, after), before, after, case), "trigger_ms": trigger_ms}


def _rows(plan: Plan, cluster: Cluster, case: Case) -> Any:
    """Return a stream whose micro-batches have `case.tasks` tasks, each with rows for its own partitions.

    Row n of a micro-batch belongs to task n modulo `tasks`.
    """
    rows_each = case.partitions_each * plan.rows_per_partition
    chosen = f"(value div {case.tasks}) % {case.partitions_each} + (value % {case.tasks}) * 7"
    return (
        cluster.spark.readStream.format("rate-micro-batch")
        .options(rowsPerBatch=case.tasks * rows_each, numPartitions=case.tasks)
        .load()
        .selectExpr(
            "CAST(CAST(value AS STRING) AS BINARY) AS value",
            f"CAST(({chosen}) % {plan.topic_partitions} AS INT) AS partition",
        )
    )


def _figures(entries: Sequence[Entry], before: Reading, after: Reading, case: Case) -> dict[str, float]:
    ended = [entry for entry in entries if entry.state is TransactionState.COMPLETE_COMMIT]
    prepared = [entry for entry in entries if entry.state is TransactionState.PREPARE_COMMIT]
    of_tasks = [entry for entry in ended if entry.is_of_task]
    batches = len(of_tasks) / case.tasks
    open_ms = [float(entry.last_update_ms - entry.start_ms) for entry in of_tasks]
    return {
        "batches": batches,
        "transactions": len(ended) / batches,
        "markers": sum(entry.partitions for entry in prepared) / batches,
        "state_records": len(entries) / batches,
        "state_kb": sum(entry.size_bytes for entry in entries) / 1e3 / batches,
        "kafka_cpu_ms": (after.kafka_cpu_s - before.kafka_cpu_s) * 1000 / batches,
        "spark_cpu_ms": (after.spark_cpu_s - before.spark_cpu_s) * 1000 / batches,
        "open_p50_ms": statistics.median(open_ms),
        "open_max_ms": max(open_ms),
    }


def _medians(plan: Plan, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the measured cases, and of the model for the same and for larger cases.

    The field `figures` is `measured`, `model` or `extrapolated`.
    """
    measured = compare(
        [{**sample, "figures": MEASURED} for sample in samples],
        by=Case._fields, side="figures", base="", metrics=METRICS,
    )  # fmt: skip
    costs = dict(KNOWN)
    for name in FITTED:
        known = [
            (Shape(row["tasks"], row["partitions_each"]), row[name])
            for row in measured
            if row["tasks"] < max(plan.tasks)
        ]
        costs[name] = fit(known)

    def modelled(case: Case, figures: str) -> dict[str, Any]:
        shape = Shape(case.tasks, case.partitions_each)
        return {
            **case._asdict(),
            "figures": figures,
            **{name: cost.of(shape) for name, cost in costs.items()},
        }

    return [
        *measured,
        *(modelled(case, MODEL) for case in plan.cases()),
        *(modelled(case, EXTRAPOLATED) for case in plan.larger_cases()),
    ]


def section(result: Result) -> str:
    """Return, as Markdown, the section on the measured costs, and on how the model predicts them."""
    plan = result["plan"]
    if not result["medians"]:
        return "## A micro-batch on clusters\n\n**What this shows.** Nothing: Apache Kafka was not measured."
    headings = ["tasks", "partitions of each", "figures", *(metric.heading for metric in METRICS)]
    lines = ["| " + " | ".join(headings) + " |", "| ---: | ---: | --- |" + " ---: |" * len(METRICS)]
    for row in result["medians"]:
        if row["figures"] != EXTRAPOLATED and (row["figures"] == MEASURED or _is_held_out(result, row)):
            cells = [f"{row['tasks']:,}", f"{row['partitions_each']:,}", row["figures"]]
            lines.append("| " + " | ".join([*cells, *(number(row.get(m.name)) for m in METRICS)]) + " |")
    table = "\n".join(lines)
    return f"""\
## A micro-batch on clusters

The sink writes micro-batches from a standalone cluster of Spark ({plan["workers"]} workers of one core) to
{plan["nodes"]} nodes of Apache Kafka with {min(plan["nodes"], 3)} replicas. Each task writes
{plan["rows_per_partition"]} small rows to each of its partitions. Figures are those of one micro-batch, sums
over all nodes. "Open" is the time from a transaction's start to its complete commit, in the transaction log.
All processes share the cores. Medians of {plan["repeats"]} queries of {plan["triggers"]} micro-batches after
{plan["warm_triggers"]} unmeasured.

A model has a cost for each micro-batch, for each task, and for each partition of each task. Its transactions
and markers follow from the protocol. The other costs are fitted to the cases with fewer than
{max(plan["tasks"])} tasks. The rows named `model` compare it with the others.

{table}

**What this shows.** {_sentences(result)}
"""


def _is_held_out(result: Result, row: Mapping[str, Any]) -> bool:
    return bool(row["tasks"] == max(result["plan"]["tasks"]))


def _sentences(result: Result) -> str:
    held_out = [row for row in result["medians"] if _is_held_out(result, row)]
    measured = {row["partitions_each"]: row for row in held_out if row["figures"] == MEASURED}
    ratios = {
        metric.heading: [
            row[metric.name] / measured[row["partitions_each"]][metric.name]
            for row in held_out
            if row["figures"] == MODEL
        ]
        for metric in METRICS
        if metric.name in (*KNOWN, *FITTED)
    }
    texts = [f"{heading} {min(r):.2f} to {max(r):.2f}" for heading, r in ratios.items()]
    tasks = max(result["plan"]["tasks"])
    return f"For {tasks} tasks the model predicts, as a multiple of the measured figures: {', '.join(texts)}."


def picture(result: Result) -> str:
    """Return an SVG of processor time, transaction log and duration by the number of tasks."""
    charts = []
    for name, heading in (
        ("kafka_cpu_ms", "Kafka's CPU ms"),
        ("state_kb", "transaction log kB"),
        ("trigger_ms", "duration ms"),
    ):
        lines = {
            f"{each} partitions per task": [
                (row["tasks"], row[name])
                for row in result["medians"]
                if row["figures"] == MEASURED and row["partitions_each"] == each
            ]
            for each in result["plan"]["partitions_each"]
        }
        charts.append(Chart(heading, "tasks", heading, lines))
    return draw_curves("A micro-batch on clusters", charts)
