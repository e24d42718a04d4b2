"""Heartbeats are prepared, and the responses of a group's members sent, in bounded steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.groups.node import GroupNode, create, heartbeat, join, sync

from oncelog.broker.coordinators import internal_topic
from oncelog.broker.coordinators.consumer_groups import NAMES_PER_RECORD
from oncelog.broker.coordinators.internal_topic import InternalTopic
from oncelog.broker.dispatch import handle
from oncelog.broker.purgatory import PendingResponse
from oncelog.broker.request import Request
from oncelog.broker.topics.topic_names import MAX_LENGTH
from oncelog.errors import MessageTooLarge
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.background import BackgroundTask, Kind
from oncelog.rules.groups.committed_offsets import CommittedOffset
from oncelog.rules.groups.consumer import in_order
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.entry import TransactionState
from oncelog.server.request_handler import MAX_ROUND_REQUESTS, METERED_RECORDS
from oncelog.types import TopicPartition
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import DeleteGroupsRequest, DeleteTopicsRequest, JoinGroupRequest
from oncelog.wire.stored import GroupMetadataValue


def test_the_members_of_a_group_are_answered_in_bounded_steps() -> None:
    """Regression: the broker sent the responses to 5,000 members of a rebalance in one step, and other
    clients waited for all of them.
    """
    place = GroupNode(group_initial_rebalance_delay_ms=3_000)
    place.limits = replace(DEFAULT_LIMITS, step_member_responses=2)
    place.restart()
    background = place.node.log_manager.background
    background.on_added = lambda: None

    def answered_counts(answers: list[list[Any]]) -> list[int]:
        """Run the remaining steps, and check that the responses are sent in order.

        Return the number of responses sent so far: before the first step and after each one.
        """
        counts = []
        while True:
            is_answered = [bool(answer) for answer in answers]
            counts.append(sum(is_answered))
            assert is_answered == sorted(is_answered, reverse=True)
            if not background:
                return counts
            assert background.step() is None

    joins = [place.ask(join("g"), 3) for _ in range(5)]
    assert not any(joins)
    place.pass_time(3_000)
    # The first two counts are equal, because the task's first step belongs to the step of the request.
    assert answered_counts(joins) == [2, 2, 4, 5]
    ids = [answer.member_id for (answer,) in joins]
    assert {answer.generation_id for (answer,) in joins} == {1} and len(set(ids)) == 5
    followers = [place.ask(sync("g", member, 1, {}), 3) for member in ids[1:]]
    leader = place.ask(sync("g", ids[0], 1, {member: member.encode() for member in ids}), 3)
    assert answered_counts([leader, *followers]) == [2, 2, 4, 5]
    assert [answer.assignment for (answer,) in (leader, *followers)] == [member.encode() for member in ids]
    # A member of another group gets its response immediately.
    assert len(place.ask(join("other"), 4)) == 1


def many_steps(**limits: int) -> GroupNode:
    """Return a node with small steps, whose background tasks run only with `background.step`."""
    group_node = GroupNode()
    group_node.ask(create("t"), 5)
    group_node.limits = replace(DEFAULT_LIMITS, **limits)
    group_node.restart()
    group_node.node.log_manager.background.on_added = lambda: None
    return group_node


def test_a_heartbeat_of_many_names_is_prepared_in_steps() -> None:
    """R1670: a heartbeat of 90,000 names blocked all other clients for 0.15 s."""
    group_node = many_steps(request_step_elements=10)
    groups, background = group_node.node.groups.consumers, group_node.node.log_manager.background
    names = [f"n{number}" for number in range(200, 100, -1)] + ["t", "t"]
    answers = group_node.ask(heartbeat("g", "m", subscribed_topic_names=names), 1)
    step_count = 0
    while not answers:
        assert groups.get("g") is None  # the group changes in one step, after all names are prepared
        background.step()
        step_count += 1
    assert step_count > 20
    assert answers[0].error_code == 0
    group = groups.get("g")
    assert group is not None
    assert group.members["m"].topics == frozenset(names)
    assert in_order(group.members["m"].topics) == tuple(sorted({*names}))
    assert {partition for _, partition in group.members["m"].assigned} == {0, 1}

    owned = heartbeat("g", "m", answers[0].member_epoch)
    owned.topic_partitions = [owned.TopicPartitions(topic_id=bytes(16), partitions=list(range(100)))]
    answers = group_node.ask(owned, 1)
    assert not answers
    while not answers:
        background.step()
    assert answers[0].error_code == 0


def test_a_heartbeat_whose_client_has_disconnected_between_its_steps_changes_no_group() -> None:
    group_node = many_steps(request_step_elements=10)
    names = [f"n{number}" for number in range(100)]
    request = heartbeat("g", "m", subscribed_topic_names=names)
    header = RequestHeader(request.api.key, 1, 1, "client", 0)
    answer = handle(group_node.node, Request(1, header, request, "/127.0.0.1"), group_node.now_ms)
    assert isinstance(answer, PendingResponse)
    group_node.node.log_manager.background.step()
    answer.cancel()
    while group_node.node.log_manager.background:
        group_node.node.log_manager.background.step()
    assert group_node.node.groups.consumers.get("g") is None


def test_the_cached_subscriptions_of_former_members_are_bounded() -> None:
    """R1671: a cached subscription counted the topics that exist, so names without a topic were kept without
    bound.
    """
    group_node = many_steps(max_catalogued_topics=100)
    groups, epoch = group_node.node.groups.consumers, 0
    kept = []
    for number in range(30):
        names = [f"n{number}-{index}" for index in range(20)]
        request = heartbeat("g", "m", epoch, subscribed_topic_names=names)
        (answer,) = group_node.ask(request, 1)
        epoch = answer.member_epoch
        kept.append(sum(len(names) for names, _ in groups._resolved))
    assert 20 <= max(kept) <= 100


@pytest.mark.parametrize("is_pattern", [False, True])
def test_long_names_of_former_subscriptions_are_bounded(is_pattern: bool) -> None:
    """R1675: a name of 30,000 characters counted as one of a topic, and a pattern not at all."""
    group_node = many_steps(max_catalogued_topics=100)
    groups, epoch = group_node.node.groups.consumers, 0
    kept = []
    for number in range(30):
        text = str(number % 10) * 4_000
        names, regex = ([], text) if is_pattern else ([text], "")
        request = heartbeat("g", "m", epoch, subscribed_topic_names=names, subscribed_topic_regex=regex)
        (answer,) = group_node.ask(request, 1)
        assert answer.error_code == 0
        epoch = answer.member_epoch
        kept.append(sum(len("".join([*names, *regexes])) for names, regexes in groups._resolved))
    assert 4_000 <= max(kept) <= 100 * MAX_LENGTH


def test_look_ups_of_many_names_cost_more_of_the_round() -> None:
    """R1696: 64 changes of one member's name, beside the 90,000 of another one, blocked all other clients for
    2.7 s. So did heartbeats of two groups whose names did not fit the cache together.
    """
    group_node = many_steps()

    def cost_of_change(group: str) -> int:
        """Return the cost of a heartbeat that changes the one name of a member."""
        (joined,) = group_node.ask(heartbeat(group, "m", subscribed_topic_names=["t"]), 1)
        group_node.pass_time(1_000)
        before = group_node.node.round_meter.records
        changed = heartbeat(group, "m", joined.member_epoch, subscribed_topic_names=["u"])
        assert group_node.ask(changed, 1)[0].error_code == 0
        return group_node.node.round_meter.records - before

    names = [f"n{number}" for number in range(400)]
    (other,) = group_node.ask(heartbeat("g", "other", subscribed_topic_names=names), 1)
    assert other.error_code == 0
    alone = cost_of_change("alone")
    assert cost_of_change("g") >= alone + len(names) // NAMES_PER_RECORD
    # R1736: so does an equal set of names whose topics are known. Joining and comparing the names takes as
    # long: 64 such heartbeats with 30,000 names blocked all other clients for 0.08 s.
    again = heartbeat("g", "m", subscribed_topic_names=["t"])
    assert group_node.ask(again, 1)[0].error_code == 0
    assert cost_of_change("g") >= alone + len(names) // NAMES_PER_RECORD


def test_a_target_does_not_wait_for_the_blocking_calls_of_look_ups() -> None:
    """R1695: a large group got no target while other clients looked up times in compressed batches."""
    group_node = many_steps(max_immediate_assignment_cost=1)
    background = group_node.node.log_manager.background

    def look_up() -> BackgroundTask:
        yield lambda: None

    background.add(look_up(), Kind.REQUEST_WITH_CALLS)
    assert background.step() is not None  # the call of the look-up is running
    group_node.ask(heartbeat("g", "m"), 1)
    while background.is_ready:
        call = background.step()
        if call is not None:
            call()
    group = group_node.node.groups.consumers.get("g")
    assert group is not None and len(group.targets["m"]) == 2


def test_equal_names_of_another_group_are_compared_once() -> None:
    """R1672: each heartbeat of a group compared its names with the equal ones of another group."""
    group_node = many_steps()
    groups = group_node.node.groups.consumers
    compared = []

    class Compared(frozenset[str]):
        __hash__ = frozenset.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return frozenset.__eq__(self, other)

    first, second = Compared(["t", "u"]), Compared(["t", "u"])
    topics = groups._resolve_topics(first, frozenset())
    assert list(topics) == ["t"]
    assert not compared
    for _ in range(3):
        assert groups._resolve_topics(second, frozenset()) is topics
    assert len(compared) == 1
    group_node.ask(create("u"), 5)
    assert list(groups._resolve_topics(second, frozenset())) == ["t", "u"]


def test_metadata_that_is_too_large_for_any_record_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1714: a request with 99 MB was encoded, and then refused. All clients waited 0.3 s for that."""
    encoded: list[int] = []

    def to_bytes(value: Any, version: int, original: Any = GroupMetadataValue.to_bytes) -> bytes:
        encoded.append(sum(len(member.subscription) + len(member.assignment) for member in value.members))
        return bytes(original(value, version))

    monkeypatch.setattr(GroupMetadataValue, "to_bytes", to_bytes)
    node, large = GroupNode(group_initial_rebalance_delay_ms=0), bytes(2 << 20)
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=large)
    (refused,) = node.ask(join("g", protocols=[protocol]), 3)
    (joined,) = node.ask(join("g"), 3)
    assert (refused.error_code, joined.error_code) == (MessageTooLarge.code, 0)
    for shares, code in (({"": large, joined.member_id: large}, MessageTooLarge.code), ({"": large}, 0)):
        (synced,) = node.ask(sync("g", joined.member_id, joined.generation_id, shares), 3)
        assert synced.error_code == code
        if code:
            (joined,) = node.ask(join("g", joined.member_id), 3)
    assert max(encoded) < 1000


