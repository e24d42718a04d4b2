"""Open a partition's directory after a clean stop, a kill or a power loss.

After a clean stop, the files are valid and only the ends of the indexes are read. Otherwise everything from
the recovery point on is read; below it, everything is synced. The log is cut at the first batch that is torn
or has a wrong checksum, and later segments are deleted. Indexes are rebuilt. Producer state is the newest
readable snapshot at or below the recovery point plus every batch after it. Source: Kafka's LogLoader,
LogSegment.recover and UnifiedLog.rebuildProducerState; behaviour I17 (docs/behaviours.md).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from oncelog.errors import BrokerError, CorruptMessage, StorageError
from oncelog.log.background import BackgroundQueue
from oncelog.log.config import LogConfig
from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.producers import PartitionProducers
from oncelog.log.scan import HEADERS, BadBatch, HeaderBlock, scan
from oncelog.log.segment import INDEX_SUFFIX, LOG_SUFFIX, SUFFIXES, TIME_SUFFIX, TXN_SUFFIX, Segment
from oncelog.log.segment_swap import finish_swaps
from oncelog.log.segments import SegmentList
from oncelog.log.snapshot import Snapshots
from oncelog.wire.header import CONTROL_BIT, LOG_OVERHEAD_BYTES, TRANSACTIONAL_BIT, verify_crc

_LEFTOVERS = (".deleted", ".cleaned", ".tmp")
# As PartitionDisk.drop names it. Apache Kafka's names end in ".log.deleted", even after a compaction.
_DROPPED_LOG = re.compile(r"(\d{20})\.log\.[0-9a-f]{16}\.deleted")


@dataclass(slots=True)
class Recovered:
    """The content of a directory after recovery.

    `warnings` says what was repaired; empty after a clean stop. `leader_epochs` has the (epoch, first offset)
    of the batches that were read, for a lost epoch file. `rebuilt_from` is the offset above which indexes
    were rebuilt and are not synced, None if none were. `indexed_from`: every segment that begins there or
    later has an index file of aborted transactions.
    """

    segments: SegmentList
    producers: PartitionProducers
    log_start_offset: int
    warnings: list[str] = field(default_factory=list)
    leader_epochs: list[tuple[int, int]] = field(default_factory=list)
    rebuilt_from: int | None = None
    indexed_from: int = 0


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The caller's knowledge about the directory to open.

    `recovery_point` matters only without a clean shutdown. `cleaned_to`: compaction is known to have cleaned
    up to there, so gaps below are no loss. `indexed_from`: as in `Recovered` when it was last stored, None if
    unknown.
    """

    config: LogConfig
    is_clean: bool
    recovery_point: int
    log_start_offset: int
    cleaned_to: int
    now_ms: int
    background: BackgroundQueue
    indexed_from: int | None = None


def recover(disk: Disk, directory: str, options: OpenOptions) -> Recovered:
    """Bring a directory in order and load it. Raises StorageError if it cannot be used, OSError."""
    warnings: list[str] = []
    bases = _drop_failed_rolls(disk, directory, _sweep(disk, directory), options, warnings)
    segments, replay_from = _open_segments(disk, directory, bases, options, warnings)
    if segments:
        segments[-1].forget_lost_markers()
    if not segments:
        # Synced offsets are never assigned again. See test_a_lost_directory_gives_no_offset_again.
        base_offset = max(options.log_start_offset, options.recovery_point)
        if base_offset > options.log_start_offset:
            text = f"{disk.describe(directory)} holds no segment, though offsets up to {base_offset} were"
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
    if log_start_offset > segments[-1].end_offset:
        segments = _begin_at_log_start(disk, directory, recovered, options)
    for segment in segments:
        if segment.transactions.is_unsynced:
            # Before the start is over. The checkpoint may already vouch for the segment, and the next start
            # then trusts its file. See
            # test_a_crash_while_an_index_of_aborted_transactions_is_made_again_loses_no_entry.
            segment.transactions.store()
        segment.file.release_handle()
    recovered.indexed_from = _make_transaction_indexes(segments, options)
    return recovered


def _begin_at_log_start(
    disk: Disk, directory: str, recovered: Recovered, options: OpenOptions
) -> list[Segment]:
    """Replace all segments by an empty one at the log start, which is above the log end after a power loss.

    All records were deleted on purpose. What the segments say of producers is kept, because in an older
    snapshot transactions may be open that have ended since. See
    test_a_log_start_beyond_the_log_keeps_what_its_segments_say_of_producers.
    """
    offset = recovered.log_start_offset
    with suppress(OSError):  # on a full disk a later flush or stop writes one
        recovered.producers.snapshot_now(offset)
    # Oldest first: the segments that a crash leaves have the newest state.
    for segment in recovered.segments:
        segment.remove()
    new = Segment.create(disk, directory, offset, options.now_ms, limits=options.config.limits)
    recovered.segments, recovered.rebuilt_from = SegmentList([new]), None
    return [new]


