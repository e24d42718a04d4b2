"""Topics are created, grown, deleted and recreated while the disk fails or the process is killed.

After one or two faults, the broker still starts, acknowledged changes are kept, deleted topics stay deleted,
and every name can be used again. The second fault hits the repeated request or the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EMFILE
from random import Random

import pytest
from support.faulty_disk import Fault, FaultyDisk
from support.log.partitions import NOW_MS, batch, read_all

from oncelog.broker.stepwise import run_work
from oncelog.broker.topics.takeover import take_over
from oncelog.broker.topics.topics import Topic, Topics
from oncelog.config import BROKER
from oncelog.errors import BrokerError, StorageError
from oncelog.log.checkpoint import write_partition_metadata
from oncelog.log.manager import LogManager
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Origin

SETTINGS = BROKER.parse({})
NAME, OTHER = "t", "other"
Step = tuple[int, Fault, bool]
"""The number of the disk call that fails, the fault, and True if all later calls of the request fail too."""
REFUSED = (BrokerError, StorageError, OSError)


class TopicManager:
    """The topics of a broker on a faulty disk. A request either succeeds or raises an error."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._uuids = Random(len(disk.list()))
        self.disk = FaultyDisk(disk.after_kill())
        self.is_down = True

    def start(self) -> None:
        """Start the broker.

        Raises StorageError or OSError if the start is refused, SimulatedCrash if it is killed.
        """
        logs = LogManager.open(
            self.disk, node_id=1, new_uuid=lambda: self._uuids.randbytes(16), now_ms=NOW_MS
        )
        try:
            take_over(logs, SETTINGS)
            self.logs = logs
            self.topics = Topics(logs, SETTINGS, new_uuid=lambda: self._uuids.randbytes(16), now_ms=NOW_MS)
        except REFUSED:
            logs.release()
            raise
        self.is_down = False

    def kill(self) -> None:
        """End the process. The next one finds only the files that were written."""
        self.disk = FaultyDisk(self.disk.disk.after_kill())
        self.is_down = True

    def create(self, name: str, count: int) -> None:
        self.topics.create(name, count, {}, NOW_MS)

    def grow(self, count: int) -> None:
        topic = self.topics.get(NAME)
        if topic is not None and len(topic.partitions) < count:
            self.topics.add_partitions([(topic, count)], NOW_MS)

    def delete(self) -> None:
        topic = self.topics.get(NAME)
        if topic is not None:
            self.topics.delete([topic])

    def fill(self, name: str) -> None:
        """Store a record in each partition, and write the checkpoints."""
        for partition in self.found(name).partitions:
            partition.append(memoryview(bytearray(batch())), origin=Origin.CLIENT, now_ms=NOW_MS)
            partition.flush()
        self.logs.write_checkpoints()

    def found(self, name: str) -> Topic:
        topic = self.topics.get(name)
        assert topic is not None, name
        return topic

    def shape(self, name: str) -> list[int] | None:
        """Return 1 for each partition with records and 0 for each empty one, or None if the topic does not
        exist.
        """
        topic = self.topics.get(name)
        if topic is None:
            return None
        return [len(list(read_all(partition))) and 1 for partition in topic.partitions]


def make(manager: TopicManager) -> None:
    manager.create(NAME, 3)


def grow(manager: TopicManager) -> None:
    manager.grow(4)


def delete(manager: TopicManager) -> None:
    manager.delete()


def remake(manager: TopicManager) -> None:
    """Delete the topic, whatever state it is in, and create it with more partitions."""
    manager.delete()
    manager.create(NAME, 3)


def grow_and_remake(manager: TopicManager) -> None:
    with suppress(*REFUSED):
        manager.grow(4)
    remake(manager)


FULL = [1, 1]
SCENARIOS: dict[
    str, tuple[Callable[[TopicManager], None], bool, list[list[int] | None], list[list[int] | None]]
] = {
    # Each scenario: the request, True if the topic exists before, the states that are possible without a
    # response, and those after success.
    "make": (make, False, [None, [0] * 3], [[0] * 3]),
    "grow": (grow, True, [FULL, [1, 1, 0, 0]], [[1, 1, 0, 0]]),
    "delete": (delete, True, [FULL, None], [None]),
    "remake": (remake, True, [FULL, None, [0] * 3], [[0] * 3]),
    "grow and remake": (grow_and_remake, True, [FULL, [1, 1, 0, 0], None, [0] * 3, [0] * 4], [[0] * 3]),
}


