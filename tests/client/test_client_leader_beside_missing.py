"""A client finds the leaders of its other topics while one of its topics is missing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.client import metadata, scripted_broker
from support.topics import new_topic, requests
from support.wait import until

from oncelog import Admin, Broker, Consumer, Producer, TopicPartition
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import LeaderNotAvailable, UnknownTopicOrPartition
from oncelog.testing.proxy import Proxy, Rule
from oncelog.wire.messages import ProduceResponse


def test_a_first_send_does_not_wait_for_a_send_to_a_missing_topic() -> None:
    async def run(servers: str, topics: list[str]) -> None:
        with Proxy(servers) as proxy:
            proxy.add(Rule(action="delay", api="Metadata", direction="response", delay_ms=60))
            pauses = {"retry.backoff.ms": 50, "retry.backoff.max.ms": 50, "max.block.ms": 600_000}
            async with AsyncProducer({"bootstrap.servers": proxy.bootstrap_servers, **pauses}) as producer:
                missing = asyncio.create_task(producer.send("missing", b"x"))
                for topic in topics:
                    count = len(requests(proxy, "Metadata"))
                    # Start each send while a look-up of the missing topic is running.
                    await until(lambda count=count: len(requests(proxy, "Metadata")) > count)
                    await asyncio.wait_for(producer.send(topic, b"x"), 60)
                assert not missing.done()
                missing.cancel()

    with Broker(config={"auto.create.topics.enable": False}) as broker:
        asyncio.run(run(broker.bootstrap_servers, [new_topic(broker.bootstrap_servers) for _ in range(5)]))


def test_a_partition_without_a_leader_does_not_keep_others_from_being_written() -> None:
    """In a cluster of several brokers the first partition's only replica may be down."""

    async def run() -> None:
        async with scripted_broker() as broker:

            def half_led(header: Any, message: Any) -> Any:
                answer = metadata(broker.port, {"t": 2})
                if answer.topics:
                    first = answer.topics[0].partitions[0]
                    first.error_code, first.leader_id = LeaderNotAvailable.code, -1
                return answer

            broker.handlers["Metadata"] = half_led
            broker.handlers["Produce"] = lambda header, message: ProduceResponse(
                responses=[
                    ProduceResponse.TopicProduceResponse(
                        name="t",
                        partition_responses=[
                            ProduceResponse.PartitionProduceResponse(index=1, base_offset=7)
                        ],
                    )
                ]
            )
            settings = {"enable.idempotence": False, "delivery.timeout.ms": 600_000}
            producer = AsyncProducer({"bootstrap.servers": broker.bootstrap_servers, **settings})
            sent = await asyncio.wait_for(producer.send("t", b"x", partition=1), 20)
            assert (await asyncio.wait_for(sent, 20)).offset == 7
            await producer.close()

    asyncio.run(run())


def test_a_first_send_that_is_cancelled_does_not_end_another_one() -> None:
    async def run(servers: str, topic: str) -> None:
        async with AsyncProducer({"bootstrap.servers": servers}) as producer:
            driver = producer._started()
            start, begun, may_go = driver.cluster.start, asyncio.Semaphore(0), asyncio.Event()

            async def slow_start() -> None:
                """Delay the start of the connection until the test allows it. By then, both sends wait for
                it.
                """
                begun.release()
                await may_go.wait()
                await start()

            driver.cluster.start = slow_start  # type: ignore[method-assign]
            cancelled = asyncio.create_task(producer.send(topic, b"x"))
            other = asyncio.create_task(producer.send(topic, b"y"))
            for _ in range(2):
                await asyncio.wait_for(begun.acquire(), 60)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            may_go.set()
            assert (await (await asyncio.wait_for(other, 60))).offset == 0

    with Broker() as broker:
        asyncio.run(run(broker.bootstrap_servers, new_topic(broker.bootstrap_servers)))


def test_a_missing_topic_does_not_keep_others_from_being_read() -> None:
    """Regression: positions were looked up together, after the wait for each partition of the
    missing topic.
    """
    with Broker(config={"auto.create.topics.enable": False}) as broker:
        good = TopicPartition(new_topic(broker.bootstrap_servers), 0)
        with Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
            producer.send(good.topic, b"x").result()
        settings = {"auto.offset.reset": "earliest", "retry.backoff.ms": 100, "retry.backoff.max.ms": 100}
        with (
            Proxy(broker.bootstrap_servers) as proxy,
            Consumer({"bootstrap.servers": proxy.bootstrap_servers, **settings}) as consumer,
        ):
            consumer.assign([*(TopicPartition("missing", number) for number in range(4)), good])
            while not consumer.poll(60):
                pass
            names = [event.api for event in proxy.events if event.direction == "request"]
            before = names[: names.index("ListOffsets")]
            assert before.count("Metadata") <= 4


def test_missing_partitions_are_looked_for_together() -> None:
    with Broker(config={"auto.create.topics.enable": False}) as broker:
        pauses = {"retry.backoff.ms": 1000, "retry.backoff.max.ms": 1000}
        with (
            Proxy(broker.bootstrap_servers) as proxy,
            Consumer({"bootstrap.servers": proxy.bootstrap_servers, **pauses}) as consumer,
        ):
            with pytest.raises(UnknownTopicOrPartition):
                consumer.end_offsets([TopicPartition("missing", number) for number in range(20)])
            assert len(requests(proxy, "Metadata")) < 20


@pytest.mark.parametrize("how", ["delete_records", "describe_producers"])
def test_an_admin_client_looks_for_missing_partitions_together(how: str) -> None:
    """Regression: they were looked for in turn, together for longer than request.timeout.ms."""
    partitions = [TopicPartition("missing", number) for number in range(20)]
    with Broker(config={"auto.create.topics.enable": False}) as broker:
        pauses = {"retry.backoff.ms": 1000, "retry.backoff.max.ms": 1000}
        with (
            Proxy(broker.bootstrap_servers) as proxy,
            Admin({"bootstrap.servers": proxy.bootstrap_servers, **pauses}) as admin,
        ):
            with pytest.raises(UnknownTopicOrPartition):
                getattr(admin, how)(dict.fromkeys(partitions, 1))
            assert len(requests(proxy, "Metadata")) < 20
