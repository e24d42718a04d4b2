"""What reading costs a broker: catching up and waiting at the end, one consumer and ten; ours and Kafka's."""

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
from oncelog_bench.raw_fetch import FetchOrder, FetchReport

NAME = "fetch"
SUMMARY = "What reading costs a broker, ours and Apache Kafka's: catching up and at the end."
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


class Cell(NamedTuple):
    reading: str
    consumers: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`loaded_mb` lie in `partitions` partitions for catching up; at the end `tail_per_s` batches of
    16 KB arrive a second in one partition."""

    brokers: tuple[str, ...] = BROKERS
    repeats: int = 5
    seconds: float = 0.8
    consumers: tuple[int, ...] = (1, 10)
    partitions: int = 3
    loaded_mb: int = 96
    record_bytes: int = 1_024
    tail_per_s: float = 500.0
    warm_up_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(self.cells())

    def cells(self) -> list[Cell]:
        return [Cell(reading, count) for reading in (CATCH_UP, TAIL) for count in self.consumers]

    @property
    def batch_records(self) -> int:
        return records_per_batch(self.record_bytes)


QUICK = Plan((OURS,), repeats=1, seconds=0.1, consumers=(1, 3), loaded_mb=4, warm_up_seconds=0.1)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Run the plan; returns what goes into the JSON file."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        sides = stack.enter_context(running(plan.brokers, warm_up_seconds=plan.warm_up_seconds))
        loaded = {side.name: stack.enter_context(_loaded(plan, side)) for side in sides.every}
        for repeat, cell, name in interleaved(plan.cells(), sides.names, plan.repeats):
            side = sides[name]
            report = (
                _fetch(_order(plan, cell, side, *loaded[name]))
                if cell.reading == CATCH_UP
                else _tail(plan, cell, side)
            )
            samples.append({"repeat": repeat, "broker": name, **cell._asdict(), **_figures(report)})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


@contextmanager
def _loaded(plan: Plan, side: Side) -> Iterator[tuple[str, int]]:
    """A topic full of batches, and where its partitions end."""
    with side.topic(plan.partitions) as topic:
        requests = plan.loaded_mb * 10**6 // (plan.partitions * plan.batch_records * plan.record_bytes)
        sizes = {"record_bytes": plan.record_bytes, "batch_records": plan.batch_records}
        raw_produce(
            side.order(topic, partitions=plan.partitions, batches=plan.partitions, requests=requests, **sizes)
        )
        yield topic, requests * plan.batch_records


def _order(plan: Plan, cell: Cell, side: Side, topic: str, end_offset: int) -> FetchOrder:
    record = NewRecord(0, None, bytes(plan.record_bytes))
    batch_bytes = len(build_batch([record] * plan.batch_records))
    return FetchOrder(
        side.bootstrap_servers, side.pid, topic, plan.partitions, cell.consumers, batch_bytes, end_offset,
        plan.seconds,
    )  # fmt: skip


def _tail(plan: Plan, cell: Cell, side: Side) -> FetchReport:
    with side.topic(1) as topic:
        produce = side.order(
            topic,
            record_bytes=plan.record_bytes,
            batch_records=plan.batch_records,
            rate_per_s=plan.tail_per_s,
        )
        order = _order(plan, cell, side, topic, 0)
        return _fetch(FetchOrder(**{**_fields(order), "partitions": 1, "produce": produce}))


def _fields(order: FetchOrder) -> dict[str, Any]:
    return {name: getattr(order, name) for name in FetchOrder.__slots__}


def _fetch(order: FetchOrder) -> FetchReport:
    return FetchReport(**run_child("oncelog_bench.raw_fetch", asdict(order)))


def _figures(report: FetchReport) -> dict[str, float]:
    return {
        "mb_per_s": report.bytes / 1e6 / report.seconds,
        "cpu_s_per_gb": report.broker_cpu_seconds / (report.bytes / 1e9),
        **report.quantiles,
        "generator_cpu_share": report.cpu_seconds / report.seconds,
    }


def section(result: Result) -> str:
    """Reading, catching up and at the end."""
    plan = result["plan"]
    return f"""\
## Reading

A raw consumer has one fetch in flight, reads the whole answer and looks at one batch header in it.
Catch-up: {plan["loaded_mb"]} MB in {plan["partitions"]} partitions are read again and again for
{plan["seconds"]:g} s, and p50 and p99 are of a fetch. Tail: {plan["tail_per_s"]:g} batches of 16 KB a second
arrive in one partition and every consumer gets each; p50 and p99 run from writing a batch to having read
it, and the broker's processor time includes taking them in. GB are those delivered to all consumers.
Medians of {plan["repeats"]} samples in turns.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "cpu_s_per_gb", "broker CPU per GB delivered")}
{range_of_ratios(result, RATIO, "p99_ms", "p99")}
"""


def picture(result: Result) -> str:
    """By consumers."""
    charts = [
        Chart(
            f"{reading}: {heading}", "consumers", heading,
            lines_of(result, "consumers", metric, reading=reading),
        )
        for reading in (CATCH_UP, TAIL)
        for metric, heading in CHARTED
    ]  # fmt: skip
    return draw_curves("Reading", charts)
