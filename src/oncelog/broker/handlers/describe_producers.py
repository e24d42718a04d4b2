"""DescribeProducers (key 61), version 0: the producer state of partitions (KIP-664).

Missing values are -1 on the wire. Errors: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION (an invalid
name).
Source: Kafka's KafkaApis.handleDescribeProducersRequest.
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, respond_in_steps
from oncelog.broker.topics.topic_names import check_topic_name
from oncelog.errors import BrokerError
from oncelog.log.partition import ProducerState
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import DescribeProducersRequest, DescribeProducersResponse

KEY = 61

_Result = DescribeProducersResponse.PartitionResponse


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _describe_all(state, request))
    return answer


def _describe_all(state: BrokerState, request: Request) -> Work[DescribeProducersResponse]:
    message: DescribeProducersRequest = request.message
    # Describe a partition once even if it is named many times, because its producers may be many.
    requested: dict[str, dict[int, None]] = {}
    for topic in message.topics:
        requested.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    response, budget = DescribeProducersResponse(topics=[]), state.step_budget()
    for name, indexes in requested.items():
        results: list[_Result] = []
        response.topics.append(DescribeProducersResponse.TopicResponse(name=name, partitions=results))
        if budget.spend():
            yield None
        for index in indexes:
            results.append((yield from _describe(state, request, name, index, budget)))
            if budget.spend():
                yield None
    return response


def _describe(
    state: BrokerState, request: Request, topic: str, index: int, budget: StepBudget
) -> Work[_Result]:
    result = _Result(partition_index=index)
    try:
        request.authorize(ResourceType.TOPIC, topic)
        check_topic_name(topic)
        _, partition = state.topics.partition(TopicPartition(topic, index))
        for producers in partition.producers_in_parts():
            for producer in producers:
                result.active_producers.append(_producer(producer))
                if budget.spend():
                    yield None
            yield None
    except BrokerError as error:
        result.error_code, result.error_message = error.code, error.message
    return result


def _producer(producer: ProducerState) -> DescribeProducersResponse.ProducerState:
    entry = producer.entry
    newest = entry.batches[-1] if entry.batches else None
    return DescribeProducersResponse.ProducerState(
        producer_id=producer.producer_id,
        producer_epoch=_or_minus_one(entry.producer_epoch),
        last_sequence=_or_minus_one(newest.last_sequence if newest else None),
        last_timestamp=_or_minus_one(entry.last_timestamp_ms),
        coordinator_epoch=_or_minus_one(entry.coordinator_epoch),
        current_txn_start_offset=_or_minus_one(entry.current_txn_first_offset),
    )


def _or_minus_one(value: int | None) -> int:
    return -1 if value is None else value
