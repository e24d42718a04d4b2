"""Large requests: carried out in bounded steps, between which others are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from helpers_fuzz import NOW_MS, open_node

from oncelog.broker.node import Node, Request
from oncelog.broker.topic_file import FILE_NAME
from oncelog.broker.waiting import Deferred
from oncelog.limits import DEFAULT_LIMITS
from oncelog.sim.disk import MemoryDisk
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    ListOffsetsRequest,
    MetadataRequest,
    OffsetFetchRequest,
    OffsetForLeaderEpochRequest,
)

STEP_ELEMENTS = DEFAULT_LIMITS.request_step_elements
PARTITIONS_PER_STEP = DEFAULT_LIMITS.partitions_per_step
MANY = 3 * STEP_ELEMENTS + 1


def driven(disk: MemoryDisk) -> Node:
    """Return a node whose chores wait for `finish`."""
    node = open_node(disk)
    node.log_manager.chores.on_added = lambda: None
    return node


def handle(node: Node, message: Any) -> Any:
    header = RequestHeader(message.api.key, message.api.max_version, 1, "c", 0)
    return node.handle(Request(1, header, message, "/127.0.0.1"), NOW_MS)


def finish(node: Node, deferred: Deferred) -> tuple[int, Any]:
    """Do the steps of an answer; returns how many there were, and the answer."""
    answers: list[Any] = []
    deferred.listen(answers.append)
    steps = 0
    while not answers:
        job = node.log_manager.chores.step()
        assert job is None
        steps += 1
    return steps, answers[0]


def large_requests() -> list[Any]:
    delete, epochs = DeleteRecordsRequest, OffsetForLeaderEpochRequest
    offset, fetch, metadata = ListOffsetsRequest, OffsetFetchRequest, MetadataRequest
    deleted = [delete.DeleteRecordsPartition(partition_index=0, offset=0)] * MANY
    ends = [epochs.OffsetForLeaderPartition(partition=0, leader_epoch=0)] * MANY
    looked = [offset.ListOffsetsPartition(partition_index=i, timestamp=-1) for i in range(MANY)]
    fetched = [fetch.OffsetFetchRequestTopics(name="t", partition_indexes=[0] * MANY)]
    return [
        delete(topics=[delete.DeleteRecordsTopic(name="t", partitions=deleted)]),
        epochs(topics=[epochs.OffsetForLeaderTopic(topic="t", partitions=ends)]),
        offset(topics=[offset.ListOffsetsTopic(name="t", partitions=looked)]),
        fetch(groups=[fetch.OffsetFetchRequestGroup(group_id="g", topics=fetched)]),
        metadata(
            topics=[metadata.MetadataRequestTopic(name=f"?{i}") for i in range(MANY)],
            allow_auto_topic_creation=False,
        ),
    ]


def test_a_request_of_many_elements_lets_others_have_their_turn() -> None:
    for message in large_requests():
        node = driven(MemoryDisk())
        node.topics.create("t", 1, {}, NOW_MS)
        answer = handle(node, message)
        assert isinstance(answer, Deferred), message.api.name
        steps, response = finish(node, answer)
        assert steps >= MANY // STEP_ELEMENTS
        alone = open_node(MemoryDisk())
        alone.topics.create("t", 1, {}, NOW_MS)
        version = message.api.max_version
        response_alone = handle(alone, message)
        assert response.encode(version) == response_alone.encode(version), message.api.name


def test_what_is_done_in_later_steps_is_charged() -> None:
    for message in large_requests():
        node = driven(MemoryDisk())
        answer = handle(node, message)
        charged = []

        def measure(work: Callable[[], Any], charged: list[int] = charged) -> Any:
            charged.append(1)
            return work()

        answer.measure = measure
        steps, _ = finish(node, answer)
        assert len(charged) == steps - 1  # the first continues from what `handle` did


def create(name: str, partition_count: int) -> CreateTopicsRequest:
    topic = CreateTopicsRequest.CreatableTopic(
        name=name, num_partitions=partition_count, replication_factor=1, assignments=[], configs=[]
    )
    return CreateTopicsRequest(topics=[topic], timeout_ms=1000)


def test_a_topic_of_many_partitions_is_made_in_steps_and_seen_whole() -> None:
    node, count = driven(MemoryDisk()), 5 * PARTITIONS_PER_STEP
    answer = handle(node, create("many", count))
    assert isinstance(answer, Deferred)
    node.log_manager.chores.step()
    assert node.topics.get("many") is None
    assert handle(node, create("many", 1)).topics[0].error_code == 36
    asked = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="many")])
    assert handle(node, asked).topics[0].error_code == 3
    steps, response = finish(node, answer)
    assert steps >= 4
    assert [topic.error_code for topic in response.topics] == [0]
    assert len(node.topics.get("many").partitions) == count  # type: ignore[union-attr]


def test_a_topic_is_made_to_its_end_though_its_client_went_away() -> None:
    node, count = driven(MemoryDisk()), 5 * PARTITIONS_PER_STEP
    answer = handle(node, create("many", count))
    answer.cancel()
    node.log_manager.chores.finish()
    assert len(node.topics.get("many").partitions) == count  # type: ignore[union-attr]


def test_a_topic_that_is_half_made_when_the_broker_stops_is_whole_at_the_next_start() -> None:
    disk, count = MemoryDisk(), 5 * PARTITIONS_PER_STEP
    node = driven(disk)
    handle(node, create("many", count))
    node.topics.create("other", 1, {}, NOW_MS)  # writes the file in between
    named = {each["name"]: each["partitions"] for each in json.loads(disk.read(FILE_NAME))["topics"]}
    assert named == {"many": count, "other": 1}
    node.close(NOW_MS)
    again = open_node(disk)
    assert again.log_manager.was_clean
    assert len(again.topics.get("many").partitions) == count  # type: ignore[union-attr]
