"""The audit as a Spark job: do topics or segment files contain each record exactly once?

The audit works on any Kafka cluster. A task reads the batches of a partition, and oncelog.audit judges their
headers in stored order (partition_audit.py). Several tasks read a partition that is too large for one task
(topic_batches.py), or files (segment_batches.py), and pass the headers to the task that judges them. Spark
queries over the records check keys (keys.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from oncelog.audit.result import (
    MAX_FINDINGS,
    AuditFinding,
    AuditOutput,
    AuditResult,
    Bounds,
    Difference,
    KeyTotals,
)
from oncelog.client.arguments import names_of
from oncelog.errors import MisuseError
from oncelog.local_audit.log_audit import DAMAGE_KINDS, bounds_of, check_distinct, not_checked
from oncelog.local_audit.segment_files import find_segments
from oncelog.local_audit.stored_batches import read_partition
from oncelog.local_audit.topic_state import (
    ask_coordinators,
    look_up,
    moved_log_starts,
    moved_text,
    of_topics,
    source_options,
    with_moved_log_starts,
)
from oncelog.spark import _pyspark as _pyspark
from oncelog.spark.audit.keys import check_keys, compare_keys
from oncelog.spark.audit.partition_audit import audit_headers, audit_partitions, judge
from oncelog.spark.audit.provenance_check import check_provenance
from oncelog.spark.audit.segment_batches import SegmentHeadersSource
from oncelog.spark.audit.segment_records import committed_records
from oncelog.spark.audit.topic_batches import (
    AVAILABLE,
    CHECK_RECORDS,
    BatchHeadersSource,
    encode_available,
    whole_and_split,
)
from oncelog.spark.connect import spark_errors
from oncelog.spark.source.offset_ranges import Available
from oncelog.spark.source.source_options import parse_options
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["AuditFinding", "AuditResult", "Difference", "KeyTotals", "audit_files", "audit_topic"]

OFFSETS_PER_TASK = 5_000_000


def audit_topic(
    spark: SparkSession,
    bootstrap_servers: str,
    topics: str | Sequence[str],
    *,
    key_check: bool | str | Column | None = None,
    against: str | Sequence[str] | None = None,
    distinct: str | None = None,
    compacted_topics: Collection[str] | str = (),
    client_config: Mapping[str, object] | None = None,
    offsets_per_task: int = OFFSETS_PER_TASK,
    max_findings: int = MAX_FINDINGS,
) -> AuditResult:
    """Audit the current contents of topics.

    `key_check`: True checks that each record key occurs once per topic. A Column or an SQL expression over
    the source's columns selects another business key (`"get_json_object(CAST(value AS STRING), '$.id')"`).

    `against` names topics of the same cluster that should contain the same keys equally often. A Column or an
    SQL expression as `key_check` then only selects the key to compare, and a key may occur more than once.

    `distinct="provenance"`: also check that each source record is stored once (`provenance_headers()`).

    `compacted_topics` are topics that were compacted in the past. The audit detects by itself which topics
    are compacted now. `client_config` contains additional consumer settings. `offsets_per_task` is the
    maximum number of offsets per Spark task, and `max_findings` limits the listed findings per partition.

    Raises ConfigError, MisuseError, UnknownTopicOrPartition, DataLossError (a topic was deleted or re-created
    during the audit), and Spark's exception if a task fails.
    """
    names, others = names_of(topics), names_of(against or ())
    check_distinct(distinct)
    if not names:
        raise MisuseError("no topic to audit: give at least one")
    if both := set(names) & set(others):
        raise MisuseError(f"{min(both)!r} would be compared with itself; use another topic in `against`")
    options = partial(_options_of, bootstrap_servers, client_config or {}, offsets_per_task)
    seen, bounds = look_up(options([*names, *others]), compacted_topics)
    now, bounds = of_topics(seen, names), {tp: bounds[tp] for tp in bounds if tp.topic in names}
    check_records = _reads_records(key_check, others, distinct)
    rows = _audited_rows(spark, options(names), now, bounds, max_findings, check_records=check_records)

    def records(topics: Sequence[str]) -> DataFrame:
        return spark.read.format("oncelog").options(**options(topics), includeHeaders=bool(distinct)).load()

    def moved() -> Mapping[TopicPartition, int]:
        return moved_log_starts(options([*names, *others]), seen)

    with _naming_changed_topics(moved):
        judged = judge(rows, bounds, max_findings)
        ask_coordinators(options(names), names, judged)
        other = records(others) if others else None
        result = _with_keys(judged, lambda: records(names), other, key_check, max_findings, moved, distinct)
    return with_moved_log_starts(result, moved(), bounds)


def _options_of(
    bootstrap_servers: str, client_config: Mapping[str, object], offsets_per_task: int, topics: Sequence[str]
) -> dict[str, str]:
    options = source_options(bootstrap_servers, topics, client_config)
    # `client_config` does not decide which records count: keys are those of committed records.
    options["kafka.isolation.level"] = "read_committed"
    return {**options, "maxRecordsPerPartition": str(offsets_per_task)}


def _audited_rows(
    spark: SparkSession,
    options: dict[str, str],
    now: Available,
    bounds: Mapping[TopicPartition, Bounds],
    max_findings: int,
    *,
    check_records: bool,
) -> DataFrame:
    """Return the rows for `judge` of the audit of a topic's offsets in `now`. `options` are from
    `_options_of`.
    """
    parsed = parse_options(options)
    assert parsed.max_records_per_partition is not None
    whole, larger = whole_and_split(now, parsed.max_records_per_partition)
    read = partial(read_partition, parsed.client, now, check_records=check_records)
    rows = audit_partitions(spark, whole, read, bounds, max_findings)
    if larger.earliest:
        spark.dataSource.register(BatchHeadersSource)
        headers = spark.read.format(BatchHeadersSource.name()).options(**options)
        headers = headers.option(AVAILABLE, encode_available(larger)).option(CHECK_RECORDS, check_records)
        rows = rows.union(audit_headers(headers.load(), bounds, max_findings))
    return rows


def audit_files(
    spark: SparkSession,
    paths: str | Sequence[str],
    *,
    key_check: bool | str | Column | None = None,
    against: str | Sequence[str] | None = None,
    compacted_topics: Collection[str] | str = (),
    max_findings: int = MAX_FINDINGS,
) -> AuditResult:
    """Audit partition directories or whole data directories, of Oncelog or Apache Kafka, without a broker.

    A path is local or a URI that pyarrow.fs supports (file:, s3:, gs:, hdfs:). Every executor must reach it.
    All paths must belong to one cluster, and only one of them may contain a given partition. A topic is
    treated as compacted if it is in the data directory's `cleaner-offset-checkpoint`, if the directory's
    `oncelog-topics.json` says so, or if it is in `compacted_topics`. `key_check` and `against` work as in
    `audit_topic`, but `against` contains paths.

    Raises ConfigError for a path without segment files, and MisuseError if no path is given or if `against`
    contains an audited partition.
    """
    roots = names_of(paths, "paths (str)")
    if not roots:
        raise MisuseError("no directory to audit: give at least one")
    partitions = find_segments(roots)
    others = find_segments(names_of(against or (), "paths (str)"))
    if both := {p.tp for p in partitions} & {p.tp for p in others}:
        raise MisuseError(f"{min(both)} would be compared with itself; use another topic's directories")
    bounds = {p.tp: bounds_of(p, compacted_topics) for p in partitions}
    spark.dataSource.register(SegmentHeadersSource)
    option = json.dumps([partition.to_plain() for partition in partitions])
    headers = spark.read.format(SegmentHeadersSource.name()).option("partitions", option)
    headers = headers.option(CHECK_RECORDS, _reads_records(key_check, others)).load()
    judged = judge(audit_headers(headers, bounds, max_findings), bounds, max_findings)
    other = committed_records(spark, others) if others else None
    return _with_keys(
        judged, lambda: committed_records(spark, partitions), other, key_check, max_findings, dict
    )


def _reads_records(
    key_check: bool | str | Column | None, others: Collection[object], distinct: str | None = None
) -> bool:
    return bool(others) or distinct is not None or (key_check is not None and key_check is not False)


def _with_keys(
    judged: AuditOutput,
    records: Callable[[], DataFrame],
    other: DataFrame | None,
    key_check: bool | str | Column | None,
    max_findings: int,
    moved: Callable[[], Mapping[TopicPartition, int]],
    distinct: str | None = None,
) -> AuditResult:
    """Return the result that combines `judged` with the requested checks of keys and provenance.

    If `other` is given, the keys of `records` are compared with the keys of `other`. If `key_check` is True,
    or selects another key and `other` is not given, the keys are checked for repetition. `moved` returns the
    log starts that have moved since the audit began.
    """
    is_requested = key_check is not None and key_check is not False
    key = key_check if is_requested else True
    key_findings: list[AuditFinding] = []
    of_provenance: list[AuditFinding] = []
    provenance_notes: list[AuditFinding] = []
    keys = difference = problem = provenance = None
    try:
        if distinct is not None:
            of_provenance, provenance_notes, provenance = check_provenance(records(), max_findings)
        if key_check is True or (is_requested and other is None):
            key_findings, keys = check_keys(records(), key, max_findings)
        if other is not None:
            differing, difference = compare_keys(records(), other, key, max_findings)
            key_findings = [*key_findings, *differing]
    except spark_errors():
        # Readers of keys and headers stop at damaged data with an error. The findings locate the damage
        # better than this error, so `keys_problem` names the first finding.
        what = not_checked(
            keys=is_requested or other is not None,
            provenance=distinct is not None and provenance is None,
        )
        damage = next((finding for finding in judged.findings if finding.kind in DAMAGE_KINDS), None)
        if damage is not None:
            problem = f"{what}: {damage.tp} cannot be read at offset {damage.base_offset}"
        elif log_starts := moved():
            problem = f"{what}: {moved_text(log_starts)}"
        else:
            raise
    findings = (*judged.findings, *key_findings, *of_provenance)
    notes = (*judged.notes, *provenance_notes)
    return AuditResult(findings, judged.partitions, keys, notes, difference, problem, provenance)


# Topics that change during the audit


@contextmanager
def _naming_changed_topics(moved: Callable[[], object]) -> Iterator[None]:
    """If a task fails because its topic was deleted during the audit, raise DataLossError instead."""
    try:
        yield
    except spark_errors():
        moved()
        raise
