"""Targets that are directories, the fault inside a task, and the measured table of docs/trial.md."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from support import ROOT
from support.wait import wait_until

from oncelog.errors import MissingDependency
from oncelog.trial import fault_point
from oncelog.trial.fault_point import (
    Attempt,
    Strikes,
    TaskFault,
    fail_after_group,
    pass_items,
    pass_rows,
    run_to_end,
)
from oncelog.trial.judgement import row_id
from oncelog.trial.plan import Strike, TargetKind
from oncelog.trial.targets import target_of


def write_file(path: Path, *ids: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table({"id": [str(number) for number in ids]}), path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make a directory as a killed driver leaves it: with a committed, an uncommitted and an incomplete
    file.
    """
    write_file(tmp_path / "a.parquet", 0, 1)
    write_file(tmp_path / "day=1" / "b.parquet", 1)
    write_file(tmp_path / "_temporary" / "c.parquet", 7)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 half a file")
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    (log / "0").write_text("v1\n" + json.dumps({"path": f"file://{tmp_path}/a.parquet", "action": "add"}))
    (log / ".0.crc").write_bytes(b"\xff")
    return tmp_path


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize(
    ("kind", "ids", "remark"),
    [
        (TargetKind.PARQUET, ["0", "1", "1"], "1 unreadable file"),
        (TargetKind.PARQUET_COMMITTED, ["0", "1"], ""),
    ],
)
def test_files_are_read_as_readers_see_them(
    directory: Path, kind: TargetKind, ids: list[str], remark: str
) -> None:
    target = target_of(kind, "unused", directory, "unused", "id")
    assert sorted(row["id"] for row in target.read()) == ids
    assert (target.remark, target.count_writes(), target.address) == (remark, 2, str(directory))


@pytest.mark.parametrize("kind", [TargetKind.PARQUET, TargetKind.DELTA, TargetKind.ICEBERG])
def test_a_file_that_spark_has_only_opened_is_no_write(kind: TargetKind, tmp_path: Path) -> None:
    pytest.importorskip({"delta": "deltalake", "iceberg": "pyiceberg"}.get(kind.value, "pyarrow"))
    target, file = target_of(kind, "unused", tmp_path, "unused", "id"), tmp_path / "a.parquet"
    schema = pa.schema([("id", pa.string())])
    file.touch()
    assert target.count_writes() == 0
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        writer.write_table(pa.table({"id": ["0"]}))
        assert target.count_writes() == 0  # it has no footer
    assert target.count_writes() == 1
    write_file(tmp_path / "b.parquet")  # a file without rows, which Spark writes for an empty micro-batch
    assert target.count_writes() == 1
    write_file(tmp_path / "c.parquet", 1)
    assert target.count_writes() == 2
    file.unlink()
    assert target.count_writes() == 1


@pytest.mark.parametrize("kind", [TargetKind.PARQUET, TargetKind.DELTA])
def test_only_columns_that_may_contain_the_id_are_read(kind: TargetKind, tmp_path: Path) -> None:
    """The column `until` has a date after the year 9999, which Python cannot represent. It must not be
    read.
    """
    rows = pa.table({"id": ["0", "1"], "until": pa.array([2**62] * 2, pa.timestamp("us"))})
    if kind is TargetKind.DELTA:
        pytest.importorskip("deltalake").write_deltalake(tmp_path, rows)
    else:
        pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    assert list(target_of(kind, "unused", tmp_path, "unused", "id").read()) == [{"id": "0"}, {"id": "1"}]


def test_rows_without_any_column_for_an_id_are_not_lost(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"number": [0, 1]}), tmp_path / "a.parquet")
    rows = target_of(TargetKind.PARQUET, "unused", tmp_path, "unused", "id").read()
    assert [row_id(row, "id") for row in rows] == [None, None]


def test_an_empty_directory_has_no_rows(tmp_path: Path) -> None:
    for kind in (TargetKind.PARQUET, TargetKind.PARQUET_COMMITTED):
        assert list(target_of(kind, "unused", tmp_path, "unused", "id").read()) == []


def test_a_folder_that_vanishes_while_writes_are_counted_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the trial counts files, Spark's commit protocol may remove the folder `_temporary`."""
    scandir = os.scandir

    def vanished(path: str) -> Any:
        if Path(path).name in ("_temporary", "day=1"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanished)
    target = target_of(TargetKind.PARQUET, "unused", directory, "unused", "id")
    assert target.count_writes() == 1


