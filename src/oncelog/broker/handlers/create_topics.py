"""CreateTopics (key 19), versions 2-7: create topics.

In every version, the partition count -1 and the replication factor -1 mean the default.

    INVALID_TOPIC_EXCEPTION     an invalid name, or one that differs from another only in '.' and '_'
    TOPIC_ALREADY_EXISTS        a topic has the name
    INVALID_PARTITIONS          fewer than 1, or more than MAX_PARTITIONS
    INVALID_REPLICATION_FACTOR  0 or below -1; or above 1, because there is one broker, unless
                                oncelog.accept.any.replication.factor is set
    INVALID_REPLICA_ASSIGNMENT  an assignment to any broker but this one, or a missing index
    INVALID_CONFIG              an unknown key or a bad value
    INVALID_REQUEST             a topic named twice, or both an assignment and a partition or replica count
    POLICY_VIOLATION            more than 10,000 partitions in one request
    THROTTLING_QUOTA_EXCEEDED   over controller_mutation_rate, version 6 and later

The topics are checked in steps, and one write makes all topics of a request durable. With validate_only
nothing is created. Version 5 and later return the settings, version 7 the topic id. Source: KIP-4, KIP-464,
KIP-525; Kafka's ReplicationControlManager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from oncelog.broker.coordinators.internal_topic_config import (
    METADATA_LOG,
    check_internal_settings,
    with_internal_settings,
)
from oncelog.broker.request import Answer, Request
from oncelog.broker.settings.config_text import topic_entries
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, respond_in_steps
from oncelog.broker.topics.topic_config import check_overrides
from oncelog.broker.topics.topic_names import TopicNames, check_topic_name
from oncelog.broker.topics.topics import NewTopic, Topic
from oncelog.errors import (
    BrokerError,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidRequest,
    KafkaStorageError,
    PolicyViolation,
    StorageError,
    TopicAlreadyExists,
    TopicAuthorizationFailed,
)
from oncelog.rules.security.authorization import Operation, ResourceType
from oncelog.wire.messages import NO_ID, CreateTopicsRequest, CreateTopicsResponse

KEY = 19
FIRST_STRICT_VERSION = 6
"""First version in which clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""
MAX_PARTITIONS_PER_REQUEST = 10_000
"""Largest number of partitions in one request.

Source: kafka ReplicationControlManager.MAX_PARTITIONS_PER_BATCH.
"""
MAX_PARTITIONS = 100_000
"""Largest partition count of a topic.

Each partition costs files and memory, so a mistyped count could crash the broker.
"""

_Requested = CreateTopicsRequest.CreatableTopic
_Result = CreateTopicsResponse.CreatableTopicResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    state.round_meter.fill_round()
    # Finish even if the client has disconnected: once the topics file names the new topics, their partitions
    # must be created.
    answer: Answer = respond_in_steps(state.slots, _create_all(state, request, now_ms), is_cancellable=False)
    return answer


def _create_all(state: BrokerState, request: Request, now_ms: int) -> Work[CreateTopicsResponse]:
    message: CreateTopicsRequest = request.message
    named = Counter(topic.name for topic in message.topics)
    unique = {topic.name: topic for topic in message.topics}
    if _total_partitions(state, unique.values()) > MAX_PARTITIONS_PER_REQUEST:
        error = PolicyViolation(
            f"a request may create at most {MAX_PARTITIONS_PER_REQUEST} partitions; use several requests"
        )
        return CreateTopicsResponse(topics=[_error(requested, error) for requested in unique.values()])
    names = TopicNames(state.topics.names())
    results: dict[str, _Result] = {}
    plans: list[NewTopic] = []
    budget = StepBudget(state.limits.partitions_per_step)
    for requested in unique.values():
        try:
            if named[requested.name] > 1:
                raise InvalidRequest(f"topic {requested.name!r} occurs twice")
            if not request.is_authorized(ResourceType.CLUSTER):
                request.authorize(ResourceType.TOPIC, requested.name)
            plan = _plan(state, requested, names)
            state.quotas.mutate(request, plan.partition_count, FIRST_STRICT_VERSION, now_ms)
            results[requested.name] = _result(state, request, plan)
            names.add(requested.name)
            plans.append(plan)
        except (BrokerError, StorageError) as error:
            results[requested.name] = _error(requested, error)
        if budget.spend():
            yield None
    if not message.validate_only:
        for name, created in (yield from _create(state, plans, now_ms)).items():
            if isinstance(created, Topic):
                results[name].topic_id = created.topic_id
            else:
                results[name] = _error(unique[name], created)
    return CreateTopicsResponse(topics=list(results.values()))


