"""One simulated run: draw a scenario from a seed, run it, and check the result."""

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
from oncelog_simulator.bit_flips import BROKER_STATES, DamageReader, draw_bit_flip, flip, recovery_points
from oncelog_simulator.checks import InvariantMonitor, check_copies, check_history, check_log, check_outcomes
from oncelog_simulator.clients import Application, LastReader, Reader, Sender
from oncelog_simulator.disk_rot import (
    check_coordinator_data,
    check_ends,
    draw_rot,
    draw_state,
    internal_batches,
    known,
    log_ends,
    may_refuse,
)
from oncelog_simulator.event_loop import Livelock
from oncelog_simulator.expiry import ExpiryApplication, draw_expiry
from oncelog_simulator.faults import KINDS, REFUSED_WRITES, Fault, apply_fault, draw_failed_syncs, draw_faults
from oncelog_simulator.file_loads import Loading
from oncelog_simulator.foreign_files import ForeignFiles, draw_foreign_files
from oncelog_simulator.hostile_clients import Hostile
from oncelog_simulator.jobs import draw_jobs
from oncelog_simulator.limits import cluster_faults, draw_limits, draw_settings, draw_start, extra_fault_count
from oncelog_simulator.offset_deletion import OffsetDeletion
from oncelog_simulator.pipelined_producer import Pipelining
from oncelog_simulator.record_deletion import KEPT_SECONDS, RecordDeletion
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.shared_transactions import SharedTransactions
from oncelog_simulator.sink_tasks import SHORT_RETENTION, SinkTasks, is_idle_query
from oncelog_simulator.takeover import Takeover
from oncelog_simulator.topic_changes import TopicChanges
from oncelog_simulator.topic_recreation import TopicRecreation
from oncelog_simulator.topic_times import TopicTimes
from oncelog_simulator.txn_clients import ConsumeTransformProduce, Writer
from oncelog_simulator.workloads import Workload
from oncelog_simulator.world import BrokerHost, Event, LogCapture, World
from oncelog_simulator.write_atomic import AtomicWrites

OBSERVE_SECONDS = 1.0
LATE_CHANCE = 0.25
"""Probability that a transaction stays open beyond its time-out, in seeds whose epochs begin near their
maximum.
"""
LIVENESS_SECONDS = 300.0
"""Seconds that each step after the last fault, such as the end of all clients, may take."""
TOPIC, INWARD, OUTWARD = "records", "inward", "outward"
WORKLOADS: dict[str, type[Workload]] = {
    workload.topic: workload for workload in (SinkTasks, TopicRecreation, RecordDeletion)
}
WORKLOAD_CHANCE = FLIP_CHANCE = 0.16
INDEPENDENT_WORKLOADS: dict[str, tuple[type[Workload], float]] = {
    Hostile.topic: (Hostile, 0.01),
    OffsetDeletion.topic: (OffsetDeletion, 0.02),
    TopicChanges.topic: (TopicChanges, 0.02),
    Pipelining.topic: (Pipelining, 0.02),
    AtomicWrites.topic: (AtomicWrites, 0.01),
    Loading.topic: (Loading, 0.01),
    Takeover.topic: (Takeover, 0.02),
    TopicTimes.topic: (TopicTimes, 0.02),
    SharedTransactions.topic: (SharedTransactions, 0.02),
}
"""Workloads with the share of seeds that run them. Each is drawn with its own random generator."""
FLIP_IN_BATCH_CHANCE = 0.08


@dataclass
class Result:
    """The result of one run. `virtual_s` is the duration of the run in virtual seconds."""

    scenario: Scenario
    violations: list[str]
    digest: str
    timeline: list[Event]
    virtual_s: float = 0.0
    record_count: int = 0
    step_count: int = 0
    faults: tuple[Fault, ...] = field(default=())


