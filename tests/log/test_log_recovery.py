"""Recovery: torn tails, lost indexes, bad snapshots, retries over a restart, expiry."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest
from support.log.model import read_rows
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

from oncelog.errors import (
    CorruptMessage,
    InvalidRecord,
    KafkaStorageError,
    OutOfOrderSequenceNumber,
    StorageError,
)
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue, run
from oncelog.log.config import LogConfig
from oncelog.log.disk import write_synced
from oncelog.log.partition import Partition, ProducerState
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Isolation
from oncelog.wire.batch import iter_batches
from oncelog.wire.header import stamp, verify_crc

SMALL = config(segment_bytes=400, index_interval_bytes=100)
SMALL_TABLE = config(segment_bytes=400, index_interval_bytes=100, cleanup_policy="compact")
DAY_MS = 86_400_000


def _names(disk: MemoryDisk, suffix: str) -> list[str]:
    return [name for name in disk.list(str(TP)) if name.endswith(suffix)]


def _filled(disk: MemoryDisk, count: int = 12) -> Partition:
    partition = open_partition(disk, SMALL)
    for number in range(count):
        put(partition, batch(number, pid=1))
    return partition


def _corrupt(disk: MemoryDisk, name: str, position: int = -1) -> None:
    file = disk.open(f"{TP}/{name}")
    at = position % file.size()
    file.pwrite(bytes([file.pread(1, at)[0] ^ 0xFF]), at)


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_a_retry_after_a_restart_is_a_duplicate(clean: bool) -> None:
    """The last five batches of a producer are remembered, although Kafka's snapshot file has only the newest
    one.
    """
    disk = MemoryDisk()
    partition = _filled(disk)
    before = (partition.describe_producers(), read_all(partition))
    if clean:
        partition.close(NOW_MS)
    partition = open_partition(disk.after_kill(), SMALL, clean_shutdown=clean)
    assert (partition.describe_producers(), read_all(partition)) == before
    for number in range(7, 12):
        again = put(partition, batch(number, pid=1))
        assert (again.is_duplicate, again.base_offset) == (True, number)
    with pytest.raises(OutOfOrderSequenceNumber):
        put(partition, batch(6, pid=1))
    assert put(partition, batch(12, pid=1)).base_offset == 12
    assert partition.recovery_warnings == []


@pytest.mark.behaviour("I20")
def test_snapshots_are_taken_at_rolls_and_on_closing_only() -> None:
    disk = MemoryDisk()
    partition = _filled(disk, 5)
    assert _names(disk, ".snapshot") == []
    put(partition, batch(5, pid=1))
    assert partition.segment_count == 2
    assert _names(disk, ".snapshot") == [f"{5:020d}.snapshot"]
    partition.close(NOW_MS)
    assert _names(disk, ".snapshot") == [f"{5:020d}.snapshot", f"{6:020d}.snapshot"]
    assert _names(disk, ".producers") == [f"{5:020d}.producers", f"{6:020d}.producers"]


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("victims", [1, 2, 3])
@pytest.mark.parametrize("suffix", [".snapshot", ".producers"])
def test_corrupt_snapshots_give_way_to_older_ones(victims: int, suffix: str) -> None:
    disk = MemoryDisk()
    partition = _filled(disk)
    before = partition.describe_producers()
    partition.close(NOW_MS)
    names = _names(disk, suffix)
    assert len(names) == 3
    for name in names[-victims:]:
        _corrupt(disk, name)
    partition = open_partition(disk, SMALL, clean_shutdown=True)
    assert partition.describe_producers() == before
    assert put(partition, batch(8, pid=1)).is_duplicate


@pytest.mark.behaviour("I17")
def test_kafkas_snapshot_alone_is_enough_for_the_newest_batch() -> None:
    disk = MemoryDisk()
    _filled(disk).close(NOW_MS)
    for name in _names(disk, ".producers"):
        disk.remove(f"{TP}/{name}")
    partition = open_partition(disk, SMALL, clean_shutdown=True)
    assert put(partition, batch(11, pid=1)).is_duplicate
    with pytest.raises(OutOfOrderSequenceNumber):
        put(partition, batch(10, pid=1))


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("start", [0, 25])
def test_a_damaged_file_of_producers_leaves_their_last_batches_known(start: int) -> None:
    """Regression: a damaged `.producers` file made Kafka's snapshot beside it useless. If the records were
    deleted, a retry was stored twice, and an open transaction was forgotten.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(12):
        put(partition, batch(number, pid=1))
        put(partition, batch(number, pid=2))
    put(partition, batch(0, pid=3, is_transactional=True))
    partition.delete_records(start, NOW_MS)
    before, how = partition.describe_producers(), {"clean_shutdown": True, "log_start_offset": start}
    partition.close(NOW_MS)
    _corrupt(disk, _names(disk, ".producers")[-1])
    partition = open_partition(disk, SMALL, **how)
    assert partition.describe_producers() == (before if not start else _last_batches(before))
    assert put(partition, batch(11, pid=1)).is_duplicate
    partition.close(NOW_MS)
    again = open_partition(disk, SMALL, **how)
    assert again.describe_producers() == partition.describe_producers(), "a stop repairs the file"
    assert again.log.producers.snapshot_offset == 25


def _last_batches(states: list[ProducerState]) -> list[ProducerState]:
    return [state._replace(entry=state.entry._replace(batches=state.entry.batches[-1:])) for state in states]


@pytest.mark.behaviour("I17")
def test_a_last_batch_torn_at_any_byte_is_cut_off() -> None:
    disk = MemoryDisk()
    partition = _filled(disk, 6)
    size = len(batch(5, pid=1))
    name = _names(disk, ".log")[-1]
    total = disk.open(f"{TP}/{name}").size()
    for missing in range(1, size + 1):
        torn = disk.after_kill()
        torn.open(f"{TP}/{name}").truncate(total - missing)
        partition = open_partition(torn, SMALL)
        assert partition.log_end_offset == 5
        assert len(partition.recovery_warnings) == (missing < size)
        assert torn.open(f"{TP}/{name}").size() == total - size
        # The producer got no acknowledgement of batch 4 and retries it. The retry is a duplicate if the batch
        # survived.
        assert put(partition, batch(4, pid=1)).is_duplicate
        assert put(partition, batch(5, pid=1)).base_offset == 5


