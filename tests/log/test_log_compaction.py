"""Compaction of a partition: the records that stay, through restarts and a crash at every step."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log.partitions import NOW_MS, batch, config, limit, marker, open_partition, put, put_marker

from oncelog.config import INT64_MAX
from oncelog.errors import InvalidProducerEpoch, KafkaStorageError
from oncelog.limits import Limits
from oncelog.log import cleaner
from oncelog.log.background import BackgroundQueue, run
from oncelog.log.cleaner import _groups
from oncelog.log.config import LogConfig
from oncelog.log.disk import Disk
from oncelog.log.index import AbortedTransaction
from oncelog.log.partition import Partition
from oncelog.log.segment_swap import discard, make_swap, take_place
from oncelog.rules.storage.compaction import Aborted
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Compression, Isolation, Origin
from oncelog.wire.batch import build_batch, iter_batches
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.header import write_crc
from oncelog.wire.records import NewRecord, decode_records

SETTINGS: dict[str, Any] = {"cleanup_policy": "compact", "segment_bytes": 400, "index_interval_bytes": 80}
COMPACTED = config(**SETTINGS, delete_retention_ms=1_000)
DAY_MS = 86_400_000


def opened(disk: MemoryDisk | None = None, **how: Any) -> Partition:
    return open_partition(disk, COMPACTED, **how)


def write(partition: Partition, key: bytes, value: bytes | None, **how: Any) -> int:
    return put(partition, batch(key=key, value=value, **how)).base_offset  # type: ignore[arg-type]


def compact(partition: Partition, now_ms: int = NOW_MS) -> bool:
    partition.flush()
    dirty = partition.cleaner.dirty_range(now_ms)
    if dirty is not None:
        run(partition.cleaner.compact(dirty, now_ms))
    return dirty is not None


def batches(partition: Partition) -> list[tuple[int, Any, memoryview]]:
    """Return (base offset, header, bytes) of each stored batch. Each read starts at the offset after the last
    batch.
    """
    found, offset = [], partition.log_start_offset
    while offset < partition.log_end_offset:
        piece = partition.read(offset, 1 << 20)
        for position, header in iter_batches(piece.records):
            data = memoryview(piece.records)[position : position + header.size_bytes]
            found.append((header.base_offset, header, data))
        assert piece.next_offset > offset, f"nothing can be read at offset {offset}"
        offset = piece.next_offset
    return found


def committed(partition: Partition) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return (offset, key, value) of each record that a read_committed reader sees."""
    upper = partition.last_stable_offset
    aborted = partition.aborted_transactions(0, upper)
    seen = VisibilityFilter(Isolation.READ_COMMITTED, [(a.producer_id, a.first_offset) for a in aborted])
    rows = []
    for _, header, data in batches(partition):
        if header.base_offset >= upper:
            break
        record = decode_control(data, verify=True) if header.is_control else None
        is_abort = record is not None and record.type is ControlType.ABORT
        if seen.decide(header, is_abort_marker=is_abort) is Verdict.DELIVER:
            rows += [(r.offset, r.key, r.value) for r in decode_records(data)]
    return rows


def newest(partition: Partition) -> dict[bytes | None, bytes]:
    """Return the value of each key, without keys whose newest record is a tombstone."""
    values = {key: value for _, key, value in committed(partition)}
    return {key: value for key, value in values.items() if value is not None}


def fill(partition: Partition, rounds: int = 10, keys: int = 3) -> None:
    for number in range(rounds):
        for key in range(keys):
            write(partition, b"k%d" % key, b"v%d" % number)


def test_a_header_name_that_is_not_utf8_is_kept_as_it_is() -> None:
    """Kafka stores such a name on a topic that is not compacted, and cleanup.policy may change to compact
    later.
    """
    disk = MemoryDisk()
    plain = open_partition(disk, config(**{**SETTINGS, "cleanup_policy": "delete"}))
    several = [NewRecord(NOW_MS, key, b"v", (("abcd", b"1"),)) for key in (b"a", b"b")]
    data = build_batch(several)
    while (start := data.find(b"abcd")) >= 0:
        data[start : start + 4] = b"caf\xe9"
    write_crc(data, 0, len(data))
    put(plain, memoryview(data))
    plain.close(NOW_MS)
    partition = opened(disk)
    for number in range(40):
        write(partition, b"a", b"new%d" % number)
    assert compact(partition)
    assert (1, b"b", b"v") in [
        (record.offset, record.key, record.value)
        for _, _, kept in batches(partition)
        for record in decode_records(kept, name_errors="replace")
    ]
    assert any(b"caf\xe9" in bytes(kept) for _, _, kept in batches(partition))


def test_the_newest_of_each_key_stays_where_it_was() -> None:
    partition = opened()
    fill(partition)
    before, end, size = committed(partition), partition.log_end_offset, partition.size_bytes
    last = before[-1][0]
    assert compact(partition)
    after = committed(partition)
    assert set(after) < set(before) and newest(partition) == {b"k%d" % key: b"v9" for key in range(3)}
    assert (partition.log_end_offset, partition.log_start_offset) == (end, 0)
    assert after[-1][0] == last and partition.size_bytes < size / 2
    segments = partition.segment_count
    fill(partition, rounds=1)
    assert compact(partition)
    assert partition.segment_count < segments, "what became small was put together"
    closed = [row for row in committed(partition) if row[0] < partition.cleaner.cleaned_to]
    assert len({key for _, key, _ in closed}) == len(closed)
    assert not compact(partition), "nothing is dirty"


def test_reads_begin_at_any_offset() -> None:
    partition = opened()
    fill(partition)
    compact(partition)
    stored = [base for base, _, _ in batches(partition)]
    for offset in range(partition.log_end_offset):
        found = partition.read(offset, 1)
        first = next(header.base_offset for _, header in iter_batches(found.records))
        assert first == min(base for base in stored if base >= offset)


