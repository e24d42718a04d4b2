"""The data directory: lock, ids, checkpoints, deletion, clean and unclean stops."""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from support.log.partitions import NOW_MS, TOPIC_ID, TP, batch, config, marker, put, put_marker, read_all

from oncelog.errors import KafkaStorageError, MisuseError, StorageError
from oncelog.log.background import BackgroundTask
from oncelog.log.checkpoint import (
    CLEANED_OFFSETS,
    INDEX_STARTS,
    INDEXED_OFFSETS,
    LOG_STARTS,
    RECOVERY_POINTS,
    encode_offsets,
    read_offsets,
)
from oncelog.log.cleaner import Compaction, SegmentSwapper
from oncelog.log.contents import CONTENTS
from oncelog.log.disk import Disk
from oncelog.log.manager import CLEAN_SHUTDOWN, LogManager
from oncelog.log.partition import Partition
from oncelog.log.segment import Segment
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Compression, TopicPartition
from oncelog.wire.batch import HEADER_BYTES, iter_batches
from oncelog.wire.compression import compress
from oncelog.wire.header import write_crc

_COUNTER = itertools.count(1)


def _uuid() -> bytes:
    return next(_COUNTER).to_bytes(16, "big")


def _open(disk: Disk, **how: object) -> LogManager:
    return LogManager.open(disk, **{"node_id": 1, "new_uuid": _uuid, "now_ms": NOW_MS, **how})


def test_the_cluster_id_and_the_directory_id_are_kept() -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    known = (manager.cluster_id, manager.directory_id)
    manager.close(NOW_MS)
    again = _open(disk)
    assert (again.cluster_id, again.directory_id, len(known[0])) == (*known, 22)
    again.release()
    with pytest.raises(StorageError, match=r"node\.id=1, but the setting is 2"):
        _open(disk, node_id=2)
    with pytest.raises(StorageError, match=r"cluster\.id"):
        _open(disk, cluster_id="other")
    assert _open(disk, cluster_id=known[0]).node_id == 1


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_new_partition_begins_at_0_beside_checkpoints_of_a_missing_one(is_killed: bool) -> None:
    """The checkpoints of a deleted topic must not decide the first offset of a new topic of the same name."""
    disk = MemoryDisk()
    _open(disk).close(NOW_MS)
    kept = TopicPartition("__cluster_metadata", 0)
    disk.mkdir(str(kept))
    for path in (RECOVERY_POINTS, LOG_STARTS, CLEANED_OFFSETS):
        disk.replace(path, encode_offsets({TP: 12, kept: 7}))
    manager = _open(disk)
    manager.forget_missing_partitions()
    if is_killed:
        manager.release()
        manager = _open(disk.after_kill())
    partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    assert (partition.log_start_offset, partition.log_end_offset) == (0, 0)
    assert read_offsets(disk, RECOVERY_POINTS) == {kept: 7}


def test_a_gap_in_a_compacted_log_is_no_loss_after_a_change_of_its_policy() -> None:
    """Regression: a power loss took the end of a segment of a compacted log, and the start kept the later
    ones. The policy became delete before the next checkpoint. After a kill, the start took the gap for a
    loss, and removed all later records, including synced ones.
    """
    disk = MemoryDisk()
    fields = {"segment_bytes": 300, "index_interval_bytes": 50}
    manager = _open(disk)
    partition = manager.open_partition(TP, config(**fields, cleanup_policy="compact"), TOPIC_ID, NOW_MS)
    while partition.segment_count < 4:
        put(partition, batch(partition.log_end_offset, key=b"k"))
    second = list(partition.log.segments)[1]
    manager.release()
    disk = disk.after_kill()
    (*_, (position, _)) = iter_batches(memoryview(disk.read(second.log_path)))
    disk.open(second.log_path).truncate(position)
    manager = _open(disk)
    partition = manager.open_partition(TP, config(**fields, cleanup_policy="compact"), TOPIC_ID, NOW_MS)
    manager.forget_missing_partitions()
    put(partition, batch(partition.log_end_offset, key=b"k"))
    partition.flush()
    stored = read_all(partition)
    manager.release()
    manager = _open(disk.after_kill())
    again = manager.open_partition(TP, config(**fields), TOPIC_ID, NOW_MS)
    assert read_all(again) == stored