def test_a_column_in_folders_may_begin_with_an_underscore(tmp_path: Path) -> None:
    """R1395: Spark reads folders such as `_day=1`, and its rows were lost for the trial."""
    for folder in ("_day=1", "_temporary", ".hidden=1"):
        (tmp_path / folder).mkdir()
        pyarrow.parquet.write_table(pa.table({"id": [folder]}), tmp_path / folder / "part-0.parquet")
    target = target_of(TargetKind.PARQUET, "unused", tmp_path, "unused", "id")
    assert (list(target.read()), target.count_writes()) == ([{"id": "_day=1"}], 1)


def test_a_delta_table_is_read_whole(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    target = target_of(TargetKind.DELTA, "unused", tmp_path / "table", "unused", "id")
    assert list(target.read()) == []
    deltalake.write_deltalake(tmp_path / "table", pa.table({"id": ["0", "1"]}))
    assert sorted(row["id"] for row in target.read()) == ["0", "1"]
    assert target.count_writes() == 1


def test_an_iceberg_table_is_read_as_its_catalog_says(tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import CommitFailedException

    target = target_of(TargetKind.ICEBERG, "unused", tmp_path, "unused", "id")
    assert list(target.read()) == [] and target.count_writes() == 0
    catalog = load_catalog("test", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=tmp_path.as_uri())
    rows = pa.table({"id": ["0", "1"]})
    catalog.create_namespace("lake")
    catalog.create_table("lake.rows", rows.schema, properties={"commit.retry.num-retries": "0"})
    late = catalog.load_table("lake.rows")
    catalog.load_table("lake.rows").append(rows)
    with pytest.raises(CommitFailedException):
        late.append(rows)
    assert sorted(row["id"] for row in target.read()) == ["0", "1"]
    assert target.count_writes() >= 1


def test_the_rows_of_a_sqlite_database_are_those_with_an_id(tmp_path: Path) -> None:
    target = target_of(TargetKind.SQLITE, "unused", tmp_path, "unused", "id")
    assert list(target.read()) == [] and target.count_writes() == 0
    with closing(sqlite3.connect(target.address)) as database, database:
        database.execute('CREATE TABLE "the ""rows""" (id TEXT, value TEXT)')
        database.execute("CREATE TABLE batches (query TEXT, batch INTEGER)")
        database.execute("INSERT INTO batches VALUES ('q', 1)")
        database.executemany('INSERT INTO "the ""rows""" VALUES (?, ?)', [("0", "a"), ("1", "b")])
    assert [row["id"] for row in target.read()] == ["0", "1"]
    with closing(sqlite3.connect(target.address, isolation_level=None)) as database:
        assert target.count_writes() == 2
        database.execute("BEGIN EXCLUSIVE")
        assert target.count_writes() is None
        database.execute("ROLLBACK")


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ("ID INTEGER, value TEXT, more AS (ID + 1)", ["0", "1"]),
        ("key TEXT, value TEXT", ["0", "1"]),
        ("number INTEGER, text TEXT", [None, None, None]),
    ],
)
def test_rows_of_sqlite_are_not_lost_because_their_id_has_another_place(
    columns: str, found: list[str | None], tmp_path: Path
) -> None:
    target = target_of(TargetKind.SQLITE, "unused", tmp_path, "unused", "id")
    with closing(sqlite3.connect(target.address)) as database, database:
        database.execute(f"CREATE TABLE orders ({columns})")
        database.execute("CREATE TABLE batches (batch INTEGER)")
        database.execute("INSERT INTO batches VALUES (7)")
        database.executemany("INSERT INTO orders VALUES (?, ?)", [("0", "a"), ("1", "b")])
    assert [row_id(row, "id") for row in target.read()] == found


def test_without_a_log_of_spark_every_file_is_committed(directory: Path) -> None:
    """Only Spark's file sink writes the log `_spark_metadata`. A query with `foreachBatch` has none."""
    shutil.rmtree(directory / "_spark_metadata")
    target = target_of(TargetKind.PARQUET_COMMITTED, "unused", directory, "unused", "id")
    assert sorted(row["id"] for row in target.read()) == ["0", "1", "1"]


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [(TargetKind.DELTA, "deltalake", "delta"), (TargetKind.ICEBERG, "pyiceberg", "iceberg")],
)
def test_a_target_without_its_package_names_it(
    kind: TargetKind, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"pip install 'oncelog\[{extra}\]'"):
        target_of(kind, "unused", tmp_path, "unused", "id")


def batches(count: int) -> Iterator[pa.RecordBatch]:
    for number in range(count):
        yield pa.record_batch({"id": [number]})


