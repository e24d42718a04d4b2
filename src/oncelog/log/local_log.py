"""The files and offsets of one partition: write, roll, sync and delete segments.

`oncelog.log.partition` decides which batches are stored, and this module stores them. Source: Kafka's
LocalLog, and the parts of UnifiedLog that flush and delete segments.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import pairwise

from oncelog.config import INT64_MAX
from oncelog.errors import InvalidRecord, KafkaStorageError
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, run
from oncelog.log.checkpoint import LEADER_EPOCHS, PARTITION_METADATA
from oncelog.log.config import LogConfig
from oncelog.log.disk import PartitionClosed, SyncFailed, sync_file
from oncelog.log.partition_disk import PartitionDisk, ignore_failure
from oncelog.log.reader import LogReader
from oncelog.log.recovery import OpenOptions, Recovered
from oncelog.log.segment import Segment
from oncelog.log.validation import stamp_append_time
from oncelog.rules.idempotence.last_stable_offset import last_stable_offset
from oncelog.types import TimestampType, TopicPartition
from oncelog.wire.batch import BatchHeader, stamp

_LOG_APPEND_TIME = TimestampType.LOG_APPEND_TIME


class LocalLog:
    """The segments of one partition directory, its log start, log end and recovery point.

    All methods except `flush` must be called from one thread. `flush` may run in another thread at the same
    time. `Partition` and `LogCleaner` read the attributes.
    """

    def __init__(
        self,
        disk: PartitionDisk,
        directory: str,
        topic_partition: TopicPartition,
        config: LogConfig,
        recovered: Recovered,
        reader: LogReader,
        background: BackgroundQueue,
        leader_epoch: int,
    ) -> None:
        self.disk = disk
        disk.on_sync_failed = self._fail
        self.directory = directory
        self.topic_partition = topic_partition
        self.config = config
        self.stores_as_sent = config.stores_as_sent
        self.segments = recovered.segments
        self.producers = recovered.producers
        self.leader_epoch = leader_epoch
        self.start_offset = recovered.log_start_offset
        """The log start: the first offset that clients may read."""
        self.end_offset = recovered.segments.active.end_offset
        """The log end: the offset of the next record."""
        self.recovery_point = recovered.log_start_offset
        """The offset below which every record and its index entries survive a power loss."""
        self.synced_before = recovered.log_start_offset
        """The offset below which the records were synced before this start."""
        self.failure: str | None = None
        """The reason why the partition is offline, None while it is online."""
        self.is_closed = False
        self.is_swapping = False
        """True while compaction replaces segments. During that time the old segments' files may have no
        names, or a start would replace them, so no segment may be deleted.
        """
        self.has_swap_leftovers = False
        """True while a failed compaction may have left files that a start would swap in. Until they are gone,
        no segment may be deleted. See
        test_a_power_loss_after_records_were_deleted_behind_a_failed_swap_loses_no_others.
        """
        self.unindexed_marker_offset: int | None = None
        """The offset of the transaction marker that is being appended; None if no append of a marker is in
        progress. The append of an ABORT marker ends once its transaction index entry is in memory.
        """
        self._reader = reader
        self._background = background
        self._min_high_watermark = recovered.log_start_offset
        self.unsnapshotted_bytes = 0
        self._sync_needed_to = 0
        """The offset that the recovery point must reach before waiting deletions or compactions can proceed,
        or before older snapshots can be deleted.
        """
        self._is_directory_dirty = True
        self._dropped: list[tuple[Segment, BlockingCall]] = []
        """Dropped segments, each with a call that deletes its files, until the call has succeeded."""
        self._has_unsynced_names = False
        """True from an unclean stop until the directory is synced: a power loss could take the names of the
        snapshots that the start has loaded.
        """
        self._rewrites_small_files = False

    def settle_recovery_point(self, options: OpenOptions, rebuilt_from: int | None) -> None:
        """Set the recovery point after opening.

        After an unclean shutdown, the bytes above the recovery point may be in memory but not on disk,
        although an earlier process tried to sync them. So the next flush writes these bytes again before it
        syncs. If indexes were rebuilt, a flush is due that syncs them.
        """
        end_offset = self.end_offset
        synced = end_offset if options.is_clean else max(options.recovery_point, options.log_start_offset)
        self.synced_before = min(synced, end_offset)
        self.recovery_point = min(synced, end_offset if rebuilt_from is None else rebuilt_from, end_offset)
        if self.recovery_point < self.synced_before:
            self._sync_needed_to = self.synced_before
        if options.is_clean:
            return
        self._rewrites_small_files = self._has_unsynced_names = True
        for segment in self.segments.from_offset(self.recovery_point):
            segment.rewrite_on_sync(self.recovery_point)

    # Offsets

    @property
    def stored_recovery_point(self) -> int:
        """Return the recovery point for the checkpoint file.

        It is never below `synced_before`, even if indexes were rebuilt. After a kill, recovery would take
        damage and gaps in synced records for lost ends, and delete all later records. See
        test_a_kill_after_indexes_were_rebuilt_deletes_no_synced_records.
        """
        return max(self.recovery_point, self.synced_before)

    @property
    def high_watermark(self) -> int:
        """Return the high watermark: readers see only records below it.

        There is only one replica, so the high watermark is the log end as long as fewer than flush.messages
        records are unsynced. The batch that reaches this number is hidden until the next sync, together with
        all later batches. Apache Kafka also syncs before it moves the high watermark. See
        test_a_reader_sees_nothing_that_a_power_loss_could_take.
        """
        end_offset, recovery_point = self.end_offset, self.recovery_point
        if end_offset - recovery_point < self.config.flush_messages:
            return end_offset
        return max(self._min_high_watermark, recovery_point)

    @property
    def last_stable_offset(self) -> int:
        """Return the last stable offset: read_committed readers see only records below it."""
        high_watermark = self.high_watermark
        return last_stable_offset(
            log_start_offset=self.start_offset,
            high_watermark=high_watermark,
            open_first_offset=self.producers.open_first_offset,
            unreplicated_first_offset=self.producers.hidden_first_offset(high_watermark),
        )

    @property
    def is_flush_due(self) -> bool:
        """Return True if a flush would shorten recovery, free deleted segments or let compaction proceed.

        A periodic task then requests a flush, because without traffic no append requests one. See
        test_compaction_does_not_wait_for_a_marker_without_end.
        """
        active_base = self.segments.active.base_offset
        if self.recovery_point < max(active_base, self._sync_needed_to):
            return True
        first_offset = self.producers.unsynced_first_offset(self.recovery_point)
        return first_offset is not None and first_offset < active_base and self.config.is_compacted

    def check_online(self) -> None:
        """Raise KafkaStorageError if the partition is offline."""
        if self.failure is not None:
            raise KafkaStorageError(f"{self.topic_partition} is offline: {self.failure}")

    def owns_segments(self, segments: list[Segment]) -> bool:
        """Return True if the partition is open and online, and all of `segments` are still in its segment
        list.
        """
        return not self.is_closed and self.failure is None and all(map(self.segments.__contains__, segments))

    # Writing

    def append(self, records: memoryview, header: BatchHeader, now_ms: int) -> int:
        """Write a batch that the append rule has accepted, and return its base offset.

        The base offset, the leader epoch and, with LogAppendTime, the time are written into `records` first.
        Raises KafkaStorageError, and InvalidRecord if the log has too few offsets left.
        """
        if self.failure is not None:
            self.check_online()
        base_offset, config = self.end_offset, self.config
        if base_offset + header.last_offset_delta >= INT64_MAX:
            raise InvalidRecord(f"{self.topic_partition}: there are too few offsets after {base_offset}")
        if config.timestamp_type is _LOG_APPEND_TIME and not header.is_control:
            header = stamp_append_time(records, now_ms)
        # The batch is stamped in place before the write. If the write fails, the caller's buffer already
        # contains our base offset. So the caller must answer the request, and never retry it with the same
        # bytes. See test_the_bytes_of_a_failed_write_are_not_accepted_again.
        stamp(records, 0, base_offset, self.leader_epoch)
        last_offset, max_timestamp_ms = base_offset + header.last_offset_delta, header.max_timestamp_ms
        segment = self.segments.active
        try:
            if segment.is_full(len(records), last_offset, max_timestamp_ms, config, now_ms):
                segment = self.roll(now_ms)
            segment.append(records, last_offset, max_timestamp_ms, config)
        except OSError as error:
            raise self.write_error(segment, error) from error
        if last_offset + 1 - self.recovery_point >= config.flush_messages:
            self._min_high_watermark = self.high_watermark
        self.end_offset = last_offset + 1
        self.unsnapshotted_bytes += len(records)
        return base_offset

    def write_error(self, segment: Segment, error: OSError) -> KafkaStorageError:
        """Return the error of an append whose write to `segment` failed."""
        place = f"{self.disk.describe(segment.log_path)} at position {segment.size_bytes}"
        return KafkaStorageError(f"{place}, offset {self.end_offset}: {error}")

    def reserve_abort_entry(self, header: BatchHeader, now_ms: int) -> None:
        """Reserve a transaction index entry in the segment to which an ABORT marker will be written.

        Rolls the active segment if the marker does not fit. Raises KafkaStorageError. `append` rejects a
        marker for which the log has no offset left.
        """
        self.check_online()
        segment, last_offset = self.segments.active, self.end_offset + header.last_offset_delta
        if last_offset >= INT64_MAX:
            return
        times = header.max_timestamp_ms, self.config, now_ms
        try:
            if segment.is_full(header.size_bytes, last_offset, *times):
                segment = self.roll(now_ms)
            segment.transactions.reserve_entries()
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}, offset {last_offset}: {error}") from error

    def roll(self, now_ms: int) -> Segment:
        """Close the active segment; create and return the next one. Start a snapshot of the producers. An
        OSError leaves the log unchanged.
        """
        active = self.segments.active
        active.cut_failed_write()
        try:
            active.finish()
        except OSError:
            if active.end_offset > self.start_offset:
                raise
            self._give_up_indexes([active])  # all of its records are deleted, so no reader needs its indexes
        if len(self.segments) == 1 and self.recovery_point <= active.base_offset:
            # No flush has yet made the name of the first segment durable. A power loss could remove the first
            # segment and keep the second one. The log would then begin inside a transaction, or with a gap
            # that looks like lost records to recovery. See test_no_power_loss_takes_the_first_segment_alone.
            self.disk.sync_directory(self.directory)
        segment = Segment.create(
            self.disk, self.directory, self.end_offset, now_ms, limits=self.config.limits
        )
        self.segments.add(segment)
        self._is_directory_dirty = True
        with suppress(OSError):
            # A failed snapshot does not fail the roll: recovery uses an older snapshot, and a later deletion
            # of segments writes a snapshot if it needs one.
            self.snapshot()
        return segment

    def snapshot(self) -> None:
        """Start a background task that writes a snapshot of the producers' state at the current log end. Also
        request a flush up to this offset, because older snapshots are kept until then.
        """
        self.unsnapshotted_bytes = 0
        self._sync_needed_to = self.end_offset
        self.producers.snapshot(self.end_offset, self._after_snapshot)

    def _after_snapshot(self) -> BackgroundTask:
        """Delete unneeded snapshots, then the segments that waited for this snapshot."""
        yield self._keep_snapshots()
        self._drop_dead()
        yield from self._remove_dropped()

    def _keep_snapshots(self) -> BlockingCall:
        """Return a call that deletes the snapshots below `covered_to`, except those at the segments' base
        offsets.
        """
        bases = [segment.base_offset for segment in self.segments]
        return self.producers.keep_snapshots(bases, self.covered_to)

    def reconfigure(self, config: LogConfig) -> None:
        """Replace the topic's settings."""
        # The high watermark must not fall, even if flush.messages is smaller now.
        self._min_high_watermark = self.high_watermark
        self.config = config
        self.stores_as_sent = config.stores_as_sent

    # Deleting

    def delete_before(self, offset: int, now_ms: int) -> None:
        """Move the log start up to `offset`, and delete the segments wholly below it.

        Raises OSError. The log start has moved even then, and a later call deletes the remaining segments.
        """
        self.start_offset = max(self.start_offset, offset)
        active, failure = self.segments.active, None
        if active.end_offset <= self.start_offset and active.size_bytes:
            try:
                self.roll(now_ms)
            except OSError as error:
                failure = error  # on a full disk, deleting the closed segments still makes room
        self._delete_dead()
        if failure is not None:
            raise failure

    def _delete_dead(self) -> None:
        """Delete the segments below the log start that a snapshot covers. The others wait for a snapshot and
        a flush. Raises OSError.
        """
        failure = None
        if dead := self._dead_segments():
            try:
                closed_to = self._next_base(dead)
                has_snapshot = self.producers.snapshot_from(closed_to) is not None
                if self.producers.is_snapshot_refused and not has_snapshot and not self.is_swapping:
                    # Delete the indexes of the dead segments: on a full disk, this makes room for a snapshot.
                    # See test_a_full_disk_with_one_segment_gets_room. During a swap, their names may belong
                    # to a compacted segment. See
                    # test_a_deletion_on_a_full_disk_keeps_the_indexes_of_a_compacted_segment.
                    self._give_up_indexes(dead)
                self._cover(closed_to)
            except OSError as error:
                failure = error  # deleting the segments that an older snapshot covers still makes room
        if self._drop_dead() or self._dropped:
            self._background.add(self._remove_dropped())
        if failure is not None:
            raise failure

    @property
    def is_trimmed(self) -> bool:
        """True if no segment is wholly below the log start, so `delete_before` has nothing left to delete."""
        first = self.segments.first
        return first.end_offset > self.start_offset or (
            first is self.segments.active and not first.size_bytes
        )

    def _dead_segments(self, covered_to: int = INT64_MAX) -> list[Segment]:
        """Return the closed segments below the log start that a snapshot at `covered_to` covers.

        A start uses no snapshot below the first segment. So if there is a gap after a segment, only a
        snapshot behind the gap covers it. See test_segments_before_a_gap_wait_for_a_snapshot_behind_it.
        """
        return [
            segment
            for segment, following in pairwise(self.segments)
            if segment.end_offset <= self.start_offset and following.base_offset <= covered_to
        ]

    @property
    def covered_to(self) -> int | None:
        """The offset of the newest durable snapshot at or below the recovery point, None if there is none.

        Only what is below this offset may be deleted: segments, batches that compaction removes, and older
        snapshots. Recovery deletes the snapshots above the log end that a power loss leaves, but neither this
        snapshot nor the records below it can be lost. So after every kill or power loss, this snapshot and
        the log from its offset on give the state of all producers. See
        test_a_power_loss_after_deleting_segments_leaves_their_producers_known.
        """
        return None if self._has_unsynced_names else self.producers.snapshot_up_to(self.recovery_point)

    @property
    def compactable_to(self) -> int:
        """The offset below which compaction may remove batches.

        Compaction keeps the last batch of each producer, but a power loss can remove that batch if it is not
        synced. The batches before it are then known only from a snapshot. See
        test_compaction_waits_for_the_snapshot_of_its_segments.
        """
        if not len(self.producers.table):
            return self.end_offset
        covered_to = self.covered_to
        return self.start_offset if covered_to is None else covered_to

    def _cover(self, closed_to: int) -> None:
        """Let `covered_to` reach `closed_to`: start a snapshot unless there is one, and request a flush.

        Raises OSError.
        """
        if self._has_unsynced_names:
            self._background.add(self._confirm_names())
        offset = self.producers.snapshot_from(closed_to)
        if offset is not None:
            self._sync_needed_to = max(self._sync_needed_to, offset)
        elif not self.producers.is_writing_snapshot:
            self.snapshot()

    def _confirm_names(self) -> BackgroundTask:
        """Sync the directory after an unclean stop, which may have come between the rename and the sync of a
        snapshot. Then delete the segments that waited for this. See
        test_a_power_loss_takes_no_snapshot_name_that_a_deletion_relies_on.
        """
        if self._has_unsynced_names:
            yield partial(self.disk.sync_directory, self.directory)
            self._has_unsynced_names = False
        self._drop_dead()
        yield from self._remove_dropped()

    def _next_base(self, segments: list[Segment]) -> int:
        """Return the base offset of the segment after `segments`, which are the first ones."""
        return list(self.segments)[len(segments)].base_offset

    def _give_up_indexes(self, dead: list[Segment]) -> None:
        self._is_directory_dirty = True
        for segment in dead:
            segment.give_up_indexes()

    def _drop_dead(self) -> bool:
        """Rename the files of segments below the log start, and remove these segments from the list.

        Return True if there were any. At most `limits.max_drops_per_step` segments are handled.
        """
        dead = self._dead_segments(self.covered_to or 0)
        if not dead or self.is_swapping or self.has_swap_leftovers or self.failure is not None:
            return False
        dead = dead[: self.config.limits.max_drops_per_step]
        if self.recovery_point <= self._next_base(dead):
            # The next segment becomes the first one. Its name must be durable before the older segments are
            # renamed, as in `roll`. See test_no_power_loss_takes_the_first_segment_that_retention_leaves.
            self.disk.sync_directory(self.directory)
        had_any = False
        try:
            # `dead` is limited, because each segment has four files to rename: eight segments take about two
            # milliseconds.
            for segment in dead:
                self._dropped.append((segment, segment.drop(self.disk)))
                self.segments.drop_first()
                had_any = True
        except OSError:
            if not had_any:
                raise
            # The next retention run tries the remaining segments again.
        self._reader.forget_cursors()
        return True

    def _remove_dropped(self) -> BackgroundTask:
        """Delete the files of dropped segments, then drop and delete the remaining segments below the log
        start. At last, delete the snapshots at their base offsets.

        After an error, the next retention run tries again. See
        test_files_of_dropped_segments_are_deleted_after_an_error.
        """
        had_any = bool(self._dropped)
        while self._dropped:
            # Take only the segments whose renames the sync includes. A request may drop others meanwhile.
            synced, self._dropped = self._dropped, []
            try:
                yield self._sync_drops
                while synced:
                    synced.append(synced.pop(0))  # if it fails, the others come first next time
                    yield synced[-1][1]
                    synced.pop()
            finally:
                self._dropped += synced
            yield None
            if not self.is_closed:
                self._drop_dead()
        if had_any:
            yield self._keep_snapshots()

    def _sync_drops(self) -> None:
        """Sync the renames of dropped segments before their files are deleted. May run in another thread.

        A power loss may keep the rename of one segment and lose the renames of older ones. As long as the
        renamed file of the newer segment exists, recovery knows that all older segments were dropped, too.
        See test_a_power_loss_during_the_deletion_of_segments_leaves_no_gap.
        """
        with suppress(PartitionClosed, FileNotFoundError):  # the partition's directory is being deleted
            self.disk.sync_directory(self.directory)

    def replace_segments(self, old: list[Segment], new: Segment) -> None:
        """Replace neighbouring segments by their compacted segment in the list."""
        self.segments.replace(old, new)
        self._reader.forget_cursors()

    # Syncing

    def flush(self) -> None:
        """Sync all records that were appended before the call, and raise the recovery point.

        May run in another thread. Raises KafkaStorageError. After a failed sync, the partition is offline
        until a restart, because Linux may have dropped the unsynced bytes. After any other failure, such as a
        full disk, the next flush tries again.
        """
        self.check_online()
        self._check_open()
        end_offset = self.end_offset
        # Flush only the records below a marker that the appending thread has written without its transaction
        # index entry. The next flush includes the marker. See
        # test_a_flush_during_an_abort_makes_no_marker_durable_without_its_index_entry.
        if (marker_offset := self.unindexed_marker_offset) is not None:
            end_offset = min(end_offset, marker_offset)
        synced_to = self.recovery_point
        # Include the segment that ends at the recovery point. Its indexes may have changed since the last
        # flush. Recovery may also have cut off its torn end, and until the next sync a power loss can undo
        # the cut. See test_a_second_power_loss_does_not_bring_a_torn_end_back.
        segments = self.segments.from_offset(synced_to - 1)
        try:
            # Clear the flag before the syncs: a segment that is created during the syncs makes the directory
            # dirty again.
            is_dirty, self._is_directory_dirty = self._is_directory_dirty, False
            is_dirty |= any(segment.transactions.is_unsynced for segment in segments)
            for segment in segments:
                segment.sync(is_active=segment is segments[-1])
            if is_dirty:
                self._sync_small_files()
        except SyncFailed as error:
            self._fail(error)
            raise KafkaStorageError(f"{self.topic_partition}: {self.failure}") from error
        except OSError as error:
            # Leave the partition online: a full disk or a lack of file descriptors has lost no bytes. See
            # test_an_index_that_finds_the_disk_full_does_not_take_the_partition_offline.
            self._is_directory_dirty = True
            raise KafkaStorageError(f"{self.topic_partition} cannot be flushed: {error}") from error
        # If the partition was closed during the syncs, some of its files were not synced, so the recovery
        # point must not rise.
        self._check_open()
        self.recovery_point = max(self.recovery_point, end_offset)

    def _sync_small_files(self) -> None:
        """Sync partition.metadata, the leader epoch file and the directory.

        A new partition's small files are not synced when they are created. Until the first flush,
        oncelog-topics.json has the topic's id and partitions. See
        test_a_new_partition_that_was_flushed_survives_a_power_loss.
        """
        for name in (PARTITION_METADATA, LEADER_EPOCHS):
            sync_file(self.disk, f"{self.directory}/{name}", rewrites=self._rewrites_small_files)
        self._rewrites_small_files = False
        self.disk.sync_directory(self.directory)
        self._has_unsynced_names = False

    def _fail(self, error: SyncFailed) -> None:
        """Take the partition offline after a failed sync.

        Linux marks pages clean after a failed sync, so a later sync proves nothing. A failed directory sync
        of retention, a snapshot or compaction also takes the partition offline, because the next successful
        sync would hide that a rename is not durable. Apache Kafka takes the log directory offline after any
        IOException. See test_a_directory_that_cannot_be_synced_takes_the_partition_offline.
        """
        self.failure = f"a sync failed ({error}); restart the broker once the disk works"

    def _check_open(self) -> None:
        if self.is_closed:
            raise KafkaStorageError(f"{self.topic_partition} was closed or deleted")

    def checkpoint_producers(self) -> None:
        """Start a snapshot of the producers if enough bytes were appended since the last one, or if deletion
        or compaction waits for one. Also start to delete the segments that waited for a flush.

        The threshold is `limits.snapshot_every_bytes`. Frequent snapshots keep recovery short.
        """
        if self.unsnapshotted_bytes >= self.config.limits.snapshot_every_bytes:
            self.snapshot()
        if self.config.is_compacted and len(self.segments) > 1 and len(self.producers.table):
            # A full disk may have refused the snapshot of the last roll.
            self._cover(self.segments.active.base_offset)
        if not (self.is_trimmed or self.is_closed or self.failure is not None):
            with suppress(OSError):  # on an error, the next retention run tries again
                self._delete_dead()

    def release_handles(self) -> None:
        """Close the file descriptors of closed, synced segments and release their indexes. The next read
        reopens the files.

        Nothing is closed while compaction replaces segments, because their files could not be reopened by
        name.
        """
        if self.is_closed or self.is_swapping or self.failure is not None:
            return
        for segment in list(self.segments)[:-1]:
            if segment.end_offset <= self.recovery_point and segment.is_index_synced:
                segment.file.release_handle()
                segment.release_indexes(self.config.index_interval_bytes)

    # Closing

    def close(self, now_ms: int) -> None:
        """Take a snapshot of the producers, write the indexes, sync everything and close the files.

        Raises KafkaStorageError after closing the files.
        """
        try:
            self.producers.table.expire(now_ms, self.config.producer_expiration_ms)
            self.segments.active.finish()
            self.producers.snapshot_now(self.end_offset)
            self.flush()
            self.segments.active.sync(is_active=False)
            # Segments that waited for the flush may have given up their indexes to make room. The next start
            # would report these as missing. See test_a_stop_deletes_the_segments_that_wait_for_a_flush.
            run(self._after_snapshot())
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}: closing failed: {error}") from error
        finally:
            self.abandon()

    def close_unchanged(self) -> None:
        """Close the files of a log that has had no append since it was opened."""
        with suppress(OSError):
            # Cut off the bytes that a failed write left after the end of the log, and the reserved zeros of
            # the transaction index.
            self.segments.active.cut_failed_write()
            self.segments.active.transactions.truncate_reserved()
        self.abandon()

    def abandon(self) -> None:
        """Close the files without writing, as a crash would."""
        self.is_closed = True
        self.producers.abandon()
        for segment in (*self.segments, *(segment for segment, _ in self._dropped)):
            with suppress(OSError):  # on a network file system, for example, closing may fail
                segment.close()
        # Close the disk after the calls above, which may remove unfinished files. From then on, it rejects
        # all deferred work.
        self.disk.close()
        # Remove the callback, because it refers to this log, which refers to the disk. With this cycle, a
        # deleted partition would stay in memory until the garbage collector runs, or forever if GcTuner has
        # frozen it. See test_a_deleted_partition_is_freed_without_the_garbage_collector.
        self.disk.on_sync_failed = ignore_failure
