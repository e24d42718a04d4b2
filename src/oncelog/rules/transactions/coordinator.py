"""The transaction coordinator's decisions: state x event -> refuse, answer, or the entry to write next.

    from                      InitProducerId     add partitions   EndTxn, timeout    markers written
    (none)                    Empty              Refuse 49        Refuse 49
    Empty, Complete*          Empty              Ongoing          see `decide_end`
    Ongoing                   PrepareAbort, 51   Ongoing          PrepareCommit/Abort
    PrepareCommit             Refuse 51          Refuse 51        see `decide_end`   CompleteCommit
    PrepareAbort              Refuse 51          Refuse 51        see `decide_end`   CompleteAbort

An entry that is to be written holds as soon as its record stands in the log. PrepareCommit or PrepareAbort
in the log is the decision; markers, and Complete* behind them, only carry it out.

Clients end transactions in two ways. Classic (EndTxn up to version 4): the epoch stays. With an epoch per
transaction (KIP-890, EndTxn 5, `transaction.version` 2): every end raises it, so that a late request of an
ended transaction is fenced. Before epochs run out, the end gives the transactional id another producer id:
the marker carries epoch 32767, which no client ever gets, and the next transaction begins with epoch 0.
Until the markers are written, whatever names that next producer id is refused with 51, to be tried again.
Source: rows T3, T4, T8, T9, T13; Kafka's TransactionCoordinator, TransactionMetadata.
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
from oncelog.rules.idempotence.append import Refuse
from oncelog.rules.idempotence.sequencer import MAX_EPOCH, Identity
from oncelog.rules.transactions.entry import (
    EPOCH_PER_TRANSACTION,
    EXHAUSTED_EPOCH,
    NO_EPOCH,
    NO_ID,
    TransactionEntry,
    TransactionState,
)
from oncelog.types import TopicPartition


class Persist(NamedTuple):
    """Append the entry; it holds then, and the request succeeded."""

    entry: TransactionEntry


class FenceFirst(NamedTuple):
    """Append the entry, which aborts an earlier instance's transaction; the request is to be tried again."""

    entry: TransactionEntry


class Unchanged(NamedTuple):
    """The request succeeded already."""


class NeedsProducerId(NamedTuple):
    """Decide again with a new producer id."""


_UNCHANGED, _NEEDS_PRODUCER_ID = Unchanged(), NeedsProducerId()


# InitProducerId


def decide_init(
    entry: TransactionEntry | None,
    transactional_id: str,
    given: Identity | None,
    *,
    timeout_ms: int,
    server_version: int,
    new_producer_id: int | None,
    now_ms: int,
    first_epoch: int = DEFAULT_LIMITS.first_producer_epoch,
) -> Persist | FenceFirst | NeedsProducerId | Refuse:
    """Who the producer is from now on: the persisted entry's id and epoch.

    `given`: what the client had before and wants to go on from; None for a new instance, which fences
    every other. `new_producer_id` None: none was taken yet. `first_epoch`: that of
    a new transactional id.
    """
    if entry is None:
        if new_producer_id is None:
            return _NEEDS_PRODUCER_ID
        entry = TransactionEntry(
            transactional_id, new_producer_id, NO_EPOCH, timeout_ms, TransactionState.EMPTY
        )
    if given is not None and _goes_on_with(entry, given):
        return _being_completed(entry)
    if given is not None and not _may_be_producer(entry, given):
        return Refuse(ProducerFenced, f"producer id {given.producer_id} is no longer that of this id")
    if entry.state.is_prepared:
        return _being_completed(entry)
    if entry.state is TransactionState.ONGOING:
        fenced = fence(entry, server_version=server_version, new_producer_id=new_producer_id, now_ms=now_ms)
        return fenced if isinstance(fenced, NeedsProducerId) else FenceFirst(fenced)
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
    is_next = given is None or given.producer_epoch == entry.producer_epoch
    # Older versions gave epoch 32767 to a client that asked again for the answer it lost.
    is_beyond = entry.producer_epoch == MAX_EPOCH
    if entry.is_exhausted and (is_next or (is_beyond and _is_repeated(entry, given))):
        if new_producer_id is None:
            return _NEEDS_PRODUCER_ID
        last_epoch = NO_EPOCH if given is None else entry.producer_epoch
        return Persist(
            fresh._replace(producer_id=new_producer_id, producer_epoch=0, last_producer_epoch=last_epoch)
        )
    if entry.producer_epoch == NO_EPOCH:
        return Persist(fresh._replace(producer_epoch=first_epoch, last_producer_epoch=NO_EPOCH))
    return _raise_epoch(entry, fresh, given)


