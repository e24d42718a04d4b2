"""Our consumer in groups, on our broker and on Apache Kafka: assignment, rebalances, commits,
transactions.
"""

from __future__ import annotations

import asyncio

import confluent_kafka
import pytest
from support.groups.members import (
    Reader,
    fill,
    idle_member_is_left_behind,
    member,
    static_member_comes_back,
    take,
    transform_thirty,
    wait_for,
)
from support.topics import new_topic
from support.wait import attempts

from oncelog import Consumer, TopicPartition
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.errors import BrokerError, ConfigError, MisuseError


def test_one_member_reads_all_and_resumes_at_its_commit(servers: str, group: str) -> None:
    topic = new_topic(servers, 2)
    fill(servers, topic, 0, 10, 2)
    with member(servers, group, enable_auto_commit=False) as consumer:
        consumer.subscribe(topic)
        assert sorted(take(consumer, 10)) == list(range(10))
        assert len(consumer.assignment()) == 2
        consumer.commit()
        committed = consumer.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)])
        assert [position.offset for position in committed.values() if position] == [5, 5]
        identity = consumer.group_metadata()
        assert identity.generation_id >= 1
        assert identity.member_id
    fill(servers, topic, 10, 4, 2)
    with member(servers, group) as successor:
        successor.subscribe([topic])
        assert sorted(take(successor, 4)) == [10, 11, 12, 13]


def test_positions_are_committed_automatically(servers: str, group: str) -> None:
    """Only records that poll has returned are committed."""
    topic = new_topic(servers)
    fill(servers, topic, 0, 10, 1)
    tp = TopicPartition(topic, 0)
    with member(servers, group, auto_commit_interval_ms=50, max_poll_records=3) as consumer:
        consumer.subscribe([topic])
        assert take(consumer, 1) == [0, 1, 2]
        for _ in attempts():
            count = len(consumer.poll(0.2))
            committed = consumer.committed([tp])[tp]
            if committed is not None and committed.offset:  # position 0 may be committed before any record
                break
        assert committed.offset % 3 == 0 or committed.offset == 10
        position = consumer.position(tp)
        assert position == committed.offset + count, "only what an earlier poll had returned"
    with member(servers, group) as last:
        found = last.committed([tp])[tp]
        assert found is not None
        assert found.offset == position, "close() committed what the last poll had returned"


@pytest.mark.parametrize("strategy", ["range", "roundrobin"])
def test_members_share_partitions_and_take_over_those_of_others(
    servers: str, group: str, strategy: str
) -> None:
    """No record is lost. Because on_revoked commits, no record is read twice either."""
    topic = new_topic(servers, 4)
    settings = {"partition_assignment_strategy": strategy, "enable_auto_commit": False}
    first = Reader(member(servers, group, **settings), topic)
    wait_for(lambda: first.events == [("assigned", 4)])
    fill(servers, topic, 0, 40, 4)
    wait_for(lambda: len(first.values) == 40)
    second = Reader(member(servers, group, **settings), topic)
    wait_for(lambda: second.events[-1:] == [("assigned", 2)] == first.events[-1:])
    fill(servers, topic, 40, 40, 4)
    wait_for(lambda: len(first.values) + len(second.values) == 80)
    assert second.values
    second.stop()
    wait_for(lambda: first.events[-1] == ("assigned", 4))
    fill(servers, topic, 80, 40, 4)
    wait_for(lambda: len(first.values) + len(second.values) >= 120)
    first.stop()
    assert first.events[:3] == [("assigned", 4), ("revoked", 4), ("assigned", 2)]
    assert set(first.values) | set(second.values) == set(range(120))


def test_a_group_of_ours_and_of_librdkafka(servers: str, group: str) -> None:
    topic = new_topic(servers, 4)
    ours = Reader(member(servers, group), topic)
    wait_for(lambda: ours.events == [("assigned", 4)])
    other = confluent_kafka.Consumer(
        {"bootstrap.servers": servers, "group.id": group, "partition.assignment.strategy": "range",
         "auto.offset.reset": "earliest", "heartbeat.interval.ms": 200, "session.timeout.ms": 6_000}
    )  # fmt: skip
    other.subscribe([topic])

    def both_have_two() -> bool:
        other.poll(0.05)
        return len(other.assignment()) == 2 and ours.events[-1] == ("assigned", 2)

    wait_for(both_have_two)
    other.close()
    wait_for(lambda: ours.events[-1] == ("assigned", 4))
    ours.stop()


@pytest.mark.behaviour("T7")
def test_a_member_that_does_not_poll_is_left_behind(servers: str, group: str) -> None:
    idle_member_is_left_behind(servers, lambda **settings: member(servers, group, **settings))


@pytest.mark.behaviour("T7")
def test_transactions_transform_every_record_once(servers: str, group: str) -> None:
    with member(servers, group, enable_auto_commit=False, max_poll_records=4) as consumer:
        transform_thirty(servers, consumer)


def test_a_static_member_comes_back_without_a_rebalance(servers: str, group: str) -> None:
    static_member_comes_back(servers, lambda name: member(servers, group, group_instance_id=name))


def test_groups_need_an_id_and_an_existing_assignor(servers: str, group: str) -> None:
    topic = new_topic(servers)
    with Consumer({"bootstrap.servers": servers}) as nobody:
        with pytest.raises(MisuseError, match=r"group\.id is not set"):
            nobody.subscribe(topic)
        with pytest.raises(MisuseError, match=r"group\.id is not set"):
            nobody.commit({TopicPartition(topic, 0): 1})
    with member(servers, group, partition_assignment_strategy="odd") as odd:
        odd.subscribe(topic)
        with pytest.raises(ConfigError, match="range, roundrobin, sticky, cooperative-sticky"):
            odd.poll(1)
    with member(servers, group) as by_hand:
        by_hand.assign([TopicPartition(topic, 0)])
        by_hand.commit({TopicPartition(topic, 0): 7})
        found = by_hand.committed([TopicPartition(topic, 0)])[TopicPartition(topic, 0)]
        assert found is not None
        assert found.offset == 7
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            by_hand.commit({TopicPartition(topic, 9): 1})
    with member(servers, group) as subscribed:
        subscribed.subscribe(topic)
        with pytest.raises(MisuseError, match=r"unsubscribe\(\)"):
            subscribed.assign([TopicPartition(topic, 0)])
        subscribed.unsubscribe()
        subscribed.assign([TopicPartition(topic, 0)])


def test_an_asyncio_member_reads_its_partitions(servers: str, group: str) -> None:
    topic = new_topic(servers, 2)
    fill(servers, topic, 0, 6, 2)
    events: list[str] = []

    async def assigned(share: list[TopicPartition]) -> None:
        events.append(f"assigned {len(share)}")

    async def work() -> list[int]:
        config = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
        async with AsyncConsumer(config) as consumer:
            consumer.subscribe([topic], on_assigned=assigned)
            values: list[int] = []
            for _ in attempts():
                if len(values) == 6:
                    break
                values += [int(record.value or b"") for record in await consumer.poll(0.2)]
            await consumer.commit()
            return values

    assert sorted(asyncio.run(work())) == list(range(6))
    assert events == ["assigned 2"]
