"""Checks of record keys without Spark: does a key occur once in a topic, or as often as in another topic?

The findings are the same as those of oncelog.spark.audit.keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.audit.key_findings import OFFSETS_NAMED, Place, differing_key, repeated_key
from oncelog.audit.result import DIFFERENCE_KINDS, AuditFinding, Difference, KeyTotals
from oncelog.client.consumer.blocking import Consumer
from oncelog.local_audit.key_counts import KeyCounts
from oncelog.local_audit.spill_directory import SpillDirectory
from oncelog.spark.source.offset_ranges import Available
from oncelog.types import TopicPartition


class KeyCheck(NamedTuple):
    """The result of a check or comparison of keys. If it was not possible, `problem` says why."""

    findings: tuple[AuditFinding, ...] = ()
    totals: KeyTotals | None = None
    difference: Difference | None = None
    problem: str | None = None


def read_records(client: Mapping[str, object], now: Available) -> Iterator[tuple[int, Any]]:
    """Yield the committed records as record batches, each with the index of its partition in sorted order."""
    with Consumer(dict(client)) as consumer:
        for number, tp in enumerate(sorted(now.earliest)):
            start = now.earliest[tp]
            for batch in consumer.fetch_range(tp, start, max(start, now.latest[tp])):
                yield number, batch


def check_keys(client: Mapping[str, object], now: Available, max_findings: int) -> KeyCheck:
    """Check that each key occurs once per topic. The first `max_findings` repeated keys become findings."""
    tps = sorted(now.earliest)
    topics = sorted({tp.topic for tp in tps})
    records = keys = repeated = 0
    with SpillDirectory() as spill:
        counts = KeyCounts(spill)
        for number, batch in read_records(client, now):
            counts.add(topics.index(tps[number].topic), batch["key"], number, batch["offset"])
        shown: Any = None
        order = [(name, "ascending") for name in ("group", "first_tp", "first_offset")]
        for table in counts.merged():
            records += pc.sum(table["count"]).as_py() or 0
            keys += table.num_rows
            several = table.filter(pc.greater(table["count"], 1))
            repeated += several.num_rows
            shown = _first_rows(shown, several, order, max_findings)
    rows = shown.to_pylist()
    places = _places(client, now, topics, shown) if rows else []
    findings = [
        repeated_key(row["key"], row["count"], named if len(named) > 1 else _ends(row, tps))
        for row, named in zip(rows, places, strict=True)
    ]
    return KeyCheck(tuple(findings), KeyTotals(records, keys, repeated, counts.without_key))


def _first_rows(kept: Any, more: Any, order: list[tuple[str, str]], count: int) -> Any:
    table = more if kept is None else pa.concat_tables([kept, more])
    return table.sort_by(order).slice(0, count)


def _ends(row: Mapping[str, Any], tps: Sequence[TopicPartition]) -> list[Place]:
    # Return the first and the last place from the counts. They are used if retention or DeleteRecords removed
    # records of the key before `_places` read them.
    ends = [(tps[row[f"{end}_tp"]], row[f"{end}_offset"]) for end in ("first", "last")]
    return [Place(tp.topic, tp.partition, offset) for tp, offset in ends]


def _places(
    client: Mapping[str, object], now: Available, topics: Sequence[str], repeated: Any
) -> list[list[Place]]:
    """Return up to OFFSETS_NAMED places of each repeated key. They come from a second pass over the records.

    The first pass does not keep places, because a frequent key would take much memory.
    """
    places: list[list[Place]] = [[] for _ in range(repeated.num_rows)]
    tps = sorted(now.earliest)
    of_topic = {
        topic: np.flatnonzero(pc.equal(repeated["group"], number).to_numpy())
        for number, topic in enumerate(topics)
    }
    for number, batch in read_records(client, now):
        tp = tps[number]
        rows = of_topic[tp.topic]
        found = pc.index_in(batch["key"], value_set=repeated["key"].take(pa.array(rows)).combine_chunks())
        offsets = batch["offset"].filter(found.is_valid()).to_numpy()
        indexes = found.drop_null().to_numpy()
        order = np.argsort(indexes, kind="stable")
        rank = np.arange(len(order)) - np.searchsorted(indexes[order], indexes[order])
        for place in order[rank < OFFSETS_NAMED].tolist():
            named = places[rows[indexes[place]]]
            if len(named) < OFFSETS_NAMED:
                named.append(Place(*tp, int(offsets[place])))
    return places


FOUND, EXPECTED, LATER = 0, 1, 2
"""The groups of a comparison by key: the records that were found, those that must be found, and those that
may be found in addition.
"""


def compare_keys(
    client: Mapping[str, object], now: Available, expected: Available, max_findings: int
) -> KeyCheck:
    """Compare how often each key occurs in the topics of `now` and in those of `expected`."""
    sides = (now, expected)
    with SpillDirectory() as spill:
        counts = KeyCounts(spill)
        for side, offsets in enumerate(sides):
            for number, batch in read_records(client, offsets):
                counts.add(side, batch["key"], number, batch["offset"])
        rows, difference, _ = compare_counts(counts, max_findings)
    tps = (sorted(now.earliest), sorted(expected.earliest))
    return KeyCheck(tuple(_differing(row, *tps) for row in rows), difference=difference)


class KeyRow(NamedTuple):
    """A key with different numbers of records on the two sides. A place is (index in the sorted list of
    partitions, offset).
    """

    kind: str
    key: bytes
    expected: int
    found: int
    expected_last: tuple[int, int] | None
    found_first: tuple[int, int] | None
    found_last: tuple[int, int] | None


def compare_counts(
    counts: KeyCounts, max_findings: int, *, judge_surplus: bool = True
) -> tuple[list[KeyRow], Difference, int]:
    """Return the first keys that differ, the totals, and the number of keys whose surplus is not judged.

    `counts` has the groups FOUND, EXPECTED and LATER. Without `judge_surplus`, a key that was found more
    often than expected is not a difference.
    """
    sums = dict.fromkeys(("expected", "found", *DIFFERENCE_KINDS), 0)
    shown: Any = None
    not_judged = 0
    order = [(name, "ascending") for name in _ORDER]
    for table in counts.merged():
        both = _both_sides(table)
        for name in ("expected", "found"):
            sums[name] += pc.sum(both[name]).as_py() or 0
        differing = both.filter(pc.is_valid(both["kind"]))
        if not judge_surplus:
            lost = differing.filter(pc.equal(differing["kind"], "lost_key"))
            not_judged += differing.num_rows - lost.num_rows
            differing = lost
        for kind in DIFFERENCE_KINDS:
            sums[kind] += pc.sum(pc.equal(differing["kind"], kind)).as_py() or 0
        shown = _first_rows(shown, differing, order, max_findings)
    rows = [_key_row(row) for row in shown.to_pylist()]
    expected, found, lost, doubled, unexpected = sums.values()
    return rows, Difference(expected, found, lost, doubled, unexpected, counts.without_key), not_judged


def _key_row(row: Mapping[str, Any]) -> KeyRow:
    places = (
        None if row[f"{name}_tp"] < 0 else (row[f"{name}_tp"], row[f"{name}_offset"])
        for name in ("expected_last", "found_first", "found_last")
    )
    return KeyRow(row["kind"], row["key"], row["expected"], row["found"], *places)


_ORDER = ("kind", "expected_last_tp", "expected_last_offset", "found_last_tp", "found_last_offset")


def _both_sides(table: Any) -> Any:
    """Return one row for each key: how often and where it was found and expected, and the kind of difference
    (null if there is none).
    """
    sides = []
    for group, name in ((FOUND, "found"), (EXPECTED, "expected")):
        side = table.filter(pc.equal(table["group"], group)).drop_columns(["group"])
        names = {"key": "key", "count": name}
        sides.append(side.rename_columns([names.get(n, f"{name}_{n}") for n in side.column_names]))
    both = sides[0].join(sides[1], "key", join_type="full outer")
    later = table.filter(pc.equal(table["group"], LATER)).select(["key", "count"])
    both = both.join(later.rename_columns(["key", "later"]), "key", join_type="full outer")
    for name in both.column_names:
        if name != "key":
            fill = 0 if name in ("found", "expected", "later") else -1
            both = both.set_column(both.schema.get_field_index(name), name, pc.fill_null(both[name], fill))
    found, expected = both["found"], both["expected"]
    allowed = pc.add(expected, both["later"])
    kind = pc.case_when(
        pc.make_struct(
            pc.less(found, expected),
            pc.less_equal(found, allowed),
            pc.equal(allowed, 0),
            pc.greater(found, allowed),
        ),
        "lost_key",
        pa.scalar(None, pa.string()),
        "unexpected_key",
        "doubled_key",
    )
    return both.append_column("kind", kind)


def _differing(
    row: KeyRow, found: Sequence[TopicPartition], expected: Sequence[TopicPartition]
) -> AuditFinding:
    def place(tps: Sequence[TopicPartition], at: tuple[int, int] | None) -> Place | None:
        return None if at is None else Place(*tps[at[0]], at[1])

    places = (place(expected, row.expected_last), place(found, row.found_first), place(found, row.found_last))
    return differing_key(row.kind, row.key, row.expected, row.found, *places)
