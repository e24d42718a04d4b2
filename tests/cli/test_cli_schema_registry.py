"""`oncelog consume`, `produce` and `web` with a schema registry."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
from support.cli import Outcome, oncelog
from support.schema_registry import Registry, running_registry
from support.schemas import ORDER, ORDER_JSON, ORDER_ROW, protobuf_classes
from support.topics import new_topic, producer_of, read

from oncelog.schema_registry import AvroSerializer, ProtobufSerializer, Schema, SchemaRegistryClient


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as running:
        yield running


@pytest.fixture
def client(registry: Registry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"schema.registry.url": registry.url}) as client:
        yield client


def consume(servers: str, topic: str, *arguments: str) -> Outcome:
    return oncelog("consume", topic, "--from-beginning", "--until-end", *arguments, servers=servers)


def produce(servers: str, *arguments: str, stdin: str = "") -> Outcome:
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()))):
        return oncelog("produce", *arguments, servers=servers)


@pytest.fixture
def topic(ours: str, client: SchemaRegistryClient) -> str:
    """A topic with an Avro record, a Protobuf message, plain text, an unknown schema id, and a tombstone."""
    topic = new_topic(ours)
    customer = protobuf_classes()["Customer"]
    values = [
        AvroSerializer(client, ORDER).serialize(topic, ORDER_ROW),
        ProtobufSerializer(client, customer).serialize("other", customer(name="x")),
        b"plain",
        b"\0\0\0\0\x09?",
    ]
    key = AvroSerializer(client, '"string"', is_key=True).serialize(topic, "k")
    with producer_of(ours) as producer:
        producer.send_many(topic, [*values, None], keys=[key, b"raw", b"c", b"d", b"e"]).result(60)
    return topic


def test_consume_prints_json_for_what_the_registry_knows(ours: str, topic: str, registry: Registry) -> None:
    got = consume(ours, topic, "-o", "jsonl", "--schema-registry", registry.url)
    assert got.code == 0
    rows = [json.loads(line) for line in got.out.splitlines()]
    assert [(row.get("key"), row.get("value")) for row in rows] == [
        ('"k"', json.dumps(ORDER_ROW)),
        ("raw", '{"name": "x"}'),
        ("c", "plain"),
        ("d", "\0\0\0\0\t?"),
        ("e", None),
    ]
    assert "oncelog: printed as stored: GET" in got.err and "Schema 9 not found" in got.err


def test_filters_and_files_of_consume_see_json(
    ours: str, topic: str, registry: Registry, tmp_path: Path
) -> None:
    at = ("--schema-registry", registry.url)
    assert consume(ours, topic, "--json-field", "item=lamp", *at).out == json.dumps(ORDER_ROW) + "\n"
    assert consume(ours, topic, "--key", '"k"', "-f", "%k %o\\n", *at).out == '"k" 0\n'
    path = tmp_path / "orders.parquet"
    assert consume(ours, topic, "--to-parquet", str(path), *at).code == 0
    assert pq.read_table(path)["value"][0].as_py() == json.dumps(ORDER_ROW).encode()


def test_consume_without_a_registry_prints_bytes(ours: str, topic: str) -> None:
    assert "lamp" in consume(ours, topic, "-n", "1").out and "item" not in consume(ours, topic, "-n", "1").out


def test_a_registry_that_fails_ends_consume_with_the_record(
    ours: str, topic: str, registry: Registry
) -> None:
    registry.authorization = "Basic other"
    url = registry.url.replace("://", "://alice:secret@")
    got = consume(ours, topic, "--schema-registry", url)
    assert got.code == 1
    assert f"the key of {topic}-0 at offset 0" in got.err and "HTTP 401" in got.err
    assert "secret" not in got.err + got.out


def test_the_registrys_settings_come_from_x_and_the_environment(
    ours: str, topic: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.authorization = "Bearer abc"
    got = consume(ours, topic, "-n", "1", "--schema-registry", registry.url, "-X", "bearer.auth.token=abc")
    assert got.out == json.dumps(ORDER_ROW) + "\n"
    monkeypatch.setenv("ONCELOG_SCHEMA_REGISTRY_URL", registry.url)
    monkeypatch.setenv("ONCELOG_BEARER_AUTH_TOKEN", "abc")
    assert consume(ours, topic, "-n", "1").out == json.dumps(ORDER_ROW) + "\n"
    # Other commands have no use for the settings in the environment.
    assert oncelog("topics", "list", servers=ours).code == 0
    monkeypatch.delenv("ONCELOG_SCHEMA_REGISTRY_URL")
    wrong = consume(ours, topic, "-X", "bearer.auth.tokens=abc")
    assert wrong.code != 0 and "bearer.auth.tokens" in wrong.err


@pytest.mark.parametrize(
    ("name", "schema", "lines"),
    [
        ("order.avsc", ORDER, '{"id": 7, "item": "lamp"}\n{"id": 8, "item": "x", "note": {"string": "y"}}\n'),
        ("order.json", ORDER_JSON, '{"id": 7, "item": "lamp"}\n{"id": 8, "item": "x"}\n'),
    ],
)
def test_produce_writes_json_lines_with_a_schema(
    ours: str, registry: Registry, tmp_path: Path, name: str, schema: str, lines: str
) -> None:
    (tmp_path / name).write_text(schema)
    topic, at = new_topic(ours), ("--schema-registry", registry.url)
    got = produce(ours, topic, *at, "--value-schema", str(tmp_path / name), stdin=lines)
    assert (got.code, got.err) == (0, "")
    assert registry.subjects == {f"{topic}-value": [1]}
    assert [record.value[:5] for record in read(ours, topic) if record.value] == [b"\0\0\0\0\x01"] * 2
    shown = [json.loads(line) for line in consume(ours, topic, *at).out.splitlines()]
    assert [(row["id"], row["item"]) for row in shown] == [(7, "lamp"), (8, "x")]


def test_produce_uses_an_id_and_keys_and_tombstones(
    ours: str, registry: Registry, client: SchemaRegistryClient, tmp_path: Path
) -> None:
    topic = new_topic(ours)
    customer = protobuf_classes()["Customer"]
    ProtobufSerializer(client, customer).serialize("customers", customer())
    schema_id = client.get_latest_version("customers-value").id
    (tmp_path / "key.avsc").write_text('"string"')
    options = ("--schema-registry", registry.url, "--value-schema", str(schema_id))
    options += ("--key-schema", str(tmp_path / "key.avsc"), "--jsonl")
    lines = '{"key": "\\"a\\"", "value": {"name": "x"}}\n{"key": "\\"a\\"", "value": null}\n'
    got = produce(ours, topic, *options, stdin=lines)
    assert got.code == 0, got.err
    assert f"{topic}-key" in registry.subjects and f"{topic}-value" not in registry.subjects
    out = consume(ours, topic, "--schema-registry", registry.url, "-f", "%k=%s\\n").out
    assert out == '"a"={"name": "x"}\n"a"=\n'


def test_produce_names_the_line_that_does_not_fit(ours: str, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "order.avsc"
    path.write_text(ORDER)
    topic = new_topic(ours)
    options = (topic, "--schema-registry", registry.url, "--value-schema", str(path))
    for line, text in (("{}", "does not fit schema id 1"), ("{", "Expecting property name")):
        got = produce(ours, *options, stdin=f'{{"id": 7, "item": "lamp"}}\n{line}\n')
        assert got.code == 1 and ":2: " in got.err and text in got.err
    registry.prepared.append((409, b'{"error_code": 409, "message": "incompatible"}'))
    got = produce(ours, *options, stdin='{"id": 7, "item": "lamp"}\n')
    assert got.code == 1 and f"for subject '{topic}-value': HTTP 409" in got.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--value-schema", "order.avsc"], "need --schema-registry"),
        (
            ["--value-schema", "order.proto", "--schema-registry", "http://h"],
            "expected a schema id, or a file",
        ),
        (
            ["--key-schema", "/none.avsc", "--schema-registry", "http://h"],
            "--key-schema /none.avsc: No such file",
        ),
        (["--value-schema", "5", "--schema-registry", "h:8081"], "schema.registry.url: expected http"),
    ],
)
def test_invalid_options_of_produce_are_refused(ours: str, options: list[str], text: str) -> None:
    got = produce(ours, "t", *options)
    assert got.code == 2 and text in got.err


def test_an_incompatible_schema_is_refused_before_anything_is_sent(
    ours: str, registry: Registry, client: SchemaRegistryClient, tmp_path: Path
) -> None:
    topic = new_topic(ours)
    client.register_schema(f"{topic}-value", Schema('"string"'))
    (tmp_path / "order.avsc").write_text(ORDER)
    options = ("--schema-registry", registry.url, "--value-schema", str(tmp_path / "order.avsc"))
    got = produce(ours, topic, *options, stdin='{"id": 7, "item": "lamp"}\n')
    assert got.code == 1 and "incompatible with an earlier schema" in got.err
    assert read(ours, topic) == []
