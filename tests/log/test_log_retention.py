"""The roll of segments, retention, and DeleteRecords."""

from __future__ import annotations

import errno
import os
from collections import deque
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from random import Random

import pytest
from support.log.partitions import (
    NOW_MS,
    TP,
    batch,
    config,
    marker,
    open_partition,
    put,
    put_marker,
    read_all,
)

from oncelog.errors import KafkaStorageError, OffsetOutOfRange
from oncelog.log.background import BackgroundQueue, run
from oncelog.log.config import LogConfig
from oncelog.log.partition import Partition
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash

SIZE = len(batch())


def _filled(count: int = 9, disk: MemoryDisk | None = None, **settings: object) -> object:
    partition = open_partition(disk, config(segment_bytes=3 * SIZE, **settings))
    for number in range(count):
        put(partition, batch(timestamp_ms=NOW_MS + number))
    return partition


@pytest.mark.parametrize("later", [0, 5])
@pytest.mark.parametrize("has_indexes", [True, False])
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_file_that_a_failed_roll_left_hides_no_records(
    is_clean: bool, has_indexes: bool, later: int
) -> None:
    """Regression: after a failed roll, records went to the previous segment. The empty log file of the failed
    roll hid them after a restart.
    """
    disk, small = MemoryDisk(), config(segment_bytes=7 * SIZE, index_interval_bytes=2 * SIZE)
    partition = open_partition(disk, small)
    for _ in range(6 + later):
        put(partition, batch(partition.log_end_offset))
    partition.flush()
    end, point, before = partition.log_end_offset, partition.recovery_point, read_all(partition)
    if is_clean:
        partition.close(NOW_MS)
    disk = disk.after_kill()
    for suffix in ("log", "index", "timeindex", "txnindex") if has_indexes else ("log",):
        disk.open(f"{TP}/{3:020d}.{suffix}", create=True).close()
    for start in range(2):
        again = open_partition(disk, small, recovery_point=point * start, clean_shutdown=is_clean)
        assert (again.log_end_offset, read_all(again)) == (end, before)
        assert again.producer_count == 1
        assert any("a failed roll left the file" in text for text in again.recovery_warnings) is (start == 0)
        again.flush()
        again.close(NOW_MS)
        disk = disk.after_kill()
    assert f"{3:020d}.log" not in disk.list(str(TP))


@pytest.mark.parametrize("is_clean", [True, False])
def test_an_empty_segment_where_the_log_ends_stays(is_clean: bool) -> None:
    """A roll by time, or retention, may leave an empty segment at the end of a log. The next retention must
    keep it.
    """
    disk = MemoryDisk()
    partition = _filled(disk=disk)
    partition.delete_records(None, NOW_MS)  # type: ignore[attr-defined]
    partition.flush()  # type: ignore[attr-defined]
    point = partition.recovery_point  # type: ignore[attr-defined]
    if is_clean:
        partition.close(NOW_MS)  # type: ignore[attr-defined]
    disk = disk.after_kill()
    names = disk.list(str(TP))
    how = {"recovery_point": point, "log_start_offset": 9, "clean_shutdown": is_clean}
    again = open_partition(disk, config(segment_bytes=3 * SIZE), **how)
    assert (again.log_end_offset, again.recovery_warnings) == (9, [])
    assert set(disk.list(str(TP))) >= {name for name in names if name.endswith(".log")}


def test_a_segment_ends_when_it_is_full() -> None:
    disk = MemoryDisk()
    partition = _filled(disk=disk)
    assert [name for name in disk.list(str(TP)) if name.endswith(".log")] == [
        f"{base:020d}.log" for base in (0, 3, 6)
    ]
    assert partition.size_bytes == 9 * SIZE


def test_a_segment_ends_when_it_is_old() -> None:
    partition = open_partition(log_config=config(segment_ms=1000))
    for step in (0, 1000, 1001, 500, 2001, 2002):
        put(partition, batch(timestamp_ms=NOW_MS + step))
    assert partition.segment_count == 3


