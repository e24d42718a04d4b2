"""Clients' regular expressions are matched in linear time and only once, and never block the broker."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.broker import RawClient

from oncelog.broker.coordinators.consumer_group_log import encode_record
from oncelog.broker.coordinators.patterns import (
    MAX_PATTERN_BYTES,
    MAX_UNICODE_CLASSES,
    Pattern,
    TopicPatterns,
)
from oncelog.config import BROKER
from oncelog.errors import InvalidRegularExpression
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.background import BackgroundQueue
from oncelog.rules.groups.consumer import (
    CURRENT,
    EPOCH,
    MEMBER,
    ConsumerGroup,
    ConsumerMember,
    Heartbeat,
    RecordKey,
)
from oncelog.runtime.clock import Clock
from oncelog.server.embedded import Broker, open_node, recover_node
from oncelog.wire.messages import (
    ConsumerGroupHeartbeatRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
    MetadataRequest,
)
from oncelog.wire.stored import ConsumerGroupMemberMetadataValue

HOSTILE = ["(a+)+c", "(?:a|a){22}!", "(?:.|.){22}!", "(a*)*b"]
REFUSED = [
    "a{99999999999999999999}" + "(",
    "(" * 100_000,
    "(?=a)a",
    r"(a)\1",
    "[",
    "a" * (MAX_PATTERN_BYTES + 1),
]


def heartbeat(member: str, group: str, regex: str) -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id=member,
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        topic_partitions=[],
        subscribed_topic_names=None,
        subscribed_topic_regex=regex,
    )


def by_pattern(text: str) -> ListTransactionsRequest:
    return ListTransactionsRequest(
        state_filters=[], producer_id_filters=[], duration_filter=-1, transactional_id_pattern=text
    )


@pytest.mark.parametrize("regex", HOSTILE)
def test_a_backtracking_pattern_does_not_block_other_clients(client: RawClient, regex: str) -> None:
    """An engine that backtracks would need longer than the test run for 200 letters."""
    name = "a" * (200 + HOSTILE.index(regex))
    client.create_topic(name)
    answer = client.ask(heartbeat("m", f"hostile-{HOSTILE.index(regex)}", regex), 1)
    assert answer.error_code == 0
    assert not answer.assignment.topic_partitions
    init = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
    assert client.ask(init, 4).error_code == 0
    assert client.ask(by_pattern(regex), 2).transaction_states == []
    assert client.ask(MetadataRequest(topics=[]), 9).brokers


@pytest.mark.parametrize("regex", REFUSED)
def test_a_pattern_that_is_refused_is_an_error_code_on_a_connection_that_lives(
    client: RawClient, regex: str
) -> None:
    regex = regex[:32_000]  # the longest string of the protocol
    assert client.ask(heartbeat("m", "refused", regex), 1).error_code == InvalidRegularExpression.code
    assert client.ask(by_pattern(regex), 2).error_code == InvalidRegularExpression.code


def test_costly_unicode_classes_are_few() -> None:
    assert Pattern(r"\p{Greek}" * MAX_UNICODE_CLASSES).matches("α" * MAX_UNICODE_CLASSES)
    with pytest.raises(InvalidRegularExpression, match="Unicode classes"):
        Pattern(r"\p{Greek}" * (MAX_UNICODE_CLASSES + 1))


@given(st.text(max_size=20))
def test_any_text_is_a_pattern_or_a_typed_error(text: str) -> None:
    try:
        Pattern(text).matches("some-topic")
    except InvalidRegularExpression:
        pass


def test_a_pattern_matches_whole_texts_as_kafka_does() -> None:
    assert Pattern("a.c").matches("abc")
    assert not Pattern("a.c").matches("xabc")
    assert not Pattern("a.c").matches("abcx")
    assert Pattern("a|ab").matches("ab")
    assert Pattern("(?i)ABC").matches("abc")
    assert not Pattern("a.c").matches("a\nc")


class Counting:
    """A `Pattern` that counts its calls."""

    matched: list[str]

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        cls.matched = []
        matches = Pattern.matches

        def counted(pattern: Pattern, text: str) -> bool:
            cls.matched.append(text)
            return matches(pattern, text)

        monkeypatch.setattr(Pattern, "matches", counted)


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Counting.install(monkeypatch)
    return Counting.matched


def test_a_topic_is_matched_once_however_many_heartbeats_come(client: RawClient, matched: list[str]) -> None:
    client.create_topic("once-1")
    assert client.ask(heartbeat("m", "once", "once-.*"), 1).error_code == 0
    first = list(matched)
    assert first.count("once-1") == 1
    for member in ("m", "n", "o"):
        client.ask(heartbeat(member, "once", "once-.*"), 1)
    client.ask(heartbeat("m", "another group", "once-.*"), 1)
    assert matched == first
    client.create_topic("once-2")
    client.ask(heartbeat("p", "once", "once-.*"), 1)
    assert matched == [*first, "once-2"]


def test_matching_too_costly_for_one_heartbeat_continues_in_the_background(matched: list[str]) -> None:
    background = BackgroundQueue()
    background.on_added = lambda: None
    found = TopicPatterns(background)
    costly = "(?:a?){100}" * 8
    steps = Pattern(costly).steps("a" * 240)
    per_round = DEFAULT_LIMITS.pattern_step_cost // steps + 2
    names = [f"{'a' * 240}{index}" for index in range(10 * per_round)]
    found.list_topics([*names, "aaa"])
    assert found.find(costly) == []
    assert len(matched) <= per_round
    rounds = 0
    while background:
        before = len(matched)
        background.step()
        assert len(matched) - before <= per_round
        rounds += 1
    assert rounds >= 9
    assert found.revision
    assert found.find(costly) == ["aaa"]
    assert len(matched) == len(names) + 1


def test_a_resolved_pattern_keeps_its_topics_while_new_ones_are_matched() -> None:
    background = BackgroundQueue()
    background.on_added = lambda: None
    found = TopicPatterns(background)
    found.list_topics(["t0"])
    assert found.find("t.*") == ["t0"]
    found.list_topics(["t0", *(f"t{index}" for index in range(1, 100_000))])
    assert "t0" in found.find("t.*")
    while background:
        background.step()
    found.begin()
    assert len(found.find("t.*")) == 100_000


def test_topics_that_are_made_and_deleted_leave_nothing_behind() -> None:
    found = TopicPatterns(BackgroundQueue())
    for index in range(20_000):
        found.begin()
        found.list_topics(["stays", f"t{index}"])
        assert set(found.find(".*")) >= {"stays", f"t{index}"}
    assert len(found.find(".*")) < 2000


def test_patterns_that_no_member_has_are_forgotten() -> None:
    found = TopicPatterns(BackgroundQueue())
    found.list_topics(["t"])
    for index in range(10):
        found.find(f"t|{index}")
    found.keep({"t|3"})
    assert len(found) == 1


def test_a_long_list_of_transactional_ids_is_matched_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(pattern_step_cost=1)
    monkeypatch.setattr("oncelog.server.embedded.recover_node", partial(recover_node, limits=limits))
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        for index in range(3):
            init = InitProducerIdRequest(transactional_id=f"stepwise-{index}", transaction_timeout_ms=60_000)
            assert client.ask(init, 4).error_code == 0
        answer = client.ask(by_pattern("stepwise-[12]"), 2)
    assert {state.transactional_id for state in answer.transaction_states} == {
        "stepwise-1",
        "stepwise-2",
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A data directory whose group has a member with a pattern that only Python's engine accepts."""
    node = open_node(tmp_path, BROKER.parse({}), Clock())
    node.topics.create("t", 1, {}, 0)
    group = ConsumerGroup("g", session_timeout_ms=45_000)
    beat = Heartbeat(
        "old", 0, topics=frozenset(), regex="(?=t)t", rebalance_timeout_ms=60_000, owned=frozenset()
    )
    group.heartbeat(beat, lambda names, regexes: {}, 0)
    entries = [RecordKey(EPOCH), RecordKey(MEMBER, "old"), RecordKey(CURRENT, "old")]
    index = node.groups.topic.partition_of("g")
    node.groups.topic.append(index, [encode_record(group, entry) for entry in entries], 0)
    node.log_manager.release()
    return tmp_path


