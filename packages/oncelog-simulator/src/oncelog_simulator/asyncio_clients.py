"""Applications with asyncio clients whose calls are cancelled. `client_simulation.py` has the checks.

A seed draws the await at which, or shortly after which, the task of a call is cancelled. The application then
does what the documentation says: it treats a cancelled call like one that timed out.

    producer    tasks share one producer: first records of topics, flushes during sends, close
    consumer    one member polls, iterates and stops iterating, with listeners that await;
                another member joins and leaves
    twins       two consumers with one group.instance.id
    copier      consume, transform, produce; a writer that closes its producer during a transaction
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Sequence
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
from oncelog_simulator.blocking_clients import (
    ITERATION_SECONDS,
    SLOW_PACE,
    MemberTimeouts,
    ProducerTimeouts,
    check_time,
    member_settings,
    twins_end_us,
)
from oncelog_simulator.checks import check_copies
from oncelog_simulator.client_simulation import (
    FENCED,
    LIVENESS_SECONDS,
    TOPIC,
    ClientResult,
    ClientSimulation,
    MemberView,
    allow_expected_errors,
    allow_failed_commit,
    check_error,
    run_client_simulation,
    time_limit,
)
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application, Call, LastReader
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.txn_clients import ConsumeTransformProduce, Writer
from oncelog_simulator.workloads import create_topic
from oncelog_simulator.world import World

KINDS = ("producer", "consumer", "consumer", "twins", "copier", "copier")
OUTWARD = "outward"
FREE_SECONDS = 3.0
"""Seconds after the close of a producer within which its transaction must be aborted."""
COPY_SECONDS = 30
FAULT_EFFECT_US = 10_000_000
"""Microseconds after the end of a fault during which the coordinator may still be unreachable."""
AWAITS = (0, 0, 0, 1, 1, 2, 3, 5, 8, 13)
_CANCELLABLE = {"send", "flush", "close", "poll", "commit", "position", "seek_to_committed", "__anext__"} | {
    f"{what}_transaction{s}"
    for what, s in (("init", "s"), ("send_offsets_to", ""), ("commit", ""), ("abort", ""))
}


class CallCancelled(TimedOut):
    """A client's call was cancelled. Applications treat it like a call that timed out."""


class _Counted:
    """An awaitable that runs `coroutine` and calls `reached` at its await `await_number`, counted from 0."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], await_number: int, reached: Callable[[], object]
    ) -> None:
        self._coroutine, self._await_number, self._reached = coroutine, await_number, reached

    def __await__(self) -> Generator[Any, Any, Any]:
        count, error = 0, None
        while True:
            try:
                waited = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            if count == self._await_number:
                self._reached()
            count, error = count + 1, None
            try:
                yield waited
            except BaseException as raised:
                error = raised


class CancellingClient:
    """A client whose calls are cancelled with the probability `share`, at a drawn await or shortly after."""

    repeated: ClassVar[frozenset[str]] = frozenset()
    """Calls that are repeated after a cancellation, because the application needs their results."""

    def __init__(self, client: Any, application: Application, share: float, which: str = "") -> None:
        self.client, self.application, self.share = client, application, share
        self.rng = application.world.rng(f"cuts of {application.name} {application.start_count}{which}")
        self.cancel_count = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.client, name)
        return partial(self._call, name, attribute) if name in _CANCELLABLE else attribute

    async def __aenter__(self) -> CancellingClient:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_for_good()

    async def close_for_good(self) -> None:
        """Close the client twice. Only the first close may be cancelled; the second one must complete."""
        with suppress(CallCancelled):
            await self.close()
        await self.client.close()

    async def _call(self, name: str, method: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Call a method, and cancel some of the calls.

        After a cancellation a method in `repeated` is called again; for any other, raises CallCancelled.
        """
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
            self.cancel_count += 1
            self.application.world.note(self.application.name, f"{name} is cancelled")
            if name in self.repeated:
                return await method(*args, **how)
            raise CallCancelled(f"{name} was cancelled") from None


