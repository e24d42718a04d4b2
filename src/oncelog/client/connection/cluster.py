"""A client's connections to the brokers of one cluster: bootstrap, metadata, and requests by node id."""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeVar

from oncelog.client.arguments import names_of, topic_of
from oncelog.client.connection.broker_connection import BrokerConnection
from oncelog.client.connection.metadata import ClusterMetadata
from oncelog.client.connection.security import client_security
from oncelog.errors import (
    AuthenticationError,
    BrokerError,
    ConfigError,
    DisconnectedError,
    LeaderNotAvailable,
    MisuseError,
    OncelogError,
    PeerError,
    TimedOut,
    UnknownTopicOrPartition,
)
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.messages import MetadataRequest

T = TypeVar("T")
_LOG = logging.getLogger("oncelog.client")

UNKNOWN_TOPIC_PATIENCE_MS = 3_000
"""Longest wait of a lookup for an unknown topic, in ms. Brokers learn of a new topic at different times."""


def parse_bootstrap(servers: Collection[str] | None) -> list[tuple[str, int]]:
    """Return the (host, port) pairs of HOST:PORT or [HOST]:PORT strings. Raises ConfigError."""
    if not servers:
        raise ConfigError(
            "bootstrap.servers is not set: set it to HOST:PORT of a broker, for example 127.0.0.1:9092"
        )
    return [_parse_server(server) for server in servers]


def _parse_server(server: str) -> tuple[str, int]:
    host, separator, port = server.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"bootstrap.servers={server!r}: expected HOST:PORT, for example 127.0.0.1:9092")
    return host.strip("[]"), int(port)