def _raise_epoch(
    entry: TransactionEntry, fresh: TransactionEntry, given: Identity | None
) -> Persist | Refuse:
    epoch = entry.producer_epoch
    if given is None:
        return Persist(fresh._replace(producer_epoch=epoch + 1, last_producer_epoch=NO_EPOCH))
    if given.producer_epoch == epoch:
        return Persist(fresh._replace(producer_epoch=epoch + 1, last_producer_epoch=epoch))
    if _is_repeated(entry, given):
        return Persist(fresh)
    return _fenced(entry, given.producer_epoch)


def _is_repeated(entry: TransactionEntry, given: Identity | None) -> bool:
    """True when the client asks again, for the answer was lost."""
    return given is not None and NO_EPOCH != given.producer_epoch == entry.last_producer_epoch


def _may_be_producer(entry: TransactionEntry, given: Identity) -> bool:
    if entry.producer_epoch == NO_EPOCH or given.producer_id == entry.producer_id:
        return True
    return given.producer_id == entry.previous_producer_id and given.producer_epoch >= EXHAUSTED_EPOCH


def _goes_on_with(entry: TransactionEntry, who: Identity) -> bool:
    """Return True for the identity that an end gave out while the markers of that end are not all written.

    The answer to EndTxn names the next producer id at once; the entry has it when it is complete. Refused as
    unknown meanwhile, the producer would end. See
    test_a_producer_whose_epochs_ran_out_goes_on_while_markers_are_written.
    """
    next_identity = Identity(entry.next_producer_id, 0)
    return entry.state.is_prepared and entry.next_producer_id != NO_ID and who == next_identity


def retire(entry: TransactionEntry, now_ms: int) -> TransactionEntry:
    """Return the entry after which no producer that has its producer id may speak, whatever its epoch.

    The next InitProducerId gives another producer id, as after the last epoch. What is open is aborted.
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


# The way of a transaction


def decide_add(
    entry: TransactionEntry | None, who: Identity, partitions: Collection[TopicPartition], *, now_ms: int
) -> Persist | Unchanged | Refuse:
    """May these partitions become part of the transaction? The first one begins it, and its timeout."""
    if entry is not None and _goes_on_with(entry, who):
        return _being_completed(entry)
    if entry is None or entry.producer_id != who.producer_id:
        return _unknown(who)
    if entry.producer_epoch != who.producer_epoch:
        return _fenced(entry, who.producer_epoch)
    if entry.state.is_prepared:
        return _being_completed(entry)
    is_ongoing = entry.state is TransactionState.ONGOING
    if is_ongoing and entry.partitions.issuperset(partitions):
        return _UNCHANGED
    return Persist(
        entry._replace(
            state=TransactionState.ONGOING,
            partitions=entry.partitions.union(partitions),
            start_ms=entry.start_ms if is_ongoing else now_ms,
            last_update_ms=now_ms,
        )
    )


def verify(entry: TransactionEntry | None, who: Identity, partition: TopicPartition) -> Refuse | None:
    """Is the partition part of the producer's open transaction? None if it is (KIP-890)."""
    if entry is not None and _goes_on_with(entry, who):
        return _being_completed(entry)
    if entry is None or entry.producer_id != who.producer_id:
        return _unknown(who)
    if entry.producer_epoch != who.producer_epoch:
        return _fenced(entry, who.producer_epoch)
    if entry.state.is_prepared:
        return _being_completed(entry)
    if entry.state is TransactionState.ONGOING and partition in entry.partitions:
        return None
    return Refuse(TransactionAbortable, f"{partition} is not part of an open transaction of this producer")


def decide_end(
    entry: TransactionEntry | None,
    who: Identity,
    is_commit: bool,
    *,
    client_version: int,
    new_producer_id: int | None,
    now_ms: int,
) -> Persist | Unchanged | NeedsProducerId | Refuse:
    """May the transaction end like this? The persisted entry is prepared; its markers are to be written.

    Classic, with the epoch as it is; 0 is success without doing anything:

        state            COMMIT          ABORT
        Ongoing          PrepareCommit   PrepareAbort
        CompleteCommit   0               48
        CompleteAbort    48              0
        Prepare*         51              51
        Empty            48              48

    An epoch per transaction; a repetition names the epoch before:

        state            COMMIT again    COMMIT          ABORT again     ABORT
        Ongoing          90              PrepareCommit   90              PrepareAbort
        CompleteCommit   0               48              48              PrepareAbort
        CompleteAbort    48              48              0               PrepareAbort
        PrepareCommit    51              51              48              51
        PrepareAbort     48              51              51              51
        Empty            90              48              90              PrepareAbort

    In Prepare* a producer may be in its next transaction already. Any other code would end it. See
    test_an_end_beside_the_markers_of_the_transaction_before_is_to_be_tried_again.
    """
    if client_version >= EPOCH_PER_TRANSACTION:
        return _decide_end_with_epoch(entry, who, is_commit, client_version, new_producer_id, now_ms)
    if entry is not None and _goes_on_with(entry, who):
        return _being_completed(entry)
    if entry is None or entry.producer_id != who.producer_id:
        return _unknown(who)
    if entry.producer_epoch != who.producer_epoch:
        return _fenced(entry, who.producer_epoch)
    if entry.state is TransactionState.ONGOING:
        return Persist(_prepared(entry, is_commit, client_version, NO_ID, now_ms))
    if entry.state.is_prepared:
        return _being_completed(entry)
    return _repeated_end(entry, is_commit)


