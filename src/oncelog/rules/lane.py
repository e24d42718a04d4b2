"""The exactly-once sink's decisions: may this lane write this batch, or was it written before?

A lane is the part of a batch that one task writes, in one transaction together with the lane's marker. Who
comes again (a retry, a zombie, a restarted driver) finds the marker of the last batch that was committed.
The driver notes each batch once all its lanes are committed (`Finished`).

    lane's marker        noted                     verdict
    of a later batch     any                       Refuse REWOUND
    of this batch        any                       Compare
    older or none        a later batch             Refuse REWOUND
    older or none        this batch, fewer lanes   Refuse LANES
    older or none        this batch                Refuse LOST
    older or none        an earlier batch          Write
    older                nothing                   Refuse LOST
    none                 nothing, first batch      Write
    none                 nothing, a later batch    Refuse UNKNOWN

Source: rows P2, P4.
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


class RowSum(NamedTuple):
    """What a lane wrote: how many rows, and the sum of their hashes modulo 2**64, whatever their order."""

    rows: int = 0
    hash: int = 0

    def plus(self, rows: int, hashes: int) -> RowSum:
        """With more rows."""
        return RowSum(self.rows + rows, (self.hash + hashes) % (1 << 64))


class LaneMarker(NamedTuple):
    """The last batch a lane committed."""

    batch_id: int
    sum: RowSum

    def encode(self) -> OffsetAndMetadata:
        """As the lane's consumer group keeps it: the batch id is the offset."""
        note = {"oncelog": _FORMAT, "rows": self.sum.rows, "hash": f"{self.sum.hash:016x}"}
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> LaneMarker | None:
        """None for no marker. Raises SinkError when the group holds something else."""
        note = _note(group, kept, ("rows", "hash"))
        if kept is None or note is None:
            return None
        return cls(kept.offset, RowSum(note["rows"], int(note["hash"], 16)))


class Finished(NamedTuple):
    """The last batch of which the driver saw all lanes committed, and how many they were.

    `run_id`: the start of the query that did; None if it has no name.
    """

    batch_id: int
    lanes: int
    run_id: str | None = None

    def encode(self) -> OffsetAndMetadata:
        """As the sink's own consumer group keeps it."""
        note = {"oncelog": _FORMAT, "lanes": self.lanes, "run": self.run_id}
        return OffsetAndMetadata(self.batch_id, None, json.dumps(note))

    @classmethod
    def decode(cls, group: str, kept: OffsetAndMetadata | None) -> Finished | None:
        """None for nothing noted. Raises SinkError when the group holds something else."""
        note = _note(group, kept, ("lanes",))
        return None if kept is None or note is None else cls(kept.offset, note["lanes"], note.get("run"))


def _note(group: str, kept: OffsetAndMetadata | None, names: Sequence[str]) -> Mapping[str, Any] | None:
    if kept is None:
        return None
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
        "batch {batch} was asked for, and {found} has been committed since: the checkpoint was taken back to "
        "an older state, or a second query runs on a copy of it. Writing could double rows. Restore the "
        "newest checkpoint; or begin with a new one, whose rows are written as new ones"
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
    UNKNOWN = (
        "this sink knows nothing of the batches before {batch}: their markers expired "
        "(offsets.retention.minutes) or were deleted, or the query wrote elsewhere before. If batch {batch} "
        "was never written by this sink, set the option firstBatchId={batch}; else begin with a new "
        "checkpoint"
    )
    CHANGED = (
        "batch {batch} was committed with {found}: the rows of a batch that is repeated must be the same in "
        "the same partition. Make the plan deterministic (no rand(), now() or unordered limits; "
        "repartition(n, key) instead of repartition(n); a source that can be read again), or use "
        "oncelog.spark.write_atomic, which needs none of that"
    )
    FEWER = (
        "an earlier run of batch {batch} had committed {found} as well, and this run has fewer lanes: their "
        "rows may be in the topic twice. The number of partitions must not change while a batch is repeated"
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
    """Written before: the rows must be these."""

    expected: RowSum


@dataclass(frozen=True, slots=True)
class Refuse:
    """Neither is safe. `found` fills the reason's text."""

    reason: Reason
    found: str = ""

    def error(self, batch_id: int, lane: int | None = None) -> SinkRefused:
        """To be raised."""
        return SinkRefused(self.reason.value.format(batch=batch_id, lane=lane, found=self.found))


def decide_lane(
    batch_id: int,
    lane: int,
    marker: LaneMarker | None,
    finished: Finished | None,
    *,
    first_batch_id: int = 0,
) -> Write | Compare | Refuse:
    """What a lane that has rows may do, by the table above. `first_batch_id`: the sink's first one."""
    if marker is not None and marker.batch_id >= batch_id:
        if marker.batch_id > batch_id:
            return Refuse(Reason.REWOUND, f"batch {marker.batch_id}")
        return Compare(marker.sum)
    if finished is None:
        if marker is not None:
            return Refuse(Reason.LOST, f"the lane's is of batch {marker.batch_id}, the sink's own is gone")
        return Write() if batch_id <= first_batch_id else Refuse(Reason.UNKNOWN)
    if finished.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {finished.batch_id}")
    if finished.batch_id < batch_id:
        return Write()
    if lane >= finished.lanes:
        return Refuse(Reason.LANES, f"{finished.lanes} lanes")
    return Refuse(Reason.LOST, "none" if marker is None else f"the last is of batch {marker.batch_id}")


def decide_atomic(
    batch_id: int, marker: LaneMarker | None, *, first_batch_id: int = 0
) -> Write | Compare | Refuse:
    """What may be done with a micro-batch that is one transaction: its marker says all there is to know."""
    if marker is None:
        return Write() if batch_id <= first_batch_id else Refuse(Reason.UNKNOWN)
    if marker.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {marker.batch_id}")
    return Compare(marker.sum) if marker.batch_id == batch_id else Write()


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
        note = _note(group, kept, ("writer", "cause"))
        if kept is None or note is None:
            return None
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


def may_be_repeated(finished: Finished | None, run_id: str | None) -> bool:
    """Whether a run may finish a batch that an earlier one began: its first batch only."""
    return finished is None or run_id is None or finished.run_id != run_id


def decide_finish(
    batch_id: int,
    lanes: Sequence[int],
    finished: Finished | None,
    beyond: Mapping[int, LaneMarker | None],
    run_id: str | None = None,
) -> Finished | Refuse:
    """What the driver notes once every lane's task has succeeded.

    `beyond`: markers of lanes above these, if the batch may be repeated.
    """
    if sorted(lanes) != list(range(len(lanes))):
        raise SinkError(
            f"batch {batch_id}: Spark reported lanes {sorted(lanes)}, expected one report of each"
        )
    if finished is not None and finished.batch_id > batch_id:
        return Refuse(Reason.REWOUND, f"batch {finished.batch_id}")
    also = [lane for lane, marker in beyond.items() if marker is not None and marker.batch_id == batch_id]
    if also:
        return Refuse(Reason.FEWER, f"lane {', '.join(map(str, sorted(also)))}")
    return Finished(batch_id, len(lanes), run_id)
