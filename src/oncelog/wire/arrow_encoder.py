"""Encodes Arrow columns as many record batches in one call.

NumPy writes the varints of all records into byte matrices. One Arrow call joins them with the keys, values
and headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.errors import MisuseError
from oncelog.types import Compression
from oncelog.wire.batch import seal_encoded
from oncelog.wire.header import HEADER_BYTES
from oncelog.wire.primitives import WritableBuffer
from oncelog.wire.records import encode_headers

_SPAN_BYTES = 4 << 20
"""Maximum number of bytes that are encoded at a time: the intermediate columns then fit into the processor's
cache.
"""
_MAX_OVERHEAD_BYTES = 36
"""Maximum size of a record in a batch, without its key, value and headers."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def arrow_to_batches(
    keys: pa.Array | pa.ChunkedArray | None,
    values: pa.Array | pa.ChunkedArray,
    timestamps_ms: pa.Array | pa.ChunkedArray | int,
    *,
    headers: pa.Array | pa.ChunkedArray | None = None,
    ends: Sequence[int] = (),
    max_batch_bytes: int,
    compression: Compression = Compression.NONE,
    level: int | None = None,
) -> list[tuple[WritableBuffer, int]]:
    """Return sealed batches in row order, each with its number of records. Producer and sequence are not set.

    Uncompressed batches are views of one buffer, without a copy.

    A batch is closed before its uncompressed size exceeds `max_batch_bytes` or 4 MiB. A larger record gets a
    separate batch. `ends` are ascending row numbers: a batch is also closed before each of these rows. Keys
    and values are binary or string; null stays null. Timestamps are int64 milliseconds, Arrow timestamps, or
    one number for all rows.

    Raises MisuseError for a null timestamp, columns of different lengths, or a column of more than 2 GiB.
    Raises ConfigError if the codec's library is missing.
    """
    rows = _Rows(keys, values, timestamps_ms, headers)
    batches: list[tuple[WritableBuffer, int]] = []
    for first, last in _spans(rows.sizes, _SPAN_BYTES):
        within = [end - first for end in ends if first < end < last]
        batches += _encode_span(rows.slice(first, last), within, max_batch_bytes, compression, level)
    return batches


class _Rows:
    """The checked and normalized input columns.

    `sizes`: an upper bound of each row's encoded size in bytes.
    """

    def __init__(self, keys: Any, values: Any, timestamps_ms: Any, headers: Any) -> None:
        self.values = _binary(values)
        count = len(self.values)
        self.keys = None if keys is None else _binary(keys)
        self.headers = None if headers is None else _encoded_headers(headers)
        self.timestamps = _milliseconds(timestamps_ms, count)
        for name, column in (("keys", self.keys), ("timestamps", self.timestamps), ("headers", self.headers)):
            if column is not None and len(column) != count:
                raise MisuseError(f"{count} values but {len(column)} {name}")
        self.sizes = _lengths(self.values) + _MAX_OVERHEAD_BYTES
        for column in (self.keys, self.headers):
            if column is not None:
                self.sizes = self.sizes + _lengths(column)

    def slice(self, first: int, last: int) -> _Rows:
        part = object.__new__(_Rows)
        part.values = self.values[first:last]
        part.keys = None if self.keys is None else self.keys[first:last]
        part.headers = None if self.headers is None else self.headers[first:last]
        part.timestamps, part.sizes = self.timestamps[first:last], self.sizes[first:last]
        return part


