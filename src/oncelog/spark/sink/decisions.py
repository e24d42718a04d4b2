"""The exactly-once sink's decisions: may this task write its part of a batch, or was it written before?

A lane is the part of a batch that one task writes, in one transaction together with the lane's marker. A
task that is tried again, a zombie and a restarted driver find the marker of the last committed batch.

Before any task of a batch writes, one of them notes which run writes it (`PlanNote`): a transactional id of
its own fences all other writers of the note, so it is read and replaced as one step. A batch that another
run began is a *repeat*. Tasks of a repeat prepare their transactions and the driver ends them (see
spark/sink/task.py), so none of its rows is visible unless every committed lane had the same rows.

The driver notes each batch once all its lanes are committed, with the sum of all rows (`Finished`):

    noted                     lane's marker      verdict
    this batch, with its sum  any                Already (the driver compares the sums)
    any                       of a later batch   Refuse REWOUND
    any                       of this batch      Compare
    a later batch             older or none      Refuse REWOUND
    this batch, fewer lanes   older or none      Refuse LANES   (noted by 0.4.1, which kept no sum)
    this batch                older or none      Refuse LOST    (the same)
    an earlier batch          older or none      Write
    nothing                   older              Refuse LOST
    nothing, first batch      none               Write
    nothing, a later batch    none               Refuse UNKNOWN

Source: rows P2, P4, P6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from oncelog.errors import OncelogError
from oncelog.types import OffsetAndMetadata

_FORMAT = 1
_MAX_EARLIER_RUNS = 100
"""With 13 characters each they fit into offset.metadata.max.bytes (4096)."""


class RowSum(NamedTuple):
    """What a lane wrote: how many rows, and the sum of their hashes modulo 2**64, whatever their order."""

    rows: int = 0
    hash: int = 0

    def plus(self, rows: int, hashes: int) -> RowSum:
        """With more rows."""
        return RowSum(self.rows + rows, (self.hash + hashes) % (1 << 64))


class LaneMarker(NamedTuple):
    """The last batch a lane committed.

    `planned`: digest of what the checkpoint says of the batch (`write_atomic`); "" where it is not known.
    """

    batch_id: int
    sum: RowSum
    planned: str = ""

    def encode(self) -> OffsetAndMetadata:
        """As the lane's consumer group keeps it: the batch id is the offset."""
        note = {"oncelog": _FORMAT, "rows": self.sum.rows, "hash": f"{self.sum.hash:016x}"}
        if self.planned:
            note["planned"] = self.planned
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> LaneMarker | None:
        """None for no marker. Raises SinkError when the group holds something else."""
        if kept is None:
            return None
        note = _note(group, kept, ("rows", "hash"))
        return cls(kept.offset, RowSum(note["rows"], int(note["hash"], 16)), note.get("planned", ""))


class Finished(NamedTuple):
    """The last batch of which the driver saw all lanes committed, and how many they were.

    `sum`: of all its rows; None if version 0.4.1 or older noted it. `planned`: as in LaneMarker.
    """

    batch_id: int
    lanes: int
    sum: RowSum | None = None
    planned: str = ""

    def encode(self) -> OffsetAndMetadata:
        """As the sink's own consumer group keeps it."""
        note: dict[str, Any] = {"oncelog": _FORMAT, "lanes": self.lanes}
        if self.sum is not None:
            note |= {"rows": self.sum.rows, "hash": f"{self.sum.hash:016x}"}
        if self.planned:
            note["planned"] = self.planned
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> Finished | None:
        """None for nothing noted. Raises SinkError when the group holds something else."""
        if kept is None:
            return None
        note = _note(group, kept, ("lanes",))
        total = RowSum(note["rows"], int(note["hash"], 16)) if "hash" in note else None
        return cls(kept.offset, note["lanes"], total, note.get("planned", ""))


class PlanNote(NamedTuple):
    """The run that writes a batch. `earlier`: runs that began to write it before, the newest last."""

    batch_id: int
    run_id: str
    earlier: tuple[str, ...] = ()

    @property
    def is_repeat(self) -> bool:
        """True when another run may have committed a part of the batch."""
        return bool(self.earlier)

    def encode(self) -> OffsetAndMetadata:
        """As the plan's consumer group keeps it."""
        note = {"oncelog": _FORMAT, "run": self.run_id, "earlier": list(self.earlier)}
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> PlanNote | None:
        """None for none. Raises SinkError when the group holds something else."""
        if kept is None:
            return None
        note = _note(group, kept, ("run", "earlier"))
        return cls(kept.offset, note["run"], tuple(note["earlier"]))