def test_a_damaged_batch_cuts_the_log_there() -> None:
    disk = MemoryDisk()
    _filled(disk)
    _corrupt(disk, _names(disk, ".log")[1])
    last_base = int(_names(disk, ".log")[-1].partition(".")[0])
    partition = open_partition(disk.after_kill(), SMALL)
    assert partition.log_end_offset == 9
    assert "cut at position" in partition.recovery_warnings[0]
    assert "checksum" in partition.recovery_warnings[0]
    gone = last_base - 9
    assert "bytes from offset 9 on are removed" in partition.recovery_warnings[0]
    assert f"at least {gone} offsets of acknowledged records" in partition.recovery_warnings[0]
    assert len(_names(disk.after_kill(), ".log")) == 3
    assert put(partition, batch(9, pid=1)).base_offset == 9


def test_recovery_reads_from_the_recovery_point_on() -> None:
    disk = MemoryDisk()
    partition = _filled(disk)
    partition.flush()
    point = partition.recovery_point
    assert point == 12
    put(partition, batch(12, pid=1))
    # Recovery does not look for damage below the recovery point, because that part was synced.
    _corrupt(disk, _names(disk, ".log")[0])
    partition = open_partition(disk.after_kill(), SMALL, recovery_point=point)
    assert (partition.log_end_offset, partition.recovery_warnings) == (13, [])
    assert partition.recovery_point == 12


@pytest.mark.parametrize("position", [-1, 10, 16, 20], ids=["record", "length", "format", "checksum"])
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_damage_below_the_recovery_point_is_no_torn_tail(clean: bool, position: int) -> None:
    """Found by the simulator: after one flipped bit, the rebuild of an index truncated the log at the damaged
    batch.
    """
    disk, large = MemoryDisk(), config(index_interval_bytes=100)
    partition = open_partition(disk, large)
    size = len(batch(0, pid=1))
    for number in range(6):
        put(partition, batch(number, pid=1))
    partition.flush()
    point = partition.recovery_point
    disk = disk.after_kill()
    name = _names(disk, ".log")[0]
    _corrupt(disk, name, 3 * size - 1 if position < 0 else 2 * size + position)
    disk.replace(f"{TP}/{0:020d}.timeindex", b"damaged")
    for _ in range(2):
        again = open_partition(disk, large, recovery_point=point, clean_shutdown=clean)
        assert clean or "is damaged at position" in str(again.recovery_warnings)
        assert (again.log_end_offset, disk.open(f"{TP}/{name}").size()) == (6, 6 * size)
        assert again.read(3, 1 << 20).next_offset == 6 and put(again, batch(5, pid=1)).is_duplicate
        disk.replace(f"{TP}/{0:020d}.timeindex", b"damaged")
        disk = disk.after_kill()


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
@pytest.mark.parametrize("tail", [bytes(300), b"junk" * 20], ids=["zeros", "junk"])
@pytest.mark.parametrize("lost", [".index", ".timeindex"])
def test_bytes_after_a_synced_segment_remove_no_later_one(clean: bool, tail: bytes, lost: str) -> None:
    """Regression: if an index was lost, recovery read the segment to rebuild it, and then removed all later
    segments, although they were synced.
    """
    disk = MemoryDisk()
    partition = _filled(disk, 20)
    partition.flush()
    records, point = read_all(partition), partition.recovery_point
    if clean:
        partition.close(NOW_MS)
    disk = disk.after_kill()
    name = _names(disk, ".log")[1]
    file = disk.open(f"{TP}/{name}")
    file.pwrite(tail, file.size())
    disk.remove(f"{TP}/{name.removesuffix('.log')}{lost}")
    again = open_partition(disk, SMALL, recovery_point=point, clean_shutdown=clean)
    assert (read_all(again), again.log_end_offset) == (records, 20)
    assert f"{len(tail)} bytes after the last batch are removed" in str(again.recovery_warnings)


def _closed_without_snapshots(how: LogConfig) -> tuple[dict[str, bytes], list[tuple[str, int, int]]]:
    """Return the files of a closed partition without snapshots, and the file, position and size of each
    batch.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, how)
    put(partition, batch(0, pid=1))
    for pid, is_commit in ((2, True), (3, False)):
        put(partition, batch(0, pid=pid, is_transactional=True))
        put_marker(partition, marker(pid, commit=is_commit))
    for number in range(1, 4):
        put(partition, batch(number, pid=1))
    partition.close(NOW_MS)
    names = [name for name in disk.list(str(TP)) if not name.endswith((".snapshot", ".producers"))]
    files = {name: disk.read(f"{TP}/{name}") for name in names}
    return files, [
        (name, position, header.size_bytes)
        for name in sorted(files)
        if name.endswith(".log")
        for position, header in iter_batches(files[name])
    ]


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
@pytest.mark.parametrize("segment_bytes", [400, 1 << 20], ids=["small segments", "one segment"])
def test_a_flipped_bit_below_the_recovery_point_does_not_prevent_startup(
    segment_bytes: int, clean: bool
) -> None:
    """Found by the simulator: replay trusted bytes that no checksum had verified, and the broker did not
    start.
    """
    how = config(segment_bytes=segment_bytes, index_interval_bytes=100)
    files, places = _closed_without_snapshots(how)
    for number, (name, position, size) in enumerate(places[:-1]):
        for byte in range(size):
            disk = MemoryDisk()
            disk.mkdir(str(TP))
            for each, data in files.items():
                disk.replace(f"{TP}/{each}", data)
            file, at = disk.open(f"{TP}/{name}"), position + byte
            file.pwrite(bytes([file.pread(1, at)[0] ^ 1 << byte * 5 % 8]), at)
            again = open_partition(disk, how, recovery_point=len(places), clean_shutdown=clean)
            text = f"byte {byte} of batch {number}"
            # No checksum covers the base offset, so damage to it may change the log end.
            assert byte < 8 or again.log_end_offset == len(places), text
            if byte >= 12 and not 43 <= byte < 57:
                # Outside transactions, recovery takes the producers' state from headers without verifying
                # their batches, as Kafka does.
                for sequence, kept in ((1, 5), (2, 6), (3, 7)):
                    assert kept == number or put(again, batch(sequence, pid=1)).is_duplicate, text


def test_replay_goes_on_behind_a_length_that_claims_too_much() -> None:
    """Found by the simulator's seed 101 of the workload `atomic`: replay stopped at the damaged length."""
    disk, how = MemoryDisk(), config(index_interval_bytes=100)
    files, places = _closed_without_snapshots(how)
    disk.mkdir(str(TP))
    for each, data in files.items():
        disk.replace(f"{TP}/{each}", data)
    name, position, _ = places[1]
    _corrupt(disk, name, position + 9)
    again = open_partition(disk, how, recovery_point=len(places))
    assert again.recovery_warnings == [f"memory:/{TP}/{name} is damaged at position {position}"]
    assert [again.describe_producers()[0].producer_id, again.open_transaction_count] == [1, 0]
    assert put(again, batch(3, pid=1)).is_duplicate
    assert again.read(2, 1 << 20).next_offset == len(places)


