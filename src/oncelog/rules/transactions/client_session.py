"""A transactional producer's session: which operations are allowed, and the reactions to coordinator errors.

    state             init   begin   send, send offsets, share   commit, hand over   abort
    UNINITIALIZED     yes    -       -                           -                   -
    READY             -      yes     -                           -                   -
    IN_TRANSACTION    -      -       yes                         yes                 yes
    ABORTABLE_ERROR   -      -       raises                      raises              yes
    COMMITTING        -      -       -                           repeat the commit   -
    ABORTING          -      -       -                           -                   repeat
    FATAL             raises the session's error, for every operation

If several producers use one epoch, what each of them may do also depends on its role (`roles`).

After a lost response or a timeout the session stays COMMITTING or ABORTING, and the application may only
repeat the same operation. An abort must never follow a commit without a response: the commit may have
succeeded, and the abort would then end the next transaction (KAFKA-17754). See
test_every_operation_in_every_state.

Offsets are unconfirmed from the call of send_offsets_to_transaction() until it returns. If the call times out
or is cancelled, the transaction may or may not contain the offsets, so they stay unconfirmed. The application
confirms them by repeating the same call until it returns.

    unconfirmed offsets   send, send offsets, share   commit, hand over      abort
    none                  yes                         yes                    yes
    some                  yes                         TRANSACTION_ABORTABLE  yes; drops all offsets

Java's client instead queues the request for the offsets in front of EndTxn. This client cannot do that: the
request ends when the application cancels its coroutine.
Source: behaviours T4 and T13 (docs/behaviours.md); KIP-1050; kafka TransactionManager.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from oncelog.errors import (
    BrokerError,
    ConcurrentTransactions,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    DisconnectedError,
    FencedInstanceId,
    GroupAuthorizationFailed,
    IllegalGeneration,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    MisuseError,
    NetworkException,
    NotConnectedError,
    NotCoordinator,
    OncelogError,
    OperationNotAttempted,
    ProducerFenced,
    RequestTimedOut,
    StaleMemberEpoch,
    TimedOut,
    TopicAuthorizationFailed,
    TransactionAbortable,
    TransactionalIdAuthorizationFailed,
    TransactionalIdNotFound,
    UnknownMemberId,
    UnknownProducerId,
    UnknownServerError,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    copy_to_raise,
)
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.entry import EXHAUSTED_EPOCH
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition


class State(Enum):
    """The states of a session, as in Kafka's TransactionManager."""

    UNINITIALIZED = "uninitialized"
    READY = "ready"
    IN_TRANSACTION = "in transaction"
    ABORTABLE_ERROR = "abortable error"
    COMMITTING = "committing"
    ABORTING = "aborting"
    FATAL = "fatal"


class Operation(Enum):
    """An operation that the application requests. The value is its method's name."""

    INIT = "init_transactions()"
    BEGIN = "begin_transaction()"
    SEND = "send()"
    SEND_OFFSETS = "send_offsets_to_transaction()"
    SHARE = "share_transaction()"
    HAND_OVER = "hand_over_transaction()"
    COMMIT = "commit_transaction()"
    ABORT = "abort_transaction()"


_ALLOWED = {
    State.UNINITIALIZED: {Operation.INIT},
    State.READY: {Operation.BEGIN},
    State.IN_TRANSACTION: set(Operation) - {Operation.INIT, Operation.BEGIN},
    State.ABORTABLE_ERROR: {Operation.ABORT},
    State.COMMITTING: {Operation.COMMIT},
    State.ABORTING: {Operation.ABORT},
    State.FATAL: set(),
}

_HINTS = {
    State.UNINITIALIZED: "call init_transactions() first",
    State.READY: "no transaction is open: call begin_transaction() first",
    State.IN_TRANSACTION: "a transaction is open: call commit_transaction() or abort_transaction() first",
    State.COMMITTING: "the last commit may have succeeded: call commit_transaction() again until it returns,"
    " or create a new producer with this transactional.id, which finishes or aborts the transaction",
    State.ABORTING: "the last abort is not confirmed: call abort_transaction() again until it returns,"
    " or create a new producer with this transactional.id",
}


