"""Admin for asyncio: each item goes to the broker that decides it, and again while that may help."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from oncelog.client.admin import core as calls
from oncelog.client.admin.acl_calls import AsyncPermissions
from oncelog.client.admin.coordinator_calls import AsyncCoordination
from oncelog.client.admin.quota_calls import AsyncQuotas
from oncelog.client.admin.types import (
    ClusterDescription,
    ConfigDescription,
    ConfigOutcome,
    ConfigResource,
    CreatedTopic,
    DeletedRecords,
    ListedOffset,
    LogDirDescription,
    NewTopic,
    PartitionProducers,
    TopicDescription,
    TopicListing,
    TopicOutcome,
)
from oncelog.client.arguments import by_partition, items_of, mapping_of, names_of, partitions_of
from oncelog.client.connection.cluster import ClusterConnection, parse_bootstrap
from oncelog.client.consumer.list_offsets import OffsetSpec
from oncelog.client.consumer.offset_lookup import list_offsets
from oncelog.config import ADMIN
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
    UnsupportedVersion,
    raise_for_code,
)
from oncelog.runtime.loop_thread import check_running_loop
from oncelog.settings import Settings
from oncelog.types import Isolation, TopicPartition
from oncelog.wire.messages import DescribeLogDirsRequest

K = TypeVar("K")
R = TypeVar("R", bound=calls.Outcome)

_BROKER_CHOOSES_VERSION = 4
"""CreateTopics from this version (Kafka 2.4) takes -1 for partitions and replication factor."""


class AsyncAdmin(AsyncCoordination, AsyncPermissions, AsyncQuotas):
    """Topics, settings, offsets and producers of a cluster, on the running asyncio loop.

    Calls that take several items raise the first item's error (others as notes on it) after all items
    were tried; with `raise_errors=False` they raise none and each result tells its own.
    Repeating after a lost answer may meet its own success, e.g. as TOPIC_ALREADY_EXISTS.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self._settings = ADMIN.parse({**(config or {}), **settings})
        parse_bootstrap(self._settings["bootstrap.servers"])
        self._cluster: ClusterConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def settings(self) -> Settings:
        return self._settings

    async def start(self) -> None:
        """Connect; other methods do so by themselves. Raises what ClusterConnection.start raises."""
        await self._connected()

    async def _connected(self) -> ClusterConnection:
        if self._closed:
            raise MisuseError("this admin client is closed; make a new one")
        self._loop = check_running_loop(self._loop, "admin client")
        if self._cluster is None:
            self._cluster = ClusterConnection(self._settings, topics_in_use=tuple)
        await self._cluster.start()
        return self._cluster

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        check_running_loop(self._loop, "admin client")
        self._closed = True
        if self._cluster:
            await self._cluster.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _timeout_ms(self) -> int:
        timeout_ms: int = self._settings["request.timeout.ms"]
        return timeout_ms

    # Asking, and asking again

    async def _per_item(
        self,
        items: Collection[K],
        ask: Callable[[list[K]], Awaitable[Mapping[K, R]]],
        failed: Callable[[K, OncelogError], R],
        raise_errors: bool,
    ) -> dict[K, R]:
        """Ask about all items, again about those whose error may pass, until request.timeout.ms is over."""
        cluster = await self._connected()
        deadline_ms = cluster.now_ms() + self._timeout_ms
        found: dict[K, R] = {}
        remaining, attempt = list(items), 0
        while remaining:
            try:
                answered = await ask(remaining)
            except (DisconnectedError, TimedOut, BrokerError) as error:
                answered = {item: failed(item, error) for item in remaining}
            unnamed = UnknownTopicOrPartition("the broker's answer does not name it")
            found |= {item: answered.get(item) or failed(item, unnamed) for item in remaining}
            pause_ms = cluster.retry_pause_ms(attempt)
            if cluster.now_ms() + pause_ms > deadline_ms:
                break
            remaining = [item for item in remaining if _may_pass(found[item].error)]
            attempt += 1
            if remaining:
                await asyncio.sleep(pause_ms / 1000)
                await self._look_again(cluster)
        if raise_errors:
            calls.raise_first(found.values())
        return found

    async def _look_again(self, cluster: ClusterConnection) -> None:
        try:
            await cluster.refresh_metadata(())
        except OncelogError:
            return  # the call itself meets the error again and tells it

    async def _ask_controller(self, message: Any, min_version: int | None = None) -> Any:
        """Topics are made and unmade by the controller; with KRaft any broker passes it on."""
        cluster = await self._connected()
        return await cluster.request(cluster.metadata.controller_id, message, min_version=min_version)

    async def _ask_leaders(
        self, partitions: list[TopicPartition], build: Callable[[list[TopicPartition]], Any]
    ) -> tuple[list[Any], dict[TopicPartition, OncelogError]]:
        """One request per leader: the answers, and the partitions that got none with the reason."""
        cluster = await self._connected()
        by_node: dict[int, list[TopicPartition]] = {}
        errors: dict[TopicPartition, OncelogError] = {}
        for tp in partitions:
            try:
                node_id = await cluster.leader(tp, allow_auto_topic_creation=False)
                by_node.setdefault(node_id, []).append(tp)
            except OncelogError as error:
                errors[tp] = error
        answers = await asyncio.gather(
            *(cluster.request(node_id, build(mine)) for node_id, mine in by_node.items()),
            return_exceptions=True,
        )
        for mine, answer in zip(by_node.values(), answers, strict=True):
            if isinstance(answer, OncelogError):
                errors |= dict.fromkeys(mine, answer)
            elif isinstance(answer, BaseException):
                raise answer
        cluster.metadata.mark_stale(partitions)  # whoever asks again asks for the leader first
        return [answer for answer in answers if not isinstance(answer, BaseException)], errors

    # Topics

    async def create_topics(
        self,
        topics: Collection[NewTopic] | NewTopic,
        *,
        validate_only: bool = False,
        raise_errors: bool = True,
    ) -> dict[str, CreatedTopic]:
        """Create topics, or only check that they could be."""
        by_name = {topic.name: topic for topic in items_of(topics, NewTopic, "NewTopic(name, ...)")}

        async def ask(names: list[str]) -> dict[str, CreatedTopic]:
            wanted = [by_name[name] for name in names]
            chooses = any(t.num_partitions is None or t.replication_factor is None for t in wanted)
            message = calls.create_topics(wanted, self._timeout_ms, validate_only)
            min_version = _BROKER_CHOOSES_VERSION if chooses else None
            return calls.created_topics(await self._ask_controller(message, min_version))

        def failed(name: str, error: OncelogError) -> CreatedTopic:
            return CreatedTopic(name, error=error)

        return await self._per_item(by_name, ask, failed, raise_errors)

    async def delete_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Delete topics with everything in them."""
        topics = list(dict.fromkeys(names_of(names)))

        async def ask(remaining: list[str]) -> dict[str, TopicOutcome]:
            message = calls.delete_topics(remaining, self._timeout_ms)
            return calls.deleted_topics(await self._ask_controller(message))

        outcomes = await self._per_item(topics, ask, TopicOutcome, raise_errors)
        (await self._connected()).forget_topics(topics)
        return outcomes

    async def create_partitions(
        self, counts: Mapping[str, int], *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Grow topics to these numbers of partitions, the present ones included."""
        counts = mapping_of(counts, str, "topic names (str)")

        async def ask(remaining: list[str]) -> dict[str, TopicOutcome]:
            wanted = {name: counts[name] for name in remaining}
            message = calls.create_partitions(wanted, self._timeout_ms, validate_only)
            return calls.grown_topics(await self._ask_controller(message))

        return await self._per_item(counts, ask, TopicOutcome, raise_errors)

    async def list_topics(self, *, include_internal: bool = False) -> list[TopicListing]:
        """The topics of the cluster by name."""
        cluster = await self._connected()
        response = await cluster.retrying(lambda: cluster.fetch_metadata(None))
        found = calls.listed_topics(response)
        return [topic for topic in found if include_internal or not topic.is_internal]

    async def describe_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicDescription]:
        """Partitions, leaders and replicas; asking never creates a topic."""

        async def ask(remaining: list[str]) -> dict[str, TopicDescription]:
            cluster = await self._connected()
            return calls.described_topics(await cluster.fetch_metadata(remaining))

        def failed(name: str, error: OncelogError) -> TopicDescription:
            return TopicDescription(name, error=error)

        return await self._per_item(list(dict.fromkeys(names_of(names))), ask, failed, raise_errors)

    async def delete_records(
        self, before_offsets: Mapping[TopicPartition, int | None], *, raise_errors: bool = True
    ) -> dict[TopicPartition, DeletedRecords]:
        """Delete the records before an offset, per partition; None: everything up to the high watermark."""
        before_offsets = by_partition(before_offsets)

        def failed(tp: TopicPartition, error: OncelogError) -> DeletedRecords:
            return DeletedRecords(tp, error=error)

        async def ask(remaining: list[TopicPartition]) -> dict[TopicPartition, DeletedRecords]:
            answers, errors = await self._ask_leaders(
                remaining,
                lambda mine: calls.delete_records({tp: before_offsets[tp] for tp in mine}, self._timeout_ms),
            )
            found = {tp: failed(tp, error) for tp, error in errors.items()}
            for answer in answers:
                found |= calls.deleted_records(answer)
            return found

        return await self._per_item(before_offsets, ask, failed, raise_errors)

    # Settings

    async def _ask_owner(self, resource: ConfigResource, message: Any) -> Any:
        """A broker knows its own settings; those of topics any broker."""
        cluster = await self._connected()
        node_id = _node_of(resource)
        if node_id is not None:
            await self._check_known(cluster, [node_id])
        return await cluster.request(node_id, message)

    async def _check_known(self, cluster: ClusterConnection, node_ids: Collection[int]) -> None:
        await cluster.retrying(lambda: cluster.fetch_metadata(()))
        known = sorted(cluster.metadata.brokers)
        if missing := [node_id for node_id in node_ids if node_id not in known]:
            raise BrokerNotAvailable(f"there is no broker {missing[0]}; the cluster has {known}")

    async def describe_configs(
        self, resources: Collection[ConfigResource] | ConfigResource, *, raise_errors: bool = True
    ) -> dict[ConfigResource, ConfigDescription]:
        """All settings of topics or brokers, with where each value comes from."""

        def failed(resource: ConfigResource, error: OncelogError) -> ConfigDescription:
            return ConfigDescription(resource, error=error)

        async def ask_one(owned: list[ConfigResource]) -> dict[ConfigResource, ConfigDescription]:
            answer = await self._ask_owner(owned[0], calls.describe_configs(owned))
            return calls.described_configs(answer)

        async def ask(remaining: list[ConfigResource]) -> dict[ConfigResource, ConfigDescription]:
            return await _ask_owners(remaining, ask_one, failed)

        chosen = items_of(resources, ConfigResource, "ConfigResource(kind, name)")
        return await self._per_item(list(dict.fromkeys(chosen)), ask, failed, raise_errors)

    async def alter_configs(
        self, changes: calls.Changes, *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[ConfigResource, ConfigOutcome]:
        """Change single settings and leave the others; None takes one back to its default."""
        changes = mapping_of(changes, ConfigResource, "ConfigResource(kind, name)")

        async def ask_one(owned: list[ConfigResource]) -> dict[ConfigResource, ConfigOutcome]:
            mine = {resource: changes[resource] for resource in owned}
            return calls.altered_configs(await self._alter(owned[0], mine, validate_only))

        async def ask(remaining: list[ConfigResource]) -> dict[ConfigResource, ConfigOutcome]:
            return await _ask_owners(remaining, ask_one, ConfigOutcome)

        return await self._per_item(changes, ask, ConfigOutcome, raise_errors)

    async def _alter(self, owner: ConfigResource, changes: calls.Changes, validate_only: bool) -> Any:
        try:
            return await self._ask_owner(owner, calls.alter_configs(changes, validate_only))
        except UnsupportedVersion:  # before Kafka 2.3
            current = await self.describe_configs(list(changes))
            return await self._ask_owner(owner, calls.replace_configs(changes, current, validate_only))

    # Looking around

    async def describe_cluster(self) -> ClusterDescription:
        """Id, controller and brokers."""
        cluster = await self._connected()
        await cluster.retrying(lambda: cluster.fetch_metadata(()))
        metadata = cluster.metadata
        brokers = tuple(metadata.brokers[node_id] for node_id in sorted(metadata.brokers))
        return ClusterDescription(metadata.cluster_id, metadata.controller_id, brokers)

    async def describe_log_dirs(self, node_ids: Sequence[int] | int | None = None) -> list[LogDirDescription]:
        """Where brokers (None: all) keep which partitions, and how large they are."""
        if node_ids is not None:
            node_ids = items_of(node_ids, int, "node ids (int)")
        cluster = await self._connected()
        await self._check_known(cluster, node_ids or ())
        found: list[LogDirDescription] = []
        for node_id in sorted(cluster.metadata.brokers) if node_ids is None else node_ids:
            response = await cluster.request(node_id, DescribeLogDirsRequest(topics=None))
            raise_for_code(response.error_code, f"log directories of broker {node_id}")
            found += calls.described_log_dirs(node_id, response)
        return found

    async def describe_producers(
        self, partitions: Collection[TopicPartition] | TopicPartition, *, raise_errors: bool = True
    ) -> dict[TopicPartition, PartitionProducers]:
        """The producer ids each partition's leader remembers (Kafka 2.8 or newer)."""

        def failed(tp: TopicPartition, error: OncelogError) -> PartitionProducers:
            return PartitionProducers(tp, error=error)

        async def ask(remaining: list[TopicPartition]) -> dict[TopicPartition, PartitionProducers]:
            answers, errors = await self._ask_leaders(remaining, calls.describe_producers)
            found = {tp: failed(tp, error) for tp, error in errors.items()}
            for answer in answers:
                found |= calls.described_producers(answer)
            return found

        return await self._per_item(list(dict.fromkeys(partitions_of(partitions))), ask, failed, raise_errors)

    async def list_offsets(
        self,
        specs: Mapping[TopicPartition, OffsetSpec],
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        *,
        raise_errors: bool = True,
    ) -> dict[TopicPartition, ListedOffset]:
        """Offsets by "earliest", "latest", "max-timestamp" (Kafka 3.0 or newer) or milliseconds.

        "latest" is the high watermark, with READ_COMMITTED the last stable offset.
        """
        outcome = await list_offsets(await self._connected(), by_partition(specs), isolation)
        found = {
            tp: ListedOffset(tp, error=at)
            if isinstance(at, OncelogError)
            else ListedOffset(tp, at.offset, at.timestamp_ms, at.leader_epoch)
            for tp, at in outcome.items()
        }
        if raise_errors:
            calls.raise_first(found.values())
        return found


def _may_pass(error: OncelogError | None) -> bool:
    if isinstance(error, (UnknownTopicOrPartition, RequestTimedOut)):
        return False  # asked patiently already; under way at the broker, where a repetition would collide
    if isinstance(error, BrokerError):
        return error.retriable or isinstance(error, NotController)
    return isinstance(error, (DisconnectedError, TimedOut))


def _node_of(resource: ConfigResource) -> int | None:
    if resource.kind == "topic":
        return None
    if not resource.name.isdecimal():
        raise MisuseError(f"broker {resource.name!r}: a broker resource is named by its node id")
    return int(resource.name)


async def _ask_owners(
    resources: list[ConfigResource],
    ask_one: Callable[[list[ConfigResource]], Awaitable[Mapping[ConfigResource, R]]],
    failed: Callable[[ConfigResource, OncelogError], R],
) -> dict[ConfigResource, R]:
    """Ask each owner of settings. One that cannot be asked takes no result from what another one owns.

    Guard: test_settings_of_a_broker_that_is_away_take_no_result_from_the_others.
    """
    found: dict[ConfigResource, R] = {}
    for owned in _by_owner(resources):
        try:
            found |= await ask_one(owned)
        except (DisconnectedError, TimedOut, BrokerError) as error:
            found |= {resource: failed(resource, error) for resource in owned}
    return found


def _by_owner(resources: list[ConfigResource]) -> list[list[ConfigResource]]:
    groups: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        groups.setdefault(_node_of(resource), []).append(resource)
    return list(groups.values())
