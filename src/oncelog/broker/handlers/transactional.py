"""Error codes that the APIs of a transactional producer share."""

from __future__ import annotations

from oncelog.errors import BrokerError, InvalidProducerEpoch, ProducerFenced


def code_for(error: BrokerError, *, knows_fenced: bool) -> int:
    """Return the error's code, with INVALID_PRODUCER_EPOCH for a PRODUCER_FENCED unknown to the client.

    Source: KIP-588.
    """
    if isinstance(error, ProducerFenced) and not knows_fenced:
        return InvalidProducerEpoch.code
    return error.code
