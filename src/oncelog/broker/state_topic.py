"""A coordinator's memory as a topic: what is decided is appended before it holds, and read back at start.

`__transaction_state` and `__consumer_offsets` are such topics: compacted, in Kafka's record formats, a key
always in the same partition. One node leads all of them, so it coordinates everything.
Source: Kafka's TransactionStateManager, CoordinatorRuntime; transactions, section 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from oncelog.broker.flushing import FlushWait
from oncelog.errors import BrokerError, KafkaStorageError, StorageError
from oncelog.log.partition import Appended, Partition
from oncelog.log.producers import end_marker
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch, iter_batches, read_header
from oncelog.wire.records import DecodedRecord, NewRecord, decode_records

if TYPE_CHECKING:
    from oncelog.broker.node import Node
    from oncelog.broker.topics import Topic

_READ_BYTES = 4_194_304

Then = Callable[[BrokerError | None], None]
"""Told once: None when the append is as durable as the topic promises, else why it does not hold."""


class StoredBatch(NamedTuple):
    """A batch of the topic as replay meets it.

    `producer_id` None: not within a transaction. `is_commit` None: no marker; a marker has no records.
    """

    base_offset: int
    producer_id: int | None
    is_commit: bool | None
    records: list[DecodedRecord]


def java_hash(text: str) -> int:
    """String.hashCode of Java: over UTF-16 code units, as a signed 32-bit number."""
    value = 0
    data = text.encode("utf-16-le", "surrogatepass")
    for low, high in zip(data[::2], data[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for(key: str, partition_count: int) -> int:
    """The partition that keeps a key. The absolute value of the smallest number is 0, as in Kafka."""
    value = java_hash(key)
    return 0 if value == -(1 << 31) else abs(value) % partition_count


class StateTopic:
    """One such topic; made when first needed, with `partition_count` partitions that never change."""

    def __init__(self, node: Node, name: str, partition_count: int, overrides: dict[str, str]) -> None:
        self.name = name
        self._node = node
        self._partition_count = partition_count
        self._overrides = {"cleanup.policy": "compact", **overrides}

    @property
    def topic(self) -> Topic | None:
        """None while nothing was ever written."""
        return self._node.topics.get(self.name)

    def ensure(self, now_ms: int) -> Topic:
        """The topic, made if need be. Raises StorageError."""
        topic = self.topic
        if topic is not None:
            return topic
        return self._node.topics.create(self.name, self._partition_count, dict(self._overrides), now_ms)

    def partition_of(self, key: str) -> int:
        """Where records of a key belong: a group id, a transactional id."""
        topic = self.topic
        return partition_for(key, len(topic.partitions) if topic else self._partition_count)

    def append(
        self, index: int, records: Sequence[tuple[bytes, bytes | None]], now_ms: int, then: Then
    ) -> None:
        """Append (key, value or tombstone) as one batch. `then` may be called before this returns."""
        made = [NewRecord(now_ms, key, value) for key, value in records]
        self.append_batch(index, build_batch(made), now_ms, then)

    def append_batch(self, index: int, batch: bytearray, now_ms: int, then: Then) -> None:
        """Append a batch that the coordinator built: transactional offsets, a marker."""
        try:
            topic = self.ensure(now_ms)
            partition = topic.partition(index)
            appended = partition.append(memoryview(batch), origin=Origin.COORDINATOR, now_ms=now_ms)
        except (BrokerError, StorageError) as error:
            then(error if isinstance(error, BrokerError) else KafkaStorageError(str(error)))
            return
        self._node.note_append(TopicPartition(self.name, index), len(batch))
        when_durable(self._node, topic, partition, appended, then)

    def replay(self, index: int) -> Iterator[StoredBatch]:
        """Every batch of a partition, in the order it was appended. Raises StorageError."""
        topic = self.topic
        if topic is None:
            return
        partition = topic.partition(index)
        offset = partition.log_start_offset
        while offset < partition.log_end_offset:
            found = partition.read(offset, _READ_BYTES)
            data = memoryview(found.records)
            for position, header in iter_batches(data):
                yield _stored_batch(data[position : position + header.size_bytes])
            if found.next_offset <= offset:
                return
            offset = found.next_offset


def when_durable(node: Node, topic: Topic, partition: Partition, appended: Appended, then: Then) -> None:
    """Call `then` once the append is as durable as the topic's flush.messages asks."""
    if partition.unflushed_record_count < topic.flush_messages:
        then(None)
        return

    def on_flushed(error: Exception | None) -> None:
        then(None if error is None else KafkaStorageError(f"{partition.topic_partition}: {error}"))

    node.flushes.add(partition, FlushWait(appended.last_offset, on_flushed))


def _stored_batch(batch: memoryview) -> StoredBatch:
    header = read_header(batch)
    producer_id = header.producer_id if header.is_transactional else None
    if header.is_control:
        marker = end_marker(header, batch)
        return StoredBatch(header.base_offset, producer_id, None if marker is None else marker.is_commit, [])
    return StoredBatch(header.base_offset, producer_id, None, decode_records(batch))
