"""Simulated applications: the hosts of producers and consumers, and the operations that they note.

An application survives its processes. If a process is killed, its notes remain, and the next process
continues with values that were never sent. No value is sent twice.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import OncelogError, OutcomeUnknown, OutOfOrderSequenceNumber
from oncelog.types import Record, RecordMetadata, TopicPartition
from oncelog_simulator.history.check import Item, Kind, Operation, Outcome
from oncelog_simulator.limits import begin_sequences
from oncelog_simulator.world import SERVERS, Host, World

SHORT_TIMEOUTS: dict[str, object] = {
    "bootstrap.servers": SERVERS,
    "request.timeout.ms": 2_000,
    "retry.backoff.max.ms": 500,
    "reconnect.backoff.max.ms": 500,
    "socket.connection.setup.timeout.ms": 3_000,
}


@dataclass(eq=False, slots=True)
class Call:
    """An operation of a client. Its outcome stays UNKNOWN until the operation ends."""

    process: str
    session: Hashable
    kind: Kind
    begin: int
    items: tuple[Item, ...] = ()
    transaction: Hashable | None = None
    outcome: Outcome = Outcome.UNKNOWN
    end: int | None = None

    def operation(self, now_us: int) -> Operation:
        end = now_us if self.end is None else self.end
        return Operation(
            self.process,
            self.session,
            self.kind,
            self.outcome,
            self.begin,
            end,
            self.items,
            self.transaction,
        )


class Application(Host, ABC):
    """A simulated host. Each of its processes runs `work`, until one of them completes it.

    `session` changes whenever the order of the operations starts over, for example with a new producer.
    """

    keeps_producers = True
    """False if the broker may forget this application's producers, as after a topic is deleted."""
    patience_s = 10.0
    """Seconds that a call may exceed its time-out in seeds without faults.

    A flush counts as a call with a time-out of 0.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.rng = world.rng(f"application {name}")
        self.calls: list[Call] = []
        self.session = 0
        self.given_up: set[tuple[Hashable, int]] = set()
        """The pairs (session, partition) that have records without an acknowledgement."""
        self.is_done = False

    def start(self) -> None:
        if not self.is_done:
            self.run(self._main)

    async def _main(self) -> None:
        while not self.is_done:
            self.session += 1
            try:
                await self.work()
            # Run `work` again after an error, as an application would be restarted.
            except OncelogError as error:
                self.world.note(self.name, f"gives up: {error!r}")
                await self.sleep_up_to(1.0)
            except Exception as error:
                self.world.violate("a client fails with an error that has no type", f"{self.name}: {error!r}")
                return
            else:
                self.is_done = True
        self.world.note(self.name, "is done")

    @abstractmethod
    async def work(self) -> None:
        """Do all work of the application. After a kill the next process calls this again."""

    def begin(self, kind: Kind, items: Iterable[Item] = (), transaction: Hashable | None = None) -> Call:
        call = Call(self.name, self.session, kind, self.world.now_us, tuple(items), transaction)
        self.calls.append(call)
        return call

    def end(self, call: Call, outcome: Outcome, items: Iterable[Item] | None = None) -> None:
        call.outcome, call.end = outcome, self.world.now_us
        if items is not None:
            call.items = tuple(items)

    async def sleep_up_to(self, up_to_s: float) -> None:
        await asyncio.sleep(self.rng.uniform(0, up_to_s))

    def note_outcome(self, call: Call, sent: asyncio.Future[RecordMetadata]) -> None:
        """Note the outcome of `call`, which sent one record, when the future `sent` is done."""

        def settled(done: asyncio.Future[RecordMetadata]) -> None:
            (item,) = call.items
            error = None if done.cancelled() else done.exception()
            if done.cancelled() or isinstance(error, OutcomeUnknown):
                self.end(call, Outcome.UNKNOWN)
                is_gap = isinstance(getattr(error, "cause", None), OutOfOrderSequenceNumber)
                # A gap in the sequence is a violation, unless an earlier batch was given up and never stored:
                # then the broker rightly refuses the later records.
                if is_gap and self.keeps_producers and (call.session, item.partition) not in self.given_up:
                    self.world.violate("a retry was not recognised", f"{self.name}: {item.value!r}")
                self.given_up.add((call.session, item.partition))
            elif error is not None:
                self.end(call, Outcome.FAIL)
                self.given_up.add((call.session, item.partition))
                self.world.note(self.name, f"{item.value!r} is refused: {error!r}")
            else:
                self.end(call, Outcome.OK, [item._replace(offset=done.result().offset)])

        sent.add_done_callback(settled)

    def items_of(self, records: Iterable[Record]) -> list[Item]:
        return [Item(record.topic, record.partition, record.offset, record.value) for record in records]


class Sender(Application):
    """An idempotent producer that sends bursts of records to one topic."""

    first_sequence: int | None = None
    """The first sequence of each producer in a partition; None means 0."""

    def __init__(self, world: World, name: str, topic: str, partitions: int, bursts: int) -> None:
        super().__init__(world, name)
        self.topic, self.partitions, self.bursts_left = topic, partitions, bursts
        self.value_count = 0
        self.settings: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "client.id": name,
            "linger.ms": self.rng.choice((0, 0, 5, 50)),
            "batch.size": self.rng.choice((1, 200, 1_000, 16_384)),
            "max.in.flight.requests.per.connection": self.rng.choice((1, 2, 5, 5, 5)),
            "delivery.timeout.ms": self.rng.choice((3_000, 3_000, 10_000, 60_000)),
            "max.block.ms": 10_000,
        }

    async def work(self) -> None:
        while self.bursts_left > 0:
            producer = AsyncProducer(self.settings)
            try:
                while self.bursts_left > 0:
                    self.bursts_left -= 1
                    await self.send_burst(producer)
                    await self.sleep_up_to(8.0)
            except OncelogError as error:
                self.world.note(self.name, f"needs a new producer: {error!r}")
            await producer.close()
            self.session += 1

    async def send_burst(self, producer: AsyncProducer) -> None:
        if self.first_sequence is not None:
            begin_sequences(producer, self.first_sequence)
        for _ in range(self.rng.choice((1, 1, 2, 5, 20))):
            await self.send(producer, self.topic, self.rng.randrange(self.partitions))

    def content(self, value: bytes) -> dict[str, Any]:
        """Return the arguments of `send` for a record with this value."""
        return {"value": value}

    async def send(
        self,
        producer: AsyncProducer,
        topic: str,
        partition: int,
        value: bytes | None = None,
        transaction: Hashable | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Send a record with a unique value.

        Raises the producer's errors; then the record was not sent.
        """
        self.value_count += 1
        value = value or b"%s-%d" % (self.name.encode(), self.value_count)
        call = self.begin(Kind.SEND, [Item(topic, partition, None, value)], transaction)
        try:
            sent = await producer.send(topic, **self.content(value), partition=partition)
        except OncelogError:
            self.end(call, Outcome.FAIL)
            raise
        self.note_outcome(call, sent)
        return sent


