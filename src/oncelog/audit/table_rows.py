"""Judge the rows of a table against the records of one partition. Pure rules over arrays of offsets.

    the record at an offset                           no row    one row      more rows
    committed before the table's snapshot             missing   -            doubled
    committed, but perhaps after the snapshot         -         -            doubled
    in an aborted transaction                         -         aborted      aborted
    in an open transaction                            -         open         open
    none: a marker, or an offset without a record     -         unknown      unknown
    removed: below the log start, or by compaction    -         not judged   doubled

In the table, "-" means that the rows are right. An offset exists only once in a partition, so several rows
for it are wrong even if the record was removed. One row of a removed record is not judged, because its
correctness can no longer be checked. Source: behaviour P8 (docs/behaviours.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

Codes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class RecordFate(IntEnum):
    """The fate of the record at an offset. The value is the number of its row in the module docstring's
    table, counted from 0.
    """

    COMMITTED = 0
    LATER = 1
    ABORTED = 2
    OPEN = 3
    NONE = 4
    REMOVED = 5


class RowVerdict(IntEnum):
    """The verdict on the rows of an offset."""

    SOUND = 0
    MISSING = 1
    DOUBLED = 2
    ABORTED = 3
    OPEN = 4
    UNKNOWN = 5
    NOT_JUDGED = 6

    @property
    def is_violation(self) -> bool:
        return self not in (RowVerdict.SOUND, RowVerdict.NOT_JUDGED)


_VERDICTS = np.array(
    [
        [RowVerdict.MISSING, RowVerdict.SOUND, RowVerdict.DOUBLED],
        [RowVerdict.SOUND, RowVerdict.SOUND, RowVerdict.DOUBLED],
        [RowVerdict.SOUND, RowVerdict.ABORTED, RowVerdict.ABORTED],
        [RowVerdict.SOUND, RowVerdict.OPEN, RowVerdict.OPEN],
        [RowVerdict.SOUND, RowVerdict.UNKNOWN, RowVerdict.UNKNOWN],
        [RowVerdict.SOUND, RowVerdict.NOT_JUDGED, RowVerdict.DOUBLED],
    ],
    np.uint8,
)


def judge_offsets(fates: Codes, rows: Ints) -> Codes:
    """Return the RowVerdict of each offset. The inputs are the RecordFate and the number of table rows of
    each offset.
    """
    verdicts: Codes = _VERDICTS[fates, np.minimum(rows, 2)]
    return verdicts


class OffsetRun(NamedTuple):
    """Consecutive offsets with the same verdict, and the number of their rows."""

    verdict: RowVerdict
    first: int
    last: int
    rows: int

    @property
    def size(self) -> int:
        """Return the number of offsets."""
        return self.last - self.first + 1


def runs_of(verdicts: Codes, rows: Ints, start: int) -> Iterator[OffsetRun]:
    """Yield the runs of offsets whose verdict is not SOUND. Element 0 of the arrays belongs to offset
    `start`.
    """
    edges = np.flatnonzero(np.diff(verdicts)) + 1
    firsts = np.concatenate(([0], edges))[: len(verdicts)]
    lasts = np.concatenate((edges, [len(verdicts)]))[: len(firsts)]
    shown = np.flatnonzero(verdicts[firsts] != RowVerdict.SOUND)
    sums = np.concatenate(([0], np.cumsum(rows)))
    for first, last in zip(firsts[shown].tolist(), lasts[shown].tolist(), strict=True):
        count = int(sums[last] - sums[first])
        yield OffsetRun(RowVerdict(int(verdicts[first])), start + first, start + last - 1, count)


RUN = np.dtype([("first", np.int64), ("last", np.int64), ("times", np.int64), ("file", np.int32)])
"""Consecutive offsets that have `times` rows each in one file of a table."""
Runs = np.ndarray[Any, np.dtype[np.void]]


def runs_of_rows(offsets: Ints, file: int) -> Runs:
    """Return the offsets of a file's rows as sorted runs. The input may be unsorted and contain an offset
    several times.
    """
    values, times = np.unique(offsets, return_counts=True)
    # A difference of two int64 values may overflow, but the result is 1 only for neighbours.
    is_edge = (np.diff(values) != 1) | (np.diff(times) != 0)
    edges = np.flatnonzero(is_edge) + 1
    firsts = np.concatenate(([0], edges))[: len(values)].astype(np.int64)
    lasts = np.concatenate((edges, [len(values)]))[: len(firsts)].astype(np.int64) - 1
    runs = np.empty(len(firsts), RUN)
    runs["first"], runs["last"], runs["times"], runs["file"] = (
        values[firsts],
        values[lasts],
        times[firsts],
        file,
    )
    return runs


def cut_runs(runs: Runs, size: int) -> Runs:
    """Return the runs, split at each multiple of `size`. No run may begin below 0."""
    first, last = runs["first"] // size, runs["last"] // size
    pieces = last - first + 1
    cut = np.repeat(runs, pieces)
    # Number the pieces of each run from 0.
    number = np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    window = np.repeat(first, pieces) + number
    cut["first"] = np.maximum(cut["first"], window * size)
    cut["last"] = np.minimum(cut["last"], window * size + (size - 1))
    return cut


def count_rows(pieces: Iterable[Runs], start: int, end: int) -> Ints:
    """Return the number of rows of each offset in [start, end). All runs must lie within this range."""
    changes = np.zeros(end - start + 1, np.int64)
    for runs in pieces:
        np.add.at(changes, runs["first"] - start, runs["times"])
        np.subtract.at(changes, runs["last"] - start + 1, runs["times"])
    rows: Ints = np.cumsum(changes)[:-1]
    return rows


class WindowVerdicts(NamedTuple):
    """The verdicts on a window of offsets.

    `counts[verdict]` is the number of offsets with that RowVerdict. `wrong` has the first runs that are
    violations.
    """

    records: int
    not_judged_rows: int
    counts: list[int]
    wrong: list[OffsetRun]


def judge_window(fates: Codes, rows: Ints, start: int, max_runs: int) -> WindowVerdicts:
    """Judge the rows of a window, whose first offset is `start`. Keep at most `max_runs` wrong runs."""
    verdicts = judge_offsets(fates, rows)
    violations = (run for run in runs_of(verdicts, rows, start) if run.verdict.is_violation)
    return WindowVerdicts(
        records=int(np.count_nonzero(fates == RecordFate.COMMITTED)),
        not_judged_rows=int(rows[verdicts == RowVerdict.NOT_JUDGED].sum()),
        counts=np.bincount(verdicts, minlength=len(RowVerdict)).tolist(),
        wrong=list(islice(violations, max_runs)),
    )


def files_of(wrong: list[OffsetRun], pieces: Iterable[Runs]) -> list[set[int]]:
    """Return, for each wrong run, the files that have rows of it. The wrong runs must be sorted."""
    found: list[set[int]] = [set() for _ in wrong]
    if not any(run.rows for run in wrong):
        return found
    firsts, lasts = (np.array([run[index] for run in wrong], np.int64) for index in (1, 2))
    for runs in pieces:
        low = np.searchsorted(lasts, runs["first"], "left")
        high = np.searchsorted(firsts, runs["last"], "right")
        files = runs["file"]
        while (touching := low < high).any():
            low, high, files = low[touching], high[touching], files[touching]
            for number, file in np.unique(np.stack((low, files)), axis=1).T.tolist():
                found[number].add(file)
            low = low + 1
    return found


def merge_windows(
    windows: Iterable[tuple[list[OffsetRun], list[set[Any]]]],
) -> Iterator[tuple[OffsetRun, set[Any]]]:
    """Yield the wrong runs of consecutive windows with their files. Join runs that continue in the next
    window.
    """
    last: tuple[OffsetRun, set[Any]] | None = None
    for wrong, files in windows:
        for run, names in zip(wrong, files, strict=True):
            if last is not None and (run.verdict, run.first) == (last[0].verdict, last[0].last + 1):
                before, known = last
                last = before._replace(last=run.last, rows=before.rows + run.rows), known | names
                continue
            if last is not None:
                yield last
            last = run, names
    if last is not None:
        yield last