def _make_transaction_indexes(segments: list[Segment], options: OpenOptions) -> int:
    """Create empty index files where they may be missing; return the offset from which on all have one."""
    first_offset = segments[0].base_offset
    for segment in reversed(segments):
        if segment.has_transaction_index:
            continue
        if segment.size_bytes and (
            options.indexed_from is None or segment.base_offset < options.indexed_from
        ):
            first_offset = segment.base_offset + 1  # written by Apache Kafka, or by Oncelog up to 0.5.0
            break
        with suppress(OSError):  # a full disk: the next start takes the file for lost
            segment.transactions.sync()
    return first_offset if options.indexed_from is None else min(first_offset, options.indexed_from)


def _has_lost_aborted(segment: Segment, options: OpenOptions) -> bool:
    """Return True if the transaction index is missing and no power loss can be the reason.

    To take it for empty would show aborted records to read_committed readers. See
    test_a_lost_index_of_aborted_transactions_is_made_again.
    """
    if options.indexed_from is None or segment.base_offset < options.indexed_from or not segment.size_bytes:
        return False
    is_synced = options.is_clean or segment.base_offset < options.recovery_point
    return is_synced and not segment.has_transaction_index


def _sweep(disk: Disk, directory: str) -> list[int]:
    """Remove what a crash left, and return the base offsets of the segments."""
    finish_swaps(disk, directory)
    _finish_drops(disk, directory)
    names = disk.list(directory)
    stems = {name.removesuffix(LOG_SUFFIX) for name in names if name.endswith(LOG_SUFFIX)}
    for name in names:
        stem, _, suffix = name.partition(".")
        is_orphan = f".{suffix}" in (INDEX_SUFFIX, TIME_SUFFIX, TXN_SUFFIX) and stem not in stems
        if is_orphan or name.endswith(_LEFTOVERS):
            remove_if_exists(disk, f"{directory}/{name}")
    return sorted(int(stem) for stem in stems if stem.isdigit())


def _finish_drops(disk: Disk, directory: str) -> None:
    """Remove the segments that are older than a dropped one; restore that one if it is the newest of all.

    Segments are dropped from the oldest on, and a power loss may lose any of these renames. The remaining
    ones would have a hole, after which the log would be cut. See
    test_a_power_loss_amid_deleting_segments_leaves_no_hole.
    """
    names = disk.list(directory)
    dropped = {int(match[1]): name for name in names if (match := _DROPPED_LOG.fullmatch(name))}
    if not dropped:
        return
    newest = max(dropped)
    stems = [name.removesuffix(LOG_SUFFIX) for name in names if name.endswith(LOG_SUFFIX)]
    bases = [int(stem) for stem in stems if stem.isdecimal()]
    if max(bases, default=-1) < newest:
        # The segment that was created after it is lost, and with it the end of the log.
        disk.rename(f"{directory}/{dropped[newest]}", f"{directory}/{newest:020d}{LOG_SUFFIX}")
    for base in bases:
        if base < newest:
            for suffix in SUFFIXES:
                remove_if_exists(disk, f"{directory}/{base:020d}{suffix}")
    # Before the names that prove the drop are removed.
    disk.sync_directory(directory)


