"""The audit of a table as a Spark job, for tables of any format that Spark reads.

A first job counts the table's rows by offset, and Spark keeps the counts. The end of the topic is looked up
only after this job. So a row that a writer adds during the job is never judged as a row of an unknown record.
In a second job each task gets the counts of some windows of offsets. It reads the headers of the topic's
batches in a window, and judges them with the rules of oncelog.audit.table_rows, as the audit without Spark
does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from oncelog.audit.result import MAX_FINDINGS
from oncelog.audit.table_rows import Ints, OffsetRun, RowVerdict, judge_window, merge_windows
from oncelog.client.arguments import names_of
from oncelog.client.consumer.blocking import Consumer
from oncelog.errors import ConfigError, MisuseError
from oncelog.local_audit.record_fates import PartitionSnapshot, RecordFates
from oncelog.local_audit.row_runs import WINDOW_OFFSETS
from oncelog.local_audit.table_audit import notes_of, snapshot_of, totals_of
from oncelog.local_audit.table_findings import outside_finding, row_finding, unlocated_finding
from oncelog.local_audit.table_result import TableAuditResult, TableFinding, TableTotals
from oncelog.local_audit.tables.table import Columns, missing_column, parse_columns, topic_column
from oncelog.local_audit.topic_state import current_offsets, look_up, source_options
from oncelog.spark import _pyspark as _pyspark
from oncelog.spark.source.source_options import parse_options
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_KEY = ["topic", "partition", "window"]
_COUNTS = (*_KEY, "offset", "times", "first_file", "last_file")
_RESULT = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int64()),
        ("verdict", pa.int32()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("rows", pa.int64()),
        ("files", pa.list_(pa.string())),
        ("records", pa.int64()),
        ("not_judged", pa.int64()),
        ("highest", pa.int64()),
        ("counts", pa.list_(pa.int64())),
    ]
)
"""The rows that a task returns: one for each run of offsets with a wrong verdict, and one for each window,
with the window's totals and `verdict` null.
"""
_RESULT_DDL = (
    "topic string, partition bigint, verdict int, first bigint, last bigint, rows bigint, "
    "files array<string>, records bigint, not_judged bigint, highest bigint, counts array<bigint>"
)
_MAX_LISTED = 100_000
"""Maximum number of runs of wrong offsets that the driver collects. The totals count all runs."""


def audit_table(
    spark: SparkSession,
    bootstrap_servers: str,
    topics: str | Sequence[str],
    table: DataFrame | Callable[[], DataFrame],
    *,
    columns: str | None = None,
    compacted_topics: Collection[str] | str = (),
    client_config: Mapping[str, object] | None = None,
    max_findings: int = MAX_FINDINGS,
    window_offsets: int = WINDOW_OFFSETS,
) -> TableAuditResult:
    """Audit a table that was written from topics. `table` is any DataFrame with the columns of a table.

    While a writer adds rows, `table` must be a function that returns the DataFrame. Spark fixes the files or
    the version of a table when a DataFrame of it is created, so rows that were added later would be missing.

    The other parameters, the result and the exceptions are those of `oncelog.local_audit.audit_table`. The
    files of rows are known from `input_file_name()`, at most two files for each offset. Rows of other topics
    are not counted. A task judges `window_offsets` offsets at once.
    """
    names = names_of(topics)
    if not names:
        raise MisuseError("no topic to audit: give at least one")
    wanted = parse_columns(columns)
    placed = None if callable(table) else _placed(table, wanted, names)
    options = source_options(bootstrap_servers, names, client_config or {})
    client = {**parse_options(options).client, "isolation.level": "read_committed"}
    before, bounds = look_up(options, compacted_topics)
    if placed is None:
        placed = _placed(table(), wanted, names)
    counted = _counted(placed, window_offsets).persist()
    try:
        unlocated = {row[0]: row[1] for row in _unlocated(counted).collect()}
        after = current_offsets(options, before)
        compacted = {tp.topic for tp in bounds if bounds[tp].is_compacted}
        snapshots = {
            tp: snapshot_of(tp, before, after, tp.topic in compacted) for tp in sorted(after.earliest)
        }
        windows = spark.createDataFrame(_windows(snapshots, window_offsets), counted.schema)
        located = counted.where("offset IS NOT NULL").unionByName(windows)
        ordered = located.repartition(*_KEY).sortWithinPartitions(*_KEY, "offset")
        judged = ordered.mapInArrow(
            _judge(client, snapshots, window_offsets, max_findings), _RESULT_DDL
        ).persist()
        try:
            result = _result(judged, snapshots, unlocated, max_findings)
        finally:
            judged.unpersist()
    finally:
        counted.unpersist()
    current_offsets(options, before)  # raises DataLossError if a topic was replaced during the audit
    return result


def _placed(table: DataFrame, columns: Columns, topics: Sequence[str]) -> DataFrame:
    """Return topic, partition, offset and file of the rows that belong to `topics` or have no topic. Raises
    ConfigError for a missing or unusable column.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.types import IntegralType, StringType

    types = {field.name: field.dataType for field in table.schema}
    topic = topic_column(columns, list(types), topics, "the table")
    for name in (columns.partition, columns.offset):
        if name not in types:
            raise missing_column(name, list(types), "the table")
        if not isinstance(types[name], IntegralType):
            raise ConfigError(f"column {name!r} is {types[name].simpleString()}, but must be an integer")
    if topic is not None and not isinstance(types[topic], StringType):
        raise ConfigError(f"column {topic!r} is {types[topic].simpleString()}, but must be a string")

    def column(name: str) -> Any:
        return f.col("`" + name.replace("`", "``") + "`")

    placed = table.select(
        # Cast to drop the column's collation, which could treat the topics `t` and `T` as equal.
        (f.lit(topics[0]) if topic is None else column(topic).cast(StringType())).alias("topic"),
        column(columns.partition).cast("bigint").alias("partition"),
        column(columns.offset).cast("bigint").alias("offset"),
        f.input_file_name().alias("file"),
    )
    return placed.where(f.col("topic").isNull() | f.col("topic").isin(list(topics)))


