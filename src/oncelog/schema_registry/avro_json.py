"""Converts JSON values to the Python types that fastavro writes. No I/O.

A union's value may have two forms: plain (`"x"`), or with the branch's name as in Avro's JSON encoding
(`{"string": "x"}`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

_OF_TEXT: Mapping[str, Callable[[str], Any]] = {
    "date": date.fromisoformat,
    "decimal": Decimal,
    "time-millis": time.fromisoformat,
    "time-micros": time.fromisoformat,
    "timestamp-millis": datetime.fromisoformat,
    "timestamp-micros": datetime.fromisoformat,
    "local-timestamp-millis": datetime.fromisoformat,
    "local-timestamp-micros": datetime.fromisoformat,
}
"""The parsers of the text of logical types. Numbers and other values stay as they are."""
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),), "boolean": (bool,), "int": (int,), "long": (int,), "float": (int, float),
    "double": (int, float), "string": (str,), "bytes": (str,), "enum": (str,), "fixed": (str,),
    "array": (list,), "map": (dict,), "record": (dict,),
}  # fmt: skip


def avro_value(schema: Any, value: Any, named: dict[str, Any]) -> Any:
    """Return a JSON value in the types that fastavro writes for a parsed schema.

    Pass an empty dict as `named`: the function collects the schema's named types in it. Values that do not
    fit the schema stay as they are, so that fastavro names them in its error. Raises ValueError for text that
    is no value of its logical type.
    """
    if isinstance(schema, str):
        schema = named.get(schema, schema)
    if isinstance(schema, list):
        return _union_value(schema, value, named)
    kind = schema if isinstance(schema, str) else schema["type"]
    if not isinstance(schema, str) and "name" in schema:
        named[schema["name"]] = schema
    if isinstance(schema, str) or not isinstance(value, (str, list, dict)):
        return _bytes_of(value) if kind == "bytes" else value
    if isinstance(value, str):
        if (parse := _OF_TEXT.get(schema.get("logicalType", ""))) is not None:
            return parse(value)
        return _bytes_of(value) if kind in ("bytes", "fixed") else value
    if kind == "array" and isinstance(value, list):
        return [avro_value(schema["items"], item, named) for item in value]
    if kind == "map" and isinstance(value, dict):
        return {key: avro_value(schema["values"], item, named) for key, item in value.items()}
    if kind == "record" and isinstance(value, dict):
        types = {field["name"]: field["type"] for field in schema["fields"]}
        return {
            name: avro_value(types[name], item, named) if name in types else item
            for name, item in value.items()
        }
    return value


def _union_value(branches: list[Any], value: Any, named: dict[str, Any]) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        name, inner = next(iter(value.items()))
        for branch in branches:
            if _branch_name(branch, named) == name:
                converted = avro_value(branch, inner, named)
                # fastavro's notation of a chosen branch: (name of the record or primitive type, value).
                return (name, converted)
    for branch in branches:
        resolved = named.get(branch, branch) if isinstance(branch, str) else branch
        kind = resolved if isinstance(resolved, str) else resolved["type"]
        expected = _PYTHON_TYPES.get(kind, ())
        if isinstance(value, expected) and (bool in expected or not isinstance(value, bool)):
            if kind == "record" and isinstance(value, dict) and not _has_fields(resolved, value):
                continue
            return avro_value(branch, value, named)
    return value


def _branch_name(branch: Any, named: Mapping[str, Any]) -> str:
    resolved = named.get(branch, branch) if isinstance(branch, str) else branch
    if isinstance(resolved, str):
        return resolved
    return str(resolved.get("name", resolved["type"]))


def _has_fields(record: Any, value: dict[str, Any]) -> bool:
    """Return True if a value has every field of a record without a default, and no unknown field."""
    names = {field["name"] for field in record["fields"]}
    required = {field["name"] for field in record["fields"] if "default" not in field}
    return required <= value.keys() <= names


def _bytes_of(value: Any) -> Any:
    return value.encode("iso-8859-1") if isinstance(value, str) else value
