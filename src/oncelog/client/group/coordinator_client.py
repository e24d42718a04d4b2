"""Sends requests to a group's coordinator.

Looks the coordinator up when needed, and again after it has moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.connection.coordinator import GROUP, find_coordinator
from oncelog.client.group.core import (
    MAX_OFFSET_FETCH_VERSION,
    committed_from,
    committed_request,
    next_after,
)
from oncelog.errors import MisuseError, OncelogError, TimedOut
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.settings import Settings
from oncelog.types import OffsetAndMetadata, TopicPartition

T = TypeVar("T")


def no_answer(group_id: str, request: GroupRequest, limit_ms: float, last: Exception | None) -> TimedOut:
    """Return the error for a request that was retried until `limit_ms` had passed.

    `last` is the error of the last attempt, if there was one.
    """
    reason = f": {last}" if last else f" to {request.value} within {limit_ms:g} ms"
    return TimedOut(f"the coordinator of group {group_id!r} did not respond in time{reason}")


class GroupCoordinatorClient:
    """A client of one group's coordinator, for members and for consumers that are not members.

    The constructor raises MisuseError if group.id is not set.
    """

    def __init__(self, settings: Settings, cluster: ClusterConnection) -> None:
        if settings["group.id"] is None:
            raise MisuseError(
                "group.id is not set: set it to the consumer's group before subscribing or committing"
            )
        self.group_id: str = settings["group.id"]
        self._settings, self._cluster = settings, cluster
        self._coordinator_id: int | None = None

    async def committed(
        self, partitions: Collection[TopicPartition], channel: Callable[[], str] = lambda: "group"
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the group's committed offsets; partitions without a commit are missing from the result.

        `channel` returns the channel for each attempt. Raises TimedOut after request.timeout.ms, and the
        coordinator's final errors.
        """
        if not partitions:
            return {}
        # Request stable offsets under every isolation.level: an open transaction may still commit offsets. A
        # consumer that did not wait for these offsets would process records twice. Java's consumer waits too.
        # Guard: test_a_successor_waits_for_offsets_of_an_open_transaction_at_any_isolation_level.
        request = committed_request(self.group_id, partitions, is_stable=True)

        async def attempt() -> dict[TopicPartition, OffsetAndMetadata]:
            error, offsets = committed_from(
                await self.send(request, max_version=MAX_OFFSET_FETCH_VERSION, channel=channel())
            )
            if error is not None:
                raise error
            return offsets

        return await self._retry(attempt, GroupRequest.FETCH, self._settings["request.timeout.ms"])

    async def _retry(self, attempt: Callable[[], Awaitable[T]], request: GroupRequest, limit_ms: float) -> T:
        """Repeat `attempt` after transient errors.

        Raises TimedOut after `limit_ms`, even during an attempt.
        """
        last: OncelogError | None = None
        retry_count = 0
        try:
            async with asyncio.timeout(limit_ms / 1000) as limit:
                while True:
                    try:
                        return await attempt()
                    except OncelogError as error:
                        action = next_after(error, request)
                        if action not in (GroupAction.RETRY, GroupAction.FIND):
                            raise
                        if action is GroupAction.FIND:
                            self.forget()
                        last = error
                    await asyncio.sleep(self._cluster.retry_pause_ms(retry_count) / 1000)
                    retry_count += 1
        except TimeoutError:
            if not limit.expired():
                raise
            raise no_answer(self.group_id, request, limit_ms, last) from last

    async def send(
        self,
        request: Any,
        *,
        timeout_ms: float | None = None,
        max_version: int | None = None,
        channel: str = "group",
    ) -> Any:
        """Send one request to the coordinator, and return its response. If the coordinator is not known,
        first look it up.
        """
        if self._coordinator_id is None:
            self._coordinator_id = await find_coordinator(self._cluster, GROUP, self.group_id)
        return await self._cluster.request(
            self._coordinator_id, request, timeout_ms=timeout_ms, max_version=max_version, channel=channel
        )

    def forget(self) -> None:
        """Look the coordinator up again before the next request."""
        self._coordinator_id = None
