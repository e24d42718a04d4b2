"""The transaction coordinator's entry for a transactional id, as stored in `__transaction_state`.

Source: kafka TransactionState, TransactionMetadata.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from oncelog.rules.idempotence.sequencer import MAX_EPOCH
from oncelog.types import TopicPartition

EXHAUSTED_EPOCH = MAX_EPOCH - 1
"""The last epoch that a client gets. The next one, MAX_EPOCH, is reserved to fence such a client."""
NO_EPOCH = NO_ID = -1
EPOCH_PER_TRANSACTION = 2
"""Lowest level of `transaction.version` at which every end of a transaction raises the epoch (KIP-890)."""


class TransactionState(IntEnum):
    """The states of a transactional id, with the numbers that `__transaction_state` stores."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def label(self) -> str:
        """Kafka's name of the state, such as PrepareCommit."""
        return self.name.title().replace("_", "")

    @property
    def is_prepared(self) -> bool:
        """True if the outcome is decided and its markers are being written."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)

    @property
    def is_idle(self) -> bool:
        """True if no transaction is open or being completed."""
        return self in (
            TransactionState.EMPTY,
            TransactionState.COMPLETE_COMMIT,
            TransactionState.COMPLETE_ABORT,
        )


class TransactionEntry(NamedTuple):
    """The state of a transactional id, its producer and its transaction.

    `producer_epoch` is -1 before the first epoch. `last_producer_epoch` is the previous epoch if the client
    may repeat a request whose response was lost, else -1. The log does not store `last_producer_epoch`.
    `next_producer_id` replaces `producer_id` when all markers are written; -1 if the producer id stays.
    `start_ms` is the time at which the last transaction began; -1 if none has begun since InitProducerId.
    `client_version` is the level of `transaction.version` at which the last transaction was ended.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    partitions: frozenset[TopicPartition] = frozenset()
    start_ms: int = -1
    last_update_ms: int = -1
    last_producer_epoch: int = NO_EPOCH
    previous_producer_id: int = NO_ID
    next_producer_id: int = NO_ID
    client_version: int = 0

    @property
    def is_exhausted(self) -> bool:
        """True if this is the last epoch that a client may get of this producer id."""
        return self.producer_epoch >= EXHAUSTED_EPOCH
