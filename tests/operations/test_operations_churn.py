"""State that clients create and abandon must not accumulate: topics, groups, transactional ids,
connections.

The test counts the objects and container entries that are reachable from the broker, its file descriptors and
its files. It does not measure memory, which depends on the allocator. The short run moves the clock; the long
one takes ten minutes.
"""

from __future__ import annotations

import os
import random
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broker import RawClient, wait_until
from support.groups.node import commit, heartbeat, join, sync
from support.wait import attempts, set_wall_clock

from oncelog import Broker, Producer, TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.messages import (
    AddOffsetsToTxnRequest,
    DeleteTopicsRequest,
    FetchRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    LeaveGroupRequest,
)
from oncelog.wire.records import NewRecord

MINUTE_MS = 60_000
CONFIG = {
    "num.partitions": 1,
    "offsets.topic.num.partitions": 2,
    "transaction.state.log.num.partitions": 2,
    "offsets.retention.minutes": 1,
    "offsets.retention.check.interval.ms": 1_000,
    "transactional.id.expiration.ms": MINUTE_MS,
    "transaction.remove.expired.transaction.cleanup.interval.ms": 1_000,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1_000,
    "producer.id.expiration.ms": MINUTE_MS,
    "producer.id.expiration.check.interval.ms": 1_000,
    "max.incremental.fetch.session.cache.slots": 4,
    "group.consumer.session.timeout.ms": 10_000,
}
LONG_ROUNDS = 1_500
"""Rounds of the long run, which takes about ten minutes."""
PATIENCE_S = 240
SLACK = Counter(
    {
        # The coordinators' logs may grow to 256 KiB, because smaller ones are not compacted.
        "files of coordinators": 60,
        "AbortedTransaction": 1500,
        "TransactionIndex._entries": 1500,
        **dict.fromkeys(
            ("Segment", "SegmentList._segments", "SegmentList._bases", "TransactionIndex", "RealFile"), 12
        ),
        # Names of deleted topics are removed only when there are a thousand.
        "TopicPatterns._in_order": 1000,
        "TopicPatterns._listed": 1000,
        # These tables keep a deleted partition until the next periodic checkpoint.
        "LogManager._written_points": 10,
        "LogManager._recovery_points": 10,
        "LogManager._log_starts": 10,
        "LogManager._indexed": 10,
        "LogManager._cleaned": 10,
    }
)
"""For each name of a count, the growth that is allowed.

These counts are bounded, and small compared with the number of operations of the long run.
"""


class Churn:
    """Clients that connect, send some requests and disconnect, some of them without a clean close."""

    def __init__(self, address: str) -> None:
        self.address, self.chance, self.rounds = address, random.Random(1), 0

    def play(self) -> None:
        """Use each kind of client once, and then disconnect."""
        number, self.rounds = self.rounds, self.rounds + 1
        topic = f"churn-{number}"
        with RawClient(self.address) as client:
            client.create_topic(topic, 2)
            producer_id = client.new_producer_id()
            record = NewRecord(0, None, b"v")
            client.produce(
                topic, build_batch([record], producer_id=producer_id, producer_epoch=0, base_sequence=0)
            )
            self._open_session(client, topic)
            self._groups(client, topic, number)
            self._transaction(client, topic, number)
            self._abandon_transaction(client, number)
            client.ask(DeleteTopicsRequest(topic_names=[topic], timeout_ms=10_000), 5)
        self._strangers()

    def _open_session(self, client: RawClient, topic: str) -> None:
        wanted = [FetchRequest.FetchTopic(topic=topic, partitions=[FetchRequest.FetchPartition(partition=0)])]
        client.ask(FetchRequest(session_id=0, session_epoch=0, max_wait_ms=0, topics=wanted), 12)

    def _groups(self, client: RawClient, topic: str, number: int) -> None:
        """Join one group of each protocol. Every third member never leaves, so its session times out."""
        classic, consumer, is_polite = f"classic-{number}", f"consumer-{number}", number % 3 != 0
        joined = client.ask(join(classic, session_timeout_ms=6_000), 3)
        client.ask(sync(classic, joined.member_id, joined.generation_id, {joined.member_id: b"x"}), 3)
        who: dict[str, Any] = {"generation_id_or_member_epoch": joined.generation_id}
        client.ask(commit(classic, 1, topic, member_id=joined.member_id, **who), 7)
        answer = client.ask(heartbeat(consumer, "m", subscribed_topic_names=[topic]), 1)
        who = {"generation_id_or_member_epoch": answer.member_epoch, "member_id": "m"}
        client.ask(commit(consumer, 1, "stays", **who), 9)
        if is_polite:
            client.ask(LeaveGroupRequest(group_id=classic, member_id=joined.member_id), 2)
            client.ask(heartbeat(consumer, "m", -1), 1)
        client.ask(commit(f"simple-{number}", 1, "stays"), 7)

    def _transaction(self, client: RawClient, topic: str, number: int) -> None:
        with Producer({"bootstrap.servers": self.address, "transactional.id": f"txn-{number}"}) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send(topic, b"v").result(60)
            offsets = {TopicPartition("stays", 0): number}
            producer.send_offsets_to_transaction(offsets, f"of-txn-{number}")
            producer.abort_transaction() if number % 4 == 0 else producer.commit_transaction()

    def _abandon_transaction(self, client: RawClient, number: int) -> None:
        """Leave a transaction open until the broker aborts it."""
        transactional_id = f"left-{number}"
        client.ask(FindCoordinatorRequest(key_type=1, coordinator_keys=[transactional_id]), 4)
        begun = client.ask(
            InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=1_000), 4
        )
        client.ask(
            AddOffsetsToTxnRequest(
                transactional_id=transactional_id,
                producer_id=begun.producer_id,
                producer_epoch=begun.producer_epoch,
                group_id=f"left-{number}",
            ),
            3,
        )

    def _strangers(self) -> None:
        """Open and close connections that send nothing, random bytes, or a part of a request."""
        host, _, port = self.address.rpartition(":")
        for said in (b"", self.chance.randbytes(8), b"\0\0\0\x40\0\x12\0\0"):
            with socket.create_connection((host, int(port)), timeout=60) as stranger:
                stranger.sendall(said)


