"""Recover a partition's directory after a clean stop, a kill or a power loss.

After a clean stop, all files are valid, and only the ends of the indexes are read. After an unclean stop,
only the records below the recovery point are known to be synced, so everything above it is read and checked.
At the first batch in this range that is torn or has a wrong checksum, the log is cut, and later segments are
deleted. Indexes are rebuilt. Producer state is loaded from the newest readable snapshot at or below the
first offset whose transactions are indexed again, and every later batch is replayed. A newer snapshot
replaces the state as soon as the replay reaches its offset. Source: Kafka's LogLoader, LogSegment.recover and
UnifiedLog.rebuildProducerState; behaviour I17 (docs/behaviours.md).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from oncelog.config import INT64_MAX
from oncelog.errors import BrokerError, CorruptMessage, StorageError
from oncelog.log.background import BackgroundQueue
from oncelog.log.config import LogConfig
from oncelog.log.contents import PartitionContents
from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.producers import PartitionProducers
from oncelog.log.scan import BASE_AND_LENGTH, BadBatch, HeaderBlock, NumberedBatch, replayed_headers, scan
from oncelog.log.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SUFFIXES,
    TIME_SUFFIX,
    TXN_SUFFIX,
    Segment,
    base_offsets,
    is_stem,
)
from oncelog.log.segment_swap import finish_swaps
from oncelog.log.segments import SegmentList
from oncelog.log.snapshot import Snapshots
from oncelog.wire.header import HEADER_BYTES, LOG_OVERHEAD_BYTES, verify_crc

_LEFTOVERS = (".deleted", ".cleaned", ".tmp")
# The name that PartitionDisk.drop gives to a log file. Apache Kafka's deleted files end in ".log.deleted",
# even those of compacted segments, so this pattern does not match them.
_DROPPED_LOG = re.compile(r"([0-9]{20})\.log\.[0-9a-f]{16}\.deleted")
_DROPPED_TRANSACTIONS = re.compile(r"([0-9]{20})\.txnindex\.[0-9a-f]{16}\.deleted")


@dataclass(slots=True)
class Recovered:
    """The state of a partition after recovery.

    - `warnings`: texts about all repairs and losses; usually empty after a clean stop.
    - `leader_epochs`: (epoch, first offset) of the batches that recovery read; for `LeaderEpochs.settle`.
    - `rebuilt_from`: indexes were rebuilt from this offset on and are not synced; None if none were rebuilt.
    - `indexed_from`: every segment with this base offset or a higher one has a transaction index file.
    - `has_gap`: offsets above the recovery point are missing, because a power loss took them or a compaction
      removed them.
    """

    segments: SegmentList
    producers: PartitionProducers
    log_start_offset: int
    warnings: list[str] = field(default_factory=list)
    leader_epochs: list[tuple[int, int]] = field(default_factory=list)
    rebuilt_from: int | None = None
    indexed_from: int = 0
    has_gap: bool = False


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The settings and the checkpoints for opening a directory.

    - `is_clean`: True if the last process closed the partition. All its records are then synced.
    - `recovery_point`: all records below this offset are synced.
    - `cleaned_to`: compaction has cleaned the log up to this offset, so a gap below it is not a loss.
    - `indexed_from`: the last stored value of `Recovered.indexed_from`; None if unknown.
    - `contents`: the contents that a clean stop left in the directory; None if unknown.
    - `checks_all`: if True, no file is trusted. True if the stored contents of the last stop were lost, or if
      the directory differs from them.
    - `was_interrupted`: the last start did not end, and may not have synced what it removed.
    """

    config: LogConfig
    is_clean: bool
    recovery_point: int
    log_start_offset: int
    cleaned_to: int
    now_ms: int
    background: BackgroundQueue
    indexed_from: int | None = None
    contents: PartitionContents | None = None
    checks_all: bool = False
    was_interrupted: bool = False


