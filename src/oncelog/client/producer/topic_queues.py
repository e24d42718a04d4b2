"""What a producer keeps of one topic: a queue per partition, and the rule that chooses between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from oncelog.client.producer.partition_queue import PartitionQueue
from oncelog.client.producer.partitioner import Partitioner, Partitions
from oncelog.errors import MisuseError


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
