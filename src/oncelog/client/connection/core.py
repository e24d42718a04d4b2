"""One connection to a broker without its socket: versions, correlation ids, the order of answers.

Law: a broker answers in request order, so the answer that arrives belongs to the oldest
request in flight; any other correlation id is a PeerError and the connection cannot go on.
Whoever owns the socket writes what `hello` and `send` return and feeds what arrives to
`receive`, or puts it into `room`; after a failure it asks `abandon` for the requests whose
outcome is unknown. With credentials the connection is ready only when the broker knows who this is;
`log_in_again` says so once more in time.
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
"""Largest response taken. Text of another protocol (HTTP, SSH, ...) read as a size is above it."""

_FIRST_API_VERSIONS_VERSION = 3
"""Every broker since Kafka 2.4 knows it; older ones answer UNSUPPORTED_VERSION with their range."""

_UNSUPPORTED_VERSION = 35
_SESSION_SHARE = 0.85
"""Of a session's lifetime, after which the client says again who it is."""
_API_VERSIONS_KEY = 18
CLIENT_SOFTWARE_NAME, CLIENT_SOFTWARE_VERSION = "oncelog", "0.6.0"


class Completed(NamedTuple):
    """An answer, the token its request was sent with, and how long it took."""

    token: Any
    response: Any
    latency_ms: float


class _InFlight(NamedTuple):
    correlation_id: int
    token: Any
    api_name: str
    response_class: Any
    version: int
    sent_ms: float
    deadline_ms: float


