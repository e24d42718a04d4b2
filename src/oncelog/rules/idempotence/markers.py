"""Decide whether an end-of-transaction marker is stored, and which transaction it completes.

    marker's producer epoch lower than the entry's                    Reject INVALID_PRODUCER_EPOCH
    coordinator epoch lower than the entry's                          Reject TRANSACTION_COORDINATOR_FENCED
    else                                                              StoreMarker

The marker is compared with the partition's entry for the producer id. If no transaction is open, the marker
is stored too, but completes no transaction. If the marker has the entry's epoch, the entry keeps its batches,
because sequences continue in the next transaction. A higher epoch drops the batches. Source: Kafka's
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
    """The span of one transaction in this partition. `last_offset` is the offset of its marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    is_aborted: bool


class StoreMarker(NamedTuple):
    """The decision to write the marker to the log. `entry` is the producer's new entry.

    `completed` is None if no transaction was open.
    """

    entry: ProducerEntry
    completed: CompletedTransaction | None


def decide_marker(
    entry: ProducerEntry | None, marker: EndMarker, origin: Origin, *, offset: int, now_ms: int
) -> StoreMarker | Reject:
    """Decide whether to store a marker that would get `offset`. A replayed marker is never rejected."""
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
    """Return a rejection if a marker of transaction version 2 has the epoch of the open transaction;
    otherwise None.

    With version 2 every end of a transaction raises the epoch, so such a marker belongs to an earlier
    transaction and is late. If no transaction is open, the marker is harmless. Since the largest epoch cannot
    be raised, a marker with it is accepted.
    """
    if entry is None or entry.producer_epoch != producer_epoch:
        return None
    if entry.current_txn_first_offset is None or producer_epoch == MAX_EPOCH:
        return None
    return Reject(
        InvalidProducerEpoch,
        f"marker of producer id {producer_id} has the epoch {producer_epoch} of the open "
        "transaction; with transaction version 2 the epoch must be higher",
    )


def _check_marker(entry: ProducerEntry, marker: EndMarker) -> Reject | None:
    if entry.producer_epoch is not None and marker.producer_epoch < entry.producer_epoch:
        return Reject(
            InvalidProducerEpoch,
            f"marker of producer id {marker.producer_id} has epoch {marker.producer_epoch}, "
            f"but the current epoch is {entry.producer_epoch}",
        )
    if entry.coordinator_epoch is not None and marker.coordinator_epoch < entry.coordinator_epoch:
        return Reject(
            TransactionCoordinatorFenced,
            f"marker of producer id {marker.producer_id} has coordinator epoch "
            f"{marker.coordinator_epoch}, but the current one is {entry.coordinator_epoch}",
        )
    return None
