"""Heartbeat (key 12), versions 0-4: extend the session of a classic group's member.

REBALANCE_IN_PROGRESS asks the member to join again; `rules.groups.classic` decides the error code. Source:
Kafka's GroupMetadataManager.classicGroupHeartbeat.
"""

from __future__ import annotations

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import HeartbeatRequest, HeartbeatResponse

KEY = 12


def handle(state: BrokerState, request: Request, now_ms: int) -> HeartbeatResponse:
    message: HeartbeatRequest = request.message
    try:
        request.authorize(ResourceType.GROUP, message.group_id)
        group = state.groups.get_existing(message.group_id)
    except BrokerError as error:
        return HeartbeatResponse(error_code=error.code)
    code = group.heartbeat(message.member_id, message.group_instance_id, message.generation_id, now_ms)
    return HeartbeatResponse(error_code=code)
