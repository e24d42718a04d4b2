"""Commits whose responses are lost, on our broker: while reading, in a rebalance, and at a close."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from support.groups.members import fill, member, take, wait_for
from support.topics import new_topic, requests
from support.wait import attempts

from oncelog import Admin, Consumer, TopicPartition
from oncelog.errors import TimedOut
from oncelog.testing.proxy import Proxy
from oncelog.testing.proxy.rules import parse_rule

LOSSES = [
    "response OffsetCommit drop nth=1",
    "response OffsetCommit cut nth=1",
    "request OffsetCommit cut nth=1",
]
"""Rules of the proxy for the first OffsetCommit.

They drop its response, cut the connection at its response, or cut it at the request.
"""

pytestmark = [
    pytest.mark.parametrize("protocol", ["classic", "consumer"]),
    pytest.mark.parametrize("loss", LOSSES, ids=["answer", "cut", "request"]),
]


def committed(servers: str, group: str, topic: str) -> list[int]:
    with Admin({"bootstrap.servers": servers}) as admin:
        offsets = admin.group_offsets(group)
    return [offsets[TopicPartition(topic, number)].offset for number in range(2)]


def one_that_reads(proxy: Proxy, group: str, topic: str, protocol: str, **settings: Any) -> Consumer:
    """Provide a member that has read ten records through the proxy and sent its first automatic commit."""
    quick = {"auto_commit_interval_ms": 20, "request_timeout_ms": 1_000, "group_protocol": protocol}
    consumer = member(proxy.bootstrap_servers, group, **{**quick, **settings})
    consumer.subscribe(topic)
    assert len(take(consumer, 10)) == 10
    wait_for(lambda: consumer.poll(0.05) == [] and bool(requests(proxy, "OffsetCommit")))
    return consumer


@pytest.fixture
def topic(ours: str) -> str:
    name = new_topic(ours, 2)
    fill(ours, name, 0, 10, 2)
    return name


def test_a_commit_of_the_application_outlives_it(
    ours: str, group: str, topic: str, protocol: str, loss: str
) -> None:
    with (
        Proxy(ours, rules=[parse_rule(loss)]) as proxy,
        one_that_reads(proxy, group, topic, protocol) as consumer,
    ):
        with suppress(TimedOut):  # if the response is lost, request.timeout.ms passes
            consumer.commit({TopicPartition(topic, number): 3 for number in range(2)})
        consumer.commit({TopicPartition(topic, number): 4 for number in range(2)})
        assert committed(ours, group, topic) == [4, 4]


def test_a_close_commits_what_was_read_last(
    ours: str, group: str, topic: str, protocol: str, loss: str
) -> None:
    with Proxy(ours, rules=[parse_rule(loss)]) as proxy:
        consumer = one_that_reads(proxy, group, topic, protocol, auto_commit_interval_ms=1)
        fill(ours, topic, 10, 10, 2)
        assert len(take(consumer, 10)) == 10
        consumer.close()
        assert committed(ours, group, topic) == [10, 10]


def test_a_rebalance_hands_over_at_what_was_read_last(
    ours: str, group: str, topic: str, protocol: str, loss: str
) -> None:
    with (
        Proxy(ours, rules=[parse_rule(loss)]) as proxy,
        one_that_reads(proxy, group, topic, protocol) as consumer,
        member(ours, group, group_protocol=protocol) as other,
    ):
        other.subscribe(topic)
        again = []
        for _ in attempts():
            if len(consumer.assignment()) == len(other.assignment()) == 1:
                break
            again += [*consumer.poll(0.05), *other.poll(0.05)]
        fill(ours, topic, 10, 2, 2)
        new = again
        for _ in attempts():
            if len(new) >= 2:
                break
            new += [*consumer.poll(0.05), *other.poll(0.05)]
        assert sorted(record.offset for record in new) == [5, 5], "nothing twice"
