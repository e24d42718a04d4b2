"""Simulations of interrupted clients: one broker, and applications whose calls are interrupted.

A seed draws what the applications do. Half of the seeds also have faults. `blocking_clients.py` runs the
blocking clients in threads that are suspended anywhere and interrupted by signals. `asyncio_clients.py` runs
the asyncio clients and cancels their calls at any await.

In seeds without faults no call may fail or hang, and no record may be lost or skipped. In seeds with faults a
call may raise an error that `expected_errors.py` explains. All work must be done 420 virtual seconds after
the last fault (LIMIT_SECONDS and LIVENESS_SECONDS).
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
from oncelog_simulator.expected_errors import MEMBERSHIP, ExpectedErrors
from oncelog_simulator.faults import REFUSED_WRITES, Fault, apply_fault, draw_faults
from oncelog_simulator.history.check import Kind, Operation, Outcome
from oncelog_simulator.world import SERVERS, BrokerHost, Event, LogCapture, World

LIMIT_SECONDS = 120.0
"""Seconds within which a simulation without faults must end. Simulations with faults have longer."""
FAULTS_PATIENCE_SECONDS = 5.0
"""Seconds that a call may exceed its documented time-out in a seed with faults."""
TOPIC = "read"
MOST_ASSIGNMENTS = 4
"""Maximum number of assignments to two consumers with one group.instance.id, in a seed without faults.

More assignments mean that the two consumers repeatedly take the partitions from each other. Each fault may
end a session and so allows one more assignment to each consumer.
"""
FAULT_CHANCE = 0.5
FAULT_KINDS = (
    "kill",
    "power",
    "kill-in-write",
    "power-in-write",
    "stop",
    "pause",
    "partition",
    "disconnect",
    "bad-network",
    "full-disk",
    "slow-disk",
    "clock",
)
FAULTS_UNTIL_MS = 30_000
LIVENESS_SECONDS = 300.0
"""Seconds that a seed with faults has for its work, beyond LIMIT_SECONDS and the end of its last fault."""
TWIN_SECONDS = 30.0
"""Seconds after the last fault for which two consumers with one group.instance.id stay alive."""
SETTLE_SECONDS = 15.0
"""Seconds after the last fault within which the session of every dead member has ended."""
MAX_CLOCK_MS = 900_000
"""Milliseconds by which a fault may change a clock.

