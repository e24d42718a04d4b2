"""Which batch of a partition may be sent now, and with which sequence: the producer's half of idempotence.

A batch gets (producer id, epoch, base sequence) once, when it is first sent, and keeps them until its
outcome is known. Per partition, batches that have numbers and no outcome stand in one list, by sequence:

    nothing acknowledged yet under this id         one batch, alone: a broker takes any first sequence of an
                                                   id it does not know, so a second could be stored first
    all of them on the wire, and at most four      the next new batch may be numbered; the four count even if
    numbered after the lowest                      acknowledged, for they push it out of the broker's memory
    one of them came back without an outcome       only the lowest is sent, alone, until the list flows again
    OUT_OF_ORDER for a batch sent behind another   a reordering: it waits, and is sent again as it is
    OUT_OF_ORDER for a batch sent as the lowest    a gap: nothing fills it, numbering must start again
    a batch that was surely refused is given up    a gap, for its numbers will never come
    a batch that may be stored is given up         unresolved: an acknowledged later batch proves it was
                                                   stored; OUT_OF_ORDER for the next proves a gap

Numbering starts again at 0 under a new epoch only when nothing is on the wire and every batch that is to
be renumbered was surely refused. A batch that may be stored is first sent again under its old numbers;
when even then the broker neither stores nor recognises it, it is given up as unknown: sent under a new
epoch it could stand in the log twice. (Kafka's Java client does resend it. An Apache Kafka broker that
restarts remembers one batch instead of five, so a stored batch can be answered OUT_OF_ORDER.)

Source: rows I5, I9, I10, I11, I12; Kafka's TransactionManager, TxnPartitionEntry, RecordAccumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from oncelog.rules.idempotence.sequence import advance

MAX_UNACKNOWLEDGED = 5
"""As many batches as a broker remembers: a sixth could push a lost one out of its memory."""
MAX_EPOCH = 32_767


class ProducerIdAndEpoch(NamedTuple):
    """Who numbers: the pair a broker keys its memory by."""

    producer_id: int
    producer_epoch: int


def next_epoch(identity: ProducerIdAndEpoch) -> ProducerIdAndEpoch | None:
    """The same id one epoch later; None when the epochs are used up and a new id is needed."""
    if identity.producer_epoch >= MAX_EPOCH:
        return None
    return ProducerIdAndEpoch(identity.producer_id, identity.producer_epoch + 1)


class SequencedBatch:
    """What sending needs to know of a batch. `base_sequence` and `identity` are None until first sent.

    `ordinal` counts the batches numbered before it on its partition. `may_be_stored`: an attempt ended
    without saying whether the batch was stored. `was_first_in_flight`: when it was last sent, every batch
    before it had its outcome, so that OUT_OF_ORDER cannot be a reordering.
    """

    __slots__ = (
        "base_sequence",
        "identity",
        "is_on_wire",
        "may_be_stored",
        "ordinal",
        "record_count",
        "was_first_in_flight",
    )

    def __init__(self, record_count: int) -> None:
        self.record_count = record_count
        self.identity: ProducerIdAndEpoch | None = None
        self.base_sequence: int | None = None
        self.ordinal = 0
        self.may_be_stored = False
        self.is_on_wire = False
        self.was_first_in_flight = False


class OutOfOrder(Enum):
    """The verdict on an OUT_OF_ORDER answer.

    RETRY: a reordering, or not yet proven to be more. RENUMBER: it stays, to be sent under a new epoch.
    GIVE_UP: it may be stored and can no longer be recognised; it left the list.
    """

    RETRY = "retry"
    RENUMBER = "renumber"
    GIVE_UP = "give up"


B = TypeVar("B", bound=SequencedBatch)


class PartitionSequencer(Generic[B]):
    """The numbered, unresolved batches of one partition, in sequence order.

    `limit`: how many there may be. `safe_mode` False lets batches that may be stored be renumbered, which
    can double them; it exists to show that (row I13).
    """

    __slots__ = (
        "acked_producer_id",
        "has_gap",
        "identity",
        "in_flight",
        "limit",
        "next_ordinal",
        "next_sequence",
        "safe_mode",
        "unresolved",
    )

    def __init__(self, limit: int = MAX_UNACKNOWLEDGED, safe_mode: bool = True) -> None:
        self.limit = limit
        self.safe_mode = safe_mode
        self.identity: ProducerIdAndEpoch | None = None
        self.next_sequence = 0
        self.next_ordinal = 0
        self.acked_producer_id: int | None = None
        """The id under which the broker has acknowledged something here."""
        self.in_flight: list[B] = []
        self.has_gap = False
        self.unresolved: int | None = None
        """Of the batches in flight, how many are numbered below the last one given up as unknown."""

    # What may be sent

    def may_assign_sequence(self, current: ProducerIdAndEpoch) -> bool:
        """Whether a batch that was never sent may be given numbers of `current` and be sent now."""
        if self.is_restart_needed:
            return False
        if not self.in_flight:
            return True
        return (
            self.identity == current
            and self.unresolved is None
            and self.next_ordinal - self.in_flight[0].ordinal < self._window
            and all([batch.is_on_wire for batch in self.in_flight])
        )

    @property
    def _window(self) -> int:
        """How many batches may be numbered from the lowest unacknowledged one on."""
        is_known = self.identity is not None and self.acked_producer_id == self.identity.producer_id
        return self.limit if is_known or not self.safe_mode else 1

    def assign_sequence(self, batch: B, current: ProducerIdAndEpoch) -> None:
        """Give a new batch its numbers and put it on the wire; only after `may_assign_sequence`."""
        if self.identity != current:
            self.identity, self.next_sequence = current, 0
        batch.identity, batch.base_sequence = current, self.next_sequence
        self.next_sequence = advance(self.next_sequence, batch.record_count)
        batch.ordinal, self.next_ordinal = self.next_ordinal, self.next_ordinal + 1
        self.in_flight.append(batch)
        self.send(batch)

    def next_retry(self) -> B | None:
        """The batch to send again; None when none waits or those on the wire must come back first."""
        if not self.has_gap:
            lowest = self.in_flight[0] if self.in_flight else None
            return None if lowest is None or lowest.is_on_wire else lowest
        if any(batch.is_on_wire for batch in self.in_flight):
            return None
        return next((batch for batch in self.in_flight if self._is_unsettled(batch)), None)

    def send(self, batch: B) -> None:
        """Note that the batch leaves now, with the numbers it has."""
        batch.is_on_wire = True
        batch.was_first_in_flight = self.has_gap or self.in_flight[0] is batch

    @property
    def is_restart_needed(self) -> bool:
        """Whether the numbers given so far can no longer be continued."""
        return self.has_gap or (self.unresolved is not None and not self.in_flight)

    @property
    def is_restart_due(self) -> bool:
        """Whether numbering may start again now: nothing under way, nothing that may be stored."""
        return self.is_restart_needed and not any(
            batch.is_on_wire or self._is_unsettled(batch) for batch in self.in_flight
        )

    def _is_unsettled(self, batch: B) -> bool:
        return batch.may_be_stored and self.safe_mode

    # What the broker said

    def on_stored(self, batch: B) -> None:
        """Acknowledged, as new or as a duplicate."""
        # Before the batch is taken out, which lowers `unresolved` if the batch is below the unknown one.
        is_above_unknown = self.unresolved is not None and self.in_flight.index(batch) >= self.unresolved
        self._take(batch)
        self.acked_producer_id = batch.identity.producer_id if batch.identity else None
        if is_above_unknown:
            self.unresolved = None  # the broker stores in sequence, so what was unknown is stored

    def on_no_outcome(self, batch: B, *, may_be_stored: bool) -> None:
        """The attempt ended without an outcome; the batch waits to be sent again as it is."""
        batch.is_on_wire = False
        batch.may_be_stored = batch.may_be_stored or may_be_stored

    def on_out_of_order(self, batch: B) -> OutOfOrder:
        """The broker refused the sequence."""
        batch.is_on_wire = False
        if not batch.was_first_in_flight:
            return OutOfOrder.RETRY
        self.has_gap = True
        if self._is_unsettled(batch):
            self._take(batch)
            return OutOfOrder.GIVE_UP
        return OutOfOrder.RENUMBER

    def on_given_up(self, batch: B) -> None:
        """Refused for good, out of time or out of retries: it will not be sent again."""
        batch.may_be_stored = batch.may_be_stored or batch.is_on_wire
        index = self._take(batch)
        if not batch.may_be_stored:
            self.has_gap = True
        else:
            self.unresolved = max(index, self.unresolved or 0)

    def on_unknown_producer(self, batch: B) -> OutOfOrder:
        """The broker forgot the producer id (59, brokers before 2.4): as for a gap."""
        batch.was_first_in_flight = True
        return self.on_out_of_order(batch)

    def _take(self, batch: B) -> int:
        index = self.in_flight.index(batch)
        del self.in_flight[index]
        batch.is_on_wire = False
        if self.unresolved is not None and index < self.unresolved:
            self.unresolved -= 1
        return index

    # Changes of numbers

    def resume(self, identity: ProducerIdAndEpoch, next_sequence: int, acked_producer_id: int | None) -> None:
        """Go on where a partition stood that had nothing in flight and was forgotten since."""
        self.identity, self.next_sequence = identity, next_sequence
        self.acked_producer_id = acked_producer_id

    def restart(self, identity: ProducerIdAndEpoch) -> None:
        """Number what is in flight from 0 under another identity; only when `is_restart_due`."""
        self.identity, self.next_sequence = identity, 0
        self.has_gap, self.unresolved = False, None
        self.next_ordinal = len(self.in_flight)
        for ordinal, batch in enumerate(self.in_flight):
            batch.identity, batch.base_sequence, batch.ordinal = identity, self.next_sequence, ordinal
            self.next_sequence = advance(self.next_sequence, batch.record_count)

    def split(self, batch: B, pieces: Sequence[B]) -> None:
        """Replace a batch by its pieces, which share out its numbers, and may be stored if it may."""
        index = self.in_flight.index(batch)
        if batch.base_sequence is None or sum(piece.record_count for piece in pieces) != batch.record_count:
            raise ValueError("the pieces of a batch must hold its records, and it must have been numbered")
        sequence = batch.base_sequence
        for ordinal, piece in enumerate(pieces, batch.ordinal):
            piece.identity, piece.base_sequence, piece.ordinal = batch.identity, sequence, ordinal
            sequence = advance(sequence, piece.record_count)
        for later in self.in_flight[index + 1 :]:
            later.ordinal += len(pieces) - 1
        self.next_ordinal += len(pieces) - 1
        self.in_flight[index : index + 1] = pieces
        if self.unresolved is not None and index < self.unresolved:
            self.unresolved += len(pieces) - 1
