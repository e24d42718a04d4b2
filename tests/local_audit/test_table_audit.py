"""The audit of a table beside its topic: correct tables have no findings, and every planted fault is found
with offset and file.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet
from pyarrow.fs import FileSelector, LocalFileSystem
from support.postgresql import PostgresqlServer
from support.spark.topics import create_topic, fill, records, store
from support.spark.transactions import create_compacted, write_transactions

import oncelog
from oncelog import Admin
from oncelog.cli.main import cli
from oncelog.client.consumer.blocking import Consumer
from oncelog.errors import ConfigError, MissingDependency, MisuseError, StorageError, TimedOut
from oncelog.local_audit import TableAuditResult, audit_table, key_counts, row_runs, table_audit
from oncelog.local_audit.row_runs import RowRuns
from oncelog.local_audit.spill_directory import SpillDirectory
from oncelog.local_audit.tables import arrow_files
from oncelog.local_audit.tables.table import Columns
from oncelog.spark.source.offset_ranges import DataLossError
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.batch import build_batch

pytestmark = pytest.mark.behaviour("P8")

Row = tuple[Any, ...]
LARGEST, SMALLEST = 2**63 - 1, -(2**63)
COMMITTED = [*range(10), *range(33, 43)]
"""The offsets of the committed records of topic `caaco`.

They are from two committed transactions of ten records. Each transaction has a marker after its records.
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[oncelog.Broker]:
    with oncelog.Broker(config={"log.cleaner.backoff.ms": 20}) as broker:
        yield broker


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).translate(str.maketrans("[]", "--")).rstrip("-")


@pytest.fixture(scope="module")
def transactions(broker: oncelog.Broker) -> Iterator[str]:
    """Yield a topic with committed, aborted and open transactions."""
    create_topic(broker.bootstrap_servers, "caaco")
    producers = write_transactions(broker.bootstrap_servers, "caaco", "caaco")
    yield "caaco"
    producers[0].abort_transaction(60)


def arrow(rows: Sequence[Row], kind: pa.DataType = pa.int64()) -> pa.Table:
    topics, partitions, offsets = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        {
            "topic": pa.array(topics, pa.string()),
            "partition": pa.array(partitions, pa.int32()),
            "offset": pa.array(offsets, kind),
        }
    )


def write_parquet(path: Path, *files: Sequence[Row]) -> str:
    path.mkdir(exist_ok=True)
    for number, rows in enumerate(files):
        parquet.write_table(arrow(rows), path / f"part-{number}.parquet", row_group_size=7)
    return f"parquet:{path}"


def write_delta(path: Path, *files: Sequence[Row]) -> str:
    deltalake = pytest.importorskip("deltalake")
    for rows in files or [()]:
        deltalake.write_deltalake(str(path), arrow(rows), mode="append")
    return f"delta:{path}"


def write_iceberg(path: Path, *files: Sequence[Row]) -> str:
    """Write an Iceberg table with its own catalog, and return the newest metadata file."""
    pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")
    from pyiceberg.catalog import load_catalog

    path.mkdir()
    catalog = load_catalog("test", type="in-memory", warehouse=path.as_uri())
    catalog.create_namespace("lake")
    table = catalog.create_table("lake.rows", arrow([]).schema)
    for rows in files:
        table.append(arrow(rows))
    return f"iceberg:{table.metadata_location}"


def write_sqlite(path: Path, *files: Sequence[Row]) -> str:
    with sqlite3.connect(path) as connection:
        connection.execute('CREATE TABLE rows (topic TEXT, "partition" INTEGER, "offset" INTEGER)')
        for rows in files:
            connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", rows)
    connection.close()
    return f"sqlite:{path}"


def write_postgresql(server: PostgresqlServer, path: Path, *files: Sequence[Row]) -> str:
    """Write a table into a new schema of a database."""
    schema = server.new_schema()
    for rows in files or [()]:
        server.ingest(schema, path.name, arrow(rows))
    return f"{server.url}&table={schema}.{path.name}"


Writer = Callable[..., str]
WITH_FILES = (write_parquet, write_delta, write_iceberg)
EVERY_FORMAT = pytest.mark.parametrize(
    "write",
    [*WITH_FILES, write_sqlite, write_postgresql],
    ids=["parquet", "delta", "iceberg", "sqlite", "database"],
    indirect=True,
)


@pytest.fixture
def write(request: pytest.FixtureRequest) -> Writer:
    """Return a function that writes a table in the format of the test's parameter, and returns its place."""
    writer: Writer = request.param
    return partial(writer, request.getfixturevalue("postgresql")) if writer is write_postgresql else writer


def rows_of(topic: str, offsets: Sequence[int | None], partition: int | None = 0) -> list[Row]:
    return [(topic, partition, offset) for offset in offsets]


def iceberg_directory(path: Path, rows: list[Row]) -> tuple[Path, list[Path]]:
    """Write an Iceberg table with two snapshots.

    Return a new directory for metadata, and the paths of the metadata files.
    """
    newest = Path(write_iceberg(path / "t", rows[:5], rows[5:]).partition(":file://")[2])
    metadata = path / "t" / "metadata"
    metadata.mkdir()
    return metadata, sorted(newest.parent.glob("*.metadata.json"))


def found(result: TableAuditResult) -> list[tuple[Any, ...]]:
    return [(f.kind, f.partition, f.base_offset, f.last_offset, f.rows) for f in result.findings]


