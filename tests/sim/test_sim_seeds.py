"""Seeds of the simulator: all is kept that was promised, and the same seed gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oncelog.cli.main import EXIT_VIOLATIONS
from oncelog.cli.simulate import command
from oncelog.sim.mutants import MUTANTS
from oncelog.sim.mutants.mutant import search
from oncelog.sim.simulation import play, scenario_for

ROOT = Path(__file__).parents[2]
CHUNK = 25


ALL = {mutant.name: mutant for mutant in MUTANTS}
QUICK = ("duplicates are stored again", "producers are not recovered", "no sequence check")
"""Those that one of the first seeds notices."""


def more_seeds(first: int) -> Any:
    """Return a parameter for the full tier: the same test with other seeds."""
    return pytest.param(first, marks=pytest.mark.full("more seeds"))


def failures(seeds: range, fault_count: int | None = None) -> dict[int, list[str]]:
    return {seed: found for seed in seeds if (found := play(scenario_for(seed, fault_count)).violations)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [0, *(more_seeds(first) for first in range(CHUNK, 200, CHUNK))])
def test_nothing_is_violated(first: int) -> None:
    assert failures(range(first, first + CHUNK)) == {}


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
    for seed in range(3):
        one, other = play(scenario_for(seed)), play(scenario_for(seed))
        assert (one.digest, one.timeline) == (other.digest, other.timeline)
        assert one.digest != play(scenario_for(seed + 1)).digest


def test_a_seed_gives_the_same_bytes_in_every_process() -> None:
    """Whatever the order of sets is there."""
    told = {
        subprocess.run(
            [sys.executable, "-m", "oncelog.cli.main", "simulate", "--seeds", "0..7", "--digest"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.rpartition("8 seeds")[0]
        for hash_seed in ("1", "2")
    }
    assert len(told) == 1 and len(told.pop().splitlines()) == 8


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert search(ALL[name], range(8)) is not None


def test_command_tells_a_failure_with_the_faults_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, instead in ALL["duplicates are stored again"].patches:
        monkeypatch.setattr(owner, attribute, instead)
    seed, _ = search(ALL["duplicates are stored again"], range(8))
    result = CliRunner().invoke(command, ["--seed", str(seed)])
    assert result.exit_code == EXIT_VIOLATIONS
    assert "FAILED" in result.output and "VIOLATION" in result.output
    (again,) = [line for line in result.output.splitlines() if line.startswith("again: oncelog simulate ")]
    repeated = CliRunner().invoke(command, [*again.split()[3:], "--no-shrink"])
    assert repeated.exit_code == EXIT_VIOLATIONS


def test_command_on_sound_seeds() -> None:
    result = CliRunner().invoke(command, ["--seeds", "0..1"])
    assert result.exit_code == 0 and "2 seeds, 0 failed" in result.output
