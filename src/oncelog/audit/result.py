"""The result of an audit: violations, notes (findings about legal states), totals and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa

from oncelog.audit.findings import FindingKind, PartitionTotals
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Verdict = Literal["clean", "violated", "unproven"]

DIFFERENCE_KINDS = ("lost_key", "doubled_key", "unexpected_key")
"""The kinds of findings of a comparison between two topics."""
KEY_KINDS = ("repeated_key", *DIFFERENCE_KINDS)
"""The kinds of findings about keys."""
MAX_FINDINGS = 1000
"""Maximum number of listed findings per partition, and of listed repeated keys in total.

Counts include the findings that are not listed.
"""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One violation or note. `kind` is the value of a FindingKind, one of KEY_KINDS, or one of
    PROVENANCE_KINDS.

    Fields that do not apply are None: a repeated key has no sequences, a sequence violation has no key.
    """

    kind: str
    topic: str
    partition: int
    base_offset: int
    last_offset: int
    producer_id: int | None
    producer_epoch: int | None
    first_sequence: int | None
    last_sequence: int | None
    other_offset: int | None
    key: str | None
    explanation: str

    @property
    def tp(self) -> TopicPartition:
        """Return the partition of the finding."""
        return TopicPartition(self.topic, self.partition)


class KeyTotals(NamedTuple):
    """Totals of a key check: records with a key, distinct keys, and keys that occur more than once.

    `without_key` counts records that have no key, so they could not be checked.
    """

    records: int
    keys: int
    repeated: int
    without_key: int = 0


class Difference(NamedTuple):
    """Totals of a comparison between two topics.

    `lost`, `doubled` and `unexpected` count keys. `expected` and `found` count records with a key.
    `without_key` counts records that have no key, so they could not be compared.
    """

    expected: int
    found: int
    lost: int
    doubled: int
    unexpected: int
    without_key: int

    @property
    def keys(self) -> int:
        """Return the number of keys that differ."""
        return self.lost + self.doubled + self.unexpected


