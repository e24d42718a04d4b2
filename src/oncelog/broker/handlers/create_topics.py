"""CreateTopics (key 19), versions 2-7.

-1 partitions or replication factor mean the defaults (accepted at every version). Errors: 17 name or
collision, 36 exists, 37 partitions below 1, 38 a replication factor this single node cannot give,
39 an assignment that is not this node, 40 configuration, 42 a topic named twice or both numbers and
an assignment, 44 more than 10,000 partitions in one request, 89 controller_mutation_rate (v6+).
They are checked in steps, and all topics of a request are durable by one. validate_only (v1+) checks and
creates nothing. v5+ tells the settings, v7 the topic id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from oncelog.broker.coordinators.internal_topics import (
    METADATA_LOG,
    check_internal_settings,
    with_internal_settings,
)
from oncelog.broker.request import Answer, Request
from oncelog.broker.settings.config_text import topic_entries
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
from oncelog.broker.topics.names import TopicNames, check_topic_name
from oncelog.broker.topics.topic_config import check_overrides
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
"""From here on clients know THROTTLING_QUOTA_EXCEEDED."""
MAX_PARTITIONS_PER_REQUEST = 10_000
"""Source: kafka ReplicationControlManager.MAX_PARTITIONS_PER_BATCH."""
MAX_PARTITIONS = 100_000
"""Of one topic; each costs files and memory, and a typing error should not cost the node."""

_Asked = CreateTopicsRequest.CreatableTopic
_Result = CreateTopicsResponse.CreatableTopicResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    # Finish even if the client has gone away: the file already names these topics.
    answer: Answer = answer_in_steps(state.slots, _create_all(state, request, now_ms), is_dropped=False)
    return answer


def _create_all(state: BrokerState, request: Request, now_ms: int) -> Work[CreateTopicsResponse]:
    message: CreateTopicsRequest = request.message
    named = Counter(topic.name for topic in message.topics)
    once = {topic.name: topic for topic in message.topics}
    if _total_partitions(state, once.values()) > MAX_PARTITIONS_PER_REQUEST:
        error = PolicyViolation(
            f"more than {MAX_PARTITIONS_PER_REQUEST} partitions in one request; create them in several"
        )
        return CreateTopicsResponse(topics=[_error(asked, error) for asked in once.values()])
    names = TopicNames(state.topics.names())
    results: dict[str, _Result] = {}
    plans: list[NewTopic] = []
    budget = StepBudget(state.limits.partitions_per_step)
    for asked in once.values():
        try:
            if named[asked.name] > 1:
                raise InvalidRequest(f"topic {asked.name!r} is named twice")
            if not request.is_authorized(ResourceType.CLUSTER):
                request.authorize(ResourceType.TOPIC, asked.name)
            plan = _plan(state, asked, names)
            state.quotas.mutate(request, plan.partition_count, FIRST_STRICT_VERSION, now_ms)
            results[asked.name] = _result(state, request, plan)
            names.add(asked.name)
            plans.append(plan)
        except (BrokerError, StorageError) as error:
            results[asked.name] = _error(asked, error)
        if budget.spend():
            yield None
    if not message.validate_only:
        for name, made in (yield from _create(state, plans, now_ms)).items():
            if isinstance(made, Topic):
                results[name].topic_id = made.topic_id
            else:
                results[name] = _error(once[name], made)
    return CreateTopicsResponse(topics=list(results.values()))


def _create(
    state: BrokerState, plans: list[NewTopic], now_ms: int
) -> Work[dict[str, Topic | BrokerError | StorageError]]:
    try:
        made = yield from state.topics.create_in_steps(plans, now_ms)
    except (StorageError, KafkaStorageError) as error:
        return {plan.name: error for plan in plans}
    return {plan.name: each for plan, each in zip(plans, made, strict=True)}


def _total_partitions(state: BrokerState, asked: Iterable[_Asked]) -> int:
    default: int = state.settings["num.partitions"]
    return sum(
        len(topic.assignments) or (default if topic.num_partitions == -1 else max(topic.num_partitions, 0))
        for topic in asked
    )


def _error(asked: _Asked, error: BrokerError | StorageError) -> _Result:
    refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
    return _Result(
        name=asked.name,
        topic_id=NO_ID,
        error_code=refusal.code,
        error_message=refusal.message,
    )


def _result(state: BrokerState, request: Request, plan: NewTopic) -> _Result:
    """Return the answer for a topic that is created, without its id."""
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
                # The topic's own settings as they were given, as in Kafka: DescribeConfigs tells them parsed.
                name=entry.name,
                value=plan.overrides.get(entry.name, entry.value),
                config_source=entry.source,
            )
            for entry in topic_entries(state.settings, plan.overrides)
        ],
    )


def _plan(state: BrokerState, asked: _Asked, names: TopicNames) -> NewTopic:
    if asked.name == METADATA_LOG:
        raise InvalidRequest(f"{METADATA_LOG} is the name of a cluster's own log")
    check_topic_name(asked.name)
    if state.topics.get(asked.name) is not None or state.topics.is_changing(asked.name):
        raise TopicAlreadyExists(f"topic {asked.name!r} is already there")
    names.check(asked.name)
    # Of a setting that is named twice the last value holds, but each must be one.
    nulls = [(config.name, None) for config in asked.configs if config.value is None]
    given = {config.name: config.value for config in asked.configs}
    overrides = check_overrides(state.settings, given | dict(nulls))
    check_internal_settings(asked.name, overrides)
    overrides = with_internal_settings(asked.name, overrides, state.settings)
    count = _assigned_partitions(state, asked) if asked.assignments else _partition_count(state, asked)
    return NewTopic(asked.name, count, overrides)


def _partition_count(state: BrokerState, asked: _Asked) -> int:
    count = state.settings["num.partitions"] if asked.num_partitions == -1 else asked.num_partitions
    factor = asked.replication_factor
    if factor < -1 or factor == 0:
        raise InvalidReplicationFactor(f"replication factor {factor}; ask for 1, or -1 for the default")
    if not 1 <= count <= MAX_PARTITIONS:
        raise InvalidPartitions(f"{count} partitions; allowed are 1 to {MAX_PARTITIONS}")
    if factor > 1 and not state.settings["oncelog.accept.any.replication.factor"]:
        raise InvalidReplicationFactor(
            f"replication factor {factor}: this is a single node and can give 1 (or set "
            "oncelog.accept.any.replication.factor=true to have more taken for 1)"
        )
    return int(count)


def _assigned_partitions(state: BrokerState, asked: _Asked) -> int:
    if asked.num_partitions != -1 or asked.replication_factor != -1:
        raise InvalidRequest("give either an assignment or numbers of partitions and replicas, not both")
    indexes = sorted(assignment.partition_index for assignment in asked.assignments)
    if indexes != list(range(len(indexes))):
        raise InvalidReplicaAssignment("the partitions of an assignment must be 0, 1, 2, ... without gaps")
    if any(assignment.broker_ids != [state.node_id] for assignment in asked.assignments):
        raise InvalidReplicaAssignment(f"the only broker to assign to is {state.node_id}")
    return len(indexes)
