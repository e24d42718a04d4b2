"""The audit as a Spark job: is what topics or segment files hold exactly once? Any Kafka-protocol cluster.

Executors read the batches of offset ranges (spark/audit/topic_batches.py) or of files
(spark/audit/segment_batches.py) and keep their headers; rules.audit judges those of a partition in stored
order (spark/audit/partition_audit.py). Keys are checked by Spark queries over the records
(spark/audit/keys.py).
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
from oncelog.spark.audit.partition_audit import Bounds, Judged, judge
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
"""Findings kept per partition, and repeated keys kept in all; the counts go on."""
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
"""Groups' coordinators write it: their batches in transactions carry an epoch, and no sequence numbers."""


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
    """Audit what the topics hold now.

    `key_check`: True checks that each record key occurs once per topic; a Column or an SQL expression over
    the source's columns names another business key (`"get_json_object(CAST(value AS STRING), '$.id')"`).
    `against`: topics of the same cluster that should hold the same keys, each as often; `key_check` then
    names the key to compare, and repetitions are judged by the comparison alone.
    `compacted_topics`: topics that were compacted once and are not any more; those that are need no name.
    `client_config`: more consumer settings. Raises ConfigError, UnknownTopicOrPartition, DataLossError (a
    topic was deleted, or deleted and created again, meanwhile) and what Spark raises when a task fails.
    """
    names = [topics] if isinstance(topics, str) else list(topics)
    others = [against] if isinstance(against, str) else list(against or ())
    if not names:
        raise MisuseError("name at least one topic to audit")
    if both := set(names) & set(others):
        raise MisuseError(f"{min(both)!r} is to be compared with itself; name another topic in `against`")

    def options(of: Sequence[str]) -> dict[str, str]:
        return _options(bootstrap_servers, of, client_config or {}, offsets_per_task)

    seen, bounds = _look_up(options([*names, *others]), compacted_topics)
    now, bounds = _of_topics(seen, names), {tp: bounds[tp] for tp in bounds if tp.topic in names}
    spark.dataSource.register(BatchHeadersSource)
    headers = spark.read.format(BatchHeadersSource.name()).options(**options(names))
    headers = headers.option(AVAILABLE, encode_available(now))
    headers = headers.option(CHECK_RECORDS, _reads_records(key_check, others)).load()

    def records(of: Sequence[str]) -> DataFrame:
        return spark.read.format("oncelog").options(**options(of)).load()

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
    """Audit partition directories, or all in data directories, ours or Apache Kafka's, without a broker.

    A path is one of this machine or a URI that pyarrow.fs knows (file:, s3:, gs:, hdfs:); every executor must
    reach it. All are of one cluster, with one replica of each partition. Topics that the data directory's
    `cleaner-offset-checkpoint` names are taken for compacted, and those of `compacted_topics`. `key_check`
    and `against` (paths, too) as in `audit_topic`. Raises ConfigError for a path without segment files.
    """
    roots = [paths] if isinstance(paths, str) else list(paths)
    if not roots:
        raise MisuseError("name at least one directory to audit")
    partitions = find_segments(roots)
    others = find_segments([against] if isinstance(against, str) else list(against or ()))
    if both := {p.tp for p in partitions} & {p.tp for p in others}:
        raise MisuseError(f"{min(both)} is to be compared with itself; name another topic's directories")
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
    given = json.dumps([part.to_plain() for part in partitions])
    headers = spark.read.format(SegmentHeadersSource.name()).option("partitions", given)
    headers = headers.option(CHECK_RECORDS, _reads_records(key_check, others)).load()
    judged = judge(headers, bounds, max_findings)
    other = committed_records(spark, others) if others else None
    return _with_keys(
        judged, lambda: committed_records(spark, partitions), other, key_check, max_findings, dict
    )


def _reads_records(key_check: bool | str | Column | None, others: Collection[object]) -> bool:
    return bool(others) or (key_check is not None and key_check is not False)


def _with_keys(
    judged: Judged,
    records: Callable[[], DataFrame],
    other: DataFrame | None,
    key_check: bool | str | Column | None,
    max_findings: int,
    moved: Callable[[], Mapping[TopicPartition, int]],
) -> AuditResult:
    """The result, with the keys compared with those of `other`, or checked if that is asked for.

    `moved`: returns the log starts that have moved since the audit began.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    is_asked = key_check is not None and key_check is not False
    key = key_check if is_asked else True
    found: list[AuditFinding] = []
    keys = difference = problem = None
    try:
        if other is not None:
            found, difference = compare_keys(records(), other, key, max_findings)
        elif is_asked:
            found, keys = check_keys(records(), key, max_findings)
    except (PySparkException, Py4JError):
        # A reader of a topic stops at a damage; the findings, which tell where it is, are worth more.
        damage = next((each for each in judged.findings if each.kind in _DAMAGE), None)
        if damage is not None:
            problem = f"keys were not checked: {damage.tp} cannot be read at offset {damage.base_offset}"
        elif log_starts := moved():
            problem = f"keys were not checked: {_moved_text(log_starts)}"
        else:
            raise
    findings = (*judged.findings, *found)
    return AuditResult(findings, judged.partitions, keys, tuple(judged.notes), difference, problem)


# What changes while the audit reads


@contextmanager
def _naming_changed_topics(moved: Callable[[], object]) -> Iterator[None]:
    """Turn the failure of a task into DataLossError where its topic was deleted meanwhile."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError):
        moved()
        raise


