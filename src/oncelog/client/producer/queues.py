"""A producer's batches by topic and partition, and which of them may be sent now."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from oncelog.client.producer.batch import ProducerBatch
from oncelog.client.producer.options import ProducerOptions
from oncelog.client.producer.partitioner import Partitioner, Partitions
from oncelog.errors import MisuseError
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


class TopicQueues:
    """The queues of a topic's partitions by number; only the first `count` exist on the cluster.

    A topic that was created again with fewer partitions leaves queues behind `count`: their batches end by
    delivery.timeout.ms. `sticky` is where records without a key go until its batch is full (KIP-480).
    `used_ms` is when a batch was begun last.
    """

    __slots__ = ("count", "hashes_keys", "name", "partitioner", "queues", "sticky", "used_ms")

    def __init__(self, name: str, partitioner: Partitioner, used_ms: float) -> None:
        self.name = name
        self.partitioner = partitioner
        self.hashes_keys = not partitioner.is_round_robin
        self.queues: list[PartitionQueue] = []
        self.count = 0
        self.sticky: PartitionQueue | None = None
        self.used_ms = used_ms

    def set_count(self, count: int) -> None:
        """Note how many partitions there are; `queues` must hold as many."""
        self.count = count
        if self.sticky is not None and self.sticky.tp.partition >= count:
            self.sticky = None

    def queue(
        self, partition: int | None, key: bytes | None, size_bytes: int, batch_bytes: int
    ) -> PartitionQueue:
        """Return the queue for a record. Raises MisuseError when the topic has no such partition."""
        if partition is None:
            return self._choose(key, size_bytes, batch_bytes)
        if not hasattr(partition, "__index__") or not 0 <= partition < self.count:
            known = f"partitions 0 to {self.count - 1}"
            raise MisuseError(f"topic {self.name!r} has {known}, so there is no partition {partition!r}")
        return self.queues[partition]

    def _choose(self, key: bytes | None, size_bytes: int, batch_bytes: int) -> PartitionQueue:
        partitioner, count = self.partitioner, self.count
        if partitioner.is_round_robin:
            return self.queues[partitioner.next_round_robin(count)]
        if key is not None and (key or partitioner.hashes_empty_keys):
            return self.queues[partitioner.for_key(key, count)]
        if not partitioner.is_sticky:
            return self.queues[partitioner.any_other(count, None)]
        sticky = self.sticky
        if sticky is None or sticky.open is None or sticky.open.size_bytes + size_bytes > batch_bytes:
            sticky = self._stick_to_another()
        return sticky

    def _stick_to_another(self) -> PartitionQueue:
        last = None if self.sticky is None else self.sticky.tp.partition
        self.sticky = self.queues[self.partitioner.any_other(self.count, last)]
        return self.sticky

    def choose_many(self, keys: Any, rows: int) -> Partitions | int:
        """Return the partitions for the rows of a table, or the one where all of them go.

        `keys` is a binary Arrow column or None. Rows without a key stay together.
        """
        if self.partitioner.is_round_robin:
            return np.array([self.partitioner.next_round_robin(self.count) for _ in range(rows)], np.int32)
        alone = self._stick_to_another().tp.partition
        return alone if keys is None else self.partitioner.for_column(keys, self.count, alone)
