"""Latency of a synchronous send on a quiet disk, and while the page cache is written back.

`python -m oncelog_bench.latency FILE` dirties pages and forces their write-back until it is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncelog_devtools.svg_charts import BLUE, WARN, bar_chart

from oncelog_bench.brokers import BROKERS, Side, raw_produce, running
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
from oncelog_bench.page import markdown_table, number, range_of_ratios

NAME = "latency"
SUMMARY = "Latency of a synchronous send to our broker and to Apache Kafka, idle and during write-back."
RATIO = f"{OURS} / {KAFKA}"
QUIET, WRITE_BACK = "quiet", "pages written back"
BY = {"disk": "disk"}
METRICS = (
    Metric("p50_ms", "p50 ms"),
    Metric("p99_ms", "p99 ms"),
    Metric("p999_ms", "p99.9 ms"),
    Metric("sends_per_s", "sends/s", True),
    Metric("cpu_us_per_send", "broker CPU µs per send"),
)
_DIRTY_BYTES = 64 * 2**20
_PIECE = bytes(2**20)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. A send is due every 1 / `rate_per_s` seconds.

    A send that is late starts right after the previous response.
    """

    brokers: tuple[str, ...] = BROKERS
    repeats: int = 5
    seconds: float = 5.0
    rate_per_s: float = 800.0
    record_bytes: int = 1_024
    warm_up_seconds: float = 10.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * 2


QUICK = Plan((OURS,), repeats=1, seconds=0.2, rate_per_s=500.0, warm_up_seconds=0.1)


def _ratio(disk: str) -> Any:
    return lambda result: figure(result, "p99_ms", broker=RATIO, disk=disk)


TARGETS = (
    Target("p99 of a synchronous send to Apache Kafka's", 1.0, "times", False, _ratio(QUIET)),
    Target("the same while pages are written back", 1.0, "times", False, _ratio(WRITE_BACK)),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        for repeat, disk, name in interleaved((QUIET, WRITE_BACK), sides.names, plan.repeats):
            taken = _take(plan, disk, sides[name])
            samples.append({"repeat": repeat, "broker": name, "disk": disk, **taken})
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


def _take(plan: Plan, disk: str, side: Side) -> dict[str, float]:
    with side.topic(1) as topic:
        spec = side.spec(
            topic, seconds=plan.seconds, rate_per_s=plan.rate_per_s, record_bytes=plan.record_bytes
        )
        if disk == QUIET:
            report = raw_produce(spec)
        else:
            with _writing_back(side.directory.parent / "dirty"):
                report = raw_produce(spec)
    return {
        **report.quantiles,
        "sends_per_s": report.requests / report.seconds,
        "cpu_us_per_send": report.broker_cpu_seconds / report.requests * 1e6,
    }


@contextmanager
def _writing_back(file: Path) -> Iterator[None]:
    """Run a process that dirties pages of the brokers' file system and writes back all dirty pages."""
    process = subprocess.Popen(
        [sys.executable, "-m", "oncelog_bench.latency", str(file)], stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()
        file.unlink(missing_ok=True)


def write_back_forever(file: str) -> None:
    """Write 64 MiB to the file, then sync all dirty pages of the system, in an endless loop."""
    with open(file, "wb", buffering=0) as dirty:
        while True:
            dirty.seek(0)
            for _ in range(_DIRTY_BYTES // len(_PIECE)):
                dirty.write(_PIECE)
            os.sync()


def section(result: Result) -> str:
    """Return, as Markdown, the section on latency on a quiet disk and during write-back."""
    plan = result["plan"]
    return f"""\
## Latency of a synchronous send

Each request has one record of {plan["record_bytes"]:,} bytes, idempotent, `acks=all`, one in flight,
{plan["rate_per_s"]:g} per second for {plan["seconds"]:g} s. The time runs from writing a request to its
response. "{WRITE_BACK}": another process writes {_DIRTY_BYTES // 2**20} MB to the same file system and syncs
all dirty pages to the disk, in a loop. Medians of {plan["repeats"]} interleaved samples.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {range_of_ratios(result, RATIO, "p99_ms", "p99")} {_write_back_sentence(result)}
"""


def _write_back_sentence(result: Result) -> str:
    sentences = []
    for broker in dict.fromkeys(row["broker"] for row in result["medians"] if " / " not in row["broker"]):
        quiet, busy = (figure(result, "p99_ms", broker=broker, disk=disk) for disk in (QUIET, WRITE_BACK))
        sentences.append(f"Write-back takes {broker}'s p99 from {number(quiet)} to {number(busy)} ms.")
    return " ".join(sentences)


def picture(result: Result) -> str:
    """Return an SVG with the 99th percentile as a bar per broker and state of the disk."""
    bars = [
        (
            f"{row['broker']}, {row['disk']}",
            row["p99_ms"],
            f"{number(row['p99_ms'])} ms",
            BLUE if row["broker"] == OURS else WARN,
        )
        for row in result["medians"]
        if " / " not in row["broker"]
    ]
    return bar_chart("p99 of a synchronous send", bars)


if __name__ == "__main__":
    write_back_forever(sys.argv[1])
