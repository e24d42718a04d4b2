"""The data directory: its lock, its partitions and their checkpoints.

    .lock                                locked while a broker runs; a second broker is rejected
    meta.properties                      cluster.id, node.id, directory.id, the version of the format
    .kafka_cleanshutdown                 exists only after a clean stop
    .oncelog_starting                    exists while a start opens the partitions
    recovery-point-offset-checkpoint, log-start-offset-checkpoint, replication-offset-checkpoint,
    cleaner-offset-checkpoint
    oncelog-txnindex-checkpoint          offsets below which the transaction indexes are complete
    oncelog-txnindex-start-checkpoint    offsets from which every segment has a transaction index
    oncelog-contents-checkpoint          the contents of each partition after a clean stop
    <topic>-<partition>/                 a partition; "...-delete" is being deleted

Source: Kafka's LogManager, MetaPropertiesEnsemble, CleanShutdownFileHandler.
"""

from __future__ import annotations

import errno
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, cast

from oncelog.errors import KafkaStorageError, MisuseError, StorageError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.background import BackgroundQueue, BackgroundTask
from oncelog.log.checkpoint import (
    CLEANED_OFFSETS,
    HIGH_WATERMARKS,
    INDEX_STARTS,
    INDEXED_OFFSETS,
    LEADER_EPOCHS,
    LOG_STARTS,
    PARTITION_METADATA,
    RECOVERY_POINTS,
    encode_offsets,
    encode_uuid,
    read_offsets,
    read_partition_metadata,
)
from oncelog.log.config import LogConfig
from oncelog.log.contents import (
    CONTENTS,
    NO_CONTENTS,
    DirectoryContents,
    PartitionContents,
    decode_contents,
    encode_contents,
)
from oncelog.log.disk import Disk, DiskLock, explain, remove_if_exists, write_synced
from oncelog.log.partition import Partition
from oncelog.log.segment import LOG_SUFFIX, base_offsets, file_name
from oncelog.types import TopicPartition

LOCK, META_PROPERTIES, CLEAN_SHUTDOWN = ".lock", "meta.properties", ".kafka_cleanshutdown"
STARTING = ".oncelog_starting"
"""Exists while a start opens the partitions. After a clean stop, it is the renamed CLEAN_SHUTDOWN.

Apache Kafka and older versions of Oncelog see no clean stop then. If the start is interrupted, the next one
knows the contents of the last stop. See test_a_start_after_an_interrupted_one_still_compares_the_contents. It
also syncs the directory of each partition before it trusts the names in it. See
test_a_power_loss_brings_no_file_back_that_an_interrupted_start_removed.
"""
DELETED_SUFFIX = "-delete"
FORMAT_KEY, FORMAT_VERSION = "oncelog.format.version", 1
"""FORMAT_KEY is the key of meta.properties under which the version of the file formats is stored.
FORMAT_VERSION is the version that this Oncelog writes.

The version is raised if an older Oncelog would misread the files. A directory without the key was written by
Apache Kafka, or by an early Oncelog, whose files have version 1.
"""
FOREIGN_LOGS = frozenset({"__cluster_metadata"})
"""Logs of Apache Kafka's controllers. They are not topics and must not be deleted."""
_META_VERSION = 1
_KEPT_FILE = re.compile(r"meta\.properties|oncelog-(acls|configs|quotas|users)\.json")
"""Small files whose loss a start could not notice otherwise. Without them, the broker would have, for
example, no ACLs or the default retention. oncelog-topics.json is not among them, because its loss stops the
start anyway.
"""
_NO_IDS: Mapping[str, bytes] = MappingProxyType({})
_DIRECTORY = re.compile(r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>0|[1-9][0-9]{0,9})")
_DELETED = re.compile(rf"(?=.{{255}}$|.+-\d+\.[0-9a-f]{{32}}-).+{DELETED_SUFFIX}")
"""Matches the directory name of a deleted partition. Only a name of the maximum length may lack the partition
number or the id, because long names are cut off.
"""
MAX_PROMPT_DELETIONS = 100
"""The maximum number of deleted partitions whose directories are removed during opening, and again during
closing.

Even a slow disk removes a hundred directories in a second. Opening removes some immediately, because the disk
may be full.
"""
_SEGMENT = re.compile(r"[0-9]{20}\.log")
_FIRST_SEGMENT = f"{0:020}.log"
_PARTITION_FILE = re.compile(
    rf"[0-9]{{20}}\..+|{re.escape(PARTITION_METADATA)}(\.tmp)?|{re.escape(LEADER_EPOCHS)}(\.tmp)?"
)


