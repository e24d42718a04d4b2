"""Groups in memory equal those that a start reads from the log, also after writes that failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.broker import RawClient, wait_until
from support.groups.node import GroupNode, commit, create, heartbeat, join, sync

from oncelog import errors
from oncelog.broker.coordinators.consumer_group_log import encode_record, replay_record
from oncelog.broker.coordinators.groups import SUBSCRIPTION_BYTES_PER_RECORD, GroupCoordinator
from oncelog.broker.coordinators.internal_topic import InternalTopic
from oncelog.broker.coordinators.offsets import Offsets
from oncelog.broker.stepwise import ELEMENT_RECORDS
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.rules.groups.classic import ClassicGroup, GroupState, Member
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.groups.consumer import CURRENT, MEMBER, ConsumerGroup, RecordKey
from oncelog.server.embedded import Broker
from oncelog.server.request_handler import MAX_ROUND_REQUESTS, METERED_RECORDS
from oncelog.types import TopicPartition
from oncelog.wire.messages import (
    ConsumerGroupDescribeRequest,
    DeleteGroupsRequest,
    DeleteTopicsRequest,
    DescribeGroupsRequest,
    HeartbeatRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    TxnOffsetCommitRequest,
)
from oncelog.wire.stored import ConsumerProtocolSubscription

TOPICS = ("t", "u")
MINUTE_MS = 60_000


class Players:
    """Clients of both protocols that react to the coordinator's responses as real ones do."""

    def __init__(self) -> None:
        self.node = GroupNode(
            offsets_retention_minutes=2,
            offsets_retention_check_interval_ms=30_000,
            group_consumer_session_timeout_ms=20_000,
        )
        for name in TOPICS:
            self.node.ask(create(name), 5)
        self.members: dict[tuple[str, int], str] = {}
        self.joins: dict[tuple[str, int], list[Any]] = {}
        self.epochs: dict[tuple[str, int], int] = {}

    def classic(self, group: str, client: int, action: int) -> None:
        """Play one action of a classic member: join, send the SyncGroup that the response requires, leave or
        commit.
        """
        key = group, client
        member = self.members.get(key, "")
        instance = f"static-{client}" if client == 0 else None
        joined = self.joins.get(key)
        answer = joined[0] if joined else None
        if answer is not None and answer.member_id:
            self.members[key] = member = answer.member_id
        is_in = answer is not None and not answer.error_code
        if action <= 1 or (action <= 5 and not is_in):
            names = ["range"] if action else ["sticky", "range"]
            metadata = ConsumerProtocolSubscription(topics=["t"]).to_bytes(0)
            protocols = [
                JoinGroupRequest.JoinGroupRequestProtocol(name=name, metadata=metadata) for name in names
            ]
            request = join(group, member, group_instance_id=instance, protocols=protocols)
            self.joins[key] = self.node.ask(request, 9, f"c{client}")
        elif action <= 5 and answer is not None:
            shares = {each.member_id: b"%d" % action for each in answer.members}
            self.node.ask(sync(group, member, answer.generation_id, shares), 3)
            who = {"generation_id_or_member_epoch": answer.generation_id, "member_id": member}
            self.node.ask(commit(group, action, **who), 7)
        elif action == 6:
            leaving = LeaveGroupRequest.MemberIdentity(member_id=member, group_instance_id=instance)
            self.node.ask(LeaveGroupRequest(group_id=group, members=[leaving]), 4)
            self.members.pop(key, None)
            self.joins.pop(key, None)

    def consumer(self, group: str, client: int, action: int) -> None:
        """Play one action of a member of the consumer protocol: join (again), heartbeat, leave or commit."""
        key, member = (group, client), f"m{client}"
        epoch = self.epochs.get(key, 0)
        instance = f"static-{client}" if client == 0 else None
        names = [["t"], ["t", "u"], ["u"], []][action % 4]
        if action == 0 or epoch == 0:
            request = heartbeat(group, member, subscribed_topic_names=names, instance_id=instance)
        elif action <= 2:
            request = heartbeat(group, member, epoch, subscribed_topic_names=names, instance_id=instance)
        elif action <= 4:
            request = heartbeat(group, member, epoch, instance_id=instance)
        elif action == 5:
            request = heartbeat(group, member, epoch, instance_id=instance, topic_partitions=[])
        else:
            request = heartbeat(group, member, -2 if instance else -1, instance_id=instance)
        (answer,) = self.node.ask(request, 1)
        self.epochs[key] = 0 if answer.error_code else max(answer.member_epoch, 0)
        self.node.ask(
            commit(group, action, generation_id_or_member_epoch=self.epochs[key], member_id=member), 9
        )

    def operator(self, group: str, topic: str, action: int) -> None:
        """Play one action of an operator: commit for an idle group, delete its offsets, the group or a topic,
        or let time pass.
        """
        if action <= 1:
            self.node.ask(commit(group, action, topic), 7)
        elif action == 2:
            partition = OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)
            topics = [OffsetDeleteRequest.OffsetDeleteRequestTopic(name=topic, partitions=[partition])]
            self.node.ask(OffsetDeleteRequest(group_id=group, topics=topics), 0)
        elif action == 3:
            self.node.ask(DeleteGroupsRequest(groups_names=[group]), 2)
        elif action == 4:
            self.node.ask(DeleteTopicsRequest(topic_names=[topic], timeout_ms=1000), 5)
            self.node.ask(create(topic), 5)
        elif action == 5:
            self.node.pass_time(7_000)
        else:
            self.node.pass_time(MINUTE_MS)


