"""Every API and version that we read and write, compared with two independent codecs."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import pytest
from kafka.protocol.data_container import DataContainer
from kafka.protocol.schemas import StructField, load_json
from kio.index import load_payload_module
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType
from support.wire import from_kafka_python, random_part, to_kafka_python

from oncelog.errors import MisuseError, PeerError, UnsupportedVersion
from oncelog.wire.compiler import compile_decoder, compile_encoder
from oncelog.wire.messages import (
    API_BY_KEY,
    API_BY_NAME,
    Api,
    ApiVersionsResponse,
    DescribeGroupsRequest,
    FetchRequest,
    FetchResponse,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
    SaslHandshakeRequest,
)
from oncelog.wire.primitives import encode_uvarint
from oncelog.wire.stubs import DATA_STUB_FILE, STUB_FILE, render, render_data

APIS = list(API_BY_KEY.values())
CASES = [
    pytest.param(api, version, kind, id=f"{api.name}-{kind}-{version}")
    for api in APIS
    for version in range(api.first_version, api.last_version + 1)
    for kind in ("request", "response")
]


def kafka_python_class(name: str) -> Any:
    """Return kafka-python's codec for a message, made from its schema without the package's patches."""
    struct = StructField(load_json(name))
    cls = type(name, (DataContainer,), {"_struct": struct})
    struct.set_data_class(cls)
    return cls


def same_values(message: Any) -> Any:
    """Return the message with its records converted to bytes, so that it can be compared and printed."""
    for struct in [message, *parts_of(message)]:
        for field in struct._struct.fields:
            value = getattr(struct, field.name)
            if isinstance(value, memoryview):
                setattr(struct, field.name, bytes(value))
    return message


def parts_of(part: Any) -> Any:
    for field in part._struct.fields:
        value = getattr(part, field.name)
        if field.struct is not None and value is not None:
            for item in value if field.is_array else [value]:
                yield item
                yield from parts_of(item)


NOT_IN_KAFKA_PYTHON = {68, 69}  # ConsumerGroupHeartbeat and ConsumerGroupDescribe


@pytest.mark.skipif(sys.flags.optimize > 0, reason="kafka-python itself cannot decode under python -O")
@pytest.mark.parametrize(
    ("api", "version", "kind"), [case for case in CASES if case.values[0].key not in NOT_IN_KAFKA_PYTHON]
)
def test_messages_agree_with_kafka_python(api: Api, version: int, kind: str) -> None:
    cls: Any = getattr(api, kind)
    their_cls = kafka_python_class(cls.__name__)
    options = {"version": version, "compact": api.is_flexible(version), "tagged": api.is_flexible(version)}
    rng = random.Random(f"{api.name}{version}{kind}")
    for _ in range(8):
        ours = random_part(rng, cls._struct, cls, version)
        data = ours.encode(version)
        assert same_values(cls.decode(version, data)) == ours
        theirs = to_kafka_python(ours, their_cls, version)
        assert bytes(their_cls._struct.encode(theirs, **options)) == data
        read = their_cls._struct.decode(io.BytesIO(data), **options)
        assert from_kafka_python(read, cls, version) == ours


@pytest.mark.parametrize(("api", "version", "kind"), CASES)
def test_messages_agree_with_kio(api: Api, version: int, kind: str) -> None:
    cls: Any = getattr(api, kind)
    module = load_payload_module(api.key, version, EntityType[kind])
    their_cls = getattr(module, cls.__name__)
    rng = random.Random(f"kio{api.name}{version}{kind}")
    for _ in range(4):
        ours = random_part(rng, cls._struct, cls, version, plain=True)
        data = ours.encode(version)
        theirs, consumed = entity_reader(their_cls)(data, 0)
        assert consumed == len(data)
        buffer = io.BytesIO()
        entity_writer(their_cls)(buffer, theirs)
        assert buffer.getvalue() == data


def test_every_api_of_this_broker_has_messages() -> None:
    keys = {0, 1, 2, 3, 8, 9, *range(10, 34), 35, 36, 37, 42, 44, 47, 48, 49, 50, 51}
    keys |= {34, 43, 45, 46, 55, 57, 60, 61, 65, 66, 68, 69, 74, 75}
    assert set(API_BY_KEY) == keys
    assert API_BY_NAME["Produce"].request is ProduceRequest


def test_every_api_but_two_offers_exactly_what_it_serves() -> None:
    """Produce is advertised from version 0 on. Otherwise, librdkafka before 2.11.1 would not compress.

    Our codec handles it from version 3 on. SaslHandshake is advertised from version 0 on, because librdkafka
    2.0.2 would not authenticate otherwise: it looks for version 0, and uses version 1.
    """
    api = ProduceRequest.api
    assert (api.min_version, api.max_version) == (0, 13)
    assert (api.first_version, api.last_version) == (3, 13)
    handshake = SaslHandshakeRequest.api
    assert (handshake.min_version, handshake.first_version, handshake.max_version) == (0, 1, 1)
    others = [a for a in APIS if a not in (api, handshake)]
    assert all((a.min_version, a.max_version) == (a.first_version, a.last_version) for a in others)


def test_values_are_keywords_slots_and_compared() -> None:
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="a")])
    assert request == MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="a")])
    assert request != MetadataRequest(topics=[])
    assert request != "MetadataRequest"
    assert MetadataRequest().topics is not MetadataRequest().topics
    assert "name='a'" in repr(request)
    with pytest.raises(AttributeError):
        request.topicz = []  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        MetadataRequest(topicz=[])  # type: ignore[call-arg]


def test_records_are_views_of_the_request() -> None:
    data = ProduceRequest.PartitionProduceData(index=1, records=b"batch")
    request = ProduceRequest(topic_data=[ProduceRequest.TopicProduceData(name="t", partition_data=[data])])
    buffer = bytearray(request.encode(9))
    records = ProduceRequest.decode(9, buffer).topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview) and bytes(records) == b"batch"
    buffer[buffer.index(b"batch")] = ord("B")
    assert bytes(records) == b"Batch"


def test_null_and_empty_are_kept_apart() -> None:
    for version in (4, 11, 12, 16):
        for records, aborted in ((None, None), (b"", [])):
            data = FetchResponse.PartitionData(records=records, aborted_transactions=aborted)
            topic = FetchResponse.FetchableTopicResponse(partitions=[data])
            body = FetchResponse(responses=[topic]).encode(version)
            read = FetchResponse.decode(version, body).responses[0].partitions[0]
            assert read.aborted_transactions == aborted
            assert read.records is None if records is None else bytes(read.records or b"x") == b"x"


def test_unknown_tags_are_skipped_and_known_ones_checked() -> None:
    body = ApiVersionsResponse(zk_migration_ready=True).encode(3)
    assert body.endswith(b"\x01\x03\x01\x01")
    unknown = body[:-4] + b"\x02\x03\x01\x01" + b"\x63\x02ab"
    assert ApiVersionsResponse.decode(3, unknown).zk_migration_ready
    with pytest.raises(PeerError, match="zk_migration_ready"):
        ApiVersionsResponse.decode(3, body[:-4] + b"\x01\x03\x02\x01\x00")


def test_values_that_cannot_be_encoded_are_errors_of_the_caller() -> None:
    with pytest.raises(MisuseError, match="ProduceRequest cannot be written at version 9"):
        ProduceRequest(acks=70_000).encode(9)
    with pytest.raises(MisuseError):
        ProduceRequest(topic_data=None).encode(9)  # type: ignore[arg-type]
    with pytest.raises(MisuseError):
        ProduceRequest(transactional_id="\ud800").encode(9)
    for topic_id in (b"", b"x" * 15, b"x" * 17):
        topic = ProduceRequest.TopicProduceData(topic_id=topic_id)
        with pytest.raises(MisuseError, match="topic_id must be 16 bytes"):
            ProduceRequest(topic_data=[topic]).encode(13)
    with pytest.raises(UnsupportedVersion, match="use 3-13"):
        ProduceRequest().encode(2)


def test_errors_of_malformed_messages_name_the_fault() -> None:
    body = MetadataRequest(topics=[]).encode(1)
    with pytest.raises(PeerError, match="1 bytes after its end"):
        MetadataResponse.decode(1, MetadataResponse().encode(1) + b"\0")
    with pytest.raises(PeerError, match="truncated"):
        MetadataRequest.decode(1, body[:-1])
    with pytest.raises(PeerError, match="null is not allowed"):
        MetadataRequest.decode(0, b"\xff\xff\xff\xff")
    with pytest.raises(PeerError, match="says 2147483647"):
        MetadataRequest.decode(1, b"\x7f\xff\xff\xff")
    with pytest.raises(PeerError, match="more than 5 bytes"):
        MetadataRequest.decode(9, b"\xff\xff\xff\xff\xff\x01\x00\x00\x00\x00")
    with pytest.raises(PeerError, match="UTF-8"):
        MetadataRequest.decode(1, b"\0\0\0\1\0\1\xff")
    with pytest.raises(PeerError, match="not supported"):
        MetadataRequest.decode(14, body)


@pytest.mark.parametrize("api", API_BY_KEY.values(), ids=lambda api: api.name)
def test_bytes_behind_the_body_of_a_request_are_ignored(api: Api) -> None:
    for version in range(api.first_version, api.last_version + 1):
        body = api.request().encode(version)
        assert api.request.decode(version, body + b"\1\0\0") == api.request.decode(version, body)


@pytest.mark.behaviour("I29")
def test_compact_strings_are_as_long_as_kafka_allows() -> None:
    longest = DescribeGroupsRequest(groups=["x" * 32_767])
    body = longest.encode(5)
    assert DescribeGroupsRequest.decode(5, body) == longest
    with pytest.raises(MisuseError, match="32768 bytes"):
        DescribeGroupsRequest(groups=["x" * 32_768]).encode(5)
    too_long = b"\2" + encode_uvarint(32_769) + b"x" * 32_768 + b"\0\0"
    with pytest.raises(PeerError, match="a string of 32768 bytes; the limit is 32767"):
        DescribeGroupsRequest.decode(5, too_long)


@pytest.mark.behaviour("I29")
def test_all_elements_of_a_request_are_counted_together() -> None:
    topic = FetchRequest.FetchTopic(topic="t", partitions=[FetchRequest.FetchPartition()] * 3)
    body = FetchRequest(topics=[topic] * 2).encode(12)
    assert FetchRequest.decode(12, body, max_elements=8)
    with pytest.raises(PeerError, match="limit by 1 elements or tagged fields"):
        FetchRequest.decode(12, body, max_elements=7)


@pytest.mark.behaviour("I29")
def test_unknown_tagged_fields_are_counted_too() -> None:
    body = MetadataRequest(topics=[]).encode(12)[:-1] + b"\3\x7f\0\x7e\0\x7d\0"
    assert MetadataRequest.decode(12, body, max_elements=3).topics == []
    with pytest.raises(PeerError, match="exceeds the message's limit"):
        MetadataRequest.decode(12, body, max_elements=2)


def test_a_part_of_a_buffer_is_read_as_if_it_were_all() -> None:
    body = MetadataRequest(topics=None).encode(12)
    assert MetadataRequest.decode(12, b"xx" + body + b"yy", 2, 2 + len(body)).topics is None


def test_generated_types_are_up_to_date() -> None:
    assert STUB_FILE.read_text() == render(), "run python -m oncelog.wire.stubs"
    assert DATA_STUB_FILE.read_text() == render_data(), "run python -m oncelog.wire.stubs"


def test_no_codec_calls_another() -> None:
    """The generated code has no calls: structs are inlined, so one message is one function."""
    for api in APIS:
        for cls in (api.request, api.response):
            version, flexible = api.last_version, api.is_flexible(api.last_version)
            _, encoder = compile_encoder(cls._struct, version, flexible)
            _, decoder = compile_decoder(cls._struct, cls, version, flexible)
            assert encoder.count("def ") == decoder.count("def ") == 1
