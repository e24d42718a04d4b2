"""Blocking code in virtual time: the clients' blocking APIs, and the effect of a kill on them."""

from __future__ import annotations

import threading

import pytest
from oncelog_simulator.clients import SHORT_TIMEOUTS
from oncelog_simulator.threads import in_thread, sleep
from oncelog_simulator.world import BrokerHost, Host, World

from oncelog.client.admin.blocking import Admin
from oncelog.client.producer.blocking import Producer
from oncelog.errors import MisuseError, TimedOut
from oncelog.types import TopicPartition


def test_blocking_clients_work_in_virtual_time() -> None:
    world = World(1)
    BrokerHost(world, {"num.partitions": 1}).start()
    found: list[object] = []

    def work() -> None:
        with Producer({**SHORT_TIMEOUTS, "linger.ms": 60_000}) as producer:
            sent = producer.send("topic", b"v")
            sleep(30.0)
            found.append(sent.done())
            producer.flush()
            found.append(sent.result().offset)
        with Admin(SHORT_TIMEOUTS) as admin:
            found.append(admin.list_offsets({TopicPartition("topic", 0): "latest"}).popitem()[1].offset)

    async def main() -> None:
        await in_thread(work)

    done = Host(world, "client").run(main)
    assert world.loop.run_until(done, 120_000_000) and done.exception() is None
    assert found == [False, 0, 1]
    assert 30.0 < world.loop.time() < 40.0


def test_a_call_that_takes_too_long_is_timed_out() -> None:
    world = World(1)
    errors: list[type[Exception]] = []

    def work() -> None:
        with pytest.raises(TimedOut), Producer({**SHORT_TIMEOUTS, "max.block.ms": 1_000}) as producer:
            producer.send("topic", b"v")
        errors.append(TimedOut)

    async def main() -> None:
        await in_thread(work)

    done = Host(world, "client").run(main)
    assert world.loop.run_until(done, 60_000_000) and done.exception() is None
    assert errors == [TimedOut]


def test_a_killed_process_does_not_go_on_and_leaves_no_thread() -> None:
    world, seen = World(1), list[str]()

    def work() -> None:
        try:
            sleep(5.0)
            seen.append("slept")
        finally:
            seen.append("out")

    async def main() -> None:
        await in_thread(work)

    before = threading.active_count()
    host = Host(world, "client")
    host.run(main)
    world.call_later(1.0, host.kill)
    assert not world.loop.run_until(world.loop.create_future(), 60_000_000)
    assert seen == [] and threading.active_count() == before + 1
    world.loop.close()
    assert seen == ["out"] and threading.active_count() == before


def test_a_blocking_client_outside_of_a_thread_is_refused() -> None:
    with pytest.raises(MisuseError, match="in_thread"):
        sleep(1.0)
