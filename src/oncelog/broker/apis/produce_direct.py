"""The Produce request that clients repeat, answered without building messages: one batch, one partition.

Requests of one connection to one partition begin with the same bytes but for the correlation id, and
their answers differ in three numbers. What `apis.produce` has answered once is kept as such a pair of
shapes; a later request of the same shape goes straight to the log. Nothing is judged here: whatever is
not plain (another shape, a refusal, a wait for the disk, an observer) is left untouched to
`apis.produce`, so that there is one answer to everything.

    request   4s key and version | i32 correlation id | to the partition's index | length | batch | tail
    response  i32 size | i32 correlation id | to the error code | 3 i64: base offset, append time,
              log start offset | tail
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from oncelog.broker.apis.produce import KEY, count_append, put_refusal
from oncelog.config import INT64_MAX
from oncelog.errors import BrokerError, KafkaStorageError
from oncelog.types import Origin, TopicPartition
from oncelog.wire.batch import HEADER_BYTES, read_header
from oncelog.wire.frames import RequestHeader, encode_response
from oncelog.wire.messages import ProduceRequest, ProduceResponse
from oncelog.wire.primitives import encode_uvarint, read_uvarint_rest

if TYPE_CHECKING:
    from oncelog.broker.node import Node

FIRST_VERSION = 7
"""Older ones answer without a log start offset or may not carry zstd."""
FIRST_FLEXIBLE = 9
SHAPES_PER_CONNECTION = 4
TARGETS_PER_SHAPE = 256

_TRANSACTIONAL_BIT = 0x10
_FLEXIBLE_TAIL = b"\0\0\0"
"""No tagged fields in partition, topic and request."""
_FIGURES = struct.Struct(">qqq")
_LENGTH = struct.Struct(">i")
_CLIENT = Origin.CLIENT


class _Target(NamedTuple):
    """A partition and how its appends are answered. `head` and `tail` are bytes of the response."""

    key_and_version: bytes
    at: TopicPartition
    pack: struct.Struct
    size: int
    head: bytes
    tail: bytes


class _Shape:
    """Requests whose batch's length stands at `prefix_bytes`; found by what stands before it."""

    __slots__ = ("prefix", "prefix_bytes", "targets")

    def __init__(self, prefix_bytes: int) -> None:
        self.prefix_bytes = prefix_bytes
        self.prefix = struct.Struct(f">4si{prefix_bytes - 8}s")
        self.targets: dict[bytes, _Target] = {}