Steps = st.lists(
    st.tuples(
        st.sampled_from(["classic", "classic", "consumer", "consumer", "operator"]),
        st.integers(0, 1),
        st.integers(0, 2),
        st.integers(0, 6),
    ),
    min_size=10,
    max_size=70,
)


def play(players: Players, steps: list[tuple[str, int, int, int]]) -> None:
    """Play actions of both protocols: each protocol has its own group, and both share a third one."""
    for kind, number, client, action in steps:
        if kind == "classic":
            players.classic(f"g{number}", client, action)
        elif kind == "consumer":
            players.consumer(f"g{number + 1}", client, action)
        else:
            players.operator(f"g{client}", TOPICS[number], action)
        players.node.pass_time(100)


@pytest.mark.behaviour("T15")
@settings(deadline=None)
@given(Steps)
def test_a_coordinators_memory_equals_its_log(steps: list[tuple[str, int, int, int]]) -> None:
    players = Players()
    play(players, steps)
    before, changing = players.node.state(), players.node.between_generations
    players.node.restart()
    after = players.node.state()
    after["classic"] = {name: group for name, group in after["classic"].items() if name not in changing}
    assert after == before


def test_a_start_keeps_equal_names_of_members_once() -> None:
    """R1730: a start kept the names of each member until the end of the log: 5 MB each, for 40,000 names."""
    node = GroupNode()
    for member in "ab":
        node.ask(heartbeat("g", member, subscribed_topic_names=["x", "y"]), 1)
    node.ask(heartbeat("g", "a", -1), 1)
    stored = node.node.groups.consumers.get("g")
    assert stored is not None
    names = encode_record(stored, RecordKey(MEMBER, "b"))[1]
    group = ConsumerGroup("g", session_timeout_ms=1000)
    for member in "abc":
        replay_record(group, RecordKey(CURRENT, member), encode_record(stored, RecordKey(CURRENT, "b"))[1])
        replay_record(group, RecordKey(MEMBER, member), names)
    replay_record(group, RecordKey(MEMBER, "a"), None)
    # This is before `resume`, which is called at the end of the log.
    assert list(group.members) == ["b", "c"]
    assert group.members["b"].topics is group.members["c"].topics == frozenset("xy")


def test_a_restart_takes_nothing_from_members_whose_pattern_is_not_resolved_yet() -> None:
    node = GroupNode()
    for name in TOPICS:
        node.ask(create(name), 5)
    fields = {"subscribed_topic_names": None, "subscribed_topic_regex": "[tu]"}
    (joined,) = node.ask(heartbeat("g", "m", **fields), 1)
    before = node.state()
    assert len(joined.assignment.topic_partitions) == 2
    node.limits = Limits(pattern_step_cost=1)
    node.restart()
    consumers, background = node.node.groups.consumers, node.node.log_manager.background
    background.on_added = lambda: None  # the test runs the background tasks itself
    (answer,) = node.ask(heartbeat("g", "m", joined.member_epoch), 1)
    assert consumers.patterns.is_unresolved(["[tu]"])
    assert (answer.error_code, answer.member_epoch) == (0, joined.member_epoch)
    assert node.state() == before
    while consumers.patterns.is_unresolved(["[tu]"]):
        background.step()
    node.ask(heartbeat("g", "m", joined.member_epoch), 1)
    assert node.state() == before


# Expiry


