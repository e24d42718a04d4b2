"""A consumer's membership over asyncio: joins, keeps alive, fetches and commits the group's offsets.

`advance` is called by every poll. It says when partitions were taken or given, so that the face can tell
the application in the thread that polls; joining itself goes on in the background when a poll is short.
All partitions are given back before a join (the eager way of Kafka's assignors range and roundrobin).
Source: Kafka's ConsumerCoordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from oncelog.client.consumer import ConsumerCore
from oncelog.client.group import (
    MAX_COMMIT_VERSION,
    MAX_FETCH_VERSION,
    Joined,
    Next,
    commit_error,
    commit_request,
    committed_from,
    committed_request,
    decode_share,
    heartbeat_request,
    join_request,
    joined_from,
    leave_request,
    next_after,
    sync_request,
)
from oncelog.config import Settings
from oncelog.edge.cluster import ClusterConnection
from oncelog.edge.coordinator import GROUP, find_coordinator
from oncelog.errors import (
    ConfigError,
    MisuseError,
    OncelogError,
    TimedOut,
    UnknownMemberId,
    error_for_code,
    raise_for_code,
)
from oncelog.rules.assignors import ASSIGNORS
from oncelog.types import ConsumerGroupMetadata, Isolation, OffsetAndMetadata, TopicPartition

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


class GroupSession:
    """One consumer's part in its group. `topics` empty: it commits, but does not belong to it."""

    def __init__(
        self, core: ConsumerCore, settings: Settings, cluster: ClusterConnection, wake: Callable[[], None]
    ) -> None:
        if settings["group.id"] is None:
            raise MisuseError("group.id is not set: give the consumer's group to subscribe or to commit")
        unknown = [name for name in settings["partition.assignment.strategy"] if name not in ASSIGNORS]
        if unknown or not settings["partition.assignment.strategy"]:
            raise ConfigError(
                f"partition.assignment.strategy names {unknown}; there are {', '.join(ASSIGNORS)}"
            )
        self.group_id: str = settings["group.id"]
        self.member = ConsumerGroupMetadata(self.group_id)
        self.topics: frozenset[str] = frozenset()
        self._core, self._settings, self._cluster, self._wake = core, settings, cluster, wake
        self._coordinator_id: int | None = None
        self._owned: list[TopicPartition] = []
        self._counts: dict[str, int | None] = {}
        self._must_join = self._is_lost = False
        self._joining: asyncio.Task[_Share] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._polled_ms = self._committed_ms = cluster.now_ms()

    # Membership

    def subscribe(self, topics: Collection[str]) -> None:
        """Belong to the group and read these topics' partitions as it shares them out."""
        self.topics, self._must_join = frozenset(topics), True

    async def advance(self, deadline_ms: float) -> Rebalance | bool:
        """What to tell the application next; True: all is told and partitions may be read; False: not yet."""
        self._polled_ms = self._cluster.now_ms()
        if self._joining is None and not self._must_join and self._has_new_partitions():
            self._must_join = True
        if self._must_join and self._joining is None:
            if self._owned:
                return await self._give_back()
            self._core.assign([])
            self._must_join = self._is_lost = False
            self._joining = asyncio.create_task(self._join())
        if self._joining is None:
            await self._commit_by_time()
            return True
        return await self._await_share(deadline_ms)

    def _has_new_partitions(self) -> bool:
        metadata = self._cluster.metadata
        return any(metadata.partition_count(topic) != count for topic, count in self._counts.items())

    async def _give_back(self) -> Rebalance:
        change = Change.LOST if self._is_lost else Change.REVOKED
        if change is Change.REVOKED and self._settings["enable.auto.commit"]:
            with suppress(OncelogError):
                await self.commit()
        owned, self._owned = self._owned, []
        return Rebalance(change, owned)

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
        self.member, self._owned = share.member, share.partitions
        self._core.assign(share.partitions)
        for at, found in share.committed.items():
            self._core.seek(at, found.offset)
        self._committed_ms = self._cluster.now_ms()
        self._stop_beating()
        self._beating = asyncio.create_task(self._beat())
        return Rebalance(Change.ASSIGNED, list(share.partitions))

    async def _join(self) -> _Share:
        """A new generation, however often it takes."""
        attempt = 0
        while True:
            try:
                joined = await self._join_once()
                await self._learn(joined)
                counts = {topic: count or 0 for topic, count in self._counts.items()}
                answer = await self._ask(sync_request(joined, counts))
                raise_for_code(answer.error_code)
                partitions = decode_share(answer.assignment)
                self.member = joined.member
                return _Share(joined.member, partitions, await self.committed(partitions))
            except OncelogError as error:
                following = next_after(error)
                if following is Next.RAISE:
                    raise
                if following is Next.RESET:
                    self.member = ConsumerGroupMetadata(self.group_id)
                if following is Next.FIND:
                    self._coordinator_id = None
                if following is not Next.JOIN:
                    await asyncio.sleep(self._cluster.retry_pause_ms(attempt) / 1000)
                    attempt += 1

    async def _join_once(self) -> Joined:
        timeout_ms = self._settings["max.poll.interval.ms"] + _JOIN_PATIENCE_MS
        request = join_request(self._settings, self.member.member_id, self.topics)
        answer = await self._ask(request, timeout_ms=timeout_ms)
        if answer.member_id:
            self.member = self.member._replace(member_id=answer.member_id)
        raise_for_code(answer.error_code, f"joining group {self.group_id!r}")
        return joined_from(self._settings, answer)

    async def _learn(self, joined: Joined) -> None:
        """How many partitions the topics have that members read; the leader must know."""
        topics = self.topics.union(*(each.topics for each in joined.subscribers))
        await self._cluster.refresh_metadata(topics)
        self._counts = {topic: self._cluster.metadata.partition_count(topic) for topic in topics}

    async def _beat(self) -> None:
        """Heartbeats until the member is out, or an application that does not poll has taken it out."""
        while True:
            await asyncio.sleep(self._settings["heartbeat.interval.ms"] / 1000)
            if self._cluster.now_ms() - self._polled_ms > self._settings["max.poll.interval.ms"]:
                await self._leave()
                self._lose(Next.RESET)
                return
            try:
                answer = await self._ask(heartbeat_request(self.member))
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
        is_member = bool(self.topics and self.member.member_id)
        if is_member and self._owned and not self._is_lost and self._settings["enable.auto.commit"]:
            with suppress(OncelogError):
                await self.commit()
        self._stop_beating()
        if self._joining is not None:
            self._joining.cancel()
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
        if self.topics and self.member.generation_id < 0:
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
        if following in (Next.RESET, Next.BEHIND) and self.topics:
            self._lose(following)
        raise error

    async def committed(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What the group has committed; partitions without a commit are left out."""
        if not partitions:
            return {}
        is_stable = self._core.options.isolation is Isolation.READ_COMMITTED
        request = committed_request(self.group_id, partitions, is_stable=is_stable)

        async def once() -> dict[TopicPartition, OffsetAndMetadata]:
            error, found = committed_from(await self._ask(request, max_version=MAX_FETCH_VERSION))
            if error is not None:
                raise error
            return found

        found: dict[TopicPartition, OffsetAndMetadata] = await self._until_settled(once)
        return found

    async def _commit_by_time(self) -> None:
        now_ms = self._cluster.now_ms()
        if not (self._settings["enable.auto.commit"] and self._owned):
            return
        if now_ms - self._committed_ms >= self._settings["auto.commit.interval.ms"]:
            self._committed_ms = now_ms
            with suppress(OncelogError):  # the next one brings these positions as well
                await self.commit()

    async def _until_settled(self, once: Callable[[], Any]) -> Any:
        """Try again what may pass, for as long as request.timeout.ms."""
        deadline_ms = self._cluster.now_ms() + self._settings["request.timeout.ms"]
        attempt = 0
        while True:
            try:
                return await once()
            except OncelogError as error:
                following = next_after(error)
                if following not in (Next.RETRY, Next.FIND):
                    raise
                if following is Next.FIND:
                    self._coordinator_id = None
                pause_ms = self._cluster.retry_pause_ms(attempt)
                if self._cluster.now_ms() + pause_ms > deadline_ms:
                    raise TimedOut(f"group {self.group_id!r} gave no answer in time: {error}") from error
            await asyncio.sleep(pause_ms / 1000)
            attempt += 1

    # Requests

    async def _ask(
        self, request: Any, *, timeout_ms: float | None = None, max_version: int | None = None
    ) -> Any:
        node_id = await self._coordinator()
        return await self._cluster.request(
            node_id, request, timeout_ms=timeout_ms, max_version=max_version, channel="group"
        )

    async def _coordinator(self) -> int:
        if self._coordinator_id is None:
            self._coordinator_id = await find_coordinator(self._cluster, GROUP, self.group_id)
        return self._coordinator_id
