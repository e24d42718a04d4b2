"""LeaveGroup (key 13), versions 0-5: remove members from a group.

From version 3 on a request has several members, and each gets its own error.

Members of the consumer protocol leave by heartbeats, but administrators remove them with this request.
Source: KIP-345; Kafka's GroupMetadataManager.classicGroupLeave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oncelog.broker.coordinators.internal_topic import respond_when_durable
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, UnknownMemberId
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import LeaveGroupRequest, LeaveGroupResponse

KEY = 13
FIRST_BATCHED_VERSION = 3

_Identity = LeaveGroupRequest.MemberIdentity


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: LeaveGroupRequest = request.message
    version = request.header.api_version
    is_batched = version >= FIRST_BATCHED_VERSION
    identities = message.members if is_batched else [_Identity(member_id=message.member_id)]

    def response(codes: Sequence[int]) -> LeaveGroupResponse:
        if not is_batched:
            return LeaveGroupResponse(error_code=codes[0])
        pairs = zip(message.members, codes, strict=True)
        return LeaveGroupResponse(members=[_member_response(identity, code) for identity, code in pairs])

    try:
        request.authorize(ResourceType.GROUP, message.group_id)
        if message.group_id and state.groups.consumers.get(message.group_id):
            return _leave_consumer_group(state, message.group_id, identities, response, now_ms)
        group = state.groups.get_existing(message.group_id)
    except UnknownMemberId as error:
        return response([error.code] * len(identities))
    except BrokerError as error:
        return LeaveGroupResponse(error_code=error.code)
    codes = group.leave([(member.member_id, member.group_instance_id) for member in identities], now_ms)
    state.groups.publish_changes(group, now_ms)
    return response(codes)


def _leave_consumer_group(
    state: BrokerState,
    group_id: str,
    identities: Sequence[_Identity],
    response: Callable[[Sequence[int]], LeaveGroupResponse],
    now_ms: int,
) -> Answer:
    """Remove members of the consumer protocol. Raises the errors of ConsumerGroups.leave."""
    named = [(identity.member_id, identity.group_instance_id) for identity in identities]
    codes, written = state.groups.consumers.leave(group_id, named, now_ms)
    return respond_when_durable(
        state.flush_queue, written, response(codes), lambda error: LeaveGroupResponse(error_code=error.code)
    )


def _member_response(member: _Identity, error_code: int) -> LeaveGroupResponse.MemberResponse:
    return LeaveGroupResponse.MemberResponse(
        member_id=member.member_id, group_instance_id=member.group_instance_id, error_code=error_code
    )
