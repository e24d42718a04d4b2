"""Read a partition's log: return complete batches from an offset on, and find records by timestamp."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from oncelog.errors import CorruptMessage
from oncelog.limits import Limits
from oncelog.log.background import BlockingCall
from oncelog.log.disk import Buffer
from oncelog.log.scan import BASE_AND_LENGTH, BadBatch, ScannedBatch, scan
from oncelog.log.segment import Segment
from oncelog.log.segments import SegmentList
from oncelog.types import Compression
from oncelog.wire.batch import HEADER_BYTES, verify_crc
from oncelog.wire.header import LOG_OVERHEAD_BYTES
from oncelog.wire.records import LOSSLESS, find_record_at_time, iter_records, payload_of

_LAST_DELTA = struct.Struct(">i")
_LAST_DELTA_POSITION = 23


class LogSlice(NamedTuple):
    """Whole batches as stored, and the offset after the last batch."""

    records: Buffer
    next_offset: int


class ReadCursor(NamedTuple):
    """The position of a batch in a segment's file."""

    segment: Segment
    position: int


class FoundTime(NamedTuple):
    """The timestamp and the offset of a record."""

    timestamp_ms: int
    offset: int


Search = Generator[BlockingCall | None, None, FoundTime | None]
"""A search by timestamp. It is a background task (`oncelog.log.background`) that returns a record or None."""

_BYTES_PER_COST = 1024
_SEGMENT_COST = 40
"""The cost of finding a segment and opening its file, in batches."""


class LogReader:
    """The reader of one partition. It caches the file positions at which recent reads ended."""

    def __init__(self, segments: SegmentList, limits: Limits) -> None:
        self._segments = segments
        self._max_cursors = limits.max_read_cursors
        self._cursors: dict[int, ReadCursor] = {}

    def read(self, offset: int, upper_offset: int, max_bytes: int, at_least_one: bool) -> LogSlice:
        """Return whole batches from the one that contains `offset` to below `upper_offset`.

        The total size of the batches is at most `max_bytes`. With `at_least_one`, the first batch is returned
        even if it is larger. The result is empty if no batch fits. Raises OSError, CorruptMessage.
        """
        cursors = self._cursors
        cursor = cursors.pop(offset, None)
        if cursor is None or not cursor.segment.is_whole_at(cursor.position):
            # There is no cached position, it is the end of a segment that has been closed since, or a damaged
            # batch begins there.
            if cursor is not None:
                # A reader may pass through thousands of segments between two checkpoints. See
                # test_readers_leave_no_descriptors_behind.
                cursor.segment.release_file()
            cursor = find_cursor(self._segments, offset)
            if cursor is None:
                return LogSlice(b"", offset)
        result = read_at(cursor, upper_offset, max_bytes, at_least_one)
        if result is None:
            return LogSlice(b"", offset)
        records, next_offset = result
        if next_offset <= offset:
            segment, position = cursor
            raise _damaged(segment, position, f"the batch at offset {offset} has an earlier base offset")
        # Remember the position of `next_offset`, because the reader's next fetch begins there.
        if len(cursors) >= self._max_cursors:
            del cursors[next(iter(cursors))]
        segment, position = cursor
        cursors[next_offset] = ReadCursor(segment, position + len(records))
        return result

    def forget_cursors(self) -> None:
        """Clear the cached positions. Called when segments are dropped or replaced."""
        self._cursors.clear()

    def search(self, timestamp_ms: int | None, start_offset: int, cost: StepCost) -> Search:
        """Find the first record whose timestamp is at least `timestamp_ms`. With None, find the record with
        the largest timestamp.

        Only records at or after `start_offset` count. `cost` is shared by the searches of one request.
        """
        if timestamp_ms is None:
            return search_max_timestamp(self._segments, start_offset, cost)
        return search_timestamp(self._segments, timestamp_ms, start_offset, cost)