def _decide_end_with_epoch(
    entry: TransactionEntry | None,
    who: Identity,
    is_commit: bool,
    client_version: int,
    new_producer_id: int | None,
    now_ms: int,
) -> Persist | Unchanged | NeedsProducerId | Refuse:
    if entry is None:
        return _unknown(who)
    has_rotated = (
        entry.previous_producer_id == who.producer_id
        and who.producer_epoch >= EXHAUSTED_EPOCH
        and entry.producer_epoch == 0
    )
    if _goes_on_with(entry, who):
        return _being_completed(entry)
    if entry.producer_id != who.producer_id and not has_rotated:
        return _unknown(who)
    is_current = entry.producer_epoch == who.producer_epoch and not has_rotated
    # Only an end raises the epoch for its producer. InitProducerId and classic fences raise it for another
    # one, which must not share its epoch with a producer that they shut out.
    is_raised = entry.producer_epoch == who.producer_epoch + 1
    is_again = entry.client_version >= EPOCH_PER_TRANSACTION and (is_raised or has_rotated)
    if entry.producer_epoch == MAX_EPOCH and not entry.state.is_prepared:
        is_again = False  # the answer would give out the epoch that nothing can fence
    if entry.state.is_prepared and is_current:
        return _being_completed(entry)
    is_prepared, is_ongoing = entry.state.is_prepared, entry.state is TransactionState.ONGOING
    if is_prepared:
        may_speak = is_again and not has_rotated
    elif is_ongoing or entry.state is TransactionState.EMPTY:
        may_speak = is_current
    else:
        may_speak = is_current or is_again
    if not may_speak:
        return _fenced(entry, who.producer_epoch)
    if is_again:
        return _repeated_end(entry, is_commit)
    if not is_ongoing and is_commit:
        return _wrong_end(entry, is_commit)
    if entry.is_exhausted and new_producer_id is None:
        return _NEEDS_PRODUCER_ID
    next_id = new_producer_id if entry.is_exhausted and new_producer_id is not None else NO_ID
    if not is_ongoing:
        entry = entry._replace(partitions=frozenset(), start_ms=now_ms)
    return Persist(_prepared(entry, is_commit, client_version, next_id, now_ms))


def _repeated_end(entry: TransactionEntry, is_commit: bool) -> Unchanged | Refuse:
    done = TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT
    decided = TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT
    if entry.state is done:
        return _UNCHANGED
    if entry.state is decided:
        return _being_completed(entry)
    return _wrong_end(entry, is_commit)


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
    """An open transaction's abort without its producer, which its raised epoch shuts out.

    For a new instance of the transactional id, and for a transaction past its timeout. With an epoch per
    transaction the producer may ask for its next one, as after an end whose answer it lost; with the last
    epoch of its producer id that is epoch 0 of `new_producer_id`.
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
    """The prepared entry once every marker is written."""
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


# Time


def is_timed_out(entry: TransactionEntry, now_ms: int) -> bool:
    """Whether the transaction has been open longer than its producer asked for (row T8)."""
    return entry.state is TransactionState.ONGOING and entry.start_ms + entry.timeout_ms < now_ms


def is_expired(entry: TransactionEntry, now_ms: int, expiration_ms: int) -> bool:
    """Whether the id is idle for so long that it is forgotten (row T9)."""
    return entry.state.is_at_rest and entry.last_update_ms + expiration_ms <= now_ms


def _unknown(who: Identity) -> Refuse:
    return Refuse(
        InvalidProducerIdMapping, f"producer id {who.producer_id} is not the one of this transactional id"
    )


def _fenced(entry: TransactionEntry, epoch: int) -> Refuse:
    return Refuse(
        ProducerFenced,
        f"epoch {epoch} is not the one that holds, which is {entry.producer_epoch}: a newer instance of"
        " this transactional id is at work, or the transaction was ended without this one",
    )


def _being_completed(entry: TransactionEntry) -> Refuse:
    return Refuse(
        ConcurrentTransactions, f"the transaction before is in state {entry.state.label}; try again"
    )


def _wrong_end(entry: TransactionEntry, is_commit: bool) -> Refuse:
    return Refuse(
        InvalidTxnState,
        f"a transaction in state {entry.state.label} cannot {'commit' if is_commit else 'abort'}",
    )