@pytest.mark.parametrize("position", [-1, 10, 16], ids=["record", "length", "format"])
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_damage_at_the_end_of_a_segment_takes_no_later_segment_with_it(clean: bool, position: int) -> None:
    """Found by the simulator (seed 307): the last batch of a segment had a length past the end, and was
    mistaken for a torn tail.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    size = len(batch(0, pid=1))
    for number in range(12):
        put(partition, batch(number, pid=1))
    partition.flush()
    point, end = partition.recovery_point, partition.log_end_offset
    disk = disk.after_kill()
    first, second = _names(disk, ".log")[:2]
    next_base = int(second.partition(".")[0].rpartition("/")[2])
    _corrupt(disk, first, next_base * size - 1 if position < 0 else (next_base - 1) * size + position)
    for _ in range(2):
        disk.replace(f"{TP}/{0:020d}.timeindex", b"damaged")
        again = open_partition(disk, SMALL, recovery_point=point, clean_shutdown=clean)
        assert again.log_end_offset == end
        assert again.read(next_base, 1 << 20).next_offset > next_base
        try:
            served = bytes(again.read(next_base - 1, size).records)
        except CorruptMessage:
            pass
        else:
            assert not verify_crc(served, 0, len(served))
        disk = disk.after_kill()


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".txnindex"])
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_indexes_are_made_again(suffix: str, clean: bool, damage: str) -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(6):
        put(partition, batch(number, pid=1, timestamp_ms=NOW_MS + number, is_transactional=True))
        put_marker(partition, marker(1, commit=bool(number % 2)))
    expected = (partition.aborted_transactions(0, 99), partition.offset_for_timestamp(NOW_MS + 4))
    assert len(expected[0]) == 3
    partition.close(NOW_MS)
    for name in _names(disk, suffix):
        if damage == "missing" and suffix != ".txnindex":
            disk.remove(f"{TP}/{name}")
        elif disk.open(f"{TP}/{name}").size():
            _corrupt(disk, name, 1)
    partition = open_partition(disk, SMALL, clean_shutdown=clean)
    assert (partition.aborted_transactions(0, 99), partition.offset_for_timestamp(NOW_MS + 4)) == expected
    assert len(read_all(partition, 10)) == partition.size_bytes


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_a_lost_index_of_aborted_transactions_is_made_again(clean: bool) -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(6):
        put(partition, batch(number, pid=1, is_transactional=True))
        put_marker(partition, marker(1, commit=bool(number % 2)))
    expected, end_offset = partition.aborted_transactions(0, 99), partition.log_end_offset
    partition.close(NOW_MS)
    names = _names(disk, ".txnindex")
    assert len(expected) == 3 and len(names) == partition.segment_count > 2
    how = {"clean_shutdown": clean, "recovery_point": end_offset, "indexed_from": partition.indexed_from}
    for name in names:
        found = disk.after_kill()
        found.remove(f"{TP}/{name}")
        again = open_partition(found, SMALL, **how)
        assert again.aborted_transactions(0, 99) == expected
        assert [name in report for report in again.recovery_warnings] == [True]
        again = open_partition(found.after_kill(), SMALL, **how)
        assert (again.aborted_transactions(0, 99), again.recovery_warnings) == (expected, [])


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "unreadable"])
def test_a_crash_while_an_index_of_aborted_transactions_is_made_again_loses_no_entry(is_lost: bool) -> None:
    """A crash may leave a partial or empty file. The next start must not mistake it for a complete index."""
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(5):
        put(partition, batch(number, pid=1, is_transactional=True))
        put_marker(partition, marker(1, commit=bool(number % 2)))
    expected, end_offset = partition.aborted_transactions(0, 99), partition.log_end_offset
    partition.close(NOW_MS)
    how = {"recovery_point": end_offset, "indexed_from": partition.indexed_from}
    names, step = _names(disk, ".txnindex"), 0
    assert len(names) == 2
    for name in names:  # the index of the closed segment, then of the active one
        damaged = disk.after_kill()
        if is_lost:
            damaged.remove(f"{TP}/{name}")
        else:
            write_synced(damaged, f"{TP}/{name}", b"\x77" * 34)
        damaged.sync_directory(str(TP))
        for step in count():
            found = damaged.after_kill()
            found.crash_after = step
            with suppress(SimulatedCrash):
                open_partition(found, SMALL, **how)
            for left in (found.after_kill(), *(found.after_power_loss(Random(seed)) for seed in range(3))):
                again = open_partition(left, SMALL, **how)
                assert again.aborted_transactions(0, 99) == expected, f"{name} after step {step}"
            if found.steps < step:
                break
        assert step > 30, name


def test_segments_without_an_index_of_aborted_transactions_are_foreign_until_they_have_one() -> None:
    """Apache Kafka creates the index only with its first entry. So a missing file does not prove that it was
    lost.
    """
    disk = MemoryDisk()
    _filled(disk).close(NOW_MS)
    names = _names(disk, ".txnindex")
    for name in names[:2]:
        disk.remove(f"{TP}/{name}")
    again = open_partition(disk, SMALL, clean_shutdown=True)
    assert again.recovery_warnings == []
    assert f"{again.indexed_from - 1:020d}.txnindex" == names[1]
    assert (
        open_partition(disk, SMALL, clean_shutdown=True, indexed_from=again.indexed_from).recovery_warnings
        == []
    )


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_open_transactions_survive_a_restart(clean: bool) -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    put(partition, batch(0, pid=1))
    put(partition, batch(0, pid=3, is_transactional=True))
    for number in range(8):
        put(partition, batch(number, pid=2, is_transactional=True))
    if clean:
        partition.close(NOW_MS)
    partition = open_partition(disk.after_kill(), SMALL, clean_shutdown=clean)
    assert (partition.last_stable_offset, partition.open_transaction_count) == (1, 2)
    put_marker(partition, marker(3, commit=True))
    assert partition.last_stable_offset == 2
    put_marker(partition, marker(2, commit=False))
    assert partition.last_stable_offset == partition.log_end_offset
    assert [entry.first_offset for entry in partition.aborted_transactions(0, 99)] == [2]


@pytest.mark.behaviour("I19")
def test_idle_producers_expire_by_the_time_of_their_append() -> None:
    """A load of old records must not make their producers expire.

    On Kafka, the next check for expiry would remove these producers.
    """
    partition = open_partition(log_config=config(expiration_ms=DAY_MS))
    put(partition, batch(0, pid=1, timestamp_ms=1000))
    put(partition, batch(0, pid=2, is_transactional=True))
    assert list(partition.expire_producers(NOW_MS + DAY_MS - 1)) == [0]
    assert put(partition, batch(0, pid=1, timestamp_ms=1000), now_ms=NOW_MS + 1).is_duplicate
    assert list(partition.expire_producers(NOW_MS + DAY_MS)) == [1]
    assert [state.producer_id for state in partition.describe_producers()] == [2]
    assert put(partition, batch(5, pid=1), now_ms=NOW_MS + DAY_MS).base_offset == 2


@pytest.mark.behaviour("I19", "I20")
def test_expired_producers_are_not_loaded_and_not_written() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0, pid=1), now_ms=NOW_MS)
    put(partition, batch(0, pid=2), now_ms=NOW_MS + 10)
    partition.close(NOW_MS + 20)
    partition = open_partition(disk, clean_shutdown=True, now_ms=NOW_MS + DAY_MS)
    assert [state.producer_id for state in partition.describe_producers()] == [2]
    put(partition, batch(0, pid=3), now_ms=NOW_MS + DAY_MS)
    partition.close(NOW_MS + DAY_MS + 10)
    partition = open_partition(disk, clean_shutdown=True, now_ms=NOW_MS + DAY_MS)
    assert [state.producer_id for state in partition.describe_producers()] == [3]


def test_leftover_files_are_removed_at_startup() -> None:
    disk = MemoryDisk()
    _filled(disk, 2).close(NOW_MS)
    for name in (f"{99:020d}.index", f"{0:020d}.log.deleted", "leader-epoch-checkpoint.tmp"):
        disk.open(f"{TP}/{name}", create=True)
    disk.replace(f"{TP}/{77:020d}.snapshot", b"stray")
    disk.replace(f"{TP}/{1:020d}.producers", b"stray")
    partition = open_partition(disk, SMALL, clean_shutdown=True)
    assert partition.log_end_offset == 2
    assert set(disk.list(str(TP))) == {
        *(f"{0:020d}{suffix}" for suffix in (".log", ".index", ".timeindex", ".txnindex")),
        *(f"{2:020d}{suffix}" for suffix in (".snapshot", ".producers")),
        "leader-epoch-checkpoint",
        "partition.metadata",
    }


@pytest.mark.parametrize("torn_bytes", [0, 10], ids=["whole-batches", "torn"])
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_a_log_that_lost_its_synced_end_hides_no_new_records(clean: bool, torn_bytes: int) -> None:
    """After a lost sync or a partial copy, the offsets of the lost records are assigned again. Old state must
    not hide the new records.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0, pid=1, is_transactional=True))
    kept_bytes = partition.size_bytes
    for number in range(4):
        put(partition, batch(timestamp_ms=NOW_MS + number))
    put_marker(partition, marker(1, commit=False))
    partition.flush()
    recovery_point = partition.recovery_point
    if clean:
        partition.close(NOW_MS)
    disk = disk.after_kill()
    disk.open(f"{TP}/{0:020d}.log").truncate(kept_bytes + torn_bytes)
    again = open_partition(disk, clean_shutdown=clean, recovery_point=recovery_point)
    assert again.log_end_offset == 1
    assert "ends at offset 1, but offsets up to 6 were synced" in str(again.recovery_warnings)
    put_marker(again, marker(1, commit=True))
    put(again, batch(1, pid=1, is_transactional=True, timestamp_ms=NOW_MS + 9))
    put_marker(again, marker(1, commit=True))
    assert again.aborted_transactions(0, 9) == []
    found = again.offset_for_timestamp(NOW_MS + 3)
    assert found is not None and found.offset == 2
    again.close(NOW_MS)
    assert open_partition(disk, clean_shutdown=True).aborted_transactions(0, 9) == []