def _after_a_lost_end() -> MemoryDisk:
    """Return a disk after a power loss: only the first batch survived, and a snapshot that includes three."""
    disk = MemoryDisk()
    manager = _open(disk)
    partition = manager.open_partition(TP, config(segment_bytes=3 * len(batch())), TOPIC_ID, NOW_MS)
    for number in range(4):
        put(partition, batch(number))
    manager.release()
    disk = disk.after_kill()
    disk.open(f"{TP}/{0:020d}.log").truncate(len(batch()))
    for directory in ("", str(TP)):
        for name in disk.list(directory):
            if not disk.is_directory(name):
                disk.open(f"{directory}/{name}".lstrip("/")).sync()
        disk.sync_directory(directory)
    return disk


def test_a_power_loss_brings_no_file_back_that_an_interrupted_start_removed() -> None:
    """Regression: a start removed a segment and a snapshot above the log end, and was killed before it synced
    the removal. The next start did not see them, and the log grew past them. A second power loss brought
    them back, and the snapshot replaced the state of newer batches. A retry was stored twice.
    """
    for crash_after in itertools.count():
        disk = _after_a_lost_end()
        disk.crash_after = crash_after
        try:
            _open(disk).open_partition(TP, config(), TOPIC_ID, NOW_MS)
            break
        except SimulatedCrash:
            disk = disk.after_kill()
        manager = _open(disk)
        partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
        manager.forget_last_stop()
        assert partition.log_end_offset == 1
        for pid in range(1, 5):
            put(partition, batch(0, pid=10 + pid))
        for seed in range(12):
            again = _open(disk.after_power_loss(Random(seed)))
            partition = again.open_partition(TP, config(), TOPIC_ID, NOW_MS)
            for offset in range(1, partition.log_end_offset):
                assert put(partition, batch(0, pid=10 + offset)).is_duplicate, f"{crash_after} {seed}"
    assert crash_after > 5


def test_a_disk_that_takes_no_new_file_does_not_prevent_a_start() -> None:
    """Regression: each start after a kill created a file, and was refused if the disk had no inode left."""
    disk = MemoryDisk()
    manager = _open(disk)
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch(0))
    manager.forget_last_stop()
    disk = disk.after_kill()
    disk.errors["create", ""] = errno.ENOSPC
    manager = _open(disk)
    assert put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch(0)).is_duplicate
    manager.forget_last_stop()


def test_a_lost_end_lowers_the_recovery_point_on_disk() -> None:
    """Flushed records survive this sequence: a lying disk loses synced records, the broker restarts, and then
    the power is lost.

    Regression: the restart kept the old recovery point. It treated new records below that point as synced, so
    they were never synced.
    """
    disk, log_config = MemoryDisk(), config(segment_bytes=300, index_interval_bytes=50)
    manager = _open(disk)
    partition = manager.open_partition(TP, log_config, TOPIC_ID, NOW_MS)
    for number in range(12):
        put(partition, batch(number))
    manager.close(NOW_MS)
    for name in disk.list(str(TP)):
        if name[:20].isdecimal() and int(name[:20]):
            disk.remove(f"{TP}/{name}")
    disk.sync_directory(str(TP))
    disk.remove(CONTENTS)
    manager = _open(disk)
    partition = manager.open_partition(TP, log_config, TOPIC_ID, NOW_MS)
    manager.forget_missing_partitions()
    assert 0 < partition.log_end_offset < 6
    while partition.log_end_offset < 9:
        put(partition, batch(partition.log_end_offset))
    disk = disk.after_kill()
    manager.release()
    manager = _open(disk)
    partition = manager.open_partition(TP, log_config, TOPIC_ID, NOW_MS)
    partition.flush()
    expected = read_all(partition)
    for seed in range(20):
        again = _open(disk.after_power_loss(Random(seed)))
        assert read_all(again.open_partition(TP, log_config, TOPIC_ID, NOW_MS)) == expected


