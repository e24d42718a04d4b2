"""An asyncio client belongs to the event loop that used it first. In another loop, its calls raise
immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from oncelog import TopicPartition, aio
from oncelog.errors import MisuseError

T0 = TopicPartition("loops", 0)


Use = Callable[[Any], Coroutine[Any, Any, Any]]
PRODUCER: dict[str, Use] = {
    "send": lambda producer: producer.send("loops", b"x"),
    "flush": lambda producer: producer.flush(),
    "begin_transaction": lambda producer: producer.begin_transaction(),
    "close": lambda producer: producer.close(),
}
CONSUMER: dict[str, Use] = {
    "poll": lambda consumer: consumer.poll(0.1),
    "position": lambda consumer: consumer.position(T0),
    "end_offsets": lambda consumer: consumer.end_offsets([T0]),
    "commit": lambda consumer: consumer.commit({T0: 1}),
    "close": lambda consumer: consumer.close(),
}
ADMIN: dict[str, Use] = {
    "list_topics": lambda admin: admin.list_topics(),
    "describe_groups": lambda admin: admin.describe_groups("g"),
    "close": lambda admin: admin.close(),
}


def use_twice(make: Callable[[], Any], first: Use, second: Use) -> None:
    """Use a client in one event loop, and then in another one. The second use must raise while the first loop
    is still open.
    """
    with asyncio.Runner() as runner:
        client = runner.run(_made(make))
        runner.run(first(client))
        other = asyncio.new_event_loop()
        try:
            with pytest.raises(MisuseError, match=r"another event loop.*make a new"):
                other.run_until_complete(asyncio.wait_for(second(client), 30))
        finally:
            other.close()
        runner.run(client.close())


async def _made(make: Callable[[], Any]) -> Any:
    return make()


@pytest.mark.parametrize("call", PRODUCER)
def test_a_producer_refuses_a_second_loop(ours: str, call: str) -> None:
    make = lambda: aio.Producer({"bootstrap.servers": ours, "transactional.id": "loops"})  # noqa: E731
    use_twice(make, lambda producer: producer.init_transactions(), PRODUCER[call])


@pytest.mark.parametrize("call", CONSUMER)
def test_a_consumer_refuses_a_second_loop(ours: str, call: str) -> None:
    def make() -> aio.Consumer:
        consumer = aio.Consumer({"bootstrap.servers": ours, "group.id": "loops"})
        consumer.assign(T0)
        return consumer

    async def first(consumer: aio.Consumer) -> None:
        await consumer.start()

    use_twice(make, first, CONSUMER[call])


@pytest.mark.parametrize("call", ADMIN)
def test_an_admin_client_refuses_a_second_loop(ours: str, call: str) -> None:
    use_twice(lambda: aio.Admin({"bootstrap.servers": ours}), ADMIN["list_topics"], ADMIN[call])


def test_a_client_that_was_only_made_is_used_by_any_loop(ours: str) -> None:
    producer = aio.Producer({"bootstrap.servers": ours})

    async def send() -> int | None:
        async with producer:
            return (await (await producer.send("loops", b"x"))).offset

    assert asyncio.run(send()) is not None
