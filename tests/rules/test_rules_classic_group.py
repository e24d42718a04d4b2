"""Tests of one classic group: the responses to its members, and the passing of time."""

from __future__ import annotations

import pytest

from oncelog.errors import (
    BrokerError,
    CoordinatorNotAvailable,
    FencedInstanceId,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    MemberIdRequired,
    NotCoordinator,
    RebalanceInProgress,
    UnknownMemberId,
)
from oncelog.rules.groups.classic import (
    PROTOCOL_BYTES,
    ClassicGroup,
    GroupState,
    JoinedMember,
    JoinRequest,
    JoinResult,
    Member,
    SyncResult,
    metadata_bytes,
)

SESSION_MS, REBALANCE_MS, NEW_MEMBER_MS = 10_000, 60_000, 300_000


def request(
    protocols: str = "a",
    member_id: str = "",
    instance: str | None = None,
    *,
    session_ms: int = SESSION_MS,
    rebalance_ms: int = REBALANCE_MS,
    requires_known_member_id: bool = False,
    supports_skip_assignment: bool = True,
) -> JoinRequest:
    """Return a JoinGroup request with a protocol for each letter. Its metadata is the letter twice."""
    offered = tuple((name, (name * 2).encode()) for name in protocols)
    return JoinRequest(
        member_id, instance, "client", "host", session_ms, rebalance_ms, "consumer", offered,
        requires_known_member_id=requires_known_member_id, supports_skip_assignment=supports_skip_assignment,
    )  # fmt: skip


def join(group: ClassicGroup, name: str, said: JoinRequest, now_ms: int = 0) -> list[JoinResult]:
    answers: list[JoinResult] = []
    group.join(said, name, now_ms, answers.append)
    return answers


def sync(
    group: ClassicGroup, name: str, shares: dict[str, bytes] | None = None, now_ms: int = 0
) -> list[SyncResult]:
    answers: list[SyncResult] = []
    group.sync(name, None, group.generation_id, (None, None), shares or {}, now_ms, answers.append)
    return answers


def completing(*names: str, session_ms: int = SESSION_MS) -> ClassicGroup:
    """Return a group that waits for the assignment of its leader, the first member.

    With several members, the generation is 2.
    """
    group = ClassicGroup("g", 0)
    for name in names:
        join(group, name, request(session_ms=session_ms))
    (answer,) = join(group, "", request(member_id=names[0], session_ms=session_ms))
    assert (answer.error_code, answer.leader, group.state) == (0, names[0], GroupState.COMPLETING_REBALANCE)
    return group


def stable(*names: str) -> ClassicGroup:
    """Return a stable group of these members. The first one is the leader."""
    group = completing(*names)
    for name in reversed(names):
        sync(group, name, {each: each.encode() for each in names})
    group.complete_save(None, group.version, 0)
    assert group.state is GroupState.STABLE
    group.is_unsaved = False
    return group


def test_metadata_bytes_count_names_metadata_and_a_fixed_part() -> None:
    assert PROTOCOL_BYTES == 64
    assert metadata_bytes([("range", b"123"), ("", b"")]) == 5 + 3 + 64 + 64


def test_a_loaded_member_counts_in_the_groups_metadata_and_protocols() -> None:
    group = ClassicGroup("g", 0)
    group.members.add(Member("m", None, "", "", 0, 0, (("a", b"12"),)))
    assert group.members.metadata_bytes == len("m") + 1 + 2 + 64
    assert group.members.common_protocols() == {"a"}


def test_the_leader_gets_each_members_metadata_for_the_protocol_that_most_prefer() -> None:
    group = ClassicGroup("g", 0)
    join(group, "m", request("xba"))
    second, third = join(group, "n", request("bay", instance="i")), join(group, "o", request("abc"))
    (first,) = join(group, "", request("xba", "m"))
    assert (first.leader, first.protocol_name, first.generation_id) == ("m", "b", 2)
    assert first.members == (
        JoinedMember("m", None, b"bb"),
        JoinedMember("n", "i", b"bb"),
        JoinedMember("o", None, b"bb"),
    )
    for (follower,) in (second, third):
        assert (follower.error_code, follower.leader, follower.members) == (0, "m", ())


