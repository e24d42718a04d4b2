"""Client quotas for the admin client. Source: KIP-546."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from oncelog.client.admin import quota_requests as calls
from oncelog.rules.limits.quotas import QuotaEntity, QuotaFilter, Values

if TYPE_CHECKING:
    from oncelog.client.admin.aio import AsyncAdmin


class AsyncQuotas:
    """The asyncio face's part."""

    _ask_controller: Callable[..., Awaitable[Any]]

    async def describe_client_quotas(self, wanted: QuotaFilter | None = None) -> Mapping[QuotaEntity, Values]:
        """Quotas of the entities that a filter takes (None: all), by quota."""
        return calls.described(await self._ask_controller(calls.describe(wanted or QuotaFilter())))

    async def alter_client_quotas(self, changes: calls.Changes, *, validate_only: bool = False) -> None:
        """Set quotas of entities; None removes. Raises InvalidRequest; other entities are altered."""
        calls.check_altered(await self._ask_controller(calls.alter(changes, validate_only=validate_only)))


class Quotas:
    """The blocking face's part."""

    _async: AsyncAdmin
    _run: Callable[[Coroutine[Any, Any, Any]], Any]

    def describe_client_quotas(self, wanted: QuotaFilter | None = None) -> Mapping[QuotaEntity, Values]:
        """Quotas of the entities that a filter takes (None: all), by quota."""
        found: Mapping[QuotaEntity, Values] = self._run(self._async.describe_client_quotas(wanted))
        return found

    def alter_client_quotas(self, changes: calls.Changes, *, validate_only: bool = False) -> None:
        """Set quotas of entities; None removes. Raises InvalidRequest; other entities are altered."""
        self._run(self._async.alter_client_quotas(changes, validate_only=validate_only))
