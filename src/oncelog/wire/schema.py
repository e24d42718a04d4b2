"""Parses the table language, which has one row per field.

`oncelog.wire.compiler` makes codecs from the tables.

    api NAME KEY versions A-B offer C-D flexible V
    request
      FIELD TYPE [@VERSIONS] [#TAG] [=DEFAULT]
        FIELD ...                (indented: the fields of the struct named in TYPE)
    response
      ...
    data NAME versions A-B flexible V
      FIELD ...

`data` is the key or value of a stored record, without the version in front. `versions`: the versions that the
codec supports. `offer`: the versions that the broker advertises. `flexible`: the first version with compact
encodings and tag blocks.

TYPE is bool, int8, int16, uint16, int32, int64, float64, string, uuid, bytes, records (bytes that are not
copied) or the name of a struct. `[]` before a type makes an array of it. `?` after a type allows null in
every version of the field, `?10+` from version 10.

`@` limits the versions of a field: `@5+`, `@0-12`. Without `@`, the field is in all versions of its parent.
`#` makes a tagged field, which is omitted if it has its default.

DEFAULT is a number, true or null. Without DEFAULT, the value is 0, false, "", 16 zero bytes or an empty
list. Records, and a struct outside an array, are None by default. On the wire, None is null, or an absent
field if the field is tagged.

Structs with the same name are one class, so they must have the same fields. Names, types and versions are the
Kafka protocol's.

Source: apache/kafka clients/src/main/resources/common/message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
"""Type of fixed size -> its format in Python's `struct` module."""

PRIMITIVES = {*FIXED, "string", "bytes", "records"}
NO_ID = bytes(16)
"""The UUID that means "none"."""

Default = int | float | str | bytes | bool | None


class Field(NamedTuple):
    """One field.

    `first` to `last` are the versions that have it. `null_from`: first version that allows null; None: never.
    """

    name: str
    kind: str
    is_array: bool
    struct: Struct | None
    first: int
    last: int
    null_from: int | None
    tag: int | None
    default: Default

    def is_in(self, version: int) -> bool:
        return self.first <= version <= self.last

    def is_nullable(self, version: int) -> bool:
        return self.null_from is not None and version >= self.null_from

    @property
    def starts_as_list(self) -> bool:
        """True if the default is a new empty list."""
        return self.is_array and self.default is not None


class Struct(NamedTuple):
    """A message, or a struct inside a message, with its fields in wire order."""

    name: str
    fields: tuple[Field, ...]


class ApiTable(NamedTuple):
    """The table of one API: its key, version ranges, request and response."""

    name: str
    key: int
    first: int
    last: int
    offer_first: int
    offer_last: int
    flexible_from: int
    request: Struct
    response: Struct


class DataTable(NamedTuple):
    """The table of a stored key or value: its version range and its fields."""

    name: str
    first: int
    last: int
    flexible_from: int
    struct: Struct


class _Row(NamedTuple):
    depth: int
    words: list[str]


def parse_table(text: str) -> Iterator[ApiTable]:
    """Yield the APIs of a table text, in order."""
    for words, rows in _parts(text, "api"):
        yield _parse_api(words, rows)


def parse_data_table(text: str) -> Iterator[DataTable]:
    """Yield each `data` of a table text, in order."""
    for words, rows in _parts(text, "data"):
        _, name, _, versions, _, flexible = words
        first, last = _range(versions, 0, 0)
        yield DataTable(name, first, last, int(flexible), Struct(name, _parse_fields(rows, first, last)))


def _parts(text: str, kind: str) -> Iterator[tuple[list[str], list[_Row]]]:
    rows = [_Row((len(line) - len(line.lstrip())) // 2, line.split()) for line in text.splitlines() if line]
    starts = [i for i, row in enumerate(rows) if row.words[0] == kind and not row.depth]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield rows[start].words, rows[start + 1 : stop]


def _parse_api(words: list[str], rows: list[_Row]) -> ApiTable:
    _, name, key, _, versions, _, offer, _, flexible = words
    first, last = _range(versions, 0, 0)
    split = next(i for i, row in enumerate(rows) if row.words == ["response"])
    request = Struct(f"{name}Request", _parse_fields(rows[1:split], first, last))
    response = Struct(f"{name}Response", _parse_fields(rows[split + 1 :], first, last))
    return ApiTable(name, int(key), first, last, *_range(offer, 0, 0), int(flexible), request, response)


def _parse_fields(rows: list[_Row], first: int, last: int) -> tuple[Field, ...]:
    if not rows:
        return ()
    depth = rows[0].depth
    starts = [i for i, row in enumerate(rows) if row.depth == depth]
    return tuple(
        _parse_field(rows[start].words, rows[start + 1 : stop], first, last)
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)
    )


def _parse_field(words: list[str], inner: list[_Row], first: int, last: int) -> Field:
    name, kind, *options = words
    kind, mark, null_versions = kind.partition("?")
    marks = {option[0]: option[1:] for option in options}
    first, last = _range(marks["@"], first, last) if "@" in marks else (first, last)
    null_from = _range(null_versions or f"{first}+", first, last)[0] if mark else None
    element = kind.removeprefix("[]")
    return Field(
        name=name,
        kind=element,
        is_array=element != kind,
        struct=None if element in PRIMITIVES else Struct(element, _parse_fields(inner, first, last)),
        first=first,
        last=last,
        null_from=null_from,
        tag=int(marks["#"]) if "#" in marks else None,
        default=_default(kind, marks.get("=")),
    )


def _range(text: str, first: int, last: int) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if dash:
        return int(low), int(high)
    return int(text.removesuffix("+")), last


def _default(kind: str, text: str | None) -> Default:
    if text == "null" or (text is None and kind == "records"):
        return None
    if kind.startswith("[]"):
        return ""
    if kind not in PRIMITIVES:
        return None
    if kind == "bool":
        return text == "true"
    if kind == "string":
        return text or ""
    if kind == "bytes":
        return b""
    if kind == "uuid":
        return NO_ID
    if kind == "float64":
        return float(text or 0)
    return int(text or 0)


def structs_of(struct: Struct) -> Iterable[Struct]:
    """Yield the struct and all structs inside it, outer ones first."""
    yield struct
    for field in struct.fields:
        if field.struct is not None:
            yield from structs_of(field.struct)
