"""Reads the records of fetched batches as the rows that an application gets.

If `_fetched_records.c` is compiled (docs/internals/compiled.md), it does the same about ten times as fast.
Input that the C code does not accept is read again by the Python code, which accepts it or raises an
exception. So the same bytes are refused with and without C. Guard: tests/wire/test_wire_fetched_records.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import crc32c

from oncelog.types import Record, TimestampType, TopicPartition
from oncelog.wire.header import BatchHeader
from oncelog.wire.primitives import Buffer
from oncelog.wire.records import READING, SLICE_RECORDS, check_count, payload_records

try:
    import oncelog.wire._fetched_records as _c
except ImportError:  # `_fetched_records.c` is not compiled, or was compiled for another system
    _c = None  # type: ignore[assignment]

_TIMESTAMP_TYPES = tuple(TimestampType)
_MAX_OFFSET = 2**63 - 1
_Batch = TypeVar("_Batch", bound=tuple[int, BatchHeader, object])


def append_plain_batches(
    data: Buffer, batches: list[_Batch], batch_type: type[_Batch], verdict: object
) -> int:
    """Append `batch_type(position, header, verdict)` for each batch before the first control batch.

    Also stop at the end of the data, and before a batch that is malformed or incomplete. Return the position
    at which reading stopped. Without the C code, append nothing and return 0.
    """
    return 0 if _c is None else _c.plain_batches(data, 0, batches, BatchHeader, batch_type, verdict)


def append_whole_batches(
    rows: list[Record],
    data: Buffer,
    batches: list[_Batch],
    index: int,
    *,
    tp: TopicPartition,
    start_offset: int,
    max_records: int,
    verdict: object,
    verify: bool,
) -> tuple[int, int, int]:
    """Append the records of batches[index:] to `rows`, up to the first batch that the C code does not read.

    Each batch is (position in the data, header, read_committed verdict). Return the index of the first unread
    batch, the offset to continue from, and the size of the appended values in bytes.

    The C code stops at a batch whose verdict is not `verdict`, and at a compressed or damaged batch. It also
    stops at a batch that ends before the current offset, or that would make `rows` longer than `max_records`.
    Without the C code, this function reads nothing.
    """
    # The C code cannot represent an offset of more than 64 bits, which a damaged batch may cause.
    if _c is None or start_offset > _MAX_OFFSET:
        return index, start_offset, 0
    check = crc32c.crc32c if verify else None
    return _c.batch_rows(
        data, batches, index, rows, max_records, start_offset, verdict, check,
        Record, tp.topic, tp.partition, _TIMESTAMP_TYPES, READING,
    )  # fmt: skip


def value_bytes_of(rows: Iterable[Record]) -> int:
    """Return the total size of the records' values in bytes."""
    return sum([len(row.value) for row in rows if row.value])


def read_rows(payload: Buffer, header: BatchHeader, tp: TopicPartition, start_offset: int) -> list[Record]:
    """Return the records of a batch from `start_offset` on. `payload`: the batch's records, decompressed.

    Raises InvalidRecord for a malformed record, and if the header's record count is wrong.
    """
    check_count(header, payload)
    rows, _ = _read(payload, header, tp, start_offset, 0, 0, header.records_count)
    return rows


def iter_rows(
    payload: Buffer,
    header: BatchHeader,
    tp: TopicPartition,
    start_offset: int,
    slice_records: int = SLICE_RECORDS,
) -> Iterator[tuple[list[Record], bool]]:
    """Yield the records that `read_rows` returns, in parts: (records, True if this is the last part).

    Each part covers at most `slice_records` records of the batch. InvalidRecord for a malformed record is
    raised when its part is requested.
    """
    check_count(header, payload)
    # Convert to bytes once: `_read` would convert the whole payload for each part.
    data = payload if isinstance(payload, bytes) else bytes(payload)
    done, position, is_last = 0, 0, False
    while not is_last:
        size = min(slice_records, header.records_count - done)
        rows, position = _read(data, header, tp, start_offset, position, done, size)
        done += size
        is_last = done == header.records_count
        yield rows, is_last


def _read(
    payload: Buffer,
    header: BatchHeader,
    tp: TopicPartition,
    start_offset: int,
    position: int,
    first: int,
    count: int,
) -> tuple[list[Record], int]:
    """Read `count` records from `position`, and return the ones from `start_offset` on.

    Also return the position after all `count` records. `first`: number of records before `position` in the
    batch.
    """
    topic, partition = tp
    timestamp_type = header.timestamp_type
    if _c is not None:
        fixed_ms = header.max_timestamp_ms if timestamp_type is TimestampType.LOG_APPEND_TIME else None
        result = _c.rows(
            payload, position, count, header.base_offset, header.base_timestamp_ms, fixed_ms, start_offset,
            Record, topic, partition, timestamp_type, READING,
        )  # fmt: skip
        if result is not None and (first + count < header.records_count or result[1] == len(payload)):
            return result
    decoded, position = payload_records(bytes(payload), header, position, first, count, READING)
    if header.base_offset < start_offset:
        decoded = [record for record in decoded if record.offset >= start_offset]
    # This call takes half the time of Record(...), whose __new__ is a Python function that ends in this call.
    make = tuple.__new__
    return [
        make(Record, (topic, partition, offset, timestamp_ms, timestamp_type, key, value, headers))
        for offset, timestamp_ms, key, value, headers in decoded
    ], position
