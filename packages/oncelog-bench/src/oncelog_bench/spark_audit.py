"""The time of an audit on Spark by topic size, compared with only reading the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog.errors import OncelogError
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord
from oncelog_bench.brokers import BROKERS, Side, raw_produce, records_per_batch, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
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
from oncelog_bench.generators import run_child
from oncelog_bench.page import markdown_table, number
from oncelog_bench.raw_fetch import FetchReport, FetchSpec
from oncelog_bench.spark_engine import MASTER, Engine, spark_engine

NAME = "spark_audit"
SUMMARY = "The audit on Spark in GB/s by topic size, beside only reading the topic."
BY = {"gigabytes": "GB"}
METRICS = (
    Metric("gb_per_s", "GB/s", True),
    Metric("seconds", "s"),
    Metric("of_reading", "of bare reading", True),
    Metric("cpu_s_per_gb", "Spark's CPU s/GB"),
)
_READERS = 2


class Case(NamedTuple):
    gigabytes: float


class Loaded(NamedTuple):
    """A topic, and the number of batches in each of its partitions."""

    topic: str
    batches: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    `gigabytes` are the sizes of the topics. Each broker has all these topics on disk during the measurement.
    """

    brokers: tuple[str, ...] = BROKERS
    gigabytes: tuple[float, ...] = (0.25, 1.0, 4.0)
    record_bytes: int = 1_024
    partitions: int = 4
    reading_seconds: float = 1.0
    repeats: int = 5
    warm_up_seconds: float = 3.0

    def cases(self) -> Iterator[Case]:
        yield from map(Case, self.gigabytes)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.gigabytes) * len(self.brokers)

    @property
    def batch_records(self) -> int:
        return records_per_batch(self.record_bytes)

    @property
    def batch_bytes(self) -> int:
        return len(build_batch([NewRecord(0, None, bytes(self.record_bytes))] * self.batch_records))

    def requests(self, case: Case) -> int:
        """Return the number of requests that fill the topic. Each request has a batch for every partition."""
        return max(1, round(case.gigabytes * 1e9 / self.partitions / self.batch_bytes))


QUICK = Plan((OURS,), (0.002,), reading_seconds=0.1, repeats=1, warm_up_seconds=0.1)


def _growth(broker: str) -> Any:
    """Return a function that computes the ratio of the largest topic's GB/s to the second largest's."""

    def measured(result: Result) -> float | None:
        sizes = sorted(result["plan"]["gigabytes"])[-2:]
        speeds = [figure(result, "gb_per_s", broker=broker, gigabytes=size) for size in sizes]
        return None if None in speeds or len(speeds) < 2 else speeds[1] / speeds[0]  # type: ignore[operator]

    return measured


def _of_reading(broker: str) -> Any:
    return lambda result: figure(
        result, "of_reading", broker=broker, gigabytes=max(result["plan"]["gigabytes"])
    )


TARGETS = tuple(
    target
    for broker in BROKERS
    for target in (
        Target(
            f"audit of the largest topic in GB/s, to that of the next ({broker})",
            0.9,
            "times",
            True,
            _growth(broker),
        ),
        Target(
            f"audit of the largest topic, to bare reading ({broker})", 0.8, "times", True, _of_reading(broker)
        ),
    )
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        brokers = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        engine = stack.enter_context(spark_engine(()))
        topics = {}
        for case in plan.cases():
            for side in brokers.every:
                topic = stack.enter_context(side.topic(plan.partitions))
                topics[side.name, case] = Loaded(topic, _fill(plan, side, case, topic))
        # The first audit on each broker is a warm-up, so it is not measured.
        for side in brokers.every:
            _take(plan, engine, side, topics[side.name, next(plan.cases())])
        for repeat, case, name in interleaved(plan.cases(), brokers.names, plan.repeats):
            figures = _take(plan, engine, brokers[name], topics[name, case])
            samples.append({"repeat": repeat, **case._asdict(), "broker": name, **figures})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=brokers.left_out)


def _fill(plan: Plan, side: Side, case: Case, topic: str) -> int:
    sizes = {"record_bytes": plan.record_bytes, "batch_records": plan.batch_records}
    partitions = {"partitions": plan.partitions, "batches": plan.partitions}
    raw_produce(side.spec(topic, requests=plan.requests(case), **partitions, **sizes))
    first = TopicPartition(topic, 0)
    return (side.admin.list_offsets({first: "latest"})[first].offset or 0) // plan.batch_records


def _take(plan: Plan, engine: Engine, side: Side, loaded: Loaded) -> dict[str, float]:
    from oncelog.spark.audit.audit import audit_topic

    topic, batches = loaded
    spec = FetchSpec(
        side.bootstrap_servers, side.pid, topic, plan.partitions, _READERS, plan.batch_bytes,
        batches * plan.batch_records, plan.reading_seconds,
    )  # fmt: skip
    read = FetchReport(**run_child("oncelog_bench.raw_fetch", asdict(spec)))
    audited = []
    seconds, cpu_seconds = engine.timed(
        lambda: audited.append(audit_topic(engine.spark, side.bootstrap_servers, topic))
    )
    result = audited[0]
    if result.verdict != "clean" or result.totals.batches != batches * plan.partitions:
        raise OncelogError(f"the verdict on a sound topic is {result.verdict}: {result.totals}")
    gigabytes = batches * plan.partitions * plan.batch_bytes / 1e9
    return {
        "gb_per_s": gigabytes / seconds,
        "seconds": seconds,
        "of_reading": gigabytes / seconds / (read.bytes / 1e9 / read.seconds),
        "cpu_s_per_gb": cpu_seconds / gigabytes,
    }


def section(result: Result) -> str:
    """Return, as Markdown, the section on the audit by topic size."""
    plan = result["plan"]
    return f"""\
## Audit on Spark

`oncelog audit` with `{MASTER}` checks topics of {plan["partitions"]} partitions in batches of 16 KB of
{plan["record_bytes"]:,}-byte records: it fetches every batch, computes its checksum and checks its header.
"Of bare reading" compares with {_READERS} raw consumers that read the same topic from the same broker just
before and discard it; like Spark, they share the cores with the broker. Written data stay in the page cache
as far as memory permits. Medians of {plan["repeats"]} interleaved audits.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {_sentences(result)}
"""


def _sentences(result: Result) -> str:
    sentences = []
    sizes = sorted(result["plan"]["gigabytes"])
    for broker in result["plan"]["brokers"]:
        speeds = [figure(result, "gb_per_s", broker=broker, gigabytes=size) for size in sizes]
        if None not in speeds:
            words = " and ".join(
                f"{number(speed)} at {size:g} GB" for speed, size in zip(speeds, sizes, strict=True)
            )
            sentences.append(f"From {broker}, GB/s are {words}.")
    return " ".join(sentences)


def picture(result: Result) -> str:
    """Return an SVG of GB/s and seconds by topic size."""
    charts = [
        Chart(heading, "GB", heading, lines_of(result, "gigabytes", name))
        for name, heading in (("gb_per_s", "GB/s"), ("seconds", "s"))
    ]
    return draw_curves("Audit on Spark", charts)
