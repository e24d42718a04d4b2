"""Mutants of recovery, compaction and deletion that forget producers or lose synced records."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from oncelog.log import recovery
from oncelog.log.local_log import LocalLog
from oncelog.log.manager import LogManager
from oncelog.log.producers import PartitionProducers
from oncelog_simulator import old_retries
from oncelog_simulator.mutants.mutant import ClientMutant, Patch, nothing


def _end_offset(self: Any) -> int:
    end_offset: int = self.end_offset
    return end_offset


def _adopt_without_older(self: Any, snapshot: Any, expired_before_ms: int) -> None:
    """Load the newest snapshot only if no older one was loaded."""
    if self.snapshot_offset is None:
        self.load(snapshot, expired_before_ms)


def _is_safe_if_unsynced(self: Any, dead: Any) -> bool:
    """Treat the deletion of unsynced segments as safe, whatever snapshot the synced ones before them need."""
    offset = self.producers.snapshot_from(dead[-1].end_offset)
    return offset is not None and (
        offset <= self.recovery_point or dead[0].base_offset >= self.recovery_point
    )


class _WithoutDirectorySync:
    """A disk whose directories are not synced until `is_synced` is set."""

    def __init__(self, disk: Any) -> None:
        self._disk, self.is_synced = disk, False

    def __getattr__(self, name: str) -> Any:
        is_left_out = name == "sync_directory" and not self.is_synced
        return nothing if is_left_out else getattr(self._disk, name)


def _begin_unsynced(disk: Any, directory: str, recovered: Any, how: Any) -> Any:
    unsynced = _WithoutDirectorySync(disk)
    segments = _BEGIN_AT_LOG_START(unsynced, directory, recovered, how)
    unsynced.is_synced = True
    return segments


def _snapshot_or_forget(self: Any, offset: int) -> None:
    try:
        _SNAPSHOT_NOW(self, offset)
    except OSError:
        self.snapshots.keep([])


def _begin_without_snapshot(*how: Any) -> Any:
    with patch.object(PartitionProducers, "snapshot_now", _snapshot_or_forget):
        return _BEGIN_AT_LOG_START(*how)


_SNAPSHOT_NOW = PartitionProducers.snapshot_now
COMPACTED: tuple[Patch, ...] = ((old_retries, "FOCUSES", (old_retries.COMPACTED,)),)
"""In every seed, the topic is compacted long after its segments were closed."""
DELETED: tuple[Patch, ...] = ((old_retries, "FOCUSES", (old_retries.DELETED,)),)
"""In every seed, records are deleted before they are synced."""
_BEGIN_AT_LOG_START = recovery._begin_at_log_start
MUTANTS = [
    ClientMutant(
        "compaction does not wait for a snapshot of its segments",
        "retries",
        (),
        ((LocalLog, "producers_known_to", property(_end_offset)), *COMPACTED),
        findings=("R1425",),
        guards=("log/test_log_compaction.py::test_compaction_waits_for_the_snapshot_of_its_segments",),
    ),
    ClientMutant(
        "a replay from an older snapshot ignores the newest one",
        "retries",
        (),
        ((PartitionProducers, "adopt", _adopt_without_older), *COMPACTED),
        findings=("R1426",),
        guards=(
            "log/test_log_compaction.py::test_a_replay_from_an_older_snapshot_knows_what_compaction_removed",
        ),
    ),
    ClientMutant(
        "deleting unsynced segments takes the snapshot of synced ones",
        "retries",
        (),
        ((LocalLog, "_is_safe_without", _is_safe_if_unsynced), *DELETED),
        findings=("R1429",),
        guards=(
            "log/test_log_retention.py::"
            "test_deleting_unsynced_segments_leaves_the_producers_of_synced_ones_known",
        ),
    ),
    ClientMutant(
        "a start does not sync the removal of segments below the log start",
        "retries",
        (),
        ((recovery, "_begin_at_log_start", _begin_unsynced), *DELETED),
        findings=("R1429",),
        guards=(
            "log/test_log_recovery.py::test_a_second_power_loss_brings_no_segment_below_the_log_start_back",
        ),
    ),
    ClientMutant(
        "a start removes segments below the log start without a snapshot",
        "retries",
        (),
        ((recovery, "_begin_at_log_start", _begin_without_snapshot), *DELETED),
        findings=("R1480",),
        guards=("log/test_log_recovery.py::test_a_full_disk_forgets_no_producer_of_removed_segments",),
    ),
    ClientMutant(
        "a gap in a compacted log stays above the recovery point",
        "retries",
        (),
        ((LogManager, "_pass_gap", nothing),),
        findings=("R1481",),
        guards=(
            "log/test_log_manager.py::test_a_gap_in_a_compacted_log_is_no_loss_after_a_change_of_its_policy",
        ),
    ),
]
NOT_CAUGHT: dict[str, str] = {}
"""Mutants that no seed catches, with the reason."""
