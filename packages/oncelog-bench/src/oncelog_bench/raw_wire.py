"""Connections of the raw generators: blocking sockets that send and receive whole frames."""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Sequence

from oncelog.errors import OncelogError, PeerError
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.message import Message
from oncelog.wire.messages import FindCoordinatorRequest, InitProducerIdRequest

CLIENT_ID = "oncelog-bench"
TIMEOUT_S = 60.0
_SIZE = struct.Struct(">i")


def connect(bootstrap_servers: str) -> socket.socket:
    """Open a connection to the only broker."""
    host, _, port = bootstrap_servers.rpartition(":")
    connected = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def receive_frame(connected: socket.socket) -> bytearray:
    """Return one whole frame, without its length prefix."""
    (size,) = _SIZE.unpack(receive_into(connected, bytearray(4)))
    return receive_into(connected, bytearray(size))


def receive_into(connected: socket.socket, buffer: bytearray) -> bytearray:
    """Fill the buffer from the socket. Raises PeerError if the broker closes the connection first."""
    view = memoryview(buffer)
    while view:
        taken = connected.recv_into(view)
        if not taken:
            raise PeerError("the broker closed the connection of a raw generator")
        view = view[taken:]
    return buffer


def exchange(connected: socket.socket, message: Message, version: int) -> Message:
    """Send one request and return its response."""
    connected.sendall(encode_request(message, version, 0, CLIENT_ID))
    return decode_response(message.api.response, version, receive_frame(connected))[1]


def new_producer_id(connected: socket.socket, transactional_id: str | None = None) -> tuple[int, int]:
    """Return a new producer id and its epoch."""
    if transactional_id is not None:
        # This request makes Apache Kafka create the topic __transaction_state, which InitProducerId needs.
        exchange(connected, FindCoordinatorRequest(key_type=1, coordinator_keys=[transactional_id]), 4)
    request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000)
    for _ in range(100):
        response = exchange(connected, request, 4)
        if not response.error_code:  # type: ignore[attr-defined]
            return response.producer_id, response.producer_epoch  # type: ignore[attr-defined]
        # Apache Kafka cannot assign producer ids immediately after its start, so retry.
        time.sleep(0.05)
    raise OncelogError("the broker assigned no producer id within 5 s")


def quantiles(latencies_ms: Sequence[float]) -> dict[str, float]:
    """Return `p50_ms`, `p99_ms` and `p999_ms` of `latencies_ms`, or nothing for fewer than two values."""
    if len(latencies_ms) < 2:
        return {}
    cuts = statistics.quantiles(latencies_ms, n=1000, method="inclusive")
    return {"p50_ms": cuts[499], "p99_ms": cuts[989], "p999_ms": cuts[998]}
