"""Bugs that the simulator found, each as the shortest simulation that shows it."""

from __future__ import annotations

import asyncio
import errno

from oncelog_simulator.clients import SHORT_TIMEOUTS
from oncelog_simulator.world import BrokerHost, Host, LogCapture, World

from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.producer.aio import AsyncProducer
from oncelog.types import TopicPartition


def test_a_lost_connection_does_not_downgrade_the_transaction_protocol() -> None:
    """Regression: if a transaction began while no connection was open, the producer used the classic protocol
    for good.
    """
    world = World(1)
    broker = BrokerHost(world, {"num.partitions": 1, "transaction.state.log.num.partitions": 1})
    broker.start()
    epochs: list[int | None] = []

    async def produce() -> None:
        producer = AsyncProducer({**SHORT_TIMEOUTS, "transactional.id": "t"})
        await producer.init_transactions()
        for transport in world.network.connections():
            world.network.disconnect(transport)
        # At this moment the connection is lost, and the client has not opened another one.
        await asyncio.sleep(0.5)
        for _ in range(2):
            await producer.begin_transaction()
            await producer.send("topic", b"v")
            await producer.commit_transaction()
            epochs.append(producer.idempotence().producer_epoch)

    done = Host(world, "client").run(produce)
    assert world.loop.run_until(done, 60_000_000) and done.exception() is None
    assert epochs == [1, 2]


def test_a_stop_waits_for_the_flushes_under_way() -> None:
    """Regression: the flushes continued after the files were closed.

    The flushes failed, and so did the requests that waited for them.
    """
    world = World(3)
    broker = BrokerHost(world, {"num.partitions": 2, "log.flush.interval.messages": 1})
    broker.start()
    world.loop.pause_limit_s = 0.015

    async def produce() -> None:
        producer = AsyncProducer({**SHORT_TIMEOUTS, "transactional.id": "t", "max.block.ms": 60_000})
        await producer.init_transactions()
        for _ in range(12):
            await producer.begin_transaction()
            for partition in (0, 1):
                await producer.send("topic", b"v", partition=partition)
            ending = asyncio.ensure_future(producer.commit_transaction())
            await asyncio.sleep(world.loop.time() % 0.06)
            await broker.stop()
            broker.start()
            await ending

    with LogCapture(world):
        done = Host(world, "client").run(produce)
        assert world.loop.run_until(done, 600_000_000) and done.exception() is None
    assert world.violations == []
    assert [event.text for event in world.timeline if event.host == "log"] == []


def test_a_generation_is_not_stable_because_the_one_before_was_stored() -> None:
    """Regression (seed 1034): a member joined while the first assignment was being synced.

    After the sync, the group counted as stable, and no member got an assignment.
    """
    world = World(3)
    settings = {"num.partitions": 2, "offsets.topic.num.partitions": 1, "log.flush.interval.messages": 1}
    broker = BrokerHost(world, settings)
    broker.start()
    world.loop.pause_limit_s = 0.1
    held: dict[str, set[int]] = {}

    async def read(name: str) -> None:
        async with AsyncConsumer({**SHORT_TIMEOUTS, "group.id": "g", "fetch.max.wait.ms": 500}) as consumer:
            consumer.subscribe(["topic"])
            while world.now_us < 5_000_000:
                await consumer.poll(0.5)
            held[name] = {at.partition for at in consumer.assignment()}

    async def read_later() -> None:
        await asyncio.sleep(0.1)
        await read("later")

    reading = [Host(world, "first").run(lambda: read("first")), Host(world, "later").run(read_later)]
    for each in reading:
        assert world.loop.run_until(each, 60_000_000) and each.exception() is None
    assert sorted(held) == ["first", "later"] and set().union(*held.values()) == {0, 1}


def test_a_marker_that_waited_for_another_partition_is_durable_before_the_transaction_is_complete() -> None:
    """Regression: when a failed write was retried, the coordinator no longer waited for the markers of other
    partitions.
    """
    world = World(1)
    broker = BrokerHost(world, {"num.partitions": 1, "log.flush.interval.messages": 1})
    broker.start()
    unsynced: list[int] = []

    async def produce() -> None:
        producer = AsyncProducer({**SHORT_TIMEOUTS, "transactional.id": "t"})
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


def test_a_second_stop_during_the_first_changes_nothing() -> None:
    """Regression in the simulator: a broker was stopped twice, and the second stop used files that were
    already closed.
    """
    world = World(1)
    broker = BrokerHost(world, {})
    broker.start()

    async def stop_twice() -> None:
        await asyncio.sleep(0.1)
        await asyncio.gather(broker.stop(), broker.stop())

    done = Host(world, "client").run(stop_twice)
    assert world.loop.run_until(done, 60_000_000) and done.exception() is None
    assert [event.text for event in world.timeline].count("is told to stop") == 1


def test_a_member_of_a_group_that_was_forgotten_joins_again() -> None:
    """Seed 847: the only member of a group without offsets was silent for longer than its session time-out.
    So the coordinator removed the group.
    """
    world = World(5)
    settings = {"group.consumer.session.timeout.ms": 3_000, "group.consumer.heartbeat.interval.ms": 500}
    broker = BrokerHost(
        world, {"num.partitions": 1, "offsets.retention.check.interval.ms": 1_000, **settings}
    )
    broker.start()
    told: list[str] = []

    async def read() -> list[bytes | None]:
        values: list[bytes | None] = []
        config = {"group.id": "g", "group.protocol": "consumer", "enable.auto.commit": False}
        async with AsyncConsumer({**SHORT_TIMEOUTS, **config, "auto.offset.reset": "earliest"}) as consumer:
            consumer.subscribe(
                ["topic"],
                on_assigned=lambda share: told.append(f"assigned {len(share)}"),
                on_lost=lambda share: told.append(f"lost {len(share)}"),
            )
            while world.now_us < 40_000_000:
                values += [each.value for each in await consumer.poll(0.5)]
        return values

    async def write() -> None:
        producer = AsyncProducer(SHORT_TIMEOUTS)
        await (await producer.send("topic", b"v"))

    with LogCapture(world):
        writing = Host(world, "writer").run(write)
        assert world.loop.run_until(writing, 5_000_000)
        reader = Host(world, "reader")
        reading = reader.run(read)
        world.loop.run_until(reading, 10_000_000)
        assert told == ["assigned 1"] and reader.process is not None
        reader.process.paused_until_us = 20_000_000
        assert world.loop.run_until(reading, 60_000_000) and reading.exception() is None
    assert told == ["assigned 1", "lost 1", "assigned 1"]
    assert reading.result() == [b"v", b"v"], "from its last commit: there is none"