@pytest.mark.parametrize("is_stopped", [False, True], ids=["deleted", "deletion-at-start"])
def test_a_deleted_partition_that_is_a_symbolic_link_stops_no_start(tmp_path: Path, is_stopped: bool) -> None:
    """An operator may move a large partition to another volume and leave a symbolic link. Its directory may
    also be a mount point.
    """
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    manager = _open(RealDisk(data))
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch())
    manager.close(NOW_MS)
    (data / str(TP)).rename(elsewhere)
    (elsewhere / "lost+found").mkdir()
    link = data / (f"{TP}.{bytes(16).hex()}-delete" if is_stopped else str(TP))
    link.symlink_to(elsewhere)
    manager = _open(RealDisk(data))
    if not is_stopped:
        partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
        assert partition.log_end_offset == 1
        manager.delete_partitions([TP])
    assert [path.name for path in data.iterdir() if path.is_symlink()] == []
    assert list(elsewhere.iterdir()) == []
    manager.close(NOW_MS)
    _open(RealDisk(data)).close(NOW_MS)


def test_a_link_to_a_volume_that_is_not_mounted_refuses_the_start_and_stays(tmp_path: Path) -> None:
    """Regression: the start removed the link, and the next start created an empty log."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    manager = _open(RealDisk(data))
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch())
    manager.close(NOW_MS)
    (data / str(TP)).rename(elsewhere)
    (data / str(TP)).symlink_to(elsewhere)
    elsewhere.rename(tmp_path / "unmounted")
    for _ in range(2):
        manager = _open(RealDisk(data))
        with pytest.raises(StorageError, match=f"{TP} is a symbolic link .* mount its volume"):
            manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
        manager.release()
    (tmp_path / "unmounted").rename(elsewhere)
    manager = _open(RealDisk(data))
    assert manager.open_partition(TP, config(), TOPIC_ID, NOW_MS).log_start_offset == 0
    manager.close(NOW_MS)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_directory_that_cannot_be_looked_at_for_a_moment_keeps_its_records(
    tmp_path: Path, error: int
) -> None:
    """Regression: the start mistook the directory for a missing one, failed to create it, and then removed
    it.
    """
    manager = _open(RealDisk(tmp_path))
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch())
    manager.close(NOW_MS)
    manager, stat = _open(RealDisk(tmp_path)), os.stat

    def refuse(path: Any, *args: Any, **keywords: Any) -> os.stat_result:
        if str(path).endswith(str(TP)):
            raise OSError(error, os.strerror(error), str(path))
        return stat(path, *args, **keywords)

    with patch("os.stat", refuse), pytest.raises(StorageError, match=f"{TP} cannot be opened"):
        manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    assert manager.open_partition(TP, config(), TOPIC_ID, NOW_MS).log_start_offset == 0
    manager.close(NOW_MS)


def test_a_meta_properties_file_without_ids_is_refused() -> None:
    disk = MemoryDisk()
    disk.replace("meta.properties", b"# comment\nversion=1\nnode.id=1\n")
    with pytest.raises(StorageError, match=r"lacks cluster\.id, directory\.id"):
        _open(disk)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    manager = _open(RealDisk(tmp_path))
    code = (
        "import sys\nfrom oncelog.server.disk import RealDisk\nfrom oncelog.log.manager import LogManager\n"
        "LogManager.open(RealDisk(sys.argv[1]), node_id=1, new_uuid=lambda: bytes(16), now_ms=0)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert refused.returncode == 1
    assert "StorageError" in refused.stderr and "in use by another process" in refused.stderr
    assert str(tmp_path) in refused.stderr
    manager.close(NOW_MS)
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_the_format_of_a_new_directory_is_marked() -> None:
    disk = MemoryDisk()
    _open(disk).close(NOW_MS)
    assert b"\noncelog.format.version=1\n" in disk.read("meta.properties")


def test_a_directory_without_the_mark_is_upgraded() -> None:
    """A meta.properties without Oncelog's key is from Apache Kafka or an old version.

    Its other lines are kept.
    """
    disk = MemoryDisk()
    kafka = b"#\n#Fri Nov 21\ncluster.id=abc\ndirectory.id=d\nnode.id=1\nversion=1\nother=x\n"
    disk.replace("meta.properties", kafka)
    manager = _open(disk)
    assert (manager.cluster_id, manager.directory_id) == ("abc", "d")
    upgraded = disk.read("meta.properties")
    assert set(upgraded.decode().splitlines()) == {
        *("cluster.id=abc", "directory.id=d", "node.id=1", "version=1", "other=x"),
        "oncelog.format.version=1",
    }
    manager.close(NOW_MS)
    _open(disk).release()
    assert disk.read("meta.properties") == upgraded


@pytest.mark.parametrize("key", ["version", "oncelog.format.version"])
def test_a_newer_format_is_refused_and_nothing_is_touched(key: str) -> None:
    disk = MemoryDisk()
    _open(disk).close(NOW_MS)
    properties = disk.read("meta.properties").decode()
    disk.replace("meta.properties", re.sub(rf"(?m)^{key}=1$", f"{key}=7", properties).encode())
    disk.mkdir("t-0.abc-delete")
    steps = disk.steps
    with pytest.raises(
        StorageError, match=rf"meta.properties contains {key}=7.* up to 1: a newer"
    ) as refused:
        _open(disk)
    assert "backup from before the upgrade" in str(refused.value)
    assert disk.steps == steps
    disk.replace("meta.properties", re.sub(rf"(?m)^{key}=1$", f"{key}=new", properties).encode())
    with pytest.raises(StorageError, match="which is not a version"):
        _open(disk)


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_partitions_are_opened_again_after_a_restart(clean: bool) -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    for number in range(5):
        put(partition, batch(number))
    partition.flush()
    partition.delete_records(2, NOW_MS)
    manager.write_checkpoints()
    put(partition, batch(5))
    if clean:
        manager.close(NOW_MS)
    disk = disk.after_kill()
    manager = _open(disk)
    assert manager.was_clean == clean
    assert not disk.exists(".kafka_cleanshutdown")
    assert manager.partition_directories() == [TP]
    assert manager.stored_topic_id(TP) == TOPIC_ID
    partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    ends = (partition.log_start_offset, partition.log_end_offset, partition.recovery_point)
    assert ends == (2, 6, 6 if clean else 5)
    assert put(partition, batch(5)).is_duplicate
    with pytest.raises(MisuseError):
        manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)


def test_checkpoint_files_are_written_and_read() -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    for number in (1, 0):
        put(manager.open_partition(TopicPartition("t", number), config(), TOPIC_ID, NOW_MS), batch())
    manager.write_checkpoints()
    assert disk.read("recovery-point-offset-checkpoint") == b"0\n2\nt 0 0\nt 1 0\n"
    assert disk.read("replication-offset-checkpoint") == b"0\n2\nt 0 1\nt 1 1\n"
    manager.close(NOW_MS)
    assert disk.read("recovery-point-offset-checkpoint") == b"0\n2\nt 0 1\nt 1 1\n"
    assert disk.read(".kafka_cleanshutdown").startswith(b'{"version":0')


def test_a_partition_that_is_not_opened_keeps_its_checkpoints() -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch())
    manager.close(NOW_MS)
    _open(disk).close(NOW_MS)
    assert disk.read("recovery-point-offset-checkpoint") == b"0\n1\norders 0 1\n"


@pytest.mark.behaviour("I16")
def test_a_topic_made_again_knows_nothing_of_the_old_one() -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch(0))
    manager.partitions[TP].flush()
    manager.partitions[TP].delete_records(None, NOW_MS)
    manager.write_checkpoints()
    manager.delete_partitions([TP])
    assert manager.partition_directories() == []
    partition = manager.open_partition(TP, config(), bytes(16), NOW_MS)
    assert (partition.log_start_offset, partition.producer_count) == (0, 0)
    assert put(partition, batch(0)).base_offset == 0
    manager = _open(disk.after_kill())
    partition = manager.open_partition(TP, config(), bytes(16), NOW_MS)
    assert (partition.log_start_offset, partition.log_end_offset) == (0, 1)


@pytest.mark.parametrize("is_deleted_by_a_start", [False, True])
def test_a_topic_made_again_is_compacted_as_a_new_one(is_deleted_by_a_start: bool) -> None:
    """Regression: if the last compacted topic was deleted, its offset stayed in cleaner-offset-checkpoint.
    After a restart, a new topic of this name counted as compacted up to that offset: older records of its
    keys stayed, and recovery took a gap in it for the work of compaction.
    """
    disk, compacted = MemoryDisk(), config(cleanup_policy="compact", segment_bytes=300)

    def filled(manager: LogManager, topic_id: bytes) -> Partition:
        partition = manager.open_partition(TP, compacted, topic_id, NOW_MS)
        for _ in range(20):
            put(partition, batch(key=b"k"))
        partition.flush()
        manager.write_checkpoints()
        return partition

    manager = _open(disk)
    filled(manager, TOPIC_ID)
    manager.compact(NOW_MS)
    assert read_offsets(disk, CLEANED_OFFSETS)[TP] > 10
    if is_deleted_by_a_start:
        manager.release()
        disk = disk.after_kill()
        disk.remove_tree(str(TP))
        manager = _open(disk)
        manager.forget_missing_partitions()
    else:
        manager.delete_partitions([TP])
    filled(manager, bytes(16))
    manager.release()
    disk = disk.after_kill()
    manager = _open(disk)
    partition = manager.open_partition(TP, compacted, bytes(16), NOW_MS)
    assert partition.cleaner.cleaned_to == 0
    manager.compact(NOW_MS)
    assert sum(header.records_count for _, header in iter_batches(memoryview(read_all(partition)))) < 10


def test_a_damaged_topic_id_is_an_error_that_names_the_file_and_what_to_do() -> None:
    """Found by the simulator (seed 76 with bit rot): a topic id with a flipped bit still has a valid form."""
    disk = MemoryDisk()
    manager = _open(disk)
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch(0))
    manager.close(NOW_MS)
    path = f"{TP}/partition.metadata"
    file = disk.open(path)
    file.pwrite(bytes([file.pread(1, 28)[0] ^ 1]), 28)
    manager = _open(disk)
    with pytest.raises(StorageError, match=r"orders-0/partition\.metadata.*remove the file.*topics\.json"):
        manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    disk.remove(path)
    assert manager.open_partition(TP, config(), TOPIC_ID, NOW_MS).log_end_offset == 1


def test_another_topic_of_the_same_name_is_noticed() -> None:
    manager = _open(MemoryDisk())
    manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    manager.partitions.clear()
    with pytest.raises(StorageError, match="another topic of the same name"):
        manager.open_partition(TP, config(), bytes(16), NOW_MS)


def test_a_stop_and_a_start_wait_for_few_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 17,000 deletions took minutes at a stop, so that systemd killed the broker, and minutes
    again at the start.
    """
    monkeypatch.setattr("oncelog.log.manager.MAX_PROMPT_DELETIONS", 3)
    disk = MemoryDisk()
    manager = _open(disk)
    doomed = [TopicPartition("t", number) for number in range(20)]
    for tp in doomed:
        manager.open_partition(tp, config(), TOPIC_ID, NOW_MS)
    manager.background.on_added = lambda: None
    for part in (doomed[:10], doomed[10:]):
        manager.delete_partitions(part)

    def left() -> int:
        return sum(name.endswith("-delete") for name in disk.list())

    assert left() == 20
    manager.close(NOW_MS)
    assert left() == 17
    manager = _open(disk)
    assert (manager.was_clean, left()) == (True, 14)
    manager.remove_deleted()
    assert left() == 0


