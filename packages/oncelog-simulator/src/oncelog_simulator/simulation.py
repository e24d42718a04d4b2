"""A seed played: what it draws, the world it is played in, the verdict."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from oncelog.broker.append_events import AppendEvent
from oncelog.broker.state import BrokerState
from oncelog.types import TopicPartition
from oncelog_simulator import disk_rot
from oncelog_simulator.bit_flips import BROKER_STATES, DamageReader, draw_flip, flip, written_points
from oncelog_simulator.checks import InvariantMonitor, check_copies, check_history, check_log, check_outcomes
from oncelog_simulator.clients import Application, LastReader, Reader, Sender
from oncelog_simulator.disk_rot import (
    check_ends,
    check_known,
    draw_rot,
    draw_state,
    internal_batches,
    known,
    log_ends,
    may_refuse,
)
from oncelog_simulator.event_loop import Livelock
from oncelog_simulator.expiry import Calendar, draw_expiry
from oncelog_simulator.faults import KINDS, REFUSED_WRITES, Fault, draw_failed_syncs, draw_faults, happen
from oncelog_simulator.foreign_files import Strangers, draw_strangers
from oncelog_simulator.hostile import Hostile
from oncelog_simulator.jobs import draw_jobs
from oncelog_simulator.limits import crowd_count, draw_limits, draw_settings, draw_start, gather
from oncelog_simulator.loading import Loading
from oncelog_simulator.offset_deletion import OffsetDeletion
from oncelog_simulator.pipelining import Pipelining
from oncelog_simulator.record_deletion import KEPT_SECONDS, RecordDeletion
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.sink_tasks import SHORT_RETENTION, Lanes, is_idle_query
from oncelog_simulator.takeover import Takeover
from oncelog_simulator.topic_changes import TopicChanges
from oncelog_simulator.topic_recreation import TopicRecreation
from oncelog_simulator.topic_times import TopicTimes
from oncelog_simulator.txn_clients import ConsumeTransformProduce, Writer
from oncelog_simulator.workloads import Workload
from oncelog_simulator.world import BrokerHost, Event, Listening, World
from oncelog_simulator.write_atomic import AtomicWrites

LOOK_SECONDS = 1.0
LATE_CHANCE = 0.25
"""Of a transaction to stay open too long, where epochs begin near their end."""
LIVENESS_SECONDS = 300.0
"""So long after the last fault everything must be done."""
TOPIC, INWARD, OUTWARD = "records", "inward", "outward"
WORKLOADS: dict[str, type[Workload]] = {each.topic: each for each in (Lanes, TopicRecreation, RecordDeletion)}
WORKLOAD_CHANCE = FLIP_CHANCE = 0.16
APART: dict[str, tuple[type[Workload], float]] = {
    Hostile.topic: (Hostile, 0.01),
    OffsetDeletion.topic: (OffsetDeletion, 0.02),
    TopicChanges.topic: (TopicChanges, 0.02),
    Pipelining.topic: (Pipelining, 0.02),
    AtomicWrites.topic: (AtomicWrites, 0.01),
    Loading.topic: (Loading, 0.01),
    Takeover.topic: (Takeover, 0.02),
    TopicTimes.topic: (TopicTimes, 0.02),
}
"""Workloads that are drawn one by one, with dice of their own, and the share of seeds that play them."""
FLIP_IN_BATCH_CHANCE = 0.08


@dataclass
class Result:
    """What came of it. `virtual_s`: how long it took in the world."""

    scenario: Scenario
    violations: list[str]
    digest: str
    timeline: list[Event]
    virtual_s: float = 0.0
    record_count: int = 0
    step_count: int = 0
    faults: tuple[Fault, ...] = field(default=())


def scenario_for(seed: int, fault_count: int | None = None, workload: str | None = None) -> Scenario:
    """Everything but what happens by the way. `fault_count` None: drawn as well, 2 to 20.

    `workload`: is played whatever the seed says.
    """
    chance = Random(f"{seed}/plan")
    loses_power = chance.random() < 0.5
    partitions = chance.choice((1, 2, 3))
    is_transactional = chance.random() < 0.6
    senders = chance.choice((0, 1)) if is_transactional else chance.choice((1, 2, 3))
    writers = chance.choice((1, 2)) if is_transactional else 0
    copiers = chance.choice((0, 1, 2)) if is_transactional else 0
    calm_ms = chance.choice((30_000, 60_000, 120_000))
    broker = _draw_settings(chance, partitions, loses_power=loses_power)
    broker |= draw_settings(seed) | draw_expiry(seed)
    clients = [f"{kind}-{n}" for kind, count in _clients(senders, writers, copiers) for n in range(count)]
    drawn_count = chance.choice((2, 5, 10, 20))
    count = drawn_count if fault_count is None else fault_count
    faults = draw_faults(chance, count, calm_ms, clients, loses_power=loses_power)
    workloads, more_faults = _draw_workloads(seed, calm_ms, loses_power=loses_power)
    if workload in WORKLOADS and workload not in workloads:
        workloads += (workload,)
    for name, (kind, share) in APART.items():
        rng = Random(f"{seed}/workload {name}")
        if rng.random() < share or name == workload:
            workloads += (name,)
            more = draw_faults(rng, rng.choice((1, 3, 6)), calm_ms, [*kind.clients], loses_power=loses_power)
            more_faults += [fault for fault in more if fault.kind != "repeat" or kind.is_repeatable]
            broker |= kind.broker_settings(Random(f"{seed}/settings of {name}"))
    crowd_size = crowd_count(seed) if fault_count is None else 0
    rng = Random(f"{seed}/crowd of faults")
    crowd = draw_faults(rng, crowd_size, calm_ms, clients, loses_power=loses_power)
    faults = gather(faults + more_faults + crowd + _draw_rare_faults(seed, calm_ms, clients), seed, calm_ms)
    broker |= _draw_retention(seed, workloads, faults)
    if broker["oncelog.transaction.version"] == 0:
        # With the classic protocol a request that comes again may hit the next transaction (KIP-890).
        faults = [each for each in faults if each.kind != "repeat" or each.target.startswith("sender")]
    return Scenario(
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
        workloads=workloads,
        jobs=draw_jobs(Random(f"{seed}/jobs of the loop")),
        flip=_draw_flip(seed),
        rot=draw_state(Random(f"{seed}/rot")),
        start=draw_start(seed),
        limits=draw_limits(seed),
        expiry=bool(draw_expiry(seed)),
        strangers=draw_strangers(seed),
    )


def _draw_settings(chance: Random, partitions: int, *, loses_power: bool) -> dict[str, object]:
    """Return the broker's settings."""
    return {
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


def _draw_rare_faults(seed: int, calm_ms: int, clients: list[str]) -> list[Fault]:
    """Return those with dice of their own: seeds without them are what they were."""
    failed_syncs = draw_failed_syncs(Random(f"{seed}/failed syncs"), calm_ms)
    return failed_syncs + _draw_flips_in_batches(seed, calm_ms, clients)


def _draw_flip(seed: int) -> str | None:
    chance = Random(f"{seed}/flip")
    return chance.choice(BROKER_STATES) if chance.random() < FLIP_CHANCE else None


def _draw_retention(seed: int, workloads: tuple[str, ...], faults: list[Fault]) -> dict[str, object]:
    """Return settings that forget the offsets of a query that is idle."""
    is_idle = Lanes.topic in workloads and is_idle_query(seed)
    # A clock that is set forward by minutes rightly ends what is kept for two.
    is_clock_set = any(fault.kind == "clock" for fault in faults)
    # `deletions` takes an offset that expires for one that is lost (seed 40591).
    is_kept = is_clock_set or OffsetDeletion.topic in workloads
    return SHORT_RETENTION if is_idle and not is_kept else {}


def _draw_flips_in_batches(seed: int, calm_ms: int, clients: list[str]) -> list[Fault]:
    rng, kind = Random(f"{seed}/flips in batches"), KINDS["flip-in-batch"]
    count = rng.randint(1, 3) if rng.random() < FLIP_IN_BATCH_CHANCE else 0
    return [
        Fault(
            rng.randrange(calm_ms),
            "flip-in-batch",
            rng.choice(clients),
            rng.randint(*kind.span_ms),
            rng.randint(*kind.amount),
        )
        for _ in range(count)
    ]


def _draw_workloads(seed: int, calm_ms: int, *, loses_power: bool) -> tuple[tuple[str, ...], list[Fault]]:
    """With dice of their own: a seed without any is what it would be if there were none."""
    chance = Random(f"{seed}/acts")
    workloads = (chance.choice(list(WORKLOADS)),) if chance.random() < WORKLOAD_CHANCE else ()
    clients = [client for name in workloads for client in WORKLOADS[name].clients]
    count = chance.choice((1, 3, 6)) if workloads else 0
    faults = draw_faults(chance, count, calm_ms, clients, loses_power=loses_power)
    may_repeat = all(WORKLOADS[name].is_repeatable for name in workloads)
    return workloads, [each for each in faults if each.kind != "repeat" or may_repeat]


def _clients(senders: int, writers: int, copiers: int) -> list[tuple[str, int]]:
    return [("sender", senders), ("writer", writers), ("copier", copiers), ("reader", 1)]


class Simulation:
    """The hosts of one run. What faults act on."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.world.loop.jobs.settings = scenario.jobs
        self.monitor = InvariantMonitor(self.world)
        self.monitor.writes_failed = any(fault.kind in REFUSED_WRITES for fault in scenario.faults)
        self.broker = BrokerHost(self.world, scenario.broker, scenario.limits)
        scenario.start.write(self.broker.disk)
        self.broker.before_end = self._broker_ends
        self.broker.on_recovered = self._broker_recovered
        self.broker.on_stored = self._broker_stored
        self.applications: dict[str, Application] = {}
        world, bursts, partitions = self.world, scenario.bursts, scenario.partitions
        self.senders = [
            self._add(Sender(world, f"sender-{number}", TOPIC, partitions, bursts))
            for number in range(scenario.senders)
        ]
        for sender in self.senders:
            sender.first_sequence = scenario.start.sequence
        writers = [
            self._add(Writer(world, f"writer-{number}", INWARD, partitions, bursts))
            for number in range(scenario.writers)
        ]
        for writer in writers:
            writer.late_chance = LATE_CHANCE if scenario.limits.first_producer_epoch else 0.0
        self.senders += writers
        self.copiers = [
            self._add(
                ConsumeTransformProduce(
                    world, f"copier-{number}", INWARD, OUTWARD, partitions, scenario.group_protocol
                )
            )
            for number in range(scenario.copiers)
        ]
        topics = [
            *[TOPIC] * bool(scenario.senders),
            *[INWARD] * bool(scenario.writers),
            *[OUTWARD] * bool(scenario.copiers),
        ]
        self.partitions = [TopicPartition(topic, n) for topic in topics for n in range(partitions)]
        self.reader = self._add(Reader(world, "reader-0", self.partitions, "read_committed"))
        self.last = LastReader(world, "last", self.partitions)
        self.strangers = Strangers(world, self.broker, topics) if scenario.strangers else None
        self.workloads = [
            (WORKLOADS.get(name) or APART[name][0])(world, scenario) for name in scenario.workloads
        ]
        self.foreign = [workload.topic for workload in self.workloads if workload.makes_topics]
        self.cast = list(self.applications.values())
        for workload in self.workloads:
            self.monitor.unguarded_groups.update(workload.unguarded_groups)
            workload.prepare(self.broker)
            if workload.keeps_one_batch:
                self.monitor.one_batch_topics.add(workload.topic)
            if workload.compacts:
                self.monitor.compacted_topics.add(workload.topic)
            for application in (*workload.applications, *workload.readers):
                self._add(application)

    def _add(self, application: Any) -> Any:
        self.applications[application.name] = application
        return application

    def _broker_ends(self, *, is_in_write: bool, lose_power: bool) -> None:
        if self.broker.node is not None:
            self.monitor.ending(self.broker.node, is_in_write=is_in_write, lose_power=lose_power)
            for workload in self.workloads:
                workload.ending()

    def _broker_stored(self, event: AppendEvent) -> None:
        for workload in self.workloads:
            workload.stored(event)

    def _broker_recovered(self, node: BrokerState) -> None:
        self.monitor.recovered(node, was_stopped=self.broker.was_stopped)
        if self.strangers is not None:
            self.strangers.recovered(node)
        for workload in self.workloads:
            workload.recovered(node)

    async def play(self) -> None:
        """From the first start to the last look."""
        self.broker.start()
        for application in self.applications.values():
            application.start()
        looking = asyncio.ensure_future(self._look())
        await asyncio.gather(*(happen(self, fault) for fault in self.scenario.faults))
        self.world.note("fault", "no more faults")
        for host in self.world.hosts.values():
            host.set_clock(
                -host.wall_offset_ns // 1_000_000
            )  # records from more than an hour ahead are refused
        await self._until(lambda: all(each.is_done for each in self.senders), "not all is sent")
        theirs = [each for workload in self.workloads for each in workload.applications]
        await self._until(lambda: all(each.is_done for each in theirs), "not every workload is over")
        await self._until(self._is_stable, "a transaction stays open")
        self._make_target()
        await self._until_copied()
        for each in (
            self.reader,
            *self.copiers,
            *(reader for workload in self.workloads for reader in workload.readers),
        ):
            each.is_told_to_stop = True
        await self._until(lambda: all(each.is_done for each in self.applications.values()), "not all end")
        await self._until(self._is_stable, "a transaction stays open")
        for last in (self.last, *(workload.last for workload in self.workloads)):
            await self._read_all(last)
        looking.cancel()
        self._check()
        if self.workloads:
            await asyncio.sleep(KEPT_SECONDS + 1.0)
            self.broker.kill()
            self.broker.start_again()
            await self._until(lambda: self.broker.node is not None, "the broker does not come back")
        if self.scenario.expiry:
            await self._let_days_pass()
            return
        if self.scenario.rot is not None and not await self._rot(self.scenario.rot):
            return
        if self.scenario.flip is not None:
            await self._flip_a_bit(self.scenario.flip)

    async def _let_days_pass(self) -> None:
        """When all else is checked: what other seeds do in the end would meet what has expired."""
        settings, loses_power = self.scenario.broker, self.scenario.loses_power
        calendar = Calendar(self.world, self.broker, settings, loses_power=loses_power)
        self.monitor.compares_producers = False
        self.broker.on_recovered = self.monitor.recovered  # what workloads committed may have expired
        calendar.start()
        await self._until(lambda: calendar.is_done, "the days do not pass")

    async def _rot(self, how: str) -> bool:
        """Damage a file while the broker is down; return True when the broker started again."""
        broker, node = self.broker, self.broker.node
        assert node is not None
        before, batches, ends = known(node), internal_batches(node), log_ends(node)
        seen = {item for call in self.last.calls for item in call.items}
        if how == "stopped":
            await broker.stop()
        else:
            broker.kill()
        broker.disk.release()
        what = draw_rot(self.world.chance("rot of"), broker.disk, batches, is_killed=how == "killed")
        if what is None:
            broker.start_again()
            await self._until(lambda: broker.node is not None, "the broker does not come back")
            return True
        self.world.note("fault", f"{what}, the broker is {how}")
        what.apply(broker.disk)
        broker.on_recovered = lambda node: None
        broker.may_refuse = partial(may_refuse, what)
        kill = self.world.chance("kill of a start")
        if kill.random() < disk_rot.START_KILL_CHANCE:
            broker.start_crashes.append(
                (kill.randrange(kill.choice((30, 300, disk_rot.MAX_START_STEPS))), False)
            )
        broker.start_again()
        await self._until(
            lambda: broker.node is not None or broker.is_refused, "the broker does not come back"
        )
        if broker.node is None:
            return False
        if what.lost is not None:
            seen = {item for item in seen if TopicPartition(item.topic, item.partition) != what.lost}
        await self._read_all(self.last)
        if {item for call in self.last.calls for item in call.items} != seen:
            self.world.violate("rot took what it did not touch", f"{what}: other records are read")
        check_known(self.world, what, before, known(broker.node))
        check_ends(self.world, what, ends, log_ends(broker.node))
        return True

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
        self.broker.disk.crash_after = None  # a crash that has not come by now does not come
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
                raise LivenessTimeout

    def _is_stable(self) -> bool:
        node = self.broker.node
        return node is not None and all(
            log.last_stable_offset == log.log_end_offset
            for tp, log in node.log_manager.partitions.items()
            if not self._is_foreign(tp.topic)
        )

    def _is_foreign(self, topic: str) -> bool:
        """Return True for a topic of a client that keeps no rules."""
        if not self.foreign or topic.startswith("__"):
            return False
        own = {TOPIC, INWARD, OUTWARD, *(workload.topic for workload in self.workloads)}
        return topic not in own.difference(self.foreign)

    async def _read_all(self, last: LastReader) -> None:
        last.is_done, last.calls = False, []
        last.start()
        await self._until(lambda: last.is_done, f"{last.name} does not come to the end")

    def _make_target(self) -> None:
        """Make the topic that the last reader waits for, where no record was ever committed to be copied."""
        node, running = self.broker.node, self.broker.running
        if self.copiers and node is not None and running is not None and node.topics.get(OUTWARD) is None:
            node.topics.create(OUTWARD, self.scenario.partitions, {}, running.clock.now_ms())

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
                raise LivenessTimeout
            await asyncio.sleep(5.0)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.broker.node is not None:
                self.monitor.look(self.broker.node)
                for workload in self.workloads:
                    workload.look(self.broker.node)

    def _check(self) -> None:
        node: BrokerState | None = self.broker.node
        if node is None:
            self.world.violate("liveness", "the broker is not up in the end")
            return
        self.monitor.look(node)
        logs = {tp: log for tp, log in node.log_manager.partitions.items() if not log.config.is_compacted}
        logs = {tp: log for tp, log in logs.items() if not self._is_foreign(tp.topic)}
        legal = {workload.topic: workload.legal_findings for workload in self.workloads}
        for tp, partition in logs.items():
            findings = legal.get(tp.topic, frozenset())
            check_log(self.world, tp, partition, findings, self.scenario.start.sequence)
        if self.scenario.broker["oncelog.transaction.version"] == 2:
            shared = {workload.topic for workload in self.workloads if workload.shares_epochs}
            check_outcomes(self.world, {tp: log for tp, log in logs.items() if tp.topic not in shared})
        for workload in self.workloads:
            workload.check(node)
        everyone = [*self.cast, self.last]
        calls = sorted((call for each in everyone for call in each.calls), key=lambda call: call.begin)
        operations = [call.operation(self.world.now_us) for call in calls]
        check_history(self.world, operations, self.last.name)
        if self.copiers:
            check_copies(self.world, operations, self.last.name, INWARD, OUTWARD)


class LivenessTimeout(Exception):
    """There is no point in going on."""


def play(scenario: Scenario) -> Result:
    """Play a scenario to its end. Deterministic: the same scenario gives the same Result."""
    gc_was_enabled = gc.isenabled()
    gc.disable()  # what it would close, and when, is nothing a seed decides
    try:
        simulation = Simulation(scenario)
        world = simulation.world
        with Listening(world):
            playing = world.loop.create_task(simulation.play())
            try:
                limit_us = (scenario.calm_ms + 3 * int(LIVENESS_SECONDS * 1000)) * 1000
                if not world.loop.run_until(playing, limit_us):
                    world.violate("liveness", "nothing is left to do, and it is not over")
                elif playing.exception() is not None and not isinstance(playing.exception(), LivenessTimeout):
                    raise playing.exception()  # type: ignore[misc]
            except Livelock as error:
                world.violate("no rest", str(error))
            world.is_over = True
            world.loop.close()
            simulation.broker.release()
            for workload in simulation.workloads:
                workload.close()
            records = sum(len(each.calls) for each in simulation.senders)
        return Result(
            scenario,
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