@pytest.mark.parametrize("clean", [True, False])
def test_a_compacted_log_survives_a_restart(clean: bool) -> None:
    disk = MemoryDisk()
    partition = opened(disk)
    for sequence in range(30):
        write(partition, b"k%d" % (sequence % 3), b"v", sequence=sequence)
    compact(partition)
    expected, point = committed(partition), partition.recovery_point
    if clean:
        partition.close(NOW_MS)
    again = opened(disk.after_kill(), clean_shutdown=clean, recovery_point=point)
    assert committed(again) == expected and not again.recovery_warnings
    retry = put(again, batch(29, key=b"k2", value=b"v"))
    assert retry.is_duplicate and retry.base_offset == 29


def test_producers_are_rebuilt_from_what_stayed() -> None:
    """No snapshot is needed: the header of an active producer's last batch is always kept."""
    disk = MemoryDisk()
    partition = opened(disk)
    write(partition, b"k", b"of seven", sequence=0, pid=7, epoch=3)
    fill(partition, keys=1, rounds=12)
    write(partition, b"k", b"newest")
    fill(partition, keys=1, rounds=12)
    compact(partition)
    (kept,) = [header for _, header, _ in batches(partition) if header.producer_id == 7]
    assert (kept.records_count, kept.base_sequence, kept.producer_epoch) == (0, 0, 3)
    partition.abandon()
    left = disk.after_kill()
    for name in left.list("orders-0"):
        if name.endswith(".snapshot"):
            left.remove(f"orders-0/{name}")
    again = opened(left)
    assert put(again, batch(0, pid=7, epoch=3, key=b"k", value=b"of seven")).is_duplicate


def test_a_look_up_of_the_largest_time_ignores_records_that_compaction_removed() -> None:
    """Regression: compaction keeps the header of a producer's last batch, with its largest timestamp. The
    look-up found no record if its record was removed.
    """
    partition = opened()
    write(partition, b"k", b"of seven", sequence=0, timestamp_ms=NOW_MS + 9)
    fill(partition, keys=1, rounds=8)
    write(partition, b"k", b"newest", timestamp_ms=NOW_MS + 1)
    fill(partition, keys=2, rounds=8)
    assert partition.max_timestamp_offset() == (NOW_MS + 9, 0)
    compact(partition)
    assert committed(partition)[0][0] > 0
    found = partition.max_timestamp_offset()
    assert found is not None and found.timestamp_ms <= NOW_MS + 1
    assert found.offset in [offset for offset, _, _ in committed(partition)]


def test_a_look_up_of_the_largest_time_reads_a_batch_whose_last_records_are_gone() -> None:
    """Regression: DeleteRecords deleted the first records of a batch, and compaction had removed the others.
    The look-up failed with a TypeError.
    """
    partition = opened()
    records = [NewRecord(NOW_MS + 9, b"first", b"v"), NewRecord(NOW_MS + 9, b"k", b"superseded")]
    put(partition, memoryview(build_batch(records)))
    write(partition, b"k", b"newest", timestamp_ms=NOW_MS + 5)
    fill(partition, keys=2, rounds=8)
    compact(partition)
    assert [offset for offset, _, _ in committed(partition)][:2] == [0, 2]
    partition.delete_records(1, NOW_MS)
    assert partition.max_timestamp_offset() == (NOW_MS + 5, 2)


@pytest.mark.parametrize("codec", list(Compression))
def test_batches_of_several_records_keep_only_the_newest_keys(codec: Compression) -> None:
    partition = opened()
    for number in range(12):
        data = batch(number * 4, 4, pid=7, key=b"k", value=b"v%d" % number, compression=codec)
        put(partition, data)
    compact(partition)
    closed = [
        header for _, header, _ in batches(partition) if header.last_offset < partition.cleaner.cleaned_to
    ]
    assert len(closed) == 1
    (last,) = closed
    assert (last.records_count, last.last_offset_delta, last.compression) == (1, 3, codec)
    assert last.base_sequence == last.base_offset and last.last_offset + 1 == partition.cleaner.cleaned_to


def test_tombstones_are_removed_in_two_rounds() -> None:
    partition = opened()
    write(partition, b"gone", b"value")
    write(partition, b"gone", None)
    fill(partition)
    compact(partition)
    assert (1, b"gone", None) in committed(partition)
    fill(partition)
    compact(partition, NOW_MS + 999)
    assert (1, b"gone", None) in committed(partition)
    fill(partition)
    compact(partition, NOW_MS + 1_000)
    assert all(key != b"gone" for _, key, _ in committed(partition))


def transaction(partition: Partition, pid: int, first: int, values: list[bytes], *, commit: bool) -> None:
    for index, value in enumerate(values):
        write(partition, b"t", value, sequence=first + index, pid=pid, is_transactional=True)
    put_marker(partition, marker(pid, commit=commit))


