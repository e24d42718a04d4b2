"""Assignors: pure functions that give each partition to one member of a group.

In a classic group the leader, a client, runs the assignor. All clients must compute the same assignment, so
the order is fixed: members by instance id, or by member id if they have no instance id; topics by name.

The sticky assignors let partitions stay with their owners if possible. Every partition of a subscribed topic
is assigned to one member. A member's load is the number of its partitions. In the result, no chain of moves
could balance the loads further. Exception: if there are thousands of topics and the members subscribe to
different ones, `LEVELLING_STEPS` may end the search for moves early. If all members subscribe to the same
topics, as few partitions as possible move. The result does not depend on the order of the members or topics.
Source: kafka RangeAssignor, RoundRobinAssignor, AbstractStickyAssignor, CooperativeStickyAssignor; KIP-54,
KIP-341, KIP-429.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from oncelog.types import TopicPartition

COOPERATIVE = "cooperative-sticky"
STICKY = "sticky"
LEVELLING_STEPS = 500_000
"""The number of steps after which the search for moves ends: about half a second of work.

A step examines one topic or member. STEPS_PER_PARTITION steps are added for each partition.
"""
STEPS_PER_PARTITION = 20
"""Steps that are added to LEVELLING_STEPS for each partition, because every partition may have to move. Most
moves take one step.
"""


class Subscriber(NamedTuple):
    """A member, the topics that it subscribes to and the partitions that it owns."""

    member_id: str
    group_instance_id: str | None
    topics: frozenset[str]
    owned: tuple[TopicPartition, ...] = ()
    """Partitions that the member is assigned now, or was last assigned. Only the sticky assignors use them.
    """
    generation_id: int | None = None
    """The generation in which the member got `owned`; None if the member does not report it."""

    @property
    def order(self) -> tuple[int, str]:
        """Sort key of the member. Static members come first, by instance id."""
        if self.group_instance_id is None:
            return 1, self.member_id
        return 0, self.group_instance_id


GroupAssignment = dict[str, list[TopicPartition]]
"""Member id -> the member's partitions."""


