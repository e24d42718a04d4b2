"""YAML values in the bodies of scenarios, with tags that build record batches or match responses.

Requests and responses use the field names of the tables in `oncelog.wire.tables`.

    Requests (`>` lines)
    !batch {...}            a record batch, with the options below
    !batches [{...}, ...]   several batches, one after the other
    !raw "hex"              bytes
    !uuid 7                 a UUID of that number

    Options of a batch
    values, keys            lists; a record for each value
    time, step, times       timestamp of the first record (default `$now`) and ms between records, or a list
    pid, epoch, seq         producer id, producer epoch, base sequence
    codec, transactional, control
    payload                 hex in place of the records; the checksum is right
    header                  {field: value}; the checksum is right
    crc: bad                a wrong checksum
    cut, tail               number of bytes removed from the end; hex added at the end

    Texts
    "${name}text"           a text with the value of a variable in it

    Responses (`<` lines)
    _                       anything
    $name                   binds the variable, or must equal it
    !records [...]          records of a Fetch: values, or mappings of offset, timestamp_ms, key, value
    !batches [{...}]        headers of batches
    !any [...], !has [...]  a list in any order; a list that has these elements
    !size 9                 records of 9 bytes
    !min 5                  a number of at least 5
    !not $name              anything but the value of the variable
    !re "text"              a text in which the regular expression matches

`$name+3` and `$name-3` add to a number. Error codes are written as names, including NONE.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from oncelog.errors import ERROR_BY_CODE
from oncelog.types import Compression
from oncelog.wire.batch import BatchHeader, build_batch, read_header
from oncelog.wire.header import HEADER, LOG_OVERHEAD_BYTES, iter_batches, write_crc
from oncelog.wire.message import Part
from oncelog.wire.messages import NO_ID
from oncelog.wire.records import DecodedRecord, NewRecord, decode_records

MAX_SHOWN = 600
"""Maximum number of characters of an expected or received value in an error text."""


class _ErrorNames(dict[int, str]):
    """The name of each error code. The name of an unknown code is `ERROR_<code>`."""

    def __missing__(self, code: int) -> str:
        return f"ERROR_{code}"


ERROR_NAMES = _ErrorNames({0: "NONE"} | {code: error.kafka_name for code, error in ERROR_BY_CODE.items()})
ANYTHING = "_"
VARIABLE = re.compile(r"\$(\w+(?:\.id)?)(?:([+-])(\d+))?")
_IN_TEXT = re.compile(r"\$\{(\w+)\}")

Variables = dict[str, Any]


class Tagged(NamedTuple):
    """A YAML node with a tag: `!name value`."""

    name: str
    value: Any


class Mismatch(Exception):
    """A response that is not as expected. The text names the field."""

    def __init__(self, text: str, expected: str | None = None, received: str | None = None) -> None:
        super().__init__(text)
        self.expected, self.received = expected, received


class ScenarioError(Exception):
    """A mistake in the text of a scenario."""


@cache
def read_yaml(text: str) -> Any:
    """Return the value of YAML text. The value is cached for all runs of a scenario, so do not change it."""
    import yaml

    return yaml.load(text, _loader())


@cache
def _loader() -> Any:
    import yaml

    # The one in C, if PyYAML was built with it, takes an eighth of the time.
    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    def construct(loader: Any, suffix: str, node: Any) -> Tagged:
        if isinstance(node, yaml.MappingNode):
            return Tagged(suffix, loader.construct_mapping(node, deep=True))
        if isinstance(node, yaml.SequenceNode):
            return Tagged(suffix, loader.construct_sequence(node, deep=True))
        value = loader.construct_scalar(node)
        return Tagged(suffix, int(value) if re.fullmatch(r"-?\d+", value) else value)

    Loader.add_multi_constructor("!", construct)
    return Loader


# --- building


def resolve(value: Any, variables: Variables) -> Any:
    """Return the value with its variables replaced, and with tags such as `!batch` replaced by the values
    that they build.
    """
    if isinstance(value, dict):
        return {key: resolve(element, variables) for key, element in value.items()}
    if isinstance(value, Tagged):
        return _BUILDERS[value.name](resolve(value.value, variables), variables)
    if isinstance(value, list):
        return [resolve(element, variables) for element in value]
    if isinstance(value, str):
        if found := VARIABLE.fullmatch(value):
            return _look_up(found, variables)
        return _IN_TEXT.sub(lambda found: str(variables[found[1]]), value)
    return value


def _look_up(found: re.Match[str], variables: Variables) -> Any:
    name, sign, count = found.groups()
    value = variables[name]
    return value if sign is None else value + int(sign + count)


def build(cls: type[Any], body: dict[str, Any]) -> Any:
    """Return a message, or a struct within a message, from a mapping of field names to values. Raises
    KeyError for a key that is not a field.
    """
    fields = {field.name: field for field in cls._struct.fields}
    values: dict[str, Any] = {}
    for key, value in body.items():
        field = fields[key]
        if field.struct is not None and value is not None:
            part = cls._structs[field.struct.name]
            value = [build(part, element) for element in value] if field.is_array else build(part, value)
        values[key] = value
    return cls(**values)


UNKNOWN_ID = b"no topic's id..."
_BY_ID = ("Produce", "OffsetCommit", "OffsetFetch")


def add_topic_ids(message: Any, variables: Variables) -> Any:
    """Set the topic ids in a Produce, OffsetCommit or OffsetFetch request, whose newest versions have no
    topic names. A name that is not a topic of the scenario gets UNKNOWN_ID.
    """
    if message.api.name in _BY_ID:
        ids = {variables[name[:-3]]: value for name, value in variables.items() if name.endswith(".id")}
        groups = getattr(message, "groups", [])
        for part in [message, *groups]:
            for topic in getattr(part, "topic_data", None) or getattr(part, "topics", None) or ():
                if getattr(topic, "topic_id", None) == NO_ID and topic.name:
                    topic.topic_id = ids.get(topic.name, UNKNOWN_ID)
    return message


def batch_of(options: dict[str, Any], variables: Variables) -> bytes:
    """Return the bytes of one batch, damaged as options such as `crc` and `cut` demand. Raises ScenarioError
    for an unknown option.
    """
    left = dict(options)
    values, step = left.pop("values"), left.pop("step", 1)
    keys = left.pop("keys", [None] * len(values))
    time_ms = left.pop("time", variables["now"])
    pid, epoch, sequence = left.pop("pid", None), left.pop("epoch", None), left.pop("seq", None)
    times = left.pop("times", [time_ms + index * step for index in range(len(values))])
    records = [
        NewRecord(timestamp_ms, _bytes(key), _bytes(value))
        for timestamp_ms, key, value in zip(times, keys, values, strict=True)
    ]
    batch = build_batch(
        records or [NewRecord(time_ms, None, None)],
        compression=Compression[left.pop("codec", "none").upper()],
        producer_id=pid,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=left.pop("transactional", False),
        is_control=left.pop("control", False),
    )
    if not records:
        batch = batch[: HEADER.size]
        left["header"] = {"last_offset_delta": -1, "records_count": 0} | left.get("header", {})
    _damage(batch, left)
    if left:
        raise ScenarioError(f"unknown options of a batch: {left}")
    return bytes(batch)


def _damage(batch: bytearray, options: dict[str, Any]) -> None:
    batch[HEADER.size :] = bytes.fromhex(options.pop("payload", "")) or batch[HEADER.size :]
    header = {"batch_length": len(batch) - LOG_OVERHEAD_BYTES} | options.pop("header", {})
    HEADER.pack_into(batch, 0, *BatchHeader._make(HEADER.unpack_from(batch))._replace(**header))
    write_crc(batch, 0, len(batch))
    if options.pop("crc", None) == "bad":
        batch[17] ^= 0xFF
    if cut := options.pop("cut", 0):
        del batch[-cut:]
    batch += bytes.fromhex(options.pop("tail", ""))


def _bytes(value: Any) -> bytes | None:
    return None if value is None else str(value).encode()


_BUILDERS: dict[str, Callable[[Any, Variables], Any]] = {
    "batch": batch_of,
    "batches": lambda many, variables: b"".join(batch_of(options, variables) for options in many),
    "raw": lambda text, _: bytes.fromhex(str(text)),
    "uuid": lambda number, _: number.to_bytes(16, "big"),
    "repeat": lambda pair, _: pair[0] * pair[1],
}


# --- matching


def shown(value: object) -> str:
    """Return a value as text of at most MAX_SHOWN characters and "..."."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def match(expected: Any, actual: Any, version: int, variables: Variables, path: str = "") -> None:
    """Raise Mismatch unless `actual` is as expected. Set variables that have no value yet. Expected fields
    that `version` does not have are ignored.
    """
    if expected == ANYTHING:
        return
    if isinstance(expected, Tagged):
        _MATCHERS[expected.name](expected.value, actual, version, variables, path)
    elif isinstance(expected, dict):
        _match_fields(expected, actual, version, variables, path)
    elif isinstance(expected, list):
        _require(isinstance(actual, list) and len(actual) == len(expected), expected, actual, path)
        for index, element in enumerate(expected):
            match(element, actual[index], version, variables, f"{path}[{index}]")
    elif isinstance(expected, str) and (found := VARIABLE.fullmatch(expected)):
        if found[2] is None:
            variables.setdefault(found[1], actual)
        _require(_look_up(found, variables) == actual, f"{expected}={variables[found[1]]}", actual, path)
    else:
        _require(expected == actual, expected, actual, path)


