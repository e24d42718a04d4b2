"""Consumer groups with patterns get random heartbeats, while topics are created and deleted and brokers
restart.

Background work runs one step at a time, and all limits are small. Once no more changes occur, heartbeats must
assign each partition of a subscribed topic to one of its subscribers. Runs with the same seed are equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from oncelog_simulator.limits import draw_limits
from support.groups.node import GroupNode, create, heartbeat

from oncelog.errors import MessageTooLarge
from oncelog.wire.messages import ConsumerGroupHeartbeatRequest, DeleteTopicsRequest

TOPICS = ("t0", "t1", "t22", "u0", "u1")
SUBSCRIPTIONS: tuple[dict[str, Any], ...] = (
    {"subscribed_topic_names": ["t0", "u0"], "subscribed_topic_regex": ""},
    {"subscribed_topic_names": ["z"], "subscribed_topic_regex": ""},
    {"subscribed_topic_names": [], "subscribed_topic_regex": "t.*"},
    {"subscribed_topic_names": [], "subscribed_topic_regex": "u."},
    {"subscribed_topic_names": ["t1"], "subscribed_topic_regex": "[tu]."},
)
ROUNDS = 40
"""Once all other changes have stopped, a group must be stable after this number of heartbeats of each member.
"""


class Member:
    """A group member's state as its client knows it."""

    def __init__(self, group: str, name: str) -> None:
        self.group, self.name = group, name
        self.epoch = 0
        self.subscription = SUBSCRIPTIONS[0]
        self.owned: dict[bytes, list[int]] = {}
        self.is_in = False

    def matches(self, topic: str) -> bool:
        regex = self.subscription["subscribed_topic_regex"]
        is_matched = bool(regex) and re.fullmatch(regex, topic) is not None
        return is_matched or topic in self.subscription["subscribed_topic_names"]


