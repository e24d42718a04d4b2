"""JoinGroup (key 11), versions 0-9: a member joins its group.

The response waits until all members have joined or the rebalance timeout has passed.

    INVALID_GROUP_ID         an empty group id
    INVALID_SESSION_TIMEOUT  not within group.min.session.timeout.ms and group.max.session.timeout.ms
    UNKNOWN_MEMBER_ID        a member id in a group that does not exist
    INVALID_REQUEST          a string of the member is too long for its field in the log
    MESSAGE_TOO_LARGE        no record can hold the member

`rules.groups.classic` decides all other errors. A request of version 0 has no rebalance timeout, so the
session timeout is used. Source: Kafka's GroupMetadataManager.classicGroupJoin.
"""

from __future__ import annotations

from oncelog.broker.coordinators.group_log import check_member
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import ELEMENT_RECORDS
from oncelog.errors import BrokerError, InvalidGroupId, InvalidSessionTimeout
from oncelog.rules.groups.classic import JoinRequest, JoinResult
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import JoinGroupRequest, JoinGroupResponse

KEY = 11
FIRST_KNOWN_ID_VERSION, FIRST_NULL_NAME_VERSION, FIRST_SKIP_VERSION = 4, 7, 9


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: JoinGroupRequest = request.message
    version = request.header.api_version
    joining = _request(message, request)
    base = message.group_instance_id if message.group_instance_id is not None else joining.client_id
    fresh_id = f"{base}-{state.new_name()}"
    group_id = message.group_id
    # 19,000 protocols, which fit into 200 KB, take 0.06 s.
    state.round_meter.add(ELEMENT_RECORDS * len(joining.protocols))
    try:
        request.authorize(ResourceType.GROUP, group_id)
        if not group_id:
            raise InvalidGroupId("a group id may not be empty")
        _check_timeout(state, message.session_timeout_ms)
        # Check the member before the group is created. A member that is too large for any record must not
        # leave an empty group behind.
        check_member(group_id, message.member_id or fresh_id, joining, state.settings["message.max.bytes"])
        is_new = not message.member_id or state.groups.has_only_offsets(group_id)
        group = (
            state.groups.get_or_create(group_id, now_ms) if is_new else state.groups.get_existing(group_id)
        )
    except BrokerError as error:
        return _response(JoinResult(error.code, message.member_id), version)
    # Handle the member's next request even if the client disconnects first: a member that closes during a
    # rebalance sends LeaveGroup right after this request. See
    # test_a_leave_behind_a_join_is_handled_after_its_client_disconnects.
    pending = PendingResponse(blocks_pipeline=True, runs_next_request=True)

    def respond(answer: JoinResult) -> None:
        state.groups.responses.send(lambda: pending.resolve(_response(answer, version)))

    group.join(joining, fresh_id, now_ms, respond)
    state.groups.publish_changes(group, now_ms)
    return pending


def _check_timeout(state: BrokerState, session_timeout_ms: int) -> None:
    low, high = state.settings["group.min.session.timeout.ms"], state.settings["group.max.session.timeout.ms"]
    if not low <= session_timeout_ms <= high:
        raise InvalidSessionTimeout(f"session.timeout.ms={session_timeout_ms} is not within {low}..{high}")


def _request(message: JoinGroupRequest, request: Request) -> JoinRequest:
    version = request.header.api_version
    return JoinRequest(
        message.member_id,
        message.group_instance_id,
        request.header.client_id or "",
        request.client_host,
        message.session_timeout_ms,
        message.rebalance_timeout_ms if version >= 1 else message.session_timeout_ms,
        message.protocol_type,
        tuple((protocol.name, protocol.metadata) for protocol in message.protocols),
        requires_known_member_id=version >= FIRST_KNOWN_ID_VERSION,
        supports_skip_assignment=version >= FIRST_SKIP_VERSION,
    )


def _response(answer: JoinResult, version: int) -> JoinGroupResponse:
    name = answer.protocol_name
    return JoinGroupResponse(
        error_code=answer.error_code,
        generation_id=answer.generation_id,
        protocol_type=answer.protocol_type,
        protocol_name="" if name is None and version < FIRST_NULL_NAME_VERSION else name,
        leader=answer.leader,
        skip_assignment=answer.skip_assignment,
        member_id=answer.member_id,
        members=[
            JoinGroupResponse.JoinGroupResponseMember(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                metadata=member.metadata,
            )
            for member in answer.members
        ],
    )
