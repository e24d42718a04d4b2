"""Compaction: read the dirty range by key, write the closed segments anew without what may go, swap them in.

    <base>.log.cleaned   being written, worth nothing after a crash
    <base>.log.swap      whole and synced: it replaces every segment that begins within its offsets
Index files have the same endings. The log gets `.swap` last and loses it first, so that its name tells what
the others are worth; `finish_swaps` is the other half, for the next start. What may go is decided in
`rules.storage.compaction`; everything here is in short steps, and syncs are jobs.
Source: disk, sections 3 and 5; Kafka's Cleaner, LocalLog.replaceSegments, LogLoader.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import Protocol

from oncelog.config import INT64_MAX
from oncelog.errors import KafkaStorageError
from oncelog.log.background import BackgroundTask, BlockingCall
from oncelog.log.config import LogConfig
from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.index import AbortedTransaction
from oncelog.log.scan import BadBatch, FoundBatch, HeaderBlock, scan, scan_headers_past_damage
from oncelog.log.segment import LOG_SUFFIX, SUFFIXES, Segment, file_name
from oncelog.rules.storage.compaction import (
    BatchFacts,
    Cleaning,
    DirtyRange,
    Judgement,
    LastOfProducer,
    LatestOffsets,
    SeenTransactions,
)
from oncelog.wire.batch import BatchHeader, read_header, rewrite_batch
from oncelog.wire.compression import most_output
from oncelog.wire.records import LOSSLESS, DecodedRecord, iter_records

CLEANED, SWAP = ".cleaned", ".swap"
_LARGE_BYTES = 1 << 20
"""A compressed batch that may become larger than this is opened in a thread."""


class Owner(Protocol):
    """The partition, as its compaction needs it."""

    has_leftovers: bool
    """True while files of an attempt that failed may be left, which a start would swap in."""

    def last_of(self, producer_id: int) -> LastOfProducer | None:
        """What a living producer wrote last."""
        ...

    def holds(self, segments: list[Segment]) -> bool:
        """Whether the partition is open and these are still its segments."""
        ...

    def begin_swap(self, segments: list[Segment]) -> None:
        """From here to `end_swap` they stay, though their files' names go. Raises OSError: nothing began."""
        ...

    def end_swap(self, segments: list[Segment], error: Exception | None) -> list[Segment]:
        """What now has the name of the first of them is to take their place, unless that failed.

        Return those to be closed. Raises what failed; `swap_in` may be tried again then.
        """
        ...


