"""Applications with blocking clients in threads. `client_simulation.py` has the checks.

A seed draws which thread runs next, where it is suspended, and when a signal interrupts a waiting thread.

    producer    threads share one producer: first records of topics, flushes, shared waits for futures
    consumer    one member polls, iterates, stops iterating and is interrupted;
                another member joins and leaves
    twins       two consumers with one group.instance.id
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from oncelog.client.consumer.blocking import Consumer
from oncelog.client.producer.blocking import Producer
from oncelog.errors import (
    DisconnectedError,
    LeaderNotAvailable,
    MisuseError,
    OncelogError,
    OutcomeUnknown,
    TimedOut,
)
from oncelog.runtime.loop_thread import LoopThread
from oncelog.runtime.system import set_runtime
from oncelog.types import Record
from oncelog_simulator.client_simulation import (
    FENCED,
    TOPIC,
    TWIN_SECONDS,
    ClientResult,
    ClientSimulation,
    MemberView,
    allow_expected_errors,
    allow_failed_commit,
    check_error,
    run_client_simulation,
    time_limit,
)
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application, Call
from oncelog_simulator.event_loop import SimLoop
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.runtime import SimRuntime
from oncelog_simulator.scheduler import Scheduler, Signal, SimThread, ThreadLoop
from oncelog_simulator.world import World

KINDS = ("producer", "consumer", "consumer", "twins")
EARLY_SECONDS = 1.0
"""Seconds by which a call may time out too early. The longest pause between retries is shorter."""
BOOTSTRAP_SECONDS = 5.0
"""The default of oncelog.bootstrap.timeout.ms, in seconds."""
ITERATION_SECONDS = 2.0
"""The consumer.timeout.ms of all members, in seconds."""
SLOW_PACE = 100.0
"""Factor by which applications that live through faults lengthen their pauses."""


class ThreadRuntime(SimRuntime):
    """A SimRuntime in which each client has its own threads. The scheduler runs them."""

    def __init__(self, loop: SimLoop, rng: Any, scheduler: Scheduler) -> None:
        super().__init__(loop, rng)
        self._scheduler = scheduler

    def loop_thread(self, name: str) -> LoopThread:  # type: ignore[override]
        return LoopThread(name, ThreadLoop(self._scheduler))


class ThreadedApplication(Application):
    """An application of threads. Any exception that a thread raises is a violation."""

    patience_s = 40.0
    """Seconds that a call may exceed its time-out; more than in other applications.

    A thread uses virtual time whenever the scheduler suspends it before a line, so flushes may take 10 s
    (seed 2028).
    """

    def __init__(self, world: World, name: str, scheduler: Scheduler) -> None:
        super().__init__(world, name)
        self.scheduler = scheduler
        self.thread_count = 0

    async def work(self) -> None:
        self.runtime = ThreadRuntime(self.world.loop, self.rng, self.scheduler)
        self.runtime.wall_offset_ns = self.wall_offset_ns
        set_runtime(self.runtime)
        main = self.start_thread(self.main)
        while main.is_alive():
            await asyncio.sleep(0.05)
        self.check_threads(main)

    def main(self) -> None:
        """Do the work of the application's first thread."""
        raise NotImplementedError

    def start_thread(self, work: Callable[..., object], *args: object) -> SimThread:
        self.thread_count += 1
        name = f"{self.name}/{work.__name__}-{self.thread_count}"
        thread: Any = threading.Thread(target=partial(work, *args), name=name)
        thread.start()
        return thread  # type: ignore[no-any-return]

    def check_threads(self, *threads: SimThread) -> None:
        """Wait for threads, and report the exceptions that they raised."""
        for thread in threads:
            if thread.is_alive():
                thread.join()
            if thread.failure is not None:
                self.world.violate("a thread fails", f"{thread.name}: {thread.failure!r}")

    @contextmanager
    def interrupted(self, signal_chance: float) -> Iterator[None]:
        """Let signals interrupt the block. An interrupted block ends early."""
        thread = self.scheduler.running
        assert thread is not None
        thread.signal_chance = signal_chance
        try:
            yield
        except (KeyboardInterrupt, Signal) as error:
            self.world.note(self.name, f"is interrupted by {type(error).__name__}")
        finally:
            thread.signal_chance = 0.0


