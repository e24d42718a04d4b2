"""The rows of a table by partition and offset, in bounded memory.

Rows arrive in any order. Consecutive offsets are joined to runs, which are cut at the borders of windows of
WINDOW_OFFSETS offsets. As soon as RUNS_IN_MEMORY runs are in memory, they are written to a temporary file, by
partition and window. A run takes 28 bytes, and there are at most as many runs as rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from oncelog.audit.table_rows import RUN, Ints, Runs, cut_runs, runs_of_rows
from oncelog.local_audit.spill_directory import SpillDirectory
from oncelog.types import TopicPartition

WINDOW_OFFSETS = 1 << 20
RUNS_IN_MEMORY = 1 << 20
OUTSIDE_RUNS = 10_000
"""Maximum number of runs of nonexistent offsets that are kept per partition. The rows of further runs are
only counted.
"""
OUTSIDE_PARTITIONS = 1000
"""Maximum number of nonexistent partitions whose rows are kept. The rows of further ones are only counted."""
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


class OutsideRows:
    """Rows of offsets that the partition never had: negative, or at or above its end."""

    def __init__(self) -> None:
        self.rows = 0
        self._runs: list[Runs] = []
        self._count = 0

    def add(self, runs: Runs) -> None:
        """Add sorted runs. Keep at most OUTSIDE_RUNS runs, and count the rows of all."""
        self.rows += row_count(runs)
        room = OUTSIDE_RUNS - self._count
        if room > 0 and len(runs):
            self._runs.append(runs[:room].copy())
            self._count += len(self._runs[-1])

    def runs(self) -> Runs:
        """Return the kept runs, sorted. Runs of one file with the same offsets are joined, and their `times`
        are added up.
        """
        if not self._runs:
            return np.empty(0, RUN)
        names = ["first", "last", "file"]
        found = np.sort(np.concatenate(self._runs), order=names)
        is_new = np.ones(len(found), np.bool_)
        is_new[1:] = found[names][1:] != found[names][:-1]
        starts = np.flatnonzero(is_new)
        merged = found[starts]
        merged["times"] = np.add.reduceat(found["times"], starts)
        return merged


def row_count(runs: Runs) -> int:
    """Return the number of rows in the runs. The arithmetic is unsigned, because a run of rows in a SQLite
    table may span more than 2**63 offsets.
    """
    sizes = runs["last"].astype(np.uint64) - runs["first"].astype(np.uint64) + np.uint64(1)
    return int((sizes * runs["times"].astype(np.uint64)).sum())


def _clipped(runs: Runs, low: int, high: int) -> Runs:
    """Return the parts of runs within [low, high]."""
    parts = runs[(runs["first"] <= high) & (runs["last"] >= low)].copy()
    parts["first"] = np.maximum(parts["first"], low)
    parts["last"] = np.minimum(parts["last"], high)
    return parts


def _by_partition() -> defaultdict[TopicPartition, defaultdict[int, list[Any]]]:
    """Return an empty map: partition -> window -> list."""
    return defaultdict(lambda: defaultdict(list))


class RowRuns:
    """The rows of the audited partitions. `ends` has the end offset of each partition, exclusive.

    `spill` stores the runs beyond RUNS_IN_MEMORY. It must be open while rows are added and read.
    """

    def __init__(self, ends: Mapping[TopicPartition, int], spill: SpillDirectory) -> None:
        self.files: list[str] = []
        self.rows: defaultdict[TopicPartition, int] = defaultdict(int)
        self.outside: dict[TopicPartition, OutsideRows] = {}
        self.unlocated: defaultdict[int, int] = defaultdict(int)
        """The number of rows with NULL in a column, by file."""
        self.rows_of_other_topics = 0
        self.rows_of_more_partitions = 0
        """The number of rows of nonexistent partitions beyond OUTSIDE_PARTITIONS. They are not kept."""
        self.highest: dict[TopicPartition, int] = {}
        """For each partition, the highest offset below its end that has a row."""
        self.window_offsets = WINDOW_OFFSETS
        self._ends = ends
        self._waiting: defaultdict[TopicPartition, defaultdict[int, list[Runs]]] = _by_partition()
        self._waiting_runs = 0
        self._places: defaultdict[TopicPartition, defaultdict[int, list[tuple[int, int]]]] = _by_partition()
        self._spill = spill
        self._written = 0

    def add_file(self, name: str) -> int:
        """Register a file of the table, and return its number."""
        self.files.append(name)
        return len(self.files) - 1

    def add_rows(self, topic: str, partitions: Ints, offsets: Ints, file: int) -> None:
        """Add rows of one topic, in one file: the partition and the offset of each row."""
        values, inverse = np.unique(partitions, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[order], np.arange(len(values) + 1)).tolist()
        for number, partition in enumerate(values.tolist()):
            tp = TopicPartition(topic, partition)
            chosen = order[bounds[number] : bounds[number + 1]]
            if self._is_room_for(tp):
                self.add_runs(tp, runs_of_rows(offsets[chosen], file))
            else:
                self.rows_of_more_partitions += len(chosen)

    def _is_room_for(self, tp: TopicPartition) -> bool:
        return tp in self._ends or tp in self.outside or len(self.outside) < OUTSIDE_PARTITIONS

    def add_runs(self, tp: TopicPartition, runs: Runs) -> None:
        """Add sorted runs of one partition."""
        if not self._is_room_for(tp):
            self.rows_of_more_partitions += row_count(runs)
            return
        end = self._ends.get(tp, 0)
        if ((runs["first"] < 0) | (runs["last"] >= end)).any():
            # Split the runs: a run may begin below offset 0 and end above it, or reach beyond the partition's
            # end. Guard: test_a_row_with_a_negative_offset_does_not_hide_the_rows_after_it.
            outside = self._outside(tp)
            outside.add(_clipped(runs, _SMALLEST, -1))
            outside.add(_clipped(runs, end, _LARGEST))
            runs = _clipped(runs, 0, end - 1)
        if not len(runs):
            return
        self.rows[tp] += row_count(runs)
        self.highest[tp] = max(self.highest.get(tp, -1), int(runs["last"].max()))
        self._keep(tp, cut_runs(runs, self.window_offsets))

    def _outside(self, tp: TopicPartition) -> OutsideRows:
        return self.outside.setdefault(tp, OutsideRows())

    def _keep(self, tp: TopicPartition, runs: Runs) -> None:
        windows = runs["first"] // self.window_offsets
        order = np.argsort(windows, kind="stable")
        runs, windows = runs[order], windows[order]
        values, starts = np.unique(windows, return_index=True)
        for window, piece in zip(values.tolist(), np.split(runs, starts[1:]), strict=True):
            self._waiting[tp][window].append(piece)
        self._waiting_runs += len(runs)
        if self._waiting_runs >= RUNS_IN_MEMORY:
            self._write()

    def _write(self) -> None:
        with self._spill.path("runs").open("ab") as file:
            for tp, windows in self._waiting.items():
                for window, pieces in windows.items():
                    runs = np.concatenate(pieces)
                    runs.tofile(file)
                    self._places[tp][window].append((self._written, len(runs)))
                    self._written += len(runs)
        self._waiting.clear()
        self._waiting_runs = 0

    def windows(self, tp: TopicPartition) -> list[int]:
        """Return the numbers of the windows that have rows of a partition, sorted."""
        return sorted(self._waiting[tp].keys() | self._places[tp].keys())

    def read(self, tp: TopicPartition, window: int) -> Iterator[Runs]:
        """Yield the runs of a window, at most RUNS_IN_MEMORY at a time."""
        yield from self._waiting[tp].get(window, ())
        for first, count in self._places[tp].get(window, ()):
            with self._spill.path("runs").open("rb") as file:
                yield np.fromfile(file, RUN, count, offset=first * RUN.itemsize)
