"""CreatePartitions (key 37), versions 0-3: increase a topic's partition count.

    UNKNOWN_TOPIC_OR_PARTITION  there is no such topic
    INVALID_TOPIC_EXCEPTION     an internal topic
    INVALID_PARTITIONS          not above the topic's count, or above MAX_PARTITIONS
    INVALID_REPLICA_ASSIGNMENT  other than one assignment per new partition, each to this broker alone
    INVALID_REQUEST             a topic named twice
    POLICY_VIOLATION            more than 10,000 new partitions in one request
    THROTTLING_QUOTA_EXCEEDED   over controller_mutation_rate, version 3 and later

With validate_only nothing is created. The partitions are created in steps; clients see a topic's new
partitions once all of them exist. Source: KIP-195; Kafka's ReplicationControlManager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from oncelog.broker.handlers.create_topics import MAX_PARTITIONS, MAX_PARTITIONS_PER_REQUEST
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.broker.topics.topics import Topic
from oncelog.errors import (
    BrokerError,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidRequest,
    InvalidTopicException,
    KafkaStorageError,
    PolicyViolation,
    StorageError,
    UnknownTopicOrPartition,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import CreatePartitionsRequest, CreatePartitionsResponse

KEY = 37
FIRST_STRICT_VERSION = 3
"""First version in which clients know THROTTLING_QUOTA_EXCEEDED (KIP-599)."""

_Requested = CreatePartitionsRequest.CreatePartitionsTopic
_Result = CreatePartitionsResponse.CreatePartitionsTopicResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    state.round_meter.fill_round()
    # Finish even if the client has disconnected: once the topics file names the new partitions, they must be
    # created.
    answer: Answer = respond_in_steps(state.slots, _answer(state, request, now_ms), is_cancellable=False)
    return answer


def _answer(state: BrokerState, request: Request, now_ms: int) -> Work[CreatePartitionsResponse]:
    message: CreatePartitionsRequest = request.message
    named = Counter(topic.name for topic in message.topics)
    results, budget = [], state.step_budget()
    plans: list[tuple[Topic, int, _Result]] = []
    left_count = MAX_PARTITIONS_PER_REQUEST
    for requested in {topic.name: topic for topic in message.topics}.values():
        result = _Result(name=requested.name)
        try:
            if named[requested.name] > 1:
                raise InvalidRequest(f"topic {requested.name!r} occurs twice")
            request.authorize(ResourceType.TOPIC, requested.name)
            topic = _validate(state, requested, left_count)
            state.quotas.mutate(
                request, requested.count - topic.partition_count, FIRST_STRICT_VERSION, now_ms
            )
        except BrokerError as error:
            result.error_code, result.error_message = error.code, error.message
        else:
            left_count -= requested.count - topic.partition_count
            plans.append((topic, requested.count, result))
        results.append(result)
        if budget.spend():
            yield None
    if plans and not message.validate_only:
        yield from _add_partitions(state, plans, now_ms)
    return CreatePartitionsResponse(results=results)


def _add_partitions(
    state: BrokerState, plans: Sequence[tuple[Topic, int, _Result]], now_ms: int
) -> Work[None]:
    """Add the partitions of all topics with one durable write.

    A topic that fails gets an error in its result.
    """
    changes = [(topic, count) for topic, count, _ in plans]
    try:
        failures = yield from state.topics.grow_in_steps(changes, now_ms)
    except (StorageError, KafkaStorageError) as error:
        failures = {topic.name: error for topic, _ in changes}
    for topic, _, result in plans:
        if (failure := failures.get(topic.name)) is not None:
            refusal = failure if isinstance(failure, BrokerError) else KafkaStorageError(str(failure))
            result.error_code, result.error_message = refusal.code, refusal.message


def _validate(state: BrokerState, requested: _Requested, left_count: int) -> Topic:
    """Return the topic if it may have the requested partition count.

    `left_count` is the number of partitions that the request may still create. Raises
    UnknownTopicOrPartition, InvalidTopicException, InvalidPartitions, InvalidReplicaAssignment or
    PolicyViolation.
    """
    topic = state.topics.get(requested.name)
    if topic is None:
        raise UnknownTopicOrPartition()
    if topic.is_internal:
        raise InvalidTopicException(f"{topic.name} is an internal topic; its partition count must not change")
    present = topic.partition_count
    if not present < requested.count <= MAX_PARTITIONS:
        raise InvalidPartitions(
            f"topic {topic.name!r} has {present} partitions; the new count must be "
            f"{present + 1} to {MAX_PARTITIONS}, not {requested.count}"
        )
    if requested.assignments is not None:
        if len(requested.assignments) != requested.count - present:
            raise InvalidReplicaAssignment("the assignment must contain exactly the new partitions")
        if any(assignment.broker_ids != [state.node_id] for assignment in requested.assignments):
            raise InvalidReplicaAssignment(
                f"the cluster has only broker {state.node_id}; assign the partitions to it"
            )
    if requested.count - present > left_count:
        raise PolicyViolation(
            f"a request may create at most {MAX_PARTITIONS_PER_REQUEST} partitions; use several requests"
        )
    return topic
