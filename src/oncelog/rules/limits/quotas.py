"""Client quotas: which quota applies to a client, and how long a client over its quota must wait.

A quota is a rate for an entity: a user, a client id, both together, or an IP address. Below are the entities
whose quotas can apply to a user with a client id. The first of them that has a quota decides. A part of an
entity is one name (`named`), the default for all names, or absent (-). The clients in a row's last column
share the quota:

    user     client-id   shared by
    named    named       that user's clients with that id
    named    default     that user's clients with one id
    named    -           that user's clients
    default  named       one user's clients with that id
    default  default     one user's clients with one id
    default  -           one user's clients
    -        named       clients with that id
    -        default     clients with one id

The usage of these clients is added to a bucket that drains at the quota's rate. (Kafka's TokenBucket is the
opposite: it contains unused tokens.) A bucket may contain the usage that drains in `burst_seconds`, which is
quota.window.num times quota.window.size.seconds. If the bucket contains more, the clients are throttled until
it has drained to that amount. Source: KIP-13, KIP-55, KIP-124, KIP-546, KIP-599, KIP-612, KIP-936; kafka
ClientQuotaManager.
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

MAX_CLIENT_ID_CHARACTERS = 1_000
"""Number of characters of a client id that quotas distinguish.

A client id may have 32,767 bytes, which take up to 131 KB as a str, and each connection keeps its last one.
"""
DEFAULT = ""
"""The name of the default entity. No other entity has an empty name."""


class _Kind(NamedTuple):
    unit: str
    max_value: float = math.inf
    is_integral: bool = False
    max_wait_ms: int = 2**31 - 1


USER_QUOTAS: dict[str, _Kind] = {
    PRODUCER_BYTES: _Kind("bytes of Produce requests a second", 2**63 - 1, is_integral=True),
    CONSUMER_BYTES: _Kind("bytes of Fetch responses a second", 2**63 - 1, is_integral=True),
    # Keep the maximum throttle time short, because this quota also throttles heartbeats.
    REQUEST_PERCENTAGE: _Kind("percent of the broker's thread", max_wait_ms=1_000),
    MUTATIONS: _Kind("partitions created or deleted a second"),
    PRODUCER_IDS: _Kind("producer ids a second"),
}
"""Quotas of users and client ids, with Kafka's names.

Kafka does not have producer_ids_rate yet; it is from KIP-936.
"""
IP_QUOTAS: dict[str, _Kind] = {
    CONNECTIONS: _Kind("connections a second", 2**31 - 1, is_integral=True, max_wait_ms=1_000),
}
QUOTAS = USER_QUOTAS | IP_QUOTAS

ENTITY_TYPES = ("user", "client-id", "ip")
"""The entity types of the protocol, in the order of the fields of QuotaEntity."""


class QuotaEntity(NamedTuple):
    """The entity of a quota. Each part is a name, DEFAULT, or None if the entity does not have this part."""

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None

    @property
    def parts(self) -> dict[str, str]:
        """The entity's parts that are not None, by entity type."""
        named = zip(ENTITY_TYPES, self, strict=True)
        return {kind: name for kind, name in named if name is not None}

    def __str__(self) -> str:
        return ", ".join(f"{kind} {name or '<default>'}" for kind, name in self.parts.items())


Values = Mapping[str, float]
"""Rates by quota name."""


def parse_entity(pairs: Iterable[tuple[str, str | None]]) -> QuotaEntity:
    """Return the entity with these (type, name) pairs. A null name means the default.

    Raises InvalidRequest.
    """
    named = dict(pairs)
    if not named:
        raise InvalidRequest("an entity needs a user, a client-id or an ip")
    unknown = sorted(named.keys() - set(ENTITY_TYPES))
    if unknown:
        raise InvalidRequest(f"{unknown[0]!r} is not an entity type; use one of {', '.join(ENTITY_TYPES)}")
    for kind, name in named.items():
        if name == "":
            raise InvalidRequest(f"the name of a {kind} is empty; use null for the default")
    return QuotaEntity(*(named[kind] or DEFAULT if kind in named else None for kind in ENTITY_TYPES))


def normalize_entity(entity: QuotaEntity) -> QuotaEntity:
    """Return the entity with a canonical IP address.

    Raises InvalidRequest if no quota can be set for the entity.
    """
    if entity.ip is None:
        return entity
    if len(entity.parts) > 1:
        raise InvalidRequest("an ip cannot be combined with a user or client-id")
    try:
        return QuotaEntity(ip=str(ip_address(entity.ip)) if entity.ip else DEFAULT)
    except ValueError:
        raise InvalidRequest(f"{entity.ip!r} is not an IP address") from None


def apply_changes(entity: QuotaEntity, values: Values, changes: Iterable[tuple[str, float | None]]) -> Values:
    """Return the entity's quotas `values` after `changes`. A rate of None removes a quota. Raises
    InvalidRequest for an invalid change.
    """
    kinds = USER_QUOTAS if entity.ip is None else IP_QUOTAS
    result, named = dict(values), set()
    for key, value in changes:
        if key in named:
            raise InvalidRequest(f"{key} occurs twice for {entity}")
        named.add(key)
        if value is None:
            result.pop(key, None)
            continue
        if key not in kinds:
            raise InvalidRequest(f"{key!r} is not a quota of {entity}; use one of {', '.join(kinds)}")
        _check_value(key, value, kinds[key])
        result[key] = value
    return result