class SharedAsyncProducer(Application):
    """Tasks that share a producer and send to drawn topics, whose metadata the producer may not have yet.

    In a seed with faults, new producers follow one another until the last fault is over. All of them send
    more slowly than in other seeds.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.topics = [f"topic-{number}" for number in range(self.rng.randint(2, 6))]
        self.settings: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "client.id": name,
            "linger.ms": self.rng.choice((0, 0, 5, 50)),
            "batch.size": self.rng.choice((1, 200, 16_384)),
        }
        self.sent: list[tuple[Call, asyncio.Future[Any]]] = []
        self.callback_counts: dict[bytes, int] = {}
        self.is_over = self.is_closing = False
        self.timeouts = ProducerTimeouts()
        self.pace = 1.0
        self.prefix = ""
        """Prefix of the current producer's values and sessions, so that no value is sent twice."""

    async def work(self) -> None:
        await self.use_a_producer()
        count = 1
        while self.world.now_us < self.world.expected_errors.end_us:
            count += 1
            self.prefix = f"{count}-"
            self.topics.append(f"topic-of-{count}")
            await self.use_a_producer()

    async def use_a_producer(self) -> None:
        if self.world.expected_errors:
            self.timeouts, self.pace = ProducerTimeouts.drawn(self.rng), SLOW_PACE
            self.settings |= self.timeouts.settings
        self.is_over, self.is_closing, self.sent = False, False, []
        producer = CancellingClient(AsyncProducer(self.settings), self, 0.3, self.prefix)
        senders = [self.send_some(producer, number) for number in range(self.rng.randint(1, 3))]
        steady = [self.send_steadily(producer, number) for number in range(4)]
        work = asyncio.gather(*steady, *senders)
        for _ in range(self.rng.randint(1, 4)):
            await self.sleep_up_to(0.1 * self.pace)
            await self.flush(producer)
        self.is_over = True
        await work
        await self.flush(producer)
        if self.world.expected_errors.is_lasting:
            await asyncio.sleep(max(self.world.expected_errors.lasting_us - self.world.now_us, 0) / 1e6)
        for count in range(3):
            await self.send_and_flush_in_callback(producer, count)
        # A record that fails from now on is not a violation: if the close is cancelled, the producer gives up
        # the records that the close waits for.
        self.is_closing = True
        with (
            time_limit(self, "close()", 0.0, self.timeouts.close_s)
            if self.world.expected_errors
            else nullcontext()
        ):
            await producer.close_for_good()
        self.check_delivered(list(self.sent), "close()")

    async def send_some(self, producer: CancellingClient, number: int) -> None:
        for count in range(self.rng.randint(3, 12)):
            await self.send(producer, f"task-{number}", count)
            if self.rng.random() < 0.2:
                await self.sleep_up_to(0.01 * self.pace)
            if self.rng.random() < 0.1:
                await self.flush(producer)

    async def send_steadily(self, producer: CancellingClient, number: int) -> None:
        """Send records faster than they are acknowledged."""
        count = 0
        while not self.is_over:
            count += 1
            await self.send(producer, f"chat-{number}", count)
            await self.sleep_up_to(0.004 * self.pace)

    async def send_and_flush_in_callback(self, producer: CancellingClient, count: int) -> None:
        """Start a flush in a delivery callback, perhaps before the callbacks of other records have run."""
        flushing: list[asyncio.Task[None]] = []
        flush = partial(self.flush, producer)
        await self.send(producer, "alone", count, lambda: flushing.append(asyncio.ensure_future(flush())))
        await self.flush(producer)
        await asyncio.gather(*flushing)

    async def send(
        self, producer: CancellingClient, task: str, count: int, on_delivery: Callable[[], None] | None = None
    ) -> None:
        """Send a record. Note a cancelled call as failed, because its record must never be stored."""
        task = self.prefix + task
        topic, value = self.rng.choice(self.topics), b"%s-%d" % (task.encode(), count)
        call = self.begin(Kind.SEND, [Item(topic, 0, None, value)])
        call.session = task

        def delivered(metadata: Any, error: Exception | None) -> None:
            self.callback_counts[value] = self.callback_counts.get(value, 0) + 1
            if error is not None and self.world.expected_errors and not self.is_closing:
                check_error(self, f"{value!r}", error)
                # Check the time only if each batch has one record: delivery.timeout.ms counts from a batch's
                # first record.
                if self.settings["batch.size"] == 1:
                    check_time(self, f"{value!r}", error, call, self.timeouts.delivery_s)
            if on_delivery is not None:
                on_delivery()

        try:
            with (
                time_limit(self, "send()", self.timeouts.block_s)
                if self.world.expected_errors
                else nullcontext()
            ):
                future = await producer.send(topic, value, on_delivery=delivered)
        except CallCancelled:
            self.end(call, Outcome.FAIL)
        except OncelogError as error:
            self.end(call, Outcome.FAIL)
            check_error(self, "send()", error)
            check_time(self, "send()", error, call, self.timeouts.block_s)
        else:
            self.sent.append((call, future))

    async def flush(self, producer: CancellingClient) -> None:
        before = list(self.sent)
        try:
            with time_limit(self, "flush()", 0.0, self.timeouts.delivery_s):
                await producer.flush()
        except CallCancelled:
            return
        except MisuseError:
            # In a seed with faults a record may be delivered during the close. Its callback then flushes a
            # closed producer, which is a MisuseError.
            if not (self.world.expected_errors and self.is_closing):
                raise
            return
        self.check_delivered(before, "flush()")

    def check_delivered(self, sent: Iterable[tuple[Call, asyncio.Future[Any]]], what: str) -> None:
        """Check that every record has an outcome, and that its callback was called exactly once."""
        for call, future in sent:
            (item,) = call.items
            value: Any = item.value
            if self.callback_counts.get(value, 0) != 1:
                self.world.violate(
                    f"not called back once after {what}", f"{value!r}: {self.callback_counts.get(value)}"
                )
            if not future.done():
                self.world.violate(f"no outcome after {what}", f"{value!r}")
            elif call.end is None:
                self.settle(call, future, was_cancelled=what == "close()")

    def settle(self, call: Call, future: asyncio.Future[Any], *, was_cancelled: bool) -> None:
        """Note the outcome of a record.

        With `was_cancelled`, a close may have been cancelled, and a cancelled close gives up the records that
        it waits for. An error therefore leaves their outcome unknown.
        """
        (item,) = call.items
        if (error := future.exception()) is None:
            result = future.result()
            self.end(call, Outcome.OK, [Item(item.topic, result.partition, result.offset, item.value)])
            return
        is_unknown = was_cancelled or isinstance(error, OutcomeUnknown)
        if not self.world.expected_errors and not was_cancelled:
            self.world.violate("a record failed", f"{item.value!r}: {error!r}")
        self.end(call, Outcome.UNKNOWN if is_unknown else Outcome.FAIL)


