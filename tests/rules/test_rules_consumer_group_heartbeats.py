"""Tests of single heartbeats of a consumer protocol group, and of the group after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from oncelog.errors import BrokerError, InvalidRegularExpression
from oncelog.rules.groups import consumer as groups_consumer
from oncelog.rules.groups.assignors import GroupAssignment, assign_sticky
from oncelog.rules.groups.consumer import (
    CURRENT,
    EPOCH,
    MEMBER,
    NO_PARTITIONS,
    TARGET,
    TARGET_EPOCH,
    ConsumerGroup,
    ConsumerGroupState,
    ConsumerMember,
    Heartbeat,
    HeartbeatResult,
    MemberState,
    RecordKey,
    TopicIdPartition,
    TopicInfo,
)


class Broker:
    """A stand-in for a broker: its topics, and one group."""

    def __init__(self, **settings: Any) -> None:
        self.counts = {"t": 4, "u": 3}
        self.pending: frozenset[str] = frozenset()
        """Regular expressions that are not matched yet."""
        self.asked = 0
        self.group = ConsumerGroup("g", session_timeout_ms=1000, **settings)
        self.now_ms = 0

    def catalogue(self, names: frozenset[str], regexes: frozenset[str]) -> Mapping[str, TopicInfo]:
        self.asked += 1
        matched = {regex.removesuffix(".*") for regex in regexes - self.pending}
        return {
            name: TopicInfo(name.encode() * 16, count)
            for name, count in self.counts.items()
            if name in names | matched
        }

    def beat(
        self,
        name: str,
        epoch: int = 0,
        topics: str | None = None,
        owned: frozenset[TopicIdPartition] | None = None,
        **more: Any,
    ) -> HeartbeatResult:
        """Send a heartbeat. At epoch 0, it has all fields that a join requires."""
        if epoch == 0:
            topics, owned, more = topics or "", NO_PARTITIONS, {"rebalance_timeout_ms": 300} | more
        named = None if topics is None else frozenset(topics)
        check = more.pop("check_regex", str)
        said = Heartbeat(name, epoch, topics=named, owned=owned, **more)
        return self.group.heartbeat(
            said, self.catalogue, self.now_ms, lambda regexes: bool(regexes & self.pending), check
        )

    def restart(self) -> None:
        """Replace the group by the one that a start reads from the stored records."""
        before = self.group
        self.group = ConsumerGroup("g", session_timeout_ms=1000)
        self.group.epoch, self.group.assignment_epoch = before.epoch, before.assignment_epoch
        self.group.targets = dict(before.targets)
        for member in before.members.values():
            self.group.restore(member)
        self.group.resume(self.now_ms)

    def assigned(self, name: str) -> frozenset[TopicIdPartition]:
        return self.group.members[name].assigned


def places(text: str, topic: str = "t") -> frozenset[TopicIdPartition]:
    return frozenset((topic.encode() * 16, int(digit)) for digit in text)


def group_of(*members: ConsumerMember) -> ConsumerGroup:
    """Return a group at epoch 5 in the state that it has after a replay of the log."""
    group = ConsumerGroup("g", session_timeout_ms=1000)
    group.epoch = group.assignment_epoch = 5
    for member in members:
        group.restore(member)
    group.resume(0)
    return group


# Requests and responses


@pytest.mark.parametrize(
    ("epoch", "timeout_ms", "topics", "regex", "owned", "is_full"),
    [
        (0, -1, None, None, None, True),
        (3, -1, None, None, None, False),
        (1, -1, None, None, None, False),
        (3, 500, frozenset("t"), None, NO_PARTITIONS, True),
        (3, 500, None, "t.*", NO_PARTITIONS, True),
        (3, 500, None, None, NO_PARTITIONS, False),
        (3, -1, frozenset("t"), None, NO_PARTITIONS, False),
        (3, 500, frozenset("t"), None, None, False),
    ],
)
def test_a_heartbeat_is_full_if_it_joins_or_says_everything(
    epoch: int, timeout_ms: int, topics: frozenset[str] | None, regex: str | None,
    owned: frozenset[TopicIdPartition] | None, is_full: bool,
) -> None:  # fmt: skip
    beat = Heartbeat("m", epoch, rebalance_timeout_ms=timeout_ms, topics=topics, regex=regex, owned=owned)
    assert beat.is_full == is_full


def test_an_assignment_is_answered_when_it_changed_or_everything_was_said() -> None:
    broker = Broker()
    assert broker.beat("m", 0, "t") == HeartbeatResult("m", 2, places("0123"))
    assert broker.beat("m", 2) == HeartbeatResult("m", 2, None)
    everything = broker.beat("m", 2, "t", places("0123"), rebalance_timeout_ms=300)
    assert everything == HeartbeatResult("m", 2, places("0123"))
    broker.counts["t"] = 5
    assert broker.beat("m", 2) == HeartbeatResult("m", 3, places("01234"))


FENCED = "FENCED_MEMBER_EPOCH"


@pytest.mark.parametrize(
    ("member_epoch", "previous", "epoch", "owned", "error"),
    [
        (5, 4, 5, None, None),
        (5, 4, 5, "2", None),
        (5, 4, 4, "01", None),  # the member did not get the response with epoch 5
        (5, 4, 4, "0", None),
        (5, 4, 4, "", None),
        (5, 4, 4, "02", FENCED),
        (5, 4, 4, None, FENCED),
        (5, 4, 3, "01", FENCED),
        (5, 4, 6, "01", FENCED),
        (-2, 5, 5, "01", FENCED),  # the member is static and has left temporarily
    ],
)
def test_a_member_may_repeat_its_last_epoch_while_it_reads_nothing_else(
    member_epoch: int, previous: int, epoch: int, owned: str | None, error: str | None
) -> None:
    member = ConsumerMember(
        "m", instance_id="i", epoch=member_epoch, previous_epoch=previous, assigned=places("01")
    )
    group = group_of(member)
    beat = Heartbeat("m", epoch, owned=None if owned is None else places(owned))
    expectation = nullcontext() if error is None else pytest.raises(BrokerError, match=error)
    with expectation:
        assert group.heartbeat(beat, lambda names, regexes: {}, 0).epoch == 5


def test_a_pattern_is_checked_when_a_known_member_has_it_newly() -> None:
    broker, checked = Broker(), list[str]()
    beat = partial(broker.beat, check_regex=checked.append)
    beat("m", 0, "t")
    assert checked == []
    beat("m", 2, regex="t.*")
    beat("m", 3, regex="t.*")
    beat("m", 3)
    assert checked == ["t.*"]
    beat("m", 3, regex="u.*")
    assert checked == ["t.*", "u.*"]
    with pytest.raises(BrokerError, match="UNKNOWN_MEMBER_ID"):
        beat("stranger", 3, regex="v.*")
    beat("m", 4, regex="")
    assert checked == ["t.*", "u.*"]

    def refuse(pattern: str) -> None:
        raise InvalidRegularExpression(pattern)

    with pytest.raises(BrokerError, match="INVALID_REGULAR_EXPRESSION"):
        broker.beat("m", 4, regex="(", check_regex=refuse)


def test_a_static_member_stays_one_when_a_heartbeat_does_not_name_its_instance() -> None:
    broker = Broker()
    broker.beat("m", 0, "t", instance_id="i")
    broker.beat("m", 2)
    assert broker.group.members["m"].instance_id == "i"


def test_the_first_subscription_of_all_is_counted_too() -> None:
    broker = Broker(max_subscription_bytes=0)
    with pytest.raises(BrokerError, match="GROUP_MAX_SIZE_REACHED"):
        broker.beat("m", 0, "")


def test_a_quiet_heartbeat_asks_for_the_topics_once_and_makes_no_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker, made = Broker(), 0

    def assign(*arguments: Any) -> GroupAssignment:
        nonlocal made
        made += 1
        return assign_sticky(*arguments)

    monkeypatch.setitem(groups_consumer.SERVER_ASSIGNORS, "uniform", assign)
    broker.beat("a", 0, "t")
    broker.beat("b", 0, "t")
    assert broker.group.members["b"].state is MemberState.UNRELEASED
    before, broker.asked = made, 0
    for name, epoch in (("b", 3), ("a", 2), ("b", 3)):
        broker.beat(name, epoch)
    assert (broker.asked, made) == (3, before)
    broker.beat("a", 2, None, broker.assigned("a"))
    broker.beat("b", 3)
    assert broker.group.state is ConsumerGroupState.STABLE
    broker.asked = 0
    broker.beat("a", 3)
    assert (broker.asked, made) == (1, before)


# Epochs and targets


def test_the_epochs_of_a_group_whose_first_member_has_no_topics_are_stored() -> None:
    broker = Broker()
    assert broker.beat("m", 0, "") == HeartbeatResult("m", 1, NO_PARTITIONS)
    group = broker.group
    assert (group.epoch, group.assignment_epoch) == (1, 1)
    assert {
        RecordKey(EPOCH),
        RecordKey(TARGET_EPOCH),
        RecordKey(MEMBER, "m"),
        RecordKey(CURRENT, "m"),
    } <= set(group.unsaved)


def test_a_group_is_stable_when_every_member_has_arrived() -> None:
    broker = Broker()
    assert broker.group.state is ConsumerGroupState.EMPTY
    broker.beat("a", 0, "t")
    assert broker.group.state is ConsumerGroupState.STABLE
    broker.beat("b", 0, "t")
    assert broker.group.state is ConsumerGroupState.RECONCILING
    broker.beat("a", 2, None, places("0123"))
    broker.beat("a", 2, None, broker.assigned("a"))
    assert broker.group.members["a"].epoch == 3
    assert broker.group.state is ConsumerGroupState.RECONCILING
    broker.beat("b", 3)
    assert broker.group.state is ConsumerGroupState.STABLE


def test_a_topic_that_grows_raises_the_epoch_once() -> None:
    broker = Broker()
    broker.beat("m", 0, "t")
    for count, epoch in ((4, 2), (5, 3), (5, 3), (3, 4)):
        broker.counts["t"] = count
        broker.beat("m", broker.group.members["m"].epoch)
        assert broker.group.epoch == epoch
        assert broker.assigned("m") == places("01234"[:count])


def test_a_topic_that_grows_raises_no_epoch_whose_target_is_still_to_be_made() -> None:
    broker = Broker(assignment_burst=1)
    broker.beat("m", 0, "t")
    for count in (5, 6, 7):
        broker.counts["t"] = count
        broker.beat("m", 2)
        assert (broker.group.epoch, broker.group.assignment_epoch) == (3, 2)
    broker.now_ms = 500
    assert broker.beat("m", 2).assigned == places("0123456")


@pytest.mark.parametrize(("count", "epoch"), [(4, 2), (5, 3), (3, 3)])
def test_topics_that_changed_while_the_broker_was_down_are_noticed(count: int, epoch: int) -> None:
    broker = Broker()
    broker.beat("m", 0, "t")
    broker.restart()
    broker.counts["t"] = count
    broker.beat("m", 2)
    assert broker.group.epoch == epoch
    assert broker.assigned("m") == places("01234"[:count])


def test_the_stored_target_stands_until_the_topics_of_patterns_are_known_after_a_restart() -> None:
    broker = Broker()
    everything = broker.beat("a", 0, regex="t.*").assigned
    assert everything == places("0123")
    broker.restart()
    broker.pending = frozenset(["t.*"])
    assert broker.beat("a", 2) == HeartbeatResult("a", 2, None)
    assert broker.beat("b", 0, regex="t.*").assigned == NO_PARTITIONS
    assert (broker.group.epoch, broker.group.assignment_epoch) == (3, 2)
    assert broker.beat("a", 2, None, everything) == HeartbeatResult("a", 2, None)
    assert broker.group.epoch == 3
    broker.pending = frozenset()
    assert len(broker.beat("a", 2, None, everything).assigned or ()) == 2
    assert (broker.group.epoch, broker.group.assignment_epoch) == (3, 3)


def test_a_member_that_gives_up_some_loses_what_it_no_longer_names_at_once() -> None:
    broker = Broker()
    broker.beat("a", 0, "tu")
    broker.beat("b", 0, "tu")
    broker.beat("a", 2)
    assert broker.group.members["a"].state is MemberState.UNREVOKED
    answer = broker.beat("a", 2, "t")
    assert answer.epoch == 2 and answer.assigned is not None
    assert answer.assigned <= places("0123")


def test_a_member_gets_what_is_free_while_others_still_hold_the_rest() -> None:
    broker = Broker()
    broker.counts["u"] = 4
    broker.beat("a", 0, "tu")
    broker.beat("c", 0, "tu")
    broker.beat("a", 2, None, broker.assigned("a"))
    broker.beat("a", 2, None, broker.assigned("a"))
    broker.beat("c", 3)
    assert (len(broker.assigned("a")), len(broker.assigned("c"))) == (4, 4)
    broker.beat("b", 0, "tu")
    lacking = broker.group.targets["b"]
    first, second = sorted("ac", key=lambda name: len(broker.assigned(name) & lacking))
    held = broker.assigned(first) & lacking
    assert held and broker.assigned(second) & lacking
    broker.beat(first, 3, None, broker.assigned(first))
    broker.beat(first, 3, None, broker.assigned(first))
    assert broker.beat("b", 4).assigned == held
    assert broker.group.members["b"].state is MemberState.UNRELEASED


def test_a_request_that_is_not_stored_leaves_the_subscriptions_of_the_group() -> None:
    broker, asked = Broker(), list[frozenset[str]]()
    broker.beat("a", 0, "t")
    kept = broker.group
    broker.group = kept.draft()
    broker.beat("b", 0, "u")
    broker.group.draft()  # makes a draft of the draft, as a second heartbeat would

    def noted(names: frozenset[str], regexes: frozenset[str]) -> Mapping[str, TopicInfo]:
        asked.append(names)
        return broker.catalogue(names, regexes)

    kept.heartbeat(Heartbeat("a", 2), noted, 0)
    assert asked == [frozenset("t")]
    assert (list(kept.members), kept.epoch) == (["a"], 2)


def test_an_instance_that_comes_back_has_its_target_stored_under_the_new_id() -> None:
    broker = Broker()
    broker.beat("old", 0, "t", instance_id="i")
    broker.beat("old", -2, instance_id="i")
    broker.group.unsaved.clear()
    broker.beat("new", 0, "t", instance_id="i")
    assert set(broker.group.unsaved) == {
        RecordKey(kind, name) for kind in (MEMBER, TARGET, CURRENT) for name in ("old", "new")
    }
    member = broker.group.members["new"]
    assert (member.epoch, member.previous_epoch) == (2, 0)


# Time


UNREVOKED = ConsumerMember(
    "m", instance_id="i", epoch=4, previous_epoch=4, rebalance_timeout_ms=300,
    topics=frozenset("t"), state=MemberState.UNREVOKED, assigned=places("0"), revoking=places("1"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("member", "beat", "due_ms"),
    [
        (ConsumerMember("m", epoch=5), None, 1000),  # after a restart, its session lasts the full time-out
        (UNREVOKED, None, 300),
        (UNREVOKED, Heartbeat("m", 4, owned=places("01")), 300),
        (UNREVOKED, Heartbeat("m", 4, owned=places("0")), 1100),  # the member gave up the partition in time
        (UNREVOKED, Heartbeat("m", -2, "i"), 1000),  # the static member may return until its session ends
    ],
)
def test_a_member_goes_when_its_session_or_its_time_to_give_up_is_over(
    member: ConsumerMember, beat: Heartbeat | None, due_ms: int
) -> None:
    group = group_of(member)
    group.targets = {"m": places("0")}
    if beat is not None:
        group.heartbeat(beat, lambda names, regexes: {"t": TopicInfo(b"t" * 16, 1)}, 100)
    assert group.next_deadline_ms() == due_ms
    group.tick(due_ms - 1)
    assert list(group.members) == ["m"]
    group.tick(due_ms)
    assert list(group.members) == []


# Committed offsets


def test_the_topics_that_members_read_keep_their_offsets() -> None:
    broker = Broker()
    assert broker.group.subscribed() == frozenset()
    broker.beat("m", 0, "tx")
    assert set(broker.group.subscribed() or ()) == {"t"}
    broker.restart()
    assert broker.group.subscribed() == frozenset("tx")
    broker.beat("m", 2, regex="u.*")
    assert set(broker.group.subscribed() or ()) == {"t", "u"}
    broker.restart()
    assert broker.group.subscribed() is None
    broker.beat("m", 3)
    assert set(broker.group.subscribed() or ()) == {"t", "u"}
    broker.beat("m", -1)
    assert broker.group.subscribed() == frozenset()