class _LookUp:
    """The state that concurrent lookups of one topic share.

    One of the lookups sends the Metadata request for all. Each topic has its own object, because a missing
    topic must not delay the lookups of other topics.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.request_count = 0


class ClusterConnection:
    """The connections to the brokers of one cluster, and its metadata.

    Not thread safe: use it on its event loop.

    Requests fail with DisconnectedError (not connected, or the connection was lost and the outcome is
    unknown), TimedOut, AuthenticationError, PeerError (bytes that are not Kafka's protocol) or
    UnsupportedVersion.

    Metadata is refreshed every metadata.max.age.ms. `topics_in_use` returns the topics to keep at a refresh.
    If it is None, all requested topics are kept until `forget_topics`.

    A refresh by age never creates a topic. Otherwise a deleted topic would be created again while a client
    that once used it is running. Java's producer does create the topic again, until metadata.max.idle.ms
    after the last send.
    """

    def __init__(
        self, settings: Settings, topics_in_use: Callable[[], Collection[str]] | None = None
    ) -> None:
        self.metadata = ClusterMetadata()
        self._settings = settings
        self._security = client_security(settings)
        self._runtime = system.current()
        self._bootstrap = parse_bootstrap(settings["bootstrap.servers"])
        self._connections: dict[tuple[str, int, str], BrokerConnection] = {}
        """Connections by host, port and channel; `submit` explains channels."""
        self._timed_out_ms: dict[tuple[str, int], float] = {}
        """The time of `now_ms` at which a request to an address last timed out, by host and port."""
        self._topics_in_use = topics_in_use
        self._topics: dict[str, None] = {}
        self._look_ups: weakref.WeakValueDictionary[str, _LookUp] = weakref.WeakValueDictionary()
        self._refresher: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def settings(self) -> Settings:
        return self._settings

    def now_ms(self) -> float:
        """Return the monotonic time in milliseconds."""
        return self._runtime.monotonic_ns() / 1e6

    async def start(self) -> None:
        """Find the cluster through the bootstrap servers. Further calls do nothing.

        Raises AuthenticationError if TLS or SASL fails, DisconnectedError if no server responds within
        oncelog.bootstrap.timeout.ms, and PeerError immediately if no server uses Kafka's protocol.
        """
        if self._refresher is None:
            await self._find_cluster()
            # The client may have been closed during `_find_cluster`, and then nothing would cancel the
            # refresher.
            self._check_open()
            # A concurrent call may have created the refresher, and `close` cancels only one refresher.
            if self._refresher is None:
                self._refresher = asyncio.create_task(self._refresh_by_age())

    def _check_open(self) -> None:
        if self._closed:
            raise MisuseError("this client is closed; make a new one")

    async def _find_cluster(self) -> None:
        deadline_ms = self.now_ms() + self._settings["oncelog.bootstrap.timeout.ms"]
        while True:
            try:
                await self.refresh_metadata(())
                return
            except (DisconnectedError, TimedOut) as error:
                if isinstance(error, AuthenticationError) or self.now_ms() >= deadline_ms:
                    raise
                await asyncio.sleep(self._settings["reconnect.backoff.ms"] / 1000)

    async def _refresh_by_age(self) -> None:
        while True:
            await asyncio.sleep(self._settings["metadata.max.age.ms"] / 1000)
            try:
                await self._refresh_once_by_age()
            except OncelogError as error:
                _LOG.debug("refreshing metadata by age failed: %s", error)
            except Exception:
                # This task must not end, because nothing would start it again.
                _LOG.exception("refreshing metadata by age failed")

    async def _refresh_once_by_age(self) -> None:
        if self._topics_in_use is not None:
            self._topics = dict.fromkeys(self._topics_in_use())
        self.metadata.retain(self._topics)
        await self.fetch_metadata(list(self._topics))

    async def close(self) -> None:
        """Close every connection. Requests in flight fail with DisconnectedError.

        Cancelling this call ends only its wait.
        """
        self._closed = True
        if self._closing is None or self._closing.done():
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._refresher:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)
            # The task's traceback refers to this object: drop the task to break the reference cycle.
            self._refresher = None
        self._topics_in_use = None
        await self._close_connections(list(self._connections))

    async def _close_connections(self, keys: Collection[tuple[str, int, str]]) -> None:
        """Close these connections concurrently, after removing them so that no new request uses them."""
        connections = [self._connections.pop(key) for key in keys]
        await asyncio.gather(*(connection.close() for connection in connections))

    # --- requests

    def submit(
        self,
        node_id: int | None,
        message: Any,
        *,
        timeout_ms: float | None = None,
        min_version: int | None = None,
        max_version: int | None = None,
        channel: str = "",
        on_written: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Write a request, or queue it until the connection is ready. The future completes with the response.

        If `node_id` is None, the request goes to any broker. Requests to one broker keep their order within a
        `channel`. Each channel is a separate connection, so that a request need not wait behind a long poll.
        If `timeout_ms` is None, request.timeout.ms applies. `on_written` is called just before the first byte
        is written. The future of Produce with acks=0 completes with None.

        Raises MisuseError after `close`, and DisconnectedError for a broker that is not in the metadata.
        """
        self._check_open()
        host, port = self._candidates()[0] if node_id is None else self._address(node_id)
        connection = self._connection(host, port, channel)
        return self._submit(connection, message, timeout_ms, min_version, max_version, on_written)

    def _submit(
        self,
        connection: BrokerConnection,
        message: Any,
        timeout_ms: float | None = None,
        min_version: int | None = None,
        max_version: int | None = None,
        on_written: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        return connection.submit(
            message,
            timeout_ms=self._settings["request.timeout.ms"] if timeout_ms is None else timeout_ms,
            min_version=min_version,
            max_version=max_version,
            expects_response=getattr(message, "acks", None) != 0,
            on_written=on_written,
        )

    async def request(
        self,
        node_id: int | None,
        message: Any,
        *,
        timeout_ms: float | None = None,
        min_version: int | None = None,
        max_version: int | None = None,
        channel: str = "",
        deadline_ms: float = math.inf,
    ) -> Any:
        """Return the response to a request. If `node_id` is None, try every known address until one responds.

        `timeout_ms` limits the request to each address, and `deadline_ms`, a time of `now_ms`, the whole call
        without a `node_id`. See `submit` for the other arguments. Raises DisconnectedError, TimedOut,
        PeerError, UnsupportedVersion or AuthenticationError.
        """
        if node_id is None:
            return await self._request_any(message, timeout_ms, min_version, max_version, deadline_ms)
        return await self.submit(
            node_id,
            message,
            timeout_ms=timeout_ms,
            min_version=min_version,
            max_version=max_version,
            channel=channel,
        )

    async def _request_any(
        self,
        message: Any,
        timeout_ms: float | None = None,
        min_version: int | None = None,
        max_version: int | None = None,
        deadline_ms: float = math.inf,
    ) -> Any:
        errors: list[OncelogError] = []
        limit_ms: float = self._settings["request.timeout.ms"] if timeout_ms is None else timeout_ms
        for address in self._candidates():
            self._check_open()
            remaining_ms = deadline_ms - self.now_ms()
            if errors and remaining_ms <= 0:
                break
            limit_ms = min(limit_ms, max(remaining_ms, 1))
            try:
                connection = self._connection(*address, "")
                response = await self._submit(connection, message, limit_ms, min_version, max_version)
            except (DisconnectedError, TimedOut, PeerError) as error:
                errors.append(error)
                if isinstance(error, TimedOut):
                    self._timed_out_ms[address] = self.now_ms()
            else:
                self._timed_out_ms.pop(address, None)
                return response
        # PeerError is final. Raise it only if every address failed with it: after other errors a retry may
        # succeed.
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[-1])

    def _address(self, node_id: int) -> tuple[str, int]:
        broker = self.metadata.brokers.get(node_id)
        if broker is None:
            node_ids = ", ".join(map(str, sorted(self.metadata.brokers))) or "none"
            raise DisconnectedError(f"broker {node_id} is not in the cluster's metadata (known: {node_ids})")
        return broker.host, broker.port

    def _connection(self, host: str, port: int, channel: str) -> BrokerConnection:
        key = (host, port, channel)
        if key not in self._connections:
            self._connections[key] = BrokerConnection(host, port, self._settings, self._security)
        return self._connections[key]

    def _candidates(self) -> list[tuple[str, int]]:
        """Return the addresses to try, best first.

        The order is: connected brokers, other brokers of the metadata, bootstrap servers, and last the
        addresses whose latest attempt to connect failed. Among equals, an address whose request timed out
        comes last. Otherwise short calls would all wait for the same silent broker. See
        test_calls_with_a_short_limit_reach_a_broker_behind_a_silent_one.
        """
        brokers = [(broker.host, broker.port) for broker in self.metadata.brokers.values()]
        addresses = list(dict.fromkeys([*brokers, *self._bootstrap]))

        def rank(address: tuple[str, int]) -> tuple[int, float, int]:
            timed_out_ms = self._timed_out_ms.get(address, -math.inf)
            connection = self._connections.get((*address, ""))
            if connection is None:
                return (1, timed_out_ms, 0)
            preference = 0 if connection.is_connected else 2 if connection.is_backing_off else 1
            return (preference, timed_out_ms, connection.in_flight_count)

        return sorted(addresses, key=rank)

    def feature(self, node_id: int, name: str) -> int:
        """Return the level of a feature as the broker last reported it; 0 if it is off or unknown."""
        broker = self.metadata.brokers.get(node_id)
        connection = self._connections.get((broker.host, broker.port, "")) if broker else None
        return connection.features.get(name, 0) if connection else 0

    # --- metadata

    async def refresh_metadata(
        self, topics: Collection[str], *, allow_auto_topic_creation: bool = True
    ) -> None:
        """Request the metadata of `topics` from any broker, and refresh these topics by age from now on.

        An empty collection requests only the brokers.
        """
        names = names_of(topics)
        self._topics |= dict.fromkeys(names)
        await self.fetch_metadata(names, allow_auto_topic_creation=allow_auto_topic_creation)

    async def fetch_metadata(
        self, topics: Collection[str] | None, *, allow_auto_topic_creation: bool = False
    ) -> Any:
        """Send one Metadata request, update `metadata`, and return the response.

        With `topics` None, request all topics.
        """
        request = MetadataRequest(
            topics=None if topics is None else [MetadataRequest.MetadataRequestTopic(name=t) for t in topics],
            allow_auto_topic_creation=allow_auto_topic_creation,
        )
        response = await self._request_any(request)
        self.metadata.update(response, self.now_ms())
        await self._close_removed_brokers()
        return response

    async def _close_removed_brokers(self) -> None:
        """Close unused connections to addresses that are no longer in the metadata."""
        addresses = {(broker.host, broker.port) for broker in self.metadata.brokers.values()}
        for address in self._timed_out_ms.keys() - addresses.union(self._bootstrap):
            del self._timed_out_ms[address]
        await self._close_connections(
            [
                key
                for key, connection in self._connections.items()
                if key[:2] not in addresses and not connection.in_flight_count
            ]
        )

    def forget_topics(self, topics: Iterable[str]) -> None:
        """Drop the metadata of these topics, and do not refresh them until they are requested again."""
        names = list(topics)
        self.metadata.forget(names)
        for topic in names:
            self._topics.pop(topic, None)

    async def leader(
        self,
        tp: TopicPartition,
        *,
        allow_auto_topic_creation: bool = True,
        unknown_topic_patience_ms: float | None = None,
    ) -> int:
        """Return the node id of the partition's leader. Request metadata until the leader is known.

        Raises UnknownTopicOrPartition after `unknown_topic_patience_ms` (None: UNKNOWN_TOPIC_PATIENCE_MS),
        the broker's error immediately if it is not retriable, and the latest error once request.timeout.ms
        has passed.
        """
        await self._wait_for_metadata(
            tp,
            lambda: self.metadata.leader_of(tp) is not None,
            allow_auto_topic_creation=allow_auto_topic_creation,
            unknown_topic_patience_ms=unknown_topic_patience_ms,
        )
        node_id = self.metadata.leader_of(tp)
        assert node_id is not None
        return node_id

    async def topic(self, name: str, *, unknown_topic_patience_ms: float) -> int:
        """Return the number of partitions of a topic.

        The broker may create the topic. Raises the errors of `leader`. The call does not wait for leaders: a
        partition without a leader must not prevent writes to the other partitions.
        """
        await self._wait_for_metadata(
            TopicPartition(name, 0),
            lambda: bool(self.metadata.partition_count(name)),
            unknown_topic_patience_ms=unknown_topic_patience_ms,
        )
        return self.metadata.partition_count(name) or 0

    async def _wait_for_metadata(
        self,
        tp: TopicPartition,
        is_found: Callable[[], bool],
        *,
        allow_auto_topic_creation: bool = True,
        unknown_topic_patience_ms: float | None = None,
    ) -> None:
        """Request a topic's metadata until `is_found` returns True. Raises the errors of `leader`."""
        topic_of(tp.topic)
        started_ms = self.now_ms()
        attempt = 0
        look_up = self._look_ups.setdefault(tp.topic, _LookUp())
        while not is_found():
            request_count = look_up.request_count
            async with look_up.lock:
                error = None
                if not (is_asked_by_another := look_up.request_count != request_count):
                    error = await self._refresh_for(tp, allow_auto_topic_creation)
                    look_up.request_count += 1
                if is_found():
                    return
                if (error := error or self.why_no_leader(tp)) is not None:
                    limit_ms = self._limit_ms(error, unknown_topic_patience_ms)
                    pause_ms = self._pause_ms_or_raise(error, attempt, started_ms + limit_ms)
                    if not is_asked_by_another:
                        await asyncio.sleep(pause_ms / 1000)
                        attempt += 1

    async def _refresh_for(self, tp: TopicPartition, create: bool) -> OncelogError | None:
        """Refresh the metadata once. Return the error if no broker could be reached."""
        try:
            await self.refresh_metadata([tp.topic], allow_auto_topic_creation=create)
        except (DisconnectedError, TimedOut) as unreachable:
            return unreachable
        return None

    def _limit_ms(self, error: OncelogError, unknown_topic_patience_ms: float | None) -> float:
        limit_ms: float = self._settings["request.timeout.ms"]
        is_unknown = isinstance(error, UnknownTopicOrPartition)
        if unknown_topic_patience_ms is None:
            return min(UNKNOWN_TOPIC_PATIENCE_MS, limit_ms) if is_unknown else limit_ms
        # A producer waits for an unreachable broker for max.block.ms, if that exceeds request.timeout.ms. See
        # test_send_waits_for_a_broker_for_max_block_ms_and_not_for_request_timeout_ms.
        return unknown_topic_patience_ms if is_unknown else max(limit_ms, unknown_topic_patience_ms)

    def _pause_ms_or_raise(self, error: OncelogError, attempt: int, deadline_ms: float) -> float:
        """Return the pause before the next attempt.

        Raise `error` if it is not retriable, or if the pause would end after `deadline_ms`.
        """
        is_final = isinstance(error, BrokerError) and not error.retriable
        pause_ms = self.retry_pause_ms(attempt)
        if is_final or self.now_ms() + pause_ms > deadline_ms:
            raise error
        return pause_ms

    def why_no_leader(self, tp: TopicPartition) -> OncelogError | None:
        """Return an error that explains why a partition's leader is unknown; None if the leader is known."""
        if self.metadata.leader_of(tp) is not None:
            return None
        servers = ", ".join(self._settings["bootstrap.servers"])
        error = self.metadata.topic_error(tp.topic)
        if isinstance(error, UnknownTopicOrPartition):
            return UnknownTopicOrPartition(
                f"topic {tp.topic!r} does not exist at {servers}; create it, or set "
                "auto.create.topics.enable=true on the broker"
            )
        if error is not None:
            return error
        count = self.metadata.partition_count(tp.topic)
        if count is not None and tp.partition >= count:
            return UnknownTopicOrPartition(
                f"topic {tp.topic!r} has {count} partitions (0 to {count - 1}) at {servers}, "
                f"so there is no partition {tp.partition}"
            )
        return LeaderNotAvailable(f"{servers} knows no leader of partition {tp}")

    def retry_pause_ms(self, attempt: int) -> float:
        """Return retry.backoff.ms, doubled per attempt up to retry.backoff.max.ms, with 20 % jitter."""
        base, top = self._settings["retry.backoff.ms"], self._settings["retry.backoff.max.ms"]
        return float(min(base * 2 ** min(attempt, 20), max(top, base))) * self._runtime.rng.uniform(0.8, 1.2)

    async def retrying(
        self,
        attempt_once: Callable[[], Awaitable[T]],
        timeout_ms: float | None = None,
        *,
        unknown_topic_patience_ms: float = 0,
    ) -> T:
        """Repeat `attempt_once` until it succeeds.

        Raise its error if that error is final or the time limit has passed. The time limit is `timeout_ms`,
        or request.timeout.ms if that is None. UnknownTopicOrPartition is retried for at most
        `unknown_topic_patience_ms`. By default that error is final, because the lookup of leaders has already
        retried it.
        """
        limit_ms = self._settings["request.timeout.ms"] if timeout_ms is None else timeout_ms
        begin_ms = self.now_ms()
        attempt = 0
        while True:
            try:
                return await attempt_once()
            except (DisconnectedError, TimedOut, BrokerError) as error:
                if isinstance(error, BrokerError) and not error.retriable:
                    raise
                if isinstance(error, AuthenticationError):
                    raise
                pause_ms = self.retry_pause_ms(attempt)
                is_unknown = isinstance(error, UnknownTopicOrPartition)
                patience_ms = min(unknown_topic_patience_ms, limit_ms) if is_unknown else limit_ms
                if self.now_ms() + pause_ms > begin_ms + patience_ms:
                    raise
            attempt += 1
            await asyncio.sleep(pause_ms / 1000)
