"""ListGroups (key 16), versions 0-5: the groups of this broker.

Version 4 and later filter them by state, version 5 by type.

Groups that the client may not describe are left out. Source: KIP-518, KIP-848; Kafka's
GroupCoordinatorService.
"""

from __future__ import annotations

from oncelog.broker.coordinators.groups import CONSUMER_PROTOCOL_TYPE
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, name_cost, respond_in_steps, sorted_in_steps
from oncelog.errors import NotCoordinator
from oncelog.rules.groups.classic import GroupState
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import ListGroupsRequest, ListGroupsResponse

KEY = 16
CLASSIC, CONSUMER = "classic", "consumer"


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[ListGroupsResponse]:
    message: ListGroupsRequest = request.message
    states = {name.lower() for name in message.states_filter}
    types = {name.lower() for name in message.types_filter}
    may_all = request.is_authorized(ResourceType.CLUSTER)
    groups, budget = [], state.step_budget()
    group_ids = yield from sorted_in_steps(state.groups.group_ids(), budget)
    for group_id in group_ids:
        if budget.spend(name_cost(group_id)):
            yield None
        if not (may_all or request.is_authorized(ResourceType.GROUP, group_id)):
            continue
        try:
            group = _list_group(state, group_id)
        except NotCoordinator:
            # Another request is deleting this group in steps, so leave it out.
            continue
        if (
            group is not None
            and (not states or group.group_state.lower() in states)
            and (not types or group.group_type in types)
        ):
            groups.append(group)
    return ListGroupsResponse(groups=groups)


def _list_group(state: BrokerState, group_id: str) -> ListGroupsResponse.ListedGroup | None:
    """Return a group's entry; None if the group was deleted since its id was listed.

    Raises NotCoordinator.
    """
    if not state.groups.has(group_id):
        return None
    consumers = state.groups.consumers.get(group_id)
    if consumers is not None:
        return ListGroupsResponse.ListedGroup(
            group_id=group_id,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            group_state=consumers.state.value,
            group_type=CONSUMER,
        )
    group = state.groups.get(group_id)
    return ListGroupsResponse.ListedGroup(
        group_id=group_id,
        protocol_type=group.protocol_type or "" if group else "",
        group_state=group.state.value if group else GroupState.EMPTY.value,
        group_type=CLASSIC,
    )
