"""The check of provenance without Spark: is a source record stored more than once, and would a
ProvenanceFilter return each source record once?

The records of each partition are read in stored order and judged by the rule of a ProvenanceFilter, which
finds the runs of repetitions. The copies of each source record are counted in bounded memory, by partition
and by verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from oncelog.audit.key_findings import Place
from oncelog.audit.provenance_findings import (
    RepetitionRuns,
    SourceCopies,
    late_record,
    malformed_provenance,
    repeated_run,
    repetitions,
    source_text,
)
from oncelog.audit.result import AuditFinding, ProvenanceTotals
from oncelog.client.consumer.blocking import Consumer
from oncelog.local_audit.key_counts import KeyCounts
from oncelog.local_audit.spill_directory import SpillDirectory
from oncelog.rules.idempotence.provenance import Malformed, Provenance, Verdict, read_provenance
from oncelog.spark.source.offset_ranges import Available
from oncelog.types import TopicPartition


class ProvenanceCheck(NamedTuple):
    """The result of a check of provenance. It is empty if the check was not requested."""

    findings: tuple[AuditFinding, ...] = ()
    notes: tuple[AuditFinding, ...] = ()
    totals: ProvenanceTotals | None = None


def check_provenance(client: Mapping[str, object], now: Available, max_findings: int) -> ProvenanceCheck:
    """Check that no topic has two copies of a source record. List at most `max_findings` findings of each
    kind.

    Only the records that are visible at the client's isolation level are checked.
    """
    tps = sorted(now.earliest)
    passed = _Passed(max_findings)
    with SpillDirectory() as spill, Consumer(dict(client)) as consumer:
        counts = KeyCounts(spill)
        for number, tp in enumerate(tps):
            start = now.earliest[tp]
            batches = consumer.fetch_range(tp, start, max(start, now.latest[tp]), include_headers=True)
            _pass_partition(tp, number, batches, counts, passed)
        copies = _Copies(tps, max_findings)
        for table in counts.merged():
            copies.add(table)
    totals = ProvenanceTotals(
        records=copies.records,
        sources=copies.sources,
        repeated=copies.records - copies.sources,
        filter_loses=copies.filter_loses,
        filter_doubles=copies.filter_doubles,
        malformed=passed.malformed_count,
        unmarked=passed.unmarked,
    )
    violations = repetitions(totals, passed.runs, copies.sources_of("in two"), copies.sources_of("repeated"))
    notes = (*passed.malformed, *map(late_record, copies.sources_of("late")))
    return ProvenanceCheck(tuple(violations), notes, totals)


class _Passed:
    """A collector of the findings about single records and runs, made while the records are read."""

    def __init__(self, max_findings: int) -> None:
        self.max_findings = max_findings
        self.unmarked = self.malformed_count = 0
        self.malformed: list[AuditFinding] = []
        self.runs: list[AuditFinding] = []


def _pass_partition(
    tp: TopicPartition, number: int, batches: Iterator[Any], counts: KeyCounts, passed: _Passed
) -> None:
    runs = RepetitionRuns(passed.max_findings - len(passed.runs))
    for batch in batches:
        copies: dict[Verdict, tuple[list[bytes], list[int]]] = {verdict: ([], []) for verdict in Verdict}
        for offset, headers in zip(batch["offset"].to_pylist(), _headers(batch["headers"]), strict=True):
            found = read_provenance(headers)
            if isinstance(found, Provenance):
                sources, offsets = copies[runs.see(offset, found)]
                source = TopicPartition(found.topic, found.partition)
                sources.append(source_text(source, found.offset).encode())
                offsets.append(offset)
            elif isinstance(found, Malformed):
                passed.malformed_count += 1
                if len(passed.malformed) < passed.max_findings:
                    passed.malformed.append(malformed_provenance(Place(*tp, offset), found.reason))
            else:
                passed.unmarked += 1
        for verdict, (sources, offsets) in copies.items():
            # Use a group for each partition and verdict, so that `_Copies` can distinguish the copies.
            group = 2 * number + (verdict is Verdict.REPEATED)
            counts.add(group, pa.array(sources, pa.binary()), number, pa.array(offsets, pa.int64()))
    passed.runs += [repeated_run(tp, run) for run in runs.finish()]


def _headers(column: Any) -> Iterator[list[tuple[str, bytes | None]]]:
    """Yield the headers of each record as pairs. `to_pylist` of the column would be slower, because it makes
    a dict of each header.
    """
    flat = column.flatten()
    pairs = list(zip(flat.field(0).to_pylist(), flat.field(1).to_pylist(), strict=True))
    end = 0
    for length in pc.fill_null(pc.list_value_length(column), 0).to_pylist():
        start, end = end, end + length
        yield pairs[start:end]


class _Copies:
    """The totals over all source records, and the first source records of each kind of finding."""

    def __init__(self, tps: Sequence[TopicPartition], max_findings: int) -> None:
        self._tps, self._max_findings = tps, max_findings
        topics = sorted({tp.topic for tp in tps})
        self._topic_of = pa.array([topics.index(tp.topic) for tp in tps], pa.int32())
        self.records = self.sources = self.filter_loses = self.filter_doubles = 0
        self._kept: dict[str, Any] = {}

    def add(self, table: Any) -> None:
        """Add one of the tables of `KeyCounts.merged`. All copies of a source record are in one table."""
        by_tp = self._by_partition(table)
        sources = by_tp.group_by(_SOURCE).aggregate([("times", "sum"), ("is_new", "sum")])
        times, new = sources["times_sum"], sources["is_new_sum"]
        self.records += pc.sum(times).as_py() or 0
        self.sources += sources.num_rows
        self.filter_loses += self._keep("late", by_tp, sources.filter(pc.equal(new, 0)))
        self.filter_doubles += self._keep("in two", by_tp, sources.filter(pc.greater(new, 1)))
        self._keep("repeated", by_tp, sources.filter(pc.greater(times, 1)))

    def _by_partition(self, table: Any) -> Any:
        """Return a row for each source record and partition. It sums the rows of `table`, which are separate
        for each verdict.
        """
        is_new = pc.subtract(1, pc.bit_wise_and(table["group"], 1))
        topic = self._topic_of.take(table["first_tp"].combine_chunks())
        table = table.append_column("is_new", is_new).append_column("topic", topic)
        sums = [("count", "sum"), ("is_new", "max"), ("first_offset", "min"), ("last_offset", "max")]
        by_tp = table.group_by([*_SOURCE, "first_tp"]).aggregate(sums)
        names = {"first_tp": "tp", "count_sum": "times", "is_new_max": "is_new"}
        names |= {"first_offset_min": "first", "last_offset_max": "last"}
        return by_tp.rename_columns([names.get(name, name) for name in by_tp.column_names])

    def _keep(self, name: str, by_tp: Any, sources: Any) -> int:
        """Keep the first source records of `sources` and their places under `name`. Return the number of all
        source records in `sources`.
        """
        if sources.num_rows:
            order = [(column, "ascending") for column in _SOURCE]
            first = sources.select(_SOURCE).sort_by(order).slice(0, self._max_findings)
            rows = by_tp.join(first, _SOURCE, join_type="inner")
            kept = self._kept.get(name)
            self._kept[name] = rows if kept is None else pa.concat_tables([kept, rows])
        return int(sources.num_rows)

    def sources_of(self, name: str) -> list[SourceCopies]:
        """Return the first source records, at most `max_findings`, that `_keep` stored under `name`."""
        if name not in self._kept:
            return []
        order = [(column, "ascending") for column in (*_SOURCE, "tp")]
        by_source: dict[tuple[int, bytes], list[dict[str, Any]]] = {}
        for row in self._kept[name].sort_by(order).to_pylist():
            by_source.setdefault((row["topic"], row["key"]), []).append(row)
        return [
            SourceCopies(
                key.decode(),
                sum(row["times"] for row in rows),
                tuple(_place(self._tps[row["tp"]], row["first"]) for row in rows),
                _place(self._tps[rows[-1]["tp"]], rows[-1]["last"]),
            )
            for (_, key), rows in list(by_source.items())[: self._max_findings]
        ]


def _place(tp: TopicPartition, offset: int) -> Place:
    return Place(tp.topic, tp.partition, offset)


_SOURCE = ["topic", "key"]
