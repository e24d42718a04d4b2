"""DescribeProducers (key 61), version 0: the producer state of partitions (KIP-664).

Errors: 3 unknown partition, 17 an illegal topic name. None is -1 on the wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.names import check_topic_name
from oncelog.errors import BrokerError
from oncelog.log.partition import ProducerState
from oncelog.rules.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import DescribeProducersRequest, DescribeProducersResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 61

_Result = DescribeProducersResponse.PartitionResponse


def handle(node: Node, request: Request, now_ms: int) -> DescribeProducersResponse:
    message: DescribeProducersRequest = request.message
    # Each partition once: it may have many producers.
    asked: dict[str, dict[int, None]] = {}
    for topic in message.topics:
        asked.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    return DescribeProducersResponse(
        topics=[
            DescribeProducersResponse.TopicResponse(
                name=name, partitions=[_describe(node, request, name, index) for index in indexes]
            )
            for name, indexes in asked.items()
        ]
    )


def _describe(node: Node, request: Request, topic: str, index: int) -> _Result:
    result = _Result(partition_index=index)
    try:
        request.check(ResourceType.TOPIC, topic)
        check_topic_name(topic)
        _, partition = node.topics.partition(TopicPartition(topic, index))
        result.active_producers = [_producer(state) for state in partition.describe_producers()]
    except BrokerError as error:
        result.error_code, result.error_message = error.code, error.message
    return result


def _producer(state: ProducerState) -> DescribeProducersResponse.ProducerState:
    entry = state.entry
    newest = entry.batches[-1] if entry.batches else None
    return DescribeProducersResponse.ProducerState(
        producer_id=state.producer_id,
        producer_epoch=_or_minus_one(entry.producer_epoch),
        last_sequence=_or_minus_one(newest.last_sequence if newest else None),
        last_timestamp=_or_minus_one(entry.last_timestamp_ms),
        coordinator_epoch=_or_minus_one(entry.coordinator_epoch),
        current_txn_start_offset=_or_minus_one(entry.current_txn_first_offset),
    )


def _or_minus_one(value: int | None) -> int:
    return -1 if value is None else value
