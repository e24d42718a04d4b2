"""The broker's ACLs, stored in a file, and its authorization checks, whose results are cached.

`rules.security.authorization` makes the decisions. Each change durably replaces the whole file
`oncelog-acls.json`. Without `authorizer.class.name` there is no authorizer, and every operation is allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from sys import getsizeof
from typing import Any, Protocol
from weakref import WeakValueDictionary

from oncelog.broker.state_file import (
    ROWS_PER_STEP,
    ChangeLock,
    EncodedRow,
    encode_row,
    read_state,
    write_state,
)
from oncelog.broker.stepwise import Work, run_work
from oncelog.errors import (
    BrokerError,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from oncelog.log.disk import Disk
from oncelog.rules.security.authorization import (
    Acl,
    AclTable,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    is_allowed,
    is_allowed_somewhere,
    parse_super_users,
)

FILE_NAME = "oncelog-acls.json"
KEPT_BYTES = 1 << 20
"""Largest size in bytes of the cached results of a principal and host.

Clients choose the resource names, so without a limit they could fill the memory.
"""
MAX_CHANGED_IN_PLACE = 1_000
"""Maximum number of ACLs that one step adds or removes. A larger change makes a new table in steps."""
MAX_KEPT_NAME = 256
"""Longest resource name whose check is cached, in characters."""
_ENTRY_BYTES = 250
"""Approximate size in bytes of a cached result without its resource name."""

_REFUSALS: dict[ResourceType, type[BrokerError]] = {
    ResourceType.TOPIC: TopicAuthorizationFailed,
    ResourceType.GROUP: GroupAuthorizationFailed,
    ResourceType.CLUSTER: ClusterAuthorizationFailed,
    ResourceType.TRANSACTIONAL_ID: TransactionalIdAuthorizationFailed,
}

_O = Operation
OPERATIONS_ON: dict[ResourceType, tuple[Operation, ...]] = {
    ResourceType.TOPIC: (
        _O.READ, _O.WRITE, _O.CREATE, _O.DELETE, _O.ALTER, _O.DESCRIBE, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS
    ),
    ResourceType.GROUP: (_O.READ, _O.DELETE, _O.DESCRIBE, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS),
    ResourceType.CLUSTER: (
        _O.CREATE, _O.ALTER, _O.DESCRIBE, _O.CLUSTER_ACTION, _O.DESCRIBE_CONFIGS, _O.ALTER_CONFIGS,
        _O.IDEMPOTENT_WRITE,
    ),
}  # fmt: skip
"""Operations that apply to each type of resource. Source: kafka AclEntry.supportedOperations."""


class Access(Protocol):
    """The permissions of one client."""

    def may(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        """Return True if the operation is allowed on this resource."""
        ...

    def may_somewhere(self, operation: Operation, resource_type: ResourceType) -> bool:
        """Return True if the operation is allowed on at least one resource of the type, existing or not."""
        ...


class _FullAccess:
    def may(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return True

    def may_somewhere(self, operation: Operation, resource_type: ResourceType) -> bool:
        return True


class _NoAccess:
    def may(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return False

    def may_somewhere(self, operation: Operation, resource_type: ResourceType) -> bool:
        return False


FULL_ACCESS: Access = _FullAccess()
NO_ACCESS: Access = _NoAccess()
"""The permissions of clients that are not authenticated."""


def refusal_of(resource_type: ResourceType) -> BrokerError:
    """Return the ..._AUTHORIZATION_FAILED error for a type of resource."""
    return _REFUSALS[resource_type]()


def allowed_bits(access: Access, resource_type: ResourceType, name: str) -> int:
    """Return the allowed operations as Metadata and the Describe APIs encode them: one bit for each
    operation.
    """
    operations = OPERATIONS_ON[resource_type]
    return sum(1 << operation for operation in operations if access.may(operation, resource_type, name))


class Authorizer:
    """All ACLs of the broker. `version` is incremented by each change."""

    def __init__(self, disk: Disk, super_users: str, *, allows_if_none: bool) -> None:
        self._disk = disk
        self.super_users = parse_super_users(super_users)
        self.allows_if_none = allows_if_none
        self.version = 0
        # An unreadable file must stop the broker: without the file's ACLs, operations that they deny would be
        # allowed.
        self.acls = AclTable(read_state(disk, FILE_NAME, _parse) or ())
        """The ACLs. They change in this object, so requests in steps must copy what they iterate over. A
        change of many ACLs replaces it.
        """
        self._rows = {acl: encode_acl(acl) for acl in self.acls}
        """The rows of the file. With them, a change of one ACL need not encode all others."""
        self._lock = ChangeLock()
        self._accesses: WeakValueDictionary[tuple[str, str], AccessByAcls] = WeakValueDictionary()

    def access(self, principal: str, host: str) -> Access:
        """Return the permissions of a principal at a host.

        All connections with the same principal and host share one object and its cache.
        """
        if principal in self.super_users:
            return FULL_ACCESS
        access = self._accesses.get((principal, host))
        if access is None:
            access = self._accesses[principal, host] = AccessByAcls(self, principal, host)
        return access

    def add(self, acls: Iterable[Acl]) -> None:
        """Add ACLs durably. After a StorageError none is added."""
        run_work(self.add_in_steps({acl: encode_acl(acl) for acl in acls}))

    def add_in_steps(self, rows: Mapping[Acl, EncodedRow]) -> Work[None]:
        """Add ACLs as `add` does, with a write in another thread. The caller must run all steps.

        `rows` has the result of `encode_acl` for each ACL.
        """
        return self._lock.hold(self._add(rows))

    def _add(self, rows: Mapping[Acl, EncodedRow]) -> Work[None]:
        added = {acl: row for acl, row in rows.items() if acl not in self.acls}
        if added:
            yield from self._change(self._rows | added, added, ())

    def replace(self, acls: Collection[Acl]) -> None:
        """Replace all ACLs durably. After a StorageError nothing has changed."""
        rows = {acl: encode_acl(acl) for acl in acls}
        run_work(self._lock.hold(self._change(rows, rows, list(self.acls))))

    def remove(self, acls: Iterable[Acl]) -> None:
        """Remove ACLs durably. ACLs that do not exist are ignored. After a StorageError none is removed."""
        run_work(self.remove_in_steps(acls))

    def remove_in_steps(self, acls: Iterable[Acl]) -> Work[None]:
        """Remove ACLs as `remove` does, with a write in another thread. The caller must run all steps."""
        return self._lock.hold(self._remove(acls))

    def _remove(self, acls: Iterable[Acl]) -> Work[None]:
        left, removed = self._rows.copy(), []
        for count, acl in enumerate(acls, 1):
            if left.pop(acl, None) is not None:
                removed.append(acl)
            if count % ROWS_PER_STEP == 0:
                yield None
        if removed:
            yield from self._change(left, (), removed)

    def _change(
        self, rows: dict[Acl, EncodedRow], added: Collection[Acl], removed: Collection[Acl]
    ) -> Work[None]:
        """Write `rows` to the file, then change the ACLs. All of them change together, because the ACLs that
        allow an operation must not be in effect without those that deny it.
        """
        table = None
        if len(added) + len(removed) > MAX_CHANGED_IN_PLACE:
            table = AclTable()
            for count, acl in enumerate(rows, 1):
                table.add(acl)
                if count % MAX_CHANGED_IN_PLACE == 0:
                    yield None
        yield partial(write_state, self._disk, FILE_NAME, {"acls": list(rows.values())})
        if table is not None:
            self.acls = table
        else:
            for acl in removed:
                self.acls.remove(acl)
            for acl in added:
                self.acls.add(acl)
        self._rows = rows
        self.version += 1


def encode_acl(acl: Acl) -> EncodedRow:
    """Return an ACL's row in the file."""
    return encode_row(
        {
            "resource_type": acl.resource_type.name,
            "name": acl.name,
            "pattern_type": acl.pattern_type.name,
            "principal": acl.principal,
            "host": acl.host,
            "operation": acl.operation.name,
            "permission": acl.permission.name,
        }
    )