def test_a_log_start_beyond_the_log_becomes_the_start_of_an_empty_log() -> None:
    disk = MemoryDisk()
    _filled(disk, 3).close(NOW_MS)
    partition = open_partition(disk, SMALL, log_start_offset=50)
    assert (partition.log_start_offset, partition.log_end_offset) == (50, 50)
    assert put(partition, batch()).base_offset == 50


def _log_start_beyond_the_end() -> tuple[MemoryDisk, int, int]:
    """Return a disk, its recovery point and its log start. DeleteRecords went past the synced end, and a
    power loss took the end of the log. Only a snapshot from inside a transaction has been written.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    put(partition, batch(0, is_transactional=True))
    while partition.segment_count < 2:
        put(partition, batch(value=b"x" * 30))
    put(partition, batch(1, is_transactional=True))
    put_marker(partition, marker(7, commit=True))
    partition.flush()
    point, active = partition.recovery_point, partition.log.segments.active
    size_bytes = active.size_bytes
    put(partition, batch())
    log_start = partition.delete_records(None, NOW_MS)
    disk = disk.after_kill()
    disk.open(active.log_path).truncate(size_bytes)
    for path in [f"{TP}/{name}" for name in disk.list(str(TP)) if name.startswith(f"{log_start:020d}")]:
        disk.remove(path)
    return disk, point, log_start


@pytest.mark.parametrize("times", [1, 2])
def test_a_log_start_beyond_the_log_keeps_what_its_segments_say_of_producers(times: int) -> None:
    """Regression: read_committed readers waited forever, and a producer's next batch was refused.

    DeleteRecords went past the synced end, and a power loss took the end of the log. Only an older snapshot
    had the producers' state. So a transaction whose commit was synced was open again, and nothing ended it.
    """
    disk, point, log_start = _log_start_beyond_the_end()
    for _ in range(times):
        partition = open_partition(disk, SMALL, recovery_point=point, log_start_offset=log_start)
        disk = disk.after_kill()
    assert (partition.log_start_offset, partition.log_end_offset) == (log_start, log_start)
    assert not partition.has_open_transaction(7, 0)
    put(partition, batch())
    assert partition.last_stable_offset == log_start + 1
    assert put(partition, batch(2, is_transactional=True)).base_offset == log_start + 1


def test_a_second_power_loss_brings_no_segment_below_the_log_start_back() -> None:
    """Regression: a power loss right after such a start brought a part of the removed segments back. The gap
    between them and the log start looked like a loss, so the next start removed the only snapshot.
    """
    disk, point, log_start = _log_start_beyond_the_end()
    open_partition(disk, SMALL, recovery_point=point, log_start_offset=log_start)
    for seed in range(20):
        found = disk.after_power_loss(Random(seed))
        again = open_partition(found, SMALL, recovery_point=point, log_start_offset=log_start)
        assert again.recovery_warnings == []
        assert not again.has_open_transaction(7, 0)
        assert put(again, batch(1, is_transactional=True)).is_duplicate


@pytest.mark.parametrize("failing", ["create", "write"])
def test_a_full_disk_forgets_no_producer_of_removed_segments(failing: str) -> None:
    """Regression: as above, on a full disk, the segments were removed without a snapshot. After a kill, a
    start first loaded the older snapshot, in which a transaction that had ended was open. Later it loaded
    none, and a retry was stored a second time.
    """
    disk, point, log_start = _log_start_beyond_the_end()
    disk.errors[failing, ".tmp"] = errno.ENOSPC
    with pytest.raises(StorageError, match="make room"):
        open_partition(disk, SMALL, recovery_point=point, log_start_offset=log_start)
    disk.errors.clear()
    partition = open_partition(disk.after_kill(), SMALL, recovery_point=point, log_start_offset=log_start)
    assert (partition.log_start_offset, partition.log_end_offset) == (log_start, log_start)
    assert not partition.has_open_transaction(7, 0)
    assert put(partition, batch(1, is_transactional=True)).is_duplicate
    put(partition, batch())
    assert partition.last_stable_offset == log_start + 1


def test_a_start_that_cannot_begin_at_the_log_start_keeps_the_segments() -> None:
    disk, point, log_start = _log_start_beyond_the_end()
    disk.errors |= {("create", ".log"): errno.ENOSPC, ("create", ".tmp"): errno.ENOSPC}
    with pytest.raises(StorageError, match="make room"):
        open_partition(disk, SMALL, recovery_point=point, log_start_offset=log_start)
    partition = open_partition(disk.after_kill(), SMALL, recovery_point=point, log_start_offset=log_start)
    assert put(partition, batch(1, is_transactional=True)).is_duplicate


@pytest.mark.behaviour("I17", "I20")
def test_a_long_segment_is_snapshotted_between_rolls() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, config(limits=Limits(snapshot_every_bytes=500)))
    for number in range(20):
        put(partition, batch(number))
        partition.checkpoint_producers()
        partition.flush()
    # Two snapshots are kept within a segment: the newest one below the recovery point, and a newer one.
    assert _names(disk, ".snapshot") == [f"{8:020d}.snapshot", f"{16:020d}.snapshot"]
    partition = open_partition(disk.after_kill(), recovery_point=16)
    assert put(partition, batch(15)).is_duplicate
    assert put(partition, batch(20)).base_offset == 20


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
def test_indexes_preallocated_by_kafka_are_read(clean: bool) -> None:
    """A killed Java broker leaves zeros at the end of the active segment's indexes."""
    disk = MemoryDisk()
    partition = _filled(disk)
    put(partition, batch(0, pid=5, is_transactional=True))
    partition.close(NOW_MS)
    for suffix in (".index", ".timeindex"):
        file = disk.open(f"{TP}/{_names(disk, suffix)[-1]}")
        file.pwrite(bytes(2400), file.size())
    partition = open_partition(disk, SMALL, clean_shutdown=clean)
    put(partition, batch(12, pid=1))
    assert len(read_all(partition, 10)) == partition.size_bytes
    partition.close(NOW_MS)
    sizes = [disk.open(f"{TP}/{_names(disk, suffix)[-1]}").size() for suffix in (".index", ".timeindex")]
    assert max(sizes) < 100


