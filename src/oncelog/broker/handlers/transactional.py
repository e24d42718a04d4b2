"""What the APIs of a transactional producer share."""

from __future__ import annotations

from oncelog.errors import BrokerError, InvalidProducerEpoch, ProducerFenced


def code_for(error: BrokerError, *, knows_fenced: bool) -> int:
    """The error's code; clients that do not know PRODUCER_FENCED get INVALID_PRODUCER_EPOCH instead."""
    if isinstance(error, ProducerFenced) and not knows_fenced:
        return InvalidProducerEpoch.code
    return error.code
