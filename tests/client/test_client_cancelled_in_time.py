"""A task is cancelled in the same turn of the event loop in which its awaited result arrives. The
cancellation must not be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.client import scripted_broker
from support.groups.session import Coordinator, Member

from oncelog import Broker
from oncelog.aio import Producer as AsyncProducer
from oncelog.client.group.consumer_member import ConsumerMember
from oncelog.errors import OncelogError


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
