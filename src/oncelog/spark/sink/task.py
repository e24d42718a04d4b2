"""Write the parts of a batch in transactions, in Spark's tasks, and finish the batch on the driver.

Normally a task commits its own transaction. In a repeat (a batch that another run began), the task only
prepares its transaction: rows and `TaskMarker` stay in an open transaction. The task's report contains the
producer id and epoch, so that the driver can end the transaction. A task also leaves the commit to the driver
if it cannot see whether it got all of its rows (`oncelog.spark.task_input`).

Once all tasks have succeeded, every part that was committed before is known to have the same rows. The driver
then commits the prepared transactions. Until then no new row is visible, so a row that has moved to another
task is not doubled.

A task calls `init_transactions` and then reads the `PlanNote` (which run writes the batch) again. So if two
runs write the same batch, a task of the later run either finds the `TaskMarker` of the earlier run's task or
fences that task. The decisions are in spark/sink/decisions.py.
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
from oncelog.rules.transactions.client_session import FENCED_ERRORS
from oncelog.spark.sink.batch_plan import agree_on_plan
from oncelog.spark.sink.decisions import (
    AlreadyCommitted,
    BatchCommit,
    Compare,
    PlanNote,
    Reason,
    Refuse,
    RowRefused,
    RowSum,
    SinkError,
    TaskMarker,
    Write,
    decide_finish,
    decide_repeated,
    decide_still_mine,
    decide_task,
)
from oncelog.spark.sink.error_hints import explain_error
from oncelog.spark.sink.kept_clients import KeptClients, TaskClients
from oncelog.spark.sink.sink_rows import Part, TaskRows
from oncelog.spark.sink.state import Sink, forget_markers
from oncelog.spark.sink.topic_ids import check_topics
from oncelog.types import TransactionShare

__all__ = ["Sink", "TaskReport", "abandon", "finish", "send_part", "write_task"]


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The result of one task.

    If `already_committed`, an earlier attempt committed the rows, and this attempt wrote nothing.
    `size_bytes` counts keys and values. `commit_seconds` is the time from sending the last row to the
    response to the commit, or to the end of the preparation. `plan` is set only in a repeat. `prepared` is
    the transaction that the driver has to end. `topic_ids` has the topics of the prepared transaction, with
    their ids before the task sent the first rows.
    """

    task: int
    sum: RowSum
    already_committed: bool
    size_bytes: int = 0
    commit_seconds: float = 0.0
    plan: PlanNote | None = None
    prepared: TransactionShare | None = None
    topic_ids: tuple[tuple[str, str | None], ...] = ()


def write_task(
    sink: Sink,
    batch_id: int,
    task: int,
    batches: Iterable[pa.RecordBatch],
    kept: KeptClients,
    *,
    commits: bool = True,
) -> TaskReport:
    """Write the rows of one task once, in one transaction. Raises SinkError.

    Without `commits`, the task only prepares the transaction, and the driver commits it.
    """
    attempt = _SinkTask(sink, batch_id, task, commits=commits)
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    try:
        with kept.borrow(sink.settings, (sink.group, sink.run_id, batch_id)) as clients:
            return attempt.write(clients, filled if first is None else chain((first,), filled), first is None)
    except OncelogError as error:
        kind = type(error) if isinstance(error, SinkError) else SinkError
        raise kind(
            explain_error(error, f"task {task} of batch {batch_id}", sink.settings, attempt.rows.largest)
        ) from error


