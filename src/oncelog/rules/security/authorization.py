"""ACL decisions: deny first, then allow, then the default for resources without ACLs.

    super user                                                  allowed
    an ACL denies the operation, or ALL                         denied
    an ACL allows it, or ALL, or an operation that implies it   allowed
    other ACLs match the resource                               denied
    no ACL matches the resource                                 allow.everyone.if.no.acl.found decides

READ, WRITE, DELETE and ALTER imply DESCRIBE; ALTER_CONFIGS implies DESCRIBE_CONFIGS. Denying READ does not
deny DESCRIBE. An ACL matches a resource by its name, by * or by a prefix. It matches a principal and a host
by their names or by *.
Source: kafka StandardAuthorizerData; KIP-11, KIP-290.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from ipaddress import ip_address
from itertools import chain

from oncelog.errors import InvalidRequest


class ResourceType(IntEnum):
    """The types of resources. Source: kafka ResourceType."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """The types of name patterns in ACLs; MATCH and ANY are for filters. Source: kafka PatternType."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Operation(IntEnum):
    """The operations on resources. Source: kafka AclOperation."""

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
    """The effect of an ACL: it allows or denies. ANY is for filters. Source: kafka AclPermissionType."""

    ANY = 1
    DENY = 2
    ALLOW = 3


CLUSTER_NAME = "kafka-cluster"
"""The only name of a resource of type CLUSTER."""
WILDCARD = "*"
ANY_USER = "User:*"
ANONYMOUS = "User:ANONYMOUS"
"""The principal of a client without authentication."""

IMPLIED_BY = {
    Operation.DESCRIBE: {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER},
    Operation.DESCRIBE_CONFIGS: {Operation.ALTER_CONFIGS},
}


@lru_cache(maxsize=1_024)
def normalize_address(host: str) -> str:
    """Return an IP address in the form that sockets use. Return any other text unchanged."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One ACL binding. `principal` has the form User:alice. `host` is an IP address in any spelling, or *."""

    resource_type: ResourceType
    name: str
    pattern_type: PatternType
    principal: str
    host: str
    operation: Operation
    permission: Permission

    def applies_to(self, principals: Collection[str], host: str) -> bool:
        """Return True if the ACL matches one of these principals and this host.

        `host` has the form that sockets use. The ACL's host is normalized, because Java writes ::1 as
        0:0:0:0:0:0:0:1. ACLs that were created for Apache Kafka are written this way.
        """
        if self.principal != ANY_USER and self.principal not in principals:
            return False
        return self.host in (WILDCARD, host) or normalize_address(self.host) == host

    def matches_resource(self, name: str) -> bool:
        """Return True if the ACL matches a resource of its type with this name."""
        if self.pattern_type is PatternType.PREFIXED:
            return name.startswith(self.name)
        return self.name in (name, WILDCARD)


@dataclass(frozen=True, slots=True)
class AclFilter:
    """A filter for ACLs. A field that is None or ANY matches everything.

    The pattern type MATCH selects all ACLs that match a resource with this name.
    """

    resource_type: ResourceType = ResourceType.ANY
    name: str | None = None
    pattern_type: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    def matches(self, acl: Acl) -> bool:
        """Return True if the filter selects this ACL."""
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and self._matches_name(acl)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (Operation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
        )

    def _matches_name(self, acl: Acl) -> bool:
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, acl.pattern_type):
            return False
        if self.name is None:
            return True
        return (
            acl.matches_resource(self.name)
            if self.pattern_type is PatternType.MATCH
            else acl.name == self.name
        )


class AclTable:
    """All ACLs, indexed by resource."""

    def __init__(self, acls: Iterable[Acl] = ()) -> None:
        self._acls: dict[Acl, None] = {}
        self._by_name: dict[tuple[ResourceType, PatternType, str], dict[str, dict[Acl, None]]] = {}
        """(resource type, pattern type, name) -> principal -> ACLs."""
        self._prefix_lengths: dict[ResourceType, Counter[int]] = {}
        """Resource type -> for each length, the number of prefixes with this length. A look-up only tries
        lengths that exist.
        """
        for acl in acls:
            self.add(acl)

    def __iter__(self) -> Iterator[Acl]:
        return iter(self._acls)

    def __len__(self) -> int:
        return len(self._acls)

    def __contains__(self, acl: object) -> bool:
        return acl in self._acls

    def add(self, acl: Acl) -> None:
        """Add an ACL if it is not in the table."""
        if acl not in self._acls:
            self._acls[acl] = None
            same_pattern = self._by_name.setdefault(_key(acl), {})
            if not same_pattern and acl.pattern_type is PatternType.PREFIXED:
                self._prefix_lengths.setdefault(acl.resource_type, Counter())[len(acl.name)] += 1
            same_pattern.setdefault(acl.principal, {})[acl] = None

    def remove(self, acl: Acl) -> None:
        """Remove an ACL. Raises KeyError if it is not in the table."""
        del self._acls[acl]
        same_pattern = self._by_name[_key(acl)]
        del same_pattern[acl.principal][acl]
        if not same_pattern[acl.principal]:
            del same_pattern[acl.principal]
        if same_pattern:
            return
        del self._by_name[_key(acl)]
        if acl.pattern_type is PatternType.PREFIXED:
            lengths = self._prefix_lengths[acl.resource_type]
            lengths[len(acl.name)] -= 1
            if not lengths[len(acl.name)]:
                del lengths[len(acl.name)]

    def patterns_matching(self, resource_type: ResourceType, name: str) -> Iterator[tuple[PatternType, str]]:
        """Yield the (pattern type, name) pairs of all ACLs that can match a resource.

        The pairs are few even for a long resource name, because only existing lengths of prefixes are tried.
        """
        yield PatternType.LITERAL, name
        if name != WILDCARD:
            yield PatternType.LITERAL, WILDCARD
        for length in self._prefix_lengths.get(resource_type, ()):
            if length <= len(name):
                yield PatternType.PREFIXED, name[:length]

    def acls_for(self, principal: str, resource_type: ResourceType, name: str) -> Iterator[Acl]:
        """Yield the ACLs that match a resource, for a principal or for all users.

        If a pattern has only ACLs for other principals, one of them is yielded, because `is_allowed` decides
        by it that the resource has ACLs. Thousands of users may have ACLs for one name, such as *. See
        test_a_check_does_not_look_at_the_acls_of_other_principals.
        """
        for pattern_type, text in self.patterns_matching(resource_type, name):
            by_principal = self._by_name.get((resource_type, pattern_type, text))
            if by_principal is None:
                continue
            own, all_users = by_principal.get(principal), by_principal.get(ANY_USER)
            if own is None and all_users is None:
                yield next(_flat(by_principal))
            yield from own or ()
            yield from all_users or ()

    def candidates(self, acl_filter: AclFilter) -> Iterable[Acl]:
        """Return the ACLs that a filter may select.

        If the filter names one pattern (resource type, pattern type and name), return only its ACLs;
        otherwise return all ACLs.
        """
        pattern_type, name = acl_filter.pattern_type, acl_filter.name
        is_exact = pattern_type in (PatternType.LITERAL, PatternType.PREFIXED)
        if is_exact and name is not None and acl_filter.resource_type is not ResourceType.ANY:
            return _flat(self._by_name.get((acl_filter.resource_type, pattern_type, name), {}))
        return self._acls