class LogManager:
    """An open data directory.

    Only this class changes `partitions`. All methods must be called from the thread that runs `background`.
    """

    def __init__(
        self,
        disk: Disk,
        lock: DiskLock,
        properties: dict[str, str],
        new_uuid: Callable[[], bytes],
        limits: Limits,
        last_stop: _LastStop,
    ) -> None:
        self.disk = disk
        self.limits = limits
        self.directory = disk.describe("").rstrip("/")
        self.cluster_id = properties["cluster.id"]
        self.node_id = int(properties["node.id"])
        self.directory_id = properties["directory.id"]
        self.partitions: dict[TopicPartition, Partition] = {}
        self.was_clean = last_stop.is_clean
        self._last_stop = last_stop
        self._contents = dict(last_stop.contents.partitions)
        """The contents that the last stop left in the partitions that this start has not opened yet."""
        self._recovery_points = read_offsets(disk, RECOVERY_POINTS)
        self._log_starts = read_offsets(disk, LOG_STARTS)
        self._cleaned = read_offsets(disk, CLEANED_OFFSETS)
        self._indexed = read_offsets(disk, INDEXED_OFFSETS)
        self._index_starts = read_offsets(disk, INDEX_STARTS)
        self._unindexed: set[TopicPartition] = set()
        """Partitions whose restored transaction index entries could not be stored when they were opened."""
        self._written_points = dict(self._recovery_points)
        self.background = BackgroundQueue()
        self._lock = lock
        self._new_uuid = new_uuid
        self._deletion_count = 0
        self._is_noting_log_starts = self._is_indexed_dirty = self._is_index_starts_dirty = False
        self._has_outdated_point = False
        """True while a stored recovery point is above its log's end, or below a gap that a start has kept."""
        self._is_forgetting = False
        """True while checkpoint files may contain entries of deleted partitions."""
        self._is_closing = self._is_compacting = False
        self._left_deletions: list[str] = []
        """Directories of deleted partitions that `remove_deleted` still has to remove."""
        self._prompt_deletions = MAX_PROMPT_DELETIONS

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        node_id: int,
        new_uuid: Callable[[], bytes],
        now_ms: int,
        cluster_id: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> LogManager:
        """Lock the data directory, and remove some directories of deleted partitions. Opens no partition.

        `new_uuid` returns 16 random bytes. If `cluster_id` is None, the data directory keeps its cluster id,
        or gets a new one. `limits` apply to the whole broker. Raises StorageError if another process uses the
        directory, if it belongs to another node or cluster, or if files are unreadable. StorageError is also
        raised, before anything is changed, if a newer Oncelog wrote the directory, or if it has lost files
        since a clean stop.
        """
        lock = _take_lock(disk)
        try:
            last_stop = _read_last_stop(disk)
            if last_stop.is_clean:
                _check_files(disk, last_stop.contents.files)
                _check_partitions(disk, last_stop.contents.partitions)
            properties = _settle_properties(disk, node_id, cluster_id, new_uuid)
            manager = cls(disk, lock, properties, new_uuid, limits, last_stop)
            if last_stop.is_clean:
                manager._restore_log_starts()
            deleted = [name for name in disk.list() if _DELETED.fullmatch(name)]
            manager._left_deletions = deleted[MAX_PROMPT_DELETIONS:]
            for name in deleted[:MAX_PROMPT_DELETIONS]:
                try:
                    disk.remove_tree(name)
                except OSError:
                    manager._left_deletions.append(name)  # a failed removal must not prevent opening
            # After this call, a crash makes the next start recover all partitions. That reads little, because
            # the recovery points are at the log ends.
            _take_mark(disk, last_stop)
        except OSError as error:
            lock.release()
            raise StorageError(f"{disk.describe('')} cannot be opened: {explain(error)}") from error
        except BaseException:
            lock.release()
            raise
        return manager

    def partition_directories(self) -> list[TopicPartition]:
        """Return all partitions in the data directory, open or not, except the logs in FOREIGN_LOGS.

        A directory with a matching name may also be a user's directory. `is_partition` checks its files.
        """
        matches = [(name, _DIRECTORY.fullmatch(name)) for name in self.disk.list()]
        return [
            TopicPartition(match["topic"], int(match["partition"]))
            for name, match in matches
            if match is not None and match["topic"] not in FOREIGN_LOGS and self.disk.is_directory(name)
        ]

    def is_partition(self, topic_partition: TopicPartition) -> bool:
        """Return True if this partition's directory has a segment, or only files that a partition can have.

        For example, `backup-20261122` may be a user's directory. See
        test_a_directory_that_is_no_partition_is_left_alone.
        """
        names = self.disk.list(str(topic_partition))
        return any(_SEGMENT.match(name) for name in names) or all(map(_PARTITION_FILE.fullmatch, names))

    def stored_topic_id(self, topic_partition: TopicPartition) -> bytes | None:
        """Return the topic id stored in a partition's directory, None if there is none.

        Raises StorageError if the file is unreadable.
        """
        return read_partition_metadata(self.disk, str(topic_partition))

    def lacks_recovery_point(self, tp: TopicPartition) -> bool:
        """Return True if the last stop was clean but stored no recovery point of this partition.

        A clean stop stores one for every partition. So True means that the checkpoint file was replaced, for
        example by the file of another directory in Apache Kafka's log.dirs.
        """
        return self.was_clean and tp not in self._recovery_points

    def open_partition(
        self,
        topic_partition: TopicPartition,
        config: LogConfig,
        topic_id: bytes,
        now_ms: int,
        leader_epoch: int = 0,
    ) -> Partition:
        """Open a partition and recover it if necessary, or create it. `now_ms` is the wall clock in ms.

        The partition's leader epoch is at least `leader_epoch`. Raises MisuseError if the partition is open
        already, and StorageError if it cannot be opened.
        """
        if topic_partition in self.partitions:
            raise MisuseError(f"{topic_partition} is open already")
        cleaned_to = self._cleaned.get(topic_partition, 0)
        # Remove the contents from the table, because a later partition of this name must not inherit them.
        # See test_a_recreated_partition_begins_at_0_whatever_the_last_stop_left.
        contents = self._contents.pop(topic_partition, None)
        partition = Partition.open(
            self.disk,
            str(topic_partition),
            topic_partition,
            config,
            topic_id=topic_id,
            now_ms=now_ms,
            clean_shutdown=self.was_clean,
            recovery_point=self._recovery_points.get(topic_partition, 0),
            log_start_offset=self._log_starts.get(topic_partition, 0),
            cleaned_to=cleaned_to,
            indexed_from=self._index_starts.get(topic_partition),
            contents=contents,
            checks_all=self._last_stop.lost_contents,
            was_interrupted=self._last_stop.is_interrupted,
            leader_epoch=leader_epoch,
            background=self.background,
        )
        if self._index_starts.get(topic_partition) != partition.indexed_from:
            self._index_starts[topic_partition] = partition.indexed_from
            self._is_index_starts_dirty = True
        if self._recovery_points.get(topic_partition, 0) > partition.log_end_offset:
            self._has_outdated_point = True
        if partition.had_gap:
            self._pass_gap(partition)
        partition.on_log_start = self._note_log_start
        if cleaned_to <= partition.log_end_offset:
            partition.cleaner.cleaned_to = max(partition.cleaner.cleaned_to, cleaned_to)
            # Oncelog up to 0.4.1 wrote cleaner-offset-checkpoint, but not oncelog-txnindex-checkpoint. So
            # index entries may be lost only if the offset in the second file is below the offset in the
            # first.
            if cleaned_to > self._indexed.get(topic_partition, 0):
                if partition.restore_aborted_index(cleaned_to):
                    self._indexed[topic_partition] = cleaned_to
                    self._is_indexed_dirty = True
                else:
                    self._unindexed.add(topic_partition)
        self.partitions[topic_partition] = partition
        return partition

    def _pass_gap(self, partition: Partition) -> None:
        """Sync a log with a gap, so that `forget_missing_partitions` stores a recovery point above the gap.

        Otherwise, if cleanup.policy changed to delete before the next checkpoint, a start would take the gap
        for a loss and remove all later records. See
        test_a_gap_in_a_compacted_log_is_no_loss_after_a_change_of_its_policy.
        """
        with suppress(KafkaStorageError):  # on a full disk, a later flush and checkpoint do it
            partition.flush()
            self._has_outdated_point = True

    def remove_leftover(self, tp: TopicPartition, topic_id: bytes) -> bool:
        """Remove a partition directory that has no records and was left by an earlier topic of the same name.

        Returns True if the directory was removed. Such a directory remains if a topic's creation or growth
        failed on a broken disk. It would prevent the opening of a new topic of this name. See
        test_a_directory_that_another_topic_left_does_not_prevent_a_start.
        """
        try:
            if read_partition_metadata(self.disk, str(tp)) in (None, topic_id):
                return False
            if not self.is_without_records(tp):
                return False
            self.disk.remove_tree(str(tp))
        except (OSError, StorageError):
            return False
        return True

    def is_without_records(self, tp: TopicPartition) -> bool:
        """Return True if a partition's directory has never contained a record."""
        for name in self.disk.list(str(tp)):
            if name.endswith(".log") and name != _FIRST_SEGMENT:
                return False
            if ".log" in name:  # includes compacted segments that are not swapped in yet
                file = self.disk.open(f"{tp}/{name}")
                size_bytes = file.size()
                file.close()
                if size_bytes:
                    return False
        return True

    def forget_missing_partitions(self) -> None:
        """Remove checkpoint entries of partitions that are not open and have no directory. Raises OSError.

        Call this after opening all existing partitions. A later topic of the same name must begin at offset
        0. See test_a_new_partition_begins_at_0_beside_checkpoints_of_a_missing_one.

        A recovery point below a gap is also raised immediately (`_pass_gap`).

        A recovery point above its log's end is lowered immediately. Otherwise, after a kill, the next
        start would treat new records below it as synced. See
        test_a_lost_end_lowers_the_recovery_point_on_disk.
        """
        tables = (self._recovery_points, self._log_starts, self._cleaned, self._indexed, self._index_starts)
        listed = {tp for table in tables for tp in table} | self._contents.keys()
        missing = {tp for tp in listed - self.partitions.keys() if not self.disk.exists(str(tp))}
        for tp in missing:
            self._contents.pop(tp, None)
        for table in tables:
            for tp in missing & table.keys():
                del table[tp]
        if missing:
            self._is_index_starts_dirty = True
        if missing or self._has_outdated_point:
            self._write_offsets()
            self._written_points = dict(self._recovery_points)

    def _restore_log_starts(self) -> None:
        """Use the log starts that the last stop left if the checkpoint of log starts was lost or damaged.

        Deleted records would be readable again. See
        test_records_deleted_before_a_clean_stop_stay_deleted_without_the_checkpoint. If the checkpoint has a
        higher log start, which no checksum covers, records would be deleted. See
        test_a_damaged_checkpoint_of_log_starts_deletes_no_records.
        """
        lost = {
            tp: fields.log_start_offset
            for tp, fields in self._contents.items()
            if fields.log_start_offset != self._log_starts.get(tp, 0)
        }
        if lost:
            self._log_starts |= lost
            with suppress(OSError):  # a full disk must not prevent the start
                self.disk.replace(LOG_STARTS, encode_offsets(self._log_starts))

    def forget_last_stop(self) -> None:
        """Remove the contents that the last stop left. Call this after opening all existing partitions.

        Raises OSError.
        """
        self._contents.clear()
        self._last_stop = _LastStop(self._last_stop.mark, self.was_clean)  # frees the memory of the contents
        remove_if_exists(self.disk, STARTING)
        # Without this sync, a power loss could bring the file back, and the next start would read every
        # partition that has changed.
        self.disk.sync_directory()
        remove_if_exists(self.disk, CONTENTS)

    def forget_index_starts(self) -> None:
        """Forget from which base offsets on all segments have transaction index files. Call this if Apache
        Kafka has used the directory since Oncelog's last stop.

        Kafka creates such a file only when it writes the first entry. Recovery would treat missing files as
        lost and read the segments, which takes 4 to 18 seconds per gigabyte. See
        test_segments_written_by_kafka_since_lack_no_index. Raises StorageError.
        """
        self._index_starts.clear()
        try:
            remove_if_exists(self.disk, INDEX_STARTS)
        except OSError as error:
            raise StorageError(f"{self.disk.describe(INDEX_STARTS)}: {explain(error)}") from error

    def delete_partitions(
        self, deleted: Iterable[TopicPartition], topic_ids: Mapping[str, bytes] = _NO_IDS
    ) -> dict[str, KafkaStorageError]:
        """Run `delete_in_steps` to its end in one step, and return its errors."""
        steps = self.delete_in_steps(deleted, topic_ids)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return cast(dict[str, KafkaStorageError], done.value)

    def delete_in_steps(
        self, deleted: Iterable[TopicPartition], topic_ids: Mapping[str, bytes] = _NO_IDS
    ) -> Generator[None, None, dict[str, KafkaStorageError]]:
        """Delete partitions: close them, forget their checkpoints, and rename and remove their directories.

        The generator returns an error for each topic whose directories may remain; the caller may try again,
        even after a restart. A directory whose partition is not open is removed only if it has the topic id
        in `topic_ids`, or no topic id. Between the steps, the caller must not open any of these partitions.
        If the data directory is closed during the deletion, the deletion stops, and the generator returns an
        error for every topic.
        """
        deleted, renamed = list(deleted), []
        failures: dict[str, KafkaStorageError] = {}
        opened: set[TopicPartition] = set()
        try:
            for count, tp in enumerate(deleted, 1):
                if self._forget(tp):
                    opened.add(tp)
                if count % self.limits.partitions_per_step == 0:
                    yield from self._yield_to_others()
            if self._is_forgetting:
                # Write the files now, because a new partition of the same name must not inherit the old
                # entries.
                self._write_offsets()
                self._is_forgetting = False
            # The directory is renamed before its files are removed, so that a crash cannot leave a part of
            # the partition under its name.
            for count, tp in enumerate(deleted, 1):
                try:
                    if tp in opened or self._is_of_topic(tp, topic_ids.get(tp.topic)):
                        renamed.append(self._rename_deleted(tp))
                except FileNotFoundError:
                    pass  # an earlier attempt removed the directory, or it was never created
                except OSError as error:
                    failures.setdefault(tp.topic, KafkaStorageError(f"{tp} cannot be deleted: {error}"))
                if count % self.limits.partitions_per_step == 0:
                    yield from self._yield_to_others()
            self.disk.sync_directory()
        except (OSError, KafkaStorageError) as error:
            for tp in deleted:
                failures.setdefault(tp.topic, KafkaStorageError(f"{tp} cannot be deleted: {error}"))
        with suppress(OSError):  # `remove_deleted` retries
            self.background.add(self._remove_trees(renamed))
        return failures

    def _yield_to_others(self) -> Iterator[None]:
        """Yield once. Raises KafkaStorageError if the data directory was closed before the next step."""
        was_closing = self._is_closing
        yield None
        if self._is_closing and not was_closing:
            raise KafkaStorageError("the broker is stopping; its next start continues")

    def _forget(self, tp: TopicPartition) -> bool:
        """Forget a partition and its checkpoints. Return True if it was open."""
        # A checkpoint file that is being written may contain this partition. The count lets `_write_aside`
        # discard it.
        self._deletion_count += 1
        for table in (self._recovery_points, self._log_starts, self._cleaned, self._indexed):
            self._is_forgetting |= table.pop(tp, None) is not None
        # `_is_forgetting` is not set for an entry of INDEX_STARTS. If a new partition of this name finds the
        # old entry in the file, nothing is lost: all its segments have a transaction index file.
        self._index_starts.pop(tp, None)
        self._contents.pop(tp, None)
        self._written_points.pop(tp, None)
        self._unindexed.discard(tp)
        partition = self.partitions.pop(tp, None)
        if partition is not None:
            partition.abandon()
        return partition is not None

    def _is_of_topic(self, tp: TopicPartition, topic_id: bytes | None) -> bool:
        """Return True if a directory has this topic id or an unreadable one, or is a partition without a
        topic id.

        Raises OSError, for example FileNotFoundError if the directory does not exist.
        """
        is_partition = self.is_partition(tp)
        try:
            stored_id = read_partition_metadata(self.disk, str(tp))
        except StorageError:
            return True  # unreadable, because creating the topic was interrupted
        return stored_id == topic_id or (stored_id is None and is_partition)

    def _rename_deleted(self, tp: TopicPartition) -> str:
        name = f"{tp}.{self._new_uuid().hex()}"[: 255 - len(DELETED_SUFFIX)] + DELETED_SUFFIX
        self.disk.rename(str(tp), name)
        return name

    def remove_deleted(self) -> None:
        """Start to remove the directories of deleted partitions that still exist."""
        directories, self._left_deletions = self._left_deletions, []
        if directories:
            self.background.add(self._remove_trees(directories))

    def _remove_trees(self, directories: list[str]) -> BackgroundTask:
        failure = None
        for directory in directories:
            if self._is_closing:
                # While closing, remove only a few directories. The next start removes the remaining ones. See
                # test_a_stop_and_a_start_wait_for_few_deletions.
                if not self._prompt_deletions:
                    return
                self._prompt_deletions -= 1
            try:
                yield partial(self.disk.remove_tree, directory)
            except FileNotFoundError:
                pass
            except OSError as error:
                # Continue with the other directories. See
                # test_a_directory_that_cannot_be_removed_does_not_keep_others.
                failure = failure or error
                self._left_deletions.append(directory)
            yield None  # thousands of directories must not delay other tasks
        if failure is not None and not self._is_closing:
            raise failure

    def for_each_partition(self, work: Callable[[Partition], Iterator[object] | None]) -> None:
        """Start a background task that calls `work` for every partition.

        `work` may return an iterator; each of its items ends a step. If `work` raises KafkaStorageError for a
        partition, the task continues, and raises the first error at its end.
        """
        self.background.add(self._round(work))

    def _round(self, work: Callable[[Partition], Iterator[object] | None]) -> BackgroundTask:
        failures = []
        for tp, partition in list(self.partitions.items()):
            if self._is_closing or self.partitions.get(tp) is not partition:
                continue
            try:
                for _ in work(partition) or ():
                    yield None
            except KafkaStorageError as error:
                failures.append(error)
            yield None
        if failures:
            raise failures[0]

    def compact(self, now_ms: int) -> None:
        """Start to compact all partitions that need it, unless a compaction task is running already."""
        if not self._is_compacting:
            self._is_compacting = True
            self.background.add(self._compact(now_ms))

    def _compact(self, now_ms: int) -> BackgroundTask:
        failures, has_cleaned = [], False
        try:
            for tp, partition in list(self.partitions.items()):
                config = partition.config
                if self._is_closing or self.partitions.get(tp) is not partition:
                    continue
                if partition.cleaner.has_unfinished_swap:
                    try:
                        yield from partition.cleaner.finish_swap()
                    except KafkaStorageError as error:
                        failures.append(error)
                        continue
                if not config.is_compacted:
                    continue
                dirty = partition.cleaner.dirty_range(now_ms)
                if dirty is not None and dirty.is_due(
                    config.min_cleanable_dirty_ratio, config.max_compaction_lag_ms, now_ms
                ):
                    # Recovery interprets a gap above the checkpointed recovery point as lost records, and
                    # compaction leaves gaps. So the range must be below the recovery point in the checkpoint
                    # file, and not only below the recovery point in memory. See
                    # test_a_partition_made_again_during_a_checkpoint_has_no_recovery_point_on_disk.
                    if self._written_points.get(tp, 0) < dirty.end_offset:
                        yield from self._write_aside(RECOVERY_POINTS)
                    if self._written_points.get(tp, 0) < dirty.end_offset:
                        continue
                    try:
                        yield from partition.cleaner.compact(dirty, now_ms)
                        has_cleaned = True
                    except KafkaStorageError as error:
                        failures.append(error)
                yield None
            if has_cleaned and not self._is_closing:
                for path in (INDEXED_OFFSETS, CLEANED_OFFSETS):
                    yield from self._write_aside(path)
        finally:
            self._is_compacting = False
        if failures:
            raise failures[0]

    def write_checkpoints(self) -> None:
        """Start to write recovery points, log starts and high watermarks.

        Without a background runner, raises KafkaStorageError if a file cannot be written.
        """
        self.background.add(self._checkpoint())

    def _checkpoint(self) -> BackgroundTask:
        try:
            for partition in list(self.partitions.values()):
                if not self._is_closing:
                    partition.checkpoint_producers()
                    partition.log.release_handles()
                yield None
            for path in (RECOVERY_POINTS, LOG_STARTS, HIGH_WATERMARKS):
                yield from self._write_aside(path)
            if self._is_indexed_dirty:
                self._is_indexed_dirty = False
                yield from self._write_aside(INDEXED_OFFSETS)
            if self._is_index_starts_dirty:
                self._is_index_starts_dirty = False
                yield from self._write_aside(INDEX_STARTS)
        except OSError as error:
            raise KafkaStorageError(f"checkpoints cannot be written: {error}") from error

    def _write_aside(self, path: str) -> BackgroundTask:
        """Write a checkpoint file in a thread. Then rename it, unless a partition was deleted meanwhile."""
        data, deletion_count, new_path = self._encode_offsets(path), self._deletion_count, path + ".new"
        points = dict(self._recovery_points)
        yield partial(write_synced, self.disk, new_path, data)
        if self._deletion_count == deletion_count:
            # The file is renamed in this thread, so that no deletion can happen between the check and the
            # rename. See test_checkpoints_written_aside_never_bring_back_a_deleted_partition.
            self.disk.rename(new_path, path)
            yield self.disk.sync_directory
            # A partition that was deleted and recreated during the sync has no recovery point on disk.
            # `points` still has the old one, with which the partition would be compacted too far. See
            # test_a_partition_made_again_during_a_checkpoint_has_no_recovery_point_on_disk.
            if path == RECOVERY_POINTS and self._deletion_count == deletion_count:
                self._written_points = points

    def _note_log_start(self) -> None:
        """Start to write the log starts. Called when a log start moved to an offset inside a segment.

        Only the checkpoint file stores a log start inside a segment.
        """
        if not self._is_noting_log_starts:
            self._is_noting_log_starts = True
            self.background.add(self._write_log_starts())

    def _write_log_starts(self) -> BackgroundTask:
        self._is_noting_log_starts = False
        yield from self._write_aside(LOG_STARTS)

    def _write_offsets(self) -> None:
        paths = [RECOVERY_POINTS, LOG_STARTS, HIGH_WATERMARKS]
        if self._is_index_starts_dirty:
            self._is_index_starts_dirty = False
            paths.append(INDEX_STARTS)
        is_any_compacted = any(partition.config.is_compacted for partition in self.partitions.values())
        # Write an existing file even without entries: it may have those of a deleted topic. See
        # test_a_topic_made_again_is_compacted_as_a_new_one.
        if self._cleaned or is_any_compacted or self.disk.exists(CLEANED_OFFSETS):
            # Write these two files in this order. Otherwise, a crash between the two writes would make the
            # next start read every batch.
            paths += [INDEXED_OFFSETS, CLEANED_OFFSETS]
        for path in paths:
            self.disk.replace(path, self._encode_offsets(path))

    def _encode_offsets(self, path: str) -> bytes:
        partitions = self.partitions.items()
        if path == HIGH_WATERMARKS:
            return encode_offsets({tp: p.high_watermark for tp, p in partitions})
        # Offsets of partitions that are not open stay in the files.
        if path == CLEANED_OFFSETS:
            self._cleaned |= {tp: p.cleaner.cleaned_to for tp, p in partitions if p.config.is_compacted}
            return encode_offsets(self._cleaned)
        if path == INDEXED_OFFSETS:
            self._indexed |= {
                tp: p.cleaner.cleaned_to
                for tp, p in partitions
                if p.config.is_compacted and tp not in self._unindexed
            }
            return encode_offsets(self._indexed)
        if path == INDEX_STARTS:
            return encode_offsets(self._index_starts)
        if path == LOG_STARTS:
            self._log_starts |= {tp: p.log_start_offset for tp, p in partitions}
            return encode_offsets(self._log_starts)
        self._recovery_points |= {tp: p.stored_recovery_point for tp, p in partitions}
        return encode_offsets(self._recovery_points)

    def close(self, now_ms: int) -> None:
        """Close every partition and write the checkpoints. If nothing failed and no partition is offline,
        also write `.kafka_cleanshutdown`.

        Raises the first KafkaStorageError after closing everything. In this case, the next start recovers the
        partitions.
        """
        failures, self._is_closing = [], True
        contents: dict[TopicPartition, PartitionContents] = {}
        for tp, partition in self.partitions.items():
            try:
                partition.close(now_ms)
                if (fields := partition.contents()) is not None:
                    contents[tp] = fields
            except KafkaStorageError as error:
                failures.append(error)
        try:
            self.background.finish()
            if not failures:
                self._write_offsets()
            if not failures and not any(partition.is_offline for partition in self.partitions.values()):
                files = [name for name in self.disk.list() if _KEPT_FILE.fullmatch(name)]
                data = encode_contents(DirectoryContents(contents, files))
                self.disk.replace(CONTENTS, data)
                self.disk.replace(CLEAN_SHUTDOWN, _clean_mark(data))
        except (OSError, KafkaStorageError) as error:
            failures.append(KafkaStorageError(f"checkpoints cannot be written: {error}"))
        finally:
            self._lock.release()
        if failures:
            raise failures[0]

    @property
    def is_closing(self) -> bool:
        """True once `close` was called. No partition may be opened from then on."""
        return self._is_closing

    def new_uuid(self) -> bytes:
        """Return 16 random bytes for a new id."""
        return self._new_uuid()

    def give_back(self) -> None:
        """Restore `.kafka_cleanshutdown` after a start that was rejected before it opened any partition. Do
        nothing if the last stop was not clean.
        """
        if self.was_clean and not self.partitions:
            if self._last_stop.knows_contents:
                self.disk.rename(STARTING, CLEAN_SHUTDOWN)
            else:
                self.disk.replace(CLEAN_SHUTDOWN, self._last_stop.mark)
                remove_if_exists(self.disk, STARTING)

    def release(self) -> None:
        """Close the files and release the lock without writing, as a crash would."""
        for partition in self.partitions.values():
            partition.abandon()
        self._lock.release()


