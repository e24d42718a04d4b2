"""Reader of Apache Kafka's metadata in a data directory: the snapshots and the log in `__cluster_metadata-0`.

Only the parts that a single broker can adopt are read: topics with their partitions and settings, producer
ids, ACLs, SCRAM users, quotas and stored broker settings.
Source: kafka MetadataRecordSerde, MetadataDelta, Snapshots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oncelog.broker.coordinators.internal_topic_config import METADATA_LOG
from oncelog.errors import BrokerError, PeerError, StorageError
from oncelog.log.disk import Disk
from oncelog.wire.batch import iter_batches, verify_crc
from oncelog.wire.header import LOG_OVERHEAD_BYTES
from oncelog.wire.message import Data
from oncelog.wire.records import decode_records
from oncelog.wire.stored import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    ConfigRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveAccessControlEntryRecord,
    RemoveTopicRecord,
    RemoveUserScramCredentialRecord,
    TopicRecord,
    UserScramCredentialRecord,
)

DIRECTORY = f"{METADATA_LOG}-0"
TOPIC, BROKER, GROUP = 2, 4, 32
"""Resource types of settings. Source: kafka ConfigResource."""

_FRAME_VERSION = 1
_NO_LEADER_CHANGE = -2
"""The leader in a PartitionChangeRecord that changes none. Source: kafka LeaderConstants."""
_BEGIN_TRANSACTION, _END_TRANSACTION, _ABORT_TRANSACTION = 23, 24, 25
_RECORDS: dict[int, type[Data]] = {
    2: TopicRecord,
    3: PartitionRecord,
    4: ConfigRecord,
    5: PartitionChangeRecord,
    9: RemoveTopicRecord,
    11: UserScramCredentialRecord,
    14: ClientQuotaRecord,
    15: ProducerIdsRecord,
    18: AccessControlEntryRecord,
    19: RemoveAccessControlEntryRecord,
    22: RemoveUserScramCredentialRecord,
}
"""Record types that are read, by number. Source: kafka MetadataRecordType."""
_CHECKPOINT = re.compile(r"(?P<end>\d{20})-\d{10}\.checkpoint")
_SEGMENT = re.compile(r"(?P<base>\d{20})\.log")


@dataclass(slots=True)
class KafkaPartition:
    """The replicas of a partition as node ids, and the ids of their log directories.

    `directories` has one id for each replica; it is empty in metadata of Kafka versions without directory
    ids. While no replica is in sync, `eligible` and `last_eligible` are nodes that have, or had, all records
    (KIP-966).
    """

    replicas: list[int]
    isr: list[int]
    leader_epoch: int
    directories: list[bytes]
    eligible: list[int]
    last_eligible: list[int]

    @property
    def whole_at(self) -> list[int]:
        """Nodes that have all acknowledged records; empty if the metadata names none."""
        return self.isr or self.eligible or self.last_eligible


@dataclass(slots=True)
class KafkaTopic:
    """A topic in Kafka's metadata."""

    name: str
    topic_id: bytes
    partitions: dict[int, KafkaPartition] = field(default_factory=dict)

    @property
    def leader_epoch(self) -> int:
        """The highest leader epoch of the topic's partitions."""
        return max((partition.leader_epoch for partition in self.partitions.values()), default=-1)


@dataclass(slots=True)
class KafkaMetadata:
    """Kafka's metadata after the records that were replayed. `configs` is indexed by (resource type, name).

    Records of a metadata transaction are applied at its end.
    """

    topics: dict[bytes, KafkaTopic] = field(default_factory=dict)
    configs: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)
    next_producer_id: int = 0
    acls: dict[bytes, AccessControlEntryRecord] = field(default_factory=dict)
    users: dict[tuple[str, int], UserScramCredentialRecord] = field(default_factory=dict)
    quotas: dict[tuple[tuple[str, str | None], ...], dict[str, float]] = field(default_factory=dict)
    _transaction: list[Any] | None = None

    def replay(self, value: bytes) -> None:
        """Apply a record. Raises PeerError if it cannot be decoded."""
        kind, record = parse_record(value)
        if kind == _BEGIN_TRANSACTION:
            self._transaction = []
        elif kind == _ABORT_TRANSACTION:
            self._transaction = None
        elif kind == _END_TRANSACTION:
            records, self._transaction = self._transaction or [], None
            for pending in records:
                self._apply(pending)
        elif record is not None and self._transaction is not None:
            self._transaction.append(record)
        elif record is not None:
            self._apply(record)

    def _apply(self, record: Any) -> None:
        match record:
            case TopicRecord():
                topic_id = bytes(record.topic_id)
                self.topics[topic_id] = KafkaTopic(record.name, topic_id)
            case RemoveTopicRecord():
                topic = self.topics.pop(bytes(record.topic_id), None)
                if topic is not None:
                    self.configs.pop((TOPIC, topic.name), None)
            case PartitionRecord():
                self._partition(record)
            case PartitionChangeRecord():
                self._change(record)
            case ConfigRecord():
                configs = self.configs.setdefault((record.resource_type, record.resource_name), {})
                configs.pop(record.name, None)
                if record.value is not None:
                    configs[record.name] = record.value
            case ProducerIdsRecord():
                self.next_producer_id = max(self.next_producer_id, record.next_producer_id)
            case _:
                self._apply_security(record)

    def _apply_security(self, record: Any) -> None:
        match record:
            case AccessControlEntryRecord():
                self.acls[bytes(record.id)] = record
            case RemoveAccessControlEntryRecord():
                self.acls.pop(bytes(record.id), None)
            case UserScramCredentialRecord():
                self.users[record.name, record.mechanism] = record
            case RemoveUserScramCredentialRecord():
                self.users.pop((record.name, record.mechanism), None)
            case ClientQuotaRecord():
                entity = tuple((part.entity_type, part.entity_name) for part in record.entity)
                rates = self.quotas.setdefault(entity, {})
                rates.pop(record.key, None)
                if not record.remove:
                    rates[record.key] = record.value
                if not rates:
                    del self.quotas[entity]

    def _partition(self, record: PartitionRecord) -> None:
        topic = self.topics.get(bytes(record.topic_id))
        if topic is not None:
            directories = [bytes(directory_id) for directory_id in record.directories]
            topic.partitions[record.partition_id] = KafkaPartition(
                record.replicas,
                record.isr,
                record.leader_epoch,
                directories,
                record.eligible_leader_replicas or [],
                record.last_known_elr or [],
            )

    def _change(self, record: PartitionChangeRecord) -> None:
        topic = self.topics.get(bytes(record.topic_id))
        partition = topic.partitions.get(record.partition_id) if topic else None
        if partition is None:
            return
        if record.isr is not None:
            partition.isr = record.isr
        if record.leader != _NO_LEADER_CHANGE:
            partition.leader_epoch += 1  # as in Kafka's PartitionRegistration.merge
        if record.eligible_leader_replicas is not None:
            partition.eligible = record.eligible_leader_replicas
        if record.last_known_elr is not None:
            partition.last_eligible = record.last_known_elr
        if record.replicas is not None:
            partition.replicas = record.replicas
        if record.directories is not None:
            partition.directories = [bytes(directory_id) for directory_id in record.directories]


