"""One segment of a partition's log: a file of batches and its index files.

The file names contain the base offset: the lowest offset that the segment may contain. Source: Kafka's
LogSegment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from oncelog.config import INT64_MAX
from oncelog.errors import StorageError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.background import BlockingCall
from oncelog.log.config import LogConfig
from oncelog.log.disk import Buffer, Disk, File, remove_if_exists
from oncelog.log.index import OffsetIndex, TimeIndex, TransactionIndex
from oncelog.log.partition_disk import PartitionDisk
from oncelog.log.scan import (
    BadBatch,
    HeaderBlock,
    ScannedBatch,
    WalkState,
    find_behind,
    latest_batch,
    scan,
    scan_headers_past_damage,
    scan_whole,
    walk_headers,
)
from oncelog.wire.batch import HEADER_BYTES, BatchHeader, read_header
from oncelog.wire.header import verify_crc

LOG_SUFFIX, INDEX_SUFFIX, TIME_SUFFIX, TXN_SUFFIX = ".log", ".index", ".timeindex", ".txnindex"
SUFFIXES = (LOG_SUFFIX, INDEX_SUFFIX, TIME_SUFFIX, TXN_SUFFIX)
_STEM = re.compile("[0-9]{20}")


def file_name(offset: int, suffix: str) -> str:
    """Return Kafka's file name: the offset in 20 decimal digits, then the suffix."""
    return f"{offset:020d}{suffix}"


def is_stem(stem: str) -> bool:
    """Return True if `stem` is an offset in the form that `file_name` writes: 20 ASCII digits, and at most
    2^63 - 1.

    Files with other names, such as `5`, do not belong to the log and are left alone. See
    test_a_file_with_a_strange_name_is_left_alone.
    """
    return _STEM.fullmatch(stem) is not None and int(stem) <= INT64_MAX


def base_offsets(names: Iterable[str]) -> list[int]:
    """Return the base offsets of the log files among a directory's file names, ascending."""
    stems = (name.removesuffix(LOG_SUFFIX) for name in names if name.endswith(LOG_SUFFIX))
    return sorted(int(stem) for stem in stems if is_stem(stem))


