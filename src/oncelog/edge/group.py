"""A consumer's membership over asyncio: joins, keeps alive, gives back and takes over partitions.

`advance` is called by every poll. It says when partitions were taken or given, so that the face can tell
the application in the thread that polls; joining itself goes on in the background when a poll is short.

    eager         all partitions are given back before a join (range, roundrobin, sticky)
    cooperative   partitions stay, and are read, while the group rebalances; what the new assignment lacks is
                  given back after it, and a second join lets others have that (cooperative-sticky)

Source: Kafka's ConsumerCoordinator; KIP-429.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from oncelog.client.consumer import ConsumerCore
from oncelog.client.group import (
    MAX_COMMIT_VERSION,
    Joined,
    Next,
    commit_error,
    commit_request,
    heartbeat_request,
    join_request,
    joined_from,
    leave_request,
    next_after,
    sync_request,
)
from oncelog.client.subscription import Holding, decode_share
from oncelog.edge.cluster import ClusterConnection
from oncelog.edge.group_requests import GroupRequests
from oncelog.errors import ConfigError, OncelogError, UnknownMemberId, error_for_code, raise_for_code
from oncelog.rules.sticky import ASSIGNORS, is_cooperative
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

_JOIN_PATIENCE_MS = 5_000
"""How much longer than the rebalance timeout a join may go unanswered."""


class Change(Enum):
    """What happens to partitions. LOST: others may read them already; committing is of no use."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


class Rebalance(NamedTuple):
    """Something to tell the application."""

    change: Change
    partitions: list[TopicPartition]


class _Share(NamedTuple):
    member: ConsumerGroupMetadata
    partitions: list[TopicPartition]
    committed: dict[TopicPartition, OffsetAndMetadata]
    """Of those that are new."""


