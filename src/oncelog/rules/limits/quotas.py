"""How much may a client ask for, and how long must it wait that has asked for more?

A quota is a rate that holds for an entity: users and client ids, alone or together, or ip addresses. The
first of these that has the quota decides, and those who share it use it up together:

    user     client-id   shared by
    named    named       that user's clients of that id
    named    default     that user's clients of one id
    named    -           that user's clients
    default  named       one user's clients of that id
    default  default     one user's clients of one id
    default  -           one user's clients
    -        named       clients of that id
    -        default     clients of one id
What they ask for goes into a bucket that drains at the quota's rate. They may fill it to what drains in
`burst_seconds`; who has filled it above that waits until it has drained to there.
Source: KIP-13, KIP-55, KIP-124, KIP-546, KIP-599, KIP-612, KIP-936; Kafka's ClientQuotaManager.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import NamedTuple

from oncelog.errors import InvalidRequest, UnsupportedVersion

PRODUCER_BYTES = "producer_byte_rate"
CONSUMER_BYTES = "consumer_byte_rate"
REQUEST_PERCENTAGE = "request_percentage"
MUTATIONS = "controller_mutation_rate"
PRODUCER_IDS = "producer_ids_rate"
CONNECTIONS = "connection_creation_rate"

DEFAULT = ""
"""The name of whoever is not named (no name is empty)."""


class _Kind(NamedTuple):
    unit: str
    most: float = math.inf
    is_integral: bool = False
    longest_wait_ms: int = 2**31 - 1


USER_QUOTAS: dict[str, _Kind] = {
    PRODUCER_BYTES: _Kind("bytes of Produce requests a second", 2**63 - 1, is_integral=True),
    CONSUMER_BYTES: _Kind("bytes of Fetch answers a second", 2**63 - 1, is_integral=True),
    # Not for long at a time: heartbeats are held back, too.
    REQUEST_PERCENTAGE: _Kind("percent of the broker's thread", longest_wait_ms=1_000),
    MUTATIONS: _Kind("partitions created or deleted a second"),
    PRODUCER_IDS: _Kind("producer ids a second"),
}
"""Of users and client ids. Names are Kafka's; producer_ids_rate is KIP-936's, not in Kafka yet."""
IP_QUOTAS: dict[str, _Kind] = {
    CONNECTIONS: _Kind("connections a second", 2**31 - 1, is_integral=True, longest_wait_ms=1_000),
}
QUOTAS = USER_QUOTAS | IP_QUOTAS

ENTITY_TYPES = ("user", "client-id", "ip")
"""As the protocol calls the fields of a QuotaEntity."""


class QuotaEntity(NamedTuple):
    """Whom a quota is for: a name, DEFAULT, or None where it does not matter."""

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None

    @property
    def parts(self) -> dict[str, str]:
        """Type -> name, of those that matter."""
        named = zip(ENTITY_TYPES, self, strict=True)
        return {kind: name for kind, name in named if name is not None}

    def __str__(self) -> str:
        return ", ".join(f"{kind} {name or '<default>'}" for kind, name in self.parts.items())


Values = Mapping[str, float]
"""Quota -> rate."""


def entity_of(pairs: Iterable[tuple[str, str | None]]) -> QuotaEntity:
    """From types and names as the protocol has them, null for the default. Raises InvalidRequest."""
    named = dict(pairs)
    if not named:
        raise InvalidRequest("an entity needs a user, a client-id or an ip")
    unknown = sorted(named.keys() - set(ENTITY_TYPES))
    if unknown:
        raise InvalidRequest(f"{unknown[0]!r} is no type of entity; there are {', '.join(ENTITY_TYPES)}")
    for kind, name in named.items():
        if name == "":
            raise InvalidRequest(f"the name of a {kind} is empty; null is the default")
    return QuotaEntity(*(named[kind] or DEFAULT if kind in named else None for kind in ENTITY_TYPES))


def checked(entity: QuotaEntity) -> QuotaEntity:
    """The entity, its ip written in the usual way. Raises InvalidRequest where it can have no quota."""
    if entity.ip is None:
        return entity
    if len(entity.parts) > 1:
        raise InvalidRequest("an ip has quotas of its own, not together with a user or client-id")
    try:
        return QuotaEntity(ip=str(ip_address(entity.ip)) if entity.ip else DEFAULT)
    except ValueError:
        raise InvalidRequest(f"{entity.ip!r} is no IP address") from None


def altered(entity: QuotaEntity, values: Values, changes: Iterable[tuple[str, float | None]]) -> Values:
    """The entity's quotas after changes to them; None removes. Raises InvalidRequest."""
    kinds = USER_QUOTAS if entity.ip is None else IP_QUOTAS
    result, named = dict(values), set()
    for key, value in changes:
        if key in named:
            raise InvalidRequest(f"{key} is named twice for {entity}")
        named.add(key)
        if value is None:
            result.pop(key, None)
            continue
        if key not in kinds:
            raise InvalidRequest(f"{key!r} is no quota of {entity}; there are {', '.join(kinds)}")
        _check_value(key, value, kinds[key])
        result[key] = value
    return result


