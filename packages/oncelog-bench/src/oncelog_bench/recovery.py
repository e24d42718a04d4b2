"""Oncelog's recovery time after SIGKILL, by log size and by the size of the tail after the checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.errors import OncelogError
from oncelog.testing.broker_process import BrokerProcess
from oncelog.types import TopicPartition
from oncelog_bench.brokers import raw_produce
from oncelog_bench.curves import Chart, draw_curves, lines_of
from oncelog_bench.framework import Metric, OnSample, Result, Target, compare, figure, result_of
from oncelog_bench.page import markdown_table, number
from oncelog_bench.raw_produce import OPENING_BATCHES, ProduceSpec

NAME = "recovery"
SUMMARY = "Oncelog's start after SIGKILL, by the size of the unchecked tail, of the batches and of the log."
TOPIC = "bench"
RECORD_BYTES = 1_024
BY = {"log_mb": "log MB", "tail_mb": "tail MB"}
METRICS = (
    Metric("listening_s", "until it listens s"),
    Metric("s_per_gb_of_tail", "s per GB of tail"),
)


class Case(NamedTuple):
    """A log of `log_mb` megabytes. The last `tail_mb` of them were written after the last checkpoint.

    `batches` is the size of the batches: "1 KB", "16 KB" or "512 KB".
    """

    log_mb: int
    tail_mb: int
    batches: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    Tails of growing sizes are measured with batches of three sizes, and logs of growing sizes with the
    smallest tail.
    """

    tails_mb: tuple[int, ...] = (100, 300)
    logs_mb: tuple[int, ...] = (400, 1_200)
    batches: tuple[str, ...] = ("1 KB", "16 KB", "512 KB")
    repeats: int = 5

    def cases(self) -> Iterator[Case]:
        for batches in self.batches:
            for tail_mb in self.tails_mb:
                yield Case(tail_mb, tail_mb, batches)
        for log_mb in self.logs_mb:
            yield Case(log_mb + self.tails_mb[0], self.tails_mb[0], self.batches[-1])

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cases()))


QUICK = Plan((2,), (3,), ("16 KB", "512 KB"), repeats=1)

TARGETS = (
    Target(
        "recovery per GB of tail, batches of 16 KB", 1.0, "s", False,
        lambda result: figure(result, "s_per_gb_of_tail", batches="16 KB", tail_mb=_longest(result)),
    ),
    Target(
        "recovery per GB of tail, batches of 512 KB", 1.0, "s", False,
        lambda result: figure(result, "s_per_gb_of_tail", batches="512 KB", tail_mb=_longest(result)),
    ),
    Target(
        "recovery per GB of tail, batches of 1 KB", 1.0, "s", False,
        lambda result: figure(result, "s_per_gb_of_tail", batches="1 KB", tail_mb=_longest(result)),
    ),
)  # fmt: skip


def _longest(result: Result) -> int:
    return int(max(result["plan"]["tails_mb"]))


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    for repeat in range(plan.repeats):
        for case in plan.cases():
            with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory:
                samples.append({"repeat": repeat, **case._asdict(), **_take(case, Path(directory))})
            on_sample(len(samples))
    rows = compare(samples, by=("log_mb", "tail_mb"), side="batches", base="", metrics=METRICS)
    return result_of(NAME, plan, samples, rows)


def _take(case: Case, directory: Path) -> dict[str, float]:
    broker = BrokerProcess(directory / "data")
    try:
        empty_s = broker.start()
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            admin.create_topics([NewTopic(TOPIC, 1, 1)])
        sent = 0
        if case.log_mb > case.tail_mb:
            sent = _send(broker, case.log_mb - case.tail_mb, case.batches)
            # A clean stop writes the checkpoint.
            broker.stop()
            broker.start()
        sent += _send(broker, case.tail_mb, case.batches)
        broker.kill()
        seconds = broker.start()
        _check(broker, sent)
    finally:
        broker.kill()
    return {
        "listening_s": seconds,
        "s_per_gb_of_tail": max(seconds - empty_s, 0.0) / (case.tail_mb / 1_000),
    }


def _send(broker: BrokerProcess, megabytes: int, batches: str) -> int:
    """Send `megabytes` of records of 1 KB, in batches of size `batches`. Return the number of records."""
    batch_records = {"1 KB": 1, "16 KB": 15, "512 KB": 500}[batches]
    requests = megabytes * 1_000_000 // (RECORD_BYTES * batch_records)
    spec = ProduceSpec(
        broker.bootstrap_servers,
        broker.pid,
        TOPIC,
        record_bytes=RECORD_BYTES,
        batch_records=batch_records,
        requests=requests,
    )
    report = raw_produce(spec)
    return report.records + OPENING_BATCHES * batch_records


def _check(broker: BrokerProcess, sent: int) -> None:
    at = TopicPartition(TOPIC, 0)
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        stored = admin.list_offsets({at: "latest"})[at].offset
    if stored != sent:
        raise OncelogError(f"{sent} records were acknowledged, but {stored} are stored after SIGKILL")


def section(result: Result) -> str:
    """Return, as Markdown, the section on recovery by the size of the tail and of the log."""
    plan = result["plan"]
    slope = [row["s_per_gb_of_tail"] for row in result["medians"] if row["tail_mb"] == _longest(result)]
    return f"""\
## Recovery

Our broker is killed with SIGKILL and restarted. The figure is the time until it listens, by the amount
written since the last checkpoint (the tail, which is read and checked again) and by the size of the log.
Idempotent records of 1 KB; the file is in the page cache. Seconds per GB exclude an empty broker's start.
Medians of {plan["repeats"]} kills each; after every kill all acknowledged records were present.

{markdown_table(result["medians"], by=BY, side="batches", metrics=METRICS)}

**What this shows.** The longest tails take {number(min(slope))} to {number(max(slope))} s per GB, by the size
of their batches.
"""


def picture(result: Result) -> str:
    """Return an SVG of the recovery time by the size of the tail and of the log."""
    tail = result["plan"]["tails_mb"][0]
    by_tail: dict[str, list[tuple[float, float]]] = {}
    for row in result["medians"]:
        if row["log_mb"] == row["tail_mb"]:
            by_tail.setdefault(row["batches"], []).append((row["tail_mb"], row["listening_s"]))
    by_log = lines_of(result, "log_mb", "listening_s", side="batches", tail_mb=tail)
    return draw_curves(
        "Recovery after SIGKILL",
        [
            Chart("seconds by tail", "tail MB", "until it listens s", by_tail),
            Chart(f"seconds by log, tail {tail} MB", "log MB", "until it listens s", by_log),
        ],
    )