def test_a_transaction_index_made_again_outlives_a_kill_right_after_the_start() -> None:
    """Found by the simulator: after the kill, the second start trusted an incomplete index, and readers saw
    aborted records.
    """
    disk, small = MemoryDisk(), config(segment_bytes=200)
    partition = open_partition(disk, small)
    put(partition, batch(0, pid=9, is_transactional=True))
    put_marker(partition, marker(9, commit=False))
    put(partition, batch(0))
    put(partition, batch(1))
    partition.flush()
    assert partition.segment_count > 1 and len(partition.aborted_transactions(0, 9)) == 1
    point = partition.recovery_point
    disk = disk.after_kill()
    disk.replace(f"{TP}/{0:020d}.timeindex", b"damaged")
    for _ in range(2):
        found = open_partition(disk, small, recovery_point=point).aborted_transactions(0, 9)
        assert [each.producer_id for each in found] == [9]
        disk = disk.after_kill()


@pytest.mark.parametrize("position", [16, 23, 25], ids=["format", "last offset below", "last offset"])
def test_batches_behind_damage_can_be_read(position: int) -> None:
    """Found by the simulator: a reader that continued after the damaged batch got the damaged batch again."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    size = len(batch(0, pid=1))
    for number in range(4):
        put(partition, batch(number, pid=1))
    whole = read_all(partition)
    _corrupt(disk, _names(disk, ".log")[0], size + position)
    for offset in (2, 3):
        assert bytes(partition.read(offset, 1 << 20).records) == whole[offset * size :]
    try:
        served = bytes(partition.read(1, size).records)
    except CorruptMessage:
        return
    assert not verify_crc(served, 0, size)


def test_a_log_that_ends_below_its_synced_end_is_reported() -> None:
    """A file is missing, or was copied too early. Neither a kill nor a power loss causes this."""
    disk = MemoryDisk()
    partition = open_partition(disk)
    for number in range(3):
        put(partition, batch(number))
    assert open_partition(disk.after_kill(), recovery_point=3).recovery_warnings == []
    again = open_partition(disk.after_kill(), recovery_point=5)
    assert "ends at offset 3, but offsets up to 5 were synced" in again.recovery_warnings[0]
    assert put(again, batch(3)).base_offset == 3
    stopped = open_partition(disk.after_kill(), recovery_point=5, clean_shutdown=True)
    assert "ends at offset 3, but offsets up to 5 were synced" in stopped.recovery_warnings[0]


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kill"])
@pytest.mark.parametrize("is_empty", [True, False], ids=["files", "directory"])
def test_a_lost_directory_gives_no_offset_again(clean: bool, is_empty: bool) -> None:
    """If offsets were assigned again, a group with a committed offset above the log end would skip new
    records.
    """
    disk = MemoryDisk()
    _filled(disk).close(NOW_MS)
    if is_empty:
        for name in disk.list(str(TP)):
            disk.remove(f"{TP}/{name}")
    else:
        disk.remove_tree(str(TP))
    again = open_partition(disk, SMALL, recovery_point=12, clean_shutdown=clean)
    assert (again.log_start_offset, again.log_end_offset) == (12, 12)
    assert "contains no segment, but offsets up to 12 were synced" in again.recovery_warnings[0]
    assert put(again, batch()).base_offset == 12
    again.flush()
    later = open_partition(disk.after_kill(), SMALL, recovery_point=again.recovery_point)
    assert (later.log_start_offset, later.log_end_offset, later.recovery_warnings) == (12, 13, [])


@pytest.mark.behaviour("I20")
@pytest.mark.parametrize("others", [{}, {"pid": 2, "is_transactional": True}], ids=["plain", "mixed"])
def test_a_damaged_header_gives_no_state_of_producers(others: dict[str, object]) -> None:
    """Without snapshots, recovery takes the producers' state from the log. Below the recovery point, it must
    skip damaged headers.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch(0, **others))  # type: ignore[arg-type]
    for number in range(3):
        put(partition, batch(number, pid=1))
    before = partition.size_bytes
    put(partition, batch(3, pid=1))
    put(partition, batch())
    partition.close(NOW_MS)
    for suffix in (".snapshot", ".producers"):
        disk.remove(f"{TP}/{6:020d}{suffix}")
    for position in range(21, 61):
        found = disk.after_kill()
        _corrupt(found, f"{0:020d}.log", before + position)
        again = open_partition(found, clean_shutdown=True)
        assert [state.producer_id for state in again.describe_producers()] in ([1, 7], [1, 2])
        entry = again.producer(1)
        assert entry is not None
        assert [each.last_offset for each in entry.batches] == [1, 2, 3], position
        assert entry.producer_epoch == 0


