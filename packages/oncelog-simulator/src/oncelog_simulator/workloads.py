"""The base of workloads: applications that some seeds add on their own topic, and the checks of that
topic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from random import Random
from typing import ClassVar

from oncelog.audit.partition import FindingKind
from oncelog.broker.append_events import AppendEvent
from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.errors import TopicAlreadyExists
from oncelog.types import TopicPartition
from oncelog_simulator.clients import Application, LastReader, Reader
from oncelog_simulator.history.check import Operation
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.world import BrokerHost, World


class Workload(ABC):
    """Applications on one topic, and the checks of that topic.

    `clients` names the hosts that faults may choose. `applications` end by themselves. `readers` end when
    `stop_requested` is set.
    """

    topic: ClassVar[str]
    clients: ClassVar[tuple[str, ...]]
    unguarded_groups: ClassVar[tuple[str, ...]] = ()
    """Groups whose commits no generation or epoch guards. A late request may move their positions back."""
    legal_findings: ClassVar[frozenset[FindingKind]] = frozenset()
    """Kinds of findings in an audit of the topic that are not violations."""
    makes_topics: ClassVar[bool] = False
    """True if clients create topics at random.

    Neither these topics nor the workload's own topic are checked.
    """
    compacts: ClassVar[bool] = False
    """True if the topic may be compacted at some time."""
    keeps_one_batch: ClassVar[bool] = False
    """True if the partitions start with Apache Kafka's snapshots, which have one batch of each producer."""
    is_repeatable: ClassVar[bool] = True
    """True if the network may deliver the clients' requests a second time."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.partitions = [TopicPartition(self.topic, number) for number in range(scenario.partitions)]
        self.shares_epochs = False
        """True if several transactions have the same epoch, as with transaction version 0.

        The outcomes of transactions are then not compared by their epochs.
        """
        self.applications: list[Application] = []
        self.readers: list[Reader] = []
        self.last = LastReader(world, f"last-{self.topic}", self.partitions)

    def operations(self) -> list[Operation]:
        """Return the operations of the applications, the readers and `last`, in the order of their calls."""
        everyone: Iterable[Application] = (*self.applications, *self.readers, self.last)
        calls = sorted(
            (call for application in everyone for call in application.calls), key=lambda call: call.begin
        )
        return [call.operation(self.world.now_us) for call in calls]

    @classmethod
    def broker_settings(cls, rng: Random) -> dict[str, object]:
        """Draw broker settings that replace the usual ones in seeds with this workload."""
        return {}

    def prepare(self, broker: BrokerHost) -> None:  # noqa: B027
        """Change the broker's host, such as its disk or limits, before its first start."""

    def stored(self, event: AppendEvent) -> None:  # noqa: B027
        """Note the broker's verdict on a produced batch: stored, duplicate or refused."""

    def observe(self, node: BrokerState) -> None:  # noqa: B027
        """Check conditions that must hold while the broker runs. Called every second."""

    def ending(self) -> None:  # noqa: B027 (most need not know)
        """Note the state of the broker that the checks need. Called just before the broker ends."""

    def recovered(self, node: BrokerState) -> None:  # noqa: B027
        """Check the broker's state after a restart. Called when the broker has started again."""

    def close(self) -> None:  # noqa: B027
        """Free the files and other resources of the workload, after the simulation."""

    @abstractmethod
    def check(self, node: BrokerState) -> None:
        """Check the topic after all applications have ended and `last` has read it."""


async def create_topic(admin: AsyncAdmin, topic: NewTopic) -> None:
    """Create a topic unless it exists. Raises the same errors as the admin client."""
    error = (await admin.create_topics([topic], raise_errors=False))[topic.name].error
    if error is not None and not isinstance(error, TopicAlreadyExists):
        raise error
