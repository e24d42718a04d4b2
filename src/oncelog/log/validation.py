"""Check a client's batch by its header before the log accepts it, with Kafka's checks in Kafka's order.

The order is: base offset (INVALID_RECORD), size (MESSAGE_TOO_LARGE), checksum (CORRUPT_MESSAGE), counts,
control bit and sequence (INVALID_RECORD), timestamps (INVALID_TIMESTAMP), segment size
(RECORD_LIST_TOO_LARGE). The header has the first and the largest timestamp, so records are not decoded.

Two settings need more checks. On a topic whose `compression.type` is not `producer`, batches are compressed
again, and on a compacted topic every record needs a key. For both, the payload is decompressed, up to a
maximum size. Source: Kafka's UnifiedLog.analyzeAndValidateRecords and LogValidator.
"""

from __future__ import annotations

from collections.abc import Callable

from crc32c import crc32c

from oncelog.errors import (
    CorruptMessage,
    InvalidRecord,
    InvalidTimestamp,
    MessageTooLarge,
    RecordListTooLarge,
)
from oncelog.log.config import LogConfig
from oncelog.types import Compression, TimestampType
from oncelog.wire.batch import BatchHeader, read_header, restamp_time, seal
from oncelog.wire.compression import decompress_within, most_output
from oncelog.wire.header import (
    CRC_START,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TRANSACTIONAL_BIT,
    HeaderFields,
)
from oncelog.wire.primitives import Buffer
from oncelog.wire.records import MAX_RECORDS, MIN_RECORD_BYTES, find_records_without_key

_CODEC_BITS, _LOG_APPEND_TIME_BIT, _CONTROL_BIT = 0x07, 0x08, 0x20
_NO_TIMESTAMP = -1
_MAX_RECORD_ERRORS = 10
MAX_GROWTH = 4
"""The maximum ratio of a decompressed payload's size to max.message.bytes."""
_BYTES_AS_RECORD = 64
"""The number of bytes whose decompression or compression costs as much as checking one record."""
_CREATE_TIME, _LAST_CODEC = TimestampType.CREATE_TIME, int(Compression.ZSTD)


def no_lead_ms() -> int:
    """Return 0. This is the default of `lead_ms`: the broker's clock is not ahead of the wall clock."""
    return 0


def check_batch(
    records: memoryview,
    header: BatchHeader,
    config: LogConfig,
    now_ms: int,
    lead_ms: Callable[[], int] = no_lead_ms,
) -> None:
    """Check the header and checksum of a client's batch. Raises the BrokerError of the first failing check.

    `lead_ms` returns by how many ms `now_ms` is ahead of the wall clock; 0 unless the wall clock was set
    back.
    """
    size = header.batch_length + 12
    if header.base_offset != 0:
        raise InvalidRecord(f"the base offset of a client's batch must be 0, not {header.base_offset}")
    if size > config.max_message_bytes:
        raise MessageTooLarge(
            f"the batch has {size} bytes; the limit is max.message.bytes={config.max_message_bytes}"
        )
    if crc32c(records[CRC_START:size]) != header.crc:
        raise CorruptMessage("the checksum of the batch is wrong")
    count, delta, attributes = header.records_count, header.last_offset_delta, header.attributes
    if delta < 0 or count != delta + 1:
        raise InvalidRecord(f"the batch has {count} records but the last offset delta {delta}")
    if attributes & _CONTROL_BIT:
        raise InvalidRecord("a client may not write control batches")
    if attributes & _CODEC_BITS > _LAST_CODEC:
        raise InvalidRecord(f"compression codec {attributes & _CODEC_BITS} is unknown")
    if count * MIN_RECORD_BYTES > size:
        _check_room(header)
    if header.producer_id is not None and (header.base_sequence is None or header.producer_epoch is None):
        raise InvalidRecord(f"producer id {header.producer_id} without an epoch and a base sequence")
    if attributes & _LOG_APPEND_TIME_BIT and not _may_be_create_time(header, config):
        raise _timestamp_error(0, "a producer may not set the timestamp type to LogAppendTime")
    if config.timestamp_type is _CREATE_TIME:
        _check_times(header, config, now_ms, lead_ms)
    if size > config.segment_bytes:
        raise RecordListTooLarge(
            f"the batch has {size} bytes; the limit is segment.bytes={config.segment_bytes}"
        )


