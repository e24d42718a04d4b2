"""A driver is killed between two lines of a function of foreachBatch, or a line fails. The driver is a
stand-in.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from support.trial import StandInDriver, trial_of

from oncelog import Broker, TopicPartition
from oncelog.trial import held_lines, run
from oncelog.trial.fault_point import ARMED
from oncelog.trial.held_lines import AT_LINE, FUNCTION, HeldLines, LineAnnouncer, WriteFault
from oncelog.trial.judgement import Verdict
from oncelog.trial.plan import Strike, TargetKind, choose_cells
from oncelog.trial.run import Outcome, Trial, run_cell


def note_before(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    with database:
        database.execute("INSERT INTO batches VALUES (?)", (number,))
    with database:
        database.executemany("INSERT INTO rows VALUES (?)", rows)


def note_after(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    with database:
        database.executemany("INSERT INTO rows VALUES (?)", rows)
    with database:
        database.execute("INSERT INTO batches VALUES (?)", (number,))


def note_with(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    with database:
        database.execute("INSERT INTO batches VALUES (?)", (number,))
        database.executemany("INSERT INTO rows VALUES (?)", rows)


def note_in_another_transaction(database: sqlite3.Connection, number: int) -> bool:
    (_, _, file), *_ = database.execute("PRAGMA database_list")
    with closing(sqlite3.connect(file)) as other, other:
        other.execute("INSERT INTO batches VALUES (?)", (number,))
    return True


def note_within(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    with database:
        note_in_another_transaction(database, number)
        database.executemany("INSERT INTO rows VALUES (?)", rows)


def note_at_once(database: sqlite3.Connection, number: int) -> sqlite3.Cursor:
    return database.execute("INSERT INTO batches VALUES (?)", (number,))


def note_on_the_same_line(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    database.isolation_level = None
    note_at_once(database, number) and database.executemany("INSERT INTO rows VALUES (?)", rows)


def touch_note(database: sqlite3.Connection, number: int) -> None:
    """Note a micro-batch in a file beside the database."""
    (_, _, file), *_ = database.execute("PRAGMA database_list")
    Path(f"{file}.{number}").touch()


PACKAGE = """
def transactional(function):
    def call(database, *arguments):
        with database:
            function(database, *arguments)
    return call
