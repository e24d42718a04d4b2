"""One simulated world: hosts on a network, what they note, and what is found wrong.

Everything happens on one loop. `note` is the world's memory: the timeline that people read, and the digest by
which two runs are compared.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from random import Random
from typing import Any, NamedTuple

from oncelog.broker.append_events import AppendEvent
from oncelog.broker.settings.listeners import parse_listeners
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import KafkaStorageError, StorageError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.runtime.clock import Clock
from oncelog.runtime.event_log import logger as broker_log
from oncelog.runtime.system import set_runtime
from oncelog.server.embedded import RunningBroker, recover_node
from oncelog.testing.memory_disk import MemoryDisk
from oncelog_simulator.event_loop import PROCESS, Process, SimLoop
from oncelog_simulator.expected_errors import Excuses
from oncelog_simulator.history.check import Operation
from oncelog_simulator.jobs import Jobs
from oncelog_simulator.network import Network, SimTransport
from oncelog_simulator.runtime import SimRuntime

BROKER_HOST, BROKER_PORT = "broker", 9092
SERVERS = f"{BROKER_HOST}:{BROKER_PORT}"
START_AGAIN_SECONDS = 2.0
"""So long after a start that may crash the next one comes."""


class Event(NamedTuple):
    """A line of the timeline."""

    at_us: int
    who: str
    text: str

    def __str__(self) -> str:
        return f"{self.at_us / 1e6:12.6f}  {self.who:<12} {self.text}"


class World:
    """A seed's loop, network and notes. `violations`: what must not be, in the order it was found."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = SimLoop(self.chance("threads"))
        self.loop.jobs = Jobs(self.loop, self.chance("jobs"))
        self.network = Network(self.loop, self.chance("network"))
        self.loop.network = self.network
        self.loop.on_error = self._unhandled
        self.network.on_arrival = self._arrived
        self.timeline: list[Event] = []
        self.violations: list[str] = []
        self.history: list[Operation] = []
        self.hosts: dict[str, Host] = {}
        self.byte_count = 0
        self.is_over = False
        self.excuses = Excuses()
        """What faults explain, for clients that are interrupted."""
        self._digest = hashlib.blake2b(digest_size=16)

    def chance(self, name: str) -> Random:
        """Dice of their own for everything that is drawn, so that one fault less leaves the others alone."""
        return Random(f"{self.seed}/{name}")

    @property
    def now_us(self) -> int:
        return self.loop.now_us

    @property
    def digest(self) -> str:
        """Of everything that was noted and delivered so far."""
        return self._digest.hexdigest()

    def later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """Call it then, whatever becomes of the process that asks for it."""
        context = copy_context()
        context.run(PROCESS.set, None)
        self.loop.call_later(seconds, function, *args, context=context)

    def note(self, who: str, text: str) -> None:
        event = Event(self.loop.now_us, who, text)
        self.timeline.append(event)
        self._digest.update(str(event).encode())

    def violate(self, rule: str, text: str) -> None:
        """Something that must not be; each text is told once."""
        told = f"{rule}: {text}"
        if not self.is_over and told not in self.violations:
            self.violations.append(told)
            self.note("VIOLATION", told)

    def _unhandled(self, text: str, error: BaseException | None) -> None:
        self.violate("unhandled error", f"{text} {error!r}")

    def _arrived(self, transport: SimTransport, data: bytes | None) -> None:
        digest = self._digest
        digest.update(b"%d %d" % (self.loop.now_us, transport.number))
        if data is not None:
            digest.update(data)
            self.byte_count += len(data)


