"""Files of a partition that are lost or changed while no broker runs: a start compares the contents."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from support.log.partitions import (
    NOW_MS,
    TOPIC_ID,
    TP,
    batch,
    config,
    marker,
    put,
    put_marker,
    read_all,
    values_and_markers,
)

from oncelog.errors import CorruptMessage, StorageError
from oncelog.log.checkpoint import LOG_STARTS, encode_offsets, read_offsets
from oncelog.log.config import LogConfig
from oncelog.log.contents import (
    CONTENTS,
    NO_CONTENTS,
    DirectoryContents,
    PartitionContents,
    decode_contents,
    encode_contents,
)
from oncelog.log.manager import CLEAN_SHUTDOWN, LOCK, STARTING, LogManager
from oncelog.log.partition import Partition
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import TopicPartition

SMALL = config(segment_bytes=400, index_interval_bytes=100)
TABLE = config(segment_bytes=400, index_interval_bytes=100, cleanup_policy="compact")
PLAIN = config(index_interval_bytes=100)
EMPTY = PartitionContents(0, 0, 0, ((0, 0),))
Change = Callable[[MemoryDisk, str], None]


def _open(disk: MemoryDisk, log_config: LogConfig = SMALL) -> tuple[LogManager, Partition]:
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: TOPIC_ID, now_ms=NOW_MS)
    return manager, manager.open_partition(TP, log_config, TOPIC_ID, NOW_MS)


def _stopped(log_config: LogConfig = SMALL) -> MemoryDisk:
    """Return the disk after a clean stop. Each segment but the last has an aborted transaction."""
    disk = MemoryDisk()
    manager, partition = _open(disk, log_config)
    for number in range(12):
        put(partition, batch(number, pid=1, key=b"%d" % (number % 3)))
        put(partition, batch(0, pid=10 + number, is_transactional=True, value=b"aborted"))
        put_marker(partition, marker(10 + number, commit=False))
    partition.flush()
    manager.close(NOW_MS)
    return disk.after_kill()


def _remove(disk: MemoryDisk, path: str) -> None:
    disk.remove(path)


def _empty(disk: MemoryDisk, path: str) -> None:
    disk.open(path).truncate(0)


def _cut_in_half(disk: MemoryDisk, path: str) -> None:
    file = disk.open(path)
    file.truncate(file.size() // 2)


def _add_zeros(disk: MemoryDisk, path: str) -> None:
    file = disk.open(path)
    file.pwrite(bytes(200), file.size())


def _file(disk: MemoryDisk, suffix: str) -> str:
    """Return the path of a file of the second segment."""
    names = [name for name in disk.list(str(TP)) if name.endswith(".log")]
    return f"{TP}/{names[1].removesuffix('.log')}{suffix}"


def _aborted(partition: Partition) -> list[tuple[int, int]]:
    """Return the aborted transactions that read_committed readers get."""
    found = partition.aborted_transactions(0, partition.log_end_offset)
    return [(entry.producer_id, entry.first_offset) for entry in found]


def _empty_directory(disk: MemoryDisk, path: str) -> None:
    """Empty the directory, as if it were the mount point of a volume that is not mounted."""
    directory = path.partition("/")[0]
    disk.remove_tree(directory)
    disk.mkdir(directory)


def _files(disk: MemoryDisk) -> dict[str, bytes]:
    """Return the path and the content of every file but the lock."""
    paths = (
        [*disk.list(), *(f"{TP}/{name}" for name in disk.list(str(TP)))]
        if disk.exists(str(TP))
        else disk.list()
    )
    return {path: disk.read(path) for path in paths if not disk.is_directory(path) and path != LOCK}


@pytest.mark.parametrize("change", [_remove, _empty, _cut_in_half, _empty_directory])
@pytest.mark.parametrize("log_config", [SMALL, TABLE])
def test_a_start_refuses_a_partition_that_lost_records(change: Change, log_config: LogConfig) -> None:
    """Regression: the start accepted the log. Readers passed over the lost records without an error."""
    disk = _stopped(log_config)
    whole = disk.after_kill()
    change(disk, _file(disk, ".log"))
    found = _files(disk)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"orders-0/\d+.log .* the last stop left .* restore the dir"):
            _open(disk, log_config)
        assert _files(disk) == found
    for path, data in _files(whole).items():
        disk.replace(path, data)
    assert not _open(disk, log_config)[1].recovery_warnings


@pytest.mark.parametrize("change", [_remove, _empty, _cut_in_half, _empty_directory])
@pytest.mark.parametrize("log_config", [SMALL, TABLE])
def test_a_start_without_lost_records_is_possible(change: Change, log_config: LogConfig) -> None:
    """The start reads every record, so a shorter index of aborted transactions is found, too."""
    disk = _stopped(log_config)
    path = _file(disk, ".log")
    _empty(disk, _file(disk, ".txnindex").replace(path[-24:-4], f"{0:020}"))
    change(disk, path)
    disk.remove(CONTENTS)
    manager, partition = _open(disk, log_config)
    assert partition.log_end_offset == 36
    has_lost_all = change is _empty_directory
    text = "is damaged at position" if change is _cut_in_half else "there are no offsets from"
    # In a compacted log, missing offsets are normal.
    assert (text in str(partition.recovery_warnings)) == (
        (log_config is SMALL or change is _cut_in_half) and not has_lost_all
    )
    if not has_lost_all:
        assert _aborted(partition)[0] == (10, 1)
        # The snapshot of the stop still has every producer.
        assert put(partition, batch(11, pid=1, key=b"2")).is_duplicate
    expected = read_all(partition)
    manager.close(NOW_MS)
    _, partition = _open(disk.after_kill(), log_config)
    assert (partition.recovery_warnings, read_all(partition)) == ([], expected)


def test_a_partition_whose_directory_was_moved_away_is_given_up() -> None:
    """No offset is assigned again, and the start reports the loss."""
    disk = _stopped()
    disk.remove_tree(str(TP))
    _, partition = _open(disk)
    assert (partition.log_start_offset, partition.log_end_offset) == (36, 36)
    assert "contains no segment, but offsets up to 36" in str(partition.recovery_warnings)


@pytest.mark.parametrize(
    ("sizes", "loss"),
    [
        ({0: 60, 5: 40, 9: 0}, ""),
        ({0: 60, 5: 40}, ""),  # an empty segment is missing
        ({0: 70, 5: 41, 7: 8}, ""),
        ({0: 60, 5: 39, 9: 80}, f"{5:020}.log has 39 bytes, but the last stop left 40 bytes"),
        ({0: 600}, f"{5:020}.log is missing, but the last stop left 40 bytes"),
        ({}, f"{0:020}.log is missing, but the last stop left 60 bytes"),
    ],
)
def test_a_segment_with_fewer_bytes_is_a_loss(sizes: dict[int, int], loss: str) -> None:
    assert PartitionContents(0, 9, 2, ((0, 60), (5, 40), (9, 0))).loss(sizes) == loss


def test_contents_are_read_as_they_were_written() -> None:
    partitions = {TP: PartitionContents(4, 5, 2, ((0, 60), (5, 0))), TopicPartition("a", 7): EMPTY}
    contents = DirectoryContents(partitions, ["meta.properties"])
    assert decode_contents(encode_contents(contents)) == contents


def test_an_older_copy_with_more_bytes_is_refused() -> None:
    """A coordinator used to go back to the offsets and transactions of a copy from before a compaction."""
    table = config(segment_bytes=400, cleanup_policy="compact", min_cleanable_dirty_ratio=0.01)
    disk = MemoryDisk()
    manager, partition = _open(disk, table)
    for number in range(30):
        put(partition, batch(key=b"%d" % (number % 3), value=b"old"))
    manager.close(NOW_MS)
    disk = disk.after_kill()
    copy = {name: disk.read(f"{TP}/{name}") for name in disk.list(str(TP))}
    manager, partition = _open(disk, table)
    manager.compact(NOW_MS)
    put(partition, batch(key=b"1", value=b"new"))
    manager.close(NOW_MS)
    for name in disk.list(str(TP)):
        disk.remove(f"{TP}/{name}")
    for name, data in copy.items():
        disk.replace(f"{TP}/{name}", data)
    with pytest.raises(StorageError, match="but the last stop left"):
        _open(disk, table)


def _start(disk: MemoryDisk) -> Partition:
    manager, partition = _open(disk)
    manager.forget_last_stop()
    return partition


def _sync(disk: MemoryDisk) -> None:
    for name in disk.list(str(TP)):
        disk.open(f"{TP}/{name}").sync()
    disk.sync_directory(str(TP))
    disk.sync_directory()


def _lose_an_index(disk: MemoryDisk) -> None:
    _empty(disk, _file(disk, ".txnindex"))


def _accept_a_loss(disk: MemoryDisk) -> None:
    _lose_an_index(disk)
    disk.remove(f"{TP}/{10:020}.log")
    disk.remove(CONTENTS)


def _damage_the_contents(disk: MemoryDisk) -> None:
    _lose_an_index(disk)
    _empty(disk, CONTENTS)


@pytest.mark.parametrize("change", [_lose_an_index, _accept_a_loss, _damage_the_contents])
@pytest.mark.parametrize("has_lost_power", [False, True])
def test_a_start_after_an_interrupted_one_still_compares_the_contents(
    change: Callable[[MemoryDisk], None], has_lost_power: bool
) -> None:
    """A start that was killed, for example by a time-out of systemd, used to leave an incomplete index of
    aborted transactions, which the next one trusted.
    """
    whole = _stopped()
    change(whole)
    _sync(whole)
    uninterrupted = whole.after_kill()
    expected = _aborted(_start(uninterrupted))
    assert (11, 4) in expected
    assert not {CLEAN_SHUTDOWN, STARTING, CONTENTS} & set(uninterrupted.list())
    for steps in range(0, uninterrupted.steps, uninterrupted.steps // 40 + 1):
        disk = whole.after_kill()
        disk.crash_after = steps
        with pytest.raises(SimulatedCrash):
            _start(disk)
        for _ in range(2):
            disk = disk.after_power_loss(Random(steps)) if has_lost_power else disk.after_kill()
            assert _aborted(_start(disk)) == expected, f"crash after {steps} steps"


def test_a_stop_after_all_indexes_were_rebuilt_stores_them() -> None:
    """The stop used to write nothing. After a power loss, the time index could be empty beside a complete
    offset index, so look-ups by time found no record.
    """
    disk = _stopped(PLAIN)
    paths = [f"{TP}/{0:020}{suffix}" for suffix in (".index", ".timeindex")]
    expected = [disk.read(path) for path in paths]
    assert all(expected)
    disk.remove(CONTENTS)
    manager, _ = _open(disk, PLAIN)
    manager.forget_last_stop()
    manager.close(NOW_MS)
    assert [disk.read(path) for path in paths] == expected


def test_a_power_loss_while_a_time_index_is_made_again_leaves_no_incomplete_one() -> None:
    """The power loss could bring the removed offset index back, and keep that the time index was cut. The
    next start trusted both, so look-ups by time found no record.
    """
    log_config = config(segment_bytes=1400, index_interval_bytes=100)
    whole = MemoryDisk()
    manager, partition = _open(whole, log_config)
    for number in range(40):
        put(partition, batch(timestamp_ms=NOW_MS + (5000 if number == 5 else number)))
    manager.close(NOW_MS)
    file = whole.open(f"{TP}/{0:020}.timeindex")
    file.truncate(file.size() - 3)
    _sync(whole)
    for steps in range(1, 9):
        for seed in range(10):
            disk = whole.after_kill()
            disk.crash_after = steps
            with pytest.raises(SimulatedCrash):
                _open(disk, log_config)
            _, partition = _open(disk.after_power_loss(Random(seed)), log_config)
            assert partition.offset_for_timestamp(NOW_MS + 2000) == (NOW_MS + 5000, 5)


def test_stale_contents_remove_no_snapshot_below_an_unsynced_end() -> None:
    """A start that reads all records replaces the snapshots by one at the log end. A power loss took the end,
    and with it what was known about the producers of deleted records: a repeated batch was stored again.
    """
    disk = MemoryDisk()
    manager, partition = _open(disk)
    for pid in (50, 60):
        for number in range(10):
            put(partition, batch(number, pid=pid))
    partition.delete_records(12, NOW_MS)
    manager.close(NOW_MS)
    disk = disk.after_kill()
    _open(disk)
    stale = {name: disk.read(name) for name in (STARTING, CONTENTS)}
    # An older Oncelog starts, leaves both files in place, and is killed.
    manager, partition = _open(disk := disk.after_kill())
    for number in range(4):
        put(partition, batch(number, pid=70))
    manager.write_checkpoints()
    disk = disk.after_kill()
    for name, data in stale.items():
        disk.replace(name, data)
    assert "but the last stop left" in str(_start(disk).recovery_warnings)
    for seed in range(20):
        assert put(_start(disk.after_power_loss(Random(seed))), batch(9, pid=50)).is_duplicate


@pytest.mark.parametrize("lost", [".index", CONTENTS])
@pytest.mark.parametrize("bit", [3, 24, 60])
def test_a_damaged_base_offset_removes_no_later_records_from_a_synced_segment(lost: str, bit: int) -> None:
    """The checksum does not cover the base offset. The start that read the segment believed it, took all
    later batches of the segment for damage, and removed them.
    """
    disk = MemoryDisk()
    manager, partition = _open(disk)
    for _ in range(12):
        put(partition, batch())
    manager.close(NOW_MS)
    path = _file(disk, ".log")
    before = disk.read(path)
    file, base = disk.open(path), 5
    file.pwrite((base + 1 ^ 1 << bit).to_bytes(8, "big"), len(before) // 5)
    disk.remove(lost if lost == CONTENTS else path.replace(".log", lost))
    _, partition = _open(disk)
    assert "is damaged at position" in str(partition.recovery_warnings)
    assert len(disk.read(path)) == len(before)
    assert partition.read(7, 1).next_offset == 8
    with pytest.raises(CorruptMessage):
        partition.read(6, 1)


def _flip(disk: MemoryDisk, path: str, number: int, bit: int) -> None:
    """Flip a bit in the base offset of a batch. `number` is its place among the file's batches, which have
    equal sizes.
    """
    data = disk.read(path)
    position = number * (int.from_bytes(data[8:12], "big") + 12) + 7 - bit // 8
    disk.open(path).pwrite(bytes([data[position] ^ 1 << bit % 8]), position)


def _stopped_plain(stop: str) -> MemoryDisk:
    """Return the disk of a log with twelve synced records in one segment, after a stop or a kill."""
    disk = MemoryDisk()
    manager, partition = _open(disk, config())
    for _ in range(12):
        put(partition, batch())
    if stop == "kill":
        manager.forget_last_stop()
        partition.flush()
        manager.write_checkpoints()
    else:
        manager.close(NOW_MS)
    disk = disk.after_kill()
    if stop == "no contents":
        disk.remove(CONTENTS)
    return disk


@pytest.mark.parametrize("start", [30, 1_000, 2**63])
def test_a_damaged_checkpoint_of_log_starts_deletes_no_records(start: int) -> None:
    """Regression: a damaged digit in the checkpoint raised the log start, and the start deleted segments."""
    disk = _stopped()
    before = read_all(_open(disk.after_kill())[1])
    disk.replace(LOG_STARTS, encode_offsets({TP: start}))
    manager, again = _open(disk)
    assert read_all(again) == before
    manager.release()
    assert not read_offsets(disk, LOG_STARTS).get(TP)


@pytest.mark.parametrize("stop", ["clean", "no contents", "kill"])
@pytest.mark.parametrize("number", [0, 4, 10])
@pytest.mark.parametrize("bit", [0, 1, 2, 3, 4, 24, 60, 63])
def test_a_damaged_base_offset_removes_no_later_records_from_the_last_segment(
    stop: str, number: int, bit: int
) -> None:
    """As above, in the active segment. A start removed up to all later records, even after a clean stop."""
    disk, path = _stopped_plain(stop), f"{TP}/{0:020}.log"
    before = len(disk.read(path))
    _flip(disk, path, number, bit)
    for _ in range(2):
        manager, partition = _open(disk, config())
        manager.forget_last_stop()
        assert (len(disk.read(path)), partition.log_end_offset) == (before, 12)
        assert "is damaged at position" in str(partition.recovery_warnings)
        for offset in range(12):
            if offset != number:
                assert partition.read(offset, 1).next_offset == offset + 1
        with pytest.raises(CorruptMessage):
            partition.read(number, 1)
        disk = disk.after_kill()
    assert put(partition, batch()).base_offset == 12


@pytest.mark.parametrize("bit", [0, 2, 4, 24, 30, 31, 60, 63])
def test_a_damaged_base_offset_of_the_last_batch_does_not_move_the_log_end(bit: int) -> None:
    disk, path = _stopped_plain("clean"), f"{TP}/{0:020}.log"
    _flip(disk, path, 11, bit)
    for number in range(2):
        manager, partition = _open(disk, config())
        assert "is damaged at position" in str(partition.recovery_warnings)
        with pytest.raises(CorruptMessage):
            partition.read(11, 1)
        assert put(partition, batch()).base_offset == 12 + number
        assert partition.read(12, 1).next_offset == 13
        manager.close(NOW_MS)
        disk = disk.after_kill()


@pytest.mark.parametrize(
    ("number", "bit"), [(1, 0), (3, 0), (3, 1), (5, 0), (5, 2), (11, 0), (11, 1), (11, 3)]
)
def test_a_reader_that_comes_to_a_damaged_base_offset_gets_an_error(number: int, bit: int) -> None:
    """A reader passed over a batch with a lower base offset, if the start had not read its segment. Before
    such a last batch it waited for good.
    """
    disk = MemoryDisk()
    manager, partition = _open(disk, PLAIN)
    for _ in range(12):
        put(partition, batch())
    manager.close(NOW_MS)
    _flip(disk, f"{TP}/{0:020}.log", number, bit)
    _, partition = _open(disk, PLAIN)
    # From the end, because the position of the next batch is remembered.
    for offset in reversed(range(12)):
        if offset == number:
            with pytest.raises(CorruptMessage):
                partition.read(offset, 1)
        else:
            assert partition.read(offset, 1).next_offset == offset + 1


@pytest.mark.parametrize("bit", [0, 3, 9, 20, 31])
def test_a_damaged_length_of_the_last_batch_frees_no_offset(bit: int) -> None:
    disk, path = _stopped_plain("clean"), f"{TP}/{0:020}.log"
    before = disk.read(path)
    position = 11 * len(before) // 12 + 11 - bit // 8
    disk.open(path).pwrite(bytes([before[position] ^ 1 << bit % 8]), position)
    _, partition = _open(disk, config())
    assert (partition.log_end_offset, len(disk.read(path))) == (12, len(before))
    with pytest.raises(CorruptMessage):
        partition.read(11, 1)
    assert put(partition, batch()).base_offset == 12


def test_a_reader_that_comes_to_a_torn_end_of_a_closed_segment_gets_an_error() -> None:
    """The position after the last whole batch was known, so the reader got an empty result again and again,
    as at the log end. Its consumer waited there for good.
    """
    disk = MemoryDisk()
    manager, partition = _open(disk)
    for _ in range(12):
        put(partition, batch())
    manager.close(NOW_MS)
    file = disk.open(_file(disk, ".log"))
    size = file.size() // 5
    file.truncate(4 * size + 20)
    disk.remove(CONTENTS)
    _, partition = _open(disk)
    assert partition.read(5, 4 * size).next_offset == 9
    with pytest.raises(CorruptMessage):
        partition.read(9, 4 * size)


def test_what_an_interrupted_start_left_does_not_survive_another_broker() -> None:
    disk = _stopped()
    LogManager.open(disk, node_id=1, new_uuid=lambda: TOPIC_ID, now_ms=NOW_MS)
    disk = disk.after_kill()
    disk.replace(CLEAN_SHUTDOWN, b'{"version":0,"brokerEpoch":7}')
    _remove(disk, _file(disk, ".log"))
    assert not _open(disk)[1].recovery_warnings
    assert not {CLEAN_SHUTDOWN, CONTENTS} & set(disk.list())
    assert disk.read(STARTING) == b""


@pytest.mark.parametrize("change", [_remove, _cut_in_half])
def test_a_kill_after_indexes_were_rebuilt_deletes_no_synced_records(change: Change) -> None:
    """Regression: the checkpoint got the offset from which indexes were rebuilt as the recovery point. After
    a kill, the start took the gap or the damage for a lost end, and deleted all later segments.
    """
    disk = _stopped()
    change(disk, _file(disk, ".log"))
    disk.remove(CONTENTS)
    manager, partition = _open(disk)
    manager.forget_last_stop()
    expected = read_all(partition)
    assert partition.is_flush_due
    manager.write_checkpoints()
    _, partition = _open(disk.after_kill())
    assert (partition.log_end_offset, read_all(partition)) == (36, expected)


def test_a_kill_after_a_lost_index_and_damage_deletes_no_synced_records() -> None:
    """As above, in a log of one segment, which no flush syncs for hours."""
    disk = MemoryDisk()
    manager, partition = _open(disk, config(index_interval_bytes=100))
    for number in range(20):
        put(partition, batch(number))
    manager.close(NOW_MS)
    path = f"{TP}/{0:020}.log"
    disk.open(path).pwrite(b"\xff", 500)
    disk.remove(path.replace(".log", ".index"))
    for _ in range(3):
        manager, partition = _open(disk, config(index_interval_bytes=100))
        manager.forget_last_stop()
        manager.write_checkpoints()
        assert partition.log_end_offset == 20
        assert partition.is_flush_due == (not partition.recovery_point)
        disk = disk.after_kill()


def test_a_kill_after_a_lost_marker_shows_no_aborted_records() -> None:
    """Regression: the stored snapshot said that the transaction was over, and its ABORT marker was lost.
    After a kill, read_committed readers got its records.
    """
    disk = MemoryDisk()
    manager, partition = _open(disk)
    put(partition, batch(0, pid=99, is_transactional=True))
    for number in range(12):
        put(partition, batch(number, pid=1, value=b"x" * 80))
        if number == 3:
            put_marker(partition, marker(99, commit=False))
    manager.close(NOW_MS)
    disk = disk.after_kill()
    (lost,) = [n for n in disk.list(str(TP)) if n.endswith(".txnindex") and disk.read(f"{TP}/{n}")]
    disk.remove(f"{TP}/{lost.replace('.txnindex', '.log')}")
    disk.remove(CONTENTS)
    for _ in range(3):
        manager, partition = _open(disk)
        manager.forget_last_stop()
        manager.write_checkpoints()
        # The transaction is open again, until its coordinator ends it.
        assert partition.last_stable_offset == 0
        disk = disk.after_kill()


def test_the_error_counts_the_partitions_that_lost_records() -> None:
    disk = MemoryDisk()
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: TOPIC_ID, now_ms=NOW_MS)
    partitions = [TopicPartition("orders", number) for number in range(12)]
    for tp in partitions:
        put(manager.open_partition(tp, SMALL, TOPIC_ID, NOW_MS), batch(0))
    manager.close(NOW_MS)
    for tp in partitions[2:]:
        _empty(disk, f"{tp}/{0:020}.log")
    with pytest.raises(StorageError, match=r"orders-2/0*.log has 0 bytes.*and 9 more partitions"):
        _open(disk)


def test_bytes_after_a_segment_since_a_clean_stop_are_removed() -> None:
    disk = _stopped()
    _add_zeros(disk, _file(disk, ".log"))
    _, partition = _open(disk)
    assert "but the last stop left" in str(partition.recovery_warnings)
    assert partition.log_end_offset == 36
    assert put(partition, batch(11, pid=1, key=b"2")).is_duplicate
    assert values_and_markers(partition).count("<abort>") == 12
    assert not read_all(partition).endswith(bytes(200))


@pytest.mark.parametrize(
    "name",
    ["5.log", "²²²².log", "²²²².index", f"{0:019}٠.log", "notes.index", "x.log", f"{2**63:020}.log"],
)
@pytest.mark.parametrize("is_clean", [False, True])
def test_a_file_with_a_strange_name_is_left_alone(name: str, is_clean: bool) -> None:
    """The start used to fail with a traceback, or to remove the file."""
    disk = _stopped()
    expected = read_all(_open(disk.after_kill())[1])
    disk.replace(f"{TP}/{name}", b"not a segment")
    if not is_clean:
        disk.remove(CLEAN_SHUTDOWN)
    manager, partition = _open(disk)
    assert read_all(partition) == expected
    manager.close(NOW_MS)
    assert disk.read(f"{TP}/{name}") == b"not a segment"
    assert not _open(disk)[1].recovery_warnings


@pytest.mark.parametrize("change", [_empty, _cut_in_half])
@pytest.mark.parametrize("log_config", [SMALL, TABLE])
def test_a_shorter_index_of_aborted_transactions_is_made_again(change: Change, log_config: LogConfig) -> None:
    """read_committed readers used to get the records of aborted transactions."""
    disk = _stopped(log_config)
    _, partition = _open(disk.after_kill(), log_config)
    expected = _aborted(partition)
    assert len(expected) == 12 and not partition.recovery_warnings
    change(disk, _file(disk, ".txnindex"))
    manager, partition = _open(disk, log_config)
    assert "but the last stop left" in str(partition.recovery_warnings)
    assert _aborted(partition) == expected
    manager.close(NOW_MS)
    _, partition = _open(disk.after_kill(), log_config)
    assert (partition.recovery_warnings, _aborted(partition)) == ([], expected)


def test_records_deleted_before_a_clean_stop_stay_deleted_without_the_checkpoint() -> None:
    disk = _stopped()
    manager, partition = _open(disk)
    partition.delete_records(4, NOW_MS)
    manager.close(NOW_MS)
    disk.replace(LOG_STARTS, b"")
    assert _open(disk)[1].log_start_offset == 4


@pytest.mark.parametrize("stop", ["another broker", "kill"])
def test_contents_are_compared_only_after_our_own_clean_stop(stop: str) -> None:
    disk = _stopped()
    if stop == "another broker":
        disk.replace(CLEAN_SHUTDOWN, b'{"version":0,"brokerEpoch":7}')
    else:
        disk.remove(CLEAN_SHUTDOWN)
    _empty(disk, _file(disk, ".txnindex"))
    _remove(disk, _file(disk, ".log"))
    assert "the last stop left" not in str(_open(disk)[1].recovery_warnings)
    assert not disk.exists(CONTENTS)


@pytest.mark.parametrize("mark", [b'{"version":0,"brokerEpoch":-1}', b""])
def test_contents_of_an_earlier_stop_are_not_compared(mark: bytes) -> None:
    """Regression: after a downgrade and an upgrade, the start deleted all records of a recreated topic.

    An Oncelog that does not know the file of contents leaves it in place, and writes the first of these
    marks. Apache Kafka with ZooKeeper wrote that mark, too.
    """
    disk = _stopped()
    manager, partition = _open(disk)
    partition.delete_records(30, NOW_MS)
    disk.replace("oncelog-acls.json", b"{}")
    manager.close(NOW_MS)
    stale = disk.read(CONTENTS)
    manager, _ = _open(disk)
    manager.delete_partitions([TP], {TP.topic: TOPIC_ID})
    put(manager.open_partition(TP, SMALL, TOPIC_ID, NOW_MS), batch())
    disk.remove("oncelog-acls.json")
    manager.close(NOW_MS)
    disk.replace(CONTENTS, stale)
    disk.replace(CLEAN_SHUTDOWN, mark)
    _, partition = _open(disk)
    assert (partition.log_start_offset, partition.log_end_offset) == (0, 1)
    assert not partition.recovery_warnings and read_all(partition)


@pytest.mark.parametrize("how", ["deleted", "deleted unopened", "missing"])
def test_a_recreated_partition_begins_at_0_whatever_the_last_stop_left(how: str) -> None:
    """It used to begin at the log start of the deleted partition."""
    disk = _stopped()
    manager, partition = _open(disk)
    partition.delete_records(30, NOW_MS)
    manager.close(NOW_MS)
    if how == "missing":
        disk.remove_tree(str(TP))
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: TOPIC_ID, now_ms=NOW_MS)
    if how == "deleted":
        manager.open_partition(TP, SMALL, TOPIC_ID, NOW_MS)
    if how == "missing":
        manager.forget_missing_partitions()
    else:
        manager.delete_partitions([TP], {TP.topic: TOPIC_ID})
    partition = manager.open_partition(TP, SMALL, TOPIC_ID, NOW_MS)
    assert (partition.log_start_offset, partition.log_end_offset) == (0, 0)


def test_a_rejected_start_gives_the_contents_back() -> None:
    disk = _stopped()
    mark, data = disk.read(CLEAN_SHUTDOWN), disk.read(CONTENTS)
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: TOPIC_ID, now_ms=NOW_MS)
    manager.give_back()
    manager.release()
    assert (disk.read(CLEAN_SHUTDOWN), disk.read(CONTENTS)) == (mark, data)
    disk.remove(CONTENTS)
    manager = LogManager.open(disk, node_id=1, new_uuid=lambda: TOPIC_ID, now_ms=NOW_MS)
    manager.give_back()
    manager.release()
    # The next start still knows that the contents are missing, and reads all records.
    assert (disk.read(CLEAN_SHUTDOWN), disk.exists(CONTENTS)) == (mark, False)


@pytest.mark.parametrize(
    "data", [b"", b"0\n1\nt 0 1 2\n", b"0\n1\nt 0 1 2 3 4 5\n", b"0\n1\nt x 1 2 3 4:5\n"]
)
def test_an_unreadable_file_compares_nothing(data: bytes) -> None:
    assert decode_contents(data) == NO_CONTENTS


LOST = (
    "meta.properties",
    *(f"oncelog-{kind}.json" for kind in ("acls", "configs", "quotas", "users")),
)


@pytest.mark.parametrize("name", LOST)
def test_a_small_file_that_was_lost_since_a_clean_stop_stops_the_start(name: str) -> None:
    """The broker used to start without ACLs, or to delete records by the default retention."""
    disk = _stopped()
    manager, _ = _open(disk)
    disk.replace("oncelog-state.json", b"{}")
    if not disk.exists(name):
        disk.replace(name, b"{}")
    manager.close(NOW_MS)
    data = disk.read(name)
    disk.remove(name)
    disk.remove("oncelog-state.json")
    names = disk.list()
    with pytest.raises(StorageError, match=f"{name} was there at the last stop"):
        _open(disk)
    assert set(disk.list()) <= {*names, ".lock"}
    disk.replace(name, data)
    assert not _open(disk)[1].recovery_warnings


def test_a_start_without_a_lost_file_is_possible() -> None:
    disk = _stopped()
    manager, _ = _open(disk)
    disk.replace("oncelog-acls.json", b"{}")
    manager.close(NOW_MS)
    disk.remove("oncelog-acls.json")
    disk.remove(CONTENTS)
    assert _open(disk)[1].log_end_offset == 36


def test_a_lost_index_is_no_reason_to_read_the_whole_partition() -> None:
    """Regression: a start counted the aborted transactions before it had rebuilt them all. So it reported a
    loss, and read the whole partition for one lost index file.
    """
    disk = _stopped()
    expected = _aborted(_open(disk.after_kill())[1])
    disk.remove(_file(disk, ".index"))
    again = _start(disk.after_kill())
    assert again.recovery_warnings == [f"memory:/{_file(disk, '.index')} is missing; indexes rebuilt"]
    assert _aborted(again) == expected
    names = [name for name in disk.list(str(TP)) if name.endswith(".txnindex")]
    disk.open(f"{TP}/{names[0]}").truncate(0)
    again = _start(disk)
    assert "but the last stop left" in again.recovery_warnings[-1]
    assert _aborted(again) == expected
