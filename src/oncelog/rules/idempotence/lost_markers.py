"""Find the transactions of a partition whose marker a power loss took, and the marker to write instead.

With the default flush settings, a power loss may take the newest records of any log. A partition may lose a
marker while the coordinator keeps the record that the transaction is over. The transaction would stay open in
the partition, and the producer's next one there would continue it: a commit would show aborted records.

An epoch per transaction (KIP-890) tells transactions apart. A coordinator's record with a decision and epoch
E + 1 is about the transaction with epoch E, and names its partitions:

    the partition shows a transaction as open at a start, and from then on
        the log decides it, with this partition, and has newer records of the id    the decision's marker
        the same, and aborts a classic one of the same epoch in this partition      an ABORT marker
        the newest record of the id decides it                                      nothing: markers follow
        else, the id has another producer id by now, or has expired                 an ABORT marker
        else, the id has this producer id                                           nothing yet
        no record names the producer id                                             nothing
    later, the producer begins or ends a transaction where an older epoch is open
        the log decided that one at the start                                       the decision's marker
        else                                                                        an ABORT marker

The older transaction cannot be decided any more, because the coordinator assigns a new epoch only after the
previous transaction is over. Classic transactions of one instance share an epoch, so nothing tells which of
them is open. They stay open until a newer instance begins or commits a transaction there. The last classic
transaction shares its epoch with the producer's first KIP-890 transaction. A transaction that may be either
is committed only if both were. Apache Kafka leaves all of them open. See docs/internals/simulation.md, "Power
losses with the default flush".
"""

from __future__ import annotations

from oncelog.rules.idempotence.sequencer import MAX_EPOCH, ProducerIdAndEpoch
from oncelog.rules.transactions.entry import EPOCH_PER_TRANSACTION, NO_ID, TransactionEntry, TransactionState
from oncelog.types import TopicPartition


def decided_transaction(entry: TransactionEntry) -> ProducerIdAndEpoch | None:
    """Return the producer id and epoch of the transaction that a record decides; None if that is unclear.

    A fenced producer also gets the largest epoch, whatever epoch its transaction had. If another producer id
    takes over, the transaction had the last epoch that a client gets.
    """
    if not entry.state.is_prepared or entry.client_version < EPOCH_PER_TRANSACTION:
        return None
    if entry.producer_epoch == MAX_EPOCH and entry.next_producer_id == NO_ID:
        return None
    if entry.producer_epoch <= 0:
        return None
    return ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch - 1)


def aborted_classic(entry: TransactionEntry) -> ProducerIdAndEpoch | None:
    """Return the producer id and epoch of the classic transaction that a record aborts."""
    is_classic = entry.client_version < EPOCH_PER_TRANSACTION
    is_abort = entry.state is TransactionState.PREPARE_ABORT
    return ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch) if is_classic and is_abort else None


def ended_transaction(entry: TransactionEntry) -> ProducerIdAndEpoch | None:
    """Return the producer id and epoch of the transaction that a record ends, if it ends no older one.

    None for the abort of a classic transaction: its marker aborts older ones, too, and may have the epoch of
    a fence.
    """
    if entry.client_version < EPOCH_PER_TRANSACTION and entry.state is TransactionState.PREPARE_COMMIT:
        return ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    return decided_transaction(entry)


def lost_end(
    tp: TopicPartition,
    leftover: ProducerIdAndEpoch,
    decision: TransactionEntry | None,
    newest: TransactionEntry | None,
) -> TransactionEntry | None:
    """Return the decision whose marker a partition with an open transaction lacks; None if unknown.

    `leftover` is the producer of the open transaction. `newest` is the newest record of the transactional id.
    If it is the decision, its markers follow anyway. If it has another producer id, no later transaction of
    the older one would end this one. See
    test_what_a_producer_id_left_open_is_ended_when_another_one_takes_over.
    """
    if decision is not None and tp in decision.partitions and newest != decision:
        return decision
    if newest is None or leftover.producer_id not in (newest.producer_id, newest.next_producer_id):
        return abort_of(leftover)
    return None


def is_awaited(tp: TopicPartition, leftover: ProducerIdAndEpoch, newest: TransactionEntry) -> bool:
    """Return True if the end of the current transaction also ends the one that is open in a partition.

    It does not end one with a higher epoch, whose record a power loss took from the coordinator.
    """
    is_above = leftover.producer_epoch > newest.producer_epoch
    return newest.producer_id == leftover.producer_id and tp in newest.partitions and not is_above


def abort_of(leftover: ProducerIdAndEpoch) -> TransactionEntry:
    """Return the decision to abort an open transaction that no record decides."""
    epoch = min(leftover.producer_epoch + 1, MAX_EPOCH)
    return TransactionEntry("", leftover.producer_id, epoch, 0, TransactionState.PREPARE_ABORT)