def _require(holds: bool, expected: Any, actual: Any, path: str) -> None:
    if not holds:
        place = path.lstrip(".") or "the response"
        wanted, got = shown(expected), shown(actual)
        raise Mismatch(f"{place}: expected {wanted}, got {got}", f"{place}: {wanted}", f"{place}: {got}")


def _match_fields(
    expected: dict[str, Any], actual: Any, version: int, variables: Variables, path: str
) -> None:
    if isinstance(actual, dict):
        present = actual
    else:
        _require(isinstance(actual, Part), expected, actual, path)
        fields = actual._struct.fields
        present = {field.name: getattr(actual, field.name) for field in fields if field.is_in(version)}
        unknown = set(expected) - {field.name for field in fields}
        if unknown:
            raise ScenarioError(f"{type(actual).__name__} has no {unknown}")
    for key, wanted in expected.items():
        if key in present:
            value = present[key]
            if key in ("error_code", "partition_error_code"):
                value = ERROR_NAMES[value]
            match(wanted, value, version, variables, f"{path}.{key}")


def _match_any(expected: list[Any], actual: Any, version: int, variables: Variables, path: str) -> None:
    _require(isinstance(actual, list) and len(actual) == len(expected), expected, actual, path)
    _match_has(expected, actual, version, variables, path)


