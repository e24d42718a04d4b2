"""Each call of confluent-kafka's AdminClient, which is librdkafka's, has the same result on our broker and on
Apache Kafka.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaException,
    Node,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from support.broker import wait_until

import oncelog
from oncelog import Broker

TIMEOUT_S = 60.0
pytestmark = pytest.mark.timeout(600)


class Cluster:
    """A broker under test, an admin client for it, and names that no other test uses."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.admin = AdminClient({"bootstrap.servers": bootstrap})

    def name(self) -> str:
        return f"admin-{uuid.uuid4().hex}"

    def topic(self, partitions: int = 2, **config: str) -> str:
        """Create a topic, wait until its leaders serve it, and return its name."""
        name = self.name()
        (future,) = self.admin.create_topics([NewTopic(name, partitions, 1, config=config)]).values()
        future.result(TIMEOUT_S)
        latest = {oncelog.TopicPartition(name, partition): "latest" for partition in range(partitions)}
        # Wait with our client, which repeats its requests. librdkafka remembers for a long time that a topic
        # was unknown.
        with oncelog.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            wait_until(
                lambda: all(o.error is None for o in admin.list_offsets(latest, raise_errors=False).values())
            )
        return name

    def produce(self, topic: str, partition: int, count: int) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for number in range(count):
            producer.produce(topic, b"%d" % number, partition=partition, timestamp=1_000 + number)
        assert producer.flush(TIMEOUT_S) == 0