def recover(disk: Disk, directory: str, options: OpenOptions) -> Recovered:
    """Repair the directory, load its segments and rebuild the producer state.

    Raises OSError, and StorageError if the directory cannot be used.
    """
    warnings: list[str] = []
    if options.was_interrupted:
        # A power loss could bring segments and snapshots back that the interrupted start has removed. See
        # test_a_power_loss_brings_no_file_back_that_an_interrupted_start_removed.
        disk.sync_directory(directory)
    bases = _drop_failed_rolls(disk, directory, _sweep(disk, directory), options, warnings)
    segments, replay_from = _open_segments(disk, directory, bases, options, warnings)
    if text := _difference(segments, options):
        return _recover_all(disk, directory, options, segments, [*warnings, text])
    if segments:
        segments[-1].forget_lost_markers()
    if not segments:
        # Continue after the synced offsets, which must never be assigned again. See
        # test_a_lost_directory_gives_no_offset_again.
        base_offset = max(options.log_start_offset, options.recovery_point)
        if base_offset > options.log_start_offset:
            text = f"{disk.describe(directory)} contains no segment, but offsets up to {base_offset} were"
            warnings.append(f"{text} synced; the log continues at {base_offset} (docs/operations.md)")
        segments = [
            Segment.create(disk, directory, base_offset, options.now_ms, limits=options.config.limits)
        ]
    log_start_offset = max(options.log_start_offset, segments[0].base_offset)
    recovered = Recovered(
        SegmentList(segments),
        PartitionProducers(Snapshots(disk, directory, options.config.limits), options.background),
        log_start_offset,
        warnings,
    )
    recovered.rebuilt_from = replay_from
    _recover_producers(recovered, options, replay_from)
    if text := _difference(segments, options, is_replayed=True):
        return _recover_all(disk, directory, options, segments, [*warnings, text])
    end_offset = segments[-1].end_offset
    if options.checks_all and (options.is_clean or end_offset <= options.recovery_point):
        # Replace the stored snapshots, because they may include a marker of a lost segment. After a kill, the
        # next start would trust them, and show the records of an aborted transaction. See
        # test_a_kill_after_a_lost_marker_shows_no_aborted_records. If this fails on a full disk, the next
        # clean stop writes a snapshot. An end above the recovery point may be lost in a power loss, and the
        # new snapshot with it, so the old snapshots are then kept. See
        # test_stale_contents_remove_no_snapshot_below_an_unsynced_end.
        with suppress(OSError):
            recovered.producers.replace_snapshots(end_offset)
    if log_start_offset > end_offset:
        _begin_at_log_start(disk, directory, recovered, options)
    for segment in segments:
        if segment.transactions.is_unsynced:
            # The index is stored before recovery ends, because the checkpoint may already declare the segment
            # synced. The next restart would then trust an incomplete index file. See
            # test_a_crash_while_an_index_of_aborted_transactions_is_made_again_loses_no_entry.
            segment.transactions.store()
        segment.file.release_handle()
    recovered.indexed_from = _make_transaction_indexes(list(recovered.segments), options)
    return recovered


def _difference(segments: list[Segment], options: OpenOptions, *, is_replayed: bool = False) -> str:
    """Return how the segments differ from what the last stop left; an empty string if they do not, or if all
    records are checked anyway.
    """
    if options.contents is None or options.checks_all or not segments:
        return ""
    return options.contents.difference(segments, is_replayed=is_replayed)


def _recover_all(
    disk: Disk, directory: str, options: OpenOptions, segments: list[Segment], warnings: list[str]
) -> Recovered:
    """Recover the directory again, and trust no file.

    `segments` are those of the first attempt. The last of `warnings` is the difference that it found.
    """
    for segment in segments:
        segment.close()
    recovered = recover(disk, directory, replace(options, checks_all=True))
    text = f"{disk.describe(directory)} has {warnings.pop()} (docs/operations.md); all records are checked"
    recovered.warnings[:0] = [*warnings, text]
    return recovered