def test_a_new_member_waits_for_its_first_generation_for_five_minutes() -> None:
    group = ClassicGroup("g", 0)
    join(group, "old", request(session_ms=400_000, rebalance_ms=500_000))
    answers = join(group, "new", request(session_ms=400_000))
    assert group.next_deadline_ms() == NEW_MEMBER_MS
    group.tick(NEW_MEMBER_MS - 1)
    assert list(group.members) == ["old", "new"] and not answers
    group.tick(NEW_MEMBER_MS)
    assert list(group.members) == ["old"]
    assert answers == [JoinResult(UnknownMemberId.code, "")]


def test_a_rebalance_waits_for_the_longest_rebalance_time_out() -> None:
    group = ClassicGroup("g", 0)
    join(group, "slow", request(session_ms=100_000, rebalance_ms=60_000))
    answers = join(group, "quick", request(session_ms=100_000, rebalance_ms=5_000))
    assert group.next_deadline_ms() == 60_000
    group.tick(59_999)
    assert not answers
    group.tick(60_000)
    assert [(answer.generation_id, answer.leader) for answer in answers] == [(2, "quick")]
    assert list(group.members) == ["quick"]


def test_a_rebalance_without_members_ends_at_once_despite_an_id_that_was_given_out() -> None:
    group = stable("m")
    join(group, "given", request(requires_known_member_id=True), 500)
    assert group.leave([("m", None)], 1_000) == [0]
    assert (group.state, group.next_deadline_ms()) == (GroupState.PREPARING_REBALANCE, 1_000)
    group.tick(1_000)
    assert group.state is GroupState.EMPTY


def test_a_member_that_waits_for_its_share_keeps_its_session() -> None:
    group = completing("leader", "follower")
    waiting = sync(group, "follower")
    group.heartbeat("leader", None, 2, 9_000)
    group.tick(SESSION_MS)
    # The follower waits for its SyncGroup response, so its session sets no deadline.
    assert group.next_deadline_ms() == 19_000
    group.heartbeat("leader", None, 2, 15_000)
    sync(group, "leader", {"follower": b"all"}, 15_000)
    group.complete_save(None, group.version, 15_000)
    assert waiting == [SyncResult(0, "consumer", "a", b"all")]
    group.tick(24_999)
    assert list(group.members) == ["leader", "follower"]
    group.tick(25_000)
    assert not group.members


def test_the_next_deadline_is_the_first_of_all_sessions() -> None:
    group = stable("m", "n")
    group.heartbeat("m", None, 2, 5_000)
    group.heartbeat("n", None, 2, 7_000)
    # This deadline is that of an earlier heartbeat; `tick` updates it.
    assert group.next_deadline_ms() == SESSION_MS
    group.tick(SESSION_MS)
    assert group.next_deadline_ms() == 15_000
    group.tick(15_000)
    assert list(group.members) == ["n"]


def test_a_group_without_members_has_no_deadline() -> None:
    group = stable("m")
    assert group.next_deadline_ms() == SESSION_MS
    group.leave([("m", None)], 0)
    assert (group.state, group.next_deadline_ms()) == (GroupState.EMPTY, None)


def test_a_member_that_leaves_while_it_waits_is_told() -> None:
    group = completing("leader", "follower")
    waiting = sync(group, "follower")
    assert group.leave([("follower", None)], 0) == [0]
    assert waiting == [SyncResult(UnknownMemberId.code)]
    joins = join(group, "third", request())
    assert group.leave([("third", None)], 0) == [0]
    assert joins == [JoinResult(UnknownMemberId.code, "")]


