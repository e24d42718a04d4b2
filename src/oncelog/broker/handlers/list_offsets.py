"""ListOffsets (key 2), versions 1-11: the offset for a timestamp.

For a timestamp of 0 or more, the result is the timestamp and offset of the first record with this or a later
timestamp. If there is no such record, the result is -1/-1. Negative timestamps have these meanings:

    timestamp  since version  result
    -1         1              latest; with isolation_level 1 the last stable offset
    -2         1              earliest
    -3         7              the record with the largest timestamp
    -4         8              earliest on the local disk: the log start, without tiered storage
    -5         9              latest in tiered storage: none
    -6         11             earliest that waits for an upload to tiered storage: none

Errors: UNKNOWN_TOPIC_OR_PARTITION, INVALID_REQUEST (a partition named twice), UNSUPPORTED_VERSION (a negative
timestamp that this version does not have), FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH.
Source: KIP-79, KIP-734; Kafka's ReplicaManager.fetchOffset.
"""

from __future__ import annotations

from collections import Counter

from oncelog.broker.leader_epoch import check_leader_epoch
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import BrokerError, InvalidRequest, TopicAuthorizationFailed, UnsupportedVersion
from oncelog.log.partition import Partition
from oncelog.log.reader import StepCost
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.messages import ListOffsetsRequest, ListOffsetsResponse

KEY = 2
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING_UPLOAD = range(-1, -7, -1)
FIRST_VERSION_OF = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[ListOffsetsResponse]:
    message: ListOffsetsRequest = request.message
    named = Counter((t.name, p.partition_index) for t in message.topics for p in t.partitions)
    repeated = {key for key, count in named.items() if count > 1}
    response, cost = ListOffsetsResponse(topics=[]), StepCost()
    budget = state.step_budget()
    for topic in message.topics:
        results: list[_Result] = []
        response.topics.append(
            ListOffsetsResponse.ListOffsetsTopicResponse(name=topic.name, partitions=results)
        )
        if budget.spend():
            yield None
        is_allowed = request.is_authorized(ResourceType.TOPIC, topic.name)
        # A partition gets one result, even if the request names it many times. The result is then an error.
        for requested in {requested.partition_index: requested for requested in topic.partitions}.values():
            if budget.spend():
                yield None
            if (topic.name, requested.partition_index) in repeated:
                results.append(_error(requested, InvalidRequest("the partition occurs twice")))
            elif not is_allowed:
                results.append(_error(requested, TopicAuthorizationFailed()))
            else:
                results.append((yield from _answer(state, request, topic.name, requested, cost)))
    return response


_Requested = ListOffsetsRequest.ListOffsetsPartition
_Result = ListOffsetsResponse.ListOffsetsPartitionResponse


def _answer(
    state: BrokerState, request: Request, topic: str, requested: _Requested, cost: StepCost
) -> Work[_Result]:
    version = request.header.api_version
    is_committed_only = request.message.isolation_level == Isolation.READ_COMMITTED
    try:
        if requested.timestamp < 0 and version < FIRST_VERSION_OF.get(requested.timestamp, version + 1):
            raise UnsupportedVersion(
                f"timestamp {requested.timestamp} is not valid in ListOffsets version {version}"
            )
        _, partition = state.topics.partition(TopicPartition(topic, requested.partition_index))
        check_leader_epoch(partition, requested.current_leader_epoch)
        timestamp, offset = yield from _look_up(partition, requested.timestamp, is_committed_only, cost)
    except BrokerError as error:
        return _error(requested, error)
    epoch = partition.leader_epoch if offset >= 0 else -1
    return _Result(
        partition_index=requested.partition_index, timestamp=timestamp, offset=offset, leader_epoch=epoch
    )


def _error(requested: _Requested, error: BrokerError) -> _Result:
    return _Result(partition_index=requested.partition_index, error_code=error.code)


def _look_up(
    partition: Partition, timestamp: int, is_committed_only: bool, cost: StepCost
) -> Work[tuple[int, int]]:
    end_offset = partition.last_stable_offset if is_committed_only else partition.high_watermark
    if timestamp == LATEST:
        return -1, end_offset
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return -1, partition.log_start_offset
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return -1, -1
    match = yield from partition.search_timestamp(None if timestamp == MAX_TIMESTAMP else timestamp, cost)
    return match if match is not None and match[1] < end_offset else (-1, -1)
