"""Serializers and deserializers: Avro, JSON Schema and Protobuf, subjects, references, and bad data."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from itertools import combinations
from typing import Any

import pytest
from google.protobuf import any_pb2
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator
from jsonschema._utils import equal, unbool
from support.schema_registry import Registry
from support.schemas import ORDER, ORDER_JSON, ORDER_ROW, protobuf_classes

from oncelog.errors import ConfigError, OncelogError, SchemaDataError, SchemaRegistryError
from oncelog.schema_registry import (
    AnyDeserializer,
    AvroDeserializer,
    AvroSerializer,
    JsonDeserializer,
    JsonSerializer,
    JsonValueSerializer,
    ProtobufDeserializer,
    ProtobufSerializer,
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    bounded_validator,
    to_json,
)
from oncelog.schema_registry.avro import MAX_DECIMAL_BYTES, has_endless_arrays, is_recursive, parse_avro

FIXED = {"auto.register.schemas": False}


def test_avro_is_written_with_the_id_of_the_registered_schema(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    data = AvroSerializer(client, ORDER).serialize("orders", ORDER_ROW)
    assert data == b"\0\0\0\0\x01" + b"\x0e\x08lamp\0"
    assert registry.subjects == {"orders-value": [1]}
    assert AvroDeserializer(client).deserialize("orders", data) == ORDER_ROW


def test_each_topic_and_id_is_asked_for_once(registry: Registry, client: SchemaRegistryClient) -> None:
    serializer, deserializer = AvroSerializer(client, ORDER), AvroDeserializer(client)
    assert not serializer.is_ready("a")
    data = [serializer.serialize(topic, ORDER_ROW) for topic in "aabb"]
    assert serializer.is_ready("a")
    assert [deserializer.deserialize("a", item) for item in data] == [ORDER_ROW] * 4
    assert registry.requests == [
        "POST /subjects/a-value/versions",
        "POST /subjects/b-value/versions",
        "GET /schemas/ids/1",
    ]


@pytest.mark.parametrize(
    ("strategy", "is_key", "subject"),
    [
        ("TopicNameStrategy", True, "orders-key"),
        ("RecordNameStrategy", False, "shop.Order"),
        ("TopicRecordNameStrategy", False, "orders-shop.Order"),
    ],
)
def test_the_subject_follows_the_strategy(
    registry: Registry, client: SchemaRegistryClient, strategy: str, is_key: bool, subject: str
) -> None:
    config = {"subject.name.strategy": strategy}
    AvroSerializer(client, ORDER, is_key=is_key, config=config).serialize("orders", ORDER_ROW)
    assert list(registry.subjects) == [subject]


def test_without_registration_the_subject_must_have_the_schema(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    serializer = AvroSerializer(client, ORDER, config=FIXED)
    with pytest.raises(SchemaRegistryError, match=r"subject 'orders-value': HTTP 404, error code 40401"):
        serializer.serialize("orders", ORDER_ROW)
    client.register_schema("orders-value", Schema(ORDER))
    assert serializer.serialize("orders", ORDER_ROW)[:5] == b"\0\0\0\0\x01"


def test_the_latest_version_or_an_id_can_be_used(registry: Registry, client: SchemaRegistryClient) -> None:
    client.register_schema("orders-value", Schema(ORDER))
    latest = AvroSerializer(client, config={**FIXED, "use.latest.version": True})
    chosen = AvroSerializer(client, config={**FIXED, "use.schema.id": 1})
    for serializer in (latest, chosen):
        data = serializer.serialize("orders", {"id": 1, "item": "lamp"})
        assert AvroDeserializer(client).deserialize("orders", data) == {"id": 1, "item": "lamp", "note": None}


@pytest.mark.parametrize(
    ("schema", "config", "text"),
    [
        (None, {}, "needs use.latest.version=true or use.schema.id"),
        (ORDER, {"use.latest.version": True}, "need auto.register.schemas=false"),
        (ORDER, {**FIXED, "use.latest.version": True, "use.schema.id": 1}, "exclude each other"),
        (ORDER, {"subject.name.strategy": "Mine"}, "expected one of"),
        (ORDER, {"use.latest.versoin": True}, "did you mean use.latest.version"),
    ],
)
def test_invalid_settings_of_a_serializer_are_refused(
    client: SchemaRegistryClient, schema: str | None, config: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        AvroSerializer(client, schema, config=config)


def test_a_reader_schema_resolves_what_was_written(client: SchemaRegistryClient) -> None:
    data = AvroSerializer(client, ORDER).serialize("orders", ORDER_ROW)
    reader = json.dumps(
        {
            "type": "record",
            "name": "Order",
            "namespace": "shop",
            "fields": [
                {"name": "item", "type": "string"},
                {"name": "count", "type": "int", "default": 1},
            ],
        }
    )
    assert AvroDeserializer(client, reader).deserialize("orders", data) == {"item": "lamp", "count": 1}


@pytest.mark.parametrize("schema", ['"bytes"', '{"type": "bytes"}'])
def test_plain_bytes_of_avro_have_no_length(client: SchemaRegistryClient, schema: str) -> None:
    data = AvroSerializer(client, schema).serialize("t", b"\xff\0")
    assert data[5:] == b"\xff\0"
    assert AvroDeserializer(client).deserialize("t", data) == b"\xff\0"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ('"string"', "x"),
        ('{"type": "long"}', 5),
        ('["null", "long"]', None),
        ('{"type": "array", "items": "int"}', [1]),
    ],
)
def test_schemas_of_avro_need_no_record(client: SchemaRegistryClient, schema: str, value: object) -> None:
    data = AvroSerializer(client, schema).serialize("t", value)
    assert AvroDeserializer(client).deserialize("t", data) == value


def test_avro_references_are_found_by_every_path(registry: Registry, client: SchemaRegistryClient) -> None:
    """Two schemas refer to the same third one, and a fourth one refers to both."""
    money = '{"type": "record", "name": "Money", "namespace": "shop", "fields": ['
    money += '{"name": "cents", "type": "long"}]}'
    client.register_schema("money", Schema(money))
    of_money = SchemaReference("shop.Money", "money", 1)
    references = []
    for name in ("Price", "Tax"):
        text = json.dumps(
            {
                "type": "record",
                "name": name,
                "namespace": "shop",
                "fields": [{"name": "amount", "type": "shop.Money"}],
            }
        )
        client.register_schema(name, Schema(text, references=(of_money,)))
        references.append(SchemaReference(f"shop.{name}", name, 1))
    line = '{"type": "record", "name": "Line", "fields": [{"name": "p", "type": "shop.Price"}, '
    line += '{"name": "t", "type": "shop.Tax"}]}'
    schema = Schema(line, references=tuple(references))
    row = {"p": {"amount": {"cents": 5}}, "t": {"amount": {"cents": 1}}}
    data = AvroSerializer(client, schema).serialize("lines", row)
    assert AvroDeserializer(client).deserialize("lines", data) == row
    union = Schema('["shop.Price", "shop.Tax"]', references=tuple(references))
    data = AvroSerializer(client, union).serialize("events", ("shop.Tax", row["t"]))
    assert AvroDeserializer(client).deserialize("events", data) == row["t"]


def test_endless_references_are_refused(client: SchemaRegistryClient, registry: Registry) -> None:
    def answer(number: int) -> bytes:
        reference = {"name": f"r{number + 1}", "subject": f"s{number + 1}", "version": 1}
        return json.dumps({"schema": '"r"', "id": 1, "version": 1, "references": [reference]}).encode()

    registry.prepared += [(200, answer(number)) for number in range(250)]
    with pytest.raises(SchemaDataError, match="refers to more than 200 others"):
        AvroDeserializer(client).deserialize("t", b"\0\0\0\0\x01x")


def test_json_is_checked_against_its_schema(registry: Registry, client: SchemaRegistryClient) -> None:
    serializer = JsonSerializer(client, ORDER_JSON, config={"subject.name.strategy": "RecordNameStrategy"})
    data = serializer.serialize("orders", {"id": 7, "item": "ü"})
    assert data == b"\0\0\0\0\x01" + '{"id":7,"item":"ü"}'.encode()
    assert list(registry.subjects) == ["Order"]
    assert JsonDeserializer(client).deserialize("orders", data) == {"id": 7, "item": "ü"}
    with pytest.raises(
        SchemaDataError, match=r"schema id 1 of subject 'Order': ValidationError: 'id' is a req"
    ):
        serializer.serialize("orders", {"item": "lamp"})
    bad = data[:5] + b'{"id":"x"}'
    with pytest.raises(SchemaDataError, match=r"schema id 1: ValidationError: 'x' is not of type 'integer'"):
        JsonDeserializer(client).deserialize("orders", bad)
    unchecked = {"json.fail.invalid.schema": False}
    assert JsonDeserializer(client, config=unchecked).deserialize("orders", bad) == {"id": "x"}


def test_json_references_are_read_from_the_registry_and_nowhere_else(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    client.register_schema("item", Schema('{"type": "string", "maxLength": 3}', "JSON"))
    reference = SchemaReference("item.json", "item", 1)
    text = '{"type": "object", "properties": {"item": {"$ref": "item.json"}}}'
    serializer = JsonSerializer(client, Schema(text, "JSON", (reference,)))
    assert serializer.serialize("t", {"item": "abc"})[:1] == b"\0"
    with pytest.raises(SchemaDataError, match="too long"):
        serializer.serialize("t", {"item": "abcd"})
    elsewhere = JsonSerializer(client, f'{{"$ref": "{registry.url}/schemas/ids/1"}}')
    registry.requests.clear()
    with pytest.raises(SchemaDataError, match="Unresolvable"):
        elsewhere.serialize("t2", {})
    assert registry.requests == ["POST /subjects/t2-value/versions"]


def test_protobuf_registers_what_a_file_imports(registry: Registry, client: SchemaRegistryClient) -> None:
    classes = protobuf_classes()
    order = classes["Order"](
        id=7, price=classes["Money"](cents=5), lines=[classes["Order.Line"](item="lamp")]
    )
    order.at.seconds = 60
    data = ProtobufSerializer(client, classes["Order"]).serialize("orders", order)
    assert data[:7] == b"\0\0\0\0\x02\x02\x02"
    assert registry.subjects == {"shop/money.proto": [1], "orders-value": [2]}
    assert ProtobufDeserializer(client, classes["Order"]).deserialize("orders", data) == order
    made = ProtobufDeserializer(client).deserialize("orders", data)
    assert made.DESCRIPTOR.full_name == "shop.Order"
    assert json.loads(to_json(made)) == {
        "id": "7",
        "price": {"cents": "5"},
        "at": "1970-01-01T00:01:00Z",
        "lines": [{"item": "lamp"}],
    }


@pytest.mark.parametrize(
    ("name", "indexes"), [("Customer", "00"), ("Order", "0202"), ("Order.Line", "040200")]
)
def test_message_indexes_name_the_message(client: SchemaRegistryClient, name: str, indexes: str) -> None:
    message_class = protobuf_classes()[name]
    data = ProtobufSerializer(client, message_class).serialize("t", message_class())
    assert data[5:].hex() == indexes
    assert ProtobufDeserializer(client).deserialize("t", data).DESCRIPTOR.full_name == f"shop.{name}"


def test_a_message_index_beyond_the_file_is_refused(client: SchemaRegistryClient) -> None:
    message_class = protobuf_classes()["Customer"]
    data = ProtobufSerializer(client, message_class).serialize("t", message_class())
    with pytest.raises(SchemaDataError, match=r"schema id 2 has no message with the indexes \[9\]"):
        ProtobufDeserializer(client).deserialize("t", data[:5] + b"\x02\x12")


def test_a_registry_that_returns_the_text_of_a_proto_file_is_named(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    body = {"schemaType": "PROTOBUF", "schema": 'syntax = "proto3"; message A {}'}
    registry.prepared += [(200, json.dumps(body).encode())] * 2
    with pytest.raises(SchemaDataError, match="although format=serialized was requested"):
        ProtobufDeserializer(client).deserialize("t", b"\0\0\0\0\x01\0")


def test_data_that_does_not_fit_names_subject_and_id(client: SchemaRegistryClient) -> None:
    with pytest.raises(
        SchemaDataError, match="the data does not fit schema id 1 of subject 'orders-value'"
    ) as raised:
        AvroSerializer(client, ORDER).serialize("orders", {"id": "x", "item": 5})
    assert (raised.value.subject, raised.value.schema_id) == ("orders-value", 1)
    with pytest.raises(SchemaDataError, match="expected Order, not dict"):
        ProtobufSerializer(client, protobuf_classes()["Order"]).serialize("p", {"id": 1})
    with pytest.raises(SchemaDataError, match="not JSON compliant"):
        JsonSerializer(client, "true").serialize("j", float("nan"))
    with pytest.raises(SchemaDataError, match="the data does not fit schema id 1"):
        AvroDeserializer(client).deserialize("orders", b"\0\0\0\0\x01\x0e\x08la")
    with pytest.raises(SchemaDataError, match="not in the wire format"):
        AvroDeserializer(client).deserialize("orders", b"{}")


def test_a_schema_of_another_type_is_refused(client: SchemaRegistryClient) -> None:
    data = JsonSerializer(client, ORDER_JSON).serialize("orders", {"id": 1})
    for deserializer in (AvroDeserializer(client), ProtobufDeserializer(client)):
        with pytest.raises(SchemaDataError, match="schema id 1 is a schema of type JSON, not"):
            deserializer.deserialize("orders", data)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("AVRO", "{", "schema id 1 is not an Avro schema"),
        ("AVRO", '{"type": "none"}', "schema id 1 is not an Avro schema"),
        ("AVRO", "[" * 100_000, "schema id 1 is not an Avro schema"),
        ("JSON", "{", "schema id 1 is not a JSON Schema"),
        ("JSON", "5", "expected an object or a boolean"),
        ("JSON", '{"type": 5}', "schema id 1 is not a JSON Schema"),
        ("PROTOBUF", "AAAA", "schema id 1"),
    ],
)
def test_invalid_schemas_in_the_registry_are_refused(
    registry: Registry, client: SchemaRegistryClient, kind: str, text: str, reason: str
) -> None:
    registry.prepared += [(200, json.dumps({"schema": text, "schemaType": kind}).encode())] * 2
    with pytest.raises(SchemaDataError, match=reason):
        AnyDeserializer(client).deserialize("t", b"\0\0\0\0\x01\0x")


def test_any_deserializer_reads_all_types(client: SchemaRegistryClient) -> None:
    classes = protobuf_classes()
    written = [
        AvroSerializer(client, ORDER).serialize("a", ORDER_ROW),
        JsonSerializer(client, ORDER_JSON).serialize("b", {"id": 7}),
        ProtobufSerializer(client, classes["Customer"]).serialize("c", classes["Customer"](name="x")),
    ]
    read = AnyDeserializer(client)
    texts = [to_json(read.deserialize("t", data)) for data in written]
    assert [json.loads(text) for text in texts] == [ORDER_ROW, {"id": 7}, {"name": "x"}]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"b": b"\xffa", 1: (1, 2)}, '{"b": "ÿa", "1": [1, 2]}'),
        ([float("nan"), float("inf"), float("-inf"), 0.5], '["NaN", "Infinity", "-Infinity", 0.5]'),
        (datetime(2026, 11, 29, tzinfo=UTC), '"2026-11-29T00:00:00+00:00"'),
        (Decimal("1.50"), '"1.50"'),
    ],
)
def test_data_that_json_does_not_have_becomes_text(data: Any, text: str) -> None:
    assert to_json(data) == text


def test_data_that_is_nested_too_deeply_has_no_text() -> None:
    data: Any = 1
    for _ in range(100_000):
        data = [data]
    with pytest.raises(SchemaDataError, match="nested deeper than 200"):
        to_json(data)


EVERYTHING = json.dumps(
    {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "b", "type": "bytes"},
            {"name": "f", "type": {"type": "fixed", "name": "F", "size": 2}},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
            {"name": "u", "type": ["null", "string", "F", {"type": "map", "values": "bytes"}]},
            {"name": "next", "type": ["null", "R"], "default": None},
            {"name": "l", "type": {"type": "array", "items": "F"}},
        ],
    }
)
ROW = {
    "b": b"\xff",
    "f": b"ab",
    "at": datetime(2026, 11, 29, 1, 2, 3, 4000, tzinfo=UTC),
    "d": Decimal("12.50"),
    "u": {"k": b"\xfe"},
    "next": None,
    "l": [b"cd", b"ef"],
}


def test_json_text_of_avro_is_written_back_to_the_same_bytes(client: SchemaRegistryClient) -> None:
    row = {**ROW, "next": ROW}
    data = AvroSerializer(client, EVERYTHING).serialize("t", row)
    text = to_json(AvroDeserializer(client).deserialize("t", data))
    assert JsonValueSerializer(client, Schema(EVERYTHING)).serialize("t", json.loads(text)) == data


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("x", "x"),
        ({"string": "x"}, "x"),
        ({"F": "ab"}, b"ab"),
        ({"map": {"k": "ÿ"}}, {"k": b"\xff"}),
        ({"k": "ÿ"}, {"k": b"\xff"}),
    ],
)
def test_a_union_is_plain_or_in_avros_json_encoding(
    client: SchemaRegistryClient, value: Any, expected: Any
) -> None:
    schema = (
        '["null", "string", {"type": "fixed", "name": "F", "size": 2}, {"type": "map", "values": "bytes"}]'
    )
    data = JsonValueSerializer(client, Schema(schema)).serialize("t", value)
    assert AvroDeserializer(client).deserialize("t", data) == expected


def test_json_values_are_written_as_json_and_protobuf(client: SchemaRegistryClient) -> None:
    data = JsonValueSerializer(client, Schema(ORDER_JSON, "JSON")).serialize("j", {"id": 1})
    assert JsonDeserializer(client).deserialize("j", data) == {"id": 1}
    customer = protobuf_classes()["Customer"]
    ProtobufSerializer(client, customer).serialize("p", customer())
    chosen = {**FIXED, "use.schema.id": client.get_latest_version("p-value").id}
    serializer = JsonValueSerializer(client, config={**chosen, "subject.name.strategy": "RecordNameStrategy"})
    data = serializer.serialize("p", {"name": "x"})
    assert ProtobufDeserializer(client, customer).deserialize("p", data).name == "x"
    with pytest.raises(SchemaDataError, match="no field named"):
        serializer.serialize("p", {"nome": "x"})


def test_any_bytes_with_a_known_id_are_read_or_refused(client: SchemaRegistryClient) -> None:
    classes = protobuf_classes()
    AvroSerializer(client, EVERYTHING).serialize("a", ROW)
    JsonSerializer(client, ORDER_JSON).serialize("b", {"id": 7})
    ProtobufSerializer(client, classes["Order"]).serialize("c", classes["Order"]())
    read = AnyDeserializer(client)
    for schema_id in range(1, 6):
        for tail in (b"", b"\0", b"\xff" * 20, b"\x02\x02\x08", bytes(range(40))):
            with suppress(OncelogError):
                read.deserialize("t", b"\0" + schema_id.to_bytes(4, "big") + tail)


def test_an_unknown_id_is_asked_for_once_if_it_is_remembered(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    data = b"\0\0\0\0\x07x"
    for deserializer, requests in (
        (AnyDeserializer(client, remembers_unknown=True), 1),
        (AnyDeserializer(client), 3),
    ):
        registry.requests.clear()
        for _ in range(3):
            with pytest.raises(SchemaRegistryError, match="Schema 7 not found"):
                deserializer.deserialize("t", data)
        assert len(registry.requests) == requests


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    program = """
import sys
from oncelog.errors import MissingDependency
for name in ("httpx2", "fastavro", "jsonschema", "google.protobuf"):
    ours = [module for module in sys.modules if module.startswith("oncelog.schema_registry")]
    for module in ours:
        del sys.modules[module]
    hidden = {module: sys.modules.pop(module) for module in list(sys.modules) if module.split(".")[0] == name}
    sys.modules[name] = None
    try:
        import oncelog.schema_registry
        print("no error")
    except MissingDependency as error:
        print(error)
    del sys.modules[name]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert all(line.endswith("missing: pip install 'oncelog[schema-registry]'") for line in lines), lines


