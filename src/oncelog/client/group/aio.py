"""A consumer's membership in its group over asyncio, for both group protocols.

Each poll calls `advance` to run the next step of the membership. If partitions were revoked, lost or
assigned, `advance` returns a Rebalance. The consumer then calls the rebalance callback in the polling thread,
and calls `advance` again. Heartbeats, joining and automatic commits run in background tasks. No poll waits
for these tasks beyond its deadline.

    client/group/classic_member.py    group.protocol=classic: the group's leader assigns partitions
    client/group/consumer_member.py   group.protocol=consumer: the coordinator assigns partitions (KIP-848)
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection
from contextlib import suppress

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.automatic_commits import register
from oncelog.client.group.classic_member import ClassicMember
from oncelog.client.group.commit_queue import Offsets
from oncelog.client.group.commits import GroupCommits
from oncelog.client.group.consumer_member import ConsumerMember
from oncelog.client.group.coordinator_client import GroupCoordinatorClient
from oncelog.client.group.core import MAX_OFFSET_COMMIT_VERSION, commit_error, commit_request, next_after
from oncelog.client.group.membership import Change, GroupProtocol, Membership, Rebalance, not_a_member
from oncelog.client.group.subscribed_topics import SubscribedTopics
from oncelog.errors import OncelogError, RebalanceInProgress, copy_to_raise
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

_LOG = logging.getLogger("oncelog.client")

_CLOSE_COMMIT_MS = 5_000
_CLOSE_LEAVE_S = 2.0
"""Time limits of a close: _CLOSE_COMMIT_MS for the commit and _CLOSE_LEAVE_S for leaving the group.

