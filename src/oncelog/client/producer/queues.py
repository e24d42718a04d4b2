"""A producer's batches by topic and partition, and which of them may be sent now."""

from __future__ import annotations

import operator
from collections import deque
from typing import SupportsIndex

from oncelog.client.producer.appender import OpenBatches
from oncelog.client.producer.batch import ProducerBatch
from oncelog.client.producer.options import ProducerOptions
from oncelog.client.producer.partitioner import Partitioner
from oncelog.errors import MisuseError
from oncelog.rules.idempotence.sequencer import PartitionSequencer, ProducerIdAndEpoch
from oncelog.types import TopicPartition

_SMALL_BATCH_BYTES = 16_384
"""Batches of up to this size are never made smaller by `on_too_large`."""


class PartitionQueue:
    """The batches of one partition that are not complete.

    `waiting` has the batches that were never sent. The last of these may be `open` for more records. Sent
    batches are in `sequences` or, without idempotence, in `sent`, in the order of their serial numbers.
    """

    def __init__(
        self, tp: TopicPartition, options: ProducerOptions, open_batches: OpenBatches | None = None
    ) -> None:
        self.tp = tp
        self._open: ProducerBatch | None = None
        self._open_batches = open_batches
        self.waiting: deque[ProducerBatch] = deque()
        self.sent: list[ProducerBatch] = []
        limit = options.max_in_flight if not options.safe_mode else min(options.max_in_flight, 5)
        self.sequences: PartitionSequencer[ProducerBatch] = PartitionSequencer(limit, options.safe_mode)
        self._options = options

    @property
    def open(self) -> ProducerBatch | None:
        """Return the open batch. It is the one that `Appender` appends to."""
        return self._open

    @open.setter
    def open(self, batch: ProducerBatch | None) -> None:
        # `buffers` has the batch's buffer only while the batch is open, even if an exception interrupts this
        # setter.
        if self._open_batches is None:
            self._open = batch
        elif batch is None:
            self._open_batches.buffers[self.tp.partition] = None
            self._open = None
        else:
            self._open = batch
            self._open_batches.buffers[self.tp.partition] = batch.buffer

    @property
    def is_idle(self) -> bool:
        """Return True if the partition has no batches."""
        return not (self.waiting or self.sent or self.sequences.unacknowledged)

    def close_open(self) -> None:
        """Seal the open batch, if there is one."""
        if self.open is not None:
            self.open.seal()
            self.open = None

    def drop_empty(self) -> None:
        """Seal all batches, and drop the empty ones.

        An empty batch is left if an exception has interrupted the call that began the batch.
        """
        if self.open is not None:
            self.close_open()
        self.waiting = deque(batch for batch in self.waiting if batch.data is not None or batch.buffer.count)
        for batch in self.waiting:
            batch.seal()

    def next_to_send(
        self, identity: ProducerIdAndEpoch | None, flush_below: int, is_urgent: bool
    ) -> tuple[ProducerBatch, float] | None:
        """Return the batch to send next, and the earliest time (ms) at which it may be sent; 0 means now.

        Return None if there is no such batch, or if a response must arrive first. Batches with a serial below
        `flush_below` do not linger. With `is_urgent`, no batch lingers.
        """
        if self._options.is_idempotent:
            retry = self.sequences.next_retry()
            if retry is not None:
                return retry, retry.retry_at_ms
            if identity is not None and not self.sequences.may_assign_sequence(identity):
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

    def take(self, batch: ProducerBatch, identity: ProducerIdAndEpoch | None) -> None:
        """Mark the batch that `next_to_send` returned as sent. With idempotence, a new batch gets a
        sequence."""
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
            self.sequences.assign_sequence(batch, identity)
        else:
            self.sequences.send(batch)

    def on_no_outcome(self, batch: ProducerBatch, may_be_stored: bool) -> None:
        """Keep a batch for another attempt: the last attempt got no response, or a retriable error."""
        if self._options.is_idempotent:
            self.sequences.on_no_outcome(batch, may_be_stored=may_be_stored)
        else:
            batch.is_on_wire = False
            batch.may_be_stored = batch.may_be_stored or may_be_stored

    def on_delivered(self, batch: ProducerBatch) -> None:
        """Remove a batch that was stored."""
        if self._options.is_idempotent:
            self.sequences.on_stored(batch)
        else:
            self.sent.remove(batch)

    def on_given_up(self, batch: ProducerBatch) -> None:
        """Remove a batch that will not be sent again."""
        if batch in self.waiting:
            self.waiting.remove(batch)
            if batch is self.open:
                self.open = None
        elif self._options.is_idempotent:
            self.sequences.on_given_up(batch)
        else:
            self.sent.remove(batch)

    def replace(self, batch: ProducerBatch, children: list[ProducerBatch]) -> None:
        """Replace a batch that was too large with its child batches."""
        if self._options.is_idempotent:
            self.sequences.split(batch, children)
        else:
            index = self.sent.index(batch)
            self.sent[index : index + 1] = children

    def batches(self) -> list[ProducerBatch]:
        """Return all batches: first the sent batches, then the waiting ones."""
        sent = self.sequences.unacknowledged if self._options.is_idempotent else self.sent
        return [*sent, *self.waiting]