def _match_has(expected: list[Any], actual: Any, version: int, variables: Variables, path: str) -> None:
    left = list(actual or [])
    for wanted in expected:
        for index, element in enumerate(left):
            trial = dict(variables)
            try:
                match(wanted, element, version, trial)
            except Mismatch:
                continue
            variables.update(trial)
            del left[index]
            break
        else:
            place = path.lstrip(".")
            raise Mismatch(
                f"{place}: nothing like {shown(wanted)} in {shown(actual)}",
                f"{place}: an element like {shown(wanted)}",
                f"{place}: {shown(actual)}",
            )


def _match_not(expected: str, actual: Any, version: int, variables: Variables, path: str) -> None:
    _require(resolve(expected, variables) != actual, f"not {expected}", actual, path)


def split_batches(data: Any) -> list[bytes]:
    """Return the complete batches in the records of a Fetch response, without a partial batch at the end."""
    raw = bytes(data or b"")
    return [raw[position : position + header.size_bytes] for position, header in iter_batches(raw)]


def _match_records(expected: list[Any], actual: Any, version: int, variables: Variables, path: str) -> None:
    batches = split_batches(actual)
    records: list[Any] = [_plain(record) for batch in batches for record in decode_records(batch)]
    if not any(isinstance(element, dict) for element in expected):
        records = [record["value"] for record in records]
        expected = [element if element is None else str(element) for element in expected]
    match(expected, records, version, variables, path)


def _match_batches(expected: list[Any], actual: Any, version: int, variables: Variables, path: str) -> None:
    batches = []
    for batch in split_batches(actual):
        header = read_header(batch)
        values = (
            [_plain(record)["value"] for record in decode_records(batch)] if not header.is_control else []
        )
        more = {"codec": header.compression.name.lower(), "values": values, "size": len(batch)}
        batches.append(header._asdict() | more)
    match(expected, batches, version, variables, path)


def _plain(record: DecodedRecord) -> dict[str, Any]:
    plain = record._asdict()
    return plain | {name: _text(plain[name]) for name in ("key", "value")}


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode()


def _match_min(expected: int, actual: Any, version: int, variables: Variables, path: str) -> None:
    least = resolve(expected, variables)
    _require(actual >= least, f"at least {least}", actual, path)


def _match_re(expected: str, actual: Any, version: int, variables: Variables, path: str) -> None:
    _require(re.search(expected, str(actual)) is not None, f"/{expected}/", actual, path)


def _match_built(name: str) -> Any:
    def match_built(expected: Any, actual: Any, version: int, variables: Variables, path: str) -> None:
        built = _BUILDERS[name](resolve(expected, variables), variables)
        _require(built == actual, built, actual, path)

    return match_built


_MATCHERS: dict[str, Callable[..., None]] = {
    "any": _match_any,
    "has": _match_has,
    "records": _match_records,
    "batches": _match_batches,
    "size": lambda size, actual, *rest: match(size, len(actual), *rest),
    "min": _match_min,
    "not": _match_not,
    "re": _match_re,
    "uuid": _match_built("uuid"),
}
