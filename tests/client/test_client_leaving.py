"""The commits and notifications of a consumer that leaves its group: by close, unsubscribe or an
exception.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.groups.members import fill, member, take, wait_for
from support.groups.session import PROTOCOLS, Coordinator, Member
from support.topics import new_topic
from support.wait import rest

from oncelog import Admin, Consumer, TopicPartition
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.group.membership import Change
from oncelog.wire.messages import ConsumerGroupHeartbeatRequest, OffsetCommitRequest


class Broken(Exception):
    """An error of the application."""


def stored(consumer: Consumer, tp: TopicPartition) -> int | None:
    committed = consumer.committed(tp)[tp]
    return None if committed is None else committed.offset


def test_a_record_at_which_a_loop_ended_is_not_committed_by_close(servers: str, group: str) -> None:
    """The application may have failed to process that record, so the consumer's successor must get it
    again.

    An explicit commit includes the record.
    """
    topic = new_topic(servers)
    tp = TopicPartition(topic, 0)
    fill(servers, topic, 0, 10, 1)
    with suppress(Broken), member(servers, group) as consumer:
        consumer.subscribe(topic, on_revoked=lambda _: consumer.commit())
        for record in consumer:
            if record.offset == 4:
                raise Broken
    with member(servers, group) as consumer:
        assert stored(consumer, tp) == 4
        consumer.subscribe(topic)
        for record in consumer:
            if record.offset == 6:
                consumer.commit()
                break
    with member(servers, group) as consumer:
        assert stored(consumer, tp) == 7, "close does not go back behind an explicit commit"
        consumer.subscribe(topic)
        for record in consumer:
            assert record.offset == 7
            break
        assert consumer.position(tp) == 8
        assert [record.offset for record in consumer.poll(10, max_records=1)] == [8], (
            "not twice in one process"
        )
    with member(servers, group) as consumer:
        assert stored(consumer, tp) == 9
        consumer.subscribe(topic)
        assert next(iter(consumer)).offset == 9
        consumer.commit({tp: 9})
    with member(servers, group, consumer_timeout_ms=3_000) as consumer:
        assert stored(consumer, tp) == 9
        consumer.subscribe(topic)
        assert [record.offset for record in consumer] == [9]
    with member(servers, group) as consumer:
        assert stored(consumer, tp) == 10, "a loop that came to its end has processed everything"


def test_an_asyncio_loop_that_fails_does_not_commit_its_record(servers: str, group: str) -> None:
    topic = new_topic(servers)
    tp = TopicPartition(topic, 0)
    fill(servers, topic, 0, 6, 1)
    config: dict[str, Any] = {
        "bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"
    }  # fmt: skip

    async def run() -> None:
        with suppress(Broken):
            async with AsyncConsumer(config) as consumer:
                consumer.subscribe(topic)
                async for record in consumer:
                    if record.offset == 3:
                        raise Broken
        async with AsyncConsumer(config) as consumer:
            committed = (await consumer.committed(tp))[tp]
            assert committed is not None
            assert committed.offset == 3

    asyncio.run(run())


@pytest.mark.parametrize("how", ["close", "unsubscribe"])
def test_leaving_tells_of_the_partitions_after_the_automatic_commit(
    servers: str, group: str, how: str
) -> None:
    topic = new_topic(servers, 2)
    fill(servers, topic, 0, 4, 2)
    events: list[tuple[str, int, int | None]] = []
    with member(servers, group) as consumer:
        tp = TopicPartition(topic, 0)
        consumer.subscribe(
            topic,
            on_revoked=lambda share: events.append(("revoked", len(share), stored(consumer, tp))),
            on_lost=lambda share: events.append(("lost", len(share), None)),
        )
        take(consumer, 4)
        if how == "unsubscribe":
            consumer.unsubscribe()
            assert events == [("revoked", 2, 2)]
            assert consumer.assignment() == []
    assert events == [("revoked", 2, 2)], "once"


@pytest.mark.parametrize("how", ["close", "unsubscribe"])
def test_a_callback_that_raises_does_not_keep_the_member_in_the_group(
    servers: str, group: str, how: str
) -> None:
    topic = new_topic(servers)
    fill(servers, topic, 0, 1, 1)

    def fail(_: list[TopicPartition]) -> None:
        raise Broken

    consumer = member(servers, group, session_timeout_ms=60_000, max_poll_interval_ms=60_000)
    consumer.subscribe(topic, on_revoked=fail)
    take(consumer, 1)
    with pytest.raises(Broken):
        getattr(consumer, how)()
    with member(servers, group) as successor:
        counts: list[int] = []
        successor.subscribe(topic, on_assigned=lambda share: counts.append(len(share)))
        wait_for(lambda: successor.poll(0.1) == [] and counts == [1])
    consumer.close()


def test_an_asyncio_consumer_tells_when_it_leaves(servers: str, group: str) -> None:
    topic = new_topic(servers)
    fill(servers, topic, 0, 1, 1)
    events: list[int] = []

    async def revoked(share: list[TopicPartition]) -> None:
        await asyncio.sleep(0)
        events.append(len(share))

    async def run() -> None:
        config = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
        async with AsyncConsumer(config) as consumer:
            consumer.subscribe(topic, on_revoked=revoked)
            assert len(await consumer.poll(30)) == 1
            await consumer.unsubscribe()
            assert events == [1]
            consumer.subscribe(topic, on_revoked=revoked)
            while not consumer.assignment():
                await consumer.poll(1)
        assert events == [1, 1]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["close", "unsubscribe"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_cancelled_close_keeps_no_member_in_the_group(
    servers: str, group: str, protocol: str, how: str
) -> None:
    """If heartbeats continued, the member would keep its partitions. If only they ended, the group would wait
    for the member's session to time out.
    """
    topic = new_topic(servers)
    fill(servers, topic, 0, 1, 1)

    async def run() -> None:
        config = {
            "bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest",
            "group.protocol": protocol,
        }  # fmt: skip
        consumer = AsyncConsumer(config)
        consumer.subscribe(topic)
        assert len(await consumer.poll(30)) == 1
        session: Any = consumer._group
        leaving = asyncio.create_task(getattr(consumer, how)())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert leaving.cancelled()
        assert session.protocol._heartbeats is None
        assert how == "close" or consumer.assignment() == []
        # This request uses the same connection as LeaveGroup, so its response comes after that of LeaveGroup.
        await session.committed([TopicPartition(topic, 0)])
        async with AsyncAdmin({"bootstrap.servers": servers}) as admin:
            assert (await admin.describe_groups(group))[group].members == ()
        await consumer.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_older_commit_that_is_repeated_is_not_sent_after_the_one_of_a_revocation(protocol: str) -> None:
    async def work() -> None:
        coordinator = Coordinator()
        coordinator.retry_pause_ms = lambda _: 100.0  # type: ignore[method-assign]
        codes = [14]  # COORDINATOR_LOAD_IN_PROGRESS: the request is repeated after the pause

        async def answer() -> int:
            if codes:
                return codes.pop()
            await rest(0.2)
            return 0

        member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 0})
        await member.until(lambda: len(member.notifications) == 1)
        coordinator.commit_answer = answer
        member.hand_out(5)
        await member.step()
        await member.until(lambda: not codes)
        member.hand_out(7)
        coordinator.rebalance([])
        await member.until(lambda: any(change is Change.REVOKED for change, *_ in member.notifications))
        sent = [request for request in coordinator.requests if isinstance(request, OffsetCommitRequest)]
        assert [row.committed_offset for row in sent[-1].topics[0].partitions] == [7] * 4
        await member.session.close()

    asyncio.run(work())


def test_a_member_that_closes_before_its_first_heartbeat_is_answered_leaves() -> None:
    """Regression: the group already knew the member, and reserved partitions for it until its session timed
    out.
    """

    async def work() -> None:
        coordinator, silent = Coordinator(), asyncio.Event()
        request = coordinator.request

        async def unanswered(node_id: int | None, message: Any, **how: Any) -> Any:
            answer = await request(node_id, message, **how)
            if isinstance(message, ConsumerGroupHeartbeatRequest) and message.member_epoch == 0:
                await silent.wait()
            return answer

        coordinator.request = unanswered  # type: ignore[method-assign]
        member = Member(coordinator, "consumer")

        def said() -> list[tuple[str, int]]:
            heartbeats = [
                request
                for request in coordinator.requests
                if isinstance(request, ConsumerGroupHeartbeatRequest)
            ]
            return [(heartbeat.member_id, heartbeat.member_epoch) for heartbeat in heartbeats]

        await member.until(lambda: bool(said()))
        await member.session.close()
        [(member_id, _), left] = said()
        assert left == (member_id, -1)

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_member_that_closes_while_it_joins_leaves_at_once(servers: str, group: str, assignor: str) -> None:
    """Regression: LeaveGroup waited behind the pending JoinGroup, and was dropped when the client closed."""
    topic = new_topic(servers, 2)

    def one() -> Consumer:
        made = member(servers, group, partition_assignment_strategy=assignor)
        made.subscribe(topic)
        return made

    with Admin({"bootstrap.servers": servers}) as admin:

        def member_count() -> int:
            return len(admin.describe_groups(group)[group].members)

        with one() as busy:
            wait_for(lambda: not busy.poll(0.1) and len(busy.assignment()) == 2)
            leaver = one()
            # The other member takes no part in the rebalance, so the JoinGroup stays pending.
            wait_for(lambda: not leaver.poll(0.1) and member_count() == 2)
            leaver.close()
            assert member_count() == 1


def test_a_close_after_an_interrupted_unsubscribe_keeps_no_member_in_the_group(
    servers: str, group: str
) -> None:
    """Regression: the close ended the connection on which the interrupted unsubscribe was about to send
    LeaveGroup.
    """
    topic = new_topic(servers, 2)
    with member(servers, group) as busy, Admin({"bootstrap.servers": servers}) as admin:
        busy.subscribe(topic)
        wait_for(lambda: not busy.poll(0.1) and len(busy.assignment()) == 2)

        def member_count() -> int:
            return len(admin.describe_groups(group)[group].members)

        async def run() -> None:
            # The other member does not join the rebalance, so the pending JoinGroup blocks its connection.
            # LeaveGroup needs another connection.
            consumer = AsyncConsumer({"bootstrap.servers": servers, "group.id": group})
            consumer.subscribe(topic)
            while member_count() == 1:
                await consumer.poll(0.1)
            leaving = asyncio.create_task(consumer.unsubscribe())
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert leaving.cancelled()
            await consumer.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(run())
        assert member_count() == 1


def test_two_closes_wait_for_the_same_interrupted_unsubscribe(ours: str, group: str) -> None:
    """Regression: the second close raised IndexError."""
    topic = new_topic(ours)

    async def run() -> None:
        consumer = AsyncConsumer({"bootstrap.servers": ours, "group.id": group})
        consumer.subscribe(topic)
        while not consumer.assignment():
            await consumer.poll(0.1)
        leaving = asyncio.create_task(consumer.unsubscribe())
        while consumer._group is not None and consumer._group._departure is None:
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert consumer._leaving
        await asyncio.gather(consumer.close(), consumer.close())

    asyncio.run(run())


@pytest.fixture
def heeds_interrupt() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt. A process that a shell started in the background ignores SIGINT."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("heeds_interrupt")
@pytest.mark.parametrize("how", ["close", "unsubscribe"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_an_interrupt_of_a_close_keeps_no_member_in_the_group(
    servers: str, group: str, protocol: str, how: str
) -> None:
    """Regression: a second Ctrl-C came before LeaveGroup was sent, and the group waited for the session
    timeout.

    The test also fails if the event loop is never closed: its open connections then cause a ResourceWarning,
    which pytest treats as an error.
    """
    topic = new_topic(servers)
    fill(servers, topic, 0, 1, 1)
    consumer = member(servers, group, group_protocol=protocol)
    consumer.subscribe(topic)
    take(consumer, 1)
    session: Any = consumer._async._group
    prepare_to_leave, calls = session.prepare_to_leave, list[None]()

    async def interrupted() -> Any:
        calls.append(None)
        if len(calls) == 1:
            return await prepare_to_leave()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return await asyncio.Event().wait()

    session.prepare_to_leave = interrupted
    with pytest.raises(KeyboardInterrupt):
        getattr(consumer, how)()
    if how == "unsubscribe":
        # This request uses the same connection as LeaveGroup, so its response comes after that of LeaveGroup.
        consumer.committed(TopicPartition(topic, 0))
    with Admin({"bootstrap.servers": servers}) as admin:
        assert admin.describe_groups(group)[group].members == ()
    consumer.close()
