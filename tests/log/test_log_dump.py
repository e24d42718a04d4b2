"""`oncelog dump` on intact, torn and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.log.partitions import NOW_MS, TP, batch, config, marker, open_partition, put, put_marker

from oncelog.cli.dump import command
from oncelog.server.disk import RealDisk
from oncelog.types import Compression


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    partition = open_partition(RealDisk(tmp_path), config(index_interval_bytes=0))
    for number in range(4):
        codec = Compression.GZIP if number == 3 else Compression.NONE
        put(partition, batch(number, timestamp_ms=NOW_MS + number, compression=codec))
    put(partition, batch(0, pid=8, is_transactional=True))
    put_marker(partition, marker(8, commit=False))
    partition.close(NOW_MS)
    return tmp_path / str(TP)


def _dump(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def _rows(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_segment_is_dumped_batch_by_batch(directory: Path) -> None:
    result = _dump(directory / f"{0:020d}.log", "--print-data-log", "-o", "jsonl")
    rows = _rows(result)
    assert result.exit_code == 0
    assert [row["base_offset"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["base_sequence"] for row in rows] == [0, 1, 2, 3, 0, None]
    assert [row["is_control"] for row in rows] == [False] * 5 + [True]
    assert rows[3]["compression"] == "gzip"
    assert rows[3]["records"][0]["value"] == "v"
    assert rows[5]["records"] == [{"offset": 5, "control": "ABORT", "coordinator_epoch": 0}]


def test_indexes_snapshots_and_checkpoints_are_dumped(directory: Path) -> None:
    index = _rows(_dump(directory / f"{0:020d}.index", "-o", "jsonl"))
    assert [row["offset"] for row in index] == [1, 2, 3, 4, 5]
    times = _rows(_dump(directory / f"{0:020d}.timeindex", "-o", "jsonl"))
    assert times[0] == {"timestamp_ms": NOW_MS + 1, "offset": 1}
    aborted = _rows(_dump(directory / f"{0:020d}.txnindex", "-o", "jsonl"))
    expected = {"producer_id": 8, "first_offset": 4, "last_offset": 5, "last_stable_offset": 6}
    assert aborted == [expected]
    snapshot = _rows(_dump(directory / f"{6:020d}.snapshot", "-o", "jsonl"))
    assert {(row["producer_id"], row["last_sequence"]) for row in snapshot} == {(7, 3), (8, 0)}
    full = _rows(_dump(directory / f"{6:020d}.producers", "-o", "jsonl"))
    assert [row["last_sequence"] for row in full if row["producer_id"] == 7] == [0, 1, 2, 3]


def test_several_files_as_tables(directory: Path) -> None:
    result = _dump(
        directory / f"{0:020d}.log", directory / f"{0:020d}.index", "-o", "wide", "--print-data-log"
    )
    assert result.exit_code == 0
    assert "BASE OFFSET" in result.stdout and "PARTITION LEADER EPOCH" in result.stdout
    assert f"{0:020d}.index:" in result.stdout


def test_a_torn_segment_is_dumped_up_to_the_tear(directory: Path) -> None:
    path = directory / f"{0:020d}.log"
    path.write_bytes(path.read_bytes()[:-10])
    result = _dump(path, "-o", "jsonl")
    assert result.exit_code == 1
    assert len(_rows(result)) == 5
    assert "at position" in result.stderr and "says 78 bytes, but 68 are left" in result.stderr


def test_a_damaged_batch_is_dumped_as_damaged(directory: Path) -> None:
    path = directory / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[65] ^= 1
    path.write_bytes(data)
    result = _dump(path, "-o", "jsonl")
    assert result.exit_code == 1
    assert [row["is_valid"] for row in _rows(result)] == [False]
    assert "at position 0: wrong checksum" in result.stderr


@pytest.mark.parametrize(
    ("name", "position", "text"),
    [
        (f"{0:020d}.index", 7, "the log has no batch at position"),
        (f"{0:020d}.timeindex", 7, "no batch ending at offset"),
        (f"{0:020d}.timeindex", 11, "no batch ending at offset"),
        (f"{0:020d}.txnindex", 0, "version"),
        (f"{6:020d}.snapshot", 30, "checksum"),
        (f"{6:020d}.producers", 30, "checksum"),
    ],
)
def test_damaged_files_are_reported(directory: Path, name: str, position: int, text: str) -> None:
    path = directory / name
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    result = _dump("--verify-index-only", path)
    assert result.exit_code == 1
    assert text in result.stderr and "at position" in result.stderr
    assert result.stdout == ""


def test_verify_says_nothing_when_all_is_well(directory: Path) -> None:
    result = _dump("--verify-index-only", *sorted(directory.glob("0*")))
    assert (result.exit_code, result.output) == (0, "")


def test_unknown_kinds_of_files_are_refused(directory: Path) -> None:
    result = _dump(directory / "partition.metadata")
    assert result.exit_code == 1
    assert "unknown file type" in result.stderr
    assert _dump(directory / "missing.log").exit_code == 2


def test_an_index_cut_within_an_entry_is_reported(directory: Path) -> None:
    path = directory / f"{0:020d}.index"
    path.write_bytes(path.read_bytes()[:-3])
    result = _dump(path)
    assert result.exit_code == 1
    assert "the last entry is incomplete (5 bytes)" in result.stderr
