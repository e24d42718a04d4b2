"""The decision at the start of a load (resume, refuse, or complete), and the division of chunks into
transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from oncelog.load.decisions import (
    DELIMITED_BY,
    Assignment,
    Complete,
    FileCheckpoint,
    Layout,
    Refused,
    Resume,
    Source,
    content_mismatch,
    decide_assignment,
    decide_start,
    default_delimiter,
    initial_checkpoint,
    is_load_id,
    layout_of,
    transactions,
)

HOW = "csv with key id"


def checkpoint(
    name: str, *, size: int = 100, time: int = 1, position: int = 100, done: bool = True
) -> FileCheckpoint:
    return FileCheckpoint("t", "T1", HOW, name, size, time, position, 10, f"digest of {name}", done)


A, B, C = Source("a", 100, 1), Source("b", 100, 1), Source("c", 100, 1)
PART_OF_B = checkpoint("b", position=40, done=False)


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("checkpoints", "sources", "verdict"),
    [
        ([], [A], Resume(0, None)),
        ([checkpoint("a", position=7, done=False)], [A], Resume(0, checkpoint("a", position=7, done=False))),
        ([checkpoint("a")], [A], Complete()),
        ([checkpoint("a")], [A, B], Resume(1, None)),
        ([checkpoint("a"), PART_OF_B], [A, B, C], Resume(1, PART_OF_B)),
        ([checkpoint("a"), checkpoint("b")], [A, B], Complete()),
        # The file changed but kept its size, so the digests must be compared.
        ([checkpoint("a", time=9), checkpoint("b")], [A, B], Complete((0,))),
        ([checkpoint("a", time=9), PART_OF_B], [A, B], Resume(1, PART_OF_B, (0,))),
        ([checkpoint("a", time=9)], [A, B], Resume(1, None, (0,))),
        # An unfinished file is not among those to recheck, because a resume always checks the part already
        # read.
        ([PART_OF_B._replace(modified_ns=9)], [B], Resume(0, PART_OF_B._replace(modified_ns=9))),
        # The checkpoint has no topic id, so it is valid for any id.
        ([checkpoint("a")._replace(topic_id=None)], [A], Complete()),
        # The file has another name than in its checkpoint, so it may be another file, and the digests must be
        # compared.
        ([checkpoint("a")], [A._replace(name="moved/a")], Complete((0,))),
        ([checkpoint("b")], [A, B], Resume(1, None, (0,))),
        ([checkpoint("a"), checkpoint("b")], [B, A], Complete((0, 1))),
    ],
)
def test_a_load_resumes_at_its_checkpoints(
    checkpoints: list[FileCheckpoint], sources: list[Source], verdict: Resume | Complete
) -> None:
    assert decide_start(checkpoints, sources, topic="t", topic_id="T1", hows=[HOW] * 3) == verdict


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("checkpoints", "sources", "topic", "topic_id", "how", "reason"),
    [
        (
            [checkpoint("a", size=99)],
            [A],
            "t",
            "T1",
            HOW,
            "a changed since it was read: its size was 99 bytes and is now 100",
        ),
        (
            [checkpoint("x", size=99)],
            [A],
            "t",
            "T1",
            HOW,
            "a is in the place of x, but is not the file that was read: its size was 99 bytes and is now 100",
        ),
        ([checkpoint("a")], [A, B, B], "t", "T1", HOW, "b is given twice"),
        ([checkpoint("a")], [A, B, A], "t", "T1", HOW, "a is given twice"),
        ([], [A, A], "t", "T1", HOW, "a is given twice"),
        (
            [checkpoint("a"), PART_OF_B._replace(size_bytes=99)],
            [A, B],
            "t",
            "T1",
            HOW,
            "b changed since it was read",
        ),
        ([checkpoint("a")], [A], "t", "T2", HOW, "topic 't' was deleted and created again since"),
        ([checkpoint("a")], [A], "u", "T2", HOW, "the load writes to topic 't', not 'u'"),
        ([checkpoint("a")], [A], "t", "T1", "lines", "a was begun as csv with key id; now it is lines"),
        (
            [checkpoint("a"), checkpoint("b")],
            [A],
            "t",
            "T1",
            HOW,
            "began with 2 files, but 1 were given; b is missing",
        ),
    ],
)
def test_a_load_with_other_files_or_options_is_refused(
    checkpoints: list[FileCheckpoint], sources: list[Source], topic: str, topic_id: str, how: str, reason: str
) -> None:
    verdict = decide_start(checkpoints, sources, topic=topic, topic_id=topic_id, hows=[how] * 3)
    assert isinstance(verdict, Refused)
    assert reason in verdict.reason


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("begun", "is_refused"),
    [
        (PART_OF_B._replace(how=HOW + DELIMITED_BY + "commas"), True),
        (PART_OF_B._replace(how=HOW + DELIMITED_BY + "tabs"), False),
        (PART_OF_B, False),  # an older version stored no delimiter, so it counts as unchanged
        (PART_OF_B._replace(how=HOW + DELIMITED_BY + "commas", position=0, records=0), False),
        # The next file is complete, so it is not read again.
        (checkpoint("b")._replace(how=HOW + DELIMITED_BY + "commas"), False),
        (PART_OF_B._replace(how="csv" + DELIMITED_BY + "tabs"), True),
    ],
)
def test_the_delimiter_stays_within_a_file(begun: FileCheckpoint, is_refused: bool) -> None:
    hows = [HOW + DELIMITED_BY + "tabs"] * 2
    verdict = decide_start([checkpoint("a"), begun], [A, B], topic="t", topic_id="T1", hows=hows)
    assert isinstance(verdict, Refused) is is_refused


BEGUN = checkpoint("c", position=0, done=False)


@pytest.mark.behaviour("P4")
@pytest.mark.parametrize(
    ("checkpoints", "sources", "verdict"),
    [
        ([], [A, B], Assignment((0, 1), (0, 1))),
        ([checkpoint("a"), PART_OF_B, BEGUN], [A, B, C], Assignment((), (1, 2))),
        # In the next case, a later file is complete before an earlier one: files are read in parallel.
        ([PART_OF_B, checkpoint("a"), BEGUN], [B, A, C], Assignment((), (0, 2))),
        ([checkpoint("a"), PART_OF_B], [A, B, C], Assignment((2,), (1, 2))),
        ([checkpoint("a"), checkpoint("b")], [A, B], Assignment((), ())),
        ([checkpoint("a", time=9), checkpoint("b")], [A, B], Assignment((), (), (0,))),
        ([checkpoint("a", time=9), PART_OF_B], [A, B, C], Assignment((2,), (1, 2), (0,))),
        # A file is rechecked even if it was only partly read: another file may be in its place, and the read
        # file may be among the new ones.
        ([PART_OF_B], [A, B], Assignment((1,), (0, 1), (0,))),
        ([PART_OF_B], [B._replace(modified_ns=9), C], Assignment((1,), (0, 1), (0,))),
        ([checkpoint("b")], [A, B], Assignment((1,), (1,), (0,))),
        # No part of the file was read, so it needs no recheck.
        ([BEGUN], [A], Assignment((), (0,))),
    ],
)
def test_files_in_parallel_are_assigned_all_at_once(
    checkpoints: list[FileCheckpoint], sources: list[Source], verdict: Assignment
) -> None:
    assert decide_assignment(checkpoints, sources, topic="t", topic_id="T1", hows=[HOW] * 3) == verdict


@pytest.mark.behaviour("P4")
def test_files_in_parallel_that_are_missing_or_changed_are_refused() -> None:
    """The first run stores a checkpoint for every file, so later runs notice if a file is left out or
    exchanged.
    """
    for sources, reason in [
        ([A], "began with 2 files, but 1 were given; c is missing"),
        ([A, B._replace(size_bytes=7)], "b is in the place of c"),
    ]:
        verdict = decide_assignment(
            [checkpoint("a"), BEGUN], sources, topic="t", topic_id="T1", hows=[HOW] * 2
        )
        assert isinstance(verdict, Refused) and reason in verdict.reason
    first = initial_checkpoint(A, HOW, topic="t", topic_id="T1")
    assert first == FileCheckpoint("t", "T1", HOW, "a", 100, 1, 0, 0, "", False)
    plain = decide_start([first], [A], topic="t", topic_id="T1", hows=["csv"])
    assert isinstance(plain, Refused) and "a was begun as csv with key id; now it is csv" in plain.reason


def test_a_changed_part_is_named() -> None:
    assert content_mismatch(PART_OF_B, B, "digest of b") is None
    assert "position 40 has changed" in (content_mismatch(PART_OF_B, B, "another") or "")
    assert "it ends before position 40" in (content_mismatch(PART_OF_B, B, None) or "")
    assert "does not end at position 100 any more" in (content_mismatch(checkpoint("b"), B, None) or "")
    assert "Give the files in their earlier order" in (content_mismatch(PART_OF_B, A, "another") or "")


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
def test_the_file_name_decides_the_layout(name: str, layout: Layout | None) -> None:
    assert layout_of(name, None) == layout


def test_a_requested_format_overrides_the_file_name() -> None:
    assert layout_of("a", "csv") == Layout("csv", None)
    assert layout_of("a.gz", "lines") == Layout("lines", "gzip")
    assert layout_of("a.parquet.gz", "parquet") is None


class Sized(NamedTuple):
    records: int
    size_bytes: int


@pytest.mark.parametrize(
    ("chunks", "groups"),
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
def test_chunks_are_grouped_within_both_limits(chunks: list[tuple[int, int]], groups: list[int]) -> None:
    sized = [Sized(*chunk) for chunk in chunks]
    grouped = list(transactions(sized, max_records=4, max_bytes=4))
    assert [len(group) for group in grouped] == groups
    assert [chunk for group in grouped for chunk in group] == sized


@pytest.mark.parametrize("full", [(4, 0), (0, 4)])
def test_a_full_transaction_does_not_wait_for_the_next_chunk(full: tuple[int, int]) -> None:
    def chunks() -> Iterator[Sized]:
        yield Sized(*full)
        raise AssertionError("asked for another chunk first")

    assert next(transactions(chunks(), max_records=4, max_bytes=4)) == [Sized(*full)]


@pytest.mark.parametrize(
    ("text", "is_one"), [("a.B_1-2", True), ("", False), ("a/b", False), ("a" * 201, False)]
)
def test_a_load_id_has_a_limited_alphabet_and_length(text: str, is_one: bool) -> None:
    assert is_load_id(text) is is_one


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [
        ("a.tsv", "\t"),
        ("A.TSV", "\t"),
        ("a.Tsv.GZ", "\t"),
        ("a.tsv.1", "\t"),
        ("a.csv", ","),
        ("a.tsv.csv", ","),
        ("a.tsv.csv.zst", ","),
        ("tsv", ","),
        ("a", ","),
    ],
)
def test_a_tab_separates_the_columns_of_tsv_files_only(name: str, delimiter: str) -> None:
    """R1063: A.TSV was read with commas, so each row became one column."""
    assert default_delimiter(name) == delimiter