class _LastStop(NamedTuple):
    """The files that tell a start about the last clean stop.

    - `mark`: the content of CLEAN_SHUTDOWN, or of STARTING.
    - `is_clean`: no start has begun since the stop.
    - `is_interrupted`: the last start has not opened all partitions.
    - `contents`: the contents that the stop recorded; NO_CONTENTS if they are unknown.
    - `lost_contents`: the stop wrote CONTENTS, and the file is missing or damaged.
    """

    mark: bytes
    is_clean: bool
    contents: DirectoryContents = NO_CONTENTS
    lost_contents: bool = False
    is_interrupted: bool = False

    @property
    def knows_contents(self) -> bool:
        """True if the stop wrote CONTENTS."""
        return _CONTENTS_KEY in self.mark


_UNKNOWN_STOP = _LastStop(b"", False)


def _read_last_stop(disk: Disk) -> _LastStop:
    """Read the files of the last clean stop. Return _UNKNOWN_STOP if there are none: the last process was
    killed after its start, or the directory is new.
    """
    for path in (CLEAN_SHUTDOWN, STARTING):
        try:
            is_clean = path == CLEAN_SHUTDOWN
            last_stop = _LastStop(disk.read(path), is_clean, is_interrupted=not is_clean)
        except FileNotFoundError:
            continue
        return _with_contents(disk, last_stop) if last_stop.knows_contents else last_stop
    return _UNKNOWN_STOP


