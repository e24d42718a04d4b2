"""Compaction in a running broker: topics with active producers, and the coordinators' logs (behaviour T2)."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.log.partitions import batch, config, open_partition, put
from support.topics import new_topic, producer_of, read
from support.wait import pause, until, wait_until

from oncelog import Broker, Consumer, OffsetAndMetadata, Producer, TopicPartition
from oncelog.broker.dispatch import tick
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.limits import Limits
from oncelog.log.background import BackgroundQueue
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.entry import TransactionState
from oncelog.runtime.clock import Clock
from oncelog.server.background import BackgroundRunner
from oncelog.server.disk import RealDisk
from oncelog.server.embedded import recover_node
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.types import ConsumerGroupMetadata, Origin
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord

QUICK = {"log.cleaner.backoff.ms": 20}
NOW_MS = 1_700_000_000_000
AT = TopicPartition("t", 0)
SHORT = Limits(coordinator_roll_bytes=2_000)


def small(servers: str, **settings: object) -> str:
    """Create a compacted topic with short segments, and return its name."""
    return new_topic(servers, cleanup_policy="compact", internal_segment_bytes=2_000, **settings)


def newest(servers: str, topic: str) -> dict[bytes | None, bytes | None]:
    return {record.key: record.value for record in read(servers, topic)}


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_compaction_continues_once_there_are_threads_again(refused: int) -> None:
    """No thread can be started for one of the three blocking calls of a compaction."""
    partition = open_partition(log_config=config(cleanup_policy="compact,delete", segment_bytes=400))
    for _ in range(40):
        put(partition, batch(key=b"k"))
    partition.flush()
    background = BackgroundQueue()

    async def compact(refused: int) -> None:
        loop, calls = asyncio.get_running_loop(), count(1)
        run = loop.run_in_executor

        def run_or_refuse(executor: Any, call: Any) -> Any:
            if next(calls) == refused:
                raise RuntimeError("can't start new thread")
            return run(executor, call)

        loop.run_in_executor = run_or_refuse  # type: ignore[method-assign, assignment]
        runner = BackgroundRunner(background, lambda: None)
        runner.start()
        background.add(partition.cleaner.finish_swap())
        if (dirty := partition.cleaner.dirty_range(NOW_MS)) is not None:
            background.add(partition.cleaner.compact(dirty, NOW_MS))
        await until(lambda: not background)
        await runner.stop()

    old = list(partition.log.segments)[:-1]
    for number in (refused, 0, 0):
        asyncio.run(compact(number))
    assert partition.cleaner.dirty_range(NOW_MS) is None
    assert not partition.log.is_swapping
    with pytest.raises(OSError, match="closed"):
        old[0].file.size()


def test_a_topic_shrinks_to_its_keys() -> None:
    with Broker(config=QUICK) as broker:
        servers = broker.bootstrap_servers
        topic = small(servers)
        with producer_of(servers) as producer:
            for number in range(400):
                producer.send(topic, b"%d" % number, key=b"k%d" % (number % 5))
                producer.flush()
        expected = {b"k%d" % key: b"%d" % (395 + key) for key in range(5)}
        # Compaction leaves the newest closed segment and the active one alone, so a key may have several
        # records there.
        wait_until(lambda: len(read(servers, topic)) < 60)
        assert newest(servers, topic) == expected
        records = read(servers, topic)
        assert all(int(record.value or b"") == record.offset for record in records)


def test_one_round_compacts_what_was_just_closed() -> None:
    """librdkafka's test 0077 waits 20 s for compaction: longer than one interval between rounds, but shorter
    than two. So the first round must compact a segment that was just closed.
    """
    node = recover_node(MemoryDisk(), BROKER.parse({}), Clock())
    now_ms = Clock().now_ms()
    configs = {
        "cleanup.policy": "compact",
        "internal.segment.bytes": "1000",
        "min.cleanable.dirty.ratio": "0",
    }
    partition = node.topics.create("t", 1, configs, now_ms).partitions[0]
    for number in range(30):
        record = NewRecord(now_ms, b"k", b"%d" % number)
        partition.append(memoryview(build_batch([record])), origin=Origin.CLIENT, now_ms=now_ms)
    assert partition.cleaner.cleaned_to == partition.recovery_point == 0
    tick(node, now_ms + BROKER.parse({})["log.cleaner.backoff.ms"])
    for flushed in node.flush_queue.take_due():
        flushed.flush()
        node.flush_queue.complete(flushed, None)
    assert partition.cleaner.cleaned_to > 0


@pytest.mark.full("starts a broker nine times; tests/log crashes a compaction at every step")
@pytest.mark.parametrize("is_transactional", [False, True])
def test_the_broker_is_killed_while_it_compacts(tmp_path: Path, is_transactional: bool) -> None:
    """No acknowledged record that is the newest of its key is lost, and no aborted record becomes visible
    again.
    """
    with BrokerProcess(tmp_path / "data", settings=QUICK) as broker:
        servers = broker.bootstrap_servers
        topic = small(servers)
        acknowledged: dict[bytes, bytes] = {}
        stopped = threading.Event()

        def work() -> None:
            chance, number = random.Random(3), 0
            settings = {"transactional_id": "steady"} if is_transactional else {}
            with producer_of(servers, max_block_ms=60_000, **settings) as producer:
                if is_transactional:
                    producer.init_transactions()
                while not stopped.is_set():
                    key, value = b"k%d" % chance.randrange(6), b"%d" % number
                    number += 1
                    if not is_transactional:
                        producer.send(topic, value, key=key).result(60)
                    elif not _transaction(producer, topic, key, value, commit=chance.random() < 0.7):
                        continue
                    acknowledged[key] = value

        worker = threading.Thread(target=work)
        worker.start()
        chance = random.Random(11)
        for _ in range(8):
            pause(chance.uniform(0.1, 0.4))
            broker.kill()
            broker.start()
        checkpoint = tmp_path / "data" / "cleaner-offset-checkpoint"
        try:  # a slow machine may not have written enough for a compaction yet
            wait_until(lambda: checkpoint.exists() and f"{topic} 0 " in checkpoint.read_text(), 200)
        finally:
            stopped.set()
            worker.join(120)
        assert not worker.is_alive()
        assert newest(servers, topic) == acknowledged


def _transaction(producer: Producer, topic: str, key: bytes, value: bytes, *, commit: bool) -> bool:
    producer.begin_transaction()
    producer.send(topic, value, key=key)
    if commit:
        producer.commit_transaction()
    else:
        producer.flush()
        producer.abort_transaction()
    return commit


class Coordinators:
    """A node without sockets that the test restarts repeatedly, and whose logs it compacts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = BROKER.parse(
            {"transaction.state.log.num.partitions": 2, "offsets.topic.num.partitions": 2}
        )
        self.node = self._open()

    def _open(self) -> BrokerState:
        return recover_node(RealDisk(self.directory), self.settings, Clock(), limits=SHORT)

    def restart(self) -> None:
        """Restart the broker as after SIGKILL."""
        self.node.log_manager.release()
        self.node = self._open()

    def compact(self) -> None:
        """Do the work of two rounds of compaction. The first closes and syncs the active segments; the second
        compacts them.
        """
        for topic in (self.node.transactions.topic, self.node.groups.topic):
            topic.roll_for_compaction(NOW_MS)
        for partition in self.node.log_manager.partitions.values():
            partition.flush()
        self.node.log_manager.compact(NOW_MS)

    def records(self, name: str) -> int:
        topic = self.node.topics.get(name)
        assert topic is not None
        return sum(
            len(batch.records)
            for state in (self.node.transactions.topic, self.node.groups.topic)
            if state.name == name
            for index in range(len(topic.partitions))
            for batch in state.replay(index)
        )


