"""Produce: the error codes and the order of the checks; acks; many partitions in one request."""

from __future__ import annotations

import struct

import pytest
from support.broker import RawClient, batch, fetch_request, produce_request, split_batches

from oncelog import errors
from oncelog.server.embedded import Broker
from oncelog.types import Compression
from oncelog.wire.messages import ProduceRequest
from oncelog.wire.records import decode_records


def test_every_served_version_stores_and_tells_the_offset(client: RawClient, topic: str) -> None:
    offsets = [client.produce(topic, batch(b"v"), version=version).base_offset for version in range(3, 13)]
    assert offsets == list(range(10))
    assert client.offset(topic) == 10


def test_an_unknown_topic_or_partition_is_refused(client: RawClient, topic: str) -> None:
    assert client.produce("nowhere", batch(b"x")).error_code == errors.UnknownTopicOrPartition.code
    assert client.produce(topic, batch(b"x"), 7).error_code == errors.UnknownTopicOrPartition.code
    assert client.produce(topic, batch(b"x"), -1).error_code == errors.UnknownTopicOrPartition.code


def two_batches() -> bytearray:
    return batch(b"a") + batch(b"b")


def old_format() -> bytearray:
    changed = batch(b"a")
    changed[16] = 1
    return changed


def broken_checksum() -> bytearray:
    changed = batch(b"a")
    changed[-1] ^= 0xFF
    return changed


def tiny_length() -> bytearray:
    changed = batch(b"a")
    struct.pack_into(">i", changed, 8, 5)
    return changed


def too_long_length() -> bytearray:
    changed = batch(b"a")
    struct.pack_into(">i", changed, 8, 10_000)
    return changed


@pytest.mark.parametrize(
    ("records", "error"),
    [
        (None, errors.InvalidRecord),
        (b"", errors.InvalidRecord),
        (b"short", errors.InvalidRecord),
        (two_batches(), errors.InvalidRecord),
        (old_format(), errors.InvalidRecord),
        (broken_checksum(), errors.CorruptMessage),
        (tiny_length(), errors.CorruptMessage),
        (too_long_length(), errors.InvalidRecord),
        (batch(b"x" * 2_000_000), errors.MessageTooLarge),
        (batch(b"x", is_control=True), errors.InvalidRecord),
    ],
)
def test_records_other_than_one_valid_batch_are_refused(
    client: RawClient, topic: str, records: bytearray | None, error: type[errors.BrokerError]
) -> None:
    result = client.produce(topic, records)
    assert (result.error_code, result.base_offset) == (error.code, -1)
    assert error.kafka_name not in (result.error_message or error.kafka_name)
    assert client.offset(topic) == 0


def test_trailing_garbage_is_cut_off(client: RawClient, topic: str) -> None:
    assert client.produce(topic, batch(b"a") + b"\x00" * 5).error_code == 0
    assert client.produce(topic, batch(b"b")).base_offset == 1
    assert client.values(topic) == [b"a", b"b"]


def test_zstd_needs_version_7(client: RawClient, topic: str) -> None:
    sent = batch(b"x", compression=Compression.ZSTD)
    assert client.produce(topic, sent, version=6).error_code == errors.UnsupportedCompressionType.code
    assert client.produce(topic, sent, version=7).error_code == 0


def test_transactional_batches_without_an_id_fail_the_whole_request(client: RawClient, topic: str) -> None:
    tainted = batch(b"x", pid=1, sequence=0, is_transactional=True)
    request = produce_request(topic, tainted)
    request.topic_data[0].partition_data.append(
        ProduceRequest.PartitionProduceData(index=0, records=batch(b"innocent"))
    )
    results = client.ask(request, 9).responses[0].partition_responses
    assert [r.error_code for r in results] == [errors.TransactionalIdAuthorizationFailed.code] * 2
    assert client.offset(topic) == 0


@pytest.mark.behaviour("I26")
def test_too_few_replicas_for_acks_all_store_nothing(client: RawClient) -> None:
    client.create_topic("two-replicas", min_insync_replicas=2)
    refused = client.produce("two-replicas", batch(b"x"), acks=-1)
    assert refused.error_code == errors.NotEnoughReplicas.code
    assert client.offset("two-replicas") == 0
    assert client.produce("two-replicas", batch(b"x"), acks=1).error_code == 0


