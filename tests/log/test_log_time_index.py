"""The largest timestamp of each segment, look-ups by time and retention, with a crash at every step."""

from __future__ import annotations

import errno
import os
import struct
from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log.partitions import NOW_MS, TP, batch, config, open_partition, put, read_all
from support.row_loops import c_module

from oncelog.errors import CorruptMessage, KafkaStorageError
from oncelog.limits import Limits
from oncelog.log import index
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk, MemoryFile, SimulatedCrash
from oncelog.wire.batch import iter_batches

HOUR_MS = 3_600_000
START_MS = NOW_MS - 100 * HOUR_MS
SMALL = config(
    segment_bytes=900,
    index_interval_bytes=150,
    retention_ms=20 * HOUR_MS,
    limits=Limits(index_run_entries=2),
)


def stored(partition: Partition) -> list[tuple[int, int]]:
    """Return (offset, timestamp) of every record; each batch has one."""
    data = read_all(partition)
    return [(header.base_offset, header.max_timestamp_ms) for _, header in iter_batches(data)]


def check(partition: Partition) -> None:
    rows = stored(partition)
    for segment in partition.log.segments:
        times = [time for offset, time in rows if segment.base_offset <= offset < segment.end_offset]
        assert segment.max_timestamp_ms == max(times, default=-1), segment.base_offset
    for time in sorted({time for _, time in rows}):
        expected = next((row for row in rows if row[1] >= time), None)
        found = partition.offset_for_timestamp(time)
        assert found is not None and expected is not None
        assert (found.offset, found.timestamp_ms) == expected


def work(partition: Partition, draw: Random, count: int) -> None:
    """Append about one batch per hour, some with late timestamps.

    Sync at drawn times, even just before a roll.
    """
    for number in range(count):
        hours = number - draw.choice((0, 0, 0, 5))
        put(partition, batch(value=bytes(draw.randrange(60)), timestamp_ms=START_MS + hours * HOUR_MS))
        if draw.random() < 0.3:
            partition.flush()


def crashed_at(step: int | None, seed: int) -> tuple[MemoryDisk, Partition]:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    disk.crash_after = step
    if step is None:
        work(partition, Random(seed), 40)
    else:
        with pytest.raises(SimulatedCrash):
            work(partition, Random(seed), 40)
    return disk, partition


def reopened(disk: MemoryDisk, point: int, **how: bool) -> Partition:
    return open_partition(disk, SMALL, recovery_point=point, **how)


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 10**6), part=st.floats(0, 1), loss=st.integers(0, 10**6), again=st.floats(0, 1))
def test_times_are_right_after_a_crash_at_any_step(seed: int, part: float, loss: int, again: float) -> None:
    total = crashed_at(None, seed)[0].steps
    disk, partition = crashed_at(min(5 + int(part * total), total - 1), seed)
    point, draw = partition.recovery_point, Random(loss)
    for survivor in (disk.after_kill(), disk.after_power_loss(draw)):
        probe = survivor.after_kill()
        check(reopened(probe, point))
        # The start may crash as well, at any step.
        survivor.crash_after = int(again * probe.steps)
        try:
            reopened(survivor, point)
        except SimulatedCrash:
            pass
        survivor = draw.choice((survivor.after_kill(), survivor.after_power_loss(draw)))
        recovered = reopened(survivor, point)
        check(recovered)
        put(recovered, batch(timestamp_ms=START_MS + 50 * HOUR_MS))
        recovered.flush()
        check(reopened(survivor.after_power_loss(draw), recovered.recovery_point))
        recovered.close(NOW_MS)
        check(reopened(survivor.after_kill(), 0, clean_shutdown=True))