def _check_value(key: str, value: float, kind: _Kind) -> None:
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{key}={value}: a quota must be above 0; remove it for no limit")
    if value > kind.max_value:
        raise InvalidRequest(f"{key}={value} is above the maximum {kind.max_value}")
    if kind.is_integral and value % 1:
        raise InvalidRequest(f"{key}={value} must be a whole number of {kind.unit}")


@dataclass(frozen=True, slots=True)
class QuotaFilter:
    """A filter of entities. It selects the entities that match all its parts.

    If `is_strict`, the entities must have no other parts. `parts` maps a type to a name, to DEFAULT, or to
    None, which matches any name and the default.
    """

    parts: Mapping[str, str | None] = field(default_factory=dict)
    is_strict: bool = False

    def check(self) -> None:
        """Raise UnsupportedVersion for an unknown entity type, and InvalidRequest if ip is combined with
        another type.
        """
        for kind in self.parts:
            if kind not in ENTITY_TYPES:
                raise UnsupportedVersion(
                    f"{kind!r} is not an entity type; use one of {', '.join(ENTITY_TYPES)}"
                )
        if "ip" in self.parts and len(self.parts) > 1:
            raise InvalidRequest("an ip cannot be combined with a user or client-id")

    def matches(self, entity: QuotaEntity) -> bool:
        """Return True if the filter selects this entity."""
        parts = entity.parts
        if self.is_strict and len(parts) != len(self.parts):
            return False
        return all(kind in parts and name in (None, parts[kind]) for kind, name in self.parts.items())


def counted_client_id(client_id: str | None) -> str:
    """Return the client id under which usage is counted; "" for None. A long one is cut off."""
    return (client_id or "")[:MAX_CLIENT_ID_CHARACTERS]


class QuotaPrincipal(NamedTuple):
    """The identity under which usage is counted: user and client id. For quotas of new connections, only `ip`
    is set.
    """

    user: str = ""
    client_id: str = ""
    ip: str = ""


class EffectiveQuota(NamedTuple):
    """The rate of the quota that applies to a client, and the principal under which its usage is counted.

    All clients that share the quota have the same `shared_by`. Therefore, a throttled client cannot escape by
    opening a new connection. See test_a_client_over_its_fetch_quota_is_throttled_on_a_new_connection_too.
    """

    rate: float
    shared_by: QuotaPrincipal


def find_effective_quota(
    rates: Mapping[QuotaEntity, float], principal: QuotaPrincipal
) -> EffectiveQuota | None:
    """Return the quota that applies to a client; None if no quota applies.

    `rates` has the rates of one quota by entity.
    """
    for entity, shared_by in _candidates(principal):
        rate = rates.get(entity)
        if rate is not None:
            return EffectiveQuota(rate, shared_by)
    return None


def _candidates(principal: QuotaPrincipal) -> Iterator[tuple[QuotaEntity, QuotaPrincipal]]:
    user, client_id, ip = principal
    if ip:
        yield QuotaEntity(ip=ip), principal
        yield QuotaEntity(ip=DEFAULT), principal
        return
    of_user, of_id = QuotaPrincipal(user=user), QuotaPrincipal(client_id=client_id)
    yield QuotaEntity(user, client_id), principal
    yield QuotaEntity(user, DEFAULT), principal
    yield QuotaEntity(user), of_user
    yield QuotaEntity(DEFAULT, client_id), principal
    yield QuotaEntity(DEFAULT, DEFAULT), principal
    yield QuotaEntity(DEFAULT), of_user
    yield QuotaEntity(None, client_id), of_id
    yield QuotaEntity(None, DEFAULT), of_id


class Bucket(NamedTuple):
    """The usage that had not drained yet at the time `at_ms`."""

    amount: float
    at_ms: int


EMPTY = Bucket(0.0, 0)


def drain(bucket: Bucket, rate: float, now_ms: int) -> Bucket:
    """Return the bucket at `now_ms`, after it has drained at `rate` units a second."""
    return Bucket(max(bucket.amount - rate * (now_ms - bucket.at_ms) / 1000, 0.0), now_ms)


def charge(bucket: Bucket, amount: float, rate: float, now_ms: int) -> Bucket:
    """Return the bucket at `now_ms`, after it has drained, with `amount` added."""
    return Bucket(drain(bucket, rate, now_ms).amount + amount, now_ms)


def decide_wait_ms(bucket: Bucket, key: str, rate: float, burst_seconds: float, now_ms: int) -> int:
    """Return the throttle time in ms of the clients that share the bucket; 0 if they are within the quota."""
    above = drain(bucket, rate, now_ms).amount - rate * burst_seconds
    # With a tiny rate the time is infinite, and math.ceil would raise an error. So apply the maximum first.
    return math.ceil(min(above / rate * 1000, QUOTAS[key].max_wait_ms)) if above > 0 else 0
