"""A producer whose first look at a topic meets no broker, in the simulator's virtual time."""

from __future__ import annotations

import asyncio

from oncelog.rules.history import Outcome
from oncelog.sim.clients import Sender
from oncelog.sim.world import BrokerHost, World


def test_send_waits_for_a_broker_for_max_block_ms_and_not_for_request_timeout_ms() -> None:
    """The broker comes after 8 s: request.timeout.ms is 2 s there, max.block.ms 10 s."""
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
