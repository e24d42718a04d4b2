"""Decide whether a batch of an idempotent producer is stored, a duplicate, or rejected.

The partition has an entry for each producer id that it knows. The batch is compared with the entry of its
producer id, in this order:

    same epoch, first and last sequence equal to a remembered batch   Duplicate
    epoch lower than the entry's                                      Reject INVALID_PRODUCER_EPOCH
    sequence above the lowest that still waits for verification       Reject OUT_OF_ORDER (see Verification)
    no entry, or an entry without an epoch                            any sequence is stored, but only 0
                                                                      with an epoch per transaction
    epoch higher than the entry's                                     sequence 0, else Reject OUT_OF_ORDER
    epoch equal to the entry's                                        next sequence, else Reject OUT_OF_ORDER
                                                                      (a gap, an overlap, or a repeat that
                                                                      is older than those remembered)
    not transactional while the id has a transaction open here        Reject INVALID_TXN_STATE
    else                                                              Store

OUT_OF_ORDER means OUT_OF_ORDER_SEQUENCE_NUMBER. With an epoch per transaction (KIP-890), a transaction begins
with sequence 0 in each partition. If the second batch of a transaction arrives before the first, it is
therefore rejected, and the producer sends both again in order. A coordinator's batch has no sequences, so the
checks of sequences do not apply to it. A replayed batch is already in the log, so it is never rejected.
Source: behaviours I6, I7, I8, I14, I15 (docs/behaviours.md); Kafka's
UnifiedLog.analyzeAndValidateProducerState and ProducerAppendInfo.
"""

from __future__ import annotations

from typing import NamedTuple

from oncelog.errors import (
    BrokerError,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTxnState,
    OutOfOrderSequenceNumber,
)
from oncelog.rules.idempotence.sequence import advance, first_sequence, is_next
from oncelog.types import Origin

REMEMBERED_BATCHES = 5

# Use the constructor of tuples, which is written in C: the decision runs for every batch, and the `__new__`
# that NamedTuple generates takes twice as long.
_make = tuple.__new__
_CLIENT, _REPLAY = Origin.CLIENT, Origin.REPLAY


class ProducedBatch(NamedTuple):
    """The fields of a batch header that concern its producer.

    `base_sequence` is None in a coordinator's batch.
    """

    producer_id: int
    producer_epoch: int
    base_sequence: int | None
    last_offset_delta: int
    max_timestamp_ms: int
    is_transactional: bool

    @property
    def last_sequence(self) -> int | None:
        """The sequence of the last record; None if the batch has no sequences."""
        return None if self.base_sequence is None else advance(self.base_sequence, self.last_offset_delta)


class RememberedBatch(NamedTuple):
    """A stored batch as the partition remembers it (Kafka's BatchMetadata).

    `last_sequence` is None for a coordinator's batch. `timestamp_ms` is the largest timestamp of the batch.
    """

    last_sequence: int | None
    last_offset: int
    offset_delta: int
    timestamp_ms: int

    @property
    def first_offset(self) -> int:
        return self.last_offset - self.offset_delta

    @property
    def first_sequence(self) -> int | None:
        """The sequence of the first record; None for a coordinator's batch."""
        return None if self.last_sequence is None else first_sequence(self.last_sequence, self.offset_delta)


class ProducerEntry(NamedTuple):
    """A partition's entry for one producer id (Kafka's ProducerStateEntry).

    `producer_epoch` is None before the first append. While it is None, any sequence is accepted.
    `coordinator_epoch` is None before the first transaction marker. `current_txn_first_offset` is None if no
    transaction is open here. `last_timestamp_ms` is from the client's clock, `last_append_ms` from the
    broker's. `batches` has at most five batches of `producer_epoch`, oldest first.
    """

    producer_epoch: int | None
    coordinator_epoch: int | None
    last_timestamp_ms: int
    last_append_ms: int
    current_txn_first_offset: int | None
    batches: tuple[RememberedBatch, ...]

    @property
    def last_sequence(self) -> int | None:
        """The last sequence; None if there are no batches, so that only sequence 0 may follow."""
        return self.batches[-1].last_sequence if self.batches else None