@dataclass(frozen=True)
class ProducerTimeouts:
    """The time-outs of a producer in seconds; 0 in seeds without faults, which check no time-outs."""

    block_s: float = 0.0
    delivery_s: float = 0.0
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def close_s(self) -> float:
        """Return the longest time in seconds that a close may take. A close includes a flush."""
        return self.block_s + self.delivery_s

    @classmethod
    def drawn(cls, rng: Random) -> ProducerTimeouts:
        """Draw the time-outs of a producer that lives through faults."""
        block_s, delivery_s = rng.choice((1, 5, 20)), rng.choice((3, 10, 40))
        settings = {
            "max.block.ms": block_s * 1_000,
            "delivery.timeout.ms": delivery_s * 1_000,
            "buffer.memory": rng.choice((1_000, 33_554_432)),
            "max.in.flight.requests.per.connection": rng.choice((1, 2, 5, 5)),
        }
        return cls(block_s, delivery_s, settings)


def check_time(application: Application, what: str, error: Exception, call: Call, seconds: float) -> None:
    """Report a call that found no broker or leader and gave up long before its time-out."""
    world = application.world
    taken_s = (world.now_us - call.begin) / 1e6
    gave_up = isinstance(error, TimedOut | DisconnectedError | LeaderNotAvailable)
    if gave_up and taken_s < seconds - EARLY_SECONDS:
        world.violate("a call gives up early", f"{what} of {application.name} after {taken_s:g} s: {error!r}")


