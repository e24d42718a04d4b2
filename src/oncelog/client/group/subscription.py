"""Encodes and decodes the subscriptions and assignments that members of a classic group exchange.

Each member sends its subscription to the group's leader, and the leader sends each member its assignment. For
the cooperative protocol, a subscription contains the owned partitions. A member with the `sticky` assignor
revokes all partitions before a join, so it puts its last assignment into the user data.

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


class OwnedPartitions(NamedTuple):
    """The partitions that a member owns now, its last assignment, and the generation of that assignment.

    `generation_id` is None if the member has never had an assignment.
    """

    owned: Sequence[TopicPartition] = ()
    last: Sequence[TopicPartition] = ()
    generation_id: int | None = None


def encode_subscription(assignor: str, topics: Iterable[str], owned: OwnedPartitions) -> bytes:
    """Return the encoded ConsumerProtocolSubscription, with the user data that `assignor` expects."""
    generation_id = -1 if owned.generation_id is None else owned.generation_id
    return ConsumerProtocolSubscription(
        topics=sorted(topics),
        user_data=_user_data(assignor, owned, generation_id),
        owned_partitions=[
            ConsumerProtocolSubscription.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in by_topic(owned.owned).items()
        ],
        generation_id=generation_id,
    ).to_bytes(_SUBSCRIPTION_VERSION)


def _user_data(assignor: str, owned: OwnedPartitions, generation_id: int) -> bytes | None:
    if assignor == COOPERATIVE:
        return CooperativeStickyAssignorUserData(generation=generation_id).encode(0)
    if assignor != STICKY or owned.generation_id is None:
        return None
    return StickyAssignorUserData(
        previous_assignment=[
            StickyAssignorUserData.TopicAssignment(topic=topic, partitions=partitions)
            for topic, partitions in by_topic(owned.last).items()
        ],
        generation=generation_id,
    ).encode(_USER_DATA_VERSIONS[0])


def decode_subscriber(
    assignor: str, member_id: str, group_instance_id: str | None, subscription: bytes
) -> Subscriber:
    """Return a member's subscription in the form that assignors take.

    User data that cannot be decoded is ignored. Raises PeerError if the subscription itself cannot be
    decoded.
    """
    decoded = ConsumerProtocolSubscription.from_bytes(subscription)
    owned = _partitions((topic.topic, topic.partitions) for topic in decoded.owned_partitions)
    generation_id = decoded.generation_id
    if assignor == STICKY:
        owned, generation_id = _previous_assignment(decoded.user_data)
    elif assignor == COOPERATIVE and generation_id < 0:
        generation_id = _cooperative_generation(decoded.user_data)
    generation = generation_id if generation_id >= 0 else None
    return Subscriber(member_id, group_instance_id, frozenset(decoded.topics), owned, generation)


def _previous_assignment(user_data: bytes | None) -> tuple[tuple[TopicPartition, ...], int]:
    for version in _USER_DATA_VERSIONS if user_data else ():
        try:
            decoded = StickyAssignorUserData.decode(version, user_data or b"")
        except PeerError:
            continue
        previous = _partitions((topic.topic, topic.partitions) for topic in decoded.previous_assignment)
        return previous, decoded.generation
    return (), -1


def _cooperative_generation(user_data: bytes | None) -> int:
    try:
        return CooperativeStickyAssignorUserData.decode(0, user_data or b"").generation
    except PeerError:
        return -1


def _partitions(topics: Iterable[tuple[str, Iterable[int]]]) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic, partition) for topic, partitions in topics for partition in partitions)


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Return the partition numbers by topic name."""
    topics: dict[str, list[int]] = {}
    for tp in partitions:
        topics.setdefault(tp.topic, []).append(tp.partition)
    return topics


def encode_assignment(assignment: Iterable[TopicPartition]) -> bytes:
    """Return a member's partitions, encoded as a ConsumerProtocolAssignment."""
    return ConsumerProtocolAssignment(
        assigned_partitions=[
            ConsumerProtocolAssignment.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in by_topic(assignment).items()
        ]
    ).to_bytes(_ASSIGNMENT_VERSION)


def decode_assignment(assignment: bytes) -> list[TopicPartition]:
    """Return the partitions of an encoded ConsumerProtocolAssignment; none for empty bytes. Raises
    PeerError.
    """
    if not assignment:
        return []
    topics = ConsumerProtocolAssignment.from_bytes(assignment).assigned_partitions
    return list(_partitions((topic.topic, topic.partitions) for topic in topics))