class BatchBegun(NamedTuple):
    """The newest batch that a run began to write. Kept for years, so that no batch is forgotten silently."""

    batch_id: int
    run_id: str
    begun_ms: int

    def encode(self) -> OffsetAndMetadata:
        """As a consumer group keeps it."""
        note = {"oncelog": _FORMAT, "run": self.run_id, "begun_ms": self.begun_ms}
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> BatchBegun | None:
        """None for none. Raises SinkError when the group holds something else."""
        if kept is None:
            return None
        note = _note(group, kept, ("run", "begun_ms"))
        return cls(kept.offset, note["run"], note["begun_ms"])


def _note(group: str, kept: OffsetAndMetadata, names: Sequence[str]) -> Mapping[str, Any]:
    try:
        note = json.loads(kept.metadata)
        if note["oncelog"] == _FORMAT and all(name in note for name in names):
            found: Mapping[str, Any] = note
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise SinkError(
        f"consumer group {group!r} holds an offset that this sink did not write ({kept.metadata!r}): give "
        "the sink names of its own with the option transactionalIdPrefix"
    )


class Reason(Enum):
    """Why a batch cannot be written; the value is what to tell, with {batch}, {lane} and {found}."""

    REWOUND = (
        "batch {batch} was asked for, and {found} since: the checkpoint was taken back to an older state, or "
        "a second query runs on a copy of it. Writing could double rows. Restore the newest checkpoint; or "
        "begin with a new one, whose rows are written as new ones"
    )
    OVERTAKEN = (
        "batch {batch} is written by another run of this query or write since ({found}): this attempt must "
        "not write any more. A restart goes on where the other ended; if two run on purpose, stop one"
    )
    ENDED = (
        "the write has ended, and this attempt of a task began too late: its rows are written by another "
        "attempt, or the write has failed and must be repeated whole. Nothing was written by this one"
    )
    LANES = (
        "batch {batch} was committed as {found}, and now it has more: the plan has changed since. Restart "
        "with the number of partitions it had (spark.sql.shuffle.partitions, minPartitions, repartition(n, "
        "key))"
    )
    LOST = (
        "batch {batch} was committed before, but the marker of lane {lane} is not there ({found}): it "
        "expired (offsets.retention.minutes), was deleted, or the lane had no rows then. Writing could "
        "double rows. Read the topic to see whether the batch is there, and begin with a new checkpoint "
        "behind it"
    )
    EXPIRED = (
        "batch {batch} was begun {found} ago and never finished, and what it committed is forgotten by now "
        "(offsets.retention.minutes). Writing could double rows. Read the topic: if nothing of the batch is "
        "there, set the option firstBatchId={batch} (of a batch write: another writeId); else begin with a "
        "new checkpoint behind it"
    )
    UNKNOWN = (
        "this sink knows nothing of the batches before {batch}: what it noted was deleted (also with its "
        "marker topic), version 0.4.1 or older noted it and it expired, or the query wrote elsewhere before. "
        "If batch {batch} was never written by this sink, set the option firstBatchId={batch}; else begin "
        "with a new checkpoint"
    )
    NEW_NAME = (
        "nothing is known of the batches before {batch} under the name {found}: the name is new, or its "
        "notes were deleted (also with its marker topic). If it is new, set firstBatchId={batch} in "
        "the options of this call. A name that write_atomic gets in every micro-batch from batch 0 on, also "
        "with a DataFrame without rows, needs no option"
    )
    CHANGED = (
        "batch {batch} was committed with {found}: the rows of a batch that is repeated must be the same in "
        "the same partition. If the number of partitions changed, restart with the one it had. Make the plan "
        "deterministic (no rand(), now() or unordered limits; repartition(n, key) instead of repartition(n); "
        "a source that can be read again), or use oncelog.spark.write_atomic, which needs none of that"
    )
    FEWER = (
        "an earlier run of batch {batch} had more partitions and committed {found} as well, so this run must "
        "not finish it. Restart with the number of partitions it had (spark.sql.shuffle.partitions, "
        "minPartitions, repartition(n, key))"
    )
    OTHER_ROWS = (
        "batch {batch} is committed for this name and topic, with {found}: give each write of one "
        "micro-batch its own name, as in write_atomic(df, batch_id, options, name='rejected'). Nothing was "
        "written"
    )
    PLANNED_AGAIN = (
        "batch {batch} is committed with {found}, and Spark has planned it a second time with other rows: "
        "the checkpoint was taken back to an older state, or a second query runs on a copy of it. Nothing "
        "was written. Restore the newest checkpoint; or begin with a new one, whose rows are written as new"
    )
    WRITTEN_TWICE = (
        "write_atomic was called for batch {batch} a second time in this run with the name {found} and the "
        "same topic: give each write of one micro-batch its own name, as in write_atomic(df, batch_id, "
        "options, name='rejected'). Nothing was written by the second call"
    )


