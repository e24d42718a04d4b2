"""One simulated world: the hosts on a network, the timeline of events, and the violations.

Everything runs on one event loop. `World.note` adds an event to the timeline, which the command line prints.
It also adds the event to the digest. Two runs are the same if their digests are equal.
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
from oncelog_simulator.expected_errors import ExpectedErrors
from oncelog_simulator.history.check import Operation
from oncelog_simulator.jobs import Jobs
from oncelog_simulator.network import Network, SimTransport
from oncelog_simulator.runtime import SimRuntime

BROKER_HOST, BROKER_PORT = "broker", 9092
SERVERS = f"{BROKER_HOST}:{BROKER_PORT}"
MISSING_FILE = "no such file"
"""A part of the error of an access to a missing file. A log opens its files by name again and again, so this
error shows that it lost track of a name.
"""
RESTART_SECONDS = 2.0
"""Seconds between a start that may crash and the next start."""


class Event(NamedTuple):
    """One line of the timeline."""

    at_us: int
    host: str
    text: str

    def __str__(self) -> str:
        return f"{self.at_us / 1e6:12.6f}  {self.host:<12} {self.text}"


class World:
    """The event loop, the network, the timeline and the violations of one seed.

    `violations` lists the violated rules in the order in which they were detected.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = SimLoop(self.rng("threads"))
        self.loop.jobs = Jobs(self.loop, self.rng("jobs"))
        self.network = Network(self.loop, self.rng("network"))
        self.loop.network = self.network
        self.loop.on_error = self._unhandled
        self.network.on_arrival = self._arrived
        self.timeline: list[Event] = []
        self.violations: list[str] = []
        self.history: list[Operation] = []
        self.hosts: dict[str, Host] = {}
        self.byte_count = 0
        self.is_over = False
        self.expected_errors = ExpectedErrors()
        """The errors that this seed's faults explain, for interrupted clients."""
        self._digest = hashlib.blake2b(digest_size=16)

    def rng(self, name: str) -> Random:
        """Return a generator that only this seed and `name` determine.

        Each subject draws from its own generator, so a run without one of its faults draws everything else as
        before.
        """
        return Random(f"{self.seed}/{name}")

    @property
    def now_us(self) -> int:
        return self.loop.now_us

    @property
    def digest(self) -> str:
        """Return a digest of all events and of all bytes delivered so far."""
        return self._digest.hexdigest()

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """Call a function after some seconds, even if the calling process has died by then."""
        context = copy_context()
        context.run(PROCESS.set, None)
        self.loop.call_later(seconds, function, *args, context=context)

    def note(self, host: str, text: str) -> None:
        event = Event(self.loop.now_us, host, text)
        self.timeline.append(event)
        self._digest.update(str(event).encode())

    def violate(self, rule: str, text: str) -> None:
        """Record a violation of a rule. The same rule and text are recorded only once."""
        violation = f"{rule}: {text}"
        if not self.is_over and violation not in self.violations:
            self.violations.append(violation)
            self.note("VIOLATION", violation)

    def _unhandled(self, text: str, error: BaseException | None) -> None:
        self.violate("unhandled error", f"{text} {error!r}")

    def _arrived(self, transport: SimTransport, data: bytes | None) -> None:
        digest = self._digest
        digest.update(b"%d %d" % (self.loop.now_us, transport.number))
        if data is not None:
            digest.update(data)
            self.byte_count += len(data)


class Host:
    """A computer that runs one process at a time. Its wall clock survives its processes."""

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
        """Start a new process that runs `main`."""
        self.start_count += 1
        self.process = Process(self.name)
        self.runtime = SimRuntime(self.world.loop, self.world.rng(f"{self.name}#{self.start_count}"))
        self.runtime.wall_offset_ns = self.wall_offset_ns
        context = copy_context()
        context.run(PROCESS.set, self.process)
        context.run(set_runtime, self.runtime)
        self.world.note(self.name, f"starts (process {self.start_count})")
        return self.world.loop.create_task(main(), context=context)

    def start(self) -> None:
        """Start a process."""
        raise NotImplementedError

    def start_if_down(self) -> None:
        """Start a process if none is alive."""
        if not self.is_up:
            self.start()

    def kill(self) -> None:
        """Kill the process, as SIGKILL does."""
        if self.process is not None and self.process.is_alive:
            self.world.note(self.name, "is killed")
            self.process.kill()
            self.world.network.process_died(self.process)

    def set_clock(self, by_ms: int) -> None:
        """Change the wall clock by some milliseconds; negative values set it back."""
        self.wall_offset_ns += by_ms * 1_000_000
        if self.runtime is not None:
            self.runtime.wall_offset_ns = self.wall_offset_ns
        self.world.note(self.name, f"clock set by {by_ms} ms")


