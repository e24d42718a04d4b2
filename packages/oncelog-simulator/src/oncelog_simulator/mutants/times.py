"""Mutants of deletion and compaction by time, which the workload `timed` catches."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from oncelog.log import cleaner, validation
from oncelog.log.partition import Partition
from oncelog.log.segment import Segment
from oncelog.rules.storage import compaction
from oncelog_simulator import simulation, topic_times
from oncelog_simulator.faults import Fault
from oncelog_simulator.jobs import UNDIVIDED, JobSettings
from oncelog_simulator.mutants.mutant import Mutant, Patch, nothing, true


def _by_largest_timestamp(closed: Any, **how: Any) -> Any:
    return _FIND_DIRTY([span._replace(first_timestamp_ms=None) for span in closed], **how)


def _without_min_lag(closed: Any, **how: Any) -> Any:
    return _FIND_DIRTY(closed, **{**how, "min_lag_ms": 0})


def _by_ratio(self: Any, min_dirty_ratio: float, max_lag_ms: int, now_ms: int) -> bool:
    return bool(_IS_DUE(self, min_dirty_ratio, 1 << 62, now_ms))


def _retained_of_less(self: Any, now_ms: int) -> int:
    """Return the log start for a third of retention.ms, so that records are deleted too early."""
    config = self.log.config
    if config.retention_ms is not None:
        self.log.config = replace(config, retention_ms=config.retention_ms // 3)
    try:
        return int(_RETAINED_FROM(self, now_ms))
    finally:
        self.log.config = config


def _less_bytes(self: Any, now_ms: int) -> int:
    """Return the log start for a quarter of retention.bytes, so that too many records are deleted."""
    config = self.log.config
    if config.retention_bytes is not None:
        self.log.config = replace(config, retention_bytes=config.retention_bytes // 4)
    try:
        return int(_RETAINED_FROM(self, now_ms))
    finally:
        self.log.config = config


def _retained_always(self: Any, now_ms: int) -> int:
    return int(self.log_start_offset)


def _no_faults(*_: Any, **__: Any) -> list[Fault]:
    return []


def _whole_jobs(_: Random) -> JobSettings:
    return UNDIVIDED


COMPACTED: tuple[Patch, ...] = (
    (simulation, "draw_jobs", _whole_jobs),
    (simulation, "draw_faults", _no_faults),
    (simulation, "draw_failed_syncs", _no_faults),
    (topic_times, "POLICIES", ("compact",)),
    (topic_times, "MAX_LAGS_MS", (40 * topic_times.SECOND_MS,)),
)
"""In every seed the topic is compacted continuously and there are no faults."""
FAR: tuple[Patch, ...] = (
    (topic_times, "FAR_CHANCE", 1.0),
    (topic_times, "FAR_ENDS", (topic_times.MAX_RELATIVE_OFFSET,)),
)
"""Offsets begin slightly below 2^31 in every seed, mostly in a segment that begins at 0."""
_FIND_DIRTY, _IS_DUE = compaction.find_dirty, compaction.DirtyRange.is_due
_RETAINED_FROM = Partition._retained_from
MUTANTS = [
    Mutant(
        "max.compaction.lag.ms counts from the largest timestamp",
        ((cleaner, "find_dirty", _by_largest_timestamp),),
        "timed",
        COMPACTED,
        findings=("R340",),
        guards=("log/test_log_compaction.py::test_the_compaction_lag_counts_from_the_oldest_first_batch",),
    ),
    Mutant(
        "max.compaction.lag.ms has no effect",
        ((compaction.DirtyRange, "is_due", _by_ratio),),
        "timed",
        COMPACTED,
    ),
    Mutant("min.compaction.lag.ms has no effect", ((cleaner, "find_dirty", _without_min_lag),), "timed"),
    Mutant("timestamps have no bounds", ((validation, "_check_times", nothing),), "timed"),
    Mutant(
        "retention uses a third of retention.ms", ((Partition, "_retained_from", _retained_of_less),), "timed"
    ),
    Mutant(
        "retention uses a quarter of retention.bytes", ((Partition, "_retained_from", _less_bytes),), "timed"
    ),
    Mutant(
        "a segment spans more than 2^31 offsets",
        ((Segment, "fits", true),),
        "timed",
        FAR,
        guards=("log/test_log_retention.py::test_a_segment_ends_when_offsets_no_longer_fit",),
    ),
    Mutant("retention deletes nothing", ((Partition, "_retained_from", _retained_always),), "timed"),
]
NOT_CAUGHT: dict[str, str] = {
    "max.compaction.lag.ms counts from the largest timestamp": (
        "needs a segment that only the lag makes due, with a timestamp of the future behind its first"
        " batch: no seed of the first 40"
    ),
}
"""Mutants that no seed catches, with the reason."""
