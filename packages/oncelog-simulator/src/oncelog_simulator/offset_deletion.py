"""A workload that deletes groups, offsets, topics and open transactions while transactions have pending
offsets.

Nothing that was deleted may come back, neither with the commit of its transaction nor with a restart. Nothing
else may go. Each application commits rising positions and uses each position once. The positions that a group
may have follow from three facts: when calls began, when they were answered, and how their transactions ended.
A slow call may have left a request in the network. That request may arrive at any later time, so its position
may come back, or its deletion may take effect again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from oncelog.broker.state import BrokerState
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.types import NewTopic
from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.connection.coordinator import GROUP
from oncelog.client.consumer.aio import AsyncConsumer
from oncelog.client.producer.aio import AsyncProducer
from oncelog.errors import GroupIdNotFound, OncelogError, UnknownTopicOrPartition, raise_for_code
from oncelog.types import ConsumerGroupMetadata, TopicPartition
from oncelog.wire.messages import OffsetDeleteRequest
from oncelog_simulator.clients import SHORT_TIMEOUTS, Application
from oncelog_simulator.history.check import Outcome
from oncelog_simulator.scenario import Scenario
from oncelog_simulator.txn_clients import TransactionalClient
from oncelog_simulator.workloads import Workload, create_topic
from oncelog_simulator.world import World

GROUPS = ("forgotten-a", "forgotten-b")
STEPS = 9
UNRETRIED_US = 1_000_000
"""A call that took fewer microseconds was not retried, so no copy of its request is left in the network."""
LATE_US = 2_000_000
"""Microseconds after the response to a commit, after which no copy of its request can arrive any more."""

Place = tuple[str, TopicPartition]
"""The group and partition of a committed offset."""


@dataclass(eq=False, slots=True)
class Commit:
    """A position that an application commits for a group.

    `outcome` is the outcome of its transaction, or of the commit call if it has no transaction. `decided_us`
    is the time at which the success became known.
    """

    place: Place
    position: int
    begun_us: int
    answered_us: int | None = None
    is_decision_requested: bool = False
    outcome: Outcome = Outcome.UNKNOWN
    decided_us: int | None = None

    @property
    def was_not_retried(self) -> bool:
        return self.answered_us is not None and self.answered_us - self.begun_us < UNRETRIED_US

    @property
    def is_sure(self) -> bool:
        """Return True if the commit certainly took effect, so that its position holds until a deletion or
        another commit.
        """
        return self.outcome is Outcome.OK

    @property
    def may_hold(self) -> bool:
        return self.outcome is not Outcome.FAIL and self.is_decision_requested


@dataclass(eq=False, slots=True)
class Removal:
    """A deletion of a group, an offset or a topic. `done_us` is None if its outcome is unknown."""

    group: str | None
    topic: str | None
    requested_us: int
    done_us: int | None = None

    def covers(self, place: Place) -> bool:
        group, tp = place
        return self.group in (None, group) and self.topic in (None, tp.topic)

    def may_strike_after(self, moment_us: int) -> bool:
        was_not_retried = self.done_us is not None and self.done_us - self.requested_us < UNRETRIED_US
        return not was_not_retried or (self.done_us or 0) > moment_us


@dataclass(eq=False, slots=True)
class Membership:
    """A time span in which a group may have members."""

    group: str
    begun_us: int
    ended_us: int | None = None


class Positions:
    """All commits, deletions and memberships, and the positions that may follow from them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.commits: dict[Place, list[Commit]] = {}
        self.removals: list[Removal] = []
        self.memberships: list[Membership] = []
        self.shown: dict[Place, tuple[Commit, int]] = {}
        """For each place, the newest commit that an OffsetFetch response showed, and that request's time."""

    def begin(self, place: Place, position: int) -> Commit:
        commit = Commit(place, position, self.world.now_us)
        self.commits.setdefault(place, []).append(commit)
        return commit

    def remove(self, group: str | None, topic: str | None) -> Removal:
        removal = Removal(group, topic, self.world.now_us)
        self.removals.append(removal)
        return removal

    def show(self, place: Place, position: int, requested_us: int) -> None:
        """Note the position in an OffsetFetch response."""
        commit = self._find(place, position)
        if commit is not None:
            newest = self.shown.get(place)
            if newest is None or newest[0].position <= position:
                self.shown[place] = commit, requested_us

    def check(self, place: Place, position: int | None) -> str | None:
        """Return a reason if the group must not have this position now, else None.

        A `position` of None means that the group has no committed offset.
        """
        commits = self.commits.get(place, [])
        held = None if position is None else self._find(place, position)
        if position is not None and held is None:
            return "nobody committed it"
        if held is not None and not held.may_hold:
            return f"its transaction was not committed: {held}"
        if held is not None and (removal := self._removal_of(held)) is not None:
            return f"it was deleted: {held}, {removal}"
        for commit in commits:
            is_newer = held is None or (commit.position > held.position and held.was_not_retried)
            if not is_newer or not commit.is_sure:
                continue
            if held is not None or not self._may_be_removed(commit):
                return f"a newer one was committed: {commit}"
        shown, requested_us = self.shown.get(place, (None, 0))
        if shown is not None and not any(
            removal.covers(place)
            and (removal.requested_us > requested_us or removal.may_strike_after(requested_us))
            for removal in self.removals
        ):
            is_older = held is None or (held.position < shown.position and held.was_not_retried)
            return f"a newer one was shown: {shown}" if is_older else None
        return None

    def may_exist(self, group: str) -> bool:
        """Return False for a group that was deleted and that no member has joined since."""
        deleted = [removal for removal in self.removals if removal.group == group and removal.topic is None]
        last = max((removal.requested_us for removal in deleted if removal.done_us is not None), default=None)
        return last is None or any(
            membership.group == group
            and (membership.ended_us is None or membership.ended_us + LATE_US > last)
            for membership in self.memberships
        )

    def _find(self, place: Place, position: int) -> Commit | None:
        return next((commit for commit in self.commits.get(place, ()) if commit.position == position), None)

    def _removal_of(self, commit: Commit) -> Removal | None:
        """Return a deletion that certainly took effect after the commit; None if there is none."""
        return next(
            (
                removal
                for removal in self.removals
                if removal.covers(commit.place)
                and commit.was_not_retried
                and (commit.answered_us or 0) + LATE_US <= removal.requested_us
                and removal.done_us is not None
            ),
            None,
        )

    def _may_be_removed(self, commit: Commit) -> bool:
        return any(
            removal.covers(commit.place) and removal.may_strike_after(commit.begun_us)
            for removal in self.removals
        )


