"""DeleteTopics (key 20), versions 1-6: by name, from v6 on by name or id.

Everything of the topic goes, its producers' state too (row I16). Errors: 3 unknown name, 100 unknown
id, 42 both or neither name and id, 73 delete.topic.enable=false.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.topics import Topic
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    KafkaStorageError,
    StorageError,
    TopicDeletionDisabled,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.types import TopicPartition
from oncelog.wire.messages import NO_ID, DeleteTopicsRequest, DeleteTopicsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 20

_Result = DeleteTopicsResponse.DeletableTopicResult
_Asked = DeleteTopicsRequest.DeleteTopicState


def handle(node: Node, request: Request, now_ms: int) -> DeleteTopicsResponse:
    message: DeleteTopicsRequest = request.message
    asked = (
        message.topics if request.header.api_version >= 6 else [_Asked(name=n) for n in message.topic_names]
    )
    return DeleteTopicsResponse(responses=[_delete(node, one, now_ms) for one in asked])


def _delete(node: Node, asked: _Asked, now_ms: int) -> _Result:
    result = _Result(name=asked.name, topic_id=asked.topic_id or NO_ID)
    try:
        topic = _find(node, asked)
        result.name, result.topic_id = topic.name, topic.topic_id
        if not node.settings["delete.topic.enable"]:
            raise TopicDeletionDisabled("delete.topic.enable is false")
        node.topics.delete(topic, now_ms)
    except BrokerError as error:
        result.error_code, result.error_message = error.code, error.message
    except StorageError as error:
        result.error_code, result.error_message = KafkaStorageError.code, str(error)
    else:
        for index in range(len(topic.partitions)):
            node.fetch_waits.changed(TopicPartition(topic.name, index), now_ms)
    return result


def _find(node: Node, asked: _Asked) -> Topic:
    has_id = bool(asked.topic_id) and asked.topic_id != NO_ID
    if (asked.name is not None) == has_id:
        raise InvalidRequest("a topic is named by its name or by its id, not by both or neither")
    topic = node.topics.by_id(asked.topic_id) if has_id else node.topics.get(asked.name or "")
    if topic is None:
        raise UnknownTopicId() if has_id else UnknownTopicOrPartition()
    return topic
