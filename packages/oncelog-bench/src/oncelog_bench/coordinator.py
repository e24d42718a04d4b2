"""Recovery time of the transaction coordinator, by the number of ids and of their past transactions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import OncelogError
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.runtime.clock import Clock
from oncelog.server.embedded import open_node
from oncelog.testing.broker_process import BrokerProcess
from oncelog.types import TopicPartition
from oncelog_bench.curves import Chart, draw_curves
from oncelog_bench.framework import Metric, OnSample, Result, Target, compare, figure, result_of
from oncelog_bench.page import markdown_table

NAME = "coordinator"
SUMMARY = "Oncelog's start after SIGKILL, by the number of transactional ids and of their past transactions."
TOPIC, AT = "bench", TopicPartition("bench", 0)
BY = {"ids": "ids", "transactions": "transactions"}
METRICS = (
    Metric("listening_s", "until it listens s"),
    Metric("log_mb", "MB of transaction log"),
    Metric("records_written", "records ever written to it"),
)
_CLEAN_EVERY = 20_000


class Case(NamedTuple):
    """A number of transactional ids, and the total number of their past transactions."""

    ids: int
    transactions: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement's size. `histories` are numbers of past transactions per transactional id."""

    ids: tuple[int, ...] = (1_000, 10_000, 100_000)
    histories: tuple[int, ...] = (1, 10)
    repeats: int = 5

    def cases(self) -> Iterator[Case]:
        for ids in self.ids:
            for history in self.histories:
                yield Case(ids, ids * history)

    @property
    def samples_count(self) -> int:
        return self.repeats * len(list(self.cases()))


QUICK = Plan((50,), (1, 3), repeats=1)

TARGETS = (
    Target(
        "start with 10^5 transactional ids after 10^6 transactions, to after 10^5", 1.5, "times", False,
        lambda result: _growth(result, 100_000),
    ),
)  # fmt: skip


def _growth(result: Result, ids: int) -> float | None:
    long, short = (figure(result, "listening_s", ids=ids, transactions=ids * history) for history in (10, 1))
    return None if long is None or short is None else long / short


def measure(plan: Plan, on_sample: OnSample) -> dict[str, Any]:
    """Take the samples of `plan`, and return the content of the result file (JSON)."""
    samples: list[dict[str, Any]] = []
    for case in plan.cases():
        with tempfile.TemporaryDirectory(prefix="oncelog-bench-") as directory:
            written = _live(case, Path(directory) / "data")
            broker = BrokerProcess(Path(directory) / "data")
            for repeat in range(plan.repeats):
                seconds = broker.start()
                broker.kill()
                figures = {
                    "listening_s": seconds,
                    "log_mb": _log_mb(broker.data_dir),
                    "records_written": float(written),
                }
                samples.append({"repeat": repeat, **case._asdict(), "broker": "oncelog", **figures})
                on_sample(len(samples))
    rows = compare(samples, by=tuple(BY), side="broker", base="", metrics=METRICS)
    return result_of(NAME, plan, samples, rows)


def _live(case: Case, data_dir: Path) -> int:
    """Run every id's transactions, one partition each, in a broker without sockets. Then crash the broker.

    Return the number of records ever written to the transaction log.
    """
    now_ms = time.time_ns() // 1_000_000
    node = open_node(data_dir, BROKER.parse({}), Clock())
    node.topics.create(TOPIC, 1, {}, now_ms)
    names = [f"id-{number}" for number in range(case.ids)]
    for name in names:
        node.transactions.init(name, None, 60_000, now_ms)
    for number in range(case.transactions):
        name = names[number % case.ids]
        entry = node.transactions.get(name)
        if entry is None:
            raise OncelogError(f"the coordinator has no transactional id {name}")
        producer = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        node.transactions.add_partitions(name, producer, [AT], now_ms)
        node.transactions.end(name, producer, True, 2, now_ms)
        if number % _CLEAN_EVERY == 0:
            _clean(node, now_ms)
    topic = node.topics.get(node.transactions.topic.name)
    if topic is None:
        raise OncelogError("nothing was written to the transaction log")
    written = sum(partition.log_end_offset for partition in topic.partitions)
    data = node.topics.get(TOPIC)
    if data is not None:
        # Delete the data topic: recovery would read its markers too, but this benchmark measures only the
        # transaction log's recovery.
        node.topics.delete([data])
    node.log_manager.write_checkpoints()
    node.log_manager.release()
    return written


def _clean(node: BrokerState, now_ms: int) -> None:
    """Compact the transaction log. A broker with an event loop does this every log.cleaner.backoff.ms."""
    node.transactions.topic.roll_for_compaction(now_ms)
    for partition in node.log_manager.partitions.values():
        if partition.is_flush_due:
            partition.flush()
    node.log_manager.compact(now_ms)


def _log_mb(data_dir: Path) -> float:
    return sum(file.stat().st_size for file in data_dir.glob("__transaction_state-*/*.log")) / 1e6


def section(result: Result) -> str:
    """Return, as Markdown, the section on recovery by the number of ids and of past transactions."""
    plan = result["plan"]
    return f"""\
## Coordinator

Our broker is killed with SIGKILL after each of its transactional ids has had one or ten transactions, and
restarted. The figures are the time until it listens, and the size of `__transaction_state`. Compaction limits
that size to the live entries; active segments are rolled early for it. Medians of {plan["repeats"]} starts.

{markdown_table(result["medians"], by=BY, side="broker", metrics=METRICS)}

**What this shows.** Start time depends on the live ids, not on their past transactions.
"""


def picture(result: Result) -> str:
    """Return an SVG of the recovery time by the number of transactional ids."""
    by_history: dict[str, list[tuple[float, float]]] = {}
    for row in result["medians"]:
        label = f"{row['transactions'] // row['ids']} each"
        by_history.setdefault(label, []).append((row["ids"], row["listening_s"]))
    return draw_curves(
        "Coordinator's start after SIGKILL",
        [Chart("seconds by ids", "transactional ids", "until it listens s", by_history)],
    )
