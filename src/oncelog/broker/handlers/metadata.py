"""Metadata (key 3), versions 0-13: the broker, the topics and the leaders of their partitions.

In version 0 an empty list means all topics; from version 1 on null means all and an empty list none. If
auto.create.topics.enable and the request allow it, an unknown topic is created with num.partitions, and the
response describes it. A request below version 4 always allows it. A topic that is named twice gets one
result.

Errors: UNKNOWN_TOPIC_OR_PARTITION, INVALID_TOPIC_EXCEPTION (an invalid name), UNKNOWN_TOPIC_ID (version 10
and later).

Large responses are kept encoded until a topic changes: ten thousand partitions take 20 ms to describe and to
encode. Source: Kafka's KafkaApis.handleTopicMetadataRequest and AutoTopicCreationManager.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from oncelog.broker.coordinators.internal_topic_config import (
    CONSUMER_OFFSETS,
    METADATA_LOG,
    TRANSACTION_STATE,
)
from oncelog.broker.encoded_response import EncodedInSteps, encode_in_steps
from oncelog.broker.handlers.create_topics import MAX_PARTITIONS_PER_REQUEST
from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import FULL_ACCESS, allowed_bits
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Continuation, StepBudget, Work, respond_in_steps
from oncelog.broker.topics.topic_names import check_topic_name
from oncelog.broker.topics.topics import NewTopic, Topic
from oncelog.errors import (
    BrokerError,
    KafkaStorageError,
    StorageError,
    TopicAlreadyExists,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
    copy_to_raise,
    without_traceback,
)
from oncelog.rules.limits.quotas import MUTATIONS
from oncelog.rules.security.authorization import CLUSTER_NAME, Operation, ResourceType
from oncelog.wire.messages import NO_ID, Message, MetadataRequest, MetadataResponse

KEY = 3
NAMED_TOPIC_BYTES = 160
"""The memory in bytes of a requested topic in the key of a cached response, without its name's characters."""

_PARTITION_COUNTS = {
    CONSUMER_OFFSETS: "offsets.topic.num.partitions",
    TRANSACTION_STATE: "transaction.state.log.num.partitions",
}
"""The settings of the partition counts of new internal topics. For other topics it is num.partitions."""

_Topic = MetadataResponse.MetadataResponseTopic


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    may_create = _may_create(state, request.message)
    # Create topics even after the client has disconnected: once the topics file names the new topics, their
    # partitions must be created.
    answer: Answer = respond_in_steps(
        state.slots,
        _create_and_describe(state, request, now_ms) if may_create else _describe_all(state, request, {}),
        is_cancellable=not may_create,
    )
    return answer


def _may_create(state: BrokerState, message: MetadataRequest) -> bool:
    """Return True if the request and the broker allow to create missing topics."""
    return bool(message.allow_auto_topic_creation and state.settings["auto.create.topics.enable"])


def _create_and_describe(state: BrokerState, request: Request, now_ms: int) -> Work[Continuation]:
    """Create the missing topics, and return the Continuation that describes all of them.

    It stops if the client disconnects, and needs a slot. See
    test_the_description_of_topics_that_may_be_created_goes_with_its_connection. The cache is used only after
    the creation, because a repeated request may create what an earlier one could not. See
    test_a_topic_that_could_not_be_created_is_created_by_the_next_request.
    """
    refused = yield from _create_missing(state, request, now_ms)
    return Continuation(lambda: respond_in_steps(state.slots, _describe_all(state, request, refused)))


def _describe_all(state: BrokerState, request: Request, refused: Mapping[str, BrokerError]) -> Work[Message]:
    message: MetadataRequest = request.message
    version = request.header.api_version
    wants_all = message.topics is None or (version == 0 and not message.topics)
    requested = (
        None if wants_all else tuple((topic.name, bytes(topic.topic_id)) for topic in message.topics or ())
    )
    may_create = _may_create(state, message)
    includes = message.include_topic_authorized_operations, message.include_cluster_authorized_operations
    # The address is part of the cache key, because it depends on the listener of the request. See
    # test_metadata_names_the_listener_of_the_connection.
    key = version, requested, may_create, includes, state.address(request)
    is_for_all = request.access is FULL_ACCESS
    cached: EncodedInSteps | None = state.topics.large_responses.get(key) if is_for_all else None
    if cached is not None:
        return cached.copy()
    revision = state.topics.revision
    answer = yield from _response(state, request, None if wants_all else message.topics, refused)
    if message.include_cluster_authorized_operations:
        answer.cluster_authorized_operations = cluster_bits(request)
    count = sum(len(topic.partitions) for topic in answer.topics)
    if not is_for_all or count < state.limits.large_answer_partitions:
        return answer
    encoded = yield from encode_in_steps(answer, version)
    if revision == state.topics.revision:
        state.topics.keep_response(key, encoded, encoded.size_bytes + _size_bytes(requested or ()))
    return encoded.copy()


def _size_bytes(requested: Collection[tuple[str | None, bytes]]) -> int:
    """Return the approximate memory in bytes of the requested names and ids."""
    return NAMED_TOPIC_BYTES * len(requested) + sum(len(name or "") for name, _ in requested)


def _response(
    state: BrokerState,
    request: Request,
    requested: list[MetadataRequest.MetadataRequestTopic] | None,
    refused: Mapping[str, BrokerError],
) -> Work[MetadataResponse]:
    topics, budget = [], state.step_budget()
    if requested is None:
        for topic in list(state.topics.all()):
            if request.is_authorized(ResourceType.TOPIC, topic.name):
                topics.append((yield from _describe(state, topic, budget)))
                _add_operations(request, topics[-1])
            if budget.spend():
                yield None
    else:
        unique = {(topic.name, bytes(topic.topic_id)): topic for topic in requested}
        for named in unique.values():
            topics.append((yield from _look_up(state, request, named, refused, budget)))
            _add_operations(request, topics[-1])
            if budget.spend():
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