class ProvenanceTotals(NamedTuple):
    """Totals of a check of provenance.

    `records` is the number of records with provenance headers. They were made from `sources` different source
    records. `repeated` is the number of records beyond the first copy of each source record. A
    ProvenanceFilter would drop all copies of `filter_loses` source records, and keep several copies of
    `filter_doubles` source records. `malformed` counts records with invalid provenance headers, and
    `unmarked` counts records without any.
    """

    records: int
    sources: int
    repeated: int
    filter_loses: int
    filter_doubles: int
    malformed: int
    unmarked: int

    @property
    def is_filter_exact(self) -> bool:
        """True if a ProvenanceFilter would return exactly one copy of each source record."""
        return not (self.filter_loses or self.filter_doubles or self.malformed or self.unmarked)


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of an audit.

    `findings` lists at most `max_findings` per partition; `finding_count` counts all. `notes` are findings
    that are not violations, such as open transactions, torn tails and moved log starts. `keys` is None if
    keys were not checked, and `difference` is None if nothing was compared. `keys_problem` says why a
    requested check of keys or provenance, or a comparison, was not done. `provenance` is None if it was not
    checked.
    """

    findings: tuple[AuditFinding, ...]
    partitions: Mapping[TopicPartition, PartitionTotals]
    keys: KeyTotals | None
    notes: tuple[AuditFinding, ...] = ()
    difference: Difference | None = None
    keys_problem: str | None = None
    provenance: ProvenanceTotals | None = None

    @property
    def totals(self) -> PartitionTotals:
        """Return the sums over all partitions. A producer is counted once for each partition that it wrote
        to.
        """
        rows = [asdict(totals) for totals in self.partitions.values()]
        return PartitionTotals(**{name: sum(row[name] for row in rows) for name in asdict(PartitionTotals())})

    @property
    def finding_count(self) -> int:
        """Return the sum of violations in partitions, repeated keys, differing keys, and repeated source
        records.

        `findings` may list fewer.
        """
        repeated = self.keys.repeated if self.keys else 0
        differing = self.difference.keys if self.difference else 0
        return (
            self.totals.findings + repeated + differing + (self.provenance.repeated if self.provenance else 0)
        )

    @property
    def verdict(self) -> Verdict:
        """Return `violated` after any violation, `unproven` if the proof is incomplete, otherwise `clean`.

        The proof is incomplete if records without a producer id exist and no check or comparison of keys
        covers them, or if a requested check or comparison of keys was not possible. Keys cover them only if
        every record has a key, and no open transaction hides records. A check of provenance covers them too,
        but the proof is incomplete if a record has no valid provenance headers.
        """
        if self.finding_count:
            return "violated"
        if self.provenance is not None and (self.provenance.unmarked or self.provenance.malformed):
            return "unproven"
        by_key = [check for check in (self.keys, self.difference) if check is not None]
        is_covered = self.provenance is not None or any(not check.without_key for check in by_key)
        # Checks of records read only what read_committed readers get.
        open_at = {note.tp for note in self.notes if note.kind == FindingKind.OPEN_TRANSACTION.value}
        is_hidden = any(totals.unnumbered_records for tp, totals in self.partitions.items() if tp in open_at)
        is_unproven = bool(self.totals.unnumbered_records) and (is_hidden or not is_covered)
        return "unproven" if is_unproven or self.keys_problem is not None else "clean"

    def to_rows(self) -> list[dict[str, Any]]:
        """Return findings, then notes, as plain values for JSON and tables.

        The field severity is "violation" or "information".
        """
        severities = (("violation", self.findings), ("information", self.notes))
        return [
            {"severity": word, **asdict(finding)} for word, findings in severities for finding in findings
        ]

    def to_frame(self, spark: SparkSession) -> DataFrame:
        """Return `to_rows` as a DataFrame."""
        schema = pa.schema([("severity", pa.string()), *FINDING_SCHEMA])
        return spark.createDataFrame(pa.Table.from_pylist(self.to_rows(), schema=schema))


FINDING_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("base_offset", pa.int64()),
        ("last_offset", pa.int64()),
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int16()),
        ("first_sequence", pa.int32()),
        ("last_sequence", pa.int32()),
        ("other_offset", pa.int64()),
        ("key", pa.string()),
        ("explanation", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Facts about a partition that its batches do not show. PartitionAudit documents each field."""

    log_start_offset: int
    is_compacted: bool = False
    last_stable_offset: int | None = None
    indexed_to: int | None = None
    is_internal: bool = False


@dataclass(slots=True)
class AuditOutput:
    """Violations and notes, sorted by partition and offset, and the totals of every partition."""

    findings: list[AuditFinding] = field(default_factory=list)
    notes: list[AuditFinding] = field(default_factory=list)
    partitions: dict[TopicPartition, PartitionTotals] = field(default_factory=dict)

    def add(self, finding: AuditFinding) -> None:
        """Add a finding that the partition's totals already count."""
        is_violation = FindingKind(finding.kind).is_violation
        (self.findings if is_violation else self.notes).append(finding)

    def add_violation(self, finding: AuditFinding) -> None:
        """Add a violation that was found by comparing partitions or by asking a coordinator."""
        self.findings.append(finding)
        totals = self.partitions[finding.tp]
        self.partitions[finding.tp] = replace(totals, findings=totals.findings + 1)


class TransactionEnd(NamedTuple):
    """The end of a transaction in one partition: the offsets of the transaction's first data and marker."""

    topic: str
    partition: int
    first_offset: int
    marker_offset: int


def two_outcomes(
    producer_id: int, producer_epoch: int, aborted: TransactionEnd, committed: TransactionEnd
) -> AuditFinding:
    """Return the finding of a transaction with a COMMIT in one partition and an ABORT in another."""
    return AuditFinding(
        kind=FindingKind.TWO_OUTCOMES.value,
        topic=aborted.topic,
        partition=aborted.partition,
        base_offset=aborted.first_offset,
        last_offset=aborted.marker_offset,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        first_sequence=None,
        last_sequence=None,
        other_offset=committed.marker_offset,
        key=None,
        explanation=f"ABORT here at offset {aborted.marker_offset}, but COMMIT of the same transaction in "
        f"{committed.topic}-{committed.partition} at offset {committed.marker_offset}",
    )