class _SinkTask:
    """One attempt to write a task's part of a batch."""

    def __init__(self, sink: Sink, batch_id: int, task: int, *, commits: bool) -> None:
        self._sink, self._batch_id, self._task, self._commits = sink, batch_id, task, commits
        self.rows = TaskRows(sink.settings.topic, sink.settings.max_row_bytes)
        self._topic_ids: dict[str, str | None] = {}
        """The ids of topics before the first rows were sent to them; None on a cluster without topic ids."""
        if sink.marker_topic_id is not None:
            # The id of the marker topic must not change: the note that a write has ended is deleted with that
            # topic. A late copy of a task would then write its rows again. Guard:
            # test_a_late_task_of_an_ended_write_finds_its_topic_replaced.
            self._topic_ids[sink.settings.marker_topic] = sink.marker_topic_id

    def write(self, clients: TaskClients, batches: Iterator[pa.RecordBatch], is_empty: bool) -> TaskReport:
        """Write the rows, or compare them with the committed ones, as spark/sink/decisions.py decides. In a
        repeat, and without `commits`, only prepare the transaction. `is_empty` is True if `batches` has no
        rows. Raises SinkError.
        """
        admin, sink, plan = clients.admin, self._sink, PlanNote(self._batch_id, self._sink.run_id)
        finished: BatchCommit | None = None
        if sink.is_named:
            finished = sink.finished(admin)
            match self._verdict(None, finished):
                case AlreadyCommitted():
                    return self._count(batches, already_committed=not is_empty)
                case Refuse(Reason.BATCH_ID_WENT_BACK | Reason.OTHER_TOPIC) as refused:
                    # Raise before `init_transactions`: a zombie of an older batch must not fence the task of
                    # the current batch.
                    raise refused.error(self._batch_id, self._task)
                case Refuse(Reason.UNKNOWN) as refused if not is_empty:
                    raise refused.error(self._batch_id, self._task)
            plan = agree_on_plan(sink, clients, self._batch_id, self._task)
        if is_empty and not plan.is_repeat:
            return self._without_rows(admin, plan)
        producer = clients.producer(sink.task_id(self._task))
        # This sends InitProducerId. After it, no earlier attempt can write, and no transaction of an earlier
        # attempt is open.
        producer.init_transactions()
        if sink.is_named:
            refusal = decide_still_mine(plan, sink.plan(admin))
            if refusal is not None:
                raise refusal.error(self._batch_id, self._task)
        marker = self._marker(admin, finished)
        if is_empty:
            return self._without_rows(admin, plan, marker)
        match self._verdict(marker, finished):
            case Refuse() as refused:
                raise refused.error(self._batch_id, self._task)
            case Compare(expected):
                report = self._count(batches, already_committed=True, plan=plan)
                self._agree(expected)
                return report
            case Write() if plan.is_repeat or not self._commits:
                return self._prepare(clients, producer, batches, plan if plan.is_repeat else None)
            case Write():
                return self._commit(clients, producer, batches)
            case AlreadyCommitted():
                raise AssertionError("handled above")

    def _verdict(
        self, marker: TaskMarker | None, finished: BatchCommit | None
    ) -> Write | Compare | AlreadyCommitted | Refuse:
        first = self._sink.settings.first_batch_id
        topic = self._sink.noted_topic
        return decide_task(self._batch_id, self._task, marker, finished, first_batch_id=first, topic=topic)

    def _marker(self, admin: Admin, finished: BatchCommit | None) -> TaskMarker | None:
        sink = self._sink
        found = sink.task_marker(admin, self._task, is_fenced=True)
        if not sink.is_named:
            # Read the note after the marker, because `forget_markers` stores the note that the write has
            # ended before it deletes markers.
            if found is None and sink.has_ended(admin):
                raise Refuse(Reason.ENDED).error(self._batch_id, self._task)
            return found
        if found is not None or (finished is not None and finished.sum is not None):
            return found
        name = sink.task_in_0_4_1(self._task)
        if sink.is_transactional_id(admin, name):
            with Producer({**sink.settings.producer, "transactional.id": name}) as producer:
                producer.init_transactions()
        return sink.marker_in_0_4_1(admin, name)

    def _without_rows(self, admin: Admin, plan: PlanNote, marker: TaskMarker | None = None) -> TaskReport:
        """Return a report without rows. It needs no transaction.

        Raises SinkError if the task had committed rows of this batch.
        """
        marker = marker or self._sink.task_marker(admin, self._task, is_fenced=False)
        if marker is not None and marker.batch_id == self._batch_id:
            self._agree(marker.sum)
        return TaskReport(
            self._task, RowSum(), already_committed=False, plan=plan if plan.is_repeat else None
        )

    def _count(
        self, batches: Iterator[pa.RecordBatch], *, already_committed: bool, plan: PlanNote | None = None
    ) -> TaskReport:
        for batch in batches:
            self.rows.take(batch)
        repeated = plan if plan is not None and plan.is_repeat else None
        return TaskReport(self._task, self.rows.sum, already_committed, self.rows.size_bytes, plan=repeated)

    def _commit(
        self, clients: TaskClients, producer: Producer, batches: Iterator[pa.RecordBatch]
    ) -> TaskReport:
        with producer.transaction():
            sent_at = self._send(clients, producer, batches)
        seconds = time.monotonic() - sent_at
        return TaskReport(self._task, self.rows.sum, False, self.rows.size_bytes, seconds)

    def _prepare(
        self,
        clients: TaskClients,
        producer: Producer,
        batches: Iterator[pa.RecordBatch],
        plan: PlanNote | None,
    ) -> TaskReport:
        producer.begin_transaction()
        try:
            sent_at = self._send(clients, producer, batches)
            prepared = producer.hand_over_transaction()
        except BaseException:
            # If the abort fails too, report only the first error.
            with suppress(OncelogError):
                producer.abort_transaction()
            raise
        seconds, topic_ids_before = time.monotonic() - sent_at, tuple(self._topic_ids.items())
        return TaskReport(
            self._task, self.rows.sum, False, self.rows.size_bytes, seconds, plan, prepared, topic_ids_before
        )

    def _send(self, clients: TaskClients, producer: Producer, batches: Iterator[pa.RecordBatch]) -> float:
        """Send rows and marker. Return the monotonic time in seconds at which the last row was sent.

        Raises SinkError if a topic was deleted and created again while the rows were sent.
        """
        sink, before = self._sink, self._topic_ids
        for batch in batches:
            for part in self.rows.parts(self.rows.take(batch)):
                if part.topic not in before:
                    before[part.topic] = clients.topic_id(part.topic)
                send_part(producer, part)
        sent_at = time.monotonic()
        kept = {sink.marker_at: TaskMarker(self._batch_id, self.rows.sum).encode()}
        producer.send_offsets_to_transaction(kept, sink.task_id(self._task))
        # Check that no topic was created again. Otherwise the new topic might have only some of the rows, and
        # the marker would say that all rows are stored. Guard:
        # test_a_topic_created_again_while_a_task_writes_gets_no_rows.
        producer.flush()
        check_topics(clients.admin, before.items(), self._batch_id, self._task)
        return sent_at

    def _agree(self, expected: RowSum) -> None:
        refusal = decide_repeated(expected, self.rows.sum)
        if refusal is not None:
            raise refusal.error(self._batch_id, self._task)


