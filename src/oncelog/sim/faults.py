"""What goes wrong: faults as values, and what each kind does to a stage.

A fault begins at `at_ms` and is over after `span_ms`, when its cause is taken away again. One more or one
less leaves the others as they are, so that a failing list can be made shorter.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from oncelog.sim.world import BROKER_HOST

if TYPE_CHECKING:
    from oncelog.sim.stage import Stage


class Fault(NamedTuple):
    """`target`: a host. `amount`: what it means depends on the kind."""

    at_ms: int
    kind: str
    target: str
    span_ms: int
    amount: int

    def __str__(self) -> str:
        return f"{self.at_ms:>7} ms  {self.kind:<14} {self.target:<10} for {self.span_ms} ms, {self.amount}"


Happening = Callable[["Stage", Fault], Awaitable[None]]


async def _span(fault: Fault) -> None:
    await asyncio.sleep(fault.span_ms / 1000)


async def kill_broker(stage: Stage, fault: Fault) -> None:
    stage.broker.kill()
    await _span(fault)
    stage.broker.start_again()


async def cut_power(stage: Stage, fault: Fault) -> None:
    stage.broker.kill(lose_power=True)
    await _span(fault)
    stage.broker.start_again()


async def kill_in_write(stage: Stage, fault: Fault) -> None:
    """SIGKILL after `amount` more bytes and changes on the disk."""
    stage.broker.crash_after(fault.amount, lose_power=False)
    await _span(fault)
    stage.broker.survive()
    stage.broker.start_again()


async def cut_power_in_write(stage: Stage, fault: Fault) -> None:
    stage.broker.crash_after(fault.amount, lose_power=True)
    await _span(fault)
    stage.broker.survive()
    stage.broker.start_again()


async def stop_broker(stage: Stage, fault: Fault) -> None:
    await stage.broker.stop()
    await _span(fault)
    stage.broker.start_again()


async def kill_client(stage: Stage, fault: Fault) -> None:
    host = stage.world.hosts[fault.target]
    host.kill()
    await _span(fault)
    host.start_again()


async def pause(stage: Stage, fault: Fault) -> None:
    """A process stands still, as in SIGSTOP, and then goes on as if nothing had been."""
    process = stage.world.hosts[fault.target].process
    if process is not None:
        process.paused_until_us = max(process.paused_until_us, stage.world.now_us + fault.span_ms * 1000)
    await _span(fault)


async def part(stage: Stage, fault: Fault) -> None:
    """No bytes between a client and the broker; they are not lost, but late."""
    stage.world.network.part(BROKER_HOST, fault.target)
    await _span(fault)
    stage.world.network.join(BROKER_HOST, fault.target)


async def cut_connections(stage: Stage, fault: Fault) -> None:
    for transport in stage.world.network.connections():
        if fault.target in (BROKER_HOST, transport.process.name):
            stage.world.network.cut(transport)


async def repeat_connection(stage: Stage, fault: Fault) -> None:
    """Everything a client has sent on a connection, perhaps long ago, arrives once more, on another one."""
    await _span(fault)
    sent = stage.world.network.sent_by.get(fault.target)
    if sent:
        await stage.repeat(bytes(sent[fault.amount % len(sent)]))


async def bad_network(stage: Stage, fault: Fault) -> None:
    """Of 1,000 writes `amount` end their connection; more are slow."""
    weather = stage.world.network.weather
    before = weather.cut_chance, weather.slow_chance
    weather.cut_chance, weather.slow_chance = fault.amount / 1000, 0.2
    await _span(fault)
    weather.cut_chance, weather.slow_chance = before


async def full_disk(stage: Stage, fault: Fault) -> None:
    """`amount` more bytes can be written."""
    disk = stage.broker.disk
    disk.capacity_bytes = disk.used_bytes() + fault.amount
    await _span(fault)
    disk.capacity_bytes = stage.broker.disk.capacity_bytes = None


async def broken_disk(stage: Stage, fault: Fault) -> None:
    """Writes or syncs fail. What could not be synced is offline until the broker is started again."""
    disk, what = stage.broker.disk, (("write", ".log"), ("sync", ".log"))[fault.amount % 2]
    disk.errors[what] = errno.EIO
    await _span(fault)
    disk.errors.pop(what, None)
    stage.broker.kill()
    stage.broker.start_again()


async def slow_disk(stage: Stage, fault: Fault) -> None:
    """What runs in threads, syncs above all, takes up to `amount` ms."""
    stage.world.loop.pause_limit_s = fault.amount / 1000
    await _span(fault)
    stage.world.loop.pause_limit_s = stage.world.loop.usual_pause_limit_s


async def set_clock(stage: Stage, fault: Fault) -> None:
    stage.world.hosts[fault.target].set_clock(fault.amount)


class _Kind(NamedTuple):
    """`weight`: how often. `span_ms`, `amount`: drawn from between."""

    happening: Happening
    weight: int
    span_ms: tuple[int, int]
    amount: tuple[int, int] = (0, 0)
    targets: str = "broker"


KINDS: dict[str, _Kind] = {
    "kill": _Kind(kill_broker, 4, (0, 8_000)),
    "power": _Kind(cut_power, 4, (0, 8_000)),
    "kill-in-write": _Kind(kill_in_write, 4, (200, 8_000), (0, 3_000)),
    "power-in-write": _Kind(cut_power_in_write, 4, (200, 8_000), (0, 3_000)),
    "stop": _Kind(stop_broker, 1, (0, 2_000)),
    "kill-client": _Kind(kill_client, 4, (0, 3_000), targets="clients"),
    "pause": _Kind(pause, 4, (100, 15_000), targets="all"),
    "part": _Kind(part, 4, (50, 20_000), targets="clients"),
    "cut": _Kind(cut_connections, 6, (0, 0), targets="all"),
    "repeat": _Kind(repeat_connection, 5, (0, 8_000), (0, 9), targets="clients"),
    "bad-network": _Kind(bad_network, 4, (500, 15_000), (5, 150)),
    "full-disk": _Kind(full_disk, 1, (500, 5_000), (0, 3_000)),
    "broken-disk": _Kind(broken_disk, 1, (100, 3_000), (0, 1)),
    "slow-disk": _Kind(slow_disk, 2, (500, 8_000), (20, 1_500)),
    "clock": _Kind(set_clock, 2, (0, 0), (-3_600_000, 3_600_000), targets="all"),
}
POWER = ("power", "power-in-write")


def draw_faults(
    chance: Random, count: int, until_ms: int, clients: list[str], *, loses_power: bool
) -> list[Fault]:
    """Of every kind that this world has, in the order of time."""
    names = [name for name in KINDS if loses_power or name not in POWER]
    weights = [KINDS[name].weight for name in names]
    targets = {"broker": [BROKER_HOST], "clients": clients, "all": [BROKER_HOST, *clients]}
    faults = []
    for name in chance.choices(names, weights, k=count):
        kind = KINDS[name]
        fault = Fault(
            chance.randrange(until_ms),
            name,
            chance.choice(targets[kind.targets]),
            chance.randint(*kind.span_ms),
            chance.randint(*kind.amount),
        )
        faults.append(fault)
    return sorted(faults)


async def happen(stage: Stage, fault: Fault) -> None:
    """Bring a fault about, and take it away again."""
    await asyncio.sleep(fault.at_ms / 1000)
    stage.world.note("fault", f"{fault.kind} {fault.target} for {fault.span_ms} ms ({fault.amount})")
    await KINDS[fault.kind].happening(stage, fault)