class OffsetsCall(NamedTuple):
    """A call of send_offsets_to_transaction(). A call with equal arguments is a repetition."""

    group: ConsumerGroupMetadata
    offsets: frozenset[tuple[TopicPartition, OffsetAndMetadata]]

    @classmethod
    def of(
        cls, group: ConsumerGroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> OffsetsCall:
        """Return the OffsetsCall for `offsets` and `group`."""
        return cls(group, frozenset(offsets.items()))


class Session:
    """The state of one producer's session.

    `error` is set in ABORTABLE_ERROR and FATAL. `unconfirmed` has the calls whose offsets are unconfirmed.
    `number` counts the transactions that have begun.
    """

    __slots__ = ("error", "number", "state", "unconfirmed")

    def __init__(self) -> None:
        self.state = State.UNINITIALIZED
        self.number = 0
        self.error: OncelogError | None = None
        self.unconfirmed: set[OffsetsCall] = set()

    def check(self, operation: Operation) -> None:
        """Raise an error if the operation is not allowed: the session's error, or MisuseError with a hint.

        Raises TransactionAbortable if unconfirmed offsets would be committed or handed over.
        """
        if operation in _ALLOWED[self.state]:
            if operation in (Operation.COMMIT, Operation.HAND_OVER) and self.unconfirmed:
                raise _offsets_unconfirmed()
            return
        if self.error is not None:
            raise copy_to_raise(self.error)
        if operation is Operation.INIT:
            raise MisuseError("this producer is already initialized; call init_transactions() only once")
        raise MisuseError(f"{operation.value} is not possible now: {_HINTS[self.state]}")

    def check_unused(self) -> None:
        """Raise the session's error, or MisuseError if a transaction is open or being ended."""
        if self.error is not None:
            raise copy_to_raise(self.error)
        if self.state not in (State.UNINITIALIZED, State.READY):
            raise MisuseError("the transactional.id cannot change within a transaction")

    def set_abortable_error(self, error: OncelogError) -> None:
        """Enter ABORTABLE_ERROR: the application can only abort the open transaction.

        Outside of IN_TRANSACTION and COMMITTING this does nothing. A timeout is wrapped in
        TransactionAbortable, because TimedOut from a commit means that the application must repeat the
        commit.
        """
        if self.state is State.IN_TRANSACTION or self.state is State.COMMITTING:
            self.state, self.error = State.ABORTABLE_ERROR, error
            if isinstance(error, TimedOut):
                self.error = TransactionAbortable(f"call abort_transaction(): {error}")
                self.error.reaction, self.error.__cause__ = "abortable", error

    def set_fatal_error(self, error: OncelogError) -> None:
        """Enter FATAL: every operation raises this error, and the application needs a new producer."""
        if self.state is not State.FATAL:
            self.state, self.error = State.FATAL, error

    def enter(self, state: State) -> None:
        """Enter a state without an error.

        READY follows initialization and a completed transaction. IN_TRANSACTION follows the call that begins
        a transaction, and COMMITTING or ABORTING the call that starts to end it.
        """
        self.state, self.error = state, None
        if state is State.READY:
            self.unconfirmed.clear()
        elif state is State.IN_TRANSACTION:
            self.number += 1

    def is_open(self, number: int) -> bool:
        """Return True if the transaction with this number has not ended and is not being aborted."""
        is_open = self.state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR, State.COMMITTING)
        return is_open and number == self.number

    def begin_offsets(self, call: OffsetsCall) -> None:
        """Add the call to `unconfirmed` before its offsets are sent. Raises the errors of `check`."""
        self.check(Operation.SEND_OFFSETS)
        self.unconfirmed.add(call)

    def confirm_offsets(self, call: OffsetsCall) -> None:
        """Remove the call from `unconfirmed`, because the group coordinator has accepted the offsets."""
        self.unconfirmed.discard(call)


def _offsets_unconfirmed() -> TransactionAbortable:
    error = TransactionAbortable(
        "send_offsets_to_transaction() did not return, so the transaction may lack its offsets: call it "
        "again with the same arguments until it returns, or call abort_transaction()"
    )
    error.reaction = "abortable"
    return error


