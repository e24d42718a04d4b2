"""The audit as a Spark job: do topics or segment files contain each record exactly once?

The audit works on any Kafka cluster. Executors read the batches of offset ranges (topic_batches.py) or of
files (segment_batches.py) and return their headers. oncelog.audit judges the headers of each partition in
stored order (partition_audit.py). Spark queries over the records check keys (keys.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from oncelog.audit.partition import FindingKind
from oncelog.client.admin.blocking import Admin
from oncelog.config import ADMIN
from oncelog.errors import ConfigError, MisuseError, OncelogError
from oncelog.rules.transactions.hanging import Hanging
from oncelog.spark import _pyspark as _pyspark
from oncelog.spark.audit.keys import DIFFERENCE_KINDS, check_keys, compare_keys
from oncelog.spark.audit.partition_audit import AuditOutput, Bounds, judge
from oncelog.spark.audit.result import AuditFinding, AuditResult, Difference, KeyTotals
from oncelog.spark.audit.segment_batches import SegmentHeadersSource, find_segments
from oncelog.spark.audit.segment_records import committed_records
from oncelog.spark.audit.topic_batches import AVAILABLE, CHECK_RECORDS, BatchHeadersSource, encode_available
from oncelog.spark.source.offset_ranges import Available, DataLossError, Offsets, describe_change
from oncelog.spark.source.offset_resolver import OffsetResolver
from oncelog.spark.source.source_options import parse_options
from oncelog.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["AuditFinding", "AuditResult", "Difference", "KeyTotals", "audit_files", "audit_topic"]

MAX_FINDINGS = 1000
"""Maximum number of listed findings per partition, and of listed repeated keys in total.

