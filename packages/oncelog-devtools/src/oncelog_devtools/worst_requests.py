"""The catalogue of worst requests: for each API, the costliest request of a given size in bytes.

Most requests are built from the protocol tables. For each array, one request has as many equal elements as
fit, and another as many different ones. For each string, one request has the longest allowed value, as often
as it fits. Other requests are written by hand: patterns, look-ups, one resource requested many times.

tests/broker/test_broker_worst_requests.py sends them all and asserts how much work the broker does. `oncelog
bench longest_wait` measures how long another client waits while the broker handles them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from oncelog.errors import MisuseError
from oncelog.wire.message import Api
from oncelog.wire.messages import (
    API_BY_KEY,
    ConsumerGroupHeartbeatRequest,
    DescribeConfigsRequest,
    FetchRequest,
    FindCoordinatorRequest,
    ListOffsetsRequest,
    ListTransactionsRequest,
    MetadataRequest,
)
from oncelog.wire.primitives import MAX_STRING_BYTES, encode_uvarint
from oncelog.wire.schema import Field, Struct

BROKER_RESOURCE = 4
GROUP_KEY = 0
_HEAD = struct.Struct(">hhih")
_BITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}


class WorstRequest(NamedTuple):
    """A request of the catalogue: an API, a version, and the body."""

    name: str
    api: Api
    version: int
    body: bytes
    header_tags: bytes = b"\0"

    def frame(self, correlation_id: int = 1, client_id: bytes = b"worst") -> bytes:
        """Return the request's header and body, without the length prefix."""
        head = _HEAD.pack(self.api.key, self.version, correlation_id, len(client_id)) + client_id
        return head + (self.header_tags if self.api.is_flexible(self.version) else b"") + self.body


def worst_requests(size_bytes: int, topic: str = "t", group: str = "g") -> Iterator[WorstRequest]:
    """Yield the catalogue: requests of up to `size_bytes` bytes. Some of them name `topic` and `group`."""
    for api in API_BY_KEY.values():
        yield from from_tables(api, size_bytes)
    yield from by_hand(size_bytes, topic, group)


def from_tables(api: Api, size_bytes: int) -> Iterator[WorstRequest]:
    """Yield the requests built from the protocol tables of `api`, in its newest supported version."""
    version, request = api.max_version, api.request
    for path in _paths(request._struct, version):
        field, where = path[-1], ".".join(field.name for field in path)
        if field.is_array:
            for kind, element in (("equal", _equal), ("different", _different)):
                body = _filled(api, version, path, element, size_bytes)
                yield WorstRequest(f"{api.name}: {kind} {where}", api, version, body)
        elif field.kind == "string":
            long = _filled(api, version, path, _long_text, size_bytes)
            yield WorstRequest(f"{api.name}: long {where}", api, version, long)
    if api.is_flexible(version):
        count = size_bytes // 2
        tags = encode_uvarint(count) + b"\x7f\0" * count
        body = _part(request, version).encode(version)
        yield WorstRequest(f"{api.name}: tagged fields", api, version, body[:-1] + tags)
        yield WorstRequest(f"{api.name}: tagged fields of the header", api, version, body, tags)


