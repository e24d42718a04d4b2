"""Tests of the sticky assignors: by a table, and by properties that compare them with naive implementations
of the rules.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.rules.groups import assignors
from oncelog.rules.groups.assignors import (
    GroupAssignment,
    Subscriber,
    assign_cooperative,
    assign_sticky,
    is_cooperative,
)
from oncelog.types import TopicPartition

Counts = dict[str, int]


def at(name: str) -> TopicPartition:
    return TopicPartition(name[0], int(name[1:]))


def member(name: str, topics: str, owned: str = "", generation: int | None = None) -> Subscriber:
    return Subscriber(
        name, None, frozenset(topics.split()), tuple(at(each) for each in owned.split()), generation
    )


def told(shares: GroupAssignment) -> dict[str, str]:
    return {name: " ".join(f"{tp.topic}{tp.partition}" for tp in share) for name, share in shares.items()}


CASES = [
    ("new", [member("a", "t"), member("b", "t")], {"t": 3}, {"a": "t0 t2", "b": "t1"}),
    (
        "all stay",
        [member("a", "t", "t2 t1", 1), member("b", "t", "t0 t3", 1)],
        {"t": 4},
        {"a": "t1 t2", "b": "t0 t3"},
    ),
    (
        "one joins and gets from each",
        [member("a", "t", "t0 t1 t2", 1), member("b", "t", "t3 t4 t5", 1), member("c", "t")],
        {"t": 6},
        {"a": "t0 t1", "b": "t3 t4", "c": "t2 t5"},
    ),
    (
        "one left, the rest keep theirs",
        [member("a", "t", "t0 t1", 1), member("c", "t", "t4 t5", 1)],
        {"t": 6},
        {"a": "t0 t1 t2", "c": "t3 t4 t5"},
    ),
    (
        "new partitions go where there are fewest",
        [member("a", "t", "t0 t1", 1), member("b", "t", "t2", 1)],
        {"t": 4},
        {"a": "t0 t1", "b": "t2 t3"},
    ),
    (
        "a topic nobody wants any more",
        [member("a", "t", "t0 u0", 1), member("b", "t", "t1 u1", 1)],
        {"t": 2, "u": 2},
        {"a": "t0", "b": "t1"},
    ),
    ("a partition that is gone", [member("a", "t", "t0 t7", 1)], {"t": 1}, {"a": "t0"}),
    (
        "the later generation keeps it",
        [member("a", "t", "t0 t1", 3), member("b", "t", "t0 t1", 4), member("c", "t", "t2 t3", 4)],
        {"t": 4},
        {"a": "t1", "b": "t0", "c": "t2 t3"},
    ),
    (
        "claimed twice in a generation: nobody's",
        [member("a", "t", "t0 t1", 4), member("b", "t", "t1 t2", 4)],
        {"t": 4},
        {"a": "t0 t1", "b": "t2 t3"},
    ),
    (
        "claimed twice, and named in another order",
        [member("b", "t", "t1 t2", 4), member("a", "t", "t0 t1", 4)],
        {"t": 4},
        {"a": "t0 t1", "b": "t2 t3"},
    ),
    (
        "a claim without a generation is the oldest",
        [member("a", "t", "t0 t1"), member("b", "t", "t0 t1", 0)],
        {"t": 4},
        {"a": "t2 t3", "b": "t0 t1"},
    ),
    ("a topic that is gone", [member("a", "t u", "t0 u0", 1)], {"t": 1}, {"a": "t0"}),
    (
        "along a chain: c can only be helped by b, b by a",
        [member("a", "t", "t0 t1 t2", 1), member("b", "t u", "u0 u1", 1), member("c", "u v", "v0", 1)],
        {"t": 3, "u": 2, "v": 1},
        {"a": "t0 t1", "b": "t2 u0", "c": "u1 v0"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("members", "counts", "expected"), [case[1:] for case in CASES], ids=lambda _: "")
def test_the_sticky_assignor_follows_the_table(
    members: list[Subscriber], counts: Counts, expected: dict[str, str]
) -> None:
    assert told(assign_sticky(members, counts)) == expected


def test_cooperative_withholds_what_must_be_given_up_first() -> None:
    counts = {"t": 4}
    first = [member("a", "t", "t0 t1 t2 t3", 1), member("b", "t")]
    assert told(assign_cooperative(first, counts)) == {"a": "t0 t1", "b": ""}
    second = [member("a", "t", "t0 t1", 2), member("b", "t", "", 2)]
    assert told(assign_cooperative(second, counts)) == {"a": "t0 t1", "b": "t2 t3"}


def test_cooperation_needs_all_assignors() -> None:
    assert is_cooperative(["cooperative-sticky"])
    assert not is_cooperative(["cooperative-sticky", "range"])
    assert not is_cooperative(["sticky"])


TOPICS = "tuvw"


@st.composite
def groups(draw: st.DrawFn, *, is_uniform: bool = False) -> tuple[list[Subscriber], Counts]:
    """Draw members with all kinds of claims: duplicate, stale, and of deleted topics and partitions."""
    counts = {topic: draw(st.integers(0, 6)) for topic in TOPICS}
    size = draw(st.integers(1, 5))
    every = [TopicPartition(topic, index) for topic in TOPICS for index in range(8)]
    all_topics = draw(st.frozensets(st.sampled_from(TOPICS), min_size=1))
    claims = [draw(st.integers(0, size)) for _ in every]
    members = []
    for index in range(size):
        topics = all_topics if is_uniform else draw(st.frozensets(st.sampled_from(TOPICS)))
        owned = tuple(tp for tp, owner in zip(every, claims, strict=True) if owner == index)
        stolen = () if is_uniform else tuple(draw(st.lists(st.sampled_from(every), max_size=3)))
        generation = draw(st.sampled_from([None, 1, 2]))
        members.append(Subscriber(f"m{index}", None, topics, owned + stolen, generation))
    return members, counts


@given(groups())
def test_every_partition_has_one_reader_that_wants_it(group: tuple[list[Subscriber], Counts]) -> None:
    members, counts = group
    shares = assign_sticky(members, counts)
    wanted = set().union(*(each.topics for each in members))
    every = sorted(tp for share in shares.values() for tp in share)
    assert every == sorted(TopicPartition(t, p) for t in counts if t in wanted for p in range(counts[t]))
    for member in members:
        assert {tp.topic for tp in shares[member.member_id]} <= member.topics


@given(groups())
def test_no_single_hand_over_would_even_out_the_loads(group: tuple[list[Subscriber], Counts]) -> None:
    members, counts = group
    shares = assign_sticky(members, counts)
    for giver in members:
        for taker in members:
            could = any(tp.topic in taker.topics for tp in shares[giver.member_id])
            assert not could or len(shares[giver.member_id]) <= len(shares[taker.member_id]) + 1


def best_squares(members: list[Subscriber], counts: Counts) -> int:
    """Return the smallest possible sum of squared loads, by trying all assignments."""
    loads = {(0,) * len(members)}
    for topic, count in counts.items():
        readers = [index for index, each in enumerate(members) if topic in each.topics]
        for _ in range(count if readers else 0):
            loads = {
                tuple(load + (place == index) for place, load in enumerate(each))
                for each in loads
                for index in readers
            }
    return min(sum(load * load for load in each) for each in loads)


@given(groups())
def test_no_other_assignment_is_more_balanced(group: tuple[list[Subscriber], Counts]) -> None:
    members, counts = group
    loads = [len(share) for share in assign_sticky(members, counts).values()]
    assert sum(load * load for load in loads) == best_squares(members, counts)


@given(groups(is_uniform=True))
def test_as_many_stay_as_balance_allows(group: tuple[list[Subscriber], Counts]) -> None:
    members, counts = group
    shares = assign_sticky(members, counts)
    owned = [
        {tp for tp in member.owned if tp.topic in member.topics and tp.partition < counts[tp.topic]}
        for member in members
    ]
    each_at_least, more = divmod(sum(counts[topic] for topic in members[0].topics), len(members))
    could_stay = sum(min(len(mine), each_at_least) for mine in owned)
    could_stay += min(more, sum(len(mine) > each_at_least for mine in owned))
    stayed = sum(len(mine & set(shares[each.member_id])) for each, mine in zip(members, owned, strict=True))
    assert stayed == could_stay


@given(groups(), st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(
    group: tuple[list[Subscriber], Counts], chance: random.Random
) -> None:
    members, counts = group
    shuffled = chance.sample(members, len(members))
    topics = chance.sample(sorted(counts), len(counts))
    assert assign_sticky(shuffled, {topic: counts[topic] for topic in topics}) == assign_sticky(
        members, counts
    )


@given(groups())
def test_nothing_moves_when_nothing_changes(group: tuple[list[Subscriber], Counts]) -> None:
    members, counts = group
    shares = assign_sticky(members, counts)
    again = [member._replace(owned=tuple(shares[member.member_id]), generation_id=7) for member in members]
    assert assign_sticky(again, counts) == shares


@given(groups())
def test_cooperation_ends_after_few_rebalances(group: tuple[list[Subscriber], Counts]) -> None:
    """No member gets a partition that another one still reads, and in the end all are assigned.

    Two rebalances are enough if all members subscribe to the same topics. Otherwise a partition may move
    unnecessarily and come back.
    """
    members, counts = group
    rounds: list[GroupAssignment] = []
    while len(rounds) < 2 or rounds[-2] != rounds[-1]:
        assert len(rounds) < 8, rounds
        shares = assign_cooperative(members, counts)
        for member in members:
            others = {tp for other in members if other is not member for tp in other.owned}
            assert not others & set(shares[member.member_id])
        generation = 8 + len(rounds)
        members = [
            each._replace(owned=tuple(shares[each.member_id]), generation_id=generation) for each in members
        ]
        rounds.append(shares)
    assert rounds[-1] == assign_sticky(members, counts)
    if len({each.topics for each in members}) == 1:
        assert len(rounds) <= 3
        assert all(set(few[name]) <= set(many[name]) for few, many in pairwise(rounds) for name in few)


@pytest.mark.parametrize("topic_count", [1, 100])
@pytest.mark.parametrize("is_returning", [False, True])
def test_a_second_member_takes_over_many_partitions_in_little_work(
    topic_count: int, is_returning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker computes this assignment within one heartbeat, and serves no other client meanwhile.

    A member that returns after its session has ended claims its old partitions, as in Java's StickyAssignor.
    """
    looked = 0

    class Looked(TopicPartition):
        def __new__(cls, topic: str, partition: int) -> Looked:
            nonlocal looked
            looked += 1
            return super().__new__(cls, topic, partition)

    monkeypatch.setattr(assignors, "TopicPartition", Looked)
    partition_count = 2_000
    counts = {f"t{index}": partition_count // topic_count for index in range(topic_count)}
    owned = tuple(TopicPartition(topic, index) for topic, count in counts.items() for index in range(count))
    members = [
        Subscriber("a", None, frozenset(counts), owned, 1),
        Subscriber("b", None, frozenset(counts), owned[1::2] if is_returning else (), 0),
    ]
    shares = assign_sticky(members, counts)
    if is_returning and topic_count == 1:
        assert set(shares["b"]) == set(owned[1::2])
    assert [len(share) for share in shares.values()] == [partition_count // 2] * 2
    assert looked < 10 * partition_count


@pytest.mark.parametrize("are_alike", [True, False])
def test_many_members_join_a_few_in_little_work(are_alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each move examined all members, so 1,000 joins took 1.7 s with 10,000 partitions."""
    looked = 0

    class Loads(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(index)

    class Counted(assignors._Loads):
        def __init__(self, members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> None:
            super().__init__(members, partition_counts)
            self._load = Loads(self._load)

    monkeypatch.setattr(assignors, "_Loads", Counted)
    partition_count, member_count = 2_000, 200
    counts = {"t": partition_count, "u": partition_count}
    owned = tuple(TopicPartition(topic, index) for topic in counts for index in range(partition_count))
    members = [
        Subscriber("a", None, frozenset(counts), owned[::2]),
        Subscriber("b", None, frozenset(counts), owned[1::2]),
    ]
    for number in range(member_count - 2):
        topics = frozenset(counts) if are_alike or number % 2 else frozenset("t")
        members.append(Subscriber(f"m{number:03}", None, topics))
    shares = assign_sticky(members, counts)
    assert {len(share) for share in shares.values()} == {2 * partition_count // member_count}
    # At most fifty look-ups for each partition. The group has four times as many members.
    assert looked < 50 * 2 * partition_count


@pytest.mark.parametrize("are_alike", [True, False], ids=["one subscription", "random subscriptions"])
def test_topics_of_few_partitions_are_handed_over_in_little_work(
    are_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each move of a partition examined all topics, so with 10,000 topics the joins of 15 members
    took minutes.
    """
    looked = 0

    class Counting(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(index)

    class Counted(assignors._Loads):
        def __init__(self, members: Sequence[Subscriber], partition_counts: Mapping[str, int]) -> None:
            super().__init__(members, partition_counts)
            self._load, self._held = Counting(self._load), Counting(self._held)

    monkeypatch.setattr(assignors, "_Loads", Counted)
    rng, topic_count = Random(5), 2_000
    counts = {f"t{number:04}": 1 for number in range(topic_count)}
    members = []
    for number in range(2 if are_alike else 15):
        topics = frozenset(topic for topic in counts if are_alike or not number or rng.random() < 0.5)
        owned = tuple(TopicPartition(topic, 0) for topic in counts) if not number else ()
        members.append(Subscriber(f"m{number:02}", None, topics, owned))
    shares = assign_sticky(members, counts)
    loads = sorted(map(len, shares.values()))
    assert loads[-1] - loads[0] <= 1
    assert looked < 50 * topic_count


def test_members_of_one_subscription_are_looked_at_together() -> None:
    """Regression: with 500 members that subscribe to 5,000 topics, each assignment took 0.7 s."""
    looked = 0

    class Topics(frozenset[str]):
        def __and__(self, other: Any) -> Any:
            nonlocal looked
            looked += 1
            return super().__and__(other)

    topics = Topics("tuv")
    members = [Subscriber(f"m{number}", None, topics) for number in range(50)]
    assert len(assign_sticky(members, {"t": 20, "u": 20, "v": 10})) == 50
    assert looked == 1


def test_many_partitions_have_the_steps_that_one_hand_over_each_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assignors, "LEVELLING_STEPS", 0)
    owned = tuple(TopicPartition("t", index) for index in range(400))
    members = [Subscriber("a", None, frozenset("t"), owned, 1), Subscriber("b", None, frozenset("t"))]
    assert [len(share) for share in assign_sticky(members, {"t": 400}).values()] == [200, 200]


@pytest.mark.parametrize("seed", range(20))
def test_levelling_that_ends_early_leaves_a_whole_assignment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    monkeypatch.setattr(assignors, "LEVELLING_STEPS", rng.randint(0, 60))
    monkeypatch.setattr(assignors, "STEPS_PER_PARTITION", 0)
    counts = {topic: rng.randint(1, 5) for topic in "tuvwxyz"}
    everything = [TopicPartition(topic, index) for topic, count in counts.items() for index in range(count)]
    members = [Subscriber("m0", None, frozenset(counts), tuple(everything))]
    for number in range(1, 6):
        members.append(Subscriber(f"m{number}", None, frozenset(rng.sample("tuvwxyz", 3))))
    shares = assign_sticky(members, counts)
    assert sorted(tp for share in shares.values() for tp in share) == sorted(everything)
    assert all(tp.topic in member.topics for member in members for tp in shares[member.member_id])