def _begin_at_log_start(disk: Disk, directory: str, recovered: Recovered, options: OpenOptions) -> None:
    """Add an empty segment at the log start, and write a snapshot of the producers there. Raises OSError.

    Call this if a power loss has left a log end below the log start. All remaining records were deleted by a
    client or by retention, so their segments are deleted as usual, by the first flush or retention run. But
    their producer state is still needed. An older snapshot could contain open transactions that have ended
    since. See test_a_log_start_beyond_the_log_keeps_what_its_segments_say_of_producers.
    """
    offset = recovered.log_start_offset
    new = Segment.create(disk, directory, offset, options.now_ms, limits=options.config.limits)
    # If this fails, the partition cannot be opened, and the next start does the same. Without the snapshot,
    # the producers of the old segments would be unknown once these are deleted. See
    # test_a_full_disk_forgets_no_producer_of_removed_segments.
    recovered.producers.snapshot_now(offset)
    recovered.segments.add(new)


def _make_transaction_indexes(segments: list[Segment], options: OpenOptions) -> int:
    """Create missing transaction index files, and return the base offset from which every segment has one."""
    first_offset = segments[0].base_offset
    for segment in reversed(segments):
        if segment.has_transaction_index:
            continue
        if segment.size_bytes and (
            options.indexed_from is None or segment.base_offset < options.indexed_from
        ):
            # Apache Kafka, or Oncelog up to 0.5.0, wrote this segment without an index file. So only the
            # segments after it are known to have one.
            first_offset = segment.base_offset + 1
            break
        with suppress(OSError):  # on a full disk, the next restart rebuilds the index from the log
            segment.transactions.sync()
    return first_offset if options.indexed_from is None else min(first_offset, options.indexed_from)


def _has_lost_aborted(segment: Segment, options: OpenOptions) -> bool:
    """Return True if the segment's transaction index file is missing although it was synced.

    An empty index in its place would show aborted records to read_committed readers. See
    test_a_lost_index_of_aborted_transactions_is_made_again.
    """
    if options.indexed_from is None or segment.base_offset < options.indexed_from or not segment.size_bytes:
        return False
    is_synced = options.is_clean or segment.base_offset < options.recovery_point
    return is_synced and not segment.has_transaction_index


def _sweep(disk: Disk, directory: str) -> list[int]:
    """Finish interrupted swaps and deletions, remove leftover files, and return the segments' base offsets,
    ascending.
    """
    finish_swaps(disk, directory)
    _finish_drops(disk, directory)
    _restore_transaction_indexes(disk, directory)
    names = disk.list(directory)
    bases = base_offsets(names)
    stems = {f"{base:020d}" for base in bases}
    for name in names:
        stem, _, suffix = name.partition(".")
        is_index = f".{suffix}" in (INDEX_SUFFIX, TIME_SUFFIX, TXN_SUFFIX) and is_stem(stem)
        if (is_index and stem not in stems) or name.endswith(_LEFTOVERS):
            remove_if_exists(disk, f"{directory}/{name}")
    return bases


def _finish_drops(disk: Disk, directory: str) -> None:
    """Delete every segment that is older than a dropped segment.

    Segments are dropped oldest first, by renaming their files. A power loss may undo any of these renames.
    The remaining segments would then have a gap, and recovery would cut the log there. If a dropped segment
    is newer than all others, it gets its name back. See
    test_a_power_loss_during_the_deletion_of_segments_leaves_no_gap.
    """
    names = disk.list(directory)
    dropped = {int(match[1]): name for name in names if (match := _DROPPED_LOG.fullmatch(name))}
    if not dropped:
        return
    newest = max(dropped)
    bases = base_offsets(names)
    if max(bases, default=-1) < newest:
        # The power loss has removed all segments that were created after the newest dropped one. The log now
        # ends there, so that segment gets its name back.
        disk.rename(f"{directory}/{dropped[newest]}", f"{directory}/{newest:020d}{LOG_SUFFIX}")
    for base in bases:
        if base < newest:
            for suffix in SUFFIXES:
                remove_if_exists(disk, f"{directory}/{base:020d}{suffix}")
    # The renamed files prove that older segments were dropped. So the deletions are synced before `_sweep`
    # deletes the renamed files.
    disk.sync_directory(directory)


