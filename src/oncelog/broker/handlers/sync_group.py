"""SyncGroup (key 14), versions 0-5: a member's share of the partitions, once the leader has told it."""

from __future__ import annotations

from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, InconsistentGroupProtocol
from oncelog.rules.groups.classic import SyncResult
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import SyncGroupRequest, SyncGroupResponse

KEY = 14
FIRST_SAID_VERSION = 5
"""From here on a member says which protocol it thinks the group chose."""


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: SyncGroupRequest = request.message
    is_said = message.protocol_type is not None and message.protocol_name is not None
    try:
        request.authorize(ResourceType.GROUP, message.group_id)
        if request.header.api_version >= FIRST_SAID_VERSION and not is_said:
            raise InconsistentGroupProtocol("protocol type and name must be given")
        group = state.groups.get_existing(message.group_id)
    except BrokerError as error:
        return _response(SyncResult(error.code))
    # A member that ends during a rebalance sends LeaveGroup behind this. See
    # test_a_leave_behind_a_join_is_carried_out_after_the_end_of_its_client.
    pending = PendingResponse(blocks_pipeline=True, runs_next_request=True)
    group.sync(
        message.member_id,
        message.group_instance_id,
        message.generation_id,
        (message.protocol_type, message.protocol_name),
        {each.member_id: each.assignment for each in message.assignments},
        now_ms,
        lambda answer: pending.resolve(_response(answer)),
    )
    state.groups.publish_changes(group, now_ms)
    return pending


def _response(answer: SyncResult) -> SyncGroupResponse:
    return SyncGroupResponse(
        error_code=answer.error_code,
        protocol_type=answer.protocol_type,
        protocol_name=answer.protocol_name,
        assignment=answer.assignment,
    )