def prepared(scenario: str) -> TopicManager:
    """Return a started broker whose disk has the topics of the scenario's beginning."""
    manager = TopicManager(DISKS[SCENARIOS[scenario][1]])
    manager.start()
    return manager


def _disk(has_topic: bool) -> MemoryDisk:
    manager = TopicManager(MemoryDisk())
    manager.start()
    for name, count in ((OTHER, 1), *([(NAME, 2)] if has_topic else [])):
        manager.create(name, count)
        manager.fill(name)
    return manager.disk.disk.after_kill()


DISKS = {has_topic: _disk(has_topic) for has_topic in (False, True)}


def attempt(manager: TopicManager, scenario: str) -> bool:
    """Start if necessary, and send the request; return True if it succeeded."""
    request = SCENARIOS[scenario][0]
    try:
        if manager.is_down:
            manager.start()
        request(manager)
    except SimulatedCrash:
        manager.kill()
        return False
    except REFUSED:
        return False
    return True


def play(scenario: str, faults: list[Step], *, is_killed: bool) -> bool:
    """Inject the faults one after the other, and check the topics. Return False without the last checks if a
    fault did not occur.
    """
    request, _, *shapes = SCENARIOS[scenario]
    manager, allowed = prepared(scenario), shapes[0]
    was_done, met = False, []
    for step in faults:
        disk = manager.disk
        disk.arm(*step)
        is_done = attempt(manager, scenario)
        # A recreation begins with a deletion, so a failed repetition may undo an earlier success.
        was_done = is_done or (was_done and request not in (remake, grow_and_remake))
        met.append(disk.is_met)
        manager.disk.fail_in = None
        allowed = shapes[was_done]
        if not manager.is_down:
            assert manager.shape(NAME) in (*shapes[0], None), (scenario, faults)
    if not all(met):
        return False
    if not manager.is_down and manager.topics.get(NAME) is not None:
        manager.fill(NAME)  # records that are acknowledged from now on must not be lost
        # A growth that failed may still take effect at a start, like any request without a response.
        counts = manager.shape(NAME)
        allowed = [counts, [1, 1, 0, 0] if counts == FULL else [1, 1, 1, 0]]
    if not manager.is_down and not is_killed:
        with suppress(*REFUSED):
            manager.logs.close(NOW_MS)
    for _ in range(2):
        manager.kill()
        manager.start()
        assert manager.shape(OTHER) == [1]
        assert manager.shape(NAME) in allowed, (scenario, faults)
    use_again(manager)
    return True


def use_again(manager: TopicManager) -> None:
    """Check that another topic can get the name, and that it survives a kill."""
    manager.delete()
    manager.create(NAME, 5)
    assert manager.shape(NAME) == [0] * 5
    manager.fill(NAME)
    names = {name for name in manager.disk.list() if name.startswith(f"{NAME}-")}
    assert names == {f"{NAME}-{index}" for index in range(5)}
    manager.kill()
    manager.start()
    assert manager.shape(NAME) == [1] * 5
    assert all(partition.recovery_warnings == [] for _, partition in manager.topics.all_partitions())


def singles(scenario: str) -> Iterator[Step]:
    """Return every single fault: each disk call of the request with each kind of fault that it can meet."""
    manager = prepared(scenario)
    manager.disk.arm(-1, Fault.EIO)
    assert attempt(manager, scenario)
    return (
        (step, fault, is_lasting)
        for step in range(manager.disk.calls)
        for fault in Fault
        for is_lasting in (False, True)
        if not (is_lasting and fault in (Fault.KILL_BEFORE, Fault.KILL_AFTER))
    )


