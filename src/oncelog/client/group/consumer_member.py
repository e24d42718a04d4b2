"""A member under the consumer group protocol (KIP-848): the coordinator assigns partitions by heartbeats.

Heartbeats run in the background. Their responses contain the target assignment, and polls carry it out step
by step. First the member revokes partitions that are not in the target, and reports that with a heartbeat.
Then it looks up the committed offsets of the added partitions in the background, and takes these partitions.
Partitions that stay owned are read throughout.

Source: KIP-848; Kafka's ConsumerMembershipManager.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple
from uuid import UUID

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.group.commits import GroupCommits
from oncelog.client.group.consumer_heartbeat import (
    JOINING,
    AssignmentDifference,
    HeartbeatState,
    TopicIdPartition,
    compare_assignment,
)
from oncelog.client.group.coordinator_client import GroupCoordinatorClient
from oncelog.client.group.core import next_after
from oncelog.client.group.membership import Change, Membership, Rebalance, not_a_member
from oncelog.client.group.subscribed_topics import SubscribedTopics
from oncelog.errors import OncelogError, UnreleasedInstanceId, UnsupportedVersion
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition


class _NextStep(NamedTuple):
    """The next step towards the target assignment. `topic_ids` has topic ids by name.

    `committed` has the committed offsets of the added partitions.
    """

    difference: AssignmentDifference
    topic_ids: Mapping[str, bytes]
    committed: Mapping[TopicPartition, OffsetAndMetadata]


class ConsumerMember:
    """A member under the consumer protocol: the coordinator assigns partitions."""

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
        self._state = HeartbeatState(settings, str(UUID(bytes=system.current().new_uuid())))
        self._heartbeats: asyncio.Task[None] | None = None
        # The topic ids of the owned partitions, by topic name.
        self._topic_ids: dict[str, bytes] = {}
        # The target assignment; None until the coordinator has sent one.
        self._target: frozenset[TopicIdPartition] | None = None
        # The owned partitions that the application was notified of. Heartbeats report them as owned.
        self._acknowledged: frozenset[TopicIdPartition] = frozenset()
        # True if the owned partitions have changed since the last call of `_acknowledge`.
        self._is_unacknowledged = False
        # The subscribed topics whose metadata was already requested.
        self._described: frozenset[str] = frozenset()
        self._preparing: asyncio.Task[_NextStep] | None = None
        self._news, self._hurry = asyncio.Event(), asyncio.Event()

    @property
    def topics_in_use(self) -> frozenset[str]:
        """The topics that this member subscribes to."""
        return self._topics.topics

    @property
    def is_rebalancing(self) -> bool:
        """Always False: a rebalance of this protocol does not end the membership."""
        return False

    @property
    def free_channel(self) -> str:
        """Always the same: no request of this protocol waits for other members."""
        return "group"

    def resubscribe(self) -> None:
        """Send a heartbeat with the changed topics immediately."""
        self._hurry.set()

    async def advance(self, deadline_ms: float) -> Rebalance | bool | None:
        """Run the next step: see GroupProtocol.advance."""
        membership = self._membership
        if self._is_unacknowledged:
            self._acknowledge()
        if membership.is_lost:
            lost, membership.owned, membership.is_lost = membership.owned, [], False
            if lost:
                self._is_unacknowledged = True
                return Rebalance(Change.LOST, lost)
            self._acknowledge()
        if self._heartbeats is None or self._heartbeats.done():
            self._heartbeats = asyncio.create_task(self._send_heartbeats())
        target = self._target
        if self._preparing is None and target is not None and target != self._acknowledged:
            self._preparing = asyncio.create_task(self._prepare(target))
            self._preparing.add_done_callback(lambda _: self._notify())
        is_settled = self._preparing is None and target is not None
        if is_settled or (membership.owned and not self._is_prepared):
            if membership.owned:
                self._commits.commit_if_due()
            # Partitions that stay owned are read while the next step is prepared.
            return True
        return await self._await_news(deadline_ms)

    async def _await_news(self, deadline_ms: float) -> Rebalance | bool | None:
        timeout_s = max(deadline_ms - self._cluster.now_ms(), 0) / 1000
        self._news.clear()
        if not self._is_prepared:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return False
        if not self._is_prepared or self._preparing is None:
            return None
        preparing, self._preparing = self._preparing, None
        if preparing.cancelled():
            return None
        return await self._carry_out(preparing.result(), deadline_ms)

    @property
    def _is_prepared(self) -> bool:
        """True if the next step can be carried out.

        A step that takes partitions must also wait for the response to the last report of owned partitions.
        """
        preparing = self._preparing
        if preparing is None or not preparing.done():
            return False
        takes = not (preparing.cancelled() or preparing.exception() or preparing.result().difference.revoked)
        return self._state.is_answered or not takes

    async def _carry_out(self, step: _NextStep, deadline_ms: float) -> Rebalance | bool:
        revoked, added, _ = step.difference
        self._is_unacknowledged = True
        if revoked:
            return await self._membership.give_back(revoked, deadline_ms)
        self._topic_ids = dict(step.topic_ids)
        return self._membership.take([*self._membership.owned, *added], step.committed)

    def _acknowledge(self) -> None:
        """Report the owned partitions with the next heartbeat, after the application was notified of the last
        change.
        """
        self._is_unacknowledged = False
        self._core.assign(self._membership.owned)
        if not self._membership.is_lost:
            self._acknowledged = self._owned_with_ids()
            self._hurry.set()

    def _owned_with_ids(self) -> frozenset[TopicIdPartition]:
        return frozenset(
            TopicIdPartition(self._topic_ids[tp.topic], tp.partition) for tp in self._membership.owned
        )

    async def _prepare(self, target: frozenset[TopicIdPartition]) -> _NextStep:
        """Return the next step towards the target.

        If no partition must be revoked and the names of all added topics are unknown, wait for these names.
        """
        attempt = 0
        while True:
            owned = {tp: self._topic_ids[tp.topic] for tp in self._membership.owned}
            ids = self._known_topic_ids() | {tp.topic: topic_id for tp, topic_id in owned.items()}
            difference = compare_assignment(owned, target, {topic_id: name for name, topic_id in ids.items()})
            if difference.revoked:
                return _NextStep(difference, ids, {})
            try:
                if difference.added:
                    return _NextStep(difference, ids, await self._coordinator.committed(difference.added))
                await self._cluster.refresh_metadata(
                    sorted(self._topics.topics), allow_auto_topic_creation=False
                )
            except OncelogError as error:
                if next_after(error, GroupRequest.FETCH) is GroupAction.RAISE:
                    raise
            await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
            attempt += 1

    def _known_topic_ids(self) -> dict[str, bytes]:
        ids = {topic: self._cluster.metadata.topic_id(topic) for topic in self._topics.topics}
        return {topic: topic_id for topic, topic_id in ids.items() if topic_id is not None}

    # Heartbeats, and the end of the membership

    async def _send_heartbeats(self) -> None:
        """Send heartbeats until the membership ends.

        The membership also ends if the application does not poll for max.poll.interval.ms.
        """
        attempt, has_released = 0, False
        while True:
            if self._membership.is_idle:
                await self.leave()
                self.lose(GroupAction.RESET)
                return
            self._hurry.clear()
            try:
                await self._send_heartbeat()
            except OncelogError as error:
                self._state.on_failure()
                match next_after(error, GroupRequest.CONSUMER_HEARTBEAT):
                    case GroupAction.END:
                        self.end(error)
                        return
                    case GroupAction.RAISE if isinstance(error, UnreleasedInstanceId) and not has_released:
                        # This member itself may have the instance id: the response to an earlier join may be
                        # lost, or the coordinator may have fenced the member. So release the id, which does
                        # nothing if another member has it. Guard:
                        # test_a_static_member_whose_join_was_not_answered_joins_again.
                        has_released = True
                        await self.leave()
                        continue
                    case GroupAction.RAISE:
                        self._fail(error)
                        return
                    case GroupAction.LOST | GroupAction.RESET as reason:
                        # The next poll joins again, after the application was notified. A new member that
                        # joined earlier would commit records that the application has read under the old
                        # membership.
                        self.lose(reason)
                        return
                    case GroupAction.FIND:
                        self._coordinator.forget()
                await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                attempt += 1
                continue
            attempt = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(self._state.interval_ms / 1000):
                    await self._hurry.wait()

    async def _send_heartbeat(self) -> None:
        # A new subscription to a pattern needs this lookup too, because the periodic lookup runs only every
        # metadata.max.age.ms. Guard:
        # test_a_member_that_subscribes_to_another_pattern_reads_what_that_matches.
        while self._topics.pattern is not None and not self._topics.is_matched:
            await self._topics.match(self._topics.pattern)
        topics = self._topics.topics
        # This metadata request may create topics. So it also runs for topics that are subscribed to later.
        # Guard: test_a_member_that_subscribes_to_more_topics_has_them_created.
        if self._state.epoch == JOINING or not topics <= self._described:
            await self._cluster.refresh_metadata(
                sorted(topics), allow_auto_topic_creation=self._topics.pattern is None
            )
            self._topics.report_errors()
        self._described = topics
        membership = self._membership
        if self._state.epoch == JOINING:
            # The coordinator may know the member before the response to the first heartbeat arrives. A close
            # at that time must still leave the group. Guard:
            # test_a_member_that_closes_before_its_first_heartbeat_is_answered_leaves.
            membership.member = membership.member._replace(member_id=self._state.member_id)
        response = await self._coordinator.send(
            self._state.next_request(self._topics.topics, self._reported_as_owned())
        )
        was_answered = self._state.is_answered
        target = self._state.on_response(response)
        membership.member = ConsumerGroupMetadata(
            membership.group_id,
            self._state.epoch,
            self._state.member_id,
            self._settings["group.instance.id"],
        )
        if target is not None and target != self._target:
            self._target = target
            self._stop_preparing()
            self._notify()
        elif not was_answered and self._preparing is not None:
            self._notify()

    def _reported_as_owned(self) -> frozenset[TopicIdPartition]:
        """Return the partitions to report as owned.

        They include partitions that were just taken, even if the application was not notified of them yet.
        """
        if not self._is_unacknowledged:
            return self._acknowledged
        return self._acknowledged | self._owned_with_ids()

    def _fail(self, error: OncelogError) -> None:
        if isinstance(error, UnsupportedVersion):
            error = UnsupportedVersion(
                "the cluster does not support group.protocol=consumer (it needs Kafka 4.0): "
                "set group.protocol=classic"
            )
        self._membership.failure = error
        self._notify()

    def _notify(self) -> None:
        """Wake a poll that waits for the next step."""
        self._news.set()
        self._membership.wake()

    def lose(self, reason: GroupAction) -> None:
        """End the membership: see GroupProtocol.lose."""
        # The response to a commit may end the membership. If heartbeats continued, one would join again
        # before the application is notified. The coordinator would then accept the application's commits of
        # partitions that other members own. Guard:
        # test_a_member_joins_again_when_the_application_knows_what_it_has_lost.
        if self._heartbeats is not asyncio.current_task():
            self._stop_heartbeats()
        self._commits.lose(not_a_member())
        self._state.on_lost()
        self._membership.reset_member(self._state.member_id)
        self._membership.is_lost, self._target, self._acknowledged = True, None, frozenset()
        self._stop_preparing()
        self._notify()

    def end(self, error: OncelogError) -> None:
        """End the membership permanently: see GroupProtocol.end."""
        self._stop_preparing()
        self._stop_heartbeats()
        self._membership.end(error)
        self._notify()

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    def _stop_heartbeats(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None

    def stop(self) -> None:
        """Cancel all background tasks without leaving the group."""
        self._stop_preparing()
        self._stop_heartbeats()

    async def leave(self) -> None:
        """Send the heartbeat that leaves the group.

        A static member's partitions stay reserved until its session ends.
        """
        with suppress(OncelogError):
            await self._coordinator.send(self._state.leave_request())
