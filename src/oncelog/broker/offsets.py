"""Committed offsets: the store over `__consumer_offsets`.

Source: rows T6, T7; Kafka's OffsetMetadataManager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from oncelog.broker.state_topic import StateTopic, StoredBatch, Written
from oncelog.rules.offsets import CommittedOffset, is_expired, later
from oncelog.rules.sending import Identity
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord
from oncelog.wire.stored import OffsetCommitKey, OffsetCommitValue

if TYPE_CHECKING:
    from oncelog.broker.node import Node

KEY_VERSIONS = (0, 1)
_KEY_VERSION, _VALUE_VERSION, _EXPIRING_VALUE_VERSION = 1, 3, 1

_Offsets = dict[TopicPartition, CommittedOffset]


class Offsets:
    """Every committed offset of every group of this node, and those that wait for a marker."""

    def __init__(self, node: Node, topic: StateTopic) -> None:
        self._node, self._topic = node, topic
        self._committed: dict[str, _Offsets] = {}
        self._pending: dict[tuple[int, int], dict[str, _Offsets]] = {}
        """(partition of the topic, producer id) -> group -> offsets of the open transaction."""

    # Committing

    def commit(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], now_ms: int) -> Written:
        """They hold from now on. Raises NotCoordinator."""
        index = self._topic.partition_of(group)
        written = self._topic.append(
            index, [_record(group, at, each) for at, each in offsets.items()], now_ms
        )
        self._committed.setdefault(group, {}).update(_numbered(offsets, written))
        return written

    def commit_pending(
        self, group: str, who: Identity, offsets: Mapping[TopicPartition, CommittedOffset], now_ms: int
    ) -> Written:
        """They hold when the transaction commits. Raises InvalidProducerEpoch, NotCoordinator."""
        index = self._topic.partition_of(group)
        records = [NewRecord(now_ms, *_record(group, at, each)) for at, each in offsets.items()]
        batch = build_batch(
            records, producer_id=who.producer_id, producer_epoch=who.producer_epoch, is_transactional=True
        )
        written = self._topic.append_batch(index, batch, now_ms)
        pending = self._pending.setdefault((index, who.producer_id), {})
        pending.setdefault(group, {}).update(_numbered(offsets, written))
        return written

    def on_marker(self, index: int, producer_id: int, is_commit: bool) -> None:
        """A transaction ended in a partition of the topic."""
        pending = self._pending.pop((index, producer_id), {})
        if is_commit:
            for group, offsets in pending.items():
                held = self._committed.setdefault(group, {})
                for at, each in offsets.items():
                    held[at] = later(held.get(at), each)

    # Reading

    def groups(self) -> Collection[str]:
        """Groups that have committed something."""
        return self._committed.keys()

    def of(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """What a group has committed."""
        return self._committed.get(group, {})

    def pending_of(self, group: str) -> set[TopicPartition]:
        """Partitions for which an open transaction may commit another offset."""
        index = self._topic.partition_of(group)
        return {
            at
            for (at_index, _), groups in self._pending.items()
            if at_index == index
            for at in groups.get(group, ())
        }

    # Forgetting

    def delete(self, group: str, partitions: Iterable[TopicPartition], now_ms: int) -> Written | None:
        """Write tombstones, drop pending ones too; None if there was nothing. Raises NotCoordinator."""
        asked = set(partitions)
        for groups in self._pending.values():
            for at in asked & groups.get(group, {}).keys():
                del groups[group][at]
        doomed = [at for at in asked if at in self._committed.get(group, ())]
        if not doomed:
            return None
        records = [(_key(group, at), None) for at in doomed]
        written = self._topic.append(self._topic.partition_of(group), records, now_ms)
        held = self._committed[group]
        for at in doomed:
            del held[at]
        if not held:
            del self._committed[group]
        return written

    def delete_topics(self, topics: Collection[str], now_ms: int) -> None:
        """The topics are gone, and what was committed for them."""
        for group in list(self._committed):
            self.delete(group, [at for at in self._committed[group] if at.topic in topics], now_ms)

    def forget_expired(
        self, group: str, subscribed: Collection[str], empty_since_ms: int | None, now_ms: int
    ) -> None:
        """Forget what is older than offsets.retention.minutes, less what members read."""
        retention_ms = self._node.settings["offsets.retention.minutes"] * 60_000
        pending = self.pending_of(group)
        expired = [
            at
            for at, each in self.of(group).items()
            if at.topic not in subscribed
            and is_expired(
                each,
                is_pending=at in pending,
                empty_since_ms=empty_since_ms,
                now_ms=now_ms,
                retention_ms=retention_ms,
            )
        ]
        self.delete(group, expired, now_ms)

    # The start

    def replay(self, index: int, batch: StoredBatch) -> None:
        """Take a batch into account as it was when it was appended; other records than offsets are let be."""
        if batch.is_commit is not None and batch.producer_id is not None:
            self.on_marker(index, batch.producer_id, batch.is_commit)
            return
        for record in batch.records:
            key = record.key or b""
            if int.from_bytes(key[:2], "big") in KEY_VERSIONS:
                self._replay_record(index, batch.producer_id, key, record.value, record.offset)

    def _replay_record(
        self, index: int, producer_id: int | None, key: bytes, value: bytes | None, offset: int
    ) -> None:
        named = OffsetCommitKey.from_bytes(key)
        at = TopicPartition(named.topic, named.partition)
        if producer_id is not None:
            groups = self._pending.setdefault((index, producer_id), {})
        else:
            groups = self._committed
        if value is not None:
            groups.setdefault(named.group, {})[at] = _committed(value, offset)
        elif named.group in groups:
            groups[named.group].pop(at, None)
            if not groups[named.group]:
                del groups[named.group]


def _key(group: str, at: TopicPartition) -> bytes:
    return OffsetCommitKey(group=group, topic=at.topic, partition=at.partition).to_bytes(_KEY_VERSION)


def _record(group: str, at: TopicPartition, committed: CommittedOffset) -> tuple[bytes, bytes]:
    value = OffsetCommitValue(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        commit_timestamp=committed.commit_ms,
        expire_timestamp=committed.expire_ms,
    )
    version = _VALUE_VERSION if committed.expire_ms < 0 else _EXPIRING_VALUE_VERSION
    return _key(group, at), value.to_bytes(version)


def _committed(value: bytes, record_offset: int) -> CommittedOffset:
    read = OffsetCommitValue.from_bytes(value)
    return CommittedOffset(
        read.offset,
        read.leader_epoch,
        read.metadata,
        read.commit_timestamp,
        read.expire_timestamp,
        record_offset,
    )


def _numbered(offsets: Mapping[TopicPartition, CommittedOffset], written: Written) -> _Offsets:
    """With the offsets of their records, which are the last ones of the batch in order."""
    first = written.last_offset + 1 - len(offsets)
    return {
        at: each._replace(record_offset=first + index) for index, (at, each) in enumerate(offsets.items())
    }