def send_part(producer: Producer, part: Part) -> Delivery:
    """Send rows of one topic. Raises RowRefused if a row can never be written."""
    try:
        return producer.send_table(part.topic, part.rows, partition=part.partition)
    except (MisuseError, MessageTooLarge) as error:
        raise RowRefused(
            f"row {part.first_row} (or one soon after) for topic {part.topic!r}: {error}"
        ) from error


def finish(sink: Sink, batch_id: int, reports: Iterable[TaskReport], kept: KeptClients) -> None:
    """Finish a batch on the driver once every task has succeeded. Raises SinkError.

    Calling it twice for one batch is allowed.
    """
    reports = list(reports)
    try:
        with kept.borrow(sink.settings) as clients:
            if sink.is_named:
                _finish(sink, clients.admin, batch_id, reports)
            else:
                _commit_prepared(sink, clients.admin, batch_id, reports)
                forget_markers(sink, clients.admin, [report.task for report in reports if report.sum.rows])
    except OncelogError as error:
        kind = type(error) if isinstance(error, SinkError) else SinkError
        raise kind(explain_error(error, f"batch {batch_id}", sink.settings, None)) from error


def _finish(sink: Sink, admin: Admin, batch_id: int, reports: Sequence[TaskReport]) -> None:
    total = RowSum()
    for report in reports:
        total = total.plus(*report.sum)
    prepared = _prepared(reports)
    try:
        before = sink.finished(admin)
        beyond = _fence_beyond(sink, admin, reports, before)
        decided = decide_finish(batch_id, [report.task for report in reports], before, beyond, total)
        if isinstance(decided, Refuse):
            raise decided.error(batch_id)
        if decided == before and before.sum is not None:
            # Abort, because the committed tasks already wrote all rows of the batch, and the prepared
            # transactions would double them.
            _end(sink, prepared, is_commit=False)
            return
    except BaseException:
        with suppress(OncelogError):
            _end(sink, prepared, is_commit=False)
        raise
    _commit_prepared(sink, admin, batch_id, reports)
    sink.keep(admin, sink.finished_id, decided._replace(topic=sink.noted_topic).encode())


