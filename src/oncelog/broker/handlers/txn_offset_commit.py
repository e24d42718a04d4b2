"""TxnOffsetCommit (key 28), versions 0-5: commit a group's offsets as part of a transaction.

The offsets are pending until the transaction commits. Per partition: UNKNOWN_TOPIC_OR_PARTITION,
OFFSET_METADATA_TOO_LARGE. For the whole group, in this order:

1. INVALID_GROUP_ID (empty).
2. The errors of the transaction coordinator. The group's partition of `__consumer_offsets` must be in the
   transaction; version 5 adds it (KIP-890).
3. The errors of `GroupCoordinator.check_commit` (behaviour T7).

If the checks of the partitions refuse all of them, for example because none exists, neither the transaction
nor the group is checked. Source: KIP-98, KIP-447; Kafka's GroupCoordinatorService.
"""

from __future__ import annotations

from collections.abc import Callable

from oncelog.broker.coordinators.internal_topic import respond_when_durable
from oncelog.broker.coordinators.transaction_verification import (
    ClientCapabilities,
    TransactionVerification,
    knows_newer_epoch,
)
from oncelog.broker.handlers.offset_commit import CommitRows
from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import refusal_of
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import (
    BrokerError,
    CoordinatorNotAvailable,
    InvalidCommitOffsetSize,
    InvalidGroupId,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    MessageTooLarge,
    NotEnoughReplicas,
)
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import TxnOffsetCommitRequest, TxnOffsetCommitResponse

KEY = 28
FIRST_ABORTABLE_VERSION, FIRST_ADDING_VERSION = 4, 5

_Partition = TxnOffsetCommitResponse.TxnOffsetCommitResponsePartition


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _commit(state, request, now_ms))
    return answer


def _commit(state: BrokerState, request: Request, now_ms: int) -> Work[Answer]:
    message: TxnOffsetCommitRequest = request.message
    response = TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic(name=topic.name, partitions=[])
            for topic in message.topics
        ]
    )
    rows = CommitRows(state, request, response.topics, _Partition)
    for resource_type, name in (
        (ResourceType.TRANSACTIONAL_ID, message.transactional_id),
        (ResourceType.GROUP, message.group_id),
    ):
        if not request.is_authorized(resource_type, name):
            yield from rows.refuse_all(refusal_of(resource_type))
            return response
    yield from rows.check(now_ms, -1)

    def refusal(error: BrokerError) -> TxnOffsetCommitResponse:
        rows.refuse(error)
        return response

    if not rows.has_any_for_group:
        return response
    try:
        if not message.group_id:
            raise InvalidGroupId("a group id may not be empty")
        yield from rows.encode(message.group_id)
        return _store(state, request, rows, now_ms, response, refusal)
    except NotEnoughReplicas as error:
        return refusal(CoordinatorNotAvailable(str(error)))
    except MessageTooLarge as error:
        return refusal(InvalidCommitOffsetSize(str(error)))
    except BrokerError as error:
        return refusal(error)


def _store(
    state: BrokerState,
    request: Request,
    rows: CommitRows,
    now_ms: int,
    response: TxnOffsetCommitResponse,
    refusal: Callable[[BrokerError], TxnOffsetCommitResponse],
) -> Answer:
    """Store the offsets in one step. Raises the errors of the transaction coordinator and of the group."""
    message: TxnOffsetCommitRequest = request.message
    producer = ProducerIdAndEpoch(message.producer_id, message.producer_epoch)
    verification = _admit(state, message, producer, request.header.api_version, now_ms)
    if verification.awaits_durability:
        return verification.resume_when_durable(
            lambda: handle(state, request, now_ms),
            lambda error: refusal(CoordinatorNotAvailable(str(error))),
        )
    state.groups.check_commit(
        message.group_id,
        message.generation_id,
        message.member_id,
        message.group_instance_id,
        is_transactional=True,
    )
    records, written = rows.records(), []
    if records:
        offsets = state.groups.offsets
        written.append(offsets.commit_pending(message.group_id, producer, rows.offsets, now_ms, records))
    return respond_when_durable(state.flush_queue, written, response, refusal)


def _admit(
    state: BrokerState,
    message: TxnOffsetCommitRequest,
    producer: ProducerIdAndEpoch,
    version: int,
    now_ms: int,
) -> TransactionVerification:
    tp = state.groups.offsets_partition(message.group_id, now_ms)
    _, partition = state.topics.partition(tp)
    if knows_newer_epoch(partition, producer):
        raise InvalidProducerEpoch(
            f"producer id {producer.producer_id} has a newer epoch than {producer.producer_epoch}"
        )
    unverified = {} if partition.has_open_transaction(*producer) else {tp: producer}
    capabilities = ClientCapabilities(
        adds_partitions=version >= FIRST_ADDING_VERSION,
        supports_abortable_error=version >= FIRST_ABORTABLE_VERSION,
    )
    verification = TransactionVerification(
        message.transactional_id,
        unverified,
        capabilities,
        now_ms,
        transactions=state.transactions,
        flush_queue=state.flush_queue,
        settings=state.settings,
    )
    verification.check(tp)
    if min(producer) < 0:
        # Without transaction.partition.verification.enable, no other check needs a producer. See
        # test_offsets_in_a_transaction_need_a_producer_id.
        raise InvalidProducerIdMapping(f"{producer} is no producer of a transaction")
    return verification
