"""Decide which batch of a partition is sent next, and which sequence it gets.

A batch gets its producer id, epoch and base sequence when it is first sent, and keeps them until its outcome
is known. Each partition has a list of the batches that have sequences and no outcome, ordered by sequence:

    no batch of this producer id acknowledged yet  only one batch may be in flight
    all batches of the list are in flight, and     the next new batch may get a sequence
        at most three batches got sequences
        after the first batch of the list
    an attempt to send a batch ended without       only the first batch of the list is sent, until it has
        an outcome, such as a lost connection      an outcome
    OUT_OF_ORDER for a batch that was sent while   a reordering: the batch is sent again unchanged
        an earlier batch was in flight
    OUT_OF_ORDER for a batch that was sent as      a gap that nothing fills: the sequences must restart
        the first in flight
    a batch failed and is surely not stored        a gap, because its sequences will never be sent
    a batch failed and may be stored               unresolved: if a later batch is acknowledged, the failed
                                                   one is stored; if the next batch gets OUT_OF_ORDER,
                                                   there is a gap

OUT_OF_ORDER means OUT_OF_ORDER_SEQUENCE_NUMBER. Three rules are not obvious:

- The first batch of a new producer id is sent alone. A broker accepts any first sequence of an id that it
  does not know. Suppose that two batches are in flight and the first gets lost. The second could be stored
  first, and the broker would never accept the first. See test_the_first_batch_of_an_id_goes_alone.
- The limit of five counts acknowledged batches, too. Suppose that batch 3 has no response while 4 to 7
  are acknowledged. An eighth would push 3 out of the broker's memory, and a retry of 3 could not be
  recognised. The Java client counts only unacknowledged batches. See
  test_acknowledged_batches_count_as_long_as_one_before_them_is_not.
- A batch that may be stored is never sent under a new epoch: it could be in the log twice. Sequences restart
  only when nothing is in flight and every batch that gets a new sequence was surely rejected. A batch that
  may be stored is first sent again with its old sequence. If the broker then neither stores nor recognises
  the batch, it fails with an unknown outcome. The Java client sends such a batch under a new epoch. An Apache
  Kafka broker that restarts remembers one batch instead of five, so a stored batch can get OUT_OF_ORDER. See
  test_a_batch_that_may_be_stored_is_never_renumbered_in_safe_mode.

Source: behaviours I5, I9, I10, I11 and I12 (docs/behaviours.md); Kafka's TransactionManager,
TxnPartitionEntry and RecordAccumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from oncelog.rules.idempotence.sequence import advance

MAX_UNACKNOWLEDGED = 5
"""The largest number of batches of a partition that wait for their outcome.

A broker remembers this number of batches of a producer; it would not recognise an older one.
"""
MAX_EPOCH = 32_767


class ProducerIdAndEpoch(NamedTuple):
    """A producer id with an epoch. A broker remembers batches by this pair."""

    producer_id: int
    producer_epoch: int


def next_epoch(producer: ProducerIdAndEpoch) -> ProducerIdAndEpoch | None:
    """Return the same producer id with the next epoch. At the largest epoch return None: a new producer id is
    needed.
    """
    if producer.producer_epoch >= MAX_EPOCH:
        return None
    return ProducerIdAndEpoch(producer.producer_id, producer.producer_epoch + 1)


class SequencedBatch:
    """The state of a batch that decides when it is sent.

    `base_sequence` and `identity` are None until the batch is first sent. `ordinal` counts the batches of the
    partition that got sequences before this batch. `may_be_stored` is true if an attempt failed and the
    broker may have stored the batch. `was_first_in_flight` is true if every earlier batch had its outcome
    when this batch was last sent. Then OUT_OF_ORDER cannot be caused by a reordering.
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
    """The decision after an OUT_OF_ORDER_SEQUENCE_NUMBER response.

    RETRY     the cause was a reordering, or may have been one; the batch will be sent again
    RENUMBER  there is a gap; the batch stays in the list and will be sent under a new epoch
    GIVE_UP   there is a gap, and the batch may be stored; it has been removed from the list
    """

    RETRY = "retry"
    RENUMBER = "renumber"
    GIVE_UP = "give up"