class Verification(NamedTuple):
    """The pending verification of a producer's batches by the transaction coordinator.

    `lowest_sequence` is the lowest sequence of a batch that the partition has asked the coordinator about.
    `raises_epoch` is true if each transaction of the producer has its own epoch. The verification is kept
    until a transactional batch is stored or the transaction ends here. If the coordinator rejects a batch
    temporarily, the producer will send that batch again. Until that batch is stored, batches with higher
    sequences are rejected. Source: Kafka's VerificationStateEntry.
    """

    producer_epoch: int
    lowest_sequence: int
    raises_epoch: bool

    def with_batch(self, producer_epoch: int, sequence: int) -> Verification:
        """Return the verification after the partition has also asked the coordinator about a batch with this
        epoch and sequence.
        """
        is_lower = producer_epoch == self.producer_epoch and sequence < self.lowest_sequence
        if is_lower or producer_epoch > self.producer_epoch:
            return self._replace(producer_epoch=producer_epoch, lowest_sequence=sequence)
        return self


class Store(NamedTuple):
    """The decision to write the batch to the log. `entry` is the producer's new entry."""

    entry: ProducerEntry


class Duplicate(NamedTuple):
    """The decision to write nothing, and to acknowledge the batch with the offsets and largest timestamp of
    the stored batch.
    """

    base_offset: int
    last_offset: int
    timestamp_ms: int


class Reject(NamedTuple):
    """The decision to write nothing, keep the entry, and respond with `error` and `reason`."""

    error: type[BrokerError]
    reason: str


def decide_append(
    entry: ProducerEntry | None,
    batch: ProducedBatch,
    origin: Origin,
    *,
    base_offset: int,
    now_ms: int,
    begins_epoch: bool = False,
    verification: Verification | None = None,
) -> Store | Duplicate | Reject:
    """Decide whether to store a data batch that would get `base_offset`.

    `entry` is None if the producer id is unknown here. `begins_epoch` is true if the batch is the first of
    its transaction here, and the transaction has its own epoch.
    """
    if entry is not None and origin is _CLIENT and verification is None:
        _, epoch, sequence, delta, timestamp_ms, is_transactional = batch
        if sequence is not None:
            successor = continue_sequence(
                entry, epoch, sequence, delta, timestamp_ms, is_transactional, base_offset, now_ms
            )
            if successor is not None:
                return _make(Store, (successor,))
    if origin is _CLIENT:
        if batch.base_sequence is None:
            return Reject(InvalidRecord, f"producer id {batch.producer_id} without a base sequence")
        if entry is not None and (stored := _find_remembered(entry, batch)) is not None:
            return Duplicate(stored.first_offset, stored.last_offset, stored.timestamp_ms)
    if entry is not None and origin is not _REPLAY:
        rejection = _check_epoch(entry, batch)
        if rejection is None and origin is _CLIENT and verification is not None:
            rejection = _check_overtaking(entry, batch, verification)
        if rejection is None and origin is _CLIENT:
            rejection = _check_sequence(entry, batch)
        if rejection is None and entry.current_txn_first_offset is not None and not batch.is_transactional:
            rejection = Reject(
                InvalidTxnState,
                f"producer id {batch.producer_id} has an open transaction in this partition "
                f"since offset {entry.current_txn_first_offset}, but this batch is not "
                "transactional",
            )
        if rejection is not None:
            return rejection
    if entry is None and origin is _CLIENT and verification is not None:
        rejection = _check_overtaking(entry, batch, verification)
        if rejection is not None:
            return rejection
    if begins_epoch and batch.base_sequence and (entry is None or not entry.batches):
        return Reject(
            OutOfOrderSequenceNumber,
            f"producer id {batch.producer_id} epoch {batch.producer_epoch} begins its "
            f"transaction in this partition with sequence {batch.base_sequence}; expected "
            "sequence 0",
        )
    return Store(_successor(entry, batch, base_offset, now_ms))


