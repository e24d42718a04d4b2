"""Converts whole Arrow columns to JSON text and to record keys."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

NUMBER = r"\A-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?\z"
"""A pattern for JSON numbers. Text that matches is written unchanged, with all its digits."""
BOOLEAN = r"\A(true|false)\z"

_TO_ESCAPE = r'["\\\x00-\x1f]'
_NULL = "null"

ToJson = Callable[[Any], Any]
"""A function that converts a column to JSON text. Null stays null."""


def json_rows(columns: Mapping[str, Any], to_json: Mapping[str, ToJson]) -> Any:
    """Return a JSON object per row, as a binary array. The members are in the order of `columns`."""
    if not columns:
        raise ValueError("there are no columns")
    parts: list[Any] = []
    for number, (name, column) in enumerate(columns.items()):
        parts.append(pa.scalar(f"{',' if number else '{'}{json.dumps(name)}:", pa.string()))
        parts.append(pc.fill_null(to_json[name](column), _NULL))
    joined = pc.binary_join_element_wise(*parts, pa.scalar("}", pa.string()), pa.scalar("", pa.string()))
    return joined.cast(pa.binary())


def quoted(column: Any) -> Any:
    """Return a text column as JSON strings."""
    if pc.any(pc.match_substring_regex(column, _TO_ESCAPE)).as_py():
        column = _escaped(column)
    quote = pa.scalar('"', pa.string())
    return pc.binary_join_element_wise(quote, column, quote, pa.scalar("", pa.string()))


def _escaped(column: Any) -> Any:
    for character in ("\\", '"', *map(chr, range(32))):
        if pc.any(pc.match_substring(column, character)).as_py():
            column = pc.replace_substring(column, character, json.dumps(character)[1:-1])
    return column


# Text columns of a CSV file.


def kind_of_text(column: Any, nulls: Sequence[str]) -> str:
    """Return the kind of a text column: number, boolean or text. Empty values and `nulls` are ignored."""
    values = column.filter(pc.invert(is_null_text(column, ("", *nulls))))
    for kind, pattern in (("number", NUMBER), ("boolean", BOOLEAN)):
        if len(values) and pc.all(pc.match_substring_regex(values, pattern)).as_py():
            return kind
    return "text"


def is_null_text(column: Any, nulls: Sequence[str]) -> Any:
    """Return a boolean column: True for the values that mean null."""
    return pc.is_in(column, pa.array(list(nulls), pa.string()))


def text_to_json(column: Any, kind: str) -> Any:
    """Return the values of a text column as JSON of `kind`. Null stays null.

    Raises ValueError if a value does not fit the kind.
    """
    if kind == "text":
        return quoted(column)
    misfits = pc.invert(pc.match_substring_regex(column, NUMBER if kind == "number" else BOOLEAN))
    if pc.any(misfits).as_py():
        example = column.filter(misfits)[0].as_py()
        raise ValueError(f"{example!r} is not a {kind}, as all earlier values were")
    return column


# Typed columns of a Parquet file.


def typed_to_json(column: Any) -> Any:
    """Return a column of any Arrow type as JSON: times in ISO 8601, binary in base64, NaN and infinities as
    null.

    Values inside lists, structs and maps are written in the same way as values of a column. A map becomes a
    list of pairs.

    Raises ValueError for invalid UTF-8 in a text column, and for a time whose year cannot be written.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return typed_to_json(column.cast(kind.value_type))
    if pa.types.is_floating(kind):
        column = column.cast(pa.float32()) if pa.types.is_float16(kind) else column
        column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
        return column.cast(pa.string())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.string())
    if pa.types.is_struct(kind):
        return _structs_to_json(column)
    if pa.types.is_map(kind):
        pairs = _pairs_of_map(column)
        return _lists_to_json(pairs, _pairs(*map(typed_to_json, pairs.flatten().flatten())))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists_to_json(column, typed_to_json(column.flatten()).to_pylist())
    text = _plain_text(column)
    if text is not None:
        return quoted(text)
    try:
        return pa.array([None if v is None else _dumps(v) for v in column.to_pylist()], pa.string())
    # OverflowError: Python's datetime ends with the year 9999.
    except OverflowError as error:
        raise ValueError(f"a value of type {kind} cannot be written: {error}") from None


