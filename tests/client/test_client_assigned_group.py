"""Manually assigned partitions with a group.id, on our broker and on Apache Kafka.

The expected behaviour was measured with Java's consumer of Kafka 4.3: it starts at the committed offset and
commits automatically.
"""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.groups.members import fill, member, take, wait_for
from support.topics import new_topic

from oncelog import Admin, Consumer, Producer, TopicPartition
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.errors import MisuseError
from oncelog.types import ConsumerGroupMetadata


def committed(servers: str, group: str, tp: TopicPartition) -> int | None:
    with Admin({"bootstrap.servers": servers}) as admin:
        committed_offset = admin.group_offsets(group).get(tp)
        return None if committed_offset is None else committed_offset.offset


def commit(servers: str, group: str, tp: TopicPartition, offset: int) -> None:
    with member(servers, group, enable_auto_commit=False) as consumer:
        consumer.commit({tp: offset})


@pytest.fixture
def topic(servers: str) -> str:
    """Return a topic with two partitions of ten records each; record i is in partition i % 2."""
    name = new_topic(servers, 2)
    fill(servers, name, 0, 20, 2)
    return name


def test_assigned_partitions_begin_at_the_committed_offset(servers: str, group: str, topic: str) -> None:
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    commit(servers, group, zero, 7)
    with member(servers, group, enable_auto_commit=False) as consumer:
        consumer.assign([zero])
        assert consumer.position(zero) == 7
        assert take(consumer, 3) == [14, 16, 18]
        consumer.assign([zero, one])
        assert consumer.position(zero) == 10, "what was assigned before keeps its position"
        assert consumer.position(one) == 0, "nothing is committed there: auto.offset.reset"
        consumer.assign([one])
        consumer.assign([zero, one])
        assert consumer.position(zero) == 7, "what is assigned again begins at the committed offset again"


def test_a_seek_is_worth_more_than_a_committed_offset(servers: str, group: str, topic: str) -> None:
    tp = TopicPartition(topic, 0)
    commit(servers, group, tp, 7)
    with member(servers, group, enable_auto_commit=False) as consumer:
        consumer.assign([tp])
        consumer.seek(tp, 9)
        assert take(consumer, 1) == [18]
        consumer.assign([])
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        assert consumer.position(tp) == 0


def test_without_a_reset_policy_only_a_committed_offset_is_a_position(
    servers: str, group: str, topic: str
) -> None:
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    commit(servers, group, zero, 9)
    with member(servers, group, auto_offset_reset="none", enable_auto_commit=False) as consumer:
        consumer.assign([zero])
        assert take(consumer, 1) == [18]
        consumer.assign([one])
        with pytest.raises(MisuseError, match="has no position"):
            take(consumer, 1)


def test_a_committed_offset_that_does_not_exist_is_reset(servers: str, group: str, topic: str) -> None:
    tp = TopicPartition(topic, 0)
    commit(servers, group, tp, 4_000)
    with member(servers, group, enable_auto_commit=False) as consumer:
        consumer.assign([tp])
        assert take(consumer, 10)[0] == 0


def test_positions_of_assigned_partitions_are_committed_by_close(
    servers: str, group: str, topic: str
) -> None:
    tp = TopicPartition(topic, 0)
    with member(servers, group, max_poll_records=4) as consumer:
        consumer.assign([tp])
        assert take(consumer, 1) == [0, 2, 4, 6]
    assert committed(servers, group, tp) == 4
    with member(servers, group, max_poll_records=4) as successor:
        successor.assign([tp])
        assert take(successor, 1) == [8, 10, 12, 14]
        successor.unsubscribe()
        assert committed(servers, group, tp) == 8


def test_a_record_at_which_a_loop_over_assigned_partitions_ended_is_not_committed(
    servers: str, group: str, topic: str
) -> None:
    tp = TopicPartition(topic, 0)
    with member(servers, group) as consumer:
        consumer.assign([tp])
        for record in consumer:
            if record.offset == 3:
                break
    assert committed(servers, group, tp) == 3


def test_positions_of_assigned_partitions_are_committed_by_time(servers: str, group: str, topic: str) -> None:
    tp = TopicPartition(topic, 0)
    with member(servers, group, max_poll_records=4, auto_commit_interval_ms=20) as consumer:
        consumer.assign([tp])
        assert take(consumer, 1) == [0, 2, 4, 6]
        consumer.pause(tp)

        def is_committed() -> bool:
            consumer.poll(0.05)
            return committed(servers, group, tp) == 4

        wait_for(is_committed)


def test_partitions_no_longer_assigned_are_committed_without_the_record_in_work(
    servers: str, group: str, topic: str
) -> None:
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with member(servers, group) as consumer:
        consumer.assign([zero])
        for record in consumer:
            if record.offset == 5:
                consumer.assign([one])
                break
        wait_for(lambda: committed(servers, group, zero) == 5)


def test_nothing_is_committed_without_automatic_commits(servers: str, group: str, topic: str) -> None:
    tp = TopicPartition(topic, 0)
    with member(servers, group, enable_auto_commit=False, auto_commit_interval_ms=0) as consumer:
        consumer.assign([tp])
        take(consumer, 10)
        consumer.poll(0)
        consumer.assign([TopicPartition(topic, 1)])
    assert committed(servers, group, tp) is None


def test_without_a_group_assigned_partitions_need_no_coordinator(servers: str, topic: str) -> None:
    with Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        assert take(consumer, 10)[0] == 0


