"""The transactional producer without I/O: a producer core that stores only within transactions.

Its batches carry the transactional bit, its requests the transactional id. A batch leaves only once its
partition is part of the transaction: `added` after AddPartitionsToTxn, or at once where the broker raises
the epoch per transaction (`transaction.version` 2) and adds partitions itself. A batch that fails makes the
transaction one that must be aborted; numbering never starts again by itself, for the coordinator gives out
the epochs.
Source: rows T4, T5; KIP-98, KIP-360, KIP-890; Kafka's TransactionManager.
"""

from __future__ import annotations

from oncelog.client.connection.metadata import ClusterMetadata
from oncelog.client.producer.batch import ProducerBatch
from oncelog.client.producer.core import ProducerCore, RandomSource
from oncelog.client.producer.options import ProducerOptions
from oncelog.client.producer.partition_queue import PartitionQueue
from oncelog.client.producer.produce_messages import MAX_PRODUCE_VERSION
from oncelog.errors import BrokerError, OncelogError, TransactionAborted
from oncelog.rules.idempotence.sequencer import Identity, OutOfOrder
from oncelog.rules.transactions.client_session import Operation, Session, State
from oncelog.types import TopicPartition

_SENDING = (State.IN_TRANSACTION, State.COMMITTING)
LAST_CLASSIC_PRODUCE_VERSION = 11
"""From 12 on Produce adds partitions to the transaction, and expects the epoch to be raised by its end."""


class TransactionalCore(ProducerCore):
    """`wanted`: partitions to be added to the transaction. `has_offsets`: it commits offsets as well.
    `may_have_begun`: the coordinator was asked to add something, and may not have answered.

    `raises_epoch`: the broker does so with every end. `is_epoch_spent`: sequences cannot go on under this
    epoch, so that the next transaction needs another one.
    """

    def __init__(self, options: ProducerOptions, metadata: ClusterMetadata, rng: RandomSource) -> None:
        super().__init__(options, metadata, rng)
        self.session = Session()
        self.is_identity_needed = False
        self.raises_epoch = False
        self.is_epoch_spent = False
        self.added: set[TopicPartition] = set()
        self.wanted: set[TopicPartition] = set()
        self.has_offsets = False
        self.may_have_begun = False

    # The transaction

    def begin(self, *, raises_epoch: bool) -> None:
        """A transaction begins; the coordinator hears of it with its first partition."""
        self.session.check(Operation.BEGIN)
        self.raises_epoch = raises_epoch
        self.max_produce_version = MAX_PRODUCE_VERSION if raises_epoch else LAST_CLASSIC_PRODUCE_VERSION
        self.session.enter(State.IN_TRANSACTION)

    @property
    def has_begun(self) -> bool:
        """Whether the coordinator knows of the transaction, so that it must be told its end.

        Where it adds partitions itself: whether it may know, for then it takes any abort.
        """
        return bool(self.added or self.has_offsets)

    def on_added(self, partitions: set[TopicPartition]) -> None:
        """They are part of the transaction."""
        self.wanted -= partitions
        self.added |= partitions
        for tp in sorted(partitions):  # in an order that a seed of the simulator repeats
            queue = self._partitions.get(tp)
            if queue is not None:
                self._place(queue)

    def drop_unsent(self) -> None:
        """The transaction is being aborted: what is not on the wire will not be sent (again)."""
        self.wanted.clear()
        error = TransactionAborted("the transaction was aborted before this record was stored")
        self._fail_all(lambda batch: not batch.is_on_wire, error)

    def on_ended(self, identity: Identity | None) -> None:
        """The transaction is over. `identity`: with which the next goes on, None: with the present one."""
        self.forget_parts()
        if identity is not None:
            self.renew(identity)
        self.session.enter(State.READY)

    def forget_parts(self) -> None:
        """The coordinator confirmed the end: there is nothing left that it could be told to end."""
        self.added.clear()
        self.wanted.clear()
        self.has_offsets = self.may_have_begun = False

    def renew(self, identity: Identity) -> None:
        """Sequences start again under another epoch or id. Nothing may be under way."""
        self.identity, self.is_epoch_spent = identity, False
        for queue in list(self._restarting):  # the others begin at 0 with their first batch
            self._restart(queue)

    # What the plain core does otherwise

    def _check_append(self, size_bytes: int) -> None:
        self.session.check(Operation.SEND)
        super()._check_append(size_bytes)

    def die(self, error: OncelogError) -> None:
        self.session.set_fatal_error(error)
        super().die(error)

    def _renew_identities(self, now_ms: float) -> bool:
        return self.identity is not None and self.session.state in _SENDING

    def _admits(self, queue: PartitionQueue) -> bool:
        if queue.tp in self.added:
            return True
        if self.raises_epoch:
            self.added.add(queue.tp)
            return True
        self.wanted.add(queue.tp)
        return False

    def _on_out_of_order(
        self, batch: ProducerBatch, verdict: OutOfOrder, error: BrokerError, now_ms: float
    ) -> None:
        if verdict is OutOfOrder.RENUMBER:
            self._fail(batch, error)
            return
        if verdict is OutOfOrder.GIVE_UP:
            self.must_abort(error)
        super()._on_out_of_order(batch, verdict, error, now_ms)

    def _fail(self, batch: ProducerBatch, error: OncelogError) -> None:
        if not batch.is_settled and not isinstance(error, TransactionAborted):
            self.must_abort(error)
        if batch.identity is not None:
            self.is_epoch_spent = True
        super()._fail(batch, error)

    def must_abort(self, error: OncelogError) -> None:
        """Something of the transaction failed: all that is left is to abort it."""
        was_sending = self.session.state in _SENDING
        self.session.set_abortable_error(error)
        self.is_epoch_spent = True
        if was_sending:
            self.close_open_batches()  # so that the next `send` asks the session
