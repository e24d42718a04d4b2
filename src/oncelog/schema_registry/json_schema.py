"""JSON Schema: a serializer and a deserializer over jsonschema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from oncelog.errors import MissingDependency, SchemaDataError, text_of
from oncelog.schema_registry.client import SchemaRegistryClient
from oncelog.schema_registry.references import referenced_schemas
from oncelog.schema_registry.schemas import Schema
from oncelog.schema_registry.serde import Decode, Encode, SchemaDeserializer, SchemaSerializer, require_type
from oncelog.schema_registry.wire_format import HEADER_BYTES

try:
    from jsonschema import Draft7Validator
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.jsonschema import DRAFT7

    from oncelog.schema_registry.bounded_validator import check_schema, checker
except ImportError as error:
    raise MissingDependency(f"{error.name} is missing: pip install 'oncelog[schema-registry]'") from None

Check = Callable[[Any, int], None]
"""(value, size of its JSON text in bytes) -> None. Raises an exception if the value does not fit its schema.
"""


class JsonSerializer(SchemaSerializer):
    """A serializer that writes JSON: `value_serializer=JsonSerializer(registry, schema)`.

    `schema` is a JSON Schema as text, a Schema with references, or None with use.latest.version or
    use.schema.id. Each value is checked, unless json.fail.invalid.schema is false. For the other arguments
    see `SchemaSerializer`.
    """

    _text_type = "JSON"

    def _record_name(self, schema: Schema) -> str | None:
        return json_title(schema)

    def _encoder(self, schema: Schema) -> Encode:
        checks = self._settings["json.fail.invalid.schema"]
        return json_encoder(self._registry, schema, is_checked=checks)


class JsonDeserializer(SchemaDeserializer):
    """A deserializer that reads JSON: `value_deserializer=JsonDeserializer(registry)`.

    Each value is checked against the schema that it was written with, unless json.fail.invalid.schema is
    false. `config` overrides settings of `registry`.
    """

    def _decoder(self, schema_id: int) -> Decode:
        checks = self._settings["json.fail.invalid.schema"]
        return json_decoder(self._registry, schema_id, is_checked=checks)


def json_title(schema: Schema) -> str | None:
    """Return the title of a schema, or None. Raises SchemaDataError."""
    declared = _declared(schema)
    title = declared.get("title") if isinstance(declared, dict) else None
    return title if isinstance(title, str) else None


def json_encoder(registry: SchemaRegistryClient, schema: Schema, *, is_checked: bool) -> Encode:
    """Return a function that writes values of a schema. Raises SchemaDataError and SchemaRegistryError."""
    check = _check_of(registry, schema) if is_checked else None

    def encode(value: Any) -> bytes:
        data = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()
        if check is not None:
            check(value, len(data))
        return data

    return encode


def json_decoder(registry: SchemaRegistryClient, schema_id: int, *, is_checked: bool) -> Decode:
    """Return a function that reads values of a schema id. Raises SchemaDataError and SchemaRegistryError."""
    schema = require_type(registry.get_schema(schema_id), "JSON", schema_id)
    check = _check_of(registry, schema, schema_id) if is_checked else None

    def decode(data: bytes) -> Any:
        value = json.loads(bytes(data[HEADER_BYTES:]))
        if check is not None:
            check(value, len(data))
        return value

    return decode


def _check_of(registry: SchemaRegistryClient, schema: Schema, schema_id: int | None = None) -> Check:
    declared = _declared(schema, schema_id)
    # The package jsonschema resolves references with this registry. It has only the meta-schemas and the
    # schema's references, so nothing is loaded from the addresses in a schema.
    known = REGISTRY
    for name, referenced in referenced_schemas(registry, schema).items():
        contents = _declared(referenced, schema_id)
        known = known.with_resource(name, Resource.from_contents(contents, default_specification=DRAFT7))
    kind = validator_for(declared, default=Draft7Validator)
    try:
        check_schema(kind, declared)
    except Exception as error:
        raise _invalid(schema_id, error) from error
    return checker(kind, declared, known)


def _declared(schema: Schema, schema_id: int | None = None) -> Any:
    try:
        declared = json.loads(schema.text)
    except (ValueError, RecursionError) as error:
        raise _invalid(schema_id, error) from error
    if not isinstance(declared, (dict, bool)):
        raise _invalid(schema_id, TypeError("expected an object or a boolean"))
    return declared


def _invalid(schema_id: int | None, error: Exception) -> SchemaDataError:
    which = "the schema" if schema_id is None else f"schema id {schema_id}"
    text = getattr(error, "message", None) or text_of(error)
    return SchemaDataError(
        f"{which} is not a JSON Schema: {type(error).__name__}: {text}", schema_id=schema_id
    )