def _flat(by_principal: Mapping[str, Iterable[Acl]]) -> Iterator[Acl]:
    return chain.from_iterable(by_principal.values())


def _key(acl: Acl) -> tuple[ResourceType, PatternType, str]:
    return acl.resource_type, acl.pattern_type, acl.name


def is_allowed(
    acls: Iterable[Acl], principal: str, host: str, operation: Operation, *, if_none: bool = False
) -> bool:
    """Return True if these ACLs allow the operation. The caller must pass only ACLs that match the resource.

    ACLs of other principals and hosts have no effect, but without any ACL the result is `if_none`.
    """
    has_acl = has_allow = False
    sufficient = {operation, Operation.ALL, *IMPLIED_BY.get(operation, ())}
    for acl in acls:
        has_acl = True
        if not acl.applies_to((principal,), host):
            continue
        if acl.permission is Permission.DENY:
            if acl.operation in (operation, Operation.ALL):
                return False
        elif acl.operation in sufficient:
            has_allow = True
    return has_allow if has_acl else if_none


def is_allowed_somewhere(
    acls: Iterable[Acl], principal: str, host: str, operation: Operation, resource_type: ResourceType
) -> bool:
    """Return True if ACLs allow the operation on at least one resource of the type, existing or not.

    An ALLOW ACL for a name or prefix counts unless a DENY ACL covers it completely. Operations that imply
    this operation do not count. Source: kafka Authorizer.authorizeByResourceType; KIP-679.
    """
    own = [
        acl
        for acl in acls
        if acl.resource_type is resource_type
        and acl.applies_to((principal,), host)
        and acl.operation in (operation, Operation.ALL)
    ]
    denied = _Denied(acl for acl in own if acl.permission is Permission.DENY)
    return any(acl.permission is Permission.ALLOW and not denied.covers(acl) for acl in own)


class _Denied:
    """The names and prefixes of DENY ACLs, indexed so that thousands of them are searched quickly.

    See test_thousands_of_denied_names_are_searched_once_for_each_allowed_name.
    """

    def __init__(self, acls: Iterable[Acl]) -> None:
        self._names: set[str] = set()
        self._prefixes: set[str] = set()
        for acl in acls:
            (self._prefixes if acl.pattern_type is PatternType.PREFIXED else self._names).add(acl.name)
        self._lengths = {len(prefix) for prefix in self._prefixes}

    def covers(self, allowed: Acl) -> bool:
        """Return True if one DENY ACL denies every resource that an ALLOW ACL allows."""
        if WILDCARD in self._names:
            return True
        if allowed.name != WILDCARD and any(
            length <= len(allowed.name) and allowed.name[:length] in self._prefixes
            for length in self._lengths
        ):
            return True
        return allowed.pattern_type is PatternType.LITERAL and allowed.name in self._names


def check_acl(acl: Acl) -> None:
    """Raise InvalidRequest if an ACL binding cannot be stored."""
    if acl.resource_type is ResourceType.ANY or acl.pattern_type in (PatternType.ANY, PatternType.MATCH):
        raise InvalidRequest("an ACL needs one resource type, and the pattern type LITERAL or PREFIXED")
    if acl.operation is Operation.ANY or acl.permission is Permission.ANY:
        raise InvalidRequest("an ACL must allow or deny one operation, or ALL")
    if not acl.name:
        raise InvalidRequest("an ACL needs the name of a resource, or *")
    if acl.resource_type is ResourceType.CLUSTER and acl.name != CLUSTER_NAME:
        raise InvalidRequest(f"the only cluster resource is {CLUSTER_NAME}")
    kind, separator, name = acl.principal.partition(":")
    if not (kind and separator and name):
        raise InvalidRequest(f"principal {acl.principal!r}: expected User:NAME")
    if not acl.host:
        raise InvalidRequest("an ACL needs the address of a host, or *")


def parse_super_users(text: str) -> frozenset[str]:
    """Parse the setting `super.users`, for example User:a;User:b."""
    return frozenset(part.strip() for part in text.split(";") if part.strip())
