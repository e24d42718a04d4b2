"""The simulated disk and its background jobs: the data that a power loss leaves, and the events that run
between two disk operations.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from random import Random

import pytest
from oncelog_simulator.jobs import JobSettings
from oncelog_simulator.world import Host, World

from oncelog.log.disk import SyncFailed
from oncelog.testing.memory_disk import MemoryDisk

SEEDS = range(200)
SPLIT = JobSettings(share=1.0, pause_s=0.01, stop_chance=1.0, preempt_chance=0.0)


def outcomes(disk: MemoryDisk, look: Callable[[MemoryDisk], object]) -> set[object]:
    """Return the different results of `look` on the disk after a power loss, tried with each seed."""
    return {look(disk.after_power_loss(Random(seed))) for seed in SEEDS}


def with_file(path: str, synced: bytes, written: bytes) -> MemoryDisk:
    """Return a disk with a file that has synced bytes, followed by bytes that are not synced."""
    disk = MemoryDisk()
    file = disk.open(path, create=True)
    file.pwrite(synced, 0)
    file.sync()
    disk.sync_directory()
    file.pwrite(written, len(synced))
    return disk


def test_names_of_a_directory_are_durable_one_by_one() -> None:
    disk = MemoryDisk()
    for name in ("kept", "old", "from"):
        disk.open(name, create=True)
    disk.sync_directory()
    disk.remove("old")
    disk.rename("from", "to")
    disk.open("new", create=True)
    names = outcomes(disk, lambda left: tuple(left.list()))
    assert ("from", "kept", "new", "old") in names, "the last change alone"
    assert ("kept", "to") in names, "all but the last"
    assert all("kept" in each and (("from" in each) != ("to" in each)) for each in names)  # type: ignore[operator, attr-defined]


def test_files_keep_the_times_of_their_writes_over_a_power_loss() -> None:
    """Regression (seed 40035): a power loss changed the time of a file, so retention deleted a record that
    was too young for that.
    """
    disk = MemoryDisk()
    disk.now_ms = lambda: 1_000
    disk.open("log", create=True).sync()
    disk.sync_directory()
    disk.now_ms = lambda: 5_000
    assert outcomes(disk, lambda left: left.modified_ms("log")) == {1_000}


def test_a_new_directory_is_gone_with_its_synced_files_until_its_parent_is_synced() -> None:
    disk = MemoryDisk()
    disk.mkdir("topic-0")
    disk.open("topic-0/log", create=True).sync()
    disk.sync_directory("topic-0")
    assert outcomes(disk, lambda left: left.exists("topic-0/log")) == {True, False}
    disk.sync_directory()
    assert outcomes(disk, lambda left: left.exists("topic-0/log")) == {True}


def test_a_renamed_directory_has_either_name_and_its_files() -> None:
    disk = MemoryDisk()
    disk.mkdir("topic-0")
    disk.sync_directory()
    disk.open("topic-0/log", create=True)
    disk.sync_directory("topic-0")
    disk.rename("topic-0", "gone")
    look = outcomes(disk, lambda left: (left.exists("topic-0/log"), left.exists("gone/log")))
    assert look == {(True, False), (False, True)}


def test_a_files_length_may_be_durable_without_its_bytes() -> None:
    disk = with_file("log", b"sure", b"x" * 100)
    left = outcomes(disk, lambda each: each.read("log"))
    assert all(each.startswith(b"sure") for each in left)  # type: ignore[attr-defined]
    assert b"sure" + bytes(100) in left or any(each.endswith(bytes(16)) for each in left)  # type: ignore[attr-defined]
    holes = [each for each in left if b"x\0" in each and each.endswith(b"x")]  # type: ignore[attr-defined, operator]
    assert holes, "a later block without an earlier one"


def test_an_index_is_often_cut_between_two_entries() -> None:
    disk = with_file("0.timeindex", b"", b"123456789012" * 10)
    sizes = [len(disk.after_power_loss(Random(seed)).read("0.timeindex")) for seed in SEEDS]
    assert sum(size % 12 == 0 and 0 < size < 120 for size in sizes) > 10


def test_a_failed_sync_leaves_pages_that_the_next_sync_does_not_write() -> None:
    disk = with_file("log", b"sure", b"lost")
    disk.errors = {("sync", ""): errno.EIO}
    with pytest.raises(SyncFailed):
        disk.open("log").sync()
    disk.errors.clear()
    disk.open("log").sync()
    assert disk.read("log") == b"surelost", "readable"
    assert outcomes(disk, lambda each: each.read("log")) == {b"sure" + bytes(4)}


def test_a_replaced_file_is_the_old_or_the_new_one() -> None:
    disk = MemoryDisk()
    disk.replace("state", b"old")
    disk.errors = {("sync", "state"): errno.EIO}
    with pytest.raises(OSError, match="Input/output"):
        disk.replace("state", b"new")
    assert (disk.read("state"), disk.list()) == (b"old", ["state"])
    disk.errors.clear()
    disk.replace("state", b"newer", sync=False)
    left = outcomes(disk, lambda each: each.read("state"))
    assert b"old" in left and b"newer" in left and b"" in left, "not synced: neither, too"


def split_world(disk: MemoryDisk, work: Callable[[], object], beside: Callable[[], object]) -> World:
    """Start a process that runs `work` in its executor, divided into steps between which events run. `beside`
    is such an event.
    """
    world = World(1)
    world.loop.jobs.settings = SPLIT
    disk.on_turn = world.loop.jobs.on_disk

    async def main() -> None:
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(None, work)
        while not disk.exists("begun"):
            await asyncio.sleep(0.0001)
        beside()
        await working

    done = Host(world, "host").run(main)
    assert world.loop.run_until(done, 1 << 60) and done.exception() is None
    world.loop.close()
    return world


def test_the_loop_runs_between_two_operations_of_a_job() -> None:
    disk = MemoryDisk()
    disk.mkdir("topic-0")

    def work() -> None:
        disk.open("begun", create=True)
        disk.open("topic-0/late", create=True)

    def beside() -> None:
        disk.rename("topic-0", "gone")
        disk.mkdir("topic-0")

    split_world(disk, work, beside)
    assert (disk.list("topic-0"), disk.list("gone")) == (["late"], [])


def test_a_job_is_not_put_off_while_it_holds_a_mutex() -> None:
    disk = MemoryDisk()
    mutex = disk.mutex()

    def work() -> None:
        with mutex:
            disk.open("begun", create=True)
            disk.open("within", create=True)
        disk.open("behind", create=True)

    seen: list[list[str]] = []
    split_world(disk, work, lambda: seen.append(disk.list()))
    assert seen == [["begun", "within"]]


def test_a_handle_is_not_released_while_another_thread_syncs() -> None:
    disk = MemoryDisk()
    file = disk.open("log", create=True)
    file.pwrite(b"sure", 0)

    def work() -> None:
        disk.open("begun", create=True)
        file.sync()

    def beside() -> None:
        file.release_handle()
        disk.rename("log", "log.deleted")

    split_world(disk, work, beside)
    disk.sync_directory()
    assert outcomes(disk, lambda left: left.read("log.deleted")) == {b"sure"}
    with pytest.raises(FileNotFoundError):
        disk.open("log")


def test_a_handle_that_is_released_while_another_thread_reads_is_an_error() -> None:
    """On a real disk, the thread might read any other file that was opened meanwhile."""
    disk = MemoryDisk()
    file = disk.open("log", create=True)
    failures: list[OSError] = []

    def work() -> None:
        disk.open("begun", create=True)
        try:
            file.pread(1, 0)
        except OSError as error:
            failures.append(error)

    split_world(disk, work, file.release_handle)
    assert [failure.errno for failure in failures] == [errno.EBADF]
    assert file.pread(1, 0) == b""


def test_a_job_of_a_killed_process_ends_without_another_operation() -> None:
    world, disk = World(1), MemoryDisk()
    world.loop.jobs.settings = SPLIT
    disk.on_turn = world.loop.jobs.on_disk

    def work() -> None:
        for number in range(10):
            disk.open(f"{number}", create=True)

    async def main() -> None:
        await asyncio.get_running_loop().run_in_executor(None, work)

    host = Host(world, "host")
    done = host.run(main)
    limit_us = 0
    while not disk.list():
        limit_us += 1_000
        world.loop.run_until(done, limit_us)
    host.kill()
    world.loop.run_until(done, 1_000_000)
    world.loop.close()
    assert 0 < len(disk.list()) < 10
