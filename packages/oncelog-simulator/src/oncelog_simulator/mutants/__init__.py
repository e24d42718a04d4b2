"""All mutants, in the order of the table in docs/internals/mutants.md."""

from oncelog_simulator.mutants import (
    broker,
    clients,
    disk,
    interrupted_clients,
    limits,
    old_retries,
    removal,
    requests,
    storage,
    times,
    workloads,
)
from oncelog_simulator.mutants.mutant import ClientMutant, Mutant

MUTANTS: list[Mutant | ClientMutant] = [
    *broker.MUTANTS,
    *workloads.MUTANTS,
    *clients.MUTANTS,
    *disk.MUTANTS,
    *storage.MUTANTS,
    *removal.MUTANTS,
    *times.MUTANTS,
    *limits.MUTANTS,
    *requests.MUTANTS,
    *interrupted_clients.CLIENT_MUTANTS,
    *old_retries.MUTANTS,
]
NOT_CAUGHT: dict[str, str] = {
    name: reason
    for module in (
        broker,
        workloads,
        clients,
        disk,
        storage,
        removal,
        times,
        limits,
        requests,
        interrupted_clients,
        old_retries,
    )
    for name, reason in module.NOT_CAUGHT.items()
}
"""Mutants that no seed catches, each with the reason. Their guard tests catch them."""
