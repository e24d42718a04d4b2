"""Record batches as Arrow columns: many batches decoded at once, and Arrow columns cut into batches.

NumPy costs about 0.1 ms a call however little it does, so the unit of work is a whole fetch response
or table, never one small batch. Decoding chases the record lengths in one Python loop (each length
says where the next record is), reads all other numbers as columns, and gathers keys and values from
one BinaryArray laid over the response. Encoding lays out all numbers in a byte matrix and joins them
with the keys and values in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.errors import InvalidRecord, MisuseError
from oncelog.types import Compression
from oncelog.wire.batch import seal
from oncelog.wire.header import HEADER_BYTES, BatchHeader, iter_batches
from oncelog.wire.primitives import Buffer
from oncelog.wire.records import check_count, encode_headers, parse_headers, payload_of, read_varint

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
    ]
)
_MAX_TOTAL_BYTES = 1 << 30
"""What all batches of one call may become; Arrow's own limit for a binary column is twice that."""
_MAX_TIMESTAMP_MS = (2**63 - 1) // 1000
_SPAN_BYTES = 64 << 20
"""How much is encoded at a time: bounds the memory for intermediate columns."""
_MAX_OVERHEAD_BYTES = 36
"""Of a record in a batch, besides key, value and headers."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def fetch_schema(include_headers: bool = False) -> pa.Schema:
    """The columns of `batches_to_arrow`, named as Spark's Kafka source names them."""
    return _SCHEMA.append(pa.field("headers", HEADERS_TYPE)) if include_headers else _SCHEMA


def batches_to_arrow(
    buffer: Buffer,
    *,
    topic: str,
    partition: int,
    start_offset: int | None = None,
    end_offset: int | None = None,
    include_headers: bool = False,
    skip: Callable[[BatchHeader], bool] | None = None,
    verify: bool = True,
) -> pa.RecordBatch:
    """The records of all whole batches in `buffer`, as columns.

    Control batches are left out, as are batches for which `skip` says True and records outside
    [start_offset, end_offset) (None: no limit). Without headers a record's list is null. A timestamp
    that does not fit microseconds is null. Raises what `decode_records` raises.
    """
    picked = _Picked(buffer)
    for position, header in iter_batches(buffer):
        if header.is_control or header.records_count == 0 or (skip is not None and skip(header)):
            continue
        if start_offset is not None and header.last_offset < start_offset:
            continue
        if end_offset is not None and header.base_offset >= end_offset:
            continue
        picked.add(position, header, verify)
    if not picked.headers:
        return _empty(include_headers)
    try:
        return _decode(picked, topic, partition, start_offset, end_offset, include_headers)
    except IndexError as error:
        raise InvalidRecord(f"a batch of {topic}-{partition} holds a record cut short") from error
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"a header name of {topic}-{partition} is not UTF-8: {error}") from error


class _Picked:
    """The batches to decode, and one buffer with all their records.

    While no batch is compressed that buffer is the response itself, otherwise the payloads joined.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.headers: list[BatchHeader] = []
        self.positions: list[int] = []
        self.payloads: list[Buffer] = []
        self.is_compressed = False
        self.budget = _MAX_TOTAL_BYTES

    def add(self, position: int, header: BatchHeader, verify: bool) -> None:
        self.headers.append(header)
        self.positions.append(position + HEADER_BYTES)
        payload = payload_of(self.buffer, position, header, verify, self.budget)
        check_count(header, payload)
        self.payloads.append(payload)
        self.budget -= len(payload)
        self.is_compressed |= header.compression is not Compression.NONE

    def joined(self) -> tuple[Buffer, list[int]]:
        """The buffer, and where each batch's records begin in it."""
        if not self.is_compressed:
            return self.buffer, self.positions
        ends = np.cumsum([len(payload) for payload in self.payloads])
        return b"".join(self.payloads), [0, *ends[:-1].tolist()]