"""
package: dict[str, Any] = {}
exec(compile(PACKAGE, "/usr/lib/python3/site-packages/package.py", "exec"), package)


def note_before_a_package_commits(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    (_, _, file), *_ = database.execute("PRAGMA database_list")
    database.executemany("INSERT INTO rows VALUES (?)", rows)
    Path(f"{file}.{number}").touch()


def note_within_a_lock(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    with database:
        database.execute("BEGIN EXCLUSIVE")
        touch_note(database, number)
        database.executemany("INSERT INTO rows VALUES (?)", rows)


def ignore_errors(database: sqlite3.Connection, number: int, rows: list[tuple[str]]) -> None:
    with suppress(Exception):
        note_with(database, number, rows)


class Killed(Exception):
    pass


class BatchDriver(StandInDriver):
    """Calls a function of foreachBatch for each micro-batch, and dies at a line of it."""

    write: Callable[[sqlite3.Connection, int, list[tuple[str]]], None]

    def __init__(self, job: Any, settings: Any, log_file: Path, control: Path, strike: Strike | None) -> None:
        super().__init__(job, settings, log_file, control, strike)
        self._announcer, self._armed = LineAnnouncer(control), control / ARMED
        (control / FUNCTION).touch()

    def _micro_batch(self, consumer: Any, producer: Any) -> None:
        with suppress(Killed, WriteFault):
            super()._micro_batch(consumer, producer)

    def _copy(self, consumer: Any, _producer: Any, begin: Any, ends: Any) -> None:
        rows = [
            (row["key"].decode(),)
            for partition, end in ends.items()
            for batch in consumer.fetch_range(
                TopicPartition(self._source, partition), begin.get(partition, 0), end
            )
            for row in batch.select(["key"]).to_pylist()
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(held_lines, "_pause", self._wait_or_die)
            self._write(sum(ends.values()), rows)

    def _wait_or_die(self) -> None:
        if self._stop.wait(0.002):
            raise Killed

    def _write(self, number: int, rows: list[tuple[str]]) -> None:
        with closing(sqlite3.connect(self.settings["TARGET"])) as file:
            file.execute("CREATE TABLE IF NOT EXISTS rows (id TEXT)")
            file.execute("CREATE TABLE IF NOT EXISTS batches (number INTEGER PRIMARY KEY)")
            is_noted = Path(f"{self.settings['TARGET']}.{number}").exists()
            if not (is_noted or file.execute("SELECT 1 FROM batches WHERE number = ?", (number,)).fetchone()):
                self._announcer.call(type(self).write, file, number, rows)
                while self._armed.exists():
                    self._wait_or_die()


class IcebergDriver(BatchDriver):
    """Calls a function of foreachBatch that appends each micro-batch to a table and notes it."""

    append: Callable[[Any, pa.Table, Path], None]

    def _write(self, number: int, rows: list[tuple[str]]) -> None:
        note = Path(self.settings["TARGET"], f"noted-{number}")
        columns = pa.table({"id": pa.array([name for (name,) in rows], pa.string())})
        table = self._table(columns.schema)
        if not (note.exists() or self._has_note(table, note.name)):
            self._announcer.call(type(self).append, table, columns, note)
            while self._armed.exists():
                self._wait_or_die()

    def _table(self, schema: pa.Schema) -> Any:
        from pyiceberg.catalog import load_catalog

        place = self.settings["TARGET"]
        catalog = load_catalog(
            "c", type="sql", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}"
        )
        catalog.create_namespace_if_not_exists("lake")
        return catalog.create_table_if_not_exists("lake.rows", schema)

    def _has_note(self, table: Any, name: str) -> bool:
        return name in table.properties


class DeltaDriver(IcebergDriver):
    def _table(self, schema: pa.Schema) -> Any:
        from deltalake import DeltaTable

        DeltaTable.create(self.settings["TARGET"], schema, mode="ignore")
        return DeltaTable(self.settings["TARGET"])

    def _has_note(self, table: Any, name: str) -> bool:
        return table.transaction_version(name) is not None


def iceberg_with_note_within(table: Any, rows: pa.Table, note: Path) -> None:
    with table.transaction() as transaction:
        transaction.append(rows)
        note.touch()


def iceberg_with_note_after(table: Any, rows: pa.Table, note: Path) -> None:
    with table.transaction() as transaction:
        transaction.append(rows)
    note.touch()


def iceberg_with_note(table: Any, rows: pa.Table, note: Path) -> None:
    with table.transaction() as transaction:
        transaction.append(rows)
        transaction.set_properties({note.name: "yes"})


def delta_file(rows: pa.Table, note: Path) -> list[Any]:
    from deltalake.transaction import AddAction

    number = len(list(note.parent.glob("*.parquet")))
    file = note.with_name(f"{number}.parquet")
    pyarrow.parquet.write_table(rows, file)
    statistics = json.dumps({"numRecords": rows.num_rows})
    return [AddAction(file.name, file.stat().st_size, {}, 0, True, statistics)]


def delta_with_note_within(table: Any, rows: pa.Table, note: Path) -> None:
    files = delta_file(rows, note)
    note.touch()
    table.create_write_transaction(files, "append", rows.schema)


def delta_with_note_after(table: Any, rows: pa.Table, note: Path) -> None:
    files = delta_file(rows, note)
    table.create_write_transaction(files, "append", rows.schema)
    note.touch()


def delta_with_note(table: Any, rows: pa.Table, note: Path) -> None:
    from deltalake import CommitProperties, Transaction

    properties = CommitProperties(app_transactions=[Transaction(note.name, 1)])
    files = delta_file(rows, note)
    table.create_write_transaction(files, "append", rows.schema, commit_properties=properties)


class NoteOfOffsets(StandInDriver):
    """Skips the rows whose offset is not above the highest one of any partition."""

    highest = -1

    def _copy(self, consumer: Any, producer: Any, begin: Any, ends: Any) -> None:
        before = self.highest
        for partition, end in ends.items():
            tp = TopicPartition(self._source, partition)
            for batch in consumer.fetch_range(tp, begin.get(partition, 0), end):
                for row in batch.select(["key", "value", "offset"]).to_pylist():
                    if row["offset"] > before:
                        producer.send(self.settings["TARGET"], row["value"], row["key"])
                    self.highest = max(self.highest, row["offset"])
        producer.flush()


@pytest.fixture
def trial(broker: Broker, tmp_path: Path) -> Trial:
    return trial_of(TargetKind.SQLITE, broker.bootstrap_servers, tmp_path)


def outcome_of(cell: str, trial: Trial, monkeypatch: pytest.MonkeyPatch, driver: type) -> Outcome:
    monkeypatch.setattr(run, "Driver", driver)
    (chosen,) = choose_cells([cell], trial.kind)
    return run_cell(trial, chosen)


@pytest.mark.behaviour("P7")
@pytest.mark.parametrize(
    ("cell", "write", "lost", "doubled"),
    [
        ("driver-at-write", note_before, True, False),
        ("driver-at-write", note_after, False, False),
        ("driver-at-write", note_with, False, False),
        ("driver-at-write", note_within, True, False),
        ("driver-at-write", note_on_the_same_line, True, False),
        ("driver-at-write", package["transactional"](note_before_a_package_commits), True, False),
        ("driver-at-write", note_within_a_lock, True, False),
        ("driver-in-write", note_after, False, True),
        ("driver-in-write", note_with, False, False),
        ("write-fails", ignore_errors, True, False),
        ("write-fails", note_with, False, False),
        ("write-fails", note_within, True, False),
    ],
)
def test_a_fault_between_two_lines_shows_what_a_function_of_foreachbatch_does_wrong(
    cell: str,
    write: Callable[..., None],
    lost: bool,
    doubled: bool,
    trial: Trial,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1581: no cell showed that a micro-batch is noted before its rows or directly after them, or that
    errors of a table's write are ignored. R1625: or that it is noted within the `with` block that commits
    its rows, or on the line that writes them. R1703: or in the last line of a function, before a package
    commits its rows. R1704: or while the function locks the target.
    """
    driver = type("Driver", (BatchDriver,), {"write": staticmethod(write)})
    outcome = outcome_of(cell, trial, monkeypatch, driver)
    assert outcome.has_happened and outcome.counts is not None, outcome
    assert (outcome.counts.lost > 0, outcome.counts.doubled > 0) == (lost, doubled), outcome


