"""What the simulator found, each as the shortest world that shows it."""

from __future__ import annotations

import asyncio

from oncelog.edge.producer import AsyncProducer
from oncelog.sim.clients import QUICK
from oncelog.sim.world import BrokerHost, Host, World


def test_a_lost_connection_does_not_turn_the_protocol_of_transactions_back() -> None:
    """Begun without a connection, a transaction went the classic way, with one epoch for all of them."""
    world = World(1)
    broker = BrokerHost(world, {"num.partitions": 1, "transaction.state.log.num.partitions": 1})
    broker.start()
    epochs: list[int | None] = []

    async def produce() -> None:
        producer = AsyncProducer({**QUICK, "transactional.id": "t"})
        await producer.init_transactions()
        for transport in world.network.connections():
            world.network.cut(transport)
        await asyncio.sleep(0.5)  # the connection is lost, and nobody has asked for another
        for _ in range(2):
            await producer.begin_transaction()
            await producer.send("topic", b"v")
            await producer.commit_transaction()
            epochs.append(producer.idempotence().producer_epoch)

    done = Host(world, "client").run(produce)
    assert world.loop.run_until(done, 60_000_000) and done.exception() is None
    assert epochs == [1, 2]