def _empty(include_headers: bool) -> pa.RecordBatch:
    schema = fetch_schema(include_headers)
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _decode(
    picked: _Picked,
    topic: str,
    partition: int,
    start_offset: int | None,
    end_offset: int | None,
    include_headers: bool,
) -> pa.RecordBatch:
    data, begins = picked.joined()
    if len(data) > 2 * _MAX_TOTAL_BYTES - 1:
        raise MisuseError("more than 2 GiB of record batches at once; decode them in smaller pieces")
    heads = _chase(data, begins, picked)
    columns = _Columns(np.frombuffer(data, np.uint8), heads, picked.headers)
    if start_offset is not None or end_offset is not None:
        columns.keep(start_offset, end_offset)
    count = len(columns.offset)
    arrays = [
        _gather(data, columns.key_at, columns.key_size),
        _gather(data, columns.value_at, columns.value_size),
        pa.repeat(pa.scalar(topic), count),
        pa.array(np.full(count, partition, np.int32)),
        pa.array(columns.offset),
        _timestamps(columns.timestamp_ms),
        pa.array(columns.timestamp_type),
    ]
    if include_headers:
        arrays.append(_headers(bytes(data), columns))
    return pa.RecordBatch.from_arrays(arrays, schema=fetch_schema(include_headers))


def _chase(data: Buffer, begins: list[int], picked: _Picked) -> _Ints:
    """Where each record's length stands: the one loop over records."""
    heads: list[int] = []
    append = heads.append
    for position, header, payload in zip(begins, picked.headers, picked.payloads, strict=True):
        stop = position + len(payload)
        for _ in range(header.records_count):
            append(position)
            size = data[position]
            if size < 128:
                position += 1 + (size >> 1)
                continue
            second = data[position + 1]
            if second < 128:
                position += 2 + ((size & 127 | second << 7) >> 1)
            else:
                size, position = read_varint(data, position)
                if size < 0:
                    raise InvalidRecord(f"a record's length is {size}")
                position += size
        if position != stop:
            raise InvalidRecord(
                f"the batch at offset {header.base_offset} says {header.records_count} records, "
                f"which end {stop - position} bytes before it does"
            )
    return np.array(heads, np.int64)


def _read_varints(data: _Bytes, at: _Ints) -> tuple[_Ints, _Ints]:
    """The signed varints at the positions, and the positions after them."""
    first = data[at]
    raw = (first & 127).astype(np.uint64)
    after = at + 1
    more = np.flatnonzero(first > 127)
    shift = 7
    while len(more):
        if shift > 63:
            raise InvalidRecord("a record holds a number of more than 10 bytes")
        byte = data[after[more]]
        raw[more] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        after[more] += 1
        more = more[byte > 127]
        shift += 7
    one = np.uint64(1)
    return (raw >> one).view(np.int64) ^ -(raw & one).view(np.int64), after


class _Columns:
    """Every number of the records as a column; `*_at` are positions, `*_size` -1 is null."""

    def __init__(self, data: _Bytes, heads: _Ints, headers: list[BatchHeader]) -> None:
        counts = np.array([header.records_count for header in headers])
        length, start = _read_varints(data, heads)
        self.end = start + length
        time_delta, at = _read_varints(data, start + 1)
        offset_delta, at = _read_varints(data, at)
        self.key_size, self.key_at = _read_varints(data, at)
        self.value_size, self.value_at = _read_varints(data, self.key_at + np.maximum(self.key_size, 0))
        self.headers_at = self.value_at + np.maximum(self.value_size, 0)
        self.headers_count, after = _read_varints(data, self.headers_at)
        self._check(length, after)
        self.offset = np.repeat([header.base_offset for header in headers], counts) + offset_delta
        by_broker = np.array([header.timestamp_type for header in headers], np.int32)
        base = [h.max_timestamp_ms if h.timestamp_type else h.base_timestamp_ms for h in headers]
        self.timestamp_type = np.repeat(by_broker, counts)
        self.timestamp_ms = np.repeat(base, counts) + np.where(self.timestamp_type, 0, time_delta)

    def _check(self, length: _Ints, after: _Ints) -> None:
        """Sizes must be legal and every record must be filled exactly (headers: not beyond it)."""
        is_good = (length >= 0) & (self.key_size >= -1) & (self.value_size >= -1) & (self.headers_count >= 0)
        is_good &= np.where(self.headers_count == 0, after == self.end, after < self.end)
        if not is_good.all():
            index = int(np.argmin(is_good))
            raise InvalidRecord(f"record {index} of the fetch does not fill its length exactly")

    def keep(self, start_offset: int | None, end_offset: int | None) -> None:
        """Drop the records outside [start_offset, end_offset)."""
        inside = np.ones(len(self.offset), np.bool_)
        if start_offset is not None:
            inside &= self.offset >= start_offset
        if end_offset is not None:
            inside &= self.offset < end_offset
        if not inside.all():
            for name, column in vars(self).items():
                setattr(self, name, column[inside])


