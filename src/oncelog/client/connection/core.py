"""One connection to a broker, without its socket: versions, SASL, and the response to each request.

A broker responds in the order of the requests, so a response belongs to the oldest request in flight. If the
correlation ids differ, the connection is unusable (PeerError).

The owner of the socket writes the bytes that `negotiate` and `send` return. It passes received bytes to
`receive`, or reads into the buffer of `room` and then calls `filled`. After a failure, `abandon` returns the
requests whose outcome is unknown. With credentials, the connection is ready once the broker has authenticated
the client.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from oncelog.client.connection.sasl import Credentials, Exchange, begin
from oncelog.errors import AuthenticationError, PeerError, UnsupportedVersion, error_for_code, raise_for_code
from oncelog.wire.frames import FrameReader, decode_response, encode_large_request
from oncelog.wire.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from oncelog.wire.primitives import Buffer

MAX_FRAME_BYTES = 2**30
"""Largest response accepted.

A peer that sends text (HTTP, SSH) is detected: the first four bytes of text, read as a size, are larger.
"""

_FIRST_API_VERSIONS_VERSION = 3
"""Version of the first ApiVersions request. Brokers before Kafka 2.4 answer it with UNSUPPORTED_VERSION."""

_UNSUPPORTED_VERSION = 35
_SESSION_SHARE = 0.85
"""The client authenticates again after this fraction of a session's lifetime. Java's client: 0.85 to 0.95."""
_API_VERSIONS_KEY = 18
CLIENT_SOFTWARE_NAME, CLIENT_SOFTWARE_VERSION = "oncelog", "0.9.2"


class Completed(NamedTuple):
    """A response, the token of its request, and the time between request and response in milliseconds."""

    token: Any
    response: Any
    latency_ms: float


class _InFlight(NamedTuple):
    correlation_id: int
    token: Any
    """The token that the caller of `send` passed; None for a request of negotiation or authentication."""
    api_name: str
    response_class: Any
    version: int
    sent_ms: float
    deadline_ms: float


class ConnectionCore:
    """Version negotiation, authentication and the requests in flight of one connection.

    `peer` ("host:port") is used in error texts only. All times are milliseconds of one clock of the caller's
    choice.
    """

    def __init__(
        self,
        client_id: str,
        peer: str,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        credentials: Credentials | None = None,
    ) -> None:
        self.peer = peer
        self.features: dict[str, int] = {}
        """The cluster's feature levels, as the broker reported them when the connection was opened."""
        self.reauthentication_due_ms: float | None = None
        """Time at which to call `reauthenticate`; None if the session does not expire."""
        self._client_id = client_id
        self._reader = FrameReader(max_frame_bytes, keeps_size=True)
        self._next_correlation_id = 0
        self._in_flight: deque[_InFlight] = deque()
        """Requests that wait for their response, oldest first."""
        self._undelivered: list[Any] = []
        """Tokens of requests whose response was decoded but not returned, because a later response of the
        same read ended the connection.
        """
        self._broker_versions: dict[int, tuple[int, int]] | None = None
        """Lowest and highest version that the broker supports, by API key; None before negotiation."""
        self._api_versions_version: int | None = None
        """Version of the latest ApiVersions request."""
        self._credentials = credentials
        self._exchange: Exchange | None = None
        """The SASL exchange in progress; None if there is none."""

    @property
    def is_ready(self) -> bool:
        """True if requests may be sent: negotiation and authentication are done."""
        return self._broker_versions is not None and self._exchange is None

    @property
    def has_credentials(self) -> bool:
        """True if this client authenticates itself with SASL."""
        return self._credentials is not None

    @property
    def in_flight_count(self) -> int:
        return len(self._in_flight)

    def next_deadline_ms(self) -> float | None:
        """Return the earliest deadline of the requests in flight; None if there are none."""
        return min((request.deadline_ms for request in self._in_flight), default=None)

    def expired(self, now_ms: float) -> list[Any]:
        """Return the tokens of requests past their deadline. The caller must then close the connection."""
        return [request.token for request in self._in_flight if request.deadline_ms <= now_ms]

    def describe(self, token: Any) -> str:
        """Return the API name of a request in flight, for error texts."""
        return next((request.api_name for request in self._in_flight if request.token is token), "request")

    def abandon(self) -> list[Any]:
        """Drop all requests without a delivered response, and return their tokens.

        Their outcome is unknown to the caller.
        """
        in_flight = [request.token for request in self._in_flight if request.token is not None]
        tokens, self._undelivered = self._undelivered + in_flight, []
        self._in_flight.clear()
        return tokens

    def negotiate(self, now_ms: float, timeout_ms: float) -> bytes:
        """Return the first bytes to write on a connection: an ApiVersions request (KIP-35, KIP-511)."""
        self._api_versions_version = _FIRST_API_VERSIONS_VERSION
        return self._encode_api_versions(now_ms, timeout_ms)

    def _encode_api_versions(self, now_ms: float, timeout_ms: float) -> bytes:
        assert self._api_versions_version is not None
        message = ApiVersionsRequest(
            client_software_name=CLIENT_SOFTWARE_NAME, client_software_version=CLIENT_SOFTWARE_VERSION
        )
        version = self._api_versions_version
        pieces = self._encode(message, version, now_ms, timeout_ms, token=None, expects_response=True)
        return b"".join(pieces)

    def supported_versions(self, api: Any) -> tuple[int, int] | None:
        """Return the lowest and highest version of an API that the broker supports; None if there is none."""
        return (self._broker_versions or {}).get(api.key)

    def version_for(self, api: Any, min_version: int | None = None, max_version: int | None = None) -> int:
        """Return the highest version of `api` that both sides support, between `min_version` and
        `max_version`.

        Raises UnsupportedVersion if there is none.
        """
        broker_min, broker_max = (self._broker_versions or {}).get(api.key, (0, -1))
        lowest = max(api.first_version, min_version or 0)
        highest = api.last_version if max_version is None else min(api.last_version, max_version)
        version = min(broker_max, highest)
        if version < max(broker_min, lowest):
            served = f"in versions {broker_min}-{broker_max}" if broker_max >= 0 else "not at all"
            raise UnsupportedVersion(
                f"{self.peer} supports {api.name} {served}; this client needs one of the "
                f"versions {lowest}-{highest}"
            )
        return int(version)

    def send(
        self,
        message: Any,
        now_ms: float,
        *,
        token: Any,
        timeout_ms: float,
        min_version: int | None = None,
        max_version: int | None = None,
        expects_response: bool = True,
    ) -> list[Buffer]:
        """Encode a request and return the pieces of bytes to write.

        A request that expects no response (acks=0) is not in flight afterwards. Large records are separate
        pieces and not copied: keep them unchanged until they are written. Raises UnsupportedVersion, and
        MisuseError for a message that cannot be encoded.
        """
        version = self.version_for(message.api, min_version, max_version)
        return self._encode(
            message, version, now_ms, timeout_ms, token=token, expects_response=expects_response
        )

    def _encode(
        self,
        message: Any,
        version: int,
        now_ms: float,
        timeout_ms: float,
        *,
        token: Any,
        expects_response: bool,
    ) -> list[Buffer]:
        correlation_id = self._next_correlation_id
        pieces = encode_large_request(message, version, correlation_id, self._client_id)
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        if expects_response:
            api = message.api
            self._in_flight.append(
                _InFlight(correlation_id, token, api.name, api.response, version, now_ms, now_ms + timeout_ms)
            )
        return pieces

    def receive(self, data: bytes | bytearray | memoryview, now_ms: float) -> tuple[list[Completed], bytes]:
        """Process received bytes. Return the responses that are now complete, and the next bytes to write.

        There are bytes to write only during negotiation and authentication. Raises PeerError if the broker
        breaks the protocol, BrokerError if it refuses negotiation, and AuthenticationError if one side does
        not accept the other's credentials.
        """
        return self._process(self._frames(data), now_ms)

    def room(self, least_bytes: int) -> memoryview | None:
        """Return a buffer for the missing bytes of a large response; None if fewer than `least_bytes` are
        missing.

        After reading from the socket into the buffer, call `filled`.
        """
        return self._reader.room(least_bytes)

    def filled(self, size_bytes: int, now_ms: float) -> tuple[list[Completed], bytes]:
        """Process bytes that were read into the buffer of `room`.

        Returns and raises the same as `receive`.
        """
        frame = self._reader.filled(size_bytes)
        return self._process([] if frame is None else [frame], now_ms)

    def _process(self, frames: list[memoryview], now_ms: float) -> tuple[list[Completed], bytes]:
        completed: list[Completed] = []
        to_write = b""
        try:
            for frame in frames:
                if self._broker_versions is None:
                    to_write += self._process_versions(frame, now_ms)
                elif self._exchange is not None and self._in_flight and self._in_flight[0].token is None:
                    to_write += self._process_sasl(self._exchange, frame, now_ms)
                else:
                    completed.append(self._process_response(frame, now_ms))
        except Exception:
            # The caller gets no result of this call and cannot complete these requests. So `abandon` returns
            # their tokens. See test_responses_before_a_malformed_one_are_abandoned.
            self._undelivered += [response.token for response in completed]
            raise
        return completed, to_write

    def _frames(self, data: bytes | bytearray | memoryview) -> list[memoryview]:
        try:
            return self._reader.feed(data)
        except PeerError as error:
            hint = (
                ""
                if self.is_ready
                else (
                    "; check that a Kafka broker listens there and that security.protocol matches "
                    "the listener"
                )
            )
            raise PeerError(f"{self.peer} sent a malformed response: {error}{hint}") from error

    def _oldest(self, frame: memoryview) -> _InFlight:
        """Return the oldest request in flight. Raises PeerError if the frame is not a response to it."""
        correlation_id = int.from_bytes(frame[:4], "big", signed=True)
        if not self._in_flight:
            raise PeerError(
                f"{self.peer} sent a response (correlation id {correlation_id}) while no request "
                "was in flight"
            )
        request = self._in_flight[0]
        if len(frame) < 4 or correlation_id != request.correlation_id:
            raise PeerError(
                f"{self.peer} sent a response with correlation id {correlation_id}; expected "
                f"{request.correlation_id} ({request.api_name}), because responses come in "
                "the order of requests"
            )
        return request

    def _process_response(self, frame: memoryview, now_ms: float) -> Completed:
        request = self._oldest(frame)
        try:
            _, response = decode_response(request.response_class, request.version, frame)
        except PeerError as error:
            raise PeerError(
                f"{self.peer} sent a malformed {request.api_name} v{request.version} response: {error}"
            ) from error
        self._in_flight.popleft()
        return Completed(request.token, response, now_ms - request.sent_ms)

    def _process_versions(self, frame: memoryview, now_ms: float) -> bytes:
        """Store the broker's versions and return the next bytes to write.

        If the broker refuses our version of ApiVersions, the bytes repeat the request in a version that the
        broker supports.
        """
        request = self._oldest(frame)
        is_refused = int.from_bytes(frame[4:6], "big", signed=True) == _UNSUPPORTED_VERSION
        version = 0 if is_refused else request.version
        _, response = decode_response(ApiVersionsResponse, version, frame)
        self._in_flight.popleft()
        broker_versions = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
        if is_refused and self._api_versions_version:
            broker_max = broker_versions.get(_API_VERSIONS_KEY, (0, 0))[1]
            self._api_versions_version = min(broker_max, self._api_versions_version - 1)
            return self._encode_api_versions(now_ms, request.deadline_ms - request.sent_ms)
        raise_for_code(response.error_code, f"{self.peer} refused ApiVersions")
        self._broker_versions = broker_versions
        self.features = {row.name: row.max_version_level for row in response.finalized_features}
        return self._authenticate(now_ms, request.deadline_ms - now_ms) if self._credentials else b""

    def reauthenticate(self, now_ms: float, timeout_ms: float) -> bytes:
        """Return the bytes that begin re-authentication (KIP-368).

        The connection is not ready until re-authentication is done. Raises AuthenticationError if the token
        cannot be read.
        """
        return self._authenticate(now_ms, timeout_ms)

    def _authenticate(self, now_ms: float, timeout_ms: float) -> bytes:
        assert self._credentials is not None
        self._exchange = begin(self._credentials)
        self.reauthentication_due_ms = None
        request = SaslHandshakeRequest(mechanism=self._credentials.mechanism)
        return self._send_sasl(request, now_ms, timeout_ms)

    def _send_sasl(self, message: Any, now_ms: float, timeout_ms: float) -> bytes:
        # Version 1 of SaslHandshake announces SaslAuthenticate requests instead of raw SASL bytes (KIP-152).
        min_version = 1 if isinstance(message, SaslHandshakeRequest) else None
        return b"".join(
            self.send(message, now_ms, token=None, timeout_ms=timeout_ms, min_version=min_version)
        )

    def _process_sasl(self, exchange: Exchange, frame: memoryview, now_ms: float) -> bytes:
        """Process one response of the authentication. Return the next bytes to write, none after the last
        response. Raises AuthenticationError if the broker refuses the mechanism or the credentials.
        """
        left_ms = self._in_flight[0].deadline_ms - now_ms if self._in_flight else 0.0
        response = self._process_response(frame, now_ms).response
        mechanism = self._credentials.mechanism if self._credentials else ""
        if isinstance(response, SaslHandshakeResponse):
            if response.error_code:
                offered = ", ".join(response.mechanisms) or "none"
                raise AuthenticationError(
                    f"{self.peer} does not enable sasl.mechanism={mechanism}; it offers {offered}"
                )
            return self._send_sasl(SaslAuthenticateRequest(auth_bytes=exchange.first()), now_ms, left_ms)
        assert isinstance(response, SaslAuthenticateResponse)
        if response.error_code:
            error = error_for_code(response.error_code, response.error_message or "")
            raise AuthenticationError(f"{self.peer} refused sasl.mechanism={mechanism}: {error}")
        reply = exchange.reply(response.auth_bytes)
        if reply is not None:
            return self._send_sasl(SaslAuthenticateRequest(auth_bytes=reply), now_ms, left_ms)
        self._exchange = None
        if response.session_lifetime_ms > 0:
            self.reauthentication_due_ms = now_ms + response.session_lifetime_ms * _SESSION_SHARE
        return b""