def _restore_transaction_indexes(disk: Disk, directory: str) -> None:
    """Give the transaction index of a segment its name back if the segment was dropped and its log is back.

    A power loss may undo the rename of the log file and keep that of the transaction index. Without the
    index, aborted records would be shown, because recovery does not rebuild every index: Apache Kafka creates
    none without entries. See test_a_power_loss_while_a_segment_is_dropped_shows_no_aborted_records.
    """
    names = disk.list(directory)
    stems = {f"{base:020d}" for base in base_offsets(names)}
    restored = False
    for name in names:
        match = _DROPPED_TRANSACTIONS.fullmatch(name)
        if match is not None and match[1] in stems and f"{match[1]}{TXN_SUFFIX}" not in names:
            disk.rename(f"{directory}/{name}", f"{directory}/{match[1]}{TXN_SUFFIX}")
            restored = True
    if restored:
        disk.sync_directory(directory)


def _drop_failed_rolls(
    disk: Disk, directory: str, bases: list[int], options: OpenOptions, warnings: list[str]
) -> list[int]:
    """Remove empty segments whose base offset is in the previous segment; return the other base offsets.

    If creating a segment failed, Oncelog up to 0.5.0 left an empty log file, and appended further records to
    the previous segment. The empty segment would hide those records. Recovery from a crash would also delete
    all later segments. See test_a_file_that_a_failed_roll_left_hides_no_records. To recognise such a file,
    only the batches after one index entry of the previous segment are read.
    """
    kept: list[int] = []
    for base in bases if len(bases) > 1 else ():
        segment = Segment.open(disk, directory, base, options.now_ms, options.config.limits)
        try:
            if not segment.size_bytes and kept:
                before = Segment.open(disk, directory, kept[-1], options.now_ms, options.config.limits)
                try:
                    if before.contains_from(base):
                        text = (
                            "is empty, and the previous segment contains its offset: a failed "
                            "roll left the file"
                        )
                        warnings.append(f"{disk.describe(segment.log_path)} {text}; removed")
                        segment.remove()
                        continue
                finally:
                    before.file.close()
        finally:
            segment.file.close()
        kept.append(base)
    if len(bases) > 1 and len(kept) < len(bases):
        disk.sync_directory(directory)
    return kept if len(bases) > 1 else bases


def _open_segments(
    disk: Disk, directory: str, bases: list[int], options: OpenOptions, warnings: list[str]
) -> tuple[list[Segment], int | None]:
    """Repair and return the segments. Also return the offset from which indexes were rebuilt, or None."""
    segments: list[Segment] = []
    replay_from: int | None = None
    interval = options.config.index_interval_bytes
    for number, base in enumerate(bases):
        segment = Segment.open(disk, directory, base, options.now_ms, options.config.limits)
        segments.append(segment)
        next_base = bases[number + 1] if number + 1 < len(bases) else None
        synced_end = _synced_end(segment, next_base, options)
        # If the recovery point is exactly the end of the segment, the flush happened before the roll, and the
        # index entries that the roll wrote may be unsynced.
        is_index_sure = next_base is not None and (options.is_clean or next_base < options.recovery_point)
        trusted = 0
        if not options.checks_all and not _has_lost_aborted(segment, options):
            if not (options.is_clean or is_index_sure):
                trusted = options.recovery_point
            elif _is_loaded(segment, next_base, synced_end, interval, warnings):
                continue
        elif not options.checks_all:
            warnings.append(f"{disk.describe(segment.transaction_index_path)} is missing; indexes rebuilt")
        is_whole = synced_end is not None
        sure = options.recovery_point if synced_end is None else synced_end
        size_before = segment.size_bytes
        bad = segment.rebuild(trusted, interval, sure, is_whole=is_whole, is_active=next_base is None)
        warnings.extend(map(segment.damage_text, segment.damaged))
        if replay_from is None:
            # Only the first rebuilt segment matters, because it has the lowest offset.
            replay_from = segment.transactions_from
        if bad is not None:
            later_bases = None if is_whole else bases[number + 1 :]
            lost = _lost_text(segment.end_offset, size_before - bad.position, later_bases)
            path = disk.describe(segment.log_path)
            warnings.append(f"{path} cut at position {bad.position}: {bad.reason}; {lost}")
        is_unsynced = next_base is not None and not options.is_clean and next_base > _sure_to(options)
        has_gap = is_unsynced and segment.end_offset != next_base
        is_lost = has_gap and not _may_be_compacted(segment, options)
        if is_lost:
            # A power loss has removed the end of this segment and kept the next segment.
            lost = f"offsets {segment.end_offset} to {next_base} (exclusive) are lost"
            warnings.append(f"{lost}, and all later offsets are removed")
        # A synced segment that reaches the next one is whole, so bytes after its last batch say nothing about
        # later segments. See test_bytes_after_a_synced_segment_remove_no_later_one.
        if (bad is not None and not is_whole) or is_lost:
            _remove_later(disk, directory, bases[number + 1 :], options.now_ms)
            # Without this sync, a power loss could restore a removed segment after new records were appended.
            # See test_segments_that_recovery_removed_stay_removed_after_a_power_loss.
            disk.sync_directory(directory)
            break
        if next_base is not None:
            has_lost = segment.end_offset < next_base and not segment.damaged
            if options.checks_all and has_lost and not _may_be_compacted(segment, options):
                warnings.append(f"there are no offsets from {segment.end_offset} to {next_base} (exclusive)")
            segment.note_last_time()
    if _drop_empty_tail(segments, options, warnings):
        disk.sync_directory(directory)
    return segments, replay_from


