"""Replace segments by their compacted successor. No crash loses a record or stores it twice.

    <base>.log.cleaned   the successor is being written; recovery deletes it
    <base>.log.swap      the successor is complete and synced; it replaces all segments within its offsets

Index files have the same endings. The log file gets the ending `.swap` last and loses it first, so its name
shows whether the index files are complete. The old files are durably deleted before the successor takes their
names. After a crash, `finish_swaps` finishes every complete swap and discards the others. Source: Kafka's
LocalLog.replaceSegments and LogLoader.
"""

from __future__ import annotations

from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.scan import HeaderBlock, scan_headers_past_damage
from oncelog.log.segment import LOG_SUFFIX, SUFFIXES, Segment, file_name, is_stem
from oncelog.wire.batch import read_header

CLEANED, SWAP = ".cleaned", ".swap"


def make_swap(disk: Disk, directory: str, output: Segment, newest_path: str) -> None:
    """Sync a compacted segment and rename its files to `.swap`. May run in another thread.

    A crash after the renames keeps the compacted segment. `newest_path` is the log file of the last segment
    that it replaces.
    """
    # Copy the modification time: retention and compaction use it if a segment has no timestamps. See
    # test_compaction_keeps_the_files_time. Source: Kafka's Cleaner, which copies the time of the last
    # segment.
    disk.set_modified_ms(output.log_path, disk.modified_ms(newest_path))
    output.sync(is_active=False)
    # Make the name of the log file durable first. A power loss that kept only the indexes' new names would
    # give them to the segment that is replaced. See
    # test_a_power_loss_during_a_swap_leaves_no_index_of_another_segment.
    disk.sync_directory(directory)
    for suffix in reversed(SUFFIXES):
        if suffix == LOG_SUFFIX:
            # Make the index files' new names durable before the log file is renamed. Otherwise a power loss
            # could keep only the log's new name. See
            # test_a_power_loss_during_a_swap_keeps_aborted_records_hidden.
            disk.sync_directory(directory)
        stem = f"{directory}/{file_name(output.base_offset, suffix)}"
        if disk.exists(stem + CLEANED):
            disk.rename(stem + CLEANED, stem + SWAP)
    disk.sync_directory(directory)


def take_place(disk: Disk, directory: str, group: list[Segment]) -> None:
    """Delete the files of `group`, and give the names of its first segment to the successor. May run in
    another thread.

    Readers of the old segments keep their open files.
    """
    base_offset = group[0].base_offset
    # If no `.swap` log exists, an earlier attempt has renamed it. The log file with the first segment's name
    # is then the successor's log, and must stay.
    if disk.exists(f"{directory}/{file_name(base_offset, LOG_SUFFIX)}{SWAP}"):
        for segment in group:
            _remove_files(disk, directory, segment.base_offset, "")
        # Sync the deletions before the renames. Otherwise a power loss could leave the successor beside some
        # of the old files.
        disk.sync_directory(directory)
    _take_names(disk, directory, base_offset)
    disk.sync_directory(directory)


def finish_swaps(disk: Disk, directory: str) -> None:
    """Complete the swaps that a crash interrupted, and delete incomplete compacted segments."""
    names = [name for name in disk.list(directory) if is_stem(name.partition(".")[0])]
    # An incomplete successor has a `.cleaned` log file. Without that file, all its `.swap` files are valid.
    torn = {name.partition(".")[0] for name in names if name.endswith(LOG_SUFFIX + CLEANED)}
    swaps = sorted({name.partition(".")[0] for name in names if name.endswith(SWAP)} - torn)
    for stem in torn:
        discard(disk, directory, int(stem))
    for stem in swaps:
        base_offset = int(stem)
        if f"{stem}{LOG_SUFFIX}{SWAP}" in names:
            end_offset = _end_of_swap(disk, f"{directory}/{stem}{LOG_SUFFIX}{SWAP}", base_offset)
            # Remove all files of the old segments. A crash may have left index files without their log file,
            # and they must not become index files of the new log. See
            # test_an_index_of_what_is_replaced_is_not_taken_over.
            bases = {int(name.partition(".")[0]) for name in names if name.endswith(SUFFIXES)}
            for base in bases:
                if base_offset <= base < end_offset:
                    _remove_files(disk, directory, base, "")
            # Sync the deletions before the renames, as in `take_place`.
            disk.sync_directory(directory)
        _take_names(disk, directory, base_offset)
    if swaps:
        disk.sync_directory(directory)


def _end_of_swap(disk: Disk, path: str, base_offset: int) -> int:
    """Return the offset after the last batch of a compacted log file. Damage is skipped."""
    file = disk.open(path)
    end_offset = base_offset + 1
    try:
        # Scan past damage. If the scan ended there, old segments with higher offsets would stay beside the
        # successor.
        for item in scan_headers_past_damage(file, 0, file.size(), base_offset):
            if isinstance(item, HeaderBlock):
                end_offset = read_header(item.headers, len(item.headers) - 61).last_offset + 1
    finally:
        file.close()
    return end_offset


def discard_leftovers(disk: Disk, directory: str) -> None:
    """Delete the files that a failed compaction could not delete. May run in another thread. Raises OSError.

    Otherwise, recovery would swap these files in beside the result of a later compaction, and their records
    would exist twice. See test_a_segment_of_a_failed_swap_does_not_come_back_beside_newer_ones.
    """
    stems = {name.partition(".")[0] for name in disk.list(directory) if name.endswith((CLEANED, SWAP))}
    for stem in stems:
        if is_stem(stem):
            discard(disk, directory, int(stem))


def discard(disk: Disk, directory: str, base_offset: int) -> None:
    """Delete the files of a compacted segment that has not taken its final names. If a crash interrupts this,
    the remaining files do not look like a complete segment.
    """
    stem = f"{directory}/{base_offset:020d}"
    has_swap = any(disk.exists(stem + suffix + SWAP) for suffix in SUFFIXES)
    if disk.exists(stem + LOG_SUFFIX + SWAP):
        disk.rename(stem + LOG_SUFFIX + SWAP, stem + LOG_SUFFIX + CLEANED)
        disk.sync_directory(directory)
    _remove_files(disk, directory, base_offset, SWAP)
    if has_swap:
        # The `.swap` deletions must be durable before the `.cleaned` log is deleted. Without that log, the
        # `.swap` indexes would seem to belong to a log that already has its final name.
        disk.sync_directory(directory)
    _remove_files(disk, directory, base_offset, CLEANED)


def _take_names(disk: Disk, directory: str, base_offset: int) -> None:
    """Remove the ending `.swap` from all files that still have it, the log file first."""
    for suffix in SUFFIXES:
        name = f"{directory}/{file_name(base_offset, suffix)}"
        if disk.exists(name + SWAP):
            disk.rename(name + SWAP, name)
            if suffix == LOG_SUFFIX:
                disk.sync_directory(directory)


def _remove_files(disk: Disk, directory: str, base_offset: int, ending: str) -> None:
    for suffix in SUFFIXES:
        remove_if_exists(disk, f"{directory}/{file_name(base_offset, suffix)}{ending}")
