"""What some seeds play besides: applications on a topic of their own, and what must hold of it."""

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
    """One of them. `clients`: hosts for faults to choose from; `applications` end by themselves, `readers`
    when they are told to.
    """

    topic: ClassVar[str]
    clients: ClassVar[tuple[str, ...]]
    unguarded_groups: ClassVar[tuple[str, ...]] = ()
    """Whose positions neither a generation nor an epoch guards: a late request may set them back."""
    legal_findings: ClassVar[frozenset[FindingKind]] = frozenset()
    """What an audit of the topic may find."""
    makes_topics: ClassVar[bool] = False
    """Its topic, and others that no workload names, hold what nobody checks."""
    compacts: ClassVar[bool] = False
    """True when its topic may be compacted at times."""
    keeps_one_batch: ClassVar[bool] = False
    """True when its partitions come with Apache Kafka's snapshots: they have one batch of a producer."""
    is_repeatable: ClassVar[bool] = True
    """Whether what its clients sent may come again."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.partitions = [TopicPartition(self.topic, number) for number in range(scenario.partitions)]
        self.shares_epochs = False
        """Whether several transactions have one epoch, as in the classic protocol."""
        self.applications: list[Application] = []
        self.readers: list[Reader] = []
        self.last = LastReader(world, f"last-{self.topic}", self.partitions)

    def operations(self) -> list[Operation]:
        """What its applications and `last` noted, in the order of calling."""
        everyone: Iterable[Application] = (*self.applications, *self.readers, self.last)
        calls = sorted((call for each in everyone for call in each.calls), key=lambda call: call.begin)
        return [call.operation(self.world.now_us) for call in calls]

    @classmethod
    def broker_settings(cls, chance: Random) -> dict[str, object]:
        """Return settings that its seeds have in place of others."""
        return {}

    def prepare(self, broker: BrokerHost) -> None:  # noqa: B027
        """Change the broker's host before its first start."""

    def stored(self, event: AppendEvent) -> None:  # noqa: B027
        """Take note of what the broker did with a batch."""

    def look(self, node: BrokerState) -> None:  # noqa: B027
        """Check what must hold while the broker runs; called every second."""

    def ending(self) -> None:  # noqa: B027 (most need not know)
        """The broker is about to end."""

    def recovered(self, node: BrokerState) -> None:  # noqa: B027
        """The broker has started again."""

    def close(self) -> None:  # noqa: B027
        """The world is over."""

    @abstractmethod
    def check(self, node: BrokerState) -> None:
        """Everything is at rest, and `last` has read what there is."""


async def create_topic(admin: AsyncAdmin, topic: NewTopic) -> None:
    """Unless it is there. Raises as the admin client does."""
    error = (await admin.create_topics([topic], raise_errors=False))[topic.name].error
    if error is not None and not isinstance(error, TopicAlreadyExists):
        raise error
