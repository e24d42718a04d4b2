"""Deferred work that opens files by their paths, while partitions are deleted, recreated, trimmed and
compacted.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.log.partitions import NOW_MS, TP, batch, config, marker, put, put_marker, read_all

from oncelog.errors import KafkaStorageError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.background import RunningCall
from oncelog.log.checkpoint import RECOVERY_POINTS, read_offsets
from oncelog.log.disk import Disk
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.log.partition_disk import PartitionDisk
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.server.disk import RealDisk
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.batch import iter_batches
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.records import decode_records

SETTINGS: dict[str, Any] = {"cleanup_policy": "compact", "segment_bytes": 500, "index_interval_bytes": 80}
PATH_CALLS = ("open", "rename", "remove", "list", "exists", "read", "sync_directory")
OTHER = TopicPartition("other", 0)
_uuids = itertools.count(1)


def topic_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


class SteppedLog:
    """A data directory whose background tasks and blocking calls run only when the test runs them."""

    def __init__(self, disk: Disk, limits: Limits = DEFAULT_LIMITS) -> None:
        self.disk, self.limits = disk, limits
        self.incarnation = 1
        self.call: RunningCall | None = None
        self.start()

    def start(self) -> None:
        self.manager = LogManager.open(
            self.disk,
            node_id=1,
            new_uuid=lambda: topic_id(next(_uuids)),
            now_ms=NOW_MS,
            limits=self.limits,
        )
        self.manager.background.on_added = lambda: None
        self.partition = self.open()
        self.manager.forget_last_stop()

    def open(self) -> Partition:
        return self.manager.open_partition(TP, config(**SETTINGS), topic_id(self.incarnation), NOW_MS)

    def recreate(self) -> None:
        self.manager.delete_partitions([TP])
        self.incarnation += 1
        self.partition = self.open()

    def step(self) -> None:
        """Run one step of a background task, unless a blocking call is pending. Keep the step's blocking call
        for `run_job`.
        """
        if self.manager.background and self.call is None:
            self.call = self.manager.background.step()

    def run_job(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            with suppress(Exception):  # the task raises this error in its next step
                call()

    def finish(self) -> None:
        self.run_job()
        while self.manager.background:
            self.step()
            self.run_job()

    def until_job(self, name: str) -> None:
        """Run steps until the blocking call of that name is pending."""
        while self.manager.background:
            self.step()
            if self.call is not None and _name_of(self.call) == name:
                return
            self.run_job()
        raise AssertionError(f"no job {name}")

    def stop(self) -> None:
        """Stop cleanly. Like the broker, first wait for the blocking call that is running."""
        self.run_job()
        self.manager.background.on_added = None
        self.manager.close(NOW_MS)


def _name_of(running: RunningCall) -> str:
    return str(getattr(getattr(running.call, "func", running.call), "__name__", ""))


def committed(partition: Partition) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return (offset, key, value) of each record that a read_committed reader sees."""
    upper = partition.last_stable_offset
    aborted = partition.aborted_transactions(partition.log_start_offset, upper)
    seen = VisibilityFilter(Isolation.READ_COMMITTED, [(a.producer_id, a.first_offset) for a in aborted])
    data, rows = memoryview(read_all(partition)), []
    for position, header in iter_batches(data):
        whole = data[position : position + header.size_bytes]
        record = decode_control(whole, verify=True) if header.is_control else None
        is_abort = record is not None and record.type is ControlType.ABORT
        if seen.decide(header, is_abort_marker=is_abort) is Verdict.DELIVER:
            rows += [(r.offset, r.key, r.value) for r in decode_records(whole)]
    return [row for row in rows if row[0] >= partition.log_start_offset]


