"""May this principal do that to this resource? Deny first, then allow, then what holds where no ACL speaks.

    super user                                             allowed
    an ACL denies the operation, or ALL                    denied
    an ACL allows it, or ALL, or something that implies it allowed
    ACLs speak of the resource, but not of this            denied
    no ACL speaks of it                                    as allow.everyone.if.no.acl.found
READ, WRITE, DELETE and ALTER imply DESCRIBE; ALTER_CONFIGS implies DESCRIBE_CONFIGS. A denied READ does not
deny DESCRIBE. An ACL speaks of a resource by its name, by * or by a prefix; of a principal and a host by
name or by *.
Source: Kafka's StandardAuthorizerData, KIP-11, KIP-290.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from ipaddress import ip_address

from oncelog.errors import InvalidRequest


class ResourceType(IntEnum):
    """What an ACL is about. Source: Kafka's ResourceType."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """How an ACL's name is meant; MATCH and ANY only in filters. Source: Kafka's PatternType."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Operation(IntEnum):
    """What may be done. Source: Kafka's AclOperation."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(IntEnum):
    """Source: Kafka's AclPermissionType."""

    ANY = 1
    DENY = 2
    ALLOW = 3


CLUSTER_NAME = "kafka-cluster"
"""The only name a resource of type CLUSTER has."""
WILDCARD = "*"
ANYBODY = "User:*"
ANONYMOUS = "User:ANONYMOUS"
"""Who connects without saying who it is."""

IMPLIED_BY = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}


@lru_cache(maxsize=1_024)
def usual_address(host: str) -> str:
    """Return an IP address as sockets write it; any other text as it is."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One binding. `principal` as User:alice, `host` an address in any spelling, or *."""

    resource_type: ResourceType
    name: str
    pattern_type: PatternType
    principal: str
    host: str
    operation: Operation
    permission: Permission

    def is_of(self, principals: Collection[str], host: str) -> bool:
        """Whether it speaks of one of these principals at this host, an address as sockets write it.

        Java writes ::1 as 0:0:0:0:0:0:0:1, and so do ACLs that were made for Apache Kafka.
        """
        if self.principal != ANYBODY and self.principal not in principals:
            return False
        return self.host in (WILDCARD, host) or usual_address(self.host) == host

    def speaks_of(self, name: str) -> bool:
        """Whether a resource of its type and this name is meant."""
        if self.pattern_type is PatternType.PREFIXED:
            return name.startswith(self.name)
        return self.name in (name, WILDCARD)


@dataclass(frozen=True, slots=True)
class AclFilter:
    """Which ACLs are meant; None and ANY mean any. MATCH: all that speak of a resource named `name`."""

    resource_type: ResourceType = ResourceType.ANY
    name: str | None = None
    pattern_type: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    def takes(self, acl: Acl) -> bool:
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and self._takes_name(acl)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (Operation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
        )

    def _takes_name(self, acl: Acl) -> bool:
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, acl.pattern_type):
            return False
        if self.name is None:
            return True
        return acl.speaks_of(self.name) if self.pattern_type is PatternType.MATCH else acl.name == self.name


