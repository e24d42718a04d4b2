"""Decide whether an end-of-transaction marker is written, and which transaction it completes.

    marker epoch lower than the remembered one                        Reject INVALID_PRODUCER_EPOCH
    coordinator epoch lower than the remembered one                   Reject TRANSACTION_COORDINATOR_FENCED
    else                                                              StoreMarker

A marker without an open transaction is stored, too, and completes nothing. An equal epoch keeps the
remembered batches, because sequences continue over transactions; a higher epoch drops them. Source: Kafka's
ProducerAppendInfo.appendEndTxnMarker.
"""

from __future__ import annotations

from typing import NamedTuple

from oncelog.errors import InvalidProducerEpoch, TransactionCoordinatorFenced
from oncelog.rules.idempotence.append import ProducerEntry, Reject
from oncelog.rules.idempotence.sequencer import MAX_EPOCH
from oncelog.types import Origin


class EndMarker(NamedTuple):
    """A COMMIT or ABORT control record and its producer."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_commit: bool
    timestamp_ms: int


class CompletedTransaction(NamedTuple):
    """The span of one transaction in this partition. `last_offset` is that of its marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    is_aborted: bool


class StoreMarker(NamedTuple):
    """Write the marker, then remember `entry`. `completed` None: no transaction was open."""

    entry: ProducerEntry
    completed: CompletedTransaction | None


def decide_marker(
    entry: ProducerEntry | None, marker: EndMarker, origin: Origin, *, offset: int, now_ms: int
) -> StoreMarker | Reject:
    """Decide about a marker that would get `offset`; a replayed one is never rejected."""
    if entry is not None and origin is not Origin.REPLAY:
        rejection = _check_marker(entry, marker)
        if rejection is not None:
            return rejection
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
    """Return the rejection of a marker of transaction version 2 that does not raise the producer's epoch.

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


def _check_marker(entry: ProducerEntry, marker: EndMarker) -> Reject | None:
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
