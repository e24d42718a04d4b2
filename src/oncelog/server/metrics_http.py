"""The metrics endpoint over HTTP.

    /metrics    all metrics in Prometheus' text format; needs the token if one is set
    /healthz    200 while the event loop answers
    /readyz     200, or 503 with the number of partitions that are offline

The last two need no token, and reveal nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Generator
from time import perf_counter

from oncelog.broker.metrics import (
    MAX_NAMED_PARTITIONS,
    families,
    partition_families,
    prometheus_lines,
)
from oncelog.broker.state import BrokerState
from oncelog.errors import ConfigError, StorageError
from oncelog.server.listen_errors import listen_error_text
from oncelog.server.listener import bind_sockets
from oncelog.server.process_metrics import LoopLag, process_families
from oncelog.settings import Settings

REQUEST_SECONDS = 5.0
STEP_SECONDS = 0.005
"""Time after which the collection of metrics lets the event loop handle requests of clients."""
MAX_REQUEST_BYTES = 16_384
MAX_CONNECTIONS = 20
"""Maximum number of simultaneous connections.

Further connections are closed, so that scrapers cannot use up the file descriptors that the log needs.
"""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_token(settings: Settings) -> bytes | None:
    """Return the value of oncelog.metrics.token; None if unset. Raises ConfigError if it is empty."""
    token = settings["oncelog.metrics.token"]
    if token is None:
        return None
    if not token.value.strip():
        raise ConfigError("oncelog.metrics.token is empty; set a token, or leave the setting out")
    return str(token.value).encode()


class MetricsServer:
    """An HTTP/1.1 server on the broker's event loop, with one request per connection.

    If `port` is 0, a free port is chosen. If oncelog.metrics.token is set, requests need the header
    `Authorization: Bearer` with that token. Raises ConfigError if the token is empty.
    """

    def __init__(self, node: BrokerState, host: str, port: int) -> None:
        self._node, self._host, self.port = node, host, port
        self._token = metrics_token(node.settings)
        self._servers: list[asyncio.Server] = []
        self._connection_count = 0
        self._is_collecting = asyncio.Lock()
        self._lag = LoopLag()

    async def start(self) -> None:
        """Listen. Raises StorageError."""
        try:
            sockets = await bind_sockets(self._host, self.port)
        except OSError as error:
            raise StorageError(listen_error_text(f"{self._host}:{self.port}", error)) from error
        self.port = sockets[0].getsockname()[1]
        for listening in sockets:
            server = await asyncio.start_server(self._serve, sock=listening, limit=MAX_REQUEST_BYTES)
            self._servers.append(server)
        self._lag.start()

    async def stop(self) -> None:
        self._lag.stop()
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connection_count >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connection_count += 1
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            response = await self._response(head)
            async with asyncio.timeout(REQUEST_SECONDS):
                writer.write(response)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The client disconnected, or it did not send an HTTP request.
            pass
        except asyncio.CancelledError:
            # The broker is stopping. Python 3.11 prints a traceback if a connection's task is cancelled.
            # Guard: test_a_stop_while_metrics_are_collected_prints_nothing.
            pass
        finally:
            self._connection_count -= 1
            # If bytes are left, abort: with close(), a client that does not read would keep the descriptor
            # open.
            writer.close() if not writer.transport.get_write_buffer_size() else writer.transport.abort()

    async def _response(self, head: bytes) -> bytes:
        request_line, *headers = head.split(b"\r\n")
        method, path, *_ = [*request_line.split(b" "), b"", b""]
        # Accept both GET and HEAD, because load balancers check with either of them. Guard:
        # test_health_is_told_to_get_and_head_alike.
        with_body, is_reading = method != b"HEAD", method in (b"GET", b"HEAD")
        page = path.split(b"?")[0]
        if is_reading and page == b"/healthz":
            return _response("200 OK", "ok\n", with_body=with_body)
        if is_reading and page == b"/readyz":
            return self._readiness(with_body=with_body)
        token = _bearer(headers)
        if self._token is not None and (token is None or not hmac.compare_digest(token, self._token)):
            text = "Authorization: Bearer with oncelog.metrics.token\n"
            return _response("401 Unauthorized", text, with_body=with_body)
        if not is_reading:
            return _response("405 Method Not Allowed", "only GET is served\n")
        if page != b"/metrics":
            return _response("404 Not Found", "the metrics are at /metrics\n", with_body=with_body)
        # Only one response is made at a time. Otherwise clients would wait for a step of each response. See
        # test_responses_with_metrics_are_made_one_after_another.
        async with self._is_collecting:
            return _response("200 OK", await self._text(), with_body=with_body)

    async def _text(self) -> str:
        """Return all metrics as text, in steps of STEP_SECONDS.

        With thousands of partitions it takes some tenths of a second. See
        test_clients_are_served_while_the_metrics_of_many_partitions_are_collected.
        """
        steps = self._text_in_steps()
        until = perf_counter() + STEP_SECONDS
        while True:
            try:
                next(steps)
            except StopIteration as done:
                text: str = done.value
                return text
            if perf_counter() >= until:
                await asyncio.sleep(0)
                until = perf_counter() + STEP_SECONDS

    def _text_in_steps(self) -> Generator[None, None, str]:
        node = self._node
        collected = list(families(node.metrics, (yield from node.gauges_in_steps())))
        if node.settings["oncelog.metrics.names"]:
            rows = []
            for offsets in node.partition_offsets(MAX_NAMED_PARTITIONS):
                rows.append(offsets)
                yield
            for family in partition_families(rows):
                collected.append(family)
                yield
        collected += process_families(self._lag.max_seconds)
        lines = []
        for line in prometheus_lines(collected):
            lines.append(line)
            yield
        return "".join(lines)

    def _readiness(self, *, with_body: bool) -> bytes:
        offline = sum(partition.is_offline for _, partition in self._node.topics.all_partitions())
        if offline:
            text = f"{offline} partitions are offline: restart\n"
            return _response("503 Service Unavailable", text, with_body=with_body)
        return _response("200 OK", "ready\n", with_body=with_body)


def _bearer(headers: list[bytes]) -> bytes | None:
    """Return the bearer token of a request; None if the request has none."""
    for header in headers:
        name, _, value = header.partition(b":")
        scheme, _, token = value.strip().partition(b" ")
        if (name.strip().lower(), scheme.lower()) == (b"authorization", b"bearer"):
            return token.strip()
    return None


def _response(status: str, text: str, *, with_body: bool = True) -> bytes:
    body = text.encode()
    challenge = "WWW-Authenticate: Bearer\r\n" if status.startswith("401") else ""
    head = (
        f"HTTP/1.1 {status}\r\n{challenge}Content-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
