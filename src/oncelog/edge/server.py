"""The server: one thread, one event loop, every connection, and the node they share.

After each round of requests the node wakes fetches, appends that wait for the disk are flushed in
threads (one fdatasync for all that gathered), and the timer is set for what is due next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

from oncelog.broker.listeners import Listener
from oncelog.broker.node import Node
from oncelog.edge.acceptor import Acceptor
from oncelog.edge.clock import Clock
from oncelog.edge.event_log import log_event
from oncelog.edge.server_connection import Connection
from oncelog.edge.tls import WatchedFile
from oncelog.log.partition import Partition

RECEIVE_BUFFER_BYTES = 1 << 20
FLUSH_THREADS = 4
LINGER_MS = 5_000
"""How long a connection being closed may take to read its last answers."""
SWEEP_SECONDS = 1.0
STRANGER_MS = 30_000
"""How long a connection may stay without saying who it is, where it must."""


class Server:
    """Serves a node on its listeners. Raises ConfigError for settings of TLS that cannot be used."""

    def __init__(self, node: Node, clock: Clock, listeners: Sequence[Listener]) -> None:
        settings = node.settings
        self.node, self.clock = node, clock
        self.max_request_bytes: int = settings["socket.request.max.bytes"]
        self.max_pending_bytes: int = settings["oncelog.connection.max.pending.bytes"]
        self.max_pending_requests: int = settings["oncelog.connection.max.pending.requests"]
        self.max_connections: int = settings["max.connections"]
        self.max_idle_ms: int = settings["connections.max.idle.ms"]
        self.max_stranger_bytes: int = settings["sasl.server.max.receive.size"]
        self.acceptors = [Acceptor(listener) for listener in listeners]
        keys = "sasl.oauthbearer.jwks.endpoint.url"
        self._token_keys = WatchedFile(settings[keys], keys) if settings[keys] else None
        self.receive_view = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self.connections: dict[Connection, None] = {}
        self._ids = count(1)
        self._flush_pool = ThreadPoolExecutor(FLUSH_THREADS, thread_name_prefix="oncelog-flush")
        self._flushing: dict[asyncio.Future[None], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen on all of them. Raises StorageError; `stop` then frees those that did."""
        self._refresh_files()
        for acceptor in self.acceptors:
            await acceptor.start(partial(self._connect, acceptor))
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        self.after_round(self.clock.now_ms())

    def _refresh_files(self) -> None:
        for acceptor in self.acceptors:
            acceptor.refresh()
        if self._token_keys is not None:
            self.node.token_keys = self._token_keys.refresh()

    def _connect(self, acceptor: Acceptor) -> Connection:
        return Connection(self, acceptor, next(self._ids))

    async def stop(self) -> None:
        """No more requests: the listeners, every connection and the flush threads end."""
        for acceptor in self.acceptors:
            acceptor.stop()
        for timer in (self._timer, self._sweeper):
            if timer is not None:
                timer.cancel()
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)
        while self._flushing:
            await asyncio.gather(*self._flushing, return_exceptions=True)
        self._flush_pool.shutdown(wait=True)
        await asyncio.sleep(0)

    def opened(self, connection: Connection) -> None:
        """A connection is there; one above max.connections goes at once."""
        self.connections[connection] = None
        self.node.connection_count = len(self.connections)
        self.node.metrics.connections_opened += 1
        if len(self.connections) > self.max_connections:
            connection.close(f"max.connections={self.max_connections} is reached", at_once=True)

    def lost(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self.node.connection_count = len(self.connections)

    def after_round(self, now_ms: int) -> None:
        """What a round of requests leaves to do."""
        node = self.node
        node.settle(now_ms)
        if node.flushes.is_any_waiting:
            for partition in node.flushes.take():
                self._flush(partition)
        self._set_timer(now_ms)

    def _flush(self, partition: Partition) -> None:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._flush_pool, partition.flush)
        self._flushing[future] = None
        future.add_done_callback(lambda done: self._flushed(partition, done))

    def _flushed(self, partition: Partition, done: asyncio.Future[None]) -> None:
        del self._flushing[done]
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log_event("error", "flush failed", partition=partition.topic_partition, error=error)
        self.node.flushes.finished(partition, error if isinstance(error, Exception) else None)
        self.after_round(self.clock.now_ms())

    def _set_timer(self, now_ms: int) -> None:
        due_ms = self.node.next_wakeup_ms()
        if self._timer is not None:
            if self._timer_ms <= due_ms:
                return
            self._timer.cancel()
        self._timer_ms = due_ms
        self._timer = asyncio.get_running_loop().call_later(max(due_ms - now_ms, 0) / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.node.tick(self.clock.now_ms())
        except Exception as error:
            # Retention or a checkpoint that fails (a full disk) is tried again when it is next due.
            log_event("error", "periodic work failed", error=repr(error), exc_info=error)
        self.after_round(self.clock.now_ms())

    def _sweep(self) -> None:
        """Close idle connections, strangers, and those that do not take their last answers."""
        self._refresh_files()
        now_ms = self.clock.now_ms()
        for connection in list(self.connections):
            idle_ms = now_ms - connection.active_ms
            if connection.is_closing:
                if idle_ms > LINGER_MS and connection.transport is not None:
                    connection.transport.abort()
            elif not connection.door.is_open and now_ms - connection.opened_ms > STRANGER_MS:
                connection.close(f"did not authenticate within {STRANGER_MS} ms", at_once=True)
            elif 0 <= self.max_idle_ms < idle_ms and not connection.is_waiting:
                connection.close(f"idle for {idle_ms} ms (connections.max.idle.ms)", at_once=True)
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
