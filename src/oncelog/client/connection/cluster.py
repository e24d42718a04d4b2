"""A client's view of a cluster over asyncio: bootstrap, metadata, and requests to any broker by node id."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, TypeVar

from oncelog.client.arguments import names_of, topic_of
from oncelog.client.connection.broker_connection import BrokerLink
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
"""How long a topic may stay unknown before that is an error: one just created spreads in this time."""


def parse_bootstrap(servers: Collection[str] | None) -> list[tuple[str, int]]:
    """`HOST:PORT` strings to pairs ([HOST]:PORT for IPv6). Raises ConfigError."""
    if not servers:
        raise ConfigError(
            "bootstrap.servers is not set: give HOST:PORT of a broker, for example 127.0.0.1:9092"
        )
    return [_parse_server(server) for server in servers]


def _parse_server(server: str) -> tuple[str, int]:
    host, separator, port = server.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"bootstrap.servers={server!r}: expected HOST:PORT, for example 127.0.0.1:9092")
    return host.strip("[]"), int(port)


class _LookUp:
    """Those who look for leaders of one topic; one of them asks for all, `count` times so far.

    Topics do not wait for each other: one may be missing for long.
    """

    def __init__(self) -> None:
        self.asking = asyncio.Lock()
        self.count = 0


class ClusterConnection:
    """Links to the brokers of one cluster and what is known of it. Not thread safe: use it on its loop.

    Every failure is typed: DisconnectedError (no connection, or it ended: the outcome of the request
    is unknown), TimedOut, PeerError (bytes that are not Kafka's), UnsupportedVersion.

    `topics_in_use`: of which topics metadata are refreshed by age, and kept; all others are forgotten then.
    None: all that were asked for, until `forget_topics`. A refresh by age never creates a topic: a deleted
    one would come back as long as a client runs that used it once. Java's producer does create it, until
    metadata.max.idle.ms after the last send.
    """

    def __init__(
        self, settings: Settings, topics_in_use: Callable[[], Collection[str]] | None = None
    ) -> None:
        self.metadata = ClusterMetadata()
        self._settings = settings
        self._security = client_security(settings)
        self._runtime = system.current()
        self._bootstrap = parse_bootstrap(settings["bootstrap.servers"])
        self._links: dict[tuple[str, int, str], BrokerLink] = {}
        self._topics_in_use = topics_in_use
        self._topics: dict[str, None] = {}
        self._look_ups: weakref.WeakValueDictionary[str, _LookUp] = weakref.WeakValueDictionary()
        self._refresher: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def settings(self) -> Settings:
        return self._settings

    def now_ms(self) -> float:
        """Milliseconds of the monotonic clock."""
        return self._runtime.monotonic_ns() / 1e6

    async def start(self) -> None:
        """Find the cluster through the bootstrap servers; further calls do nothing.

        Raises AuthenticationError when TLS or SASL fails, DisconnectedError when none answers within
        oncelog.bootstrap.timeout.ms, and PeerError at once when all of them speak something else than
        Kafka's protocol.
        """
        if self._refresher is None:
            await self._find_cluster()
            self._check_open()  # `close` has passed: nobody would end what begins here
            if self._refresher is None:  # else another call has begun it meanwhile, and `close` ends only one
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
            except Exception:  # the task must go on: nobody would start it again
                _LOG.exception("refreshing metadata by age failed")

    async def _refresh_once_by_age(self) -> None:
        if self._topics_in_use is not None:
            self._topics = dict.fromkeys(self._topics_in_use())
        self.metadata.retain(self._topics)
        await self.fetch_metadata(list(self._topics))

    async def close(self) -> None:
        """Close every connection; requests in flight fail with DisconnectedError."""
        self._closed = True
        if self._refresher:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)
            self._refresher = None  # its error's traceback holds this object: a cycle
        self._topics_in_use = None
        await self._close_links(list(self._links))

    async def _close_links(self, keys: Collection[tuple[str, int, str]]) -> None:
        """Close these links at once; nobody finds one of them meanwhile."""
        links = [self._links.pop(key) for key in keys]
        await asyncio.gather(*(link.close() for link in links))

    # Requests

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
        """Write a request now (or as soon as the connection stands), in call order; the future is its answer.

        `node_id` None takes any broker. Requests of another `channel` use another connection, so that
        they do not wait behind a long poll. Produce with acks=0 gives None. `timeout_ms` None is
        request.timeout.ms. `on_written` is called before the first byte leaves.
        """
        self._check_open()
        host, port = self._any_address() if node_id is None else self._address(node_id)
        link = self._link(host, port, channel)
        return self._submit(link, message, timeout_ms, min_version, max_version, on_written)

    def _submit(
        self,
        link: BrokerLink,
        message: Any,
        timeout_ms: float | None = None,
        min_version: int | None = None,
        max_version: int | None = None,
        on_written: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        return link.submit(
            message,
            timeout_ms=self._settings["request.timeout.ms"] if timeout_ms is None else timeout_ms,
            min_version=min_version,
            max_version=max_version,
            answered=getattr(message, "acks", None) != 0,
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
    ) -> Any:
        """`submit` and wait. With `node_id` None every known address is tried before giving up."""
        if node_id is None:
            return await self._request_any(message, timeout_ms, min_version, max_version)
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
    ) -> Any:
        errors: list[OncelogError] = []
        for host, port in self._candidates():
            self._check_open()
            try:
                link = self._link(host, port, "")
                return await self._submit(link, message, timeout_ms, min_version, max_version)
            except (DisconnectedError, TimedOut, PeerError) as error:
                errors.append(error)
        # Trying again helps unless all of them speak another protocol.
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[-1])

    def _address(self, node_id: int) -> tuple[str, int]:
        broker = self.metadata.brokers.get(node_id)
        if broker is None:
            known = ", ".join(map(str, sorted(self.metadata.brokers))) or "none"
            raise DisconnectedError(f"broker {node_id} is not in the cluster's metadata (known: {known})")
        return broker.host, broker.port

    def _link(self, host: str, port: int, channel: str) -> BrokerLink:
        key = (host, port, channel)
        if key not in self._links:
            self._links[key] = BrokerLink(host, port, self._settings, self._security)
        return self._links[key]

    def _candidates(self) -> list[tuple[str, int]]:
        """Addresses to ask, best first: connected ones, known brokers, bootstrap servers, failing ones."""
        known = [(broker.host, broker.port) for broker in self.metadata.brokers.values()]
        addresses = list(dict.fromkeys([*known, *self._bootstrap]))

        def rank(address: tuple[str, int]) -> tuple[int, int]:
            link = self._links.get((*address, ""))
            if link is None:
                return (1, 0)
            return (0 if link.is_connected else 2 if link.is_backing_off else 1, link.in_flight_count)

        return sorted(addresses, key=rank)

    def _any_address(self) -> tuple[str, int]:
        return self._candidates()[0]

    def feature(self, node_id: int, name: str) -> int:
        """The level of a feature as a broker told it last; 0 where it is off or nothing is known."""
        broker = self.metadata.brokers.get(node_id)
        link = self._links.get((broker.host, broker.port, "")) if broker else None
        return link.features.get(name, 0) if link else 0

    # Metadata

    async def refresh_metadata(
        self, topics: Collection[str], *, allow_auto_topic_creation: bool = True
    ) -> None:
        """Ask any broker about `topics` (empty: only the brokers), and again by their age."""
        names = names_of(topics)
        self._topics |= dict.fromkeys(names)
        await self.fetch_metadata(names, allow_auto_topic_creation=allow_auto_topic_creation)

    async def fetch_metadata(
        self, topics: Collection[str] | None, *, allow_auto_topic_creation: bool = False
    ) -> Any:
        """One Metadata request (None: every topic of the cluster), noted in `metadata` and returned."""
        request = MetadataRequest(
            topics=None if topics is None else [MetadataRequest.MetadataRequestTopic(name=t) for t in topics],
            allow_auto_topic_creation=allow_auto_topic_creation,
        )
        response = await self._request_any(request)
        self.metadata.update(response, self.now_ms())
        await self._drop_links_of_gone_brokers()
        return response

    async def _drop_links_of_gone_brokers(self) -> None:
        keep = {(broker.host, broker.port) for broker in self.metadata.brokers.values()}
        gone = [key for key, link in self._links.items() if key[:2] not in keep and not link.in_flight_count]
        await self._close_links(gone)

    def forget_topics(self, topics: Iterable[str]) -> None:
        """Ask about these topics no more unless they are named again."""
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
        """Node id of the partition's leader, asking the cluster as long as it is not known.

        Raises UnknownTopicOrPartition after its patience (None: a short one), the broker's own error when it
        is final, and the last error when request.timeout.ms is over.
        """
        await self._find(
            tp,
            lambda: self.metadata.leader_of(tp) is not None,
            allow_auto_topic_creation=allow_auto_topic_creation,
            unknown_topic_patience_ms=unknown_topic_patience_ms,
        )
        node_id = self.metadata.leader_of(tp)
        assert node_id is not None
        return node_id

    async def topic(self, name: str, *, unknown_topic_patience_ms: float) -> int:
        """Return a topic's number of partitions, created if the broker does so; raises as `leader`.

        None of them needs a leader: one that has none must not keep the others from being written.
        """
        await self._find(
            TopicPartition(name, 0),
            lambda: bool(self.metadata.partition_count(name)),
            unknown_topic_patience_ms=unknown_topic_patience_ms,
        )
        return self.metadata.partition_count(name) or 0

    async def _find(
        self,
        tp: TopicPartition,
        is_found: Callable[[], bool],
        *,
        allow_auto_topic_creation: bool = True,
        unknown_topic_patience_ms: float | None = None,
    ) -> None:
        """Ask the cluster about a topic until what is sought is found, or the time for it is over."""
        topic_of(tp.topic)
        started_ms = self.now_ms()
        attempt = 0
        look_up = self._look_ups.setdefault(tp.topic, _LookUp())
        while not is_found():
            count = look_up.count
            async with look_up.asking:
                error = None
                if not (is_asked_by_another := look_up.count != count):
                    error = await self._refresh_for(tp, allow_auto_topic_creation)
                    look_up.count += 1
                if is_found():
                    return
                if (error := error or self.why_no_leader(tp)) is not None:
                    limit_ms = self._limit_ms(error, unknown_topic_patience_ms)
                    pause_ms = self._pause_ms_or_raise(error, attempt, started_ms + limit_ms)
                    if not is_asked_by_another:
                        await asyncio.sleep(pause_ms / 1000)
                        attempt += 1

    async def _refresh_for(self, tp: TopicPartition, create: bool) -> OncelogError | None:
        """Refresh once; return why the cluster could not be asked, or None."""
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
        # A producer's max.block.ms also bounds its wait for a broker that cannot be reached. See
        # test_send_waits_for_a_broker_for_max_block_ms_and_not_for_request_timeout_ms.
        return unknown_topic_patience_ms if is_unknown else max(limit_ms, unknown_topic_patience_ms)

    def _pause_ms_or_raise(self, error: OncelogError, attempt: int, deadline_ms: float) -> float:
        """Return how long to wait for the next try; raise the error when it is final or the time is over."""
        is_final = isinstance(error, BrokerError) and not error.retriable
        pause_ms = self.retry_pause_ms(attempt)
        if is_final or self.now_ms() + pause_ms > deadline_ms:
            raise error
        return pause_ms

    def why_no_leader(self, tp: TopicPartition) -> OncelogError | None:
        """Return why the leader is unknown, or None if it is not."""
        if self.metadata.leader_of(tp) is not None:
            return None
        servers = ", ".join(self._settings["bootstrap.servers"])
        error = self.metadata.topic_error(tp.topic)
        if isinstance(error, UnknownTopicOrPartition):
            return UnknownTopicOrPartition(
                f"topic {tp.topic!r} does not exist at {servers}; create it, "
                "or let the broker do so with auto.create.topics.enable"
            )
        if error is not None:
            return error
        count = self.metadata.partition_count(tp.topic)
        if count is not None and tp.partition >= count:
            return UnknownTopicOrPartition(
                f"topic {tp.topic!r} has {count} partitions (0 to {count - 1}) at {servers}, "
                f"so there is no partition {tp.partition}"
            )
        return LeaderNotAvailable(f"partition {tp} has no leader that {servers} knows of")

    def retry_pause_ms(self, attempt: int) -> float:
        """retry.backoff.ms, doubled per attempt (from 0) up to retry.backoff.max.ms, give or take 20 %."""
        base, top = self._settings["retry.backoff.ms"], self._settings["retry.backoff.max.ms"]
        return float(min(base * 2 ** min(attempt, 20), max(top, base))) * self._runtime.rng.uniform(0.8, 1.2)

    async def retrying(self, attempt_once: Callable[[], Awaitable[T]], timeout_ms: float | None = None) -> T:
        """Repeat until it succeeds, while the error is retriable and time (request.timeout.ms) is left."""
        limit_ms = self._settings["request.timeout.ms"] if timeout_ms is None else timeout_ms
        deadline_ms = self.now_ms() + limit_ms
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
                if isinstance(error, UnknownTopicOrPartition) or self.now_ms() + pause_ms > deadline_ms:
                    raise
            attempt += 1
            await asyncio.sleep(pause_ms / 1000)