def _synced_end(segment: Segment, next_base: int | None, options: OpenOptions) -> int | None:
    """Return the offset at which a segment ends if all of it was synced; None if that is unknown."""
    if next_base is not None:
        return next_base if options.is_clean or next_base <= _sure_to(options) else None
    if options.contents is None or not options.is_clean:
        return None
    return options.contents.end_of(segment.base_offset, segment.size_bytes)


def _is_loaded(
    segment: Segment, next_base: int | None, synced_end: int | None, interval: int, warnings: list[str]
) -> bool:
    """Load the index files of a synced segment. Return False if one is missing or unreadable."""
    try:
        if next_base is None:
            segment.load_indexes(interval, synced_end)
        else:
            segment.load_closed(next_base, interval)
    except StorageError as error:
        warnings.append(f"{error}; indexes rebuilt")
        return False
    return True


def _drop_empty_tail(segments: list[Segment], options: OpenOptions, warnings: list[str]) -> bool:
    """After an unclean stop, remove empty segments at the end of the log that follow a gap. Return True if
    there were any.

    Compaction always keeps the last batch of the range that it cleans. So a gap before an empty segment is a
    loss, and the log ends before the gap. See test_a_compacted_log_ends_where_its_last_batch_does.
    """
    had_any = False
    while len(segments) > 1 and not options.is_clean:
        last, end_offset = segments[-1], segments[-2].end_offset
        if last.size_bytes or last.base_offset <= max(
            end_offset, options.recovery_point, options.log_start_offset
        ):
            break
        warnings.append(f"offsets {end_offset} to {last.base_offset} (exclusive) are lost")
        segments.pop().remove()
        had_any = True
    return had_any


def _sure_to(options: OpenOptions) -> int:
    """Return the offset below which a power loss cannot have changed what a start must restore.

    Records below the log start were deleted. So their loss is no gap, and the snapshots at or below the log
    start are valid, although a power loss may have left a log end below it. See
    test_a_second_power_loss_brings_no_segment_below_the_log_start_back.
    """
    return max(options.recovery_point, options.log_start_offset)


def _may_be_compacted(segment: Segment, options: OpenOptions) -> bool:
    """Return True if compaction may have caused the gap after a segment.

    Apache Kafka also compacts above the checkpointed recovery point, and the checkpoint may be lost. If
    recovery treated such a gap as lost records, it would delete all later segments. See
    test_a_compacted_log_is_kept_whatever_the_recovery_point_is.
    """
    return options.config.is_compacted or segment.base_offset < options.cleaned_to or segment.has_gaps


