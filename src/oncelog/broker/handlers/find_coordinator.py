"""FindCoordinator (key 10), versions 0-6: the coordinator of a group or a transactional id.

Key types 0 (group) and 1 (transactional id) get this broker. Type 2 (share groups) and others get
INVALID_REQUEST, which clients do not retry. Source: Kafka's KafkaApis.handleFindCoordinatorRequest.
"""

from __future__ import annotations

import functools
from typing import Any

from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import refusal_of
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import InvalidRequest
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import FindCoordinatorRequest, FindCoordinatorResponse

KEY = 10
GROUP, TRANSACTION = 0, 1


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _find_all(state, request))
    return answer


def _find_all(state: BrokerState, request: Request) -> Work[FindCoordinatorResponse]:
    message: FindCoordinatorRequest = request.message
    coordinator = functools.partial(_coordinator, state, request, message.key_type)
    if request.header.api_version < 4:
        return FindCoordinatorResponse(**coordinator(message.key))
    response = FindCoordinatorResponse(coordinators=[])
    budget = state.step_budget()
    for key in message.coordinator_keys:
        response.coordinators.append(FindCoordinatorResponse.Coordinator(key=key, **coordinator(key)))
        if budget.spend():
            yield None
    return response


def _coordinator(state: BrokerState, request: Request, key_type: int, key: str) -> dict[str, Any]:
    if key_type not in (GROUP, TRANSACTION):
        text = f"key type {key_type} is not supported; use 0 (group) or 1 (transactional id)"
        return {"error_code": InvalidRequest.code, "error_message": text, "node_id": -1, "port": -1}
    resource_type = ResourceType.GROUP if key_type == GROUP else ResourceType.TRANSACTIONAL_ID
    if not request.is_authorized(resource_type, key):
        refusal = refusal_of(resource_type)
        return {"error_code": refusal.code, "error_message": str(refusal), "node_id": -1, "port": -1}
    address = state.address(request)
    return {"node_id": address.node_id, "host": address.host, "port": address.port}
