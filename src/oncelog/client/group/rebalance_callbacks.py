"""The arguments of `subscribe`: topics or a pattern, and rebalance callbacks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from oncelog.client.arguments import names_of
from oncelog.client.group.membership import Change, Rebalance
from oncelog.errors import MisuseError
from oncelog.types import OffsetAndMetadata, TopicPartition

Offsets = Mapping[TopicPartition, OffsetAndMetadata | int]
"""Offsets to commit, by partition: in each partition, the offset of the next record to read."""
RebalanceCallback = Callable[[list[TopicPartition]], Any]


class RebalanceListener(NamedTuple):
    """The rebalance callbacks of one subscription.

    Without `on_lost`, `on_revoked` gets lost partitions too.
    """

    on_assigned: RebalanceCallback | None = None
    on_revoked: RebalanceCallback | None = None
    on_lost: RebalanceCallback | None = None

    def callback_for(self, rebalance: Rebalance) -> RebalanceCallback | None:
        """Return the callback for this kind of rebalance, or None if the application has set none."""
        if rebalance.change is Change.ASSIGNED:
            return self.on_assigned
        if rebalance.change is Change.LOST and self.on_lost is not None:
            return self.on_lost
        return self.on_revoked

    def notify(self, rebalance: Rebalance) -> Any:
        """Invoke the callback for this kind of rebalance, if there is one, and return its result."""
        callback = self.callback_for(rebalance)
        return callback(rebalance.partitions) if callback is not None else None

    async def notify_async(self, rebalance: Rebalance) -> None:
        """Invoke the callback for this kind of rebalance, if there is one. Await its result if that is
        awaitable.
        """
        result = self.notify(rebalance)
        if inspect.isawaitable(result):
            await result


class Subscription(NamedTuple):
    """Topics by name, or all topics whose whole name matches `pattern`. `bool` is False if both are empty."""

    topics: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def __bool__(self) -> bool:
        return bool(self.topics) or self.pattern is not None


def subscription_of(topics: Collection[str] | str, pattern: str | re.Pattern[str] | None) -> Subscription:
    """Return the subscription to one topic, to several topics, or to a pattern.

    Raises MisuseError for topics together with a pattern, and for a pattern that is not a regular expression.
    """
    if pattern is None:
        return Subscription(frozenset(names_of(topics)))
    if topics:
        raise MisuseError("subscribe to topics or to a pattern, not to both")
    try:
        return Subscription(pattern=re.compile(pattern))
    except re.error as error:
        raise MisuseError(f"{pattern!r} is not a regular expression: {error}") from error