def find_cursor(segments: SegmentList, offset: int) -> ReadCursor | None:
    """Return the position of the batch that contains `offset`, or of the next batch; None at the log end.

    Raises CorruptMessage if `offset` is in damaged bytes: returning the batch after the damage would lose
    records silently. See test_batches_behind_damage_can_be_read.
    """
    for segment in segments.from_offset(offset):
        if segment.end_offset <= offset:
            continue
        start = segment.index.position_for(max(offset - segment.base_offset, 0))
        try:
            cursor = _scan_to(start, segment, offset)
        except CorruptMessage:
            cursor = _scan_to(0, segment, offset)  # scan from the start: the index may be wrong
        if cursor is not None:
            return cursor
    if segments.active.size_bytes and segments.active.end_offset > offset:
        # An empty result would make a consumer wait here forever.
        raise CorruptMessage(f"{segments.active.log_path} is damaged: it has no batch with offset {offset}")
    return None


def _scan_to(start: int, segment: Segment, offset: int) -> ReadCursor | None:
    damage: BadBatch | None = None
    suspect: ReadCursor | None = None
    lowest = segment.base_offset
    for batch in _scan_past_damage(segment, start):
        if isinstance(batch, BadBatch):
            damage = batch
            continue
        header = batch.header
        is_growing = lowest <= header.base_offset <= header.last_offset
        if not is_growing or batch.position in segment.damaged:
            # The checksum does not cover the base offset. Without this error, a consumer would pass over the
            # batch. See test_a_reader_that_comes_to_a_damaged_base_offset_gets_an_error.
            text = f"a batch has the offsets {header.base_offset} to {header.last_offset}"
            damage = BadBatch(batch.position, text)
            continue
        lowest = header.base_offset + 1
        if header.last_offset < offset:
            continue
        if header.base_offset > offset and (damage or suspect):
            break  # `offset` is in the damaged bytes or in the suspect batch
        cursor = ReadCursor(segment, batch.position)
        if header.base_offset >= offset or verify_crc(batch.bytes(), 0, header.size_bytes):
            return cursor
        # The checksum is wrong, so the header may claim offsets that the batch does not have.
        suspect = suspect or cursor
    if suspect is None and damage is not None:
        raise _damaged(segment, damage.position, damage.reason)
    return suspect


def _scan_past_damage(segment: Segment, start: int) -> Iterator[ScannedBatch | BadBatch]:
    position: int | None = start
    reached = segment.base_offset
    while position is not None:
        behind = None
        for batch in scan(segment.file, position, segment.size_bytes, limits=segment.limits):
            yield batch
            if isinstance(batch, BadBatch):
                behind = segment.behind(batch.position, reached)
            else:
                reached = batch.header.base_offset + 1
        position = behind


def _damaged(segment: Segment, position: int, reason: str) -> CorruptMessage:
    return CorruptMessage(f"{segment.log_path} is damaged at position {position}: {reason}")


def read_at(cursor: ReadCursor, upper_offset: int, max_bytes: int, at_least_one: bool) -> LogSlice | None:
    """Return whole batches below `upper_offset` from `cursor` on, within its segment; None if none fits.

    The total size of the batches is at most `max_bytes`. With `at_least_one`, the first batch is returned
    even if it is larger. Raises CorruptMessage if no whole batch begins at the cursor.
    """
    segment, position = cursor
    available = segment.size_bytes - position
    if available <= 0:
        return None
    chunk = segment.file.pread(min(available, max(max_bytes, HEADER_BYTES)), position)
    if len(chunk) < HEADER_BYTES:
        # An empty result would make a consumer wait here forever. See
        # test_a_reader_that_comes_to_a_torn_end_of_a_closed_segment_gets_an_error.
        raise _damaged(segment, position, f"{len(chunk)} bytes are too few for a batch header")
    first_offset, length = BASE_AND_LENGTH.unpack_from(chunk)
    size = length + LOG_OVERHEAD_BYTES
    if not HEADER_BYTES <= size <= available:
        raise _damaged(
            segment, position, f"the batch length field says {size} bytes, but {available} are left"
        )
    if not segment.base_offset <= first_offset < segment.end_offset:
        raise _damaged(segment, position, f"the batch has the base offset {first_offset}")
    if first_offset >= upper_offset or (size > max_bytes and not at_least_one):
        return None
    if size > len(chunk):
        chunk = segment.file.pread(size, position)
    if len(chunk) == available and segment.end_offset <= upper_offset:
        return LogSlice(chunk, segment.end_offset)
    return _whole_batches(chunk, upper_offset, max(max_bytes, size), _skip(cursor, chunk, upper_offset))