def _binary(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        raise MisuseError("a column of more than 2 GiB; send the table in smaller pieces")
    return column if column.type == pa.binary() else column.cast(pa.binary())


def _lengths(column: Any) -> _Ints:
    """Return the number of bytes in each row; 0 for null."""
    lengths = pc.binary_length(column)
    if lengths.null_count:
        lengths = pc.fill_null(lengths, 0)
    numbers: _Ints = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _filled(column: Any) -> Any:
    return pc.fill_null(column, b"") if column.null_count else column


def _milliseconds(timestamps_ms: Any, count: int) -> _Ints:
    if isinstance(timestamps_ms, int):
        return np.full(count, timestamps_ms, np.int64)
    if timestamps_ms.null_count:
        raise MisuseError(f"{timestamps_ms.null_count} timestamps are null; give every record one")
    if pa.types.is_timestamp(timestamps_ms.type):
        timestamps_ms = timestamps_ms.cast(pa.timestamp("ms", tz=timestamps_ms.type.tz), safe=False)
    result: _Ints = timestamps_ms.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return result


def _encoded_headers(headers: Any) -> Any:
    rows = headers.to_pylist()
    return pa.array(
        [encode_headers([(h["key"], h["value"]) for h in row or ()]) for row in rows], pa.binary()
    )


def _spans(sizes: _Ints, limit: int, ends: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Split the rows into ranges [first, last) of at most `limit` bytes. No range extends over a row number
    in `ends`.

    A range has at least one row, even if the row is larger.
    """
    total = np.cumsum(sizes)
    spans, first = [], 0
    for end in (*ends, len(sizes)):
        while first < end:
            before = int(total[first - 1]) if first else 0
            last = min(end, max(first + 1, int(np.searchsorted(total, before + limit, "right"))))
            spans.append((first, last))
            first = last
    return spans


def _encode_span(
    rows: _Rows, ends: Sequence[int], max_batch_bytes: int, compression: Compression, level: int | None
) -> list[tuple[WritableBuffer, int]]:
    spans = _spans(rows.sizes, max_batch_bytes - HEADER_BYTES, ends)
    firsts = np.array([first for first, _ in spans])
    counts = np.array([last - first for first, last in spans])
    joined = _join_records(rows, firsts, counts)
    offsets = np.frombuffer(joined.buffers()[1], np.int32)[joined.offset :]
    data = memoryview(joined.buffers()[2]).cast("B")
    base, largest = rows.timestamps[firsts].tolist(), np.maximum.reduceat(rows.timestamps, firsts).tolist()
    batches: list[tuple[WritableBuffer, int]] = []
    for (first, last), *times in zip(spans, base, largest, strict=True):
        batch = data[offsets[first] : offsets[last]]
        sealed = seal_encoded(batch, last - first, *times, compression=compression, level=level)
        batches.append((sealed, last - first))
    return batches


def _join_records(rows: _Rows, firsts: _Ints, counts: _Ints) -> Any:
    """Return one binary array with the bytes of each record.

    The first record of each batch is preceded by free space for the batch header.
    """
    room = _room_for_headers(len(rows.values), firsts)
    time_delta = rows.timestamps - np.repeat(rows.timestamps[firsts], counts)
    offset_delta = np.arange(len(rows.values)) - np.repeat(firsts, counts)
    value_size, value_varint = _sizes_of(rows.values)
    times, offsets = _Varints(time_delta), _Varints(offset_delta)
    length = 1 + times.size + offsets.size + value_varint.size + value_size
    length += 1 if rows.headers is None else _lengths(rows.headers)
    zero = np.zeros((len(offset_delta), 1), np.uint8)
    attributes = _Varints.fixed(zero)
    tail = pa.scalar(b"\0", pa.binary()) if rows.headers is None else rows.headers
    values = _filled(rows.values)
    end = pa.scalar(b"", pa.binary())
    if rows.keys is None:
        no_key = _Varints.fixed(zero + 1)
        head = _lay_out(_Varints(length + 1), attributes, times, offsets, no_key, value_varint)
        return pc.binary_join_element_wise(room, head, values, tail, end)
    key_size, key_varint = _sizes_of(rows.keys)
    length += key_varint.size + key_size
    head = _lay_out(_Varints(length), attributes, times, offsets, key_varint)
    keys = _filled(rows.keys)
    return pc.binary_join_element_wise(room, head, keys, _lay_out(value_varint), values, tail, end)


def _room_for_headers(count: int, firsts: _Ints) -> Any:
    ends = np.zeros(count + 1, np.int32)
    ends[firsts + 1] = HEADER_BYTES
    offsets = pa.py_buffer(np.cumsum(ends, dtype=np.int32))
    room = pa.py_buffer(bytes(HEADER_BYTES * len(firsts)))
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, offsets, room])


class _Varints:
    """A column of signed varints as a byte matrix. Only the first `size` bytes of each row are used."""

    def __init__(self, numbers: _Ints) -> None:
        raw = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
        width = max(1, (int(raw.max()).bit_length() + 6) // 7)
        self.size = np.ones(len(raw), np.int64)
        if width == 1:
            self.bytes = raw[:, None].astype(np.uint8)
            self.is_used: np.ndarray[Any, np.dtype[np.bool_]] = np.ones((len(raw), 1), np.bool_)
            return
        for more in range(1, width):
            self.size += raw >= np.uint64(1 << 7 * more)
        shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
        self.bytes = (raw[:, None] >> shifts & np.uint64(127)).astype(np.uint8)
        self.is_used = np.arange(width) < self.size[:, None]
        self.bytes[:, :-1] |= self.is_used[:, 1:].astype(np.uint8) << 7

    @classmethod
    def fixed(cls, column: _Bytes) -> _Varints:
        """Wrap a column that already contains encoded varints of one byte per row."""
        varints = object.__new__(cls)
        varints.size, varints.bytes = np.ones(len(column), np.int64), column
        varints.is_used = np.ones(column.shape, np.bool_)
        return varints


def _sizes_of(column: Any) -> tuple[_Ints, _Varints]:
    """Return the number of bytes in each row (0 for null), and that number as a varint (-1 for null)."""
    lengths = _lengths(column)
    if not column.null_count:
        return lengths, _Varints(lengths)
    is_null = pc.is_null(column).to_numpy(zero_copy_only=False)
    return lengths, _Varints(np.where(is_null, -1, lengths))


def _lay_out(*columns: _Varints) -> Any:
    """Join the used bytes of all columns row by row. Return them as a binary array."""
    matrix = np.hstack([column.bytes for column in columns])
    is_used = np.hstack([column.is_used for column in columns])
    offsets = np.zeros(len(matrix) + 1, np.int32)
    np.cumsum(sum(column.size for column in columns), out=offsets[1:])
    flat = matrix[is_used]
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(matrix), [None, pa.py_buffer(offsets), pa.py_buffer(flat)]
    )
