"""A producer's batch of records, and the delivery result that its records share.

In a batch, a record is a row (a plain tuple) or encoded bytes. A record's future refers to the result of the
batch and to the record's index in the batch. If a batch is split, its result refers to the results of the
child batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from oncelog.client.producer.appender import RecordBuffer, call_back
from oncelog.client.producer.rows import row_size_bytes
from oncelog.errors import OncelogError, OutcomeUnknown
from oncelog.rules.idempotence.error_policy import ErrorClass
from oncelog.rules.idempotence.sequencer import SequencedBatch
from oncelog.types import Compression, RecordMetadata, TopicPartition
from oncelog.wire.batch import seal_encoded
from oncelog.wire.header import HEADER_BYTES, TRANSACTIONAL_BIT, assign_producer
from oncelog.wire.primitives import WritableBuffer
from oncelog.wire.records import NewRecord, iter_records

Callback = Callable[[RecordMetadata | None, Exception | None], object]
Listener = Callable[[], object]


class OffsetRange(NamedTuple):
    """Consecutive records of one partition. Offsets are None if the broker reported none, as with acks=0."""

    topic: str
    partition: int
    base_offset: int | None
    last_offset: int | None
    record_count: int


class BatchResult:
    """The delivery result of a batch's records.

    The core completes it once. Then `notify` calls the callbacks. After a split, `children` has the index of
    each child's first record, and the children's results.
    """

    __slots__ = (
        "_listeners",
        "base_offset",
        "callbacks",
        "children",
        "error",
        "is_done",
        "log_time_ms",
        "times",
        "tp",
    )

    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self.is_done = False
        self.error: Exception | None = None
        self.base_offset: int | None = None
        self.log_time_ms: int | None = None
        self.times: Sequence[int] | int = 0
        """The timestamp of each record in ms, or a single int for all records."""
        self.callbacks: dict[int, Callback] = {}
        """Delivery callbacks by the index of their record.

        A dict is used, because no signal handler can run during the assignment of an item.
        """
        self.children: tuple[list[int], list[BatchResult]] | None = None
        self._listeners: list[Listener] = []

    def complete(self, base_offset: int | None, log_time_ms: int | None, error: Exception | None) -> None:
        """Set the result. With `log_time_ms` None, the records keep the producer's timestamps."""
        self.base_offset, self.log_time_ms, self.error = base_offset, log_time_ms, error
        self.is_done = True

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` when the result is complete, or now if it is complete already.

        This method calls no listeners of other threads: if a signal handler raised here, those listeners
        would be lost, and their threads would wait without end. Guard:
        test_an_interrupt_at_any_call_of_a_waiting_method_blocks_nobody.
        """
        self._listeners.append(listener)
        if self.is_done:
            try:
                self._listeners.remove(listener)
            except ValueError:  # `notify` has already removed the listener, and calls it
                return
            listener()

    def notify(self) -> Iterator[BaseException]:
        """Call the callbacks and listeners of a complete result, and yield the exceptions that they raise.

        None of these exceptions ends the producer, not even SystemExit or CancelledError.
        """
        callbacks, self.callbacks = self.callbacks, {}
        if callbacks:  # there are none if the batch was split: its children have them
            times = self.times if self.log_time_ms is None else self.log_time_ms
            yield from call_back(callbacks, RecordMetadata, *self.tp, self.base_offset, times, self.error)
        yield from self._call_listeners()

    def _call_listeners(self) -> Iterator[BaseException]:
        while self._listeners:
            try:
                listener = self._listeners.pop(0)
            except IndexError:  # another thread took the last listener
                return
            try:
                listener()
            except BaseException as raised:
                yield raised

    def _leaf(self, index: int) -> tuple[BatchResult, int]:
        """Return the result of a record's batch after all splits, and the record's index in that batch."""
        result = self
        while result.children is not None:
            starts, results = result.children
            child = bisect_right(starts, index) - 1
            result, index = results[child], index - starts[child]
        return result, index

    def error_of(self, index: int) -> Exception | None:
        """Return the error of a failed record; None for a delivered record."""
        return self._leaf(index)[0].error

    def metadata(self, index: int) -> RecordMetadata:
        """Return partition, offset and timestamp of a delivered record."""
        result = self
        if self.children is not None:
            result, index = self._leaf(index)
        offset = None if result.base_offset is None else result.base_offset + index
        if result.log_time_ms is not None:
            timestamp_ms = result.log_time_ms
        else:
            timestamp_ms = result.times if isinstance(result.times, int) else result.times[index]
        topic, partition = result.tp
        return tuple.__new__(RecordMetadata, (topic, partition, offset, timestamp_ms))

    def ranges(self, first: int, count: int) -> Iterator[OffsetRange | tuple[int, Exception]]:
        """Yield the results of `count` records from index `first` on.

        A result is the offset range of delivered records, or (record count, error) of failed records.
        """
        while count > 0:
            result, index = self._leaf(first)
            part = min(count, self._leaf_end(first) - first)
            if result.error is not None:
                yield part, result.error
            else:
                base = None if result.base_offset is None else result.base_offset + index
                last = None if base is None else base + part - 1
                yield OffsetRange(result.tp.topic, result.tp.partition, base, last, part)
            first, count = first + part, count - part

    def _leaf_end(self, index: int) -> int:
        """Return the index after the last record that shares a batch with the record at `index` after all
        splits.
        """
        end = 1 << 62
        result: BatchResult = self
        shift = 0
        while result.children is not None:
            starts, results = result.children
            child = bisect_right(starts, index - shift) - 1
            if child + 1 < len(starts):
                end = min(end, shift + starts[child + 1])
            shift += starts[child]
            result = results[child]
        return end


class ProducerBatch(SequencedBatch):
    """Records of one partition: in a buffer until the batch is encoded, then bytes with a header.

    Times are milliseconds of the monotonic clock.
    """

    __slots__ = (
        "attempt_count", "buffer", "charged_bytes", "created_ms", "data", "encoded_identity",
        "incomplete_children", "is_completed", "is_queued", "last_error", "parent", "result",
        "retry_at_ms", "sent_ms", "serial", "tp",
    )  # fmt: skip

    def __init__(self, tp: TopicPartition, created_ms: float, serial: int) -> None:
        super().__init__(0)
        self.tp = tp
        self.created_ms = created_ms
        self.serial = serial
        """Number of the batch, in the order in which the producer began its batches.

        Child batches have the serial of their parent.
        """
        self.charged_bytes = 0
        """The part of buffer.memory that the batch occupies, in bytes. It is set when the batch is sealed."""
        self.result = BatchResult(tp)
        self.buffer = RecordBuffer(self.result, self.result.callbacks, HEADER_BYTES)
        """The records of the batch, until the batch is encoded."""
        self.attempt_count = 0
        """Number of times that the batch was sent."""
        self.retry_at_ms = 0.0
        self.sent_ms: float | None = None
        self.last_error: OncelogError | None = None
        """The error of the last attempt that failed."""
        self.data: WritableBuffer | None = None
        self.encoded_identity: Any = None
        """The producer id, epoch and base sequence in `data`; None before encoding."""
        self.parent: ProducerBatch | None = None
        self.incomplete_children = 0
        self.is_queued = False
        """True while the current attempt waits for a connection: no byte of it was sent yet."""
        self.is_completed = False

    @property
    def size_bytes(self) -> int:
        """Return the estimated size of the batch before compression, in bytes: see `row_size_bytes`."""
        return self.buffer.size_bytes

    def seal(self) -> None:
        """Fix the number of records. No record may be added afterwards. Further calls change nothing."""
        if self.data is None:
            self.record_count = self.buffer.count
            self.charged_bytes = self.size_bytes - HEADER_BYTES

    def encode(
        self, compression: Compression, level: int | None, is_transactional: bool = False
    ) -> WritableBuffer:
        """Return the batch's bytes with its current producer id, epoch and sequence.

        The first call encodes the records. Later calls only write the current producer id, epoch and sequence
        into the header.
        """
        numbers = (self.identity, self.base_sequence)
        if self.data is None:
            count = self.buffer.count
            base_ms, max_ms = self.buffer.base_timestamp_ms, self.buffer.max_timestamp_ms
            self.result.times = self.buffer.times()
            self.data = seal_encoded(
                self.buffer.take(),
                count,
                base_ms,
                max_ms,
                compression=compression,
                level=level,
                attributes=TRANSACTIONAL_BIT if is_transactional else 0,
                producer_id=self.identity.producer_id if self.identity else None,
                producer_epoch=self.identity.producer_epoch if self.identity else None,
                base_sequence=self.base_sequence,
            )
        elif self.identity is not None and self.encoded_identity != numbers:
            assign_producer(self.data, *self.identity, self.base_sequence, is_transactional)
        self.encoded_identity = numbers
        return self.data

    def decoded_rows(self) -> list[NewRecord]:
        """Return the records, decoded from the bytes.

        Their number has no limit: see test_a_batch_of_more_records_than_a_reader_takes_at_once_is_split.
        """
        data = self.data
        if data is None:
            count, base_ms = self.buffer.count, self.buffer.base_timestamp_ms
            data = seal_encoded(self.buffer.copy(), count, base_ms, self.buffer.max_timestamp_ms)
        return [
            NewRecord(record.timestamp_ms, record.key, record.value, record.headers)
            for records in iter_records(data, verify=False)
            for record in records
        ]


def indeterminate_error(batch: ProducerBatch, error: OncelogError) -> OutcomeUnknown:
    """Return the error of a batch that is not sent again but may be stored.

    `error` is the last error received.
    """
    unknown = OutcomeUnknown(
        f"{batch.record_count} records for {batch.tp} failed; the broker may have stored them: {error}", error
    )
    unknown.reaction = ErrorClass.ABORTABLE.value
    return unknown


def split(batch: ProducerBatch) -> list[ProducerBatch]:
    """Split a batch of more than one record into two child batches of about the same size in bytes.

    The futures and callbacks of the records then belong to the child batches.
    """
    rows = batch.decoded_rows()
    # Split into halves, and split the halves again if necessary. One child per record would take thousands of
    # round trips. Guard: test_a_batch_above_the_topics_limit_is_sent_in_few_requests.
    half = _index_of_half([row_size_bytes(row.key, row.value, row.headers) for row in rows])
    children = [_child_batch(batch, rows[:half]), _child_batch(batch, rows[half:])]
    batch.result.children = [0, half], [child.result for child in children]
    for index, callback in batch.result.callbacks.items():
        child, start = (children[0], 0) if index < half else (children[1], half)
        child.result.callbacks[index - start] = callback
    batch.result.callbacks = {}
    batch.incomplete_children = len(children)
    return children


def _index_of_half(sizes: list[int]) -> int:
    """Return the index of the record at which the second half of the bytes begins.

    Each half has at least one record.
    """
    sums = list(accumulate(sizes))
    return min(max(bisect_right(sums, sums[-1] // 2), 1), len(sizes) - 1)


def _child_batch(batch: ProducerBatch, rows: list[NewRecord]) -> ProducerBatch:
    child = ProducerBatch(batch.tp, batch.created_ms, batch.serial)
    for row in rows:
        child.buffer.append(row, row_size_bytes(row.key, row.value, row.headers), None)
    child.attempt_count = batch.attempt_count - 1  # an attempt that MESSAGE_TOO_LARGE refused does not count
    # The children have the parent's sequences. So if the parent was stored, the children's records are
    # stored, and the broker refuses each child with OUT_OF_ORDER_SEQUENCE_NUMBER.
    child.may_be_stored = batch.may_be_stored
    child.parent = batch
    child.seal()
    return child
