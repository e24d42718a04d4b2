"""Decodes many record batches into Arrow columns in one call.

This module also exports the reverse, `arrow_to_batches`, from arrow_encoder.py.

If `_fetched_records.c` is compiled (docs/internals/compiled.md), it fills the columns' buffers in two passes
over the records. Input that the C code does not accept is decoded again with NumPy code, which accepts it or
raises an exception. Guard: tests/wire/test_wire_fetched_records.py.

A call of `batches_to_arrow` has a fixed cost, because it makes many NumPy and Arrow calls. Call it once for a
whole fetch response, not once per batch. In the NumPy code, one Python loop follows the record lengths,
because each length leads to the next record. All other numbers are read as columns. One Arrow call copies all
keys, and one copies all values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import crc32c
import numpy as np
import pyarrow as pa

from oncelog.errors import InvalidRecord, MisuseError
from oncelog.types import Compression
from oncelog.wire.arrow_encoder import arrow_to_batches
from oncelog.wire.compression import MAX_DECOMPRESSED_BYTES
from oncelog.wire.header import CODEC_MASK, HEADER_BYTES, BatchHeader, iter_batches
from oncelog.wire.primitives import Buffer
from oncelog.wire.records import READING, check_count, parse_headers, payload_of, read_varint

try:
    import oncelog.wire._fetched_records as _c
except ImportError:  # `_fetched_records.c` is not compiled, or was compiled for another system
    _c = None  # type: ignore[assignment]

__all__ = ["HEADERS_TYPE", "arrow_to_batches", "batches_to_arrow", "fetch_schema"]

HEADERS_TYPE = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_TIMESTAMP = pa.timestamp("us", tz="UTC")
_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _TIMESTAMP),
        ("timestampType", pa.int32()),
    ]
)
_MAX_TOTAL_BYTES = 1 << 30
"""Maximum total size of the batches of one call after decompression, in bytes.

A compressed batch that would exceed this total is rejected. Uncompressed batches count towards the total, but
are rejected only if Arrow's limit of 2 GiB is exceeded.
"""
# Maximum number of records per batch. During decoding, a record takes about 100 bytes of memory.
_MAX_RECORDS = 1 << 22
_MIN_OFFSET, _MAX_OFFSET = -(2**63), 2**63 - 1
_MAX_TIMESTAMP_MS = (2**63 - 1) // 1000
_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def fetch_schema(include_headers: bool = False) -> pa.Schema:
    """Return the schema of `batches_to_arrow`. The columns have the names that Spark's Kafka source uses."""
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
    batches: Iterable[tuple[int, BatchHeader]] | None = None,
    verify: bool = True,
) -> pa.RecordBatch:
    """Return the records of all whole batches in `buffer` as columns.

    `batches`: the positions and headers of the batches to decode, if the caller has read them already. The
    result omits control batches, batches for which `skip` returns True, and records outside
    [start_offset, end_offset) (None: no limit). If a record has no headers, its list of headers is null. A
    timestamp that does not fit into microseconds is null. Bytes of a header's name that are not UTF-8 become
    U+FFFD.

    Raises CorruptMessage (wrong checksum, damage), InvalidRecord (malformed record, wrong or too large
    count), UnsupportedCompressionType, and MisuseError if the records exceed Arrow's limit of 2 GiB.
    """
    listed = list(iter_batches(buffer) if batches is None else batches)
    if skip is not None:
        listed = [(position, header) for position, header in listed if not skip(header)]
    wanted = _Wanted(topic, partition, start_offset, end_offset, include_headers, verify)
    try:
        if _c is not None and not any([header.attributes & CODEC_MASK for _, header in listed]):
            batch = _decode_with_c(buffer, listed, None, wanted)
            if batch is not None:
                return batch
        return _decode(_pick(buffer, listed, wanted), wanted)
    except IndexError as error:
        raise InvalidRecord(f"a batch of {topic}-{partition} contains a truncated record") from error


class _Wanted(NamedTuple):
    """The arguments of `batches_to_arrow` that select records and columns."""

    topic: str
    partition: int
    start_offset: int | None
    end_offset: int | None
    include_headers: bool
    verify: bool