def test_aborted_records_are_removed_and_their_marker_later() -> None:
    partition = opened()
    transaction(partition, 1, 0, [b"first"], commit=True)
    transaction(partition, 1, 1, [b"bad", b"worse"], commit=False)
    transaction(partition, 2, 0, [b"of another"], commit=False)
    fill(partition)
    expected = newest(partition)
    for now_ms in (NOW_MS, NOW_MS + DAY_MS // 2, NOW_MS + DAY_MS, NOW_MS + DAY_MS + 2_000):
        compact(partition, now_ms)
        assert newest(partition) == expected
        fill(partition)
        expected = newest(partition)
    values = [value for _, _, value in committed(partition)]
    assert b"first" in values and b"bad" not in values
    kinds = [header.is_control for _, header, _ in batches(partition) if header.producer_id == 2]
    # Producer 2 has not expired, so the header of its last data batch is kept, and that batch needs its
    # marker.
    assert kinds == [False, True]
    assert [a.producer_id for a in partition.aborted_transactions(0, 10**6)] == [1, 2]


def test_markers_of_expired_producers_are_removed_completely() -> None:
    partition = open_partition(None, config(1_000, **SETTINGS, delete_retention_ms=1_000))
    transaction(partition, 1, 0, [b"bad"], commit=False)
    fill(partition, keys=1)
    for step in range(4):
        now_ms = NOW_MS + DAY_MS + step * 2_000
        for _ in partition.expire_producers(now_ms):
            pass
        compact(partition, now_ms)
        fill(partition, keys=1)
    assert all(header.producer_id != 1 for _, header, _ in batches(partition))
    assert partition.aborted_transactions(0, 10**6) == []


@pytest.mark.parametrize("retention_ms", [INT64_MAX, INT64_MAX - NOW_MS + 1, INT64_MAX - NOW_MS])
def test_tombstones_kept_without_limit_survive_rounds_and_restarts(retention_ms: int) -> None:
    """Regression: the delete horizon of the tombstones did not fit the format, so every round of compaction
    failed.
    """
    disk, kept = MemoryDisk(), config(**SETTINGS, delete_retention_ms=retention_ms)
    partition = open_partition(disk, kept)
    write(partition, b"gone", b"old")
    write(partition, b"gone", None)
    for number in range(3):
        fill(partition, rounds=3)
        now_ms = NOW_MS + number * DAY_MS
        assert compact(partition, now_ms)
        assert partition.cleaner.cleaned_to > 1
        partition.close(now_ms)
        partition = open_partition(disk, kept, clean_shutdown=True, now_ms=now_ms)
    assert [value for _, key, value in committed(partition) if key == b"gone"] == [None]


def test_an_open_transaction_holds_compaction_back() -> None:
    partition = opened()
    fill(partition, rounds=5)
    write(partition, b"k0", b"open", sequence=0, pid=1, is_transactional=True)
    first = partition.last_stable_offset
    fill(partition)
    compact(partition)
    assert partition.cleaner.cleaned_to <= first
    put_marker(partition, marker(1, commit=True))
    assert (first, b"k0", b"open") in committed(partition)


@pytest.mark.parametrize("transactions", [1, 300])
def test_a_commit_that_is_not_synced_holds_compaction_back(transactions: int) -> None:
    """Regression: compaction removed the records that an unsynced commit superseded. A power loss then took
    the commit.
    """
    partition = opened()
    write(partition, b"k0", b"synced")
    for pid in range(transactions):
        write(partition, b"k0", b"lost", sequence=0, pid=pid, is_transactional=True)
    for number in range(9):
        write(partition, b"other", b"%d" % number)
    partition.flush()
    point = partition.recovery_point
    for pid in range(transactions):
        put_marker(partition, marker(pid, commit=True))
    dirty = partition.cleaner.dirty_range(NOW_MS)
    if dirty is not None:
        run(partition.cleaner.compact(dirty, NOW_MS))
    disk = partition.log.disk._disk
    assert isinstance(disk, MemoryDisk)
    again = opened(disk.after_power_loss(Random(1)), recovery_point=point)
    for pid in range(transactions):
        if again.has_open_transaction(pid, 0):
            put_marker(again, marker(pid, commit=False))
    assert (0, b"k0", b"synced") in committed(again)
    assert compact(partition), "once the markers are synced"
    assert (0, b"k0", b"synced") not in committed(partition)


@pytest.mark.parametrize("is_snapshot_refused", [False, True])
def test_compaction_waits_for_the_snapshot_of_its_segments(is_snapshot_refused: bool) -> None:
    """Regression: a full disk refused the snapshot of the last roll. Compaction then removed the last synced
    batch of a producer whose newer batch was not synced. After a power loss took the newer one, the producer
    was unknown, and its retry was stored a second time.
    """
    disk = MemoryDisk()
    partition = opened(disk)
    write(partition, b"k0", b"1", sequence=0)
    if is_snapshot_refused:
        disk.errors["write", ".tmp"] = errno.ENOSPC
    fill(partition)
    disk.errors.clear()
    partition.flush()
    point = partition.recovery_point
    write(partition, b"k0", b"2", sequence=1)
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert (dirty is None) == is_snapshot_refused
    if dirty is not None:
        run(partition.cleaner.compact(dirty, NOW_MS))
    again = opened(disk.after_power_loss(Random(3)), recovery_point=point)
    assert put(again, batch(key=b"k0", value=b"1", sequence=0)).is_duplicate
    # The next checkpoint writes the snapshot. It covers the batch that is not synced yet, so a flush is due.
    partition.checkpoint_producers()
    assert partition.is_flush_due == is_snapshot_refused
    assert compact(partition) == is_snapshot_refused


def _retry_after_compaction_and_power_loss(partition: Partition, disk: MemoryDisk, point: int) -> bool:
    """Append an unsynced batch, compact, lose power, and retry the batch before it. Return True if the retry
    is recognised. `point` is the recovery point on disk.
    """
    write(partition, b"k0", b"2", sequence=2)
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    assert dirty.end_offset <= point
    run(partition.cleaner.compact(dirty, NOW_MS))
    assert 1 not in [offset for offset, _, _ in batches(partition)], "only snapshots have the batch now"
    again = opened(disk.after_power_loss(Random(3)), recovery_point=point)
    return put(again, batch(key=b"k0", value=b"1", sequence=1)).is_duplicate


def test_a_replay_from_an_older_snapshot_knows_what_compaction_removed() -> None:
    """Regression: a full disk refused the snapshot of the last roll, and the next checkpoint wrote one at a
    higher offset. The recovery point on disk was still below it, so a start did not load it.
    """
    disk = MemoryDisk()
    partition = opened(disk)
    write(partition, b"unique", b"0", sequence=0)
    write(partition, b"k0", b"1", sequence=1)
    disk.errors["write", ".tmp"] = errno.ENOSPC
    fill(partition)
    while partition.log_end_offset != partition.log.segments.active.base_offset + 1:
        write(partition, b"k1", b"v")
    partition.flush()
    point = partition.recovery_point
    write(partition, b"k1", b"v")
    disk.errors.clear()
    partition.checkpoint_producers()
    partition.flush()
    assert partition.log.producers.snapshots.offsets() == [point + 1]
    assert _retry_after_compaction_and_power_loss(partition, disk, point)


def test_a_stop_right_after_a_roll_loses_no_producer_that_was_compacted() -> None:
    """Regression: a stop gave up the snapshot of a roll, because it writes one at the log end. The snapshot
    after the restart replaced that one, and the recovery point on disk was still between the two.
    """
    disk, background = MemoryDisk(), BackgroundQueue()
    background.on_added = lambda: None
    partition = opened(disk, background=background)
    write(partition, b"unique", b"0", sequence=0)
    write(partition, b"k0", b"1", sequence=1)
    write(partition, b"k0", b"other")
    while partition.segment_count < 4:
        write(partition, b"k1", b"v")
    partition.close(NOW_MS)
    point = partition.log_end_offset
    partition = opened(disk, clean_shutdown=True, recovery_point=point)
    write(partition, b"k1", b"v")
    partition.flush()
    partition.log.snapshot()
    assert partition.log.producers.snapshots.offsets() == [point + 1]
    assert _retry_after_compaction_and_power_loss(partition, disk, point)


def test_a_start_that_trusts_no_file_lowers_no_epoch() -> None:
    """Regression: compaction had emptied the marker that fenced a producer. A start that read all records
    then took the epoch of the records before, and a fenced producer could append.
    """
    disk = MemoryDisk()
    partition = opened(disk)
    transaction(partition, 7, 0, [b"kept"], commit=True)
    write(partition, b"bad", b"1", sequence=1, is_transactional=True)
    put_marker(partition, marker(7, commit=False, epoch=1))
    for now_ms in (NOW_MS, NOW_MS + 2_000, NOW_MS + 4_000):
        fill(partition)
        compact(partition, now_ms)
    kinds = [header.records_count for _, header, _ in batches(partition) if header.producer_epoch == 1]
    assert kinds == [0], "the marker is empty"
    partition.close(NOW_MS)
    how = {"clean_shutdown": True, "recovery_point": partition.log_end_offset, "checks_all": True}
    again = opened(disk.after_kill(), **how)
    with pytest.raises(InvalidProducerEpoch):
        write(again, b"zombie", b"1", sequence=1, is_transactional=True)


def test_a_busy_log_takes_the_missing_snapshot_once() -> None:
    """A request must not replace a snapshot that is being written, or compaction would wait forever."""
    disk, background = MemoryDisk(), BackgroundQueue()
    background.on_added = lambda: None
    partition = opened(disk, background=background)
    for number in range(200):
        write(partition, b"k0", b"%d" % number, sequence=number)
        partition.checkpoint_producers()
        if (call := background.step()) is not None:
            call()
        if number % 10 == 0:
            partition.flush()
    assert partition.cleaner.dirty_range(NOW_MS) is not None


def test_compaction_does_not_wait_for_a_marker_without_end() -> None:
    """Compaction must make a flush due, or it would wait forever for a sync of the marker. The marker is in
    the active segment, no record follows it, and no flush is due by itself.
    """
    partition = opened()
    write(partition, b"k0", b"replaced", sequence=0, pid=7, is_transactional=True)
    for number in range(9):
        write(partition, b"other", b"%d" % number)
    partition.flush()
    assert not partition.is_flush_due
    put_marker(partition, marker(7, commit=True))
    assert partition.cleaner.dirty_range(NOW_MS) is None and partition.is_flush_due
    partition.flush()
    assert partition.cleaner.dirty_range(NOW_MS) is not None and not partition.is_flush_due


def test_more_keys_than_fit_take_several_rounds() -> None:
    partition = opened()
    fill(partition, rounds=6, keys=7)
    expected, rounds = newest(partition), 0
    limit(partition, max_compaction_keys=3)
    while compact(partition):
        rounds += 1
        assert newest(partition) == expected
    assert rounds > 3


class CompactedLog:
    """Random transactions of two producers on a few keys, with compaction between them."""

    def __init__(self, draw: Random, log_config: LogConfig = COMPACTED, keys: int = 4) -> None:
        self.disk = MemoryDisk()
        self.partition = open_partition(self.disk, log_config)
        self.keys = keys
        self.draw = draw
        self.sequences = {1: 0, 2: 0}
        self.open: set[int] = set()
        self.now_ms = NOW_MS

    def step(self) -> None:
        draw = self.draw
        pid = draw.choice((1, 2))
        key, value = b"k%d" % draw.randrange(self.keys), draw.choice((None, b"a", b"b" * 20))
        match draw.randrange(6):
            case 0:
                self.open.add(pid)
                self._put(pid, key, value)
            case 1 if pid in self.open:
                self.open.discard(pid)
                put_marker(self.partition, marker(pid, commit=draw.random() < 0.5))
            case 2:
                write(self.partition, key, value)
            case 3:
                self.now_ms += draw.choice((1, 600, 5_000))
            case _:
                self._put(pid, key, value)

    def _put(self, pid: int, key: bytes, value: bytes | None) -> None:
        count = self.draw.randrange(1, 4)
        how = {"is_transactional": pid in self.open, "value": value, "key": key}
        put(self.partition, batch(self.sequences[pid], count, pid=pid, **how))  # type: ignore[arg-type]
        self.sequences[pid] += count


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**9))
def test_readers_see_the_same_state_before_and_after(seed: int) -> None:
    compacted = CompactedLog(Random(seed))
    for _ in range(6):
        for _ in range(40):
            compacted.step()
        partition = compacted.partition
        expected, offsets = newest(partition), {row[0] for row in committed(partition)}
        stable, end = partition.last_stable_offset, partition.log_end_offset
        compact(partition, compacted.now_ms)
        assert newest(partition) == expected
        assert {row[0] for row in committed(partition)} <= offsets
        assert (partition.last_stable_offset, partition.log_end_offset) == (stable, end)
        point = partition.recovery_point
        restarted = opened(compacted.disk.after_kill(), recovery_point=point)
        assert committed(restarted) == committed(partition)
        assert restarted.describe_producers() == partition.describe_producers()