class Compaction:
    """One cleaning of one partition. After `run`, everything below `cleaned_to` is clean."""

    def __init__(
        self,
        owner: Owner,
        disk: Disk,
        directory: str,
        config: LogConfig,
        *,
        sources: list[Segment],
        dirty: DirtyRange,
        aborted: list[AbortedTransaction],
        now_ms: int,
    ) -> None:
        self.cleaned_to = dirty.first_offset
        self._owner = owner
        self._disk = disk
        self._directory = directory
        self._config = config
        self._step_items = config.limits.compaction_step_items
        self._sources = sources
        self._dirty = dirty
        self._aborted = aborted
        self._aborted_by_marker = {entry.last_offset: entry for entry in aborted}
        self._now_ms = now_ms

    def run(self) -> BackgroundTask:
        """Raises KafkaStorageError for a batch that cannot be read, OSError; what was swapped in stays."""
        # About 100 bytes for each key.
        latest = LatestOffsets(self._config.limits.max_compaction_keys)
        end_offset = yield from self._learn_keys(latest)
        transactions = SeenTransactions(self._aborted)
        cleaning = Cleaning(
            latest, transactions, self._owner.last_of, end_offset=end_offset, now_ms=self._now_ms
        )
        sources = [segment for segment in self._sources if segment.base_offset < end_offset]
        for group in _groups(sources, self._config):
            if not self._owner.holds(group) or not (yield from self._clean(group, cleaning, end_offset)):
                return
        self.cleaned_to = end_offset

    def _learn_keys(self, latest: LatestOffsets) -> Generator[BlockingCall | None, None, int]:
        """Note the keys of the dirty range; where it ended, which is earlier if there are too many."""
        transactions = SeenTransactions(self._aborted)
        end_offset, items = self._dirty.first_offset, 0
        for segment in self._sources:
            if segment.end_offset <= self._dirty.first_offset:
                continue
            if not self._owner.holds([segment]):
                return end_offset
            for found in _batches(segment):
                header = found.header
                items += 1
                if (
                    header.last_offset >= self._dirty.first_offset
                    and not header.is_control
                    and not _is_aborted(header, transactions)
                ):
                    items += header.records_count
                    yield from _note_keys(found, latest, self._step_items)
                if latest.is_full:
                    return header.last_offset + 1
                if items >= self._step_items:
                    items = 0
                    yield None
                    if not self._owner.holds([segment]):
                        return end_offset
            end_offset = segment.end_offset
        return end_offset

    def _clean(
        self, group: list[Segment], cleaning: Cleaning, end_offset: int
    ) -> Generator[BlockingCall | None, None, bool]:
        """Write a group's segments anew as one and swap it in; False if they are not wanted any more."""
        disk, base_offset = self._disk, group[0].base_offset
        output = Segment.create(
            disk, self._directory, base_offset, self._now_ms, CLEANED, self._config.limits
        )
        is_whole = False
        try:
            items = 0
            for segment in group:
                for found in _batches(segment):
                    items += 1 + (yield from self._take(output, found, cleaning, end_offset))
                    if items >= self._step_items:
                        items = 0
                        yield None
                        if not self._owner.holds(group):
                            return False
            output.finish()
            try:
                yield partial(self._make_swap, output, group[-1].log_path)
            except OSError:
                # DeleteRecords and retention may have taken a segment's names away meanwhile.
                if self._owner.holds(group):
                    raise
            if self._owner.holds(group):
                self._owner.begin_swap(group)
                is_whole = True
        finally:
            self._owner.has_leftovers = not is_whole
            output.close()
            if not is_whole:
                _discard(disk, self._directory, base_offset)
                self._owner.has_leftovers = False
        if is_whole:
            yield from swap_in(self._owner, disk, self._directory, group)
        return is_whole

    def _take(
        self, output: Segment, found: FoundBatch, cleaning: Cleaning, end_offset: int
    ) -> Generator[BlockingCall | None, None, int]:
        """Write what stays of a batch; how many records it had."""
        header = found.header
        if header.base_offset >= end_offset:
            self._append(output, found.bytes(), header)
            # Without its entry the next round would take aborted data before this marker for committed:
            # test_a_marker_behind_the_end_of_a_round_keeps_its_index_entry.
            if header.is_control and (entry := self._aborted_by_marker.get(header.last_offset)) is not None:
                output.transactions.append(entry)
            return 0
        judged = cleaning.judge(_facts(header))
        rewritten: list[bytearray | memoryview | None] = []
        # A batch of many records takes long. Nothing else touches `cleaning` meanwhile.
        yield from _do(
            lambda: rewritten.append(self._rewritten(found, judged, cleaning)), header, self._step_items
        )
        (kept,) = rewritten
        if kept is not None:
            self._append(output, kept, read_header(kept))
            if judged.noted is not None:
                output.transactions.append(AbortedTransaction(*judged.noted))
        return header.records_count

    def _append(self, output: Segment, batch: bytearray | memoryview, header: BatchHeader) -> None:
        output.append(batch, header.last_offset, header.max_timestamp_ms, self._config)

    def _rewritten(
        self, found: FoundBatch, judged: Judgement, cleaning: Cleaning
    ) -> bytearray | memoryview | None:
        """What stays of a batch, None for nothing."""
        header = found.header
        horizon_ms = _horizon_ms(header)
        if judged.drops_all:
            return rewrite_batch(header, [], horizon_ms) if judged.keeps_header else None
        kept: list[DecodedRecord] = []
        # In parts, so that only what stays is in memory, however many records the batch has.
        for records in iter_records(found.data, found.data_position, name_errors=LOSSLESS):
            kept += (
                record
                for record in records
                if header.is_control
                or cleaning.keeps(record.key, record.offset, record.value is not None, horizon_ms)
            )
        needs_horizon = (
            judged.is_empty_end if header.is_control else any(record.value is None for record in kept)
        )
        if not kept and not judged.keeps_header:
            return None
        needs_horizon = needs_horizon and horizon_ms is None
        if len(kept) == header.records_count and not needs_horizon:
            return found.bytes()
        if needs_horizon:
            horizon_ms = min(self._now_ms + self._config.delete_retention_ms, INT64_MAX)
        return rewrite_batch(header, kept, horizon_ms)

    def _make_swap(self, output: Segment, newest_path: str) -> None:
        """From here on a crash leaves the new segment. Safe in a thread."""
        # Retention and lag go by it where no record has a timestamp: test_compaction_keeps_the_files_time.
        # Source: Kafka's Cleaner, which takes that of the group's last segment.
        self._disk.set_modified_ms(output.log_path, self._disk.modified_ms(newest_path))
        output.sync(is_active=False)
        for suffix in reversed(SUFFIXES):
            if suffix == LOG_SUFFIX:
                # A power loss may keep the log's new name and lose those of its indexes:
                # test_a_power_loss_amid_a_swap_keeps_aborted_records_hidden.
                self._disk.sync_directory(self._directory)
            stem = f"{self._directory}/{file_name(output.base_offset, suffix)}"
            if self._disk.exists(stem + CLEANED):
                self._disk.rename(stem + CLEANED, stem + SWAP)
        self._disk.sync_directory(self._directory)


