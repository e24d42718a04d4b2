"""The findings of a table's audit, from runs of offsets with a verdict."""

from __future__ import annotations

from collections.abc import Collection

from oncelog.audit.table_rows import OffsetRun, RowVerdict
from oncelog.local_audit.table_result import TableFinding
from oncelog.types import TopicPartition

_FILES_NAMED = 5
_KINDS = {
    RowVerdict.MISSING: "missing_row",
    RowVerdict.DOUBLED: "doubled_row",
    RowVerdict.ABORTED: "aborted_row",
    RowVerdict.OPEN: "open_row",
    RowVerdict.UNKNOWN: "unknown_row",
}


def row_finding(
    tp: TopicPartition, run: OffsetRun, files: Collection[str], highest: int | None
) -> TableFinding:
    """Return the finding about a run of offsets whose rows are wrong or missing.

    `highest` is the highest offset of the partition that has a row; None if there is none.
    """
    named = tuple(sorted(files)[:_FILES_NAMED])
    text = _explain(run, len(files), is_behind=highest is None or run.first > highest)
    return TableFinding(_KINDS[run.verdict], *tp, run.first, run.last, run.rows, named, None, text)


def _explain(run: OffsetRun, files: int, *, is_behind: bool) -> str:
    where = f" in {files} files" if files > 1 else ""
    match run.verdict:
        case RowVerdict.MISSING:
            behind = "; no later record of the partition has one: the writer may be behind"
            return f"{run.size} committed records have no row" + (behind if is_behind else "")
        case RowVerdict.DOUBLED:
            return f"{run.size} records have {run.rows} rows{where}"
        case RowVerdict.ABORTED:
            return f"{run.rows} rows of {run.size} records whose transaction was aborted{where}"
        case RowVerdict.OPEN:
            return f"{run.rows} rows of {run.size} records whose transaction is open{where}"
        case _:
            return f"{run.rows} rows of {run.size} offsets that have no record{where}"


def outside_finding(
    tp: TopicPartition, first: int, last: int, rows: int, file: str, end: int | None
) -> TableFinding:
    """Return the finding about rows at offsets below 0 or from `end` on, or of a partition that does not
    exist (`end` is None).
    """
    has = f"{tp.topic} has no partition {tp.partition}"
    if end is not None:
        has = f"{tp} has offsets from 0 to {end} (exclusive)"
    return TableFinding("unknown_row", *tp, first, last, rows, (file,), None, f"{rows} rows, but {has}")


def unlocated_finding(file: str, rows: int) -> TableFinding:
    """Return the finding about rows with NULL as topic, partition or offset."""
    text = f"{rows} rows have NULL as topic, partition or offset: they belong to no record"
    return TableFinding("unlocated_row", None, None, None, None, rows, (file,), None, text)
