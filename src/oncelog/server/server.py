"""The Kafka server: one thread with one event loop, all connections, and the broker state that they share.

After each round (requests of one connection that are handled together), the server completes fetches and sets
the timer for the next deadline. It also flushes the partitions whose appends wait for the disk. Flushes run
in threads, and one fdatasync covers all waiting appends of a partition.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

from oncelog.broker.dispatch import end_round, next_wakeup_ms, tick
from oncelog.broker.settings.dynamic_config import check_retention
from oncelog.broker.settings.listeners import Listener
from oncelog.broker.state import BrokerState
from oncelog.errors import ConfigError, KafkaStorageError
from oncelog.log.partition import Partition
from oncelog.rules.limits.connections import (
    CloseReason,
    ConnectionLimiter,
    Deadlines,
    MemoryBudget,
    expired_deadline,
    parse_overrides,
)
from oncelog.runtime.clock import Clock
from oncelog.runtime.event_log import log_event
from oncelog.runtime.tls import WatchedFile
from oncelog.server.acceptor import Acceptor
from oncelog.server.allocator import HeapTrimmer
from oncelog.server.connection import Connection, ConnectionLimits
from oncelog.server.listener import Listen, listen
from oncelog.settings import Settings

RECEIVE_BUFFER_BYTES = 1 << 20
FLUSH_THREADS = 4
SWEEP_SECONDS = 1.0
"""Time of one sweep, which checks the deadlines of all connections, in seconds."""
SWEEP_SLICE = 50
"""Number of connections that are checked in one turn of the event loop.

The slices are spread over SWEEP_SECONDS. If they followed each other, each request that arrives meanwhile
would wait for a slice.
"""
HANDSHAKE_MS = 10_000
"""Timeout of the TLS handshake, in ms."""
AUTHENTICATION_MS = 30_000
"""Timeout of SASL authentication, in ms."""
LINGER_MS = 5_000
"""A closing connection is aborted if its client accepts none of its last responses for this time, in ms."""
MAX_LOGGED_CLOSES = 20
"""Maximum number of closed connections that are logged one by one per SWEEP_SECONDS.

