"""May this end-of-transaction marker be written, and what does it complete?

    marker epoch lower than the remembered one                        Reject INVALID_PRODUCER_EPOCH
    coordinator epoch lower than the remembered one                   Reject TRANSACTION_COORDINATOR_FENCED
    else                                                              StoreMarker

A marker without an open transaction is stored all the same and completes nothing. An equal epoch keeps the
remembered batches (sequences go on over transactions); a higher one drops them.
Source: Kafka's ProducerAppendInfo.appendEndTxnMarker; transactions, partition side.
"""

from __future__ import annotations

from typing import NamedTuple

from oncelog.errors import InvalidProducerEpoch, TransactionCoordinatorFenced
from oncelog.rules.idempotence.append import ProducerEntry, Reject
from oncelog.rules.idempotence.sequencer import MAX_EPOCH
from oncelog.types import Origin


class EndMarker(NamedTuple):
    """A COMMIT or ABORT control record and the producer it speaks of."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_commit: bool
    timestamp_ms: int


class CompletedTransaction(NamedTuple):
    """One transaction's span in this partition; `last_offset` is the marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    is_aborted: bool


class StoreMarker(NamedTuple):
    """Write the marker, then remember `entry`; `completed` None: no transaction was open."""

    entry: ProducerEntry
    completed: CompletedTransaction | None


def decide_marker(
    entry: ProducerEntry | None, marker: EndMarker, origin: Origin, *, offset: int, now_ms: int
) -> StoreMarker | Reject:
    """The verdict for a marker that would get `offset`; a replayed one is never refused."""
    if entry is not None and origin is not Origin.REPLAY:
        refusal = _refuse_marker(entry, marker)
        if refusal is not None:
            return refusal
    completed = None
    if entry is not None and entry.current_txn_first_offset is not None:
        first = entry.current_txn_first_offset
        completed = CompletedTransaction(marker.producer_id, first, offset, not marker.is_commit)
    keeps_batches = entry is not None and entry.producer_epoch == marker.producer_epoch
    batches = entry.batches if entry is not None and keeps_batches else ()
    successor = ProducerEntry(
        marker.producer_epoch, marker.coordinator_epoch, marker.timestamp_ms, now_ms, None, batches
    )
    return StoreMarker(successor, completed)


def reject_same_epoch(entry: ProducerEntry | None, producer_id: int, producer_epoch: int) -> Reject | None:
    """Return the refusal of a marker of transaction version 2 that does not raise the producer's epoch.

    There every transaction ends with a raised epoch, so a marker with the epoch of the open transaction is a
    late one of an earlier transaction. Where nothing is open it changes nothing, and the largest epoch cannot
    be raised.
    """
    if entry is None or entry.producer_epoch != producer_epoch:
        return None
    if entry.current_txn_first_offset is None or producer_epoch == MAX_EPOCH:
        return None
    return Reject(
        InvalidProducerEpoch,
        f"marker of producer id {producer_id} has the epoch {producer_epoch} of the open transaction; with"
        " transaction version 2 it must be higher",
    )


def _refuse_marker(entry: ProducerEntry, marker: EndMarker) -> Reject | None:
    if entry.producer_epoch is not None and marker.producer_epoch < entry.producer_epoch:
        return Reject(
            InvalidProducerEpoch,
            f"marker of producer id {marker.producer_id} has epoch {marker.producer_epoch}, and epoch"
            f" {entry.producer_epoch} has been seen",
        )
    if entry.coordinator_epoch is not None and marker.coordinator_epoch < entry.coordinator_epoch:
        return Reject(
            TransactionCoordinatorFenced,
            f"marker of producer id {marker.producer_id} comes from coordinator epoch"
            f" {marker.coordinator_epoch}, and epoch {entry.coordinator_epoch} has been seen",
        )
    return None
