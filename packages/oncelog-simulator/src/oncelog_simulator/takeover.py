"""A workload whose broker starts on Apache Kafka's directory, and where Kafka's clients continue.

The first starts may crash at a drawn disk operation. The first complete start must find every record,
producer, committed offset and transactional id of the history (kafka_directory.py). Then the clients
continue:

- Idempotent producers send their newest batch again, which must be recognised, and then their next one.
- A transactional producer commits the transaction that it has open.
- A writer takes over a transactional id. Other open transactions time out.

At the end the operations of Kafka's clients and of our clients are checked as one history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, DuplicateSequenceNumber, InvalidTimestamp, error_for_code
from oncelog.limits import DEFAULT_LIMITS
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.messages import EndTxnRequest, ProduceRequest
from oncelog.wire.records import NewRecord, decode_records
from oncelog_simulator.checks import batches_of, check_history, remembered_producers
from oncelog_simulator.clients import Call, Reader, Sender
from oncelog_simulator.history.check import Item, Kind, Operation, Outcome
from oncelog_simulator.kafka_directory import (
    COMPLETE_ABORT,
    COMPLETE_COMMIT,
    GROUPS,
    LONG_TIMEOUT_MS,
    ONGOING,
    PREPARE_ABORT,
    PREPARE_COMMIT,
    KafkaHistory,
    KafkaTransactionalId,
    LastBatch,
)
from oncelog_simulator.kafka_log import KafkaBatch, KafkaLog
from oncelog_simulator.record_deletion import above
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.txn_clients import Writer
from oncelog_simulator.wire_clients import WireClient
from oncelog_simulator.workloads import Workload
from oncelog_simulator.world import BROKER_HOST, BrokerHost, World

BURSTS = 4
CONTINUED = "continued-takeover"
TABLE = "takeover-table"
ENDED = {PREPARE_COMMIT: COMPLETE_COMMIT, PREPARE_ABORT: COMPLETE_ABORT}
MAX_START_STEPS = 6_000
SWAP_CHANCE = 0.5
"""Probability that Kafka was killed in the middle of a compaction, if its stop was not clean."""


class ContinuedClients(WireClient):
    """Kafka's clients after the takeover. Each continues with its producer id, epoch and sequence."""

    retry_s: ClassVar[float] = 0.3

    def __init__(self, world: World, name: str, history: KafkaHistory, *, is_classic: bool) -> None:
        super().__init__(world, name)
        self.history, self.is_classic = history, is_classic
        self._left = [history.last_batches[key] for key in sorted(history.last_batches)]
        self.entry = next(entry for entry in history.ids if entry.name == CONTINUED)
        self._is_committed = self.entry.state != ONGOING
        self.may_expire = False
        """True if the open transaction may time out early, because a fault may set the broker's clock."""

    async def work(self) -> None:
        self.wire = None
        if not self._is_committed:
            await self.sleep_up_to(5.0)
            await self._commit(self.entry)
        while self._left:
            await self.sleep_up_to(5.0)
            await self._continue(self._left[0])
            self._left.pop(0)

    async def _commit(self, entry: KafkaTransactionalId) -> None:
        message = EndTxnRequest(
            transactional_id=entry.name,
            producer_id=entry.producer_id,
            producer_epoch=entry.epoch,
            committed=True,
        )
        call = self.begin(Kind.COMMIT, transaction=entry.transaction)
        call.process = call.session = entry.process
        while True:
            code = (await self.answer_to(message, 3 if self.is_classic else 5)).error_code
            error = error_for_code(code) if code else None
            if error is None:
                self.end(call, Outcome.OK)
                self._is_committed = True
                return
            if not error.retriable:
                self._refused(call, error)
                return
            await asyncio.sleep(0.3)

    def _refused(self, call: Call, error: BrokerError) -> None:
        """Note that the commit was refused, which is a violation unless a fault may set the broker's clock.

        The transaction has minutes left, so it can only time out if the clock is set forward.
        """
        self.end(call, Outcome.FAIL)
        self._is_committed = True
        if not self.may_expire:
            self.world.violate(
                "Kafka's open transaction cannot be committed", f"{self.entry.name}: {error!r}"
            )

    async def _continue(self, last: LastBatch) -> None:
        """Send the newest batch of a producer again, then its next batch."""
        stored = last.batch
        values = [record.value or b"" for record in stored.records]
        offset_again = await self._produce(last, stored.sequence, values)
        if offset_again not in (stored.base_offset, None):
            self.world.violate("a retry was not recognised", f"{last.tp} {values} is at {offset_again}")
        value = b"%s-%d-%d" % (self.name.encode(), last.producer_id, last.tp.partition)
        call = self.begin(Kind.SEND, [Item(*last.tp, None, value)])
        call.session = last.producer_id, last.tp
        following = (stored.last_sequence + 1) & 0x7FFFFFFF
        offset = await self._produce(last, following, [value])
        if offset is not None:
            self.end(call, Outcome.OK, [Item(*last.tp, offset, value)])

    async def _produce(self, last: LastBatch, sequence: int, values: list[bytes]) -> int | None:
        """Send a batch and return its offset.

        Return None if the broker reports a duplicate without the offset, or refuses the batch.
        """
        records = build_batch(
            [NewRecord(last.batch.time_ms, None, value) for value in values],
            producer_id=last.producer_id,
            producer_epoch=last.epoch,
            base_sequence=sequence,
        )
        data = ProduceRequest.PartitionProduceData(index=last.tp.partition, records=records)
        topic = ProduceRequest.TopicProduceData(name=last.tp.topic, partition_data=[data])
        message = ProduceRequest(transactional_id=None, acks=-1, timeout_ms=2_000, topic_data=[topic])
        while True:
            response = await self.answer_to(message, 9)
            (answer,) = response.responses[0].partition_responses
            error = error_for_code(answer.error_code) if answer.error_code else None
            if error is None:
                return int(answer.base_offset)
            if isinstance(error, DuplicateSequenceNumber):
                return None
            # InvalidTimestamp is allowed: two clock faults may set the broker's clock back by more than
            # message.timestamp.after.max.ms.
            if not error.retriable and not isinstance(error, InvalidTimestamp):
                text = f"{last.tp} id {last.producer_id} sequence {sequence}: {error!r}"
                self.world.violate("Kafka's producer cannot continue", text)
                return None
            await asyncio.sleep(0.3)


