"""A workload with clients that break the protocol and with bits that flip on the network. Other clients must
not notice.

    attacker        sends random bytes, frames that are cut short, huge counts and lengths, unknown versions,
                    and the largest requests of the catalogue (oncelog_devtools/worst_requests.py)
    harmed reader   random bits of its requests and responses flip

Three rules are checked. One step of the broker's loop makes a limited number of function calls, so no other
client waits long. The broker closes connections of these two clients only. No request makes the broker raise
an unexpected exception.
"""

from __future__ import annotations

import asyncio
import re
import struct
import sys
from collections.abc import Callable
from functools import cache
from random import Random
from types import FrameType
from typing import Any, ClassVar

from oncelog_devtools.worst_requests import WorstRequest, by_hand, from_tables

from oncelog.broker.state import OFFERED, BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.errors import OncelogError
from oncelog.types import TopicPartition
from oncelog.wire.message import Part
from oncelog.wire.messages import API_BY_KEY, API_BY_NAME
from oncelog.wire.schema import FIXED, Field
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application, Reader
from oncelog_simulator.event_loop import Process
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import BROKER_HOST, BROKER_PORT, World

TOPIC = "hostile"
MAX_CALLS_A_STEP = 1_000_000
"""Maximum number of function calls in one step of the broker's loop. Seeds 0 to 29 make at most 329,006.

docs/security.md gives the cost of the largest requests.
"""
WORST_BYTES = (500, 4_000, 20_000)
EXTREMES = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 127, 32_767, 2**31 - 1, 2**63 - 1)
NAMES = ("", TOPIC, "hostile-1", "\u00e9\u4e2d\U0001f600", "no/name", "..", "h" * 249, "h" * 32_767)
DESTRUCTIVE = frozenset({"WriteTxnMarkers"})
"""Requests that are not sent, because with them any authorized client may end another client's
transaction.
"""
CREATING = frozenset({"CreateTopics", "CreatePartitions", "Metadata"})
"""Requests that are not sent with thousands of names, because each name becomes a topic."""
HARM_CHANCE = 0.2
"""Probability that a write from or to the harmed reader has a flipped bit."""
_BITS = {"int8": 8, "int16": 16, "uint16": 16, "int32": 32, "int64": 64}
_SIZE = struct.Struct(">i")
_CLOSED = re.compile(r'event="connection closed" peer=([a-z-]+[0-9]*):[0-9]+ reason="(?!idle)')


class CallCounter:
    """Counts the function calls in each step of one host. Counting does not change the run."""

    def __init__(self, world: World, host: str) -> None:
        self._world, self._host = world, host
        self.count = self.max_count = 0

    def step(self, process: Process | None, run: Callable[[], object]) -> None:
        """Run a step of the loop. Count its function calls if the step belongs to the host."""
        if process is None or process.name != self._host:
            run()
            return
        self.count = 0
        sys.setprofile(self._count)
        try:
            run()
        finally:
            sys.setprofile(None)
        self.max_count = max(self.max_count, self.count)
        if self.count > MAX_CALLS_A_STEP:
            self._world.violate("one request holds everybody up", f"{self.count:,} calls in one step")

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1


class Attacker(Application):
    """A client that attacks the broker repeatedly, each time on a connection of its own."""

    def __init__(self, world: World, name: str, counter: CallCounter) -> None:
        super().__init__(world, name)
        self.attacks_left = self.rng.randint(6, 16)
        self._counter = counter
        self._connections: list[asyncio.Transport] = []

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            await create_topic(admin, NewTopic(TOPIC, num_partitions=1))
        while self.attacks_left > 0:
            self.attacks_left -= 1
            attack = self.rng.choice(ATTACKS)
            self.world.note(self.name, f"attack: {attack.__name__.strip('_')}")
            try:
                await attack(self)
            except OSError as error:
                self.world.note(self.name, f"no connection: {error!r}")
            await self.sleep_up_to(5.0)
        self._end_all()

    async def connect(self) -> asyncio.Transport:
        """Return a new connection. Raises OSError."""
        loop: Any = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, BROKER_HOST, BROKER_PORT)
        self._connections.append(transport)
        return transport  # type: ignore[no-any-return]

    async def send(self, data: bytes) -> None:
        """Send bytes on a new connection. For one second, count the function calls of the broker's steps.

        A step with more than MAX_CALLS_A_STEP calls is a violation.
        """
        transport = await self.connect()
        loop: Any = self.world.loop
        loop.run_step = self._counter.step
        transport.write(data)
        await asyncio.sleep(1.0)
        loop.run_step = None
        if self.rng.random() < 0.5:
            self._end_all()

    def _end_all(self) -> None:
        for transport in self._connections:
            (transport.abort if self.rng.random() < 0.5 else transport.close)()
        self._connections.clear()


