"""A world in which neither broker nor network fails: a seed draws what its clients' applications do.

So no call may fail, hang, lose or skip. sim/blocking.py plays the blocking clients in threads that give way
anywhere and are interrupted; sim/cancelling.py the asyncio clients, whose calls are cancelled at any await.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from random import Random

from oncelog.broker.node import Node
from oncelog.errors import FencedInstanceId, UnreleasedInstanceId
from oncelog.log.partition import Partition
from oncelog.rules.history import Kind, Operation, Outcome
from oncelog.sim.checks import check_history, check_log
from oncelog.sim.clients import Application, LastReader, Sender
from oncelog.sim.loop import Livelock
from oncelog.sim.world import BrokerHost, Event, Listening, World
from oncelog.types import Record, TopicPartition

LIMIT_SECONDS = 120.0
"""So long after the beginning everything must be over."""
PATIENCE_SECONDS = 40.0
"""So much longer than its time-out no call may take."""
TOPIC = "read"
MOST_ASSIGNMENTS = 4
"""Of two consumers with one group.instance.id; more, and they take the partitions from each other."""
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


class LivenessTimeout(Exception):
    """A call hangs: nothing more is learned by going on."""


@contextmanager
def bounded(application: Application, what: str, seconds: float) -> Iterator[None]:
    """Time a call, which must return soon after so many seconds."""
    world, began_us = application.world, application.world.now_us
    limit_s = seconds + PATIENCE_SECONDS
    timer = world.loop.call_later(limit_s, world.violate, HANG, f"{what} of {application.name}")
    try:
        yield
    finally:
        timer.cancel()
        world.note(application.name, f"{what} took {(world.now_us - began_us) / 1e6:g} s")


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
        self.broker = BrokerHost(world, settings)
        self.first: list[Application] = []
        self.following: list[Application] = []
        self.members: list[Holdings] = []
        """Of which the group's last one reads to the end."""
        self.checks: list[Callable[[list[Operation], str], object]] = []
        """Besides those of every scene; of the operations, and the name of who read everything."""
        self.last: LastReader | None = None
        self.limit_s = LIMIT_SECONDS

    def cast_group(self, members: list[Holdings], last: Holdings, overlap_s: float, chance: Random) -> None:
        """Take a sender, the group's members and its last one; judge twins, which overlap for so long."""
        burst_count = chance.randint(2, 5)
        self.first.append(Sender(self.world, "sender-0", TOPIC, self.partition_count, burst_count))
        self.first += [each.application for each in members]
        self.following.append(last.application)
        self.members += [*members, last]
        if self.kind == "twins":
            self.checks.append(lambda *_: check_twins(self.world, members, overlap_s))

    @property
    def node(self) -> Node:
        """The broker's, which never ends here."""
        assert self.broker.node is not None
        return self.broker.node

    async def play(self) -> None:
        self.broker.start()
        for applications in (self.first, self.following):
            for application in applications:
                application.start()
            await self._until_done(applications)
        logs = self._logs()
        self.last = LastReader(self.world, "last", sorted(logs))
        self.last.start()
        await self._until_done([self.last])
        for tp, log in logs.items():
            check_log(self.world, tp, log)
        self._check()

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
    if count > MOST_ASSIGNMENTS:
        world.violate("twins take from each other", f"{count} assignments")
    if overlap_s > 5.0 and not any(each.is_fenced for each in twins):
        world.violate("no twin is told", f"in {overlap_s:g} s")


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
        return Run(seed, scene.kind, world.violations, world.digest, world.timeline, seconds, records)
    finally:
        if gc_was_enabled:
            gc.enable()
