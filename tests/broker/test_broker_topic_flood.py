"""A request that creates many topics makes them durable in one step. The number of topics is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from support.broker import RawClient
from support.fuzz.targets import NOW_MS, open_node

from oncelog.broker.topics.topics import FILE_NAME, NewTopic, Topic
from oncelog.errors import InvalidTopicException, PolicyViolation, StorageError, TopicAlreadyExists
from oncelog.log.manager import LogManager
from oncelog.server.embedded import Broker
from oncelog.testing.memory_disk import MemoryDisk
from oncelog.wire.messages import CreatePartitionsRequest, CreateTopicsRequest, MetadataRequest

POLICY_VIOLATION = PolicyViolation.code


def counted_writes(disk: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    writes: list[str] = []
    replace = disk.replace
    monkeypatch.setattr(disk, "replace", lambda name, *a, **k: writes.append(name) or replace(name, *a, **k))
    return writes


def creatable(name: str, partitions: int = 1) -> CreateTopicsRequest.CreatableTopic:
    return CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)


@pytest.mark.behaviour("I29")
def test_topics_of_one_request_are_durable_by_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        node = broker._running.node  # type: ignore[union-attr]
        writes = counted_writes(node.log_manager.disk, monkeypatch)
        answer = client.ask(CreateTopicsRequest(topics=[creatable(f"t{n}", 2) for n in range(36)]), 7)
        assert {topic.error_code for topic in answer.topics} == {0}
        assert all(topic.num_partitions == 2 and any(topic.topic_id) for topic in answer.topics)
        assert writes.count(FILE_NAME) == 1
        named = [MetadataRequest.MetadataRequestTopic(name=f"auto{n}") for n in range(30)]
        answer = client.ask(MetadataRequest(topics=named, allow_auto_topic_creation=True), 12)
        assert {topic.error_code for topic in answer.topics} == {0}
        assert writes.count(FILE_NAME) == 2


@pytest.mark.behaviour("I29")
def test_a_request_creates_at_most_ten_thousand_partitions() -> None:
    with Broker() as broker, RawClient(broker.bootstrap_servers) as client:
        asked = CreateTopicsRequest(topics=[creatable("a", 5_000), creatable("b", 5_001)])
        assert [t.error_code for t in client.ask(asked, 7).topics] == [POLICY_VIOLATION] * 2
        client.create_topic("t")
        more = CreatePartitionsRequest.CreatePartitionsTopic(name="t", count=10_002, assignments=None)
        (grown,) = client.ask(CreatePartitionsRequest(topics=[more]), 3).results
        assert grown.error_code == POLICY_VIOLATION


def test_each_topic_of_a_step_is_created_or_refused_by_itself() -> None:
    disk = MemoryDisk()
    node = open_node(disk)
    node.topics.create("there", 1, {}, NOW_MS)
    asked = ["there", "new.one", "new_one", "bad name", "last"]
    made = node.topics.create_all([NewTopic(name, 2, {}) for name in asked], NOW_MS)
    assert [type(each) for each in made] == [
        TopicAlreadyExists, Topic, InvalidTopicException, InvalidTopicException, Topic,
    ]  # fmt: skip
    node.close(NOW_MS)
    again = open_node(disk)
    assert sorted(topic.name for topic in again.topics.all()) == ["last", "new.one", "there"]
    assert len(again.topics.get("last").partitions) == 2  # type: ignore[union-attr]


def test_a_topic_that_cannot_be_opened_does_not_take_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    node = open_node(disk)
    open_partition = LogManager.open_partition

    def refusing(self: LogManager, at: Any, *args: Any) -> Any:
        if at.topic == "b" and at.partition == 1:
            raise StorageError("no room")
        return open_partition(self, at, *args)

    monkeypatch.setattr(LogManager, "open_partition", refusing)
    made = node.topics.create_all([NewTopic(name, 2, {}) for name in "abc"], NOW_MS)
    assert [type(each) for each in made] == [Topic, StorageError, Topic]
    monkeypatch.undo()
    node.close(NOW_MS)
    again = open_node(disk)
    assert {t.name: len(t.partitions) for t in again.topics.all()} == {"a": 2, "c": 2}


def test_nothing_is_created_if_the_list_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    node = open_node(disk)

    def full(*args: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "replace", full)
    with pytest.raises(StorageError):
        node.topics.create_all([NewTopic("a", 1, {}), NewTopic("b", 1, {})], NOW_MS)
    assert not list(node.topics.all())
