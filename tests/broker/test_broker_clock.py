"""A wall clock that was ahead while the broker was running, and was then corrected."""

from __future__ import annotations

import pytest
from support.broker import batch
from support.groups.node import GroupNode, commit, create
from support.wait import pass_time, set_wall_clock, wait_until

from oncelog import Admin, Broker, Consumer, NewTopic, Producer, TopicPartition
from oncelog.broker.dispatch import tick
from oncelog.errors import InvalidTimestamp
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.entry import TransactionState
from oncelog.types import Origin

HOUR_MS = 3_600_000
KEPT, SHORT = TopicPartition("kept", 0), TopicPartition("short", 0)


def test_a_clock_that_was_ahead_deletes_nothing_once_it_is_right() -> None:
    with Broker() as broker:
        config = {"bootstrap.servers": broker.bootstrap_servers}
        topics = [
            NewTopic(KEPT.topic, 1, configs={"retention.ms": str(HOUR_MS)}),
            NewTopic(SHORT.topic, 1, configs={"retention.ms": "1"}),
        ]
        with Admin(config) as admin, Producer(config) as producer, Consumer(config) as consumer:
            for topic in topics:
                admin.create_topics([topic])
            assert broker._running is not None
            set_wall_clock(broker._running.clock, 2 * HOUR_MS)
            set_wall_clock(broker._running.clock, -2 * HOUR_MS)
            for tp in (KEPT, SHORT):
                producer.send(tp.topic, b"v", partition=0, timestamp_ms=None if tp is KEPT else 1).result(60)
            pass_time(broker, HOUR_MS // 2)
            wait_until(lambda: consumer.beginning_offsets([SHORT]) == {SHORT: 1})
            background = broker._running.node.log_manager.background
            wait_until(lambda: not background)
            assert consumer.beginning_offsets([KEPT]) == {KEPT: 0}


def test_a_clock_that_was_ahead_refuses_no_record_once_it_is_right() -> None:
    """Regression: until a restart, each record was refused as too old for message.timestamp.before.max.ms."""
    with Broker() as broker:
        config = {"bootstrap.servers": broker.bootstrap_servers}
        # A compacted topic takes another code path of a Produce request, so both kinds of topic are tested.
        policies = {"plain": {}, "compacted": {"cleanup.policy": "compact"}}
        limits = {"message.timestamp.before.max.ms": str(HOUR_MS)}
        with Admin(config) as admin, Producer(config) as producer:
            for topic, policy in policies.items():
                admin.create_topics([NewTopic(topic, 1, configs=limits | policy)])
            assert broker._running is not None
            set_wall_clock(broker._running.clock, 48 * HOUR_MS)
            set_wall_clock(broker._running.clock, -48 * HOUR_MS)
            now_ms = broker._running.node.wall_ms(broker._running.clock.now_ms())
            for topic in policies:
                assert producer.send(topic, b"v", b"k").result(60).offset == 0
                for wrong_ms in (now_ms - 2 * HOUR_MS, now_ms + 2 * HOUR_MS + 48 * HOUR_MS):
                    with pytest.raises(InvalidTimestamp):
                        producer.send(topic, b"v", b"k", timestamp_ms=wrong_ms).result(60)


def test_compaction_compares_records_with_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    place = GroupNode()
    rounds: list[int] = []
    monkeypatch.setattr(place.node.log_manager, "compact", rounds.append)
    place.node.clock_lead_ms = lambda: 2 * HOUR_MS
    tick(place.node, place.now_ms + HOUR_MS)
    assert rounds == [place.now_ms - HOUR_MS]


def test_a_clock_that_was_ahead_makes_nothing_expire_once_it_is_right() -> None:
    place = GroupNode()
    node, now_ms = place.node, place.now_ms
    place.ask(create("t"), 5)
    place.ask(commit("g", 7), 7)
    node.transactions.init("x", None, 60_000, now_ms)
    _, partition = node.topics.partition(TopicPartition("t", 0))
    numbered = batch(b"v", pid=1, sequence=0, timestamp_ms=now_ms)
    partition.append(memoryview(numbered), origin=Origin.CLIENT, now_ms=now_ms)

    def left() -> tuple[bool, bool, bool]:
        entry = node.transactions.get("x")
        return node.groups.offsets.has("g"), entry is not None, partition.producer(1) is not None

    # The wall clock is ahead by 30 days and then corrected. The broker's own clock keeps the 30 days, because
    # it never goes back.
    ahead_ms = 30 * 24 * HOUR_MS
    node.clock_lead_ms = lambda: ahead_ms
    for hour in range(1, 4):
        tick(node, now_ms + ahead_ms + hour * HOUR_MS)
    assert left() == (True, True, True)
    node.clock_lead_ms = lambda: 0
    for hour in range(4, 7):
        tick(node, now_ms + ahead_ms + hour * HOUR_MS)
    assert left() == (False, False, False)


def test_a_stop_after_a_clock_was_ahead_makes_no_producer_expire() -> None:
    """Regression: a clean stop forgot idle producers, so a retried batch was stored twice."""
    place, tp = GroupNode(), TopicPartition("t", 0)
    right_ms = place.now_ms
    place.ask(create("t"), 5)

    def append() -> bool:
        """Append the same batch, and return True if the partition recognised it."""
        numbered = memoryview(batch(b"v", pid=1, sequence=0, timestamp_ms=right_ms))
        _, partition = place.node.topics.partition(tp)
        return partition.append(numbered, origin=Origin.CLIENT, now_ms=right_ms).is_duplicate

    assert not append()
    ahead_ms = 30 * 24 * HOUR_MS
    place.node.clock_lead_ms = lambda: ahead_ms
    place.now_ms = right_ms + ahead_ms
    place.node.close(place.now_ms)
    place.now_ms = right_ms
    place.start()
    assert append()


def test_a_transaction_that_began_while_the_clock_was_ahead_times_out_after_a_restart() -> None:
    """Regression: the transaction blocked read_committed readers until the corrected clock reached its start
    time.
    """
    place = GroupNode()
    right_ms, t0 = place.now_ms, TopicPartition("t", 0)
    place.ask(create("t"), 5)
    place.now_ms += 30 * 24 * HOUR_MS
    entry = place.node.transactions.init("x", None, 60_000, place.now_ms).entry
    producer = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    place.node.transactions.add_partitions("x", producer, [t0], place.now_ms)
    place.now_ms = right_ms
    place.restart()
    tick(place.node, right_ms + 50_000)
    begun = place.node.transactions.get("x")
    assert begun is not None and begun.state is TransactionState.ONGOING
    tick(place.node, right_ms + 90_000)
    ended = place.node.transactions.get("x")
    assert ended is not None and ended.state is TransactionState.COMPLETE_ABORT