def test_retention_by_time_keeps_what_is_young_after_a_kill() -> None:
    """Regression: the last time entry of a recovered segment was missing, so the segment looked older than it
    was and was deleted.
    """
    settings_60 = config(segment_ms=60 * HOUR_MS, retention_ms=20 * HOUR_MS)
    disk = MemoryDisk()
    partition = open_partition(disk, settings_60)
    for hour in range(70):
        put(partition, batch(value=bytes(100), timestamp_ms=START_MS + hour * HOUR_MS))
    assert partition.segment_count == 2
    disk = disk.after_kill()
    partition = open_partition(disk, settings_60)
    partition.close(NOW_MS)
    partition = open_partition(disk, settings_60, clean_shutdown=True)
    found = partition.offset_for_timestamp(START_MS + 55 * HOUR_MS)
    assert found is not None and found.offset == 55
    partition.enforce_retention(START_MS + 80 * HOUR_MS)
    assert partition.log_start_offset == 0, "hour 60 is in the first segment"
    partition.enforce_retention(START_MS + 81 * HOUR_MS)
    assert partition.log_start_offset == 61


_KEPT_20_HOURS = config(segment_bytes=3000, index_interval_bytes=1000, retention_ms=20 * HOUR_MS)


def _with_a_young_record(disk: MemoryDisk) -> Partition:
    """Return a closed partition of three segments.

    In the first segment, only the record at offset 39 is young.
    """
    partition = open_partition(disk, _KEPT_20_HOURS)
    while partition.segment_count < 3:
        count = partition.log_end_offset
        put(partition, batch(timestamp_ms=NOW_MS if count == 39 else START_MS + count))
    partition.close(NOW_MS)
    return partition


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_retention_checks_the_times_of_segments_that_a_kill_left_to_0_4_1(lost: int) -> None:
    """The recovery of 0.4.1 did not append the last time entry, and later starts trusted the index."""
    disk, old = MemoryDisk(), _KEPT_20_HOURS
    partition = _with_a_young_record(disk)
    path = f"{partition.directory}/{0:020d}.timeindex"
    disk.replace(path, disk.read(path)[: -12 * lost])
    partition = open_partition(disk, old, clean_shutdown=True)
    for _ in partition.confirm_times(NOW_MS):
        pass
    partition.enforce_retention(NOW_MS)
    assert partition.log_start_offset == 0, "offset 39 is young"
    partition.close(NOW_MS)
    partition = open_partition(disk, old, clean_shutdown=True)
    assert partition.log.segments.first.max_timestamp_ms == NOW_MS, "the entry is there again"
    found = partition.offset_for_timestamp(NOW_MS)
    assert found is not None and found.offset == 39
    partition.enforce_retention(NOW_MS + 30 * HOUR_MS)
    assert partition.segment_count == 1


@pytest.mark.parametrize("is_lost", [True, False], ids=["index lost", "index damaged"])
def test_retention_sees_the_times_behind_a_damage(is_lost: bool) -> None:
    """Regression: the scan ended at a damaged length, so the young records behind it were not seen and the
    segment was deleted.
    """
    disk, old = MemoryDisk(), _KEPT_20_HOURS
    partition = _with_a_young_record(disk)
    stem, size = f"{partition.directory}/{0:020d}", len(batch(timestamp_ms=NOW_MS))
    if is_lost:
        disk.replace(f"{stem}.timeindex", disk.read(f"{stem}.timeindex")[:-24])
    disk.open(f"{stem}.log").pwrite(b"\x7f", 38 * size + 8)
    partition = open_partition(disk, old, clean_shutdown=True)
    if not is_lost:
        # The index file is read only when it is first needed, so damage it before that.
        disk.replace(f"{stem}.index", b"damaged!")
        partition.offset_for_timestamp(START_MS + 5)
    for _ in partition.confirm_times(NOW_MS):
        pass
    partition.enforce_retention(NOW_MS)
    assert partition.log_start_offset == 0, "offset 39 is young"


