"""AlterPartitionReassignments (key 45), versions 0-1: every partition stays on this broker.

A request for the replicas [this broker] succeeds and changes nothing.

Errors: INVALID_REPLICA_ASSIGNMENT for other replicas; NO_REASSIGNMENT_IN_PROGRESS for null replicas, which
cancel a reassignment; UNKNOWN_TOPIC_OR_PARTITION for an unknown partition.
Source: KIP-455; Kafka's ReplicationControlManager.
"""

from __future__ import annotations

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import (
    BrokerError,
    ClusterAuthorizationFailed,
    InvalidReplicaAssignment,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse

KEY = 45

_Requested = AlterPartitionReassignmentsRequest.ReassignablePartition
_Partition = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse


def handle(state: BrokerState, request: Request, now_ms: int) -> AlterPartitionReassignmentsResponse:
    message: AlterPartitionReassignmentsRequest = request.message
    is_refused = not request.is_authorized(ResourceType.CLUSTER)
    response = AlterPartitionReassignmentsResponse(
        allow_replication_factor_change=message.allow_replication_factor_change, error_message=None
    )
    if is_refused:
        response.error_code = ClusterAuthorizationFailed.code
    for topic in message.topics:
        results = []
        for partition in topic.partitions:
            error = ClusterAuthorizationFailed() if is_refused else _refusal(state, topic.name, partition)
            results.append(
                _Partition(
                    partition_index=partition.partition_index,
                    error_code=error.code if error else 0,
                    error_message=error.message if error else None,
                )
            )
        response.responses.append(
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(name=topic.name, partitions=results)
        )
    return response


def _refusal(state: BrokerState, topic_name: str, requested: _Requested) -> BrokerError | None:
    topic = state.topics.get(topic_name)
    if topic is None or not 0 <= requested.partition_index < len(topic.partitions):
        return UnknownTopicOrPartition(f"partition {topic_name}-{requested.partition_index} does not exist")
    if requested.replicas is None:
        return NoReassignmentInProgress("partitions cannot be reassigned: the cluster has one broker")
    if requested.replicas != [state.node_id]:
        return InvalidReplicaAssignment(
            f"the cluster has only broker {state.node_id}; assign the partition to it"
        )
    return None
