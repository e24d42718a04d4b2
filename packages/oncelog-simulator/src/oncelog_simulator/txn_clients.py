"""Transactional applications: writers, and copiers that consume, transform and produce in one group.

A copied record has the value `VALUE>PROCESS.TRANSACTION`. So two transactions that copy the same record write
different values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import FencedInstanceId, MisuseError, OncelogError, TimedOut
from oncelog.types import Record, RecordMetadata, TopicPartition
from oncelog_simulator.clients import SHORT_TIMEOUTS, Sender
from oncelog_simulator.history.check import Kind, Outcome
from oncelog_simulator.world import World

GROUP = "copiers"
STATIC_CHANCE = 0.25
"""Probability that a copier is a static member, which keeps its member identity over restarts."""
LATE_SECONDS = 20.0
"""Seconds that exceed the transaction time-out plus the interval at which the coordinator checks it."""
SHARED: dict[str, object] = {
    "linger.ms": 0,
    "max.block.ms": 8_000,
    "delivery.timeout.ms": 10_000,
    "transaction.timeout.ms": 15_000,
}


class TransactionalClient(Sender):
    """An application with a transactional producer. If the producer cannot continue, a new one replaces
    it.
    """

    def __init__(self, world: World, name: str, topic: str, partitions: int, bursts: int) -> None:
        super().__init__(world, name, topic, partitions, bursts)
        self.settings = {**SHORT_TIMEOUTS, **SHARED, "client.id": name, "transactional.id": name}
        self.transaction = 0
        self.sent: list[asyncio.Future[RecordMetadata]] = []

    async def new_producer(self) -> AsyncProducer:
        """Return an initialized producer, however many attempts it takes.

        The previous producer with the same transactional id is fenced.
        """
        self.session += 1
        producer = AsyncProducer(self.settings)
        while True:
            try:
                await producer.init_transactions()
                return producer
            except TimedOut:
                continue
            except OncelogError as error:
                self.world.note(self.name, f"init_transactions: {error!r}")
                await self.sleep_up_to(1.0)
                producer = AsyncProducer(self.settings)

    async def put(self, producer: AsyncProducer, topic: str, value: bytes | None = None) -> None:
        """Send a record in the open transaction."""
        partition = self.rng.randrange(self.partitions)
        self.sent.append(await self.send(producer, topic, partition, value, self.transaction))

    async def transact_to_the_end(
        self, transact: Callable[[AsyncProducer], Awaitable[bool]], *, rest_s: float
    ) -> None:
        """Call `transact` until no burst is left.

        `transact` returns False if its producer must be replaced.
        """
        while self.bursts_left > 0:
            producer = await self.new_producer()
            try:
                while self.bursts_left > 0 and await transact(producer):
                    await self.sleep_up_to(rest_s)
            except OncelogError as error:
                self.world.note(self.name, f"needs a new producer: {error!r}")
        # Initializing a new producer aborts a transaction that is still open. Otherwise readers would wait
        # for its time-out.
        await self.new_producer()

    async def commit(self, producer: AsyncProducer) -> bool:
        """Commit the transaction and return True. If the commit fails, abort it and return False.

        A commit that times out is called again. If the abort fails too, raises its error; then the
        application needs a new producer.
        """
        while True:
            call = self.begin(Kind.COMMIT, transaction=self.transaction)
            try:
                await producer.commit_transaction()
            except TimedOut:
                self.end(call, Outcome.UNKNOWN)
            except OncelogError:
                await self.abort(producer)
                self.end(call, Outcome.FAIL)
                return False
            else:
                self.end(call, Outcome.OK)
                return True

    async def abort(self, producer: AsyncProducer) -> None:
        while True:
            call = self.begin(Kind.ABORT, transaction=self.transaction)
            try:
                await producer.abort_transaction()
            except TimedOut:
                continue
            self.end(call, Outcome.OK)
            return


class Writer(TransactionalClient):
    """Runs transactions of a few records. Some are aborted, some are left open, and a zombie tries to commit
    some.

    `late_chance` is the probability that a transaction stays open beyond its time-out before its producer
    continues.
    """

    late_chance = 0.0

    async def work(self) -> None:
        await self.transact_to_the_end(self.transact, rest_s=8.0)

    async def transact(self, producer: AsyncProducer) -> bool:
        """Run one transaction. Return False if the producer must be replaced."""
        self.bursts_left -= 1
        self.transaction += 1
        how = self.rng.choices(["commit", "abort", "leave", "zombie"], [16, 4, 1, 1])[0]
        await producer.begin_transaction()
        for _ in range(self.rng.randint(1, 5)):
            await self.put(producer, self.topic)
            if self.rng.random() < 0.2:
                await self.sleep_up_to(1.0)
        if self.late_chance and self.rng.random() < self.late_chance:
            await asyncio.sleep(LATE_SECONDS)
            await self.put(producer, self.topic)
            await producer.flush()
        match how:
            case "commit":
                await self.commit(producer)
            case "abort":
                await self.abort(producer)
            case "zombie":
                await producer.flush()
                await self.new_producer()
                await self.commit_as_a_zombie(producer)
        return how not in ("leave", "zombie")

    async def commit_as_a_zombie(self, producer: AsyncProducer) -> None:
        """Commit with a fenced producer. This must fail, because its successor is initialized already."""
        call = self.begin(Kind.COMMIT, transaction=self.transaction)
        try:
            await producer.commit_transaction()
        except OncelogError:
            self.end(call, Outcome.FAIL)
        else:
            self.world.violate("a fenced producer committed", f"{self.name} transaction {self.transaction}")


class ConsumeTransformProduce(TransactionalClient):
    """Reads as a member of the group, writes, and commits both in one transaction.

    If a transaction is aborted, it reads again from the committed offsets.
    """

    def __init__(
        self, world: World, name: str, source: str, target: str, partitions: int, group_protocol: str
    ) -> None:
        super().__init__(world, name, target, partitions, 0)
        self.source = source
        self.stop_requested = False
        self.reading: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "client.id": name,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "fetch.max.wait.ms": 2_000,
            "enable.auto.commit": False,
            "max.poll.interval.ms": 20_000,
            "group.protocol": group_protocol,
        }
        strategy = self.rng.choice(("range", "cooperative-sticky"))
        # These settings apply to the classic protocol only. With the consumer protocol the coordinator
        # assigns partitions.
        if group_protocol == "classic":
            self.reading |= {
                "heartbeat.interval.ms": 2_000,
                "session.timeout.ms": 6_000,
                "partition.assignment.strategy": strategy,
            }
        if world.rng(f"static {name}").random() < STATIC_CHANCE:
            self.reading["group.instance.id"] = name

    async def work(self) -> None:
        async with self.new_consumer() as consumer:
            consumer.subscribe(
                [self.source],
                on_assigned=self._on_change,
                on_revoked=self._on_change,
                on_lost=self._on_change,
            )
            while not self.stop_requested:
                producer = await self.new_producer()
                await self.go_back(consumer)
                try:
                    await self.copy(consumer, producer)
                except FencedInstanceId:
                    # A JoinGroup that the network delivered twice fenced this static member. Raise the error,
                    # so that the application starts over with a new consumer.
                    raise
                except OncelogError as error:
                    self.world.note(self.name, f"needs a new producer: {error!r}")

    def new_consumer(self) -> AsyncConsumer:
        return AsyncConsumer(self.reading)

    def _on_change(self, _: list[TopicPartition]) -> None:
        self.session += 1

    async def copy(self, consumer: AsyncConsumer, producer: AsyncProducer) -> None:
        while not self.stop_requested:
            call = self.begin(Kind.POLL)
            try:
                records = await consumer.poll(3.0, max_records=self.rng.randint(1, 20))
            except FencedInstanceId:
                raise
            except OncelogError:
                records = []
                await self.sleep_up_to(0.5)
            if not records:
                self.calls.remove(call)
                continue
            self.transaction += 1
            call.transaction, call.session = self.transaction, self.session
            self.end(call, Outcome.OK, self.items_of(records))
            if not await self.pass_on(consumer, producer, records):
                await self.go_back(consumer)

    async def pass_on(self, consumer: AsyncConsumer, producer: AsyncProducer, records: list[Record]) -> bool:
        await producer.begin_transaction()
        suffix = f">{self.name}.{self.transaction}".encode()
        for record in records:
            await self.put(producer, self.topic, (record.value or b"") + suffix)
        ends: dict[TopicPartition, Any] = {
            TopicPartition(record.topic, record.partition): record.offset + 1 for record in records
        }
        try:
            await producer.send_offsets_to_transaction(ends, consumer.group_metadata())
        except OncelogError:
            await self.abort(producer)
            return False
        if self.rng.random() < 0.1:
            await self.abort(producer)
            return False
        return await self.commit(producer)

    async def go_back(self, consumer: AsyncConsumer) -> None:
        """Seek to the committed offsets, however many attempts it takes."""
        while True:
            try:
                await consumer.seek_to_committed()
                self.session += 1
                return
            except (MisuseError, FencedInstanceId):
                raise
            except OncelogError:
                await self.sleep_up_to(0.5)
