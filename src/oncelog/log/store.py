"""The files of one partition and its offsets: opening, writing, syncing, deleting.

What may be written is decided in `oncelog.log.partition`, which builds on this.
Source: Kafka's UnifiedLog, LocalLog.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Self

from oncelog.config import INT64_MAX
from oncelog.errors import KafkaStorageError, StorageError
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, run
from oncelog.log.checkpoint import (
    LEADER_EPOCHS,
    PARTITION_METADATA,
    encode_uuid,
    read_partition_metadata,
    write_partition_metadata,
)
from oncelog.log.config import LogConfig
from oncelog.log.disk import Disk, PartitionClosed, SyncFailed, explain, sync_file
from oncelog.log.epochs import LeaderEpochs
from oncelog.log.partition_disk import PartitionDisk
from oncelog.log.reader import Place
from oncelog.log.recovery import OpenAs, Recovered, recover
from oncelog.log.segment import Segment
from oncelog.log.validation import stamp_append_time
from oncelog.rules.idempotence.last_stable_offset import last_stable_offset
from oncelog.types import TimestampType, TopicPartition
from oncelog.wire.batch import BatchHeader, stamp

_LOG_APPEND_TIME = TimestampType.LOG_APPEND_TIME


class _Dropped(NamedTuple):
    """A segment that is out of the list; `remove` deletes its files, whatever became of their directory."""

    end_offset: int
    remove: BlockingCall


class PartitionStore:
    """Segments, offsets, leader epochs and producer snapshots of one directory.

    Methods are called from one thread, except `flush`, which may run in another one meanwhile.
    """

    def __init__(
        self,
        disk: PartitionDisk,
        directory: str,
        topic_partition: TopicPartition,
        config: LogConfig,
        topic_id: bytes | None,
        recovered: Recovered,
        epochs: LeaderEpochs,
        background: BackgroundQueue,
    ) -> None:
        self._disk = disk
        disk.on_sync_failed = self._fail
        self._directory = directory
        self.topic_partition = topic_partition
        self.config = config
        self.topic_id = topic_id
        self.recovery_reports = recovered.reports
        self._segments = recovered.segments
        self._producers = recovered.producers
        self._epochs = epochs
        self._background = background
        self._leader_epoch = epochs.latest or 0
        self._log_start_offset = recovered.log_start_offset
        self._log_end_offset = recovered.segments.active.end_offset
        self._recovery_point = recovered.log_start_offset
        self._shown_offset = recovered.log_start_offset  # the high watermark never goes below it
        self._marker_offset: int | None = None  # of a marker whose index entry is not noted yet
        self._failure: str | None = None
        self._places: dict[int, Place] = {}
        self._unsnapshotted_bytes = 0
        self._deletion_needs = 0  # up to where the log must be synced before dead segments may go
        self._is_directory_dirty = True
        self._as_opened: tuple[int, int] | None = None  # log end and start that need nothing on closing
        self._is_closed = self._is_swapping = self._rewrites_small = False
        self.cleaned_to = recovered.log_start_offset
        """Below it compaction has met every key; what newer records replaced there is gone."""
        self.held_from = INT64_MAX
        """From it on nothing is compacted yet, for a reason that the log does not know."""
        self.indexed_from = recovered.indexed_from
        """Every segment that begins there or later has an index file of aborted transactions."""
        self.opened_cost = 0
        """What it has cost to open clients' batches, in records (`prepare_batch`)."""
        self.on_log_start: Callable[[], None] | None = None
        """Called when the log start moved to where no segment begins."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        directory: str,
        topic_partition: TopicPartition,
        config: LogConfig,
        *,
        topic_id: bytes | None,
        now_ms: int,
        clean_shutdown: bool,
        recovery_point: int = 0,
        log_start_offset: int = 0,
        cleaned_to: int = 0,
        indexed_from: int | None = None,
        leader_epoch: int = 0,
        background: BackgroundQueue | None = None,
    ) -> Self:
        """Open or make the partition in `directory`. `topic_id` None takes the stored one.

        A new directory survives a power loss once its parent is synced, what is in it after a flush.

        `recovery_point`: everything below is synced; without a clean shutdown the rest is checked.
        `cleaned_to`: everything below was compacted, as far as that is known.
        `indexed_from`: segments from there on had an index file of aborted transactions; None: unknown.
        `background tasks` takes what need not be done at once; None: it is done at once.
        Raises StorageError naming file and position.
        """
        disk, background = PartitionDisk(disk), BackgroundQueue() if background is None else background
        points = recovery_point, log_start_offset, cleaned_to
        how = OpenAs(config, clean_shutdown, *points, now_ms, background, indexed_from)
        is_new = False
        try:
            if not disk.exists(directory):
                _make_directory(disk, directory)
                is_new = True
            stored_id = _check_topic_id(disk, directory, topic_id)
            recovered = recover(disk, directory, how)
            if topic_id is not None and stored_id is None:
                write_partition_metadata(disk, directory, topic_id)
            topic_id = topic_id or stored_id
            end_offset = recovered.segments.active.end_offset
            epochs = _settle_epochs(disk, directory, recovered, leader_epoch)
            if end_offset < recovery_point:
                text = f"ends at offset {end_offset}, though {recovery_point} were synced: files are missing,"
                recovered.reports.append(f"{text} or were copied while a broker wrote (docs/operations.md)")
            partition = cls(disk, directory, topic_partition, config, topic_id, recovered, epochs, background)
            partition._settle_recovery_point(recovered.rebuilt_from, how)
            is_in_order = clean_shutdown and not recovered.reports and stored_id is not None
            if end_offset == 0 or (is_in_order and recovered.producers.snapshot_offset == end_offset):
                partition._as_opened = end_offset, recovered.log_start_offset
        except OSError as error:
            if is_new:
                with suppress(OSError):  # else it would be in the way of another attempt
                    disk.remove_tree(directory)
            raise StorageError(f"{disk.describe(directory)} cannot be opened: {explain(error)}") from error
        partition._sync_what_was_visible()
        return partition

    def _sync_what_was_visible(self) -> None:
        """Sync what flush.messages hides: readers may have seen it before the process ended."""
        if self.high_watermark < self._log_end_offset:
            try:
                self.flush()
            except KafkaStorageError as error:
                raise StorageError(f"{self._directory} cannot be opened: {error}") from error

    def _settle_recovery_point(self, rebuilt_from: int | None, how: OpenAs) -> None:
        """After an unclean start the first flush writes again what no flush has vouched for."""
        end_offset = self._log_end_offset
        synced = end_offset if how.is_clean else max(how.recovery_point, how.log_start_offset)
        self._recovery_point = min(synced, end_offset if rebuilt_from is None else rebuilt_from, end_offset)
        if how.is_clean:
            return
        self._rewrites_small = True
        for segment in self._segments.from_offset(self._recovery_point):
            segment.doubt(self._recovery_point)

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        return self._log_start_offset

    @property
    def log_end_offset(self) -> int:
        """The offset the next record gets."""
        return self._log_end_offset

    @property
    def high_watermark(self) -> int:
        """Return the offset below which readers see records: with one replica the log end, mostly.

        A record that makes it flush.messages records that are not synced is hidden until the sync, with all
        behind it, as on Apache Kafka, which syncs before it moves the high watermark. Guarded by
        test_a_reader_sees_nothing_that_a_power_loss_could_take.
        """
        end_offset, recovery_point = self._log_end_offset, self._recovery_point
        if end_offset - recovery_point < self.config.flush_messages:
            return end_offset
        return max(self._shown_offset, recovery_point)

    @property
    def last_stable_offset(self) -> int:
        """Return the offset below which read_committed readers see records."""
        high_watermark = self.high_watermark
        return last_stable_offset(
            log_start_offset=self._log_start_offset,
            high_watermark=high_watermark,
            open_first_offset=self._producers.open_first_offset,
            unreplicated_first_offset=self._producers.hidden_first_offset(high_watermark),
        )

    @property
    def leader_epoch(self) -> int:
        return self._leader_epoch

    @property
    def recovery_point(self) -> int:
        """Everything below survives a power loss."""
        return self._recovery_point

    @property
    def unflushed_record_count(self) -> int:
        """Offsets above the recovery point."""
        return self._log_end_offset - self._recovery_point

    @property
    def is_offline(self) -> bool:
        """Whether a sync failed, so that nothing more is taken until the partition is opened again."""
        return self._failure is not None

    @property
    def is_closed(self) -> bool:
        """True once it was closed or deleted; then nothing here changes a file any more."""
        return self._is_closed

    @property
    def is_flush_due(self) -> bool:
        """Return whether recovery would read a closed segment again, or deleted segments wait for a sync."""
        return self._recovery_point < max(self._segments.active.base_offset, self._deletion_needs)

    @property
    def size_bytes(self) -> int:
        return self._segments.size_bytes

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def directory(self) -> str:
        """Relative to the data directory."""
        return self._directory

    def file_at(self, offset: int) -> str:
        """The log file that holds an offset, as a human finds it."""
        return self._disk.describe(self._segments.from_offset(offset)[0].log_path)

    @property
    def producer_count(self) -> int:
        """Producer ids remembered."""
        return len(self._producers.table)

    @property
    def largest_producer_id(self) -> int:
        """Of those remembered; -1 without one."""
        return self._producers.table.largest_id

    @property
    def open_transaction_count(self) -> int:
        return len(self._producers.open_transactions)

    def _write(self, records: memoryview, header: BatchHeader, now_ms: int) -> int:
        """Stamp and write a batch that may be stored; its base offset."""
        if self._failure is not None:
            self._check_online()
        base_offset, config = self._log_end_offset, self.config
        if config.timestamp_type is _LOG_APPEND_TIME and not header.is_control:
            header = stamp_append_time(records, now_ms)
        stamp(records, 0, base_offset, self._leader_epoch)
        last_offset, max_timestamp_ms = base_offset + header.last_offset_delta, header.max_timestamp_ms
        segment = self._segments.active
        try:
            if segment.is_full(len(records), last_offset, max_timestamp_ms, config, now_ms):
                segment = self._roll(now_ms)
            segment.append(records, last_offset, max_timestamp_ms, config)
        except OSError as error:
            raise KafkaStorageError(
                f"{self._disk.describe(segment.log_path)} at position {segment.size_bytes},"
                f" offset {base_offset}: {error}"
            ) from error
        if last_offset + 1 - self._recovery_point >= config.flush_messages:
            self._shown_offset = self.high_watermark
        self._log_end_offset = last_offset + 1
        self._unsnapshotted_bytes += len(records)
        return base_offset

    def _fail(self, error: SyncFailed) -> None:
        """Go offline: Linux calls what a failed sync lost clean, and a later sync proves nothing.

        As Apache Kafka does for any IOException. Not only a flush syncs: names that retention, a snapshot or
        compaction could not make durable would pass for durable with the next sync of the directory. See
        test_a_directory_that_cannot_be_synced_takes_the_partition_offline.
        """
        self._failure = f"a sync failed ({error}); start the broker again once the disk works"

    def _check_online(self) -> None:
        if self._failure is not None:
            raise KafkaStorageError(f"{self.topic_partition} is offline: {self._failure}")

    def _roll(self, now_ms: int) -> Segment:
        """Close the active segment and begin the next. On OSError nothing has changed."""
        active = self._segments.active
        active.cut_failed_write()
        try:
            active.finish()
        except OSError:
            if active.end_offset > self._log_start_offset:
                raise
            self._give_up_indexes([active])  # all its records are deleted
        if len(self._segments) == 1 and self._recovery_point <= active.base_offset:
            # No flush has made the first segment's name durable. A power loss could take it and keep the
            # second one's: the log would begin there, amid a transaction. Behind a later gap recovery drops
            # what follows. See test_no_power_loss_takes_the_first_segment_alone.
            self._disk.sync_directory(self._directory)
        segment = Segment.create(
            self._disk, self._directory, self._log_end_offset, now_ms, limits=self.config.limits
        )
        self._segments.add(segment)
        self._is_directory_dirty = True
        with suppress(OSError):
            # Its loss costs time: recovery then starts from an older one, and deleting takes its own.
            self._snapshot()
        return segment

    def _snapshot(self) -> None:
        """Begin to write down the producers as of the log end."""
        self._unsnapshotted_bytes = 0
        self._producers.snapshot(self._log_end_offset, self._after_snapshot)

    def _after_snapshot(self) -> BackgroundTask:
        """Drop snapshots within segments that are needed no more, then segments that waited for one."""
        kept = [segment.base_offset for segment in self._segments]
        if self._producers.snapshot_offset is not None:
            kept.append(self._producers.snapshot_offset)
        yield self._producers.keep_snapshots(kept, self._recovery_point)
        yield from self._remove(self._drop_dead())

    def _advance_log_start(self, offset: int, now_ms: int) -> None:
        """Move the log start up, then delete the segments wholly below it."""
        self._check_online()
        known_start, self._log_start_offset = self._log_start_offset, max(self._log_start_offset, offset)
        active, failure = self._segments.active, None
        try:
            if active.end_offset <= self._log_start_offset and active.size_bytes:
                try:
                    self._roll(now_ms)
                except OSError as error:
                    failure = error  # a full disk; what is closed can go all the same, and makes room
            dead = self._dead_segments()
            if dead and not self._is_safe_without(dead):
                try:
                    self._wait_for_snapshot(dead)
                except OSError as error:
                    failure = error  # what an older snapshot suffices for can go, and makes room
            if dropped := self._drop_dead():
                self._background.add(self._remove(dropped))
            if failure is not None:
                raise failure
            self._epochs.cut_start(self._log_start_offset)
            if (
                self.on_log_start is not None
                and known_start < self._log_start_offset != self._segments.first.base_offset
            ):
                self.on_log_start()
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}: deleting segments failed: {error}") from error

    def _dead_segments(self) -> list[Segment]:
        closed = list(self._segments)[:-1]
        return [segment for segment in closed if segment.end_offset <= self._log_start_offset]

    def _is_safe_without(self, dead: list[Segment]) -> bool:
        """Return whether a snapshot on disk says all that these say of producers, also after a power loss.

        Recovery drops a snapshot behind the end of the log. So before synced records go, the log must be
        synced up to it: test_a_power_loss_after_deleting_segments_leaves_their_producers_known.
        """
        offset = self._producers.snapshot_from(dead[-1].end_offset)
        if offset is None:
            return False
        return offset <= self._recovery_point or dead[0].base_offset >= self._recovery_point

    def _safe_part(self, dead: list[Segment]) -> list[Segment]:
        """Return those below the newest snapshot that is synced up to.

        On a full disk they make room for a newer one:
        test_a_full_disk_gets_room_by_deleting_what_older_snapshots_cover.
        """
        offset = self._producers.snapshot_up_to(self._recovery_point)
        return [segment for segment in dead if offset is not None and segment.end_offset <= offset]

    def _wait_for_snapshot(self, dead: list[Segment]) -> None:
        """Have a snapshot written that says what these say of producers, and the log synced up to it."""
        offset = self._producers.snapshot_from(dead[-1].end_offset)
        self._deletion_needs = self._log_end_offset if offset is None else offset
        if offset is None:
            if self._producers.is_snapshot_refused:
                # On a full disk this makes room for it: test_a_full_disk_with_one_segment_gets_room.
                self._give_up_indexes(dead)
            self._snapshot()

    def _give_up_indexes(self, dead: list[Segment]) -> None:
        self._is_directory_dirty = True
        for segment in dead:
            segment.give_up_indexes()

    def _drop_dead(self) -> list[_Dropped]:
        """Take some segments that are not needed any more out of the list; their files are for `_remove`."""
        dead = self._dead_segments()
        if dead and not self._is_safe_without(dead):
            dead = self._safe_part(dead)
        if not dead or self._is_swapping or self.is_offline:
            return []
        dropped: list[_Dropped] = []
        dead = dead[: self.config.limits.max_drops_per_step]
        if self._recovery_point <= dead[-1].end_offset:
            # As in `_roll`, for the segment that is the first one then. See
            # test_no_power_loss_takes_the_first_segment_that_retention_leaves.
            self._disk.sync_directory(self._directory)
        try:
            # Four renames each; eight take about two milliseconds.
            for segment in dead:
                dropped.append(_Dropped(segment.end_offset, segment.drop(self._disk)))
                self._segments.drop_first()
        except OSError:
            if not dropped:
                raise
            # The next round of retention meets the others again.
        self._places.clear()
        return dropped

    def _remove(self, dropped: list[_Dropped]) -> BackgroundTask:
        """Delete the files of dropped segments, then drop the next; thousands may go at once."""
        end_offset = None
        while dropped:
            end_offset = dropped[-1].end_offset
            yield self._sync_drops
            for segment in dropped:
                yield segment.remove
            yield None
            dropped = [] if self._is_closed else self._drop_dead()
        if end_offset is not None:
            yield partial(self._producers.snapshots.remove_below, end_offset)

    def _sync_drops(self) -> None:
        """Make the names of dropped segments durable before their files go. Safe in a thread.

        A power loss may keep the new name of one and lose those of older ones. Only while its file is there,
        a start knows that they were dropped, too: test_a_power_loss_amid_deleting_segments_leaves_no_hole.
        """
        with suppress(PartitionClosed, FileNotFoundError):  # the directory goes as a whole
            self._disk.sync_directory(self._directory)

    def flush(self) -> None:
        """Sync what was appended before the call, and move the recovery point up. Safe in a thread.

        Raises KafkaStorageError. What failed before a sync is tried again by the next flush; after a failed
        sync appends are refused until a restart, for the system may have dropped what it could not write.
        """
        self._check_online()
        self._check_open()
        end_offset = self._log_end_offset
        # In another thread this may come between a marker's write and its entry in the transaction index.
        if (marker_offset := self._marker_offset) is not None:
            end_offset = min(end_offset, marker_offset)
        synced_to = self._recovery_point
        # With the segment that ends at the recovery point: its indexes were written after that flush, or a
        # start has cut off its torn end since, which a power loss may undo as long as that is not synced:
        # test_a_second_power_loss_does_not_bring_a_torn_end_back.
        segments = self._segments.from_offset(synced_to - 1)
        try:
            # Before the syncs: a segment that comes meanwhile makes it dirty again.
            is_dirty, self._is_directory_dirty = self._is_directory_dirty, False
            is_dirty |= any(segment.transactions.is_unsynced for segment in segments)
            for segment in segments:
                segment.sync(is_active=segment is segments[-1])
            if is_dirty:
                for name in (PARTITION_METADATA, LEADER_EPOCHS):
                    sync_file(self._disk, f"{self._directory}/{name}", rewrites=self._rewrites_small)
                self._rewrites_small = False
                self._disk.sync_directory(self._directory)
        except SyncFailed as error:
            self._fail(error)
            raise KafkaStorageError(f"{self.topic_partition}: {self._failure}") from error
        except OSError as error:
            self._is_directory_dirty = True
            raise KafkaStorageError(f"{self.topic_partition} cannot be flushed: {error}") from error
        # Files that were closed meanwhile were not synced.
        self._check_open()
        self._recovery_point = max(self._recovery_point, end_offset)

    def _check_open(self) -> None:
        if self._is_closed:
            raise KafkaStorageError(f"{self.topic_partition} was closed or deleted")

    def checkpoint_producers(self) -> None:
        """Snapshot producer state if much was appended since the last one, so that recovery stays short.

        Delete segments that waited for a sync.
        """
        if self._unsnapshotted_bytes >= self.config.limits.snapshot_every_bytes:
            self._snapshot()
        if 0 < self._deletion_needs <= self._recovery_point and not self._is_closed:
            self._deletion_needs = 0
            with suppress(OSError):  # the next round of retention meets them again
                self._background.add(self._remove(self._drop_dead()))

    def rest_closed_files(self) -> None:
        """Give up the descriptors of closed segments that are synced; the next read opens them again.

        A segment that is being swapped, or could not be, has no name by which to open it.
        """
        if self._is_closed or self._is_swapping or self._failure is not None:
            return
        for segment in list(self._segments)[:-1]:
            if segment.end_offset <= self._recovery_point and segment.is_index_synced:
                segment.file.rest()

    def reconfigure(self, config: LogConfig) -> None:
        """Use other topic settings from now on."""
        # Readers go on seeing what they saw, also with a smaller flush.messages.
        self._shown_offset = self.high_watermark
        self.config = config

    def close(self, now_ms: int) -> None:
        """Snapshot, write indexes, sync, close the files. Raises KafkaStorageError, but closes them.

        An offline partition is only closed: it was reported, and the next start must recover it. So is
        one that nothing happened to.
        """
        if self.is_offline or self._as_opened == (self._log_end_offset, self._log_start_offset):
            if not self.is_offline:
                with suppress(OSError):  # of a batch or a marker that the disk refused
                    self._segments.active.cut_failed_write()
                    self._segments.active.transactions.give_room_back()
            self.abandon()
            return
        try:
            self._producers.table.expire(now_ms, self.config.producer_expiration_ms)
            self._segments.active.finish()
            self._producers.snapshot_now(self._log_end_offset)
            run(self._after_snapshot())
            self.flush()
            self._segments.active.sync(is_active=False)
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}: closing failed: {error}") from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files without writing anything, as a crash would."""
        self._is_closed = True
        self._producers.abandon()
        for segment in self._segments:
            with suppress(OSError):  # of a network file system, say
                segment.close()
        # Last, for the above may remove unfinished files. From here on deferred work has no effect.
        self._disk.close()


