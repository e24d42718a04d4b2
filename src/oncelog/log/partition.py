"""One partition's log: append, read and delete records.

`Partition.append` stores every batch of the partition. It checks the header and the checksum, applies the
append rule (`oncelog.rules.idempotence.append`), and then writes. Producer state changes only after the bytes
are written. So a rejected batch or a failing disk leaves the partition unchanged. Source: Kafka's UnifiedLog.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import NamedTuple, Self, assert_never, cast

from crc32c import crc32c

from oncelog.errors import (
    CorruptMessage,
    InvalidRecord,
    KafkaStorageError,
    OffsetOutOfRange,
    StorageError,
)
from oncelog.log.aborted_index_repair import restore_aborted
from oncelog.log.background import BackgroundQueue
from oncelog.log.checkpoint import (
    PARTITION_METADATA,
    encode_uuid,
    read_partition_metadata,
    write_partition_metadata,
)
from oncelog.log.cleaner import LogCleaner
from oncelog.log.config import LogConfig
from oncelog.log.contents import PartitionContents
from oncelog.log.disk import Disk, explain
from oncelog.log.epochs import LeaderEpochs
from oncelog.log.index import AbortedTransaction
from oncelog.log.local_log import LocalLog
from oncelog.log.partition_disk import PartitionDisk
from oncelog.log.producers import end_marker, produced_batch
from oncelog.log.reader import FoundTime, LogReader, LogSlice, Search, StepCost
from oncelog.log.recovery import OpenOptions, Recovered, recover
from oncelog.log.validation import check_batch, is_usual_batch, needs_preparing, no_lead_ms, prepare_batch
from oncelog.rules.idempotence.append import (
    Duplicate,
    ProducerEntry,
    Reject,
    Store,
    continue_sequence,
    decide_append,
)
from oncelog.rules.idempotence.markers import StoreMarker, decide_marker
from oncelog.rules.idempotence.producer_state import unpack_entry
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.types import Origin, TimestampType, TopicPartition
from oncelog.wire.batch import BatchHeader, read_header
from oncelog.wire.header import CRC_START, LOG_OVERHEAD_BYTES, STAMP, TRANSACTIONAL_BIT, HeaderFields

__all__ = ["Appended", "LogConfig", "LogSlice", "Partition", "ProducerState"]

_CONTROL_BIT = 0x20
_CLIENT, _LOG_APPEND_TIME = Origin.CLIENT, TimestampType.LOG_APPEND_TIME


class Appended(NamedTuple):
    """The result of `Partition.append`: the offsets of the stored batch, or of the earlier batch that a
    duplicate repeats.

    `log_append_time_ms` is the broker's time in ms on a topic with LogAppendTime, else None. For a duplicate,
    it is the largest timestamp of the stored batch, from the producer table. `log_start_offset` is the
    partition's log start after the append.
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int | None
    log_start_offset: int
    is_duplicate: bool


class ProducerState(NamedTuple):
    """The state of one producer id, as DescribeProducers returns it."""

    producer_id: int
    entry: ProducerEntry


