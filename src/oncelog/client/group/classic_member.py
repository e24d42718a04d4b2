"""A member of a classic group over asyncio: joins, keeps alive, gives back and takes over partitions.

    eager         all partitions are given back before a join (range, roundrobin, sticky)
    cooperative   partitions stay, and are read, while the group rebalances; what the new assignment lacks is
                  given back after it, and a second join lets others have that (cooperative-sticky)

Source: Kafka's ConsumerCoordinator; KIP-429.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.aio import GroupSession, Rebalance, not_a_member
from oncelog.client.group.core import (
    Joined,
    heartbeat_request,
    join_request,
    joined_from,
    leave_request,
    next_after,
    sync_request,
)
from oncelog.client.group.subscription import Holding, decode_share
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

_JOIN_PATIENCE_MS = 5_000
"""How much longer than the rebalance timeout a join may go unanswered."""


class _Share(NamedTuple):
    member: ConsumerGroupMetadata
    partitions: list[TopicPartition]
    committed: dict[TopicPartition, OffsetAndMetadata]
    """Of those that are new."""


class ClassicSession(GroupSession):
    """The classic protocol: a join for each generation, and the leader shares out."""

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        activity: PollActivity,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(core, settings, cluster, activity, wake)
        assignors = settings["partition.assignment.strategy"]
        unknown = [name for name in assignors if name not in ASSIGNORS]
        if unknown or not assignors:
            raise ConfigError(
                f"partition.assignment.strategy names {unknown}; there are {', '.join(ASSIGNORS)}"
            )
        self._is_cooperative = is_cooperative(assignors)
        self._last = Holding()
        self._counts: dict[str, int | None] = {}
        self._must_join = False
        self._joining: asyncio.Task[_Share | None] | None = None
        # The connections of JoinGroup and SyncGroup, and of what must not wait for them: `_start_joining`.
        self._join_channel, self._free_channel = "group", "join"
        self._given_back: _Share | None = None
        self._awaiting_topics: asyncio.Task[None] | None = None
        # The look-up of the positions of a new share; cancelled when the group goes on without it.
        self._looking_up: asyncio.Task[dict[TopicPartition, OffsetAndMetadata]] | None = None

    def _resubscribe(self) -> None:
        self._must_join = True

    @property
    def _is_rebalancing(self) -> bool:
        return self._joining is not None

    async def _advance(self, deadline_ms: float) -> Rebalance | bool:
        if self._given_back is not None:
            share, self._given_back = self._given_back, None
            self._must_join = True
            if not self._is_lost:
                return self._take_share(share)
        if self._joining is None:
            self._must_join = self._must_join or self._has_new_partitions()
            if not self._must_join:
                self._await_missing_topics()
                self._keep_beating()
                self.commit_by_time()
                return True
            if leaving := self._to_give_back():
                return await self._give_back(leaving, deadline_ms)
            self._start_joining()
        assert self._joining is not None
        if self._owned and not self._joining.done():
            return True  # what stays is read on meanwhile
        return await self._await_share(deadline_ms)

    @property
    def topics_in_use(self) -> frozenset[str]:
        """The topics of this member; for the group's leader, of all members."""
        # Else a refresh by age forgets the others' topics, which would look like deleted ones. See
        # test_the_leader_of_members_with_other_topics_does_not_rebalance_by_age.
        return self.topics.union(self._counts)

    def _has_new_partitions(self) -> bool:
        metadata = self._cluster.metadata
        return any(metadata.partition_count(topic) != count for topic, count in self._counts.items())

    def _to_give_back(self) -> list[TopicPartition]:
        """What the member may not hold when it joins."""
        if self._is_lost or not self._is_cooperative:
            return self._owned
        return [at for at in self._owned if self._pattern is None and at.topic not in self.topics]

    def _start_joining(self) -> None:
        self._core.assign(self._owned)
        self._must_join = self._is_lost = False
        self._stop_beating()
        self._stop_awaiting_topics()
        # A broker answers JoinGroup and SyncGroup when all members, or the leader, have come, and begins
        # nothing else of that connection before. Commits of what is read on meanwhile must not wait, nor the
        # member that leaves. See test_a_member_that_closes_while_others_do_not_join_commits_what_it_read and
        # test_a_member_that_closes_while_it_joins_leaves_at_once.
        channels = ("join", "group") if self._owned else ("group", "join")
        self._join_channel, self._free_channel = channels
        self._joining = asyncio.create_task(self._join())
        self._joining.add_done_callback(lambda _: self._wake())

    async def _await_share(self, deadline_ms: float) -> Rebalance | bool:
        joining = self._joining
        assert joining is not None
        timeout_s = max(deadline_ms - self._cluster.now_ms(), 0) / 1000
        done, _ = await asyncio.wait([joining], timeout=timeout_s)
        if not done:
            return False
        if self._joining is not joining:
            # A heartbeat, or a commit of another task, has ended the membership. See
            # test_a_static_member_that_is_fenced_while_its_positions_are_looked_up_says_so.
            return await self.advance(deadline_ms)
        self._joining = None
        try:
            share = joining.result()
        except OncelogError as error:
            self._must_join = True
            # As a member: JoinGroup and SyncGroup agree on what ends it.
            if next_after(error, GroupRequest.JOIN) is not GroupAction.END:
                raise
            self._end(error)
        else:
            if share is not None and not self._is_lost:
                return await self._exchange(share, deadline_ms)
        return await self.advance(deadline_ms)

    async def _exchange(self, share: _Share, deadline_ms: float) -> Rebalance | bool:
        """Give back what the new share lacks, then take the rest of it."""
        self.member = share.member
        # Members may hold ten thousand partitions. See test_a_rebalance_compares_few_of_many_partitions.
        kept = frozenset(share.partitions)
        if leaving := [tp for tp in self._owned if tp not in kept]:
            self._given_back = share
            return await self._give_back(leaving, deadline_ms)
        return self._take_share(share)

    def _take_share(self, share: _Share) -> Rebalance:
        self._last = Holding((), share.partitions, share.member.generation_id)
        return self._take(share.partitions, share.committed)

    async def _join(self) -> _Share | None:
        """A new generation, however often it takes; None: the partitions that stayed are lost."""
        attempt = 0
        while True:
            request = GroupRequest.JOIN
            try:
                joined = await self._join_once()
                request = GroupRequest.SYNC
                if self._is_cooperative:
                    self.member = joined.member  # what stayed is committed in the new generation
                await self._learn(joined)
                return await self._share_of(joined)
            except OncelogError as error:
                action = next_after(error, request)
                if action in (GroupAction.RAISE, GroupAction.END):
                    raise
                if action in (GroupAction.RESET, GroupAction.LOST) and self._owned:
                    self._lose(action)
                    return None
                if action is GroupAction.RESET:
                    self._end_membership()
                if action is GroupAction.FIND:
                    self._coordinator_id = None
                if action is not GroupAction.JOIN:
                    await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                    attempt += 1

    async def _share_of(self, joined: Joined) -> _Share | None:
        """Return the member's share with its positions; None: it was lost while these were looked up."""
        counts = {topic: count or 0 for topic, count in self._counts.items()}
        answer = await self._ask(sync_request(joined, counts), channel=self._join_channel)
        raise_for_code(answer.error_code)
        partitions = decode_share(answer.assignment)
        held = frozenset(self._owned)
        added = [tp for tp in partitions if tp not in held]
        # An open transaction of the group may hold the positions back for longer than the session lasts. See
        # test_a_member_that_waits_for_its_positions_stays_in_its_group.
        self._beating = asyncio.create_task(self._beat(joined.member))
        self._looking_up = asyncio.create_task(self._positions_of(added))
        try:
            await asyncio.wait([self._looking_up])
        finally:
            looking_up, self._looking_up = self._looking_up, None
            looking_up.cancel()
        error = RebalanceInProgress() if looking_up.cancelled() else looking_up.exception()
        if error is None:
            return _Share(joined.member, partitions, looking_up.result())
        self._stop_beating()
        if self._is_lost:
            return None
        self._must_join = False  # it joins again at once
        raise error

    async def _positions_of(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return what the group has committed, however long that takes."""
        while True:
            with suppress(TimedOut):
                return await self.committed(partitions)

    def _stop_looking_up(self) -> None:
        if self._looking_up is not None:
            self._looking_up.cancel()

    async def _join_once(self) -> Joined:
        if self._pattern is not None:
            await self._match(self._pattern)
        timeout_ms = self._settings["max.poll.interval.ms"] + _JOIN_PATIENCE_MS
        holding = self._last._replace(owned=self._owned)
        request = join_request(self._settings, self.member.member_id, self.topics, holding)
        answer = await self._ask(request, timeout_ms=timeout_ms, channel=self._join_channel)
        if answer.member_id:
            self.member = self.member._replace(member_id=answer.member_id)
        raise_for_code(answer.error_code, f"joining group {self.group_id!r}")
        return joined_from(self._settings, answer)

    async def _learn(self, joined: Joined) -> None:
        """How many partitions the topics have that members read; the leader must know."""
        topics = sorted(self.topics.union(*(each.topics for each in joined.subscribers)))
        may_create = self._pattern is None  # what matched once and was deleted is not to come back
        await self._cluster.refresh_metadata(topics, allow_auto_topic_creation=may_create)
        self._note_topic_errors()
        self._counts = {topic: self._cluster.metadata.partition_count(topic) for topic in topics}

    # Topics that do not exist yet

    def _await_missing_topics(self) -> None:
        """Ask for topics that did not exist when the member joined, and join again when one does.

        Metadata are refreshed by age only every five minutes. See
        test_a_topic_that_is_created_after_subscribing_is_read_soon.
        """
        missing = [topic for topic, count in self._counts.items() if count is None]
        if missing and self._awaiting_topics is None:
            self._awaiting_topics = asyncio.create_task(self._ask_until_created(missing))

    async def _ask_until_created(self, missing: list[str]) -> None:
        attempt = 0
        while not self._has_new_partitions():
            await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
            attempt += 1
            with suppress(OncelogError):
                await self._cluster.refresh_metadata(missing, allow_auto_topic_creation=False)
        self._awaiting_topics = None
        self._wake()

    def _stop_awaiting_topics(self) -> None:
        if self._awaiting_topics is not None:
            self._awaiting_topics.cancel()
            self._awaiting_topics = None

    # Staying

    def _keep_beating(self) -> None:
        """Beat again after an error that a poll has raised."""
        if self.member.generation_id >= 0 and (self._beating is None or self._beating.done()):
            self._beating = asyncio.create_task(self._beat(self.member))

    async def _beat(self, member: ConsumerGroupMetadata) -> None:
        """Heartbeats until the member is out, or an application that does not poll has taken it out."""
        while True:
            await asyncio.sleep(self._settings["heartbeat.interval.ms"] / 1000)
            if self._is_idle:
                await self._leave()
                self._lose(GroupAction.RESET)
                return
            try:
                answer = await self._ask(heartbeat_request(member))
                error: OncelogError | None = error_for_code(answer.error_code) if answer.error_code else None
            except OncelogError as failure:
                error = failure
            if error is not None and not self._goes_on_after(error):
                return

    def _goes_on_after(self, error: OncelogError) -> bool:
        """React to a heartbeat's error; false when heartbeats end."""
        match next_after(error, GroupRequest.HEARTBEAT):
            case GroupAction.RETRY:
                return True
            case GroupAction.FIND:
                self._coordinator_id = None
                return True
            case GroupAction.JOIN:
                self._must_join = True
                self._stop_looking_up()
                self._wake()
                return True
            case GroupAction.END:
                self._end(error)
            case GroupAction.RAISE:
                self._failure = error
                self._wake()
            case GroupAction.LOST | GroupAction.RESET as why:
                self._lose(why)
        return False

    def _lose(self, why: GroupAction) -> None:
        """A member that the group knows keeps its id."""
        self._commits.lose(not_a_member())
        self._end_membership(self.member.member_id if why is GroupAction.LOST else "")
        self._must_join = self._is_lost = True
        self._stop_looking_up()
        self._wake()

    def _end(self, error: OncelogError) -> None:
        self._stop_awaiting_topics()
        if self._joining is not None:
            self._joining.cancel()
            self._joining = None
        super()._end(error)

    def stop(self) -> None:
        """End all work in the background; the group is not told."""
        self._stop_awaiting_topics()
        if self._joining is not None:
            self._joining.cancel()
        super().stop()

    async def _leave(self) -> None:
        if self._settings["group.instance.id"] is not None:
            return  # a static member comes back
        channel = "group" if self._joining is None else self._free_channel
        with suppress(OncelogError):
            await self._ask(leave_request(self.member), channel=channel)
