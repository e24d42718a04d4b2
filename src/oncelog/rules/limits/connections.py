"""Limits of connections: how many are accepted, their deadlines, and which are closed to free memory.

Accepting: the limits are max.connections, then max.connections.per.ip or its override, then the file
descriptors. Some descriptors are reserved for the log. A connection counts as soon as it is accepted, even
during its TLS handshake.

Deadlines: the TLS handshake, authentication, each request, and the last responses of a connection that is
being closed have a deadline each. A connection that neither sends nor receives bytes and waits for no
response is closed after connections.max.idle.ms.

Memory: requests and responses each have a limit for all connections together. Above the limit, the
connections that send or receive their bytes slowest are closed until enough memory is free.

Source: kafka ConnectionQuotas and Selector for limits by address and for idle connections. Kafka does not
have the other limits.
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
"""Bytes and time that are added to each connection's bytes and time before its rate is computed. Without
them, a connection that has just begun to use memory would count as the slowest.
"""
_RELIEF = 0.75
"""Fraction of the memory limit. Above the limit, connections are closed until the memory in use falls to this
fraction.
"""


class CloseReason(StrEnum):
    """The broker's reasons for closing a connection, with their names in metrics."""

    CONNECTIONS = "max.connections"
    ADDRESS = "max.connections.per.ip"
    DESCRIPTORS = "descriptors"
    HANDSHAKE = "handshake"
    AUTHENTICATION = "authentication"
    REQUEST = "oncelog.request.read.timeout.ms"
    IDLE = "connections.max.idle.ms"
    LINGER = "linger"
    REQUEST_BYTES = "queued.max.request.bytes"
    RESPONSE_BYTES = "oncelog.queued.max.response.bytes"


@dataclass(slots=True)
class ConnectionLimiter:
    """A counter of connections, in total and by address. `overrides` maps addresses to limits that replace
    `max_per_address`.
    """

    max_connections: int
    max_per_address: int
    overrides: Mapping[str, int]
    count: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def enter(self, address: str, *, descriptor: int | None, descriptor_limit: int) -> CloseReason | None:
        """Count a new connection. Return the limit that it exceeds; None if the connection is accepted.

        Even a connection that exceeds a limit counts until `leave`. `descriptor` is the connection's file
        descriptor; None skips the check of descriptors. The operating system allocates the lowest free
        number, so the number shows about how many descriptors are in use.
        """
        self.count += 1
        address_count = self.counts[address] = self.counts.get(address, 0) + 1
        if self.count > self.max_connections:
            return CloseReason.CONNECTIONS
        if address_count > self.overrides.get(address, self.max_per_address):
            return CloseReason.ADDRESS
        if descriptor is not None and descriptor >= usable_descriptors(descriptor_limit):
            return CloseReason.DESCRIPTORS
        return None

    def leave(self, address: str) -> None:
        """Stop counting a connection from this address."""
        self.count -= 1
        self.counts[address] -= 1
        if not self.counts[address]:
            del self.counts[address]


def parse_overrides(text: str) -> dict[str, int]:
    """Parse max.connections.per.ip.overrides into a dict from addresses to limits. Raises ConfigError."""
    limits = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        address, _, limit = part.rpartition(":")
        try:
            limits[str(ip_address(address.strip("[]")))] = int(limit)
        except ValueError:
            raise ConfigError(
                f"max.connections.per.ip.overrides: {part!r}: expected ADDRESS:LIMIT, for "
                "example 10.0.0.1:50 or [::1]:200"
            ) from None
    return limits


