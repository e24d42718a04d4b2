"""A transactional producer's session: which operations are allowed, and how it reacts to coordinator errors.

    state             init   begin   send, send offsets   commit    abort
    UNINITIALIZED     yes    -       -                    -         -
    READY             -      yes     -                    -         -
    IN_TRANSACTION    -      -       yes                  yes       yes
    ABORTABLE_ERROR   -      -       the error            the error yes
    COMMITTING        -      -       -                    again     -
    ABORTING          -      -       -                    -         again
    FATAL             the error, for every operation

The session stays COMMITTING or ABORTING after a lost response or a timeout, and only the same operation may
follow. An abort must never follow a commit without a response: the commit may have succeeded, and the abort
would then end the next transaction (KAFKA-17754). See test_every_operation_in_every_state.

Offsets are unconfirmed from the call of send_offsets_to_transaction() until it returns. They stay unconfirmed
if the call times out or is cancelled, because the transaction may or may not contain them. Repeating the same
call until it returns confirms them.

    unconfirmed offsets   send, send offsets   commit                 abort
    none                  yes                  yes                    yes
    some                  yes                  TRANSACTION_ABORTABLE  yes, with all offsets

Java's client instead queues the request for the offsets in front of EndTxn. This client cannot do that: the
application owns the coroutine.
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
)
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
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
    """An operation that the application requests, with the name of its method."""

    INIT = "init_transactions()"
    BEGIN = "begin_transaction()"
    SEND = "send()"
    SEND_OFFSETS = "send_offsets_to_transaction()"
    COMMIT = "commit_transaction()"
    ABORT = "abort_transaction()"


_ALLOWED = {
    State.UNINITIALIZED: {Operation.INIT},
    State.READY: {Operation.BEGIN},
    State.IN_TRANSACTION: {Operation.SEND, Operation.SEND_OFFSETS, Operation.COMMIT, Operation.ABORT},
    State.ABORTABLE_ERROR: {Operation.ABORT},
    State.COMMITTING: {Operation.COMMIT},
    State.ABORTING: {Operation.ABORT},
    State.FATAL: set(),
}

_HINTS = {
    State.UNINITIALIZED: "call init_transactions() first; it is called once",
    State.READY: "no transaction is open: call begin_transaction() first",
    State.IN_TRANSACTION: "a transaction is open: commit_transaction() or abort_transaction() ends it",
    State.COMMITTING: "the last commit may have succeeded: call commit_transaction() again until it returns,"
    " or create a new producer with this transactional.id, which finishes or aborts the transaction",
    State.ABORTING: "the last abort is not confirmed: call abort_transaction() again until it returns,"
    " or create a new producer with this transactional.id",
}


class OffsetsCall(NamedTuple):
    """The arguments of send_offsets_to_transaction(). A call with equal arguments is a repetition."""

    group: ConsumerGroupMetadata
    offsets: frozenset[tuple[TopicPartition, OffsetAndMetadata]]

    @classmethod
    def of(
        cls, group: ConsumerGroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> OffsetsCall:
        """Return the call that commits `offsets` for `group`."""
        return cls(group, frozenset(offsets.items()))


class Session:
    """The state of one session.

    `error` is set in ABORTABLE_ERROR and FATAL. `unconfirmed` has the calls for offsets that have not
    returned, or that ended without a response. `number` counts the transactions that have begun.
    """

    __slots__ = ("error", "number", "state", "unconfirmed")

    def __init__(self) -> None:
        self.state = State.UNINITIALIZED
        self.number = 0
        self.error: OncelogError | None = None
        self.unconfirmed: set[OffsetsCall] = set()

    def check(self, operation: Operation) -> None:
        """Raise the session's error, or MisuseError with a hint, if the operation is not allowed."""
        if operation in _ALLOWED[self.state]:
            if operation is Operation.COMMIT and self.unconfirmed:
                raise _offsets_unconfirmed()
            return
        if self.error is not None:
            raise self.error
        if operation is Operation.INIT:
            raise MisuseError("this producer is initialized already; init_transactions() is called once")
        raise MisuseError(f"{operation.value} is not possible here: {_HINTS[self.state]}")

    def set_abortable_error(self, error: OncelogError) -> None:
        """Let the application abort the open transaction, and nothing else.

        A timeout becomes TransactionAbortable, because a TimedOut from a commit means "commit again".
        """
        if self.state is State.IN_TRANSACTION or self.state is State.COMMITTING:
            self.state, self.error = State.ABORTABLE_ERROR, error
            if isinstance(error, TimedOut):
                self.error = TransactionAbortable(f"call abort_transaction(): {error}")
                self.error.reaction, self.error.__cause__ = "abortable", error

    def set_fatal_error(self, error: OncelogError) -> None:
        """Make every operation raise this error. The application needs a new producer."""
        if self.state is not State.FATAL:
            self.state, self.error = State.FATAL, error

    def enter(self, state: State) -> None:
        """Enter a state after an operation has succeeded, or has started to commit or abort."""
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
        """Note that offsets are about to be sent. Raises what `check` raises."""
        self.check(Operation.SEND_OFFSETS)
        self.unconfirmed.add(call)

    def confirm_offsets(self, call: OffsetsCall) -> None:
        """Note that the group coordinator has accepted the offsets."""
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

    RETRY: send the request again. FIND_COORDINATOR: look the coordinator up again, then retry. ABORT: the
    transaction can only be aborted. FAIL_PRODUCER: the error is fatal. RAISE: the caller decides.
    """

    RETRY = "retry"
    FIND_COORDINATOR = "find coordinator"
    ABORT = "abort"
    FAIL_PRODUCER = "fail producer"
    RAISE = "raise"


class RequestKind(NamedTuple):
    """A kind of request, and the error codes that it treats differently from other requests."""

    name: str
    overrides: dict[int, ErrorAction]


_DEFAULT_ACTIONS = {
    UnknownTopicOrPartition.code: ErrorAction.RETRY,  # perhaps just created
    RequestTimedOut.code: ErrorAction.RETRY,
    NetworkException.code: ErrorAction.FIND_COORDINATOR,
    CoordinatorLoadInProgress.code: ErrorAction.RETRY,
    CoordinatorNotAvailable.code: ErrorAction.FIND_COORDINATOR,
    NotCoordinator.code: ErrorAction.FIND_COORDINATOR,
    IllegalGeneration.code: ErrorAction.ABORT,  # the group has rebalanced without this member
    UnknownMemberId.code: ErrorAction.ABORT,
    TopicAuthorizationFailed.code: ErrorAction.ABORT,
    GroupAuthorizationFailed.code: ErrorAction.ABORT,
    InvalidProducerIdMapping.code: ErrorAction.ABORT,  # the transactional id has expired
    ConcurrentTransactions.code: ErrorAction.RETRY,  # the previous transaction is being completed
    OperationNotAttempted.code: ErrorAction.RETRY,  # another partition was rejected
    UnknownProducerId.code: ErrorAction.ABORT,
    FencedInstanceId.code: ErrorAction.ABORT,
    StaleMemberEpoch.code: ErrorAction.ABORT,
    TransactionAbortable.code: ErrorAction.ABORT,
}
"""All other errors are fatal, such as PRODUCER_FENCED and TRANSACTIONAL_ID_AUTHORIZATION_FAILED."""

_UNDECIDED = (
    UnknownServerError.code,
    RequestTimedOut.code,
    NetworkException.code,
    CoordinatorNotAvailable.code,
)
"""A coordinator also returns these when the transaction log may hold a record not confirmed in time."""

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
"""The abort of a transaction that the coordinator may not know. It then returns INVALID_TXN_STATE."""

ABORT_OWN_EPOCH = RequestKind(
    "EndTxn",
    {UnknownTopicOrPartition.code: ErrorAction.FAIL_PRODUCER, ProducerFenced.code: ErrorAction.RAISE},
)
"""The abort of a transaction with its own producer epoch: see `fenced_abort_action`."""
DESCRIBE = RequestKind(
    "DescribeTransactions",
    {
        TransactionalIdAuthorizationFailed.code: ErrorAction.RAISE,
        TransactionalIdNotFound.code: ErrorAction.RAISE,
    },
)
"""A lookup of the transactional id. It may not be authorized, or the coordinator may not know the id."""

UNKNOWN_TOPIC_PATIENCE_MS = 3_000
"""Time after which a topic unknown to TxnOffsetCommit is taken for missing. A new topic spreads in this time.

