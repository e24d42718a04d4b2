"""Who may connect, how long a connection may take for what, and who goes when memory is short.

Admission   max.connections, then max.connections.per.ip (or its override), then descriptors: some are kept
            for the log. A connection counts from its first packet on, so also amid TLS' handshake.
Deadlines   TLS' handshake, authentication, a request's last byte, its last answers when it is being closed,
            and connections.max.idle.ms for one that neither sends nor takes anything and waits for nothing.
Memory      what is kept for all connections together has a limit in each direction; above it those go
            that move their bytes slowest, until enough is free.
Source: Kafka's ConnectionQuotas and Selector (limits by address, idle connections); the rest is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from ipaddress import ip_address
from typing import Generic, NamedTuple, TypeVar

from oncelog.errors import ConfigError

Key = TypeVar("Key")

CREDIT_BYTES, CREDIT_MS = 1 << 20, 1_000
"""Who has just begun counts as one who has moved so much in such a time."""
_RELIEF = 0.75
"""How full memory may still be when the slowest are gone."""


class Bound(StrEnum):
    """What a connection ran into, as metrics name it."""

    CONNECTIONS = "max.connections"
    ADDRESS = "max.connections.per.ip"
    DESCRIPTORS = "descriptors"
    HANDSHAKE = "handshake"
    AUTHENTICATION = "authentication"
    REQUEST = "oncelog.request.read.timeout.ms"
    IDLE = "connections.max.idle.ms"
    LINGER = "linger"
    REQUEST_BYTES = "queued.max.request.bytes"
    ANSWER_BYTES = "oncelog.queued.max.response.bytes"


@dataclass(slots=True)
class Admission:
    """Connections there are, in all and by address. `overrides`: address -> its own limit."""

    most: int
    most_by_address: int
    overrides: Mapping[str, int]
    count: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def enter(self, address: str, *, descriptor: int | None, descriptor_limit: int) -> Bound | None:
        """Count one more; what it exceeds, if anything (it counts until it leaves all the same).

        The system gives the lowest free descriptor, so its number says how many are in use.
        """
        self.count += 1
        here = self.counts[address] = self.counts.get(address, 0) + 1
        if self.count > self.most:
            return Bound.CONNECTIONS
        if here > self.overrides.get(address, self.most_by_address):
            return Bound.ADDRESS
        if descriptor is not None and descriptor >= usable_descriptors(descriptor_limit):
            return Bound.DESCRIPTORS
        return None

    def leave(self, address: str) -> None:
        self.count -= 1
        self.counts[address] -= 1
        if not self.counts[address]:
            del self.counts[address]


def parse_overrides(text: str) -> dict[str, int]:
    """`max.connections.per.ip.overrides`: address -> limit. Raises ConfigError."""
    limits = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        address, _, limit = part.rpartition(":")
        try:
            limits[str(ip_address(address.strip("[]")))] = int(limit)
        except ValueError:
            raise ConfigError(
                f"max.connections.per.ip.overrides: {part!r} is no ADDRESS:LIMIT such as 10.0.0.1:50 "
                "or [::1]:200"
            ) from None
    return limits


def usable_descriptors(limit: int) -> int:
    """How many of a process' descriptors connections may take; the log needs some to open its files."""
    return limit - min(limit // 4, 1_024)


class Phase(Enum):
    """How far a connection is."""

    HANDSHAKE = "amid TLS' handshake"
    STRANGER = "has not said who it is"
    KNOWN = "may send requests"
    CLOSING = "is being closed"


class Standing(NamedTuple):
    """What the deadlines of a connection depend on.

    `active_ms`: when it last sent or took something. `request_ms`: since when an incomplete request is
    there and read on. `is_waiting`: an answer is owed that is not the client's fault. A throttled one idles.
    """

    phase: Phase
    opened_ms: int
    active_ms: int
    request_ms: int | None = None
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Milliseconds; `idle` and `request` below 0: never."""

    handshake: int
    authentication: int
    request: int
    idle: int
    linger: int


def overdue(standing: Standing, deadlines: Deadlines, now_ms: int) -> Bound | None:
    """Which deadline has passed."""
    idle_ms, age_ms = now_ms - standing.active_ms, now_ms - standing.opened_ms
    if standing.phase is Phase.CLOSING:
        return Bound.LINGER if idle_ms > deadlines.linger else None
    if standing.phase is Phase.HANDSHAKE:
        return Bound.HANDSHAKE if age_ms > deadlines.handshake else None
    if standing.phase is Phase.STRANGER and age_ms > deadlines.authentication:
        return Bound.AUTHENTICATION
    if standing.request_ms is not None and 0 <= deadlines.request < now_ms - standing.request_ms:
        return Bound.REQUEST
    if 0 <= deadlines.idle < idle_ms and not standing.is_waiting:
        return Bound.IDLE
    return None


@dataclass(slots=True)
class Holding:
    """Bytes kept for one connection since `since_ms`, when it had moved `moved_before` in all."""

    held_bytes: int
    moved_bytes: int
    moved_before: int
    since_ms: int

    def bytes_per_ms(self, now_ms: int) -> float:
        moved = self.moved_bytes - self.moved_before
        return (moved + CREDIT_BYTES) / (max(now_ms - self.since_ms, 0) + CREDIT_MS)


class Holdings(Generic[Key]):
    """What is kept for all connections in one direction. `limit_bytes` below 0: as much as they want."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self.unfinished_bytes = 0
        """What answers that are still being made hold already."""
        self._by_key: dict[Key, Holding] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def hold(self, key: Key, held_bytes: int, moved_bytes: int, now_ms: int) -> bool:
        """So much is kept for it now, and it has moved so much in its life. Whether some have to go."""
        holding = self._by_key.get(key)
        if holding is None:
            if held_bytes:
                self._by_key[key] = Holding(held_bytes, moved_bytes, moved_bytes, now_ms)
                self.total_bytes += held_bytes
        elif held_bytes:
            self.total_bytes += held_bytes - holding.held_bytes
            holding.held_bytes, holding.moved_bytes = held_bytes, moved_bytes
        else:
            self.drop(key)
        return 0 <= self.limit_bytes < self.total_bytes

    def drop(self, key: Key) -> None:
        """Nothing is kept for it any more."""
        holding = self._by_key.pop(key, None)
        if holding is not None:
            self.total_bytes -= holding.held_bytes

    def share_bytes(self) -> int | None:
        """How much a single large answer may take: a quarter of what is free. None: no limit."""
        free_bytes = max(self.limit_bytes - self.total_bytes - self.unfinished_bytes, 0)
        return None if self.limit_bytes < 0 else free_bytes // 4

    def slowest(self, now_ms: int) -> list[Key]:
        """Who has to go so that memory is well below its limit again."""
        excess_bytes = self.total_bytes - int(self.limit_bytes * _RELIEF)
        return slowest_first(self._by_key.items(), excess_bytes, now_ms)


def slowest_first(holdings: Iterable[tuple[Key, Holding]], excess_bytes: int, now_ms: int) -> list[Key]:
    """As many as together hold `excess_bytes`, the slowest first; of equally slow ones the largest."""
    chosen: list[Key] = []
    for key, holding in sorted(
        holdings, key=lambda item: (item[1].bytes_per_ms(now_ms), -item[1].held_bytes)
    ):
        if excess_bytes <= 0:
            break
        chosen.append(key)
        excess_bytes -= holding.held_bytes
    return chosen
