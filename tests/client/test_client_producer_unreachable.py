"""A producer that finds no broker when it looks up a topic, in the simulator's virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from oncelog_simulator.clients import SHORT_TIMEOUTS, Sender
from oncelog_simulator.history.check import Outcome
from oncelog_simulator.world import BrokerHost, Host, World

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.config import PRODUCER
from oncelog.errors import MisuseError, NotConnectedError, TimedOut


def test_send_waits_for_a_broker_for_max_block_ms_and_not_for_request_timeout_ms() -> None:
    """The broker starts after 8 s. That is after request.timeout.ms (2 s) and before max.block.ms (10 s)."""
    world = World(1)
    broker = BrokerHost(world, {})
    sender = Sender(world, "sender", "t", 1, bursts=1)

    async def play() -> None:
        sender.start()
        await asyncio.sleep(8.0)
        broker.start()
        while not sender.is_done:
            await asyncio.sleep(0.1)

    assert world.loop.run_until(world.loop.create_task(play()), 60_000_000)
    world.is_over = True
    world.loop.close()
    broker.release()
    assert sender.calls and {call.outcome for call in sender.calls} == {Outcome.OK}
    assert world.violations == []


def test_a_first_send_survives_an_outage_after_its_topic_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The producer has found the topic, and then cannot reach the cluster for a while (R331)."""
    world = World(1)
    broker = BrokerHost(world, {})
    sender = Sender(world, "sender", "t", 1, bursts=1)
    real, errors = ClusterConnection.start, [TimedOut("no answer"), NotConnectedError("refused")]

    async def start(self: ClusterConnection) -> None:
        if errors and self.metadata.brokers:
            raise errors.pop()
        await real(self)

    monkeypatch.setattr(ClusterConnection, "start", start)
    broker.start()
    sender.start()
    world.loop.run_until(world.loop.create_future(), 30_000_000)
    world.is_over = True
    world.loop.close()
    broker.release()
    assert errors == [] and sender.calls and {call.outcome for call in sender.calls} == {Outcome.OK}


def test_two_calls_that_start_a_connection_leave_nothing_behind_after_close() -> None:
    """Close ends the periodic metadata refresh, even if two calls started it at the same time (R332)."""
    world = World(1)
    BrokerHost(world, {}).start()
    left: list[str] = []

    async def main() -> None:
        cluster = ClusterConnection(PRODUCER.parse(SHORT_TIMEOUTS))
        await asyncio.gather(cluster.start(), cluster.start())
        await cluster.close()
        left.extend(str(task.get_coro()) for task in asyncio.all_tasks() if not task.done())

    done = Host(world, "client").run(main)
    assert world.loop.run_until(done, 30_000_000) and done.exception() is None
    world.is_over = True
    world.loop.close()
    assert not [name for name in left if "_refresh_by_age" in name]


def test_a_close_while_a_connection_starts_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the cluster's first response came before the close, and the client started its periodic
    refresh after it.
    """
    world = World(1)
    BrokerHost(world, {}).start()
    left: list[str] = []
    real = ClusterConnection.refresh_metadata

    async def refresh_metadata(self: ClusterConnection, topics: Collection[str]) -> None:
        await real(self, topics)
        await self.close()

    monkeypatch.setattr(ClusterConnection, "refresh_metadata", refresh_metadata)

    async def main() -> None:
        with pytest.raises(MisuseError, match="closed"):
            await ClusterConnection(PRODUCER.parse(SHORT_TIMEOUTS)).start()
        left.extend(str(task.get_coro()) for task in asyncio.all_tasks() if not task.done())

    done = Host(world, "client").run(main)
    assert world.loop.run_until(done, 30_000_000)
    world.is_over = True
    world.loop.close()
    assert not [name for name in left if "_refresh_by_age" in name]
    assert done.exception() is None
