"""The blocking admin client: it runs an AsyncAdmin on an event loop in a background thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.core import ConfigChanges
from oncelog.client.admin.group_requests import GroupDescription, GroupListing
from oncelog.client.admin.quota_requests import QuotaChanges
from oncelog.client.admin.scram_requests import DEFAULT_ITERATIONS
from oncelog.client.admin.transaction_requests import (
    HANGING_AGE_MS,
    TransactionDescription,
    TransactionListing,
)
from oncelog.client.admin.types import (
    ActiveProducer,
    BrokerVersions,
    ClusterDescription,
    ConfigDescription,
    ConfigEntry,
    ConfigOutcome,
    ConfigResource,
    CreatedTopic,
    DeletedOffset,
    DeletedRecords,
    Feature,
    ListedOffset,
    LogDirDescription,
    NewTopic,
    PartitionProducers,
    ReplicaLog,
    TopicDescription,
    TopicListing,
    TopicOutcome,
)
from oncelog.client.arguments import with_renamed_keyword
from oncelog.client.consumer.list_offsets import OffsetSpec
from oncelog.rules.limits.quotas import QuotaEntity, QuotaFilter, Values
from oncelog.rules.security.authorization import Acl, AclFilter
from oncelog.rules.security.scram import Mechanism
from oncelog.rules.transactions.hanging import HeldBack, KnownTransaction, OpenTransaction
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import Isolation, OffsetAndMetadata, TopicPartition

__all__ = [
    "ActiveProducer",
    "Admin",
    "AsyncAdmin",
    "BrokerVersions",
    "ClusterDescription",
    "ConfigDescription",
    "ConfigEntry",
    "ConfigOutcome",
    "ConfigResource",
    "CreatedTopic",
    "DeletedOffset",
    "DeletedRecords",
    "Feature",
    "ListedOffset",
    "LogDirDescription",
    "NewTopic",
    "PartitionProducers",
    "ReplicaLog",
    "TopicDescription",
    "TopicListing",
    "TopicOutcome",
]

_CLOSE_SECONDS = 10.0
_ALL_MECHANISMS = tuple(Mechanism)


class Admin:
    """A blocking admin client: topics, settings, offsets, groups, transactions, ACLs and quotas.

        with Admin({"bootstrap.servers": "127.0.0.1:9092"}) as admin:
            admin.create_topics([NewTopic("flights", num_partitions=3)])

    The constructor takes Kafka's settings as a mapping, or as keywords with underscores for dots, and raises
    ConfigError. Threads may share an Admin. Every call blocks until it is done.

    A call that takes several items also takes a single item. It tries all items and then raises the first
    error, with the other errors as notes. With `raise_errors=False` no item's error is raised; instead each
    result has its own `error`. If a response is lost, a call may repeat its request. The repeated request
    then fails if the first one succeeded, for example with TopicAlreadyExists.

    Every call raises MisuseError for arguments of a wrong type and after `close`. If the cluster cannot be
    reached within request.timeout.ms, a call raises DisconnectedError, TimedOut or AuthenticationError.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self._async = AsyncAdmin(config, **settings)
        self._thread = system.current().loop_thread("oncelog-admin")

    @property
    def settings(self) -> Settings:
        """The settings in effect, defaults included."""
        return self._async.settings

    def close(self) -> None:
        """Close the connections; safe to call twice."""
        if self._thread.is_running:
            try:
                self._thread.run(self._async.close(), _CLOSE_SECONDS)
            finally:
                self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Topics

    def create_topics(
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
        return self._thread.run(
            self._async.create_topics(topics, validate_only=validate_only, raise_errors=raise_errors)
        )

    def delete_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Delete topics with all their records, and return the results by name.

        Raises UnknownTopicOrPartition.
        """
        return self._thread.run(self._async.delete_topics(names, raise_errors=raise_errors))

    def create_partitions(
        self, counts: Mapping[str, int], *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Increase the number of partitions of topics. `counts` has the new total for each topic.

        Raises InvalidPartitions if a topic already has that many partitions or more, and
        UnknownTopicOrPartition.
        """
        return self._thread.run(
            self._async.create_partitions(counts, validate_only=validate_only, raise_errors=raise_errors)
        )

    def list_topics(self, *, include_internal: bool = False) -> list[TopicListing]:
        """Return the topics of the cluster, ordered by name."""
        return self._thread.run(self._async.list_topics(include_internal=include_internal))

    def describe_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicDescription]:
        """Return the partitions, leaders and replicas of topics, by name. Never creates a topic.

        Raises UnknownTopicOrPartition.
        """
        return self._thread.run(self._async.describe_topics(names, raise_errors=raise_errors))

    def delete_records(
        self, before_offsets: Mapping[TopicPartition, int | None], *, raise_errors: bool = True
    ) -> dict[TopicPartition, DeletedRecords]:
        """Delete the records of each partition below the partition's offset in `before_offsets`.

        An offset of None deletes up to the high watermark. Raises OffsetOutOfRange for an offset above the
        high watermark, and UnknownTopicOrPartition.
        """
        return self._thread.run(self._async.delete_records(before_offsets, raise_errors=raise_errors))

    # Settings of topics and brokers

    def describe_configs(
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
        return self._thread.run(
            self._async.describe_configs(resources, documented=documented, raise_errors=raise_errors)
        )

    def alter_configs(
        self, changes: ConfigChanges, *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[ConfigResource, ConfigOutcome]:
        """Change the settings in `changes` and keep all others. A value of None resets a setting to its
        default.

        Raises InvalidConfig, UnknownTopicOrPartition, BrokerNotAvailable.
        """
        return self._thread.run(
            self._async.alter_configs(changes, validate_only=validate_only, raise_errors=raise_errors)
        )

    # Cluster, log directories and partitions

    def describe_cluster(self) -> ClusterDescription:
        """Return the cluster's id, its controller and its brokers."""
        return self._thread.run(self._async.describe_cluster())

    def describe_broker_versions(self, node_ids: Sequence[int] | int | None = None) -> list[BrokerVersions]:
        """Return the API versions and the features that each of these brokers (None: all) supports.

        Raises BrokerNotAvailable.
        """
        return self._thread.run(self._async.describe_broker_versions(node_ids))

    def describe_log_dirs(self, node_ids: Sequence[int] | int | None = None) -> list[LogDirDescription]:
        """Return the log directories of these brokers (None: all), with their partitions and sizes in bytes.

        Raises BrokerNotAvailable.
        """
        return self._thread.run(self._async.describe_log_dirs(node_ids))

    def describe_producers(
        self, partitions: Collection[TopicPartition] | TopicPartition, *, raise_errors: bool = True
    ) -> dict[TopicPartition, PartitionProducers]:
        """Return the producers whose state each partition stores. Needs Kafka 2.8 or later (KIP-664).

        Raises UnknownTopicOrPartition, UnsupportedVersion.
        """
        return self._thread.run(self._async.describe_producers(partitions, raise_errors=raise_errors))

    def list_offsets(
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
        return self._thread.run(self._async.list_offsets(specs, isolation, raise_errors=raise_errors))

    # Transactions

    def list_transactions(
        self, states: Collection[str] | str = (), producer_ids: Collection[int] | int = ()
    ) -> list[TransactionListing]:
        """Return the transactional ids of all brokers, ordered by name.

        `states` (Kafka's names, such as "Ongoing") and `producer_ids` are filters. An empty filter matches
        everything.
        """
        return self._thread.run(self._async.list_transactions(states, producer_ids))

    def describe_transactions(
        self, transactional_ids: Collection[str] | str
    ) -> dict[str, TransactionDescription]:
        """Return the coordinator's entry (producer, state, partitions) of each transactional id.

        Raises TransactionalIdNotFound.
        """
        return self._thread.run(self._async.describe_transactions(transactional_ids))

    def open_transactions(self, topics: Collection[str] | str | None = None) -> list[OpenTransaction]:
        """Return each transaction that is open on a partition of these topics (None: of all topics)."""
        return self._thread.run(self._async.open_transactions(topics))

    def find_hanging(
        self, topics: Collection[str] | str | None = None, *, older_than_ms: int = HANGING_AGE_MS
    ) -> list[HeldBack]:
        """Return each open transaction with a verdict (KIP-664): YES if it is hanging, NO, or PERHAPS.

        No coordinator will end a hanging transaction. A transaction that looks hanging is PERHAPS until its
        last record is older than `older_than_ms`.
        """
        return self._thread.run(self._async.find_hanging(topics, older_than_ms=older_than_ms))

    def known_transactions(self, producer_ids: Collection[int] | int) -> dict[int, KnownTransaction]:
        """Return the transaction coordinators' entries of these producer ids, by producer id.

        Producer ids that no coordinator knows are left out.
        """
        return self._thread.run(self._async.known_transactions(producer_ids))

    def abort_transaction(self, opened: OpenTransaction) -> None:
        """Write an ABORT marker for a hanging transaction, so that the partition's last stable offset
        advances.

        Take `opened` from `find_hanging`. Raises InvalidProducerEpoch or TransactionCoordinatorFenced if a
        newer epoch of the producer or of the coordinator has written to the partition since `find_hanging`.
        """
        self._thread.run(self._async.abort_transaction(opened))

    # Groups

    def list_groups(self, states: Collection[str] | str = ()) -> list[GroupListing]:
        """Return the groups of all brokers, ordered by id.

        `states` (Kafka's names, such as "Stable") is a filter. An empty filter matches all groups.
        """
        return self._thread.run(self._async.list_groups(states))

    def describe_groups(self, group_ids: Collection[str] | str) -> dict[str, GroupDescription]:
        """Return groups by id, with their members and assignments.

        Raises GroupIdNotFound for an unknown group. Brokers before Kafka 4 describe an unknown group with
        state Dead and without an error.
        """
        return self._thread.run(self._async.describe_groups(group_ids))

    def delete_group(self, group_id: str) -> None:
        """Delete a group and its committed offsets. Raises NonEmptyGroup, GroupIdNotFound."""
        self._thread.run(self._async.delete_group(group_id))

    def group_offsets(
        self, group_id: str, stable: Collection[TopicPartition] | TopicPartition | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return all committed offsets of a group; an empty dict for a group that does not exist.

        With `stable`, return only the offsets of the partitions in `stable`. First wait for open transactions
        that commit offsets of these partitions (KIP-447).
        """
        return self._thread.run(self._async.group_offsets(group_id, stable))

    def alter_group_offsets(
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
        self._thread.run(self._async.alter_group_offsets(group_id, offsets, retention_ms=retention_ms))

    def delete_group_offsets(
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
        return self._thread.run(
            self._async.delete_group_offsets(group_id, partitions, raise_errors=raise_errors)
        )

    # ACLs

    def create_acls(self, acls: Collection[Acl] | Acl) -> None:
        """Add ACLs. It is not an error if an ACL already exists. Raises SecurityDisabled, InvalidRequest."""
        self._thread.run(self._async.create_acls(acls))

    @with_renamed_keyword("wanted", "acl_filter")
    def describe_acls(self, acl_filter: AclFilter | None = None) -> list[Acl]:
        """Return the ACLs that match a filter (None: all), sorted. Raises SecurityDisabled."""
        return self._thread.run(self._async.describe_acls(acl_filter))

    def delete_acls(self, filters: Collection[AclFilter | Acl] | AclFilter | Acl) -> list[Acl]:
        """Delete the ACLs that match any of the filters, and return the deleted ACLs.

        An Acl as filter matches only itself. Raises SecurityDisabled.
        """
        return self._thread.run(self._async.delete_acls(filters))

    # SCRAM users

    def set_user(
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
        self._thread.run(self._async.set_user(name, password, mechanisms=mechanisms, iterations=iterations))

    def delete_user(self, name: str, *, mechanisms: Collection[Mechanism] | Mechanism | None = None) -> None:
        """Delete a SCRAM user's credentials for these mechanisms (None: all). Raises ResourceNotFound."""
        self._thread.run(self._async.delete_user(name, mechanisms=mechanisms))

    def list_users(self, names: Collection[str] | str | None = None) -> Mapping[str, Mapping[Mechanism, int]]:
        """Return the number of PBKDF2 iterations of SCRAM users (None: all), by user and mechanism.

        Raises ResourceNotFound.
        """
        return self._thread.run(self._async.list_users(names))

    # Quotas

    @with_renamed_keyword("wanted", "quota_filter")
    def describe_client_quotas(self, quota_filter: QuotaFilter | None = None) -> Mapping[QuotaEntity, Values]:
        """Return the quotas of the entities that match a filter (None: all), by entity and quota name."""
        return self._thread.run(self._async.describe_client_quotas(quota_filter))

    def alter_client_quotas(self, changes: QuotaChanges, *, validate_only: bool = False) -> None:
        """Set quotas by entity and quota name. A value of None removes the quota (KIP-546).

        Raises InvalidRequest for the first entity that is refused. The other entities are altered.
        """
        self._thread.run(self._async.alter_client_quotas(changes, validate_only=validate_only))