class DirectProduce:
    """What one connection's Produce requests look like."""

    __slots__ = ("_node", "_shapes")

    def __init__(self, node: Node) -> None:
        self._node = node
        self._shapes: list[_Shape] = []

    def answer(self, frame: memoryview, now_ms: int) -> bytes | None:
        """The response frame; None when `apis.produce` must see the request: nothing was done then."""
        for shape in self._shapes:
            if len(frame) <= shape.prefix_bytes:
                continue
            key_and_version, correlation_id, prefix = shape.prefix.unpack_from(frame)
            target = shape.targets.get(prefix)
            if target is not None and target.key_and_version == key_and_version:
                return self._append(target, frame, shape.prefix_bytes, correlation_id, now_ms)
        return None

    def _append(
        self, target: _Target, frame: memoryview, position: int, correlation_id: int, now_ms: int
    ) -> bytes | None:
        records = _records(frame, position, is_flexible=target.key_and_version[3] >= FIRST_FLEXIBLE)
        if records is None:
            return None
        node = self._node
        try:
            topic, partition = node.topics.partition(target.at)
            if not topic.is_plain or node.on_append is not None:
                return None
            header = read_header(records)
            if header.batch_length + 12 != len(records) or header.attributes & _TRANSACTIONAL_BIT:
                return None
            done = partition.append(records, origin=_CLIENT, now_ms=now_ms, header=header)
        except KafkaStorageError as error:
            # Not to be tried again: the batch is stamped already.
            return encode_response(self._refusal(target, error), target.key_and_version[3], correlation_id)
        except BrokerError:
            return None  # a refusal changes nothing and is repeated there, with its reason
        count_append(node, target.at, len(records), done)
        time_ms = -1 if done.log_append_time_ms is None else done.log_append_time_ms
        return target.pack.pack(
            target.size,
            correlation_id,
            target.head,
            done.base_offset,
            time_ms,
            done.log_start_offset,
            target.tail,
        )

    def _refusal(self, target: _Target, error: BrokerError) -> ProduceResponse:
        result = ProduceResponse.PartitionProduceResponse(index=target.at.partition, base_offset=-1)
        put_refusal(self._node, result, error)
        return _response(target.at, result)

    def learn(self, frame: memoryview, header: RequestHeader, message: ProduceRequest) -> None:
        """Keep the shape of a request that was answered without an error, if it is one for `answer`."""
        version = header.api_version
        if version < FIRST_VERSION or message.acks == 0 or message.transactional_id is not None:
            return
        if len(message.topic_data) != 1 or len(message.topic_data[0].partition_data) != 1:
            return
        topic = message.topic_data[0]
        (part,) = topic.partition_data
        prefix_bytes = _prefix_bytes(frame, len(part.records or b""), version >= FIRST_FLEXIBLE)
        if prefix_bytes is None:
            return
        shape = self._shape(prefix_bytes)
        if len(shape.targets) >= TARGETS_PER_SHAPE:
            shape.targets.clear()
        prefix = bytes(frame[8:prefix_bytes])
        shape.targets[prefix] = _target(bytes(frame[:4]), version, TopicPartition(topic.name, part.index))

    def _shape(self, prefix_bytes: int) -> _Shape:
        for shape in self._shapes:
            if shape.prefix_bytes == prefix_bytes:
                return shape
        if len(self._shapes) >= SHAPES_PER_CONNECTION:
            self._shapes.pop()
        self._shapes.insert(0, _Shape(prefix_bytes))
        return self._shapes[0]


def is_produce(frame: memoryview | bytearray) -> bool:
    return len(frame) > 2 and not frame[0] and frame[1] == KEY


def _records(frame: memoryview, position: int, *, is_flexible: bool) -> memoryview | None:
    """The batch, if it fills the rest of the frame but for an empty tail."""
    end = len(frame)
    if is_flexible:
        length = frame[position]
        position += 1
        if length > 127:
            try:
                length, position = read_uvarint_rest(frame, position, length)
            except Exception:
                return None
        length -= 1
        end -= 3
        if frame[end:] != _FLEXIBLE_TAIL:
            return None
    else:
        if end - position < 4:
            return None
        (length,) = _LENGTH.unpack_from(frame, position)
        position += 4
    return frame[position:end] if length == end - position and length >= HEADER_BYTES else None


def _prefix_bytes(frame: memoryview, records_bytes: int, is_flexible: bool) -> int | None:
    """Where the length of the batch stands, if nothing but an empty tail follows the batch."""
    length = encode_uvarint(records_bytes + 1) if is_flexible else _LENGTH.pack(records_bytes)
    tail = _FLEXIBLE_TAIL if is_flexible else b""
    start = len(frame) - len(tail) - records_bytes - len(length)
    is_it = (
        start > 8 and frame[start : start + len(length)] == length and frame[len(frame) - len(tail) :] == tail
    )
    return start if is_it else None


def _target(key_and_version: bytes, version: int, at: TopicPartition) -> _Target:
    """Shape the answer after one that the protocol's encoder has made."""
    result = ProduceResponse.PartitionProduceResponse(
        index=at.partition, base_offset=INT64_MAX, log_append_time_ms=INT64_MAX, log_start_offset=INT64_MAX
    )
    sample = encode_response(_response(at, result), version, 0)
    figures = sample.index(_FIGURES.pack(INT64_MAX, INT64_MAX, INT64_MAX))
    head, tail = sample[8:figures], sample[figures + _FIGURES.size :]
    pack = struct.Struct(f">ii{len(head)}sqqq{len(tail)}s")
    return _Target(key_and_version, at, pack, len(sample) - 4, head, tail)


def _response(at: TopicPartition, result: ProduceResponse.PartitionProduceResponse) -> ProduceResponse:
    topic = ProduceResponse.TopicProduceResponse(name=at.topic, partition_responses=[result])
    return ProduceResponse(responses=[topic])