def _compacted(disk: MemoryDisk) -> Partition:
    """Return a log of three keys in small segments. Compaction kept the newest records and left gaps."""
    partition = open_partition(disk, SMALL_TABLE)
    for number in range(24):
        put(partition, batch(key=b"%d" % (number % 3), value=bytes(90)))
    partition.flush()
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    run(partition.cleaner.compact(dirty, NOW_MS))
    return partition


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize(
    ("now_compacted", "cleaned_to"), [(True, 0), (False, 24)], ids=["policy", "checkpoint of the cleaner"]
)
def test_a_compacted_log_is_kept_whatever_the_recovery_point_is(now_compacted: bool, cleaned_to: int) -> None:
    """Apache Kafka compacts above the recovery point in its checkpoint, and the checkpoint may be lost."""
    disk = MemoryDisk()
    stored = read_all(_compacted(disk))
    again = open_partition(
        disk.after_kill(), SMALL_TABLE if now_compacted else SMALL, recovery_point=0, cleaned_to=cleaned_to
    )
    assert again.log_end_offset == 24
    assert read_all(again) == stored
    assert again.recovery_warnings == []


def test_a_gap_behind_a_segment_with_gaps_is_no_loss() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, config(cleanup_policy="compact", segment_bytes=700))
    for key in (0, 1, 2, 3, 1, 3, 5, 6, 7):  # compaction removes the second and the fourth record
        put(partition, batch(key=b"%d" % key, value=bytes(90)))
    partition.flush()
    dirty = partition.cleaner.dirty_range(NOW_MS)
    assert dirty is not None
    run(partition.cleaner.compact(dirty, NOW_MS))
    stored = read_all(partition)
    assert [header.base_offset for _, header in iter_batches(stored)] == [0, 2, 4, 5, 6, 7, 8]
    again = open_partition(disk.after_kill(), SMALL, recovery_point=0)
    assert read_all(again) == stored