@contextmanager
def before_path_call(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Run a function just before call number `number` of those methods of the partition's disk that take a
    path.
    """
    left = [number]

    def hooked(name: str) -> Callable[..., Any]:
        original = getattr(PartitionDisk, name)

        def call(self: PartitionDisk, *args: Any, **how: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                act()
            return original(self, *args, **how)

        return call

    patches = [patch.object(PartitionDisk, name, hooked(name)) for name in PATH_CALLS]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


class DeferredMachine(RuleBasedStateMachine):
    """A partition with deferred work, whose topic is deleted and re-created.

    `rows` are the records that its read_committed readers must see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stepped = SteppedLog(self.new_disk())
        self.flushes: list[Callable[[], None]] = []
        self.number = 0
        self.forget()

    def new_disk(self) -> Disk:
        return MemoryDisk()

    def forget(self) -> None:
        self.rows: list[tuple[int, bytes, bytes]] = []
        self.sequence = 0

    @property
    def partition(self) -> Partition:
        return self.stepped.partition

    @rule(key=st.integers(0, 3), count=st.integers(1, 4))
    def append(self, key: int, count: int) -> None:
        for _ in range(count):
            name, value = b"k%d" % key, self.value()
            self.rows.append((put(self.partition, batch(key=name, value=value)).base_offset, name, value))

    @rule(key=st.integers(0, 3), commit=st.booleans())
    def transaction(self, key: int, commit: bool) -> None:
        name, value = b"k%d" % key, self.value()
        data = batch(self.sequence, pid=7, key=name, value=value, is_transactional=True)
        self.sequence += 1
        offset = put(self.partition, data).base_offset
        put_marker(self.partition, marker(7, commit=commit))
        if commit:
            self.rows.append((offset, name, value))

    def value(self) -> bytes:
        self.number += 1
        return b"%d" % self.number + bytes(40)

    @rule()
    def flush(self) -> None:
        self.partition.flush()

    @rule()
    def flush_later(self) -> None:
        self.flushes.append(self.partition.flush)

    @precondition(lambda self: self.flushes)
    @rule()
    def flush_in_a_slow_thread(self) -> None:
        with suppress(KafkaStorageError):
            self.flushes.pop(0)()

    @precondition(lambda self: self.flushes)
    @rule(number=st.integers(1, 12))
    def recreate_amid_a_flush(self, number: int) -> None:
        with before_path_call(number, self.recreate), suppress(KafkaStorageError):
            self.flushes.pop(0)()

    @rule(back=st.integers(0, 10))
    def delete_records(self, back: int) -> None:
        with suppress(KafkaStorageError):
            offset = max(self.partition.log_end_offset - back, self.partition.log_start_offset)
            self.partition.delete_records(offset, NOW_MS)

    @rule()
    def recreate(self) -> None:
        self.stepped.recreate()
        self.forget()

    @rule()
    def compact(self) -> None:
        self.partition.flush()
        self.stepped.manager.write_checkpoints()
        self.stepped.manager.compact(NOW_MS)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.stepped.step()

    @rule(count=st.integers(1, 12))
    def step_and_run(self, count: int) -> None:
        for _ in range(count):
            self.stepped.run_job()
            self.stepped.step()

    @rule()
    def run_job(self) -> None:
        self.stepped.run_job()

    @precondition(lambda self: self.stepped.call is not None)
    @rule(number=st.integers(1, 12))
    def recreate_amid_a_job(self, number: int) -> None:
        with before_path_call(number, self.recreate):
            self.stepped.run_job()

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        if clean:
            self.stepped.stop()
        else:
            self.stepped.manager.release()
        self.stepped.call = None
        self.flushes.clear()
        self.stepped.start()
        assert self.partition.recovery_warnings == []

    @invariant()
    def readers_find_the_newest_of_each_key(self) -> None:
        start = self.partition.log_start_offset
        expected = {key: (offset, value) for offset, key, value in self.rows if offset >= start}
        assert {key: (offset, value) for offset, key, value in committed(self.partition)} == expected

    def teardown(self) -> None:
        self.restart(clean=True)
        self.readers_find_the_newest_of_each_key()
        names = self.stepped.disk.list(str(TP))
        assert not [name for name in names if name.endswith((".deleted", ".cleaned", ".swap", ".tmp"))]
        self.stepped.manager.release()


TestDeferredMachine = DeferredMachine.TestCase
TestDeferredMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class RealDeferredMachine(DeferredMachine):
    """A DeferredMachine on the real disk, which opens files when they are first used."""

    def new_disk(self) -> Disk:
        self.temporary = tempfile.TemporaryDirectory()
        return RealDisk(self.temporary.name)

    def teardown(self) -> None:
        super().teardown()
        self.temporary.cleanup()


TestRealDeferredMachine = RealDeferredMachine.TestCase
TestRealDeferredMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@pytest.fixture
def stepped(tmp_path: Any) -> SteppedLog:
    return SteppedLog(RealDisk(tmp_path))


def fill(partition: Partition, count: int = 30) -> None:
    for number in range(count):
        put(partition, batch(key=b"k%d" % (number % 2), value=b"old" + bytes(40)))


def written_again(stepped: SteppedLog) -> list[bytes]:
    """Re-create the topic and write to it. Return the values that its readers must see."""
    stepped.recreate()
    for number in range(5):
        data = batch(number, pid=9, key=b"n%d" % number, value=b"new", is_transactional=True)
        put(stepped.partition, data)
    put_marker(stepped.partition, marker(9, commit=True))
    stepped.partition.flush()
    return [b"n%d" % number for number in range(5)]


def keys_after_restart(stepped: SteppedLog) -> list[bytes | None]:
    stepped.finish()
    stepped.stop()
    stepped.start()
    return [key for _, key, _ in committed(stepped.partition)]


def test_queued_deletions_leave_a_topic_of_the_same_name_alone(stepped: SteppedLog) -> None:
    fill(stepped.partition)
    stepped.finish()
    stepped.partition.flush()
    stepped.partition.delete_records(stepped.partition.log_end_offset - 1, NOW_MS)
    assert stepped.manager.background, "deletions wait"
    expected = written_again(stepped)
    assert keys_after_restart(stepped) == expected


@pytest.mark.parametrize("in_steps", [False, True])
def test_a_partition_made_again_during_a_checkpoint_has_no_recovery_point_on_disk(in_steps: bool) -> None:
    """Regression: the new partition had the recovery point of the deleted one, so its unsynced records were
    compacted.
    """
    stepped = SteppedLog(MemoryDisk(), Limits(partitions_per_step=1))
    stepped.manager.open_partition(OTHER, config(**SETTINGS), topic_id(1), NOW_MS)
    fill(stepped.partition, 60)
    stepped.partition.flush()
    stepped.manager.write_checkpoints()
    stepped.until_job("sync_directory")  # the next blocking call syncs the checkpoint of recovery points
    deletion = stepped.manager.delete_in_steps([TP, OTHER])
    if in_steps:
        next(deletion)
        stepped.run_job()
        stepped.step()
    for _ in deletion:
        pass
    stepped.partition = stepped.open()
    stepped.finish()
    fill(stepped.partition)
    stepped.partition.flush()
    expected = {key: offset for offset, key, _ in committed(stepped.partition)}
    stepped.manager.compact(NOW_MS)
    stepped.finish()
    point = read_offsets(stepped.disk, RECOVERY_POINTS).get(TP, 0)
    assert point >= stepped.partition.cleaner.cleaned_to > 0
    disk = cast(MemoryDisk, stepped.disk).after_kill()
    stepped.manager.release()
    stepped.disk = disk
    stepped.start()
    assert {key: offset for offset, key, _ in committed(stepped.partition)} == expected


@pytest.mark.parametrize("name", ["make_swap", "_replace_files"])
def test_a_swap_that_waits_for_its_thread_leaves_a_topic_of_the_same_name_alone(
    stepped: SteppedLog, name: str
) -> None:
    fill(stepped.partition)
    stepped.partition.flush()
    stepped.manager.write_checkpoints()
    stepped.finish()
    stepped.manager.compact(NOW_MS)
    stepped.until_job(name)
    expected = written_again(stepped)
    assert keys_after_restart(stepped) == expected


def test_a_flush_that_waits_for_its_thread_writes_nothing_to_a_recreated_topic(stepped: SteppedLog) -> None:
    """Regression: the flush wrote the old topic's aborted transactions into the new topic's index, which hid
    new records.
    """
    put(stepped.partition, batch(0, pid=9, value=b"old", is_transactional=True))
    put_marker(stepped.partition, marker(9, commit=False))
    flush = stepped.partition.flush
    expected = written_again(stepped)
    with pytest.raises(KafkaStorageError, match="was closed or deleted"):
        flush()
    assert keys_after_restart(stepped) == expected


@pytest.mark.parametrize("what", ["flush", "job"])
def test_a_topic_is_created_again_between_any_two_calls_of_deferred_work(what: str) -> None:
    """The work resolves several paths in a thread. If it resolved one in the old topic, it must not resolve
    the next one in the new topic.
    """
    acts = 0
    for number in itertools.count(1):
        stepped = SteppedLog(MemoryDisk())
        put(stepped.partition, batch(0, pid=9, value=b"old", is_transactional=True))
        put_marker(stepped.partition, marker(9, commit=False))
        work: Callable[[], None] = stepped.partition.flush
        if what == "job":
            fill(stepped.partition)
            stepped.partition.flush()
            stepped.manager.write_checkpoints()
            stepped.finish()
            stepped.manager.compact(NOW_MS)
            work = stepped.finish
        expected: list[bytes] = []
        again = partial(lambda stepped, expected: expected.extend(written_again(stepped)), stepped, expected)
        with before_path_call(number, again), suppress(KafkaStorageError):
            work()
        if not expected:
            break
        acts += 1
        assert keys_after_restart(stepped) == expected, number
    assert acts > (2 if what == "flush" else 40)


def test_dropped_files_are_renamed_at_once(stepped: SteppedLog) -> None:
    fill(stepped.partition)
    stepped.finish()
    stepped.partition.flush()
    stepped.partition.delete_records(stepped.partition.log_end_offset - 1, NOW_MS)
    names = stepped.disk.list(str(TP))
    assert len([name for name in names if name.endswith(".log")]) == 1
    assert len({name for name in names if name.endswith(".deleted")}) > 6
    stepped.manager.release()
    stepped.start()
    assert not [name for name in stepped.disk.list(str(TP)) if name.endswith(".deleted")]


@pytest.mark.parametrize("how", ["records", "retention"])
def test_thousands_of_segments_are_deleted_a_few_a_step(how: str) -> None:
    stepped = SteppedLog(MemoryDisk())
    stepped.partition.reconfigure(config(segment_bytes=100, retention_ms=1000))
    for _ in range(300):
        put(stepped.partition, batch())
    stepped.finish()
    stepped.partition.flush()
    renames: list[str] = []
    original = PartitionDisk.rename

    def counted(disk: PartitionDisk, old: str, new: str) -> None:
        renames.append(old)
        original(disk, old, new)

    with patch.object(PartitionDisk, "rename", counted):
        if how == "records":
            stepped.partition.delete_records(None, NOW_MS)
        else:
            stepped.partition.enforce_retention(NOW_MS + 10_000)
        assert stepped.partition.log_start_offset >= 299
        most = len(renames)
        while stepped.manager.background:
            before = len(renames)
            stepped.step()
            most = max(most, len(renames) - before)
            stepped.run_job()
    assert len(renames) >= 3 * 299
    assert most <= 32
    assert stepped.partition.segment_count == 1
    assert [name for name in stepped.disk.list(str(TP)) if name.endswith((".log", ".deleted"))] == [
        f"{stepped.partition.log_end_offset:020d}.log"
    ]
    stepped.stop()


def test_a_kill_during_the_deletion_of_many_segments_brings_none_back() -> None:
    for steps in range(1, 40, 3):
        stepped = SteppedLog(MemoryDisk())
        stepped.partition.reconfigure(config(segment_bytes=100))
        for _ in range(40):
            put(stepped.partition, batch())
        stepped.partition.flush()
        stepped.finish()
        stepped.partition.delete_records(35, NOW_MS)
        for _ in range(steps):
            stepped.step()
            stepped.run_job()
        stepped.manager.release()
        stepped.call = None
        stepped.start()
        start = stepped.partition.log_start_offset
        offsets = [header.base_offset for _, header in iter_batches(memoryview(read_all(stepped.partition)))]
        # The deletion removes its first files before it writes the checkpoint of the log start. So the
        # restored start may be lower than 35.
        assert start <= 35
        assert offsets == list(range(start, 40))
        assert stepped.partition.recovery_warnings == []
        stepped.stop()


def test_replaced_segments_are_closed_in_the_thread() -> None:
    """The replaced files have no name any more, so closing them frees their blocks. For a gigabyte, that
    takes 0.3 s.
    """
    stepped = SteppedLog(MemoryDisk())
    for number in range(12):
        put(stepped.partition, batch(key=b"k", value=b"%d" % number + bytes(100)))
    stepped.partition.flush()
    stepped.manager.write_checkpoints()
    stepped.finish()
    closed: list[bool] = []
    files = [segment.file for segment in list(stepped.partition.log.segments)[:-1]]
    is_in_job = [False]
    original = type(files[0]).close

    def close(file: object) -> None:
        if file in files:
            closed.append(is_in_job[0])
        original(file)  # type: ignore[arg-type]

    with patch.object(type(files[0]), "close", close):
        stepped.manager.compact(NOW_MS)
        while stepped.manager.background:
            stepped.step()
            is_in_job[0] = True
            stepped.run_job()
            is_in_job[0] = False
    assert len(closed) == len(files)
    assert all(closed)
    stepped.stop()


@pytest.mark.parametrize("is_real", [False, True])
def test_compaction_keeps_the_files_time(is_real: bool, tmp_path: Path) -> None:
    """Retention and min.compaction.lag.ms take the time of the segment's file as the age of records without
    timestamps.
    """
    stepped = SteppedLog(RealDisk(tmp_path) if is_real else MemoryDisk())
    for number in range(12):
        put(stepped.partition, batch(key=b"k", value=b"%d" % number + bytes(100), timestamp_ms=-1))
    stepped.partition.flush()
    stepped.manager.write_checkpoints()
    stepped.finish()
    for number, segment in enumerate(stepped.partition.log.segments):
        stepped.disk.set_modified_ms(segment.log_path, 1_000_000_000_000 + number)
    newest = 1_000_000_000_000 + stepped.partition.segment_count - 2
    stepped.partition.reconfigure(config(**SETTINGS | {"segment_bytes": 1 << 20}))
    stepped.manager.compact(NOW_MS)
    stepped.finish()
    assert stepped.partition.segment_count == 2
    assert stepped.partition.log.segments.first.largest_timestamp_ms == newest
    stepped.stop()
