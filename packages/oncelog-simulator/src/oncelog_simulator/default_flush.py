"""Power losses with the default flush settings: unsynced data may be lost, and the clients keep running.

The broker leaves records, offsets and transaction decisions to the operating system, as Apache Kafka does by
default (no flush.messages). It loses its power repeatedly. Before each loss the simulation notes every
partition, and compares it with what the next start finds.

These rules are checked:

- The broker starts. All bytes below the recovery point are unchanged, and no log ends below it. No start
  deletes records, and a kill loses none.
- Each log is a prefix of its earlier content. So within one partition, a transaction with a commit marker is
  complete.
- The coordinators' state in memory matches their logs.
- An acknowledged record is at its offset, unless a later power loss took that offset. No record is stored
  twice. No refused record is stored.
- Transactions that began after the last loss are complete. Records of a transaction that no client committed
  are read only with transaction version 0, and only if a power loss came after the transaction began.
- A consumer whose committed offset is above the log end starts as auto.offset.reset says, or gets
  OffsetOutOfRange with "none". Then it continues. Producers continue, or end with a typed error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import NamedTuple

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.errors import OncelogError
from oncelog.log.partition import Partition
from oncelog.types import TopicPartition
from oncelog_simulator.backup import INWARD, RECORDS
from oncelog_simulator.checks import InvariantMonitor, batches_of
from oncelog_simulator.client_simulation import ClientResult, ClientSimulation, run_client_simulation
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application, LastReader, Sender
from oncelog_simulator.coordinator_state import metadata, metadata_differences
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.txn_clients import Writer
from oncelog_simulator.world import SERVERS, BrokerHost, World

LIMIT_SECONDS = 600.0
GROUP = "followers"


class Before(NamedTuple):
    """A partition as it was just before a kill or power loss.

    Everything below the offset `recovery_point` was synced. `batches` has the bytes of each batch by base
    offset.
    """

    recovery_point: int
    start_offset: int
    end_offset: int
    is_compacted: bool
    batches: dict[int, bytes]


class Lost(NamedTuple):
    """A power loss that removed the offsets from `first` onwards."""

    at_us: int
    tp: TopicPartition
    first: int


class WriterOverLoss(Writer):
    """A Writer whose zombies may commit, because a power loss may take the newer instance's epoch."""

    async def commit_as_a_zombie(self, producer: object) -> None:
        """Do nothing: the commit may succeed or fail."""


class CommittingReader(Application):
    """Consumers that run one after the other. Each starts at the offsets that the previous one committed."""

    def __init__(self, world: World, name: str, partitions: list[TopicPartition], reset: str) -> None:
        super().__init__(world, name)
        self.partitions, self.reset = partitions, reset
        self.stop_requested = False
        self.positions: dict[TopicPartition, int] = {}

    async def work(self) -> None:
        settings: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "group.id": GROUP + self.name,
            "auto.offset.reset": self.reset,
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "fetch.max.wait.ms": 500,
        }
        while not self.stop_requested:
            async with AsyncConsumer(settings) as consumer:
                consumer.assign(self.partitions)
                try:
                    await self._read_and_commit(consumer)
                except OncelogError as error:
                    # With auto.offset.reset=none, a missing committed offset is a MisuseError, and a
                    # committed offset above the log end is an OffsetOutOfRange.
                    self.world.note(self.name, f"begins again: {error!r}")
                    consumer.seek_to_beginning()
                    await self._step(consumer)

    async def _read_and_commit(self, consumer: AsyncConsumer) -> None:
        for _ in range(self.rng.randint(3, 10)):
            await self._step(consumer)
            await self.sleep_up_to(2.0)

    async def _step(self, consumer: AsyncConsumer) -> None:
        await consumer.poll(2.0, max_records=50)
        for tp in self.partitions:
            self.positions[tp] = await consumer.position(tp)
        await consumer.commit()


class Operator(Application):
    """Aborts transactions that no coordinator knows, because the power loss took the coordinator's
    records.
    """

    def __init__(
        self,
        world: World,
        name: str,
        partitions: list[TopicPartition],
        logs: Callable[[], dict[TopicPartition, Partition]],
    ) -> None:
        super().__init__(world, name)
        self.partitions, self.logs = partitions, logs

    async def work(self) -> None:
        # Within 40 s the coordinator has timed out every transaction that it knows.
        await asyncio.sleep(40.0)
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            for _ in range(20):
                logs = self.logs()
                if not any(logs[tp].open_transaction_count for tp in self.partitions if tp in logs):
                    return
                for held in await admin.find_hanging(older_than_ms=0):
                    self.world.note(self.name, f"aborts {held.opened}: {held.reason}")
                    await admin.abort_transaction(held.opened)
                await asyncio.sleep(1.0)
        self.world.violate("liveness", "a transaction stays open")


