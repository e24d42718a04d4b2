"""Confluent's wire format: a zero byte, a schema id of 4 bytes (big-endian), and the data. No I/O.

In Protobuf data, message indexes follow the id. They are the path to the message in its file: the index of a
message of the file, then of a message nested in that one, and so on. The number of indexes, and then each
index, is a zigzag varint. The path [0], the first message of a file, is written as a single zero byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from oncelog.errors import SchemaDataError

MAGIC = 0
HEADER_BYTES = 5
MAX_INDEXES = 64
"""The maximum depth of a nested message. protoc itself allows 32 levels."""
_MAX_VARINT_BYTES = 5


def encode_header(schema_id: int, indexes: Sequence[int] | None = None) -> bytes:
    """Return the bytes before the data. `indexes` are the message indexes, None for Avro and JSON Schema."""
    header = bytes([MAGIC]) + schema_id.to_bytes(4, "big")
    if indexes is None:
        return header
    if list(indexes) == [0]:
        return header + b"\0"
    return header + b"".join(map(_varint, (len(indexes), *indexes)))


def is_framed(data: bytes) -> bool:
    """Return True if data can be in the wire format: it begins with a zero byte and has room for an id."""
    return len(data) >= HEADER_BYTES and data[0] == MAGIC


def decode_schema_id(data: bytes) -> int:
    """Return the schema id. Raises SchemaDataError for data that is not in the wire format."""
    if not is_framed(data):
        begin = data[:HEADER_BYTES].hex(" ") or "nothing"
        raise SchemaDataError(
            f"{len(data)} bytes that begin with {begin} are not in the wire format of a schema registry: a "
            "zero byte and a schema id of 4 bytes"
        )
    return int.from_bytes(data[1:HEADER_BYTES], "big")


def decode_indexes(data: bytes) -> tuple[tuple[int, ...], int]:
    """Return the message indexes of Protobuf data and the position after them.

    Raises SchemaDataError for indexes that are cut off, negative, or more than MAX_INDEXES.
    """
    count, position = _read_varint(data, HEADER_BYTES)
    if count == 0:
        return (0,), position
    if not 0 < count <= MAX_INDEXES:
        raise SchemaDataError(f"{count} message indexes: expected 1 to {MAX_INDEXES}")
    indexes = []
    for _ in range(count):
        index, position = _read_varint(data, position)
        if index < 0:
            raise SchemaDataError(f"the message index {index} is negative")
        indexes.append(index)
    return tuple(indexes), position


def _varint(value: int) -> bytes:
    zigzag = value << 1
    parts = bytearray()
    while zigzag > 0x7F:
        parts.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    parts.append(zigzag)
    return bytes(parts)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    zigzag = 0
    for shift, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        zigzag |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return (zigzag >> 1) ^ -(zigzag & 1), position + shift + 1
    raise SchemaDataError("the message indexes are cut off or malformed")
