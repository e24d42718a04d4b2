"""One partition: append, read, delete. Every stored batch passes through `Partition.append`.

A batch is checked first (header, checksum, `oncelog.rules.idempotence.append`), then written. Producer state
changes only after the bytes are written, so a rejection or a failing disk leaves the partition as it was.
Source: Kafka's UnifiedLog.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import NamedTuple, Self, assert_never, cast

from oncelog.errors import (
    CorruptMessage,
    InvalidRecord,
    KafkaStorageError,
    OffsetOutOfRange,
    StorageError,
)
from oncelog.log.aborted_index import restore_aborted
from oncelog.log.background import BackgroundQueue
from oncelog.log.checkpoint import (
    PARTITION_METADATA,
    encode_uuid,
    read_partition_metadata,
    write_partition_metadata,
)
from oncelog.log.cleaner import LogCleaner
from oncelog.log.config import LogConfig
from oncelog.log.disk import Disk, explain
from oncelog.log.epochs import LeaderEpochs
from oncelog.log.index import AbortedTransaction
from oncelog.log.local_log import LocalLog
from oncelog.log.partition_disk import PartitionDisk
from oncelog.log.producers import end_marker, produced_batch
from oncelog.log.reader import FoundTime, LogReader, LogSlice, Search, StepCost
from oncelog.log.recovery import OpenOptions, Recovered, recover
from oncelog.log.validation import check_batch, needs_preparing, prepare_batch
from oncelog.rules.idempotence.append import Duplicate, ProducerEntry, Reject, Store, decide_append
from oncelog.rules.idempotence.markers import StoreMarker, decide_marker
from oncelog.rules.idempotence.producer_state import unpack_entry
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.types import Origin, TimestampType, TopicPartition
from oncelog.wire.batch import BatchHeader, read_header

__all__ = ["Appended", "LogConfig", "LogSlice", "Partition", "ProducerState"]

_CONTROL_BIT = 0x20
_CLIENT, _LOG_APPEND_TIME = Origin.CLIENT, TimestampType.LOG_APPEND_TIME


class Appended(NamedTuple):
    """A batch that is in the log.

    `log_append_time_ms` is the broker's time on topics with LogAppendTime, the remembered time for a
    duplicate, otherwise None.
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int | None
    log_start_offset: int
    is_duplicate: bool


class ProducerState(NamedTuple):
    """One producer id as DescribeProducers shows it."""

    producer_id: int
    entry: ProducerEntry


