"""The state of a consumer's membership in its group: who it is, what it owns and what it must give back.

Both group protocols work on one `Membership`. A step that waits can be cancelled: it stores what it has
decided in attributes first, and the next step continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import NamedTuple, Protocol

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.commits import GroupCommits
from oncelog.errors import FencedInstanceId, OncelogError, RebalanceInProgress, UnknownMemberId
from oncelog.rules.groups.error_policy import GroupAction
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition


def not_a_member() -> UnknownMemberId:
    """Return the error for a commit by a subscribed consumer that is not a member at present."""
    return UnknownMemberId("this consumer is no member of its group at present; poll() joins again")


class Change(Enum):
    """A kind of rebalance event. After LOST, other members may already own the partitions: do not commit."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


class Rebalance(NamedTuple):
    """A change of the assignment that the application's listener must be notified of."""

    change: Change
    partitions: list[TopicPartition]


class GroupProtocol(Protocol):
    """One member under group.protocol=classic or group.protocol=consumer."""

    @property
    def topics_in_use(self) -> Collection[str]:
        """Topics whose metadata the member needs."""

    @property
    def is_rebalancing(self) -> bool:
        """True while a rebalance runs in the background; its outcome will show which partitions are lost."""

    async def advance(self, deadline_ms: float) -> Rebalance | bool | None:
        """Run the next step: return a Rebalance, True (ready to read), False (timed out) or None (call
        again).
        """

    def resubscribe(self) -> None:
        """React to a changed set of subscribed topics."""

    def lose(self, reason: GroupAction) -> None:
        """End the membership after other members may have taken the partitions over."""

    def end(self, error: OncelogError) -> None:
        """End the membership for good: each later poll and commit raises `error`."""

    async def leave(self) -> None:
        """Send the request that leaves the group. Raises nothing."""

    def stop(self) -> None:
        """Cancel all background tasks without leaving the group."""


class Membership:
    """The member's identity and partitions, and the steps that give partitions back and take them over."""

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        commits: GroupCommits,
        activity: PollActivity,
        wake: Callable[[], None],
    ) -> None:
        self._core, self._settings, self._cluster = core, settings, cluster
        self._commits, self._activity = commits, activity
        # Wakes a poll that waits.
        self.wake = wake
        self.group_id: str = settings["group.id"]
        # The identity for the next request. Outside the group, its generation is negative.
        self.member = ConsumerGroupMetadata(self.group_id)
        self._last_member = self.member
        self.owned: list[TopicPartition] = []
        # True after other members may have taken over what is in `owned`.
        self.is_lost = False
        # Partitions being given back. They stay owned until the automatic commit before that has ended.
        self.revoking: list[TopicPartition] = []
        self._revocation_deadline_ms: float | None = None
        # An error for the next poll; the member stays in the group.
        self.failure: OncelogError | None = None
        # The error that ended the membership; every later poll and commit raises it.
        self.fatal_error: OncelogError | None = None

    @property
    def metadata(self) -> ConsumerGroupMetadata:
        """The identity under which the application received its records.

        Outside the group this is the last identity, which the coordinator refuses. With an empty identity it
        would accept positions that override those of the present members.
        """
        return self._last_member if self.member.generation_id < 0 else self.member

    @property
    def is_in_generation(self) -> bool:
        """True while the member belongs to a generation (or, with KIP-848, has a member epoch)."""
        return self.member.generation_id >= 0

    @property
    def is_idle(self) -> bool:
        """True if the application has not polled for max.poll.interval.ms, so its partitions must go."""
        limit_ms: int = self._settings["max.poll.interval.ms"]
        return self._activity.idle_ms(self._cluster.now_ms()) > limit_ms

    def reset_member(self, member_id: str = "") -> None:
        """Leave the generation. `member_id` is kept if the coordinator still knows it."""
        if self.is_in_generation:
            self._last_member = self.member
        self.member = ConsumerGroupMetadata(self.group_id, member_id=member_id)

    def end(self, error: OncelogError) -> None:
        """End the membership for good: all partitions are lost, and each poll and commit raises `error`."""
        if isinstance(error, FencedInstanceId):
            error = FencedInstanceId(
                f"another member of group {self.group_id!r} has group.instance.id="
                f"{self._settings['group.instance.id']!r} by now, and this one is out for good: "
                "close it, and give each consumer a name of its own"
            )
        self._commits.lose(error)
        self.reset_member()
        self.fatal_error, self.is_lost = error, True
        self.wake()

    async def give_back(self, partitions: list[TopicPartition], deadline_ms: float) -> Rebalance | bool:
        """Give up partitions, after an automatic commit; False if the deadline comes before its response."""
        self.revoking = partitions
        if self._commits.is_automatic and not self.is_lost:
            if self._revocation_deadline_ms is None:
                limit_ms = min(self._settings["request.timeout.ms"], self._settings["max.poll.interval.ms"])
                self._revocation_deadline_ms = self._cluster.now_ms() + limit_ms
                self._commits.add_automatic(self._commits.positions(), is_urgent=True)
            is_settled = await self._commits.until_idle(min(deadline_ms, self._revocation_deadline_ms))
            if not is_settled and deadline_ms < self._revocation_deadline_ms:
                return False
        self._revocation_deadline_ms = None
        change, self.revoking = Change.REVOKED, []
        if self.is_lost:  # the response to the commit may have ended the membership: then everything is lost
            change, partitions = Change.LOST, self.owned
        revoked = frozenset(partitions)
        self._commits.release(revoked, RebalanceInProgress("the group is giving the partitions to others"))
        self.owned = [tp for tp in self.owned if tp not in revoked]
        return Rebalance(change, partitions)

    def take(
        self,
        partitions: Collection[TopicPartition],
        committed: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> Rebalance:
        """Own and read exactly `partitions`, and return the added ones.

        `committed` has the committed offsets of the added partitions.
        """
        owned = frozenset(self.owned)
        added = [tp for tp in partitions if tp not in owned]
        self.owned = list(partitions)
        self._core.assign(self.owned)
        for tp, position in committed.items():
            self._core.seek(tp, position.offset)
        self._commits.restart_interval()
        return Rebalance(Change.ASSIGNED, added)
