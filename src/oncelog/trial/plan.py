"""The cells of a trial: the fault of each run, when it happens, and what proves that it happened. No I/O.

The moments of a kill, in the order of a micro-batch:

    PLANNED      Spark's offset log has the micro-batch, and no row of it has reached the target
    SENT         the pipeline has sent rows of the micro-batch, and none of them has reached the target
    AT_LINE      a function of foreachBatch is at the line that writes rows, and has not executed it
    STORED       rows of the micro-batch are in the target, and the driver does not know it
    COMMIT_SENT  rows are stored, and the request to commit their transaction does not arrive
    COMMITTING   a transaction with rows is committed, and the pipeline does not know it
    COMMITTED    Spark's commit log has the micro-batch

No kill happens between the sink's commit and Spark's commit. Instead the driver is killed after Spark's
commit, and the last entry of the commit log is removed (`removes_commit`). That leaves the same files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise
from typing import assert_never

from oncelog.errors import ConfigError

_NO_WRITING_LINE = "foreachBatch did not come to the line that wrote rows in an earlier micro-batch"
_WITHOUT_RETRIES = re.compile(r"local(?:\[([^,\]]+)\])?")
_ATTEMPTS_OF_TASKS = 4
"""Spark's default of spark.task.maxFailures, which `local[N]` ignores."""
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
"""A master that starts two executors on this machine, with one core and 1024 MB each."""


class TargetKind(StrEnum):
    """The kind of a pipeline's target. The values are those of the option --target.

    TOPIC              a topic, read with isolation.level=read_committed
    PARQUET            a directory: every Parquet file in it, as any reader but Spark sees it
    PARQUET_COMMITTED  the same, but only the files that are in Spark's own log of the directory
    DELTA              a Delta Lake table
    ICEBERG            a directory with Iceberg tables and catalog.db, their SQL catalog in SQLite
    SQLITE             a SQLite database: the rows of all its tables
    POSTGRESQL         a PostgreSQL database: the rows of all tables in a schema of the run
    """

    TOPIC = "topic"
    PARQUET = "parquet"
    PARQUET_COMMITTED = "parquet-committed"
    DELTA = "delta"
    ICEBERG = "iceberg"
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


class Strike(StrEnum):
    """A fault inside the pipeline's processes.

    RAISE              a task raises in the middle of its rows
    KILL_WORKER        a task's Python worker is killed in the middle of its rows
    KILL_EXECUTOR      the JVM of a task's executor is killed in the middle of the task's rows
    KILL_SPARK_WORKER  the Spark worker of a task's executor is killed in the middle of the task's rows
    FAIL_WRITE         the line of a function of foreachBatch that writes rows raises an error
    HOLD               a function of foreachBatch waits at each line until the trial has counted the writes,
                       and does not return before the kill
    """

    RAISE = "raise"
    KILL_WORKER = "kill-worker"
    KILL_EXECUTOR = "kill-executor"
    KILL_SPARK_WORKER = "kill-spark-worker"
    FAIL_WRITE = "fail-write"
    HOLD = "hold"

    @property
    def is_in_tasks(self) -> bool:
        """True if the fault is in a task, and not in the driver."""
        return self not in (Strike.FAIL_WRITE, Strike.HOLD)


class Network(Enum):
    """A fault of the network between the pipeline and the cluster."""

    LOSE_READS = "fetched rows do not arrive"
    LOSE_WRITES = "rows are sent, and do not arrive"
    LOSE_ACKNOWLEDGEMENTS = "rows are stored, and no acknowledgement arrives"
    LOSE_COMMIT_REQUESTS = "requests to commit transactions are sent, and do not arrive"
    LOSE_COMMITS = "transactions are committed, and no response arrives"
    REFUSE_WRITES = "a request with rows is answered with an error"
    CUT_REQUESTS = "one request of each kind is lost together with its connection"
    CUT_ANSWERS = "one response of each kind is lost together with its connection"

    @property
    def cuts(self) -> bool:
        """True if the fault cuts connections."""
        return self in (Network.CUT_REQUESTS, Network.CUT_ANSWERS)