def test_a_partition_deleted_while_its_times_are_checked_is_left_alone() -> None:
    old = config(segment_bytes=3000, index_interval_bytes=1000, retention_ms=20 * HOUR_MS)
    for act in ("abandon", "delete"):
        disk = MemoryDisk()
        partition = open_partition(disk, old)
        while partition.segment_count < 4:
            put(partition, batch(timestamp_ms=START_MS + partition.log_end_offset))
        partition.close(NOW_MS)
        partition = open_partition(disk, old, clean_shutdown=True)
        steps = partition.confirm_times(NOW_MS)
        next(steps)
        if act == "abandon":
            partition.abandon()
        else:
            partition.delete_records(None, NOW_MS)
        assert list(steps) in ([], [None])


@settings(deadline=None, max_examples=60)
@given(entries=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12), data=st.data())
def test_a_position_is_read_from_the_file_as_from_memory(
    entries: list[tuple[int, int]], data: st.DataObject
) -> None:
    disk, offset, position = MemoryDisk(), 0, 0
    built = index.OffsetIndex(disk, "i")
    for step, size in entries:
        offset, position = offset + step, position + size
        built.append(offset, position)
    built.write_pending()
    if entries:
        disk.replace("i", disk.read("i") + bytes(data.draw(st.integers(0, 40))))
    for wanted in range(offset + 3):
        assert index.OffsetIndex.read_position(disk, "i", wanted) == built.position_for(wanted)


NUMBERS = st.sampled_from([0, 1, 2, 3, 2**31, 2**32 - 1])
TIMES = st.sampled_from([0, 0, 1, 2, -1, -(2**63), 2**63 - 1])


@given(
    entries=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=9),
    torn=st.binary(max_size=7),
    log_size=st.sampled_from([0, 2, 1 << 31, 1 << 32, 1 << 40]),
)
def test_offset_entries_are_read_alike_in_both_languages(
    entries: list[tuple[int, int]], torn: bytes, log_size: int
) -> None:
    data = b"".join(struct.pack(">II", *entry) for entry in entries) + torn
    offsets, positions, wrong = index.offset_entries(data, log_size)
    assert c_module("oncelog.log._index").offset_entries(data, log_size) == (offsets, positions, wrong)
    expected, previous = [], -1
    for offset, position in entries:
        if position == 0 or position >= log_size or offset <= previous:
            break
        expected.append((offset, position))
        previous = offset
    assert list(zip(array("I", offsets), array("I", positions), strict=True)) == expected
    is_end = len(expected) == len(entries) or entries[len(expected)][1] == 0
    assert wrong == (None if is_end else len(expected))


@given(entries=st.lists(st.tuples(TIMES, NUMBERS), max_size=9), torn=st.binary(max_size=11))
def test_time_entries_are_read_alike_in_both_languages(entries: list[tuple[int, int]], torn: bytes) -> None:
    data = b"".join(struct.pack(">qI", *entry) for entry in entries) + torn
    times, offsets, wrong = index.time_entries(data)
    assert c_module("oncelog.log._index").time_entries(data) == (times, offsets, wrong)
    expected: list[tuple[int, int]] = []
    for entry in entries:
        is_above = not expected or (entry[0] > expected[-1][0] and entry[1] > expected[-1][1])
        if entry == (0, 0) or not is_above:
            break
        expected.append(entry)
    assert list(zip(array("q", times), array("I", offsets), strict=True)) == expected
    is_end = len(expected) == len(entries) or entries[len(expected)] == (0, 0)
    is_end &= entries[:1] != [(0, 0)] or entries[1:2] in ([], [(0, 0)])
    assert wrong == (None if is_end else len(expected))