def test_without_timestamps_age_is_counted_from_its_creation() -> None:
    partition = open_partition(log_config=config(segment_ms=1000))
    for step in (0, 1000, 1001):
        put(partition, batch(timestamp_ms=-1), now_ms=NOW_MS + step)
    assert partition.segment_count == 2


def test_a_segment_ends_when_an_index_is_full() -> None:
    partition = open_partition(log_config=config(segment_index_bytes=24, index_interval_bytes=0))
    for _ in range(6):
        put(partition, batch(timestamp_ms=-1))
    assert partition.segment_count == 2


def test_a_segment_ends_when_offsets_no_longer_fit() -> None:
    partition = open_partition()
    put(partition, batch())
    partition.log.end_offset = 2**31
    put(partition, batch())
    assert partition.segment_count == 2
    assert partition.read(2**31, 1000).next_offset == 2**31 + 1


def test_segments_are_deleted_by_retention_time() -> None:
    partition = _filled(retention_ms=1000)
    partition.flush()
    assert partition.enforce_retention(NOW_MS + 1002) == 0
    assert partition.enforce_retention(NOW_MS + 1003) == 1
    assert (partition.log_start_offset, partition.segment_count) == (3, 2)
    with pytest.raises(OffsetOutOfRange):
        partition.read(2, 100)
    assert len(read_all(partition)) == 6 * SIZE
    assert partition.enforce_retention(NOW_MS + 10_000) == 1
    assert (partition.log_start_offset, partition.log_end_offset, partition.size_bytes) == (9, 9, 0)
    assert put(partition, batch()).base_offset == 9


def test_segments_are_deleted_by_retention_size() -> None:
    partition = _filled(retention_bytes=5 * SIZE)
    partition.flush()
    assert partition.enforce_retention(NOW_MS) == 1
    assert partition.log_start_offset == 3
    assert partition.enforce_retention(NOW_MS) == 0


def test_compacted_topics_are_not_cut_by_age() -> None:
    partition = _filled(retention_ms=1, cleanup_policy="compact")
    assert partition.enforce_retention(NOW_MS + 99_999) == 0
    assert partition.log_start_offset == 0


def test_delete_records_moves_the_log_start() -> None:
    disk = MemoryDisk()
    partition = _filled(disk=disk)
    partition.flush()
    assert partition.delete_records(4, NOW_MS) == 4
    assert partition.segment_count == 2
    assert partition.offset_for_timestamp(NOW_MS) == (NOW_MS + 4, 4)
    assert partition.read(4, 1).next_offset == 5
    assert partition.delete_records(2, NOW_MS) == 4
    for offset in (-1, 10):
        with pytest.raises(OffsetOutOfRange):
            partition.delete_records(offset, NOW_MS)
    assert partition.delete_records(None, NOW_MS) == 9
    partition.close(NOW_MS)
    again = open_partition(disk, clean_shutdown=True, log_start_offset=9)
    assert (again.log_start_offset, again.log_end_offset) == (9, 9)


@pytest.mark.behaviour("I7")
def test_producers_are_remembered_though_their_records_are_deleted() -> None:
    partition = open_partition()
    put(partition, batch(0))
    partition.delete_records(None, NOW_MS)
    assert put(partition, batch(0)).is_duplicate
    assert put(partition, batch(1)).base_offset == 1


def test_deleted_batches_are_remembered_though_their_snapshot_is_lost() -> None:
    """Found by the simulator: recovery read all remaining segments and ignored a newer snapshot, so it forgot
    the deleted batches.
    """
    disk, small = MemoryDisk(), config(segment_bytes=3 * SIZE)
    partition = open_partition(disk, small)
    for number in range(13):
        put(partition, batch(number))
    partition.delete_records(9, NOW_MS)
    partition.flush()
    before, point = partition.describe_producers(), partition.recovery_point
    disk = disk.after_kill()
    for name in [name for name in disk.list(str(TP)) if name.startswith(f"{9:020d}.")]:
        if not name.endswith((".log", "index")):
            disk.remove(f"{TP}/{name}")
    disk.replace(f"{TP}/{9:020d}.timeindex", b"damaged")
    for _ in range(2):
        again = open_partition(disk, small, recovery_point=point, log_start_offset=9)
        assert again.recovery_warnings and again.describe_producers() == before
        disk.replace(f"{TP}/{9:020d}.timeindex", b"damaged")
        disk = disk.after_kill()