def parse_record(value: bytes) -> tuple[int, Data | None]:
    """Return the type of a record, and the record; None for a type that is not read. Raises PeerError."""
    try:
        frame_version, position = _read_varint(value, 0)
        if frame_version != _FRAME_VERSION:
            raise PeerError(f"unknown frame version {frame_version} of a metadata record")
        kind, position = _read_varint(value, position)
        version, position = _read_varint(value, position)
    except IndexError as error:
        raise PeerError("a metadata record is truncated") from error
    record = _RECORDS.get(kind)
    return kind, None if record is None else record.decode(version, value, position)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift > 28:
            return value, position
        shift += 7


def fingerprint(disk: Disk) -> list[str]:
    """Return the names and sizes of the metadata log's files.

    The result changes whenever Apache Kafka runs.
    """
    if not disk.exists(DIRECTORY):
        return []
    names = [name for name in disk.list(DIRECTORY) if _CHECKPOINT.fullmatch(name) or _SEGMENT.fullmatch(name)]
    return [f"{name} {len(disk.read(f'{DIRECTORY}/{name}'))}" for name in sorted(names)]


def read_metadata(disk: Disk) -> KafkaMetadata:
    """Read the newest snapshot and all records after it.

    Raises StorageError, which names the damaged file.
    """
    metadata, end = KafkaMetadata(), 0
    names = sorted(disk.list(DIRECTORY))
    snapshots = [(int(match["end"]), name) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    segments = [(int(match["base"]), name) for name in names if (match := _SEGMENT.fullmatch(name))]
    if snapshots:
        end, name = max(snapshots)
        _replay_file(disk, name, metadata, 0, is_last=False)
    if not segments:
        raise StorageError(f"{disk.describe(DIRECTORY)} is incomplete: it has a snapshot but no log")
    following = [base for base, _ in segments[1:]] + [None]
    for (base, name), next_base in zip(segments, following, strict=True):
        if next_base is not None and next_base <= end:
            continue
        if base > end:
            raise StorageError(
                f"{disk.describe(DIRECTORY)} is incomplete: records from offset {end} to "
                f"{base} (exclusive) are missing"
            )
        end = max(end, _replay_file(disk, name, metadata, end, is_last=next_base is None))
    return metadata


def _replay_file(disk: Disk, name: str, metadata: KafkaMetadata, start: int, *, is_last: bool) -> int:
    """Apply the records of a file from offset `start` on. Return the offset after the last record.

    In the last file, an incomplete batch at the end is ignored. Raises StorageError.
    """
    path = f"{DIRECTORY}/{name}"
    data, end, position = memoryview(disk.read(path)), start, 0
    try:
        for position, header in iter_batches(data):
            batch = data[position : position + header.size_bytes]
            if not verify_crc(batch, 0, header.size_bytes):
                raise PeerError("the checksum is wrong")
            end = max(end, header.last_offset + 1)
            for record in () if header.is_control else decode_records(batch):
                if name.endswith(".checkpoint") or record.offset >= start:
                    metadata.replay(bytes(record.value or b""))
            position += header.size_bytes
    except (BrokerError, PeerError) as error:
        if not (is_last and _is_torn(data, position)):
            raise StorageError(f"{disk.describe(path)} at position {position}: {error}") from error
    return end


def _is_torn(data: memoryview, position: int) -> bool:
    """Return True if the unreadable batch at `position` is one that a crash left incomplete."""
    size = int.from_bytes(data[position + 8 : position + LOG_OVERHEAD_BYTES], "big", signed=True)
    return position + LOG_OVERHEAD_BYTES + size >= len(data) or not any(data[position:])


def topics_by_name(metadata: KafkaMetadata) -> Iterator[tuple[KafkaTopic, dict[str, str]]]:
    """Yield each topic with the settings that were set for it."""
    for topic in metadata.topics.values():
        yield topic, metadata.configs.get((TOPIC, topic.name), {})