@pytest.fixture(scope="module", params=["oncelog", "apache"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "apache":
        yield Cluster(request.getfixturevalue("apache_kafka").bootstrap_servers)
        return
    with Broker() as broker:
        yield Cluster(broker.bootstrap_servers)


def result_of(futures: dict[Any, Any]) -> Any:
    """Return the only result of a call, or the name of its error."""
    (future,) = futures.values()
    return outcome(future.result)


def outcome(call: Callable[..., Any]) -> Any:
    try:
        return call(timeout=TIMEOUT_S)
    except KafkaException as error:
        return error.args[0].name()


def test_list_topics_and_describe_topics_show_partitions(cluster: Cluster) -> None:
    name = cluster.topic(3)
    listed = cluster.admin.list_topics(timeout=TIMEOUT_S)
    assert sorted(listed.topics[name].partitions) == [0, 1, 2]
    assert cluster.admin.list_topics(name, timeout=TIMEOUT_S).topics[name].error is None
    described = result_of(cluster.admin.describe_topics(TopicCollection([name])))
    assert [partition.id for partition in described.partitions] == [0, 1, 2]
    assert all(partition.leader.id == partition.isr[0].id for partition in described.partitions)
    assert (
        result_of(cluster.admin.describe_topics(TopicCollection([cluster.name()]))) == "UNKNOWN_TOPIC_OR_PART"
    )


def test_describe_cluster_names_its_controller(cluster: Cluster) -> None:
    described = cluster.admin.describe_cluster(include_authorized_operations=True).result(TIMEOUT_S)
    assert [node.id for node in described.nodes] == [described.controller.id]
    assert described.cluster_id
    assert AclOperation.ALTER in described.authorized_operations


@pytest.mark.parametrize(
    ("partitions", "replicas", "config", "expected"),
    [
        (1, 1, {}, None),
        (0, 1, {}, "INVALID_PARTITIONS"),
        (1, 9, {}, "INVALID_REPLICATION_FACTOR"),
        (1, 1, {"no.such.key": "1"}, "INVALID_CONFIG"),
        (1, 1, {"cleanup.policy": "burn"}, "INVALID_CONFIG"),
    ],
)
@pytest.mark.parametrize("validate_only", [False, True])
def test_create_topics(
    cluster: Cluster,
    partitions: int,
    replicas: int,
    config: dict[str, str],
    expected: object,
    validate_only: bool,
) -> None:
    topic = NewTopic(cluster.name(), partitions, replicas, config=config)
    assert result_of(cluster.admin.create_topics([topic], validate_only=validate_only)) == expected


def test_a_topic_that_exists_is_not_created_again(cluster: Cluster) -> None:
    name = cluster.topic()
    assert result_of(cluster.admin.create_topics([NewTopic(name, 1, 1)])) == "TOPIC_ALREADY_EXISTS"


def test_create_partitions_only_adds(cluster: Cluster) -> None:
    name = cluster.topic(2)
    assert result_of(cluster.admin.create_partitions([NewPartitions(name, 4)])) is None
    assert result_of(cluster.admin.create_partitions([NewPartitions(name, 3)])) == "INVALID_PARTITIONS"
    assert (
        result_of(cluster.admin.create_partitions([NewPartitions(cluster.name(), 3)]))
        == "UNKNOWN_TOPIC_OR_PART"
    )


def test_delete_topics(cluster: Cluster) -> None:
    name = cluster.topic()
    assert result_of(cluster.admin.delete_topics([name])) is None
    assert result_of(cluster.admin.delete_topics([name])) == "UNKNOWN_TOPIC_OR_PART"


def test_delete_records_moves_the_low_watermark(cluster: Cluster) -> None:
    name = cluster.topic()
    cluster.produce(name, 0, 10)
    deleted = result_of(cluster.admin.delete_records([TopicPartition(name, 0, 4)]))
    assert deleted.low_watermark == 4
    assert result_of(cluster.admin.delete_records([TopicPartition(name, 0, 11)])) == "OFFSET_OUT_OF_RANGE"


def test_list_offsets_by_each_specification(cluster: Cluster) -> None:
    name = cluster.topic()
    cluster.produce(name, 0, 10)
    found = {}
    for label, specification in (
        ("earliest", OffsetSpec.earliest()),
        ("latest", OffsetSpec.latest()),
        ("largest", OffsetSpec.max_timestamp()),
        ("time", OffsetSpec.for_timestamp(1_004)),
    ):
        asked = {TopicPartition(name, 0): specification}
        info = result_of(cluster.admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED))
        found[label] = info.offset
    assert found == {"earliest": 0, "latest": 10, "largest": 9, "time": 4}


def test_describe_and_alter_configs_of_a_topic(cluster: Cluster) -> None:
    name = cluster.topic(**{"retention.ms": "5000"})

    def values() -> dict[str, str]:
        described = result_of(cluster.admin.describe_configs([ConfigResource(ResourceType.TOPIC, name)]))
        keys = ("retention.ms", "cleanup.policy", "segment.bytes")
        return {key: described[key].value for key in keys}

    assert values() == {"retention.ms": "5000", "cleanup.policy": "delete", "segment.bytes": "1073741824"}
    changes = [
        ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE),
        ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.APPEND),
    ]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=changes)
    assert result_of(cluster.admin.incremental_alter_configs([resource])) is None
    # Kafka's brokers learn of a change from the controller, a moment after the admin client got its response.
    changed = {"retention.ms": "604800000", "cleanup.policy": "delete,compact", "segment.bytes": "1073741824"}
    wait_until(lambda: values() == changed)
    replaced = ConfigResource(ResourceType.TOPIC, name, set_config={"segment.bytes": "1048576"})
    with pytest.warns(DeprecationWarning, match="alter_configs has been deprecated"):
        assert result_of(cluster.admin.alter_configs([replaced])) is None
    changed = {"retention.ms": "604800000", "cleanup.policy": "delete", "segment.bytes": "1048576"}
    wait_until(lambda: values() == changed)
    wrong = ConfigEntry("retention.ms", "soon", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[wrong])
    assert result_of(cluster.admin.incremental_alter_configs([resource])) == "INVALID_CONFIG"
    missing = ConfigResource(ResourceType.TOPIC, cluster.name())
    assert result_of(cluster.admin.describe_configs([missing])) == "UNKNOWN_TOPIC_OR_PART"


def test_describe_configs_of_the_broker(cluster: Cluster) -> None:
    (broker,) = cluster.admin.describe_cluster().result(TIMEOUT_S).nodes
    described = result_of(
        cluster.admin.describe_configs([ConfigResource(ResourceType.BROKER, str(broker.id))])
    )
    assert described["message.max.bytes"].value == "1048588"
    assert described["num.partitions"].value == "1"