def _with_contents(disk: Disk, last_stop: _LastStop) -> _LastStop:
    try:
        data = disk.read(CONTENTS)
    except FileNotFoundError:
        return last_stop._replace(lost_contents=True)
    if last_stop.mark != _clean_mark(data):
        return last_stop._replace(lost_contents=True)
    return last_stop._replace(contents=decode_contents(data))


def _take_mark(disk: Disk, last_stop: _LastStop) -> None:
    """Remove CLEAN_SHUTDOWN, and create STARTING, or rename the one to the other. Raises OSError."""
    if last_stop.knows_contents:
        if last_stop.is_clean:
            disk.rename(CLEAN_SHUTDOWN, STARTING)
    else:
        # An earlier start may have left STARTING before Apache Kafka used the directory, so it is emptied.
        try:
            write_synced(disk, STARTING, b"")
        except OSError as error:
            # Even an empty file may need an inode, and a full disk must not prevent the start. See
            # test_a_disk_that_takes_no_new_file_does_not_prevent_a_start.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        for path in (CLEAN_SHUTDOWN, CONTENTS):
            remove_if_exists(disk, path)
    disk.sync_directory()


_CONTENTS_KEY = b'"contents"'


def _clean_mark(contents_data: bytes) -> bytes:
    """Return the content of CLEAN_SHUTDOWN after a stop that wrote `contents_data` to CONTENTS.

    An older Oncelog leaves CONTENTS as it is, so the checksum tells whether the last stop wrote it. Apache
    Kafka ignores fields that it does not know. See test_contents_of_an_earlier_stop_are_not_compared.
    """
    return b'{"version":0,"brokerEpoch":-1,%b:%d}' % (_CONTENTS_KEY, zlib.crc32(contents_data))


