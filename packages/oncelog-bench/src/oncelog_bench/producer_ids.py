"""Many producer ids on one partition: memory, cost of an append, and the longest pause when a segment is
rolled.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.errors import OncelogError
from oncelog.testing.broker_process import BrokerProcess
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.header import assign_producer
from oncelog.wire.messages import ApiVersionsRequest, ProduceRequest, ProduceResponse
from oncelog.wire.records import NewRecord
from oncelog_bench.curves import Chart, draw_curves
from oncelog_bench.framework import Metric, OnSample, Result, Target, compare, figure, result_of
from oncelog_bench.page import markdown_table, number
from oncelog_bench.process import cpu_seconds, rss_mb
from oncelog_bench.raw_wire import CLIENT_ID, connect, exchange, receive_frame

NAME = "producer_ids"
SUMMARY = "Producer ids on one partition of Oncelog: memory, cost of an append, longest pause at rolls."
TOPIC = "bench"
FIRST_ID = 1_000_000
VERSION, PIPELINED = 9, 500
SEGMENT_BYTES = 16 << 20
METRICS = (
    Metric("table_mb", "MB more than before"),
    Metric("cpu_us_per_append", "broker CPU us/append of a new id"),
    Metric("cpu_us_per_known", "broker CPU us/append of a known id"),
    Metric("longest_pause_ms", "longest pause ms"),
    Metric("rolls", "segments rolled"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size.

    For `roll_seconds`, large batches fill segments of 16 MB, and the pause at each new segment is measured.
    """

    ids: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    roll_seconds: float = 2.0
    repeats: int = 5

    @property
    def samples_count(self) -> int:
        return self.repeats * len(self.ids)


QUICK = Plan((1_000,), roll_seconds=0.3, repeats=1)

TARGETS = (
    Target(
        "memory for 10^6 producer ids", 250.0, "MB", False, lambda r: figure(r, "table_mb", ids=1_000_000)
    ),
    Target(
        "longest pause with 10^6 producer ids",
        50.0,
        "ms",
        False,
        lambda r: figure(r, "longest_pause_ms", ids=1_000_000),
    ),
)


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    for repeat in range(plan.repeats):
        for ids in plan.ids:
            with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory:
                figures = _take(plan, ids, Path(directory))
                samples.append({"repeat": repeat, "ids": ids, "broker": "oncelog", **figures})
            on_sample(len(samples))
    rows = compare(samples, by=("ids",), side="broker", base="", metrics=METRICS)
    return result_of(NAME, plan, samples, rows)


def _take(plan: Plan, ids: int, directory: Path) -> dict[str, float]:
    with BrokerProcess(directory / "data") as broker:
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            admin.create_topics([NewTopic(TOPIC, 1, 1, {"segment.bytes": SEGMENT_BYTES})])
        before_mb = rss_mb(broker.pid)
        with closing(connect(broker.bootstrap_servers)) as connected:
            new_us = append_once_each(broker.pid, connected, ids, sequence=0)
            table_mb = rss_mb(broker.pid) - before_mb
            known_us = append_once_each(broker.pid, connected, min(ids, 100_000), sequence=1)
        pause_ms, rolls = _watch(broker, plan.roll_seconds)
    return {
        "table_mb": table_mb,
        "cpu_us_per_append": new_us,
        "cpu_us_per_known": known_us,
        "longest_pause_ms": pause_ms,
        "rolls": rolls,
    }


def append_once_each(
    pid: int, connected: socket.socket, ids: int, *, sequence: int, first_id: int = FIRST_ID
) -> float:
    """Append a record per producer id, in pipelined requests. Return the broker's processor µs per record.

    `pid` is the broker's process id.
    """
    used = cpu_seconds(pid)
    for first in range(first_id, first_id + ids, PIPELINED):
        count = min(PIPELINED, first_id + ids - first)
        connected.sendall(b"".join(_frames(range(first, first + count), sequence)))
        for _ in range(count):
            _check(receive_frame(connected))
    return (cpu_seconds(pid) - used) / ids * 1e6


def _frames(producer_ids: range, sequence: int) -> Iterator[bytes]:
    batch = build_batch(
        [NewRecord(time.time_ns() // 1_000_000, None, b"x")],
        producer_id=0, producer_epoch=0, base_sequence=sequence,
    )  # fmt: skip
    for producer_id in producer_ids:
        assign_producer(batch, producer_id, 0, sequence)
        yield _frame(batch)


def _frame(batch: bytearray) -> bytes:
    part = ProduceRequest.PartitionProduceData(index=0, records=batch)
    data = ProduceRequest.TopicProduceData(name=TOPIC, partition_data=[part])
    return encode_request(
        ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=[data]), VERSION, 0, CLIENT_ID
    )


def _check(frame: bytearray) -> None:
    _, response = decode_response(ProduceResponse, VERSION, frame)
    (part,) = response.responses[0].partition_responses
    if part.error_code:
        raise OncelogError(f"the broker rejected a batch with error {part.error_code}: {part.error_message}")


def _watch(broker: BrokerProcess, seconds: float) -> tuple[float, float]:
    """Roll segments with batches of 900 KB. Return a small request's longest wait in ms, and the roll count.

    The small requests are ApiVersions on a second connection. They write nothing, so a long wait is a pause
    of the broker and not of the disk.
    """
    batch = build_batch([NewRecord(time.time_ns() // 1_000_000, None, bytes(900_000))])
    large, longest_s, sent_bytes = _frame(batch), 0.0, 0
    with (
        closing(connect(broker.bootstrap_servers)) as loader,
        closing(connect(broker.bootstrap_servers)) as probe,
    ):
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            loader.sendall(large)
            sent_bytes += len(batch)
            _check(receive_frame(loader))
            for _ in range(20):
                began = time.perf_counter()
                exchange(probe, ApiVersionsRequest(), 0)
                longest_s = max(longest_s, time.perf_counter() - began)
            time.sleep(max(0.0, 0.01 - (time.perf_counter() - now)))
    return longest_s * 1000, float(sent_bytes // SEGMENT_BYTES)


def section(result: Result) -> str:
    """Return, as Markdown, the section on memory, cost and pauses by the number of ids."""
    plan, most = result["plan"], result["medians"][-1]
    return f"""\
## Producer ids

One record each of many producer ids goes to one partition of our broker, then a second one of known ids. Then
batches of 900 KB roll segments of 16 MB for {plan["roll_seconds"]:g} s; each roll writes a snapshot of every
id. Meanwhile a second connection sends small requests and measures its longest wait. Medians of
{plan["repeats"]} runs.

{markdown_table(result["medians"], by={"ids": "producer ids"}, side="broker", metrics=METRICS)}

**What this shows.** {most["ids"]:,} ids take {number(most["table_mb"])} MB, and the longest wait
while {number(most["rolls"])} segments rolled was {number(most["longest_pause_ms"])} ms.
"""


def picture(result: Result) -> str:
    """Return an SVG of memory and the longest pause by the number of producer ids."""
    rows = result["medians"]
    return draw_curves(
        "Producer ids on one partition",
        [
            Chart(heading, "producer ids", heading, {"oncelog": [(row["ids"], row[name]) for row in rows]})
            for name, heading in (("table_mb", "MB"), ("longest_pause_ms", "longest pause ms"))
        ],
    )
