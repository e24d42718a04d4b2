"""The pipelines that append a topic to a table: rows of repeated micro-batches are added once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from support.pipeline.pipelines import EXAMPLES
from support.postgresql import PostgresqlServer
from support.wait import wait_until

from oncelog.local_audit.tables.postgresql_table import connect, parse_database

pytestmark = [pytest.mark.behaviour("P9"), pytest.mark.spark]


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DeltaCase:
    """A Delta Lake table. `open` returns the table's current state, to which `append` writes."""

    def __init__(self, directory: Path) -> None:
        deltalake = pytest.importorskip("deltalake", reason="needs the package deltalake")
        self.example = load_example("to_delta")
        self.refusal = deltalake.exceptions.CommitFailedError
        self._path, self._delta_table = str(directory), deltalake.DeltaTable
        deltalake.DeltaTable.create(self._path, self.example.COLUMNS)

    def open(self) -> Any:
        return self._delta_table(self._path)

    def offsets(self) -> list[tuple[int, int]]:
        return located(self.open().to_pyarrow_table())

    def version(self) -> int:
        return int(self.open().version())


class IcebergCase:
    """An Iceberg table. SQLite stores its catalog."""

    def __init__(self, directory: Path) -> None:
        pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import CommitFailedException

        self.example = load_example("to_iceberg")
        self.refusal = CommitFailedException
        uri = f"sqlite:///{directory}/catalog.db"
        self.catalog = load_catalog("test", uri=uri, warehouse=directory.as_uri())
        self.catalog.create_namespace("lake")
        self.catalog.create_table("lake.rows", self.example.COLUMNS, properties=self.example.NO_RETRY)

    def open(self) -> Any:
        return self.catalog.load_table("lake.rows")

    def offsets(self) -> list[tuple[int, int]]:
        return located(self.open().scan().to_arrow())

    def version(self) -> int:
        return len(self.open().snapshots())


class PostgresqlCase:
    """A table of a PostgreSQL database. `open` begins a transaction, in which `append` adds rows."""

    def __init__(self, server: PostgresqlServer) -> None:
        self.example = load_example("to_postgresql")
        self._server, self.table = server, f"{server.new_schema()}.orders"
        server.execute(*(text.format(table=self.table) for text in self.example.TABLES))

    def append(self, rows: Any, batch_id: int) -> None:
        with self.open() as connection:
            self.example.append(connection, self.table, rows, batch_id)

    def open(self) -> Any:
        return connect(parse_database(self._server.url))

    def offsets(self) -> list[tuple[int, int]]:
        return self._server.execute(f'SELECT "partition", "offset" FROM {self.table} ORDER BY 1, 2')

    def stored(self) -> list[tuple[Any, ...]]:
        return self._server.execute(f"SELECT * FROM {self.table}_offsets ORDER BY 1, 2")


def located(table: Any) -> list[tuple[int, int]]:
    return sorted(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))


Case = DeltaCase | IcebergCase
EVERY_TABLE = pytest.mark.parametrize("new_case", [DeltaCase, IcebergCase], ids=["delta", "iceberg"])


def records(partition: int, offsets: range) -> Any:
    count = len(offsets)
    return pa.table(
        {
            "topic": ["orders"] * count,
            "partition": pa.array([partition] * count, pa.int32()),
            "offset": list(offsets),
            "timestamp": pa.array([0] * count, pa.timestamp("us", "UTC")),
            "key": [b"k"] * count,
            "value": [b"v"] * count,
        }
    )


@EVERY_TABLE
def test_rows_that_come_again_are_added_once(new_case: Callable[[Path], Case], tmp_path: Path) -> None:
    case = new_case(tmp_path)
    first = pa.concat_tables([records(1, range(4)), records(0, range(10))])
    case.example.append(case.open(), first)
    version = case.version()
    case.example.append(case.open(), first)
    assert case.version() == version, "a repeated micro-batch makes no commit"
    # After a start with another checkpoint, the micro-batches begin at other offsets.
    case.example.append(case.open(), pa.concat_tables([records(0, range(7, 20)), records(2, range(5, 6))]))
    case.example.append(case.open(), records(1, range(6)))
    expected = [(0, n) for n in range(20)] + [(1, n) for n in range(6)] + [(2, 5)]
    assert case.offsets() == expected


