"""A broker and its clients' applications: a seed draws what they do, and for half of the seeds some faults.

blocking.py plays the blocking clients in threads that give way anywhere and are interrupted;
cancelling.py the asyncio clients, whose calls are cancelled at any await. In seeds without faults no call
may fail, hang, lose or skip. In the others a call may end with an error that expected_errors.py explains, and
300 virtual seconds after the last fault everything must be done.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from random import Random

from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import FencedInstanceId, OncelogError, UnreleasedInstanceId
from oncelog.log.partition import Partition
from oncelog.types import Record, TopicPartition
from oncelog_simulator.checks import InvariantMonitor, batches_of, check_history, check_log
from oncelog_simulator.clients import Application, LastReader, Sender
from oncelog_simulator.event_loop import Livelock
from oncelog_simulator.expected_errors import MEMBERSHIP, Excuses
from oncelog_simulator.faults import REFUSED_WRITES, Fault, draw_faults, happen
from oncelog_simulator.history.check import Kind, Operation, Outcome
from oncelog_simulator.world import SERVERS, BrokerHost, Event, Listening, World

LIMIT_SECONDS = 120.0
"""So long after the beginning everything must be over."""
FAULTS_PATIENCE_SECONDS = 5.0
"""So much longer than its documented time-out no call may take in a seed with faults."""
TOPIC = "read"
MOST_ASSIGNMENTS = 4
"""Of two consumers with one group.instance.id; more, and they take the partitions from each other. Each fault
may end a session, after which both are assigned partitions once more.
"""
FAULT_CHANCE = 0.5
FAULT_KINDS = (
    "kill",
    "power",
    "kill-in-write",
    "power-in-write",
    "stop",
    "pause",
    "part",
    "cut",
    "bad-network",
    "full-disk",
    "slow-disk",
    "clock",
)
FAULTS_UNTIL_MS = 30_000
LIVENESS_SECONDS = 300.0
"""So long after the last fault everything must be done."""
TWIN_SECONDS = 30.0
"""So much longer than the faults two consumers with one group.instance.id live."""
SETTLE_SECONDS = 15.0
"""So long after the last fault every session of a member that is gone has ended."""
MAX_CLOCK_MS = 900_000
"""Two hosts whose clocks differ by more than an hour refuse each other's records."""
HANG = "a call hangs"
FENCED = (FencedInstanceId, UnreleasedInstanceId)


@dataclass(frozen=True)
class Run:
    """The result of one seed."""

    seed: int
    kind: str
    violations: list[str]
    digest: str
    timeline: list[Event]
    virtual_s: float
    record_count: int
    faults: tuple[Fault, ...] = ()


class LivenessTimeout(Exception):
    """A call hangs: nothing more is learned by going on."""


@contextmanager
def bounded(application: Application, what: str, seconds: float, faults_s: float = 0.0) -> Iterator[None]:
    """Time a call, which must return soon after so many seconds. `faults_s`: in a seed with faults."""
    world, began_us = application.world, application.world.now_us
    limit_s = seconds + application.patience_s
    if world.excuses:
        limit_s = max(seconds, faults_s) + world.excuses.paused_s + FAULTS_PATIENCE_SECONDS
    timer = world.loop.call_later(limit_s, world.violate, HANG, f"{what} of {application.name}")
    try:
        yield
    finally:
        timer.cancel()
        world.note(application.name, f"{what} took {(world.now_us - began_us) / 1e6:g} s")


@contextmanager
def excused(application: Application, what: str) -> Iterator[None]:
    """Let a call end with an error that faults explain; any other is a violation. A fenced one is raised."""
    try:
        yield
    except FENCED:
        raise
    except OncelogError as error:
        if not application.world.excuses:
            raise
        judge_error(application, what, error)