def test_commits_beside_members_are_refused_and_logged(
    servers: str, group: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    tp = TopicPartition(topic, 0)
    with (
        member(servers, group, enable_auto_commit=False) as owner,
        member(servers, group, auto_commit_interval_ms=20, max_poll_records=1) as consumer,
    ):
        owner.subscribe(topic)
        take(owner, 1)
        consumer.assign([tp])
        with caplog.at_level(logging.WARNING, "oncelog.client"):
            assert take(consumer, 1) == [0]
            consumer.pause(tp)

            def is_logged() -> bool:
                consumer.poll(0.05)
                return "UNKNOWN_MEMBER_ID" in caplog.text

            wait_for(is_logged)
        consumer.resume(tp)
        assert take(consumer, 1) == [2], "it goes on reading"


def test_a_subscription_to_no_topic_is_refused(ours: str, group: str) -> None:
    """If the consumer accepted it, it would stay in the group without taking part in rebalances. It would
    then read partitions that other members own.
    """
    topic = new_topic(ours)
    with member(ours, group) as consumer:
        consumer.subscribe(topic)
        while not consumer.assignment():
            consumer.poll(0.1)
        with pytest.raises(MisuseError, match="unsubscribe"):
            consumer.subscribe([])
        assert consumer.assignment(), "it stays subscribed"
        consumer.unsubscribe()
        with pytest.raises(MisuseError, match="unsubscribe"):
            consumer.subscribe(())


def test_a_subscription_beside_assigned_partitions_is_refused(servers: str, group: str, topic: str) -> None:
    tp = TopicPartition(topic, 0)
    with member(servers, group, max_poll_records=4) as consumer:
        consumer.assign(tp)
        assert take(consumer, 1) == [0, 2, 4, 6]
        with pytest.raises(MisuseError, match="call unsubscribe"):
            consumer.subscribe(topic)
        assert committed(servers, group, tp) is None
        consumer.unsubscribe()
        assert committed(servers, group, tp) == 4
        consumer.subscribe(topic)
        assert 8 in take(consumer, 16)


def test_the_asyncio_consumer_does_the_same(servers: str, group: str, topic: str) -> None:
    tp = TopicPartition(topic, 0)
    settings = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}

    async def read() -> list[int]:
        async with AsyncConsumer({**settings, "max.poll.records": 4}) as consumer:
            consumer.assign([tp])
            while not (records := await consumer.poll(1)):
                pass
            return [record.offset for record in records]

    assert asyncio.run(read()) == [0, 1, 2, 3]
    assert asyncio.run(read()) == [4, 5, 6, 7]


@pytest.mark.parametrize("then", ["close", "assign", "commit", "commit of both"])
def test_partitions_no_longer_assigned_are_committed_before_a_close(ours: str, group: str, then: str) -> None:
    """Regression: the call after the new assignment cancelled the commit before it was sent, so the records
    were read twice.
    """
    topic = new_topic(ours, 2)
    fill(ours, topic, 0, 20, 2)
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)

    async def run() -> None:
        settings = {"bootstrap.servers": ours, "group.id": group, "auto.offset.reset": "earliest"}
        async with AsyncConsumer({**settings, "max.poll.records": 4}) as consumer:
            consumer.assign([zero])
            while not await consumer.poll(1):
                pass
            consumer.assign([one])
            if then == "assign":
                consumer.seek(one, 3)
                consumer.assign([])
            elif then == "commit":
                await consumer.commit({one: 3})
            elif then == "commit of both":
                await consumer.commit({zero: 2, one: 3})

    asyncio.run(run())
    assert committed(ours, group, zero) == (2 if then == "commit of both" else 4)
    assert committed(ours, group, one) == (None if then == "close" else 3)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_partitions_no_longer_assigned_are_committed_before_a_subscription(
    servers: str, group: str, topic: str, protocol: str
) -> None:
    """Regression: the broker refused the commit, because the consumer was not a member yet. So records were
    read twice.
    """
    zero, other = TopicPartition(topic, 0), new_topic(servers)

    async def run() -> None:
        settings = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
        async with AsyncConsumer({**settings, "group.protocol": protocol}) as consumer:
            consumer.assign([zero])
            while await consumer.position(zero) < 10:
                await consumer.poll(1)
            consumer.assign([])
            consumer.subscribe(other)
            consumer.subscribe([other])
            while not consumer.assignment():
                await consumer.poll(1)

    asyncio.run(run())
    assert committed(servers, group, zero) == 10


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
@pytest.mark.parametrize("is_subscribed", [True, False])
def test_a_successor_waits_for_offsets_of_an_open_transaction_at_any_isolation_level(
    servers: str, group: str, topic: str, isolation: str, is_subscribed: bool
) -> None:
    """A successor that did not wait would process the records of the transaction again, and the output would
    have them twice.
    """
    tp = TopicPartition(topic, 0)
    with Producer({"bootstrap.servers": servers, "transactional.id": group}) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({tp: 9}, ConsumerGroupMetadata(group))
        with member(servers, group, isolation_level=isolation, enable_auto_commit=False) as successor:
            if is_subscribed:
                successor.subscribe(topic)
            else:
                successor.assign([tp])
            assert successor.poll(1) == []
            producer.commit_transaction()
            first: dict[int, int] = {}
            while tp.partition not in first:
                for record in successor.poll(1):
                    first.setdefault(record.partition, record.offset)
            assert first[tp.partition] == 9
