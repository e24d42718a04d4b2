"""Producer clients against one broker: Oncelog's, by rows and by Arrow tables, and other Python clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog.errors import OncelogError
from oncelog.types import TopicPartition
from oncelog_bench.brokers import Side, running
from oncelog_bench.clients import METRICS, Report, draw_by_size, installed
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
from oncelog_bench.producer_worker import CLIENTS, WorkerSpec

NAME = "producers"
SUMMARY = (
    "Records per second of Python producers to one broker: Oncelog's, by rows and by tables, and others."
)
BASE = "confluent-kafka"
BY = {
    "record_bytes": "record bytes",
    "compression": "compression",
    "batch_bytes": "batch.size",
    "callbacks": "callbacks",
}
DEFAULT = "default"
"""The batch size for which each client keeps its own default settings, except `acks` and
`enable.idempotence`.
"""
WITH_CALLBACKS = ("oncelog rows", BASE)
"""The clients that are also measured with a delivery callback for each record."""

SETTINGS = {"acks": "all", "enable.idempotence": "true"}
EQUAL_SETTINGS = {"max.in.flight.requests.per.connection": 5, "linger.ms": 5}


class Case(NamedTuple):
    record_bytes: int
    compression: str
    batch_bytes: int | str
    callbacks: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    The first batch size is measured with all record sizes and compressions. Other batch sizes, and callbacks,
    are measured only without compression.
    """

    clients: tuple[str, ...] = tuple(CLIENTS)
    record_bytes: tuple[int, ...] = (100, 1_000)
    compressions: tuple[str, ...] = ("none", "lz4")
    batch_bytes: tuple[int | str, ...] = (DEFAULT, 1_000_000)
    partitions: int = 3
    seconds: float = 5.0
    repeats: int = 5

    def cases(self) -> Iterator[Case]:
        for size in self.record_bytes:
            for compression in self.compressions:
                yield Case(size, compression, self.batch_bytes[0], "no")
            for batch_bytes in self.batch_bytes[1:]:
                yield Case(size, self.compressions[0], batch_bytes, "no")
            for batch_bytes in self.batch_bytes:
                yield Case(size, self.compressions[0], batch_bytes, "yes")

    @property
    def samples_count(self) -> int:
        return self.repeats * sum(
            is_measured(case, client) for case in self.cases() for client in self.clients
        )


QUICK = Plan(tuple(CLIENTS), (100,), ("none",), (DEFAULT,), seconds=0.05, repeats=1)


def is_measured(case: Case, client: str) -> bool:
    """Return False if the case has delivery callbacks and `client` is not in WITH_CALLBACKS, else True."""
    return case.callbacks == "no" or client in WITH_CALLBACKS


def _ratio(client: str, record_bytes: int) -> Any:
    where = {"record_bytes": record_bytes, "compression": "none", "batch_bytes": DEFAULT, "callbacks": "no"}
    return lambda result: figure(result, "records_per_s", client=f"{client} / {BASE}", **where)


TARGETS = (
    Target(
        "producer, rows of 100 B, against confluent-kafka", 1.0, "times", True, _ratio("oncelog rows", 100)
    ),
    Target(
        "producer, rows of 1 KB, against confluent-kafka", 1.0, "times", True, _ratio("oncelog rows", 1_000)
    ),
    Target(
        "producer, Arrow of 100 B, against confluent-kafka", 3.0, "times", True, _ratio("oncelog Arrow", 100)
    ),
    Target(
        "producer, Arrow of 1 KB, against confluent-kafka", 3.0, "times", True, _ratio("oncelog Arrow", 1_000)
    ),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    clients, left_out = installed(plan.clients)
    samples: list[dict[str, Any]] = []
    with running([OURS], warm_up_seconds=0.2) as sides:
        for repeat, case, client in interleaved(plan.cases(), clients, plan.repeats):
            if not is_measured(case, client):
                continue
            head = {"repeat": repeat, **case._asdict(), "client": client}
            samples.append({**head, **_take(plan, sides[OURS], case, client)})
            on_sample(len(samples))
    rows = compare(samples, by=Case._fields, side="client", base=BASE, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, settings=SETTINGS, left_out=left_out)


def _take(plan: Plan, side: Side, case: Case, client: str) -> dict[str, float]:
    settings: dict[str, object] = {
        **SETTINGS,
        "bootstrap.servers": side.bootstrap_servers,
        "compression.type": case.compression,
    }
    if case.batch_bytes != DEFAULT:
        settings |= {**EQUAL_SETTINGS, "batch.size": case.batch_bytes}
    with side.topic(plan.partitions) as topic:
        spec = WorkerSpec(
            client,
            settings,
            topic,
            plan.partitions,
            case.record_bytes,
            plan.seconds,
            has_callbacks=case.callbacks == "yes",
        )
        report = Report(**run_child("oncelog_bench.producer_worker", asdict(spec)))
        _check_stored(side, topic, plan.partitions, report)
    return report.figures(case.record_bytes)


def _check_stored(side: Side, topic: str, partitions: int, report: Report) -> None:
    """Raise OncelogError if the topic has fewer records than were sent after the warm-up."""
    ends = side.admin.list_offsets({TopicPartition(topic, index): "latest" for index in range(partitions)})
    stored = sum(end.offset or 0 for end in ends.values())
    if stored < report.records:
        raise OncelogError(f"{report.records} records were sent, but {stored} are stored")


def section(result: Result) -> str:
    """Return, as Markdown, the section on Oncelog's producer, by rows and by tables, and the other
    clients.
    """
    plan = result["plan"]
    by = {name: heading for name, heading in BY.items() if name in result["medians"][0]}
    return f"""\
## Producers

Each client runs alone in a separate process. It sends to {plan["partitions"]} partitions of our broker for
{plan["seconds"]:g} s and waits for the last acknowledgement. The clock starts after the first
acknowledgements. Medians of {plan["repeats"]} interleaved runs; `x / {BASE}` is the median of the pairs'
ratios. All are idempotent with `acks=all`. A `batch.size` of "default" means each client's own settings.
With a number, all have that `batch.size`, `linger.ms=5` and five requests in flight; tables use batches of
512 KB if that is more. Values are zeros, which compress well. Every acknowledged record was found in the
topic.

{markdown_table(result["medians"], by=by, side="client", metrics=METRICS)}

**What this shows.** {_range(result, "oncelog rows")} {_range(result, "oncelog Arrow")}
"""


def _range(result: Result, client: str) -> str:
    return range_of_ratios(result, f"{client} / {BASE}", "records_per_s", "records/s", side="client")


def picture(result: Result) -> str:
    """Return an SVG of records per second and processor time by record size."""
    plan = result["plan"]
    where = {"compression": plan["compressions"][0], "batch_bytes": plan["batch_bytes"][0]}
    if "callbacks" in result["medians"][0]:
        where["callbacks"] = "no"
    return draw_by_size("Producers of Python", result, where)
