"""Faults as values, and the effect of each kind on a simulation.

A fault begins at `at_ms`, and its cause is removed after `span_ms`. Each fault is independent of the others,
so a failing list of faults can be made shorter.
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
"""The smallest size of a record batch, and the position of the first byte that its checksum covers."""


class Fault(NamedTuple):
    """A fault. `target` names a host. The meaning of `amount` depends on the kind."""

    at_ms: int
    kind: str
    target: str
    span_ms: int
    amount: int

    def __str__(self) -> str:
        return f"{self.at_ms:>7} ms  {self.kind:<14} {self.target:<10} for {self.span_ms} ms, {self.amount}"


class FaultTarget(Protocol):
    """A simulation on which faults act: a Simulation or a ClientSimulation."""

    world: World
    broker: BrokerHost


FaultAction = Callable[[FaultTarget, Fault], Awaitable[None]]


async def _span(fault: Fault) -> None:
    await asyncio.sleep(fault.span_ms / 1000)


async def kill_broker(simulation: FaultTarget, fault: Fault) -> None:
    simulation.broker.kill()
    await _span(fault)
    simulation.broker.start_if_down()


async def cut_power(simulation: FaultTarget, fault: Fault) -> None:
    simulation.broker.kill(lose_power=True)
    await _span(fault)
    simulation.broker.start_if_down()


async def kill_in_write(simulation: FaultTarget, fault: Fault) -> None:
    """Kill the broker after `amount` more bytes and other changes on the disk."""
    simulation.broker.crash_after(fault.amount, lose_power=False)
    await _span(fault)
    simulation.broker.cancel_crash()
    simulation.broker.start_if_down()


async def cut_power_in_write(simulation: FaultTarget, fault: Fault) -> None:
    simulation.broker.crash_after(fault.amount, lose_power=True)
    await _span(fault)
    simulation.broker.cancel_crash()
    simulation.broker.start_if_down()


async def stop_broker(simulation: FaultTarget, fault: Fault) -> None:
    await simulation.broker.stop()
    await _span(fault)
    simulation.broker.start_if_down()


async def kill_client(simulation: FaultTarget, fault: Fault) -> None:
    host = simulation.world.hosts[fault.target]
    host.kill()
    await _span(fault)
    host.start_if_down()


async def pause(simulation: FaultTarget, fault: Fault) -> None:
    """Pause a process, as SIGSTOP does. It continues as if nothing had happened."""
    process = simulation.world.hosts[fault.target].process
    if process is not None:
        process.paused_until_us = max(process.paused_until_us, simulation.world.now_us + fault.span_ms * 1000)
    await _span(fault)


async def partition_client(simulation: FaultTarget, fault: Fault) -> None:
    """Partition a client from the broker. Bytes are not lost; they arrive after the fault."""
    simulation.world.network.partition(BROKER_HOST, fault.target)
    await _span(fault)
    simulation.world.network.heal(BROKER_HOST, fault.target)


async def disconnect_clients(simulation: FaultTarget, fault: Fault) -> None:
    for transport in simulation.world.network.connections():
        if fault.target in (BROKER_HOST, transport.process.name):
            simulation.world.network.disconnect(transport)


async def repeat_connection(simulation: FaultTarget, fault: Fault) -> None:
    """Deliver all bytes that a client has sent on one connection again, on a new connection."""
    await _span(fault)
    sent = simulation.world.network.sent_by.get(fault.target)
    if sent:
        await _deliver_again(simulation.world, bytes(sent[fault.amount % len(sent)]))


async def _deliver_again(world: World, data: bytes) -> None:
    """Send a client's bytes a second time, and ignore the responses."""
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


async def flip_in_batches(simulation: FaultTarget, fault: Fault) -> None:
    """Flip one bit in `amount` percent of the record batches from or to a client.

    The bit is in the bytes that the batch's checksum covers.
    """
    network = simulation.world.network
    network.harmed[fault.target] = partial(
        harm_batches, rng=simulation.world.rng(f"flips at {fault.at_ms}"), percent=fault.amount
    )
    await _span(fault)
    network.harmed.pop(fault.target, None)


def harm_batches(data: bytes, *, rng: Random, percent: int) -> bytes:
    """Return the bytes of a write with flipped bits. Only bytes that a batch's checksum covers change."""
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


async def bad_network(simulation: FaultTarget, fault: Fault) -> None:
    """Let `amount` of 1,000 writes cut the connection that they are written to, and delay other writes."""
    network = simulation.world.network
    conditions = network.conditions = NetworkConditions(
        slow_chance=0.2, disconnect_chance=fault.amount / 1000
    )
    await _span(fault)
    # If a later fault of this kind has replaced the conditions, that fault also restores them.
    if network.conditions is conditions:
        network.conditions = NetworkConditions()


async def full_disk(simulation: FaultTarget, fault: Fault) -> None:
    """Make the disk full after `amount` more bytes."""
    disk = simulation.broker.disk
    disk.capacity_bytes = disk.used_bytes() + fault.amount
    await _span(fault)
    disk.capacity_bytes = simulation.broker.disk.capacity_bytes = None