def is_usual_batch(fields: HeaderFields, config: LogConfig, now_ms: int) -> bool:
    """Return True if a client's batch with these header fields passes `check_batch`. The caller must check
    the checksum, the producer fields and segment.bytes.

    On a topic that stores batches as they were sent, such a batch does not need `prepare_batch`. False does
    not mean a rejection: `check_batch` and `prepare_batch` must then decide.
    """
    base_offset, length, _, magic, _, attributes, delta, first_ms, max_ms, _, _, _, count = fields
    size, after_max_ms = length + LOG_OVERHEAD_BYTES, config.timestamp_after_max_ms
    return (
        not base_offset
        and magic == MAGIC
        and (attributes <= _LAST_CODEC or attributes & ~TRANSACTIONAL_BIT <= _LAST_CODEC)
        and attributes >= 0
        and 0 <= delta == count - 1 < size // MIN_RECORD_BYTES
        and HEADER_BYTES <= size <= config.max_message_bytes
        and first_ms >= 0
        and max_ms >= 0
        and -config.timestamp_before_max_ms <= first_ms - now_ms <= after_max_ms
        and -config.timestamp_before_max_ms <= max_ms - now_ms <= after_max_ms
    )


def _check_room(header: BatchHeader) -> None:
    """Raise InvalidRecord if the payload is too small for the header's number of records in any codec.

    Such a batch could take 2^31 offsets, as many as a whole segment. See
    test_a_count_that_no_codec_could_hold_is_refused.
    """
    max_bytes = most_output(header.compression, header.size_bytes - HEADER_BYTES)
    if header.records_count * MIN_RECORD_BYTES > max_bytes:
        raise InvalidRecord(
            f"the batch says {header.records_count} records but has {header.size_bytes} bytes"
        )


def _may_be_create_time(header: BatchHeader, config: LogConfig) -> bool:
    """Return True if a batch marked LogAppendTime may be stored as CreateTime: the topic stores CreateTime,
    and the batch has timestamps.
    """
    return config.timestamp_type is _CREATE_TIME and header.base_timestamp_ms != _NO_TIMESTAMP


def _check_times(header: BatchHeader, config: LogConfig, now_ms: int, lead_ms: Callable[[], int]) -> None:
    base_ms, max_ms = header.base_timestamp_ms, header.max_timestamp_ms
    earliest_ms, latest_ms = now_ms - config.timestamp_before_max_ms, now_ms + config.timestamp_after_max_ms
    if not (earliest_ms <= base_ms <= latest_ms and earliest_ms <= max_ms <= latest_ms):
        # Check again with the wall clock's time. If the wall clock was ahead and was set back, `now_ms` stays
        # ahead, and records with the right time would look too old. See
        # test_a_clock_that_was_ahead_refuses_no_record_once_it_is_right.
        now_ms -= lead_ms()
        _check_time(base_ms, 0, config, now_ms)
        _check_time(max_ms, header.last_offset_delta, config, now_ms)


def _check_time(timestamp_ms: int, index: int, config: LogConfig, now_ms: int) -> None:
    if timestamp_ms == _NO_TIMESTAMP:
        return
    if timestamp_ms > now_ms + config.timestamp_after_max_ms:
        ahead = f"timestamp {timestamp_ms} is {timestamp_ms - now_ms} ms ahead of the broker"
        raise _timestamp_error(index, f"{ahead}; the limit is {config.timestamp_after_max_ms} ms")
    if timestamp_ms < now_ms - config.timestamp_before_max_ms:
        behind = f"timestamp {timestamp_ms} is {now_ms - timestamp_ms} ms behind the broker"
        raise _timestamp_error(index, f"{behind}; the limit is {config.timestamp_before_max_ms} ms")


def _timestamp_error(index: int, text: str) -> InvalidTimestamp:
    error = InvalidTimestamp(f"record {index}: {text}")
    error.record_errors = ((index, text),)
    return error