_Key = tuple[Operation, ResourceType, str | None]
"""(operation, type, name) of a check; the name is None for `may_somewhere`."""


class AccessByAcls:
    """The permissions of one principal at one host, with results cached until an ACL changes.

    `kept_bytes` is the approximate size of the cache, at most KEPT_BYTES.
    """

    __slots__ = ("__weakref__", "_answers", "_authorizer", "_host", "_principal", "_version", "kept_bytes")

    def __init__(self, authorizer: Authorizer, principal: str, host: str) -> None:
        self._authorizer, self._principal, self._host = authorizer, principal, host
        self._version = authorizer.version
        self._answers: dict[_Key, bool] = {}
        self.kept_bytes = 0

    def may(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        if self._version != self._authorizer.version:
            self._forget()
        key = operation, resource_type, name
        allowed = self._answers.get(key)
        if allowed is None:
            allowed = self._decide(operation, resource_type, name)
            if len(name) <= MAX_KEPT_NAME:
                self._remember(key, allowed)
        return allowed

    def _decide(self, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        acls = self._authorizer.acls.acls_for(self._principal, resource_type, name)
        if_none = self._authorizer.allows_if_none
        return is_allowed(acls, self._principal, self._host, operation, if_none=if_none)

    def _remember(self, key: _Key, is_allowed: bool) -> None:
        size_bytes = _ENTRY_BYTES + getsizeof(key[2])
        if self.kept_bytes + size_bytes > KEPT_BYTES:
            self._forget()
        self._answers[key] = is_allowed
        self.kept_bytes += size_bytes

    def _forget(self) -> None:
        self._answers.clear()
        self.kept_bytes = 0
        self._version = self._authorizer.version

    def may_somewhere(self, operation: Operation, resource_type: ResourceType) -> bool:
        if self._version != self._authorizer.version:
            self._forget()
        key = operation, resource_type, None
        allowed = self._answers.get(key)
        if allowed is None:
            # As in Kafka's Authorizer, "hardcode" represents any resource that no ACL names. An ACL on all
            # names allows such a resource, and so does allow.everyone.if.no.acl.found.
            allowed = self.may(operation, resource_type, "hardcode") or is_allowed_somewhere(
                self._authorizer.acls, self._principal, self._host, operation, resource_type
            )
            self._remember(key, allowed)
        return allowed


def _parse(content: dict[str, Any]) -> list[Acl]:
    return [
        Acl(
            ResourceType[row["resource_type"]],
            row["name"],
            PatternType[row["pattern_type"]],
            row["principal"],
            row["host"],
            Operation[row["operation"]],
            Permission[row["permission"]],
        )
        for row in content["acls"]
    ]