class OffsetCommitter(TransactionalClient):
    """Commits positions of one topic for both groups in transactions."""

    def __init__(self, world: World, name: str, topic: str, source: str, positions: Positions) -> None:
        super().__init__(world, name, topic, 1, STEPS)
        self.source, self.positions = TopicPartition(source, 0), positions
        self.position = 0

    async def work(self) -> None:
        await self.transact_to_the_end(self.transact, rest_s=4.0)

    async def transact(self, producer: AsyncProducer) -> bool:
        """Run one transaction with offsets. Return False if the producer must be replaced."""
        self.bursts_left -= 1
        self.transaction += 1
        how = self.rng.choices(["commit", "abort", "leave"], [14, 3, 2])[0]
        await producer.begin_transaction()
        if self.rng.random() < 0.5:
            await self.put(producer, self.topic)
        commits = [
            await self._send_offsets(producer, group)
            for group in self.rng.sample(GROUPS, self.rng.choice((1, 1, 2)))
        ]
        await self.sleep_up_to(8.0)
        if how == "commit":
            await self._commit(producer, commits)
        elif how == "abort":
            for commit in commits:
                commit.outcome = Outcome.FAIL
            await producer.abort_transaction()
        return how != "leave"

    async def _send_offsets(self, producer: AsyncProducer, group: str) -> Commit:
        self.position += 1
        commit = self.positions.begin((group, self.source), self.position)
        try:
            await producer.send_offsets_to_transaction(
                {self.source: self.position}, ConsumerGroupMetadata(group)
            )
        except OncelogError as error:
            self.world.note(self.name, f"offsets of {group}: {error!r}")
            await producer.abort_transaction()
            commit.outcome = Outcome.FAIL
            raise
        commit.answered_us = self.world.now_us
        return commit

    async def _commit(self, producer: AsyncProducer, commits: list[Commit]) -> None:
        for commit in commits:
            commit.is_decision_requested = True
        if await self.commit(producer):
            for commit in commits:
                commit.outcome, commit.decided_us = Outcome.OK, self.world.now_us
        else:
            for commit in commits:
                commit.outcome = Outcome.FAIL


