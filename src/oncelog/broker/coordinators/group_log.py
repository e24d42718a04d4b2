"""Encoding of a classic group as a record of `__consumer_offsets`, in Kafka's format."""

from __future__ import annotations

from oncelog.errors import InvalidRequest, MessageTooLarge, MisuseError
from oncelog.rules.groups.classic import ClassicGroup, GroupState, JoinRequest, Member
from oncelog.wire.stored import GroupMetadataKey, GroupMetadataValue

_KEY_VERSION, _VALUE_VERSION = 2, 3


def group_key(group_id: str) -> bytes:
    """Return the record key of a classic group. Raises InvalidRequest if the group id is too long."""
    try:
        return GroupMetadataKey(group=group_id).to_bytes(_KEY_VERSION)
    except MisuseError as error:
        raise InvalidRequest(f"the group cannot be stored: {error}") from error


def encode_group(group: ClassicGroup, max_bytes: int) -> tuple[bytes, bytes]:
    """Return the record of the group as (key, value). It contains the newest assignment of each member, which
    the members get only once the record is durable.

    Raises InvalidRequest if a string is too long for its field, and MessageTooLarge if the metadata and the
    assignments alone exceed `max_bytes`.
    """
    # Check this first: a request may have 100 MB of metadata or assignments, and encoding 99 MB takes 0.3 s.
    # See test_metadata_that_is_too_large_for_any_record_is_not_encoded.
    data_bytes = sum(
        len(member.metadata(group.protocol_name)) + len(member.assignment)
        for member in group.members.values()
    )
    if data_bytes > max_bytes:
        raise MessageTooLarge(f"the group's record has {data_bytes} bytes or more; the limit is {max_bytes}")
    value = GroupMetadataValue(
        protocol_type=group.protocol_type or "",
        generation=group.generation_id,
        protocol=group.protocol_name,
        leader=group.members.leader_id if group.members else None,
        current_state_timestamp=group.state_since_ms,
        members=[_encode_member(member, group.protocol_name) for member in group.members.values()],
    )
    try:
        return group_key(group.group_id), value.to_bytes(_VALUE_VERSION)
    except MisuseError as error:
        raise InvalidRequest(f"the group cannot be stored: {error}") from error


def check_member(group_id: str, member_id: str, request: JoinRequest, max_bytes: int) -> None:
    """Raise an error if even a group with only this member would not fit into a record.

    Raises InvalidRequest if a string is too long for its field, MessageTooLarge if the metadata is too large.
    """
    protocols = request.protocols or (("", b""),)
    name = max((name for name, _ in protocols), key=len)
    longest = max((data for _, data in protocols), key=len)
    group = ClassicGroup(group_id, 0)
    group.protocol_type, group.protocol_name, group.members.leader_id = request.protocol_type, name, member_id
    group.members.add(
        Member(
            member_id,
            request.group_instance_id,
            request.client_id,
            request.client_host,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            ((name, longest),),
        )
    )
    key, value = encode_group(group, max_bytes)
    if len(key) + len(value) > max_bytes:
        raise MessageTooLarge(f"the member's record has {len(value)} bytes; the limit is {max_bytes}")


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
    """Restore the stored state of a new `group` from a record's value.

    The sessions of its members start at `now_ms`. Raises PeerError.
    """
    value = GroupMetadataValue.from_bytes(data)
    group.state = GroupState.STABLE if value.members else GroupState.EMPTY
    group.state_since_ms = value.current_state_timestamp if value.current_state_timestamp >= 0 else now_ms
    group.generation_id, group.members.leader_id = value.generation, value.leader
    group.protocol_type, group.protocol_name = value.protocol_type or None, value.protocol
    for stored in value.members:
        group.restore_member(_decode_member(stored, value.protocol), now_ms)


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
