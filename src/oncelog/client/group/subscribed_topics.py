"""The topics that a consumer subscribes to: by name, or all topics that match a regular expression.

With a pattern, the matching topics are looked up again every metadata.max.age.ms.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection
from contextlib import suppress

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.errors import OncelogError
from oncelog.settings import Settings
from oncelog.wire.messages import MetadataResponse


def matching(response: MetadataResponse, pattern: re.Pattern[str]) -> frozenset[str]:
    """Return the topics whose whole name matches, without Kafka's internal topics and topics with an
    error.
    """
    return frozenset(
        topic.name
        for topic in response.topics
        if topic.name and not topic.error_code and not topic.is_internal and pattern.fullmatch(topic.name)
    )


class SubscribedTopics:
    """The current subscription, its matching topics, and the errors of its topics.

    The periodic lookup calls `is_rebalancing` first, and does nothing during a rebalance. If the lookup
    finds other topics than before, it calls `on_change`.
    """

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        wake: Callable[[], None],
        is_rebalancing: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._core, self._settings, self._cluster, self._wake = core, settings, cluster, wake
        self._is_rebalancing, self._on_change = is_rebalancing, on_change
        # The subscribed topics. With a pattern, these are the matches of the last lookup.
        self.topics: frozenset[str] = frozenset()
        self.pattern: re.Pattern[str] | None = None
        # True once `topics` are the matches of `pattern`.
        self.is_matched = False
        self._refreshing: asyncio.Task[None] | None = None
        # The error codes that were reported to the application, by topic, and the time of the last report.
        self._reported_errors: dict[str, int] = {}
        self._reported_ms = cluster.now_ms()

    @property
    def is_subscribed(self) -> bool:
        """True if the consumer has a subscription, so that it is a member or joins with its next poll."""
        return bool(self.topics) or self.pattern is not None

    def set(self, topics: Collection[str], pattern: re.Pattern[str] | None) -> None:
        """Replace the subscription."""
        self.topics, self.pattern, self.is_matched = frozenset(topics), pattern, False

    async def match(self, pattern: re.Pattern[str]) -> None:
        """Subscribe to the topics that match now, and start the periodic lookup."""
        response = await self._cluster.fetch_metadata(None)
        if self.pattern is not pattern:
            return  # another subscription has replaced this one and runs its own lookup
        self.topics, self.is_matched = matching(response, pattern), True
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh_periodically())

    async def _refresh_periodically(self) -> None:
        while self.pattern is not None:
            await asyncio.sleep(self._settings["metadata.max.age.ms"] / 1000)
            topics, pattern = self.topics, self.pattern
            if not self._is_rebalancing() and pattern is not None:
                with suppress(OncelogError):
                    await self.match(pattern)
            if self.topics != topics:
                self._on_change()
                self._wake()
        self._refreshing = None

    def report_errors(self) -> None:
        """Let polls raise the final errors of subscribed topics, such as INVALID_TOPIC_EXCEPTION.

        The other topics are still read.
        """
        self._reported_ms = self._cluster.now_ms()
        errors = {topic: self._cluster.metadata.topic_error(topic) for topic in sorted(self.topics)}
        final = {topic: error for topic, error in errors.items() if error is not None and not error.retriable}
        for topic, error in final.items():
            if self._reported_errors.get(topic) != error.code:
                self._core.note_error(error)
                self._wake()
        self._reported_errors = {topic: error.code for topic, error in final.items()}

    def report_errors_if_due(self) -> None:
        """Report persistent errors again if metadata.max.age.ms has passed, as Java does with each
        refresh.
        """
        # Guard: test_a_member_is_told_again_of_a_name_that_no_topic_can_have.
        if self._cluster.now_ms() - self._reported_ms >= self._settings["metadata.max.age.ms"]:
            self._reported_errors = {}
            self.report_errors()

    def stop(self) -> None:
        """End the periodic lookup."""
        if self._refreshing is not None:
            self._refreshing.cancel()
