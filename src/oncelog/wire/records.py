"""Encodes and decodes the records inside a batch as rows: one tuple per record.

    length varint | attributes i8 | timestamp delta varlong | offset delta varint
    | key length varint, key | value length varint, value | header count varint | headers

A length of -1 is null, which differs from empty. To read whole fetch responses as columns, use
`oncelog.wire.columns`.

`_records.c` has the row loops in C. The Python code here runs if `_records.c` is not compiled or does not
accept the input. The tests compare the two. See docs/internals/compiled.md.

Source: apache/kafka DefaultRecord.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple

from oncelog.errors import CorruptMessage, InvalidRecord
from oncelog.types import Header, TimestampType
from oncelog.wire.compression import MAX_DECOMPRESSED_BYTES, decompress
from oncelog.wire.header import HEADER_BYTES, BatchHeader, read_header, verify_crc
from oncelog.wire.primitives import VARINT, VARINT_TABLE_SIZE, Buffer, encode_varint

try:
    import oncelog.wire._records as _c
except ImportError:  # `_records.c` is not compiled, or was compiled for another system
    _c = None  # type: ignore[assignment]

# Python's error handlers for header names that are not UTF-8: Kafka stores any bytes as names.
NameErrors = Literal["strict", "replace", "backslashreplace", "surrogateescape"]
READING: NameErrors = "replace"
"""Invalid bytes of a header's name become U+FFFD, as in the readers of Java and Spark."""
LOSSLESS: NameErrors = "surrogateescape"
"""Invalid bytes are escaped, so that encoding restores the same bytes.

Used for records that are read from a stored batch and written into a new one.
"""

_ZERO, _NULL = b"\x00", b"\x01"
"""The varints of 0 and -1."""
_NULL_SIZE = 1
MIN_RECORD_BYTES = 7
"""Size of the smallest record: length, attributes, two deltas, no key, no value, no headers."""
MAX_VARINT_BYTES = 10
"""Maximum size of a varint in a record."""
MAX_RECORDS = 1 << 20
"""Maximum number of records that `decode_records` returns. Each takes at least 150 bytes of memory."""
SLICE_RECORDS = 1 << 15
"""Default maximum number of records in a list of `iter_records`."""
_MAX_OVERHEAD_BYTES = 5 + 1 + 10 + 5 + 5 + 5 + 5


class NewRecord(NamedTuple):
    """A record that has no offset yet. A `timestamp_ms` of -1 means that it has no timestamp."""

    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class DecodedRecord(NamedTuple):
    """A record of a stored batch. With LogAppendTime, `timestamp_ms` is the broker's time."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]


def record_size_upper_bound(key: Buffer | None, value: Buffer | None, headers: Iterable[Header] = ()) -> int:
    """Return an upper bound of the record's size in an uncompressed batch, in bytes."""
    size = _MAX_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    for name, data in headers:
        size += 10 + 4 * len(name) + len(data or b"")
    return size


def _varint(value: int) -> bytes:
    return VARINT[value] if 0 <= value < VARINT_TABLE_SIZE else encode_varint(value)


def encode_after_space(
    records: Sequence[NewRecord],
    base_timestamp_ms: int,
    space_bytes: int,
    offset_deltas: list[int] | None = None,
    name_errors: NameErrors = "strict",
) -> bytearray:
    """Return the encoded records after `space_bytes` zeros, the space for a header. See `encode_records`."""
    if _c is not None:
        encoded = _c.encode(records, base_timestamp_ms, offset_deltas, space_bytes)
        if encoded is not None:
            return encoded
    parts = encode_records(records, base_timestamp_ms, offset_deltas, name_errors)
    return bytearray().join((bytes(space_bytes), *parts))


def encode_records(
    records: Iterable[NewRecord],
    base_timestamp_ms: int,
    offset_deltas: Iterable[int] | None = None,
    name_errors: NameErrors = "strict",
) -> list[bytes]:
    """Return the encoded records in parts, to be joined by the caller.

    If `offset_deltas` is None, the deltas are 0, 1, 2, ... `name_errors` must be LOSSLESS for names that were
    decoded with LOSSLESS; "strict" raises UnicodeEncodeError for a name that is not valid Unicode.
    """
    parts: list[bytes] = []
    table, limit, extend = VARINT, VARINT_TABLE_SIZE, parts.extend
    indexes = count() if offset_deltas is None else offset_deltas
    for index, (timestamp_ms, key, value, headers) in zip(indexes, records, strict=False):
        delta = timestamp_ms - base_timestamp_ms
        # A negative delta must not index the table: Python would silently read from its end. See
        # test_a_negative_timestamp_delta_is_not_read_from_the_table and test_wire_row_loops.py.
        head = b"\0" + (table[delta] if 0 <= delta < limit else encode_varint(delta))
        head += table[index] if 0 <= index < limit else encode_varint(index)
        if key is None:
            head += _NULL
        else:
            head += _varint(len(key)) + key
        if value is None:
            head += _NULL
            value = b""
        else:
            size = len(value)
            head += table[size] if size < limit else encode_varint(size)
        tail = encode_headers(headers, name_errors) if headers else _ZERO
        size = len(head) + len(value) + len(tail)
        extend((table[size] if size < limit else encode_varint(size), head, value, tail))
    return parts


