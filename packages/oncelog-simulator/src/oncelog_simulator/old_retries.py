"""Retries of batches that were acknowledged long ago, on a compacted topic whose producers often go silent.

Producers write few keys into small segments, so compaction soon removes their records. DeleteRecords and
retention remove the rest. The disk refuses snapshots for a while, flush.messages changes, and the broker is
stopped, killed or loses its power between any two of these events, also repeatedly during a start. While it
is down, the newest snapshot of a partition may be damaged or lost.

Every producer remembers its acknowledged batches and sends some of them again, byte for byte, until the end.
A ledger (batch_ledger.py) notes what the broker stored, and what power losses took. These rules are checked:

- No surviving batch is stored a second time, and no batch is stored behind a gap.
- An acknowledgement of an old batch has the batch's offset.
- A producer's newest surviving batch is recognised whenever it is sent again. Older batches may be refused,
  and so may batches of transactions.
- An open transaction stays open until its marker is in the log.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, NamedTuple

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import ConfigResource, NewTopic
from oncelog.errors import BrokerError, DuplicateSequenceNumber, StorageError, error_for_code
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.partition import Partition
from oncelog.runtime.system import current
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.messages import AddPartitionsToTxnRequest, EndTxnRequest, ProduceRequest
from oncelog_simulator.batch_ledger import BatchKey, Fate, Ledger, keys_of
from oncelog_simulator.client_simulation import ClientResult, ClientSimulation, run_client_simulation
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.disk_rot import Rot
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.jobs import draw_jobs
from oncelog_simulator.wire_clients import WireClient
from oncelog_simulator.workloads import create_topic
from oncelog_simulator.world import SERVERS, BrokerHost, World

TOPIC = "remembered"
KEY_COUNT = 3
LIMIT_SECONDS = 900.0
POLICIES = ("compact", "compact", "compact,delete", "delete")
NEVER = 1 << 40
FLUSHES = (1, 4, NEVER, NEVER)
"""Values of flush.messages."""
MAX_START_STEPS = 1_000
OPERATIONS = ("write", "sync", "create", "rename", "remove")
"""Kinds of operations at which a start may crash."""


@dataclass(eq=False)
class SentBatch:
    """A batch with the bytes of all its attempts. `count` is its number of records."""

    key: BatchKey
    data: bytes
    count: int


class Repeater(WireClient):
    """A producer that remembers its acknowledged batches and sends some of them again.

    It often continues with a new producer id, so that the old one is silent from then on. Each subclass or
    instance sends one request at a time.
    """

    client_id: ClassVar[str] = "repeater"
    transactional_id: str | None = None
    produce_version = 12

    def __init__(self, world: World, name: str, ledger: Ledger, rest_s: float) -> None:
        super().__init__(world, name)
        self.ledger, self.rest_s = ledger, rest_s
        self.partitions = list(ledger.partitions)
        self.new_id_chance = self.rng.choice((0.05, 0.2))
        self.producer: tuple[int, int] | None = None
        """The current producer id and epoch; None if the next batch needs a new one."""
        self.acknowledged: list[SentBatch] = []
        self.stop_requested = False
        self._next_sequences: dict[TopicPartition, int] = {}
        self._value_count = 0

    async def work(self) -> None:
        while not self.stop_requested:
            if self.rng.random() < 0.4:
                await self.repeat_some(self.rng.randint(1, 4))
            else:
                await self.send_some()
            await self.sleep_up_to(self.rest_s)
        await self.repeat_all()

    async def send_some(self) -> None:
        """Send a few new batches."""
        if self.producer is None or self.rng.random() < self.new_id_chance:
            self.take(*await self.new_producer_id(None, 5))
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            if self.producer is not None:
                await self.send_new(self.rng.choice(self.partitions))

    def take(self, producer_id: int, epoch: int) -> None:
        """Continue with a producer id and epoch. Sequences begin at 0 if one of them is new."""
        if self.producer != (producer_id, epoch):
            self.producer = producer_id, epoch
            self._next_sequences.clear()
        if self.transactional_id is None:
            self.ledger.idempotent.add(producer_id)

    async def send_new(self, tp: TopicPartition) -> None:
        """Send a new batch. If it is refused, the next batch gets a new producer id or epoch."""
        assert self.producer is not None
        sequence, count = self._next_sequences.get(tp, 0), self.rng.choice((1, 1, 3))
        time_ms, records, items = current().wall_ns() // 1_000_000, [], []
        for _ in range(count):
            self._value_count += 1
            value = b"%s-%d" % (self.name.encode(), self._value_count)
            items.append(Item(*tp, None, value))
            content = value if self.rng.random() < 0.85 else None
            records.append((time_ms, b"k%d" % self.rng.randrange(KEY_COUNT), content, ()))
        data = build_batch(
            records,  # type: ignore[arg-type]
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            base_sequence=sequence,
            is_transactional=self.transactional_id is not None,
        )
        batch = SentBatch(BatchKey(tp, *self.producer, sequence), bytes(data), count)
        call = self.begin(Kind.SEND, items)
        error = await self.deliver(batch)
        self.end(call, Outcome.OK if error is None else Outcome.FAIL)
        if error is None:
            self.acknowledged.append(batch)
            self._next_sequences[tp] = sequence + count
        else:
            self.world.note(self.name, f"needs a new producer id: {error!r}")
            self.producer = None

    async def deliver(self, batch: SentBatch) -> BrokerError | None:
        """Send a batch until the broker accepts or refuses it, and check the answer. Return the refusal."""
        key, must_be_known = batch.key, self.ledger.must_be_known(batch.key)
        part = ProduceRequest.PartitionProduceData(index=key.tp.partition, records=batch.data)
        topic = ProduceRequest.TopicProduceData(name=key.tp.topic, partition_data=[part])
        message = ProduceRequest(
            transactional_id=self.transactional_id, acks=-1, timeout_ms=2_000, topic_data=[topic]
        )
        while True:
            response = await self.answer_to(message, self.produce_version)
            (answer,) = response.responses[0].partition_responses
            error = error_for_code(answer.error_code) if answer.error_code else None
            if error is None or not error.retriable:
                break
            await asyncio.sleep(0.2)
        if error is None:
            entry = self.ledger.entry(key)
            if entry is None or answer.base_offset not in entry.offsets:
                text = f"{self.name} {key} at {answer.base_offset}: {entry}"
                self.world.violate("acknowledged, then lost or elsewhere", text)
        elif isinstance(error, DuplicateSequenceNumber):
            return None
        elif must_be_known and self.ledger.must_be_known(key):
            text = f"{self.name} {key} {self.ledger.entry(key)}: {error!r}"
            self.world.violate("a retry was not recognised", text)
        return error

    # Retries

    async def repeat_some(self, count: int) -> None:
        """Send some acknowledged batches again, most of them the newest of a producer id."""
        for _ in range(count):
            newest = self._newest()
            batches = newest if self.rng.random() < 0.7 else self.acknowledged
            if batches:
                await self.deliver(self.rng.choice(batches))

    async def repeat_all(self) -> None:
        """Send the newest surviving batch of each producer id in each partition again, and some others."""
        for batch in [*self._newest(), *self.rng.sample(self.acknowledged, min(5, len(self.acknowledged)))]:
            await self.deliver(batch)

    def _newest(self) -> list[SentBatch]:
        """Return the newest batch of each producer id in each partition, without those that are gone."""
        newest = {}
        for batch in self.acknowledged:
            entry = self.ledger.entry(batch.key)
            if entry is not None and entry.fate is not Fate.GONE:
                newest[batch.key.tp, batch.key.producer_id] = batch
        return list(newest.values())


class TransactionalRepeater(Repeater):
    """A producer that writes transactions and sends batches of earlier ones again."""

    def __init__(self, world: World, name: str, ledger: Ledger, rest_s: float, *, is_classic: bool) -> None:
        super().__init__(world, name, ledger, rest_s)
        self.transactional_id, self.is_classic = name, is_classic
        self.produce_version = 7 if is_classic else 12

    async def send_some(self) -> None:
        """Run a transaction. If anything is refused, the next one begins with a new epoch."""
        if self.producer is None or self.rng.random() < self.new_id_chance:
            self.take(*await self.new_producer_id(self.name, 2 if self.is_classic else 5))
        partitions = [self.rng.choice(self.partitions) for _ in range(self.rng.randint(1, 3))]
        try:
            if self.is_classic:
                await self._add(sorted({tp.partition for tp in partitions}))
            for tp in partitions:
                if self.producer is None:
                    return
                await self.send_new(tp)
                if self.rng.random() < 0.2:
                    await self.repeat_some(1)
            # Some transactions stay open for longer than their time-out.
            await self.sleep_up_to(self.rng.choice((0.1, 0.1, 2.0, 25.0)))
            await self._end(is_commit=self.rng.random() < 0.7)
        except BrokerError as error:
            self.world.note(self.name, f"needs a new epoch: {error!r}")
            self.producer = None

    async def repeat_all(self) -> None:
        await super().repeat_all()
        # Abort a transaction that is still open.
        self.take(*await self.new_producer_id(self.name, 2 if self.is_classic else 5))

    async def _add(self, partitions: list[int]) -> None:
        assert self.producer is not None
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=TOPIC, partitions=partitions)
        message = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.producer[0],
            v3_and_below_producer_epoch=self.producer[1],
            v3_and_below_topics=[topic],
        )
        await self.ask(message, 2)

    async def _end(self, *, is_commit: bool) -> None:
        if self.producer is None:
            return
        message = EndTxnRequest(
            transactional_id=self.name,
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            committed=is_commit,
        )
        response = await self.ask(message, 3 if self.is_classic else 5)
        if not self.is_classic:
            self.take(response.producer_id, response.producer_epoch)


class Administrator(Application):
    """Creates the topic, deletes records and changes the topic's settings until `stop_requested` is set."""

    def __init__(
        self,
        world: World,
        partitions: list[TopicPartition],
        configs: dict[str, object],
        deletes: int,
        lags: int,
    ) -> None:
        super().__init__(world, "administrator")
        self.partitions, self.configs = partitions, configs
        self.stop_requested = False
        self.actions = (self._delete, self._alter_lag, self._alter_flush, self._alter_policy)
        self.weights = (deletes, lags, self.rng.choice((0, 0, 1)), self.rng.choice((0, 0, 1)))
        self.rest_s = self.rng.choice((4.0, 15.0))

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(
                admin, NewTopic(TOPIC, num_partitions=len(self.partitions), configs=self.configs)
            )
            while not self.stop_requested and any(self.weights):
                await self.sleep_up_to(self.rest_s)
                (action,) = self.rng.choices(self.actions, self.weights)
                await action(admin)

    async def _delete(self, admin: AsyncAdmin) -> None:
        tp = self.rng.choice(self.partitions)
        end = (await admin.list_offsets({tp: "latest"}))[tp].offset or 0
        offset = end if self.rng.random() < 0.5 else self.rng.randint(0, end)
        outcome = (await admin.delete_records({tp: offset}))[tp]
        self.world.note(self.name, f"{tp} starts at {outcome.low_watermark}")

    async def _alter_lag(self, admin: AsyncAdmin) -> None:
        """Let compaction wait, or begin at a moment that has nothing to do with the last roll and flush."""
        await self._alter(admin, {"min.compaction.lag.ms": self.rng.choice((0, NEVER))})

    async def _alter_flush(self, admin: AsyncAdmin) -> None:
        await self._alter(admin, {"flush.messages": self.rng.choice(FLUSHES)})

    async def _alter_policy(self, admin: AsyncAdmin) -> None:
        await self._alter(admin, {"cleanup.policy": self.rng.choice(POLICIES)})

    async def _alter(self, admin: AsyncAdmin, configs: dict[str, object]) -> None:
        await admin.alter_configs({ConfigResource("topic", TOPIC): configs})
        self.world.note(self.name, f"sets {configs}")


