"""The admin clients of kafka-python and librdkafka, with our broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from kafka import KafkaAdminClient
from kafka.admin import NewTopic
from kafka.structs import TopicPartition

from oncelog import Broker


@pytest.fixture(scope="module")
def admin() -> Iterator[KafkaAdminClient]:
    with Broker() as broker:
        client = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
        client.create_topics([NewTopic("t", 3, 1)])
        yield client
        client.close()


def test_partitions_are_described_page_by_page(admin: KafkaAdminClient) -> None:
    described = admin.describe_topic_partitions(["t"], response_partition_limit=2)
    (topic,) = described["topics"]
    assert [each["partition_index"] for each in topic["partitions"]] == [0, 1]
    assert described["next_cursor"] is not None


def test_no_election_is_needed(admin: KafkaAdminClient) -> None:
    assert admin.elect_leaders(0, {"t": [0, 1, 2]}, raise_errors=False) is not None


def test_partitions_stay_where_they_are(admin: KafkaAdminClient) -> None:
    at = TopicPartition("t", 0)
    assert admin.alter_partition_reassignments({at: [1]}) == {at: None}
    assert not admin.list_partition_reassignments()


def test_the_quorum_is_one_node(admin: KafkaAdminClient) -> None:
    (topic,) = admin.describe_metadata_quorum()["topics"]
    (partition,) = topic["partitions"]
    assert partition["leader_id"] == 1


def test_config_resources_are_listed(admin: KafkaAdminClient) -> None:
    assert "t" in str(admin.list_config_resources())


def test_confluent_kafka_changes_settings_of_the_broker_and_of_a_group() -> None:
    with Broker() as broker:
        client = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        for kind, name, key, value in (
            (ConfigResource.Type.BROKER, "1", "message.max.bytes", "58000"),
            (ResourceType.GROUP, "g", "consumer.session.timeout.ms", "50000"),
        ):
            change = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            resource = ConfigResource(kind, name, incremental_configs=[change])
            (done,) = client.incremental_alter_configs([resource]).values()
            done.result(60)
            (described,) = client.describe_configs([ConfigResource(kind, name)]).values()
            assert described.result(60)[key].value == value