@EVERY_FORMAT
def test_a_table_with_each_committed_record_once_is_clean(
    broker: oncelog.Broker, transactions: str, tmp_path: Path, write: Writer
) -> None:
    rows = rows_of(transactions, COMMITTED)
    random.Random(3).shuffle(rows)
    table = write(tmp_path / "t", rows[:8], [*rows[8:], ("another", 0, 5)])
    result = audit_table(broker.bootstrap_servers, transactions, table)
    assert (result.verdict, result.findings) == ("clean", ())
    assert (result.totals.records, result.totals.rows, result.totals.not_judged_rows) == (20, 20, 0)
    assert result.notes == [
        "10 offsets need no row: they are newer than the look-up, or held back by an open transaction",
        "1 rows of other topics were not compared",
    ]


@EVERY_FORMAT
def test_every_planted_fault_is_named_by_offset_and_file(
    broker: oncelog.Broker, transactions: str, tmp_path: Path, write: Writer
) -> None:
    first = rows_of(transactions, [0, 1, 2, 6, 7, 8, 9, 10, 15, 16, 44])
    second = rows_of(
        transactions, [7, 8, 33, 34, 35, 36, 37, 38, 39, 40, None, -1, SMALLEST, 54, LARGEST, LARGEST]
    )
    second += [
        (transactions, 3, 0),
        (transactions, None, 5),
        (None, 0, 5),
        (transactions, -3, 1),
    ]
    result = audit_table(broker.bootstrap_servers, transactions, write(tmp_path / "t", first, second))
    assert found(result) == [
        ("missing_row", 0, 3, 5, 0),
        ("doubled_row", 0, 7, 8, 4),
        ("unknown_row", 0, 10, 10, 1),
        ("aborted_row", 0, 15, 16, 2),
        ("missing_row", 0, 41, 42, 0),
        ("open_row", 0, 44, 44, 1),
        ("unknown_row", 0, SMALLEST, SMALLEST, 1),
        ("unknown_row", 0, -1, -1, 1),
        ("unknown_row", 0, 54, 54, 1),
        ("unknown_row", 0, LARGEST, LARGEST, 2),
        ("unknown_row", -3, 1, 1, 1),
        ("unknown_row", 3, 0, 0, 1),
        ("unlocated_row", None, None, None, 3),
    ]
    assert (result.verdict, result.unlocated_rows, result.unknown_partition_rows) == ("violated", 3, 2)
    totals = result.totals
    assert (totals.missing, totals.doubled, totals.aborted, totals.open, totals.unknown) == (5, 2, 2, 1, 6)
    if write in WITH_FILES:
        by_kind = {f.kind: len(f.files) for f in result.findings}
        assert by_kind["missing_row"] == 0 and by_kind["aborted_row"] == 1
        doubled = result.findings[1]
        assert len(doubled.files) == 2 and doubled.explanation == "2 records have 4 rows in 2 files"


@EVERY_FORMAT
def test_an_empty_table_lacks_every_committed_record(
    broker: oncelog.Broker, transactions: str, tmp_path: Path, write: Writer
) -> None:
    result = audit_table(broker.bootstrap_servers, transactions, write(tmp_path / "t"))
    assert found(result) == [("missing_row", 0, 0, 9, 0), ("missing_row", 0, 33, 42, 0)]
    assert result.findings[0].explanation == (
        "10 committed records have no row; no later record of the partition has one: the writer may be behind"
    )
    assert (
        audit_table(broker.bootstrap_servers, transactions, write(tmp_path / "u"), max_findings=1).findings
        == (result.findings[:1])
    )


