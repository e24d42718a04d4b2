"""A flush runs in a thread during appends, and closed segments are flushed after a time."""

from __future__ import annotations

import errno
import os
import struct
import threading
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

import oncelog.server.disk
from oncelog.broker.dispatch import tick
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import KafkaStorageError
from oncelog.log.manager import LogManager
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import TopicPartition
from oncelog.wire.header import write_crc

SMALL = config(segment_bytes=2000, index_interval_bytes=0)


def test_flushes_run_beside_appends_rolls_and_deletions(tmp_path: Path) -> None:
    partition = open_partition(RealDisk(tmp_path), SMALL)
    failures: list[BaseException] = []
    points: list[int] = []
    is_over = threading.Event()

    def flush() -> None:
        try:
            while not is_over.is_set():
                partition.flush()
                points.append(partition.recovery_point)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=flush)
    thread.start()
    for number in range(1500):
        put(partition, batch(number))
        if number % 400 == 399:
            partition.delete_records(number - 200, NOW_MS)
    is_over.set()
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert failures == []
    assert points == sorted(points)
    partition.flush()
    assert (partition.recovery_point, partition.unflushed_record_count) == (1500, 0)
    partition.abandon()
    again = open_partition(RealDisk(tmp_path), SMALL, log_start_offset=1399 - 200)
    assert (again.log_end_offset, again.recovery_warnings) == (1500, [])
    assert put(again, batch(1495)).is_duplicate
    again.abandon()


@pytest.mark.behaviour("I17")
def test_closed_segments_are_synced_so_that_recovery_stays_short() -> None:
    disk = MemoryDisk()
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: bytes(16), now_ms=NOW_MS)
    node = BrokerState(
        manager, BROKER.parse({"node.id": 1}), new_uuid=lambda: bytes(range(16)), now_ms=NOW_MS
    )
    node.topics.create(TP.topic, 1, {"segment.bytes": "400"}, NOW_MS)
    partition = manager.partitions[TP]
    for number in range(12):
        put(partition, batch(number))
    assert partition.is_flush_due
    tick(node, NOW_MS + 60_000)
    assert node.flush_queue.take_due() == [partition]
    partition.flush()
    node.flush_queue.complete(partition, None)
    assert not partition.is_flush_due
    tick(node, NOW_MS + 120_000)
    assert node.flush_queue.take_due() == []
    assert disk.read("recovery-point-offset-checkpoint") == b"0\n1\norders 0 12\n"


def test_closed_segments_open_without_reading_their_indexes() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(100):
        put(partition, batch(number, timestamp_ms=NOW_MS + number))
    partition.close(NOW_MS)
    reads: list[str] = []
    read = disk.read
    disk.read = lambda path: (reads.append(path), read(path))[1]  # type: ignore[method-assign]
    again = open_partition(disk, SMALL, clean_shutdown=True)
    assert again.segment_count > 3
    assert sum(path.endswith((".index", ".timeindex")) for path in reads) == 2
    assert again.read(3, 1).next_offset == 4
    assert again.offset_for_timestamp(NOW_MS + 50) == (NOW_MS + 50, 50)
    assert again.max_timestamp_offset() == (NOW_MS + 99, 99)
    assert again.topic_partition == TopicPartition("orders", 0)


