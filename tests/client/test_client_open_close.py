"""Clients that are opened, used and closed leave no objects, threads or descriptors behind in their process.

Each client is used once to warm up, and then ten times. `gc` counts what is reachable, by type.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from support.wait import until, wait_until

from oncelog import Admin, Consumer, Producer, TopicPartition, aio
from oncelog.testing.broker_process import BrokerProcess

ROUNDS = 10
T0 = TopicPartition("opened", 0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a broker in its own process, so that its sockets and threads are not counted."""
    with BrokerProcess(tmp_path_factory.mktemp("opened")) as broker:
        with Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
            producer.send("opened", b"x").result(60)
        yield broker.bootstrap_servers


def transactional_producer(servers: str, number: int) -> None:
    with Producer({"bootstrap.servers": servers, "transactional.id": f"opened-{number}"}) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send("opened", b"x")
        producer.begin_transaction()
        producer.send("opened", b"aborted by close()")


def plain_producer(servers: str, number: int) -> None:
    with Producer({"bootstrap.servers": servers}) as producer:
        producer.send("opened", b"x").result(60)


def consumer(servers: str, number: int) -> None:
    with Consumer({"bootstrap.servers": servers, "auto.offset.reset": "earliest"}) as reader:
        reader.assign(T0)
        assert reader.poll(60, max_records=1)


def admin(servers: str, number: int) -> None:
    with Admin({"bootstrap.servers": servers}) as client:
        client.describe_topics("opened")


async def asyncio_transactional_producer(servers: str, number: int) -> None:
    settings = {"bootstrap.servers": servers, "transactional.id": f"opened-aio-{number}"}
    async with aio.Producer(settings) as producer:
        await producer.init_transactions()
        async with producer.transaction():
            await producer.send("opened", b"x")


async def asyncio_plain_producer(servers: str, number: int) -> None:
    async with aio.Producer({"bootstrap.servers": servers}) as producer:
        await (await producer.send("opened", b"x"))


async def asyncio_consumer(servers: str, number: int) -> None:
    settings = {"bootstrap.servers": servers, "auto.offset.reset": "earliest"}
    async with aio.Consumer(settings) as reader:
        reader.assign(T0)
        assert await reader.poll(60, max_records=1)


async def asyncio_admin(servers: str, number: int) -> None:
    async with aio.Admin({"bootstrap.servers": servers}) as client:
        await client.describe_topics("opened")


BLOCKING = (transactional_producer, plain_producer, consumer, admin)
ASYNCIO = (asyncio_transactional_producer, asyncio_plain_producer, asyncio_consumer, asyncio_admin)


def held() -> Counter[str]:
    """Count the objects that clients make, by type, and the threads and descriptors of this process."""
    gc.collect()
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name.startswith(("oncelog.", "_asyncio.", "asyncio.", "uvloop.", "socket.", "ssl.")):
            # Do not count timers, only the objects that they would call. An event loop keeps cancelled timers
            # until they are half of all its timers, and a broker of another test in this process has timers,
            # too.
            if not name.endswith(("TimerHandle", ".UVTimer")):
                counts[name] += 1
        elif kind in (memoryview, threading.Thread):
            counts[name] += 1
    counts["threads"] = threading.active_count()
    counts["descriptors"] = len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))
    return counts


def leaked(before: Counter[str]) -> Counter[str]:
    """Return the counts that have grown by at least one per round.

    A smaller growth may belong to a broker of another test, which does background work in this process.
    """
    return Counter({name: count for name, count in (held() - before).items() if count >= ROUNDS})


@pytest.mark.parametrize("use", BLOCKING, ids=lambda use: use.__name__)
def test_blocking_clients_leave_nothing_behind(servers: str, use: Callable[[str, int], None]) -> None:
    use(servers, 0)
    before = held()
    for number in range(ROUNDS):
        use(servers, number)
    wait_until(lambda: not leaked(before))


@pytest.mark.parametrize("use", ASYNCIO, ids=lambda use: use.__name__)
def test_asyncio_clients_leave_nothing_behind_in_a_loop_that_goes_on(
    servers: str, use: Callable[[str, int], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        await use(servers, 0)
        before = held()
        for number in range(ROUNDS):
            await use(servers, number)
        # wait, because transports close with a delay
        await until(lambda: not leaked(before), what=lambda: leaked(before))

    asyncio.run(run())


def asyncio_consumer_in_a_loop_of_its_own(servers: str, number: int) -> None:
    asyncio.run(asyncio_consumer(servers, number))


def group_consumer(servers: str, number: int) -> None:
    settings = {
        "bootstrap.servers": servers,
        "auto.offset.reset": "earliest",
        "group.id": f"opened-{number}",
    }
    with Consumer(settings) as reader:
        reader.subscribe("opened")
        assert reader.poll(60, max_records=1)


@pytest.mark.parametrize(
    "use",
    [transactional_producer, plain_producer, consumer, asyncio_consumer_in_a_loop_of_its_own, admin],
    ids=lambda use: use.__name__,
)
def test_a_closed_client_is_freed_without_the_garbage_collector(
    servers: str, use: Callable[[str, int], None]
) -> None:
    parts = {"ProducerDriver", "TransactionManager", "AsyncConsumer", "ConsumerCore", "Fetcher"}
    connections = {"ClusterConnection", "BrokerConnection", "BrokerProtocol", "Loop"}
    assert (parts | connections) & garbage_of(use, servers) == set()


def test_a_closed_consumer_of_a_group_is_freed_without_the_garbage_collector(servers: str) -> None:
    assert "AsyncConsumer" not in garbage_of(group_consumer, servers)


def garbage_of(use: Callable[[str, int], None], servers: str) -> set[str]:
    """Return the types of the objects that only the garbage collector frees after a client was closed."""
    use(servers, 0)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        use(servers, 1)
        gc.collect()
        return {type(thing).__qualname__ for thing in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