async def _random_bytes(attacker: Attacker) -> None:
    rng = attacker.rng
    data = rng.randbytes(rng.choice((1, 3, 4, 20, 1_000)))
    await attacker.send(_SIZE.pack(len(data)) + data if rng.random() < 0.7 else data)


async def _impossible_size(attacker: Attacker) -> None:
    size = attacker.rng.choice((-1, 0, 1, -(2**31), 2**31 - 1, 104_857_600, 104_857_601))
    await attacker.send(_SIZE.pack(size) + attacker.rng.randbytes(attacker.rng.choice((0, 8, 5_000))))


async def _drawn_requests(attacker: Attacker) -> None:
    await attacker.send(b"".join(_frame(draw_request(attacker.rng)) for _ in range(3)))


async def _mangled_request(attacker: Attacker) -> None:
    """Send a valid request with some bytes changed, removed or inserted."""
    rng = attacker.rng
    data = bytearray(draw_request(rng))
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(8, len(data)) if len(data) > 8 else 0
        match rng.choice(("flip", "extreme", "cut", "insert")):
            case "flip" if data:  # an earlier cut may have left nothing
                data[position] ^= 1 << rng.randrange(8)
            case "flip":
                pass
            case "extreme":
                data[position : position + 4] = rng.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff"))
            case "cut":
                del data[position:]
            case _:
                data[position:position] = rng.randbytes(rng.randint(1, 5))
    await attacker.send(_frame(bytes(data)))


async def _unknown_version(attacker: Attacker) -> None:
    rng = attacker.rng
    key = rng.choice((*OFFERED, -1, 200, 32_767))
    head = struct.pack(">hhih", key, rng.choice((-1, 99, 32_767)), 1, rng.choice((-2, -1, 4, 32_767)))
    await attacker.send(_frame(head + b"name" + rng.randbytes(20)))


async def _worst_request(attacker: Attacker) -> None:
    rng = attacker.rng
    size = rng.choice(WORST_BYTES)
    requests = [draw_worst(rng, size) for _ in range(rng.choice((1, 3)))]
    await attacker.send(b"".join(_frame(request.frame()) for request in requests))