def encode_headers(headers: Iterable[Header], name_errors: NameErrors = "strict") -> bytes:
    """Encode the number of headers, then name and value of each header. A null value stays null."""
    parts = []
    count = 0
    for name, value in headers:
        raw = name.encode(errors=name_errors)
        parts += [_varint(len(raw)), raw, _NULL if value is None else _varint(len(value)), value or b""]
        count += 1
    return b"".join([_varint(count), *parts])


def read_varint(data: Buffer, position: int) -> tuple[int, int]:
    """Return (signed varint of at most 10 bytes, position after it).

    Raises IndexError at the end of `data`, and InvalidRecord for a number of more than 10 bytes.
    """
    raw, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        raw |= (byte & 127) << shift
        if byte < 128:
            return (raw >> 1) ^ -(raw & 1), position
        shift += 7
        if shift > 63:
            raise InvalidRecord(f"a number of more than 10 bytes ends at byte {position} of the records")


def payload_of(
    buffer: Buffer, position: int, header: BatchHeader, verify: bool, max_bytes: int = MAX_DECOMPRESSED_BYTES
) -> Buffer:
    """Return the decompressed records of a batch as one buffer.

    Raises CorruptMessage (truncated batch, damaged compressed data; with `verify`, wrong checksum),
    InvalidRecord (more than `max_bytes` after decompression) and UnsupportedCompressionType.
    """
    size = header.size_bytes
    if position + size > len(buffer):
        raise CorruptMessage(f"a batch of {size} bytes at position {position} of {len(buffer)} is truncated")
    if verify and not verify_crc(buffer, position, size):
        raise CorruptMessage(f"the checksum of the batch at offset {header.base_offset} is wrong")
    payload = memoryview(buffer)[position + HEADER_BYTES : position + size]
    return decompress(header.compression, payload, max_bytes)


def check_count(header: BatchHeader, payload: Buffer) -> None:
    """Raise InvalidRecord if a header's record count is negative or too large for the size of the records."""
    if not 0 <= header.records_count * MIN_RECORD_BYTES <= len(payload):
        raise InvalidRecord(
            f"the batch at offset {header.base_offset} says {header.records_count} records "
            f"in {len(payload)} bytes"
        )


def decode_records(
    buffer: Buffer,
    position: int = 0,
    *,
    verify: bool = True,
    max_bytes: int = MAX_DECOMPRESSED_BYTES,
    name_errors: NameErrors = "strict",
) -> list[DecodedRecord]:
    """Return all records of the batch at a position. `max_bytes`: limit of the batch's decompressed size.

    Raises CorruptMessage (wrong checksum, damage), InvalidRecord (malformed record, wrong or too large count,
    more than `max_bytes`) and UnsupportedCompressionType.
    """
    header = read_header(buffer, position)
    if header.records_count > MAX_RECORDS:
        raise InvalidRecord(
            f"the batch at offset {header.base_offset} says {header.records_count} records; "
            f"the limit is {MAX_RECORDS}"
        )
    data = bytes(payload_of(buffer, position, header, verify, max_bytes))
    check_count(header, data)
    records, position = _parse_or_raise(data, header, 0, 0, header.records_count, name_errors)
    _check_end(header, position, len(data))
    return records


def iter_records(
    buffer: Buffer,
    position: int = 0,
    *,
    verify: bool = True,
    slice_records: int = SLICE_RECORDS,
    name_errors: NameErrors = "strict",
) -> Iterator[list[DecodedRecord]]:
    """Return an iterator over the records of the batch at a position, in lists of at most `slice_records`.

    Only one list needs to be in memory at a time. Unlike `decode_records`, this function accepts any number
    of records, because Kafka sets no limit.

    The call raises CorruptMessage (wrong checksum, damage), InvalidRecord (impossible count, too large after
    decompression) or UnsupportedCompressionType. The iterator raises InvalidRecord when it reaches a
    malformed record or a wrong count.
    """
    header = read_header(buffer, position)
    data = bytes(payload_of(buffer, position, header, verify))
    check_count(header, data)
    return _slices(data, header, slice_records, name_errors)


