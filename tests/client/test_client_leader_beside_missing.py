"""Leaders of healthy topics are found while another topic of the same client is missing for long."""

from __future__ import annotations

import asyncio

from helpers_producer import new_topic, requests

from oncelog import Broker
from oncelog.edge.producer import AsyncProducer
from oncelog.faults import Proxy, Rule


def test_a_first_send_does_not_wait_for_a_send_to_a_missing_topic() -> None:
    async def run(servers: str, topics: list[str]) -> None:
        with Proxy(servers) as proxy:
            proxy.add(Rule(action="delay", api="Metadata", direction="response", delay_ms=60))
            pauses = {"retry.backoff.ms": 50, "retry.backoff.max.ms": 50, "max.block.ms": 600_000}
            async with AsyncProducer({"bootstrap.servers": proxy.bootstrap_servers, **pauses}) as producer:
                missing = asyncio.create_task(producer.send("missing", b"x"))
                for topic in topics:
                    count = len(requests(proxy, "Metadata"))
                    while len(requests(proxy, "Metadata")) == count:  # each begins while one is under way
                        await asyncio.sleep(0.001)
                    await asyncio.wait_for(producer.send(topic, b"x"), 60)
                assert not missing.done()
                missing.cancel()

    with Broker(config={"auto.create.topics.enable": False}) as broker:
        asyncio.run(run(broker.bootstrap_servers, [new_topic(broker.bootstrap_servers) for _ in range(5)]))