class SinkError(OncelogError):
    """The sink refuses, or could not write; the text names what and the remedy."""


class SinkRefused(SinkError):
    """Refused for good: as long as nothing is changed, every repetition is refused too."""


class RowRefused(SinkRefused):
    """A row that can never be written as it is."""


@dataclass(frozen=True, slots=True)
class Write:
    """Not written yet."""


@dataclass(frozen=True, slots=True)
class Compare:
    """Written before: the rows must be these. `planned`: as in LaneMarker."""

    expected: RowSum
    planned: str = ""


@dataclass(frozen=True, slots=True)
class Already:
    """The whole batch was finished before: the driver compares the sum of its rows."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Neither is safe. `found` fills the reason's text."""

    reason: Reason
    found: str = ""

    def error(self, batch_id: int, lane: int | None = None) -> SinkError:
        """To be raised."""
        # A zombie that had not noted its run before can overtake the run of now: the next start succeeds.
        kind = SinkError if self.reason is Reason.OVERTAKEN else SinkRefused
        return kind(self.reason.value.format(batch=batch_id, lane=lane, found=self.found))


def decide_plan(batch_id: int, run_id: str, note: PlanNote | None) -> PlanNote | Refuse:
    """Return the note that must be in force before `run_id` writes the batch: `note` itself, or a new one."""
    if note is None or note.batch_id < batch_id:
        return PlanNote(batch_id, run_id)
    if note.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {note.batch_id} has been begun")
    if note.run_id == run_id:
        return note
    if run_id in note.earlier:
        return Refuse(Reason.OVERTAKEN, f"run {note.run_id}")
    return PlanNote(batch_id, run_id, (*note.earlier, note.run_id)[-_MAX_EARLIER_RUNS:])


def decide_still_mine(plan: PlanNote, now: PlanNote | None) -> Refuse | None:
    """Refuse a task or driver of a run that is no longer the one that writes the batch."""
    if now == plan:
        return None
    return Refuse(Reason.OVERTAKEN, "its note is gone" if now is None else f"run {now.run_id}")


def decide_begun(
    batch_id: int, run_id: str, begun: BatchBegun | None, now_ms: int, retention_ms: int
) -> Refuse | None:
    """Refuse a repeat of a batch that was begun so long ago that its markers may have expired."""
    if begun is None or begun.batch_id < batch_id or begun.run_id == run_id:
        return None
    if begun.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {begun.batch_id} has been begun")
    age_ms = now_ms - begun.begun_ms
    # A tenth less: clocks of the driver's machines and of brokers differ.
    if age_ms * 10 < retention_ms * 9:
        return None
    return Refuse(Reason.EXPIRED, f"{age_ms // 60_000} minutes")


def decide_lane(
    batch_id: int,
    lane: int,
    marker: LaneMarker | None,
    finished: Finished | None,
    *,
    first_batch_id: int = 0,
) -> Write | Compare | Already | Refuse:
    """What a lane that has rows may do, by the table above. `first_batch_id`: the sink's first one."""
    if finished is not None and finished.batch_id == batch_id and finished.sum is not None:
        return Already()
    if marker is not None and marker.batch_id >= batch_id:
        if marker.batch_id > batch_id:
            return Refuse(Reason.REWOUND, f"batch {marker.batch_id} has been committed")
        return Compare(marker.sum)
    if finished is None:
        if marker is not None:
            return Refuse(Reason.LOST, f"the lane's is of batch {marker.batch_id}, the sink's own is gone")
        return Write() if batch_id <= first_batch_id else Refuse(Reason.UNKNOWN)
    if finished.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {finished.batch_id} has been committed")
    if finished.batch_id < batch_id:
        return Write()
    if lane >= finished.lanes:
        return Refuse(Reason.LANES, f"{finished.lanes} lanes")
    return Refuse(Reason.LOST, "none" if marker is None else f"the last is of batch {marker.batch_id}")


