"""One blocking connection that speaks our wire tables to any broker: what a scenario needs, no retries."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any

from oncelog.wire.frames import FrameReader, decode_response, encode_request
from oncelog.wire.message import Message

MAX_FRAME_BYTES = 100 << 20


class RawClient:
    """`call` sends one request at exactly the version given and returns its response."""

    def __init__(self, bootstrap_servers: str, timeout_s: float = 30) -> None:
        host, port = bootstrap_servers.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self.reader = FrameReader(MAX_FRAME_BYTES)
        self.correlation_id = 0

    def send(self, message: Message, version: int) -> None:
        self.correlation_id += 1
        self.socket.sendall(encode_request(message, version, self.correlation_id, "scenario"))

    def receive(self, response: type[Message], version: int) -> Any:
        frames: list[memoryview] = []
        while not frames:
            data = self.socket.recv(1 << 20)
            if not data:
                raise ConnectionError("the broker closed the connection")
            frames = self.reader.feed(data)
        correlation_id, message = decode_response(response, version, frames[0])
        if correlation_id != self.correlation_id:
            raise AssertionError(f"answer {correlation_id} to request {self.correlation_id}")
        return message

    def call(self, message: Message, version: int) -> Any:
        self.send(message, version)
        return self.receive(message.api.response, version)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