class SharedProducer(ThreadedApplication):
    """Threads that share a producer and send to drawn topics, whose metadata the producer may not have yet.

    In a seed with faults, new producers follow one another until the last fault is over. All of them send
    more slowly than in other seeds.
    """

    def __init__(self, world: World, name: str, scheduler: Scheduler) -> None:
        super().__init__(world, name, scheduler)
        self.topics = [f"topic-{number}" for number in range(self.rng.randint(2, 6))]
        self.settings: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "client.id": name,
            "linger.ms": self.rng.choice((0, 0, 5, 50)),
            "batch.size": self.rng.choice((1, 200, 16_384)),
        }
        self.sent: list[tuple[Call, concurrent.futures.Future[Any]]] = []
        self.callback_counts: dict[bytes, int] = {}
        self.refused_count = 0
        self.is_over = False
        self.callback_rng = world.rng(f"callbacks of {name}")
        self.timeouts = ProducerTimeouts()
        self.pace = 1.0
        self.prefix = ""
        """Prefix of the current producer's values, so that no value is sent twice."""

    def main(self) -> None:
        self.use_a_producer()
        count = 1
        while self.world.now_us < self.world.expected_errors.end_us:
            count += 1
            self.prefix = f"{count}-"
            self.topics.append(f"topic-of-{count}")
            self.use_a_producer()

    def use_a_producer(self) -> None:
        if self.world.expected_errors:
            self.timeouts, self.pace = ProducerTimeouts.drawn(self.rng), SLOW_PACE
            self.settings |= self.timeouts.settings
        self.is_over, self.sent = False, []
        producer = Producer(self.settings)
        try:
            self.share(producer)
        finally:
            with (
                time_limit(self, "close()", 0.0, self.timeouts.close_s),
                allow_expected_errors(self, "close()"),
            ):
                producer.close()
        self.check_delivered(list(self.sent), "close()")

    def share(self, producer: Producer) -> None:
        """Let several threads use the producer."""
        senders = [self.start_thread(self.send_some, producer, n) for n in range(self.rng.randint(2, 4))]
        steady = self.start_thread(self.send_steadily, producer)
        for _ in range(self.rng.randint(1, 3)):
            self.scheduler.sleep(self.rng.uniform(0.0, 0.1 * self.pace))
            with self.interrupted(0.2):
                self.flush(producer)
            self.wait_together(producer)
        for thread in senders:
            thread.join()
        self.is_over = True
        self.check_threads(*senders, steady)
        if self.world.expected_errors.is_lasting:
            self.scheduler.sleep(max(self.world.expected_errors.lasting_us - self.world.now_us, 0) / 1e6)
        for number in range(3):
            self.send(producer, b"%slast-%d" % (self.prefix.encode(), number))
            self.flush(producer)

    def send_some(self, producer: Producer, number: int) -> None:
        for count in range(self.rng.randint(3, 12)):
            self.send(producer, b"%s%d-%d" % (self.prefix.encode(), number, count))
            if self.rng.random() < 0.2:
                self.scheduler.sleep(self.rng.uniform(0.0, 0.01 * self.pace))
            if self.rng.random() < 0.1:
                self.flush(producer)

    def send_steadily(self, producer: Producer) -> None:
        """Send records faster than they are acknowledged."""
        count = 0
        while not self.is_over:
            count += 1
            self.send(producer, b"%schat-%d" % (self.prefix.encode(), count))
            self.scheduler.sleep(self.rng.uniform(0.0, 0.004 * self.pace))

    def send(self, producer: Producer, value: bytes) -> None:
        topic = self.rng.choice(self.topics)
        call = self.begin(Kind.SEND, [Item(topic, 0, None, value)])
        call.session = threading.current_thread().name

        def delivered(metadata: Any, error: Exception | None) -> None:
            self.callback_counts[value] = self.callback_counts.get(value, 0) + 1
            if error is not None:
                check_error(self, f"{value!r}", error)
                # Check the time only if each batch has one record: delivery.timeout.ms counts from a batch's
                # first record.
                if self.settings["batch.size"] == 1:
                    check_time(self, f"{value!r}", error, call, self.timeouts.delivery_s)
            if self.callback_rng.random() < 0.03:
                raise SystemExit("of a callback")

        try:
            with self.timed("send()", self.timeouts.block_s):
                future = producer.send(topic, value, on_delivery=delivered)
        except OncelogError as error:
            self.end(call, Outcome.FAIL)
            self.refused_count += 1
            check_error(self, "send()", error)
            check_time(self, "send()", error, call, self.timeouts.block_s)
        else:
            self.sent.append((call, future))

    def timed(self, what: str, seconds: float) -> AbstractContextManager[object]:
        """Limit the time of a call in a seed with faults."""
        return time_limit(self, what, seconds) if self.world.expected_errors else nullcontext()

    def flush(self, producer: Producer) -> None:
        before = list(self.sent)
        with time_limit(self, "flush()", 0.0, self.timeouts.delivery_s):
            producer.flush()
        self.check_delivered(before, "flush()")

    def wait_together(self, producer: Producer) -> None:
        """Let two threads wait for the same futures."""
        begin = len(self.sent)
        for _ in range(self.rng.randint(1, 5)):
            number = len(self.sent) + self.refused_count
            self.send(producer, b"%stogether-%d" % (self.prefix.encode(), number))
        futures = [future for _, future in self.sent[begin:]]
        self.check_threads(*[self.start_thread(self.wait_for, futures) for _ in range(2)])

    def wait_for(self, futures: list[concurrent.futures.Future[Any]]) -> None:
        with time_limit(self, "wait()", 0.0, self.timeouts.delivery_s):
            concurrent.futures.wait(futures)

    def check_delivered(self, sent: Iterable[tuple[Call, concurrent.futures.Future[Any]]], what: str) -> None:
        """Check that every record has an outcome, and that its callback was called exactly once."""
        for call, future in sent:
            (item,) = call.items
            value: Any = item.value
            if not future.done():
                self.world.violate(f"no outcome after {what}", f"{value!r}")
                continue
            if self.callback_counts.get(value, 0) != 1:
                self.world.violate(
                    f"not called back once after {what}", f"{value!r}: {self.callback_counts.get(value)}"
                )
            if call.end is None:
                self.settle(call, future)

    def settle(self, call: Call, future: concurrent.futures.Future[Any]) -> None:
        (item,) = call.items
        error = future.exception()
        if error is None:
            result = future.result()
            self.end(call, Outcome.OK, [Item(item.topic, result.partition, result.offset, item.value)])
            return
        self.end(call, Outcome.UNKNOWN if isinstance(error, OutcomeUnknown) else Outcome.FAIL)


