"""Runs the cells of a trial. Each cell sends numbered rows, injects its fault, and reads the target."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from oncelog.errors import ConfigError, OncelogError, TimedOut
from oncelog.local_audit.tables.table import without_login
from oncelog.pipeline.restart_policy import ExitKind
from oncelog.testing.proxy.events import Direction, Fate, WireEvent
from oncelog.testing.proxy.events import Outcome as ProduceOutcome
from oncelog.testing.proxy.proxy import Proxy
from oncelog.testing.proxy.rules import Action, Rule
from oncelog.trial.driver import Driver
from oncelog.trial.fault_point import Strikes
from oncelog.trial.held_lines import HeldLines
from oncelog.trial.judgement import Counts, Verdict, count, foreign_text, judge, row_id
from oncelog.trial.masters import network_conf
from oncelog.trial.plan import (
    Cell,
    Evidence,
    Network,
    Strike,
    TargetKind,
    has_come,
    is_possible,
    master_of,
    spread,
    why_not,
)
from oncelog.trial.spark_checkpoint import CheckpointState, read_checkpoint, remove_last_commit
from oncelog.trial.spark_worker import restart_spark_worker
from oncelog.trial.targets import DeltaTarget, IcebergTarget, PostgresqlTarget, Target, target_of

PARTITIONS = 2
"""Partitions of the source, and of the target if it is a topic."""
MAX_FAILURES = 5
"""A query that fails this often for a reason other than the trial's faults is not started again."""
_POLL_S = 0.005
_CUT_APIS = (
    "Fetch",
    "Produce",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "TxnOffsetCommit",
    "EndTxn",
    "InitProducerId",
)
_REFUSAL = "INVALID_RECORD"
"""The error of a request that is refused. Producers do not repeat such a request."""
_NOT_FOUND = "DATA_SOURCE_NOT_FOUND"
_LIGHT_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options that let a JVM start quickly, because it runs for only half a minute."""
_CONF = {
    # Use small batches, so that some rows reach the target while their task is still running.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20",
    "spark.buffer.size": "1024",
    # Spark's 15 s are too short for a Python worker to connect on a busy machine.
    "spark.python.authenticate.socketTimeout": "120s",
}


class MarkKind(StrEnum):
    """The kind of an event on the timeline of a run."""

    START = "start"
    END = "end"
    FEED = "feed"
    COMMIT = "commit"
    FAULT = "fault"
    NOTE = "note"


class Mark(NamedTuple):
    """An event on the timeline of a run. `at_s`: seconds since the run began."""

    at_s: float
    kind: MarkKind
    text: str


@dataclass(frozen=True, slots=True)
class Trial:
    """The settings that all cells have in common.

    - `servers`: the addresses of the cluster, as in bootstrap.servers.
    - `name`: the prefix of the names of topics.
    - `settings`: the settings of the pipeline, with placeholders.
    - `row`: the value of a row, with `{n}` for its id.
    - `timeout_s`: the time limit of one cell, in seconds.
    - `database`: the JDBC URL of the database; None for other targets.
    """

    file: Path
    kind: TargetKind
    servers: str
    work_dir: Path
    name: str
    rows: int
    micro_batches: int
    row: str
    id_name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    conf: Mapping[str, str] = field(default_factory=dict)
    master: str = "local[2,4]"
    timeout_s: float = 600.0
    database: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one cell.

    `detail` describes the fault that happened, or says why it did not happen. `counts` is None if the target
    was not read. `is_possible` is False if the fault cannot happen with this pipeline.
    """

    cell: Cell
    has_happened: bool
    detail: str
    counts: Counts | None
    starts: int
    seconds: float
    error: str | None
    marks: Sequence[Mark]
    log_file: Path
    is_possible: bool = True

    @property
    def verdict(self) -> Verdict:
        return judge(
            self.counts, has_happened=self.has_happened, error=self.error, is_possible=self.is_possible
        )


def placeholders_filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with each {name} replaced by its value in `values`. Other braces stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def run_cell(trial: Trial, cell: Cell) -> Outcome:
    """Run one cell. Errors of the run are part of its result.

    Raises ConfigError if the file is not a pipeline that can be started.
    """
    return _CellRun(trial, cell).run()


def linked_spark_home(directory: Path) -> Path:
    """Make a directory with links to all of Spark, and return it.

    The workers of a local-cluster write the logs of executors to `work` in Spark's own directory, which may
    be read-only, or part of a virtual environment.
    """
    import pyspark

    directory.mkdir()
    for path in Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent).iterdir():
        if path.name != "work":
            (directory / path.name).symlink_to(path)
    return directory