class PlainCommitter(Application):
    """Commits positions without transactions, and reads the positions of both groups."""

    def __init__(self, world: World, name: str, source: str, positions: Positions) -> None:
        super().__init__(world, name)
        self.source, self.positions = TopicPartition(source, 0), positions
        self.position, self.steps_left = 0, 2 * STEPS

    async def work(self) -> None:
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            while self.steps_left > 0:
                self.steps_left -= 1
                await self.sleep_up_to(4.0)
                group = self.rng.choice(GROUPS)
                if self.rng.random() < 0.5:
                    await self._commit(admin, group)
                else:
                    await self._read(admin, group)

    async def _commit(self, admin: AsyncAdmin, group: str) -> None:
        self.position += 1
        commit = self.positions.begin((group, self.source), self.position)
        commit.is_decision_requested = True
        try:
            await admin.alter_group_offsets(group, {self.source: self.position})
        except OncelogError as error:
            self.world.note(self.name, f"position {self.position} of {group}: {error!r}")
        else:
            commit.answered_us = commit.decided_us = self.world.now_us
            commit.outcome = Outcome.OK

    async def _read(self, admin: AsyncAdmin, group: str) -> None:
        requested_us = self.world.now_us
        for tp, committed in (await admin.group_offsets(group)).items():
            self.positions.show((group, tp), committed.offset, requested_us)


class GroupMember(Application):
    """Joins one of the groups at times, and leaves it."""

    def __init__(
        self, world: World, name: str, source: str, positions: Positions, group_protocol: str
    ) -> None:
        super().__init__(world, name)
        self.source, self.positions, self.group_protocol = source, positions, group_protocol
        self.steps_left = 3

    async def work(self) -> None:
        while self.steps_left > 0:
            self.steps_left -= 1
            await self.sleep_up_to(15.0)
            membership = Membership(self.rng.choice(GROUPS), self.world.now_us)
            self.positions.memberships.append(membership)
            await self._join(membership.group)
            if self.world.now_us - membership.begun_us < 20_000_000:
                membership.ended_us = self.world.now_us

    async def _join(self, group: str) -> None:
        settings: dict[str, object] = {
            **SHORT_TIMEOUTS,
            "client.id": self.name,
            "group.id": group,
            "enable.auto.commit": False,
            "group.protocol": self.group_protocol,
        }
        if self.group_protocol == "classic":
            settings |= {"heartbeat.interval.ms": 2_000, "session.timeout.ms": 6_000}
        async with AsyncConsumer(settings) as consumer:
            consumer.subscribe([self.source])
            for _ in range(self.rng.randint(1, 3)):
                await consumer.poll(2.0)


