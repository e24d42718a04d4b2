"""After a crash at any byte, acknowledged records are stored once and completely, and the producers' state is
restored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from random import Random

import pytest
from support.log.partitions import NOW_MS, batch, config, marker, open_partition, put, put_marker, read_all

from oncelog.log.background import BackgroundQueue
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Origin
from oncelog.wire.batch import iter_batches

CONFIG = config(segment_bytes=400, index_interval_bytes=100)


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_power_loss_takes_the_first_segment_alone(is_killed: bool) -> None:
    """Regression: a power loss kept only the second segment's name, so the log began inside a transaction."""
    for seed in range(60):
        disk = MemoryDisk()
        partition = _open_with_chores_pending(disk)
        for number in range(15):
            if is_killed and number == 2:
                disk = disk.after_kill()
                partition = _open_with_chores_pending(disk)
            put(partition, batch(number))
        before = read_all(partition)
        assert partition.segment_count > 2
        again = open_partition(disk.after_power_loss(Random(seed)), CONFIG)
        found = read_all(again)
        assert again.log_start_offset == 0
        assert found == before[: len(found)]


def test_no_power_loss_takes_the_first_segment_that_retention_leaves() -> None:
    """Regression: after the first segment was deleted, a power loss kept only the third segment's name."""
    for crash_after in range(12):
        for seed in range(30):
            disk = MemoryDisk()
            partition = _open_with_chores_pending(disk)
            end_offset = 0
            while partition.segment_count == 1:
                # The deletion below needs a snapshot that is older than the second segment.
                partition.log.snapshot()
                partition.log._background.finish()
                end_offset = partition.log_end_offset
                put(partition, batch())
            for _ in range(8):
                put(partition, batch())
            before, cut = read_all(partition), partition.log.segments.first.size_bytes
            disk.crash_after = disk.steps + crash_after
            with suppress(SimulatedCrash):
                partition.delete_records(end_offset, NOW_MS)
            again = open_partition(disk.after_power_loss(Random(seed)), CONFIG)
            assert again.log_start_offset in (0, end_offset)
            assert before[cut if again.log_start_offset else 0 :].startswith(read_all(again))


def _open_with_chores_pending(disk: MemoryDisk) -> Partition:
    """Open a partition whose background tasks never run.

    So the snapshot that is taken when a segment rolls does not sync the directory.
    """
    background = BackgroundQueue()
    background.on_added = lambda: None
    return open_partition(disk, CONFIG, background=background)


class Story:
    """Appends of two producers, and of a transaction, to several segments. `acknowledged` has the batches
    that were acknowledged.
    """

    def __init__(self) -> None:
        self.acknowledged: list[tuple[int, bytes]] = []
        self.flushed_offset = 0
        self.at_crash: bytes | None = None

    def run(self, disk: MemoryDisk) -> None:
        partition = open_partition(disk, CONFIG)
        for number in range(6):
            self._put(partition, batch(number * 2, 2, pid=1))
            self._put(partition, batch(number, 1, pid=2, epoch=3, value=b"w" * 20))
            if number == 2:
                partition.flush()
                self.flushed_offset = partition.recovery_point
        self._put(partition, batch(0, 1, pid=3, is_transactional=True))
        self._put(partition, marker(3, commit=False))
        partition.close(NOW_MS)

    def _put(self, partition: Partition, data: memoryview) -> None:
        self.at_crash = bytes(data)
        is_marker = bool(data[22] & 0x20)
        appended = (put_marker if is_marker else put)(partition, data)
        self.acknowledged.append((appended.base_offset, bytes(data)))
        self.at_crash = None


def _steps() -> int:
    disk = MemoryDisk()
    Story().run(disk)
    return disk.steps


