"""Builds group requests and reads their responses, without I/O: the classic protocol, and committed offsets.

Source: Kafka's ConsumerCoordinator, AbstractCoordinator; JoinGroup, SyncGroup, Heartbeat, OffsetCommit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from oncelog.client.group.subscription import (
    OwnedPartitions,
    by_topic,
    decode_subscriber,
    encode_assignment,
    encode_subscription,
)
from oncelog.errors import (
    BrokerError,
    DisconnectedError,
    OncelogError,
    TimedOut,
    UnknownTopicOrPartition,
    error_for_code,
)
from oncelog.rules.groups.assignors import ASSIGNORS, Subscriber
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest, group_action
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from oncelog.wire.messages import (
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    SyncGroupRequest,
)

PROTOCOL_TYPE = "consumer"
NOBODY = ConsumerGroupMetadata("")
MAX_OFFSET_COMMIT_VERSION = MAX_OFFSET_FETCH_VERSION = 9
"""The last versions of OffsetCommit and OffsetFetch that identify topics by name; later ones use ids."""
LAST_RETENTION_VERSION = 4
"""The last version of OffsetCommit with a retention time for offsets."""


def next_after(error: OncelogError, request: GroupRequest) -> GroupAction:
    """Return the reaction to an error of the coordinator, or to a missing response."""
    if isinstance(error, (DisconnectedError, TimedOut)):
        return GroupAction.FIND
    return group_action(error.code, request) if isinstance(error, BrokerError) else GroupAction.RAISE


class Joined(NamedTuple):
    """The content of a JoinGroup response. `subscribers` is empty unless the member is the leader."""

    member: ConsumerGroupMetadata
    assignor: str
    subscribers: tuple[Subscriber, ...]


def join_request(
    settings: Settings, member_id: str, topics: Iterable[str], owned: OwnedPartitions
) -> JoinGroupRequest:
    """Return a JoinGroup request that offers every assignor of partition.assignment.strategy."""
    names, topics = settings["partition.assignment.strategy"], frozenset(topics)
    return JoinGroupRequest(
        group_id=settings["group.id"],
        session_timeout_ms=settings["session.timeout.ms"],
        rebalance_timeout_ms=settings["max.poll.interval.ms"],
        member_id=member_id,
        group_instance_id=settings["group.instance.id"],
        protocol_type=PROTOCOL_TYPE,
        protocols=[
            JoinGroupRequest.JoinGroupRequestProtocol(
                name=name, metadata=encode_subscription(name, topics, owned)
            )
            for name in names
        ],
    )


def joined_from(settings: Settings, response: JoinGroupResponse) -> Joined:
    """Return the content of a JoinGroup response that has no error.

    Raises PeerError if a member's subscription cannot be decoded.
    """
    group, instance = settings["group.id"], settings["group.instance.id"]
    identity = ConsumerGroupMetadata(group, response.generation_id, response.member_id, instance)
    is_leader = response.leader == response.member_id and not response.skip_assignment
    assignor = response.protocol_name or ""
    subscribers = tuple(
        decode_subscriber(assignor, member.member_id, member.group_instance_id, member.metadata)
        for member in (response.members if is_leader else ())
    )
    return Joined(identity, assignor, subscribers)


def sync_request(joined: Joined, partition_counts: Mapping[str, int]) -> SyncGroupRequest:
    """Return a SyncGroup request. The request of the group's leader contains all assignments.

    `partition_counts` has the number of partitions of each subscribed topic.
    """
    assignments = (
        ASSIGNORS[joined.assignor](joined.subscribers, partition_counts) if joined.subscribers else {}
    )
    return SyncGroupRequest(
        group_id=joined.member.group_id,
        generation_id=joined.member.generation_id,
        member_id=joined.member.member_id,
        group_instance_id=joined.member.group_instance_id,
        protocol_type=PROTOCOL_TYPE,
        protocol_name=joined.assignor,
        assignments=[
            SyncGroupRequest.SyncGroupRequestAssignment(
                member_id=member_id, assignment=encode_assignment(partitions)
            )
            for member_id, partitions in assignments.items()
        ],
    )


def heartbeat_request(member: ConsumerGroupMetadata) -> HeartbeatRequest:
    """Return a Heartbeat request of `member`."""
    return HeartbeatRequest(
        group_id=member.group_id,
        generation_id=member.generation_id,
        member_id=member.member_id,
        group_instance_id=member.group_instance_id,
    )


def leave_request(member: ConsumerGroupMetadata) -> LeaveGroupRequest:
    """Return a LeaveGroup request of `member`."""
    identity = LeaveGroupRequest.MemberIdentity(member_id=member.member_id)
    return LeaveGroupRequest(group_id=member.group_id, member_id=member.member_id, members=[identity])


def commit_request(
    member: ConsumerGroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
) -> OffsetCommitRequest:
    """Return an OffsetCommit request of `member`."""
    topics: dict[str, list[OffsetCommitRequest.OffsetCommitRequestPartition]] = {}
    for tp, offset in offsets.items():
        topics.setdefault(tp.topic, []).append(
            OffsetCommitRequest.OffsetCommitRequestPartition(
                partition_index=tp.partition,
                committed_offset=offset.offset,
                committed_leader_epoch=-1 if offset.leader_epoch is None else offset.leader_epoch,
                committed_metadata=offset.metadata,
            )
        )
    return OffsetCommitRequest(
        group_id=member.group_id,
        generation_id_or_member_epoch=member.generation_id,
        member_id=member.member_id,
        group_instance_id=member.group_instance_id,
        retention_time_ms=-1,
        topics=[
            OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=partitions)
            for topic, partitions in topics.items()
        ],
    )


def commit_error(response: OffsetCommitResponse) -> BrokerError | None:
    """Return the first error of a partition; None if there is none."""
    for topic in response.topics:
        for partition in topic.partitions:
            if partition.error_code:
                tp = TopicPartition(topic.name, partition.partition_index)
                return error_for_code(partition.error_code, refused_partition(partition.error_code, tp))
    return None


def refused_partition(code: int, tp: TopicPartition) -> str:
    """Return the error text for an error of one partition."""
    if code == UnknownTopicOrPartition.code:
        return f"topic {tp.topic!r} does not exist or has no partition {tp.partition}: create it first"
    return f"partition {tp}"


def committed_request(
    group_id: str, partitions: Iterable[TopicPartition], *, is_stable: bool
) -> OffsetFetchRequest:
    """Return an OffsetFetch request for the group's committed offsets.

    With `is_stable`, the coordinator answers UNSTABLE_OFFSET_COMMIT while an open transaction may still
    commit offsets of these partitions.
    """
    topics = by_topic(partitions)
    return OffsetFetchRequest(
        group_id=group_id,
        topics=[
            OffsetFetchRequest.OffsetFetchRequestTopic(name=topic, partition_indexes=indexes)
            for topic, indexes in topics.items()
        ],
        groups=[
            OffsetFetchRequest.OffsetFetchRequestGroup(
                group_id=group_id,
                topics=[
                    OffsetFetchRequest.OffsetFetchRequestTopics(name=topic, partition_indexes=indexes)
                    for topic, indexes in topics.items()
                ],
            )
        ],
        require_stable=is_stable,
    )


def committed_from(
    response: OffsetFetchResponse,
) -> tuple[BrokerError | None, dict[TopicPartition, OffsetAndMetadata]]:
    """Return the first error (None if there is none), and the committed offsets.

    Partitions without a committed offset are left out.
    """
    code, topics = response.error_code, list(response.topics)
    for group in response.groups:
        code = code or group.error_code
        topics += group.topics  # type: ignore[arg-type]  # the same fields under another name
    offsets = {}
    for topic in topics:
        for partition in topic.partitions:
            code = code or partition.error_code
            if partition.committed_offset >= 0:
                epoch = partition.committed_leader_epoch if partition.committed_leader_epoch >= 0 else None
                tp = TopicPartition(topic.name, partition.partition_index)
                offsets[tp] = OffsetAndMetadata(partition.committed_offset, epoch, partition.metadata or "")
    return (error_for_code(code) if code else None), offsets