def swap_in(owner: Owner, disk: Disk, directory: str, group: list[Segment]) -> BackgroundTask:
    """Have what was made whole take the place of a group; once more where that failed on the way."""
    error: Exception | None = None
    try:
        yield partial(_take_place, disk, directory, group)
    except OSError as failed:
        error = failed
    if old := owner.end_swap(group, error):
        # Their names are gone: to close the last descriptor frees the blocks, which takes long.
        yield partial(_close_files, old)


def _take_place(disk: Disk, directory: str, group: list[Segment]) -> None:
    """Safe in a thread: who reads the old segments has their files open."""
    base_offset = group[0].base_offset
    # Else an earlier attempt came so far that the first of these names is that of the new log.
    if disk.exists(f"{directory}/{file_name(base_offset, LOG_SUFFIX)}{SWAP}"):
        for segment in group:
            _remove_files(disk, directory, segment.base_offset, "")
        # Before the new names: a power loss must not leave them and some of the old.
        disk.sync_directory(directory)
    _take_names(disk, directory, base_offset)
    disk.sync_directory(directory)


def finish_swaps(disk: Disk, directory: str) -> None:
    """After a crash: what was whole takes the place of what it replaces, the rest is removed."""
    names = [name for name in disk.list(directory) if name.partition(".")[0].isdecimal()]
    # A log that is not yet whole says so; with one that is, or with none, what has the ending is needed.
    torn = {name.partition(".")[0] for name in names if name.endswith(LOG_SUFFIX + CLEANED)}
    swaps = sorted({name.partition(".")[0] for name in names if name.endswith(SWAP)} - torn)
    for stem in torn:
        _discard(disk, directory, int(stem))
    for stem in swaps:
        base_offset = int(stem)
        if f"{stem}{LOG_SUFFIX}{SWAP}" in names:
            end_offset = _end_of_swap(disk, f"{directory}/{stem}{LOG_SUFFIX}{SWAP}", base_offset)
            # Of a log that is gone the indexes may be left. They must not become those of the new one:
            # test_an_index_of_what_is_replaced_is_not_taken_over.
            bases = {int(name.partition(".")[0]) for name in names if name.endswith(SUFFIXES)}
            for base in bases:
                if base_offset <= base < end_offset:
                    _remove_files(disk, directory, base, "")
            # As when it was swapped in: first the old names go for good.
            disk.sync_directory(directory)
        _take_names(disk, directory, base_offset)
    if swaps:
        disk.sync_directory(directory)


