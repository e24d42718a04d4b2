"""Throughput by the number of batches in flight, and the broker's memory by the number it remembers.

Kafka's brokers remember five batches of each producer on each partition, and idempotent producers have at
most five in flight. The first table shows what another number in flight would gain, on loopback and over
links with a round trip. The second table shows what each remembered batch costs in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.testing.broker_process import BrokerProcess
from oncelog_bench.curves import Chart, draw_curves
from oncelog_bench.framework import Metric, OnSample, Result, compare, figure, interleaved, result_of
from oncelog_bench.generators import run_child
from oncelog_bench.page import markdown_table, number
from oncelog_bench.process import rss_mb
from oncelog_bench.producer_ids import TOPIC, append_once_each
from oncelog_bench.raw_produce import ProduceReport, ProduceSpec
from oncelog_bench.raw_wire import connect
from oncelog_bench.slow_link import SlowLink

NAME = "in_flight"
SUMMARY = "Why five: throughput by batches in flight, and memory by remembered batches."
LIMIT = 5
"""Kafka's limit for batches in flight, and for the batches that a broker remembers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. `ids` producer ids send `remembered` batches each to one partition.

    A round trip of 0 ms means that the generator is connected to the broker directly. A sample ends after
    `seconds`, or after `requests` if that is not 0.
    """

    in_flight: tuple[int, ...] = (1, 2, 3, 4, 5, 10)
    round_trips_ms: tuple[int, ...] = (0, 1, 10)
    seconds: float = 1.0
    requests: int = 0
    record_bytes: int = 1_024
    batch_records: int = 15
    ids: int = 100_000
    remembered: int = LIMIT
    repeats: int = 5

    @property
    def samples_count(self) -> int:
        return self.repeats * (len(self.in_flight) * len(self.round_trips_ms) + self.remembered)


QUICK = Plan((1, 5), (0, 1), seconds=0.0, requests=50, ids=200, remembered=2, repeats=1)

SPEED = (
    Metric("batches_per_s", "batches/s", True),
    Metric("mb_per_s", "MB/s", True),
    Metric("p50_ms", "p50 ms"),
    Metric("broker_cpu_us", "broker CPU us/batch"),
)
MEMORY = (
    Metric("bytes_per_id", "bytes/id"),
    Metric("cpu_us_per_append", "broker CPU us/append"),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    speeds: list[dict[str, Any]] = []
    memories: list[dict[str, Any]] = []

    def keep(samples: list[dict[str, Any]], sample: dict[str, Any]) -> None:
        samples.append(sample)
        on_sample(len(speeds) + len(memories))

    sides = [link_name(round_trip) for round_trip in plan.round_trips_ms]
    cases = interleaved(plan.in_flight, sides, plan.repeats)
    for repeat, group in groupby(cases, key=itemgetter(0)):
        with _broker() as broker:
            for _, depth, side in group:
                round_trip_ms = plan.round_trips_ms[sides.index(side)]
                head = {"repeat": repeat, "in_flight": depth, "round_trip": side}
                keep(speeds, {**head, **_speed(plan, broker, depth, round_trip_ms)})
    for repeat in range(plan.repeats):
        for figures in _memory(plan):
            keep(memories, {"repeat": repeat, "broker": "oncelog", **figures})
    rows = compare(speeds, by=("in_flight",), side="round_trip", base="", metrics=SPEED)
    rows += compare(memories, by=("remembered",), side="broker", base="", metrics=MEMORY)
    return result_of(NAME, plan, [*speeds, *memories], rows)


def link_name(round_trip_ms: int) -> str:
    """Return the name of a link with this round trip, as results and tables use it."""
    return f"{round_trip_ms} ms" if round_trip_ms else "loopback"


def _speed(plan: Plan, broker: BrokerProcess, depth: int, round_trip_ms: int) -> dict[str, float | None]:
    servers = broker.bootstrap_servers
    with _topic(servers), _link(servers, round_trip_ms) as address:
        spec = ProduceSpec(
            address,
            broker.pid,
            TOPIC,
            depth=depth,
            record_bytes=plan.record_bytes,
            batch_records=plan.batch_records,
            seconds=plan.seconds,
            requests=plan.requests,
        )
        report = ProduceReport(**run_child("oncelog_bench.raw_produce", asdict(spec)))
    return {
        "batches_per_s": report.batches / report.seconds,
        "mb_per_s": report.records * plan.record_bytes / 1e6 / report.seconds,
        "p50_ms": report.quantiles.get("p50_ms"),
        "broker_cpu_us": report.broker_cpu_seconds / report.batches * 1e6,
    }


def _memory(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield a sample (memory per id, time per append) each time that every id has sent one more batch."""
    with (
        _broker() as broker,
        _topic(broker.bootstrap_servers),
        closing(connect(broker.bootstrap_servers)) as connected,
    ):
        before_mb = rss_mb(broker.pid)
        for sequence in range(plan.remembered):
            cpu_us = append_once_each(broker.pid, connected, plan.ids, sequence=sequence)
            used_mb = rss_mb(broker.pid) - before_mb
            yield {
                "remembered": sequence + 1,
                "bytes_per_id": used_mb * 1e6 / plan.ids,
                "cpu_us_per_append": cpu_us,
            }