def _skip(cursor: ReadCursor, chunk: bytes, upper_offset: int) -> int:
    """Return the position in `chunk` of the last batch that has an index entry, so that a walk from there
    reads fewer headers.

    Returns 0 if the chunk may contain batches at or above `upper_offset`.
    """
    segment, position = cursor
    if segment.end_offset > upper_offset:
        return 0
    return max(segment.index.position_before(position + len(chunk)) - position, 0)


def _whole_batches(chunk: bytes, upper_offset: int, max_bytes: int, start: int) -> LogSlice | None:
    end, next_offset, limit = start, None, min(len(chunk), max_bytes)
    if start >= limit:
        end = 0
    while end + HEADER_BYTES <= limit:
        base_offset, length = BASE_AND_LENGTH.unpack_from(chunk, end)
        size = length + LOG_OVERHEAD_BYTES
        if end + size > limit or base_offset >= upper_offset or size < HEADER_BYTES:
            break
        (delta,) = _LAST_DELTA.unpack_from(chunk, end + _LAST_DELTA_POSITION)
        next_offset = base_offset + delta + 1
        end += size
    if next_offset is None:
        return _whole_batches(chunk, upper_offset, max_bytes, 0) if start else None
    return LogSlice(chunk if end == len(chunk) else memoryview(chunk)[:end], next_offset)


class StepCost:
    """The cost of the current step so far, shared by the searches of one request. `spent` is the sum of the
    batches, kilobytes and searched records so far.
    """

    __slots__ = ("spent",)

    def __init__(self) -> None:
        self.spent = 0


def search_timestamp(segments: SegmentList, timestamp_ms: int, start_offset: int, cost: StepCost) -> Search:
    """Find the first record at or after `start_offset` whose timestamp is at least `timestamp_ms`.

    The search runs in bounded steps. A segment whose largest timestamp is at least `timestamp_ms` may contain
    no such record: the timestamp may belong to a record below `start_offset`, or only to a batch header. Then
    the search continues with the next segment. Raises CorruptMessage if damaged bytes may contain the record.
    """
    while (segment := _first_with(segments, timestamp_ms, start_offset)) is not None:
        relative = max(segment.times.offset_before(timestamp_ms), start_offset - segment.base_offset)
        position, step_cost = segment.index.position_for(relative), segment.limits.search_step_cost
        cost.spent += _SEGMENT_COST
        for batch in _scan_for(segment, position, start_offset):
            header, is_next_step = batch.header, False
            cost.spent += 1 + header.size_bytes // _BYTES_PER_COST
            if header.max_timestamp_ms >= timestamp_ms and header.last_offset >= start_offset:
                records: list[FoundTime | None] = []
                call = partial(_append_first_record, records, batch, timestamp_ms, start_offset)
                cost.spent += header.records_count
                # A compressed batch is always decoded in a separate call, however few records it has: 10 KB
                # may become 256 MB.
                if header.records_count > step_cost or header.compression is not Compression.NONE:
                    yield call
                    is_next_step = True
                else:
                    call()
                if records[0] is not None:
                    return records[0]
            start_offset = max(start_offset, header.last_offset + 1)
            if cost.spent >= step_cost:
                cost.spent = 0
                yield None
                is_next_step = True
            if is_next_step and segment not in segments:
                # The segment was compacted or deleted while other requests ran. Continue in the segment that
                # has these offsets now. See
                # test_a_look_up_by_time_continues_if_its_segment_is_deleted_during_a_job.
                break
        else:
            start_offset = max(start_offset, segment.end_offset)
            segment.release_file()
    return None


