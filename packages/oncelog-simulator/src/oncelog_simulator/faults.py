"""What goes wrong: faults as values, and what each kind does to a simulation.

A fault begins at `at_ms` and is over after `span_ms`, when its cause is taken away again. One more or one
less leaves the others as they are, so that a failing list can be made shorter.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Collection
from contextvars import copy_context
from functools import partial
from random import Random
from typing import Any, NamedTuple, Protocol

from oncelog.wire.header import verify_crc
from oncelog_simulator.event_loop import PROCESS, Process
from oncelog_simulator.network import NetworkConditions
from oncelog_simulator.world import BROKER_HOST, BROKER_PORT, BrokerHost, World

BATCH_HEAD_BYTES, CRC_FROM = 61, 21
"""A record batch's smallest size, and the first byte of it that its checksum covers."""


class Fault(NamedTuple):
    """`target`: a host. `amount`: what it means depends on the kind."""

    at_ms: int
    kind: str
    target: str
    span_ms: int
    amount: int

    def __str__(self) -> str:
        return f"{self.at_ms:>7} ms  {self.kind:<14} {self.target:<10} for {self.span_ms} ms, {self.amount}"


class Disturbed(Protocol):
    """What faults act on: a Simulation, or a Scene."""

    world: World
    broker: BrokerHost


Happening = Callable[[Disturbed, Fault], Awaitable[None]]


async def _span(fault: Fault) -> None:
    await asyncio.sleep(fault.span_ms / 1000)


async def kill_broker(simulation: Disturbed, fault: Fault) -> None:
    simulation.broker.kill()
    await _span(fault)
    simulation.broker.start_again()


async def cut_power(simulation: Disturbed, fault: Fault) -> None:
    simulation.broker.kill(lose_power=True)
    await _span(fault)
    simulation.broker.start_again()


async def kill_in_write(simulation: Disturbed, fault: Fault) -> None:
    """SIGKILL after `amount` more bytes and changes on the disk."""
    simulation.broker.crash_after(fault.amount, lose_power=False)
    await _span(fault)
    simulation.broker.survive()
    simulation.broker.start_again()


async def cut_power_in_write(simulation: Disturbed, fault: Fault) -> None:
    simulation.broker.crash_after(fault.amount, lose_power=True)
    await _span(fault)
    simulation.broker.survive()
    simulation.broker.start_again()


async def stop_broker(simulation: Disturbed, fault: Fault) -> None:
    await simulation.broker.stop()
    await _span(fault)
    simulation.broker.start_again()


async def kill_client(simulation: Disturbed, fault: Fault) -> None:
    host = simulation.world.hosts[fault.target]
    host.kill()
    await _span(fault)
    host.start_again()


async def pause(simulation: Disturbed, fault: Fault) -> None:
    """A process stands still, as in SIGSTOP, and then goes on as if nothing had been."""
    process = simulation.world.hosts[fault.target].process
    if process is not None:
        process.paused_until_us = max(process.paused_until_us, simulation.world.now_us + fault.span_ms * 1000)
    await _span(fault)


async def part(simulation: Disturbed, fault: Fault) -> None:
    """No bytes between a client and the broker; they are not lost, but late."""
    simulation.world.network.part(BROKER_HOST, fault.target)
    await _span(fault)
    simulation.world.network.join(BROKER_HOST, fault.target)


async def cut_connections(simulation: Disturbed, fault: Fault) -> None:
    for transport in simulation.world.network.connections():
        if fault.target in (BROKER_HOST, transport.process.name):
            simulation.world.network.cut(transport)


async def repeat_connection(simulation: Disturbed, fault: Fault) -> None:
    """Everything a client has sent on a connection, perhaps long ago, arrives once more, on another one."""
    await _span(fault)
    sent = simulation.world.network.sent_by.get(fault.target)
    if sent:
        await _deliver_again(simulation.world, bytes(sent[fault.amount % len(sent)]))


async def _deliver_again(world: World, data: bytes) -> None:
    """Deliver a client's bytes once more; nobody hears the answers."""
    process = Process("echo")
    context = copy_context()
    context.run(PROCESS.set, process)

    async def send() -> None:
        loop: Any = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(asyncio.Protocol, BROKER_HOST, BROKER_PORT)
        except OSError:
            return
        transport.write(data)

    world.loop.create_task(send(), context=context)


async def flip_in_batches(simulation: Disturbed, fault: Fault) -> None:
    """Flip a bit in `amount` of 100 record batches from or to a client, where the checksum covers it."""
    network = simulation.world.network
    network.harmed[fault.target] = partial(
        harm_batches, rng=simulation.world.chance(f"flips at {fault.at_ms}"), percent=fault.amount
    )
    await _span(fault)
    network.harmed.pop(fault.target, None)


