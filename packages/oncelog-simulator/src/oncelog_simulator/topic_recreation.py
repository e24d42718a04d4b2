"""A workload whose topic is deleted and created again while producers, transactions and readers use it.

A record sent during the deletion may be in the old topic, in the new one, or in neither. A record
acknowledged before the deletion is gone. A record sent after the new topic exists is kept as in any topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar, NamedTuple

from oncelog.audit.partition import FindingKind
from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.errors import UnknownTopicOrPartition
from oncelog.types import TopicPartition
from oncelog_simulator.checks import check_history
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application, Reader, Sender
from oncelog_simulator.history.check import Kind, Operation, Outcome
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.txn_clients import Writer
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import World

BURSTS = 6
LATE_SECONDS = 2.0
"""Seconds after which no sent byte is in flight any more, unless the network is partitioned."""


class Deletion(NamedTuple):
    """The time at which a deletion was requested, and a time at which it was certainly complete.

    The topic may exist again before the second time.
    """

    began_us: int
    done_us: int


class TopicRecreator(Application):
    """Deletes the topic at times and creates it again."""

    def __init__(self, world: World, name: str, topic: NewTopic) -> None:
        super().__init__(world, name)
        self.topic = topic
        self.deletions: list[Deletion] = []
        self.topic_ids: set[str | None] = set()
        self.requested_us: int | None = None
        self.count = self.rng.randint(1, 3)

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, self.topic)
            while len(self.deletions) < self.count:
                await self.sleep_up_to(25.0)
                await self._delete(admin)
                # Wait for late attempts to delete the old topic. They name the topic, so they would delete
                # the new one.
                await asyncio.sleep(LATE_SECONDS)
                await create_topic(admin, self.topic)
                topic_id = (await admin.describe_topics([self.topic.name]))[self.topic.name].topic_id
                if topic_id in self.topic_ids:
                    self.world.violate("a new topic has the id of a deleted one", f"{topic_id}")
                self.topic_ids.add(topic_id)

    async def _delete(self, admin: AsyncAdmin) -> None:
        self.requested_us = self.requested_us or self.world.now_us
        error = (await admin.delete_topics([self.topic.name], raise_errors=False))[self.topic.name].error
        if error is not None and not isinstance(error, UnknownTopicOrPartition):
            raise error
        self.deletions.append(Deletion(self.requested_us, self.world.now_us))
        self.requested_us = None
        self.world.note(self.name, f"{self.topic.name} is deleted")


class NewReader(Reader):
    """Reads from the beginning with a new consumer each time.

    `opened_us` has the virtual time at which each session began.
    """

    def __init__(self, world: World, name: str, partitions: list[TopicPartition]) -> None:
        super().__init__(world, name, partitions, "read_committed")
        self.opened_us: dict[Hashable, int] = {}

    async def work(self) -> None:
        while not self.stop_requested:
            self.session += 1
            self.opened_us[self.session] = self.world.now_us
            async with self._consumer() as consumer:
                for _ in range(self.rng.randint(1, 5)):
                    await self.poll(consumer, 2.0)
            await self.sleep_up_to(5.0)


class TopicRecreation(Workload):
    """Checks that no record of a deleted topic is in the new topic of the same name."""

    topic: ClassVar[str] = "remade"
    clients: ClassVar[tuple[str, ...]] = ("sender-remade", "writer-remade", "reader-remade")
    legal_findings: ClassVar[frozenset[FindingKind]] = frozenset({FindingKind.SEQUENCE_GAP})
    """A gap is legal, because a producer continues with the sequence that it had in the old topic."""
    is_repeatable: ClassVar[bool] = False
    """False, because requests name the topic.

    The new topic of that name does not know the producer, so it would store repeated batches again.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        partitions = scenario.partitions
        sender, writer, reader = self.clients
        self.remaker = TopicRecreator(world, "remaker", NewTopic(self.topic, num_partitions=partitions))
        self.senders = [
            Sender(world, sender, self.topic, partitions, BURSTS),
            Writer(world, writer, self.topic, partitions, BURSTS),
        ]
        for client in self.senders:
            client.keeps_producers = False
        self.reader = NewReader(world, reader, self.partitions)
        self.applications, self.readers = [self.remaker, *self.senders], [self.reader]

    def check(self, node: BrokerState) -> None:
        operations = self.operations()
        sends = {
            operation.items[0].value: operation for operation in operations if operation.kind is Kind.SEND
        }
        for poll in operations:
            opened_us = self.world.now_us if poll.process == self.last.name else self._opened_us(poll)
            over = [deletion for deletion in self.remaker.deletions if deletion.done_us < opened_us]
            for item in poll.items if poll.kind is Kind.POLL and over else ():
                sent = sends[item.value]
                if sent.outcome is Outcome.OK and sent.end < over[-1].began_us:
                    self.world.violate("a deleted topic's record is in the new one", f"{item} by {sent}")
        self._check_last(operations)

    def _opened_us(self, poll: Operation) -> int:
        return self.reader.opened_us.get(poll.session, 0) if poll.process == self.reader.name else 0

    def _check_last(self, operations: list[Operation]) -> None:
        """Check everything that was begun after the last deletion against the records at the end."""
        done_us = max((deletion.done_us for deletion in self.remaker.deletions), default=0)
        begun: dict[Hashable, int] = {}
        for operation in operations:
            begun.setdefault(operation.unit, operation.begin)
        late = [
            operation
            for operation in operations
            if begun[operation.unit] > done_us and operation.kind is not Kind.POLL
        ]
        values = {operation.items[0].value for operation in late if operation.kind is Kind.SEND}
        seen: set[Hashable] = set()
        for poll in operations:
            if poll.process == self.last.name:
                items = tuple(item for item in poll.items if item.value in values)
                late.append(replace(poll, items=items))
                for item in poll.items:
                    if item.value in seen:
                        self.world.violate("twice in the log", f"{item}")
                    seen.add(item.value)
        check_history(self.world, late, self.last.name)
