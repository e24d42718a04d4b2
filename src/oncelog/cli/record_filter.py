"""The filters of `oncelog consume`: a record's key, its headers, and fields of its JSON value."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oncelog.types import Record

_MISSING = object()


@dataclass(frozen=True, slots=True)
class JsonField:
    """A dotted path into a JSON value, and the text that the field must have."""

    path: tuple[str, ...]
    text: str

    def matches(self, document: Any) -> bool:
        """Return True if the document has the field, and the field's value equals `text`.

        A field that is not a string is compared as JSON text: the text `true` matches the JSON value true.
        """
        found = _at(document, self.path)
        if found is _MISSING:
            return False
        if isinstance(found, str):
            return found == self.text
        wanted = _parsed(self.text)
        # Compare the types too: in Python True == 1, but JSON's true is not 1.
        return wanted is not _MISSING and found == wanted and type(found) is type(wanted)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """A filter of records: a record matches if it meets all conditions.

    `key`: the record's key must equal it. `headers`: pairs of a name and a value that the record's headers
    must contain; None allows any value. `fields`: conditions on the record's JSON value.
    """

    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    fields: tuple[JsonField, ...] = ()

    def __bool__(self) -> bool:
        """Return True if the filter has at least one condition."""
        return self.key is not None or bool(self.headers or self.fields)

    def matches(self, record: Record) -> bool:
        """Return True if the record meets all conditions."""
        if self.key is not None and record.key != self.key:
            return False
        for name, value in self.headers:
            found = [data for known, data in record.headers if known == name]
            if not found or (value is not None and value not in found):
                return False
        if not self.fields:
            return True
        document = _parsed(record.value)
        return document is not _MISSING and all(field.matches(document) for field in self.fields)


def parse_filter(key: str | None, headers: Sequence[str], fields: Sequence[str]) -> RecordFilter:
    """Return the filter that the options describe. Raises ValueError for a malformed option."""
    return RecordFilter(
        None if key is None else os.fsencode(key),
        tuple(map(parse_header, headers)),
        tuple(map(parse_json_field, fields)),
    )


def parse_header(text: str) -> tuple[str, bytes | None]:
    """Return name and value of `NAME=VALUE`; the value of a `NAME` alone is None. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not name:
        raise ValueError(f"{text!r}: expected NAME=VALUE or NAME")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r}: the name of a header must be UTF-8") from None
    return name, os.fsencode(value) if separator else None


def parse_json_field(text: str) -> JsonField:
    """Return the condition in `a.b=value`. A number in the path can be a list index. Raises ValueError for
    other text.
    """
    path, separator, value = text.partition("=")
    names = tuple(path.split("."))
    if not separator or not all(names):
        raise ValueError(f"{text!r}: expected FIELD=VALUE, for example user.country=NL")
    return JsonField(names, value)


def _at(document: Any, path: Sequence[str]) -> Any:
    for name in path:
        if isinstance(document, dict) and name in document:
            document = document[name]
        elif isinstance(document, list) and name.isdecimal() and len(name) < 9 and int(name) < len(document):
            document = document[int(name)]
        else:
            return _MISSING
    return document


def _parsed(data: bytes | str | None) -> Any:
    """Return the value of JSON text; _MISSING if the text is not JSON."""
    try:
        return _MISSING if data is None else json.loads(data)
    # RecursionError: Python raises it for JSON that is nested too deeply.
    except (ValueError, RecursionError):
        return _MISSING
