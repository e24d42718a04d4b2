"""OffsetForLeaderEpoch (key 23), versions 2-4: the end offset of a leader epoch of a partition.

For the current epoch the result is the log end offset. For an older epoch the result is the largest epoch in
the log that is not above it, with that epoch's end offset: the start of the next epoch. If the log has only
newer epochs, the result is the requested epoch and the start offset of the oldest one. For an epoch above the
current one, and for -1, the result is -1/-1.

Errors: UNKNOWN_TOPIC_OR_PARTITION; FENCED_LEADER_EPOCH or UNKNOWN_LEADER_EPOCH for a wrong current epoch.
Source: KIP-101, KIP-320; Kafka's LeaderEpochFileCache.endOffsetFor.
"""

from __future__ import annotations

from oncelog.broker.leader_epoch import check_leader_epoch
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import BrokerError
from oncelog.rules.security.authorization import CLUSTER_NAME, Operation, ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse

KEY = 23
NO_EPOCH = -1

_Result = OffsetForLeaderEpochResponse.EpochEndOffset


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[OffsetForLeaderEpochResponse]:
    message: OffsetForLeaderEpochRequest = request.message
    response, budget = OffsetForLeaderEpochResponse(topics=[]), state.step_budget()
    for topic in message.topics:
        results: list[_Result] = []
        response.topics.append(
            OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult(topic=topic.topic, partitions=results)
        )
        if budget.spend():
            yield None
        for requested in topic.partitions:
            results.append(_answer(state, request, topic.topic, requested))
            if budget.spend():
                yield None
    return response


def _answer(
    state: BrokerState,
    request: Request,
    topic: str,
    requested: OffsetForLeaderEpochRequest.OffsetForLeaderPartition,
) -> _Result:
    try:
        if not request.access.may(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME):
            request.authorize(ResourceType.TOPIC, topic)
        _, partition = state.topics.partition(TopicPartition(topic, requested.partition))
        check_leader_epoch(partition, requested.current_leader_epoch)
    except BrokerError as error:
        return _Result(partition=requested.partition, error_code=error.code)
    if requested.leader_epoch == NO_EPOCH:
        return _Result(partition=requested.partition, leader_epoch=NO_EPOCH, end_offset=-1)
    epoch, end_offset = partition.end_offset_for_epoch(requested.leader_epoch)
    return _Result(
        partition=requested.partition,
        leader_epoch=-1 if epoch is None else epoch,
        end_offset=-1 if end_offset is None else end_offset,
    )