def test_a_group_that_everybody_left_is_forgotten_whatever_its_protocol() -> None:
    node = GroupNode(offsets_retention_minutes=1, offsets_retention_check_interval_ms=5_000)
    node.ask(create("t"), 5)
    node.ask(heartbeat("consumer", "m"), 1)
    node.ask(commit("consumer", 4, generation_id_or_member_epoch=2, member_id="m"), 9)
    node.ask(heartbeat("consumer", "m", -1), 1)
    (answer,) = node.ask(join("classic"), 3)
    node.ask(sync("classic", answer.member_id, 1, {answer.member_id: b"x"}), 3)
    node.ask(commit("classic", 4, generation_id_or_member_epoch=1, member_id=answer.member_id), 7)
    node.ask(LeaveGroupRequest(group_id="classic", member_id=answer.member_id), 2)
    node.pass_time(50_000)
    assert set(node.node.groups.group_ids()) == {"classic", "consumer"}
    node.pass_time(15_000)
    assert set(node.node.groups.group_ids()) == set()
    node.restart()
    assert set(node.node.groups.group_ids()) == set()


def test_offsets_of_what_members_read_do_not_expire() -> None:
    node = GroupNode(offsets_retention_minutes=1, offsets_retention_check_interval_ms=5_000)
    node.ask(create("t"), 5)
    node.ask(create("u"), 5)
    (first,) = node.ask(heartbeat("g", "m"), 1)
    for topic in TOPICS:
        node.ask(commit("g", 4, topic, generation_id_or_member_epoch=2, member_id="m"), 9)
    for _ in range(4):
        node.pass_time(30_000)
        node.ask(heartbeat("g", "m", first.member_epoch), 1)
    assert {tp.topic for tp in node.node.groups.offsets.of("g")} == {"t"}


def patterned(group: str, member: str) -> Any:
    return heartbeat(group, member, subscribed_topic_names=None, subscribed_topic_regex="t.*")


def test_offsets_of_what_a_pattern_matches_outlive_a_restart() -> None:
    node = GroupNode(
        offsets_retention_minutes=1,
        offsets_retention_check_interval_ms=5_000,
        group_consumer_session_timeout_ms=60_000,
    )
    node.ask(create("t"), 5)
    (joined,) = node.ask(patterned("g", "m"), 1)
    node.ask(commit("g", 4, generation_id_or_member_epoch=joined.member_epoch, member_id="m"), 9)
    for _ in range(3):
        node.pass_time(30_000)
        node.ask(heartbeat("g", "m", joined.member_epoch), 1)
    node.restart()
    node.pass_time(10_000)  # expiry runs before the member's first heartbeat
    assert node.node.groups.offsets.of("g")
    node.ask(heartbeat("g", "m", joined.member_epoch), 1)
    node.pass_time(10_000)
    assert node.node.groups.offsets.of("g")


def test_a_member_that_joins_while_a_pattern_is_resolved_takes_nothing_from_others() -> None:
    node = GroupNode(offsets_retention_minutes=1)
    node.ask(create("t"), 5)
    (joined,) = node.ask(patterned("g", "m"), 1)
    node.ask(commit("g", 4, generation_id_or_member_epoch=joined.member_epoch, member_id="m"), 9)
    node.limits = Limits(pattern_step_cost=1)
    node.restart()
    groups, background = node.node.groups, node.node.log_manager.background
    background.on_added = lambda: None  # the test runs the background tasks itself
    (other,) = node.ask(patterned("g", "n"), 1)
    assert (other.error_code, other.member_epoch) == (0, joined.member_epoch)
    (answer,) = node.ask(heartbeat("g", "m", joined.member_epoch), 1)
    assert (answer.error_code, answer.assignment) == (0, None)
    groups.expire(node.now_ms + 10 * MINUTE_MS)
    assert groups.offsets.of("g")
    while groups.consumers.patterns.is_unresolved(["t.*"]):
        background.step()
    (answer,) = node.ask(heartbeat("g", "m", joined.member_epoch), 1)
    (kept,) = answer.assignment.topic_partitions
    assert len(kept.partitions) == 1
    (answer,) = node.ask(heartbeat("g", "m", joined.member_epoch, topic_partitions=[kept]), 1)
    assert answer.member_epoch == joined.member_epoch + 1
    (answer,) = node.ask(heartbeat("g", "n", joined.member_epoch), 1)
    assert len(answer.assignment.topic_partitions[0].partitions) == 1


