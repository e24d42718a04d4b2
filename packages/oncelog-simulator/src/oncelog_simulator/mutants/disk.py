"""Mutants of disk operations and of background threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from oncelog.broker.coordinators import internal_topic
from oncelog.log import local_log, partition_disk, segment
from oncelog.testing import memory_disk
from oncelog_simulator import disk_rot, faults, simulation, topic_changes
from oncelog_simulator.jobs import JobSettings
from oncelog_simulator.mutants.mutant import Mutant, Patch, nothing
from oncelog_simulator.world import BROKER_HOST


def _drop_by_path(self: Any, paths: Iterable[str]) -> Callable[[], None]:
    return partial(partition_disk._remove_dropped, self._disk, list(paths))


def _slow_jobs(_: Random) -> JobSettings:
    return JobSettings(share=1.0, pause_s=4.0, stop_chance=0.3, preempt_chance=0.1)


def _lose_power_early(rng: Random, count: int, until_ms: int, *clients: Any, **how: Any) -> Any:
    kind = "power" if how["loses_power"] else "kill"
    return [faults.Fault(at_ms, kind, BROKER_HOST, 300, 0) for at_ms in range(400, 12_000, 700)]


def _preempt_often(_: Random) -> JobSettings:
    return JobSettings(share=1.0, pause_s=0.05, stop_chance=0.3, preempt_chance=0.5)


def _fail_then_lose_power(rng: Random, until_ms: int) -> list[faults.Fault]:
    drawn: list[faults.Fault] = []
    for _ in range(8):
        at_ms = rng.randrange(until_ms)
        drawn.append(faults.Fault(at_ms, "failed-sync", BROKER_HOST, 500, 0))
        drawn.append(faults.Fault(at_ms + rng.randrange(600, 6_000), "power", BROKER_HOST, 500, 0))
    return drawn


def _sync_no_parent(self: Any, path: str = "") -> None:
    if path:
        _SYNC_DIRECTORY(self, path)


def _sync_only_parent(self: Any, path: str = "") -> None:
    if not path:
        _SYNC_DIRECTORY(self, path)


_SYNC_DIRECTORY = memory_disk.MemoryDisk.sync_directory


def _load_or_raise(self: Any, read: Any, forget: Any) -> None:
    for index, partition in enumerate(self.topic.partitions if self.topic else ()):
        read(index, iter(internal_topic._Replay(partition)))


def _load_in_part(self: Any, read: Any, forget: Any) -> None:
    for index, partition in enumerate(self.topic.partitions if self.topic else ()):
        with suppress(Exception):
            read(index, iter(internal_topic._Replay(partition)))


def _always_stopped(_: Random) -> str:
    return "stopped"


def _draw_a_batch(rng: Random, disk: Any, batches: Any, *, is_killed: bool) -> Any:
    return disk_rot._draw_internal(rng, disk, batches, is_killed=is_killed)


ROTTEN: tuple[Patch, ...] = (
    (simulation, "draw_state", _always_stopped),
    (simulation, "draw_rot", _draw_a_batch),
)
"""A coordinator's batch is damaged in every seed."""
SLOW_JOBS: tuple[Patch, ...] = ((simulation, "draw_jobs", _slow_jobs), (topic_changes, "LATE_SECONDS", 0.2))
"""In every seed background jobs are suspended for seconds, and deleted topics are soon created again."""
EARLY_LOSSES: tuple[Patch, ...] = ((simulation, "draw_faults", _lose_power_early),)
"""In every seed the broker loses its power repeatedly in its first 12 s."""
PREEMPTED: tuple[Patch, ...] = ((simulation, "draw_jobs", _preempt_often),)
FAILING: tuple[Patch, ...] = ((simulation, "draw_failed_syncs", _fail_then_lose_power),)
"""In every seed syncs fail, the broker is restarted, and a power loss follows soon."""

MUTANTS = [
    Mutant(
        "data of a failed sync is not written again",
        ((segment.Segment, "rewrite_on_sync", nothing),),
        world=FAILING,
        findings=("C15",),
    ),
    Mutant(
        "a failed sync is tried again",
        ((local_log, "SyncFailed", KeyError),),
        world=FAILING,
        guards=(
            "log/test_log_failed_sync.py::"
            "test_a_retry_after_a_failed_sync_and_a_restart_is_durable_once_acknowledged",
        ),
    ),
    Mutant(
        "new directories are not synced",
        ((memory_disk.MemoryDisk, "sync_directory", _sync_no_parent),),
        world=EARLY_LOSSES,
    ),
    Mutant(
        "names in a partition's directory are not synced",
        ((memory_disk.MemoryDisk, "sync_directory", _sync_only_parent),),
    ),
    Mutant(
        "a damaged partition of a coordinator fails the start",
        ((internal_topic.InternalTopic, "load", _load_or_raise),),
        world=ROTTEN,
        findings=("C16",),
    ),
    Mutant(
        "a damaged partition of a coordinator is read up to the damage",
        ((internal_topic.InternalTopic, "load", _load_in_part),),
        world=ROTTEN,
    ),
    Mutant(
        "deferred work identifies files by path",
        (
            (partition_disk.PartitionDisk, "_check", nothing),
            (partition_disk.PartitionDisk, "drop", _drop_by_path),
        ),
        "changed",
        world=SLOW_JOBS,
        findings=("C4",),
        guards=(
            "log/test_log_deferred.py::test_a_topic_is_created_again_between_any_two_calls_of_deferred_work",
            "broker/test_broker_deferred.py::test_acknowledged_records_of_a_topic_created_again_survive_deletions_of_the_old_one",
        ),
    ),
]
NOT_CAUGHT = {
    "a failed sync is tried again": (
        "seed 5 noticed it before the product changed: no seed of the first 64 since"
    ),
    "deferred work identifies files by path": (
        "needs a topic that is created again while work on the deleted one waits: no seed of the first 3"
    ),
}
"""Mutants that no seed catches, with the reason."""