def test_records_that_compaction_removed_are_not_judged(
    broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    visible = create_compacted(broker.bootstrap_servers, topic, "ccc")
    gone = sorted(set(range(10)) - set(visible))
    table = write_parquet(tmp_path / "t", rows_of(topic, [*visible, *gone]), rows_of(topic, gone[:1]))
    result = audit_table(broker.bootstrap_servers, topic, table)
    assert found(result) == [("doubled_row", 0, gone[0], gone[0], 2)]
    assert result.totals.not_judged_rows == len(gone) - 1
    assert result.totals.records == len(visible)


def test_records_below_the_log_start_are_not_judged(
    broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 20)
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.delete_records({TopicPartition(topic, 0): 5})  # the new log start offset, 5, is inside a batch
    table = write_parquet(tmp_path / "t", rows_of(topic, [1, 2, 2, *range(5, 20)]))
    result = audit_table(broker.bootstrap_servers, topic, table)
    assert found(result) == [("doubled_row", 0, 2, 2, 2)]
    assert (result.totals.records, result.totals.not_judged_rows) == (15, 1)
    assert "1 partitions begin above offset 0" in " ".join(result.notes)


@pytest.fixture
def at_opening(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Return a function that registers a change. The audit makes that change just before it opens the
    table.
    """

    def set_change(change: Callable[[], None]) -> None:
        call = table_audit._open

        def change_and_open(*args: Any) -> Any:
            change()
            return call(*args)

        monkeypatch.setattr(table_audit, "_open", change_and_open)

    return set_change


def test_rows_and_records_that_are_added_meanwhile_are_no_finding(
    broker: oncelog.Broker, topic: str, tmp_path: Path, at_opening: Callable[[Callable[[], None]], None]
) -> None:
    """The audit looks up the log's end twice. A record that is committed between the two look-ups may have a
    row or none.

    The transaction of offsets 5 to 14 is still open at the first look-up.
    """
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 5)
    (producer,) = write_transactions(broker.bootstrap_servers, topic, "o")

    def add() -> None:
        producer.commit_transaction(60)  # offsets 5 to 14, and the marker at 15
        fill(broker.bootstrap_servers, topic, 5, 4)  # offsets 16 to 19
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            admin.create_partitions({topic: 2})
        fill(broker.bootstrap_servers, topic, 0, 3, 1)
        write_parquet(tmp_path / "t", rows_of(topic, [*range(5), 5, 6, 17]), rows_of(topic, [1], 1))

    at_opening(add)
    result = audit_table(broker.bootstrap_servers, topic, f"parquet:{tmp_path / 't'}")
    assert (result.findings, result.totals.records, result.totals.rows) == ((), 5, 9)


def test_a_topic_that_is_created_again_meanwhile_gets_no_verdict(
    broker: oncelog.Broker, topic: str, tmp_path: Path, at_opening: Callable[[Callable[[], None]], None]
) -> None:
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 5)
    table = write_parquet(tmp_path / "t", rows_of(topic, range(5)))

    def replace() -> None:
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            admin.delete_topics([topic])
        create_topic(broker.bootstrap_servers, topic)
        fill(broker.bootstrap_servers, topic, 0, 5)

    at_opening(replace)
    with pytest.raises(DataLossError, match="deleted and re-created during the audit"):
        audit_table(broker.bootstrap_servers, topic, table)


def test_a_log_start_that_moves_meanwhile_takes_its_records_out_of_the_audit(
    broker: oncelog.Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 30)
    table = write_parquet(tmp_path / "t", rows_of(topic, range(12, 30)))
    read_fates = table_audit._PartitionAudit.run

    def trim_and_run(audit: Any) -> None:
        with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            admin.delete_records({TopicPartition(topic, 0): 12})
        read_fates(audit)

    monkeypatch.setattr(table_audit._PartitionAudit, "run", trim_and_run)
    result = audit_table(broker.bootstrap_servers, topic, table)
    assert (result.findings, result.totals.records) == ((), 18)


def test_a_broker_that_stalls_ends_the_audit_with_an_error(
    broker: oncelog.Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1190: when a fetch timed out, the audit took the offsets that it did not get for offsets without
    records. It then accused correct rows.
    """
    create_topic(broker.bootstrap_servers, topic)
    for n in range(6):
        fill(broker.bootstrap_servers, topic, n, 1, size_bytes=900_000)
    table = write_parquet(tmp_path / "t", rows_of(topic, range(6)))
    fetch = Consumer.fetch_chunks

    def fetch_once(*args: Any) -> Iterator[Any]:
        chunks = fetch(*args)
        yield next(chunks)
        if args[-1] is Isolation.READ_COMMITTED:
            raise TimedOut("no response within request.timeout.ms")
        yield from chunks

    monkeypatch.setattr(Consumer, "fetch_chunks", fetch_once)
    with pytest.raises(TimedOut):
        audit_table(broker.bootstrap_servers, topic, table)


def test_a_row_with_a_negative_offset_does_not_hide_the_rows_after_it(
    broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    """R1191: the offsets -1 to 4 are one consecutive run, so the audit accused all of its rows and not only
    that of offset -1.
    """
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 5)
    table = write_parquet(tmp_path / "t", rows_of(topic, [-2, *range(-1, 7)]))
    result = audit_table(broker.bootstrap_servers, topic, table)
    assert found(result) == [("unknown_row", 0, -2, -1, 2), ("unknown_row", 0, 5, 6, 2)]
    assert (result.totals.missing, result.totals.unknown, result.totals.rows) == (0, 4, 9)


def test_small_windows_and_files_on_disk_find_the_same(
    broker: oncelog.Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topic(broker.bootstrap_servers, topic, partitions=2)
    for partition in range(2):
        batches = [
            build_batch(records(n, 7), producer_id=7, producer_epoch=0, base_sequence=n)
            for n in range(0, 140, 7)
        ]
        store(broker.bootstrap_servers, topic, batches, partition)
    rng = random.Random(11)
    rows = [
        (topic, p, offset)
        for p in range(2)
        for offset in range(140)
        for _ in range(rng.choice([1, 1, 1, 0, 2]))
    ]
    rows += [(topic, p, offset) for p in (0, 1, 5) for offset in rng.sample(range(140, 200), 5)]
    rng.shuffle(rows)
    table = write_parquet(tmp_path / "t", rows[:100], rows[100:150], rows[150:])
    whole = audit_table(broker.bootstrap_servers, topic, table)
    assert whole.totals.missing > 20 and whole.totals.doubled > 20 and whole.totals.unknown == 10
    for window, in_memory in ((1, 1000), (16, 1), (9, 20)):
        monkeypatch.setattr(row_runs, "WINDOW_OFFSETS", window)
        monkeypatch.setattr(row_runs, "RUNS_IN_MEMORY", in_memory)
        assert audit_table(broker.bootstrap_servers, topic, table) == whole


def test_a_topic_of_several_partitions_and_several_topics_is_compared_by_columns_of_other_names(
    broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    names = [f"{topic}.a", f"{topic}.b"]
    rows = []
    for name in names:
        create_topic(broker.bootstrap_servers, name, partitions=3)
        for partition in range(3):
            fill(broker.bootstrap_servers, name, 0, 4, partition)
            rows += rows_of(name, range(4), partition)
    columns = "topic=t, partition=p,offset=o"
    table = arrow(rows).rename_columns(["t", "p", "o"])
    parquet.write_table(table, tmp_path / "t.parquet")
    of_file = f"parquet:{tmp_path / 't.parquet'}"
    assert audit_table(broker.bootstrap_servers, names, of_file, columns=columns).findings == ()
    (alone,) = {
        f.kind
        for f in audit_table(
            broker.bootstrap_servers, names[0], of_file, columns="partition=p,offset=o"
        ).findings
    }
    assert alone == "doubled_row", "without a column of topics all rows are of the one topic"
    with pytest.raises(ConfigError, match="no column 'topic', so only one topic"):
        audit_table(broker.bootstrap_servers, names, of_file, columns="partition=p,offset=o")


@EVERY_FORMAT
def test_a_topic_that_is_named_twice_is_compared_once(
    broker: oncelog.Broker, transactions: str, tmp_path: Path, write: Writer
) -> None:
    """R1192: the rows were counted once for each time that the topic was named."""
    table = write(tmp_path / "t", rows_of(transactions, COMMITTED))
    result = audit_table(broker.bootstrap_servers, [transactions, transactions], table)
    assert (result.findings, result.totals.rows) == ((), len(COMMITTED))


def test_partitions_in_paths_are_columns(broker: oncelog.Broker, topic: str, tmp_path: Path) -> None:
    create_topic(broker.bootstrap_servers, topic, partitions=2)
    for partition in range(2):
        fill(broker.bootstrap_servers, topic, 0, 3, partition)
        directory = tmp_path / "t" / f"topic={topic}" / f"partition={partition}"
        directory.mkdir(parents=True)
        parquet.write_table(pa.table({"offset": [0, 1, 2]}), directory / "part-0.parquet")
    (tmp_path / "t" / "_SUCCESS").touch()
    assert audit_table(broker.bootstrap_servers, topic, f"parquet:{tmp_path / 't'}").findings == ()
    (directory / "part-0.parquet").rename(directory.parent / "part-0.parquet")
    with pytest.raises(ConfigError, match="no column 'partition'"):
        audit_table(broker.bootstrap_servers, topic, f"parquet:{tmp_path / 't'}")


def test_a_column_in_paths_may_begin_with_an_underscore(
    broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    """R1195: Spark reads directories such as `_partition=0`, but ignores files with the suffix
    `._COPYING_`.
    """
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 3)
    for name in ("_partition=0/a.parquet", "_temporary/a.parquet", "_partition=0/b.parquet._COPYING_"):
        path = tmp_path / "t" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"offset": [0, 1, 2]}), path)
    columns = "partition=_partition"
    result = audit_table(broker.bootstrap_servers, topic, f"parquet:{tmp_path / 't'}", columns=columns)
    assert (result.findings, result.totals.rows) == ((), 3)


def test_files_that_sparks_sink_did_not_commit_are_not_in_the_table(
    broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 6)
    path = tmp_path / "t"
    table = write_parquet(path, *(rows_of(topic, [n]) for n in range(6)), rows_of(topic, [0, 1]))
    (path / "_spark_metadata").mkdir()

    def log(name: str, *numbers: int) -> None:
        entries = [{"path": f"file://{path}/part-{n}.parquet", "size": 1, "action": "add"} for n in numbers]
        lines = ["v1", *map(json.dumps, entries)]
        (path / "_spark_metadata" / name).write_text("\n".join(lines))

    log("0", 6)  # an older log file, which 1.compact replaces
    log("1.compact", 0, 1, 2)
    log("2", 3, 4, 5)
    assert audit_table(broker.bootstrap_servers, topic, table).findings == ()
    log("3", 7)
    with pytest.raises(StorageError, match=r"part-7.parquet is in _spark_metadata, but does not exist"):
        audit_table(broker.bootstrap_servers, topic, table)


def test_a_file_that_is_committed_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    numbers = count()
    selectors: list[FileSelector] = []

    def commit() -> None:
        n = next(numbers)
        parquet.write_table(arrow(rows_of("t", [n])), tmp_path / f"part-{n}.parquet")
        entry = {"path": f"file://{tmp_path}/part-{n}.parquet", "size": 1, "action": "add"}
        (log / str(n)).write_text(f"v1\n{json.dumps(entry)}")

    class BusyDirectory(LocalFileSystem):  # type: ignore[misc]
        """Spark commits a micro-batch after each look-up."""

        def get_file_info(self, what: Any) -> Any:
            found = super().get_file_info(what)
            if isinstance(what, FileSelector):
                selectors.append(what)
                commit()
            return found

    commit()
    monkeypatch.setattr(arrow_files, "file_system", lambda path: (BusyDirectory(), path))
    table = arrow_files.open_parquet(str(tmp_path), Columns(), ["t"])
    assert table.description == f"{tmp_path} (1 files)"
    # Spark's directory `_temporary` may vanish while it is listed.
    assert selectors and all(selector.allow_not_found for selector in selectors)


def test_the_key_of_an_object_store_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1398: pyarrow takes an access key and its secret from a URI."""
    write_parquet(tmp_path, rows_of("t", [0]))
    monkeypatch.setattr(arrow_files, "file_system", lambda _: (LocalFileSystem(), str(tmp_path)))
    table = arrow_files.open_parquet("s3://AKIA:se%2Fcret@bucket/t", Columns(), ["t"])
    assert table.description == "s3://***@bucket/t (1 files)"
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"s4://\*\*\*@bucket/t: cannot open") as raised:
        arrow_files.open_parquet("s4://AKIA:se%2Fcret@bucket/t", Columns(), ["t"])
    assert "cret" not in str(raised.value)
    pytest.importorskip("deltalake")
    with pytest.raises(
        ConfigError, match=r"s4://\*\*\*@bucket/t: cannot read this Delta Lake table"
    ) as raised:
        arrow_files.open_delta("s4://AKIA:se%2Fcret@bucket/t", Columns(), ["t"])
    assert "cret" not in str(raised.value)


def test_a_log_that_sparks_sink_begins_meanwhile_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path, rows_of("t", [0]), rows_of("t", [0]))
    entry = {"path": f"file://{tmp_path}/part-1.parquet", "size": 1, "action": "add"}
    read_log, lines = arrow_files._spark_log, f"v1\n{json.dumps(entry)}"

    def read_and_begin(*arguments: Any) -> Any:
        found = read_log(*arguments)
        (tmp_path / "_spark_metadata").mkdir(exist_ok=True)
        (tmp_path / "_spark_metadata" / "0").write_text(lines)
        return found

    monkeypatch.setattr(arrow_files, "_spark_log", read_and_begin)
    table = arrow_files.open_parquet(str(tmp_path), Columns(), ["t"])
    assert table.description == f"{tmp_path} (1 files)"


# Refusals


def test_columns_of_wrong_types_are_refused(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    def audit(**columns: Any) -> None:
        whole = {"topic": ["caaco"], "partition": [0], "offset": [0]} | columns
        parquet.write_table(pa.table(whole), tmp_path / "t.parquet")
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{tmp_path / 't.parquet'}")

    with pytest.raises(ConfigError, match="column 'offset' is double, but must be an integer"):
        audit(offset=[1.5])
    with pytest.raises(ConfigError, match="column 'partition' is string"):
        audit(partition=["0"])
    with pytest.raises(ConfigError, match="column 'topic' is int64, but must be a string"):
        audit(topic=[3])
    with pytest.raises(ConfigError, match="column 'offset' has a value beyond 64-bit integers"):
        audit(offset=pa.array([2**64 - 1], pa.uint64()))
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute('CREATE TABLE t ("partition" INTEGER, "offset" INTEGER)')
        connection.execute("INSERT INTO t VALUES (0, 'seven')")
    connection.close()
    with pytest.raises(ConfigError, match="column 'offset' has a value of type text, not integer"):
        audit_table(broker.bootstrap_servers, transactions, f"sqlite:{tmp_path / 't.db'}")


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ("jdbc:postgresql://h/d", r"jdbc:postgresql://h/d names no table: expected .*\?table=NAME"),
        ("jdbc:mysql://ann:pw@h/d", r"^jdbc:mysql\.\.\.: .* only PostgreSQL can be audited here"),
        ("csv:/t", "is not a table: expected one of parquet:PATH, delta:PATH, iceberg:PATH, sqlite:PATH"),
        ("/lake/t", "is not a table"),
        ("parquet:/no/such", "no such file or directory"),
        ("sqlite:/no/such", "no such file"),
        ("delta:/no/such", "cannot read this Delta Lake table"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(
    broker: oncelog.Broker, transactions: str, table: str, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        audit_table(broker.bootstrap_servers, transactions, table)


def test_names_that_do_not_name_one_thing_are_refused(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    """R1198: with two columns of the same name, or a name that is not UTF-8, the audit ended with a
    traceback.
    """
    offsets = pa.array([0, 1])
    columns = [pa.array([0, 0]), offsets, offsets]
    twice = pa.Table.from_arrays(columns, names=["partition", "offset", "offset"])
    parquet.write_table(twice, tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"t\.parquet has 2 columns 'offset'"):
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{tmp_path / 't.parquet'}")
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{name}")
    try:
        Path(name).touch()
    except OSError:
        return  # this file system accepts only UTF-8 names
    with pytest.raises(ConfigError, match="is not UTF-8"):
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{tmp_path}")


def test_tables_whose_files_are_not_the_whole_truth_are_refused(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    write_delta(tmp_path / "d", rows_of(transactions, COMMITTED))
    with pytest.raises(ConfigError, match=r"is a Delta Lake table.*use delta:"):
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{tmp_path / 'd'}")
    (tmp_path / "i" / "metadata").mkdir(parents=True)
    (tmp_path / "i" / "metadata" / "v1.metadata.json").touch()
    with pytest.raises(ConfigError, match="is an Iceberg table"):
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{tmp_path / 'i'}")
    # R1585: Hudi keeps older versions of files, whose rows were called doubled.
    (tmp_path / "h" / ".hoodie").mkdir(parents=True)
    (tmp_path / "h" / ".hoodie" / "hoodie.properties").touch()
    with pytest.raises(ConfigError, match="is a Hudi table"):
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{tmp_path / 'h'}")


@pytest.mark.parametrize(
    "protocol",
    [
        {"minReaderVersion": 2, "minWriterVersion": 5},
        {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": ["columnMapping"],
            "writerFeatures": ["columnMapping"],
        },
    ],
    ids=["version", "feature"],
)
def test_a_delta_table_that_maps_its_columns_is_refused(
    broker: oncelog.Broker, transactions: str, tmp_path: Path, protocol: dict[str, Any]
) -> None:
    """R1523: the package deltalake reads other columns if they have the table's names in its files."""
    write_delta(tmp_path, rows_of(transactions, COMMITTED))
    log = tmp_path / "_delta_log"
    first = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    (metadata,) = (action["metaData"] for action in first if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    swapped = {"partition": "offset", "offset": "partition"}
    for number, field in enumerate(schema["fields"], 1):
        stored = swapped.get(field["name"], field["name"])
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": stored,
        }
    mapped = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "9"}
    metadata |= {"schemaString": json.dumps(schema), "configuration": mapped}
    actions = ({"protocol": protocol}, {"metaData": metadata})
    (log / f"{1:020}.json").write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(ConfigError, match=r"cannot read this Delta Lake table: .*columnMapping"):
        audit_table(broker.bootstrap_servers, transactions, f"delta:{tmp_path}")


