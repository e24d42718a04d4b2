"""Mutants of recovery, compaction and deletion that forget producers or lose synced records."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from oncelog.config import INT64_MAX
from oncelog.log import cleaner, manager, recovery
from oncelog.log.local_log import LocalLog
from oncelog.log.manager import LogManager
from oncelog.log.producers import PartitionProducers
from oncelog.log.segment_swap import make_swap
from oncelog.types import Compression
from oncelog_simulator import log_crashes, old_retries
from oncelog_simulator.mutants.mutant import ClientMutant, Patch, nothing


def _end_offset(self: Any) -> int:
    end_offset: int = self.end_offset
    return end_offset


def _adopt_without_older(self: Any, snapshot: Any, expired_before_ms: int) -> None:
    """Load the newest snapshot only if no older one was loaded."""
    if self.snapshot_offset is None:
        self.load(snapshot, expired_before_ms)


def _covered_if_unsynced(self: Any) -> int | None:
    """Treat unsynced segments as covered by any snapshot, whatever the synced ones before them need."""
    is_unsynced = self.segments.first.base_offset >= self.recovery_point
    offset: int | None = self.producers.snapshot_offset
    return offset if is_unsynced else self.producers.snapshot_up_to(self.recovery_point)


def _covered_at_own_end(self: Any, covered_to: int = INT64_MAX) -> list[Any]:
    closed = list(self.segments)[:-1]
    return [segment for segment in closed if segment.end_offset <= min(self.start_offset, covered_to)]


def _covered_by_unsynced_names(self: Any) -> int | None:
    offset: int | None = self.producers.snapshot_up_to(self.recovery_point)
    return offset


def _confirm_nothing(self: Any) -> Any:
    yield None


def _recovery_point(options: Any) -> int:
    point: int = options.recovery_point
    return point


def _snapshot_or_forget(self: Any, offset: int) -> None:
    try:
        _SNAPSHOT_NOW(self, offset)
    except OSError:
        self.snapshots.keep(lambda other: False)


def _begin_without_snapshot(disk: Any, directory: str, recovered: Any, options: Any) -> None:
    with patch.object(PartitionProducers, "snapshot_now", _snapshot_or_forget):
        _BEGIN_AT_LOG_START(disk, directory, recovered, options)
    while len(recovered.segments) > 1:
        recovered.segments.drop_first().remove()


def _forget_interruption(disk: Any) -> Any:
    return _READ_LAST_STOP(disk)._replace(is_interrupted=False)


def _clean_unguarded(self: Any, group: Any, rules: Any, end_offset: int) -> Any:
    """Let segments be deleted while their successor is synced."""
    task, failure = _CLEAN(self, group, rules, end_offset), None
    while True:
        try:
            call: Any = next(task) if failure is None else task.throw(failure)
        except StopIteration as done:
            return done.value
        if getattr(call, "func", None) is make_swap:
            self._log.is_swapping = False
        failure = None
        try:
            yield call
        except OSError as error:
            failure = error


def _follow(compaction: Any, task: Any, blind_count: int, group: Any = None) -> Any:
    """Run a part of a compaction. After a blocking call, it takes the segments for its own `blind_count`
    times without looking, except all of `group` together.
    """
    log, failure = compaction._log, None
    log.blind_count, log.seen_group = 0, group
    while True:
        try:
            call = next(task) if failure is None else task.throw(failure)
        except StopIteration as done:
            log.blind_count = 0
            return done.value
        failure = None
        try:
            yield call
        except OSError as error:
            failure = error
        log.blind_count, log.seen_group = 0 if call is None else blind_count, group


def _owns_or_is_blind(self: Any, segments: Any) -> bool:
    if getattr(self, "blind_count", 0) and segments is not self.seen_group:
        self.blind_count -= 1
        return not self.is_closed and self.failure is None
    return _OWNS_SEGMENTS(self, segments)


def _learn_keys_blindly(self: Any, latest: Any) -> Any:
    return _follow(self, _LEARN_KEYS(self, latest), 1)


def _clean_same_blindly(self: Any, group: Any, cleaner: Any, end_offset: int) -> Any:
    """Do not look after the calls for a batch."""
    return _follow(self, _CLEAN(self, group, cleaner, end_offset), 1, group)


def _clean_next_blindly(self: Any, group: Any, cleaner: Any, end_offset: int) -> Any:
    """Look neither after the calls for a batch nor before the next segment."""
    return _follow(self, _CLEAN(self, group, cleaner, end_offset), 2, group)


_READ_LAST_STOP = manager._read_last_stop
_CLEAN = cleaner.Compaction._clean
_LEARN_KEYS = cleaner.Compaction._learn_keys
_OWNS_SEGMENTS = LocalLog.owns_segments
_SNAPSHOT_NOW = PartitionProducers.snapshot_now
COMPACTED: tuple[Patch, ...] = ((old_retries, "FOCUSES", (old_retries.COMPACTED,)),)
"""In every seed, the topic is compacted long after its segments were closed."""
DELETED: tuple[Patch, ...] = ((old_retries, "FOCUSES", (old_retries.DELETED,)),)
"""In every seed, records are deleted before they are synced."""
TRIMMED: tuple[Patch, ...] = ((log_crashes, "TRIMMED_SHARE", 1.0),)
"""In every seed, records are deleted during compactions."""
READ: tuple[Patch, ...] = (
    (log_crashes, "READ_SHARE", 1.0),
    (log_crashes, "CODECS", (Compression.ZSTD,)),
)
"""In every seed, clients read the log, and compaction decompresses each batch in a blocking call."""
UNREAD: tuple[Patch, ...] = ((log_crashes, "READ_SHARE", 0.0),)
"""No seed has clients that read the log, so that more operations change it."""
_BEGIN_AT_LOG_START = recovery._begin_at_log_start
MUTANTS = [
    ClientMutant(
        "compaction does not wait for a snapshot of its segments",
        "retries",
        (),
        ((LocalLog, "compactable_to", property(_end_offset)), *COMPACTED),
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
        "log",
        (),
        ((LocalLog, "covered_to", property(_covered_if_unsynced)),),
        findings=("R1429",),
        guards=(
            "log/test_log_retention.py::"
            "test_deleting_unsynced_segments_leaves_the_producers_of_synced_ones_known",
        ),
    ),
    ClientMutant(
        "a gap below the log start counts as a loss",
        "retries",
        (),
        ((recovery, "_sure_to", _recovery_point), *DELETED),
        guards=("log/test_log_recovery.py::test_a_kill_after_a_log_began_at_its_log_start_takes_no_record",),
    ),
    ClientMutant(
        "a start removes segments below the log start without a snapshot",
        "log",
        (),
        ((recovery, "_begin_at_log_start", _begin_without_snapshot), *UNREAD),
        findings=("R1480",),
        guards=("log/test_log_recovery.py::test_a_full_disk_forgets_no_producer_of_removed_segments",),
    ),
    ClientMutant(
        "a start after an interrupted one trusts unsynced names",
        "log",
        (),
        ((manager, "_read_last_stop", _forget_interruption),),
        findings=("R1510",),
        guards=(
            "log/test_log_manager.py::"
            "test_a_power_loss_brings_no_file_back_that_an_interrupted_start_removed",
        ),
    ),
    ClientMutant(
        "a snapshot in the gap after a segment covers the segment",
        "log",
        (),
        ((LocalLog, "_dead_segments", _covered_at_own_end),),
        findings=("R1540",),
        guards=("log/test_log_retention.py::test_segments_before_a_gap_wait_for_a_snapshot_behind_it",),
    ),
    ClientMutant(
        "deletions rely on snapshots whose names a killed process has not synced",
        "log",
        (),
        (
            (LocalLog, "covered_to", property(_covered_by_unsynced_names)),
            (LocalLog, "_confirm_names", _confirm_nothing),
        ),
        findings=("R1541",),
        guards=(
            "log/test_log_retention.py::test_a_power_loss_takes_no_snapshot_name_that_a_deletion_relies_on",
        ),
    ),
    ClientMutant(
        "a gap in a compacted log stays above the recovery point",
        "log",
        (),
        ((LogManager, "_pass_gap", nothing),),
        findings=("R1481",),
        guards=(
            "log/test_log_manager.py::test_a_gap_in_a_compacted_log_is_no_loss_after_a_change_of_its_policy",
        ),
    ),
    ClientMutant(
        "segments are deleted while their successor is synced",
        "log",
        (),
        ((cleaner.Compaction, "_clean", _clean_unguarded), *TRIMMED),
        findings=("R1720",),
        guards=(
            "log/test_log_compaction.py::"
            "test_a_kill_after_records_were_deleted_during_a_swap_loses_no_others",
        ),
    ),
    ClientMutant(
        "a compaction copies a segment that was deleted during a call",
        "log",
        (),
        (
            (cleaner.Compaction, "_clean", _clean_next_blindly),
            (LocalLog, "owns_segments", _owns_or_is_blind),
            *TRIMMED,
            *READ,
        ),
        findings=("R1744",),
        guards=(
            "log/test_log_compaction.py::"
            "test_a_deletion_during_a_call_of_compaction_ends_it_without_an_error",
        ),
    ),
    ClientMutant(
        "a compaction reads on in a segment that was deleted during a call",
        "log",
        (),
        (
            (cleaner.Compaction, "_learn_keys", _learn_keys_blindly),
            (cleaner.Compaction, "_clean", _clean_same_blindly),
            (LocalLog, "owns_segments", _owns_or_is_blind),
            *TRIMMED,
            *READ,
        ),
        findings=("R1775",),
        guards=(
            "log/test_log_compaction.py::test_a_deletion_behind_a_reader_ends_a_compaction_without_an_error",
        ),
    ),
]
NOT_CAUGHT: dict[str, str] = {
    "deletions rely on snapshots whose names a killed process has not synced": (
        "needs a kill between a rename and its sync, a recovery point on disk above that snapshot, and a"
        " power loss during the next deletion: no seed of the first 160"
    ),
    "a start after an interrupted one trusts unsynced names": (
        "needs a start that is killed between a removal and its sync, and a power loss before the next sync"
        " of the directory, which keeps newer batches: no seed of the first 160"
    ),
}
"""Mutants that no seed catches, with the reason."""
