"""Extracts the group member that sent a request, for the proxy's events."""

from __future__ import annotations

from dataclasses import dataclass

from oncelog.wire.messages import (
    ConsumerGroupHeartbeatRequest,
    JoinGroupRequest,
    Message,
    TxnOffsetCommitRequest,
)


@dataclass(frozen=True, slots=True)
class MemberRequest:
    """The member of a group that sent JoinGroup, ConsumerGroupHeartbeat or TxnOffsetCommit."""

    group_id: str
    member_id: str
    """"" before the coordinator has assigned an id, or if the sender names no member."""
    generation: int | None
    """The generation, or KIP-848's member epoch. None in JoinGroup, and if the sender names none."""
    instance_id: str | None
    """The group.instance.id of a static member (KIP-345)."""


def member_request(message: Message) -> MemberRequest | None:
    """Return the member that sent `message`; None if it is a request of another API."""
    match message:
        case JoinGroupRequest():
            return MemberRequest(message.group_id, message.member_id, None, message.group_instance_id)
        case ConsumerGroupHeartbeatRequest():
            return MemberRequest(
                message.group_id, message.member_id, message.member_epoch, message.instance_id
            )
        case TxnOffsetCommitRequest():
            generation = message.generation_id if message.generation_id >= 0 else None
            return MemberRequest(message.group_id, message.member_id, generation, message.group_instance_id)
    return None
