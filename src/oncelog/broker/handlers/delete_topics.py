"""DeleteTopics (key 20), versions 1-6: by name, from v6 on by name or id.

Everything of the topic goes, its producers' state (row I16) and committed offsets too, also when the broker
is killed meanwhile. Errors: 3 unknown name, 100 unknown id, 42 both or neither name and id, or a topic named
twice (it stays), 73 delete.topic.enable=false, 89 controller_mutation_rate (v5+).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
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
"""From here on clients know THROTTLING_QUOTA_EXCEEDED."""

_Result = DeleteTopicsResponse.DeletableTopicResult
_Asked = DeleteTopicsRequest.DeleteTopicState
_Planned = tuple[Topic, _Result, bool]
"""A topic that may be deleted, its result, and whether the request names it by its id."""


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = answer_in_steps(state.slots, _answer(state, request, now_ms), is_dropped=False)
    return answer


def _answer(state: BrokerState, request: Request, now_ms: int) -> Work[DeleteTopicsResponse]:
    message: DeleteTopicsRequest = request.message
    asked = (
        message.topics if request.header.api_version >= 6 else [_Asked(name=n) for n in message.topic_names]
    )
    named = Counter(_key(one) for one in asked)
    twice = {key for key, count in named.items() if count > 1}
    both_ways = _named_both_ways(state, asked)
    once = {_key(one): one for one in asked if one.name is not None or one.topic_id not in both_ways}
    doomed: list[_Planned] = []
    results, budget = [], StepBudget(state.limits.request_step_elements)
    for key, one in once.items():
        results.append(_plan(state, request, one, key in twice, both_ways, doomed, now_ms))
        if budget.spend():
            yield None
    yield from _delete(state, doomed, now_ms)
    return DeleteTopicsResponse(responses=results)


def _delete(state: BrokerState, planned: Sequence[_Planned], now_ms: int) -> Work[None]:
    """Delete topics, durably in the first step; their results tell if that fails.

    In other steps their directories are removed, and then their committed offsets are deleted.
    """
    doomed: dict[Topic, _Result] = {}
    for topic, result, is_by_id in planned:
        if topic.state is TopicState.LIVE:
            doomed[topic] = result
        else:  # another request has deleted it between the steps
            result.error_code = UnknownTopicId.code if is_by_id else UnknownTopicOrPartition.code
    if not doomed:
        return
    topics = [*doomed]
    try:
        state.topics.doom(topics)
    except (BrokerError, StorageError) as error:
        refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
        for result in doomed.values():
            result.error_code, result.error_message = refusal.code, refusal.message
        return
    finally:
        for topic in topics:
            for index in range(len(topic.partitions)):
                state.fetch_purgatory.complete_all(TopicPartition(topic.name, index))
    yield from state.topics.remove_in_steps(topics)
    yield from state.groups.delete_offsets_of([topic.name for topic in topics], now_ms)


def _key(asked: _Asked) -> tuple[str | None, bytes]:
    return asked.name, bytes(asked.topic_id or NO_ID)


def _named_both_ways(state: BrokerState, asked: Iterable[_Asked]) -> set[bytes]:
    """Ids of the topics that the request names once by name and once by id."""
    by_name = {one.name for one in asked if one.name is not None}
    by_id = {bytes(one.topic_id) for one in asked if one.name is None}
    topics = (state.topics.get(name) for name in by_name)
    return by_id & {bytes(topic.topic_id) for topic in topics if topic is not None}


def _plan(
    state: BrokerState,
    request: Request,
    asked: _Asked,
    is_named_twice: bool,
    both_ways: Collection[bytes],
    doomed: list[_Planned],
    now_ms: int,
) -> _Result:
    """The answer for a topic, which joins the `doomed` if it may be deleted."""
    result = _Result(name=asked.name, topic_id=asked.topic_id or NO_ID)
    try:
        if is_named_twice:
            raise InvalidRequest("the topic is named twice")
        may_describe = functools.partial(request.access.may, Operation.DESCRIBE, ResourceType.TOPIC)
        may_all = request.is_authorized(ResourceType.CLUSTER)
        if asked.name is not None and not (may_all or may_describe(asked.name)):
            raise TopicAuthorizationFailed()
        topic = _find(state, asked)
        if may_all or may_describe(topic.name):
            result.name, result.topic_id = topic.name, topic.topic_id
        if not may_all:
            request.authorize(ResourceType.TOPIC, topic.name)
        if topic.topic_id in both_ways:
            raise InvalidRequest("the topic is named by its name and by its id")
        if topic.is_internal:
            raise InvalidTopicException(f"{topic.name} is the broker's own; its coordinators live by it")
        if not state.settings["delete.topic.enable"]:
            raise TopicDeletionDisabled("delete.topic.enable is false")
        state.quotas.mutate(request, len(topic.partitions), FIRST_STRICT_VERSION, now_ms)
    except BrokerError as error:
        result.error_code, result.error_message = error.code, error.message
    else:
        doomed.append((topic, result, asked.name is None))
    return result


def _find(state: BrokerState, asked: _Asked) -> Topic:
    has_id = bool(asked.topic_id) and asked.topic_id != NO_ID
    if (asked.name is not None) == has_id:
        raise InvalidRequest("a topic is named by its name or by its id, not by both or neither")
    topic = state.topics.by_id(asked.topic_id) if has_id else state.topics.get(asked.name or "")
    if topic is None:
        raise UnknownTopicId() if has_id else UnknownTopicOrPartition()
    return topic