def test_an_instance_that_left_is_unknown_and_may_join_again() -> None:
    group = ClassicGroup("g", 0)
    join(group, "first", request(instance="i"))
    join(group, "other", request())
    assert group.heartbeat("other", "i", 1, 0) == FencedInstanceId.code
    assert group.leave([("", "i")], 0) == [0]
    assert group.heartbeat("first", "i", 1, 0) == UnknownMemberId.code
    join(group, "second", request(instance="i"))
    assert group.members.static_ids == {"i": "second"} and list(group.members) == ["other", "second"]


def test_leadership_goes_to_the_longest_member_when_the_leader_leaves() -> None:
    group = stable("m", "n", "o")
    group.leave([("n", None)], 0)
    assert group.members.leader_id == "m"
    group.leave([("m", None)], 0)
    assert group.members.leader_id == "o"
    group.leave([("o", None)], 0)
    assert group.members.leader_id is None


def test_an_instance_that_comes_again_fences_what_its_old_member_waits_for() -> None:
    group = ClassicGroup("g", 0)
    join(group, "leader", request())
    joins = join(group, "old", request(instance="i"))
    join(group, "newer", request(instance="i"))
    assert joins == [JoinResult(FencedInstanceId.code, "old")]
    join(group, "", request(member_id="leader"))
    syncs: list[SyncResult] = []
    group.sync("newer", "i", 2, (None, None), {}, 0, syncs.append)
    join(group, "newest", request(instance="i"))
    assert syncs == [SyncResult(FencedInstanceId.code)]
    assert group.heartbeat("newest", "i", 1, 0) == IllegalGeneration.code


def test_an_instance_that_comes_again_has_its_session_and_its_share() -> None:
    group = ClassicGroup("g", 0)
    join(group, "old", request(instance="i"))
    group.sync("old", "i", 1, (None, None), {"old": b"all"}, 0, [].append)
    group.complete_save(None, group.version, 0)
    answers = join(group, "new", request(instance="i"), 2_000)
    group.complete_save(None, group.version, 2_000)
    (answer,) = answers
    assert (answer.error_code, answer.generation_id, answer.leader) == (0, 1, "new")
    assert answer.skip_assignment and [member.member_id for member in answer.members] == ["new"]
    told: list[SyncResult] = []
    group.sync("new", "i", 1, (None, None), {}, 2_000, told.append)
    assert told == [SyncResult(0, "consumer", "a", b"all")]
    join(group, "newer", request(instance="i"), 3_000)
    group.complete_save(None, group.version, 3_000)
    group.tick(12_999)
    assert list(group.members) == ["newer"]
    group.tick(13_000)
    assert not group.members


# Joining


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (request(), JoinResult(GroupMaxSizeReached.code, "")),
        (request(member_id="stranger"), JoinResult(GroupMaxSizeReached.code, "")),
        (request("b", member_id="m"), JoinResult(InconsistentGroupProtocol.code, "m")),
        (request(member_id="m", instance="i"), JoinResult(UnknownMemberId.code, "m")),
    ],
)
def test_a_join_of_a_full_group_that_is_refused(said: JoinRequest, expected: JoinResult) -> None:
    group = ClassicGroup("g", 0, max_size=2)
    join(group, "m", request())
    join(group, "n", request())
    join(group, "", request(member_id="m"))
    assert join(group, "fresh", said) == [expected]
    assert list(group.members) == ["m", "n"] and group.state is GroupState.COMPLETING_REBALANCE


def test_a_member_id_that_nobody_has_is_unknown() -> None:
    group = ClassicGroup("g", 0)
    unknown = [JoinResult(UnknownMemberId.code, "stranger")]
    assert join(group, "", request(member_id="stranger")) == unknown
    join(group, "m", request())
    assert join(group, "", request(member_id="stranger")) == unknown
    assert group.heartbeat("stranger", None, 1, 0) == UnknownMemberId.code