def _check_files(disk: Disk, names: Iterable[str]) -> None:
    """Raise StorageError if a small file that existed at the last clean stop is missing. See
    test_a_small_file_that_was_lost_since_a_clean_stop_stops_the_start.
    """
    lost = [name for name in names if not disk.exists(name)]
    if lost:
        raise StorageError(
            f"{disk.describe(lost[0])} was there at the last stop and is missing; restore it from a backup. "
            f"To start without it, remove {CONTENTS}"
        )


def _check_partitions(disk: Disk, contents: Mapping[TopicPartition, PartitionContents]) -> None:
    """Raise StorageError if a partition's log files have fewer bytes than the last clean stop left.

    Readers would pass over its records, and a coordinator would use older records of groups and transactional
    ids. Later stops and compactions would hide the loss, so it is reported while the files can be restored.
    See test_a_start_refuses_a_partition_that_lost_records. A missing directory is not an error, because users
    give a partition up by moving its directory away. Its log then continues at the last synced offset.
    """
    losses = {}
    for tp, expected in contents.items():
        sizes = _log_sizes(disk, tp)
        if sizes is not None and (loss := expected.loss(sizes)):
            losses[tp] = loss
    if losses:
        tp = min(losses)
        others = f" (and {len(losses) - 1} more partitions have lost files)" if len(losses) > 1 else ""
        raise StorageError(
            f"{disk.describe(str(tp))}/{losses[tp]}{others}; mount its volume, or restore the directory "
            "from a backup. docs/operations.md#lost-files says how to start without the lost records"
        )


