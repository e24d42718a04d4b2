"""Random overlapping requests of transactions and groups, on a disk that fails, crashes and loses power.

Many requests run at the same time, in steps. Faults of the disk, kills, power losses and advances of the
clock come between any two steps. After each start, and at the end, these conditions must hold:
- every start succeeds once the disk works;
- the coordinators' state in memory equals a replay of their logs;
- each open transaction in a partition has a coordinator that will end it;
- a topic has no offset that was committed before the topic was created;
- no pair of producer id and epoch is assigned twice.
Runs with the same seed are equal. `run(seed, note=print)` prints the events of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from errno import EIO
from itertools import count
from random import Random
from typing import Any

import pytest
from oncelog_simulator.coordinator_state import differences, live_state, replayed_state
from oncelog_simulator.limits import draw_limits

from oncelog.broker.coordinators.transactions import TransactionCoordinator
from oncelog.broker.dispatch import end_round, handle, tick
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import BrokerError, KafkaStorageError, StorageError
from oncelog.log.background import BlockingCall
from oncelog.log.manager import LogManager
from oncelog.log.partition import Partition
from oncelog.rules.idempotence.sequencer import MAX_EPOCH, ProducerIdAndEpoch
from oncelog.rules.transactions.hanging import KnownTransaction, OpenTransaction, hanging_reason
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.frames import RequestHeader
from oncelog.wire.message import Message
from oncelog.wire.messages import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteGroupsRequest,
    DeleteTopicsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    ProduceRequest,
    TxnOffsetCommitRequest,
)
from oncelog.wire.records import NewRecord

FIRST_MS = 1_700_000_000_000
MINUTE_MS = 60_000
TOPICS = ("t", "u", "v")
GROUPS = ("g", "h")
IDS = ("x", "y", "z")
PARTITIONS = 2
FAULTS = ("write", "sync", "create", "rename", "replace", "remove", "mkdir", "truncate")
PLACES = (
    "",
    "",
    "",
    ".log",
    ".json",
    "-0",
    "-1",
    "-delete",
    "__transaction_state-0/00000000000000000000.log",
)
"""Suffixes of paths.