def _slices(
    data: bytes, header: BatchHeader, slice_records: int, name_errors: NameErrors
) -> Iterator[list[DecodedRecord]]:
    position, left = 0, header.records_count
    while left:
        size = min(left, slice_records)
        records, position = _parse_or_raise(
            data, header, position, header.records_count - left, size, name_errors
        )
        left -= size
        if not left:
            _check_end(header, position, len(data))
        yield records
    if not header.records_count:
        _check_end(header, 0, len(data))


def payload_records(
    data: bytes, header: BatchHeader, position: int, first: int, count: int, name_errors: NameErrors
) -> tuple[list[DecodedRecord], int]:
    """Return `count` records from `position` in a batch's decompressed records, and the position after them.

    `first`: number of records before them in the batch. Raises InvalidRecord for a malformed record, and if
    bytes are left after the batch's last record.
    """
    records, position = _parse_or_raise(data, header, position, first, count, name_errors)
    if first + count == header.records_count:
        _check_end(header, position, len(data))
    return records, position


def _parse_or_raise(
    data: bytes, header: BatchHeader, position: int, first: int, count: int, name_errors: NameErrors
) -> tuple[list[DecodedRecord], int]:
    if _c is not None:
        is_log_time = header.timestamp_type is TimestampType.LOG_APPEND_TIME
        parsed = _c.parse(
            data,
            position,
            count,
            header.base_offset,
            header.base_timestamp_ms,
            header.max_timestamp_ms if is_log_time else None,
            DecodedRecord,
            name_errors,
        )
        if parsed is not None:
            return parsed
    try:
        return _parse(data, header, position, first, count, name_errors)
    except IndexError as error:
        raise InvalidRecord(
            f"the batch at offset {header.base_offset} contains a truncated record"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"a header name at offset {header.base_offset} is not UTF-8: {error}") from error


def _check_end(header: BatchHeader, stop: int, end: int) -> None:
    if stop != end:
        raise InvalidRecord(
            f"the batch at offset {header.base_offset} says {header.records_count} records, "
            f"after which {end - stop} bytes are left"
        )


def _parse(
    data: bytes, header: BatchHeader, position: int, first: int, count: int, name_errors: NameErrors
) -> tuple[list[DecodedRecord], int]:
    """Parse `count` records from `position`. `first`: number of records before them in the batch."""
    base_offset, base_timestamp = header.base_offset, header.base_timestamp_ms
    fixed_time = header.max_timestamp_ms if header.timestamp_type is TimestampType.LOG_APPEND_TIME else None
    records: list[DecodedRecord] = []
    append, make, varint = records.append, DecodedRecord._make, read_varint
    end = len(data)
    for _ in range(count):
        # Nearly every number has one or two bytes. Only longer numbers are decoded by a call.
        size = data[position]
        if size < 128:
            size, position = size >> 1 ^ -(size & 1), position + 1
        elif (second := data[position + 1]) < 128:
            size, position = ((size & 127) >> 1 | second << 6) ^ -(size & 1), position + 2
        else:
            size, position = varint(data, position)
        stop = position + size
        if size < 0 or stop > end:
            raise _bad_record(base_offset, first + len(records))
        delta = data[position + 1]  # The byte before `delta` has the attributes, which are unused.
        if delta > 127:
            delta, position = varint(data, position + 1)
        else:
            delta, position = delta >> 1 ^ -(delta & 1), position + 2
        index = data[position]
        if index < 128:
            index, position = index >> 1 ^ -(index & 1), position + 1
        elif (second := data[position + 1]) < 128:
            index, position = ((index & 127) >> 1 | second << 6) ^ -(index & 1), position + 2
        else:
            index, position = varint(data, position)
        if data[position] == _NULL_SIZE:
            key, position = None, position + 1
        else:
            key, position = _bytes(data, position)
        size = data[position]
        if size < 128:
            size, position = size >> 1 ^ -(size & 1), position + 1
        elif (second := data[position + 1]) < 128:
            size, position = ((size & 127) >> 1 | second << 6) ^ -(size & 1), position + 2
        else:
            size, position = varint(data, position)
        if size >= 0:
            value, position = data[position : position + size], position + size
        elif size == -1:
            value = None
        else:
            raise _bad_record(base_offset, first + len(records))
        headers: tuple[Header, ...] = ()
        if data[position]:
            headers, position = parse_headers(data, position, stop, name_errors)
        else:
            position += 1
        if position != stop:
            raise _bad_record(base_offset, first + len(records))
        timestamp_ms = base_timestamp + delta if fixed_time is None else fixed_time
        append(make((base_offset + index, timestamp_ms, key, value, headers)))
    return records, position


