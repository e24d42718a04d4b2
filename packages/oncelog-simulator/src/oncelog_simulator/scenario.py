"""The scenario that a seed draws: settings, clients, faults and workloads of one simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field

from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog_simulator.faults import Fault
from oncelog_simulator.jobs import UNDIVIDED, JobSettings
from oncelog_simulator.limits import FirstNumbers


@dataclass(frozen=True)
class Scenario:
    """Everything that a seed draws before its run starts."""

    seed: int
    broker: dict[str, object]
    loses_power: bool
    partitions: int
    senders: int
    writers: int
    copiers: int
    bursts: int
    calm_ms: int
    group_protocol: str
    faults: tuple[Fault, ...] = ()
    workloads: tuple[str, ...] = ()
    jobs: JobSettings = UNDIVIDED
    """Probabilities and delays of background jobs, which may be divided into steps (jobs.py)."""
    flip: str | None = None
    """One of bit_flips.BROKER_STATES if a bit flips at the end of the run; None if no bit flips."""
    rot: str | None = None
    """State of the broker while a file is damaged or lost: "stopped" or "killed". None without damage."""
    start: FirstNumbers = field(default_factory=FirstNumbers)
    """First producer id and first sequence of the run; some seeds begin near the maximum."""
    limits: Limits = DEFAULT_LIMITS
    """Internal limits of the broker. A seed may draw some far below their defaults, to reach them often."""
    expiry: bool = False
    """True if days pass at the end, so that retention and expiry apply."""
    foreign_files: bool = False
    """True if the broker's data directory has files that the broker did not write."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the optional parts that this seed has. Mutants name the part that they need."""
        has = {
            "flip": self.flip is not None,
            "limits": self.limits != DEFAULT_LIMITS,
            "epochs": self.limits.first_producer_epoch > 0 and self.writers > 0,
            "start": self.start != FirstNumbers(),
            "expiry": self.expiry,
            "foreign files": self.foreign_files,
        }
        return (*self.workloads, *(name for name, is_so in has.items() if is_so))
