"""SyncGroup (key 14), versions 0-5: a member's share of the partitions, once the leader has told it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.waiting import Deferred
from oncelog.errors import BrokerError
from oncelog.rules.group_member import SyncAnswer
from oncelog.wire.messages import SyncGroupRequest, SyncGroupResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 14


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    message: SyncGroupRequest = request.message
    try:
        group = node.groups.joined(message.group_id)
    except BrokerError as error:
        return _response(SyncAnswer(error.code))
    deferred = Deferred(holds_later_requests=True)
    group.sync(
        message.member_id,
        message.group_instance_id,
        message.generation_id,
        (message.protocol_type, message.protocol_name),
        {each.member_id: each.assignment for each in message.assignments},
        now_ms,
        lambda answer: deferred.resolve(_response(answer)),
    )
    node.groups.settle(group, now_ms)
    return deferred


def _response(answer: SyncAnswer) -> SyncGroupResponse:
    return SyncGroupResponse(
        error_code=answer.error_code,
        protocol_type=answer.protocol_type,
        protocol_name=answer.protocol_name,
        assignment=answer.assignment,
    )
