"""InitProducerId (key 22), versions 0-5: a producer id for a new session.

Without a transactional id: always a new id at epoch 0, whatever id the client had; from blocks whose
end is on disk before the first is given. Exactly one of producer_id and producer_epoch being -1 is 42.
With a transactional id: transactions are not served yet; the answer is INVALID_REQUEST, which no
client retries. Not TRANSACTIONAL_ID_AUTHORIZATION_FAILED, which would blame access rights, and not
COORDINATOR_NOT_AVAILABLE, which clients retry for ever. A block that cannot be written: 14, retriable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.errors import BrokerError, CoordinatorLoadInProgress, InvalidRequest, StorageError
from oncelog.wire.messages import InitProducerIdRequest, InitProducerIdResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 22


def handle(node: Node, request: Request, now_ms: int) -> InitProducerIdResponse:
    message: InitProducerIdRequest = request.message
    try:
        if message.transactional_id is not None:
            raise InvalidRequest("transactions are not served yet")
        if (message.producer_id == -1) != (message.producer_epoch == -1):
            raise InvalidRequest("producer id and epoch must be given both or not at all")
        try:
            producer_id = node.producer_ids.take()
        except (OSError, StorageError) as error:
            raise CoordinatorLoadInProgress(f"no block of producer ids: {error}") from error
    except BrokerError as error:
        return InitProducerIdResponse(error_code=error.code, producer_id=-1, producer_epoch=-1)
    node.metrics.producer_ids_given += 1
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)
