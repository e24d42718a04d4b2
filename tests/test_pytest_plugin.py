"""The fixtures that the wheel registers with pytest, used as an application's tests use them."""

from __future__ import annotations

import pytest

from oncelog import Admin, Broker, Consumer, Producer
from oncelog.testing import assert_exactly_once
from oncelog.testing.proxy import Proxy

_seen: list[str] = []


def test_a_producer_and_a_consumer_share_the_topic_of_the_test(
    oncelog_topic: str, oncelog_producer: Producer, oncelog_consumer: Consumer
) -> None:
    assert oncelog_producer.send(oncelog_topic, b"one book").result(60).offset == 0
    assert [record.value for record in oncelog_consumer.poll(timeout=60)] == [b"one book"]


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_gets_a_new_topic_on_the_same_broker(
    number: int, oncelog_topic: str, oncelog_session_broker: Broker, oncelog_admin: Admin
) -> None:
    assert oncelog_topic.startswith(f"test_each_test_gets_a_new_topic_on_the_same_broker-{number}-")
    assert [topic.name for topic in oncelog_admin.list_topics() if topic.name in {oncelog_topic, *_seen}] == [
        oncelog_topic
    ], "the topic of the first test is deleted"
    _seen.append(oncelog_topic)


def test_a_topic_that_the_test_deletes_is_no_error(oncelog_topic: str, oncelog_admin: Admin) -> None:
    oncelog_admin.delete_topics([oncelog_topic])


def test_a_lost_acknowledgement_doubles_nothing(
    oncelog_topic: str, oncelog_session_broker: Broker, oncelog_faults: Proxy
) -> None:
    number = oncelog_faults.lose_ack(oncelog_topic)
    with Producer({"bootstrap.servers": oncelog_faults.bootstrap_servers}) as producer:
        producer.send(oncelog_topic, b"one book").result(60)
    assert [(state.number, state.applied_count) for state in oncelog_faults.rules] == [(number, 1)]
    assert_exactly_once(oncelog_topic, oncelog_session_broker)


@pytest.mark.oncelog_broker({"num.partitions": 3})
def test_a_marker_gives_the_broker_settings(oncelog_broker: Broker) -> None:
    with Producer({"bootstrap.servers": oncelog_broker.bootstrap_servers}) as producer:
        assert producer.send("orders", b"one book", partition=2).result(60).partition == 2


def test_a_marker_without_a_mapping_is_a_usage_error(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.oncelog_broker(partitions=3))
    with pytest.raises(pytest.UsageError, match="needs one mapping"):
        request.getfixturevalue("oncelog_broker")