@pytest.fixture
def coordinators(tmp_path: Path) -> Coordinators:
    return Coordinators(tmp_path)


@pytest.mark.behaviour("T2")
def test_the_log_of_transactions_is_as_long_as_its_ids(coordinators: Coordinators) -> None:
    made = coordinators
    made.node.topics.create("t", 1, {}, NOW_MS)
    for number in range(300):
        name = f"id-{number % 10}"
        transactions = made.node.transactions
        entry = transactions.init(name, None, 60_000, NOW_MS).entry
        who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
        transactions.add_partitions(name, who, [AT], NOW_MS)
        transactions.end(name, who, True, 2, NOW_MS)
        if number % 50 == 49:
            made.compact()
    assert made.records("__transaction_state") < 150, "of 1,500 and more that were written"
    expected = {f"id-{n}": made.node.transactions.get(f"id-{n}") for n in range(10)}
    made.restart()
    for name, before in expected.items():
        after = made.node.transactions.get(name)
        assert after is not None and before is not None
        assert (after.producer_id, after.producer_epoch) == (before.producer_id, before.producer_epoch)
    assert all(
        entry is not None and entry.state is TransactionState.COMPLETE_COMMIT for entry in expected.values()
    )


@pytest.mark.behaviour("T2")
def test_a_prepared_transaction_is_finished_from_a_compacted_log(coordinators: Coordinators) -> None:
    made = coordinators
    made.node.topics.create("t", 1, {}, NOW_MS)
    entry = made.node.transactions.init("left", None, 60_000, NOW_MS).entry
    who = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    made.node.transactions.add_partitions("left", who, [AT], NOW_MS)
    with patch.object(type(made.node.transactions), "_write_markers"):
        made.node.transactions.end("left", who, True, 2, NOW_MS)
    for number in range(200):
        made.node.transactions.init(f"id-{number % 3}", None, 60_000, NOW_MS)
        if number % 50 == 49:
            made.compact()
    held = made.node.transactions.get("left")
    assert held is not None and held.state is TransactionState.PREPARE_COMMIT
    made.restart()
    held = made.node.transactions.get("left")
    assert held is not None and held.state is TransactionState.COMPLETE_COMMIT