class ErrorAction(Enum):
    """The reaction to an error of a coordinator.

    RETRY             send the request again
    FIND_COORDINATOR  look the coordinator up again, then retry
    ABORT             the transaction can only be aborted
    FAIL_PRODUCER     the error is fatal
    RAISE             the caller decides
    """

    RETRY = "retry"
    FIND_COORDINATOR = "find coordinator"
    ABORT = "abort"
    FAIL_PRODUCER = "fail producer"
    RAISE = "raise"


class RequestKind(NamedTuple):
    """A kind of request. For the error codes in `overrides`, the reaction differs from the default."""

    name: str
    overrides: dict[int, ErrorAction]


_DEFAULT_ACTIONS = {
    # The topic may be so new that the coordinator does not know it yet.
    UnknownTopicOrPartition.code: ErrorAction.RETRY,
    RequestTimedOut.code: ErrorAction.RETRY,
    NetworkException.code: ErrorAction.FIND_COORDINATOR,
    CoordinatorLoadInProgress.code: ErrorAction.RETRY,
    CoordinatorNotAvailable.code: ErrorAction.FIND_COORDINATOR,
    NotCoordinator.code: ErrorAction.FIND_COORDINATOR,
    # The group has rebalanced without this member.
    IllegalGeneration.code: ErrorAction.ABORT,
    UnknownMemberId.code: ErrorAction.ABORT,
    TopicAuthorizationFailed.code: ErrorAction.ABORT,
    GroupAuthorizationFailed.code: ErrorAction.ABORT,
    # The transactional id has expired.
    InvalidProducerIdMapping.code: ErrorAction.ABORT,
    # The previous transaction is being completed.
    ConcurrentTransactions.code: ErrorAction.RETRY,
    # Another partition of the request was rejected.
    OperationNotAttempted.code: ErrorAction.RETRY,
    UnknownProducerId.code: ErrorAction.ABORT,
    FencedInstanceId.code: ErrorAction.ABORT,
    StaleMemberEpoch.code: ErrorAction.ABORT,
    TransactionAbortable.code: ErrorAction.ABORT,
}
"""The default reactions. Errors without an entry are fatal, such as PRODUCER_FENCED."""

_UNDECIDED = (
    UnknownServerError.code,
    RequestTimedOut.code,
    NetworkException.code,
    CoordinatorNotAvailable.code,
)
"""Errors after which the request may still succeed or have succeeded.

A coordinator also sends these errors if the record with the request's change is not durable in time. The
record may become durable later.
"""

INIT = RequestKind(
    "InitProducerId",
    {
        InvalidProducerIdMapping.code: ErrorAction.FAIL_PRODUCER,
        UnknownProducerId.code: ErrorAction.FAIL_PRODUCER,
    },
)
ADD_PARTITIONS = RequestKind("AddPartitionsToTxn", {})
ADD_OFFSETS = RequestKind("AddOffsetsToTxn", {})
COMMIT_OFFSETS = RequestKind("TxnOffsetCommit", {})
END = RequestKind("EndTxn", {UnknownTopicOrPartition.code: ErrorAction.FAIL_PRODUCER})
END_IF_BEGUN = RequestKind(
    "EndTxn",
    {UnknownTopicOrPartition.code: ErrorAction.FAIL_PRODUCER, InvalidTxnState.code: ErrorAction.ABORT},
)
"""The abort of a transaction that has perhaps not begun at the coordinator. If it has not, the response is
INVALID_TXN_STATE.
"""

ABORT_OWN_EPOCH = RequestKind(
    "EndTxn",
    {UnknownTopicOrPartition.code: ErrorAction.FAIL_PRODUCER, ProducerFenced.code: ErrorAction.RAISE},
)
"""The abort of a transaction that has its own producer epoch.

`fenced_abort_action` handles PRODUCER_FENCED.
"""
DESCRIBE = RequestKind(
    "DescribeTransactions",
    {
        TransactionalIdAuthorizationFailed.code: ErrorAction.RAISE,
        TransactionalIdNotFound.code: ErrorAction.RAISE,
        # Brokers before Kafka 3.0. Guard: test_an_expired_id_is_used_again_on_brokers_that_describe_none.
        UnsupportedVersion.code: ErrorAction.RAISE,
    },
)
"""DescribeTransactions for the transactional id. The caller decides if permission is missing, the id is
unknown, or the broker does not know the request.
"""

