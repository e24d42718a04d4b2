"""Creation, deletion, growth and settings of topics, their names, and what a restart keeps."""

from __future__ import annotations

import gc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.broker import RawClient, batch
from support.fuzz.targets import NOW_MS, open_node
from support.wait import wait_until

from oncelog import errors
from oncelog.broker.topics.topics_file import FILE_NAME
from oncelog.log.local_log import LocalLog
from oncelog.server.disk import RealDisk
from oncelog.server.embedded import Broker
from oncelog.testing.memory_disk import MemoryDisk, SimulatedCrash
from oncelog.types import Origin, TopicPartition
from oncelog.wire.messages import (
    AlterConfigsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    IncrementalAlterConfigsRequest,
    MetadataRequest,
)

Creatable = CreateTopicsRequest.CreatableTopic


def create(
    client: RawClient, *topics: CreateTopicsRequest.CreatableTopic, version: int = 7, **fields: bool
) -> list[int]:
    response = client.ask(CreateTopicsRequest(topics=list(topics), **fields), version)
    return [topic.error_code for topic in response.topics]


def plain(
    name: str, partitions: int = 1, factor: int = 1, **configs: str | None
) -> CreateTopicsRequest.CreatableTopic:
    return Creatable(
        name=name,
        num_partitions=partitions,
        replication_factor=factor,
        configs=[
            CreateTopicsRequest.CreatableTopicConfig(name=key.replace("_", "."), value=value)
            for key, value in configs.items()
        ],
    )


def partition_count(client: RawClient, name: str) -> int:
    asked = MetadataRequest.MetadataRequestTopic(name=name)
    request = MetadataRequest(topics=[asked], allow_auto_topic_creation=False)
    return len(client.ask(request, 9).topics[0].partitions)


@pytest.mark.parametrize("version", range(2, 8))
def test_every_version_creates(client: RawClient, version: int) -> None:
    assert create(client, plain(f"created-{version}", 2), version=version) == [0]
    assert partition_count(client, f"created-{version}") == 2


def test_creation_tells_id_and_settings(client: RawClient) -> None:
    result = client.create_topic("told", 2, retention_ms=1234)
    assert (result.num_partitions, result.replication_factor) == (2, 1)
    assert result.topic_id != b"\0" * 16
    assert {c.name: (c.value, c.config_source) for c in result.configs}["retention.ms"] == ("1234", 1)


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        (plain(""), errors.InvalidTopicException),
        (plain("."), errors.InvalidTopicException),
        (plain("a b"), errors.InvalidTopicException),
        (plain("x" * 250), errors.InvalidTopicException),
        (plain("zero", 0), errors.InvalidPartitions),
        (plain("rf", 1, 3), errors.InvalidReplicationFactor),
        (plain("cfg", retention_mss="1"), errors.InvalidConfig),
        (plain("cfg", retention_ms="soon"), errors.InvalidConfig),
        (plain("cfg", retention_ms=None), errors.InvalidConfig),
    ],
)
def test_invalid_topics_are_not_created(
    client: RawClient, topic: CreateTopicsRequest.CreatableTopic, error: type[errors.BrokerError]
) -> None:
    assert create(client, topic) == [error.code]


def test_names_collide_and_repeat(client: RawClient) -> None:
    assert create(client, plain("a.b")) == [0]
    assert create(client, plain("a_b")) == [errors.InvalidTopicException.code]
    assert create(client, plain("a.b")) == [errors.TopicAlreadyExists.code]
    assert create(client, plain("twice"), plain("twice")) == [errors.InvalidRequest.code]
    assert create(client, plain("x" * 249)) == [0]


def test_assignments_name_this_broker(client: RawClient) -> None:
    def assigned(name: str, *brokers: int) -> CreateTopicsRequest.CreatableTopic:
        topic = plain(name, -1, -1)
        topic.assignments = [
            CreateTopicsRequest.CreatableReplicaAssignment(partition_index=index, broker_ids=[broker])
            for index, broker in enumerate(brokers)
        ]
        return topic

    assert create(client, assigned("mine", 1, 1)) == [0]
    assert partition_count(client, "mine") == 2
    assert create(client, assigned("other", 5)) == [errors.InvalidReplicaAssignment.code]


def test_validate_only_creates_nothing(client: RawClient) -> None:
    assert create(client, plain("only-checked"), validate_only=True) == [0]
    assert partition_count(client, "only-checked") == 0


def test_a_higher_replication_factor_when_told_to() -> None:
    config = {"oncelog.accept.any.replication.factor": True}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        assert create(client, plain("three", 1, 3)) == [0]