@pytest.mark.timeout(900)
@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10**9),
    max_keys=st.integers(1, 30),
    keys=st.integers(1, 60),
    segment_bytes=st.sampled_from((400, 2_000, 20_000)),
)
def test_readers_see_the_same_however_few_keys_fit_the_map(
    seed: int, max_keys: int, keys: int, segment_bytes: int
) -> None:
    """If only few keys fit into the map, a round of compaction may end within a segment, even between an
    aborted record and its marker.
    """
    limits = Limits(max_compaction_keys=max_keys)
    log_config = config(
        limits=limits, **{**SETTINGS, "segment_bytes": segment_bytes}, delete_retention_ms=1_000
    )
    compacted = CompactedLog(Random(seed), log_config, keys)
    partition = compacted.partition
    for _ in range(3):
        for _ in range(60):
            compacted.step()
        partition.log.roll(compacted.now_ms)
        before = set(committed(partition))
        expected, is_dirty = newest(partition), True
        while is_dirty:
            is_dirty = compact(partition, compacted.now_ms)
            assert newest(partition) == expected
            assert set(committed(partition)) <= before
            restarted = open_partition(
                compacted.disk.after_kill(), log_config, recovery_point=partition.recovery_point
            )
            assert committed(restarted) == committed(partition)


def test_a_marker_behind_the_end_of_a_round_keeps_its_index_entry() -> None:
    log_config = config(**{**SETTINGS, "segment_bytes": 20_000})
    partition = open_partition(None, log_config)
    write(partition, b"t", b"committed")
    for key in range(30):
        write(partition, b"k%d" % key, b"v")
    transaction(partition, 1, 0, [b"aborted"], commit=False)
    write(partition, b"end", b"v")
    partition.log.roll(NOW_MS)
    expected = newest(partition)
    assert expected[b"t"] == b"committed"
    limit(partition, max_compaction_keys=20)
    while compact(partition):
        assert newest(partition) == expected