@pytest.mark.full("hundreds of starts")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_topic_survives_a_fault_at_any_step(scenario: str) -> None:
    met = [play(scenario, [single], is_killed=bool(single[0] % 2)) for single in singles(scenario)]
    assert sum(met) > len(met) / 4


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_topic_survives_a_fault_at_some_steps(scenario: str) -> None:
    steps = Random(1).sample([*singles(scenario)], 60)
    assert any([play(scenario, [single], is_killed=bool(single[0] % 2)) for single in steps])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_topic_survives_two_faults_in_a_row(scenario: str, seed: int) -> None:
    rng = Random(seed)
    first, met_count = [*singles(scenario)], 0
    for _ in range(300):
        faults = [rng.choice(first), (rng.randrange(40), rng.choice([*Fault]), rng.random() < 0.5)]
        met_count += play(scenario, faults, is_killed=rng.random() < 0.5)
        if met_count == 20:
            break
    assert met_count


def test_a_deletion_that_a_failing_disk_stops_continues_without_a_restart() -> None:
    """Regression: a deletion ran out of descriptors, and the name stayed taken until a restart."""
    manager = prepared("delete")
    manager.disk.disk.errors["rename", f"{NAME}-1"] = EMFILE
    manager.delete()
    assert manager.topics.get(NAME) is None
    run_work(manager.topics.resume_deletions())
    assert f"{NAME}-1" in manager.disk.list()
    manager.disk.disk.errors.clear()
    run_work(manager.topics.resume_deletions())
    assert not [name for name in manager.disk.list() if name.startswith(f"{NAME}-")]
    use_again(manager)


def test_a_deletion_whose_list_is_not_synced_takes_no_record_afterwards() -> None:
    """After a kill, the deletion takes effect. A record that is acknowledged after the request would then be
    lost.
    """
    manager = prepared("delete")
    fails_to_sync(manager, lambda: manager.delete())
    assert manager.topics.get(NAME) is None
    run_work(manager.topics.resume_deletions())
    assert f"{NAME}-0" not in manager.disk.list()
    use_again(manager)


def fails_to_sync(manager: TopicManager, request: Callable[[], None]) -> None:
    """Send a request until its write of the topics file reaches the file but is not synced."""
    step = 0
    while True:
        manager.disk.arm(step, Fault.LATE_EIO)
        try:
            request()
        except StorageError:
            assert manager.disk.is_met
            return
        step += 1  # the fault hit an earlier call than that write


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_directory_that_another_topic_left_does_not_prevent_a_start(is_killed: bool) -> None:
    """A failed growth left a directory. The topic was deleted, and recreated with more partitions."""
    manager = prepared("delete")
    manager.disk.mkdir(f"{NAME}-2")
    write_partition_metadata(manager.disk, f"{NAME}-2", bytes(15) + b"\1")
    manager.delete()
    if is_killed:
        manager.disk.disk.errors["mkdir", f"{NAME}-1"] = EMFILE
        manager.disk.disk.errors["rename", f"{NAME}-0"] = EMFILE
        with pytest.raises(REFUSED):
            manager.create(NAME, 3)
        manager.kill()
        manager.start()
    use_again(manager)


def test_a_start_on_a_full_disk_ends_deletions() -> None:
    manager = prepared("delete")
    manager.disk.disk.errors["rename", f"{NAME}-1"] = EMFILE
    manager.delete()
    manager.kill()
    manager.disk.disk.capacity_bytes = 0
    manager.start()
    assert manager.topics.get(NAME) is None
    manager.disk.disk.capacity_bytes = None
    use_again(manager)


def test_a_new_topic_inherits_no_checkpoint_that_could_not_be_written() -> None:
    """After a kill, the log start of the deleted topic would delete records of the new one."""
    manager = prepared("delete")
    partition = manager.found(NAME).partitions[0]
    partition.delete_records(1, NOW_MS)
    manager.logs.write_checkpoints()
    manager.disk.disk.errors["replace", "checkpoint"] = EMFILE
    manager.delete()
    manager.disk.disk.errors.clear()
    manager.create(NAME, 2)
    manager.fill(NAME)
    manager.kill()
    manager.start()
    assert manager.shape(NAME) == [1, 1]
