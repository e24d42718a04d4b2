"""What the simulator found, each as the shortest world that shows it."""

from __future__ import annotations

import asyncio
import errno

from oncelog.edge.producer import AsyncProducer
from oncelog.sim.clients import QUICK
from oncelog.sim.world import BrokerHost, Host, World
from oncelog.types import TopicPartition


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


def test_a_marker_that_waited_for_another_partition_is_durable_before_the_transaction_is_complete() -> None:
    """One disk write failed; the markers of the other partitions were not waited for when it was repeated."""
    world = World(1)
    broker = BrokerHost(world, {"num.partitions": 1, "log.flush.interval.messages": 1})
    broker.start()
    unsynced: list[int] = []

    async def produce() -> None:
        producer = AsyncProducer({**QUICK, "transactional.id": "t"})
        await producer.init_transactions()
        await producer.begin_transaction()
        for topic in ("a", "b"):
            await (await producer.send(topic, b"v"))
        broker.disk.errors["write", "b-0/00000000000000000000.log"] = errno.EIO
        committing = asyncio.ensure_future(producer.commit_transaction())
        await asyncio.sleep(1.0)
        broker.disk.errors.clear()
        await committing
        await asyncio.sleep(30.0)
        assert broker.node is not None
        logs = broker.node.log_manager.partitions
        unsynced.extend(logs[TopicPartition(topic, 0)].unflushed_record_count for topic in ("a", "b"))

    done = Host(world, "client").run(produce)
    assert world.loop.run_until(done, 60_000_000) and done.exception() is None
    assert unsynced == [0, 0]