def _second_segment_without_snapshot() -> tuple[MemoryDisk, LogConfig, Partition]:
    """Return a disk, the settings, and a flushed partition.

    Its second segment has no snapshot at its start, because the disk was full.
    """
    disk, small = MemoryDisk(), config(segment_bytes=3 * SIZE)
    partition = open_partition(disk, small)
    for number in range(3):
        put(partition, batch(number))
    disk.errors[("write", ".tmp")] = errno.ENOSPC  # the snapshot at the start of the second segment fails
    put(partition, batch())
    disk.errors.clear()
    put(partition, batch())
    partition.flush()
    return disk, small, partition


def check_known_after_power_loss(
    disk: MemoryDisk, log_config: LogConfig, sequence: int, *, recovery_point: int, log_start_offset: int
) -> None:
    """Assert that a batch of producer 7 is a duplicate after any power loss."""
    for seed in range(20):
        found = disk.after_power_loss(Random(seed))
        again = open_partition(
            found, log_config, recovery_point=recovery_point, log_start_offset=log_start_offset
        )
        assert put(again, batch(sequence)).is_duplicate, f"seed {seed}"


def check_flush_deletes(partition: Partition) -> None:
    """Assert that deleted segments wait for a flush, and are gone after it."""
    assert partition.is_flush_due
    partition.flush()
    partition.checkpoint_producers()
    assert (partition.segment_count, partition.is_flush_due) == (2, False)


@pytest.mark.behaviour("I7")
def test_a_power_loss_after_deleting_segments_leaves_their_producers_known() -> None:
    disk, small, partition = _second_segment_without_snapshot()
    put(partition, batch())
    put(partition, batch())
    assert partition.delete_records(3, NOW_MS) == 3
    check_known_after_power_loss(disk, small, 2, recovery_point=5, log_start_offset=3)
    check_flush_deletes(partition)


def test_deleting_unsynced_segments_leaves_the_producers_of_synced_ones_known() -> None:
    """Regression: the deletion of an unsynced segment removed the snapshot of the synced segments that were
    deleted before it. The next snapshot covered unsynced records, which a power loss took, because a full
    disk had refused the snapshot of a roll.
    """
    disk, small = MemoryDisk(), config(segment_bytes=3 * SIZE)
    partition = open_partition(disk, small)
    put(partition, batch(0))
    put(partition, batch())
    put(partition, batch())
    partition.flush()
    put(partition, batch())
    assert (partition.delete_records(3, NOW_MS), partition.segment_count) == (3, 1)
    while partition.segment_count < 3:
        # The disk is full at the roll of the second segment, and no longer at that of the third.
        disk.errors["write", ".tmp"] = errno.ENOSPC
        if partition.segment_count == 2:
            disk.errors.clear()
        put(partition, batch())
    partition.delete_records(6, NOW_MS)
    check_known_after_power_loss(disk, small, 0, recovery_point=3, log_start_offset=6)
    check_flush_deletes(partition)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_records_that_an_earlier_process_synced_leave_their_producers_known(is_deleted: bool) -> None:
    """Regression: a process synced records, and was killed before it stored the recovery point. For the next
    one they were not synced, so it deleted them, or the snapshot of deleted ones, without a flush.
    """
    disk, small = MemoryDisk(), config(segment_bytes=3 * SIZE)
    partition = open_partition(disk, small)
    for number in range(4):
        put(partition, batch(0) if number == 0 else batch())
    partition.flush()
    start = 3 if is_deleted else 0
    partition.delete_records(start, NOW_MS)
    assert partition.segment_count == 2 - is_deleted
    partition = open_partition(disk := disk.after_kill(), small, recovery_point=0, log_start_offset=0)
    while partition.segment_count < 3 + (not is_deleted):
        # The disk is full at the roll of the second segment, and no longer at that of the third.
        disk.errors["write", ".tmp"] = errno.ENOSPC
        if partition.log_end_offset > 8:
            disk.errors.clear()
        put(partition, batch())
    partition.delete_records(6, NOW_MS)
    check_known_after_power_loss(disk, small, 0, recovery_point=0, log_start_offset=6)
    check_flush_deletes(partition)


