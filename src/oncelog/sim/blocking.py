"""The blocking clients in threads: what their applications do (sim/scene.py says what must hold).

A seed draws which thread runs next, where it is put off, and when a signal interrupts one that waits.

    producer    threads share one producer: first records of topics, flushes, futures waited for together
    consumer    one member polls, iterates, breaks off and is interrupted; another comes and goes
    twins       two consumers with one group.instance.id
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Any

from oncelog.edge.consumer import Consumer
from oncelog.edge.loop import LoopThread
from oncelog.edge.machine import become
from oncelog.edge.producer import Producer
from oncelog.errors import MisuseError, OncelogError
from oncelog.rules.history import Item, Kind, Outcome
from oncelog.sim.clients import QUICK, Application, Call
from oncelog.sim.loop import SimLoop
from oncelog.sim.machine import SimMachine
from oncelog.sim.scene import FENCED, TOPIC, Holdings, Run, Scene, bounded, play_scene
from oncelog.sim.scheduler import Scheduler, Signal, SimThread, ThreadLoop
from oncelog.sim.world import World
from oncelog.types import Record

KINDS = ("producer", "consumer", "consumer", "twins")


class ThreadMachine(SimMachine):
    """A SimMachine whose clients have threads of their own, which the scheduler runs."""

    def __init__(self, loop: SimLoop, chance: Any, scheduler: Scheduler) -> None:
        super().__init__(loop, chance)
        self._scheduler = scheduler

    def loop_thread(self, name: str) -> LoopThread:  # type: ignore[override]
        return LoopThread(name, ThreadLoop(self._scheduler))


class Threaded(Application):
    """An application of threads. Whatever one of them raises is a violation."""

    def __init__(self, world: World, name: str, scheduler: Scheduler) -> None:
        super().__init__(world, name)
        self.scheduler = scheduler
        self.thread_count = 0

    async def work(self) -> None:
        become(ThreadMachine(self.world.loop, self.chance, self.scheduler))
        main = self.begin_thread(self.main)
        while main.is_alive():
            await asyncio.sleep(0.05)
        self.judge(main)

    def main(self) -> None:
        """What its first thread does."""
        raise NotImplementedError

    def begin_thread(self, work: Callable[..., object], *args: object) -> SimThread:
        self.thread_count += 1
        name = f"{self.name}/{work.__name__}-{self.thread_count}"
        thread: Any = threading.Thread(target=partial(work, *args), name=name)
        thread.start()
        return thread  # type: ignore[no-any-return]

    def judge(self, *threads: SimThread) -> None:
        """Wait for them first."""
        for thread in threads:
            if thread.is_alive():
                thread.join()
            if thread.failure is not None:
                self.world.violate("a thread fails", f"{thread.name}: {thread.failure!r}")

    @contextmanager
    def interrupted(self, chance: float) -> Iterator[None]:
        """Signals may come meanwhile; then it is left early."""
        thread = self.scheduler.running
        assert thread is not None
        thread.signal_chance = chance
        try:
            yield
        except (KeyboardInterrupt, Signal) as error:
            self.world.note(self.name, f"is interrupted by {type(error).__name__}")
        finally:
            thread.signal_chance = 0.0


class SharedProducer(Threaded):
    """Threads that share a producer, and all of a sudden send to topics that nobody knew."""

    def __init__(self, world: World, name: str, scheduler: Scheduler) -> None:
        super().__init__(world, name, scheduler)
        self.topics = [f"topic-{number}" for number in range(self.chance.randint(2, 6))]
        self.settings: dict[str, object] = {
            **QUICK,
            "client.id": name,
            "linger.ms": self.chance.choice((0, 0, 5, 50)),
            "batch.size": self.chance.choice((1, 200, 16_384)),
        }
        self.sent: list[tuple[Call, concurrent.futures.Future[Any]]] = []
        self.told: dict[bytes, int] = {}
        self.is_over = False
        self.callback_chance = world.chance(f"callbacks of {name}")

    def main(self) -> None:
        with Producer(self.settings) as producer:
            senders = [
                self.begin_thread(self.send_some, producer, n) for n in range(self.chance.randint(2, 4))
            ]
            chatter = self.begin_thread(self.chat, producer)
            for _ in range(self.chance.randint(1, 3)):
                self.scheduler.sleep(self.chance.uniform(0.0, 0.1))
                with self.interrupted(0.2):
                    self.flush(producer)
                self.wait_together(producer)
            for thread in senders:
                thread.join()
            self.is_over = True
            self.judge(*senders, chatter)
            for number in range(3):
                self.send(producer, b"last-%d" % number)
                self.flush(producer)
        self.check_told(list(self.sent), "close()")

    def send_some(self, producer: Producer, number: int) -> None:
        for count in range(self.chance.randint(3, 12)):
            self.send(producer, b"%d-%d" % (number, count))
            if self.chance.random() < 0.2:
                self.scheduler.sleep(self.chance.uniform(0.0, 0.01))
            if self.chance.random() < 0.1:
                self.flush(producer)

    def chat(self, producer: Producer) -> None:
        """Records that come faster than they are acknowledged."""
        count = 0
        while not self.is_over:
            count += 1
            self.send(producer, b"chat-%d" % count)
            self.scheduler.sleep(self.chance.uniform(0.0, 0.004))

    def send(self, producer: Producer, value: bytes) -> None:
        topic = self.chance.choice(self.topics)
        call = self.begin(Kind.SEND, [Item(topic, 0, None, value)])
        call.session = threading.current_thread().name

        def delivered(metadata: Any, error: Exception | None) -> None:
            self.told[value] = self.told.get(value, 0) + 1
            if self.callback_chance.random() < 0.03:
                raise SystemExit("of a callback")

        self.sent.append((call, producer.send(topic, value, on_delivery=delivered)))

    def flush(self, producer: Producer) -> None:
        before = list(self.sent)
        with bounded(self, "flush()", 0.0):
            producer.flush()
        self.check_told(before, "flush()")

    def wait_together(self, producer: Producer) -> None:
        """Two threads wait for the same futures."""
        begin = len(self.sent)
        for _ in range(self.chance.randint(1, 5)):
            self.send(producer, b"together-%d" % len(self.sent))
        futures = [future for _, future in self.sent[begin:]]
        self.judge(*[self.begin_thread(self.wait_for, futures) for _ in range(2)])

    def wait_for(self, futures: list[concurrent.futures.Future[Any]]) -> None:
        with bounded(self, "wait()", 0.0):
            concurrent.futures.wait(futures)

    def check_told(self, sent: Iterable[tuple[Call, concurrent.futures.Future[Any]]], what: str) -> None:
        """Every record has its outcome, and its callback has run, once."""
        for call, future in sent:
            (item,) = call.items
            value: Any = item.value
            if not future.done():
                self.world.violate(f"no outcome after {what}", f"{value!r}")
                continue
            if self.told.get(value, 0) != 1:
                self.world.violate(f"not called back once after {what}", f"{value!r}: {self.told.get(value)}")
            if call.end is None:
                result = future.result()
                item = Item(item.topic, result.partition, result.offset, value)
                self.end(call, Outcome.OK, [item])


class Member(Threaded):
    """A consumer that polls and iterates, from `begin_s` to `end_s`."""

    signal_chance = 0.0
    begin_s = end_s = 0.0

    def __init__(self, world: World, name: str, scheduler: Scheduler, settings: dict[str, object]) -> None:
        super().__init__(world, name, scheduler)
        self.settings = {**QUICK, **settings, "client.id": name}
        self.holdings = Holdings(self)

    def main(self) -> None:
        self.scheduler.sleep(self.begin_s)
        consumer = Consumer(self.settings)
        mine = self.holdings
        try:
            consumer.subscribe(
                [TOPIC], on_assigned=mine.assigned, on_revoked=mine.revoked, on_lost=mine.revoked
            )
            while self.world.now_us < self.end_s * 1e6:
                with self.interrupted(self.signal_chance):
                    self.read(consumer)
                if self.chance.random() < 0.3:
                    self.scheduler.sleep(self.chance.uniform(0.0, 1.0))
            self.finish(consumer)
        finally:
            with bounded(self, "close()", 10.0):
                consumer.close()
            mine.check([])
            mine.check([])

    def finish(self, consumer: Consumer) -> None:
        """Before it closes: fail at a record, which close() must not commit, or close during a poll."""
        match self.chance.choice(("fail", "fail", "close", "nothing")):
            case "fail":
                for record in consumer:
                    self.world.note(self.name, f"fails at {record.topic}-{record.partition} {record.offset}")
                    break
            case "close":
                closer = self.begin_thread(consumer.close)
                with suppress(MisuseError):  # it was closed while it was polled
                    self.poll(consumer, 3.0)
                self.judge(closer)

    def read(self, consumer: Consumer) -> None:
        match self.chance.choice(("poll", "poll", "iterate", "commit")):
            case "poll":
                self.poll(consumer, self.chance.choice((0.0, 0.1, 1.0, 3.0)))
            case "iterate":
                self.iterate(consumer, self.chance.choice((1, 2, 5, 50)))
            case "commit":
                with suppress(OncelogError), bounded(self, "commit()", 0.0):  # no member at present
                    consumer.commit()

    def poll(self, consumer: Consumer, seconds: float) -> list[Record]:
        with bounded(self, "poll()", seconds):
            records = consumer.poll(seconds)
        self.holdings.take(records)
        self.holdings.check(consumer.assignment())
        return records

    def iterate(self, consumer: Consumer, limit: int) -> None:
        """Ends without records, or is broken off."""
        for count, record in enumerate(consumer, 1):
            self.holdings.take([record])
            if count >= limit:
                break


class LastMember(Member):
    """Reads what the group has not committed, until nothing comes."""

    def read(self, consumer: Consumer) -> None:
        """In `finish`."""

    def finish(self, consumer: Consumer) -> None:
        quiet_count = 0
        while quiet_count < 2:
            quiet_count = 0 if self.poll(consumer, 5.0) else quiet_count + bool(self.holdings.held)


class Twin(Member):
    """One of two with the same group.instance.id, until it is told so."""

    def main(self) -> None:
        try:
            super().main()
        except FENCED:
            self.holdings.is_fenced = True

    def read(self, consumer: Consumer) -> None:
        self.poll(consumer, 1.0)


def kind_of(seed: int) -> str:
    """Return what a seed plays."""
    return Random(f"{seed}/kind").choice(KINDS)


def play_threads(seed: int) -> Run:
    """Play a seed of the blocking clients."""
    world = World(seed)
    chance, kind = world.chance("scene"), kind_of(seed)
    scheduler = Scheduler(world.loop, world.chance("scheduler"), chance.choice((0.0, 0.01, 0.05, 0.2)))
    scene = Scene(world, kind, chance.randint(1, 4))
    if kind == "producer":
        scene.first.append(SharedProducer(world, "shared", scheduler))
    else:
        _cast_members(scene, scheduler, chance)
    return play_scene(seed, scene, scheduler.patched())


def member_settings(chance: Random, kind: str) -> dict[str, object]:
    """Draw what the members of a group have in common."""
    settings: dict[str, object] = {
        "group.id": "group",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": kind == "twins" or chance.random() < 0.7,
        "auto.commit.interval.ms": chance.choice((100, 1_000, 5_000)),
        "group.protocol": chance.choice(("classic", "classic", "consumer")),
        "max.poll.records": chance.choice((2, 500)),
        "fetch.max.wait.ms": 500,
        "consumer.timeout.ms": 2_000,
        "metadata.max.age.ms": 3_000,
    }
    if settings["group.protocol"] == "classic":
        settings |= {
            "heartbeat.interval.ms": 1_000,
            "session.timeout.ms": 6_000,
            "partition.assignment.strategy": chance.choice(("range", "cooperative-sticky")),
        }
    if kind == "twins":
        settings["group.instance.id"] = "twin"
    return settings


def _cast_members(scene: Scene, scheduler: Scheduler, chance: Random) -> None:
    world, kind = scene.world, scene.kind
    settings = member_settings(chance, kind)
    role = Twin if kind == "twins" else Member
    members = [role(world, f"member-{number}", scheduler, settings) for number in range(2)]
    for member, latest_s in zip(members, (1.0, 10.0), strict=True):
        member.begin_s = chance.uniform(1.0, latest_s)
        member.end_s = member.begin_s + chance.uniform(10.0, 20.0)
    if kind == "consumer":
        members[0].signal_chance = chance.choice((0.0, 0.02, 0.1, 0.3))
    last = LastMember(world, "last-member", scheduler, settings | {"group.instance.id": None})
    overlap_s = min(each.end_s for each in members) - max(each.begin_s for each in members)
    scene.cast_group([each.holdings for each in members], last.holdings, overlap_s, chance)