def usable_descriptors(limit: int) -> int:
    """Return the part of the `limit` file descriptors that connections may use. The log gets the others."""
    return limit - min(limit // 4, 1_024)


class Phase(Enum):
    """The phases of a connection."""

    HANDSHAKE = "TLS handshake"
    UNAUTHENTICATED = "not authenticated"
    AUTHENTICATED = "authenticated"
    CLOSING = "closing"


class ConnectionActivity(NamedTuple):
    """The facts on which a connection's deadlines depend. Times are in ms.

    `active_ms` is the time at which the connection last sent or received bytes. `request_ms` is the time at
    which the read timeout of an incomplete request began; None if there is no incomplete request.
    `is_waiting` is true while a response is pending and the client is connected. A muted connection whose
    responses are all sent counts as idle.
    """

    phase: Phase
    opened_ms: int
    active_ms: int
    request_ms: int | None = None
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The timeouts of connections in milliseconds. A negative `idle` or `request` means no timeout."""

    handshake: int
    authentication: int
    request: int
    idle: int
    linger: int


def expired_deadline(activity: ConnectionActivity, deadlines: Deadlines, now_ms: int) -> CloseReason | None:
    """Return the reason to close a connection that has missed a deadline; None if it has missed none."""
    idle_ms, age_ms = now_ms - activity.active_ms, now_ms - activity.opened_ms
    if activity.phase is Phase.CLOSING:
        return CloseReason.LINGER if idle_ms > deadlines.linger else None
    if activity.phase is Phase.HANDSHAKE:
        return CloseReason.HANDSHAKE if age_ms > deadlines.handshake else None
    if activity.phase is Phase.UNAUTHENTICATED and age_ms > deadlines.authentication:
        return CloseReason.AUTHENTICATION
    if activity.request_ms is not None and 0 <= deadlines.request < now_ms - activity.request_ms:
        return CloseReason.REQUEST
    if 0 <= deadlines.idle < idle_ms and not activity.is_waiting:
        return CloseReason.IDLE
    return None


@dataclass(slots=True)
class Usage:
    """The memory of one connection's requests or responses. It has been in use without a break since
    `since_ms`.

    `moved_bytes` counts all bytes that the connection has sent or received, `moved_before` those before
    `since_ms`.
    """

    held_bytes: int
    moved_bytes: int
    moved_before: int
    since_ms: int

    def bytes_per_ms(self, now_ms: int) -> float:
        """Return the connection's rate since `since_ms`, with CREDIT_BYTES and CREDIT_MS added to its bytes
        and time.
        """
        moved = self.moved_bytes - self.moved_before
        return (moved + CREDIT_BYTES) / (max(now_ms - self.since_ms, 0) + CREDIT_MS)


class MemoryBudget(Generic[Key]):
    """The memory in use for the requests, or for the responses, of all connections.

    A negative `limit_bytes` means no limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self.unfinished_bytes = 0
        """The size of responses that are being built and are not counted in `total_bytes` yet."""
        self._by_key: dict[Key, Usage] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def update(self, key: Key, held_bytes: int, moved_bytes: int, now_ms: int) -> bool:
        """Record the memory in use for a connection, and the total number of bytes that the connection has
        sent or received.

        Return True if the memory of all connections exceeds the limit.
        """
        usage = self._by_key.get(key)
        if usage is None:
            if held_bytes:
                self._by_key[key] = Usage(held_bytes, moved_bytes, moved_bytes, now_ms)
                self.total_bytes += held_bytes
        elif held_bytes:
            self.total_bytes += held_bytes - usage.held_bytes
            usage.held_bytes, usage.moved_bytes = held_bytes, moved_bytes
        else:
            self.release(key)
        return 0 <= self.limit_bytes < self.total_bytes

    def release(self, key: Key) -> None:
        """Record that a connection no longer uses memory."""
        usage = self._by_key.pop(key, None)
        if usage is not None:
            self.total_bytes -= usage.held_bytes

    def response_budget(self) -> int | None:
        """Return the maximum size of the next response in bytes: a quarter of the free memory.

        None means no limit.
        """
        free_bytes = max(self.limit_bytes - self.total_bytes - self.unfinished_bytes, 0)
        return None if self.limit_bytes < 0 else free_bytes // 4

    def eviction_candidates(self, now_ms: int) -> list[Key]:
        """Return the slowest connections, which must be closed so that the memory in use falls to _RELIEF of
        its limit.
        """
        excess_bytes = self.total_bytes - int(self.limit_bytes * _RELIEF)
        return slowest_first(self._by_key.items(), excess_bytes, now_ms)


def slowest_first(usages: Iterable[tuple[Key, Usage]], excess_bytes: int, now_ms: int) -> list[Key]:
    """Return the slowest connections whose memory is at least `excess_bytes` in total, or all connections if
    that is not enough.

    The slowest connections are first. Equally slow connections are ordered by their memory, the largest
    first.
    """
    chosen: list[Key] = []
    for key, usage in sorted(usages, key=lambda item: (item[1].bytes_per_ms(now_ms), -item[1].held_bytes)):
        if excess_bytes <= 0:
            break
        chosen.append(key)
        excess_bytes -= usage.held_bytes
    return chosen
