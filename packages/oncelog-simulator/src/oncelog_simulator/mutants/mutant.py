"""Mutants are deliberate faults in the product. `search` looks for a seed that catches a mutant."""

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
from oncelog_simulator.log_crashes import run_log_crashes
from oncelog_simulator.old_retries import run_old_retries
from oncelog_simulator.shrink import rule_of
from oncelog_simulator.simulation import INDEPENDENT_WORKLOADS, WORKLOADS, run_scenario, scenario_for

Patch = tuple[Any, str, Any]
"""(owner, attribute, replacement): the attribute of a module or class that `replacement` replaces."""


class Mutant(NamedTuple):
    """A deliberate fault in the product, which a simulated scenario must notice.

    If `workload` names a workload, every seed runs it, as with --workload. If it names another part of a
    scenario, only seeds with that part are run. `world` has patches of the simulation, which alone violate
    nothing. `findings` has the ids of docs/internals/findings.md that this mutant reintroduces. `guards`
    names tests, relative to `tests/`. Each guard fails under the patches alone, as `tools/mutants.py
    --guards` checks.
    """

    name: str
    patches: tuple[Patch, ...]
    workload: str | None = None
    world: tuple[Patch, ...] = ()
    findings: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()


class ClientMutant(NamedTuple):
    """A deliberate fault in the product, which a client simulation must notice.

    `clients` is blocking, asyncio, backup, unsynced, retries or log. Only seeds of the given `kinds` are run;
    if `kinds` is empty, all seeds are. With `needs_faults` only seeds with faults are run. `findings` and
    `guards` are as in Mutant.
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
    "retries": (lambda seed: "retries", run_old_retries),
    "log": (lambda seed: "log", run_log_crashes),
}
"""For each kind of client: the function that returns a seed's kind, and the function that runs the seed."""


def caught_by_clients(mutant: ClientMutant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed that catches a ClientMutant, and the violated rule.

    Return None if no seed does.
    """
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
            except Exception as error:  # the mutant broke the simulation itself
                violations = [f"{type(error).__name__}: {error}"]
        if violations:
            return seed, rule_of(violations[0])
    return None


def caught_by(mutant: Mutant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed that catches the mutant, and the violated rule. Return None if no seed does."""
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
    """Return the violations of a seed under these patches.

    `workload` is run even if the seed does not draw it.
    """
    with ExitStack() as stack:
        for owner, attribute, instead in patches:
            stack.enter_context(patch.object(owner, attribute, instead))
        try:
            return run_scenario(scenario_for(seed, workload=workload)).violations
        except Exception as error:  # the mutant broke the simulation itself
            return [f"{type(error).__name__}: {error}"]


def search(mutant: Mutant | ClientMutant, seeds: Iterable[int]) -> tuple[int, str] | None:
    """Return the first seed that catches the mutant, and the violated rule. Return None if no seed does."""
    return caught_by(mutant, seeds) if isinstance(mutant, Mutant) else caught_by_clients(mutant, seeds)
