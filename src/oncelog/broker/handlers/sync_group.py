"""SyncGroup (key 14), versions 0-5: the assignment of a member, once the leader has sent all assignments.

`rules.groups.classic` decides the result. A request of version 5 must have the group's protocol type and
protocol name, else it gets INCONSISTENT_GROUP_PROTOCOL. Source: KIP-559; Kafka's
GroupMetadataManager.classicGroupSync.
"""

from __future__ import annotations

from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, InconsistentGroupProtocol
from oncelog.rules.groups.classic import SyncResult
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import SyncGroupRequest, SyncGroupResponse

KEY = 14
FIRST_NAMED_VERSION = 5
"""First version in which a member names the protocol that it expects the group to have (KIP-559)."""


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: SyncGroupRequest = request.message
    names_protocol = message.protocol_type is not None and message.protocol_name is not None
    try:
        request.authorize(ResourceType.GROUP, message.group_id)
        if request.header.api_version >= FIRST_NAMED_VERSION and not names_protocol:
            raise InconsistentGroupProtocol("SyncGroup needs the protocol type and name")
        group = state.groups.get_existing(message.group_id)
    except BrokerError as error:
        return _response(SyncResult(error.code))
    # Handle the member's next request even if the client disconnects first: a member that closes during a
    # rebalance sends LeaveGroup right after this request. See
    # test_a_leave_behind_a_join_is_handled_after_its_client_disconnects.
    pending = PendingResponse(blocks_pipeline=True, runs_next_request=True)
    group.sync(
        message.member_id,
        message.group_instance_id,
        message.generation_id,
        (message.protocol_type, message.protocol_name),
        {member.member_id: member.assignment for member in message.assignments},
        now_ms,
        lambda answer: state.groups.responses.send(lambda: pending.resolve(_response(answer))),
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