@pytest.mark.behaviour("T2", "T9")
def test_expired_transactional_ids_leave_no_records_after_compaction(coordinators: Coordinators) -> None:
    made = coordinators
    for number in range(40):
        made.node.transactions.init(f"id-{number}", None, 60_000, NOW_MS)
    made.node.transactions.expire(NOW_MS + 8 * 86_400_000)
    for _ in range(60):
        made.node.transactions.init("living", None, 60_000, NOW_MS)
    made.compact()
    made.restart()
    assert made.node.transactions.get("id-7") is None and made.node.transactions.get("living") is not None


def test_compaction_keeps_committed_and_pending_offsets(coordinators: Coordinators) -> None:
    made = coordinators
    offsets = made.node.groups.offsets
    who = ProducerIdAndEpoch(50, 0)
    offsets.commit_pending("g", who, {TopicPartition("pending", 0): _offset(5)}, NOW_MS)
    for number in range(300):
        offsets.commit("g", {TopicPartition("t", number % 3): _offset(number)}, NOW_MS)
        if number % 60 == 59:
            made.compact()
    assert offsets.pending_of("g") == {TopicPartition("pending", 0)}
    expected = offsets.of("g")
    made.restart()
    offsets = made.node.groups.offsets
    assert offsets.of("g") == expected and len(expected) == 3
    assert offsets.pending_of("g") == {TopicPartition("pending", 0)}


def _offset(offset: int) -> CommittedOffset:
    return CommittedOffset(offset, -1, "", NOW_MS, -1, -1)


def _log_bytes(directory: Path) -> int:
    size_bytes = 0
    for path in directory.glob("*.log"):
        with suppress(FileNotFoundError):  # compaction may remove or rename a file meanwhile
            size_bytes += path.stat().st_size
    return size_bytes


def test_a_group_goes_on_after_its_log_was_compacted(tmp_path: Path) -> None:
    with (
        patch("oncelog.server.embedded.recover_node", partial(recover_node, limits=SHORT)),
        Broker(tmp_path, config={**QUICK, "offsets.topic.num.partitions": 1}) as broker,
    ):
        servers = broker.bootstrap_servers
        topic = new_topic(servers)
        with producer_of(servers, transactional_id="copier") as producer:
            producer.init_transactions()
            for number in range(100):
                with producer.transaction():
                    producer.send(topic, b"%d" % number)
                    producer.send_offsets_to_transaction(
                        {TopicPartition(topic, 0): OffsetAndMetadata(number + 1)}, ConsumerGroupMetadata("g")
                    )
        log = tmp_path / "__consumer_offsets-0"
        # The log is about 23,000 bytes long before compaction. 7,800 of them are markers, which
        # delete.retention.ms keeps.
        wait_until(lambda: _log_bytes(log) < 15_000)
    with (
        Broker(tmp_path) as broker,
        Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "g"}) as consumer,
    ):
        held = consumer.committed([TopicPartition(topic, 0)])[TopicPartition(topic, 0)]
        assert held is not None and held.offset == 100
