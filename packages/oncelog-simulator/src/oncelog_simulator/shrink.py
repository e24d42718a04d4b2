"""A failing list of faults made shorter, as long as it goes on failing in the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from oncelog_simulator.scenario import Scenario
from oncelog_simulator.scene import Run
from oncelog_simulator.simulation import Result


def rule_of(violation: str) -> str:
    """What was violated, without the details that change from run to run."""
    return violation.partition(":")[0]


def shrink(failed: Result, play: Callable[[Scenario], Result], *, max_plays: int = 200) -> Result:
    """The result of a scenario with no fault that is not needed for the first violation of `failed`.

    Halves are tried before single faults; at most `max_plays` runs.
    """
    wanted = rule_of(failed.violations[0])
    best, plays_left = failed, max_plays
    size = max(len(failed.scenario.faults) // 2, 1)
    while size:
        start = 0
        while start < len(best.scenario.faults) and plays_left:
            plays_left -= 1
            faults = best.scenario.faults
            tried = play(replace(best.scenario, faults=faults[:start] + faults[start + size :]))
            if any(rule_of(each) == wanted for each in tried.violations):
                best = tried
            else:
                start += size
        size //= 2
    return best


def shrink_run(failed: Run, play: Callable[[int, Collection[int]], Run]) -> tuple[Run, list[int]]:
    """Return a run of interrupted clients without needless faults, and the numbers of those it needs."""
    wanted, best, kept = rule_of(failed.violations[0]), failed, list(range(len(failed.faults)))
    for number in tuple(kept):
        others = [each for each in kept if each != number]
        tried = play(failed.seed, others)
        if any(rule_of(each) == wanted for each in tried.violations):
            best, kept = tried, others
    return best, kept
