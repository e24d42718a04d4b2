"""The transactional producer's session: which call is allowed when, and what a coordinator's error means.

    state             init   begin   send, send offsets   commit   abort
    UNINITIALIZED     yes    -       -                    -        -
    READY             -      yes     -                    -        -
    IN_TRANSACTION    -      -       yes                  yes      yes
    MUST_ABORT        -      -       the error            the error yes
    COMMITTING        -      -       -                    again    -
    ABORTING          -      -       -                    -        again
    FATAL             the error, for every call

COMMITTING and ABORTING stay when an answer was lost or time ran out. Only the same call may follow: the
outcome may be decided already, and a commit that is answered by an abort could end the transaction after it.

Offsets are unconfirmed from the call of send_offsets until it returns. They stay so when it times out or is
cancelled: the transaction may have them or not. Only the same call, repeated until it returns, confirms them.

    unconfirmed offsets   send, send offsets   commit                 abort
    none                  yes                  yes                    yes
    some                  yes                  TRANSACTION_ABORTABLE  yes, also what is unconfirmed

Java keeps the request for the offsets in front of EndTxn. Ours cannot: the application holds the coroutine.
Source: rows T4, T13; KIP-1050; Kafka's TransactionManager.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from oncelog.errors import (
    BrokerError,
    DisconnectedError,
    MisuseError,
    NotConnectedError,
    OncelogError,
    TimedOut,
    TransactionAbortable,
)
from oncelog.rules.idempotence.sequencer import Identity
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition


class State(Enum):
    """Where the session stands."""

    UNINITIALIZED = "uninitialized"
    READY = "ready"
    IN_TRANSACTION = "in transaction"
    MUST_ABORT = "must abort"
    COMMITTING = "committing"
    ABORTING = "aborting"
    FATAL = "fatal"


class Call(Enum):
    """What an application asks for, by the method's name."""

    INIT = "init_transactions()"
    BEGIN = "begin_transaction()"
    SEND = "send()"
    SEND_OFFSETS = "send_offsets_to_transaction()"
    COMMIT = "commit_transaction()"
    ABORT = "abort_transaction()"


_ALLOWED = {
    State.UNINITIALIZED: {Call.INIT},
    State.READY: {Call.BEGIN},
    State.IN_TRANSACTION: {Call.SEND, Call.SEND_OFFSETS, Call.COMMIT, Call.ABORT},
    State.MUST_ABORT: {Call.ABORT},
    State.COMMITTING: {Call.COMMIT},
    State.ABORTING: {Call.ABORT},
    State.FATAL: set(),
}

_WHAT_TO_DO = {
    State.UNINITIALIZED: "call init_transactions() first, once",
    State.READY: "no transaction is open: call begin_transaction() first",
    State.IN_TRANSACTION: "a transaction is open: commit_transaction() or abort_transaction() ends it",
    State.COMMITTING: "the commit before may have happened: call commit_transaction() again until it returns,"
    " or make a new producer with this transactional.id, which finishes or aborts it",
    State.ABORTING: "the abort before is not confirmed: call abort_transaction() again until it returns,"
    " or make a new producer with this transactional.id",
}


