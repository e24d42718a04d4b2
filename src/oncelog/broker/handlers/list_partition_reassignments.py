"""ListPartitionReassignments (key 46), version 0: always none, because there is only one broker.

As in Kafka, the response to a refused request names the requested partitions, without replicas.
Source: KIP-455.
"""

from __future__ import annotations

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import ClusterAuthorizationFailed
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse

KEY = 46


def handle(state: BrokerState, request: Request, now_ms: int) -> ListPartitionReassignmentsResponse:
    if request.is_authorized(ResourceType.CLUSTER):
        return ListPartitionReassignmentsResponse(error_message=None)
    message: ListPartitionReassignmentsRequest = request.message
    error = ClusterAuthorizationFailed()
    return ListPartitionReassignmentsResponse(
        error_code=error.code,
        error_message=error.message,
        topics=[
            ListPartitionReassignmentsResponse.OngoingTopicReassignment(
                name=topic.name,
                partitions=[
                    ListPartitionReassignmentsResponse.OngoingPartitionReassignment(partition_index=index)
                    for index in topic.partition_indexes
                ],
            )
            for topic in message.topics or ()
        ],
    )