def decide_atomic(
    batch_id: int, marker: LaneMarker | None, *, first_batch_id: int = 0, name: str | None = None
) -> Write | Compare | Refuse:
    """What may be done with a micro-batch that is one transaction: its marker says all there is to know.

    A missing marker is no proof that nothing was written, so a `name` (None: the query's own id) that comes
    up in a later batch is refused until the user vouches for it.
    """
    if marker is None:
        if batch_id <= first_batch_id:
            return Write()
        return Refuse(Reason.UNKNOWN) if name is None else Refuse(Reason.NEW_NAME, repr(name))
    if marker.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {marker.batch_id} has been committed")
    return Compare(marker.sum, marker.planned) if marker.batch_id == batch_id else Write()


def is_plan_repeated(committed: str, now: str) -> bool:
    """Return whether a streaming query repeats the batch that was committed, by digests of its checkpoint.

    Spark plans a batch once and repeats it as it was planned. One that is planned a second time may have more
    rows, which nobody else will write. An unknown digest ("") proves nothing and is taken for the same.
    """
    return not committed or not now or committed == now


def decide_same_content(expected: RowSum, now: RowSum, *, is_in_stream: bool = False) -> Refuse | None:
    """Refuse a second write_atomic for one batch whose rows differ. A hash of 0 was not kept (0.4.1)."""
    if expected.rows == now.rows and expected.hash in (0, now.hash):
        return None
    reason = Reason.PLANNED_AGAIN if is_in_stream else Reason.OTHER_ROWS
    return Refuse(reason, f"{expected.rows} rows that are not the {now.rows} of this call")


class Claim(NamedTuple):
    """Which attempt to write a batch as one transaction a task has begun to write for."""

    batch_id: int
    producer_id: int
    producer_epoch: int
    cause: str = ""
    """Why it ended, if it failed and could say so."""

    def encode(self) -> OffsetAndMetadata:
        """As the task's consumer group keeps it."""
        note = {"oncelog": _FORMAT, "writer": [self.producer_id, self.producer_epoch], "cause": self.cause}
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> Claim | None:
        """None for none. Raises SinkError when the group holds something else."""
        if kept is None:
            return None
        note = _note(group, kept, ("writer", "cause"))
        producer_id, producer_epoch = note["writer"]
        return cls(kept.offset, producer_id, producer_epoch, note["cause"])

    def is_same_attempt(self, other: Claim | None) -> bool:
        """Whether both are for one transaction."""
        return other is not None and self[:3] == other[:3]


def may_claim(mine: Claim, found: Claim | None) -> bool:
    """Whether a task may begin to write: nobody has for this transaction, or for a later one."""
    if found is None or found.batch_id < mine.batch_id:
        return True
    if found.batch_id > mine.batch_id:
        return False
    # Another id is that of a coordinator whose epochs were used up: which is later cannot be seen.
    return found.producer_id != mine.producer_id or found.producer_epoch < mine.producer_epoch


def decide_repeated(expected: RowSum, now: RowSum) -> Refuse | None:
    """Whether a batch that is repeated is the one that was committed; None: it is."""
    if expected == now:
        return None
    if expected.rows != now.rows:
        return Refuse(Reason.CHANGED, f"{expected.rows} rows in this lane, and now it has {now.rows}")
    return Refuse(Reason.CHANGED, f"{expected.rows} rows in this lane, and now they are not the same")


def decide_finish(
    batch_id: int,
    lanes: Sequence[int],
    finished: Finished | None,
    beyond: Mapping[int, LaneMarker | None],
    total: RowSum,
) -> Finished | Refuse:
    """What the driver notes once every lane's task has succeeded.

    `beyond`: markers of lanes above these, of a repeat. `total`: of all rows.
    """
    if sorted(lanes) != list(range(len(lanes))):
        raise SinkError(
            f"batch {batch_id}: Spark reported lanes {sorted(lanes)}, expected one report of each"
        )
    if finished is not None and finished.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {finished.batch_id} has been committed")
    if finished is not None and finished.batch_id == batch_id and finished.sum is not None:
        if finished.sum == total:
            return finished
        return Refuse(
            Reason.CHANGED, f"{finished.sum.rows} rows in all, and now {_difference(finished.sum, total)}"
        )
    also = [lane for lane, marker in beyond.items() if marker is not None and marker.batch_id == batch_id]
    if also:
        return Refuse(Reason.FEWER, f"lane {', '.join(map(str, sorted(also)))}")
    return Finished(batch_id, len(lanes), total)


def _difference(expected: RowSum, now: RowSum) -> str:
    return "they are not the same" if expected.rows == now.rows else f"there are {now.rows}"
