"""A network in memory. Within a connection bytes stay in order; nothing else is reliable.

A host has the name of its process. Bytes arrive late and in pieces. If a connection is cut, only some of the
bytes that are in flight arrive, and neither side knows how many. While two hosts are partitioned, no bytes
arrive and no connection can be made between them. The bytes arrive when the partition ends, even if their
sender closed the connection long ago.
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
    """The current conditions of the network. Delays are ranges in seconds.

    `slow_chance` is the probability of a slow delay. `disconnect_chance` is the probability that a write ends
    its connection.
    """

    delay: tuple[float, float] = (0.0002, 0.002)
    slow_chance: float = 0.01
    slow_delay: tuple[float, float] = (0.01, 0.3)
    disconnect_chance: float = 0.0


class _Parcel(NamedTuple):
    """Bytes, or the end of a connection, in flight to one end of the connection.

    `data` is None for the end of the connection. `error` is then passed to `connection_lost`.
    """

    arrival_us: int
    data: bytes | None
    error: Exception | None = None


class SimTransport(asyncio.Transport):
    """One end of a connection; `peer` is the other end.

    Each end delivers the parcels in its `_inbox` to its own protocol.
    """

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
        """The loop that runs this end: the simulation's loop, or the loop of a client's thread."""
        self.number = network.next_number()
        self.protocol: Any = None
        self.peer: SimTransport
        self.sent = bytearray()
        self._inbox: deque[_Parcel] = deque()
        self._inbox_bytes = 0
        self._timer: object | None = None
        self._is_reading, self._is_closing, self._is_lost, self._is_full = True, False, False, False
        self._high_bytes = DEFAULT_HIGH_BYTES

    # Methods that the protocol calls

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

    def _end(self, error: Exception | None) -> None:
        """End the connection. Data written before the end still arrives."""
        if not self._is_closing and self.process.is_alive:
            self._is_closing = True
            self.network.send(self, None, error)
            self.loop.call_soon(self.lose, None, context=self.context)

    # Methods that the network calls

    def arm(self) -> None:
        """Set a timer for the first parcel in the inbox, unless reading is paused or the hosts are
        partitioned.
        """
        if self._timer is None and self._inbox and self._is_reading and not self._is_lost:
            if self.network.are_partitioned(self, self.peer):
                return
            due_s = self._inbox[0].arrival_us / 1e6
            self._timer = self.loop.call_at(due_s, self._deliver, context=self.context)

    def put(self, parcel: _Parcel) -> None:
        """Add a parcel to those in flight to this end."""
        self._inbox.append(parcel)
        self._inbox_bytes += len(parcel.data or b"")
        self.arm()

    def last_arrival_us(self) -> int:
        return self._inbox[-1].arrival_us if self._inbox else 0

    def drop_from(self, index: int) -> None:
        """Drop all parcels in flight except the first `index`."""
        while len(self._inbox) > index:
            self._inbox_bytes -= len(self._inbox.pop().data or b"")

    def under_way(self) -> int:
        return len(self._inbox)

    def _deliver(self) -> None:
        self._timer = None
        if not self._inbox or not self._is_reading or self._is_lost:
            return
        if self.network.are_partitioned(self, self.peer):
            # The end of the partition (`heal`) sets the timer again.
            return
        # There is no protocol yet if a paused process has not accepted the connection. Try again soon.
        if self.protocol is None:
            self._timer = self.loop.call_soon(self._deliver, context=self.context)
            return
        if self._inbox[0].arrival_us > self.network.loop.now_us:
            # The parcel for which the timer was set was dropped; set the timer for the next parcel.
            self.arm()
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
        """Let the protocol write again if the peer's inbox has emptied. The peer calls this after each
        parcel.
        """
        if self._is_full and self.peer._inbox_bytes <= self._high_bytes // 4 and not self._is_lost:
            self._is_full = False
            self.loop.call_soon(self.protocol.resume_writing, context=self.context)

    def lose(self, error: Exception | None) -> None:
        """End the connection at this end only, and call the protocol's `connection_lost`."""
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self.network.forget(self)
            self.protocol.connection_lost(error)


