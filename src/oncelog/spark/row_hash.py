"""An order-free hash of Arrow rows: the sum of a 64-bit hash per row, modulo 2**64.

It tells a batch that is repeated from one that is not the same; it is no defence against somebody who
builds a collision. A field counts by its CRC-32C and length, null apart from empty; fields are mixed
one after another, so a value that moves to another row or column changes the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_NULL = np.uint64(0xFFFFFFFFFFFFFFFF)
_LONG_BYTES = 256
"""Rows longer than this on average are cheaper to look at in place than as objects of their own."""


def hash_rows(*columns: Any) -> int:
    """Sum of the rows' hashes. Columns: binary, string, integers, or lists of key and value (headers)."""
    count = len(columns[0])
    mixed = np.full(count, _GOLDEN, np.uint64)
    for column in columns:
        mixed = _mix(mixed + _field(column) * _GOLDEN)
    return int(np.add.reduce(mixed)) if count else 0


def _mix(numbers: _Hashes) -> _Hashes:
    """The finish of splitmix64: every bit depends on all."""
    numbers = numbers + _GOLDEN
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    mixed: _Hashes = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _field(column: Any) -> _Hashes:
    if pa.types.is_integer(column.type):
        values = column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        numbers: _Hashes = values.astype(np.int64).view(np.uint64)
        return numbers
    if pa.types.is_binary(column.type) or pa.types.is_string(column.type):
        return _checksums(column.cast(pa.binary()))
    return _checksums(pa.array([_flat(row) for row in column.to_pylist()], pa.binary()))


def _checksums(column: Any) -> _Hashes:
    """CRC-32C and length of each row of a binary column."""
    count = len(column)
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.uint64)
    is_long = count and int(lengths.sum()) > _LONG_BYTES * count
    rows = _views(column) if is_long else pc.fill_null(column, b"").to_numpy(zero_copy_only=False)
    sums = np.fromiter(map(crc32c.crc32c, rows), np.uint64, count) | lengths << np.uint64(32)
    if column.null_count:
        sums[pc.is_null(column).to_numpy(zero_copy_only=False)] = _NULL
    found: _Hashes = sums
    return found


def _views(column: Any) -> Iterator[memoryview]:
    """The bytes of each row where they lie."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset :][: len(column) + 1].tolist()
    return map(memoryview(data).__getitem__, map(slice, bounds, bounds[1:]))


def _flat(headers: list[dict[str, Any]] | None) -> bytes | None:
    if headers is None:
        return None
    return repr([(each["key"], each["value"]) for each in headers]).encode()
