"""The audit: a table of findings, and logs with planted faults, of which it must find all and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.audit.partition import BumpedOutcome, Finding, FindingKind, PartitionAudit, StoredBatch
from oncelog.rules.idempotence.append import ProducedBatch, ProducerEntry, Store, decide_append
from oncelog.rules.idempotence.sequence import SEQUENCE_MAX, advance
from oncelog.types import Origin

TABLE = Path(__file__).parents[1] / "tables" / "audit.txt"


def _rows() -> Iterator[tuple[str, ...]]:
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            yield tuple(cell.strip() for cell in line.split("|"))


CASES = list(_rows())


def parse_batches(text: str, next_offset: int) -> Iterator[StoredBatch]:
    for word in text.split(", "):
        text, _, offset = word.partition(" @")
        batch = _parse_batch(text, int(offset) if offset else next_offset)
        yield batch
        next_offset = batch.last_offset + 1


def _parse_batch(text: str, offset: int) -> StoredBatch:
    if text.startswith("?"):
        last = offset + (1 if text == "?!" else int(text[2:])) - 1
        no_batch = StoredBatch(offset, last, None, None, None, 0, 0, False, None, problem="planted")
        flags = {"is_torn": text == "?!", "is_removed": text[1] == "-", "is_index": text[1] == "*"}
        return no_batch._replace(**flags)
    flags = {"crc_ok": "!" not in text, "is_visible": {"^": True, "_": False}.get(text[-1])}
    flags |= {"records_problem": "planted" if "%" in text else None}
    who, what = text.rstrip("!%^_").split(" ")
    if who == "-" and not what[0].isupper():
        flags["is_transactional"] = what.startswith("t")
        size = int(what.removeprefix("t"))
        return StoredBatch(offset, offset + size - 1, None, None, None, size, size, False, **flags)
    numbers = (None, None) if who == "-" else [None if w == "-" else int(w) for w in who.split(".")]
    if what[0].isupper():
        word, _, coordinator_epoch = what.partition("/")
        flags["is_transactional"] = who != "-"
        if word != "CONTROL":
            flags |= {"is_commit": word == "COMMIT", "coordinator_epoch": int(coordinator_epoch or 0)}
        return StoredBatch(offset, offset, *numbers, None, 1, 1, True, **flags)
    what, _, kept = what.partition("#")
    first, _, covered = what.removeprefix("t").partition("+")
    sequence, places = None if first == "-" else int(first), int(covered)
    flags |= {"is_transactional": what.startswith("t")}
    count = int(kept) if kept else places
    return StoredBatch(offset, offset + places - 1, *numbers, sequence, places, count, False, **flags)


def format_finding(finding: Finding) -> str:
    sequences = "" if finding.first_sequence is None else f":{finding.first_sequence}-{finding.last_sequence}"
    other = "" if finding.other_offset is None else f"~{finding.other_offset}"
    return f"{finding.kind.value}@{finding.base_offset}{sequences}{other}"


@pytest.mark.behaviour("P5")
@pytest.mark.parametrize(
    ("log", "batches", "expected"), [row[1:] for row in CASES], ids=[r[0] for r in CASES]
)
def test_row(log: str, batches: str, expected: str) -> None:
    what, _, number = log.partition(" ")
    start = int(number) if what == "cut" else 0
    audit = PartitionAudit(
        log_start_offset=start,
        is_compacted=what == "compacted",
        is_internal=what == "internal",
        last_stable_offset=int(number) if what == "stable" else None,
        indexed_to=int(number) if what == "indexed" else None,
    )
    for batch in parse_batches(batches, start):
        audit.see(batch)
    findings, totals = audit.finish()
    assert ", ".join(map(format_finding, findings)) == (expected if expected != "none" else "")
    assert totals.findings == sum(finding.kind.is_violation for finding in findings)
    assert all(finding.explanation and "None" not in finding.explanation for finding in findings)


def test_every_kind_has_a_row() -> None:
    found = {word.split("@")[0] for row in CASES for word in re.split(", ", row[3])}
    assert found >= {kind.value for kind in FindingKind}
    assert len({row[0] for row in CASES}) == len(CASES)


def test_totals_say_what_was_seen() -> None:
    audit = PartitionAudit(log_start_offset=5)
    for batch in parse_batches("7.0 9+5, - 3, 7.0 COMMIT, 8.0 0+2, 7.0 14+1!, 9.0 4+1", 5):
        audit.see(batch)
    _, totals = audit.finish()
    assert (totals.batches, totals.records, totals.control_batches) == (6, 12, 1)
    assert (totals.producers, totals.unknown_starts) == (3, 2)
    assert (totals.unnumbered_batches, totals.unnumbered_records) == (1, 3)


def test_totals_say_how_transactions_ended() -> None:
    audit = PartitionAudit()
    ends = "7.0 t0+5, 7.1 COMMIT, 7.1 t0+2, 7.2 COMMIT, 8.0 t0+1, 8.0 ABORT, 9.0 ABORT, 9.0 COMMIT, 9.0 ABORT"
    for batch in parse_batches(ends, 0):
        audit.see(batch)
    assert audit.take_outcomes() == [BumpedOutcome(7, 1, True, 0, 5), BumpedOutcome(7, 2, True, 6, 8)]
    assert audit.take_outcomes() == []
    _, totals = audit.finish()
    assert (totals.committed, totals.aborted, totals.empty_markers) == (2, 1, 3)


def test_totals_say_how_many_records_lie_below_the_log_start() -> None:
    audit = PartitionAudit(log_start_offset=40)
    for batch in parse_batches("7.0 5+3, 7.0 COMMIT, 7.0 8+2#-4, - 4, 7.0 10+1 @40", 20):
        audit.see(batch)
    findings, totals = audit.finish()
    assert (findings, totals.removed_records, totals.records) == ([], 7, 1)


def test_an_epoch_without_a_producer_id_is_no_producer() -> None:
    audit = PartitionAudit()
    audit.see(StoredBatch(0, 2, None, 4, None, 3, 3, False, True))
    findings, totals = audit.finish()
    assert (findings, totals.producers, totals.unnumbered_records) == ([], 0, 3)


def test_a_marker_without_a_coordinator_epoch_fences_none() -> None:
    audit = PartitionAudit()
    unknown, known, *_ = parse_batches("7.0 COMMIT/0, 7.0 COMMIT/0", 0)
    for batch in (unknown._replace(coordinator_epoch=None), known):
        audit.see(batch)
    assert audit.finish()[0] == []


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ("7.0 0+5, ?+8", "nothing up to offset 12 was audited: planted"),
        ("7.0 t0+5, 7.1 COMMIT, 7.1 ABORT", "ABORT of a transaction that already ended with COMMIT"),
        ("7.0 t0+5, 7.1 ABORT, 7.1 COMMIT", "COMMIT of a transaction that already ended with ABORT"),
        ("7.0 0+3, ?-4, 7.0 3+2 @7", "the log start moved from 0 to 7 during the audit"),
    ],
)
def test_a_finding_says_what_it_is_about(batches: str, words: str) -> None:
    audit = PartitionAudit()
    for batch in parse_batches(batches, 0):
        audit.see(batch)
    ((finding, *_), _) = audit.finish()
    assert words in finding.explanation


def test_a_finding_without_a_reason_gives_none() -> None:
    audit = PartitionAudit()
    for batch in parse_batches("7.0 0+5, ?!", 0):
        audit.see(batch._replace(problem=None))
    ((finding,), _) = audit.finish()
    assert finding.explanation == "the log ends within a batch"


def test_a_log_that_ends_before_its_log_start_misses_the_offsets_between() -> None:
    audit = PartitionAudit(log_start_offset=40)
    for batch in parse_batches("7.0 5+3", 30):
        audit.see(batch)
    ((finding,), _) = audit.finish()
    assert (finding.base_offset, finding.last_offset) == (33, 39)
    assert "offsets 33 to 39 are missing" in finding.explanation


def test_findings_are_bounded_and_still_counted() -> None:
    audit = PartitionAudit(max_findings=3)
    for batch in parse_batches(", ".join(["7.0 0+1"] * 11), 0):
        audit.see(batch)
    findings, totals = audit.finish()
    assert (len(findings), totals.findings) == (3, 10)


# Property tests: a log that the append rule accepted has no findings, and one planted fault gives exactly the
# finding for that fault.

_SENDS = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from(["next", "next", "next", "again", "gap", "epoch"]),
        st.integers(1, 9),
    ),
    max_size=60,
)


def stored_by_the_append_rule(sends: list[tuple[int, str, int]], start: int) -> list[StoredBatch]:
    entries: dict[int, ProducerEntry] = {}
    log: list[StoredBatch] = []
    offset = 1
    for producer_id, kind, count in sends:
        entry = entries.get(producer_id)
        last = entry.last_sequence if entry else None
        epoch = (entry.producer_epoch or 0) if entry else 0
        due = start if entry is None else 0 if last is None else advance(last, 1)
        sequence = {"again": advance(due, -count), "gap": advance(due, 2), "epoch": 0}.get(kind, due)
        epoch += kind == "epoch"
        batch = ProducedBatch(producer_id, epoch, sequence, count - 1, 0, False)
        verdict = decide_append(entry, batch, Origin.CLIENT, base_offset=offset, now_ms=0)
        if isinstance(verdict, Store):
            entries[producer_id] = verdict.entry
            log.append(
                StoredBatch(
                    offset, offset + count - 1, producer_id, epoch, sequence, count, count, False, True
                )
            )
            offset += count
    return log


def audited(log: list[StoredBatch]) -> list[Finding]:
    # The log start is above 0, so a producer may begin with any sequence.
    audit = PartitionAudit(log_start_offset=1)
    for batch in log:
        audit.see(batch)
    return audit.finish()[0]


@pytest.mark.behaviour("P5", "I7", "I8")
@settings(deadline=None, max_examples=150)
@given(sends=_SENDS, start=st.sampled_from([0, 1, SEQUENCE_MAX - 20, SEQUENCE_MAX]))
def test_batches_that_the_append_rule_stores_are_clean(sends: list[tuple[int, str, int]], start: int) -> None:
    assert audited(stored_by_the_append_rule(sends, start)) == []


def _renumbered(log: list[StoredBatch]) -> list[StoredBatch]:
    """Return the same batches with new base offsets, so that no offsets are missing between them."""
    offset, placed = 1, []
    for batch in log:
        placed.append(batch._replace(base_offset=offset, last_offset=offset + batch.sequence_count - 1))
        offset += batch.sequence_count
    return placed


@pytest.mark.behaviour("P5")
@settings(deadline=None, max_examples=150)
@given(
    counts=st.lists(st.integers(1, 9), min_size=4, max_size=40),
    start=st.sampled_from([0, 7, SEQUENCE_MAX - 20]),
    fault=st.sampled_from(["repeat", "drop", "swap"]),
    data=st.data(),
)
def test_a_planted_fault_is_found_and_nothing_else(
    counts: list[int], start: int, fault: str, data: st.DataObject
) -> None:
    log = stored_by_the_append_rule([(1, "next", count) for count in counts], start)
    at = data.draw(st.integers(1, len(log) - 2))
    if fault == "repeat":
        again = data.draw(st.integers(at, len(log) - 1))
        faulty = _renumbered([*log[: again + 1], log[at], *log[again + 1 :]])
        expected = [(FindingKind.DUPLICATE_BATCH, faulty[again + 1].base_offset, log[at].base_sequence)]
    elif fault == "drop":
        faulty = _renumbered([*log[:at], *log[at + 1 :]])
        expected = [(FindingKind.SEQUENCE_GAP, faulty[at].base_offset, log[at].base_sequence)]
    else:
        faulty = _renumbered([*log[:at], log[at + 1], log[at], *log[at + 2 :]])
        expected = [(FindingKind.OUT_OF_ORDER, faulty[at + 1].base_offset, log[at].base_sequence)]
    found = [(f.kind, f.base_offset, f.first_sequence) for f in audited(faulty)]
    assert found == expected
