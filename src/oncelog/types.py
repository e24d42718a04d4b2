"""The values that all parts of Oncelog share: ids, records, offsets and results. No I/O and no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple, NewType

ProducerId = NewType("ProducerId", int)
"""64-bit producer id, at least 0, unique for the life of a cluster (behaviour I4, docs/behaviours.md)."""

Header = tuple[str, bytes | None]
"""A record header: (name, value). The value may be null."""

Headers = Iterable[Header] | Mapping[str, bytes | None]
"""Record headers as an argument: pairs, in which a name may repeat, or a mapping."""


class TopicPartition(NamedTuple):
    """One partition of a topic. Partition numbers start at 0."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Compression(IntEnum):
    """Codec of a record batch: attribute bits 0-2 (Kafka's CompressionType)."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


class TimestampType(IntEnum):
    """The source of a record's timestamp: the producer, or the broker at the append (attribute bit 3)."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class Isolation(IntEnum):
    """The isolation level of a reader. The values are the numbers of the field isolation_level in Fetch."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class Origin(Enum):
    """The source of an appended batch. Sequences are checked only for CLIENT. For REPLAY, epochs are not
    checked either.
    """

    CLIENT = "client"
    COORDINATOR = "coordinator"
    REPLAY = "replay"


class Record(NamedTuple):
    """One record as a reader receives it. `timestamp_ms` is in milliseconds since the epoch.

    `key` and `value` are bytes or None, or the results of the consumer's deserializers.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: Any
    value: Any
    headers: tuple[Header, ...]


class ProducerRecord(NamedTuple):
    """A record to send, as `oncelog.process` takes it. The fields are the arguments of `Producer.send`.

    Without a partition, the partitioner chooses one. Without a timestamp, the record gets the time at which
    it is sent. `key` and `value` are bytes or None, or values that the serializers accept.
    """

    topic: str
    value: Any = None
    key: Any = None
    headers: Headers = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class RecordMetadata(NamedTuple):
    """The partition, offset and timestamp of an acknowledged record.

    `offset` is None if the broker returned none (`acks=0`, DUPLICATE_SEQUENCE_NUMBER). For topics with
    LogAppendTime, `timestamp_ms` is the broker's time.
    """

    topic: str
    partition: int
    offset: int | None
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker in a Metadata response."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition in a Metadata response. `leader` is None if the partition has no leader."""

    topic: str
    partition: int
    leader: int | None
    leader_epoch: int | None
    replicas: tuple[int, ...] = field(default=())
    in_sync_replicas: tuple[int, ...] = field(default=())


class OffsetAndMetadata(NamedTuple):
    """A position to commit: the offset of the next record to read, and free text.

    `leader_epoch` is None if it is unknown.
    """

    offset: int
    leader_epoch: int | None = None
    metadata: str = ""


class ConsumerGroupMetadata(NamedTuple):
    """The consumer group, member and generation for which a producer commits offsets (KIP-447).

    With `generation_id` -1 and `member_id` "", the coordinator does not check the member, so it cannot fence
    a zombie.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class TransactionShare(NamedTuple):
    """An open transaction that several processes share.

    `raises_epoch`: True if the end of the transaction raises the producer's epoch (KIP-890). `is_empty`: True
    if the transaction was handed over without records and offsets.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    raises_epoch: bool
    is_empty: bool = False
