"""A member under the classic group protocol: it joins, sends heartbeats, and revokes and takes partitions.

    eager         the member revokes all partitions before it joins (range, roundrobin, sticky)
    cooperative   the member keeps and reads its partitions while the group rebalances. Then it revokes the
                  partitions that its new assignment lacks. A second join assigns the revoked partitions to
                  other members (cooperative-sticky)

Source: Kafka's ConsumerCoordinator; KIP-429.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.group.commits import GroupCommits
from oncelog.client.group.coordinator_client import GroupCoordinatorClient
from oncelog.client.group.core import (
    Joined,
    heartbeat_request,
    join_request,
    joined_from,
    leave_request,
    next_after,
    sync_request,
)
from oncelog.client.group.membership import Membership, Rebalance, not_a_member
from oncelog.client.group.subscribed_topics import SubscribedTopics
from oncelog.client.group.subscription import OwnedPartitions, decode_assignment
from oncelog.errors import (
    ConfigError,
    OncelogError,
    RebalanceInProgress,
    TimedOut,
    error_for_code,
    raise_for_code,
)
from oncelog.rules.groups.assignors import ASSIGNORS, is_cooperative
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

_JOIN_SLACK_MS = 5_000
"""A JoinGroup request times out this many ms after max.poll.interval.ms.