def _fence_beyond(
    sink: Sink, admin: Admin, reports: Sequence[TaskReport], finished: BatchCommit | None
) -> dict[int, TaskMarker | None]:
    """In a repeat, fence the tasks of earlier runs whose task numbers are above those in `reports`.

    Return their markers by task number.
    """
    plan = next((report.plan for report in reports if report.plan is not None), None)
    if plan is None:
        return {}
    refusal = decide_still_mine(plan, sink.plan(admin))
    if refusal is not None:
        raise refusal.error(plan.batch_id)
    markers = {}
    for task in sink.tasks(admin, finished):
        if task >= len(reports):
            with Producer({**sink.settings.producer, "transactional.id": sink.task_id(task)}) as producer:
                producer.init_transactions()
            markers[task] = sink.task_marker(admin, task, is_fenced=True)
    if finished is None or finished.sum is None:
        for task in sink.tasks_in_0_4_1(admin):
            if task >= len(reports) and markers.get(task) is None:
                markers[task] = sink.marker_in_0_4_1(admin, sink.task_in_0_4_1(task))
    return markers


def _prepared(reports: Iterable[TaskReport]) -> list[TransactionShare]:
    return [report.prepared for report in reports if report.prepared is not None]


def _commit_prepared(sink: Sink, admin: Admin, batch_id: int, reports: Sequence[TaskReport]) -> None:
    """Commit all prepared transactions, or abort them if one of their topics was created again."""
    prepared = _prepared(reports)
    before = {topic for report in reports if report.prepared is not None for topic in report.topic_ids}
    try:
        # Compare the ids again: the task has compared them when it prepared its transaction, which may be
        # long ago. Guard: test_a_topic_created_again_before_the_driver_commits_gets_no_rows.
        check_topics(admin, before, batch_id)
    except BaseException:
        with suppress(OncelogError):
            _end(sink, prepared, is_commit=False)
        raise
    _end(sink, prepared, is_commit=True)


def _end(sink: Sink, prepared: Iterable[TransactionShare], *, is_commit: bool) -> None:
    """Commit or abort all prepared transactions. Then raise the first failure, if there was one.

    An abort does not fail if the transaction has ended, or if another attempt of the task has aborted it.
    """
    failures: list[OncelogError] = []
    for share in prepared:
        try:
            with Producer({**sink.settings.producer, "transactional.id": share.transactional_id}) as producer:
                producer.take_over_transaction(share)
                (producer.commit_transaction if is_commit else producer.abort_transaction)()
        except OncelogError as error:
            # `finish` may be called twice. Guard: test_a_repeated_batch_may_be_finished_twice.
            if is_commit or not isinstance(error, FENCED_ERRORS):
                failures.append(error)
    if failures:
        raise failures[0]


def abandon(sink: Sink, reports: Iterable[TaskReport]) -> None:
    """Abort the prepared transactions of a batch. The driver calls this after another task has failed."""
    reports = list(reports)
    # Ignore a failure: the next run or the transaction timeout then aborts the transaction.
    with suppress(OncelogError):
        _end(sink, _prepared(reports), is_commit=False)
    if not sink.is_named:
        with suppress(OncelogError), Admin(sink.settings.admin) as admin:
            forget_markers(sink, admin, [report.task for report in reports if report.sum.rows])