class Moment(Enum):
    """A moment at which the driver is killed; see the table of this module."""

    PLANNED = "planned"
    SENT = "sent"
    AT_LINE = "at line"
    STORED = "stored"
    COMMIT_SENT = "commit sent"
    COMMITTING = "committing"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the pipeline, and its fault. The run without a fault is the control.

    `removes_commit`: after the kill, the last entry of Spark's commit log is removed.
    """

    name: str
    fault: str
    strike: Strike | None = None
    network: Network | None = None
    kill_at: Moment | None = None
    removes_commit: bool = False

    @property
    def is_calm(self) -> bool:
        """True for the control, the run without a fault."""
        return self.strike is None and self.network is None and self.kill_at is None


CELLS = (
    Cell("calm", "none"),
    Cell("task-fails", "a task raises in the middle of its rows", strike=Strike.RAISE),
    Cell(
        "worker-killed",
        "a task's Python worker is killed in the middle of its rows",
        strike=Strike.KILL_WORKER,
    ),
    Cell(
        "executor-killed",
        "a task's executor is killed in the middle of its rows",
        strike=Strike.KILL_EXECUTOR,
    ),
    Cell(
        "spark-worker-killed",
        "the Spark worker of a task's executor is killed in the middle of its rows, and started again",
        strike=Strike.KILL_SPARK_WORKER,
    ),
    Cell(
        "driver-before-write",
        "the driver is killed after a micro-batch is planned and before a row is written",
        network=Network.LOSE_READS,
        kill_at=Moment.PLANNED,
    ),
    Cell(
        "driver-write-lost",
        "the driver is killed after rows are sent and before any of them arrives",
        network=Network.LOSE_WRITES,
        kill_at=Moment.SENT,
    ),
    Cell(
        "driver-at-write",
        "the driver is killed after foreachBatch has read rows and before the line that writes them",
        strike=Strike.HOLD,
        kill_at=Moment.AT_LINE,
    ),
    Cell(
        "driver-in-write",
        "the driver is killed after rows are written and before the micro-batch is finished",
        strike=Strike.HOLD,
        network=Network.LOSE_ACKNOWLEDGEMENTS,
        kill_at=Moment.STORED,
    ),
    Cell(
        "driver-before-commit",
        "the driver is killed after rows are stored and before the commit of their transaction arrives",
        network=Network.LOSE_COMMIT_REQUESTS,
        kill_at=Moment.COMMIT_SENT,
    ),
    Cell(
        "driver-in-commit",
        "the driver is killed after a transaction is committed whose response is lost",
        network=Network.LOSE_COMMITS,
        kill_at=Moment.COMMITTING,
    ),
    Cell(
        "commit-lost",
        "the driver is killed after the sink's commit, and Spark's commit log loses its last entry",
        kill_at=Moment.COMMITTED,
        removes_commit=True,
    ),
    Cell("driver-after-commit", "the driver is killed after Spark's commit", kill_at=Moment.COMMITTED),
    Cell(
        "requests-cut",
        "requests of the pipeline are lost together with their connections",
        network=Network.CUT_REQUESTS,
    ),
    Cell(
        "answers-cut",
        "responses to the pipeline's requests are lost together with their connections",
        network=Network.CUT_ANSWERS,
    ),
    Cell("rows-refused", "the cluster refuses a request with rows", network=Network.REFUSE_WRITES),
    Cell(
        "write-fails",
        "the line of foreachBatch that writes rows raises an error",
        strike=Strike.FAIL_WRITE,
    ),
)


def choose_cells(
    names: Collection[str], kind: TargetKind, *, has_proc: bool = True, has_spark_workers: bool = True
) -> tuple[Cell, ...]:
    """Return the named cells in the order of CELLS; without names, all cells that can happen.

    `has_proc` is True if a process can find the executor that started it, and `has_spark_workers` if the
    master is that of a standalone cluster. Raises ConfigError for an unknown name, and for a cell that needs
    such a cluster.
    """
    unknown = [name for name in names if name not in {cell.name for cell in CELLS}]
    if unknown:
        known = ", ".join(cell.name for cell in CELLS)
        raise ConfigError(f"--cells: no cell is named {unknown[0]!r}; there are {known}")
    if names:
        chosen = tuple(cell for cell in CELLS if cell.name in names)
        if any(cell.strike is Strike.KILL_SPARK_WORKER for cell in chosen) and not has_spark_workers:
            raise ConfigError(
                "--cells spark-worker-killed needs the Spark workers of a standalone cluster: "
                "--master spark://HOST:PORT (oncelog dev spark start)"
            )
        return chosen
    impossible: set[Strike | Moment | Network] = set()
    if not has_proc:
        impossible |= {Strike.KILL_EXECUTOR, Strike.KILL_SPARK_WORKER}
    if not has_spark_workers:
        impossible.add(Strike.KILL_SPARK_WORKER)
    if kind is TargetKind.TOPIC:
        # In driver-write-lost and rows-refused, the rows come to the cluster before they are lost or refused.
        impossible |= {Moment.AT_LINE, Strike.FAIL_WRITE}
    else:
        impossible |= {Moment.SENT, Moment.COMMIT_SENT, Moment.COMMITTING}
        impossible |= {Network.CUT_REQUESTS, Network.REFUSE_WRITES}
    return tuple(cell for cell in CELLS if not impossible & {cell.strike, cell.kill_at, cell.network})


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts since the cell's fault was prepared.

    - `is_planned`: Spark's offset log has a micro-batch that its commit log lacks.
    - `is_consumed`: every row sent so far is in a committed micro-batch.
    - `has_rows`: the last committed micro-batch has rows.
    - `writes`: the number of responses that report stored rows, or of new files or rows in the target.
    - `new_writes`: those that were first seen after the last commit of a micro-batch. They belong to a
      micro-batch that is planned and not committed.
    - `cuts`: the number of messages that were cut.
    - `row_cuts`: those that had rows of the target or responded to some; None if the target is no topic.
    - `has_struck`: a task was made to fail.
    - `has_counted`: Spark repeated that task, or the query failed because of it.
    - `writes_lost`: the number of lost requests with rows of the target.
    - `commit_requests_lost`: the number of lost requests to commit a transaction with rows of the target.
    - `refusals`: the number of requests with rows of the target that were answered with an error.
    - `has_function`: the query has a function of foreachBatch.
    - `is_before_write`: this function waits at the line that wrote the rows of an earlier micro-batch.
    - `has_failed_write`: that line has raised an error.

    The other numbers count lost responses.
    """

    is_planned: bool = False
    is_consumed: bool = False
    has_rows: bool = False
    writes: int = 0
    new_writes: int = 0
    reads_lost: int = 0
    writes_lost: int = 0
    commit_requests_lost: int = 0
    commits_lost: int = 0
    refusals: int = 0
    cuts: int = 0
    row_cuts: int | None = None
    has_struck: bool = False
    has_counted: bool = False
    has_function: bool = False
    is_before_write: bool = False
    has_failed_write: bool = False


