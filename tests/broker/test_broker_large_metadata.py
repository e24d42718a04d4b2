"""Metadata responses for many partitions are cached in encoded form, and the cache is never stale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker import RawClient

from oncelog.server.embedded import Broker
from oncelog.wire.messages import CreatePartitionsRequest, DeleteTopicsRequest, MetadataRequest

COUNT = 130


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RawClient]:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        yield client


def _counts(client: RawClient, version: int, name: str | None = "big", **fields: bool) -> dict[str, int]:
    topics = None if name is None else [MetadataRequest.MetadataRequestTopic(name=name)]
    answer = client.ask(MetadataRequest(topics=topics, **fields), version)
    assert [broker.node_id for broker in answer.brokers] == [1]
    assert all(p.leader_id == 1 for topic in answer.topics for p in topic.partitions)
    return {topic.name: len(topic.partitions) for topic in answer.topics if not topic.error_code}


@pytest.mark.parametrize("version", [0, 1, 5, 8, 9, 12, 13])
def test_a_repeated_request_gets_the_same_metadata(client: RawClient, version: int) -> None:
    client.create_topic("big", COUNT)
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="big")])
    first, again = client.ask(request, version), client.ask(request, version)
    assert first == again
    assert sorted(p.partition_index for p in again.topics[0].partitions) == list(range(COUNT))
    # Each version and each list of topics has its own cached response.
    assert _counts(client, 4, None) == {"big": COUNT}


def test_every_change_is_seen(client: RawClient) -> None:
    client.create_topic("big", COUNT)
    for _ in range(2):
        assert _counts(client, 9, None) == {"big": COUNT}
    client.create_topic("other", 2)
    for _ in range(2):
        assert _counts(client, 9, None) == {"big": COUNT, "other": 2}
    grown = CreatePartitionsRequest.CreatePartitionsTopic(name="big", count=COUNT + 1, assignments=None)
    client.ask(CreatePartitionsRequest(topics=[grown], timeout_ms=5000, validate_only=False), 1)
    for _ in range(2):
        assert _counts(client, 9) == {"big": COUNT + 1}
        assert _counts(client, 9, None) == {"big": COUNT + 1, "other": 2}
    client.ask(DeleteTopicsRequest(topic_names=["big"], timeout_ms=5000), 4)
    for _ in range(2):
        assert _counts(client, 9, allow_auto_topic_creation=False) == {}
        assert _counts(client, 9, None) == {"other": 2}


def test_a_cached_answer_does_not_keep_a_request_from_creating_the_topic(tmp_path: Path) -> None:
    settings = {"num.partitions": COUNT, "auto.create.topics.enable": True}
    with Broker(tmp_path, config=settings) as broker, RawClient(broker.bootstrap_servers) as client:
        assert _counts(client, 9, allow_auto_topic_creation=False) == {}
        assert _counts(client, 9, allow_auto_topic_creation=True) == {"big": COUNT}
        assert _counts(client, 9, allow_auto_topic_creation=False) == {"big": COUNT}


def test_few_answers_are_kept(client: RawClient) -> None:
    client.create_topic("big", COUNT)
    for number in range(40):
        names = ["big", *(f"unknown-{number}-{i}" for i in range(2))]
        asked = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
        answer = client.ask(MetadataRequest(topics=asked, allow_auto_topic_creation=False), 9)
        assert [topic.error_code for topic in answer.topics] == [0, 3, 3]
        assert [topic.name for topic in answer.topics] == names
