"""Decisions of the consume-transform-produce loop: the reaction to each error, failed record and rebalance.

The loop polls, begins a transaction, transforms and sends, sends the offsets, and commits.

    error                                        at            reaction
    the application or its rights are wrong      any step      STOP
    another consumer has this instance id        any step      STOP
    any                                          START         STOP: nothing has worked yet
    no connection, no response, retriable        INIT, POLL,   REPEAT
                                                 GO_BACK
    any other                                    the same      STOP
    the commit or abort may have succeeded       COMMIT,       REPEAT, with the same producer
                                                 ABORT
    fenced, and the transaction was open for     any of a      NEW_PRODUCER: the coordinator has aborted the
      longer than transaction.timeout.ms         transaction     transaction, and has raised the epoch
    fenced otherwise                             the same      STOP: another producer has the id
    another fatal error                          the same      NEW_PRODUCER
    another error of an abort                    ABORT         NEW_PRODUCER
    any other                                    the same      ABORT: abort, and go back to the committed
                                                                 positions

An abort must never follow a commit without a response: the commit may have succeeded. See
test_an_unclear_commit_is_never_followed_by_an_abort.

NEW_PRODUCER becomes STOP when the coordinator's entry shows another producer: see `may_be_replaced` and
`has_successor`.

A new producer of the same transactional.id aborts the open transaction, or completes a decided commit. After
that the committed positions are right in both cases. Two loops with one transactional.id would fence each
other endlessly if a fenced one made a new producer, so it stops.

Source: behaviour T16 (docs/behaviours.md); KIP-447; Kafka Streams' StreamThread and TaskManager, which also
close a task without a commit, and continue it from the committed offsets.
"""

from __future__ import annotations

from enum import Enum

from oncelog.errors import (
    AuthenticationError,
    BrokerError,
    ClusterAuthorizationFailed,
    ConfigError,
    DisconnectedError,
    FencedInstanceId,
    FencedMemberEpoch,
    GroupAuthorizationFailed,
    IllegalGeneration,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTimestamp,
    InvalidTopicException,
    MessageTooLarge,
    MisuseError,
    OncelogError,
    OutcomeUnknown,
    ProducerFenced,
    RebalanceInProgress,
    RecordListTooLarge,
    StaleMemberEpoch,
    TimedOut,
    TopicAuthorizationFailed,
    TransactionAbortable,
    TransactionalIdAuthorizationFailed,
    UnknownMemberId,
    UnreleasedInstanceId,
    UnsupportedVersion,
)
from oncelog.rules.transactions.client_session import State, may_have_succeeded


class Step(Enum):
    """The step of the loop that raised an error.

    START is the `init_transactions` of the loop's first producer, and INIT that of each later producer.
    GO_BACK is the seek to the committed positions.
    """

    START = "start"
    INIT = "init"
    POLL = "poll"
    GO_BACK = "go back"
    SEND = "send"
    SEND_OFFSETS = "send offsets"
    COMMIT = "commit"
    ABORT = "abort"


class Reaction(Enum):
    """The reaction to an error.

    REPEAT        do the same again after a pause
    ABORT         abort the transaction, and go back to the committed positions
    NEW_PRODUCER  replace the producer, and go back to the committed positions
    STOP          end the loop with the error; nothing of an open transaction is committed
    """

    REPEAT = "repeat"
    ABORT = "abort"
    NEW_PRODUCER = "new producer"
    STOP = "stop"


_FINAL = (
    AuthenticationError,
    ClusterAuthorizationFailed,
    ConfigError,
    FencedInstanceId,
    GroupAuthorizationFailed,
    MisuseError,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
    UnsupportedVersion,
)
"""Errors that would recur, because the application or its permissions are wrong."""
_FENCED = (InvalidProducerEpoch, ProducerFenced)
_UNREACHABLE = (DisconnectedError, TimedOut)
_MEMBERSHIP = (
    FencedMemberEpoch,
    IllegalGeneration,
    RebalanceInProgress,
    StaleMemberEpoch,
    UnknownMemberId,
    UnreleasedInstanceId,
)
"""Errors that mean that the group has rebalanced without this member. The member joins again."""
_REFUSED_RECORD = (
    InvalidRecord,
    InvalidTimestamp,
    InvalidTopicException,
    MessageTooLarge,
    RecordListTooLarge,
)


