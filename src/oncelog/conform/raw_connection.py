"""A blocking connection that sends requests as given, and reads the responses in their order.

Scenarios send wrong requests on purpose. They check which responses a connection gets, in which order, and
when it ends. The clients of this library hide these details, so scenarios use sockets. Only TLS and SASL are
shared with the clients.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field, replace
from typing import Any

from oncelog.client.connection.core import ConnectionCore
from oncelog.client.connection.security import PLAINTEXT, ClientSecurity, tls_failed
from oncelog.config import ADMIN
from oncelog.conform.deadline import Deadline
from oncelog.conform.values import Mismatch
from oncelog.errors import DisconnectedError, NotConnectedError, TimedOut
from oncelog.settings import Settings
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.messages import API_BY_KEY, Api, Message

MAX_FRAME_BYTES = 1 << 24
"""Maximum size of an accepted response. Scenarios fetch at most 1 MB."""
_RECEIVE_BYTES = 1 << 16
_SHORTEST_WAIT_S = 0.001
"""The minimum timeout of a socket, because a socket with a timeout of 0 would not block."""
_SIZE = struct.Struct(">i")


class NoAnswer(Mismatch):
    """The broker did not answer in time, or ended the connection instead of answering."""


class Unsupported(Exception):
    """The broker lacks a version or feature that a scenario needs. The text is the reason why the scenario is
    skipped.
    """


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a broker, and how a client connects to it."""

    host: str
    port: int
    settings: Settings = field(default_factory=lambda: ADMIN.parse({}))
    security: ClientSecurity = PLAINTEXT

    @property
    def peer(self) -> str:
        return f"{self.host}:{self.port}"

    def at(self, host: str, port: int) -> Endpoint:
        """Return the endpoint of another address with the same settings."""
        return replace(self, host=host, port=port)


class Offer:
    """The API versions and the finalized features that a broker reported."""

    def __init__(self, core: ConnectionCore) -> None:
        self._core = core
        self.features = core.features

    def check(self, api: Api, version: int) -> None:
        """Raise Unsupported unless the broker offers this version."""
        offered = self._core.supported_versions(api)
        if offered is None:
            raise Unsupported(f"the broker does not offer {api.name}")
        lowest, highest = offered
        if not lowest <= version <= highest:
            raise Unsupported(f"the broker offers {api.name} {lowest}-{highest}, not {version}")

    def newest(self, api: Api, limit: int) -> int:
        """Return the highest version that the broker offers and that is not above `limit`.

        Raises Unsupported if there is none.
        """
        offered = self._core.supported_versions(api)
        version = limit if offered is None else min(limit, offered[1])
        self.check(api, version)
        return version