class ConnectionCore:
    """Version negotiation and the queue of unanswered requests of one connection.

    `peer` ("host:port") only appears in error texts. Times are milliseconds of any one clock.
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
        self._client_id = client_id
        self._reader = FrameReader(max_frame_bytes)
        self._next_correlation_id = 0
        self._in_flight: deque[_InFlight] = deque()
        self._undelivered: list[Any] = []
        """Tokens of answers that were read together with one that ended the connection."""
        self._served: dict[int, tuple[int, int]] | None = None
        self.features: dict[str, int] = {}
        """The levels of the cluster's features, as the broker told them when the connection was made."""
        self._hello_version: int | None = None
        self._credentials = credentials
        self._exchange: Exchange | None = None
        self.login_due_ms: float | None = None
        """When to `log_in_again` at the latest; None: never."""

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent: the broker's versions are known, and it knows who this is."""
        return self._served is not None and self._exchange is None

    @property
    def in_flight_count(self) -> int:
        return len(self._in_flight)

    def next_deadline_ms(self) -> float | None:
        """When the first unanswered request times out; None with nothing in flight."""
        return min((request.deadline_ms for request in self._in_flight), default=None)

    def expired(self, now_ms: float) -> list[Any]:
        """Tokens of requests past their time. Their connection must be closed: order is lost otherwise."""
        return [request.token for request in self._in_flight if request.deadline_ms <= now_ms]

    def describe(self, token: Any) -> str:
        """The API name of an unanswered request, for error texts."""
        return next((r.api_name for r in self._in_flight if r.token is token), "request")

    def abandon(self) -> list[Any]:
        """Forget all requests in flight and give their tokens; their outcome is unknown."""
        in_flight = [request.token for request in self._in_flight if request.token is not None]
        tokens, self._undelivered = self._undelivered + in_flight, []
        self._in_flight.clear()
        return tokens

    def hello(self, now_ms: float, timeout_ms: float) -> bytes:
        """The first bytes on a connection: ApiVersions, in a version we expect to be known."""
        self._hello_version = _FIRST_API_VERSIONS_VERSION
        return self._encode_hello(now_ms, timeout_ms)

    def _encode_hello(self, now_ms: float, timeout_ms: float) -> bytes:
        assert self._hello_version is not None
        message = ApiVersionsRequest(
            client_software_name=CLIENT_SOFTWARE_NAME, client_software_version=CLIENT_SOFTWARE_VERSION
        )
        pieces = self._encode(message, self._hello_version, now_ms, timeout_ms, token=None, answered=True)
        return b"".join(pieces)

    def version_for(self, api: Any, min_version: int | None = None, max_version: int | None = None) -> int:
        """The highest version of `api` both sides know, in the limits. Raises UnsupportedVersion."""
        low, high = (self._served or {}).get(api.key, (0, -1))
        first = max(api.first_version, min_version or 0)
        last = api.last_version if max_version is None else min(api.last_version, max_version)
        version = min(high, last)
        if version < max(low, first):
            served = f"in versions {low}-{high}" if high >= 0 else "not at all"
            raise UnsupportedVersion(
                f"{self.peer} serves {api.name} {served}; this needs one of {first}-{last}"
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
        answered: bool = True,
    ) -> list[Buffer]:
        """Pieces to write now; `answered=False` (Produce with acks=0) leaves nothing in flight.

        Large records are pieces of their own, uncopied: they must stay as they are until written.
        """
        version = self.version_for(message.api, min_version, max_version)
        return self._encode(message, version, now_ms, timeout_ms, token=token, answered=answered)

    def _encode(
        self, message: Any, version: int, now_ms: float, timeout_ms: float, *, token: Any, answered: bool
    ) -> list[Buffer]:
        correlation_id = self._next_correlation_id
        data = encode_large_request(message, version, correlation_id, self._client_id)
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        if answered:
            api = message.api
            self._in_flight.append(
                _InFlight(correlation_id, token, api.name, api.response, version, now_ms, now_ms + timeout_ms)
            )
        return data

    def receive(self, data: bytes | bytearray | memoryview, now_ms: float) -> tuple[list[Completed], bytes]:
        """Take bytes from the socket: the answers they complete, and bytes to write (negotiation only).

        Raises PeerError when they break the protocol, BrokerError when negotiation is refused, and
        AuthenticationError when the broker does not believe who this is, or this not the broker.
        """
        return self._take(self._frames(data), now_ms)

    def room(self, least_bytes: int) -> memoryview | None:
        """Where the rest of a large answer belongs: `FrameReader.room`. Whoever fills it calls `filled`."""
        return self._reader.room(least_bytes)

    def filled(self, size_bytes: int, now_ms: float) -> tuple[list[Completed], bytes]:
        """`receive` of bytes that were put into the room."""
        frame = self._reader.filled(size_bytes)
        return self._take([] if frame is None else [frame], now_ms)

    def _take(self, frames: list[memoryview], now_ms: float) -> tuple[list[Completed], bytes]:
        completed: list[Completed] = []
        to_write = b""
        try:
            for frame in frames:
                if self._served is None:
                    to_write += self._take_versions(frame, now_ms)
                elif self._exchange is not None and self._in_flight and self._in_flight[0].token is None:
                    to_write += self._take_login(self._exchange, frame, now_ms)
                else:
                    completed.append(self._take_answer(frame, now_ms))
        except Exception:
            # Else nobody would complete them. See test_answers_before_one_that_cannot_be_read_are_abandoned.
            self._undelivered += [answer.token for answer in completed]
            raise
        return completed, to_write

    def _frames(self, data: bytes | bytearray | memoryview) -> list[memoryview]:
        try:
            return self._reader.feed(data)
        except PeerError as error:
            doubt = "" if self.is_ready else "; is it a Kafka broker, and security.protocol what it speaks?"
            raise PeerError(f"{self.peer} sent what is not the Kafka protocol: {error}{doubt}") from error

    def _oldest(self, frame: memoryview) -> _InFlight:
        correlation_id = int.from_bytes(frame[:4], "big", signed=True)
        if not self._in_flight:
            raise PeerError(f"{self.peer} answered (correlation id {correlation_id}) what nobody asked")
        request = self._in_flight[0]
        if len(frame) < 4 or correlation_id != request.correlation_id:
            raise PeerError(
                f"{self.peer} answered correlation id {correlation_id} where {request.correlation_id} "
                f"({request.api_name}) is due; answers must come in the order of requests"
            )
        return request

    def _take_answer(self, frame: memoryview, now_ms: float) -> Completed:
        request = self._oldest(frame)
        try:
            _, response = decode_response(request.response_class, request.version, frame)
        except PeerError as error:
            raise PeerError(f"{self.peer}: {request.api_name} v{request.version} answer: {error}") from error
        self._in_flight.popleft()
        return Completed(request.token, response, now_ms - request.sent_ms)

    def _take_versions(self, frame: memoryview, now_ms: float) -> bytes:
        """Note what the broker serves; a broker that refuses our version is asked again in its own."""
        request = self._oldest(frame)
        refused = int.from_bytes(frame[4:6], "big", signed=True) == _UNSUPPORTED_VERSION
        version = 0 if refused else request.version
        _, response = decode_response(ApiVersionsResponse, version, frame)
        self._in_flight.popleft()
        served = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
        if refused and self._hello_version:
            offered = served.get(_API_VERSIONS_KEY, (0, 0))[1]
            self._hello_version = min(offered, self._hello_version - 1)
            return self._encode_hello(now_ms, request.deadline_ms - request.sent_ms)
        raise_for_code(response.error_code, f"{self.peer} refused ApiVersions")
        self._served = served
        self.features = {row.name: row.max_version_level for row in response.finalized_features}
        return self._log_in(now_ms, request.deadline_ms - now_ms) if self._credentials else b""

    def log_in_again(self, now_ms: float, timeout_ms: float) -> bytes:
        """Bytes to write on a connection whose session is about to end (KIP-368); then it is not ready for
        a moment. Raises AuthenticationError when there is nothing to log in with.
        """
        return self._log_in(now_ms, timeout_ms)

    def _log_in(self, now_ms: float, timeout_ms: float) -> bytes:
        assert self._credentials is not None
        self._exchange = begin(self._credentials)
        self.login_due_ms = None
        return self._ask(SaslHandshakeRequest(mechanism=self._credentials.mechanism), now_ms, timeout_ms)

    def _ask(self, message: Any, now_ms: float, timeout_ms: float) -> bytes:
        low = 1 if isinstance(message, SaslHandshakeRequest) else None
        return b"".join(self.send(message, now_ms, token=None, timeout_ms=timeout_ms, min_version=low))

    def _take_login(self, exchange: Exchange, frame: memoryview, now_ms: float) -> bytes:
        """One answer of the login: what to say next."""
        left_ms = self._in_flight[0].deadline_ms - now_ms if self._in_flight else 0.0
        response = self._take_answer(frame, now_ms).response
        mechanism = self._credentials.mechanism if self._credentials else ""
        if isinstance(response, SaslHandshakeResponse):
            if response.error_code:
                offered = ", ".join(response.mechanisms) or "none"
                raise AuthenticationError(
                    f"{self.peer} does not take sasl.mechanism={mechanism}; it takes {offered}"
                )
            return self._ask(SaslAuthenticateRequest(auth_bytes=exchange.first()), now_ms, left_ms)
        assert isinstance(response, SaslAuthenticateResponse)
        if response.error_code:
            why = error_for_code(response.error_code, response.error_message or "")
            raise AuthenticationError(f"{self.peer} refused sasl.mechanism={mechanism}: {why}")
        reply = exchange.reply(response.auth_bytes)
        if reply is not None:
            return self._ask(SaslAuthenticateRequest(auth_bytes=reply), now_ms, left_ms)
        self._exchange = None
        if response.session_lifetime_ms > 0:
            self.login_due_ms = now_ms + response.session_lifetime_ms * _SESSION_SHARE
        return b""
