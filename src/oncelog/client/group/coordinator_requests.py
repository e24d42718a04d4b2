"""A consumer's requests to its coordinator over asyncio: found when needed, asked again while that helps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.connection.coordinator import GROUP, find_coordinator
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.group.core import (
    MAX_FETCH_VERSION,
    committed_from,
    committed_request,
    next_after,
)
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

T = TypeVar("T")


def no_answer(group_id: str, request: GroupRequest, limit_ms: float, last: Exception | None) -> TimedOut:
    """Return the error of a request that was tried for as long as `limit_ms`."""
    why = f": {last}" if last else f" to {request.value} within {limit_ms:g} ms"
    return TimedOut(f"group {group_id!r} gave no answer in time{why}")


class GroupRequests:
    """What any consumer with a group.id may ask, member or not. Raises MisuseError without one."""

    def __init__(self, core: ConsumerCore, settings: Settings, cluster: ClusterConnection) -> None:
        if settings["group.id"] is None:
            raise MisuseError("group.id is not set: give the consumer's group to subscribe or to commit")
        self.group_id: str = settings["group.id"]
        self.member = ConsumerGroupMetadata(self.group_id)
        self._core, self._settings, self._cluster = core, settings, cluster
        self._coordinator_id: int | None = None

    async def committed(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What the group has committed; partitions without a commit are left out."""
        if not partitions:
            return {}
        # Whatever isolation.level reads: an open transaction may still commit its offsets, and what it has
        # processed would be processed again. As in Java. See
        # test_a_successor_waits_for_offsets_of_an_open_transaction_whatever_it_reads.
        request = committed_request(self.group_id, partitions, is_stable=True)

        async def once() -> dict[TopicPartition, OffsetAndMetadata]:
            error, found = committed_from(await self._ask(request, max_version=MAX_FETCH_VERSION))
            if error is not None:
                raise error
            return found

        found: dict[TopicPartition, OffsetAndMetadata] = await self._until_settled(
            once, GroupRequest.FETCH, self._settings["request.timeout.ms"]
        )
        return found

    async def _until_settled(
        self, once: Callable[[], Awaitable[T]], request: GroupRequest, limit_ms: float
    ) -> T:
        """Try again what may pass, for as long as `limit_ms`. Raises TimedOut then, whatever hangs."""
        last: OncelogError | None = None
        attempt = 0
        try:
            async with asyncio.timeout(limit_ms / 1000) as limit:
                while True:
                    try:
                        return await once()
                    except OncelogError as error:
                        action = next_after(error, request)
                        if action not in (GroupAction.RETRY, GroupAction.FIND):
                            raise
                        if action is GroupAction.FIND:
                            self._coordinator_id = None
                        last = error
                    await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                    attempt += 1
        except TimeoutError:
            if not limit.expired():
                raise
            raise no_answer(self.group_id, request, limit_ms, last) from last

    # Requests

    async def _ask(
        self,
        request: Any,
        *,
        timeout_ms: float | None = None,
        max_version: int | None = None,
        channel: str = "group",
    ) -> Any:
        node_id = await self._coordinator()
        return await self._cluster.request(
            node_id, request, timeout_ms=timeout_ms, max_version=max_version, channel=channel
        )

    async def _coordinator(self) -> int:
        if self._coordinator_id is None:
            self._coordinator_id = await find_coordinator(self._cluster, GROUP, self.group_id)
        return self._coordinator_id
