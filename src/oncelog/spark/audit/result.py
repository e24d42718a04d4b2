"""What an audit on Spark gives back: findings, notes, totals, a verdict."""

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
    """One violation or note. `kind`: see rules.audit, and those of keys (spark/audit/keys.py).

    None where a field has no meaning: a repeated key has no sequences, a sequence violation no key.
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
        return TopicPartition(self.topic, self.partition)


class KeyTotals(NamedTuple):
    """The key check's sums: records with a key, different keys, and keys that are there more than once."""

    records: int
    keys: int
    repeated: int


class Difference(NamedTuple):
    """A comparison's sums over keys; `lost`, `doubled` and `unexpected` count keys.

    `expected` and `found` are records with a key, `without_key` those that could not be compared.
    """

    expected: int
    found: int
    lost: int
    doubled: int
    unexpected: int
    without_key: int

    @property
    def keys(self) -> int:
        """How many keys differ."""
        return self.lost + self.doubled + self.unexpected


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What was found. `findings` may be cut at MAX_FINDINGS per partition, `finding_count` is not.

    `notes` are findings that are no violations: open transactions, torn tails, log starts that moved. `keys`
    is None when keys were not checked, `difference` when nothing was compared. `keys_problem`: why neither
    was done, though it was asked for.
    """

    findings: tuple[AuditFinding, ...]
    partitions: Mapping[TopicPartition, PartitionTotals]
    keys: KeyTotals | None
    notes: tuple[AuditFinding, ...] = ()
    difference: Difference | None = None
    keys_problem: str | None = None

    @property
    def totals(self) -> PartitionTotals:
        """The sums over all partitions; a producer counts once per partition it wrote to."""
        rows = [asdict(totals) for totals in self.partitions.values()]
        return PartitionTotals(**{name: sum(row[name] for row in rows) for name in asdict(PartitionTotals())})

    @property
    def finding_count(self) -> int:
        """The number of violations, repeated keys and keys that differ; `findings` may list fewer."""
        repeated = self.keys.repeated if self.keys else 0
        return self.totals.findings + repeated + (self.difference.keys if self.difference else 0)

    @property
    def verdict(self) -> Verdict:
        """`unproven`: nothing is wrong, but something that was asked for is not known.

        Some records carry no producer id, and no check or comparison of keys vouches for them; or keys could
        not be checked or compared.
        """
        if self.finding_count:
            return "violated"
        is_vouched = self.keys is not None or self.difference is not None
        is_unproven = bool(self.totals.unnumbered_records) and not is_vouched
        return "unproven" if is_unproven or self.keys_problem is not None else "clean"

    def to_rows(self) -> list[dict[str, Any]]:
        """Findings, then notes, as plain values for JSON and tables, with their severity."""
        severities = (("violation", self.findings), ("information", self.notes))
        return [{"severity": word, **asdict(found)} for word, some in severities for found in some]

    def to_frame(self, spark: SparkSession) -> DataFrame:
        """The same as a DataFrame."""
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
