"""Mutants of removed and replaced files: retention, swaps, lost directories and lost indexes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.config import INT64_MAX
from oncelog.log import cleaner, partition, recovery, segment_swap
from oncelog.log.disk import Disk
from oncelog.log.index import TransactionIndex
from oncelog.log.local_log import LocalLog
from oncelog.log.manager import LogManager
from oncelog.log.producers import PartitionProducers
from oncelog.log.segment import LOG_SUFFIX, SUFFIXES, Segment, file_name
from oncelog.log.segment_swap import CLEANED, SWAP
from oncelog_simulator import disk_rot, simulation
from oncelog_simulator.mutants.mutant import ClientMutant, Mutant, Patch, nothing
from oncelog_simulator.mutants.storage import LOST_INDEXES


def _newest_snapshot(self: Any) -> int | None:
    """Treat any snapshot on the disk as durable, even if the log is not synced up to it."""
    offset: int | None = self.producers.snapshot_offset
    return offset


def _make_swap_at_once(disk: Disk, directory: str, output: Any, newest_path: str) -> None:
    """Rename the log together with its indexes, and sync their names together."""
    disk.set_modified_ms(output.log_path, disk.modified_ms(newest_path))
    output.sync(is_active=False)
    for suffix in reversed(SUFFIXES):
        stem = f"{directory}/{file_name(output.base_offset, suffix)}"
        if disk.exists(stem + CLEANED):
            disk.rename(stem + CLEANED, stem + SWAP)
    disk.sync_directory(directory)


def _take_names_at_once(disk: Disk, directory: str, base_offset: int) -> None:
    for suffix in SUFFIXES:
        name = f"{directory}/{file_name(base_offset, suffix)}"
        if disk.exists(name + SWAP):
            disk.rename(name + SWAP, name)


def _recover_from_0(disk: Any, directory: str, how: Any) -> Any:
    is_lost = not any(name.endswith(LOG_SUFFIX) for name in disk.list(directory))
    return _RECOVER(disk, directory, replace(how, recovery_point=0) if is_lost else how)


def _store_in_place(self: Any) -> None:
    """Write an index of aborted transactions over the existing file, instead of replacing the file."""
    file = self._disk.open(self._path, create=True)
    file.truncate(0)
    file.close()
    self._written = 0
    self.sync()


def _sync_nothing(self: Any) -> None:
    self.recovery_point = self.end_offset


def _drop_all_or_none(self: Any) -> bool:
    dead = self._dead_segments()
    if dead and dead[-1].end_offset > (self.covered_to or 0):
        return False
    had_any: bool = _DROP_DEAD(self)
    return had_any


def _sync_once(self: Any, *, is_active: bool) -> None:
    """Skip the sync of a closed segment whose indexes were synced once, even if it was cut off afterwards."""
    if is_active or not self.is_index_synced:
        _SYNC_SEGMENT(self, is_active=is_active)


def _keep_newest(self: Any, offsets: Any, covered_to: int | None) -> Any:
    return _KEEP_SNAPSHOTS(self, [*offsets, self.snapshot_offset], INT64_MAX)


def _stopped_in_the_end(_: Random) -> str:
    return "stopped"


def _lose_directory(rng: Random, disk: Any, batches: Any, *, is_killed: bool) -> disk_rot.Rot | None:
    return disk_rot.draw_lost_directory(rng, disk)


LOST_DIRECTORIES: tuple[Patch, ...] = (
    (simulation, "draw_state", _stopped_in_the_end),
    (simulation, "draw_rot", _lose_directory),
)
"""The directory of a partition is lost in every seed."""
KILLED_STARTS: tuple[Patch, ...] = (
    *LOST_INDEXES,
    (disk_rot, "START_KILL_CHANCE", 1.0),
    (disk_rot, "MAX_START_STEPS", 600),
)
"""In every seed the index of aborted transactions is lost, and the start that rebuilds it is killed."""
_RECOVER, _SYNC_SEGMENT = recovery.recover, Segment.sync
_DROP_DEAD, _KEEP_SNAPSHOTS = LocalLog._drop_dead, PartitionProducers.keep_snapshots
MUTANTS: list[Mutant | ClientMutant] = [
    ClientMutant(
        "a transaction whose marker is lost stays open",
        "unsynced",
        (),
        (
            (TransactionCoordinator, "write_lost_markers", nothing),
            (TransactionCoordinator, "end_leftovers", nothing),
        ),
        findings=("R520",),
        guards=(
            "broker/test_broker_lost_markers.py::"
            "test_an_aborted_record_is_not_committed_with_the_next_transaction",
        ),
    ),
    ClientMutant(
        "the recovery point runs ahead of the sync",
        "unsynced",
        (),
        ((LocalLog, "flush", _sync_nothing),),
    ),
    ClientMutant(
        "segments are deleted once a newer snapshot is on the disk",
        "unsynced",
        (),
        ((LocalLog, "covered_to", property(_newest_snapshot)),),
        findings=("R240",),
        guards=(
            "log/test_log_retention.py::"
            "test_a_power_loss_after_deleting_segments_leaves_their_producers_known",
        ),
    ),
    Mutant(
        "a swap syncs the names of a log and of its indexes together",
        (
            (cleaner, "make_swap", _make_swap_at_once),
            (segment_swap, "_take_names", _take_names_at_once),
        ),
        "changed",
        findings=("R242",),
        guards=("log/test_log_compaction.py::test_a_power_loss_during_a_swap_keeps_aborted_records_hidden",),
    ),
    Mutant(
        "a lost directory starts again at offset 0",
        ((partition, "recover", _recover_from_0),),
        None,
        LOST_DIRECTORIES,
        findings=("R243",),
        guards=("log/test_log_recovery.py::test_a_lost_directory_gives_no_offset_again",),
    ),
    Mutant(
        "an index of aborted transactions is rebuilt in place",
        ((TransactionIndex, "store", _store_in_place),),
        None,
        KILLED_STARTS,
        findings=("R300",),
        guards=(
            "log/test_log_recovery.py::"
            "test_a_crash_while_an_index_of_aborted_transactions_is_made_again_loses_no_entry",
        ),
    ),
    ClientMutant(
        "the names of dropped segments are not synced",
        "unsynced",
        (),
        ((LocalLog, "_sync_drops", nothing), (recovery, "_finish_drops", nothing)),
        findings=("R302",),
        guards=(
            "log/test_log_retention.py::test_a_power_loss_during_the_deletion_of_segments_leaves_no_gap",
        ),
    ),
    Mutant(
        "a full disk keeps all segments",
        ((LocalLog, "_drop_dead", _drop_all_or_none),),
        "trimmed",
        findings=("R303",),
        guards=(
            "log/test_log_retention.py::test_a_full_disk_gets_room_by_deleting_what_older_snapshots_cover",
        ),
    ),
    Mutant(
        "checkpoints of missing directories are kept",
        ((LogManager, "forget_missing_partitions", nothing),),
        findings=("R310",),
        guards=(
            "log/test_log_manager.py::test_a_new_partition_begins_at_0_beside_checkpoints_of_a_missing_one",
        ),
    ),
    ClientMutant(
        "a start's cut of a closed segment is not synced",
        "unsynced",
        (),
        ((Segment, "sync", _sync_once),),
        findings=("R350",),
        guards=("log/test_log_recovery.py::test_a_second_power_loss_does_not_bring_a_torn_end_back",),
    ),
    Mutant(
        "a start does not rebuild lost indexes without entries",
        ((Segment, "_make_missing_files", nothing),),
        findings=("R351",),
        guards=("log/test_log_recovery.py::test_a_clean_stop_after_a_lost_index_leaves_nothing_to_report",),
    ),
    ClientMutant(
        "a roll removes the snapshot that allowed segments to be deleted",
        "unsynced",
        (),
        ((PartitionProducers, "keep_snapshots", _keep_newest),),
        findings=("R360",),
        guards=(
            "log/test_log_retention.py::"
            "test_a_power_loss_after_a_later_snapshot_leaves_producers_of_deleted_segments_known",
        ),
    ),
]
NOT_CAUGHT: dict[str, str] = {
    "segments are deleted once a newer snapshot is on the disk": (
        "needs a retry of a batch that was synced, behind which a power loss takes the end of the log: no"
        " seed of the first 21"
    ),
    "a swap syncs the names of a log and of its indexes together": (
        "needs a power loss between two names of one swap, of a segment with aborted transactions: no seed"
        " of the first 7"
    ),
    "the names of dropped segments are not synced": (
        "needs a power loss that keeps one of two renames within one step: no seed of the first 12"
    ),
    "a full disk keeps all segments": "nothing counts the room on the disk, and a full disk has room again",
    "checkpoints of missing directories are kept": "the list of topics is never lost with a directory",
    "a start's cut of a closed segment is not synced": (
        "needs a torn end behind which a segment begins before the next flush, and two power losses: no"
        " seed of the first 48"
    ),
    "a roll removes the snapshot that allowed segments to be deleted": (
        "needs a segment without a snapshot that retention deletes before a power loss: no seed of the"
        " first 50"
    ),
}
"""Mutants that no seed catches, with the reason."""
