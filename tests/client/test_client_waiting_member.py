"""Consumers wait for their committed offsets, because an open transaction may still change them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from support.groups.members import fill, member, wait_for
from support.topics import new_topic, requests

from oncelog import Consumer, Producer, TopicPartition
from oncelog.aio import Consumer as AsyncConsumer
from oncelog.errors import TimedOut, UnstableOffsetCommit
from oncelog.testing.proxy import Proxy
from oncelog.types import OffsetAndMetadata


def polling(is_so: Callable[[], bool], *consumers: Consumer) -> Callable[[], bool]:
    def step() -> bool:
        for consumer in consumers:
            consumer.poll(0.05)
        return is_so()

    return step


def test_a_member_that_waits_for_its_positions_stays_in_its_group(ours: str, group: str) -> None:
    """Regression: the waiting member sent no heartbeat, so the group removed it again and again."""
    topic = new_topic(ours, 2)
    fill(ours, topic, 0, 20, 2)
    with (
        Proxy(ours) as proxy,
        Producer({"bootstrap.servers": ours, "transactional.id": group}) as producer,
        member(proxy.bootstrap_servers, group) as waiting,
        member(ours, group) as other,
    ):

        def count(api: str) -> int:
            return len(requests(proxy, api))

        producer.init_transactions()
        producer.begin_transaction()
        producer.send_offsets_to_transaction({TopicPartition(topic, 0): 4}, group)
        waiting.subscribe(topic)
        wait_for(polling(lambda: count("Heartbeat") >= 2, waiting))
        assert not waiting.assignment()
        # The member also joins the next rebalance without delay.
        joined = count("JoinGroup")
        other.subscribe(topic)
        wait_for(polling(lambda: count("JoinGroup") > joined, waiting, other))
        producer.commit_transaction()
        wait_for(polling(lambda: len(waiting.assignment()) == len(other.assignment()) == 1, waiting, other))


def test_assigned_partitions_wait_for_an_open_transaction(ours: str, group: str) -> None:
    """Regression: request.timeout.ms after the first poll, each further poll raised TimedOut."""
    tp = TopicPartition(new_topic(ours), 0)
    fill(ours, tp.topic, 0, 1, 1)

    async def run() -> None:
        settings = {"bootstrap.servers": ours, "group.id": group, "auto.offset.reset": "earliest"}
        async with AsyncConsumer(settings) as consumer:
            session, count = await consumer._session(), 0
            committed = session.committed

            async def held_back(
                partitions: Collection[TopicPartition],
            ) -> dict[TopicPartition, OffsetAndMetadata]:
                nonlocal count
                count += 1
                if count <= 3:  # the real `committed` also raises TimedOut when its time is over
                    raise TimedOut("no answer in time") from UnstableOffsetCommit()
                return await committed(partitions)

            session.committed = held_back  # type: ignore[method-assign]
            consumer.assign(tp)
            assert len(await consumer.poll(60)) == 1
            assert count == 4

    asyncio.run(run())