def scenario_for(seed: int, fault_count: int | None = None, workload: str | None = None) -> Scenario:
    """Draw the scenario of a seed.

    If `fault_count` is None, the number of faults is drawn too, from 2 to 20. `workload` names a workload
    that the scenario gets even if the seed does not draw it.
    """
    rng = Random(f"{seed}/plan")
    loses_power = rng.random() < 0.5
    partitions = rng.choice((1, 2, 3))
    is_transactional = rng.random() < 0.6
    senders = rng.choice((0, 1)) if is_transactional else rng.choice((1, 2, 3))
    writers = rng.choice((1, 2)) if is_transactional else 0
    copiers = rng.choice((0, 1, 2)) if is_transactional else 0
    calm_ms = rng.choice((30_000, 60_000, 120_000))
    broker = _draw_settings(rng, partitions, loses_power=loses_power)
    broker |= draw_settings(seed) | draw_expiry(seed)
    clients = [f"{kind}-{n}" for kind, count in _clients(senders, writers, copiers) for n in range(count)]
    drawn_count = rng.choice((2, 5, 10, 20))
    count = drawn_count if fault_count is None else fault_count
    faults = draw_faults(rng, count, calm_ms, clients, loses_power=loses_power)
    workloads, more_faults = _draw_workloads(seed, calm_ms, loses_power=loses_power)
    if workload in WORKLOADS and workload not in workloads:
        workloads += (workload,)
    names, own_faults, settings = _draw_independent(seed, workload, calm_ms, loses_power=loses_power)
    workloads, more_faults = workloads + names, more_faults + own_faults
    broker |= settings
    crowd_size = extra_fault_count(seed) if fault_count is None else 0
    crowd_rng = Random(f"{seed}/crowd of faults")
    crowd = draw_faults(crowd_rng, crowd_size, calm_ms, clients, loses_power=loses_power)
    faults = cluster_faults(
        faults + more_faults + crowd + _draw_rare_faults(seed, calm_ms, clients), seed, calm_ms
    )
    broker |= _draw_retention(seed, workloads, faults)
    if broker["oncelog.transaction.version"] == 0:
        # Repeat only requests of senders: with one epoch for all transactions, a repeated request may affect
        # the next transaction (KIP-890).
        faults = [fault for fault in faults if fault.kind != "repeat" or fault.target.startswith("sender")]
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
        foreign_files=draw_foreign_files(seed),
    )


def _draw_settings(rng: Random, partitions: int, *, loses_power: bool) -> dict[str, object]:
    """Draw the broker's settings."""
    return {
        "num.partitions": partitions,
        "log.segment.bytes": rng.choice((700, 3_000, 20_000, 1 << 30)),
        "log.index.interval.bytes": rng.choice((100, 4_096)),
        "log.flush.offset.checkpoint.interval.ms": rng.choice((2_000, 10_000, 60_000)),
        "log.flush.interval.messages": 1 if loses_power else rng.choice((1, 3, 1 << 40)),
        "log.cleaner.backoff.ms": rng.choice((3_000, 15_000)),
        "transaction.state.log.num.partitions": 2,
        "transaction.state.log.segment.bytes": rng.choice((500, 1 << 20)),
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 3_000,
        "oncelog.transaction.version": rng.choice((0, 2, 2, 2)),
        "offsets.topic.num.partitions": 2,
        "offsets.topic.segment.bytes": rng.choice((500, 1 << 20)),
        "group.consumer.session.timeout.ms": 6_000,
        "group.consumer.heartbeat.interval.ms": 2_000,
    }


def _draw_rare_faults(seed: int, calm_ms: int, clients: list[str]) -> list[Fault]:
    """Draw the faults that have their own generators, so that seeds without them stay the same."""
    failed_syncs = draw_failed_syncs(Random(f"{seed}/failed syncs"), calm_ms)
    return failed_syncs + _draw_flips_in_batches(seed, calm_ms, clients)


def _draw_flip(seed: int) -> str | None:
    rng = Random(f"{seed}/flip")
    return rng.choice(BROKER_STATES) if rng.random() < FLIP_CHANCE else None


def _draw_retention(seed: int, workloads: tuple[str, ...], faults: list[Fault]) -> dict[str, object]:
    """Return settings that make the offsets of an idle streaming query expire.

    Return an empty dict if the seed has no idle query, or if other checks would misjudge expired offsets.
    """
    is_idle = SinkTasks.topic in workloads and is_idle_query(seed)
    # A clock that a fault sets forward by minutes would rightly expire offsets with a retention of 2 minutes.
    is_clock_set = any(fault.kind == "clock" for fault in faults)
    # The checks of the workload OffsetDeletion would mistake an expired offset for a lost one (seed 40591).
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
    """Draw the workloads and their faults from their own generator.

    Because the generator is separate, the scenario of a seed without workloads does not depend on them.
    """
    rng = Random(f"{seed}/acts")
    workloads = (rng.choice(list(WORKLOADS)),) if rng.random() < WORKLOAD_CHANCE else ()
    clients = [client for name in workloads for client in WORKLOADS[name].clients]
    count = rng.choice((1, 3, 6)) if workloads else 0
    faults = draw_faults(rng, count, calm_ms, clients, loses_power=loses_power)
    may_repeat = all(WORKLOADS[name].is_repeatable for name in workloads)
    return workloads, [fault for fault in faults if fault.kind != "repeat" or may_repeat]


