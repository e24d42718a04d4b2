"""A conformance suite for both disks, and partitions on a full or broken disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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

from oncelog.errors import InvalidRecord, KafkaStorageError
from oncelog.log.disk import Disk
from oncelog.log.partition import Partition
from oncelog.server.disk import RealDisk, RealFile
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash


@pytest.fixture(params=["real", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return RealDisk(tmp_path / "data") if request.param == "real" else MemoryDisk()


def test_files_are_read_and_written_at_positions(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.pwrite(b"hello", 0)
    file.pwrite(memoryview(b"XY"), 3)
    file.pwrite(bytearray(b"!"), 7)
    assert (file.size(), file.pread(100, 0), file.pread(2, 3), file.pread(5, 8)) == (
        8,
        b"helXY\0\0!",
        b"XY",
        b"",
    )
    file.truncate(2)
    file.truncate(3)
    assert disk.read("a") == b"he\0"
    file.release_handle()
    assert (file.size(), file.pread(9, 0)) == (3, b"he\0")
    file.release_handle()
    file.release_handle()
    file.pwrite(b"llo", 2)
    assert disk.read("a") == b"hello"
    file.release_handle()
    file.truncate(3)
    file.release_handle()
    file.sync()
    file.close()
    file.close()
    with pytest.raises(OSError):
        file.pread(1, 0)
    assert disk.open("a").size() == 3


def test_a_released_file_is_opened_again_by_its_name(disk: Disk) -> None:
    for name in ("replaced", "removed", "renamed", "open"):
        file = disk.open(name, create=True)
        file.pwrite(b"old", 0)
        file.close()
    replaced, removed, renamed, opened = map(disk.open, ("replaced", "removed", "renamed", "open"))
    for file in (removed, renamed, opened):
        assert file.pread(3, 0) == b"old"
    removed.release_handle()
    renamed.release_handle()
    disk.replace("replaced", b"newer")
    disk.replace("open", b"newer")
    disk.remove("removed")
    disk.rename("renamed", "elsewhere")
    assert (replaced.size(), replaced.pread(9, 0)) == (5, b"newer"), "opened at its first use"
    assert (opened.size(), opened.pread(9, 0)) == (3, b"old")
    opened.release_handle()
    assert (opened.size(), opened.pread(9, 0)) == (5, b"newer")
    for file in (removed, renamed):
        calls: list[Callable[[], object]] = [
            file.size,
            file.sync,
            partial(file.pread, 1, 0),
            partial(file.pwrite, b"x", 0),
            partial(file.truncate, 0),
            partial(file.rewrite, 0, 1),
        ]
        for call in calls:
            with pytest.raises(FileNotFoundError):
                call()
        file.release_handle()
        file.close()
        file.release_handle()
        file.sync()
    replaced.pwrite(b"N", 0)
    assert (disk.read("replaced"), disk.list()) == (b"Newer", ["elsewhere", "open", "replaced"])
    replaced.close()
    opened.close()


def test_a_handle_whose_close_fails_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may report an error when a file is closed. The descriptor is closed nevertheless,
    and the next file gets its number.
    """
    disk, close = RealDisk(tmp_path), os.close
    file = disk.open("one", create=True)
    file.pwrite(b"1", 0)

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file.release_handle()
    other = disk.open("two", create=True)
    file.pwrite(b"11", 0)
    file.release_handle()
    other.pwrite(b"2", 0)
    assert (disk.read("one"), disk.read("two")) == (b"11", b"2")
    file.close()
    other.close()


def test_files_and_directories_are_listed_renamed_and_removed(disk: Disk) -> None:
    assert disk.list() == []
    disk.mkdir("d")
    disk.open("d/x", create=True).close()
    disk.replace("d/y", b"1")
    disk.replace("d/y", b"22", sync=False)
    assert (disk.list("d"), disk.read("d/y"), disk.list()) == (["x", "y"], b"22", ["d"])
    assert (disk.exists("d/x"), disk.exists("d"), disk.exists("e")) == (True, True, False)
    assert (disk.is_directory("d"), disk.is_directory("d/x")) == (True, False)
    disk.rename("d", "e")
    assert disk.list("e") == ["x", "y"]
    disk.remove("e/x")
    disk.sync_directory("e")
    disk.remove_tree("e")
    assert disk.list() == []


