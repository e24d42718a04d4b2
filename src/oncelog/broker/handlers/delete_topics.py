"""DeleteTopics (key 20), versions 1-6: delete topics by name, from version 6 on by name or id.

A topic's records, its producers' state (behaviour I16, docs/behaviours.md) and its committed offsets are
deleted. If the broker is killed before the end, its next start completes the deletion.

    UNKNOWN_TOPIC_OR_PARTITION  an unknown name
    UNKNOWN_TOPIC_ID            an unknown id
    INVALID_REQUEST             both or neither of name and id, or a topic named twice
    INVALID_TOPIC_EXCEPTION     an internal topic
    TOPIC_DELETION_DISABLED     delete.topic.enable=false
    THROTTLING_QUOTA_EXCEEDED   over controller_mutation_rate, version 5 and later

Source: KIP-4, KIP-516; Kafka's ReplicationControlManager.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.broker.topics.topics import Topic
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    InvalidTopicException,
    KafkaStorageError,
    StorageError,
    TopicAuthorizationFailed,
    TopicDeletionDisabled,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.rules.security.authorization import Operation, ResourceType
from oncelog.rules.storage.topic_state import TopicState
from oncelog.types import TopicPartition
from oncelog.wire.messages import NO_ID, DeleteTopicsRequest, DeleteTopicsResponse

KEY = 20
FIRST_STRICT_VERSION = 5
"""First version in which clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""

_Result = DeleteTopicsResponse.DeletableTopicResult
_Requested = DeleteTopicsRequest.DeleteTopicState
_Planned = tuple[Topic, _Result, bool]
"""(topic that may be deleted, its result, True if the request names the topic by its id)"""


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    state.round_meter.fill_round()
    answer: Answer = respond_in_steps(state.slots, _answer(state, request, now_ms), is_cancellable=False)
    return answer


def _answer(state: BrokerState, request: Request, now_ms: int) -> Work[DeleteTopicsResponse]:
    message: DeleteTopicsRequest = request.message
    if request.header.api_version >= 6:
        entries = message.topics
    else:
        entries = [_Requested(name=name) for name in message.topic_names]
    counts = Counter(_key(entry) for entry in entries)
    twice = {key for key, count in counts.items() if count > 1}
    both_ways = _named_both_ways(state, entries)
    unique = {
        _key(entry): entry for entry in entries if entry.name is not None or entry.topic_id not in both_ways
    }
    planned: list[_Planned] = []
    results, budget = [], state.step_budget()
    for key, entry in unique.items():
        results.append(_plan(state, request, entry, key in twice, both_ways, planned, now_ms))
        if budget.spend():
            yield None
    yield from _delete(state, planned, now_ms)
    return DeleteTopicsResponse(responses=results)


def _delete(state: BrokerState, planned: Sequence[_Planned], now_ms: int) -> Work[None]:
    """Delete the topics durably in the first step. Remove their directories and committed offsets in later
    steps.

    If the durable write fails, the results of all these topics get the error.
    """
    results: dict[Topic, _Result] = {}
    for topic, result, is_by_id in planned:
        if topic.state is TopicState.LIVE:
            results[topic] = result
        else:
            # Another request has deleted the topic between two steps.
            result.error_code = UnknownTopicId.code if is_by_id else UnknownTopicOrPartition.code
    if not results:
        return
    topics = [*results]
    try:
        state.topics.begin_deletion(topics)
    except (BrokerError, StorageError) as error:
        refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
        for result in results.values():
            result.error_code, result.error_message = refusal.code, refusal.message
        return
    finally:
        for topic in topics:
            for index in range(len(topic.partitions)):
                state.fetch_purgatory.complete_all(TopicPartition(topic.name, index))
    yield from state.topics.remove_in_steps(topics)
    yield from state.groups.delete_topic_offsets([topic.name for topic in topics], now_ms)


def _key(requested: _Requested) -> tuple[str | None, bytes]:
    return requested.name, bytes(requested.topic_id or NO_ID)


def _named_both_ways(state: BrokerState, entries: Iterable[_Requested]) -> set[bytes]:
    """Return the ids of the topics that the request names both by name and by id."""
    by_name = {entry.name for entry in entries if entry.name is not None}
    by_id = {bytes(entry.topic_id) for entry in entries if entry.name is None}
    topics = (state.topics.get(name) for name in by_name)
    return by_id & {bytes(topic.topic_id) for topic in topics if topic is not None}


def _plan(
    state: BrokerState,
    request: Request,
    requested: _Requested,
    is_named_twice: bool,
    both_ways: Collection[bytes],
    planned: list[_Planned],
    now_ms: int,
) -> _Result:
    """Return the result for a topic, and append the topic to `planned` if it may be deleted."""
    result = _Result(name=requested.name, topic_id=requested.topic_id or NO_ID)
    try:
        if is_named_twice:
            raise InvalidRequest("the topic occurs twice")
        may_describe = functools.partial(request.access.may, Operation.DESCRIBE, ResourceType.TOPIC)
        may_all = request.is_authorized(ResourceType.CLUSTER)
        if requested.name is not None and not (may_all or may_describe(requested.name)):
            raise TopicAuthorizationFailed()
        topic = _find(state, requested)
        if may_all or may_describe(topic.name):
            result.name, result.topic_id = topic.name, topic.topic_id
        if not may_all:
            request.authorize(ResourceType.TOPIC, topic.name)
        if topic.topic_id in both_ways:
            raise InvalidRequest("the topic occurs twice, by name and by id")
        if topic.is_internal:
            raise InvalidTopicException(f"{topic.name} is an internal topic and cannot be deleted")
        if not state.settings["delete.topic.enable"]:
            raise TopicDeletionDisabled("topics cannot be deleted: delete.topic.enable=false")
        state.quotas.mutate(request, len(topic.partitions), FIRST_STRICT_VERSION, now_ms)
    except BrokerError as error:
        result.error_code, result.error_message = error.code, error.message
    else:
        planned.append((topic, result, requested.name is None))
        state.topics.prepare_deletion(topic)
    return result


def _find(state: BrokerState, requested: _Requested) -> Topic:
    has_id = bool(requested.topic_id) and requested.topic_id != NO_ID
    if (requested.name is not None) == has_id:
        raise InvalidRequest("send either a topic's name or its id")
    topic = state.topics.by_id(requested.topic_id) if has_id else state.topics.get(requested.name or "")
    if topic is None:
        raise UnknownTopicId() if has_id else UnknownTopicOrPartition()
    return topic
