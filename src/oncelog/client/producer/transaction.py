"""The current transaction of a producer: its partitions, its epoch, and what may be sent.

A batch is sent only when its partition is part of the transaction. With `transaction.version` 2, the broker
adds partitions itself and raises the epoch with each transaction, so a batch may be sent immediately.
Otherwise the batch waits for AddPartitionsToTxn. The state machine of the calls is
`rules.transactions.client_session`.

Source: behaviours T4 and T5 (docs/behaviours.md); KIP-98, KIP-360, KIP-890; Kafka's TransactionManager.
"""

from __future__ import annotations

from oncelog.client.producer.produce_messages import MAX_PRODUCE_VERSION
from oncelog.errors import MisuseError, OncelogError
from oncelog.rules.transactions.client_session import Operation, Session, State
from oncelog.types import TopicPartition

_SENDING = (State.IN_TRANSACTION, State.COMMITTING)
LAST_CLASSIC_PRODUCE_VERSION = 11
"""The last version of Produce with which brokers do not add partitions to the transaction (KIP-890)."""


class ProducerTransaction:
    """The state of a transactional producer's transaction. One object serves all transactions in turn."""

    def __init__(self) -> None:
        self.session = Session()
        self.raises_epoch = False
        """True if the broker raises the epoch when a transaction ends (`transaction.version` 2)."""
        self.is_epoch_spent = False
        """True if sequences cannot continue under this epoch, so that the next transaction needs another
        epoch.
        """
        self.added: set[TopicPartition] = set()
        self.pending: set[TopicPartition] = set()
        """Partitions with records to send, to be added to the transaction first."""
        self.has_offsets = False
        """True if the transaction commits offsets of a group."""
        self.is_shared = False
        """True if other producers may have joined the transaction, and may have added partitions to it."""
        self.is_taken_over = False
        """True if another producer began the transaction, so that its sequences are not known here."""
        self.may_be_fenced = False
        """True once InitProducerId was sent to fence producers that joined, even if there is no response."""
        self.may_have_begun = False
        """True once a request to add partitions or offsets was sent, even if there is no response."""

    def begin(self, *, raises_epoch: bool) -> None:
        """Begin a transaction without a request. The coordinator learns of the transaction with its first
        partition.

        Raises MisuseError if the epoch is spent.
        """
        self.session.check(Operation.BEGIN)
        if self.is_epoch_spent or self.is_taken_over:
            # The sequences of the other producers began at 0, so brokers would take the next records for
            # repetitions. Guards: test_the_owner_ends_a_transaction_to_which_only_others_have_sent,
            # test_a_producer_that_took_over_loses_no_record_of_its_next_transaction.
            raise MisuseError(
                "this producer has shared a transaction or taken one over, and the broker keeps its epoch: "
                "create a new producer for the next transaction"
            )
        self.raises_epoch = raises_epoch
        self.session.enter(State.IN_TRANSACTION)

    @property
    def is_sending(self) -> bool:
        """Return True in the states in which records may be sent."""
        return self.session.state in _SENDING

    @property
    def has_begun(self) -> bool:
        """Return True if the coordinator knows of the transaction, so that EndTxn must be sent.

        If the broker adds partitions itself, or if the transaction is shared, True means only that the
        coordinator may know of the transaction. The coordinator accepts an abort in both cases.
        """
        return self.has_own_parts or self.is_shared

    @property
    def has_own_parts(self) -> bool:
        """Return True if this producer has added partitions or offsets to the transaction."""
        return bool(self.added or self.has_offsets)

    @property
    def max_produce_version(self) -> int:
        """Return the highest Produce version for the transaction.

        With versions above LAST_CLASSIC_PRODUCE_VERSION, brokers add partitions to the transaction.
        """
        return MAX_PRODUCE_VERSION if self.raises_epoch else LAST_CLASSIC_PRODUCE_VERSION

    def admits(self, tp: TopicPartition) -> bool:
        """Return True if records of a partition may be sent now.

        If not, add the partition to `pending`, so that it is added to the transaction first.
        """
        if tp in self.added:
            return True
        if self.raises_epoch:
            self.added.add(tp)
            return True
        self.pending.add(tp)
        return False

    def on_added(self, partitions: set[TopicPartition]) -> None:
        """Record that the coordinator added these partitions."""
        self.pending -= partitions
        self.added |= partitions

    def require_abort(self, error: OncelogError) -> None:
        """Record that a part of the transaction failed, so that only an abort can follow."""
        self.session.set_abortable_error(error)
        self.is_epoch_spent = True

    def reset(self) -> None:
        """Return to the state before `init_transactions`, for another transactional id."""
        self.session.enter(State.UNINITIALIZED)
        self.raises_epoch = self.is_epoch_spent = self.is_taken_over = False
        self.forget_parts()

    def forget_parts(self) -> None:
        """Forget the transaction's partitions and offsets, because the coordinator has confirmed its end."""
        self.added.clear()
        self.pending.clear()
        self.has_offsets = self.is_shared = self.may_be_fenced = self.may_have_begun = False