async def _slow_request(attacker: Attacker) -> None:
    """Send most of a request byte by byte, and keep the connection open."""
    rng = attacker.rng
    transport = await attacker.connect()
    data = _frame(draw_request(rng))[:-1]
    for position in range(0, len(data), max(len(data) // 6, 1)):
        transport.write(data[position : position + 1])
        await asyncio.sleep(rng.uniform(0.1, 2.0))


async def _unread_answers(attacker: Attacker) -> None:
    """Send requests and do not read the responses."""
    transport = await attacker.connect()
    transport.pause_reading()
    transport.write(_frame(draw_request(attacker.rng)) * attacker.rng.choice((1, 20, 200)))
    await attacker.sleep_up_to(5.0)


ATTACKS: tuple[Callable[[Attacker], Any], ...] = (
    _random_bytes,
    _impossible_size,
    _drawn_requests,
    _drawn_requests,
    _mangled_request,
    _mangled_request,
    _unknown_version,
    _worst_request,
    _worst_request,
    _slow_request,
    _unread_answers,
)


def _frame(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def draw_worst(rng: Random, size_bytes: int) -> WorstRequest:
    """Draw a request of the catalogue of worst requests, except those of DESTRUCTIVE and CREATING."""
    names = [API_BY_KEY[key].name for key in sorted(OFFERED)]
    name = rng.choice(["by hand", *(name for name in names if name not in DESTRUCTIVE | CREATING)])
    return rng.choice(_worst_of(name, size_bytes))


@cache
def _worst_of(api: str, size_bytes: int) -> list[WorstRequest]:
    if api == "by hand":
        return list(by_hand(size_bytes, TOPIC, "hostile-1"))
    return list(from_tables(API_BY_NAME[api], size_bytes))


def draw_request(rng: Random) -> bytes:
    """Return the header and body of a request with drawn fields.

    Integer fields often have extreme values.
    """
    api = API_BY_KEY[rng.choice([key for key in sorted(OFFERED) if API_BY_KEY[key].name not in DESTRUCTIVE])]
    version = rng.randint(max(api.min_version, api.first_version), api.max_version)
    body = draw_part(rng, api.request, version).encode(version)
    head = struct.pack(">hhih", api.key, version, rng.randrange(1 << 31), 7) + b"hostile"
    request: bytes = head + (b"\0" if api.is_flexible(version) else b"") + body
    return request


def draw_part(rng: Random, cls: type[Any], version: int) -> Any:
    """Return a struct of a message with drawn fields."""
    part = cls()
    for field in cls._struct.fields:
        if field.is_in(version):
            setattr(part, field.name, _draw_field(rng, cls, field, version))
    return part


def _draw_field(rng: Random, cls: type[Part], field: Field, version: int) -> Any:
    if field.is_nullable(version) and rng.random() < 0.1:
        return None

    def one() -> Any:
        if field.struct is not None:
            return draw_part(rng, cls._structs[field.struct.name], version)
        return _draw_value(rng, field.kind, field.name)

    return [one() for _ in range(rng.choice((0, 1, 1, 2, 5)))] if field.is_array else one()


def _draw_value(rng: Random, kind: str, name: str) -> Any:
    if name == "transaction_timeout_ms":
        # Keep the time-out short, so that a transaction which the attacker leaves open soon ends.
        return rng.choice((-1, 0, 1, 5_000))
    if name in ("num_partitions", "count"):
        # Values between 2 and 100,001 are left out, because that many partitions would be created.
        return rng.choice((-2, -1, 0, 1, 2, 100_001, 2**31 - 1))
    if kind in _BITS:
        bits = _BITS[kind]
        value = rng.choice(EXTREMES) if rng.random() < 0.7 else rng.getrandbits(bits)
        low = 0 if kind == "uint16" else -(1 << (bits - 1))
        return (value - low) % (1 << bits) + low
    if kind == "string":
        return rng.choice(NAMES)
    if kind in FIXED:
        drawn: Any = {"bool": rng.random() < 0.5, "float64": rng.random(), "uuid": rng.randbytes(16)}[kind]
        return drawn
    return rng.randbytes(rng.choice((0, 1, 61, 200)))


class HarmedReader(Reader):
    """A reader whose requests and responses arrive with flipped bits.

    After any OncelogError it starts again.
    """

    def __init__(self, world: World, name: str, partitions: list[TopicPartition]) -> None:
        super().__init__(world, name, partitions, "read_committed")
        self.settings |= {"allow.auto.create.topics": False}
        self._rng = world.rng(f"harm {name}")
        world.network.harmed[name] = self.harm

    def harm(self, data: bytes) -> bytes:
        """Return the bytes of a write as they arrive."""
        if self.stop_requested or self._rng.random() >= HARM_CHANCE:
            return data
        bit = self._rng.randrange(8 * len(data))
        harmed = bytearray(data)
        harmed[bit // 8] ^= 1 << (bit % 8)
        return bytes(harmed)

    async def work(self) -> None:
        while not self.stop_requested:
            consumer = AsyncConsumer(self.settings)
            consumer.assign(self.partitions)
            try:
                for _ in range(4):
                    await consumer.poll(2.0)
            except OncelogError as error:
                self.world.note(self.name, f"poll: {error!r}")
            await consumer.close()
            await self.sleep_up_to(1.0)


class Hostile(Workload):
    """Checks that other clients do not notice hostile ones."""

    topic: ClassVar[str] = TOPIC
    clients: ClassVar[tuple[str, ...]] = ("hostile-attacker", "hostile-reader")
    unguarded_groups: ClassVar[tuple[str, ...]] = NAMES
    is_repeatable: ClassVar[bool] = False
    makes_topics: ClassVar[bool] = True

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        self.counter = CallCounter(world, BROKER_HOST)
        attacker, reader = self.clients
        self.applications = [Attacker(world, attacker, self.counter)]
        topics = ["records"] * bool(scenario.senders) + ["inward"] * bool(scenario.writers)
        self.readers = [HarmedReader(world, reader, [TopicPartition(topic, 0) for topic in topics])]
        self.last.partitions = []

    def check(self, node: BrokerState) -> None:
        for event in self.world.timeline:
            if event.host != "log":
                continue
            closed = _CLOSED.search(event.text)
            if closed is not None and closed[1] not in self.clients and closed[1] != "echo":
                self.world.violate("a connection of somebody else is closed", event.text)
            if "request failed" in event.text:
                self.world.violate("a request that the broker does not expect", event.text)
