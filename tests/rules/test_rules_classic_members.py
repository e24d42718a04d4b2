"""Tests of a classic group's limits: common protocols, the number of members and their metadata."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import product
from typing import Any

import pytest

from oncelog.errors import GroupMaxSizeReached, MemberIdRequired, UnknownMemberId
from oncelog.rules.groups import classic
from oncelog.rules.groups.classic import (
    ClassicGroup,
    GroupState,
    JoinRequest,
    JoinResult,
    Member,
    Protocol,
    SyncResult,
)

OFFERS = ["a", "b", "ab", "ba", "bc", "abc", ""]


def request(protocols: str, member_id: str = "", kind: str = "consumer") -> JoinRequest:
    offered = tuple((name, b"") for name in protocols)
    return JoinRequest(
        member_id, None, "client", "host", 10_000, 60_000, kind, offered,
        requires_known_member_id=False, supports_skip_assignment=True,
    )  # fmt: skip


def join(group: ClassicGroup, name: str, protocols: str = "a", member_id: str = "") -> list[JoinResult]:
    answers: list[JoinResult] = []
    group.join(request(protocols, member_id), name, 0, answers.append)
    return answers


def common_protocols(members: Collection[Member]) -> set[str]:
    """Return the protocols that all members support, by examining each of them."""
    return set.intersection(*({name for name, _ in member.protocols} for member in members))


@pytest.mark.parametrize("members", list(product(OFFERS, repeat=3)), ids="-".join)
def test_a_join_needs_a_protocol_in_common_with_all_members(members: tuple[str, ...]) -> None:
    group = ClassicGroup("g", 0)
    for index, offered in enumerate(members):
        if group.supports(request(offered)):
            join(group, f"m{index}", offered)
    for offered in OFFERS:
        common = common_protocols(group.members.values()) if group.members else set("abc")
        assert group.supports(request(offered)) is bool(common & set(offered)), (members, offered)
    if group.members:
        assert not group.supports(request("abc", kind="connect"))


@pytest.mark.parametrize("offers", list(product(["a", "ab", "abc"], repeat=3)), ids="-".join)
def test_common_protocols_are_known_without_examining_members(offers: tuple[str, ...]) -> None:
    group = ClassicGroup("g", 0)

    def check() -> None:
        members = group.members.values()
        assert group.members.metadata_bytes == sum(member.metadata_bytes for member in members)
        assert group.members.common_protocols() == (common_protocols(members) if members else set())

    first, second, third = offers
    for instance, offered in (("i", first), ("j", second), ("i", second), ("i", third), ("j", first)):
        group.join(request(offered)._replace(group_instance_id=instance), f"{instance}{offered}", 0, print)
        check()
    join(group, "dynamic", third)
    join(group, "", first, "dynamic")
    check()
    for member in list(group.members):
        group.leave([(member, None)], 0)
        check()
    assert not group.members and not group.members.metadata_bytes


def test_joins_of_many_members_do_not_look_at_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(protocols: Collection[Protocol], original: Any = classic.metadata_bytes) -> int:
        nonlocal looks
        looks += 1
        return int(original(protocols))

    monkeypatch.setattr(classic, "metadata_bytes", counted)
    group = ClassicGroup("g", 0)
    for index in range(100):
        join(group, f"m{index}")
    assert looks < 500


def test_members_that_expire_together_are_removed_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1414: 60,000 members that expired together blocked the broker for 2 s."""
    rebalances = 0

    def counted(self: ClassicGroup, now_ms: int, original: Any = ClassicGroup._rebalance) -> None:
        nonlocal rebalances
        rebalances += 1
        original(self, now_ms)

    group = ClassicGroup("g", 0)
    for index in range(100):
        join(group, f"m{index}")
    monkeypatch.setattr(ClassicGroup, "_rebalance", counted)
    group.tick(group.members["m99"].deadline_ms)
    assert (group.state, len(group.members), rebalances) == (GroupState.EMPTY, 0, 1)
    # A dict keeps the places of removed members, so finding its first member takes longer each time.
    assert isinstance(group.members._by_id, OrderedDict)