def reaction_to(step: Step, error: OncelogError, state: State, *, is_overdue: bool = False) -> Reaction:
    """Return the reaction to an error. `state` is the state of the producer's session after the error.

    `is_overdue`: the transaction has been open for longer than transaction.timeout.ms.
    """
    if step is Step.START or isinstance(error, _FINAL):
        return Reaction.STOP
    if step in (Step.INIT, Step.POLL, Step.GO_BACK):
        is_transient = isinstance(error, BrokerError) and error.retriable
        if is_transient or isinstance(error, (*_UNREACHABLE, *_MEMBERSHIP)):
            return Reaction.REPEAT
        return Reaction.STOP
    if state is State.FATAL:
        is_fenced = isinstance(error, _FENCED) and not is_overdue
        return Reaction.STOP if is_fenced else Reaction.NEW_PRODUCER
    if state in (State.COMMITTING, State.ABORTING):
        return Reaction.REPEAT
    return Reaction.NEW_PRODUCER if step is Step.ABORT else Reaction.ABORT


def may_be_replaced(step: Step, error: OncelogError) -> bool:
    """Return True if the coordinator's entry can tell whether a successor has made the producer fail.

    Any fatal error may come from a successor, whatever the code: PRODUCER_FENCED, INVALID_TXN_STATE while the
    successor's start aborts the transaction, INVALID_PRODUCER_ID_MAPPING if the successor got another
    producer id. But if a commit or abort may have succeeded, the entry may show the epoch that it raised,
    which would look like a successor's.
    """
    return step not in (Step.COMMIT, Step.ABORT) or not may_have_succeeded(error)


def is_outage(error: OncelogError) -> bool:
    """Return True if the error or its cause only means that brokers are out of reach, or that the group has
    rebalanced.

    The loop waits for the end of an outage. After MAX_ERRORS other errors without a commit in between, it
    stops, because the next attempt would probably fail as well.
    """
    cause = error.cause if isinstance(error, OutcomeUnknown) else error.__cause__
    if isinstance(error, (TransactionAbortable, OutcomeUnknown)) and isinstance(cause, OncelogError):
        return is_outage(cause)
    return isinstance(error, (*_UNREACHABLE, *_MEMBERSHIP))


MAX_ERRORS = 10
"""Number of consecutive errors after which the loop stops. Outages do not count."""


def is_refused_record(error: Exception | None) -> bool:
    """Return True if the error means that a broker refused a record, and would refuse the record again."""
    return isinstance(error, _REFUSED_RECORD)


class Verdict(Enum):
    """The treatment of a record whose transformation raised an error, or whose output cannot be sent.

    RETRY        call the transform again
    GO_BACK      abort the transaction, and process its records again from the committed positions
    DEAD_LETTER  send the record to the dead-letter topic, in the same transaction
    RAISE        end the loop with the error; nothing of the transaction is committed
    """

    RETRY = "retry"
    GO_BACK = "go back"
    DEAD_LETTER = "dead letter"
    RAISE = "raise"


def verdict_on(
    failures: int, max_attempts: int, *, has_dead_letter_topic: bool, must_go_back: bool
) -> Verdict:
    """Return the treatment of a record after its last failure. `failures` counts its failures so far.

    `must_go_back`: the failure has left something behind that only an abort removes, such as a part of the
    record's output, or changes of the application's state (`restore`).

        failures        dead-letter topic   must go back   verdict
        below maximum   any                 no             RETRY
        below maximum   any                 yes            GO_BACK
        maximum         none                any            RAISE
        maximum         yes                 no             DEAD_LETTER
        maximum         yes                 yes            GO_BACK: the transform is not called again for this
                                                             record (`is_given_up`)
        above maximum   yes                 any            RAISE: the dead letter itself cannot be sent
    """
    if failures > max_attempts or (failures == max_attempts and not has_dead_letter_topic):
        return Verdict.RAISE
    if must_go_back:
        return Verdict.GO_BACK
    return Verdict.DEAD_LETTER if failures >= max_attempts else Verdict.RETRY


def is_given_up(failures: int, max_attempts: int) -> bool:
    """Return True if a record goes to the dead-letter topic without another call of the transform."""
    return failures >= max_attempts


class Rebalance(Enum):
    """A change of the assignment, as the consumer's callbacks report it."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


class AtRebalance(Enum):
    """The treatment of the open transaction: it stays open, is committed, or is aborted."""

    KEEP = "keep"
    COMMIT = "commit"
    ABORT = "abort"


def at_rebalance(change: Rebalance, *, is_open: bool, is_affected: bool) -> AtRebalance:
    """Return the treatment of the open transaction. `is_affected`: it has records of these partitions.

    change     open   affected   treatment
    any        no     -          KEEP
    ASSIGNED   yes    any        KEEP
    REVOKED    yes    no         KEEP: the member still owns what the transaction has read
    REVOKED    yes    yes        COMMIT: the next owner continues after these records
    LOST       yes    any        ABORT: another member may own the partitions already, so the coordinator
                                   would refuse the offsets (KIP-447)
    """
    if not is_open or change is Rebalance.ASSIGNED:
        return AtRebalance.KEEP
    if change is Rebalance.LOST:
        return AtRebalance.ABORT
    return AtRebalance.COMMIT if is_affected else AtRebalance.KEEP
