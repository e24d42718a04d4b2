"""WriteTxnMarkers (key 27), versions 1-2: write markers for a coordinator or an operator (behaviour T14).

Errors per partition:

    UNKNOWN_TOPIC_OR_PARTITION      there is no such partition
    INVALID_PRODUCER_EPOCH          an epoch below the partition's; with transaction version 2 also the epoch
                                    of the open transaction
    TRANSACTION_COORDINATOR_FENCED  a coordinator epoch below the partition's

Source: KIP-98, KIP-890; Kafka's KafkaApis.handleWriteTxnMarkersRequest.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import AppendHandle, respond_when_durable
from oncelog.broker.coordinators.markers import MARKER_COST, Marker
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, respond_in_steps
from oncelog.errors import BrokerError, ClusterAuthorizationFailed
from oncelog.rules.idempotence.markers import reject_same_epoch
from oncelog.rules.security.authorization import CLUSTER_NAME, Operation, ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse

KEY = 27
FIRST_RAISING_VERSION = 2
"""First transaction version whose markers have a higher producer epoch than their transaction (KIP-890)."""

_Partition = WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _write_all(state, request, now_ms), is_cancellable=False)
    return answer


def _write_all(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: WriteTxnMarkersRequest = request.message
    written: list[AppendHandle] = []
    may_alter = request.access.may(Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
    if not (may_alter or request.is_authorized(ResourceType.CLUSTER)):
        return _error_response(message)
    answer, budget = WriteTxnMarkersResponse(markers=[]), state.step_budget()
    for requested in message.markers:
        answer.markers.append((yield from _write(state, requested, now_ms, written, budget)))
        if budget.spend():
            yield None

    def refusal(error: BrokerError) -> WriteTxnMarkersResponse:
        for partition in (p for m in answer.markers for topic in m.topics for p in topic.partitions):
            partition.error_code = partition.error_code or error.code
        return answer

    return respond_when_durable(state.flush_queue, written, answer, refusal)


def _error_response(message: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    code = ClusterAuthorizationFailed.code
    return WriteTxnMarkersResponse(
        markers=[
            WriteTxnMarkersResponse.WritableTxnMarkerResult(
                producer_id=requested.producer_id,
                topics=[
                    WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=[
                            _Partition(partition_index=index, error_code=code)
                            for index in topic.partition_indexes
                        ],
                    )
                    for topic in requested.topics
                ],
            )
            for requested in message.markers
        ]
    )


def _write(
    state: BrokerState,
    requested: WriteTxnMarkersRequest.WritableTxnMarker,
    now_ms: int,
    written: list[AppendHandle],
    budget: StepBudget,
) -> Work[WriteTxnMarkersResponse.WritableTxnMarkerResult]:
    marker = Marker(
        requested.producer_id,
        requested.producer_epoch,
        requested.coordinator_epoch,
        requested.transaction_result,
    )

    def write_one(tp: TopicPartition) -> _Partition:
        try:
            if requested.transaction_version >= FIRST_RAISING_VERSION:
                _check_epoch_raised(state, tp, marker)
            written.append(state.markers.write(tp, marker, now_ms))
        except BrokerError as error:
            return _Partition(partition_index=tp.partition, error_code=error.code)
        return _Partition(partition_index=tp.partition)

    result = WriteTxnMarkersResponse.WritableTxnMarkerResult(producer_id=requested.producer_id, topics=[])
    for topic in requested.topics:
        partitions: list[_Partition] = []
        result.topics.append(
            WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(name=topic.name, partitions=partitions)
        )
        for index in topic.partition_indexes:
            before = state.markers.extra_cost
            partitions.append(write_one(TopicPartition(topic.name, index)))
            if budget.spend(MARKER_COST + state.markers.extra_cost - before):
                yield None
    return result


def _check_epoch_raised(state: BrokerState, tp: TopicPartition, marker: Marker) -> None:
    """Raise the error of `reject_same_epoch` if it rejects the marker."""
    _, partition = state.topics.partition(tp)
    entry = partition.producer(marker.producer_id)
    refusal = reject_same_epoch(entry, marker.producer_id, marker.producer_epoch)
    if refusal is not None:
        raise refusal.error(refusal.reason)
