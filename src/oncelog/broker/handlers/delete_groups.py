"""DeleteGroups (key 42), versions 0-2: delete groups that have no members, and their offsets.

Errors: NON_EMPTY_GROUP (the group has members), GROUP_ID_NOT_FOUND. As in Kafka, a group that is named twice
gets one result. Source: KIP-229; Kafka's GroupCoordinatorService.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import AppendHandle, respond_when_durable
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, name_cost, respond_in_steps
from oncelog.errors import BrokerError
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import DeleteGroupsRequest, DeleteGroupsResponse

KEY = 42


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    # Finish even if the client has disconnected: no group may stay half deleted.
    answer: Answer = respond_in_steps(state.slots, _delete_all(state, request, now_ms), is_cancellable=False)
    return answer


def _delete_all(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: DeleteGroupsRequest = request.message
    written: list[AppendHandle] = []
    response, budget = DeleteGroupsResponse(results=[]), state.step_budget()
    for group_id in dict.fromkeys(message.groups_names):
        result = DeleteGroupsResponse.DeletableGroupResult(group_id=group_id)
        response.results.append(result)
        try:
            request.authorize(ResourceType.GROUP, group_id)
            last = yield from state.groups.delete(group_id, budget, now_ms)
        except BrokerError as error:
            result.error_code = error.code
        else:
            written.extend([last] if last else [])
        if budget.spend(name_cost(group_id)):
            yield None

    def refusal(error: BrokerError) -> DeleteGroupsResponse:
        for result in response.results:
            result.error_code = result.error_code or error.code
        return response

    return respond_when_durable(state.flush_queue, written, response, refusal)
