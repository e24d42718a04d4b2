"""What the members of a group of the consumer protocol subscribe to, each different subscription once.

A heartbeat that changes no subscription costs no more where members name thousands of topics.
See test_a_heartbeat_does_not_look_at_the_topics_of_other_members.
"""

from __future__ import annotations

from typing import NamedTuple

NAME_BYTES = 16
"""Memory that a name takes beside its text."""


class Subscription(NamedTuple):
    """Topics by name, and by a regular expression or none."""

    topics: frozenset[str]
    regex: str | None

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        names = sum(len(name) for name in self.topics) + NAME_BYTES * len(self.topics)
        return names + NAME_BYTES + len(self.regex or "")


class Subscriptions:
    """Every different subscription in a group, with how many members have it."""

    def __init__(self) -> None:
        self._counts: dict[Subscription, int] = {}
        self._kept: dict[Subscription, Subscription] = {}
        """Each as the first member gave it: all members share that one in memory."""
        self._names: frozenset[str] | None = frozenset()
        self._regexes: frozenset[str] | None = frozenset()
        self.size_bytes = 0

    def copy(self) -> Subscriptions:
        """Return a copy that changes by itself."""
        made = Subscriptions()
        made._counts, made._kept = dict(self._counts), dict(self._kept)
        made._names, made._regexes, made.size_bytes = self._names, self._regexes, self.size_bytes
        return made

    def shared(self, subscription: Subscription) -> Subscription:
        """Return an equal one that a member has, if there is one."""
        return self._kept.get(subscription, subscription)

    def size_with(self, subscription: Subscription) -> int:
        """Return `size_bytes` if a member more had this one."""
        return self.size_bytes + (0 if subscription in self._counts else subscription.size_bytes)

    def add(self, subscription: Subscription) -> None:
        """Count a member that has it."""
        if subscription not in self._counts:
            self._kept[subscription] = subscription
            self.size_bytes += subscription.size_bytes
            self._names = self._regexes = None
        self._counts[subscription] = self._counts.get(subscription, 0) + 1

    def remove(self, subscription: Subscription) -> None:
        """Count a member less that has it."""
        self._counts[subscription] -= 1
        if not self._counts[subscription]:
            del self._counts[subscription], self._kept[subscription]
            self.size_bytes -= subscription.size_bytes
            self._names = self._regexes = None

    @property
    def names(self) -> frozenset[str]:
        """All topics that members name."""
        if self._names is None:
            self._names = frozenset[str]().union(*(each.topics for each in self._counts))
        return self._names

    @property
    def regexes(self) -> frozenset[str]:
        """All regular expressions that members have."""
        if self._regexes is None:
            self._regexes = frozenset(each.regex for each in self._counts if each.regex)
        return self._regexes
