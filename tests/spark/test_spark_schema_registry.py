"""Keys and values of a schema registry as columns of Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.schema_registry import Registry, running_registry
from support.schemas import ORDER, ORDER_ROW, protobuf_classes
from support.topics import new_topic, producer_of

from oncelog import Broker
from oncelog.errors import ConfigError
from oncelog.schema_registry import AvroSerializer, ProtobufSerializer, SchemaRegistryClient
from oncelog.spark import registry_json

pytestmark = pytest.mark.spark


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as running:
        yield running


def test_values_become_columns(spark: Any, shared_broker: Broker, registry: Registry) -> None:
    ours = shared_broker.bootstrap_servers
    topic, customer = new_topic(ours), protobuf_classes()["Customer"]
    config = {"schema.registry.url": registry.url}
    with SchemaRegistryClient(config) as client, producer_of(ours) as producer:
        avro = AvroSerializer(client, ORDER)
        values = [avro.serialize(topic, {**ORDER_ROW, "id": number}) for number in range(3)]
        values.append(ProtobufSerializer(client, customer).serialize("c", customer(name="x")))
        producer.send_many(topic, [*values, None, b"plain", b"\0\0\0\0\x09?"]).result(60)
    rows = (
        spark.read.format("oncelog").option("kafka.bootstrap.servers", ours).option("subscribe", topic).load()
    )
    listed = {"schema.registry.url": [registry.url]}  # regression: the tasks failed with TypeError
    text = registry_json("value", listed, mode="PERMISSIVE").alias("text")
    found = [row.text for row in rows.orderBy("offset").select(text).collect()]
    expected = [{**ORDER_ROW, "id": number} for number in range(3)]
    assert [None if item is None else json.loads(item) for item in found] == [
        *expected, {"name": "x"}, None, None, None,
    ]  # fmt: skip
    with pytest.raises(Exception, match="not in the wire format"):
        rows.select(registry_json("value", config)).collect()
    assert sum("/schemas/ids/1" in request for request in registry.requests) <= 4


def test_invalid_arguments_are_refused(spark: Any) -> None:
    with pytest.raises(ConfigError, match="mode='DROP': expected one of FAILFAST, PERMISSIVE"):
        registry_json("value", {"schema.registry.url": "http://h"}, mode="DROP")
    with pytest.raises(ConfigError, match="unknown schema registry setting"):
        registry_json("value", {"schema.registry.adress": "http://h"})
