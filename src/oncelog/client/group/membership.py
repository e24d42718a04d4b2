"""The state of a consumer's membership in its group: its identity, and the partitions it owns or must revoke.

Both group protocols use the class `Membership`. A step may be cancelled while it waits. So a step stores its
decisions in attributes before it waits, and the next step continues from there.
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
    """Return the error for a commit by a subscribed consumer that is currently not a member."""
    return UnknownMemberId("this consumer is not a member of its group now; poll() joins again")


class Change(Enum):
    """A kind of rebalance event. After LOST, never commit: other members may already own the partitions."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


class Rebalance(NamedTuple):
    """A change of the assignment. The consumer calls the rebalance callback of the application with it."""

    change: Change
    partitions: list[TopicPartition]


class GroupProtocol(Protocol):
    """A group member under group.protocol=classic or group.protocol=consumer."""

    @property
    def topics_in_use(self) -> Collection[str]:
        """Topics whose metadata the member needs."""

    @property
    def is_rebalancing(self) -> bool:
        """True while a rebalance runs in the background. Only its outcome shows which partitions are lost."""

    @property
    def free_channel(self) -> str:
        """The channel for requests that must not wait for the response to a JoinGroup."""

    async def advance(self, deadline_ms: float) -> Rebalance | bool | None:
        """Run the next step of the membership.

        Return a Rebalance, True (ready to read), False (the deadline has passed) or None (call again).
        """

    def resubscribe(self) -> None:
        """React to a changed set of subscribed topics."""

    def lose(self, reason: GroupAction) -> None:
        """End the membership, because other members may have taken over the partitions.

        `reason` is LOST or RESET.
        """

    def end(self, error: OncelogError) -> None:
        """End the membership permanently: each later poll and commit raises `error`."""

    async def leave(self) -> None:
        """Send the request that leaves the group. Raises nothing."""

    def stop(self) -> None:
        """Cancel all background tasks without leaving the group."""


class Membership:
    """The member's identity and partitions, and the steps that revoke and take partitions."""

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
        # The identity to send with the next request. Outside the group, its generation is negative.
        self.member = ConsumerGroupMetadata(self.group_id)
        self._last_member = self.member
        self.owned: list[TopicPartition] = []
        # True if other members may have taken over the partitions in `owned`.
        self.is_lost = False
        # Partitions that are being revoked. They stay owned until the automatic commit that precedes the
        # revocation has finished or timed out.
        self.revoking: list[TopicPartition] = []
        self._revocation_deadline_ms: float | None = None
        # An error for the next poll; the member stays in the group.
        self.failure: OncelogError | None = None
        # The error that ended the membership; every later poll and commit raises it.
        self.fatal_error: OncelogError | None = None

    @property
    def metadata(self) -> ConsumerGroupMetadata:
        """The identity under which the application received its records.

        Outside the group this is the last identity, so that the coordinator refuses commits. With an empty
        identity, the coordinator would accept the commits, and they would override the commits of the present
        members.
        """
        return self._last_member if self.member.generation_id < 0 else self.member

    @property
    def is_in_generation(self) -> bool:
        """True while the member belongs to a generation (or, with KIP-848, has a member epoch)."""
        return self.member.generation_id >= 0

    @property
    def is_idle(self) -> bool:
        """True if the application has not polled for max.poll.interval.ms.

        The member must then leave the group.
        """
        limit_ms: int = self._settings["max.poll.interval.ms"]
        return self._activity.idle_ms(self._cluster.now_ms()) > limit_ms

    def reset_member(self, member_id: str = "") -> None:
        """Remove the generation from the identity. Pass `member_id` if the coordinator still knows the
        member.
        """
        if self.is_in_generation:
            self._last_member = self.member
        self.member = ConsumerGroupMetadata(self.group_id, member_id=member_id)

    def end(self, error: OncelogError) -> None:
        """End the membership permanently: all partitions are lost; each poll and commit raises `error`."""
        if isinstance(error, FencedInstanceId):
            error = FencedInstanceId(
                f"another consumer in group {self.group_id!r} has taken over "
                f"group.instance.id={self._settings['group.instance.id']!r}: close this "
                "consumer, and set a different group.instance.id for each consumer"
            )
        self._commits.lose(error)
        self.reset_member()
        self.fatal_error, self.is_lost = error, True
        self.wake()

    async def give_back(self, partitions: list[TopicPartition], deadline_ms: float) -> Rebalance | bool:
        """Revoke partitions after an automatic commit.

        Returns False if the deadline passes before the commit has ended.
        """
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
        # The response to the commit may have ended the membership. Then all owned partitions are lost.
        if self.is_lost:
            change, partitions = Change.LOST, self.owned
        revoked = frozenset(partitions)
        self._commits.release(
            revoked, RebalanceInProgress("the group is moving the partitions to other members")
        )
        self.owned = [tp for tp in self.owned if tp not in revoked]
        return Rebalance(change, partitions)

    def take(
        self,
        partitions: Collection[TopicPartition],
        committed: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> Rebalance:
        """Own and read exactly `partitions`. Return a Rebalance with the partitions that were added.

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