Counts include the findings that are not listed.
"""
OFFSETS_PER_TASK = 5_000_000
_DAMAGE = {
    kind.value
    for kind in (
        FindingKind.CRC_DAMAGE,
        FindingKind.UNREADABLE,
        FindingKind.RECORD_COUNT,
        FindingKind.BAD_RECORDS,
    )
}
_OFFSETS_TOPIC = "__consumer_offsets"
"""Group coordinators write this topic. Its transactional batches have an epoch but no sequence numbers."""


def audit_topic(
    spark: SparkSession,
    bootstrap_servers: str,
    topics: str | Sequence[str],
    *,
    key_check: bool | str | Column | None = None,
    against: str | Sequence[str] | None = None,
    compacted_topics: Collection[str] = (),
    client_config: Mapping[str, object] | None = None,
    offsets_per_task: int = OFFSETS_PER_TASK,
    max_findings: int = MAX_FINDINGS,
) -> AuditResult:
    """Audit the present contents of topics.

    `key_check`: True checks that each record key occurs once per topic. A Column or an SQL expression over
    the source's columns selects another business key (`"get_json_object(CAST(value AS STRING), '$.id')"`).

    `against` names topics of the same cluster that should contain the same keys equally often. `key_check`
    then only selects the key to compare, and a key may occur more than once.

    `compacted_topics` are topics that were compacted in the past. The audit itself finds those that are
    compacted now. `client_config` contains additional consumer settings. `offsets_per_task` is the maximum
    number of offsets per Spark task, and `max_findings` limits the listed findings per partition.

    Raises ConfigError, MisuseError, UnknownTopicOrPartition, DataLossError (a topic was deleted or re-created
    during the audit), and Spark's exception if a task fails.
    """
    names = [topics] if isinstance(topics, str) else list(topics)
    others = [against] if isinstance(against, str) else list(against or ())
    if not names:
        raise MisuseError("no topic to audit: give at least one")
    if both := set(names) & set(others):
        raise MisuseError(f"{min(both)!r} would be compared with itself; use another topic in `against`")

    def options(topics: Sequence[str]) -> dict[str, str]:
        return _options(bootstrap_servers, topics, client_config or {}, offsets_per_task)

    seen, bounds = _look_up(options([*names, *others]), compacted_topics)
    now, bounds = _of_topics(seen, names), {tp: bounds[tp] for tp in bounds if tp.topic in names}
    spark.dataSource.register(BatchHeadersSource)
    headers = spark.read.format(BatchHeadersSource.name()).options(**options(names))
    headers = headers.option(AVAILABLE, encode_available(now))
    headers = headers.option(CHECK_RECORDS, _reads_records(key_check, others)).load()

    def records(topics: Sequence[str]) -> DataFrame:
        return spark.read.format("oncelog").options(**options(topics)).load()

    def moved() -> Mapping[TopicPartition, int]:
        return _moved_log_starts(options([*names, *others]), seen)

    with _naming_changed_topics(moved):
        judged = judge(headers, bounds, max_findings)
        _ask_coordinators(options(names), names, judged)
        other = records(others) if others else None
        result = _with_keys(judged, lambda: records(names), other, key_check, max_findings, moved)
    return _with_moved_log_starts(result, moved(), bounds)


def audit_files(
    spark: SparkSession,
    paths: str | Sequence[str],
    *,
    key_check: bool | str | Column | None = None,
    against: str | Sequence[str] | None = None,
    compacted_topics: Collection[str] = (),
    max_findings: int = MAX_FINDINGS,
) -> AuditResult:
    """Audit partition directories or whole data directories, of Oncelog or Apache Kafka, without a broker.

    A path is local or a URI that pyarrow.fs supports (file:, s3:, gs:, hdfs:). Every executor must reach it.
    All paths must belong to one cluster, and only one of them may contain a given partition. A topic is
    treated as compacted if it is in the data directory's `cleaner-offset-checkpoint`, if the directory's
    `oncelog-topics.json` says so, or if it is in `compacted_topics`. `against` contains paths too; otherwise
    `key_check` and `against` work as in `audit_topic`.

    Raises ConfigError for a path without segment files, and MisuseError if no path is given or if `against`
    contains an audited partition.
    """
    roots = [paths] if isinstance(paths, str) else list(paths)
    if not roots:
        raise MisuseError("no directory to audit: give at least one")
    partitions = find_segments(roots)
    others = find_segments([against] if isinstance(against, str) else list(against or ()))
    if both := {p.tp for p in partitions} & {p.tp for p in others}:
        raise MisuseError(f"{min(both)} would be compared with itself; use another topic's directories")
    bounds = {
        p.tp: Bounds(
            log_start_offset=p.log_start_offset,
            is_compacted=p.is_compacted or p.tp.topic in compacted_topics,
            indexed_to=p.indexed_to,
            is_internal=p.tp.topic == _OFFSETS_TOPIC,
        )
        for p in partitions
    }
    spark.dataSource.register(SegmentHeadersSource)
    option = json.dumps([partition.to_plain() for partition in partitions])
    headers = spark.read.format(SegmentHeadersSource.name()).option("partitions", option)
    headers = headers.option(CHECK_RECORDS, _reads_records(key_check, others)).load()
    judged = judge(headers, bounds, max_findings)
    other = committed_records(spark, others) if others else None
    return _with_keys(
        judged, lambda: committed_records(spark, partitions), other, key_check, max_findings, dict
    )


def _reads_records(key_check: bool | str | Column | None, others: Collection[object]) -> bool:
    return bool(others) or (key_check is not None and key_check is not False)


def _with_keys(
    judged: AuditOutput,
    records: Callable[[], DataFrame],
    other: DataFrame | None,
    key_check: bool | str | Column | None,
    max_findings: int,
    moved: Callable[[], Mapping[TopicPartition, int]],
) -> AuditResult:
    """Return the result of `judged` and of the check of keys.

    If `other` is given, the keys of `records` are compared with the keys of `other`. Otherwise, if
    `key_check` requests it, the keys are checked for repetition. `moved` returns the log starts that have
    moved since the audit began.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    is_requested = key_check is not None and key_check is not False
    key = key_check if is_requested else True
    key_findings: list[AuditFinding] = []
    keys = difference = problem = None
    try:
        if other is not None:
            key_findings, difference = compare_keys(records(), other, key, max_findings)
        elif is_requested:
            key_findings, keys = check_keys(records(), key, max_findings)
    except (PySparkException, Py4JError):
        # A reader stops at damaged data with an error. The findings that locate the damage say more than the
        # error.
        damage = next((finding for finding in judged.findings if finding.kind in _DAMAGE), None)
        if damage is not None:
            problem = f"keys were not checked: {damage.tp} cannot be read at offset {damage.base_offset}"
        elif log_starts := moved():
            problem = f"keys were not checked: {_moved_text(log_starts)}"
        else:
            raise
    findings = (*judged.findings, *key_findings)
    return AuditResult(findings, judged.partitions, keys, tuple(judged.notes), difference, problem)


# Topics that change during the audit