class _Watch:
    """Counts of the messages that passed the proxy since the fault was prepared. The proxy's thread calls
    `see`.

    `topic` is the target if it is a topic. Records for other topics are no writes to the target. Guard:
    test_a_record_for_another_topic_is_no_write_to_the_target.
    """

    def __init__(self, topic: str | None) -> None:
        self._topic = topic
        self.writes = self.reads_lost = self.writes_lost = self.refusals = 0
        self.commit_requests_lost = self.commits_lost = 0
        self.cuts: Counter[str] = Counter()
        self._with_rows: set[int] = set()
        """The ids of producers that have sent rows for the target since their last commit or abort."""

    @property
    def row_cuts(self) -> int | None:
        """The number of cut messages about rows of the target; None if the target is no topic."""
        return None if self._topic is None else self.cuts["Produce"]

    def see(self, event: WireEvent) -> None:
        if event.fate is Fate.CUT:
            self.cuts[event.api] += 1
        is_lost = event.fate is Fate.DROPPED
        if event.direction is Direction.REQUEST:
            self.writes_lost += is_lost and self._has_rows(event)
            self.commit_requests_lost += is_lost and event.api == "EndTxn"
            self.refusals += event.fate is Fate.FORGED and self._has_rows(event)
            self._with_rows.update(
                batch.producer_id
                for batch in event.batches
                if batch.topic == self._topic and batch.producer_id is not None
            )
        if event.direction is not Direction.RESPONSE:
            return
        if event.api == "Produce" and self._has_write(event):
            self.writes += 1
        elif event.api == "Fetch" and is_lost:
            self.reads_lost += 1
        elif event.api == "InitProducerId" and event.producer is not None:
            # The response ends any open transaction of this producer.
            self._with_rows.discard(event.producer[0])
        elif event.api == "EndTxn":
            self.commits_lost += is_lost
            if event.fate is Fate.PASSED and event.txn is not None and not event.txn_error_code:
                self._with_rows.discard(event.txn.producer_id or 0)

    def _is_write(self, outcome: ProduceOutcome) -> bool:
        return outcome.topic == self._topic and outcome.error_code == 0

    def _has_write(self, event: WireEvent) -> bool:
        return any(map(self._is_write, event.outcomes))

    def rules(self, network: Network | None) -> list[Rule]:
        """Return the proxy's rules that cause a network fault; no rules for None.

        Only rows and acknowledgements of the target are lost. A pipeline that waits for an acknowledgement of
        another topic would not reach its write to the target.
        """
        match network:
            case None:
                return []
            case Network.LOSE_READS:
                return [Rule(action=Action.DROP, api="Fetch", direction=Direction.RESPONSE)]
            case Network.LOSE_WRITES | Network.LOSE_ACKNOWLEDGEMENTS:
                if self._topic is None:
                    return []
                is_request = network is Network.LOSE_WRITES
                direction = Direction.REQUEST if is_request else Direction.RESPONSE
                return [Rule(action=Action.DROP, api="Produce", direction=direction, topic=self._topic)]
            case Network.REFUSE_WRITES:
                return [Rule(action=Action.FAIL, api="Produce", error=_REFUSAL, nth=1, match=self._has_rows)]
            case Network.LOSE_COMMIT_REQUESTS | Network.LOSE_COMMITS:
                is_request = network is Network.LOSE_COMMIT_REQUESTS
                direction = Direction.REQUEST if is_request else Direction.RESPONSE
                return [Rule(action=Action.DROP, api="EndTxn", direction=direction, match=self._is_commit)]
            case Network.CUT_REQUESTS:
                return [self._cut(api, Direction.REQUEST) for api in _CUT_APIS]
            case Network.CUT_ANSWERS:
                return [self._cut(api, Direction.RESPONSE) for api in _CUT_APIS]

    def _cut(self, api: str, direction: Direction) -> Rule:
        """Return the rule that cuts one message. If the target is a topic, this is one about rows of it, or
        about the commit of a transaction with such rows.
        """
        matches = {"Produce": self._has_rows, "EndTxn": self._is_commit} if self._topic is not None else {}
        return Rule(action=Action.CUT, api=api, direction=direction, nth=1, match=matches.get(api))

    def _has_rows(self, event: WireEvent) -> bool:
        """Return True for a request with rows of the target, and for the response that they are stored."""
        return self._has_write(event) or any(batch.topic == self._topic for batch in event.batches)

    def _is_commit(self, event: WireEvent) -> bool:
        """Return True for a request or response about the commit of a transaction with rows of the target.

        A transaction without such rows stores only the pipeline's own state. Another producer may have rows
        at the same time. Guard: test_only_a_commit_with_rows_is_lost.
        """
        txn = event.txn
        is_commit = txn is not None and bool(txn.is_commit) and not event.txn_error_code
        return is_commit and txn is not None and txn.producer_id in self._with_rows


