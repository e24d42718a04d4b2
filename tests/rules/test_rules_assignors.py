"""Tests of the range and roundrobin assignors against the results of Java's."""

from __future__ import annotations

from typing import Any

import pytest

from oncelog.rules.groups.assignors import ASSIGNORS, Subscriber
from oncelog.types import TopicPartition


def member(name: str, topics: str, instance: str | None = None) -> Subscriber:
    return Subscriber(name, instance, frozenset(topics.split()))


def shares(assignor: str, members: list[Subscriber], counts: dict[str, int]) -> dict[str, str]:
    """Return each member's partitions as text, such as "t0 t1 u0"."""
    found = ASSIGNORS[assignor](members, counts)
    return {name: " ".join(f"{at.topic}{at.partition}" for at in share) for name, share in found.items()}


A, B, C = member("a", "t"), member("b", "t"), member("c", "t")
CASES = [
    ("range", [A], {"t": 3}, {"a": "t0 t1 t2"}),
    ("range", [A, B], {"t": 3}, {"a": "t0 t1", "b": "t2"}),
    ("range", [B, A], {"t": 4}, {"a": "t0 t1", "b": "t2 t3"}),
    ("range", [A, B, C], {"t": 2}, {"a": "t0", "b": "t1", "c": ""}),
    ("range", [A, B], {}, {"a": "", "b": ""}),
    (
        "range",  # each topic is split separately, so member a gets more of each
        [member("a", "t u"), member("b", "t u")],
        {"t": 3, "u": 3},
        {"a": "t0 t1 u0 u1", "b": "t2 u2"},
    ),
    ("range", [member("a", "t"), member("b", "t u")], {"t": 2, "u": 2}, {"a": "t0", "b": "t1 u0 u1"}),
    ("range", [member("a", "t"), member("z", "t", "i")], {"t": 3}, {"z": "t0 t1", "a": "t2"}),
    ("roundrobin", [A, B], {"t": 3}, {"a": "t0 t2", "b": "t1"}),
    (
        "roundrobin",
        [member("a", "t u"), member("b", "t u")],
        {"t": 3, "u": 3},
        {"a": "t0 t2 u1", "b": "t1 u0 u2"},
    ),
    (
        "roundrobin",  # an example from Java's documentation: only subscribers get a partition
        [member("a", "t"), member("b", "t u"), member("c", "t u v")],
        {"t": 1, "u": 2, "v": 3},
        {"a": "t0", "b": "u0", "c": "u1 v0 v1 v2"},
    ),
    ("roundrobin", [A], {"t": 1, "unread": 5}, {"a": "t0"}),
    ("roundrobin", [A], {"a-unread": 5, "t": 1}, {"a": "t0"}),
    ("range", [A], {"a-unread": 5, "t": 1}, {"a": "t0"}),
]


@pytest.mark.parametrize(("assignor", "members", "counts", "expected"), CASES)
def test_range_and_roundrobin_assign_as_javas_assignors_do(
    assignor: str, members: list[Subscriber], counts: dict[str, int], expected: dict[str, str]
) -> None:
    assert shares(assignor, members, counts) == expected


@pytest.mark.parametrize("assignor", ASSIGNORS)
@pytest.mark.parametrize("count", range(12))
@pytest.mark.parametrize("size", range(1, 6))
def test_every_partition_has_one_reader(assignor: str, count: int, size: int) -> None:
    members = [member(f"m{index}", "t") for index in range(size)]
    found = ASSIGNORS[assignor](members, {"t": count})
    every = sorted(at for share in found.values() for at in share)
    assert every == [TopicPartition("t", index) for index in range(count)]
    sizes = [len(share) for share in found.values()]
    assert max(sizes) - min(sizes) <= 1


def test_a_range_of_topics_with_many_readers_takes_little_work() -> None:
    """R1792: each member was examined for each topic: 0.35 s for 1,000 members and 1,000 topics."""
    looked = 0

    class Topics(frozenset[str]):
        def __contains__(self, topic: Any) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(topic)

    counts = {f"t{number:02}": 1 for number in range(40)}
    members = [Subscriber(f"m{number:02}", None, Topics(counts)) for number in range(50)]
    found = ASSIGNORS["range"](members, counts)
    assert found["m00"] == [TopicPartition(topic, 0) for topic in counts]
    assert not any(share for name, share in found.items() if name != "m00")
    assert looked <= 50 + 40