class Reader(Application):
    """Reads some partitions repeatedly until `stop_requested` is set."""

    def __init__(self, world: World, name: str, partitions: list[TopicPartition], isolation: str) -> None:
        super().__init__(world, name)
        self.partitions = partitions
        self.stop_requested = False
        self.settings: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "client.id": name,
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "fetch.max.wait.ms": self.rng.choice((500, 2_000, 5_000)),
            "max.partition.fetch.bytes": self.rng.choice((1, 300, 2_000, 1_048_576, 1_048_576, 1_048_576)),
        }

    async def work(self) -> None:
        async with self._consumer() as consumer:
            while not self.stop_requested:
                await self.poll(consumer, 5.0)
                await self.sleep_up_to(3.0)
                if self.rng.random() < 0.05:
                    consumer.seek_to_beginning()
                    self.session += 1

    def _consumer(self) -> AsyncConsumer:
        consumer = AsyncConsumer(self.settings)
        consumer.assign(self.partitions)
        return consumer

    async def poll(
        self, consumer: AsyncConsumer, timeout_s: float, max_records: int | None = None
    ) -> list[Record]:
        call = self.begin(Kind.POLL)
        try:
            records = await consumer.poll(timeout_s, max_records=max_records)
        except OncelogError as error:
            self.world.note(self.name, f"poll: {error!r}")
            await self.sleep_up_to(0.5)
            records = []
        self.calls.remove(call) if not records else self.end(call, Outcome.OK, self.items_of(records))
        return records


class LastReader(Reader):
    """Reads all committed records once, up to the end offsets at its start."""

    def __init__(self, world: World, name: str, partitions: list[TopicPartition]) -> None:
        super().__init__(world, name, partitions, "read_committed")
        self.settings |= {"fetch.max.wait.ms": 500, "max.partition.fetch.bytes": 1_048_576}

    async def work(self) -> None:
        async with self._consumer() as consumer:
            ends = await consumer.end_offsets(self.partitions)
            positions: dict[TopicPartition, Any] = dict.fromkeys(self.partitions, 0)
            while any(positions[tp] < end for tp, end in ends.items()):
                await self.poll(consumer, 1.0)
                for tp in self.partitions:
                    positions[tp] = await consumer.position(tp)
