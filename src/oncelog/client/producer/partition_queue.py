"""The batches of one partition that have no outcome yet, and which of them may be sent now."""

from __future__ import annotations

from collections import deque

from oncelog.client.producer.batch import ProducerBatch
from oncelog.client.producer.options import ProducerOptions
from oncelog.rules.idempotence.sequencer import Identity, PartitionSequences
from oncelog.types import TopicPartition


class PartitionQueue:
    """`waiting`: never sent, the last of them may be `open`. Sent ones stand in `sequences`, or without
    idempotence in `sent`, by serial number."""

    def __init__(self, tp: TopicPartition, options: ProducerOptions) -> None:
        self.tp = tp
        self.open: ProducerBatch | None = None
        self.waiting: deque[ProducerBatch] = deque()
        self.sent: list[ProducerBatch] = []
        limit = options.max_in_flight if not options.is_guarded else min(options.max_in_flight, 5)
        self.sequences: PartitionSequences[ProducerBatch] = PartitionSequences(limit, options.is_guarded)
        self._options = options

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.sent or self.sequences.in_flight)

    def close_open(self) -> None:
        """No more records for the open batch."""
        if self.open is not None:
            self.open.seal()
            self.open = None

    def drop_empty(self) -> None:
        """Close the open batch, and drop what was begun for a record that never came."""
        if self.open is not None:
            self.close_open()
        self.waiting = deque(batch for batch in self.waiting if batch.data is not None or batch.rows)
        for batch in self.waiting:
            batch.seal()

    def next_to_send(
        self, identity: Identity | None, flush_below: int, is_urgent: bool
    ) -> tuple[ProducerBatch, float] | None:
        """Return the batch to send next and the time (ms) from which it may go; None: an answer is awaited.

        The time of what may go at once is 0. `flush_below`: batches with a smaller serial do not linger, nor
        does any when `is_urgent`.
        """
        if self._options.is_idempotent:
            retry = self.sequences.next_retry()
            if retry is not None:
                return retry, retry.retry_at_ms
            if identity is not None and not self.sequences.may_number(identity):
                return None
        else:
            for batch in self.sent:
                if not batch.is_on_wire:
                    return batch, batch.retry_at_ms
        if not self.waiting:
            return None
        batch = self.waiting[0]
        if batch is not self.open or is_urgent or batch.serial < flush_below:
            return batch, 0.0
        return batch, batch.created_ms + self._options.linger_ms

    def take(self, batch: ProducerBatch, identity: Identity | None) -> None:
        """Put the candidate on the wire."""
        is_new = bool(self.waiting) and self.waiting[0] is batch
        if is_new:
            self.waiting.popleft()
            if batch is self.open:
                self.close_open()
        if not self._options.is_idempotent:
            if is_new:
                self.sent.append(batch)
            batch.is_on_wire = True
        elif is_new and identity is not None:
            self.sequences.number(batch, identity)
        else:
            self.sequences.send(batch)

    def came_back(self, batch: ProducerBatch, may_be_stored: bool) -> None:
        """An attempt ended without an outcome."""
        if self._options.is_idempotent:
            self.sequences.on_no_outcome(batch, may_be_stored=may_be_stored)
        else:
            batch.is_on_wire = False
            batch.may_be_stored = batch.may_be_stored or may_be_stored

    def delivered(self, batch: ProducerBatch) -> None:
        """It has its place in the log."""
        if self._options.is_idempotent:
            self.sequences.on_stored(batch)
        else:
            self.sent.remove(batch)

    def give_up(self, batch: ProducerBatch) -> None:
        """It will not be sent (again)."""
        if batch in self.waiting:
            self.waiting.remove(batch)
            if batch is self.open:
                self.open = None
        elif self._options.is_idempotent:
            self.sequences.on_given_up(batch)
        else:
            self.sent.remove(batch)

    def replace(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """A batch that was too large goes on as its pieces."""
        if self._options.is_idempotent:
            self.sequences.split(batch, pieces)
        else:
            index = self.sent.index(batch)
            self.sent[index : index + 1] = pieces

    def batches(self) -> list[ProducerBatch]:
        """Return the batches without an outcome, sent or not."""
        sent = self.sequences.in_flight if self._options.is_idempotent else self.sent
        return [*sent, *self.waiting]