def test_a_join_with_many_protocols_ends_its_round() -> None:
    """R1714: 19,000 protocols take 0.06 s, and a round could have five such requests of one connection."""
    node = GroupNode(group_initial_rebalance_delay_ms=0)
    before = node.node.round_meter.records
    protocol = JoinGroupRequest.JoinGroupRequestProtocol
    node.ask(join("g", protocols=[protocol(name=str(number)) for number in range(19_000)]), 3)
    assert node.node.round_meter.records - before > MAX_ROUND_REQUESTS * METERED_RECORDS


@pytest.fixture
def id_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the characters of ids that were hashed, and the bytes of keys that were appended."""
    counted, java_hash, append = [0], internal_topic.java_hash, InternalTopic.append

    def hashed(text: str) -> int:
        counted[0] += len(text)
        return java_hash(text)

    def appended(topic: InternalTopic, index: int, records: Any, now_ms: int) -> Any:
        counted[0] += sum(len(key) for key, _ in records)
        return append(topic, index, records, now_ms)

    monkeypatch.setattr(internal_topic, "java_hash", hashed)
    monkeypatch.setattr(InternalTopic, "append", appended)
    return counted


def largest_step(node: GroupNode, id_bytes: list[int], start: Callable[[], object]) -> int:
    """Call `start`, and run its background tasks. Return the most bytes of ids that a step needs."""
    background = node.node.log_manager.background
    background.on_added = lambda: None
    id_bytes[0] = 0
    start()
    largest = id_bytes[0]
    while background:
        id_bytes[0] = 0
        call = background.step()
        if call is not None:
            call()
        largest = max(largest, id_bytes[0])
    return largest


def test_the_length_of_ids_costs_more_of_a_step(id_bytes: list[int]) -> None:
    """R1793: steps counted groups and offsets, whatever the length of the ids in their keys. 200 groups whose
    ids have 32,000 bytes expired in one step of 0.45 s.
    """
    node, count, size = GroupNode(group_initial_rebalance_delay_ms=0), 60, 6_400
    node.ask(create("t", 200), 5)
    offsets = node.node.groups.offsets
    for number in range(count):
        classic, consumer, simple = (f"{kind}{number:02}" + "x" * size for kind in "abc")
        (joined,) = node.ask(join(classic, session_timeout_ms=10_000), 3)
        node.ask(sync(classic, joined.member_id, joined.generation_id, {joined.member_id: b"x"}), 3)
        node.ask(heartbeat(consumer, "m"), 1)
        tps = [TopicPartition("t", index) for index in range(10)]
        offsets.commit(
            simple, {tp: CommittedOffset(1, -1, "", node.now_ms, -1, -1) for tp in tps}, node.now_ms
        )
    for first in range(0, 200, 20):
        tps = [TopicPartition("t", index) for index in range(first, first + 20)]
        committed = {tp: CommittedOffset(1, -1, "", node.now_ms, -1, -1) for tp in tps}
        offsets.commit("d" * size, committed, node.now_ms)
    node.restart()
    groups = node.node.groups
    node.now_ms += 100_000
    for coordinator in (groups, groups.consumers):
        for _ in range(count):
            id_bytes[0] = 0
            coordinator.tick(node.now_ms)
            assert id_bytes[0] < 20 * size
        assert not any(group.members for group in coordinator._groups.values())
    deletion = DeleteGroupsRequest(groups_names=["d" * size])
    assert largest_step(node, id_bytes, lambda: node.ask(deletion, 2)) < 20 * size
    topic = DeleteTopicsRequest.DeleteTopicState(name="t")
    assert largest_step(node, id_bytes, lambda: node.ask(DeleteTopicsRequest(topics=[topic]), 6)) < 20 * size
    assert not list(groups.offsets.groups())
    assert largest_step(node, id_bytes, lambda: groups.expire(node.now_ms)) < 20 * size
    assert not list(groups.group_ids())


def test_the_hash_of_a_long_id_is_computed_once(id_bytes: list[int]) -> None:
    """R1793: each marker of a transaction hashed its transactional id: 0.2 s for 100 markers."""
    node, transactional_id = GroupNode(), "once" * 1_000
    node.ask(create("t", 50), 5)
    transactions = node.node.transactions
    entry = transactions.init(transactional_id, None, 60_000, node.now_ms).entry
    producer = ProducerIdAndEpoch(entry.producer_id, entry.producer_epoch)
    tps = [TopicPartition("t", index) for index in range(50)]
    transactions.add_partitions(transactional_id, producer, tps, node.now_ms)
    transactions.end(transactional_id, producer, True, 0, node.now_ms)
    ended = transactions.get(transactional_id)
    assert ended is not None and ended.state is TransactionState.COMPLETE_COMMIT
    assert id_bytes[0] < 10 * len(transactional_id)
