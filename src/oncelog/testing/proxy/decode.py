"""What the proxy reads of a message: batch headers, error codes, addresses. Everything else passes unread."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from oncelog.errors import OncelogError
from oncelog.testing.proxy.apis import api_name
from oncelog.testing.proxy.events import BatchSummary, Direction, Outcome, WireEvent
from oncelog.testing.proxy.txn_messages import words_of_answer, words_of_request
from oncelog.wire.batch import iter_batches
from oncelog.wire.frames import RequestHeader, decode_request_header, decode_response, encode_response
from oncelog.wire.messages import API_BY_KEY, Message, ProduceRequest, ProduceResponse

PRODUCE, FETCH, METADATA, FIND_COORDINATOR, API_VERSIONS = 0, 1, 3, 10, 18
INIT_PRODUCER_ID, DESCRIBE_CLUSTER = 22, 60
ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = 24, 25, 26, 28

FETCH_FIRST_WITH_ENDPOINTS = 16
# The newest version the proxy lets clients negotiate for the APIs it must read; Produce 13 names topics
# by id only. A newer broker's higher versions are clipped from its ApiVersions answer.
_LAST_READ = {PRODUCE: 12}
_WITH_WORDS = (
    FIND_COORDINATOR, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT,
)  # fmt: skip
_READ = (PRODUCE, FETCH, METADATA, DESCRIBE_CLUSTER, *_WITH_WORDS)

_CORRELATION = struct.Struct(">i")
_SIZE = struct.Struct(">i")


def request_event(frame: bytes, connection: int, node: str) -> tuple[RequestHeader, WireEvent]:
    """The header of a client's frame and the event that tells of it. Raises PeerError."""
    header = decode_request_header(frame)
    event = WireEvent(
        Direction.REQUEST, api_name(header.api_key), header.api_version, header.correlation_id,
        connection, node, header.client_id, len(frame),
    )  # fmt: skip
    if header.api_key in _WITH_WORDS:
        return header, replace(event, said=_words(header, frame))
    if header.api_key != PRODUCE:
        return header, event
    try:
        message = ProduceRequest.decode(header.api_version, frame, header.body_position)
        return header, replace(event, acks=message.acks, batches=tuple(_batches_of(message)))
    except OncelogError as error:
        return header, replace(event, detail=f"not readable: {error}")


def _words(header: RequestHeader, frame: bytes) -> str:
    try:
        request = API_BY_KEY[header.api_key].request
        return words_of_request(request.decode(header.api_version, frame, header.body_position))
    except OncelogError as error:
        return f"not readable: {error}"


def _batches_of(message: ProduceRequest) -> Iterator[BatchSummary]:
    for topic in message.topic_data:
        for partition in topic.partition_data:
            if partition.records is None:
                continue
            for _, header in iter_batches(partition.records):
                yield BatchSummary(
                    topic.name, partition.index, header.producer_id, header.producer_epoch,
                    header.base_sequence, header.last_sequence, header.records_count, header.size_bytes,
                )  # fmt: skip


def correlation_of(frame: bytes) -> int | None:
    """The correlation id of a response frame; None when it is too short to have one."""
    return int(_CORRELATION.unpack_from(frame)[0]) if len(frame) >= 4 else None


def read_answer(header: RequestHeader, frame: bytes) -> Message | None:
    """The decoded answer where the proxy has to look into it, else None."""
    key, version = header.api_key, header.api_version
    if key not in _READ and key != API_VERSIONS:
        return None
    if key == FETCH and version < FETCH_FIRST_WITH_ENDPOINTS:
        return None
    try:
        _, message = decode_response(API_BY_KEY[key].response, version, frame)
    except OncelogError:
        # For example an ApiVersions refusal, whose body is always version 0: it passes as it came.
        return None
    return message


def response_event(request: WireEvent, frame: bytes, message: Message | None) -> WireEvent:
    """The event of the answer to `request`."""
    event = replace(
        request, direction=Direction.RESPONSE, size_bytes=len(frame), batches=(), detail="",
        error_code=int(getattr(message, "error_code", 0)), said=words_of_answer(message),
    )  # fmt: skip
    if isinstance(message, ProduceResponse):
        return replace(event, outcomes=tuple(_outcomes_of(message)))
    producer_id = getattr(message, "producer_id", -1)
    if producer_id >= 0 and message is not None:
        return replace(event, producer=(producer_id, message.producer_epoch))  # type: ignore[attr-defined]
    return event


def _outcomes_of(message: ProduceResponse) -> Iterator[Outcome]:
    for topic in message.responses:
        for part in topic.partition_responses:
            offset = part.base_offset if part.base_offset >= 0 else None
            yield Outcome(topic.name, part.index, part.error_code, offset)


def addresses_of(message: Message | None) -> list[Any]:
    """The parts of an answer that name a broker's `host` and `port`, to be rewritten in place."""
    parts: list[Any] = [
        *getattr(message, "brokers", ()),
        *getattr(message, "coordinators", ()),
        *getattr(message, "node_endpoints", ()),
    ]
    if hasattr(message, "host"):
        parts.append(message)
    return [part for part in parts if part.host and part.port > 0]


def clip_versions(message: Message) -> bool:
    """Lower an ApiVersions answer to what the proxy can read; whether anything changed."""
    changed = False
    for row in getattr(message, "api_keys", ()):
        if row.api_key not in _READ:
            continue
        last = _LAST_READ.get(row.api_key, API_BY_KEY[row.api_key].last_version)
        if row.min_version <= last < row.max_version:
            row.max_version, changed = last, True
    return changed


def encode_answer(header: RequestHeader, message: Message) -> bytes:
    """The frame of an answer, without its size prefix."""
    return encode_response(message, header.api_version, header.correlation_id)[_SIZE.size :]


def forged_error(header: RequestHeader, request: WireEvent, code: int) -> tuple[bytes, WireEvent]:
    """A Produce answer that gives `code` to every partition of the request, and its event."""
    partitions: dict[str, set[int]] = {}
    for batch in request.batches:
        partitions.setdefault(batch.topic, set()).add(batch.partition)
    part = ProduceResponse.PartitionProduceResponse
    answer = ProduceResponse(
        responses=[
            ProduceResponse.TopicProduceResponse(
                name=topic,
                partition_responses=[part(index=i, error_code=code, base_offset=-1) for i in sorted(indexes)],
            )
            for topic, indexes in partitions.items()
        ]
    )
    frame = encode_answer(header, answer)
    return frame, response_event(request, frame, answer)
