"""The rules of the proxy: matching, selection, and the grammar."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import pytest

from oncelog.errors import ConfigError
from oncelog.testing.proxy import (
    Action,
    BatchSummary,
    Direction,
    Fate,
    Outcome,
    Proxy,
    Rule,
    WireEvent,
    parse_rule,
)
from oncelog.testing.proxy.rules import RuleBook

REQUEST = WireEvent(Direction.REQUEST, "Produce", size_bytes=500)
RESPONSE = WireEvent(Direction.RESPONSE, "Produce")


def strikes(rule: Rule, matches: int, seed: int = 0) -> list[int]:
    book = RuleBook([rule], seed)
    event = REQUEST if rule.direction is Direction.REQUEST else RESPONSE
    return [n for n in range(1, matches + 1) if book.decide(event).rule is rule]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"nth": 2}, [2]),
        ({"nth": 2, "count": 3}, [2, 3, 4]),
        ({"count": 2}, [1, 2]),
        ({"probability": 0.0}, []),
        ({"probability": 1.0, "nth": 4}, [4]),
    ],
)
def test_a_rule_applies_to_the_selected_matches(options: dict[str, float], expected: list[int]) -> None:
    assert strikes(Rule(action="drop", api="Produce", **options), 5) == expected


def test_one_seed_always_selects_the_same_matches() -> None:
    rule = Rule(action="cut", probability=0.3)
    first = strikes(rule, 200, seed=7)
    assert first == strikes(rule, 200, seed=7)
    assert first != strikes(rule, 200, seed=8)
    assert 30 < len(first) < 90


def test_other_traffic_does_not_move_a_seeded_rule() -> None:
    quiet, busy = (RuleBook([Rule(action="drop", api="Produce", probability=0.5)], 3) for _ in range(2))
    expected = [quiet.decide(REQUEST).rule is not None for _ in range(50)]
    decisions = []
    for _ in range(50):
        busy.decide(WireEvent(Direction.REQUEST, "Metadata"))
        busy.decide(RESPONSE)
        decisions.append(busy.decide(REQUEST).rule is not None)
    assert decisions == expected


def test_delays_add_up_and_the_first_other_action_decides() -> None:
    cut = Rule(action="cut", direction="request")
    book = RuleBook(
        [
            Rule(action="delay", delay_ms=5),
            Rule(action="throttle", rate_bytes_s=1000),
            cut,
            Rule(action="drop"),
        ]
    )
    decision = book.decide(REQUEST)
    assert decision.delay_ms == 505
    assert decision.rule is cut


def test_a_rule_counts_from_its_addition_and_clear_removes_all() -> None:
    book = RuleBook()
    book.decide(REQUEST)
    book.add(Rule(action="drop", nth=1))
    assert book.decide(REQUEST).rule is not None
    book.add(Rule(action="drop"))
    book.clear()
    assert book.decide(REQUEST).rule is None


def test_match_narrows_by_the_decoded_event() -> None:
    rule = Rule(action="drop", match=lambda event: event.size_bytes > 100)
    assert rule.matches(REQUEST)
    assert not rule.matches(WireEvent(Direction.REQUEST, "Produce", size_bytes=10))


def test_a_topic_selects_requests_by_their_batches_and_responses_by_their_outcomes() -> None:
    batch = BatchSummary("payments", 0, 1, 0, 0, 0, 1, 70)
    request = WireEvent(Direction.REQUEST, "Produce", batches=(batch,))
    response = WireEvent(Direction.RESPONSE, "Produce", outcomes=(Outcome("payments", 0, 0, 0),))
    for topic, is_expected in (("payments", True), ("orders", False)):
        assert Rule(action="drop", api="Produce", topic=topic).matches(request) == is_expected
        assert Rule(action="cut", api="Produce", topic=topic).matches(response) == is_expected


def test_a_removed_rule_applies_no_more_and_others_keep_their_numbers_and_counts() -> None:
    book = RuleBook()
    assert [book.add(Rule(action="drop", nth=1)), book.add(Rule(action="drop", nth=2))] == [0, 1]
    assert book.decide(REQUEST).rule == Rule(action="drop", nth=1)
    assert book.remove(0) and not book.remove(0)
    assert [(state.number, state.match_count, state.applied_count) for state in book.states()] == [(1, 1, 0)]
    assert book.decide(REQUEST).rule == Rule(action="drop", nth=2)
    assert book.states()[0].applied_count == 1
    assert book.add(Rule(action="drop")) == 2, "a number is not used again"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("response Produce cut nth=2", Rule(action="cut", api="Produce", direction="response", nth=2)),
        ("Produce cut", Rule(action="cut", api="Produce", direction="response")),
        ("drop probability=0.25", Rule(action="drop", direction="request", probability=0.25)),
        ("* delay delay_ms=20 count=3", Rule(action="delay", delay_ms=20, count=3)),
        ("request Produce hold release_after=1", Rule(action="hold", api="Produce", release_after=1)),
        ("Fetch response throttle rate_bytes_s=100000",
         Rule(action="throttle", api="Fetch", direction="response", rate_bytes_s=100000)),
        ("Produce fail error=NOT_ENOUGH_REPLICAS",
         Rule(action="fail", api="Produce", error="NOT_ENOUGH_REPLICAS")),
        ("Produce cut topic=payments", Rule(action="cut", api="Produce", topic="payments")),
    ],
)  # fmt: skip
def test_the_grammar_accepts_every_kind_of_rule(text: str, expected: Rule) -> None:
    assert parse_rule(text) == expected
    assert parse_rule(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("response Produce", "no action; expected one of drop, cut"),
        ("response Produce explode", "'explode' is not a direction"),
        ("drop cut", "'cut' is a second action"),
        ("drop nth=two", "nth=two is not a number"),
        ("drop nth=0", "nth=0 must be 1 or more"),
        ("drop sometimes=1", "no option 'sometimes'"),
        ("drop probability=2", "must be between 0 and 1"),
        ("delay", "action=delay needs delay_ms"),
        ("drop delay_ms=5", "delay_ms has no effect with action=drop"),
        ("response duplicate", "does not work on direction=response"),
        ("Fetch fail error=NOT_ENOUGH_REPLICAS", "can only answer api=Produce"),
        ("Fetch drop topic=payments", "topic can only select messages of api=Produce"),
        ("Produce fail error=OOPS", "not a Kafka error name"),
        ("hold delay_ms=-1", "must be 0 or more"),
        ("delay delay_ms=nan", "must be 0 or more"),
        ("delay delay_ms=1e999", "must be 0 or more, and finite"),
    ],
)
def test_the_grammar_rejects_invalid_rules(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule(text)
    assert expected in str(caught.value)
    assert text in str(caught.value)


def test_an_unknown_api_or_action_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match="api=Prodce is not a Kafka API"):
        Rule(action=Action.DROP, api="Prodce")
    with pytest.raises(ConfigError, match="action=lose: expected one of"):
        Rule(action="lose")


def test_the_old_module_name_still_works_and_warns() -> None:
    sys.modules.pop("oncelog.faults", None)
    with pytest.warns(DeprecationWarning, match=r"oncelog\.testing\.proxy"):
        faults = importlib.import_module("oncelog.faults")
    assert faults.Proxy is Proxy and faults.Fate.SWALLOWED is Fate.UNEXPECTED


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (lambda proxy: proxy.lose_ack("t"), "response Produce cut nth=1 count=1 topic=t"),
        (lambda proxy: proxy.lose_request("t", nth=3), "request Produce cut nth=3 count=1 topic=t"),
        (lambda proxy: proxy.repeat_request(count=2), "request Produce duplicate nth=1 count=2"),
        (lambda proxy: proxy.reorder(), "request Produce hold nth=1 count=1 release_after=1"),
        (lambda proxy: proxy.delay_acks(5.5), "response Produce delay delay_ms=5.5"),
        (
            lambda proxy: proxy.refuse("NOT_ENOUGH_REPLICAS"),
            "request Produce fail nth=1 count=1 error=NOT_ENOUGH_REPLICAS",
        ),
        (lambda proxy: proxy.lose_commit_ack(nth=2), "response EndTxn cut nth=2 count=1"),
    ],
)
def test_a_common_fault_is_added_by_its_name(add: Callable[[Proxy], int], expected: str) -> None:
    proxy = Proxy("127.0.0.1:9")
    number = add(proxy)
    assert [str(state.rule) for state in proxy.rules] == [expected]
    assert proxy.remove(number)
