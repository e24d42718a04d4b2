"""What a task of the sink does: write its lane in one transaction, or find it written; and the driver's part.

A task commits its own transaction. In a repeat (a batch that another run began) it only prepares it: rows and
marker are in the open transaction, whose producer id and epoch go to the driver with the task's report. The
driver ends the prepared transactions once all tasks have succeeded, that is, once every lane that is
committed has been found to hold the same rows. Until then nothing new is visible, and nothing is doubled if a
row has moved to another lane.

A task calls `init_transactions` and looks at the plan again afterwards. So of two runs the later one either
finds what the earlier committed in a lane, or fences it there. What may be written is decided in
spark/sink/decisions.py; here is the asking and sending.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Delivery, Producer
from oncelog.errors import MessageTooLarge, MisuseError, OncelogError
from oncelog.spark.sink.batch_plan import agree_on_plan
from oncelog.spark.sink.decisions import (
    Already,
    Compare,
    Finished,
    LaneMarker,
    PlanNote,
    Reason,
    Refuse,
    RowRefused,
    RowSum,
    SinkError,
    Write,
    decide_finish,
    decide_lane,
    decide_repeated,
    decide_still_mine,
)
from oncelog.spark.sink.error_hints import failure_text
from oncelog.spark.sink.rows import LaneRows, Part
from oncelog.spark.sink.state import Sink, forget_markers
from oncelog.types import TransactionShare

__all__ = ["LaneReport", "Sink", "abandon", "finish", "send_part", "write_lane"]


@dataclass(frozen=True, slots=True)
class LaneReport:
    """What a lane did. `was_there`: nothing was written, the batch was there already.

    `size_bytes`: of keys and values; `commit_seconds`: from the last row handed over to the commit's answer.
    `plan`: of a repeat. `prepared`: the transaction that the driver is to end.
    """

    lane: int
    sum: RowSum
    was_there: bool
    size_bytes: int = 0
    commit_seconds: float = 0.0
    plan: PlanNote | None = None
    prepared: TransactionShare | None = None


def write_lane(sink: Sink, batch_id: int, lane: int, batches: Iterable[pa.RecordBatch]) -> LaneReport:
    """Write the rows once, in a transaction of their own. Raises SinkError."""
    task = _LaneTask(sink, batch_id, lane)
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    try:
        with Admin(sink.settings.admin) as admin:
            return task.write(admin, filled if first is None else chain((first,), filled), first is None)
    except OncelogError as error:
        kind = type(error) if isinstance(error, SinkError) else SinkError
        raise kind(
            failure_text(error, f"lane {lane} of batch {batch_id}", sink.settings, task.rows.largest)
        ) from error


class _LaneTask:
    """One attempt to write a lane."""

    def __init__(self, sink: Sink, batch_id: int, lane: int) -> None:
        self._sink, self._batch_id, self._lane = sink, batch_id, lane
        self.rows = LaneRows(sink.settings.topic, sink.settings.max_row_bytes)

    def write(self, admin: Admin, batches: Iterator[pa.RecordBatch], is_empty: bool) -> LaneReport:
        """Write, prepare or compare. `is_empty`: there are no rows."""
        sink, plan = self._sink, PlanNote(self._batch_id, self._sink.run_id)
        finished: Finished | None = None
        if sink.is_named:
            finished = sink.finished(admin)
            match self._verdict(None, finished):
                case Already():
                    return self._count(batches, was_there=not is_empty)
                case Refuse(Reason.REWOUND) as refused:  # a zombie must not fence the task of today
                    raise refused.error(self._batch_id, self._lane)
                case Refuse(Reason.UNKNOWN) as refused if not is_empty:
                    raise refused.error(self._batch_id, self._lane)
            plan = agree_on_plan(sink, admin, self._batch_id, self._lane)
        if is_empty and not plan.is_repeat:
            return self._without_rows(admin, plan)
        settings = {**sink.settings.producer, "transactional.id": sink.lane_id(self._lane)}
        with Producer(settings) as producer:
            # From here on no earlier attempt can write, and what it left is finished or aborted.
            producer.init_transactions()
            if sink.is_named:
                refusal = decide_still_mine(plan, sink.plan(admin))
                if refusal is not None:
                    raise refusal.error(self._batch_id, self._lane)
            marker = self._marker(admin, finished)
            if is_empty:
                return self._without_rows(admin, plan, marker)
            match self._verdict(marker, finished):
                case Refuse() as refused:
                    raise refused.error(self._batch_id, self._lane)
                case Compare(expected):
                    report = self._count(batches, was_there=True, plan=plan)
                    self._agree(expected)
                    return report
                case Write() if plan.is_repeat:
                    return self._prepare(producer, batches, plan)
                case Write():
                    return self._commit(producer, batches)
                case Already():
                    raise AssertionError("looked at before")

    def _verdict(
        self, marker: LaneMarker | None, finished: Finished | None
    ) -> Write | Compare | Already | Refuse:
        first = self._sink.settings.first_batch_id
        return decide_lane(self._batch_id, self._lane, marker, finished, first_batch_id=first)

    def _marker(self, admin: Admin, finished: Finished | None) -> LaneMarker | None:
        sink = self._sink
        found = sink.lane_marker(admin, self._lane, is_fenced=True)
        if not sink.is_named:
            # The note of the end is made before markers are deleted, so it is read after them.
            if found is None and sink.has_ended(admin):
                raise Refuse(Reason.ENDED).error(self._batch_id, self._lane)
            return found
        if found is not None or (finished is not None and finished.sum is not None):
            return found
        name = sink.lane_in_0_4_1(self._lane)
        if sink.is_transactional_id(admin, name):
            with Producer({**sink.settings.producer, "transactional.id": name}) as producer:
                producer.init_transactions()
        return sink.marker_in_0_4_1(admin, name)

    def _without_rows(self, admin: Admin, plan: PlanNote, marker: LaneMarker | None = None) -> LaneReport:
        """No transaction for nothing; but the lane must have had no rows the first time either."""
        marker = marker or self._sink.lane_marker(admin, self._lane, is_fenced=False)
        if marker is not None and marker.batch_id == self._batch_id:
            self._agree(marker.sum)
        return LaneReport(self._lane, RowSum(), was_there=False, plan=plan if plan.is_repeat else None)

    def _count(
        self, batches: Iterator[pa.RecordBatch], *, was_there: bool, plan: PlanNote | None = None
    ) -> LaneReport:
        for batch in batches:
            self.rows.take(batch)
        repeated = plan if plan is not None and plan.is_repeat else None
        return LaneReport(self._lane, self.rows.sum, was_there, self.rows.size_bytes, plan=repeated)

    def _commit(self, producer: Producer, batches: Iterator[pa.RecordBatch]) -> LaneReport:
        with producer.transaction():
            sent_at = self._send(producer, batches)
        seconds = time.monotonic() - sent_at
        return LaneReport(self._lane, self.rows.sum, False, self.rows.size_bytes, seconds)

    def _prepare(self, producer: Producer, batches: Iterator[pa.RecordBatch], plan: PlanNote) -> LaneReport:
        producer.begin_transaction()
        try:
            sent_at = self._send(producer, batches)
            prepared = producer.hand_over_transaction()
        except BaseException:
            with suppress(OncelogError):  # what happened first is what matters
                producer.abort_transaction()
            raise
        seconds = time.monotonic() - sent_at
        return LaneReport(self._lane, self.rows.sum, False, self.rows.size_bytes, seconds, plan, prepared)

    def _send(self, producer: Producer, batches: Iterator[pa.RecordBatch]) -> float:
        """Send rows and marker; return the time at which the last row was handed over."""
        sink = self._sink
        for batch in batches:
            for part in self.rows.parts(self.rows.take(batch)):
                send_part(producer, part)
        sent_at = time.monotonic()
        kept = {sink.marker_at: LaneMarker(self._batch_id, self.rows.sum).encode()}
        producer.send_offsets_to_transaction(kept, sink.lane_id(self._lane))
        return sent_at

    def _agree(self, expected: RowSum) -> None:
        refusal = decide_repeated(expected, self.rows.sum)
        if refusal is not None:
            raise refusal.error(self._batch_id, self._lane)


def send_part(producer: Producer, part: Part) -> Delivery:
    """Hand rows to the producer. Raises RowRefused."""
    try:
        return producer.send_table(part.topic, part.rows, partition=part.partition)
    except (MisuseError, MessageTooLarge) as error:
        raise RowRefused(
            f"row {part.first_row} (or one soon after) for topic {part.topic!r}: {error}"
        ) from error


def finish(sink: Sink, batch_id: int, reports: Iterable[LaneReport]) -> None:
    """Finish a batch on the driver, when every task has succeeded. May be repeated. Raises SinkError."""
    known = list(reports)
    try:
        with Admin(sink.settings.admin) as admin:
            if sink.is_named:
                _finish(sink, admin, batch_id, known)
            else:
                forget_markers(sink, admin, [each.lane for each in known if each.sum.rows])
    except OncelogError as error:
        kind = type(error) if isinstance(error, SinkError) else SinkError
        raise kind(failure_text(error, f"batch {batch_id}", sink.settings, None)) from error


def _finish(sink: Sink, admin: Admin, batch_id: int, reports: Sequence[LaneReport]) -> None:
    total = RowSum()
    for report in reports:
        total = total.plus(*report.sum)
    prepared = [report.prepared for report in reports if report.prepared is not None]
    try:
        before = sink.finished(admin)
        beyond = _fence_beyond(sink, admin, reports, before)
        decided = decide_finish(batch_id, [report.lane for report in reports], before, beyond, total)
        if isinstance(decided, Refuse):
            raise decided.error(batch_id)
        if decided == before and before.sum is not None:
            _end(sink, prepared, is_commit=False)  # the batch is whole without them
            return
    except BaseException:
        with suppress(OncelogError):
            _end(sink, prepared, is_commit=False)
        raise
    _end(sink, prepared, is_commit=True)
    sink.keep(admin, sink.finished_id, decided.encode())


def _fence_beyond(
    sink: Sink, admin: Admin, reports: Sequence[LaneReport], finished: Finished | None
) -> dict[int, LaneMarker | None]:
    """Of a repeat: end what lanes above these may still write, and return their markers."""
    plan = next((report.plan for report in reports if report.plan is not None), None)
    if plan is None:
        return {}
    refusal = decide_still_mine(plan, sink.plan(admin))
    if refusal is not None:
        raise refusal.error(plan.batch_id)
    markers = {}
    for lane in sink.lanes(admin, finished):
        if lane >= len(reports):
            with Producer({**sink.settings.producer, "transactional.id": sink.lane_id(lane)}) as producer:
                producer.init_transactions()
            markers[lane] = sink.lane_marker(admin, lane, is_fenced=True)
    if finished is None or finished.sum is None:
        for lane in sink.lanes_in_0_4_1(admin):
            if lane >= len(reports) and markers.get(lane) is None:
                markers[lane] = sink.marker_in_0_4_1(admin, sink.lane_in_0_4_1(lane))
    return markers


def _end(sink: Sink, prepared: Iterable[TransactionShare], *, is_commit: bool) -> None:
    """End the transactions that tasks prepared: all of them, then raise the first failure."""
    failures = []
    for share in prepared:
        try:
            with Producer({**sink.settings.producer, "transactional.id": share.transactional_id}) as producer:
                producer.take_over_transaction(share)
                (producer.commit_transaction if is_commit else producer.abort_transaction)()
        except OncelogError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def abandon(sink: Sink, reports: Iterable[LaneReport]) -> None:
    """Abort on the driver what tasks prepared for a batch of which another task failed."""
    known = list(reports)
    with suppress(OncelogError):  # what is left is aborted by the next run, or by its timeout
        _end(sink, [each.prepared for each in known if each.prepared is not None], is_commit=False)
    if not sink.is_named:
        with suppress(OncelogError), Admin(sink.settings.admin) as admin:
            forget_markers(sink, admin, [each.lane for each in known if each.sum.rows])