def _check_value(key: str, value: float, kind: _Kind) -> None:
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{key}={value}: a quota is above 0, and removed where there is none")
    if value > kind.most:
        raise InvalidRequest(f"{key}={value} is above {kind.most}")
    if kind.is_integral and value % 1:
        raise InvalidRequest(f"{key}={value}: {kind.unit} are whole numbers")


@dataclass(frozen=True, slots=True)
class QuotaFilter:
    """Which entities are meant: those with all these parts (type -> a name, DEFAULT, or None: any of the two
    and any name), if `is_strict` with no others."""

    parts: Mapping[str, str | None] = field(default_factory=dict)
    is_strict: bool = False

    def check(self) -> None:
        """Raises UnsupportedVersion for an unknown type, InvalidRequest for ip together with others."""
        for kind in self.parts:
            if kind not in ENTITY_TYPES:
                raise UnsupportedVersion(
                    f"{kind!r} is no type of entity; there are {', '.join(ENTITY_TYPES)}"
                )
        if "ip" in self.parts and len(self.parts) > 1:
            raise InvalidRequest("an ip has quotas of its own, not together with a user or client-id")

    def takes(self, entity: QuotaEntity) -> bool:
        parts = entity.parts
        if self.is_strict and len(parts) != len(self.parts):
            return False
        return all(
            kind in parts and name in (None, parts[kind])  # None: whatever it is called
            for kind, name in self.parts.items()
        )


class Payer(NamedTuple):
    """Whose requests they are; of connections, `ip` alone."""

    user: str = ""
    client_id: str = ""
    ip: str = ""


class Share(NamedTuple):
    """A quota's rate and who uses it up together."""

    rate: float
    sharers: Payer


def find_share(rates: Mapping[QuotaEntity, float], payer: Payer) -> Share | None:
    """What holds for one client, of all entities' rates of one quota; None: no bound."""
    for entity, sharers in _candidates(payer):
        rate = rates.get(entity)
        if rate is not None:
            return Share(rate, sharers)
    return None


def _candidates(payer: Payer) -> Iterator[tuple[QuotaEntity, Payer]]:
    user, client_id, ip = payer
    if ip:
        yield QuotaEntity(ip=ip), payer
        yield QuotaEntity(ip=DEFAULT), payer
        return
    of_user, of_id = Payer(user=user), Payer(client_id=client_id)
    yield QuotaEntity(user, client_id), payer
    yield QuotaEntity(user, DEFAULT), payer
    yield QuotaEntity(user), of_user
    yield QuotaEntity(DEFAULT, client_id), payer
    yield QuotaEntity(DEFAULT, DEFAULT), payer
    yield QuotaEntity(DEFAULT), of_user
    yield QuotaEntity(None, client_id), of_id
    yield QuotaEntity(None, DEFAULT), of_id


class Bucket(NamedTuple):
    """What was asked for and has not drained at `at_ms`."""

    amount: float
    at_ms: int


EMPTY = Bucket(0.0, 0)


def drained(bucket: Bucket, rate: float, now_ms: int) -> Bucket:
    """What is left of it now."""
    return Bucket(max(bucket.amount - rate * (now_ms - bucket.at_ms) / 1000, 0.0), now_ms)


def charged(bucket: Bucket, amount: float, rate: float, now_ms: int) -> Bucket:
    """With `amount` more in it."""
    return Bucket(drained(bucket, rate, now_ms).amount + amount, now_ms)


def decide_wait_ms(bucket: Bucket, key: str, rate: float, burst_seconds: float, now_ms: int) -> int:
    """How long those who share it wait before they ask again; 0: not at all."""
    above = drained(bucket, rate, now_ms).amount - rate * burst_seconds
    # A rate that is next to nothing makes the time infinite, which has no ceiling.
    return math.ceil(min(above / rate * 1000, QUOTAS[key].longest_wait_ms)) if above > 0 else 0