class OffsetsCall(NamedTuple):
    """One send_offsets_to_transaction() by its arguments; a call with equal ones is a repetition of it."""

    group: ConsumerGroupMetadata
    offsets: frozenset[tuple[TopicPartition, OffsetAndMetadata]]

    @classmethod
    def of(
        cls, group: ConsumerGroupMetadata, offsets: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> OffsetsCall:
        """Return the call that commits `offsets` for `group`."""
        return cls(group, frozenset(offsets.items()))


class Session:
    """One session's state.

    `error`: why it must abort or cannot continue, in these two states. `unconfirmed`: calls for offsets that
    have not returned, or that ended without an answer. `number`: how many transactions have begun.
    """

    __slots__ = ("error", "number", "state", "unconfirmed")

    def __init__(self) -> None:
        self.state = State.UNINITIALIZED
        self.number = 0
        self.error: OncelogError | None = None
        self.unconfirmed: set[OffsetsCall] = set()

    def check(self, call: Call) -> None:
        """Raises the session's error, or MisuseError that says what to do, when the call is not allowed."""
        if call in _ALLOWED[self.state]:
            if call is Call.COMMIT and self.unconfirmed:
                raise _offsets_unconfirmed()
            return
        if self.error is not None:
            raise self.error
        if call is Call.INIT:
            raise MisuseError("this producer is initialized; init_transactions() is called once")
        raise MisuseError(f"{call.value} is not possible here: {_WHAT_TO_DO[self.state]}")

    def must_abort(self, error: OncelogError) -> None:
        """Something of the transaction failed; committing it is out of the question.

        What ran out of time becomes TransactionAbortable: a TimedOut of a commit says to commit again.
        """
        if self.state is State.IN_TRANSACTION or self.state is State.COMMITTING:
            self.state, self.error = State.MUST_ABORT, error
            if isinstance(error, TimedOut):
                self.error = TransactionAbortable(f"call abort_transaction(): {error}")
                self.error.reaction, self.error.__cause__ = "abortable", error

    def die(self, error: OncelogError) -> None:
        """The producer cannot go on; a new one can."""
        if self.state is not State.FATAL:
            self.state, self.error = State.FATAL, error

    def enter(self, state: State) -> None:
        """A call made its way."""
        self.state, self.error = state, None
        if state is State.READY:
            self.unconfirmed.clear()
        elif state is State.IN_TRANSACTION:
            self.number += 1

    def is_going_on(self, number: int) -> bool:
        """Whether the transaction of this number has neither ended nor is being aborted."""
        is_open = self.state in (State.IN_TRANSACTION, State.MUST_ABORT, State.COMMITTING)
        return is_open and number == self.number

    def begin_offsets(self, call: OffsetsCall) -> None:
        """Note that offsets are about to be sent. Raises as `check`."""
        self.check(Call.SEND_OFFSETS)
        self.unconfirmed.add(call)

    def confirm_offsets(self, call: OffsetsCall) -> None:
        """Note that the group's coordinator has taken the offsets."""
        self.unconfirmed.discard(call)


def _offsets_unconfirmed() -> TransactionAbortable:
    error = TransactionAbortable(
        "send_offsets_to_transaction() did not return, so the transaction may lack its offsets: call it "
        "again with the same arguments until it returns, or call abort_transaction()"
    )
    error.reaction = "abortable"
    return error


class Reaction(Enum):
    """What follows from an error of a coordinator.

    RETRY the request. FIND the coordinator anew, then retry. ABORT: the transaction can only be aborted.
    DIE: the producer ends. CALLER: the error is raised as it is, and who asked decides.
    """

    RETRY = "retry"
    FIND = "find"
    ABORT = "abort"
    DIE = "die"
    CALLER = "caller"


class Asked(NamedTuple):
    """A kind of request, and the codes that mean something else to it than to others."""

    name: str
    codes: dict[int, Reaction]


_EVERYWHERE = {
    3: Reaction.RETRY,  # UNKNOWN_TOPIC_OR_PARTITION: just made, perhaps
    7: Reaction.RETRY,  # REQUEST_TIMED_OUT
    13: Reaction.FIND,  # NETWORK_EXCEPTION
    14: Reaction.RETRY,  # COORDINATOR_LOAD_IN_PROGRESS
    15: Reaction.FIND,  # COORDINATOR_NOT_AVAILABLE
    16: Reaction.FIND,  # NOT_COORDINATOR
    22: Reaction.ABORT,  # ILLEGAL_GENERATION: the group went on without us
    25: Reaction.ABORT,  # UNKNOWN_MEMBER_ID
    29: Reaction.ABORT,  # TOPIC_AUTHORIZATION_FAILED
    30: Reaction.ABORT,  # GROUP_AUTHORIZATION_FAILED
    49: Reaction.ABORT,  # INVALID_PRODUCER_ID_MAPPING: the id expired
    51: Reaction.RETRY,  # CONCURRENT_TRANSACTIONS: the one before is being completed
    55: Reaction.RETRY,  # OPERATION_NOT_ATTEMPTED: another partition was refused
    59: Reaction.ABORT,  # UNKNOWN_PRODUCER_ID
    82: Reaction.ABORT,  # FENCED_INSTANCE_ID
    113: Reaction.ABORT,  # STALE_MEMBER_EPOCH
    120: Reaction.ABORT,  # TRANSACTION_ABORTABLE
}
"""Every other code ends the producer: fenced (47, 90), not allowed (53), a state that must not be (48)."""

_UNDECIDED = (-1, 7, 13, 15)
"""UNKNOWN_SERVER_ERROR, REQUEST_TIMED_OUT, NETWORK_EXCEPTION, COORDINATOR_NOT_AVAILABLE: also the answer when
the transaction log did not confirm in time what it may hold."""

INIT = Asked("InitProducerId", {49: Reaction.DIE, 59: Reaction.DIE})
ADD_PARTITIONS = Asked("AddPartitionsToTxn", {})
ADD_OFFSETS = Asked("AddOffsetsToTxn", {})
COMMIT_OFFSETS = Asked("TxnOffsetCommit", {})
END = Asked("EndTxn", {3: Reaction.DIE})
END_IF_BEGUN = Asked("EndTxn", {3: Reaction.DIE, 48: Reaction.ABORT})
"""The abort of a transaction that the coordinator may not know of: INVALID_TXN_STATE says so."""

ABORT_OWN_EPOCH = Asked("EndTxn", {3: Reaction.DIE, 90: Reaction.CALLER})
"""The abort of a transaction that has an epoch of its own: see `reaction_to_fenced_abort`."""
DESCRIBE = Asked("DescribeTransactions", {53: Reaction.CALLER, 105: Reaction.CALLER})
"""What the coordinator knows of the transactional id; not allowed, or nothing."""

UNKNOWN_TOPIC_PATIENCE_MS = 3_000
"""How long a topic whose offsets are committed may be unknown: one just created spreads in this time.

Java retries until max.block.ms is over; nothing creates a topic because offsets are committed for it.
"""


def reaction_to(asked: Asked, error: OncelogError, waited_ms: float = 0) -> Reaction:
    """Return what to do about an error, or a missing answer, `waited_ms` after the request was first sent."""
    if isinstance(error, (DisconnectedError, TimedOut)):
        return Reaction.FIND
    if isinstance(error, MisuseError) and asked in (ADD_OFFSETS, COMMIT_OFFSETS):
        return Reaction.ABORT  # the arguments cannot be written, so nothing was sent
    if not isinstance(error, BrokerError):
        return Reaction.DIE
    if error.code == 3 and asked is COMMIT_OFFSETS and waited_ms > UNKNOWN_TOPIC_PATIENCE_MS:
        return Reaction.ABORT
    return asked.codes.get(error.code, _EVERYWHERE.get(error.code, Reaction.DIE))


_PREPARED = ("PrepareCommit", "PrepareAbort")


class CoordinatorEntry(NamedTuple):
    """What DescribeTransactions says of a transactional id: `state` by its name in Kafka."""

    identity: Identity
    state: str


def reaction_to_fenced_abort(
    entry: CoordinatorEntry | None, ours: Identity, previous: CoordinatorEntry | None
) -> Reaction:
    """Return what follows from PRODUCER_FENCED for the abort of a transaction with an epoch of its own.

    The answer to EndTxn raises the epoch before the markers are written. Until they are, the coordinator
    adds nothing to the next transaction (CONCURRENT_TRANSACTIONS), and takes its abort, which names the
    epoch that holds, for one of a producer that is fenced. So that code proves nothing: the entry does.

        entry                                   reaction
        ours, in PrepareCommit or PrepareAbort  RETRY: our transaction before is being ended
        another, after the first refusal of     RETRY: it may have changed between the two answers, by its
          this kind in a row                      completion or by an EndTxn of ours whose answer was lost
        another, after the second one           DIE: fenced
        not to be seen                          DIE

    EndTxn is sent again rather than left out. An answer to Produce may have been lost, and what comes late
    then begins a transaction; EndTxn raises the epoch, so that it is refused. Nor is InitProducerId sent
    instead: it aborts whatever is open, also a newer producer's transaction. Classic transactions do not
    get here: none begins before AddPartitionsToTxn succeeds, and until then INVALID_TXN_STATE is the answer.
    `entry`, `previous`: what was found after this refusal, and after the one before it.
    Source: Kafka's TransactionCoordinator.endTransaction.
    """
    if entry is None:
        return Reaction.DIE
    if _is_being_ended(entry, ours) or previous is None or _is_being_ended(previous, ours):
        return Reaction.RETRY
    return Reaction.DIE


def _is_being_ended(entry: CoordinatorEntry, ours: Identity) -> bool:
    return entry.identity == ours and entry.state in _PREPARED


def ending_at_close(state: State) -> Call | None:
    """Return the call that ends what is open when the producer is closed; None where there is none.

    A commit that was asked for may be decided, so that only another commit may follow, as in Java's client.
    """
    if state in (State.IN_TRANSACTION, State.MUST_ABORT, State.ABORTING):
        return Call.ABORT
    return Call.COMMIT if state is State.COMMITTING else None


def may_be_done(error: OncelogError) -> bool:
    """Whether what was asked may have been carried out, or may yet be, in spite of this error."""
    if isinstance(error, BrokerError):
        return error.code in _UNDECIDED
    return not isinstance(error, NotConnectedError)