def test_a_dead_group_has_no_coordinator_for_anybody() -> None:
    group = stable("m")
    group.state = GroupState.DEAD
    code = CoordinatorNotAvailable.code
    assert join(group, "n", request()) == [JoinResult(code, "")]
    assert sync(group, "m") == [SyncResult(code)]
    assert group.heartbeat("m", None, 1, 0) == code
    assert group.leave([("m", None)], 0) == [code]
    assert group.commit_error("m", None, 1, is_transactional=False) is CoordinatorNotAvailable


def test_a_group_is_unused_until_somebody_joins_or_is_about_to() -> None:
    group = ClassicGroup("g", 0)
    assert group.is_unused and not group.is_unsaved
    join(group, "given", request(requires_known_member_id=True))
    assert not group.is_unused
    group.tick(SESSION_MS)
    assert group.is_unused
    join(group, "m", request())
    assert not group.is_unused
    group.leave([("m", None)], 0)
    assert not group.is_unused and group.is_unsaved


def test_a_members_metadata_replaces_what_it_said_before() -> None:
    own_bytes = 67 + len("m" + "i" + "client" + "host")
    group = ClassicGroup("g", 0, max_metadata_bytes=own_bytes)
    assert join(group, "m", request("a", instance="i"))[0].error_code == 0
    assert join(group, "n", request("a"))[0].error_code == GroupMaxSizeReached.code
    assert join(group, "", request("b", "m", "i"))[0].error_code == InconsistentGroupProtocol.code
    assert join(group, "", request("a", "m", "i"))[0].error_code == 0
    assert join(group, "n", request("a", instance="i"))[0].error_code == 0
    assert list(group.members) == ["n"]


def test_the_metadata_of_all_members_counts_together() -> None:
    own_bytes = 67 + len("m" + "client" + "host")
    for limit, error in ((2 * own_bytes - 1, GroupMaxSizeReached), (2 * own_bytes, None)):
        group = ClassicGroup("g", 0, max_metadata_bytes=limit)
        join(group, "m", request())
        answers = join(group, "n", request())
        assert [answer.error_code for answer in answers] == ([error.code] if error else [])


def test_an_assigned_member_id_that_was_used_delays_nobody() -> None:
    group = stable("m")
    (given,) = join(group, "given", request(requires_known_member_id=True))
    assert given == JoinResult(MemberIdRequired.code, "given")
    waiting = join(group, "", request(member_id="given"))
    (first,) = join(group, "", request(member_id="m"))
    assert (first.generation_id, [member.member_id for member in first.members]) == (2, ["m", "given"])
    assert [answer.generation_id for answer in waiting] == [2]


def test_an_assigned_member_id_delays_a_rebalance_until_its_session_ends() -> None:
    group = stable("m")
    join(group, "given", request(requires_known_member_id=True, session_ms=6_000))
    waiting = join(group, "", request(member_id="m"))
    assert not waiting and group.next_deadline_ms() == 6_000
    group.tick(5_999)
    assert not waiting
    group.tick(6_000)
    assert [answer.generation_id for answer in waiting] == [2]
    assert join(group, "", request(member_id="given"), 6_000)[0].error_code == UnknownMemberId.code


def test_an_assigned_member_id_that_left_is_unknown() -> None:
    group = stable("m")
    join(group, "given", request(requires_known_member_id=True))
    assert group.leave([("given", None)], 0) == [0]
    assert join(group, "", request(member_id="given"))[0].error_code == UnknownMemberId.code


def test_an_unchanged_rejoin_of_a_stable_group_changes_nothing_unless_the_leader_sends_it() -> None:
    group = stable("leader", "follower")
    (answer,) = join(group, "", request(member_id="follower"), 5_000)
    assert answer == JoinResult(0, "follower", 2, "consumer", "a", "leader")
    assert group.state is GroupState.STABLE
    group.tick(SESSION_MS)  # the leader's session ends; the join has renewed the follower's session
    assert list(group.members) == ["follower"]

    group = stable("leader", "follower")
    assert not join(group, "", request("ab", "follower"))
    assert group.state is GroupState.PREPARING_REBALANCE

    group = stable("leader", "follower")
    assert not join(group, "", request(member_id="leader"))
    assert group.state is GroupState.PREPARING_REBALANCE


