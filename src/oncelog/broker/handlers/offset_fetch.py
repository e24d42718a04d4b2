"""OffsetFetch (key 9), versions 1-10: what groups have committed.

Null topics (version 2 on) mean all of them. A partition without a commit is -1 without an error. With
require_stable (version 7 on) a partition that an open transaction may commit is 88, to be asked again.
Version 10 names topics by id; an unknown id is 100.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from oncelog.broker.request import Answer, Request
from oncelog.broker.request_limits import MAX_NAMES
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
from oncelog.errors import (
    BrokerError,
    PeerError,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnstableOffsetCommit,
)
from oncelog.rules.groups.committed_offsets import NO_OFFSET
from oncelog.rules.security.authorization import ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import NO_ID, OffsetFetchRequest, OffsetFetchResponse

KEY = 9
FIRST_GROUP_ERROR_VERSION, FIRST_BATCHED_VERSION, FIRST_ID_VERSION = 2, 8, 10


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = answer_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[OffsetFetchResponse]:
    message: OffsetFetchRequest = request.message
    is_stable = message.require_stable
    is_single = request.header.api_version < FIRST_BATCHED_VERSION
    if is_single:
        try:
            request.authorize(ResourceType.GROUP, message.group_id)
            state.groups.topic.check(message.group_id)
        except BrokerError as error:
            return _refused(message, request.header.api_version, error.code)
        result = OffsetFetchResponse(topics=[])
        for part in _told(
            state,
            request,
            message.group_id,
            message.topics,
            is_stable,
            StepBudget(state.limits.request_step_elements),
        ):
            if part is None:
                yield None
                continue
            topic, told = part
            result.topics.append(
                OffsetFetchResponse.OffsetFetchResponseTopic(
                    name=topic,
                    partitions=[OffsetFetchResponse.OffsetFetchResponsePartition(**each) for each in told],
                )
            )
        return result
    # Each group once, as it is named first: it may have many offsets.
    once: dict[str, OffsetFetchRequest.OffsetFetchRequestGroup] = {}
    for asked in message.groups:
        once.setdefault(asked.group_id, asked)
    if len(once) > MAX_NAMES:
        raise PeerError(
            f"OffsetFetch of {len(once)} groups; allowed are {MAX_NAMES}: ask for fewer at a time"
        )
    response, budget = OffsetFetchResponse(groups=[]), StepBudget(state.limits.request_step_elements)
    for asked in once.values():
        response.groups.append((yield from _group(state, request, asked, is_stable, budget)))
        if budget.spend():
            yield None
    return response


def _refused(message: OffsetFetchRequest, version: int, code: int) -> OffsetFetchResponse:
    """From version 2 on the code stands for all."""
    if version >= FIRST_GROUP_ERROR_VERSION:
        return OffsetFetchResponse(error_code=code, topics=[])
    fields: dict[str, Any] = {"committed_offset": NO_OFFSET, "metadata": "", "error_code": code}
    return OffsetFetchResponse(
        topics=[
            OffsetFetchResponse.OffsetFetchResponseTopic(
                name=topic.name,
                partitions=[
                    OffsetFetchResponse.OffsetFetchResponsePartition(partition_index=index, **fields)
                    for index in topic.partition_indexes
                ],
            )
            for topic in message.topics or ()
        ]
    )


def _group(
    state: BrokerState,
    request: Request,
    asked: OffsetFetchRequest.OffsetFetchRequestGroup,
    is_stable: bool,
    budget: StepBudget,
) -> Work[OffsetFetchResponse.OffsetFetchResponseGroup]:
    try:
        request.authorize(ResourceType.GROUP, asked.group_id)
        consumers = state.groups.consumers.get(asked.group_id)
        if consumers is not None:
            consumers.check_fetch(asked.member_id, asked.member_epoch)
    except BrokerError as error:
        return OffsetFetchResponse.OffsetFetchResponseGroup(group_id=asked.group_id, error_code=error.code)
    group = OffsetFetchResponse.OffsetFetchResponseGroup(group_id=asked.group_id)
    has_ids = request.header.api_version >= FIRST_ID_VERSION
    unknown = (yield from _name_topics(state, asked.topics or (), budget)) if has_ids else []
    known = None if asked.topics is None else [topic for topic in asked.topics if topic.name or not has_ids]
    ids = {topic.name: bytes(topic.topic_id) for topic in known or () if has_ids}
    for part in _told(state, request, asked.group_id, known, is_stable, budget):
        if part is None:
            yield None
            continue
        name, told = part
        topic = state.topics.get(name)
        if name in ids and (topic is None or topic.topic_id != ids[name]):
            # It was deleted between two steps, and what was committed may be of another topic of its name.
            rows = [_unknown_id(row["partition_index"]) for row in told]
            group.topics.append(_TopicResult(topic_id=ids[name], partitions=rows))
            continue
        group.topics.append(
            _TopicResult(
                name=name,
                topic_id=NO_ID if topic is None else topic.topic_id,
                partitions=[OffsetFetchResponse.OffsetFetchResponsePartitions(**each) for each in told],
            )
        )
    group.topics += unknown
    return group


def _name_topics(
    state: BrokerState, topics: Iterable[_TopicRequest], budget: StepBudget
) -> Work[list[_TopicResult]]:
    """Fill in the names of topics that a request names by id; return the results for unknown ids."""
    unknown = []
    for requested in topics:
        topic = state.topics.by_id(requested.topic_id)
        requested.name = "" if topic is None else topic.name
        if topic is None:
            result = _TopicResult(topic_id=bytes(requested.topic_id), partitions=[])
            unknown.append(result)
            for index in requested.partition_indexes:
                result.partitions.append(_unknown_id(index))
                if budget.spend():
                    yield None
        if budget.spend():
            yield None
    return unknown


def _unknown_id(index: int) -> OffsetFetchResponse.OffsetFetchResponsePartitions:
    return OffsetFetchResponse.OffsetFetchResponsePartitions(
        partition_index=index, committed_offset=NO_OFFSET, metadata="", error_code=UnknownTopicId.code
    )


_TopicRequest = OffsetFetchRequest.OffsetFetchRequestTopics
_TopicResult = OffsetFetchResponse.OffsetFetchResponseTopics
_Topics = (
    Iterable[OffsetFetchRequest.OffsetFetchRequestTopic]
    | Iterable[OffsetFetchRequest.OffsetFetchRequestTopics]
)


def _told(
    state: BrokerState,
    request: Request,
    group_id: str,
    topics: _Topics | None,
    is_stable: bool,
    budget: StepBudget,
) -> Iterator[tuple[str, list[dict[str, Any]]] | None]:
    """Yield (topic, fields of its partitions) as asked; of everything when `topics` is None.

    None is the end of a step.
    """
    committed = state.groups.offsets.of(group_id)
    pending = state.groups.offsets.pending_of(group_id) if is_stable else ()
    if topics is None:
        # A partition with pending offsets only has no offset yet. Kafka leaves it out too.
        everything = sorted(at for at in committed if request.is_authorized(ResourceType.TOPIC, at.topic))
        asked = [
            (topic, [at.partition for at in each]) for topic, each in groupby(everything, lambda at: at.topic)
        ]
    else:
        asked = [(topic.name, topic.partition_indexes) for topic in topics]

    def one(at: TopicPartition) -> dict[str, Any]:
        fields = {"partition_index": at.partition, "committed_offset": NO_OFFSET, "metadata": ""}
        if not request.is_authorized(ResourceType.TOPIC, at.topic):
            return {**fields, "error_code": TopicAuthorizationFailed.code}
        if at in pending:
            return {**fields, "error_code": UnstableOffsetCommit.code}
        if at not in committed:
            return fields
        offset, leader_epoch, metadata, *_ = committed[at]
        return {
            **fields,
            "committed_offset": offset,
            "committed_leader_epoch": leader_epoch,
            "metadata": metadata,
        }

    for topic, partitions in asked:
        told = []
        for index in partitions:
            # Of everything, a partition whose offset went between two steps is left out, as Kafka does.
            if topics is not None or TopicPartition(topic, index) in committed:
                told.append(one(TopicPartition(topic, index)))
            if budget.spend():
                yield None
        if told or topics is not None:
            yield topic, told
        if budget.spend():
            yield None