def half_cleaned() -> tuple[MemoryDisk, Partition]:
    """Return a disk and a partition. The partition's next round ends between the records of an aborted
    transaction and its marker.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, config(**{**SETTINGS, "segment_bytes": 20_000}))
    write(partition, b"t", b"committed")
    for key in range(18):
        write(partition, b"k%d" % key, b"v")
    transaction(partition, 1, 0, [b"t"], commit=False)
    for key in range(4):
        write(partition, b"l%d" % key, b"v")
    partition.log.roll(NOW_MS)
    limit(partition, max_compaction_keys=15)
    partition.flush()
    return disk, partition


def test_a_power_loss_during_a_swap_keeps_aborted_records_hidden() -> None:
    disk, partition = half_cleaned()
    expected = newest(partition)
    compact(partition)
    total = disk.steps
    for step in range(total - 16, total):
        disk, partition = half_cleaned()
        point, disk.crash_after = partition.recovery_point, step
        with pytest.raises(SimulatedCrash):
            compact(partition)
        for seed in range(60):
            again = opened(disk.after_power_loss(Random(seed)), recovery_point=point)
            assert newest(again) == expected, f"step {step}, seed {seed}"


def test_a_power_loss_during_a_swap_leaves_no_index_of_another_segment() -> None:
    """A power loss may keep the new names of a compacted segment's indexes, and lose its log file."""
    disk, draw, settings = MemoryDisk(), Random(1), SETTINGS | {"segment_bytes": 1_500}
    partition = open_partition(disk, config(**settings))
    for number in range(60):
        key = b"%d" % number if draw.random() < 0.3 else b"k"
        write(partition, key, bytes(draw.choice((1, 20, 50))), timestamp_ms=NOW_MS + number)
    partition.flush()
    partition.reconfigure(config(**settings | {"segment_bytes": 40_000}))
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None

    def crash(operation: str, path: str) -> None:
        if (operation, path) == ("sync", "orders-0") and disk.exists(f"orders-0/{0:020d}.index.swap"):
            disk.crash_after = disk.steps

    disk.on_step.append(crash)
    with pytest.raises(SimulatedCrash):
        run(partition.cleaner.compact(dirty, NOW_MS))
    for seed in range(60):
        again = open_partition(
            disk.after_power_loss(Random(seed)), config(**settings), recovery_point=partition.recovery_point
        )
        found = [again.offset_for_timestamp(NOW_MS + offset) for offset in range(60)]
        assert [entry.offset for entry in found if entry is not None] == list(range(60)), f"seed {seed}"


def test_an_index_of_what_is_replaced_is_not_taken_over() -> None:
    """A kill during a swap left the index of aborted transactions of a replaced segment.

    Oncelog up to version 0.5.0 created no such index for the new segment.
    """
    disk, partition = half_cleaned()
    partition.close(NOW_MS)
    stem = f"orders-0/{0:020d}"
    for suffix in (".log", ".index", ".timeindex"):
        disk.rename(stem + suffix, f"{stem}{suffix}.swap")
    assert disk.open(f"{stem}.txnindex").size()
    again = opened(disk, clean_shutdown=True)
    assert again.aborted_transactions(0, again.log_end_offset) == []


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_lost_entries_of_aborted_transactions_are_restored_from_their_markers(seed: int) -> None:
    """Up to version 0.4.1, compaction could lose any entry of the index of aborted transactions."""
    draw = Random(seed)
    compacted = CompactedLog(draw)
    for _ in range(3):
        for _ in range(60):
            compacted.step()
        compact(compacted.partition, compacted.now_ms)
    expected, end = committed(compacted.partition), compacted.partition.log_end_offset
    compacted.partition.close(NOW_MS)
    disk = compacted.disk.after_kill()
    for name in disk.list("orders-0"):
        if name.endswith(".txnindex") and draw.random() < 0.7:
            disk.remove(f"orders-0/{name}")
    for is_repeated in (False, True):
        again = opened(disk, clean_shutdown=True)
        again.restore_aborted_index(end)
        assert committed(again) == expected
        assert not (is_repeated and again.recovery_warnings), "the first one wrote them down"
        again.abandon()


def prepared() -> tuple[MemoryDisk, Partition]:
    """Return a disk and a partition. The partition was compacted once, and has small segments to merge and
    new dirty records.
    """
    compacted = CompactedLog(Random(4))
    for _ in range(40):
        compacted.step()
    compact(compacted.partition)
    for _ in range(20):
        compacted.step()
    compacted.partition.flush()
    return compacted.disk, compacted.partition