def _lost_text(end_offset: int, cut_bytes: int, later_bases: list[int] | None) -> str:
    """Return the warning about a cut. The warning says whether acknowledged records are lost, or may be lost.

    `later_bases` has the base offsets of the later segments, which are removed. None means that the segment
    is complete, and that the bytes after its last batch are not records.
    """
    if later_bases is None:
        return f"{cut_bytes} bytes after the last batch are removed"
    text = f"{cut_bytes} bytes from offset {end_offset} on are removed"
    if not later_bases:
        return f"{text}: an interrupted write, or acknowledged records that were not synced"
    count = later_bases[-1] - end_offset
    return f"{text} and {len(later_bases)} later segments: at least {count} offsets of acknowledged records"


def _remove_later(disk: Disk, directory: str, bases: list[int], now_ms: int) -> None:
    for base in bases:
        Segment.open(disk, directory, base, now_ms).remove()


def _recover_producers(recovered: Recovered, options: OpenOptions, replay_from: int | None) -> None:
    producers, segments = recovered.producers, recovered.segments
    end_offset = max(segments.active.end_offset, options.log_start_offset)
    gap_offset = _offset_of_gap(segments, options)
    recovered.has_gap = gap_offset is not None
    kept_to = end_offset if gap_offset is None else max(gap_offset, options.log_start_offset)
    producers.snapshots.keep(lambda offset: offset <= kept_to)
    highest = end_offset if replay_from is None else min(replay_from, end_offset)
    # Begin at the first segment, not at the log start: deleted records that are still in its file also belong
    # to the producers' state.
    start = segments.first.base_offset
    later = producers.snapshots.load_newest(end_offset, options.now_ms) if highest < end_offset else None
    snapshot = producers.snapshots.load_newest(highest, options.now_ms)
    if snapshot is not None and snapshot.is_damaged:
        # An older snapshot and the replay have the batches that this one lacks.
        later = snapshot if later is None else later
        snapshot = producers.snapshots.load_newest(snapshot.offset, options.now_ms, accepts_damaged=False)
    recovered.warnings += producers.snapshots.warnings
    if snapshot is not None and snapshot.offset < start:
        snapshot = None  # older segments were deleted; a later snapshot contains their producers
    if later is not None and later.offset <= (start - 1 if snapshot is None else snapshot.offset):
        later = None
    expired_before_ms = options.now_ms - options.config.producer_expiration_ms
    if snapshot is not None:
        producers.load(snapshot, expired_before_ms)
        start = snapshot.offset
    if later is not None and not options.checks_all:
        # Compaction may have removed batches that the later snapshot includes. See
        # test_a_replay_from_an_older_snapshot_knows_what_compaction_removed.
        _replay(recovered, start, options.now_ms, end=later.offset)
        producers.adopt(later, expired_before_ms)
        start, later = later.offset, None
    _replay(recovered, start, options.now_ms, knows_all=later is None)
    if later is not None:
        producers.load(later, expired_before_ms)


def _offset_of_gap(segments: SegmentList, options: OpenOptions) -> int | None:
    """Return the offset of the first gap that may be a loss, or None if there is none.

    Snapshots after such a gap are not used, because they may cover lost batches and markers. If a COMMIT
    marker is lost, its transaction may have been aborted since, but such a snapshot still says that it was
    committed. See test_a_snapshot_behind_a_gap_does_not_restore_a_lost_marker. If `_may_be_compacted`
    is true, the segments after the gap are kept.
    """
    if options.is_clean:
        return None
    for segment, following in pairwise(segments):
        is_unsynced = following.base_offset > _sure_to(options) and segment.base_offset >= options.cleaned_to
        if is_unsynced and segment.end_offset != following.base_offset:
            return segment.end_offset
    return None


