"""Interrupted clients: the scheduler and signals interrupt blocking clients, and cancellations interrupt
asyncio clients.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from oncelog_simulator.asyncio_clients import run_asyncio_clients
from oncelog_simulator.backup import run_restored_backup
from oncelog_simulator.blocking_clients import run_blocking_clients
from oncelog_simulator.cli import command
from oncelog_simulator.client_simulation import ClientResult, has_faults
from oncelog_simulator.default_flush import run_default_flush
from oncelog_simulator.event_loop import Livelock
from oncelog_simulator.expected_errors import ExpectedErrors
from oncelog_simulator.log_crashes import run_log_crashes
from oncelog_simulator.mutants.interrupted_clients import CLIENT_MUTANTS, NOT_CAUGHT
from oncelog_simulator.mutants.mutant import search
from oncelog_simulator.mutants.old_retries import MUTANTS as FORGETFUL
from oncelog_simulator.mutants.old_retries import NOT_CAUGHT as FORGOTTEN_UNSEEN
from oncelog_simulator.old_retries import run_old_retries
from oncelog_simulator.process_loops import RecordedIO, run_process_loops
from oncelog_simulator.scheduler import Scheduler
from oncelog_simulator.shrink import shrink_run
from oncelog_simulator.world import World

from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.errors import MisuseError, RebalanceInProgress, TimedOut, TopicAuthorizationFailed

RunSeed = Callable[[int], ClientResult]


CHUNK = 25
MUTANTS_PAGE = Path(__file__).parents[2] / "docs" / "internals" / "mutants.md"
NOTED = {
    name: [int(seed)]
    for name, seed in re.findall(r"^\| ([^|]+) \| [^|]* \| (\d+) \| ", MUTANTS_PAGE.read_text(), re.M)
}
"""For each mutant, the seed that caught it last.

A search runs this seed first, because searches take most of the time.
"""


THREADED = (4, 16, 17, 21, 22)
CANCELLED = (4, 12, 14, 21, 32, 33, 38, 43, 45, 46)
LOOPS = (0, 1, 2, 3)
RESTORED = (3, 6, 7, 8, 10)
UNSYNCED = (3, 6, 9)
RETRIES = (1, 2)
LOGS = (0, 1, 2, 3)
"""THREADED to LOGS: the seeds of the quick tier, one tuple for each simulation.

