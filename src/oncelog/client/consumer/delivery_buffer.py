"""The decoded records that the application has not taken yet.

A poll fills the buffer on the event loop's thread. The caller's thread takes records as the last step of a
call. So a poll that is interrupted or cancelled earlier leaves all records here for the next poll. The
consumer's positions move only past records that were taken, so leaving a `for` loop skips nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, NamedTuple

from oncelog.errors import DeserializationError, MisuseError
from oncelog.types import Record, TopicPartition

_OWN_CONSUMER = "a deserializer must not use its own consumer"


class Run:
    """Consecutive records of one partition. The records from `next_index` on are undelivered."""

    __slots__ = ("next_index", "rows")

    def __init__(self, rows: list[Record], next_index: int = 0) -> None:
        self.rows = rows
        self.next_index = next_index


class Columns(NamedTuple):
    """A pyarrow.RecordBatch of one partition.

    `position` is the partition's position until the batch is taken.
    """

    tp: TopicPartition
    position: int
    batch: Any


class DeliveryBuffer:
    """The undelivered records of each partition.

    Records of a paused partition are not delivered until `resume`. Only the polling thread calls `take`,
    `take_columns` and `next_record`. The buffer changes only during calls of the application, never in a
    background task. Other threads may call `position` at any time.
    """

    def __init__(self) -> None:
        self._runs: dict[TopicPartition, Run] = {}
        self._columns: Columns | None = None
        self._paused: set[TopicPartition] = set()
        self._is_held = False
        # The run that `next_record` reads from; None after any other change of the buffer.
        self._current: Run | None = None
        # The run of the record that the application's `for` loop is processing. That record is the last one
        # before `next_index`.
        self._unfinished: Run | None = None

    # Filling

    def put(self, records: Mapping[TopicPartition, list[Record]]) -> None:
        """Add records of partitions that have no records in the buffer."""
        self._runs = self._runs | {tp: Run(run) for tp, run in records.items() if run}

    def put_columns(self, columns: Columns) -> None:
        """Store a RecordBatch for `take_columns`."""
        self._columns = columns

    # Looking up

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the partition's first undelivered record; None if there is none."""
        columns = self._columns
        if columns is not None and columns.tp == tp:
            return columns.position
        run = self._runs.get(tp)
        if run is None:
            return None
        index, rows = run.next_index, run.rows
        return rows[index].offset if index < len(rows) else None

    def partitions(self) -> list[TopicPartition]:
        """Return the partitions that have undelivered records in the buffer."""
        columns = self._columns
        held = [tp for tp, run in self._runs.items() if run.next_index < len(run.rows)]
        return held if columns is None else [*held, columns.tp]

    @property
    def has_records(self) -> bool:
        """True when `take` would return records."""
        return any(run.next_index < len(run.rows) for tp, run in self._runs.items() if tp not in self._paused)

    @property
    def held_columns(self) -> Columns | None:
        """The undelivered RecordBatch, even of a paused partition."""
        return self._columns

    @property
    def has_columns(self) -> bool:
        """True when `take_columns` would return a RecordBatch."""
        return self._columns is not None and self._columns.tp not in self._paused

    # Delivery

    # A Python signal handler runs between two bytecodes, and may raise. So each of the functions below
    # prepares its result first and ends with one assignment and the return. No handler can run between the
    # assignment and the return. Guard: test_a_signal_at_any_moment_loses_no_record.

    def take(self, max_records: int) -> list[Record]:
        """Return up to `max_records` records. They count as delivered from now on."""
        rows, remaining = self._select(max_records)
        self._current = None
        self._runs = remaining
        return rows

    def take_converted(self, max_records: int, convert: Callable[[Record], Record]) -> list[Record]:
        """Return up to `max_records` converted records, and stop before the first one that `convert` refuses.

        The returned records count as delivered. If `convert` refuses the first record, raise its
        DeserializationError.
        """
        before = self._runs
        rows, remaining = self._select(max_records)
        converted: list[Record] = []
        try:
            for row in rows:
                converted.append(convert(row))
        except DeserializationError:
            if not converted:
                raise
        if self._runs is not before:
            raise MisuseError(_OWN_CONSUMER)
        if len(converted) < len(rows):
            _, remaining = self._select(len(converted))
        self._current = None
        self._runs = remaining
        return converted

    def peek(self, max_records: int) -> list[Record]:
        """Return the records that `take` would return, without taking them."""
        return self._select(max_records)[0]

    def peek_next(self) -> Record | None:
        """Return the record that `next_record` would return before its conversion; None if there is none."""
        run = self._current
        if run is None or run.next_index >= len(run.rows):
            run = self._next_run()
        return None if run is None else run.rows[run.next_index]

    def _select(self, max_records: int) -> tuple[list[Record], dict[TopicPartition, Run]]:
        """Return up to `max_records` records, and the runs that remain once these records are taken."""
        parts: list[list[Record]] = []
        room = max_records
        remaining: dict[TopicPartition, Run] = {}
        for tp, run in self._runs.items():
            if tp in self._paused or room <= 0 or self._is_held:
                remaining[tp] = run
                continue
            stop = run.next_index + room
            if stop < len(run.rows):
                remaining[tp] = Run(run.rows, stop)
            is_whole = not run.next_index and stop >= len(run.rows)
            parts.append(run.rows if is_whole else run.rows[run.next_index : stop])
            room -= len(parts[-1])
        # A single part is returned without a copy, because the buffer no longer uses it.
        return parts[0] if len(parts) == 1 else list(chain.from_iterable(parts)), remaining

    def take_columns(self) -> Any | None:
        """Return the RecordBatch, or None if there is none or its partition is paused.

        The records of the returned RecordBatch count as delivered from now on.
        """
        if not self.has_columns or self._columns is None or self._is_held:
            return None
        batch = self._columns.batch
        self._columns = None
        return batch

    def next_record(self, convert: Callable[[Record], Record] | None = None) -> Record | None:
        """Return one record, or None if there is none. The record counts as delivered from now on.

        If `convert` raises, the record does not count as delivered. The record before it counts as processed.
        """
        run = self._current
        if run is None or run.next_index >= len(run.rows):
            self._current = run = self._next_run()
            if run is None:
                self._unfinished = None
                return None
        row = run.rows[run.next_index]
        if convert is not None:
            self._unfinished = None
            before = self._runs
            row = convert(row)
            if self._runs is not before:
                raise MisuseError(_OWN_CONSUMER)
        self._unfinished = run
        run.next_index += 1
        return row

    def finish(self) -> None:
        """Count the record that `next_record` returned last as processed.

        Call it when the application asks for the next record, or has committed the last one.
        """
        self._unfinished = None

    def unfinished(self) -> Record | None:
        """Return the record that the application's `for` loop is processing; None if there is none."""
        run = self._unfinished
        if run is None or not any(held is run for held in self._runs.values()):
            return None
        return run.rows[run.next_index - 1]

    def return_unfinished(self) -> None:
        """Count the record that the application's `for` loop was processing as undelivered again.

        Call it before the member leaves its group: an exception may have ended the loop before the record was
        processed. Guard: test_a_record_at_which_a_loop_ended_is_not_committed_by_close.
        """
        row, run = self.unfinished(), self._unfinished
        self._current = self._unfinished = None
        if row is not None and run is not None:
            run.next_index -= 1

    def set_held(self, held: bool) -> None:
        """Deliver nothing, or deliver records again. Positions stay."""
        self._is_held = held
        self._current = None

    def _next_run(self) -> Run | None:
        """Return the first run with undelivered records of a partition that is not paused.

        Return None while the buffer is held.
        """
        if self._is_held:
            return None
        for tp, run in self._runs.items():
            if run.next_index < len(run.rows) and tp not in self._paused:
                return run
        return None

    # Changes of assignment and positions

    def set_paused(self, tp: TopicPartition, paused: bool) -> None:
        """Stop delivering the records of a partition, or deliver them again."""
        if paused:
            self._paused.add(tp)
        else:
            self._paused.discard(tp)
        self._current = None

    def drop(self, tp: TopicPartition) -> None:
        """Drop the records of a partition whose position was set to another offset."""
        self._current = None
        if self._columns is not None and self._columns.tp == tp:
            self._columns = None
        if tp in self._runs:
            self._runs = {other: run for other, run in self._runs.items() if other != tp}

    def keep_only(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the records of all partitions except these. The other partitions are no longer paused."""
        for tp in {*self.partitions(), *self._paused}.difference(partitions):
            self.drop(tp)
            self._paused.discard(tp)