def _draw_independent(
    seed: int, requested: str | None, calm_ms: int, *, loses_power: bool
) -> tuple[tuple[str, ...], list[Fault], dict[str, object]]:
    """Draw the workloads of INDEPENDENT_WORKLOADS, with their faults and broker settings.

    The workload named `requested` is included even if the seed does not draw it.
    """
    names: tuple[str, ...] = ()
    faults: list[Fault] = []
    settings: dict[str, object] = {}
    for name, (kind, share) in INDEPENDENT_WORKLOADS.items():
        rng = Random(f"{seed}/workload {name}")
        if rng.random() < share or name == requested:
            names += (name,)
            count = rng.choice((1, 3, 6))
            drawn = draw_faults(rng, count, calm_ms, [*kind.clients], loses_power=loses_power)
            faults += [fault for fault in drawn if fault.kind != "repeat" or kind.is_repeatable]
            settings |= kind.broker_settings(Random(f"{seed}/settings of {name}"))
    return names, faults, settings


def _clients(senders: int, writers: int, copiers: int) -> list[tuple[str, int]]:
    return [("sender", senders), ("writer", writers), ("copier", copiers), ("reader", 1)]


class Simulation:
    """The hosts, workloads and checks of one run. Faults act on this object."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.world.loop.jobs.settings = scenario.jobs
        self.monitor = InvariantMonitor(self.world)
        self.monitor.writes_failed = any(fault.kind in REFUSED_WRITES for fault in scenario.faults)
        self.broker = BrokerHost(self.world, scenario.broker, scenario.limits)
        scenario.start.write(self.broker.disk)
        self.broker.before_exit = self._broker_ends
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
        self.foreign_files = ForeignFiles(world, self.broker, topics) if scenario.foreign_files else None
        self.workloads = [
            (WORKLOADS.get(name) or INDEPENDENT_WORKLOADS[name][0])(world, scenario)
            for name in scenario.workloads
        ]
        self.unchecked_topics = [workload.topic for workload in self.workloads if workload.makes_topics]
        self.main_applications = list(self.applications.values())
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
        if self.foreign_files is not None:
            self.foreign_files.recovered(node)
        for workload in self.workloads:
            workload.recovered(node)

    async def run_scenario(self) -> None:
        """Run from the first start of the broker to the last check."""
        self.broker.start()
        for application in self.applications.values():
            application.start()
        observing = asyncio.ensure_future(self._observe())
        await asyncio.gather(*(apply_fault(self, fault) for fault in self.scenario.faults))
        self.world.note("fault", "no more faults")
        for host in self.world.hosts.values():
            # Correct the clock: the broker refuses records whose timestamps are more than an hour ahead.
            host.set_clock(-host.wall_offset_ns // 1_000_000)
        await self._until(lambda: all(sender.is_done for sender in self.senders), "not all is sent")
        theirs = [application for workload in self.workloads for application in workload.applications]
        await self._until(
            lambda: all(application.is_done for application in theirs), "not every workload is over"
        )
        await self._until(self._is_stable, "a transaction stays open")
        self._make_target()
        await self._until_copied()
        for copier in (
            self.reader,
            *self.copiers,
            *(reader for workload in self.workloads for reader in workload.readers),
        ):
            copier.stop_requested = True
        await self._until(
            lambda: all(application.is_done for application in self.applications.values()), "not all end"
        )
        await self._until(self._is_stable, "a transaction stays open")
        for last in (self.last, *(workload.last for workload in self.workloads)):
            await self._read_all(last)
        observing.cancel()
        self._check()
        if self.workloads:
            await asyncio.sleep(KEPT_SECONDS + 1.0)
            self.broker.kill()
            self.broker.start_if_down()
            await self._until(lambda: self.broker.node is not None, "the broker does not come back")
        if self.scenario.expiry:
            await self._let_days_pass()
            return
        if self.scenario.rot is not None and not await self._rot(self.scenario.rot):
            return
        if self.scenario.flip is not None:
            await self._flip_a_bit(self.scenario.flip)

    async def _let_days_pass(self) -> None:
        """Run the checks of expiry, which set the broker's clock forward by days, after all other checks.

        A seed with this step has no other final step, which would see expired data.
        """
        settings, loses_power = self.scenario.broker, self.scenario.loses_power
        application = ExpiryApplication(self.world, self.broker, settings, loses_power=loses_power)
        self.monitor.compares_producers = False
        # The workloads' own checks stop here, because the offsets that they committed may have expired.
        self.broker.on_recovered = self.monitor.recovered
        application.start()
        await self._until(lambda: application.is_done, "the days do not pass")

    async def _rot(self, how: str) -> bool:
        """Damage a file or directory while the broker is down. Return True if the broker started again."""
        broker, node = self.broker, self.broker.node
        assert node is not None
        before, batches, ends = known(node), internal_batches(node), log_ends(node)
        seen = {item for call in self.last.calls for item in call.items}
        if how == "stopped":
            await broker.stop()
        else:
            broker.kill()
        broker.disk.release()
        what = draw_rot(self.world.rng("rot of"), broker.disk, batches, is_killed=how == "killed")
        if what is None:
            broker.start_if_down()
            await self._until(lambda: broker.node is not None, "the broker does not come back")
            return True
        self.world.note("fault", f"{what}, the broker is {how}")
        what.apply(broker.disk)
        broker.on_recovered = lambda node: None
        broker.may_refuse = partial(may_refuse, what)
        kill = self.world.rng("kill of a start")
        if kill.random() < disk_rot.START_KILL_CHANCE:
            broker.start_crashes.append(
                (kill.randrange(kill.choice((30, 300, disk_rot.MAX_START_STEPS))), False)
            )
        broker.start_if_down()
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
        check_coordinator_data(self.world, what, before, known(broker.node))
        check_ends(self.world, what, ends, log_ends(broker.node))
        return True

    async def _flip_a_bit(self, how: str) -> None:
        """Flip a bit after all other checks. Only the reader of the damaged partition runs after that."""
        node = self.broker.node
        assert node is not None
        logs = {tp: log for tp, log in node.log_manager.partitions.items() if not log.config.is_compacted}
        limits = {tp: log.log_end_offset for tp, log in logs.items()}
        if how == "killed":
            limits = recovery_points(self.broker.disk)
        what = draw_bit_flip(self.world.rng("flip"), logs, limits)
        if what is None:
            return
        reader = DamageReader(self.world, logs[what.tp], what)
        # Cancel a crash that a fault has scheduled and that has not happened yet.
        self.broker.disk.crash_after = None
        flip(self.broker.disk, logs[what.tp], what)
        self.broker.on_recovered = lambda node: None
        self.world.note("fault", f"flips {what}, the broker is {how}")
        if how == "stopped":
            await self.broker.stop()
        elif how == "killed":
            self.broker.kill()
        self.broker.start_if_down()
        reader.start()
        await self._until(lambda: reader.is_done, "the damaged partition is not read to its end")
        reader.check()

    async def _until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        limit_us = self.world.now_us + int(LIVENESS_SECONDS * 1e6)
        while not is_so():
            await asyncio.sleep(0.5)
            if self.world.now_us > limit_us:
                waiting = [
                    application.name for application in self.applications.values() if not application.is_done
                ]
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
        """Return True for a topic that a hostile client may have created or written to."""
        if not self.unchecked_topics or topic.startswith("__"):
            return False
        own = {TOPIC, INWARD, OUTWARD, *(workload.topic for workload in self.workloads)}
        return topic not in own.difference(self.unchecked_topics)

    async def _read_all(self, last: LastReader) -> None:
        last.is_done, last.calls = False, []
        last.start()
        await self._until(lambda: last.is_done, f"{last.name} does not come to the end")

    def _make_target(self) -> None:
        """Create the copiers' target topic if it does not exist, because the last reader waits for it.

        It does not exist if no record was ever copied.
        """
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

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            if self.broker.node is not None:
                self.monitor.observe(self.broker.node)
                for workload in self.workloads:
                    workload.observe(self.broker.node)

    def _check(self) -> None:
        node: BrokerState | None = self.broker.node
        if node is None:
            self.world.violate("liveness", "the broker is not up in the end")
            return
        self.monitor.observe(node)
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
        everyone = [*self.main_applications, self.last]
        calls = sorted(
            (call for application in everyone for call in application.calls), key=lambda call: call.begin
        )
        operations = [call.operation(self.world.now_us) for call in calls]
        check_history(self.world, operations, self.last.name)
        if self.copiers:
            check_copies(self.world, operations, self.last.name, INWARD, OUTWARD)


class LivenessTimeout(Exception):
    """Raised when the simulation does not finish. The violation is already recorded."""


def run_scenario(scenario: Scenario) -> Result:
    """Run a scenario to its end. The same scenario always gives the same Result."""
    gc_was_enabled = gc.isenabled()
    # Switch off the garbage collector: it runs finalizers at moments that the seed does not determine.
    gc.disable()
    try:
        simulation = Simulation(scenario)
        world = simulation.world
        with LogCapture(world):
            playing = world.loop.create_task(simulation.run_scenario())
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
            records = sum(len(sender.calls) for sender in simulation.senders)
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