class AsyncMember(Application):
    """A consumer that polls and iterates between the virtual times `begin_s` and `end_s`."""

    begin_s = end_s = 0.0
    share = 0.0

    def __init__(self, world: World, name: str, settings: dict[str, object]) -> None:
        super().__init__(world, name)
        self.settings: dict[str, object] = {**SHORT_TIMEOUTS, **settings, "client.id": name}
        self.view = MemberView(self)
        self.timeouts = MemberTimeouts()

    async def work(self) -> None:
        await asyncio.sleep(self.begin_s)
        self.timeouts = MemberTimeouts.of(self)
        consumer = CancellingClient(AsyncConsumer(self.settings | self.timeouts.settings), self, self.share)
        mine = self.view
        try:
            consumer.subscribe(
                [TOPIC],
                on_assigned=self._after_a_while(mine.assigned),
                on_revoked=self._after_a_while(mine.revoked),
                on_lost=mine.revoked,
            )
            while self.world.now_us < self.end_us():
                with allow_expected_errors(self, "a call"), suppress(CallCancelled):
                    await self.read(consumer)
                if self.rng.random() < 0.3:
                    await self.sleep_up_to(1.0)
            await self.finish(consumer)
        finally:
            with time_limit(self, "close()", 10.0), allow_expected_errors(self, "close()"):
                await consumer.close_for_good()

    def end_us(self) -> float:
        """Return the virtual time in microseconds at which the consumer closes."""
        return max(self.end_s * 1e6, self.world.expected_errors.lasting_us)

    def _after_a_while(
        self, callback: Callable[[list[TopicPartition]], None]
    ) -> Callable[[list[TopicPartition]], Awaitable[None]]:
        async def listener(partitions: list[TopicPartition]) -> None:
            if self.rng.random() < 0.5:
                await self.sleep_up_to(0.3)
            callback(partitions)

        return listener

    async def finish(self, consumer: CancellingClient) -> None:
        """Do the subclass's last work before the consumer closes. The base class has none."""

    async def read(self, consumer: CancellingClient) -> None:
        match self.rng.choice(("poll", "poll", "iterate", "commit")):
            case "poll":
                await self.poll(consumer, self.rng.choice((0.0, 0.1, 1.0, 3.0)))
            case "iterate":
                await self.iterate(consumer, self.rng.choice((1, 2, 5, 50)))
            case "commit":
                with (
                    allow_failed_commit(self),
                    suppress(CallCancelled),
                    time_limit(self, "commit()", 0.0, self.timeouts.commit_s),
                ):
                    await consumer.commit()

    async def poll(self, consumer: CancellingClient, seconds: float) -> list[Record]:
        with time_limit(self, "poll()", seconds):
            records: list[Record] = await consumer.poll(seconds)
        self.view.take(records)
        self.view.check(consumer.assignment())
        return records

    async def iterate(self, consumer: CancellingClient, limit: int) -> None:
        """Iterate over up to `limit` records. Stop early if no record arrives or the call is cancelled."""
        records = CancellingClient(consumer.client.__aiter__(), self, consumer.share)
        for _ in range(limit):
            try:
                with time_limit(self, "iteration", ITERATION_SECONDS):
                    record = await records.__anext__()
                self.view.take([record])
            except StopAsyncIteration:
                return