def _pick(buffer: Buffer, listed: list[tuple[int, BatchHeader]], wanted: _Wanted) -> _Picked:
    """Verify and decompress the batches with records in the range."""
    picked = _Picked(buffer)
    for position, header in listed:
        if header.is_control or header.records_count == 0:
            continue
        if wanted.start_offset is not None and header.last_offset < wanted.start_offset:
            continue
        if wanted.end_offset is not None and header.base_offset >= wanted.end_offset:
            continue
        picked.add(position, header, wanted.verify)
    return picked


class _Picked:
    """The batches to decode, and one buffer with the records of all these batches.

    If no batch is compressed, the buffer is the input. Otherwise it has the decompressed records of all
    batches, one batch after the other.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.headers: list[BatchHeader] = []
        self.positions: list[int] = []
        self.payloads: list[Buffer] = []
        self.is_compressed = False
        self.budget = _MAX_TOTAL_BYTES

    def add(self, position: int, header: BatchHeader, verify: bool) -> None:
        if header.records_count > _MAX_RECORDS:
            raise InvalidRecord(
                f"the batch at offset {header.base_offset} says {header.records_count} "
                f"records; the limit for columns is {_MAX_RECORDS}, so read the batch as "
                "records"
            )
        self.headers.append(header)
        self.positions.append(position)
        payload = payload_of(self.buffer, position, header, verify, min(self.budget, MAX_DECOMPRESSED_BYTES))
        check_count(header, payload)
        self.payloads.append(payload)
        self.budget -= len(payload)
        self.is_compressed |= header.compression is not Compression.NONE

    def joined(self) -> tuple[Buffer, list[int]]:
        """Return the buffer, and the position of each batch's first record in it."""
        if not self.is_compressed:
            return self.buffer, [position + HEADER_BYTES for position in self.positions]
        ends = np.cumsum([len(payload) for payload in self.payloads])
        return b"".join(self.payloads), [0, *ends[:-1].tolist()]


def _empty(include_headers: bool) -> pa.RecordBatch:
    schema = fetch_schema(include_headers)
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _decode(picked: _Picked, wanted: _Wanted) -> pa.RecordBatch:
    if not picked.headers:
        return _empty(wanted.include_headers)
    if _c is not None:
        listed = list(zip(picked.positions, picked.headers, strict=True))
        batch = _decode_with_c(picked.buffer, listed, picked.payloads, wanted)
        if batch is not None:
            return batch
    data, begins = picked.joined()
    if len(data) > 2 * _MAX_TOTAL_BYTES - 1:
        raise MisuseError("more than 2 GiB of record batches in one call; decode them in smaller pieces")
    heads = _chase(data, begins, picked)
    columns = _Columns(np.frombuffer(data, np.uint8), heads, picked.headers)
    if wanted.start_offset is not None or wanted.end_offset is not None:
        columns.keep(wanted.start_offset, wanted.end_offset)
    count = len(columns.offset)
    arrays = [
        _gather(data, columns.key_at, columns.key_size),
        _gather(data, columns.value_at, columns.value_size),
        pa.repeat(pa.scalar(wanted.topic), count),
        pa.array(np.full(count, wanted.partition, np.int32)),
        pa.array(columns.offset),
        _timestamps(columns.timestamp_ms),
        pa.array(columns.timestamp_type),
    ]
    if wanted.include_headers:
        arrays.append(_headers(bytes(data), columns))
    return pa.RecordBatch.from_arrays(arrays, schema=fetch_schema(wanted.include_headers))


def _decode_with_c(
    buffer: Buffer, listed: list[tuple[int, BatchHeader]], payloads: list[Buffer] | None, wanted: _Wanted
) -> pa.RecordBatch | None:
    """Return the columns, or None if the C code does not accept the batches.

    `payloads`: the batches' records, verified and decompressed. If it is None, no batch may be compressed,
    and the C code verifies and reads the records in `buffer`.
    """
    start, end = wanted.start_offset, wanted.end_offset
    first = _MIN_OFFSET if start is None else max(start, _MIN_OFFSET)
    last = _MAX_OFFSET if end is None else min(end - 1, _MAX_OFFSET)
    result = _c.columns(buffer, listed, payloads, first, last, crc32c.crc32c if wanted.verify else None)
    if result is None:
        return None
    count, key, value, offset, nulls_count, validity, timestamp, timestamp_type, with_headers = result
    arrays = [
        _from_buffers(pa.binary(), count, *key),
        _from_buffers(pa.binary(), count, *value),
        pa.repeat(pa.scalar(wanted.topic), count),
        pa.repeat(pa.scalar(wanted.partition, pa.int32()), count),
        _from_buffers(pa.int64(), count, 0, None, offset),
        _from_buffers(_TIMESTAMP, count, nulls_count, validity, timestamp),
        _from_buffers(pa.int32(), count, 0, None, timestamp_type),
    ]
    if wanted.include_headers:
        arrays.append(_c_headers(buffer, listed, payloads, count, with_headers))
    return pa.RecordBatch.from_arrays(arrays, schema=fetch_schema(wanted.include_headers))