def test_consumer_groups_are_listed_described_and_deleted(cluster: Cluster) -> None:
    topic = cluster.topic()
    cluster.produce(topic, 0, 10)
    group = cluster.name()
    assert alter_offsets(cluster, group, TopicPartition(topic, 0, 7)) == [None]
    listed = cluster.admin.list_consumer_groups().result(TIMEOUT_S)
    assert group in {entry.group_id for entry in listed.valid} and not listed.errors
    described = result_of(cluster.admin.describe_consumer_groups([group]))
    assert (described.state.name, described.members) == ("EMPTY", [])
    assert isinstance(described.coordinator, Node)
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    assert committed(cluster, asked) == {0: 7}
    changes = (TopicPartition(topic, 0, 3), TopicPartition(topic, 1, 1))
    assert alter_offsets(cluster, group, *changes) == [None, None]
    assert committed(cluster, ConsumerGroupTopicPartitions(group)) == {0: 3, 1: 1}
    assert result_of(cluster.admin.delete_consumer_groups([group])) is None
    assert result_of(cluster.admin.delete_consumer_groups([group])) == "GROUP_ID_NOT_FOUND"


def alter_offsets(cluster: Cluster, group: str, *offsets: TopicPartition) -> list[str | None]:
    """Set offsets of a group. For each, return the name of its error, or None."""
    asked = ConsumerGroupTopicPartitions(group, list(offsets))
    for _ in range(600):
        changed = result_of(cluster.admin.alter_consumer_group_offsets([asked]))
        errors = [place.error and place.error.name() for place in changed.topic_partitions]
        # Apache Kafka creates the offsets topic when a client first asks for a coordinator.
        if not {"NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS"}.intersection(errors):
            break
        cluster.admin.poll(0.1)
    return errors


def committed(cluster: Cluster, asked: ConsumerGroupTopicPartitions) -> dict[int, int]:
    """Return the committed offset of each partition."""
    found = result_of(cluster.admin.list_consumer_group_offsets([asked]))
    return {place.partition: place.offset for place in found.topic_partitions}


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_with_a_member_cannot_be_deleted(cluster: Cluster, protocol: str) -> None:
    topic, group = cluster.topic(), cluster.name()
    config = {"bootstrap.servers": cluster.bootstrap, "group.id": group, "group.protocol": protocol}
    consumer = Consumer(config)
    assigned: list[TopicPartition] = []
    consumer.subscribe([topic], on_assign=lambda _, partitions: assigned.extend(partitions))
    for _ in range(600):
        if assigned:
            break
        consumer.poll(0.1)
    described = result_of(cluster.admin.describe_consumer_groups([group]))
    (member,) = described.members
    assert described.state.name == "STABLE" and described.type.name == protocol.upper()
    assert sorted(place.partition for place in member.assignment.topic_partitions) == [0, 1]
    assert result_of(cluster.admin.delete_consumer_groups([group])) == "NON_EMPTY_GROUP"
    assert alter_offsets(cluster, group, TopicPartition(topic, 0, 3)) == ["UNKNOWN_MEMBER_ID"]
    consumer.close()


def test_scram_users_are_set_described_and_deleted(cluster: Cluster) -> None:
    user = cluster.name()
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 8192)
    upsertion = UserScramCredentialUpsertion(user, info, b"password", b"salt")
    assert result_of(cluster.admin.alter_user_scram_credentials([upsertion])) is None

    def described() -> Any:
        found = result_of(cluster.admin.describe_user_scram_credentials([user]))
        if isinstance(found, str):
            return found
        return [(i.mechanism, i.iterations) for i in found.scram_credential_infos]

    # Kafka's brokers learn of a user from the controller, a moment after the admin client got its response.
    wait_until(lambda: described() == [(info.mechanism, 8192)])
    deletion = UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_256)
    assert result_of(cluster.admin.alter_user_scram_credentials([deletion])) is None
    assert result_of(cluster.admin.alter_user_scram_credentials([deletion])) == "RESOURCE_NOT_FOUND"
    wait_until(lambda: described() == "RESOURCE_NOT_FOUND")


def test_acls_without_an_authorizer_are_refused(cluster: Cluster) -> None:
    binding = AclBinding(
        ResourceType.TOPIC,
        cluster.name(),
        ResourcePatternType.LITERAL,
        "User:alice",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    everything = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    assert result_of(cluster.admin.create_acls([binding])) == "SECURITY_DISABLED"
    assert result_of(cluster.admin.delete_acls([everything])) == "SECURITY_DISABLED"
    # librdkafka hides the error of DescribeAcls, and returns an empty list instead.
    assert outcome(cluster.admin.describe_acls(everything).result) == []
