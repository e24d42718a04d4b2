"""The result of an audit on Spark: findings, notes, totals and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa

from oncelog.audit.partition import PartitionTotals
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Verdict = Literal["clean", "violated", "unproven"]


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One violation or note. `kind` is a FindingKind of oncelog.audit.partition, or a kind of
    spark/audit/keys.py.

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
    """Totals of a key check: records with a key, distinct keys, and keys that occur more than once."""

    records: int
    keys: int
    repeated: int


class Difference(NamedTuple):
    """Totals of a comparison between two topics.

    `lost`, `doubled` and `unexpected` count keys. `expected` and `found` count records with a key, and
    `without_key` counts records that could not be compared.
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


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of an audit.

    `findings` lists at most `max_findings` per partition; `finding_count` counts all. `notes` are findings
    that are not violations, such as open transactions, torn tails and moved log starts. `keys` is None if
    keys were not checked, and `difference` is None if nothing was compared. `keys_problem` says why a
    requested check or comparison of keys was not done.
    """

    findings: tuple[AuditFinding, ...]
    partitions: Mapping[TopicPartition, PartitionTotals]
    keys: KeyTotals | None
    notes: tuple[AuditFinding, ...] = ()
    difference: Difference | None = None
    keys_problem: str | None = None

    @property
    def totals(self) -> PartitionTotals:
        """Return the sums over all partitions. A producer counts once per partition that it wrote to."""
        rows = [asdict(totals) for totals in self.partitions.values()]
        return PartitionTotals(**{name: sum(row[name] for row in rows) for name in asdict(PartitionTotals())})

    @property
    def finding_count(self) -> int:
        """Return the number of violations, repeated keys and differing keys. `findings` may list fewer."""
        repeated = self.keys.repeated if self.keys else 0
        return self.totals.findings + repeated + (self.difference.keys if self.difference else 0)

    @property
    def verdict(self) -> Verdict:
        """Return `violated` after any violation, `unproven` if the proof is incomplete, otherwise `clean`.

        The proof is incomplete if records without a producer id exist and no check or comparison of keys
        covers them, or if a requested check or comparison of keys was not possible.
        """
        if self.finding_count:
            return "violated"
        is_covered = self.keys is not None or self.difference is not None
        is_unproven = bool(self.totals.unnumbered_records) and not is_covered
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