UNKNOWN_TOPIC_PATIENCE_MS = 3_000
"""Time in ms after which a topic that TxnOffsetCommit does not find is treated as missing.

Within this time, all brokers learn of a new topic. Java retries until max.block.ms, which does not help,
because committing offsets does not create a topic.
"""


def error_action(kind: RequestKind, error: OncelogError, waited_ms: float = 0) -> ErrorAction:
    """Return the reaction to an error of a request.

    DisconnectedError and TimedOut mean that there was no response. `waited_ms` is the time since the request
    was first sent.
    """
    if isinstance(error, (DisconnectedError, TimedOut)):
        return ErrorAction.FIND_COORDINATOR
    if isinstance(error, MisuseError) and kind in (ADD_OFFSETS, COMMIT_OFFSETS):
        # The arguments could not be encoded, so nothing was sent.
        return ErrorAction.ABORT
    if not isinstance(error, BrokerError):
        return ErrorAction.FAIL_PRODUCER
    if (
        error.code == UnknownTopicOrPartition.code
        and kind is COMMIT_OFFSETS
        and waited_ms > UNKNOWN_TOPIC_PATIENCE_MS
    ):
        return ErrorAction.ABORT
    return kind.overrides.get(error.code, _DEFAULT_ACTIONS.get(error.code, ErrorAction.FAIL_PRODUCER))


_PREPARED = ("PrepareCommit", "PrepareAbort")
_ONGOING, _COMPLETED_ABORT = "Ongoing", "CompleteAbort"
_ABORTED = ("PrepareEpochFence", "PrepareAbort", _COMPLETED_ABORT)


class CoordinatorEntry(NamedTuple):
    """A transactional id as DescribeTransactions returns it.

    `state` is Kafka's name, such as PrepareCommit.
    """

    identity: ProducerIdAndEpoch
    state: str

    @property
    def is_aborted(self) -> bool:
        """True if the transactional id's last transaction was aborted, and all markers of the abort are
        written.
        """
        return self.state == _COMPLETED_ABORT

    @property
    def is_in_abort(self) -> bool:
        """True if the transactional id's last transaction is being aborted or was aborted."""
        return self.state in _ABORTED

    @property
    def is_ongoing(self) -> bool:
        """True if the transaction is open, and has partitions or offsets."""
        return self.state == _ONGOING

    def is_open_elsewhere(self, ours: ProducerIdAndEpoch) -> bool:
        """Return True if a producer with another id or epoch has an open transaction.

        InitProducerId would abort that transaction, even under an older epoch. Source: kafka
        TransactionCoordinator.prepareInitProducerIdTransit.
        """
        return self.state == _ONGOING and self.identity != ours


def fenced_abort_action(
    entry: CoordinatorEntry | None, ours: ProducerIdAndEpoch, previous: CoordinatorEntry | None
) -> ErrorAction:
    """Return the reaction to PRODUCER_FENCED for the abort of a transaction with its own producer epoch.

    The coordinator raises the epoch when it answers EndTxn, before the markers are written. Until all are
    written, it answers CONCURRENT_TRANSACTIONS if partitions are added to the next transaction. If the next
    transaction, which has the raised epoch, is aborted in that time, the coordinator answers PRODUCER_FENCED.
    Therefore the error alone does not prove that the producer is fenced. The coordinator's entry for the
    transactional id decides:

        entry                                    reaction
        ours, in PrepareCommit or PrepareAbort   RETRY: the previous transaction is being completed
        any other, after the first error         RETRY: the entry may have changed between the responses, by
                                                   its completion, or by our EndTxn whose response was lost
        any other, after a second error, if      RETRY: the previous transaction has just been completed
          the first row applied to the error before
        any other, after a second error else     FAIL_PRODUCER: the producer is fenced
        unknown                                  FAIL_PRODUCER

    The retry must send EndTxn, and not skip it: a delayed Produce request may still begin the transaction.
    EndTxn raises the epoch, so that such a request is rejected. InitProducerId cannot replace the retry,
    because it aborts any open transaction, even that of a newer producer. This function is not for classic
    transactions. A classic transaction does not begin before AddPartitionsToTxn succeeds, and until then the
    error is INVALID_TXN_STATE.

    `entry` was read after this error, and `previous` after the error before it. `previous` is None after the
    first error. Source: kafka TransactionCoordinator.endTransaction.
    """
    if entry is None:
        return ErrorAction.FAIL_PRODUCER
    if _is_being_completed(entry, ours) or previous is None or _is_being_completed(previous, ours):
        return ErrorAction.RETRY
    return ErrorAction.FAIL_PRODUCER