def by_hand(size_bytes: int, topic: str, group: str) -> Iterator[WorstRequest]:
    """Yield requests whose cost depends on their values, not only on the number of elements."""
    yield _of("a pattern that backtracks", ListTransactionsRequest(transactional_id_pattern="(?:.|.){24}!"))
    heartbeat = ConsumerGroupHeartbeatRequest(
        group_id=group, member_id="m", topic_partitions=[], rebalance_timeout_ms=1000
    )
    heartbeat.subscribed_topic_regex = "(?:.|.){24}!"
    yield _of("a subscription that backtracks", heartbeat)
    heartbeat.subscribed_topic_regex = "(a|b)*" * (MAX_STRING_BYTES // 6)
    yield _of("a long subscription", heartbeat)
    keys = ["k" * MAX_STRING_BYTES] * max(size_bytes // MAX_STRING_BYTES, 1)
    yield _of("long names", FindCoordinatorRequest(key_type=GROUP_KEY, coordinator_keys=keys))
    broker = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=BROKER_RESOURCE, resource_name="1", configuration_keys=None
    )
    yield _of(
        "the broker's settings again and again",
        DescribeConfigsRequest(
            resources=[broker] * (size_bytes // 5), include_synonyms=True, include_documentation=True
        ),
    )
    partition = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=1)
    offsets_topic = ListOffsetsRequest.ListOffsetsTopic(
        name=topic, partitions=[partition] * (size_bytes // 17)
    )
    yield _of("one partition's offset by time again and again", ListOffsetsRequest(topics=[offsets_topic]))
    fetch_partition = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    fetch_topic = FetchRequest.FetchTopic(topic=topic, partitions=[fetch_partition] * (size_bytes // 34))
    yield _of(
        "one partition fetched again and again", FetchRequest(topics=[fetch_topic], max_bytes=1 << 20), 12
    )
    metadata_topic = MetadataRequest.MetadataRequestTopic(name=topic)
    yield _of("one topic again and again", MetadataRequest(topics=[metadata_topic] * (size_bytes // 19)))


def _of(name: str, message: Any, version: int | None = None) -> WorstRequest:
    api: Api = message.api
    version = api.max_version if version is None else version
    return WorstRequest(f"{api.name}: {name}", api, version, message.encode(version))


def _paths(struct_: Struct, version: int) -> Iterator[tuple[Field, ...]]:
    """Yield the path to each field of a message: the fields of the arrays and structs around it, then the
    field.
    """
    for field in struct_.fields:
        if field.is_in(version):
            yield (field,)
            if field.struct is not None:
                for rest in _paths(field.struct, version):
                    yield (field, *rest)


def _part(cls: type[Any], version: int) -> Any:
    """Return an empty part of a message, with its non-nullable structs filled in."""
    part = cls()
    for field in cls._struct.fields:
        if field.struct is not None and not field.is_array and field.is_in(version):
            if not field.is_nullable(version):
                setattr(part, field.name, _part(cls._structs[field.struct.name], version))
        elif getattr(part, field.name) is None and not field.is_nullable(version):
            setattr(part, field.name, [] if field.is_array else "" if field.kind == "string" else b"")
    return part


def _equal(field: Field, number: int) -> Any:
    return {"string": "", "bytes": b"", "records": None, "uuid": bytes(16)}.get(field.kind, 0)


def _different(field: Field, number: int) -> Any:
    if field.kind in _BITS:
        return number % (1 << _BITS[field.kind])
    kinds = {"string": f"{number:x}", "bytes": b"%x" % number, "uuid": number.to_bytes(16, "big")}
    return kinds.get(field.kind, 0)


def _long_text(field: Field, number: int) -> Any:
    return "x" * MAX_STRING_BYTES if field.kind == "string" else _equal(field, number)


def _filled(
    api: Api, version: int, path: tuple[Field, ...], value: Callable[[Field, int], Any], size_bytes: int
) -> bytes:
    """Return a body of up to `size_bytes` bytes with as many elements at `path` as fit, at least one.

    A single element may make the body longer. `value` returns an element for a field and its number.
    """
    one, two = (len(_build(api.request, version, path, value, count).encode(version)) for count in (1, 2))
    count = max(1, (size_bytes - one) // max(two - one, 1))
    while True:
        body: bytes = _build(api.request, version, path, value, count).encode(version)
        if len(body) <= size_bytes or count == 1:
            return body
        count = count * size_bytes // (len(body) + 1)


def _build(
    cls: type[Any], version: int, path: tuple[Field, ...], value: Callable[[Field, int], Any], count: int
) -> Any:
    """Return a message with `count` elements in the innermost array on `path`, and one element in each outer
    array.
    """
    depth = max((index for index, field in enumerate(path) if field.is_array), default=-1)

    def build(cls: type[Any], index: int, number: int) -> Any:
        part, field = _part(cls, version), path[index]
        inner = cls._structs[field.struct.name] if field.struct is not None else None
        elements_count = count if index == depth else 1

        def element(number: int) -> Any:
            if inner is None:
                return value(field, number)
            if index + 1 < len(path):
                return build(inner, index + 1, number)
            filled = _part(inner, version)
            for inner_field in inner._struct.fields:
                is_plain = inner_field.is_in(version) and not inner_field.is_array and inner_field.tag is None
                if is_plain and inner_field.kind in ("string", "uuid", "int32"):
                    setattr(filled, inner_field.name, value(inner_field, number))
            return filled

        elements = [element(index) for index in range(elements_count)] if field.is_array else element(number)
        setattr(part, field.name, elements)
        return part

    try:
        return build(cls, 0, 0)
    except MisuseError as error:  # pragma: no cover - a schema that this module does not support
        raise MisuseError(f"{cls.__name__}.{path[-1].name}: {error}") from error
