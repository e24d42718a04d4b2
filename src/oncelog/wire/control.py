"""Control records: the COMMIT and ABORT markers that end a transaction in a partition.

A control batch has one record, whose key is `i16 version | i16 type`. A marker's value is `i16 version | i32
coordinator_epoch`. A control record has an offset but no sequence. Consumers never return it to the
application.

Source: apache/kafka ControlRecordType, EndTransactionMarker.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from oncelog.errors import CorruptMessage
from oncelog.wire.batch import build_batch
from oncelog.wire.primitives import Buffer
from oncelog.wire.records import NewRecord, decode_records

_KEY = struct.Struct(">hh")
_MARKER = struct.Struct(">hi")


class ControlType(IntEnum):
    """The type of a control record. Only Kafka's metadata log uses the last five."""

    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


class ControlRecord(NamedTuple):
    """A control record. `type` is None for an unknown type, which readers must skip.

    `coordinator_epoch` is None unless the record is a COMMIT or ABORT marker.
    """

    offset: int
    timestamp_ms: int
    type: ControlType | None
    coordinator_epoch: int | None


def encode_end_marker(
    producer_id: int, producer_epoch: int, commit: bool, coordinator_epoch: int, timestamp_ms: int
) -> bytearray:
    """Return the control batch of 78 bytes that commits or aborts a producer's transaction."""
    key = _KEY.pack(0, ControlType.COMMIT if commit else ControlType.ABORT)
    value = _MARKER.pack(0, coordinator_epoch)
    return build_batch(
        [NewRecord(timestamp_ms, key, value)],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        is_transactional=True,
        is_control=True,
    )


def decode_control(buffer: Buffer, position: int = 0, *, verify: bool = True) -> ControlRecord | None:
    """Return the record of the control batch at `position`.

    Return None if the batch is empty: compaction may remove a marker and keep its batch header. Raises
    CorruptMessage if the key or value is too short or has a negative version.
    """
    records = decode_records(buffer, position, verify=verify)
    if not records:
        return None
    record = records[0]
    number = _unpack(_KEY, record.key, record.offset)
    if number not in ControlType.__members__.values():
        return ControlRecord(record.offset, record.timestamp_ms, None, None)
    kind = ControlType(number)
    is_marker = kind in (ControlType.ABORT, ControlType.COMMIT)
    epoch = _unpack(_MARKER, record.value, record.offset) if is_marker else None
    return ControlRecord(record.offset, record.timestamp_ms, kind, epoch)


def _unpack(layout: struct.Struct, data: bytes | None, offset: int) -> int:
    """Return the integer after the version in a control record's key or value.

    `offset`: the record's offset, for error texts. As the protocol demands, newer versions are read as
    version 0.
    """
    if data is None or len(data) < layout.size:
        raise CorruptMessage(f"the control record at offset {offset} has {len(data or b'')} bytes")
    version, number = layout.unpack_from(data)
    if version < 0:
        raise CorruptMessage(f"the control record at offset {offset} has version {version}")
    return int(number)
