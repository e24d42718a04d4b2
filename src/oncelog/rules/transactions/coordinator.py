"""The transaction coordinator's decisions about requests.

A request is rejected, accepted without a change, or accepted with a new entry. The new entry's state depends
on the old one's:

    state            InitProducerId     AddPartitionsToTxn   EndTxn             markers written
    (none)           Empty              UNKNOWN              UNKNOWN
    Empty            Empty              Ongoing              see `decide_end`
    Complete*        Empty              Ongoing              see `decide_end`
    Ongoing          PrepareAbort, BUSY Ongoing              Prepare*
    PrepareCommit    BUSY               BUSY                 see `decide_end`   CompleteCommit
    PrepareAbort     BUSY               BUSY                 see `decide_end`   CompleteAbort

A time-out concerns Ongoing only (`is_timed_out`), and leads to PrepareAbort (`fence`). BUSY means
CONCURRENT_TRANSACTIONS; the client retries this error. UNKNOWN means INVALID_PRODUCER_ID_MAPPING.

An entry takes effect as soon as its record is in the log. A record with PrepareCommit or PrepareAbort is the
decision. The markers, and the record with Complete* after them, only carry the decision out.

Clients end transactions in two ways. A classic end (EndTxn up to version 4) keeps the epoch. With an epoch
per transaction (KIP-890: EndTxn 5, `transaction.version` 2), every end raises the epoch, so that a delayed
request of an ended transaction is fenced. At the last epoch, the end gives the transactional id a new
producer id. The markers then have epoch 32767, which no client ever gets, and the next transaction has epoch
0. Until the markers are written, requests with the new producer id get CONCURRENT_TRANSACTIONS.
Source: behaviours T3, T4, T8, T9 and T13 (docs/behaviours.md); kafka TransactionCoordinator,
TransactionMetadata.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from oncelog.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTxnState,
    ProducerFenced,
    TransactionAbortable,
)
from oncelog.limits import DEFAULT_LIMITS
from oncelog.rules.idempotence.append import Reject
from oncelog.rules.idempotence.sequencer import MAX_EPOCH, ProducerIdAndEpoch
from oncelog.rules.transactions.entry import (
    EPOCH_PER_TRANSACTION,
    EXHAUSTED_EPOCH,
    NO_EPOCH,
    NO_ID,
    TransactionEntry,
    TransactionState,
)
from oncelog.types import TopicPartition


class Append(NamedTuple):
    """The decision to append the entry. The request succeeds once the entry's record is durable
    (`when_durable`).
    """

    entry: TransactionEntry


class FenceAndAbort(NamedTuple):
    """The decision to append the entry, which aborts the open transaction. The client must then retry the
    request.
    """

    entry: TransactionEntry


class NoChange(NamedTuple):
    """The decision to append nothing. The request succeeds, because its effect is already in the entry."""


class NeedsProducerId(NamedTuple):
    """No decision yet: the caller must allocate a new producer id, and call the function again with it."""


_NO_CHANGE, _NEEDS_PRODUCER_ID = NoChange(), NeedsProducerId()


# InitProducerId


def decide_init(
    entry: TransactionEntry | None,
    transactional_id: str,
    expected: ProducerIdAndEpoch | None,
    *,
    timeout_ms: int,
    server_version: int,
    new_producer_id: int | None,
    now_ms: int,
    first_epoch: int = DEFAULT_LIMITS.first_producer_epoch,
) -> Append | FenceAndAbort | NeedsProducerId | Reject:
    """Decide the outcome of an InitProducerId request.

    With `Append`, the client gets the entry's producer id and epoch.

    `expected` is the producer id and epoch that the client wants to continue from (KIP-360); None if the
    client is a new instance, so that all other instances are fenced. `new_producer_id` is None until a new id
    has been allocated. `first_epoch` is the first epoch of a new transactional id.
    """
    if entry is None:
        if new_producer_id is None:
            return _NEEDS_PRODUCER_ID
        entry = TransactionEntry(
            transactional_id, new_producer_id, NO_EPOCH, timeout_ms, TransactionState.EMPTY
        )
    if expected is not None and _is_next_producer(entry, expected):
        return _being_completed(entry)
    if expected is not None and not _may_be_producer(entry, expected):
        return Reject(
            ProducerFenced, f"producer id {expected.producer_id} no longer belongs to this transactional id"
        )
    if entry.state.is_prepared:
        return _being_completed(entry)
    if entry.state is TransactionState.ONGOING:
        fenced = fence(entry, server_version=server_version, new_producer_id=new_producer_id, now_ms=now_ms)
        return fenced if isinstance(fenced, NeedsProducerId) else FenceAndAbort(fenced)
    fresh = entry._replace(
        timeout_ms=timeout_ms,
        state=TransactionState.EMPTY,
        partitions=frozenset(),
        start_ms=-1,
        last_update_ms=now_ms,
        previous_producer_id=entry.producer_id,
        next_producer_id=NO_ID,
        client_version=0,
    )
    is_next = expected is None or expected.producer_epoch == entry.producer_epoch
    # No client should have epoch 32767, but an older Oncelog may have given it to a client that repeated a
    # request.
    is_beyond = entry.producer_epoch == MAX_EPOCH
    if entry.is_exhausted and (is_next or (is_beyond and _is_repeated(entry, expected))):
        if new_producer_id is None:
            return _NEEDS_PRODUCER_ID
        last_epoch = NO_EPOCH if expected is None else entry.producer_epoch
        return Append(
            fresh._replace(producer_id=new_producer_id, producer_epoch=0, last_producer_epoch=last_epoch)
        )
    if entry.producer_epoch == NO_EPOCH:
        return Append(fresh._replace(producer_epoch=first_epoch, last_producer_epoch=NO_EPOCH))
    return _raise_epoch(entry, fresh, expected)


def _raise_epoch(
    entry: TransactionEntry, fresh: TransactionEntry, expected: ProducerIdAndEpoch | None
) -> Append | Reject:
    epoch = entry.producer_epoch
    if expected is None:
        return Append(fresh._replace(producer_epoch=epoch + 1, last_producer_epoch=NO_EPOCH))
    if expected.producer_epoch == epoch:
        return Append(fresh._replace(producer_epoch=epoch + 1, last_producer_epoch=epoch))
    if _is_repeated(entry, expected):
        return Append(fresh)
    return _reject_fenced(entry, expected.producer_epoch)


def _is_repeated(entry: TransactionEntry, expected: ProducerIdAndEpoch | None) -> bool:
    """Return True if the client sends the previous epoch, because it repeats a request whose response was
    lost.
    """
    return expected is not None and NO_EPOCH != expected.producer_epoch == entry.last_producer_epoch


def _may_be_producer(entry: TransactionEntry, expected: ProducerIdAndEpoch) -> bool:
    if entry.producer_epoch == NO_EPOCH or expected.producer_id == entry.producer_id:
        return True
    return expected.producer_id == entry.previous_producer_id and expected.producer_epoch >= EXHAUSTED_EPOCH


def _is_next_producer(entry: TransactionEntry, producer: ProducerIdAndEpoch) -> bool:
    """Return True if `producer` is the next producer id, and its predecessor's markers are still being
    written.

    The end of a transaction allocates the next producer id, and the response to EndTxn already has it. The
    entry gets it only after the markers are written. If requests with the new id were rejected as unknown
    until then, the producer would fail. See
    test_a_producer_whose_epochs_ran_out_goes_on_while_markers_are_written.
    """
    next_identity = ProducerIdAndEpoch(entry.next_producer_id, 0)
    return entry.state.is_prepared and entry.next_producer_id != NO_ID and producer == next_identity


def retire(entry: TransactionEntry, now_ms: int) -> TransactionEntry:
    """Return a new version of the entry that fences every epoch of its producer id.

    If a transaction is open, the entry aborts it. The next InitProducerId allocates a new producer id, as
    always after the last epoch.
    """
    is_ongoing = entry.state is TransactionState.ONGOING
    return entry._replace(
        state=TransactionState.PREPARE_ABORT if is_ongoing else entry.state,
        producer_epoch=MAX_EPOCH,
        last_producer_epoch=NO_EPOCH,
        previous_producer_id=NO_ID,
        next_producer_id=NO_ID,
        last_update_ms=now_ms,
    )


# AddPartitionsToTxn and EndTxn


def decide_add(
    entry: TransactionEntry | None,
    producer: ProducerIdAndEpoch,
    partitions: Collection[TopicPartition],
    *,
    now_ms: int,
) -> Append | NoChange | Reject:
    """Decide AddPartitionsToTxn. The first partition begins the transaction and starts its timeout."""
    if entry is not None and _is_next_producer(entry, producer):
        return _being_completed(entry)
    if entry is None or entry.producer_id != producer.producer_id:
        return _unknown(producer)
    if entry.producer_epoch != producer.producer_epoch:
        return _reject_fenced(entry, producer.producer_epoch)
    if entry.state.is_prepared:
        return _being_completed(entry)
    is_ongoing = entry.state is TransactionState.ONGOING
    if is_ongoing and entry.partitions.issuperset(partitions):
        return _NO_CHANGE
    return Append(
        entry._replace(
            state=TransactionState.ONGOING,
            partitions=entry.partitions.union(partitions),
            start_ms=entry.start_ms if is_ongoing else now_ms,
            last_update_ms=now_ms,
        )
    )


def decide_verify(
    entry: TransactionEntry | None, producer: ProducerIdAndEpoch, partition: TopicPartition
) -> Reject | None:
    """Return None if the partition is in the producer's open transaction, else a rejection (KIP-890)."""
    if entry is not None and _is_next_producer(entry, producer):
        return _being_completed(entry)
    if entry is None or entry.producer_id != producer.producer_id:
        return _unknown(producer)
    if entry.producer_epoch != producer.producer_epoch:
        return _reject_fenced(entry, producer.producer_epoch)
    if entry.state.is_prepared:
        return _being_completed(entry)
    if entry.state is TransactionState.ONGOING and partition in entry.partitions:
        return None
    return Reject(TransactionAbortable, f"{partition} is not part of an open transaction of this producer")


