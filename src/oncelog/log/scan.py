"""Read a log file batch by batch, in bounded memory, and find the next batch after damage."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from crc32c import crc32c

from oncelog.config import INT64_MAX
from oncelog.errors import BrokerError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header, verify_crc
from oncelog.wire.header import (
    CONTROL_BIT,
    CRC_POSITION,
    CRC_START,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    TRANSACTIONAL_BIT,
)
from oncelog.wire.primitives import Buffer

try:
    import oncelog.log._scan as _c
except ImportError:  # the C module was not compiled, or was compiled for another system
    _c = None  # type: ignore[assignment]

# After a batch larger than this, `scan_headers` reads only the next header: with large batches, most of a
# chunk would be records, which it does not need.
_LARGE_BYTES = 1 << 13

_LENGTH, _LENGTH_POSITION = struct.Struct(">i"), 8
BASE_AND_LENGTH = struct.Struct(">qi")
# The fields of a header that the functions over many headers need.
_PLAUSIBLE = struct.Struct(">qi4xb6xi34x")
_TIMESTAMP = struct.Struct(">35xq18x")
_INDEXED = struct.Struct(">qi11xi8xq14xi")
_REPLAYED = struct.Struct(">qii5xhi16xqh8x")
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


def latest_batch(block: HeaderBlock) -> BatchHeader:
    """Return the header with the largest maximum timestamp, the first one if there are several."""
    times = [timestamp_ms for (timestamp_ms,) in _TIMESTAMP.iter_unpack(block.headers)]
    return read_header(block.headers, times.index(max(times)) * HEADER_BYTES)


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
    plausible = count_plausible if _c is None else _c.count_plausible
    reached = base_offset
    while position < end:
        last: int | None = None  # the position of the last plausible batch
        for block in scan_headers(file, position, end, limits):
            count, size_bytes = plausible(block.headers, base_offset)
            if count:
                header = read_header(block.headers, (count - 1) * HEADER_BYTES)
                position = block.position + size_bytes
                last, reached = position - header.size_bytes, header.last_offset + 1
                yield HeaderBlock(block.position, position, block.headers[: count * HEADER_BYTES])
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


def count_plausible(headers: bytes, base_offset: int) -> tuple[int, int]:
    """Return the number of headers before the first one that cannot belong to the segment, and the size of
    their batches.

    `base_offset` is that of the segment. Decreasing offsets are accepted. No checksum covers a base offset,
    so a wrong one must not hide all later batches.
    """
    count = size_bytes = 0
    for offset, length, magic, delta in _PLAUSIBLE.iter_unpack(headers):
        if magic != MAGIC or delta < 0 or not 0 <= offset - base_offset < _MAX_OFFSETS:
            break
        count += 1
        size_bytes += length + LOG_OVERHEAD_BYTES
    return count, size_bytes


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


class WalkState(NamedTuple):
    """The state of a walk through a segment, before the batch at `position`.

    - `unindexed_bytes`: number of bytes since the last index entry.
    - `max_timestamp_ms`, `max_timestamp_offset`: as in `Segment`.
    """

    position: int
    end_offset: int
    unindexed_bytes: int
    max_timestamp_ms: int
    max_timestamp_offset: int


class IndexEntries(NamedTuple):
    """The result of `index_headers`, with the new entries of both indexes as columns.

    - `state`: the state after the last batch.
    - `has_gaps`: True if offsets are missing before or in a batch.
    - `last_begin`: the end offset before the last batch.
    """

    state: WalkState
    has_gaps: bool
    last_begin: int
    offsets: list[int]
    positions: list[int]
    timestamps_ms: list[int]
    timestamp_offsets: list[int]


def walk_headers(
    headers: bytes, state: WalkState, base_offset: int, max_offset: int, interval_bytes: int
) -> IndexEntries | None:
    """Return the index entries of these batches, or None if a batch does not follow the one before it.

    No offset may be above `max_offset`. Offsets in the entries are relative to `base_offset`.
    """
    index = index_headers if _c is None else _c.index_headers
    # A larger offset has no next offset in 64 bits.
    found = index(headers, state, base_offset, min(max_offset, INT64_MAX - 1), interval_bytes)
    return None if found is None else IndexEntries(WalkState(*found[0]), *found[1:])


_Indexed = tuple[tuple[int, int, int, int, int], bool, int, list[int], list[int], list[int], list[int]]


def index_headers(
    headers: bytes,
    state: tuple[int, int, int, int, int],
    base_offset: int,
    max_offset: int,
    interval_bytes: int,
) -> _Indexed | None:
    """Return the fields of IndexEntries, or None. See `walk_headers`."""
    position, end_offset, unindexed_bytes, max_timestamp_ms, max_timestamp_offset = state
    has_gaps, last_begin = False, end_offset
    offsets: list[int] = []
    positions: list[int] = []
    timestamps: list[int] = []
    timed: list[int] = []
    for offset, length, delta, timestamp_ms, count in _INDEXED.iter_unpack(headers):
        if offset < end_offset or delta < 0 or offset + delta > max_offset:
            return None
        if offset != end_offset or count != delta + 1:
            has_gaps = True
        last_begin, last_offset = end_offset, offset + delta
        end_offset = last_offset + 1
        if timestamp_ms > max_timestamp_ms:
            max_timestamp_ms, max_timestamp_offset = timestamp_ms, last_offset
        if unindexed_bytes > interval_bytes:
            offsets.append(last_offset - base_offset)
            positions.append(position)
            if max_timestamp_ms >= 0:
                timestamps.append(max_timestamp_ms)
                timed.append(max_timestamp_offset - base_offset)
            unindexed_bytes = 0
        size = length + LOG_OVERHEAD_BYTES
        position, unindexed_bytes = position + size, unindexed_bytes + size
    state = position, end_offset, unindexed_bytes, max_timestamp_ms, max_timestamp_offset
    return state, has_gaps, last_begin, offsets, positions, timestamps, timed


NumberedBatch = tuple[int, int]
"""The number of a header in a block, and the position of its batch in the file."""


class ReplayedHeaders(NamedTuple):
    """The leader epochs and the producers of a block of headers.

    - `leader_epochs`: the base offset of the first batch of each leader epoch.
    - `has_transactions`: True if a batch is transactional or a marker. `batches` is then empty.
    - `batches`: the batches of each producer id, in the order in which the ids first occur.
    """

    leader_epochs: dict[int, int]
    has_transactions: bool
    batches: dict[int, list[NumberedBatch]]


def replayed_headers(block: HeaderBlock, start: int, end: int) -> ReplayedHeaders:
    """Read the headers of the batches whose last offset is at least `start` and below `end`."""
    find = headers_to_replay if _c is None else _c.headers_to_replay
    return ReplayedHeaders(*find(block.headers, block.position, start, end))


def headers_to_replay(
    headers: bytes, position: int, start: int, end: int
) -> tuple[dict[int, int], bool, dict[int, list[NumberedBatch]]]:
    """Return the fields of ReplayedHeaders. See `replayed_headers`; the first batch is at `position`."""
    leader_epochs: dict[int, int] = {}
    has_transactions = False
    batches: dict[int, list[NumberedBatch]] = {}
    numbered = enumerate(_REPLAYED.iter_unpack(headers))
    for number, (offset, length, epoch, attributes, delta, producer_id, producer_epoch) in numbered:
        if start <= offset + delta < end:
            if epoch not in leader_epochs:
                leader_epochs[epoch] = offset
            if attributes & (CONTROL_BIT | TRANSACTIONAL_BIT):
                has_transactions = True
            if producer_id >= 0 and producer_epoch >= 0:
                batches.setdefault(producer_id, []).append((number, position))
        position += length + LOG_OVERHEAD_BYTES
    return leader_epochs, has_transactions, {} if has_transactions else batches
