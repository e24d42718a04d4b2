"""ConsumerGroupHeartbeat (key 68), versions 0-1: a member of the consumer protocol joins, stays or leaves.

    UNSUPPORTED_VERSION         the consumer protocol is not enabled
    INVALID_REQUEST             a field is missing, unexpected, or too long to be stored
    MESSAGE_TOO_LARGE           no record can hold the member
    GROUP_ID_NOT_FOUND          no such group, or a classic group with members
    UNSUPPORTED_ASSIGNOR        the assignor is not enabled
    INVALID_REGULAR_EXPRESSION  RE2 rejects the expression

`rules.groups.consumer` decides all other errors.
Source: KIP-848; Kafka's GroupCoordinatorService and GroupMetadataManager.
"""

from __future__ import annotations

from oncelog.broker.coordinators.consumer_group_log import by_topic_id
from oncelog.broker.coordinators.internal_topic import respond_when_durable
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import SORTED_PER_ELEMENT, StepBudget, Work, respond_in_steps, sorted_in_steps
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    UnsupportedAssignor,
    UnsupportedVersion,
)
from oncelog.rules.groups.consumer import (
    STATIC_LEAVE_EPOCH,
    Heartbeat,
    HeartbeatResult,
    OrderedNames,
    TopicIdPartition,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

KEY = 68
FIRST_NAMED_VERSION = 1
"""First version in which members choose their own ids (KIP-1082)."""

_Assignment = ConsumerGroupHeartbeatResponse.Assignment


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _answer(state, request, now_ms))
    return answer


def _answer(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: ConsumerGroupHeartbeatRequest = request.message

    def refusal(error: BrokerError) -> ConsumerGroupHeartbeatResponse:
        return ConsumerGroupHeartbeatResponse(error_code=error.code, error_message=error.message)

    try:
        request.authorize(ResourceType.GROUP, message.group_id)
        _check(state, message, request.header.api_version)
        beat = yield from _heartbeat(state, message, request)
        # The group is read and changed in this step only, so no other request comes in between.
        answer, written = state.groups.consumer_heartbeat(message.group_id, beat, now_ms)
    except BrokerError as error:
        return refusal(error)
    return respond_when_durable(
        state.flush_queue, written, _response(state, message.group_id, answer), refusal
    )


def _check(state: BrokerState, message: ConsumerGroupHeartbeatRequest, version: int) -> None:
    if "consumer" not in state.settings["group.coordinator.rebalance.protocols"]:
        raise UnsupportedVersion(
            "the consumer protocol is disabled; add consumer to group.coordinator.rebalance.protocols"
        )
    if not message.group_id:
        raise InvalidRequest("a group id may not be empty")
    if not message.member_id and (version >= FIRST_NAMED_VERSION or message.member_epoch != 0):
        raise InvalidRequest("a member id may not be empty")
    if message.instance_id == "" or message.rack_id == "":
        raise InvalidRequest("instance id and rack id must not be empty; send null for none")
    if message.member_epoch < STATIC_LEAVE_EPOCH:
        raise InvalidRequest(f"member epoch {message.member_epoch} is invalid")
    if message.member_epoch == STATIC_LEAVE_EPOCH and message.instance_id is None:
        raise InvalidRequest("member epoch -2 is only for static members")
    if message.member_epoch == 0:
        _check_first(message)
    if (
        message.server_assignor is not None
        and message.server_assignor not in state.groups.consumers.assignors
    ):
        raise UnsupportedAssignor(f"assignor {message.server_assignor!r} is not supported")


def _check_first(message: ConsumerGroupHeartbeatRequest) -> None:
    if message.rebalance_timeout_ms == -1:
        raise InvalidRequest("a joining member must send its rebalance timeout")
    if message.topic_partitions is None or message.topic_partitions:
        raise InvalidRequest("a joining member must send an empty list of owned partitions")
    if message.subscribed_topic_names is None and message.subscribed_topic_regex is None:
        raise InvalidRequest("a joining member must send its subscription")


def _heartbeat(
    state: BrokerState, message: ConsumerGroupHeartbeatRequest, request: Request
) -> Work[Heartbeat]:
    """Return the heartbeat. Raises TopicAuthorizationFailed if the client may not describe a topic."""
    budget = state.step_budget()
    names = None if message.subscribed_topic_names is None else (yield from _names(request, budget))
    owned = None if message.topic_partitions is None else (yield from _owned(message, budget))
    return Heartbeat(
        message.member_id or state.new_name(),
        message.member_epoch,
        message.instance_id,
        message.rack_id,
        message.rebalance_timeout_ms,
        names,
        message.subscribed_topic_regex,
        message.server_assignor,
        owned,
        request.header.client_id or "",
        request.client_host,
    )


def _names(request: Request, budget: StepBudget) -> Work[OrderedNames]:
    """Check the permissions for the topics that the member subscribes to, and sort their names."""
    names: dict[str, None] = {}
    for name in request.message.subscribed_topic_names:
        request.authorize(ResourceType.TOPIC, name)
        names[name] = None
        if budget.spend():
            yield None
    ordered = []
    for name in (yield from sorted_in_steps(names, budget)):
        ordered.append(name)
        if budget.spend():
            yield None
    result = OrderedNames(ordered)
    if budget.spend(len(ordered) // SORTED_PER_ELEMENT):
        yield None
    return result


def _owned(message: ConsumerGroupHeartbeatRequest, budget: StepBudget) -> Work[frozenset[TopicIdPartition]]:
    owned: set[TopicIdPartition] = set()
    for topic in message.topic_partitions or ():
        topic_id = bytes(topic.topic_id)
        for partition in topic.partitions:
            owned.add((topic_id, partition))
            if budget.spend():
                yield None
        if budget.spend():
            yield None
    return frozenset(owned)


def _response(state: BrokerState, group_id: str, answer: HeartbeatResult) -> ConsumerGroupHeartbeatResponse:
    assignment = None
    if answer.assigned is not None:
        assignment = _Assignment(
            topic_partitions=[
                ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in by_topic_id(answer.assigned)
            ]
        )
    return ConsumerGroupHeartbeatResponse(
        member_id=answer.member_id,
        member_epoch=answer.epoch,
        heartbeat_interval_ms=0
        if answer.epoch < 0
        else state.dynamic.group_ms(group_id, "consumer.heartbeat.interval.ms"),
        assignment=assignment,
    )
