"""Compaction of one partition: when it is due, and rewriting closed segments without superseded records.

A round reads the dirty range by key, rewrites the closed segments without what may go, and swaps the result
in (`oncelog.log.segment_swap`). `oncelog.rules.storage.compaction` decides what may go. Everything runs in
short steps; syncs are blocking calls. Source: Kafka's LogCleaner and Cleaner.
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
"""Segments whose first batch one round reads, which takes about 3 ms."""
_LARGE_BYTES = 1 << 20
"""A compressed batch that may become larger than this is decompressed in a thread."""


class LogCleaner:
    """Compacts the closed segments of a partition."""

    def __init__(self, log: LocalLog, cleaned_to: int) -> None:
        self._log = log
        self._swapper = SegmentSwapper(log)
        self._is_uncleanable = False
        self.cleaned_to = cleaned_to
        """Compaction has seen every key below it; superseded records there are gone."""
        self.held_from = INT64_MAX
        """Nothing from this offset on may be compacted yet, for a reason that the log does not know."""

    def dirty_range(self, now_ms: int) -> DirtyRange | None:
        """Return what compaction may look at now, None for nothing or if a batch in it cannot be read."""
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
            stable_offset=min(self._stable_after_power_loss(), self.held_from),
            min_lag_ms=log.config.min_compaction_lag_ms,
            now_ms=now_ms,
        )

    def _stable_after_power_loss(self) -> int:
        """Return the offset below which every outcome is decided, and stays so after a power loss.

        A power loss may take an unsynced commit, and its transaction may be aborted then. The records that
        it had superseded are the newest of their keys again. See
        test_a_commit_that_is_not_synced_holds_compaction_back.
        """
        log = self._log
        stable_offset = min(log.last_stable_offset, log.recovery_point)
        unsynced = log.producers.unsynced_first_offset(log.recovery_point)
        return stable_offset if unsynced is None else min(stable_offset, unsynced)

    def _read_first_timestamps(self, segments: list[Segment]) -> None:
        """Read the first timestamps of some segments; a start reads none."""
        unknown = [segment for segment in segments if not segment.is_first_timestamp_known]
        for segment in unknown[:_MAX_FIRST_READS]:
            with suppress(OSError):  # the next round reads it again
                segment.read_first_timestamp()

    def roll_for_compaction(self, now_ms: int) -> None:
        """Roll the active segment if it is as large as all the others, so that it can be compacted.

        Loading such a log then costs what its live records cost, not its history. Raises KafkaStorageError.
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
        """Remove the records that newer ones of the same keys supersede. Raises KafkaStorageError."""
        log = self._log
        log.check_online()
        sources = [segment for segment in log.segments if segment.base_offset < dirty.end_offset]
        if log.is_closed or self._swapper.unfinished is not None or not sources:
            return  # closed, or its records were deleted, since `dirty_range`
        compaction = Compaction(
            log,
            self._swapper,
            sources=sources,
            dirty=dirty,
            aborted=log.segments.aborted_transactions(sources[0].base_offset, dirty.end_offset),
            now_ms=now_ms,
        )
        try:
            yield from self._swapper.discard_leftovers()
            yield from compaction.run()
        except Exception as error:
            # The error refers to everything that was opened, and a round keeps the errors of all partitions.
            # See test_partitions_that_cannot_be_compacted_keep_none_of_what_they_read.
            _clear_frames(error)
            if not log.is_closed:
                # Another attempt would fail at the same place, so the next one comes after a restart. No
                # error ends the round over all partitions. See
                # test_a_partition_that_cannot_be_compacted_keeps_no_other.
                self._is_uncleanable = not isinstance(error, OSError | StorageError)
                raise KafkaStorageError(f"{log.topic_partition}: compaction failed: {error}") from error
        self.cleaned_to = max(self.cleaned_to, compaction.cleaned_to)

    @property
    def has_leftovers(self) -> bool:
        """True while files of a failed attempt may be left, which a start would swap in."""
        return self._swapper.has_leftovers

    @property
    def has_unfinished_swap(self) -> bool:
        """True while a compacted segment waits for its names."""
        return self._swapper.unfinished is not None and not self._log.is_closed and self._log.failure is None

    def finish_swap(self) -> BackgroundTask:
        """Retry a swap that failed temporarily. Raises KafkaStorageError."""
        if not self.has_unfinished_swap:
            return
        try:
            yield from self._swapper.finish()
        except (OSError, StorageError) as error:
            if not self._log.is_closed:
                raise KafkaStorageError(f"{self._log.topic_partition}: compaction failed: {error}") from error