def test_no_offset_expires_during_a_rebalance() -> None:
    node = GroupNode(
        offsets_retention_minutes=1,
        offsets_retention_check_interval_ms=5_000,
        group_initial_rebalance_delay_ms=0,
    )
    for name in TOPICS:
        node.ask(create(name), 5)
    (first,) = node.ask(reading("t"), 3)
    waiting = node.ask(reading("u"), 3)
    (first,) = node.ask(reading("t", first.member_id), 3)
    (second,) = waiting
    members, generation = [first.member_id, second.member_id], first.generation_id
    for member in members:
        node.ask(sync("g", member, generation, dict.fromkeys(members, b"x")), 3)
    who = {"generation_id_or_member_epoch": generation, "member_id": first.member_id}
    node.ask(commit("g", 4, "t", **who), 7)
    for _ in range(8):
        node.pass_time(9_000)
        for member in members:
            beat = HeartbeatRequest(group_id="g", generation_id=generation, member_id=member)
            assert node.ask(beat, 3)[0].error_code == 0
    # The member that reads `t` leaves. Its offsets expire only if no member is subscribed to `t`, and the
    # other member has not joined again yet.
    node.ask(LeaveGroupRequest(group_id="g", member_id=first.member_id), 2)
    node.pass_time(6_000)
    assert node.between_generations == {"g"}
    assert node.node.groups.offsets.of("g")


def reading(topic: str, member: str = "") -> JoinGroupRequest:
    metadata = ConsumerProtocolSubscription(topics=[topic]).to_bytes(0)
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=metadata)
    return join("g", member, protocols=[protocol], rebalance_timeout_ms=60_000)


def test_subscriptions_are_decoded_once_until_the_members_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1413: each of 64 pipelined OffsetDelete requests decoded the subscriptions of all members again."""
    node, decoded = GroupNode(), 0
    original = ConsumerProtocolSubscription.from_bytes

    def counted(data: bytes) -> ConsumerProtocolSubscription:
        nonlocal decoded
        decoded += 1
        return original(data)

    monkeypatch.setattr(ConsumerProtocolSubscription, "from_bytes", counted)
    for name in ("t", "u"):
        node.ask(create(name), 5)
    (first,) = node.ask(reading("t"), 3)
    node.ask(sync("g", first.member_id, first.generation_id, {first.member_id: b"x"}), 3)

    def subscribed() -> list[str]:
        topics = [
            OffsetDeleteRequest.OffsetDeleteRequestTopic(
                name=name, partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)]
            )
            for name in ("t", "u")
        ]
        (answer,) = node.ask(OffsetDeleteRequest(group_id="g", topics=topics), 0)
        return [topic.name for topic in answer.topics if topic.partitions[0].error_code]

    assert [subscribed() for _ in range(5)] == [["t"]] * 5 and decoded == 1
    (again,) = node.ask(reading("u", first.member_id), 3)
    assert [subscribed() for _ in range(5)] == [["u"]] * 5 and decoded == 2
    node.ask(LeaveGroupRequest(group_id="g", member_id=again.member_id), 2)
    node.ask(reading("t"), 3)
    assert subscribed() == ["t"]


def test_a_refused_consumer_leaves_an_empty_classic_group_as_it_was() -> None:
    node = GroupNode(message_max_bytes=2_000)
    node.ask(create("t"), 5)
    (answer,) = node.ask(join("g"), 3)
    node.ask(sync("g", answer.member_id, 1, {answer.member_id: b"x"}), 3)
    node.ask(LeaveGroupRequest(group_id="g", member_id=answer.member_id), 2)
    before = node.state()
    assert before["classic"]
    (refused,) = node.ask(
        heartbeat("g", "m", subscribed_topic_names=["t" * 200 + str(n) for n in range(20)]), 1
    )
    assert refused.error_code == errors.MessageTooLarge.code
    assert node.state() == before
    assert node.ask(heartbeat("g", "m"), 1)[0].error_code == 0
    after = node.state()
    assert not after["classic"]
    node.restart()
    assert node.state() == after


def test_requests_that_name_groups_look_at_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    node = GroupNode()
    node.ask(create("t"), 5)
    node.ask(commit("a", 4), 5)
    node.ask(commit("b", 4), 5)

    def walk(self: Any) -> Any:
        raise AssertionError("every group was looked at, once for each name")

    monkeypatch.setattr(GroupCoordinator, "group_ids", walk)
    monkeypatch.setattr(Offsets, "groups", walk)
    (described,) = node.ask(DescribeGroupsRequest(groups=["a", "none"]), 5)
    assert [group.group_state for group in described.groups] == ["Empty", "Dead"]
    (described,) = node.ask(ConsumerGroupDescribeRequest(group_ids=["a", "none"]), 1)
    assert {group.error_code for group in described.groups} == {errors.GroupIdNotFound.code}
    (deleted,) = node.ask(OffsetDeleteRequest(group_id="none", topics=[]), 0)
    assert deleted.error_code == errors.GroupIdNotFound.code
    (deleted,) = node.ask(DeleteGroupsRequest(groups_names=["a", "none"]), 2)
    assert [result.error_code for result in deleted.results] == [0, errors.GroupIdNotFound.code]
    assert not node.node.groups.has("a")
    assert node.node.groups.has("b")


def test_the_text_about_an_unknown_group_fits_its_response() -> None:
    """R1555: the text quoted the whole id, and the broker closed the connection."""
    (described,) = GroupNode().ask(ConsumerGroupDescribeRequest(group_ids=["g" * 32_767]), 1)
    assert described.groups[0].error_message == "Group " + "g" * 994
    assert described.encode(1)


def test_a_commit_above_a_batchs_size_is_refused_whole() -> None:
    node = GroupNode(message_max_bytes=2_000)
    topics = [f"t{n}" for n in range(30)]
    for name in topics:
        node.ask(create(name), 5)
    group = "g" * 100
    plain = {"partition_index": 0, "committed_offset": 4}
    (answer,) = node.ask(
        OffsetCommitRequest(
            group_id=group,
            topics=[
                OffsetCommitRequest.OffsetCommitRequestTopic(
                    name=name, partitions=[OffsetCommitRequest.OffsetCommitRequestPartition(**plain)]
                )
                for name in topics
            ],
        ),
        8,
    )
    codes = {topic.partitions[0].error_code for topic in answer.topics}
    assert codes == {errors.InvalidCommitOffsetSize.code}
    (producer,) = node.ask(InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=10_000), 4)
    (answer,) = node.ask(
        TxnOffsetCommitRequest(
            transactional_id="x",
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            group_id=group,
            topics=[
                TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                    name=name, partitions=[TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(**plain)]
                )
                for name in topics
            ],
        ),
        5,
    )
    codes = {topic.partitions[0].error_code for topic in answer.topics}
    assert codes == {errors.InvalidCommitOffsetSize.code}
    assert not node.node.groups.has(group)


# Groups that cannot be stored


class Refusing:
    """Makes appends of a group's records fail while `names` holds the group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[bytes] = set()
        append = InternalTopic.append

        def refuse(topic: InternalTopic, index: int, records: Any, now_ms: int) -> Any:
            if any(name in key for name in self.names for key, _ in records):
                raise errors.NotCoordinator("the disk refuses")
            return append(topic, index, records, now_ms)

        monkeypatch.setattr(InternalTopic, "append", refuse)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    return Refusing(monkeypatch)