Source: Kafka's AbstractCoordinator.
"""


class _Assignment(NamedTuple):
    """The outcome of a join.

    `committed` has the committed offsets of partitions that the member did not own before.
    """

    member: ConsumerGroupMetadata
    partitions: list[TopicPartition]
    committed: dict[TopicPartition, OffsetAndMetadata]


class ClassicMember:
    """A member under the classic protocol: the group's leader assigns the partitions of each generation."""

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        coordinator: GroupCoordinatorClient,
        membership: Membership,
        topics: SubscribedTopics,
        commits: GroupCommits,
    ) -> None:
        self._core, self._settings, self._cluster = core, settings, cluster
        self._coordinator, self._membership = coordinator, membership
        self._topics, self._commits = topics, commits
        assignors = settings["partition.assignment.strategy"]
        unknown = [name for name in assignors if name not in ASSIGNORS]
        if unknown or not assignors:
            raise ConfigError(
                f"partition.assignment.strategy={','.join(assignors)}: expected one or more "
                f"of {', '.join(ASSIGNORS)}"
            )
        self._is_cooperative = is_cooperative(assignors)
        self._last = OwnedPartitions()
        # The number of partitions of each topic as of the last join; None for a topic that does not exist.
        self._partition_counts: dict[str, int | None] = {}
        self._must_join = False
        self._joining: asyncio.Task[_Assignment | None] | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        # The channel (connection) of JoinGroup and SyncGroup, and the channel of requests that must not wait
        # for the responses to JoinGroup and SyncGroup. See `_start_joining`.
        self._join_channel, self._free_channel = "group", "join"
        # The new assignment, while the member revokes partitions that are not in it.
        self._pending: _Assignment | None = None
        self._awaiting_topics: asyncio.Task[None] | None = None
        # The lookup of committed offsets for a new assignment; cancelled when the group rebalances again.
        self._offset_lookup: asyncio.Task[dict[TopicPartition, OffsetAndMetadata]] | None = None

    def resubscribe(self) -> None:
        """Let the next poll join again, with the changed topics."""
        self._must_join = True

    @property
    def is_rebalancing(self) -> bool:
        """True from the start of a join until a poll has handled its outcome."""
        return self._joining is not None

    @property
    def free_channel(self) -> str:
        """The channel for requests that must not wait for the response to a JoinGroup or SyncGroup."""
        return "group" if self._joining is None else self._free_channel

    async def advance(self, deadline_ms: float) -> Rebalance | bool | None:
        """Run the next step: see GroupProtocol.advance."""
        membership = self._membership
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._must_join = True
            if not membership.is_lost:
                return self._take(pending)
        if self._joining is None:
            self._must_join = self._must_join or self._have_partition_counts_changed()
            if not self._must_join:
                self._await_missing_topics()
                self._keep_heartbeats()
                if membership.owned:
                    self._commits.commit_if_due()
                return True
            if revoked := self._revoked_before_join():
                return await membership.give_back(revoked, deadline_ms)
            self._start_joining()
        assert self._joining is not None
        if membership.owned and not self._joining.done():
            # Partitions that stay owned are read during the join.
            return True
        return await self._await_assignment(deadline_ms)

    @property
    def topics_in_use(self) -> frozenset[str]:
        """The topics of this member; for the group's leader, of all members."""
        # If only this member's topics were kept, a refresh by age would forget the other members' topics.
        # They would then look deleted, and the leader would rebalance. Guard:
        # test_the_leader_of_members_with_other_topics_does_not_rebalance_by_age.
        return self._topics.topics.union(self._partition_counts)

    def _have_partition_counts_changed(self) -> bool:
        metadata = self._cluster.metadata
        return any(
            metadata.partition_count(topic) != count for topic, count in self._partition_counts.items()
        )

    def _revoked_before_join(self) -> list[TopicPartition]:
        """Return the partitions that the member must revoke before it joins."""
        membership, topics = self._membership, self._topics
        if membership.is_lost or not self._is_cooperative:
            return membership.owned
        return [tp for tp in membership.owned if topics.pattern is None and tp.topic not in topics.topics]

    def _start_joining(self) -> None:
        self._core.assign(self._membership.owned)
        self._must_join = self._membership.is_lost = False
        self._stop_heartbeats()
        self._stop_awaiting_topics()
        # A broker answers JoinGroup only after all members have joined, and SyncGroup only after the leader's
        # SyncGroup. Until then it handles no other request of that connection. So LeaveGroup, and commits of
        # partitions that stay owned, use another connection. Guards:
        # test_a_member_that_closes_while_it_joins_leaves_at_once and
        # test_a_member_that_closes_while_others_do_not_join_commits_what_it_read.
        channels = ("join", "group") if self._membership.owned else ("group", "join")
        self._join_channel, self._free_channel = channels
        self._joining = asyncio.create_task(self._join())
        self._joining.add_done_callback(lambda _: self._membership.wake())

    async def _await_assignment(self, deadline_ms: float) -> Rebalance | bool | None:
        joining = self._joining
        assert joining is not None
        timeout_s = max(deadline_ms - self._cluster.now_ms(), 0) / 1000
        done, _ = await asyncio.wait([joining], timeout=timeout_s)
        if not done:
            return False
        if self._joining is not joining:
            # During the wait, a heartbeat or a commit of another task has ended the membership. Guard:
            # test_a_static_member_that_is_fenced_while_its_positions_are_looked_up_says_so.
            return None
        self._joining = None
        try:
            assignment = joining.result()
        except OncelogError as error:
            self._must_join = True
            # The error may also be one of SyncGroup. After both requests, the same errors end a membership
            # permanently.
            if next_after(error, GroupRequest.JOIN) is not GroupAction.END:
                raise
            self.end(error)
        else:
            if assignment is not None and not self._membership.is_lost:
                return await self._exchange(assignment, deadline_ms)
        return None

    async def _exchange(self, assignment: _Assignment, deadline_ms: float) -> Rebalance | bool:
        """Revoke the owned partitions that the new assignment lacks.

        If no partition must be revoked, take the assignment.
        """
        membership = self._membership
        membership.member = assignment.member
        # Use a set, because a member may own ten thousand partitions. Guard:
        # test_a_rebalance_compares_few_of_many_partitions.
        assigned = frozenset(assignment.partitions)
        if revoked := [tp for tp in membership.owned if tp not in assigned]:
            self._pending = assignment
            return await membership.give_back(revoked, deadline_ms)
        return self._take(assignment)

    def _take(self, assignment: _Assignment) -> Rebalance:
        self._last = OwnedPartitions((), assignment.partitions, assignment.member.generation_id)
        return self._membership.take(assignment.partitions, assignment.committed)

    async def _join(self) -> _Assignment | None:
        """Repeat JoinGroup and SyncGroup until the member has an assignment.

        Returns None if the owned partitions were lost during the join.
        """
        attempt = 0
        while True:
            request = GroupRequest.JOIN
            try:
                joined = await self._join_once()
                request = GroupRequest.SYNC
                if self._is_cooperative:
                    # Commits of partitions that stay owned use the new generation from now on.
                    self._membership.member = joined.member
                await self._look_up_partition_counts(joined)
                return await self._sync(joined)
            except OncelogError as error:
                action = next_after(error, request)
                if action in (GroupAction.RAISE, GroupAction.END):
                    raise
                if action in (GroupAction.RESET, GroupAction.LOST) and self._membership.owned:
                    self.lose(action)
                    return None
                if action is GroupAction.RESET:
                    self._membership.reset_member()
                if action is GroupAction.FIND:
                    self._coordinator.forget()
                if action is not GroupAction.JOIN:
                    await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                    attempt += 1

    async def _sync(self, joined: Joined) -> _Assignment | None:
        """Return the member's assignment, or None if the membership was lost during the lookup of committed
        offsets.
        """
        counts = {topic: count or 0 for topic, count in self._partition_counts.items()}
        response = await self._coordinator.send(sync_request(joined, counts), channel=self._join_channel)
        raise_for_code(response.error_code)
        partitions = decode_assignment(response.assignment)
        owned = frozenset(self._membership.owned)
        added = [tp for tp in partitions if tp not in owned]
        # Heartbeats start before the lookup: the lookup waits for open transactions that commit offsets of
        # the group, perhaps for longer than the session timeout. Guard:
        # test_a_member_that_waits_for_its_positions_stays_in_its_group.
        self._heartbeats = asyncio.create_task(self._send_heartbeats(joined.member))
        self._offset_lookup = asyncio.create_task(self._committed(added))
        try:
            await asyncio.wait([self._offset_lookup])
        finally:
            lookup, self._offset_lookup = self._offset_lookup, None
            lookup.cancel()
        error = RebalanceInProgress() if lookup.cancelled() else lookup.exception()
        if error is None:
            return _Assignment(joined.member, partitions, lookup.result())
        self._stop_heartbeats()
        if self._membership.is_lost:
            return None
        self._must_join = False  # `_join` handles the error, and joins again without a further poll
        raise error

    async def _committed(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the group's committed offsets. Repeat the lookup after each timeout."""
        while True:
            with suppress(TimedOut):
                return await self._coordinator.committed(partitions)

    def _cancel_offset_lookup(self) -> None:
        if self._offset_lookup is not None:
            self._offset_lookup.cancel()

    async def _join_once(self) -> Joined:
        membership = self._membership
        if self._topics.pattern is not None:
            await self._topics.match(self._topics.pattern)
        timeout_ms = self._settings["max.poll.interval.ms"] + _JOIN_SLACK_MS
        owned = self._last._replace(owned=membership.owned)
        request = join_request(self._settings, membership.member.member_id, self._topics.topics, owned)
        response = await self._coordinator.send(request, timeout_ms=timeout_ms, channel=self._join_channel)
        if response.member_id:
            membership.member = membership.member._replace(member_id=response.member_id)
        raise_for_code(response.error_code, f"joining group {membership.group_id!r}")
        return joined_from(self._settings, response)

    async def _look_up_partition_counts(self, joined: Joined) -> None:
        """Look up the partition counts of all members' topics; the leader needs them to assign."""
        topics = sorted(self._topics.topics.union(*(member.topics for member in joined.subscribers)))
        # A topic that once matched the pattern and was deleted must not be created again.
        may_create = self._topics.pattern is None
        await self._cluster.refresh_metadata(topics, allow_auto_topic_creation=may_create)
        self._topics.report_errors()
        self._partition_counts = {topic: self._cluster.metadata.partition_count(topic) for topic in topics}

    # Topics that do not exist yet

    def _await_missing_topics(self) -> None:
        """Refresh metadata until a topic exists that was missing at the last join, and then join again."""
        # Refresh the metadata here, because the refresh by age runs only every metadata.max.age.ms, by
        # default five minutes. Guard: test_a_topic_that_is_created_after_subscribing_is_read_soon.
        missing = [topic for topic, count in self._partition_counts.items() if count is None]
        if missing and self._awaiting_topics is None:
            self._awaiting_topics = asyncio.create_task(self._refresh_until_created(missing))

    async def _refresh_until_created(self, missing: list[str]) -> None:
        attempt = 0
        while not self._have_partition_counts_changed():
            await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
            attempt += 1
            with suppress(OncelogError):
                await self._cluster.refresh_metadata(missing, allow_auto_topic_creation=False)
        self._awaiting_topics = None
        self._membership.wake()

    def _stop_awaiting_topics(self) -> None:
        if self._awaiting_topics is not None:
            self._awaiting_topics.cancel()
            self._awaiting_topics = None

    # Heartbeats, and the end of the membership

    def _keep_heartbeats(self) -> None:
        """Start heartbeats again if an error has ended them and the member is still in a generation."""
        is_running = self._heartbeats is not None and not self._heartbeats.done()
        if self._membership.is_in_generation and not is_running:
            self._heartbeats = asyncio.create_task(self._send_heartbeats(self._membership.member))

    def _stop_heartbeats(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None

    async def _send_heartbeats(self, member: ConsumerGroupMetadata) -> None:
        """Send heartbeats until the membership ends.

        The membership also ends if the application does not poll for max.poll.interval.ms.
        """
        while True:
            await asyncio.sleep(self._settings["heartbeat.interval.ms"] / 1000)
            if self._membership.is_idle:
                await self.leave()
                self.lose(GroupAction.RESET)
                return
            error: OncelogError | None
            try:
                response = await self._coordinator.send(heartbeat_request(member))
                error = error_for_code(response.error_code) if response.error_code else None
            except OncelogError as failure:
                error = failure
            if error is not None and not self._continues_after(error):
                return

    def _continues_after(self, error: OncelogError) -> bool:
        """React to a heartbeat's error; return False if heartbeats end."""
        match next_after(error, GroupRequest.HEARTBEAT):
            case GroupAction.RETRY:
                return True
            case GroupAction.FIND:
                self._coordinator.forget()
                return True
            case GroupAction.JOIN:
                self._must_join = True
                self._cancel_offset_lookup()
                self._membership.wake()
                return True
            case GroupAction.END:
                self.end(error)
            case GroupAction.RAISE:
                self._membership.failure = error
                self._membership.wake()
            case GroupAction.LOST | GroupAction.RESET as reason:
                self.lose(reason)
        return False

    def lose(self, reason: GroupAction) -> None:
        """End the membership: see GroupProtocol.lose.

        If `reason` is LOST, the coordinator still knows the member id, so keep it.
        """
        membership = self._membership
        self._commits.lose(not_a_member())
        membership.reset_member(membership.member.member_id if reason is GroupAction.LOST else "")
        self._must_join = membership.is_lost = True
        self._cancel_offset_lookup()
        membership.wake()

    def end(self, error: OncelogError) -> None:
        """End the membership permanently: see GroupProtocol.end."""
        self._stop_awaiting_topics()
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
        self._stop_heartbeats()
        self._membership.end(error)

    def stop(self) -> None:
        """Cancel all background tasks without leaving the group."""
        self._stop_awaiting_topics()
        if self._joining is not None:
            self._joining.cancel()
        self._stop_heartbeats()

    async def leave(self) -> None:
        """Send LeaveGroup. A static member sends none, so that its successor gets its partitions."""
        if self._settings["group.instance.id"] is not None:
            return
        with suppress(OncelogError):
            await self._coordinator.send(leave_request(self._membership.member), channel=self.free_channel)