@pytest.mark.parametrize(
    "data", [any_pb2.Any(type_url="type.googleapis.com/no.Such", value=b"x"), {"a": object()}]
)
def test_data_without_a_json_form_is_refused(data: Any) -> None:
    with pytest.raises(SchemaDataError, match="no JSON form: TypeError"):
        to_json(data)


def doubled(levels: int) -> str:
    """Return a record of twice as many parts for each level. A value takes no bytes."""
    inner: dict[str, Any] = {"type": "record", "name": "D0", "fields": []}
    for level in range(1, levels + 1):
        fields = [{"name": "a", "type": inner}, {"name": "b", "type": inner["name"]}]
        inner = {"type": "record", "name": f"D{level}", "fields": fields}
    return json.dumps(inner)


ENDLESS = [
    doubled(40),
    '{"type": "array", "items": "null"}',
    '{"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}',
    '{"type": "map", "values": {"type": "array", "items": {"type": "record", "name": "R", "fields": []}}}',
    '{"type": "record", "name": "R", "fields": [{"name": "n", "type": "null"}, {"name": "all", "type":'
    ' ["null", {"type": "array", "items": {"type": "record", "name": "E", "fields": [{"name": "n", "type":'
    ' "null"}]}}]}]}',
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_avro_data_that_may_claim_any_number_of_items_is_not_read(
    client: SchemaRegistryClient, schema: str
) -> None:
    """Three bytes of data can claim a million items of an array of nulls."""
    parsed = parse_avro(client, Schema(schema))
    assert has_endless_arrays(parsed)
    schema_id = client.register_schema("endless-value", Schema(schema))
    with pytest.raises(SchemaDataError, match=f"id {schema_id} has an array whose items take no bytes"):
        AvroDeserializer(client).deserialize("endless", b"\0" + schema_id.to_bytes(4) + b"\x80\x89\x7a\0")


FINITE = [
    doubled(10),
    ORDER,
    '{"type": "array", "items": ["null", "int"]}',
    '{"type": "map", "values": "null"}',
    '{"type": "record", "name": "Tree", "fields": [{"name": "children", "type": {"type": "array", "items":'
    ' "Tree"}}]}',
]


@pytest.mark.parametrize("schema", FINITE)
def test_avro_data_whose_items_take_bytes_is_read(client: SchemaRegistryClient, schema: str) -> None:
    assert not has_endless_arrays(parse_avro(client, Schema(schema)))


LINKS = '{"type": "record", "name": "Link", "fields": [{"name": "next", "type": ["null", "Link"]}]}'
MUTUAL = (
    '{"type": "record", "name": "A", "fields": [{"name": "b", "type": {"type": "record", "name": "B",'
    ' "fields": [{"name": "a", "type": ["null", "A"]}]}}]}'
)
TWICE = (
    '{"type": "record", "name": "C", "fields": [{"name": "x", "type": {"type": "fixed", "name": "F",'
    ' "size": 2}}, {"name": "y", "type": "F"}]}'
)


@pytest.mark.parametrize("schema", [LINKS, MUTUAL])
def test_avro_data_that_is_nested_too_deeply_is_refused(client: SchemaRegistryClient, schema: str) -> None:
    """Regression: fastavro's compiled reader overflowed the stack, and the process ended."""
    schema_id = client.register_schema("links-value", Schema(schema))
    head, deserializer = b"\0" + schema_id.to_bytes(4), AvroDeserializer(client)
    assert AvroSerializer(client, schema).serialize("links", deserializer.deserialize("", head + b"\2\0"))
    with pytest.raises(SchemaDataError, match=f"schema id {schema_id}: RecursionError"):
        deserializer.deserialize("links", head + b"\2" * 1_000_000 + b"\0")


def test_only_schemas_that_contain_themselves_are_recursive(client: SchemaRegistryClient) -> None:
    recursive = [
        text for text in (*FINITE, LINKS, MUTUAL, TWICE) if is_recursive(parse_avro(client, Schema(text)))
    ]
    assert recursive == [FINITE[-1], LINKS, MUTUAL]


def doubling(levels: int, part: dict[str, Any]) -> str:
    """Return a JSON Schema with twice as many checks for each level."""
    twice: list[dict[str, Any]] = [
        {**part, "allOf": 2 * [{"$ref": f"#/definitions/{level + 1}"}]} for level in range(levels)
    ]
    definitions = dict(enumerate([*twice, {"type": "integer"}]))
    return json.dumps({"definitions": definitions, "allOf": [{"$ref": "#/definitions/0"}]})


@pytest.mark.parametrize("part", [{}, {"$schema": "http://json-schema.org/draft-07/schema#"}])
def test_a_json_value_that_needs_too_many_checks_is_refused(
    client: SchemaRegistryClient, part: dict[str, Any]
) -> None:
    """R1405: the checks of a single number never ended."""
    few, many = (JsonSerializer(client, Schema(doubling(levels, part), "JSON")) for levels in (4, 60))
    data = few.serialize("few", 1)
    assert JsonDeserializer(client).deserialize("few", data) == 1
    with pytest.raises(SchemaDataError, match="too many checks"):
        many.serialize("many", 1)
    schema_id = client.lookup_schema("many-value", Schema(doubling(60, part), "JSON")).id
    with pytest.raises(SchemaDataError, match="too many checks"):
        JsonDeserializer(client).deserialize("many", b"\0" + schema_id.to_bytes(4) + b"1")


def test_an_array_of_many_unique_objects_is_checked_at_once(client: SchemaRegistryClient) -> None:
    """R1405: each item was compared with all others, and 4,000 items took a minute."""
    serializer = JsonSerializer(client, '{"type": "array", "uniqueItems": true}')
    items: list[Any] = [{"number": number} for number in range(50_000)]
    assert serializer.serialize("unique", items)
    with pytest.raises(SchemaDataError, match="non-unique"):
        serializer.serialize("unique", [*items, {"number": 7}])


SCALARS = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, -1.5, "", "1", "0"])
JSON_VALUES = st.recursive(
    SCALARS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from("ab"), part, max_size=2),
    max_leaves=4,
)