def has_come(moment: Moment, evidence: Evidence) -> bool:
    """Return True if the driver must be killed now."""
    match moment:
        case Moment.PLANNED:
            return evidence.is_planned and evidence.reads_lost > 0
        case Moment.SENT:
            # The micro-batch may be committed: then the pipeline does not wait for its rows. Guard:
            # test_a_sink_that_does_not_wait_for_its_rows_loses_them.
            return evidence.writes_lost > 0
        case Moment.AT_LINE:
            return evidence.is_planned and evidence.is_before_write
        case Moment.STORED:
            return evidence.is_planned and evidence.new_writes > 0
        case Moment.COMMIT_SENT:
            # As for SENT, the pipeline may not wait. Guard:
            # test_a_sink_that_notes_a_micro_batch_before_its_commit_loses_rows.
            return evidence.commit_requests_lost > 0
        case Moment.COMMITTING:
            return evidence.commits_lost > 0
        case Moment.COMMITTED:
            return evidence.is_consumed
        case _:
            assert_never(moment)


def is_possible(cell: Cell, evidence: Evidence) -> bool:
    """Return False if the fault cannot happen with this pipeline, whatever the run does."""
    is_about_function = cell.kill_at is Moment.AT_LINE or cell.strike is Strike.FAIL_WRITE
    return evidence.has_function or not is_about_function


