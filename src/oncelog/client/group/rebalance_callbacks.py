"""What both consumer faces offer of groups: subscribe, commit, committed, rebalance callbacks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from oncelog.client.arguments import names_of, offsets_of, partitions_of
from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.aio import Change, GroupSession, Rebalance
from oncelog.client.group.classic_member import ClassicSession
from oncelog.client.group.consumer_member import ConsumerProtocolSession
from oncelog.errors import MisuseError
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition

Offsets = Mapping[TopicPartition, OffsetAndMetadata | int]
Listener = Callable[[list[TopicPartition]], Any]


_SESSIONS: dict[str, type[GroupSession]] = {"classic": ClassicSession, "consumer": ConsumerProtocolSession}


class Listeners(NamedTuple):
    """Whom to tell what; `on_lost` None: `on_revoked` is told of that as well."""

    on_assigned: Listener | None = None
    on_revoked: Listener | None = None
    on_lost: Listener | None = None

    def of(self, rebalance: Rebalance) -> Listener | None:
        """Who wants to know."""
        if rebalance.change is Change.ASSIGNED:
            return self.on_assigned
        if rebalance.change is Change.LOST and self.on_lost is not None:
            return self.on_lost
        return self.on_revoked

    def tell(self, rebalance: Rebalance) -> Any:
        """Call who wants to know; what the callback returned."""
        listener = self.of(rebalance)
        return listener(rebalance.partitions) if listener is not None else None

    async def tell_async(self, rebalance: Rebalance) -> None:
        """The same with callbacks that may be coroutine functions."""
        told = self.tell(rebalance)
        if inspect.isawaitable(told):
            await told


class Subscription(NamedTuple):
    """Topics by name, or all whose names match a regular expression as a whole."""

    topics: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def __bool__(self) -> bool:
        return bool(self.topics) or self.pattern is not None


def subscription_of(topics: Collection[str] | str, pattern: str | re.Pattern[str] | None) -> Subscription:
    """One topic's name, or several, or a pattern. Raises MisuseError on both, or not a regular expression."""
    if pattern is None:
        return Subscription(frozenset(names_of(topics)))
    if topics:
        raise MisuseError("subscribe to topics or to a pattern, not to both")
    try:
        return Subscription(pattern=re.compile(pattern))
    except re.error as error:
        raise MisuseError(f"{pattern!r} is no regular expression: {error}") from error


