"""Checking and converting what an application gives as a record, for both faces of the producer."""

from __future__ import annotations

from collections.abc import Iterable

from oncelog.client.producer_batch import Row
from oncelog.edge import machine
from oncelog.errors import MisuseError
from oncelog.types import Header


def make_row(
    value: bytes | None, key: bytes | None, timestamp_ms: int | None, headers: Iterable[Header]
) -> Row:
    """A record as the core takes it; text is refused, since only the caller knows its encoding."""
    for name, data in (("value", value), ("key", key)):
        if data is not None and not isinstance(data, (bytes, bytearray, memoryview)):
            raise MisuseError(f"{name} must be bytes or None, not {type(data).__name__}; encode it first")
    if timestamp_ms is None:
        timestamp_ms = machine.current().wall_ns() // 1_000_000
    elif not isinstance(timestamp_ms, int) or not 0 <= timestamp_ms < 1 << 63:
        raise MisuseError(f"timestamp_ms={timestamp_ms!r} is no time in whole milliseconds since 1970")
    return (
        timestamp_ms,
        key if key is None or isinstance(key, bytes) else bytes(key),
        value if value is None or isinstance(value, bytes) else bytes(value),
        tuple(_header(*header) for header in headers) if headers else (),
    )


def _header(name: str, value: bytes | None) -> Header:
    if not isinstance(name, str) or not (value is None or isinstance(value, (bytes, bytearray, memoryview))):
        raise MisuseError(f"a header must be a pair of str and bytes or None, not {(name, value)!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise MisuseError(f"the header name {name!r} cannot be written as UTF-8") from None
    return name, None if value is None else bytes(value)
