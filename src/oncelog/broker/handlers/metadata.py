"""Metadata (key 3), versions 0-13: brokers, topics, who leads.

Version 0: an empty list means all topics; from 1 on null means all and empty none. An unknown topic
is created when the request (v4+) and auto.create.topics.enable allow it, with num.partitions, and
answered at once as created; else 3. Illegal names 17, unknown topic ids (v10+) 100. Topic ids are
stable for the life of a topic. A topic named twice is answered once. Large answers are
kept encoded until a topic changes: ten thousand partitions take 20 ms to describe and to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oncelog.broker.handlers.create_topics import MAX_PARTITIONS_PER_REQUEST
from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import FULL_ACCESS, allowed_bits
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
from oncelog.broker.topics.names import check_topic_name
from oncelog.broker.topics.topics import NewTopic, Topic
from oncelog.errors import (
    BrokerError,
    KafkaStorageError,
    StorageError,
    TopicAlreadyExists,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.rules.limits.quotas import MUTATIONS
from oncelog.rules.security.authorization import CLUSTER_NAME, Operation, ResourceType
from oncelog.wire.messages import NO_ID, Message, MetadataRequest, MetadataResponse

KEY = 3

_Topic = MetadataResponse.MetadataResponseTopic


class _Encoded(Message):
    """An answer that was written before, at the version it is asked for again."""

    __slots__ = ("_body",)
    api = MetadataResponse.api

    def __init__(self, body: bytes) -> None:
        self._body = body

    def encode_into(self, version: int, append: Callable[[Any], None]) -> None:
        append(self._body)


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: MetadataRequest = request.message
    may_create = bool(message.topics) and message.allow_auto_topic_creation
    # Topics are made to their end, though the client goes away.
    answer: Answer = answer_in_steps(state.slots, _handle(state, request, now_ms), is_dropped=not may_create)
    return answer


def _handle(state: BrokerState, request: Request, now_ms: int) -> Work[Message]:
    message: MetadataRequest = request.message
    version = request.header.api_version
    asks_all = message.topics is None or (version == 0 and not message.topics)
    asked = None if asks_all else tuple((topic.name, bytes(topic.topic_id)) for topic in message.topics or ())
    may_create = message.allow_auto_topic_creation and state.settings["auto.create.topics.enable"]
    tells = message.include_topic_authorized_operations, message.include_cluster_authorized_operations
    key = version, asked, may_create, tells, state.address(request)
    is_for_all = request.access is FULL_ACCESS
    known = state.topics.large_answers.get(key) if is_for_all else None
    if known is not None:
        return _Encoded(known)
    missing = [] if asks_all else (message.topics or [])
    refused = (yield from _create_missing(state, request, missing, now_ms)) if may_create else {}
    revision = state.topics.revision
    answer = yield from _answer(state, request, None if asks_all else message.topics, refused)
    if message.include_topic_authorized_operations:
        for topic in answer.topics:
            if topic.error_code != TopicAuthorizationFailed.code:
                bits = allowed_bits(request.access, ResourceType.TOPIC, topic.name or "")
                topic.topic_authorized_operations = bits
    if message.include_cluster_authorized_operations:
        answer.cluster_authorized_operations = cluster_bits(request)
    if (
        revision == state.topics.revision
        and is_for_all
        and sum(len(topic.partitions) for topic in answer.topics) >= state.limits.large_answer_partitions
    ):
        body = answer.encode(version)
        state.topics.keep_answer(key, body)
        return _Encoded(body)
    return answer


def _answer(
    state: BrokerState,
    request: Request,
    asked: list[MetadataRequest.MetadataRequestTopic] | None,
    refused: Mapping[str, BrokerError],
) -> Work[MetadataResponse]:
    topics, budget = [], StepBudget(state.limits.request_step_elements)
    if asked is None:
        for topic in list(state.topics.all()):
            if request.is_authorized(ResourceType.TOPIC, topic.name):
                topics.append(_describe(state, topic))
            if budget.spend(1 + len(topic.partitions)):
                yield None
    else:
        once = {(topic.name, bytes(topic.topic_id)): topic for topic in asked}
        for each in once.values():
            topics.append(_look_up(state, request, each, refused))
            if budget.spend(1 + len(topics[-1].partitions)):
                yield None
    address = state.address(request)
    return MetadataResponse(
        brokers=[
            MetadataResponse.MetadataResponseBroker(
                node_id=address.node_id, host=address.host, port=address.port
            )
        ],
        cluster_id=state.cluster_id,
        controller_id=state.node_id,
        topics=topics,
    )


def _create_missing(
    state: BrokerState, request: Request, asked: list[MetadataRequest.MetadataRequestTopic], now_ms: int
) -> Work[dict[str, BrokerError]]:
    """Create the topics that are not there, in one durable step; returns why some were not created.

    What is above MAX_PARTITIONS_PER_REQUEST is left out; clients ask again for an unknown topic.
    """
    refused: dict[str, BrokerError] = {}
    count: int = state.settings["num.partitions"]
    missing: list[NewTopic] = []
    for topic in {(topic.name, bytes(topic.topic_id)): topic for topic in asked}.values():
        name = topic.name
        if name is None or bytes(topic.topic_id) != NO_ID or state.topics.get(name) is not None:
            continue
        if state.topics.is_changing(name):
            continue  # unknown for the moment: the client asks again
        if (len(missing) + 1) * count > max(MAX_PARTITIONS_PER_REQUEST, count):
            break
        try:
            request.authorize(ResourceType.TOPIC, name)
            check_topic_name(name)
            _check_create(request, name)
        except BrokerError as error:
            refused[name] = error
        else:
            missing.append(NewTopic(name, count, {}))
    if not missing:
        return refused
    try:
        created = yield from state.topics.create_in_steps(missing, now_ms)
    except (StorageError, KafkaStorageError) as error:
        return refused | {new.name: KafkaStorageError(str(error)) for new in missing}
    for new, made in zip(missing, created, strict=True):
        if isinstance(made, Topic):
            state.quotas.charge(MUTATIONS, request.quota_principal, count, now_ms)
        elif not isinstance(made, TopicAlreadyExists):  # another request makes it: the client asks again
            refused[new.name] = made if isinstance(made, BrokerError) else KafkaStorageError(str(made))
    return refused


def _look_up(
    state: BrokerState,
    request: Request,
    asked: MetadataRequest.MetadataRequestTopic,
    refused: Mapping[str, BrokerError],
) -> _Topic:
    try:
        # An id counts whatever the name: the Java client leaves the name empty then, not null.
        if asked.name is None or bytes(asked.topic_id) != NO_ID:
            topic = state.topics.by_id(asked.topic_id)
            if topic is None:
                raise UnknownTopicId()
            if not request.is_authorized(ResourceType.TOPIC, topic.name):
                return _Topic(error_code=TopicAuthorizationFailed.code, name=None, topic_id=topic.topic_id)
            return _describe(state, topic)
        request.authorize(ResourceType.TOPIC, asked.name)
        topic = state.topics.get(asked.name)
        if topic is None:
            check_topic_name(asked.name)
            raise refused.get(asked.name, UnknownTopicOrPartition())
        return _describe(state, topic)
    except BrokerError as error:
        return _Topic(error_code=error.code, name=asked.name, topic_id=asked.topic_id or NO_ID)


def _check_create(request: Request, topic: str) -> None:
    may = request.access.may
    if not may(Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME) and not may(
        Operation.CREATE, ResourceType.TOPIC, topic
    ):
        raise TopicAuthorizationFailed()


def cluster_bits(request: Request) -> int:
    """What the client may do to the cluster; 0 when it may not even ask."""
    if not request.is_authorized(ResourceType.CLUSTER):
        return 0
    return allowed_bits(request.access, ResourceType.CLUSTER, CLUSTER_NAME)


def _describe(state: BrokerState, topic: Topic) -> _Topic:
    return _Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=[
            MetadataResponse.MetadataResponsePartition(
                partition_index=index,
                leader_id=state.node_id,
                leader_epoch=partition.leader_epoch,
                replica_nodes=[state.node_id],
                isr_nodes=[state.node_id],
            )
            for index, partition in enumerate(topic.partitions)
        ],
    )
