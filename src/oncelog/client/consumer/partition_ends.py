"""Looks up the start, end and last stable offsets of partitions, and the transactions that hold readers back.

The end offset (high watermark) is the offset of the next record, and a reader's lag is the distance from its
position to that offset. The stable end offset (last stable offset) is the first offset of the earliest open
transaction, or the end offset if no transaction is open. Readers with read_committed stop at the stable end
offset.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.transaction_requests import HANGING_AGE_MS
from oncelog.client.admin.types import PartitionProducers
from oncelog.errors import OncelogError
from oncelog.rules.transactions.hanging import HeldBack, OpenTransaction, judge
from oncelog.runtime import system
from oncelog.types import Isolation, TopicPartition


class Holder(NamedTuple):
    """The open transaction at a partition's last stable offset.

    Fields that could not be looked up are None.
    """

    transactional_id: str | None = None
    producer_id: int | None = None
    producer_epoch: int | None = None
    judged: HeldBack | None = None

    def __str__(self) -> str:
        """Return the transactional id, the producer id and its epoch as text, as far as they are known."""
        if self.producer_id is None:
            return "an open transaction"
        producer = f"producer id {self.producer_id}, epoch {self.producer_epoch}"
        return producer if self.transactional_id is None else f"{self.transactional_id} ({producer})"


class PartitionEnds(NamedTuple):
    """The offsets of one partition. An offset is None if the leader did not return it.

    `held_by` is the open transaction at `stable_end`; None if `stable_end` equals `end` or one is unknown.
    """

    start: int | None
    end: int | None
    stable_end: int | None
    held_by: Holder | None


def partition_ends(admin: Admin, tps: Collection[TopicPartition]) -> dict[TopicPartition, PartitionEnds]:
    """Return the ends of these partitions. The offsets of a deleted or leaderless partition are None."""
    if not tps:
        return {}
    starts = admin.list_offsets(dict.fromkeys(tps, "earliest"), raise_errors=False)
    # Look up stable ends before ends. Both only grow, so no stable end appears to be beyond the end.
    stable = admin.list_offsets(dict.fromkeys(tps, "latest"), Isolation.READ_COMMITTED, raise_errors=False)
    ends = admin.list_offsets(dict.fromkeys(tps, "latest"), raise_errors=False)
    held_back = {
        tp
        for tp in tps
        if (end := ends[tp].offset) is not None
        and (stable_end := stable[tp].offset) is not None
        and stable_end < end
    }
    holders = _holders(admin, held_back)
    return {
        tp: PartitionEnds(starts[tp].offset, ends[tp].offset, stable[tp].offset, holders.get(tp))
        for tp in tps
    }


def _holders(admin: Admin, tps: Collection[TopicPartition]) -> dict[TopicPartition, Holder]:
    """Return the earliest open transaction of each partition, as far as brokers describe it."""
    if not tps:
        return {}
    holders = dict.fromkeys(tps, Holder())
    # Each partition has its own error: a partition that this client may not describe must not hide the
    # results of other partitions.
    described = admin.describe_producers(tps, raise_errors=False)
    earliest = {tp: txn for tp in tps if (txn := _earliest(described[tp])) is not None}
    for tp, opened in earliest.items():
        holders[tp] = Holder(None, opened.producer_id, opened.producer_epoch)
    try:
        transactions = admin.known_transactions({opened.producer_id for opened in earliest.values()})
    except OncelogError:
        # The broker is older than Kafka 3.0, or a coordinator does not respond.
        return holders
    now_ms = system.current().wall_ns() // 1_000_000
    for tp, opened in earliest.items():
        transaction = transactions.get(opened.producer_id)
        judged = judge(opened, transaction, now_ms=now_ms, older_than_ms=HANGING_AGE_MS)
        name = transaction.transactional_id if transaction else None
        holders[tp] = Holder(name, opened.producer_id, opened.producer_epoch, judged)
    return holders


def _earliest(described: PartitionProducers) -> OpenTransaction | None:
    return min(described.open_transactions(), key=lambda opened: opened.first_offset, default=None)
