"""Validators of JSON Schema with a limit of work for each value.

Each keyword of a schema that is applied to a part of a value is a check. A schema of a kilobyte can refer to
its parts so that the number of checks doubles with each level, and then a single number would be checked
without end. `bounded` makes validators that count their checks and stop at a limit.

jsonschema compares each item of an array with all others for uniqueItems, unless it can sort the items. An
array of 4,000 objects took a minute. `bounded` replaces this keyword.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import attrs
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend, validator_for

from oncelog.errors import SchemaDataError

FREE_CHECKS, CHECKS_PER_BYTE = 10_000, 50
MAX_CHECKS = 1_000_000
"""The maximum number of checks: FREE_CHECKS and CHECKS_PER_BYTE of the value's JSON text, up to MAX_CHECKS.

A check takes about 20 microseconds.
"""


class _Budget(threading.local):
    """The number of checks that the current validation of this thread may still make."""

    left = 0


_BUDGET = _Budget()


def checker(kind: Any, schema: Any, registry: Any) -> Callable[[Any, int], None]:
    """Return a function that checks a value, whose JSON text has `size_bytes`, against a schema.

    It raises ValidationError for a value that does not fit, and SchemaDataError at the limit. `kind` is a
    class of jsonschema, such as Draft7Validator.
    """
    validator = bounded(kind)(schema, registry=registry)

    def check(value: Any, size_bytes: int) -> None:
        _BUDGET.left = min(FREE_CHECKS + CHECKS_PER_BYTE * size_bytes, MAX_CHECKS)
        validator.validate(value)

    return check


def check_schema(kind: Any, schema: Any) -> None:
    """Raise SchemaError for a schema that is not valid, and SchemaDataError at the limit."""
    _BUDGET.left = MAX_CHECKS
    validator = bounded(kind)(kind.META_SCHEMA, format_checker=kind.FORMAT_CHECKER)
    for error in validator.iter_errors(schema):
        raise SchemaError.create_from(error)


@cache
def bounded(kind: Any) -> Any:
    """Return a class like `kind`, a class of jsonschema, that counts its checks."""
    keywords = {**kind.VALIDATORS, "uniqueItems": _unique_items}
    made: Any = extend(kind, {name: _counted(check) for name, check in keywords.items()})

    def evolve(self: Any, **changes: Any) -> Any:
        # As in jsonschema, but a part of a schema that names another version gets a bounded class, too.
        found = validator_for(changes.setdefault("schema", self.schema), default=made)
        for field in attrs.fields(made):
            if field.init:
                changes.setdefault(field.alias, getattr(self, field.name))
        return (made if found is made else bounded(found))(**changes)

    made.evolve = evolve
    return made


def _counted(check: Any) -> Any:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _BUDGET.left -= 1
        if _BUDGET.left < 0:
            raise SchemaDataError(
                "the value needs too many checks against its schema; with json.fail.invalid.schema=false it "
                "is not checked"
            )
        return check(validator, value, instance, schema)

    return counted


def _unique_items(validator: Any, is_required: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    is_array = is_required and validator.is_type(instance, "array")
    if is_array and len(set(map(_hashable, instance))) < len(instance):
        yield ValidationError(f"{instance!r:.1000} has non-unique elements")


def _hashable(value: Any) -> Any:
    """Return an object that equals those of equal JSON values only. 1 and 1.0 are equal, 1 and true are not.

    Numbers become text, because chosen integers can all have one hash, and chosen text cannot.
    """
    match value:
        case bool() | None:
            return value
        case int():
            return str(value)
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case dict():
            return dict, frozenset((name, _hashable(item)) for name, item in value.items())
        case list() | tuple():
            return list, tuple(map(_hashable, value))
        case _:
            return str, value
