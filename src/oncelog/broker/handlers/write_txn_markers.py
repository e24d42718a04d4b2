"""WriteTxnMarkers (key 27), versions 1-2: markers from a coordinator, or from an operator (row T14).

Errors per partition: UNKNOWN_TOPIC_OR_PARTITION; INVALID_PRODUCER_EPOCH, below the one seen or, with
transaction version 2, not above that of the open transaction; TRANSACTION_COORDINATOR_FENCED, below the one
seen.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import AppendHandle, respond_when_durable
from oncelog.broker.coordinators.markers import MARKER_COST, Marker
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
from oncelog.errors import BrokerError, ClusterAuthorizationFailed
from oncelog.rules.idempotence.markers import refuse_same_epoch
from oncelog.rules.security.authorization import CLUSTER_NAME, Operation, ResourceType
from oncelog.types import TopicPartition
from oncelog.wire.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse

KEY = 27
FIRST_RAISING_VERSION = 2
"""The transaction version whose markers carry a raised producer epoch (KIP-890, KIP-1228)."""

_Partition = WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = answer_in_steps(state.slots, _write_all(state, request, now_ms), is_dropped=False)
    return answer


def _write_all(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: WriteTxnMarkersRequest = request.message
    written: list[AppendHandle] = []
    may_alter = request.access.may(Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME)
    if not (may_alter or request.is_authorized(ResourceType.CLUSTER)):
        return _refused(message)
    answer, budget = WriteTxnMarkersResponse(markers=[]), StepBudget(state.limits.request_step_elements)
    for requested in message.markers:
        answer.markers.append((yield from _write(state, requested, now_ms, written, budget)))
        if budget.spend():
            yield None

    def refusal(error: BrokerError) -> WriteTxnMarkersResponse:
        for partition in (p for m in answer.markers for topic in m.topics for p in topic.partitions):
            partition.error_code = partition.error_code or error.code
        return answer

    return respond_when_durable(state.flush_queue, written, answer, refusal)


def _refused(message: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    code = ClusterAuthorizationFailed.code
    return WriteTxnMarkersResponse(
        markers=[
            WriteTxnMarkersResponse.WritableTxnMarkerResult(
                producer_id=asked.producer_id,
                topics=[
                    WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(
                        name=topic.name,
                        partitions=[
                            _Partition(partition_index=index, error_code=code)
                            for index in topic.partition_indexes
                        ],
                    )
                    for topic in asked.topics
                ],
            )
            for asked in message.markers
        ]
    )


def _write(
    state: BrokerState,
    asked: WriteTxnMarkersRequest.WritableTxnMarker,
    now_ms: int,
    written: list[AppendHandle],
    budget: StepBudget,
) -> Work[WriteTxnMarkersResponse.WritableTxnMarkerResult]:
    marker = Marker(
        asked.producer_id, asked.producer_epoch, asked.coordinator_epoch, asked.transaction_result
    )

    def one(at: TopicPartition) -> _Partition:
        try:
            if asked.transaction_version >= FIRST_RAISING_VERSION:
                _check_epoch_raised(state, at, marker)
            written.append(state.markers.write(at, marker, now_ms))
        except BrokerError as error:
            return _Partition(partition_index=at.partition, error_code=error.code)
        return _Partition(partition_index=at.partition)

    result = WriteTxnMarkersResponse.WritableTxnMarkerResult(producer_id=asked.producer_id, topics=[])
    for topic in asked.topics:
        partitions: list[_Partition] = []
        result.topics.append(
            WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(name=topic.name, partitions=partitions)
        )
        for index in topic.partition_indexes:
            partitions.append(one(TopicPartition(topic.name, index)))
            if budget.spend(MARKER_COST):
                yield None
    return result


def _check_epoch_raised(state: BrokerState, at: TopicPartition, marker: Marker) -> None:
    """Raise what `refuse_same_epoch` refuses with."""
    _, partition = state.topics.partition(at)
    entry = partition.producer(marker.producer_id)
    refusal = refuse_same_epoch(entry, marker.producer_id, marker.producer_epoch)
    if refusal is not None:
        raise refusal.error(refusal.reason)
