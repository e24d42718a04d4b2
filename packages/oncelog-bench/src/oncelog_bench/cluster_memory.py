"""Heap of Apache Kafka for producers and transactional ids, and bytes that an audit on Spark moves."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from oncelog_devtools.apache_kafka import ApacheKafka, MissingDependency

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.client.producer.blocking import Producer
from oncelog.errors import OncelogError
from oncelog.spark.session import local_session
from oncelog_bench.brokers import KAFKA_HEAP_MB
from oncelog_bench.curves import Chart, draw_curves
from oncelog_bench.framework import KAFKA, Metric, OnSample, Result, compare, result_of
from oncelog_bench.page import number
from oncelog_bench.producer_ids import TOPIC, append_once_each
from oncelog_bench.raw_wire import connect, new_producer_id
from oncelog_bench.spark_engine import MASTER

NAME = "cluster_memory"
SUMMARY = "Heap of Apache Kafka by producers and transactional ids, and bytes that an audit shuffles."
METRICS = (Metric("kilobytes", "kB"),)
PRODUCERS = "producer id in a partition"
TRANSACTIONAL_IDS = "transactional id"
BATCHES = "batch audited on Spark (shuffled)"
PARTITIONS = "partition audited on Spark (sent to the driver)"
_TOOL_TIMEOUT_S = 120.0
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size: the counts of each kind, of which the first is the base of the figures."""

    producers: tuple[int, ...] = (1_000, 50_000, 100_000)
    transactional_ids: tuple[int, ...] = (100, 4_000, 8_000)
    batches: tuple[int, ...] = (1_000, 20_000, 40_000)
    partitions: tuple[int, ...] = (1, 32, 64)
    repeats: int = 5

    def counts(self) -> dict[str, tuple[int, ...]]:
        return {
            PRODUCERS: self.producers,
            TRANSACTIONAL_IDS: self.transactional_ids,
            BATCHES: self.batches,
            PARTITIONS: self.partitions,
        }

    @property
    def samples_count(self) -> int:
        return self.repeats * sum(map(len, self.counts().values()))


QUICK = Plan((100, 2_000), (10, 300), (20, 400), (1, 4), repeats=1)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file. Without Java, take none."""
    samples: list[dict[str, Any]] = []

    try:
        for repeat in range(plan.repeats):
            with ApacheKafka(heap_mb=KAFKA_HEAP_MB) as kafka:
                for what, count, kilobytes in chain(
                    _kept_by_kafka(plan, kafka), _moved_by_audits(plan, kafka)
                ):
                    figures = {"what": what, "count": count, "kilobytes": kilobytes}
                    samples.append({"repeat": repeat, "broker": KAFKA, **figures})
                    on_sample(len(samples))
    except MissingDependency as error:
        return result_of(NAME, plan, [], [], left_out={KAFKA: str(error)})
    rows = compare(samples, by=("what", "count"), side="broker", base="", metrics=METRICS)
    return result_of(NAME, plan, samples, _with_bytes_each(rows))


def _with_bytes_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `bytes_each` to the rows after the first of each kind: the bytes for one more since the first."""
    firsts: dict[str, dict[str, Any]] = {}
    for row in rows:
        first = firsts.setdefault(row["what"], row)
        if first is not row:
            added_kb = row["kilobytes"] - first["kilobytes"]
            row["bytes_each"] = added_kb * 1000 / (row["count"] - first["count"])
    return rows


def _kept_by_kafka(plan: Plan, kafka: ApacheKafka) -> Iterator[tuple[str, int, float]]:
    """Yield the heap after each step, less the heap of before the first."""
    with (
        Admin({"bootstrap.servers": kafka.bootstrap_servers}) as admin,
        closing(connect(kafka.bootstrap_servers)) as connected,
    ):
        admin.create_topics([NewTopic(TOPIC, 1, 1, {})])
        new_producer_id(connected, "first")
        steps: tuple[tuple[str, tuple[int, ...], Callable[[int, int], object]], ...] = (
            (
                PRODUCERS,
                plan.producers,
                lambda start, end: append_once_each(
                    kafka.pid, connected, end - start, sequence=0, first_id=1_000_000 + start
                ),
            ),
            (
                TRANSACTIONAL_IDS,
                plan.transactional_ids,
                lambda start, end: [new_producer_id(connected, f"q/{n}") for n in range(start, end)],
            ),
        )
        for what, counts, extend in steps:
            empty_kb, reached = live_heap_kb(kafka.pid), 0
            for count in counts:
                extend(reached, count)
                reached = count
                yield what, count, live_heap_kb(kafka.pid) - empty_kb


