"""Audit a table that was written from a topic: does it have one row per committed record, and no other?

The order of the look-ups allows producers and writers to run during the audit:

    1. the last stable offset (`expected_end`)
    2. the table is opened, which fixes the files, version or transaction that are read
    3. the high watermark and the last stable offset (`end`, `stable_end`), and the log start
    4. the table's rows are read, then the topic's headers, window by window

A record that was committed before look-up 1 must have a row. A row that is in the table at 2 must belong to a
record that is committed at 3. So a record that is committed between 1 and 3 is never a finding, with or
without a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from oncelog.audit.key_findings import key_text
from oncelog.audit.result import MAX_FINDINGS
from oncelog.audit.table_rows import OffsetRun, RowVerdict, count_rows, files_of, judge_window, merge_windows
from oncelog.client.arguments import names_of
from oncelog.client.consumer.blocking import Consumer
from oncelog.errors import ConfigError, MisuseError
from oncelog.local_audit.key_counts import KeyCounts
from oncelog.local_audit.keys import EXPECTED, FOUND, LATER, KeyRow, compare_counts, read_records
from oncelog.local_audit.record_fates import PartitionSnapshot, RecordFates
from oncelog.local_audit.row_runs import RowRuns
from oncelog.local_audit.spill_directory import SpillDirectory
from oncelog.local_audit.table_findings import outside_finding, row_finding, unlocated_finding
from oncelog.local_audit.table_result import TableAuditResult, TableFinding, TableTotals
from oncelog.local_audit.tables.table import Columns, Table, parse_columns, parse_table
from oncelog.local_audit.topic_state import current_offsets, look_up, source_options
from oncelog.spark.source.offset_ranges import Available
from oncelog.spark.source.source_options import parse_options
from oncelog.types import TopicPartition

__all__ = ["audit_table"]


def audit_table(
    bootstrap_servers: str,
    topics: str | Sequence[str],
    table: str,
    *,
    columns: str | None = None,
    by_key: bool = False,
    compacted_topics: Collection[str] | str = (),
    client_config: Mapping[str, object] | None = None,
    max_findings: int = MAX_FINDINGS,
) -> TableAuditResult:
    """Audit a table that was written from topics.

    `table` is `parquet:PATH`, `delta:PATH`, or `sqlite:PATH` with `#NAME` if the database has several tables.
    `iceberg:NAME` is in the default catalog of pyiceberg's configuration; `iceberg:PATH` is a metadata file
    or the directory of a table in a Hadoop catalog.
    `jdbc:postgresql://HOST:PORT/DB?table=NAME` is a table or view of a PostgreSQL database.
    `columns` names the table's columns: `topic=T,partition=P,offset=O,key=K`, each optional. Without a column
    for the topic, all rows belong to the only audited topic.

    `by_key` compares by key instead: each key must have as many rows as it has committed records. Records and
    rows without a key are only counted. This does not show which row of a key is wrong, or that a row belongs
    to an aborted record. It finds nothing if one record of a key has no row and another one has two.

    `compacted_topics` are topics that were compacted in the past. The audit detects by itself which topics
    are compacted now. `client_config` contains additional consumer settings. `max_findings` limits the listed
    findings per partition.

    Raises ConfigError, MissingDependency, MisuseError, StorageError (the table cannot be read),
    UnknownTopicOrPartition, DataLossError (a topic was deleted or re-created during the audit), and
    OncelogError if the topic cannot be read.
    """
    # Drop repeated names: the rows of a topic that is named twice must not be counted twice. Guard:
    # test_a_topic_that_is_named_twice_is_compared_once.
    names = list(dict.fromkeys(names_of(topics)))
    if not names:
        raise MisuseError("no topic to audit: give at least one")
    kind, path = parse_table(table)
    wanted = parse_columns(columns)
    options = source_options(bootstrap_servers, names, client_config or {})
    client = {**parse_options(options).client, "isolation.level": "read_committed"}
    before, bounds = look_up(options, compacted_topics)
    with _open(kind, path, wanted, names) as opened:
        after = current_offsets(options, before)
        compacted = {tp.topic for tp in bounds if bounds[tp].is_compacted}
        if by_key:
            # If retention or compaction has removed records, do not judge surplus rows: they may be right.
            is_whole = not compacted and not any(after.earliest.values())
            result = _audit_keys(
                client, opened, wanted.key, before, after, max_findings, judge_surplus=is_whole
            )
        else:
            snapshots = {
                tp: snapshot_of(tp, before, after, tp.topic in compacted) for tp in sorted(after.earliest)
            }
            result = _audit_offsets(client, opened, snapshots, max_findings)
    current_offsets(options, before)  # raises DataLossError if a topic was replaced during the audit
    return result


def snapshot_of(
    tp: TopicPartition, before: Available, after: Available, is_compacted: bool
) -> PartitionSnapshot:
    """Return a partition's PartitionSnapshot from the look-ups `before` and `after` the opening of the
    table.
    """
    log_start = after.earliest[tp]
    # The records of a partition that was added between the look-ups need not be in the table.
    expected_end = before.latest.get(tp, log_start)
    stable_end, end = max(after.latest[tp], log_start), max(after.written[tp], log_start)
    return PartitionSnapshot(log_start, expected_end, stable_end, end, is_compacted)


def _open(kind: str, path: str, columns: Columns, topics: Sequence[str]) -> Table:
    # Import only the reader of this format: each reader imports packages that the others do not need.
    match kind:
        case "parquet":
            from oncelog.local_audit.tables.arrow_files import open_parquet

            return open_parquet(path, columns, topics)
        case "delta":
            from oncelog.local_audit.tables.arrow_files import open_delta

            return open_delta(path, columns, topics)
        case "iceberg":
            from oncelog.local_audit.tables.iceberg_table import open_iceberg

            return open_iceberg(path, columns, topics)
        case "sqlite":
            from oncelog.local_audit.tables.sqlite_table import SqliteTable

            return SqliteTable(path, columns, topics)
        case "jdbc":
            from oncelog.local_audit.tables.postgresql_table import open_postgresql

            return open_postgresql(path, columns, topics)
        case _:
            raise ConfigError(f"{kind}: no such format of tables")


# Comparison by offset


def _audit_offsets(
    client: Mapping[str, object],
    table: Table,
    snapshots: Mapping[TopicPartition, PartitionSnapshot],
    max_findings: int,
) -> TableAuditResult:
    findings: list[TableFinding] = []
    totals: dict[TopicPartition, TableTotals] = {}
    with SpillDirectory() as spill, Consumer(dict(client)) as consumer:
        rows = RowRuns({tp: snapshot.end for tp, snapshot in snapshots.items()}, spill)
        table.read_into(rows)
        for tp, snapshot in snapshots.items():
            audit = _PartitionAudit(tp, RecordFates(consumer, tp, snapshot), rows, max_findings)
            audit.run()
            findings += audit.findings
            totals[tp] = audit.totals
        for tp in sorted(rows.outside.keys() - snapshots.keys()):
            findings += _outside(tp, rows, None, max_findings)
        findings += [unlocated_finding(rows.files[file], n) for file, n in rows.unlocated.items()]
        unknown = sum(outside.rows for tp, outside in rows.outside.items() if tp not in snapshots)
        return TableAuditResult(
            table.description,
            tuple(findings),
            totals,
            sum(rows.unlocated.values()),
            unknown + rows.rows_of_more_partitions,
            [*notes_of(totals, snapshots), *_notes_on_rows(rows)],
        )


class _PartitionAudit:
    """The audit of one partition, window by window."""

    def __init__(self, tp: TopicPartition, fates: RecordFates, rows: RowRuns, max_findings: int) -> None:
        self.findings: list[TableFinding] = []
        self._tp, self._fates, self._rows = tp, fates, rows
        self._max_findings = max_findings
        self._counts = [0] * len(RowVerdict)
        self._records = self._not_judged_rows = 0

    def run(self) -> None:
        """Audit all windows that have rows, or records that the topic still has."""
        tp, rows = self._tp, self._rows
        highest = rows.highest.get(tp)
        for run, files in merge_windows(map(self._judge, self._windows())):
            if len(self.findings) < self._max_findings:
                self.findings.append(row_finding(tp, run, {rows.files[file] for file in files}, highest))
        if (outside := rows.outside.get(tp)) is not None:
            self._counts[RowVerdict.UNKNOWN] += outside.rows
            room = self._max_findings - len(self.findings)
            self.findings += _outside(tp, rows, self._fates.snapshot.end, max(0, room))

    def _windows(self) -> Iterator[int]:
        snapshot = self._fates.snapshot
        size = self._rows.window_offsets
        first, end = snapshot.log_start // size, -(-snapshot.end // size)
        with_records = range(first, end) if snapshot.log_start < snapshot.end else range(0)
        yield from [window for window in self._rows.windows(self._tp) if window not in with_records]
        yield from with_records

    def _judge(self, window: int) -> tuple[list[OffsetRun], list[set[int]]]:
        """Return the first wrong runs of a window, with their files. Add the window's counts to the
        totals.
        """
        start = window * self._rows.window_offsets
        end = min(start + self._rows.window_offsets, self._fates.snapshot.end)
        rows = count_rows(self._rows.read(self._tp, window), start, end)
        # Keep one run more than may be listed, because the window's first run may continue the last run of
        # the previous window.
        room = self._max_findings + 1 - len(self.findings)
        judged = judge_window(self._fates.window(start, end), rows, start, room)
        self._records += judged.records
        self._not_judged_rows += judged.not_judged_rows
        self._counts = [sum(pair) for pair in zip(self._counts, judged.counts, strict=True)]
        return judged.wrong, files_of(judged.wrong, self._rows.read(self._tp, window))

    @property
    def totals(self) -> TableTotals:
        """Return the partition's totals. Valid after `run` has ended."""
        outside = self._rows.outside.get(self._tp)
        rows = self._rows.rows[self._tp] + (outside.rows if outside else 0)
        return totals_of(self._records, rows, self._counts, self._not_judged_rows)


