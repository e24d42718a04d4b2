"""Damage a file at the end of a run, while the broker is down.

The damage is in a small file or in a batch of a coordinator's log, or the directory of a partition is lost.
The broker then starts, or refuses to start and names the file. The first start may be killed. Everything
outside the damaged file must be as before: the records that readers saw, the groups' offsets, and the
transactional ids.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from oncelog.broker.coordinators.internal_topic import partition_for
from oncelog.broker.state import BrokerState
from oncelog.errors import StorageError
from oncelog.log.checkpoint import LOG_STARTS
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import TopicPartition
from oncelog_simulator.bit_flips import recovery_points
from oncelog_simulator.checks import batches_of
from oncelog_simulator.world import World

ROT_CHANCE = 0.1
START_KILL_CHANCE = 0.3
"""Probability that the first start after the damage is killed, within MAX_START_STEPS disk operations."""
MAX_START_STEPS = 2_000
ENTRY_BYTES = {".index": 8, ".timeindex": 12}
UNCHECKED = (".index", ".timeindex", ".txnindex", LOG_STARTS, "cleaner-offset-checkpoint")
"""Files without a checksum. They are only lost or cut, because a flipped bit could give another valid value.
"""
REFUSING = ("meta.properties", "partition.metadata", ".json")
"""Files whose damage or loss makes a start fail with an error that names the file."""
INTERNAL = ("__consumer_offsets", "__transaction_state")


class Rot(NamedTuple):
    """Damage to one file, or the loss of a partition's directory.

    With `bit`, that bit of the byte at `position` is flipped. With `position` alone, the file is cut there.
    With neither, the file or directory is lost.
    """

    path: str
    position: int | None = None
    bit: int | None = None

    def __str__(self) -> str:
        if self.position is None:
            return f"{self.path} is lost"
        return f"{self.path} " + (
            f"ends at {self.position}"
            if self.bit is None
            else f"has bit {self.bit} of {self.position} flipped"
        )

    @property
    def damaged(self) -> TopicPartition | None:
        """The coordinator's partition whose log is damaged; None if something else is damaged or lost."""
        topic, _, number = posixpath.dirname(self.path).rpartition("-")
        is_log = self.path.endswith(".log")
        return TopicPartition(topic, int(number)) if is_log and topic in INTERNAL else None

    @property
    def lost(self) -> TopicPartition | None:
        """The partition whose directory is lost; None if a file is damaged."""
        topic, _, number = self.path.rpartition("-")
        is_directory = bool(topic) and number.isdecimal() and "/" not in self.path
        return TopicPartition(topic, int(number)) if is_directory else None

    def apply(self, disk: MemoryDisk) -> None:
        if self.lost is not None:
            disk.remove_tree(self.path)
            disk.sync_directory()
            return
        if self.position is None:
            disk.remove(self.path)
            return
        file = disk.open(self.path)
        if self.bit is None:
            file.truncate(self.position)
        else:
            file.pwrite(bytes([file.pread(1, self.position)[0] ^ 1 << self.bit]), self.position)
        file.sync()


class InternalBatch(NamedTuple):
    """A batch in a coordinator's log."""

    tp: TopicPartition
    directory: str
    last_offset: int
    data: bytes