class Partition:
    """The log of one topic partition on this node, its leader and only replica.

    Methods are called from one thread, except `flush`, which may run in another one meanwhile.
    """

    def __init__(
        self,
        log: LocalLog,
        reader: LogReader,
        cleaner: LogCleaner,
        epochs: LeaderEpochs,
        recovered: Recovered,
        topic_id: bytes | None,
    ) -> None:
        self.log = log
        self.cleaner = cleaner
        self.topic_partition = log.topic_partition
        self.topic_id = topic_id
        self.recovery_warnings = recovered.warnings
        self.indexed_from = recovered.indexed_from
        """Every segment that begins there or later has an index file of aborted transactions."""
        self.opened_cost = 0
        """The cost so far of decompressing clients' batches, in records (`prepare_batch`)."""
        self.on_log_start: Callable[[], None] | None = None
        """Called when the log start has moved to an offset at which no segment begins."""
        self._reader = reader
        self._epochs = epochs
        self._producers = recovered.producers
        self._unchanged: tuple[int, int] | None = None
        """Log end and log start with which closing has nothing to write; None if it always has."""

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
        """Open the partition in `directory`, or create it. A `topic_id` of None takes the stored one.

        A new directory survives a power loss once its parent is synced, its content after a flush.

        `recovery_point`: everything below is synced; without a clean shutdown, the rest is checked.
        `cleaned_to`: everything below was compacted, as far as is known.
        `indexed_from`: segments from there on had an index file of aborted transactions; None: unknown.
        `background` runs deferred work; None: it is done at once.
        Raises StorageError naming file and position.
        """
        disk = PartitionDisk(disk)
        background = BackgroundQueue() if background is None else background
        options = OpenOptions(
            config,
            clean_shutdown,
            recovery_point,
            log_start_offset,
            cleaned_to,
            now_ms,
            background,
            indexed_from,
        )
        is_new = False
        try:
            if not disk.exists(directory):
                _make_directory(disk, directory)
                is_new = True
            partition = cls._load(disk, directory, topic_partition, options, topic_id, leader_epoch)
        except OSError as error:
            if is_new:
                with suppress(OSError):  # otherwise it would block the next attempt
                    disk.remove_tree(directory)
            raise StorageError(f"{disk.describe(directory)} cannot be opened: {explain(error)}") from error
        if partition.high_watermark < partition.log_end_offset:
            # Hidden by flush.messages, but readers may have seen it before the process ended.
            try:
                partition.flush()
            except KafkaStorageError as error:
                raise StorageError(f"{directory} cannot be opened: {error}") from error
        return partition

    @classmethod
    def _load(
        cls,
        disk: PartitionDisk,
        directory: str,
        topic_partition: TopicPartition,
        options: OpenOptions,
        topic_id: bytes | None,
        leader_epoch: int,
    ) -> Self:
        """Recover the directory and build the partition from it. Raises StorageError, OSError."""
        stored_id = _check_topic_id(disk, directory, topic_id)
        recovered = recover(disk, directory, options)
        if topic_id is not None and stored_id is None:
            write_partition_metadata(disk, directory, topic_id)
        end_offset = recovered.segments.active.end_offset
        epochs = _settle_epochs(disk, directory, recovered, leader_epoch)
        if end_offset < options.recovery_point:
            recovered.warnings.append(
                f"ends at offset {end_offset}, though {options.recovery_point} were synced:"
                " files are missing, or were copied while a broker wrote (docs/operations.md)"
            )
        reader = LogReader(recovered.segments, options.config.limits)
        log = LocalLog(
            disk,
            directory,
            topic_partition,
            options.config,
            recovered,
            reader,
            options.background,
            epochs.latest or 0,
        )
        log.settle_recovery_point(options, recovered.rebuilt_from)
        cleaner = LogCleaner(log, recovered.log_start_offset)
        partition = cls(log, reader, cleaner, epochs, recovered, topic_id or stored_id)
        is_in_order = options.is_clean and not recovered.warnings and stored_id is not None
        if end_offset == 0 or (is_in_order and recovered.producers.snapshot_offset == end_offset):
            partition._unchanged = end_offset, recovered.log_start_offset
        return partition

    # Offsets and state

    @property
    def config(self) -> LogConfig:
        return self.log.config

    @property
    def log_start_offset(self) -> int:
        """The first offset that may be read."""
        return self.log.start_offset

    @property
    def log_end_offset(self) -> int:
        """The offset that the next record gets."""
        return self.log.end_offset

    @property
    def high_watermark(self) -> int:
        """The offset below which readers see records."""
        return self.log.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """The offset below which read_committed readers see records."""
        return self.log.last_stable_offset

    @property
    def leader_epoch(self) -> int:
        return self.log.leader_epoch

    @property
    def recovery_point(self) -> int:
        """Everything below it survives a power loss."""
        return self.log.recovery_point

    @property
    def unflushed_record_count(self) -> int:
        """The number of offsets above the recovery point."""
        log = self.log
        return log.end_offset - log.recovery_point

    @property
    def is_offline(self) -> bool:
        """True after a failed sync: nothing is accepted until the partition is opened again."""
        return self.log.failure is not None

    @property
    def is_closed(self) -> bool:
        """True once the partition was closed or deleted. It changes no file from then on."""
        return self.log.is_closed

    @property
    def is_flush_due(self) -> bool:
        """True if a flush would shorten recovery, free deleted segments or let compaction proceed."""
        return self.log.is_flush_due

    @property
    def size_bytes(self) -> int:
        return self.log.segments.size_bytes

    @property
    def segment_count(self) -> int:
        return len(self.log.segments)

    @property
    def directory(self) -> str:
        """The directory, relative to the data directory."""
        return self.log.directory

    def file_at(self, offset: int) -> str:
        """Return the path of the log file that holds an offset, for people."""
        return self.log.disk.describe(self.log.segments.from_offset(offset)[0].log_path)

    # Appending

    def append(
        self,
        records: memoryview,
        *,
        origin: Origin,
        now_ms: int,
        header: BatchHeader | None = None,
        begins_epoch: bool = False,
    ) -> Appended:
        """Store the one batch in `records`, stamped in place if writable; bytes after it are ignored.

        `header`: as read from these records, if the caller has done so. `begins_epoch`: see `decide_append`.
        A repetition of a remembered batch is not stored again. Raises a BrokerError and stores nothing if
        `check_batch` or the append rule rejects the batch; raises KafkaStorageError if the disk fails.
        """
        if header is None:
            header = read_header(records)
        size = header.batch_length + 12
        if size > len(records):
            raise CorruptMessage(f"the batch claims {size} bytes, {len(records)} were sent")
        if records.readonly or size != len(records):
            records = memoryview(bytearray(records[:size]))
        log = self.log
        config = log.config
        if origin is _CLIENT:
            check_batch(records, header, config, now_ms)
            if needs_preparing(header, config):
                records = prepare_batch(records, header, config, self._count_opened)
                header = read_header(records)
        elif header.attributes & _CONTROL_BIT:
            return self._append_control(records, header, origin, now_ms)
        producer_id = header.producer_id
        if producer_id is None:
            base_offset = log.append(records, header, now_ms)
        else:
            verdict = self._judge(header, origin, now_ms, begins_epoch)
            if isinstance(verdict, Duplicate):
                return Appended(*verdict, log.start_offset, True)
            base_offset = log.append(records, header, now_ms)
            producers = self._producers
            producers.remember(producer_id, verdict.entry)
            if producers.verifying and header.is_transactional:
                producers.end_verification(producer_id)
        append_time_ms = now_ms if config.timestamp_type is _LOG_APPEND_TIME else None
        last_offset = base_offset + header.last_offset_delta
        appended = (base_offset, last_offset, append_time_ms, log.start_offset, False)
        return tuple.__new__(Appended, appended)

    def _count_opened(self, cost: int) -> None:
        self.opened_cost += cost

    def _judge(
        self, header: BatchHeader, origin: Origin, now_ms: int, begins_epoch: bool
    ) -> Store | Duplicate:
        log, producers = self.log, self._producers
        batch = produced_batch(header)
        if log.config.timestamp_type is _LOG_APPEND_TIME:
            batch = batch._replace(max_timestamp_ms=now_ms)
        entry, verifying = producers.table.get(batch.producer_id), producers.verifying
        verification = verifying.get(batch.producer_id) if verifying else None
        verdict = decide_append(
            entry,
            batch,
            origin,
            base_offset=log.end_offset,
            now_ms=now_ms,
            # As in Kafka, the kind of request that asked first counts until its batch is stored.
            begins_epoch=begins_epoch and (verification is None or verification.raises_epoch),
            verification=verification,
        )
        if isinstance(verdict, Reject):
            raise verdict.error(f"{self.topic_partition}: {verdict.reason}")
        return verdict

    def _append_control(
        self, records: memoryview, header: BatchHeader, origin: Origin, now_ms: int
    ) -> Appended:
        marker = end_marker(header, records)
        if marker is None:
            raise InvalidRecord("a control batch that is no transaction marker")
        log, producers = self.log, self._producers
        offset = log.end_offset
        entry = producers.table.get(marker.producer_id)
        verdict = decide_marker(entry, marker, origin, offset=offset, now_ms=now_ms)
        match verdict:
            case StoreMarker():
                if verdict.completed is not None and verdict.completed.is_aborted:
                    log.reserve_abort_entry(header, now_ms)
                # A flush must not sync past the marker until its index entry is there.
                log.unindexed_marker_offset = offset
                try:
                    log.append(records, header, now_ms)
                    if verdict.completed is not None and offset >= log.high_watermark:
                        producers.hide(verdict.completed.first_offset, offset)
                    aborted = producers.complete(marker.producer_id, verdict, log.recovery_point)
                    producers.end_verification(marker.producer_id, marker.producer_epoch)
                    if aborted is not None:
                        log.segments.active.transactions.append(aborted)
                finally:
                    log.unindexed_marker_offset = None
                return Appended(offset, offset, None, log.start_offset, False)
            case Reject(error, reason):
                raise error(f"{self.topic_partition}: {reason}")
            case _:
                assert_never(verdict)

    # Reading

    def read(
        self, offset: int, max_bytes: int, *, upper_offset: int | None = None, at_least_one: bool = True
    ) -> LogSlice:
        """Return whole stored batches, unchanged, from the one that holds `offset` to below `upper_offset`.

        They take at most `max_bytes`, but with `at_least_one` the first batch comes even if it is larger.
        `upper_offset` None is the log end, which readers may not see yet. The result is empty at the end.
        Raises OffsetOutOfRange, KafkaStorageError, and CorruptMessage where the files are damaged.
        """
        log = self.log
        end_offset = log.end_offset
        if not log.start_offset <= offset <= end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is not within {log.start_offset}..{end_offset}"
            )
        if upper_offset is not None and upper_offset < end_offset:
            end_offset = upper_offset
        if offset >= end_offset:
            return LogSlice(b"", offset)
        try:
            return self._reader.read(offset, end_offset, max_bytes, at_least_one)
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}: reading failed: {error}") from error

    def aborted_transactions(self, from_offset: int, upper_offset: int) -> list[AbortedTransaction]:
        """Return the aborted transactions that overlap a range, for a read_committed reader; unordered."""
        return self.log.segments.aborted_transactions(from_offset, upper_offset)

    def search_timestamp(self, timestamp_ms: int | None, cost: StepCost) -> Search:
        """Find the first record at or after a time, or with the largest time (None), in bounded steps.

        Raises KafkaStorageError if the partition is closed meanwhile, or cannot be read.
        """
        search = self._reader.search(timestamp_ms, self.log.start_offset, cost)
        while True:
            try:
                call = next(search)
            except StopIteration as done:
                return cast(FoundTime | None, done.value)
            except OSError as error:
                raise KafkaStorageError(f"{self.topic_partition}: reading failed: {error}") from error
            yield call
            if self.log.is_closed:
                raise KafkaStorageError(f"{self.topic_partition} was closed meanwhile")

    def offset_for_timestamp(self, timestamp_ms: int) -> FoundTime | None:
        """Return the first record at or after a time as (timestamp_ms, offset), in one step."""
        return _finish(self.search_timestamp(timestamp_ms, StepCost()))

    def max_timestamp_offset(self) -> FoundTime | None:
        """Return the record with the largest timestamp, None in an empty log."""
        return _finish(self.search_timestamp(None, StepCost()))

    def end_offset_for_epoch(self, epoch: int) -> tuple[int | None, int | None]:
        """Return the largest leader epoch not above `epoch` and its end offset; (None, None) if unknown."""
        return self._epochs.end_offset(epoch, self.log.end_offset)

    # Producers and transactions

    @property
    def producer_count(self) -> int:
        """The number of producer ids that are remembered."""
        return len(self._producers.table)

    @property
    def largest_producer_id(self) -> int:
        """The largest remembered producer id, -1 without one."""
        return self._producers.table.largest_id

    @property
    def open_transaction_count(self) -> int:
        return len(self._producers.open_transactions)

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Return True if this epoch of the producer has a transaction open here."""
        if producer_id not in self._producers.open_transactions:
            return False
        entry = self._producers.table.get(producer_id)
        return entry is not None and entry.producer_epoch == producer_epoch

    def open_transaction(self, producer_id: int) -> ProducerIdAndEpoch | None:
        """Return the producer of the transaction that is open here under an id, None without one."""
        if producer_id not in self._producers.open_transactions:
            return None
        entry = self._producers.table.get(producer_id)
        epoch = None if entry is None else entry.producer_epoch
        return None if epoch is None else ProducerIdAndEpoch(producer_id, epoch)

    def open_transactions(self) -> list[ProducerIdAndEpoch]:
        """Return the producers whose transactions are open here."""
        producers = [self.open_transaction(producer_id) for producer_id in self._producers.open_transactions]
        return [producer for producer in producers if producer is not None]

    def begin_verification(self, producer_id: int, epoch: int, sequence: int, *, raises_epoch: bool) -> None:
        """Note a batch about which the transaction coordinator is asked; no later batch may overtake it."""
        self._producers.begin_verification(producer_id, epoch, sequence, raises_epoch=raises_epoch)

    def producer(self, producer_id: int) -> ProducerEntry | None:
        """Return what is remembered of a producer id."""
        return self._producers.table.get(producer_id)

    def epochs_of(self, producer_ids: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield (producer id, epoch) of the remembered ones among these ids. Scans the whole table."""
        return self._producers.table.epochs_of(producer_ids)

    def describe_producers(self) -> list[ProducerState]:
        """Return what is remembered of every producer id, by id."""
        return sorted(
            ProducerState(producer_id, entry) for producer_id, entry in self._producers.table.items()
        )

    def producers_in_parts(self) -> Iterator[list[ProducerState]]:
        """Yield what is remembered now of every producer id, a few thousand at a time, by id within a part.

        A million at once would delay other requests for seconds. See
        test_producers_are_described_in_bounded_parts.
        """
        for part in self._producers.table.image().parts():
            yield [ProducerState(pid, unpack_entry(packed)) for pid, packed in sorted(part.items())]

    def expire_producers(self, now_ms: int) -> Iterator[int]:
        """Forget idle producers, a part of the table in each step; yield how many each step forgot."""
        config, table = self.log.config, self._producers.table
        max_examined = config.limits.expire_step_producers
        for _ in range(1 + len(table) // max_examined):
            yield table.expire(now_ms, config.producer_expiration_ms, max_examined)

    def restore_aborted_index(self, cleaned_to: int) -> bool:
        """Give abort markers below `cleaned_to` the index entries that compaction up to 0.4.1 lost.

        Reads the header of every batch there. Returns False if a full disk, for example, kept them from
        being stored; the next start must do it again. Raises StorageError.
        """
        log = self.log
        try:
            restored = restore_aborted(
                [segment for segment in log.segments if segment.base_offset < cleaned_to]
            )
        except OSError as error:
            raise StorageError(f"{log.disk.describe(log.directory)} cannot be read: {error}") from error
        if restored.entry_count:
            text = f".txnindex files lacked {restored.entry_count} aborted transactions"
            if restored.error is not None:
                text += f", which could not be stored ({explain(restored.error)}): the next start tries again"
            self.recovery_warnings.append(text)
        return restored.error is None

    # Deletion

    def delete_records(self, before_offset: int | None, now_ms: int) -> int:
        """Delete the records below an offset (None: all that readers see); return the new log start.

        Raises OffsetOutOfRange above the high watermark.
        """
        high_watermark = self.high_watermark
        target = high_watermark if before_offset is None else before_offset
        if not 0 <= target <= high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: cannot delete up to {target},"
                f" the high watermark is {high_watermark}"
            )
        self._advance_log_start(target, now_ms)
        return self.log.start_offset

    def confirm_times(self, now_ms: int) -> Iterator[None]:
        """Verify the timestamps by which `enforce_retention` would delete now, in bounded steps.

        Raises KafkaStorageError.
        """
        log, config = self.log, self.log.config
        if not config.is_deleted or config.retention_ms is None or log.is_swapping:
            return
        oldest_ms = now_ms - config.retention_ms
        for segment in log.segments:
            try:
                if segment.largest_timestamp_ms < oldest_ms:
                    for _ in segment.confirm_times():
                        yield None
                        if log.is_closed:
                            return
                if segment.largest_timestamp_ms >= oldest_ms:
                    return
            except (OSError, StorageError) as error:
                if not log.owns_segments([segment]):
                    return  # deleted or compacted meanwhile; the next round sees what is there then
                raise KafkaStorageError(f"{self.topic_partition}: retention failed: {error}") from error

    def enforce_retention(self, now_ms: int) -> int:
        """Delete segments that are too old or exceed the size limit, oldest first; return how many.

        Open transactions do not keep them. An offline partition keeps all of them, and so does one in which
        compaction is replacing segments. Raises KafkaStorageError.
        """
        log = self.log
        if self.is_offline or log.is_swapping:
            return 0
        before = len(log.segments)
        for _ in self.confirm_times(now_ms):
            pass  # mostly done already, in steps
        is_deleted = log.config.is_deleted
        self._advance_log_start(self._retained_from(now_ms) if is_deleted else log.start_offset, now_ms)
        return max(before - len(log.segments), 0)

    def _retained_from(self, now_ms: int) -> int:
        """Return the offset below which segments are too old or exceed the size limit."""
        log, config, high_watermark = self.log, self.log.config, self.high_watermark
        offset = log.start_offset
        excess = None if config.retention_bytes is None else log.segments.size_bytes - config.retention_bytes
        for segment in log.segments:
            oldest_ms = None if config.retention_ms is None else now_ms - config.retention_ms
            is_old = oldest_ms is not None and segment.largest_timestamp_ms < oldest_ms
            is_excess = excess is not None and excess >= segment.size_bytes
            # A closed segment is empty where compaction left nothing. It must not keep the ones after it.
            is_needed = segment is log.segments.active and segment.size_bytes == 0
            if is_needed or not (is_old or is_excess) or segment.end_offset > high_watermark:
                break
            excess = None if excess is None else excess - segment.size_bytes
            offset = segment.end_offset
        return offset

    def _advance_log_start(self, offset: int, now_ms: int) -> None:
        """Move the log start up, and delete the segments wholly below it. Raises KafkaStorageError."""
        log = self.log
        log.check_online()
        previous = log.start_offset
        try:
            log.delete_before(offset, now_ms)
            self._epochs.cut_start(log.start_offset)
            is_within_segment = log.start_offset != log.segments.first.base_offset
            if self.on_log_start is not None and previous < log.start_offset and is_within_segment:
                self.on_log_start()
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}: deleting segments failed: {error}") from error

    # Syncing and closing

    def flush(self) -> None:
        """Sync what was appended before the call, and raise the recovery point. Safe in a thread.

        Raises KafkaStorageError; see `LocalLog.flush`.
        """
        self.log.flush()

    def checkpoint_producers(self) -> None:
        """Snapshot the producers if much was appended since the last snapshot."""
        self.log.checkpoint_producers()

    def reconfigure(self, config: LogConfig) -> None:
        """Use other topic settings from now on."""
        self.log.reconfigure(config)

    def close(self, now_ms: int) -> None:
        """Write everything and close the files. Raises KafkaStorageError, but closes them in any case.

        An offline partition is only closed: its failure was reported, and the next start must recover it.
        An unchanged partition needs nothing to be written.
        """
        if self.is_offline:
            self.abandon()
        elif self._unchanged == (self.log.end_offset, self.log.start_offset):
            self.log.close_unchanged()
        else:
            self.log.close(now_ms)

    def abandon(self) -> None:
        """Close the files without writing anything, as a crash would."""
        self.log.abandon()


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
    """Return the stored id, None if there is none, or a torn one while the caller knows the id.

    Raises StorageError if the ids differ, or if the file is unreadable and the caller does not know the id.
    """
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


def _finish(search: Search) -> FoundTime | None:
    while True:
        try:
            call = next(search)
        except StopIteration as done:
            return cast(FoundTime | None, done.value)
        if call is not None:
            call()
