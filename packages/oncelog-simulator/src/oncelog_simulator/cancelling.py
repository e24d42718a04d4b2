"""The asyncio clients, whose calls are cancelled: their applications (scene.py says what must hold).

A seed draws the await of a call at which, or soon after which, its task is cancelled. The application then
proceeds as the documentation says: a call that was cancelled is like one that timed out.

    producer    tasks share one producer: first records of topics, flushes while others send, close
    consumer    one member polls, iterates and breaks off, with listeners that await; another comes and goes
    twins       two consumers with one group.instance.id
    copier      consume, transform, produce; a writer that closes its producer amid a transaction
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from random import Random
from typing import Any, ClassVar

from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import MisuseError, OncelogError, OutcomeUnknown, TimedOut
from oncelog.types import Record, TopicPartition
from oncelog_simulator.blocking import (
    ITERATION_SECONDS,
    SLOW_PACE,
    GroupLimits,
    SendLimits,
    check_time,
    member_settings,
    twins_end_us,
)
from oncelog_simulator.checks import check_copies
from oncelog_simulator.clients import QUICK, Application, Call, LastReader
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.scene import (
    FENCED,
    LIVENESS_SECONDS,
    TOPIC,
    Holdings,
    Run,
    Scene,
    bounded,
    excused,
    judge_error,
    play_scene,
    uncommitted,
)
from oncelog_simulator.txn_clients import ConsumeTransformProduce, Writer
from oncelog_simulator.workloads import create_topic
from oncelog_simulator.world import World

KINDS = ("producer", "consumer", "consumer", "twins", "copier", "copier")
OUTWARD = "outward"
FREE_SECONDS = 3.0
"""So long after its producer was closed nobody waits for a transaction."""
COPY_SECONDS = 30
FAULT_EFFECT_US = 10_000_000
"""So long after a fault the coordinator may still not be reached."""
AWAITS = (0, 0, 0, 1, 1, 2, 3, 5, 8, 13)
_CUT = {"send", "flush", "close", "poll", "commit", "position", "seek_to_committed", "__anext__"} | {
    f"{what}_transaction{s}"
    for what, s in (("init", "s"), ("send_offsets_to", ""), ("commit", ""), ("abort", ""))
}


class Cut(TimedOut):
    """A call was cancelled."""


class _Counted:
    """A coroutine that calls `reached` at its await number `at`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, reached: Callable[[], object]) -> None:
        self._coroutine, self._at, self._reached = coroutine, at, reached

    def __await__(self) -> Generator[Any, Any, Any]:
        count, error = 0, None
        while True:
            try:
                waited = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            if count == self._at:
                self._reached()
            count, error = count + 1, None
            try:
                yield waited
            except BaseException as raised:
                error = raised


