"""ConsumerGroupDescribe (key 69), versions 0-1: groups of the consumer protocol (KIP-848).

Errors: GROUP_ID_NOT_FOUND (no such group, or a classic one), INVALID_GROUP_ID (empty),
TOPIC_AUTHORIZATION_FAILED (a member subscribes to, or is assigned, a topic that the client may not describe).
Source: Kafka's GroupCoordinatorService.
"""

from __future__ import annotations

from collections.abc import Iterable

from oncelog.broker.coordinators.consumer_group_log import by_topic_id
from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import allowed_bits
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, name_cost, respond_in_steps
from oncelog.errors import (
    GroupAuthorizationFailed,
    GroupIdNotFound,
    InvalidGroupId,
    NotCoordinator,
    TopicAuthorizationFailed,
)
from oncelog.rules.groups.consumer import NO_PARTITIONS, ConsumerGroup, TopicIdPartition, in_order
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse

KEY = 69
CONSUMER_MEMBER = 1

_Group = ConsumerGroupDescribeResponse.DescribedGroup


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[ConsumerGroupDescribeResponse]:
    message: ConsumerGroupDescribeRequest = request.message
    response, budget = (
        ConsumerGroupDescribeResponse(groups=[]),
        state.step_budget(),
    )
    for group_id in dict.fromkeys(message.group_ids):
        group = yield from _describe_if_authorized(state, request, group_id, budget)
        if message.include_authorized_operations and not group.error_code:
            group.authorized_operations = allowed_bits(request.access, ResourceType.GROUP, group_id)
        response.groups.append(group)
        if budget.spend(name_cost(group_id)):
            yield None
    return response


def _describe_if_authorized(
    state: BrokerState, request: Request, group_id: str, budget: StepBudget
) -> Work[_Group]:
    if not request.is_authorized(ResourceType.GROUP, group_id):
        return _Group(group_id=group_id, error_code=GroupAuthorizationFailed.code)
    named: dict[str, None] = {}
    try:
        group = yield from _describe(state, group_id, named, budget)
    except NotCoordinator as error:
        return _Group(group_id=group_id, error_code=error.code, error_message=error.message)
    for name in named:
        if not request.is_authorized(ResourceType.TOPIC, name):
            return _Group(
                group_id=group_id,
                error_code=TopicAuthorizationFailed.code,
                error_message="the group has topics that the client may not DESCRIBE",
            )
        if budget.spend():
            yield None
    return group


def _describe(state: BrokerState, group_id: str, named: dict[str, None], budget: StepBudget) -> Work[_Group]:
    """Describe a group, and add the names of all its topics to `named`."""
    if not group_id:
        return _Group(
            group_id=group_id, error_code=InvalidGroupId.code, error_message="A group id may not be empty."
        )
    group = state.groups.consumers.get(group_id)
    if group is None:
        text = "is not a consumer group" if state.groups.has(group_id) else "not found"
        error = GroupIdNotFound(f"Group {group_id} {text}.")
        return _Group(group_id=group_id, error_code=error.code, error_message=error.message)
    described = _Group(
        group_id=group_id,
        group_state=group.state.value,
        group_epoch=group.epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=group.assignor,
        members=[],
    )
    # A change replaces the group by a changed copy, so the members of this object stay the same between the
    # steps. See test_the_members_of_a_consumer_group_are_described_in_steps.
    #
    # Members with the same subscription share its names, because each of hundreds of members may name 75,000
    # topics. See test_the_names_that_members_share_are_checked_once.
    subscriptions: dict[int, list[str]] = {}
    for member_id, present in group.members.items():
        names = subscriptions.get(id(present.topics))
        if names is None:
            names = subscriptions[id(present.topics)] = list(in_order(present.topics))
            named.update(dict.fromkeys(names))
        member = _member(state, group, member_id, names)
        described.members.append(member)
        for assignment in (member.assignment, member.target_assignment):
            for topic in assignment.topic_partitions if assignment else ():
                named[topic.topic_name] = None
        if budget.spend(_size(member)):
            yield None
    return described


def _member(
    state: BrokerState, group: ConsumerGroup, member_id: str, names: list[str]
) -> ConsumerGroupDescribeResponse.Member:
    member = group.members[member_id]
    return ConsumerGroupDescribeResponse.Member(
        member_id=member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=names,
        subscribed_topic_regex=member.regex or "",
        assignment=_assignment(state, member.held),
        target_assignment=_assignment(state, group.targets.get(member_id, NO_PARTITIONS)),
        member_type=CONSUMER_MEMBER,
    )


def _size(member: ConsumerGroupDescribeResponse.Member) -> int:
    """Return the cost of a described member, in elements of a step (`StepBudget`)."""
    count = 1 + len(member.subscribed_topic_names)
    for assignment in (member.assignment, member.target_assignment):
        for topic in assignment.topic_partitions if assignment else ():
            count += len(topic.partitions)
    return count


def _assignment(
    state: BrokerState, places: Iterable[TopicIdPartition]
) -> ConsumerGroupDescribeResponse.Assignment:
    return ConsumerGroupDescribeResponse.Assignment(
        topic_partitions=[
            ConsumerGroupDescribeResponse.TopicPartitions(
                topic_id=topic_id, topic_name=topic.name, partitions=partitions
            )
            for topic_id, partitions in by_topic_id(places)
            if (topic := state.topics.by_id(topic_id)) is not None
        ]
    )