def test_a_compaction_survives_a_crash_at_every_step() -> None:
    disk, partition = prepared()
    expected, start = newest(partition), disk.steps
    compact(partition, NOW_MS)
    total = disk.steps
    assert newest(partition) == expected
    replaced = 0
    # Crash at every eleventh step, which is mostly within a write. Near the end also crash at each rename,
    # removal and sync.
    for step in [*range(start, total, 11), *range(total - 40, total)]:
        disk, partition = prepared()
        point, segments = partition.recovery_point, partition.segment_count
        disk.crash_after = step
        with pytest.raises(SimulatedCrash):
            compact(partition, NOW_MS)
        for survivor in (disk.after_kill(), *(disk.after_power_loss(Random(step * 7 + n)) for n in range(3))):
            again = opened(survivor, recovery_point=point)
            assert newest(again) == expected, f"step {step}"
            assert all("indexes rebuilt" in report for report in again.recovery_warnings)
            leftovers = [n for n in survivor.list("orders-0") if n.endswith((".cleaned", ".swap"))]
            assert not leftovers
            replaced += again.segment_count < segments
            compact(again, NOW_MS)
            assert newest(again) == expected, f"step {step}, compacted again"
            again.abandon()
    assert replaced, "no crash fell between the swap and its end"


def test_recovery_of_a_compaction_survives_a_crash_at_every_step() -> None:
    disk, partition = prepared()
    expected, start = newest(partition), disk.steps
    compact(partition, NOW_MS)
    for step in range(disk.steps - 30, disk.steps):
        disk, partition = prepared()
        point = partition.recovery_point
        disk.crash_after = max(step, start)
        with pytest.raises(SimulatedCrash):
            compact(partition, NOW_MS)
        found = disk.after_kill()
        probe = found.after_kill()
        opened(probe, recovery_point=point).abandon()
        for again in range(probe.steps):
            second = found.after_kill()
            second.crash_after = again
            with pytest.raises(SimulatedCrash):
                opened(second, recovery_point=point)
            assert newest(opened(second.after_kill(), recovery_point=point)) == expected


@pytest.mark.parametrize("operation", ["write", "sync", "rename", "create"])
def test_a_compaction_on_a_failing_disk_changes_no_record(operation: str) -> None:
    disk, partition = prepared()
    expected = newest(partition)
    disk.errors = {(operation, ".cleaned"): errno.ENOSPC}
    with pytest.raises(KafkaStorageError, match="compaction failed"):
        compact(partition)
    disk.errors = {}
    assert newest(partition) == expected and not partition.is_offline
    assert compact(partition) and newest(partition) == expected


@pytest.mark.parametrize(("call", "is_offline"), [(("rename", ".swap"), False), (("sync", "orders-0"), True)])
def test_a_disk_failure_during_the_swap_changes_no_record(call: tuple[str, str], is_offline: bool) -> None:
    disk, partition = prepared()
    expected, point = newest(partition), partition.recovery_point
    disk.errors = {call: errno.EIO}
    with pytest.raises(KafkaStorageError, match="compaction failed"):
        compact(partition)
    disk.errors = {}
    assert (partition.is_offline, partition.cleaner.has_unfinished_swap) == (is_offline, not is_offline)
    assert newest(partition) == expected
    partition.abandon()
    assert newest(opened(disk.after_kill(), recovery_point=point)) == expected


def test_a_damaged_batch_ends_the_compaction_without_a_change() -> None:
    disk, partition = prepared()
    path = f"orders-0/{0:020d}.log"
    file = disk.open(path)
    file.pwrite(b"\xff", 70)
    with pytest.raises(KafkaStorageError, match="checksum"):
        compact(partition)
    assert not compact(partition), "not tried again and again"
    assert not [name for name in disk.list("orders-0") if name.endswith((".cleaned", ".swap"))]


def test_a_damaged_commit_gets_no_index_entry() -> None:
    """A flipped bit may turn a COMMIT marker into an ABORT marker. An index entry for it would hide committed
    records.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0, is_transactional=True))
    put_marker(partition, marker(7, commit=True))
    end, position = partition.log_end_offset, len(batch(0)) + 61
    partition.close(NOW_MS)
    file = disk.open(f"orders-0/{0:020d}.log")
    stored, aborted = file.pread(17, position), bytes(marker(7, commit=False))[61:]
    (different,) = (at for at in range(17) if stored[at] != aborted[at])
    file.pwrite(aborted[different : different + 1], position + different)
    again = open_partition(disk, clean_shutdown=True)
    again.restore_aborted_index(end)
    assert again.aborted_transactions(0, end) == []


def test_a_damaged_swap_file_still_replaces_all_old_segments() -> None:
    """Regression: the start mistook a damaged length for the end of the log, and kept some replaced
    segments.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, config(segment_bytes=200))
    for number in range(12):
        put(partition, batch(number))
    assert partition.segment_count > 3
    partition.close(NOW_MS)
    logs = [f"orders-0/{name}" for name in disk.list("orders-0") if name.endswith(".log")]
    whole = bytearray(b"".join(disk.read(name) for name in logs[:-1]))
    whole[len(batch(0)) + 8] ^= 0x40
    disk.replace(f"{logs[0]}.swap", bytes(whole))
    again = open_partition(disk, recovery_point=12)
    assert (again.segment_count, again.log_end_offset) == (2, 12)


def test_records_may_be_deleted_and_partitions_closed_during_a_compaction() -> None:
    steps = _steps_of(lambda partition: None)
    assert steps > 20
    for step in range(steps):
        _steps_of(lambda partition: partition.delete_records(40, NOW_MS), step)
        _steps_of(lambda partition: partition.close(NOW_MS), step)


def _steps_of(meanwhile: Any, at: int | None = None) -> int:
    disk, partition = prepared()
    limit(partition, compaction_step_items=3)
    background = partition.log._background = BackgroundQueue()
    background.on_added = lambda: None
    partition.flush()
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    background.add(partition.cleaner.compact(dirty, NOW_MS))
    steps, has_run = 0, False
    while background:
        if steps == at:
            meanwhile(partition)
            has_run = True
        call = background.step()
        if call is not None:
            call()
        steps += 1
    if at is not None and has_run:
        point = partition.recovery_point
        again = opened(disk.after_kill(), recovery_point=point, log_start_offset=partition.log_start_offset)
        values = newest(again)
        again.abandon()
        fresh = prepared()[1]
        kept = [row for row in committed(fresh) if row[0] >= partition.log_start_offset]
        expected = {key: value for _, key, value in kept}
        assert values == {key: value for key, value in expected.items() if value is not None}
    return steps


