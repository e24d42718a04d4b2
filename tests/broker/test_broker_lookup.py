"""Tests of the requests that look up or describe: ApiVersions, Metadata, FindCoordinator, ListOffsets,
OffsetForLeaderEpoch, Describe.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.broker import RawClient, batch, produce_request

from oncelog import errors
from oncelog.server.embedded import Broker
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    DescribeClusterRequest,
    DescribeLogDirsRequest,
    DescribeProducersRequest,
    FindCoordinatorRequest,
    ListOffsetsRequest,
    MetadataRequest,
    OffsetForLeaderEpochRequest,
)

OFFERED = {
    0: (0, 13), 1: (4, 18), 2: (1, 11), 3: (0, 13), 8: (2, 10), 9: (1, 10), 10: (0, 6), 11: (0, 9),
    12: (0, 4), 13: (0, 5), 14: (0, 5), 15: (0, 6), 16: (0, 5), 17: (0, 1), 18: (0, 4), 19: (2, 7),
    20: (1, 6), 21: (0, 2), 22: (0, 5), 23: (2, 4), 24: (0, 5), 25: (0, 4), 26: (0, 5), 27: (1, 2),
    28: (0, 5), 29: (1, 3), 30: (1, 3), 31: (1, 3), 32: (1, 4), 33: (0, 2), 34: (1, 2), 35: (1, 5),
    36: (0, 2), 37: (0, 3), 42: (0, 2), 43: (0, 2), 44: (0, 1), 45: (0, 1), 46: (0, 0), 47: (0, 0),
    48: (0, 1), 49: (0, 1), 50: (0, 0), 51: (0, 0), 55: (0, 2), 57: (0, 2), 60: (0, 2), 61: (0, 0),
    65: (0, 0), 66: (0, 2), 68: (0, 1), 69: (0, 1), 74: (0, 1), 75: (0, 0),
}  # fmt: skip


@pytest.mark.parametrize("version", range(5))
def test_api_versions_tells_what_is_offered(client: RawClient, version: int) -> None:
    request = ApiVersionsRequest(client_software_name="t", client_software_version="1")
    response = client.ask(request, version)
    assert response.error_code == 0
    assert {k.api_key: (k.min_version, k.max_version) for k in response.api_keys} == OFFERED


def test_an_unknown_version_of_api_versions_gets_a_version_0_answer(client: RawClient) -> None:
    frame = bytearray(encode_request(ApiVersionsRequest(), 4, 5, "future"))
    frame[6:8] = (99).to_bytes(2, "big")
    client.socket.sendall(frame)
    correlation_id, response = client.receive(ApiVersionsResponse, 0)
    assert (correlation_id, response.error_code) == (5, errors.UnsupportedVersion.code)
    assert [(k.api_key, k.min_version, k.max_version) for k in response.api_keys] == [(18, 0, 4)]
    assert client.ask(ApiVersionsRequest(), 0).error_code == 0, "the connection goes on"


@pytest.mark.parametrize(("key", "version"), [(0, 2), (0, 14), (1, 19), (3, 14), (77, 0), (-1, 0)])
def test_other_unserved_versions_end_the_connection(client: RawClient, key: int, version: int) -> None:
    body = key.to_bytes(2, "big", signed=True) + version.to_bytes(2, "big") + b"\0\0\0\1\xff\xff" + b"\0" * 20
    client.socket.sendall(len(body).to_bytes(4, "big") + body)
    assert client.is_closed()


@pytest.mark.parametrize("version", range(14))
def test_metadata_of_every_version(broker: Broker, client: RawClient, topic: str, version: int) -> None:
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=topic)])
    response = client.ask(request, version)
    assert [(b.node_id, b.host, b.port) for b in response.brokers] == [(1, "127.0.0.1", broker.port)]
    (told,) = response.topics
    (partition,) = told.partitions
    assert (told.name, partition.leader_id, partition.isr_nodes) == (topic, 1, [1])


def test_metadata_of_all_none_and_unknown(client: RawClient, topic: str) -> None:
    def names(topics: Any, version: int) -> set[str]:
        return {t.name for t in client.ask(MetadataRequest(topics=topics), version).topics}

    assert topic in names([], 0)
    assert topic in names(None, 1)
    assert names([], 1) == set()
    unknown = MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name="not-there")], allow_auto_topic_creation=False
    )
    assert client.ask(unknown, 9).topics[0].error_code == errors.UnknownTopicOrPartition.code
    by_id = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=None, topic_id=b"\5" * 16)])
    assert client.ask(by_id, 12).topics[0].error_code == errors.UnknownTopicId.code
    illegal = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="not legal")])
    assert client.ask(illegal, 9).topics[0].error_code == errors.InvalidTopicException.code


def test_asking_creates_a_topic_with_a_stable_id(client: RawClient) -> None:
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="auto")])
    first, second = (client.ask(request, 12).topics[0] for _ in range(2))
    assert (first.error_code, len(first.partitions)) == (0, 1)
    assert first.topic_id == second.topic_id != b"\0" * 16
    assert client.produce("auto", batch(b"x")).error_code == 0


def test_auto_creation_can_be_off() -> None:
    config = {"auto.create.topics.enable": "false"}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="auto")])
        assert client.ask(request, 9).topics[0].error_code == errors.UnknownTopicOrPartition.code


@pytest.mark.parametrize("version", range(7))
def test_the_coordinator_is_this_node(broker: Broker, client: RawClient, version: int) -> None:
    def ask(key_type: int) -> Any:
        request = FindCoordinatorRequest(key="k", key_type=key_type, coordinator_keys=["k"])
        response = client.ask(request, version)
        return response.coordinators[0] if version >= 4 else response

    for key_type in (0, 1):
        told = ask(key_type)
        assert (told.error_code, told.node_id, told.port) == (0, 1, broker.port)
    if version >= 1:
        share = ask(2)
        assert (share.error_code, share.node_id) == (errors.InvalidRequest.code, -1)


def test_a_confluent_consumer_with_a_group_id_and_assign_sees_no_error(client: RawClient, topic: str) -> None:
    from confluent_kafka import Consumer
    from confluent_kafka import TopicPartition as Assigned

    client.produce(topic, batch(*(b"%d" % n for n in range(10))))
    address = "{}:{}".format(*client.socket.getpeername())
    consumer = Consumer({"bootstrap.servers": address, "group.id": "g", "enable.auto.commit": False})
    consumer.assign([Assigned(topic, 0, 0)])
    got = [consumer.poll(60) for _ in range(10)]
    # If the coordinator failed, poll() would return its error as one more message.
    assert consumer.poll(0.5) is None
    consumer.close()
    assert [m.value() for m in got if m and not m.error()] == [b"%d" % n for n in range(10)]


def list_offset(
    client: RawClient, topic: str, timestamp: int, version: int = 7, **fields: int
) -> tuple[int, int, int]:
    asked = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=timestamp, **fields)
    request = ListOffsetsRequest(
        replica_id=-1, topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=[asked])]
    )
    result = client.ask(request, version).topics[0].partitions[0]
    return result.error_code, result.timestamp, result.offset


def test_list_offsets_finds_the_first_record_that_is_not_older(client: RawClient, topic: str) -> None:
    for timestamp in (1000, 3000, 2000):
        client.produce(topic, batch(b"x", timestamp_ms=timestamp))
    assert list_offset(client, topic, -1) == (0, -1, 3)
    assert list_offset(client, topic, -2) == (0, -1, 0)
    assert list_offset(client, topic, -3) == (0, 3000, 1)
    assert list_offset(client, topic, -4, version=8) == (0, -1, 0)
    assert list_offset(client, topic, -5, version=9) == (0, -1, -1)
    assert list_offset(client, topic, 0) == (0, 1000, 0)
    assert list_offset(client, topic, 1001) == (0, 3000, 1)
    assert list_offset(client, topic, 3001) == (0, -1, -1)


@pytest.mark.parametrize("version", range(1, 11))
def test_latest_offset_of_every_version(client: RawClient, topic: str, version: int) -> None:
    client.produce(topic, batch(b"x"))
    assert list_offset(client, topic, -1, version) == (0, -1, 1)


def test_list_offsets_tells_the_error_of_each_partition(client: RawClient, topic: str) -> None:
    assert list_offset(client, "nowhere", -1)[0] == errors.UnknownTopicOrPartition.code
    assert list_offset(client, topic, -3, version=6)[0] == errors.UnsupportedVersion.code
    assert list_offset(client, topic, -99)[0] == errors.UnsupportedVersion.code
    assert list_offset(client, topic, -1, current_leader_epoch=7)[0] == errors.UnknownLeaderEpoch.code
    twice = ListOffsetsRequest(
        replica_id=-1,
        topics=[
            ListOffsetsRequest.ListOffsetsTopic(
                name=topic, partitions=[ListOffsetsRequest.ListOffsetsPartition(timestamp=-1)] * 2
            )
        ],
    )
    results = client.ask(twice, 7).topics[0].partitions
    assert [r.error_code for r in results] == [errors.InvalidRequest.code]


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_end_of_a_leader_epoch(client: RawClient, topic: str, version: int) -> None:
    client.produce(topic, batch(b"a", b"b"))

    def ask(leader_epoch: int, current: int = -1, name: str = topic) -> tuple[int, int, int]:
        partition = OffsetForLeaderEpochRequest.OffsetForLeaderPartition(
            partition=0, current_leader_epoch=current, leader_epoch=leader_epoch
        )
        asked = OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic=name, partitions=[partition])
        result = client.ask(OffsetForLeaderEpochRequest(topics=[asked]), version).topics[0].partitions[0]
        return result.error_code, result.leader_epoch, result.end_offset

    assert ask(0) == (0, 0, 2)
    assert ask(9) == (0, -1, -1)
    assert ask(0, current=5)[0] == errors.UnknownLeaderEpoch.code
    assert ask(0, name="nowhere")[0] == errors.UnknownTopicOrPartition.code


@pytest.mark.parametrize("version", range(3))
def test_the_cluster_is_this_broker(broker: Broker, client: RawClient, version: int) -> None:
    told = client.ask(DescribeClusterRequest(), version)
    assert [(b.broker_id, b.port) for b in told.brokers] == [(1, broker.port)]
    assert (told.error_code, told.controller_id, bool(told.cluster_id)) == (0, 1, True)


def test_describe_cluster_refuses_the_endpoint_type_of_controllers(client: RawClient) -> None:
    told = client.ask(DescribeClusterRequest(endpoint_type=2), 1)
    assert told.error_code == errors.MismatchedEndpointType.code


@pytest.mark.parametrize("version", range(1, 5))
def test_log_dirs_tell_sizes(broker: Broker, client: RawClient, topic: str, version: int) -> None:
    sent = batch(b"x" * 100)
    client.produce(topic, sent)
    asked = DescribeLogDirsRequest.DescribableLogDirTopic(topic=topic, partitions=[0, 9])
    (told,) = client.ask(DescribeLogDirsRequest(topics=[asked]), version).results
    assert told.log_dir == str(broker.data_dir)
    sizes = [(p.partition_index, p.partition_size) for t in told.topics for p in t.partitions]
    assert sizes == [(0, len(sent))]
    everything = client.ask(DescribeLogDirsRequest(topics=None), version).results[0]
    assert topic in {t.name for t in everything.topics}


def test_producers_are_described(client: RawClient, topic: str) -> None:
    client.produce(topic, batch(b"a", b"b", pid=5, epoch=3, sequence=7, timestamp_ms=1234))
    request = DescribeProducersRequest(
        topics=[DescribeProducersRequest.TopicRequest(name=topic, partition_indexes=[0, 9])]
    )
    known, unknown = client.ask(request, 0).topics[0].partitions
    (state,) = known.active_producers
    assert (state.producer_id, state.producer_epoch, state.last_sequence) == (5, 3, 8)
    assert (state.last_timestamp, state.coordinator_epoch, state.current_txn_start_offset) == (1234, -1, -1)
    assert unknown.error_code == errors.UnknownTopicOrPartition.code


def test_requests_of_one_connection_are_answered_in_order(client: RawClient, topic: str) -> None:
    sent = [client.send(produce_request(topic, batch(b"%d" % n)), 9) for n in range(20)]
    frames = [client.read_frame() for _ in sent]
    assert [int.from_bytes((f or b"")[:4], "big") for f in frames] == sent
