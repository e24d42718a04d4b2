"""What a classic group knows of its members, and what it answers them, as values.

Source: Kafka's ClassicGroupMember; JoinGroup and SyncGroup of the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Protocol = tuple[str, bytes]
"""An assignor's name, and what the member tells the one that assigns."""

PROTOCOL_BYTES = 64
"""Memory that a protocol takes beside its name and metadata: 20,000 empty ones must not count as nothing."""


class GroupState(Enum):
    """Kafka's names, as DescribeGroups tells them."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class JoinRequest(NamedTuple):
    """A member wants in. `member_id` "": it has none yet.

    `requires_known_id`: it is given one first and comes back (version 4 on). `knows_skip`: it can be told to
    lead without assigning (version 9 on).
    """

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[Protocol, ...]
    requires_known_id: bool
    knows_skip: bool


class JoinedMember(NamedTuple):
    """A member as the leader is told of it."""

    member_id: str
    group_instance_id: str | None
    metadata: bytes


class JoinAnswer(NamedTuple):
    """`members`: for the leader, who assigns unless `skip_assignment`."""

    error_code: int
    member_id: str
    generation_id: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


class SyncAnswer(NamedTuple):
    """A member's share of the partitions, as bytes that only members understand."""

    error_code: int
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


WhenJoined = Callable[[JoinAnswer], None]
WhenSynced = Callable[[SyncAnswer], None]


@dataclass(slots=True)
class Member:
    """A member. `join` and `sync`: whom to answer when the others are there; None when it does not wait.

    `deadline_ms`: it is removed then unless it waits. `is_new`: it waits for its first generation.
    """

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[Protocol, ...]
    assignment: bytes = b""
    deadline_ms: int = 0
    is_new: bool = True
    has_synced: bool = False
    join: WhenJoined | None = None
    sync: WhenSynced | None = None

    def metadata(self, protocol_name: str | None) -> bytes:
        """What it said for this protocol; nothing if it does not support it."""
        return next((data for name, data in self.protocols if name == protocol_name), b"")

    @property
    def metadata_bytes(self) -> int:
        """Bytes that its protocols take."""
        return metadata_bytes(self.protocols)


def metadata_bytes(protocols: Collection[Protocol]) -> int:
    """Return how many bytes protocols take: names, metadata, and what each takes beside them."""
    return sum(len(name) + len(data) + PROTOCOL_BYTES for name, data in protocols)


def select_protocol(members: Collection[Member], common: Container[str]) -> str:
    """Return the protocol most members like best among those that all support."""
    votes = Counter(next(name for name, _ in each.protocols if name in common) for each in members)
    return votes.most_common(1)[0][0]
