"""Protobuf: a serializer for generated classes, and a deserializer that makes classes from schemas."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from oncelog.errors import ConfigError, MissingDependency, SchemaDataError, text_of
from oncelog.schema_registry.client import SchemaRegistryClient
from oncelog.schema_registry.references import referenced_schemas
from oncelog.schema_registry.schemas import Schema, SchemaReference
from oncelog.schema_registry.serde import (
    Decode,
    Encode,
    SchemaDeserializer,
    SchemaSerializer,
    Writer,
    require_type,
)
from oncelog.schema_registry.wire_format import decode_indexes, encode_header

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import Message
except ImportError as error:
    raise MissingDependency(f"{error.name} is missing: pip install 'oncelog[schema-registry]'") from None

BUILT_IN = ("google/protobuf/", "google/type/", "confluent/")
"""Imports with these prefixes are part of every Protobuf library, so schemas have no references for them."""
_WELL_KNOWN = (
    "any", "api", "descriptor", "duration", "empty", "field_mask", "source_context", "struct", "timestamp",
    "type", "wrappers",
)  # fmt: skip
_COMMON = (
    "calendar_period", "color", "date", "datetime", "dayofweek", "expr", "fraction", "interval", "latlng",
    "localized_text", "money", "month", "phone_number", "postal_address", "quaternion", "timeofday",
)  # fmt: skip


class ProtobufSerializer(SchemaSerializer):
    """A serializer that writes messages of a class: `value_serializer=ProtobufSerializer(registry, User)`.

    `message_class` is a class that protoc generated. With auto.register.schemas, the files that its file
    imports are registered first, each under its import path. For the other arguments see `SchemaSerializer`.
    """

    def __init__(
        self,
        registry: SchemaRegistryClient,
        message_class: type[Message],
        *,
        is_key: bool = False,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self._class = message_class
        descriptor: Any = getattr(message_class, "DESCRIPTOR", None)
        if descriptor is None:
            raise ConfigError(f"expected a class that protoc generated, not {message_class!r}")
        self._descriptor, self._indexes = descriptor, message_indexes(descriptor)
        schema = Schema(file_text(descriptor.file), "PROTOBUF")
        super().__init__(registry, schema, is_key=is_key, config=config)

    def _record_name(self, schema: Schema) -> str | None:
        return str(self._descriptor.full_name)

    def _with_references(self, schema: Schema) -> Schema:
        return replace(schema, references=self._references(self._descriptor.file))

    def _references(self, file: Any) -> tuple[SchemaReference, ...]:
        """Register the files that `file` imports, or look them up, and return references to them."""
        references = []
        for imported in file.dependencies:
            if imported.name.startswith(BUILT_IN):
                continue
            schema = Schema(file_text(imported), "PROTOBUF", self._references(imported))
            if self._settings["auto.register.schemas"]:
                self._registry.register_schema(imported.name, schema)
            version = self._registry.lookup_schema(imported.name, schema).version
            references.append(SchemaReference(imported.name, imported.name, version))
        return tuple(references)

    def _make_writer(self, subject: str, schema_id: int, schema: Schema) -> Writer:
        require_type(schema, "PROTOBUF", schema_id)
        return Writer(encode_header(schema_id, self._indexes), self._encoder(schema), subject, schema_id)

    def _encoder(self, schema: Schema) -> Encode:
        return self._encode

    def _encode(self, message: Any) -> bytes:
        if not isinstance(message, self._class):
            raise TypeError(f"expected {self._class.__name__}, not {type(message).__name__}")
        data: bytes = message.SerializeToString()
        return data


class ProtobufDeserializer(SchemaDeserializer):
    """A deserializer that reads messages: `value_deserializer=ProtobufDeserializer(registry, User)`.

    `message_class` is a class that protoc generated; then the registry is not asked. If it is None, classes
    are made from the schemas with which the messages were written. `config` overrides settings of
    `registry`.
    """

    def __init__(
        self,
        registry: SchemaRegistryClient,
        message_class: type[Message] | None = None,
        *,
        config: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(registry, config=config)
        self._class = message_class

    def is_ready(self, topic: str, data: bytes) -> bool:
        """Return True if `deserialize` would not ask the registry."""
        return self._class is not None or super().is_ready(topic, data)

    def _decoder(self, schema_id: int) -> Decode:
        if self._class is None:
            return protobuf_decoder(self._registry, schema_id)
        message_class = self._class

        def decode(data: bytes) -> Any:
            _, position = decode_indexes(data)
            return message_class.FromString(bytes(data[position:]))

        return decode


def protobuf_decoder(registry: SchemaRegistryClient, schema_id: int) -> Decode:
    """Return a function that reads messages of an id. Raises SchemaDataError and SchemaRegistryError."""
    schema = require_type(registry.get_schema(schema_id), "PROTOBUF", schema_id)
    file = _load_file(registry, schema, schema_id)
    classes: dict[tuple[int, ...], Any] = {}

    def decode(data: bytes) -> Any:
        indexes, position = decode_indexes(data)
        message_class = classes.get(indexes)
        if message_class is None:
            descriptor = _message_at(file, indexes, schema_id)
            # The file has a bounded number of messages, so this dict is bounded too.
            message_class = classes[indexes] = message_factory.GetMessageClass(descriptor)
        return message_class.FromString(bytes(data[position:]))

    return decode


def protobuf_class(registry: SchemaRegistryClient, schema: Schema, schema_id: int | None) -> Any:
    """Return the class of the first message in a schema. Raises SchemaDataError and SchemaRegistryError."""
    file = _load_file(registry, schema, schema_id)
    return message_factory.GetMessageClass(_message_at(file, (0,), schema_id))


def first_message_name(schema: Schema) -> str:
    """Return the full name of the first message in a schema. Raises SchemaDataError."""
    file = _file_proto("", schema.text, None)
    if not file.message_type:
        raise SchemaDataError("the schema has no message")
    return f"{file.package}.{file.message_type[0].name}" if file.package else str(file.message_type[0].name)


def message_indexes(descriptor: Any) -> list[int]:
    """Return the path to a message in its file."""
    indexes: list[int] = []
    while descriptor.containing_type is not None:
        siblings = descriptor.containing_type.nested_types
        indexes.insert(0, next(i for i, other in enumerate(siblings) if other.name == descriptor.name))
        descriptor = descriptor.containing_type
    names = list(descriptor.file.message_types_by_name)
    return [names.index(descriptor.name), *indexes]


def file_text(file: Any) -> str:
    """Return a file's descriptor in base 64, the form in which a registry takes a Protobuf schema."""
    return base64.b64encode(file.serialized_pb).decode()