@pytest.mark.parametrize("deleted_to", [6, 12, 20])
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_kill_after_records_were_deleted_during_a_swap_loses_no_others(
    deleted_to: int, is_stored: bool
) -> None:
    """A client deletes records while the compacted segment is synced in a thread. A kill follows."""
    disk = MemoryDisk()
    settings = {**SETTINGS, "cleanup_policy": "compact,delete"}
    partition = open_partition(disk, config(**settings))
    for number in range(40):
        write(partition, b"%d" % number, b"%d" % number)
    partition.flush()
    partition.reconfigure(config(**settings | {"segment_bytes": 4_000}))
    background = partition.log._background = BackgroundQueue()
    background.on_added = lambda: None
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    background.add(partition.cleaner.compact(dirty, NOW_MS))
    while (call := background.step()) is None or getattr(call.call, "func", None) is not make_swap:
        if call is not None:
            call()
    partition.delete_records(deleted_to, NOW_MS)
    call()
    point, log_start = partition.recovery_point, deleted_to if is_stored else 0
    again = open_partition(
        disk.after_kill(), config(**settings), recovery_point=point, log_start_offset=log_start
    )
    stored = [offset for offset, _, _ in committed(again)]
    assert stored == list(range(log_start, 40))


def test_a_deletion_during_a_call_of_compaction_ends_it_without_an_error(tmp_path: Path) -> None:
    """A client deletes segments while a small compressed batch is decompressed in a thread. Those that
    compaction has yet to read have no open file.
    """
    settings = {**SETTINGS, "cleanup_policy": "compact,delete", "segment_bytes": 100}
    background = BackgroundQueue()
    partition = open_partition(RealDisk(tmp_path), config(**settings), background=background)
    background.on_added = lambda: None
    for number in range(12):
        put(partition, batch(key=b"%d" % number, value=bytes(100), compression=Compression.ZSTD))
    partition.flush()
    background.finish()
    partition.log.release_handles()
    partition.reconfigure(config(**settings | {"segment_bytes": 4_000}))
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    has_begun = False
    for call in partition.cleaner.compact(dirty, NOW_MS):
        if call is not None:
            call()
        if not has_begun and f"{0:020d}.log.cleaned" in os.listdir(tmp_path / "orders-0"):
            has_begun = True
            partition.delete_records(6, NOW_MS)
    background.finish()
    assert partition.log.segments.first.base_offset > 0
    assert [offset for offset, _, _ in committed(partition)] == list(range(6, 12))
    partition.abandon()


@pytest.mark.parametrize("phase", ["keys", "copy"])
def test_a_deletion_behind_a_reader_ends_a_compaction_without_an_error(phase: str, tmp_path: Path) -> None:
    """While a batch is decompressed in a thread, a reader leaves its segment, and so closes the file. Then a
    client deletes the segment, of which compaction has read only the beginning.
    """
    settings = {**SETTINGS, "cleanup_policy": "compact,delete", "segment_bytes": 20_000}
    background, draw = BackgroundQueue(), Random(1)
    partition = open_partition(RealDisk(tmp_path), config(**settings), background=background)
    background.on_added = lambda: None
    for number in range(24):
        put(partition, batch(key=b"%d" % number, value=draw.randbytes(3_000), compression=Compression.ZSTD))
    partition.flush()
    background.finish()
    partition.log.release_handles()
    dirty, has_begun = partition.cleaner.dirty_range(NOW_MS), False
    assert dirty is not None
    for call in partition.cleaner.compact(dirty, NOW_MS):
        if call is None:
            continue
        call()
        is_copying = f"{0:020d}.log.cleaned" in os.listdir(tmp_path / "orders-0")
        if not has_begun and (phase == "keys" or is_copying):
            has_begun = True
            committed(partition)
            partition.delete_records(14, NOW_MS)
    background.finish()
    assert partition.log.segments.first.base_offset > 0
    assert [offset for offset, _, _ in committed(partition)] == list(range(14, 24))
    partition.abandon()


def test_a_power_loss_after_records_were_deleted_behind_a_failed_swap_loses_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compacted segment is complete when the descriptors run out. So it is given up, but that is not
    synced. A client deletes records then.
    """
    disk = MemoryDisk()
    settings = {**SETTINGS, "cleanup_policy": "compact,delete"}
    partition = open_partition(disk, config(**settings))
    background = partition.log._background = BackgroundQueue()
    background.on_added = lambda: None
    for number in range(40):
        write(partition, b"%d" % number, b"%d" % number)
    partition.flush()
    partition.reconfigure(config(**settings | {"segment_bytes": 4_000}))
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(cleaner.SegmentSwapper, "begin", refuse)
        patched.setattr(cleaner, "discard", partial(_discard_without, patched, partition, refuse))
        with pytest.raises(KafkaStorageError, match=os.strerror(errno.EMFILE)):
            run(partition.cleaner.compact(dirty, NOW_MS))
        partition.delete_records(12, NOW_MS)
    for seed in range(100):
        again = open_partition(
            disk.after_power_loss(Random(seed)), config(**settings), recovery_point=partition.recovery_point
        )
        assert [offset for offset, _, _ in committed(again)][-28:] == list(range(12, 40))
    assert partition.cleaner.has_unfinished_swap
    run(partition.cleaner.finish_swap())
    partition.enforce_retention(NOW_MS)
    assert partition.log.segments.first.base_offset > 0


def _discard_without(patched: pytest.MonkeyPatch, partition: Partition, refuse: Any, *args: Any) -> None:
    """Discard a compacted segment without a descriptor for the sync of the directory."""
    patched.setattr(partition.log.disk, "sync_directory", refuse)
    discard(*args)


def test_a_deletion_on_a_full_disk_keeps_the_indexes_of_a_compacted_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk refuses each snapshot, so segments to delete give up their indexes. Here a compaction has
    just given their names to its segment.
    """
    disk = MemoryDisk()
    disk.errors["create", ".tmp"] = errno.ENOSPC
    settings = {**SETTINGS, "cleanup_policy": "compact,delete"}
    partition = open_partition(disk, config(**settings))
    background = partition.log._background = partition._producers._background = BackgroundQueue()
    background.on_added = lambda: None
    for number in range(40):
        write(partition, b"%d" % number, b"%d" % number)
    partition.flush()
    _run(background)
    assert partition._producers.is_snapshot_refused
    partition.reconfigure(config(**settings | {"segment_bytes": 4_000}))

    def take_place_and_delete(*args: Any) -> None:
        take_place(*args)
        partition.delete_records(12, NOW_MS)

    monkeypatch.setattr(cleaner, "take_place", take_place_and_delete)
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    run(partition.cleaner.compact(dirty, NOW_MS))
    assert not partition.is_offline
    assert partition.segment_count == 2
    assert {f"{0:020d}.index", f"{0:020d}.timeindex"} <= set(disk.list("orders-0"))