def test_an_unchanged_rejoin_before_the_assignment_gets_the_same_answer() -> None:
    group = completing("leader", "follower")
    (follower,) = join(group, "", request(member_id="follower"))
    (leader,) = join(group, "", request(member_id="leader"))
    assert (follower.generation_id, follower.members) == (2, ())
    assert leader.generation_id == 2
    assert [member.member_id for member in leader.members] == ["leader", "follower"]
    assert group.state is GroupState.COMPLETING_REBALANCE
    assert not join(group, "", request("ab", "follower"))
    assert group.state is GroupState.PREPARING_REBALANCE


def test_a_first_rebalance_waits_the_initial_delay_behind_each_join_up_to_the_longest_time_out() -> None:
    group = ClassicGroup("g", 0, initial_delay_ms=3_000)
    answers = join(group, "m", request(rebalance_ms=6_000), 100)
    assert group.next_deadline_ms() == 3_100
    join(group, "n", request(rebalance_ms=6_000), 2_000)
    assert group.next_deadline_ms() == 5_000
    join(group, "o", request(rebalance_ms=6_000), 4_000)
    assert group.next_deadline_ms() == 6_100
    group.tick(6_099)
    assert not answers
    group.tick(6_100)
    assert [answer.generation_id for answer in answers] == [1]


def test_a_later_rebalance_is_not_extended_by_joins() -> None:
    group = stable("m")
    for name, now_ms in (("n", 1_000), ("o", 2_000)):
        join(group, name, request(), now_ms)
        group.heartbeat("m", None, 1, now_ms + 55_000)
    group.tick(60_999)
    assert "m" in group.members
    group.tick(61_000)
    assert list(group.members) == ["n", "o"] and group.generation_id == 2


# Static members


def test_a_rebalance_without_time_waits_a_second_for_static_members() -> None:
    group = ClassicGroup("g", 0)
    join(group, "old", request(instance="i", session_ms=100_000, rebalance_ms=0))
    join(group, "m", request(rebalance_ms=0))
    group.leave([("m", None)], 0)
    group.tick(0)
    assert (group.state, group.next_deadline_ms()) == (GroupState.PREPARING_REBALANCE, 1_000)
    # the group still waits for its static member
    assert not join(group, "late", request(rebalance_ms=2_000), 500)
    group.tick(1_000)
    assert (group.state, group.generation_id, group.members.leader_id) == (
        GroupState.COMPLETING_REBALANCE,
        2,
        "late",
    )

    group = ClassicGroup("g", 0)
    join(group, "old", request(instance="i", session_ms=100_000, rebalance_ms=5_000))
    join(group, "m", request())
    group.leave([("m", None)], 0)
    group.tick(60_000)
    assert group.next_deadline_ms() == 65_000


def test_the_first_that_joined_leads_in_the_place_of_a_static_leader_that_did_not() -> None:
    group = ClassicGroup("g", 0)
    join(group, "leader", request(instance="i", session_ms=100_000))
    joined = [join(group, name, request(session_ms=100_000)) for name in ("m", "n")]
    group.tick(60_000)
    assert list(group.members) == ["leader", "m", "n"]
    assert [answer.leader for (answer,) in joined] == ["m", "m"]
    assert [len(answer.members) for (answer,) in joined] == [3, 0]


def test_a_leader_that_joins_again_leads_on() -> None:
    group = stable("m", "n")
    join(group, "", request("ab", "n"))
    join(group, "", request(member_id="m"))
    assert (group.generation_id, group.members.leader_id) == (3, "m")


