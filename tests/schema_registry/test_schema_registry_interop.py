"""Confluent's own serializers and ours, through one registry: each reads what the other has written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.schema_registry import Registry
from support.schemas import ORDER, ORDER_JSON, ORDER_ROW, protobuf_classes

from oncelog.schema_registry import (
    AnyDeserializer,
    AvroDeserializer,
    AvroSerializer,
    JsonDeserializer,
    JsonSerializer,
    ProtobufDeserializer,
    ProtobufSerializer,
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    to_json,
)

confluent = pytest.importorskip(
    "confluent_kafka.schema_registry", reason="needs confluent-kafka[avro,json,protobuf]"
)
theirs_avro = pytest.importorskip(
    "confluent_kafka.schema_registry.avro", reason="needs confluent-kafka[avro]"
)
theirs_json = pytest.importorskip(
    "confluent_kafka.schema_registry.json_schema", reason="needs confluent-kafka[json]"
)
theirs_protobuf = pytest.importorskip(
    "confluent_kafka.schema_registry.protobuf", reason="needs confluent-kafka[protobuf]"
)
serialization = pytest.importorskip("confluent_kafka.serialization")

VALUE = serialization.SerializationContext("orders", serialization.MessageField.VALUE)


@pytest.fixture
def their_client(registry: Registry) -> Any:
    return confluent.SchemaRegistryClient({"url": registry.url})


def test_avro(registry: Registry, client: SchemaRegistryClient, their_client: Any) -> None:
    theirs = theirs_avro.AvroSerializer(their_client, ORDER)(ORDER_ROW, VALUE)
    ours = AvroSerializer(client, ORDER).serialize("orders", ORDER_ROW)
    assert ours == theirs
    assert AvroDeserializer(client).deserialize("orders", theirs) == ORDER_ROW
    assert theirs_avro.AvroDeserializer(their_client)(ours, VALUE) == ORDER_ROW
    assert registry.subjects == {"orders-value": [1]}


@pytest.mark.parametrize(
    ("schema", "value"),
    [('"bytes"', b"\xff\0"), ('"string"', "x"), ('["null", "long"]', 5), ('{"type": "int"}', 1)],
)
def test_avro_without_records(
    client: SchemaRegistryClient, their_client: Any, schema: str, value: object
) -> None:
    theirs = theirs_avro.AvroSerializer(their_client, schema)(value, VALUE)
    ours = AvroSerializer(client, schema).serialize("orders", value)
    assert ours == theirs
    assert AvroDeserializer(client).deserialize("orders", theirs) == value
    assert theirs_avro.AvroDeserializer(their_client)(ours, VALUE) == value


def test_avro_with_references(client: SchemaRegistryClient, their_client: Any) -> None:
    item = '{"type": "enum", "name": "Item", "namespace": "shop", "symbols": ["LAMP", "BOOK"]}'
    client.register_schema("item", Schema(item))
    text = '{"type": "record", "name": "Line", "fields": [{"name": "item", "type": "shop.Item"}]}'
    of_item = SchemaReference("shop.Item", "item", 1)
    ours = AvroSerializer(client, Schema(text, references=(of_item,))).serialize("orders", {"item": "BOOK"})
    their_schema = confluent.Schema(text, "AVRO", [confluent.SchemaReference("shop.Item", "item", 1)])
    theirs = theirs_avro.AvroSerializer(their_client, their_schema)({"item": "BOOK"}, VALUE)
    assert ours == theirs
    assert AvroDeserializer(client).deserialize("orders", theirs) == {"item": "BOOK"}
    assert theirs_avro.AvroDeserializer(their_client)(ours, VALUE) == {"item": "BOOK"}


def test_json(client: SchemaRegistryClient, their_client: Any) -> None:
    value = {"id": 7, "item": "lämp"}
    theirs = theirs_json.JSONSerializer(ORDER_JSON, their_client)(value, VALUE)
    ours = JsonSerializer(client, ORDER_JSON).serialize("orders", value)
    assert ours[:5] == theirs[:5]
    assert JsonDeserializer(client).deserialize("orders", theirs) == value
    assert theirs_json.JSONDeserializer(ORDER_JSON, schema_registry_client=their_client)(ours, VALUE) == value


@pytest.mark.parametrize("name", ["Money", "Customer", "Order", "Order.Line"])
def test_protobuf(registry: Registry, client: SchemaRegistryClient, their_client: Any, name: str) -> None:
    classes = protobuf_classes()
    message = classes[name]()
    if name == "Order":
        message.id, message.price.cents, message.at.seconds = 7, 5, 60
    theirs = theirs_protobuf.ProtobufSerializer(classes[name], their_client)(message, VALUE)
    subjects = {subject: list(ids) for subject, ids in registry.subjects.items()}
    ours = ProtobufSerializer(client, classes[name]).serialize("orders", message)
    assert ours == theirs
    assert registry.subjects == subjects
    assert ProtobufDeserializer(client, classes[name]).deserialize("orders", theirs) == message
    made = AnyDeserializer(client).deserialize("orders", theirs)
    assert json.loads(to_json(made)) == json.loads(to_json(message))
    their_deserializer = theirs_protobuf.ProtobufDeserializer(classes[name], {}, their_client)
    assert their_deserializer(ours, VALUE) == message


def test_the_subjects_of_keys_and_record_names_agree(
    registry: Registry, client: SchemaRegistryClient, their_client: Any
) -> None:
    key = serialization.SerializationContext("orders", serialization.MessageField.KEY)
    for config, strategy in (
        ({}, confluent.topic_subject_name_strategy),
        ({"subject.name.strategy": "RecordNameStrategy"}, confluent.record_subject_name_strategy),
        ({"subject.name.strategy": "TopicRecordNameStrategy"}, confluent.topic_record_subject_name_strategy),
    ):
        registry.subjects.clear()
        AvroSerializer(client_of(registry), ORDER, is_key=True, config=config).serialize("orders", ORDER_ROW)
        JsonSerializer(client_of(registry), ORDER_JSON, config=config).serialize("json", {"id": 1})
        ours = list(registry.subjects)
        registry.subjects.clear()
        fresh = confluent.SchemaRegistryClient({"url": registry.url})
        conf = {"subject.name.strategy": strategy}
        theirs_avro.AvroSerializer(fresh, ORDER, conf=conf)(ORDER_ROW, key)
        context = serialization.SerializationContext("json", serialization.MessageField.VALUE)
        theirs_json.JSONSerializer(ORDER_JSON, fresh, conf=conf)({"id": 1}, context)
        assert ours == list(registry.subjects)


def client_of(registry: Registry) -> SchemaRegistryClient:
    return SchemaRegistryClient({"schema.registry.url": registry.url})