def _gather(data: Buffer, at: _Ints, size: _Ints) -> pa.Array:
    """Copy data[at : at + size] of every row; a size below 0 is null.

    The positions ascend, so one BinaryArray whose elements alternate between wanted and unwanted
    bytes lies over the data without copying it, and `take` picks every second one.
    """
    count = len(at)
    is_null = size < 0
    if count == 0 or is_null.all():
        return pa.nulls(count, pa.binary())
    bounds = np.empty(2 * count, np.int32)
    bounds[::2] = at
    bounds[1::2] = at + np.maximum(size, 0)
    over = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    wanted = np.arange(0, 2 * count, 2, dtype=np.int32)
    return over.take(pa.array(wanted, mask=is_null if is_null.any() else None))


def _timestamps(timestamp_ms: _Ints) -> pa.Array:
    too_large = (timestamp_ms > _MAX_TIMESTAMP_MS) | (timestamp_ms < -_MAX_TIMESTAMP_MS)
    micros = pa.array(timestamp_ms * 1000, mask=too_large if too_large.any() else None)
    return micros.view(pa.timestamp("us", tz="UTC"))


def _headers(data: bytes, columns: _Columns) -> pa.Array:
    """A list of (key, value) per record, null where there are none; a row loop, as headers are rare."""
    lists: list[list[dict[str, object]] | None] = [None] * len(columns.offset)
    for row in np.flatnonzero(columns.headers_count).tolist():
        stop = int(columns.end[row])
        headers, position = parse_headers(data, int(columns.headers_at[row]), stop)
        if position != stop:
            raise InvalidRecord(f"the headers of the record at offset {columns.offset[row]} end wrongly")
        lists[row] = [{"key": name, "value": value} for name, value in headers]
    return pa.array(lists, HEADERS_TYPE)


def arrow_to_batches(
    keys: pa.Array | pa.ChunkedArray | None,
    values: pa.Array | pa.ChunkedArray,
    timestamps_ms: pa.Array | pa.ChunkedArray | int,
    *,
    headers: pa.Array | pa.ChunkedArray | None = None,
    max_batch_bytes: int,
    compression: Compression = Compression.NONE,
    level: int | None = None,
) -> list[tuple[bytearray, int]]:
    """Sealed batches without producer or sequence, and how many records each has, in row order.

    A batch is closed before its uncompressed size could pass `max_batch_bytes`; a record larger than
    that gets a batch of its own. Keys and values are binary or string, null stays null. Timestamps are
    int64 milliseconds or Arrow timestamps, or one number for all. Raises MisuseError for a null
    timestamp or columns of different lengths.
    """
    rows = _Rows(keys, values, timestamps_ms, headers)
    batches: list[tuple[bytearray, int]] = []
    for first, last in _spans(rows.sizes, _SPAN_BYTES):
        batches += _encode_span(rows.slice(first, last), max_batch_bytes, compression, level)
    return batches


class _Rows:
    """The input columns, checked and in one form, and each row's upper bound in bytes."""

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
    """Bytes of each row, 0 for null."""
    lengths: _Ints = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


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


def _spans(sizes: _Ints, limit: int) -> list[tuple[int, int]]:
    """Cut the rows into runs [first, last) of at most `limit` bytes, at least one row each."""
    ends = np.cumsum(sizes)
    spans, first, count = [], 0, len(sizes)
    while first < count:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + limit, "right")))
        spans.append((first, last))
        first = last
    return spans


