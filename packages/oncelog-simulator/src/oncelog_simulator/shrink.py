"""Remove faults from a failing run as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from oncelog_simulator.client_simulation import ClientResult
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.simulation import Result


def rule_of(violation: str) -> str:
    """Return the name of the violated rule, without the details that differ from run to run."""
    return violation.partition(":")[0]


def shrink(failed: Result, run: Callable[[Scenario], Result], *, max_runs: int = 200) -> Result:
    """Return the result of a scenario with only the faults that the first violation of `failed` needs.

    Halves of the list are tried before single faults. At most `max_runs` scenarios are run.
    """
    rule = rule_of(failed.violations[0])
    best, runs_left = failed, max_runs
    size = max(len(failed.scenario.faults) // 2, 1)
    while size:
        start = 0
        while start < len(best.scenario.faults) and runs_left:
            runs_left -= 1
            faults = best.scenario.faults
            tried = run(replace(best.scenario, faults=faults[:start] + faults[start + size :]))
            if any(rule_of(violation) == rule for violation in tried.violations):
                best = tried
            else:
                start += size
        size //= 2
    return best


def shrink_run(
    failed: ClientResult, run: Callable[[int, Collection[int]], ClientResult]
) -> tuple[ClientResult, list[int]]:
    """Return a run of interrupted clients with only the faults that its violation needs, and the numbers of
    these faults.
    """
    rule, best, kept = rule_of(failed.violations[0]), failed, list(range(len(failed.faults)))
    for number in tuple(kept):
        others = [other for other in kept if other != number]
        tried = run(failed.seed, others)
        if any(rule_of(violation) == rule for violation in tried.violations):
            best, kept = tried, others
    return best, kept