def test_an_old_client_under_an_instance_that_led_is_told_the_old_leader() -> None:
    group = ClassicGroup("g", 0)
    join(group, "old", request(instance="i"))
    group.sync("old", "i", 1, (None, None), {"old": b"all"}, 0, [].append)
    group.complete_save(None, group.version, 0)
    group.is_unsaved = False
    answers = join(group, "new", request(instance="i", supports_skip_assignment=False))
    assert group.members.leader_id == "new" and group.is_unsaved and not answers
    group.complete_save(None, group.version, 0)
    assert answers == [JoinResult(0, "new", 1, "consumer", "a", "old")]


def stable_static(*instances: str) -> ClassicGroup:
    """Return a stable group at generation 1 of static members: a0 of instance a, b0 of b."""
    group = ClassicGroup("g", 0, initial_delay_ms=1)
    for name in instances:
        join(group, f"{name}0", request(instance=name))
    group.tick(1)
    for name in instances:
        group.sync(
            f"{name}0", name, 1, (None, None), {f"{instance}0": b"1" for instance in instances}, 1, [].append
        )
    group.complete_save(None, group.version, 1)
    assert (group.state, group.generation_id) == (GroupState.STABLE, 1)
    return group


def test_each_static_member_gets_its_new_id_once_that_one_is_stored() -> None:
    group = stable_static("a", "b")
    marks, answers = [group.version], []
    for name in ("a", "b"):
        answers.append(join(group, f"{name}1", request(instance=name), 2))
        marks.append(group.version)
    group.tick(50_000)  # a session does not end while the client waits for a response
    group.complete_save(None, marks[0], 3)
    assert answers == [[], []]
    group.complete_save(None, marks[1], 3)
    assert [[each.member_id for each in told] for told in answers] == [["a1"], []]
    group.complete_save(NotCoordinator("full"), marks[2], 3)
    assert answers[1] == [JoinResult(NotCoordinator.code, "")]
    assert group.is_unsaved
    group.complete_save(None, group.version, 4)
    assert [len(told) for told in answers] == [1, 1]


def test_a_rebalance_overtakes_a_static_member_that_waits_for_its_new_id() -> None:
    group = stable_static("a", "b")
    replaced = join(group, "a1", request(instance="a"), 2)
    mark = group.version
    other = join(group, "c0", request(instance="c"), 3)
    group.complete_save(None, mark, 3)
    assert not replaced
    join(group, "", request(member_id="b0", instance="b"), 4)
    (answer,) = replaced
    assert (answer.error_code, answer.member_id, answer.generation_id) == (0, "a1", 2)
    assert not answer.skip_assignment and len(other) == 1
    group.complete_save(None, group.version, 5)
    assert len(replaced) == 1


def test_an_instance_that_comes_again_need_not_ask_for_its_share() -> None:
    group = ClassicGroup("g", 0)
    join(group, "old", request(instance="i"))
    group.sync("old", "i", 1, (None, None), {"old": b"all"}, 0, [].append)
    group.complete_save(None, group.version, 0)
    join(group, "new", request(instance="i"))
    for now_ms in range(0, 70_000, 5_000):
        assert group.heartbeat("new", "i", 1, now_ms) == 0
        group.tick(now_ms)
    assert group.state is GroupState.STABLE


def test_an_instance_that_comes_again_during_a_rebalance_joins_it() -> None:
    group = ClassicGroup("g", 0)
    join(group, "m", request())
    join(group, "old", request(instance="i"))
    waiting = join(group, "", request(member_id="m"))
    assert waiting[0].generation_id == 2
    again = join(group, "new", request(instance="i"))
    assert not again and group.state is GroupState.PREPARING_REBALANCE
    (answer,) = join(group, "", request(member_id="m"))
    assert (answer.generation_id, [each.generation_id for each in again]) == (3, [3])


# From generation to generation


def test_a_rebalance_sends_those_that_wait_for_a_share_to_join_and_takes_no_share_from_others() -> None:
    group = completing("leader", "follower")
    waiting = sync(group, "follower")
    join(group, "third", request(), 1_000)
    assert waiting == [SyncResult(RebalanceInProgress.code)]
    assert group.heartbeat("leader", None, 2, 1_000) == RebalanceInProgress.code

    group = stable("leader", "follower")
    join(group, "third", request(), 1_000)
    assert [each.assignment for each in group.members.values()] == [b"leader", b"follower", b""]


