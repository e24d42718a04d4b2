"""Who of a group reads which partition: decided by the member that leads, the same way by every client.

Members count in the order of their instance name, or member id without one; topics by name.
Source: Kafka's RangeAssignor, RoundRobinAssignor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

from oncelog.types import TopicPartition


class Subscriber(NamedTuple):
    """A member and the topics it wants."""

    member_id: str
    group_instance_id: str | None
    topics: frozenset[str]
    owned: tuple[TopicPartition, ...] = ()
    """What it reads, or read last; for the assignors that let partitions stay."""
    generation_id: int | None = None
    """In which generation it was given them."""

    @property
    def order(self) -> tuple[int, str]:
        """Static members come first, by instance."""
        if self.group_instance_id is None:
            return 1, self.member_id
        return 0, self.group_instance_id


Shares = dict[str, list[TopicPartition]]
"""Member id -> its partitions."""


def assign_range(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Shares:
    """Per topic: a stretch of partitions each, the first members one more where they do not come out even."""
    shares: Shares = {member.member_id: [] for member in members}
    for topic, count in sorted(partition_counts.items()):
        readers = sorted((member for member in members if topic in member.topics), key=lambda m: m.order)
        if not readers:
            continue
        each, more = divmod(count, len(readers))
        start = 0
        for index, reader in enumerate(readers):
            end = start + each + (index < more)
            shares[reader.member_id] += [TopicPartition(topic, partition) for partition in range(start, end)]
            start = end
    return shares


def assign_round_robin(members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> Shares:
    """All partitions of all topics dealt out in turns, passing over those that do not want the topic."""
    shares: Shares = {member.member_id: [] for member in members}
    turns = cycle(sorted(members, key=lambda member: member.order))
    for topic, count in sorted(partition_counts.items()):
        if not any(topic in member.topics for member in members):
            continue
        for partition in range(count):
            reader = next(member for member in turns if topic in member.topics)
            shares[reader.member_id].append(TopicPartition(topic, partition))
    return shares