class OffsetDeleter(Application):
    """Deletes groups, offsets and topics, and aborts transactions as an operator does."""

    def __init__(
        self, world: World, name: str, topic: NewTopic, sources: list[str], positions: Positions
    ) -> None:
        super().__init__(world, name)
        self.topic, self.sources, self.positions = topic, sources, positions
        self.steps_left = self.rng.randint(8, 16)

    async def work(self) -> None:
        actions = [self._delete_group, self._delete_offset, self._delete_topic, self._abort]
        async with AsyncAdmin(SHORT_TIMEOUTS) as admin:
            for name in (self.topic.name, *self.sources):
                await create_topic(admin, NewTopic(name, num_partitions=1))
            while self.steps_left > 0:
                self.steps_left -= 1
                await self.sleep_up_to(8.0)
                (act,) = self.rng.choices(actions, [4, 4, 2, 2])
                try:
                    await act(admin)
                except OncelogError as error:
                    self.world.note(self.name, f"{act.__name__}: {error!r}")
                    for source in self.sources:
                        await create_topic(admin, NewTopic(source, num_partitions=1))

    async def _delete_group(self, admin: AsyncAdmin) -> None:
        group = self.rng.choice(GROUPS)
        removal = self.positions.remove(group, None)
        with suppress(GroupIdNotFound):
            await admin.delete_group(group)
        removal.done_us = self.world.now_us
        self.world.note(self.name, f"{group} is deleted")

    async def _delete_offset(self, admin: AsyncAdmin) -> None:
        group, source = self.rng.choice(GROUPS), self.rng.choice(self.sources)
        removal = self.positions.remove(group, source)

        async def once(cluster: ClusterConnection, node_id: int) -> None:
            topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
                name=source,
                partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)],
            )
            answer = await cluster.request(node_id, OffsetDeleteRequest(group_id=group, topics=[topic]))
            raise_for_code(answer.error_code, f"group {group!r}")
            raise_for_code(answer.topics[0].partitions[0].error_code, f"{source} of group {group!r}")

        await admin._router.at_coordinator(GROUP, group, once)
        removal.done_us = self.world.now_us
        self.world.note(self.name, f"offset of {source} of {group} is deleted")

    async def _delete_topic(self, admin: AsyncAdmin) -> None:
        source = self.rng.choice(self.sources)
        removal = self.positions.remove(None, source)
        error = (await admin.delete_topics([source], raise_errors=False))[source].error
        if error is not None and not isinstance(error, UnknownTopicOrPartition):
            raise error
        removal.done_us = self.world.now_us
        self.world.note(self.name, f"{source} is deleted")
        await self.sleep_up_to(3.0)
        await create_topic(admin, NewTopic(source, num_partitions=1))

    async def _abort(self, admin: AsyncAdmin) -> None:
        """Write an abort marker whose coordinator epoch may be above the coordinator's own."""
        opened = await admin.open_transactions([self.topic.name])
        if opened:
            one = self.rng.choice(sorted(opened))
            epoch = (one.coordinator_epoch or 0) + self.rng.choice((0, 1, 5))
            await admin.abort_transaction(one._replace(coordinator_epoch=epoch))
            self.world.note(self.name, f"aborts {one} with coordinator epoch {epoch}")


class OffsetDeletion(Workload):
    """Checks that deleted data stays deleted, and that nothing else is deleted."""

    topic: ClassVar[str] = "deletions"
    clients: ClassVar[tuple[str, ...]] = ("committer-0", "committer-1", "plain", "member", "deleter")
    unguarded_groups: ClassVar[tuple[str, ...]] = GROUPS
    is_repeatable: ClassVar[bool] = False
    """False, because a repeated plain commit would move a position back."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        super().__init__(world, scenario)
        # An operator and the coordinator may write markers with different outcomes for one transaction, so
        # switch off the check that compares outcomes by epoch.
        self.shares_epochs = True
        self.partitions[:] = self.partitions[:1]
        self.positions = Positions(world)
        sources = [f"positions-{number}" for number in range(3)]
        one, other, plain, member, deleter = self.clients
        self.applications = [
            OffsetCommitter(world, one, self.topic, sources[0], self.positions),
            OffsetCommitter(world, other, self.topic, sources[1], self.positions),
            PlainCommitter(world, plain, sources[2], self.positions),
            GroupMember(world, member, sources[0], self.positions, scenario.group_protocol),
            OffsetDeleter(world, deleter, NewTopic(self.topic, num_partitions=1), sources, self.positions),
        ]

    @classmethod
    def broker_settings(cls, rng: Any) -> dict[str, object]:
        if rng.random() < 0.5:
            return {}
        return {
            "transactional.id.expiration.ms": 20_000,
            "transaction.remove.expired.transaction.cleanup.interval.ms": 3_000,
        }

    def observe(self, node: BrokerState) -> None:
        """Check for every place that the requests allow its position, or that it has none."""
        offsets = node.groups.offsets
        for place in self.positions.commits:
            group, tp = place
            committed = offsets.of(group).get(tp)
            # Skip pending offsets: a position of a committed transaction takes effect with its marker, which
            # may be slightly after the response to EndTxn.
            if tp in offsets.pending_of(group):
                continue
            why = self.positions.check(place, None if committed is None else committed.offset)
            if why is not None:
                where = "nothing" if committed is None else f"position {committed.offset}"
                self.world.violate("a group's position is wrong", f"{group} {tp} has {where}: {why}")
        for group in GROUPS:
            if group in (*node.groups._groups, *node.groups.consumers.ids()):
                self._check_existence(group)

    def _check_existence(self, group: str) -> None:
        if not self.positions.may_exist(group):
            self.world.violate("a deleted group is back", group)

    def recovered(self, node: BrokerState) -> None:
        self.observe(node)

    def check(self, node: BrokerState) -> None:
        self.observe(node)
