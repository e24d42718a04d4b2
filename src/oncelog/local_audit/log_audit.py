"""The audit in one process, for topics and segment files that fit one machine.

Its findings, totals and verdicts are those of the audit on Spark (oncelog.spark.audit). Each batch header is
checked by the rules of oncelog.audit as soon as it is read. Memory holds the state of the rules for one
partition, and 34 bytes for each transaction whose outcomes in several partitions must be compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.audit.findings import FindingKind, StoredBatch
from oncelog.audit.partition import PartitionAudit
from oncelog.audit.result import (
    MAX_FINDINGS,
    AuditFinding,
    AuditOutput,
    AuditResult,
    Bounds,
    TransactionEnd,
    two_outcomes,
)
from oncelog.audit.transaction_outcomes import BumpedOutcome
from oncelog.client.arguments import names_of
from oncelog.errors import MisuseError, OncelogError
from oncelog.local_audit.keys import KeyCheck, check_keys, compare_keys
from oncelog.local_audit.provenance_check import ProvenanceCheck, check_provenance
from oncelog.local_audit.segment_files import PartitionFiles, find_segments, read_segment
from oncelog.local_audit.stored_batches import read_partition
from oncelog.local_audit.topic_state import (
    OFFSETS_TOPIC,
    ask_coordinators,
    look_up,
    moved_log_starts,
    moved_text,
    of_topics,
    source_options,
    with_moved_log_starts,
)
from oncelog.spark.source.offset_ranges import Available
from oncelog.spark.source.source_options import parse_options
from oncelog.types import TopicPartition

__all__ = ["audit_files", "audit_topic"]

_BATCHES_AT_ONCE = 10_000
DAMAGE_KINDS = frozenset(
    kind.value
    for kind in (
        FindingKind.CRC_DAMAGE,
        FindingKind.UNREADABLE,
        FindingKind.RECORD_COUNT,
        FindingKind.BAD_RECORDS,
    )
)
"""Kinds of findings about damaged data, at which a reader of records stops with an error."""


def audit_topic(
    bootstrap_servers: str,
    topics: str | Sequence[str],
    *,
    key_check: bool = False,
    against: str | Sequence[str] | None = None,
    distinct: str | None = None,
    compacted_topics: Collection[str] | str = (),
    client_config: Mapping[str, object] | None = None,
    max_findings: int = MAX_FINDINGS,
) -> AuditResult:
    """Audit the current contents of topics, in this process.

    The parameters and the result are those of `oncelog.spark.audit.audit_topic`. `key_check` is only a bool
    here: an SQL expression needs Spark.

    Raises ConfigError, MisuseError, UnknownTopicOrPartition, DataLossError (a topic was deleted or re-created
    during the audit), and OncelogError if the topic cannot be read.
    """
    names, others = names_of(topics), names_of(against or ())
    if not names:
        raise MisuseError("no topic to audit: give at least one")
    if both := set(names) & set(others):
        raise MisuseError(f"{min(both)!r} would be compared with itself; use another topic in `against`")
    config = client_config or {}
    options = source_options(bootstrap_servers, [*names, *others], config)
    client = {**parse_options(options).client, "isolation.level": "read_committed"}
    seen, bounds = look_up(options, compacted_topics)
    bounds = {tp: bounds[tp] for tp in bounds if tp.topic in names}
    check_distinct(distinct)
    check_records = key_check or bool(others) or distinct is not None

    def batches(tp: TopicPartition) -> Iterator[StoredBatch]:
        return read_partition(client, seen, tp, check_records=check_records)

    with _naming_changed_topics(lambda: moved_log_starts(options, seen)):
        judged = judge(bounds, batches, max_findings)
        ask_coordinators(source_options(bootstrap_servers, names, config), names, judged)
        keys, provenance = KeyCheck(), ProvenanceCheck()
        if check_records:
            keys, provenance = _check_records(
                client, of_topics(seen, names), of_topics(seen, others), judged, max_findings,
                lambda: moved_log_starts(options, seen), key_check=key_check, distinct=distinct,
            )  # fmt: skip
    result = AuditResult(
        (*judged.findings, *keys.findings, *provenance.findings),
        judged.partitions,
        keys.totals,
        (*judged.notes, *provenance.notes),
        keys.difference,
        keys.problem,
        provenance.totals,
    )
    return with_moved_log_starts(result, moved_log_starts(options, seen), bounds)


def audit_files(
    paths: str | Sequence[str],
    *,
    compacted_topics: Collection[str] | str = (),
    max_findings: int = MAX_FINDINGS,
) -> AuditResult:
    """Audit partition directories or whole data directories, in this process.

    The parameters and the result are those of `oncelog.spark.audit.audit_files`, except that keys are not
    checked: that needs Spark.

    Raises ConfigError for a path without segment files, and MisuseError if no path is given.
    """
    roots = names_of(paths, "paths (str)")
    if not roots:
        raise MisuseError("no directory to audit: give at least one")
    partitions = {files.tp: files for files in find_segments(roots)}
    output = judge(
        {tp: bounds_of(files, compacted_topics) for tp, files in partitions.items()},
        lambda tp: _batches_in(partitions[tp]),
        max_findings,
    )
    return AuditResult(tuple(output.findings), output.partitions, None, tuple(output.notes))


@contextmanager
def _naming_changed_topics(moved: Callable[[], object]) -> Iterator[None]:
    """If a read fails because its topic was deleted during the audit, raise DataLossError instead."""
    try:
        yield
    except OncelogError:
        moved()
        raise


def bounds_of(files: PartitionFiles, compacted_topics: Collection[str] | str) -> Bounds:
    """Return the facts about a partition that its batches do not show, from its checkpoint files and
    `compacted_topics`.
    """
    return Bounds(
        log_start_offset=files.log_start_offset,
        is_compacted=files.is_compacted or files.tp.topic in names_of(compacted_topics),
        indexed_to=files.indexed_to,
        is_internal=files.tp.topic == OFFSETS_TOPIC,
    )


def _batches_in(files: PartitionFiles) -> Iterator[StoredBatch]:
    for index in range(len(files.segments)):
        for _, batch in read_segment(files, index):
            yield batch


def judge(
    bounds: Mapping[TopicPartition, Bounds],
    batches: Callable[[TopicPartition], Iterable[StoredBatch]],
    max_findings: int,
) -> AuditOutput:
    """Audit each partition, and compare the outcomes of transactions over partitions. `batches` returns a
    partition's batches in stored order.
    """
    output = AuditOutput()
    outcomes = _Outcomes(sorted(bounds))
    for tp in sorted(bounds):
        audit = PartitionAudit(**asdict(bounds[tp]), max_findings=max_findings)
        for number, batch in enumerate(batches(tp), 1):
            audit.see(batch)
            if number % _BATCHES_AT_ONCE == 0:
                outcomes.add(tp, audit.take_outcomes())
        outcomes.add(tp, audit.take_outcomes())
        findings, output.partitions[tp] = audit.finish()
        for finding in findings:
            fields = finding._asdict() | {"kind": finding.kind.value}
            output.add(AuditFinding(**tp._asdict(), **fields, key=None))
    for conflict in outcomes.conflicts(max_findings):
        output.add_violation(conflict)
    return output


class _Outcomes:
    """A collector of the outcomes of transactions in each partition. A transaction must have the same outcome
    in all its partitions. The outcomes are stored as columns to save memory.
    """

    def __init__(self, tps: Sequence[TopicPartition]) -> None:
        self._tps = tps
        self._numbers = {tp: number for number, tp in enumerate(tps)}
        self._columns = {
            "producer_id": array("q"),
            "epoch": array("h"),
            "is_commit": array("b"),
            "tp": array("i"),
            "first_offset": array("q"),
            "marker_offset": array("q"),
        }

    def add(self, tp: TopicPartition, outcomes: Iterable[BumpedOutcome]) -> None:
        if len(self._tps) < 2:
            return
        number, columns = self._numbers[tp], list(self._columns.values())
        for producer_id, epoch, is_commit, first_offset, marker_offset in outcomes:
            row = (producer_id, epoch, is_commit, number, first_offset, marker_offset)
            for column, value in zip(columns, row, strict=True):
                column.append(value)

    def conflicts(self, max_findings: int) -> list[AuditFinding]:
        """Return a finding for each transaction with a COMMIT in one partition and an ABORT in another."""
        keys = ["producer_id", "epoch"]
        ends = pa.table({name: np.array(column) for name, column in self._columns.items()})
        both = ends.group_by(keys).aggregate([("is_commit", "min"), ("is_commit", "max")])
        both = both.filter(pc.less(both["is_commit_min"], both["is_commit_max"]))
        both = both.select(keys).sort_by([(key, "ascending") for key in keys]).slice(0, max_findings)
        # The join returns its rows in random order. Report the COMMIT and the ABORT in the lowest partitions,
        # so that two audits of the same log give equal reports.
        first: dict[tuple[int, int], dict[bool, TransactionEnd]] = {}
        for row in ends.join(both, keys, join_type="inner").to_pylist():
            tp = self._tps[row["tp"]]
            end = TransactionEnd(tp.topic, tp.partition, row["first_offset"], row["marker_offset"])
            sides = first.setdefault((row["producer_id"], row["epoch"]), {})
            is_commit = bool(row["is_commit"])
            sides[is_commit] = min(end, sides.get(is_commit, end))
        return [two_outcomes(*key, first[key][False], first[key][True]) for key in sorted(first)]


# Keys and provenance


def check_distinct(distinct: str | None) -> None:
    """Raise MisuseError if `distinct` is neither None nor "provenance"."""
    if distinct not in (None, "provenance"):
        raise MisuseError(f"distinct={distinct!r}: expected None or 'provenance'")


def _check_records(
    client: Mapping[str, object],
    now: Available,
    others: Available,
    judged: AuditOutput,
    max_findings: int,
    moved: Callable[[], Mapping[TopicPartition, int]],
    *,
    key_check: bool,
    distinct: str | None,
) -> tuple[KeyCheck, ProvenanceCheck]:
    """Check keys and provenance as requested. If a check fails, `problem` of the KeyCheck says why."""
    keys, provenance = KeyCheck(), ProvenanceCheck()
    try:
        if distinct:
            provenance = check_provenance(client, now, max_findings)
        if key_check:
            keys = check_keys(client, now, max_findings)
        if others.earliest:
            # A comparison does not replace the check of keys: equal topics may both have a key twice. See
            # test_a_comparison_does_not_replace_the_check_of_keys.
            compared = compare_keys(client, now, others, max_findings)
            keys = compared._replace(findings=keys.findings + compared.findings, totals=keys.totals)
    except OncelogError:
        # Readers of keys stop at damaged data with an error. The findings locate the damage better than this
        # error, so `problem` names the first finding. Results from before the error stay. Guard:
        # test_what_was_found_before_a_check_failed_stays_in_the_result.
        damage = next((finding for finding in judged.findings if finding.kind in DAMAGE_KINDS), None)
        if damage is not None:
            text = f"{damage.tp} cannot be read at offset {damage.base_offset}"
        elif log_starts := moved():
            text = moved_text(log_starts)
        else:
            raise
        what = not_checked(
            keys=(key_check and keys.totals is None) or bool(others.earliest),
            provenance=distinct is not None and provenance.totals is None,
        )
        keys = keys._replace(problem=f"{what}: {text}")
    return keys, provenance


def not_checked(*, keys: bool, provenance: bool) -> str:
    """Return "keys were not checked", or the same about provenance or both, as the beginning of a text."""
    what = [name for name, is_missing in (("keys", keys), ("provenance", provenance)) if is_missing]
    return f"{' and '.join(what)} {'were' if keys else 'was'} not checked"