It is less than an hour, because the broker refuses records that are more than an hour ahead of its clock.
"""
HANG = "a call hangs"
FENCED = (FencedInstanceId, UnreleasedInstanceId)


@dataclass(frozen=True)
class ClientResult:
    """The result of one seed of interrupted clients."""

    seed: int
    kind: str
    violations: list[str]
    digest: str
    timeline: list[Event]
    virtual_s: float
    record_count: int
    faults: tuple[Fault, ...] = ()


class LivenessTimeout(Exception):
    """A call hangs, so the simulation ends."""


@contextmanager
def time_limit(application: Application, what: str, seconds: float, faults_s: float = 0.0) -> Iterator[None]:
    """Report a violation if the `with` block, a call with the time-out `seconds`, takes much longer.

    In a seed with faults, the longer of `seconds` and `faults_s` counts.
    """
    world, began_us = application.world, application.world.now_us
    limit_s = seconds + application.patience_s
    if world.expected_errors:
        limit_s = max(seconds, faults_s) + world.expected_errors.paused_s + FAULTS_PATIENCE_SECONDS
    timer = world.loop.call_later(limit_s, world.violate, HANG, f"{what} of {application.name}")
    try:
        yield
    finally:
        timer.cancel()
        world.note(application.name, f"{what} took {(world.now_us - began_us) / 1e6:g} s")


@contextmanager
def allow_expected_errors(application: Application, what: str) -> Iterator[None]:
    """Allow a call to raise an error that the faults explain.

    Any other error is a violation. Errors of a fenced member, and all errors in seeds without faults, are
    raised again.
    """
    try:
        yield
    except FENCED:
        raise
    except OncelogError as error:
        if not application.world.expected_errors:
            raise
        check_error(application, what, error)


def check_error(application: Application, what: str, error: Exception) -> None:
    """Note an error. It is a violation unless the faults explain it."""
    world = application.world
    world.note(application.name, f"{what}: {error!r}")
    if not isinstance(error, OncelogError) or not world.expected_errors.explains(error, world.now_us):
        world.violate("a call fails without a reason", f"{what} of {application.name}: {error!r}")


@contextmanager
def allow_failed_commit(application: Application) -> Iterator[None]:
    """Allow a commit to fail, because the application may not be a member of its group at that time."""
    try:
        yield
    except FENCED:
        if application.world.expected_errors:
            raise
    except MEMBERSHIP:
        pass
    except OncelogError as error:
        if application.world.expected_errors:
            check_error(application, "commit()", error)


class MemberView:
    """The records that a member of a group received, and the member's partitions.

    `held` has the partitions that the member should have according to its rebalance listeners.
    """

    def __init__(self, application: Application) -> None:
        self.application = application
        self.held: set[TopicPartition] = set()
        self.seen: set[tuple[str, int, int | None]] = set()
        self.assigned_count = 0
        self.is_fenced = False
        self._untold: set[TopicPartition] = set()
        """Partitions for which `held` and the assignment differed at the last check."""

    def take(self, records: list[Record]) -> None:
        """Add the received records to the application's history, as one POLL operation."""
        if records:
            application = self.application
            items = application.items_of(records)
            application.end(application.begin(Kind.POLL), Outcome.OK, items)
            self.seen.update((item.topic, item.partition, item.offset) for item in items)

    def check(self, assignment: list[TopicPartition]) -> None:
        """Report a violation if the listeners missed a change of the assignment.

        Partitions may change after a poll has returned and before this check. So a difference counts only if
        two successive checks see it.
        """
        untold = self.held ^ set(assignment)
        if lasting := untold & self._untold:
            text = f"{self.application.name}: of {sorted(lasting)}, holds {sorted(assignment)}"
            self.application.world.violate("a listener was not told", text)
        self._untold = untold

    def assigned(self, partitions: list[TopicPartition]) -> None:
        """Note assigned partitions. The consumer calls this as a rebalance listener."""
        self.application.session += 1
        self.assigned_count += 1
        self.held.update(partitions)

    def revoked(self, partitions: list[TopicPartition]) -> None:
        """Note revoked or lost partitions. The consumer calls this as a rebalance listener."""
        self.application.session += 1
        self.held.difference_update(partitions)


class LateSender(Sender):
    """A Sender that starts after the last fault."""

    async def work(self) -> None:
        await asyncio.sleep(
            self.world.expected_errors.end_us / 1e6 + SETTLE_SECONDS - self.world.now_us / 1e6
        )
        await super().work()