@pytest.mark.parametrize("is_started", [True, False])
def test_a_directory_that_cannot_be_removed_does_not_keep_others(is_started: bool) -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    doomed = [TopicPartition("t", index) for index in range(3)]
    for tp in doomed:
        manager.open_partition(tp, config(), TOPIC_ID, NOW_MS)
    stuck = set[str]()
    remove_tree = disk.remove_tree

    def sticking(path: str) -> None:
        if path.startswith("t-0") or path in stuck:
            raise OSError(errno.EPERM, "held", path)
        remove_tree(path)

    disk.remove_tree = sticking  # type: ignore[method-assign]
    assert manager.delete_partitions(doomed) == {}
    left = [name for name in disk.list() if name.endswith("-delete")]
    assert len(left) == 1
    if is_started:
        manager.close(NOW_MS)
        manager = _open(disk)
        assert manager.was_clean
    disk.remove_tree = remove_tree  # type: ignore[method-assign]
    manager.remove_deleted()
    assert not [name for name in disk.list() if name.endswith("-delete")]


def test_a_deletion_survives_a_crash_at_every_step() -> None:
    def run(disk: MemoryDisk) -> None:
        manager = _open(disk)
        put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch(0))
        manager.write_checkpoints()
        manager.delete_partitions([TP])

    whole = MemoryDisk()
    run(whole)
    for step in range(whole.steps):
        disk = MemoryDisk()
        disk.crash_after = step
        with pytest.raises(SimulatedCrash):
            run(disk)
        manager = _open(disk.after_kill())
        names = manager.disk.list()
        assert not any(name.endswith("-delete") for name in names)
        partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
        assert put(partition, batch(0)).base_offset == 0
        manager.release()