@pytest.mark.parametrize("version", range(1, 7))
def test_every_version_deletes(client: RawClient, version: int) -> None:
    created = client.create_topic(f"deleted-{version}")
    by_name = DeleteTopicsRequest(topic_names=[f"deleted-{version}", "never"], timeout_ms=1000)
    by_id = DeleteTopicsRequest(
        topics=[
            DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=created.topic_id),
            DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=b"\x07" * 16),
        ]
    )
    unknown = errors.UnknownTopicId if version >= 6 else errors.UnknownTopicOrPartition
    responses = client.ask(by_id if version >= 6 else by_name, version).responses
    assert [r.error_code for r in responses] == [0, unknown.code]
    assert partition_count(client, f"deleted-{version}") == 0


def test_a_recreated_topic_is_empty_and_has_another_id(client: RawClient) -> None:
    before = client.create_topic("reborn")
    client.produce("reborn", batch(b"old"))
    client.ask(DeleteTopicsRequest(topic_names=["reborn"], timeout_ms=1000), 5)
    after = client.create_topic("reborn")
    assert client.offset("reborn") == 0
    assert before.topic_id != after.topic_id


def test_partitions_are_added(client: RawClient) -> None:
    client.create_topic("growing")

    def grow(count: int, name: str = "growing") -> int:
        topic = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)
        return int(client.ask(CreatePartitionsRequest(topics=[topic]), 3).results[0].error_code)

    assert grow(3) == 0
    assert partition_count(client, "growing") == 3
    assert client.produce("growing", batch(b"x"), 2).error_code == 0
    assert grow(3) == grow(1) == errors.InvalidPartitions.code
    assert grow(2, "nowhere") == errors.UnknownTopicOrPartition.code


def describe(client: RawClient, kind: int, name: str, *keys: str) -> dict[str, tuple[str | None, int]]:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=list(keys) or None
    )
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=True)
    result = client.ask(request, 4).results[0]
    assert result.error_code == 0, result
    assert all(config.documentation for config in result.configs)
    return {config.name: (config.value, config.config_source) for config in result.configs}


def test_settings_are_described_with_their_source(client: RawClient) -> None:
    client.create_topic("described", retention_ms=777)
    topic = describe(client, 2, "described")
    assert topic["retention.ms"] == ("777", 1)
    assert topic["segment.bytes"] == ("1073741824", 5)
    assert describe(client, 2, "described", "retention.ms") == {"retention.ms": ("777", 1)}
    assert describe(client, 4, "1", "num.partitions") == {"num.partitions": ("1", 5)}


def test_settings_are_replaced_or_changed_singly(client: RawClient) -> None:
    client.create_topic("altered", retention_ms=1, max_message_bytes=1000)

    def replace(**configs: str) -> int:
        resource = AlterConfigsRequest.AlterConfigsResource(
            resource_type=2,
            resource_name="altered",
            configs=[
                AlterConfigsRequest.AlterableConfig(name=key.replace("_", "."), value=value)
                for key, value in configs.items()
            ],
        )
        return int(client.ask(AlterConfigsRequest(resources=[resource]), 2).responses[0].error_code)

    def change(operation: int, key: str, value: str | None, kind: int = 2, name: str = "altered") -> int:
        config = IncrementalAlterConfigsRequest.AlterableConfig(
            name=key, config_operation=operation, value=value
        )
        resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
            resource_type=kind, resource_name=name, configs=[config]
        )
        response = client.ask(IncrementalAlterConfigsRequest(resources=[resource]), 1)
        return int(response.responses[0].error_code)

    assert replace(retention_ms="5") == 0
    own = {k: v for k, v in describe(client, 2, "altered").items() if v[1] == 1}
    assert own == {"retention.ms": ("5", 1)}
    assert change(0, "max.message.bytes", "100") == 0
    assert client.produce("altered", batch(b"x" * 500)).error_code == errors.MessageTooLarge.code
    assert change(1, "max.message.bytes", None) == 0
    assert client.produce("altered", batch(b"x" * 500)).error_code == 0
    assert change(2, "cleanup.policy", "compact") == 0
    assert describe(client, 2, "altered", "cleanup.policy") == {"cleanup.policy": ("delete,compact", 1)}
    assert change(3, "cleanup.policy", "compact") == 0
    assert describe(client, 2, "altered", "cleanup.policy") == {"cleanup.policy": ("delete", 1)}
    assert change(2, "retention.ms", "1") == errors.InvalidConfig.code
    assert change(0, "retention.ms", "x") == errors.InvalidConfig.code
    assert change(9, "retention.ms", "1") == errors.InvalidRequest.code
    assert change(0, "retention.ms", "1", name="nowhere") == errors.UnknownTopicOrPartition.code
    assert change(0, "num.partitions", "2", kind=4, name="1") == errors.InvalidRequest.code