def test_acks_must_be_known(client: RawClient, topic: str) -> None:
    assert client.produce(topic, batch(b"x"), acks=2).error_code == errors.InvalidRequiredAcks.code
    assert client.produce("nowhere", batch(b"x"), acks=2).error_code == errors.UnknownTopicOrPartition.code


def test_acks_0_has_no_response(client: RawClient, topic: str) -> None:
    client.send(produce_request(topic, batch(b"silent"), acks=0), 9)
    # A Produce with acks=0 gets no response, so the first response on the connection is that of the next
    # request.
    assert client.offset(topic) == 1
    assert client.values(topic) == [b"silent"]


def test_a_failed_acks_0_ends_the_connection(broker: Broker, client: RawClient) -> None:
    client.send(produce_request("nowhere", batch(b"x"), acks=0), 9)
    assert client.is_closed()
    with RawClient(broker.bootstrap_servers) as other:
        assert other.new_producer_id() >= 0


def test_many_partitions_in_one_request_fail_alone(client: RawClient) -> None:
    client.create_topic("many", 3)
    request = produce_request("many", batch(b"0"))
    request.topic_data[0].partition_data += [
        ProduceRequest.PartitionProduceData(index=9, records=batch(b"9")),
        ProduceRequest.PartitionProduceData(index=2, records=batch(b"2")),
    ]
    results = client.ask(request, 9).responses[0].partition_responses
    assert [(r.index, r.error_code) for r in results] == [(0, 0), (9, 3), (2, 0)]
    assert [client.offset("many", partition=p) for p in range(3)] == [1, 0, 1]


def test_log_append_time_is_told_and_stored(client: RawClient) -> None:
    client.create_topic("append-time", message_timestamp_type="LogAppendTime")
    result = client.produce("append-time", batch(b"x", timestamp_ms=5))
    assert result.log_append_time_ms > 1_600_000_000_000
    (stored,) = split_batches(client.fetch("append-time").records)
    assert [r.timestamp_ms for r in decode_records(stored)] == [result.log_append_time_ms]


def test_a_timestamp_too_far_ahead_names_the_record(client: RawClient, topic: str) -> None:
    result = client.produce(topic, batch(b"x", timestamp_ms=9_999_999_999_999))
    assert result.error_code == errors.InvalidTimestamp.code
    assert [e.batch_index for e in result.record_errors] == [0]


@pytest.mark.parametrize("codec", list(Compression))
def test_batches_come_back_as_they_were_sent(client: RawClient, topic: str, codec: Compression) -> None:
    sent = bytes(batch(b"one", None, b"", compression=codec, pid=7, sequence=0))
    client.produce(topic, sent)
    (stored,) = split_batches(client.fetch(topic).records)
    # The broker sets only the base offset and leader epoch (bytes 0-7, 12-15).
    assert stored[16:] == sent[16:]
    assert [r.value for r in decode_records(stored)] == [b"one", None, b""]


def test_one_megabyte_records(client: RawClient, topic: str) -> None:
    sent = [bytes([n]) * 1_000_000 for n in range(3)]
    for value in sent:
        assert client.produce(topic, batch(value)).error_code == 0
    assert client.values(topic) == sent


def test_deferred_fetch_and_produce_of_one_connection_answer_in_order(
    broker: Broker, client: RawClient, topic: str
) -> None:
    """The fetch waits for data from another connection, and the Produce requests behind it must wait for its
    response.
    """
    fetch_id = client.send(fetch_request([(topic, 0, 0)], max_wait_ms=10_000), 12)
    produce_id = client.send(produce_request(topic, batch(b"behind")), 9)
    metadata_id = client.send(produce_request(topic, batch(b"last")), 9)
    with RawClient(broker.bootstrap_servers) as other:
        other.produce(topic, batch(b"first"))
    frames = [client.read_frame() for _ in range(3)]
    ids = [struct.unpack_from(">i", frame or b"")[0] for frame in frames]
    assert ids == [fetch_id, produce_id, metadata_id]
    assert client.values(topic) == [b"first", b"behind", b"last"]