def test_a_failing_close_leaves_no_marker_and_frees_the_lock() -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    put(manager.open_partition(TP, config(), TOPIC_ID, NOW_MS), batch(0))
    disk.errors = {("sync", ".log"): 5}
    with pytest.raises(KafkaStorageError):
        manager.close(NOW_MS)
    disk.errors = {}
    manager = _open(disk)
    assert not manager.was_clean
    assert manager.open_partition(TP, config(), TOPIC_ID, NOW_MS).log_end_offset == 1


def test_an_offline_partition_is_no_clean_stop() -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    put(partition, batch(0))
    disk.errors = {("sync", ".log"): 5}
    with pytest.raises(KafkaStorageError):
        partition.flush()
    disk.errors = {}
    assert partition.is_offline
    manager.close(NOW_MS)
    manager = _open(disk)
    assert not manager.was_clean
    assert manager.open_partition(TP, config(), TOPIC_ID, NOW_MS).recovery_point == 0


def test_an_index_that_an_older_version_compacted_is_looked_at_once() -> None:
    disk, settings = MemoryDisk(), config(cleanup_policy="compact", segment_bytes=400)
    looks: list[int] = []

    def opened(manager: LogManager) -> Partition:
        return manager.open_partition(TP, settings, TOPIC_ID, NOW_MS)

    def look(partition: Partition, cleaned_to: int) -> bool:
        looks.append(cleaned_to)
        return True

    with patch.object(Partition, "restore_aborted_index", look):
        manager = _open(disk)
        partition = opened(manager)
        for _ in range(30):
            put(partition, batch())
        partition.flush()
        manager.write_checkpoints()
        manager.compact(NOW_MS)
        cleaned_to = partition.cleaner.cleaned_to
        assert cleaned_to > 20
        manager.close(NOW_MS)
        manager = _open(disk)
        opened(manager)
        assert looks == [], "this version keeps the entries"
        manager.close(NOW_MS)
        disk.remove("oncelog-txnindex-checkpoint")  # version 0.4.1 writes no such checkpoint
        for _ in range(2):
            manager = _open(disk)
            opened(manager)
            manager.write_checkpoints()
            manager.release()
            assert looks == [cleaned_to]