def _structs_to_json(column: Any) -> Any:
    names = [field.name for field in column.type]
    if len(set(names)) < len(names):
        raise ValueError(f"two members of a struct have the same name: {', '.join(names)}")
    if not names:
        text = pa.array(["{}"] * len(column), pa.string())
    else:
        # Convert each member as a column: json.dumps of whole rows would lose digits of times and decimals.
        members = dict(zip(names, column.flatten(), strict=True))
        text = json_rows(members, dict.fromkeys(names, typed_to_json)).cast(pa.string())
    return pc.if_else(column.is_valid(), text, pa.scalar(None, pa.string()))


def _pairs_of_map(column: Any) -> Any:
    """Return a column of maps as a column of lists of structs, without a copy.

    Arrow's cast does the same, but aborts the process if a type within the values is null. Guard:
    test_maps_with_types_of_only_nulls_inside.
    """
    fields = [column.type.key_field, column.type.item_field]
    pairs = pa.StructArray.from_arrays([column.keys, column.items], fields=fields)
    validity, offsets = column.buffers()[:2]
    return pa.Array.from_buffers(
        pa.list_(pairs.type), len(column), [validity, offsets], offset=column.offset, children=[pairs]
    )


def _pairs(keys: Any, items: Any) -> list[str]:
    pairs = zip(keys.to_pylist(), items.to_pylist(), strict=True)
    return [f"[{key},{_NULL if item is None else item}]" for key, item in pairs]


def _lists_to_json(column: Any, elements: Sequence[str | None]) -> Any:
    """Return JSON lists made of consecutive `elements`. A null list has no elements."""
    texts: list[str | None] = []
    position = 0
    for length in pc.list_value_length(column).to_pylist():
        if length is None:
            texts.append(None)
            continue
        inside = (_NULL if text is None else text for text in elements[position : position + length])
        texts.append(f"[{','.join(inside)}]")
        position += length
    return pa.array(texts, pa.string())


def _plain_text(column: Any) -> Any | None:
    """Return a column of texts, timestamps, dates or times as text; None for a column of another type."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        # A Parquet file may contain any bytes as text. Arrow does not check them when it reads the file.
        column.validate(full=True)
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        if kind.tz is not None:
            column = column.cast(pa.timestamp(kind.unit, "UTC"))
        return pc.replace_substring(_checked(column.cast(pa.string())), " ", "T", max_replacements=1)
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return _checked(column.cast(pa.string()))
    return None


def _checked(times: Any) -> Any:
    """Return `times`. Raises ValueError if Arrow wrote an error text instead of a time."""
    is_remark = pc.starts_with(times, "<")
    if pc.any(is_remark).as_py():
        raise ValueError(f"a time cannot be written: {times.filter(is_remark)[0].as_py()}")
    return times


def _dumps(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Convert a value to one that json.dumps accepts."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def typed_key(column: Any) -> Any:
    """Return a column of any Arrow type as keys. Text and bytes stay unchanged.

    Any other value becomes its JSON, without quotes.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return typed_key(column.cast(kind.value_type))
    if kind in (pa.binary(), pa.large_binary(), pa.binary_view()) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    text = _plain_text(column)
    return (_unquoted(typed_to_json(column)) if text is None else text).cast(pa.binary())


def _unquoted(values: Any) -> Any:
    """Remove the quotes of JSON strings (a UUID, a duration). Other JSON stays unchanged."""
    if not pc.any(pc.starts_with(values, '"')).as_py():
        return values
    texts = [json.loads(v) if v is not None and v.startswith('"') else v for v in values.to_pylist()]
    return pa.array(texts, pa.string())