def _encode_span(
    rows: _Rows, max_batch_bytes: int, compression: Compression, level: int | None
) -> list[tuple[bytearray, int]]:
    spans = _spans(rows.sizes, max_batch_bytes - HEADER_BYTES)
    firsts = np.array([first for first, _ in spans])
    counts = np.array([last - first for first, last in spans])
    joined = _join_records(rows, firsts, counts)
    offsets = np.frombuffer(joined.buffers()[1], np.int32)[joined.offset :]
    data = memoryview(joined.buffers()[2] or b"")
    base, largest = rows.timestamps[firsts].tolist(), np.maximum.reduceat(rows.timestamps, firsts).tolist()
    return [
        (
            seal(
                [data[offsets[first] : offsets[last]]],
                last - first,
                base[index],
                largest[index],
                compression=compression,
                level=level,
            ),
            last - first,
        )
        for index, (first, last) in enumerate(spans)
    ]


def _join_records(rows: _Rows, firsts: _Ints, counts: _Ints) -> Any:
    """One binary array with every record's bytes."""
    time_delta = rows.timestamps - np.repeat(rows.timestamps[firsts], counts)
    offset_delta = np.arange(len(rows.values)) - np.repeat(firsts, counts)
    value_size, value_varint = _sizes_of(rows.values)
    times, offsets = _Varints(time_delta), _Varints(offset_delta)
    length = 1 + times.size + offsets.size + value_varint.size + value_size
    length += 1 if rows.headers is None else _lengths(rows.headers)
    zero = np.zeros((len(offset_delta), 1), np.uint8)
    attributes = _Varints.fixed(zero)
    tail = pa.scalar(b"\0", pa.binary()) if rows.headers is None else rows.headers
    values = pc.fill_null(rows.values, b"")
    end = pa.scalar(b"", pa.binary())
    if rows.keys is None:
        no_key = _Varints.fixed(zero + 1)
        head = _lay_out(_Varints(length + 1), attributes, times, offsets, no_key, value_varint)
        return pc.binary_join_element_wise(head, values, tail, end)
    key_size, key_varint = _sizes_of(rows.keys)
    length += key_varint.size + key_size
    head = _lay_out(_Varints(length), attributes, times, offsets, key_varint)
    keys = pc.fill_null(rows.keys, b"")
    return pc.binary_join_element_wise(head, keys, _lay_out(value_varint), values, tail, end)


class _Varints:
    """A column of signed varints as a byte matrix, of which each row's first `size` bytes count."""

    def __init__(self, numbers: _Ints) -> None:
        raw = ((numbers << 1) ^ (numbers >> 63)).view(np.uint64)
        width = max(1, (int(raw.max()).bit_length() + 6) // 7)
        self.size = np.ones(len(raw), np.int64)
        for more in range(1, width):
            self.size += raw >= np.uint64(1 << 7 * more)
        shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
        self.bytes = (raw[:, None] >> shifts & np.uint64(127)).astype(np.uint8)
        self.is_used = np.arange(width) < self.size[:, None]
        self.bytes[:, :-1] |= self.is_used[:, 1:].astype(np.uint8) << 7

    @classmethod
    def fixed(cls, column: _Bytes) -> _Varints:
        """One given byte per row."""
        varints = object.__new__(cls)
        varints.size, varints.bytes = np.ones(len(column), np.int64), column
        varints.is_used = np.ones(column.shape, np.bool_)
        return varints


def _sizes_of(column: Any) -> tuple[_Ints, _Varints]:
    """Bytes of each row (0 for null), and the varints to write (-1 for null)."""
    lengths = _lengths(column)
    if not column.null_count:
        return lengths, _Varints(lengths)
    is_null = pc.is_null(column).to_numpy(zero_copy_only=False)
    return lengths, _Varints(np.where(is_null, -1, lengths))


def _lay_out(*columns: _Varints) -> Any:
    """The used bytes of each row of all columns, as a binary array."""
    matrix = np.hstack([column.bytes for column in columns])
    is_used = np.hstack([column.is_used for column in columns])
    offsets = np.zeros(len(matrix) + 1, np.int32)
    np.cumsum(sum(column.size for column in columns), out=offsets[1:])
    flat = matrix[is_used]
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(matrix), [None, pa.py_buffer(offsets), pa.py_buffer(flat)]
    )