async def broken_disk(simulation: FaultTarget, fault: Fault) -> None:
    """Fail writes or syncs of log files, then restart the broker.

    A partition that could not be synced is offline until that restart.
    """
    disk, what = simulation.broker.disk, (("write", ".log"), ("sync", ".log"))[fault.amount % 2]
    disk.errors[what] = errno.EIO
    await _span(fault)
    disk.errors.pop(what, None)
    simulation.broker.kill()
    simulation.broker.start_if_down()


async def fail_syncs(simulation: FaultTarget, fault: Fault) -> None:
    """Fail the syncs of one kind of file.

    Data whose sync failed stays readable but never becomes durable: the operating system marks its pages as
    clean. The restarted broker reads this data, and a later power loss removes it.
    """
    disk, what = simulation.broker.disk, ("sync", SYNCED_FILES[fault.amount])
    disk.errors[what] = errno.EIO
    await _span(fault)
    disk.errors.pop(what, None)
    # Give the broker time to act on the failure before the restart.
    await asyncio.sleep(fault.span_ms / 2000)
    simulation.broker.kill()
    simulation.broker.start_if_down()


async def slow_disk(simulation: FaultTarget, fault: Fault) -> None:
    """Delay the start and the result of each executor job, such as a sync, by up to `amount` ms."""
    simulation.world.loop.pause_limit_s = fault.amount / 1000
    await _span(fault)
    simulation.world.loop.pause_limit_s = simulation.world.loop.usual_pause_limit_s


async def set_clock(simulation: FaultTarget, fault: Fault) -> None:
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
    "-0",  # end of the name of a partition's directory
    "",  # matches every path
)
"""Suffixes of paths. A `failed-sync` fault draws one of them, and the syncs of paths with it fail."""
FAILED_SYNC_CHANCE = 0.12


class _Kind(NamedTuple):
    """A kind of fault. `weight` is its relative frequency. `span_ms` and `amount` are ranges to draw from."""

    action: FaultAction
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
    "partition": _Kind(partition_client, 4, (50, 20_000), targets="clients"),
    "disconnect": _Kind(disconnect_clients, 6, (0, 0), targets="all"),
    "repeat": _Kind(repeat_connection, 5, (0, 8_000), (0, 9), targets="clients"),
    "bad-network": _Kind(bad_network, 4, (500, 15_000), (5, 150)),
    "full-disk": _Kind(full_disk, 1, (500, 5_000), (0, 3_000)),
    "broken-disk": _Kind(broken_disk, 1, (100, 3_000), (0, 1)),
    "slow-disk": _Kind(slow_disk, 2, (500, 8_000), (20, 1_500)),
    "clock": _Kind(set_clock, 2, (0, 0), (-3_600_000, 3_600_000), targets="all"),
    # simulation.py draws this kind with a separate generator, so that seeds without it stay the same.
    "flip-in-batch": _Kind(flip_in_batches, 0, (1_000, 20_000), (10, 60), targets="clients"),
    # `draw_failed_syncs` draws this kind with a separate generator, for the same reason.
    "failed-sync": _Kind(fail_syncs, 0, (100, 5_000), (0, len(SYNCED_FILES) - 1)),
}
POWER = ("power", "power-in-write")
REFUSED_WRITES = ("full-disk", "broken-disk", "failed-sync")
"""Faults during which the disk refuses writes or syncs."""


def draw_faults(
    rng: Random,
    count: int,
    until_ms: int,
    clients: list[str],
    *,
    loses_power: bool,
    kinds: Collection[str] = tuple(KINDS),
) -> list[Fault]:
    """Draw faults of the given kinds, in the order of time.

    Seeds without power losses get no kind that cuts the power.
    """
    names = [name for name in KINDS if name in kinds and (loses_power or name not in POWER)]
    weights = [KINDS[name].weight for name in names]
    targets = {"broker": [BROKER_HOST], "clients": clients, "all": [BROKER_HOST, *clients]}
    faults = []
    for name in rng.choices(names, weights, k=count):
        kind = KINDS[name]
        fault = Fault(
            rng.randrange(until_ms),
            name,
            rng.choice(targets[kind.targets]),
            rng.randint(*kind.span_ms),
            rng.randint(*kind.amount),
        )
        faults.append(fault)
    return sorted(faults)


def draw_failed_syncs(rng: Random, until_ms: int) -> list[Fault]:
    """Draw the failing syncs of a seed. Most seeds have none."""
    if rng.random() >= FAILED_SYNC_CHANCE:
        return []
    kind, faults = KINDS["failed-sync"], []
    for _ in range(rng.choice((1, 2, 4))):
        at_ms, span_ms = rng.randrange(until_ms), rng.randint(*kind.span_ms)
        faults.append(Fault(at_ms, "failed-sync", BROKER_HOST, span_ms, rng.randint(*kind.amount)))
    return faults


async def apply_fault(simulation: FaultTarget, fault: Fault) -> None:
    """Apply a fault, and remove its cause after its span."""
    await asyncio.sleep(fault.at_ms / 1000)
    simulation.world.note("fault", f"{fault.kind} {fault.target} for {fault.span_ms} ms ({fault.amount})")
    await KINDS[fault.kind].action(simulation, fault)