class _Counting(MemoryDisk):
    """A disk that notes the number of steps after each change. A write of many bytes is one change."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [0]

    def step(self, operation: str, path: str, count: int = 1) -> int:
        done = super().step(operation, path, count)
        self.ends.append(self.steps)
        return done


def _steps_of_each_kind() -> list[int]:
    """Return the first two, the middle and the last step of each change of the disk."""
    disk = _Counting()
    Story().run(disk)
    changes = itertools.pairwise(disk.ends)
    steps = {step for begin, end in changes for step in (begin, begin + 1, (begin + end) // 2, end - 1)}
    return sorted(steps - {disk.steps})


def _crashed(step: int) -> tuple[Story, MemoryDisk]:
    story, disk = Story(), MemoryDisk()
    disk.crash_after = step
    try:
        story.run(disk)
    except SimulatedCrash:
        return story, disk
    raise AssertionError("the story ended before the crash")


def _stored(partition: Partition) -> list[tuple[int, bytes]]:
    found, offset = [], partition.log_start_offset
    while offset < partition.log_end_offset:
        data = partition.read(offset, 1 << 20)
        for position, header in iter_batches(data.records):
            found.append((header.base_offset, data.records[position : position + header.size_bytes]))
        assert data.next_offset > offset, f"nothing can be read at offset {offset}"
        offset = data.next_offset
    return found


def _retries_are_known(partition: Partition, acknowledged: list[tuple[int, bytes]]) -> None:
    """Check that retries of each producer's newest five batches are duplicates and get the original
    offsets.
    """
    for pid in (1, 2):
        mine = [(o, d) for o, d in acknowledged if d[43:51] == pid.to_bytes(8, "big")][-5:]
        for offset, data in mine:
            again = bytearray(data)
            again[:8] = bytes(8)
            appended = partition.append(memoryview(again), origin=Origin.CLIENT, now_ms=NOW_MS)
            assert (appended.is_duplicate, appended.base_offset) == (True, offset)


@pytest.mark.behaviour("I17", "I20")
def test_no_acknowledged_batch_is_lost_by_a_kill_within_any_write() -> None:
    steps = _steps_of_each_kind()
    assert 100 < len(steps) < 1_000
    assert_survived(steps)


@pytest.mark.full("takes 46 s of processor time; another test of this file crashes once within each write")
@pytest.mark.behaviour("I17", "I20")
@pytest.mark.parametrize("part", range(4))
def test_no_acknowledged_batch_is_lost_by_a_kill_at_any_byte(part: int) -> None:
    """Each part takes a fourth of the bytes. Together, they took longer than the limit on a busy machine."""
    total = _steps()
    assert total > 2000
    assert_survived(range(part, total, 4))


def assert_survived(steps: Iterable[int]) -> None:
    for step in steps:
        story, disk = _crashed(step)
        partition = open_partition(disk.after_kill(), CONFIG, recovery_point=story.flushed_offset)
        stored = _stored(partition)
        count = len(story.acknowledged)
        assert stored[:count] == story.acknowledged, f"step {step}"
        # Except for these, only the batch in flight at the crash may be stored, and only as a whole.
        assert [d[12:] for _, d in stored[count:]] in ([], [_as_stored(story.at_crash)]), f"step {step}"
        _retries_are_known(partition, stored)
        assert partition.last_stable_offset == _expected_stable(stored, partition)
        assert len(partition.aborted_transactions(0, 1000)) == (1 if len(stored) == 14 else 0)
        partition.abandon()


def _as_stored(data: bytes | None) -> bytes:
    """Return the bytes of a batch from the leader epoch on, as the log stores them."""
    return bytes(4) + (data or b"")[16:]


def _expected_stable(stored: list[tuple[int, bytes]], partition: Partition) -> int:
    return stored[12][0] if len(stored) == 13 else partition.log_end_offset


@pytest.mark.behaviour("I17")
def test_power_loss_keeps_what_was_flushed() -> None:
    total = _steps()
    for step in sorted({*range(0, total, 40), *_steps_of_each_kind()[::2]}):
        story, disk = _crashed(step)
        survivor = disk.after_power_loss(Random(step))
        partition = open_partition(survivor, CONFIG, recovery_point=story.flushed_offset)
        stored = _stored(partition)
        sure = [item for item in story.acknowledged if item[0] < story.flushed_offset]
        assert stored[: len(sure)] == sure, f"step {step}"
        # Each file name becomes durable by itself. So without a flush, the first segment's name may be lost
        # and the second one's kept.
        assert partition.log_start_offset == 0 or story.flushed_offset == 0, f"step {step}"
        begun = [data for offset, data in story.acknowledged if offset >= partition.log_start_offset]
        possible = [data[12:] for data in begun] + [_as_stored(story.at_crash)]
        assert [data[12:] for _, data in stored] == possible[: len(stored)], f"step {step}"
        _retries_are_known(partition, stored)
        partition.abandon()


@pytest.mark.behaviour("I17")
def test_recovery_may_crash_and_be_repeated() -> None:
    story, crashed = _crashed(_steps() - 40)
    disk = crashed.after_kill()
    total = _recovery_steps(disk)
    assert total > 5
    for step in range(total):
        again = disk.after_kill()
        again.crash_after = step
        with pytest.raises(SimulatedCrash):
            open_partition(again, CONFIG)
        partition = open_partition(again.after_kill(), CONFIG)
        assert _stored(partition)[: len(story.acknowledged)] == story.acknowledged
        partition.abandon()


def _recovery_steps(disk: MemoryDisk) -> int:
    copy = disk.after_kill()
    open_partition(copy, CONFIG).abandon()
    return copy.steps