@pytest.mark.parametrize("name", ["notes.log.cleaned", "notes.log.swap", "notes.log", "0.old.log"])
def test_a_file_of_another_name_does_not_prevent_a_start(name: str) -> None:
    """Besides a file of another name, the directory has the `.swap` file of an interrupted swap."""
    disk = MemoryDisk()
    put(open_partition(disk), batch(0))
    segment = f"{TP}/{0:020d}.log"
    write_synced(disk, f"{TP}/{name}", b"x")
    write_synced(disk, f"{segment}.swap", disk.read(segment))
    disk = disk.after_kill()
    assert open_partition(disk).log_end_offset == 1
    assert not disk.exists(f"{segment}.swap")


@pytest.mark.behaviour("I17")
def test_segments_that_recovery_removed_stay_removed_after_a_power_loss() -> None:
    """The end of the first segment was lost, so recovery removes the next segment. A power loss must not
    bring it back after newer records.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    while partition.segment_count < 3:
        put(partition, batch(value=b"old"))
    partition.flush()
    first = disk.open(partition.log.segments.first.log_path)
    first.truncate(first.size() - len(batch(value=b"old")))
    first.sync()
    disk, background = disk.after_kill(), BackgroundQueue()
    # Background tasks do not run, so the snapshot that is taken when a segment rolls does not sync the
    # directory.
    background.on_added = lambda: None
    partition = open_partition(disk, SMALL, background=background)
    assert partition.segment_count == 1
    kept = partition.log_end_offset
    # A roll syncs the directory, so check before the first roll, too.
    while partition.segment_count < 3:
        put(partition, batch(value=b"new"))
        for seed in range(30):
            found = open_partition(disk.after_power_loss(Random(seed)), SMALL)
            values = [row.value for row in read_rows(found, 0, Isolation.READ_UNCOMMITTED)]
            assert values == ([b"old"] * kept + [b"new"] * len(values))[: len(values)]


@pytest.mark.behaviour("I17")
def test_a_compacted_log_ends_where_its_last_batch_does() -> None:
    """A power loss can cut a segment and leave an empty one after it.

    Compaction did not make that gap. If the log kept it, a coordinator that replays the log would find
    offsets without batches, and would reject the log.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL_TABLE)
    for _ in range(5):
        put(partition, batch())
    partition.log.roll(NOW_MS)
    partition.flush()
    first = disk.open(partition.log.segments.first.log_path)
    first.truncate(first.size() - len(batch()))
    again = open_partition(disk.after_kill(), SMALL_TABLE)
    assert again.log_end_offset == 4
    assert len(read_rows(again, 0, Isolation.READ_UNCOMMITTED)) == 4


@pytest.mark.behaviour("I17")
def test_a_second_power_loss_does_not_bring_a_torn_end_back() -> None:
    """A start cuts off a torn end. It must sync the cut before records of a later segment are synced."""
    small = config(segment_bytes=3 * len(batch()), flush_messages=1)
    disk = MemoryDisk()
    partition = open_partition(disk, small)
    for number in range(3):
        put(partition, batch(number))
    partition.flush()
    torn = bytes(batch(3))[:40]
    partition.log.segments.active.file.pwrite(torn, partition.size_bytes)
    partition.log.segments.active.file.sync()
    for number in (3, 4):
        disk = disk.after_kill()
        partition = open_partition(disk, small, recovery_point=3)
        put(partition, batch(number))
    partition.flush()
    for seed in range(20):
        again = open_partition(disk.after_power_loss(Random(seed)), small, recovery_point=3)
        assert (again.log_end_offset, again.recovery_warnings) == (5, [])


def test_a_clean_stop_does_not_bring_the_torn_batch_of_an_empty_log_back() -> None:
    """A start cuts off a torn batch at offset 0. The start after a clean stop verifies no checksum, so the
    cut must be durable by then.
    """
    disk = MemoryDisk()
    partition = open_partition(disk)
    put(partition, batch())
    partition.flush()
    file = disk.open(f"{TP}/{0:020d}.log")
    file.pwrite(b"?", file.size() - 1)
    file.sync()
    again = open_partition(disk.after_kill())
    assert again.log_end_offset == 0 and len(again.recovery_warnings) == 1
    again.close(NOW_MS)
    disk = again.log.disk._disk
    assert isinstance(disk, MemoryDisk)
    for seed in range(20):
        last = open_partition(disk.after_power_loss(Random(seed)), clean_shutdown=True)
        assert (last.log_end_offset, last.recovery_warnings) == (0, [])


def test_a_clean_stop_after_a_lost_index_leaves_nothing_to_report() -> None:
    disk = MemoryDisk()
    open_partition(disk)
    for suffix in ("index", "timeindex"):
        disk.remove(f"{TP}/{0:020d}.{suffix}")
    open_partition(disk).close(NOW_MS)
    assert open_partition(disk, clean_shutdown=True).recovery_warnings == []


