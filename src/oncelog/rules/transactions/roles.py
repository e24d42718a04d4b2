"""The roles of producers that use one producer epoch, and what each of them may do.

Several producers may write to one transaction under the same producer id and epoch. Each of them counts
sequences from 0 and does not know those of the others. If one of them began another transaction under the
same epoch, brokers would take its first records for repetitions: they would be acknowledged and not stored.
The same happens to a producer that joins a later transaction of an epoch. So an epoch ends with the
transaction that several producers have used, and only the epoch's first transaction with records is shared.
A new epoch makes a producer ALONE again.

    role          how it gets there                begin   send   send offsets   share   hand over   end
    ALONE         any new epoch                    yes     yes    yes            yes     yes         yes
    CONTINUING    ALONE has ended a transaction    yes     yes    yes            -       yes         yes
                  with records, epoch stays
    OWNER         ALONE has shared                 -       yes    yes            yes     -           yes
    JOINED        join_transaction                 -       yes    -              -       -           -
    TOOK_OVER     take_over_transaction            -       -      yes            -       yes         yes
    HANDED_OVER   ALONE, CONTINUING or TOOK_OVER   -       -      -              -       -           -
                  has handed its transaction over

`end` is commit and abort. The session's state must allow the operation, too (`client_session`). An OWNER
cannot hand over, because the next producer would not know that others have joined. TOOK_OVER cannot send:
its first sequence in a partition may be one that the other producer has used.

The request that ends a transaction depends on the role and on what the producer knows of the transaction:

    commit   it has added partitions or offsets, or      EndTxn
               took over a transaction with some
             OWNER, and the coordinator says Ongoing,    EndTxn
               or does not say
             OWNER and TOOK_OVER else                    InitProducerId, which fences all others
             ALONE or CONTINUING else                    nothing
    abort    OWNER, and brokers keep the epoch           InitProducerId, which aborts and fences
             OWNER else                                  EndTxn
             it has or may have added partitions or      EndTxn
               offsets, or took over some
             TOOK_OVER, unless brokers keep the epoch    EndTxn
             else                                        nothing

With an epoch per transaction (`transaction.version` 2, KIP-890), EndTxn also raises the epoch, which fences
those that joined. Otherwise a commit keeps the epoch, and the producer cannot begin another transaction.

Source: behaviours T4 and T5 (docs/behaviours.md); KIP-98, KIP-360 and KIP-890; Kafka's ProducerStateManager
and TransactionCoordinator. See test_every_operation_in_every_role, test_every_commit_in_every_role and
test_every_abort_in_every_role.
"""

from __future__ import annotations

from enum import Enum

from oncelog.errors import MisuseError
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.client_session import CoordinatorEntry, Operation


class Role(Enum):
    """A producer's part in the transactions of its epoch."""

    ALONE = "alone"
    CONTINUING = "continuing"
    OWNER = "owner"
    JOINED = "joined"
    TOOK_OVER = "took over"
    HANDED_OVER = "handed over"


_ENDS = frozenset({Operation.COMMIT, Operation.ABORT})
_ALLOWED = {
    Role.ALONE: frozenset(Operation),
    Role.CONTINUING: frozenset(Operation) - {Operation.SHARE},
    Role.OWNER: _ENDS | {Operation.SEND, Operation.SEND_OFFSETS, Operation.SHARE},
    Role.JOINED: frozenset({Operation.SEND}),
    Role.TOOK_OVER: _ENDS | {Operation.SEND_OFFSETS, Operation.HAND_OVER},
    Role.HANDED_OVER: frozenset[Operation](),
}
_REASONS = {
    Role.CONTINUING: "this producer has sent records in an earlier transaction, and the broker keeps its "
    "epoch: create a new producer to share a transaction",
    Role.OWNER: "this producer has shared the transaction, so it must commit or abort it itself",
    Role.JOINED: "this producer has joined the transaction of another one, which will end it",
    Role.TOOK_OVER: "this producer has taken the transaction over, so its sequences would collide",
    Role.HANDED_OVER: "this producer has handed its transaction over",
}
_SPENT = "other producers have used this producer's epoch: create a new producer"


