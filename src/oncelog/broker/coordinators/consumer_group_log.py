"""Encoding of consumer protocol groups as records of `__consumer_offsets`: key versions 3 and 5 to 8."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from oncelog.errors import InvalidRequest, MisuseError
from oncelog.rules.groups.consumer import (
    CURRENT,
    EPOCH,
    MEMBER,
    TARGET,
    TARGET_EPOCH,
    ConsumerGroup,
    ConsumerMember,
    MemberState,
    RecordKey,
    TopicIdPartition,
    in_order,
)
from oncelog.wire.message import version_of
from oncelog.wire.stored import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
)

_GROUP_KEYS: dict[int, type[Any]] = {
    EPOCH: ConsumerGroupMetadataKey,
    TARGET_EPOCH: ConsumerGroupTargetAssignmentMetadataKey,
}
_MEMBER_KEYS: dict[int, type[Any]] = {
    MEMBER: ConsumerGroupMemberMetadataKey,
    TARGET: ConsumerGroupTargetAssignmentMemberKey,
    CURRENT: ConsumerGroupCurrentMemberAssignmentKey,
}
KEY_VERSIONS = _GROUP_KEYS.keys() | _MEMBER_KEYS.keys()
_VALUE_VERSION = 0

_Assigned = ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions
_Target = ConsumerGroupTargetAssignmentMemberValue.TopicPartition


def group_record_keys(group: ConsumerGroup) -> list[RecordKey]:
    """Return the keys of all records of a group without members."""
    return [RecordKey(TARGET_EPOCH), RecordKey(EPOCH)]


def encode_record(
    group: ConsumerGroup, record_key: RecordKey, *, is_gone: bool = False
) -> tuple[bytes, bytes | None]:
    """Return the record for `record_key` as (key, value).

    The value is None (a tombstone) if the group no longer has the data that the record describes. Raises
    InvalidRequest if a string is too long for its field.
    """
    kind, member_id = record_key
    is_gone = is_gone or (kind in _MEMBER_KEYS and member_id not in group.members)
    try:
        if kind in _GROUP_KEYS:
            key = _GROUP_KEYS[kind](group_id=group.group_id).to_bytes(kind)
        else:
            key = _MEMBER_KEYS[kind](group_id=group.group_id, member_id=member_id).to_bytes(kind)
        return key, None if is_gone else _value(group, kind, member_id)
    except MisuseError as error:
        raise InvalidRequest(f"the group cannot be stored: {error}") from error


def _value(group: ConsumerGroup, kind: int, member_id: str) -> bytes:
    if kind == EPOCH:
        return ConsumerGroupMetadataValue(epoch=group.epoch).to_bytes(_VALUE_VERSION)
    if kind == TARGET_EPOCH:
        epoch = group.assignment_epoch
        return ConsumerGroupTargetAssignmentMetadataValue(assignment_epoch=epoch).to_bytes(_VALUE_VERSION)
    if kind == TARGET:
        rows = by_topic_id(group.targets.get(member_id, ()))
        return ConsumerGroupTargetAssignmentMemberValue(
            topic_partitions=[
                _Target(topic_id=topic_id, partitions=partitions) for topic_id, partitions in rows
            ]
        ).to_bytes(_VALUE_VERSION)
    member = group.members[member_id]
    return _member(member) if kind == MEMBER else _current(member)


def _member(member: ConsumerMember) -> bytes:
    return ConsumerGroupMemberMetadataValue(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(in_order(member.topics)),
        # As Kafka, write an empty string for none. With null, Kafka 3.9 fails when the member joins again.
        # See test_a_member_without_a_pattern_is_stored_as_by_kafka.
        subscribed_topic_regex=member.regex or "",
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        server_assignor=member.server_assignor,
    ).to_bytes(_VALUE_VERSION)


def _current(member: ConsumerMember) -> bytes:
    def rows(tps: Iterable[TopicIdPartition]) -> list[_Assigned]:
        return [
            _Assigned(topic_id=topic_id, partitions=partitions) for topic_id, partitions in by_topic_id(tps)
        ]

    return ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=member.epoch,
        previous_member_epoch=member.previous_epoch,
        state=int(member.state),
        assigned_partitions=rows(member.assigned),
        partitions_pending_revocation=rows(member.revoking),
    ).to_bytes(_VALUE_VERSION)


def by_topic_id(tps: Iterable[TopicIdPartition]) -> list[tuple[bytes, list[int]]]:
    """Return pairs of a topic id and its partition indexes, both sorted."""
    topics: dict[bytes, list[int]] = {}
    for topic_id, partition in sorted(tps):
        topics.setdefault(topic_id, []).append(partition)
    return list(topics.items())


def topic_id_partitions(rows: Iterable[tuple[bytes, Iterable[int]]]) -> frozenset[TopicIdPartition]:
    """Return the (topic id, partition index) pairs of `rows`: the inverse of `by_topic_id`."""
    return frozenset(
        (bytes(topic_id), partition) for topic_id, partitions in rows for partition in partitions
    )


def parse_key(key: bytes) -> tuple[str, RecordKey]:
    """Return the group id and the RecordKey of a record's key. Raises PeerError."""
    kind = version_of(key)
    if kind in _GROUP_KEYS:
        return _GROUP_KEYS[kind].from_bytes(key).group_id, RecordKey(kind)
    read = _MEMBER_KEYS[kind].from_bytes(key)
    return read.group_id, RecordKey(kind, read.member_id)


def replay_record(group: ConsumerGroup, record_key: RecordKey, data: bytes | None) -> None:
    """Apply a stored record to the group. A member's records may come in any order. Raises PeerError."""
    kind, member_id = record_key
    if kind == EPOCH:
        group.epoch = ConsumerGroupMetadataValue.from_bytes(data).epoch if data else 0
    elif kind == TARGET_EPOCH:
        read = ConsumerGroupTargetAssignmentMetadataValue.from_bytes(data) if data else None
        group.assignment_epoch = read.assignment_epoch if read else 0
    elif kind == TARGET:
        group.targets.pop(member_id, None)
        if data is not None:
            rows = ConsumerGroupTargetAssignmentMemberValue.from_bytes(data).topic_partitions
            group.targets[member_id] = topic_id_partitions((row.topic_id, row.partitions) for row in rows)
    elif kind == MEMBER and data is None:
        group.remove_restored(member_id)
    elif data is not None:
        member = group.members.get(member_id) or ConsumerMember(member_id)
        group.restore(_with_member(member, data) if kind == MEMBER else _with_current(member, data))


def _with_member(member: ConsumerMember, data: bytes) -> ConsumerMember:
    read = ConsumerGroupMemberMetadataValue.from_bytes(data)
    return replace(
        member,
        instance_id=read.instance_id,
        rack_id=read.rack_id,
        client_id=read.client_id,
        client_host=read.client_host,
        topics=frozenset(read.subscribed_topic_names),
        regex=read.subscribed_topic_regex or None,
        rebalance_timeout_ms=read.rebalance_timeout_ms,
        server_assignor=read.server_assignor,
    )


def _with_current(member: ConsumerMember, data: bytes) -> ConsumerMember:
    read = ConsumerGroupCurrentMemberAssignmentValue.from_bytes(data)
    return replace(
        member,
        epoch=read.member_epoch,
        previous_epoch=read.previous_member_epoch,
        state=MemberState(read.state),
        assigned=topic_id_partitions((row.topic_id, row.partitions) for row in read.assigned_partitions),
        revoking=topic_id_partitions(
            (row.topic_id, row.partitions) for row in read.partitions_pending_revocation
        ),
    )