def why_not(cell: Cell, evidence: Evidence) -> str | None:
    """Return the reason why the cell's fault did not happen; None if it happened.

    For a kill, `evidence` was collected after the driver's death, because the driver may have made progress
    before the kill took effect.
    """
    if not is_possible(cell, evidence):
        return "the query has no function of foreachBatch, which this fault is about"
    if cell.strike is Strike.FAIL_WRITE and not evidence.has_failed_write:
        return _NO_WRITING_LINE
    if cell.strike is not None and cell.strike.is_in_tasks:
        if evidence.has_counted:
            return None
        if evidence.has_struck:
            return "Spark did not need the task that failed, so it did not repeat it"
        return "no task had rows of a source of spark.readStream, or rows for a writer of Spark"
    match cell.kill_at:
        case Moment.PLANNED if evidence.reads_lost == 0:
            return "no task read the source before the micro-batch was finished"
        case Moment.SENT if evidence.writes_lost == 0:
            return "no row of the target was sent before the micro-batch was finished"
        case Moment.AT_LINE if not evidence.is_before_write:
            return _NO_WRITING_LINE
        case Moment.PLANNED | Moment.SENT | Moment.AT_LINE if evidence.new_writes:
            return "rows were written before the driver was dead"
        case Moment.STORED if evidence.writes == 0:
            return "no write was seen before the micro-batch was finished"
        case Moment.COMMIT_SENT if evidence.commit_requests_lost == 0:
            return "the pipeline committed no transaction"
        case Moment.COMMITTING if evidence.commits_lost == 0:
            return "the pipeline committed no transaction"
        case Moment.PLANNED | Moment.AT_LINE | Moment.STORED if not evidence.is_planned:
            return "the micro-batch was committed before the driver was dead"
        case Moment.STORED if evidence.new_writes == 0:
            return "only rows of an earlier micro-batch were written"
        case Moment.COMMITTED if not evidence.is_consumed:
            return "the micro-batch was not committed"
        # After the restart, Spark repeats the newest planned micro-batch. The run proves something only if
        # that is the micro-batch whose commit was removed, and if it has rows.
        case Moment.COMMITTED if cell.removes_commit and evidence.is_planned:
            return "the next micro-batch was planned before the driver was dead"
        case Moment.COMMITTED if cell.removes_commit and not evidence.has_rows:
            return "a micro-batch without rows was committed before the driver was dead"
    if cell.network is Network.REFUSE_WRITES and evidence.refusals == 0:
        return "no row of the target was sent that could be refused"
    if cell.network is not None and cell.network.cuts:
        if evidence.cuts == 0:
            return "the pipeline sent nothing that could be cut"
        if evidence.row_cuts == 0:
            return "nothing about rows of the target was cut: the pipeline sends them to other addresses"
    return None


def master_of(cell: Cell, master: str) -> str:
    """Return the Spark master of a run.

    With `local[N]`, the driver's JVM runs the tasks itself. So a cell that kills an executor gets a master
    that starts executors as separate processes. Spark repeats no task then, either, although other masters
    repeat a task up to three times. So the cells of tasks get `local[N,4]`.
    """
    has_executors = not master.startswith("local") or master.startswith("local-cluster")
    if cell.strike is Strike.KILL_EXECUTOR and not has_executors:
        return LOCAL_CLUSTER
    is_in_tasks = cell.strike is not None and cell.strike.is_in_tasks
    if is_in_tasks and (found := _WITHOUT_RETRIES.fullmatch(master)):
        return f"local[{found[1] or 1},{_ATTEMPTS_OF_TASKS}]"
    return master


def spread(rows: int, micro_batches: int) -> Sequence[range]:
    """Return the ids of each micro-batch: `rows` consecutive numbers from 0, in parts of about equal size."""
    bounds = [rows * number // micro_batches for number in range(micro_batches + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]
