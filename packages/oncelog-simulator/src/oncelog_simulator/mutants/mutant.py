"""Mutants: rules of the product broken on purpose, and the search for a seed that notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

from oncelog_simulator import asyncio_clients, blocking_clients
from oncelog_simulator.asyncio_clients import run_asyncio_clients
from oncelog_simulator.backup import run_restored_backup
from oncelog_simulator.blocking_clients import run_blocking_clients
from oncelog_simulator.client_simulation import ClientResult, has_faults
from oncelog_simulator.default_flush import run_default_flush
from oncelog_simulator.shrink import rule_of
from oncelog_simulator.simulation import INDEPENDENT_WORKLOADS, WORKLOADS, run_scenario, scenario_for

Patch = tuple[Any, str, Any]
"""(owner, attribute, what stands there instead)"""


class Mutant(NamedTuple):
    """`workload`: every seed plays it, as with --workload; else only seeds with that part can notice.

    `world`: further patches; with those alone nothing is violated. `findings`: ids of the rows of
    docs/internals/findings.md that this mutant puts back. `guards`: tests, relative to `tests/`, each of
    which fails under the patches alone; `tools/mutants.py --guards` runs them so.
    """

    name: str
    patches: tuple[Patch, ...]
    workload: str | None = None
    world: tuple[Patch, ...] = ()
    findings: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()


class ClientMutant(NamedTuple):
    """`kinds`: of the seeds that can notice; empty: all. `clients`: blocking, asyncio, backup or unsynced.

    `findings`, `guards`: as in Mutant. `needs_faults`: only seeds with faults are played.
    """

    name: str
    clients: str
    kinds: tuple[str, ...]
    patches: tuple[Patch, ...]
    findings: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    needs_faults: bool = False


def nothing(*_: Any, **__: Any) -> None:
    return None


def false(*_: Any, **__: Any) -> bool:
    return False


def true(*_: Any, **__: Any) -> bool:
    return True


_CLIENT_SIMULATIONS: dict[str, tuple[Callable[[int], str], Callable[[int], ClientResult]]] = {
    "blocking": (blocking_clients.kind_of, run_blocking_clients),
    "asyncio": (asyncio_clients.kind_of, run_asyncio_clients),
    "backup": (lambda seed: "backup", run_restored_backup),
    "unsynced": (lambda seed: "unsynced", run_default_flush),
}
"""How a seed's clients are drawn, and played."""


def caught_by_clients(mutant: ClientMutant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed of interrupted clients that notices, and the violated rule; None without."""
    kind_of, run_seed = _CLIENT_SIMULATIONS[mutant.clients]
    for seed in seeds:
        if (mutant.kinds and kind_of(seed) not in mutant.kinds) or (
            mutant.needs_faults and not has_faults(seed)
        ):
            continue
        with ExitStack() as stack:
            for owner, attribute, instead in mutant.patches:
                stack.enter_context(patch.object(owner, attribute, instead))
            try:
                violations = run_seed(seed).violations
            except Exception as error:  # the broken product broke the simulation itself
                violations = [f"{type(error).__name__}: {error}"]
        if violations:
            return seed, rule_of(violations[0])
    return None


def caught_by(mutant: Mutant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed that notices, and the violated rule; None when none does."""
    for seed in seeds:
        apart = mutant.workload if mutant.workload in (*WORKLOADS, *INDEPENDENT_WORKLOADS) else None
        scenario = scenario_for(seed, workload=apart)
        if mutant.workload not in (None, *scenario.parts):
            continue
        violations = violated(seed, mutant.world + mutant.patches, apart)
        if violations and not (mutant.world and violated(seed, mutant.world, apart)):
            return seed, rule_of(violations[0])
    return None


def violated(seed: int, patches: tuple[Patch, ...], workload: str | None = None) -> list[str]:
    """What a seed violates while these are in place. `workload`: is played whatever the seed says."""
    with ExitStack() as stack:
        for owner, attribute, instead in patches:
            stack.enter_context(patch.object(owner, attribute, instead))
        try:
            return run_scenario(scenario_for(seed, workload=workload)).violations
        except Exception as error:  # the broken product broke the simulation itself
            return [f"{type(error).__name__}: {error}"]


def search(mutant: Mutant | ClientMutant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed that notices the mutant and the violated rule; None when none does."""
    return caught_by(mutant, seeds) if isinstance(mutant, Mutant) else caught_by_clients(mutant, seeds)
