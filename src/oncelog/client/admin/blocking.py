"""The blocking admin client: AsyncAdmin on a thread of its own. What calls mean is told there."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from oncelog.client.admin.acl_calls import Permissions
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.coordinator_calls import Coordination
from oncelog.client.admin.core import Changes
from oncelog.client.admin.quota_calls import Quotas
from oncelog.client.admin.types import (
    ActiveProducer,
    ClusterDescription,
    ConfigDescription,
    ConfigEntry,
    ConfigOutcome,
    ConfigResource,
    CreatedTopic,
    DeletedRecords,
    ListedOffset,
    LogDirDescription,
    NewTopic,
    PartitionProducers,
    ReplicaLog,
    TopicDescription,
    TopicListing,
    TopicOutcome,
)
from oncelog.client.consumer.list_offsets import OffsetSpec
from oncelog.runtime import system
from oncelog.settings import Settings
from oncelog.types import Isolation, TopicPartition

__all__ = [
    "ActiveProducer",
    "Admin",
    "AsyncAdmin",
    "ClusterDescription",
    "ConfigDescription",
    "ConfigEntry",
    "ConfigOutcome",
    "ConfigResource",
    "CreatedTopic",
    "DeletedRecords",
    "ListedOffset",
    "LogDirDescription",
    "NewTopic",
    "PartitionProducers",
    "ReplicaLog",
    "TopicDescription",
    "TopicListing",
    "TopicOutcome",
]

T = TypeVar("T")
_CLOSE_SECONDS = 10.0


class Admin(Coordination, Permissions, Quotas):
    """Topics, settings, offsets and producers of a cluster; every call blocks until it is done.

        with Admin({"bootstrap.servers": "127.0.0.1:9092"}) as admin:
            admin.create_topics([NewTopic("flights", num_partitions=3)])

    Calls that take several items take a single one as well. They try all items, then raise the first item's
    error, with the others as notes on it. With `raise_errors=False` they raise none and each result carries
    its own. Safe to share between threads.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self._async = AsyncAdmin(config, **settings)
        self._thread = system.current().loop_thread("oncelog-admin")

    @property
    def settings(self) -> Settings:
        return self._async.settings

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

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

    def create_topics(
        self,
        topics: Collection[NewTopic] | NewTopic,
        *,
        validate_only: bool = False,
        raise_errors: bool = True,
    ) -> dict[str, CreatedTopic]:
        """Create topics, or only check that they could be."""
        return self._run(
            self._async.create_topics(topics, validate_only=validate_only, raise_errors=raise_errors)
        )

    def delete_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Delete topics with everything in them."""
        return self._run(self._async.delete_topics(names, raise_errors=raise_errors))

    def create_partitions(
        self, counts: Mapping[str, int], *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[str, TopicOutcome]:
        """Grow topics to these numbers of partitions, the present ones included."""
        return self._run(
            self._async.create_partitions(counts, validate_only=validate_only, raise_errors=raise_errors)
        )

    def list_topics(self, *, include_internal: bool = False) -> list[TopicListing]:
        """The topics of the cluster by name."""
        return self._run(self._async.list_topics(include_internal=include_internal))

    def describe_topics(
        self, names: Collection[str] | str, *, raise_errors: bool = True
    ) -> dict[str, TopicDescription]:
        """Partitions, leaders and replicas; asking never creates a topic."""
        return self._run(self._async.describe_topics(names, raise_errors=raise_errors))

    def delete_records(
        self, before_offsets: Mapping[TopicPartition, int | None], *, raise_errors: bool = True
    ) -> dict[TopicPartition, DeletedRecords]:
        """Delete the records before an offset, per partition; None: everything up to the high watermark."""
        return self._run(self._async.delete_records(before_offsets, raise_errors=raise_errors))

    def describe_configs(
        self, resources: Collection[ConfigResource] | ConfigResource, *, raise_errors: bool = True
    ) -> dict[ConfigResource, ConfigDescription]:
        """All settings of topics or brokers, with where each value comes from."""
        return self._run(self._async.describe_configs(resources, raise_errors=raise_errors))

    def alter_configs(
        self, changes: Changes, *, validate_only: bool = False, raise_errors: bool = True
    ) -> dict[ConfigResource, ConfigOutcome]:
        """Change single settings and leave the others; None takes one back to its default."""
        return self._run(
            self._async.alter_configs(changes, validate_only=validate_only, raise_errors=raise_errors)
        )

    def describe_cluster(self) -> ClusterDescription:
        """Id, controller and brokers."""
        return self._run(self._async.describe_cluster())

    def describe_log_dirs(self, node_ids: Sequence[int] | int | None = None) -> list[LogDirDescription]:
        """Where brokers (None: all) keep which partitions, and how large they are."""
        return self._run(self._async.describe_log_dirs(node_ids))

    def describe_producers(
        self, partitions: Collection[TopicPartition] | TopicPartition, *, raise_errors: bool = True
    ) -> dict[TopicPartition, PartitionProducers]:
        """The producer ids each partition's leader remembers (Kafka 2.8 or newer)."""
        return self._run(self._async.describe_producers(partitions, raise_errors=raise_errors))

    def list_offsets(
        self,
        specs: Mapping[TopicPartition, OffsetSpec],
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        *,
        raise_errors: bool = True,
    ) -> dict[TopicPartition, ListedOffset]:
        """Offsets by "earliest", "latest", "max-timestamp" (Kafka 3.0 or newer) or milliseconds.

        "latest" is the high watermark, with READ_COMMITTED the last stable offset.
        """
        return self._run(self._async.list_offsets(specs, isolation, raise_errors=raise_errors))
