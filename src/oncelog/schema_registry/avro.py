"""Avro: a serializer and a deserializer over fastavro."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from oncelog.errors import MissingDependency, SchemaDataError, text_of
from oncelog.schema_registry.client import SchemaRegistryClient
from oncelog.schema_registry.references import referenced_schemas
from oncelog.schema_registry.schemas import Schema
from oncelog.schema_registry.serde import Decode, Encode, SchemaDeserializer, SchemaSerializer, require_type
from oncelog.schema_registry.wire_format import HEADER_BYTES

try:
    from fastavro import schemaless_reader, schemaless_writer
    from fastavro._read_py import schemaless_reader as python_reader
    from fastavro.read import LOGICAL_READERS
    from fastavro.repository import AbstractSchemaRepository, SchemaRepositoryError
    from fastavro.schema import load_schema
except ImportError as error:
    raise MissingDependency(f"{error.name} is missing: pip install 'oncelog[schema-registry]'") from None

_ROOT = "$root"
MAX_DECIMAL_BYTES = 1_000
"""The maximum size of a decimal, about 2,400 digits. The conversion time grows with the size squared."""
MAX_FREE_PARTS = 10_000
"""The maximum number of parts (nulls, empty records) of a value that takes no bytes."""
_BOUNDED = "oncelog-bounded-decimal"
"""The logical type that replaces "decimal" in the schemas of decoders, see `with_bounded_decimals`."""


class AvroSerializer(SchemaSerializer):
    """A serializer that writes Avro: `value_serializer=AvroSerializer(registry, schema)`.

    `schema` is Avro's JSON text, a Schema with references, or None with use.latest.version or use.schema.id.
    Data has fastavro's types: a dict for a record. For the other arguments see `SchemaSerializer`.
    """

    def _record_name(self, schema: Schema) -> str | None:
        return avro_record_name(schema)

    def _encoder(self, schema: Schema) -> Encode:
        return avro_encoder(self._registry, schema)


class AvroDeserializer(SchemaDeserializer):
    """A deserializer that reads Avro: `value_deserializer=AvroDeserializer(registry)`.

    `schema` is the reader's schema. Avro's schema resolution converts the data to it. If it is None, data has
    the form in which it was written. `config` overrides settings of `registry`.
    """

    def __init__(
        self,
        registry: SchemaRegistryClient,
        schema: str | Schema | None = None,
        *,
        config: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(registry, config=config)
        self._reader = Schema(schema) if isinstance(schema, str) else schema

    def _decoder(self, schema_id: int) -> Decode:
        return avro_decoder(self._registry, schema_id, self._reader)


def avro_record_name(schema: Schema) -> str | None:
    """Return the full name of a record, the name of a primitive type, or None. Raises SchemaDataError."""
    declared = _json(schema)
    if isinstance(declared, str):
        return declared
    if not isinstance(declared, dict):
        return None
    name, namespace = declared.get("name"), declared.get("namespace")
    if name is None:
        kind = declared.get("type")
        return kind if isinstance(kind, str) else None
    return f"{namespace}.{name}" if namespace and "." not in name else str(name)


def avro_encoder(registry: SchemaRegistryClient, schema: Schema) -> Encode:
    """Return a function that writes data of a schema. Raises SchemaDataError and SchemaRegistryError."""
    parsed = parse_avro(registry, schema)
    if _is_bytes(parsed):
        # Confluent's serializers write the schema "bytes" without Avro's length.
        return _checked_bytes

    def encode(data: Any) -> bytes:
        buffer = io.BytesIO()
        schemaless_writer(buffer, parsed, data)
        return buffer.getvalue()

    return encode


def avro_decoder(registry: SchemaRegistryClient, schema_id: int, reader: Schema | None = None) -> Decode:
    """Return a function that reads data of a schema id. Raises SchemaDataError and SchemaRegistryError."""
    schema = require_type(registry.get_schema(schema_id), "AVRO", schema_id)
    written = parse_avro(registry, schema, schema_id)
    read = None if reader is None else parse_avro(registry, reader)
    if _is_bytes(written):
        return lambda data: bytes(data[HEADER_BYTES:])
    if has_endless_arrays(written):
        raise SchemaDataError(
            f"schema id {schema_id} has an array whose items take no bytes, or more than {MAX_FREE_PARTS} "
            "parts that take none: a few bytes of data could stand for any number of items, so the data is "
            "not deserialized",
            schema_id=schema_id,
        )
    bounded = with_bounded_decimals(written)
    # fastavro's compiled reader has no limit of depth. With a recursive schema, some kilobytes of data would
    # overflow the stack and end the process. The reader in Python raises RecursionError instead. Guard:
    # test_avro_data_that_is_nested_too_deeply_is_refused.
    reads = python_reader if is_recursive(written) else schemaless_reader

    def decode(data: bytes) -> Any:
        return reads(io.BytesIO(data[HEADER_BYTES:]), bounded, read)

    return decode


def parse_avro(registry: SchemaRegistryClient, schema: Schema, schema_id: int | None = None) -> Any:
    """Return fastavro's form of a schema, with the schemas that it refers to.

    Raises SchemaDataError for a schema that is not Avro, and SchemaRegistryError.
    """
    declared: dict[str, Any] = {_ROOT: _json(schema, schema_id)}
    for name, referenced in referenced_schemas(registry, schema).items():
        declared[name] = _json(referenced, schema_id)
    try:
        return load_schema(_ROOT, repo=_Repository(declared))
    except Exception as error:
        raise _invalid(schema_id, error) from error


def has_endless_arrays(parsed: Any) -> bool:
    """Return True if a few bytes of data of a schema could become any number of Python objects.

    This is the case for an array whose items take no bytes, such as nulls. It is also the case for nested
    records without bytes: the number of their parts may double with each level. `parsed` is a schema in
    fastavro's form.
    """
    nested = list(_nested(parsed))
    named = {part["name"]: part for part in nested if isinstance(part, dict) and "name" in part}
    known: dict[str, int | None] = {}
    return any(
        isinstance(part, dict)
        and (
            (part.get("type") == "array" and _free_parts(part["items"], named, known) is not None)
            or (_free_parts(part, named, known) or 0) > MAX_FREE_PARTS
        )
        for part in nested
    )


def is_recursive(parsed: Any) -> bool:
    """Return True if a type of a schema in fastavro's form contains itself, directly or through others."""
    # A name stands for a type that is defined before it, so each cycle has a name within its own definition.
    return any(
        isinstance(part, dict) and "name" in part and part["name"] in _nested(part)
        for part in _nested(parsed)
    )


