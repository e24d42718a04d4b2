"""Checking records, choosing their partitions and appending them, for both faces of the producer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from oncelog.client.partitioner import Partitioner, Partitions
from oncelog.client.producer_batch import Callback, Outcome, Row
from oncelog.client.producer_partition import PartitionQueue
from oncelog.edge import machine
from oncelog.edge.producer_driver import ProducerDriver
from oncelog.errors import MisuseError
from oncelog.types import Header, TopicPartition


class Sender:
    """Choosing partitions and appending; shared by both faces, always under the driver's lock."""

    def __init__(self, driver: ProducerDriver) -> None:
        self.driver = driver
        self.partitions: dict[str, list[TopicPartition]] = {}
        self.lanes: dict[str, list[PartitionQueue]] = {}
        """The same by partition number: where a record may join an open batch."""
        self.sticky_lanes: dict[str, PartitionQueue] = {}
        """Where records without a key go until the batch there is full."""
        self._partitioners: dict[str, Partitioner] = {}
        self._sticky: dict[str, int] = {}

    def learn(self, topic: str, count: int) -> None:
        """Note a topic's number of partitions."""
        self.partitions[topic] = [TopicPartition(topic, partition) for partition in range(count)]
        self.lanes[topic] = [self.driver.core.partition(tp) for tp in self.partitions[topic]]

    def choose(self, topic: str, key: bytes | None, size_bytes: int) -> int:
        """The partition for a record without one."""
        count = len(self.partitions[topic])
        partitioner = self._partitioner(topic)
        if partitioner.is_round_robin:
            return partitioner.next_round_robin(count)
        if key is not None and (key or partitioner.hashes_empty_keys):
            return partitioner.for_key(key, count)
        if not partitioner.is_sticky:
            return self.driver.machine.chance.randrange(count)
        return self._stick(topic, partitioner, count, size_bytes)

    def choose_many(self, topic: str, keys: Any, rows: int) -> Partitions | int:
        """`choose` for the rows of a table, `keys` a binary Arrow column or None; a number: all go there.

        Rows without a key stay together.
        """
        count = len(self.partitions[topic])
        with self.driver.lock:
            partitioner = self._partitioner(topic)
            if partitioner.is_round_robin:
                return np.array([partitioner.next_round_robin(count) for _ in range(rows)], np.int32)
            alone = partitioner.any_other(count, self._sticky.get(topic))
            self._sticky[topic] = alone
            return alone if keys is None else partitioner.for_column(keys, count, alone)

    def _partitioner(self, topic: str) -> Partitioner:
        partitioner = self._partitioners.get(topic)
        if partitioner is None:
            partitioner = Partitioner(self.driver.options.partitioner, self.driver.machine.chance.randrange)
            self._partitioners[topic] = partitioner
        return partitioner

    def _stick(self, topic: str, partitioner: Partitioner, count: int, size_bytes: int) -> int:
        # A batch is filled before another partition has its turn (KIP-480).
        chosen = self._sticky.get(topic)
        if chosen is None or not self.driver.core.has_open_batch(self.partitions[topic][chosen], size_bytes):
            chosen = self._sticky[topic] = partitioner.any_other(count, chosen)
            self.sticky_lanes[topic] = self.lanes[topic][chosen]
        return chosen

    def append(
        self,
        topic: str,
        partition: int | None,
        row: Row,
        size_bytes: int,
        callback: Callback | None,
        now_ms: float,
    ) -> tuple[Outcome, int, bool]:
        """Put one record into its batch; the topic's partition count is known."""
        if partition is None:
            tp = self.partitions[topic][self.choose(topic, row[1], size_bytes)]
        else:
            tp = self.named(topic, partition)
        outcome, index, wake = self.driver.core.append(tp, row, size_bytes, now_ms, callback)
        if wake:  # a new batch: often enough to see that the topic got more partitions
            count = self.driver.cluster.metadata.partition_count(topic)
            if count and count != len(self.partitions[topic]):
                self.learn(topic, count)
        return outcome, index, wake

    def named(self, topic: str, partition: int) -> TopicPartition:
        """The partition the caller chose. Raises MisuseError when there is none of that number."""
        known = self.partitions[topic]
        if not 0 <= partition < len(known):
            raise MisuseError(
                f"topic {topic!r} has partitions 0 to {len(known) - 1}, so there is no partition {partition}"
            )
        return known[partition]


def make_row(
    value: bytes | None, key: bytes | None, timestamp_ms: int | None, headers: Iterable[Header]
) -> Row:
    """A record as the core takes it; text is refused, since only the caller knows its encoding."""
    for name, data in (("value", value), ("key", key)):
        if data is not None and not isinstance(data, (bytes, bytearray, memoryview)):
            raise MisuseError(f"{name} must be bytes or None, not {type(data).__name__}; encode it first")
    if timestamp_ms is None:
        timestamp_ms = machine.current().wall_ns() // 1_000_000
    elif not isinstance(timestamp_ms, int) or not 0 <= timestamp_ms < 1 << 63:
        raise MisuseError(f"timestamp_ms={timestamp_ms!r} is no time in whole milliseconds since 1970")
    return (
        timestamp_ms,
        key if key is None or isinstance(key, bytes) else bytes(key),
        value if value is None or isinstance(value, bytes) else bytes(value),
        tuple(_header(*header) for header in headers) if headers else (),
    )


def _header(name: str, value: bytes | None) -> Header:
    if not isinstance(name, str) or not (value is None or isinstance(value, (bytes, bytearray, memoryview))):
        raise MisuseError(f"a header must be a pair of str and bytes or None, not {(name, value)!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise MisuseError(f"the header name {name!r} cannot be written as UTF-8") from None
    return name, None if value is None else bytes(value)
