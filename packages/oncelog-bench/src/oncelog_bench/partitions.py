"""Many partitions on one broker: creation, start, memory, file descriptors, metadata."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.testing.broker_process import BrokerProcess
from oncelog.wire.messages import MetadataRequest
from oncelog_bench.curves import Chart, draw_curves
from oncelog_bench.framework import Metric, OnSample, Result, compare, result_of
from oncelog_bench.page import markdown_table, number
from oncelog_bench.process import rss_mb
from oncelog_bench.raw_wire import connect, exchange

NAME = "partitions"
SUMMARY = "10 to 10,000 partitions on Oncelog: creation, start, memory, open files, metadata."
PER_TOPIC = 1_000
METADATA_VERSION, METADATA_ASKED = 12, 20
METRICS = (
    Metric("create_s", "create s"),
    Metric("start_s", "start s"),
    Metric("start_after_kill_s", "start after SIGKILL s"),
    Metric("rss_mb", "memory MB"),
    Metric("open_files", "open files"),
    Metric("metadata_ms", "metadata of all ms"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    counts: tuple[int, ...] = (10, 1_000, 10_000)
    repeats: int = 5

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.counts)


QUICK = Plan((10,), repeats=1)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    # Delete nothing between the samples: some file systems create files slowly after many were deleted.
    with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory:
        for repeat in range(plan.repeats):
            for count in plan.counts:
                figures = _take(count, Path(directory) / f"{repeat}-{count}")
                samples.append({"repeat": repeat, "partitions": count, "broker": "oncelog", **figures})
                on_sample(len(samples))
    rows = compare(samples, by=("partitions",), side="broker", base="", metrics=METRICS)
    return result_of(NAME, plan, samples, rows)


def _take(count: int, directory: Path) -> dict[str, float]:
    broker = BrokerProcess(directory / "data")
    topics = [
        NewTopic(f"bench-{first:05}", min(PER_TOPIC, count - first), 1)
        for first in range(0, count, PER_TOPIC)
    ]
    with broker:
        began = time.perf_counter()
        with Admin({"bootstrap.servers": broker.bootstrap_servers, "request.timeout.ms": 120_000}) as admin:
            admin.create_topics(topics)
        create_s = time.perf_counter() - began
    try:
        start_s = broker.start()
        figures = {"rss_mb": rss_mb(broker.pid), "open_files": _open_files(broker.pid)}
        metadata_ms = _metadata_ms(broker)
        broker.kill()
        killed_s = broker.start()
    finally:
        broker.kill()
    return {
        "create_s": create_s,
        "start_s": start_s,
        "start_after_kill_s": killed_s,
        **figures,
        "metadata_ms": metadata_ms,
    }


def _open_files(pid: int) -> float:
    directory = Path(f"/proc/{pid}/fd")
    return float(len(os.listdir(directory))) if directory.exists() else float("nan")


def _metadata_ms(broker: BrokerProcess) -> float:
    with closing(connect(broker.bootstrap_servers)) as connected:
        exchange(connected, MetadataRequest(topics=None), METADATA_VERSION)
        began = time.perf_counter()
        for _ in range(METADATA_ASKED):
            exchange(connected, MetadataRequest(topics=None), METADATA_VERSION)
        return (time.perf_counter() - began) / METADATA_ASKED * 1000


def section(result: Result) -> str:
    """Return, as Markdown, the section on costs by the number of partitions."""
    plan, most = result["plan"], result["medians"][-1]
    return f"""\
## Partitions

Empty partitions in topics of at most {PER_TOPIC:,} on our broker. The figures are the time to create them,
the start after a clean stop and after SIGKILL (until the broker listens), the process's memory and open files
after that, and a Metadata response for all of them, decoded by the client. Medians of {plan["repeats"]} runs.

{markdown_table(result["medians"], by={"partitions": "partitions"}, side="broker", metrics=METRICS)}

**What this shows.** With {most["partitions"]:,} partitions the broker starts in
{number(most["start_s"])} s and holds {number(most["rss_mb"])} MB and {number(most["open_files"])} open files.
"""


def picture(result: Result) -> str:
    """Return an SVG of start time and memory by the number of partitions."""
    rows = result["medians"]
    return draw_curves(
        "Partitions on one broker",
        [
            Chart(heading, "partitions", heading, {"oncelog": [(r["partitions"], r[name]) for r in rows]})
            for name, heading in (("create_s", "create s"), ("start_s", "start s"), ("rss_mb", "memory MB"))
        ],
    )