def decide_end(
    entry: TransactionEntry | None,
    producer: ProducerIdAndEpoch,
    is_commit: bool,
    *,
    client_version: int,
    new_producer_id: int | None,
    now_ms: int,
) -> Append | NoChange | NeedsProducerId | Reject:
    """Decide EndTxn. An appended entry is in PrepareCommit or PrepareAbort, and its markers must be written.

    BUSY is CONCURRENT_TRANSACTIONS, INVALID is INVALID_TXN_STATE, FENCED is PRODUCER_FENCED, and OK is
    success without a change. A classic end keeps the epoch:

        state            COMMIT          ABORT
        Ongoing          PrepareCommit   PrepareAbort
        CompleteCommit   OK              INVALID
        CompleteAbort    INVALID         OK
        Prepare*         BUSY            BUSY
        Empty            INVALID         INVALID

    With an epoch per transaction, a repeated request ("again") has the previous epoch:

        state            COMMIT again    COMMIT          ABORT again     ABORT
        Ongoing          FENCED          PrepareCommit   FENCED          PrepareAbort
        CompleteCommit   OK              INVALID         INVALID         PrepareAbort
        CompleteAbort    INVALID         INVALID         OK              PrepareAbort
        PrepareCommit    BUSY            BUSY            INVALID         BUSY
        PrepareAbort     INVALID         BUSY            BUSY            BUSY
        Empty            FENCED          INVALID         FENCED          PrepareAbort

    A producer may begin its next transaction while the previous one is in Prepare*. An end of the next
    transaction then gets BUSY, because any other error would be fatal for the producer. See
    test_an_end_during_the_markers_of_the_transaction_before_is_retriable.
    """
    if client_version >= EPOCH_PER_TRANSACTION:
        return _decide_end_with_epoch(entry, producer, is_commit, client_version, new_producer_id, now_ms)
    if entry is not None and _is_next_producer(entry, producer):
        return _being_completed(entry)
    if entry is None or entry.producer_id != producer.producer_id:
        return _unknown(producer)
    if entry.producer_epoch != producer.producer_epoch:
        return _reject_fenced(entry, producer.producer_epoch)
    if entry.state is TransactionState.ONGOING:
        return Append(_prepared(entry, is_commit, client_version, NO_ID, now_ms))
    if entry.state.is_prepared:
        return _being_completed(entry)
    return _decide_repeated_end(entry, is_commit)


