"""The fast path of Produce: append the batches of a plain request without decoding it into a message.

All checks that refuse a request before an append are in `broker.handlers.produce`. A request that might fail
one of these checks is not plain, and this module leaves it unchanged for that handler. For example, a request
is not plain if it has an old version, acks=0, malformed bytes, an unknown topic, or a topic without
`allows_direct_produce`. While `BrokerState.on_append` is set, no request is plain. A transactional batch is
plain if its producer's transaction is already open in the partition. The first batch of a transaction needs
the coordinator.

    request   i16 key | i16 version | i32 correlation id | client id | tags | transactional id | i16 acks
              | i32 timeout | topics: name, partitions: (i32 index, records, tags), tags | tags
    response  i32 size | i32 correlation id | tags | topics: name, partitions: (i32 index, i16 error,
              i64 base offset, i64 append time, i64 log start offset, errors, message, tags), tags
              | i32 throttle time | tags

In version 13 the 16 bytes of the topic id replace the topic name. Lengths and counts are unsigned varints of
the number plus one. A tag block without fields is a zero byte. Source: KIP-482, KIP-516.
"""

from __future__ import annotations

import struct

from oncelog.broker.handlers.produce import KEY, count_append, put_append, put_refusal
from oncelog.broker.security.authorizer import Access
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, PeerError, without_traceback
from oncelog.log.partition import Appended, Partition
from oncelog.rules.security.authorization import Operation, ResourceType
from oncelog.types import Origin
from oncelog.wire.frames import encode_response
from oncelog.wire.header import (
    HEADER,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    MIN_BATCH_LENGTH,
    TRANSACTIONAL_BIT,
    HeaderFields,
)
from oncelog.wire.messages import NO_ID, ProduceResponse
from oncelog.wire.primitives import read_uvarint_rest

FIRST_VERSION, FIRST_ID_VERSION, LAST_VERSION = 9, 13, 13
_ID_BYTES = 16

_HEAD = struct.Struct(">hhih")
_BODY = struct.Struct(">hiB")
_PARTITION = struct.Struct(">iB")
_RESPONSE_HEAD = struct.Struct(">iixB")
_RESULT = struct.Struct(">ihqqqBxx")
_ONLY_RESULT = struct.Struct(_RESULT.format + "6x")
"""Layout of the only result in a response, including the tags and the throttle time that follow the
result.
"""
_ONLY_RESPONSE_BYTES = _RESPONSE_HEAD.size - 4 + _ONLY_RESULT.size
"""Size of a response with one result, without the size prefix and the bytes copied from the request."""
_NO_RECORD_ERRORS = 1
_LAST_TAGS_AND_THROTTLE = bytes(6)
_THROTTLE_AND_TAGS = struct.Struct(">ix")
_PLAIN_ACKS = (-1, 1)
MAX_BATCHES = 1_000
"""Maximum number of batches in a plain request. Larger requests are left to `broker.handlers.produce`, which
handles them in steps.
"""
MAX_BATCHES_WITH_SEGMENTS = 16
"""Maximum number of batches in a plain request that begins a segment. Larger requests are left to
`broker.handlers.produce`, which handles them in steps, because each new segment may take milliseconds.
"""
_CLIENT = Origin.CLIENT

_Result = ProduceResponse.PartitionProduceResponse
_AppendResult = int | Appended | BrokerError
"""The base offset that `append_next` returned, the result of `append`, or the error of a refused batch."""


_Batch = tuple[memoryview, Partition, memoryview, HeaderFields]
"""(bytes of the topic's name or id and of its partition count in the request, partition, batch, fields of the
batch's header)
"""


