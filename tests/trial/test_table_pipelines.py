"""The pipelines that append a topic to a table: rows of repeated micro-batches are added once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from support.pipeline.pipelines import EXAMPLES

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
