"""An internal topic: the log in which a coordinator stores its state.

The topics are `__transaction_state` and `__consumer_offsets`. They are compacted, use Kafka's record formats,
and keep all records of a key in one partition. This broker leads all partitions, so it is the coordinator of
every group and transactional id. A start replays the records.

A change takes effect as soon as its record is in the log. Responses, and writes to other partitions that
follow from the change, wait until the record is durable. Since all records of a key are in one partition, a
later record is never durable before an earlier one. See test_answers_and_markers_wait_for_the_disk.

If the coordinator cannot write, it answers NOT_COORDINATOR, as Kafka does; every client retries that error.
KAFKA_STORAGE_ERROR would be fatal for a transactional producer.
Source: kafka TransactionStateManager, CoordinatorRuntime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

from oncelog.broker.group_commit import FlushQueue, FlushWaiter
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.topics.topics import Topic, Topics
from oncelog.errors import (
    BrokerError,
    CorruptMessage,
    KafkaStorageError,
    MessageTooLarge,
    NotCoordinator,
    PeerError,
    StorageError,
    TopicAlreadyExists,
)
from oncelog.log.partition import Partition
from oncelog.log.producers import end_marker
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch, iter_batches, read_header
from oncelog.wire.message import Message
from oncelog.wire.records import DecodedRecord, NewRecord, decode_records

OnDurable = Callable[[BrokerError | None], None]
"""A callback that is called once.