def test_a_heartbeat_that_cannot_be_stored_has_not_happened(refusing: Refusing) -> None:
    node = GroupNode()
    node.ask(create("t"), 5)
    (joined,) = node.ask(heartbeat("g", "good"), 1)
    before = node.state()
    refusing.names = {b"g"}
    assert node.ask(heartbeat("g", "other"), 1)[0].error_code == errors.NotCoordinator.code
    assert node.ask(heartbeat("g", "good", -1), 1)[0].error_code == errors.NotCoordinator.code
    assert node.state() == before
    assert node.ask(heartbeat("g", "good", joined.member_epoch), 1)[0].error_code == 0


def test_a_group_that_cannot_be_stored_does_not_cost_others_their_turn(refusing: Refusing) -> None:
    node = GroupNode(group_consumer_session_timeout_ms=10_000)
    node.ask(create("t"), 5)
    for group in ("stuck", "other"):
        node.ask(heartbeat(group, "m"), 1)
    refusing.names = {b"stuck"}
    node.pass_time(15_000)
    members = {name: set(group.members) for name, group in node.node.groups.consumers._groups.items()}
    assert members == {"stuck": {"m"}, "other": set()}
    refusing.names = set()
    node.pass_time(2_000)
    assert not node.node.groups.consumers._groups["stuck"].members


def test_a_group_that_a_full_disk_left_with_its_members_is_stored_as_empty_later(refusing: Refusing) -> None:
    """Regression (simulator seed 298): after a restart, the members that had left were in the group again."""
    node = GroupNode(group_initial_rebalance_delay_ms=0)
    node.ask(create("t"), 5)
    (joined,) = node.ask(join("g"), 3)
    node.ask(sync("g", joined.member_id, joined.generation_id, {joined.member_id: b"x"}), 3)
    refusing.names = {b"g"}
    node.ask(LeaveGroupRequest(group_id="g", member_id=joined.member_id), 2)
    node.pass_time(5_000)
    refusing.names = set()
    node.pass_time(5_000)
    before = node.state()
    assert before["classic"]
    node.restart()
    assert node.state() == before


