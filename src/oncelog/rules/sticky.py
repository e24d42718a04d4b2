"""Assignors that let partitions stay where they are: sticky and cooperative-sticky.

Law: every partition of a topic somebody wants has one reader; no chain of hand-overs could even out the
members' loads further; within that, few partitions move, and as few as possible where all members want the
same topics. The answer depends on the members and counts alone, not on the order they are named in.
Source: Kafka's AbstractStickyAssignor, CooperativeStickyAssignor; KIP-54, KIP-341, KIP-429.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from oncelog.rules.assignors import Shares, Subscriber, assign_range, assign_round_robin
from oncelog.types import TopicPartition

COOPERATIVE = "cooperative-sticky"
STICKY = "sticky"


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


class _Loads:
    """Who reads what so far. Members are named by their place in order."""

    def __init__(self, members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> None:
        self._members = sorted(members, key=lambda member: member.order)
        self._index = {member.member_id: index for index, member in enumerate(self._members)}
        self._owned = [frozenset(member.owned) for member in self._members]
        self._counts = dict(partition_counts)
        self._held: list[dict[str, set[int]]] = [{} for _ in self._members]
        self._load = [0] * len(self._members)
        self._readers: dict[str, list[int]] = {topic: [] for topic in partition_counts}
        for index, member in enumerate(self._members):
            for topic in member.topics & partition_counts.keys():
                self._readers[topic].append(index)
        self._kept: dict[str, set[int]] = {topic: set() for topic in partition_counts}
        self._topics: list[list[str]] = [[] for _ in self._members]
        """The topics of `_held`, sorted."""
        self._candidates: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        """(member, topic) -> heaps of what it may hand over: what it has not read before, and what it has."""
        self._returnable: dict[tuple[int, str], dict[int, list[tuple[bool, int]]]] = {}
        """(member, topic) -> other member -> heap of what it may give back to that one."""
        self._missed: dict[int, dict[str, set[int]]] = {}
        """Member -> topic -> what it has read before and does not hold."""
        self._takers: list[list[tuple[int, int]]] = []
        """Heaps of (load, member), one for topics of the same readers; entries of earlier loads are void."""
        self._heap_of: dict[str, int] = {}
        """Topic -> the place of its readers' heap in `_takers`."""
        self._heaps_with: list[list[int]] = [[] for _ in self._members]
        """Member -> the places of the heaps that it is in."""

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
        for topic, readers in sorted(self._readers.items(), key=lambda each: (len(each[1]), each[0])):
            kept = self._kept[topic]
            if len(kept) == self._counts[topic]:
                continue
            turns = [(self._load[index], index) for index in readers]
            heapq.heapify(turns)
            for partition in range(self._counts[topic]) if turns else ():
                if partition not in kept:
                    load, index = turns[0]
                    self._give(topic, partition, index)
                    heapq.heapreplace(turns, (load + 1, index))

    def level(self) -> None:
        """Hand over from those who read most, also along a chain, while that evens out the loads.

        Members that nobody reachable from them has two fewer than are done: no later hand-over leads
        through them, since it would have to end among them.
        """
        givers = [(-load, index) for index, load in enumerate(self._load)]
        heapq.heapify(givers)
        self._note_takers()
        done: set[int] = set()
        while givers:
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
                for place in self._heaps_with[index]:
                    heapq.heappush(self._takers[place], (self._load[index], index))

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
                for topic in self._topics_of(source):
                    # Everybody is reached mostly by the first topic, however many there are.
                    if len(reached) + len(done) >= len(self._members):
                        break
                    if topic in topics_seen or not self._held[source][topic]:
                        continue
                    topics_seen.add(topic)
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

    def _note_takers(self) -> None:
        places: dict[tuple[int, ...], int] = {}
        for topic, readers in self._readers.items():
            place = self._heap_of[topic] = places.setdefault(tuple(readers), len(places))
            if place == len(self._takers):
                self._takers.append([(self._load[index], index) for index in readers])
                heapq.heapify(self._takers[place])
                for index in readers:
                    self._heaps_with[index].append(place)

    def _direct(self, giver: int, done: set[int]) -> tuple[int, str, int] | None:
        """Return the hand-over to the least loaded that reads one of the giver's topics, if it evens out.

        Do not look at all members: many may come to a few at once.
        See test_many_members_come_to_a_few_in_little_work.
        """
        best: tuple[int, int, str] | None = None
        seen: set[int] = set()
        for topic in self._topics_of(giver):
            place = self._heap_of[topic]
            if place in seen or not self._held[giver][topic]:
                continue
            seen.add(place)
            takers = self._takers[place]
            while takers and (takers[0][0] != self._load[takers[0][1]] or takers[0][1] in done):
                heapq.heappop(takers)
            if takers and (best is None or takers[0] < best[:2]):
                best = (*takers[0], topic)
            if len(self._readers[topic]) == len(self._members):
                break
        if best is None or best[0] > self._load[giver] - 2:
            return None
        return giver, best[2], best[1]

    @staticmethod
    def _back(target: int, came: Mapping[int, tuple[int, str]]) -> list[tuple[int, str, int]]:
        chain: deque[tuple[int, str, int]] = deque()
        while target in came:
            source, topic = came[target]
            chain.appendleft((source, topic, target))
            target = source
        return list(chain)

    def _topics_of(self, index: int) -> list[str]:
        held = self._held[index]
        if len(self._topics[index]) != len(held):  # no topic is ever taken out
            self._topics[index] = sorted(held)
        return self._topics[index]

    def _hand_over(self, source: int, topic: str, target: int) -> None:
        """Rather what the target has read before, or what the source has not."""
        partition = self._cheapest(source, topic, target)
        self._held[source][topic].remove(partition)
        self._load[source] -= 1
        self._give(topic, partition, target)
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
