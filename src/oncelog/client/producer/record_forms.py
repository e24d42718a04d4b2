"""Checking and converting what an application gives as a record, for both faces of the producer."""

from __future__ import annotations

from oncelog.client.arguments import headers_of
from oncelog.client.producer.batch import Row
from oncelog.errors import MisuseError
from oncelog.runtime import system
from oncelog.types import Headers


def make_row(value: bytes | None, key: bytes | None, timestamp_ms: int | None, headers: Headers) -> Row:
    """A record as the core takes it; text is refused, since only the caller knows its encoding."""
    for name, data in (("value", value), ("key", key)):
        if data is not None and not isinstance(data, (bytes, bytearray, memoryview)):
            raise MisuseError(f"{name} must be bytes or None, not {type(data).__name__}; encode it first")
    if timestamp_ms is None:
        timestamp_ms = system.current().wall_ns() // 1_000_000
    elif not isinstance(timestamp_ms, int) or not 0 <= timestamp_ms < 1 << 63:
        raise MisuseError(f"timestamp_ms={timestamp_ms!r} is no time in whole milliseconds since 1970")
    return (
        timestamp_ms,
        key if key is None or isinstance(key, bytes) else bytes(key),
        value if value is None or isinstance(value, bytes) else bytes(value),
        headers_of(headers) if headers else (),
    )
