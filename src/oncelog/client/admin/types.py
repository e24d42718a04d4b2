"""What admin calls take and give. Every result has `error`: None, or why this item failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from oncelog.errors import OncelogError
from oncelog.rules.transactions.hanging import OpenTransaction
from oncelog.types import BrokerAddress, PartitionInfo, TopicPartition


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create; None leaves the choice to the broker (Kafka 2.4 or newer)."""

    name: str
    num_partitions: int | None = None
    replication_factor: int | None = None
    configs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """`topic_id`, `num_partitions`, `replication_factor` are None where the broker does not tell."""

    name: str
    topic_id: str | None = None
    num_partitions: int | None = None
    replication_factor: int | None = None
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class TopicOutcome:
    """A topic deleted or grown."""

    name: str
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class TopicListing:
    """A topic of the cluster; `topic_id` as Kafka prints it, None from brokers without ids."""

    name: str
    topic_id: str | None
    is_internal: bool
    partition_count: int


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic with its partitions in order; without any when `error` is set."""

    name: str
    topic_id: str | None = None
    is_internal: bool = False
    partitions: tuple[PartitionInfo, ...] = ()
    error: OncelogError | None = None


class ConfigResource(NamedTuple):
    """Whose settings: a topic by name, or a broker by its node id as text."""

    kind: Literal["topic", "broker"]
    name: str


ConfigSource = Literal["topic", "broker", "cluster", "file", "default", "unknown"]
"""Where a value stands: set on the topic, on the broker or cluster at run time, in its file, or nowhere."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One setting of a resource; `value` None when it is unset or sensitive."""

    name: str
    value: str | None
    source: ConfigSource
    is_read_only: bool
    is_sensitive: bool

    @property
    def is_default(self) -> bool:
        return self.source == "default"


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """All settings of a resource, by name."""

    resource: ConfigResource
    entries: Mapping[str, ConfigEntry] = field(default_factory=dict)
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class ConfigOutcome:
    """Settings of a resource altered."""

    resource: ConfigResource
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The brokers, ordered by node id; `controller_id` None while there is no controller."""

    cluster_id: str | None
    controller_id: int | None
    brokers: tuple[BrokerAddress, ...]


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """A partition's log in a directory. `offset_lag` counts records behind the high watermark."""

    tp: TopicPartition
    size_bytes: int
    offset_lag: int
    is_future: bool


@dataclass(frozen=True, slots=True)
class LogDirDescription:
    """A log directory of a broker; sizes of its volume are None where the broker does not tell."""

    node_id: int
    path: str
    replicas: tuple[ReplicaLog, ...] = ()
    total_bytes: int | None = None
    usable_bytes: int | None = None
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class DeletedRecords:
    """`low_watermark` is the first offset that is left."""

    tp: TopicPartition
    low_watermark: int | None = None
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class ActiveProducer:
    """A producer id a partition remembers.

    None: no sequence yet, no coordinator (not transactional), no transaction open.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int | None
    last_timestamp_ms: int | None
    coordinator_epoch: int | None
    current_txn_start_offset: int | None


@dataclass(frozen=True, slots=True)
class PartitionProducers:
    """The producers of one partition, ordered by id."""

    tp: TopicPartition
    producers: tuple[ActiveProducer, ...] = ()
    error: OncelogError | None = None

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the transactions that are open here."""
        return [
            OpenTransaction(
                self.tp,
                producer.producer_id,
                producer.producer_epoch,
                producer.current_txn_start_offset,
                producer.last_timestamp_ms,
                producer.coordinator_epoch,
            )
            for producer in self.producers
            if producer.current_txn_start_offset is not None
        ]


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """An offset looked up; `offset` and `timestamp_ms` None when no record is at or after the time."""

    tp: TopicPartition
    offset: int | None = None
    timestamp_ms: int | None = None
    leader_epoch: int | None = None
    error: OncelogError | None = None
