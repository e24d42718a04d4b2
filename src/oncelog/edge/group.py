"""A consumer's part in its group over asyncio, whichever protocol the group speaks.

`advance` is called by every poll. It says when partitions were taken or given, so that the face can tell
the application in the thread that polls; the group's work goes on in the background when a poll is short.

    edge/group_classic.py    group.protocol=classic: members join, one of them shares out
    edge/group_consumer.py   group.protocol=consumer: the coordinator shares out (KIP-848)
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from oncelog.client.consumer import ConsumerCore
from oncelog.client.group import MAX_COMMIT_VERSION, Next, commit_error, commit_request, next_after
from oncelog.edge.cluster import ClusterConnection
from oncelog.edge.group_requests import GroupRequests
from oncelog.errors import OncelogError, UnknownMemberId
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition


class Change(Enum):
    """What happens to partitions. LOST: others may read them already; committing is of no use."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


class Rebalance(NamedTuple):
    """Something to tell the application."""

    change: Change
    partitions: list[TopicPartition]


class GroupSession(GroupRequests, ABC):
    """One consumer's part in its group. Not subscribed: it commits, but does not belong to it."""

    def __init__(
        self, core: ConsumerCore, settings: Settings, cluster: ClusterConnection, wake: Callable[[], None]
    ) -> None:
        super().__init__(core, settings, cluster)
        self.topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        self._wake = wake
        self._owned: list[TopicPartition] = []
        self._is_lost = False
        self._last_member = self.member
        self._beating: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._polled_ms = self._committed_ms = cluster.now_ms()

    @property
    def is_subscribed(self) -> bool:
        """Whether it belongs to the group, or is about to."""
        return bool(self.topics) or self._pattern is not None

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | None = None) -> None:
        """Belong to the group and read these topics' partitions, or all that match, as it shares them out."""
        self.topics, self._pattern = frozenset(topics), pattern
        self._resubscribe()

    @property
    def metadata(self) -> ConsumerGroupMetadata:
        """As whom the application got what it holds: the member, or the last one, whom the group refuses.

        As nobody in particular the group would take its positions, over the heads of its members.
        """
        is_out = self.is_subscribed and self.member.generation_id < 0
        return self._last_member if is_out else self.member

    def _end_membership(self, member_id: str = "") -> None:
        """No member from now on. `member_id`: what the group still knows it by."""
        if self.member.generation_id >= 0:
            self._last_member = self.member
        self.member = ConsumerGroupMetadata(self.group_id, member_id=member_id)

    # What the protocol makes of it

    @abstractmethod
    async def advance(self, deadline_ms: float) -> Rebalance | bool:
        """What to tell the application next; True: all is told and partitions may be read; False: not yet."""

    @abstractmethod
    def _resubscribe(self) -> None:
        """The topics are others now."""

    @property
    def _is_rebalancing(self) -> bool:
        """Whether it finds out in the background what it is to read, and will see there what is lost."""
        return False

    @abstractmethod
    def _lose(self, why: Next) -> None:
        """Others may have the partitions by now."""

    @abstractmethod
    async def _leave(self) -> None:
        """Tell the group; nothing is raised."""

    # Taking and giving

    async def _give_back(self, partitions: list[TopicPartition]) -> Rebalance:
        change = Change.LOST if self._is_lost else Change.REVOKED
        if change is Change.REVOKED and self._settings["enable.auto.commit"]:
            with suppress(OncelogError):
                await self.commit()
        self._owned = [at for at in self._owned if at not in partitions]
        return Rebalance(change, partitions)

    def _take(
        self,
        partitions: Collection[TopicPartition],
        committed: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> Rebalance:
        """These are read from now on, `committed` of those that are new. To tell: what is new."""
        added = [at for at in partitions if at not in self._owned]
        self._owned = list(partitions)
        self._core.assign(self._owned)
        for at, found in committed.items():
            self._core.seek(at, found.offset)
        self._committed_ms = self._cluster.now_ms()
        return Rebalance(Change.ASSIGNED, added)

    @property
    def _is_idle(self) -> bool:
        """Whether the application has not polled for so long that its partitions must go to others."""
        patience_ms: int = self._settings["max.poll.interval.ms"]
        return self._cluster.now_ms() - self._polled_ms > patience_ms

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
        if self._looking is not None:
            self._looking.cancel()
        if is_member:
            await self._leave()

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
            if not self._is_rebalancing and pattern is not None:
                with suppress(OncelogError):
                    await self._match(pattern)
            if self.topics != topics:
                self._resubscribe()
                self._wake()
        self._looking = None

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
        if following in (Next.RESET, Next.BEHIND) and self.is_subscribed and not self._is_rebalancing:
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
