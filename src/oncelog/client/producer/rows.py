"""Rows: records in a batch as plain tuples, made from the checked arguments of the application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncelog.client.arguments import headers_of
from oncelog.errors import MisuseError
from oncelog.types import Header, Headers

Row = tuple[int, bytes | None, bytes | None, tuple[Header, ...]]
"""Timestamp (ms since the epoch), key, value, headers. A plain tuple is created faster than a NamedTuple."""

RECORD_OVERHEAD_BYTES = 21
"""The bytes that are counted for a record besides key, value and headers, as in Java.

This is an estimate. The lengths and deltas nearly always take fewer bytes.
"""


def make_row(
    value: Any,
    key: Any,
    timestamp_ms: object,
    headers: Headers,
    wall_ns: Callable[[], int],
) -> Row:
    """Return a record as a row. `wall_ns` gives the time of a record without a timestamp.

    Raises MisuseError for text, because only the caller knows its encoding, and for a timestamp before 1970.
    """
    for name, data in (("value", value), ("key", key)):
        if data is not None and not isinstance(data, (bytes, bytearray, memoryview)):
            raise MisuseError(f"{name} must be bytes or None, not {type(data).__name__}; encode it first")
    if timestamp_ms is None:
        timestamp_ms = wall_ns() // 1_000_000
    elif not isinstance(timestamp_ms, int) or not 0 <= timestamp_ms < 1 << 63:
        raise MisuseError(f"timestamp_ms={timestamp_ms!r} must be whole milliseconds since 1970")
    return (
        timestamp_ms,
        key if key is None or isinstance(key, bytes) else bytes(key),
        value if value is None or isinstance(value, bytes) else bytes(value),
        headers_of(headers) if headers else (),
    )


def row_size_bytes(key: bytes | None, value: bytes | None, headers: tuple[Header, ...]) -> int:
    """Return the estimated size of a record in an uncompressed batch: nearly always an upper bound."""
    size = RECORD_OVERHEAD_BYTES + (len(key) if key else 0) + (len(value) if value else 0)
    for name, data in headers:
        size += 10 + 4 * len(name) + (len(data) if data else 0)
    return size
