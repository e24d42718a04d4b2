"""The audit as a Spark job: is what a topic holds exactly once? Any Kafka-protocol cluster.

Executors read the batches of offset ranges and keep their headers (spark/headers.py); the headers of a
partition come together, and rules.audit judges them in offset order. The key check is a Spark query over
the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa

from oncelog.errors import ConfigError, MisuseError
from oncelog.rules.audit import PartitionAudit, PartitionTotals, StoredBatch
from oncelog.spark.headers import BatchHeadersSource
from oncelog.spark.lookup import Lookup
from oncelog.spark.offsets import Offsets
from oncelog.spark.options import parse_options
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MAX_FINDINGS = 1000
"""Findings kept per partition, and repeated keys kept in all; the counts go on."""
OFFSETS_PER_TASK = 5_000_000
_OFFSETS_NAMED = 10
_ROWS_AT_ONCE = 10_000

Verdict = Literal["clean", "violated", "unproven"]


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One violation. `kind`: see rules.audit, and repeated_key for a business key that is there again.

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


class KeyTotals(NamedTuple):
    """The key check's sums: records with a key, different keys, and keys that are there more than once."""

    records: int
    keys: int
    repeated: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What was found. `findings` may be cut at MAX_FINDINGS per partition, `finding_count` is not.

    `keys` is None when keys were not checked.
    """

    findings: tuple[AuditFinding, ...]
    partitions: Mapping[TopicPartition, PartitionTotals]
    keys: KeyTotals | None

    @property
    def totals(self) -> PartitionTotals:
        """The sums over all partitions; a producer counts once per partition it wrote to."""
        rows = [asdict(totals) for totals in self.partitions.values()]
        return PartitionTotals(**{name: sum(row[name] for row in rows) for name in asdict(PartitionTotals())})

    @property
    def finding_count(self) -> int:
        return self.totals.findings + (self.keys.repeated if self.keys else 0)

    @property
    def verdict(self) -> Verdict:
        """`unproven`: nothing is wrong, but some records carry no producer id, so nothing vouches for them.

        A clean key check vouches for them.
        """
        if self.finding_count:
            return "violated"
        return "unproven" if self.totals.unnumbered_records and self.keys is None else "clean"

    def to_rows(self) -> list[dict[str, Any]]:
        """The findings as plain values, for JSON and tables."""
        return [asdict(finding) for finding in self.findings]

    def to_frame(self, spark: SparkSession) -> DataFrame:
        """The findings as a DataFrame."""
        return spark.createDataFrame(pa.Table.from_pylist(self.to_rows(), schema=_FINDING_SCHEMA))


_FINDING_SCHEMA = pa.schema(
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
_TOTALS_FIELDS = tuple(asdict(PartitionTotals()))
_JUDGED_SCHEMA = pa.schema([*_FINDING_SCHEMA, *((name, pa.int64()) for name in _TOTALS_FIELDS)])
"""A row per finding, and one per partition with `kind` null and the totals."""
_JUDGED_DDL = (
    "kind string, topic string, partition int, base_offset bigint, last_offset bigint, producer_id bigint, "
    "producer_epoch smallint, first_sequence int, last_sequence int, other_offset bigint, key string, "
    "explanation string, " + ", ".join(f"{name} bigint" for name in _TOTALS_FIELDS)
)


def audit_topic(
    spark: SparkSession,
    bootstrap_servers: str,
    topics: str | Sequence[str],
    *,
    key_check: bool | str | Column | None = None,
    client_config: Mapping[str, object] | None = None,
    offsets_per_task: int = OFFSETS_PER_TASK,
    max_findings: int = MAX_FINDINGS,
) -> AuditResult:
    """Audit what the topics hold now.

    `key_check`: True checks that each record key occurs once per topic; a Column or an SQL expression over
    the source's columns names another business key (`"get_json_object(CAST(value AS STRING), '$.id')"`).
    `client_config`: more consumer settings. Raises ConfigError, UnknownTopicOrPartition, and what Spark
    raises when a task fails.
    """
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names:
        raise MisuseError("name at least one topic to audit")
    options = _options(bootstrap_servers, names, client_config or {}, offsets_per_task)
    starts, compacted = _look_up(options)
    judged = _judge(spark, options, starts, compacted, max_findings)
    findings = [_finding_of(row) for row in judged if row["kind"] is not None]
    seen = {_tp_of(row): _totals_of(row) for row in judged if row["kind"] is None}
    partitions = {tp: seen.get(tp, PartitionTotals()) for tp in sorted(starts)}
    keys = None
    if key_check is not None and key_check is not False:
        repeated, keys = _check_keys(spark, options, key_check, max_findings)
        findings += repeated
    return AuditResult(tuple(findings), partitions, keys)


def _options(
    bootstrap_servers: str, topics: Sequence[str], client_config: Mapping[str, object], offsets_per_task: int
) -> dict[str, str]:
    if bad := [name for name in topics if "," in name or not name.strip()]:
        raise ConfigError(f"{bad[0]!r} is not a topic name")
    return {
        **{f"kafka.{key}": str(value) for key, value in client_config.items()},
        "kafka.bootstrap.servers": bootstrap_servers,
        "subscribe": ",".join(topics),
        "startingOffsets": "earliest",
        "maxRecordsPerPartition": str(offsets_per_task),
    }


def _look_up(options: Mapping[str, str]) -> tuple[Offsets, set[str]]:
    """The first offset per partition, and the topics whose logs are compacted."""
    with Lookup(parse_options(options)) as lookup:
        starts = lookup.available().earliest
        compacted = lookup.is_compacted({tp.topic for tp in starts})
    return starts, {topic for topic, is_so in compacted.items() if is_so}


# The sequences


def _judge(
    spark: SparkSession, options: Mapping[str, str], starts: Offsets, compacted: set[str], max_findings: int
) -> list[dict[str, Any]]:
    spark.dataSource.register(BatchHeadersSource)
    headers = spark.read.format(BatchHeadersSource.name()).options(**options).load()
    groups = headers.groupBy("topic", "partition")
    rules = _partition_judge(starts, compacted, max_findings)
    rows: list[dict[str, Any]] = groups.applyInArrow(rules, _JUDGED_DDL).toArrow().to_pylist()
    # The order of a shuffle is chance; a report should read the same twice.
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["base_offset"] or 0))


def _partition_judge(
    starts: Offsets, compacted: set[str], max_findings: int
) -> Callable[[pa.Table], pa.Table]:
    def judge(headers: pa.Table) -> pa.Table:
        tp = TopicPartition(headers["topic"][0].as_py(), headers["partition"][0].as_py())
        audit = PartitionAudit(
            log_start_offset=starts[tp], is_compacted=tp.topic in compacted, max_findings=max_findings
        )
        for batch in stored_batches(headers):
            audit.see(batch)
        findings, totals = audit.finish()
        rows = [{**tp._asdict(), **f._asdict(), "kind": f.kind.value} for f in findings]
        rows.append({**tp._asdict(), **asdict(totals)})
        return pa.Table.from_pylist(rows, schema=_JUDGED_SCHEMA)

    return judge


def stored_batches(headers: pa.Table) -> Iterator[StoredBatch]:
    """The rows of one partition in offset order, as the rules want them; a few at a time as objects."""
    ordered = headers.select(StoredBatch._fields).sort_by(
        [("base_offset", "ascending"), ("last_offset", "ascending")]
    )
    for piece in ordered.to_batches(max_chunksize=_ROWS_AT_ONCE):
        yield from map(StoredBatch._make, zip(*(c.to_pylist() for c in piece.columns), strict=True))


def _tp_of(row: Mapping[str, Any]) -> TopicPartition:
    return TopicPartition(row["topic"], row["partition"])


def _finding_of(row: Mapping[str, Any]) -> AuditFinding:
    return AuditFinding(**{name: row[name] for name in _FINDING_SCHEMA.names})


def _totals_of(row: Mapping[str, Any]) -> PartitionTotals:
    return PartitionTotals(**{name: row[name] for name in _TOTALS_FIELDS})


# The keys


def _check_keys(
    spark: SparkSession, options: Mapping[str, str], key: bool | str | Column, max_findings: int
) -> tuple[list[AuditFinding], KeyTotals]:
    from pyspark.sql import functions as f

    what = f.col("key") if isinstance(key, bool) else f.expr(key) if isinstance(key, str) else key
    records = spark.read.format("oncelog").options(**options).load()
    counted = (
        records.select("topic", what.alias("key"), f.struct("partition", "offset").alias("at"))
        .where(f.col("key").isNotNull())
        .groupBy("topic", "key")
        .agg(f.count(f.lit(1)).alias("times"), f.sort_array(f.collect_list("at")).alias("places"))
        .persist()
    )
    try:
        sums = counted.agg(f.sum("times"), f.count("times"), f.count_if(f.col("times") > 1)).first()
        repeated = counted.where("times > 1").orderBy("topic", "places").limit(max_findings)
        shown = f.slice("places", 1, _OFFSETS_NAMED).alias("places")
        rows = repeated.select("topic", "key", "times", shown).collect()
    finally:
        counted.unpersist()
    assert sums is not None
    return [_repeated(row) for row in rows], KeyTotals(sums[0] or 0, sums[1], sums[2])


def _repeated(row: Any) -> AuditFinding:
    first, second = row["places"][:2]
    key = row["key"]
    text = bytes(key).decode("utf-8", "backslashreplace") if isinstance(key, (bytes, bytearray)) else str(key)
    places = ", ".join(f"{place['partition']}:{place['offset']}" for place in row["places"])
    more = ", ..." if row["times"] > len(row["places"]) else ""
    return AuditFinding(
        kind="repeated_key",
        topic=row["topic"],
        partition=second["partition"],
        base_offset=second["offset"],
        last_offset=second["offset"],
        producer_id=None,
        producer_epoch=None,
        first_sequence=None,
        last_sequence=None,
        other_offset=first["offset"],
        key=text,
        explanation=f"the key is there {row['times']} times, at partition:offset {places}{more}",
    )