FENCED_ERRORS = (InvalidProducerEpoch, InvalidProducerIdMapping, InvalidTxnState, ProducerFenced)
"""Errors that a producer gets after another producer has started with its transactional id.

INVALID_TXN_STATE answers a commit while the other one's start aborts the transaction, and Apache Kafka 4 also
sends it later. INVALID_PRODUCER_ID_MAPPING means that the other one got another producer id: at the last
epoch, or after the transactional id had expired. A transaction that timed out may give the same errors.
"""

SUCCESSOR_PATIENCE_MS = 3_000
"""Time in ms within which a new producer repeats InitProducerId, if its first request has aborted an open
transaction.

A client waits at most retry.backoff.max.ms, by default 1 s, before it repeats the request.
"""


def has_successor(
    entry: CoordinatorEntry | None,
    ours: ProducerIdAndEpoch,
    *,
    may_have_timed_out: bool,
    completed_for_ms: float = 0,
) -> bool | None:
    """Return True if another producer got the transactional id after `ours`, and False if not. Return None if
    this is not known yet, and the coordinator must be asked again.

    Call this for a producer that has failed, unless its own last request may have raised the epoch. The
    coordinator raises the epoch by one if it aborts a transaction that has been open for too long.
    InitProducerId raises it by one too. If a transaction is open, InitProducerId raises the epoch by one,
    aborts the transaction, and raises the epoch again when the client repeats the request.

    `may_have_timed_out`: the transaction has been open for longer than transaction.timeout.ms.
    `completed_for_ms` is the time since the entry was first seen in CompleteAbort.

        entry                                          may have timed out   result
        another producer id (but see below)            any                  True
        epoch ours + 2 or above                        any                  True
        epoch ours + 1, not in an abort                any                  True: InitProducerId
        epoch ours + 1, in an abort                    no                   True: InitProducerId
        epoch ours + 1, abort not completed            yes                  None
        epoch ours + 1, CompleteAbort                  yes                  None for SUCCESSOR_PATIENCE_MS,
                                                                              then False
        epoch ours or below, or unknown                any                  False

    Epoch 0 of another producer id counts as ours + 1 if ours is the last epoch. With an epoch per transaction
    (KIP-890), an abort at the last epoch gives the transactional id another producer id.
    """
    if entry is None:
        return False
    raises = entry.identity.producer_epoch - ours.producer_epoch
    if entry.identity.producer_id != ours.producer_id:
        # Guard: test_an_abort_at_the_last_epoch_is_not_a_successors_for_sure.
        raises = entry.identity.producer_epoch + 1 if ours.producer_epoch >= EXHAUSTED_EPOCH else 2
    if raises <= 0:
        return False
    if raises >= 2 or not entry.is_in_abort or not may_have_timed_out:
        return True
    is_over = entry.is_aborted and completed_for_ms >= SUCCESSOR_PATIENCE_MS
    return False if is_over else None


def _is_being_completed(entry: CoordinatorEntry, ours: ProducerIdAndEpoch) -> bool:
    return entry.identity == ours and entry.state in _PREPARED


def operation_at_close(state: State) -> Operation | None:
    """Return the operation that close() must use to end an open transaction; None if none is open.

    A requested commit may have succeeded, so only another commit may follow, as in Java's client.
    """
    if state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR, State.ABORTING):
        return Operation.ABORT
    return Operation.COMMIT if state is State.COMMITTING else None


def may_have_succeeded(error: OncelogError) -> bool:
    """Return True if the request may have succeeded, or may still succeed, despite this error."""
    if isinstance(error, BrokerError):
        return error.code in _UNDECIDED
    return not isinstance(error, NotConnectedError)
