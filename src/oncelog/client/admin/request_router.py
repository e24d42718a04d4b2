"""Sends each admin request to the right broker, and repeats requests after retriable errors.

The controller changes topics. A partition's leader handles its records and offsets. Settings of a broker
belong to that broker. A coordinator handles groups and transactions. Source: Kafka's KafkaAdminClient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

from oncelog.client.admin.core import ItemResult, raise_first
from oncelog.client.admin.types import ConfigResource
from oncelog.client.connection.cluster import ClusterConnection
from oncelog.client.connection.coordinator import find_coordinator
from oncelog.client.consumer.offset_lookup import find_leaders, group_by_leader
from oncelog.errors import (
    BrokerError,
    BrokerNotAvailable,
    DisconnectedError,
    MisuseError,
    NotController,
    OncelogError,
    RequestTimedOut,
    TimedOut,
    UnknownTopicOrPartition,
)
from oncelog.runtime.loop_thread import check_running_loop
from oncelog.settings import Settings
from oncelog.types import TopicPartition

_MAX_COORDINATORS = 1_000
K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R", bound=ItemResult)


class RequestRouter:
    """The sender of an admin client's requests. Its first request opens connections on the running event
    loop.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.timeout_ms: int = settings["request.timeout.ms"]
        self._cluster: ClusterConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._coordinators: dict[tuple[int, str], int] = {}
        """(GROUP or TRANSACTION, name) -> node id of the coordinator."""
        self._are_brokers_stale = False
        """True if a broker did not respond. It may have left the cluster, so look up the brokers again.

        Otherwise the metadata could name it, even as the controller, for metadata.max.age.ms. Guard:
        test_a_broker_that_has_left_the_cluster_gets_no_more_requests.
        """

    async def connect(self) -> ClusterConnection:
        """Return the cluster's connections, opening them if needed. Raises MisuseError after `close`."""
        if self._is_closed:
            raise MisuseError("this admin client is closed; make a new one")
        self._loop = check_running_loop(self._loop, "admin client")
        if self._cluster is None:
            self._cluster = ClusterConnection(self._settings, topics_in_use=tuple)
        await self._cluster.start()
        return self._cluster

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        check_running_loop(self._loop, "admin client")
        self._is_closed = True
        if self._cluster:
            await self._cluster.close()

    async def for_each(
        self,
        items: Collection[K],
        request_items: Callable[[list[K]], Awaitable[Mapping[K, R]]],
        failed: Callable[[K, OncelogError], R],
        raise_errors: bool,
    ) -> dict[K, R]:
        """Return the result of each item.

        If an item's error is retriable, request the item again until request.timeout.ms has passed.
        `request_items` sends one request for several items. `failed` builds the result of an item without a
        response. With `raise_errors`, raise the first error, with the other errors as notes.
        """
        cluster = await self.connect()
        deadline_ms = cluster.now_ms() + self.timeout_ms
        results: dict[K, R] = {}
        remaining, attempt = list(items), 0
        while remaining:
            try:
                answered = await request_items(remaining)
            except (DisconnectedError, TimedOut, BrokerError) as error:
                answered = {item: failed(item, error) for item in remaining}
            results |= {item: answered.get(item) or failed(item, _no_entry(item)) for item in remaining}
            pause_ms = cluster.retry_pause_ms(attempt)
            if cluster.now_ms() + pause_ms > deadline_ms:
                break
            remaining = [item for item in remaining if _is_worth_a_retry(results[item].error)]
            attempt += 1
            if remaining:
                await asyncio.sleep(pause_ms / 1000)
                await self._refresh_brokers(cluster)
        if raise_errors:
            raise_first(results.values())
        return results

    async def _refresh_brokers(self, cluster: ClusterConnection) -> None:
        try:
            await cluster.refresh_metadata(())
        except OncelogError:
            # Do not raise: the next request fails with the same error and reports it.
            return

    async def to_controller(self, message: Any, min_version: int | None = None) -> Any:
        """Send a request to the controller and return the response.

        With KRaft, the metadata reports an arbitrary broker as the controller. That broker forwards the
        request.
        """
        return await self._repeated(
            lambda cluster: cluster.request(cluster.metadata.controller_id, message, min_version=min_version)
        )

    async def _repeated(self, attempt: Callable[[ClusterConnection], Awaitable[T]]) -> T:
        """Repeat `attempt` after retriable errors until request.timeout.ms has passed. Return its result."""
        cluster = await self.connect()

        async def attempt_once() -> T:
            if self._are_brokers_stale:
                self._are_brokers_stale = False
                await self._refresh_brokers(cluster)
            try:
                return await attempt(cluster)
            except (DisconnectedError, TimedOut):
                self._are_brokers_stale = True
                raise

        return await cluster.retrying(attempt_once)

    async def to_leaders(
        self, partitions: list[TopicPartition], build: Callable[[list[TopicPartition]], Any]
    ) -> tuple[list[Any], dict[TopicPartition, OncelogError]]:
        """Send one request to each leader of these partitions.

        `build` makes the request from a leader's partitions. Return the responses, and the error of each
        partition without a response.
        """
        cluster = await self.connect()
        errors = await find_leaders(cluster, partitions)
        by_node, others = group_by_leader(cluster, [tp for tp in partitions if tp not in errors])
        errors |= others
        responses = await asyncio.gather(
            *(cluster.request(node_id, build(led)) for node_id, led in by_node.items()),
            return_exceptions=True,
        )
        for led, response in zip(by_node.values(), responses, strict=True):
            if isinstance(response, OncelogError):
                errors |= dict.fromkeys(led, response)
            elif isinstance(response, BaseException):
                raise response
        cluster.metadata.mark_stale(partitions)  # leaders may have moved: look them up before a retry
        return [response for response in responses if not isinstance(response, BaseException)], errors

    async def to_config_owner(self, resource: ConfigResource, message: Any) -> Any:
        """Send a request to the broker that owns a resource's settings, and return the response.

        Any broker can handle a topic's settings. Raises BrokerNotAvailable if the owner is a broker that the
        cluster does not have.
        """
        cluster = await self.connect()
        node_id = _node_of(resource)
        if node_id is not None:
            await self.check_brokers_exist([node_id])
        return await cluster.request(node_id, message)

    async def for_each_config_owner(
        self,
        resources: list[ConfigResource],
        request_owner: Callable[[list[ConfigResource]], Awaitable[Mapping[ConfigResource, R]]],
        failed: Callable[[ConfigResource, OncelogError], R],
    ) -> dict[ConfigResource, R]:
        """Call `request_owner` for the resources of each owner, and return all results.

        If an owner is unreachable, only the results for its resources have an error. Guard:
        test_an_absent_broker_does_not_affect_the_results_of_other_resources.
        """
        results: dict[ConfigResource, R] = {}
        for owned in _by_owner(resources):
            try:
                results |= await request_owner(owned)
            except (DisconnectedError, TimedOut, BrokerError) as error:
                results |= {resource: failed(resource, error) for resource in owned}
        return results

    async def check_brokers_exist(self, node_ids: Collection[int]) -> None:
        """Raise BrokerNotAvailable if one of these brokers is not in the newest metadata."""
        cluster = await self.connect()
        await cluster.retrying(lambda: cluster.fetch_metadata(()))
        existing = sorted(cluster.metadata.brokers)
        if missing := [node_id for node_id in node_ids if node_id not in existing]:
            raise BrokerNotAvailable(
                f"broker {missing[0]} does not exist; the cluster has brokers {existing}"
            )

    async def from_every_broker(self, request: Any, read: Callable[[int, Any], list[T]]) -> list[T]:
        """Send a request to every broker, and return all items that `read` finds in the responses.

        `read` takes the node id and the response of a broker, and may raise BrokerError.
        """

        async def attempt(cluster: ClusterConnection) -> list[T]:
            await cluster.fetch_metadata(())
            items: list[T] = []
            for node_id in list(cluster.metadata.brokers):
                items += read(node_id, await cluster.request(node_id, request))
            return items

        return await self._repeated(attempt)

    async def at_coordinator(
        self,
        kind: int,
        name: str,
        attempt: Callable[[ClusterConnection, int], Awaitable[T]],
        *,
        unknown_topic_patience_ms: float = 0,
    ) -> T:
        """Call `attempt(cluster, node id)` with the coordinator of a group or transactional id.

        The coordinator's node id is kept for later calls. After a retriable error, look the coordinator up
        again and repeat the call, until request.timeout.ms has passed. UnknownTopicOrPartition is retried for
        at most `unknown_topic_patience_ms`. Guard: test_a_coordinator_is_looked_up_again_after_an_error.
        """
        cluster = await self.connect()

        async def find_and_attempt() -> T:
            if (kind, name) not in self._coordinators:
                if len(self._coordinators) >= _MAX_COORDINATORS:
                    self._coordinators.clear()
                self._coordinators[kind, name] = await find_coordinator(cluster, kind, name)
            try:
                return await attempt(cluster, self._coordinators[kind, name])
            except OncelogError:
                # Look the coordinator up again, because it may have moved.
                self._coordinators.pop((kind, name), None)
                raise

        return await cluster.retrying(find_and_attempt, unknown_topic_patience_ms=unknown_topic_patience_ms)


def _no_entry(item: object) -> UnknownTopicOrPartition:
    return UnknownTopicOrPartition(f"the broker's response has no entry for {item}")


def _is_worth_a_retry(error: OncelogError | None) -> bool:
    # Do not retry UnknownTopicOrPartition, which the lookup of leaders has already retried. After
    # RequestTimedOut the broker still works on the request, so a second request would collide with the first.
    if isinstance(error, (UnknownTopicOrPartition, RequestTimedOut)):
        return False
    if isinstance(error, BrokerError):
        return error.retriable or isinstance(error, NotController)
    return isinstance(error, (DisconnectedError, TimedOut))


def _node_of(resource: ConfigResource) -> int | None:
    if resource.kind == "topic" or not resource.name:
        return None
    if not resource.name.isdecimal():
        raise MisuseError(f"broker {resource.name!r}: expected a node id, such as '1'")
    return int(resource.name)


def _by_owner(resources: list[ConfigResource]) -> list[list[ConfigResource]]:
    groups: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        groups.setdefault(_node_of(resource), []).append(resource)
    return list(groups.values())
