"""The audit of a table on Spark has the findings of the audit without Spark."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.spark.topics import create_topic, fill
from support.spark.transactions import create_compacted, write_transactions

import oncelog
from oncelog import Admin
from oncelog.errors import ConfigError
from oncelog.local_audit import audit_table as audit_table_here
from oncelog.spark.audit import audit_table
from oncelog.types import TopicPartition

pytestmark = [pytest.mark.spark, pytest.mark.behaviour("P8")]

LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def write(path: Path, *files: list[tuple[Any, ...]]) -> str:
    path.mkdir()
    schema = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
    for number, rows in enumerate(files):
        columns = [
            pa.array(column, field.type)
            for column, field in zip(zip(*rows, strict=True), schema, strict=True)
        ]
        parquet.write_table(pa.table(columns, schema=schema), path / f"part-{number}.parquet")
    return str(path)


def summary(result: Any) -> Any:
    """Return the result with the number of the table's files instead of their names, which the two audits
    form differently.
    """
    rows = [row | {"files": len(row["files"])} for row in result.to_rows()]
    return rows, result.partitions, result.unlocated_rows, result.unknown_partition_rows, result.verdict


def test_every_planted_fault_is_found_as_without_spark(
    spark: Any, shared_broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    servers = shared_broker.bootstrap_servers
    create_topic(servers, topic, partitions=2)
    (producer,) = write_transactions(servers, topic, "caaco")
    fill(servers, topic, 0, 30, 1)
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.delete_records({TopicPartition(topic, 1): 8})
    right = [(topic, 0, offset) for offset in (*range(10), *range(33, 43))]
    right += [(topic, 1, offset) for offset in range(30)]
    wrong = [
        (topic, 0, offset) for offset in (7, 8, 10, 15, 16, 44, 54, -1, SMALLEST, LARGEST, LARGEST, None)
    ]
    wrong += [(topic, 1, 3), (topic, 1, 25), (topic, 3, 0), (topic, None, 5), (None, 0, 5)]
    random.Random(5).shuffle(right)
    lost = [row for row in right if row[1:] not in [(0, 3), (0, 4), (0, 5), (1, 29)]]
    path = write(tmp_path / "t", lost[:30], lost[30:], wrong)
    here = audit_table_here(servers, topic, f"parquet:{path}")
    assert here.totals.missing == 4 and here.totals.doubled == 4 and here.totals.unknown == 6
    assert (here.totals.aborted, here.totals.open, here.totals.not_judged_rows) == (2, 1, 7)
    for size in (1 << 20, 9):
        there = audit_table(spark, servers, topic, spark.read.parquet(path), window_offsets=size)
        assert summary(there) == summary(here)
    (doubled, *_) = [finding for finding in there.findings if finding.kind == "doubled_row"]
    assert len(doubled.files) >= 2 and all(name.startswith("file:") for name in doubled.files)
    producer.abort_transaction(60)


def test_a_right_table_of_a_compacted_topic_is_clean(
    spark: Any, shared_broker: oncelog.Broker, topic: str
) -> None:
    visible = create_compacted(shared_broker.bootstrap_servers, topic, "ccc")
    frame = spark.createDataFrame([(0, offset) for offset in visible], "p int, o bigint")
    result = audit_table(spark, shared_broker.bootstrap_servers, topic, frame, columns="partition=p,offset=o")
    assert (result.verdict, result.totals.records) == ("clean", len(visible))


def test_a_column_of_a_wrong_type_is_refused(spark: Any, shared_broker: oncelog.Broker) -> None:
    for columns, error in (
        ("partition int, offset double", "'offset' is double, but must be an integer"),
        ("partition int, offset bigint, topic int", "'topic' is int, but must be a string"),
        ("partition int", "no column 'offset'"),
    ):
        with pytest.raises(ConfigError, match=error):
            audit_table(spark, shared_broker.bootstrap_servers, "t", spark.createDataFrame([], columns))


def test_a_writer_may_add_rows_if_the_table_is_opened_by_the_audit(
    spark: Any, shared_broker: oncelog.Broker, topic: str, tmp_path: Path
) -> None:
    """R1464: rows that were added after the DataFrame was created were missing rows."""
    servers = shared_broker.bootstrap_servers
    create_topic(servers, topic)
    fill(servers, topic, 0, 5)
    path = tmp_path / "t"
    write(path, [(topic, 0, offset) for offset in range(5)])
    opened_before = spark.read.parquet(str(path))
    fill(servers, topic, 5, 5)
    write(tmp_path / "new", [(topic, 0, offset) for offset in range(5, 10)])
    (tmp_path / "new" / "part-0.parquet").rename(path / "part-1.parquet")
    (found,) = audit_table(spark, servers, topic, opened_before).findings
    assert (found.kind, found.base_offset, found.last_offset) == ("missing_row", 5, 9)

    def open_now() -> Any:
        return spark.read.parquet(str(path))

    assert audit_table(spark, servers, topic, open_now).verdict == "clean"
