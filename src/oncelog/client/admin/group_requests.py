"""Builds requests about groups and reads their responses.

Source: behaviour T14 (docs/behaviours.md); KIP-518, KIP-848.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from oncelog.client.admin.types import DeletedOffset
from oncelog.client.group.core import PROTOCOL_TYPE
from oncelog.client.group.subscription import decode_assignment
from oncelog.errors import PeerError, error_for_code, named_text, raise_for_code
from oncelog.types import TopicPartition
from oncelog.wire.messages import (
    ConsumerGroupDescribeResponse,
    DeleteGroupsResponse,
    DescribeGroupsResponse,
    ListGroupsResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
)


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group's id, Kafka's name of its state, and the node id of its coordinator.

    `protocol_type` is "consumer" for groups of consumers. It is "" for a group that never had a member.
    """

    group_id: str
    protocol_type: str
    state: str
    coordinator_id: int


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a group.

    `partitions` is the member's assignment. It is empty if only the member's own client can decode the
    assignment.
    """

    member_id: str
    group_instance_id: str | None
    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group with its members. `assignor` is "" while no assignor is chosen."""

    group_id: str
    state: str
    protocol_type: str
    assignor: str
    members: tuple[GroupMember, ...]


def listed_groups(node_id: int, response: ListGroupsResponse) -> list[GroupListing]:
    """Return the groups that broker `node_id` coordinates. Raises BrokerError."""
    raise_for_code(response.error_code, f"listing groups of broker {node_id}")
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, node_id)
        for group in response.groups
    ]


def described_classic_group(group_id: str, response: DescribeGroupsResponse) -> GroupDescription:
    """Return the requested group of the classic protocol. Raises BrokerError."""
    group = response.groups[0]
    raise_for_code(group.error_code, named_text(group.error_code, f"group {group_id!r}"))
    has_consumers = group.protocol_type == PROTOCOL_TYPE
    return GroupDescription(
        group.group_id,
        group.group_state,
        group.protocol_type,
        group.protocol_data,
        tuple(
            GroupMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host.removeprefix("/"),
                _assigned_partitions(member.member_assignment) if has_consumers else (),
            )
            for member in group.members
        ),
    )


def described_consumer_group(group_id: str, response: ConsumerGroupDescribeResponse) -> GroupDescription:
    """Return the requested group of the consumer protocol (KIP-848). Raises BrokerError."""
    group = response.groups[0]
    raise_for_code(group.error_code, f"group {group_id!r}")
    return GroupDescription(
        group.group_id,
        group.group_state,
        PROTOCOL_TYPE,
        group.assignor_name,
        tuple(
            GroupMember(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host.removeprefix("/"),
                tuple(
                    TopicPartition(topic.topic_name, partition)
                    for topic in (member.assignment.topic_partitions if member.assignment else ())
                    for partition in topic.partitions
                ),
            )
            for member in group.members
        ),
    )


def delete_offsets_request(group_id: str, tps: Collection[TopicPartition]) -> OffsetDeleteRequest:
    """Return a request that deletes the group's committed offsets of these partitions."""
    message = OffsetDeleteRequest
    topics = {tp.topic: message.OffsetDeleteRequestTopic(name=tp.topic, partitions=[]) for tp in tps}
    for tp in tps:
        partition = message.OffsetDeleteRequestPartition(partition_index=tp.partition)
        topics[tp.topic].partitions.append(partition)
    return OffsetDeleteRequest(group_id=group_id, topics=list(topics.values()))


def deleted_offsets(group_id: str, response: OffsetDeleteResponse) -> dict[TopicPartition, DeletedOffset]:
    """Return the result of each partition. Raises the error of the group."""
    code = response.error_code
    raise_for_code(code, named_text(code, f"group {group_id!r}"))
    results = {}
    for topic in response.topics:
        for row in topic.partitions:
            tp = TopicPartition(topic.name, row.partition_index)
            what = f"offset of group {group_id!r} for {tp}"
            error = error_for_code(row.error_code, what) if row.error_code else None
            results[tp] = DeletedOffset(tp, error)
    return results


def check_group_deleted(group_id: str, response: DeleteGroupsResponse) -> None:
    """Raise the error of the response; return if the group was deleted."""
    code = response.results[0].error_code
    raise_for_code(code, named_text(code, f"group {group_id!r}"))


def _assigned_partitions(assignment: bytes) -> tuple[TopicPartition, ...]:
    try:
        return tuple(decode_assignment(assignment))
    except PeerError:  # clients may use their own format, which only they can decode
        return ()