def totals_of(records: int, rows: int, counts: Sequence[int], not_judged_rows: int) -> TableTotals:
    """Return the totals of a partition. `counts` are the numbers of offsets by RowVerdict."""
    return TableTotals(
        records=records,
        rows=rows,
        missing=counts[RowVerdict.MISSING],
        doubled=counts[RowVerdict.DOUBLED],
        aborted=counts[RowVerdict.ABORTED],
        open=counts[RowVerdict.OPEN],
        unknown=counts[RowVerdict.UNKNOWN],
        not_judged_rows=not_judged_rows,
    )


def _outside(tp: TopicPartition, rows: RowRuns, end: int | None, limit: int) -> list[TableFinding]:
    """Return findings for the rows outside a partition's offsets: one for each run and file, at most
    `limit`.
    """
    return [
        outside_finding(tp, first, last, (last - first + 1) * times, rows.files[file], end)
        for first, last, times, file in rows.outside[tp].runs()[:limit].tolist()
    ]


def notes_of(
    totals: Mapping[TopicPartition, TableTotals], snapshots: Mapping[TopicPartition, PartitionSnapshot]
) -> list[str]:
    """Return lines of text about the rows and records that were not judged."""
    notes = []
    if count := sum(t.not_judged_rows for t in totals.values()):
        notes.append(f"{count} rows were not judged: their records are gone (log start, compaction)")
    if trimmed := sum(1 for snapshot in snapshots.values() if snapshot.log_start):
        why = "missing rows of removed records cannot be found"
        notes.append(f"{trimmed} partitions begin above offset 0: {why}")
    if held := sum(max(0, s.end - s.expected_end) for s in snapshots.values()):
        why = "they are newer than the look-up, or held back by an open transaction"
        notes.append(f"{held} offsets need no row: {why}")
    return notes


