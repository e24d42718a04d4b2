"""Metadata (key 3), versions 0-13: brokers, topics, who leads.

Version 0: an empty list means all topics; from 1 on null means all and empty none. An unknown topic
is created when the request (v4+) and auto.create.topics.enable allow it, with num.partitions, and
answered at once as created; else 3. Illegal names 17, unknown topic ids (v10+) 100. Topic ids are
stable for the life of a topic. Operations are never listed (-2147483648 = not asked).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.names import check_topic_name
from oncelog.broker.topics import Topic
from oncelog.errors import BrokerError, UnknownTopicId, UnknownTopicOrPartition
from oncelog.wire.messages import NO_ID, MetadataRequest, MetadataResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 3

_Topic = MetadataResponse.MetadataResponseTopic


def handle(node: Node, request: Request, now_ms: int) -> MetadataResponse:
    message: MetadataRequest = request.message
    asks_all = message.topics is None or (request.header.api_version == 0 and not message.topics)
    if asks_all:
        topics = [_describe(node, topic) for topic in node.topics.all()]
    else:
        may_create = message.allow_auto_topic_creation and node.settings["auto.create.topics.enable"]
        topics = [_look_up(node, asked, may_create, now_ms) for asked in message.topics or ()]
    address = node.address
    return MetadataResponse(
        brokers=[
            MetadataResponse.MetadataResponseBroker(
                node_id=address.node_id, host=address.host, port=address.port
            )
        ],
        cluster_id=node.cluster_id,
        controller_id=node.node_id,
        topics=topics,
    )


def _look_up(
    node: Node, asked: MetadataRequest.MetadataRequestTopic, may_create: bool, now_ms: int
) -> _Topic:
    try:
        if asked.name is None:
            topic = node.topics.by_id(asked.topic_id)
            if topic is None:
                raise UnknownTopicId()
            return _describe(node, topic)
        topic = node.topics.get(asked.name)
        if topic is None:
            check_topic_name(asked.name)
            if not may_create:
                raise UnknownTopicOrPartition()
            topic = node.topics.create(asked.name, node.settings["num.partitions"], {}, now_ms)
        return _describe(node, topic)
    except BrokerError as error:
        return _Topic(error_code=error.code, name=asked.name, topic_id=asked.topic_id or NO_ID)


def _describe(node: Node, topic: Topic) -> _Topic:
    return _Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=[
            MetadataResponse.MetadataResponsePartition(
                partition_index=index,
                leader_id=node.node_id,
                leader_epoch=partition.leader_epoch,
                replica_nodes=[node.node_id],
                isr_nodes=[node.node_id],
            )
            for index, partition in enumerate(topic.partitions)
        ],
    )
