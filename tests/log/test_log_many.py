"""The cost of opening, closing and deleting thousands of partitions, in syncs and open files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.log.partitions import (
    NOW_MS,
    TOPIC_ID,
    batch,
    config,
    marker,
    open_partition,
    put,
    put_marker,
    read_all,
)

from oncelog.errors import StorageError
from oncelog.limits import Limits
from oncelog.log.index import OffsetIndex, TimeIndex
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.log.segment import Segment
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import TopicPartition

PARTITIONS = [TopicPartition("t", number) for number in range(30)]


class CountingDisk(MemoryDisk):
    """A disk that counts the calls of each method."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def step(self, operation: str, path: str, count: int = 1) -> int:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        return super().step(operation, path, count)


def _open(disk: MemoryDisk | RealDisk) -> tuple[LogManager, list[Partition]]:
    rng = Random(1)
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: rng.randbytes(16), now_ms=NOW_MS)
    return manager, [manager.open_partition(at, config(), TOPIC_ID, NOW_MS) for at in PARTITIONS]


def test_new_partitions_are_not_synced_one_by_one() -> None:
    disk = CountingDisk()
    manager, partitions = _open(disk)
    assert disk.calls["sync"] <= 2
    disk.calls.clear()
    manager.close(NOW_MS)
    # The stop writes the checkpoints, the contents and the clean-shutdown marker. It writes nothing into
    # partitions, because none changed.
    assert disk.calls == {"replace": 6, "write": 6}
    assert [p.log_end_offset for p in partitions] == [0] * len(PARTITIONS)


def test_unchanged_partitions_are_closed_without_a_write() -> None:
    disk = CountingDisk()
    manager, partitions = _open(disk)
    for partition in partitions:
        put(partition, batch(0))
    manager.close(NOW_MS)
    manager, partitions = _open(disk)
    put(partitions[3], batch(1))
    disk.calls.clear()
    manager.close(NOW_MS)
    assert disk.calls["sync"] <= 12, "one partition's files and its directory"
    manager, partitions = _open(disk)
    assert [p.log_end_offset for p in partitions] == [2 if n == 3 else 1 for n in range(len(PARTITIONS))]
    assert all(put(partition, batch(0)).is_duplicate for partition in partitions)


def test_a_topic_is_deleted_with_one_writing_of_the_checkpoints() -> None:
    disk = CountingDisk()
    manager, partitions = _open(disk)
    for partition in partitions:
        put(partition, batch(0))
    manager.write_checkpoints()
    disk.calls.clear()
    manager.delete_partitions(PARTITIONS)
    assert (disk.calls["replace"], disk.calls["sync"]) == (3, 1)
    assert (manager.partitions, manager.partition_directories()) == ({}, [])
    assert not [name for name in disk.list() if name.endswith("-delete")]


def test_idle_partitions_take_no_descriptors(tmp_path: Path) -> None:
    manager, partitions = _open(RealDisk(tmp_path))
    for partition in partitions:
        put(partition, batch(0))
    manager.close(NOW_MS)
    before = len(os.listdir("/proc/self/fd"))
    manager, partitions = _open(RealDisk(tmp_path))
    assert len(os.listdir("/proc/self/fd")) - before == 1, "the lock"
    put(partitions[1], batch(1))
    assert len(read_all(partitions[1])) == 2 * len(read_all(partitions[0])) > 0
    partitions[2].flush()
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    manager.close(NOW_MS)


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("left", [b"", b"version: 0\ntopic_", bytes(43)])
def test_a_torn_topic_id_is_written_again(left: bytes) -> None:
    """A new partition's topic id is not synced, because the list of topics has the id.

    So a power loss may tear the file.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0))
    disk.replace("orders-0/partition.metadata", left)
    with pytest.raises(StorageError, match=r"partition\.metadata"):
        open_partition(disk, topic_id=None)
    assert open_partition(disk).log_end_offset == 1
    assert open_partition(disk, topic_id=None).topic_id == TOPIC_ID


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("seed", range(40))
def test_a_new_partition_that_was_flushed_survives_a_power_loss(seed: int) -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, leader_epoch=3)
    put(partition, batch(0))
    partition.flush()
    again = open_partition(disk.after_power_loss(Random(seed)), topic_id=None, recovery_point=1)
    assert (again.topic_id, again.log_end_offset) == (TOPIC_ID, 1)
    assert again.end_offset_for_epoch(3) == (3, 1)
    assert put(again, batch(0)).is_duplicate


OUT_OF_FILES = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from support.log.partitions import batch, config, put, NOW_MS, TOPIC_ID
from oncelog.server.disk import RealDisk
from oncelog.errors import OncelogError
from oncelog.log.manager import LogManager
from oncelog.types import TopicPartition

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
manager = LogManager.open(RealDisk(sys.argv[1]), node_id=1, new_uuid=lambda: bytes(16), now_ms=NOW_MS)
try:
    for number in range(100):
        put(manager.open_partition(TopicPartition("t", number), config(), TOPIC_ID, NOW_MS), batch(0))
except OncelogError as error:
    print(error)
first = next(iter(manager.partitions.values()))
print(put(first, batch(1)).base_offset)
"""


