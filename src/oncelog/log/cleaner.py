"""Compaction of one partition: decide when it is due, and remove superseded records.

A compaction reads the keys of the dirty range, copies the closed segments without the records that may be
removed, and replaces the segments by their copies (`oncelog.log.segment_swap`).
`oncelog.rules.storage.compaction` decides which records may be removed. All work runs as background tasks in
bounded steps; syncs are blocking calls. Source: Kafka's LogCleaner and Cleaner.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from traceback import clear_frames

from oncelog.config import INT64_MAX
from oncelog.errors import KafkaStorageError, StorageError
from oncelog.log.background import BackgroundTask, BlockingCall
from oncelog.log.config import LogConfig
from oncelog.log.index import AbortedTransaction
from oncelog.log.local_log import LocalLog
from oncelog.log.scan import BadBatch, ScannedBatch, scan
from oncelog.log.segment import Segment
from oncelog.log.segment_swap import CLEANED, discard, discard_leftovers, make_swap, take_place
from oncelog.rules.storage.compaction import (
    BatchFacts,
    Cleaner,
    DirtyRange,
    LatestOffsets,
    Retention,
    SeenTransactions,
    Span,
    find_dirty,
)
from oncelog.wire.batch import BatchHeader, read_header, rewrite_batch
from oncelog.wire.compression import most_output
from oncelog.wire.records import LOSSLESS, DecodedRecord, iter_records

_MAX_FIRST_READS = 100
"""The maximum number of segments from which one call of `dirty_range` reads the first batch. A hundred take
about 3 ms.
"""
_LARGE_BYTES = 1 << 20
"""A compressed batch that may decompress to more bytes than this is decompressed in a thread."""
_MAX_GROUP = 100
"""The maximum number of segments that are compacted into one. Their files are open together."""
_BYTES_PER_ITEM = 4096
"""The number of bytes whose reading or copying costs as much as one batch or record."""


class LogCleaner:
    """The compaction of one partition: it finds what to compact, and replaces segments by compacted ones."""

    def __init__(self, log: LocalLog, cleaned_to: int) -> None:
        self._log = log
        self._swapper = SegmentSwapper(log)
        self._is_uncleanable = False
        self._is_compacting = False
        self.cleaned_to = cleaned_to
        """The offset up to which compaction has read every key and removed superseded records."""
        self.held_from = INT64_MAX
        """Records at or above this offset must not be compacted yet. The transaction coordinator sets it to
        protect decisions whose markers a power loss could still remove.
        """

    def dirty_range(self, now_ms: int) -> DirtyRange | None:
        """Return the range of offsets that compaction has not read yet and may compact now; None if no
        compaction is due.

        After a compaction has failed because of its data, such as a damaged batch, the result is None until
        the next restart.
        """
        if self._is_uncleanable:
            return None
        log = self._log
        segments, cleaned_to = list(log.segments)[:-1], max(self.cleaned_to, log.start_offset)
        if log.config.max_compaction_lag_ms < INT64_MAX:
            self._read_first_timestamps([segment for segment in segments if segment.end_offset > cleaned_to])
        closed = [
            Span(
                segment.base_offset,
                segment.end_offset,
                segment.size_bytes,
                segment.largest_timestamp_ms,
                segment.first_timestamp_ms,
            )
            for segment in segments
        ]
        return find_dirty(
            closed,
            cleaned_to=cleaned_to,
            stable_offset=min(self._stable_after_power_loss(), log.compactable_to, self.held_from),
            min_lag_ms=log.config.min_compaction_lag_ms,
            now_ms=now_ms,
        )

    def _stable_after_power_loss(self) -> int:
        """Return the offset below which a power loss can change no transaction's outcome.

        A power loss may remove an unsynced COMMIT marker, and its transaction may then be aborted. In that
        case, the records that the transaction superseded would again be the newest of their keys. See
        test_a_commit_that_is_not_synced_holds_compaction_back.
        """
        log = self._log
        stable_offset = min(log.last_stable_offset, log.recovery_point)
        unsynced = log.producers.unsynced_first_offset(log.recovery_point)
        return stable_offset if unsynced is None else min(stable_offset, unsynced)

    def _read_first_timestamps(self, segments: list[Segment]) -> None:
        """Read the first timestamps of segments for which they are not known yet, at most _MAX_FIRST_READS
        per call.
        """
        unknown = [segment for segment in segments if not segment.is_first_timestamp_known]
        for segment in unknown[:_MAX_FIRST_READS]:
            with suppress(OSError):  # the next call tries again
                segment.read_first_timestamp()
                segment.release_file()

    def roll_for_compaction(self, now_ms: int) -> None:
        """Roll the active segment if it is at least as large as all closed segments together.

        Only closed segments can be compacted. Without rolling, a coordinator that reads its log at startup
        would read many superseded records. `limits.coordinator_roll_bytes` is the minimum size. Raises
        KafkaStorageError.
        """
        log = self._log
        active_bytes, all_bytes = log.segments.active.size_bytes, log.segments.size_bytes
        if active_bytes < max(log.config.limits.coordinator_roll_bytes, all_bytes - active_bytes):
            return
        try:
            log.roll(now_ms)
        except OSError as error:
            raise KafkaStorageError(f"{log.topic_partition}: {error}") from error

    def compact(self, dirty: DirtyRange, now_ms: int) -> BackgroundTask:
        """Remove the superseded records of the closed segments. Raises KafkaStorageError.

        `dirty` is a result of `dirty_range`.
        """
        log = self._log
        log.check_online()
        sources = [segment for segment in log.segments if segment.base_offset < dirty.end_offset]
        if log.is_closed or self._swapper.unfinished is not None or not sources:
            return  # since `dirty_range`, the log was closed, its records were deleted, or a swap failed
        compaction = Compaction(
            log,
            self._swapper,
            sources=sources,
            dirty=dirty,
            now_ms=now_ms,
        )
        self._is_compacting = True
        try:
            yield from self._swapper.discard_leftovers()
            yield from compaction.run()
            self._is_compacting = False
        except Exception as error:
            self._is_compacting = False
            # Without this call, the traceback would keep all local variables of the failed compaction in
            # memory, and `LogManager` collects the errors of all partitions. See
            # test_partitions_that_cannot_be_compacted_keep_none_of_what_they_read.
            _clear_frames(error)
            if not log.is_closed:
                # If the data cause the error, another attempt would fail at the same batch, so the partition
                # is not compacted again until a restart. KafkaStorageError lets `LogManager` continue with
                # the next partition. See test_a_partition_that_cannot_be_compacted_does_not_stop_others.
                self._is_uncleanable = not isinstance(error, OSError | StorageError)
                raise KafkaStorageError(f"{log.topic_partition}: compaction failed: {error}") from error
        self.cleaned_to = max(self.cleaned_to, compaction.cleaned_to)

    @property
    def may_have_swap_files(self) -> bool:
        """True if the directory may have `.cleaned` or `.swap` files of a compaction. The next start of the
        broker swaps them in or discards them.

        The result stays true if the log is closed during a compaction.
        """
        swapper = self._swapper
        return self._is_compacting or self._log.has_swap_leftovers or swapper.unfinished is not None

    @property
    def has_unfinished_swap(self) -> bool:
        """True while a complete compacted segment could not yet take the names of the segments that it
        replaces, or while the files of a failed compaction could not be deleted.
        """
        log = self._log
        is_unfinished = self._swapper.unfinished is not None or log.has_swap_leftovers
        return is_unfinished and not log.is_closed and log.failure is None

    def finish_swap(self) -> BackgroundTask:
        """Retry a swap that failed temporarily. Raises KafkaStorageError."""
        if not self.has_unfinished_swap:
            return
        try:
            yield from self._swapper.discard_leftovers()
            yield from self._swapper.finish()
        except (OSError, StorageError) as error:
            if not self._log.is_closed:
                raise KafkaStorageError(f"{self._log.topic_partition}: compaction failed: {error}") from error


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables of an error's frames. The traceback itself stays, for the broker's log."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class SegmentSwapper:
    """A swapper that replaces segments by their compacted successor. `finish` retries a swap that failed."""

    def __init__(self, log: LocalLog) -> None:
        self._log = log
        self.unfinished: list[Segment] | None = None
        """The segments of a swap that failed temporarily: their successor is complete, but does not have
        their names yet. None if no swap is unfinished.
        """

    def discard_leftovers(self) -> BackgroundTask:
        """Delete the files of a failed compaction, if there may be any. Raises OSError."""
        if self._log.has_swap_leftovers:
            yield partial(discard_leftovers, self._log.disk, self._log.directory)
            self._log.has_swap_leftovers = False

    def begin(self, segments: list[Segment]) -> None:
        """Prepare segments for the swap: open their files and stop writing their indexes, because the swap
        deletes the files' names. Raises OSError.
        """
        for segment in segments:
            segment.file.pread(1, 0)  # open the file now, because it still has its name
            segment.keep_indexes_in_memory()

    def swap_in(self, segments: list[Segment]) -> BackgroundTask:
        """Replace `segments` with their complete successor, which has the base offset of the first segment.

        Raises OSError, StorageError.
        """
        error: Exception | None = None
        loaded: list[Segment] = []
        try:
            yield partial(self._replace_files, segments, loaded)
        except (OSError, StorageError) as failure:
            error = failure
        if old := self._end(segments, loaded, error):
            close = partial(_close_files, old)
            try:
                # Closing the last descriptor of a deleted file frees its blocks, which may take long.
                yield close
            except OSError:
                close()  # no thread could be started

    def finish(self) -> BackgroundTask:
        """Retry the swap in `unfinished`. Raises OSError, StorageError."""
        if self.unfinished is not None:
            yield from self.swap_in(self.unfinished)

    def _replace_files(self, segments: list[Segment], loaded: list[Segment]) -> None:
        """Replace the files of `segments`, and append their successor to `loaded`. May run in another thread.

        The successor may have a million aborted transactions, which take a second to load. See
        test_compaction_reads_aborted_transactions_in_bounded_steps. Raises OSError, StorageError.
        """
        log, first, end_offset = self._log, segments[0], segments[-1].end_offset
        take_place(log.disk, log.directory, segments)
        new = Segment.open(log.disk, log.directory, first.base_offset, first.created_ms, log.config.limits)
        new.load_closed(end_offset, log.config.index_interval_bytes)
        new.file.release_handle()
        loaded.append(new)

    def _end(self, segments: list[Segment], loaded: list[Segment], error: Exception | None) -> list[Segment]:
        """Replace `segments` by the new segment in the log's segment list, and return the segments to close.

        `error` is the error of `_replace_files`, None if it succeeded. After a temporary failure, such as too
        many open files, readers use the old segments until `finish` succeeds. See
        test_a_swap_that_fails_for_a_moment_is_finished_by_the_next_round. Raises OSError, StorageError.
        """
        log = self._log
        self.unfinished = None
        if log.is_closed:
            log.is_swapping = False
            return []
        if error is not None:
            if isinstance(error, OSError) and log.failure is None:
                self.unfinished = segments
                raise error
            log.is_swapping = False
            log.failure = (
                f"a compacted segment could not replace the old ones ({error}); the next start does it"
            )
            raise error
        log.is_swapping = False
        log.replace_segments(segments, loaded[0])
        return segments


def _close_files(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()


class Compaction:
    """One compaction of one partition. After `run`, the records below `cleaned_to` are compacted."""

    def __init__(
        self,
        log: LocalLog,
        swapper: SegmentSwapper,
        *,
        sources: list[Segment],
        dirty: DirtyRange,
        now_ms: int,
    ) -> None:
        self.cleaned_to = dirty.first_offset
        self._log = log
        self._swapper = swapper
        self._config = log.config
        self._step_items = log.config.limits.compaction_step_items
        self._sources = sources
        self._dirty = dirty
        self._aborted_by_marker: dict[int, AbortedTransaction] = {}
        self._now_ms = now_ms

    def run(self) -> BackgroundTask:
        """Compact `sources`, one group of `_groups` at a time. Groups that were swapped in before an error
        stay compacted.

        Raises OSError, StorageError, and BrokerError for an unreadable batch.
        """
        yield from self._read_aborted()
        # Limit the number of keys, because each key in `latest` takes about 100 bytes of memory.
        latest = LatestOffsets(self._config.limits.max_compaction_keys)
        end_offset = yield from self._learn_keys(latest)
        cleaner = Cleaner(
            latest,
            (yield from self._seen_transactions()),
            self._log.producers.last_batch_of,
            end_offset=end_offset,
            now_ms=self._now_ms,
        )
        sources = [segment for segment in self._sources if segment.base_offset < end_offset]
        for group in _groups(sources, self._config):
            owns_group = self._log.owns_segments(group)
            if not owns_group or not (yield from self._clean(group, cleaner, end_offset)):
                return
        self.cleaned_to = end_offset

    def _read_aborted(self) -> BackgroundTask:
        """Read the aborted transactions that overlap the segments to compact.

        A partition may have a million of them, so this and `_seen_transactions` run in bounded steps. See
        test_compaction_reads_aborted_transactions_in_bounded_steps.
        """
        first_offset, end_offset = self._sources[0].base_offset, self._dirty.end_offset
        for entry in self._log.segments.iter_aborted(first_offset, end_offset):
            self._aborted_by_marker[entry.last_offset] = entry
            if len(self._aborted_by_marker) % self._step_items == 0:
                yield None

    def _seen_transactions(self) -> Generator[BlockingCall | None, None, SeenTransactions]:
        transactions = SeenTransactions()
        for count, entry in enumerate(self._aborted_by_marker.values(), 1):
            transactions.add(entry)
            if count % self._step_items == 0:
                yield None
        return transactions

    def _learn_keys(self, latest: LatestOffsets) -> Generator[BlockingCall | None, None, int]:
        """Add the newest offset of each key in the dirty range to `latest`.

        Returns the offset up to which keys were read. It is below the end of the dirty range if there are too
        many keys for `latest`, or if a segment was deleted.
        """
        transactions = yield from self._seen_transactions()
        end_offset, items = self._dirty.first_offset, 0
        for segment in self._sources:
            if segment.end_offset <= self._dirty.first_offset:
                continue
            if not self._log.owns_segments([segment]):
                return end_offset
            for batch in _batches(segment):
                header = batch.header
                items += _cost(header)
                if (
                    header.last_offset >= self._dirty.first_offset
                    and not header.is_control
                    and not _is_aborted(header, transactions)
                ):
                    yield from _note_keys(batch, latest, self._step_items)
                    # During a call, a reader may have closed the file, and a client deleted the segment. See
                    # test_a_deletion_behind_a_reader_ends_a_compaction_without_an_error.
                    if not self._log.owns_segments([segment]):
                        return end_offset
                if latest.is_full:
                    return header.last_offset + 1
                if items >= self._step_items:
                    items = 0
                    yield None
                    if not self._log.owns_segments([segment]):
                        return end_offset
            # A partition may have more closed segments than a process may have descriptors. See
            # test_compaction_of_many_segments_needs_few_descriptors.
            segment.file.release_handle()
            end_offset = segment.end_offset
        return end_offset

    def _clean(
        self, group: list[Segment], cleaner: Cleaner, end_offset: int
    ) -> Generator[BlockingCall | None, None, bool]:
        """Compact a group of segments into one and swap it in; return False if a segment of the group was
        deleted.
        """
        log, swapper, base_offset = self._log, self._swapper, group[0].base_offset
        output = Segment.create(
            log.disk, log.directory, base_offset, self._now_ms, CLEANED, self._config.limits
        )
        is_complete = False
        try:
            items = 0
            for segment in group:
                if not log.owns_segments([segment]):
                    return False
                for batch in _batches(segment):
                    items += _cost(batch.header)
                    yield from self._take(output, batch, cleaner, end_offset)
                    if not log.owns_segments([segment]):
                        return False  # as in `_learn_keys`
                    if items >= self._step_items:
                        items = 0
                        yield None
                        if not log.owns_segments(group):
                            return False
            output.finish()
            if not log.owns_segments(group):
                return False
            # From now on, no segment of the group may be deleted. If a kill followed, the next start would
            # swap the successor in, and then delete it as older than a deleted segment. See
            # test_a_kill_after_records_were_deleted_during_a_swap_loses_no_others.
            log.is_swapping = True
            try:
                yield partial(make_swap, log.disk, log.directory, output, group[-1].log_path)
            except OSError:
                if not log.is_closed:
                    raise
            if log.owns_segments(group):
                swapper.begin(group)
                is_complete = True
        finally:
            log.is_swapping = is_complete
            log.has_swap_leftovers = not is_complete
            output.close()
            if not is_complete:
                discard(log.disk, log.directory, base_offset)
                log.has_swap_leftovers = False
        if is_complete:
            yield from swapper.swap_in(group)
        return is_complete

    def _take(
        self, output: Segment, batch: ScannedBatch, cleaner: Cleaner, end_offset: int
    ) -> BackgroundTask:
        """Write the remaining records of a batch to `output`. A batch at or above `end_offset` is copied
        whole.
        """
        header = batch.header
        if header.base_offset >= end_offset:
            self._append(output, batch.bytes(), header)
            # Copy the index entry of an ABORT marker too. Without it, the next compaction would keep the
            # aborted data before the marker as committed. See
            # test_a_marker_behind_the_end_of_a_round_keeps_its_index_entry.
            if header.is_control and (entry := self._aborted_by_marker.get(header.last_offset)) is not None:
                output.transactions.append(entry)
            return
        retention = cleaner.retention(_facts(header))
        rewritten: list[bytearray | memoryview | None] = []
        # A batch of many records is rewritten in a thread, because the rewriting is slow. Nothing else uses
        # `cleaner` during the call.
        yield from _do(
            lambda: rewritten.append(self._rewritten(batch, retention, cleaner)), header, self._step_items
        )
        (kept,) = rewritten
        if kept is not None:
            self._append(output, kept, read_header(kept))
            if retention.noted is not None:
                output.transactions.append(AbortedTransaction(*retention.noted))

    def _append(self, output: Segment, batch: bytearray | memoryview, header: BatchHeader) -> None:
        output.append(batch, header.last_offset, header.max_timestamp_ms, self._config)

    def _rewritten(
        self, batch: ScannedBatch, retention: Retention, cleaner: Cleaner
    ) -> bytearray | memoryview | None:
        """Return the batch with its remaining records, None if the batch is removed. Set its delete horizon
        if it needs one and has none.
        """
        header = batch.header
        horizon_ms = _horizon_ms(header)
        if retention.drops_all:
            return rewrite_batch(header, [], horizon_ms) if retention.keeps_header else None
        kept: list[DecodedRecord] = []
        # The records are decoded in parts, so that only the remaining records are in memory, however many the
        # batch has.
        for records in iter_records(batch.data, batch.data_position, name_errors=LOSSLESS):
            kept += (
                record
                for record in records
                if header.is_control
                or cleaner.keeps(record.key, record.offset, record.value is not None, horizon_ms)
            )
        needs_horizon = (
            retention.is_empty_end if header.is_control else any(record.value is None for record in kept)
        )
        if not kept and not retention.keeps_header:
            return None
        needs_horizon = needs_horizon and horizon_ms is None
        if len(kept) == header.records_count and not needs_horizon:
            return batch.bytes()
        if needs_horizon:
            horizon_ms = min(self._now_ms + self._config.delete_retention_ms, INT64_MAX)
        return rewrite_batch(header, kept, horizon_ms)


def _groups(segments: Iterable[Segment], config: LogConfig) -> Iterator[list[Segment]]:
    """Yield groups of at most _MAX_GROUP neighbouring segments that fit into one segment together."""
    group: list[Segment] = []
    size_bytes = 0
    for segment in segments:
        if group and (
            len(group) == _MAX_GROUP
            or size_bytes + segment.size_bytes > config.segment_bytes
            or segment.end_offset - group[0].base_offset > config.limits.max_relative_offset
        ):
            yield group
            group, size_bytes = [], 0
        group.append(segment)
        size_bytes += segment.size_bytes
    if group:
        yield group


def _cost(header: BatchHeader) -> int:
    """Return the cost of reading or copying a batch, in items of a step.

    The bytes count, too: 250 batches of one record of 1 MB take 0.2 s. See
    test_compaction_of_large_records_takes_many_steps.
    """
    largest_bytes = min(most_output(header.compression, header.size_bytes), _LARGE_BYTES)
    return 1 + header.records_count + max(header.size_bytes, largest_bytes) // _BYTES_PER_ITEM


def _do(call: BlockingCall, header: BatchHeader, step_items: int) -> BackgroundTask:
    """Run `call`, which decodes a batch. If it may take long, yield it as a blocking call, which runs in a
    thread.

    Even a small batch with few records may take long, because 10 KB may decompress to 256 MB.
    """
    is_large = most_output(header.compression, header.size_bytes) > _LARGE_BYTES
    if header.records_count > step_items or (is_large and header.compression):
        yield call
    else:
        call()


def _note_keys(batch: ScannedBatch, latest: LatestOffsets, step_items: int) -> BackgroundTask:
    """Add the offset of each key in a batch to `latest`, in bounded steps."""
    parts: list[Iterator[list[DecodedRecord]]] = []
    records: list[DecodedRecord] = []
    left = batch.header.records_count

    def decode() -> None:
        if not parts:
            parts.append(iter_records(batch.data, batch.data_position, name_errors=LOSSLESS))
        records[:] = next(parts[0])

    while left:
        yield from _do(decode, batch.header, step_items)
        left -= len(records)
        for start in range(0, len(records), step_items):
            if start:
                yield None
            for record in records[start : start + step_items]:
                if record.key is not None:
                    latest.note(record.key, record.offset)


def _batches(segment: Segment) -> Iterator[ScannedBatch]:
    """Yield the batches of a segment. Raises KafkaStorageError if some bytes are not a valid batch."""
    for batch in scan(segment.file, 0, segment.size_bytes, limits=segment.limits):
        if isinstance(batch, BadBatch):
            raise KafkaStorageError(f"{segment.log_path} at position {batch.position}: {batch.reason}")
        yield batch


def _is_aborted(header: BatchHeader, transactions: SeenTransactions) -> bool:
    if not header.is_transactional or header.producer_id is None:
        return False
    return transactions.is_aborted(header.producer_id, header.last_offset)


def _horizon_ms(header: BatchHeader) -> int | None:
    return header.base_timestamp_ms if header.has_delete_horizon else None


def _facts(header: BatchHeader) -> BatchFacts:
    return BatchFacts(
        header.last_offset,
        header.producer_id,
        header.producer_epoch,
        header.is_transactional,
        header.is_control,
        _horizon_ms(header),
    )
