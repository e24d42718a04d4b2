"""The rules of a table's audit: a table of verdicts, and runs of offsets compared with a naive model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.audit.table_rows import (
    RUN,
    OffsetRun,
    RecordFate,
    RowVerdict,
    count_rows,
    cut_runs,
    files_of,
    judge_offsets,
    merge_windows,
    runs_of,
    runs_of_rows,
)

pytestmark = pytest.mark.behaviour("P8")

TABLE = Path(__file__).parents[1] / "tables" / "table_audit.txt"
FATES = dict(zip("claor-", ("COMMITTED", "LATER", "ABORTED", "OPEN", "REMOVED", "NONE"), strict=True))
LARGEST, SMALLEST = 2**63 - 1, -(2**63)


def _rows() -> Iterator[tuple[str, ...]]:
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            yield tuple(cell.strip() for cell in line.split("|"))


CASES = list(_rows())


@pytest.mark.parametrize(
    ("start", "records", "rows", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES]
)
def test_row(start: str, records: str, rows: str, expected: str) -> None:
    fates = np.array([RecordFate[FATES[letter]] for letter in records], np.uint8)
    counts = np.array([int(digit) for digit in rows], np.int64)
    runs = runs_of(judge_offsets(fates, counts), counts, int(start))
    found = [f"{run.verdict.name.lower()}@{run.first}-{run.last}={run.rows}" for run in runs]
    assert (", ".join(found) or "none") == expected


def test_every_fate_has_a_verdict_for_every_number_of_rows() -> None:
    used = {(row[2], row[3]) for row in CASES}
    pairs = {
        (letter, min(int(digit), 2))
        for records, rows in used
        for letter, digit in zip(records, rows, strict=True)
    }
    assert pairs >= {(letter, count) for letter in "cla-r" for count in range(3)}
    assert not RowVerdict.SOUND.is_violation and not RowVerdict.NOT_JUDGED.is_violation


OFFSETS = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([LARGEST, LARGEST - 1, SMALLEST, SMALLEST + 1, -1])),
    max_size=60,
)


@given(OFFSETS)
def test_runs_hold_each_offset_as_often_as_the_rows(offsets: list[int]) -> None:
    runs = runs_of_rows(np.array(offsets, np.int64), 3)
    counted: Counter[int] = Counter()
    for first, last, times, file in runs.tolist():
        assert file == 3 and last - first < 100
        counted.update(dict.fromkeys(range(first, last + 1), times))
    assert counted == Counter(offsets)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 9))
def test_runs_are_cut_at_the_borders_of_windows_and_keep_their_rows(offsets: list[int], size: int) -> None:
    runs = cut_runs(runs_of_rows(np.array(offsets, np.int64), 0), size)
    assert all(first // size == last // size for first, last in zip(runs["first"], runs["last"], strict=True))
    counts = count_rows([runs[:1], runs[1:]], 0, 61)
    assert counts.tolist() == np.bincount(offsets, minlength=61).tolist()


def test_runs_that_touch_across_windows_become_one() -> None:
    missing, doubled = RowVerdict.MISSING, RowVerdict.DOUBLED
    windows = [
        ([OffsetRun(missing, 1, 3, 0), OffsetRun(doubled, 7, 7, 2)], [set(), {1}]),
        ([OffsetRun(doubled, 8, 15, 16)], [{2}]),
        ([OffsetRun(doubled, 16, 16, 3), OffsetRun(missing, 17, 17, 0)], [{2, 3}, set()]),
        ([OffsetRun(missing, 25, 25, 0)], [set()]),
    ]
    assert list(merge_windows(windows)) == [
        (OffsetRun(missing, 1, 3, 0), set()),
        (OffsetRun(doubled, 7, 16, 21), {1, 2, 3}),
        (OffsetRun(missing, 17, 17, 0), set()),
        (OffsetRun(missing, 25, 25, 0), set()),
    ]


def test_a_run_is_of_each_file_that_has_a_row_of_it() -> None:
    wrong = [OffsetRun(RowVerdict.DOUBLED, first, last, 2) for first, last in ((2, 3), (5, 5), (8, 9))]
    pieces = [np.array(runs, RUN) for runs in ([(0, 2, 1, 0), (4, 8, 1, 1)], [(0, 1, 1, 2), (3, 20, 1, 3)])]
    assert files_of(wrong, pieces) == [{0, 3}, {1, 3}, {1, 3}]
