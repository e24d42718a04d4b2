"""What a member tells the leader of its group, and what the leader tells the member, as bytes.

What it owns goes with the subscription where partitions stay during a rebalance; to `sticky`, whose members
give everything back first, goes in user data what they had last.
Source: Kafka's ConsumerProtocol, StickyAssignor, CooperativeStickyAssignor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from oncelog.errors import PeerError
from oncelog.rules.groups.assignors import COOPERATIVE, STICKY, Subscriber
from oncelog.types import TopicPartition
from oncelog.wire.stored import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    CooperativeStickyAssignorUserData,
    StickyAssignorUserData,
)

_SUBSCRIPTION_VERSION, _ASSIGNMENT_VERSION = 3, 1
_USER_DATA_VERSIONS = (1, 0)


class Holding(NamedTuple):
    """What a member reads now, what it was given last, and in which generation (None: never)."""

    owned: Sequence[TopicPartition] = ()
    last: Sequence[TopicPartition] = ()
    generation_id: int | None = None


def encode_subscription(assignor: str, topics: Iterable[str], holding: Holding) -> bytes:
    """The subscription as one assignor wants to be told of it."""
    generation_id = -1 if holding.generation_id is None else holding.generation_id
    return ConsumerProtocolSubscription(
        topics=sorted(topics),
        user_data=_user_data(assignor, holding, generation_id),
        owned_partitions=[
            ConsumerProtocolSubscription.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in by_topic(holding.owned).items()
        ],
        generation_id=generation_id,
    ).to_bytes(_SUBSCRIPTION_VERSION)


def _user_data(assignor: str, holding: Holding, generation_id: int) -> bytes | None:
    if assignor == COOPERATIVE:
        return CooperativeStickyAssignorUserData(generation=generation_id).encode(0)
    if assignor != STICKY or holding.generation_id is None:
        return None
    return StickyAssignorUserData(
        previous_assignment=[
            StickyAssignorUserData.TopicAssignment(topic=topic, partitions=partitions)
            for topic, partitions in by_topic(holding.last).items()
        ],
        generation=generation_id,
    ).encode(_USER_DATA_VERSIONS[0])


def decode_subscriber(
    assignor: str, member_id: str, group_instance_id: str | None, subscription: bytes
) -> Subscriber:
    """A member as the assignor sees it; user data of an unknown form counts as none. Raises PeerError."""
    told = ConsumerProtocolSubscription.from_bytes(subscription)
    owned = _partitions((each.topic, each.partitions) for each in told.owned_partitions)
    generation_id = told.generation_id
    if assignor == STICKY:
        owned, generation_id = _previous(told.user_data)
    elif assignor == COOPERATIVE and generation_id < 0:
        generation_id = _cooperative_generation(told.user_data)
    generation = generation_id if generation_id >= 0 else None
    return Subscriber(member_id, group_instance_id, frozenset(told.topics), owned, generation)


def _previous(user_data: bytes | None) -> tuple[tuple[TopicPartition, ...], int]:
    for version in _USER_DATA_VERSIONS if user_data else ():
        try:
            read = StickyAssignorUserData.decode(version, user_data or b"")
        except PeerError:
            continue
        previous = _partitions((each.topic, each.partitions) for each in read.previous_assignment)
        return previous, read.generation
    return (), -1


def _cooperative_generation(user_data: bytes | None) -> int:
    try:
        return CooperativeStickyAssignorUserData.decode(0, user_data or b"").generation
    except PeerError:
        return -1


def _partitions(topics: Iterable[tuple[str, Iterable[int]]]) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic, partition) for topic, partitions in topics for partition in partitions)


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Topic -> numbers of its partitions."""
    topics: dict[str, list[int]] = {}
    for at in partitions:
        topics.setdefault(at.topic, []).append(at.partition)
    return topics


def encode_share(share: Iterable[TopicPartition]) -> bytes:
    """An assignment."""
    return ConsumerProtocolAssignment(
        assigned_partitions=[
            ConsumerProtocolAssignment.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in by_topic(share).items()
        ]
    ).to_bytes(_ASSIGNMENT_VERSION)


def decode_share(assignment: bytes) -> list[TopicPartition]:
    """The partitions of an assignment; none for an empty one. Raises PeerError."""
    if not assignment:
        return []
    told = ConsumerProtocolAssignment.from_bytes(assignment).assigned_partitions
    return list(_partitions((each.topic, each.partitions) for each in told))