def _records_of(log: KafkaLog, batches: Iterable[KafkaBatch]) -> dict[int, tuple[Any, Any]]:
    """Return the key and value of each record that readers can see, by offset."""
    return {
        record.offset: (record.key, record.value)
        for batch in batches
        for record in batch.records
        if batch.last_offset >= log.start_offset and not batch.is_control
    }


class Takeover(Workload):
    """Checks that everything that Kafka acknowledged holds with this broker, and that Kafka's clients can
    continue.
    """

    topic: ClassVar[str] = "takeover"
    clients: ClassVar[tuple[str, ...]] = (
        "sender-takeover",
        "writer-takeover",
        "continuer-takeover",
        "reader-takeover",
    )
    unguarded_groups: ClassVar[tuple[str, ...]] = GROUPS
    keeps_one_batch: ClassVar[bool] = True

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        sender, writer, continuer, reader = self.clients
        self.rng = world.rng("takeover")
        names = [writer, CONTINUED, "kafka-0", "kafka-1"]
        self.history = history = KafkaHistory(self.rng, self.topic, TABLE, scenario.partitions, names)
        history.ids[1].timeout_ms = LONG_TIMEOUT_MS
        history.generate()
        if not history.is_clean and (swaps := world.rng("Kafka's swaps")).random() < SWAP_CHANCE:
            history.interrupt_compaction(swaps)
        is_old = scenario.broker["oncelog.transaction.version"] == 0
        self.shares_epochs = history.is_classic or is_old
        self.continuer = ContinuedClients(world, continuer, history, is_classic=is_old or history.is_classic)
        self.continuer.may_expire = any(
            fault.kind == "clock" and fault.target == BROKER_HOST for fault in scenario.faults
        )
        self.applications = [
            Sender(world, sender, self.topic, scenario.partitions, BURSTS),
            Writer(world, writer, self.topic, scenario.partitions, BURSTS),
            self.continuer,
        ]
        self.readers = [Reader(world, reader, self.partitions, "read_committed")]
        self._is_taken = False

    def prepare(self, broker: BrokerHost) -> None:
        """Write Kafka's directory to the disk, and make some of the first starts crash."""
        # Use the default limit: a segment of Kafka may span 2^31 offsets, and a broker with a smaller limit
        # could not read it.
        broker.limits = replace(broker.limits, max_relative_offset=DEFAULT_LIMITS.max_relative_offset)
        self.history.write(broker.disk, broker.settings["node.id"])
        for _ in range(self.rng.choice((0, 1, 1, 3))):
            steps = self.rng.randrange(self.rng.choice((20, 300, MAX_START_STEPS)))
            broker.start_crashes.append((steps, self.scenario.loses_power and self.rng.random() < 0.5))

    def operations(self) -> list[Operation]:
        calls = sorted(self.history.calls, key=lambda call: call.begin)
        return [call.operation(self.world.now_us) for call in calls] + super().operations()

    def recovered(self, node: BrokerState) -> None:
        """Compare the broker's state after its first complete start with the history. Later calls
        do nothing.
        """
        if self._is_taken:
            return
        self._is_taken = True
        for tp, log in self.history.logs.items():
            self._check_log(node, tp, log)
        self._check_offsets(node)
        self._check_transactions(node)
        for name, settings in self.history.settings.items():
            topic = node.topics.get(name)
            if topic is None or topic.overrides != settings:
                self._violate(f"{name} has settings {topic and topic.overrides}, not {settings}")

    def _violate(self, text: str) -> None:
        self.world.violate("taken over otherwise than Kafka left it", text)

    def _check_log(self, node: BrokerState, tp: TopicPartition, log: KafkaLog) -> None:
        partition = node.log_manager.partitions.get(tp)
        if partition is None:
            self._violate(f"{tp} is not there")
            return
        expected = _records_of(log, log.batches)
        actual: dict[int, tuple[Any, Any]] = {}
        for header, data in batches_of(partition):
            if header.base_offset < log.end_offset and not header.is_control:
                actual |= {record.offset: (record.key, record.value) for record in decode_records(data)}
        # After an interrupted compaction, the segments from before it are allowed too. Kafka would restore
        # them, and they have the same newest records.
        if log.swap and log.swap.other is not None and actual == _records_of(log, log.swap.other):
            expected = actual
        for offset in sorted(expected.keys() | actual.keys()):
            if expected.get(offset) != actual.get(offset):
                self._violate(f"{tp} {offset} is {actual.get(offset)}, was {expected.get(offset)}")
        if partition.log_start_offset != log.start_offset or partition.log_end_offset < log.end_offset:
            ends = f"{partition.log_start_offset} to {partition.log_end_offset}"
            self._violate(f"{tp} has {ends}, had {log.start_offset} to {log.end_offset}")
        if partition.topic_id != log.topic_id:
            self._violate(f"{tp} has another topic id")
        self._check_producers(node, tp, log)

    def _check_producers(self, node: BrokerState, tp: TopicPartition, log: KafkaLog) -> None:
        """Compare each producer's newest batch and open transaction.

        Producers whose transactions were decided are skipped, because a start completes these transactions.
        """
        actual = remembered_producers(node.log_manager.partitions[tp])
        finished = {entry.producer_id for entry in self.history.ids if entry.state in ENDED}
        for producer_id, state in log.producers.items():
            batches = ((state.last_sequence, state.last_offset),) if state.last_offset >= 0 else ()
            summary = actual.get(producer_id)
            if summary is None:
                self._violate(f"{tp} does not know producer {producer_id} {state}")
                continue
            batch = tuple((-1 if last is None else last, offset) for last, offset in summary.batches[-1:])
            first = -1 if summary.txn_first_offset is None else summary.txn_first_offset
            is_same = summary.epoch == state.epoch and first == state.first_offset
            if producer_id not in finished and (batch != batches or not is_same):
                self._violate(f"{tp} has {summary} of producer {producer_id}, was {state}")

    def _check_offsets(self, node: BrokerState) -> None:
        groups = {*self.history.offsets, *node.groups.offsets.groups()}
        for group in sorted(groups):
            expected = {tp: offset for tp, (offset, _) in self.history.offsets.get(group, {}).items()}
            actual = {tp: committed.offset for tp, committed in node.groups.offsets.of(group).items()}
            if actual != expected:
                self._violate(f"{group} is at {actual}, was at {expected}")
        for group, generation in self.history.groups.items():
            held = node.groups._groups.get(group)
            if held is None or held.generation_id != generation:
                self._violate(f"{group} has not generation {generation}: {held}")

    def _check_transactions(self, node: BrokerState) -> None:
        actual = {entry.transactional_id: entry for entry in node.transactions.all()}
        for expected in self.history.ids:
            entry = actual.get(expected.name)
            state = ENDED.get(expected.state, expected.state)
            if entry is None:
                self._violate(f"transactional id {expected.name} is not known")
            elif (
                (entry.producer_id, entry.producer_epoch) != (expected.producer_id, expected.epoch)
                or entry.state not in (state, expected.state)
                or entry.timeout_ms != expected.timeout_ms
                or (expected.state == ONGOING and entry.partitions != frozenset(expected.partitions))
            ):
                self._violate(f"{entry}, was {expected}")

    def check(self, node: BrokerState) -> None:
        starts = {tp: node.log_manager.partitions[tp].log_start_offset for tp in self.partitions}
        for tp, start in starts.items():
            if start != self.history.logs[tp].start_offset:
                self._violate(f"{tp} starts at {start} in the end")
        check_history(self.world, above(self.operations(), starts), self.last.name)
        self._check_table(node)

    def _check_table(self, node: BrokerState) -> None:
        """Check that the newest value of each key survives all compactions."""
        log = self.history.logs[TopicPartition(TABLE, 0)]
        expected = newest_of((record.key, record.value) for batch in log.batches for record in batch.records)
        actual = newest_of(
            (record.key, record.value)
            for _, data in batches_of(node.log_manager.partitions[TopicPartition(TABLE, 0)])
            for record in decode_records(data)
        )
        if actual != expected:
            self._violate(f"{TABLE} has {actual}, had {expected}")


def newest_of(records: Iterable[tuple[bytes | None, bytes | None]]) -> dict[bytes | None, bytes]:
    """Return the newest value of each key that is not deleted."""
    return {key: value for key, value in dict(records).items() if value is not None}