class Focus(NamedTuple):
    """A seed draws from these values, so that rare orders of events are frequent in some seeds.

    - `policies`, `flushes`: values of cleanup.policy and flush.messages when the topic is created.
    - `segment_bytes`, `checkpoint_ms`, `backoff_ms`, `lag_ms`: broker settings. The last two are those of the
      cleaner.
    - `deletes`, `lags`: how often the administrator deletes records, and how often it lets compaction wait or
      begin, compared with its other changes.
    - `refuses`, `ends`: how often the disk refuses snapshots, compared with how often the broker ends.
    - `refused_s`: the longest time in seconds for which the disk refuses snapshots.
    - `again_chances`: how often the broker ends again right after a start.
    - `moment`: a function that returns a state of a partition. Half of the ends follow a change of it.
    """

    policies: tuple[str, ...]
    flushes: tuple[int, ...]
    segment_bytes: tuple[int, ...]
    checkpoint_ms: tuple[int, ...]
    backoff_ms: tuple[int, ...]
    lag_ms: tuple[int, ...]
    deletes: tuple[int, ...]
    lags: int
    refuses: tuple[int, ...]
    ends: tuple[int, ...]
    refused_s: tuple[float, ...]
    again_chances: tuple[float, ...]
    moment: Callable[[Partition], object]