LARGE = 3_000_000


@pytest.fixture(scope="module")
def own_broker() -> Iterator[Broker]:
    config = {"group.min.session.timeout.ms": 100, "group.consumer.session.timeout.ms": 60_000}
    with Broker(config=config) as running:
        with RawClient(running.bootstrap_servers) as client:
            client.create_topic("t", 2)
        yield running


def tried(broker: Broker, message: Any, version: int) -> Any:
    """Return the response that a new connection gets, or None if the broker closed the connection."""
    with RawClient(broker.bootstrap_servers) as client:
        client.send(message, version)
        frame = client.read_frame()
        return frame


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(
            heartbeat("kg", "m", subscribed_topic_names=[f"{n:030000}" for n in range(50)]), id="many topics"
        ),
    ],
)
def test_one_heartbeat_that_cannot_be_stored_does_not_break_its_group(
    own_broker: Broker, hostile: Any
) -> None:
    tried(own_broker, hostile, 1)
    with RawClient(own_broker.bootstrap_servers) as client:
        assert client.ask(heartbeat("kg", "good"), 1).error_code == 0
        (described,) = client.ask(ConsumerGroupDescribeRequest(group_ids=["kg"]), 1).groups
        assert [member.member_id for member in described.members] == ["good"]
        assert client.ask(heartbeat("kg", "good", -1), 1).error_code == 0


def protocol(name: str, metadata: bytes) -> JoinGroupRequest.JoinGroupRequestProtocol:
    return JoinGroupRequest.JoinGroupRequestProtocol(name=name, metadata=metadata)


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(
            join("cg", group_instance_id="x" * 32_760), id="instance id that leaves no room for a member id"
        ),
        pytest.param(join("cg", protocols=[protocol("range", b"z" * LARGE)]), id="metadata"),
        pytest.param(
            join("cg", protocols=[protocol(f"p{n}", b"z" * 1_000_000) for n in range(5)]), id="protocols"
        ),
    ],
)
def test_one_join_that_cannot_be_stored_does_not_break_its_group(own_broker: Broker, hostile: Any) -> None:
    tried(own_broker, hostile, 6)
    with RawClient(own_broker.bootstrap_servers) as client:
        assert not {"cg"} & {group.group_id for group in client.ask(ListGroupsRequest(), 4).groups}
        joined = client.ask(join("cg", session_timeout_ms=60_000), 3)
        assert joined.error_code == 0
        (described,) = client.ask(DescribeGroupsRequest(groups=["cg"]), 5).groups
        assert [member.member_id for member in described.members] == [joined.member_id]
        assert (
            client.ask(
                sync("cg", joined.member_id, joined.generation_id, {joined.member_id: b"x"}), 3
            ).error_code
            == 0
        )
        client.ask(LeaveGroupRequest(group_id="cg", member_id=joined.member_id), 2)
        assert client.ask(DeleteGroupsRequest(groups_names=["cg"]), 2).results[0].error_code == 0


def test_an_assignment_above_a_records_size_is_refused_and_the_group_goes_on(own_broker: Broker) -> None:
    with RawClient(own_broker.bootstrap_servers) as client:
        joined = client.ask(join("large", session_timeout_ms=60_000), 3)
        shares = {joined.member_id: b"z" * LARGE}
        refused = client.ask(sync("large", joined.member_id, joined.generation_id, shares), 3)
        assert refused.error_code == errors.MessageTooLarge.code
        again = client.ask(join("large", joined.member_id, session_timeout_ms=60_000), 3)
        assert again.error_code == 0
        shares = {joined.member_id: b"x"}
        assert client.ask(sync("large", joined.member_id, again.generation_id, shares), 3).error_code == 0


def test_the_metadata_of_a_groups_members_is_bounded(own_broker: Broker) -> None:
    large = [protocol("range", b"z" * 1_000_000)]
    with RawClient(own_broker.bootstrap_servers) as onlooker:
        clients = [RawClient(own_broker.bootstrap_servers) for _ in range(5)]
        first = clients[0].ask(join("many", protocols=large), 3)
        assert first.error_code == 0
        for number, client in enumerate(clients[1:4], 2):
            client.send(join("many", protocols=large), 3)
            wait_until(
                lambda number=number: (
                    len(onlooker.ask(DescribeGroupsRequest(groups=["many"]), 5).groups[0].members) == number
                )
            )
        refused = clients[4].ask(join("many", protocols=large), 3)
        assert (refused.error_code, refused.member_id) == (errors.GroupMaxSizeReached.code, "")
        for client in clients:
            client.socket.close()