@pytest.mark.parametrize("checkpoint", [None, 0, 4], ids=["running", "kill", "kill-later-checkpoint"])
def test_a_power_loss_after_a_later_snapshot_leaves_producers_of_deleted_segments_known(
    checkpoint: int | None,
) -> None:
    """The deletion relies on a snapshot inside a segment.

    The power loss removes the snapshot of the next roll.
    """
    disk, small, partition = _second_segment_without_snapshot()
    partition.delete_records(3, NOW_MS)  # this takes a snapshot within the second segment
    assert partition.segment_count == 1
    put(partition, batch())
    put(partition, batch())
    assert partition.segment_count == 2
    if checkpoint is not None:
        disk = disk.after_kill()
        partition = open_partition(disk, small, recovery_point=checkpoint, log_start_offset=3)
        for _ in range(3):
            put(partition, batch())
        assert partition.segment_count == 3
    check_known_after_power_loss(disk, small, 2, recovery_point=checkpoint or 0, log_start_offset=3)


def test_segments_before_a_gap_wait_for_a_snapshot_behind_it() -> None:
    """Regression: a power loss left a gap below the log start, and the newest snapshot was in the gap. The
    segment before the gap was deleted. The next start uses no snapshot below the first segment, so it
    forgot the producers of both, and retries were stored again.
    """
    disk, small = MemoryDisk(), config(segment_bytes=3 * SIZE)
    partition = open_partition(disk, small)
    for pid in range(2):
        put(partition, batch(0, pid=pid))
    partition.log.snapshot()
    disk.errors["write", ".tmp"] = errno.ENOSPC
    for sequence in range(3):
        put(partition, batch(sequence, pid=9))
    disk = disk.after_kill()
    disk.open(f"{TP}/{0:020d}.log").truncate(SIZE)
    disk.errors["write", ".tmp"] = errno.ENOSPC
    partition = open_partition(disk, small, log_start_offset=4)
    assert [segment.base_offset for segment in partition.log.segments] == [0, 3]
    assert partition.log.segments.first.end_offset == 1
    partition.flush()
    partition.checkpoint_producers()
    stored = {"recovery_point": partition.stored_recovery_point, "log_start_offset": 4}
    partition = open_partition(disk.after_kill(), small, **stored)
    assert [put(partition, batch(0, pid=pid)).is_duplicate for pid in range(2)] == [True, True]
    partition.flush()
    partition.checkpoint_producers()
    assert partition.log.segments.first.base_offset == 3


def test_a_power_loss_takes_no_snapshot_name_that_a_deletion_relies_on() -> None:
    """Regression: a broker was killed between the rename and the sync of a snapshot. The next process deleted
    the segments that the snapshot covered. A power loss kept the deletion and took the snapshot.
    """
    disk, small = MemoryDisk(), config(segment_bytes=3 * SIZE)
    partition = open_partition(disk, small)
    disk.errors["write", ".tmp"] = errno.ENOSPC
    while partition.segment_count < 3 or not partition.log.segments.active.size_bytes:
        put(partition, batch(0, pid=20 + partition.log_end_offset))
    del disk.errors["write", ".tmp"]
    partition.flush()
    stored = {"recovery_point": partition.recovery_point}
    third = partition.log.segments.active.base_offset
    for call in partition.log.producers.snapshots.write(
        partition.log_end_offset, partition.log.producers.table.image()
    ):
        if disk.exists(f"{TP}/{partition.log_end_offset:020d}.snapshot"):
            break
        if call is not None:
            call()
    disk = disk.after_kill()
    for crash_after in count():
        again = disk.after_kill()
        partition = open_partition(again, small, **stored)
        again.crash_after = again.steps + crash_after
        try:
            partition.delete_records(third, NOW_MS)
            break
        except SimulatedCrash:
            pass
        for seed in range(12):
            partition = open_partition(again.after_power_loss(Random(seed)), small, **stored)
            known = [put(partition, batch(0, pid=20 + offset)).is_duplicate for offset in range(third)]
            assert all(known), (crash_after, seed)
    assert crash_after > 8