B = TypeVar("B", bound=SequencedBatch)


class PartitionSequencer(Generic[B]):
    """The batches of one partition that have sequences and no outcome, in sequence order.

    `limit` is the largest number of these batches. If `safe_mode` is false, a batch that may already be
    stored can get a new sequence, and may then be stored twice. It is false only to demonstrate this
    anomaly: behaviour I13 (docs/behaviours.md).
    """

    __slots__ = (
        "acked_producer_id",
        "has_gap",
        "identity",
        "limit",
        "next_ordinal",
        "next_sequence",
        "safe_mode",
        "unacknowledged",
        "unresolved",
    )

    def __init__(self, limit: int = MAX_UNACKNOWLEDGED, safe_mode: bool = True) -> None:
        self.limit = limit
        self.safe_mode = safe_mode
        self.identity: ProducerIdAndEpoch | None = None
        self.next_sequence = 0
        self.next_ordinal = 0
        self.acked_producer_id: int | None = None
        """The producer id of the last acknowledged batch of this partition; None before the first."""
        self.unacknowledged: list[B] = []
        self.has_gap = False
        self.unresolved: int | None = None
        """The index in `unacknowledged` at which the last failed batch that may be stored was removed.

        None if there is no such batch. The index decreases when an earlier batch is removed from the list.
        """

    # Sending

    def may_assign_sequence(self, current: ProducerIdAndEpoch) -> bool:
        """Return True if a new batch may now be sent, with the next sequence of the producer id and epoch
        `current`.
        """
        if self.is_restart_needed:
            return False
        if not self.unacknowledged:
            return True
        return (
            self.identity == current
            and self.unresolved is None
            and self.next_ordinal - self.unacknowledged[0].ordinal < self._window
            and all([batch.is_on_wire for batch in self.unacknowledged])
        )

    @property
    def _window(self) -> int:
        """The number of batches that may have sequences, counted from the first unacknowledged one."""
        is_known = self.identity is not None and self.acked_producer_id == self.identity.producer_id
        return self.limit if is_known or not self.safe_mode else 1

    def assign_sequence(self, batch: B, current: ProducerIdAndEpoch) -> None:
        """Give a new batch the next sequence and mark it as sent. Requires `may_assign_sequence`."""
        if self.identity != current:
            self.identity, self.next_sequence = current, 0
        batch.identity, batch.base_sequence = current, self.next_sequence
        self.next_sequence = advance(self.next_sequence, batch.record_count)
        batch.ordinal, self.next_ordinal = self.next_ordinal, self.next_ordinal + 1
        self.unacknowledged.append(batch)
        self.send(batch)

    def next_retry(self) -> B | None:
        """Return the batch to send again; None if there is none, or if batches in flight must get responses
        first.
        """
        if not self.has_gap:
            first = self.unacknowledged[0] if self.unacknowledged else None
            return None if first is None or first.is_on_wire else first
        if any(batch.is_on_wire for batch in self.unacknowledged):
            return None
        return next((batch for batch in self.unacknowledged if self._is_unsettled(batch)), None)

    def send(self, batch: B) -> None:
        """Mark the batch as sent. Its sequence stays the same."""
        batch.is_on_wire = True
        batch.was_first_in_flight = self.has_gap or self.unacknowledged[0] is batch

    @property
    def is_restart_needed(self) -> bool:
        """True if the sequences have or may have a gap, so that they must restart before new batches are
        sent.
        """
        return self.has_gap or (self.unresolved is not None and not self.unacknowledged)

    @property
    def is_restart_due(self) -> bool:
        """True if the sequences may restart now: no batch is in flight, and no batch in the list may be
        stored.
        """
        return self.is_restart_needed and not any(
            batch.is_on_wire or self._is_unsettled(batch) for batch in self.unacknowledged
        )

    def _is_unsettled(self, batch: B) -> bool:
        return batch.may_be_stored and self.safe_mode

    # Responses

    def on_stored(self, batch: B) -> None:
        """Handle an acknowledgement.

        The broker may have stored the batch now or recognised it as a duplicate.
        """
        # Compare the index before the removal, because the removal may decrease `unresolved`.
        is_above_unknown = self.unresolved is not None and self.unacknowledged.index(batch) >= self.unresolved
        self._remove(batch)
        self.acked_producer_id = batch.identity.producer_id if batch.identity else None
        if is_above_unknown:
            # A broker stores batches in sequence. So the failed batch, which is before this one, was stored.
            self.unresolved = None

    def on_no_outcome(self, batch: B, *, may_be_stored: bool) -> None:
        """Handle an attempt without an outcome. The batch will be sent again unchanged."""
        batch.is_on_wire = False
        batch.may_be_stored = batch.may_be_stored or may_be_stored

    def on_out_of_order(self, batch: B) -> OutOfOrder:
        """Handle OUT_OF_ORDER_SEQUENCE_NUMBER: a reordering, or a gap."""
        batch.is_on_wire = False
        if not batch.was_first_in_flight:
            return OutOfOrder.RETRY
        self.has_gap = True
        if self._is_unsettled(batch):
            self._remove(batch)
            return OutOfOrder.GIVE_UP
        return OutOfOrder.RENUMBER

    def on_given_up(self, batch: B) -> None:
        """Remove a batch that will not be sent again: it was rejected, timed out or used up its retries."""
        batch.may_be_stored = batch.may_be_stored or batch.is_on_wire
        index = self._remove(batch)
        if not batch.may_be_stored:
            self.has_gap = True
        else:
            self.unresolved = max(index, self.unresolved or 0)

    def on_unknown_producer(self, batch: B) -> OutOfOrder:
        """Handle UNKNOWN_PRODUCER_ID as a gap.

        Brokers before 2.4 send it if they have forgotten the producer id.
        """
        batch.was_first_in_flight = True
        return self.on_out_of_order(batch)

    def _remove(self, batch: B) -> int:
        index = self.unacknowledged.index(batch)
        del self.unacknowledged[index]
        batch.is_on_wire = False
        if self.unresolved is not None and index < self.unresolved:
            self.unresolved -= 1
        return index

    # New sequences

    def resume(self, producer: ProducerIdAndEpoch, next_sequence: int, acked_producer_id: int | None) -> None:
        """Restore the state of a partition that the producer dropped because the topic was idle
        (metadata.max.idle.ms).
        """
        self.identity, self.next_sequence = producer, next_sequence
        self.acked_producer_id = acked_producer_id

    def restart(self, producer: ProducerIdAndEpoch) -> None:
        """Give all batches in `unacknowledged` new sequences from 0 on, under another producer id or epoch.

        Requires `is_restart_due`.
        """
        self.identity, self.next_sequence = producer, 0
        self.has_gap, self.unresolved = False, None
        self.next_ordinal = len(self.unacknowledged)
        for ordinal, batch in enumerate(self.unacknowledged):
            batch.identity, batch.base_sequence, batch.ordinal = producer, self.next_sequence, ordinal
            self.next_sequence = advance(self.next_sequence, batch.record_count)

    def split(self, batch: B, parts: Sequence[B]) -> None:
        """Replace a batch with its parts. The parts get the sequences of the batch.

        Raises ValueError if the batch has no sequence, or if the parts do not have as many records as the
        batch.
        """
        index = self.unacknowledged.index(batch)
        if batch.base_sequence is None or sum(part.record_count for part in parts) != batch.record_count:
            raise ValueError("the parts of a batch must hold its records, and it must have a sequence")
        sequence = batch.base_sequence
        for ordinal, part in enumerate(parts, batch.ordinal):
            part.identity, part.base_sequence, part.ordinal = batch.identity, sequence, ordinal
            sequence = advance(sequence, part.record_count)
        for later in self.unacknowledged[index + 1 :]:
            later.ordinal += len(parts) - 1
        self.next_ordinal += len(parts) - 1
        self.unacknowledged[index : index + 1] = parts
        if self.unresolved is not None and index < self.unresolved:
            self.unresolved += len(parts) - 1
