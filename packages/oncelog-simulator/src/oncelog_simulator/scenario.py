"""The scenario that a seed draws: settings, clients, faults and workloads of one simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field

from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog_simulator.faults import Fault
from oncelog_simulator.jobs import WHOLE, JobSettings
from oncelog_simulator.limits import Start


@dataclass(frozen=True)
class Scenario:
    """The scenario of one run: everything that a seed draws before the run starts."""

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
    jobs: JobSettings = WHOLE
    """The way in which background work is split into steps."""
    flip: str | None = None
    """State of the broker when a bit flips at the end; None: no bit flips."""
    rot: str | None = None
    """The broker's end before a small file or a coordinator's batch is damaged; None: no damage."""
    start: Start = field(default_factory=Start)
    """First values of offsets, producer ids, epochs and sequences."""
    limits: Limits = DEFAULT_LIMITS
    """Internal limits of the broker."""
    expiry: bool = False
    """True if days pass at the end, so that retention and expiry happen."""
    strangers: bool = False
    """True if foreign files lie in the broker's data directory."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts that this seed adds to the usual applications and faults."""
        has = {
            "flip": self.flip is not None,
            "limits": self.limits != DEFAULT_LIMITS,
            "epochs": self.limits.first_producer_epoch > 0 and self.writers > 0,
            "start": self.start != Start(),
            "expiry": self.expiry,
            "strangers": self.strangers,
        }
        return (*self.workloads, *(name for name, is_so in has.items() if is_so))
