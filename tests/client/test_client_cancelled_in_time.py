"""A task is cancelled in the same turn of the event loop in which its awaited result arrives. The
cancellation must not be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from support.client import ScriptedBroker, metadata, scripted_broker
from support.groups.session import Coordinator, Member

from oncelog import Broker, NewTopic
from oncelog.aio import Admin as AsyncAdmin
from oncelog.aio import Consumer as AsyncConsumer
from oncelog.aio import Producer as AsyncProducer
from oncelog.client.group.consumer_member import ConsumerMember
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.wire.messages import FindCoordinatorResponse, InitProducerIdResponse, MetadataResponse


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


def protocol_of(member: Member) -> ConsumerMember:
    assert isinstance(member.session.protocol, ConsumerMember)
    return member.session.protocol


def test_a_send_that_is_cancelled_as_room_comes_takes_no_record() -> None:
    async def work() -> None:
        async with AsyncProducer({"bootstrap.servers": "127.0.0.1:9", "buffer.memory": 1000}) as producer:
            driver = producer._started()
            driver.core.buffered_bytes = 1000
            sending = asyncio.create_task(producer.send("t", b"v"))
            await until(lambda: driver._waiters)
            driver.core.buffered_bytes = 0
            driver._waiters[0].set_result(None)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(sending, 60)
            assert driver.core.is_idle
            assert driver.core.room_waiter_count == 0

    asyncio.run(work())


def test_a_member_that_leaves_sends_no_heartbeat_that_was_brought_forward() -> None:
    """With such a heartbeat, a member that unsubscribes would join again, and keep partitions that nobody
    reads.
    """

    async def work() -> None:
        coordinator = Coordinator()
        member = Member(coordinator, "consumer")
        await member.until(lambda: len(member.notifications) == 1)
        protocol = protocol_of(member)
        heartbeats = protocol._heartbeats
        assert heartbeats is not None
        await until(lambda: protocol._hurry._waiters)
        protocol._hurry.set()
        member.session.stop()
        await asyncio.wait([heartbeats], timeout=60)
        assert heartbeats.cancelled()

    asyncio.run(work())


def test_a_poll_that_is_cancelled_as_a_notification_comes_ends() -> None:
    async def work() -> None:
        coordinator = Coordinator()
        member = Member(coordinator, "consumer")
        protocol = protocol_of(member)
        never = asyncio.get_running_loop().create_future()

        async def find(_: object) -> object:
            return await never

        protocol._prepare = find  # type: ignore[assignment,method-assign]
        step = asyncio.create_task(member.step(3600.0))
        await until(lambda: protocol._preparing is not None and protocol._news._waiters)
        protocol._news.set()
        step.cancel()
        done, _ = await asyncio.wait([step], timeout=60)
        assert done and step.cancelled()
        await member.session.close()

    asyncio.run(work())


def test_a_close_that_is_cancelled_twice_leaves_nothing_behind() -> None:
    """Regression: the second cancellation stopped the close half-way, so connections and a record were left
    behind.
    """

    async def work() -> None:
        async with scripted_broker() as broker:
            broker.topics = {"t": 1}
            broker.handlers["Produce"] = lambda header, message: None
            producer = AsyncProducer(
                {"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": False}
            )
            sent = await producer.send("t", b"v")
            await until(lambda: any(name == "Produce" for name, _ in broker.seen))
            closing = asyncio.create_task(producer.close())
            await until(lambda: producer._driver is not None and producer._driver._waiters)
            closing.cancel()
            await until(lambda: producer._closed)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(closing, 60)
            with pytest.raises(OncelogError):
                await asyncio.wait_for(sent, 60)
            await producer.close()
            await until(lambda: broker.idle)

    asyncio.run(work())


def test_a_commit_that_is_cancelled_leaves_no_task() -> None:
    """Regression: the task that waits for the records of the commit was left, and asyncio reported `Task was
    destroyed but it is pending!`.
    """

    async def work(servers: str) -> None:
        settings = {"bootstrap.servers": servers, "transactional.id": "left", "linger.ms": 60_000}
        async with AsyncProducer(settings) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            outcome = await producer.send("left", b"v")
            before = asyncio.all_tasks()
            commit = asyncio.create_task(producer.commit_transaction())
            await until(lambda: producer._started()._waiters)
            assert commit.cancel()
            await asyncio.wait([commit])
            left = {str(task.get_coro()) for task in asyncio.all_tasks() - before}
            assert not [name for name in left if "next_completion" in name]
            await producer.commit_transaction()
            await outcome

    with Broker() as broker:
        asyncio.run(work(broker.bootstrap_servers))


@pytest.mark.parametrize("kind", ["consumer", "member", "admin"])
def test_a_cancelled_start_or_end_of_a_block_leaves_no_connection(kind: str) -> None:
    """Regression: a task that was cancelled in `__aenter__` or `__aexit__` left connections and a task that
    refreshed metadata. Nobody could close them.
    """

    async def use(servers: str) -> None:
        if kind == "admin":
            async with AsyncAdmin({"bootstrap.servers": servers}):
                return
        async with AsyncConsumer({"bootstrap.servers": servers, "group.id": "left"}) as consumer:
            if kind == "member":
                consumer.subscribe("left")
                await consumer.poll(0.001)

    async def cancel_after(turns: int, servers: str) -> bool:
        task = asyncio.create_task(use(servers))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_cancelled = task.cancel()
        await asyncio.wait([task], timeout=60)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        return was_cancelled

    async def work(broker: Broker) -> None:
        async with AsyncAdmin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
            await admin.create_topics(NewTopic("left", 1))
        turns = 0
        while await cancel_after(turns, broker.bootstrap_servers):
            turns += 1 + turns // 8
        await until(lambda: not broker.metrics()["connections"])

    with Broker(config={"group.initial.rebalance.delay.ms": 0}) as broker:
        asyncio.run(work(broker))


def test_a_start_of_a_block_that_fails_leaves_no_connection() -> None:
    """Regression: `async with` calls no `__aexit__` if the broker does not answer, so the connection stayed
    open.
    """

    async def work() -> None:
        async with scripted_broker() as broker:
            broker.handlers["ApiVersions"] = lambda header, message: None
            settings = {
                "bootstrap.servers": broker.bootstrap_servers, "request.timeout.ms": 50,
                "oncelog.bootstrap.timeout.ms": 1,
            }  # fmt: skip
            for client in (AsyncAdmin(settings), AsyncConsumer(settings)):
                with pytest.raises(OncelogError):
                    async with client:
                        pass
                with pytest.raises(MisuseError, match="closed"):
                    await client.start()
            await until(lambda: broker.idle)

    asyncio.run(work())


@pytest.mark.parametrize("holds", ["nothing", "the turn"])
def test_an_initialization_ends_at_its_time_limit(holds: str) -> None:
    """R1536: the limit began again after the wait for another call, and did not apply to the connecting."""

    async def work() -> None:
        async with scripted_broker() as broker:
            broker.handlers["ApiVersions"] = lambda header, message: None
            settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "x"}
            settings["socket.connection.setup.timeout.ms"] = settings["request.timeout.ms"] = 86_400_000
            producer = AsyncProducer(settings)
            calls = [producer.init_transactions(0.01)]
            if holds == "the turn":
                calls.append(producer.init_transactions(0.01))
            async with asyncio.timeout(60):
                results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(result) for result in results} == {TimedOut}
            await producer.close()
            await until(lambda: broker.idle)

    asyncio.run(work())


def brokers_of_one_cluster(brokers: list[ScriptedBroker]) -> MetadataResponse:
    response = metadata(brokers[0].port)
    response.brokers = [
        MetadataResponse.MetadataResponseBroker(node_id=node_id, host="127.0.0.1", port=broker.port)
        for node_id, broker in enumerate(brokers)
    ]
    return response


def test_calls_with_a_short_limit_reach_a_broker_behind_a_silent_one() -> None:
    """R1545: each silent broker took the whole time limit of a call. Once one call asks only one of them, the
    next call must ask another.
    """

    async def work() -> None:
        async with AsyncExitStack() as stack:
            brokers = [await stack.enter_async_context(scripted_broker()) for _ in range(3)]
            last = brokers[-1]
            row = FindCoordinatorResponse.Coordinator(key="x", node_id=2, host="127.0.0.1", port=last.port)
            for broker in brokers:
                broker.handlers["Metadata"] = lambda header, message: brokers_of_one_cluster(brokers)
                broker.handlers["FindCoordinator"] = lambda header, message: None
            last.handlers["FindCoordinator"] = lambda *_: FindCoordinatorResponse(coordinators=[row])
            last.handlers["InitProducerId"] = lambda *_: InitProducerIdResponse(producer_id=1)
            settings = {"bootstrap.servers": brokers[0].bootstrap_servers, "transactional.id": "x"}
            producer = AsyncProducer(settings | {"reconnect.backoff.ms": 0, "retry.backoff.ms": 0})
            for calls in range(1, 20):
                try:
                    await producer.init_transactions(0.1)
                except TimedOut:
                    has_ended = False
                else:
                    has_ended = True
                assert sum(name == "FindCoordinator" for b in brokers for name, _ in b.seen) <= calls
                if has_ended:
                    break
            else:
                pytest.fail("no call reached the last broker")
            await producer.close()

    asyncio.run(work())