def _create(
    state: BrokerState, plans: list[NewTopic], now_ms: int
) -> Work[dict[str, Topic | BrokerError | StorageError]]:
    try:
        results = yield from state.topics.create_in_steps(plans, now_ms)
    except (StorageError, KafkaStorageError) as error:
        return {plan.name: error for plan in plans}
    return {plan.name: result for plan, result in zip(plans, results, strict=True)}


def _total_partitions(state: BrokerState, requested: Iterable[_Requested]) -> int:
    default: int = state.settings["num.partitions"]
    return sum(
        len(topic.assignments) or (default if topic.num_partitions == -1 else max(topic.num_partitions, 0))
        for topic in requested
    )


def _error(requested: _Requested, error: BrokerError | StorageError) -> _Result:
    refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
    return _Result(
        name=requested.name,
        topic_id=NO_ID,
        error_code=refusal.code,
        error_message=refusal.message,
    )


def _result(state: BrokerState, request: Request, plan: NewTopic) -> _Result:
    """Return the result for a topic that passed all checks. The topic id is filled in after its creation."""
    if not request.access.may(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, plan.name):
        return _Result(
            name=plan.name,
            topic_id=NO_ID,
            num_partitions=-1,
            replication_factor=-1,
            configs=None,
            topic_config_error_code=TopicAuthorizationFailed.code,
        )
    return _Result(
        name=plan.name,
        topic_id=NO_ID,
        num_partitions=plan.partition_count,
        replication_factor=1,
        configs=[
            CreateTopicsResponse.CreatableTopicConfigs(
                # As in Kafka, return the topic's own values as the client sent them. DescribeConfigs returns
                # parsed values.
                name=entry.name,
                value=plan.overrides.get(entry.name, entry.value),
                config_source=entry.source,
            )
            for entry in topic_entries(state.settings, plan.overrides)
        ],
    )


def _plan(state: BrokerState, requested: _Requested, names: TopicNames) -> NewTopic:
    if requested.name == METADATA_LOG:
        raise InvalidRequest(f"{METADATA_LOG} is the name of Kafka's metadata log; use another topic name")
    check_topic_name(requested.name)
    if state.topics.get(requested.name) is not None or state.topics.is_changing(requested.name):
        raise TopicAlreadyExists(f"topic {requested.name!r} already exists")
    names.check(requested.name)
    # If the request names a setting twice, the last value is used. But a null value is refused even if
    # another value follows it.
    nulls = [(config.name, None) for config in requested.configs if config.value is None]
    own = {config.name: config.value for config in requested.configs}
    overrides = check_overrides(state.settings, own | dict(nulls))
    check_internal_settings(requested.name, overrides)
    overrides = with_internal_settings(requested.name, overrides, state.settings)
    count = (
        _assigned_partitions(state, requested)
        if requested.assignments
        else _partition_count(state, requested)
    )
    return NewTopic(requested.name, count, overrides)


def _partition_count(state: BrokerState, requested: _Requested) -> int:
    count = state.settings["num.partitions"] if requested.num_partitions == -1 else requested.num_partitions
    factor = requested.replication_factor
    if factor < -1 or factor == 0:
        raise InvalidReplicationFactor(f"replication factor {factor}: use 1, or -1 for the default")
    if not 1 <= count <= MAX_PARTITIONS:
        raise InvalidPartitions(f"{count} partitions: must be 1 to {MAX_PARTITIONS}")
    if factor > 1 and not state.settings["oncelog.accept.any.replication.factor"]:
        raise InvalidReplicationFactor(
            f"replication factor {factor}: this cluster has one broker, so use 1, or set "
            "oncelog.accept.any.replication.factor=true on the broker to treat higher values "
            "as 1"
        )
    return int(count)


def _assigned_partitions(state: BrokerState, requested: _Requested) -> int:
    if requested.num_partitions != -1 or requested.replication_factor != -1:
        raise InvalidRequest("send either an assignment, or the partition count and replication factor")
    indexes = sorted(assignment.partition_index for assignment in requested.assignments)
    if indexes != list(range(len(indexes))):
        raise InvalidReplicaAssignment("the assignment must contain the partitions 0, 1, 2, ... without gaps")
    if any(assignment.broker_ids != [state.node_id] for assignment in requested.assignments):
        raise InvalidReplicaAssignment(
            f"the cluster has only broker {state.node_id}; assign the partitions to it"
        )
    return len(indexes)