def test_missing_files_raise_file_not_found_error(disk: Disk) -> None:
    calls: list[Callable[[], object]] = [
        lambda: disk.open("a"),
        lambda: disk.read("a"),
        lambda: disk.remove("a"),
        lambda: disk.list("a"),
        lambda: disk.open("no/a", create=True),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call()
    disk.mkdir("d")
    with pytest.raises(FileExistsError):
        disk.mkdir("d")


def test_a_lock_excludes_another_holder(disk: Disk) -> None:
    held = disk.lock(".lock")
    with pytest.raises(BlockingIOError):
        disk.lock(".lock")
    held.release()
    held.release()
    disk.lock(".lock").release()
    total, usable = disk.volume()
    assert 0 < usable <= total


def test_real_files_close_while_another_thread_syncs(tmp_path: Path) -> None:
    file = RealDisk(tmp_path).open("a", create=True)
    failures: list[Exception] = []

    def sync() -> None:
        try:
            for _ in range(200):
                file.sync()
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    file.close()
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert failures == []


def test_closing_a_file_does_not_wait_for_its_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop closes files of deleted topics, while a thread may be syncing gigabytes of them."""
    has_begun, may_end, was_valid = threading.Event(), threading.Event(), []

    def slow_sync(fd: int) -> None:
        has_begun.set()
        assert may_end.wait(60)
        was_valid.append(os.fstat(fd).st_ino == inode)

    monkeypatch.setattr("oncelog.server.disk._fdatasync", slow_sync)
    file = RealDisk(tmp_path).open("file", create=True)
    file.pwrite(b"a", 0)
    inode, before = (tmp_path / "file").stat().st_ino, len(os.listdir("/dev/fd"))
    syncing = threading.Thread(target=file.sync)
    syncing.start()
    assert has_begun.wait(60)
    file.release_handle()
    file.close()  # returns before the sync has ended
    with pytest.raises(OSError):
        file.pread(1, 0)
    # The descriptor must stay open for the sync, so that no other file gets its number.
    others = [os.open(tmp_path / "file", os.O_RDONLY) for _ in range(3)]
    may_end.set()
    syncing.join(60)
    for other in others:
        os.close(other)
    assert was_valid == [True]
    assert len(os.listdir("/dev/fd")) == before - 1


def test_memory_disk_loses_only_what_was_not_synced() -> None:
    fates = set()
    for seed in range(40):
        disk = MemoryDisk()
        file = disk.open("a", create=True)
        file.pwrite(b"sure", 0)
        file.sync()
        disk.sync_directory()
        file.pwrite(b"maybe", 4)
        left = disk.after_power_loss(Random(seed)).read("a")
        assert left.startswith(b"sure") and len(left) <= 9
        fates.add(left)
        assert disk.after_kill().read("a") == b"suremaybe"
    assert {b"sure", b"suremaybe"} < fates


def test_memory_disk_is_dead_after_a_crash() -> None:
    disk = MemoryDisk()
    file = disk.open("a", create=True)
    disk.crash_after = disk.steps + 2
    with pytest.raises(SimulatedCrash):
        file.pwrite(b"abc", 0)
    with pytest.raises(SimulatedCrash):
        disk.open("b", create=True)
    assert disk.after_kill().read("a") == b"ab"


SMALL = config(segment_bytes=400, index_interval_bytes=0)


@pytest.mark.behaviour("I7", "I17")
def test_a_full_disk_refuses_and_recovers_at_any_point() -> None:
    for room in range(0, 700, 3):
        disk = MemoryDisk()
        partition = open_partition(disk, SMALL)
        for number in range(3):
            put(partition, batch(number))
        disk.capacity_bytes = disk.used_bytes() + room
        acknowledged = _put_until_full(partition, 3)
        before = read_all(partition)
        for _ in range(3):
            with pytest.raises(KafkaStorageError, match=r"ENOSPC|No space left"):
                put(partition, batch(acknowledged))
        assert (partition.log_end_offset, read_all(partition)) == (acknowledged, before)
        _restart_equals(disk, partition.describe_producers(), before)
        disk.capacity_bytes = None
        assert put(partition, batch(acknowledged - 1)).is_duplicate
        assert put(partition, batch(acknowledged)).base_offset == acknowledged
        _restart_equals(disk, partition.describe_producers(), read_all(partition))


def test_the_bytes_of_a_failed_write_are_not_accepted_again() -> None:
    """The broker stamps the base offset into the caller's bytes before the write. So a retry must not write
    the same bytes.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0))
    data = memoryview(bytearray(batch(1)))
    disk.errors = {("write", ".log"): errno.ENOSPC}
    with pytest.raises(KafkaStorageError):
        put(partition, data)
    disk.errors = {}
    with pytest.raises(InvalidRecord, match="must be 0, not 1"):
        put(partition, data)
    assert put(partition, batch(1)).base_offset == 1


