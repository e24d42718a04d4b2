"""Assignors that let partitions stay where they are: sticky and cooperative-sticky.

Law: every partition of a topic somebody wants has one reader; no chain of hand-overs could even out the
members' loads further; within that, few partitions move, and as few as possible where all members want the
same topics. Where members subscribe to different ones of thousands of topics, `LEVELLING_STEPS` may end the
search for hand-overs; then loads differ by more.
The answer depends on the members and counts alone, not on the order they are named in.
Source: Kafka's AbstractStickyAssignor, CooperativeStickyAssignor; KIP-54, KIP-341, KIP-429.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from oncelog.rules.groups.assignors import Shares, Subscriber, assign_range, assign_round_robin
from oncelog.types import TopicPartition

COOPERATIVE = "cooperative-sticky"
STICKY = "sticky"
LEVELLING_STEPS = 500_000
"""Topics and members that are looked at for hand-overs, at most; half a second. See STEPS_PER_PARTITION."""
STEPS_PER_PARTITION = 20
"""How many more for each partition: each may have to move, and mostly costs one."""


def assign_sticky(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Shares:
    """As balanced as can be; then as many partitions as possible stay with their owners."""
    loads = _Loads(members, partition_counts)
    for at, owner in sorted(_owners(members).items()):
        loads.keep(at, owner)
    loads.deal()
    loads.level()
    return loads.shares()


def assign_cooperative(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Shares:
    """The same, less what another member must give up first; the rebalance after that assigns it."""
    readers: dict[TopicPartition, set[str]] = {}
    for member in members:
        for at in member.owned:
            readers.setdefault(at, set()).add(member.member_id)
    return {
        member_id: [at for at in share if readers.get(at, set()) <= {member_id}]
        for member_id, share in assign_sticky(members, partition_counts).items()
    }


def _owners(members: Iterable[Subscriber]) -> dict[TopicPartition, str]:
    """Who may keep what: the claim of the latest generation counts; two of the same are both void."""
    claims: dict[TopicPartition, dict[int, list[str]]] = {}
    for member in members:
        generation_id = -1 if member.generation_id is None else member.generation_id
        for at in set(member.owned):
            claims.setdefault(at, {}).setdefault(generation_id, []).append(member.member_id)
    latest = {at: by_generation[max(by_generation)] for at, by_generation in claims.items()}
    return {at: claimants[0] for at, claimants in latest.items() if len(claimants) == 1}


def _readers(
    kinds: Sequence[int], subscriptions: Sequence[frozenset[str]], topics: Collection[str]
) -> dict[str, list[int]]:
    """Return who reads each topic; the same list for topics of the same readers.

    `kinds`: the place of each member's subscription in `subscriptions`. Most members of a group subscribe to
    the same topics, so do not look at each topic of each member.
    See test_members_of_one_subscription_are_looked_at_together.
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
    """Who reads what so far. Members are named by their place in order."""

    def __init__(self, members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> None:
        self._members = sorted(members, key=lambda member: member.order)
        self._index = {member.member_id: index for index, member in enumerate(self._members)}
        self._owned = [frozenset(member.owned) for member in self._members]
        self._counts = dict(partition_counts)
        self._held: list[dict[str, set[int]]] = [{} for _ in self._members]
        self._load = [0] * len(self._members)
        kinds: dict[frozenset[str], int] = {}
        self._kinds = [kinds.setdefault(member.topics, len(kinds)) for member in self._members]
        self._subscriptions = list(kinds)
        """The different subscriptions. `_kinds` has each member's place in it."""
        self._readers = _readers(self._kinds, self._subscriptions, partition_counts)
        self._kept: dict[str, set[int]] = {topic: set() for topic in partition_counts}
        self._topics: list[list[str]] = []
        """The topics of `_held`, sorted, while loads are levelled."""
        self._takers: list[list[tuple[int, int]]] = []
        """Heaps of (load, member), one for each subscription; entries of earlier loads are void."""
        self._order: list[tuple[int, int]] = []
        """A heap of the least loaded of each subscription; entries that are not in `_queued` are void."""
        self._queued: dict[int, tuple[int, int]] = {}
        self._common: list[dict[int, list[str]]] = []
        """Member -> subscription -> heap of its topics that the member holds, or held."""
        self._steps_left = LEVELLING_STEPS + STEPS_PER_PARTITION * sum(self._counts.values())
        self._candidates: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        """(member, topic) -> heaps of what it may hand over: what it has not read before, and what it has."""
        self._returnable: dict[tuple[int, str], dict[int, list[tuple[bool, int]]]] = {}
        """(member, topic) -> other member -> heap of what it may give back to that one."""
        self._missed: dict[int, dict[str, set[int]]] = {}
        """Member -> topic -> what it has read before and does not hold."""

    def shares(self) -> Shares:
        """Member -> its partitions, by topic and number."""
        return {
            member.member_id: [
                TopicPartition(topic, partition)
                for topic, partitions in sorted(held.items())
                for partition in sorted(partitions)
            ]
            for member, held in zip(self._members, self._held, strict=True)
        }

    def keep(self, at: TopicPartition, owner: str) -> None:
        """It stays, if there still is such a partition and its owner still wants it."""
        index = self._index[owner]
        if at.topic in self._members[index].topics and 0 <= at.partition < self._counts.get(at.topic, 0):
            self._give(at.topic, at.partition, index)
            self._kept[at.topic].add(at.partition)

    def _give(self, topic: str, partition: int, index: int) -> None:
        self._held[index].setdefault(topic, set()).add(partition)
        self._load[index] += 1

    def deal(self) -> None:
        """What nobody keeps goes to whoever reads least; topics with few readers first."""
        turns_of: dict[int, list[tuple[int, int]]] = {}
        for topic, readers in sorted(self._readers.items(), key=lambda each: (len(each[1]), each[0])):
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
        """Return who reads least in a heap of (load, member), whose loads may have risen since."""
        while True:
            load, index = turns[0]
            if load == self._load[index]:
                return index
            heapq.heapreplace(turns, (self._load[index], index))

    def level(self) -> None:
        """Hand over from those who read most, also along a chain, while that evens out the loads.

        Members that nobody reachable from them has two fewer than are done: no later hand-over leads
        through them, since it would have to end among them.
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
        """The shortest hand-overs (from, topic, to) that end with the least loaded, two below the giver."""
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
                    # Everybody is reached mostly by the first topic, however many there are.
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
        """Return the hand-over to the least loaded that reads one of the giver's topics, if it evens out.

        Do not look at all members or topics: many may come to a few at once, and each partition may be a
        topic. See test_many_members_come_to_a_few_in_little_work.
        """
        passed: dict[int, tuple[int, int]] = {}
        found = None
        while found is None and self._order and self._order[0][0] <= self._load[giver] - 2:
            self._steps_left -= 1
            entry = heapq.heappop(self._order)
            kind = self._kinds[entry[1]]
            if kind in passed or self._queued.get(kind) != entry or not self._queue(kind, done):
                continue
            passed[kind] = entry
            topic = self._first_common(giver, kind)
            if topic is not None:
                found = giver, topic, entry[1]
        for entry in passed.values():
            heapq.heappush(self._order, entry)
        return found

    def _queue(self, kind: int, done: set[int]) -> bool:
        """Have the member that reads least of those of one subscription in `_order`, once.

        Members that are done do not count. Return True if it is the one that was there.
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
        """Return the first topic that the giver holds, and that is in the subscription."""
        heap = self._common[giver].get(kind)
        if heap is None:
            self._steps_left -= len(self._topics[giver])
            wanted = self._subscriptions[kind]
            heap = self._common[giver][kind] = [topic for topic in self._topics[giver] if topic in wanted]
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
        """Rather what the target has read before, or what the source has not."""
        partition = self._cheapest(source, topic, target)
        held = self._held[source][topic]
        held.remove(partition)
        if not held:  # else each later look for a topic of the source would pass over this one
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
        """Return the partition of a topic that `source` hands over to `target`.

        Do not look at all that it holds: a second member of a group takes over thousands.
        See test_a_second_member_takes_over_many_partitions_in_little_work.
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
        """Return the order in which `source` hands its partitions over."""
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


ASSIGNORS: dict[str, Callable[[Sequence[Subscriber], Mapping[str, int]], Shares]] = {
    "range": assign_range,
    "roundrobin": assign_round_robin,
    STICKY: assign_sticky,
    COOPERATIVE: assign_cooperative,
}
"""All of them by their names in the protocol."""


def is_cooperative(assignors: Iterable[str]) -> bool:
    """Whether members that offer these keep their partitions during a rebalance: all must know how."""
    return set(assignors) == {COOPERATIVE}