def live_heap_kb(pid: int) -> float:
    """Return the size in kB of the objects that a JVM keeps after a full garbage collection."""
    command = ["jcmd", str(pid), "GC.class_histogram"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("Total"):
        raise OncelogError(f"jcmd could not read the heap of process {pid}: {done.stderr or done.stdout}")
    return int(lines[-1].split()[2]) / 1e3


def _moved_by_audits(plan: Plan, kafka: ApacheKafka) -> Iterator[tuple[str, int, float]]:
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    conf = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    with Admin(servers) as admin, local_session("oncelog bench", MASTER, conf) as spark:
        for what, counts in ((BATCHES, plan.batches), (PARTITIONS, plan.partitions)):
            for count in counts:
                partitions = 1 if what == BATCHES else count
                topic = f"{what.split()[0]}-{count}"
                admin.create_topics([NewTopic(topic, partitions, 1, {})])
                _fill(servers, topic, partitions, batches=max(count, partitions))
                # Two tasks read the partition with the batches, so that their headers are shuffled.
                per_task = count // 2 if what == BATCHES else count
                shuffled_kb, result_kb = _audit(spark, kafka.bootstrap_servers, topic, per_task)
                yield what, count, shuffled_kb if what == BATCHES else result_kb
                admin.delete_topics([topic])


def _fill(servers: dict[str, str], topic: str, partitions: int, *, batches: int) -> None:
    """Write one batch of one record after another, to the partitions in turn."""
    with Producer({**servers, "batch.size": 0, "linger.ms": 0}) as producer:
        for index in range(batches):
            producer.send(topic, b"x", partition=index % partitions)


def _audit(spark: Any, bootstrap_servers: str, topic: str, offsets_per_task: int) -> tuple[float, float]:
    """Audit a topic. Return the kB that its stages shuffled, and the kB that its tasks sent to the driver."""
    from oncelog.spark.audit.audit import audit_topic

    before = _moved(spark)
    result = audit_topic(spark, bootstrap_servers, topic, offsets_per_task=offsets_per_task)
    if result.verdict != "clean":
        raise OncelogError(f"the verdict on a sound topic is {result.verdict}")
    after = _moved(spark)
    return (after[0] - before[0]) / 1e3, (after[1] - before[1]) / 1e3


def _moved(spark: Any) -> tuple[int, int]:
    context = spark.sparkContext
    url = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/stages"
    with urllib.request.urlopen(url, timeout=_WAIT_S) as response:
        stages = json.load(response)
    return sum(s["shuffleWriteBytes"] for s in stages), sum(s.get("resultSize", 0) for s in stages)


def section(result: Result) -> str:
    """Return, as Markdown, the section on the bytes of each kind."""
    if not result["medians"]:
        return "## Memory of clusters\n\n**What this shows.** Nothing: Apache Kafka was not measured."
    lines = [
        "| one more | count | kB | bytes each, since the first count |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in result["medians"]:
        figures = f"{number(row['kilobytes'])} | {number(row.get('bytes_each'))}"
        lines.append(f"| {row['what']} | {row['count']:,} | {figures} |")
    table = "\n".join(lines)
    return f"""\
## Memory of clusters

Heap is what the JVM of Apache Kafka keeps after a full garbage collection. Each producer id has one batch in
one partition. An audit with `{MASTER}` reads batches of one record. Its figures are Spark's own:
bytes that its stages shuffled, which they do with partitions that several tasks read, and bytes of results
that tasks sent to the driver. Figures are differences from the first count. Medians of
{result["plan"]["repeats"]} runs.

{table}

**What this shows.** {_sentences(result)}
"""


def _sentences(result: Result) -> str:
    # The last row of each kind replaces the others.
    each = {row["what"]: number(row.get("bytes_each")) for row in result["medians"]}
    return (
        f"Apache Kafka keeps {each[PRODUCERS]} bytes of heap for a producer id in a partition and "
        f"{each[TRANSACTIONAL_IDS]} for a transactional id. An audit shuffles {each[BATCHES]} bytes for a "
        f"batch, and sends the driver {each[PARTITIONS]} bytes for a partition."
    )


def picture(result: Result) -> str:
    """Return an SVG of the bytes by count, one chart for each kind."""
    charts = []
    for what in dict.fromkeys(row["what"] for row in result["medians"]):
        points = [(row["count"], row["kilobytes"]) for row in result["medians"] if row["what"] == what]
        charts.append(Chart(what, "count", "kB", {KAFKA: points}))
    return draw_curves("Memory of clusters", charts)
