"""Consumer clients reading one topic: ours in rows and Arrow, and the others of Python, also into Arrow."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog.bench.brokers import Side, running
from oncelog.bench.consuming import CLIENTS, Order, Report
from oncelog.bench.curves import Chart, draw_curves, lines_of
from oncelog.bench.framework import (
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
from oncelog.bench.generators import run_child
from oncelog.bench.page import markdown_table, range_of_ratios
from oncelog.edge.producer import Producer
from oncelog.errors import OncelogError

NAME = "consumers"
SUMMARY = "Records a second of Python's consumers from one broker: ours in rows and Arrow, others."
BASE = "aiokafka rows"
PACKAGES = {"confluent-kafka": "confluent_kafka", "aiokafka": "aiokafka", "kafka-python": "kafka"}
BY = {"record_bytes": "record bytes", "compression": "compression"}

METRICS = (
    Metric("records_per_s", "records/s", True),
    Metric("mb_per_s", "MB/s", True),
    Metric("cpu_us_per_record", "client CPU us/record"),
    Metric("rss_mb", "client MB"),
)


class Cell(NamedTuple):
    record_bytes: int
    compression: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`topic_bytes`: what a topic holds in values; a run ends there or after `seconds`."""

    clients: tuple[str, ...] = tuple(CLIENTS)
    record_bytes: tuple[int, ...] = (100, 1_000)
    compressions: tuple[str, ...] = ("none", "lz4")
    topic_bytes: int = 150_000_000
    partitions: int = 3
    seconds: float = 1.0
    repeats: int = 5

    def cells(self) -> Iterator[Cell]:
        for size in self.record_bytes:
            for compression in self.compressions:
                yield Cell(size, compression)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cells())) * len(self.clients)


QUICK = Plan(tuple(CLIENTS), (100,), ("none",), topic_bytes=300_000, seconds=5.0, repeats=1)


def _ratio(record_bytes: int) -> Any:
    where = {"record_bytes": record_bytes, "compression": "none"}
    return lambda result: figure(result, "records_per_s", client=f"oncelog Arrow / {BASE}", **where)


TARGETS = (
    Target("consumer to Arrow, 100 B, against aiokafka", 3.0, "times", True, _ratio(100)),
    Target("consumer to Arrow, 1 KB, against aiokafka", 3.0, "times", True, _ratio(1_000)),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Run the plan; returns what goes into the JSON file."""
    clients = [name for name in plan.clients if _is_installed(name)]
    left_out = {name: f"{name} is not installed" for name in plan.clients if name not in clients}
    samples: list[dict[str, Any]] = []
    with running([OURS], warm_up_seconds=0.2) as sides, ExitStack() as stack:
        topics = {}
        for cell in plan.cells():
            topic = stack.enter_context(sides[OURS].topic(plan.partitions))
            topics[cell] = topic, _load(plan, sides[OURS], cell, topic)
        for repeat, cell, client in interleaved(plan.cells(), clients, plan.repeats):
            head = {"repeat": repeat, **cell._asdict(), "client": client}
            samples.append({**head, **_take(plan, sides[OURS], cell, client, *topics[cell])})
            on_sample(len(samples))
    rows = compare(samples, by=Cell._fields, side="client", base=BASE, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=left_out)


def _is_installed(client: str) -> bool:
    package = PACKAGES.get(client.split(" ")[0])
    return package is None or importlib.util.find_spec(package) is not None


def _load(plan: Plan, side: Side, cell: Cell, topic: str) -> int:
    """Fill a topic with batches of 16 KB as producers leave them; how many records."""
    settings = {"bootstrap.servers": side.bootstrap_servers, "compression.type": cell.compression}
    values = [b"%08d" % index + bytes(cell.record_bytes - 8) for index in range(1_000)]
    rounds = max(plan.topic_bytes // (cell.record_bytes * len(values)), plan.partitions)
    with Producer({**settings, "batch.size": 16_384, "linger.ms": 5}) as producer:
        for index in range(rounds):
            producer.send_many(topic, values, partition=index % plan.partitions)
    return rounds * len(values)


def _take(plan: Plan, side: Side, cell: Cell, client: str, topic: str, records: int) -> dict[str, float]:
    order = Order(client, side.bootstrap_servers, topic, plan.partitions, records, plan.seconds)
    report = Report(**run_child("oncelog.bench.consuming", asdict(order)))
    if not report.records or report.records > records:
        raise OncelogError(f"{client} read {report.records} of {records} records")
    return {
        "records_per_s": report.records / report.seconds,
        "mb_per_s": report.records * cell.record_bytes / report.seconds / 1e6,
        "cpu_us_per_record": report.cpu_seconds / report.records * 1e6,
        "rss_mb": report.max_rss_bytes / 1e6,
    }


def section(result: Result) -> str:
    """Rows, Arrow and the other clients."""
    plan = result["plan"]
    return f"""\
## Consumers

Each client alone in a process of its own reads a topic of {plan["partitions"]} partitions and
{plan["topic_bytes"] / 1e6:g} MB of values in batches of 16 KB from its beginning, at most
{plan["seconds"]:g} s, connecting included; medians of {plan["repeats"]} runs in turns, and
`x / {BASE}` is the median of the pairs' ratios. Our Arrow batches come from
`Consumer.fetch_range`; "to Arrow" makes a table of partition, offset, timestamp, key and value from the rows
of the other clients.

{markdown_table(result["medians"], by=BY, side="client", metrics=METRICS)}

**What this shows.** {_range(result, "oncelog Arrow")} {_range(result, "oncelog rows")}
"""


def _range(result: Result, client: str) -> str:
    return range_of_ratios(result, f"{client} / {BASE}", "records_per_s", "records/s", side="client")


def picture(result: Result) -> str:
    """Records a second and processor time by record size."""
    where = {"compression": result["plan"]["compressions"][0]}
    charts = [
        Chart(
            heading, "record bytes", heading, lines_of(result, "record_bytes", metric, side="client", **where)
        )
        for metric, heading in (("records_per_s", "records/s"), ("cpu_us_per_record", "client CPU us/record"))
    ]
    return draw_curves("Consumers of Python", charts)
