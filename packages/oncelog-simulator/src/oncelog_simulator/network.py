"""A network in memory: bytes in order within a connection, and nothing else that can be relied upon.

A host is known by its process' name. Bytes under way arrive late, in pieces, or, when the connection is cut,
only up to some point, and neither side knows which. Between hosts that are parted bytes wait and connections
cannot be made; those that wait arrive when they are together again, even if their sender gave up long ago.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from oncelog_simulator.event_loop import PROCESS, Process, SimLoop

SYN_RETRY_SECONDS = 1.0
DEFAULT_HIGH_BYTES = 65_536


@dataclass
class NetworkConditions:
    """How the network is at present. Delays in seconds; `cut_chance`: of a connection, per write."""

    delay: tuple[float, float] = (0.0002, 0.002)
    slow_chance: float = 0.01
    slow_delay: tuple[float, float] = (0.01, 0.3)
    cut_chance: float = 0.0


class _Parcel(NamedTuple):
    """Something under way to the other end. `data` None: the end of the connection, for the reason given."""

    arrival_us: int
    data: bytes | None
    error: Exception | None = None


class SimTransport(asyncio.Transport):
    """One end of a connection; `peer` is the other. It delivers to its own protocol what is in `_inbox`."""

    def __init__(
        self,
        network: Network,
        process: Process,
        context: Context,
        address: tuple[str, int],
        loop: SimLoop,
    ) -> None:
        super().__init__({"peername": address})
        self.network, self.process, self.context = network, process, context
        self.loop = loop
        """Of whoever owns this end: the world's, or that of a client's thread."""
        self.number = network.next_number()
        self.protocol: Any = None
        self.peer: SimTransport
        self.sent = bytearray()
        self._inbox: deque[_Parcel] = deque()
        self._inbox_bytes = 0
        self._timer: object | None = None
        self._is_reading, self._is_closing, self._is_lost, self._is_full = True, False, False, False
        self._high_bytes = DEFAULT_HIGH_BYTES

    # What the protocol calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self._is_lost or not self.process.is_alive:
            return
        self.network.carry(self, bytes(data))
        if self.peer._inbox_bytes > self._high_bytes and not self._is_full:
            self._is_full = True
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = DEFAULT_HIGH_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return self.peer._inbox_bytes

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.arm()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_protocol(self) -> Any:
        return self.protocol

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self._end(ConnectionResetError("reset by peer"))

    def _end(self, told: Exception | None) -> None:
        """What was written before still arrives."""
        if not self._is_closing and self.process.is_alive:
            self._is_closing = True
            self.network.send(self, None, told)
            self.loop.call_soon(self.lose, None, context=self.context)

    # What the network calls

    def arm(self) -> None:
        """See to it that what is first in the inbox is delivered when it is due, if that can be."""
        if self._timer is None and self._inbox and self._is_reading and not self._is_lost:
            if self.network.are_parted(self, self.peer):
                return
            due_s = self._inbox[0].arrival_us / 1e6
            self._timer = self.loop.call_at(due_s, self._deliver, context=self.context)

    def put(self, parcel: _Parcel) -> None:
        """A parcel is under way to here."""
        self._inbox.append(parcel)
        self._inbox_bytes += len(parcel.data or b"")
        self.arm()

    def last_arrival_us(self) -> int:
        return self._inbox[-1].arrival_us if self._inbox else 0

    def drop_from(self, index: int) -> None:
        """Of what is under way only the first `index` parcels will arrive."""
        while len(self._inbox) > index:
            self._inbox_bytes -= len(self._inbox.pop().data or b"")

    def under_way(self) -> int:
        return len(self._inbox)

    def _deliver(self) -> None:
        self._timer = None
        if not self._inbox or not self._is_reading or self._is_lost:
            return
        if self.network.are_parted(self, self.peer):
            return  # armed again when they are together
        if self.protocol is None:  # its process stood still, and is about to take the connection
            self._timer = self.loop.call_soon(self._deliver, context=self.context)
            return
        if self._inbox[0].arrival_us > self.network.loop.now_us:
            self.arm()  # what was to come was lost
            return
        parcel = self._inbox.popleft()
        self.network.note_arrival(self, parcel.data)
        if parcel.data is None:
            self.lose(parcel.error)
            return
        self._inbox_bytes -= len(parcel.data)
        self.peer.drained()
        self.arm()
        self._hand_over(parcel.data)

    def _hand_over(self, data: bytes) -> None:
        if isinstance(self.protocol, asyncio.BufferedProtocol):
            position = 0
            while position < len(data) and not self._is_lost:
                room = memoryview(self.protocol.get_buffer(-1))
                count = min(len(room), len(data) - position)
                room[:count] = data[position : position + count]
                position += count
                self.protocol.buffer_updated(count)
        else:
            self.protocol.data_received(data)

    def drained(self) -> None:
        """The other end took something."""
        if self._is_full and self.peer._inbox_bytes <= self._high_bytes // 4 and not self._is_lost:
            self._is_full = False
            self.loop.call_soon(self.protocol.resume_writing, context=self.context)

    def lose(self, error: Exception | None) -> None:
        """The connection is over for this end."""
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self.network.forget(self)
            self.protocol.connection_lost(error)


class SimServer:
    """What create_server gives."""

    def __init__(self, network: Network, key: tuple[str, int]) -> None:
        self._network, self._key = network, key
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self._key

    def close(self) -> None:
        self._network.listeners.pop(self._key, None)


class _Listener(NamedTuple):
    factory: Callable[[], Any]
    process: Process
    context: Context


class Network:
    """All hosts and connections. `on_arrival(transport, data)` sees everything that is delivered."""

    def __init__(self, loop: SimLoop, chance: Random) -> None:
        self.loop, self.chance = loop, chance
        self.conditions = NetworkConditions()
        self.listeners: dict[tuple[str, int], _Listener] = {}
        self.on_arrival: Callable[[SimTransport, bytes | None], object] = lambda transport, data: None
        self.sent_by: dict[str, list[bytearray]] = {}
        """What each client has sent, by connection, also those that are over."""
        self.harmed: dict[str, Callable[[bytes], bytes]] = {}
        """Clients of which bytes change on the way, in both directions: what arrives of a write."""
        self._open: dict[int, SimTransport] = {}
        self._parted: dict[frozenset[str], int] = {}
        self._silent: set[str] = set()
        self._numbers = 0

    # Connections

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> SimServer:
        process = PROCESS.get()
        assert process is not None
        key = (host, port or 9092)
        if key in self.listeners and self.listeners[key].process.is_alive:
            raise OSError(f"{key} is in use")
        self.listeners[key] = _Listener(factory, process, copy_context())
        return SimServer(self, key)

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[SimTransport, Any]:
        """Raises ConnectionRefusedError where nobody listens; waits while there is no way."""
        process = PROCESS.get()
        assert process is not None
        await asyncio.sleep(self._delay())
        while self._has_no_way(process.name, host):
            await asyncio.sleep(SYN_RETRY_SECONDS)
        listener = self.listeners.get((host, port))
        if listener is None or not listener.process.is_alive:
            raise ConnectionRefusedError(111, "Connection refused")
        own_loop: Any = asyncio.get_running_loop()
        mine = SimTransport(self, process, copy_context(), (host, port), own_loop)
        address = (process.name, 40_000 + mine.number)
        theirs = SimTransport(self, listener.process, listener.context, address, self.loop)
        mine.peer, theirs.peer = theirs, mine
        self.sent_by.setdefault(process.name, []).append(mine.sent)
        self._open[mine.number], self._open[theirs.number] = mine, theirs
        self.loop.call_soon(self._accept, theirs, listener.factory, context=listener.context)
        mine.protocol = factory()
        mine.pause_reading()
        try:
            await asyncio.sleep(self._delay())
        except BaseException:
            mine.abort()
            raise
        mine.protocol.connection_made(mine)
        mine.resume_reading()
        return mine, mine.protocol

    def _accept(self, transport: SimTransport, factory: Callable[[], Any]) -> None:
        transport.protocol = factory()
        transport.protocol.connection_made(transport)

    def forget(self, transport: SimTransport) -> None:
        self._open.pop(transport.number, None)

    def _delay(self) -> float:
        conditions, chance = self.conditions, self.chance
        return chance.uniform(
            *(conditions.slow_delay if chance.random() < conditions.slow_chance else conditions.delay)
        )

    def carry(self, sender: SimTransport, data: bytes) -> None:
        """A write: under way, perhaps in two pieces, perhaps with the end of the connection."""
        if sender.peer.process.name in self._silent or not sender.peer.process.is_alive:
            self._answer_for_the_dead(sender)
            return
        sender.sent += data
        for name in (sender.process.name, sender.peer.process.name) if self.harmed else ():
            if name in self.harmed:
                data = self.harmed[name](data)
        if self.chance.random() < self.conditions.cut_chance:
            self.cut(sender)
            return
        if len(data) > 1 and self.chance.random() < 0.05:
            split = self.chance.randrange(1, len(data))
            self.send(sender, data[:split])
            data = data[split:]
        self.send(sender, data)

    def send(self, sender: SimTransport, data: bytes | None, error: Exception | None = None) -> None:
        arrival_us = self.loop.now_us + int(self._delay() * 1e6) + 1
        sender.peer.put(_Parcel(max(arrival_us, sender.peer.last_arrival_us()), data, error))

    def note_arrival(self, transport: SimTransport, data: bytes | None) -> None:
        self.on_arrival(transport, data)

    def _answer_for_the_dead(self, sender: SimTransport) -> None:
        """A host that is back knows nothing of the connection, and says so; one that is away says nothing."""
        if sender.peer.process.name not in self._silent and sender.under_way() == 0:
            reset = ConnectionResetError("reset by peer")
            sender.put(_Parcel(self.loop.now_us + int(self._delay() * 1e6) + 1, None, reset))

    # Faults

    def connections(self) -> list[SimTransport]:
        """Those ends that are open at clients, in the order in which they were opened."""
        return [each for number, each in sorted(self._open.items()) if each.number < each.peer.number]

    def cut(self, transport: SimTransport) -> None:
        """The connection ends: in both directions some of what is under way is lost."""
        for end in (transport, transport.peer):
            end.drop_from(self.chance.randint(0, end.under_way()))
            self.send(end.peer, None, ConnectionResetError("cut"))

    def died(self, process: Process) -> None:
        """Killed: its system ends its connections."""
        for transport in [each for _, each in sorted(self._open.items()) if each.process is process]:
            transport.peer.drop_from(self.chance.randint(0, transport.peer.under_way()))
            self.send(transport, None, ConnectionResetError("the process is gone"))
            self.forget(transport)

    def lost_power(self, process: Process) -> None:
        """Gone without a word: connections hang until somebody writes and the host is back."""
        self._silent.add(process.name)
        for transport in [each for _, each in sorted(self._open.items()) if each.process is process]:
            transport.peer.drop_from(0)
            self.forget(transport)

    def powered(self, name: str) -> None:
        self._silent.discard(name)

    def part(self, first: str, second: str) -> None:
        pair = frozenset((first, second))
        self._parted[pair] = self._parted.get(pair, 0) + 1

    def join(self, first: str, second: str) -> None:
        pair = frozenset((first, second))
        self._parted[pair] -= 1
        if not self._parted[pair]:
            del self._parted[pair]
        for _, transport in sorted(self._open.items()):
            transport.arm()

    def are_parted(self, one: SimTransport, other: SimTransport) -> bool:
        return bool(self._parted) and frozenset((one.process.name, other.process.name)) in self._parted

    def _has_no_way(self, source: str, target: str) -> bool:
        return target in self._silent or frozenset((source, target)) in self._parted
