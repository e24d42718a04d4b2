"""Restore a backup while clients are running: the broker goes back in time, and the clients do not.

The disk is copied at a drawn moment. The copy is made after a clean stop, or as a snapshot of a running
broker. A snapshot has everything, or only what a power loss would leave. Later the broker ends, the copy
replaces its disk, and the broker starts. Producers with and without transactions, a group and a reader run
throughout.

These rules are checked:

- Every record that was acknowledged before the copy is at its offset at the end.
- No record is stored twice. Every record of a transaction committed after the restore is stored.
- If the first start after the restore fences (oncelog.fence.transactions), a producer cannot commit once a
  newer instance has been initialized since, and a group copies each record once.
- Clients continue, or end with a typed error. No call hangs.

Records that were acknowledged between the copy and the restore are lost, and that is correct.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from random import Random

from oncelog.audit.partition import FindingKind
from oncelog.client.producer.aio import AsyncProducer
from oncelog.config import BROKER
from oncelog.errors import OncelogError
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import TopicPartition
from oncelog_simulator.checks import check_copies, check_history, check_log
from oncelog_simulator.client_simulation import ClientResult, ClientSimulation, run_client_simulation
from oncelog_simulator.clients import LastReader, Reader, Sender
from oncelog_simulator.history.check import Kind, Operation, Outcome
from oncelog_simulator.txn_clients import ConsumeTransformProduce, TransactionalClient, Writer
from oncelog_simulator.world import SERVERS, BrokerHost, World

KINDS = ("stopped", "snapshot", "power loss")
RECORDS, INWARD, OUTWARD, HELD = "records", "inward", "outward", "held"
LIMIT_SECONDS = 400.0


class SuccessiveProducers(TransactionalClient):
    """A producer that keeps a transaction open during the restore, and its successors.

    All of them have the same transactional id.
    """

    def __init__(self, world: World, name: str, simulation: BackupSimulation) -> None:
        super().__init__(world, name, HELD, simulation.partition_count, 1)
        self.simulation = simulation
        self.settings |= {"transaction.timeout.ms": 60_000}

    async def work(self) -> None:
        self.bursts_left = 0
        old = await self.new_producer()
        while self.world.now_us < self.simulation.restore_s * 1e6 - 2e6:
            old = await self._transact(old)
            if self.rng.random() < 0.3:
                old = await self.new_producer()
            await self.sleep_up_to(3.0)
        held = await self._begin(old)
        await self.simulation.restored.wait()
        await self.sleep_up_to(3.0)
        new = await self.new_producer()
        for _ in range(self.rng.randint(0, 12)):
            new = await self._transact(new)
        own = await self._begin(new)
        await self._commit_as_before(old, held)
        self.transaction = own
        try:
            await self.commit(new)
        except OncelogError as error:
            if self.simulation.fences:
                self.world.violate("a new instance is disturbed by the old one", f"{self.name}: {error!r}")
        await self.new_producer()

    async def _begin(self, producer: AsyncProducer) -> int:
        self.transaction += 1
        await producer.begin_transaction()
        await self.put(producer, self.topic)
        await producer.flush()
        return self.transaction

    async def _transact(self, producer: AsyncProducer) -> AsyncProducer:
        """Commit a transaction. Return the producer for the next one: a new producer after an error."""
        try:
            await self._begin(producer)
            await self.commit(producer)
        except OncelogError as error:
            self.world.note(self.name, f"needs a new producer: {error!r}")
            return await self.new_producer()
        return producer

    async def _commit_as_before(self, producer: AsyncProducer, transaction: int) -> None:
        """Commit the transaction of the old producer after a newer producer with its id was initialized.

        If the restore fences, a successful commit is a violation.
        """
        self.transaction = transaction
        call = self.begin(Kind.COMMIT, transaction=transaction)
        try:
            if self.rng.random() < 0.5:
                await self.put(producer, self.topic)
                await producer.flush()
            await producer.commit_transaction()
        except OncelogError:
            self.end(call, Outcome.FAIL)
        else:
            self.end(call, Outcome.OK)
            if self.simulation.fences:
                self.world.violate("a fenced producer committed", f"{self.name} transaction {transaction}")


class WriterOverRestore(Writer):
    """A Writer whose zombies must fail only if the restore fences them."""

    fences = True

    async def commit_as_a_zombie(self, producer: AsyncProducer) -> None:
        if self.fences:
            await super().commit_as_a_zombie(producer)


class BackupSimulation(ClientSimulation):
    """A client simulation with a copy of the disk and its restore."""

    def __init__(self, world: World, kind: str, rng: Random) -> None:
        super().__init__(world, kind, rng.choice((1, 2)))
        self.rng = rng
        self.limit_s = LIMIT_SECONDS
        self.backup_s = rng.uniform(5.0, 30.0)
        self.restore_s = self.backup_s + rng.uniform(0.5, 30.0)
        self.restored = asyncio.Event()
        self.copied_us = self.restored_us = 0
        self.loses_power = kind == "power loss"
        self.fences = rng.random() < 0.75
        """True if the operator makes the first start fence all transactional producers."""
        self.settings: dict[str, object] = {
            "listeners": SERVERS,
            "num.partitions": self.partition_count,
            "log.segment.bytes": rng.choice((700, 3_000, 1 << 30)),
            "log.flush.interval.messages": 1 if self.loses_power else rng.choice((1, 1 << 40)),
            "log.flush.offset.checkpoint.interval.ms": rng.choice((2_000, 60_000)),
            "transaction.state.log.num.partitions": 2,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 3_000,
            "oncelog.transaction.version": rng.choice((0, 2, 2)),
            "offsets.topic.num.partitions": 2,
            "group.consumer.session.timeout.ms": 6_000,
            "group.consumer.heartbeat.interval.ms": 2_000,
        }
        self.broker = BrokerHost(world, self.settings)
        count = self.partition_count
        protocol = rng.choice(("classic", "consumer"))
        self.partitions = [
            TopicPartition(topic, n) for topic in (RECORDS, INWARD, OUTWARD, HELD) for n in range(count)
        ]
        writer = WriterOverRestore(world, "writer-0", INWARD, count, 14)
        writer.fences = self.fences
        self.senders = [
            Sender(world, "sender-0", RECORDS, count, 14),
            writer,
            SuccessiveProducers(world, "succession-0", self),
        ]
        self.copier = ConsumeTransformProduce(world, "copier-0", INWARD, OUTWARD, count, protocol)
        self.reader = Reader(world, "reader-0", self.partitions, "read_committed")
        for sender in self.senders:
            # The restored broker lacks what this client sent after the copy. So the broker may rightly refuse
            # the client's next batch as out of order.
            sender.keeps_producers = False
        self.first = [*self.senders, self.copier, self.reader]

    async def run(self) -> None:
        self.broker.start()
        for application in self.first:
            application.start()
        await asyncio.sleep(self.backup_s)
        copy = await self._copy()
        await asyncio.sleep(max(self.restore_s - self.world.now_us / 1e6, 0.1))
        await self._restore(copy)
        await self._until_done(self.senders)
        await self._until_copied()
        self.copier.stop_requested = self.reader.stop_requested = True
        await self._until_done(self.first)
        for tp, log in self._logs().items():
            # A producer that the copy does not know continues with its next sequence, so the audit finds a
            # gap. That is allowed here.
            check_log(self.world, tp, log, frozenset({FindingKind.SEQUENCE_GAP}))
        self.last = await self._read("last")
        self._check_restored()

    async def _copy(self) -> MemoryDisk:
        if self.kind == "stopped":
            await self.broker.stop()
        self.copied_us = self.world.now_us
        self.world.note("fault", f"the disk is copied ({self.kind})")
        disk = self.broker.disk
        rng = self.world.rng("copy")
        copied = disk.after_power_loss(rng) if self.loses_power else disk.after_kill()
        self.broker.start_if_down()
        return copied

    async def _restore(self, copy: MemoryDisk) -> None:
        if self.rng.random() < 0.5:
            await self.broker.stop()
        else:
            self.broker.kill()
        await asyncio.sleep(self.rng.uniform(0.0, 5.0))
        self.broker.replace_disk(copy)
        self.restored_us = self.world.now_us
        self.world.note("fault", f"the copy is restored, fencing: {self.fences}")
        usual = self.broker.settings
        self.broker.settings = BROKER.parse({**self.settings, "oncelog.fence.transactions": self.fences})
        self.broker.start()
        while self.broker.node is None:
            await asyncio.sleep(0.1)
        self.broker.settings = usual
        self.restored.set()

    async def _read(self, name: str) -> LastReader:
        reader = LastReader(self.world, name, self.partitions)
        reader.start()
        await self._until_done([reader])
        return reader

    async def _until_copied(self) -> None:
        for number in range(60):
            reader = await self._read(f"look-{number}")
            topics = [item.topic for call in reader.calls for item in call.items]
            if topics.count(INWARD) <= topics.count(OUTWARD):
                return
            await asyncio.sleep(2.0)
        self.world.violate("liveness", "not all is copied")

    def _check_restored(self) -> None:
        assert self.last is not None
        calls = sorted(
            (call for application in (*self.first, self.last) for call in application.calls),
            key=lambda call: call.begin,
        )
        operations = [call.operation(self.world.now_us) for call in calls]
        check_history(self.world, list(self._kept(operations)), self.last.name)
        if self.fences:
            check_copies(self.world, operations, self.last.name, INWARD, OUTWARD)

    def _kept(self, operations: list[Operation]) -> Iterator[Operation]:
        """Yield the operations, except those that the restore undoes: everything acknowledged or read since
        the copy.

        A consumer whose position is above the log end starts over, so the order of its polls is not checked.
        """
        there = {
            item.value for operation in operations if operation.process == "last" for item in operation.items
        }
        sent = [
            operation
            for operation in operations
            if operation.kind is Kind.SEND and self._is_undone(operation)
        ]
        gone = {item.value for sent_operation in sent for item in sent_operation.items} - there
        for number, operation in enumerate(operations):
            if operation.process == "succession-0" and not self.fences:
                # R260: without fencing, the broker may acknowledge a new instance's record as a duplicate of
                # an old instance's record, so the outcome is unknown.
                items = tuple(item._replace(offset=None) for item in operation.items)
                operation = replace(operation, outcome=Outcome.UNKNOWN, items=items)
            is_undone = self._is_undone(operation)
            if operation.kind is Kind.POLL and operation.process != "last":
                items = tuple(item for item in operation.items if item.value not in gone)
                if not is_undone:
                    yield replace(operation, session=number, items=items)
            elif is_undone and operation.kind is Kind.SEND:
                items = tuple(item._replace(offset=None) for item in operation.items)
                yield replace(operation, outcome=Outcome.UNKNOWN, items=items, transaction=None)
            elif is_undone:
                yield replace(operation, outcome=Outcome.UNKNOWN)
            else:
                yield operation

    def _is_undone(self, operation: Operation) -> bool:
        """Return True if the operation ended after the copy and began before the restore, which undoes it."""
        return operation.end > self.copied_us and operation.begin < self.restored_us


def run_restored_backup(seed: int) -> ClientResult:
    """Run a seed with a backup that is restored."""
    world = World(seed)
    rng = world.rng("backup")
    return run_client_simulation(seed, BackupSimulation(world, rng.choice(KINDS), rng), nullcontext())
