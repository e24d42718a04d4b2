"""OffsetDelete (key 47), version 0: delete committed offsets.

Errors of the group: INVALID_GROUP_ID (empty), GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP (members of another
protocol type than "consumer"). Errors of a partition: UNKNOWN_TOPIC_OR_PARTITION, GROUP_SUBSCRIBED_TO_TOPIC
(a member subscribes to the topic, or its subscription cannot be read). Source: KIP-496; Kafka's
OffsetMetadataManager.deleteOffsets.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import respond_when_durable
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import (
    BrokerError,
    GroupAuthorizationFailed,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    InvalidGroupId,
    NonEmptyGroup,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import OffsetDeleteRequest, OffsetDeleteResponse

KEY = 47

_Partition = OffsetDeleteResponse.OffsetDeleteResponsePartition


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    # Finish even if the client has disconnected: some offsets may be deleted already.
    answer: Answer = respond_in_steps(state.slots, _delete_all(state, request, now_ms), is_cancellable=False)
    return answer


def _delete_all(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: OffsetDeleteRequest = request.message

    def refusal(error: BrokerError) -> OffsetDeleteResponse:
        return OffsetDeleteResponse(error_code=error.code)

    if not request.is_authorized(ResourceType.GROUP, message.group_id):
        return refusal(GroupAuthorizationFailed())
    try:
        if not message.group_id:
            raise InvalidGroupId("a group id may not be empty")
        if not state.groups.has(message.group_id):
            raise GroupIdNotFound
    except BrokerError as error:
        return refusal(error)
    if state.groups.has_non_consumer_members(message.group_id):
        return refusal(NonEmptyGroup())
    response, budget = OffsetDeleteResponse(topics=[]), state.step_budget()
    deletable: dict[TopicPartition, None] = {}
    with state.groups.topic.reserved(message.group_id):
        subscribed = yield from state.groups.subscribed_topics(message.group_id, budget)
        for topic in message.topics:
            results: list[_Partition] = []
            response.topics.append(
                OffsetDeleteResponse.OffsetDeleteResponseTopic(name=topic.name, partitions=results)
            )
            if budget.spend():
                yield None
            for partition in topic.partitions:
                tp = TopicPartition(topic.name, partition.partition_index)
                code = _code(state, request, tp, subscribed)
                results.append(_Partition(partition_index=tp.partition, error_code=code))
                if not code:
                    deletable[tp] = None
                if budget.spend():
                    yield None
        try:
            written = yield from state.groups.delete_offsets(message.group_id, deletable, budget, now_ms)
        except BrokerError as error:
            return refusal(error)
    return respond_when_durable(state.flush_queue, [written] if written else [], response, refusal)


def _code(state: BrokerState, request: Request, tp: TopicPartition, subscribed: set[str] | None) -> int:
    if not request.is_authorized(ResourceType.TOPIC, tp.topic):
        return TopicAuthorizationFailed.code
    topic = state.topics.get(tp.topic)
    if topic is None or not 0 <= tp.partition < len(topic.partitions):
        return UnknownTopicOrPartition.code
    is_subscribed = subscribed is None or tp.topic in subscribed
    return GroupSubscribedToTopic.code if is_subscribed else 0
