"""Timers of groups: a deadline costs little, and no group delays others."""

from __future__ import annotations

from typing import Any

import pytest
from support.groups.node import GroupNode, commit, create, heartbeat, join, sync

from oncelog.broker.coordinators import consumer_groups, groups
from oncelog.broker.dispatch import next_wakeup_ms
from oncelog.errors import UnknownMemberId
from oncelog.rules.groups import classic
from oncelog.rules.groups.classic import ClassicGroup, GroupState
from oncelog.rules.groups.consumer import ConsumerGroup
from oncelog.wire.messages import DeleteGroupsRequest, HeartbeatRequest, LeaveGroupRequest


@pytest.fixture
def node() -> GroupNode:
    made = GroupNode(group_initial_rebalance_delay_ms=0, group_consumer_min_session_timeout_ms=1000)
    made.ask(create("t"), 5)
    return made


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the groups whose deadlines are examined, in order."""
    seen: list[str] = []
    for kind in (ClassicGroup, ConsumerGroup):

        def tick(group: Any, now_ms: int, original: Any = kind.tick) -> Any:
            seen.append(group.group_id)
            return original(group, now_ms)

        monkeypatch.setattr(kind, "tick", tick)
    return seen


def settled(node: GroupNode, group: str, **fields: Any) -> Any:
    """Join a group, send its first assignment, and return the response to the join."""
    (joined,) = node.ask(join(group, **fields), 3)
    node.ask(sync(group, joined.member_id, joined.generation_id, {joined.member_id: b"x"}), 3)
    node.pass_time(6_000)  # lets the rebalance deadline pass, which comes before those that the tests look at
    return joined


def test_a_group_is_looked_at_once_for_each_of_its_deadlines(node: GroupNode, ticks: list[str]) -> None:
    joined = settled(node, "g", session_timeout_ms=60_000)
    for earlier_ms in range(500):
        node.ask(
            join("g", session_timeout_ms=30_000 - earlier_ms), 4
        )  # each join gets a new member id that is never used
    node.pass_time(31_000)
    ticks.clear()
    for _ in range(4):
        beat = HeartbeatRequest(group_id="g", generation_id=joined.generation_id, member_id=joined.member_id)
        assert node.ask(beat, 3)[0].error_code == 0
        node.pass_time(50_000)
    # The group is examined about once per session time-out. The timers of the 500 absent members add nothing.
    assert len(ticks) <= 8


def test_groups_whose_members_expire_together_are_handled_a_few_at_once(
    node: GroupNode, ticks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1419: after a restart, the members of 10,000 groups that were gone expired in one step of 0.4 s."""
    for module in (groups, consumer_groups):
        monkeypatch.setattr(module, "MAX_GROUPS_AT_ONCE", 2)
    for number in range(5):
        settled(node, f"classic{number}", session_timeout_ms=60_000)
        node.ask(heartbeat(f"consumer{number}", "m"), 1)
    node.restart()
    coordinator, ticks[:] = node.node.groups, []
    later_ms = node.now_ms + 1_000_000
    for call in range(1, 4):
        assert next_wakeup_ms(node.node) <= later_ms
        coordinator.tick(later_ms)
        coordinator.consumers.tick(later_ms)
        assert len(ticks) == min(4 * call, 10)
    assert set(ticks) == {f"{kind}{n}" for kind in ("classic", "consumer") for n in range(5)}
    assert {group.state for group in coordinator._groups.values()} == {GroupState.EMPTY}
    assert not any(group.members for group in coordinator.consumers._groups.values())