def test_a_member_that_waits_for_a_later_generation_is_kept() -> None:
    group = ClassicGroup("g", 0)
    join(group, "m", request(session_ms=400_000, rebalance_ms=500_000))
    join(group, "n", request(session_ms=400_000, rebalance_ms=500_000))
    join(group, "", request(member_id="m", session_ms=400_000, rebalance_ms=500_000))
    # This join has the default session time-out of ten seconds, but n is kept while its join waits.
    assert not join(group, "", request("ab", "n"))
    group.tick(399_999)
    assert list(group.members) == ["m", "n"]
    group.tick(400_000)
    assert list(group.members) == ["n"] and group.generation_id == 3


def test_a_silent_member_that_goes_sends_the_others_to_join() -> None:
    group = stable("m", "n")
    group.heartbeat("m", None, 2, 5_000)
    group.tick(SESSION_MS)
    assert list(group.members) == ["m"] and group.state is GroupState.PREPARING_REBALANCE


def test_leaving_counts_only_for_members() -> None:
    group = stable("m", "n")
    assert group.leave([("stranger", None), ("m", "i"), ("", "i")], 0) == [UnknownMemberId.code] * 3
    assert group.state is GroupState.STABLE
    assert group.leave([("m", None), ("m", None)], 0) == [0, UnknownMemberId.code]
    assert group.state is GroupState.PREPARING_REBALANCE
    assert ClassicGroup("empty", 0).leave([("m", None)], 0) == [UnknownMemberId.code]


def test_an_id_given_out_by_an_empty_group_leaves_it_empty() -> None:
    group = ClassicGroup("g", 0)
    join(group, "given", request(requires_known_member_id=True))
    assert group.leave([("given", None)], 0) == [0]
    assert (group.state, group.generation_id, group.is_unsaved) == (GroupState.EMPTY, 0, False)


def test_an_instance_is_not_removed_under_another_members_id() -> None:
    group = ClassicGroup("g", 0)
    join(group, "m", request(instance="i"))
    assert group.leave([("other", "i")], 0) == [FencedInstanceId.code]
    assert list(group.members) == ["m"]


# The assignment


@pytest.mark.parametrize(
    ("member_id", "generation_id", "protocol", "error"),
    [
        ("stranger", 2, (None, None), UnknownMemberId),
        ("stranger", 2, ("connect", None), UnknownMemberId),
        ("follower", 1, (None, None), IllegalGeneration),
        ("follower", 3, (None, None), IllegalGeneration),
        ("follower", 2, ("connect", None), InconsistentGroupProtocol),
        ("follower", 2, ("consumer", "b"), InconsistentGroupProtocol),
        ("follower", 2, ("connect", "a"), InconsistentGroupProtocol),
    ],
)
def test_a_sync_that_is_refused(
    member_id: str, generation_id: int, protocol: tuple[str | None, str | None], error: type[BrokerError]
) -> None:
    group = completing("leader", "follower")
    told: list[SyncResult] = []
    group.sync(member_id, None, generation_id, protocol, {}, 0, told.append)
    assert told == [SyncResult(error.code)]


def test_a_sync_during_a_rebalance_sends_its_member_to_join() -> None:
    group = stable("m", "n")
    join(group, "o", request())
    assert sync(group, "m") == [SyncResult(RebalanceInProgress.code)]
    told: list[SyncResult] = []
    group.sync("m", None, 2, ("connect", None), {}, 0, told.append)
    assert told == [SyncResult(InconsistentGroupProtocol.code)]


def test_a_sync_begins_the_session_again() -> None:
    group = stable("m")
    assert sync(group, "m", now_ms=5_000) == [SyncResult(0, "consumer", "a", b"m")]
    group.tick(14_999)
    assert list(group.members) == ["m"]