VARIED = Focus(
    policies=("compact", "compact,delete", "delete"),
    flushes=(1, 4, NEVER),
    segment_bytes=(250, 500, 1_000, 3_000),
    checkpoint_ms=(1_000, 5_000, 20_000),
    backoff_ms=(300, 1_000, 3_000),
    lag_ms=(0, 2_000),
    deletes=(0, 1, 3),
    lags=1,
    refuses=(0, 2, 4),
    ends=(1, 3),
    refused_s=(1.0, 12.0),
    again_chances=(0.0, 0.3),
    moment=lambda partition: partition.segment_count,
)
COMPACTED = Focus(
    policies=("compact",),
    flushes=(NEVER,),
    segment_bytes=(500, 1_000, 2_000),
    checkpoint_ms=(5_000, 10_000),
    backoff_ms=(300,),
    lag_ms=(2_000, 4_000),
    deletes=(0,),
    lags=0,
    refuses=(8,),
    ends=(1,),
    refused_s=(2.0,),
    again_chances=(0.0,),
    moment=lambda partition: partition.cleaner.cleaned_to,
)
"""Compaction seconds after the last roll and flush. By then the producers have newer batches that are not
synced, and the checkpoint has an older recovery point.
"""
DELETED = Focus(
    policies=("delete",),
    flushes=(NEVER,),
    segment_bytes=(250, 500),
    checkpoint_ms=(5_000, 20_000),
    backoff_ms=(3_000,),
    lag_ms=(0,),
    deletes=(9,),
    lags=0,
    refuses=(1, 4),
    ends=(1, 3),
    refused_s=(1.0, 3.0),
    again_chances=(0.3, 0.7),
    moment=lambda partition: partition.log_start_offset,
)
"""Deletion of unsynced segments, and power losses in quick succession."""
FOCUSES = (VARIED, COMPACTED, DELETED)


