"""A member of a consumer-protocol group over asyncio: heartbeats, and owning what they say it is to own.

Heartbeats go on in the background; what they bring is carried out by polls, one step at a time: what must
go is given back and acknowledged, then what is new is looked up in the background and taken. What stays is
read on meanwhile. Source: KIP-848; Kafka's ConsumerMembershipManager.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple
from uuid import UUID

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.aio import Change, GroupSession, Rebalance, not_a_member
from oncelog.client.group.consumer_heartbeat import JOINING, Difference, Heartbeats, Place, difference
from oncelog.client.group.core import next_after
from oncelog.errors import OncelogError, UnsupportedVersion
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition


class _Found(NamedTuple):
    difference: Difference
    ids: Mapping[str, bytes]
    committed: Mapping[TopicPartition, OffsetAndMetadata]


class ConsumerProtocolSession(GroupSession):
    """The consumer protocol: the coordinator shares out."""

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        activity: PollActivity,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(core, settings, cluster, activity, wake)
        self._heartbeats = Heartbeats(settings, str(UUID(bytes=system.current().new_uuid())))
        self._ids: dict[str, bytes] = {}
        """Of the topics that are owned."""
        self._wanted: frozenset[Place] | None = None
        """What the coordinator wants it to own; None until it says so."""
        self._acknowledged: frozenset[Place] = frozenset()
        self._is_untold = False
        """Whether what is owned has changed since the coordinator was told."""
        # The topics whose metadata were asked for when the member subscribed to them.
        self._described: frozenset[str] = frozenset()
        self._finding: asyncio.Task[_Found] | None = None
        self._news, self._hurry = asyncio.Event(), asyncio.Event()

    def _resubscribe(self) -> None:
        self._hurry.set()

    async def _advance(self, deadline_ms: float) -> Rebalance | bool:
        if self._is_untold:
            self._acknowledge()
        if self._is_lost:
            lost, self._owned, self._is_lost = self._owned, [], False
            if lost:
                self._is_untold = True
                return Rebalance(Change.LOST, lost)
            self._acknowledge()
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        wanted = self._wanted
        if self._finding is None and wanted is not None and wanted != self._acknowledged:
            self._finding = asyncio.create_task(self._find(wanted))
            self._finding.add_done_callback(lambda _: self._tell())
        is_settled = self._finding is None and wanted is not None
        if is_settled or (self._owned and not self._is_found):
            self.commit_by_time()
            return True  # what stays is read on while the rest is found
        return await self._await_news(deadline_ms)

    async def _await_news(self, deadline_ms: float) -> Rebalance | bool:
        timeout_s = max(deadline_ms - self._cluster.now_ms(), 0) / 1000
        self._news.clear()
        if not self._is_found:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return False
        if not self._is_found or self._finding is None:
            return await self.advance(deadline_ms)
        finding, self._finding = self._finding, None
        if finding.cancelled():
            return await self.advance(deadline_ms)
        return await self._carry_out(finding.result(), deadline_ms)

    @property
    def _is_found(self) -> bool:
        """Whether the next step can be made. What is to be taken waits for what the coordinator answers."""
        finding = self._finding
        if finding is None or not finding.done():
            return False
        is_take = not (finding.cancelled() or finding.exception() or finding.result().difference.leaving)
        return self._heartbeats.is_heard or not is_take

    async def _carry_out(self, found: _Found, deadline_ms: float) -> Rebalance | bool:
        leaving, added, _ = found.difference
        self._is_untold = True
        if leaving:
            return await self._give_back(leaving, deadline_ms)
        self._ids = dict(found.ids)
        return self._take([*self._owned, *added], found.committed)

    def _acknowledge(self) -> None:
        """The application has been told of the last change: now it holds, and the coordinator may know."""
        self._is_untold = False
        self._core.assign(self._owned)
        if not self._is_lost:
            self._acknowledged = frozenset(Place(self._ids[at.topic], at.partition) for at in self._owned)
            self._hurry.set()

    async def _find(self, wanted: frozenset[Place]) -> _Found:
        """What to do to own what is wanted; asks for names of topics until at least one step can be made."""
        attempt = 0
        while True:
            owned = {at: self._ids[at.topic] for at in self._owned}
            ids = self._names() | {at.topic: topic_id for at, topic_id in owned.items()}
            step = difference(owned, wanted, {topic_id: name for name, topic_id in ids.items()})
            if step.leaving:
                return _Found(step, ids, {})
            try:
                if step.added:
                    return _Found(step, ids, await self.committed(step.added))
                await self._cluster.refresh_metadata(sorted(self.topics), allow_auto_topic_creation=False)
            except OncelogError as error:
                if next_after(error, GroupRequest.FETCH) is GroupAction.RAISE:
                    raise
            await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
            attempt += 1

    def _names(self) -> dict[str, bytes]:
        ids = {topic: self._cluster.metadata.topic_id(topic) for topic in self.topics}
        return {topic: topic_id for topic, topic_id in ids.items() if topic_id is not None}

    # Staying

    async def _beat(self) -> None:
        """Heartbeats until the member is out, or an application that does not poll has taken it out."""
        attempt = 0
        while True:
            if self._is_idle:
                await self._leave()
                self._lose(GroupAction.RESET)
                return
            self._hurry.clear()
            try:
                await self._beat_once()
            except OncelogError as error:
                self._heartbeats.failed()
                match next_after(error, GroupRequest.CONSUMER_HEARTBEAT):
                    case GroupAction.END:
                        self._end(error)
                        return
                    case GroupAction.RAISE:
                        self._fail(error)
                        return
                    case GroupAction.LOST | GroupAction.RESET as why:
                        self._lose(why)  # joins again when the application knows, not over its head
                        return
                    case GroupAction.FIND:
                        self._coordinator_id = None
                await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                attempt += 1
                continue
            attempt = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeats.interval_ms / 1000):
                    await self._hurry.wait()

    async def _beat_once(self) -> None:
        # Not only the first one: the look by time comes after metadata.max.age.ms. See
        # test_a_member_that_subscribes_to_another_pattern_reads_what_that_matches.
        while self._pattern is not None and not self._is_matched:
            await self._match(self._pattern)
        topics = self.topics
        # A topic may come into being by being asked for, also one that is subscribed to later. See
        # test_a_member_that_subscribes_to_more_topics_has_them_created.
        if self._heartbeats.epoch == JOINING or not topics <= self._described:
            await self._cluster.refresh_metadata(
                sorted(topics), allow_auto_topic_creation=self._pattern is None
            )
            self._note_topic_errors()
        self._described = topics
        if self._heartbeats.epoch == JOINING:
            # The group may know it before the answer comes, and a close must leave it then. See
            # test_a_member_that_closes_before_its_first_heartbeat_is_answered_leaves.
            self.member = self.member._replace(member_id=self._heartbeats.member_id)
        answer = await self._ask(self._heartbeats.request(self.topics, self._claimed()))
        was_heard = self._heartbeats.is_heard
        wanted = self._heartbeats.answered(answer)
        self.member = ConsumerGroupMetadata(
            self.group_id,
            self._heartbeats.epoch,
            self._heartbeats.member_id,
            self._settings["group.instance.id"],
        )
        if wanted is not None and wanted != self._wanted:
            self._wanted = wanted
            self._stop_finding()
            self._tell()
        elif not was_heard and self._finding is not None:
            self._tell()

    def _claimed(self) -> frozenset[Place]:
        """Return what to tell as owned: also what was taken and the application has not been told of."""
        if not self._is_untold:
            return self._acknowledged
        return self._acknowledged | {Place(self._ids[at.topic], at.partition) for at in self._owned}

    def _fail(self, error: OncelogError) -> None:
        if isinstance(error, UnsupportedVersion):
            error = UnsupportedVersion(
                "the cluster does not serve group.protocol=consumer (Kafka 4.0): set group.protocol=classic"
            )
        self._failure = error
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._wake()

    def _lose(self, why: GroupAction) -> None:
        # What a commit was answered may bring the loss. Heartbeats would join again before the application
        # knows, and the group would take its commits of what others own by then. See
        # test_a_member_joins_again_when_the_application_knows_what_it_has_lost.
        if self._beating is not asyncio.current_task():
            self._stop_beating()
        self._commits.lose(not_a_member())
        self._heartbeats.fenced()
        self._end_membership(self._heartbeats.member_id)
        self._is_lost, self._wanted, self._acknowledged = True, None, frozenset()
        self._stop_finding()
        self._tell()

    def _end(self, error: OncelogError) -> None:
        self._stop_finding()
        super()._end(error)
        self._tell()

    def _stop_finding(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
            self._finding = None

    def stop(self) -> None:
        """End all work in the background; the group is not told."""
        self._stop_finding()
        super().stop()

    async def _leave(self) -> None:
        with suppress(OncelogError):
            await self._ask(self._heartbeats.leave())
