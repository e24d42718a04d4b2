"""A classic group as a record of `__consumer_offsets`, in Kafka's format."""

from __future__ import annotations

from oncelog.rules.group import ClassicGroup
from oncelog.rules.group_member import GroupState, Member
from oncelog.wire.stored import GroupMetadataKey, GroupMetadataValue

_KEY_VERSION, _VALUE_VERSION = 2, 3


def group_key(group_id: str) -> bytes:
    """The record's key."""
    return GroupMetadataKey(group=group_id).to_bytes(_KEY_VERSION)


def encode_group(group: ClassicGroup) -> tuple[bytes, bytes]:
    """Key and value of the group as it is, with the assignment that its members are about to be told."""
    value = GroupMetadataValue(
        protocol_type=group.protocol_type or "",
        generation=group.generation_id,
        protocol=group.protocol_name,
        leader=group.leader_id if group.members else None,
        current_state_timestamp=group.state_since_ms,
        members=[_encode_member(member, group.protocol_name) for member in group.members.values()],
    )
    return group_key(group.group_id), value.to_bytes(_VALUE_VERSION)


def _encode_member(member: Member, protocol_name: str | None) -> GroupMetadataValue.MemberMetadata:
    return GroupMetadataValue.MemberMetadata(
        member_id=member.member_id,
        group_instance_id=member.group_instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout=member.rebalance_timeout_ms,
        session_timeout=member.session_timeout_ms,
        subscription=member.metadata(protocol_name),
        assignment=member.assignment,
    )


def decode_group(group: ClassicGroup, data: bytes, now_ms: int) -> None:
    """Make a new group what was stored; its members' sessions begin now. Raises PeerError."""
    value = GroupMetadataValue.from_bytes(data)
    group.state = GroupState.STABLE if value.members else GroupState.EMPTY
    group.state_since_ms = value.current_state_timestamp if value.current_state_timestamp >= 0 else now_ms
    group.generation_id, group.leader_id = value.generation, value.leader
    group.protocol_type, group.protocol_name = value.protocol_type or None, value.protocol
    for stored in value.members:
        member = _decode_member(stored, value.protocol)
        member.touch(now_ms)
        group.members[member.member_id] = member
        if member.group_instance_id is not None:
            group.static_members[member.group_instance_id] = member.member_id


def _decode_member(stored: GroupMetadataValue.MemberMetadata, protocol: str | None) -> Member:
    rebalance_ms = stored.rebalance_timeout if stored.rebalance_timeout >= 0 else stored.session_timeout
    return Member(
        stored.member_id,
        stored.group_instance_id,
        stored.client_id,
        stored.client_host,
        stored.session_timeout,
        rebalance_ms,
        ((protocol or "", stored.subscription),),
        stored.assignment,
        is_new=False,
        has_synced=True,
    )
