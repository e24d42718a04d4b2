"""Committed offsets of groups: which of two holds, what a reader is told, and which are forgotten.

Offsets committed within a transaction are pending until its marker comes. A commit makes each of them
hold unless a newer one was committed meanwhile; an abort drops them.
Source: rows T6, T7; Kafka's OffsetMetadataManager.
"""

from __future__ import annotations

from typing import NamedTuple

NO_OFFSET = -1


class CommittedOffset(NamedTuple):
    """A position that a group committed. `leader_epoch` -1: not told. `expire_ms` -1: by the group's rule.

    `record_offset`: where it stands in `__consumer_offsets`.
    """

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expire_ms: int
    record_offset: int


def later(held: CommittedOffset | None, materialized: CommittedOffset) -> CommittedOffset:
    """Which of the two holds when a transaction's marker materializes the second one."""
    return held if held is not None and held.record_offset > materialized.record_offset else materialized


def is_expired(
    committed: CommittedOffset,
    *,
    is_pending: bool,
    empty_since_ms: int | None,
    now_ms: int,
    retention_ms: int,
) -> bool:
    """Whether a commit is forgotten.

    `is_pending`: a transaction is about to commit another one for the partition. `empty_since_ms`: since
    when the group has no members; None for a group that never had any, whose offsets count each from its
    own commit. The caller does not ask for groups with members that read the topic.
    """
    if is_pending:
        return False
    if committed.expire_ms >= 0:
        return now_ms >= committed.expire_ms
    since_ms = committed.commit_ms if empty_since_ms is None else max(empty_since_ms, committed.commit_ms)
    return now_ms - since_ms >= retention_ms