class TopicQueues:
    """The queues of a topic's partitions, and the choice of the queue for each record.

    Only the first `count` of `queues` belong to partitions that exist. There are more queues if the topic was
    re-created with fewer partitions. The batches of the queues from `count` on fail after
    delivery.timeout.ms. With the default partitioner, records without a key go to `sticky_queue` until its
    batch is full (KIP-480).

    `used_ms` is the time of the topic's last use: its first lookup, the start of a batch, or the last time
    that ProducerCore found the topic in use.
    """

    __slots__ = ("_sticky_queue", "count", "name", "open_batches", "partitioner", "queues", "used_ms")

    def __init__(self, name: str, partitioner: Partitioner, used_ms: float, max_batch_bytes: int) -> None:
        self.name = name
        self.partitioner = partitioner
        self.open_batches = OpenBatches(partitioner.hashes_with_murmur2, max_batch_bytes)
        self.queues: list[PartitionQueue] = []
        self.count = 0
        self._sticky_queue: PartitionQueue | None = None
        self.used_ms = used_ms

    @property
    def sticky_queue(self) -> PartitionQueue | None:
        """Return the queue that currently gets the records without a key; None if none is chosen yet."""
        return self._sticky_queue

    @sticky_queue.setter
    def sticky_queue(self, queue: PartitionQueue | None) -> None:
        self._sticky_queue = queue
        self.open_batches.sticky = -1 if queue is None else queue.tp.partition

    def set_count(self, count: int) -> None:
        """Set the topic's number of partitions. `queues` must have at least `count` queues."""
        self.count = self.open_batches.count = count
        if self.sticky_queue is not None and self.sticky_queue.tp.partition >= count:
            self.sticky_queue = None

    @property
    def max_batch_bytes(self) -> int:
        """Return the maximum size of an open batch, in bytes."""
        return self.open_batches.max_batch_bytes

    def on_too_large(self, size_bytes: int) -> None:
        """Make further batches smaller, because the broker has refused a batch of `size_bytes`.

        Otherwise each batch would be sent and refused once before it is split. Guard:
        test_a_topic_that_refuses_large_batches_gets_smaller_ones.
        """
        half = max(size_bytes // 2, _SMALL_BATCH_BYTES)
        self.open_batches.max_batch_bytes = min(self.max_batch_bytes, half)

    def queue(self, partition: object, key: bytes | None, size_bytes: int) -> PartitionQueue:
        """Return the queue for a record. Raises MisuseError if the topic has no such partition."""
        if partition is None:
            return self._choose(key, size_bytes)
        number = operator.index(partition) if isinstance(partition, SupportsIndex) else -1
        if not 0 <= number < self.count:
            existing = f"partitions 0 to {self.count - 1}"
            raise MisuseError(f"topic {self.name!r} has {existing}, so there is no partition {partition!r}")
        return self.queues[number]

    def _choose(self, key: bytes | None, size_bytes: int) -> PartitionQueue:
        partitioner, count = self.partitioner, self.count
        if partitioner.is_round_robin:
            return self.queues[partitioner.next_round_robin(count)]
        if key is not None and (key or partitioner.hashes_empty_keys):
            return self.queues[partitioner.for_key(key, count)]
        if not partitioner.is_sticky:
            return self.queues[partitioner.any_other(count, None)]
        sticky = self.sticky_queue
        if (
            sticky is None
            or sticky.open is None
            or sticky.open.size_bytes + size_bytes > self.max_batch_bytes
        ):
            sticky = self.switch_sticky_queue()
        return sticky

    def switch_sticky_queue(self) -> PartitionQueue:
        """Choose the partition for the next records without a key."""
        last = None if self.sticky_queue is None else self.sticky_queue.tp.partition
        self.sticky_queue = self.queues[self.partitioner.any_other(self.count, last)]
        return self.sticky_queue
