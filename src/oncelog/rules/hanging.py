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

from typing import NamedTuple

from oncelog.types import TopicPartition

UNDER_WAY = {"Ongoing", "PrepareCommit", "PrepareAbort"}


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
        return f"no coordinator knows producer id {opened.producer_id}"
    if known.producer_epoch != opened.producer_epoch and known.state not in ("PrepareCommit", "PrepareAbort"):
        return f"{known.transactional_id!r} is at epoch {known.producer_epoch}"
    if known.state not in UNDER_WAY:
        return f"{known.transactional_id!r} is in state {known.state}"
    if opened.at not in known.partitions:
        return f"it is not part of the transaction of {known.transactional_id!r}"
    return None