def _moved_log_starts(options: Mapping[str, str], before: Available) -> dict[TopicPartition, int]:
    """Return the log starts that have moved since `before`. Raises DataLossError for other changes.

    Of a topic that is deleted and created again meanwhile, batches of both are read. So neither findings nor
    their absence prove anything.
    """
    with OffsetResolver(parse_options({**options, "kafka.isolation.level": "read_committed"})) as lookup:
        after = lookup.available(may_miss=True, expected=before.earliest)
    if why := describe_change(before, after):
        raise DataLossError(f"{why} while it was audited: nothing is proven. Audit it again")
    return {tp: at for tp, at in after.earliest.items() if at > before.earliest.get(tp, at)}


def _moved_text(log_starts: Mapping[TopicPartition, int]) -> str:
    tp = min(log_starts)
    return f"the log start of {tp} moved to {log_starts[tp]} meanwhile (retention or delete-records)"


def _with_moved_log_starts(
    result: AuditResult, log_starts: Mapping[TopicPartition, int], bounds: Mapping[TopicPartition, Bounds]
) -> AuditResult:
    """Say so, and withdraw a comparison: of two topics that shrink at different times it would accuse one."""
    if not log_starts:
        return result
    kind = FindingKind.LOG_START_MOVED.value
    known = {note.tp for note in result.notes if note.kind == kind}
    new = [
        _removed_later(tp, bounds[tp].log_start_offset, at) for tp, at in log_starts.items() if tp in bounds
    ]
    result = replace(result, notes=(*result.notes, *(note for note in new if note.tp not in known)))
    if result.difference is None:
        return result
    problem = f"keys were not compared: {_moved_text(log_starts)}"
    kept = tuple(found for found in result.findings if found.kind not in DIFFERENCE_KINDS)
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
        explanation=f"the log start moved from {before} to {now} meanwhile; what was removed was judged",
    )


def _of_topics(now: Available, topics: Collection[str]) -> Available:
    def of(offsets: Offsets) -> Offsets:
        return {tp: at for tp, at in offsets.items() if tp.topic in topics}

    return Available(of(now.earliest), of(now.latest), of(now.written), now.topic_ids)


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
    """What the brokers say of each partition, before its batches are read. Only that is read then.

    With a second look-up for the reading, a log start that had moved meanwhile was a violation.
    """
    with OffsetResolver(parse_options({**options, "kafka.isolation.level": "read_committed"})) as lookup:
        now = lookup.available()
        compacted = lookup.is_compacted({tp.topic for tp in now.earliest})
    compacted |= dict.fromkeys(compacted_topics, True)
    bounds = {
        tp: Bounds(at, compacted[tp.topic], now.latest[tp], is_internal=tp.topic == _OFFSETS_TOPIC)
        for tp, at in now.earliest.items()
    }
    return now, bounds


def _ask_coordinators(options: Mapping[str, str], topics: Sequence[str], judged: Judged) -> None:
    """What is open at the end and nobody will end becomes a violation; what they say of the rest is noted."""
    kind = FindingKind.OPEN_TRANSACTION.value
    if not any(note.kind == kind for note in judged.notes):
        return
    client = parse_options(options).client
    try:
        with Admin({key: value for key, value in client.items() if ADMIN.get(key)}) as admin:
            held = {(h.opened.tp, h.opened.producer_id): h for h in admin.find_hanging(topics)}
    except OncelogError as error:
        judged.notes[:] = [
            replace(note, explanation=f"{note.explanation} (the coordinators could not be asked: {error})")
            for note in judged.notes
        ]
        return
    notes, judged.notes = judged.notes, []
    for note in notes:
        said = held.get((note.tp, note.producer_id or 0)) if note.kind == kind else None
        if said is None:
            judged.notes.append(note)
        elif said.hanging is Hanging.YES:
            hung = FindingKind.TRANSACTION_WITHOUT_OUTCOME.value
            judged.add_violation(replace(note, kind=hung, explanation=f"it hangs: {said.reason}"))
        else:
            judged.notes.append(replace(note, explanation=f"open at the end of the log: {said.reason}"))
