"""Assignors: a table whose answers Kafka 4.3's own assignors gave too, and what must hold always."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.rules.assignors import ASSIGNORS, Subscriber, assign_range, assign_round_robin
from oncelog.types import TopicPartition

AB = frozenset({"a", "b"})
A = frozenset({"a"})

Case = tuple[
    str, dict[str, int], list[tuple[str, frozenset[str], str | None]], dict[str, str], dict[str, str]
]

CASES: list[Case] = [
    # name, counts, members, range, roundrobin; a partition as "a0"
    ("nobody", {"a": 3}, [], {}, {}),
    ("one", {"a": 2}, [("m", A, None)], {"m": "a0 a1"}, {"m": "a0 a1"}),
    ("no such topic", {}, [("m", A, None)], {"m": ""}, {"m": ""}),
    ("no partitions", {"a": 0}, [("m", A, None)], {"m": ""}, {"m": ""}),
    (
        "two topics, odd counts",
        {"a": 3, "b": 3},
        [("n", AB, None), ("m", AB, None)],
        {"m": "a0 a1 b0 b1", "n": "a2 b2"},
        {"m": "a0 a2 b1", "n": "a1 b0 b2"},
    ),
    (
        "unequal subscriptions",
        {"a": 2, "b": 2},
        [("m", A, None), ("n", AB, None)],
        {"m": "a0", "n": "a1 b0 b1"},
        {"m": "a0", "n": "a1 b0 b1"},
    ),
    (
        "more members than partitions",
        {"a": 1},
        [("m", A, None), ("n", A, None)],
        {"m": "a0", "n": ""},
        {"m": "a0", "n": ""},
    ),
    (
        "static members come first, by instance",
        {"a": 3},
        [("a", A, None), ("y", A, "1"), ("z", A, "0")],
        {"z": "a0", "y": "a1", "a": "a2"},
        {"z": "a0", "y": "a1", "a": "a2"},
    ),
]


def _partitions(text: str) -> list[TopicPartition]:
    return [TopicPartition(each[0], int(each[1:])) for each in text.split()]


@pytest.mark.parametrize(
    ("counts", "wants", "by_range", "by_turns"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_table(
    counts: dict[str, int],
    wants: list[tuple[str, frozenset[str], str | None]],
    by_range: dict[str, str],
    by_turns: dict[str, str],
) -> None:
    members = [Subscriber(name, instance, topics) for name, topics, instance in wants]
    assert assign_range(members, counts) == {who: _partitions(text) for who, text in by_range.items()}
    assert assign_round_robin(members, counts) == {who: _partitions(text) for who, text in by_turns.items()}


TOPICS = st.sampled_from(["a", "b", "c"])
COUNTS = st.dictionaries(TOPICS, st.integers(0, 6))
MEMBERS = st.lists(
    st.builds(
        Subscriber,
        st.text("mnop", min_size=1, max_size=3),
        st.none(),
        st.frozensets(TOPICS),
    ),
    unique_by=lambda each: each.member_id,
    max_size=5,
)


@pytest.mark.parametrize("name", sorted(ASSIGNORS))
@given(counts=COUNTS, members=MEMBERS)
def test_each_wanted_partition_has_one_reader_who_wants_it(
    name: str, counts: dict[str, int], members: list[Subscriber]
) -> None:
    assignments = ASSIGNORS[name](members, counts)
    assert assignments == ASSIGNORS[name](members[::-1], counts)
    wanted = {each.member_id: each.topics for each in members}
    assert all(tp.topic in wanted[who] for who, tps in assignments.items() for tp in tps)
    topics = {topic for each in members for topic in each.topics}
    expected = [TopicPartition(t, p) for t, count in counts.items() if t in topics for p in range(count)]
    assert sorted(tp for tps in assignments.values() for tp in tps) == sorted(expected)
