"""AddOffsetsToTxn (key 25), versions 0-4: add a group's partition of `__consumer_offsets` to a transaction.

Versions 0 and 1 get INVALID_PRODUCER_EPOCH instead of PRODUCER_FENCED.
Source: KIP-98; Kafka's KafkaApis.handleAddOffsetsToTxnRequest.
"""

from __future__ import annotations

from oncelog.broker.coordinators.internal_topic import respond_when_durable
from oncelog.broker.handlers.transactional import code_for
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse

KEY = 25
FIRST_FENCED_VERSION = 2


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    message: AddOffsetsToTxnRequest = request.message
    knows_fenced = request.header.api_version >= FIRST_FENCED_VERSION

    def refusal(error: BrokerError) -> AddOffsetsToTxnResponse:
        return AddOffsetsToTxnResponse(error_code=code_for(error, knows_fenced=knows_fenced))

    producer = ProducerIdAndEpoch(message.producer_id, message.producer_epoch)
    try:
        request.authorize(ResourceType.TRANSACTIONAL_ID, message.transactional_id)
        request.authorize(ResourceType.GROUP, message.group_id)
        tp = state.groups.offsets_partition(message.group_id, now_ms)
        done = state.transactions.add_partitions(message.transactional_id, producer, [tp], now_ms)
    except BrokerError as error:
        return refusal(error)
    return respond_when_durable(state.flush_queue, done.written, AddOffsetsToTxnResponse(), refusal)