def find_records_without_key(payload: Buffer, header: BatchHeader, limit: int) -> list[int]:
    """Return the indexes of the first `limit` records without a key, and check the structure of all records.

    Creates no record objects. Raises InvalidRecord (malformed record, wrong count, offset delta that is not
    the record's index).
    """
    check_count(header, payload)
    data, position, end, missing = bytes(payload), 0, len(payload), list[int]()
    base_offset = header.base_offset
    try:
        for index in range(header.records_count):
            size = data[position]
            if size < 128:
                size, position = size >> 1 ^ -(size & 1), position + 1
            else:
                size, position = read_varint(data, position)
            stop = position + size
            if size < 0 or stop > end:
                raise _bad_record(base_offset, index)
            position += 1
            start = position
            while data[position] > 127:  # skip the timestamp delta
                position += 1
            position += 1
            if position - start > MAX_VARINT_BYTES:
                raise _bad_record(base_offset, index)
            offset_delta, position = read_varint(data, position)
            if offset_delta != index:
                # The delta must be the record's index. Otherwise two records could have the same offset, or a
                # record could have an offset outside the batch. See
                # test_a_compacted_topic_accepts_only_records_with_their_own_offsets.
                raise InvalidRecord(
                    f"record {index} of the batch at offset {base_offset} has the offset delta {offset_delta}"
                )
            key_size, position = read_varint(data, position)
            if key_size < 0 and len(missing) < limit:
                missing.append(index)
            value_size, position = read_varint(data, position + max(key_size, 0))
            position += max(value_size, 0)
            if min(key_size, value_size) < -1 or key_size > stop or position >= stop:
                raise _bad_record(base_offset, index)
            if data[position]:
                _, position = parse_headers(data, position, stop)
            else:
                position += 1
            if position != stop:
                raise _bad_record(base_offset, index)
    except IndexError as error:
        raise InvalidRecord(f"the batch at offset {base_offset} contains a truncated record") from error
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"a header name at offset {base_offset} is not UTF-8: {error}") from error
    if position != end:
        raise InvalidRecord(
            f"the batch at offset {base_offset} says {header.records_count} records, "
            f"after which {end - position} bytes are left"
        )
    return missing


def find_record_at_time(
    payload: Buffer, header: BatchHeader, timestamp_ms: int, start_offset: int
) -> tuple[int, int] | None:
    """Return (timestamp_ms, offset) of the first record with at least this timestamp and this offset.

    Return None if there is none. Creates no record objects and reads nothing after the result. Raises
    InvalidRecord (malformed record, wrong count).
    """
    check_count(header, payload)
    data, position, end = bytes(payload), 0, len(payload)
    base_offset, base_ms = header.base_offset, header.base_timestamp_ms
    is_by_broker = header.timestamp_type is TimestampType.LOG_APPEND_TIME
    try:
        for index in range(header.records_count):
            size, position = read_varint(data, position)
            if size < 0 or position + size > end:
                raise _bad_record(base_offset, index)
            time_delta, at = read_varint(data, position + 1)
            offset_delta, _ = read_varint(data, at)
            record_ms = header.max_timestamp_ms if is_by_broker else base_ms + time_delta
            if record_ms >= timestamp_ms and base_offset + offset_delta >= start_offset:
                return record_ms, base_offset + offset_delta
            position += size
    except IndexError as error:
        raise InvalidRecord(f"the batch at offset {base_offset} contains a truncated record") from error
    return None


def _bad_record(base_offset: int, index: int) -> InvalidRecord:
    return InvalidRecord(
        f"record {index} of the batch at offset {base_offset} does not fill its length exactly"
    )


def _bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    size, position = read_varint(data, position)
    if size == -1:
        return None, position
    stop = position + size
    if size < 0 or stop > len(data):
        raise IndexError
    return data[position:stop], stop


def parse_headers(
    data: bytes, position: int, stop: int, name_errors: NameErrors = "strict"
) -> tuple[tuple[Header, ...], int]:
    """Return the headers of a record that ends at `stop`, and the position after the headers.

    Raises InvalidRecord if the number of headers is invalid or a name is null, IndexError at the end of
    `data`, and UnicodeDecodeError with `name_errors` "strict".
    """
    count, position = read_varint(data, position)
    if count < 0 or 2 * count > stop - position:
        raise InvalidRecord(f"a record says {count} headers in {stop - position} bytes")
    headers = []
    for _ in range(count):
        name, position = _bytes(data, position)
        if name is None:
            raise InvalidRecord("a header's name is null")
        value, position = _bytes(data, position)
        headers.append((name.decode(errors=name_errors), value))
    return tuple(headers), position
