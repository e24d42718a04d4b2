"""A failed sync, then a restart, then a power loss. After a failed sync, Linux marks the pages as clean
although they are not durable.
"""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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

from oncelog.errors import KafkaStorageError
from oncelog.log.background import run
from oncelog.log.partition import Partition
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk

SMALL = config(segment_bytes=500, index_interval_bytes=100)


def test_a_retry_after_a_failed_sync_and_a_restart_is_durable_once_acknowledged() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0))
    partition.flush()
    put(partition, batch(1, value=b"acknowledged later"))
    disk.errors = {("sync", ".log"): errno.EIO}
    with pytest.raises(KafkaStorageError):
        partition.flush()
    assert partition.is_offline
    disk.errors = {}
    disk = disk.after_kill()
    partition = open_partition(disk, recovery_point=1)
    assert put(partition, batch(1, value=b"acknowledged later")).is_duplicate
    partition.flush()
    point = partition.recovery_point
    assert point == 2
    for seed in range(8):
        again = open_partition(disk.after_power_loss(Random(seed)), recovery_point=point)
        assert b"acknowledged later" in read_all(again)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**9))
def test_flushed_records_survive_failed_syncs_restarts_and_power_losses(seed: int) -> None:
    draw, disk = Random(seed), MemoryDisk()
    partition, sequence, point, sure = open_partition(disk, SMALL), 0, 0, b""
    aborted: list[tuple[int, ...]] = []
    for _ in range(40):
        match draw.randrange(6):
            case 0:
                disk.errors = {("sync", draw.choice((".log", "index", "checkpoint", ".metadata"))): errno.EIO}
            case 1:
                disk.errors = {}
            case 2:
                partition.abandon()
                disk = disk.after_kill() if draw.random() < 0.6 else disk.after_power_loss(draw)
                partition = open_partition(disk, SMALL, recovery_point=point)
                assert read_all(partition).startswith(sure)
                assert not [report for report in partition.recovery_warnings if "damaged" in report]
                sequence = sequence_of(partition)
            case 3 if not partition.is_offline:
                try:
                    partition.flush()
                except KafkaStorageError:
                    continue
                point, sure = partition.recovery_point, read_all(partition)
                aborted = aborted_below(partition, point)
            case _ if not partition.is_offline:
                put(partition, batch(sequence, value=bytes(draw.randrange(80)), is_transactional=True))
                sequence += 1
                if draw.random() < 0.5:
                    put_marker(partition, marker(7, commit=draw.random() < 0.5))
    partition.abandon()
    last = open_partition(disk.after_power_loss(draw), SMALL, recovery_point=point)
    assert read_all(last).startswith(sure)
    assert aborted_below(last, point) == aborted


def aborted_below(partition: Partition, offset: int) -> list[tuple[int, ...]]:
    entries = partition.aborted_transactions(0, offset)
    return [tuple(entry[:3]) for entry in entries if entry.last_offset < offset]


def sequence_of(partition: Partition) -> int:
    known = [state.entry.batches[-1].last_sequence for state in partition.describe_producers()]
    return (known[0] or 0) + 1 if known else 0


def test_the_real_disk_writes_again_what_is_there(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    content = bytes(range(256)) * 9_000  # longer than two of the chunks that `rewrite` writes
    disk.replace("file", content)
    file = disk.open("file")
    file.rewrite(100, len(content) + 1_000)
    assert disk.read("file") == content
    file.close()
    file.rewrite(0, 10)


def test_records_without_a_timestamp_are_kept_as_long_as_their_file_is_young() -> None:
    """The age of such a record is that of the segment's file, as in Kafka's LogSegment.largestTimestamp."""
    disk, now = MemoryDisk(), [NOW_MS]
    disk.now_ms = lambda: now[0]
    partition = open_partition(disk, config(segment_bytes=500, retention_ms=7 * 86_400_000))
    for number in range(12):
        put(partition, batch(number, value=bytes(50), timestamp_ms=-1))
    assert partition.segment_count > 2
    partition.flush()
    assert partition.enforce_retention(NOW_MS + 7 * 86_400_000) == 0
    assert partition.enforce_retention(NOW_MS + 7 * 86_400_000 + 1) > 0
    assert partition.log_start_offset == 12


def test_the_real_disk_knows_when_a_file_was_written(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.replace("file", b"x")
    assert disk.modified_ms("file") == int((tmp_path / "file").stat().st_mtime * 1_000)


@pytest.mark.parametrize("work", ["retention", "snapshot", "compaction"])
def test_a_directory_that_cannot_be_synced_takes_the_partition_offline(work: str) -> None:
    """A later sync of the directory would succeed, although the names that the failed sync should have stored
    are lost.
    """
    disk, policy = MemoryDisk(), "compact" if work == "compaction" else "delete"
    log_config = config(segment_bytes=500, cleanup_policy=policy)
    partition = open_partition(disk, log_config)
    for number in range(12):
        put(partition, batch(number, value=bytes(50)))
    partition.flush()
    disk.errors = {("sync", str(TP)): errno.EIO}
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    background = {
        "snapshot": partition._producers.snapshots.write(12, partition._producers.table.image()),
        "compaction": partition.cleaner.compact(dirty, NOW_MS),
    }
    with pytest.raises((OSError, KafkaStorageError)):
        run(background[work]) if work in background else partition.delete_records(8, NOW_MS)
    disk.errors = {}
    assert partition.is_offline
    for use in (
        partition.flush,
        lambda: put(partition, batch(12)),
        lambda: partition.delete_records(12, NOW_MS),
    ):
        with pytest.raises(KafkaStorageError, match="a sync failed"):
            use()
    names = disk.list(str(TP))
    assert partition.enforce_retention(NOW_MS) == 0
    assert disk.list(str(TP)) == names
    # The files of dropped segments are still there under new names. A power loss may undo the renames, so the
    # next start must find all files.
    assert any(name.endswith(".deleted") for name in names) is (work == "retention")
    again = open_partition(disk.after_kill(), log_config, recovery_point=12)
    assert (again.log_end_offset, again.is_offline) == (12, False)