@dataclass(frozen=True)
class MemberTimeouts:
    """The time-outs of a group member in seconds."""

    commit_s: float = 0.0
    settings: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, application: Application) -> MemberTimeouts:
        """Draw the time-outs of a member in a seed with faults. In other seeds return the defaults."""
        if not application.world.expected_errors:
            return cls()
        timeout_s = application.world.rng(f"limits of {application.name}").choice((2, 2, 12))
        # Shorten max.poll.interval.ms, because a member waits that long for a lost response to JoinGroup, as
        # in Java.
        settings: dict[str, object] = {
            "request.timeout.ms": timeout_s * 1_000,
            "max.poll.interval.ms": 15_000,
        }
        return cls(BOOTSTRAP_SECONDS + timeout_s, settings)


class Member(ThreadedApplication):
    """A consumer that polls and iterates between the virtual times `begin_s` and `end_s`."""

    signal_chance = 0.0
    begin_s = end_s = 0.0

    def __init__(self, world: World, name: str, scheduler: Scheduler, settings: dict[str, object]) -> None:
        super().__init__(world, name, scheduler)
        self.settings: dict[str, object] = {**SHORT_TIMEOUTS, **settings, "client.id": name}
        self.view = MemberView(self)
        self.timeouts = MemberTimeouts()

    def main(self) -> None:
        self.scheduler.sleep(self.begin_s)
        self.timeouts = MemberTimeouts.of(self)
        consumer = Consumer(self.settings | self.timeouts.settings)
        mine = self.view
        try:
            consumer.subscribe(
                [TOPIC], on_assigned=mine.assigned, on_revoked=mine.revoked, on_lost=mine.revoked
            )
            while self.world.now_us < self.end_us():
                with self.interrupted(self.signal_chance), allow_expected_errors(self, "a call"):
                    self.read(consumer)
                if self.rng.random() < 0.3:
                    self.scheduler.sleep(self.rng.uniform(0.0, 1.0))
            self.finish(consumer)
        finally:
            with time_limit(self, "close()", 10.0), allow_expected_errors(self, "close()"):
                consumer.close()
            mine.check([])
            mine.check([])

    def end_us(self) -> float:
        """Return the virtual time in microseconds at which the consumer closes."""
        return max(self.end_s * 1e6, self.world.expected_errors.lasting_us)

    def finish(self, consumer: Consumer) -> None:
        """Do the member's drawn last work before its consumer closes.

        The work may be to leave a loop at a record, which close() must then not commit. Or another thread
        closes the consumer during a poll.
        """
        match self.rng.choice(("fail", "fail", "close", "nothing")):
            case "fail":
                with allow_expected_errors(self, "iteration"):
                    for record in consumer:
                        self.world.note(
                            self.name, f"fails at {record.topic}-{record.partition} {record.offset}"
                        )
                        break
            case "close":
                closer = self.start_thread(self.close, consumer)
                with (
                    allow_expected_errors(self, "poll()"),
                    suppress(MisuseError),
                    # The poll raises MisuseError if the other thread has closed the consumer.
                ):
                    self.poll(consumer, 3.0)
                self.check_threads(closer)

    def close(self, consumer: Consumer) -> None:
        with allow_expected_errors(self, "close()"):
            consumer.close()

    def read(self, consumer: Consumer) -> None:
        match self.rng.choice(("poll", "poll", "iterate", "commit")):
            case "poll":
                self.poll(consumer, self.rng.choice((0.0, 0.1, 1.0, 3.0)))
            case "iterate":
                self.iterate(consumer, self.rng.choice((1, 2, 5, 50)))
            case "commit":
                with allow_failed_commit(self), time_limit(self, "commit()", 0.0, self.timeouts.commit_s):
                    consumer.commit()

    def poll(self, consumer: Consumer, seconds: float) -> list[Record]:
        with time_limit(self, "poll()", seconds):
            records = consumer.poll(seconds)
        self.view.take(records)
        self.view.check(consumer.assignment())
        return records

    def iterate(self, consumer: Consumer, limit: int) -> None:
        """Iterate over up to `limit` records. Stop early if no record arrives."""
        records = iter(consumer)
        for _ in range(limit):
            with time_limit(self, "iteration", ITERATION_SECONDS):
                record = next(records, None)
            if record is None:
                return
            self.view.take([record])


