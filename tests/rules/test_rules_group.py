"""A classic group by itself: what each member is answered, and what time does to it."""

from __future__ import annotations

from oncelog.errors import (
    FencedInstanceId,
    IllegalGeneration,
    UnknownMemberId,
)
from oncelog.rules.group import ClassicGroup
from oncelog.rules.group_member import (
    PROTOCOL_BYTES,
    GroupState,
    JoinAnswer,
    JoinedMember,
    JoinRequest,
    Member,
    SyncAnswer,
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
    requires_known_id: bool = False,
    knows_skip: bool = True,
) -> JoinRequest:
    """Return a join that offers a protocol for each letter, with the letter twice as its metadata."""
    offered = tuple((name, (name * 2).encode()) for name in protocols)
    return JoinRequest(
        member_id, instance, "client", "host", session_ms, rebalance_ms, "consumer", offered,
        requires_known_id=requires_known_id, knows_skip=knows_skip,
    )  # fmt: skip


def join(group: ClassicGroup, name: str, said: JoinRequest, now_ms: int = 0) -> list[JoinAnswer]:
    answers: list[JoinAnswer] = []
    group.join(said, name, now_ms, answers.append)
    return answers


def sync(
    group: ClassicGroup, name: str, shares: dict[str, bytes] | None = None, now_ms: int = 0
) -> list[SyncAnswer]:
    answers: list[SyncAnswer] = []
    group.sync(name, None, group.generation_id, (None, None), shares or {}, now_ms, answers.append)
    return answers


def completing(*names: str, session_ms: int = SESSION_MS) -> ClassicGroup:
    """Return a group that these have joined, led by the first. It is in generation 2 from two members on."""
    group = ClassicGroup("g", 0)
    for name in names:
        join(group, name, request(session_ms=session_ms))
    (answer,) = join(group, "", request(member_id=names[0], session_ms=session_ms))
    assert (answer.error_code, answer.leader, group.state) == (0, names[0], GroupState.COMPLETING_REBALANCE)
    return group


def stable(*names: str) -> ClassicGroup:
    """Return a group in which these have their shares, the first one as the leader."""
    group = completing(*names)
    for name in reversed(names):
        sync(group, name, {each: each.encode() for each in names})
    group.saved(None, group.mark, 0)
    assert group.state is GroupState.STABLE
    group.is_unsaved = False
    return group


def test_metadata_bytes_count_names_metadata_and_a_fixed_part() -> None:
    assert PROTOCOL_BYTES == 64
    assert metadata_bytes([("range", b"123"), ("", b"")]) == 5 + 3 + 64 + 64


def test_a_loaded_member_counts_in_the_groups_metadata_and_protocols() -> None:
    group = ClassicGroup("g", 0)
    group.admit(Member("m", None, "", "", 0, 0, (("a", b"12"),)))
    assert group.metadata_bytes == 1 + 2 + 64
    assert group.common_protocols() == {"a"}


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
    assert answers == [JoinAnswer(UnknownMemberId.code, "")]


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
    join(group, "given", request(requires_known_id=True), 500)
    assert group.leave([("m", None)], 1_000) == [0]
    assert (group.state, group.next_deadline_ms()) == (GroupState.PREPARING_REBALANCE, 1_000)
    group.tick(1_000)
    assert group.state is GroupState.EMPTY


def test_a_member_that_waits_for_its_share_keeps_its_session() -> None:
    group = completing("leader", "follower")
    waiting = sync(group, "follower")
    group.heartbeat("leader", None, 2, 9_000)
    group.tick(SESSION_MS)
    # The time-out of a member that waits is no reason for another tick at the same time.
    assert group.next_deadline_ms() == 19_000
    group.heartbeat("leader", None, 2, 15_000)
    sync(group, "leader", {"follower": b"all"}, 15_000)
    group.saved(None, group.mark, 15_000)
    assert waiting == [SyncAnswer(0, "consumer", "a", b"all")]
    group.tick(24_999)
    assert list(group.members) == ["leader", "follower"]
    group.tick(25_000)
    assert not group.members


def test_the_next_deadline_is_the_first_of_all_sessions() -> None:
    group = stable("m", "n")
    group.heartbeat("m", None, 2, 5_000)
    group.heartbeat("n", None, 2, 7_000)
    assert group.next_deadline_ms() == SESSION_MS  # no later than the first: `tick` makes it exact
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
    assert waiting == [SyncAnswer(UnknownMemberId.code)]
    joins = join(group, "third", request())
    assert group.leave([("third", None)], 0) == [0]
    assert joins == [JoinAnswer(UnknownMemberId.code, "")]


def test_an_instance_that_left_is_unknown_and_may_join_again() -> None:
    group = ClassicGroup("g", 0)
    join(group, "first", request(instance="i"))
    join(group, "other", request())
    assert group.heartbeat("other", "i", 1, 0) == FencedInstanceId.code
    assert group.leave([("", "i")], 0) == [0]
    assert group.heartbeat("first", "i", 1, 0) == UnknownMemberId.code
    join(group, "second", request(instance="i"))
    assert group.static_members == {"i": "second"} and list(group.members) == ["other", "second"]


def test_leadership_goes_to_the_longest_member_when_the_leader_leaves() -> None:
    group = stable("m", "n", "o")
    group.leave([("n", None)], 0)
    assert group.leader_id == "m"
    group.leave([("m", None)], 0)
    assert group.leader_id == "o"
    group.leave([("o", None)], 0)
    assert group.leader_id is None


def test_an_instance_that_comes_again_fences_what_its_old_member_waits_for() -> None:
    group = ClassicGroup("g", 0)
    join(group, "leader", request())
    joins = join(group, "old", request(instance="i"))
    join(group, "newer", request(instance="i"))
    assert joins == [JoinAnswer(FencedInstanceId.code, "old")]
    join(group, "", request(member_id="leader"))
    syncs: list[SyncAnswer] = []
    group.sync("newer", "i", 2, (None, None), {}, 0, syncs.append)
    join(group, "newest", request(instance="i"))
    assert syncs == [SyncAnswer(FencedInstanceId.code)]
    assert group.heartbeat("newest", "i", 1, 0) == IllegalGeneration.code


def test_an_instance_that_comes_again_has_its_session_and_its_share() -> None:
    group = ClassicGroup("g", 0)
    join(group, "old", request(instance="i"))
    group.sync("old", "i", 1, (None, None), {"old": b"all"}, 0, [].append)
    group.saved(None, group.mark, 0)
    (answer,) = join(group, "new", request(instance="i"), 2_000)
    assert (answer.error_code, answer.generation_id, answer.leader) == (0, 1, "new")
    assert answer.skip_assignment and [each.member_id for each in answer.members] == ["new"]
    told: list[SyncAnswer] = []
    group.sync("new", "i", 1, (None, None), {}, 2_000, told.append)
    assert told == [SyncAnswer(0, "consumer", "a", b"all")]
    join(group, "newer", request(instance="i"), 3_000)
    group.tick(12_999)
    assert list(group.members) == ["newer"]
    group.tick(13_000)
    assert not group.members