def test_a_full_disk_refuses_no_start_that_restores_lost_index_entries() -> None:
    """Readers use the entries in memory, and the next start restores them again."""
    disk, settings = MemoryDisk(), config(cleanup_policy="compact", segment_bytes=300)
    manager = _open(disk)
    partition = manager.open_partition(TP, settings, TOPIC_ID, NOW_MS)
    for number in range(4):
        put(partition, batch(number, pid=7, key=b"k%d" % number, is_transactional=True))
        put_marker(partition, marker(7, commit=False))
    for _ in range(6):
        put(partition, batch(key=b"z"))
    expected = sorted(partition.aborted_transactions(0, 99))
    manager.close(NOW_MS)
    for name in disk.list(str(TP)):
        if name.endswith(".txnindex"):
            disk.remove(f"{TP}/{name}")
    disk.replace(CLEANED_OFFSETS, encode_offsets({TP: 8}))
    for path in (INDEXED_OFFSETS, INDEX_STARTS, CONTENTS):
        disk.remove(path)
    disk.replace(CLEAN_SHUTDOWN, b'{"version":0,"brokerEpoch":-1}')
    for is_full, count in ((True, 4), (True, 4), (False, 4), (False, 0)):
        disk.errors = {("replace", ".txnindex"): errno.ENOSPC} if is_full else {}
        manager = _open(disk)
        partition = manager.open_partition(TP, settings, TOPIC_ID, NOW_MS)
        found = [entry[:3] for entry in sorted(partition.aborted_transactions(0, 99))]
        assert found == [entry[:3] for entry in expected]
        reports = partition.recovery_warnings
        assert len(reports) == (count > 0)
        assert all("lacked 4 aborted transactions" in text for text in reports)
        assert any("make room" in text for text in reports) is is_full
        manager.close(NOW_MS)


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stop", "kill"])
def test_a_lost_index_of_aborted_transactions_shows_nothing_to_readers(is_stopped: bool) -> None:
    disk = MemoryDisk()
    manager = _open(disk)
    partition = manager.open_partition(TP, config(), TOPIC_ID, NOW_MS)
    put(partition, batch(0, pid=1, is_transactional=True))
    put_marker(partition, marker(1, commit=False))
    put(partition, batch())
    partition.flush()
    expected = partition.aborted_transactions(0, 9)
    if is_stopped:
        manager.close(NOW_MS)
    else:
        manager.write_checkpoints()
        manager.release()
    disk.remove(f"{TP}/{0:020d}.txnindex")
    again = _open(disk.after_kill()).open_partition(TP, config(), TOPIC_ID, NOW_MS)
    assert len(expected) == 1 and again.aborted_transactions(0, 9) == expected


