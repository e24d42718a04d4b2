"""Decide what the exactly-once sink does with a task's part of a batch: write, compare or refuse it.

Each Spark task writes its part of a batch in one Kafka transaction, together with a task marker. This is not
a transaction marker, but a committed offset with the batch id, the number of rows and the sum of their
hashes. A retried task, a zombie and a restarted driver read the marker of the last batch that the task
committed.

Before any task writes, one of the tasks stores which run of the driver writes the batch (`PlanNote`). This
note has its own transactional id, which fences all other writers of the note, so reading and replacing it is
one step. A batch that another run began is a repeat. Tasks of a repeat only prepare their transactions, and
the driver commits them (see spark/sink/task.py). So no row of a repeat is visible unless every committed task
had the same rows.

Once all tasks have committed, the driver notes the batch with the sum of all rows (`BatchCommit`). In the
table below, the first column is the batch that the driver noted last. The second column is the batch of the
task's marker:

    noted                     task's marker      verdict
    this batch, other topic   any                Refuse OTHER_TOPIC        (a batch write with a writeId)
    this batch, with its sum  any                AlreadyCommitted (the driver compares the sums)
    any                       of a later batch   Refuse BATCH_ID_WENT_BACK
    any                       of this batch      Compare
    a later batch             older or none      Refuse BATCH_ID_WENT_BACK
    this batch, fewer tasks   older or none      Refuse TASK_COUNT_CHANGED (noted by 0.4.1, without a sum)
    this batch                older or none      Refuse LOST               (noted by 0.4.1, without a sum)
    an earlier batch          older or none      Write
    nothing                   older              Refuse LOST
    nothing, first batch      none               Write
    nothing, a later batch    none               Refuse UNKNOWN

Source: behaviours P2, P4 and P6 (docs/behaviours.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from oncelog.errors import OncelogError
from oncelog.types import OffsetAndMetadata

_FORMAT = 1
NO_PLAN = "none"
"""`TaskMarker.planned` of a batch that was committed outside of a streaming query."""
_MAX_EARLIER_RUNS = 100
"""Maximum length of `PlanNote.earlier`. The run ids take 16 characters each in JSON, and the whole note must
fit into offset.metadata.max.bytes (4096).
"""


class RowSum(NamedTuple):
    """The number of rows, and the sum of their hashes modulo 2**64. The order of the rows does not matter."""

    rows: int = 0
    hash: int = 0

    def plus(self, rows: int, hashes: int) -> RowSum:
        """Return the sum after adding `rows` rows. `hashes` is the sum of the hashes of these rows."""
        return RowSum(self.rows + rows, (self.hash + hashes) % (1 << 64))


class TaskMarker(NamedTuple):
    """The last batch that a task committed, stored in the same transaction. Not a transaction marker.

    `planned` is a digest of the checkpoint's entry for the batch (`write_atomic`), or "" if it is unknown.
    """

    batch_id: int
    sum: RowSum
    planned: str = ""

    def encode(self) -> OffsetAndMetadata:
        """Return the marker as an offset and its metadata. The batch id is the offset."""
        note = {"oncelog": _FORMAT, "rows": self.sum.rows, "hash": f"{self.sum.hash:016x}"}
        if self.planned:
            note["planned"] = self.planned
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> TaskMarker | None:
        """Return the stored marker, or None if `kept` is None.

        Raises SinkError if another application wrote the group's offset.
        """
        if kept is None:
            return None
        note = _note(group, kept, ("rows", "hash"))
        return cls(kept.offset, RowSum(note["rows"], int(note["hash"], 16)), note.get("planned", ""))


class BatchCommit(NamedTuple):
    """The last batch that all tasks committed, as noted by the driver.

    `lanes` is the number of tasks; the stored note uses that name. `sum` covers all rows, and is None if
    version 0.4.1 or older noted the batch. `planned` is the digest described at TaskMarker. `topic` is the
    topic of a batch write with a writeId, or "" if it is unknown or in the column topic.
    """

    batch_id: int
    lanes: int
    sum: RowSum | None = None
    planned: str = ""
    topic: str = ""

    def encode(self) -> OffsetAndMetadata:
        """Return the note as an offset and its metadata. The batch id is the offset."""
        note: dict[str, Any] = {"oncelog": _FORMAT, "lanes": self.lanes}
        if self.sum is not None:
            note |= {"rows": self.sum.rows, "hash": f"{self.sum.hash:016x}"}
        if self.planned:
            note["planned"] = self.planned
        if self.topic:
            note["topic"] = self.topic
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> BatchCommit | None:
        """Return the stored note, or None if `kept` is None.

        Raises SinkError if another application wrote the group's offset.
        """
        if kept is None:
            return None
        note = _note(group, kept, ("lanes",))
        total = RowSum(note["rows"], int(note["hash"], 16)) if "hash" in note else None
        return cls(kept.offset, note["lanes"], total, note.get("planned", ""), note.get("topic", ""))


class PlanNote(NamedTuple):
    """The run of the driver that writes a batch.

    `earlier` lists the runs that began the batch before this one, newest last.
    """

    batch_id: int
    run_id: str
    earlier: tuple[str, ...] = ()

    @property
    def is_repeat(self) -> bool:
        """Return True if another run may have committed a part of the batch."""
        return bool(self.earlier)

    def encode(self) -> OffsetAndMetadata:
        """Return the note as an offset and its metadata. The batch id is the offset."""
        note = {"oncelog": _FORMAT, "run": self.run_id, "earlier": list(self.earlier)}
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> PlanNote | None:
        """Return the stored note, or None if `kept` is None.

        Raises SinkError if another application wrote the group's offset.
        """
        if kept is None:
            return None
        note = _note(group, kept, ("run", "earlier"))
        return cls(kept.offset, note["run"], tuple(note["earlier"]))


class BatchBegun(NamedTuple):
    """The newest batch that was begun, the run that began it, and the time of the beginning (ms since the
    epoch).

    It is stored for years, so that the batch is known even after the task markers have expired. `topic` is
    described at BatchCommit.
    """

    batch_id: int
    run_id: str
    begun_ms: int
    topic: str = ""

    def encode(self) -> OffsetAndMetadata:
        """Return the note as an offset and its metadata. The batch id is the offset."""
        note = {"oncelog": _FORMAT, "run": self.run_id, "begun_ms": self.begun_ms}
        if self.topic:
            note["topic"] = self.topic
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> BatchBegun | None:
        """Return the stored note, or None if `kept` is None.

        Raises SinkError if another application wrote the group's offset.
        """
        if kept is None:
            return None
        note = _note(group, kept, ("run", "begun_ms"))
        return cls(kept.offset, note["run"], note["begun_ms"], note.get("topic", ""))


def _note(group: str, kept: OffsetAndMetadata, names: Sequence[str]) -> Mapping[str, Any]:
    try:
        note = json.loads(kept.metadata)
        if note["oncelog"] == _FORMAT and all(name in note for name in names):
            found: Mapping[str, Any] = note
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise SinkError(
        f"consumer group {group!r} contains an offset that this sink did not write "
        f"({kept.metadata!r}): set the option transactionalIdPrefix to a name that only this "
        "sink uses"
    )


class Reason(Enum):
    """The reason why a batch cannot be written.

    The value is the text for the user, with the placeholders {batch}, {task} and {found}.
    """

    BATCH_ID_WENT_BACK = (
        "batch {batch} was requested, but {found} since then: the checkpoint was restored to "
        "an older state, or a second query uses a copy of it. Writing could double rows. "
        "Restore the newest checkpoint, or begin with a new one, whose rows are written as "
        "new rows"
    )
    OVERTAKEN = (
        "another run of this query or write has taken over batch {batch} ({found}), so this "
        "attempt must not write. A restart continues where the other run ended; if two runs "
        "are intended, stop one"
    )
    ENDED = (
        "the write has ended, and this attempt of a task began too late: another attempt "
        "wrote its rows, or the write failed and must be repeated as a whole. This attempt "
        "wrote nothing"
    )
    TASK_COUNT_CHANGED = (
        "batch {batch} was committed by {found}, but now has more tasks: the plan has "
        "changed. Restart with the earlier number of partitions "
        "(spark.sql.shuffle.partitions, minPartitions, repartition(n, key))"
    )
    LOST = (
        "batch {batch} was committed before, but the marker of task {task} is missing "
        "({found}): it expired (offsets.retention.minutes), was deleted, or the task had no "
        "rows then. Writing could double rows. Check if the topic contains the batch, and "
        "begin with a new checkpoint after the batch"
    )
    EXPIRED = (
        "batch {batch} was begun {found} ago and never finished, and the markers of its "
        "committed tasks may have expired (offsets.retention.minutes). Writing could double "
        "rows. Read the topic: if it contains nothing of the batch, set the option "
        "firstBatchId={batch} (for a batch write: another writeId); otherwise begin with a "
        "new checkpoint after the batch"
    )
    UNKNOWN = (
        "this sink has no notes of the batches before {batch}: the notes were deleted (also "
        "with the marker topic), expired (version 0.4.1 or older), or the query wrote "
        "elsewhere before. If this sink never wrote batch {batch}, set the option "
        "firstBatchId={batch}; otherwise begin with a new checkpoint"
    )
    NEW_NAME = (
        "there are no notes of the batches before {batch} under the name {found}: the name "
        "is new, or the notes were deleted (also with the marker topic). If the name is new, "
        "set firstBatchId={batch} in the options of this call. A name that write_atomic gets "
        "in every micro-batch from batch 0 on, even with an empty DataFrame, needs no option"
    )
    CHANGED = (
        "batch {batch} was committed with {found}: a repeated batch must have the same rows in the same "
        "partitions. If the number of partitions changed, restart with the earlier one. Make the plan "
        "deterministic (no rand(), now() or unordered limits; repartition(n, key) instead of repartition(n); "
        "a source that can be read again), or use oncelog.spark.write_atomic, which needs none of that"
    )
    MORE_TASKS_COMMITTED = (
        "an earlier run of batch {batch} had more partitions and committed {found} as well, so this run must "
        "not finish it. Restart with the earlier number of partitions (spark.sql.shuffle.partitions, "
        "minPartitions, repartition(n, key))"
    )
    OTHER_ROWS = (
        "batch {batch} is already committed for this name and topic, with {found}: give each write of one "
        "micro-batch its own name, as in write_atomic(df, batch_id, options, name='rejected'). Nothing was "
        "written"
    )
    OTHER_TOPIC = (
        "this writeId is that of a write to topic {found}: give each write its own writeId. Nothing was "
        "written"
    )
    PLANNED_AGAIN = (
        "batch {batch} is already committed with {found}, and Spark has planned it a second time with other "
        "rows: the checkpoint was restored to an older state, or a second query runs on a copy of it. "
        "Nothing was written. Restore the newest checkpoint, or begin with a new one, whose rows are written "
        "as new"
    )
    TOPIC_REPLACED = (
        "topic {found} was deleted and created again while batch {batch} was written. Some rows of the "
        "transaction may be gone with the old topic, so none of them is committed. Restart the query, or "
        "repeat the write, to write all of them to the new topic"
    )
    WRITTEN_TWICE = (
        "write_atomic was called for batch {batch} a second time in this run with the name {found} and the "
        "same topic: give each write of one micro-batch its own name, as in write_atomic(df, batch_id, "
        "options, name='rejected'). Nothing was written by the second call"
    )


class SinkError(OncelogError):
    """The sink refused a batch or could not write it. The text names the reason and the remedy."""


class SinkRefused(SinkError):
    """A refusal of a batch that lasts until the user applies the remedy in the text."""


class RowRefused(SinkRefused):
    """A row that the sink can never write, for example because its topic is null."""


@dataclass(frozen=True, slots=True)
class Write:
    """The decision to write the part, because it was not written before."""


@dataclass(frozen=True, slots=True)
class Compare:
    """The decision to compare: the part was written before and must have the same rows.

    `planned` is the digest described at TaskMarker.
    """

    expected: RowSum
    planned: str = ""


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """The decision to write nothing, because the whole batch is committed.

    The driver compares the sum of the batch's rows.
    """


@dataclass(frozen=True, slots=True)
class Refuse:
    """The decision to fail: neither writing nor skipping is safe.

    `found` replaces the placeholder {found} in the reason's text.
    """

    reason: Reason
    found: str = ""

    def error(self, batch_id: int, task: int | None = None) -> SinkError:
        """Return the error to raise for this batch, and for this task if one is given."""
        # Two reasons give a SinkError that is not a SinkRefused, so that a supervisor tries again, because
        # the next start succeeds. OVERTAKEN: a zombie whose run was not noted yet has taken the batch from
        # the current run. TOPIC_REPLACED: a topic is not replaced at every start.
        is_passing = self.reason in (Reason.OVERTAKEN, Reason.TOPIC_REPLACED)
        kind = SinkError if is_passing else SinkRefused
        return kind(self.reason.value.format(batch=batch_id, task=task, found=self.found))


def decide_plan(batch_id: int, run_id: str, note: PlanNote | None) -> PlanNote | Refuse:
    """Return the note that names `run_id` as the writer of the batch, or a refusal.

    The result is `note` itself if it already names the run, or a new note, which the caller must store before
    it writes.
    """
    if note is None or note.batch_id < batch_id:
        return PlanNote(batch_id, run_id)
    if note.batch_id > batch_id:
        return Refuse(Reason.BATCH_ID_WENT_BACK, f"batch {note.batch_id} has been begun")
    if note.run_id == run_id:
        return note
    if run_id in note.earlier:
        return Refuse(Reason.OVERTAKEN, f"run {note.run_id}")
    return PlanNote(batch_id, run_id, (*note.earlier, note.run_id)[-_MAX_EARLIER_RUNS:])


def decide_still_mine(plan: PlanNote, now: PlanNote | None) -> Refuse | None:
    """Return a refusal if another run has taken over the batch since `plan` was stored, otherwise None."""
    if now == plan:
        return None
    return Refuse(Reason.OVERTAKEN, "its note is missing" if now is None else f"run {now.run_id}")


def decide_begun(
    batch_id: int,
    run_id: str,
    begun: BatchBegun | None,
    now_ms: int,
    retention_ms: int,
    *,
    topic: str = "",
) -> Refuse | None:
    """Return a refusal if a later batch was begun, if another run began this batch for another topic, or so
    long ago that its markers may have expired.

    Otherwise return None. `now_ms` is in ms since the epoch. `retention_ms` is how long the broker keeps
    offsets. `topic` is described at BatchCommit.
    """
    if begun is None or begun.batch_id < batch_id or begun.run_id == run_id:
        return None
    if begun.batch_id > batch_id:
        return Refuse(Reason.BATCH_ID_WENT_BACK, f"batch {begun.batch_id} has been begun")
    if _is_other(begun.topic, topic):
        return Refuse(Reason.OTHER_TOPIC, repr(begun.topic))
    age_ms = now_ms - begun.begun_ms
    # Refuse after nine tenths of the retention, because the clocks of drivers and brokers differ.
    if age_ms * 10 < retention_ms * 9:
        return None
    return Refuse(Reason.EXPIRED, f"{age_ms // 60_000} minutes")


def _is_other(noted: str, topic: str) -> bool:
    return bool(noted) and bool(topic) and noted != topic


def decide_task(
    batch_id: int,
    task: int,
    marker: TaskMarker | None,
    finished: BatchCommit | None,
    *,
    first_batch_id: int = 0,
    topic: str = "",
) -> Write | Compare | AlreadyCommitted | Refuse:
    """Decide what a task that has rows may do, by the table in the module docstring.

    `finished` is the batch that the driver noted. `first_batch_id` is the first batch that the sink writes.
    `topic` is described at BatchCommit.
    """
    if finished is not None and finished.batch_id == batch_id and _is_other(finished.topic, topic):
        # Two topics may share a marker topic, and the hash of rows does not cover the option topic. Guard:
        # test_a_write_id_of_another_topic_is_refused.
        return Refuse(Reason.OTHER_TOPIC, repr(finished.topic))
    if finished is not None and finished.batch_id == batch_id and finished.sum is not None:
        return AlreadyCommitted()
    if marker is not None and marker.batch_id >= batch_id:
        if marker.batch_id > batch_id:
            return Refuse(Reason.BATCH_ID_WENT_BACK, f"batch {marker.batch_id} has been committed")
        return Compare(marker.sum)
    if finished is None:
        if marker is not None:
            return Refuse(Reason.LOST, f"the task's is for batch {marker.batch_id}, the sink's note is gone")
        return Write() if batch_id <= first_batch_id else Refuse(Reason.UNKNOWN)
    if finished.batch_id > batch_id:
        return Refuse(Reason.BATCH_ID_WENT_BACK, f"batch {finished.batch_id} has been committed")
    if finished.batch_id < batch_id:
        return Write()
    if task >= finished.lanes:
        return Refuse(Reason.TASK_COUNT_CHANGED, f"{finished.lanes} tasks")
    return Refuse(Reason.LOST, "none" if marker is None else f"the last is for batch {marker.batch_id}")


def decide_atomic(
    batch_id: int, marker: TaskMarker | None, *, first_batch_id: int = 0, name: str | None = None
) -> Write | Compare | Refuse:
    """Decide what to do with a micro-batch that is written as one transaction. `marker` is the last committed
    batch.

    A missing marker does not prove that nothing was written, because markers expire. So a `name` that first
    appears in a batch after `first_batch_id` is refused until the user confirms it with the option
    firstBatchId. `name` is None if the sink uses the query's own id.
    """
    if marker is None:
        if batch_id <= first_batch_id:
            return Write()
        return Refuse(Reason.UNKNOWN) if name is None else Refuse(Reason.NEW_NAME, repr(name))
    if marker.batch_id > batch_id:
        return Refuse(Reason.BATCH_ID_WENT_BACK, f"batch {marker.batch_id} has been committed")
    return Compare(marker.sum, marker.planned) if marker.batch_id == batch_id else Write()


def is_plan_repeated(committed: str, now: str) -> bool:
    """Return True if a streaming query repeats the committed batch with the same plan.

    Both arguments are digests of the checkpoint's entry for the batch. Spark plans a batch once, and a
    repetition uses the same plan. A batch that was planned a second time has a different digest. Its plan may
    cover additional rows, which would be lost if the batch were skipped. If a digest is missing (""), the
    plans are assumed to be the same.
    """
    return not committed or not now or committed == now


def decide_same_content(expected: RowSum, now: RowSum, *, is_in_stream: bool = False) -> Refuse | None:
    """Return a refusal if a second write_atomic for the same batch has different rows, otherwise None.

    A stored hash of 0 is from version 0.4.1, which did not hash the rows. Then only the numbers of rows are
    compared.
    """
    if expected.rows == now.rows and expected.hash in (0, now.hash):
        return None
    reason = Reason.PLANNED_AGAIN if is_in_stream else Reason.OTHER_ROWS
    return Refuse(reason, f"{expected.rows} rows that are not the {now.rows} of this call")


class WriteLease(NamedTuple):
    """The stored lease of a task of `write_atomic`: the task has begun to write in this transaction (producer
    id and epoch).
    """

    batch_id: int
    producer_id: int
    producer_epoch: int
    cause: str = ""
    """The reason why the attempt failed; "" if the attempt did not fail or could not store it."""

    def encode(self) -> OffsetAndMetadata:
        """Return the lease as an offset and its metadata. The batch id is the offset."""
        note = {"oncelog": _FORMAT, "writer": [self.producer_id, self.producer_epoch], "cause": self.cause}
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> WriteLease | None:
        """Return the stored lease, or None if `kept` is None.

        Raises SinkError if another application wrote the group's offset.
        """
        if kept is None:
            return None
        note = _note(group, kept, ("writer", "cause"))
        producer_id, producer_epoch = note["writer"]
        return cls(kept.offset, producer_id, producer_epoch, note["cause"])

    def is_same_attempt(self, other: WriteLease | None) -> bool:
        """Return True if both leases are for the same transaction of the same batch."""
        return other is not None and self[:3] == other[:3]


def may_acquire_lease(mine: WriteLease, found: WriteLease | None) -> bool:
    """Return True if a task may write, because no attempt has acquired a lease for this transaction or a
    later one.
    """
    if found is None or found.batch_id < mine.batch_id:
        return True
    if found.batch_id > mine.batch_id:
        return False
    # Treat `mine` as newer if the producer ids differ: after the last epoch, the coordinator assigns another
    # producer id, and ids have no order.
    return found.producer_id != mine.producer_id or found.producer_epoch < mine.producer_epoch


def decide_same_topics(
    before: Iterable[tuple[str, str | None]], now: Mapping[str, str | None]
) -> Refuse | None:
    """Return a refusal if a topic was deleted and created again while a transaction wrote to it.

    `before` has (topic, id) from before the first rows, and `now` the ids after all rows were stored. Topic
    ids are never reused. So if no id has changed, no row is in an earlier topic with the same name. An id is
    None on a cluster without topic ids.
    """
    for topic, topic_id in before:
        if None not in (topic_id, now[topic]) and topic_id != now[topic]:
            return Refuse(Reason.TOPIC_REPLACED, repr(topic))
    return None


def decide_repeated(expected: RowSum, now: RowSum) -> Refuse | None:
    """Return a refusal if the rows of a repeated part differ from the committed ones, otherwise None."""
    if expected == now:
        return None
    if expected.rows != now.rows:
        return Refuse(Reason.CHANGED, f"{expected.rows} rows in this task, and now it has {now.rows}")
    return Refuse(Reason.CHANGED, f"{expected.rows} rows in this task, and now they are not the same")


def decide_finish(
    batch_id: int,
    tasks: Sequence[int],
    finished: BatchCommit | None,
    beyond: Mapping[int, TaskMarker | None],
    total: RowSum,
) -> BatchCommit | Refuse:
    """Return the note that the driver stores once every task has succeeded, or a refusal.

    `tasks` are the numbers of the tasks that reported, and `total` is the sum of their rows. In a repeat,
    `beyond` has the markers of earlier runs' tasks whose numbers are above those in `tasks`. Raises SinkError
    if Spark did not report each task exactly once.
    """
    if sorted(tasks) != list(range(len(tasks))):
        raise SinkError(
            f"batch {batch_id}: Spark reported tasks {sorted(tasks)}, expected one report of each"
        )
    if finished is not None and finished.batch_id > batch_id:
        return Refuse(Reason.BATCH_ID_WENT_BACK, f"batch {finished.batch_id} has been committed")
    if finished is not None and finished.batch_id == batch_id and finished.sum is not None:
        if finished.sum == total:
            return finished
        return Refuse(
            Reason.CHANGED, f"{finished.sum.rows} rows in all, and now {_difference(finished.sum, total)}"
        )
    also = [task for task, marker in beyond.items() if marker is not None and marker.batch_id == batch_id]
    if also:
        return Refuse(Reason.MORE_TASKS_COMMITTED, f"task {', '.join(map(str, sorted(also)))}")
    return BatchCommit(batch_id, len(tasks), total)


def _difference(expected: RowSum, now: RowSum) -> str:
    return "they are not the same" if expected.rows == now.rows else f"there are {now.rows}"