def _message_at(file: Any, indexes: Sequence[int], schema_id: int | None) -> Any:
    messages = list(file.message_types_by_name.values())
    descriptor = None
    for index in indexes:
        if index >= len(messages):
            raise SchemaDataError(
                f"{_which(schema_id)} has no message with the indexes {list(indexes)}", schema_id=schema_id
            )
        descriptor = messages[index]
        messages = list(descriptor.nested_types)
    return descriptor


def _load_file(registry: SchemaRegistryClient, schema: Schema, schema_id: int | None) -> Any:
    """Return the descriptor of a schema's file, in a pool of its own with all that the file imports."""
    pool = descriptor_pool.DescriptorPool()
    files = [
        _file_proto(name, referenced.text, schema_id)
        for name, referenced in referenced_schemas(registry, schema).items()
    ]
    root = _file_proto(f"schema-{schema_id or 0}.proto", schema.text, schema_id)
    try:
        for file in (*files, root):
            _add_built_in(pool, file.dependency)
            pool.Add(file)
        return pool.FindFileByName(root.name)
    except Exception as error:
        raise SchemaDataError(
            f"{_which(schema_id)} cannot be used: {type(error).__name__}: {text_of(error)}",
            schema_id=schema_id,
        ) from error


def _file_proto(name: str, text: str, schema_id: int | None) -> Any:
    file = descriptor_pb2.FileDescriptorProto()
    try:
        file.ParseFromString(base64.b64decode(text, validate=True))
    # protobuf raises DecodeError, and base64 binascii.Error, or ValueError for text that is not ASCII.
    except Exception as error:
        raise SchemaDataError(
            f"{_which(schema_id)}: the registry did not return a Protobuf descriptor in base 64, although "
            f"format=serialized was requested: {type(error).__name__}: {text_of(error)}",
            schema_id=schema_id,
        ) from error
    file.name = name
    return file


def _add_built_in(pool: Any, imports: Sequence[str]) -> None:
    """Add the imported files that are part of every Protobuf library, with their own imports."""
    for name in imports:
        if not name.startswith(BUILT_IN) or _has_file(pool, name):
            continue
        _import_built_in()
        file = descriptor_pb2.FileDescriptorProto()
        descriptor_pool.Default().FindFileByName(name).CopyToProto(file)
        _add_built_in(pool, file.dependency)
        pool.Add(file)


def _has_file(pool: Any, name: str) -> bool:
    try:
        pool.FindFileByName(name)
    except KeyError:
        return False
    return True


def _import_built_in() -> None:
    """Import the modules of the built-in files, which enters them into the default pool.

    google.type is in googleapis-common-protos, which may be missing.
    """
    for name in _WELL_KNOWN:
        importlib.import_module(f"google.protobuf.{name}_pb2")
    with suppress(ImportError):
        for name in _COMMON:
            importlib.import_module(f"google.type.{name}_pb2")


def _which(schema_id: int | None) -> str:
    return "the schema" if schema_id is None else f"schema id {schema_id}"
