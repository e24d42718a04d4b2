"""Loops of `oncelog.aio.process` copy a topic while they are stopped, cancelled and killed.

A seed draws the group protocol, the limits of a transaction, transforms that raise, and when a loop is
stopped or cancelled. Half of the seeds also have faults (`client_simulation.py`). The history has the polls,
records, commits and aborts of each loop, and every record must be copied once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

from oncelog.client.process.aio import AsyncLoopIO
from oncelog.client.process.core import ProcessLoop
from oncelog.client.process.loop_plan import LoopOptions, LoopPlan, plan_of
from oncelog.errors import OncelogError, TimedOut
from oncelog.types import ProducerRecord, Record, TopicPartition
from oncelog_simulator.asyncio_clients import OUTWARD, CopyWaiter
from oncelog_simulator.checks import check_copies
from oncelog_simulator.client_simulation import (
    TOPIC,
    ClientResult,
    ClientSimulation,
    check_error,
    run_client_simulation,
    time_limit,
)
from oncelog_simulator.clients import Call
from oncelog_simulator.history.check import Kind, Outcome
from oncelog_simulator.txn_clients import GROUP, ConsumeTransformProduce, Writer
from oncelog_simulator.world import World

FAILURE_CHANCE = 0.15
"""Probability that one call of the transform raises."""
STOP_SECONDS = 40.0
"""Seconds within which a loop ends after a stop or a cancellation."""


class LoopCopier(ConsumeTransformProduce):
    """A copier that runs the library's processing loop, and starts a new loop when one has ended."""

    async def work(self) -> None:
        while not self.stop_requested:
            loop = self.new_loop()
            running = asyncio.ensure_future(loop.run())
            await asyncio.wait({running}, timeout=self.rng.uniform(1.0, 30.0))
            if not running.done():
                loop.stop() if self.rng.random() < 0.5 else running.cancel()
            with time_limit(self, "the end of a loop", STOP_SECONDS, STOP_SECONDS):
                await asyncio.wait({running})
            if not running.cancelled() and (error := running.exception()) is not None:
                check_error(self, "process()", error if isinstance(error, Exception) else RuntimeError(error))
                await self.sleep_up_to(1.0)

    def new_loop(self) -> ProcessLoop:
        given = {"group.id", "transactional.id"}
        config = {"group.instance.id": None, **self.settings, **self.reading}
        options = LoopOptions(
            self.source,
            GROUP,
            self.name,
            max_attempts=20,
            max_records=self.rng.randint(1, 20),
            commit_interval_ms=self.rng.choice((0, 100, 3_000)),
            has_state=self.rng.random() < 0.5,
        )
        plan = plan_of(options, {key: value for key, value in config.items() if key not in given}, {})
        return RecordedLoop(plan, RecordedIO(plan, self), self)

    def transform(self, record: Record) -> ProducerRecord:
        if self.rng.random() < FAILURE_CHANCE:
            raise ValueError("drawn")
        value = (record.value or b"") + f">{self.name}.{self.transaction}".encode()
        return ProducerRecord(self.topic, value, partition=self.rng.randrange(self.partitions))


class RecordedLoop(ProcessLoop):
    """A loop whose rebalances begin a new session of the history."""

    def __init__(self, plan: LoopPlan, io: RecordedIO, copier: LoopCopier) -> None:
        super().__init__(plan, io)
        self._copier = copier

    async def assigned(self, partitions: list[TopicPartition]) -> None:
        await super().assigned(partitions)
        self._copier.session += 1

    async def revoked(self, partitions: list[TopicPartition]) -> None:
        await super().revoked(partitions)
        self._copier.session += 1

    async def lost(self, partitions: list[TopicPartition]) -> None:
        await super().lost(partitions)
        self._copier.session += 1


class RecordedIO(AsyncLoopIO):
    """The clients of a loop, whose operations are noted in the history."""

    def __init__(self, plan: LoopPlan, copier: LoopCopier) -> None:
        super().__init__(plan, copier.transform, lambda partitions: None)
        self._copier = copier
        self._ending: Call | None = None
        """The call of a commit that raised an error. Its outcome is FAIL as soon as the transaction is
        aborted.
        """
        self._is_open = False

    async def open_producer(self) -> None:
        self._copier.session += 1
        self._is_open, self._ending = False, None
        await super().open_producer()

    async def poll(self, timeout_s: float, max_records: int) -> list[Record]:
        copier = self._copier
        call = copier.begin(Kind.POLL)
        try:
            records = await super().poll(timeout_s, max_records)
        except OncelogError:
            copier.calls.remove(call)
            raise
        if not records:
            copier.calls.remove(call)
            return records
        call.transaction, call.session = copier.transaction + (not self._is_open), copier.session
        copier.end(call, Outcome.OK, copier.items_of(records))
        return records

    async def begin(self) -> None:
        self._copier.transaction += 1
        self._is_open, self._ending = True, None
        await super().begin()

    async def send(self, output: ProducerRecord) -> None:
        copier, partition = self._copier, output.partition
        assert partition is not None
        sent = await copier.send(
            self._writing, output.topic, partition, output.value, transaction=copier.transaction
        )
        self._sent.append(sent)

    async def commit(self) -> None:
        copier = self._copier
        call = copier.begin(Kind.COMMIT, transaction=copier.transaction)
        try:
            await super().commit()
        except TimedOut:
            copier.end(call, Outcome.UNKNOWN)
            raise
        except OncelogError:
            self._ending = call
            raise
        self._is_open = False
        copier.end(call, Outcome.OK)

    async def abort(self) -> None:
        copier = self._copier
        call = copier.begin(Kind.ABORT, transaction=copier.transaction)
        await super().abort()
        copier.end(call, Outcome.OK)
        if self._ending is not None:
            copier.end(self._ending, Outcome.FAIL)
        self._is_open, self._ending = False, None

    async def go_back(self, firsts: Mapping[TopicPartition, int]) -> None:
        await super().go_back(firsts)
        self._copier.session += 1


def run_process_loops(seed: int, kept: Collection[int] | None = None) -> ClientResult:
    """Run a seed of loops. `kept` has the numbers of the faults to run, None for all."""
    world = World(seed)
    rng = world.rng("scene")
    simulation = ClientSimulation(world, "loops", rng.randint(1, 4))
    partitions, protocol = simulation.partition_count, rng.choice(("classic", "consumer"))
    writer = Writer(world, "writer-0", TOPIC, partitions, bursts=8)
    copiers = [
        LoopCopier(world, f"copier-{number}", TOPIC, OUTWARD, partitions, protocol)
        for number in range(rng.randint(1, 3))
    ]
    strategy = rng.choice(("range", "cooperative-sticky"))
    if protocol == "classic":
        for copier in copiers:
            copier.reading["partition.assignment.strategy"] = strategy
    waiter: Any = CopyWaiter(world, simulation, writer, copiers)
    simulation.first += [writer, *copiers, waiter]
    simulation.checks.append(lambda operations, last: check_copies(world, operations, last, TOPIC, OUTWARD))
    simulation.add_faults(kept)
    return run_client_simulation(seed, simulation, nullcontext())
