"""Memberships that last, end or are fenced, over sockets, with both group protocols."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.groups.members import SECONDS, Reader, fill, take, wait_for
from support.groups.members import member as any_member
from support.topics import new_topic
from support.wait import JumpingClock, until

from oncelog import Broker, Consumer, Producer, TopicPartition
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.errors import FencedInstanceId, MisuseError, UnreleasedInstanceId
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy import Proxy, Rule

QUICK = {
    "offsets.topic.num.partitions": 4,
    "group.consumer.heartbeat.interval.ms": 100,
    "group.consumer.session.timeout.ms": 2_000,
}
LONG_SESSION_MS = 60_000
PROTOCOLS = ("classic", "consumer")
ONE = {"group_instance_id": "one"}


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return QUICK


def heartbeats(broker: Broker) -> float:
    metrics = broker.metrics()
    return sum(metrics.get(f"requests.{api}", 0) for api in ("Heartbeat", "ConsumerGroupHeartbeat"))


def is_past(broker: Broker, count: float) -> bool:
    """Return True if more than max.poll.interval.ms has passed since the broker had counted `count`
    heartbeats.

    A member sends a heartbeat every 100 ms, so five more of them are enough.
    """
    return heartbeats(broker) > count + 5


def member(servers: str, group: str, protocol: str = "classic", **settings: Any) -> Consumer:
    return any_member(servers, group, group_protocol=protocol, **settings)


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_the_second_of_two_members_with_one_instance_id_stays(
    servers: str, group: str, strategy: str
) -> None:
    """The second member fences the first, and then the group has no further rebalance.

    The fenced member loses its partitions once, and each of its polls raises.
    """
    topic = new_topic(servers, 2)
    fill(servers, topic, 0, 4, 2)
    events: list[str] = []
    settings = {**ONE, "partition_assignment_strategy": strategy}
    with member(servers, group, **settings) as first:
        first.subscribe(
            topic,
            on_assigned=lambda _: events.append("assigned"),
            on_revoked=lambda _: events.append("revoked"),
            on_lost=lambda share: events.append(f"lost {len(share)}"),
        )
        take(first, 4)
        second = Reader(member(servers, group, **settings), topic)
        with pytest.raises(FencedInstanceId, match=r"has taken over group\.instance\.id='one'"):
            wait_for(lambda: first.poll(0.1) is None)
        assert events == ["assigned", "lost 2"]
        for _ in range(3):
            with pytest.raises(FencedInstanceId):
                first.poll(0.5)
        with pytest.raises(FencedInstanceId):
            first.commit({TopicPartition(topic, 0): 1})
        fill(servers, topic, 4, 4, 2)
        wait_for(lambda: set(range(4, 8)) <= set(second.values))
        assert second.events == [("assigned", 2)], "the fenced one did not come back"
        second.stop()
        first.unsubscribe()
        first.subscribe(topic)  # the instance id is free now, so subscribing again works
        wait_for(lambda: first.poll(0.1) == [] and len(first.assignment()) == 2)


def test_an_instance_id_in_use_raises_until_it_is_free(ours: str, group: str) -> None:
    """With group.protocol=consumer, the coordinator refuses a second member with the same
    group.instance.id.
    """
    topic = new_topic(ours, 2)
    first = Reader(member(ours, group, "consumer", **ONE), topic)
    wait_for(lambda: first.events == [("assigned", 2)])
    with member(ours, group, "consumer", **ONE) as second:
        second.subscribe(topic)
        for _ in range(2):
            with pytest.raises(UnreleasedInstanceId):
                wait_for(lambda: second.poll(0.1) is None)
        first.stop()

        def has_it() -> bool:
            try:
                second.poll(0.1)
            except UnreleasedInstanceId:
                return False
            return len(second.assignment()) == 2

        wait_for(has_it)
    assert first.events == [("assigned", 2), ("revoked", 2)], "revoked as it closed"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_poll_longer_than_max_poll_interval_keeps_its_partitions(
    broker: Broker, ours: str, group: str, protocol: str
) -> None:
    """The application pauses all partitions when it gets them, so the poll fetches nothing and only waits."""
    topic = new_topic(ours, 2)
    fill(ours, topic, 0, 2, 2)
    events: list[str] = []
    with member(ours, group, protocol, max_poll_interval_ms=300) as consumer:

        def assigned(share: list[TopicPartition]) -> None:
            events.append("assigned")
            consumer.pause(*share)

        consumer.subscribe(topic, on_assigned=assigned, on_lost=lambda _: events.append("lost"))
        with ThreadPoolExecutor(1) as thread:
            polling = thread.submit(consumer.poll, 3_600)
            wait_for(lambda: events)
            count = heartbeats(broker)
            wait_for(lambda: is_past(broker, count))
            assert events == ["assigned"] and not polling.done()
            assert len(consumer.paused()) == 2
            consumer.close()
            with pytest.raises(MisuseError, match="closed"):
                polling.result(SECONDS)
        assert events == ["assigned"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_spare_member_in_one_long_poll_rebalances_nobody(
    broker: Broker, ours: str, group: str, protocol: str
) -> None:
    topic = new_topic(ours)
    settings = {} if protocol == "consumer" else {"partition_assignment_strategy": "sticky"}
    with (
        member(ours, group, protocol, max_poll_interval_ms=200, **settings) as spare,
        member(ours, group, protocol, **settings) as one,
        ThreadPoolExecutor(1) as thread,
    ):
        counts: list[int] = []
        one.subscribe(topic, on_assigned=lambda share: counts.append(len(share)))
        wait_for(lambda: one.poll(0.05) == [] and counts == [1])
        spare.subscribe(topic)
        waiting = thread.submit(spare.poll, 3_600)
        wait_for(lambda: one.poll(0.05) == [] and spare._async._group.member.generation_id >= 0)
        count = heartbeats(broker)
        # Wait for more heartbeats than `is_past` does, because two members send them.
        wait_for(lambda: one.poll(0.05) == [] and heartbeats(broker) > count + 12)
        assert sum(counts) <= 2, "one rebalance when the spare one joins, and no further"
        assert spare.assignment() == [] and not waiting.done()
        spare.close()
        with pytest.raises(MisuseError, match="closed"):
            waiting.result(SECONDS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_callback_that_hangs_is_not_a_poll_that_waits(ours: str, group: str, protocol: str) -> None:
    topic = new_topic(ours, 2)
    goes_on, is_assigned = threading.Event(), threading.Event()

    def hang(_: list[TopicPartition]) -> None:
        is_assigned.set()
        assert goes_on.wait(SECONDS)

    with member(ours, group, protocol, max_poll_interval_ms=300) as first:
        first.subscribe(topic, on_assigned=hang)
        # On a busy machine, one poll may end before partitions are assigned.
        poll = partial(wait_for, lambda: first.poll(0.1) is None or is_assigned.is_set())
        polling = threading.Thread(target=poll)
        polling.start()
        assert is_assigned.wait(SECONDS)
        second = Reader(member(ours, group, protocol), topic)
        wait_for(lambda: ("assigned", 2) in second.events)
        goes_on.set()
        polling.join(SECONDS)
        second.stop()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_asyncio_member_is_alive_while_its_poll_waits_and_no_longer(
    broker: Broker, ours: str, group: str, protocol: str
) -> None:
    """A poll that was cancelled does not count as a sign of life of the application."""
    topic = new_topic(ours, 2)
    config = {
        "bootstrap.servers": ours,
        "group.id": group,
        "group.protocol": protocol,
        "max.poll.interval.ms": 300,
        **({"heartbeat.interval.ms": 100} if protocol == "classic" else {}),
    }
    lost: list[int] = []

    async def work() -> None:
        async with AsyncConsumer(config) as consumer:
            consumer.subscribe([topic], on_lost=lambda share: lost.append(len(share)))
            waiting = asyncio.create_task(consumer.poll(3600))
            await until(lambda: len(consumer.assignment()) == 2)
            count = heartbeats(broker)
            await until(lambda: is_past(broker, count))
            assert lost == []
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            other = await asyncio.to_thread(lambda: Reader(member(ours, group, protocol), topic))
            await asyncio.to_thread(wait_for, lambda: ("assigned", 2) in other.events)
            await consumer.poll(0.1)
            assert lost == [2]
            await asyncio.to_thread(other.stop)

    asyncio.run(work())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_polls_return_records_while_the_coordinator_hangs(
    tmp_path: Path, group: str, protocol: str, clock: JumpingClock
) -> None:
    """A commit without a response does not delay poll(), and delays close() only for a limited time."""
    # The session must outlive the pause: a broker that continues may check for expired sessions before it
    # reads heartbeats.
    settings = QUICK | {"group.consumer.session.timeout.ms": LONG_SESSION_MS}
    session = {"session_timeout_ms": LONG_SESSION_MS} if protocol == "classic" else {}
    with BrokerProcess(tmp_path / "data", settings=settings) as broker:
        topic = new_topic(broker.bootstrap_servers)
        fill(broker.bootstrap_servers, topic, 0, 6, 1)
        consumer = member(
            broker.bootstrap_servers,
            group,
            protocol,
            **session,
            auto_commit_interval_ms=1,
            max_poll_records=1,
            request_timeout_ms=600_000,
        )
        consumer.subscribe(topic)
        values_read = take(consumer, 1)
        os.kill(broker.pid, signal.SIGSTOP)
        try:

            def poll_and_close() -> None:
                for _ in range(5):
                    values_read.extend(int(record.value or b"") for record in consumer.poll(0.2))
                consumer.close()

            polling = threading.Thread(target=poll_and_close, daemon=True)
            polling.start()
            # the jumps add up to less than request.timeout.ms
            clock.jump_until(lambda: not polling.is_alive(), 0.2)
            assert values_read == list(range(6)), "what was fetched is handed out"
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        with member(broker.bootstrap_servers, group, protocol) as successor:
            tp = TopicPartition(topic, 0)
            # the broker stores the pending commit after it continues
            wait_for(lambda: successor.committed([tp])[tp] is not None)


@pytest.mark.parametrize("protocol", ["range", "cooperative-sticky", "consumer"])
def test_the_next_owner_begins_after_the_last_delivered_record(
    servers: str, group: str, protocol: str
) -> None:
    """The loop stops in the middle of a batch. The commit before the revocation must include only the
    delivered records.
    """
    topic = new_topic(servers, 2)
    fill(servers, topic, 0, 40, 2)
    settings: dict[str, Any] = {"auto_commit_interval_ms": 3_600_000}
    if protocol != "consumer":
        settings["partition_assignment_strategy"] = protocol
    kind = "consumer" if protocol == "consumer" else "classic"
    values: list[int] = []
    with member(servers, group, kind, **settings) as one, member(servers, group, kind, **settings) as two:
        one.subscribe(topic)
        for record in one:
            values.append(int(record.value or b""))
            if len(values) == 7:
                break
        two.subscribe(topic)

        def is_all_read() -> bool:
            is_shared = len(one.assignment()) == len(two.assignment()) == 1
            for consumer in (one, two):
                values.extend(int(record.value or b"") for record in consumer.poll(0.1, max_records=1))
            return is_shared and len(set(values)) == 40

        wait_for(is_all_read)
    assert sorted(values) == list(range(40)), "nothing is lost, and nothing read twice"


def test_a_static_member_whose_join_was_not_answered_joins_again(ours: str, group: str) -> None:
    """Regression: the coordinator knew the member, and refused its next join until its session had ended."""
    topic = new_topic(ours)
    with Producer(bootstrap_servers=ours) as producer, Proxy(ours) as proxy:
        producer.send(topic, b"x").result(60)
        proxy.add(Rule(action="cut", api="ConsumerGroupHeartbeat", direction="response", nth=1))
        with member(proxy.bootstrap_servers, group, "consumer", **ONE) as consumer:
            consumer.subscribe(topic)
            wait_for(lambda: consumer.poll(0.1))
