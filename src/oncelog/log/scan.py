"""Read a log file batch by batch, in bounded memory, and find the way past damage."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from oncelog.errors import BrokerError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header, verify_crc
from oncelog.wire.header import LOG_OVERHEAD_BYTES, MAGIC

# Of larger batches only the headers are read, if no more is needed.
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
"""A batch header as a row of a NumPy array."""
_LENGTH, _LENGTH_POSITION = struct.Struct(">i"), 8
BASE_AND_LENGTH = struct.Struct(">qi")
_MAGIC, _MAGIC_POSITION = bytes([MAGIC]), 16
_MAX_OFFSETS = 1 << 31
"""The offsets of one segment: indexes store them as 32-bit distances from its base offset."""


class ScannedBatch(NamedTuple):
    """A batch in a log file, whole at `data_position` of `data` until the next step of the scan."""

    position: int
    header: BatchHeader
    data: memoryview
    data_position: int

    def bytes(self) -> memoryview:
        """Return the bytes of the batch alone."""
        return self.data[self.data_position : self.data_position + self.header.size_bytes]


class BadBatch(NamedTuple):
    """Bytes that are no batch, from `position` on. `reason` says why."""

    position: int
    reason: str


class Readable(Protocol):
    """A log file that can be scanned: `oncelog.log.disk.File`, or a file of an audit."""

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
    """Yield the batches from `position` to `end`. A BadBatch ends the scan: a torn or damaged tail.

    `verify` also checks each checksum. `max_batch_bytes` None allows any size that fits the file.
    """
    chunk, chunk_position, view = b"", position, memoryview(b"")
    # The first read is small, for a search of one batch; the next ones grow.
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
            yield BadBatch(position, f"the batch claims {size} bytes, {end - position} are there")
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


def find_behind(
    file: Readable, position: int, end: int, offset: int, limits: Limits = DEFAULT_LIMITS
) -> int | None:
    """Return where the log continues after damage at a position that holds `offset`; None if nowhere."""
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
    """Return the position of the first whole batch from a position on, None without one.

    It may be the value of a record. Use it only to find the way past damage: it looks at every byte.
    """
    while position + HEADER_BYTES <= end:
        chunk = file.pread(min(limits.scan_chunk_bytes, end - position), position)
        index = chunk.find(_MAGIC, _MAGIC_POSITION)
        while index >= 0:
            begin = position + index - _MAGIC_POSITION
            base_offset, length = BASE_AND_LENGTH.unpack_from(chunk, index - _MAGIC_POSITION)
            # Without the upper bound, random bytes look like a batch of half the file every few kilobytes.
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
    """Bytes that hold no whole batch, from `position` to below `end`, where the log continues."""

    position: int
    end: int


def scan_headers_past_damage(
    file: Readable, position: int, end: int, base_offset: int, limits: Limits = DEFAULT_LIMITS
) -> Iterator[HeaderBlock | Damage]:
    """Yield the headers of the batches of a segment or a part of it, and its damage, in order.

    Checksums are verified only where something is wrong. The bytes of a `Damage` may begin with a batch of
    the block before it, if only the length of that batch is wrong.
    """
    reached = base_offset
    while position < end:
        last: int | None = None  # where the last plausible batch begins
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
            begin, offset = last, reached - 1  # its length is wrong
        # This may be before the end that a damaged length claims.
        position = find_behind(file, begin, end, offset, limits) or end
        yield Damage(begin, position)


def _believed(block: HeaderBlock, base_offset: int) -> np.ndarray:
    """Return the headers of a block, as rows, up to the first one that cannot belong to this segment.

    Offsets that do not grow are no reason to skip all that follows: no checksum covers a base offset.
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

    Nothing else is read or checked. Bytes that are no batch end the scan; the caller sees that `end` was not
    reached.
    """
    chunk, chunk_position, size, length_at = b"", position, 0, _LENGTH.unpack_from
    block: list[bytes] = []
    block_position = position
    while position + HEADER_BYTES <= end:
        start = position - chunk_position
        if start + HEADER_BYTES > len(chunk):
            read_bytes = limits.scan_chunk_bytes if size <= _LARGE_BYTES else HEADER_BYTES
            chunk, chunk_position, start = file.pread(min(read_bytes, end - position), position), position, 0
        (length,) = length_at(chunk, start + _LENGTH_POSITION)
        size = length + LOG_OVERHEAD_BYTES
        if size < HEADER_BYTES or position + size > end:
            break
        block.append(chunk[start : start + HEADER_BYTES])
        position += size
        if len(block) == limits.scan_block_headers:
            yield HeaderBlock(block_position, position, b"".join(block))
            block, block_position = [], position
    if block:
        yield HeaderBlock(block_position, position, b"".join(block))
