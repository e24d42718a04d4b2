"""Facts that an audit asks a cluster for: offsets before, changes after, and open transactions.

The modules of spark/source that this module uses need no PySpark.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from oncelog.audit.findings import FindingKind
from oncelog.audit.result import DIFFERENCE_KINDS, AuditFinding, AuditOutput, AuditResult, Bounds
from oncelog.client.admin.blocking import Admin
from oncelog.client.arguments import names_of
from oncelog.config import ADMIN
from oncelog.errors import ConfigError, OncelogError
from oncelog.rules.transactions.hanging import Hanging
from oncelog.spark.source.offset_ranges import Available, DataLossError, Offsets, describe_change
from oncelog.spark.source.offset_resolver import OffsetResolver
from oncelog.spark.source.source_options import parse_options
from oncelog.types import TopicPartition

OFFSETS_TOPIC = "__consumer_offsets"
"""Group coordinators write this topic. Its transactional batches have an epoch but no sequence numbers."""


def current_offsets(options: Mapping[str, str], before: Available) -> Available:
    """Return the current offsets of the partitions. Raises DataLossError if a topic was replaced (deleted and
    re-created) since `before`.

    If a topic is deleted and re-created during the audit, batches of both topics are read. Then neither
    findings nor their absence prove anything.
    """
    with OffsetResolver(parse_options({**options, "kafka.isolation.level": "read_committed"})) as resolver:
        after = resolver.available(may_miss=True, expected=before.earliest)
    if why := describe_change(before, after):
        raise DataLossError(f"{why} during the audit, so the audit proves nothing. Run the audit again")
    return after


def moved_log_starts(options: Mapping[str, str], before: Available) -> dict[TopicPartition, int]:
    """Return the log starts that have moved since `before`. Raises DataLossError if a topic was replaced."""
    after = current_offsets(options, before)
    return {tp: start for tp, start in after.earliest.items() if start > before.earliest.get(tp, start)}


def moved_text(log_starts: Mapping[TopicPartition, int]) -> str:
    """Return a text that names the lowest partition of `log_starts` and its new log start."""
    tp = min(log_starts)
    return f"the log start of {tp} moved to {log_starts[tp]} during the audit (retention or DeleteRecords)"


def with_moved_log_starts(
    result: AuditResult, log_starts: Mapping[TopicPartition, int], bounds: Mapping[TopicPartition, Bounds]
) -> AuditResult:
    """Return the result with notes on the moved log starts. If one has moved, leave out the comparison of
    keys.

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
    problem = f"keys were not compared: {moved_text(log_starts)}"
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


def of_topics(now: Available, topics: Collection[str]) -> Available:
    """Return the offsets of the partitions of `topics`."""

    def selected(offsets: Offsets) -> Offsets:
        return {tp: offset for tp, offset in offsets.items() if tp.topic in topics}

    return Available(selected(now.earliest), selected(now.latest), selected(now.written), now.topic_ids)


def source_options(
    bootstrap_servers: str, topics: Sequence[str], client_config: Mapping[str, object]
) -> dict[str, str]:
    """Return options of Spark's `format("oncelog")` that select all partitions of the topics. Raises
    ConfigError for an invalid name.
    """
    if bad := [name for name in topics if "," in name or not name.strip()]:
        raise ConfigError(f"{bad[0]!r} is not a topic name")
    return {
        **{f"kafka.{key}": str(value) for key, value in client_config.items()},
        "kafka.bootstrap.servers": bootstrap_servers,
        "subscribe": ",".join(topics),
        "startingOffsets": "earliest",
    }


def look_up(
    options: Mapping[str, str], compacted_topics: Collection[str] | str
) -> tuple[Available, dict[TopicPartition, Bounds]]:
    """Look up and return the offsets and the bounds of each partition. The audit then reads exactly these
    offsets.

    Do not look them up a second time before the read: a log start that moved in between would be reported as
    a violation.
    """
    with OffsetResolver(parse_options({**options, "kafka.isolation.level": "read_committed"})) as resolver:
        now = resolver.available()
        compacted = resolver.is_compacted({tp.topic for tp in now.earliest})
    compacted |= dict.fromkeys(names_of(compacted_topics), True)
    bounds = {
        tp: Bounds(start, compacted[tp.topic], now.latest[tp], is_internal=tp.topic == OFFSETS_TOPIC)
        for tp, start in now.earliest.items()
    }
    return now, bounds


def ask_coordinators(options: Mapping[str, str], topics: Sequence[str], judged: AuditOutput) -> None:
    """Ask the coordinators about the transactions that `judged` notes as open at the end. Turn the notes
    about hanging ones into violations, and add the coordinators' answer to the others.
    """
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