def test_a_partition_that_cannot_be_compacted_does_not_stop_others() -> None:
    """Regression: any error in one partition, even a bug, ended the round for all partitions after it."""
    log_config = config(cleanup_policy="compact", segment_bytes=300, min_cleanable_dirty_ratio="0.1")
    manager = _open(MemoryDisk())
    names = (TP, TopicPartition(TP.topic, 1))
    partitions = [manager.open_partition(tp, log_config, TOPIC_ID, NOW_MS) for tp in names]
    for partition in partitions:
        for number in range(20):
            put(partition, batch(number))
        partition.flush()
    run = Compaction.run

    def failing(compaction: Compaction) -> BackgroundTask:
        if compaction._log is partitions[0].log:
            raise ValueError("a fault of ours")
        yield from run(compaction)

    with patch.object(Compaction, "run", failing), pytest.raises(KafkaStorageError, match="a fault of ours"):
        manager.compact(NOW_MS)
    assert [partition.cleaner.cleaned_to > 0 for partition in partitions] == [False, True]
    manager.compact(NOW_MS)
    assert partitions[0].cleaner.cleaned_to == 0, "it is not tried again before a restart"


def test_partitions_that_cannot_be_compacted_keep_none_of_what_they_read() -> None:
    """Regression: the round kept the error of each partition, and each error referred to a decompressed batch
    of up to 256 MB.
    """
    opened_bytes = 8 << 20
    unreadable = bytearray(batch(count=2, value=bytes(opened_bytes), compression=Compression.ZSTD))
    unreadable[HEADER_BYTES:] = compress(Compression.ZSTD, bytes(opened_bytes))
    unreadable[8:12] = (len(unreadable) - 12).to_bytes(4, "big")
    write_crc(unreadable, 0, len(unreadable))
    manager = _open(MemoryDisk())
    for number in range(4):
        partition = manager.open_partition(TopicPartition("t", number), config(), TOPIC_ID, NOW_MS)
        put(partition, memoryview(unreadable))
        partition.log.roll(NOW_MS)
        put(partition, batch())
        partition.flush()
        partition.reconfigure(config(cleanup_policy="compact", min_cleanable_dirty_ratio=0))
    tracemalloc.start()
    try:
        with pytest.raises(KafkaStorageError, match="INVALID_RECORD") as raised:
            manager.compact(NOW_MS)
        assert tracemalloc.get_traced_memory()[0] < opened_bytes
    finally:
        tracemalloc.stop()
    assert raised.value.__cause__ is not None


_FIRST_LOG = f"{0:020d}.log"


@pytest.mark.parametrize("then", ["round", "other policy", "kill", "stop"])
@pytest.mark.parametrize(
    "call", [("remove", _FIRST_LOG), ("rename", ".log.swap"), ("rename", ".timeindex.swap")], ids=str
)
def test_a_swap_that_fails_for_a_moment_is_finished_by_the_next_round(
    call: tuple[str, str], then: str
) -> None:
    """Regression: after a failure such as too many open files, the partition was offline until a restart."""
    disk = MemoryDisk()
    settings = {"segment_bytes": 300, "index_interval_bytes": 50, "min_cleanable_dirty_ratio": "0.1"}
    compacted = config(cleanup_policy="compact", **settings)
    manager = _open(disk)
    partition = manager.open_partition(TP, compacted, TOPIC_ID, NOW_MS)
    for number in range(20):
        put(partition, batch(number))
    partition.flush()
    disk.errors[call] = errno.EMFILE
    with pytest.raises(KafkaStorageError, match="compaction failed"):
        manager.compact(NOW_MS)
    put(partition, batch(20))
    assert partition.read(0, 1 << 20).records and not partition.is_offline
    assert partition.enforce_retention(NOW_MS) == 0
    with pytest.raises(KafkaStorageError, match="compaction failed"):
        manager.compact(NOW_MS)
    disk.errors.clear()
    before = partition.size_bytes
    if then in ("round", "other policy"):
        partition.reconfigure(compacted if then == "round" else config(**settings))
        manager.compact(NOW_MS)
        assert partition.size_bytes < before and not partition.cleaner.has_unfinished_swap
        put(partition, batch(21))
    expected = partition.log_end_offset
    if then == "kill":
        disk = disk.after_kill()
    else:
        manager.close(NOW_MS)
    partition = _open(disk).open_partition(TP, compacted, TOPIC_ID, NOW_MS)
    assert partition.log_end_offset == expected and len(read_all(partition)) < 20 * len(batch())
    assert not [name for name in disk.list(str(TP)) if name.endswith((".swap", ".cleaned"))]
    assert partition.recovery_warnings == []