def judge_error(application: Application, what: str, error: Exception) -> None:
    """Note an error that faults explain; any other is a violation."""
    world = application.world
    world.note(application.name, f"{what}: {error!r}")
    if not isinstance(error, OncelogError) or not world.excuses.explains(error, world.now_us):
        world.violate("a call fails without a reason", f"{what} of {application.name}: {error!r}")


@contextmanager
def uncommitted(application: Application) -> Iterator[None]:
    """Let a commit fail: the application may be no member of its group at present."""
    try:
        yield
    except FENCED:
        if application.world.excuses:
            raise
    except MEMBERSHIP:
        pass
    except OncelogError as error:
        if application.world.excuses:
            judge_error(application, "commit()", error)


class Holdings:
    """What a member of a group was told and given. `held`: its partitions by what its listeners were told."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.held: set[TopicPartition] = set()
        self.seen: set[tuple[str, int, int | None]] = set()
        self.assigned_count = 0
        self.is_fenced = False
        self._untold: set[TopicPartition] = set()
        """What it held and was not told of, or was told of and did not hold, when it was looked at last."""

    def take(self, records: list[Record]) -> None:
        """The application was given these."""
        if records:
            application = self.application
            items = application.items_of(records)
            application.end(application.begin(Kind.POLL), Outcome.OK, items)
            self.seen.update((item.topic, item.partition, item.offset) for item in items)

    def check(self, assignment: list[TopicPartition]) -> None:
        """The listeners were told of everything, at the latest in the poll that has returned now.

        Partitions may change between the end of a poll and this look, but not twice in the same way.
        """
        untold = self.held ^ set(assignment)
        if lasting := untold & self._untold:
            text = f"{self.application.name}: of {sorted(lasting)}, holds {sorted(assignment)}"
            self.application.world.violate("a listener was not told", text)
        self._untold = untold

    def assigned(self, partitions: list[TopicPartition]) -> None:
        """A listener."""
        self.application.session += 1
        self.assigned_count += 1
        self.held.update(partitions)

    def revoked(self, partitions: list[TopicPartition]) -> None:
        """A listener."""
        self.application.session += 1
        self.held.difference_update(partitions)


class LateSender(Sender):
    """A Sender that begins when the faults are over."""

    async def work(self) -> None:
        await asyncio.sleep(self.world.excuses.end_us / 1e6 + SETTLE_SECONDS - self.world.now_us / 1e6)
        await super().work()


class Scene:
    """A seed's broker and applications. `following`: those that begin when `first` are done."""

    def __init__(self, world: World, kind: str, partition_count: int) -> None:
        self.world, self.kind, self.partition_count = world, kind, partition_count
        settings: dict[str, object] = {
            "num.partitions": partition_count,
            "group.initial.rebalance.delay.ms": 0,
            "group.consumer.session.timeout.ms": 6_000,
            "group.consumer.heartbeat.interval.ms": 1_000,
            "transaction.state.log.num.partitions": 2,
            "offsets.topic.num.partitions": 2,
        }
        self.settings = settings
        self.broker = BrokerHost(world, settings)
        self.faults: tuple[Fault, ...] = ()
        self.first: list[Application] = []
        self.following: list[Application] = []
        self.members: list[Holdings] = []
        """Of which the group's last one reads to the end."""
        self.checks: list[Callable[[list[Operation], str], object]] = []
        """Besides those of every scene; of the operations, and the name of who read everything."""
        self.last: LastReader | None = None
        self.limit_s = LIMIT_SECONDS
        self.monitor = InvariantMonitor(world)
        """Looks at the broker in seeds with faults."""

    def cast_group(self, members: list[Holdings], last: Holdings, overlap_s: float, chance: Random) -> None:
        """Take a sender, the group's members and its last one; judge twins, which overlap for so long."""
        burst_count = chance.randint(2, 5)
        self.first.append(Sender(self.world, "sender-0", TOPIC, self.partition_count, burst_count))
        self.first += [each.application for each in members]
        self.following.append(last.application)
        self.members += [*members, last]
        if self.kind == "twins":
            self.checks.append(lambda *_: check_twins(self.world, members, overlap_s))

    def disturb(self, kept: Collection[int] | None = None) -> None:
        """Draw the faults of a seed, none for half of them. `kept`: numbers of those to play; None: all."""
        if not has_faults(self.world.seed):
            return
        chance = self.world.chance("client faults")
        loses_power = chance.random() < 0.5
        clients, count = [each.name for each in self.first if each.name != "until"], chance.randint(1, 6)
        drawn = draw_faults(
            chance, count, FAULTS_UNTIL_MS, clients, loses_power=loses_power, kinds=FAULT_KINDS
        )
        drawn = [_with_near_clock(fault) for fault in drawn]
        settings: dict[str, object] = {
            "log.segment.bytes": chance.choice((700, 3_000, 1 << 30)),
            "log.flush.interval.messages": 1 if loses_power else chance.choice((1, 3, 1 << 40)),
            "log.flush.offset.checkpoint.interval.ms": chance.choice((2_000, 60_000)),
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 3_000,
        }
        self.broker.settings = BROKER.parse({"listeners": SERVERS, **self.settings, **settings})
        self.faults = tuple(fault for number, fault in enumerate(drawn) if kept is None or number in kept)
        self.world.excuses = Excuses(
            [(fault.at_ms * 1_000, (fault.at_ms + fault.span_ms) * 1_000) for fault in drawn],
            paused_s=sum(fault.span_ms for fault in drawn if fault.kind == "pause") / 1_000,
            sets_clock=any(fault.kind == "clock" for fault in drawn),
            is_lasting=chance.random() < 0.5,
        )
        if self.members and self.world.excuses.is_lasting:
            self.first.append(LateSender(self.world, "sender-1", TOPIC, self.partition_count, 2))
        self.limit_s += self.world.excuses.end_us / 1e6 + LIVENESS_SECONDS
        self.monitor.writes_failed = any(fault.kind in REFUSED_WRITES for fault in drawn)
        self.broker.before_end = self._broker_ends
        self.broker.on_recovered = self.monitor.recovered

    def _broker_ends(self, *, is_in_write: bool, lose_power: bool) -> None:
        if self.broker.node is not None:
            self.monitor.ending(self.broker.node, is_in_write=is_in_write, lose_power=lose_power)

    @property
    def node(self) -> BrokerState:
        """The broker's, which is up when no fault lasts."""
        assert self.broker.node is not None
        return self.broker.node

    async def play(self) -> None:
        self.broker.start()
        disturbing = asyncio.ensure_future(self._bring_faults()) if self.faults else None
        for applications in (self.first, self.following):
            for application in applications:
                application.start()
            await self._until_done(applications)
            if disturbing is not None:
                await disturbing
            if applications is self.first and self.world.excuses.is_lasting:
                self._check_read_on()
        logs = self._logs()
        self.last = LastReader(self.world, "last", sorted(logs))
        self.last.start()
        await self._until_done([self.last])
        for tp, log in logs.items():
            check_log(self.world, tp, log)
        self._check()
        if self.faults:
            self.monitor.look(self.node)
            self.broker.kill()
            self.broker.start_again()
            await self._until_up()

    async def _bring_faults(self) -> None:
        """Bring all faults about, and wait until their direct effects are over."""
        world = self.world
        looking = asyncio.ensure_future(self._look())
        await asyncio.gather(*(happen(self, fault) for fault in self.faults))
        world.note("fault", "no more faults")
        world.excuses.end_us = max(world.excuses.end_us, world.now_us)
        for host in world.hosts.values():
            host.set_clock(-host.wall_offset_ns // 1_000_000)
        await asyncio.sleep(SETTLE_SECONDS)
        await self._until_up()
        looking.cancel()

    async def _until_up(self) -> None:
        while self.broker.node is None or self.broker.running is None:
            await asyncio.sleep(0.1)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.broker.node is not None:
                self.monitor.look(self.broker.node)

    def _logs(self) -> dict[TopicPartition, Partition]:
        partitions = self.node.log_manager.partitions
        return {tp: log for tp, log in partitions.items() if not log.config.is_compacted}

    async def _until_done(self, applications: Iterable[Application]) -> None:
        while not all(each.is_done for each in applications):
            if any(each.startswith(HANG) for each in self.world.violations):
                raise LivenessTimeout
            await asyncio.sleep(0.1)

    def _check(self) -> None:
        assert self.last is not None
        everyone = [*self.first, *self.following, self.last]
        calls = sorted((call for each in everyone for call in each.calls), key=lambda call: call.begin)
        operations = [call.operation(self.world.now_us) for call in calls]
        check_history(self.world, operations, self.last.name)
        for check in self.checks:
            check(operations, self.last.name)
        if self.members:
            self._check_given()

    def _check_read_on(self) -> None:
        """The members that lived through all faults have read everything, before the last one begins."""
        if self.kind != "consumer":
            return
        for tp, log in self._logs().items():
            stored = {
                n for header, _ in batches_of(log) for n in range(header.base_offset, header.last_offset + 1)
            }
            seen = {
                offset
                for each in self.members
                for topic, n, offset in each.seen
                if TopicPartition(topic, n) == tp
            }
            if stored - seen:
                self.world.violate("members do not read on after the faults", f"{tp} {sorted(stored - seen)}")

    def _check_given(self) -> None:
        assert self.last is not None
        stored = {
            (item.topic, item.partition, item.offset) for call in self.last.calls for item in call.items
        }
        for record in sorted(stored.difference(*(each.seen for each in self.members))):
            self.world.violate("committed, but given to nobody", f"{record}")


def check_twins(world: World, twins: list[Holdings], overlap_s: float) -> None:
    """Of two consumers with one group.instance.id one is told, and neither takes from the other for long."""
    count = sum(each.assigned_count for each in twins)
    if count > MOST_ASSIGNMENTS + 2 * world.excuses.fault_count:
        world.violate("twins take from each other", f"{count} assignments")
    if (overlap_s > 5.0 or world.excuses) and not any(each.is_fenced for each in twins):
        world.violate("no twin is told", f"in {overlap_s:g} s")


def has_faults(seed: int) -> bool:
    """Return True for a seed of interrupted clients in which broker or network fail."""
    return Random(f"{seed}/has client faults").random() < FAULT_CHANCE


def _with_near_clock(fault: Fault) -> Fault:
    if fault.kind != "clock":
        return fault
    return fault._replace(amount=max(min(fault.amount, MAX_CLOCK_MS), -MAX_CLOCK_MS))


def play_scene(seed: int, scene: Scene, within: AbstractContextManager[object]) -> Run:
    """Play it to its end. Deterministic: the same seed gives the same Run."""
    world = scene.world
    gc_was_enabled = gc.isenabled()
    gc.disable()  # what it would close, and when, is nothing a seed decides
    try:
        with Listening(world), within:
            playing = world.loop.create_task(scene.play())
            try:
                if not world.loop.run_until(playing, int(scene.limit_s * 1e6)):
                    left = [each.name for each in (*scene.first, *scene.following) if not each.is_done]
                    world.violate("liveness", f"not over after {scene.limit_s:g} s; not done: {left}")
                elif (error := playing.exception()) is not None and not isinstance(error, LivenessTimeout):
                    raise error
            except Livelock as error:
                world.violate("no rest", str(error))
            world.is_over = True
        world.loop.close()
        scene.broker.release()
        records = sum(len(call.items) for each in scene.first for call in each.calls)
        seconds = world.now_us / 1e6
        return Run(
            seed,
            scene.kind,
            world.violations,
            world.digest,
            world.timeline,
            seconds,
            records,
            scene.faults,
        )
    finally:
        if gc_was_enabled:
            gc.enable()
