"""A partition whose older records may be replaced by newer ones: when that is due, and swapping segments.

What is done step by step is in `oncelog.log.compaction`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from traceback import clear_frames

from oncelog.config import INT64_MAX
from oncelog.errors import KafkaStorageError, StorageError
from oncelog.log.aborted_index import restore_aborted
from oncelog.log.background import BackgroundTask
from oncelog.log.compaction import Compaction, discard_leftovers, swap_in
from oncelog.log.disk import explain
from oncelog.log.index import AbortedTransaction
from oncelog.log.segment import Segment
from oncelog.log.store import PartitionStore
from oncelog.rules.storage.compaction import DirtyRange, LastOfProducer, Span, find_dirty

_MAX_FIRST_READS = 100
"""Segments whose first batch is read in one round of compaction, about 3 ms."""


class CompactedStore(PartitionStore):
    """Adds compaction to the files of a partition."""

    has_leftovers = False
    """True while files of a compaction that failed may be left, which a start would swap in."""
    _is_uncleanable = False
    _unfinished_swap: list[Segment] | None = None

    def aborted_transactions(self, from_offset: int, upper_offset: int) -> list[AbortedTransaction]:
        """Aborted transactions that overlap the range, for a read_committed reader; in no order."""
        found = []
        for segment in self._segments.from_offset(from_offset):
            for entry in segment.transactions.from_offset(from_offset):
                if entry.first_offset < upper_offset:
                    found.append(entry)
                if entry.last_stable_offset >= upper_offset:
                    return found
        return found

    def restore_aborted_index(self, cleaned_to: int) -> bool:
        """Give abort markers below `cleaned_to` the index entries that compaction up to 0.4.1 lost.

        Reads the header of every batch there. Return False when a full disk, say, kept them from being
        stored; the next start must do it again. Raises StorageError.
        """
        try:
            restored = restore_aborted([each for each in self._segments if each.base_offset < cleaned_to])
        except OSError as error:
            raise StorageError(f"{self._disk.describe(self._directory)} cannot be read: {error}") from error
        if restored.entry_count:
            text = f".txnindex files lacked {restored.entry_count} aborted transactions"
            if restored.error is not None:
                text += f", which could not be stored ({explain(restored.error)}): the next start tries again"
            self.recovery_reports.append(text)
        return restored.error is None

    def dirty_range(self, now_ms: int) -> DirtyRange | None:
        """What compaction may look at now; None when that is nothing, or a batch in it cannot be read."""
        if self._is_uncleanable:
            return None
        segments, cleaned_to = list(self._segments)[:-1], max(self.cleaned_to, self._log_start_offset)
        if self.config.max_compaction_lag_ms < INT64_MAX:
            self._read_first_timestamps([each for each in segments if each.end_offset > cleaned_to])
        closed = [
            Span(
                each.base_offset,
                each.end_offset,
                each.size_bytes,
                each.largest_timestamp_ms,
                each.first_timestamp_ms,
            )
            for each in segments
        ]
        return find_dirty(
            closed,
            cleaned_to=cleaned_to,
            stable_offset=min(self._stable_after_power_loss(), self.held_from),
            min_lag_ms=self.config.min_compaction_lag_ms,
            now_ms=now_ms,
        )

    def _stable_after_power_loss(self) -> int:
        """Return below which offset everything is decided, and stays so.

        A power loss may take a commit that is not synced, and its transaction may be aborted then. What it
        had replaced is the newest of its keys again: test_a_commit_that_is_not_synced_holds_compaction_back.
        """
        stable_offset = min(self.last_stable_offset, self._recovery_point)
        unsynced = self._producers.unsynced_first_offset(self._recovery_point)
        return stable_offset if unsynced is None else min(stable_offset, unsynced)

    @property
    def is_flush_due(self) -> bool:
        """Return whether recovery would read a closed segment again, or compaction waits for a marker's sync.

        Without traffic no other flush comes: test_compaction_does_not_wait_for_a_marker_without_end.
        """
        first_offset = self._producers.unsynced_first_offset(self._recovery_point)
        holds_back = first_offset is not None and first_offset < self._segments.active.base_offset
        return super().is_flush_due or (holds_back and self.config.is_compacted)

    def _read_first_timestamps(self, segments: list[Segment]) -> None:
        """Learn from when the first batches are, of some segments in each round; a start reads none."""
        unknown = [segment for segment in segments if not segment.is_first_timestamp_known]
        for segment in unknown[:_MAX_FIRST_READS]:
            with suppress(OSError):  # the next round reads it again
                segment.read_first_timestamp()

    def close_long_segment(self, now_ms: int) -> None:
        """Roll the active segment if it is as large as all the others, so that it can be compacted.

        Reading such a log costs what is alive in it, not its history. Raises KafkaStorageError.
        """
        active_bytes = self._segments.active.size_bytes
        least_bytes = self.config.limits.coordinator_roll_bytes
        if active_bytes < max(least_bytes, self.size_bytes - active_bytes):
            return
        try:
            self._roll(now_ms)
        except OSError as error:
            raise KafkaStorageError(f"{self.topic_partition}: {error}") from error

    def compact(self, dirty: DirtyRange, now_ms: int) -> BackgroundTask:
        """Forget what newer records of the same keys have replaced. Raises KafkaStorageError."""
        self._check_online()
        sources = [each for each in self._segments if each.base_offset < dirty.end_offset]
        if self._is_closed or self._unfinished_swap is not None or not sources:
            return  # closed, or its records were deleted, since `dirty_range`
        compaction = Compaction(
            self,
            self._disk,
            self._directory,
            self.config,
            sources=sources,
            dirty=dirty,
            aborted=self.aborted_transactions(sources[0].base_offset, dirty.end_offset),
            now_ms=now_ms,
        )
        try:
            if self.has_leftovers:
                yield partial(discard_leftovers, self._disk, self._directory)
                self.has_leftovers = False
            yield from compaction.run()
        except Exception as error:
            # What was opened hangs on the error, and a round keeps the errors of all its partitions.
            # See test_partitions_that_cannot_be_compacted_keep_none_of_what_they_read.
            _clear_frames(error)
            if not self._is_closed:
                # Trying again would end there again; after a restart it is tried once more. No error ends the
                # round over all partitions: test_a_partition_that_cannot_be_compacted_keeps_no_other.
                self._is_uncleanable = not isinstance(error, OSError | StorageError)
                raise KafkaStorageError(f"{self.topic_partition}: compaction failed: {error}") from error
        self.cleaned_to = max(self.cleaned_to, compaction.cleaned_to)

    def last_of(self, producer_id: int) -> LastOfProducer | None:
        """What compaction must leave of a producer; None when nothing is remembered of it."""
        entry = self._producers.table.get(producer_id)
        if entry is None or entry.producer_epoch is None:
            return None
        return LastOfProducer(entry.producer_epoch, entry.batches[-1].last_offset if entry.batches else None)

    def holds(self, segments: list[Segment]) -> bool:
        """Whether the partition is open and these are its segments."""
        return not self._is_closed and self._failure is None and set(self._segments).issuperset(segments)

    def begin_swap(self, segments: list[Segment]) -> None:
        """Their files' names are about to go; they are read all the same. Raises OSError."""
        for segment in segments:
            segment.file.pread(1, 0)  # so that the file is open
            segment.keep_indexes_in_memory()
        self._is_swapping = True

    def end_swap(self, segments: list[Segment], error: Exception | None) -> list[Segment]:
        """Take what has the name of the first of them in their place; return those to be closed.

        Raises OSError, StorageError. After a call that failed for a moment, as with too many open files, the
        old ones are read until `finish_swap`. See
        test_a_swap_that_fails_for_a_moment_is_finished_by_the_next_round.
        """
        self._unfinished_swap = None
        if self._is_closed:
            self._is_swapping = False
            return []
        base_offset, end_offset = segments[0].base_offset, segments[-1].end_offset
        try:
            if error is not None:
                raise error
            new = Segment.open(
                self._disk, self._directory, base_offset, segments[0].created_ms, self.config.limits
            )
            new.load_closed(end_offset, self.config.index_interval_bytes)
            new.file.rest()
        except (OSError, StorageError) as failed:
            if isinstance(failed, OSError) and self._failure is None:
                self._unfinished_swap = segments
                raise
            self._is_swapping = False
            self._failure = f"a compacted segment could not be swapped in ({failed}); the next start does it"
            raise
        self._is_swapping = False
        self._segments.replace(segments, new)
        self._places.clear()
        return segments

    @property
    def has_unfinished_swap(self) -> bool:
        """True while a compacted segment waits for its names."""
        return self._unfinished_swap is not None and not self._is_closed and self._failure is None

    def finish_swap(self) -> BackgroundTask:
        """Try once more to swap in what could not be. Raises KafkaStorageError."""
        if self._unfinished_swap is None or not self.has_unfinished_swap:
            return
        try:
            yield from swap_in(self, self._disk, self._directory, self._unfinished_swap)
        except (OSError, StorageError) as error:
            if not self._is_closed:
                raise KafkaStorageError(f"{self.topic_partition}: compaction failed: {error}") from error


def _clear_frames(error: BaseException | None) -> None:
    """Drop what the calls that an error ended held; where they were stays, for the log."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
