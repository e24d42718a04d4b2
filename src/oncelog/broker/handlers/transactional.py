"""Error codes that the APIs of a transactional producer share."""

from __future__ import annotations

from oncelog.errors import BrokerError, InvalidProducerEpoch, ProducerFenced


def code_for(error: BrokerError, *, knows_fenced: bool) -> int:
    """Return the error's code. If the client does not know PRODUCER_FENCED, return INVALID_PRODUCER_EPOCH.

    Source: KIP-588.
    """
    if isinstance(error, ProducerFenced) and not knows_fenced:
        return InvalidProducerEpoch.code
    return error.code
