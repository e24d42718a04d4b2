"""ElectLeaders (key 43), versions 0-2: this broker leads every partition, so no election is needed.

Null topics mean all topics. As in Kafka, the response then has each topic with an empty list of partitions.

Errors: ELECTION_NOT_NEEDED for each partition that exists; UNKNOWN_TOPIC_OR_PARTITION for others;
INVALID_REQUEST for an election type other than preferred (0) and unclean (1).
Source: KIP-183, KIP-460; Kafka's ReplicationControlManager.
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import (
    BrokerError,
    ClusterAuthorizationFailed,
    ElectionNotNeeded,
    InvalidRequest,
    UnknownTopicOrPartition,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import ElectLeadersRequest, ElectLeadersResponse

KEY = 43
PREFERRED, UNCLEAN = 0, 1

_Topic = ElectLeadersResponse.ReplicaElectionResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _elect_all(state, request))
    return answer


def _elect_all(state: BrokerState, request: Request) -> Work[ElectLeadersResponse]:
    message: ElectLeadersRequest = request.message
    if not request.is_authorized(ResourceType.CLUSTER):
        return _error_response(message, ClusterAuthorizationFailed())
    if message.election_type not in (PREFERRED, UNCLEAN):
        return _error_response(
            message,
            InvalidRequest(
                f"election type {message.election_type} is unknown; use 0 (preferred) or 1 (unclean)"
            ),
        )
    response, budget = ElectLeadersResponse(replica_election_results=[]), state.step_budget()
    if message.topic_partitions is None:
        for name in [topic.name for topic in state.topics.all()]:
            response.replica_election_results.append(_Topic(topic=name))
            if budget.spend():
                yield None
        return response
    for requested in message.topic_partitions:
        results: list[ElectLeadersResponse.PartitionResult] = []
        response.replica_election_results.append(_Topic(topic=requested.topic, partition_result=results))
        if budget.spend():
            yield None
        for index in requested.partitions:
            results.append(_result(index, _elect(state, requested.topic, index)))
            if budget.spend():
                yield None
    return response


def _elect(state: BrokerState, topic_name: str, index: int) -> BrokerError:
    topic = state.topics.get(topic_name)
    if topic is None or not 0 <= index < len(topic.partitions):
        return UnknownTopicOrPartition(f"partition {topic_name}-{index} does not exist")
    return ElectionNotNeeded("this broker already leads the partition and has its only replica")


def _result(index: int, error: BrokerError) -> ElectLeadersResponse.PartitionResult:
    return ElectLeadersResponse.PartitionResult(
        partition_id=index, error_code=error.code, error_message=error.message
    )


def _error_response(message: ElectLeadersRequest, error: BrokerError) -> ElectLeadersResponse:
    return ElectLeadersResponse(
        error_code=error.code,
        replica_election_results=[
            _Topic(
                topic=requested.topic,
                partition_result=[_result(index, error) for index in requested.partitions],
            )
            for requested in message.topic_partitions or ()
        ],
    )
