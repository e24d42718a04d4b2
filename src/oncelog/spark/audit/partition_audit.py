"""Run the rules of oncelog.audit in Spark tasks, on one stream of batch headers per partition.

A task passes the headers of a partition to the rules one after another, so it needs memory only for the
rules' state. A partition that is not too large is read by the same task. The headers of other partitions are
read by several tasks, and Spark sorts them by partition and place, on disk if memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, islice, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from oncelog.audit.partition import BumpedOutcome, PartitionAudit, PartitionTotals, StoredBatch
from oncelog.audit.result import (
    FINDING_SCHEMA,
    AuditFinding,
    AuditOutput,
    Bounds,
    TransactionEnd,
    two_outcomes,
)
from oncelog.spark.audit.topic_batches import PLACE_COLUMNS
from oncelog.spark.python_worker import freeze_modules
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OUTCOME = "outcome"
_BATCHES_AT_ONCE = 10_000
_TOTALS_FIELDS = tuple(asdict(PartitionTotals()))
_RESULT_SCHEMA = pa.schema([*FINDING_SCHEMA, *((name, pa.int64()) for name in _TOTALS_FIELDS)])
"""The rows that a task returns: one row per finding, and one row per partition with the totals and `kind`
null. There is also one row per transaction outcome; the driver compares it with those in other partitions. In
a row for an outcome, `base_offset` is the offset of the transaction's first data, and `other_offset` is the
offset of the marker.
"""
_RESULT_DDL = (
    "kind string, topic string, partition int, base_offset bigint, last_offset bigint, producer_id bigint, "
    "producer_epoch smallint, first_sequence int, last_sequence int, other_offset bigint, key string, "
    "explanation string, " + ", ".join(f"{name} bigint" for name in _TOTALS_FIELDS)
)


def judge(rows: DataFrame, bounds: Mapping[TopicPartition, Bounds], max_findings: int) -> AuditOutput:
    """Return the output of an audit from its rows, the result of `audit_partitions` or `audit_headers`.
    Compare the outcomes of transactions over partitions. A partition without batches gets empty totals.
    """
    rows = rows.persist()
    try:
        results = rows.where(f"kind IS NULL OR kind <> '{_OUTCOME}'").toArrow().to_pylist()
        output = _collected(results, bounds)
        with_transactions = sum(
            1 for totals in output.partitions.values() if totals.committed or totals.aborted
        )
        conflicts = _conflicts(rows, max_findings) if with_transactions > 1 else []
    finally:
        rows.unpersist()
    for finding in conflicts:
        output.add_violation(finding)
    return output


def audit_partitions(
    spark: SparkSession,
    tps: Sequence[TopicPartition],
    batches: Callable[[TopicPartition], Iterator[StoredBatch]],
    bounds: Mapping[TopicPartition, Bounds],
    max_findings: int,
) -> DataFrame:
    """Read and audit each partition in one task, without a shuffle. `batches` returns its stored batches in
    stored order.
    """

    def audit(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        for number in (number for rows in numbers for number in rows.column(0).to_pylist()):
            tp = tps[number]
            yield from _audited(tp, batches(tp), bounds[tp], max_findings)

    # Spark runs a task for each number. Spark plans a data source in Python processes of its own.
    return spark.range(0, len(tps), 1, max(1, len(tps))).mapInArrow(audit, _RESULT_DDL)


def audit_headers(
    headers: DataFrame, bounds: Mapping[TopicPartition, Bounds], max_findings: int
) -> DataFrame:
    """Audit the batch headers in a DataFrame of HEADERS_SCHEMA, each partition in one task."""

    def audit(headers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        for tp, rows in groupby(_rows(headers), key=itemgetter(0)):
            yield from _audited(tp, map(itemgetter(1), rows), bounds[tp], max_findings)

    ordered = headers.repartition("topic", "partition").sortWithinPartitions(*PLACE_COLUMNS)
    return ordered.mapInArrow(audit, _RESULT_DDL)


def _audited(
    tp: TopicPartition, batches: Iterator[StoredBatch], bounds: Bounds, max_findings: int
) -> Iterator[pa.RecordBatch]:
    audit = PartitionAudit(**asdict(bounds), max_findings=max_findings)
    while chunk := list(islice(batches, _BATCHES_AT_ONCE)):
        for batch in chunk:
            audit.see(batch)
        if outcomes := audit.take_outcomes():
            yield _outcome_rows(tp, outcomes)
    yield _result_rows(tp, audit)


def _collected(rows: list[dict[str, Any]], bounds: Iterable[TopicPartition]) -> AuditOutput:
    # Sort the rows: their order after a shuffle is random, but two audits of the same log should give equal
    # reports.
    rows.sort(key=lambda row: (row["topic"], row["partition"], row["base_offset"] or 0))
    output = AuditOutput(partitions={tp: PartitionTotals() for tp in sorted(bounds)})
    for row in rows:
        if row["kind"] is None:
            tp = TopicPartition(row["topic"], row["partition"])
            output.partitions[tp] = PartitionTotals(**{name: row[name] for name in _TOTALS_FIELDS})
        else:
            output.add(AuditFinding(**{name: row[name] for name in FINDING_SCHEMA.names}))
    return output


def _rows(headers: Iterable[pa.RecordBatch]) -> Iterator[tuple[TopicPartition, StoredBatch]]:
    """Yield partition and StoredBatch of each header.

    One Arrow batch at a time becomes Python objects.
    """
    for batch in headers:
        topics, partitions, *columns = (
            _values(batch.column(name)) for name in ("topic", "partition", *StoredBatch._fields)
        )
        tps = map(TopicPartition, topics, partitions)
        yield from zip(tps, map(StoredBatch._make, zip(*columns, strict=True)), strict=True)


def _values(column: pa.Array) -> Iterable[Any]:
    """Return the same objects as `to_pylist`, which takes several times as long for numbers without nulls."""
    if column.null_count == len(column):
        return repeat(None, len(column))
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        values: Iterable[Any] = column.to_pylist()
        return values
    numbers: Iterable[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return numbers


def _outcome_rows(tp: TopicPartition, outcomes: list[BumpedOutcome]) -> pa.RecordBatch:
    rows = [
        {
            **tp._asdict(),
            "kind": _OUTCOME,
            "producer_id": outcome.producer_id,
            "producer_epoch": outcome.marker_epoch,
            "base_offset": outcome.first_offset,
            "other_offset": outcome.marker_offset,
            "committed": int(outcome.is_commit),
        }
        for outcome in outcomes
    ]
    return pa.RecordBatch.from_pylist(rows, schema=_RESULT_SCHEMA)


def _result_rows(tp: TopicPartition, audit: PartitionAudit) -> pa.RecordBatch:
    findings, totals = audit.finish()
    rows = [{**tp._asdict(), **finding._asdict(), "kind": finding.kind.value} for finding in findings]
    rows.append({**tp._asdict(), **asdict(totals)})
    return pa.RecordBatch.from_pylist(rows, schema=_RESULT_SCHEMA)


def _conflicts(rows: DataFrame, max_findings: int) -> list[AuditFinding]:
    """Return a finding for each transaction with a COMMIT in one partition and an ABORT in another."""
    from pyspark.sql import functions as f

    where = f.struct("topic", "partition", "base_offset", "other_offset")
    ends = (
        rows.where(f.col("kind") == _OUTCOME)
        .groupBy("producer_id", "producer_epoch")
        .agg(
            f.min(f.when(f.col("committed") == 1, where)).alias("commit"),
            f.min(f.when(f.col("committed") == 0, where)).alias("abort"),
        )
        .where("commit IS NOT NULL AND abort IS NOT NULL")
    )
    conflicts = ends.orderBy("producer_id", "producer_epoch").limit(max_findings).toArrow().to_pylist()
    return [
        two_outcomes(row["producer_id"], row["producer_epoch"], _end(row["abort"]), _end(row["commit"]))
        for row in conflicts
    ]


def _end(place: Mapping[str, Any]) -> TransactionEnd:
    return TransactionEnd(place["topic"], place["partition"], place["base_offset"], place["other_offset"])
