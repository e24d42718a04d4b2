"""An order-free hash of Arrow rows: the sum of a 64-bit hash per row, modulo 2**64.

It tells a batch that is repeated from one that is not the same; it is no defence against somebody who
builds a collision. A field counts by its CRC-32C and length, null apart from empty; fields are mixed
one after another, so a value that moves to another row or column changes the sum.
"""

from __future__ import annotations

from typing import Any

import crc32c
import numpy as np
import pyarrow as pa

_Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_NULL = np.uint64(0xFFFFFFFFFFFFFFFF)


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
        return _checksums(column.cast(pa.binary()).to_pylist())
    return _checksums([_flat(row) for row in column.to_pylist()])


def _checksums(values: list[bytes | None]) -> _Hashes:
    found = [_NULL_SUM if v is None else crc32c.crc32c(v) | (len(v) & 0x7FFFFFFF) << 32 for v in values]
    return np.array(found, np.uint64)


_NULL_SUM = int(_NULL)


def _flat(headers: list[dict[str, Any]] | None) -> bytes | None:
    if headers is None:
        return None
    return repr([(each["key"], each["value"]) for each in headers]).encode()