def _from_buffers(kind: Any, count: int, nulls_count: int, *buffers: bytes | None) -> pa.Array:
    views = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(kind, count, views, nulls_count)


def _c_headers(
    buffer: Buffer,
    listed: list[tuple[int, BatchHeader]],
    payloads: list[Buffer] | None,
    count: int,
    with_headers: bytes,
) -> pa.Array:
    """Return the column of headers: see `_headers`.

    `with_headers` has four int64 numbers for each record that has headers: its row, the index of its batch,
    and the start and end of its headers within the batch's records.
    """
    lists: list[list[dict[str, object]] | None] = [None] * count
    for row, index, start, stop in struct.iter_unpack("=4q", with_headers):
        if payloads is None:
            position = listed[index][0] + HEADER_BYTES
            headers = buffer[position + start : position + stop]
        else:
            headers = payloads[index][start:stop]
        lists[row] = _header_list(bytes(headers))
    return pa.array(lists, HEADERS_TYPE)


def _chase(data: Buffer, begins: list[int], picked: _Picked) -> _Ints:
    """Return the position of each record's length field. This is the only Python loop over all records."""
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
                    raise InvalidRecord(f"a record has the length {size}")
                position += size
        if position != stop:
            raise InvalidRecord(
                f"the batch at offset {header.base_offset} says {header.records_count} records, "
                f"which end {stop - position} bytes before it does"
            )
    return np.array(heads, np.int64)


def _read_varints(data: _Bytes, at: _Ints) -> tuple[_Ints, _Ints]:
    """Return the signed varints at the positions `at`, and the positions after them."""
    first = data[at]
    raw = (first & 127).astype(np.uint64)
    after = at + 1
    more = np.flatnonzero(first > 127)
    shift = 7
    while len(more):
        if shift > 63:
            raise InvalidRecord("a record contains a number of more than 10 bytes")
        byte = data[after[more]]
        raw[more] |= (byte & 127).astype(np.uint64) << np.uint64(shift)
        after[more] += 1
        more = more[byte > 127]
        shift += 7
    one = np.uint64(1)
    return (raw >> one).view(np.int64) ^ -(raw & one).view(np.int64), after


class _Columns:
    """The offsets, timestamps, field positions and field sizes of the records, as columns.

    Names that end in `_at` are positions in the data. In columns that end in `_size`, -1 means null.
    """

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
        """Raise InvalidRecord for an invalid size, or for a record whose fields do not fill its length
        exactly.

        Headers are not parsed here. For a record with headers, this method only checks that the fields before
        the headers leave space for them.
        """
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
    """Copy data[at : at + size] of each row. A size below 0 gives null.

    The positions `at` must ascend. The elements of a BinaryArray over the data, built without a copy,
    alternate: the bytes of a row, then the bytes up to the next row. `take` copies every second element,
    which are the rows.
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
    return micros.view(_TIMESTAMP)


def _headers(data: bytes, columns: _Columns) -> pa.Array:
    """Return a list of (key, value) per record; null for a record without headers.

    A Python loop is fast enough, because headers are rare.
    """
    lists: list[list[dict[str, object]] | None] = [None] * len(columns.offset)
    for row in np.flatnonzero(columns.headers_count).tolist():
        # Pass only the record's own bytes, so that malformed headers give the same error as in the C code.
        # Guard: test_damaged_headers_give_the_same_error_in_c.
        headers = data[int(columns.headers_at[row]) : int(columns.end[row])]
        lists[row] = _header_list(headers)
    return pa.array(lists, HEADERS_TYPE)


def _header_list(data: bytes) -> list[dict[str, object]]:
    """Return the headers of a record. `data`: the end of the record, from the number of headers on."""
    headers, position = parse_headers(data, 0, len(data), READING)
    if position != len(data):
        raise InvalidRecord("the headers of a record do not fill the record exactly")
    return [{"key": name, "value": value} for name, value in headers]
