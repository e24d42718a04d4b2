"""InitProducerId (key 22), versions 0-5: a producer id and epoch for an idempotent or transactional producer.

Without a transactional id the response always has a new producer id at epoch 0, even if the request has an
older id. With a transactional id, `rules.transactions.coordinator.decide_init` decides.
`broker.coordinators.producer_ids` allocates producer ids.

Errors: INVALID_REQUEST if only one of producer_id and producer_epoch is -1. COORDINATOR_LOAD_IN_PROGRESS,
which clients retry, if the disk cannot store a block of producer ids or producer_ids_rate is exceeded.
Versions 0 to 3 get INVALID_PRODUCER_EPOCH instead of PRODUCER_FENCED. Source: KIP-98, KIP-360; Kafka's
TransactionCoordinator.handleInitProducerId.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import respond_when_durable
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
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
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
            raise InvalidRequest("send both producer id and epoch, or neither")
        if message.transactional_id is None:
            # WRITE on any topic implies IDEMPOTENT_WRITE on the cluster, so check WRITE first (KIP-679).
            if not request.access.may_somewhere(Operation.WRITE, ResourceType.TOPIC):
                request.authorize(ResourceType.CLUSTER)
            return InitProducerIdResponse(
                producer_id=_new_producer_id(state, request, now_ms), producer_epoch=0
            )
        request.authorize(ResourceType.TRANSACTIONAL_ID, message.transactional_id)
        producer = (
            None
            if message.producer_id == -1
            else ProducerIdAndEpoch(message.producer_id, message.producer_epoch)
        )
        done = state.transactions.init(
            message.transactional_id,
            producer,
            message.transaction_timeout_ms,
            now_ms,
            take_id=lambda: _new_producer_id(state, request, now_ms),
        )
    except BrokerError as error:
        return refusal(error)
    answer = InitProducerIdResponse(
        producer_id=done.entry.producer_id, producer_epoch=done.entry.producer_epoch
    )
    return respond_when_durable(state.flush_queue, done.written, answer, refusal)


def _new_producer_id(state: BrokerState, request: Request, now_ms: int) -> int:
    """Return a new producer id. Raises CoordinatorLoadInProgress, which every client retries."""
    try:
        state.quotas.charge_or_refuse(PRODUCER_IDS, request.quota_principal, 1, now_ms)
        producer_id = state.producer_ids.take()
    except ThrottlingQuotaExceeded as error:
        # THROTTLING_QUOTA_EXCEEDED would be fatal to existing producers: KIP-599 defines it only for requests
        # about topics. See test_no_producer_id_is_given_above_the_rate.
        raise CoordinatorLoadInProgress(str(error)) from error
    except (OSError, StorageError) as error:
        raise CoordinatorLoadInProgress(f"cannot allocate producer ids: {error}") from error
    state.metrics.producer_ids_given += 1
    return producer_id
