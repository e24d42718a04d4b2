"""Seeds of the simulator violate no rule, and the same seed gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from oncelog_simulator.cli import command
from oncelog_simulator.mutants import MUTANTS
from oncelog_simulator.mutants.mutant import search
from oncelog_simulator.simulation import Result, run_scenario, scenario_for

from oncelog.cli.main import EXIT_VIOLATIONS

ROOT = Path(__file__).parents[2]
CHUNK = 25


ALL = {mutant.name: mutant for mutant in MUTANTS}
NOTED = {
    "duplicates are stored again": (184, *range(8)),
    "producers are not recovered": (14, *range(8)),
    "no sequence check": (5, *range(8)),
}
"""For each mutant, the seeds to run until one catches it. The first seed has few faults and takes a quarter
of a second.
"""


SEEDS = (10, 19, 29, 43, 47, 51, 64, 75, 83, 92, 93, 96, 260)
"""Seeds below 100 whose timelines have more kinds of events, faults and workloads than the first 25 seeds.

Seed 260 sets the wall clock of the broker ahead and back by 41 minutes.
"""


def more_seeds(first: int) -> Any:
    """Return a parameter of the full tier: the same test with more seeds."""
    seeds = [seed for seed in range(first, first + CHUNK) if seed not in SEEDS]
    return pytest.param(seeds, id=f"{first}", marks=pytest.mark.full("more seeds"))


@cache
def played(seed: int) -> Result:
    """Run a seed, only once for all tests that use it, and return the result."""
    return run_scenario(scenario_for(seed))


def failures(seeds: Iterable[int], fault_count: int | None = None) -> dict[str, list[str]]:
    """Return the violations of the seeds that fail, each under the command that runs the seed again."""
    option = "" if fault_count is None else f" --fault-count {fault_count}"
    return {
        f"oncelog simulate --seed {seed}{option}": found
        for seed in seeds
        if (found := run_scenario(scenario_for(seed, fault_count)).violations)
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", [pytest.param(SEEDS, id="quick"), *map(more_seeds, range(0, 200, CHUNK))])
def test_nothing_is_violated(seeds: Collection[int]) -> None:
    found = {f"oncelog simulate --seed {seed}": played(seed).violations for seed in seeds}
    assert {command: violations for command, violations in found.items() if violations} == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 10_000, 1_000))
def test_nothing_is_violated_for_long(first: int) -> None:
    assert failures(range(first, first + 1_000)) == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_is_violated_with_many_faults() -> None:
    assert failures(range(300), fault_count=50) == {}


def test_a_seed_gives_the_same_world_again() -> None:
    for seed in SEEDS[-4:]:
        one, other = played(seed), run_scenario(scenario_for(seed))
        assert (one.digest, one.timeline) == (other.digest, other.timeline)
    assert len({played(seed).digest for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize(
    ("seeds", "count"),
    [("92..93", 2), ("24..24", 1), pytest.param("0..7", 8, marks=pytest.mark.full("more seeds"))],
)
def test_a_seed_gives_the_same_bytes_in_every_process(seeds: str, count: int) -> None:
    """The processes have different hash seeds, so sets have different orders in them."""
    told = {
        subprocess.run(
            [sys.executable, "-m", "oncelog.cli.main", "simulate", "--seeds", seeds, "--digest"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.rpartition(f"{count} seeds")[0]
        for hash_seed in ("1", "2")
    }
    assert len(told) == 1 and len(told.pop().splitlines()) == count


def test_a_log_start_that_a_full_disk_did_not_store_may_take_the_last_stable_offset_back() -> None:
    assert run_scenario(scenario_for(333583)).violations == []


@pytest.mark.parametrize("name", NOTED)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert search(ALL[name], NOTED[name]) is not None


def test_command_tells_a_failure_with_the_faults_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, instead in ALL["duplicates are stored again"].patches:
        monkeypatch.setattr(owner, attribute, instead)
    seed, _ = search(ALL["duplicates are stored again"], NOTED["duplicates are stored again"])
    result = CliRunner().invoke(command, ["--seed", str(seed)])
    assert result.exit_code == EXIT_VIOLATIONS
    assert "FAILED" in result.output and "VIOLATION" in result.output
    (again,) = [line for line in result.output.splitlines() if line.startswith("again: oncelog simulate ")]
    repeated = CliRunner().invoke(command, [*again.split()[3:], "--no-shrink"])
    assert repeated.exit_code == EXIT_VIOLATIONS


def test_command_on_sound_seeds() -> None:
    result = CliRunner().invoke(command, ["--seeds", "0..1"])
    assert result.exit_code == 0 and "2 seeds, 0 failed" in result.output
