"""DescribeQuorum (key 55), versions 0-2: the leader of the metadata log.

This broker is its own controller, so it is the only voter, and there are no observers. The broker keeps
topics in a file instead of a metadata log, so the epoch and the offsets in the response are 0. If a request
names a partition other than partition 0 of __cluster_metadata, all its partitions get
UNKNOWN_TOPIC_OR_PARTITION.
Source: KIP-595, KIP-853; Kafka's KafkaRaftClient.
"""

from __future__ import annotations

from collections.abc import Iterable

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import ClusterAuthorizationFailed, UnknownTopicOrPartition
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import DescribeQuorumRequest, DescribeQuorumResponse

KEY = 55
METADATA_LOG = "__cluster_metadata"

_Partition = DescribeQuorumResponse.PartitionData


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _describe(state, request, now_ms))
    return answer


def _describe(state: BrokerState, request: Request, now_ms: int) -> Work[DescribeQuorumResponse]:
    message: DescribeQuorumRequest = request.message
    if not request.is_authorized(ResourceType.CLUSTER):
        return DescribeQuorumResponse(error_code=ClusterAuthorizationFailed.code, topics=[])
    requested = [
        (topic.topic_name, [p.partition_index for p in topic.partitions]) for topic in message.topics
    ]
    if requested != [(METADATA_LOG, [0])]:
        return (yield from _refuse(state, requested))
    this_node = DescribeQuorumResponse.ReplicaState(
        replica_id=state.node_id, last_fetch_timestamp=now_ms, last_caught_up_timestamp=now_ms
    )
    described = _Partition(partition_index=0, leader_id=state.node_id, current_voters=[this_node])
    return DescribeQuorumResponse(
        topics=[DescribeQuorumResponse.TopicData(topic_name=METADATA_LOG, partitions=[described])],
        nodes=[_state(state, request)],
    )


def _refuse(state: BrokerState, requested: Iterable[tuple[str, list[int]]]) -> Work[DescribeQuorumResponse]:
    error = UnknownTopicOrPartition("only partition 0 of the metadata log can be described")
    response, budget = DescribeQuorumResponse(topics=[]), state.step_budget()
    for name, indexes in requested:
        results: list[_Partition] = []
        response.topics.append(DescribeQuorumResponse.TopicData(topic_name=name, partitions=results))
        if budget.spend():
            yield None
        for index in indexes:
            results.append(
                _Partition(partition_index=index, error_code=error.code, error_message=error.message)
            )
            if budget.spend():
                yield None
    return response


def _state(state: BrokerState, request: Request) -> DescribeQuorumResponse.Node:
    """Return this broker as a node, with the listener of the request as its controller listener."""
    if request.authenticator is None:
        return DescribeQuorumResponse.Node(node_id=state.node_id)
    host, port = request.authenticator.listener.address
    listener = DescribeQuorumResponse.Listener(name=request.authenticator.listener.name, host=host, port=port)
    return DescribeQuorumResponse.Node(node_id=state.node_id, listeners=[listener])