class SimServer:
    """The return value of `create_server`."""

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
    """All hosts and connections. `on_arrival(transport, data)` is called for each delivered parcel."""

    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self.loop, self.rng = loop, rng
        self.conditions = NetworkConditions()
        self.listeners: dict[tuple[str, int], _Listener] = {}
        self.on_arrival: Callable[[SimTransport, bytes | None], object] = lambda transport, data: None
        self.sent_by: dict[str, list[bytearray]] = {}
        """For each client and connection, the bytes sent so far. Closed connections are included."""
        self.harmed: dict[str, Callable[[bytes], bytes]] = {}
        """For each client whose bytes change in both directions, a function from the bytes of a write to the
        bytes that arrive.
        """
        self._open: dict[int, SimTransport] = {}
        self._partitioned: dict[frozenset[str], int] = {}
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
        """Connect to a host. Waits while the hosts are partitioned or the target has no power.

        Raises ConnectionRefusedError if no process listens at the address.
        """
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
        conditions, rng = self.conditions, self.rng
        return rng.uniform(
            *(conditions.slow_delay if rng.random() < conditions.slow_chance else conditions.delay)
        )

    def carry(self, sender: SimTransport, data: bytes) -> None:
        """Send the bytes of one write in one or two parcels, or by `disconnect_chance` disconnect instead."""
        if sender.peer.process.name in self._silent or not sender.peer.process.is_alive:
            self._answer_for_the_dead(sender)
            return
        sender.sent += data
        for name in (sender.process.name, sender.peer.process.name) if self.harmed else ():
            if name in self.harmed:
                data = self.harmed[name](data)
        if self.rng.random() < self.conditions.disconnect_chance:
            self.disconnect(sender)
            return
        if len(data) > 1 and self.rng.random() < 0.05:
            split = self.rng.randrange(1, len(data))
            self.send(sender, data[:split])
            data = data[split:]
        self.send(sender, data)

    def send(self, sender: SimTransport, data: bytes | None, error: Exception | None = None) -> None:
        arrival_us = self.loop.now_us + int(self._delay() * 1e6) + 1
        sender.peer.put(_Parcel(max(arrival_us, sender.peer.last_arrival_us()), data, error))

    def note_arrival(self, transport: SimTransport, data: bytes | None) -> None:
        self.on_arrival(transport, data)

    def _answer_for_the_dead(self, sender: SimTransport) -> None:
        """Reset the connection of a write to a dead process. A host without power sends nothing."""
        if sender.peer.process.name not in self._silent and sender.under_way() == 0:
            reset = ConnectionResetError("reset by peer")
            sender.put(_Parcel(self.loop.now_us + int(self._delay() * 1e6) + 1, None, reset))

    # Faults

    def connections(self) -> list[SimTransport]:
        """Return the clients' ends of all open connections, in the order in which they were opened."""
        return [
            transport
            for number, transport in sorted(self._open.items())
            if transport.number < transport.peer.number
        ]

    def disconnect(self, transport: SimTransport) -> None:
        """End a connection. In both directions some of the bytes in flight are lost."""
        for end in (transport, transport.peer):
            end.drop_from(self.rng.randint(0, end.under_way()))
            self.send(end.peer, None, ConnectionResetError("cut"))

    def process_died(self, process: Process) -> None:
        """End the connections of a killed process, as its operating system does."""
        for transport in [end for _, end in sorted(self._open.items()) if end.process is process]:
            transport.peer.drop_from(self.rng.randint(0, transport.peer.under_way()))
            self.send(transport, None, ConnectionResetError("the process is gone"))
            self.forget(transport)

    def power_lost(self, process: Process) -> None:
        """Forget the connections of a host that lost power.

        The other ends notice the loss only when they write to the host after its restart.
        """
        self._silent.add(process.name)
        for transport in [end for _, end in sorted(self._open.items()) if end.process is process]:
            transport.peer.drop_from(0)
            self.forget(transport)

    def power_restored(self, name: str) -> None:
        self._silent.discard(name)

    def partition(self, first: str, second: str) -> None:
        pair = frozenset((first, second))
        self._partitioned[pair] = self._partitioned.get(pair, 0) + 1

    def heal(self, first: str, second: str) -> None:
        pair = frozenset((first, second))
        self._partitioned[pair] -= 1
        if not self._partitioned[pair]:
            del self._partitioned[pair]
        for _, transport in sorted(self._open.items()):
            transport.arm()

    def are_partitioned(self, one: SimTransport, other: SimTransport) -> bool:
        return (
            bool(self._partitioned) and frozenset((one.process.name, other.process.name)) in self._partitioned
        )

    def _has_no_way(self, source: str, target: str) -> bool:
        return target in self._silent or frozenset((source, target)) in self._partitioned
