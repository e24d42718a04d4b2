"""ListOffsets (key 2), versions 1-11: the offset for a time.

Timestamps: -1 latest (last stable offset with isolation_level 1), -2 earliest, -3 the record with the
largest timestamp (v7+), -4 earliest on local disk (v8+, here the log start), -5 latest tiered (v9+, none
here), -6 earliest that waits to be tiered (v11, none here); 0 and above: the first record not older, -1/-1
when there is none. Errors: 3 unknown, 42 a partition named twice, 35 a special timestamp unknown at this
version, 74 / 75 leader epoch.
"""

from __future__ import annotations

from collections import Counter

from oncelog.broker.leader_epoch import check_leader_epoch
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
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
    answer: Answer = answer_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[ListOffsetsResponse]:
    message: ListOffsetsRequest = request.message
    named = Counter((t.name, p.partition_index) for t in message.topics for p in t.partitions)
    repeated = {at for at, times in named.items() if times > 1}
    response, cost, budget = (
        ListOffsetsResponse(topics=[]),
        StepCost(),
        StepBudget(state.limits.request_step_elements),
    )
    for topic in message.topics:
        results: list[_Result] = []
        response.topics.append(
            ListOffsetsResponse.ListOffsetsTopicResponse(name=topic.name, partitions=results)
        )
        if budget.spend():
            yield None
        is_allowed = request.is_authorized(ResourceType.TOPIC, topic.name)
        # However often a partition is named, it is answered once.
        for asked in {asked.partition_index: asked for asked in topic.partitions}.values():
            if budget.spend():
                yield None
            if (topic.name, asked.partition_index) in repeated:
                results.append(_error(asked, InvalidRequest("the partition is named twice")))
            elif not is_allowed:
                results.append(_error(asked, TopicAuthorizationFailed()))
            else:
                results.append((yield from _answer(state, request, topic.name, asked, cost)))
    return response


_Asked = ListOffsetsRequest.ListOffsetsPartition
_Result = ListOffsetsResponse.ListOffsetsPartitionResponse


def _answer(state: BrokerState, request: Request, topic: str, asked: _Asked, cost: StepCost) -> Work[_Result]:
    version = request.header.api_version
    is_committed_only = request.message.isolation_level == Isolation.READ_COMMITTED
    try:
        if asked.timestamp < 0 and version < FIRST_VERSION_OF.get(asked.timestamp, version + 1):
            raise UnsupportedVersion(f"timestamp {asked.timestamp} has no meaning at version {version}")
        _, partition = state.topics.partition(TopicPartition(topic, asked.partition_index))
        check_leader_epoch(partition, asked.current_leader_epoch)
        timestamp, offset = yield from _look_up(partition, asked.timestamp, is_committed_only, cost)
    except BrokerError as error:
        return _error(asked, error)
    epoch = partition.leader_epoch if offset >= 0 else -1
    return _Result(
        partition_index=asked.partition_index, timestamp=timestamp, offset=offset, leader_epoch=epoch
    )


def _error(asked: _Asked, error: BrokerError) -> _Result:
    return _Result(partition_index=asked.partition_index, error_code=error.code)


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
    found = yield from partition.search_timestamp(None if timestamp == MAX_TIMESTAMP else timestamp, cost)
    return found if found is not None and found[1] < end_offset else (-1, -1)