def _drop_failed_rolls(
    disk: Disk, directory: str, bases: list[int], options: OpenOptions, warnings: list[str]
) -> list[int]:
    """Remove empty segments whose offsets the previous segment contains; return the bases of the others.

    Oncelog up to 0.5.0 left such a log file where a roll failed. It would hide the records that the previous
    segment got afterwards, and an unclean start would remove what follows. See
    test_what_a_failed_roll_left_hides_no_records. Only the segment before an empty one is read, and of it the
    part between two index entries.
    """
    kept: list[int] = []
    for base in bases if len(bases) > 1 else ():
        segment = Segment.open(disk, directory, base, options.now_ms, options.config.limits)
        try:
            if not segment.size_bytes and kept:
                before = Segment.open(disk, directory, kept[-1], options.now_ms, options.config.limits)
                try:
                    if before.contains_from(base):
                        text = "is empty, and the previous segment contains its offset: a failed roll left it"
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
    """Return the segments and the offset to replay producers from (None: any snapshot will do)."""
    segments: list[Segment] = []
    replay_from: int | None = None
    interval = options.config.index_interval_bytes
    for number, base in enumerate(bases):
        segment = Segment.open(disk, directory, base, options.now_ms, options.config.limits)
        segments.append(segment)
        next_base = bases[number + 1] if number + 1 < len(bases) else None
        is_all_sure = next_base is not None and (options.is_clean or next_base <= options.recovery_point)
        # Not if the recovery point is the segment's end: that flush came before the roll, which wrote the
        # rest of the indexes.
        is_index_sure = next_base is not None and (options.is_clean or next_base < options.recovery_point)
        trusted = options.recovery_point
        if _has_lost_aborted(segment, options):
            warnings.append(f"{disk.describe(segment.transaction_index_path)} is missing; indexes made again")
            trusted = 0
        elif options.is_clean or is_index_sure:
            try:
                if next_base is None:
                    segment.load_indexes(interval)
                else:
                    segment.load_closed(next_base, interval)
                continue
            except StorageError as error:
                warnings.append(f"{error}; indexes made again")
            trusted = 0
        sure = next_base if next_base is not None and is_all_sure else options.recovery_point
        size_before = segment.size_bytes
        bad = segment.rebuild(trusted, interval, sure, is_whole=is_all_sure)
        warnings.extend(map(segment.damage_text, segment.damaged))
        if replay_from is None:
            # Later segments have lost no more than this one.
            replay_from = segment.transactions_from
        if bad is not None:
            warnings.append(
                f"{disk.describe(segment.log_path)} cut at position {bad.position}: {bad.reason}; "
                + _lost_text(segment.end_offset, size_before - bad.position, bases[number + 1 :])
            )
        is_unsynced = next_base is not None and not options.is_clean and next_base > options.recovery_point
        has_gap = is_unsynced and segment.end_offset != next_base
        is_lost = has_gap and not _may_be_compacted(segment, options)
        if is_lost:
            # A power loss can take the end of a segment and keep the next one.
            warnings.append(
                f"offsets {segment.end_offset} to {next_base} are lost, and with them what follows"
            )
        if bad is not None or is_lost:
            _remove_later(disk, directory, bases[number + 1 :], options.now_ms)
            # A power loss must not bring back a removed segment after records that are appended from now on.
            # See test_what_recovery_removed_stays_removed_after_a_power_loss.
            disk.sync_directory(directory)
            break
        if next_base is not None:
            segment.note_last_time()
    if _drop_empty_tail(segments, options, warnings):
        disk.sync_directory(directory)
    return segments, replay_from


def _drop_empty_tail(segments: list[Segment], options: OpenOptions, warnings: list[str]) -> bool:
    """Remove empty segments after a gap, and return True if there were any.

    Compaction keeps the last batch of a range. So such a gap is a loss, and the log ends before it. See
    test_a_compacted_log_ends_where_its_last_batch_does.
    """
    had_any = False
    while len(segments) > 1 and not options.is_clean:
        last, end_offset = segments[-1], segments[-2].end_offset
        if last.size_bytes or last.base_offset <= max(
            end_offset, options.recovery_point, options.log_start_offset
        ):
            break
        warnings.append(f"offsets {end_offset} to {last.base_offset} are lost")
        segments.pop().remove()
        had_any = True
    return had_any


def _may_be_compacted(segment: Segment, options: OpenOptions) -> bool:
    """Return True if compaction may have left the gap after a segment.

    Apache Kafka compacts above the recovery point in its checkpoint, and the checkpoint may be lost. To take
    such a gap for lost records would delete everything that follows. See
    test_what_compaction_left_is_kept_whatever_the_recovery_point_is.
    """
    return options.config.is_compacted or segment.base_offset < options.cleaned_to or segment.has_gaps


def _lost_text(end_offset: int, cut_bytes: int, later_bases: list[int]) -> str:
    """Return a text about a cut: it took a batch that was being written, or acknowledged records."""
    text = f"everything from offset {end_offset} on is gone, {cut_bytes} bytes"
    if not later_bases:
        return f"{text}: an interrupted write, or acknowledged records that were not synced"
    count = later_bases[-1] - end_offset
    return f"{text} and {len(later_bases)} later segments: at least {count} offsets of acknowledged records"


def _remove_later(disk: Disk, directory: str, bases: list[int], now_ms: int) -> None:
    for base in bases:
        Segment.open(disk, directory, base, now_ms).remove()


def _recover_producers(recovered: Recovered, options: OpenOptions, replay_from: int | None) -> None:
    producers, segments = recovered.producers, recovered.segments
    end_offset = segments.active.end_offset
    gap_offset = _offset_of_gap(segments, options)
    kept_to = end_offset if gap_offset is None else gap_offset
    producers.snapshots.keep(offset for offset in producers.snapshots.offsets() if offset <= kept_to)
    highest = end_offset if replay_from is None else min(replay_from, end_offset)
    # Not from the log start: deleted records that are still in the file have their producers' state.
    start, later = segments.first.base_offset, None
    snapshot = producers.snapshots.load_newest(highest, options.now_ms)
    if snapshot is None or snapshot.offset < start:
        # A later snapshot still has the producers of the deleted segments.
        newest = producers.snapshots.load_newest(end_offset, options.now_ms)
        if newest is not None and newest.offset >= start:
            snapshot, later = None, newest
    expired_before_ms = options.now_ms - options.config.producer_expiration_ms
    if snapshot is not None:
        producers.load(snapshot, expired_before_ms)
        start = snapshot.offset
    _replay(recovered, start, options.now_ms, knows_all=later is None)
    if later is not None:
        producers.load(later, expired_before_ms)


