"""OffsetForLeaderEpoch (key 23), versions 2-4: where an epoch of a partition's leadership ended.

Requested epoch = current: the log end. Else the largest known epoch not above it and where the next
began; -1/-1 when it is above all or -1. Errors: 3 unknown, 74 / 75 the client's current epoch is off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.leader_epoch import check_leader_epoch
from oncelog.errors import BrokerError
from oncelog.rules.authorization import CLUSTER_NAME, Operation, ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 23
NO_EPOCH = -1

_Result = OffsetForLeaderEpochResponse.EpochEndOffset


def handle(node: Node, request: Request, now_ms: int) -> OffsetForLeaderEpochResponse:
    message: OffsetForLeaderEpochRequest = request.message
    return OffsetForLeaderEpochResponse(
        topics=[
            OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=[_answer(node, request, topic.topic, asked) for asked in topic.partitions],
            )
            for topic in message.topics
        ]
    )


def _answer(
    node: Node,
    request: Request,
    topic: str,
    asked: OffsetForLeaderEpochRequest.OffsetForLeaderPartition,
) -> _Result:
    try:
        if not request.access.may(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME):
            request.check(ResourceType.TOPIC, topic)
        _, partition = node.topics.partition(TopicPartition(topic, asked.partition))
        check_leader_epoch(partition, asked.current_leader_epoch)
    except BrokerError as error:
        return _Result(partition=asked.partition, error_code=error.code)
    if asked.leader_epoch == NO_EPOCH:
        return _Result(partition=asked.partition, leader_epoch=NO_EPOCH, end_offset=-1)
    epoch, end_offset = partition.end_offset_for_epoch(asked.leader_epoch)
    return _Result(
        partition=asked.partition,
        leader_epoch=-1 if epoch is None else epoch,
        end_offset=-1 if end_offset is None else end_offset,
    )