def _decide_end_with_epoch(
    entry: TransactionEntry | None,
    producer: ProducerIdAndEpoch,
    is_commit: bool,
    client_version: int,
    new_producer_id: int | None,
    now_ms: int,
) -> Append | NoChange | NeedsProducerId | Reject:
    if entry is None:
        return _unknown(producer)
    has_rotated = (
        entry.previous_producer_id == producer.producer_id
        and producer.producer_epoch >= EXHAUSTED_EPOCH
        and entry.producer_epoch == 0
    )
    if _is_next_producer(entry, producer):
        return _being_completed(entry)
    if entry.producer_id != producer.producer_id and not has_rotated:
        return _unknown(producer)
    is_current = entry.producer_epoch == producer.producer_epoch and not has_rotated
    # A request with the previous epoch is a repetition only if an end has raised the epoch. InitProducerId
    # and classic fencing also raise the epoch. After them, a request with the previous epoch is from a fenced
    # producer.
    is_raised = entry.producer_epoch == producer.producer_epoch + 1
    is_again = entry.client_version >= EPOCH_PER_TRANSACTION and (is_raised or has_rotated)
    if entry.producer_epoch == MAX_EPOCH and not entry.state.is_prepared:
        # Do not accept a repetition: its response would give the client the largest epoch, which no later
        # epoch can fence.
        is_again = False
    if entry.state.is_prepared and is_current:
        return _being_completed(entry)
    is_prepared, is_ongoing = entry.state.is_prepared, entry.state is TransactionState.ONGOING
    if is_prepared:
        is_accepted = is_again and not has_rotated
    elif is_ongoing or entry.state is TransactionState.EMPTY:
        is_accepted = is_current
    else:
        is_accepted = is_current or is_again
    if not is_accepted:
        return _reject_fenced(entry, producer.producer_epoch)
    if is_again:
        return _decide_repeated_end(entry, is_commit)
    if not is_ongoing and is_commit:
        return _wrong_outcome(entry, is_commit)
    if entry.is_exhausted and new_producer_id is None:
        return _NEEDS_PRODUCER_ID
    next_id = new_producer_id if entry.is_exhausted and new_producer_id is not None else NO_ID
    if not is_ongoing:
        entry = entry._replace(partitions=frozenset(), start_ms=now_ms)
    return Append(_prepared(entry, is_commit, client_version, next_id, now_ms))