@EVERY_TABLE
def test_new_rows_are_not_filtered(
    new_case: Callable[[Path], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = new_case(tmp_path)
    case.example.append(case.open(), records(0, range(3)))
    monkeypatch.setattr(case.example, "pc", None)  # without pyarrow.compute, no filter can be made
    case.example.append(case.open(), pa.concat_tables([records(0, range(3, 5)), records(1, range(2))]))
    assert case.offsets() == [*((0, n) for n in range(5)), (1, 0), (1, 1)]


@EVERY_TABLE
@pytest.mark.parametrize("has_rows", [False, True], ids=["empty", "filled"])
def test_a_second_driver_with_the_same_rows_is_refused(
    new_case: Callable[[Path], Case], tmp_path: Path, has_rows: bool
) -> None:
    case = new_case(tmp_path)
    if has_rows:
        case.example.append(case.open(), records(0, range(3)))
    rows = records(0, range(3, 9))
    late = case.open()
    case.example.append(case.open(), rows)
    with pytest.raises(case.refusal):
        case.example.append(late, rows)
    case.example.append(case.open(), rows)
    assert case.offsets() == [(0, n) for n in range(0 if has_rows else 3, 9)]


def test_the_snapshot_of_an_iceberg_table_names_the_offsets_that_it_added(tmp_path: Path) -> None:
    case = IcebergCase(tmp_path)
    case.example.append(case.open(), records(0, range(3)))
    case.example.append(case.open(), records(0, range(2, 9)))
    summary = case.open().current_snapshot().summary
    assert summary["kafka.offsets"] == '{"orders-0": [3, 8]}'
    assert case.open().properties["kafka.offset.orders-0"] == "8"


def test_an_iceberg_table_that_repeats_commits_is_refused(tmp_path: Path) -> None:
    case = IcebergCase(tmp_path)
    case.catalog.create_table("lake.other", case.example.COLUMNS)
    with pytest.raises(ValueError, match=r"commit\.retry\.num-retries"):
        case.example.append(case.catalog.load_table("lake.other"), records(0, range(3)))


def test_rows_that_come_again_are_added_to_a_database_once(postgresql: PostgresqlServer) -> None:
    case = PostgresqlCase(postgresql)
    first = pa.concat_tables([records(1, range(4)), records(0, range(10))])
    case.append(first, 0)
    case.append(first, 0)
    assert case.stored() == [("orders", 0, 9, 0), ("orders", 1, 3, 0)]
    # After a start with another checkpoint, the micro-batches begin at other offsets.
    case.append(pa.concat_tables([records(0, range(7, 20)), records(2, range(5, 6))]), 0)
    case.append(records(1, range(6)), 1)
    assert case.offsets() == [*((0, n) for n in range(20)), *((1, n) for n in range(6)), (2, 5)]
    assert case.stored() == [("orders", 0, 19, 0), ("orders", 1, 5, 1), ("orders", 2, 5, 0)]


def test_new_rows_are_not_filtered_for_a_database(
    postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = PostgresqlCase(postgresql)
    case.append(records(0, range(3)), 0)
    monkeypatch.setattr(case.example, "pc", None)  # without pyarrow.compute, no filter can be made
    case.append(pa.concat_tables([records(0, range(3, 5)), records(1, range(2))]), 1)
    assert case.offsets() == [*((0, n) for n in range(5)), (1, 0), (1, 1)]


def test_a_transaction_that_does_not_commit_adds_neither_rows_nor_offsets(
    postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = PostgresqlCase(postgresql)
    monkeypatch.setattr(case.example, "SET_OFFSETS", "SELECT 1 / 0")
    with pytest.raises(case.example.dbapi.Error):
        case.append(records(0, range(3)), 0)
    assert (case.offsets(), case.stored()) == ([], [])
    monkeypatch.undo()
    case.append(records(0, range(3)), 0)
    assert case.offsets() == [(0, 0), (0, 1), (0, 2)]


def test_a_second_driver_waits_for_the_first_one_and_adds_nothing_again(postgresql: PostgresqlServer) -> None:
    case = PostgresqlCase(postgresql)
    rows, done = records(0, range(5)), Event()

    def add_the_same_rows() -> None:
        case.append(rows, 0)
        done.set()

    with ThreadPoolExecutor(1) as second_driver, case.open() as first:
        with first.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {case.table}_offsets IN SHARE ROW EXCLUSIVE MODE")
        second = second_driver.submit(add_the_same_rows)
        wait_until(lambda: postgresql.execute("SELECT 1 FROM pg_locks WHERE NOT granted"))
        assert not done.is_set()
        case.example.append(first, case.table, rows, 0)
        second.result()
    assert case.offsets() == [(0, n) for n in range(5)]
