"""A wall clock that was ahead while the broker ran, and was set right."""

from __future__ import annotations

import pytest
from support.groups.node import GroupNode
from support.wait import pass_time, set_wall_clock, wait_until

from oncelog import Admin, Broker, Consumer, NewTopic, Producer, TopicPartition
from oncelog.broker.dispatch import tick

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


def test_compaction_compares_records_with_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    place = GroupNode()
    rounds: list[int] = []
    monkeypatch.setattr(place.node.log_manager, "compact", rounds.append)
    place.node.clock_lead_ms = lambda: 2 * HOUR_MS
    tick(place.node, place.now_ms + HOUR_MS)
    assert rounds == [place.now_ms - HOUR_MS]
