"""A member of a group without I/O: the classic protocol's requests, offsets, and what answers mean.

Source: Kafka's ConsumerCoordinator, AbstractCoordinator; JoinGroup, SyncGroup, Heartbeat, OffsetCommit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from oncelog.client.group.subscription import (
    Holding,
    by_topic,
    decode_subscriber,
    encode_share,
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
MAX_COMMIT_VERSION = MAX_FETCH_VERSION = 9
LAST_RETENTION_VERSION = 4
"""Of OffsetCommit: the last that says how long an offset is kept."""
"""Later versions name topics by id."""


def next_after(error: OncelogError, request: GroupRequest) -> GroupAction:
    """Return what follows from an error of the coordinator, or from a missing answer."""
    if isinstance(error, (DisconnectedError, TimedOut)):
        return GroupAction.FIND
    return group_action(error.code, request) if isinstance(error, BrokerError) else GroupAction.RAISE


class Joined(NamedTuple):
    """A generation as a member was told of it. `subscribers`: for the leader, who assigns."""

    member: ConsumerGroupMetadata
    assignor: str
    subscribers: tuple[Subscriber, ...]


def join_request(
    settings: Settings, member_id: str, topics: Iterable[str], holding: Holding
) -> JoinGroupRequest:
    """Join, offering every assignor of partition.assignment.strategy."""
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
                name=name, metadata=encode_subscription(name, topics, holding)
            )
            for name in names
        ],
    )


def joined_from(settings: Settings, answer: JoinGroupResponse) -> Joined:
    """What an answer without an error says. Raises PeerError on a subscription that cannot be read."""
    group, instance = settings["group.id"], settings["group.instance.id"]
    member = ConsumerGroupMetadata(group, answer.generation_id, answer.member_id, instance)
    is_leader = answer.leader == answer.member_id and not answer.skip_assignment
    assignor = answer.protocol_name or ""
    subscribers = tuple(
        decode_subscriber(assignor, each.member_id, each.group_instance_id, each.metadata)
        for each in (answer.members if is_leader else ())
    )
    return Joined(member, assignor, subscribers)


def sync_request(joined: Joined, partition_counts: Mapping[str, int]) -> SyncGroupRequest:
    """Ask for the share; as leader bring everyone's. `partition_counts`: of the topics subscribed to."""
    shares = ASSIGNORS[joined.assignor](joined.subscribers, partition_counts) if joined.subscribers else {}
    return SyncGroupRequest(
        group_id=joined.member.group_id,
        generation_id=joined.member.generation_id,
        member_id=joined.member.member_id,
        group_instance_id=joined.member.group_instance_id,
        protocol_type=PROTOCOL_TYPE,
        protocol_name=joined.assignor,
        assignments=[
            SyncGroupRequest.SyncGroupRequestAssignment(member_id=member_id, assignment=encode_share(share))
            for member_id, share in shares.items()
        ],
    )


def heartbeat_request(member: ConsumerGroupMetadata) -> HeartbeatRequest:
    """The member is there."""
    return HeartbeatRequest(
        group_id=member.group_id,
        generation_id=member.generation_id,
        member_id=member.member_id,
        group_instance_id=member.group_instance_id,
    )


def leave_request(member: ConsumerGroupMetadata) -> LeaveGroupRequest:
    """The member goes."""
    identity = LeaveGroupRequest.MemberIdentity(member_id=member.member_id)
    return LeaveGroupRequest(group_id=member.group_id, member_id=member.member_id, members=[identity])


def commit_request(
    member: ConsumerGroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
) -> OffsetCommitRequest:
    """The group's positions, committed by the member."""
    topics: dict[str, list[OffsetCommitRequest.OffsetCommitRequestPartition]] = {}
    for at, each in offsets.items():
        topics.setdefault(at.topic, []).append(
            OffsetCommitRequest.OffsetCommitRequestPartition(
                partition_index=at.partition,
                committed_offset=each.offset,
                committed_leader_epoch=-1 if each.leader_epoch is None else each.leader_epoch,
                committed_metadata=each.metadata,
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


def commit_error(answer: OffsetCommitResponse) -> BrokerError | None:
    """The first partition's error."""
    for topic in answer.topics:
        for partition in topic.partitions:
            if partition.error_code:
                tp = TopicPartition(topic.name, partition.partition_index)
                return error_for_code(partition.error_code, refused_partition(partition.error_code, tp))
    return None


def refused_partition(code: int, tp: TopicPartition) -> str:
    """Return what an error of one partition is about, in words."""
    if code == UnknownTopicOrPartition.code:
        return f"topic {tp.topic!r} does not exist, or has no partition {tp.partition}: create it first"
    return f"partition {tp}"


def committed_request(
    group_id: str, partitions: Iterable[TopicPartition], *, is_stable: bool
) -> OffsetFetchRequest:
    """What the group has committed. `is_stable`: wait for transactions that may commit."""
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
    answer: OffsetFetchResponse,
) -> tuple[BrokerError | None, dict[TopicPartition, OffsetAndMetadata]]:
    """The first error, and the offsets of partitions that have one."""
    code, topics = answer.error_code, list(answer.topics)
    for group in answer.groups:
        code = code or group.error_code
        topics += group.topics  # type: ignore[arg-type]  # the same fields under another name
    found = {}
    for topic in topics:
        for part in topic.partitions:
            code = code or part.error_code
            if part.committed_offset >= 0:
                epoch = part.committed_leader_epoch if part.committed_leader_epoch >= 0 else None
                at = TopicPartition(topic.name, part.partition_index)
                found[at] = OffsetAndMetadata(part.committed_offset, epoch, part.metadata or "")
    return (error_for_code(code) if code else None), found
