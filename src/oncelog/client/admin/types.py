"""Arguments and results of admin calls.

A result's `error` says why its item failed, and is None for success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from oncelog.errors import OncelogError
from oncelog.rules.transactions.hanging import OpenTransaction
from oncelog.types import BrokerAddress, PartitionInfo, TopicPartition


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create.

    A number that is None stands for the broker's default, and needs Kafka 2.4 or later (KIP-464).
    """

    name: str
    num_partitions: int | None = None
    replication_factor: int | None = None
    configs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """The result of creating a topic. Fields that the broker's response does not have are None."""

    name: str
    topic_id: str | None = None
    num_partitions: int | None = None
    replication_factor: int | None = None
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class TopicOutcome:
    """The result of deleting a topic or of adding partitions to it."""

    name: str
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class TopicListing:
    """A topic of the cluster. `topic_id` is text as Kafka prints it; None if the broker is older than 2.8."""

    name: str
    topic_id: str | None
    is_internal: bool
    partition_count: int


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic with its partitions, ordered by number. `partitions` is empty if `error` is set."""

    name: str
    topic_id: str | None = None
    is_internal: bool = False
    partitions: tuple[PartitionInfo, ...] = ()
    error: OncelogError | None = None


class ConfigResource(NamedTuple):
    """The owner of settings: a topic by its name, or a broker by its node id as text.

    A broker without a name stands for the settings of the whole cluster.
    """

    kind: Literal["topic", "broker"]
    name: str


ConfigSource = Literal["topic", "broker", "cluster", "file", "default", "unknown"]
"""Source of a setting's value.

"topic", "broker" and "cluster": set there at run time. "file": set in the broker's file. "default": set
nowhere. "unknown": a source that this client does not know.
"""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One setting of a resource. `value` is None if the setting is unset or sensitive.

    `kind` ("int", "boolean", ...), `default` and `doc` are only known if `describe_configs` was called with
    `documented`, and the broker sends them. `default` is None if the setting has no default, or if the
    default is unknown.
    """

    name: str
    value: str | None
    source: ConfigSource
    is_read_only: bool
    is_sensitive: bool
    kind: str = ""
    default: str | None = None
    doc: str = ""

    @property
    def is_default(self) -> bool:
        return self.source == "default"


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """All settings of a resource by name."""

    resource: ConfigResource
    entries: Mapping[str, ConfigEntry] = field(default_factory=dict)
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class ConfigOutcome:
    """The result of altering the settings of a resource."""

    resource: ConfigResource
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """A cluster with its brokers in order of node id.

    `controller_id` is None while there is no controller.
    """

    cluster_id: str | None
    controller_id: int | None
    brokers: tuple[BrokerAddress, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of the cluster (KIP-584). `level` is 0 if it is off.

    `min_level` and `max_level` are the levels that the broker supports; None if it does not report them.
    """

    name: str
    level: int
    min_level: int | None
    max_level: int | None


@dataclass(frozen=True, slots=True)
class BrokerVersions:
    """The lowest and highest version of each API that a broker supports, by API key, and its features."""

    node_id: int
    apis: Mapping[int, tuple[int, int]]
    features: tuple[Feature, ...]


@dataclass(frozen=True, slots=True)
class DeletedOffset:
    """The result of deleting a group's committed offset."""

    tp: TopicPartition
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """A partition's log in a directory.

    `offset_lag` is the number of offsets by which the end of the log is behind the high watermark. If
    `is_future`, the log is being moved to this directory, and `offset_lag` is the number of offsets by which
    this log is behind the current one (KIP-113).
    """

    tp: TopicPartition
    size_bytes: int
    offset_lag: int
    is_future: bool


@dataclass(frozen=True, slots=True)
class LogDirDescription:
    """A log directory of a broker.

    `total_bytes` and `usable_bytes` are sizes of the volume, and None from brokers before Kafka 3.3.
    """

    node_id: int
    path: str
    replicas: tuple[ReplicaLog, ...] = ()
    total_bytes: int | None = None
    usable_bytes: int | None = None
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class DeletedRecords:
    """The result of deleting records. `low_watermark` is the first offset that remains."""

    tp: TopicPartition
    low_watermark: int | None = None
    error: OncelogError | None = None


@dataclass(frozen=True, slots=True)
class ActiveProducer:
    """A partition's stored state of a producer id.

    `last_sequence` is None before the first batch, `coordinator_epoch` before the first transaction marker,
    and `current_txn_start_offset` while no transaction is open. Times are milliseconds since the epoch.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int | None
    last_timestamp_ms: int | None
    coordinator_epoch: int | None
    current_txn_start_offset: int | None


@dataclass(frozen=True, slots=True)
class PartitionProducers:
    """The producers whose state a partition stores, ordered by producer id."""

    tp: TopicPartition
    producers: tuple[ActiveProducer, ...] = ()
    error: OncelogError | None = None

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the transactions that are open on this partition."""
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
    """The result of an offset lookup. `offset` is None if no record has the requested time or a later one.

    `timestamp_ms` is the timestamp of the record at `offset`. It is None for "earliest" and "latest".
    """

    tp: TopicPartition
    offset: int | None = None
    timestamp_ms: int | None = None
    leader_epoch: int | None = None
    error: OncelogError | None = None
