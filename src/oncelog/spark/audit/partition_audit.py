"""Run the rules of oncelog.audit in Spark tasks, on one stream of batch headers per partition.

Spark sorts the headers by partition and place, on disk if memory is short. A task then passes the headers to
the rules one after another, so it needs memory only for the rules' state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import groupby, islice
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
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OUTCOME = "outcome"
_ROWS_AT_ONCE = 10_000
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


def judge(headers: DataFrame, bounds: Mapping[TopicPartition, Bounds], max_findings: int) -> AuditOutput:
    """Audit the batch headers in a DataFrame of HEADERS_SCHEMA, and compare the outcomes of transactions over
    partitions. A partition without batches gets empty totals.
    """
    ordered = headers.repartition("topic", "partition").sortWithinPartitions(*PLACE_COLUMNS)
    rows = ordered.mapInArrow(_audit_function(bounds, max_findings), _RESULT_DDL).persist()
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


def _audit_function(
    bounds: Mapping[TopicPartition, Bounds], max_findings: int
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def audit_sorted(headers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for (topic, partition), rows in groupby(_rows(headers), key=itemgetter(0, 1)):
            tp = TopicPartition(topic, partition)
            audit = PartitionAudit(**asdict(bounds[tp]), max_findings=max_findings)
            while chunk := list(islice(rows, _ROWS_AT_ONCE)):
                for row in chunk:
                    audit.see(StoredBatch._make(row[2:]))
                if outcomes := audit.take_outcomes():
                    yield _outcome_rows(tp, outcomes)
            yield _result_rows(tp, audit)

    return audit_sorted


def _rows(headers: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """Yield topic, partition and the fields of a StoredBatch per header.

    One Arrow batch at a time becomes Python objects.
    """
    for batch in headers:
        columns = batch.select(["topic", "partition", *StoredBatch._fields]).columns
        yield from zip(*(column.to_pylist() for column in columns), strict=True)


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