def test_empty_protocols_take_memory_too() -> None:
    group = ClassicGroup("g", 0, max_metadata_bytes=1_000)
    (refused,) = join(group, "m", "a" * 20)
    assert refused.error_code == GroupMaxSizeReached.code


def test_long_ids_of_members_count_as_metadata() -> None:
    """R1713: only protocols counted, so members with long ids could use up the memory of the broker. Their
    record, which is encoded in one step, was too large for the log, and blocked all clients for seconds.
    """
    group = ClassicGroup("g", 0, max_metadata_bytes=1_000)
    for field in ("client_id", "client_host", "group_instance_id"):
        answers: list[JoinResult] = []
        group.join(request("a")._replace(**{field: "x" * 1_000}), "m", 0, answers.append)
        assert [answer.error_code for answer in answers] == [GroupMaxSizeReached.code]
    assert join(group, "m" * 1_000)[0].error_code == GroupMaxSizeReached.code
    (joined,) = join(group, "m" * 800)
    assert joined.error_code == 0
    # The member itself may join again, and even with a longer client id, as long as it fits.
    for length, code in ((100, 0), (200, GroupMaxSizeReached.code)):
        again = request("a", "m" * 800)._replace(client_id="x" * length)
        group.join(again, "", 0, answers.append)
        assert answers[-1].error_code == code
    assert join(group, "n" * 120)[0].error_code == GroupMaxSizeReached.code
    assert group.leave([("m" * 800, None)], 0) == [0] and not group.members.metadata_bytes


def test_places_are_for_members_that_have_joined_the_rebalance() -> None:
    group = ClassicGroup("g", 0, max_size=2)
    assert join(group, "first")[0].error_code == 0
    # both wait until the first member joins again
    assert not join(group, "second") and not join(group, "third")
    for (late,) in (join(group, "", member_id="first"), join(group, "fourth")):
        assert late.error_code == GroupMaxSizeReached.code
    assert group.state is GroupState.PREPARING_REBALANCE


def test_a_group_whose_members_are_all_there_is_full() -> None:
    group = ClassicGroup("g", 0, max_size=2)
    join(group, "first")
    join(group, "second")
    (again,) = join(group, "", member_id="first")
    assert again.error_code == 0 and group.state is GroupState.COMPLETING_REBALANCE
    (late,) = join(group, "third")
    assert late.error_code == GroupMaxSizeReached.code
    (repeated,) = join(group, "", member_id="second")
    assert repeated.error_code == 0


def test_a_late_save_of_an_empty_group_does_not_end_a_rebalance() -> None:
    """Found by the simulator (seed 200): a member joined while the group was being stored as empty.

    The group then counted as stable, and its only member never got partitions.
    """
    group = ClassicGroup("g", 0)
    join(group, "first")
    group.leave([("first", None)], 0)
    assert group.state is GroupState.EMPTY and group.is_unsaved
    stored_empty = group.version
    join(group, "second")
    for version in (stored_empty, group.version):
        group.complete_save(None, version, 0)
        assert group.state is GroupState.COMPLETING_REBALANCE
    told: list[SyncResult] = []
    group.sync("second", None, group.generation_id, ("consumer", "a"), {"second": b"all"}, 0, told.append)
    group.complete_save(None, stored_empty, 0)
    assert not told and group.is_unsaved
    group.complete_save(None, group.version, 0)
    assert [each.assignment for each in told] == [b"all"] and group.state is GroupState.STABLE


def test_an_id_given_to_a_dynamic_member_takes_no_instance() -> None:
    """A member that got its id without an instance id must not join with one. Otherwise, two members could
    share that instance id (F70).
    """
    group = ClassicGroup("g", 0, initial_delay_ms=0, max_size=10)
    answers: list[JoinResult] = []
    dynamic = request("a")._replace(requires_known_member_id=True)
    group.join(dynamic, "given", 0, answers.append)
    group.join(dynamic._replace(group_instance_id="i"), "static", 0, answers.append)
    group.join(dynamic._replace(member_id="given", group_instance_id="i"), "", 0, answers.append)
    assert [answer.error_code for answer in answers] == [MemberIdRequired.code, 0, UnknownMemberId.code]
    assert list(group.members) == ["static"]


