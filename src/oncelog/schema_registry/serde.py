"""The base of the serializers and deserializers of all schema types: subjects, ids, caches and waiting.

Clients call `serialize` and `deserialize`. The clients of oncelog.aio first call `is_ready`, and await
`prepare` if it returns False, so that the event loop never waits for the registry. Both protocols are
documented in `oncelog.client.serialization`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from oncelog.config import SCHEMA_REGISTRY
from oncelog.errors import ConfigError, OncelogError, SchemaDataError, text_of
from oncelog.schema_registry.cache import Cache
from oncelog.schema_registry.client import SchemaRegistryClient
from oncelog.schema_registry.lookups import About
from oncelog.schema_registry.schemas import Schema, SchemaType
from oncelog.schema_registry.subjects import strategy_name, subject_name
from oncelog.schema_registry.wire_format import decode_schema_id, encode_header

Encode = Callable[[Any], bytes]
"""Converts one value to bytes, without the header of the wire format."""
Decode = Callable[[bytes], Any]
"""Converts a whole key or value, with the header of the wire format."""


class Writer(NamedTuple):
    """The way in which a serializer writes the data of one topic."""

    header: bytes
    encode: Encode
    subject: str
    schema_id: int


class SchemaSerializer(ABC):
    """The base class of the serializers.

    `schema` may be the text alone, if its type is that of the serializer. `config` overrides settings of
    `registry`, for example subject.name.strategy. `is_key` is True for a `key_serializer`.
    """

    _text_type: ClassVar[SchemaType] = "AVRO"

    def __init__(
        self,
        registry: SchemaRegistryClient,
        schema: str | Schema | None = None,
        *,
        is_key: bool = False,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self._schema = Schema(schema, self._text_type) if isinstance(schema, str) else schema
        self._registry, self._is_key = registry, is_key
        own = SCHEMA_REGISTRY.parse(config or {}).user_set()
        self._settings = registry.settings.replaced(own)
        self._strategy = strategy_name(self._settings["subject.name.strategy"])
        self._writers: Cache[str, Writer] = Cache(self._settings["cache.capacity"])
        chooses = self._settings["use.latest.version"] or self._settings["use.schema.id"] is not None
        if self._settings["auto.register.schemas"] and chooses:
            raise ConfigError("use.latest.version and use.schema.id need auto.register.schemas=false")
        if self._settings["use.latest.version"] and self._settings["use.schema.id"] is not None:
            raise ConfigError("use.latest.version and use.schema.id exclude each other")
        if schema is None and not chooses:
            raise ConfigError("a serializer without a schema needs use.latest.version=true or use.schema.id")

    def serialize(self, topic: str, data: Any) -> bytes:
        """Return data in the wire format. The first call for a topic asks the registry for the schema's id.

        Raises SchemaRegistryError, and SchemaDataError for data that does not fit the schema.
        """
        writer = self._writers.get(topic)
        if writer is None:
            key, about = (self, topic), self._about(topic)
            writer = self._registry.lookups.wait(key, lambda: self._writer(topic), about)
        try:
            return writer.header + writer.encode(data)
        except OncelogError:
            raise
        except Exception as error:
            raise SchemaDataError(
                f"the data does not fit schema id {writer.schema_id} of subject {writer.subject!r}: "
                f"{type(error).__name__}: {text_of(error)}",
                subject=writer.subject,
                schema_id=writer.schema_id,
            ) from error

    def is_ready(self, topic: str, data: Any = None) -> bool:
        """Return True if `serialize` would not ask the registry."""
        return self._writers.get(topic) is not None

    async def prepare(self, topic: str, data: Any = None) -> None:
        """Ask the registry for the schema and the id that `serialize` needs, without blocking the event loop.

        Raises SchemaRegistryError and SchemaDataError.
        """
        key, about = (self, topic), self._about(topic)
        await self._registry.lookups.wait_async(key, lambda: self._writer(topic), about)

    def _about(self, topic: str) -> About:
        subject = None
        if self._schema is not None or self._strategy == "TopicNameStrategy":
            subject = self._subject(topic, self._schema)
        url = self._registry.url
        name = f"topic {topic!r}" if subject is None else f"subject {subject!r}"
        return About(f"the schema of {name} at {url}", url, subject)

    def _writer(self, topic: str) -> Writer:
        subject, schema_id, schema = self._resolve(topic)
        writer = self._make_writer(subject, schema_id, schema)
        self._writers.put(topic, writer)
        return writer

    def _resolve(self, topic: str) -> tuple[str, int, Schema]:
        """Return subject, id and schema for a topic, as the settings require."""
        registry, settings, own = self._registry, self._settings, self._schema
        if (chosen := settings["use.schema.id"]) is not None:
            schema = registry.get_schema(chosen)
            return self._subject(topic, schema), chosen, schema
        subject = self._subject(topic, own)
        if settings["use.latest.version"]:
            latest = registry.get_latest_version(subject)
            return subject, latest.id, latest.schema
        assert own is not None
        schema = self._with_references(own)
        if settings["auto.register.schemas"]:
            return subject, registry.register_schema(subject, schema), schema
        return subject, registry.lookup_schema(subject, schema).id, schema

    def _subject(self, topic: str, schema: Schema | None) -> str:
        name = None if schema is None else self._record_name(schema)
        return subject_name(self._strategy, topic, self._is_key, name)

    def _make_writer(self, subject: str, schema_id: int, schema: Schema) -> Writer:
        return Writer(encode_header(schema_id), self._encoder(schema), subject, schema_id)

    def _with_references(self, schema: Schema) -> Schema:
        """Return the schema with its references. Protobuf registers them first."""
        return schema

    @abstractmethod
    def _record_name(self, schema: Schema) -> str | None:
        """Return the name for RecordNameStrategy, or None. Raises SchemaDataError for an invalid schema."""

    @abstractmethod
    def _encoder(self, schema: Schema) -> Encode:
        """Return the function that writes data of a schema. Raises SchemaDataError for an invalid schema."""


class SchemaDeserializer(ABC):
    """The base class of the deserializers. `config` overrides settings of `registry`."""

    def __init__(self, registry: SchemaRegistryClient, *, config: Mapping[str, object] | None = None) -> None:
        self._registry = registry
        own = SCHEMA_REGISTRY.parse(config or {}).user_set()
        self._settings = registry.settings.replaced(own)
        self._decoders: Cache[int, Decode] = Cache(self._settings["cache.capacity"])

    def deserialize(self, topic: str, data: bytes) -> Any:
        """Return the data. The first call for a schema id asks the registry for the schema.

        Raises SchemaRegistryError, and SchemaDataError for bytes that are not in the wire format or do not
        fit the schema.
        """
        schema_id = decode_schema_id(data)
        decode = self._decoders.get(schema_id)
        if decode is None:
            key, about = (self, schema_id), self._about(schema_id)
            decode = self._registry.lookups.wait(key, lambda: self._prepared(schema_id), about)
        try:
            return decode(data)
        except OncelogError:
            raise
        except Exception as error:
            raise SchemaDataError(
                f"the data does not fit schema id {schema_id}: {type(error).__name__}: {text_of(error)}",
                schema_id=schema_id,
            ) from error

    def is_ready(self, topic: str, data: bytes) -> bool:
        """Return True if `deserialize` would not ask the registry."""
        try:
            return self._decoders.get(decode_schema_id(data)) is not None
        except SchemaDataError:
            return True  # `deserialize` raises the error

    async def prepare(self, topic: str, data: bytes) -> None:
        """Ask the registry for the schema of the data, without blocking the event loop.

        Raises SchemaRegistryError and SchemaDataError.
        """
        schema_id = decode_schema_id(data)
        key, about = (self, schema_id), self._about(schema_id)
        await self._registry.lookups.wait_async(key, lambda: self._prepared(schema_id), about)

    def _about(self, schema_id: int) -> About:
        url = self._registry.url
        return About(f"schema id {schema_id} at {url}", url, schema_id=schema_id)

    def _prepared(self, schema_id: int) -> Decode:
        decode = self._decoder(schema_id)
        self._decoders.put(schema_id, decode)
        return decode

    @abstractmethod
    def _decoder(self, schema_id: int) -> Decode:
        """Return the function that reads data of a schema id. Runs in a thread, and may ask the registry."""


def require_type(schema: Schema, expected: str, schema_id: int) -> Schema:
    """Return the schema. Raises SchemaDataError if it has another type."""
    if schema.type != expected:
        raise SchemaDataError(
            f"schema id {schema_id} is a schema of type {schema.type}, not {expected}", schema_id=schema_id
        )
    return schema
