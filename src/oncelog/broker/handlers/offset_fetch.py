"""OffsetFetch (key 9), versions 1-10: the committed offsets of groups.

From version 2 on, null topics mean all topics of the group. A partition without a committed offset has offset
-1 and no error. With require_stable (version 7 and later), a partition for which an open transaction has a
pending offset gets UNSTABLE_OFFSET_COMMIT, which clients retry. Version 10 names topics by id; an unknown id
gets UNKNOWN_TOPIC_ID. Source: KIP-447, KIP-709, KIP-848; Kafka's OffsetMetadataManager.fetchOffsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from oncelog.broker.request import Answer, Request
from oncelog.broker.request_limits import MAX_NAMES
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, respond_in_steps, sorted_in_steps
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
    answer: Answer = respond_in_steps(state.slots, _answer_all(state, request))
    return answer


def _answer_all(state: BrokerState, request: Request) -> Work[OffsetFetchResponse]:
    message: OffsetFetchRequest = request.message
    require_stable = message.require_stable
    is_single = request.header.api_version < FIRST_BATCHED_VERSION
    if is_single:
        try:
            request.authorize(ResourceType.GROUP, message.group_id)
            state.groups.topic.check(message.group_id)
        except BrokerError as error:
            return _error_response(message, request.header.api_version, error.code)
        result, budget = OffsetFetchResponse(topics=[]), state.step_budget()
        requested = yield from _requested(state, request, message.group_id, message.topics, budget)
        for item in _offsets(
            state,
            request,
            message.group_id,
            requested,
            message.topics is not None,
            require_stable,
            budget,
            OffsetFetchResponse.OffsetFetchResponsePartition,
        ):
            if item is None:
                yield None
                continue
            topic, offsets = item
            result.topics.append(
                OffsetFetchResponse.OffsetFetchResponseTopic(
                    name=topic,
                    partitions=offsets,
                )
            )
        return result
    # A group that is named several times gets one result, for its first entry. Otherwise a small request
    # could make the broker return the offsets of a large group thousands of times.
    groups: dict[str, OffsetFetchRequest.OffsetFetchRequestGroup] = {}
    for group in message.groups:
        groups.setdefault(group.group_id, group)
    if len(groups) > MAX_NAMES:
        raise PeerError(
            f"OffsetFetch of {len(groups)} groups: the limit is {MAX_NAMES}; use several requests"
        )
    response, budget = OffsetFetchResponse(groups=[]), state.step_budget()
    for group in groups.values():
        response.groups.append((yield from _group(state, request, group, require_stable, budget)))
        if budget.spend():
            yield None
    return response


def _error_response(message: OffsetFetchRequest, version: int, code: int) -> OffsetFetchResponse:
    """Return the response that refuses the group. In version 1 every partition has the error code."""
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
    requested: OffsetFetchRequest.OffsetFetchRequestGroup,
    require_stable: bool,
    budget: StepBudget,
) -> Work[OffsetFetchResponse.OffsetFetchResponseGroup]:
    try:
        request.authorize(ResourceType.GROUP, requested.group_id)
        consumers = state.groups.consumers.get(requested.group_id)
        if consumers is not None:
            consumers.check_fetch(requested.member_id, requested.member_epoch)
    except BrokerError as error:
        return OffsetFetchResponse.OffsetFetchResponseGroup(
            group_id=requested.group_id, error_code=error.code
        )
    group = OffsetFetchResponse.OffsetFetchResponseGroup(group_id=requested.group_id)
    has_ids = request.header.api_version >= FIRST_ID_VERSION
    unknown = (yield from _name_topics(state, requested.topics or (), budget)) if has_ids else []
    named = (
        None
        if requested.topics is None
        else [topic for topic in requested.topics if topic.name or not has_ids]
    )
    ids = {topic.name: bytes(topic.topic_id) for topic in named or () if has_ids}
    make = OffsetFetchResponse.OffsetFetchResponsePartitions
    wanted = yield from _requested(state, request, requested.group_id, named, budget)
    is_named = named is not None
    for item in _offsets(state, request, requested.group_id, wanted, is_named, require_stable, budget, make):
        if item is None:
            yield None
            continue
        name, offsets = item
        topic = state.topics.get(name)
        if name in ids and (topic is None or topic.topic_id != ids[name]):
            # The topic was deleted between two steps, and the offsets may belong to a new topic with its
            # name.
            unknown_rows = [_unknown_id(row.partition_index) for row in offsets]
            group.topics.append(_TopicResult(topic_id=ids[name], partitions=unknown_rows))
            continue
        group.topics.append(
            _TopicResult(
                name=name,
                topic_id=NO_ID if topic is None else topic.topic_id,
                partitions=offsets,
            )
        )
    group.topics += unknown
    return group


def _name_topics(
    state: BrokerState, topics: Iterable[_TopicRequest], budget: StepBudget
) -> Work[list[_TopicResult]]:
    """Set the name of each topic from its id. Return the results for unknown ids."""
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


_Row = TypeVar("_Row")
_TopicRequest = OffsetFetchRequest.OffsetFetchRequestTopics
_TopicResult = OffsetFetchResponse.OffsetFetchResponseTopics
_Topics = (
    Iterable[OffsetFetchRequest.OffsetFetchRequestTopic]
    | Iterable[OffsetFetchRequest.OffsetFetchRequestTopics]
)


def _requested(
    state: BrokerState, request: Request, group_id: str, topics: _Topics | None, budget: StepBudget
) -> Work[Iterable[tuple[str, Iterable[int]]]]:
    """Return (topic, partition indexes). If `topics` is None, return all committed offsets of the group.

    As in Kafka, a partition with only a pending offset is left out. Sorting 20,000 offsets and checking the
    permissions takes 0.1 s, so it needs steps. See test_all_offsets_of_a_group_are_sorted_in_steps.
    """
    if topics is not None:
        return [(topic.name, topic.partition_indexes) for topic in topics]
    visible = []
    for tp in list(state.groups.offsets.of(group_id)):
        if request.is_authorized(ResourceType.TOPIC, tp.topic):
            visible.append(tp)
        if budget.spend():
            yield None
    by_topic: dict[str, list[int]] = {}
    for tp in (yield from sorted_in_steps(visible, budget)):
        by_topic.setdefault(tp.topic, []).append(tp.partition)
        if budget.spend():
            yield None
    return by_topic.items()


def _offsets(
    state: BrokerState,
    request: Request,
    group_id: str,
    requested: Iterable[tuple[str, Iterable[int]]],
    is_named: bool,
    require_stable: bool,
    budget: StepBudget,
    make: Callable[..., _Row],
) -> Iterator[tuple[str, list[_Row]] | None]:
    """Yield (topic, results of its partitions) for the requested partitions.

    If not `is_named`, these are all offsets of the group, and those that were deleted since are left out.

    `make` makes the result of a partition from its fields.

    None marks the end of a step.
    """
    # Look the offsets up for each partition. Between two steps, a marker may turn a pending offset into the
    # group's first committed one, and the mapping of its committed offsets is then another one. See
    # test_an_offset_that_is_committed_between_the_steps_of_a_fetch_is_returned.
    offsets = state.groups.offsets

    def fields_of(tp: TopicPartition) -> dict[str, Any]:
        fields = {"partition_index": tp.partition, "committed_offset": NO_OFFSET, "metadata": ""}
        if not request.is_authorized(ResourceType.TOPIC, tp.topic):
            return {**fields, "error_code": TopicAuthorizationFailed.code}
        if require_stable and tp in offsets.pending_of(group_id):
            return {**fields, "error_code": UnstableOffsetCommit.code}
        committed = offsets.of(group_id).get(tp)
        if committed is None:
            return fields
        offset, leader_epoch, metadata, *_ = committed
        return {
            **fields,
            "committed_offset": offset,
            "committed_leader_epoch": leader_epoch,
            "metadata": metadata,
        }

    for topic, partitions in requested:
        results = []
        for index in partitions:
            if is_named or TopicPartition(topic, index) in offsets.of(group_id):
                results.append(make(**fields_of(TopicPartition(topic, index))))
            if budget.spend():
                yield None
        if results or is_named:
            yield topic, results
        if budget.spend():
            yield None
