"""ListGroups (key 16), versions 0-5: the groups of this node, filtered by state (v4) and type (v5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.coordinators.groups import CONSUMER_PROTOCOL_TYPE
from oncelog.broker.stepwise import Pace, Work, answer_in_steps, name_cost
from oncelog.errors import NotCoordinator
from oncelog.rules.groups.classic import GroupState
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import ListGroupsRequest, ListGroupsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 16
CLASSIC, CONSUMER = "classic", "consumer"


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    answer: Answer = answer_in_steps(node, _answer_all(node, request))
    return answer


def _answer_all(node: Node, request: Request) -> Work[ListGroupsResponse]:
    message: ListGroupsRequest = request.message
    states = {name.lower() for name in message.states_filter}
    types = {name.lower() for name in message.types_filter}
    may_all = request.may(ResourceType.CLUSTER)
    groups, pace = [], Pace(node.limits.request_step_elements)
    for group_id in sorted(node.groups.group_ids()):
        if pace.next(name_cost(group_id)):
            yield None
        if not (may_all or request.may(ResourceType.GROUP, group_id)):
            continue
        try:
            group = _listed(node, group_id)
        except NotCoordinator:
            continue  # it is being deleted, in steps between which this one lies
        if (
            group is not None
            and (not states or group.group_state.lower() in states)
            and (not types or group.group_type in types)
        ):
            groups.append(group)
    return ListGroupsResponse(groups=groups)


def _listed(node: Node, group_id: str) -> ListGroupsResponse.ListedGroup | None:
    """Return a group's row, None if it was deleted meanwhile. Raises NotCoordinator."""
    if not node.groups.has(group_id):
        return None
    consumers = node.groups.consumers.get(group_id)
    if consumers is not None:
        return ListGroupsResponse.ListedGroup(
            group_id=group_id,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            group_state=consumers.state.value,
            group_type=CONSUMER,
        )
    group = node.groups.get(group_id)
    return ListGroupsResponse.ListedGroup(
        group_id=group_id,
        protocol_type=group.protocol_type or "" if group else "",
        group_state=group.state.value if group else GroupState.EMPTY.value,
        group_type=CLASSIC,
    )
