"""Detection of hanging transactions: they are open on a partition, and no producer or coordinator will end
them.

    no coordinator knows a transaction of the producer id           hanging
    the coordinator's entry has another epoch, and its state is
    neither PrepareCommit nor PrepareAbort                      hanging
    the coordinator's transaction is not open                       hanging
    the coordinator's transaction does not name the partition       hanging
    otherwise                                                       not: the producer or a timeout ends it

A hanging transaction keeps the partition's last stable offset from advancing, so read_committed consumers get
no new records. Source: behaviour T14 (docs/behaviours.md); KIP-664.
"""

from __future__ import annotations

import warnings
from enum import Enum
from typing import NamedTuple

from oncelog.types import TopicPartition

UNDER_WAY = {"Ongoing", "PrepareCommit", "PrepareAbort"}


_YOURS = " among the transactional ids that you may DESCRIBE"


class OpenTransaction(NamedTuple):
    """A transaction that is open on a partition, as DescribeProducers returns it.

    `coordinator_epoch` is None if the partition has no marker of the producer. `last_timestamp_ms` is None if
    unknown.
    """

    tp: TopicPartition
    producer_id: int
    producer_epoch: int
    first_offset: int
    last_timestamp_ms: int | None
    coordinator_epoch: int | None

    @property
    def at(self) -> TopicPartition:
        """The partition. Deprecated: use `tp`."""
        warnings.warn("OpenTransaction.at is deprecated; use tp", DeprecationWarning, stacklevel=2)
        return self.tp


class KnownTransaction(NamedTuple):
    """A transactional id as DescribeTransactions returns it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    state: str
    partitions: frozenset[TopicPartition]


def hanging_reason(opened: OpenTransaction, entry: KnownTransaction | None) -> str | None:
    """Return the reason why a transaction is hanging; None if it is not hanging.

    `entry` is the coordinator's entry with the same producer id; None if there is none.
    """
    if entry is None:
        # The text mentions the permission: a coordinator hides transactional ids that the client may not
        # DESCRIBE, so an entry may exist although `entry` is None.
        return f"no coordinator knows producer id {opened.producer_id}{_YOURS}"
    if entry.producer_epoch != opened.producer_epoch and entry.state not in ("PrepareCommit", "PrepareAbort"):
        return f"{entry.transactional_id!r} is at epoch {entry.producer_epoch}"
    if entry.state not in UNDER_WAY:
        return f"{entry.transactional_id!r} is in state {entry.state}"
    if opened.tp not in entry.partitions:
        return f"the transaction of {entry.transactional_id!r} does not contain the partition"
    return None


class Hanging(Enum):
    """The verdict on an open transaction.

    PERHAPS: the transaction looks hanging, but its last record is too recent to be sure.
    """

    YES = "yes"
    NO = "no"
    PERHAPS = "perhaps"


class HeldBack(NamedTuple):
    """An open transaction that limits a partition's last stable offset, with the verdict on it."""

    opened: OpenTransaction
    hanging: Hanging
    reason: str


def judge(
    opened: OpenTransaction, entry: KnownTransaction | None, *, now_ms: int, older_than_ms: int
) -> HeldBack:
    """Return the verdict on an open transaction. `entry` is the coordinator's entry, as in `hanging_reason`.

    If the last record of the transaction is younger than `older_than_ms`, the verdict is PERHAPS instead of
    YES. A record of unknown time counts as old.
    """
    reason = hanging_reason(opened, entry)
    if reason is None:
        assert entry is not None
        return HeldBack(opened, Hanging.NO, f"{entry.transactional_id!r} is {entry.state}")
    is_old = now_ms - (opened.last_timestamp_ms or 0) >= older_than_ms
    return HeldBack(opened, Hanging.YES if is_old else Hanging.PERHAPS, reason)