class ClientSimulation:
    """The broker and the applications of one seed.

    The applications in `following` start when those in `first` are done.
    """

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
        self.members: list[MemberView] = []
        """The members of the group. The last one reads all records that the group has not committed."""
        self.checks: list[Callable[[list[Operation], str], object]] = []
        """Further checks. Each is called with the operations, and with the name of the process that read all
        partitions at the end.
        """
        self.last: LastReader | None = None
        self.limit_s = LIMIT_SECONDS
        self.monitor = InvariantMonitor(world)
        """Observes the broker in seeds with faults."""

    def add_group(self, members: list[MemberView], last: MemberView, overlap_s: float, rng: Random) -> None:
        """Add a sender, the members of a group, and the group's last member.

        `overlap_s` is the time in seconds during which both members with one group.instance.id are alive.
        """
        burst_count = rng.randint(2, 5)
        self.first.append(Sender(self.world, "sender-0", TOPIC, self.partition_count, burst_count))
        self.first += [member.application for member in members]
        self.following.append(last.application)
        self.members += [*members, last]
        if self.kind == "twins":
            self.checks.append(lambda *_: check_twins(self.world, members, overlap_s))

    def add_faults(self, kept: Collection[int] | None = None) -> None:
        """Draw the faults of a seed; half of the seeds have none.

        `kept` has the numbers of the faults to run, None for all.
        """
        if not has_faults(self.world.seed):
            return
        rng = self.world.rng("client faults")
        loses_power = rng.random() < 0.5
        clients, count = (
            [application.name for application in self.first if application.name != "until"],
            rng.randint(1, 6),
        )
        drawn = draw_faults(rng, count, FAULTS_UNTIL_MS, clients, loses_power=loses_power, kinds=FAULT_KINDS)
        drawn = [_with_near_clock(fault) for fault in drawn]
        settings: dict[str, object] = {
            "log.segment.bytes": rng.choice((700, 3_000, 1 << 30)),
            "log.flush.interval.messages": 1 if loses_power else rng.choice((1, 3, 1 << 40)),
            "log.flush.offset.checkpoint.interval.ms": rng.choice((2_000, 60_000)),
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 3_000,
        }
        self.broker.settings = BROKER.parse({"listeners": SERVERS, **self.settings, **settings})
        self.faults = tuple(fault for number, fault in enumerate(drawn) if kept is None or number in kept)
        self.world.expected_errors = ExpectedErrors(
            [(fault.at_ms * 1_000, (fault.at_ms + fault.span_ms) * 1_000) for fault in drawn],
            paused_s=sum(fault.span_ms for fault in drawn if fault.kind == "pause") / 1_000,
            sets_clock=any(fault.kind == "clock" for fault in drawn),
            is_lasting=rng.random() < 0.5,
        )
        if self.members and self.world.expected_errors.is_lasting:
            self.first.append(LateSender(self.world, "sender-1", TOPIC, self.partition_count, 2))
        self.limit_s += self.world.expected_errors.end_us / 1e6 + LIVENESS_SECONDS
        self.monitor.writes_failed = any(fault.kind in REFUSED_WRITES for fault in drawn)
        self.broker.before_exit = self._broker_ends
        self.broker.on_recovered = self.monitor.recovered

    def _broker_ends(self, *, is_in_write: bool, lose_power: bool) -> None:
        if self.broker.node is not None:
            self.monitor.ending(self.broker.node, is_in_write=is_in_write, lose_power=lose_power)

    @property
    def node(self) -> BrokerState:
        """Return the state of the running broker. Call this only after the faults."""
        assert self.broker.node is not None
        return self.broker.node

    async def run(self) -> None:
        self.broker.start()
        disturbing = asyncio.ensure_future(self._bring_faults()) if self.faults else None
        for applications in (self.first, self.following):
            for application in applications:
                application.start()
            await self._until_done(applications)
            if disturbing is not None:
                await disturbing
            if applications is self.first and self.world.expected_errors.is_lasting:
                self._check_read_on()
        logs = self._logs()
        self.last = LastReader(self.world, "last", sorted(logs))
        self.last.start()
        await self._until_done([self.last])
        for tp, log in logs.items():
            check_log(self.world, tp, log)
        self._check()
        if self.faults:
            self.monitor.observe(self.node)
            self.broker.kill()
            self.broker.start_if_down()
            await self._until_up()

    async def _bring_faults(self) -> None:
        """Apply all faults, correct the clocks, and wait until dead sessions are over and the broker runs."""
        world = self.world
        observing = asyncio.ensure_future(self._observe())
        await asyncio.gather(*(apply_fault(self, fault) for fault in self.faults))
        world.note("fault", "no more faults")
        world.expected_errors.end_us = max(world.expected_errors.end_us, world.now_us)
        for host in world.hosts.values():
            host.set_clock(-host.wall_offset_ns // 1_000_000)
        await asyncio.sleep(SETTLE_SECONDS)
        await self._until_up()
        observing.cancel()

    async def _until_up(self) -> None:
        while self.broker.node is None or self.broker.running is None:
            await asyncio.sleep(0.1)

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.broker.node is not None:
                self.monitor.observe(self.broker.node)

    def _logs(self) -> dict[TopicPartition, Partition]:
        partitions = self.node.log_manager.partitions
        return {tp: log for tp, log in partitions.items() if not log.config.is_compacted}

    async def _until_done(self, applications: Iterable[Application]) -> None:
        while not all(application.is_done for application in applications):
            if any(violation.startswith(HANG) for violation in self.world.violations):
                raise LivenessTimeout
            await asyncio.sleep(0.1)

    def _check(self) -> None:
        assert self.last is not None
        everyone = [*self.first, *self.following, self.last]
        calls = sorted(
            (call for application in everyone for call in application.calls), key=lambda call: call.begin
        )
        operations = [call.operation(self.world.now_us) for call in calls]
        check_history(self.world, operations, self.last.name)
        for check in self.checks:
            check(operations, self.last.name)
        if self.members:
            self._check_given()

    def _check_read_on(self) -> None:
        """Report records that the group's members had not read when the last member started."""
        if self.kind != "consumer":
            return
        for tp, log in self._logs().items():
            stored = {
                n for header, _ in batches_of(log) for n in range(header.base_offset, header.last_offset + 1)
            }
            seen = {
                offset
                for member in self.members
                for topic, n, offset in member.seen
                if TopicPartition(topic, n) == tp
            }
            if stored - seen:
                self.world.violate("members do not read on after the faults", f"{tp} {sorted(stored - seen)}")

    def _check_given(self) -> None:
        assert self.last is not None
        stored = {
            (item.topic, item.partition, item.offset) for call in self.last.calls for item in call.items
        }
        for record in sorted(stored.difference(*(member.seen for member in self.members))):
            self.world.violate("committed, but given to nobody", f"{record}")


def check_twins(world: World, twins: list[MemberView], overlap_s: float) -> None:
    """Check that one of two consumers with one group.instance.id is fenced, and that they do not rebalance
    forever.
    """
    count = sum(member.assigned_count for member in twins)
    if count > MOST_ASSIGNMENTS + 2 * world.expected_errors.fault_count:
        world.violate("twins take from each other", f"{count} assignments")
    if (overlap_s > 5.0 or world.expected_errors) and not any(member.is_fenced for member in twins):
        world.violate("no twin is told", f"in {overlap_s:g} s")


def has_faults(seed: int) -> bool:
    """Return True for a seed in which the broker or the network fails."""
    return Random(f"{seed}/has client faults").random() < FAULT_CHANCE


def _with_near_clock(fault: Fault) -> Fault:
    if fault.kind != "clock":
        return fault
    return fault._replace(amount=max(min(fault.amount, MAX_CLOCK_MS), -MAX_CLOCK_MS))


def run_client_simulation(
    seed: int, simulation: ClientSimulation, within: AbstractContextManager[object]
) -> ClientResult:
    """Run a simulation to its end. The same seed always gives the same result."""
    world = simulation.world
    gc_was_enabled = gc.isenabled()
    # Switch off the garbage collector: it runs finalizers at moments that the seed does not determine.
    gc.disable()
    try:
        with LogCapture(world), within:
            playing = world.loop.create_task(simulation.run())
            try:
                if not world.loop.run_until(playing, int(simulation.limit_s * 1e6)):
                    left = [
                        application.name
                        for application in (*simulation.first, *simulation.following)
                        if not application.is_done
                    ]
                    world.violate("liveness", f"not over after {simulation.limit_s:g} s; not done: {left}")
                elif (error := playing.exception()) is not None and not isinstance(error, LivenessTimeout):
                    raise error
            except Livelock as error:
                world.violate("no rest", str(error))
            world.is_over = True
        world.loop.close()
        simulation.broker.release()
        records = sum(len(call.items) for application in simulation.first for call in application.calls)
        seconds = world.now_us / 1e6
        return ClientResult(
            seed,
            simulation.kind,
            world.violations,
            world.digest,
            world.timeline,
            seconds,
            records,
            simulation.faults,
        )
    finally:
        if gc_was_enabled:
            gc.enable()