A fault hits the disk operations on paths with one of them; the empty suffix matches every path.
"""
EXPECTED = (OSError, BrokerError, StorageError)
"""Errors with which periodic work may end while the disk fails."""


QUICK_SEEDS = range(20)
MAX_SEEDS = 500
"""If the fix of R478 is reverted, one of the seeds below this number must fail."""


class Run:
    """A sequence of nodes on one disk, and clients that send any request at any time."""

    def __init__(self, seed: int, note: Callable[[str], object]) -> None:
        self.note = note
        self.rng = rng = Random(f"{seed}/random requests")
        self.event = 0
        self.now_ms = FIRST_MS
        self.numbers = count(1)
        self.loses_power = rng.random() < 0.6
        is_synced = self.loses_power or rng.random() < 0.5
        settings: dict[str, Any] = {
            "num.partitions": 1,
            "offsets.topic.num.partitions": rng.choice((1, 1, 2)),
            "transaction.state.log.num.partitions": rng.choice((1, 1, 2)),
            "auto.create.topics.enable": False,
            "oncelog.transaction.version": rng.choice((0, 2)),
            "offsets.retention.minutes": 2,
            "offsets.retention.check.interval.ms": 30_000,
            "transactional.id.expiration.ms": 3 * MINUTE_MS,
            "producer.id.expiration.ms": 20 * MINUTE_MS,
            "transaction.remove.expired.transaction.cleanup.interval.ms": 30_000,
        }
        if is_synced:
            settings["log.flush.interval.messages"] = 1
        self.settings = BROKER.parse(settings)
        self.limits = replace(
            draw_limits(seed),
            request_step_elements=rng.choice((1, 2)),
            max_tombstones_per_batch=rng.choice((1, 2)),
            expire_step_entries=rng.choice((1, 2)),
            partitions_per_step=1,
            first_producer_epoch=rng.choice((0, 0, 32_760, 32_764, 32_766)),
        )
        self.disk = MemoryDisk()
        self.past: list[Any] = []
        """Nodes and disks of dead processes, kept alive because freeing a node would run the clean-up code of
        its generators.
        """
        self.identities = dict.fromkeys(IDS, ProducerIdAndEpoch(-1, -1))
        self.handed: dict[ProducerIdAndEpoch, object] = {}
        """For every assigned producer id and epoch, the request that got it."""
        self.first_seen: dict[bytes, int] = {}
        """For each topic id: the event after which the topic was first seen."""
        self.asked: set[int] = set()
        """Offsets whose commit has no response yet. Each commit has a different offset."""
        self.answered: dict[int, int] = {}
        """For each committed offset, the number of the event in which the response to its commit came."""
        self.start()

    # The node

    def new_uuid(self) -> bytes:
        return next(self.numbers).to_bytes(16, "big")

    def start(self) -> None:
        """Start a node on the files of the last process. Some starts may be killed before one succeeds."""
        while True:
            manager = None
            if self.past and self.rng.random() < 0.25:
                self.disk.crash_after = self.disk.steps + self.draw_steps()
            try:
                manager = LogManager.open(
                    self.disk, node_id=1, new_uuid=self.new_uuid, now_ms=self.now_ms, limits=self.limits
                )
                self.node = BrokerState(manager, self.settings, new_uuid=self.new_uuid, now_ms=self.now_ms)
                break
            except SimulatedCrash:
                self.note(f"{self.event}: a start crashes")
                self.past.append(manager)
                self.replace_disk()
        self.disk.crash_after = None
        self.node.log_manager.background.on_added = lambda: None
        self.syncing: list[Partition] = []
        """Partitions that are being synced. Their syncs end in random order."""
        self.jobs: list[BlockingCall] = []
        """Blocking calls of background tasks that have not ended. Steps of other requests may run before they
        end.
        """
        self.look()
        self.check_memory()
        self.check_transactions()

    def draw_steps(self) -> int:
        return self.rng.randrange(self.rng.choice((5, 50, 500, 3_000)))

    def replace_disk(self) -> None:
        self.disk.die()
        self.past.append(self.disk)
        is_power_loss = self.loses_power and self.rng.random() < 0.6
        self.disk = self.disk.after_power_loss(self.rng) if is_power_loss else self.disk.after_kill()

    def die(self) -> None:
        self.note(f"{self.event}: the process ends")
        self.past.append(self.node)
        self.answered.update(dict.fromkeys(self.asked, self.event))
        self.asked.clear()
        self.replace_disk()
        self.start()

    def stop(self) -> None:
        """Stop cleanly. The disk may fail during the stop."""
        self.note(f"{self.event}: a stop")
        background = self.node.log_manager.background
        background.on_added = None
        for job in self.jobs:
            with suppress(*EXPECTED):
                job()
        with suppress(*EXPECTED):
            background.finish()
        with suppress(*EXPECTED):
            self.node.close(self.now_ms)
        self.die()

    def step(self) -> bool:
        """Run a step of a background task, a blocking call, or a requested sync. Return False if no work is
        left.
        """
        background, flush_queue = self.node.log_manager.background, self.node.flush_queue
        self.syncing += flush_queue.take_due() if flush_queue.has_waiters else []
        if self.syncing and (not background or self.rng.random() < 0.3):
            partition = self.syncing.pop(self.rng.randrange(len(self.syncing)))
            try:
                partition.flush()
            except (OSError, KafkaStorageError) as error:
                flush_queue.complete(partition, error)
            else:
                flush_queue.complete(partition, None)
        elif self.jobs and (not background.is_ready or self.rng.random() < 0.3):
            job = self.jobs.pop(self.rng.randrange(len(self.jobs)))
            with suppress(Exception):  # the task raises this error in its next step
                job()
        elif background.is_ready:
            with suppress(*EXPECTED):
                if (begun := background.step()) is not None:
                    self.jobs.append(begun)
        else:
            return False
        end_round(self.node)
        return True

    # Requests

    def ask(
        self, message: Message, version: int, on_answer: Callable[[Any], None] = lambda answer: None
    ) -> None:
        header = RequestHeader(message.api.key, version, 1, "c", 0)
        answer = handle(self.node, Request(1, header, message, "/127.0.0.1"), self.now_ms)
        if isinstance(answer, PendingResponse):
            answer.add_done_callback(on_answer)
        else:
            on_answer(answer)
        end_round(self.node)

    def who(self) -> tuple[str, ProducerIdAndEpoch]:
        transactional_id = self.rng.choice(IDS)
        return transactional_id, self.identities[transactional_id]

    def hand_out(self, transactional_id: str, answer: Any, request: object) -> None:
        if getattr(answer, "error_code", None) != 0 or answer.producer_id < 0:
            return
        who = ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch)
        assert 0 <= who.producer_epoch < MAX_EPOCH
        earlier = self.handed.setdefault(who, request)
        assert earlier == request, f"{who} is handed out for {earlier} and for {request}"
        self.identities[transactional_id] = who

    def init(self) -> None:
        transactional_id, _ = self.who()
        request = "init", self.event
        message = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=self.rng.choice((5_000, MINUTE_MS)),
            producer_id=-1,
            producer_epoch=-1,
        )
        self.ask(
            message, self.rng.choice((2, 5)), lambda answer: self.hand_out(transactional_id, answer, request)
        )

    def add_partitions(self) -> None:
        transactional_id, who = self.who()
        topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(
            name=self.rng.choice(TOPICS), partitions=self.some_indexes()
        )
        message = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=who.producer_id,
            v3_and_below_producer_epoch=who.producer_epoch,
            v3_and_below_topics=[topic],
        )
        self.ask(message, 3)

    def add_offsets(self) -> None:
        transactional_id, who = self.who()
        message = AddOffsetsToTxnRequest(
            transactional_id=transactional_id,
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            group_id=self.rng.choice(GROUPS),
        )
        self.ask(message, 3)

    def produce(self) -> None:
        transactional_id, who = self.who()
        entry = self.node.transactions.get(transactional_id)
        joined = sorted(tp for tp in (entry.partitions if entry else ()) if tp.topic in TOPICS)
        tp = TopicPartition(self.rng.choice(TOPICS), self.rng.randrange(PARTITIONS))
        if joined and self.rng.random() < 0.6:
            tp = self.rng.choice(joined)
        batch = build_batch(
            [NewRecord(self.now_ms, None, b"value")],
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            base_sequence=self.next_sequence(tp, who),
            is_transactional=True,
        )
        part = ProduceRequest.PartitionProduceData(index=tp.partition, records=memoryview(batch))
        topic = ProduceRequest.TopicProduceData(name=tp.topic, partition_data=[part])
        message = ProduceRequest(
            transactional_id=transactional_id, acks=-1, timeout_ms=1_000, topic_data=[topic]
        )
        self.ask(message, self.rng.choice((9, 11, 12)))

    def next_sequence(self, tp: TopicPartition, who: ProducerIdAndEpoch) -> int:
        topic = self.node.topics.get(tp.topic)
        if topic is None or tp.partition >= len(topic.partitions):
            return 0
        entry = topic.partitions[tp.partition].producer(who.producer_id)
        if entry is None or entry.producer_epoch != who.producer_epoch or not entry.batches:
            return 0
        return (entry.batches[-1].last_sequence or 0) + 1

    def end(self) -> None:
        transactional_id, who = self.who()
        is_commit = self.rng.random() < 0.6
        # Clients send version 5 only if the broker has transaction.version 2.
        version = self.rng.choice((4, 5)) if self.settings["oncelog.transaction.version"] else 4
        request = "end", transactional_id, who
        message = EndTxnRequest(
            transactional_id=transactional_id,
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            committed=is_commit,
        )

        def on_answer(answer: Any) -> None:
            if version >= 5:
                self.hand_out(transactional_id, answer, request)

        self.ask(message, version, on_answer)

    def some_indexes(self) -> list[int]:
        return self.rng.choice(([0], [1], [0, 1]))

    def rows(self, kind: Any, **fields: Any) -> list[Any]:
        return [kind(partition_index=index, **fields) for index in self.some_indexes()]

    def new_offset(self) -> tuple[int, Callable[[Any], None]]:
        offset = self.event
        self.asked.add(offset)

        def on_answer(answer: Any) -> None:
            self.asked.discard(offset)
            self.answered[offset] = self.event

        return offset, on_answer

    def commit_offsets(self) -> None:
        request = OffsetCommitRequest
        offset, on_answer = self.new_offset()
        topic = request.OffsetCommitRequestTopic(
            name=self.rng.choice(TOPICS),
            partitions=self.rows(request.OffsetCommitRequestPartition, committed_offset=offset),
        )
        group_id = self.rng.choice(GROUPS)
        message = request(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])
        self.ask(message, 8, on_answer)

    def commit_in_transaction(self) -> None:
        request = TxnOffsetCommitRequest
        transactional_id, who = self.who()
        offset, on_answer = self.new_offset()
        topic = request.TxnOffsetCommitRequestTopic(
            name=self.rng.choice(TOPICS),
            partitions=self.rows(request.TxnOffsetCommitRequestPartition, committed_offset=offset),
        )
        message = request(
            transactional_id=transactional_id,
            group_id=self.rng.choice(GROUPS),
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            topics=[topic],
        )
        self.ask(message, self.rng.choice((3, 4, 5)), on_answer)

    def delete_offsets(self) -> None:
        request = OffsetDeleteRequest
        rows = self.rows(request.OffsetDeleteRequestPartition)
        topic = request.OffsetDeleteRequestTopic(name=self.rng.choice(TOPICS), partitions=rows)
        self.ask(request(group_id=self.rng.choice(GROUPS), topics=[topic]), 0)

    def delete_group(self) -> None:
        self.ask(DeleteGroupsRequest(groups_names=[self.rng.choice(GROUPS)]), 2)

    def create_topic(self) -> None:
        topic = CreateTopicsRequest.CreatableTopic(
            name=self.rng.choice(TOPICS),
            num_partitions=PARTITIONS,
            replication_factor=1,
            assignments=[],
            configs=[],
        )
        self.ask(CreateTopicsRequest(topics=[topic], timeout_ms=1_000), 7)

    def add_topic_partitions(self) -> None:
        topic = CreatePartitionsRequest.CreatePartitionsTopic(
            name=self.rng.choice(TOPICS), count=self.rng.randint(3, 5), assignments=None
        )
        self.ask(CreatePartitionsRequest(topics=[topic], timeout_ms=1_000, validate_only=False), 3)

    def delete_topic(self) -> None:
        topic = DeleteTopicsRequest.DeleteTopicState(name=self.rng.choice(TOPICS))
        self.ask(DeleteTopicsRequest(topics=[topic], timeout_ms=1_000), 6)

    # Time, the disk and restarts

    def take_steps(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            if not self.step():
                break

    def finish(self) -> None:
        for _ in range(2_000):
            if not self.step():
                return
        raise AssertionError("the node is never done")

    def pass_time(self) -> None:
        self.now_ms += self.rng.choice((1, 1_000, 6_000, MINUTE_MS, 10 * MINUTE_MS))
        with suppress(*EXPECTED):
            tick(self.node, self.now_ms)
        end_round(self.node)

    def break_disk(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.disk.errors[self.rng.choice(FAULTS), self.rng.choice(PLACES)] = EIO
        self.note(f"{self.event}: {list(self.disk.errors)} fail")

    def fill_disk(self) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes() + self.rng.randrange(
            self.rng.choice((1, 100, 1_000))
        )

    def heal_disk(self) -> None:
        self.disk.errors.clear()
        self.disk.capacity_bytes = None

    def create_topic_and_crash(self) -> None:
        self.disk.crash_after = self.disk.steps + self.rng.randrange(1_500)
        self.create_topic()
        self.finish()
        self.disk.crash_after = None

    def crash_soon(self) -> None:
        self.disk.crash_after = self.disk.steps + self.draw_steps()

    # The run

    ACTIONS: tuple[tuple[Callable[[Run], None], int], ...] = (
        (init, 6), (add_partitions, 7), (add_offsets, 5), (produce, 12), (end, 8), (commit_offsets, 5),
        (commit_in_transaction, 8), (delete_offsets, 2), (delete_group, 1), (create_topic, 8),
        (add_topic_partitions, 1), (delete_topic, 4), (take_steps, 30), (finish, 6), (pass_time, 4),
        (break_disk, 3), (fill_disk, 1), (heal_disk, 6), (crash_soon, 2), (create_topic_and_crash, 2),
        (die, 2), (stop, 1),
    )  # fmt: skip

    def act(self, action: Callable[[Run], None]) -> None:
        self.event += 1
        if action.__name__ not in ("take_steps", "finish"):
            self.note(f"{self.event}: {action.__name__}")
        try:
            action(self)
            self.look()
        except SimulatedCrash:
            self.die()

    def play(self, event_count: int) -> None:
        actions, weights = zip(*self.ACTIONS, strict=True)
        for name in TOPICS:
            self.node.topics.create(name, PARTITIONS, {}, self.now_ms)
        self.finish()
        for _ in IDS:
            self.act(Run.init)
        for action in self.rng.choices(actions, weights, k=event_count):
            self.act(action)
        self.disk.crash_after = None
        self.heal_disk()
        self.act(Run.die)
        for _ in range(3):
            self.act(Run.finish)
            self.node.transactions.retry_markers(self.now_ms)
        self.act(Run.finish)
        self.check_memory()
        self.check_transactions()
        # Let each open transaction time out.
        for _ in range(3):
            self.now_ms += MINUTE_MS + 1
            self.node.transactions.retry_markers(self.now_ms)
            self.node.transactions.abort_timed_out(self.now_ms)
            self.act(Run.finish)
        self.check_memory()
        for tp, partition in self.node.topics.all_partitions():
            assert not partition.open_transactions(), (tp, partition.open_transactions())

    # Invariants

    def look(self) -> None:
        """Remember the existing topics, and check the offsets committed for them."""
        for topic in self.node.topics.all():
            self.first_seen.setdefault(topic.topic_id, self.event)
        committed, pending = self.node.groups.offsets.snapshot()
        for groups in (committed, *pending.values()):
            for group, offsets in groups.items():
                for tp, offset in offsets.items():
                    self.check_offset(group, tp, offset.offset)

    def check_offset(self, group: str, tp: TopicPartition, offset: int) -> None:
        topic = self.node.topics.get(tp.topic)
        if topic is None or offset not in self.answered:
            return
        answered, since = self.answered[offset], self.first_seen[topic.topic_id]
        assert answered >= since, f"{group} has {offset} of an older topic in {tp}: {answered} before {since}"

    def check_memory(self) -> None:
        found = differences(live_state(self.node), replayed_state(self.node, self.now_ms))
        assert not found, found

    def check_transactions(self) -> None:
        """Check that each open transaction has a coordinator that ends it."""
        known = {
            entry.producer_id: KnownTransaction(
                entry.transactional_id,
                entry.producer_id,
                entry.producer_epoch,
                entry.state.label,
                entry.partitions,
            )
            for entry in self.node.transactions.all()
        }
        for tp, partition in self.node.topics.all_partitions():
            for who in partition.open_transactions():
                opened = OpenTransaction(tp, *who, 0, None, None)
                why = hanging_reason(opened, known.get(who.producer_id))
                assert why is None, f"{tp} has an open transaction of {who}: {why}"

    def release(self) -> None:
        for dead in (*self.past, self.disk):
            if isinstance(dead, MemoryDisk):
                dead.release()


def run(seed: int, event_count: int = 150, note: Callable[[str], object] = lambda text: None) -> None:
    """Run a seed. Raises AssertionError if a condition is violated. Exceptions of the node pass through."""
    running = Run(seed, note)
    try:
        running.play(event_count)
    finally:
        running.release()


def run_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_random_requests_leave_a_sound_state_whatever_the_disk_does() -> None:
    run_all(QUICK_SEEDS)


@pytest.mark.full("plays many seeds")
def test_random_requests_leave_a_sound_state_in_more_runs() -> None:
    run_all(range(100, 200))


@pytest.mark.soak
def test_random_requests_leave_a_sound_state_in_thousands_of_runs() -> None:
    run_all(range(200, 20_000))


# Reintroduce a fixed bug.


def wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Revert the fix of R478, so that the broker admits an older request although newer records are not
    durable yet.
    """
    monkeypatch.setattr(TransactionCoordinator, "last_append", lambda self, transactional_id: [])


@pytest.mark.full("plays seeds until one finds it")
def test_random_requests_find_older_requests_let_in_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_nothing(monkeypatch)
    with pytest.raises(AssertionError, match="has an open transaction"):
        run_all(range(MAX_SEEDS))