def test_a_swap_that_cannot_begin_leaves_nothing_to_swap_in() -> None:
    """Regression: the left-over `.swap` file replaced newer content of the segments at the next start."""
    disk, compacted = MemoryDisk(), config(cleanup_policy="compact", segment_bytes=300)
    manager = _open(disk)
    partition = manager.open_partition(TP, compacted, TOPIC_ID, NOW_MS)
    for number in range(20):
        put(partition, batch(number))
    partition.flush()
    failing = patch.object(SegmentSwapper, "begin", side_effect=OSError(errno.EMFILE, "too many open files"))
    with failing, pytest.raises(KafkaStorageError, match="too many open files"):
        manager.compact(NOW_MS)
    assert not [name for name in disk.list(str(TP)) if name.endswith((".swap", ".cleaned"))]


@pytest.mark.parametrize("then", ["kill", "stop"])
def test_a_segment_of_a_failed_swap_does_not_come_back_beside_newer_ones(then: str) -> None:
    """Regression: a later round merged two segments, and then a start added the left-over segment of the
    failed swap to the log.
    """
    disk = MemoryDisk()
    settings = {"cleanup_policy": "compact", "index_interval_bytes": 50, "min_cleanable_dirty_ratio": 0.01}
    small, large = (config(segment_bytes=size_bytes, **settings) for size_bytes in (300, 3000))
    manager = _open(disk)
    partition = manager.open_partition(TP, small, TOPIC_ID, NOW_MS)
    for number in range(12):
        put(partition, batch(number, key=b"k%d" % number))
    partition.flush()
    # The disk fails for a moment: one swap cannot begin, and its new segment cannot be removed.
    begin_swap = SegmentSwapper.begin

    def fail(self: SegmentSwapper, segments: list[Segment]) -> None:
        if segments[0].base_offset:
            disk.errors["rename", ".log.swap"] = errno.EIO
            raise OSError(errno.EIO, "an input/output error")
        begin_swap(self, segments)

    with (
        patch.object(SegmentSwapper, "begin", fail),
        pytest.raises(KafkaStorageError, match="compaction failed"),
    ):
        manager.compact(NOW_MS)
    disk.errors.clear()
    partition.reconfigure(large)
    manager.compact(NOW_MS)
    expected = read_all(partition)
    if then == "kill":
        disk = disk.after_kill()
    else:
        manager.close(NOW_MS)
    partition = _open(disk).open_partition(TP, large, TOPIC_ID, NOW_MS)
    assert read_all(partition) == expected
    assert partition.recovery_warnings == []


def test_a_partition_is_closed_though_an_unfinished_snapshot_cannot_be_removed() -> None:
    """Regression: the error kept a stop from closing the other partitions, and a deletion from closing the
    files.
    """
    disk, other = MemoryDisk(), TopicPartition("other", 0)
    manager = _open(disk)
    manager.background.on_added = lambda: None
    partitions = [manager.open_partition(tp, config(), TOPIC_ID, NOW_MS) for tp in (TP, other)]
    for partition in partitions:
        put(partition, batch(0, pid=1))
        partition.log.roll(NOW_MS)
    while not all(any(name.endswith(".tmp") for name in disk.list(str(tp))) for tp in (TP, other)):
        manager.background.step()
    disk.errors["remove", ".tmp"] = errno.EIO
    manager.close(NOW_MS)
    assert all(partition.is_closed for partition in partitions)
    disk.errors.clear()
    disk.after_kill()
    assert _open(disk).was_clean
