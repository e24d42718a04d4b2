"""Settings that clients change while the broker runs, and how their text is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.broker import RawClient, batch
from support.groups.node import GroupNode, create, heartbeat

from oncelog import Broker
from oncelog.broker.settings.dynamic_config import FILE_NAME as CONFIGS_FILE
from oncelog.broker.topics.topic_config import check_overrides
from oncelog.broker.topics.topics import FILE_NAME
from oncelog.config import BROKER, TOPIC
from oncelog.errors import (
    ConfigError,
    InvalidCommitOffsetSize,
    InvalidConfig,
    InvalidRequest,
    KafkaStorageError,
    MessageTooLarge,
    StorageError,
)
from oncelog.rules.groups.consumer import ConsumerGroup
from oncelog.rules.groups.consumer import Heartbeat as MemberHeartbeat
from oncelog.rules.security.authorization import Operation, Permission, ResourceType
from oncelog.server.disk import RealDisk
from oncelog.wire import messages as m
from oncelog.wire.messages import ConsumerGroupHeartbeatRequest as Heartbeat
from oncelog.wire.messages import DescribeConfigsRequest as Describe
from oncelog.wire.messages import IncrementalAlterConfigsRequest as Alter

SET, DELETE, APPEND, SUBTRACT = range(4)
BROKER_TYPE, GROUP_TYPE = 4, 32


def alter(client: RawClient, resource_type: int, name: str, **values: str | None) -> int:
    """Set the given settings, or delete those whose value is None. Return the error code.

    `a_b` in a keyword stands for the setting a.b.
    """
    configs = [
        Alter.AlterableConfig(
            name=key.replace("_", "."), config_operation=DELETE if value is None else SET, value=value
        )
        for key, value in values.items()
    ]
    resource = Alter.AlterConfigsResource(resource_type=resource_type, resource_name=name, configs=configs)
    (answer,) = client.ask(Alter(resources=[resource]), 1).responses
    return int(answer.error_code)


@given(st.text(alphabet="0123456789+-_. eExn\t", max_size=25))
def test_a_number_is_read_as_java_reads_it_or_refused(text: str) -> None:
    try:
        settings = TOPIC.parse({"retention.bytes": text, "min.cleanable.dirty.ratio": "0.5"})
    except ConfigError:
        return
    assert -(2**63) <= settings["retention.bytes"] < 2**63
    assert settings["retention.bytes"] == int(text)
    assert "_" not in text


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1_0", "", "x"])
def test_a_ratio_is_a_finite_number(text: str) -> None:
    with pytest.raises(ConfigError):
        TOPIC.parse({"min.cleanable.dirty.ratio": text})


def test_a_small_segment_size_of_an_older_version_still_opens(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert alter(client, 2, "t", segment_bytes="1000") == InvalidConfig.code
    path = tmp_path / FILE_NAME
    content = json.loads(path.read_text())
    content["topics"][0]["settings"] = {"segment.bytes": "1000"}
    path.write_text(json.dumps(content))
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert alter(client, 2, "t", retention_ms="5") == 0
        assert alter(client, 2, "t", segment_bytes="999") == InvalidConfig.code
        assert alter(client, 2, "t", segment_bytes="2000000") == 0
        assert alter(client, 2, "t", segment_bytes="1000") == InvalidConfig.code


def describe(client: RawClient, resource_type: int, name: str, key: str) -> list[tuple[str | None, int]]:
    """Return the values of a setting with their sources, the effective one first."""
    resource = Describe.DescribeConfigsResource(
        resource_type=resource_type, resource_name=name, configuration_keys=[key]
    )
    (result,) = client.ask(Describe(resources=[resource], include_synonyms=True), 4).results
    assert result.error_code == 0
    for config in result.configs:
        assert (config.value, config.config_source) == (config.synonyms[0].value, config.synonyms[0].source)
    return [(synonym.value, synonym.source) for config in result.configs for synonym in config.synonyms]


def test_a_broker_setting_holds_at_once_and_after_a_restart(tmp_path: Path) -> None:
    config = {"message.max.bytes": 2_000_000}
    with Broker(tmp_path, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert client.produce("t", batch(b"v" * 5_000)).error_code == 0
        assert alter(client, BROKER_TYPE, "", message_max_bytes="1000") == 0
        assert client.produce("t", batch(b"v" * 5_000)).error_code == MessageTooLarge.code
        assert alter(client, BROKER_TYPE, "1", message_max_bytes="100000") == 0
        assert client.produce("t", batch(b"v" * 5_000)).error_code == 0
    with Broker(tmp_path, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        layers = [("100000", 2), ("1000", 3), ("2000000", 4), ("1048588", 5)]
        assert describe(client, BROKER_TYPE, "1", "message.max.bytes") == layers
        assert describe(client, 2, "t", "max.message.bytes") == layers
        assert describe(client, BROKER_TYPE, "", "message.max.bytes") == [("1000", 3)]
        assert client.produce("t", batch(b"v" * 200_000)).error_code == MessageTooLarge.code
        assert alter(client, BROKER_TYPE, "1", message_max_bytes=None) == 0
        assert alter(client, BROKER_TYPE, "", message_max_bytes=None) == 0
        assert describe(client, BROKER_TYPE, "1", "message.max.bytes") == layers[2:]
        assert client.produce("t", batch(b"v" * 200_000)).error_code == 0


@pytest.mark.parametrize(("configured", "appended"), [(None, "delete,compact"), ("compact", "compact")])
def test_a_list_of_the_cluster_is_appended_to_its_default(
    tmp_path: Path, configured: str | None, appended: str
) -> None:
    """R1418: the value replaced the default, so topics without a policy of their own lost their retention."""
    config = {} if configured is None else {"log.cleanup.policy": configured}

    def change(client: RawClient, operation: int, value: str) -> str | None:
        named = Alter.AlterableConfig(name="log.cleanup.policy", config_operation=operation, value=value)
        resource = Alter.AlterConfigsResource(resource_type=BROKER_TYPE, resource_name="", configs=[named])
        assert client.ask(Alter(resources=[resource]), 1).responses[0].error_code == 0
        return describe(client, 2, "t", "cleanup.policy")[0][0]

    with Broker(tmp_path, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert change(client, APPEND, "compact") == appended
        assert change(client, APPEND, "compact") == appended
        assert change(client, SET, "compact") == "compact"
        assert change(client, APPEND, "delete") == "compact,delete"
        assert change(client, SUBTRACT, "compact") == "delete"


def test_a_default_retention_of_0_is_refused_as_by_kafka(tmp_path: Path) -> None:
    """A default of 0 would delete all records. Kafka allows 0 for a topic, and an earlier version may have
    stored a default of 0.
    """
    with pytest.raises(ConfigError, match=r"log\.retention\.ms must not be 0"):
        Broker(tmp_path, config={"log.retention.ms": 0}).start()
    stored = {"version": 1, "brokers": {"": {"log.retention.ms": "0"}}, "groups": {}}
    (tmp_path / CONFIGS_FILE).write_text(json.dumps(stored))
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert describe(client, BROKER_TYPE, "", "log.retention.ms") == [("0", 3)]
        assert alter(client, BROKER_TYPE, "", log_retention_ms="-1") == 0
        for name in ("", "1"):
            assert alter(client, BROKER_TYPE, name, log_retention_ms="0") == InvalidRequest.code
        client.create_topic("t")
        assert alter(client, 2, "t", retention_ms="0") == 0


def test_a_setting_that_cannot_be_stored_is_not_changed(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        (tmp_path / CONFIGS_FILE).mkdir()  # a directory with the file's name makes writing the file fail
        assert alter(client, BROKER_TYPE, "1", message_max_bytes="1000") == KafkaStorageError.code
        assert alter(client, GROUP_TYPE, "g", consumer_session_timeout_ms="46000") == KafkaStorageError.code
        assert describe(client, BROKER_TYPE, "1", "message.max.bytes") == [("1048588", 5)]
        (tmp_path / CONFIGS_FILE).rmdir()


def test_settings_that_cannot_be_read_keep_the_broker_from_starting(tmp_path: Path) -> None:
    for text in ("{", '{"version": 2}', '{"version": 1, "brokers": {"1": {"node.id": "2"}}, "groups": {}}'):
        (tmp_path / CONFIGS_FILE).write_text(text)
        with pytest.raises(StorageError, match=CONFIGS_FILE), Broker(tmp_path):
            pass


def test_a_groups_setting_holds_from_the_next_heartbeat_and_after_a_restart(tmp_path: Path) -> None:
    def interval_ms(client: RawClient) -> int:
        request = Heartbeat(
            group_id="g",
            member_id="m",
            member_epoch=0,
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        )
        answer = client.ask(request, 1)
        assert answer.error_code == 0, answer
        return int(answer.heartbeat_interval_ms)

    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert interval_ms(client) == 5_000
        assert alter(client, GROUP_TYPE, "g", consumer_heartbeat_interval_ms="7000") == 0
        assert interval_ms(client) == 7_000
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert interval_ms(client) == 7_000
        key = "consumer.heartbeat.interval.ms"
        assert describe(client, GROUP_TYPE, "g", key) == [("7000", 8), ("5000", 5)]
        assert alter(client, GROUP_TYPE, "g", consumer_heartbeat_interval_ms=None) == 0
        assert interval_ms(client) == 5_000


def test_a_groups_session_ends_by_its_own_timeout() -> None:
    group = ConsumerGroup("g", session_timeout_ms=45_000)
    beat = MemberHeartbeat("m", 0, rebalance_timeout_ms=60_000, topics=frozenset({"t"}), owned=frozenset())
    group.heartbeat(beat, lambda names, regexes: {}, 1_000)
    group.set_session_timeout(50_000)
    assert group.next_deadline_ms() == 46_000
    group.heartbeat(beat, lambda names, regexes: {}, 2_000)
    assert group.next_deadline_ms() == 52_000


@pytest.mark.parametrize(
    ("key", "stored", "value"),
    [
        ("retention.ms", "1_000", "1000"),
        ("retention.ms", "9" * 25, str(2**63 - 1)),
        ("retention.bytes", "\u0663", "3"),
        ("min.cleanable.dirty.ratio", "nan", "0.5"),
    ],
)
def test_values_that_an_older_version_stored_open_as_it_read_them(
    tmp_path: Path, key: str, stored: str, value: str
) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
    path = tmp_path / FILE_NAME
    content = json.loads(path.read_text())
    content["topics"][0]["settings"] = {key: stored}
    path.write_text(json.dumps(content))
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert describe(client, 2, "t", key)[0][0] == value
        assert alter(client, 2, "t", segment_ms="5000") == 0


def test_a_request_writes_each_file_once_however_many_resources_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resource(resource_type: int, name: str, key: str, value: str) -> Alter.AlterConfigsResource:
        config = Alter.AlterableConfig(name=key, config_operation=SET, value=value)
        return Alter.AlterConfigsResource(resource_type=resource_type, resource_name=name, configs=[config])

    writes: list[str] = []
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        for index in range(3):
            client.create_topic(f"t{index}")
        replace = RealDisk.replace

        def counted(disk: RealDisk, name: str, *args: Any, **options: Any) -> None:
            writes.append(name)
            replace(disk, name, *args, **options)

        def put(disk: RealDisk, old: str, new: str) -> None:
            writes.append(new)
            rename(disk, old, new)

        rename = RealDisk.rename
        monkeypatch.setattr(RealDisk, "replace", counted)
        monkeypatch.setattr(RealDisk, "rename", put)
        resources = [resource(2, f"t{index}", "retention.ms", "5000") for index in range(4)]
        resources += [resource(2, "t1", "retention.ms", "x")]
        resources += [
            resource(GROUP_TYPE, f"g{index}", "consumer.session.timeout.ms", "50000") for index in range(9)
        ]
        resources += [resource(BROKER_TYPE, "", "log.roll.ms", "1000")]
        answer = client.ask(Alter(resources=resources), 1)
        assert [response.error_code for response in answer.responses] == [0, 42, 0, 3, 42] + [0] * 10
        assert sorted(writes) == sorted([FILE_NAME, CONFIGS_FILE])
        assert describe(client, 2, "t2", "retention.ms")[0] == ("5000", 1)
        assert describe(client, 2, "t1", "segment.ms")[0] == ("1000", 3)
        assert describe(client, GROUP_TYPE, "g8", "consumer.session.timeout.ms")[0] == ("50000", 8)


def test_a_groups_session_is_longer_than_its_heartbeats_are_apart(tmp_path: Path) -> None:
    config = {"group.consumer.min.session.timeout.ms": 1_000}
    with Broker(tmp_path, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        assert alter(client, GROUP_TYPE, "g", consumer_session_timeout_ms="5000") == InvalidConfig.code
        assert alter(client, GROUP_TYPE, "g", consumer_session_timeout_ms="5001") == 0
        assert alter(client, GROUP_TYPE, "g", consumer_heartbeat_interval_ms="5001") == InvalidConfig.code


def test_the_largest_record_of_a_group_is_that_of_now(tmp_path: Path) -> None:
    def commit() -> int:
        partition = m.OffsetCommitRequest.OffsetCommitRequestPartition(
            partition_index=0, committed_offset=1, committed_metadata=""
        )
        topic = m.OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])
        request = m.OffsetCommitRequest(
            group_id="g", generation_id_or_member_epoch=-1, member_id="", topics=[topic]
        )
        return int(client.ask(request, 8).topics[0].partitions[0].error_code)

    def synced(size_bytes: int) -> int:
        protocol = m.JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=bytes(size_bytes))
        joined = client.ask(
            m.JoinGroupRequest(
                group_id="large",
                session_timeout_ms=30_000,
                rebalance_timeout_ms=30_000,
                member_id="",
                protocol_type="consumer",
                protocols=[protocol],
            ),
            3,
        )
        assert joined.error_code == 0
        request = m.SyncGroupRequest(
            group_id="large", generation_id=joined.generation_id, member_id=joined.member_id, assignments=[]
        )
        return int(client.ask(request, 3).error_code)

    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert alter(client, BROKER_TYPE, "", message_max_bytes="4000000") == 0
        assert synced(2_000_000) == 0
        assert commit() == 0
        assert alter(client, BROKER_TYPE, "", message_max_bytes="5") == 0
        assert commit() == InvalidCommitOffsetSize.code
        (deleted,) = client.ask(m.DeleteGroupsRequest(groups_names=["g"]), 2).results
        assert deleted.error_code == 0
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert commit() == InvalidCommitOffsetSize.code
        assert alter(client, BROKER_TYPE, "", message_max_bytes=None) == 0
        assert commit() == 0


def test_a_page_of_topics_names_none_that_its_client_may_not_describe(tmp_path: Path) -> None:
    config = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": True,
    }
    with Broker(tmp_path, config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        for name in ("a", "b-secret", "c"):
            client.create_topic(name)
        denial = m.CreateAclsRequest.AclCreation(
            resource_type=int(ResourceType.TOPIC),
            resource_name="b-secret",
            resource_pattern_type=3,
            principal="User:*",
            host="*",
            operation=int(Operation.ALL),
            permission_type=int(Permission.DENY),
        )
        assert client.ask(m.CreateAclsRequest(creations=[denial]), 3).results[0].error_code == 0
        request = m.DescribeTopicPartitionsRequest(topics=[], response_partition_limit=1, cursor=None)
        page = client.ask(request, 0)
        assert [topic.name for topic in page.topics] == ["a"]
        assert (page.next_cursor.topic_name, page.next_cursor.partition_index) == ("c", 0)


def test_log_directories_are_described_of_a_topic_named_twice(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t", partitions=3)
        topics = [
            m.DescribeLogDirsRequest.DescribableLogDirTopic(topic="t", partitions=[index]) for index in (0, 2)
        ]
        (directory,) = client.ask(m.DescribeLogDirsRequest(topics=topics), 4).results
        (described,) = directory.topics
        assert [partition.partition_index for partition in described.partitions] == [0, 2]


def test_groups_with_long_names_have_no_settings_of_their_own(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        name = "g" * 257
        assert alter(client, GROUP_TYPE, name, consumer_session_timeout_ms="46000") == InvalidRequest.code
        assert alter(client, GROUP_TYPE, name[1:], consumer_session_timeout_ms="46000") == 0


CLASSES = "org.apache.kafka.coordinator.group.assignor."


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("uniform,range", ["uniform", "range"]),
        (f"{CLASSES}RangeAssignor, {CLASSES}UniformAssignor", ["range", "uniform"]),
        ("range", ["range"]),
    ],
)
def test_assignors_are_known_by_their_names_and_by_kafkas_classes(text: str, offered: list[str]) -> None:
    place = GroupNode(group_consumer_assignors=text)
    place.ask(create("t"), 5)
    for wish in ("uniform", "range"):
        (answer,) = place.ask(heartbeat("g", "m", server_assignor=wish), 1)
        assert (answer.error_code == 0) is (wish in offered)
    (described,) = place.ask(m.ConsumerGroupDescribeRequest(group_ids=["g"]), 1)[0].groups
    assert described.assignor_name in offered
    (answer,) = place.ask(heartbeat("h", "m"), 1)
    (described,) = place.ask(m.ConsumerGroupDescribeRequest(group_ids=["h"]), 1)[0].groups
    assert (answer.error_code, described.assignor_name) == (0, offered[0])


@pytest.mark.parametrize("text", ["", ",", "foo", "uniform,foo", "Range", f"{CLASSES}StickyAssignor"])
def test_unknown_assignors_refuse_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"group\.consumer\.assignors"):
        BROKER.parse({"group.consumer.assignors": text})


def test_the_own_settings_of_a_topic_have_a_maximum_length(client: RawClient) -> None:
    """Regression: with settings of 64 KB for each of 1,000 topics, the broker took 1.3 GB.

    A list in memory takes 20 times the length of its text. Each change of a topic also writes the settings of
    all topics, which took 2 s.
    """
    key, longest = "leader.replication.throttled.replicas", ",".join(["0:1"] * 512)

    def create_with(name: str, value: str) -> int:
        config = m.CreateTopicsRequest.CreatableTopicConfig(name=key, value=value)
        topic = m.CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=1, replication_factor=1, configs=[config]
        )
        return int(client.ask(m.CreateTopicsRequest(topics=[topic]), 7).topics[0].error_code)

    assert create_with("short", longest) == 0
    assert create_with("long", longest + ",0:1") == InvalidConfig.code
    assert alter(client, 2, "short", segment_ms="12") == InvalidConfig.code
    assert alter(client, 2, "short", leader_replication_throttled_replicas="0:1", segment_ms="12") == 0


def test_long_settings_of_an_older_version_may_stay_and_become_shorter() -> None:
    key = "leader.replication.throttled.replicas"
    existing = {key: ",".join(["0:1"] * 1000)}
    settings = BROKER.parse({})
    check_overrides(settings, existing, existing)
    check_overrides(settings, {key: existing[key][4:]}, existing)
    with pytest.raises(InvalidConfig, match=f"the longest is {key}"):
        check_overrides(settings, {**existing, "retention.ms": "1"}, existing)
