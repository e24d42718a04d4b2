"""Serializers and deserializers for a schema registry with Confluent's REST API and wire format.

    from oncelog.schema_registry import AvroSerializer, SchemaRegistryClient

    registry = SchemaRegistryClient({"schema.registry.url": "http://127.0.0.1:8081"})
    producer = oncelog.Producer(config, value_serializer=AvroSerializer(registry, schema))

Needs `pip install 'oncelog[schema-registry]'`. The guide is docs/guides/schema-registry.md.
"""

from __future__ import annotations

from oncelog.schema_registry.any_schema import AnyDeserializer, JsonValueSerializer, to_json
from oncelog.schema_registry.avro import AvroDeserializer, AvroSerializer
from oncelog.schema_registry.client import SchemaRegistryClient
from oncelog.schema_registry.json_schema import JsonDeserializer, JsonSerializer
from oncelog.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from oncelog.schema_registry.schemas import RegisteredSchema, Schema, SchemaReference, SchemaType
from oncelog.schema_registry.serde import SchemaDeserializer, SchemaSerializer

__all__ = [
    "AnyDeserializer",
    "AvroDeserializer",
    "AvroSerializer",
    "JsonDeserializer",
    "JsonSerializer",
    "JsonValueSerializer",
    "ProtobufDeserializer",
    "ProtobufSerializer",
    "RegisteredSchema",
    "Schema",
    "SchemaDeserializer",
    "SchemaReference",
    "SchemaRegistryClient",
    "SchemaSerializer",
    "SchemaType",
    "to_json",
]
