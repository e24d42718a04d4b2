"""Commits per second of one producer, one transaction after the other, by a transaction's records and
partitions.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncelog_bench.brokers import BROKERS, running
from oncelog_bench.clients import installed
from oncelog_bench.commit_worker import CLIENTS, Report, WorkerSpec
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
from oncelog_bench.page import markdown_table, range_of_ratios

NAME = "transactions"
SUMMARY = (
    "Transactions committed per second by one producer, with Oncelog and with Apache Kafka as the broker."
)
RATIO = f"{OURS} / {KAFKA}"
BY = {"client": "client", "records": "records a transaction", "partitions": "partitions"}
METRICS = (
    Metric("commits_per_s", "commits/s", True),
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
)


class Case(NamedTuple):
    client: str
    records: int
    partitions: int


@dataclass(frozen=True, slots=True)
class Plan:
    brokers: tuple[str, ...] = BROKERS
    clients: tuple[str, ...] = tuple(CLIENTS)
    records: tuple[int, ...] = (1, 10, 100)
    partitions: tuple[int, ...] = (1, 3, 50)
    record_bytes: int = 100
    seconds: float = 2.0
    repeats: int = 5
    warm_up_seconds: float = 10.0

    def cases(self) -> Iterator[Case]:
        """Yield the cases to measure: every client with every size of a transaction."""
        for client in self.clients:
            for records in self.records:
                for partitions in self.partitions:
                    yield Case(client, records, partitions)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * len(list(self.cases()))


QUICK = Plan((OURS,), ("oncelog",), (10,), (3,), seconds=0.1, repeats=1, warm_up_seconds=0.1)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    clients, without = installed(plan.clients)
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        cases = [case for case in plan.cases() if case.client in clients]
        for repeat, case, name in interleaved(cases, sides.names, plan.repeats):
            side = sides[name]
            with side.topic(case.partitions) as topic:
                sizes = {"record_bytes": plan.record_bytes, "seconds": plan.seconds, **case._asdict()}
                spec = WorkerSpec(bootstrap_servers=side.bootstrap_servers, topic=topic, **sizes)
                report = Report(**run_child("oncelog_bench.commit_worker", asdict(spec)))
            samples.append({"repeat": repeat, "broker": name, **case._asdict(), **_figures(report)})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out={**sides.left_out, **without})


def _figures(report: Report) -> dict[str, float]:
    taken = sorted(report.begin_to_commit_ms)
    return {
        "commits_per_s": len(taken) / report.seconds,
        "p50_ms": statistics.median(taken),
        "p99_ms": taken[int(len(taken) * 0.99)],
    }


def section(result: Result) -> str:
    """Return, as Markdown, the section on commits per second."""
    plan = result["plan"]
    return f"""\
## Transactions

One producer commits transactions one after the other for {plan["seconds"]:g} s, with records of
{plan["record_bytes"]} bytes to the partitions in turn. Our producer bumps the epoch at every end (KIP-890),
which both brokers support; confluent-kafka uses the classic protocol. A transaction's time runs from its
begin to the response to its commit. Apache Kafka writes markers after that response, and the next
transaction waits for them. Medians of {plan["repeats"]} interleaved samples.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "commits_per_s", "commits a second")}
{range_of_ratios(result, RATIO, "p99_ms", "p99")}
"""


def picture(result: Result) -> str:
    """Return an SVG of the metrics of Oncelog's producer by records per transaction, for 3 partitions."""
    chosen = {**result, "medians": [row for row in result["medians"] if row["partitions"] == 3]}
    ours = {**chosen, "medians": [row for row in chosen["medians"] if row["client"] == "oncelog"]}
    charts = [
        Chart(metric.heading, "records", metric.heading, lines_of(ours, "records", metric.name))
        for metric in METRICS
    ]
    return draw_curves("Transactions of our producer over 3 partitions", charts)


TARGETS = tuple(
    Target(
        f"commits a second to Apache Kafka's: {client}, 10 records, 3 partitions",
        1.0,
        "times",
        True,
        lambda result, client=client: figure(  # type: ignore[misc]
            result, "commits_per_s", broker=RATIO, client=client, records=10, partitions=3
        ),
    )
    for client in CLIENTS
)