def _decide_repeated_end(entry: TransactionEntry, is_commit: bool) -> NoChange | Reject:
    done = TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT
    decided = TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT
    if entry.state is done:
        return _NO_CHANGE
    if entry.state is decided:
        return _being_completed(entry)
    return _wrong_outcome(entry, is_commit)


def _prepared(
    entry: TransactionEntry, is_commit: bool, client_version: int, next_producer_id: int, now_ms: int
) -> TransactionEntry:
    prepared = entry._replace(
        state=TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT,
        last_update_ms=now_ms,
        client_version=client_version,
        next_producer_id=next_producer_id,
    )
    if client_version < EPOCH_PER_TRANSACTION or entry.producer_epoch == MAX_EPOCH:
        return prepared
    return prepared._replace(
        producer_epoch=entry.producer_epoch + 1, last_producer_epoch=entry.producer_epoch
    )


def fence(
    entry: TransactionEntry, *, server_version: int, new_producer_id: int | None, now_ms: int
) -> TransactionEntry | NeedsProducerId:
    """Return the entry that aborts an open transaction and fences its producer.

    The coordinator fences a producer if a new instance uses the transactional id, or if the transaction times
    out. With an epoch per transaction, the producer may still get its next epoch by InitProducerId, as if it
    had lost the response to EndTxn. A producer that already has the last epoch gets epoch 0 of
    `new_producer_id`.
    """
    if server_version >= EPOCH_PER_TRANSACTION:
        if not entry.is_exhausted:
            return _prepared(entry, False, server_version, NO_ID, now_ms)
        if new_producer_id is None:
            return _NEEDS_PRODUCER_ID
        return _prepared(entry, False, server_version, new_producer_id, now_ms)
    epoch = min(entry.producer_epoch + 1, MAX_EPOCH)
    fenced = entry._replace(producer_epoch=epoch, last_producer_epoch=NO_EPOCH)
    return _prepared(fenced, False, server_version, NO_ID, now_ms)


def complete(entry: TransactionEntry, *, now_ms: int) -> TransactionEntry:
    """Return the Complete* entry that follows a Prepare* entry once all its markers are written."""
    is_commit = entry.state is TransactionState.PREPARE_COMMIT
    done = entry._replace(
        state=TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT,
        partitions=frozenset(),
        last_update_ms=now_ms,
        next_producer_id=NO_ID,
    )
    if entry.client_version < EPOCH_PER_TRANSACTION:
        return done
    done = done._replace(previous_producer_id=entry.producer_id)
    if entry.next_producer_id == NO_ID:
        return done
    return done._replace(producer_id=entry.next_producer_id, producer_epoch=0)


# Timeout and expiry


def is_timed_out(entry: TransactionEntry, now_ms: int) -> bool:
    """Return True if the transaction is open past its timeout: behaviour T8 (docs/behaviours.md)."""
    return entry.state is TransactionState.ONGOING and entry.start_ms + entry.timeout_ms < now_ms


def is_expired(entry: TransactionEntry, now_ms: int, expiration_ms: int) -> bool:
    """Return True if the transactional id has been idle for `expiration_ms`: behaviour T9
    (docs/behaviours.md).
    """
    return entry.state.is_idle and entry.last_update_ms + expiration_ms <= now_ms


def _unknown(producer: ProducerIdAndEpoch) -> Reject:
    return Reject(
        InvalidProducerIdMapping,
        f"producer id {producer.producer_id} does not belong to this transactional id",
    )


def _reject_fenced(entry: TransactionEntry, epoch: int) -> Reject:
    return Reject(
        ProducerFenced,
        f"epoch {epoch} is not the current epoch {entry.producer_epoch}: a newer instance "
        "uses this transactional id, or the coordinator aborted the transaction",
    )


def _being_completed(entry: TransactionEntry) -> Reject:
    return Reject(ConcurrentTransactions, f"the previous transaction is in state {entry.state.label}; retry")


def _wrong_outcome(entry: TransactionEntry, is_commit: bool) -> Reject:
    return Reject(
        InvalidTxnState,
        f"a transaction in state {entry.state.label} cannot {'commit' if is_commit else 'abort'}",
    )