def with_bounded_decimals(parsed: Any) -> Any:
    """Return a copy of a schema in fastavro's form that refuses decimals above MAX_DECIMAL_BYTES.

    A decimal of a megabyte would take minutes. Guard: test_a_decimal_above_the_limit_is_refused.
    """
    copied = deepcopy(parsed)
    named = copied.get("__named_schemas", {}) if isinstance(copied, dict) else {}
    for part in _nested([copied, *named.values()]):
        if isinstance(part, dict) and part.get("logicalType") == "decimal":
            part["logicalType"] = _BOUNDED
    return copied


def _bounded_decimal(data: bytes, writer: Any = None, reader: Any = None) -> Any:
    if len(data) > MAX_DECIMAL_BYTES:
        raise ValueError(f"a decimal of {len(data)} bytes: at most {MAX_DECIMAL_BYTES} are read")
    return LOGICAL_READERS["bytes-decimal"](data, writer, reader)


LOGICAL_READERS[f"bytes-{_BOUNDED}"] = LOGICAL_READERS[f"fixed-{_BOUNDED}"] = _bounded_decimal


def _nested(schema: Any) -> Iterator[Any]:
    """Yield a schema and all schemas in it."""
    yield schema
    if isinstance(schema, list):
        inner = schema
    elif isinstance(schema, dict):
        inner = [schema[key] for key in ("items", "values") if key in schema]
        inner += [field["type"] for field in schema.get("fields", ())]
        inner += [schema["type"]] if isinstance(schema.get("type"), dict | list) else []
    else:
        inner = []
    for part in inner:
        yield from _nested(part)


def _free_parts(schema: Any, named: Mapping[str, Any], known: dict[str, int | None]) -> int | None:
    """Return the number of parts of the schema's values if they take no bytes; None if they take some.

    `known` keeps the results for named types.
    """
    if isinstance(schema, str) and schema in named:
        schema = named[schema]
    if not isinstance(schema, dict):
        return 1 if schema == "null" else None
    kind, name = schema["type"], schema.get("name")
    if name in known:
        return known[name]
    if name is not None:
        known[name] = None  # a record can contain itself only in a type that takes bytes, such as a union
    parts: int | None
    if kind in ("record", "error"):
        inner = [_free_parts(field["type"], named, known) for field in schema["fields"]]
        parts = None if None in inner else 1 + sum(filter(None, inner))
    elif kind == "fixed":
        parts = None if schema["size"] else 1
    else:
        parts = _free_parts(kind, named, known)
    if name is not None:
        known[name] = parts
    return parts


class _Repository(AbstractSchemaRepository):  # type: ignore[misc]
    """The declared schemas by name. fastavro loads each schema that another one names but does not define."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self._declared = declared

    def load(self, name: str) -> Any:
        if name not in self._declared:
            raise SchemaRepositoryError(f"no schema is named {name}")
        # Return a copy, because fastavro changes the schema that it loads.
        return deepcopy(self._declared[name])


def _json(schema: Schema, schema_id: int | None = None) -> Any:
    try:
        return json.loads(schema.text)
    except (ValueError, RecursionError) as error:
        # Parsers of Avro also accept the name of a primitive type without quotation marks.
        if schema.text.strip() in ("null", "boolean", "int", "long", "float", "double", "bytes", "string"):
            return schema.text.strip()
        raise _invalid(schema_id, error) from error


def _is_bytes(parsed: Any) -> bool:
    kind = parsed.get("type") if isinstance(parsed, dict) else parsed
    return kind == "bytes" and not (isinstance(parsed, dict) and "logicalType" in parsed)


def _checked_bytes(data: Any) -> bytes:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"expected bytes, not {type(data).__name__}")
    return bytes(data)


def _invalid(schema_id: int | None, error: Exception) -> SchemaDataError:
    which = "the schema" if schema_id is None else f"schema id {schema_id}"
    return SchemaDataError(
        f"{which} is not an Avro schema: {type(error).__name__}: {text_of(error)}", schema_id=schema_id
    )
