"""Mutants of recovery, compaction, retention and deferred work. Most of them reintroduce a finding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from oncelog.broker import state_file
from oncelog.errors import StorageError
from oncelog.log import cleaner, recovery, segment_swap
from oncelog.log import partition as log_partition
from oncelog.log.checkpoint import RECOVERY_POINTS
from oncelog.log.local_log import LocalLog
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.log.partition_disk import PartitionDisk
from oncelog.log.scan import HeaderBlock, scan_headers
from oncelog.log.segment import Segment
from oncelog.log.snapshot import SNAPSHOT_SUFFIX
from oncelog.rules.storage import compaction
from oncelog_simulator import bit_flips, disk_rot, simulation, topic_changes
from oncelog_simulator.faults import Fault
from oncelog_simulator.mutants.disk import PREEMPTED
from oncelog_simulator.mutants.mutant import Mutant, Patch, false, nothing, true
from oncelog_simulator.world import BROKER_HOST


def _up_to(offset: int, closed: Any, *, stable_offset: int, **how: Any) -> Any:
    return _FIND_DIRTY(closed, stable_offset=offset, **how)


def _dirty_past_open(self: Any, now_ms: int) -> Any:
    with patch.object(cleaner, "find_dirty", partial(_up_to, self._log.recovery_point)):
        return _DIRTY_RANGE(self, now_ms)


def _keep_no_tombstone(self: Any, key: bytes | None, offset: int, has_value: bool, horizon: Any) -> bool:
    return has_value and _KEEPS(self, key, offset, has_value, horizon)


def _retained_from(self: Any, now_ms: int) -> int:
    """Return the first retained offset, but never above the base offset of the first empty segment."""
    offset: int = _RETAINED_FROM(self, now_ms)
    empty = [segment.base_offset for segment in self.log.segments if segment.size_bytes == 0]
    kept_from: int = max(min([offset, *empty]), self.log_start_offset)
    return kept_from


def _blocks_to_damage(self: Any, position: int) -> Iterator[HeaderBlock]:
    for begin, end in self.whole_parts(position):
        behind = begin
        for block in scan_headers(self.file, begin, end, self.limits):
            behind = block.end
            yield block
        if behind != end:
            raise StorageError(f"{self.log_path} is damaged at position {behind}")


def _open_unsynced(disk: Any, *rest: Any) -> Any:
    with patch.object(PartitionDisk, "sync_directory", nothing):
        return _OPEN_SEGMENTS(disk, *rest)


def _append_control_at_once(self: Any, *how: Any) -> Any:
    """Append a marker without noting that it has no index entry yet, so a flush counts it as durable."""
    with patch.object(LocalLog, "unindexed_marker_offset", property(lambda _: None, nothing), create=True):
        return _APPEND_CONTROL(self, *how)


def _draw_power_losses(rng: Any, count: int, until_ms: int, *clients: Any, **how: Any) -> list[Fault]:
    if not how["loses_power"]:
        return []
    times = sorted(rng.randrange(until_ms) for _ in range(12))
    kinds = ("power", "power-in-write")
    return [Fault(at_ms, rng.choice(kinds), BROKER_HOST, 800, rng.randint(0, 3_000)) for at_ms in times]


def _damage_an_id(rng: Random, disk: Any, batches: Any, *, is_killed: bool) -> disk_rot.Rot | None:
    paths = [path for path in disk_rot._small_files(disk) if path.endswith("partition.metadata")]
    path = rng.choice(paths)
    return disk_rot.Rot(path, rng.randrange(len(disk.read(path))), rng.randrange(8))


def _finish_any_swaps(disk: Any, directory: str) -> None:
    for name in disk.list(directory):
        if name.endswith((".swap", ".cleaned")):
            int(name.partition(".")[0])
    _FINISH_SWAPS(disk, directory)


def _lose_points(rng: Random, disk: Any, batches: Any, *, is_killed: bool) -> disk_rot.Rot | None:
    return disk_rot.Rot(RECOVERY_POINTS) if disk.exists(RECOVERY_POINTS) else None


def _lose_index(rng: Random, disk: Any, batches: Any, *, is_killed: bool) -> disk_rot.Rot | None:
    paths = [
        f"{name}/{file_name}"
        for name in disk.list()
        if disk.is_directory(name)
        for file_name in disk.list(name)
    ]
    indexes = [path for path in paths if path.endswith(".txnindex") and disk.read(path)]
    return disk_rot.Rot(rng.choice(indexes)) if indexes else None


def _stopped_in_the_end(_: Random) -> str:
    return "stopped"


def _always_stopped(seed: int) -> str:
    return "stopped"


def _flip_without_snapshots(disk: Any, partition: Any, what: Any) -> None:
    _FLIP(disk, partition, what)
    for name in disk.list(partition.directory):
        if name.endswith(SNAPSHOT_SUFFIX):
            disk.remove(f"{partition.directory}/{name}")


def _check_id_without_name(disk: Any, directory: str, topic_id: bytes | None) -> bytes | None:
    try:
        return _CHECK_ID(disk, directory, topic_id)
    except StorageError:
        raise StorageError(f"{directory} belongs to a topic of the same name with another id") from None


def _always_killed(_: Random) -> str:
    return "killed"


_FLIP = bit_flips.flip
_CHECK_ID = log_partition._check_topic_id
_FINISH_SWAPS = segment_swap.finish_swaps
ROTTEN_IDS: tuple[Patch, ...] = (
    (simulation, "draw_state", _always_killed),
    (simulation, "draw_rot", _damage_an_id),
)
LONG_OPEN: tuple[Patch, ...] = (
    (topic_changes.KeyedWriter, "late_chance", 0.8),
    (topic_changes, "POLICIES", ("compact",)),
)
"""In every seed the topic is compacted, and most transactions stay open until the coordinator aborts them."""
LOST_POINTS: tuple[Patch, ...] = (
    (simulation, "draw_state", _always_killed),
    (simulation, "draw_rot", _lose_points),
)
"""The checkpoint of recovery points is lost in every seed."""
LOST_INDEXES: tuple[Patch, ...] = (
    (simulation, "draw_state", _stopped_in_the_end),
    (simulation, "draw_rot", _lose_index),
)
"""A segment's index of aborted transactions is lost in every seed."""
LOST_SNAPSHOTS: tuple[Patch, ...] = (
    (simulation, "_draw_flip", _always_stopped),
    (simulation, "flip", _flip_without_snapshots),
)
"""A bit flips in every seed, and the producer snapshots are lost."""
_FIND_DIRTY, _DIRTY_RANGE = compaction.find_dirty, cleaner.LogCleaner.dirty_range
_KEEPS = compaction.Cleaner.keeps
_RETAINED_FROM = Partition._retained_from
_OPEN_SEGMENTS = recovery._open_segments
_APPEND_CONTROL = Partition._append_control
POWER_LOSSES: tuple[Patch, ...] = ((simulation, "draw_faults", _draw_power_losses),)
"""In every seed the broker loses its power repeatedly, sometimes during a write."""
MUTANTS = [
    Mutant(
        "checksums of the node's small files are not checked",
        ((state_file, "_check", nothing),),
        findings=("R741",),
        guards=("broker/test_broker_state_file.py::test_no_flipped_bit_changes_what_a_file_says",),
    ),
    Mutant(
        "compaction does not stop at open transactions",
        ((cleaner.LogCleaner, "dirty_range", _dirty_past_open),),
        "changed",
        LONG_OPEN,
    ),
    Mutant(
        "compaction removes tombstones at once",
        ((compaction.Cleaner, "keeps", _keep_no_tombstone),),
        "changed",
        guards=("log/test_log_compaction.py::test_tombstones_are_removed_in_two_rounds",),
    ),
    Mutant(
        "a gap that compaction left counts as a loss",
        ((recovery, "_may_be_compacted", false),),
        "changed",
        LOST_POINTS,
        findings=("R106",),
    ),
    Mutant(
        "a segment that compaction emptied stops retention",
        ((Partition, "_retained_from", _retained_from),),
        "timed",
        findings=("R107",),
        guards=(
            "log/test_log_retention.py::test_a_segment_that_compaction_emptied_does_not_keep_later_ones",
        ),
    ),
    Mutant(
        "damage below the recovery point fails a start that replays the log",
        ((Segment, "header_blocks", _blocks_to_damage), (recovery, "verify_crc", true)),
        None,
        LOST_SNAPSHOTS,
        findings=("R200",),
        guards=(
            "log/test_log_recovery.py::test_a_flipped_bit_below_the_recovery_point_does_not_prevent_startup",
        ),
    ),
    Mutant(
        "segments that recovery removed come back after a power loss",
        ((recovery, "_open_segments", _open_unsynced),),
        None,
        POWER_LOSSES,
        findings=("R230",),
        guards=(
            "log/test_log_recovery.py::test_segments_that_recovery_removed_stay_removed_after_a_power_loss",
        ),
    ),
    Mutant(
        "an empty segment after a loss is kept",
        ((recovery, "_drop_empty_tail", false),),
        "changed",
        POWER_LOSSES,
        findings=("R231",),
        guards=("log/test_log_recovery.py::test_a_compacted_log_ends_where_its_last_batch_does",),
    ),
    Mutant(
        "a flush counts a marker as durable without its index entry",
        ((Partition, "_append_control", _append_control_at_once),),
        None,
        (*PREEMPTED, *POWER_LOSSES),
        findings=("R32",),
        guards=(
            "log/test_log_flush_race.py::test_a_flush_during_an_abort_makes_no_marker_durable_without_its_index_entry",
        ),
    ),
    Mutant(
        "a lost index of aborted transactions counts as empty",
        ((recovery, "_has_lost_aborted", false),),
        None,
        LOST_INDEXES,
        findings=("R241",),
    ),
    Mutant(
        "a damaged topic id is an error without a file's name",
        ((log_partition, "_check_topic_id", _check_id_without_name),),
        None,
        ROTTEN_IDS,
        findings=("R150", "R530"),
    ),
    Mutant(
        "foreign directories count as partitions",
        ((LogManager, "is_partition", true),),
        "foreign files",
        findings=("R108",),
    ),
    Mutant(
        "foreign files count as segments",
        ((recovery, "finish_swaps", _finish_any_swaps),),
        "foreign files",
        findings=("R114",),
    ),
    Mutant(
        "a compaction that Apache Kafka began is not finished",
        ((recovery, "finish_swaps", nothing),),
        "takeover",
    ),
]
NOT_CAUGHT: dict[str, str] = {
    "checksums of the node's small files are not checked": (
        "a start may be refused or not after a flipped bit there, and nothing follows it"
    ),
    "compaction removes tombstones at once": (
        "seed 6 noticed it before the product changed: no seed of the first 70 since"
    ),
    "a segment that compaction emptied stops retention": (
        "needs retention of a topic in which compaction emptied a segment: no seed of the first 100 of"
        " `timed`"
    ),
    "damage below the recovery point fails a start that replays the log": (
        "needs a flip in a length or format, in a log that is replayed: no seed of the first 10"
    ),
    "segments that recovery removed come back after a power loss": (
        "needs a power loss that cuts a segment with later ones behind it, and a second one soon after: no"
        " seed of the first 13"
    ),
    "an empty segment after a loss is kept": (
        "needs a power loss that takes the end of a compacted segment: no seed of the first 11"
    ),
    "a flush counts a marker as durable without its index entry": (
        "needs a flush between a marker and its index entry, and a power loss soon after: no seed of the"
        " first 32"
    ),
}
"""Mutants that no seed catches, with the reason."""
