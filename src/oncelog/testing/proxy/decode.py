"""Decodes the parts of messages that the proxy needs: batch headers, error codes, addresses, transactions.

All other messages are forwarded without being decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from oncelog.errors import OncelogError
from oncelog.testing.proxy.apis import api_name
from oncelog.testing.proxy.events import BatchSummary, Direction, Outcome, WireEvent
from oncelog.testing.proxy.group_messages import member_request
from oncelog.testing.proxy.txn_messages import first_error_code, txn_request
from oncelog.wire.batch import iter_batches
from oncelog.wire.frames import RequestHeader, decode_request_header, decode_response, encode_response
from oncelog.wire.messages import API_BY_KEY, FetchRequest, Message, ProduceRequest, ProduceResponse

PRODUCE, FETCH, METADATA, FIND_COORDINATOR, JOIN_GROUP, API_VERSIONS = 0, 1, 3, 10, 11, 18
INIT_PRODUCER_ID, DESCRIBE_CLUSTER = 22, 60
ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = 24, 25, 26, 28
CONSUMER_GROUP_HEARTBEAT = 68

FETCH_FIRST_WITH_ENDPOINTS = 16
_MAX_VERSIONS = {PRODUCE: 12}
"""Highest version that clients may use for an API. Produce 13 names topics only by id (KIP-516)."""
_TRANSACTIONAL = (
    FIND_COORDINATOR, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT,
)  # fmt: skip
_DECODED = (PRODUCE, FETCH, METADATA, DESCRIBE_CLUSTER, *_TRANSACTIONAL)
_DECODED_REQUESTS = (PRODUCE, FETCH, JOIN_GROUP, CONSUMER_GROUP_HEARTBEAT, *_TRANSACTIONAL)

_TRANSACTIONAL_NAMES = frozenset(map(api_name, _TRANSACTIONAL))
_CORRELATION = struct.Struct(">i")
_SIZE = struct.Struct(">i")


def request_event(frame: bytes, connection: int, node: str) -> tuple[RequestHeader, WireEvent]:
    """Return the header and the event of a client's frame. Raises PeerError if the header is malformed."""
    header = decode_request_header(frame)
    event = WireEvent(
        Direction.REQUEST, api_name(header.api_key), header.api_version, header.correlation_id,
        connection, node, header.client_id, len(frame),
    )  # fmt: skip
    try:
        return header, _with_fields(header, event, frame)
    except OncelogError as error:
        return header, replace(event, decode_error=f"not readable: {error}")


def _with_fields(header: RequestHeader, event: WireEvent, frame: bytes) -> WireEvent:
    """Return the event with the fields of its request that the proxy decodes."""
    if header.api_key not in _DECODED_REQUESTS:
        return event
    request = API_BY_KEY[header.api_key].request
    message = request.decode(header.api_version, frame, header.body_position)
    if isinstance(message, ProduceRequest):
        return replace(event, acks=message.acks, batches=tuple(_batches_of(message)))
    if isinstance(message, FetchRequest):
        return replace(event, isolation_level=message.isolation_level)
    return replace(event, txn=txn_request(message), member=member_request(message))


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
    """Return the correlation id of a response frame; None if the frame is too short."""
    return int(_CORRELATION.unpack_from(frame)[0]) if len(frame) >= 4 else None


def decode_known_response(header: RequestHeader, frame: bytes) -> Message | None:
    """Return the decoded response; None if the proxy does not need it or cannot decode it."""
    key, version = header.api_key, header.api_version
    if key not in _DECODED and key != API_VERSIONS:
        return None
    if key == FETCH and version < FETCH_FIRST_WITH_ENDPOINTS:
        return None
    try:
        _, message = decode_response(API_BY_KEY[key].response, version, frame)
    except OncelogError:
        # For example, an ApiVersions response with UNSUPPORTED_VERSION always has a body of version 0. Such a
        # response is forwarded unchanged.
        return None
    return message


def response_event(request: WireEvent, frame: bytes, message: Message | None) -> WireEvent:
    """Return the event of the response to `request`. `message`: the decoded response, or None."""
    event = replace(
        request,
        direction=Direction.RESPONSE,
        size_bytes=len(frame),
        batches=(),
        detail="",
        decode_error="",
        error_code=int(getattr(message, "error_code", 0)),
    )
    if message is not None and request.api in _TRANSACTIONAL_NAMES:
        event = replace(event, txn_error_code=first_error_code(message))
    if isinstance(message, ProduceResponse):
        return replace(event, outcomes=tuple(_outcomes_of(message)))
    producer_id = getattr(message, "producer_id", -1)
    if producer_id >= 0 and message is not None:
        return replace(event, producer=(producer_id, message.producer_epoch))  # type: ignore[attr-defined]
    return event


def _outcomes_of(message: ProduceResponse) -> Iterator[Outcome]:
    for topic in message.responses:
        for partition in topic.partition_responses:
            offset = partition.base_offset if partition.base_offset >= 0 else None
            yield Outcome(topic.name, partition.index, partition.error_code, offset)


def addresses_of(message: Message | None) -> list[Any]:
    """Return the structs of a response that have a broker's `host` and `port`. The proxy replaces both."""
    parts: list[Any] = [
        *getattr(message, "brokers", ()),
        *getattr(message, "coordinators", ()),
        *getattr(message, "node_endpoints", ()),
    ]
    if hasattr(message, "host"):
        parts.append(message)
    return [part for part in parts if part.host and part.port > 0]


def clip_versions(message: Message) -> bool:
    """Lower the versions in an ApiVersions response to those that the proxy can decode.

    Return True if any version was lowered.
    """
    has_changed = False
    for row in getattr(message, "api_keys", ()):
        if row.api_key not in _DECODED:
            continue
        max_version = _MAX_VERSIONS.get(row.api_key, API_BY_KEY[row.api_key].last_version)
        if row.min_version <= max_version < row.max_version:
            row.max_version, has_changed = max_version, True
    return has_changed


def encode_response_frame(header: RequestHeader, message: Message) -> bytes:
    """Return the frame of a response, without its size prefix."""
    return encode_response(message, header.api_version, header.correlation_id)[_SIZE.size :]


def forged_error(header: RequestHeader, request: WireEvent, code: int) -> tuple[bytes, WireEvent]:
    """Return a Produce response with error `code` for every partition of the request, and its event."""
    partitions: dict[str, set[int]] = {}
    for batch in request.batches:
        partitions.setdefault(batch.topic, set()).add(batch.partition)
    result = ProduceResponse.PartitionProduceResponse
    response = ProduceResponse(
        responses=[
            ProduceResponse.TopicProduceResponse(
                name=topic,
                partition_responses=[
                    result(index=index, error_code=code, base_offset=-1) for index in sorted(indexes)
                ],
            )
            for topic, indexes in partitions.items()
        ]
    )
    frame = encode_response_frame(header, response)
    return frame, response_event(request, frame, response)
