"""A consumer's part in its group over asyncio, for both group protocols.

Every poll calls `advance`, which carries out one step at a time. It returns when partitions were taken or
given, so that the consumer can call the application in the thread that polls, and is called again only
after that. A step that waits can be cancelled: what it has decided stands in attributes first, and the next
`advance` takes it up. Heartbeats, joining and automatic commits run in tasks of their own. No poll waits for
them beyond its deadline.

    client/group/classic_member.py    group.protocol=classic: members join, one of them shares out
    client/group/consumer_member.py   group.protocol=consumer: the coordinator shares out (KIP-848)
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.commit_queue import Offsets
from oncelog.client.group.commits import GroupCommits
from oncelog.client.group.coordinator_requests import GroupRequests
from oncelog.client.group.core import MAX_COMMIT_VERSION, commit_error, commit_request, next_after
from oncelog.errors import FencedInstanceId, MisuseError, OncelogError, RebalanceInProgress, UnknownMemberId
from oncelog.rules.groups.error_policy import GroupAction, GroupRequest
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from oncelog.wire.messages import MetadataResponse

_LOG = logging.getLogger("oncelog.client")

_CLOSE_COMMIT_MS = 5_000
_CLOSE_LEAVE_S = 2.0
"""Limits of a close: together less than what the blocking consumer waits for it."""
_OUT = frozenset({GroupAction.JOIN, GroupAction.LOST, GroupAction.RESET, GroupAction.END})


def not_a_member() -> UnknownMemberId:
    """Return the error of a commit by a consumer that is subscribed and has no part in its group."""
    return UnknownMemberId("this consumer is no member of its group at present; poll() joins again")


class Change(Enum):
    """What happens to partitions. LOST: others may read them already; committing is of no use."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    LOST = "lost"


class Rebalance(NamedTuple):
    """Something to tell the application."""

    change: Change
    partitions: list[TopicPartition]


def matching(answer: MetadataResponse, pattern: re.Pattern[str]) -> frozenset[str]:
    """Return the topics, but Kafka's own, that can be read and whose whole name matches."""
    return frozenset(
        row.name
        for row in answer.topics
        if row.name and not row.error_code and not row.is_internal and pattern.fullmatch(row.name)
    )