def test_a_stored_pattern_that_is_refused_now_stops_neither_the_start_nor_the_group(directory: Path) -> None:
    with Broker(directory) as broker, RawClient(broker.bootstrap_servers) as client:
        answer = client.ask(heartbeat("new", "g", "t"), 1)
        assert answer.error_code == 0
        assert [topic.partitions for topic in answer.assignment.topic_partitions] == [[0]]


def test_ids_that_may_not_be_described_are_not_matched(tmp_path: Path, matched: list[str]) -> None:
    """The duration of a match would reveal the ids to a client that may not describe them."""
    node = open_node(tmp_path, BROKER.parse({}), Clock())
    node.transactions.init("secret", None, 60_000, 0)
    node.log_manager.release()
    acls = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}
    with Broker(tmp_path, config=acls) as broker, RawClient(broker.bootstrap_servers) as client:
        assert client.ask(by_pattern("s.*"), 2).transaction_states == []
    assert matched == []


def test_a_member_without_a_pattern_is_stored_as_by_kafka() -> None:
    """Kafka 3.9 reads the directory again, and fails with null when a static member joins again."""
    group = ConsumerGroup("g", session_timeout_ms=45_000)
    group.members["m"] = ConsumerMember("m", topics=frozenset({"t"}))
    _, value = encode_record(group, RecordKey(MEMBER, "m"))
    assert value is not None
    assert ConsumerGroupMemberMetadataValue.from_bytes(value).subscribed_topic_regex == ""
