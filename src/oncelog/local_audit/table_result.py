"""The result of an audit of a table: findings, totals and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from oncelog.audit.result import Difference
from oncelog.types import TopicPartition

ROW_KINDS = {
    "missing_row": "a committed record has no row",
    "doubled_row": "a record has more than one row",
    "aborted_row": "a row of a record whose transaction was aborted",
    "open_row": "a row of a record whose transaction is still open",
    "unknown_row": "a row of a partition or offset at which the topic never had a record",
    "unlocated_row": "a row without topic, partition or offset (NULL)",
}
"""Kind of a finding -> description of the wrong rows."""


@dataclass(frozen=True, slots=True)
class TableFinding:
    """Rows that are wrong, or missing.

    `base_offset` and `last_offset` are the first and the last of consecutive offsets; None if the rows have
    no offset. `rows` is the number of rows that the table has for these offsets. `files` names at most five
    files of the table; it is empty for missing rows. `key` is None unless the audit is by key.
    """

    kind: str
    topic: str | None
    partition: int | None
    base_offset: int | None
    last_offset: int | None
    rows: int
    files: tuple[str, ...]
    key: str | None
    explanation: str


@dataclass(frozen=True, slots=True)
class TableTotals:
    """The totals of one partition. Except `rows` and `not_judged_rows`, they count offsets.

    - `records`: committed records that must be in the table.
    - `rows`: rows of the partition, including rows at offsets that it does not have. Each of these rows also
      counts in `unknown`.
    - `not_judged_rows`: rows of records that the topic no longer has.
    """

    records: int = 0
    rows: int = 0
    missing: int = 0
    doubled: int = 0
    aborted: int = 0
    open: int = 0
    unknown: int = 0
    not_judged_rows: int = 0

    @property
    def findings(self) -> int:
        """Return the number of offsets with a finding: missing or doubled rows, or rows of aborted, open or
        unknown records.
        """
        return self.missing + self.doubled + self.aborted + self.open + self.unknown


@dataclass(frozen=True, slots=True)
class TableAuditResult:
    """The result of an audit of a table.

    `table` describes the table and its version. `findings` lists at most `max_findings` runs of offsets per
    partition; `finding_count` counts all offsets. `notes` are lines of text about the rows and records that
    were not judged. `difference` is None unless the audit is by key.
    """

    table: str
    findings: tuple[TableFinding, ...]
    partitions: Mapping[TopicPartition, TableTotals]
    unlocated_rows: int = 0
    unknown_partition_rows: int = 0
    notes: Sequence[str] = ()
    difference: Difference | None = None

    @property
    def totals(self) -> TableTotals:
        """Return the sums over all partitions."""
        rows = [asdict(totals) for totals in self.partitions.values()]
        return TableTotals(**{name: sum(row[name] for row in rows) for name in asdict(TableTotals())})

    @property
    def finding_count(self) -> int:
        """Return the sum of wrong offsets, rows without a place (NULL), rows of nonexistent partitions, and
        differing keys.
        """
        keys = self.difference.keys if self.difference else 0
        return self.totals.findings + self.unlocated_rows + self.unknown_partition_rows + keys

    @property
    def verdict(self) -> Literal["clean", "violated"]:
        """Return `violated` after any finding, otherwise `clean`."""
        return "violated" if self.finding_count else "clean"

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the findings as plain values for JSON and tables."""
        return [
            {"severity": "violation", **asdict(finding), "files": list(finding.files)}
            for finding in self.findings
        ]

    def summary(self) -> list[str]:
        """Return the result as lines of text. The last line is the verdict."""
        totals, difference = self.totals, self.difference
        if difference is None:
            lines = [
                f"{totals.records} committed records in {len(self.partitions)} partitions, "
                f"{totals.rows} rows in {self.table}",
                f"offsets missing {totals.missing}, doubled {totals.doubled}, aborted {totals.aborted}, open "
                f"{totals.open}, unknown {totals.unknown}",
            ]
        else:
            lines = [
                f"{difference.expected} committed records with a key, {difference.found} rows with a key in "
                f"{self.table}",
                f"keys lost {difference.lost}, doubled {difference.doubled}, "
                f"unexpected {difference.unexpected}",
            ]
        count, shown = self.finding_count, len(self.findings)
        more = f" ({count} findings in {shown} lines)" if count else ""
        return [*lines, *self.notes, f"verdict: {self.verdict}{more}"]
