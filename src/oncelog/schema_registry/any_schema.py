"""Schemas of any type: a deserializer, its data as JSON text, and a serializer of JSON values.

The commands and the pages of `oncelog web` use them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from oncelog.errors import MissingDependency, SchemaDataError, SchemaRegistryError, copy_to_raise, text_of
from oncelog.schema_registry.avro import avro_decoder, avro_encoder, avro_record_name, parse_avro
from oncelog.schema_registry.avro_json import avro_value
from oncelog.schema_registry.cache import Cache
from oncelog.schema_registry.client import SchemaRegistryClient
from oncelog.schema_registry.json_schema import json_decoder, json_encoder, json_title
from oncelog.schema_registry.protobuf import first_message_name, protobuf_class, protobuf_decoder
from oncelog.schema_registry.schemas import Schema
from oncelog.schema_registry.serde import Decode, Encode, SchemaDeserializer, SchemaSerializer, Writer
from oncelog.schema_registry.wire_format import decode_schema_id, encode_header

try:
    from google.protobuf.json_format import MessageToDict, ParseDict
    from google.protobuf.message import Message
except ImportError as error:
    raise MissingDependency(f"{error.name} is missing: pip install 'oncelog[schema-registry]'") from None

NOT_FOUND = 404
"""The HTTP status for a schema, subject or version that the registry does not have."""
MAX_UNKNOWN = 10_000
"""The maximum number of unknown ids that an AnyDeserializer remembers."""
MAX_DEPTH = 200
"""The maximum nesting of data in JSON text."""


class AnyDeserializer(SchemaDeserializer):
    """A deserializer that reads Avro, JSON and Protobuf. The schema of the data decides which one.

    It returns Python's types for Avro, the values of `json` for JSON, and messages for Protobuf. `config`
    overrides settings of `registry`. With `remembers_unknown`, the registry is asked only once for an id that
    it does not have. Commands use this, because they read data of unknown origin.
    """

    def __init__(
        self,
        registry: SchemaRegistryClient,
        *,
        config: Mapping[str, object] | None = None,
        remembers_unknown: bool = False,
    ) -> None:
        super().__init__(registry, config=config)
        self._unknown: Cache[int, SchemaRegistryError] | None = (
            Cache(MAX_UNKNOWN) if remembers_unknown else None
        )

    def deserialize(self, topic: str, data: bytes) -> Any:
        """Return the data. Raises SchemaRegistryError and SchemaDataError."""
        if self._unknown is None:
            return super().deserialize(topic, data)
        schema_id = decode_schema_id(data)
        if (known := self._unknown.get(schema_id)) is not None:
            raise copy_to_raise(known)
        try:
            return super().deserialize(topic, data)
        except SchemaRegistryError as error:
            if error.status == NOT_FOUND:
                self._unknown.put(schema_id, copy_to_raise(error))
            raise

    def _decoder(self, schema_id: int) -> Decode:
        registry = self._registry
        kind = registry.get_schema(schema_id).type
        if kind == "AVRO":
            return avro_decoder(registry, schema_id)
        if kind == "PROTOBUF":
            return protobuf_decoder(registry, schema_id)
        return json_decoder(registry, schema_id, is_checked=self._settings["json.fail.invalid.schema"])


class JsonValueSerializer(SchemaSerializer):
    """A serializer that converts JSON values to the data of a schema of any type.

    An Avro schema accepts plain values and Avro's JSON encoding. A Protobuf schema accepts the JSON form of
    its first message, and must be in the registry already. For the arguments see `SchemaSerializer`.
    """

    def _record_name(self, schema: Schema) -> str | None:
        if schema.type == "PROTOBUF":
            return first_message_name(schema)
        return avro_record_name(schema) if schema.type == "AVRO" else json_title(schema)

    def _make_writer(self, subject: str, schema_id: int, schema: Schema) -> Writer:
        indexes = [0] if schema.type == "PROTOBUF" else None
        return Writer(encode_header(schema_id, indexes), self._encoder(schema), subject, schema_id)

    def _encoder(self, schema: Schema) -> Encode:
        if schema.type == "JSON":
            checks = self._settings["json.fail.invalid.schema"]
            return json_encoder(self._registry, schema, is_checked=checks)
        if schema.type == "PROTOBUF":
            message_class = protobuf_class(self._registry, schema, None)
            return lambda value: ParseDict(value, message_class()).SerializeToString()
        parsed, encode = parse_avro(self._registry, schema), avro_encoder(self._registry, schema)
        return lambda value: encode(avro_value(parsed, value, {}))


def to_json(data: Any) -> str:
    """Return deserialized data as JSON text.

    Bytes of Avro become text with a character for each byte (ISO 8859-1), as in Avro's JSON encoding. Times
    become ISO 8601, and decimals become text. NaN and the infinities, which JSON lacks, become "NaN",
    "Infinity" and "-Infinity".
    Raises SchemaDataError for data that is nested deeper than MAX_DEPTH, or that has no JSON form.
    """
    try:
        if isinstance(data, Message):
            pool = data.DESCRIPTOR.file.pool
            plain = MessageToDict(data, preserving_proto_field_name=True, descriptor_pool=pool)
        else:
            plain = _plain(data, 0)
        return json.dumps(plain, ensure_ascii=False)
    except SchemaDataError:
        raise
    # The libraries raise several classes, for example TypeError for an unknown type in google.protobuf.Any.
    except Exception as error:
        raise SchemaDataError(f"no JSON form: {type(error).__name__}: {text_of(error)}") from error


def _plain(data: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise SchemaDataError(f"the data is nested deeper than {MAX_DEPTH} levels")
    match data:
        case dict():
            return {str(key): _plain(value, depth + 1) for key, value in data.items()}
        case list() | tuple():
            return [_plain(item, depth + 1) for item in data]
        case bytes():
            return data.decode("iso-8859-1")
        case float() if not math.isfinite(data):
            return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
        case datetime() | date() | time():
            return data.isoformat()
        case Decimal() | UUID():
            return str(data)
        case _:
            return data
