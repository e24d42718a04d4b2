"""DescribeGroups (key 15), versions 0-6: classic groups, their members and their assignments.

A group that does not exist, or that uses the consumer protocol, is returned in the state Dead. From version 6
on, such a group also gets GROUP_ID_NOT_FOUND. Source: KIP-1043; Kafka's GroupCoordinatorService.
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import allowed_bits
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, name_cost, respond_in_steps
from oncelog.errors import GroupAuthorizationFailed, GroupIdNotFound, NotCoordinator
from oncelog.rules.groups.classic import ClassicGroup, GroupState
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import DescribeGroupsRequest, DescribeGroupsResponse

KEY = 15
FIRST_NOT_FOUND_VERSION = 6

_Group = DescribeGroupsResponse.DescribedGroup


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _describe_all(state, request))
    return answer


def _describe_all(state: BrokerState, request: Request) -> Work[DescribeGroupsResponse]:
    message: DescribeGroupsRequest = request.message
    response, budget = DescribeGroupsResponse(groups=[]), state.step_budget()
    for group_id in dict.fromkeys(message.groups):
        group = _describe_if_authorized(state, request, group_id)
        if message.include_authorized_operations and not group.error_code:
            group.authorized_operations = allowed_bits(request.access, ResourceType.GROUP, group_id)
        response.groups.append(group)
        if budget.spend(name_cost(group_id) + len(group.members)):
            yield None
    return response


def _describe_if_authorized(state: BrokerState, request: Request, group_id: str) -> _Group:
    if not request.is_authorized(ResourceType.GROUP, group_id):
        return _Group(group_id=group_id, error_code=GroupAuthorizationFailed.code)
    try:
        return _describe(state, group_id, request.header.api_version)
    except NotCoordinator as error:
        return _Group(group_id=group_id, error_code=error.code, error_message=error.message)


def _describe(state: BrokerState, group_id: str, version: int) -> _Group:
    group = state.groups.get(group_id)
    if group is not None:
        return _Group(
            group_id=group_id,
            group_state=group.state.value,
            protocol_type=group.protocol_type or "",
            protocol_data=group.protocol_name or "" if group.state is GroupState.STABLE else "",
            members=_members(group),
        )
    is_consumer = state.groups.consumers.get(group_id) is not None
    if state.groups.offsets.has(group_id) and not is_consumer:
        return _Group(group_id=group_id, group_state=GroupState.EMPTY.value)
    missing = _Group(group_id=group_id, group_state=GroupState.DEAD.value)
    if version >= FIRST_NOT_FOUND_VERSION:
        reason = "is not a classic group" if is_consumer else "not found"
        missing.error_code, missing.error_message = GroupIdNotFound.code, f"Group {group_id} {reason}."
    return missing


def _members(group: ClassicGroup) -> list[DescribeGroupsResponse.DescribedGroupMember]:
    is_stable = group.state is GroupState.STABLE
    return [
        DescribeGroupsResponse.DescribedGroupMember(
            member_id=member.member_id,
            group_instance_id=member.group_instance_id,
            client_id=member.client_id,
            client_host=member.client_host,
            member_metadata=member.metadata(group.protocol_name) if is_stable else b"",
            member_assignment=member.assignment,
        )
        for member in group.members.values()
    ]