def _run(background: BackgroundQueue) -> None:
    while background:
        with suppress(OSError):
            if (call := background.step()) is not None:
                call()


def many_segments(disk: Disk, count: int) -> Partition:
    """Return a compacted partition with `count` closed segments of one record each."""
    partition = open_partition(disk, config(cleanup_policy="compact", segment_ms=1))
    for number in range(count + 1):
        write(partition, b"%d" % (number % 50), b"%d" % number, timestamp_ms=NOW_MS + 10 * number)
    partition.flush()
    partition.log.release_handles()
    assert partition.segment_count == count + 1
    return partition


def test_compaction_of_many_segments_needs_few_descriptors(tmp_path: Path) -> None:
    partition = many_segments(RealDisk(tmp_path), 350)
    before = largest = len(os.listdir("/proc/self/fd"))
    dirty = partition.cleaner.dirty_range(NOW_MS + DAY_MS)
    assert dirty is not None
    for call in partition.cleaner.compact(dirty, NOW_MS + DAY_MS):
        if call is not None:
            call()
        largest = max(largest, len(os.listdir("/proc/self/fd")))
    assert largest - before <= 110
    assert partition.segment_count == 5
    assert [int(value or b"") for _, _, value in committed(partition)] == list(range(300, 351))
    partition.abandon()


def test_compaction_of_many_segments_looks_at_each_a_few_times() -> None:
    """The closed segments of a partition are grouped, and looked for, in linear time."""
    count, looks = 600, 0

    class Counted(int):
        def __radd__(self, other: int) -> int:
            nonlocal looks
            looks += 1
            return int(self) + other

        def __add__(self, other: int) -> int:
            nonlocal looks
            looks += 1
            return int(self) + other

    partition = many_segments(MemoryDisk(), count)
    segments = list(partition.log.segments)[:-1]
    for segment in segments:
        segment.size_bytes = Counted(segment.size_bytes)
    groups = list(_groups(segments, partition.config))
    assert [segment for group in groups for segment in group] == segments
    assert looks <= 3 * count


def test_the_last_batch_of_a_round_tells_where_the_log_ends() -> None:
    disk = MemoryDisk()
    partition = opened(disk)
    fill(partition, keys=1)
    transaction(partition, 1, 0, [b"bad"], commit=False)
    partition.flush()
    compact(partition)
    end = partition.log_end_offset
    again = opened(disk.after_kill(), recovery_point=partition.recovery_point)
    assert again.log_end_offset == end
    stored = again.append(batch(), origin=Origin.CLIENT, now_ms=NOW_MS)
    assert stored.base_offset == end


@pytest.mark.parametrize("is_started_again", [False, True])
@pytest.mark.parametrize("ages_ms", [(0, -4_000, -6_000), (-1_800_000, -1_000, 0, -10_000)])
def test_the_compaction_lag_counts_from_the_oldest_first_batch(
    ages_ms: tuple[int, ...], is_started_again: bool
) -> None:
    """The lag is the age of the oldest among the first batches of the dirty segments, as on Apache Kafka."""
    disk, lag_ms = MemoryDisk(), 5_000
    in_time = config(**SETTINGS, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=lag_ms)
    partition = open_partition(disk, in_time)
    for age_ms in ages_ms:
        write(partition, b"k", b"v" * 100, timestamp_ms=NOW_MS - age_ms)
    partition.flush()
    assert partition.segment_count > 1
    if is_started_again:
        partition.close(NOW_MS)
        partition = open_partition(disk, in_time, clean_shutdown=True)
    for now_ms, is_due in ((NOW_MS + lag_ms - 1, False), (NOW_MS + lag_ms, True)):
        dirty = partition.cleaner.dirty_range(now_ms)
        assert dirty is not None
        assert dirty._replace(clean_bytes=10**6).is_due(1.0, lag_ms, now_ms) is is_due


def test_compaction_reads_aborted_transactions_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: two steps each created 300,000 objects, one for each aborted transaction."""
    made = 0
    make = AbortedTransaction._make.__func__  # type: ignore[attr-defined]

    class Counted(Aborted):
        def __new__(cls, *fields: int) -> Counted:
            nonlocal made
            made += 1
            return super().__new__(cls, *fields)

    def new_entry(cls: type[AbortedTransaction], *fields: int) -> AbortedTransaction:
        nonlocal made
        made += 1
        return make(cls, fields)  # type: ignore[no-any-return]

    partition = open_partition(log_config=config(**SETTINGS, limits=Limits(compaction_step_items=5)))
    for number in range(200):
        write(partition, b"k%d" % number, b"v", sequence=number, pid=7, is_transactional=True)
        put_marker(partition, marker(7, commit=False))
    partition.flush()
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    monkeypatch.setattr("oncelog.rules.storage.compaction.Aborted", Counted)
    monkeypatch.setattr(AbortedTransaction, "__new__", new_entry)
    task, total = partition.cleaner.compact(dirty, NOW_MS), 0
    for call in task:
        assert made <= 10
        total, made = total + made, 0
        if call is not None:
            call()
            made = 0
    assert total > 300
    assert committed(partition) == []