class LastAsyncMember(AsyncMember):
    """The member that starts last. It reads all records that the group has not committed."""

    def end_us(self) -> float:
        return 0.0

    async def finish(self, consumer: CancellingClient) -> None:
        quiet_count = 0
        while quiet_count < 2:
            quiet_count = 0 if await self.poll(consumer, 5.0) else quiet_count + bool(self.view.held)


class AsyncTwin(AsyncMember):
    """One of two members with the same group.instance.id. It runs until it is fenced."""

    async def work(self) -> None:
        try:
            await super().work()
        except FENCED:
            self.view.is_fenced = True

    def end_us(self) -> float:
        return twins_end_us(self.world, self.end_s)

    async def read(self, consumer: CancellingClient) -> None:
        await self.poll(consumer, 1.0)


class CancelledWriter(Writer):
    """A Writer whose calls are cancelled. It also closes some producers during a transaction."""

    def __init__(
        self, world: World, name: str, topic: str, partitions: int, simulation: ClientSimulation
    ) -> None:
        super().__init__(world, name, topic, partitions, bursts=8)
        self.simulation = simulation
        self.settings |= {"transaction.timeout.ms": 60_000}

    async def new_producer(self) -> Any:
        return _CancellingProducer(await super().new_producer(), self, 0.3)

    async def transact(self, producer: Any) -> bool:
        if self.rng.random() < 0.3:
            await self.close_in_transaction(producer)
            return False
        return await super().transact(producer)

    async def close_in_transaction(self, producer: Any) -> None:
        self.bursts_left -= 1
        self.transaction += 1
        await producer.begin_transaction()
        with suppress(CallCancelled):
            await self.put(producer, self.topic)
            await producer.flush()
        call = self.begin(Kind.ABORT, transaction=self.transaction)
        began_us = self.world.now_us
        with suppress(CallCancelled):
            await producer.close()
            self.end(call, Outcome.OK)
            await asyncio.sleep(FREE_SECONDS)
            if self.world.expected_errors.is_disturbed(began_us - FAULT_EFFECT_US, self.world.now_us):
                # During a fault the broker may not have received the abort, so the transaction may stay open.
                return
            for tp, log in sorted(self.simulation.node.log_manager.partitions.items()):
                if tp.topic == self.topic and log.last_stable_offset < log.high_watermark:
                    self.world.violate("a closed producer's transaction stays open", f"{tp}")


class CancelledCopier(ConsumeTransformProduce):
    """A copier whose calls are cancelled. It may commit after a cancelled `send_offsets_to_transaction`."""

    async def new_producer(self) -> Any:
        return _CancellingProducer(await super().new_producer(), self, 0.4)

    async def work(self) -> None:
        while not self.stop_requested:
            # _Restart ends `work` of the base class, which closes the consumer. The next turn of this loop
            # creates a new consumer.
            with suppress(_Restart):
                await super().work()

    def new_consumer(self) -> Any:
        return CancellingClient(super().new_consumer(), self, 0.2)

    async def pass_on(self, consumer: AsyncConsumer, producer: AsyncProducer, records: list[Record]) -> bool:
        is_committed = await super().pass_on(consumer, producer, records)
        if self.rng.random() < 0.3:
            if not is_committed:
                self.session += 1
                raise _Restart
            await self.go_back(consumer)
        return is_committed


class _Restart(Exception):
    """Raised after an aborted transaction, to make the application start over with a new consumer."""


