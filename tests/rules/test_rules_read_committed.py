"""The read_committed filter: a table, and a naive reader that knows the outcome of every transaction."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.types import Isolation

COMMITTED, UNCOMMITTED = Isolation.READ_COMMITTED, Isolation.READ_UNCOMMITTED


@dataclass(frozen=True)
class Batch:
    last_offset: int
    producer_id: int | None = None
    is_transactional: bool = False
    is_control: bool = False
    is_abort: bool = False


def plain(offset: int, pid: int | None = None) -> Batch:
    return Batch(offset, pid)


def txn(offset: int, pid: int) -> Batch:
    return Batch(offset, pid, is_transactional=True)


def abort(offset: int, pid: int) -> Batch:
    return Batch(offset, pid, is_transactional=True, is_control=True, is_abort=True)


def commit(offset: int, pid: int) -> Batch:
    return Batch(offset, pid, is_transactional=True, is_control=True)


def verdicts(batches: list[Batch], aborted: list[tuple[int, int]], isolation: Isolation = COMMITTED) -> str:
    """Return a letter per batch: d(eliver), m(arker) or a(borted)."""
    judge = VisibilityFilter(isolation, aborted)
    return "".join(judge.decide(b, is_abort_marker=b.is_abort).value[0] for b in batches)


STORIES = [
    ("plain records", [plain(0), plain(1, 7)], [], "dd"),
    ("committed", [txn(0, 7), commit(1, 7)], [], "dm"),
    ("aborted", [txn(0, 7), txn(1, 7), abort(2, 7)], [(7, 0)], "aam"),
    ("aborted, then committed", [txn(0, 7), abort(1, 7), txn(2, 7), commit(3, 7)], [(7, 0)], "amdm"),
    ("committed, then aborted", [txn(0, 7), commit(1, 7), txn(2, 7), abort(3, 7)], [(7, 2)], "dmam"),
    ("twice aborted", [txn(0, 7), abort(1, 7), txn(2, 7), abort(3, 7)], [(7, 2), (7, 0)], "amam"),
    ("interleaved", [txn(0, 7), txn(1, 8), abort(2, 7), txn(3, 8), commit(4, 8)], [(7, 0)], "admdm"),
    ("plain records of an aborted id stay", [txn(0, 7), plain(1, 7), abort(2, 7)], [(7, 0)], "adm"),
    ("read begins inside the transaction", [txn(5, 7), abort(6, 7)], [(7, 2)], "am"),
    ("first offset inside the batch", [txn(9, 7), abort(10, 7)], [(7, 5)], "am"),
    ("transaction begins later", [txn(0, 7), commit(1, 7), txn(9, 7)], [(7, 9)], "dma"),
    ("control without producer id", [Batch(0, None, is_control=True), plain(1)], [], "md"),
]


@pytest.mark.parametrize(
    ("batches", "aborted", "expected"), [s[1:] for s in STORIES], ids=[s[0] for s in STORIES]
)
def test_read_committed(batches: list[Batch], aborted: list[tuple[int, int]], expected: str) -> None:
    assert verdicts(batches, aborted) == expected


@pytest.mark.parametrize(("batches", "aborted"), [s[1:3] for s in STORIES], ids=[s[0] for s in STORIES])
def test_read_uncommitted_hides_markers_only(batches: list[Batch], aborted: list[tuple[int, int]]) -> None:
    expected = "".join("m" if batch.is_control else "d" for batch in batches)
    assert verdicts(batches, aborted, UNCOMMITTED) == expected


def test_a_filter_forgets_nothing_between_batches_and_everything_between_answers() -> None:
    judge = VisibilityFilter(COMMITTED, [(7, 0)])
    assert judge.decide(txn(0, 7), is_abort_marker=False) is Verdict.ABORTED
    assert judge.decide(txn(1, 7), is_abort_marker=False) is Verdict.ABORTED
    assert VisibilityFilter(COMMITTED).decide(txn(2, 7), is_abort_marker=False) is Verdict.DELIVER


EVENTS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["txn", "txn", "plain", "abort", "commit"])), max_size=40
)


def history(events: list[tuple[int, str]]) -> tuple[list[Batch], list[tuple[int, int, int]], set[int]]:
    """Return batches, aborted transactions as (pid, first, marker), and the offsets a naive reader hides."""
    batches: list[Batch] = []
    aborted: list[tuple[int, int, int]] = []
    hidden: set[int] = set()
    opened: dict[int, list[int]] = {}
    closing = [(pid, "abort") for pid in (1, 2, 3)]
    for offset, (pid, event) in enumerate(events + closing):
        if event == "txn":
            opened.setdefault(pid, []).append(offset)
            batches.append(txn(offset, pid))
        elif event == "plain":
            batches.append(plain(offset, None))
        elif event == "abort":
            offsets = opened.pop(pid, [])
            hidden.update(offsets)
            if offsets:
                aborted.append((pid, offsets[0], offset))
            batches.append(abort(offset, pid))
        else:
            opened.pop(pid, None)
            batches.append(commit(offset, pid))
    return batches, aborted, hidden


@given(EVENTS, st.integers(0, 42), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_as_a_reader_who_knows_every_outcome(
    events: list[tuple[int, str]], start: int, random: object
) -> None:
    batches, aborted, hidden = history(events)
    read = [batch for batch in batches if batch.last_offset >= start]
    told = [(pid, first) for pid, first, marker in aborted if marker >= start]
    random.shuffle(told)  # type: ignore[attr-defined]
    expected = "".join(
        "m" if batch.is_control else "a" if batch.last_offset in hidden else "d" for batch in read
    )
    assert verdicts(read, told) == expected