def test_a_look_up_by_time_does_not_skip_damage() -> None:
    """The matching record may be in the damaged bytes. To return a later record would hide it."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(timestamp_ms=START_MS))
    position = partition.size_bytes
    for hours in (1, 2):
        put(partition, batch(timestamp_ms=START_MS + hours * HOUR_MS))
    disk.open(f"{TP}/{0:020d}.log").pwrite(b"\x7f", position + 8)
    assert partition.offset_for_timestamp(START_MS) == (START_MS, 0)
    for hours in (1, 2):
        with pytest.raises(CorruptMessage, match=f"damaged at position {position}"):
            partition.offset_for_timestamp(START_MS + hours * HOUR_MS)


def test_a_look_up_by_time_ignores_damage_below_the_log_start() -> None:
    """With DeleteRecords, an operator can move the log start past the damage."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(timestamp_ms=START_MS))
    position = partition.size_bytes
    for hours in (1, 2, 3):
        put(partition, batch(timestamp_ms=START_MS + hours * HOUR_MS))
    disk.open(f"{TP}/{0:020d}.log").pwrite(b"\x7f", position + 8)
    partition.delete_records(1, NOW_MS)
    with pytest.raises(CorruptMessage, match=f"damaged at position {position}"):
        partition.max_timestamp_offset()
    partition.delete_records(2, NOW_MS)
    third, fourth = (START_MS + 2 * HOUR_MS, 2), (START_MS + 3 * HOUR_MS, 3)
    assert partition.offset_for_timestamp(START_MS) == third
    assert partition.offset_for_timestamp(START_MS + 3 * HOUR_MS) == fourth
    assert partition.max_timestamp_offset() == fourth


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_read_that_fails_while_an_index_is_rebuilt_hides_no_records(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the segment then ended at the last batch that was read. Readers passed over the others, and
    DeleteRecords removed them. The index was damaged, and one read of the log failed.
    """
    disk = MemoryDisk()
    limits = Limits(scan_chunk_bytes=500, scan_first_chunk_bytes=100)
    small = config(segment_bytes=4000, index_interval_bytes=100, limits=limits)
    partition = open_partition(disk, small)
    for number in range(100):
        put(partition, batch(timestamp_ms=NOW_MS + number))
    before = read_all(partition)
    partition.close(NOW_MS)
    partition = open_partition(disk, small, clean_shutdown=True)
    end_offset = partition.log.segments.first.end_offset
    stem, reads, original = f"{partition.directory}/{0:020d}", 0, MemoryFile.pread
    disk.replace(f"{stem}.index", b"damaged!")

    def pread(file: MemoryFile, size: int, position: int) -> bytes:
        nonlocal reads
        reads += file._path == f"{stem}.log"
        if reads > failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(file, size, position)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFile, "pread", pread)
        with pytest.raises(KafkaStorageError):
            partition.read(5, 100)
    assert read_all(partition) == before
    assert partition.offset_for_timestamp(NOW_MS + 5) == (NOW_MS + 5, 5)
    partition.delete_records(end_offset - 1, NOW_MS)
    assert partition.log.segments.first.base_offset == 0


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored by an older version", "not stored"])
@pytest.mark.parametrize("segment_bytes", [3000, 1 << 20], ids=["closed segment", "active segment"])
def test_a_first_record_with_timestamp_0_hides_no_later_times(segment_bytes: int, is_stored: bool) -> None:
    """Regression: its entry of zeros looked like the end of the time index, and the file was emptied. After
    the next start, look-ups by time passed over the segment.
    """
    disk = MemoryDisk()
    times_ms = [0, 0, 0, 1_000, *range(5, 300, 5)]
    small = config(segment_bytes=segment_bytes, index_interval_bytes=100, retention_ms=-1)
    partition = open_partition(disk, small)
    for time_ms in times_ms:
        put(partition, batch(timestamp_ms=time_ms))
    for start in range(3):
        partition.close(NOW_MS)
        path = f"{partition.directory}/{0:020d}.timeindex"
        if is_stored and not start:
            disk.replace(path, bytes(12) + disk.read(path))
        partition = open_partition(disk, small, clean_shutdown=True)
        assert partition.offset_for_timestamp(600) == (1_000, 3)
        assert partition.max_timestamp_offset() == (1_000, 3)
