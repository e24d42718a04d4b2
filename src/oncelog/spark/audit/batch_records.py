"""A check of the records inside a batch, for audits that read them anyway: do they fit the batch's header?"""

from __future__ import annotations

from oncelog.errors import CorruptMessage, InvalidRecord, UnsupportedCompressionType
from oncelog.wire.batch import BatchHeader
from oncelog.wire.primitives import Buffer
from oncelog.wire.records import check_count, payload_of, read_varint


def records_problem(data: Buffer, position: int, header: BatchHeader) -> str | None:
    """Return how the records of the batch at a position differ from its header; None: they fit.

    Offsets left out are no difference here: the header's count of records tells of them.
    """
    try:
        payload = bytes(payload_of(data, position, header, verify=False))
        check_count(header, payload)
        return _offsets_problem(payload, header)
    except IndexError:
        return "a record is cut short"
    except (CorruptMessage, InvalidRecord, UnsupportedCompressionType) as error:
        return error.detail


def _offsets_problem(payload: bytes, header: BatchHeader) -> str | None:
    at, previous = 0, -1
    for index in range(header.records_count):
        length, at = read_varint(payload, at)
        end = at + length
        if length < 0 or end > len(payload):
            return f"record {index} is cut short"
        _, after_timestamp = read_varint(payload, at + 1)
        delta, _ = read_varint(payload, after_timestamp)
        if not previous < delta <= header.last_offset_delta:
            place = f"record {index} has the offset {header.base_offset + delta}"
            if delta == previous:
                return f"{place}, which the record before it has"
            before = header.base_offset + previous
            return f"{place}, behind offset {before} in a batch up to {header.last_offset}"
        at, previous = end, delta
    if at != len(payload):
        return f"{len(payload) - at} bytes follow the last of {header.records_count} records"
    return None
