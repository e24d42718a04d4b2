"""A check of a batch's records against its header, for audits that read the records."""

from __future__ import annotations

from oncelog.errors import CorruptMessage, InvalidRecord, UnsupportedCompressionType
from oncelog.wire.batch import BatchHeader
from oncelog.wire.primitives import Buffer
from oncelog.wire.records import check_count, payload_of, read_varint


def records_problem(data: Buffer, position: int, header: BatchHeader) -> str | None:
    """Return as text how the records of the batch at `position` contradict its header, or None if they do
    not.

    Gaps in the offsets are allowed, because compaction leaves them. The header's record count shows whether a
    record is missing.
    """
    try:
        payload = bytes(payload_of(data, position, header, verify=False))
        check_count(header, payload)
        return _offsets_problem(payload, header)
    except IndexError:
        return "a record is truncated"
    except (CorruptMessage, InvalidRecord, UnsupportedCompressionType) as error:
        return error.detail


def _offsets_problem(payload: bytes, header: BatchHeader) -> str | None:
    position, previous = 0, -1
    for index in range(header.records_count):
        length, position = read_varint(payload, position)
        end = position + length
        if length < 0 or end > len(payload):
            return f"record {index} is truncated"
        _, after_timestamp = read_varint(payload, position + 1)
        delta, _ = read_varint(payload, after_timestamp)
        if not previous < delta <= header.last_offset_delta:
            place = f"record {index} has the offset {header.base_offset + delta}"
            if delta == previous:
                return f"{place}, like the record before it"
            before = header.base_offset + previous
            return f"{place}, after offset {before}, in a batch that ends at {header.last_offset}"
        position, previous = end, delta
    if position != len(payload):
        return f"{len(payload) - position} bytes follow the last of {header.records_count} records"
    return None