@contextmanager
def _link(address: str, round_trip_ms: int) -> Iterator[str]:
    """Yield the address to connect to: a slow link's, or the broker's own if `round_trip_ms` is 0."""
    if not round_trip_ms:
        yield address
        return
    with SlowLink(address, round_trip_ms) as link:
        yield link.address


@contextmanager
def _broker() -> Iterator[BrokerProcess]:
    """Start a broker on a new directory."""
    with (
        tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory,
        BrokerProcess(Path(directory) / "data") as broker,
    ):
        yield broker


@contextmanager
def _topic(servers: str) -> Iterator[None]:
    """Create the topic for the `with` block, and delete it afterwards."""
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic(TOPIC, 1, 1)])
        yield
        admin.delete_topics([TOPIC])


def section(result: Result) -> str:
    """Return, as Markdown, the section on the limit of five batches in flight."""
    plan = result["plan"]
    speeds = [row for row in result["medians"] if "in_flight" in row]
    memories = [row for row in result["medians"] if "remembered" in row]
    return f"""\
## Why five

The raw generator sends batches of {plan["batch_records"]} records of {plan["record_bytes"]:,} bytes from one
idempotent producer to one partition of our broker, for {plan["seconds"]:g} s on one connection. A link with a
round trip is made by threads of the measuring process between the two. Then {plan["ids"]:,} producer ids send
one record each, up to {plan["remembered"]} times, and the memory that the broker has added is divided by the
ids. Medians of {plan["repeats"]} samples.

{markdown_table(speeds, by={"in_flight": "in flight"}, side="round_trip", metrics=SPEED)}

{markdown_table(memories, by={"remembered": "remembered batches"}, side="broker", metrics=MEMORY)}

**What this shows.** {" ".join(sentences(result))}
"""


def sentences(result: Result) -> list[str]:
    """Return the conclusions from the figures, as sentences."""
    plan = result["plan"]
    found = []
    for round_trip in map(link_name, plan["round_trips_ms"]):
        one, five, most = (
            figure(result, "mb_per_s", in_flight=depth, round_trip=round_trip)
            for depth in (1, LIMIT, max(plan["in_flight"]))
        )
        if one and five and most:
            link = "On loopback" if round_trip == "loopback" else f"With a round trip of {round_trip}"
            found.append(
                f"{link}, five in flight carry {number(five / one)} times what one carries, and "
                f"{max(plan['in_flight'])} carry {number(most / five)} times what five carry."
            )
    first, last = (figure(result, "bytes_per_id", remembered=count) for count in (1, plan["remembered"]))
    if first and last and plan["remembered"] > 1:
        each = (last - first) / (plan["remembered"] - 1)
        found.append(
            f"An id takes {number(first)} bytes with one remembered batch, and each further one adds about "
            f"{number(each)} bytes."
        )
    return found


def picture(result: Result) -> str:
    """Return an SVG of the throughput by batches in flight, and the memory by remembered batches."""
    charts = [
        Chart(f"round trip: {link_name(round_trip)}", "in flight", "MB/s", {"oncelog": [
            (row["in_flight"], row["mb_per_s"])
            for row in result["medians"]
            if row.get("round_trip") == link_name(round_trip)
        ]})
        for round_trip in result["plan"]["round_trips_ms"]
    ]  # fmt: skip
    memory = [(row["remembered"], row["bytes_per_id"]) for row in result["medians"] if "remembered" in row]
    charts.append(Chart("memory", "remembered batches", "bytes per id", {"oncelog": memory}))
    return draw_curves("Why five", charts)