def check_role(role: Role, operation: Operation) -> None:
    """Raise MisuseError if producers with this role must not do the operation."""
    if operation not in _ALLOWED[role]:
        reason = _SPENT if operation is Operation.BEGIN else _REASONS[role]
        raise MisuseError(f"{operation.value} is not possible now: {reason}")


class Ending(Enum):
    """The request that ends a transaction.

    NOTHING     the coordinator does not know of the transaction
    ASK         DescribeTransactions first; the coordinator's answer is `is_ongoing`
    END         EndTxn; the coordinator knows of the transaction
    TRY_TO_END  EndTxn; the coordinator may know of the transaction
    NEW_EPOCH   InitProducerId, which fences other producers of the epoch and aborts their records
    """

    NOTHING = "nothing"
    ASK = "ask"
    END = "end"
    TRY_TO_END = "try to end"
    NEW_EPOCH = "new epoch"


def commit_ending(role: Role, *, has_parts: bool, is_ongoing: bool | None) -> Ending:
    """Return the request that commits a transaction.

    `has_parts` is True if this producer has added or taken over partitions or offsets. `is_ongoing` is False
    if the coordinator says that the transaction has neither, and None if it was not asked.
    """
    if has_parts:
        return Ending.END
    if role is Role.TOOK_OVER:
        return Ending.NEW_EPOCH
    if role is not Role.OWNER:
        return Ending.NOTHING
    if is_ongoing is None:
        return Ending.ASK
    return Ending.END if is_ongoing else Ending.NEW_EPOCH


def abort_ending(role: Role, *, has_parts: bool, may_have_parts: bool, raises_epoch: bool) -> Ending:
    """Return the request that aborts a transaction.

    `may_have_parts` is True if a request to add partitions or offsets was sent. `raises_epoch` is True if
    EndTxn raises the epoch.
    """
    if role is Role.OWNER:
        return Ending.TRY_TO_END if raises_epoch else Ending.NEW_EPOCH
    if has_parts:
        return Ending.END
    is_known = may_have_parts or (role is Role.TOOK_OVER and raises_epoch)
    return Ending.TRY_TO_END if is_known else Ending.NOTHING


def fencing_identity(
    entry: CoordinatorEntry, ours: ProducerIdAndEpoch, sent: ProducerIdAndEpoch | None
) -> ProducerIdAndEpoch | None:
    """Return the identity for the InitProducerId that aborts an owner's transaction and fences the producers
    that joined. Return None if another producer has started.

    `sent` is the identity of the last such request, None if none was sent. `entry` is the coordinator's
    answer to DescribeTransactions after that. The coordinator aborts an open transaction, raises the epoch by
    one, and answers CONCURRENT_TRANSACTIONS: the next request gets the new epoch. It refuses an identity that
    is neither that of its entry nor, in a repetition, the one before.

        entry                                           result
        ours                                            ours
        open, not ours                                  None
        not ours, nothing sent                          None
        our epoch + 1, in an abort                      our epoch + 1: by our request, or by a successor that
                                                          has not got an epoch yet
        any other                                       `sent`: a repetition, or the coordinator refuses it

    Without an identity, as for a new instance, a late abort would fence a successor. See
    test_every_identity_of_an_owners_abort and
    test_a_repeated_abort_of_a_shared_transaction_fences_no_idle_successor.
    Source: kafka TransactionCoordinator.prepareInitProducerIdTransit; KIP-360.
    """
    if entry.identity == ours:
        return ours
    if sent is None or entry.is_ongoing:
        return None
    raised = ours._replace(producer_epoch=ours.producer_epoch + 1)
    return raised if entry.is_in_abort and entry.identity == raised else sent