def test_out_of_files_says_what_to_do(tmp_path: Path) -> None:
    helpers = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILES, str(tmp_path), helpers],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "the limit is 40; raise it (ulimit -n" in done.stdout, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "1", "what was open works on"


RAISED = """
import resource
from oncelog.cli.serve import raise_file_limit
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 100), hard))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))
"""


def test_serving_raises_the_limit_of_open_files() -> None:
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


def test_producers_are_described_in_bounded_parts() -> None:
    partition = open_partition(
        log_config=config(limits=Limits(max_producers_at_work=5, producer_shard_entries=10))
    )
    for pid in range(300):
        put(partition, batch(0, pid=pid))
    parts = partition.producers_in_parts()
    found = next(parts)
    put(partition, batch(0, pid=300))  # other clients append while the parts are collected
    put(partition, batch(1, pid=7))
    for part in parts:
        assert len(part) <= 20
        found += part
    assert sorted(state.producer_id for state in found) == list(range(300))
    assert {len(state.entry.batches) for state in found} == {1}


class Looked(OrderedDict[int, int]):
    """A dict of open transactions that counts how many of them are examined."""

    count = 0

    def values(self) -> Any:
        for first_offset in super().values():
            type(self).count += 1
            yield first_offset


@pytest.mark.parametrize("is_reversed", [False, True])
def test_ending_one_of_many_open_transactions_examines_few_others(is_reversed: bool) -> None:
    """Regression: each abort examined all open transactions, so 80,000 of them took half a minute."""
    Looked.count = 0
    partition = open_partition()
    partition._producers.open_transactions = Looked()
    producer_ids = list(range(1, 1_001))
    for producer_id in producer_ids:
        put(partition, batch(0, pid=producer_id, is_transactional=True))
    for producer_id in reversed(producer_ids) if is_reversed else producer_ids:
        put_marker(partition, marker(producer_id, commit=False))
    assert partition.open_transaction_count == 0
    assert Looked.count <= 10 * len(producer_ids)
    aborted = partition.aborted_transactions(0, partition.log_end_offset)
    expected = 0 if is_reversed else 1
    assert [each.last_stable_offset for each in aborted][:2] == [expected, 0 if is_reversed else 2]


def test_indexes_of_closed_segments_are_not_kept_in_memory() -> None:
    """Regression: since the start, each batch that was written or read and has an index entry kept 20 bytes
    in memory.
    """
    disk = MemoryDisk()
    settings = config(segment_bytes=2000, index_interval_bytes=1)
    partition = open_partition(disk, settings)
    for number in range(100):
        put(partition, batch(number, timestamp_ms=NOW_MS + number))
    partition.flush()
    *closed, active = partition.log.segments

    def loaded() -> list[Segment]:
        return [segment for segment in closed if segment._index is not None or segment._times is not None]

    assert loaded() == closed
    partition.log.release_handles()
    assert loaded() == [] and active._index is not None
    stored = read_all(partition, 200)
    for number in range(100):
        found = partition.offset_for_timestamp(NOW_MS + number)
        assert found is not None and found.offset == number
    assert loaded() == closed
    partition.log.release_handles()
    assert loaded() == []
    # Indexes that were rebuilt stay in memory, because they have no complete files to be loaded from again.
    disk.remove(closed[0]._stem + ".index")
    disk.remove(closed[1]._stem + ".timeindex")
    assert read_all(partition, 200) == stored
    partition.log.release_handles()
    assert loaded() == closed[:2]


@pytest.mark.parametrize("index", [OffsetIndex, TimeIndex])
def test_loading_an_index_takes_no_step_for_each_entry(index: type[OffsetIndex | TimeIndex]) -> None:
    """Regression: loading a million entries (10 MB) took half a second, and the broker served no client
    meanwhile.

    An index of a closed segment is loaded in one step when it is first needed, so that step must be quick.
    """

    def call_count(entries: int) -> int:
        disk, calls = MemoryDisk(), 0
        written = index(disk, "index")
        for number in range(1, entries + 1):
            written.append(number, number)
        written.write_pending()

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            loaded = index.load(disk, "index", 1 << 30) if index is OffsetIndex else index.load(disk, "index")
        finally:
            sys.setprofile(None)
        assert len(loaded) == entries
        return calls

    assert call_count(5000) == call_count(50)
