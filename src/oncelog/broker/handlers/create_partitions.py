"""CreatePartitions (key 37), versions 0-3: raise a topic's partition count.

Errors: 3 unknown topic, 37 not above the present count, 39 an assignment that is not this node, 42 a
topic named twice, 89 controller_mutation_rate (v3+). validate_only creates nothing. The partitions are made
in steps, and clients find those of a topic when all are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from oncelog.broker.handlers.create_topics import MAX_PARTITIONS, MAX_PARTITIONS_PER_REQUEST
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
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
"""From here on clients know THROTTLING_QUOTA_EXCEEDED."""

_Asked = CreatePartitionsRequest.CreatePartitionsTopic
_Result = CreatePartitionsResponse.CreatePartitionsTopicResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    # Finish even if the client has gone away: the file already names these partitions.
    answer: Answer = answer_in_steps(state.slots, _answer(state, request, now_ms), is_dropped=False)
    return answer


def _answer(state: BrokerState, request: Request, now_ms: int) -> Work[CreatePartitionsResponse]:
    message: CreatePartitionsRequest = request.message
    named = Counter(topic.name for topic in message.topics)
    results, budget = [], StepBudget(state.limits.request_step_elements)
    plans: list[tuple[Topic, int, _Result]] = []
    left_count = MAX_PARTITIONS_PER_REQUEST
    for asked in {topic.name: topic for topic in message.topics}.values():
        result = _Result(name=asked.name)
        try:
            if named[asked.name] > 1:
                raise InvalidRequest(f"topic {asked.name!r} is named twice")
            request.authorize(ResourceType.TOPIC, asked.name)
            topic = _checked(state, asked, left_count)
            state.quotas.mutate(request, asked.count - topic.partition_count, FIRST_STRICT_VERSION, now_ms)
        except BrokerError as error:
            result.error_code, result.error_message = error.code, error.message
        else:
            left_count -= asked.count - topic.partition_count
            plans.append((topic, asked.count, result))
        results.append(result)
        if budget.spend():
            yield None
    if plans and not message.validate_only:
        yield from _grow(state, plans, now_ms)
    return CreatePartitionsResponse(results=results)


def _grow(state: BrokerState, plans: Sequence[tuple[Topic, int, _Result]], now_ms: int) -> Work[None]:
    """Add the partitions, durable by one write; the results tell if that fails."""
    changes = [(topic, count) for topic, count, _ in plans]
    try:
        failures = yield from state.topics.grow_in_steps(changes, now_ms)
    except (StorageError, KafkaStorageError) as error:
        failures = {topic.name: error for topic, _ in changes}
    for topic, _, result in plans:
        if (failure := failures.get(topic.name)) is not None:
            refusal = failure if isinstance(failure, BrokerError) else KafkaStorageError(str(failure))
            result.error_code, result.error_message = refusal.code, refusal.message


def _checked(state: BrokerState, asked: _Asked, left_count: int) -> Topic:
    """The topic, if it may have that many partitions; the request may make `left_count` more."""
    topic = state.topics.get(asked.name)
    if topic is None:
        raise UnknownTopicOrPartition()
    if topic.is_internal:
        raise InvalidTopicException(f"{topic.name} is the broker's own; its partition count must not change")
    present = topic.partition_count
    if not present < asked.count <= MAX_PARTITIONS:
        raise InvalidPartitions(f"topic {topic.name!r} has {present} partitions; {asked.count} is not more")
    if asked.assignments is not None:
        if len(asked.assignments) != asked.count - present:
            raise InvalidReplicaAssignment("the assignment must name exactly the new partitions")
        if any(assignment.broker_ids != [state.node_id] for assignment in asked.assignments):
            raise InvalidReplicaAssignment(f"the only broker to assign to is {state.node_id}")
    if asked.count - present > left_count:
        raise PolicyViolation(
            f"more than {MAX_PARTITIONS_PER_REQUEST} new partitions in one request; create them in several"
        )
    return topic
