"""OffsetDelete (key 47), version 0: forget committed offsets.

INVALID_GROUP_ID (empty); GROUP_ID_NOT_FOUND; NON_EMPTY_GROUP (members of another protocol type than
"consumer"). Per partition GROUP_SUBSCRIBED_TO_TOPIC, also where members' subscriptions cannot be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.state_topic import answer_when_durable
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
from oncelog.rules.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import OffsetDeleteRequest, OffsetDeleteResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 47

_Partition = OffsetDeleteResponse.OffsetDeleteResponsePartition


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    message: OffsetDeleteRequest = request.message

    def refusal(error: BrokerError) -> OffsetDeleteResponse:
        return OffsetDeleteResponse(error_code=error.code)

    if not request.may(ResourceType.GROUP, message.group_id):
        return refusal(GroupAuthorizationFailed())
    try:
        if not message.group_id:
            raise InvalidGroupId("a group id may not be empty")
        if not node.groups.has(message.group_id):
            raise GroupIdNotFound
    except BrokerError as error:
        return refusal(error)
    if node.groups.has_members_of_another_type(message.group_id):
        return refusal(NonEmptyGroup())
    subscribed = node.groups.subscribed_topics(message.group_id)
    asked = [
        TopicPartition(topic.name, each.partition_index)
        for topic in message.topics
        for each in topic.partitions
    ]
    codes = {at: _code(node, request, at, subscribed) for at in asked}
    try:
        done = node.groups.offsets.delete(message.group_id, [at for at in asked if not codes[at]], now_ms)
    except BrokerError as error:
        return refusal(error)
    answer = OffsetDeleteResponse(
        topics=[
            OffsetDeleteResponse.OffsetDeleteResponseTopic(
                name=topic.name,
                partitions=[
                    _Partition(partition_index=index, error_code=codes[TopicPartition(topic.name, index)])
                    for index in (each.partition_index for each in topic.partitions)
                ],
            )
            for topic in message.topics
        ]
    )
    return answer_when_durable(node, [done] if done else [], answer, refusal)


def _code(node: Node, request: Request, at: TopicPartition, subscribed: set[str] | None) -> int:
    if not request.may(ResourceType.TOPIC, at.topic):
        return TopicAuthorizationFailed.code
    topic = node.topics.get(at.topic)
    if topic is None or not 0 <= at.partition < len(topic.partitions):
        return UnknownTopicOrPartition.code
    is_subscribed = subscribed is None or at.topic in subscribed
    return GroupSubscribedToTopic.code if is_subscribed else 0