Together their timelines have as many kinds of events as those of the first 10 to 25 seeds.
"""


def in_tiers(quick: Collection[int], count: int) -> list[Any]:
    """Return the seeds below `count` as parameters: the quick seeds in one, and the others in chunks for the
    full tier.
    """
    left = [seed for seed in range(count) if seed not in quick]
    others = [left[first : first + CHUNK] for first in range(0, len(left), CHUNK)]
    full = pytest.mark.full("more seeds")
    return [
        pytest.param(quick, id="quick"),
        *(pytest.param(seeds, id=f"{seeds[0]}-{seeds[-1]}", marks=full) for seeds in others),
    ]


@cache
def played(run_seed: RunSeed, seed: int) -> ClientResult:
    """Run a seed, only once for all tests that use it, and return the result."""
    return run_seed(seed)


OPTIONS: dict[RunSeed, str] = {
    run_blocking_clients: "blocking",
    run_asyncio_clients: "asyncio",
    run_process_loops: "loops",
    run_restored_backup: "backup",
    run_default_flush: "unsynced",
    run_old_retries: "retries",
    run_log_crashes: "log",
}
"""For each simulation, the value of the option `--clients` that runs it."""


def violations_of(run_seed: RunSeed, seeds: Iterable[int]) -> dict[str, list[str]]:
    """Return the violations of the seeds that fail, each under the command that runs the seed again."""
    return {
        f"oncelog simulate --clients {OPTIONS[run_seed]} --seed {seed}": run.violations
        for seed in seeds
        if (run := played(run_seed, seed)).violations
    }


def play_race(seed: int) -> tuple[int, list[int]]:
    """Let two threads add to a number without a lock. Return the number, and the order of their steps."""
    world = World(seed)
    scheduler = Scheduler(world.loop, world.rng("scheduler"), 0.0)
    total, order = 0, list[int]()

    def add(number: int) -> None:
        nonlocal total
        for _ in range(3):
            before = total
            scheduler.give_way()
            total = before + 1
            order.append(number)

    with scheduler.patched():
        for number in range(2):
            threading.Thread(target=add, args=(number,)).start()
        world.loop.run_until(world.loop.create_future(), 1_000_000)
    return total, order


def test_threads_race_as_the_seed_says() -> None:
    results = [play_race(seed) for seed in range(12)]
    assert results == [play_race(seed) for seed in range(12)]
    assert {total for total, _ in results} > {6} and len({tuple(order) for _, order in results}) > 5


def test_conditions_and_timeouts_of_threads_are_in_virtual_time() -> None:
    world = World(1)
    scheduler = Scheduler(world.loop, world.rng("scheduler"), 0.0)
    seen: list[object] = []

    def wait(event: threading.Event) -> None:
        seen.append((event.wait(5.0), world.now_us // 1_000_000))
        seen.append((event.wait(50.0), world.now_us // 1_000_000))

    with scheduler.patched():
        event = threading.Event()
        threading.Thread(target=wait, args=(event,)).start()
        world.call_later(20.0, lambda: threading.Thread(target=event.set).start())
        world.loop.run_until(world.loop.create_future(), 100_000_000)
    assert seen == [(False, 5), (True, 20)]


def test_threads_without_rest_are_noticed_and_ended() -> None:
    world = World(1)
    scheduler = Scheduler(world.loop, world.rng("scheduler"), 0.0)
    before = threading.active_count()

    def turn() -> None:
        while True:
            scheduler.switch()

    with scheduler.patched():
        for _ in range(2):
            threading.Thread(target=turn).start()
        with pytest.raises(Livelock):
            world.loop.run_until(world.loop.create_future(), 1_000_000)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("run_seed", "seeds"),
    [
        (run_blocking_clients, THREADED[:2]),
        (run_asyncio_clients, CANCELLED[:3]),
        (run_process_loops, LOOPS[:1]),
        (run_restored_backup, RESTORED[:2]),
        (run_default_flush, UNSYNCED[:1]),
        (run_old_retries, RETRIES),
        (run_log_crashes, LOGS),
    ],
)
def test_a_seed_gives_the_same_run_again(run_seed: RunSeed, seeds: Collection[int]) -> None:
    for seed in seeds:
        one, other = played(run_seed, seed), run_seed(seed)
        assert (one.digest, one.timeline) == (other.digest, other.timeline)


def test_a_seed_of_threads_gives_the_same_bytes_in_every_process() -> None:
    """R975: `concurrent.futures.wait` locked futures in the order of their memory addresses, which differ
    between processes.
    """
    arguments = ["-m", "oncelog.cli.main", "simulate", "--clients", "blocking", "--seeds", "7..7", "--digest"]
    outputs = {
        subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
        for _ in range(4)
    }
    assert len(outputs) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", in_tiers(THREADED, 60))
def test_blocking_clients_in_threads_lose_and_hang_nothing(seeds: Collection[int]) -> None:
    """Threads are suspended at any line, and signals interrupt the application (L1 to L7, L11, L23).

    In half of the seeds the broker and the network fail too.
    """
    assert violations_of(run_blocking_clients, seeds) == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", in_tiers(CANCELLED, 250))
def test_cancelled_calls_lose_and_hang_nothing(seeds: Collection[int]) -> None:
    """Calls are cancelled at any await (behaviours L4, L5, L7, L11, L13 and L14). Seed 201 found R265.

    In half of the seeds, the broker and the network fail, too.
    """
    assert violations_of(run_asyncio_clients, seeds) == {}


@pytest.mark.behaviour("T16")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", in_tiers(LOOPS, 100))
def test_processing_loops_copy_every_record_once(seeds: Collection[int]) -> None:
    """Loops are stopped, cancelled and killed, and transforms raise.

    In half of the seeds, the broker and the network fail, too.
    """
    assert violations_of(run_process_loops, seeds) == {}


async def _stay(self: RecordedIO, firsts: object) -> None:
    """Replaces `go_back`. It does not seek, like an application that forgets to go back."""


def test_a_loop_that_does_not_go_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedIO, "go_back", _stay)
    assert any(run_process_loops(seed).violations for seed in range(20))


@pytest.mark.parametrize(
    ("run_seed", "seeds"), [(run_blocking_clients, THREADED), (run_asyncio_clients, CANCELLED)]
)
def test_seeds_have_faults_or_not_and_calls_that_fail_by_them(
    run_seed: RunSeed, seeds: Collection[int]
) -> None:
    runs = [played(run_seed, seed) for seed in seeds]
    disturbed = [run for run in runs if run.faults]
    assert [bool(run.faults) for run in runs] == [has_faults(seed) for seed in seeds]
    assert len({fault.kind for run in disturbed for fault in run.faults}) > 6
    assert any("TimedOut" in event.text for run in disturbed for event in run.timeline)
    calm = [run for run in runs if not run.faults]
    assert calm and not any("no more faults" in event.text for run in calm for event in run.timeline)


def test_half_of_the_seeds_have_faults() -> None:
    assert 400 < sum(has_faults(seed) for seed in range(1_000)) < 600


def test_an_error_that_no_fault_explains_is_a_violation() -> None:
    expected = ExpectedErrors([(0, 1_000_000)])
    assert expected.explains(TimedOut("late"), 1_000_000)
    assert expected.explains(RebalanceInProgress("again"), 1_000_000)
    assert not expected.explains(TimedOut("late"), 200_000_000)
    assert not expected.explains(MisuseError("closed"), 1_000_000)
    assert not expected.explains(TopicAuthorizationFailed("no"), 1_000_000)
    assert not ExpectedErrors().explains(TimedOut("late"), 0)


def test_a_failing_run_keeps_only_the_faults_that_it_needs() -> None:
    """If one fault is left out of a run, all other random decisions must stay the same."""
    seed = next(seed for seed in CANCELLED if len(played(run_asyncio_clients, seed).faults) > 2)
    everything, without = played(run_asyncio_clients, seed), run_asyncio_clients(seed, [0])
    assert without.faults == everything.faults[:1]
    failed = dataclasses.replace(everything, violations=["a rule: broken"])

    def run_seed(seed: int, kept: Collection[int]) -> ClientResult:
        run = run_asyncio_clients(seed, kept)
        return dataclasses.replace(run, violations=["a rule: broken"] if 1 in kept else [])

    run, kept = shrink_run(failed, run_seed)
    assert kept == [1] and run.faults == everything.faults[1:2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", in_tiers(RESTORED, 30))
def test_a_restored_backup_keeps_what_was_acknowledged_before_it(seeds: Collection[int]) -> None:
    assert violations_of(run_restored_backup, seeds) == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", in_tiers(UNSYNCED, 30))
def test_a_power_loss_takes_only_what_was_not_synced(seeds: Collection[int]) -> None:
    assert violations_of(run_default_flush, seeds) == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", in_tiers(RETRIES, 60))
def test_old_batches_are_recognised_however_often_the_power_fails(seeds: Collection[int]) -> None:
    assert violations_of(run_old_retries, seeds) == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", in_tiers(LOGS, 100))
def test_a_log_remembers_its_producers_wherever_it_ends(seeds: Collection[int]) -> None:
    assert violations_of(run_log_crashes, seeds) == {}


@pytest.mark.parametrize("name", [each.name for each in FORGETFUL if each.name not in FORGOTTEN_UNSEEN])
def test_a_forgotten_producer_is_noticed(name: str) -> None:
    (mutant,) = [each for each in FORGETFUL if each.name == name]
    assert search(mutant, NOTED[name]) is not None


def test_a_restored_backup_that_fences_nobody_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionCoordinator, "fence_all", lambda self, now_ms: None)
    (violation, *_) = run_restored_backup(16).violations
    assert violation.startswith("a fenced producer committed")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "run_seed",
    [
        run_blocking_clients,
        run_asyncio_clients,
        run_process_loops,
        run_restored_backup,
        run_default_flush,
        run_old_retries,
        run_log_crashes,
    ],
)
def test_interrupted_clients_lose_nothing_for_long(run_seed: RunSeed) -> None:
    assert violations_of(run_seed, range(2_000)) == {}


def test_command_plays_clients_that_are_interrupted() -> None:
    result = CliRunner().invoke(command, ["--clients", "asyncio", "--seeds", "0..1"])
    assert result.exit_code == 0 and "2 seeds, 0 failed" in result.output
    result = CliRunner().invoke(command, ["--clients", "blocking", "--seed", "1"])
    assert result.exit_code == 0 and "starts (process 1)" in result.output


@pytest.mark.parametrize("name", [each.name for each in CLIENT_MUTANTS if each.name not in NOT_CAUGHT])
def test_a_broken_client_is_noticed(name: str) -> None:
    (mutant,) = [each for each in CLIENT_MUTANTS if each.name == name]
    assert search(mutant, [*NOTED.get(name, []), *range(400)]) is not None


def test_only_a_copier_that_commits_automatically_breaks_a_rule() -> None:
    """This mutant shows the violation because of which `group_metadata()` refuses a consumer that commits
    automatically.
    """
    (mutant,) = [each for each in CLIENT_MUTANTS if each.name == "a copier commits automatically"]
    found = search(mutant, [*NOTED[mutant.name], *range(400)])
    assert found is not None and found[1].startswith("copied")
    assert run_asyncio_clients(found[0]).violations == []