def _notes_on_rows(rows: RowRuns) -> list[str]:
    notes = []
    if rows.rows_of_other_topics:
        notes.append(f"{rows.rows_of_other_topics} rows of other topics were not compared")
    if rows.rows_of_more_partitions:
        notes.append(f"{rows.rows_of_more_partitions} rows of further unknown partitions are not listed")
    return notes


# Comparison by key

_KEY_LIMITS = (
    "compared by key only: this cannot show which row of a key is wrong, that one record of a key is missing "
    "while another one has two rows, or that a row belongs to an aborted record"
)


def _audit_keys(
    client: Mapping[str, object],
    table: Table,
    column: str,
    before: Available,
    after: Available,
    max_findings: int,
    *,
    judge_surplus: bool,
) -> TableAuditResult:
    """Compare the rows of each key with the records before the table was opened.

    Records that were committed between the two look-ups need no row, and may have one. See
    test_a_comparison_by_key_accuses_no_row_that_a_writer_adds_meanwhile.
    """
    tps = sorted(before.earliest)
    starts = {tp: max(before.latest.get(tp, start), start) for tp, start in after.earliest.items()}
    later = replace(after, earliest=starts)
    with SpillDirectory() as spill:
        counts = KeyCounts(spill)
        positions: dict[int, int] = {}
        for file, keys in table.read_keys(column):
            first = positions.get(file, 0)
            positions[file] = first + len(keys)
            counts.add(FOUND, keys, file, pa.array(np.arange(first, first + len(keys))))
        for group, offsets in ((EXPECTED, before), (LATER, later)):
            for number, batch in read_records(client, offsets):
                counts.add(group, batch["key"], number, batch["offset"])
        shown, difference, not_judged = compare_counts(counts, max_findings, judge_surplus=judge_surplus)
    notes = [_KEY_LIMITS]
    if difference.without_key:
        notes.append(f"{difference.without_key} records or rows without a key were not compared")
    if not_judged:
        text = (
            "keys have more rows than records, which is not judged: records are gone (log start, compaction)"
        )
        notes.append(f"{not_judged} {text}")
    findings = tuple(_key_finding(row, tps, table.files) for row in shown)
    return TableAuditResult(table.description, findings, {}, notes=notes, difference=difference)


def _key_finding(row: KeyRow, tps: Sequence[TopicPartition], files: Sequence[str]) -> TableFinding:
    text = f"{row.found} rows, {row.expected} records"
    topic = partition = offset = None
    if row.expected_last is not None:
        number, offset = row.expected_last
        topic, partition = tps[number]
        text += f", the last at {tps[number]}:{offset}"
    named: tuple[str, ...] = ()
    if row.found_last is not None:
        file, position = row.found_last
        named = (files[file],)
        text += f"; the last row is number {position + 1} of its file"
    return TableFinding(row.kind, topic, partition, offset, offset, row.found, named, key_text(row.key), text)