def draw_broker_settings(rng: Random, focus: Focus) -> dict[str, object]:
    """Draw the broker's settings. Everything but the topic is synced before it is acknowledged."""
    return {
        "listeners": SERVERS,
        "log.segment.bytes": rng.choice(focus.segment_bytes),
        "log.index.interval.bytes": rng.choice((100, 4_096)),
        "log.flush.interval.messages": 1,
        "log.flush.offset.checkpoint.interval.ms": rng.choice(focus.checkpoint_ms),
        "log.retention.check.interval.ms": 3_000,
        "log.cleaner.backoff.ms": rng.choice(focus.backoff_ms),
        "log.cleaner.min.cleanable.ratio": rng.choice((0.0, 0.3)),
        "log.cleaner.min.compaction.lag.ms": rng.choice(focus.lag_ms),
        "log.cleaner.delete.retention.ms": rng.choice((500, 10_000)),
        "transaction.state.log.num.partitions": 1,
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 3_000,
        "offsets.topic.num.partitions": 1,
        "oncelog.transaction.version": rng.choice((0, 2, 2)),
    }


def draw_retry_limits(rng: Random) -> Limits:
    """Draw the broker's limits. In some seeds snapshots are also taken between two rolls."""
    usual = DEFAULT_LIMITS
    return replace(
        usual,
        snapshot_every_bytes=rng.choice((usual.snapshot_every_bytes,) * 3 + (1, 300)),
        max_drops_per_step=rng.choice((usual.max_drops_per_step, 1)),
    )


