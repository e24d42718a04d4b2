"""Builds whole record batches from records. Also exports the functions for batch headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from oncelog.errors import MisuseError
from oncelog.types import Compression, TimestampType
from oncelog.wire.compression import compress
from oncelog.wire.header import (
    CODEC_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER,
    HEADER_BYTES,
    LOG_APPEND_TIME_BIT,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TRANSACTIONAL_BIT,
    BatchHeader,
    assign_producer,
    iter_batches,
    read_header,
    restamp_time,
    stamp,
    verify_crc,
    write_crc,
)
from oncelog.wire.primitives import Buffer, WritableBuffer
from oncelog.wire.records import LOSSLESS, DecodedRecord, NewRecord, encode_after_space

__all__ = [
    "HEADER_BYTES",
    "BatchHeader",
    "assign_producer",
    "build_batch",
    "iter_batches",
    "read_header",
    "restamp_time",
    "rewrite_batch",
    "seal",
    "stamp",
    "verify_crc",
]

WritableT = TypeVar("WritableT", bound=WritableBuffer)


def build_batch(
    records: Sequence[NewRecord],
    *,
    compression: Compression = Compression.NONE,
    level: int | None = None,
    producer_id: int | None = None,
    producer_epoch: int | None = None,
    base_sequence: int | None = None,
    base_offset: int = 0,
    partition_leader_epoch: int = -1,
    is_transactional: bool = False,
    is_control: bool = False,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
) -> bytearray:
    """Return a sealed batch of at least one record, with offset deltas 0, 1, 2, ...

    If `level` is None, the codec's default is used. With LogAppendTime, the batch's timestamp is the records'
    largest timestamp.

    Raises MisuseError if there are no records, and ConfigError if the codec's library is missing.
    """
    if not records:
        raise MisuseError("a batch needs at least one record")
    base_timestamp_ms = records[0][0]
    batch = seal_encoded(
        encode_after_space(records, base_timestamp_ms, HEADER_BYTES),
        len(records),
        base_timestamp_ms,
        max([record[0] for record in records]),
        compression=compression,
        level=level,
        attributes=(TRANSACTIONAL_BIT if is_transactional else 0)
        | (CONTROL_BIT if is_control else 0)
        | (LOG_APPEND_TIME_BIT if timestamp_type is TimestampType.LOG_APPEND_TIME else 0),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    stamp(batch, 0, base_offset, partition_leader_epoch)
    return batch


def seal(
    parts: Sequence[Buffer],
    records_count: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    *,
    compression: Compression = Compression.NONE,
    level: int | None = None,
    attributes: int = 0,
    producer_id: int | None = None,
    producer_epoch: int | None = None,
    base_sequence: int | None = None,
    last_offset_delta: int | None = None,
) -> bytearray:
    """Return a batch with header and checksum. `parts`: the encoded records. See `seal_encoded`."""
    return seal_encoded(
        bytearray().join((bytes(HEADER_BYTES), *parts)),
        records_count,
        base_timestamp_ms,
        max_timestamp_ms,
        compression=compression,
        level=level,
        attributes=attributes,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        last_offset_delta=last_offset_delta,
    )


def seal_encoded(
    batch: WritableT,
    records_count: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    *,
    compression: Compression = Compression.NONE,
    level: int | None = None,
    attributes: int = 0,
    producer_id: int | None = None,
    producer_epoch: int | None = None,
    base_sequence: int | None = None,
    last_offset_delta: int | None = None,
) -> WritableT | bytearray:
    """Return a batch with header and checksum.

    `batch` has free space for the header, then the encoded records. The caller must not use it afterwards.
    Without compression it is sealed in place and returned. `attributes` must not have the bits of the codec.
    If `last_offset_delta` is None, the batch has a record for each offset.

    Raises ConfigError if the codec's library is missing.
    """
    sealed: WritableT | bytearray = batch
    if compression:
        sealed = bytearray(HEADER_BYTES) + compress(compression, memoryview(batch)[HEADER_BYTES:], level)
    HEADER.pack_into(
        sealed, 0, 0, len(sealed) - LOG_OVERHEAD_BYTES, -1, MAGIC, 0, attributes | compression,
        records_count - 1 if last_offset_delta is None else last_offset_delta,
        base_timestamp_ms, max_timestamp_ms,
        -1 if producer_id is None else producer_id,
        -1 if producer_epoch is None else producer_epoch,
        -1 if base_sequence is None else base_sequence,
        records_count,
    )  # fmt: skip
    write_crc(sealed, 0, len(sealed))
    return sealed


def rewrite_batch(
    header: BatchHeader, records: Sequence[DecodedRecord], delete_horizon_ms: int | None
) -> bytearray:
    """Return a stored batch with only the given records, possibly none.

    Offsets, producer and sequences do not change. `delete_horizon_ms`: the delete horizon of the result, or
    None. Source: KIP-534, KIP-98.
    """
    records = _within_64_bits(records, delete_horizon_ms)
    attributes = header.attributes & ~(CODEC_MASK | DELETE_HORIZON_BIT)
    if delete_horizon_ms is not None:
        attributes |= DELETE_HORIZON_BIT
    base_timestamp_ms, max_timestamp_ms = -1, header.max_timestamp_ms
    if records:
        base_timestamp_ms = records[0].timestamp_ms
        if header.timestamp_type is TimestampType.CREATE_TIME:
            max_timestamp_ms = max(_as_int64(record.timestamp_ms) for record in records)
    if delete_horizon_ms is not None:
        base_timestamp_ms = delete_horizon_ms
    batch = seal_encoded(
        encode_after_space(
            [NewRecord(*record[1:]) for record in records],
            base_timestamp_ms,
            HEADER_BYTES,
            [record.offset - header.base_offset for record in records],
            LOSSLESS,
        ),
        len(records),
        base_timestamp_ms,
        max_timestamp_ms,
        compression=header.compression if records else Compression.NONE,
        attributes=attributes,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        last_offset_delta=header.last_offset_delta,
    )
    stamp(batch, 0, header.base_offset, header.partition_leader_epoch)
    return batch


def _within_64_bits(records: Sequence[DecodedRecord], base_ms: int | None) -> Sequence[DecodedRecord]:
    """Return the records with timestamps whose distance from the base fits into 64 bits.

    The base is `base_ms`; if that is None, the first record's timestamp. A client may send a timestamp and a
    delta whose sum has more bits. The sum is reduced to 64 bits, as in Java. See
    test_a_batch_whose_timestamps_overflow_can_be_rewritten.
    """
    if not records:
        return records
    base_ms = _as_int64(records[0].timestamp_ms) if base_ms is None else base_ms
    deltas = [record.timestamp_ms - base_ms for record in records]
    if -(1 << 63) <= min(deltas) <= max(deltas) < 1 << 63:
        return records
    return [
        record._replace(timestamp_ms=base_ms + _as_int64(delta))
        for record, delta in zip(records, deltas, strict=True)
    ]


def _as_int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