def _large_batch(partition: Partition) -> None:
    put(partition, batch(value=bytes(SMALL.segment_bytes // 2)))


def _delete_all(partition: Partition) -> None:
    partition.delete_records(None, NOW_MS)
    put(partition, batch())


@pytest.mark.parametrize("is_clean", [True, False], ids=["stop", "kill"])
@pytest.mark.parametrize("roll", [_large_batch, _delete_all])
def test_a_write_that_could_not_be_undone_does_not_end_the_log(
    roll: Callable[[Partition], None], is_clean: bool
) -> None:
    """Regression: the next segment began after a partial batch, so a start cut off all that followed it."""
    disk = MemoryDisk()
    partition = _filled(disk, 4)
    file = Path(partition.file_at(partition.log_end_offset)).name
    disk.capacity_bytes = disk.used_bytes() + 20
    disk.errors["truncate", file] = errno.EIO
    with pytest.raises(KafkaStorageError):
        put(partition, batch())
    disk.capacity_bytes = None
    with pytest.raises(KafkaStorageError):
        roll(partition)
    disk.errors.clear()
    roll(partition)
    put(partition, batch())
    before, start, end = read_all(partition), partition.log_start_offset, partition.log_end_offset
    if is_clean:
        partition.close(NOW_MS)
    how = {"log_start_offset": start, "clean_shutdown": is_clean}
    again = open_partition(disk.after_kill(), SMALL, **how)
    assert (read_all(again), again.log_end_offset, again.recovery_warnings) == (before, end, [])


def test_a_stop_undoes_a_failed_write() -> None:
    """Regression: if no other write followed, the partial batch of a failed write stayed at the partition's
    end.
    """
    disk = MemoryDisk()
    partition = _filled(disk, 4)
    partition.close(NOW_MS)
    partition = open_partition(disk, SMALL, clean_shutdown=True)
    file = Path(partition.file_at(partition.log_end_offset)).name
    disk.capacity_bytes = disk.used_bytes() + 20
    disk.errors["truncate", file] = errno.EIO
    with pytest.raises(KafkaStorageError):
        put(partition, batch())
    disk.errors.clear()
    partition.close(NOW_MS)
    assert open_partition(disk, SMALL, clean_shutdown=True).recovery_warnings == []


def test_a_snapshot_behind_a_gap_does_not_restore_a_lost_marker() -> None:
    """Regression: a snapshot knew of a commit that a power loss had taken out of a compacted log.

    The power loss took the segment with the commit and left later ones. So the transaction was open again,
    and its coordinator aborted it. The next start believed the snapshot, and read_committed readers got
    aborted records.
    """
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL_TABLE)
    put(partition, batch(0, is_transactional=True))
    partition.flush()
    point = partition.recovery_point
    while partition.segment_count < 2:
        put(partition, batch(key=b"%d" % partition.log_end_offset))
    lost_from = partition.log_end_offset - 1
    put_marker(partition, marker(7, commit=True))
    while partition.segment_count < 4:
        put(partition, batch(key=b"%d" % partition.log_end_offset))
    disk = disk.after_kill()
    disk.remove(f"{TP}/{lost_from:020d}.log")
    partition = open_partition(disk, SMALL_TABLE, recovery_point=point)
    assert partition.has_open_transaction(7, 0) and partition.last_stable_offset == 0
    partition.flush()
    point = partition.recovery_point
    put_marker(partition, marker(7, commit=False))
    while partition.segment_count < 5:
        put(partition, batch(key=b"%d" % partition.log_end_offset))
    again = open_partition(disk.after_kill(), SMALL_TABLE, recovery_point=point)
    expected = [
        (entry.producer_id, entry.first_offset) for entry in partition.aborted_transactions(0, 1 << 40)
    ]
    found = [(entry.producer_id, entry.first_offset) for entry in again.aborted_transactions(0, 1 << 40)]
    assert expected == found == [(7, 0)]


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_no_offset_has_more_than_64_bits(count: int, is_clean: bool) -> None:
    """A batch went past the last offset, and the snapshot of its producer raised struct.error."""
    base_offset, last_offset = 2**63 - 6, 2**63 - 2
    disk = MemoryDisk()
    disk.mkdir(str(TP))
    first, second = bytearray(batch(count=2)), bytearray(batch(count=count))
    stamp(first, 0, base_offset, 0)
    stamp(second, 0, base_offset + 2, 0)
    disk.replace(f"{TP}/{base_offset:020d}.log", bytes(first + second))
    partition = open_partition(disk)
    is_cut = count > 3
    assert bool(partition.recovery_warnings) == is_cut
    end_offset = base_offset + 2 + (0 if is_cut else count)
    assert partition.log_end_offset == end_offset
    for sequence in range(4):
        with suppress(InvalidRecord):
            put(partition, batch(sequence, pid=sequence + 1))
    assert partition.log_end_offset == max(end_offset, last_offset + 1)
    for data in (batch(0, 2, pid=9), batch(0, pid=9, is_transactional=True), batch()):
        with pytest.raises(InvalidRecord, match="too few offsets"):
            put(partition, data)
    stored, producers = read_all(partition), partition.describe_producers()
    if is_clean:
        partition.close(NOW_MS)
    partition = open_partition(disk, clean_shutdown=is_clean)
    assert (read_all(partition), partition.log_end_offset) == (stored, last_offset + 1)
    assert partition.describe_producers() == producers and not partition.recovery_warnings


def test_a_crash_while_a_log_begins_at_its_log_start_forgets_no_producer() -> None:
    """Regression: the disk refused the snapshots between the segments below the log start. A start removed
    the first one and was killed. The next start took the gap before the log start for a loss, and removed
    the only snapshot that had the producers of the removed segment.
    """
    full = MemoryDisk()
    partition = open_partition(full, SMALL)
    full.errors["write", ".tmp"] = errno.ENOSPC
    while partition.segment_count < 3:
        end_offset = partition.log_end_offset
        put(partition, batch(0, pid=20 + end_offset))
    second, third = (segment.base_offset for segment in list(partition.log.segments)[1:])
    for crash_after in count():
        disk = full.after_kill()
        disk.open(f"{TP}/{third:020d}.log").truncate(0)
        for base_offset in (second, third):
            disk.errors["write", f"{base_offset:020d}.producers.tmp"] = errno.ENOSPC
        disk.crash_after = crash_after
        how = {"recovery_point": third, "log_start_offset": third + 1}
        try:
            open_partition(disk, SMALL, **how).checkpoint_producers()
        except SimulatedCrash:
            disk = disk.after_kill()
            partition = open_partition(disk, SMALL, **how)
            assert put(partition, batch(0, pid=20)).is_duplicate, crash_after
            continue
        break
    assert crash_after > 20


def test_a_kill_after_a_log_began_at_its_log_start_takes_no_record() -> None:
    disk, point, log_start = _log_start_beyond_the_end()
    how = {"recovery_point": point, "log_start_offset": log_start}
    put(open_partition(disk, SMALL, **how), batch())
    again = open_partition(disk.after_kill(), SMALL, **how)
    assert (again.log_end_offset, again.recovery_warnings) == (log_start + 1, [])


def test_an_unreadable_snapshot_is_reported() -> None:
    disk = MemoryDisk()
    partition = open_partition(disk, SMALL)
    for number in range(12):
        put(partition, batch(number))
    partition.close(NOW_MS)
    newest = _names(disk, ".snapshot")[-1]
    _corrupt(disk, newest, 9)
    again = open_partition(disk.after_kill(), SMALL, clean_shutdown=True)
    assert [newest in warning for warning in again.recovery_warnings] == [True]
    assert put(again, batch(11)).is_duplicate