def test_an_iceberg_table_is_found_by_its_name_in_the_default_catalog(
    broker: oncelog.Broker, transactions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("test", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=tmp_path.as_uri())
    catalog.create_namespace("lake")
    rows = arrow(rows_of(transactions, COMMITTED))
    catalog.create_table("lake.rows", rows.schema).append(rows)
    monkeypatch.setattr("pyiceberg.catalog.load_catalog", lambda: catalog)
    result = audit_table(broker.bootstrap_servers, transactions, "iceberg:lake.rows")
    assert result.verdict == "clean" and result.table.startswith("lake.rows, snapshot ")
    with pytest.raises(ConfigError, match=r"lake\.other: cannot read this Iceberg table"):
        audit_table(broker.bootstrap_servers, transactions, "iceberg:lake.other")
    with pytest.raises(ConfigError, match=r"/no/such has no metadata/version-hint\.text"):
        audit_table(broker.bootstrap_servers, transactions, "iceberg:/no/such")


def test_an_iceberg_table_without_its_package_or_catalog_is_a_plain_error(
    broker: oncelog.Broker, transactions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def audit() -> None:
        audit_table(broker.bootstrap_servers, transactions, "iceberg:lake.rows")

    with monkeypatch.context() as without_package:
        without_package.setitem(sys.modules, "pyiceberg", None)
        with pytest.raises(MissingDependency, match=r"pip install 'oncelog\[iceberg\]'"):
            audit()
    pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")

    class CatalogError(Exception):
        """An error type that only one kind of catalog raises, so that the audit cannot name it."""

    def fail() -> None:
        raise CatalogError("no answer")

    monkeypatch.setattr("pyiceberg.catalog.load_catalog", fail)
    with pytest.raises(ConfigError, match=r"lake\.rows: cannot read this Iceberg table: no answer"):
        audit()


def test_a_hint_that_is_behind_hides_no_rows(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    metadata, files = iceberg_directory(tmp_path, rows_of(transactions, COMMITTED))
    for version, file in enumerate(files):
        (metadata / f"v{version}.metadata.json").write_bytes(file.read_bytes())
    (metadata / "version-hint.text").write_text("1")
    result = audit_table(broker.bootstrap_servers, transactions, f"iceberg:{tmp_path / 't'}")
    assert (result.verdict, result.totals.rows) == ("clean", len(COMMITTED))
    (metadata / "version-hint.text").write_text("a")
    with pytest.raises(ConfigError, match="contains 'a', which is not a version"):
        audit_table(broker.bootstrap_servers, transactions, f"iceberg:{tmp_path / 't'}")


def test_a_compressed_metadata_file_after_the_hint_hides_no_rows(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    metadata, files = iceberg_directory(tmp_path, rows_of(transactions, COMMITTED))
    (metadata / "v1.metadata.json").write_bytes(files[-2].read_bytes())
    (metadata / "v2.gz.metadata.json").write_bytes(gzip.compress(files[-1].read_bytes()))
    for hint in ("1", "2"):
        (metadata / "version-hint.text").write_text(hint)
        result = audit_table(broker.bootstrap_servers, transactions, f"iceberg:{tmp_path / 't'}")
        assert (result.verdict, result.totals.rows) == ("clean", len(COMMITTED))
    (metadata / "version-hint.text").write_text("3")
    with pytest.raises(ConfigError, match="has no metadata file of version 3"):
        audit_table(broker.bootstrap_servers, transactions, f"iceberg:{tmp_path / 't'}")


def test_an_error_of_a_catalog_hides_its_password(
    broker: oncelog.Broker, transactions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")

    def fail() -> None:
        raise ValueError("Could not infer the catalog type from the uri: mysql://ann:secret@host/db")

    monkeypatch.setattr("pyiceberg.catalog.load_catalog", fail)
    with pytest.raises(ConfigError, match=r"from the uri: mysql://\*\*\*@host/db"):
        audit_table(broker.bootstrap_servers, transactions, "iceberg:lake.rows")


def test_fields_and_files_that_cannot_be_read_are_refused(
    broker: oncelog.Broker, transactions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyiceberg", reason="needs the package pyiceberg")
    from pyiceberg.catalog import load_catalog
    from pyiceberg.io.pyarrow import ArrowScan

    catalog = load_catalog("test", type="in-memory", warehouse=tmp_path.as_uri())
    catalog.create_namespace("lake")
    rows = pa.table({"row": [{"partition": 0, "offset": 0}]})
    nested = catalog.create_table("lake.nested", rows.schema)
    nested.append(rows)
    columns = "partition=row.partition,offset=row.offset"
    with pytest.raises(ConfigError, match=r"has no column 'row\.partition', but row:"):
        audit_table(
            broker.bootstrap_servers, transactions, f"iceberg:{nested.metadata_location}", columns=columns
        )

    def fail(*_: object) -> None:
        raise ValueError("Unsupported file format: FileFormat.AVRO")

    monkeypatch.setattr(ArrowScan, "to_record_batches", fail)
    place = write_iceberg(tmp_path / "t", rows_of(transactions, COMMITTED))
    with pytest.raises(StorageError, match="pyiceberg cannot read this file: Unsupported file format"):
        audit_table(broker.bootstrap_servers, transactions, place)


def test_damaged_files_are_an_error_and_no_finding(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(StorageError, match=r"t\.parquet: cannot read this part of the table"):
        audit_table(broker.bootstrap_servers, transactions, f"parquet:{tmp_path}")
    (tmp_path / "t.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="cannot read this SQLite database"):
        audit_table(broker.bootstrap_servers, transactions, f"sqlite:{tmp_path / 't.db'}")
    with pytest.raises(MisuseError, match="no topic to audit"):
        audit_table(broker.bootstrap_servers, [], "sqlite:t")


def test_one_of_several_sqlite_tables_or_a_view_is_named(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    table = write_sqlite(tmp_path / "t.db", rows_of(transactions, COMMITTED))
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE other (a)")
        connection.execute('CREATE VIEW half AS SELECT * FROM rows WHERE "offset" < 20')
    connection.close()
    with pytest.raises(ConfigError, match=r"has 2 tables \(other, rows\): name one"):
        audit_table(broker.bootstrap_servers, transactions, table)
    assert audit_table(broker.bootstrap_servers, transactions, f"{table}#rows").findings == ()
    half = audit_table(broker.bootstrap_servers, transactions, f"{table}#half")
    assert found(half) == [("missing_row", 0, 33, 42, 0)]


@pytest.mark.parametrize("name", ["rows", "rows_at", "numbered"])
def test_a_sqlite_table_may_have_any_name_and_collation(
    broker: oncelog.Broker, topic: str, tmp_path: Path, name: str
) -> None:
    """R1193: with the collation NOCASE, rows of two topics were merged, and two of these names clashed with
    the audit's query.
    """
    topics = [topic.lower(), topic.upper()]
    rows = []
    for each in topics:
        create_topic(broker.bootstrap_servers, each)
        fill(broker.bootstrap_servers, each, 0, 3)
        rows += rows_of(each, range(3))
    with sqlite3.connect(tmp_path / "t.db") as connection:
        columns = 'topic TEXT COLLATE NOCASE, "partition" INTEGER, "offset" INTEGER'
        connection.execute(f"CREATE TABLE {name} ({columns})")
        connection.executemany(f"INSERT INTO {name} VALUES (?, ?, ?)", rows)
    connection.close()
    result = audit_table(broker.bootstrap_servers, topics, f"sqlite:{tmp_path / 't.db'}")
    assert (result.findings, result.totals.rows) == ((), 6)


# Memory


def test_a_table_of_offsets_that_never_existed_takes_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy as np

    monkeypatch.setattr(row_runs, "OUTSIDE_RUNS", 10)
    monkeypatch.setattr(row_runs, "OUTSIDE_PARTITIONS", 5)
    tp = TopicPartition("t", 0)
    with SpillDirectory() as spill:
        rows = RowRuns({tp: 3}, spill)
        file = rows.add_file("f")
        offsets = np.arange(0, 2000, 2, dtype=np.int64)
        rows.add_rows("t", np.zeros(1000, np.int64), offsets, file)
        assert (rows.rows[tp], rows.outside[tp].rows, len(rows.outside[tp].runs())) == (2, 998, 10)
        rows.add_rows("t", np.arange(1, 101), np.arange(100), file)
        assert len(rows.outside) == 5
        assert rows.rows_of_more_partitions + sum(each.rows for each in rows.outside.values()) == 998 + 100


# Keys


def test_a_comparison_by_key_names_lost_doubled_and_unexpected_keys(
    broker: oncelog.Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 8)  # keys k0 to k7
    fill(broker.bootstrap_servers, topic, 0, 2)  # k0 and k1 again
    keys = ["k0", "k0", "k1", "k1", "k2", "k3", "k4", "k4", "k5", "k9", None]
    (tmp_path / "t").mkdir()
    for number, part in enumerate((keys[:7], keys[7:])):
        parquet.write_table(pa.table({"id": part}), tmp_path / "t" / f"part-{number}.parquet")
    table = f"parquet:{tmp_path / 't'}"
    result = audit_table(broker.bootstrap_servers, topic, table, by_key=True, columns="key=id")
    assert [(f.kind, f.key, f.base_offset, f.rows, f.files) for f in result.findings] == [
        ("doubled_key", "k4", 4, 2, ("part-1.parquet",)),
        ("lost_key", "k6", 6, 0, ()),
        ("lost_key", "k7", 7, 0, ()),
        ("unexpected_key", "k9", None, 1, ("part-1.parquet",)),
    ]
    assert (result.verdict, result.difference) == ("violated", (10, 10, 2, 1, 1, 1))
    assert "cannot show which row of a key is wrong" in result.notes[0]
    monkeypatch.setattr(key_counts, "ROWS_AT_ONCE", 3)
    assert audit_table(broker.bootstrap_servers, topic, table, by_key=True, columns="key=id") == result


def test_a_comparison_by_key_accuses_no_row_that_a_writer_adds_meanwhile(
    broker: oncelog.Broker, topic: str, tmp_path: Path, at_opening: Callable[[Callable[[], None]], None]
) -> None:
    """R1194: a record that is added between the two look-ups may have a row, but needs none."""
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 3)  # keys k0 to k2
    keys = ["k0", "k1", "k2", "k3", "k1", "k1"]
    parquet.write_table(pa.table({"key": keys}), tmp_path / "t.parquet")

    def add() -> None:
        fill(broker.bootstrap_servers, topic, 3, 2)  # the table has a row of k3 and none of k4
        fill(broker.bootstrap_servers, topic, 1, 1)

    at_opening(add)
    result = audit_table(broker.bootstrap_servers, topic, f"parquet:{tmp_path / 't.parquet'}", by_key=True)
    assert [(f.kind, f.key, f.rows) for f in result.findings] == [("doubled_key", "k1", 3)]


def test_a_comparison_by_key_accuses_no_row_of_a_record_that_is_gone(
    broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    """R1194: rows of records below the log start offset may be right. They are not a finding, as in the audit
    by offset.
    """
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 8)
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.delete_records({TopicPartition(topic, 0): 4})
    parquet.write_table(pa.table({"key": [f"k{n}" for n in range(7)]}), tmp_path / "t.parquet")
    result = audit_table(broker.bootstrap_servers, topic, f"parquet:{tmp_path / 't.parquet'}", by_key=True)
    assert [(f.kind, f.key) for f in result.findings] == [("lost_key", "k7")]
    assert "4 keys have more rows than records, which is not judged" in " ".join(result.notes)


# The command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_audit_that_is_terminated_leaves_no_temporary_file(
    broker: oncelog.Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    create_topic(broker.bootstrap_servers, topic)
    fill(broker.bootstrap_servers, topic, 0, 5)
    table = write_parquet(tmp_path / "t", rows_of(topic, range(0, 5, 2)))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(row_runs, "RUNS_IN_MEMORY", 1)
    written = []

    def terminate(self: RowRuns, *_: Any) -> Any:
        written.extend(temporary.rglob("runs"))
        signal.raise_signal(number)

    monkeypatch.setattr(RowRuns, "read", terminate)
    restored = signal.signal(number, lambda *_: None)  # otherwise the signal would end the test process
    try:
        ended = run(broker, topic, "--table", table)
    finally:
        signal.signal(number, restored)
    assert ended.exit_code == 128 + number
    assert written and list(temporary.iterdir()) == []


def run(broker: oncelog.Broker, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", "-b", broker.bootstrap_servers, *arguments])


def test_the_command_prints_findings_and_exits_with_3(
    broker: oncelog.Broker, transactions: str, tmp_path: Path
) -> None:
    table = write_parquet(tmp_path / "t", rows_of(transactions, COMMITTED[1:]), rows_of(transactions, [5]))
    page = tmp_path / "page.html"
    ended = run(broker, transactions, "--table", table, "--html", str(page))
    assert ended.exit_code == 3
    assert "missing_row  caaco          0            0            0" in ended.stdout
    assert "part-0.parquet, part-1.parquet" in ended.stdout
    assert "verdict: violated (2 findings in 2 lines)" in ended.stderr
    assert "doubled_row" in page.read_text() and "part-1.parquet" in page.read_text()
    rows = json.loads(run(broker, transactions, "--table", table, "-o", "json").stdout)
    assert rows[1] == {
        "severity": "violation",
        "kind": "doubled_row",
        "topic": "caaco",
        "partition": 0,
        "base_offset": 5,
        "last_offset": 5,
        "rows": 2,
        "files": ["part-0.parquet", "part-1.parquet"],
        "key": None,
        "explanation": "1 records have 2 rows in 2 files",
    }
    write_parquet(tmp_path / "t", rows_of(transactions, COMMITTED), [])
    clean = run(broker, transactions, "--table", table)
    assert (clean.exit_code, clean.stdout) == (0, "") and "verdict: clean" in clean.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--table", "parquet:/t", "--keys"),
        ("--table", "parquet:/t", "--against", "other"),
        ("--table", "parquet:/t", "--spark"),
        ("--columns", "offset=o"),
        ("--by", "key"),
        ("--local", "--key-expr", "key"),
    ],
    ids=" ".join,
)
def test_options_that_contradict_each_other_are_refused(
    broker: oncelog.Broker, arguments: tuple[str, ...]
) -> None:
    ended = run(broker, "caaco", *arguments)
    assert ended.exit_code == 2 and "Usage" in ended.stderr