class _CancellingProducer(CancellingClient):
    """A producer whose calls are cancelled.

    Half of the cancelled `send_offsets_to_transaction` calls do not raise the cancellation. This simulates an
    application that catches it and continues the transaction.
    """

    repeated = frozenset({"send"})

    async def send_offsets_to_transaction(self, *args: Any) -> None:
        method = self.client.send_offsets_to_transaction
        try:
            await self._call("send_offsets_to_transaction", method, *args)
        except CallCancelled:
            if self.rng.random() < 0.5:
                raise


def kind_of(seed: int) -> str:
    """Return the kind of simulation that a seed runs."""
    return Random(f"{seed}/kind").choice(KINDS)


def run_asyncio_clients(seed: int, kept: Collection[int] | None = None) -> ClientResult:
    """Run a seed of the asyncio clients. `kept` has the numbers of the faults to run, None for all."""
    world = World(seed)
    rng, kind = world.rng("scene"), kind_of(seed)
    simulation = ClientSimulation(world, kind, rng.randint(1, 4))
    match kind:
        case "producer":
            simulation.first.append(SharedAsyncProducer(world, "shared"))
        case "copier":
            _add_copiers(simulation, rng)
        case _:
            _add_members(simulation, rng)
    simulation.add_faults(kept)
    return run_client_simulation(seed, simulation, nullcontext())


def _add_members(simulation: ClientSimulation, rng: Random) -> None:
    world, kind = simulation.world, simulation.kind
    settings = member_settings(rng, kind)
    role = AsyncTwin if kind == "twins" else AsyncMember
    members = [role(world, f"member-{number}", settings) for number in range(2)]
    for member, latest_s in zip(members, (1.0, 10.0), strict=True):
        member.begin_s = rng.uniform(1.0, latest_s)
        member.end_s = member.begin_s + rng.uniform(10.0, 20.0)
        member.share = 0.0 if kind == "twins" else rng.choice((0.1, 0.3, 0.6))
    last = LastAsyncMember(world, "last-member", settings | {"group.instance.id": None})
    overlap_s = min(member.end_s for member in members) - max(member.begin_s for member in members)
    simulation.add_group([member.view for member in members], last.view, overlap_s, rng)


class CopyWaiter(Application):
    """An application that stops the copiers when everything is copied, or when the time for copying is
    over.
    """

    def __init__(
        self,
        world: World,
        simulation: ClientSimulation,
        writer: Writer,
        copiers: Sequence[ConsumeTransformProduce],
    ) -> None:
        super().__init__(world, "until")
        self.simulation, self.writer, self.copiers = simulation, writer, copiers

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            for topic in (TOPIC, OUTWARD):
                await create_topic(admin, NewTopic(topic, num_partitions=self.simulation.partition_count))
        while not self.writer.is_done:
            await asyncio.sleep(1.0)
        limit_us = (
            self.world.expected_errors.end_us + LIVENESS_SECONDS * 1e6 if self.world.expected_errors else 0
        )
        for number in itertools.count():
            if (number >= COPY_SECONDS and self.world.now_us > limit_us) or await self._is_copied(number):
                break
            await asyncio.sleep(1.0)
        for copier in self.copiers:
            copier.stop_requested = True

    async def _is_copied(self, number: int) -> bool:
        partitions = [
            TopicPartition(topic, n)
            for topic in (TOPIC, OUTWARD)
            for n in range(self.simulation.partition_count)
        ]
        reader = LastReader(self.world, f"look-{number}", partitions)
        reader.start()
        while not reader.is_done:
            await asyncio.sleep(0.1)
        topics = [item.topic for call in reader.calls for item in call.items]
        return topics.count(TOPIC) <= topics.count(OUTWARD)


def _add_copiers(simulation: ClientSimulation, rng: Random) -> None:
    world = simulation.world
    writer = CancelledWriter(world, "writer-0", TOPIC, simulation.partition_count, simulation)
    protocol = rng.choice(("classic", "consumer"))
    copiers = [
        CancelledCopier(world, f"copier-{number}", TOPIC, OUTWARD, simulation.partition_count, protocol)
        for number in range(rng.randint(1, 2))
    ]
    simulation.first += [writer, *copiers, CopyWaiter(world, simulation, writer, copiers)]
    simulation.checks.append(lambda operations, last: check_copies(world, operations, last, TOPIC, OUTWARD))