def _scan_for(segment: Segment, position: int, start_offset: int) -> Iterator[ScannedBatch]:
    """Yield the batches from `position` onwards, for a search for records at or after `start_offset`.

    Raises CorruptMessage if damaged bytes may contain such a record. Other damage is skipped. See
    test_a_look_up_by_time_does_not_skip_damage and
    test_a_look_up_by_time_ignores_damage_below_the_log_start.
    """
    for batch in scan(segment.file, position, segment.size_bytes, limits=segment.limits):
        if isinstance(batch, BadBatch):
            cursor = _scan_to(batch.position, segment, start_offset)
            if cursor is None:
                raise _damaged(segment, batch.position, batch.reason)
            yield from _scan_for(segment, cursor.position, start_offset)
            return
        yield batch


def _first_with(segments: SegmentList, timestamp_ms: int, start_offset: int) -> Segment | None:
    for segment in segments.from_offset(start_offset):
        if segment.max_timestamp_ms >= timestamp_ms and segment.end_offset > start_offset:
            return segment
    return None


def _append_first_record(
    records: list[FoundTime | None], batch: ScannedBatch, timestamp_ms: int, start_offset: int
) -> None:
    records.append(_first_record_at(batch, timestamp_ms, start_offset))


def _first_record_at(batch: ScannedBatch, timestamp_ms: int, start_offset: int) -> FoundTime | None:
    payload = payload_of(batch.bytes(), 0, batch.header, verify=True)
    record = find_record_at_time(payload, batch.header, timestamp_ms, start_offset)
    return None if record is None else FoundTime(*record)


def search_max_timestamp(segments: SegmentList, start_offset: int, cost: StepCost) -> Search:
    """Find the first record at or after `start_offset` with the largest timestamp. The result is None if the
    log has no timestamps.
    """
    exact_ms: dict[Segment, int] = {}
    while True:
        # Deleted segments that wait for a flush do not count.
        largest_ms, newest = max(
            (
                (exact_ms.get(segment, segment.max_timestamp_ms), segment)
                for segment in segments.from_offset(start_offset)
            ),
            key=itemgetter(0),
        )
        if largest_ms < 0:
            return None
        record = yield from search_timestamp(segments, largest_ms, start_offset, cost)
        is_there = newest in segments
        if record is not None or (is_there and newest in exact_ms):
            return record
        # The segment stays, but DeleteRecords or compaction has removed the record; Apache Kafka returns a
        # deleted record or none. Or the segment was compacted or deleted between two steps. See
        # test_a_look_up_of_the_largest_time_ignores_removed_records and
        # test_a_look_up_of_the_largest_time_continues_if_its_segment_is_deleted_during_a_job.
        if is_there:
            exact_ms[newest] = yield from _largest_from(segments, newest, start_offset, cost)


def _largest_from(
    segments: SegmentList, segment: Segment, start_offset: int, cost: StepCost
) -> Generator[BlockingCall | None, None, int]:
    """Return the largest timestamp of a segment's records at or after `start_offset`; -1 if there is none, or
    if the segment is compacted or deleted between two steps.

    Raises CorruptMessage if damaged bytes may contain such a record.
    """
    largest = [-1]
    position = segment.index.position_for(max(start_offset - segment.base_offset, 0))
    for batch in _scan_for(segment, position, start_offset):
        header, is_next_step = batch.header, True
        cost.spent += 1 + header.size_bytes // _BYTES_PER_COST
        if header.base_offset < start_offset <= header.last_offset:
            yield partial(_note_largest, largest, batch, start_offset)
        elif cost.spent >= segment.limits.search_step_cost:
            cost.spent = 0
            yield None
        else:
            is_next_step = False
        if is_next_step and segment not in segments:
            return -1
        if header.base_offset >= start_offset and header.records_count:
            largest[0] = max(largest[0], header.max_timestamp_ms)
    return largest[0]


def _note_largest(largest: list[int], batch: ScannedBatch, start_offset: int) -> None:
    for records in iter_records(batch.data, batch.data_position, name_errors=LOSSLESS):
        times_ms = (record.timestamp_ms for record in records if record.offset >= start_offset)
        # There may be none: compaction may have removed the records of the batch from `start_offset` on. See
        # test_a_look_up_of_the_largest_time_reads_a_batch_whose_last_records_are_gone.
        largest[0] = max((largest[0], *times_ms))
