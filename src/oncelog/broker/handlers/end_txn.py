"""EndTxn (key 26), versions 0-5: commit or abort.

The answer leaves when the decision is durable; markers follow. Version 5 is an end that raises the epoch
(KIP-890): its answer tells the producer id and epoch of the next transaction. PRODUCER_FENCED is
INVALID_PRODUCER_EPOCH below version 2.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import answer_when_durable
from oncelog.broker.handlers.transactional import code_for
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError
from oncelog.rules.idempotence.sequencer import Identity
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

    who = Identity(message.producer_id, message.producer_epoch)
    client_version = EPOCH_PER_TRANSACTION if version >= FIRST_EPOCH_VERSION else 0
    try:
        request.authorize(ResourceType.TRANSACTIONAL_ID, message.transactional_id)
        done = state.transactions.end(
            message.transactional_id, who, message.committed, client_version, now_ms
        )
    except BrokerError as error:
        return refusal(error)
    return answer_when_durable(state.flush_queue, done.written, _answer(done.entry), refusal)


def _answer(entry: TransactionEntry) -> EndTxnResponse:
    if entry.next_producer_id != NO_ID:
        return EndTxnResponse(producer_id=entry.next_producer_id, producer_epoch=0)
    return EndTxnResponse(producer_id=entry.producer_id, producer_epoch=entry.producer_epoch)
