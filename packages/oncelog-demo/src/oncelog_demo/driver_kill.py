"""Run the enrichment over the faulty network, kill its driver in a micro-batch, and run it again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from oncelog.errors import OncelogError, TimedOut
from oncelog.testing.proxy.events import Direction, Fate, WireEvent
from oncelog.testing.proxy.proxy import Proxy
from oncelog.testing.proxy.rules import Action, Rule
from oncelog_demo.enriching import Job
from oncelog_demo.loading import COMMON_SETTINGS, fault_rules
from oncelog_demo.sink_attempts import Attempt, Writer, list_attempts, with_rows

BATCHES = 4
"""The number of micro-batches into which the flights are divided. The driver is killed neither in the first
nor in the last one.
"""
DRIVER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class SparkSink:
    """The Spark sink that writes the flights, and its target topic."""

    name: str
    format: str
    topic: str


OURS = SparkSink("exactly once, from Spark", "oncelog", "flights-enriched")
SPARKS = SparkSink("at least once, from Spark", "kafka", "flights-enriched-by-kafka-sink")
"""Spark's own Kafka sink, with which Oncelog's sink is compared."""


@dataclass(slots=True)
class Enrichment:
    """The result of one enrichment.

    `killed_at_ms` is in milliseconds since the enrichment started. The proxy recorded `events`.
    """

    sink: SparkSink
    killed_at_ms: float = 0.0
    seconds: float = 0.0
    attempts: Sequence[Attempt] = ()
    """The attempts of Oncelog's sink. Empty for Spark's own sink, which has no transactions."""
    rows_at_kill: int = 0
    """Rows that a read_uncommitted consumer could read when the driver was killed."""
    rows_visible_at_kill: int = 0
    """Rows that a read_committed consumer could read when the driver was killed."""
    rows_stored: int = 0
    """Rows in the log at the end, including aborted ones."""
    events: list[WireEvent] = field(default_factory=list)


def run_enrichment(
    sink: SparkSink,
    bootstrap_servers: str,
    source_topic: str,
    flights: int,
    work_dir: Path,
    *,
    tasks: int,
    seed: int,
    on_progress: Callable[[int], None],
) -> Enrichment:
    """Enrich every flight of the source topic, and kill the driver once with SIGKILL.

    `choose_moment` decides when the driver is killed.
    """
    enrichment = Enrichment(sink)
    rows_per_batch = -(-flights // BATCHES)
    moment = choose_moment(seed, tasks, rows_per_batch)
    rules = [*fault_rules(), Rule(action=Action.DROP, api="EndTxn", nth=moment.commit)]
    watch = _Watch(sink, moment, on_progress)
    began = time.monotonic()
    with Proxy(bootstrap_servers, rules=rules, seed=seed, on_event=watch.see) as proxy:
        checkpoint = str(work_dir / f"{sink.topic}-checkpoint")
        options = _sink_options(proxy, sink.topic)
        job = Job(bootstrap_servers, source_topic, rows_per_batch, sink.format, options, checkpoint)
        log_file = work_dir / f"{sink.topic}.log"
        with _Driver(job, log_file) as driver:
            driver.wait_for(watch.is_time)
        enrichment.killed_at_ms = (time.monotonic() - began) * 1000
        enrichment.rows_at_kill = count_rows(bootstrap_servers, sink.topic).total()
        enrichment.rows_visible_at_kill = count_visible_rows(bootstrap_servers, sink.topic)
        with _Driver(job, log_file) as driver:
            driver.wait()
        enrichment.events = proxy.events
    enrichment.seconds = time.monotonic() - began
    rows = count_rows(bootstrap_servers, sink.topic)
    enrichment.rows_stored = rows.total()
    enrichment.attempts = with_rows(list_attempts(enrichment.events, enrichment.killed_at_ms), rows)
    return enrichment


class Moment(NamedTuple):
    """The moment in a micro-batch at which to kill the driver.

    With a transactional sink, the driver is killed when the proxy drops EndTxn number `commit` (counted from
    1) on its way to the broker. Other sinks send no EndTxn. With such a sink, the driver is killed after
    `rows` rows were sent.
    """

    commit: int
    rows: int


def choose_moment(seed: int, tasks: int, rows_per_batch: int) -> Moment:
    """Choose a commit that is neither one of the first two nor the last of its batch.

    Two tasks run at a time, so at least one task has committed when the third commit is sent. When the commit
    is lost, the log contains all rows of its task, and no client knows if the commit succeeded.
    """
    chance = random.Random(seed)
    batch = chance.randint(1, BATCHES - 2)
    return Moment(batch * tasks + chance.randint(3, tasks - 1), batch * rows_per_batch + rows_per_batch // 2)


def _sink_options(proxy: Proxy, topic: str) -> Mapping[str, str]:
    settings = {**COMMON_SETTINGS, "bootstrap.servers": proxy.bootstrap_servers}
    return {"topic": topic} | {f"kafka.{key}": str(value) for key, value in settings.items()}


class _Watch:
    """An observer of the proxy's messages. It counts the rows sent and sets `is_time` at the moment to kill.

    The proxy calls `see` in its own thread.
    """

    def __init__(self, sink: SparkSink, moment: Moment, on_progress: Callable[[int], None]) -> None:
        self.is_time = threading.Event()
        self._sink, self._moment, self._on_progress = sink, moment, on_progress
        self._rows = 0

    def see(self, event: WireEvent) -> None:
        if event.direction is Direction.REQUEST and event.batches:
            self._rows += sum(batch.records_count for batch in event.batches)
            self._on_progress(self._rows)
        is_lost_commit = event.api == "EndTxn" and event.fate is Fate.DROPPED
        if is_lost_commit or (self._sink is SPARKS and self._rows >= self._moment.rows):
            self.is_time.set()


class _Driver:
    """The driver program and its JVM, in one process group. Leaving the `with` block kills both with SIGKILL.

    Spark's Python workers exit after their JVM. Temporary files are removed.
    """

    def __init__(self, job: Job, log_file: Path) -> None:
        self._job, self._log_file = job, log_file
        self._temporary = tempfile.TemporaryDirectory(
            prefix="oncelog-demo-driver-", ignore_cleanup_errors=True
        )

    def __enter__(self) -> Self:
        with self._log_file.open("ab") as log:
            command = self._job.command()
            environment = {**os.environ, "TMPDIR": self._temporary.name}
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._temporary.cleanup()

    def wait_for(self, moment: threading.Event) -> None:
        """Wait for the moment to kill. Raises TimedOut, and OncelogError if the program ends first."""
        deadline = time.monotonic() + DRIVER_TIMEOUT_S
        while not moment.wait(0.1):
            if self._process.poll() is not None:
                raise OncelogError(f"the enrichment ended before it could be killed; {self._log_end()}")
            if time.monotonic() > deadline:
                raise TimedOut(f"the enrichment took over {DRIVER_TIMEOUT_S:g} s; {self._log_end()}")

    def wait(self) -> None:
        """Wait until the program has ended. Raises TimedOut, and OncelogError if the program failed."""
        try:
            code = self._process.wait(DRIVER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"the enrichment took over {DRIVER_TIMEOUT_S:g} s; {self._log_end()}") from None
        if code != 0:
            raise OncelogError(f"the enrichment failed with exit code {code}; {self._log_end()}")

    def _log_end(self) -> str:
        return f"{self._log_file} ends:\n{self._log_file.read_text(errors='replace')[-2000:]}"


def count_rows(bootstrap_servers: str, topic: str) -> Counter[Writer]:
    """Count each writer's rows in the log by the batch headers, including uncommitted and aborted rows."""
    from oncelog import Consumer, TopicPartition
    from oncelog.wire.batch import iter_batches

    rows: Counter[Writer] = Counter()
    with Consumer(
        {"bootstrap.servers": bootstrap_servers, "isolation.level": "read_uncommitted"}
    ) as consumer:
        partitions = [TopicPartition(topic, part.partition) for part in consumer.partitions_for(topic)]
        for tp, end in consumer.end_offsets(partitions).items():
            for view in consumer.fetch_batches(tp, 0, end):
                for _, header in iter_batches(view):
                    if not header.is_control:
                        rows[header.producer_id or 0, header.producer_epoch or 0] += header.records_count
    return rows


def count_visible_rows(bootstrap_servers: str, topic: str) -> int:
    """Count the rows that a read_committed consumer can read now."""
    from oncelog import Consumer, TopicPartition

    with Consumer({"bootstrap.servers": bootstrap_servers, "isolation.level": "read_committed"}) as consumer:
        partitions = [TopicPartition(topic, part.partition) for part in consumer.partitions_for(topic)]
        return sum(
            batch.num_rows
            for tp, end in consumer.end_offsets(partitions).items()
            for batch in consumer.fetch_range(tp, 0, end)
        )
