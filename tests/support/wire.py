"""Records and random messages for the wire tests, and conversions to and from kafka-python's classes."""

from __future__ import annotations

import random
import uuid
from typing import Any

from hypothesis import strategies as st

from oncelog.wire.messages import NO_ID
from oncelog.wire.records import NewRecord
from oncelog.wire.schema import Field, Struct

NOW_MS = 1_700_000_000_000
HEADERS = [(), (("a", b"1"),), (("größe", None), ("", b""), ("a", b"x" * 200))]
RECORDS = [
    NewRecord(NOW_MS, None, b"first"),
    NewRecord(NOW_MS - 5_000, b"", b"", HEADERS[1]),
    NewRecord(NOW_MS + 100_000, b"k" * 64, None, HEADERS[2]),
    NewRecord(NOW_MS - 9_000_000_000, None, None),
    NewRecord(NOW_MS, b"k" * 9_000, b"v" * 20_000),
]

texts = st.text(max_size=20)
payloads = st.none() | st.binary(max_size=300)
records_strategy = st.lists(
    st.builds(
        NewRecord,
        st.integers(0, 2**42),
        payloads,
        payloads,
        st.lists(st.tuples(texts, payloads), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=30,
)

_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_TEXTS = ["", "t", "topic-with-a-longer-name", "größe", "日本語", "x" * 127, "y" * 300]
_SMALL_TIME_MS = 86_400_000


def random_value(rng: random.Random, field: Field, cls: type[Any], version: int, plain: bool) -> Any:
    """Return a random value for a field of the version. With `plain`, return only values that kio accepts."""
    if field.is_nullable(version) and rng.random() < 0.25:
        return None
    if field.is_array:
        element = field._replace(is_array=False, null_from=None, tag=None)
        count = rng.choice([0, 1, 2, 3]) if field.struct or rng.random() < 0.9 else 200
        return [random_value(rng, element, cls, version, plain) for _ in range(count)]
    if field.struct is not None:
        return random_part(rng, field.struct, cls._structs[field.struct.name], version, plain)
    return _random_primitive(rng, field, plain)


def _random_primitive(rng: random.Random, field: Field, plain: bool) -> Any:
    if field.kind == "bool":
        return rng.random() < 0.5
    if field.kind == "string":
        return rng.choice(_TEXTS)
    if field.kind == "uuid":
        return rng.choice([NO_ID, rng.randbytes(16)])
    if field.kind == "float64":
        return rng.choice([0.0, 1.5, -2.25e300])
    if field.kind in ("bytes", "records"):
        return rng.randbytes(rng.choice([0, 1, 126, 127, 128, 5000]))
    if plain and field.name.endswith("error_code"):
        return rng.choice([0, 1, 3, 45, 87])
    if plain and (field.name.endswith(("_ms", "timestamp", "timeout"))):
        return rng.randrange(_SMALL_TIME_MS // 1000) * 1000
    if field.kind == "uint16":
        return rng.choice([0, 1, 9092, 65535])
    bits = _BITS[field.kind]
    return rng.choice([0, -1, 1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), rng.getrandbits(bits - 1)])


def random_part(rng: random.Random, struct: Struct, cls: type[Any], version: int, plain: bool = False) -> Any:
    """Return a message or a part of one. The fields of the version have random values, all others their
    defaults.
    """
    part = cls()
    for field in struct.fields:
        if not field.is_in(version):
            continue
        if field.tag is not None and rng.random() < 0.4:
            continue
        setattr(part, field.name, random_value(rng, field, cls, version, plain))
        if field.tag is not None and field.struct is not None and not field.is_array:
            value = getattr(part, field.name)
            if value == type(value)():  # for kafka-python, a struct with only defaults is absent
                setattr(part, field.name, None)
    return part


def to_kafka_python(part: Any, their_cls: Any, version: int) -> Any:
    """Return the same values in kafka-python's class."""
    values = {}
    for field in part._struct.fields:
        value = getattr(part, field.name)
        is_default = value == (list() if field.starts_as_list else field.default)
        if field.is_in(version) and not (field.tag is not None and is_default):
            values[field.name] = _to_theirs(field, value, their_cls, version)
    return their_cls(version=version, **values)


def _to_theirs(field: Field, value: Any, their_cls: Any, version: int) -> Any:
    if value is None:
        return None
    if field.struct is not None:
        inner = their_cls._struct.fields[field.name].data_class
        if field.is_array:
            return [to_kafka_python(item, inner, version) for item in value]
        return to_kafka_python(value, inner, version)
    return uuid.UUID(bytes=value) if field.kind == "uuid" else value


def from_kafka_python(theirs: Any, cls: type[Any], version: int) -> Any:
    """Return kafka-python's values in our class."""
    part = cls()
    for field in cls._struct.fields:
        if field.is_in(version):
            setattr(part, field.name, _from_theirs(field, getattr(theirs, field.name), cls, version))
    return part


def _from_theirs(field: Field, value: Any, cls: type[Any], version: int) -> Any:
    if field.kind == "uuid":
        return NO_ID if value is None else value.bytes
    if value is None or field.struct is None:
        return value
    inner = cls._structs[field.struct.name]
    if field.is_array:
        return [from_kafka_python(item, inner, version) for item in value]
    part = from_kafka_python(value, inner, version)
    return None if field.tag is not None and part == inner() else part