def _log_sizes(disk: Disk, tp: TopicPartition) -> dict[int, int] | None:
    """Map the base offsets of a partition's log files to their bytes; None if the directory is missing."""
    try:
        names = disk.list(str(tp))
    except (FileNotFoundError, NotADirectoryError):
        return None
    sizes = {}
    for base_offset in base_offsets(names):
        file = disk.open(f"{tp}/{file_name(base_offset, LOG_SUFFIX)}")
        sizes[base_offset] = file.size()
        file.close()
    return sizes


def _take_lock(disk: Disk) -> DiskLock:
    try:
        return disk.lock(LOCK)
    except BlockingIOError:
        raise StorageError(
            f"{disk.describe('')} is in use by another process, which has locked {LOCK}: stop "
            "it, or use another data directory"
        ) from None
    except OSError as error:
        raise StorageError(f"{disk.describe('')} cannot be locked: {explain(error)}") from error


def _settle_properties(
    disk: Disk, node_id: int, cluster_id: str | None, new_uuid: Callable[[], bytes]
) -> dict[str, str]:
    path = disk.describe(META_PROPERTIES)
    if disk.exists(META_PROPERTIES):
        properties = _parse_properties(disk.read(META_PROPERTIES).decode(errors="replace"))
        _check_version(path, properties, "version", _META_VERSION)
        format_version = _check_version(path, properties, FORMAT_KEY, FORMAT_VERSION)
    else:
        format_version = 0
        properties = {
            "version": str(_META_VERSION),
            "cluster.id": cluster_id or encode_uuid(new_uuid()),
            "node.id": str(node_id),
            "directory.id": encode_uuid(new_uuid()),
        }
    missing = {"cluster.id", "node.id", "directory.id"} - properties.keys()
    if missing:
        raise StorageError(f"{path} lacks {', '.join(sorted(missing))}")
    if properties["node.id"] != str(node_id):
        raise StorageError(f"{path} contains node.id={properties['node.id']}, but the setting is {node_id}")
    if cluster_id is not None and properties["cluster.id"] != cluster_id:
        raise StorageError(
            f"{path} contains cluster.id={properties['cluster.id']}, but {cluster_id} was requested"
        )
    if format_version < FORMAT_VERSION:
        properties[FORMAT_KEY] = str(FORMAT_VERSION)
        text = "".join(f"{key}={value}\n" for key, value in properties.items())
        disk.replace(META_PROPERTIES, text.encode())
    return properties


def _check_version(path: str, properties: dict[str, str], key: str, newest: int) -> int:
    """Return the version stored under `key`, or 0 if there is none. Raises StorageError if the version is
    above `newest` or not a number.
    """
    text = properties.get(key, "0")
    if not text.isdecimal():
        raise StorageError(
            f"{path} contains {key}={text}, which is not a version; restore the file from a backup"
        )
    if int(text) > newest:
        raise StorageError(
            f"{path} contains {key}={text}, but this Oncelog supports versions up to "
            f"{newest}: a newer Oncelog has written the directory. Start the newer one, or "
            "restore a backup from before the upgrade; nothing was changed"
        )
    return int(text)


def _parse_properties(text: str) -> dict[str, str]:
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}
