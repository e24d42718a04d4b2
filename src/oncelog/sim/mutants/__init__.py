"""Every mutant, in the order in which the table of docs/internals/simulation.md has them."""

from oncelog.sim.mutants import broker, clients, disk, interrupted, limits, workloads
from oncelog.sim.mutants.mutant import ClientMutant, Mutant

MUTANTS: list[Mutant | ClientMutant] = [
    *broker.MUTANTS,
    *workloads.MUTANTS,
    *clients.MUTANTS,
    *disk.MUTANTS,
    *limits.MUTANTS,
    *interrupted.CLIENT_MUTANTS,
]
NOT_CAUGHT: dict[str, str] = (
    broker.NOT_CAUGHT | workloads.NOT_CAUGHT | clients.NOT_CAUGHT | disk.NOT_CAUGHT | limits.NOT_CAUGHT
)
"""The reasons, by the mutant's name."""