@pytest.mark.parametrize("target", [9, 14], ids=["some", "all"])
def test_a_power_loss_during_the_deletion_of_segments_leaves_no_gap(target: int) -> None:
    """A power loss may keep the removal of a newer segment and lose that of an older one."""

    def filled(disk: MemoryDisk) -> Partition:
        partition = open_partition(disk, config(segment_bytes=3 * SIZE))
        for number in range(14):
            put(partition, batch(number))
        partition.flush()
        return partition

    disk = MemoryDisk()
    filled(disk)
    first_step = disk.steps
    for step in count(first_step):
        disk = MemoryDisk()
        disk.crash_after = step
        partition = filled(disk)
        with suppress(SimulatedCrash):
            partition.delete_records(target, NOW_MS)
        for seed in range(6):
            found = disk.after_power_loss(Random(seed))
            logs = sorted(name for name in found.list(str(TP)) if ".log" in name)
            again = open_partition(found, config(segment_bytes=3 * SIZE))
            assert again.log_end_offset == 14, f"after step {step}, seed {seed}"
            # After the power loss, a start removes segments that are older than a dropped one. A second power
            # loss may then follow.
            dropped = [name for name in logs if name.endswith(".deleted")]
            is_partly = dropped and any(name < dropped[-1] and name not in dropped for name in logs)
            for second in range(20) if is_partly else ():
                lost_again = found.after_power_loss(Random(second))
                end_offset = open_partition(lost_again, config(segment_bytes=3 * SIZE)).log_end_offset
                assert end_offset == 14, f"after step {step}, seeds {seed} and {second}"
            assert put(again, batch(13)).is_duplicate
        if disk.steps < step:
            break
    assert step > first_step + 20


def test_a_power_loss_while_a_segment_is_dropped_shows_no_aborted_records() -> None:
    """Regression: a power loss kept the rename of a transaction index and lost that of its log file.

    `indexed_from` is unknown, as on a directory of Apache Kafka, so recovery cannot know that the index is
    lost.
    """

    def filled(disk: MemoryDisk) -> Partition:
        partition = open_partition(disk, config(segment_bytes=SIZE + len(marker(7, commit=False))))
        for number in range(6):
            put(partition, batch(number, is_transactional=True))
            put_marker(partition, marker(7, commit=False))
        partition.flush()
        return partition

    disk = MemoryDisk()
    filled(disk)
    first_step = disk.steps
    for step in count(first_step):
        disk = MemoryDisk()
        disk.crash_after = step
        partition = filled(disk)
        with suppress(SimulatedCrash):
            partition.delete_records(12, NOW_MS)
        for seed in range(10):
            again = open_partition(disk.after_power_loss(Random(seed)), recovery_point=12)
            known = {entry.last_offset for entry in again.aborted_transactions(0, 12)}
            first_marker = again.log_start_offset + 1
            assert known == set(range(first_marker, 12, 2)), f"after step {step}, seed {seed}"
        if disk.steps < step:
            break
    assert step > first_step + 20


def test_a_full_disk_gets_room_by_deleting_what_older_snapshots_cover() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, config(segment_bytes=3 * SIZE))
    for number in range(7):
        put(partition, batch(number))
    disk.errors[("write", ".tmp")] = errno.ENOSPC  # the last segment begins without a snapshot
    for number in range(7, 10):
        put(partition, batch(number))
    partition.flush()
    with pytest.raises(KafkaStorageError):
        partition.delete_records(9, NOW_MS)
    assert partition.log.segments.first.base_offset == 6
    disk.errors.clear()
    partition.delete_records(9, NOW_MS)
    assert partition.segment_count == 1


def free_full_disk(partition: Partition, disk: MemoryDisk) -> None:
    """Delete all records as often as docs/operations.md recommends. Between two deletions, write the
    checkpoints as the broker does.
    """
    for _ in range(3):
        with suppress(KafkaStorageError):
            partition.delete_records(None, NOW_MS)
        with suppress(KafkaStorageError):
            partition.flush()
        with suppress(OSError):
            partition.checkpoint_producers()


