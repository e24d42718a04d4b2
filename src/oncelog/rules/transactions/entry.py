"""What the transaction coordinator knows of a transactional id, as values.

Source: Kafka's TransactionState, TransactionMetadata.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from oncelog.rules.idempotence.sequencer import MAX_EPOCH
from oncelog.types import TopicPartition

EXHAUSTED_EPOCH = MAX_EPOCH - 1
"""The last epoch a client gets; the one above it is kept for fencing it."""
NO_EPOCH = NO_ID = -1
EPOCH_PER_TRANSACTION = 2
"""From this level of `transaction.version` on every end raises the epoch."""


class TransactionState(IntEnum):
    """Kafka's numbers, as they stand in the log."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def label(self) -> str:
        """Kafka's name: PrepareCommit."""
        return self.name.title().replace("_", "")

    @property
    def is_prepared(self) -> bool:
        """Whether the outcome is decided and its markers are being written."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)

    @property
    def is_at_rest(self) -> bool:
        """Whether no transaction is under way."""
        return self in (
            TransactionState.EMPTY,
            TransactionState.COMPLETE_COMMIT,
            TransactionState.COMPLETE_ABORT,
        )


class TransactionEntry(NamedTuple):
    """What the coordinator knows of a transactional id.

    `producer_epoch` -1: none was given out yet. `last_producer_epoch`: the one before, while its holder may
    ask again for the answer it lost; never written. `next_producer_id`: takes over when the markers are
    written. `start_ms`: when the first partition was added; -1 outside of transactions.
    `client_version`: the `transaction.version` that the last end was made with.
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
        """Whether no client may get a higher epoch of this producer id."""
        return self.producer_epoch >= EXHAUSTED_EPOCH
