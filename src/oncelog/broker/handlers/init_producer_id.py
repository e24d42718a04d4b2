"""InitProducerId (key 22), versions 0-5: a producer id for a new session, or that of a transactional id.

Without a transactional id: always a new id at epoch 0, whatever id the client had; from blocks whose end is
on disk before the first is given. With one: see `rules.transactions.coordinator.decide_init`. Exactly one of
producer_id and producer_epoch being -1 is 42. A block that cannot be written, or an id too many for
producer_ids_rate: 14, retriable. PRODUCER_FENCED is INVALID_PRODUCER_EPOCH below version 4.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import answer_when_durable
from oncelog.broker.handlers.transactional import code_for
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.errors import (
    BrokerError,
    CoordinatorLoadInProgress,
    InvalidRequest,
    StorageError,
    ThrottlingQuotaExceeded,
)
from oncelog.rules.idempotence.sequencer import Identity
from oncelog.rules.limits.quotas import PRODUCER_IDS
from oncelog.rules.security.authorization import Operation, ResourceType
from oncelog.wire.messages import InitProducerIdRequest, InitProducerIdResponse

KEY = 22
FIRST_FENCED_VERSION = 4


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: InitProducerIdRequest = request.message
    knows_fenced = request.header.api_version >= FIRST_FENCED_VERSION

    def refusal(error: BrokerError) -> InitProducerIdResponse:
        code = code_for(error, knows_fenced=knows_fenced)
        return InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)

    try:
        if (message.producer_id == -1) != (message.producer_epoch == -1):
            raise InvalidRequest("producer id and epoch must be given both or not at all")
        if message.transactional_id is None:
            # IDEMPOTENT_WRITE is implied by WRITE to any topic (KIP-679).
            if not request.access.may_somewhere(Operation.WRITE, ResourceType.TOPIC):
                request.authorize(ResourceType.CLUSTER)
            return InitProducerIdResponse(producer_id=_take(state, request, now_ms), producer_epoch=0)
        request.authorize(ResourceType.TRANSACTIONAL_ID, message.transactional_id)
        given = None if message.producer_id == -1 else Identity(message.producer_id, message.producer_epoch)
        done = state.transactions.init(
            message.transactional_id,
            given,
            message.transaction_timeout_ms,
            now_ms,
            take_id=lambda: _take(state, request, now_ms),
        )
    except BrokerError as error:
        return refusal(error)
    answer = InitProducerIdResponse(
        producer_id=done.entry.producer_id, producer_epoch=done.entry.producer_epoch
    )
    return answer_when_durable(state.flush_queue, done.written, answer, refusal)


def _take(state: BrokerState, request: Request, now_ms: int) -> int:
    """Raises CoordinatorLoadInProgress, which every client takes for "later"."""
    try:
        state.quotas.take(PRODUCER_IDS, request.quota_principal, 1, now_ms)
        producer_id = state.producer_ids.take()
    except ThrottlingQuotaExceeded as error:
        # Its own code is fatal to older producers here (KIP-599 knows it for topics alone).
        raise CoordinatorLoadInProgress(str(error)) from error
    except (OSError, StorageError) as error:
        raise CoordinatorLoadInProgress(f"no block of producer ids: {error}") from error
    state.metrics.producer_ids_given += 1
    return producer_id
