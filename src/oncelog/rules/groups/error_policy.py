"""Decide how a consumer reacts to an error of its group coordinator, by the kind of request.

    RETRY     send the request again after a pause
    FIND      find the group's coordinator again, then retry
    JOIN      join the rebalance; the member keeps its partitions for now
    LOST      join again under the same member id; the partitions are lost
    RESET     join again as a new member; the partitions are lost
    RAISE     raise the error; the member keeps its state, and a later call or poll may succeed
    END       the member cannot rejoin: report the partitions as lost, then raise the error at every poll

OffsetCommit also raises its error for JOIN, LOST, RESET and END: the caller must learn that nothing was
stored. Exceptions for members that keep their partitions are in `oncelog.client.group.commit_queue`.

Source: Kafka's AbstractCoordinator (JoinGroup, SyncGroup, Heartbeat), ConsumerCoordinator and
CommitRequestManager (OffsetCommit, OffsetFetch), AbstractHeartbeatRequestManager and
ConsumerHeartbeatRequestManager (ConsumerGroupHeartbeat). The table differs from these classes on purpose:

- FENCED_INSTANCE_ID also ends the member after a Heartbeat. Java's poll raises it once. An application that
  continues to poll then joins again, and two consumers with one instance id fence each other endlessly.
- GROUP_AUTHORIZATION_FAILED for a Heartbeat is raised by poll. Java treats it as a failed heartbeat, and the
  session expires.
- GROUP_AUTHORIZATION_FAILED and UNRELEASED_INSTANCE_ID for a ConsumerGroupHeartbeat are raised, and a later
  poll tries again: a permission may be granted, and the predecessor's session ends. Java treats them as
  fatal.
- OffsetCommit raises UNKNOWN_TOPIC_OR_PARTITION at once. Java retries until its timeout. OffsetCommit retries
  STALE_MEMBER_EPOCH, because the next heartbeat brings the current epoch. Java's commitSync raises
  CommitFailedException.
- Transient errors are retried in JoinGroup and SyncGroup too, where Java calls some of them unexpected.
"""

from __future__ import annotations

from enum import Enum


class GroupRequest(Enum):
    """A request to the group coordinator."""

    JOIN = "JoinGroup"
    SYNC = "SyncGroup"
    HEARTBEAT = "Heartbeat"
    COMMIT = "OffsetCommit"
    FETCH = "OffsetFetch"
    CONSUMER_HEARTBEAT = "ConsumerGroupHeartbeat"


class GroupAction(Enum):
    """The consumer's reaction to an error. The module docstring explains each value."""

    RETRY = "retry"
    FIND = "find"
    JOIN = "join"
    LOST = "lost"
    RESET = "reset"
    RAISE = "raise"
    END = "end"


_COLUMNS = tuple(GroupRequest)

# error code: the reactions of JoinGroup, SyncGroup, Heartbeat, OffsetCommit, OffsetFetch and
# ConsumerGroupHeartbeat
_ROWS: dict[int, tuple[str, str, str, str, str, str]] = {
    -1: ("raise", "raise", "retry", "raise", "raise", "raise"),  # UNKNOWN_SERVER_ERROR
    7: ("retry", "retry", "retry", "find", "retry", "retry"),  # REQUEST_TIMED_OUT
    14: ("retry", "retry", "retry", "retry", "retry", "retry"),  # COORDINATOR_LOAD_IN_PROGRESS
    15: ("find", "find", "find", "find", "find", "find"),  # COORDINATOR_NOT_AVAILABLE
    16: ("find", "find", "find", "find", "find", "find"),  # NOT_COORDINATOR
    22: ("lost", "lost", "lost", "lost", "raise", "reset"),  # ILLEGAL_GENERATION
    25: ("reset", "reset", "reset", "reset", "raise", "reset"),  # UNKNOWN_MEMBER_ID
    27: ("join", "join", "join", "join", "retry", "retry"),  # REBALANCE_IN_PROGRESS
    # The group was empty and has been deleted. So this member was no longer in it, and joins as a new member.
    69: ("reset", "reset", "reset", "reset", "raise", "reset"),  # GROUP_ID_NOT_FOUND
    79: ("join", "join", "raise", "raise", "raise", "raise"),  # MEMBER_ID_REQUIRED
    82: ("end", "end", "end", "end", "raise", "end"),  # FENCED_INSTANCE_ID
    # OffsetFetch is retried: a transaction is about to commit another offset. Its end ends the error.
    88: ("raise", "raise", "raise", "raise", "retry", "raise"),  # UNSTABLE_OFFSET_COMMIT
    110: ("raise", "raise", "raise", "reset", "raise", "reset"),  # FENCED_MEMBER_EPOCH
    # Retry, because the member has an old epoch, and its next heartbeat brings the current one.
    113: ("raise", "raise", "raise", "retry", "retry", "retry"),  # STALE_MEMBER_EPOCH
}
"""Error code -> reactions, in the order of GroupRequest. All other error codes are raised."""


def group_action(code: int, request: GroupRequest) -> GroupAction:
    """Return the reaction to an error code of a response. The code must not be NONE (0)."""
    row = _ROWS.get(code)
    return GroupAction.RAISE if row is None else GroupAction(row[_COLUMNS.index(request)])
