"""Clients stop asking for topics that they no longer use, and do not create them again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
from support.wait import attempts, wait_until

from oncelog import Admin, Consumer, NewTopic, Producer, TopicPartition
from oncelog.client.connection.cluster import ClusterConnection
from oncelog.errors import UnknownTopicOrPartition

_numbers = itertools.count()


def new_name() -> str:
    return f"idle-{os.getpid()}-{next(_numbers)}"


def refresh(cluster: ClusterConnection, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Wait until the metadata have expired and been refreshed several times."""
    version = cluster.metadata.version

    def is_refreshed() -> bool:
        meanwhile()
        return cluster.metadata.version >= version + 5

    wait_until(is_refreshed)


def topics(admin: Admin) -> set[str]:
    return {topic.name for topic in admin.list_topics()}


def test_a_deleted_topic_stays_deleted_although_a_producer_sent_to_it_once(servers: str) -> None:
    once, always = new_name(), new_name()
    config = {"bootstrap.servers": servers}
    with Admin(config) as admin, Producer(config, metadata_max_age_ms=100) as producer:
        admin.create_topics([NewTopic(once, 1), NewTopic(always, 1)])
        producer.send(once, b"x").result(60)
        producer.send(always, b"x").result(60)
        admin.delete_topics(once)
        refresh(producer._driver.cluster, lambda: producer.send(always, b"x").result(60))
        assert once not in topics(admin)
        assert always in topics(admin)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_deleted_topic_stays_deleted_although_a_consumer_was_subscribed_to_it(
    servers: str, protocol: str
) -> None:
    once = new_name()
    config = {"bootstrap.servers": servers}
    settings = {"group_id": new_name(), "metadata_max_age_ms": 100, "group_protocol": protocol}
    with Admin(config) as admin, Consumer(config, **settings) as consumer:
        admin.create_topics([NewTopic(once, 1)])
        consumer.subscribe(once)
        wait_until(lambda: consumer.poll(0.2) or consumer.assignment())
        consumer.unsubscribe()
        admin.delete_topics(once)
        cluster = consumer._async._cluster
        assert cluster is not None
        refresh(cluster)
        assert once not in topics(admin)
        assert cluster.metadata.topics() == [], "nothing is kept of topics that are not read"


def test_an_admin_client_keeps_nothing_of_the_topics_it_was_asked_about(ours: str) -> None:
    config = {"bootstrap.servers": ours}
    with Admin(config, metadata_max_age_ms=50) as admin:
        names = [new_name() for _ in range(3)]
        admin.create_topics([NewTopic(name, 1) for name in names])
        admin.describe_topics([*names, "missing"], raise_errors=False)
        cluster = admin._async._router._cluster
        assert cluster is not None
        refresh(cluster)
        assert cluster.metadata.topics() == [] and not cluster.metadata._errors and not cluster._topics


@pytest.mark.parametrize("is_at_an_offset", [True, False], ids=["with a position", "without a position"])
def test_polling_waits_for_a_topic_that_is_about_to_exist(
    ours: str, monkeypatch: pytest.MonkeyPatch, is_at_an_offset: bool
) -> None:
    monkeypatch.setattr("oncelog.client.connection.cluster.UNKNOWN_TOPIC_PATIENCE_MS", 50)
    topic = new_name()
    config = {"bootstrap.servers": ours}
    with Consumer(config, auto_offset_reset="earliest") as consumer:
        consumer.assign(TopicPartition(topic, 0))
        if is_at_an_offset:
            consumer.seek(TopicPartition(topic, 0), 0)
        for _ in range(5):
            assert consumer.poll(0.1) == []
        with Producer(config) as producer:
            producer.send(topic, b"at last").result(60)
        for _ in attempts():
            if records := consumer.poll(1):
                break
        assert [record.value for record in records] == [b"at last"]


@pytest.mark.parametrize("is_at_an_offset", [True, False], ids=["with a position", "without a position"])
def test_polling_a_topic_that_does_not_come_to_exist_says_so(ours: str, is_at_an_offset: bool) -> None:
    topic = new_name()
    with Consumer({"bootstrap.servers": ours}, request_timeout_ms=300) as consumer:
        consumer.assign(TopicPartition(topic, 0))
        if is_at_an_offset:
            consumer.seek(TopicPartition(topic, 0), 0)
        with pytest.raises(UnknownTopicOrPartition, match="does not exist"):
            any(consumer.poll(1) for _ in range(100))
