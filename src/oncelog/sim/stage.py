"""A seed played: what it draws, the world it is played in, the verdict."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from random import Random
from typing import Any

from oncelog.broker.node import Node
from oncelog.sim.acts import Act
from oncelog.sim.checks import Watch, check_copies, check_history, check_log, check_outcomes
from oncelog.sim.clients import Application, LastReader, Reader, Sender
from oncelog.sim.faults import Fault, draw_faults, happen
from oncelog.sim.flips import HOW, DamageReader, draw_flip, flip, written_points
from oncelog.sim.lanes import Lanes
from oncelog.sim.loop import PROCESS, NoRest, Process
from oncelog.sim.remaking import Remaking
from oncelog.sim.transactors import Copier, Writer
from oncelog.sim.trimming import KEPT_SECONDS, Trimming
from oncelog.sim.world import BROKER_HOST, BROKER_PORT, BrokerHost, Event, Listening, World
from oncelog.types import TopicPartition

LOOK_SECONDS = 1.0
LIVENESS_SECONDS = 300.0
"""So long after the last fault everything must be done."""
TOPIC, INWARD, OUTWARD = "records", "inward", "outward"
ACTS: dict[str, type[Act]] = {each.topic: each for each in (Lanes, Remaking, Trimming)}
ACT_CHANCE = FLIP_CHANCE = 0.16


@dataclass(frozen=True)
class Plan:
    """What a seed draws."""

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
    acts: tuple[str, ...] = ()
    flip: str | None = None
    """How the broker is when, in the end, a bit flips."""


@dataclass
class Result:
    """What came of it. `virtual_s`: how long it took in the world."""

    plan: Plan
    violations: list[str]
    digest: str
    timeline: list[Event]
    virtual_s: float = 0.0
    record_count: int = 0
    step_count: int = 0
    faults: tuple[Fault, ...] = field(default=())


def plan_for(seed: int, fault_count: int | None = None) -> Plan:
    """Everything but what happens by the way. `fault_count` None: drawn as well, 2 to 20."""
    chance = Random(f"{seed}/plan")
    loses_power = chance.random() < 0.5
    partitions = chance.choice((1, 2, 3))
    is_transactional = chance.random() < 0.6
    senders = chance.choice((0, 1)) if is_transactional else chance.choice((1, 2, 3))
    writers = chance.choice((1, 2)) if is_transactional else 0
    copiers = chance.choice((0, 1, 2)) if is_transactional else 0
    calm_ms = chance.choice((30_000, 60_000, 120_000))
    broker: dict[str, object] = {
        "num.partitions": partitions,
        "log.segment.bytes": chance.choice((700, 3_000, 20_000, 1 << 30)),
        "log.index.interval.bytes": chance.choice((100, 4_096)),
        "log.flush.offset.checkpoint.interval.ms": chance.choice((2_000, 10_000, 60_000)),
        "log.flush.interval.messages": 1 if loses_power else chance.choice((1, 3, 1 << 40)),
        "log.cleaner.backoff.ms": chance.choice((3_000, 15_000)),
        "transaction.state.log.num.partitions": 2,
        "transaction.state.log.segment.bytes": chance.choice((500, 1 << 20)),
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 3_000,
        "oncelog.transaction.version": chance.choice((0, 2, 2, 2)),
        "offsets.topic.num.partitions": 2,
        "offsets.topic.segment.bytes": chance.choice((500, 1 << 20)),
        "group.consumer.session.timeout.ms": 6_000,
        "group.consumer.heartbeat.interval.ms": 2_000,
    }
    clients = [f"{kind}-{n}" for kind, count in _cast(senders, writers, copiers) for n in range(count)]
    drawn_count = chance.choice((2, 5, 10, 20))
    count = drawn_count if fault_count is None else fault_count
    faults = draw_faults(chance, count, calm_ms, clients, loses_power=loses_power)
    acts, more_faults = _draw_acts(seed, calm_ms, loses_power=loses_power)
    faults = sorted(faults + more_faults)
    if broker["oncelog.transaction.version"] == 0:
        # With the classic protocol a request that comes again may hit the next transaction (KIP-890).
        faults = [each for each in faults if each.kind != "repeat" or each.target.startswith("sender")]
    return Plan(
        seed,
        broker,
        loses_power,
        partitions,
        senders,
        writers,
        copiers,
        bursts=8,
        calm_ms=calm_ms,
        group_protocol="consumer" if Random(f"{seed}/groups").random() < 0.4 else "classic",
        faults=tuple(faults),
        acts=acts,
        flip=_draw_flip(seed),
    )


def _draw_flip(seed: int) -> str | None:
    chance = Random(f"{seed}/flip")
    return chance.choice(HOW) if chance.random() < FLIP_CHANCE else None


def _draw_acts(seed: int, calm_ms: int, *, loses_power: bool) -> tuple[tuple[str, ...], list[Fault]]:
    """With dice of their own: a seed without any is what it would be if there were none."""
    chance = Random(f"{seed}/acts")
    acts = (chance.choice(list(ACTS)),) if chance.random() < ACT_CHANCE else ()
    clients = [client for name in acts for client in ACTS[name].clients]
    count = chance.choice((1, 3, 6)) if acts else 0
    faults = draw_faults(chance, count, calm_ms, clients, loses_power=loses_power)
    may_repeat = all(ACTS[name].is_repeatable for name in acts)
    return acts, [each for each in faults if each.kind != "repeat" or may_repeat]


def _cast(senders: int, writers: int, copiers: int) -> list[tuple[str, int]]:
    return [("sender", senders), ("writer", writers), ("copier", copiers), ("reader", 1)]


class Stage:
    """The hosts of one run. What faults act on."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.watch = Watch(self.world)
        self.broker = BrokerHost(self.world, plan.broker)
        self.broker.before_end = self._broker_ends
        self.broker.on_recovered = self._broker_recovered
        self.applications: dict[str, Application] = {}
        world, bursts, partitions = self.world, plan.bursts, plan.partitions
        self.senders = [
            self._add(Sender(world, f"sender-{number}", TOPIC, partitions, bursts))
            for number in range(plan.senders)
        ]
        self.senders += [
            self._add(Writer(world, f"writer-{number}", INWARD, partitions, bursts))
            for number in range(plan.writers)
        ]
        self.copiers = [
            self._add(Copier(world, f"copier-{number}", INWARD, OUTWARD, partitions, plan.group_protocol))
            for number in range(plan.copiers)
        ]
        topics = [
            *[TOPIC] * bool(plan.senders),
            *[INWARD] * bool(plan.writers),
            *[OUTWARD] * bool(plan.copiers),
        ]
        self.partitions = [TopicPartition(topic, n) for topic in topics for n in range(partitions)]
        self.reader = self._add(Reader(world, "reader-0", self.partitions, "read_committed"))
        self.last = LastReader(world, "last", self.partitions)
        self.acts = [ACTS[name](world, plan) for name in plan.acts]
        self.cast = list(self.applications.values())
        for act in self.acts:
            self.watch.unguarded_groups.update(act.unguarded_groups)
            for application in (*act.applications, *act.readers):
                self._add(application)

    def _add(self, application: Any) -> Any:
        self.applications[application.name] = application
        return application

    def _broker_ends(self, *, is_in_write: bool, lose_power: bool) -> None:
        if self.broker.node is not None:
            self.watch.ending(self.broker.node, keeps_all=not (is_in_write or lose_power))
            for act in self.acts:
                act.ending()

    def _broker_recovered(self, node: Node) -> None:
        self.watch.recovered(node)
        for act in self.acts:
            act.recovered(node)

    async def play(self) -> None:
        """From the first start to the last look."""
        self.broker.start()
        for application in self.applications.values():
            application.start()
        looking = asyncio.ensure_future(self._look())
        await asyncio.gather(*(happen(self, fault) for fault in self.plan.faults))
        self.world.note("fault", "no more faults")
        for host in self.world.hosts.values():
            host.set_clock(
                -host.wall_offset_ns // 1_000_000
            )  # records from more than an hour ahead are refused
        await self._until(lambda: all(each.is_done for each in self.senders), "not all is sent")
        theirs = [each for act in self.acts for each in act.applications]
        await self._until(lambda: all(each.is_done for each in theirs), "not every act is over")
        await self._until(self._is_stable, "a transaction stays open")
        await self._until_copied()
        for each in (self.reader, *self.copiers, *(reader for act in self.acts for reader in act.readers)):
            each.is_told_to_stop = True
        await self._until(lambda: all(each.is_done for each in self.applications.values()), "not all end")
        await self._until(self._is_stable, "a transaction stays open")
        for last in (self.last, *(act.last for act in self.acts)):
            await self._read_all(last)
        looking.cancel()
        self._check()
        if self.acts:
            await asyncio.sleep(KEPT_SECONDS + 1.0)
            self.broker.kill()
            self.broker.start_again()
            await self._until(lambda: self.broker.node is not None, "the broker does not come back")
        if self.plan.flip is not None:
            await self._flip_a_bit(self.plan.flip)

    async def _flip_a_bit(self, how: str) -> None:
        """When all else is checked: nothing but its reader comes after."""
        node = self.broker.node
        assert node is not None
        logs = {tp: log for tp, log in node.log_manager.partitions.items() if not log.config.is_compacted}
        limits = {tp: log.log_end_offset for tp, log in logs.items()}
        if how == "killed":
            limits = written_points(self.broker.disk)
        what = draw_flip(self.world.chance("flip"), logs, limits)
        if what is None:
            return
        reader = DamageReader(self.world, logs[what.at], what)
        flip(self.broker.disk, logs[what.at], what)
        self.broker.on_recovered = lambda node: None
        self.world.note("fault", f"flips {what}, the broker is {how}")
        if how == "stopped":
            await self.broker.stop()
        elif how == "killed":
            self.broker.kill()
        self.broker.start_again()
        reader.start()
        await self._until(lambda: reader.is_done, "the damaged partition is not read to its end")
        reader.check()

    async def _until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        limit_us = self.world.now_us + int(LIVENESS_SECONDS * 1e6)
        while not is_so():
            await asyncio.sleep(0.5)
            if self.world.now_us > limit_us:
                waiting = [each.name for each in self.applications.values() if not each.is_done]
                self.world.violate(
                    "liveness", f"{otherwise} {LIVENESS_SECONDS:g} s after the faults; not done: {waiting}"
                )
                raise Stuck

    def _is_stable(self) -> bool:
        node = self.broker.node
        return node is not None and all(
            each.last_stable_offset == each.log_end_offset for each in node.log_manager.partitions.values()
        )

    async def _read_all(self, last: LastReader) -> None:
        last.is_done, last.calls = False, []
        last.start()
        await self._until(lambda: last.is_done, f"{last.name} does not come to the end")

    async def _until_copied(self) -> None:
        limit_us = self.world.now_us + int(LIVENESS_SECONDS * 1e6)
        while self.copiers:
            await self._read_all(self.last)
            items = [item for call in self.last.calls for item in call.items]
            counts = [sum(item.topic == topic for item in items) for topic in (INWARD, OUTWARD)]
            if counts[0] <= counts[1]:
                return
            if self.world.now_us > limit_us:
                self.world.violate("liveness", f"the copiers copied {counts[1]} of {counts[0]}")
                raise Stuck
            await asyncio.sleep(5.0)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.broker.node is not None:
                self.watch.look(self.broker.node)

    def _check(self) -> None:
        node: Node | None = self.broker.node
        if node is None:
            self.world.violate("liveness", "the broker is not up in the end")
            return
        self.watch.look(node)
        logs = {tp: log for tp, log in node.log_manager.partitions.items() if not log.config.is_compacted}
        legal = {act.topic: act.legal_findings for act in self.acts}
        for tp, partition in logs.items():
            check_log(self.world, tp, partition, legal.get(tp.topic, frozenset()))
        if self.plan.broker["oncelog.transaction.version"] == 2:
            check_outcomes(self.world, logs)
        for act in self.acts:
            act.check(node)
        everyone = [*self.cast, self.last]
        calls = sorted((call for each in everyone for call in each.calls), key=lambda call: call.begin)
        operations = [call.operation(self.world.now_us) for call in calls]
        check_history(self.world, operations, self.last.name)
        if self.copiers:
            check_copies(self.world, operations, self.last.name, INWARD, OUTWARD)

    async def repeat(self, data: bytes) -> None:
        """A network that delivers a client's bytes again; nobody hears the answers."""
        process = Process("echo")
        context = copy_context()
        context.run(PROCESS.set, process)

        async def send() -> None:
            loop: Any = asyncio.get_running_loop()
            try:
                transport, _ = await loop.create_connection(asyncio.Protocol, BROKER_HOST, BROKER_PORT)
            except OSError:
                return
            transport.write(data)

        self.world.loop.create_task(send(), context=context)


class Stuck(Exception):
    """There is no point in going on."""


def play(plan: Plan) -> Result:
    """Play a plan to its end. Deterministic: the same plan gives the same Result."""
    gc_was_enabled = gc.isenabled()
    gc.disable()  # what it would close, and when, is nothing a seed decides
    try:
        stage = Stage(plan)
        world = stage.world
        with Listening(world):
            playing = world.loop.create_task(stage.play())
            try:
                limit_us = (plan.calm_ms + 3 * int(LIVENESS_SECONDS * 1000)) * 1000
                if not world.loop.run_until(playing, limit_us):
                    world.violate("liveness", "nothing is left to do, and it is not over")
                elif playing.exception() is not None and not isinstance(playing.exception(), Stuck):
                    raise playing.exception()  # type: ignore[misc]
            except NoRest as error:
                world.violate("no rest", str(error))
            world.is_over = True
            world.loop.close()
            stage.broker.release()
            records = sum(len(each.calls) for each in stage.senders)
        return Result(
            plan,
            world.violations,
            world.digest,
            world.timeline,
            world.now_us / 1e6,
            records,
            world.loop.step_count,
        )
    finally:
        if gc_was_enabled:
            gc.enable()
