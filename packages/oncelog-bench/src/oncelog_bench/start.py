"""Time from the start of a broker's process to its first acknowledgement, and the idle broker's memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oncelog_devtools import kfake
from oncelog_devtools.apache_kafka import ApacheKafka, MissingDependency
from oncelog_devtools.svg_charts import BLUE, WARN, bar_chart

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.testing.broker_process import BrokerProcess
from oncelog_bench.brokers import BROKERS
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
from oncelog_bench.page import markdown_table, range_of_ratios
from oncelog_bench.process import cpu_seconds, rss_mb, settle
from oncelog_bench.raw_produce import ProduceSpec, Sender

NAME = "start"
SUMMARY = (
    "The time from process start to the first acknowledgement, and idle memory; Oncelog, Apache Kafka and "
    "franz-go's fake kfake."
)
KFAKE = "kfake"
RATIO = f"{OURS} / {KAFKA}"
TOPIC = "bench"
RETRY_S = 0.005
METRICS = (
    Metric("first_acknowledgement_s", "first acknowledgement s"),
    Metric("cpu_s", "broker CPU s until then"),
    Metric("idle_rss_mb", "idle memory MB"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    brokers: tuple[str, ...] = (*BROKERS, KFAKE)
    repeats: int = 5
    rest_seconds: float = 1.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers)


QUICK = Plan((OURS,), repeats=1, rest_seconds=0.1)


class _Startable(NamedTuple):
    """A stopped broker whose directory contains the topic, or kfake, which creates the topic at its start.

    `launch` starts the broker's process, and may return before the broker accepts requests.
    """

    launch: Callable[[], object]
    pid: Callable[[], int]
    end: Callable[[], None]
    bootstrap_servers: str


TARGETS = (
    Target(
        "process start to the first acknowledgement", 0.5, "s", False,
        lambda result: figure(result, "first_acknowledgement_s", broker=OURS),
    ),
    Target(
        "idle memory", 80.0, "MB", False, lambda result: figure(result, "idle_rss_mb", broker=OURS)
    ),
)  # fmt: skip


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory:
        brokers = {}
        for name in plan.brokers:
            try:
                brokers[name] = _prepare(name, Path(directory) / name)
            except MissingDependency as error:
                left_out[name] = str(error)
        for repeat, _, name in interleaved([TOPIC], list(brokers), plan.repeats):
            samples.append({"repeat": repeat, "broker": name, **_take(brokers[name], plan.rest_seconds)})
            on_sample(len(samples))
    rows = compare(samples, by=[], side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=left_out)


def _prepare(name: str, directory: Path) -> _Startable:
    """Let a broker create a directory with one topic, and stop the broker."""
    if name == KFAKE:
        fake = kfake.Kfake(TOPIC)
        return _Startable(fake.launch, lambda: fake.pid, fake.stop, fake.bootstrap_servers)
    directory.mkdir()
    if name == OURS:
        broker = BrokerProcess(directory / "data")
        with _stopped_after(broker.start, broker.stop):
            _create_topic(broker.bootstrap_servers)
        return _Startable(broker.start, lambda: broker.pid, broker.stop, broker.bootstrap_servers)
    kafka = ApacheKafka(directory)
    (node,) = kafka.nodes
    with _stopped_after(kafka.start, node.stop):
        _create_topic(kafka.bootstrap_servers)
    return _Startable(node.launch, lambda: node.pid, node.stop, kafka.bootstrap_servers)


@contextmanager
def _stopped_after(start: Callable[[], object], stop: Callable[[], None]) -> Iterator[None]:
    start()
    try:
        yield
    finally:
        stop()


def _create_topic(bootstrap_servers: str) -> None:
    with Admin({"bootstrap.servers": bootstrap_servers}) as admin:
        admin.create_topics([NewTopic(TOPIC, 1, 1)])


def _take(broker: _Startable, rest_seconds: float) -> dict[str, float]:
    began = time.perf_counter()
    with _stopped_after(broker.launch, broker.end):
        pid = broker.pid()
        _first_acknowledgement(ProduceSpec(broker.bootstrap_servers, pid, TOPIC, idempotence=False))
        seconds, used = time.perf_counter() - began, cpu_seconds(pid)
        time.sleep(rest_seconds)
        settle(pid)
        return {"first_acknowledgement_s": seconds, "cpu_s": used, "idle_rss_mb": rss_mb(pid)}


def _first_acknowledgement(spec: ProduceSpec) -> None:
    """Connect and send a batch; retry until one is acknowledged. Re-raise ConnectionError after 60 s."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            with closing(Sender(spec, 0)) as sender:
                sender.send_first()
                return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def section(result: Result) -> str:
    """Return, as Markdown, the section on start and idle memory."""
    plan = result["plan"]
    return f"""\
## Start and rest

On a directory with one topic: the time from starting the broker's process to the first
acknowledged record of a client that keeps trying, and resident memory {plan["rest_seconds"]:g} s later.
Apache Kafka runs with its defaults and a heap of 512 MB. kfake is franz-go's fake of a cluster
for tests of clients: a Go program that stores nothing ([its conformance](conformance.md#results)).
Medians of {plan["repeats"]} interleaved starts.

{markdown_table(result["medians"], by={}, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "first_acknowledgement_s", "time to that record")}
{range_of_ratios(result, RATIO, "idle_rss_mb", "idle memory")}
"""


def picture(result: Result) -> str:
    """Return an SVG with a bar per broker."""
    bars = [
        (
            row["broker"],
            row["first_acknowledgement_s"],
            f"{row['first_acknowledgement_s']:.2f} s, {row['idle_rss_mb']:.0f} MB idle",
            BLUE if row["broker"] == OURS else WARN,
        )
        for row in result["medians"]
        if " / " not in row["broker"]
    ]
    return bar_chart("From process start to the first acknowledgement", bars)