class Run:
    def __init__(self, seed: int) -> None:
        self.rng = Random(f"{seed}/random heartbeats")
        self.place = GroupNode(group_consumer_session_timeout_ms=45_000)
        self.place.limits = replace(
            draw_limits(seed),
            pattern_step_cost=self.rng.choice((1, 1, 10, 100)),
            request_step_elements=1,
            partitions_per_step=1,
            max_catalogued_topics=self.rng.choice((1, 2, 5, 100)),
            assignment_burst_cost=self.rng.choice((1, 20, 20_000)),
        )
        self.is_starved = self.rng.random() < 0.5
        """True if no background task runs between the last heartbeats."""
        self.members = [Member(group, f"m{index}") for group in ("g", "h") for index in range(3)]
        self.start_again()

    def start_again(self) -> None:
        self.place.node.log_manager.background.on_added = None
        self.place.node.log_manager.background.finish()
        self.place.restart()
        self.place.node.log_manager.background.on_added = lambda: None

    def step(self) -> bool:
        background = self.place.node.log_manager.background
        if not background:
            return False
        job = background.step()
        if job is not None:
            job()
        return True

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("the node is never done")

    def take_steps(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            if not self.step():
                break

    def beat(self, member: Member, *, joins: bool = False, changes: bool = False) -> None:
        if joins:
            member.epoch, member.owned = 0, {}
        rows = [
            ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in member.owned.items()
        ]
        fields: dict[str, Any] = member.subscription if joins or changes else {}
        request = heartbeat(member.group, member.name, member.epoch, **fields, topic_partitions=rows)
        answers = self.place.ask(request, 1)
        if not answers:
            self.finish()
        (answer,) = answers
        member.is_in = answer.error_code == 0
        if member.is_in:
            member.epoch = answer.member_epoch
            if answer.assignment is not None:
                member.owned = {
                    row.topic_id: list(row.partitions) for row in answer.assignment.topic_partitions
                }

    def act(self) -> None:
        rng, member = self.rng, self.rng.choice(self.members)
        match rng.choices(range(8), (6, 8, 3, 1, 6, 3, 1, 2))[0]:
            case 0:
                self.take_steps()
            case 1:
                self.beat(member, joins=not member.is_in)
            case 2:
                member.subscription = rng.choice(SUBSCRIPTIONS)
                self.beat(member, joins=not member.is_in, changes=True)
            case 3 if member.is_in:
                self.place.ask(heartbeat(member.group, member.name, -1), 1)
                member.is_in = False
            case 4:
                self.place.ask(create(rng.choice(TOPICS), rng.randint(1, 3)), 5)
            case 5:
                request = DeleteTopicsRequest(topic_names=[rng.choice(TOPICS)], timeout_ms=1_000)
                self.place.ask(request, 5)
            case 6:
                self.start_again()
            case 7:
                self.place.pass_time(rng.choice((1, 5_000)))

    def settle(self) -> None:
        members = [member for member in self.members if member.is_in]
        if self.rng.random() < 0.5:
            self.start_again()
        for _ in range(ROUNDS):
            for member in members:
                self.beat(member, joins=not member.is_in)
                if not self.is_starved:
                    self.take_steps()
            self.place.pass_time(100)
        self.finish()
        for _ in range(20):
            for member in members:
                self.beat(member, joins=not member.is_in)
                self.finish()
            self.place.pass_time(2_000)  # an assignment may wait until earlier ones are adopted

    def check(self) -> None:
        for group in ("g", "h"):
            members = [member for member in self.members if member.group == group and member.is_in]
            owned = Counter(
                (topic_id, index)
                for member in members
                for topic_id, indexes in member.owned.items()
                for index in indexes
            )
            topics = [topic for topic in self.place.node.topics.all() if not topic.is_internal]
            wanted = {
                (topic.topic_id, index): 1
                for topic in topics
                if any(member.matches(topic.name) for member in members)
                for index in range(len(topic.partitions))
            }
            assert owned == wanted, f"{group} has {dict(owned)} of {wanted}"
            names = {topic.topic_id: topic.name for topic in topics}
            for member in members:
                assert all(member.matches(names[topic_id]) for topic_id in member.owned), member.name


def run(seed: int, event_count: int = 60) -> None:
    """Run a seed. Raises AssertionError if a group's assignment does not settle on the members'
    subscriptions.
    """
    running = Run(seed)
    for _ in range(event_count):
        running.act()
    running.settle()
    running.check()


def test_groups_settle_on_all_that_they_subscribe_to() -> None:
    run_all(range(6))


@pytest.mark.full("plays many seeds")
def test_groups_settle_on_all_that_they_subscribe_to_in_more_runs() -> None:
    run_all(range(6, 60))


@pytest.mark.soak
def test_groups_settle_on_all_that_they_subscribe_to_in_thousands_of_runs() -> None:
    run_all(range(60, 6_000))


def run_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_a_large_assignment_is_computed_in_another_thread() -> None:
    """An assignment that the group has outgrown meanwhile is dropped."""
    place = GroupNode()
    place.limits = replace(place.limits, max_immediate_assignment_cost=3)
    place.restart()
    place.ask(create("t", 3), 5)
    background, epochs = place.node.log_manager.background, {}
    background.on_added = lambda: None

    def beat(name: str) -> Any:
        (answer,) = place.ask(heartbeat("g", name, epochs.get(name, 0)), 1)
        epochs[name] = answer.member_epoch
        return answer.assignment

    assert beat("a").topic_partitions == [] and epochs["a"] > 0
    call = background.step()
    assert call is not None
    beat("b")
    call()
    background.step()
    assert not background
    group = place.node.groups.consumers.get("g")
    assert group is not None and group.epoch > group.assignment_epoch
    place.pass_time(1_000)
    assert beat("a") is None
    call = background.step()
    assert call is not None
    call()
    background.step()
    rows = [row for name in "ab" for row in beat(name).topic_partitions]
    assert sorted(index for row in rows for index in row.partitions) == [0, 1, 2]


def test_a_client_gets_the_error_of_a_large_assignment_that_cannot_be_stored() -> None:
    place = GroupNode(message_max_bytes=400)
    place.limits = replace(place.limits, max_immediate_assignment_cost=3)
    place.restart()
    place.ask(create("t", 200), 5)
    (joined,) = place.ask(heartbeat("g", "a"), 1)
    assert joined.error_code == 0
    (answer,) = place.ask(heartbeat("g", "a", joined.member_epoch), 1)
    assert answer.error_code == MessageTooLarge.code


def test_a_large_assignment_for_which_no_thread_can_be_started_is_computed_by_a_heartbeat() -> None:
    """Regression: each heartbeat began the same work again, so the members never got a partition."""
    place = GroupNode()
    place.limits = replace(place.limits, max_immediate_assignment_cost=3)
    place.restart()
    place.ask(create("t", 5), 5)
    background = place.node.log_manager.background
    background.on_added = lambda: None
    (joined,) = place.ask(heartbeat("g", "a"), 1)
    call = background.step()
    assert call is not None
    call.end(RuntimeError("can't start new thread"))
    with pytest.raises(RuntimeError):
        background.step()
    place.pass_time(1_000)
    (answer,) = place.ask(heartbeat("g", "a", joined.member_epoch), 1)
    assert not background
    (row,) = answer.assignment.topic_partitions
    assert row.partitions == [0, 1, 2, 3, 4]
