"""Fetch requests: limits, waiting for data, sessions, topic ids and errors."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest
from support.broker import RawClient, batch, fetch_request, split_batches, wait_until

from oncelog import errors
from oncelog.server.embedded import Broker
from oncelog.wire.messages import FetchRequest, FetchResponse


def fill(client: RawClient, topic: str, count: int, size: int = 100, partition: int = 0) -> None:
    for n in range(count):
        assert client.produce(topic, batch(b"%03d" % n + b"x" * size), partition).error_code == 0


@pytest.mark.parametrize("version", range(4, 13))
def test_every_named_version_reads(client: RawClient, topic: str, version: int) -> None:
    fill(client, topic, 3)
    result = client.fetch(topic, 1, version=version) if version >= 7 else fetch_old(client, topic, version)
    assert (result.error_code, result.high_watermark, result.last_stable_offset) == (0, 3, 3)
    assert len(split_batches(result.records)) == 2


def fetch_old(client: RawClient, topic: str, version: int) -> FetchResponse.PartitionData:
    response = client.ask(fetch_request([(topic, 0, 1)]), version)
    return response.responses[0].partitions[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("version", range(13, 18))
def test_every_version_with_topic_ids_reads(client: RawClient, version: int) -> None:
    created = client.create_topic(f"by-id-{version}")
    fill(client, f"by-id-{version}", 2)
    request = fetch_request([("", 0, 0)])
    request.topics[0].topic_id = created.topic_id
    (answered,) = client.ask(request, version).responses
    assert answered.topic_id == created.topic_id
    assert len(split_batches(answered.partitions[0].records)) == 2
    request.topics[0].topic_id = b"\x01" * 16
    (unknown,) = client.ask(request, version).responses
    assert unknown.partitions[0].error_code == errors.UnknownTopicId.code


def test_fetch_limits_count_whole_batches(client: RawClient, topic: str) -> None:
    fill(client, topic, 10, size=1000)
    one = len(split_batches(client.fetch(topic, partition_max_bytes=1).records))
    three = len(split_batches(client.fetch(topic, partition_max_bytes=3_600).records))
    assert (one, three) == (1, 3)
    by_request = client.fetch(topic, max_bytes=2_500)
    assert len(split_batches(by_request.records)) == 2


def test_partitions_fill_in_order_and_the_first_gets_a_batch(client: RawClient) -> None:
    client.create_topic("ordered", 2)
    for partition in (0, 1):
        fill(client, "ordered", 2, size=1000, partition=partition)
    request = fetch_request([("ordered", 1, 0), ("ordered", 0, 0)], max_bytes=1)
    partitions = [p for t in client.ask(request, 12).responses for p in t.partitions]
    assert [(p.partition_index, len(split_batches(p.records))) for p in partitions] == [(1, 1), (0, 0)]


def test_a_batch_is_given_whole_from_its_middle(client: RawClient, topic: str) -> None:
    client.produce(topic, batch(b"a", b"b", b"c"))
    assert len(split_batches(client.fetch(topic, 1).records)) == 1


@pytest.mark.parametrize(
    ("offset", "fields", "error"),
    [
        (9, {}, errors.OffsetOutOfRange),
        (-5, {}, errors.OffsetOutOfRange),
        (0, {"partition": 3}, errors.UnknownTopicOrPartition),
    ],
)
def test_a_fetch_tells_the_error_of_each_partition(
    client: RawClient, topic: str, offset: int, fields: dict[str, Any], error: type[errors.BrokerError]
) -> None:
    fill(client, topic, 1)
    result = client.fetch(topic, offset, **fields)
    assert (result.error_code, len(result.records or b"")) == (error.code, 0)


def test_the_leader_epoch_is_checked(client: RawClient, topic: str) -> None:
    request = fetch_request([(topic, 0, 0)])
    request.topics[0].partitions[0].current_leader_epoch = 99
    result = client.ask(request, 12).responses[0].partitions[0]
    assert result.error_code == errors.UnknownLeaderEpoch.code


def test_read_committed_lists_aborted_transactions_as_empty_not_null(client: RawClient, topic: str) -> None:
    fill(client, topic, 1)
    assert client.fetch(topic, isolation_level=1).aborted_transactions == []
    assert client.fetch(topic, isolation_level=0).aborted_transactions is None


def test_an_empty_fetch_waits_until_data_comes(broker: Broker, client: RawClient, topic: str) -> None:
    client.send(fetch_request([(topic, 0, 0)], max_wait_ms=15_000), 12)
    wait_until(lambda: broker.metrics()["fetches_waiting"] == 1)
    with RawClient(broker.bootstrap_servers) as other:
        other.produce(topic, batch(b"woken"))
    _, response = client.receive(FetchResponse, 12)
    assert len(split_batches(response.responses[0].partitions[0].records)) == 1
    assert broker.metrics()["fetches_waiting"] == 0


def test_it_waits_for_min_bytes_over_several_appends(broker: Broker, client: RawClient, topic: str) -> None:
    client.send(fetch_request([(topic, 0, 0)], max_wait_ms=15_000, min_bytes=1_500), 12)
    wait_until(lambda: broker.metrics()["fetches_waiting"] == 1)
    with RawClient(broker.bootstrap_servers) as other:
        fill(other, topic, 1, size=1000)
        assert broker.metrics()["fetches_waiting"] == 1
        fill(other, topic, 1, size=1000)
    _, response = client.receive(FetchResponse, 12)
    assert len(split_batches(response.responses[0].partitions[0].records)) == 2


def test_it_answers_empty_when_the_time_is_over(client: RawClient, topic: str) -> None:
    result = client.fetch(topic, max_wait_ms=30)
    assert (result.error_code, result.high_watermark, result.records) == (0, 0, b"")


def test_a_waiting_fetch_is_told_when_its_topic_goes(broker: Broker, client: RawClient, topic: str) -> None:
    from oncelog.wire.messages import DeleteTopicsRequest

    client.send(fetch_request([(topic, 0, 0)], max_wait_ms=15_000), 12)
    wait_until(lambda: broker.metrics()["fetches_waiting"] == 1)
    with RawClient(broker.bootstrap_servers) as other:
        other.ask(DeleteTopicsRequest(topic_names=[topic], timeout_ms=1000), 5)
    _, response = client.receive(FetchResponse, 12)
    assert response.responses[0].partitions[0].error_code == errors.UnknownTopicOrPartition.code


def test_a_waiting_fetch_dies_with_its_connection(broker: Broker, topic: str) -> None:
    with RawClient(broker.bootstrap_servers) as leaver:
        leaver.send(fetch_request([(topic, 0, 0)], max_wait_ms=15_000), 12)
        wait_until(lambda: broker.metrics()["fetches_waiting"] == 1)
        leaver.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: broker.metrics()["fetches_waiting"] == 0)
    with RawClient(broker.bootstrap_servers) as other:
        assert other.produce(topic, batch(b"x")).error_code == 0


def test_a_fetch_session_returns_only_changes(client: RawClient) -> None:
    client.create_topic("news", 2)
    full = client.ask(fetch_request([("news", 0, 0), ("news", 1, 0)], session_epoch=0), 12)
    assert full.session_id > 0
    assert sum(len(t.partitions) for t in full.responses) == 2

    def incremental(epoch: int, *positions: tuple[str, int, int], **fields: Any) -> Any:
        request = fetch_request(positions, session_id=full.session_id, session_epoch=epoch, **fields)
        return client.ask(request, 12)

    assert incremental(1).responses == []
    fill(client, "news", 1, partition=1)
    (changed,) = incremental(2).responses
    assert [p.partition_index for p in changed.partitions] == [1]
    assert incremental(3, ("news", 1, 1)).responses == []
    fill(client, "news", 1, partition=0)
    forgotten = FetchRequest.ForgottenTopic(topic="news", partitions=[0])
    assert incremental(4, forgotten_topics_data=[forgotten]).responses == []
    assert incremental(4).error_code == errors.InvalidFetchSessionEpoch.code
    assert incremental(5).error_code == 0


def test_unknown_sessions_and_mixed_ids(client: RawClient) -> None:
    created = client.create_topic("mixed")
    unknown = client.ask(fetch_request([], session_id=12345, session_epoch=3), 12)
    assert (unknown.error_code, unknown.session_id) == (errors.FetchSessionIdNotFound.code, 0)
    opened = client.ask(fetch_request([("mixed", 0, 0)], session_epoch=0), 12)
    by_id = fetch_request([], session_id=opened.session_id, session_epoch=1)
    assert client.ask(by_id, 13).error_code == errors.FetchSessionTopicIdError.code
    closing = fetch_request([("mixed", 0, 0)], session_id=opened.session_id, session_epoch=-1)
    assert client.ask(closing, 12).session_id == 0
    reuse = fetch_request([], session_id=opened.session_id, session_epoch=1)
    assert client.ask(reuse, 12).error_code == errors.FetchSessionIdNotFound.code
    assert created.topic_id != b"\0" * 16


def test_without_slots_every_fetch_is_full() -> None:
    config = {"max.incremental.fetch.session.cache.slots": 0}
    with Broker(config=config) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("full")
        assert client.ask(fetch_request([("full", 0, 0)], session_epoch=0), 12).session_id == 0


def test_many_readers_get_every_record_once(broker: Broker, client: RawClient, topic: str) -> None:
    received: list[list[bytes]] = [[] for _ in range(4)]

    def read(index: int) -> None:
        with RawClient(broker.bootstrap_servers) as reader:
            while len(received[index]) < 30:
                data = reader.fetch(topic, len(received[index]), max_wait_ms=1000).records
                received[index] += split_batches(data)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    fill(client, topic, 30)
    for thread in threads:
        thread.join(120)
    offsets = [[struct.unpack_from(">q", one)[0] for one in batches] for batches in received]
    assert offsets == [list(range(30))] * 4
