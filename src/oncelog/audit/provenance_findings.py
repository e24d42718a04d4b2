"""The findings about provenance: source records that are stored more than once, and source records that a
ProvenanceFilter would lose or keep twice.

Two kinds are violations. A repeated_record is a run of records whose source records were already stored, or
one source record with several copies. A record_in_two_partitions has copies in two target partitions, and a
ProvenanceFilter keeps both.

Two kinds are notes. All copies of a late_record are stored after records with higher source offsets, so a
ProvenanceFilter drops them. A malformed_provenance names no source record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from oncelog.audit.key_findings import Place, finding_at
from oncelog.audit.result import AuditFinding, ProvenanceTotals
from oncelog.rules.idempotence.provenance import HighestOffsets, Provenance, Verdict
from oncelog.types import TopicPartition

PROVENANCE_KINDS = (
    "repeated_record",
    "late_record",
    "record_in_two_partitions",
    "malformed_provenance",
)


class RepeatedRun(NamedTuple):
    """Records of one source partition that follow each other in a target partition, all repeated.

    `first`, `last`: their offsets in the target. `source_first`, `source_last`: their source offsets.
    `highest`: the highest source offset that the target has before the run.
    """

    source: TopicPartition
    first: int
    last: int
    source_first: int
    source_last: int
    records: int
    highest: int


class RepetitionRuns:
    """A collector of the first `limit` runs of repetitions in one target partition. It reads the records in
    stored order.
    """

    def __init__(self, limit: int) -> None:
        self._room = limit
        self._state = HighestOffsets()
        self._open: dict[TopicPartition, RepeatedRun] = {}
        self._ended: list[RepeatedRun] = []

    def see(self, offset: int, provenance: Provenance) -> Verdict:
        """Return a ProvenanceFilter's verdict on the next record, and extend or end the run of its source
        partition.
        """
        source = TopicPartition(provenance.topic, provenance.partition)
        highest = self._state.highest(source)
        verdict = self._state.see(provenance)
        run = self._open.get(source)
        if verdict is Verdict.NEW:
            if run is not None:
                self._ended.append(self._open.pop(source))
        elif run is not None:
            last = provenance.offset
            self._open[source] = run._replace(last=offset, source_last=last, records=run.records + 1)
        elif self._room and highest is not None:  # for mypy: `highest` is never None here
            at = provenance.offset
            self._open[source] = RepeatedRun(source, offset, offset, at, at, 1, highest)
            self._room -= 1
        return verdict

    def finish(self) -> list[RepeatedRun]:
        """Return the runs in the order of their first offsets."""
        return sorted([*self._ended, *self._open.values()], key=lambda run: run.first)


def repeated_run(tp: TopicPartition, run: RepeatedRun) -> AuditFinding:
    """Return the finding about a run of repetitions."""
    text = (
        f"{run.records} records repeat offsets {run.source_first} to {run.source_last} of {run.source}, "
        f"after its offset {run.highest}"
    )
    key = source_text(run.source, run.source_first)
    finding = finding_at("repeated_record", Place(*tp, run.first), None, key, text)
    return replace(finding, last_offset=run.last)


class SourceCopies(NamedTuple):
    """A source record, the number of its copies in a topic, and the place of the first copy in each
    partition.

    `last` is the place of the last copy in the last of these partitions.
    """

    source: str
    times: int
    places: tuple[Place, ...]
    last: Place


def repetitions(
    totals: ProvenanceTotals,
    runs: Sequence[AuditFinding],
    in_two: Iterable[SourceCopies],
    repeated: Iterable[SourceCopies],
) -> list[AuditFinding]:
    """Return the violations of a provenance check.

    Normally these are runs of repetitions, and source records in two partitions. A late record looks like a
    repetition, because its source offset is not above the highest one either. So if any record is late,
    return one finding for each repeated source record instead.
    """
    if totals.filter_loses:
        return [repeated_record(copies) for copies in repeated]
    return [*runs, *map(record_in_two_partitions, in_two)]


def repeated_record(copies: SourceCopies) -> AuditFinding:
    """Return the finding about a source record with several copies."""
    first, last = copies.places[0], copies.last
    text = (
        f"{copies.source} is stored {copies.times} times: first in partition {first.partition} at offset "
        f"{first.offset}, last in partition {last.partition} at offset {last.offset}"
    )
    return finding_at("repeated_record", last, first.offset, copies.source, text)


def late_record(copies: SourceCopies) -> AuditFinding:
    """Return the note about a source record whose copies are all stored after later source records."""
    text = f"{copies.source} is stored only after higher offsets of its source: a ProvenanceFilter drops it"
    return finding_at("late_record", copies.places[0], None, copies.source, text)


def record_in_two_partitions(copies: SourceCopies) -> AuditFinding:
    """Return the finding about a source record whose copies are in several partitions of the target."""
    first, second = copies.places[:2]
    text = (
        f"{copies.source} is also in partition {first.partition} at offset {first.offset}: a "
        "ProvenanceFilter has a separate state for each partition, and keeps both"
    )
    return finding_at("record_in_two_partitions", second, first.offset, copies.source, text)


def malformed_provenance(place: Place, reason: str) -> AuditFinding:
    """Return the note about a record whose provenance headers are invalid; `reason` says why."""
    return finding_at("malformed_provenance", place, None, None, reason)


def source_text(source: TopicPartition, offset: int) -> str:
    """Return a source record's place as the text TOPIC-PARTITION:OFFSET, used as the `key` of a finding."""
    return f"{source}:{offset}"
