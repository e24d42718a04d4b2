"""A flush runs in another thread during requests, so it may see the partition's state between any two lines
of a request's code.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.log.partitions import NOW_MS, batch, config, marker, open_partition, put, put_marker

from oncelog.log.partition_disk import PartitionDisk
from oncelog.log.segment import Segment
from oncelog.log.segments import SegmentList
from oncelog.rules.idempotence.append import ProducerEntry
from oncelog.rules.idempotence.producer_state import ProducerTable
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk


def test_a_flush_during_an_abort_makes_no_marker_durable_without_its_index_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the marker were durable alone, recovery after a power loss would not add the index entry. Readers
    would see the aborted records.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0, pid=7, is_transactional=True))
    partition.flush()
    original = ProducerTable.put

    def put_entry(self: ProducerTable, producer_id: int, entry: ProducerEntry) -> None:
        partition.flush()  # the marker is written and has no index entry yet
        original(self, producer_id, entry)

    monkeypatch.setattr(ProducerTable, "put", put_entry)
    put_marker(partition, marker(7, commit=False))
    monkeypatch.undo()
    point = partition.recovery_point
    for seed in range(16):
        again = open_partition(disk.after_power_loss(Random(seed)), recovery_point=point)
        if again.log_end_offset == 2:
            assert [entry.first_offset for entry in again.aborted_transactions(0, 2)] == [0]
            assert again.last_stable_offset == 2


def test_a_flush_misses_no_segment_while_others_are_replaced() -> None:
    """Compaction replaces several segments by one while a flush looks up the segments to sync."""
    partition = open_partition(log_config=config(segment_bytes=200))
    for sequence in range(12):
        put(partition, batch(sequence, pid=1))
    old = list(partition.log.segments)
    assert len(old) == 6
    segments, seen = SegmentList(old), list[list[Segment]]()
    point = old[5].base_offset

    class Watched(list[Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            seen.append(segments.from_offset(point))
            super().__setitem__(key, value)
            seen.append(segments.from_offset(point))

    segments._segments, segments._bases = Watched(segments._segments), Watched(segments._bases)
    segments.replace(old[:3], old[0])
    assert len(seen) == 4 and all(set(old[5:]) <= set(each) for each in seen)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_flush_while_a_segment_is_dropped_does_not_fail(
    after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The segment ends at the recovery point, so the flush syncs it, too, and a start has left its file
    closed. Otherwise all appends that wait for the flush would get KAFKA_STORAGE_ERROR.
    """
    small = config(segment_bytes=200)
    partition = open_partition(RealDisk(tmp_path), small)
    for _ in range(2):
        put(partition, batch())
    partition.flush()
    put(partition, batch())
    partition.abandon()
    partition = open_partition(RealDisk(tmp_path), small, recovery_point=2)
    put(partition, batch())
    renames, original = 0, PartitionDisk.rename

    def rename(disk: PartitionDisk, old: str, new: str) -> None:
        nonlocal renames
        original(disk, old, new)
        renames += new.endswith(".deleted")
        if renames == after:
            partition.flush()

    monkeypatch.setattr(PartitionDisk, "rename", rename)
    partition.delete_records(2, NOW_MS)
    assert (renames, partition.recovery_point, partition.segment_count) == (4, 4, 1)
    partition.abandon()
