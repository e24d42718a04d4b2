"""Background work of the log: large snapshots during appends, crashes within snapshots, periodic rounds,
deletions.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from random import Random

import pytest
from support.log.partitions import NOW_MS, TOPIC_ID, TP, batch, config, open_partition, put

from oncelog.errors import KafkaStorageError
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, Kind, RunningCall, run
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.log.snapshot import Snapshots
from oncelog.rules.idempotence import producer_state
from oncelog.rules.idempotence.append import ProducerEntry, RememberedBatch
from oncelog.rules.idempotence.producer_state import ProducerTable, unpack_entry
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import TopicPartition

# With these limits, a few dozen producer ids make a large table.
PARTS = Limits(max_producers_at_work=4, producer_shard_entries=4)
SMALL = config(segment_bytes=2000, index_interval_bytes=100, limits=PARTS)


class Driven:
    """A queue of background tasks that a test runs one step at a time.

    If a step returns a blocking call, `step` also runs that call.
    """

    def __init__(self) -> None:
        self.background = BackgroundQueue()
        self.added = 0
        self.background.on_added = self._on_added

    def _on_added(self) -> None:
        self.added += 1

    def step(self) -> bool:
        """Run a step, and return True if tasks are left."""
        call = self.background.step()
        if call is not None:
            with suppress(OSError):  # the task raises this error in its next step
                call()
        return bool(self.background)

    def finish(self) -> None:
        while self.step():
            pass


def _fill(partition: Partition, ids: range) -> list[tuple[int, int]]:
    return [(pid, put(partition, batch(0, pid=pid)).base_offset) for pid in ids]


def _fill_until_roll(partition: Partition) -> list[tuple[int, int]]:
    stored: list[tuple[int, int]] = []
    while partition.segment_count == 1:
        stored += _fill(partition, range(len(stored), len(stored) + 1))
    return stored


def _remembers(partition: Partition, stored: list[tuple[int, int]]) -> None:
    assert {state.producer_id for state in partition.describe_producers()} == {pid for pid, _ in stored}
    for pid, offset in stored:
        again = put(partition, batch(0, pid=pid))
        assert (again.is_duplicate, again.base_offset) == (True, offset), f"producer id {pid}"


def _snapshot_names(disk: MemoryDisk) -> list[str]:
    return [name for name in disk.list(str(TP)) if name.endswith((".snapshot", ".producers"))]


@pytest.mark.behaviour("I19", "I20")
def test_a_large_snapshot_is_written_while_appends_go_on() -> None:
    disk, driven = MemoryDisk(), Driven()
    partition = open_partition(disk, SMALL, background=driven.background)
    stored = _fill_until_roll(partition)
    base, steps = stored[-1][1], 0
    assert len(driven.background) == 1
    while driven.step():
        stored += _fill(partition, range(len(stored), len(stored) + 1))
        steps += 1
        assert Snapshots(disk, str(TP)).offsets() in ([], [base])
        assert steps < 25, "a second roll"
    # The snapshot makes two passes over the table, with at most eight entries a step.
    assert steps > 2 * base / 8
    newest = Snapshots(disk, str(TP)).load_newest(10**9, NOW_MS)
    assert newest is not None
    assert set(newest.producers) == set(range(newest.offset)), "exactly the state at its offset"
    partition.abandon()
    _remembers(open_partition(disk.after_kill(), SMALL), stored)


@pytest.mark.behaviour("I17", "I20")
@pytest.mark.parametrize("ends", ["kill", "power loss"])
def test_a_crash_at_every_step_of_a_snapshot(ends: str) -> None:
    _, _, before, total = _crash_in_snapshot(None)
    assert total - before > 1000
    for step in range(before, total, 7 if ends == "kill" else 11):
        stored, crashed, _, _ = _crash_in_snapshot(step)
        found = crashed.after_kill() if ends == "kill" else crashed.after_power_loss(Random(step))
        again = open_partition(found, SMALL, recovery_point=len(stored))
        assert not [name for name in found.list(str(TP)) if name.endswith(".tmp")]
        _remembers(again, stored)


def _lone_snapshots(disk: MemoryDisk) -> list[str]:
    """Return the names of `.snapshot` files without a `.producers` file beside them. They look like files of
    Apache Kafka.
    """
    names = disk.list(str(TP))
    stems = {name.removesuffix(".producers") for name in names if name.endswith(".producers")}
    return [
        name for name in names if name.endswith(".snapshot") and name.removesuffix(".snapshot") not in stems
    ]


@pytest.mark.behaviour("I17")
def test_a_power_loss_between_the_names_of_a_snapshot_forgets_no_batch() -> None:
    """A `.snapshot` file without its `.producers` file would count as one of Apache Kafka's, which has only
    the last batch of each producer.
    """
    _, _, _, total = _crash_in_snapshot(None)
    for step in range(total - 30, total):
        crashed = _crash_in_snapshot(step)[1]
        for seed in range(20):
            assert _lone_snapshots(crashed.after_power_loss(Random(seed))) == [], (step, seed)


@pytest.mark.behaviour("I17")
@pytest.mark.parametrize("way", ["keep", "remove"])
def test_a_removed_snapshot_comes_back_whole_or_not_at_all(way: str) -> None:
    """R1110: a power loss could keep the removal of the `.producers` file and lose that of the `.snapshot`
    file.
    """

    def removed(step: int | None) -> MemoryDisk:
        disk = MemoryDisk()
        disk.mkdir(str(TP))
        for name in (
            f"{offset:020d}.{kind}" for offset in (10, 11, 12) for kind in ("snapshot", "producers")
        ):
            file = disk.open(f"{TP}/{name}", create=True)
            file.sync()
            file.close()
        disk.sync_directory(str(TP))
        disk.sync_directory("")
        disk.crash_after = None if step is None else disk.steps + step
        with suppress(SimulatedCrash):
            snapshots = Snapshots(disk, str(TP))
            snapshots.keep(lambda offset: offset == 12) if way == "keep" else snapshots.remove(10)
        return disk

    assert _lone_snapshots(removed(None)) == []
    for step in range(12):
        for seed in range(20):
            assert _lone_snapshots(removed(step).after_power_loss(Random(seed))) == [], (step, seed)


def _crash_in_snapshot(step: int | None) -> tuple[list[tuple[int, int]], MemoryDisk, int, int]:
    """Crash at the given step of a snapshot, or not at all if it is None.

    Return the stored batches, the disk, and the disk's step numbers at the snapshot's start and end.
    """
    disk, driven = MemoryDisk(), Driven()
    partition = open_partition(disk, SMALL, background=driven.background)
    stored = _fill_until_roll(partition)
    partition.flush()
    before = disk.steps
    disk.crash_after = step
    try:
        driven.finish()
    except SimulatedCrash:
        with suppress(SimulatedCrash):
            partition.abandon()
    return stored, disk, before, disk.steps


def test_a_second_roll_waits_and_a_third_takes_its_place() -> None:
    disk, driven = MemoryDisk(), Driven()
    partition = open_partition(disk, SMALL, background=driven.background)
    bases: list[int] = []
    stored: list[tuple[int, int]] = []
    # With so few background steps, the first snapshot is still unfinished at the next roll.
    while len(bases) < 3:
        segments = partition.segment_count
        stored += _fill(partition, range(len(stored), len(stored) + 1))
        if partition.segment_count > segments:
            bases.append(stored[-1][1])
            driven.step()
    driven.finish()
    assert Snapshots(disk, str(TP)).offsets() == [bases[0], bases[2]]
    partition.flush()
    # The deletion need not wait for the missing snapshot, because a newer one covers the same producers.
    assert partition.delete_records(bases[1], NOW_MS) == bases[1]
    assert partition.segment_count == 2
    driven.finish()
    assert Snapshots(disk, str(TP)).offsets() == [bases[2]]
    partition.abandon()
    _remembers(open_partition(disk.after_kill(), SMALL, log_start_offset=bases[1]), stored)


@pytest.mark.behaviour("I17", "I20")
def test_deleting_waits_until_the_producers_are_safe() -> None:
    disk, driven = MemoryDisk(), Driven()
    partition = open_partition(disk, SMALL, background=driven.background)
    stored = _fill(partition, range(30))
    partition.flush()
    assert partition.delete_records(None, NOW_MS) == 30
    assert partition.segment_count > 1, "the snapshot is not there yet"
    while driven.step():
        crashed = disk.after_kill()
        _remembers(open_partition(crashed, SMALL, log_start_offset=30), stored)
    assert (partition.segment_count, partition.size_bytes) == (1, 0)
    assert [name for name in disk.list(str(TP)) if name.endswith(".log")] == [f"{30:020d}.log"]


@pytest.mark.behaviour("I17")
def test_a_failed_snapshot_stops_nothing() -> None:
    disk = MemoryDisk()
    disk.errors = {("create", ".tmp"): errno.ENOSPC}
    partition = open_partition(disk, SMALL)
    stored = _fill(partition, range(60))
    assert partition.segment_count > 1
    assert _snapshot_names(disk) == []
    with pytest.raises(KafkaStorageError):
        partition.delete_records(40, NOW_MS)
    disk.errors = {}
    assert partition.delete_records(40, NOW_MS) == 40
    partition.abandon()
    # An unclean start cannot use the snapshot at the log end, which is above the recovery point.
    _remembers(open_partition(disk.after_kill(), SMALL, log_start_offset=40), stored)


@pytest.mark.behaviour("I17")
def test_a_snapshot_that_cannot_be_synced_is_not_there() -> None:
    disk, driven = MemoryDisk(), Driven()
    partition = open_partition(disk, SMALL, background=driven.background)
    _fill_until_roll(partition)
    disk.errors = {("sync", ".snapshot.tmp"): errno.EIO}
    with pytest.raises(OSError, match="Input/output"):
        driven.finish()
    assert [name for name in disk.list(str(TP)) if "snapshot" in name or "producers" in name] == []
    disk.errors = {}
    partition.close(NOW_MS)
    assert len(_snapshot_names(disk)) == 2


def test_closing_finishes_what_waits_and_abandoning_leaves_nothing_open() -> None:
    disk, driven = MemoryDisk(), Driven()
    partition = open_partition(disk, SMALL, background=driven.background)
    stored = _fill_until_roll(partition)
    driven.step()
    assert [name for name in disk.list(str(TP)) if name.endswith(".tmp")]
    partition.close(NOW_MS)
    assert not [name for name in disk.list(str(TP)) if name.endswith(".tmp")]
    assert not driven.step()
    _remembers(open_partition(disk.after_kill(), SMALL, clean_shutdown=True), stored)


@pytest.mark.parametrize("does_fail", [False, True])
def test_the_blocking_call_of_a_discarded_task_changes_no_other_task(does_fail: bool) -> None:
    done: list[str] = []

    def call() -> None:
        done.append("call")
        if does_fail:
            raise OSError(errno.EIO, "lost")

    def task(name: str) -> BackgroundTask:
        try:
            yield call
            done.append(name)
        finally:
            done.append(f"{name} closed")

    driven = Driven()
    first = task("first")
    driven.background.add(first)
    driven.background.add(task("second"))
    running = driven.background.step()
    assert running is not None
    driven.background.discard(first)
    assert done == ["first closed"]
    with suppress(OSError):
        running()
    assert driven.step(), "the discarded task's place is passed over, and its error with it"
    does_fail = False
    driven.finish()
    assert done == ["first closed", "call", "call", "second", "second closed"]


def _entry(pid: int, sequence: int) -> ProducerEntry:
    return ProducerEntry(0, None, NOW_MS, NOW_MS, None, (RememberedBatch(sequence, pid, 0, NOW_MS),))


@pytest.mark.parametrize("seed", range(20))
def test_an_image_does_not_change(seed: int) -> None:
    rng, table, model = Random(seed), ProducerTable(4, 4), {}
    images: list[tuple[producer_state.ProducerImage, dict[int, ProducerEntry]]] = []
    for step in range(600):
        pid = rng.randrange(1 << rng.randrange(1, 9))
        model[pid] = _entry(pid, step)
        table.put(pid, model[pid])
        if step % 50 == 0:
            images.append((table.image(), dict(model)))
        if step % 170 == 169:
            table.expire(NOW_MS + 10, 5)
            model.clear()
        assert table.get(pid) == model.get(pid)
    assert (dict(table.items()), len(table)) == (model, len(model))
    for image, expected in images:
        for parts in (image.parts(), image.drain()):
            found = {pid: unpack_entry(packed) for part in parts for pid, packed in part.items()}
            assert (found, image.entry_count) == (expected, len(expected))


def test_snapshot_parts_stay_small_while_the_producer_table_grows() -> None:
    table = ProducerTable(4, 4)
    for pid in range(5000):
        table.put(pid, _entry(pid, 0))
    sizes = [len(part) for part in table.image().parts()]
    assert sum(sizes) == 5000
    assert max(sizes) <= 2 * PARTS.producer_shard_entries


class _Ids:
    def __init__(self) -> None:
        self._rng = Random(5)

    def __call__(self) -> bytes:
        return self._rng.randbytes(16)


def _manager(disk: MemoryDisk) -> LogManager:
    return LogManager.open(disk, node_id=1, new_uuid=_Ids(), now_ms=NOW_MS)


def _open(manager: LogManager, count: int) -> list[Partition]:
    names = [TopicPartition("t", number) for number in range(count)]
    return [manager.open_partition(name, SMALL, TOPIC_ID, NOW_MS) for name in names]


def test_a_round_looks_at_one_partition_a_step_and_a_failing_one_stops_no_other() -> None:
    manager = _manager(MemoryDisk())
    partitions, seen = _open(manager, 5), []
    driven = Driven()
    manager.background.on_added = driven.background.on_added
    driven.background = manager.background

    def work(partition: Partition) -> Iterator[None]:
        seen.append(partition)
        yield
        if partition is partitions[1]:
            raise KafkaStorageError("this one fails")

    manager.for_each_partition(work)
    manager.delete_partitions([TopicPartition("t", 3)])
    for count in range(3):
        assert len(seen) == (count + 1) // 2
        assert driven.step()
    with pytest.raises(KafkaStorageError, match="this one fails"):
        driven.finish()
    assert seen == [partitions[0], partitions[1], partitions[2], partitions[4]]


def test_closing_ends_the_rounds_under_way() -> None:
    """Background rounds that continued after the close would write to closed partitions."""
    disk = MemoryDisk()
    manager = _manager(disk)
    partitions = _open(manager, 3)
    for partition in partitions:
        _fill(partition, range(3))
    manager.background.on_added = lambda: None
    looked_at: list[Partition] = []
    manager.for_each_partition(looked_at.append)
    manager.write_checkpoints()
    manager.background.step()
    manager.close(NOW_MS)
    assert looked_at == partitions[:1]
    assert disk.exists(".kafka_cleanshutdown")
    assert [p.log_end_offset for p in _open(_manager(disk), 3)] == [3, 3, 3]


@pytest.mark.behaviour("I17")
def test_a_log_start_within_a_segment_survives_a_kill() -> None:
    disk = MemoryDisk()
    partition = _open(_manager(disk), 1)[0]
    _fill(partition, range(10))
    partition.delete_records(4, NOW_MS)
    again = _open(_manager(disk.after_kill()), 1)[0]
    assert (again.log_start_offset, again.log_end_offset) == (4, 10)


@pytest.mark.behaviour("I17")
def test_checkpoints_written_aside_never_bring_back_a_deleted_partition() -> None:
    """A checkpoint is written in a thread. If it brought a deleted partition back, a new partition of that
    name would inherit the old log start offset.
    """
    disk = MemoryDisk()
    manager = _manager(disk)
    partition = _open(manager, 1)[0]
    _fill(partition, range(10))
    partition.delete_records(4, NOW_MS)
    manager.background.on_added = lambda: None
    manager.write_checkpoints()
    calls: list[BlockingCall] = []
    while manager.background and not calls:
        calls += [call] if (call := manager.background.step()) is not None else []
    manager.delete_partitions([TopicPartition("t", 0)])
    calls[0]()
    manager.background.finish()
    assert disk.read("log-start-offset-checkpoint") == b"0\n0\n"
    manager.background.on_added = None
    assert _open(manager, 1)[0].log_start_offset == 0


def test_a_blocking_call_that_raises_raises_in_its_task() -> None:
    events: list[str] = []

    def fails() -> None:
        raise OSError(errno.EIO, "broken")

    def task() -> BackgroundTask:
        try:
            yield fails
        except OSError as error:
            events.append(str(error.strerror))
        yield None
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        run(task())
    assert events == ["broken"]


KINDS = {
    "L": Kind.LOG,
    "R": Kind.REQUEST,
    "J": Kind.REQUEST_WITH_CALLS,
    "C": Kind.CHANGE,
    "A": Kind.ASSIGNMENT,
}


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        # A letter is the kind of a task. A dot is a plain step, an asterisk a blocking call that never ends.
        ("L... L..", "0 1 0 1 0"),  # Tasks of one kind take turns.
        ("L... R.. J.", "0 1 2 0 1 0"),  # The kinds take turns, too.
        ("L... R. R. R.", "0 1 0 2 0 3"),  # A kind gets the same share, however many tasks another kind has.
        ("L*. L.. R..", "0* 2 2"),  # A blocking call delays only tasks of its own kind.
        ("J*. J. R.. L..", "3 2 0* 3 2"),
        ("L.*. L.. J..", "0 2 1 2 0*"),
        ("L*. J*. R...", "0* 2 1* 2 2"),
        ("L*. J*. R", "0* 1*"),
        ("J*. C*. C. R.", "3 0* 1*"),
    ],
)
def test_a_blocking_call_delays_only_tasks_of_its_kind(tasks: str, expected: str) -> None:
    driven, done = BackgroundQueue(), list[str]()
    driven.on_added = lambda: None

    def task(number: int, steps: str) -> BackgroundTask:
        for step in steps:
            done.append(f"{number}{step.strip('.')}")
            yield (lambda: None) if step == "*" else None

    for number, text in enumerate(tasks.split()):
        driven.add(task(number, text[1:]), KINDS[text[0]])
    while driven.is_ready:
        driven.step()
    assert sorted(done) == sorted(expected.split())
    assert done == expected.split()


def test_a_blocking_call_that_ends_resumes_its_own_task() -> None:
    driven, events = BackgroundQueue(), list[str]()
    driven.on_added = lambda: None

    def fail() -> None:
        raise OSError(errno.EIO, "call")

    def task(name: str, call: BlockingCall) -> BackgroundTask:
        try:
            yield call
        except OSError as error:
            events.append(f"{name} failed: {error.strerror}")
        else:
            events.append(f"{name} went on")

    driven.add(task("log", lambda: None))
    driven.add(task("look-up", fail), Kind.REQUEST_WITH_CALLS)
    calls: list[RunningCall | None] = [driven.step(), driven.step()]
    assert driven.step() is None and not driven.is_ready and len(driven) == 2
    for call in reversed(calls):
        assert call is not None
        with suppress(OSError):
            call()
        call.end(OSError("too late"))
        driven.step()
    assert events == ["look-up failed: call", "log went on"] and not driven
    driven.finish()


def test_a_call_that_was_ended_does_nothing() -> None:
    """A thread pool that cannot start a thread raises an error, but runs the call once it has a thread.

    By then the task has gone on, and may have begun the next call on the same files.
    """
    driven, events = BackgroundQueue(), []
    driven.on_added = lambda: None

    def task() -> BackgroundTask:
        for number in (1, 2):
            try:
                yield partial(events.append, number)
            except RuntimeError:
                events.append(-number)

    driven.add(task())
    first = driven.step()
    assert first is not None
    first.end(RuntimeError("can't start new thread"))
    second = driven.step()
    first()
    assert second is not None
    second()
    driven.step()
    assert events == [-1, 2]


def test_a_call_that_has_begun_is_not_ended_by_a_lack_of_threads() -> None:
    """A thread pool that cannot start a thread raises an error, but another thread may already run the call.

    The task must wait for it. Otherwise a compaction would remove the files that the call gives their names.
    """
    driven, events = BackgroundQueue(), list[str]()
    driven.on_added = lambda: None

    def call() -> None:
        running.end(OSError("can't start new thread"))
        assert driven.step() is None and not driven.is_ready
        events.append("call")

    def task() -> BackgroundTask:
        yield call
        events.append("task")

    driven.add(task())
    first = driven.step()
    assert first is not None
    running = first
    running()
    assert not running.is_running
    driven.step()
    assert events == ["call", "task"]
