"""ListGroups (key 16), versions 0-5: the groups of this node, filtered by state (v4) and type (v5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.groups import CONSUMER_PROTOCOL_TYPE
from oncelog.rules.authorization import ResourceType
from oncelog.rules.group_member import GroupState
from oncelog.wire.messages import ListGroupsRequest, ListGroupsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 16
CLASSIC, CONSUMER = "classic", "consumer"


def handle(node: Node, request: Request, now_ms: int) -> ListGroupsResponse:
    message: ListGroupsRequest = request.message
    states = {name.lower() for name in message.states_filter}
    types = {name.lower() for name in message.types_filter}
    may_all = request.may(ResourceType.CLUSTER)
    seen = (one for one in node.groups.group_ids() if may_all or request.may(ResourceType.GROUP, one))
    listed = (_listed(node, group_id) for group_id in sorted(seen))
    return ListGroupsResponse(
        groups=[
            group
            for group in listed
            if (not states or group.group_state.lower() in states)
            and (not types or group.group_type in types)
        ]
    )


def _listed(node: Node, group_id: str) -> ListGroupsResponse.ListedGroup:
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