class Cutting:
    """A client of which each call is, with a chance of `share`, cancelled at one of its awaits."""

    repeated: ClassVar[frozenset[str]] = frozenset()
    """Calls that are then made again, for the application cannot do without."""

    def __init__(self, client: Any, application: Application, share: float, which: str = "") -> None:
        self.client, self.application, self.share = client, application, share
        self.rng = application.world.chance(f"cuts of {application.name} {application.start_count}{which}")
        self.cut_count = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.client, name)
        return partial(self._call, name, attribute) if name in _CUT else attribute

    async def __aenter__(self) -> Cutting:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_for_good()

    async def close_for_good(self) -> None:
        """However often it takes."""
        with suppress(Cut):
            await self.close()
        await self.client.close()

    async def _call(self, name: str, method: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Raise Cut when it was cancelled."""
        if self.rng.random() >= self.share:
            return await method(*args, **how)
        loop = asyncio.get_running_loop()
        seconds = self.rng.choice((None, None, 0.0, self.rng.uniform(0.0, 0.02), self.rng.uniform(0.0, 1.0)))

        def reached() -> None:
            task.cancel() if seconds is None else loop.call_later(seconds, task.cancel)

        async def counted() -> Any:
            return await _Counted(method(*args, **how), self.rng.choice(AWAITS), reached)

        task = asyncio.ensure_future(counted())
        try:
            return await task
        except asyncio.CancelledError:
            self.cut_count += 1
            self.application.world.note(self.application.name, f"{name} is cancelled")
            if name in self.repeated:
                return await method(*args, **how)
            raise Cut(f"{name} was cancelled") from None


class SharedAsyncProducer(Application):
    """Tasks that share a producer, and all of a sudden send to topics that nobody knew.

    In a seed with faults one producer follows the other until the last fault is over, each more slowly.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.topics = [f"topic-{number}" for number in range(self.chance.randint(2, 6))]
        self.settings: dict[str, object] = {
            **QUICK,
            "client.id": name,
            "linger.ms": self.chance.choice((0, 0, 5, 50)),
            "batch.size": self.chance.choice((1, 200, 16_384)),
        }
        self.sent: list[tuple[Call, asyncio.Future[Any]]] = []
        self.told: dict[bytes, int] = {}
        self.is_over = self.is_closing = False
        self.limits = SendLimits()
        self.pace = 1.0
        self.prefix = ""
        """Of its values and sessions."""

    async def work(self) -> None:
        await self.use_a_producer()
        count = 1
        while self.world.now_us < self.world.excuses.end_us:
            count += 1
            self.prefix = f"{count}-"
            self.topics.append(f"topic-of-{count}")
            await self.use_a_producer()

    async def use_a_producer(self) -> None:
        if self.world.excuses:
            self.limits, self.pace = SendLimits.drawn(self.chance), SLOW_PACE
            self.settings |= self.limits.settings
        self.is_over, self.is_closing, self.sent = False, False, []
        producer = Cutting(AsyncProducer(self.settings), self, 0.3, self.prefix)
        senders = [self.send_some(producer, number) for number in range(self.chance.randint(1, 3))]
        chatter = [self.chat(producer, number) for number in range(4)]
        work = asyncio.gather(*chatter, *senders)
        for _ in range(self.chance.randint(1, 4)):
            await self.rest(0.1 * self.pace)
            await self.flush(producer)
        self.is_over = True
        await work
        await self.flush(producer)
        if self.world.excuses.is_lasting:
            await asyncio.sleep(max(self.world.excuses.lasting_us - self.world.now_us, 0) / 1e6)
        for count in range(3):
            await self.send_and_flush_in_callback(producer, count)
        self.is_closing = True  # and gives up what it would wait for, when it is cancelled
        with bounded(self, "close()", 0.0, self.limits.close_s) if self.world.excuses else nullcontext():
            await producer.close_for_good()
        self.check_told(list(self.sent), "close()")

    async def send_some(self, producer: Cutting, number: int) -> None:
        for count in range(self.chance.randint(3, 12)):
            await self.send(producer, f"task-{number}", count)
            if self.chance.random() < 0.2:
                await self.rest(0.01 * self.pace)
            if self.chance.random() < 0.1:
                await self.flush(producer)

    async def chat(self, producer: Cutting, number: int) -> None:
        """Records that come faster than they are acknowledged."""
        count = 0
        while not self.is_over:
            count += 1
            await self.send(producer, f"chat-{number}", count)
            await self.rest(0.004 * self.pace)

    async def send_and_flush_in_callback(self, producer: Cutting, count: int) -> None:
        """Flush at the moment when a record is delivered: all is settled, and nobody was told yet."""
        flushing: list[asyncio.Task[None]] = []
        flush = partial(self.flush, producer)
        await self.send(producer, "alone", count, lambda: flushing.append(asyncio.ensure_future(flush())))
        await self.flush(producer)
        await asyncio.gather(*flushing)

    async def send(
        self, producer: Cutting, who: str, count: int, on_delivery: Callable[[], None] | None = None
    ) -> None:
        """Send a record; a send that is cancelled takes none."""
        who = self.prefix + who
        topic, value = self.chance.choice(self.topics), b"%s-%d" % (who.encode(), count)
        call = self.begin(Kind.SEND, [Item(topic, 0, None, value)])
        call.session = who

        def delivered(metadata: Any, error: Exception | None) -> None:
            self.told[value] = self.told.get(value, 0) + 1
            if error is not None and self.world.excuses and not self.is_closing:
                judge_error(self, f"{value!r}", error)
                if self.settings["batch.size"] == 1:  # else the time is that of the batch's first record
                    check_time(self, f"{value!r}", error, call, self.limits.delivery_s)
            if on_delivery is not None:
                on_delivery()

        try:
            with bounded(self, "send()", self.limits.block_s) if self.world.excuses else nullcontext():
                future = await producer.send(topic, value, on_delivery=delivered)
        except Cut:
            self.end(call, Outcome.FAIL)
        except OncelogError as error:
            self.end(call, Outcome.FAIL)
            judge_error(self, "send()", error)
            check_time(self, "send()", error, call, self.limits.block_s)
        else:
            self.sent.append((call, future))

    async def flush(self, producer: Cutting) -> None:
        before = list(self.sent)
        try:
            with bounded(self, "flush()", 0.0, self.limits.delivery_s):
                await producer.flush()
        except Cut:
            return
        except MisuseError:
            if not (self.world.excuses and self.is_closing):  # a record was delivered as late as that
                raise
            return
        self.check_told(before, "flush()")

    def check_told(self, sent: Iterable[tuple[Call, asyncio.Future[Any]]], what: str) -> None:
        """Every record has its outcome, and its callback has run, once."""
        for call, future in sent:
            (item,) = call.items
            value: Any = item.value
            if self.told.get(value, 0) != 1:
                self.world.violate(f"not called back once after {what}", f"{value!r}: {self.told.get(value)}")
            if not future.done():
                self.world.violate(f"no outcome after {what}", f"{value!r}")
            elif call.end is None:
                self.settle(call, future, is_cut=what == "close()")

    def settle(self, call: Call, future: asyncio.Future[Any], *, is_cut: bool) -> None:
        """Note a record's outcome. A close that was cancelled gives up what it would wait for."""
        (item,) = call.items
        if (error := future.exception()) is None:
            result = future.result()
            self.end(call, Outcome.OK, [Item(item.topic, result.partition, result.offset, item.value)])
            return
        is_unknown = is_cut or isinstance(error, OutcomeUnknown)
        if not self.world.excuses and not is_cut:
            self.world.violate("a record failed", f"{item.value!r}: {error!r}")
        self.end(call, Outcome.UNKNOWN if is_unknown else Outcome.FAIL)


class AsyncMember(Application):
    """A consumer that polls and iterates, from `begin_s` to `end_s`."""

    begin_s = end_s = 0.0
    share = 0.0

    def __init__(self, world: World, name: str, settings: dict[str, object]) -> None:
        super().__init__(world, name)
        self.settings: dict[str, object] = {**QUICK, **settings, "client.id": name}
        self.holdings = Holdings(self)
        self.limits = GroupLimits()

    async def work(self) -> None:
        await asyncio.sleep(self.begin_s)
        self.limits = GroupLimits.of(self)
        consumer = Cutting(AsyncConsumer(self.settings | self.limits.settings), self, self.share)
        mine = self.holdings
        try:
            consumer.subscribe(
                [TOPIC],
                on_assigned=self._after_a_while(mine.assigned),
                on_revoked=self._after_a_while(mine.revoked),
                on_lost=mine.revoked,
            )
            while self.world.now_us < self.end_us():
                with excused(self, "a call"), suppress(Cut):
                    await self.read(consumer)
                if self.chance.random() < 0.3:
                    await self.rest(1.0)
            await self.finish(consumer)
        finally:
            with bounded(self, "close()", 10.0), excused(self, "close()"):
                await consumer.close_for_good()

    def end_us(self) -> float:
        """Return when it closes."""
        return max(self.end_s * 1e6, self.world.excuses.lasting_us)

    def _after_a_while(
        self, told: Callable[[list[TopicPartition]], None]
    ) -> Callable[[list[TopicPartition]], Awaitable[None]]:
        async def listener(partitions: list[TopicPartition]) -> None:
            if self.chance.random() < 0.5:
                await self.rest(0.3)
            told(partitions)

        return listener

    async def finish(self, consumer: Cutting) -> None:
        """Before it closes."""

    async def read(self, consumer: Cutting) -> None:
        match self.chance.choice(("poll", "poll", "iterate", "commit")):
            case "poll":
                await self.poll(consumer, self.chance.choice((0.0, 0.1, 1.0, 3.0)))
            case "iterate":
                await self.iterate(consumer, self.chance.choice((1, 2, 5, 50)))
            case "commit":
                with uncommitted(self), suppress(Cut), bounded(self, "commit()", 0.0, self.limits.commit_s):
                    await consumer.commit()

    async def poll(self, consumer: Cutting, seconds: float) -> list[Record]:
        with bounded(self, "poll()", seconds):
            records: list[Record] = await consumer.poll(seconds)
        self.holdings.take(records)
        self.holdings.check(consumer.assignment())
        return records

    async def iterate(self, consumer: Cutting, limit: int) -> None:
        """Ends without records, is broken off, or cancelled."""
        records = Cutting(consumer.client.__aiter__(), self, consumer.share)
        for _ in range(limit):
            try:
                with bounded(self, "iteration", ITERATION_SECONDS):
                    record = await records.__anext__()
                self.holdings.take([record])
            except StopAsyncIteration:
                return


class LastAsyncMember(AsyncMember):
    """Reads what the group has not committed, until nothing comes."""

    def end_us(self) -> float:
        return 0.0

    async def finish(self, consumer: Cutting) -> None:
        quiet_count = 0
        while quiet_count < 2:
            quiet_count = 0 if await self.poll(consumer, 5.0) else quiet_count + bool(self.holdings.held)


class AsyncTwin(AsyncMember):
    """One of two with the same group.instance.id, until it is told so."""

    async def work(self) -> None:
        try:
            await super().work()
        except FENCED:
            self.holdings.is_fenced = True

    def end_us(self) -> float:
        return twins_end_us(self.world, self.end_s)

    async def read(self, consumer: Cutting) -> None:
        await self.poll(consumer, 1.0)


class CutWriter(Writer):
    """A Writer whose calls are cancelled, and that closes some producers amid a transaction."""

    def __init__(self, world: World, name: str, topic: str, partitions: int, scene: Scene) -> None:
        super().__init__(world, name, topic, partitions, bursts=8)
        self.scene = scene
        self.settings |= {"transaction.timeout.ms": 60_000}

    async def new_producer(self) -> Any:
        return _Transacting(await super().new_producer(), self, 0.3)

    async def transact(self, producer: Any) -> bool:
        if self.chance.random() < 0.3:
            await self.close_amid(producer)
            return False
        return await super().transact(producer)

    async def close_amid(self, producer: Any) -> None:
        self.bursts_left -= 1
        self.transaction += 1
        await producer.begin_transaction()
        with suppress(Cut):
            await self.put(producer, self.topic)
            await producer.flush()
        call = self.begin(Kind.ABORT, transaction=self.transaction)
        began_us = self.world.now_us
        with suppress(Cut):
            await producer.close()
            self.end(call, Outcome.OK)
            await asyncio.sleep(FREE_SECONDS)
            if self.world.excuses.is_disturbed(began_us - FAULT_EFFECT_US, self.world.now_us):
                return  # the broker may not have been told
            for tp, log in sorted(self.scene.node.log_manager.partitions.items()):
                if tp.topic == self.topic and log.last_stable_offset < log.high_watermark:
                    self.world.violate("a closed producer's transaction stays open", f"{tp}")


class CutCopier(ConsumeTransformProduce):
    """A copier whose calls are cancelled. After some it commits as if nothing had happened."""

    async def new_producer(self) -> Any:
        return _Transacting(await super().new_producer(), self, 0.4)

    async def work(self) -> None:
        while not self.is_told_to_stop:
            with suppress(_Restart):  # it closes the consumer
                await super().work()

    def new_consumer(self) -> Any:
        return Cutting(super().new_consumer(), self, 0.2)

    async def pass_on(self, consumer: AsyncConsumer, producer: AsyncProducer, records: list[Record]) -> bool:
        is_committed = await super().pass_on(consumer, producer, records)
        if self.chance.random() < 0.3:
            if not is_committed:
                self.session += 1
                raise _Restart
            await self.go_back(consumer)
        return is_committed


class _Restart(Exception):
    """An application that begins anew when a transaction was aborted."""


class _Transacting(Cutting):
    """A producer. In half of the cases its application does not see that its offsets were not sent."""

    repeated = frozenset({"send"})

    async def send_offsets_to_transaction(self, *args: Any) -> None:
        method = self.client.send_offsets_to_transaction
        try:
            await self._call("send_offsets_to_transaction", method, *args)
        except Cut:
            if self.rng.random() < 0.5:
                raise


def kind_of(seed: int) -> str:
    """Return what a seed plays."""
    return Random(f"{seed}/kind").choice(KINDS)


def play_cancelled(seed: int, kept: Collection[int] | None = None) -> Run:
    """Play a seed of the asyncio clients. `kept`: numbers of the faults to play; None: all."""
    world = World(seed)
    chance, kind = world.chance("scene"), kind_of(seed)
    scene = Scene(world, kind, chance.randint(1, 4))
    match kind:
        case "producer":
            scene.first.append(SharedAsyncProducer(world, "shared"))
        case "copier":
            _cast_copiers(scene, chance)
        case _:
            _cast_members(scene, chance)
    scene.disturb(kept)
    return play_scene(seed, scene, nullcontext())


def _cast_members(scene: Scene, chance: Random) -> None:
    world, kind = scene.world, scene.kind
    settings = member_settings(chance, kind)
    role = AsyncTwin if kind == "twins" else AsyncMember
    members = [role(world, f"member-{number}", settings) for number in range(2)]
    for member, latest_s in zip(members, (1.0, 10.0), strict=True):
        member.begin_s = chance.uniform(1.0, latest_s)
        member.end_s = member.begin_s + chance.uniform(10.0, 20.0)
        member.share = 0.0 if kind == "twins" else chance.choice((0.1, 0.3, 0.6))
    last = LastAsyncMember(world, "last-member", settings | {"group.instance.id": None})
    overlap_s = min(each.end_s for each in members) - max(each.begin_s for each in members)
    scene.cast_group([each.holdings for each in members], last.holdings, overlap_s, chance)


class _Until(Application):
    """Stops the copiers once they have copied everything, or had the time for it."""

    def __init__(self, world: World, scene: Scene, writer: Writer, copiers: list[CutCopier]) -> None:
        super().__init__(world, "until")
        self.scene, self.writer, self.copiers = scene, writer, copiers

    async def work(self) -> None:
        async with AsyncAdmin(QUICK) as admin:
            for topic in (TOPIC, OUTWARD):
                await create_topic(admin, NewTopic(topic, num_partitions=self.scene.partition_count))
        while not self.writer.is_done:
            await asyncio.sleep(1.0)
        limit_us = self.world.excuses.end_us + LIVENESS_SECONDS * 1e6 if self.world.excuses else 0
        for number in itertools.count():
            if (number >= COPY_SECONDS and self.world.now_us > limit_us) or await self._is_copied(number):
                break
            await asyncio.sleep(1.0)
        for each in self.copiers:
            each.is_told_to_stop = True

    async def _is_copied(self, number: int) -> bool:
        partitions = [
            TopicPartition(topic, n) for topic in (TOPIC, OUTWARD) for n in range(self.scene.partition_count)
        ]
        look = LastReader(self.world, f"look-{number}", partitions)
        look.start()
        while not look.is_done:
            await asyncio.sleep(0.1)
        topics = [item.topic for call in look.calls for item in call.items]
        return topics.count(TOPIC) <= topics.count(OUTWARD)


def _cast_copiers(scene: Scene, chance: Random) -> None:
    world = scene.world
    writer = CutWriter(world, "writer-0", TOPIC, scene.partition_count, scene)
    protocol = chance.choice(("classic", "consumer"))
    copiers = [
        CutCopier(world, f"copier-{number}", TOPIC, OUTWARD, scene.partition_count, protocol)
        for number in range(chance.randint(1, 2))
    ]
    scene.first += [writer, *copiers, _Until(world, scene, writer, copiers)]
    scene.checks.append(lambda operations, last: check_copies(world, operations, last, TOPIC, OUTWARD))