class DefaultFlushSimulation(ClientSimulation):
    """A client simulation with power losses."""

    def __init__(self, world: World, rng: Random) -> None:
        super().__init__(world, "unsynced", rng.choice((1, 2)))
        self.rng, self.limit_s = rng, LIMIT_SECONDS
        self.version = rng.choice((0, 2, 2))
        settings: dict[str, object] = {
            "listeners": SERVERS,
            "num.partitions": self.partition_count,
            "log.segment.bytes": rng.choice((500, 700, 3_000, 1 << 30)),
            "log.index.interval.bytes": rng.choice((100, 4_096)),
            "log.flush.offset.checkpoint.interval.ms": rng.choice((1_000, 5_000, 60_000)),
            "log.retention.bytes": rng.choice((-1, -1, 1_500)),
            "log.retention.check.interval.ms": 3_000,
            "log.cleaner.backoff.ms": 3_000,
            "transaction.state.log.num.partitions": 2,
            "transaction.state.log.segment.bytes": rng.choice((500, 1 << 20)),
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 3_000,
            "oncelog.transaction.version": self.version,
            "offsets.topic.num.partitions": 2,
            "offsets.topic.segment.bytes": rng.choice((500, 1 << 20)),
        }
        self.keeps_all = settings["log.retention.bytes"] == -1
        self.broker = BrokerHost(world, settings)
        self.monitor = InvariantMonitor(world)
        self.broker.before_exit, self.broker.on_recovered = self._ending, self._recovered
        count = self.partition_count
        self.partitions = [TopicPartition(topic, n) for topic in (RECORDS, INWARD) for n in range(count)]
        self.senders = [
            Sender(world, "sender-0", RECORDS, count, 14),
            Sender(world, "sender-1", RECORDS, count, 14),
            WriterOverLoss(world, "writer-0", INWARD, count, 14),
            WriterOverLoss(world, "writer-1", INWARD, count, 14),
        ]
        for sender in self.senders:
            sender.keeps_producers = False
        self.readers = [
            CommittingReader(world, f"follower-{reset}", self.partitions, reset)
            for reset in ("earliest", "latest", "none")
        ]
        self.first = [*self.senders, *self.readers]
        self.before: dict[TopicPartition, Before] = {}
        self.metadata: object = None
        self.is_whole = False
        """True after a kill between two writes, which must not lose anything."""
        self.lost: list[Lost] = []

    # Power losses

    def _ending(self, *, is_in_write: bool, lose_power: bool) -> None:
        self.before, self.metadata = {}, None
        node = self.broker.node
        if node is None:
            return
        self.is_whole = not is_in_write and not lose_power
        self.metadata = None if is_in_write else metadata(node)
        for tp, partition in node.log_manager.partitions.items():
            batches = {header.base_offset: bytes(data) for header, data in batches_of(partition)}
            point, end = partition.recovery_point, partition.log_end_offset
            start, is_compacted = partition.log_start_offset, partition.config.is_compacted
            self.before[tp] = Before(point, start, end, is_compacted, batches)

    def _recovered(self, node: BrokerState) -> None:
        self.monitor.replay(node)
        if self.metadata is not None:
            changes = metadata_differences(self.metadata, metadata(node), writes_failed=False)  # type: ignore[arg-type]
            for kind, text in changes:
                self.world.violate("the node's files changed with a restart", f"{kind}: {text}")
        for tp, before in self.before.items():
            partition = node.log_manager.partitions.get(tp)
            if partition is None:
                self.world.violate("a partition is lost", str(tp))
                continue
            end = self._check_prefix(tp, before, partition)
            if before.is_compacted or not before.batches:
                end = partition.log_end_offset
            if end < before.recovery_point:
                text = f"{tp} ends at {end}, {before.recovery_point} were synced"
                self.world.violate("what was synced is lost", text)
            # In a compacted log the first segment may be empty and have no file. The start then takes the
            # base offset of the next segment as the log start.
            first = (
                min(before.batches, default=before.end_offset) if before.is_compacted else before.start_offset
            )
            if partition.log_start_offset > first and (self.keeps_all or self.is_whole):
                text = f"{tp} starts at {partition.log_start_offset}, before it was {before.start_offset}"
                self.world.violate("a start deleted records", text)
            if end < before.end_offset and self.is_whole:
                text = f"{tp} ends at {end}, before it ended at {before.end_offset}"
                self.world.violate("a kill lost records", text)
            if end < before.end_offset:
                self.lost.append(Lost(self.world.now_us, tp, end))

    def _check_prefix(self, tp: TopicPartition, before: Before, partition: Partition) -> int:
        """Check that the log begins with the batches of `before`. Return the offset where they end.

        After them only markers that the start wrote may follow.
        """
        there = {header.base_offset: (header, bytes(data)) for header, data in batches_of(partition)}
        end, is_over = partition.log_start_offset, False
        for offset, (header, data) in sorted(there.items()):
            is_same = before.batches.get(offset) == data
            is_over = is_over or not is_same
            if not is_over:
                end = header.last_offset + 1
            elif not header.is_control and not before.is_compacted:
                self.world.violate("a log is no prefix of what it was", f"{tp} {offset}")
        for offset in before.batches:
            if partition.log_start_offset <= offset < end and offset not in there and not before.is_compacted:
                self.world.violate("a log is no prefix of what it was", f"{tp} lacks {offset}")
        return end

    async def run(self) -> None:
        self.broker.start()
        for application in self.first:
            application.start()
        until_s = self.rng.uniform(20.0, 60.0)
        while self.world.now_us < until_s * 1e6:
            await asyncio.sleep(self.rng.uniform(0.5, 12.0))
            await self._lose_power()
        await self._until_done(self.senders)
        operator = Operator(self.world, "operator", self.partitions, self._logs)
        operator.start()
        await self._until_done([operator])
        await self._until_committed_to_end()
        for reader in self.readers:
            reader.stop_requested = True
        await self._until_done(self.first)
        self.monitor.replay(self.node)
        self.last = await self._read("last")
        self._check_sends()

    async def _lose_power(self) -> None:
        how = self.rng.choice(("power", "power", "in a write", "kill"))
        if how == "in a write":
            self.broker.crash_after(self.rng.randint(0, 3_000), lose_power=True)
            await asyncio.sleep(1.0)
            self.broker.cancel_crash()
        else:
            self.broker.kill(lose_power=how == "power")
        await asyncio.sleep(self.rng.uniform(0.0, 3.0))
        self.broker.start_if_down()

    async def _read(self, name: str) -> LastReader:
        reader = LastReader(self.world, name, self.partitions)
        reader.start()
        await self._until_done([reader])
        return reader

    async def _until_committed_to_end(self) -> None:
        for _ in range(100):
            logs = self._logs()
            ends = {tp: logs[tp].log_end_offset for tp in self.partitions if tp in logs}
            if all(reader.positions.get(tp) == end for reader in self.readers for tp, end in ends.items()):
                return
            await asyncio.sleep(2.0)
        for reader in self.readers:
            if any(reader.positions.get(tp) != end for tp, end in ends.items()):
                self.world.violate("liveness", f"{reader.name} is at {reader.positions}, the ends are {ends}")

    # Checks at the end

    def _check_sends(self) -> None:
        assert self.last is not None
        there: dict[object, Item] = {}
        for call in self.last.calls:
            for item in call.items:
                if item.value in there:
                    self.world.violate("twice in the log", f"{there[item.value]} and {item}")
                there[item.value] = item
        starts = {tp: log.log_start_offset for tp, log in self._logs().items()}
        last_loss_us = max((lost.at_us for lost in self.lost), default=0)
        for sender in self.senders:
            commits = [call for call in sender.calls if call.kind is Kind.COMMIT]
            requested = {call.transaction for call in commits}
            sure = {call.transaction for call in commits if call.outcome is Outcome.OK}
            begun_us: dict[object, int] = {}
            for call in sender.calls:
                if call.kind is not Kind.SEND:
                    continue
                (item,) = call.items
                read_item = there.get(item.value)
                if call.outcome is Outcome.FAIL and read_item is not None:
                    self.world.violate("refused, and yet stored", f"{read_item}")
                is_kept = call.outcome is Outcome.OK and not self._is_lost(item, call.end or 0)
                if call.transaction is not None:
                    first_us = begun_us.setdefault(call.transaction, call.begin)
                    is_refuted = call.transaction not in requested and not self._may_be_mixed(item, first_us)
                    if is_refuted and read_item is not None:
                        self.world.violate("read what was not committed", f"{read_item}")
                    # A transaction that was open during a power loss may be only partly stored, so it is not
                    # checked.
                    is_kept = is_kept and call.transaction in sure and first_us > last_loss_us
                below = starts.get(TopicPartition(item.topic, item.partition), 0)
                if is_kept and (item.offset or 0) >= below and read_item != item:
                    self.world.violate("acknowledged, then lost or elsewhere", f"{item}: {read_item}")

    def _may_be_mixed(self, item: Item, begun_us: int) -> bool:
        """Return True if a later transaction's marker may have ended the transaction begun at `begun_us`.

        With transaction version 0, all transactions of a producer have the same epoch. If a power loss
        removes the marker of a transaction, the marker of the producer's next transaction ends both.
        """
        return self.version == 0 and any(lost.at_us >= begun_us for lost in self.lost)

    def _is_lost(self, item: Item, acknowledged_us: int) -> bool:
        """Return True if a power loss after the acknowledgement took the record's offset."""
        tp = TopicPartition(item.topic, item.partition)
        return any(
            lost.tp == tp and lost.first <= (item.offset or 0) and lost.at_us >= acknowledged_us
            for lost in self.lost
        )


def run_default_flush(seed: int) -> ClientResult:
    """Run a seed of power losses with the default flush settings."""
    world = World(seed)
    return run_client_simulation(seed, DefaultFlushSimulation(world, world.rng("unsynced")), nullcontext())