class Partition:
    """The log of one topic partition. This node is its leader and its only replica.

    All methods except `flush` must be called from one thread. `flush` may run in another thread at the same
    time.
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
        """Every segment with this base offset or a higher one has a transaction index file."""
        self.had_gap = recovered.has_gap
        """True if opening found and kept a gap above the recovery point, which only a compacted log has."""
        self.opened_cost = 0
        """The total cost of decompressing clients' batches since opening, in records. See `prepare_batch`."""
        self.on_log_start: Callable[[], None] | None = None
        """Called after the log start moved to an offset inside a segment. Only a checkpoint file stores a log
        start inside a segment.
        """
        self._reader = reader
        self._epochs = epochs
        self._producers = recovered.producers
        self._unchanged: tuple[int, int] | None = None
        """The (log end, log start) after opening; None if some files were incomplete then. While both offsets
        are unchanged, `close` writes nothing. With None, `close` always writes.
        """

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
        contents: PartitionContents | None = None,
        checks_all: bool = False,
        was_interrupted: bool = False,
        leader_epoch: int = 0,
        background: BackgroundQueue | None = None,
    ) -> Self:
        """Open the partition in `directory`, or create it.

        A power loss may remove a new directory until its parent directory is synced, and its files until
        the first flush. Raises StorageError, whose text has the file and the position.

        - `topic_id`: 16 bytes; None uses the id stored in the directory.
        - `clean_shutdown`: if False, the last process was killed, and recovery checks unsynced records.
        - `recovery_point`: every record below this offset is synced.
        - `cleaned_to`: compaction has cleaned the log at least up to this offset.
        - `indexed_from`: segments from this base offset on had a transaction index file; None if unknown.
        - `contents`: the contents that a clean stop left in the directory; None if unknown.
        - `checks_all`: even after a clean stop, recovery reads all records and rebuilds all indexes.
        - `was_interrupted`: the last start may not have synced what it removed.
        - `background`: runs deferred work; with None, deferred work runs immediately.
        """
        disk = PartitionDisk(disk)
        background = BackgroundQueue() if background is None else background
        numbers = recovery_point, log_start_offset, cleaned_to, now_ms
        files = indexed_from, contents, checks_all, was_interrupted
        options = OpenOptions(config, clean_shutdown, *numbers, background, *files)
        is_new = False
        try:
            if not disk.exists(directory):
                _make_directory(disk, directory)
                is_new = True
            partition = cls._load(disk, directory, topic_partition, options, topic_id, leader_epoch)
        except OSError as error:
            if is_new:
                with suppress(OSError):
                    disk.remove_tree(directory)  # a remaining directory would block the next attempt
            raise StorageError(f"{disk.describe(directory)} cannot be opened: {explain(error)}") from error
        partition._show_all(directory)
        return partition

    def _show_all(self, directory: str) -> None:
        """Sync the records that flush.messages hides, which makes them visible again.

        Readers may have seen some of them before the last process ended. Raises StorageError.
        """
        if self.high_watermark < self.log_end_offset:
            try:
                self.flush()
            except KafkaStorageError as error:
                raise StorageError(f"{directory} cannot be opened: {error}") from error

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
        """Recover the directory and return its partition. Also write partition.metadata if it is missing, and
        correct the leader epochs. Raises StorageError, OSError.
        """
        stored_id = _check_topic_id(disk, directory, topic_id)
        recovered = recover(disk, directory, options)
        if topic_id is not None and stored_id is None:
            write_partition_metadata(disk, directory, topic_id)
        end_offset = recovered.segments.active.end_offset
        epochs = _settle_epochs(disk, directory, recovered, leader_epoch)
        if end_offset < options.recovery_point:
            recovered.warnings.append(
                f"ends at offset {end_offset}, but offsets up to {options.recovery_point} "
                "were synced: files are missing, or were copied while a broker was writing "
                "(docs/operations.md)"
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
        is_stored = options.is_clean and stored_id is not None
        is_stored &= recovered.producers.snapshot_offset == end_offset
        # The active segment's rebuilt index files are not written yet. See
        # test_a_stop_after_all_indexes_were_rebuilt_stores_them.
        is_stored &= recovered.rebuilt_from is None
        # After a warning the files count as changed, so that `close` syncs them. For example, if recovery
        # cut off a torn batch at offset 0, the cut is not synced yet. See
        # test_a_clean_stop_does_not_bring_the_torn_batch_of_an_empty_log_back.
        if not recovered.warnings and (end_offset == 0 or is_stored):
            partition._unchanged = end_offset, recovered.log_start_offset
        return partition

    # Offsets and state

    @property
    def config(self) -> LogConfig:
        return self.log.config

    @property
    def log_start_offset(self) -> int:
        """The first offset that clients may read."""
        return self.log.start_offset

    @property
    def log_end_offset(self) -> int:
        """The offset of the next record."""
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
        """The offset below which every record survives a power loss."""
        return self.log.recovery_point

    @property
    def stored_recovery_point(self) -> int:
        """The recovery point for the checkpoint file."""
        return self.log.stored_recovery_point

    @property
    def unflushed_record_count(self) -> int:
        """The number of offsets from the recovery point to the log end."""
        log = self.log
        return log.end_offset - log.recovery_point

    @property
    def is_offline(self) -> bool:
        """True if a sync or compaction's swap of segments failed. The partition rejects appends until the
        broker restarts.
        """
        return self.log.failure is not None

    @property
    def is_closed(self) -> bool:
        """True once the partition was closed or deleted. A closed partition changes no file."""
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
        """Return the full path of the log file of the segment that contains `offset`, for messages."""
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
        lead_ms: Callable[[], int] = no_lead_ms,
    ) -> Appended:
        """Store the first batch in `records`; bytes after that batch are ignored.

        The base offset and the leader epoch are written into `records` if the buffer is writable and contains
        only the batch. Otherwise they are written into a copy. `header` is the batch's parsed header, if the
        caller has read it. `now_ms` is the broker's time. `begins_epoch`: see `decide_append`. `lead_ms`: see
        `check_batch`.

        A batch that repeats a remembered batch is not stored again. Raises a BrokerError and stores nothing
        if `check_batch` or the append rule rejects the batch. Raises KafkaStorageError if the disk fails.
        """
        if header is None:
            header = read_header(records)
        size = header.batch_length + 12
        if size > len(records):
            raise CorruptMessage(f"the batch length field says {size} bytes, but {len(records)} were sent")
        if records.readonly or size != len(records):
            records = memoryview(bytearray(records[:size]))
        log = self.log
        config = log.config
        if origin is _CLIENT:
            check_batch(records, header, config, now_ms, lead_ms)
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

    def append_next(self, records: memoryview, fields: HeaderFields, now_ms: int) -> int | None:
        """Store a client's batch if it is usual, and return its base offset; otherwise return None.

        The result is the same as that of `append`, at a third of the cost. A batch is usual if it passes each
        check, continues its producer's sequence, and is stored as it was sent, without a new segment. None
        means that nothing was changed, and `append` must decide. `records` is one whole batch in a writable
        buffer, and `fields` are the fields of its header. See
        test_a_usual_batch_is_stored_as_append_stores_it.

        Raises KafkaStorageError if the disk fails. `records` is changed then, and must not be sent to
        `append`.
        """
        log = self.log
        if not log.stores_as_sent or log.failure is not None or records.readonly:
            return None
        if not is_usual_batch(fields, log.config, now_ms):
            return None
        _, length, sent_epoch, _, crc, attributes, delta, _, max_ms, producer_id, epoch, sequence, _ = fields
        if crc32c(records[CRC_START:]) != crc:
            return None
        producers, entry = self._producers, None
        base_offset, active = log.end_offset, producers.table.active
        is_transactional = attributes >= TRANSACTIONAL_BIT
        if producer_id >= 0:
            entry = active.get(producer_id)
            if entry is None or epoch < 0 or sequence < 0 or producers.verifying:
                return None
            entry = continue_sequence(
                entry, epoch, sequence, delta, max_ms, is_transactional, base_offset, now_ms
            )
            # If the batch does not simply continue its producer's sequence (None), or begins a transaction,
            # `append` must decide. entry[4] is the first offset of the producer's open transaction.
            if entry is None or entry[4] == base_offset:
                return None
        elif is_transactional:
            return None
        segment, size, last_offset = log.segments.active, length + LOG_OVERHEAD_BYTES, base_offset + delta
        STAMP.pack_into(records, 0, base_offset, length, log.leader_epoch)
        try:
            if not segment.append_next(records, size, last_offset, max_ms, log.config):
                STAMP.pack_into(records, 0, 0, length, sent_epoch)
                return None
        except OSError as error:
            raise log.write_error(segment, error) from error
        log.end_offset = last_offset + 1
        log.unsnapshotted_bytes += size
        if entry is not None:
            active[producer_id] = entry
        return base_offset

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
            # As in Kafka, the producer's pending verification decides whether each transaction has its own
            # epoch. Later requests do not change this decision until a batch is stored.
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
            raise InvalidRecord("a control batch must be a transaction marker")
        log, producers = self.log, self._producers
        offset = log.end_offset
        entry = producers.table.get(marker.producer_id)
        verdict = decide_marker(entry, marker, origin, offset=offset, now_ms=now_ms)
        match verdict:
            case StoreMarker():
                if verdict.completed is not None and verdict.completed.is_aborted:
                    log.reserve_abort_entry(header, now_ms)
                # A flush must not sync past the marker until the marker's index entry is in memory.
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
        """Return whole batches as stored, from the one that contains `offset` to below `upper_offset`.

        `upper_offset` None means the log end, even if clients may not see all of it yet. The total size of
        the batches is at most `max_bytes`. With `at_least_one`, the first batch is returned even if it is
        larger. At the end, the result is empty. Raises OffsetOutOfRange, KafkaStorageError, and
        CorruptMessage if the log is damaged at `offset`.
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
        """Return the aborted transactions that overlap [`from_offset`, `upper_offset`), in any order."""
        return self.log.segments.aborted_transactions(from_offset, upper_offset)

    def search_timestamp(self, timestamp_ms: int | None, cost: StepCost) -> Search:
        """Find the first record at or after `timestamp_ms`; with None, the record with the largest timestamp.

        The generator runs in bounded steps, as `oncelog.log.background` defines them. Raises
        KafkaStorageError if the partition is closed during the search or cannot be read, and CorruptMessage
        for damage.
        """
        start_offset = self.log.start_offset
        search = self._reader.search(timestamp_ms, start_offset, cost)
        while True:
            try:
                call = next(search)
            except StopIteration as done:
                if done.value is None and timestamp_ms is None and start_offset < self.log.start_offset:
                    # The record was deleted between two steps. Another one has the largest timestamp now. See
                    # test_a_look_up_of_the_largest_time_continues_if_its_segment_is_deleted_during_a_job.
                    start_offset = self.log.start_offset
                    search = self._reader.search(None, start_offset, cost)
                    continue
                return cast(FoundTime | None, done.value)
            except OSError as error:
                raise KafkaStorageError(f"{self.topic_partition}: reading failed: {error}") from error
            yield call
            if self.log.is_closed:
                raise KafkaStorageError(f"{self.topic_partition} was closed during the read")

    def offset_for_timestamp(self, timestamp_ms: int) -> FoundTime | None:
        """Return the first record whose timestamp is at least `timestamp_ms`, or None if there is none. Runs
        in one step.
        """
        return _finish(self.search_timestamp(timestamp_ms, StepCost()))

    def max_timestamp_offset(self) -> FoundTime | None:
        """Return the record with the largest timestamp, None if the log has no timestamps."""
        return _finish(self.search_timestamp(None, StepCost()))

    def end_offset_for_epoch(self, epoch: int) -> tuple[int | None, int | None]:
        """Return the largest leader epoch at or below `epoch`, and its end offset.

        Returns (None, None) if `epoch` is above the latest leader epoch.
        """
        return self._epochs.end_offset(epoch, self.log.end_offset)

    # Producers and transactions

    @property
    def producer_count(self) -> int:
        """The number of producer ids in the producer table."""
        return len(self._producers.table)

    @property
    def largest_producer_id(self) -> int:
        """The largest producer id in the producer table, -1 if the table is empty."""
        return self._producers.table.largest_id

    @property
    def open_transaction_count(self) -> int:
        return len(self._producers.open_transactions)

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Return True if this producer id and epoch has an open transaction in this partition."""
        if producer_id not in self._producers.open_transactions:
            return False
        entry = self._producers.table.get(producer_id)
        return entry is not None and entry.producer_epoch == producer_epoch

    def open_transaction(self, producer_id: int) -> ProducerIdAndEpoch | None:
        """Return the producer's id and epoch; None if it has no open transaction in this partition."""
        if producer_id not in self._producers.open_transactions:
            return None
        entry = self._producers.table.get(producer_id)
        epoch = None if entry is None else entry.producer_epoch
        return None if epoch is None else ProducerIdAndEpoch(producer_id, epoch)

    def open_transactions(self) -> list[ProducerIdAndEpoch]:
        """Return the producers that have an open transaction in this partition."""
        producers = [self.open_transaction(producer_id) for producer_id in self._producers.open_transactions]
        return [producer for producer in producers if producer is not None]

    def begin_verification(self, producer_id: int, epoch: int, sequence: int, *, raises_epoch: bool) -> None:
        """Record that the transaction coordinator is about to be asked whether a batch may be stored.

        The append rule then rejects batches with higher sequences. See `Verification`.
        """
        self._producers.begin_verification(producer_id, epoch, sequence, raises_epoch=raises_epoch)

    def producer(self, producer_id: int) -> ProducerEntry | None:
        """Return the producer table's entry for `producer_id`, or None if there is none."""
        return self._producers.table.get(producer_id)

    def epochs_of(self, producer_ids: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield (producer id, epoch) for the producers in the table that are in `producer_ids`.

        Scans the whole table.
        """
        return self._producers.table.epochs_of(producer_ids)

    def describe_producers(self) -> list[ProducerState]:
        """Return the producer table, sorted by producer id."""
        return sorted(
            ProducerState(producer_id, entry) for producer_id, entry in self._producers.table.items()
        )

    def producers_in_parts(self) -> Iterator[list[ProducerState]]:
        """Yield the producer table as of now, in parts of a few thousand producers.

        Each part is sorted by producer id, but the order of the parts is arbitrary. Describing a million
        producers at once would delay other requests for seconds. See
        test_producers_are_described_in_bounded_parts.
        """
        for part in self._producers.table.image().parts():
            yield [ProducerState(pid, unpack_entry(packed)) for pid, packed in sorted(part.items())]

    def expire_producers(self, now_ms: int) -> Iterator[int]:
        """Remove idle producers, one part of the producer table per step. Yield the number removed in each
        step.
        """
        config, table = self.log.config, self._producers.table
        max_examined = config.limits.expire_step_producers
        for _ in range(1 + len(table) // max_examined):
            yield table.expire(now_ms, config.producer_expiration_ms, max_examined)

    def restore_aborted_index(self, cleaned_to: int) -> bool:
        """Restore index entries of aborted transactions that the compaction of Oncelog up to 0.4.1 lost below
        `cleaned_to`.

        Reads every batch header below `cleaned_to`. Returns False if the entries are only in memory because
        writing failed, for example on a full disk. The next restart must then restore them again. Raises
        StorageError if the log cannot be read.
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
        """Delete the records below `before_offset`, or below the high watermark if it is None.

        Returns the new log start. Raises OffsetOutOfRange if `before_offset` is above the high watermark, and
        KafkaStorageError if the disk fails.
        """
        high_watermark = self.high_watermark
        target = high_watermark if before_offset is None else before_offset
        if not 0 <= target <= high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: cannot delete up to offset {target}: the high "
                f"watermark is {high_watermark}"
            )
        self._advance_log_start(target, now_ms)
        return self.log.start_offset

    def confirm_times(self, now_ms: int) -> Iterator[None]:
        """Verify the largest timestamps of the segments that `enforce_retention` would delete now.

        The generator runs in bounded steps. Raises KafkaStorageError if a segment cannot be read.
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
                    return  # the segment was deleted or compacted; the next run retries
                raise KafkaStorageError(f"{self.topic_partition}: retention failed: {error}") from error

    def enforce_retention(self, now_ms: int) -> int:
        """Delete the oldest segments that are too old or exceed the size limit; return the number deleted.

        Segments with open transactions are deleted, too. Nothing is deleted while the partition is offline or
        while compaction is replacing segments. Raises KafkaStorageError.
        """
        log = self.log
        if self.is_offline or log.is_swapping:
            return 0
        before = len(log.segments)
        for _ in self.confirm_times(now_ms):
            pass  # usually short, because the caller has run `confirm_times` in bounded steps
        is_deleted = log.config.is_deleted
        self._advance_log_start(self._retained_from(now_ms) if is_deleted else log.start_offset, now_ms)
        return max(before - len(log.segments), 0)

    def _retained_from(self, now_ms: int) -> int:
        """Return the log start to which retention by time and size may advance."""
        log, config, high_watermark = self.log, self.log.config, self.high_watermark
        offset = log.start_offset
        excess = None if config.retention_bytes is None else log.segments.size_bytes - config.retention_bytes
        for segment in log.segments:
            oldest_ms = None if config.retention_ms is None else now_ms - config.retention_ms
            is_old = oldest_ms is not None and segment.largest_timestamp_ms < oldest_ms
            is_excess = excess is not None and excess >= segment.size_bytes
            # Compaction may leave a closed segment empty. An empty segment must not keep later ones from
            # deletion.
            is_needed = segment is log.segments.active and segment.size_bytes == 0
            if is_needed or not (is_old or is_excess) or segment.end_offset > high_watermark:
                break
            excess = None if excess is None else excess - segment.size_bytes
            offset = segment.end_offset
        return offset

    def _advance_log_start(self, offset: int, now_ms: int) -> None:
        """Move the log start up to `offset`, and delete the segments wholly below it. Raises
        KafkaStorageError.
        """
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
        """Sync all records that were appended before the call, and raise the recovery point.

        May run in another thread. Raises KafkaStorageError; `LocalLog.flush` explains the consequences of a
        failure.
        """
        self.log.flush()

    def checkpoint_producers(self) -> None:
        """Start a snapshot of the producers if enough bytes were appended since the last one."""
        self.log.checkpoint_producers()

    def reconfigure(self, config: LogConfig) -> None:
        """Replace the topic's settings."""
        self.log.reconfigure(config)

    def close(self, now_ms: int) -> None:
        """Write all state to disk and close the files. Raises KafkaStorageError after closing them.

        An offline partition is closed without writing, because its failure was reported and the next restart
        must recover it. A partition that is unchanged since opening needs no write.
        """
        if self.is_offline:
            self.abandon()
        elif self._unchanged == (self.log.end_offset, self.log.start_offset):
            self.log.close_unchanged()
        else:
            self.log.close(now_ms)

    def contents(self) -> PartitionContents | None:
        """Return the contents of the files after `close`; None if the next start may find other contents.

        A start finds other contents if it completes or discards a compaction, or if entries of an index could
        not be stored.
        """
        segments = list(self.log.segments)
        if self.cleaner.may_have_swap_files or not all(s.transactions.is_stored for s in segments):
            return None
        return PartitionContents.of(self.log.start_offset, segments)

    def abandon(self) -> None:
        """Close the files without writing anything, as a crash would."""
        self.log.abandon()


def _make_directory(disk: Disk, directory: str) -> None:
    """Create the directory. Raises OSError, and StorageError if a dangling symbolic link has its name."""
    try:
        disk.mkdir(directory)
    except FileExistsError as error:
        text = "is a symbolic link to a missing directory: mount its volume, or remove the link"
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
    """Return the topic id stored in the directory, None if the file is missing.

    An unreadable file also gives None if `topic_id` is not None, because the file can be written again.
    Raises StorageError if the two ids differ, or if the file is unreadable and `topic_id` is None.
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
            f"{path} contains topic_id {encode_uuid(stored)}, but the topic has "
            f"{encode_uuid(topic_id)}. If the directory belongs to another topic of the same "
            "name, move it away. If the file is damaged, remove the file; the broker writes "
            "it again. If all partitions of the topic have this error, oncelog-topics.json "
            "is damaged: correct its topic_id"
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
