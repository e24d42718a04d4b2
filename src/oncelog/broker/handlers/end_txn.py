"""EndTxn (key 26), versions 0-5: commit or abort a transaction.

The response is sent when the decision is durable; the markers are written after that. Version 5 raises the
producer epoch (KIP-890), and its response has the producer id and epoch of the next transaction. Versions 0
and 1 get INVALID_PRODUCER_EPOCH instead of PRODUCER_FENCED. Source: Kafka's
TransactionCoordinator.endTransaction.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import respond_when_durable
from oncelog.broker.handlers.transactional import code_for
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.security.authorization import ResourceType
from oncelog.rules.transactions.entry import EPOCH_PER_TRANSACTION, NO_ID, TransactionEntry
from oncelog.wire.messages import EndTxnRequest, EndTxnResponse

KEY = 26
FIRST_FENCED_VERSION, FIRST_EPOCH_VERSION = 2, 5


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: EndTxnRequest = request.message
    version = request.header.api_version

    def refusal(error: BrokerError) -> EndTxnResponse:
        return EndTxnResponse(error_code=code_for(error, knows_fenced=version >= FIRST_FENCED_VERSION))

    producer = ProducerIdAndEpoch(message.producer_id, message.producer_epoch)
    client_version = EPOCH_PER_TRANSACTION if version >= FIRST_EPOCH_VERSION else 0
    try:
        request.authorize(ResourceType.TRANSACTIONAL_ID, message.transactional_id)
        done = state.transactions.end(
            message.transactional_id, producer, message.committed, client_version, now_ms
        )
    except BrokerError as error:
        return refusal(error)
    return respond_when_durable(state.flush_queue, done.written, _response(done.entry), refusal)


def _response(entry: TransactionEntry) -> EndTxnResponse:
    if entry.next_producer_id != NO_ID:
        return EndTxnResponse(producer_id=entry.next_producer_id, producer_epoch=0)
    return EndTxnResponse(producer_id=entry.producer_id, producer_epoch=entry.producer_epoch)
