"""Is a transaction that is open on a partition one that nobody will ever end?

    the coordinators know no transaction of the producer id         hanging
    they know one with another epoch                                hanging
    they know one that is not under way                             hanging
    it is under way, and the partition is not part of it            hanging
    else                                                            its producer or its timeout will end it
Such a transaction holds back the partition's last stable offset, and so every read_committed reader.
Source: row T14; KIP-664.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from oncelog.types import TopicPartition

UNDER_WAY = {"Ongoing", "PrepareCommit", "PrepareAbort"}


_YOURS = " among the transactional ids that you may DESCRIBE"


class OpenTransaction(NamedTuple):
    """What a partition says of a producer with a transaction open there.

    `coordinator_epoch` None: no marker of it was ever written here.
    """

    at: TopicPartition
    producer_id: int
    producer_epoch: int
    first_offset: int
    last_timestamp_ms: int | None
    coordinator_epoch: int | None


class KnownTransaction(NamedTuple):
    """What a coordinator says of a transactional id."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    partitions: frozenset[TopicPartition]


def why_hanging(opened: OpenTransaction, known: KnownTransaction | None) -> str | None:
    """Why nobody will end it; None when somebody will. `known`: of the same producer id."""
    if known is None:
        # With ACLs, coordinators say nothing of ids that the asker may not DESCRIBE.
        return f"no coordinator knows producer id {opened.producer_id}{_YOURS}"
    if known.producer_epoch != opened.producer_epoch and known.state not in ("PrepareCommit", "PrepareAbort"):
        return f"{known.transactional_id!r} is at epoch {known.producer_epoch}"
    if known.state not in UNDER_WAY:
        return f"{known.transactional_id!r} is in state {known.state}"
    if opened.at not in known.partitions:
        return f"it is not part of the transaction of {known.transactional_id!r}"
    return None


class Hanging(Enum):
    """Whether nobody will end it. PERHAPS: it looks so, and is too young to be sure."""

    YES = "yes"
    NO = "no"
    PERHAPS = "perhaps"


class HeldBack(NamedTuple):
    """A partition whose last stable offset an open transaction holds back, and what to think of that."""

    opened: OpenTransaction
    hanging: Hanging
    reason: str


def judge(
    opened: OpenTransaction, known: KnownTransaction | None, *, now_ms: int, older_than_ms: int
) -> HeldBack:
    """`older_than_ms`: the age of its last record from which what looks like hanging is taken for it."""
    why = why_hanging(opened, known)
    if why is None:
        assert known is not None
        return HeldBack(opened, Hanging.NO, f"{known.transactional_id!r} is {known.state}")
    is_old = now_ms - (opened.last_timestamp_ms or 0) >= older_than_ms
    return HeldBack(opened, Hanging.YES if is_old else Hanging.PERHAPS, why)
