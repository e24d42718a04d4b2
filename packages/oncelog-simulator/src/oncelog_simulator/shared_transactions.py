"""A workload whose transactions are written by several producers with one epoch, or are handed over.

Each partition is written by one producer of a transaction, as `join_transaction` demands. Producers that have
joined also send after the owner has ended the transaction. Such records must never be visible. A producer
that has shared a transaction, or taken one over, begins the next one if it may.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import ClassVar

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import MisuseError, OncelogError
from oncelog.types import TransactionShare
from oncelog_simulator.checks import check_history
from oncelog_simulator.clients import SHORT_TIMEOUTS
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.txn_clients import TransactionalClient
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import World

TOPIC = "shared"
BURSTS = 8
COMMIT_CHANCE = 0.75
LATE_CHANCE = 0.4
"""Probability that a producer that has joined sends a record after the end of the transaction."""


class TransactionSharer(TransactionalClient):
    """Runs transactions of several producers, all of them in one process."""

    def __init__(self, world: World, name: str, partitions: int, *, raises_epoch: bool) -> None:
        super().__init__(world, name, TOPIC, partitions, BURSTS)
        self.raises_epoch = raises_epoch
        self.late_count = 0
        self.writers: list[AsyncProducer] = []
        """The producer that writes to each partition."""

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, NewTopic(TOPIC, num_partitions=self.partitions))
        await self.transact_to_the_end(self.transact, rest_s=4.0)

    async def transact(self, producer: AsyncProducer) -> bool:
        """Run one transaction. Return False if the producer must be replaced."""
        self.bursts_left -= 1
        self.transaction += 1
        self.sent, self.writers = [], []
        try:
            await producer.begin_transaction()
        except MisuseError as error:
            # Only a transaction whose end raises the epoch leaves a producer that may begin another one.
            if self.raises_epoch:
                self.world.violate("a producer cannot begin its next transaction", f"{self.name}: {error}")
            return False
        match self.rng.choices(["share", "hand over", "alone"], [5, 3, 2])[0]:
            case "share":
                await self.share(producer)
            case "hand over":
                await self.hand_over(producer)
                return False
            case _:
                self.writers = [producer] * self.partitions
                await self.send_one()
                await self.end_transaction(producer)
        return True

    async def share(self, owner: AsyncProducer) -> None:
        """Let other producers join, and end the transaction. Raises the error of a failed abort."""
        try:
            share = await owner.share_transaction()
        except MisuseError as error:
            # The owner may have sent records in an earlier transaction with the same epoch.
            if self.raises_epoch:
                self.world.violate("a producer cannot share its transaction", f"{self.name}: {error}")
            raise
        joined = [AsyncProducer(self.settings) for _ in range(self.rng.randint(1, 2))]
        try:
            await self._send_together(owner, joined, share)
        except OncelogError as error:
            self.world.note(self.name, f"a part of transaction {self.transaction} failed: {error!r}")
            await self.abort(owner)
            is_committed = False
        else:
            is_committed = await self.end_transaction(owner)
        # If brokers keep the epoch, a late record may come before the marker of the commit, and be committed.
        if self.rng.random() < LATE_CHANCE and (self.raises_epoch or not is_committed):
            await self.send_late(self.rng.choice(joined))

    async def _send_together(
        self, owner: AsyncProducer, joined: list[AsyncProducer], share: TransactionShare
    ) -> None:
        """Send records of the transaction from all its producers. Raises the first error of a record."""
        await asyncio.gather(*(producer.join_transaction(share) for producer in joined))
        producers = [*joined, owner] if self.rng.random() < 0.5 else joined
        self.writers = [self.rng.choice(producers) for _ in range(self.partitions)]
        for _ in range(self.rng.choice((0, 1, 2, 5))):
            await self.send_one()
        for sent in self.sent:
            await sent

    async def send_one(self) -> None:
        """Send a record of the transaction to a partition, from the producer that writes to it."""
        partition = self.rng.randrange(self.partitions)
        self.sent.append(
            await self.send(self.writers[partition], TOPIC, partition, transaction=self.transaction)
        )

    async def end_transaction(self, producer: AsyncProducer) -> bool:
        """Commit or abort the transaction. Return True if it is committed."""
        if self.rng.random() < COMMIT_CHANCE:
            return await self.commit(producer)
        await self.abort(producer)
        return False

    async def send_late(self, joined: AsyncProducer) -> None:
        """Send a record after the owner has ended the transaction. No transaction may commit it."""
        partitions = [number for number, writer in enumerate(self.writers) if writer is joined]
        if not partitions:
            return
        self.late_count += 1
        partition = self.rng.choice(partitions)
        with suppress(OncelogError):
            await self.send(joined, TOPIC, partition, transaction=("late", self.late_count))
            await joined.flush()

    async def hand_over(self, producer: AsyncProducer) -> None:
        """Let another producer end the transaction, and begin another one with it if it may."""
        self.writers = [producer] * self.partitions
        for _ in range(self.rng.randint(0, 3)):
            await self.send_one()
        share = await producer.hand_over_transaction()
        other = AsyncProducer(self.settings)
        await other.take_over_transaction(share)
        await self.end_transaction(other)
        self.transaction += 1
        try:
            await other.begin_transaction()
        except MisuseError:
            return
        self.writers = [other] * self.partitions
        await self.send_one()
        await self.commit(other)


class SharedTransactions(Workload):
    """Checks that exactly the records of committed transactions are visible, whichever producer sent them."""

    topic: ClassVar[str] = TOPIC
    clients: ClassVar[tuple[str, ...]] = ("sharer",)

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        raises_epoch = scenario.broker["oncelog.transaction.version"] == 2
        (name,) = self.clients
        self.applications.append(
            TransactionSharer(world, name, scenario.partitions, raises_epoch=raises_epoch)
        )

    def check(self, node: BrokerState) -> None:
        check_history(self.world, self.operations(), self.last.name)