def answer(state: BrokerState, frame: memoryview, now_ms: int, access: Access | None = None) -> bytes | None:
    """Append the batches of a plain request and return the response frame.

    Return None, with nothing appended, if the request is not plain. `access` has the client's permissions;
    None means that there is no authorizer.
    """
    if state.on_append is not None:
        return None
    try:
        key, version, correlation_id, name_bytes = _HEAD.unpack_from(frame)
        if key != KEY or not FIRST_VERSION <= version <= LAST_VERSION:
            return None
        position = 10 + name_bytes if name_bytes > 0 else 10
        batches = _plain_batches(state, frame, position, access, version >= FIRST_ID_VERSION)
    except (struct.error, IndexError, UnicodeDecodeError, PeerError, BrokerError):
        # The bytes are malformed, or the header is refused. Leave the request to `broker.handlers.produce`,
        # which returns the error.
        return None
    if batches is None or len(batches) > MAX_BATCHES:
        return None
    if len(batches) > MAX_BATCHES_WITH_SEGMENTS and _begins_segment(batches, now_ms):
        return None
    results: list[_AppendResult] = []
    is_refused = False
    for _, partition, records, fields in batches:
        try:
            result = _append(state, partition, records, fields, now_ms)
        except BrokerError as error:
            # Return this error here; never pass the request on to `produce`. A failed write leaves the
            # broker's base offset in the batch's bytes, so a second append would refuse the batch. See
            # test_the_bytes_of_a_failed_write_are_not_accepted_again.
            is_refused = True
            results.append(without_traceback(error))
        else:
            results.append(result)
    if is_refused:
        return encode_response(_response(state, batches, results), version, correlation_id)
    return _encode(correlation_id, batches, results)  # type: ignore[arg-type]


def _append(
    state: BrokerState, partition: Partition, records: memoryview, fields: HeaderFields, now_ms: int
) -> int | Appended:
    """Append a batch and count it. Return its base offset, or the result of `append` for an unusual batch.

    `append_next` stores usual batches. Raises a BrokerError if the batch is refused or the write fails.
    """
    base_offset = partition.append_next(records, fields, now_ms)
    if base_offset is None:
        done = partition.append(records, origin=_CLIENT, now_ms=now_ms, lead_ms=state.clock_lead_ms)
        count_append(state, done)
        if done.is_duplicate:
            return done
    else:
        metrics = state.metrics
        metrics.batches_stored += 1
        metrics.records_stored += fields[12]
    # Count the bytes immediately: in a topic with `allows_direct_produce`, records are visible without a
    # flush.
    if state.fetch_purgatory.is_watching:
        state.note_visible(partition.topic_partition, len(records))
    return done if base_offset is None else base_offset


def _begins_segment(batches: list[_Batch], now_ms: int) -> bool:
    """Return True if one of the batches does not fit in its partition's active segment."""
    for _, partition, records, fields in batches:
        log = partition.log
        last_offset, max_timestamp_ms = log.end_offset + fields[6], fields[8]
        if log.segments.active.is_full(len(records), last_offset, max_timestamp_ms, log.config, now_ms):
            return True
    return False


def with_throttle_time(response: bytes, throttle_time_ms: int) -> bytes:
    """Return a copy of the response frame with this throttle time, which precedes the last tags."""
    return b"".join((response[:-5], _THROTTLE_AND_TAGS.pack(throttle_time_ms)))


