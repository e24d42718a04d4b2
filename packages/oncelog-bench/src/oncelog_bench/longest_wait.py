"""The longest time that a client waits while a broker handles another client's worst request, for each API.

Every request of the catalogue (`oncelog_devtools.worst_requests`) is sent alone, on a separate connection. At
the same time a second client sends ApiVersions, one request after the other. The measured figure is the
second client's longest wait. A broker with one thread must keep the wait short, whatever the worst request
contains.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from oncelog_devtools.svg_charts import BLUE, WARN, bar_chart
from oncelog_devtools.worst_requests import WorstRequest, worst_requests

from oncelog.broker.state import OFFERED
from oncelog.errors import PeerError
from oncelog.wire.messages import ApiVersionsRequest
from oncelog_bench.brokers import Side, running
from oncelog_bench.framework import (
    KAFKA,
    OURS,
    Metric,
    OnSample,
    Result,
    Target,
    compare,
    interleaved,
    result_of,
)
from oncelog_bench.page import markdown_table, number
from oncelog_bench.raw_wire import connect, exchange, receive_frame

NAME = "longest_wait"
SUMMARY = "The longest wait of a client beside another one's worst request, for each API."
BY = {"api": "API"}
METRICS = (Metric("longest_wait_ms", "longest wait ms"),)
LIMIT_MS = 250.0
_SHOWN_BARS = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    `size_bytes` is the maximum size of a request, and `seconds` the time limit for its response.

    Apache Kafka is not among the brokers. When both were measured, a client waited for more than 60 s, which
    ended the measurement. With Oncelog alone, the longest wait was 0.17 s.
    """

    brokers: tuple[str, ...] = (OURS,)
    repeats: int = 5
    size_bytes: int = 1_000_000
    seconds: float = 10.0
    apis: int = len(OFFERED)
    warm_up_seconds: float = 5.0

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.brokers) * self.apis


QUICK = Plan((OURS,), repeats=1, size_bytes=2_000, seconds=0.2, apis=3, warm_up_seconds=0.1)


def _longest(broker: str) -> Any:
    def longest(result: Result) -> float | None:
        waits = [row["longest_wait_ms"] for row in result["medians"] if row["broker"] == broker]
        return max(waits, default=None)

    return longest


TARGETS = (
    Target(
        "the longest wait beside any request of 1 MB",
        LIMIT_MS,
        "ms",
        is_minimum=False,
        measured=_longest(OURS),
    ),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    with running(plan.brokers, warm_up_seconds=plan.warm_up_seconds) as sides:
        by_api = _requests_by_api(plan)
        for repeat, api, name in interleaved(by_api, sides.names, plan.repeats):
            wait_ms, request = _longest_wait(sides[name], by_api[api], plan.seconds)
            samples.append(
                {"repeat": repeat, "broker": name, "api": api, "longest_wait_ms": wait_ms, "request": request}
            )
            on_sample(len(samples))
    rows = compare(samples, by=list(BY), side="broker", base=KAFKA, metrics=METRICS)
    return result_of(NAME, plan, samples, rows, left_out=sides.left_out)


def _requests_by_api(plan: Plan) -> dict[str, list[WorstRequest]]:
    offered = (worst for worst in worst_requests(plan.size_bytes, "t", "g") if worst.api.key in OFFERED)
    ordered = sorted(offered, key=lambda worst: worst.api.key)
    grouped = {key: list(group) for key, group in groupby(ordered, key=lambda worst: worst.api.name)}
    return dict(list(grouped.items())[: plan.apis])


def _longest_wait(side: Side, requests: list[WorstRequest], seconds: float) -> tuple[float, str]:
    """Return the longest wait in milliseconds, and the name of the request that caused it."""
    return max((_wait_beside(side, worst, seconds), worst.name) for worst in requests)


def _wait_beside(side: Side, worst: WorstRequest, seconds: float) -> float:
    with contextlib.closing(connect(side.bootstrap_servers)) as other:
        exchange(other, ApiVersionsRequest(), 0)
        attacker = threading.Thread(target=_attack, args=(side, worst, seconds), daemon=True)
        attacker.start()
        return max(_waits(other, attacker)) * 1000


def _waits(other: Any, attacker: threading.Thread) -> Iterator[float]:
    """Send ApiVersions requests until the attack has ended, and yield the seconds until each response."""
    is_last = False
    while not is_last:
        is_last = not attacker.is_alive()
        began = time.perf_counter()
        exchange(other, ApiVersionsRequest(), 0)
        yield time.perf_counter() - began
        time.sleep(0.001)


def _attack(side: Side, worst: WorstRequest, seconds: float) -> None:
    """Send the worst request. Wait for its response, the end of the connection, or the time limit."""
    frame = worst.frame()
    with contextlib.suppress(OSError, PeerError), contextlib.closing(connect(side.bootstrap_servers)) as own:
        own.settimeout(seconds)
        own.sendall(struct.pack(">i", len(frame)) + frame)
        receive_frame(own)


def section(result: Result) -> str:
    """Return, as Markdown, the section on the longest wait for each API."""
    plan = result["plan"]
    return f"""\
## Beside the worst request of each API

For each API the costliest requests of up to {plan["size_bytes"]:,} bytes: as many elements as fit in each
array, all equal and all different, the longest strings, and others written by hand (patterns, look-ups, one
resource named many times). Each is sent alone. Meanwhile a second client keeps sending ApiVersions, and its
longest wait is the figure. Medians of {plan["repeats"]} samples.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** {_sentence(result)}
"""


def _sentence(result: Result) -> str:
    sentences = []
    for broker in dict.fromkeys(sample["broker"] for sample in result["samples"]):
        own = [sample for sample in result["samples"] if sample["broker"] == broker]
        worst = max(own, key=lambda sample: sample["longest_wait_ms"])
        sentences.append(
            f"The longest wait of a client of {broker} was {number(worst['longest_wait_ms'])} ms,"
            f" beside {worst['request']}."
        )
    return " ".join(sentences)


def picture(result: Result) -> str:
    """Return an SVG with the longest wait of each API as a bar."""
    plain = [row for row in result["medians"] if " / " not in row["broker"]]
    longest = sorted(plain, key=lambda row: -row["longest_wait_ms"])[:_SHOWN_BARS]
    bars = [
        (
            f"{row['api']}, {row['broker']}",
            row["longest_wait_ms"],
            f"{number(row['longest_wait_ms'])} ms",
            BLUE if row["broker"] == OURS else WARN,
        )
        for row in longest
    ]
    return bar_chart("longest wait beside", bars)
