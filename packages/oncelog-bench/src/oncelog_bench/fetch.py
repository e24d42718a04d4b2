"""The broker's cost of reading with one consumer and with ten, for Oncelog and Apache Kafka.

Consumers either read the whole log or wait for new batches at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord
from oncelog_bench.brokers import BROKERS, Side, raw_produce, records_per_batch, running
from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.framework import KAFKA, OURS, Metric, OnSample, Result, compare, interleaved, result_of
from oncelog_bench.generators import run_child
from oncelog_bench.page import markdown_table, range_of_ratios
from oncelog_bench.raw_fetch import FetchReport, FetchSpec

NAME = "fetch"
SUMMARY = "Cost of reads for our broker and Apache Kafka, when catching up and at the end of the log."
RATIO = f"{OURS} / {KAFKA}"
CATCH_UP, TAIL = "catch-up", "tail"
BY = {"reading": "reading", "consumers": "consumers"}
METRICS = (
    Metric("mb_per_s", "MB/s", True),
    Metric("cpu_s_per_gb", "broker CPU s/GB"),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("generator_cpu_share", "generator CPU share"),
)
CHARTED = (("mb_per_s", "MB/s"), ("cpu_s_per_gb", "broker CPU s/GB"), ("p99_ms", "p99 ms"))


class Case(NamedTuple):
    reading: str
    consumers: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. Consumers that catch up read `loaded_mb` in `partitions` partitions.

    Consumers that wait at the end get `tail_per_s` batches of 16 KB per second from one partition.
    """

    brokers: tuple[str, ...] = BROKERS
    repeats: int = 5
    seconds: float = 2.0
    consumers: tuple[int, ...] = (1, 10)
    partitions: int = 3
    loaded_mb: int = 96
    record_bytes: int = 1_024
    tail_per_s: float = 500.0
    warm_up_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(self.cases())

    def cases(self) -> list[Case]:
        return [Case(reading, count) for reading in (CATCH_UP, TAIL) for count in self.consumers]

    @property
    def batch_records(self) -> int:
        return records_per_batch(self.record_bytes)


QUICK = Plan((OURS,), repeats=1, seconds=0.1, consumers=(1, 3), loaded_mb=4, warm_up_seconds=0.1)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        loaded = {side.name: stack.enter_context(_loaded(plan, side)) for side in sides.every}
        for repeat, case, name in interleaved(plan.cases(), sides.names, plan.repeats):
            side = sides[name]
            report = (
                _fetch(_spec(plan, case, side, *loaded[name]))
                if case.reading == CATCH_UP
                else _tail(plan, case, side)
            )
            samples.append({"repeat": repeat, "broker": name, **case._asdict(), **_figures(report)})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


@contextmanager
def _loaded(plan: Plan, side: Side) -> Iterator[tuple[str, int]]:
    """Create a topic full of batches for the `with` block. Yield the topic and its end offset."""
    with side.topic(plan.partitions) as topic:
        requests = plan.loaded_mb * 10**6 // (plan.partitions * plan.batch_records * plan.record_bytes)
        sizes = {"record_bytes": plan.record_bytes, "batch_records": plan.batch_records}
        raw_produce(
            side.spec(topic, partitions=plan.partitions, batches=plan.partitions, requests=requests, **sizes)
        )
        yield topic, requests * plan.batch_records


def _spec(plan: Plan, case: Case, side: Side, topic: str, end_offset: int) -> FetchSpec:
    record = NewRecord(0, None, bytes(plan.record_bytes))
    batch_bytes = len(build_batch([record] * plan.batch_records))
    return FetchSpec(
        side.bootstrap_servers, side.pid, topic, plan.partitions, case.consumers, batch_bytes, end_offset,
        plan.seconds,
    )  # fmt: skip


def _tail(plan: Plan, case: Case, side: Side) -> FetchReport:
    with side.topic(1) as topic:
        produce = side.spec(
            topic,
            record_bytes=plan.record_bytes,
            batch_records=plan.batch_records,
            rate_per_s=plan.tail_per_s,
        )
        spec = _spec(plan, case, side, topic, 0)
        return _fetch(FetchSpec(**{**_fields(spec), "partitions": 1, "produce": produce}))


def _fields(spec: FetchSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in FetchSpec.__slots__}


def _fetch(spec: FetchSpec) -> FetchReport:
    return FetchReport(**run_child("oncelog_bench.raw_fetch", asdict(spec)))


def _figures(report: FetchReport) -> dict[str, float]:
    return {
        "mb_per_s": report.bytes / 1e6 / report.seconds,
        "cpu_s_per_gb": report.broker_cpu_seconds / (report.bytes / 1e9),
        **report.quantiles,
        "generator_cpu_share": report.cpu_seconds / report.seconds,
    }


def section(result: Result) -> str:
    """Return, as Markdown, the section on reading the whole log and on waiting at its end."""
    plan = result["plan"]
    return f"""\
## Reading

A raw consumer has one fetch in flight, reads the whole response and looks at one batch header in it.
Catch-up: consumers read {plan["loaded_mb"]} MB in {plan["partitions"]} partitions repeatedly for
{plan["seconds"]:g} s; p50 and p99 are of a fetch. Tail: {plan["tail_per_s"]:g} batches of 16 KB per second
arrive in one partition, and every consumer reads each. There p50 and p99 run from writing a batch to reading
it, and the broker's processor time includes appending. GB are those delivered to all consumers.
Medians of {plan["repeats"]} interleaved samples.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "cpu_s_per_gb", "broker CPU per GB delivered")}
{range_of_ratios(result, RATIO, "p99_ms", "p99")}
"""


def picture(result: Result) -> str:
    """Return an SVG of the broker's costs by the number of consumers."""
    charts = [
        Chart(
            f"{reading}: {heading}", "consumers", heading,
            lines_of(result, "consumers", metric, reading=reading),
        )
        for reading in (CATCH_UP, TAIL)
        for metric, heading in CHARTED
    ]  # fmt: skip
    return draw_curves("Reading", charts)