class BrokerHost(Host):
    """The computer of a broker, with its disk.

    `node` is the state of the running broker process, None while no broker runs.
    """

    def __init__(self, world: World, settings: dict[str, object], limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(world, BROKER_HOST)
        self.limits = limits
        self.settings = BROKER.parse({"listeners": SERVERS, **settings})
        self.disk = MemoryDisk()
        self.node: BrokerState | None = None
        self.running: RunningBroker | None = None
        self.before_exit: Callable[..., object] = lambda *, is_in_write, lose_power: None
        """A function that is called before the broker is killed or gets SIGTERM, while `node` is still set.
        """
        self.on_recovered: Callable[[BrokerState], object] = lambda node: None
        self.may_refuse: Callable[[Exception], bool] = lambda error: False
        """A function that returns True for an error with which the broker may refuse to start."""
        self.is_refused = False
        self.start_crashes: list[tuple[int, bool]] = []
        """The crashes of the next starts, one pair for each start.

        A pair has the number of disk operations before the crash, and True for a power loss.
        """
        self.on_stored: Callable[[AppendEvent], object] = lambda event: None
        """A function that is called with the broker's verdict on every batch of a Produce request."""
        self.was_stopped = False
        """True if the last process ended by a complete stop."""
        self._lost_power = False
        self._countdown: Callable[[str, str], object] | None = None
        """The function in the disk's `on_step` that counts the operations before a crash."""
        self._past: list[tuple[BrokerState | None, MemoryDisk]] = []
        """The states and disks of earlier processes.

        They are kept alive, because freeing them would run finalizers, which a killed process never does.
        """

    def start(self) -> None:
        """Start a broker on the files that the previous one left on the disk.

        A broker that fails to start is a violation, unless `may_refuse` allows its error.
        """
        assert not self.is_up
        if self.start_count:
            self._past.append((None, self.disk))
            rng = self.world.rng(f"disk#{self.start_count}")
            self.disk = self.disk.after_power_loss(rng) if self._lost_power else self.disk.after_kill()
        self._lost_power = False
        if self.world.loop.jobs.settings.share:
            self.disk.on_turn = self.world.loop.jobs.on_disk
        self.world.network.power_restored(self.name)
        if self.start_crashes:
            steps, lose_power = self.start_crashes.pop(0)
            self.crash_after(steps, lose_power=lose_power)
            self.world.call_later(RESTART_SECONDS, self._start_after_crash)
        self.run(self._main)

    def _start_after_crash(self) -> None:
        """Start the broker again if its start crashed. If the start has completed, cancel the crash only."""
        self.cancel_crash()
        self.start_if_down()

    async def _main(self) -> None:
        try:
            clock = Clock()
            node = recover_node(self.disk, self.settings, clock, self._on_append, self.limits)
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

    def _on_append(self, event: AppendEvent) -> None:
        self.on_stored(event)
        if event.verdict != "stored":
            producer = f"id {event.producer_id} epoch {event.producer_epoch} sequence {event.base_sequence}"
            result = event.reason if event.verdict == "refused" else f"is at {event.base_offset}"
            text = (
                f"{event.verdict}: {event.topic}-{event.partition} {producer} of {event.client_id}: {result}"
            )
            self.world.note(self.name, text)

    def kill(self, *, lose_power: bool = False) -> None:
        """Kill the process: SIGKILL, or a power loss."""
        if not self.is_up:
            return
        self.disk.die()
        self._end(is_in_write=False, lose_power=lose_power)

    def crash_after(self, steps: int, *, lose_power: bool) -> None:
        """Crash after `steps` more bytes and other changes on the disk, in the middle of a write."""
        self.disk.crash_after = self.disk.steps + steps
        self.disk.on_crash = lambda: self._end(is_in_write=True, lose_power=lose_power)

    def crash_after_operations(self, count: int, kind: str, *, lose_power: bool) -> None:
        """Crash at the next operation of a kind after `count` others: write, sync, create, rename or remove.

        A write of any size counts as one.
        """
        left = count

        def count_down(operation: str, path: str) -> None:
            nonlocal left
            left -= operation == kind
            if left < 0 and self.disk.crash_after is None:
                self.crash_after(0, lose_power=lose_power)

        self._countdown = count_down
        self.disk.on_step.append(count_down)

    def cancel_crash(self) -> None:
        """Cancel a scheduled crash that has not happened yet."""
        self.disk.crash_after = None
        if self._countdown in self.disk.on_step:
            self.disk.on_step.remove(self._countdown)

    def _end(self, *, is_in_write: bool, lose_power: bool) -> None:
        assert self.process is not None
        self.before_exit(is_in_write=is_in_write, lose_power=lose_power)
        self._past.append((self.node, self.disk))
        self.node = self.running = None
        self._lost_power, self.was_stopped = lose_power, False
        self.process.kill()
        if lose_power:
            self.world.note(self.name, "loses power")
            self.world.network.power_lost(self.process)
        else:
            self.world.note(self.name, "is killed")
            self.world.network.process_died(self.process)

    def release(self) -> None:
        """Free the disks of earlier processes after the simulation."""
        for _, disk in self._past:
            disk.release()

    def replace_disk(self, disk: MemoryDisk) -> None:
        """Replace the disk by a copy while the broker is down."""
        assert not self.is_up
        self._past.append((None, self.disk))
        self.disk, self._lost_power = disk, False

    async def stop(self) -> None:
        """Stop the broker, as SIGTERM does, and wait for its end. A second call during the stop does
        nothing.
        """
        running, self.running = self.running, None
        if running is None or self.process is None:
            return
        process = self.process
        self.world.note(self.name, "is told to stop")
        self.before_exit(is_in_write=True, lose_power=False)
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
                    self.name,
                    f"stops with {error!r}",
                    # A broken disk may make the stop fail. This is not a violation, because no data is lost.
                )
            elif error is not None:
                self.world.violate("broker does not stop", repr(error))
            self.was_stopped, self.node = error is None, None
            process.kill()
            self.world.network.process_died(process)


class LogCapture(logging.Handler):
    """Adds the product's log messages at level WARNING or above to the timeline.

    An error because of a missing file is a violation: no fault removes a file of a running broker.
    """

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self.world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.world.note("log", text)
        if MISSING_FILE in text:
            self.world.violate("a file is missing", text)

    def __enter__(self) -> LogCapture:
        for name in (broker_log.name, "oncelog.producer"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in (broker_log.name, "oncelog.producer"):
            logging.getLogger(name).removeHandler(self)