def test_a_pattern_that_a_heartbeat_has_resolved_holds_for_all_members() -> None:
    """Regression: one member's heartbeat resolved the pattern, but another member kept its old assignment. So
    nobody read the topics of the stable group.
    """
    place = GroupNode()
    place.limits = Limits(pattern_step_cost=1)
    place.restart()
    place.ask(create("t"), 5)
    place.ask(heartbeat("other", "c"), 1)  # this creates the coordinator's topic
    place.node.log_manager.background.on_added = lambda: None  # no background task runs from now on
    pattern: dict[str, Any] = {"subscribed_topic_names": [], "subscribed_topic_regex": "t"}
    place.ask(heartbeat("g", "a", **pattern), 1)
    place.ask(heartbeat("g", "b", subscribed_topic_names=["z"]), 1)
    for _ in range(3):
        group = place.node.groups.consumers.get("g")
        assert group is not None
        place.ask(heartbeat("g", "a", group.members["a"].epoch), 1)
    group = place.node.groups.consumers.get("g")
    assert group is not None
    assert len(group.members["a"].assigned) == 2


def restore_group(node: GroupNode, name: str, member_count: int, topic_count: int) -> ClassicGroup:
    """Make a stable group with static members that all subscribe to the same topics."""
    subscription = ConsumerProtocolSubscription(topics=[f"u{i}" for i in range(topic_count)]).to_bytes(0)
    group = node.node.groups.get_or_create(name, node.now_ms)
    for number in range(member_count):
        protocols = (("range", subscription),)
        member = Member(
            f"m{number}", f"i{number}", "c", "/h", 60_000, 60_000, protocols, is_new=False, has_synced=True
        )
        group.restore_member(member, node.now_ms)
    group.state, group.generation_id, group.protocol_type = GroupState.STABLE, 1, "consumer"
    group.protocol_name, group.members.leader_id = "range", "m0"
    return group


@pytest.fixture
def stepped() -> GroupNode:
    """Return a node whose background tasks run only when the test runs them."""
    node = GroupNode(offsets_retention_minutes=1)
    node.ask(create("t"), 5)
    node.node.log_manager.background.on_added = lambda: None
    return node


def records_of_steps(node: GroupNode) -> list[int]:
    """Run the background tasks to their end. Return the cost of the subscriptions decoded in each step."""
    background, meter, spent = node.node.log_manager.background, node.node.round_meter, [0]
    while len(background):
        before = meter.records
        background.step()
        spent.append(meter.records - before)
    return spent


def test_subscriptions_of_large_groups_are_decoded_in_steps(stepped: GroupNode) -> None:
    """R1450: one step of the expiry decoded the subscriptions of 100 groups, which took 2.9 s.

    64 OffsetDelete requests that named two groups in turn took 2.3 s. Only the last result was cached.
    """
    groups = stepped.node.groups
    committed = CommittedOffset(1, -1, "", stepped.now_ms, -1, 0)
    for name in ("g", "h"):
        restore_group(stepped, name, 50, 1_000)
        groups.offsets.commit(name, {TopicPartition("t", 0): committed}, stepped.now_ms)
    element_records = (64 + 1) // SUBSCRIPTION_BYTES_PER_RECORD + ELEMENT_RECORDS
    step_records = DEFAULT_LIMITS.request_step_elements * element_records
    groups.expire(stepped.now_ms + 2 * MINUTE_MS)
    assert max(records_of_steps(stepped)) < 2 * step_records
    assert not groups.offsets.of("g") and not groups.offsets.of("h")
    for name in ("g", "h", "g"):
        before = stepped.node.round_meter.records
        answers = stepped.ask(OffsetDeleteRequest(group_id=name, topics=[]), 0)
        assert stepped.node.round_meter.records - before < 2 * step_records
        assert max(records_of_steps(stepped)) < 2 * step_records and len(answers) == 1


def test_no_offset_expires_if_a_member_joins_while_subscriptions_are_decoded(stepped: GroupNode) -> None:
    groups = stepped.node.groups
    committed = CommittedOffset(1, -1, "", stepped.now_ms, -1, 0)
    group = restore_group(stepped, "g", 50, 1_000)
    groups.offsets.commit("g", {TopicPartition("t", 0): committed}, stepped.now_ms)
    groups.expire(stepped.now_ms + 2 * MINUTE_MS)
    stepped.node.log_manager.background.step()
    assert len(stepped.node.log_manager.background)
    group.members.add(replace(group.members["m0"], member_id="n", group_instance_id="n"))
    records_of_steps(stepped)
    assert groups.offsets.of("g")