class Control:
    """A control directory, and tasks of a stage whose rows pass through the fault point."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.strikes = directory, Strikes(directory)
        self.attempt = Attempt()
        monkeypatch.setattr(fault_point, "_attempt", lambda: self.attempt)
        # While a task waits at the fault point, the trial counts the files. So count them here.
        monkeypatch.setattr(fault_point, "_wait_while", lambda *_: self.strikes.look(1))

    def passed(
        self,
        count: int,
        *,
        stage: int = 0,
        partition: int = 0,
        attempt: int = 0,
        strike: Strike = Strike.RAISE,
    ) -> list[int]:
        """Return the ids of the rows that a task passes on. If the task then fails, -1 follows them."""
        ids, self.attempt = [], Attempt(stage, partition, attempt)
        rows = pass_rows(batches(count), control=str(self.directory), strike=strike.value, driver="d")
        try:
            for batch in rows:
                ids += batch.column("id").to_pylist()
        except TaskFault:
            ids.append(-1)
        return ids


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    return Control(tmp_path, monkeypatch)


def test_a_task_fails_once_in_the_middle_of_its_rows(control: Control) -> None:
    assert control.passed(4) == [0, 1, 2, 3]
    control.strikes.arm()
    assert control.passed(0) == []
    assert control.passed(4) == [0, 1, -1]
    assert control.strikes.has_begun
    assert control.passed(4) == [0, 1, 2, 3]


def test_a_task_with_few_rows_fails_behind_them(control: Control) -> None:
    control.strikes.arm()
    assert control.passed(1) == [0, -1]


def test_a_task_fails_in_the_middle_of_the_items_of_an_rdd(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_point, "_ITEMS_BEFORE", 2)
    options = {"control": str(control.directory), "strike": Strike.RAISE.value, "driver": "d"}
    assert list(pass_items(range(4), **options)) == [0, 1, 2, 3]
    control.strikes.arm()
    items = pass_items(range(4), **options)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(TaskFault):
        next(items)


def test_a_task_fails_after_its_function(control: Control) -> None:
    """R1580: a function that writes all rows of a task at its end was repeated only before that write."""
    options = {"control": str(control.directory), "strike": Strike.RAISE.value, "driver": "d"}
    written: list[int] = []

    def write(parts: Iterator[list[int]]) -> Iterator[int]:
        written.extend(number for part in parts for number in part)
        yield len(written)

    def task(*parts: list[int], attempt: int) -> Iterator[int]:
        control.attempt = Attempt(number=attempt)
        return run_to_end(write, len, options, iter(parts))

    assert list(task([1], attempt=0)) == [1]
    control.strikes.arm()
    assert list(task([], attempt=1)) == [1]  # a task without rows proves nothing
    failing = task([2], [3], attempt=2)
    assert next(failing) == 3
    with pytest.raises(TaskFault):
        next(failing)
    assert written == [1, 2, 3] and not control.strikes.has_counted
    assert list(task([2], [3], attempt=3)) == [5]
    assert control.strikes.has_counted


@pytest.mark.parametrize("strike", [Strike.KILL_EXECUTOR, Strike.KILL_SPARK_WORKER])
def test_no_second_executor_is_killed_after_a_function(control: Control, strike: Strike) -> None:
    options = {"control": str(control.directory), "strike": strike.value, "driver": "d"}
    control.strikes.arm()
    assert list(run_to_end(iter, len, options, iter([[1]]))) == [[1]]


def test_a_task_fails_after_the_function_of_a_group(control: Control) -> None:
    """R1580: no task failed in `applyInPandas`, whose function may write the rows of a group."""
    options = {"control": str(control.directory), "strike": Strike.RAISE.value, "driver": "d"}
    written = []

    def write(key: tuple[int], rows: int) -> int:
        written.append((*key, rows))
        return rows

    def write_all(rows: Iterator[int]) -> Iterator[int]:
        yield from rows

    wrapped = fail_after_group(write, options)
    # Spark passes as many arguments as the function has parameters.
    assert inspect.getfullargspec(wrapped).args == ["key", "rows"]
    control.strikes.arm()
    with pytest.raises(TaskFault):
        wrapped((7,), 5)
    control.attempt = Attempt(number=1)
    assert wrapped((7,), 5) == 5 and written == [(7, 5), (7, 5)]
    assert control.strikes.has_counted
    control.attempt = Attempt(stage=1)
    parts = fail_after_group(write_all, options)(iter([1]))
    assert next(parts) == 1
    with pytest.raises(TaskFault):
        next(parts)


def test_a_job_that_only_looks_at_a_micro_batch_does_not_use_up_the_fault(control: Control) -> None:
    control.strikes.arm()
    assert control.passed(4, stage=1) == [0, 1, -1]
    # This fault does not count: Spark does not repeat a failed task that `isEmpty()` no longer needs, so the
    # job does not fail.
    assert not control.strikes.has_counted
    assert control.passed(4, stage=2) == [0, 1, -1]
    assert control.passed(4, stage=2, attempt=1) == [0, 1, 2, 3]
    assert control.strikes.has_counted


@pytest.mark.behaviour("P7")
def test_only_another_attempt_at_the_task_that_failed_is_its_repetition(control: Control) -> None:
    """Spark may repeat another task of the stage. A second step sees the attempt that fails, too."""
    control.strikes.arm()
    assert control.passed(4, partition=1, attempt=7) == [0, 1, -1]
    for partition, attempt in ((1, 7), (0, 8)):
        assert control.passed(4, partition=partition, attempt=attempt) == [0, 1, 2, 3]
        assert not control.strikes.has_counted
    assert control.passed(4, partition=1, attempt=9) == [0, 1, 2, 3]
    assert control.strikes.has_counted


def test_a_task_waits_for_a_write_of_its_own_stage(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = iter((0, 3, 3, 4))
    seen = []

    def wait(condition: Callable[[], bool], *_: float) -> None:
        for _ in range(2):
            control.strikes.look(next(writes))
            seen.append(condition())

    monkeypatch.setattr(fault_point, "_wait_while", wait)
    control.strikes.arm()
    control.passed(4, stage=1)
    control.passed(4, stage=2)
    assert seen == [True, False, True, False]


def test_a_query_that_fails_with_its_task_is_not_struck_again(control: Control) -> None:
    control.strikes.arm()
    control.strikes.query_failed()
    assert not control.strikes.has_counted
    assert control.passed(4, stage=1) == [0, 1, -1]
    control.strikes.query_failed()
    assert control.strikes.has_counted
    assert control.passed(4, stage=2) == [0, 1, 2, 3]


def test_a_worker_is_killed_with_sigkill(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    control.strikes.arm()
    assert control.passed(3, strike=Strike.KILL_WORKER) == [0, 1, -1]
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_an_executor_is_killed_with_the_worker_of_the_task(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark starts an executor, the executor a daemon of Python, and the daemon the worker of a task."""
    executor = "java org.apache.spark.executor.CoarseGrainedExecutorBackend --driver-url x"
    processes = {os.getpid(): (70, "python"), 70: (60, "python"), 60: (50, executor), 50: (1, "java Driver")}
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    monkeypatch.setattr(fault_point, "_parent_and_command", processes.__getitem__)
    control.strikes.arm()
    assert control.passed(3, strike=Strike.KILL_EXECUTOR) == [0, 1, -1]
    assert killed == [(60, signal.SIGKILL), (os.getpid(), signal.SIGKILL)]


