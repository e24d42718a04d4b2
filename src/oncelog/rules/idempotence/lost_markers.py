"""Find transactions whose markers were lost in a power loss, and choose the markers to write instead.

With the default flush settings, a power loss may remove the newest records of any log. A partition may lose a
marker while the coordinator keeps the record that the transaction has ended. Then the transaction stays open
in the partition, and the producer's next transaction there continues it. If that next transaction is
committed, records of the earlier, aborted one become visible.

A leftover is a transaction that is open in a partition when the broker starts. A PrepareCommit or
PrepareAbort record in the coordinator's log is a decision. With an epoch per transaction (KIP-890), the epoch
identifies the leftover's decision: that record has epoch E + 1 for the transaction with epoch E, and names
its partitions. A classic transaction is one without KIP-890. At the broker's start and later, the leftover
gets this marker:

    no record in the log has the leftover's producer id                  none
    a record decides the leftover and names this partition, and newer
        records of the transactional id follow:
            the log also aborts a classic transaction of the same
                epoch in this partition                                  an ABORT marker
            otherwise                                                    the decision's marker
    the newest record of the transactional id decides the leftover       none: the coordinator writes it
    no record decides the leftover:
        the transactional id has another producer id, or has expired     an ABORT marker
        the transactional id still has the leftover's producer id        none yet

If the producer begins or ends a transaction in a partition that has a leftover of an older epoch, the
leftover ends first. It gets the marker of its decision, or an ABORT marker if there is none. No later
decision is possible, because the coordinator assigns a new epoch only after the previous transaction is over.

Classic transactions of one instance share an epoch, so nothing identifies the open transaction. A classic
leftover stays open until a newer instance begins or commits a transaction there. The last classic transaction
shares its epoch with the producer's first KIP-890 transaction. If a leftover may be either of these two
transactions, it is committed only if both were committed. Apache Kafka leaves all leftovers open. See
docs/internals/simulation.md, "Power losses with the default flush".
"""

from __future__ import annotations

from oncelog.rules.idempotence.sequencer import MAX_EPOCH, ProducerIdAndEpoch
from oncelog.rules.transactions.entry import EPOCH_PER_TRANSACTION, NO_ID, TransactionEntry, TransactionState
from oncelog.types import TopicPartition


def decided_transaction(entry: TransactionEntry) -> ProducerIdAndEpoch | None:
    """Return the producer id and epoch of the KIP-890 transaction that a record decides.

    Return None for a classic transaction, for a record without a decision, and if the epoch is unclear.
    Fencing may write the largest epoch, whatever epoch the transaction had, so a record with it is unclear.
    If such a record has a next producer id, the transaction had the last epoch that a client gets.
    """
    if not entry.state.is_prepared or entry.client_version < EPOCH_PER_TRANSACTION:
        return None
    if entry.producer_epoch == MAX_EPOCH and entry.next_producer_id == NO_ID:
        return None
    if entry.producer_epoch <= 0:
        return None
    return ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch - 1)


def aborted_classic(entry: TransactionEntry) -> ProducerIdAndEpoch | None:
    """Return the producer id and epoch of the classic transaction that a record aborts. Return None for other
    records.
    """
    is_classic = entry.client_version < EPOCH_PER_TRANSACTION
    is_abort = entry.state is TransactionState.PREPARE_ABORT
    return ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch) if is_classic and is_abort else None


def ended_transaction(entry: TransactionEntry) -> ProducerIdAndEpoch | None:
    """Return the producer of the KIP-890 transaction that a record decides, or of the classic one that it
    commits.

    Return None for all other records. A classic abort gives None: its marker also aborts older transactions,
    and fencing may have raised its epoch.
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
    """Return the decision whose marker must be written for a leftover in the partition `tp`; None if no
    marker is due.

    `leftover` is the leftover's producer, and `decision` the record that decides it, or None. `newest` is the
    newest record of the transactional id; None if there is none. If `newest` is the decision, return None,
    because the coordinator writes its markers anyway. If `newest` has another producer id, return an abort,
    because no later transaction of the old producer id will end the leftover. See
    test_an_open_transaction_is_ended_when_another_producer_id_takes_over.
    """
    if decision is not None and tp in decision.partitions and newest != decision:
        return decision
    if newest is None or leftover.producer_id not in (newest.producer_id, newest.next_producer_id):
        return abort_of(leftover)
    return None


def is_awaited(tp: TopicPartition, leftover: ProducerIdAndEpoch, newest: TransactionEntry) -> bool:
    """Return True if the end of the coordinator's current transaction (`newest`) also ends the leftover.

    It does not end a leftover with a higher epoch. In that case, a power loss removed the record of that
    epoch from the coordinator.
    """
    is_above = leftover.producer_epoch > newest.producer_epoch
    return newest.producer_id == leftover.producer_id and tp in newest.partitions and not is_above


def abort_of(leftover: ProducerIdAndEpoch) -> TransactionEntry:
    """Return the transaction entry with the decision to abort a leftover."""
    epoch = min(leftover.producer_epoch + 1, MAX_EPOCH)
    return TransactionEntry("", leftover.producer_id, epoch, 0, TransactionState.PREPARE_ABORT)
