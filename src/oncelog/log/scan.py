"""Read a log file batch by batch, in bounded memory, and find the next batch after damage."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from crc32c import crc32c

from oncelog.errors import BrokerError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header, verify_crc
from oncelog.wire.header import CRC_POSITION, CRC_START, LOG_OVERHEAD_BYTES, MAGIC
from oncelog.wire.primitives import Buffer

try:
    import oncelog.log._scan as _c
except ImportError:  # the C module was not compiled, or was compiled for another system
    _c = None  # type: ignore[assignment]

# After a batch larger than this, `scan_headers` reads only the next header: with large batches, most of a
# chunk would be records, which it does not need.
_LARGE_BYTES = 1 << 13

HEADERS = np.dtype(
    [
        ("base_offset", ">i8"),
        ("batch_length", ">i4"),
        ("leader_epoch", ">i4"),
        ("magic", "i1"),
        ("crc", ">u4"),
        ("attributes", ">i2"),
        ("last_offset_delta", ">i4"),
        ("base_timestamp_ms", ">i8"),
        ("max_timestamp_ms", ">i8"),
        ("producer_id", ">i8"),
        ("producer_epoch", ">i2"),
        ("base_sequence", ">i4"),
        ("records_count", ">i4"),
    ]
)
"""The NumPy row type of a batch header."""
_LENGTH, _LENGTH_POSITION = struct.Struct(">i"), 8
BASE_AND_LENGTH = struct.Struct(">qi")
_CRC = struct.Struct(">I")
_MAGIC, _MAGIC_POSITION = bytes([MAGIC]), 16
_MAX_OFFSETS = 1 << 31
"""The maximum number of offsets in a segment. Its indexes store offsets as signed 32-bit distances from its
base offset.
"""


class ScannedBatch(NamedTuple):
    """A whole batch in a log file.

    It begins at `position` in the file, and at `data_position` in `data`. `data` is valid until the next step
    of the scan.
    """

    position: int
    header: BatchHeader
    data: memoryview
    data_position: int

    def bytes(self) -> memoryview:
        """Return only the bytes of this batch."""
        return self.data[self.data_position : self.data_position + self.header.size_bytes]


class BadBatch(NamedTuple):
    """The position of bytes that are not a valid batch. `reason` says what is wrong with them."""

    position: int
    reason: str


class Readable(Protocol):
    """A log file to scan: an `oncelog.log.disk.File`, or a file that an audit reads."""

    def pread(self, size: int, position: int) -> bytes: ...


def scan(
    file: Readable,
    position: int,
    end: int,
    *,
    verify: bool = False,
    max_batch_bytes: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[ScannedBatch | BadBatch]:
    """Yield the batches from `position` to `end`. A BadBatch at a torn tail or damage ends the scan.

    `verify` also checks each checksum. `max_batch_bytes` None allows any size that fits into the file.
    """
    chunk, chunk_position, view = b"", position, memoryview(b"")
    # The first read is small, because many scans need only one batch. The next reads grow.
    max_bytes = limits.scan_chunk_bytes
    chunk_bytes = max_bytes if verify else limits.scan_first_chunk_bytes
    while position < end:
        if position + HEADER_BYTES > end:
            yield BadBatch(position, f"{end - position} bytes are too few for a batch header")
            return
        start = position - chunk_position
        if start + HEADER_BYTES > len(chunk):
            chunk, chunk_position, start = file.pread(min(chunk_bytes, end - position), position), position, 0
            chunk_bytes, view = min(4 * chunk_bytes, max_bytes), memoryview(chunk)
        try:
            header = read_header(chunk, start)
        except BrokerError as error:
            yield BadBatch(position, error.detail)
            return
        size = header[1] + LOG_OVERHEAD_BYTES
        if position + size > end or (max_batch_bytes is not None and size > max_batch_bytes):
            yield BadBatch(
                position, f"the batch length field says {size} bytes, but {end - position} are left"
            )
            return
        if start + size > len(chunk):
            read_bytes = min(max(chunk_bytes, size), end - position)
            chunk, chunk_position, start = file.pread(read_bytes, position), position, 0
            chunk_bytes, view = min(4 * chunk_bytes, max_bytes), memoryview(chunk)
        if verify and not verify_crc(chunk, start, size):
            yield BadBatch(position, f"the checksum of the batch at offset {header.base_offset} is wrong")
            return
        yield tuple.__new__(ScannedBatch, (position, header, view, start))
        position += size


def scan_whole(
    file: Readable, position: int, end: int, limits: Limits = DEFAULT_LIMITS
) -> Iterator[HeaderBlock]:
    """Yield the headers of the batches with right checksums from `position` to `end`, many at a time.

    The scan ends before the first batch that is not whole. Call `scan` from there to get the reason.
    """
    find = whole_batches if _c is None else _c.whole_batches
    read_bytes = limits.scan_chunk_bytes
    while position + HEADER_BYTES <= end:
        wanted_bytes = min(read_bytes, end - position)
        data = file.pread(wanted_bytes, position)
        headers, size_bytes = find(data, crc32c)
        read_bytes = limits.scan_chunk_bytes
        if headers:
            yield HeaderBlock(position, position + size_bytes, headers)
            position += size_bytes
            continue
        # The file is shorter than `end`. Stop, because every further read would return the same bytes. Guard:
        # test_a_batch_larger_than_a_chunk_is_read_whole.
        if len(data) < wanted_bytes:
            return
        (length,) = _LENGTH.unpack_from(data.ljust(HEADER_BYTES), _LENGTH_POSITION)
        if not len(data) < length + LOG_OVERHEAD_BYTES <= end - position:
            return
        read_bytes = length + LOG_OVERHEAD_BYTES


def whole_batches(data: Buffer, crc32c: Callable[[memoryview], int]) -> tuple[bytes, int]:
    """Return the headers of the whole batches at the start of `data`, and the position after the last one.

    A batch is whole if all of its bytes are in `data`, its magic is 2, and its checksum is right.
    """
    view, headers, position = memoryview(data), [], 0
    length_at, crc_at, last = _LENGTH.unpack_from, _CRC.unpack_from, len(data) - HEADER_BYTES
    while position <= last:
        size = length_at(data, position + _LENGTH_POSITION)[0] + LOG_OVERHEAD_BYTES
        stop = position + size
        if size < HEADER_BYTES or stop > len(data) or data[position + _MAGIC_POSITION] != MAGIC:
            break
        if crc32c(view[position + CRC_START : stop]) != crc_at(data, position + CRC_POSITION)[0]:
            break
        headers.append(view[position : position + HEADER_BYTES])
        position = stop
    return b"".join(headers), position


def find_behind(
    file: Readable, position: int, end: int, offset: int, limits: Limits = DEFAULT_LIMITS
) -> int | None:
    """Return the position at which the log continues after damage at `position`, or None if no such position
    is found.

    `offset` is the lowest offset that the damaged bytes contain.
    """
    claimed = file.pread(_LENGTH.size, position + _LENGTH_POSITION)
    length: int = _LENGTH.unpack(claimed.ljust(_LENGTH.size, b"\0"))[0]
    claimed_end = position + length + LOG_OVERHEAD_BYTES
    if claimed_end == end:
        return claimed_end
    if position < claimed_end < end:
        found = next(scan(file, claimed_end, end, verify=True, limits=limits), None)
        if isinstance(found, ScannedBatch) and found.header.base_offset > offset:
            return claimed_end
    return find_batch(file, position + 1, end, offset + 1, limits)


def find_batch(
    file: Readable, position: int, end: int, min_offset: int, limits: Limits = DEFAULT_LIMITS
) -> int | None:
    """Return the position of the first valid batch at or after `position`, or None if there is none.

    `min_offset` is the lowest base offset that the batch may have. A batch may begin at any byte, so the
    result may be bytes within a record's value that look like a batch. Therefore, use this function only to
    skip damage.
    """
    while position + HEADER_BYTES <= end:
        chunk = file.pread(min(limits.scan_chunk_bytes, end - position), position)
        index = chunk.find(_MAGIC, _MAGIC_POSITION)
        while index >= 0:
            begin = position + index - _MAGIC_POSITION
            base_offset, length = BASE_AND_LENGTH.unpack_from(chunk, index - _MAGIC_POSITION)
            # Without the upper bound on the base offset, random bytes would look like a batch header every
            # few kilobytes.
            is_in_segment = 0 <= base_offset - min_offset < _MAX_OFFSETS
            if is_in_segment and 0 < length <= end - begin - LOG_OVERHEAD_BYTES:
                found = next(
                    scan(file, begin, begin + length + LOG_OVERHEAD_BYTES, verify=True, limits=limits), None
                )
                if isinstance(found, ScannedBatch):
                    return begin
            index = chunk.find(_MAGIC, index + 1)
        position += max(len(chunk) - _MAGIC_POSITION, 1)
    return None


class HeaderBlock(NamedTuple):
    """The headers of the batches from `position` to below `end`, 61 bytes each."""

    position: int
    end: int
    headers: bytes


class Damage(NamedTuple):
    """Damaged bytes from `position` to below `end`, where the log continues."""

    position: int
    end: int


def scan_headers_past_damage(
    file: Readable, position: int, end: int, base_offset: int, limits: Limits = DEFAULT_LIMITS
) -> Iterator[HeaderBlock | Damage]:
    """Yield the batch headers and the damage of a segment, or of a part of it, in order.

    Checksums are verified only next to damage. If the length in a batch's header is wrong, the `Damage` may
    begin with that batch, although the preceding `HeaderBlock` contains its header.
    """
    reached = base_offset
    while position < end:
        last: int | None = None  # the position of the last plausible batch
        for block in scan_headers(file, position, end, limits):
            rows = _believed(block, base_offset)
            if len(rows):
                sizes = rows["batch_length"].astype(np.int64) + LOG_OVERHEAD_BYTES
                position = block.position + int(sizes.sum())
                last = position - int(sizes[-1])
                reached = int(rows["base_offset"][-1]) + int(rows["last_offset_delta"][-1]) + 1
                yield HeaderBlock(block.position, position, block.headers[: len(rows) * HEADER_BYTES])
            if position != block.end:
                break
        if position >= end:
            return
        begin, offset = position, reached
        if last is not None and not _is_whole(file, last, position):
            begin, offset = last, reached - 1  # the length in the last batch's header is wrong
        # Search from `begin`, because the next batch may start before the end that a wrong length claims.
        position = find_behind(file, begin, end, offset, limits) or end
        yield Damage(begin, position)


def _believed(block: HeaderBlock, base_offset: int) -> np.ndarray:
    """Return the headers of a block, as rows, up to the first header that cannot belong to the segment.

    Decreasing offsets are accepted. No checksum covers a base offset, so a wrong one must not hide all later
    batches.
    """
    rows = np.frombuffer(block.headers, HEADERS)
    distances = rows["base_offset"].astype(np.int64) - base_offset
    is_right = (rows["magic"] == MAGIC) & (rows["last_offset_delta"] >= 0)
    is_right &= (distances >= 0) & (distances < _MAX_OFFSETS)
    return rows if is_right.all() else rows[: int(is_right.argmin())]


def _is_whole(file: Readable, position: int, end: int) -> bool:
    return verify_crc(file.pread(end - position, position), 0, end - position)


def scan_headers(
    file: Readable, position: int, end: int, limits: Limits = DEFAULT_LIMITS
) -> Iterator[HeaderBlock]:
    """Yield the headers of the batches from `position` to `end`, thousands at a time.

    Only headers are read, and nothing is verified. Bytes that are not a batch end the scan early.
    """
    find = find_headers if _c is None else _c.find_headers
    chunk, chunk_position, size = b"", position, 0
    block: list[bytes] = []
    block_position, count = position, 0
    while position + HEADER_BYTES <= end:
        start = position - chunk_position
        if start + HEADER_BYTES > len(chunk):
            read_bytes = limits.scan_chunk_bytes if size <= _LARGE_BYTES else HEADER_BYTES
            chunk, chunk_position, start = file.pread(min(read_bytes, end - position), position), position, 0
        headers, stop = find(chunk, start, end - chunk_position, limits.scan_block_headers - count)
        if not headers:
            break
        size = _LENGTH.unpack_from(headers, len(headers) - HEADER_BYTES + _LENGTH_POSITION)[0]
        block.append(headers)
        position, count = chunk_position + stop, count + len(headers) // HEADER_BYTES
        if count == limits.scan_block_headers:
            yield HeaderBlock(block_position, position, b"".join(block))
            block, block_position, count = [], position, 0
    if block:
        yield HeaderBlock(block_position, position, b"".join(block))


def find_headers(data: Buffer, position: int, limit: int, max_count: int) -> tuple[bytes, int]:
    """Return the batch headers in `data` from `position` on, at most `max_count`, and where the next batch
    begins.

    A batch must end at or before `limit`, which may be after the end of `data`. Nothing else is checked.
    """
    view, length_at, last = memoryview(data), _LENGTH.unpack_from, len(data) - HEADER_BYTES
    headers: list[memoryview] = []
    while position <= last and len(headers) < max_count:
        size = length_at(data, position + _LENGTH_POSITION)[0] + LOG_OVERHEAD_BYTES
        if size < HEADER_BYTES or position + size > limit:
            break
        headers.append(view[position : position + HEADER_BYTES])
        position += size
    return b"".join(headers), position