def test_a_full_disk_with_unflushed_aborts_gets_room() -> None:
    """Regression: a deletion waited for a flush, which needed space for the aborted transactions' index."""
    log_config = config(segment_bytes=9 * SIZE, index_interval_bytes=SIZE)
    for room in range(0, 2_000, 97):
        disk = MemoryDisk()
        partition, numbers = open_partition(disk, log_config), count()

        def abort_one(number: int, partition: Partition = partition) -> None:
            put(partition, batch(number, is_transactional=True))
            put_marker(partition, marker(7, commit=False))

        for number in islice(numbers, 40):
            abort_one(number)
        disk.capacity_bytes = disk.used_bytes() + room
        with pytest.raises(KafkaStorageError):
            deque(map(abort_one, numbers), 0)
        entry = partition.producer(7)
        assert entry is not None
        end_offset, last = partition.log_end_offset, entry.batches[-1].last_sequence
        assert last is not None
        partition.flush()
        free_full_disk(partition, disk)
        assert (partition.log_start_offset, partition.segment_count) == (end_offset, 1)
        assert disk.used_bytes() < disk.capacity_bytes // 2
        for seed in range(3):
            how = {"recovery_point": partition.recovery_point, "log_start_offset": end_offset}
            again = open_partition(disk.after_power_loss(Random(seed)), log_config, **how)
            assert put(again, batch(last, is_transactional=True)).is_duplicate


@pytest.mark.parametrize("is_run_by_driver", [False, True])
def test_a_full_disk_with_one_segment_gets_room(is_run_by_driver: bool) -> None:
    """The disk has no space for the indexes and the first snapshot of producers. The removal of the offset
    index frees some.
    """
    disk, log_config, background = MemoryDisk(), config(index_interval_bytes=SIZE), BackgroundQueue()
    if is_run_by_driver:
        background.on_added = lambda: None
    partition = open_partition(disk, log_config, background=background)
    for number in range(600):
        put(partition, batch(number, timestamp_ms=NOW_MS + number))
    disk.capacity_bytes = disk.used_bytes()
    for _ in range(3):
        free_full_disk(partition, disk)
        with suppress(OSError):
            background.finish()
    assert (partition.log_start_offset, partition.segment_count) == (600, 1)
    assert disk.used_bytes() < disk.capacity_bytes // 10
    for seed in range(10):
        again = open_partition(disk.after_power_loss(Random(seed)), log_config, log_start_offset=600)
        assert put(again, batch(599)).is_duplicate


def test_a_stop_deletes_the_segments_that_wait_for_a_flush() -> None:
    """Regression: a full disk refused a snapshot, so segments to delete gave up their indexes, and waited for
    a flush. A stop left them behind, and the next start reported their index files as missing.
    """
    disk, small = MemoryDisk(), config(segment_bytes=3 * SIZE)
    partition = open_partition(disk, small)
    put(partition, batch(0))
    partition.flush()
    disk.errors["write", ".tmp"] = errno.ENOSPC
    while partition.segment_count < 3:
        put(partition, batch())
    with suppress(KafkaStorageError):
        partition.delete_records(6, NOW_MS)
    disk.errors.clear()
    assert partition.segment_count == 3
    partition.close(NOW_MS)
    disk, how = disk.after_kill(), {"recovery_point": 7, "log_start_offset": 6}
    again = open_partition(disk, small, clean_shutdown=True, **how)
    assert (again.recovery_warnings, again.segment_count) == ([], 1)
    assert put(again, batch(0)).is_duplicate


def test_a_topic_deleted_while_its_segments_are_dropped_leaves_no_file_open(tmp_path: Path) -> None:
    """A client deletes all records, and then the topic, between the renames and the removal of the files."""
    background = BackgroundQueue()
    partition = open_partition(RealDisk(tmp_path), config(flush_messages=1), background=background)
    background.on_added = lambda: None
    put(partition, batch(0))
    partition.flush()
    partition.delete_records(None, NOW_MS)
    while (call := background.step()) is None or call.call != partition.log._sync_drops:
        if call is not None:
            call()
    call()
    partition.abandon()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    assert [name for name in names if name.startswith(str(tmp_path))] == []


