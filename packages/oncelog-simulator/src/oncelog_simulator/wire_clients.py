"""Clients that are written from the protocol specification alone, without the product's clients."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any, ClassVar

from oncelog.errors import BrokerError, error_for_code
from oncelog.wire.frames import FrameReader, decode_response, encode_request
from oncelog.wire.messages import InitProducerIdRequest
from oncelog_simulator.clients import Application
from oncelog_simulator.world import BROKER_HOST, BROKER_PORT, World

REQUEST_SECONDS = 2.0
TIMEOUT_MS = 15_000
"""The time-out of transactions."""
MAX_FRAME_BYTES = 1 << 20


class Wire(asyncio.Protocol):
    """A connection on which requests are pipelined. Responses come in request order."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.transport: Any = None
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._waiting: deque[tuple[asyncio.Future[Any], Any, int]] = deque()
        self._correlation_id = 0
        self.is_lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, message: Any, version: int) -> asyncio.Future[Any]:
        """Send a request. The future gets the response, or raises OSError."""
        future = asyncio.get_running_loop().create_future()
        if self.is_lost:
            future.set_exception(ConnectionResetError("the connection is lost"))
            return future
        self._correlation_id += 1
        self._waiting.append((future, message.api.response, version))
        self.transport.write(encode_request(message, version, self._correlation_id, self.client_id))
        return future

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(memoryview(bytes(data))):
            future, response, version = self._waiting.popleft()
            if not future.done():
                future.set_result(decode_response(response, version, bytes(frame))[1])

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        for future, _, _ in self._waiting:
            if not future.done():
                future.set_exception(ConnectionResetError("the connection is lost"))
        self._waiting.clear()

    def close(self) -> None:
        """Close the connection. Requests in flight may still arrive."""
        if self.transport is not None:
            self.transport.abort()


class WireClient(Application):
    """An application with one connection, on which it sends requests that it builds itself."""

    client_id: ClassVar[str] = "pipeliner"
    retry_s: ClassVar[float] = 0.2
    """Seconds before a request is sent again after its connection was lost."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.wire: Wire | None = None

    async def connected(self) -> Wire:
        """Return the open connection, or open a new one. Raises OSError."""
        if self.wire is None or self.wire.is_lost:
            loop: Any = asyncio.get_running_loop()
            _, self.wire = await loop.create_connection(
                partial(Wire, self.client_id), BROKER_HOST, BROKER_PORT
            )
        assert self.wire is not None
        return self.wire

    async def answer_to(self, message: Any, version: int) -> Any:
        """Send a request repeatedly until a response arrives, which may contain an error."""
        while True:
            try:
                wire = await self.connected()
                return await asyncio.wait_for(wire.send(message, version), REQUEST_SECONDS)
            except (OSError, TimeoutError):
                self.hang_up()
                await asyncio.sleep(self.retry_s)

    async def ask(self, message: Any, version: int) -> Any:
        """Send a request repeatedly until a response without a retriable error arrives.

        Raises BrokerError for an error that is not retried.
        """
        while True:
            response = await self.answer_to(message, version)
            code = _error_code(response)
            if not code:
                return response
            error = error_for_code(code)
            if not error.retriable:
                raise error
            await asyncio.sleep(0.1)

    def hang_up(self) -> None:
        """Close the connection. The next request opens a new one."""
        if self.wire is not None:
            self.wire.close()
            self.wire.is_lost = True

    async def new_producer_id(self, transactional_id: str | None, version: int) -> tuple[int, int]:
        """Return a producer id and its epoch, however many attempts it takes."""
        message = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=TIMEOUT_MS)
        while True:
            try:
                response = await self.ask(message, version)
            except BrokerError as error:
                self.world.note(self.name, f"InitProducerId: {error!r}")
                await asyncio.sleep(1.0)
                continue
            return response.producer_id, response.producer_epoch


def _error_code(response: Any) -> int:
    codes = [response.error_code]
    for topic in getattr(response, "results_by_topic_v3_and_below", ()):
        codes += [part.partition_error_code for part in topic.results_by_partition]
    return next((code for code in codes if code), 0)