def _offset_of_gap(segments: SegmentList, options: OpenOptions) -> int | None:
    """Return the offset of the first gap that may be a loss, although `_may_be_compacted` keeps what follows.

    A snapshot after the gap may include batches and markers that are lost. A transaction may be committed
    there that an abort has ended since. See test_a_snapshot_behind_a_gap_tells_of_no_lost_marker.
    """
    if options.is_clean:
        return None
    for segment, following in pairwise(segments):
        is_unsynced = (
            following.base_offset > options.recovery_point and segment.base_offset >= options.cleaned_to
        )
        if is_unsynced and segment.end_offset != following.base_offset:
            return segment.end_offset
    return None


def _replay(recovered: Recovered, start: int, now_ms: int, *, knows_all: bool) -> None:
    """Replay the batches from `start` on; with `knows_all`, write lost snapshots again."""
    existing = set(recovered.producers.snapshots.offsets())
    for segment in recovered.segments.from_offset(start):
        if knows_all and segment.base_offset > start and segment.base_offset not in existing:
            _rewrite_snapshot(recovered.producers, segment.base_offset)
        reported = set(segment.damaged)
        position = segment.index.position_for(max(start - segment.base_offset, 0))
        if position and not segment.is_batch_at(position):
            position = 0  # the index or the batch is damaged
        for block in segment.header_blocks(position):
            _replay_block(recovered, segment, block, start, now_ms)
        for damaged in sorted(set(segment.damaged) - reported):
            recovered.warnings.append(segment.damage_text(damaged))
        segment.file.release_handle()


def _replay_block(
    recovered: Recovered, segment: Segment, block: HeaderBlock, start: int, now_ms: int
) -> None:
    rows = np.frombuffer(block.headers, HEADERS)
    ends = block.position + np.cumsum(rows["batch_length"].astype(np.int64) + LOG_OVERHEAD_BYTES)
    is_new = rows["base_offset"] + rows["last_offset_delta"] >= start
    rows, ends = rows[is_new], ends[is_new]
    for epoch in np.unique(rows["leader_epoch"]).tolist():
        _note_epoch(
            recovered.leader_epochs, epoch, int(rows["base_offset"][rows["leader_epoch"] == epoch][0])
        )
    if (rows["attributes"] & (CONTROL_BIT | TRANSACTIONAL_BIT)).any():
        _replay_batches(recovered, segment, block, start, now_ms)
    else:
        recovered.producers.replay_plain(
            rows, now_ms, lambda index: _is_whole(segment, rows[index], int(ends[index]))
        )


def _is_whole(segment: Segment, row: np.void, end: int) -> bool:
    """Return True if the batch that ends at a position has a valid checksum; otherwise note the damage.

    Because of a flipped bit in a header, a producer's next batch could count as a duplicate or be rejected.
    See test_a_damaged_header_tells_nothing_of_producers.
    """
    if segment.transactions_from is not None and row["base_offset"] >= segment.transactions_from:
        return True
    size = int(row["batch_length"]) + LOG_OVERHEAD_BYTES
    if verify_crc(segment.file.pread(size, end - size), 0, size):
        return True
    segment.damaged.setdefault(end - size, end)
    return False


def _replay_batches(
    recovered: Recovered, segment: Segment, block: HeaderBlock, start: int, now_ms: int
) -> None:
    """Replay a block batch by batch: transactions depend on every batch and on the content of markers.

    A batch with a wrong checksum starts and ends no transaction, and does not stop the start. Its readers get
    an error.
    """
    noted_from = segment.transactions_from
    for batch in scan(segment.file, block.position, block.end, limits=segment.limits):
        if isinstance(batch, BadBatch):
            break  # the last one of the block, if its length is damaged
        header = batch.header
        if header.last_offset < start:
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
    """Write the lost snapshot of a roll again; without it, earlier segments could not be deleted safely."""
    try:
        producers.snapshot_now(base_offset)
    except OSError:
        pass  # on a full disk the partition opens without it; a deletion takes its own snapshot


def _note_epoch(epochs: list[tuple[int, int]], epoch: int, offset: int) -> None:
    if not epochs or epoch > epochs[-1][0]:
        epochs.append((epoch, offset))
