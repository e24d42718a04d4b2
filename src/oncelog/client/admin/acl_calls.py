"""ACLs and SCRAM users for the admin client. Source: KIP-11, KIP-290, KIP-554."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oncelog.client.admin import acls_and_users as calls
from oncelog.client.arguments import items_of, names_of
from oncelog.rules.security.authorization import Acl, AclFilter
from oncelog.rules.security.scram import Mechanism

if TYPE_CHECKING:
    from oncelog.client.admin.aio import AsyncAdmin

T = TypeVar("T")
_SALT_BYTES = 24
_BOTH = tuple(Mechanism)


class AsyncPermissions:
    """The asyncio face's part."""

    _ask_controller: Callable[..., Awaitable[Any]]

    async def create_acls(self, acls: Collection[Acl] | Acl) -> None:
        """Add ACLs; those that are there already are no error. Raises SecurityDisabled, InvalidRequest ..."""
        acls = items_of(acls, Acl, "Acl(...)")
        calls.check_created(await self._ask_controller(calls.create_acls(acls)), acls)

    async def describe_acls(self, wanted: AclFilter | None = None) -> list[Acl]:
        """The ACLs that a filter takes; None: all."""
        message = calls.describe_acls(wanted or AclFilter())
        return calls.described_acls(await self._ask_controller(message))

    async def delete_acls(self, filters: Collection[AclFilter | Acl] | AclFilter | Acl) -> list[Acl]:
        """Delete what the filters take; what that was. An Acl takes itself alone."""
        wanted = items_of(filters, cast("type[Any]", AclFilter | Acl), "AclFilter(...)")
        return calls.deleted_acls(await self._ask_controller(calls.delete_acls(wanted)))

    async def set_user(
        self,
        name: str,
        password: str,
        *,
        mechanisms: Collection[Mechanism] | Mechanism = _BOTH,
        iterations: int = calls.DEFAULT_ITERATIONS,
    ) -> None:
        """Add a SCRAM user or change the password; the password itself is not sent."""
        salt = os.urandom(_SALT_BYTES)
        mechanisms = items_of(mechanisms, Mechanism, "Mechanism")
        for mechanism in mechanisms:  # a user may be named once in a request
            message = calls.set_user(name, password, mechanism, salt, iterations)
            calls.check_altered(await self._ask_controller(message))

    async def delete_user(
        self, name: str, *, mechanisms: Collection[Mechanism] | Mechanism | None = None
    ) -> None:
        """Remove a SCRAM user (None: whatever mechanisms it has). Raises ResourceNotFound."""
        if mechanisms is None:
            mechanisms = list((await self.list_users([name]))[name])
        for mechanism in items_of(mechanisms, Mechanism, "Mechanism"):
            calls.check_altered(await self._ask_controller(calls.delete_user(name, mechanism)))

    async def list_users(
        self, names: Collection[str] | str | None = None
    ) -> Mapping[str, Mapping[Mechanism, int]]:
        """SCRAM users (None: all) with their mechanisms and iterations. Raises ResourceNotFound."""
        if names is not None:
            names = names_of(names, "names of users (str)")
        return calls.described_users(await self._ask_controller(calls.describe_users(names)))


class Permissions:
    """The blocking face's part."""

    _async: AsyncAdmin
    _run: Callable[[Coroutine[Any, Any, Any]], Any]

    def create_acls(self, acls: Collection[Acl] | Acl) -> None:
        """Add ACLs; those that are there already are no error. Raises SecurityDisabled, InvalidRequest ..."""
        self._run(self._async.create_acls(acls))

    def describe_acls(self, wanted: AclFilter | None = None) -> list[Acl]:
        """The ACLs that a filter takes; None: all."""
        found: list[Acl] = self._run(self._async.describe_acls(wanted))
        return found

    def delete_acls(self, filters: Collection[AclFilter | Acl] | AclFilter | Acl) -> list[Acl]:
        """Delete what the filters take; what that was."""
        deleted: list[Acl] = self._run(self._async.delete_acls(filters))
        return deleted

    def set_user(
        self,
        name: str,
        password: str,
        *,
        mechanisms: Collection[Mechanism] | Mechanism = _BOTH,
        iterations: int = calls.DEFAULT_ITERATIONS,
    ) -> None:
        """Add a SCRAM user or change the password; the password itself is not sent."""
        self._run(self._async.set_user(name, password, mechanisms=mechanisms, iterations=iterations))

    def delete_user(self, name: str, *, mechanisms: Collection[Mechanism] | Mechanism | None = None) -> None:
        """Remove a SCRAM user (None: whatever mechanisms it has). Raises ResourceNotFound."""
        self._run(self._async.delete_user(name, mechanisms=mechanisms))

    def list_users(self, names: Collection[str] | str | None = None) -> Mapping[str, Mapping[Mechanism, int]]:
        """SCRAM users (None: all) with their mechanisms and iterations. Raises ResourceNotFound."""
        found: Mapping[str, Mapping[Mechanism, int]] = self._run(self._async.list_users(names))
        return found