def test_a_task_asks_the_trial_to_kill_the_spark_worker_of_its_executor(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = "java org.apache.spark.executor.CoarseGrainedExecutorBackend --worker-url x"
    worker = "java org.apache.spark.deploy.worker.Worker --host 127.0.0.1"
    processes = {os.getpid(): (70, "python"), 70: (60, executor), 60: (1, worker)}
    monkeypatch.setattr(fault_point, "_parent_and_command", processes.__getitem__)
    control.strikes.arm()
    # The task waits while its executor lives, and fails if it survives.
    assert control.passed(3, strike=Strike.KILL_SPARK_WORKER) == [0, 1, -1]
    assert (control.strikes.take_kills(), control.strikes.take_kills()) == ([60], [])
    assert control.passed(3, attempt=1, strike=Strike.KILL_SPARK_WORKER) == [0, 1, 2]
    assert control.strikes.has_counted


def test_a_task_that_no_executor_runs_is_no_fault(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a local master, the JVM of the driver runs the tasks."""
    processes = {os.getpid(): (60, "python"), 60: (50, "java SparkSubmit"), 50: (1, "python")}
    monkeypatch.setattr(fault_point, "_parent_and_command", processes.__getitem__)
    control.strikes.arm()
    with pytest.raises(RuntimeError, match="no process above this Python worker is a Coarse"):
        control.passed(3, strike=Strike.KILL_EXECUTOR)
    control.strikes.query_failed()
    assert not control.strikes.has_counted


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux has /proc")
def test_the_parent_and_the_command_of_a_process_are_read(tmp_path: Path) -> None:
    program = tmp_path / "a (strange) name"
    program.symlink_to(sys.executable)
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE) as process:
        # A process has its command line a moment after Popen returns.
        wait_until(lambda: fault_point._parent_and_command(process.pid)[1])
        parent, command = fault_point._parent_and_command(process.pid)
        process.kill()
    assert parent == os.getpid() and "strange" in command


# -- docs/trial.md ----------------------------------------------------------------------------------------


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_trial_page", ROOT / "tools" / "trial_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trial_page = _load_tool()


def test_the_measured_table_is_that_of_the_runs() -> None:
    page = trial_page.PAGE.read_text()
    assert trial_page.page_with(trial_page.render(trial_page.load_runs()), page) == page, (
        "run: python tools/trial_page.py"
    )


def test_the_runs_have_the_words_of_the_cells() -> None:
    from oncelog.trial.plan import CELLS

    texts = {cell.name: cell.fault for cell in CELLS}
    runs = trial_page.load_runs().items()
    assert [
        (name, row["cell"]) for name, rows in runs for row in rows if row["fault"] != texts[row["cell"]]
    ] == []


def test_the_table_says_which_faults_did_not_happen() -> None:
    facts = {"pipeline": "mine.py", "target": "topic", "rows": "9", "cluster": "ours", "Spark": "4.3.0"}

    def row(cell: str, lost: int | None, doubled: int | None, verdict: str, happened: str = "yes") -> object:
        return {
            "cell": cell, "fault": f"the fault {cell}", "happened": happened, "lost": lost,
            "doubled": doubled, "verdict": verdict, "seconds": 4.4, "facts": facts,
        }  # fmt: skip

    one = [row("calm", 0, 0, "clean"), row("lost", 1, 5, "violated"), row("late", None, None, "failed")]
    other = [row("calm", 0, 0, "fault did not happen", "no"), row("late", 0, 0, "cannot happen", "-")]
    lines = trial_page.render({"one": one, "other": other}).splitlines()
    assert lines[2:5] == [
        "| `calm`: the fault calm | 0/0 | did not happen (0/0) |",
        "| `lost`: the fault lost | 1/5 | not run |",
        "| `late`: the fault late | failed | - |",
    ]
    assert lines[-1] == "| `mine.py`, topic on ours | 9 | ours | Spark 4.3.0 |"
    embedded = [{**row, "facts": {**facts, "cluster": "the embedded broker"}} for row in other]
    assert trial_page.render({"other": embedded}).startswith("| fault | `mine.py`, topic |")


def test_a_fault_that_cannot_happen_is_not_said_to_be_left_out() -> None:
    facts = {"pipeline": "mine.py", "target": "parquet", "rows": "9", "cluster": "ours"}
    rows = [{"cell": "calm", "fault": "none", "facts": facts}]
    topic = [{"cell": "calm", "fault": "none", "facts": {**facts, "target": "topic"}}]
    master = [{"cell": "calm", "fault": "none", "facts": {**facts, "target": "topic", "master": "spark://"}}]
    texts = [
        [trial_page.cell_text(cell, run) for run in (rows, topic, master)]
        for cell in ("driver-in-commit", "task-fails", "spark-worker-killed")
    ]
    assert texts == [["-", "not run", "not run"], ["not run"] * 3, ["-", "-", "not run"]]


def test_cells_that_were_run_again_replace_the_earlier_ones() -> None:
    facts = {"pipeline": "mine.py", "target": "topic", "rows": "9", "cluster": "ours", "Oncelog": "1"}
    rows = [{"cell": cell, "lost": 0, "facts": facts} for cell in ("calm", "answers-cut")]
    again = [{"cell": cell, "lost": 1, "facts": facts} for cell in ("answers-cut", "task-fails")]
    found = [(row["cell"], row["lost"]) for row in trial_page.merged(rows, again)]
    assert found == [("calm", 0), ("task-fails", 1), ("answers-cut", 1)]
    with pytest.raises(ValueError, match="runs of different pipelines"):
        trial_page.merged(rows, [{**again[0], "facts": {**facts, "cluster": "another"}}])


def test_the_page_describes_every_cell_and_target() -> None:
    from oncelog.trial.plan import CELLS

    page = trial_page.PAGE.read_text()
    assert [cell.name for cell in CELLS if f"| `{cell.name}` |" not in page] == []
    assert [kind.value for kind in TargetKind if f"| `{kind.value}` |" not in page] == []