def needs_preparing(header: BatchHeader, config: LogConfig) -> bool:
    """Return True if `prepare_batch` must check or change the batch before it is stored.

    The result is True on compacted topics, and for a batch that has another codec or timestamp type than the
    topic.
    """
    if config.is_compacted or header.attributes & _LOG_APPEND_TIME_BIT:
        return True
    return config.compression is not None and config.compression != header.attributes & _CODEC_BITS


def prepare_batch(
    records: memoryview, header: BatchHeader, config: LogConfig, count_cost: Callable[[int], None]
) -> memoryview:
    """Return the batch with the topic's timestamp type and codec; on a compacted topic, check the keys, too.

    A change of the timestamp type changes only the header. Checking keys and changing the codec need the
    payload. It is decompressed only up to a maximum size, because this runs in the one thread that serves all
    clients. `count_cost` is called with the cost of decompressing, in records, even if an error follows.
    Raises MESSAGE_TOO_LARGE if the payload or the number of records is above its maximum, and INVALID_RECORD
    if a record cannot be parsed or lacks a key. Raises CORRUPT_MESSAGE or UNSUPPORTED_COMPRESSION_TYPE if the
    payload cannot be decompressed.
    """
    if header.attributes & _LOG_APPEND_TIME_BIT:
        restamp_time(records, 0, _CREATE_TIME, header.max_timestamp_ms)
    has_codec = config.compression is None or config.compression == header.attributes & _CODEC_BITS
    if has_codec and not config.is_compacted:
        return records
    max_records = min(config.max_message_bytes // MIN_RECORD_BYTES, MAX_RECORDS)
    if header.records_count > max_records:
        raise MessageTooLarge(
            f"a batch that must be decompressed has {header.records_count} records; at most "
            f"{max_records} fit into max.message.bytes={config.max_message_bytes}"
        )
    max_bytes = MAX_GROWTH * config.max_message_bytes
    decompressed_bytes = max_bytes
    try:
        payload = decompress_within(header.compression, records[HEADER_BYTES : header.size_bytes], max_bytes)
        decompressed_bytes = max_bytes if payload is None else len(payload)
    finally:
        count_cost(header.records_count + (header.size_bytes + decompressed_bytes) // _BYTES_AS_RECORD)
    if payload is None:
        # MESSAGE_TOO_LARGE instead of INVALID_RECORD: the Java producer limits batches by their compressed
        # size, and splits a batch after this error. See
        # test_a_java_producer_splits_a_batch_that_is_too_large.
        raise MessageTooLarge(
            f"the batch is larger than {max_bytes} bytes after decompression, which is "
            f"{MAX_GROWTH} times max.message.bytes"
        )
    _check_keys(payload, header, config)
    return records if has_codec else memoryview(_recompress(payload, header, config))


def _check_keys(payload: Buffer, header: BatchHeader, config: LogConfig) -> None:
    missing = find_records_without_key(payload, header, _MAX_RECORD_ERRORS)
    if missing and config.is_compacted:
        error = InvalidRecord("a compacted topic needs a key for each record")
        error.record_errors = tuple((index, "the record has no key") for index in missing)
        raise error


def _recompress(payload: Buffer, header: BatchHeader, config: LogConfig) -> bytearray:
    """Compress the payload with the topic's codec, and return the new batch. The records do not change."""
    assert config.compression is not None
    return seal(
        [payload],
        header.records_count,
        header.base_timestamp_ms,
        header.max_timestamp_ms,
        compression=config.compression,
        level=config.compression_level,
        attributes=header.attributes & ~(_CODEC_BITS | _LOG_APPEND_TIME_BIT),
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        last_offset_delta=header.last_offset_delta,
    )


def stamp_append_time(records: memoryview, now_ms: int) -> BatchHeader:
    """Set the batch's timestamps to `now_ms`, and its timestamp type to LogAppendTime, in place. Return the
    new header.
    """
    restamp_time(records, 0, TimestampType.LOG_APPEND_TIME, now_ms)
    return read_header(records)
