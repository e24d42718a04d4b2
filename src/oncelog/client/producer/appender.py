"""Appends records to the open batches of a producer: the work of nearly every `send`.

`Appender` finds the open batch of a record. If there is none with room, the record takes the slow path: a
lookup of the topic, a wait for room, or a new batch (`ProducerCore.append`). `RecordBuffer` has the records
of one batch, and `OpenBatches` the open batch of each partition of a topic.

`_appender.c` has the same classes in C, and encodes a record when it is appended. Its tests compare it
with the Python classes, which run if `_appender.c` is not compiled. See docs/internals/compiled.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oncelog.client.producer.partitioner import positive_murmur2
from oncelog.client.producer.rows import RECORD_OVERHEAD_BYTES, Row, row_size_bytes
from oncelog.types import Header
from oncelog.wire.records import encode_after_space


class RecordBuffer:
    """The records of a batch that is not encoded yet.

    `size_bytes` is the estimated size of the batch, including `space_bytes` for the header.
    `callbacks` is the dict of the result's delivery callbacks, by the index of their record.
    """

    __slots__ = ("_callbacks", "_rows", "_space_bytes", "result", "size_bytes")

    def __init__(self, result: Any, callbacks: dict[int, Any], space_bytes: int) -> None:
        self.result = result
        self.size_bytes = space_bytes
        self._callbacks = callbacks
        self._space_bytes = space_bytes
        self._rows: list[Row] = []

    @property
    def count(self) -> int:
        """Return the number of records."""
        return len(self._rows)

    @property
    def base_timestamp_ms(self) -> int:
        """Return the timestamp of the first record; -1 without records."""
        return self._rows[0][0] if self._rows else -1

    @property
    def max_timestamp_ms(self) -> int:
        """Return the largest timestamp; -1 without records."""
        return max([row[0] for row in self._rows], default=-1)

    def append(self, row: Row, size_bytes: int, callback: Any) -> int:
        """Append a row, and return its index."""
        # No signal handler can run between `len` and the end of the append. If a handler raised there, a
        # callback would stay without its record, and be called for the next record. Guard:
        # test_an_interrupt_at_any_call_of_send_leaves_a_sound_producer.
        rows = self._rows
        index = len(rows)
        self.size_bytes += size_bytes
        if callback is not None:
            self._callbacks[index] = callback
        rows.append(row)
        return index

    def times(self) -> Sequence[int]:
        """Return the timestamps of the records."""
        return [row[0] for row in self._rows]

    def copy(self) -> bytearray:
        """Return a buffer that begins with space for the header, followed by the encoded records."""
        return encode_after_space(self._rows, self.base_timestamp_ms, self._space_bytes)  # type: ignore[arg-type]

    def take(self) -> bytearray:
        """Return the same as `copy`, and free the records. No record can be appended afterwards."""
        encoded = self.copy()
        self._rows = []
        return encoded


class OpenBatches:
    """The open batch of each partition of a topic.

    `buffers` has a RecordBuffer or None for each partition. Only the first `count` partitions exist. Records
    without a key go to the partition `sticky`, if it is not -1. With `hashes_keys`, murmur2 chooses the
    partition of a key. A batch takes no record that would make it larger than `max_batch_bytes`.
    """

    __slots__ = ("buffers", "count", "hashes_keys", "max_batch_bytes", "sticky")

    def __init__(self, hashes_keys: bool, max_batch_bytes: int) -> None:
        self.max_batch_bytes = max_batch_bytes
        self.buffers: list[RecordBuffer | None] = []
        self.count = 0
        self.sticky = -1
        self.hashes_keys = hashes_keys

    def choose(self, partition: object, key: bytes | None) -> RecordBuffer | None:
        """Return the buffer for a record, or None if the record needs the slow path
        (`ProducerCore.append`).
        """
        if partition is not None:
            if type(partition) is not int:
                return None
            number = partition
        elif key is None:
            number = self.sticky
        elif key and self.hashes_keys:
            number = positive_murmur2(key) % self.count
        else:
            return None
        return self.buffers[number] if 0 <= number < self.count else None


class Appender:
    """Appends records to the open batches of a producer, within batch.size and buffer.memory."""

    __slots__ = (
        "buffer_bytes",
        "buffered_bytes",
        "future_type",
        "is_changing",
        "lock",
        "topics",
        "wall_ns",
    )

    def __init__(self, buffer_bytes: int) -> None:
        self.topics: dict[str, OpenBatches] = {}
        self.buffered_bytes = 0
        self.buffer_bytes = buffer_bytes
        self.is_changing = False
        """True while a call that holds the lock is changing the core.

        Only a signal handler that interrupted the call can see True.
        """
        self.lock: Any = None
        self.wall_ns: Any = None
        self.future_type: Any = None

    def prepare(
        self, lock: Any, wall_ns: Callable[[], int], future_type: type, *, is_system_clock: bool = False
    ) -> None:
        """Set the producer's lock, the clock and the type of futures, for `send`.

        With `is_system_clock`, the C code reads the system's clock itself instead of calling `wall_ns`.
        """
        self.lock, self.wall_ns, self.future_type = lock, wall_ns, future_type

    def send(
        self,
        topic: object,
        value: object,
        key: object,
        partition: object,
        timestamp_ms: object,
        headers: object,
        callback: Any,
    ) -> Any:
        """Append a record of an application, and return its future.

        Return None if the record needs a check or the slow path (`ProducerCore.append`).
        """
        if (
            (value is not None and type(value) is not bytes)
            or (key is not None and type(key) is not bytes)
            or timestamp_ms is not None
            or headers
        ):
            return None
        row: Row = (self.wall_ns() // 1_000_000, key, value, ())
        size_bytes = RECORD_OVERHEAD_BYTES + (len(value) if value else 0) + (len(key) if key else 0)
        with self.lock:
            appended = self.append(topic, partition, row, size_bytes, callback)
        return None if appended is None else self.future_type(*appended)

    def append(
        self, topic: Any, partition: object, row: Row, size_bytes: int, callback: Any
    ) -> tuple[Any, int] | None:
        """Append a row to an open batch with room. The caller holds the lock.

        Return the batch's result and the record's index in it, or None if the row needs the slow path
        (`ProducerCore.append`).
        """
        if self.is_changing:
            return None
        self.is_changing = True
        try:
            batches = self.topics.get(topic)
            if batches is None or (buffer := batches.choose(partition, row[1])) is None:
                return None
            batch_bytes, buffered_bytes = buffer.size_bytes + size_bytes, self.buffered_bytes + size_bytes
            if batch_bytes > batches.max_batch_bytes or buffered_bytes > self.buffer_bytes:
                return None
            # Repeat the steps of `RecordBuffer.append` inline, because one more call would add 5 % to the
            # cost of `send`. Guard: test_the_fast_path_of_send_leaves_the_same_batches_as_append.
            result, rows = buffer.result, buffer._rows
            index = len(rows)
            buffer.size_bytes, self.buffered_bytes = batch_bytes, buffered_bytes
            if callback is not None:
                buffer._callbacks[index] = callback
            rows.append(row)
            return result, index
        finally:
            self.is_changing = False

    def append_many(
        self,
        topic: str,
        partition: object,
        values: Sequence[Any],
        keys: Sequence[Any] | None,
        timestamps_ms: list[int] | int,
        headers: tuple[Header, ...],
        first: int,
        last: int,
        parts: list[tuple[Any, int, int]],
    ) -> int:
        """Append the rows from number `first` to `last` - 1, until a row needs a check or
        `ProducerCore.append`.

        Return the number of the first row that was not appended. Add (result, index of the first record,
        record count) to `parts` for each batch. The caller holds the lock. `keys` and a list of timestamps
        may be shorter than `values`.
        """
        added: dict[int, tuple[Any, int, int]] = {}
        number = first
        try:
            while number < min(last, len(values)):
                value = values[number]
                key = keys[number] if keys is not None and number < len(keys) else None
                if not isinstance(value, bytes | None) or not isinstance(key, bytes | None):
                    break
                if not isinstance(timestamps_ms, list):
                    timestamp_ms = timestamps_ms
                elif number < len(timestamps_ms):
                    timestamp_ms = timestamps_ms[number]
                else:
                    break
                if type(timestamp_ms) is not int or not 0 <= timestamp_ms < 1 << 63:
                    break
                row: Row = (timestamp_ms, key, value, headers)
                appended = self.append(topic, partition, row, row_size_bytes(key, value, headers), None)
                if appended is None:
                    break
                number += 1
                result, index = appended
                part = added.get(id(result))
                added[id(result)] = (result, part[1], part[2] + 1) if part else (result, index, 1)
        finally:
            parts += added.values()
        return number


def first_unusual(values: Sequence[Any], keys: Sequence[Any], max_bytes: int) -> int:
    """Return the number of the first row that exceeds `max_bytes`, or has an invalid value or key.

    A valid value or key is bytes or None. Return the number of values if there is no such row. `keys` may be
    shorter than `values`.
    """
    for number, value in enumerate(values):
        key = keys[number] if number < len(keys) else None
        if not isinstance(value, bytes | None) or not isinstance(key, bytes | None):
            return number
        if len(value or b"") + len(key or b"") > max_bytes:
            return number
    return len(values)


def call_back(
    callbacks: dict[int, Any],
    metadata_type: type,
    topic: str,
    partition: int,
    base_offset: int | None,
    times: Sequence[int] | int,
    error: Exception | None,
) -> list[BaseException]:
    """Call the delivery callbacks of a batch in the order of their records, and return the exceptions that
    they raised.

    `callbacks` maps the index of a record to its callback. If `error` is None, each callback gets the
    metadata of its record. `base_offset` is None if the offsets are unknown.
    """
    raised: list[BaseException] = []
    for index, callback in callbacks.items():
        try:
            if error is not None:
                callback(None, error)
                continue
            offset = None if base_offset is None else base_offset + index
            timestamp_ms = times if isinstance(times, int) else times[index]
            callback(tuple.__new__(metadata_type, (topic, partition, offset, timestamp_ms)), None)
        except BaseException as exception:
            raised.append(exception)
    return raised


PYTHON_FORM = {
    part.__name__: part for part in (RecordBuffer, OpenBatches, Appender, call_back, first_unusual)
}
"""The Python classes and functions, for tests that compare them with the C code."""

if not TYPE_CHECKING:
    try:
        from oncelog.client.producer._appender import (
            Appender,
            OpenBatches,
            RecordBuffer,
            call_back,
            first_unusual,
        )
    except ImportError:  # `_appender.c` is not compiled, or was compiled for another system
        pass