class _CellRun:
    """One run of a cell, with its own source, target, checkpoint and driver."""

    def __init__(self, trial: Trial, cell: Cell) -> None:
        self._trial, self._cell = trial, cell
        self._directory = trial.work_dir / cell.name
        self._control, self._checkpoint = self._directory / "control", self._directory / "checkpoint"
        self._source = f"{trial.name}-{cell.name}-source"
        name = f"{trial.name}-{cell.name}-target"
        place = self._directory / "target"
        self._target: Target = target_of(
            trial.kind, name, place, trial.servers, trial.id_name, trial.database
        )
        self._log_file = self._directory / "driver.log"
        self._ends: Counter[int] = Counter()
        self._marks: list[Mark] = []
        self._watch, self._writes_before = self._new_watch(), 0
        self._writes_in_target = self._writes_committed = 0
        self._has_uncounted_commit = False
        self._strikes, self._lines = Strikes(self._control), HeldLines(self._control)
        self._is_possible = True
        self._state = CheckpointState()
        self._has_happened, self._detail = cell.is_calm, ""
        self._starts = self._failures = 0
        self._began = time.monotonic()

    def run(self) -> Outcome:
        counts, error = None, None
        try:
            with self._target if isinstance(self._target, PostgresqlTarget) else nullcontext():
                self._run()
                counts = self._count()
            error = foreign_text(counts, self._trial.id_name)
        except ConfigError:
            raise
        except (OncelogError, OSError, sqlite3.Error) as failure:
            error = without_login(str(failure))
            self._mark(MarkKind.NOTE, error)
        seconds = time.monotonic() - self._began
        detail = "; ".join(part for part in (self._detail, self._target.remark) if part)
        return Outcome(
            self._cell,
            self._has_happened,
            detail,
            counts,
            self._starts,
            seconds,
            error,
            self._marks,
            self._log_file,
            self._is_possible,
        )

    def _count(self) -> Counts:
        """Read the target and count its rows. Raises OncelogError if that is not possible."""
        try:
            found = (row_id(row, self._trial.id_name) for row in self._target.read())
            return count(range(self._trial.rows), found)
        except OncelogError:
            raise
        except Exception as failure:
            # Catch every exception: a pipeline may write anything, and each library that reads it raises its
            # own exceptions. If one ended the trial, the results of the other cells would be lost.
            address = without_login(self._target.address)
            text = f"the target {address} cannot be read: {type(failure).__name__}: {failure}"
            raise OncelogError(text) from failure

    def _mark(self, kind: MarkKind, text: str) -> None:
        self._marks.append(Mark(time.monotonic() - self._began, kind, text))

    def _run(self) -> None:
        self._prepare()
        with self._parts():
            self._start_driver()
            feeds = spread(self._trial.rows, self._trial.micro_batches)
            for number, ids in enumerate(feeds):
                # Arm the fault only after the first micro-batch, so that it happens while the query is
                # running.
                is_armed = not self._has_happened and number >= min(1, len(feeds) - 1)
                if is_armed:
                    self._arm()
                self._feed(ids)
                if is_armed and self._cell.kill_at is not None:
                    self._kill_driver()
                self._wait(lambda evidence: evidence.is_consumed)
                if is_armed:
                    self._disarm()

    def _prepare(self) -> None:
        from oncelog import Admin, NewTopic

        for directory in (self._control, self._directory / "tmp", self._directory / "target"):
            directory.mkdir(parents=True, exist_ok=True)
        topics = [NewTopic(self._source, PARTITIONS)]
        if self._trial.kind is TargetKind.TOPIC:
            topics.append(NewTopic(self._target.address, PARTITIONS))
        with Admin({"bootstrap.servers": self._trial.servers}) as admin:
            admin.create_topics(topics)

    @contextmanager
    def _parts(self) -> Iterator[None]:
        """Run the proxy and a producer during the `with` block, and create the driver. At the end, kill the
        driver.
        """
        from oncelog import Producer

        with ExitStack() as stack:
            self._proxy = stack.enter_context(
                Proxy(self._trial.servers.split(",")[0], on_event=lambda event: self._watch.see(event))
            )
            self._producer = stack.enter_context(Producer({"bootstrap.servers": self._trial.servers}))
            self._driver = stack.enter_context(self._new_driver())
            yield

    def _new_driver(self) -> Driver:
        trial = self._trial
        values = {
            "bootstrap_servers": self._proxy.bootstrap_servers,
            "source": self._source,
            "target": self._target.address,
            "table": self._target.table,
            "checkpoint": str(self._checkpoint),
        }
        settings = {name.upper(): value for name, value in values.items()}
        settings |= {"TRIGGER": "0 seconds", "TMPDIR": str(self._directory / "tmp")}
        settings |= {key: placeholders_filled(value, values) for key, value in trial.settings.items()}
        given = os.environ.get("JAVA_TOOL_OPTIONS", "")
        settings["JAVA_TOOL_OPTIONS"] = f"{_LIGHT_JVM} {given}".strip()
        master = master_of(self._cell, trial.master)
        directory = {"spark.local.dir": str(self._directory / "tmp")}
        conf = {**_CONF, **directory, **network_conf(master), **trial.conf}
        if master.startswith("local-cluster"):
            settings["SPARK_HOME"] = str(linked_spark_home(self._directory / "spark"))
        job = {"file": str(trial.file), "master": master, "conf": conf}
        return Driver(job, settings, self._log_file, self._control, self._cell.strike)

    def _start_driver(self) -> None:
        self._lines.release()
        self._driver.start()
        self._starts += 1
        self._mark(MarkKind.START, f"driver, start {self._starts}")

    # Injecting the fault

    def _new_watch(self) -> _Watch:
        return _Watch(self._target.address if self._trial.kind is TargetKind.TOPIC else None)

    def _arm(self) -> None:
        before = self._count_writes()
        self._writes_before = self._writes_before + self._writes_in_target if before is None else before
        self._watch = self._new_watch()
        self._writes_in_target = self._writes_committed = 0
        self._has_uncounted_commit = before is None
        for rule in self._watch.rules(self._cell.network):
            self._proxy.add(rule)
        if self._cell.strike is Strike.FAIL_WRITE:
            self._lines.arm()
        elif self._cell.strike is not None:
            self._strikes.arm()

    def _count_writes(self) -> int | None:
        """Return a number that grows with each write to the target; None if it cannot be counted now.

        A table's data files are written before their commit, and readers do not see them yet. A function of
        foreachBatch waits at its lines, so the commits are counted. Guard:
        test_a_write_to_a_table_is_its_commit.
        """
        if self._lines.has_function and isinstance(self._target, DeltaTarget | IcebergTarget):
            return self._target.count_committed()
        return self._target.count_writes()

    def _clear(self) -> None:
        self._proxy.clear()
        self._strikes.disarm()

    def _disarm(self) -> None:
        """Remove the fault, and decide if it happened. For a kill, `_kill_driver` has decided that before."""
        self._clear()
        if self._cell.kill_at is None:
            evidence = self._evidence()
            reason = why_not(self._cell, evidence)
            self._has_happened, self._is_possible = reason is None, is_possible(self._cell, evidence)
            self._detail = reason or self._seen(evidence)
            if self._has_happened:
                self._mark(MarkKind.NOTE, self._detail)

    def _kill_driver(self) -> None:
        """Wait for the moment that the cell names, then kill the driver and start it again. Do nothing if all
        rows are consumed before that moment.
        """
        moment = self._cell.kill_at
        assert moment is not None
        evidence = self._wait(lambda now: has_come(moment, now) or now.is_consumed)
        if not has_come(moment, evidence):
            self._detail = why_not(self._cell, evidence) or ""
            self._is_possible = is_possible(self._cell, evidence)
            return
        self._driver.kill()
        self._mark(MarkKind.FAULT, f"driver killed (SIGKILL): {self._cell.fault}")
        self._mark(MarkKind.END, "driver dead")
        self._clear()
        evidence = self._evidence()
        reason = why_not(self._cell, evidence)
        self._has_happened, self._detail = reason is None, reason or self._seen(evidence)
        if self._cell.removes_commit and self._has_happened:
            removed = remove_last_commit(self._checkpoint)
            self._mark(MarkKind.FAULT, f"entry {removed} of Spark's commit log removed")
        self._start_driver()

    def _seen(self, evidence: Evidence) -> str:
        """Return a description of a fault that happened."""
        if self._watch.cuts:
            return "cut: " + ", ".join(f"{api} {n}" for api, n in sorted(self._watch.cuts.items()))
        batch, writes = self._state.committed, evidence.writes
        if evidence.is_planned:
            batch, writes = self._state.planned, evidence.new_writes
        return f"micro-batch {batch}, {'writes seen' if writes else 'no write seen'}"

    # Waiting

    def _feed(self, ids: Sequence[int]) -> None:
        for number in ids:
            # The partitions must differ in size: a pipeline may compare offsets of different ones. Guard:
            # test_a_sink_that_compares_offsets_of_different_partitions_loses_rows.
            partition = int(number % 3 == 0)
            key = str(number)
            value = placeholders_filled(self._trial.row, {"n": key})
            self._producer.send(self._source, value.encode(), key.encode(), partition=partition)
            self._ends[partition] += 1
        self._producer.flush()
        self._mark(MarkKind.FEED, f"rows {ids[0]} to {ids[-1]} sent to the source" if ids else "no rows sent")

    def _evidence(self) -> Evidence:
        # Read the line first: if the driver waits at a line of a micro-batch, its plan is in the checkpoint.
        self._lines.read()
        state = read_checkpoint(self._checkpoint, self._source)
        counted = self._count_writes()
        if counted is not None:
            self._writes_in_target = max(0, counted - self._writes_before)
        writes = self._watch.writes + self._writes_in_target
        if state.committed != self._state.committed and state.committed is not None:
            self._mark(MarkKind.COMMIT, f"micro-batch {state.committed} committed")
            self._has_uncounted_commit = True
        if self._has_uncounted_commit and counted is not None:
            # The query may read one part of the rows in several micro-batches. Guard:
            # test_a_write_of_an_earlier_micro_batch_does_not_count.
            self._writes_committed, self._has_uncounted_commit = writes, False
        self._state = state
        watch = self._watch
        self._strikes.look(writes)
        self._lines.look(None if counted is None else writes)
        return Evidence(
            is_planned=state.is_planned,
            is_consumed=state.covers(self._ends),
            has_rows=state.has_rows,
            writes=writes,
            new_writes=0 if self._has_uncounted_commit else writes - self._writes_committed,
            reads_lost=watch.reads_lost,
            writes_lost=watch.writes_lost,
            refusals=watch.refusals,
            commit_requests_lost=watch.commit_requests_lost,
            commits_lost=watch.commits_lost,
            cuts=watch.cuts.total(),
            row_cuts=watch.row_cuts,
            has_struck=self._strikes.has_begun,
            has_counted=self._strikes.has_counted,
            has_function=self._lines.has_function,
            is_before_write=self._lines.is_before_write,
            has_failed_write=self._lines.has_failed,
        )

    def _wait(self, condition: Callable[[Evidence], bool]) -> Evidence:
        """Wait for a condition. Restart the driver each time it ends. Raises TimedOut and OncelogError."""
        deadline = self._began + self._trial.timeout_s
        while not condition(evidence := self._evidence()):
            self._lines.release()
            for pid in self._strikes.take_kills():
                restart_spark_worker(pid)
                self._mark(MarkKind.FAULT, f"Spark worker {pid} killed (SIGKILL) and started again")
            if self._driver.exit_info is not None:
                self._restart_ended()
            if time.monotonic() > deadline:
                raise TimedOut(self._timeout_text())
            time.sleep(_POLL_S)
        return evidence

    def _timeout_text(self) -> str:
        reason = f"cell {self._cell.name} did not end within {self._trial.timeout_s:g} s"
        if self._state.planned is None and self._driver.query_id is not None:
            reason += f": the query wrote no checkpoint to {self._checkpoint} (the setting CHECKPOINT)"
        elif self._state.committed is None or self._state.positions is None:
            reason += f": no committed micro-batch read the topic {self._source} (the setting SOURCE)"
        return f"{reason}; the driver's log is {self._log_file}"

    def _restart_ended(self) -> None:
        """Start the driver again after it has ended by itself."""
        ended = self._driver.exit_info
        assert ended is not None
        text = without_login(ended.error or f"the query is {ended.kind.value}")
        self._driver.kill()
        if ended.kind is not ExitKind.DONE:
            self._strikes.query_failed()
        self._mark(MarkKind.END, text)
        # On a busy machine, Spark may stop its search for `format("oncelog")` too early. Then try again.
        is_mistake = ended.kind is ExitKind.SETUP and not (_NOT_FOUND in text and "oncelog" in text)
        if is_mistake and self._driver.query_id is None:
            raise ConfigError(
                f"{self._trial.file} cannot be run as a pipeline: {text}; "
                f"the driver's log is {self._log_file}"
            )
        if ended.kind is ExitKind.REFUSED:
            raise OncelogError(f"the pipeline cannot continue: {text}; the driver's log is {self._log_file}")
        if ended.kind is not ExitKind.DONE:
            self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise OncelogError(
                f"the pipeline failed {self._failures} times, last with: {text}; "
                f"the driver's log is {self._log_file}"
            )
        self._start_driver()
