"""Tests of a group's subscriptions against a naive list with one subscription per member."""

from __future__ import annotations

from random import Random

from oncelog.rules.groups.consumer import OrderedNames, Subscription, Subscriptions, in_order

CHOICES = [
    Subscription(frozenset(topics), regex)
    for topics in ((), ("a",), ("a", "b"), ("b", "c"))
    for regex in (None, "a.*", "b.*")
]


def test_random_changes_are_counted_as_a_list_of_all_would_count_them() -> None:
    rng = Random(7)
    told, members, drafts = (
        Subscriptions(),
        list[Subscription](),
        list[tuple[Subscriptions, frozenset[str]]](),
    )
    for _ in range(2_000):
        if members and rng.random() < 0.5:
            gone = members.pop(rng.randrange(len(members)))
            told.remove(gone)
        else:
            members.append(rng.choice(CHOICES))
            told.add(members[-1])
        if rng.random() < 0.1:
            drafts = [*drafts[-3:], (told, told.names)]
            told = told.copy()
        # Reading the union computes it. So read it only sometimes, to test changes before that too.
        if rng.random() < 0.5:
            assert told.names == frozenset().union(*(member.topics for member in members))
            assert told.regexes == {member.regex for member in members if member.regex}
        assert told.size_bytes == sum(member.size_bytes for member in set(members))
        for earlier, names in drafts:
            assert earlier.names == names
        one = rng.choice(CHOICES)
        more = 0 if one in members else one.size_bytes
        assert told.size_with(one) == told.size_bytes + more


def test_equal_subscriptions_are_kept_once() -> None:
    told = Subscriptions()
    first, second = (Subscription(frozenset(["a", "b"]), None) for _ in range(2))
    told.add(first)
    assert told.shared(second) is first
    told.add(second)
    told.remove(first)
    assert told.shared(second) is first
    told.remove(second)
    assert told.shared(second) is second


def test_ordered_names_are_a_set_that_keeps_its_order_and_size() -> None:
    plain, ordered = frozenset(["b", "aa", "c"]), OrderedNames(["aa", "b", "c"])
    assert ordered == plain
    assert hash(ordered) == hash(plain)
    assert in_order(ordered) is ordered.in_order
    assert list(in_order(plain)) == list(in_order(ordered))
    assert Subscription(plain, "x").size_bytes == Subscription(ordered, "x").size_bytes
