"""Prometheus' text format over HTTP: `GET /metrics`, nothing else."""

from __future__ import annotations

import asyncio

from oncelog.broker.metrics import to_prometheus_text
from oncelog.broker.node import Node

REQUEST_SECONDS = 5.0
MAX_REQUEST_BYTES = 16_384
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """A tiny HTTP/1.1 server on the broker's loop; one request a connection."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; `port` 0 takes a free one. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.split(b"\r\n", 1)[0]))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that went away, or no scraper at all
        finally:
            writer.close()

    def _answer(self, request_line: bytes) -> bytes:
        method, path, *_ = [*request_line.split(b" "), b"", b""]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET is served\n")
        if path.split(b"?")[0] != b"/metrics":
            return _response("404 Not Found", "the metrics are at /metrics\n")
        text = to_prometheus_text(self._node.metrics, self._node.gauges())
        return _response("200 OK", text, with_body=method == b"GET")


def _response(status: str, text: str, *, with_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