Java retries until max.block.ms. That does not help: committing offsets does not create a topic.
"""


def error_action(kind: RequestKind, error: OncelogError, waited_ms: float = 0) -> ErrorAction:
    """Return the reaction to an error or a missing response, `waited_ms` after the request was first sent."""
    if isinstance(error, (DisconnectedError, TimedOut)):
        return ErrorAction.FIND_COORDINATOR
    if isinstance(error, MisuseError) and kind in (ADD_OFFSETS, COMMIT_OFFSETS):
        return ErrorAction.ABORT  # the arguments could not be encoded, so nothing was sent
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


class CoordinatorEntry(NamedTuple):
    """A transactional id as DescribeTransactions returns it. `state` has Kafka's name."""

    identity: ProducerIdAndEpoch
    state: str


def fenced_abort_action(
    entry: CoordinatorEntry | None, ours: ProducerIdAndEpoch, previous: CoordinatorEntry | None
) -> ErrorAction:
    """Return the reaction to PRODUCER_FENCED for the abort of a transaction with its own producer epoch.

    The coordinator raises the epoch when it answers EndTxn, before the markers are written. Until they are,
    it adds nothing to the next transaction (CONCURRENT_TRANSACTIONS), and it rejects the abort of that
    transaction, which has the new epoch, as if the producer were fenced. The error alone therefore proves
    nothing. The coordinator's entry for the transactional id does:

        entry                                    reaction
        ours, in PrepareCommit or PrepareAbort   RETRY: the previous transaction is being completed
        another, after the first such error      RETRY: it may have changed between the two responses, by its
                                                   completion or by an EndTxn of ours whose response was lost
        another, after a second error in a row   FAIL_PRODUCER: fenced
        unknown                                  FAIL_PRODUCER

    EndTxn is sent again instead of being skipped: a delayed Produce request may still begin the transaction,
    and EndTxn raises the epoch, so that such a request is rejected. InitProducerId would not do: it aborts
    any open transaction, also a newer producer's. Classic transactions do not get here, since none begins
    before AddPartitionsToTxn succeeds, and until then the error is INVALID_TXN_STATE.

    `entry` and `previous` were read after this error and after the one before it.
    Source: kafka TransactionCoordinator.endTransaction.
    """
    if entry is None:
        return ErrorAction.FAIL_PRODUCER
    if _is_being_completed(entry, ours) or previous is None or _is_being_completed(previous, ours):
        return ErrorAction.RETRY
    return ErrorAction.FAIL_PRODUCER


def _is_being_completed(entry: CoordinatorEntry, ours: ProducerIdAndEpoch) -> bool:
    return entry.identity == ours and entry.state in _PREPARED


def operation_at_close(state: State) -> Operation | None:
    """Return the operation that ends an open transaction when the producer is closed; None if none is open.

    A requested commit may already have succeeded, so only another commit may follow it, as in Java's client.
    """
    if state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR, State.ABORTING):
        return Operation.ABORT
    return Operation.COMMIT if state is State.COMMITTING else None


def may_have_succeeded(error: OncelogError) -> bool:
    """Return True if the request may have succeeded, or may still succeed, despite this error."""
    if isinstance(error, BrokerError):
        return error.code in _UNDECIDED
    return not isinstance(error, NotConnectedError)
