"""The current transaction of a producer: its partitions, its epoch, and what may be sent.

A batch is sent only when its partition is part of the transaction. With `transaction.version` 2, the broker
adds partitions itself and raises the epoch with each transaction, so a batch may be sent immediately.
Otherwise the batch waits for AddPartitionsToTxn. The state machine of the calls is
`rules.transactions.client_session`. The module `rules.transactions.roles` says what producers with the same
epoch may do.

Source: behaviours T4 and T5 (docs/behaviours.md); KIP-98, KIP-360, KIP-890; Kafka's TransactionManager.
"""

from __future__ import annotations

from oncelog.client.producer.produce_messages import MAX_PRODUCE_VERSION
from oncelog.errors import OncelogError
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.client_session import Operation, Session, State
from oncelog.rules.transactions.roles import Role, check_role
from oncelog.types import TopicPartition, TransactionShare

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
        self.is_taken_with_parts = False
        """True if another producer added partitions or offsets before this producer took the transaction
        over.
        """
        self.role = Role.ALONE
        """This producer's part in the transactions of its epoch. Each new epoch makes it ALONE."""
        self.fencing: ProducerIdAndEpoch | None = None
        """The identity of the last InitProducerId that was sent to fence producers that joined, even if there
        was no response.
        """
        self.may_have_begun = False
        """True once a request to add partitions or offsets was sent, even if there is no response."""

    def begin(self, *, raises_epoch: bool) -> None:
        """Begin a transaction without a request. The coordinator learns of the transaction with its first
        partition.

        Raises MisuseError if other producers have used the epoch.
        """
        self.check(Operation.BEGIN)
        assert not self.is_epoch_spent  # only an abort ends such a transaction, and it gets a new epoch
        self.raises_epoch = raises_epoch
        self.session.enter(State.IN_TRANSACTION)

    def check(self, operation: Operation) -> None:
        """Raise an error if the session's state or the producer's role does not allow the operation."""
        self.session.check(operation)
        check_role(self.role, operation)

    def join(self, role: Role, share: TransactionShare) -> None:
        """Enter a transaction that another producer with the same epoch has begun, as JOINED or TOOK_OVER."""
        self.role, self.raises_epoch = role, share.raises_epoch
        self.is_taken_with_parts = role is Role.TOOK_OVER and not share.is_empty
        self.session.enter(State.IN_TRANSACTION)

    @property
    def is_sending(self) -> bool:
        """Return True in the states in which records may be sent."""
        return self.session.state in _SENDING

    @property
    def has_parts(self) -> bool:
        """Return True if this producer, or one that has handed the transaction over, has added partitions or
        offsets.

        If the broker adds partitions itself, True means only that it may have added one.
        """
        return bool(self.added or self.has_offsets or self.is_taken_with_parts)

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
        self.raises_epoch = False
        self.forget_parts()
        self.on_new_epoch()

    def on_new_epoch(self) -> None:
        """Record that this producer got an epoch that no other producer uses."""
        self.is_epoch_spent, self.role = False, Role.ALONE

    def forget_parts(self) -> None:
        """Forget the transaction's partitions and offsets, because the coordinator has confirmed its end.

        If the transaction had partitions and there is no new epoch, the next transaction continues their
        sequences.
        """
        if self.role is Role.ALONE and self.added:
            self.role = Role.CONTINUING
        self.added.clear()
        self.pending.clear()
        self.has_offsets = self.is_taken_with_parts = self.may_have_begun = False
        self.fencing = None
