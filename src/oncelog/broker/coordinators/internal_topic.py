"""A coordinator's memory as a topic: what is decided is appended before it holds, and read back at start.

A coordinator that cannot write is none: clients get NOT_COORDINATOR, as Kafka's, which all of them retry.

An append holds as soon as it stands in the log; answers and what others write because of it wait until it
is durable. That is enough, for all records of one key are in one partition: what was appended later is not
durable before.

`__transaction_state` and `__consumer_offsets` are such topics: compacted, in Kafka's record formats, a key
always in the same partition. One node leads all of them, so it coordinates everything.
Source: Kafka's TransactionStateManager, CoordinatorRuntime; transactions, section 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
)
from oncelog.log.partition import Partition
from oncelog.log.producers import end_marker
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import build_batch, iter_batches, read_header
from oncelog.wire.message import Message
from oncelog.wire.records import DecodedRecord, NewRecord, decode_records

Then = Callable[[BrokerError | None], None]
"""Told once: None when what was appended is as durable as its topic promises, else why it is not."""


class Written(NamedTuple):
    """An append whose durability may be waited for."""

    topic: Topic
    partition: Partition
    last_offset: int


class Damage(NamedTuple):
    """The first place of a partition that could not be read back; `file` as a human finds it."""

    topic_partition: TopicPartition
    file: str
    offset: int
    reason: str


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
    """One such topic; made when first needed, with `partition_count` partitions that never change.

    `note_stored` gets each append. `max_record_bytes` returns the limit of a record when it is appended.
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
        """Partitions that could not be read back: until a start finds them whole, nobody coordinates them."""

        self._reserved: set[str] = set()

    @property
    def topic(self) -> Topic | None:
        """None while nothing was ever written."""
        return self._topics.get(self.name)

    @property
    def partition_count(self) -> int:
        """As many as there are; before the topic is made, as many as there will be."""
        topic = self.topic
        return len(topic.partitions) if topic else self._partition_count

    def ensure(self, now_ms: int) -> Topic:
        """The topic, made if need be. Raises NotCoordinator."""
        topic = self.topic
        if topic is not None:
            return topic
        try:
            return self._topics.create(self.name, self._partition_count, {}, now_ms)
        except (StorageError, KafkaStorageError) as error:
            raise NotCoordinator(f"{self.name} cannot be made: {error}") from error

    def partition_of(self, key: str) -> int:
        """Where records of a key belong: a group id, a transactional id."""
        return partition_for(key, self.partition_count)

    def check(self, key: str) -> None:
        """Raises NotCoordinator for a key that is reserved, or whose partition could not be read back."""
        if key in self._reserved:
            raise NotCoordinator(f"{key!r} is being deleted; try again")
        if self.damaged:
            self.check_partition(self.partition_of(key))

    @contextmanager
    def reserved(self, key: str) -> Iterator[None]:
        """Let only the caller use a key, over several steps: `check` refuses all others, who try again."""
        self._reserved.add(key)
        try:
            yield
        finally:
            self._reserved.discard(key)

    def check_partition(self, index: int) -> None:
        """Raises NotCoordinator for a partition that could not be read back."""
        damage = self.damaged.get(index) if self.damaged else None
        if damage is not None:
            raise NotCoordinator(
                f"{damage.topic_partition} is damaged at offset {damage.offset}; see docs/operations.md"
            )

    def append(self, index: int, records: Sequence[tuple[bytes, bytes | None]], now_ms: int) -> Written:
        """Append (key, value or tombstone) as one batch.

        Raises NotCoordinator, MessageTooLarge for a record above the largest; nothing holds then.
        """
        # A tombstone always fits: what it ends fitted before.
        largest = max((len(key) + len(value) for key, value in records if value is not None), default=0)
        limit = largest if self._max_record_bytes is None else self._max_record_bytes()
        if largest > limit:
            raise MessageTooLarge(f"a record of {self.name} may take {limit} bytes, this one takes {largest}")
        made = [NewRecord(now_ms, key, value) for key, value in records]
        return self.append_batch(index, build_batch(made), now_ms)

    def append_batch(self, index: int, batch: bytearray, now_ms: int) -> Written:
        """Append a batch that the coordinator built, of a transaction for instance.

        Raises what the append rule says of it (InvalidProducerEpoch), NotCoordinator.
        """
        topic = self.ensure(now_ms)
        self.check_partition(index)
        partition = topic.partition(index)
        try:
            appended = partition.append(memoryview(batch), origin=Origin.COORDINATOR, now_ms=now_ms)
        except KafkaStorageError as error:
            raise NotCoordinator(str(error)) from error
        self._note_stored(partition, len(batch))
        return Written(topic, partition, appended.last_offset)

    def newest(self, index: int) -> Written:
        """The last append to a partition: what was decided before, and may not be durable yet."""
        topic = self.topic
        assert topic is not None
        partition = topic.partition(index)
        return Written(topic, partition, partition.log_end_offset - 1)

    def ends(self) -> dict[int, int]:
        """Return where the log ends, for each partition; nothing while the topic is not made."""
        topic = self.topic
        return {} if topic is None else {i: p.log_end_offset for i, p in enumerate(topic.partitions)}

    def close_long_segments(self, now_ms: int) -> None:
        """Have what is as long as what it would be compacted into ready for compaction (row T2)."""
        topic = self.topic
        for partition in topic.partitions if topic else ():
            with suppress(KafkaStorageError):  # whoever appends next is told
                partition.cleaner.roll_for_compaction(now_ms)

    def replay(self, index: int) -> Iterator[StoredBatch]:
        """Every batch of a partition in the order it was appended.

        Raises CorruptMessage, KafkaStorageError.
        """
        topic = self.topic
        return iter(() if topic is None else _Replay(topic.partition(index)))

    def load(self, read: Callable[[int, Iterator[StoredBatch]], None], forget: Callable[[int], None]) -> None:
        """Have every partition read; one that cannot be read whole is forgotten and `damaged`.

        Nothing of it is kept: an older state of a key would be taken for the newest one.
        Source: Kafka's CoordinatorRuntime, whose coordinator of such a partition fails.
        """
        topic = self.topic
        for index, partition in enumerate(topic.partitions if topic else ()):
            batches = _Replay(partition)
            try:
                read(index, iter(batches))
            except (BrokerError, PeerError, StorageError, ValueError) as error:
                forget(index)
                offset = error.offset if isinstance(error, UnreadableRecord) else batches.offset
                where = TopicPartition(self.name, index)
                self.damaged[index] = Damage(where, partition.file_at(offset), offset, str(error))


