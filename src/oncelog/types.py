"""The values every room speaks: ids, records, and what a send or a look-up returns.

Nothing here does I/O, knows the wire, or decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, NewType

ProducerId = NewType("ProducerId", int)
"""64-bit, 0 or above, unique for the life of a cluster (row I4)."""

Header = tuple[str, bytes | None]
"""A record header: UTF-8 key, value or null."""

Headers = Iterable[Header] | Mapping[str, bytes | None]
"""A record's headers as a caller gives them. A name may come twice in pairs, but not in a mapping."""


class TopicPartition(NamedTuple):
    """One partition of one topic; partitions count from 0."""

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
    """Who set the timestamp: the producer, or the broker at append (attribute bit 3)."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class Isolation(IntEnum):
    """What a reader may see; the number is Fetch's isolation_level."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class Origin(Enum):
    """Who hands a batch to the log; the append rule is strict only with clients."""

    CLIENT = "client"
    COORDINATOR = "coordinator"
    REPLAY = "replay"


class Record(NamedTuple):
    """One record as a reader gets it. `timestamp_ms` is milliseconds since the epoch."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]


class RecordMetadata(NamedTuple):
    """Where an acknowledged record stands.

    `offset` is None when the broker did not tell it (`acks=0`, or the answer
    DUPLICATE_SEQUENCE_NUMBER). `timestamp_ms` is the broker's for LogAppendTime topics.
    """

    topic: str
    partition: int
    offset: int | None
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker as Metadata names it."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition as Metadata describes it; `leader` is None while there is none."""

    topic: str
    partition: int
    leader: int | None
    leader_epoch: int | None
    replicas: tuple[int, ...] = field(default=())
    in_sync_replicas: tuple[int, ...] = field(default=())


class OffsetAndMetadata(NamedTuple):
    """A position to commit: the next offset to read, and a note. `leader_epoch` None: not known."""

    offset: int
    leader_epoch: int | None = None
    metadata: str = ""


class ConsumerGroupMetadata(NamedTuple):
    """Who commits offsets: a group, and the member in the generation that it knows (KIP-447).

    `generation_id` -1 and `member_id` "": nobody in particular, so that no zombie is fenced by it.
    """

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class TransactionShare(NamedTuple):
    """An open transaction, for producers in other processes. `raises_epoch`: as the coordinator ends it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    raises_epoch: bool