class GroupSession(GroupRequests):
    """One consumer's part in its group. Not subscribed: it commits, but does not belong to it."""

    def __init__(
        self, core: ConsumerCore, settings: Settings, cluster: ClusterConnection, wake: Callable[[], None]
    ) -> None:
        super().__init__(core, settings, cluster)
        assignors = settings["partition.assignment.strategy"]
        unknown = [name for name in assignors if name not in ASSIGNORS]
        if unknown or not assignors:
            raise ConfigError(
                f"partition.assignment.strategy names {unknown}; there are {', '.join(ASSIGNORS)}"
            )
        self.topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        self._wake, self._is_cooperative = wake, is_cooperative(assignors)
        self._owned: list[TopicPartition] = []
        self._last = Holding()
        self._counts: dict[str, int | None] = {}
        self._must_join = self._is_lost = False
        self._joining: asyncio.Task[_Share | None] | None = None
        self._given_back: _Share | None = None
        self._beating: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._polled_ms = self._committed_ms = cluster.now_ms()

    # Membership

    @property
    def is_subscribed(self) -> bool:
        """Whether it belongs to the group, or is about to."""
        return bool(self.topics) or self._pattern is not None

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | None = None) -> None:
        """Belong to the group and read these topics' partitions, or all that match, as it shares them out."""
        self.topics, self._pattern, self._must_join = frozenset(topics), pattern, True

    async def advance(self, deadline_ms: float) -> Rebalance | bool:
        """What to tell the application next; True: all is told and partitions may be read; False: not yet."""
        self._polled_ms = self._cluster.now_ms()
        if self._given_back is not None:
            share, self._given_back = self._given_back, None
            self._must_join = True
            return self._take(share)
        if self._joining is None:
            self._must_join = self._must_join or self._has_new_partitions()
            if not self._must_join:
                await self._commit_by_time()
                return True
            if leaving := self._to_give_back():
                return await self._give_back(leaving)
            self._start_joining()
        assert self._joining is not None
        if self._owned and not self._joining.done():
            return True  # what stays is read on meanwhile
        return await self._await_share(deadline_ms)

    def _has_new_partitions(self) -> bool:
        metadata = self._cluster.metadata
        return any(metadata.partition_count(topic) != count for topic, count in self._counts.items())

    def _to_give_back(self) -> list[TopicPartition]:
        """What the member may not hold when it joins."""
        if self._is_lost or not self._is_cooperative:
            return self._owned
        return [at for at in self._owned if self._pattern is None and at.topic not in self.topics]

    async def _give_back(self, partitions: list[TopicPartition]) -> Rebalance:
        change = Change.LOST if self._is_lost else Change.REVOKED
        if change is Change.REVOKED and self._settings["enable.auto.commit"]:
            with suppress(OncelogError):
                await self.commit()
        self._owned = [at for at in self._owned if at not in partitions]
        return Rebalance(change, partitions)

    def _start_joining(self) -> None:
        self._core.assign(self._owned)
        self._must_join = self._is_lost = False
        self._stop_beating()
        self._joining = asyncio.create_task(self._join())
        self._joining.add_done_callback(lambda _: self._wake())

    async def _await_share(self, deadline_ms: float) -> Rebalance | bool:
        assert self._joining is not None
        timeout_s = max(deadline_ms - self._cluster.now_ms(), 0) / 1000
        done, _ = await asyncio.wait([self._joining], timeout=timeout_s)
        if not done:
            return False
        joining, self._joining = self._joining, None
        try:
            share = joining.result()
        except OncelogError:
            self._must_join = True
            raise
        if share is None or self._is_lost:
            return await self.advance(deadline_ms)
        self.member = share.member
        if leaving := [at for at in self._owned if at not in share.partitions]:
            self._given_back = share
            return await self._give_back(leaving)
        return self._take(share)

    def _take(self, share: _Share) -> Rebalance:
        """The share holds. To tell: what is new in it."""
        added = [at for at in share.partitions if at not in self._owned]
        self._owned = list(share.partitions)
        self._last = Holding((), share.partitions, share.member.generation_id)
        self._core.assign(share.partitions)
        for at, found in share.committed.items():
            self._core.seek(at, found.offset)
        self._committed_ms = self._cluster.now_ms()
        return Rebalance(Change.ASSIGNED, added)

    async def _join(self) -> _Share | None:
        """A new generation, however often it takes; None: the partitions that stayed are lost."""
        attempt = 0
        while True:
            try:
                joined = await self._join_once()
                if self._is_cooperative:
                    self.member = joined.member  # what stayed is committed in the new generation
                await self._learn(joined)
                counts = {topic: count or 0 for topic, count in self._counts.items()}
                answer = await self._ask(sync_request(joined, counts))
                raise_for_code(answer.error_code)
                partitions = decode_share(answer.assignment)
                added = [at for at in partitions if at not in self._owned]
                share = _Share(joined.member, partitions, await self.committed(added))
                self._beating = asyncio.create_task(self._beat(joined.member))
                return share
            except OncelogError as error:
                following = next_after(error)
                if following is Next.RAISE:
                    raise
                if following in (Next.RESET, Next.BEHIND) and self._owned:
                    self._lose(following)
                    return None
                if following is Next.RESET:
                    self.member = ConsumerGroupMetadata(self.group_id)
                if following is Next.FIND:
                    self._coordinator_id = None
                if following is not Next.JOIN:
                    await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                    attempt += 1

    async def _join_once(self) -> Joined:
        if self._pattern is not None:
            await self._match(self._pattern)
        timeout_ms = self._settings["max.poll.interval.ms"] + _JOIN_PATIENCE_MS
        holding = self._last._replace(owned=self._owned)
        request = join_request(self._settings, self.member.member_id, self.topics, holding)
        answer = await self._ask(request, timeout_ms=timeout_ms)
        if answer.member_id:
            self.member = self.member._replace(member_id=answer.member_id)
        raise_for_code(answer.error_code, f"joining group {self.group_id!r}")
        return joined_from(self._settings, answer)

    async def _learn(self, joined: Joined) -> None:
        """How many partitions the topics have that members read; the leader must know."""
        topics = sorted(self.topics.union(*(each.topics for each in joined.subscribers)))
        may_create = self._pattern is None  # what matched once and was deleted is not to come back
        await self._cluster.refresh_metadata(topics, allow_auto_topic_creation=may_create)
        self._counts = {topic: self._cluster.metadata.partition_count(topic) for topic in topics}

    # Topics by pattern

    async def _match(self, pattern: re.Pattern[str]) -> None:
        """Subscribe to what matches now, and look again by and by."""
        answer = await self._cluster.fetch_metadata(None)
        self.topics = frozenset(
            row.name
            for row in answer.topics
            if not row.error_code and not row.is_internal and pattern.fullmatch(row.name)
        )
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_by_time())

    async def _look_by_time(self) -> None:
        while self._pattern is not None:
            await asyncio.sleep(self._settings["metadata.max.age.ms"] / 1000)
            topics, pattern = self.topics, self._pattern
            if self._joining is None and pattern is not None:
                with suppress(OncelogError):
                    await self._match(pattern)
            if self.topics != topics:
                self._must_join = True
                self._wake()
        self._looking = None

    # Staying

    async def _beat(self, member: ConsumerGroupMetadata) -> None:
        """Heartbeats until the member is out, or an application that does not poll has taken it out."""
        while True:
            await asyncio.sleep(self._settings["heartbeat.interval.ms"] / 1000)
            if self._cluster.now_ms() - self._polled_ms > self._settings["max.poll.interval.ms"]:
                await self._leave()
                self._lose(Next.RESET)
                return
            try:
                answer = await self._ask(heartbeat_request(member))
                error: OncelogError | None = error_for_code(answer.error_code) if answer.error_code else None
            except OncelogError as failure:
                error = failure
            if error is None:
                continue
            following = next_after(error)
            if following is Next.FIND:
                self._coordinator_id = None
            elif following is Next.JOIN:
                self._must_join = True
                self._wake()
            elif following is not Next.RETRY:
                self._lose(following)
                return

    def _lose(self, why: Next) -> None:
        """Others may have the partitions by now. A member that the group knows keeps its id."""
        member_id = self.member.member_id if why is Next.BEHIND else ""
        self.member = ConsumerGroupMetadata(self.group_id, member_id=member_id)
        self._must_join = self._is_lost = True
        self._wake()

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    async def close(self) -> None:
        """Commit if that is automatic, leave."""
        is_member = bool(self.is_subscribed and self.member.member_id)
        if is_member and self._owned and not self._is_lost and self._settings["enable.auto.commit"]:
            with suppress(OncelogError):
                await self.commit()
        self._stop_beating()
        for task in (self._joining, self._looking):
            if task is not None:
                task.cancel()
        if is_member:
            await self._leave()

    async def _leave(self) -> None:
        if self._settings["group.instance.id"] is not None:
            return  # a static member comes back
        with suppress(OncelogError):
            await self._ask(leave_request(self.member))

    # Offsets

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None) -> None:
        """Commit positions; None: of everything handed out. Raises why the group does not take them."""
        if offsets is None:
            positions = {at: self._core.position(at) for at in self._core.assignment()}
            offsets = {at: offset for at, offset in positions.items() if offset is not None}
        if not offsets:
            return
        if self.is_subscribed and self.member.generation_id < 0:
            # As nobody in particular the group would take it, over the heads of its members.
            raise UnknownMemberId("this consumer is no member of its group at present; poll() joins again")
        full = {
            at: OffsetAndMetadata(each) if isinstance(each, int) else each for at, each in offsets.items()
        }
        await self._until_settled(lambda: self._commit_once(full))

    async def _commit_once(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        answer = await self._ask(commit_request(self.member, offsets), max_version=MAX_COMMIT_VERSION)
        error = commit_error(answer)
        if error is None:
            return
        following = next_after(error)
        if following in (Next.RESET, Next.BEHIND) and self.is_subscribed and self._joining is None:
            self._lose(following)
        raise error

    async def _commit_by_time(self) -> None:
        now_ms = self._cluster.now_ms()
        if not (self._settings["enable.auto.commit"] and self._owned):
            return
        if now_ms - self._committed_ms >= self._settings["auto.commit.interval.ms"]:
            self._committed_ms = now_ms
            with suppress(OncelogError):  # the next one brings these positions as well
                await self.commit()
