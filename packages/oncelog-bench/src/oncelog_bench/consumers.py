"""Consumer clients that read one topic: Oncelog's, by rows and into Arrow, and other Python clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog.errors import OncelogError
from oncelog_bench.brokers import Side, fill_topic, running
from oncelog_bench.clients import METRICS, Report, draw_by_size, installed
from oncelog_bench.consumer_worker import CLIENTS, WorkerSpec
from oncelog_bench.framework import (
    OURS,
    OnSample,
    Result,
    Target,
    compare,
    figure,
    interleaved,
    result_of,
)
from oncelog_bench.generators import run_child
from oncelog_bench.page import markdown_table, range_of_ratios

NAME = "consumers"
SUMMARY = (
    "Records per second of Python consumers from one broker: Oncelog's, by rows and into Arrow, and others."
)
AIOKAFKA, CONFLUENT = "aiokafka rows", "confluent-kafka rows without pause"
BY = {"record_bytes": "record bytes", "compression": "compression"}


class Case(NamedTuple):
    record_bytes: int
    compression: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    A topic has values of `topic_bytes` in total. A run reads it repeatedly for `seconds`. The topic's number
    of records should be a multiple of 10,000, because `consume` of confluent-kafka waits for 10,000.
    """

    clients: tuple[str, ...] = tuple(CLIENTS)
    record_bytes: tuple[int, ...] = (100, 1_000)
    compressions: tuple[str, ...] = ("none", "lz4")
    topic_bytes: int = 600_000_000
    partitions: int = 3
    seconds: float = 5.0
    repeats: int = 5

    def cases(self) -> Iterator[Case]:
        for size in self.record_bytes:
            for compression in self.compressions:
                yield Case(size, compression)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cases())) * len(self.clients)


QUICK = Plan(tuple(CLIENTS), (100,), ("none",), topic_bytes=300_000, seconds=0.2, repeats=1)


def _figure(metric: str, client: str, record_bytes: int) -> Callable[[Result], float | None]:
    where = {"record_bytes": record_bytes, "compression": "none", "client": client}
    return lambda result: figure(result, metric, **where)


def _times(what: str, ours: str, other: str, limit: float, record_bytes: int) -> Target:
    """Return a target: client `ours` reads at least `limit` times as many records per second as `other`."""
    name = f"consumer {what}, {'1 KB' if record_bytes == 1_000 else '100 B'}, against {other}"
    return Target(
        name, limit, "times", True, _figure("records_per_s", f"oncelog {ours} / {other}", record_bytes)
    )


TARGETS = (
    *(_times("rows", "rows", AIOKAFKA, 2.0, size) for size in (100, 1_000)),
    *(_times("rows", "rows", CONFLUENT, 1.0, size) for size in (100, 1_000)),
    _times("to Arrow", "Arrow", CONFLUENT, 3.0, 100),
    Target(
        "consumer to Arrow, 1 KB, processor time of a record",
        1.0,
        "us",
        False,
        _figure("cpu_us_per_record", "oncelog Arrow", 1_000),
    ),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    clients, left_out = installed(plan.clients)
    samples: list[dict[str, Any]] = []
    with running([OURS], warm_up_seconds=0.2) as sides, ExitStack() as stack:
        topics = {}
        for case in plan.cases():
            topic = stack.enter_context(sides[OURS].topic(plan.partitions))
            records = fill_topic(
                sides[OURS], topic, plan.partitions, case.record_bytes, plan.topic_bytes, case.compression
            )
            topics[case] = topic, records
        for repeat, case, client in interleaved(plan.cases(), clients, plan.repeats):
            head = {"repeat": repeat, **case._asdict(), "client": client}
            samples.append({**head, **_take(plan, sides[OURS], case, client, *topics[case])})
            on_sample(len(samples))
    rows = [
        row
        for base in (AIOKAFKA, CONFLUENT)
        for row in compare(samples, by=Case._fields, side="client", base=base, metrics=METRICS)
    ]
    rows = [row for index, row in enumerate(rows) if row not in rows[:index]]
    return result_of(NAME, plan, samples, rows, left_out=left_out)


def _take(plan: Plan, side: Side, case: Case, client: str, topic: str, records: int) -> dict[str, float]:
    spec = WorkerSpec(client, side.bootstrap_servers, topic, plan.partitions, records, plan.seconds)
    report = Report(**run_child("oncelog_bench.consumer_worker", asdict(spec)))
    if not report.records:
        raise OncelogError(f"{client} read none of {records} records in {plan.seconds:g} s")
    return report.figures(case.record_bytes)


def section(result: Result) -> str:
    """Return, as Markdown, the section on Oncelog's consumer, by rows and into Arrow, and the other
    clients.
    """
    plan = result["plan"]
    return f"""\
## Consumers

Each client runs alone in a separate process. It reads a topic of {plan["partitions"]} partitions and
{plan["topic_bytes"] / 1e6:g} MB of values in batches of 16 KB repeatedly from the beginning, for
{plan["seconds"]:g} s after the first records. A poll returns up to 10,000 records. Medians of
{plan["repeats"]} interleaved runs; `x / y` is the median of the pairs' ratios. Settings are the defaults,
with two exceptions. `max.poll.records` is 10,000 except in "by 500", its default. "Without pause" and
"confluent-kafka to Arrow" have `fetch.queue.backoff.ms=0`: by default librdkafka pauses fetching for 1 s each
time that its queue is full. Our Arrow batches come from `Consumer.fetch_range`. "To Arrow" builds a table of
partition, offset, timestamp, key and value from the rows of the other clients.

{markdown_table(result["medians"], by=BY, side="client", metrics=METRICS)}

**What this shows.** {_range(result, "oncelog Arrow", AIOKAFKA)} {_range(result, "oncelog rows", AIOKAFKA)}
{_range(result, "oncelog Arrow", CONFLUENT)} {_range(result, "oncelog rows", CONFLUENT)}
"""


def _range(result: Result, client: str, base: str) -> str:
    return range_of_ratios(result, f"{client} / {base}", "records_per_s", "records/s", side="client")


def picture(result: Result) -> str:
    """Return an SVG of records per second and processor time by record size."""
    where = {"compression": result["plan"]["compressions"][0]}
    return draw_by_size("Consumers of Python", result, where)
