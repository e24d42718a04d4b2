"""A workload with a transactional producer that pipelines as Java's client does, directly on the protocol.

Our client sends the first batch of a new producer id in a partition and waits for its response. Java's client
sends up to five requests at once, also to partitions that the transaction does not have yet. With
transaction.version 2 the first Produce request adds these partitions. The rules are those of
TransactionManager and Sender in kafka-clients 4.3:

- A batch gets its sequence when it is first sent, and keeps it over retries. A new epoch begins with sequence
  0.
- A retried batch goes alone: no later batch of its partition is sent before it is stored.
- OUT_OF_ORDER_SEQUENCE_NUMBER is retried while an earlier batch of the partition is not stored.
- EndTxn is sent when no request is in flight. Its response (v5) has the next epoch.

Half of the seeds use older versions: AddPartitionsToTxn first, and one epoch for all transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.errors import (
    BrokerError,
    DuplicateSequenceNumber,
    InvalidProducerEpoch,
    OutOfOrderSequenceNumber,
    ProducerFenced,
    error_for_code,
)
from oncelog.runtime.system import current
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.messages import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    ProduceRequest,
)
from oncelog_simulator.checks import check_history
from oncelog_simulator.clients import SHORT_TIMEOUTS, Call, Reader
from oncelog_simulator.history.check import Item, Kind, Outcome
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.wire_clients import REQUEST_SECONDS, WireClient
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import World

MAX_IN_FLIGHT = 5
PARTITIONS = 12
"""Number of partitions. Most transactions then have partitions that are new to the producer id."""
TRANSACTIONS = 8
DELIVERY_SECONDS = 15.0


@dataclass(eq=False, slots=True)
class Batch:
    """Records of one partition.

    `sequence` is None until the batch is sent. `is_under_way` is True while its response may still come.
    """

    partition: int
    calls: list[Call]
    sequence: int | None = None
    is_under_way: bool = False
    is_stored: bool = False


class Abortable(Exception):
    """Raised when the open transaction must be aborted."""


class Pipeliner(WireClient):
    """Runs transactions of several batches for several partitions."""

    def __init__(self, world: World, name: str, topic: str, partitions: int, is_classic: bool) -> None:
        super().__init__(world, name)
        self.topic, self.partition_count, self.is_classic = topic, partitions, is_classic
        self.transactions_left = TRANSACTIONS
        self.transaction = self.value_count = 0
        self.producer_id = self.epoch = -1
        self.is_initialized = False
        self._again: set[Batch] = set()
        """Batches that were sent more than once and have no acknowledgement yet."""
        self._sequences: dict[int, int] = {}
        self._stored_to: dict[int, int] = {}
        """The sequence of the last acknowledged record, by partition."""

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, NewTopic(self.topic, num_partitions=self.partition_count))
        self.wire = None
        self.is_initialized = False
        while self.transactions_left > 0:
            if not self.is_initialized:
                await self._initialize()
            self.transactions_left -= 1
            try:
                await self._transact()
            except (ProducerFenced, InvalidProducerEpoch) as error:
                self.world.note(self.name, f"begins with a new producer: {error!r}")
                self.is_initialized = False
            # Begin most transactions immediately, while the markers of the previous one are being written.
            if self.rng.random() < 0.3:
                await self.sleep_up_to(15.0)
        # Initialize once more at the end: InitProducerId aborts a transaction that is still open.
        await self._initialize()

    # Requests

    async def _initialize(self) -> None:
        self._take(*await self.new_producer_id(self.name, 2 if self.is_classic else 5))
        self.is_initialized = True
        self.session += 1

    def _take(self, producer_id: int, epoch: int) -> None:
        if (self.producer_id, self.epoch) != (producer_id, epoch):
            self.producer_id, self.epoch = producer_id, epoch
            self._sequences.clear()
            self._stored_to.clear()

    # Transactions

    async def _transact(self) -> None:
        self.transaction += 1
        partitions = [self.rng.randrange(self.partition_count) for _ in range(self.rng.randint(1, 3))]
        batches = [self._batch(partitions) for _ in range(self.rng.randint(1, 8))]
        self._again.clear()
        is_commit = self.rng.random() < 0.8
        try:
            await self._deliver(batches)
        except Abortable as error:
            self.world.note(self.name, f"aborts transaction {self.transaction}: {error}")
            is_commit = False
        await self._end(is_commit)
        if not all(batch.is_stored for batch in batches):
            # Request a new epoch, as Java's client does: a late attempt of a batch must not reach the next
            # transaction.
            self.is_initialized = False

    def _batch(self, partitions: Sequence[int]) -> Batch:
        partition = self.rng.choice(partitions)
        calls = []
        for _ in range(self.rng.choice((1, 1, 3))):
            self.value_count += 1
            item = Item(self.topic, partition, None, b"%s-%d" % (self.name.encode(), self.value_count))
            calls.append(self.begin(Kind.SEND, [item], self.transaction))
        return Batch(partition, calls)

    async def _end(self, is_commit: bool) -> None:
        call = self.begin(Kind.COMMIT if is_commit else Kind.ABORT, transaction=self.transaction)
        message = EndTxnRequest(
            transactional_id=self.name,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=is_commit,
        )
        try:
            response = await self.ask(message, 3 if self.is_classic else 5)
        except (ProducerFenced, InvalidProducerEpoch):
            self.end(call, Outcome.FAIL)
            raise
        except BrokerError as error:
            self.world.note(self.name, f"EndTxn: {error!r}")
            self.end(call, Outcome.FAIL)
            self.is_initialized = False
            return
        self.end(call, Outcome.OK)
        if not self.is_classic:
            self._take(response.producer_id, response.producer_epoch)

    async def _deliver(self, batches: Sequence[Batch]) -> None:
        """Send batches until all are stored. Raises Abortable, ProducerFenced, InvalidProducerEpoch."""
        if self.is_classic:
            await self._add_partitions(sorted({batch.partition for batch in batches}))
        limit_us = self.world.now_us + int(DELIVERY_SECONDS * 1e6)
        under_way: dict[asyncio.Future[Any], list[Batch]] = {}
        try:
            while not all(batch.is_stored for batch in batches):
                if self.world.now_us > limit_us:
                    raise Abortable("not delivered in time")
                try:
                    wire = await self.connected()
                except OSError:
                    await asyncio.sleep(0.2)
                    continue
                while len(under_way) < MAX_IN_FLIGHT and (due := self._due(batches)):
                    chosen = due if self.rng.random() < 0.3 else due[:1]
                    under_way[wire.send(self._produce(chosen), 7 if self.is_classic else 12)] = chosen
                if not under_way:
                    await asyncio.sleep(0.05)
                    continue
                done, _ = await asyncio.wait(
                    under_way, timeout=REQUEST_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    self.hang_up()
                for future in [future for future in under_way if future.done() or not done]:
                    await self._settle(future, under_way.pop(future), batches)
        finally:
            for future in under_way:
                if not future.done() or future.exception() is not None:
                    self.hang_up()
                future.cancel()

    async def _add_partitions(self, partitions: list[int]) -> None:
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=self.topic, partitions=partitions)
        message = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[topic],
        )
        try:
            await self.ask(message, 2)
        except (ProducerFenced, InvalidProducerEpoch):
            raise
        except BrokerError as error:
            raise Abortable(f"AddPartitionsToTxn: {error!r}") from error

    def _due(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the next batch of each partition that may be sent."""
        due, blocked = [], set()
        for batch in batches:
            if batch.is_stored or batch.partition in blocked:
                continue
            is_again = batch.sequence is not None
            if not batch.is_under_way:
                due.append(batch)
                blocked.add(batch.partition)
                if is_again and any(
                    other.partition == batch.partition and other.is_under_way for other in batches
                ):
                    # A retried batch is sent alone, so it waits for the other batches of its partition.
                    due.pop()
            elif is_again and batch in self._again:
                blocked.add(batch.partition)
        return due

    def _produce(self, batches: Sequence[Batch]) -> ProduceRequest:
        parts = []
        for batch in batches:
            if batch.sequence is None:
                batch.sequence = self._sequences.get(batch.partition, 0)
                self._sequences[batch.partition] = batch.sequence + len(batch.calls)
            else:
                self._again.add(batch)
            batch.is_under_way = True
            time_ms = current().wall_ns() // 1_000_000
            records = build_batch(
                [(time_ms, None, call.items[0].value, ()) for call in batch.calls],  # type: ignore[misc]
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=batch.sequence,
                is_transactional=True,
            )
            parts.append(ProduceRequest.PartitionProduceData(index=batch.partition, records=records))
        topic = ProduceRequest.TopicProduceData(name=self.topic, partition_data=parts)
        return ProduceRequest(transactional_id=self.name, acks=-1, timeout_ms=2_000, topic_data=[topic])

    async def _settle(self, future: asyncio.Future[Any], sent: list[Batch], batches: Sequence[Batch]) -> None:
        for batch in sent:
            batch.is_under_way = False
        if future.cancel() or future.exception() is not None:
            await asyncio.sleep(0.05)
            # Without a response, all batches of the request are sent again.
            return
        (topic,) = future.result().responses
        answers = {part.index: part for part in topic.partition_responses}
        for batch in sent:
            self._judge(batch, answers[batch.partition], batches)

    def _judge(self, batch: Batch, answer: Any, batches: Sequence[Batch]) -> None:
        assert batch.sequence is not None
        error = error_for_code(answer.error_code) if answer.error_code else None
        if error is None or isinstance(error, DuplicateSequenceNumber):
            batch.is_stored = True
            self._again.discard(batch)
            self._stored_to[batch.partition] = batch.sequence + len(batch.calls) - 1
            for number, call in enumerate(batch.calls):
                if error is None:
                    item = call.items[0]._replace(offset=answer.base_offset + number)
                    self.end(call, Outcome.OK, [item])
            return
        is_next = self._stored_to.get(batch.partition, -1) + 1 == batch.sequence
        if isinstance(error, OutOfOrderSequenceNumber) and not is_next:
            # An earlier batch is not stored yet, so this error is expected; the batch is sent again later.
            return
        if isinstance(error, OutOfOrderSequenceNumber):
            self.world.violate("a batch in its order is refused", f"{self.name} {batch.sequence} {error!r}")
        if isinstance(error, ProducerFenced | InvalidProducerEpoch):
            raise error
        if not error.retriable:
            raise Abortable(repr(error))


class Pipelining(Workload):
    """Checks that committed records of a pipelining producer are there exactly once and in order, and nothing
    else.
    """

    topic: ClassVar[str] = "pipelined"
    clients: ClassVar[tuple[str, ...]] = ("pipeliner", "reader-pipelined")

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        self.partitions = [TopicPartition(self.topic, number) for number in range(PARTITIONS)]
        self.last.partitions = self.partitions
        pipeliner, reader = self.clients
        # Choose one epoch for all transactions only without repeated requests, which may affect the next
        # transaction (KIP-890).
        is_repeated = any(fault.kind == "repeat" and fault.target == pipeliner for fault in scenario.faults)
        is_old = scenario.broker["oncelog.transaction.version"] == 0
        self.shares_epochs = is_classic = is_old or (
            not is_repeated and world.rng("pipelining").random() < 0.5
        )
        self.applications = [Pipeliner(world, pipeliner, self.topic, PARTITIONS, is_classic)]
        self.readers = [Reader(world, reader, self.partitions, "read_committed")]

    def check(self, node: BrokerState) -> None:
        check_history(self.world, self.operations(), self.last.name)