@pytest.mark.behaviour("P7")
def test_a_sink_that_compares_offsets_of_different_partitions_loses_rows(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1583: the partitions of the source had as many rows each, so that the sink lost nothing."""
    outcome = outcome_of("calm", replace(trial, kind=TargetKind.TOPIC), monkeypatch, NoteOfOffsets)
    assert outcome.verdict is Verdict.VIOLATED, outcome
    assert outcome.counts is not None and outcome.counts.lost > 0


@pytest.mark.parametrize("cell", ["driver-at-write", "write-fails"])
def test_a_query_without_a_function_of_foreachbatch_is_not_accused(
    cell: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = replace(trial, kind=TargetKind.TOPIC)
    outcome = outcome_of(cell, topic, monkeypatch, StandInDriver)
    assert outcome.verdict is Verdict.IMPOSSIBLE and "no function of foreachBatch" in outcome.detail, outcome


@pytest.mark.parametrize(
    ("cell", "append", "lost", "doubled"),
    [
        ("driver-at-write", iceberg_with_note_within, True, False),
        ("driver-at-write", iceberg_with_note_after, False, False),
        ("driver-at-write", iceberg_with_note, False, False),
        ("driver-in-write", iceberg_with_note_within, False, False),
        ("driver-in-write", iceberg_with_note_after, False, True),
        ("driver-in-write", iceberg_with_note, False, False),
        ("driver-at-write", delta_with_note_within, True, False),
        ("driver-at-write", delta_with_note_after, False, False),
        ("driver-at-write", delta_with_note, False, False),
        ("driver-in-write", delta_with_note_after, False, True),
        ("driver-in-write", delta_with_note, False, False),
    ],
)
def test_a_write_to_a_table_is_its_commit(
    cell: str,
    append: Callable[..., None],
    lost: bool,
    doubled: bool,
    trial: Trial,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1705: the line that writes was the line that appends, because a data file was new. R1750: then a
    correct function was said not to come to the fault. No cell doubled the rows of a function that notes a
    micro-batch after the commit, because the kill was before the commit.
    """
    is_delta = append.__name__.startswith("delta")
    pytest.importorskip("deltalake" if is_delta else "pyiceberg", reason="needs the package of the table")
    table = replace(trial, kind=TargetKind.DELTA if is_delta else TargetKind.ICEBERG)
    base = DeltaDriver if is_delta else IcebergDriver
    driver = type("Driver", (base,), {"append": staticmethod(append)})
    outcome = outcome_of(cell, table, monkeypatch, driver)
    assert outcome.has_happened and outcome.counts is not None, outcome
    assert (outcome.counts.lost > 0, outcome.counts.doubled > 0) == (lost, doubled), outcome


def test_the_line_that_writes_is_the_last_one_before_there_is_a_write(tmp_path: Path) -> None:
    lines, file = HeldLines(tmp_path), tmp_path / AT_LINE
    looks = [("a", 0), ("b", 0), ("c", 2), (None, 2), ("a", 2), ("b", 2), ("c", 4)]
    seen = []
    for line, writes in looks:
        if line is not None:
            file.write_text(line)
        lines.read()
        lines.look(writes)
        seen.append(lines.is_before_write)
        lines.release()
        assert not file.exists()
    assert seen == [False] * 5 + [True, False]


def test_the_line_before_the_end_of_a_with_block_fails(tmp_path: Path) -> None:
    lines = HeldLines(tmp_path)
    fails = []
    for number in range(2):
        for line, writes in (("1: with", 0), ("1: body", 0), ("2: with", 0), ("1: end", 2)):
            (tmp_path / AT_LINE).write_text(line)
            lines.read()
            lines.look(writes + 2 * number)
            lines.release()
            fails.append((tmp_path / held_lines.FAIL).exists())
        lines.arm()
    assert fails == [False] * 5 + [True] * 3


def test_a_line_within_a_lock_may_be_the_line_that_writes(tmp_path: Path) -> None:
    """R1704: such a line was passed over, because the writes cannot be counted there. But a function that
    locks the target commits its rows when it removes the lock.
    """
    lines, file = HeldLines(tmp_path), tmp_path / AT_LINE
    seen = []
    for line, writes in (("1: lock", 0), ("1: note", None), ("2: lock", None), ("1: end", 2), ("2: lock", 2)):
        file.write_text(line)
        lines.read()
        lines.look(writes)
        seen.append(lines.is_before_write)
    assert seen == [False] * 4 + [True]


def test_each_step_between_two_lines_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, announced = tmp_path / AT_LINE, []

    def release() -> None:
        announced.append(int(file.read_text().partition(" < ")[0].rpartition(":")[2]) - first)
        file.unlink()

    def write(rows: list[int]) -> int:
        total = 0
        for row in rows:
            total += sorted([row])[0]
        return total

    first = write.__code__.co_firstlineno
    monkeypatch.setattr(held_lines, "_pause", release)
    announcer = LineAnnouncer(tmp_path)
    assert announcer.call(write, [1, 2, 3]) == 6
    # The second 3 follows 2, and the second 2 follows 3.
    assert announced == [1, 2, 3, 2, 4]
    assert announcer.call(write, [4, 5]) == 9  # the next micro-batch
    assert announced == [1, 2, 3, 2, 4] * 2


def test_a_place_is_a_line_and_the_number_of_its_announcements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, announced = tmp_path / AT_LINE, []

    def release() -> None:
        place = file.read_text()
        what = place.partition(str(Path(__file__).parent))[0]
        announced.append((what, int(place.partition(" < ")[0].rpartition(":")[2]) - first))
        file.unlink()

    def noted() -> bool:
        return True

    def write() -> None:
        with suppress(ValueError):
            noted() and sorted([1])

    first = noted.__code__.co_firstlineno
    monkeypatch.setattr(held_lines, "_pause", release)
    LineAnnouncer(tmp_path).call(write)
    returned = "1: noted() has returned to "
    assert announced == [("1: ", 4), ("1: ", 5), ("1: ", 1), (returned, 5), ("2: ", 4)]


def test_a_place_is_also_the_end_of_a_function_that_a_package_has_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1703: the package may commit then."""
    file, announced = tmp_path / AT_LINE, []

    def release() -> None:
        announced.append(file.read_text().partition(str(Path(__file__).parent))[0])
        file.unlink()

    def write(_database: Any) -> None:
        pass

    monkeypatch.setattr(held_lines, "_pause", release)
    LineAnnouncer(tmp_path).call(package["transactional"](write), nullcontext())
    LineAnnouncer(tmp_path).call(write, None)
    assert announced == ["1: ", "1: write() has returned to a package", "1: "]
