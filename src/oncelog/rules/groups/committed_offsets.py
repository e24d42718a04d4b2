"""Committed offsets of groups: which of two offsets is in force, and when an offset expires.

Offsets committed within a transaction are pending until its marker is written. A commit marker puts each of
them into force unless a newer offset was committed meanwhile; an abort marker drops them.
Source: behaviours T6 and T7 (docs/behaviours.md); kafka OffsetMetadataManager, OffsetExpirationConditionImpl.
"""

from __future__ import annotations

from typing import NamedTuple

NO_OFFSET = -1


class CommittedOffset(NamedTuple):
    """An offset that a group committed.

    `leader_epoch` is -1 if the client did not send it. `expire_ms` is -1 if the retention of the broker
    applies. `record_offset` is the offset of its record in `__consumer_offsets`.
    """

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expire_ms: int
    record_offset: int


def later(held: CommittedOffset | None, materialized: CommittedOffset) -> CommittedOffset:
    """Return the offset that is in force after a commit marker has materialized the second one."""
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

    An offset does not expire while `is_pending`: a transaction is about to commit another one. The retention
    starts when the group became empty (`empty_since_ms`), or at the commit if that is later. For a group that
    never had members `empty_since_ms` is None, and it starts at the commit. The caller must not ask about
    topics that members of the group subscribe to.
    """
    if is_pending:
        return False
    if committed.expire_ms >= 0:
        return now_ms >= committed.expire_ms
    since_ms = committed.commit_ms if empty_since_ms is None else max(empty_since_ms, committed.commit_ms)
    return now_ms - since_ms >= retention_ms
