"""Replace segments by their compacted successor so that no crash loses or doubles a record.

    <base>.log.cleaned   being written; worthless after a crash
    <base>.log.swap      complete and synced; it replaces every segment that begins within its offsets

Index files have the same endings. The log gets `.swap` last and loses it first, so that one name tells what
the indexes are worth. The old names are durably gone before the new ones appear. After a crash,
`finish_swaps` completes what was complete and removes the rest. Source: Kafka's LocalLog.replaceSegments and
LogLoader.
"""

from __future__ import annotations

from oncelog.log.disk import Disk, remove_if_exists
from oncelog.log.scan import HeaderBlock, scan_headers_past_damage
from oncelog.log.segment import LOG_SUFFIX, SUFFIXES, Segment, file_name
from oncelog.wire.batch import read_header

CLEANED, SWAP = ".cleaned", ".swap"


def make_swap(disk: Disk, directory: str, output: Segment, newest_path: str) -> None:
    """Sync a compacted segment and rename it to `.swap`: from here on a crash keeps it. Safe in a thread.

    `newest_path` is the log of the last segment that it replaces.
    """
    # Retention and compaction lag use this time where no record has a timestamp. See
    # test_compaction_keeps_the_files_time. Source: Kafka's Cleaner, which takes the time of the last segment.
    disk.set_modified_ms(output.log_path, disk.modified_ms(newest_path))
    output.sync(is_active=False)
    for suffix in reversed(SUFFIXES):
        if suffix == LOG_SUFFIX:
            # A power loss may keep the log's new name and lose those of its indexes. See
            # test_a_power_loss_amid_a_swap_keeps_aborted_records_hidden.
            disk.sync_directory(directory)
        stem = f"{directory}/{file_name(output.base_offset, suffix)}"
        if disk.exists(stem + CLEANED):
            disk.rename(stem + CLEANED, stem + SWAP)
    disk.sync_directory(directory)


def take_place(disk: Disk, directory: str, group: list[Segment]) -> None:
    """Remove the files of a group and give their successor its names. Safe in a thread.

    Readers of the old segments have their files open.
    """
    base_offset = group[0].base_offset
    # Otherwise an earlier attempt came so far that the first of these names is already the new log's.
    if disk.exists(f"{directory}/{file_name(base_offset, LOG_SUFFIX)}{SWAP}"):
        for segment in group:
            _remove_files(disk, directory, segment.base_offset, "")
        # Before the new names: a power loss must not leave them beside some of the old ones.
        disk.sync_directory(directory)
    _take_names(disk, directory, base_offset)
    disk.sync_directory(directory)


def finish_swaps(disk: Disk, directory: str) -> None:
    """Complete the swaps that a crash interrupted, and remove compacted segments that are incomplete."""
    names = [name for name in disk.list(directory) if name.partition(".")[0].isdecimal()]
    # An incomplete log is named `.cleaned`. Without one, every file with the ending `.swap` is needed.
    torn = {name.partition(".")[0] for name in names if name.endswith(LOG_SUFFIX + CLEANED)}
    swaps = sorted({name.partition(".")[0] for name in names if name.endswith(SWAP)} - torn)
    for stem in torn:
        discard(disk, directory, int(stem))
    for stem in swaps:
        base_offset = int(stem)
        if f"{stem}{LOG_SUFFIX}{SWAP}" in names:
            end_offset = _end_of_swap(disk, f"{directory}/{stem}{LOG_SUFFIX}{SWAP}", base_offset)
            # A log may be gone and its indexes left. They must not become indexes of the new one. See
            # test_an_index_of_what_is_replaced_is_not_taken_over.
            bases = {int(name.partition(".")[0]) for name in names if name.endswith(SUFFIXES)}
            for base in bases:
                if base_offset <= base < end_offset:
                    _remove_files(disk, directory, base, "")
            # As in `take_place`: first the old names are durably gone.
            disk.sync_directory(directory)
        _take_names(disk, directory, base_offset)
    if swaps:
        disk.sync_directory(directory)


def _end_of_swap(disk: Disk, path: str, base_offset: int) -> int:
    """Return the offset after the last batch of a compacted log, reading past any damage."""
    file = disk.open(path)
    end_offset = base_offset + 1
    try:
        # Past damage: otherwise some of the segments that it replaces would stay beside it.
        for item in scan_headers_past_damage(file, 0, file.size(), base_offset):
            if isinstance(item, HeaderBlock):
                end_offset = read_header(item.headers, len(item.headers) - 61).last_offset + 1
    finally:
        file.close()
    return end_offset


def discard_leftovers(disk: Disk, directory: str) -> None:
    """Remove the files of a failed attempt that could not remove them itself. Safe in a thread.

    Another attempt may write one segment in place of these and of older ones. A start would put the
    leftovers beside it, and their records would be there twice. See
    test_what_a_failed_swap_left_does_not_come_back_beside_newer_segments. Raises OSError.
    """
    stems = {name.partition(".")[0] for name in disk.list(directory) if name.endswith((CLEANED, SWAP))}
    for stem in stems:
        if stem.isdecimal():
            discard(disk, directory, int(stem))


def discard(disk: Disk, directory: str, base_offset: int) -> None:
    """Remove a compacted segment; a crash meanwhile leaves nothing that looks complete."""
    stem = f"{directory}/{base_offset:020d}"
    has_swap = any(disk.exists(stem + suffix + SWAP) for suffix in SUFFIXES)
    if disk.exists(stem + LOG_SUFFIX + SWAP):
        disk.rename(stem + LOG_SUFFIX + SWAP, stem + LOG_SUFFIX + CLEANED)
        disk.sync_directory(directory)
    _remove_files(disk, directory, base_offset, SWAP)
    if has_swap:
        # Without the `.cleaned` log, they would count as indexes of a log that already has its final name.
        disk.sync_directory(directory)
    _remove_files(disk, directory, base_offset, CLEANED)


def _take_names(disk: Disk, directory: str, base_offset: int) -> None:
    """Remove the ending of the swapped-in files, the log's first, even as a power loss left them."""
    for suffix in SUFFIXES:
        name = f"{directory}/{file_name(base_offset, suffix)}"
        if disk.exists(name + SWAP):
            disk.rename(name + SWAP, name)
            if suffix == LOG_SUFFIX:
                disk.sync_directory(directory)


def _remove_files(disk: Disk, directory: str, base_offset: int, ending: str) -> None:
    for suffix in SUFFIXES:
        remove_if_exists(disk, f"{directory}/{file_name(base_offset, suffix)}{ending}")
