"""Group members for tests: our consumer with short pauses, alone or in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from oncelog import Consumer, TopicPartition
from oncelog.errors import IllegalGeneration, RebalanceInProgress, UnknownMemberId
from support.topics import new_topic, producer_of, values
from support.wait import LIMIT_S as SECONDS
from support.wait import attempts
from support.wait import wait_until as wait_for


def member(servers: str, group: str, **settings: Any) -> Consumer:
    quick: dict[str, Any] = {"retry_backoff_ms": 20}
    if settings.get("group_protocol") != "consumer":
        quick |= {"heartbeat_interval_ms": 100, "session_timeout_ms": 6_000}
    config = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
    return Consumer(config, **{**quick, **settings})


def fill(servers: str, topic: str, first: int, count: int, partitions: int) -> None:
    with producer_of(servers) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, partition=number % partitions)
        producer.flush()


def take(consumer: Consumer, count: int) -> list[int]:
    """Return the values of the next `count` records."""
    values: list[int] = []
    for _ in attempts():
        if len(values) >= count:
            break
        values += [int(record.value or b"") for record in consumer.poll(0.2)]
    return values


class Reader:
    """A member in a thread. `values` collects what it reads; `assigned` has its current partitions."""

    def __init__(self, consumer: Consumer, topic: str) -> None:
        self.consumer, self.values, self.events = consumer, list[int](), list[tuple[str, int]]()
        self._stop = threading.Event()
        consumer.subscribe(
            [topic],
            on_assigned=lambda share: self.events.append(("assigned", len(share))),
            on_revoked=self._revoked,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _revoked(self, share: list[TopicPartition]) -> None:
        self.events.append(("revoked", len(share)))
        try:
            self.consumer.commit()
        except (IllegalGeneration, RebalanceInProgress, UnknownMemberId):
            # After `stop`, the member may be in a rebalance and lose partitions, so these errors do not
            # matter.
            if not self._stop.is_set():
                raise

    def _run(self) -> None:
        while not self._stop.is_set():
            self.values += [int(record.value or b"") for record in self.consumer.poll(0.1)]

    def stop(self, *, commits: bool = False) -> None:
        self._stop.set()
        self._thread.join(SECONDS)
        if commits:
            self.consumer.commit()
        self.consumer.close()


def transform_thirty(servers: str, consumer: Consumer) -> None:
    """Copy thirty records in transactions, some of them aborted. Check that every record is transformed
    once.
    """
    source, target = new_topic(servers, 2), new_topic(servers)
    fill(servers, source, 0, 30, 2)
    with producer_of(servers, transactional_id=f"copy-{source}") as producer:
        producer.init_transactions()
        consumer.subscribe([source])
        done, turn = 0, 0
        for _ in attempts():
            if done == 30:
                break
            records = consumer.poll(0.2)
            if not records:
                continue
            turn += 1
            producer.begin_transaction()
            for record in records:
                producer.send(target, b"%d" % (int(record.value or b"") * 10))
            ends = {TopicPartition(r.topic, r.partition): r.offset + 1 for r in records}
            producer.send_offsets_to_transaction(ends, consumer.group_metadata())
            if turn % 3 == 0:
                producer.abort_transaction()
                consumer.seek_to_committed()
            else:
                producer.commit_transaction()
                done += len(records)
    assert sorted(int(value or b"") for value in values(servers, target)) == [n * 10 for n in range(30)]


def idle_member_is_left_behind(servers: str, member_with: Callable[..., Consumer]) -> None:
    """Check that a member that does not poll is removed from its group, and cannot commit with its old
    identity.
    """
    topic = new_topic(servers, 2)
    fill(servers, topic, 0, 4, 2)
    lost: list[int] = []
    with (
        producer_of(servers, transactional_id=f"left-{topic}") as producer,
        member_with(max_poll_interval_ms=400, enable_auto_commit=False) as consumer,
    ):
        producer.init_transactions()
        consumer.subscribe([topic], on_lost=lambda share: lost.append(len(share)))
        take(consumer, 4)

        def is_refused() -> bool:
            producer.begin_transaction()
            try:
                producer.send_offsets_to_transaction({TopicPartition(topic, 0): 2}, consumer.group_metadata())
            except (UnknownMemberId, IllegalGeneration):
                return True
            finally:
                producer.abort_transaction()
            return False

        wait_for(is_refused)
        with pytest.raises((UnknownMemberId, IllegalGeneration)):
            consumer.commit()
        assert sorted(take(consumer, 4)) == [0, 1, 2, 3], "it joins again and reads from the last commit"
        assert lost == [2]
        consumer.commit()


def static_member_comes_back(servers: str, member_named: Callable[[str], Consumer]) -> None:
    """Check that a static member gets its partitions back, and that the others get no notification.

    `member_named` makes a member with the given group.instance.id.
    """
    topic = new_topic(servers, 2)
    other = Reader(member_named("other"), topic)
    wait_for(lambda: other.events == [("assigned", 2)])
    with member_named("mine") as mine:
        mine.subscribe([topic])
        wait_for(lambda: mine.poll(0.1) == [] and len(mine.assignment()) == 1)
    count = len(other.events)
    with member_named("mine") as again:
        again.subscribe([topic])
        wait_for(lambda: again.poll(0.1) == [] and len(again.assignment()) == 1)
        assert len(other.events) == count
    other.stop()