class Host:
    """A computer: a process at a time, and a wall clock that it keeps over them."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.wall_offset_ns = 0
        self.start_count = 0
        self.process: Process | None = None
        self.runtime: SimRuntime | None = None
        world.hosts[name] = self

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_alive

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """A new process that begins with `main`."""
        self.start_count += 1
        self.process = Process(self.name)
        self.runtime = SimRuntime(self.world.loop, self.world.chance(f"{self.name}#{self.start_count}"))
        self.runtime.wall_offset_ns = self.wall_offset_ns
        context = copy_context()
        context.run(PROCESS.set, self.process)
        context.run(set_runtime, self.runtime)
        self.world.note(self.name, f"starts (process {self.start_count})")
        return self.world.loop.create_task(main(), context=context)

    def start(self) -> None:
        """Begin a process."""
        raise NotImplementedError

    def start_again(self) -> None:
        """Unless it runs."""
        if not self.is_up:
            self.start()

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.is_alive:
            self.world.note(self.name, "is killed")
            self.process.kill()
            self.world.network.died(self.process)

    def set_clock(self, by_ms: int) -> None:
        """The wall clock is set forward or back."""
        self.wall_offset_ns += by_ms * 1_000_000
        if self.runtime is not None:
            self.runtime.wall_offset_ns = self.wall_offset_ns
        self.world.note(self.name, f"clock set by {by_ms} ms")


class BrokerHost(Host):
    """The host of a broker, with its disk. `node` is that of the process that runs, None without."""

    def __init__(self, world: World, settings: dict[str, object], limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(world, BROKER_HOST)
        self.limits = limits
        self.settings = BROKER.parse({"listeners": SERVERS, **settings})
        self.disk = MemoryDisk()
        self.node: BrokerState | None = None
        self.running: RunningBroker | None = None
        self.before_end: Callable[..., object] = lambda *, is_in_write, lose_power: None
        """Called while the node that is about to end can still be looked at."""
        self.on_recovered: Callable[[BrokerState], object] = lambda node: None
        self.may_refuse: Callable[[Exception], bool] = lambda error: False
        """True for an error with which a start may be refused."""
        self.is_refused = False
        self.start_crashes: list[tuple[int, bool]] = []
        """Steps of the disk after which the next starts end, with True by a power loss."""
        self.on_stored: Callable[[AppendEvent], object] = lambda event: None
        """Called at every Produce verdict."""
        self.was_stopped = False
        """True when the last process ended by a complete stop."""
        self._lost_power = False
        self._past: list[tuple[BrokerState | None, MemoryDisk]] = []
        """Kept, for what a killed node would do when it is freed no killed node does."""

    def start(self) -> None:
        """A broker on what the last one left on the disk. A failure to start is a violation."""
        assert not self.is_up
        if self.start_count:
            self._past.append((None, self.disk))
            chance = self.world.chance(f"disk#{self.start_count}")
            self.disk = self.disk.after_power_loss(chance) if self._lost_power else self.disk.after_kill()
        self._lost_power = False
        if self.world.loop.jobs.settings.share:
            self.disk.on_turn = self.world.loop.jobs.on_disk
        self.world.network.powered(self.name)
        if self.start_crashes:
            steps, lose_power = self.start_crashes.pop(0)
            self.crash_after(steps, lose_power=lose_power)
            self.world.later(START_AGAIN_SECONDS, self._outlive_crash)
        self.run(self._main)

    def _outlive_crash(self) -> None:
        """Start again after a start that ended; one that has come to its end continues."""
        self.survive()
        self.start_again()

    async def _main(self) -> None:
        try:
            clock = Clock()
            node = recover_node(self.disk, self.settings, clock, self._judged, self.limits)
            self.on_recovered(node)
            self.node, self.was_stopped = node, False
            listeners = parse_listeners(self.settings, BROKER_HOST)
            listen = self.world.loop.create_server
            self.running = RunningBroker(node, clock, listeners, listen=listen)
            await self.running.start()
        except Exception as error:
            if self.may_refuse(error):
                self.world.note(self.name, f"does not start: {error}")
                self.is_refused = True
            else:
                self.world.violate("broker does not start", repr(error))

    def _judged(self, event: AppendEvent) -> None:
        self.on_stored(event)
        if event.verdict != "stored":
            who = f"id {event.producer_id} epoch {event.producer_epoch} sequence {event.base_sequence}"
            what = event.reason if event.verdict == "refused" else f"is at {event.base_offset}"
            text = f"{event.verdict}: {event.topic}-{event.partition} {who} of {event.client_id}: {what}"
            self.world.note(self.name, text)

    def kill(self, *, lose_power: bool = False) -> None:
        """SIGKILL, or the plug is pulled."""
        if not self.is_up:
            return
        self.disk.die()
        self._end(is_in_write=False, lose_power=lose_power)

    def crash_after(self, steps: int, *, lose_power: bool) -> None:
        """Die in the middle of a write, so many bytes and other changes to the disk from now."""
        self.disk.crash_after = self.disk.steps + steps
        self.disk.on_crash = lambda: self._end(is_in_write=True, lose_power=lose_power)

    def survive(self) -> None:
        """The crash that was to come does not."""
        self.disk.crash_after = None

    def _end(self, *, is_in_write: bool, lose_power: bool) -> None:
        assert self.process is not None
        self.before_end(is_in_write=is_in_write, lose_power=lose_power)
        self._past.append((self.node, self.disk))
        self.node = self.running = None
        self._lost_power, self.was_stopped = lose_power, False
        self.process.kill()
        if lose_power:
            self.world.note(self.name, "loses power")
            self.world.network.lost_power(self.process)
        else:
            self.world.note(self.name, "is killed")
            self.world.network.died(self.process)

    def release(self) -> None:
        """The world is over."""
        for _, disk in self._past:
            disk.release()

    def replace_disk(self, disk: MemoryDisk) -> None:
        """Put a copy in the place of the disk while the broker is down."""
        assert not self.is_up
        self._past.append((None, self.disk))
        self.disk, self._lost_power = disk, False

    async def stop(self) -> None:
        """SIGTERM, and the end; a second one meanwhile changes nothing."""
        running, self.running = self.running, None
        if running is None or self.process is None:
            return
        process = self.process
        self.world.note(self.name, "is told to stop")
        self.before_end(is_in_write=True, lose_power=False)
        context = copy_context()
        context.run(PROCESS.set, process)
        assert self.runtime is not None
        context.run(set_runtime, self.runtime)
        stopping = self.world.loop.create_task(running.stop(), context=context)
        while not stopping.done() and process.is_alive:
            await asyncio.sleep(0.01)
        if process.is_alive:
            error = stopping.exception()
            if isinstance(error, StorageError | KafkaStorageError | OSError):
                self.world.note(
                    self.name, f"stops with {error!r}"
                )  # a broken disk, and nothing is lost by it
            elif error is not None:
                self.world.violate("broker does not stop", repr(error))
            self.was_stopped, self.node = error is None, None
            process.kill()
            self.world.network.died(process)


class Listening(logging.Handler):
    """Turns what the product logs as an error of its own into a violation."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.world.note("log", text)

    def __enter__(self) -> Listening:
        for name in (broker_log.name, "oncelog.producer"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in (broker_log.name, "oncelog.producer"):
            logging.getLogger(name).removeHandler(self)