def _put_until_full(partition: Partition, acknowledged: int) -> int:
    for _ in range(20):
        try:
            put(partition, batch(acknowledged))
        except KafkaStorageError:
            return acknowledged
        acknowledged += 1
    raise AssertionError("the disk never got full")


def _restart_equals(disk: MemoryDisk, producers: object, data: bytes) -> None:
    again = open_partition(disk.after_kill(), SMALL)
    assert (again.describe_producers(), read_all(again)) == (producers, data)


def test_a_write_error_leaves_the_partition_usable() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    put(partition, batch(0))
    disk.errors = {("write", ".log"): errno.EIO, ("truncate", ".log"): errno.EIO}
    with pytest.raises(KafkaStorageError, match="position"):
        put(partition, batch(1))
    disk.errors = {}
    assert put(partition, batch(1)).base_offset == 1
    assert len(read_all(partition)) == partition.size_bytes


@pytest.mark.parametrize("operation", ["create", "write"])
def test_a_failing_roll_changes_nothing(operation: str) -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(5):
        put(partition, batch(number))
    suffix = {"create": ".log", "write": ".index"}[operation]
    disk.errors = {(operation, suffix): errno.ENOSPC}
    with pytest.raises(KafkaStorageError):
        put(partition, batch(5))
    assert (partition.segment_count, partition.log_end_offset) == (1, 5)
    disk.errors = {}
    assert put(partition, batch(5)).base_offset == 5
    assert partition.segment_count == 2


