"""Acknowledged changes of topics, settings, users and producer ids survive a power loss, with any
flush.messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from oncelog_simulator.checks import InvariantMonitor
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.world import BrokerHost, World

from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import ConfigResource, NewTopic
from oncelog.client.producer.aio import AsyncProducer
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.rules.security.scram import Mechanism

UNLIMITED = 2**63 - 1
STEPS = 6


class Operator(Application):
    """An operator that makes changes one after the other.

    `step_count` is the number of acknowledged changes.
    """

    step_count = 0

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            topic, node = ConfigResource("topic", "t"), ConfigResource("broker", "1")
            acl = Acl(
                ResourceType.TOPIC,
                "t",
                PatternType.LITERAL,
                "User:alice",
                "*",
                Operation.READ,
                Permission.ALLOW,
            )
            steps: list[Callable[[], Awaitable[object]]] = [
                partial(
                    admin.create_topics, [NewTopic("t", num_partitions=2, configs={"retention.ms": "5000"})]
                ),
                partial(admin.alter_configs, {topic: {"retention.bytes": 77}}),
                partial(admin.alter_configs, {node: {"log.retention.ms": 123_456}}),
                partial(admin.create_acls, acl),
                partial(
                    admin.set_user, "alice", "secret", mechanisms=Mechanism.SCRAM_SHA_256, iterations=4096
                ),
                self._take_producer_id,
            ]
            for step in steps:
                await step()
                self.step_count += 1
                await self.sleep_up_to(0.2)

    async def _take_producer_id(self) -> None:
        async with AsyncProducer({**SHORT_TIMEOUTS, "client.id": self.name}) as producer:
            await (await producer.send("t", b"value", partition=0))


@pytest.mark.parametrize("flush_messages", [1, UNLIMITED])
@pytest.mark.parametrize("seed", range(2 * STEPS))
def test_acknowledged_topics_settings_users_acls_and_producer_ids_outlive_a_power_loss(
    flush_messages: int, seed: int
) -> None:
    """After each step the broker loses its power.

    Its next start must find all changes that were acknowledged before.
    """
    world = World(seed)
    settings = {
        "log.flush.interval.messages": flush_messages,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    broker = BrokerHost(world, settings)
    monitor = InvariantMonitor(world)
    operator = Operator(world, "operator")

    def ending(*, is_in_write: bool, lose_power: bool) -> None:
        if broker.node is not None:
            monitor.ending(broker.node, is_in_write=is_in_write, lose_power=lose_power)

    async def run_scenario() -> None:
        broker.start()
        operator.start()
        while operator.step_count <= seed % STEPS:
            await asyncio.sleep(0.01)
        operator.kill()
        broker.before_exit, broker.on_recovered = ending, monitor.recovered
        broker.kill(lose_power=True)
        broker.start_if_down()
        while broker.node is None:
            await asyncio.sleep(0.1)

    assert world.loop.run_until(world.loop.create_task(run_scenario()), 60_000_000)
    assert world.violations == [] and broker.node is not None
    node, count = broker.node, operator.step_count
    topic = node.topics.get("t")
    assert topic is not None and topic.overrides["retention.ms"] == "5000"
    assert count < 2 or topic.overrides["retention.bytes"] == "77"
    assert count < 4 or (node.authorizer is not None and len(node.authorizer.acls) == 1)
    assert count < 5 or node.users.names() == ["alice"]
    world.is_over = True
    world.loop.close()
    broker.release()
