"""The 61-byte header of record batches of magic 2, read and written without the records.

    0  i64 base_offset         23  i32 last_offset_delta    51  i16 producer_epoch
    8  i32 batch_length        27  i64 base_timestamp_ms    53  i32 base_sequence
    12 i32 leader epoch        35  i64 max_timestamp_ms     57  i32 records_count
    16 i8  magic = 2           43  i64 producer_id          61  records, or one compressed stream
    17 u32 CRC-32C of byte 21 to the end
    21 i16 attributes: bits 0-2 codec, 3 timestamp type, 4 transactional, 5 control, 6 delete horizon

The checksum does not cover base offset, length, leader epoch and magic. A broker can therefore set base
offset and leader epoch without reading the batch. On the wire, -1 means "no producer" or "no sequence". This
module returns None for -1.

Source: apache/kafka DefaultRecordBatch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import crc32c

from oncelog.errors import CorruptMessage, InvalidRecord
from oncelog.types import Compression, TimestampType
from oncelog.wire.primitives import Buffer, WritableBuffer

HEADER_BYTES = 61
LOG_OVERHEAD_BYTES = 12
"""Number of bytes at the start of a batch that batch_length does not count."""
MIN_BATCH_LENGTH = HEADER_BYTES - LOG_OVERHEAD_BYTES
MAGIC = 2
CRC_POSITION = 17
CRC_START = 21
"""Position of the first byte that the checksum covers."""

CODEC_MASK = 0x07
LOG_APPEND_TIME_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
DELETE_HORIZON_BIT = 0x40

HEADER = struct.Struct(">qiibIhiqqqhii")
HeaderFields = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
"""The fields of a header as HEADER unpacks them, in the order of BatchHeader. -1 stands for None."""
STAMP = struct.Struct(">qii")
"""Base offset, batch length and leader epoch, at the start of a batch."""
_LENGTH = struct.Struct(">qi")
_CRC = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")
_MAX_TIMESTAMP = struct.Struct(">q")
_PRODUCER = struct.Struct(">qhi")
_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_SEQUENCES = 2**31
# These tuples are indexed by the number in the header. Calling the enum for each batch costs ten times as
# much.
_COMPRESSIONS, _TIMESTAMP_TYPES = tuple(Compression), tuple(TimestampType)


class BatchHeader(NamedTuple):
    """The header of a batch. `batch_length` is the number of bytes after the field itself.

    `producer_id` and `producer_epoch` are None if the batch has no producer, `base_sequence` if it has no
    sequence. `magic` is always 2, because batches of other formats are rejected.
    """

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int | None
    producer_epoch: int | None
    base_sequence: int | None
    records_count: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole batch in bytes, including the header."""
        return LOG_OVERHEAD_BYTES + self.batch_length

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int | None:
        """The sequence number of the last record; None if the batch has no sequence.

        Sequence numbers continue at 0 after 2^31-1. The package wire may not import
        oncelog.rules.idempotence.sequence, so this repeats its calculation. Guard:
        test_the_last_sequence_wraps_as_the_rule_says.
        """
        if self.base_sequence is None:
            return None
        return (self.base_sequence + self.last_offset_delta) % _SEQUENCES

    @property
    def compression(self) -> Compression:
        """The codec. Raises CorruptMessage for the unassigned numbers 5 to 7."""
        codec = self.attributes & CODEC_MASK
        if codec >= len(_COMPRESSIONS):
            raise CorruptMessage(f"a batch has compression codec {codec}; expected 0 to 4")
        return _COMPRESSIONS[codec]

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def timestamp_type(self) -> TimestampType:
        return _TIMESTAMP_TYPES[bool(self.attributes & LOG_APPEND_TIME_BIT)]

    @property
    def has_delete_horizon(self) -> bool:
        """True if `base_timestamp_ms` is a delete horizon: the time from which compaction may drop
        tombstones.
        """
        return bool(self.attributes & DELETE_HORIZON_BIT)


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Parse the header at a position. The records after it need not be in the buffer.

    Raises CorruptMessage if fewer than 61 bytes are left, the length is too small, or the magic is unknown.
    Raises InvalidRecord for message formats before magic 2.
    """
    try:
        fields = HEADER.unpack_from(buffer, position)
    except struct.error as error:
        raise CorruptMessage(f"{len(buffer) - position} bytes are too few for a batch header") from error
    if fields[3] != MAGIC:
        _refuse_magic(fields[3], position)
    if fields[1] < MIN_BATCH_LENGTH:
        raise CorruptMessage(f"batch length {fields[1]} at position {position} is below {MIN_BATCH_LENGTH}")
    if fields[11] < 0 or fields[10] < 0 or fields[9] < 0:
        fields = (*fields[:9], *[None if value < 0 else value for value in fields[9:12]], fields[12])
    return tuple.__new__(BatchHeader, fields)


def _refuse_magic(magic: int, position: int) -> None:
    if magic in (0, 1):
        raise InvalidRecord(f"message format {magic} at position {position}; only format 2 is supported")
    raise CorruptMessage(f"magic {magic} at position {position}; expected {MAGIC}")


def iter_batches(buffer: Buffer, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """Yield the position and header of each complete batch. Stop at an incomplete batch at the end.

    Raises CorruptMessage or InvalidRecord for an invalid header.
    """
    end = len(buffer)
    while end - position >= HEADER_BYTES:
        header = read_header(buffer, position)
        if position + header.size_bytes > end:
            return
        yield position, header
        position += header.size_bytes


def verify_crc(buffer: Buffer, position: int, size_bytes: int) -> bool:
    """Return True if the checksum of a batch is right. All bytes of the batch must be in the buffer."""
    if size_bytes < HEADER_BYTES or position + size_bytes > len(buffer):
        return False
    (expected,) = _CRC.unpack_from(buffer, position + CRC_POSITION)
    view = memoryview(buffer)[position + CRC_START : position + size_bytes]
    return bool(crc32c.crc32c(view) == expected)


def write_crc(buffer: WritableBuffer, position: int, size_bytes: int) -> None:
    """Compute and write the checksum of a batch."""
    view = memoryview(buffer)[position + CRC_START : position + size_bytes]
    _CRC.pack_into(buffer, position + CRC_POSITION, crc32c.crc32c(view))


def stamp(buffer: WritableBuffer, position: int, base_offset: int, partition_leader_epoch: int) -> None:
    """Write base offset and leader epoch of a batch in place. The checksum does not cover these fields."""
    _BASE_OFFSET.pack_into(buffer, position, base_offset)
    _LEADER_EPOCH.pack_into(buffer, position + 12, partition_leader_epoch)


def restamp_time(
    buffer: WritableBuffer, position: int, timestamp_type: TimestampType, max_timestamp_ms: int
) -> None:
    """Write timestamp type and largest timestamp of a batch in place, and a new checksum."""
    (attributes,) = _ATTRIBUTES.unpack_from(buffer, position + 21)
    attributes &= ~LOG_APPEND_TIME_BIT
    if timestamp_type is TimestampType.LOG_APPEND_TIME:
        attributes |= LOG_APPEND_TIME_BIT
    _ATTRIBUTES.pack_into(buffer, position + 21, attributes)
    _MAX_TIMESTAMP.pack_into(buffer, position + 35, max_timestamp_ms)
    write_crc(buffer, position, _size_at(buffer, position))


def assign_producer(
    batch: WritableBuffer,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int | None,
    is_transactional: bool = False,
) -> None:
    """Write producer id, epoch and sequence of a sealed batch in place, and a new checksum."""
    (attributes,) = _ATTRIBUTES.unpack_from(batch, 21)
    attributes = (attributes & ~TRANSACTIONAL_BIT) | (TRANSACTIONAL_BIT if is_transactional else 0)
    _ATTRIBUTES.pack_into(batch, 21, attributes)
    sequence = -1 if base_sequence is None else base_sequence
    _PRODUCER.pack_into(batch, 43, producer_id, producer_epoch, sequence)
    write_crc(batch, 0, _size_at(batch, 0))


def _size_at(buffer: Buffer, position: int) -> int:
    _, batch_length = _LENGTH.unpack_from(buffer, position)
    return LOG_OVERHEAD_BYTES + int(batch_length)