class Census:
    """Counts the objects of a broker that may accumulate, in the broker's own thread."""

    def __init__(self, broker: Broker) -> None:
        assert broker._running is not None and broker._thread is not None
        self._running, self._thread, self._directory = broker._running, broker._thread, Path(broker.data_dir)

    def pass_time(self, ms: int) -> None:
        """Set the broker's clock forward and run the work that is due."""

        async def go_on() -> None:
            set_wall_clock(self._running.clock, ms)
            self._running.server._tick()

        self._thread.run(go_on(), PATIENCE_S)
        wait_until(lambda: not self._running.node.log_manager.background)

    def take(self) -> Counter[str]:
        async def count() -> Counter[str]:
            return _count(self._running)

        counts = self._thread.run(count(), PATIENCE_S)
        counts["descriptors"] = len(os.listdir("/proc/self/fd"))
        for folder, folders, files in os.walk(self._directory):
            is_of_coordinator = Path(folder).name.startswith("__")
            counts["directories"] += len(folders)
            if folder != str(self._directory):  # each checkpoint has only one file in the top directory
                counts["files of coordinators" if is_of_coordinator else "files"] += len(files)
        return counts

    def wait_until_no_more_than(self, before: Counter[str], then: Callable[[], None]) -> None:
        """Wait until no count is greater than before, apart from the allowed growth. Fail with the counts
        that stay greater.
        """
        more: Counter[str] = Counter()
        for _ in attempts(lambda: f"more than before: {dict(more)}", PATIENCE_S):
            if not (more := self.take() - before - SLACK):
                return
            then()


def _count(root: object) -> Counter[str]:
    """Count all objects that are reachable from `root`: objects by their class, and entries of containers by
    the container's owner.
    """
    seen, ahead, counts = set[int](), [(root, "")], Counter[str]()
    while ahead:
        thing, owner = ahead.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, bytearray, int, float, type, type(None))):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            counts[owner] += len(thing)
            ahead += [(each, owner) for pair in thing.items() for each in pair]
        elif isinstance(thing, (list, set, frozenset, deque)):
            counts[owner] += len(thing)
            ahead += [(each, owner) for each in thing]
        elif type(thing).__module__.startswith("oncelog."):
            counts[type(thing).__qualname__] += 1
            ahead += [(value, f"{type(thing).__qualname__}.{name}") for name, value in _attributes(thing)]
        elif isinstance(thing, tuple):
            ahead += [(each, owner) for each in thing]
    return counts


def _attributes(thing: object) -> list[tuple[str, object]]:
    if isinstance(thing, tuple):
        return [("", each) for each in thing]
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [(name, getattr(thing, name, None)) for name in names if name != "__weakref__"]
    return values + list(getattr(thing, "__dict__", {}).items())


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data", config=CONFIG) as running:
        with RawClient(running.bootstrap_servers) as client:
            client.create_topic("stays", 2)
        yield running


def test_short_lived_clients_and_topics_leave_nothing_behind(broker: Broker) -> None:
    churn, census = Churn(broker.bootstrap_servers), Census(broker)

    def forget() -> None:
        census.pass_time(2 * MINUTE_MS)

    for _ in range(6):
        churn.play()
    for _ in range(3):
        forget()
    before = census.take()
    for _ in range(30):
        churn.play()
    assert census.take()["ConsumerGroup"] == 30
    census.wait_until_no_more_than(before, forget)


@pytest.mark.soak
def test_ten_minutes_of_coming_and_going_leave_nothing_behind(broker: Broker) -> None:
    churn, census = Churn(broker.bootstrap_servers), Census(broker)
    for _ in range(6):
        churn.play()
    for _ in range(3):
        census.pass_time(2 * MINUTE_MS)
    before = census.take()
    for _ in range(LONG_ROUNDS):
        churn.play()
    print(f"{churn.rounds} rounds")
    census.wait_until_no_more_than(before, lambda: census.pass_time(MINUTE_MS))
