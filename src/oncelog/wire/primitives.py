"""Encodes and decodes variable-length integers, and raises PeerError for malformed lengths.

An unsigned varint (`uvarint`) has 7 bits per byte, lowest bits first. It is used for lengths and tags. A
signed varint (`varint`) is zigzag-encoded first. It is used in records. The short encodings are in tables,
because nearly all encodings are short.
"""

from __future__ import annotations

from typing import NoReturn

from oncelog.errors import PeerError

Buffer = bytes | bytearray | memoryview
WritableBuffer = bytearray | memoryview


class TooManyElements(PeerError):
    """A message has more elements or tagged fields than its decoder may allocate."""


MAX_STRING_BYTES = 32_767
"""Maximum length of a string in a message, in bytes.

Source: kafka MessageGenerator ("string field had invalid length").
"""
UNBOUNDED = 1 << 62
"""An element budget that sets no limit: no message of 2^31 bytes can exceed it."""

UVARINT: tuple[bytes, ...] = tuple(bytes((n,)) for n in range(128))
"""The encodings of the unsigned numbers 0 to 127."""


def encode_uvarint(value: int) -> bytes:
    """Encode an unsigned number of any size, 7 bits per byte."""
    if value < 128:
        return UVARINT[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_varint(value: int) -> bytes:
    """Encode a signed number: zigzag, then 7 bits per byte (Kafka's varint and varlong)."""
    return encode_uvarint(value << 1 if value >= 0 else (-value << 1) - 1)


VARINT_TABLE_SIZE = 8192
VARINT: tuple[bytes, ...] = (
    *UVARINT[::2],
    *(bytes((n & 127 | 128, n >> 7)) for n in range(128, 2 * VARINT_TABLE_SIZE, 2)),
)
"""The encodings of the signed numbers 0 to 8191.

Never index this table with a negative number: Python would count from its end and return the encoding of
another number.
"""


def read_uvarint_rest(buffer: memoryview, position: int, first: int) -> tuple[int, int]:
    """Read the remaining bytes of an unsigned 32-bit varint. `first`: the varint's first byte, which is above
    127.

    Return (value, position after the varint). Raises PeerError above 5 bytes or 2^31-1. Raises IndexError at
    the end of the buffer.
    """
    value, shift = first & 127, 7
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 28:
            raise PeerError("a variable-length number has more than 5 bytes")
    if value > 0x7FFFFFFF:
        raise PeerError(f"the length {value} is above 2147483647")
    return value, position


def fail_length(what: str, length: int, remaining: int) -> NoReturn:
    """Raise PeerError for a length that is negative, exceeds the remaining bytes, or is null where null is
    not allowed.
    """
    if length < 0:
        raise PeerError(f"{what} has the length {length}, but null is not allowed")
    raise PeerError(f"{what} says {length} bytes or elements, but only {remaining} bytes are left")


def fail_string(what: str, length: int) -> NoReturn:
    """Raise PeerError for a string that is longer than MAX_STRING_BYTES."""
    raise PeerError(f"{what} is a string of {length} bytes; the limit is {MAX_STRING_BYTES}")


def fail_array(what: str, length: int, remaining: int, left: int) -> NoReturn:
    """Raise PeerError for an array whose length is invalid, and TooManyElements for one that exceeds the
    element budget `left`.
    """
    if left >= 0 or length < 0 or length > remaining:
        fail_length(what, length, remaining)
    raise TooManyElements(
        f"{what} exceeds the message's limit by {-left} elements or tagged fields; use "
        "several smaller requests"
    )