def _make_directory(disk: Disk, directory: str) -> None:
    """Raises StorageError for a symbolic link to nothing, OSError."""
    try:
        disk.mkdir(directory)
    except FileExistsError as error:
        text = "is a symbolic link to a directory that is not there: mount its volume, or remove the link"
        raise StorageError(f"{disk.describe(directory)} {text}") from error


def _settle_epochs(disk: Disk, directory: str, recovered: Recovered, leader_epoch: int) -> LeaderEpochs:
    return LeaderEpochs.settle(
        disk,
        directory,
        found=recovered.leader_epochs,
        log_start_offset=recovered.log_start_offset,
        log_end_offset=recovered.segments.active.end_offset,
        leader_epoch=leader_epoch,
    )


def _check_topic_id(disk: Disk, directory: str, topic_id: bytes | None) -> bytes | None:
    """The stored id; None when there is none, or one that a power loss tore while we know better."""
    try:
        stored = read_partition_metadata(disk, directory)
    except StorageError:
        if topic_id is None:
            raise
        return None
    if topic_id is not None and stored is not None and topic_id != stored:
        path = disk.describe(f"{directory}/{PARTITION_METADATA}")
        raise StorageError(
            f"{path} says topic_id {encode_uuid(stored)}, the topic has {encode_uuid(topic_id)}. If the"
            " directory belongs to a topic of the same name with another id, move it away; if the file is"
            " damaged, remove the file, which is written again; if all partitions of the topic say so,"
            " oncelog-topics.json is damaged: correct its topic_id"
        )
    return stored