def _create_missing(state: BrokerState, request: Request, now_ms: int) -> Work[dict[str, BrokerError]]:
    """Create the requested topics that do not exist, with one durable write. Return the errors by topic name.

    A request creates at most MAX_PARTITIONS_PER_REQUEST partitions, but always at least one topic. The
    remaining topics stay unknown, and clients repeat the request for them.
    """
    refused: dict[str, BrokerError] = {}
    missing: list[NewTopic] = []
    total_count = 0
    budget, named = state.step_budget(), request.message.topics or ()
    for name in {topic.name: None for topic in named if bytes(topic.topic_id) == NO_ID}:
        # The names may all be invalid. See test_names_of_topics_that_may_be_created_are_checked_in_steps.
        if budget.spend():
            yield None
        # The next start would take a topic with the name of Kafka's metadata log for that log. Like Kafka,
        # report it as unknown. See test_no_topic_gets_the_name_of_the_metadata_log.
        if name is None or name == METADATA_LOG or state.topics.get(name) is not None:
            continue
        if state.topics.is_changing(name):
            # While the topic is being created or deleted, report it as unknown. The client repeats its
            # request.
            continue
        count: int = state.settings[_PARTITION_COUNTS.get(name, "num.partitions")]
        if missing and total_count + count > MAX_PARTITIONS_PER_REQUEST:
            break
        try:
            request.authorize(ResourceType.TOPIC, name)
            check_topic_name(name)
            _check_create(request, name)
        except BrokerError as error:
            refused[name] = without_traceback(error)
        else:
            missing.append(NewTopic(name, count, {}))
            total_count += count
    if not missing:
        return refused
    state.round_meter.fill_round()
    try:
        created = yield from state.topics.create_in_steps(missing, now_ms)
    except (StorageError, KafkaStorageError) as error:
        return refused | {new.name: KafkaStorageError(str(error)) for new in missing}
    for new, result in zip(missing, created, strict=True):
        if isinstance(result, Topic):
            state.quotas.charge(MUTATIONS, request.quota_principal, new.partition_count, now_ms)
        elif not isinstance(result, TopicAlreadyExists):
            # Leave out TopicAlreadyExists: another request is creating the topic, and this client repeats its
            # request.
            refused[new.name] = result if isinstance(result, BrokerError) else KafkaStorageError(str(result))
    return refused


def _look_up(
    state: BrokerState,
    request: Request,
    requested: MetadataRequest.MetadataRequestTopic,
    refused: Mapping[str, BrokerError],
    budget: StepBudget,
) -> Work[_Topic]:
    try:
        # An id takes precedence over the name, because the Java client sends an empty name with an id, not
        # null.
        if requested.name is None or bytes(requested.topic_id) != NO_ID:
            topic = state.topics.by_id(requested.topic_id)
            if topic is None:
                raise UnknownTopicId()
            if not request.is_authorized(ResourceType.TOPIC, topic.name):
                return _Topic(error_code=TopicAuthorizationFailed.code, name=None, topic_id=topic.topic_id)
            return (yield from _describe(state, topic, budget))
        request.authorize(ResourceType.TOPIC, requested.name)
        topic = state.topics.get(requested.name)
        if topic is None:
            check_topic_name(requested.name)
            raise copy_to_raise(refused.get(requested.name, UnknownTopicOrPartition()))
        return (yield from _describe(state, topic, budget))
    except BrokerError as error:
        return _Topic(error_code=error.code, name=requested.name, topic_id=requested.topic_id or NO_ID)


def _add_operations(request: Request, topic: _Topic) -> None:
    if (
        request.message.include_topic_authorized_operations
        and topic.error_code != TopicAuthorizationFailed.code
    ):
        topic.topic_authorized_operations = allowed_bits(request.access, ResourceType.TOPIC, topic.name or "")


def _check_create(request: Request, topic: str) -> None:
    is_authorized = request.access.may
    if not is_authorized(Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME) and not is_authorized(
        Operation.CREATE, ResourceType.TOPIC, topic
    ):
        raise TopicAuthorizationFailed()


def cluster_bits(request: Request) -> int:
    """Return the operations that the client may do on the cluster, one bit for each.

    Without DESCRIBE the result is 0.
    """
    if not request.is_authorized(ResourceType.CLUSTER):
        return 0
    return allowed_bits(request.access, ResourceType.CLUSTER, CLUSTER_NAME)


def _describe(state: BrokerState, topic: Topic, budget: StepBudget) -> Work[_Topic]:
    """Return the description of a topic. Its partitions need steps, too: a topic may have 100,000 of them."""
    result = _Topic(name=topic.name, topic_id=topic.topic_id, is_internal=topic.is_internal, partitions=[])
    # All partitions share these lists. With lists of its own, each would take more than twice as much memory.
    # See test_the_partitions_of_a_metadata_response_share_their_lists.
    nodes, no_nodes = [state.node_id], list[int]()
    for index, partition in enumerate(topic.partitions.copy()):
        if budget.spend():
            yield None
        result.partitions.append(
            MetadataResponse.MetadataResponsePartition(
                partition_index=index,
                leader_id=state.node_id,
                leader_epoch=partition.leader_epoch,
                replica_nodes=nodes,
                isr_nodes=nodes,
                offline_replicas=no_nodes,
            )
        )
    return result