def _counted(placed: DataFrame, window_offsets: int) -> DataFrame:
    """Return the number of rows of each place, as columns _COUNTS. Without a place, the offset is null."""
    from pyspark.sql import functions as f

    is_located = f.col("topic").isNotNull() & f.col("partition").isNotNull() & f.col("offset").isNotNull()
    # Count rows without a topic, partition or offset separately for each file.
    placed = placed.select(
        *[f.when(is_located, f.col(name)).alias(name) for name in ("topic", "partition", "offset")],
        "file",
        f.when(~is_located, f.col("file")).alias("unlocated_in"),
    )
    counted = placed.groupBy("topic", "partition", "offset", "unlocated_in").agg(
        f.count(f.lit(1)).alias("times"), f.min("file").alias("first_file"), f.max("file").alias("last_file")
    )
    # Put all negative offsets into window -1, because DIV rounds toward 0 and would put some of them into
    # window 0.
    window = f.expr(f"CASE WHEN offset < 0 THEN -1 ELSE offset DIV {window_offsets} END")
    return counted.withColumn("window", window).select(*_COUNTS)


def _unlocated(counted: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return counted.where("offset IS NULL").groupBy("first_file").agg(f.sum("times")).orderBy("first_file")


def _windows(
    snapshots: Mapping[TopicPartition, PartitionSnapshot], size: int
) -> list[tuple[str, int, int, None, int, None, None]]:
    """Return a row without an offset for each window in which the topic has records, so that windows without
    table rows are judged too.
    """
    return [
        (*tp, window, None, 0, None, None)
        for tp, s in snapshots.items()
        for window in (range(s.log_start // size, -(-s.end // size)) if s.log_start < s.end else ())
    ]


class _WindowRows(NamedTuple):
    """The rows of one window: columns of the table _COUNTS, sorted by offset, without nulls."""

    tp: TopicPartition
    window: int
    rows: pa.Table


def _split(batches: Iterable[pa.RecordBatch]) -> Iterator[_WindowRows]:
    """Yield the rows of each window in turn, from batches that are sorted by window. A window may span
    several batches.
    """
    key: tuple[str, int, int] | None = None
    pieces: list[pa.Table] = []
    for batch in batches:
        table = pa.Table.from_batches([batch])
        codes = [table[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in _KEY]
        is_edge = np.any([np.diff(code) != 0 for code in codes], axis=0)
        starts = [0, *(np.flatnonzero(is_edge) + 1).tolist()] if len(table) else []
        for start, end in zip(starts, [*starts[1:], len(table)], strict=True):
            found = tuple(table[name][start].as_py() for name in _KEY)
            if key is not None and found != key:
                yield _window_rows(key, pieces)
                pieces = []
            key = found
            pieces.append(table.slice(start, end - start))
    if key is not None:
        yield _window_rows(key, pieces)


def _window_rows(key: tuple[str, int, int], pieces: list[pa.Table]) -> _WindowRows:
    rows = pa.concat_tables(pieces).select(_COUNTS[3:])
    return _WindowRows(TopicPartition(*key[:2]), key[2], rows.filter(rows["offset"].is_valid()))


def _judge(
    client: Mapping[str, object],
    snapshots: Mapping[TopicPartition, PartitionSnapshot],
    size: int,
    max_findings: int,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with ExitStack() as stack:
            fates: dict[TopicPartition, RecordFates] = {}
            consumer: Consumer | None = None
            for tp, window, rows in _split(batches):
                snapshot = snapshots.get(tp)
                if snapshot is not None and tp not in fates:
                    consumer = consumer or stack.enter_context(Consumer(dict(client)))
                    fates[tp] = RecordFates(consumer, tp, snapshot)
                yield _judged(tp, window, rows, fates.get(tp), size, max_findings)

    return judge


def _judged(
    tp: TopicPartition, window: int, rows: pa.Table, fates: RecordFates | None, size: int, max_findings: int
) -> pa.RecordBatch:
    """Return rows of _RESULT: the wrong runs of a window, and the window's totals."""
    offsets: Ints = rows["offset"].to_numpy()
    times: Ints = rows["times"].to_numpy()
    start, end = window * size, 0 if fates is None else min((window + 1) * size, fates.snapshot.end)
    # A window that begins below 0, or above the partition's end, has no records.
    inside = int(np.searchsorted(offsets, end)) if window >= 0 and start < end else 0
    result: list[dict[str, Any]] = []
    totals: dict[str, Any] = {"records": 0, "not_judged": 0, "counts": [0] * len(RowVerdict)}
    if fates is not None and window >= 0 and start < end:
        counts = np.zeros(end - start, np.int64)
        counts[offsets[:inside] - start] = times[:inside]
        judged = judge_window(fates.window(start, end), counts, start, max_findings)
        totals = {
            "records": judged.records,
            "not_judged": judged.not_judged_rows,
            "counts": judged.counts,
        }
        for run in judged.wrong:
            result.append(_run_row(run, rows, offsets))
    outside = int(times[inside:].sum())
    totals["counts"][RowVerdict.UNKNOWN] += outside if fates is not None else 0
    for index in range(inside, min(len(offsets), inside + max_findings)):
        offset = int(offsets[index])
        result.append(
            _run_row(OffsetRun(RowVerdict.UNKNOWN, offset, offset, int(times[index])), rows, offsets)
        )
    result.append(
        totals
        | {
            "rows": int(times.sum()),
            "highest": int(offsets[inside - 1]) if inside else None,
        }
    )
    return pa.RecordBatch.from_pylist([tp._asdict() | row for row in result], schema=_RESULT)


def _run_row(run: OffsetRun, rows: pa.Table, offsets: Ints) -> dict[str, Any]:
    first, last = np.searchsorted(offsets, run.first), np.searchsorted(offsets, run.last, "right")
    found = rows.slice(int(first), int(last - first))
    files = {name.as_py() for column in ("first_file", "last_file") for name in found[column].unique()}
    return {**run._asdict(), "verdict": int(run.verdict), "files": sorted(files)}


def _result(
    judged: DataFrame,
    snapshots: Mapping[TopicPartition, PartitionSnapshot],
    unlocated: Mapping[str, int],
    max_findings: int,
) -> TableAuditResult:
    from pyspark.sql import functions as f

    sums = (
        judged.where("verdict IS NULL")
        .groupBy("topic", "partition")
        .agg(
            *(f.sum(name).alias(name) for name in ("records", "not_judged", "rows")),
            f.max("highest").alias("highest"),
            *(f.sum(f.col("counts")[int(verdict)]).alias(f"v{int(verdict)}") for verdict in RowVerdict),
        )
        .collect()
    )
    totals: dict[TopicPartition, TableTotals] = {}
    highest: dict[TopicPartition, int | None] = {}
    unknown_partition_rows = 0
    for row in sums:
        tp = TopicPartition(row["topic"], row["partition"])
        highest[tp] = row["highest"]
        if tp not in snapshots:
            unknown_partition_rows += row["rows"]
            continue
        counts = [row[f"v{int(verdict)}"] for verdict in RowVerdict]
        totals[tp] = totals_of(row["records"], row["rows"], counts, row["not_judged"])
    totals = {tp: totals.get(tp, TableTotals()) for tp in sorted(snapshots)}
    wrong = judged.where("verdict IS NOT NULL").orderBy("topic", "partition", "first").limit(_MAX_LISTED)
    findings = list(_findings(wrong.toArrow().to_pylist(), snapshots, highest, max_findings))
    findings += [unlocated_finding(file, count) for file, count in unlocated.items()]
    return TableAuditResult(
        "the table",
        tuple(findings),
        totals,
        sum(unlocated.values()),
        unknown_partition_rows,
        notes_of(totals, snapshots),
    )


def _findings(
    rows: list[dict[str, Any]],
    snapshots: Mapping[TopicPartition, PartitionSnapshot],
    highest: Mapping[TopicPartition, int | None],
    max_findings: int,
) -> Iterator[TableFinding]:
    by_partition: dict[TopicPartition, list[dict[str, Any]]] = {}
    for row in rows:
        by_partition.setdefault(TopicPartition(row["topic"], row["partition"]), []).append(row)
    # As in the audit without Spark, existing partitions come first, and in each partition existing offsets.
    for tp in sorted(by_partition, key=lambda tp: (tp not in snapshots, tp)):
        snapshot = snapshots.get(tp)
        end = 0 if snapshot is None else snapshot.end
        runs = [(_run_of(row), set(row["files"])) for row in by_partition[tp]]
        inside = [pair for pair in runs if 0 <= pair[0].first < end]
        merged = list(merge_windows(([run], [files]) for run, files in inside))
        found = [row_finding(tp, run, files, highest.get(tp)) for run, files in merged]
        found += [
            outside_finding(
                tp, run.first, run.last, run.rows, min(files), snapshot.end if snapshot is not None else None
            )
            for run, files in runs
            if not 0 <= run.first < end
        ]
        yield from found[:max_findings]


def _run_of(row: Mapping[str, Any]) -> OffsetRun:
    return OffsetRun(RowVerdict(row["verdict"]), row["first"], row["last"], row["rows"])