class AsyncSubscribing:
    """The group's part of the asyncio face."""

    _core: ConsumerCore
    _settings: Settings
    _connected: Callable[[], Awaitable[ClusterConnection]]
    _wake_up: Callable[[], None]

    def __init__(self) -> None:
        self._group: GroupSession | None = None
        self._runtime = system.current()
        self._activity = PollActivity(self._runtime.monotonic_ns() / 1e6)
        self._subscription = Subscription()
        self.listeners = Listeners()

    def subscribe(
        self,
        topics: Collection[str] | str = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: Listener | None = None,
        on_revoked: Listener | None = None,
        on_lost: Listener | None = None,
    ) -> None:
        """Read the topics' partitions as the group (group.id) shares them out among its members.

        `pattern`: instead of names, every topic (but Kafka's own) whose whole name matches; looked for
        again every metadata.max.age.ms.

        The callbacks get lists of partitions during `poll`; positions can still be committed in
        `on_revoked`. Takes the place of an earlier subscription. Raises MisuseError without a group, without
        a topic, and while partitions are assigned by hand.
        """
        if self._settings["group.id"] is None:
            raise MisuseError("group.id is not set: give the consumer's group to subscribe")
        subscription = subscription_of(topics, pattern)
        # The member would stay in the group without taking part in its rebalances: it would read partitions
        # that others have by then. See test_a_subscription_to_no_topic_is_refused.
        if not subscription:
            raise MisuseError("no topics are given: call unsubscribe() to leave the group")
        # The positions of those partitions would never be committed. As in Java.
        if not self._subscription and self._core.assignment():
            raise MisuseError(
                "partitions are assigned to this consumer by hand: call unsubscribe() before subscribing"
            )
        self._subscription = subscription
        self.listeners = Listeners(on_assigned, on_revoked, on_lost)
        if self._group is not None:
            self._group.subscribe(*self._subscription)

    async def unsubscribe(self) -> None:
        """Leave the group, committing first if that is automatic, and read nothing.

        Calls `on_revoked` (or `on_lost`) with the partitions that it gives up.
        """
        try:
            await self.tell_of_leaving()
            if self._group is not None:
                await self._group.close()
        finally:
            # Also when this is cancelled: the group would wait for a member that nobody polls. See
            # test_an_interrupt_of_a_close_keeps_no_member_in_the_group.
            if self._group is not None:
                self._group.begin_leaving()
            self._group, self._subscription = None, Subscription()
            self._core.assign([])

    async def give_up(self) -> Rebalance | None:
        """Commit if that is automatic; see GroupSession.give_up."""
        return await self._group.give_up() if self._group is not None else None

    async def tell_of_leaving(self) -> None:
        """Commit if that is automatic, and call the application's callback before the member leaves."""
        rebalance = await self.give_up()
        if rebalance is not None:
            await self.listeners.tell_async(rebalance)

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Return who this consumer is in its group, for `Producer.send_offsets_to_transaction`.

        Raises MisuseError with enable.auto.commit=true: poll() and close() would commit positions of records
        whose transaction was aborted, and those records would never be processed.
        """
        if self._settings["enable.auto.commit"]:
            raise MisuseError(
                "set enable.auto.commit=false on a consumer whose positions a transaction commits: with "
                "enable.auto.commit=true, group_metadata() for send_offsets_to_transaction() is refused, "
                "because poll() and close() would also commit positions of aborted records, and lose those"
            )
        if self._group is None:
            return ConsumerGroupMetadata(self._settings["group.id"] or "")
        return self._group.metadata

    async def commit(self, offsets: Offsets | None = None) -> None:
        """Commit positions for the group: `offsets` (the next to read), or those of all that was handed out.

        Raises IllegalGeneration, UnknownMemberId or RebalanceInProgress when the group went on without this
        member: its partitions are others' by now, and what they hold is read again from the last commit.
        """
        chosen = None if offsets is None else offsets_of(offsets)
        await (await self._session()).commit(chosen)
        self._finish_committed(chosen)

    def _finish_committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None) -> None:
        """Let no later automatic commit go back behind the record that is being processed."""
        row = self._core.delivery.unfinished()
        if row is None:
            return
        if offsets is not None:
            committed = offsets.get(TopicPartition(row.topic, row.partition))
            if committed is None or committed.offset <= row.offset:
                return
        self._core.delivery.finish()

    async def committed(
        self, partitions: Collection[TopicPartition] | TopicPartition
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """The group's committed position of each partition; None without one."""
        chosen = partitions_of(partitions)
        found = await (await self._session()).committed(chosen)
        return {tp: found.get(tp) for tp in chosen}

    async def seek_to_committed(self, *partitions: TopicPartition) -> None:
        """Go back to the group's committed positions, in every assigned partition if none is named.

        After an aborted transaction the records it consumed are read again so (KAFKA-17582).
        """
        session = await self._session()
        chosen = partitions_of(partitions) or self._core.assignment()
        found = await session.committed(chosen)
        for at, each in found.items():
            self._core.seek(at, each.offset)
        if without := [at for at in chosen if at not in found]:
            self._core.reset(without)  # it may raise: auto.offset.reset=none

    async def _session(self) -> GroupSession:
        cluster = await self._connected()
        if self._group is None:
            session = _SESSIONS[self._settings["group.protocol"]]
            self._group = session(self._core, self._settings, cluster, self._activity, self._wake_up)
            if self._subscription:
                self._group.subscribe(*self._subscription)
        return self._group

    @contextmanager
    def _polling(self) -> Iterator[None]:
        """Count a poll that waits as activity of the member (max.poll.interval.ms)."""
        self._activity.enter()
        try:
            yield
        finally:
            self._activity.leave(self._runtime.monotonic_ns() / 1e6)

    async def advance(self, deadline_ms: float) -> Rebalance | bool:
        """What the group has to tell before records may be taken; see GroupSession.advance."""
        if self._subscription:
            return await (await self._session()).advance(deadline_ms)
        if self._settings["group.id"] is not None:
            (await self._session()).commit_by_time()
        return True