def _replay(
    recovered: Recovered, start: int, now_ms: int, *, end: int = INT64_MAX, knows_all: bool = False
) -> None:
    """Replay the batches from offset `start` to below `end`.

    `knows_all`: the producer table is complete, because no later snapshot is loaded afterwards. If so,
    missing snapshots at the base offsets of segments are written again.
    """
    existing = set(recovered.producers.snapshots.offsets())
    for segment in recovered.segments.from_offset(start):
        if segment.base_offset >= end:
            break
        if knows_all and segment.base_offset > start and segment.base_offset not in existing:
            _rewrite_snapshot(recovered.producers, segment.base_offset)
        reported = set(segment.damaged)
        position = segment.index.position_for(max(start - segment.base_offset, 0))
        if position and not segment.is_batch_at(position):
            position = 0  # read the whole segment: the index or the batch is damaged
        for block in segment.header_blocks(position):
            _replay_block(recovered, segment, block, start, end, now_ms)
        for damaged in sorted(set(segment.damaged) - reported):
            recovered.warnings.append(segment.damage_text(damaged))
        segment.file.release_handle()


def _replay_block(
    recovered: Recovered, segment: Segment, block: HeaderBlock, start: int, end: int, now_ms: int
) -> None:
    replayed = replayed_headers(block, start, end)
    for epoch, offset in sorted(replayed.leader_epochs.items()):
        _note_epoch(recovered.leader_epochs, epoch, offset)
    if replayed.has_transactions:
        _replay_batches(recovered, segment, block, start, end, now_ms)
    else:
        recovered.producers.replay_plain(
            block.headers, replayed.batches, now_ms, partial(_is_whole, segment, block.headers)
        )


def _is_whole(segment: Segment, headers: bytes, batch: NumberedBatch) -> bool:
    """Return True if the checksum of a batch is valid. Otherwise add the batch to `segment.damaged`.

    If a damaged header were used, the broker could reject a producer's next batch or treat it as a duplicate.
    See test_a_damaged_header_gives_no_state_of_producers. Batches that `rebuild` has verified are not read
    again.
    """
    number, position = batch
    base_offset, length = BASE_AND_LENGTH.unpack_from(headers, number * HEADER_BYTES)
    if segment.transactions_from is not None and base_offset >= segment.transactions_from:
        return True
    size = length + LOG_OVERHEAD_BYTES
    if verify_crc(segment.file.pread(size, position), 0, size):
        return True
    segment.damaged.setdefault(position, position + size)
    return False


def _replay_batches(
    recovered: Recovered, segment: Segment, block: HeaderBlock, start: int, end: int, now_ms: int
) -> None:
    """Replay a block batch by batch, because transactions depend on the order and on markers' content.

    A batch with a wrong checksum neither begins nor ends a transaction, and recovery continues after it.
    Readers of a damaged batch get an error.
    """
    noted_from = segment.transactions_from
    for batch in scan(segment.file, block.position, block.end, limits=segment.limits):
        if isinstance(batch, BadBatch):
            break  # the length of this batch is damaged; only a block's last batch can be like this
        header = batch.header
        if not start <= header.last_offset < end:
            continue
        try:
            if header.producer_id is not None and not verify_crc(batch.bytes(), 0, header.size_bytes):
                raise CorruptMessage("the checksum is wrong")
            aborted = recovered.producers.replay(header, batch.bytes(), now_ms)
        except BrokerError:
            segment.damaged.setdefault(batch.position, batch.position + header.size_bytes)
            continue
        if aborted is not None and noted_from is not None and aborted.last_offset >= noted_from:
            segment.transactions.append(aborted)


def _rewrite_snapshot(producers: PartitionProducers, base_offset: int) -> None:
    """Write a missing snapshot at the base offset of a segment.

    Without the snapshot, earlier segments could not be deleted.
    """
    try:
        producers.snapshot_now(base_offset)
    except OSError:
        pass  # a full disk must not prevent the start; deleting segments takes another snapshot


def _note_epoch(epochs: list[tuple[int, int]], epoch: int, offset: int) -> None:
    if not epochs or epoch > epochs[-1][0]:
        epochs.append((epoch, offset))