def harm_batches(data: bytes, *, rng: Random, percent: int) -> bytes:
    """Return what arrives of a write. Only bytes that a batch's checksum covers change."""
    harmed = bytearray(data)
    position = 0
    while position + BATCH_HEAD_BYTES <= len(harmed):
        size = int.from_bytes(harmed[position + 8 : position + 12]) + 12
        is_possible = harmed[position + 16] == 2 and BATCH_HEAD_BYTES <= size <= len(harmed) - position
        if not (is_possible and verify_crc(memoryview(bytes(harmed)), position, size)):
            position += 1
            continue
        if rng.randrange(100) < percent:
            harmed[position + rng.randrange(CRC_FROM, size)] ^= 1 << rng.randrange(8)
        position += size
    return bytes(harmed)


async def bad_network(simulation: Disturbed, fault: Fault) -> None:
    """Of 1,000 writes `amount` end their connection; more are slow."""
    network = simulation.world.network
    conditions = network.conditions = NetworkConditions(slow_chance=0.2, cut_chance=fault.amount / 1000)
    await _span(fault)
    if network.conditions is conditions:  # else a later fault of this kind still lasts
        network.conditions = NetworkConditions()


async def full_disk(simulation: Disturbed, fault: Fault) -> None:
    """`amount` more bytes can be written."""
    disk = simulation.broker.disk
    disk.capacity_bytes = disk.used_bytes() + fault.amount
    await _span(fault)
    disk.capacity_bytes = simulation.broker.disk.capacity_bytes = None


async def broken_disk(simulation: Disturbed, fault: Fault) -> None:
    """Writes or syncs fail. What could not be synced is offline until the broker is started again."""
    disk, what = simulation.broker.disk, (("write", ".log"), ("sync", ".log"))[fault.amount % 2]
    disk.errors[what] = errno.EIO
    await _span(fault)
    disk.errors.pop(what, None)
    simulation.broker.kill()
    simulation.broker.start_again()


async def fail_syncs(simulation: Disturbed, fault: Fault) -> None:
    """Syncs of one kind of files fail; what they should have written stays readable and never is on the disk.

    The broker is started again afterwards, on pages that are clean and not durable.
    """
    disk, what = simulation.broker.disk, ("sync", SYNCED_FILES[fault.amount])
    disk.errors[what] = errno.EIO
    await _span(fault)
    disk.errors.pop(what, None)
    await asyncio.sleep(fault.span_ms / 2000)  # what a process does that forgets the failure
    simulation.broker.kill()
    simulation.broker.start_again()


async def slow_disk(simulation: Disturbed, fault: Fault) -> None:
    """What runs in threads, syncs above all, takes up to `amount` ms."""
    simulation.world.loop.pause_limit_s = fault.amount / 1000
    await _span(fault)
    simulation.world.loop.pause_limit_s = simulation.world.loop.usual_pause_limit_s


async def set_clock(simulation: Disturbed, fault: Fault) -> None:
    simulation.world.hosts[fault.target].set_clock(fault.amount)


SYNCED_FILES = (
    ".log",
    ".index",
    ".timeindex",
    ".txnindex",
    ".snapshot.tmp",
    "leader-epoch-checkpoint",
    "partition.metadata",
    "checkpoint.new",
    ".json",
    "-0",  # the directory of a partition
    "",  # everything
)
"""Ends of the paths whose syncs fail."""
FAILED_SYNC_CHANCE = 0.12


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
    # Drawn apart (simulation.py), so that seeds without it stay as they are.
    "flip-in-batch": _Kind(flip_in_batches, 0, (1_000, 20_000), (10, 60), targets="clients"),
    # Weight 0: drawn by dice of its own, `draw_failed_syncs`.
    "failed-sync": _Kind(fail_syncs, 0, (100, 5_000), (0, len(SYNCED_FILES) - 1)),
}
POWER = ("power", "power-in-write")
REFUSED_WRITES = ("full-disk", "broken-disk", "failed-sync")
"""Faults with which the disk refuses writes or syncs."""


def draw_faults(
    chance: Random,
    count: int,
    until_ms: int,
    clients: list[str],
    *,
    loses_power: bool,
    kinds: Collection[str] = tuple(KINDS),
) -> list[Fault]:
    """Of all `kinds` that this world has, in the order of time."""
    names = [name for name in KINDS if name in kinds and (loses_power or name not in POWER)]
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


def draw_failed_syncs(chance: Random, until_ms: int) -> list[Fault]:
    """Return the failing syncs of a seed, none for most."""
    if chance.random() >= FAILED_SYNC_CHANCE:
        return []
    kind, faults = KINDS["failed-sync"], []
    for _ in range(chance.choice((1, 2, 4))):
        at_ms, span_ms = chance.randrange(until_ms), chance.randint(*kind.span_ms)
        faults.append(Fault(at_ms, "failed-sync", BROKER_HOST, span_ms, chance.randint(*kind.amount)))
    return faults


async def happen(simulation: Disturbed, fault: Fault) -> None:
    """Bring a fault about, and take it away again."""
    await asyncio.sleep(fault.at_ms / 1000)
    simulation.world.note("fault", f"{fault.kind} {fault.target} for {fault.span_ms} ms ({fault.amount})")
    await KINDS[fault.kind].happening(simulation, fault)