class LastMember(Member):
    """The member that starts last. It reads all records that the group has not committed."""

    def end_us(self) -> float:
        return 0.0

    def read(self, consumer: Consumer) -> None:
        """Do nothing: all reading happens in `finish`."""

    def finish(self, consumer: Consumer) -> None:
        quiet_count = 0
        while quiet_count < 2:
            quiet_count = 0 if self.poll(consumer, 5.0) else quiet_count + bool(self.view.held)


class Twin(Member):
    """One of two members with the same group.instance.id. It runs until it is fenced."""

    def main(self) -> None:
        try:
            super().main()
        except FENCED:
            self.view.is_fenced = True

    def end_us(self) -> float:
        return twins_end_us(self.world, self.end_s)

    def read(self, consumer: Consumer) -> None:
        self.poll(consumer, 1.0)


def twins_end_us(world: World, end_s: float) -> float:
    """Return the virtual time in microseconds at which a twin closes: at `end_s` or after the faults."""
    return max(
        end_s * 1e6, world.expected_errors.end_us + TWIN_SECONDS * 1e6 if world.expected_errors else 0.0
    )


def kind_of(seed: int) -> str:
    """Return the kind of simulation that a seed runs."""
    return Random(f"{seed}/kind").choice(KINDS)


def run_blocking_clients(seed: int, kept: Collection[int] | None = None) -> ClientResult:
    """Run a seed of the blocking clients. `kept` has the numbers of the faults to run, None for all."""
    world = World(seed)
    rng, kind = world.rng("scene"), kind_of(seed)
    scheduler = Scheduler(world.loop, world.rng("scheduler"), rng.choice((0.0, 0.01, 0.05, 0.2)))
    simulation = ClientSimulation(world, kind, rng.randint(1, 4))
    if kind == "producer":
        simulation.first.append(SharedProducer(world, "shared", scheduler))
    else:
        _add_members(simulation, scheduler, rng)
    simulation.add_faults(kept)
    return run_client_simulation(seed, simulation, scheduler.patched())


def member_settings(rng: Random, kind: str) -> dict[str, object]:
    """Draw the settings that all members of a group share."""
    settings: dict[str, object] = {
        "group.id": "group",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": kind == "twins" or rng.random() < 0.7,
        "auto.commit.interval.ms": rng.choice((100, 1_000, 5_000)),
        "group.protocol": rng.choice(("classic", "classic", "consumer")),
        "max.poll.records": rng.choice((2, 500)),
        "fetch.max.wait.ms": 500,
        "consumer.timeout.ms": round(ITERATION_SECONDS * 1_000),
        "metadata.max.age.ms": 3_000,
    }
    if settings["group.protocol"] == "classic":
        settings |= {
            "heartbeat.interval.ms": 1_000,
            "session.timeout.ms": 6_000,
            "partition.assignment.strategy": rng.choice(("range", "cooperative-sticky")),
        }
    if kind == "twins":
        settings["group.instance.id"] = "twin"
    return settings


def _add_members(simulation: ClientSimulation, scheduler: Scheduler, rng: Random) -> None:
    world, kind = simulation.world, simulation.kind
    settings = member_settings(rng, kind)
    role = Twin if kind == "twins" else Member
    members = [role(world, f"member-{number}", scheduler, settings) for number in range(2)]
    for member, latest_s in zip(members, (1.0, 10.0), strict=True):
        member.begin_s = rng.uniform(1.0, latest_s)
        member.end_s = member.begin_s + rng.uniform(10.0, 20.0)
    if kind == "consumer":
        members[0].signal_chance = rng.choice((0.0, 0.02, 0.1, 0.3))
    last = LastMember(world, "last-member", scheduler, settings | {"group.instance.id": None})
    overlap_s = min(member.end_s for member in members) - max(member.begin_s for member in members)
    simulation.add_group([member.view for member in members], last.view, overlap_s, rng)