class OldRetriesSimulation(ClientSimulation):
    """A client simulation with retries of old batches.

    Each seed draws which events it has and how often, so that some seeds have few kinds of events.
    """

    def __init__(self, world: World, rng: Random) -> None:
        super().__init__(world, "retries", rng.choice((1, 1, 2)))
        self.rng, self.limit_s = rng, LIMIT_SECONDS
        world.loop.jobs.settings = draw_jobs(world.rng("jobs of the loop"))
        focus = rng.choice(FOCUSES)
        settings = draw_broker_settings(rng, focus)
        is_classic = settings["oncelog.transaction.version"] == 0 or rng.random() < 0.2
        self.broker = BrokerHost(world, settings, draw_retry_limits(rng))
        self.broker.before_exit, self.broker.on_recovered = self._ending, self._recovered
        self.partitions = [TopicPartition(TOPIC, number) for number in range(self.partition_count)]
        self.ledger = Ledger(world, lambda: self.node.log_manager.partitions, self.partitions)
        self.broker.on_stored, self.broker.may_refuse = self.ledger.stored, self._may_refuse
        configs: dict[str, object] = {
            "cleanup.policy": rng.choice(focus.policies),
            "flush.messages": rng.choice(focus.flushes),
            "retention.bytes": rng.choice((-1, -1, 1_000)),
        }
        rests = (2.0, 5.0, 10.0)
        self.repeaters = [
            *(
                Repeater(world, f"repeater-{n}", self.ledger, rng.choice(rests))
                for n in range(rng.choice((3, 5)))
            ),
            *(
                TransactionalRepeater(
                    world, f"writer-{n}", self.ledger, rng.choice(rests), is_classic=is_classic
                )
                for n in range(rng.choice((0, 1, 2)))
            ),
        ]
        self.administrator = Administrator(
            world, self.partitions, configs, rng.choice(focus.deletes), focus.lags
        )
        self.first = [self.administrator, *self.repeaters]
        self.rest_s = rng.choice((2.0, 5.0))
        self.actions = (self._refuse_snapshots, self._fill_disk, self._end_broker)
        self.weights = (rng.choice(focus.refuses), rng.choice((0, 0, 1)), rng.choice(focus.ends))
        self.refused_s = rng.choice(focus.refused_s)
        self.again_chance, self.moment = rng.choice(focus.again_chances), focus.moment
        self.ends = ("power", "power in a write", "kill", "kill in a write", "stop")
        self.end_weights = [rng.choice((2, 4)), *(rng.choice((0, 0, 1)) for _ in self.ends[1:])]
        self.damage_chance = rng.choice((0.0, 0.0, 0.3))
        self.start_crash_chance = rng.choice((0.0, 0.3, 0.6))
        self._refused_until_us = 0

    # Notes for the ledger

    def _ending(self, *, is_in_write: bool, lose_power: bool) -> None:
        if self.broker.node is not None:
            self.ledger.ending()
        self.ledger.ended(lose_power=lose_power)

    def _recovered(self, node: BrokerState) -> None:
        self.monitor.replay(node)
        self.ledger.recovered(node.log_manager.partitions)

    # Events

    async def run(self) -> None:
        self.broker.start()
        for application in self.first:
            application.start()
        until_s = self.rng.uniform(25.0, 75.0)
        while self.world.now_us < until_s * 1e6:
            await asyncio.sleep(self.rng.uniform(0.1, self.rest_s))
            (action,) = self.rng.choices(self.actions, self.weights)
            await action()
        await self._settle()
        for lose_power in (False, True):
            self.broker.kill(lose_power=lose_power)
            self.broker.start_if_down()
            await self._until_up()
            await self._repeat_all()
        self._check_logs()

    async def _settle(self) -> None:
        """End all faults, and wait until all applications have ended."""
        self._refused_until_us = 0
        self.broker.disk.errors.clear()
        self.broker.disk.capacity_bytes = None
        self.administrator.stop_requested = True
        for repeater in self.repeaters:
            repeater.stop_requested = True
        await self._until_done(self.first)

    async def _repeat_all(self) -> None:
        for repeater in self.repeaters:
            repeater.is_done = False
            repeater.wire = None
            repeater.start()
        await self._until_done(self.repeaters)

    async def _refuse_snapshots(self) -> None:
        """Let the disk refuse snapshots of producers for a while, as a disk does that is almost full."""
        span_s = self.rng.uniform(0.1, self.refused_s)
        self._refused_until_us = self.world.now_us + int(span_s * 1e6)
        self._apply_refusal()
        self.world.note("fault", f"snapshots are refused for {span_s:.1f} s")
        self.world.call_later(span_s, self._end_refusal)

    def _apply_refusal(self) -> None:
        if self.world.now_us < self._refused_until_us:
            self.broker.disk.errors["write", ".tmp"] = errno.ENOSPC

    def _end_refusal(self) -> None:
        if self.world.now_us >= self._refused_until_us:
            self.broker.disk.errors.pop(("write", ".tmp"), None)

    async def _fill_disk(self) -> None:
        disk = self.broker.disk
        disk.capacity_bytes = disk.used_bytes() + self.rng.randint(0, 2_000)
        self.world.note("fault", f"the disk is full at {disk.capacity_bytes} bytes")
        await asyncio.sleep(self.rng.uniform(0.5, 5.0))
        disk.capacity_bytes = self.broker.disk.capacity_bytes = None

    async def _end_broker(self) -> None:
        await self._until_moment()
        (how,) = self.rng.choices(self.ends, self.end_weights)
        lose_power = how.startswith("power")
        if how == "stop":
            await self.broker.stop()
        elif how.endswith("in a write"):
            self.broker.crash_after(self.rng.randint(0, 3_000), lose_power=lose_power)
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            self.broker.cancel_crash()
        else:
            self.broker.kill(lose_power=lose_power)
        if self.broker.is_up:
            return  # the broker has written less than drawn
        if self.rng.random() < self.damage_chance:
            self._damage_snapshot()
        await asyncio.sleep(self.rng.uniform(0.0, 2.0))
        while self.rng.random() < self.start_crash_chance:
            await self._crash_in_start()
        self._start()
        await self._until_up()
        if self.rng.random() < self.again_chance:
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))
            await self._end_broker()

    async def _until_moment(self) -> None:
        """In some cases, wait until a log is compacted, gets a segment or loses one, or for 8 s."""
        if self.rng.random() < 0.5:
            return
        before, limit_us = self._states(), self.world.now_us + 8_000_000
        while self._states() == before and self.world.now_us < limit_us:
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0.0, 1.0))))

    def _states(self) -> list[object]:
        logs = self.broker.node.log_manager.partitions if self.broker.node is not None else {}
        return [self.moment(logs[tp]) for tp in self.partitions if tp in logs]

    def _start(self) -> None:
        self.broker.start_if_down()
        self._apply_refusal()

    async def _crash_in_start(self) -> None:
        """Start the broker, and crash it before a drawn operation or byte, or at most 2 s later."""
        self._start()
        lose_power = self.rng.random() < 0.7
        if self.rng.random() < 0.6:
            kind, count = self.rng.choice(OPERATIONS), self.rng.randrange(15)
            self.broker.crash_after_operations(count, kind, lose_power=lose_power)
        else:
            steps = self.rng.randrange(self.rng.choice((30, 300, MAX_START_STEPS)))
            self.broker.crash_after(steps, lose_power=lose_power)
        limit_us = self.world.now_us + 2_000_000
        while self.broker.is_up and not self.broker.is_refused and self.world.now_us < limit_us:
            await asyncio.sleep(0.1)
        self.broker.cancel_crash()
        self.broker.is_refused = False
        self.broker.kill(lose_power=lose_power)

    async def _until_up(self) -> None:
        while self.broker.node is None or self.broker.running is None:
            if self.broker.is_refused:
                self._make_room()
            await asyncio.sleep(0.1)

    def _may_refuse(self, error: Exception) -> bool:
        """Return True if a start may fail with this error, because the disk refuses snapshots."""
        is_full = ("write", ".tmp") in self.broker.disk.errors
        return is_full and isinstance(error, StorageError) and "make room" in str(error)

    def _make_room(self) -> None:
        """Make room on the disk and start the broker, as an operator does after a refused start."""
        self.broker.is_refused, self._refused_until_us = False, 0
        self.broker.kill()
        self.broker.start_if_down()

    def _damage_snapshot(self) -> None:
        """Damage or remove the newest snapshot of a partition while the broker is down."""
        tp, disk = self.rng.choice(self.partitions), self.broker.disk
        disk.release()
        directory = f"{tp.topic}-{tp.partition}"
        names = disk.list(directory) if disk.is_directory(directory) else []
        names = [name for name in names if name.endswith((".snapshot", ".producers"))]
        if not names:
            return
        newest = max(name.partition(".")[0] for name in names)
        path = f"{directory}/{self.rng.choice([name for name in names if name.startswith(newest)])}"
        size, rot = len(disk.read(path)), Rot(path)
        if size and self.rng.random() < 0.6:
            bit = self.rng.choice((None, self.rng.randrange(8)))
            rot = Rot(path, self.rng.randrange(size), bit)
        rot.apply(disk)
        self.ledger.damaged(tp)
        self.world.note("fault", str(rot))

    def _check_logs(self) -> None:
        for tp in self.partitions:
            counts = Counter(key for key, _ in keys_of(tp, self.node.log_manager.partitions[tp]))
            for key in (key for key, count in counts.items() if count > 1):
                self.world.violate("twice in the log", f"{key}")


def run_old_retries(seed: int) -> ClientResult:
    """Run a seed with retries of old batches."""
    world = World(seed)
    return run_client_simulation(seed, OldRetriesSimulation(world, world.rng("retries")), nullcontext())