def ask_for_id(group: ClassicGroup, member_id: str, session_timeout_ms: int = 10_000) -> None:
    answers: list[JoinResult] = []
    asked = request("a")._replace(requires_known_member_id=True, session_timeout_ms=session_timeout_ms)
    group.join(asked, member_id, 0, answers.append)
    assert [answer.error_code for answer in answers] == [MemberIdRequired.code]


def test_many_unused_member_ids_are_forgotten_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1533: 300,000 ids that clients had asked for, and that expired together, took 0.7 s in one step."""
    monkeypatch.setattr(classic, "MAX_UNUSED_IDS_AT_ONCE", 3)
    group = ClassicGroup("g", 0)
    for number in range(7):
        ask_for_id(group, f"m{number}")
    assert [group.tick(10_000) for _ in range(4)] == [3, 3, 1, 0]
    assert group.is_unused and group.next_deadline_ms() is None


def test_the_memory_of_unused_member_ids_is_limited() -> None:
    """R1533: a client id of 32,767 bytes stayed in memory for each JoinGroup, up to 30 minutes."""
    group = ClassicGroup("g", 0, max_metadata_bytes=1_000)
    for number in range(20):
        # The newest id stays, even if it expires before all others.
        ask_for_id(group, f"{number:036d}", session_timeout_ms=60_000 - number)
    pending = group._pending_member_ids
    (forgotten,) = join(group, "new", member_id=f"{9:036d}")
    assert forgotten.error_code == UnknownMemberId.code and len(pending) == 10
    (joined,) = join(group, "new", member_id=f"{10:036d}")
    assert joined.error_code == 0 and len(pending) == 9
    assert group.leave([(f"{10:036d}", None)], 0) == [0]
    ask_for_id(group, "y" * 870)
    assert len(pending) == 1
    assert group.leave([("y" * 870, None)], 0) == [0]
    for number in range(20):
        ask_for_id(group, f"{number:036d}")
    assert len(pending) == 10


def test_a_member_that_sends_no_sync_in_time_is_removed_even_from_a_stable_group() -> None:
    """If the member stayed, nobody would read its partitions for as long as it sends heartbeats (F76)."""
    group = ClassicGroup("g", 0)
    join(group, "leader")
    second = join(group, "second")
    join(group, "", member_id="leader")
    assert [answer.generation_id for answer in second] == [2]
    told: list[SyncResult] = []
    group.sync("leader", None, 2, ("consumer", "a"), {"leader": b"half"}, 0, told.append)
    group.complete_save(None, group.version, 0)
    assert group.state is GroupState.STABLE and told[0].assignment == b"half"
    for now_ms in range(0, 59_999, 5_000):
        assert [group.heartbeat(member_id, None, 2, now_ms) for member_id in ("leader", "second")] == [0, 0]
    group.tick(59_999)
    assert list(group.members) == ["leader", "second"]
    due_ms = group.next_deadline_ms()
    assert due_ms == 60_000
    group.tick(due_ms)
    assert list(group.members) == ["leader"] and group.state is GroupState.PREPARING_REBALANCE


def test_a_group_whose_members_all_have_their_share_stays_as_it_is() -> None:
    group = ClassicGroup("g", 0)
    join(group, "leader")
    group.sync("leader", None, 1, ("consumer", "a"), {"leader": b"all"}, 0, [].append)
    group.complete_save(None, group.version, 0)
    for now_ms in range(0, 70_000, 5_000):
        assert group.heartbeat("leader", None, 1, now_ms) == 0
        group.tick(now_ms)
    assert group.state is GroupState.STABLE and group.generation_id == 1
    assert group.next_deadline_ms() == 65_000 + 10_000
