"""Where a load goes on, when it must not, and how pieces become transactions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from oncelog.load.decisions import (
    DELIMITED_BY,
    Complete,
    GoOn,
    Layout,
    Mark,
    Refused,
    Source,
    Spread,
    decide_spread,
    decide_start,
    first_mark,
    is_load_id,
    layout_of,
    transactions,
    why_changed,
)

HOW = "csv with key id"


def mark(name: str, *, size: int = 100, time: int = 1, position: int = 100, done: bool = True) -> Mark:
    return Mark("t", "T1", HOW, name, size, time, position, 10, f"digest of {name}", done)


A, B, C = Source("a", 100, 1), Source("b", 100, 1), Source("c", 100, 1)
PART_OF_B = mark("b", position=40, done=False)


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("marks", "sources", "verdict"),
    [
        ([], [A], GoOn(0, None)),
        ([mark("a", position=7, done=False)], [A], GoOn(0, mark("a", position=7, done=False))),
        ([mark("a")], [A], Complete()),
        ([mark("a")], [A, B], GoOn(1, None)),
        ([mark("a"), PART_OF_B], [A, B, C], GoOn(1, PART_OF_B)),
        ([mark("a"), mark("b")], [A, B], Complete()),
        # Touched, but of the old size: the digest must tell.
        ([mark("a", time=9), mark("b")], [A, B], Complete((0,))),
        ([mark("a", time=9), PART_OF_B], [A, B], GoOn(1, PART_OF_B, (0,))),
        ([mark("a", time=9)], [A, B], GoOn(1, None, (0,))),
        # The part that was read of an unfinished file is always checked, so it needs no recheck.
        ([PART_OF_B._replace(modified_ns=9)], [B], GoOn(0, PART_OF_B._replace(modified_ns=9))),
        # A cluster without topic ids, now or then.
        ([mark("a")._replace(topic_id=None)], [A], Complete()),
        # Under another name it may be another file, whatever its size and time: the digest must tell.
        ([mark("a")], [A._replace(name="moved/a")], Complete((0,))),
        ([mark("b")], [A, B], GoOn(1, None, (0,))),
        ([mark("a"), mark("b")], [B, A], Complete((0, 1))),
    ],
)
def test_start(marks: list[Mark], sources: list[Source], verdict: GoOn | Complete) -> None:
    assert decide_start(marks, sources, topic="t", topic_id="T1", hows=[HOW] * 3) == verdict


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("marks", "sources", "topic", "topic_id", "how", "why"),
    [
        (
            [mark("a", size=99)],
            [A],
            "t",
            "T1",
            HOW,
            "a changed since it was read: it had 99 bytes and has 100",
        ),
        (
            [mark("x", size=99)],
            [A],
            "t",
            "T1",
            HOW,
            "a stands in the place of x and is not the file that was read: it had 99 bytes and has 100",
        ),
        ([mark("a")], [A, B, B], "t", "T1", HOW, "b is given twice"),
        ([mark("a")], [A, B, A], "t", "T1", HOW, "a is given twice"),
        ([], [A, A], "t", "T1", HOW, "a is given twice"),
        (
            [mark("a"), PART_OF_B._replace(size_bytes=99)],
            [A, B],
            "t",
            "T1",
            HOW,
            "b changed since it was read",
        ),
        ([mark("a")], [A], "t", "T2", HOW, "topic 't' was deleted and made anew since"),
        ([mark("a")], [A], "u", "T2", HOW, "the load goes into topic 't', not 'u'"),
        ([mark("a")], [A], "t", "T1", "lines", "a was begun as csv with key id; now it is lines"),
        (
            [mark("a"), mark("b")],
            [A],
            "t",
            "T1",
            HOW,
            "began with 2 files, of which 1 are given; b is missing",
        ),
    ],
)
def test_refused(
    marks: list[Mark], sources: list[Source], topic: str, topic_id: str, how: str, why: str
) -> None:
    verdict = decide_start(marks, sources, topic=topic, topic_id=topic_id, hows=[how] * 3)
    assert isinstance(verdict, Refused)
    assert why in verdict.why


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("begun", "is_refused"),
    [
        (PART_OF_B._replace(how=HOW + DELIMITED_BY + "commas"), True),
        (PART_OF_B._replace(how=HOW + DELIMITED_BY + "tabs"), False),
        (PART_OF_B, False),  # by a version that stored none
        (PART_OF_B._replace(how=HOW + DELIMITED_BY + "commas", position=0, records=0), False),
        (mark("b")._replace(how=HOW + DELIMITED_BY + "commas"), False),  # it is not read again
        (PART_OF_B._replace(how="csv" + DELIMITED_BY + "tabs"), True),
    ],
)
def test_the_delimiter_stays_within_a_file(begun: Mark, is_refused: bool) -> None:
    hows = [HOW + DELIMITED_BY + "tabs"] * 2
    verdict = decide_start([mark("a"), begun], [A, B], topic="t", topic_id="T1", hows=hows)
    assert isinstance(verdict, Refused) is is_refused


BEGUN = mark("c", position=0, done=False)


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("marks", "sources", "verdict"),
    [
        ([], [A, B], Spread((0, 1), (0, 1))),
        ([mark("a"), PART_OF_B, BEGUN], [A, B, C], Spread((), (1, 2))),
        # Side by side: a later file may be done before an earlier one.
        ([PART_OF_B, mark("a"), BEGUN], [B, A, C], Spread((), (0, 2))),
        ([mark("a"), PART_OF_B], [A, B, C], Spread((2,), (1, 2))),
        ([mark("a"), mark("b")], [A, B], Spread((), ())),
        ([mark("a", time=9), mark("b")], [A, B], Spread((), (), (0,))),
        ([mark("a", time=9), PART_OF_B], [A, B, C], Spread((2,), (1, 2), (0,))),
        # Read in part, and perhaps another file now: the one that was read may be the fresh one.
        ([PART_OF_B], [A, B], Spread((1,), (0, 1), (0,))),
        ([PART_OF_B], [B._replace(modified_ns=9), C], Spread((1,), (0, 1), (0,))),
        ([mark("b")], [A, B], Spread((1,), (1,), (0,))),
        # Nothing was read: no other file can be taken for it.
        ([BEGUN], [A], Spread((), (0,))),
    ],
)
def test_files_side_by_side(marks: list[Mark], sources: list[Source], verdict: Spread) -> None:
    assert decide_spread(marks, sources, topic="t", topic_id="T1", hows=[HOW] * 3) == verdict


@pytest.mark.behaviour("P4")
def test_files_side_by_side_refused() -> None:
    """All files have marks from the first run on, so none can be left out or exchanged, begun or not."""
    for sources, why in [
        ([A], "began with 2 files, of which 1 are given; c is missing"),
        ([A, B._replace(size_bytes=7)], "b stands in the place of c"),
    ]:
        verdict = decide_spread([mark("a"), BEGUN], sources, topic="t", topic_id="T1", hows=[HOW] * 2)
        assert isinstance(verdict, Refused) and why in verdict.why
    first = first_mark(A, HOW, topic="t", topic_id="T1")
    assert first == Mark("t", "T1", HOW, "a", 100, 1, 0, 0, "", False)
    plain = decide_start([first], [A], topic="t", topic_id="T1", hows=["csv"])
    assert isinstance(plain, Refused) and "a was begun as csv with key id; now it is csv" in plain.why


def test_why_changed() -> None:
    assert why_changed(PART_OF_B, B, "digest of b") is None
    assert "position 40 is not the same any more" in (why_changed(PART_OF_B, B, "another") or "")
    assert "it ends before position 40" in (why_changed(PART_OF_B, B, None) or "")
    assert "does not end at position 100 any more" in (why_changed(mark("b"), B, None) or "")
    assert "Give the files in the order they had" in (why_changed(PART_OF_B, A, "another") or "")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("a.csv", Layout("csv", None)),
        ("A.CSV.GZ", Layout("csv", "gzip")),
        ("a.tsv", Layout("csv", None)),
        ("a.b.jsonl.zst", Layout("jsonl", "zstd")),
        ("a.ndjson", Layout("jsonl", None)),
        ("a.parquet", Layout("parquet", None)),
        ("a.log.gz", Layout("lines", "gzip")),
        ("a.parquet.gz", None),
        ("a.gz", None),
        ("csv", None),
        ("a.json", None),
        ("a", None),
    ],
)
def test_layout_by_name(name: str, layout: Layout | None) -> None:
    assert layout_of(name, None) == layout


def test_layout_asked_for() -> None:
    assert layout_of("a", "csv") == Layout("csv", None)
    assert layout_of("a.gz", "lines") == Layout("lines", "gzip")
    assert layout_of("a.parquet.gz", "parquet") is None


class Sized(NamedTuple):
    records: int
    size_bytes: int


@pytest.mark.parametrize(
    ("pieces", "groups"),
    [
        ([], []),
        ([(0, 0)], [1]),
        ([(9, 9)], [1]),
        ([(2, 2), (2, 2)], [2]),
        ([(3, 2), (2, 2)], [1, 1]),
        ([(1, 1), (3, 1), (1, 1)], [2, 1]),
        ([(1, 3), (1, 2), (1, 2)], [1, 2]),
        ([(9, 9), (1, 1), (9, 9)], [1, 1, 1]),
        ([(0, 0)] * 5, [5]),
        ([(1, 0)] * 9, [4, 4, 1]),
        ([(0, 1)] * 9, [4, 4, 1]),
        ([(3, 0), (2, 0), (2, 0), (1, 0)], [1, 2, 1]),
        ([(0, 3), (0, 2), (0, 2), (0, 1)], [1, 2, 1]),
    ],
)
def test_transactions(pieces: list[tuple[int, int]], groups: list[int]) -> None:
    sized = [Sized(*each) for each in pieces]
    got = list(transactions(sized, max_records=4, max_bytes=4))
    assert [len(group) for group in got] == groups
    assert [each for group in got for each in group] == sized


@pytest.mark.parametrize("full", [(4, 0), (0, 4)])
def test_a_full_transaction_does_not_wait_for_the_next_piece(full: tuple[int, int]) -> None:
    def pieces() -> Iterator[Sized]:
        yield Sized(*full)
        raise AssertionError("asked for another piece first")

    assert next(transactions(pieces(), max_records=4, max_bytes=4)) == [Sized(*full)]


@pytest.mark.parametrize(
    ("text", "is_one"), [("a.B_1-2", True), ("", False), ("a/b", False), ("a" * 201, False)]
)
def test_load_id(text: str, is_one: bool) -> None:
    assert is_load_id(text) is is_one