def test_an_index_that_finds_the_disk_full_does_not_take_the_partition_offline() -> None:
    """Found by the simulator (seed 2243).

    The write failed before any sync, so nothing is lost, and the next flush succeeds.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0, is_transactional=True))
    put_marker(partition, marker(7, commit=False))
    # A full disk refuses this write on file systems that do not overwrite in place.
    disk.errors = {("write", ".txnindex"): errno.ENOSPC}
    with pytest.raises(KafkaStorageError, match="cannot be flushed"):
        partition.flush()
    assert (partition.is_offline, partition.recovery_point) == (False, 0)
    disk.errors = {}
    partition.flush()
    assert partition.recovery_point == 2
    again = open_partition(disk.after_power_loss(Random(1)), recovery_point=2)
    assert [transaction.last_offset for transaction in again.aborted_transactions(0, 2)] == [1]


def _open_files(root: Path) -> int:
    paths = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(path.startswith(str(root / str(TP))) for path in paths)


@pytest.mark.parametrize("is_clean", [False, True], ids=["kill", "lost-snapshots"])
def test_a_start_needs_few_descriptors_however_many_segments_it_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_clean: bool
) -> None:
    disk = RealDisk(tmp_path)
    partition = open_partition(disk, SMALL)
    for number in range(300):
        put(partition, batch(number))
    segment_count = partition.segment_count
    partition.close(NOW_MS)
    for path in (tmp_path / str(TP)).iterdir():
        if path.suffix in (".snapshot", ".producers"):
            path.unlink()
    open_file, counts = oncelog.server.disk._open, []

    def counted(path: str, flags: int) -> int:
        fd = open_file(path, flags)
        counts.append(_open_files(tmp_path))
        return fd

    monkeypatch.setattr(oncelog.server.disk, "_open", counted)
    again = open_partition(disk, SMALL, clean_shutdown=is_clean, recovery_point=0)
    assert (again.segment_count, again.log_end_offset) == (segment_count, 300)
    assert max(counts) < 5 < segment_count
    again.close(NOW_MS)


def test_a_checkpoint_gives_up_the_descriptors_of_closed_segments(tmp_path: Path) -> None:
    """A reader of thousands of segments leaves their descriptors open. A checkpoint must close them."""

    def open_files() -> int:
        return _open_files(tmp_path)

    partition = open_partition(RealDisk(tmp_path), SMALL)
    for number in range(100):
        put(partition, batch(number))
    stored = read_all(partition)
    partition.log.release_handles()
    assert open_files() == partition.segment_count > 3, "what is not synced keeps the file that was written"
    partition.flush()
    partition.log.release_handles()
    assert open_files() == 1
    assert read_all(partition) == stored
    partition.close(NOW_MS)


@pytest.mark.parametrize("reader", ["fetch", "look-up", "retention", "compaction"])
def test_readers_leave_no_descriptors_behind(reader: str, tmp_path: Path) -> None:
    """A reader of thousands of segments closes each one before the next checkpoint. The headers of batches
    may name larger timestamps than the records have, so that a look-up reads all segments.
    """
    settings = {"segment_ms": 1, "retention_ms": 1_000, "max_compaction_lag_ms": 1}
    partition = open_partition(RealDisk(tmp_path), config(**settings))
    for number in range(50):
        data = bytearray(batch())
        struct.pack_into(">q", data, 35, NOW_MS + 10 + 2 * number)
        write_crc(data, 0, len(data))
        put(partition, memoryview(data))
    partition.flush()
    partition.abandon()
    partition = open_partition(RealDisk(tmp_path), config(**settings), recovery_point=50)
    assert partition.segment_count == 50
    match reader:
        case "fetch":
            read_all(partition)
        case "look-up":
            assert partition.offset_for_timestamp(NOW_MS + 5) is None
        case "retention":
            assert list(partition.confirm_times(NOW_MS + 10_000))
        case _:
            assert partition.cleaner.dirty_range(NOW_MS) is not None
    assert _open_files(tmp_path) <= 2


def test_a_reader_during_a_swap_keeps_the_files_that_lose_their_names(tmp_path: Path) -> None:
    settings = {"cleanup_policy": "compact", "segment_ms": 1}
    partition = open_partition(RealDisk(tmp_path), config(**settings))
    for number in range(20):
        put(partition, batch(key=b"k", timestamp_ms=NOW_MS + 10 * number))
    partition.flush()
    partition.log.release_handles()
    stored, dirty = read_all(partition), partition.cleaner.dirty_range(NOW_MS + 1_000)
    assert dirty is not None
    for call in partition.cleaner.compact(dirty, NOW_MS + 1_000):
        if call is not None:
            call()
            if partition.log.is_swapping:
                assert [read_all(partition), read_all(partition)] == [stored, stored]
    assert partition.segment_count == 2
    partition.close(NOW_MS)