def _end_of_swap(disk: Disk, path: str, base_offset: int) -> int:
    file = disk.open(path)
    end_offset = base_offset + 1
    try:
        # A damage must not leave some of what it replaces beside it.
        for found in scan_headers_past_damage(file, 0, file.size(), base_offset):
            if isinstance(found, HeaderBlock):
                end_offset = read_header(found.headers, len(found.headers) - 61).last_offset + 1
    finally:
        file.close()
    return end_offset


def discard_leftovers(disk: Disk, directory: str) -> None:
    """Remove what an attempt left that could not remove it itself. Safe in a thread. Raises OSError.

    Another attempt may write one segment in place of these and of older ones. A start would put the leftovers
    beside it, and what they hold would be there twice:
    test_what_a_failed_swap_left_does_not_come_back_beside_newer_segments.
    """
    stems = {name.partition(".")[0] for name in disk.list(directory) if name.endswith((CLEANED, SWAP))}
    for stem in stems:
        if stem.isdecimal():
            _discard(disk, directory, int(stem))


def _discard(disk: Disk, directory: str, base_offset: int) -> None:
    """Remove what was to be swapped in; a crash meanwhile leaves nothing that is taken for whole."""
    stem = f"{directory}/{base_offset:020d}"
    has_swap = any(disk.exists(stem + suffix + SWAP) for suffix in SUFFIXES)
    if disk.exists(stem + LOG_SUFFIX + SWAP):
        disk.rename(stem + LOG_SUFFIX + SWAP, stem + LOG_SUFFIX + CLEANED)
        disk.sync_directory(directory)
    _remove_files(disk, directory, base_offset, SWAP)
    if has_swap:
        # Without the log that says so, they would count as indexes of one that has its name already.
        disk.sync_directory(directory)
    _remove_files(disk, directory, base_offset, CLEANED)


def _take_names(disk: Disk, directory: str, base_offset: int) -> None:
    """Remove the ending of the swapped-in files, the log's first, also as a power loss leaves them."""
    for suffix in SUFFIXES:
        name = f"{directory}/{file_name(base_offset, suffix)}"
        if disk.exists(name + SWAP):
            disk.rename(name + SWAP, name)
            if suffix == LOG_SUFFIX:
                disk.sync_directory(directory)


def _remove_files(disk: Disk, directory: str, base_offset: int, ending: str) -> None:
    for suffix in SUFFIXES:
        remove_if_exists(disk, f"{directory}/{file_name(base_offset, suffix)}{ending}")


def _close_files(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()


def _groups(segments: Iterable[Segment], config: LogConfig) -> Iterator[list[Segment]]:
    """Neighbours that fit into one segment together."""
    group: list[Segment] = []
    for segment in segments:
        size_bytes = sum(each.size_bytes for each in group) + segment.size_bytes
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
    """Open a batch: at once, or in a thread if it has many records or may become large.

    Few records prove nothing: 10 KB can become 256 MB.
    """
    is_large = most_output(header.compression, header.size_bytes) > _LARGE_BYTES
    if header.records_count > step_items or (is_large and header.compression):
        yield call
    else:
        call()


def _note_keys(found: FoundBatch, latest: LatestOffsets, step_items: int) -> BackgroundTask:
    """Note where the keys of a batch stand, in bounded steps."""
    parts: list[Iterator[list[DecodedRecord]]] = []
    records: list[DecodedRecord] = []
    left = found.header.records_count

    def decode() -> None:
        if not parts:
            parts.append(iter_records(found.data, found.data_position, name_errors=LOSSLESS))
        records[:] = next(parts[0])

    while left:
        yield from _do(decode, found.header, step_items)
        left -= len(records)
        for start in range(0, len(records), step_items):
            if start:
                yield None
            for record in records[start : start + step_items]:
                if record.key is not None:
                    latest.note(record.key, record.offset)


def _batches(segment: Segment) -> Iterator[FoundBatch]:
    """Raises KafkaStorageError at what is no batch."""
    for found in scan(segment.file, 0, segment.size_bytes, limits=segment.limits):
        if isinstance(found, BadBatch):
            raise KafkaStorageError(f"{segment.log_path} at position {found.position}: {found.reason}")
        yield found


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
