"""Decide which of two committed offsets of a partition is in force, and when a committed offset expires.

An offset that is committed within a transaction is pending until the transaction's marker is written. A
commit marker puts the offset into force unless a newer one was committed in the meantime. An abort marker
drops the offset.
Source: behaviours T6 and T7 (docs/behaviours.md); kafka OffsetMetadataManager, OffsetExpirationConditionImpl.
"""

from __future__ import annotations

from typing import NamedTuple

NO_OFFSET = -1


class CommittedOffset(NamedTuple):
    """An offset that a group committed.

    `leader_epoch` is -1 if the client did not send it. `expire_ms` is the time at which the offset expires;
    -1 if the broker's retention applies instead. `record_offset` is the offset of the record in
    `__consumer_offsets`.
    """

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expire_ms: int
    record_offset: int


def later(held: CommittedOffset | None, materialized: CommittedOffset) -> CommittedOffset:
    """Return the offset in force after a commit marker: of `held` and `materialized`, the one whose record is
    later in the log.

    `materialized` was committed in the marker's transaction. `held` was in force before; None if there was
    none.
    """
    return held if held is not None and held.record_offset > materialized.record_offset else materialized


def is_expired(
    committed: CommittedOffset,
    *,
    is_pending: bool,
    empty_since_ms: int | None,
    now_ms: int,
    retention_ms: int,
) -> bool:
    """Return True if a committed offset has expired.

    An offset does not expire while `is_pending`, because a transaction is about to commit another one. The
    retention starts at the commit, or when the group became empty (`empty_since_ms`) if that is later.
    `empty_since_ms` is None for a group that has members now, or never had any. The caller must exclude
    topics to which members of the group subscribe.
    """
    if is_pending:
        return False
    if committed.expire_ms >= 0:
        return now_ms >= committed.expire_ms
    since_ms = committed.commit_ms if empty_since_ms is None else max(empty_since_ms, committed.commit_ms)
    return now_ms - since_ms >= retention_ms