The number of further closed connections is logged in one line.
"""

_CLOSE_TEXTS = {
    CloseReason.CONNECTIONS: "max.connections is reached",
    CloseReason.ADDRESS: "max.connections.per.ip is reached",
    CloseReason.DESCRIPTORS: "too many open files; raise the limit (ulimit -n, LimitNOFILE=)",
    CloseReason.HANDSHAKE: "the TLS handshake did not end in time",
    CloseReason.AUTHENTICATION: "did not authenticate in time",
    CloseReason.REQUEST: "a request did not arrive in time (oncelog.request.read.timeout.ms)",
    CloseReason.IDLE: "idle (connections.max.idle.ms)",
    CloseReason.LINGER: "did not receive its last responses in time",
    CloseReason.REQUEST_BYTES: "queued.max.request.bytes is reached; it is one of the slowest",
    CloseReason.RESPONSE_BYTES: "oncelog.queued.max.response.bytes is reached; it is one of the slowest",
}


class Server:
    """Accepts connections on the broker's listeners and handles their requests.

    The constructor raises ConfigError for settings that cannot be used.
    """

    def __init__(
        self, node: BrokerState, clock: Clock, listeners: Sequence[Listener], listen: Listen = listen
    ) -> None:
        settings = node.settings
        self.node, self.clock = node, clock
        self.connection_limits = ConnectionLimits(
            max_unauthenticated_bytes=settings["sasl.server.max.receive.size"],
            max_request_bytes=settings["socket.request.max.bytes"],
            max_pending_bytes=settings["oncelog.connection.max.pending.bytes"],
            max_pending_requests=settings["oncelog.connection.max.pending.requests"],
        )
        self.deadlines = Deadlines(
            handshake=HANDSHAKE_MS,
            authentication=AUTHENTICATION_MS,
            request=settings["oncelog.request.read.timeout.ms"],
            idle=settings["connections.max.idle.ms"],
            linger=LINGER_MS,
        )
        self._limiter = ConnectionLimiter(
            settings["max.connections"],
            settings["max.connections.per.ip"],
            parse_overrides(settings["max.connections.per.ip.overrides"]),
        )
        _check_sizes(settings)
        check_retention(settings.configured("log.retention.ms"))
        self.acceptors = [Acceptor(listener, listen) for listener in listeners]
        setting = "sasl.oauthbearer.jwks.endpoint.url"
        self._token_keys = WatchedFile(settings[setting], setting) if settings[setting] else None
        self.receive_view = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        """The buffer into which asyncio receives the bytes of all connections."""
        self.connections: dict[Connection, None] = {}
        """All connections, oldest first."""
        self._ids = count(1)
        self._flush_pool = ThreadPoolExecutor(FLUSH_THREADS, thread_name_prefix="oncelog-flush")
        self._flushing: dict[asyncio.Future[None], None] = {}
        """The running flushes. Each runs in a thread of `_flush_pool`."""
        self._timer: asyncio.TimerHandle | None = None
        """The timer of the broker's next deadline; it fires at `_timer_ms`."""
        self._timer_ms = 0
        self._sweeper: asyncio.Handle | None = None
        self._trimmer = HeapTrimmer()
        self._close_count = 0
        """Number of connections that the broker has closed since the last sweep because of an error or a
        limit.
        """
        self._is_stopping = False

    async def start(self) -> None:
        """Open all listeners. Raises StorageError; `stop` then closes the listeners that were opened."""
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
        """Close the listeners and every connection, and wait for the flush threads."""
        self._is_stopping = True
        for acceptor in self.acceptors:
            acceptor.stop()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)
        while self._flushing:
            await asyncio.gather(*self._flushing, return_exceptions=True)
        # The timers come last, because the end of a flush sets the timer again.
        for timer in (self._timer, self._sweeper):
            if timer is not None:
                timer.cancel()
        self._flush_pool.shutdown(wait=True)
        await asyncio.sleep(0)

    def opened(self, connection: Connection, descriptor: int | None) -> bool:
        """Register a new connection.

        If a connection limit is exceeded, close the connection and return False.
        """
        self.connections[connection] = None
        self.node.connection_count = len(self.connections)
        self.node.metrics.connections_opened += 1
        limit = _descriptor_limit()
        bound = self._limiter.enter(connection.address, descriptor=descriptor, descriptor_limit=limit)
        if bound is not None:
            connection.close(_CLOSE_TEXTS[bound], bound=bound, at_once=True)
            self.lost(connection)
        return bound is None

    def lost(self, connection: Connection) -> None:
        """Remove a connection that has ended. May be called twice for the same connection."""
        if connection in self.connections:
            del self.connections[connection]
            self.node.connection_count = len(self.connections)
            self._limiter.leave(connection.address)
            connection.memory.close()

    def note_end(self, peer: str, reason: str, bound: CloseReason | None) -> None:
        """Count and log a connection that the broker closes."""
        self.node.metrics.connections_closed_for_cause += 1
        if bound is not None:
            self.node.metrics.connections_ended[bound] += 1
        self._close_count += 1
        if self._close_count <= MAX_LOGGED_CLOSES:
            log_event("warning", "connection closed", peer=peer, reason=reason)

    def evict(self, budget: MemoryBudget[Any], bound: CloseReason, now_ms: int) -> None:
        """Close the connections that send or receive their bytes slowest, until the rest fits the budget."""
        for connection in budget.eviction_candidates(now_ms):
            budget.release(connection)
            connection.close(_CLOSE_TEXTS[bound], bound=bound, at_once=True)

    def after_round(self, now_ms: int) -> None:
        """Complete fetches, start flushes and set the timer after a round of requests."""
        node = self.node
        end_round(node)
        if node.flush_queue.has_waiters:
            for partition in node.flush_queue.take_due():
                self._flush(partition)
        self._set_timer(now_ms)

    def after_work(self) -> None:
        """Complete fetches, start flushes and set the timer after background work.

        The appends of background work complete fetches and wait for flushes, as the appends of requests do.
        See test_offsets_stored_in_a_later_step_are_synced_and_answered_at_once.
        """
        if not self._is_stopping:
            self.after_round(self.clock.now_ms())

    def _flush(self, partition: Partition) -> None:
        loop = asyncio.get_running_loop()
        is_given_up = False

        def flush() -> None:
            if not is_given_up:
                partition.flush()

        try:
            future = loop.run_in_executor(self._flush_pool, flush)
        except RuntimeError as error:
            # No thread could be started, for example because of a container's pids.max. The pool has queued
            # the call nevertheless. See test_appends_without_a_thread_for_their_flush_are_refused.
            is_given_up = True
            future = loop.create_future()
            future.set_exception(KafkaStorageError(f"no flush: {error}"))
        self._flushing[future] = None
        future.add_done_callback(lambda done: self._flushed(partition, done))

    def _flushed(self, partition: Partition, done: asyncio.Future[None]) -> None:
        del self._flushing[done]
        error = None if done.cancelled() else done.exception()
        if error is not None and not partition.is_closed:
            log_event("error", "flush failed", partition=partition.topic_partition, error=error)
        self.node.flush_queue.complete(partition, error if isinstance(error, Exception) else None)
        self.after_round(self.clock.now_ms())

    def _set_timer(self, now_ms: int) -> None:
        due_ms = next_wakeup_ms(self.node)
        if self._timer is not None:
            if self._timer_ms <= due_ms:
                return
            self._timer.cancel()
        self._timer_ms = due_ms
        self._timer = asyncio.get_running_loop().call_later(max(due_ms - now_ms, 0) / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            tick(self.node, self.clock.now_ms())
        except Exception as error:
            # A periodic task has failed: for example, a checkpoint on a full disk. The task is retried when
            # it is next due.
            log_event("error", "periodic work failed", error=repr(error), exc_info=error)
        self.after_round(self.clock.now_ms())

    def _sweep(self) -> None:
        """Reload files that have changed, return freed memory, and check the deadlines of all connections."""
        try:
            self._refresh_files()
        except Exception as error:
            # After an error, the sweep must still schedule its next run. Otherwise no deadline would be
            # checked.
            log_event("error", "files cannot be looked at", error=repr(error), exc_info=error)
        if self._close_count > MAX_LOGGED_CLOSES:
            log_event("warning", "more connections closed", count=self._close_count - MAX_LOGGED_CLOSES)
        self._close_count = 0
        self._trimmer.note(self.node.request_memory.total_bytes + self.node.response_memory.total_bytes)
        slices = -(-len(self.connections) // SWEEP_SLICE)
        self._sweep_slice(list(self.connections), SWEEP_SECONDS / max(slices, 1))

    def _sweep_slice(self, connections: list[Connection], pause_s: float) -> None:
        """Check the last SWEEP_SLICE of the connections. Check the others in later turns, `pause_s` apart."""
        now_ms = self.clock.now_ms()
        for connection in connections[-SWEEP_SLICE:]:
            try:
                self._check_deadlines(connection, now_ms)
            except Exception as error:
                # As in `_sweep`: without this, no deadline of any connection would be checked again.
                text = repr(error)
                log_event("error", "check failed", peer=connection.peer, error=text, exc_info=error)
        del connections[-SWEEP_SLICE:]
        then = partial(self._sweep_slice, connections, pause_s) if connections else self._sweep
        self._sweeper = asyncio.get_running_loop().call_later(pause_s, then)

    def _check_deadlines(self, connection: Connection, now_ms: int) -> None:
        """Close a connection that has missed a deadline, unless it has ended since the sweep began."""
        if connection not in self.connections:
            return
        connection.note_responses(now_ms)
        bound = expired_deadline(connection.activity(now_ms), self.deadlines, now_ms)
        # `note_responses` may have closed connections.
        if bound is not None and connection in self.connections:
            connection.close(_CLOSE_TEXTS[bound], bound=bound, at_once=True)


def _check_sizes(settings: Settings) -> None:
    """Raise ConfigError if one request may be larger than the memory of all requests.

    Kafka has the same check.
    """
    queued_bytes, largest_bytes = settings["queued.max.request.bytes"], settings["socket.request.max.bytes"]
    if 0 <= queued_bytes < largest_bytes:
        raise ConfigError(
            f"queued.max.request.bytes={queued_bytes} is less than "
            f"socket.request.max.bytes={largest_bytes}, the limit of one request: raise the "
            "former or lower the latter"
        )


def _descriptor_limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