class GroupSession(GroupRequests, ABC):
    """One consumer's part in its group. Not subscribed: it commits, but does not belong to it.

    The positions of partitions that were assigned by hand are committed without a member's name.
    """

    def __init__(
        self,
        core: ConsumerCore,
        settings: Settings,
        cluster: ClusterConnection,
        activity: PollActivity,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(core, settings, cluster)
        self.topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        # `topics` are what the pattern has matched.
        self._is_matched = False
        self._activity, self._wake = activity, wake
        self._owned: list[TopicPartition] = []
        self._is_lost = False
        self._last_member = self.member
        self._beating: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        # Tells the group that the member leaves. An interrupt must not end it: the group would wait for a
        # member that is gone. See test_an_interrupt_of_a_close_keeps_no_member_in_the_group.
        self._departure: asyncio.Task[None] | None = None
        self._commits = GroupCommits(
            settings, cluster, self._commit_once, self._keeps, self._note_failed_commit
        )
        # What is being given back: it is owned until the automatic commit before that has ended, or its time.
        self._leaving: list[TopicPartition] = []
        self._leaves_at_ms: float | None = None
        self._committed_ms = cluster.now_ms()
        # Positions of partitions that were assigned by hand before are still being committed.
        self._is_owing = False
        # What `give_up` has committed or tried to, so that a close asks once.
        self._given_up: Offsets = {}
        # Codes of the errors that were noted, of topics that are subscribed to, and since when.
        self._noted_errors: dict[str, int] = {}
        self._noted_ms = cluster.now_ms()
        # An error for the next poll; the member stays.
        self._failure: OncelogError | None = None
        # The error that ended the membership, for every poll.
        self._ended: OncelogError | None = None

    @property
    def is_subscribed(self) -> bool:
        """True when the consumer belongs to the group, or is about to."""
        return bool(self.topics) or self._pattern is not None

    @property
    def topics_in_use(self) -> Collection[str]:
        """The topics whose metadata the member needs."""
        return self.topics

    def subscribe(self, topics: Collection[str], pattern: re.Pattern[str] | None = None) -> None:
        """Belong to the group and read these topics' partitions, or all that match, as it shares them out."""
        if not self.is_subscribed:
            self._is_owing = bool(self._commits.owed)
        self.topics, self._pattern, self._is_matched = frozenset(topics), pattern, False
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

    def _end(self, error: OncelogError) -> None:
        """Leave the group for good: its partitions are lost, and every poll and commit raises the error."""
        if isinstance(error, FencedInstanceId):
            error = FencedInstanceId(
                f"another member of group {self.group_id!r} has group.instance.id="
                f"{self._settings['group.instance.id']!r} by now, and this one is out for good: "
                "close it, and give each consumer a name of its own"
            )
        self._stop_beating()
        self._commits.lose(error)
        self._end_membership()
        self._ended, self._is_lost = error, True
        self._wake()

    async def advance(self, deadline_ms: float) -> Rebalance | bool:
        """Return what to tell the application next; True: partitions may be read; False: not yet.

        The next call means that the application has been told. Raises what the group's coordinator refuses.
        """
        if self._ended is not None:
            lost, self._owned, self._leaving = self._owned, [], []
            if lost:
                return Rebalance(Change.LOST, lost)
            self._core.assign([])
            raise self._ended.with_traceback(None)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._cluster.now_ms() - self._noted_ms >= self._settings["metadata.max.age.ms"]:
            self._noted_errors = {}
            self._note_topic_errors()
        if self._is_owing:
            # The group takes them from a consumer that is no member, and only as long as it has none.
            if not await self._commits.until_idle(deadline_ms):
                return False
            self._is_owing = False
        if self._leaving:
            return await self._give_back(self._leaving, deadline_ms)
        return await self._advance(deadline_ms)

    # Decided by the protocol

    @abstractmethod
    async def _advance(self, deadline_ms: float) -> Rebalance | bool:
        """Carry out the next step when nothing is being given back; see `advance`."""

    @abstractmethod
    def _resubscribe(self) -> None:
        """The topics are others now."""

    @property
    def _is_rebalancing(self) -> bool:
        """True while the member finds out in the background what to read, and will see there what is lost."""
        return False

    @abstractmethod
    def _lose(self, why: GroupAction) -> None:
        """Others may have the partitions by now."""

    @abstractmethod
    async def _leave(self) -> None:
        """Tell the group; nothing is raised."""

    # Taking and giving

    async def _give_back(self, partitions: list[TopicPartition], deadline_ms: float) -> Rebalance | bool:
        """Commit positions first, if that is automatic; False when the deadline comes before the answer."""
        self._leaving = partitions
        if self._commits_by_itself and not self._is_lost:
            if self._leaves_at_ms is None:
                limit_ms = min(self._settings["request.timeout.ms"], self._settings["max.poll.interval.ms"])
                self._leaves_at_ms = self._cluster.now_ms() + limit_ms
                self._commits.owe(self._positions(), is_urgent=True)
            is_settled = await self._commits.until_idle(min(deadline_ms, self._leaves_at_ms))
            if not is_settled and deadline_ms < self._leaves_at_ms:
                return False
        self._leaves_at_ms = None
        change, self._leaving = Change.REVOKED, []
        if self._is_lost:  # perhaps by what the commit was answered: then all is lost
            change, partitions = Change.LOST, self._owned
        given = frozenset(partitions)
        self._commits.release(given, RebalanceInProgress("the group is giving the partitions to others"))
        self._owned = [tp for tp in self._owned if tp not in given]
        return Rebalance(change, partitions)

    def _take(
        self,
        partitions: Collection[TopicPartition],
        committed: Mapping[TopicPartition, OffsetAndMetadata],
    ) -> Rebalance:
        """These are read from now on, `committed` of those that are new. To tell: what is new."""
        held = frozenset(self._owned)
        added = [at for at in partitions if at not in held]
        self._owned = list(partitions)
        self._core.assign(self._owned)
        for at, found in committed.items():
            self._core.seek(at, found.offset)
        self._committed_ms = self._cluster.now_ms()
        return Rebalance(Change.ASSIGNED, added)

    @property
    def _is_idle(self) -> bool:
        """True when the application has not polled for so long that its partitions must go to others."""
        patience_ms: int = self._settings["max.poll.interval.ms"]
        return self._activity.idle_ms(self._cluster.now_ms()) > patience_ms

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    @property
    def _is_member(self) -> bool:
        return bool(self.is_subscribed and self.member.member_id)

    async def give_up(self) -> Rebalance | None:
        """Commit if that is automatic, and return what to tell before the member leaves; None the next time.

        Source: Kafka's ConsumerCoordinator.onLeavePrepare and close.
        """
        self._core.delivery.return_unfinished()
        holds_share = self._is_member and bool(self._owned) and not self._is_lost
        if self._commits_by_itself and (holds_share or self._is_assigned_by_hand):
            positions = self._positions()
            if positions != self._given_up:
                self._given_up = positions
                self._commits.owe(positions, is_urgent=True)
        limit_ms = min(self._settings["request.timeout.ms"], _CLOSE_COMMIT_MS)
        await self._commits.until_idle(self._cluster.now_ms() + limit_ms)
        self._commits.stop()
        owned, self._owned, self._leaving = self._owned, [], []
        if not owned:
            return None
        # As in Java, amid a rebalance too: whether the next generation knows this member is not known.
        is_lost = self._is_lost or self._is_rebalancing or self.member.generation_id < 0
        return Rebalance(Change.LOST if is_lost else Change.REVOKED, owned)

    def stop(self) -> None:
        """End all work in the background; the group is not told."""
        self._commits.stop()
        self._stop_beating()
        if self._looking is not None:
            self._looking.cancel()

    async def close(self) -> None:
        """Commit if that is automatic, leave; within seconds, also when the coordinator is silent."""
        await self.give_up()
        self.begin_leaving()
        await self.until_left()

    def begin_leaving(self) -> None:
        """End all work in the background, and tell the group, once, whoever waits for that."""
        self.stop()
        if self._is_member and self._departure is None:
            self._departure = asyncio.create_task(self._depart())

    async def _depart(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_LEAVE_S):
                await self._leave()

    async def until_left(self) -> None:
        """Wait until the group has been told; it is told also if this is cancelled."""
        if self._departure is not None:
            await asyncio.shield(self._departure)

    # Topics

    def _note_topic_errors(self) -> None:
        """Let a poll raise why a topic cannot be read: it may not be described, or has a wrong name.

        The others are read on. Each metadata.max.age.ms it is raised again, as Java does with each refresh.
        See test_a_member_is_told_again_of_a_name_that_no_topic_can_have.
        """
        self._noted_ms = self._cluster.now_ms()
        errors = {topic: self._cluster.metadata.topic_error(topic) for topic in sorted(self.topics)}
        final = {topic: error for topic, error in errors.items() if error is not None and not error.retriable}
        for topic, error in final.items():
            if self._noted_errors.get(topic) != error.code:
                self._core.note_error(error)
                self._wake()
        self._noted_errors = {topic: error.code for topic, error in final.items()}

    async def _match(self, pattern: re.Pattern[str]) -> None:
        """Subscribe to what matches now, and look again by and by."""
        answer = await self._cluster.fetch_metadata(None)
        if self._pattern is not pattern:
            return  # the subscription is another one by now, which makes its own look
        self.topics, self._is_matched = matching(answer, pattern), True
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

    @property
    def _commits_by_itself(self) -> bool:
        return bool(self._settings["enable.auto.commit"])

    def _positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the positions behind everything that was handed out."""
        positions = {}
        for tp in self._core.assignment():
            with suppress(MisuseError):  # auto.offset.reset=none, and no position yet
                if (offset := self._core.position(tp)) is not None:
                    positions[tp] = OffsetAndMetadata(offset)
        return positions

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit positions; None: of everything handed out. Raises why the group does not take them."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        if chosen := self._positions() if offsets is None else offsets:
            await self._commits.commit(chosen)

    async def _commit_once(self, offsets: Offsets) -> None:
        """Make one attempt."""
        if self.is_subscribed and self.member.generation_id < 0 and not self._is_owing:
            # As nobody in particular the group would take it, over the heads of its members.
            raise not_a_member()
        try:
            await self._commit_as(self.member, offsets)
        except OncelogError as error:
            if next_after(error, GroupRequest.COMMIT) is GroupAction.FIND:
                self._coordinator_id = None
            raise

    async def _commit_as(self, member: ConsumerGroupMetadata, offsets: Offsets) -> None:
        answer = await self._ask(commit_request(member, offsets), max_version=MAX_COMMIT_VERSION)
        error = commit_error(answer)
        if error is None:
            return
        is_member = self.is_subscribed and member.generation_id >= 0
        if is_member and member == self.member:  # else it is news of an earlier generation
            self._react_to_commit(error)
        raise self._ended.with_traceback(None) if self._ended is not None else error

    def _react_to_commit(self, error: OncelogError) -> None:
        match next_after(error, GroupRequest.COMMIT):
            case GroupAction.END:
                self._end(error)
            case GroupAction.LOST | GroupAction.RESET as why if not self._is_rebalancing:
                self._lose(why)
            case GroupAction.JOIN if not self._is_rebalancing:
                self._resubscribe()

    def _keeps(self, offsets: Offsets) -> bool:
        """Return True for partitions that the member reads on, also if the group is at its next generation.

        See test_a_commit_beside_a_join_is_stored_in_the_generation_that_follows.
        """
        is_in = self.is_subscribed and self.member.generation_id >= 0 and not self._is_lost
        return is_in and offsets.keys() <= set(self._owned)

    def _note_failed_commit(self, error: Exception) -> None:
        is_of_member = isinstance(error, OncelogError) and next_after(error, GroupRequest.COMMIT) in _OUT
        if not (self.is_subscribed and is_of_member):  # a member learns from the group what has become of it
            _LOG.warning("an automatic commit for group %r failed: %s", self.group_id, error)

    @property
    def _is_assigned_by_hand(self) -> bool:
        return not self.is_subscribed and bool(self._core.assignment())

    def commit_before_assigning(self) -> None:
        """Begin an automatic commit, before partitions that were assigned by hand are read no more."""
        if not (self._commits_by_itself and self._is_assigned_by_hand):
            return
        positions = self._positions()
        if (row := self._core.delivery.unfinished()) is not None:
            positions[TopicPartition(row.topic, row.partition)] = OffsetAndMetadata(row.offset)
        self._committed_ms = self._cluster.now_ms()
        self._commits.owe(positions)

    def commit_by_time(self) -> None:
        """Begin an automatic commit when one is due, of what was handed out by now."""
        if not (self._commits_by_itself and (self._owned or self._is_assigned_by_hand)):
            return
        now_ms = self._cluster.now_ms()
        if now_ms - self._committed_ms >= self._settings["auto.commit.interval.ms"]:
            self._committed_ms = now_ms
            self._commits.owe(self._positions(), is_by_time=True)