class AclTable:
    """All ACLs, found by what they are about."""

    def __init__(self, acls: Iterable[Acl] = ()) -> None:
        self._acls: dict[Acl, None] = {}
        self._by_name: dict[tuple[ResourceType, PatternType, str], list[Acl]] = {}
        self._prefix_lengths: dict[ResourceType, Counter[int]] = {}
        """How many prefixes of each length there are: a name is only asked about at these lengths."""
        for acl in acls:
            self.add(acl)

    def __iter__(self) -> Iterator[Acl]:
        return iter(self._acls)

    def __len__(self) -> int:
        return len(self._acls)

    def __contains__(self, acl: object) -> bool:
        return acl in self._acls

    def add(self, acl: Acl) -> None:
        """Once, however often it is added."""
        if acl not in self._acls:
            self._acls[acl] = None
            speaking = self._by_name.setdefault(_key(acl), [])
            if not speaking and acl.pattern_type is PatternType.PREFIXED:
                self._prefix_lengths.setdefault(acl.resource_type, Counter())[len(acl.name)] += 1
            speaking.append(acl)

    def remove(self, acl: Acl) -> None:
        del self._acls[acl]
        speaking = self._by_name[_key(acl)]
        speaking.remove(acl)
        if speaking:
            return
        del self._by_name[_key(acl)]
        if acl.pattern_type is PatternType.PREFIXED:
            lengths = self._prefix_lengths[acl.resource_type]
            lengths[len(acl.name)] -= 1
            if not lengths[len(acl.name)]:
                del lengths[len(acl.name)]

    def looked_up(self, resource_type: ResourceType, name: str) -> Iterator[tuple[PatternType, str]]:
        """Yield the patterns under which ACLs of a resource may stand: a few, however long its name is."""
        yield PatternType.LITERAL, name
        if name != WILDCARD:
            yield PatternType.LITERAL, WILDCARD
        for length in self._prefix_lengths.get(resource_type, ()):
            if length <= len(name):
                yield PatternType.PREFIXED, name[:length]

    def speaking_of(self, resource_type: ResourceType, name: str) -> Iterator[Acl]:
        """The ACLs about one resource."""
        for pattern_type, text in self.looked_up(resource_type, name):
            yield from self._by_name.get((resource_type, pattern_type, text), ())

    def candidates(self, wanted: AclFilter) -> Iterable[Acl]:
        """Return the ACLs that a filter may take: all of them, or those of the one pattern that it names."""
        is_one = wanted.pattern_type in (PatternType.LITERAL, PatternType.PREFIXED)
        if is_one and wanted.name is not None and wanted.resource_type is not ResourceType.ANY:
            return self._by_name.get((wanted.resource_type, wanted.pattern_type, wanted.name), ())
        return self._acls


def _key(acl: Acl) -> tuple[ResourceType, PatternType, str]:
    return acl.resource_type, acl.pattern_type, acl.name


def is_allowed(
    acls: Iterable[Acl], principal: str, host: str, operation: Operation, *, if_none: bool = False
) -> bool:
    """`acls`: those that speak of the resource. `if_none`: the answer when there are none."""
    found_any = found_allow = False
    enough = {operation, Operation.ALL, *IMPLIED_BY.get(operation, ())}
    for acl in acls:
        found_any = True
        if not acl.is_of((principal,), host):
            continue
        if acl.permission is Permission.DENY:
            if acl.operation in (operation, Operation.ALL):
                return False
        elif acl.operation in enough:
            found_allow = True
    return found_allow if found_any else if_none


def is_allowed_somewhere(
    acls: Iterable[Acl], principal: str, host: str, operation: Operation, resource_type: ResourceType
) -> bool:
    """Whether ACLs allow the operation on any resource of the type that could be there.

    An allowed name or prefix counts unless a denied one covers all of it. Source: Kafka's
    Authorizer.authorizeByResourceType, KIP-679.
    """
    own = [
        acl
        for acl in acls
        if acl.resource_type is resource_type
        and acl.is_of((principal,), host)
        and acl.operation in (operation, Operation.ALL)
    ]
    denied = [acl for acl in own if acl.permission is Permission.DENY]
    return any(
        acl.permission is Permission.ALLOW and not any(_covers(no, acl) for no in denied) for acl in own
    )


def _covers(denied: Acl, allowed: Acl) -> bool:
    if denied.pattern_type is PatternType.PREFIXED:
        return allowed.name.startswith(denied.name) and allowed.name != WILDCARD
    if denied.name == WILDCARD:
        return True
    return allowed.pattern_type is PatternType.LITERAL and allowed.name == denied.name


def check_acl(acl: Acl) -> None:
    """Raises InvalidRequest for a binding that cannot be stored."""
    if acl.resource_type is ResourceType.ANY or acl.pattern_type in (PatternType.ANY, PatternType.MATCH):
        raise InvalidRequest("an ACL is about one type of resource, by a name or a prefix")
    if acl.operation is Operation.ANY or acl.permission is Permission.ANY:
        raise InvalidRequest("an ACL allows or denies one operation, or ALL")
    if not acl.name:
        raise InvalidRequest("an ACL needs the name of a resource, or *")
    if acl.resource_type is ResourceType.CLUSTER and acl.name != CLUSTER_NAME:
        raise InvalidRequest(f"the only cluster is called {CLUSTER_NAME}")
    kind, separator, name = acl.principal.partition(":")
    if not (kind and separator and name):
        raise InvalidRequest(f"principal {acl.principal!r}: expected User:NAME")
    if not acl.host:
        raise InvalidRequest("an ACL needs a host's address, or *")


def parse_super_users(text: str) -> frozenset[str]:
    """`User:a;User:b`."""
    return frozenset(part.strip() for part in text.split(";") if part.strip())