class Segment:
    """The batches with offsets from `base_offset` to below `end_offset`, in the first `size_bytes` of a file.

    - `max_timestamp_ms`: the largest timestamp, -1 if there is none.
    - `max_timestamp_offset`: the last offset of the batch that has this timestamp, -1 if there is none.
    - `first_timestamp_ms`: the largest timestamp of the first batch; None if it has none or was not read yet.
    - `transactions_from`: set by `rebuild`. Index entries of markers at or above it must be added again.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        base_offset: int,
        file: File,
        size_bytes: int,
        now_ms: int,
        ending: str = "",
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self._disk = disk
        self._stem = f"{directory}/{base_offset:020d}"
        self._ending = ending
        self.base_offset = base_offset
        self.end_offset = base_offset
        self.file = file
        self.size_bytes = size_bytes
        self.created_ms = now_ms
        self.first_timestamp_ms: int | None = None
        self._is_first_read = False
        self.max_timestamp_ms = self.max_timestamp_offset = -1
        self._index: OffsetIndex | None = OffsetIndex(
            disk, self._path(INDEX_SUFFIX), limits.index_run_entries
        )
        self._times: TimeIndex | None = TimeIndex(disk, self._path(TIME_SUFFIX), limits.index_run_entries)
        self._interval_bytes = 0
        self.index_is_full = False
        self.transactions = TransactionIndex(disk, self._path(TXN_SUFFIX), limits.index_run_entries)
        self.transactions_from: int | None = None
        self._unindexed_bytes = 0
        self._max_relative_offset = self._highest_relative_offset()
        self._needs_cut = False
        self._is_removed = False
        self._rewrite_range: tuple[int, int] | None = None
        self.is_index_synced = False
        """True for a closed segment whose offset index and time index survive a power loss."""
        self._is_time_sure = True
        self.has_gaps = False
        """True if offsets are missing between the batches that were read, because the segment was compacted.
        """
        self.damaged: dict[int, int] = {}
        """Damaged bytes below the recovery point: maps their position to the position at which the log
        continues.
        """

    @classmethod
    def create(
        cls,
        disk: Disk,
        directory: str,
        base_offset: int,
        now_ms: int,
        ending: str = "",
        limits: Limits = DEFAULT_LIMITS,
    ) -> Segment:
        """Create an empty segment. Files that a failed attempt left under its names are emptied.

        `ending` is appended to each file name; compaction passes `.cleaned`. Raises OSError.
        """
        stem = f"{directory}/{base_offset:020d}"
        # An empty transaction index is created, too. So if the file is missing after a restart, it was lost.
        for suffix in (INDEX_SUFFIX, TIME_SUFFIX, TXN_SUFFIX):
            remove_if_exists(disk, f"{stem}{suffix}{ending}")
            disk.open(f"{stem}{suffix}{ending}", create=True).close()
        # The log file is created last, because recovery assumes that the previous segment ends at its base
        # offset. If its creation fails, the previous segment may still grow beyond that offset. See
        # test_a_segment_that_could_not_be_made_does_not_end_the_log.
        file = disk.open(f"{stem}{LOG_SUFFIX}{ending}", create=True)
        try:
            if file.size():
                file.truncate(0)
        except OSError:
            file.close()
            raise
        return cls(disk, directory, base_offset, file, 0, now_ms, ending, limits)

    @classmethod
    def open(
        cls, disk: Disk, directory: str, base_offset: int, now_ms: int, limits: Limits = DEFAULT_LIMITS
    ) -> Segment:
        """Open only the log file. Call `load_closed`, `load_indexes` or `rebuild` before any other method."""
        file = disk.open(f"{directory}/{file_name(base_offset, LOG_SUFFIX)}")
        return cls(disk, directory, base_offset, file, file.size(), now_ms, limits=limits)

    @property
    def lacks_entries(self) -> bool:
        """True if the replay must add entries to the transaction index again, because of a `rebuild`."""
        return self.transactions_from is not None and self.transactions_from < self.end_offset

    @property
    def log_path(self) -> str:
        return self._path(LOG_SUFFIX)

    @property
    def has_transaction_index(self) -> bool:
        """True if the transaction index file exists. Apache Kafka creates it only with the first entry."""
        return self._disk.exists(self._path(TXN_SUFFIX))

    @property
    def transaction_index_path(self) -> str:
        return self._path(TXN_SUFFIX)

    def _path(self, suffix: str) -> str:
        return self._stem + suffix + self._ending

    @property
    def index(self) -> OffsetIndex:
        if self._index is None:
            self._load_late()
        assert self._index is not None
        return self._index

    @property
    def times(self) -> TimeIndex:
        if self._times is None:
            self._load_late()
        assert self._times is not None
        return self._times

    def load_closed(self, next_base_offset: int, index_interval_bytes: int) -> None:
        """Load a closed, synced segment that ends at `next_base_offset`.

        Of the offset index and the time index, only the last time entry is read. All other entries are read
        when they are first needed. Raises StorageError if an index file is missing or unreadable; then call
        `rebuild`.
        """
        if not self._disk.exists(self._path(INDEX_SUFFIX)):
            raise StorageError(f"{self._disk.describe(self._path(INDEX_SUFFIX))} is missing")
        last = TimeIndex.read_last(self._disk, self._path(TIME_SUFFIX))
        self._is_time_sure = False
        if last is None:
            self.load_indexes(index_interval_bytes)
            self.end_offset, self.is_index_synced = next_base_offset, True
            return
        self.transactions = self._read_transaction_index()
        self.max_timestamp_ms, self.max_timestamp_offset = last[0], self.base_offset + last[1]
        self.end_offset, self._interval_bytes = next_base_offset, index_interval_bytes
        self._index = self._times = None
        self.is_index_synced = True

    def _load_late(self) -> None:
        """Load both indexes of a closed segment. Unreadable index files are rebuilt in memory.

        After an OSError, the next use tries again.
        """
        try:
            self._index, self._times = self._read_offset_index(), self._read_time_index()
        except StorageError:
            self._rebuild_late()

    def _rebuild_late(self) -> None:
        """Index the batches of a closed segment in memory. Its end and its largest timestamp stay if the walk
        ends early, at damage or because a read fails.

        With a lower end, readers would pass over the remaining records, and DeleteRecords would delete them.
        With a smaller timestamp, retention would delete the segment too early. See
        test_retention_sees_the_times_behind_a_damage and
        test_a_read_that_fails_while_an_index_is_rebuilt_hides_no_records.
        """
        end_offset, largest = self.end_offset, (self.max_timestamp_ms, self.max_timestamp_offset)
        self._index, self._times = self._empty_indexes()
        self._index.holds_back = self._times.holds_back = True
        try:
            self._walk_from_index(self._interval_bytes, verify=False)
        except OSError:
            self._index = self._times = None
            raise
        finally:
            self.end_offset = end_offset
            if largest[0] > self.max_timestamp_ms:
                self.max_timestamp_ms, self.max_timestamp_offset = largest

    def load_indexes(self, index_interval_bytes: int, end_offset: int | None = None) -> None:
        """Load the index files, and read the batches after the last index entry.

        `end_offset` is the offset at which the segment ends, None if that is unknown. Raises StorageError if
        it ends elsewhere, or if a file is missing or does not fit the log; then call `rebuild`.
        """
        self._index, self._times = self._read_offset_index(), self._read_time_index()
        self.transactions = self._read_transaction_index()
        if (bad := self._walk_from_index(index_interval_bytes, verify=False)) is not None:
            raise StorageError(f"{self._describe(bad.position)}: {bad.reason}")
        if (last := self.times.last()) is not None and self.base_offset + last[1] >= self.end_offset:
            raise StorageError(f"{self._disk.describe(self.times.path)} has offsets above the end of the log")
        if end_offset is not None and self.end_offset != end_offset:
            ends = f"seems to end at offset {self.end_offset}, but ended at {end_offset}"
            raise StorageError(f"{self._disk.describe(self.log_path)} {ends}")
        self.file.release_handle()

    def contains_from(self, offset: int) -> bool:
        """Return True if the segment has a valid batch that contains `offset`, or a later one up to the first
        damage. May be called before the segment is loaded.
        """
        try:
            position = self._read_offset_index().position_for(max(offset - self.base_offset, 0))
        except StorageError:
            position = 0
        if position and not self.is_batch_at(position):
            position = 0
        for batch in scan(self.file, position, self.size_bytes, limits=self.limits):
            if isinstance(batch, BadBatch):
                return False
            if batch.header.last_offset >= offset:
                return verify_crc(batch.bytes(), 0, batch.header.size_bytes)
        return False

    def rebuild(
        self,
        trusted_offset: int,
        index_interval_bytes: int,
        sure_offset: int = 0,
        *,
        is_whole: bool = False,
        is_active: bool = False,
    ) -> BadBatch | None:
        """Check and index all batches from `trusted_offset` on.

        Return the bad batch at which the file was cut, or None if it was not cut.

        Batches below `trusted_offset` are durable, so those batches that the index covers are not read again.
        If `trusted_offset` is at or below the base offset, the whole segment is read. Sets
        `transactions_from`.

        A bad batch at or above `sure_offset` is a torn tail, and the file is cut there. Everything below
        `sure_offset` was synced, so a bad batch there is damage. A damaged batch stays, with all later
        batches, and its readers get an error. See test_damage_below_the_recovery_point_is_no_torn_tail. If no
        batch follows the damage, the file is cut there, unless `is_whole`: the whole segment was synced, and
        ends at `sure_offset`. `is_active`: records will be appended to the segment.
        """
        self._index, self._times = self._trusted_indexes(trusted_offset)
        is_stored = is_whole and not is_active
        if is_stored:
            self._hold_indexes_back()
        self._cut_to_trusted(trusted_offset)
        if is_whole:
            # The checksum does not cover a batch's base offset. A batch that claims an offset after the
            # segment's end is damaged. If it counted, later batches would seem to be bad, and be cut off. See
            # test_a_damaged_base_offset_removes_no_later_records_from_a_synced_segment.
            self._max_relative_offset = min(self._max_relative_offset, sure_offset - self.base_offset - 1)
        bad = self._check(index_interval_bytes, sure_offset, is_whole=is_whole)
        self._max_relative_offset = self._highest_relative_offset()
        if is_stored:
            self._write_indexes_again()
        else:
            self._make_missing_files()
        # Recovery may check thousands of segments, so no descriptor stays open. See
        # test_a_start_needs_few_descriptors_however_many_segments_it_checks.
        self.file.release_handle()
        return bad

    def _make_missing_files(self) -> None:
        """Create the offset and time index files if they are missing. A power loss may have removed the file
        of an index without entries.

        A clean stop does not write an index without entries, so the next restart would report the file as
        missing. See test_a_clean_stop_after_a_lost_index_leaves_nothing_to_report.
        """
        with suppress(OSError):  # on a full disk, the next flush tries again
            for index in (self.index, self.times):
                if not self._disk.exists(index.path):
                    self._disk.open(index.path, create=True).close()

    def forget_lost_markers(self) -> None:
        """Remove transaction index entries whose marker is at or above the end of the log.

        If a log has lost synced records, their offsets are assigned again. Such an entry would then hide the
        new records. See test_a_log_that_lost_its_synced_end_hides_no_new_records.
        """
        entries = self.transactions.entries
        if entries and entries[-1].last_offset >= self.end_offset:
            self.transactions.cut_below(self.end_offset)

    def _hold_indexes_back(self) -> None:
        """Remove the offset index file, and write no index until `_write_indexes_again`.

        Recovery trusts the index files of a synced segment, so incomplete ones must not exist. The removal is
        synced before the time index is cut. Otherwise a power loss could undo the removal and keep the cut.
        See test_a_power_loss_while_a_time_index_is_made_again_leaves_no_incomplete_one.
        """
        if self._disk.exists(self.index.path):
            self._disk.remove(self.index.path)
            self._disk.sync_directory(self._stem.rpartition("/")[0])
        self.index.holds_back = self.times.holds_back = True

    def _write_indexes_again(self) -> None:
        """Write both indexes. The offset index is last, because without it the next restart rebuilds both."""
        self._note_time()
        self.index.holds_back = self.times.holds_back = False
        with suppress(OSError):  # on a full disk, the next flush tries again
            self._sync_indexes()

    def _sync_indexes(self) -> None:
        self.times.write_pending(sync=True)
        self.index.write_pending(sync=True)
        self.is_index_synced = True

    def _check(self, index_interval_bytes: int, sure_offset: int, *, is_whole: bool) -> BadBatch | None:
        bad = self._walk_from_index(index_interval_bytes, verify=True)
        while bad is not None and self.end_offset < sure_offset:
            follower = self.behind(bad.position, self.end_offset) or (self.size_bytes if is_whole else None)
            if follower is None:
                break
            self.damaged[bad.position] = follower
            if follower == self.size_bytes:
                self.end_offset = sure_offset
                return None
            # This value makes the first batch after the damage get an index entry.
            self._unindexed_bytes = index_interval_bytes + 1
            bad = self._walk(follower, index_interval_bytes, verify=True)
        if bad is not None:
            self.cut(bad.position)
        return bad

    def behind(self, position: int, offset: int) -> int | None:
        """Return the position at which the log continues after damage at `position`, or None if no such
        position is found.

        `offset` is the lowest offset that the damaged bytes contain.
        """
        return find_behind(self.file, position, self.size_bytes, offset, self.limits)

    def header_blocks(self, position: int) -> Iterator[HeaderBlock]:
        """Yield batch headers from `position`, where a batch begins, to the end. Damage is skipped.

        Newly detected damage is added to `damaged`. Only `rebuild` verifies every checksum, and only above
        its trusted offset, so any other reader may be the first to detect damage. See
        test_a_flipped_bit_below_the_recovery_point_does_not_prevent_startup.
        """
        for begin, end in self.whole_parts(position):
            for item in scan_headers_past_damage(self.file, begin, end, self.base_offset, self.limits):
                if isinstance(item, HeaderBlock):
                    yield item
                else:
                    self.damaged[item.position] = item.end

    def is_batch_at(self, position: int) -> bool:
        """Return True if the bytes at `position` begin with a readable batch header. Used to check a position
        from an index.
        """
        batch = next(scan(self.file, position, self.size_bytes, limits=self.limits), None)
        return isinstance(batch, ScannedBatch)

    def whole_parts(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the (begin, end) positions between the ranges in `damaged`, from `position` on."""
        for begin, end in sorted(self.damaged.items()):
            if position < begin:
                yield position, begin
            position = max(position, end)
        if position < self.size_bytes:
            yield position, self.size_bytes

    def is_whole_at(self, position: int) -> bool:
        """Return False if no batch begins at `position`: the log ends there, or damage was found there."""
        return position < self.size_bytes and position not in self.damaged

    def _cut_to_trusted(self, trusted_offset: int) -> None:
        self.index.cut_file()
        last = self.index.last()
        self.times.cut_below(last[0] + 1 if last is not None else 0)
        self.transactions_from = max(trusted_offset, self.base_offset)
        try:
            self.transactions = self._read_transaction_index()
        except StorageError:
            self.transactions_from = self.base_offset
            # Recovery stores the transaction index of a segment only if this flag is set. Set it, so that the
            # unreadable file is replaced even if the index has no entries.
            self.transactions.is_unsynced = True
        self.transactions.cut_below(self.transactions_from)
        self.index.rewrite_all()
        self.times.rewrite_all()

    def _trusted_indexes(self, trusted_offset: int) -> tuple[OffsetIndex, TimeIndex]:
        try:
            if trusted_offset > self.base_offset:
                index, times = self._read_offset_index(), self._read_time_index()
                # After a crash, one index file may lack entries that the other one has. Time entries have no
                # fixed distance, so missing ones are not noticed. Both indexes are certainly complete only up
                # to the last time entry.
                last = times.last_below(trusted_offset - self.base_offset)
                index.cut(index.count_below(0 if last is None else last + 1))
                self._check_last_entry(index)
                return index, times
        except StorageError:
            pass  # an unreadable index is rebuilt from the log
        return self._empty_indexes()

    def _read_offset_index(self) -> OffsetIndex:
        path, run_entries = self._path(INDEX_SUFFIX), self.limits.index_run_entries
        return OffsetIndex.load(self._disk, path, self.size_bytes, run_entries)

    def _read_time_index(self) -> TimeIndex:
        return TimeIndex.load(self._disk, self._path(TIME_SUFFIX), self.limits.index_run_entries)

    def _read_transaction_index(self) -> TransactionIndex:
        path, run_entries = self._path(TXN_SUFFIX), self.limits.index_run_entries
        return TransactionIndex.load(self._disk, path, self.base_offset, run_entries)

    def _empty_indexes(self) -> tuple[OffsetIndex, TimeIndex]:
        run_entries = self.limits.index_run_entries
        return (
            OffsetIndex(self._disk, self._path(INDEX_SUFFIX), run_entries),
            TimeIndex(self._disk, self._path(TIME_SUFFIX), run_entries),
        )

    def _check_last_entry(self, index: OffsetIndex) -> None:
        last = index.last()
        if last is None:
            return
        batch = next(scan(self.file, last[1], self.size_bytes, limits=self.limits), None)
        if not isinstance(batch, ScannedBatch) or batch.header.last_offset != self.base_offset + last[0]:
            raise StorageError(f"{self._describe(last[1])}: the last index entry does not point to a batch")

    def _walk_from_index(self, index_interval_bytes: int, *, verify: bool) -> BadBatch | None:
        """Index the batches after the last index entry, as their appends did.

        Returns the first bad batch, or None if all batches are valid.
        """
        self.first_timestamp_ms = self._read_first_timestamp()
        self.max_timestamp_ms = self.max_timestamp_offset = -1
        self.end_offset, self._unindexed_bytes = self.base_offset, 0
        if (last_time := self.times.last()) is not None:
            self.max_timestamp_ms = last_time[0]
            self.max_timestamp_offset = self.base_offset + last_time[1]
        last = self.index.last()
        return self._walk(last[1] if last else 0, index_interval_bytes, verify=verify)

    def _walk(self, position: int, index_interval_bytes: int, *, verify: bool) -> BadBatch | None:
        last = self.index.last()
        if verify:
            position = self._walk_whole(position, index_interval_bytes)
        for batch in scan(self.file, position, self.size_bytes, verify=verify, limits=self.limits):
            if isinstance(batch, BadBatch):
                return batch
            header = batch.header
            is_indexed = last is not None and batch.position == last[1]
            is_growing = self.end_offset <= header.base_offset <= header.last_offset
            is_growing = is_growing and self.fits(header.last_offset)
            next_position = batch.position + header.size_bytes
            if not is_growing or (
                not is_indexed and self._is_contradicted(header, self.end_offset, next_position)
            ):
                return BadBatch(
                    batch.position,
                    f"offset {header.base_offset} does not follow the log end {self.end_offset}",
                )
            if is_indexed:
                self._note_first_indexed(header)
            else:
                self._note_gap(header)
                self._note(
                    batch.position,
                    header.size_bytes,
                    header.last_offset,
                    header.max_timestamp_ms,
                    index_interval_bytes,
                )
        return None

    def _is_contradicted(self, header: BatchHeader, reached: int, position: int) -> bool:
        """Return True if the batch at `position` shows that the one before it has a damaged base offset.

        No checksum covers base offsets. `header` is the first batch, which should begin at the offset
        `reached`. It leaves a gap, and the whole batch at `position` has an offset within the gap or the
        first batch. If the first batch counted, all later ones would seem to be bad, and be cut off. See
        test_a_damaged_base_offset_removes_no_later_records_from_the_last_segment.
        """
        if header.base_offset == reached:
            return False
        batch = next(scan(self.file, position, self.size_bytes, limits=self.limits), None)
        if isinstance(batch, ScannedBatch) and reached < batch.header.base_offset <= header.last_offset:
            return verify_crc(batch.bytes(), 0, batch.header.size_bytes)
        return False

    def _walk_whole(self, position: int, index_interval_bytes: int) -> int:
        """Index the whole batches from `position` on, as `_walk` does, but thousands at a time.

        Return the position of the first batch that is left to `_walk`, because it is not whole or does not
        follow the batch before it. See test_batches_are_indexed_alike_one_by_one_and_in_blocks.
        """
        last = self.index.last()
        for block in scan_whole(self.file, position, self.size_bytes, self.limits):
            headers = block.headers
            if last is not None and block.position == last[1]:
                header = read_header(headers)
                is_growing = self.end_offset <= header.base_offset <= header.last_offset
                if not is_growing or not self.fits(header.last_offset):
                    return position
                self._note_first_indexed(header)
                position, headers = position + header.size_bytes, headers[HEADER_BYTES:]
            if headers and not self._note_headers(headers, position, index_interval_bytes):
                return position
            position = block.end
        return position

    def _note_headers(self, headers: bytes, position: int, index_interval_bytes: int) -> bool:
        """Update the end offset, timestamps and indexes for the batches with these headers. The first batch
        is at `position`.

        Return False, with nothing changed, if a batch does not follow the batch before it, or if the batch
        after them shows that the offset of the last one is damaged.
        """
        state = WalkState(
            position,
            self.end_offset,
            self._unindexed_bytes,
            self.max_timestamp_ms,
            self.max_timestamp_offset,
        )
        max_offset = self.base_offset + self._max_relative_offset
        walked = walk_headers(headers, state, self.base_offset, max_offset, index_interval_bytes)
        if walked is None:
            return False
        header = read_header(headers, len(headers) - HEADER_BYTES)
        if self._is_contradicted(header, walked.last_begin, walked.state.position):
            return False
        if walked.has_gaps and not self.damaged:
            self.has_gaps = True
        self.index.extend(walked.offsets, walked.positions)
        self.times.extend(walked.timestamps_ms, walked.timestamp_offsets)
        _, self.end_offset, self._unindexed_bytes, self.max_timestamp_ms, self.max_timestamp_offset = (
            walked.state
        )
        return True

    def _note_gap(self, header: BatchHeader) -> None:
        has_all = header.records_count == header.last_offset_delta + 1
        if not self.damaged and (header.base_offset != self.end_offset or not has_all):
            self.has_gaps = True

    def _note_first_indexed(self, header: BatchHeader) -> None:
        """Set the end offset and the largest timestamp from the batch that has the last index entry."""
        self.end_offset = header.last_offset + 1
        self._unindexed_bytes = header.size_bytes
        if header.max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms, self.max_timestamp_offset = header.max_timestamp_ms, header.last_offset

    @property
    def is_first_timestamp_known(self) -> bool:
        """False until the first batch of a non-empty segment has been read."""
        return self._is_first_read or self.first_timestamp_ms is not None or not self.size_bytes

    def read_first_timestamp(self) -> None:
        """Read the timestamp of the first batch. Raises OSError."""
        self.first_timestamp_ms, self._is_first_read = self._read_first_timestamp(), True

    def _read_first_timestamp(self) -> int | None:
        batch = next(scan(self.file, 0, self.size_bytes, limits=self.limits), None)
        if not isinstance(batch, ScannedBatch) or batch.header.max_timestamp_ms < 0:
            return None
        return batch.header.max_timestamp_ms

    def _highest_relative_offset(self) -> int:
        # The offset after the last batch needs 64 bits, too. See test_no_offset_has_more_than_64_bits.
        return min(self.limits.max_relative_offset, INT64_MAX - 1 - self.base_offset)

    def fits(self, last_offset: int) -> bool:
        """Return True if the index formats can store `last_offset` relative to the base offset, and the next
        offset has at most 64 bits.
        """
        return last_offset - self.base_offset <= self._max_relative_offset

    def is_full(
        self, size_bytes: int, last_offset: int, max_timestamp_ms: int, config: LogConfig, now_ms: int
    ) -> bool:
        """Return True if a batch with these values must go to a new segment. Source: Kafka's
        LogSegment.shouldRoll.
        """
        if self.size_bytes == 0:
            return not self.fits(last_offset)
        if self.first_timestamp_ms is not None:
            age_ms = max_timestamp_ms - self.first_timestamp_ms
        else:
            age_ms = now_ms - self.created_ms
        return (
            self.size_bytes + size_bytes > config.segment_bytes
            or age_ms > config.segment_ms
            or self.index_is_full
            or not self.fits(last_offset)
        )

    def append(self, data: Buffer, last_offset: int, max_timestamp_ms: int, config: LogConfig) -> None:
        """Write a batch that already has its base offset and leader epoch, and index it.

        After an OSError, the segment is unchanged. The bytes after its end are cut off now, or before the
        next append.
        """
        self.cut_failed_write()
        position = self.size_bytes
        try:
            self.file.pwrite(data, position)
        except OSError:
            self._cut_failed_write_later()
            raise
        size = len(data)
        self.size_bytes = position + size
        if position == 0 and max_timestamp_ms >= 0:
            self.first_timestamp_ms = max_timestamp_ms
        if self._note(position, size, last_offset, max_timestamp_ms, config.index_interval_bytes):
            self._note_fill(config)

    def append_next(
        self, data: memoryview, size: int, last_offset: int, max_timestamp_ms: int, config: LogConfig
    ) -> bool:
        """Do what `is_full` and `append` do, but faster, if the batch is a usual one. Return True if it was
        written.

        The usual batch has a timestamp and needs no new segment. For any other batch this returns False and
        changes nothing. After an OSError, the segment is unchanged, as after `append`.
        """
        position, first_ms = self.size_bytes, self.first_timestamp_ms
        if (
            first_ms is None
            or position + size > config.segment_bytes
            or max_timestamp_ms - first_ms > config.segment_ms
            or last_offset - self.base_offset > self._max_relative_offset
            or self.index_is_full
            or self._needs_cut
        ):
            return False
        try:
            self.file.pwrite(data, position)
        except OSError:
            self._cut_failed_write_later()
            raise
        self.size_bytes = position + size
        interval_bytes = config.index_interval_bytes
        if self._unindexed_bytes > interval_bytes:
            self._note(position, size, last_offset, max_timestamp_ms, interval_bytes)
            self._note_fill(config)
            return True
        self._unindexed_bytes += size
        self.end_offset = last_offset + 1
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms, self.max_timestamp_offset = max_timestamp_ms, last_offset
        return True

    def _note_fill(self, config: LogConfig) -> None:
        """Update `index_is_full` after an entry was added."""
        limit = config.segment_index_bytes
        self.index_is_full = (
            len(self.index) >= limit // OffsetIndex.entry_bytes
            or len(self.times) >= limit // TimeIndex.entry_bytes - 1
        )

    def _cut_failed_write_later(self) -> None:
        """Cut off the bytes of a failed write now. If this fails, the next append or roll tries again."""
        self._needs_cut = True
        with suppress(OSError):
            self.cut_failed_write()

    def cut_failed_write(self) -> None:
        """Cut off the bytes that a failed write left after the last whole batch. Raises OSError.

        The next segment must not be created before this succeeds. Otherwise recovery would cut the log at
        these bytes and delete the later segments. See
        test_a_write_that_could_not_be_undone_does_not_end_the_log.
        """
        if self._needs_cut:
            self.file.truncate(self.size_bytes)
            self._needs_cut = False

    def _note(
        self, position: int, size: int, last_offset: int, max_timestamp_ms: int, index_interval_bytes: int
    ) -> bool:
        """Update the end offset, timestamps and indexes for a written batch. Return True if it got an index
        entry.
        """
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms, self.max_timestamp_offset = max_timestamp_ms, last_offset
        self.end_offset = last_offset + 1
        is_due = self._unindexed_bytes > index_interval_bytes
        if is_due:
            self.index.append(last_offset - self.base_offset, position)
            self._note_time()
            self._unindexed_bytes = 0
        self._unindexed_bytes += size
        return is_due

    def _note_time(self) -> None:
        if self.max_timestamp_ms >= 0:
            self.times.append(self.max_timestamp_ms, self.max_timestamp_offset - self.base_offset)

    @property
    def largest_timestamp_ms(self) -> int:
        """The largest timestamp in ms, for retention and compaction. A segment without timestamps has the
        time at which its file was modified.
        """
        if self.max_timestamp_ms >= 0:
            return self.max_timestamp_ms
        try:
            return self._disk.modified_ms(self.log_path)
        except OSError:
            # Use the time at which this object was created: a time that is too late deletes nothing too
            # early.
            return self.created_ms

    def confirm_times(self) -> Iterator[None]:
        """Verify that no batch has a larger timestamp than the time index claims, in bounded steps.

        Called before records are deleted by time, because a kill of Oncelog up to 0.4.1 lost the last time
        entries of closed segments. See test_retention_checks_the_times_of_segments_that_a_kill_left_to_0_4_1.
        Raises OSError, StorageError.
        """
        if self._is_time_sure:
            return
        position, noted_offset = 0, self.base_offset - 1
        last = TimeIndex.read_last(self._disk, self._path(TIME_SUFFIX))
        if last is not None:
            position = OffsetIndex.read_position(self._disk, self._path(INDEX_SUFFIX), last[1])
            noted_offset = self.base_offset + last[1]
        largest_ms = self.max_timestamp_ms
        if not self.is_batch_at(position):
            position = 0  # the index or the batch is damaged, so read the segment from its start
        for block in self.header_blocks(position):
            header = latest_batch(block)
            if header.max_timestamp_ms > self.max_timestamp_ms and header.last_offset > noted_offset:
                self.max_timestamp_ms = header.max_timestamp_ms
                self.max_timestamp_offset = header.last_offset
            yield None
        self._is_time_sure = True
        if self.max_timestamp_ms > largest_ms:
            self._note_time()
            with suppress(OSError):  # on a full disk, the next restart verifies again
                self.times.write_pending(sync=True)
        self.release_file()

    def note_last_time(self) -> None:
        """Add the entry for the largest timestamp to the time index of a closed segment. Look-ups by time and
        retention need it.
        """
        self._note_time()

    def finish(self) -> None:
        """Add the last entry of the time index, and write all indexes. Called when the segment is rolled or
        closed.
        """
        self._note_time()
        self.index.write_pending()
        self.times.write_pending()
        self.transactions.write_pending()
        self.transactions.truncate_reserved()

    def keep_indexes_in_memory(self) -> None:
        """Stop writing the offset index and the time index, because their file names will belong to the
        compacted segment.
        """
        self.index.holds_back = self.times.holds_back = self.is_index_synced = True

    def release_file(self) -> None:
        """Close the descriptor of a closed, synced segment; the next read opens the file again.

        Do nothing while compaction replaces the segment, because the file may have no name then.
        """
        indexes = (index for index in (self._index, self._times) if index is not None)
        if self.is_index_synced and all(index.is_stored for index in indexes):
            self.file.release_handle()

    def release_indexes(self, index_interval_bytes: int) -> None:
        """Remove both indexes of a closed, synced segment from memory; the next use loads them again.

        Otherwise memory would grow with the log, by 20 bytes for each indexed batch that was written or read.
        See test_indexes_of_closed_segments_are_not_kept_in_memory. `index_interval_bytes` is used to rebuild
        unreadable files.
        """
        index, times = self._index, self._times
        if index is not None and times is not None and index.is_stored and times.is_stored:
            self._index, self._times, self._interval_bytes = None, None, index_interval_bytes

    def give_up_indexes(self) -> None:
        """Delete the offset index and time index files of a segment that will be deleted. Raises OSError.

        This makes room on a full disk, and later flushes need not write these files. If recovery finds the
        segment, it rebuilds the index files. The directory must be synced before the recovery point passes
        the segment.
        """
        for suffix in (INDEX_SUFFIX, TIME_SUFFIX):
            remove_if_exists(self._disk, self._path(suffix))
        for index in (self._index, self._times):
            if index is not None:
                index.holds_back = True
        self.is_index_synced = True

    def sync(self, *, is_active: bool) -> None:
        """Sync the log file, and also the index files unless the segment is active. Raises OSError.

        The transaction index is synced in both cases, because recovery does not rebuild it below the recovery
        point.
        """
        if self._is_removed:
            return  # retention deleted the segment while this flush was running in another thread
        try:
            if self.transactions.is_unsynced:
                self.transactions.sync()
            if self._rewrite_range is not None:
                self.file.rewrite(*self._rewrite_range)
                self._rewrite_range = None
            self.file.sync()
            if not is_active and not self.is_index_synced:
                self._sync_indexes()
        except FileNotFoundError:
            if not self._is_removed:
                raise

    def rewrite_on_sync(self, from_offset: int) -> None:
        """Let the next `sync` write the bytes from `from_offset` on again, before it syncs.

        After a failed sync, Linux keeps the bytes in memory and marks them clean. A restarted process can
        still read these bytes, but a sync would succeed without writing them.
        """
        if self.end_offset > from_offset:
            start = self.index.position_for(max(from_offset - self.base_offset, 0))
            self._rewrite_range = start, self.size_bytes

    def cut(self, position: int) -> None:
        """Cut off a torn tail: everything from `position` on."""
        self.file.truncate(position)
        self.size_bytes = position

    def close(self) -> None:
        self.file.close()

    def drop(self, disk: PartitionDisk) -> BlockingCall:
        """Rename the files, and return a function that closes and deletes them later. Raises OSError.

        The log file is renamed first. If a crash follows, recovery removes index files that have no log file.
        """
        # Set this before the renames: during them, a flush in another thread may open the file by its name.
        # See test_a_flush_while_a_segment_is_dropped_does_not_fail.
        self._is_removed = True
        try:
            remove = disk.drop(map(self._path, SUFFIXES))
        except OSError:
            self._is_removed = False
            raise

        def close_and_remove() -> None:
            self.file.close()
            remove()

        return close_and_remove

    def remove(self) -> None:
        """Close and delete every file.

        The log file is deleted first. If a crash follows, recovery removes index files that have no log file.
        """
        self._is_removed = True
        self.file.close()
        for suffix in SUFFIXES:
            remove_if_exists(self._disk, self._path(suffix))

    def damage_text(self, position: int) -> str:
        """Return the warning about damage at `position`."""
        return f"{self._disk.describe(self.log_path)} is damaged at position {position}"

    def _describe(self, position: int) -> str:
        return f"{self._disk.describe(self.log_path)} at position {position}"