class UnreadableRecord(StorageError):
    """A stored record that means nothing to us, met after its batch was passed."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"the record at offset {offset}: {reason}")
        self.offset = offset


class _Replay:
    """Every batch of a partition in the order it was appended. `offset`: of the one that is looked at."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.offset = partition.log_start_offset

    def __iter__(self) -> Iterator[StoredBatch]:
        """Raises CorruptMessage, KafkaStorageError."""
        partition = self._partition
        offset = partition.log_start_offset
        while offset < partition.log_end_offset:
            found = partition.read(offset, partition.config.limits.coordinator_read_bytes)
            data = memoryview(found.records)
            for position, header in iter_batches(data):
                self.offset = header.base_offset
                yield _stored_batch(data[position : position + header.size_bytes])
                self.offset = header.last_offset + 1
            if found.next_offset <= offset:
                end = partition.log_end_offset
                raise CorruptMessage(f"no batch is stored from offset {offset} on, the log ends at {end}")
            offset = found.next_offset


def must_wait(written: Iterable[Written]) -> bool:
    """Whether any append is not yet as durable as its topic's flush.messages asks."""
    return any(_waits(each) for each in written)


def when_durable(flush_queue: FlushQueue, written: Iterable[Written], then: Then) -> None:
    """Call `then` once every append is as durable as its topic's flush.messages asks: at once, mostly.

    What cannot be made durable is NotCoordinator of a coordinator's records, else KafkaStorageError.
    """
    waiting = [each for each in written if _waits(each)]
    if not waiting:
        then(None)
        return
    left, first_error = len(waiting), None
    failure = NotCoordinator if all(each.topic.is_internal for each in waiting) else KafkaStorageError

    def on_flushed(error: Exception | None) -> None:
        nonlocal left, first_error
        left -= 1
        first_error = first_error or error
        if not left:
            then(None if first_error is None else failure(f"not flushed: {first_error}"))

    for each in waiting:
        flush_queue.add(each.partition, FlushWaiter(each.last_offset, on_flushed))


def on_disk(flush_queue: FlushQueue, written: Iterable[Written], then: Callable[[], None]) -> None:
    """Call `then` once every append is synced, whatever flush.messages asks; never if that fails."""
    waiting = [each for each in written if each.last_offset >= each.partition.recovery_point]
    left = len(waiting)
    if not waiting:
        then()

    def on_flushed(error: Exception | None) -> None:
        nonlocal left
        left -= error is None
        if not left:
            then()

    for each in waiting:
        flush_queue.add(each.partition, FlushWaiter(each.last_offset, on_flushed))


def answer_when_durable(
    flush_queue: FlushQueue,
    written: Iterable[Written],
    answer: Message,
    refusal: Callable[[BrokerError], Message],
) -> Message | PendingResponse:
    """Return the answer, or a PendingResponse until the appends are durable.

    `refusal` makes the answer of a failure.
    """
    pending = PendingResponse(blocks_pipeline=False)
    when_durable(
        flush_queue, written, lambda error: pending.resolve(answer if error is None else refusal(error))
    )
    return answer if pending.is_done else pending


def _waits(written: Written) -> bool:
    topic, partition, last_offset = written
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