def test_storing_a_large_group_costs_more_of_the_round() -> None:
    """R1451: each restart of a static member stored all 1,000 members, and a round had 64 of them."""
    node, costs = GroupNode(), []
    node.ask(create("t"), 5)
    for name, count in (("small", 2), ("large", 1_000)):
        protocols = [("range", restore_group(node, name, count, 1).members["m0"].metadata("range"))]
        restart = join(
            name,
            group_instance_id="i0",
            protocols=[
                JoinGroupRequest.JoinGroupRequestProtocol(name=protocol, metadata=metadata)
                for protocol, metadata in protocols
            ],
        )
        before = node.node.round_meter.records
        (answer,) = node.ask(restart, 5)
        assert answer.error_code == 0
        costs.append(node.node.round_meter.records - before)
    assert costs[0] < METERED_RECORDS < MAX_ROUND_REQUESTS * METERED_RECORDS < 4 * costs[1]


def test_changes_of_a_group_with_many_members_cost_more_of_the_round() -> None:
    """R1534: a heartbeat that changed a group of 5,000 members took 1 to 2 ms, and a round had 64 of them."""
    node = GroupNode()
    node.ask(create("t"), 5)
    costs: list[int] = []

    def cost_of(message: Any, version: int) -> None:
        before = node.node.round_meter.records
        assert node.ask(message, version)[0].error_code == 0
        costs.append(node.node.round_meter.records - before)

    for number in range(1_200):
        cost_of(heartbeat("g", f"m{number}", subscribed_topic_names=["none"]), 1)
    cost_of(heartbeat("g", "m5", -1), 1)
    leaving = LeaveGroupRequest.MemberIdentity(member_id="m6")
    cost_of(LeaveGroupRequest(group_id="g", members=[leaving]), 5)
    assert costs[-1] >= 1_198 // 4 and costs[-2] >= 1_199 // 4 > METERED_RECORDS > costs[0]


def test_heartbeats_that_compute_targets_cost_more_of_the_round() -> None:
    """R1451: a heartbeat of 100 bytes computed a target of 1,000 partitions, or compared 1,000 names of
    topics with a regular expression, and a round had 64 of them.
    """
    node = GroupNode()
    node.ask(create("t", 1_000), 5)
    for number in range(20):
        node.ask(create(f"u{number}"), 5)
    costs = []
    for group, names, regex in (
        ("a", ["v"], None),
        ("b", ["t"], None),
        ("c", None, "[a-z]{1,99}(x[a-z]{1,9}){1,99}"),
    ):
        before = node.node.round_meter.records
        request = heartbeat(group, "m", subscribed_topic_names=names, subscribed_topic_regex=regex)
        (answer,) = node.ask(request, 1)
        assert answer.error_code == 0
        costs.append(node.node.round_meter.records - before)
    assert costs[0] < METERED_RECORDS < 4_000 < costs[1]
    assert costs[2] > METERED_RECORDS
    (answer,) = node.ask(heartbeat("b", "m", 2), 1)
    before = node.node.round_meter.records
    assert node.ask(heartbeat("b", "m", answer.member_epoch), 1)[0].error_code == 0
    assert node.node.round_meter.records == before


@pytest.mark.parametrize("producer", [(-1, -1), (-1, 0), (5, -1)])
@pytest.mark.parametrize("is_verified", [True, False])
def test_offsets_in_a_transaction_need_a_producer_id(producer: tuple[int, int], is_verified: bool) -> None:
    """R1795: an offset without a producer id was pending until a restart, which made it a committed one."""
    node = GroupNode(transaction_partition_verification_enable=is_verified)
    node.ask(create("t"), 5)
    row = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
        partition_index=0, committed_offset=7, committed_metadata=""
    )
    topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name="t", partitions=[row])
    producer_id, epoch = producer
    request = TxnOffsetCommitRequest(
        transactional_id="x", group_id="g", producer_id=producer_id, producer_epoch=epoch, topics=[topic]
    )
    (answer,) = node.ask(request, 3)
    code = answer.topics[0].partitions[0].error_code
    assert code if is_verified else code == errors.InvalidProducerIdMapping.code
    assert not node.node.groups.offsets.has("g")
    node.restart()
    assert not node.node.groups.offsets.has("g")