def test_a_failed_sync_takes_the_partition_offline() -> None:
    """After a failed sync, the operating system may drop the unsynced pages. Later syncs would succeed
    without writing them.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    put(partition, batch(0))
    disk.errors = {("sync", ".log"): errno.EIO}
    with pytest.raises(KafkaStorageError):
        partition.flush()
    disk.errors = {}
    assert (partition.recovery_point, partition.unflushed_record_count) == (0, 1)
    with pytest.raises(KafkaStorageError, match="offline"):
        put(partition, batch(1))
    with pytest.raises(KafkaStorageError, match="offline"):
        partition.flush()
    assert len(partition.read(0, 100).records) == partition.size_bytes
    partition.close(NOW_MS)
    again = open_partition(disk.after_kill(), SMALL)
    assert put(again, batch(1)).base_offset == 1


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("operation", ["create", "write"])
def test_an_index_that_cannot_be_written_takes_nothing_offline(operation: str) -> None:
    """No sync failed, so the partition stays online, and the next flush makes the log and the index
    durable.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    disk.sync_directory()
    put(partition, batch(0, is_transactional=True))
    put_marker(partition, marker(7, commit=False))
    if operation == "create":
        # The file is missing, as in a directory that Apache Kafka wrote.
        disk.remove(f"{TP}/{0:020d}.txnindex")
    disk.errors = {(operation, ".txnindex"): errno.ENOSPC}
    with pytest.raises(KafkaStorageError, match="cannot be flushed"):
        partition.flush()
    assert (partition.is_offline, partition.recovery_point) == (False, 0)
    assert put(partition, batch(1)).base_offset == 2
    disk.errors = {}
    partition.flush()
    assert partition.recovery_point == 3
    for seed in range(20):
        again = open_partition(disk.after_power_loss(Random(seed)), SMALL, recovery_point=3)
        assert again.aborted_transactions(0, 3) == partition.aborted_transactions(0, 3) != []
        assert again.log_end_offset == 3


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("room", [0, 31, 33, 34, 100, 4096, 8704, 8710])
def test_a_clean_stop_leaves_no_zeros(room: int, is_rolled: bool) -> None:
    """On a full disk, only a part of the index of aborted transactions can be reserved, or the marker is
    refused.

    The stop must leave no zeros at the end: Apache Kafka would read them as an aborted transaction of
    producer 0.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0, is_transactional=True))
    partition.close(NOW_MS)
    partition = open_partition(disk, clean_shutdown=True)
    disk.capacity_bytes = disk.used_bytes() + room
    with pytest.raises(KafkaStorageError):
        put_marker(partition, marker(7, commit=False))
    disk.capacity_bytes = None
    if is_rolled:
        put_marker(partition, marker(7, commit=True))
        partition.log.roll(NOW_MS)
    partition.close(NOW_MS)
    assert disk.read(f"{TP}/{0:020d}.txnindex") == b""


@pytest.mark.parametrize("how", ["retention", "DeleteRecords"])
def test_deleting_makes_room_on_a_full_disk(how: str) -> None:
    disk = MemoryDisk()
    settings = config(segment_bytes=400, index_interval_bytes=0, retention_bytes=800)
    partition = open_partition(disk, settings)
    disk.capacity_bytes = 6000
    count = 0
    with suppress(KafkaStorageError):
        for count in range(1000):
            put(partition, batch(count))
    disk.capacity_bytes = disk.used_bytes()
    partition.flush()
    if how == "retention":
        partition.enforce_retention(NOW_MS)
    else:
        partition.delete_records(None, NOW_MS)
    assert disk.used_bytes() < 3000
    if how == "DeleteRecords":
        assert read_all(partition) == b""
    assert put(partition, batch(count)).base_offset == count
    _restart_equals(disk, partition.describe_producers(), read_all(partition))


def test_a_segment_that_cannot_be_made_holds_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = open_partition(RealDisk(tmp_path), SMALL)
    for number in range(5):
        put(partition, batch(number))
    real = RealDisk.open

    def exhausted(self: RealDisk, path: str, *, create: bool = False) -> RealFile:
        if path.endswith(("5.index", ".snapshot.tmp")):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self, path, create=create)

    with monkeypatch.context() as limited:
        limited.setattr(RealDisk, "open", exhausted)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        for _ in range(3):
            with pytest.raises(KafkaStorageError, match="Too many open files"):
                put(partition, batch(5))
        if before:
            assert len(os.listdir("/proc/self/fd")) == before
    assert put(partition, batch(5)).base_offset == 5
    partition.abandon()


def test_failing_reads_and_deletes_are_storage_errors() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(9):
        put(partition, batch(number))
    partition.flush()
    for failing in (("rename", ".log"), ("remove", ".deleted")):
        disk.errors = {failing: errno.EIO}
        with pytest.raises(KafkaStorageError):
            partition.delete_records(7, NOW_MS)
    partition.abandon()
    with pytest.raises(KafkaStorageError):
        partition.read(8, 100)


FULL_FILE = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from support.log.partitions import batch, config, open_partition, put, read_all
from oncelog.server.disk import RealDisk
from oncelog.errors import KafkaStorageError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
partition = open_partition(RealDisk(sys.argv[1]), config())
size = len(batch(0, value=bytes(100)))
for number in range(3):
    put(partition, batch(number, value=bytes(100)))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for extra in range(0, size, 7):
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * size + extra, hard))
    try:
        put(partition, batch(3, value=bytes(100)))
    except KafkaStorageError as error:
        assert "position" in str(error)
    else:
        raise AssertionError("stored beyond the limit")
    assert partition.log_end_offset == 3 and len(read_all(partition)) == 3 * size
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert put(partition, batch(3, value=bytes(100))).base_offset == 3
print("stored", partition.size_bytes == 4 * size)
"""


def test_a_real_file_that_cannot_grow(tmp_path: Path) -> None:
    helpers = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-E", "-c", FULL_FILE, str(tmp_path), helpers],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.strip() == "stored True", done.stderr[-2000:]
    partition = open_partition(RealDisk(tmp_path))
    assert (partition.log_end_offset, partition.recovery_warnings) == (4, [])
    partition.abandon()


def test_power_loss_after_a_cut_keeps_what_was_synced_before() -> None:
    """Found by the simulator: MemoryDisk, the simulated disk, lost the bytes before the cut."""
    for seed in range(50):
        disk = MemoryDisk()
        file = disk.open("log", create=True)
        disk.sync_directory()
        file.pwrite(b"decided" + b"torn", 0)
        file.sync()
        file.truncate(7)
        file.pwrite(b"next one", 7)
        assert disk.after_power_loss(Random(seed)).read("log").startswith(b"decided")


def test_a_kill_makes_no_name_durable() -> None:
    disk = MemoryDisk()
    disk.open("new", create=True).close()
    found = [disk.after_kill().after_power_loss(Random(seed)).exists("new") for seed in range(20)]
    assert True in found and False in found