def continue_sequence(
    entry: ProducerEntry,
    epoch: int,
    sequence: int,
    offset_delta: int,
    timestamp_ms: int,
    is_transactional: bool,
    base_offset: int,
    now_ms: int,
) -> ProducerEntry | None:
    """Return the producer's new entry if a client's batch simply continues its sequence; otherwise None.

    This is `decide_append` for the usual batch: one whose producer has no pending verification. It takes
    single values, because this costs less than a ProducedBatch. None does not mean that the batch is refused:
    `decide_append` must then decide. A batch with the next sequence cannot be a duplicate: to equal a
    remembered batch, the five batches would have to cover all 2^31 sequences. See
    test_agrees_with_a_model_that_forgets_nothing.
    """
    previous_epoch, coordinator_epoch, _, _, txn_first_offset, batches = entry
    if previous_epoch != epoch or not batches:
        return None
    if txn_first_offset is None:
        if is_transactional:
            txn_first_offset = base_offset
    elif not is_transactional:
        return None
    if not is_next(batches[-1][0], sequence):
        return None
    last = advance(sequence, offset_delta)
    added = _make(RememberedBatch, (last, base_offset + offset_delta, offset_delta, timestamp_ms))
    remembered = (*batches[1 - REMEMBERED_BATCHES :], added)
    fields = (epoch, coordinator_epoch, timestamp_ms, now_ms, txn_first_offset, remembered)
    return _make(ProducerEntry, fields)


def _find_remembered(entry: ProducerEntry, batch: ProducedBatch) -> RememberedBatch | None:
    if entry.producer_epoch != batch.producer_epoch:
        return None
    last, delta = batch.last_sequence, batch.last_offset_delta
    # Comparing the last sequence and the length is enough: then the first sequences are equal, too.
    for remembered in entry.batches:
        if remembered.last_sequence == last and remembered.offset_delta == delta:
            return remembered
    return None


def _check_epoch(entry: ProducerEntry, batch: ProducedBatch) -> Reject | None:
    if entry.producer_epoch is None or batch.producer_epoch >= entry.producer_epoch:
        return None
    return Reject(
        InvalidProducerEpoch,
        f"producer id {batch.producer_id} sent epoch {batch.producer_epoch}, but its current "
        f"epoch is {entry.producer_epoch}: a newer instance of this producer is running",
    )


def _check_overtaking(
    entry: ProducerEntry | None, batch: ProducedBatch, verification: Verification
) -> Reject | None:
    sequence = batch.base_sequence or 0
    begins_late = verification.raises_epoch and sequence and (entry is None or not entry.batches)
    if not begins_late and sequence <= verification.lowest_sequence:
        return None
    return Reject(
        OutOfOrderSequenceNumber,
        f"producer id {batch.producer_id} sent sequence {sequence}, but the batch with "
        f"sequence {verification.lowest_sequence} is not stored yet",
    )


def _check_sequence(entry: ProducerEntry, batch: ProducedBatch) -> Reject | None:
    sequence = batch.base_sequence
    if entry.producer_epoch is None or sequence is None:
        return None
    if batch.producer_epoch != entry.producer_epoch:
        if sequence == 0:
            return None
        return Reject(
            OutOfOrderSequenceNumber,
            f"producer id {batch.producer_id} begins epoch {batch.producer_epoch} with sequence {sequence};"
            " a new epoch begins with 0",
        )
    if is_next(entry.last_sequence, sequence):
        return None
    return Reject(
        OutOfOrderSequenceNumber,
        f"producer id {batch.producer_id} epoch {batch.producer_epoch} sent sequence {sequence} after"
        f" {'none' if entry.last_sequence is None else entry.last_sequence}",
    )


def _successor(
    entry: ProducerEntry | None, batch: ProducedBatch, base_offset: int, now_ms: int
) -> ProducerEntry:
    _, epoch, base_sequence, delta, timestamp_ms, is_transactional = batch
    last = None if base_sequence is None else advance(base_sequence, delta)
    added: RememberedBatch = _make(RememberedBatch, (last, base_offset + delta, delta, timestamp_ms))
    coordinator_epoch, txn_first_offset = None, None
    batches: tuple[RememberedBatch, ...] = (added,)
    if entry is not None:
        previous_epoch, coordinator_epoch, _, _, txn_first_offset, previous = entry
        if previous_epoch == epoch:
            batches = (*previous[1 - REMEMBERED_BATCHES :], added)
    if txn_first_offset is None and is_transactional:
        txn_first_offset = base_offset
    return _make(ProducerEntry, (epoch, coordinator_epoch, timestamp_ms, now_ms, txn_first_offset, batches))