@pytest.mark.parametrize("failing", ["sync", "remove"])
def test_files_of_dropped_segments_are_deleted_after_an_error(failing: str) -> None:
    """There is no descriptor for the sync of the directory, or the disk cannot remove a file."""
    disk, background = MemoryDisk(), BackgroundQueue()
    log_config = config(segment_bytes=3 * SIZE, flush_messages=1)
    partition = open_partition(disk, log_config, background=background)
    background.on_added = lambda: None
    for number in range(12):
        put(partition, batch(number))
    partition.flush()
    background.finish()

    def dropped() -> list[str]:
        return [name for name in disk.list(str(TP)) if name.endswith(".deleted")]

    def refuse(operation: str, path: str) -> None:
        if operation == failing and dropped():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    disk.on_step.append(refuse)
    partition.delete_records(9, NOW_MS)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        background.finish()
    assert dropped()
    disk.on_step.clear()
    partition.enforce_retention(NOW_MS)
    background.finish()
    assert dropped() == []


def test_indexes_that_were_given_up_are_made_again_where_the_log_start_is_lost() -> None:
    disk, log_config = MemoryDisk(), config(index_interval_bytes=SIZE)
    partition = open_partition(disk, log_config)
    for number in range(100):
        put(partition, batch(number, is_transactional=True))
        put_marker(partition, marker(7, commit=number % 2 == 0))
    disk.capacity_bytes = disk.used_bytes()
    with pytest.raises(KafkaStorageError):
        partition.delete_records(None, NOW_MS)
    partition.flush()
    aborted = [entry.last_offset for entry in partition.aborted_transactions(0, 200)]
    for seed in range(10):
        found = disk.after_power_loss(Random(seed))
        found.capacity_bytes = None
        again = open_partition(found, log_config, recovery_point=partition.recovery_point)
        assert [entry.last_offset for entry in again.aborted_transactions(0, 200)] == aborted
        assert again.offset_for_timestamp(NOW_MS) == (NOW_MS, 0)


def test_settings_change_while_open() -> None:
    partition = _filled(3)
    partition.reconfigure(config(segment_bytes=100 * SIZE))
    for _ in range(6):
        put(partition, batch())
    assert partition.segment_count == 1


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_segment_that_compaction_emptied_does_not_keep_later_ones(policy: str) -> None:
    partition = open_partition(log_config=config(segment_bytes=3 * SIZE, cleanup_policy="compact"))
    for key in (0, 1, 2, 0, 1, 2, 3, 4, 5, 6):
        put(partition, batch(key=b"%d" % key))
    partition.flush()
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    run(partition.cleaner.compact(dirty, NOW_MS))
    assert partition.log.segments.first.size_bytes == 0
    partition.reconfigure(config(segment_bytes=3 * SIZE, cleanup_policy=policy, retention_bytes=4 * SIZE))
    partition.enforce_retention(NOW_MS)
    assert partition.log_start_offset == 6
    assert partition.size_bytes == 4 * SIZE


@pytest.mark.parametrize("is_clean", [True, False], ids=["stop", "kill"])
@pytest.mark.parametrize("suffix", ["index", "timeindex", "txnindex", "log"])
def test_a_segment_that_could_not_be_made_does_not_end_the_log(suffix: str, is_clean: bool) -> None:
    """Regression: after a restart, the empty log file hid records of the previous segment."""
    disk, small = MemoryDisk(), config(segment_bytes=4 * SIZE)
    partition = open_partition(disk, small)
    for _ in range(3):
        put(partition, batch())
    for operation in ("create", "truncate"):
        disk.errors[operation, f"{3:020d}.{suffix}"] = errno.EMFILE
    with pytest.raises(KafkaStorageError):
        put(partition, batch(value=bytes(SIZE)))
    disk.errors.clear()
    put(partition, batch())
    partition.flush()
    point, before = partition.recovery_point, read_all(partition)
    if is_clean:
        partition.close(NOW_MS)
    disk = disk.after_kill()
    again = open_partition(disk, small, recovery_point=point, clean_shutdown=is_clean)
    assert (again.log_end_offset, read_all(again)) == (4, before)