def _clear_frames(error: BaseException | None) -> None:
    """Release what the frames of an error refer to. The traceback stays, for the log."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class SegmentSwapper:
    """Replaces segments of a log by their compacted successor, and tracks what a failed attempt left."""

    def __init__(self, log: LocalLog) -> None:
        self._log = log
        self.has_leftovers = False
        """True while files of a failed attempt may be left, which a start would swap in."""
        self.unfinished: list[Segment] | None = None
        """Segments whose successor is complete but could not take their names yet."""

    def discard_leftovers(self) -> BackgroundTask:
        """Remove what a failed attempt left, if anything. Raises OSError."""
        if self.has_leftovers:
            yield partial(discard_leftovers, self._log.disk, self._log.directory)
            self.has_leftovers = False

    def begin(self, segments: list[Segment]) -> None:
        """Prepare segments for the loss of their file names; they stay readable. Raises OSError."""
        for segment in segments:
            segment.file.pread(1, 0)  # opens the file
            segment.keep_indexes_in_memory()
        self._log.is_swapping = True

    def swap_in(self, segments: list[Segment]) -> BackgroundTask:
        """Replace `segments` by the complete successor that has the first one's base offset.

        Raises OSError, StorageError.
        """
        error: Exception | None = None
        try:
            yield partial(take_place, self._log.disk, self._log.directory, segments)
        except OSError as failure:
            error = failure
        if old := self._end(segments, error):
            # Their names are gone, so closing the last descriptor frees the blocks, which takes long.
            yield partial(_close_files, old)

    def finish(self) -> BackgroundTask:
        """Retry the unfinished swap. Raises OSError, StorageError."""
        if self.unfinished is not None:
            yield from self.swap_in(self.unfinished)

    def _end(self, segments: list[Segment], error: Exception | None) -> list[Segment]:
        """Replace `segments` by the segment that now has the first one's name; return those to close.

        `error` is what renaming raised. Raises OSError, StorageError. After a temporary failure, such as too
        many open files, the old segments are read until `finish`. See
        test_a_swap_that_fails_for_a_moment_is_finished_by_the_next_round.
        """
        log = self._log
        self.unfinished = None
        if log.is_closed:
            log.is_swapping = False
            return []
        first, end_offset = segments[0], segments[-1].end_offset
        try:
            if error is not None:
                raise error
            new = Segment.open(
                log.disk, log.directory, first.base_offset, first.created_ms, log.config.limits
            )
            new.load_closed(end_offset, log.config.index_interval_bytes)
            new.file.release_handle()
        except (OSError, StorageError) as failure:
            if isinstance(failure, OSError) and log.failure is None:
                self.unfinished = segments
                raise
            log.is_swapping = False
            log.failure = f"a compacted segment could not be swapped in ({failure}); the next start does it"
            raise
        log.is_swapping = False
        log.replace_segments(segments, new)
        return segments


def _close_files(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()


class Compaction:
    """One round over one partition. After `run`, everything below `cleaned_to` is clean."""

    def __init__(
        self,
        log: LocalLog,
        swapper: SegmentSwapper,
        *,
        sources: list[Segment],
        dirty: DirtyRange,
        aborted: list[AbortedTransaction],
        now_ms: int,
    ) -> None:
        self.cleaned_to = dirty.first_offset
        self._log = log
        self._swapper = swapper
        self._config = log.config
        self._step_items = log.config.limits.compaction_step_items
        self._sources = sources
        self._dirty = dirty
        self._aborted = aborted
        self._aborted_by_marker = {entry.last_offset: entry for entry in aborted}
        self._now_ms = now_ms

    def run(self) -> BackgroundTask:
        """Raises KafkaStorageError for an unreadable batch, OSError; segments already swapped in stay."""
        # About 100 bytes for each key.
        latest = LatestOffsets(self._config.limits.max_compaction_keys)
        end_offset = yield from self._learn_keys(latest)
        cleaner = Cleaner(
            latest,
            SeenTransactions(self._aborted),
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

    def _learn_keys(self, latest: LatestOffsets) -> Generator[BlockingCall | None, None, int]:
        """Note the keys of the dirty range, and return where it ended: earlier if there are too many."""
        transactions = SeenTransactions(self._aborted)
        end_offset, items = self._dirty.first_offset, 0
        for segment in self._sources:
            if segment.end_offset <= self._dirty.first_offset:
                continue
            if not self._log.owns_segments([segment]):
                return end_offset
            for batch in _batches(segment):
                header = batch.header
                items += 1
                if (
                    header.last_offset >= self._dirty.first_offset
                    and not header.is_control
                    and not _is_aborted(header, transactions)
                ):
                    items += header.records_count
                    yield from _note_keys(batch, latest, self._step_items)
                if latest.is_full:
                    return header.last_offset + 1
                if items >= self._step_items:
                    items = 0
                    yield None
                    if not self._log.owns_segments([segment]):
                        return end_offset
            end_offset = segment.end_offset
        return end_offset

    def _clean(
        self, group: list[Segment], cleaner: Cleaner, end_offset: int
    ) -> Generator[BlockingCall | None, None, bool]:
        """Rewrite a group of segments as one and swap it in; return False if the group is no longer there."""
        log, swapper, base_offset = self._log, self._swapper, group[0].base_offset
        output = Segment.create(
            log.disk, log.directory, base_offset, self._now_ms, CLEANED, self._config.limits
        )
        is_complete = False
        try:
            items = 0
            for segment in group:
                for batch in _batches(segment):
                    items += 1 + (yield from self._take(output, batch, cleaner, end_offset))
                    if items >= self._step_items:
                        items = 0
                        yield None
                        if not log.owns_segments(group):
                            return False
            output.finish()
            try:
                yield partial(make_swap, log.disk, log.directory, output, group[-1].log_path)
            except OSError:
                # DeleteRecords and retention may have taken a segment's names away meanwhile.
                if log.owns_segments(group):
                    raise
            if log.owns_segments(group):
                swapper.begin(group)
                is_complete = True
        finally:
            swapper.has_leftovers = not is_complete
            output.close()
            if not is_complete:
                discard(log.disk, log.directory, base_offset)
                swapper.has_leftovers = False
        if is_complete:
            yield from swapper.swap_in(group)
        return is_complete

    def _take(
        self, output: Segment, batch: ScannedBatch, cleaner: Cleaner, end_offset: int
    ) -> Generator[BlockingCall | None, None, int]:
        """Write what stays of a batch, and return how many records it had."""
        header = batch.header
        if header.base_offset >= end_offset:
            self._append(output, batch.bytes(), header)
            # Without its entry, the next round would take aborted data before this marker for committed. See
            # test_a_marker_behind_the_end_of_a_round_keeps_its_index_entry.
            if header.is_control and (entry := self._aborted_by_marker.get(header.last_offset)) is not None:
                output.transactions.append(entry)
            return 0
        retention = cleaner.retention(_facts(header))
        rewritten: list[bytearray | memoryview | None] = []
        # A batch of many records takes long. Nothing else uses `cleaner` meanwhile.
        yield from _do(
            lambda: rewritten.append(self._rewritten(batch, retention, cleaner)), header, self._step_items
        )
        (kept,) = rewritten
        if kept is not None:
            self._append(output, kept, read_header(kept))
            if retention.noted is not None:
                output.transactions.append(AbortedTransaction(*retention.noted))
        return header.records_count

    def _append(self, output: Segment, batch: bytearray | memoryview, header: BatchHeader) -> None:
        output.append(batch, header.last_offset, header.max_timestamp_ms, self._config)

    def _rewritten(
        self, batch: ScannedBatch, retention: Retention, cleaner: Cleaner
    ) -> bytearray | memoryview | None:
        """Return what stays of a batch, None for nothing."""
        header = batch.header
        horizon_ms = _horizon_ms(header)
        if retention.drops_all:
            return rewrite_batch(header, [], horizon_ms) if retention.keeps_header else None
        kept: list[DecodedRecord] = []
        # In parts, so that only the records that stay are in memory, however many the batch has.
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
    """Yield groups of neighbours that fit into one segment together."""
    group: list[Segment] = []
    for segment in segments:
        size_bytes = sum(member.size_bytes for member in group) + segment.size_bytes
        if group and (
            size_bytes > config.segment_bytes
            or segment.end_offset - group[0].base_offset > config.limits.max_relative_offset
        ):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def _do(call: BlockingCall, header: BatchHeader, step_items: int) -> BackgroundTask:
    """Decode a batch: at once, or in a thread if it has many records or may become large.

    Few records prove nothing: 10 KB can become 256 MB.
    """
    is_large = most_output(header.compression, header.size_bytes) > _LARGE_BYTES
    if header.records_count > step_items or (is_large and header.compression):
        yield call
    else:
        call()


def _note_keys(batch: ScannedBatch, latest: LatestOffsets, step_items: int) -> BackgroundTask:
    """Note the offsets of the keys of a batch, in bounded steps."""
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
    """Yield the batches of a segment. Raises KafkaStorageError at bytes that are no batch."""
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
