"""A hash of Arrow rows that ignores their order: the sum of a 64-bit hash per row, modulo 2**64.

The hash distinguishes a repeated batch from a different one. It does not resist a deliberate collision. An
integer contributes its value. Any other field contributes its CRC-32C and length, and null differs from
empty. Fields are mixed one after another, so a value that moves to another row or column changes the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncelog.wire.arrow_bytes import RowBytes

_Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_Sums = np.ndarray[Any, np.dtype[np.uint32]]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_NULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_SHORT_BYTES, _LONG_BYTES = 32, 256
"""Limits by which `checksums` chooses the fastest method: vector code if no row is longer than _SHORT_BYTES,
memory views if the mean length is above _LONG_BYTES.
"""


def hash_rows(*columns: Any) -> int:
    """Return the sum of the rows' hashes. A column contains binary values, strings, integers or lists of
    headers. Any column but the first may be a scalar, which stands for a column with this string in each row.
    """
    count = len(columns[0])
    mixed = np.full(count, _GOLDEN, np.uint64)
    for column in columns:
        mixed = _mix(mixed + _field(column) * _GOLDEN)
    return int(np.add.reduce(mixed)) if count else 0


def _mix(numbers: _Hashes) -> _Hashes:
    """Apply the finalizer of splitmix64: every output bit depends on all input bits."""
    numbers = numbers + _GOLDEN
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    mixed: _Hashes = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _field(column: Any) -> _Hashes:
    if isinstance(column, pa.Scalar):
        return checksums(pa.array([column.as_py()], column.type).cast(pa.binary()))
    if pa.types.is_integer(column.type):
        values = column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        numbers: _Hashes = values.astype(np.int64).view(np.uint64)
        return numbers
    if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
        return checksums(column.cast(pa.binary()))
    return checksums(pa.array([_flat(row) for row in column.to_pylist()], pa.binary()))


def checksums(column: Any) -> _Hashes:
    """Return CRC-32C (low 32 bits) and length (high 32 bits) of each row of a binary column."""
    count = len(column)
    is_null = pc.is_null(column).to_numpy(zero_copy_only=False) if column.null_count else None
    if is_null is not None:
        column = pc.fill_null(column, b"")
    lengths = pc.binary_length(column).to_numpy(zero_copy_only=False).astype(np.uint64)
    if count and int(lengths.max()) <= _SHORT_BYTES:
        sums = checksums_in_step(column)
    else:
        is_long = count and int(lengths.sum()) > _LONG_BYTES * count
        rows = _views(column) if is_long else column.to_numpy(zero_copy_only=False)
        sums = np.fromiter(map(crc32c.crc32c, rows), np.uint64, count)
    sums |= lengths << np.uint64(32)
    if is_null is not None:
        sums[is_null] = _NULL
    hashes: _Hashes = sums
    return hashes


def _byte_table() -> _Sums:
    """Return the CRC-32C of each byte value, without the inversions (polynomial 0x82F63B78, reflected)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(
            table & np.uint32(1), table >> np.uint32(1) ^ np.uint32(0x82F63B78), table >> np.uint32(1)
        )
    return table


_BYTE = _byte_table()


def _followed_by_zero(table: _Sums) -> _Sums:
    followed: _Sums = table >> np.uint32(8) ^ _BYTE[table & np.uint32(255)]
    return followed


def _pairs(first: _Sums, second: _Sums) -> _Sums:
    """Return one table for 16-bit numbers from two tables of 256 entries. `first` is for the low byte."""
    return (second[:, None] ^ first[None, :]).reshape(-1)


_BEFORE_1 = _followed_by_zero(_BYTE)
_BEFORE_2 = _followed_by_zero(_BEFORE_1)
_LOW, _HIGH = _pairs(_followed_by_zero(_BEFORE_2), _BEFORE_2), _pairs(_BEFORE_1, _BYTE)
"""The contributions of a 32-bit word's low and high halves to the CRC."""


def checksums_in_step(column: Any) -> _Hashes:
    """Return the CRC-32C of each row, 0 for null. Each step handles four bytes of all rows."""
    sums = np.zeros(len(column), np.uint64)
    bytes_of = RowBytes(column)
    crc = np.full(len(bytes_of.rows), 0xFFFFFFFF, np.uint32)
    for word in bytes_of.words():
        word = crc[: len(word)] ^ word
        crc[: len(word)] = _LOW[word & np.uint32(0xFFFF)] ^ _HIGH[word >> np.uint32(16)]
    for rows, byte in bytes_of.tails():
        crc[rows] = crc[rows] >> np.uint32(8) ^ _BYTE[(crc[rows] ^ byte) & np.uint32(255)]
    sums[bytes_of.rows] = ~crc
    return sums


def _views(column: Any) -> Iterator[memoryview]:
    """Yield a view of each row's bytes, without a copy."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset :][: len(column) + 1].tolist()
    return map(memoryview(data).__getitem__, map(slice, bounds, bounds[1:]))


def _flat(headers: list[dict[str, Any]] | None) -> bytes | None:
    if headers is None:
        return None
    return repr([(header["key"], header["value"]) for header in headers]).encode()