def _plain_batches(
    state: BrokerState, frame: memoryview, position: int, access: Access | None, has_ids: bool
) -> list[_Batch] | None:
    """Return the batches of the request; None if it is not plain. `position` is the end of the client id."""
    tags, id_length = frame[position], frame[position + 1]
    if tags or id_length == 1 or id_length > 127:
        return None
    is_transactional = id_length > 0
    position += 1 + id_length if is_transactional else 2
    if access is not None and is_transactional:
        transactional_id = str(frame[position - id_length + 1 : position], "utf-8")
        if not access.may(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
            return None
    acks, _, topic_count = _BODY.unpack_from(frame, position)
    if acks not in _PLAIN_ACKS or not 2 <= topic_count < 128:
        return None
    position += 7
    batches: list[_Batch] = []
    for _ in range(topic_count - 1):
        if has_ids:
            end = position + _ID_BYTES
            topic = state.topics.by_id(frame[position:end])
        else:
            end = position + frame[position]
            topic = state.topics.get(str(frame[position + 1 : end], "utf-8"))
        partition_count = frame[end]
        if topic is None or not topic.allows_direct_produce or not 2 <= partition_count < 128:
            return None
        if access is not None and not access.may(Operation.WRITE, ResourceType.TOPIC, topic.name):
            return None
        end += 1
        name, position = frame[position:end], end
        partitions = topic.partitions
        for _ in range(partition_count - 1):
            index, length = _PARTITION.unpack_from(frame, position)
            position += 5
            if length > 127:
                length, position = read_uvarint_rest(frame, position, length)
            end = position + length - 1
            fields = HEADER.unpack_from(frame, position)
            length, magic, attributes = fields[1], fields[3], fields[5]
            if length + LOG_OVERHEAD_BYTES != end - position or length < MIN_BATCH_LENGTH or magic != MAGIC:
                return None
            if frame[end] or not 0 <= index < len(partitions):
                return None
            partition = partitions[index]
            if is_transactional or attributes & TRANSACTIONAL_BIT:
                is_both = is_transactional and attributes & TRANSACTIONAL_BIT
                if not is_both or not partition.has_open_transaction(fields[9], fields[10]):
                    # The batch needs the coordinator, or only one of batch and request is transactional.
                    return None
            records = frame[position:end]
            batches.append((name, partition, records, fields))
            position = end + 1
        if frame[position]:
            return None
        position += 1
    if is_transactional and len(batches) > 1 and len({fields[9:11] for *_, fields in batches}) > 1:
        return None
    return batches if not frame[position] and position + 1 == len(frame) else None


def _encode(correlation_id: int, batches: list[_Batch], results: list[int | Appended]) -> bytes:
    """Return the response frame of a request whose batches were all appended."""
    if len(batches) == 1 and isinstance(results[0], int):
        name, partition, _, _ = batches[0]
        start_offset, index = partition.log.start_offset, partition.topic_partition[1]
        only = _ONLY_RESULT.pack(index, 0, results[0], -1, start_offset, _NO_RECORD_ERRORS)
        head = _RESPONSE_HEAD.pack(_ONLY_RESPONSE_BYTES + len(name), correlation_id, 2)
        return b"".join((head, name, only))
    parts: list[bytes | memoryview] = [b""]
    topic, topic_count, size = None, 1, _RESPONSE_HEAD.size + 1
    for (name, partition, _, _), result in zip(batches, results, strict=True):
        if name is not topic:
            if topic is not None:
                parts.append(b"\0")
            topic, topic_count, size = name, topic_count + 1, size + len(name) + 1
            parts.append(name)
        if isinstance(result, int):
            base_offset, time_ms, start_offset = result, -1, partition.log.start_offset
        else:
            base_offset, _, append_ms, start_offset, _ = result
            time_ms = -1 if append_ms is None else append_ms
        index = partition.topic_partition.partition
        parts.append(_RESULT.pack(index, 0, base_offset, time_ms, start_offset, _NO_RECORD_ERRORS))
    size += _RESULT.size * len(results)
    parts[0] = _RESPONSE_HEAD.pack(size, correlation_id, topic_count)
    parts.append(_LAST_TAGS_AND_THROTTLE)
    return b"".join(parts)


def _response(state: BrokerState, batches: list[_Batch], results: list[_AppendResult]) -> ProduceResponse:
    """Return the response message of a request with at least one refused batch."""
    topics: list[ProduceResponse.TopicProduceResponse] = []
    topic = None
    for (name, partition, _, _), appended in zip(batches, results, strict=True):
        tp = partition.topic_partition
        result = _Result(index=tp.partition, base_offset=-1, log_start_offset=partition.log_start_offset)
        if isinstance(appended, BrokerError):
            put_refusal(state, result, appended)
        elif isinstance(appended, int):
            result.base_offset = appended
        else:
            put_append(result, appended)
        if name is not topic:
            topic = name
            existing = state.topics.get(tp.topic)
            topics.append(
                ProduceResponse.TopicProduceResponse(
                    name=tp.topic, topic_id=existing.topic_id if existing else NO_ID, partition_responses=[]
                )
            )
        topics[-1].partition_responses.append(result)
    return ProduceResponse(responses=topics)
