"""The console's page of messages with a schema registry."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Iterator

import click
import pytest
from starlette.testclient import TestClient
from support.schema_registry import Registry, running_registry
from support.schemas import ORDER, ORDER_ROW
from support.topics import new_topic, producer_of

from oncelog import Admin
from oncelog.cli.common import ClientConfig
from oncelog.cli.web import _deserializer, command
from oncelog.errors import SchemaRegistryError
from oncelog.schema_registry import AnyDeserializer, AvroSerializer, Schema, SchemaRegistryClient
from oncelog.web import decoding
from oncelog.web.app import make_app


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as running:
        yield running


@pytest.fixture
def pages(ours: str, registry: Registry) -> Iterator[TestClient]:
    config = {"schema.registry.url": registry.url, "max.retries": 0, "request.timeout.ms": 500}
    with Admin({"bootstrap.servers": ours}) as admin, SchemaRegistryClient(config) as client:
        app = make_app(admin, hosts=["testserver"], servers=ours, deserializer=AnyDeserializer(client))
        with TestClient(app) as pages:
            yield pages


def shown(pages: TestClient, topic: str) -> str:
    answer = pages.get(f"/topics/{topic}/messages")
    assert answer.status_code == 200
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", answer.text).split()))


def written(servers: str, registry: Registry) -> str:
    topic = new_topic(servers)
    with SchemaRegistryClient({"schema.registry.url": registry.url}) as client:
        row = {**ORDER_ROW, "item": "<b>lamp</b>"}
        value = AvroSerializer(client, ORDER).serialize(topic, row)
    with producer_of(servers) as producer:
        values = [value, b"plain", b"\0\0\0\0\x09unknown", value[:7]]
        producer.send_many(topic, values, keys=[b"k"] * 4).result(60)
    return topic


def test_values_are_shown_as_json_with_their_schema(pages: TestClient, ours: str, registry: Registry) -> None:
    topic = written(ours, registry)
    text = shown(pages, topic)
    assert '{"id": 7, "item": "<b>lamp</b>", "note": null}' in text and "schema id 1" in text
    assert "plain" in text
    assert "Schema 9 not found" in text
    assert "the data does not fit schema id 1" in text
    assert "<b>lamp" not in pages.get(f"/topics/{topic}/messages").text


def test_a_slow_registry_delays_a_page_by_seconds_only(
    pages: TestClient, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each of 50 unknown ids could take 5 s."""
    asked = list[int]()

    def look_up(client: SchemaRegistryClient, schema_id: int) -> Schema:
        asked.append(schema_id)
        threading.Event().wait(0.2)
        raise SchemaRegistryError("not found", url="", schema_id=schema_id, status=404)

    monkeypatch.setattr(SchemaRegistryClient, "get_schema", look_up)
    monkeypatch.setattr(decoding, "MAX_LOOKUP_SECONDS", 0.5)
    topic = new_topic(ours)
    with producer_of(ours) as producer:
        producer.send_many(topic, [b"\0\0\0\0" + bytes([number]) + b"x" for number in range(1, 40)]).result(
            60
        )
    assert shown(pages, topic).count("in Confluent's wire format") == 39
    assert 1 <= len(asked) <= 4


@pytest.mark.parametrize("failure", ["refuses", "is silent"])
def test_a_registry_that_fails_is_asked_once_and_bytes_are_shown(
    pages: TestClient, ours: str, registry: Registry, failure: str
) -> None:
    topic = written(ours, registry)
    registry.requests.clear()
    if failure == "refuses":
        registry.authorization = "Basic other"
    else:
        registry.gate.clear()
    text = shown(pages, topic)
    assert "The schema registry did not answer" in text and "plain" in text
    assert "schema id 1 in Confluent's wire format" in text
    assert len(registry.requests) == 1


def test_the_command_waits_for_a_registry_only_shortly(registry: Registry) -> None:
    settings = {
        "request.timeout.ms": "60000",
        "schema.registry.url": "http://other",
        "basic.auth.user.info": "a:b",
    }
    with click.Context(command):
        assert _deserializer(ClientConfig({"bootstrap.servers": "h:1"}, None, ()), None) is None
        config = ClientConfig({"bootstrap.servers": "h:1"}, None, ())
        client = _deserializer(config, registry.url)._registry
        assert (client.url, client.settings["request.timeout.ms"]) == (registry.url, 5_000)
        config = ClientConfig(settings, None, ())
        client = _deserializer(config, None)._registry
        assert (client.url, client.settings["request.timeout.ms"]) == ("http://other", 60_000)
        # The admin client refuses settings that only the registry has.
        assert dict(config) == {"request.timeout.ms": "60000"}