@given(st.lists(JSON_VALUES, max_size=4))
def test_unique_items_are_those_of_jsonschema(items: list[Any]) -> None:
    schema = {"uniqueItems": True}
    bounded_validator._BUDGET.left = 1
    assert bounded_validator.bounded(Draft7Validator)(schema).is_valid(items) == all(
        not equal(unbool(first), unbool(second)) for first, second in combinations(items, 2)
    )


DECIMAL = '{"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}'
DECIMALS = [
    DECIMAL,
    f'["null", {DECIMAL}]',
    '{"type": "record", "name": "P", "fields": [{"name": "p", "type": {"type": "array", "items":'
    f' {DECIMAL}}}}}, {{"name": "q", "type": ["null", "P"]}}]}}',
]


@pytest.mark.parametrize("schema", DECIMALS)
def test_a_decimal_above_the_limit_is_refused(client: SchemaRegistryClient, schema: str) -> None:
    """Regression: a decimal of one megabyte blocked the reader for two minutes."""
    serializer, deserializer = AvroSerializer(client, schema), AvroDeserializer(client)
    wrapped = Decimal("12.34"), {"p": [], "q": {"p": [Decimal("12.34")], "q": None}}
    row = wrapped["record" in schema]
    data = serializer.serialize("prices", row)
    assert deserializer.deserialize("prices", data) == row
    assert AvroDeserializer(client, schema).deserialize("prices", data) == row
    length = MAX_DECIMAL_BYTES + 1 << 1
    large = bytes([length & 0x7F | 0x80, length >> 7]) + b"\x7f" * (MAX_DECIMAL_BYTES + 1)
    with pytest.raises(SchemaDataError, match="a decimal of 1001 bytes: at most 1000 are read"):
        deserializer.deserialize("prices", data.replace(b"\4\x04\xd2", large))