Its argument is None when the appends are as durable as their topic requires, or else the error.
"""


class AppendHandle(NamedTuple):
    """An append to a partition, for callers that wait until it is durable.

    `last_offset` is the offset of the last appended record.
    """

    topic: Topic
    partition: Partition
    last_offset: int


class Damage(NamedTuple):
    """The damage of a partition that could not be replayed: the first unreadable offset, and the path of its
    file.
    """

    topic_partition: TopicPartition
    file: str
    offset: int
    reason: str


class StoredBatch(NamedTuple):
    """A batch of an internal topic during replay.

    `producer_id` is None outside of transactions. `is_commit` is None unless the batch is a marker. A marker
    has no records here.
    """

    base_offset: int
    producer_id: int | None
    is_commit: bool | None
    records: list[DecodedRecord]


def java_hash(text: str) -> int:
    """Return Java's String.hashCode: over UTF-16 code units, as a signed 32-bit number."""
    value = 0
    data = text.encode("utf-16-le", "surrogatepass")
    for low, high in zip(data[::2], data[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@lru_cache(maxsize=64)
def partition_for(key: str, partition_count: int) -> int:
    """Return the partition of a key.

    As in Kafka's Utils.abs, the absolute value of the smallest 32-bit hash is 0.

    Results are cached: the hash of a key of 32,000 bytes takes 2 ms, and each marker of a transaction needs
    the partition of its transactional id. See test_the_hash_of_a_long_id_is_computed_once.
    """
    value = java_hash(key)
    return 0 if value == -(1 << 31) else abs(value) % partition_count


class InternalTopic:
    """One internal topic. Its first use creates it, with a number of partitions that never changes.

    `note_stored` is called with the partition and the size in bytes of each append. `max_record_bytes`
    returns the current size limit of a record; without this function there is no limit.
    """

    def __init__(
        self,
        name: str,
        partition_count: int,
        *,
        topics: Topics,
        note_stored: Callable[[Partition, int], None],
        max_record_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.name, self._partition_count = name, partition_count
        self._topics, self._note_stored, self._max_record_bytes = topics, note_stored, max_record_bytes
        self.damaged: dict[int, Damage] = {}
        """Partition index -> its damage.

        Requests for keys in these partitions get NOT_COORDINATOR until the next start.
        """

        self._reserved: set[str] = set()

    @property
    def topic(self) -> Topic | None:
        """The topic; None until it is created."""
        return self._topics.get(self.name)

    @property
    def partition_count(self) -> int:
        """The number of partitions that the topic has, or will be created with."""
        topic = self.topic
        return len(topic.partitions) if topic else self._partition_count

    def ensure(self, now_ms: int) -> Topic:
        """Return the topic, creating it if necessary. Raises NotCoordinator."""
        topic = self.topic
        if topic is not None:
            return topic
        try:
            return self._topics.create(self.name, self._partition_count, {}, now_ms)
        except (StorageError, KafkaStorageError, TopicAlreadyExists) as error:
            # TopicAlreadyExists: a client's request is creating the topic in steps.
            raise NotCoordinator(f"{self.name} cannot be created: {error}") from error

    def partition_of(self, key: str) -> int:
        """Return the partition index of a key. The key is a group id or a transactional id."""
        return partition_for(key, self.partition_count)

    def check(self, key: str) -> None:
        """Raise NotCoordinator if the key is reserved, or its partition could not be replayed."""
        if key in self._reserved:
            raise NotCoordinator(f"{key!r} is being deleted; retry")
        if self.damaged:
            self.check_partition(self.partition_of(key))

    @contextmanager
    def reserved(self, key: str) -> Iterator[None]:
        """Reserve a key while the caller works on it in several steps.

        Other requests for the key get NOT_COORDINATOR, so that clients retry them.
        """
        self._reserved.add(key)
        try:
            yield
        finally:
            self._reserved.discard(key)

    def check_partition(self, index: int) -> None:
        """Raise NotCoordinator if the partition could not be replayed."""
        damage = self.damaged.get(index) if self.damaged else None
        if damage is not None:
            raise NotCoordinator(
                f"{damage.topic_partition} is damaged at offset {damage.offset}; see docs/operations.md"
            )

    def append(self, index: int, records: Sequence[tuple[bytes, bytes | None]], now_ms: int) -> AppendHandle:
        """Append records in one batch. They are pairs (key, value), or (key, None) for a tombstone.

        Raises NotCoordinator, or MessageTooLarge for a record above the limit. After an error nothing is
        appended.
        """
        # Tombstones are not checked: the records that they delete were within the limit.
        largest = max((len(key) + len(value) for key, value in records if value is not None), default=0)
        limit = largest if self._max_record_bytes is None else self._max_record_bytes()
        if largest > limit:
            raise MessageTooLarge(f"a record of {self.name} has {largest} bytes; the limit is {limit}")
        batch = build_batch([NewRecord(now_ms, key, value) for key, value in records])
        return self.append_batch(index, batch, now_ms)

    def append_batch(self, index: int, batch: bytearray, now_ms: int) -> AppendHandle:
        """Append a batch that the coordinator built, for example within a transaction.

        Raises NotCoordinator, or the error of the append rule, such as InvalidProducerEpoch.
        """
        topic = self.ensure(now_ms)
        self.check_partition(index)
        partition = topic.partition(index)
        try:
            appended = partition.append(memoryview(batch), origin=Origin.COORDINATOR, now_ms=now_ms)
        except KafkaStorageError as error:
            raise NotCoordinator(str(error)) from error
        self._note_stored(partition, len(batch))
        return AppendHandle(topic, partition, appended.last_offset)

    def last_append(self, index: int) -> AppendHandle:
        """Return a handle for the newest record of a partition, which may not be durable yet."""
        topic = self.topic
        assert topic is not None
        partition = topic.partition(index)
        return AppendHandle(topic, partition, partition.log_end_offset - 1)

    def log_end_offsets(self) -> dict[int, int]:
        """Return the log end offset of each partition by index; an empty dict before the topic is created."""
        topic = self.topic
        return {} if topic is None else {i: p.log_end_offset for i, p in enumerate(topic.partitions)}

    def roll_for_compaction(self, now_ms: int) -> None:
        """Roll large active segments, because only closed segments are compacted: behaviour T2
        (docs/behaviours.md).
        """
        topic = self.topic
        for partition in topic.partitions if topic else ():
            # If the disk fails, the next append raises the error.
            with suppress(KafkaStorageError):
                partition.cleaner.roll_for_compaction(now_ms)

    def replay(self, index: int) -> Iterator[StoredBatch]:
        """Return an iterator over all batches of a partition, in the order of their offsets.

        The iterator raises CorruptMessage, KafkaStorageError.
        """
        topic = self.topic
        return iter(() if topic is None else _Replay(topic.partition(index)))

    def load(self, read: Callable[[int, Iterator[StoredBatch]], None], forget: Callable[[int], None]) -> None:
        """Call `read` for every partition.

        If a partition cannot be read completely, call `forget` and mark it damaged. The readable part of a
        damaged partition must not be used, because an older record of a key could appear to be the newest
        one. Source: kafka CoordinatorRuntime, which also fails the coordinator of a damaged partition.
        """
        topic = self.topic
        for index, partition in enumerate(topic.partitions if topic else ()):
            batches = _Replay(partition)
            try:
                read(index, iter(batches))
            except (BrokerError, PeerError, StorageError, ValueError) as error:
                forget(index)
                offset = error.offset if isinstance(error, UnreadableRecord) else batches.offset
                tp = TopicPartition(self.name, index)
                self.damaged[index] = Damage(tp, partition.file_at(offset), offset, str(error))


class UnreadableRecord(StorageError):
    """A stored record that cannot be decoded. `offset` is the record's offset."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"the record at offset {offset}: {reason}")
        self.offset = offset


class _Replay:
    """An iterator over all batches of a partition.

    `offset` is the base offset of the batch that is being replayed, or else the offset after the last
    replayed one. If the replay fails, `offset` is the first offset that could not be replayed.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.offset = partition.log_start_offset

    def __iter__(self) -> Iterator[StoredBatch]:
        """Yield the batches. Raises CorruptMessage, KafkaStorageError."""
        partition = self._partition
        offset = partition.log_start_offset
        while offset < partition.log_end_offset:
            read_result = partition.read(offset, partition.config.limits.coordinator_read_bytes)
            data = memoryview(read_result.records)
            for position, header in iter_batches(data):
                self.offset = header.base_offset
                yield _stored_batch(data[position : position + header.size_bytes])
                self.offset = header.last_offset + 1
            if read_result.next_offset <= offset:
                end = partition.log_end_offset
                raise CorruptMessage(f"there is no batch at offset {offset}, but the log ends at {end}")
            offset = read_result.next_offset


def is_pending_flush(written: Iterable[AppendHandle]) -> bool:
    """Return True if any of the appends is not yet as durable as its topic's flush.messages requires."""
    return any(_must_wait(handle) for handle in written)


def when_durable(flush_queue: FlushQueue, written: Iterable[AppendHandle], then: OnDurable) -> None:
    """Call `then` once every append is as durable as its topic's flush.messages requires.

    With the default flush.messages, `then` is called immediately. If a flush fails, `then` gets
    NotCoordinator if all waiting appends are to internal topics, else KafkaStorageError.
    """
    waiting = [handle for handle in written if _must_wait(handle)]
    if not waiting:
        then(None)
        return
    left, first_error = len(waiting), None
    failure = NotCoordinator if all(handle.topic.is_internal for handle in waiting) else KafkaStorageError

    def on_flushed(error: Exception | None) -> None:
        nonlocal left, first_error
        left -= 1
        first_error = first_error or error
        if not left:
            then(None if first_error is None else failure(f"not flushed: {first_error}"))

    for handle in waiting:
        flush_queue.add(handle.partition, FlushWaiter(handle.last_offset, on_flushed))


def when_synced(flush_queue: FlushQueue, written: Iterable[AppendHandle], then: Callable[[], None]) -> None:
    """Call `then` once every append is synced, whatever flush.messages is. If a sync fails, `then` is never
    called.
    """
    waiting = [handle for handle in written if handle.last_offset >= handle.partition.recovery_point]
    left = len(waiting)
    if not waiting:
        then()

    def on_flushed(error: Exception | None) -> None:
        nonlocal left
        left -= error is None
        if not left:
            then()

    for handle in waiting:
        flush_queue.add(handle.partition, FlushWaiter(handle.last_offset, on_flushed))


def respond_when_durable(
    flush_queue: FlushQueue,
    written: Iterable[AppendHandle],
    answer: Message,
    refusal: Callable[[BrokerError], Message],
) -> Message | PendingResponse:
    """Return the response immediately, or a PendingResponse if the appends are not durable yet.

    If a flush fails, the response is `refusal(error)`.
    """
    pending = PendingResponse(blocks_pipeline=False)
    when_durable(
        flush_queue, written, lambda error: pending.resolve(answer if error is None else refusal(error))
    )
    return answer if pending.is_done else pending


def _must_wait(handle: AppendHandle) -> bool:
    topic, partition, last_offset = handle
    if partition.unflushed_record_count < topic.flush_messages:
        return False
    return last_offset >= partition.recovery_point


def _stored_batch(batch: memoryview) -> StoredBatch:
    header = read_header(batch)
    producer_id = header.producer_id if header.is_transactional else None
    if header.is_control:
        marker = end_marker(header, batch)
        return StoredBatch(header.base_offset, producer_id, None if marker is None else marker.is_commit, [])
    return StoredBatch(header.base_offset, producer_id, None, decode_records(batch))