class RawConnection:
    """A connection to one broker. No wait lasts beyond the deadline."""

    def __init__(self, endpoint: Endpoint, deadline: Deadline) -> None:
        """Connect, and authenticate if SASL is configured.

        Raises NotConnectedError, AuthenticationError, DisconnectedError, PeerError and TimedOut.
        """
        self._endpoint, self._deadline = endpoint, deadline
        self._core: ConnectionCore | None = None
        """The negotiated versions and the state of SASL; None before negotiation."""
        self._correlation_id = 0
        setup = deadline.within(_setup_s(endpoint))
        self._socket = _connect(endpoint, setup)
        if endpoint.security.credentials is not None:
            self._negotiate(setup)

    def close(self) -> None:
        self._socket.close()

    def offer(self) -> Offer:
        """Return the versions and features that the broker offers. The first call asks the broker, and raises
        the same exceptions as the constructor.
        """
        return Offer(self._core or self._negotiate(self._deadline.within(_setup_s(self._endpoint))))

    def _negotiate(self, deadline: Deadline) -> ConnectionCore:
        endpoint = self._endpoint
        core = ConnectionCore(
            endpoint.settings["client.id"],
            endpoint.peer,
            max_frame_bytes=MAX_FRAME_BYTES,
            credentials=endpoint.security.credentials,
        )
        try:
            to_write = core.negotiate(_now_ms(), deadline.left_s() * 1000)
            while not core.is_ready:
                if to_write:
                    self._send(to_write, deadline)
                data = self._receive(_RECEIVE_BYTES, deadline)
                if not data:
                    raise DisconnectedError(
                        f"{endpoint.peer} ended the connection before it answered ApiVersions; check that a "
                        "Kafka broker listens there and that security.protocol matches the listener"
                    )
                to_write = core.receive(data, _now_ms())[1]
        except BaseException as error:
            self.close()
            if isinstance(error, NoAnswer):
                raise TimedOut(
                    f"{endpoint.peer} accepted the connection and did not answer; check that a Kafka broker "
                    "listens there and that security.protocol matches the listener"
                ) from error
            raise
        self._core = core
        return core

    # --- requests

    def send(self, message: Message, version: int) -> int:
        """Write a request and return its correlation id."""
        self._correlation_id += 1
        client_id = self._endpoint.settings["client.id"]
        self.write(encode_request(message, version, self._correlation_id, client_id))
        return self._correlation_id

    def write(self, data: bytes) -> None:
        """Write raw bytes. Raises NoAnswer if the broker does not accept them."""
        self._send(data, self._deadline)

    def read_frame(self) -> bytes | None:
        """Return the next frame without its size, or None if the broker has closed the connection.

        Raises NoAnswer if no frame arrives in time, and Mismatch if the frame is too large.
        """
        head = self._read(_SIZE.size)
        if head is None:
            return None
        (size,) = _SIZE.unpack(head)
        if not 0 <= size <= MAX_FRAME_BYTES:
            raise Mismatch(f"the broker sent a frame of {size} bytes")
        return self._read(size)

    def receive(self, response_cls: type[Any], version: int) -> tuple[int, Any]:
        """Return the correlation id and the response in the next frame. Raises NoAnswer if there is none, and
        PeerError if it cannot be decoded.
        """
        frame = self.read_frame()
        if frame is None:
            raise NoAnswer("the broker ended the connection")
        return decode_response(response_cls, version, frame)

    def ask(self, message: Message, version: int) -> Any:
        """Send a request and return its response. Raises NoAnswer and PeerError, and Mismatch if the next
        response belongs to another request.
        """
        sent = self.send(message, version)
        correlation_id, response = self.receive(API_BY_KEY[message.api.key].response, version)
        if correlation_id != sent:
            raise Mismatch(f"the response is to request {correlation_id}, not to request {sent}")
        return response

    # --- bytes

    def _send(self, data: bytes, deadline: Deadline) -> None:
        self._socket.settimeout(_wait_s(deadline))
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise NoAnswer("the broker did not read the request in time") from None
        except OSError as error:
            raise NoAnswer(f"the broker ended the connection ({_reason(error)})") from error

    def _read(self, size: int) -> bytes | None:
        # Let the buffer grow with the bytes received. Do not allocate the size that the broker claims, which
        # may be wrong.
        parts = bytearray()
        while len(parts) < size:
            data = self._receive(min(size - len(parts), _RECEIVE_BYTES), self._deadline)
            if not data:
                return None
            parts += data
        return bytes(parts)

    def _receive(self, max_bytes: int, deadline: Deadline) -> bytes:
        """Wait for bytes and return at most `max_bytes`; b"" if the broker has closed the connection. Raises
        NoAnswer if none arrive before the deadline.
        """
        left_s = deadline.left_s()
        self._socket.settimeout(max(left_s, _SHORTEST_WAIT_S))
        try:
            # Do not receive after the deadline: a broker that keeps sending single bytes must not extend the
            # run.
            data = self._socket.recv(max_bytes) if left_s else None
        except TimeoutError:
            data = None
        except OSError:
            return b""
        if data is None:
            raise NoAnswer("the broker did not answer in time")
        return data


def _connect(endpoint: Endpoint, deadline: Deadline) -> socket.socket:
    """Return a connected socket, with TLS if it is configured."""
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=_wait_s(deadline))
    except OSError as error:
        raise _not_connected(endpoint, error) from error
    context = endpoint.security.context
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_wait_s(deadline))
        return sock if context is None else context.wrap_socket(sock, server_hostname=endpoint.host)
    except OSError as error:
        sock.close()
        if isinstance(error, ssl.SSLError):
            raise tls_failed(endpoint.peer, error) from error
        raise _not_connected(endpoint, error) from error


def _not_connected(endpoint: Endpoint, error: OSError) -> NotConnectedError:
    return NotConnectedError(
        f"cannot connect to {endpoint.peer}: {_reason(error)}; check bootstrap.servers, that the broker "
        f"runs, and that security.protocol={endpoint.settings['security.protocol']} matches the listener"
    )


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    is_system = error.errno is not None and error.errno > 0
    return (os.strerror(error.errno) if is_system and error.errno else str(error)) or type(error).__name__


def _setup_s(endpoint: Endpoint) -> float:
    return float(endpoint.settings["socket.connection.setup.timeout.ms"] / 1000)


def _wait_s(deadline: Deadline) -> float:
    return max(deadline.left_s(), _SHORTEST_WAIT_S)


def _now_ms() -> float:
    return time.monotonic() * 1000
