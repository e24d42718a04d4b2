"""The asyncio admin client. The pure modules beside it build the requests and read the responses."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from oncelog.client.admin import core
from oncelog.client.admin.acl_requests import (
    check_acls_created,
    create_acls_request,
    delete_acls_request,
    deleted_acls,
    describe_acls_request,
    described_acls,
)
from oncelog.client.admin.group_requests import (
    GroupDescription,
    GroupListing,
    check_group_deleted,
    delete_offsets_request,
    deleted_offsets,
    described_classic_group,
    described_consumer_group,
    listed_groups,
)
from oncelog.client.admin.quota_requests import (
    QuotaChanges,
    alter_quotas_request,
    check_quotas_altered,
    describe_quotas_request,
    described_quotas,
)
from oncelog.client.admin.request_router import RequestRouter
from oncelog.client.admin.scram_requests import (
    DEFAULT_ITERATIONS,
    check_users_altered,
    delete_user_request,
    describe_users_request,
    described_users,
    set_user_request,
)
from oncelog.client.admin.transaction_requests import (
    HANGING_AGE_MS,
    TransactionDescription,
    TransactionListing,
    abort_marker_request,
    check_aborted,
    described_transaction,
    list_transactions_request,
    listed_transactions,
)
from oncelog.client.admin.types import (
    BrokerVersions,
    ClusterDescription,
    ConfigDescription,
    ConfigOutcome,
    ConfigResource,
    CreatedTopic,
    DeletedOffset,
    DeletedRecords,
    ListedOffset,
    LogDirDescription,
    NewTopic,
    PartitionProducers,
    TopicDescription,
    TopicListing,
    TopicOutcome,
)
from oncelog.client.arguments import (
    by_partition,
    items_of,
    mapping_of,
    names_of,
    offsets_of,
    partitions_of,
    with_renamed_keyword,
)
from oncelog.client.closing import start_or_close
from oncelog.client.connection.cluster import (
    UNKNOWN_TOPIC_PATIENCE_MS,
    ClusterConnection,
    parse_bootstrap,
)
from oncelog.client.connection.coordinator import GROUP, TRANSACTION
from oncelog.client.connection.core import CLIENT_SOFTWARE_NAME, CLIENT_SOFTWARE_VERSION
from oncelog.client.consumer.list_offsets import OffsetSpec
from oncelog.client.consumer.offset_lookup import list_offsets
from oncelog.client.group.core import (
    LAST_RETENTION_VERSION,
    MAX_OFFSET_COMMIT_VERSION,
    MAX_OFFSET_FETCH_VERSION,
    commit_error,
    commit_request,
    committed_from,
    committed_request,
)
from oncelog.config import ADMIN
from oncelog.errors import (
    GroupIdNotFound,
    OncelogError,
    TransactionalIdNotFound,
    UnknownMemberId,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    error_for_code,
    raise_for_code,
)
from oncelog.rules.limits.quotas import QuotaEntity, QuotaFilter, Values
from oncelog.rules.security.authorization import Acl, AclFilter
from oncelog.rules.security.scram import Mechanism
from oncelog.rules.transactions.hanging import HeldBack, KnownTransaction, OpenTransaction, judge
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import ConsumerGroupMetadata, Isolation, OffsetAndMetadata, TopicPartition
from oncelog.wire.messages import (
    ApiVersionsRequest,
    ConsumerGroupDescribeRequest,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    DescribeLogDirsRequest,
    DescribeTransactionsRequest,
    ListGroupsRequest,
    OffsetFetchRequest,
)

R = TypeVar("R", bound=core.ItemResult)

_MIN_VERSION_OF_BROKER_DEFAULTS = 4
"""First version of CreateTopics (Kafka 2.4) that accepts -1: the broker's default number of partitions or
replicas.
"""
_SALT_BYTES = 24
_ALL_MECHANISMS = tuple(Mechanism)


class AsyncAdmin:
    """An admin client for asyncio: topics, settings, offsets, groups, transactions, ACLs and quotas.

        async with AsyncAdmin({"bootstrap.servers": "127.0.0.1:9092"}) as admin:
            await admin.create_topics([NewTopic("flights", num_partitions=3)])

    The constructor takes Kafka's settings as a mapping, or as keywords with underscores for dots, and raises
    ConfigError.

    A call that takes several items also takes a single item. It tries all items and then raises the first
    error, with the other errors as notes. With `raise_errors=False` no item's error is raised; instead each
    result has its own `error`. If a response is lost, a call may repeat its request. The repeated request
    then fails if the first one succeeded, for example with TopicAlreadyExists.

    Every call raises MisuseError for arguments of a wrong type and after `close`. If the cluster cannot be
    reached within request.timeout.ms, a call raises DisconnectedError, TimedOut or AuthenticationError.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self._settings = ADMIN.parse({**(config or {}), **settings})
        parse_bootstrap(self._settings["bootstrap.servers"])
        self._router = RequestRouter(self._settings)

    @property
    def settings(self) -> Settings:
        """The settings in effect, defaults included."""
        return self._settings

    async def start(self) -> None:
        """Connect to the cluster. Optional: every other method connects if necessary.

        Raises DisconnectedError, TimedOut, AuthenticationError.
        """
        await self._router.connect()

    async def close(self) -> None:
        """Close the connections; safe to call twice."""
        await self._router.close()

    async def __aenter__(self) -> Self:
        await start_or_close(self.start, self.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Topics

    async def create_topics(
        self,
        topics: Collection[NewTopic] | NewTopic,
        *,
        validate_only: bool = False,
        raise_errors: bool = True,
    ) -> dict[str, CreatedTopic]:
        """Create topics and return the results by name.

        With `validate_only`, only check whether they could be created. Raises TopicAlreadyExists,
        InvalidPartitions, InvalidReplicationFactor, InvalidConfig and other BrokerErrors.
        """
        by_name = {topic.name: topic for topic in items_of(topics, NewTopic, "NewTopic(name, ...)")}

        async def request_topics(names: list[str]) -> dict[str, CreatedTopic]:
            requested = [by_name[name] for name in names]
            needs_defaults = any(
                topic.num_partitions is None or topic.replication_factor is None for topic in requested
            )
            message = core.create_topics_request(requested, self._router.timeout_ms, validate_only)
            min_version = _MIN_VERSION_OF_BROKER_DEFAULTS if needs_defaults else None
            return core.created_topics(await self._router.to_controller(message, min_version))

        def failed(name: str, error: OncelogError) -> CreatedTopic:
            return CreatedTopic(name, error=error)

        return await self._router.for_each(by_name, request_topics, failed, raise_errors)

    async def delete_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Delete topics with all their records, and return the results by name.

        Raises UnknownTopicOrPartition.
        """
        topics = list(dict.fromkeys(names_of(names)))

        async def request_topics(remaining: list[str]) -> dict[str, TopicOutcome]:
            message = core.delete_topics_request(remaining, self._router.timeout_ms)
            return core.deleted_topics(await self._router.to_controller(message))

        results = await self._router.for_each(topics, request_topics, TopicOutcome, raise_errors)
        (await self._router.connect()).forget_topics(topics)
        return results

    async def create_partitions(
        self, counts: Mapping[str, int], *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Increase the number of partitions of topics. `counts` has the new total for each topic.

        Raises InvalidPartitions if a topic already has that many partitions or more, and
        UnknownTopicOrPartition.
        """
        counts = mapping_of(counts, str, "topic names (str)")

        async def request_topics(remaining: list[str]) -> dict[str, TopicOutcome]:
            requested = {name: counts[name] for name in remaining}
            message = core.create_partitions_request(requested, self._router.timeout_ms, validate_only)
            return core.extended_topics(await self._router.to_controller(message))

        return await self._router.for_each(counts, request_topics, TopicOutcome, raise_errors)

    async def list_topics(self, *, include_internal: bool = False) -> list[TopicListing]:
        """Return the topics of the cluster, ordered by name."""
        cluster = await self._router.connect()
        response = await cluster.retrying(lambda: cluster.fetch_metadata(None))
        topics = core.listed_topics(response)
        return [topic for topic in topics if include_internal or not topic.is_internal]

    async def describe_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicDescription]:
        """Return the partitions, leaders and replicas of topics, by name. Never creates a topic.

        Raises UnknownTopicOrPartition.
        """

        async def request_topics(remaining: list[str]) -> dict[str, TopicDescription]:
            cluster = await self._router.connect()
            return core.described_topics(await cluster.fetch_metadata(remaining))

        def failed(name: str, error: OncelogError) -> TopicDescription:
            return TopicDescription(name, error=error)

        topics = list(dict.fromkeys(names_of(names)))
        return await self._router.for_each(topics, request_topics, failed, raise_errors)

    async def delete_records(
        self, before_offsets: Mapping[TopicPartition, int | None], *, raise_errors: bool = True
    ) -> dict[TopicPartition, DeletedRecords]:
        """Delete the records of each partition below the partition's offset in `before_offsets`.

        An offset of None deletes up to the high watermark. Raises OffsetOutOfRange for an offset above the
        high watermark, and UnknownTopicOrPartition.
        """
        before_offsets = by_partition(before_offsets)

        def failed(tp: TopicPartition, error: OncelogError) -> DeletedRecords:
            return DeletedRecords(tp, error=error)

        async def request_partitions(remaining: list[TopicPartition]) -> dict[TopicPartition, DeletedRecords]:
            responses, errors = await self._router.to_leaders(
                remaining,
                lambda led: core.delete_records_request(
                    {tp: before_offsets[tp] for tp in led}, self._router.timeout_ms
                ),
            )
            results = {tp: failed(tp, error) for tp, error in errors.items()}
            for response in responses:
                results |= core.deleted_records(response)
            return results

        return await self._router.for_each(before_offsets, request_partitions, failed, raise_errors)

    # Settings of topics and brokers

    async def describe_configs(
        self,
        resources: Collection[ConfigResource] | ConfigResource,
        *,
        documented: bool = False,
        raise_errors: bool = True,
    ) -> dict[ConfigResource, ConfigDescription]:
        """Return all settings of topics or brokers, each with the source of its value.

        With `documented`, each entry also has its type, its default and its description, as far as the broker
        sends them (Kafka 2.6 or later). Raises UnknownTopicOrPartition, BrokerNotAvailable.
        """

        def failed(resource: ConfigResource, error: OncelogError) -> ConfigDescription:
            return ConfigDescription(resource, error=error)

        async def request_owner(owned: list[ConfigResource]) -> dict[ConfigResource, ConfigDescription]:
            message = core.describe_configs_request(owned, documented)
            return core.described_configs(await self._router.to_config_owner(owned[0], message))

        requested = items_of(resources, ConfigResource, "ConfigResource(kind, name)")
        return await self._for_each_config(
            list(dict.fromkeys(requested)), request_owner, failed, raise_errors
        )

    async def alter_configs(
        self, changes: core.ConfigChanges, *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[ConfigResource, ConfigOutcome]:
        """Change the settings in `changes` and keep all others. A value of None resets a setting to its
        default.

        Raises InvalidConfig, UnknownTopicOrPartition, BrokerNotAvailable.
        """
        changes = mapping_of(changes, ConfigResource, "ConfigResource(kind, name)")

        async def request_owner(owned: list[ConfigResource]) -> dict[ConfigResource, ConfigOutcome]:
            requested = {resource: changes[resource] for resource in owned}
            return core.altered_configs(await self._alter_configs(owned[0], requested, validate_only))

        return await self._for_each_config(changes, request_owner, ConfigOutcome, raise_errors)

    async def _alter_configs(
        self, owner: ConfigResource, changes: core.ConfigChanges, validate_only: bool
    ) -> Any:
        try:
            message = core.alter_configs_request(changes, validate_only)
            return await self._router.to_config_owner(owner, message)
        except UnsupportedVersion:
            # Brokers before Kafka 2.3 have no IncrementalAlterConfigs (KIP-339), so replace all settings.
            current = await self.describe_configs(list(changes))
            replacing = core.replace_configs_request(changes, current, validate_only)
            return await self._router.to_config_owner(owner, replacing)

    async def _for_each_config(
        self,
        resources: Collection[ConfigResource],
        request_owner: Callable[[list[ConfigResource]], Awaitable[Mapping[ConfigResource, R]]],
        failed: Callable[[ConfigResource, OncelogError], R],
        raise_errors: bool,
    ) -> dict[ConfigResource, R]:
        async def request_resources(remaining: list[ConfigResource]) -> dict[ConfigResource, R]:
            return await self._router.for_each_config_owner(remaining, request_owner, failed)

        return await self._router.for_each(resources, request_resources, failed, raise_errors)

    # Cluster, log directories and partitions

    async def describe_cluster(self) -> ClusterDescription:
        """Return the cluster's id, its controller and its brokers."""
        cluster = await self._router.connect()
        await cluster.retrying(lambda: cluster.fetch_metadata(()))
        metadata = cluster.metadata
        brokers = tuple(metadata.brokers[node_id] for node_id in sorted(metadata.brokers))
        return ClusterDescription(metadata.cluster_id, metadata.controller_id, brokers)

    async def describe_broker_versions(
        self, node_ids: Sequence[int] | int | None = None
    ) -> list[BrokerVersions]:
        """Return the API versions and the features that each of these brokers (None: all) supports.

        Raises BrokerNotAvailable.
        """
        if node_ids is not None:
            node_ids = items_of(node_ids, int, "node ids (int)")
        cluster = await self._router.connect()
        await self._router.check_brokers_exist(node_ids or ())
        request = ApiVersionsRequest(
            client_software_name=CLIENT_SOFTWARE_NAME, client_software_version=CLIENT_SOFTWARE_VERSION
        )
        return [
            core.broker_versions(node_id, await cluster.request(node_id, request))
            for node_id in (sorted(cluster.metadata.brokers) if node_ids is None else node_ids)
        ]

    async def describe_log_dirs(self, node_ids: Sequence[int] | int | None = None) -> list[LogDirDescription]:
        """Return the log directories of these brokers (None: all), with their partitions and sizes in bytes.

        Raises BrokerNotAvailable.
        """
        if node_ids is not None:
            node_ids = items_of(node_ids, int, "node ids (int)")
        cluster = await self._router.connect()
        await self._router.check_brokers_exist(node_ids or ())
        log_dirs: list[LogDirDescription] = []
        for node_id in sorted(cluster.metadata.brokers) if node_ids is None else node_ids:
            response = await cluster.request(node_id, DescribeLogDirsRequest(topics=None))
            raise_for_code(response.error_code, f"log directories of broker {node_id}")
            log_dirs += core.described_log_dirs(node_id, response)
        return log_dirs

    async def describe_producers(
        self, partitions: Collection[TopicPartition] | TopicPartition, *, raise_errors: bool = True
    ) -> dict[TopicPartition, PartitionProducers]:
        """Return the producers whose state each partition stores. Needs Kafka 2.8 or later (KIP-664).

        Raises UnknownTopicOrPartition, UnsupportedVersion.
        """

        def failed(tp: TopicPartition, error: OncelogError) -> PartitionProducers:
            return PartitionProducers(tp, error=error)

        async def request_partitions(
            remaining: list[TopicPartition],
        ) -> dict[TopicPartition, PartitionProducers]:
            responses, errors = await self._router.to_leaders(remaining, core.describe_producers_request)
            results = {tp: failed(tp, error) for tp, error in errors.items()}
            for response in responses:
                results |= core.described_producers(response)
            return results

        requested = list(dict.fromkeys(partitions_of(partitions)))
        return await self._router.for_each(requested, request_partitions, failed, raise_errors)

    async def list_offsets(
        self,
        specs: Mapping[TopicPartition, OffsetSpec],
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        *,
        raise_errors: bool = True,
    ) -> dict[TopicPartition, ListedOffset]:
        """Look up one offset per partition: "earliest", "latest", "max-timestamp" or a time in ms since 1970.

        "latest" is the high watermark, or with READ_COMMITTED the last stable offset. "max-timestamp" is the
        offset of the record with the largest timestamp, and needs Kafka 3.0 or later. A time selects the
        first record with this timestamp or a later one. Raises UnknownTopicOrPartition, UnsupportedVersion.
        """
        offsets = await list_offsets(await self._router.connect(), by_partition(specs), isolation)
        results = {
            tp: ListedOffset(tp, error=result)
            if isinstance(result, OncelogError)
            else ListedOffset(tp, result.offset, result.timestamp_ms, result.leader_epoch)
            for tp, result in offsets.items()
        }
        if raise_errors:
            core.raise_first(results.values())
        return results

    # Transactions

    async def list_transactions(
        self, states: Collection[str] | str = (), producer_ids: Collection[int] | int = ()
    ) -> list[TransactionListing]:
        """Return the transactional ids of all brokers, ordered by name.

        `states` (Kafka's names, such as "Ongoing") and `producer_ids` are filters. An empty filter matches
        everything.
        """
        request = list_transactions_request(
            names_of(states, "state names (str)"), items_of(producer_ids, int, "producer ids (int)")
        )
        listings = await self._router.from_every_broker(request, listed_transactions)
        return sorted(listings, key=lambda listing: listing.transactional_id)

    async def describe_transactions(
        self, transactional_ids: Collection[str] | str
    ) -> dict[str, TransactionDescription]:
        """Return the coordinator's entry (producer, state, partitions) of each transactional id.

        Raises TransactionalIdNotFound.
        """
        names = names_of(transactional_ids, "transactional ids (str)")
        return {name: await self._describe_transaction(name) for name in names}

    async def _describe_transaction(self, transactional_id: str) -> TransactionDescription:
        request = DescribeTransactionsRequest(transactional_ids=[transactional_id])

        async def attempt(cluster: ClusterConnection, node_id: int) -> TransactionDescription:
            return described_transaction(transactional_id, await cluster.request(node_id, request))

        return await self._router.at_coordinator(TRANSACTION, transactional_id, attempt)

    async def open_transactions(self, topics: Collection[str] | str | None = None) -> list[OpenTransaction]:
        """Return each transaction that is open on a partition of these topics (None: of all topics)."""
        if topics is None:
            topics = [topic.name for topic in await self.list_topics(include_internal=True)]
        names = names_of(topics)
        described = await self.describe_topics(names)
        partitions = [
            TopicPartition(name, info.partition) for name in names for info in described[name].partitions
        ]
        producers_of = await self.describe_producers(partitions) if partitions else {}
        return [opened for producers in producers_of.values() for opened in producers.open_transactions()]

    async def find_hanging(
        self, topics: Collection[str] | str | None = None, *, older_than_ms: int = HANGING_AGE_MS
    ) -> list[HeldBack]:
        """Return each open transaction with a verdict (KIP-664): YES if it is hanging, NO, or PERHAPS.

        No coordinator will end a hanging transaction. A transaction that looks hanging is PERHAPS until its
        last record is older than `older_than_ms`.
        """
        open_transactions = await self.open_transactions(topics)
        entries = await self.known_transactions({opened.producer_id for opened in open_transactions})
        now_ms = system.current().wall_ns() // 1_000_000
        return [
            judge(opened, entries.get(opened.producer_id), now_ms=now_ms, older_than_ms=older_than_ms)
            for opened in open_transactions
        ]

    async def known_transactions(self, producer_ids: Collection[int] | int) -> dict[int, KnownTransaction]:
        """Return the transaction coordinators' entries of these producer ids, by producer id.

        Producer ids that no coordinator knows are left out.
        """
        ids = items_of(producer_ids, int, "producer ids (int)")
        entries: dict[int, KnownTransaction] = {}
        if not ids:
            return entries  # an empty filter would list every transactional id
        for listing in await self.list_transactions(producer_ids=ids):
            # A transactional id may expire after it was listed. No coordinator knows it then.
            with suppress(TransactionalIdNotFound):
                entries[listing.producer_id] = (
                    await self._describe_transaction(listing.transactional_id)
                ).known()
        return entries

    async def abort_transaction(self, opened: OpenTransaction) -> None:
        """Write an ABORT marker for a hanging transaction, so that the partition's last stable offset
        advances.

        Take `opened` from `find_hanging`. Raises InvalidProducerEpoch or TransactionCoordinatorFenced if a
        newer epoch of the producer or of the coordinator has written to the partition since `find_hanging`.
        """
        cluster = await self._router.connect()
        leader = await cluster.leader(opened.tp, allow_auto_topic_creation=False)
        check_aborted(await cluster.request(leader, abort_marker_request(opened)), opened)

    # Groups

    async def list_groups(self, states: Collection[str] | str = ()) -> list[GroupListing]:
        """Return the groups of all brokers, ordered by id.

        `states` (Kafka's names, such as "Stable") is a filter. An empty filter matches all groups.
        """
        request = ListGroupsRequest(states_filter=names_of(states, "state names (str)"))
        listings = await self._router.from_every_broker(request, listed_groups)
        return sorted(listings, key=lambda listing: listing.group_id)

    async def describe_groups(self, group_ids: Collection[str] | str) -> dict[str, GroupDescription]:
        """Return groups by id, with their members and assignments.

        Raises GroupIdNotFound for an unknown group. Brokers before Kafka 4 describe an unknown group with
        state Dead and without an error.
        """
        names = names_of(group_ids, "group ids (str)")
        return {group_id: await self._describe_group(group_id) for group_id in names}

    async def _describe_group(self, group_id: str) -> GroupDescription:
        async def attempt(cluster: ClusterConnection, node_id: int) -> GroupDescription:
            # Each group protocol has its own API. Kafka's Java client tries the two APIs in this order.
            with suppress(UnsupportedVersion, GroupIdNotFound):
                request = ConsumerGroupDescribeRequest(group_ids=[group_id])
                return described_consumer_group(group_id, await cluster.request(node_id, request))
            classic = DescribeGroupsRequest(groups=[group_id])
            return described_classic_group(group_id, await cluster.request(node_id, classic))

        return await self._router.at_coordinator(GROUP, group_id, attempt)

    async def delete_group(self, group_id: str) -> None:
        """Delete a group and its committed offsets. Raises NonEmptyGroup, GroupIdNotFound."""

        async def attempt(cluster: ClusterConnection, node_id: int) -> None:
            request = DeleteGroupsRequest(groups_names=[group_id])
            check_group_deleted(group_id, await cluster.request(node_id, request))

        await self._router.at_coordinator(GROUP, group_id, attempt)

    async def group_offsets(
        self, group_id: str, stable: Collection[TopicPartition] | TopicPartition | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return all committed offsets of a group; an empty dict for a group that does not exist.

        With `stable`, return only the offsets of the partitions in `stable`. First wait for open transactions
        that commit offsets of these partitions (KIP-447).
        """
        all_topics = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None)
        request = OffsetFetchRequest(group_id=group_id, topics=None, groups=[all_topics])
        min_version = 2
        if stable is not None:
            request, min_version = committed_request(group_id, partitions_of(stable), is_stable=True), 7

        async def attempt(
            cluster: ClusterConnection, node_id: int
        ) -> dict[TopicPartition, OffsetAndMetadata]:
            response = await cluster.request(
                node_id, request, min_version=min_version, max_version=MAX_OFFSET_FETCH_VERSION
            )
            error, offsets = committed_from(response)
            if error is not None:
                raise error
            return offsets

        return await self._router.at_coordinator(GROUP, group_id, attempt)

    async def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        *,
        retention_ms: int | None = None,
    ) -> None:
        """Commit offsets for a group without members.

        With `retention_ms`, the broker keeps the offsets for that time instead of offsets.retention.minutes.
        Raises UnknownMemberId if the group has members, and UnknownTopicOrPartition if the coordinator still
        does not know the topic after 3 s.
        """
        request = commit_request(ConsumerGroupMetadata(group_id), offsets_of(offsets))
        max_version = MAX_OFFSET_COMMIT_VERSION
        if retention_ms is not None:
            # Versions of OffsetCommit after LAST_RETENTION_VERSION have no field for a retention time.
            request.retention_time_ms, max_version = retention_ms, LAST_RETENTION_VERSION

        async def attempt(cluster: ClusterConnection, node_id: int) -> None:
            error = commit_error(await cluster.request(node_id, request, max_version=max_version))
            if error is not None:
                if isinstance(error, UnknownTopicOrPartition):
                    raise error  # `at_coordinator` retries this error for 3 s, because the topic may be new
                reason = (
                    " has members: stop its consumers first" if isinstance(error, UnknownMemberId) else ""
                )
                raise error_for_code(error.code, f"group {group_id!r}{reason}")

        await self._router.at_coordinator(
            GROUP, group_id, attempt, unknown_topic_patience_ms=UNKNOWN_TOPIC_PATIENCE_MS
        )

    async def delete_group_offsets(
        self,
        group_id: str,
        partitions: Collection[TopicPartition] | TopicPartition,
        *,
        raise_errors: bool = True,
    ) -> dict[TopicPartition, DeletedOffset]:
        """Delete a group's committed offsets of these partitions, and return the results.

        Raises GroupIdNotFound, GroupSubscribedToTopic for a topic that a member reads, and NonEmptyGroup.
        Needs Kafka 2.4 or later (KIP-496).
        """
        request = delete_offsets_request(group_id, partitions_of(partitions))

        async def attempt(cluster: ClusterConnection, node_id: int) -> dict[TopicPartition, DeletedOffset]:
            return deleted_offsets(group_id, await cluster.request(node_id, request))

        results = await self._router.at_coordinator(GROUP, group_id, attempt)
        if raise_errors:
            core.raise_first(results.values())
        return results

    # ACLs

    async def create_acls(self, acls: Collection[Acl] | Acl) -> None:
        """Add ACLs. It is not an error if an ACL already exists. Raises SecurityDisabled, InvalidRequest."""
        acls = items_of(acls, Acl, "Acl(...)")
        check_acls_created(await self._router.to_controller(create_acls_request(acls)), acls)

    @with_renamed_keyword("wanted", "acl_filter")
    async def describe_acls(self, acl_filter: AclFilter | None = None) -> list[Acl]:
        """Return the ACLs that match a filter (None: all), sorted. Raises SecurityDisabled."""
        message = describe_acls_request(acl_filter or AclFilter())
        return described_acls(await self._router.to_controller(message))

    async def delete_acls(self, filters: Collection[AclFilter | Acl] | AclFilter | Acl) -> list[Acl]:
        """Delete the ACLs that match any of the filters, and return the deleted ACLs.

        An Acl as filter matches only itself. Raises SecurityDisabled.
        """
        requested = items_of(filters, cast("type[Any]", AclFilter | Acl), "AclFilter(...)")
        return deleted_acls(await self._router.to_controller(delete_acls_request(requested)))

    # SCRAM users

    async def set_user(
        self,
        name: str,
        password: str,
        *,
        mechanisms: Collection[Mechanism] | Mechanism = _ALL_MECHANISMS,
        iterations: int = DEFAULT_ITERATIONS,
    ) -> None:
        """Add a SCRAM user, or change the user's password.

        Only a salted hash of the password is sent (KIP-554). Raises UnacceptableCredential if the broker does
        not accept this number of PBKDF2 `iterations`.
        """
        salt = os.urandom(_SALT_BYTES)
        # One request per mechanism, because a request may name a user only once.
        for mechanism in items_of(mechanisms, Mechanism, "Mechanism"):
            message = set_user_request(name, password, mechanism, salt, iterations)
            check_users_altered(await self._router.to_controller(message))

    async def delete_user(
        self, name: str, *, mechanisms: Collection[Mechanism] | Mechanism | None = None
    ) -> None:
        """Delete a SCRAM user's credentials for these mechanisms (None: all). Raises ResourceNotFound."""
        if mechanisms is None:
            mechanisms = list((await self.list_users([name]))[name])
        for mechanism in items_of(mechanisms, Mechanism, "Mechanism"):
            check_users_altered(await self._router.to_controller(delete_user_request(name, mechanism)))

    async def list_users(
        self, names: Collection[str] | str | None = None
    ) -> Mapping[str, Mapping[Mechanism, int]]:
        """Return the number of PBKDF2 iterations of SCRAM users (None: all), by user and mechanism.

        Raises ResourceNotFound.
        """
        if names is not None:
            names = names_of(names, "user names (str)")
        return described_users(await self._router.to_controller(describe_users_request(names)))

    # Quotas

    @with_renamed_keyword("wanted", "quota_filter")
    async def describe_client_quotas(
        self, quota_filter: QuotaFilter | None = None
    ) -> Mapping[QuotaEntity, Values]:
        """Return the quotas of the entities that match a filter (None: all), by entity and quota name."""
        message = describe_quotas_request(quota_filter or QuotaFilter())
        return described_quotas(await self._router.to_controller(message))

    async def alter_client_quotas(self, changes: QuotaChanges, *, validate_only: bool = False) -> None:
        """Set quotas by entity and quota name. A value of None removes the quota (KIP-546).

        Raises InvalidRequest for the first entity that is refused. The other entities are altered.
        """
        message = alter_quotas_request(changes, validate_only=validate_only)
        check_quotas_altered(await self._router.to_controller(message))