The blocking consumer's close waits longer than both together.
"""
_ENDS_MEMBERSHIP = frozenset({GroupAction.JOIN, GroupAction.LOST, GroupAction.RESET, GroupAction.END})


class GroupSession:
    """One consumer's membership in its group, and its commits.

    A consumer without a subscription is not a member. It commits the positions of its manually assigned
    partitions without a member id.
    """

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        activity: PollActivity,
        wake: Callable[[], None],
    ) -> None:
        self._core, self._settings, self._cluster = core, settings, cluster
        self._coordinator = GroupCoordinatorClient(settings, cluster)
        self._commits = GroupCommits(
            core, settings, cluster, self._commit_once, self._keeps, self._log_failed_commit
        )
        self._membership = Membership(core, settings, cluster, self._commits, activity, wake)
        self._topics = SubscribedTopics(
            core, settings, cluster, wake, lambda: self.protocol.is_rebalancing, self._resubscribe
        )
        member_type = ConsumerMember if settings["group.protocol"] == "consumer" else ClassicMember
        self.protocol: GroupProtocol = member_type(
            core, settings, cluster, self._coordinator, self._membership, self._topics, self._commits
        )
        # The task that leaves the group. An interrupt of the caller must not end this task. Otherwise the
        # group would wait for a member that is gone. Guard:
        # test_an_interrupt_of_a_close_keeps_no_member_in_the_group.
        self._departure: asyncio.Task[None] | None = None
        # True after `subscribe` while positions of the partitions that were assigned manually are still being
        # committed.
        self._must_commit_manual = False
        # The positions that `prepare_to_leave` last tried to commit, so that a close does not try the same
        # ones again.
        self._final_positions: Offsets = {}
        self._has_stopped = False
        if self._commits.is_automatic:
            register(system.current(), self)

    @property
    def cluster_id(self) -> str | None:
        """The cluster's id, or None before the first connection."""
        return self._cluster.metadata.cluster_id

    @property
    def holds_partitions(self) -> bool:
        """True while this consumer has partitions whose positions it commits."""
        return not self._has_stopped and bool(self._membership.owned or self._is_manually_assigned)

    @property
    def group_id(self) -> str:
        """The setting group.id."""
        return self._coordinator.group_id

    @property
    def member(self) -> ConsumerGroupMetadata:
        """The identity (member id, generation) to send with the next request."""
        return self._membership.member

    @property
    def metadata(self) -> ConsumerGroupMetadata:
        """The identity under which the application received its records: see Membership.metadata."""
        return self._membership.metadata

    @property
    def automatic_commits(self) -> Offsets:
        """The positions whose automatic commit has not ended."""
        return self._commits.automatic

    @property
    def topics_in_use(self) -> Collection[str]:
        """The topics whose metadata the member needs."""
        return self.protocol.topics_in_use

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | None = None) -> None:
        """Subscribe to these topics, or to all topics that match `pattern`. The next poll joins the group."""
        if not self._topics.is_subscribed:
            self._must_commit_manual = bool(self._commits.automatic)
        self._topics.set(topics, pattern)
        self.protocol.resubscribe()

    def _resubscribe(self) -> None:
        self.protocol.resubscribe()

    async def advance(self, deadline_ms: float) -> Rebalance | bool:
        """Return True if partitions may be read, False at the deadline, or a Rebalance.

        The caller notifies the application of a Rebalance before it calls this method again. Raises the
        coordinator's final errors.
        """
        while True:
            step = await self._step(deadline_ms)
            if step is not None:
                return step

    async def _step(self, deadline_ms: float) -> Rebalance | bool | None:
        membership = self._membership
        if membership.fatal_error is not None:
            lost, membership.owned, membership.revoking = membership.owned, [], []
            if lost:
                return Rebalance(Change.LOST, lost)
            self._core.assign([])
            raise copy_to_raise(membership.fatal_error)
        if membership.failure is not None:
            failure, membership.failure = membership.failure, None
            raise failure
        self._topics.report_errors_if_due()
        if self._must_commit_manual:
            # Commits of manually assigned partitions carry no member id, and the coordinator accepts them
            # only while the group is empty. So they must end before this consumer joins.
            if not await self._commits.until_idle(deadline_ms):
                return False
            self._must_commit_manual = False
        if membership.revoking:
            return await membership.give_back(membership.revoking, deadline_ms)
        return await self.protocol.advance(deadline_ms)

    # Leaving

    @property
    def _is_member(self) -> bool:
        return bool(self._topics.is_subscribed and self.member.member_id)

    async def prepare_to_leave(self) -> Rebalance | None:
        """Commit if enable.auto.commit is set, and wait up to 5 s for the end of all commits.

        Return the Rebalance that takes the owned partitions away. The caller must notify the application of
        this Rebalance before the member leaves. Return None if no partitions are owned, for example in a
        second call. Source: Kafka's ConsumerCoordinator.onLeavePrepare and close.
        """
        membership = self._membership
        self._core.delivery.return_unfinished()
        holds_partitions = self._is_member and bool(membership.owned) and not membership.is_lost
        if self._commits.is_automatic and (holds_partitions or self._is_manually_assigned):
            positions = self._commits.positions()
            if positions != self._final_positions:
                self._final_positions = positions
                self._commits.add_automatic(positions, is_urgent=True)
        limit_ms = min(self._settings["request.timeout.ms"], _CLOSE_COMMIT_MS)
        await self._commits.until_idle(self._cluster.now_ms() + limit_ms)
        self._commits.stop()
        owned, membership.owned, membership.revoking = membership.owned, [], []
        if not owned:
            return None
        # During a rebalance the partitions are treated as lost, as in Java, because the next generation may
        # not include this member.
        is_lost = membership.is_lost or self.protocol.is_rebalancing or not membership.is_in_generation
        return Rebalance(Change.LOST if is_lost else Change.REVOKED, owned)

    def stop(self) -> None:
        """Cancel all background tasks without leaving the group."""
        self._has_stopped = True
        self._commits.stop()
        self.protocol.stop()
        self._topics.stop()

    async def close(self) -> None:
        """Commit if enable.auto.commit is set, and leave.

        Gives up after a few seconds if the coordinator does not respond.
        """
        await self.prepare_to_leave()
        self.begin_leaving()
        await self.until_left()

    def begin_leaving(self) -> None:
        """Cancel all background tasks and start a task that leaves the group.

        Further calls start no second task.
        """
        self.stop()
        if self._is_member and self._departure is None:
            self._departure = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_LEAVE_S):
                await self.protocol.leave()

    @property
    def has_left(self) -> bool:
        """True unless a task that leaves the group is running."""
        return self._departure is None or self._departure.done()

    async def until_left(self) -> None:
        """Wait until the member has left. Cancelling this wait does not cancel the leave."""
        if self._departure is not None:
            await asyncio.shield(self._departure)

    # Offsets

    async def committed(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the group's committed offsets: see GroupCoordinatorClient.committed."""
        # A member without partitions joins on the connection of its other requests. See
        # test_committed_offsets_are_returned_during_a_rebalance_without_partitions.
        return await self._coordinator.committed(partitions, lambda: self.protocol.free_channel)

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit `offsets`, or by default the positions after all delivered records.

        Raises the coordinator's error if the commit is refused.
        """
        if self._membership.fatal_error is not None:
            raise copy_to_raise(self._membership.fatal_error)
        if chosen := self._commits.positions() if offsets is None else offsets:
            await self._commits.commit(chosen)

    async def _commit_once(self, offsets: Offsets) -> None:
        """Send one OffsetCommit request.

        Raises UnknownMemberId if the consumer is subscribed but not in a generation, RebalanceInProgress
        while a member without partitions joins, and the coordinator's error if it refuses the commit.
        """
        is_out = self._topics.is_subscribed and not self._membership.is_in_generation
        if is_out and not self._must_commit_manual:
            # With an empty identity, the coordinator would accept the commit. The commit would then override
            # the commits of the present members.
            raise not_a_member()
        if self.protocol.is_rebalancing and not self._membership.owned:
            # The commit would wait behind this member's JoinGroup. The coordinator would read it after the
            # rebalance, and would refuse it. Java raises this error, too.
            # Guard: test_a_commit_during_a_rebalance_without_partitions_is_refused_at_once.
            raise RebalanceInProgress("the group is rebalancing, and this member has given up its partitions")
        try:
            await self._commit_as(self.member, offsets)
        except OncelogError as error:
            if next_after(error, GroupRequest.COMMIT) is GroupAction.FIND:
                self._coordinator.forget()
            raise

    async def _commit_as(self, member: ConsumerGroupMetadata, offsets: Offsets) -> None:
        response = await self._coordinator.send(
            commit_request(member, offsets), max_version=MAX_OFFSET_COMMIT_VERSION
        )
        error = commit_error(response)
        if error is None:
            return
        is_member = self._topics.is_subscribed and member.generation_id >= 0
        # If the member has changed since the request, the error concerns an earlier generation.
        if is_member and member == self.member:
            self._react_to_commit(error)
        fatal_error = self._membership.fatal_error
        raise copy_to_raise(fatal_error) if fatal_error is not None else error

    def _react_to_commit(self, error: OncelogError) -> None:
        match next_after(error, GroupRequest.COMMIT):
            case GroupAction.END:
                self.protocol.end(error)
            case GroupAction.LOST | GroupAction.RESET as reason if not self.protocol.is_rebalancing:
                self.protocol.lose(reason)
            case GroupAction.JOIN if not self.protocol.is_rebalancing:
                self.protocol.resubscribe()

    def _keeps(self, offsets: Offsets) -> bool:
        """Return True if the member owns these partitions and is still in a generation.

        The group may already have formed the next generation.
        """
        # Guard: test_a_commit_during_a_join_is_stored_in_the_next_generation.
        membership = self._membership
        is_in = self._topics.is_subscribed and membership.is_in_generation and not membership.is_lost
        return is_in and offsets.keys() <= set(membership.owned)

    def _log_failed_commit(self, error: Exception) -> None:
        ends = isinstance(error, OncelogError) and next_after(error, GroupRequest.COMMIT) in _ENDS_MEMBERSHIP
        # If an error ends a membership, the member reports that to the application, so do not log the error
        # too.
        if not (self._topics.is_subscribed and ends):
            _LOG.warning("an automatic commit for group %r failed: %s", self.group_id, error)

    @property
    def _is_manually_assigned(self) -> bool:
        return not self._topics.is_subscribed and bool(self._core.assignment())

    def commit_before_assigning(self) -> None:
        """Start an automatic commit before `assign` removes manually assigned partitions.

        The commit excludes the record that a `for` loop is processing.
        """
        if not (self._commits.is_automatic and self._is_manually_assigned):
            return
        positions = self._commits.positions()
        if (record := self._core.delivery.unfinished()) is not None:
            positions[TopicPartition(record.topic, record.partition)] = OffsetAndMetadata(record.offset)
        self._commits.restart_interval()
        self._commits.add_automatic(positions)

    def commit_if_due(self) -> None:
        """Start an automatic commit if auto.commit.interval.ms has passed since the last one."""
        if self._membership.owned or self._is_manually_assigned:
            self._commits.commit_if_due()