def draw_rot(rng: Random, disk: MemoryDisk, batches: list[InternalBatch], *, is_killed: bool) -> Rot | None:
    """Draw damage to the disk of a broker that has ended. Return None if there is nothing to damage.

    `batches` comes from `internal_batches`.
    """
    if rng.random() < 0.4:
        return _draw_internal(rng, disk, batches, is_killed=is_killed)
    # Lose a directory only after a stop, which stores the recovery point of each log: a start needs it to
    # detect the loss.
    if not is_killed and rng.random() < 0.15:
        return draw_lost_directory(rng, disk)
    files = [path for path in _small_files(disk) if disk.read(path)]
    suffixes = sorted({_suffix(path) for path in files})
    if not suffixes:
        return None
    suffix = rng.choice(suffixes)
    path = rng.choice([path for path in files if _suffix(path) == suffix])
    size = len(disk.read(path))
    if rng.random() < 0.4 or (path.endswith(UNCHECKED) and suffix not in ENTRY_BYTES):
        return Rot(path)
    if suffix in ENTRY_BYTES:
        return Rot(path, ENTRY_BYTES[suffix] * rng.randrange(size // ENTRY_BYTES[suffix] + 1))
    return Rot(path, rng.randrange(size), rng.randrange(8))


def draw_lost_directory(rng: Random, disk: MemoryDisk) -> Rot | None:
    """Draw a lost directory among the partitions of client topics."""
    lost = [Rot(name) for name in disk.list() if disk.is_directory(name) and not name.startswith("__")]
    lost = [rot for rot in lost if rot.lost is not None and disk.exists(f"{rot.path}/partition.metadata")]
    return rng.choice(lost) if lost else None


def _suffix(path: str) -> str:
    return posixpath.splitext(path)[1] or posixpath.basename(path)


def _small_files(disk: MemoryDisk) -> Iterator[str]:
    for name in disk.list():
        if not disk.is_directory(name):
            if name not in (".lock", ".kafka_cleanshutdown"):
                yield name
            continue
        for file_name in disk.list(name):
            # Leave out logs and indexes of aborted transactions: no other file has their content below the
            # recovery point, so a start cannot repair them.
            if not file_name.endswith((".log", ".txnindex")):
                yield f"{name}/{file_name}"


def internal_batches(node: BrokerState) -> list[InternalBatch]:
    """Return the batches in the coordinators' logs."""
    return [
        InternalBatch(tp, partition.directory, header.last_offset, bytes(data))
        for tp, partition in sorted(node.log_manager.partitions.items())
        if tp.topic in INTERNAL
        for header, data in batches_of(partition)
    ]


def _draw_internal(
    rng: Random, disk: MemoryDisk, batches: list[InternalBatch], *, is_killed: bool
) -> Rot | None:
    # After a kill, draw only batches below the recovery point: above it, a start cuts the log off at the
    # first damaged batch, as Apache Kafka does.
    limits = recovery_points(disk) if is_killed else None
    eligible = [batch for batch in batches if limits is None or batch.last_offset < limits.get(batch.tp, 0)]
    if not eligible:
        return None
    batch = rng.choice(eligible)
    for name in disk.list(batch.directory):
        path = f"{batch.directory}/{name}"
        begin = disk.read(path).find(batch.data) if name.endswith(".log") else -1
        if begin >= 0:
            return Rot(path, begin + rng.randrange(21, len(batch.data)), rng.randrange(8))
    return None


def draw_state(rng: Random) -> str | None:
    """Draw the broker's state during the damage, "stopped" or "killed". Most seeds draw None: no damage."""
    return rng.choice(("stopped", "killed")) if rng.random() < ROT_CHANCE else None


class CoordinatorData(NamedTuple):
    """Committed offsets and transactional ids.

    A key has the partition number of the coordinator's log, and the name of the group or transactional id.
    """

    offsets: dict[tuple[int, str], dict[TopicPartition, int]]
    transactions: dict[tuple[int, str], Any]


def known(node: BrokerState) -> CoordinatorData:
    """Return the committed offsets and transactional ids that the coordinators have in memory."""
    counts = {name: sum(tp.topic == name for tp in node.log_manager.partitions) for name in INTERNAL}
    offsets, transactions = {}, {}
    for group in node.groups.offsets.groups():
        index = partition_for(group, counts[INTERNAL[0]])
        offsets[index, group] = {
            tp: committed.offset for tp, committed in node.groups.offsets.of(group).items()
        }
    for entry in node.transactions.all():
        index = partition_for(entry.transactional_id, counts[INTERNAL[1]])
        transactions[index, entry.transactional_id] = (entry.producer_id, entry.state)
    return CoordinatorData(offsets, transactions)


def log_ends(node: BrokerState) -> dict[TopicPartition, int]:
    """Return the log end offsets of all partitions of client topics."""
    partitions = node.log_manager.partitions.items()
    return {tp: partition.log_end_offset for tp, partition in partitions if tp.topic not in INTERNAL}


def check_ends(
    world: World, rot: Rot, before: dict[TopicPartition, int], after: dict[TopicPartition, int]
) -> None:
    """Check that no log ends below its end before the damage."""
    for tp, end in before.items():
        if after.get(tp, 0) < end:
            world.violate("rot took what it did not touch", f"{rot}: {tp} ends at {after.get(tp)}, was {end}")


def may_refuse(rot: Rot, error: Exception) -> bool:
    """Return True if a start may fail with this error because it names the damaged file."""
    return (
        isinstance(error, StorageError)
        and rot.path.endswith(REFUSING)
        and posixpath.basename(rot.path) in str(error)
    )


def check_coordinator_data(world: World, rot: Rot, before: CoordinatorData, after: CoordinatorData) -> None:
    """Check that the coordinators know everything that was outside the damaged partition."""
    damaged = rot.damaged
    for topic, expected, actual in (
        (INTERNAL[0], before.offsets, after.offsets),
        (INTERNAL[1], before.transactions, after.transactions),
    ):
        for (index, name), value in expected.items():
            is_damaged = TopicPartition(topic, index) == damaged
            now = actual.get((index, name))
            if now != value and not (is_damaged and now is None):
                world.violate("rot took what it did not touch", f"{rot}: {name} is {now}, was {value}")