def assign_range(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> GroupAssignment:
    """Give each member a contiguous range of each topic's partitions.

    If a topic's partitions cannot be divided equally, the first members each get one partition more.
    """
    ordered = sorted(members, key=lambda member: member.order)
    readers_of = _readers(*_subscriptions(ordered), partition_counts)
    assignment: GroupAssignment = {member.member_id: [] for member in members}
    for topic, count in sorted(partition_counts.items()):
        readers = readers_of[topic]
        if not readers:
            continue
        share, extra = divmod(count, len(readers))
        start = 0
        # Further readers get no partition: a topic of few partitions may have thousands of readers. See
        # test_a_range_of_topics_with_many_readers_takes_little_work.
        for index, reader in enumerate(readers[:count]):
            end = start + share + (index < extra)
            assignment[ordered[reader].member_id] += [
                TopicPartition(topic, partition) for partition in range(start, end)
            ]
            start = end
    return assignment


def assign_round_robin(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> GroupAssignment:
    """Give the partitions of all topics to the members in turn, skipping members that do not subscribe to the
    topic.
    """
    assignment: GroupAssignment = {member.member_id: [] for member in members}
    turns = cycle(sorted(members, key=lambda member: member.order))
    for topic, count in sorted(partition_counts.items()):
        if not any(topic in member.topics for member in members):
            continue
        for partition in range(count):
            reader = next(member for member in turns if topic in member.topics)
            assignment[reader.member_id].append(TopicPartition(topic, partition))
    return assignment


def assign_sticky(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> GroupAssignment:
    """Return an assignment with balanced loads in which as many partitions as possible stay with their
    owners.
    """
    loads = _Loads(members, partition_counts)
    for tp, owner in sorted(_owners(members).items()):
        loads.keep(tp, owner)
    loads.deal()
    loads.level()
    return loads.assignment()


def assign_cooperative(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> GroupAssignment:
    """Return the sticky assignment without the partitions that another member still owns.

    The owners revoke these partitions and rejoin, and the next rebalance assigns them. See
    test_cooperative_withholds_what_must_be_given_up_first.
    """
    readers: dict[TopicPartition, set[str]] = {}
    for member in members:
        for tp in member.owned:
            readers.setdefault(tp, set()).add(member.member_id)
    return {
        member_id: [tp for tp in share if readers.get(tp, set()) <= {member_id}]
        for member_id, share in assign_sticky(members, partition_counts).items()
    }


def _owners(members: Iterable[Subscriber]) -> dict[TopicPartition, str]:
    """Return the current owner of each partition that has one.

    If several members claim a partition, the member with the latest generation owns it. If several members of
    the latest generation claim the partition, it has no owner.
    """
    claims: dict[TopicPartition, dict[int, list[str]]] = {}
    for member in members:
        generation_id = -1 if member.generation_id is None else member.generation_id
        for tp in set(member.owned):
            claims.setdefault(tp, {}).setdefault(generation_id, []).append(member.member_id)
    latest = {tp: by_generation[max(by_generation)] for tp, by_generation in claims.items()}
    return {tp: claimants[0] for tp, claimants in latest.items() if len(claimants) == 1}


def _subscriptions(members: Iterable[Subscriber]) -> tuple[list[int], list[frozenset[str]]]:
    """Return the index of each member's subscription in the second result, and the distinct subscriptions."""
    kinds: dict[frozenset[str], int] = {}
    return [kinds.setdefault(member.topics, len(kinds)) for member in members], list(kinds)


def _readers(
    kinds: Sequence[int], subscriptions: Sequence[frozenset[str]], topics: Collection[str]
) -> dict[str, list[int]]:
    """Return the indexes of each topic's subscribers. Topics with the same subscribers share one list.

    `kinds` has the index of each member's subscription in `subscriptions`. Most members have the same
    subscription. Therefore the topics of each distinct subscription are examined once, and not once for each
    member. See test_members_of_one_subscription_are_looked_at_together.
    """
    members_of: list[list[int]] = [[] for _ in subscriptions]
    for index, kind in enumerate(kinds):
        members_of[kind].append(index)
    kinds_of: dict[str, list[int]] = {topic: [] for topic in topics}
    for kind, subscription in enumerate(subscriptions):
        for topic in subscription & kinds_of.keys():
            kinds_of[topic].append(kind)
    shared: dict[tuple[int, ...], list[int]] = {}
    for key in map(tuple, kinds_of.values()):
        if key not in shared:
            shared[key] = sorted(index for kind in key for index in members_of[kind])
    return {topic: shared[tuple(key)] for topic, key in kinds_of.items()}


class _Loads:
    """The assignment while it is being built. Members are numbered by their `order`.

    A reader of a topic is a member that subscribes to the topic. A giver is a member whose load is being
    reduced.
    """

    def __init__(self, members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> None:
        self._members = sorted(members, key=lambda member: member.order)
        self._index = {member.member_id: index for index, member in enumerate(self._members)}
        self._owned = [frozenset(member.owned) for member in self._members]
        self._counts = dict(partition_counts)
        self._held: list[dict[str, set[int]]] = [{} for _ in self._members]
        self._load = [0] * len(self._members)
        self._kinds, self._subscriptions = _subscriptions(self._members)
        """The distinct subscriptions. `_kinds` has the index of each member's subscription in this list."""
        self._readers = _readers(self._kinds, self._subscriptions, partition_counts)
        self._kept: dict[str, set[int]] = {topic: set() for topic in partition_counts}
        self._topics: list[list[str]] = []
        """For each member, the sorted topics of which it has partitions. Kept up to date during `level`."""
        self._takers: list[list[tuple[int, int]]] = []
        """A heap of (load, member) for each subscription. Entries with an outdated load are ignored."""
        self._order: list[tuple[int, int]] = []
        """A heap of (load, member): the least loaded member of each subscription.

        Entries that are not in `_queued` are outdated and ignored.
        """
        self._queued: dict[int, tuple[int, int]] = {}
        self._common: list[dict[int, list[str]]] = []
        """Member -> index of a subscription -> heap of the topics that the subscription has and the member
        has partitions of.

        A heap may also contain topics whose last partition the member has handed over.
        """
        self._steps_left = LEVELLING_STEPS + STEPS_PER_PARTITION * sum(self._counts.values())
        self._candidates: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        """(member, topic) -> two heaps of partitions that the member can hand over.

        The first heap has the partitions that the member did not own before. The second heap has all others.
        """
        self._returnable: dict[tuple[int, str], dict[int, list[tuple[bool, int]]]] = {}
        """(member, topic) -> other member -> heap of partitions that the other member owned and can get back.
        """
        self._missed: dict[int, dict[str, set[int]]] = {}
        """Member -> topic -> partitions that the member owned before and that are not assigned to it now."""

    def assignment(self) -> GroupAssignment:
        """Return the assignment, with each member's partitions sorted."""
        return {
            member.member_id: [
                TopicPartition(topic, partition)
                for topic, partitions in sorted(held.items())
                for partition in sorted(partitions)
            ]
            for member, held in zip(self._members, self._held, strict=True)
        }

    def keep(self, tp: TopicPartition, owner: str) -> None:
        """Assign a partition to its current owner, if the partition exists and the owner still subscribes to
        its topic.
        """
        index = self._index[owner]
        if tp.topic in self._members[index].topics and 0 <= tp.partition < self._counts.get(tp.topic, 0):
            self._give(tp.topic, tp.partition, index)
            self._kept[tp.topic].add(tp.partition)

    def _give(self, topic: str, partition: int, index: int) -> None:
        self._held[index].setdefault(topic, set()).add(partition)
        self._load[index] += 1

    def deal(self) -> None:
        """Give each partition that is not assigned yet to its least loaded reader.

        Topics with few readers come first.
        """
        turns_of: dict[int, list[tuple[int, int]]] = {}
        for topic, readers in sorted(self._readers.items(), key=lambda item: (len(item[1]), item[0])):
            kept = self._kept[topic]
            if len(kept) == self._counts[topic] or not readers:
                continue
            turns = turns_of.get(id(readers))
            if turns is None:
                turns = turns_of[id(readers)] = [(self._load[index], index) for index in readers]
                heapq.heapify(turns)
            for partition in range(self._counts[topic]):
                if partition not in kept:
                    self._give(topic, partition, self._least(turns))

    def _least(self, turns: list[tuple[int, int]]) -> int:
        """Return the least loaded member of a heap of (load, member).

        Loads in the heap may be too low, because members got partitions after their entries were added. Such
        entries are updated.
        """
        while True:
            load, index = turns[0]
            if load == self._load[index]:
                return index
            heapq.heapreplace(turns, (self._load[index], index))

    def level(self) -> None:
        """Move partitions away from the most loaded members until no move can balance the loads further.

        Partitions may also move along a chain of members: each hands one partition to the next. A chain helps
        only if the load of its last member is at least two below the giver's. If a giver reaches no such
        member, the giver and all members that it reaches are done. Later chains need not lead through members
        that are done: such a chain would also end at one of these members, and none has a load that is low
        enough.
        """
        self._topics = [sorted(held) for held in self._held]
        self._common = [{} for _ in self._members]
        self._takers = [[] for _ in self._subscriptions]
        for entry in sorted(zip(self._load, range(len(self._load)), strict=True)):
            self._takers[self._kinds[entry[1]]].append(entry)
        self._queued = {kind: takers[0] for kind, takers in enumerate(self._takers)}
        self._order = sorted(self._queued.values())
        givers = [(-load, index) for index, load in enumerate(self._load)]
        heapq.heapify(givers)
        done: set[int] = set()
        while givers and self._steps_left > 0:
            load, giver = -givers[0][0], givers[0][1]
            if giver in done or load != self._load[giver]:
                heapq.heappop(givers)
                continue
            chain, reached = self._chain(giver, done)
            if not chain:
                done |= reached
                continue
            for source, topic, target in reversed(chain):
                self._hand_over(source, topic, target)
            for index in (giver, chain[-1][2]):
                heapq.heappush(givers, (-self._load[index], index))
                heapq.heappush(self._takers[self._kinds[index]], (self._load[index], index))
                self._queue(self._kinds[index], done)

    def _chain(self, giver: int, done: set[int]) -> tuple[list[tuple[int, str, int]], set[int]]:
        """Return the shortest chain of moves that balances the giver's load, and the members that were
        reached.

        A move is (from, topic, to). The last member of the chain has a load two or more below the giver's. If
        there is no such member, the chain is empty.
        """
        direct = self._direct(giver, done)
        if direct is not None:
            return [direct], set()
        came: dict[int, tuple[int, str]] = {}
        topics_seen: set[str] = set()
        reached, ring = {giver}, [giver]
        while ring:
            following: list[int] = []
            for source in ring:
                for topic in self._topics[source]:
                    # Stop once all members are reached: the first topic often reaches most of them, and then
                    # further topics need not be examined.
                    if len(reached) + len(done) >= len(self._members) or self._steps_left <= 0:
                        break
                    self._steps_left -= 1
                    if topic in topics_seen:
                        continue
                    topics_seen.add(topic)
                    self._steps_left -= len(self._readers[topic])
                    for target in self._readers[topic]:
                        if target not in reached and target not in done:
                            reached.add(target)
                            came[target] = (source, topic)
                            following.append(target)
            least = min(following, key=lambda index: (self._load[index], index), default=None)
            if least is not None and self._load[least] <= self._load[giver] - 2:
                return self._back(least, came), reached
            ring = following
        return [], reached

    def _direct(self, giver: int, done: set[int]) -> tuple[int, str, int] | None:
        """Return the move from the giver to the least loaded reader of one of its topics.

        Return None if this move would not balance their loads. The search must not examine all members or
        topics: many members may join a small group at once, and each partition may belong to a different
        topic. See test_many_members_join_a_few_in_little_work.
        """
        passed: dict[int, tuple[int, int]] = {}
        move = None
        while move is None and self._order and self._order[0][0] <= self._load[giver] - 2:
            self._steps_left -= 1
            entry = heapq.heappop(self._order)
            kind = self._kinds[entry[1]]
            if kind in passed or self._queued.get(kind) != entry or not self._queue(kind, done):
                continue
            passed[kind] = entry
            topic = self._first_common(giver, kind)
            if topic is not None:
                move = giver, topic, entry[1]
        for entry in passed.values():
            heapq.heappush(self._order, entry)
        return move

    def _queue(self, kind: int, done: set[int]) -> bool:
        """Update the entry of the subscription `kind` in the heap `_order`. The entry is the least loaded
        member with this subscription that is not done.

        Return True if this entry was in `_order` already.
        """
        takers = self._takers[kind]
        while takers and (takers[0][0] != self._load[takers[0][1]] or takers[0][1] in done):
            heapq.heappop(takers)
        if not takers:
            self._queued.pop(kind, None)
            return False
        if self._queued.get(kind) == takers[0]:
            return True
        self._queued[kind] = takers[0]
        heapq.heappush(self._order, takers[0])
        return False

    def _first_common(self, giver: int, kind: int) -> str | None:
        """Return the first topic in the subscription `kind` that the giver has partitions of, or None."""
        heap = self._common[giver].get(kind)
        if heap is None:
            self._steps_left -= len(self._topics[giver])
            subscription = self._subscriptions[kind]
            heap = self._common[giver][kind] = [
                topic for topic in self._topics[giver] if topic in subscription
            ]
        while heap and heap[0] not in self._held[giver]:
            self._steps_left -= 1
            heapq.heappop(heap)
        return heap[0] if heap else None

    @staticmethod
    def _back(target: int, came: Mapping[int, tuple[int, str]]) -> list[tuple[int, str, int]]:
        chain: deque[tuple[int, str, int]] = deque()
        while target in came:
            source, topic = came[target]
            chain.appendleft((source, topic, target))
            target = source
        return list(chain)

    def _hand_over(self, source: int, topic: str, target: int) -> None:
        """Move one partition of the topic from `source` to `target`.

        A partition that the target owned before is preferred, then one that the source did not own before.
        """
        partition = self._cheapest(source, topic, target)
        held = self._held[source][topic]
        held.remove(partition)
        # Remove a topic of which the source has no partition left, because it would slow down every later
        # search.
        if not held:
            del self._held[source][topic]
            self._topics[source].pop(bisect_left(self._topics[source], topic))
        self._load[source] -= 1
        self._give(topic, partition, target)
        if len(self._held[target][topic]) == 1:
            insort(self._topics[target], topic)
            for kind, topics in self._common[target].items():
                if topic in self._subscriptions[kind]:
                    heapq.heappush(topics, topic)
        if TopicPartition(topic, partition) in self._owned[source]:
            self._missed_by(source, topic).add(partition)
        self._missed_by(target, topic).discard(partition)
        if (target, topic) in self._candidates:
            self._push(self._candidates[target, topic], target, topic, partition)
        for reader, heap in self._returnable.get((target, topic), {}).items():
            if partition in self._missed_by(reader, topic):
                heapq.heappush(heap, self._cost(target, topic, partition))

    def _cheapest(self, source: int, topic: str, target: int) -> int:
        """Return the partition of `topic` that `source` hands over to `target`.

        If the target owned some of the partitions before, return one of these. Among several candidates,
        return the one with the lowest `_cost`.

        The search must not examine all partitions of the source: a second member may take over thousands of
        them. See test_a_second_member_takes_over_many_partitions_in_little_work.
        """
        held, missed = self._held[source][topic], self._missed_by(target, topic)
        by_target = self._returnable.setdefault((source, topic), {})
        returnable = by_target.get(target)
        if returnable is None:
            returnable = by_target[target] = [
                self._cost(source, topic, partition) for partition in missed & held
            ]
            heapq.heapify(returnable)
        while returnable:
            partition = -returnable[0][1]
            if partition in held and partition in missed:
                return partition
            heapq.heappop(returnable)
        heaps = self._candidates.get((source, topic))
        if heaps is None:
            heaps = self._candidates[source, topic] = [], []
            for partition in held:
                self._push(heaps, source, topic, partition)
        for heap in heaps:
            while heap and -heap[0] not in held:
                heapq.heappop(heap)
            if heap:
                return -heap[0]
        raise AssertionError(f"{topic} is not held")

    def _cost(self, source: int, topic: str, partition: int) -> tuple[bool, int]:
        """Return the sort key of a partition. `source` hands over the partition with the smallest key."""
        return TopicPartition(topic, partition) in self._owned[source], -partition

    def _push(self, heaps: tuple[list[int], list[int]], index: int, topic: str, partition: int) -> None:
        is_owned = TopicPartition(topic, partition) in self._owned[index]
        heapq.heappush(heaps[is_owned], -partition)

    def _missed_by(self, index: int, topic: str) -> set[int]:
        if index not in self._missed:
            by_topic: dict[str, set[int]] = {}
            self._missed[index] = by_topic
            for tp in self._owned[index]:
                if tp.partition not in self._held[index].get(tp.topic, ()):
                    by_topic.setdefault(tp.topic, set()).add(tp.partition)
        return self._missed[index].setdefault(topic, set())


ASSIGNORS: dict[str, Callable[[Sequence[Subscriber], Mapping[str, int]], GroupAssignment]] = {
    "range": assign_range,
    "roundrobin": assign_round_robin,
    STICKY: assign_sticky,
    COOPERATIVE: assign_cooperative,
}
"""Assignors by their names in the protocol."""


def is_cooperative(assignors: Iterable[str]) -> bool:
    """Return True if members with these assignors keep their partitions during a rebalance: only if
    cooperative-sticky is the only one.
    """
    return set(assignors) == {COOPERATIVE}
