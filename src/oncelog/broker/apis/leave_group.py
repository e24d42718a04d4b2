"""LeaveGroup (key 13), versions 0-5: members go; from version 3 on several, each with its own error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.errors import BrokerError, UnknownMemberId
from oncelog.rules.authorization import ResourceType
from oncelog.wire.messages import LeaveGroupRequest, LeaveGroupResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 13
FIRST_BATCHED_VERSION = 3


def handle(node: Node, request: Request, now_ms: int) -> LeaveGroupResponse:
    message: LeaveGroupRequest = request.message
    try:
        request.check(ResourceType.GROUP, message.group_id)
        group = node.groups.joined(message.group_id)
    except UnknownMemberId as error:
        if request.header.api_version < FIRST_BATCHED_VERSION:
            return LeaveGroupResponse(error_code=error.code)
        return LeaveGroupResponse(members=[_left(each, error.code) for each in message.members])
    except BrokerError as error:
        return LeaveGroupResponse(error_code=error.code)
    if request.header.api_version < FIRST_BATCHED_VERSION:
        answer = LeaveGroupResponse(error_code=group.leave(message.member_id, None, now_ms))
    else:
        answer = LeaveGroupResponse(
            members=[
                _left(each, group.leave(each.member_id, each.group_instance_id, now_ms))
                for each in message.members
            ]
        )
    node.groups.settle(group, now_ms)
    return answer


def _left(member: LeaveGroupRequest.MemberIdentity, error_code: int) -> LeaveGroupResponse.MemberResponse:
    return LeaveGroupResponse.MemberResponse(
        member_id=member.member_id, group_instance_id=member.group_instance_id, error_code=error_code
    )