def test_records_are_deleted_up_to_an_offset(client: RawClient, topic: str) -> None:
    for value in (b"a", b"b", b"c"):
        client.produce(topic, batch(value))

    def delete(offset: int) -> tuple[int, int]:
        partition = DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=offset)
        asked = DeleteRecordsRequest.DeleteRecordsTopic(name=topic, partitions=[partition])
        result = client.ask(DeleteRecordsRequest(topics=[asked]), 2).topics[0].partitions[0]
        return result.error_code, result.low_watermark

    assert delete(1) == (0, 1)
    assert client.offset(topic, -2) == 1
    assert client.fetch(topic, 0).error_code == errors.OffsetOutOfRange.code
    assert delete(9) == (errors.OffsetOutOfRange.code, -1)
    assert delete(-1) == (0, 3)
    assert (client.offset(topic, -2), client.offset(topic)) == (3, 3)


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        kept = client.create_topic("kept", 2, retention_ms=-1)
        client.create_topic("gone")
        client.produce("kept", batch(b"data"), 1)
        client.ask(DeleteTopicsRequest(topic_names=["gone"], timeout_ms=1000), 5)
        port = broker.port
        broker.stop()
        broker.start()
        assert broker.port == port
        with RawClient(broker.bootstrap_servers) as again:
            response = again.ask(MetadataRequest(topics=None), 12)
            assert [(t.name, t.topic_id, len(t.partitions)) for t in response.topics] == [
                ("kept", kept.topic_id, 2)
            ]
            assert again.values("kept", 1) == [b"data"]
            assert describe(again, 2, "kept", "retention.ms") == {"retention.ms": ("-1", 1)}


def test_a_request_that_grows_or_deletes_many_topics_writes_the_file_once_or_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[str] = []
    replace = RealDisk.replace

    def counted(disk: RealDisk, name: str, *args: Any, **options: Any) -> None:
        writes.append(name)
        replace(disk, name, *args, **options)

    names = [f"t{index}" for index in range(20)]
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        create(client, *(plain(name) for name in names))
        monkeypatch.setattr(RealDisk, "replace", counted)
        growing = [
            CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=3, assignments=None)
            for name in [*names, "nowhere"]
        ]
        grown = client.ask(CreatePartitionsRequest(topics=growing), 3).results
        assert [each.error_code for each in grown] == [0] * 20 + [errors.UnknownTopicOrPartition.code]
        assert writes.count(FILE_NAME) == 1
        assert partition_count(client, "t7") == 3
        doomed = [DeleteTopicsRequest.DeleteTopicState(name=name) for name in [*names[:10], "nowhere"]]
        deleted = client.ask(DeleteTopicsRequest(topics=doomed), 6).responses
        assert [each.error_code for each in deleted] == [0] * 10 + [errors.UnknownTopicOrPartition.code]
        assert writes.count(FILE_NAME) == 3
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        topics = client.ask(MetadataRequest(topics=None), 9).topics
        assert {topic.name: len(topic.partitions) for topic in topics} == dict.fromkeys(names[10:], 3)


def test_a_request_makes_no_more_partitions_than_one_may(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        create(client, plain("a"), plain("b"))
        growing = [
            CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=6_000, assignments=None)
            for name in "ab"
        ]
        results = client.ask(CreatePartitionsRequest(topics=growing, validate_only=True), 3).results
        assert [result.error_code for result in results] == [0, errors.PolicyViolation.code]


@pytest.mark.behaviour("I17")
def test_a_partition_that_a_start_made_survives_a_power_loss() -> None:
    """A crash interrupted the creation of the topic after its entry in the topics file, so the start created
    the partition.
    """
    tp, made_by_start = TopicPartition("t", 1), 0
    for crash_after in range(1, 10_000, 5):
        disk = MemoryDisk()
        node = open_node(disk)
        disk.crash_after = disk.steps + crash_after
        try:
            node.topics.create("t", 2, {}, NOW_MS)
            break
        except SimulatedCrash:
            disk = disk.after_kill()
        is_missing = not disk.exists(str(tp))
        node = open_node(disk)
        if node.topics.get("t") is None:
            continue
        made_by_start += is_missing
        _, partition = node.topics.partition(tp)
        synced = batch(b"synced", timestamp_ms=NOW_MS)
        partition.append(memoryview(synced), origin=Origin.CLIENT, now_ms=NOW_MS)
        partition.flush()
        for seed in range(8):
            _, partition = open_node(disk.after_power_loss(Random(seed))).topics.partition(tp)
            assert partition.log_end_offset == 1, (crash_after, seed)
    assert made_by_start


def test_a_deleted_partition_is_freed_without_the_garbage_collector(
    broker: Broker, client: RawClient
) -> None:
    """Regression: deleted partitions stayed in memory, with their indexes and producers.

    GcTuner freezes the objects that survive a long collection, and the collector never frees them. So a
    partition must not be part of a reference cycle.
    """

    def log_count() -> int:
        return sum(type(thing) is LocalLog for thing in gc.get_objects())

    gc.collect()
    before = log_count()
    gc.disable()
    try:
        assert create(client, plain("freed", partitions=3)) == [0]
        client.produce("freed", batch(b"v"))
        assert log_count() == before + 3
        client.ask(DeleteTopicsRequest(topic_names=["freed"], timeout_ms=1000), 5)
        wait_until(lambda: log_count() == before)
    finally:
        gc.enable()