def test_shares_that_could_not_be_stored_are_not_given_out() -> None:
    group = completing("leader", "follower")
    waiting = sync(group, "follower")
    sync(group, "leader", {"follower": b"all"})
    group.complete_save(NotCoordinator("the disk"), group.version, 0)
    assert waiting == [SyncResult(NotCoordinator.code)]
    assert group.state is GroupState.PREPARING_REBALANCE
    assert group.members["follower"].assignment == b""


@pytest.mark.parametrize(
    ("error", "again"),
    [(NotCoordinator("the disk"), True), (CoordinatorNotAvailable("late"), False), (None, False)],
)
def test_a_settled_group_that_the_disk_refused_is_stored_again(
    error: BrokerError | None, again: bool
) -> None:
    group = stable("m")
    group.complete_save(error, group.version, 0)
    assert (group.state, group.is_unsaved) == (GroupState.STABLE, again)
    group.leave([("m", None)], 0)
    group.is_unsaved = False
    group.complete_save(error, group.version, 0)
    assert (group.state, group.is_unsaved) == (GroupState.EMPTY, again)

    group = completing("m")
    group.is_unsaved = False
    group.complete_save(error, group.version, 0)
    assert not group.is_unsaved


# Offset commits

EMPTY, PREPARING, COMPLETING, STABLE = (
    GroupState.EMPTY, GroupState.PREPARING_REBALANCE, GroupState.COMPLETING_REBALANCE, GroupState.STABLE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("state", "member_id", "instance", "generation_id", "outside", "within"),
    [
        # The last two columns: the error of a commit outside a transaction, and of one within a transaction.
        (EMPTY, "", None, -1, None, None),
        (EMPTY, "m", "i", -1, None, None),
        (EMPTY, "", None, 0, UnknownMemberId, UnknownMemberId),
        (EMPTY, "m", None, 1, UnknownMemberId, UnknownMemberId),
        (STABLE, "", None, -1, UnknownMemberId, None),
        (STABLE, "", "i", -1, UnknownMemberId, UnknownMemberId),
        (STABLE, "m", None, -1, IllegalGeneration, IllegalGeneration),
        (STABLE, "", None, 0, UnknownMemberId, UnknownMemberId),
        (STABLE, "stranger", None, 1, UnknownMemberId, UnknownMemberId),
        (STABLE, "m", None, 0, IllegalGeneration, IllegalGeneration),
        (STABLE, "m", None, 1, None, None),
        (PREPARING, "m", None, 1, None, None),
        (COMPLETING, "m", None, 1, RebalanceInProgress, None),
        (COMPLETING, "m", None, 2, IllegalGeneration, IllegalGeneration),
    ],
)
def test_a_classic_group_accepts_offset_commits_as_in_the_table(
    state: GroupState,
    member_id: str,
    instance: str | None,
    generation_id: int,
    outside: type[BrokerError] | None,
    within: type[BrokerError] | None,
) -> None:
    group = ClassicGroup("g", 0)
    if state is not EMPTY:
        group = completing("m") if state is COMPLETING else stable("m")
    if state is PREPARING:
        join(group, "n", request())
    assert group.state is state
    for is_transactional, error in ((False, outside), (True, within)):
        refusal = group.commit_error(member_id, instance, generation_id, is_transactional=is_transactional)
        assert refusal is error


@pytest.mark.parametrize(("state", "is_kept"), [(STABLE, True), (PREPARING, True), (COMPLETING, False)])
def test_a_commit_begins_the_session_again_unless_shares_are_being_made(
    state: GroupState, is_kept: bool
) -> None:
    group = completing("m") if state is COMPLETING else stable("m")
    if state is PREPARING:
        join(group, "n", request())
    assert group.state is state
    group.note_commit("m", 5_000)
    group.note_commit("stranger", 5_000)
    group.tick(SESSION_MS)
    assert ("m" in group.members) is is_kept
