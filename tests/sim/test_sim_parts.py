"""Parts of the simulator: event loop, network, processes, and the removal of faults from failing runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from oncelog_simulator.cli import parse_seeds
from oncelog_simulator.event_loop import Livelock
from oncelog_simulator.faults import Fault
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.shrink import shrink
from oncelog_simulator.simulation import Result, scenario_for
from oncelog_simulator.world import Host, World

from oncelog.errors import ConfigError


class Echo(asyncio.Protocol):
    """A protocol that sends back the bytes that it receives."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Noting(asyncio.Protocol):
    """A protocol that keeps the bytes that it receives, and the error with which its connection ended."""

    def __init__(self) -> None:
        self.got = b""
        self.ended: list[Exception | None] = []

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.append(exc)


class World2:
    """An echo server and a client. A test provides the client's main coroutine."""

    def __init__(self) -> None:
        self.world = World(1)
        self.server, self.client = Host(self.world, "server"), Host(self.world, "client")
        self.server.run(self._serve)
        self.noting = Noting()
        self.transport: Any = None

    async def _serve(self) -> None:
        await asyncio.get_running_loop().create_server(Echo, "server", 1)

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_connection(lambda: self.noting, "server", 1)

    def until(self, seconds: float) -> None:
        loop = self.world.loop
        waiting = loop.create_task(asyncio.sleep(seconds))
        assert loop.run_until(waiting, 1 << 60)

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        async def begin() -> None:
            await main

        self.client.run(begin)


@pytest.fixture
def two() -> World2:
    made = World2()
    made.start(made.connect())
    made.until(1.0)
    return made


def test_time_jumps_to_what_is_due() -> None:
    world, seen = World(1), []

    async def sleeper() -> None:
        for pause_s in (5.0, 0.25, 3600.0):
            await asyncio.sleep(pause_s)
            seen.append(round(world.loop.time(), 2))

    assert world.loop.run_until(world.loop.create_task(sleeper()), 1 << 60)
    assert seen == [5.0, 5.25, 3605.25]


def test_callbacks_that_never_let_time_advance_are_an_error() -> None:
    world = World(1)

    def again() -> None:
        world.loop.call_soon(again)

    world.loop.call_soon(again)
    with pytest.raises(Livelock):
        world.loop.run_until(world.loop.create_future(), 1 << 60)


def test_bytes_arrive_in_order(two: World2) -> None:
    for number in range(50):
        two.transport.write(b"%d," % number)
    two.until(3.0)
    assert two.noting.got == b"".join(b"%d," % number for number in range(50))


def test_a_cut_connection_ends_at_both_sides_after_some_of_the_bytes(two: World2) -> None:
    sent = b"".join(b"%d," % number for number in range(50))
    for number in range(50):
        two.transport.write(b"%d," % number)
    two.until(0.002)
    two.world.network.disconnect(two.transport)
    two.until(3.0)
    assert sent.startswith(two.noting.got) and two.noting.got != sent
    assert [type(each) for each in two.noting.ended] == [ConnectionResetError]


def test_data_sent_during_a_partition_of_the_network_arrives_later(two: World2) -> None:
    two.world.network.partition("server", "client")
    two.transport.write(b"late")
    two.until(10.0)
    assert two.noting.got == b""
    two.world.network.heal("server", "client")
    two.until(1.0)
    assert two.noting.got == b"late"


def test_a_killed_process_does_nothing_any_more_and_its_peer_is_told(two: World2) -> None:
    two.server.kill()
    two.until(1.0)
    two.transport.write(b"x")
    two.until(1.0)
    assert two.noting.got == b"" and len(two.noting.ended) == 1


def test_a_host_without_power_sends_nothing_until_it_is_back(two: World2) -> None:
    assert two.server.process is not None
    two.server.process.kill()
    two.world.network.power_lost(two.server.process)
    two.transport.write(b"x")
    two.until(60.0)
    assert two.noting.ended == []
    two.world.network.power_restored("server")
    two.transport.write(b"y")
    two.until(1.0)
    assert [type(each) for each in two.noting.ended] == [ConnectionResetError]


def test_a_paused_process_goes_on_where_it_was(two: World2) -> None:
    assert two.server.process is not None
    two.server.process.paused_until_us = two.world.now_us + 5_000_000
    two.transport.write(b"x")
    two.until(4.9)
    assert two.noting.got == b""
    two.until(1.0)
    assert two.noting.got == b"x"


def test_shrinking_keeps_the_faults_that_are_needed() -> None:
    faults = tuple(Fault(number, "disconnect", "broker", 0, 0) for number in range(10))
    scenario = replace(scenario_for(0), faults=faults)

    def played(given: Scenario) -> Result:
        is_failing = {faults[2], faults[7]} <= set(given.faults)
        return Result(given, ["lost: something"] if is_failing else [], "", [])

    assert shrink(played(scenario), played).scenario.faults == (faults[2], faults[7])


def test_seeds_as_they_are_asked_for() -> None:
    assert (parse_seeds("3..5"), parse_seeds("4")) == (range(3, 6), range(4))
    with pytest.raises(ConfigError, match="A\\.\\.B"):
        parse_seeds("x")