def test_the_unused_member_ids_of_all_groups_are_limited(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1712: a client that asked many groups for member ids could use up the memory of the broker."""
    monkeypatch.setattr(groups, "MAX_UNUSED_IDS_BYTES", 5 * (groups.GROUP_BYTES + 200))
    leader = settled(node, "waits").member_id
    node.ask(join("waits"), 4)  # this client never comes back
    assert not node.ask(join("waits"), 3)
    again = node.ask(join("waits", leader), 3)
    assert not again
    asked = [node.ask(join(f"g{number}"), 4)[0].member_id for number in range(50)]
    coordinator = node.node.groups
    assert 1 < len(coordinator._groups) <= 6 and len(coordinator._deadlines) <= 6
    # The rebalance no longer waits for the client whose id was forgotten.
    assert [answer.error_code for answer in again] == [0]
    assert node.ask(join("g49", asked[49]), 4)[0].error_code == 0
    assert node.ask(join("g0", asked[0]), 4)[0].error_code == UnknownMemberId.code
    # The ids that clients have used, or that have expired, no longer count.
    node.pass_time(11_000)
    assert not coordinator._unused_bytes and not coordinator._unused_id_bytes


def test_the_unused_member_ids_of_a_group_are_forgotten_a_few_at_once(
    node: GroupNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1734: a request that exceeded the limit forgot all ids of a group: 0.05 s for 41,000 ids."""
    monkeypatch.setattr(classic, "MAX_UNUSED_IDS_AT_ONCE", 10)
    coordinator = node.node.groups
    many = [node.ask(join("many"), 4)[0].member_id for _ in range(100)]
    monkeypatch.setattr(groups, "MAX_UNUSED_IDS_BYTES", coordinator._unused_bytes + groups.GROUP_BYTES)
    node.ask(join("other"), 4)
    left = coordinator._groups["many"]._pending_order
    # The ids that were given first are forgotten, and the others still count.
    assert list(left) == many[10:]
    assert coordinator._unused_bytes == sum(coordinator._unused_id_bytes.values())
    assert node.ask(join("many", many[0]), 4)[0].error_code == UnknownMemberId.code
    # The use of an id makes "other" the group that has not changed for longest.
    assert node.ask(join("many", many[10]), 4)[0].error_code == 0
    monkeypatch.setattr(groups, "MAX_UNUSED_IDS_BYTES", groups.GROUP_BYTES)
    node.ask(join("third"), 4)
    assert set(coordinator._groups) == {"many", "third"} and not left
    assert coordinator._unused_bytes == sum(coordinator._unused_id_bytes.values())


def test_the_unused_member_ids_of_a_group_that_is_gone_do_not_count(node: GroupNode) -> None:
    """R1737: a group that was deleted, or replaced by one of the consumer protocol, counted for good."""
    for request, version in (
        (heartbeat("g", "m"), 1),
        (heartbeat("g", "m", -1), 1),
        (DeleteGroupsRequest(groups_names=["g"]), 2),
    ):
        node.ask(join("g"), 4)
        assert node.ask(request, version)
        coordinator = node.node.groups
        assert not coordinator._groups
        assert not coordinator._unused_bytes and not coordinator._unused_id_bytes


def test_a_group_of_the_consumer_protocol_is_looked_at_once_for_each_deadline(
    node: GroupNode, ticks: list[str]
) -> None:
    consumers = node.node.groups.consumers
    node.ask(heartbeat("g", "stays"), 1)
    for earlier_ms in range(100):
        consumers._schedule("g", node.now_ms + 40_000 - earlier_ms)
    node.pass_time(41_000)
    ticks.clear()
    for _ in range(4):
        epoch = consumers._groups["g"].members["stays"].epoch
        assert node.ask(heartbeat("g", "stays", epoch), 1)[0].error_code == 0
        node.pass_time(44_000)
    assert len(ticks) <= 8


@pytest.mark.parametrize("rebalance_timeout_ms", [0, -1, 1])
def test_a_rebalance_without_time_for_which_nobody_came_ends_each_look_at_it(
    node: GroupNode, ticks: list[str], rebalance_timeout_ms: int
) -> None:
    static = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": rebalance_timeout_ms}
    settled(node, "g", group_instance_id="a", **static)
    node.ask(join("g", group_instance_id="b", **static), 5)
    gone = LeaveGroupRequest.MemberIdentity(member_id="", group_instance_id="b")
    node.ask(LeaveGroupRequest(group_id="g", members=[gone]), 4)
    group = node.node.groups._groups["g"]
    assert group.state is GroupState.PREPARING_REBALANCE
    assert list(group.members.static_ids) == ["a"]
    node.pass_time(50_000)
    assert len(ticks) < 100
    assert list(group.members.static_ids) == ["a"]
    node.pass_time(20_000)
    assert group.state is GroupState.EMPTY


def test_a_member_that_commits_stays_without_a_heartbeat(node: GroupNode) -> None:
    joined = settled(node, "g", session_timeout_ms=10_000)
    member = {"member_id": joined.member_id, "generation_id_or_member_epoch": joined.generation_id}
    for offset in range(4):
        (answer,) = node.ask(commit("g", offset, **member), 8)
        assert answer.topics[0].partitions[0].error_code == 0
        node.pass_time(9_000)
    node.pass_time(2_000)
    assert node.node.groups._groups["g"].state is GroupState.EMPTY


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_member_that_waited_for_its_assignment_longer_than_its_session_stays(
    node: GroupNode, is_interrupted: bool
) -> None:
    times = {"session_timeout_ms": 10_000, "rebalance_timeout_ms": 60_000}
    (leader,) = node.ask(join("g", **times), 3)
    waiting = node.ask(join("g", **times), 3)
    (leader,) = node.ask(join("g", leader.member_id, **times), 3)
    (follower,) = waiting
    generation = leader.generation_id
    synced = node.ask(sync("g", follower.member_id, generation, {}), 3)
    beat = HeartbeatRequest(group_id="g", generation_id=generation, member_id=leader.member_id)
    for _ in range(6):
        node.pass_time(5_000)
        assert node.ask(beat, 3)[0].error_code == 0
    if is_interrupted:
        node.ask(join("g", **times), 3)
    else:
        node.ask(sync("g", leader.member_id, generation, {follower.member_id: b"x"}), 3)
    assert len(synced) == 1
    node.pass_time(9_000)
    members = node.node.groups._groups["g"].members
    assert follower.member_id in members
    node.pass_time(2_000)
    assert follower.member_id not in members