@contextmanager
def _naming_changed_topics(moved: Callable[[], object]) -> Iterator[None]:
    """If a task fails because its topic was deleted during the audit, raise DataLossError instead."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError):
        moved()
        raise


def _moved_log_starts(options: Mapping[str, str], before: Available) -> dict[TopicPartition, int]:
    """Return the log starts that have moved since `before`. Raises DataLossError if a topic was replaced.

    If a topic is deleted and re-created during the audit, batches of both topics are read. Then neither
    findings nor their absence prove anything.
    """
    with OffsetResolver(parse_options({**options, "kafka.isolation.level": "read_committed"})) as resolver:
        after = resolver.available(may_miss=True, expected=before.earliest)
    if why := describe_change(before, after):
        raise DataLossError(f"{why} during the audit, so the audit proves nothing. Run the audit again")
    return {tp: start for tp, start in after.earliest.items() if start > before.earliest.get(tp, start)}


def _moved_text(log_starts: Mapping[TopicPartition, int]) -> str:
    tp = min(log_starts)
    return f"the log start of {tp} moved to {log_starts[tp]} during the audit (retention or DeleteRecords)"


def _with_moved_log_starts(
    result: AuditResult, log_starts: Mapping[TopicPartition, int], bounds: Mapping[TopicPartition, Bounds]
) -> AuditResult:
    """Return the result with notes on the moved log starts, and without a comparison of keys.

    While topics lose records at different times, a comparison of their keys proves nothing.
    """
    if not log_starts:
        return result
    kind = FindingKind.LOG_START_MOVED.value
    noted = {note.tp for note in result.notes if note.kind == kind}
    new = [
        _removed_later(tp, bounds[tp].log_start_offset, start)
        for tp, start in log_starts.items()
        if tp in bounds and tp not in noted
    ]
    result = replace(result, notes=(*result.notes, *new))
    if result.difference is None:
        return result
    problem = f"keys were not compared: {_moved_text(log_starts)}"
    kept = tuple(finding for finding in result.findings if finding.kind not in DIFFERENCE_KINDS)
    return replace(result, findings=kept, difference=None, keys_problem=problem)


def _removed_later(tp: TopicPartition, before: int, now: int) -> AuditFinding:
    return AuditFinding(
        kind=FindingKind.LOG_START_MOVED.value,
        topic=tp.topic,
        partition=tp.partition,
        base_offset=before,
        last_offset=now - 1,
        producer_id=None,
        producer_epoch=None,
        first_sequence=None,
        last_sequence=None,
        other_offset=None,
        key=None,
        explanation=(
            f"the log start moved from {before} to {now} during the audit; batches that were "
            "removed later were audited too"
        ),
    )


def _of_topics(now: Available, topics: Collection[str]) -> Available:
    def selected(offsets: Offsets) -> Offsets:
        return {tp: offset for tp, offset in offsets.items() if tp.topic in topics}

    return Available(selected(now.earliest), selected(now.latest), selected(now.written), now.topic_ids)


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


def _look_up(
    options: Mapping[str, str], compacted_topics: Collection[str]
) -> tuple[Available, dict[TopicPartition, Bounds]]:
    """Return the offsets and bounds of each partition. The audit then reads exactly these offsets.

    If they were looked up a second time before the read, a log start that had moved in between would be
    reported as a violation.
    """
    with OffsetResolver(parse_options({**options, "kafka.isolation.level": "read_committed"})) as resolver:
        now = resolver.available()
        compacted = resolver.is_compacted({tp.topic for tp in now.earliest})
    compacted |= dict.fromkeys(compacted_topics, True)
    bounds = {
        tp: Bounds(start, compacted[tp.topic], now.latest[tp], is_internal=tp.topic == _OFFSETS_TOPIC)
        for tp, start in now.earliest.items()
    }
    return now, bounds


def _ask_coordinators(options: Mapping[str, str], topics: Sequence[str], judged: AuditOutput) -> None:
    """Ask the coordinators about transactions that are open at the end. Report hanging ones as violations."""
    kind = FindingKind.OPEN_TRANSACTION.value
    if not any(note.kind == kind for note in judged.notes):
        return
    client = parse_options(options).client
    try:
        with Admin({key: value for key, value in client.items() if ADMIN.get(key)}) as admin:
            candidates = {(c.opened.tp, c.opened.producer_id): c for c in admin.find_hanging(topics)}
    except OncelogError as error:
        judged.notes[:] = [
            replace(note, explanation=f"{note.explanation} (the coordinators did not answer: {error})")
            for note in judged.notes
        ]
        return
    notes, judged.notes = judged.notes, []
    for note in notes:
        candidate = candidates.get((note.tp, note.producer_id or 0)) if note.kind == kind else None
        if candidate is None:
            judged.notes.append(note)
        elif candidate.hanging is Hanging.YES:
            hanging = FindingKind.TRANSACTION_WITHOUT_OUTCOME.value
            judged.add_violation(
                replace(note, kind=hanging, explanation=f"the transaction hangs: {candidate.reason}")
            )
        else:
            judged.notes.append(replace(note, explanation=f"open at the end of the log: {candidate.reason}"))
