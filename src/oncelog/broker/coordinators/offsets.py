"""Committed offsets, kept in memory and stored in `__consumer_offsets`.

A tombstone deletes the committed offset of its key and all pending ones, here and in `replay`. Memory is
always what a replay of the log yields: behaviour T15 (docs/behaviours.md).
Source: behaviours T6 and T7; kafka OffsetMetadataManager.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence

from oncelog.broker.coordinators.internal_topic import AppendHandle, InternalTopic, StoredBatch
from oncelog.broker.stepwise import StepBudget, Work, run_work
from oncelog.errors import BrokerError, MessageTooLarge
from oncelog.limits import Limits
from oncelog.rules.groups.committed_offsets import CommittedOffset, is_expired, later
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord
from oncelog.wire.stored import OffsetCommitKey, OffsetCommitValue

KEY_VERSIONS = (0, 1)
_KEY_VERSION, _VALUE_VERSION, _EXPIRING_VALUE_VERSION = 1, 3, 1

_Offsets = dict[TopicPartition, CommittedOffset]
OffsetRecord = tuple[bytes, bytes]
"""Key and value of the record of a committed offset."""


class Offsets:
    """All committed offsets of all groups, and the pending offsets of open transactions."""

    def __init__(self, topic: InternalTopic, settings: Settings, limits: Limits) -> None:
        self._topic, self._settings, self._limits = topic, settings, limits
        self._committed: dict[str, _Offsets] = {}
        self._pending: dict[tuple[int, int], dict[str, _Offsets]] = {}
        """(partition of `__consumer_offsets`, producer id) -> group -> offsets of the open transaction."""
        self._transactions: dict[str, set[tuple[int, int]]] = {}
        """Group -> keys of `_pending` with offsets of the group."""
        self._pending_keys: dict[str, dict[TopicPartition, set[tuple[int, int]]]] = {}
        """Group -> partition -> keys of `_pending` with an offset for it.

        Without this index, deleting an offset would look at all open transactions of its group.
        See test_offsets_are_deleted_without_a_look_at_each_open_transaction.
        """
        self._indexes: dict[str, set[int]] = {}
        """Topic -> partitions of `__consumer_offsets` that hold, or once held, offsets of the topic."""

    # Committing

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
        now_ms: int,
        records: Sequence[OffsetRecord] | None = None,
    ) -> AppendHandle:
        """Commit offsets. `records` is the result of `encode`, if the caller has it.

        Raises NotCoordinator, MessageTooLarge.
        """
        index = self._topic.partition_of(group)
        written = self._topic.append(index, records or self._records(group, offsets), now_ms)
        self._committed.setdefault(group, {}).update(_numbered(offsets, written))
        self._note_topics(index, offsets)
        return written

    def commit_pending(
        self,
        group: str,
        producer: ProducerIdAndEpoch,
        offsets: Mapping[TopicPartition, CommittedOffset],
        now_ms: int,
        records: Sequence[OffsetRecord] | None = None,
    ) -> AppendHandle:
        """Commit offsets within a transaction; they take effect when it commits.

        `records` is the result of `encode`, if the caller has it. Raises InvalidProducerEpoch,
        NotCoordinator, MessageTooLarge.
        """
        index = self._topic.partition_of(group)
        encoded = records or self._records(group, offsets)
        batch = build_batch(
            [NewRecord(now_ms, key, value) for key, value in encoded],
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            is_transactional=True,
        )
        written = self._topic.append_batch(index, batch, now_ms)
        self._add_pending(index, producer.producer_id, group, _numbered(offsets, written))
        return written

    def _records(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> list[OffsetRecord]:
        """Return the records of a commit, encoded in one step. Raises MessageTooLarge."""
        return run_work(self.encode(group, offsets, StepBudget(len(offsets) + 1)))

    def encode(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], budget: StepBudget
    ) -> Work[list[OffsetRecord]]:
        """Return the records of a commit. Raises MessageTooLarge above message.max.bytes, as Kafka does.

        Each record contains the group id. Without the limit, a small request with a group id of 32,767 bytes
        would create a batch with that many bytes for every partition.
        """
        limit, size_bytes, records = self._settings["message.max.bytes"], 0, []
        for tp, committed in offsets.items():
            key, value = _record(group, tp, committed)
            size_bytes += len(key) + len(value)
            if size_bytes > limit:
                raise MessageTooLarge(
                    f"an offset commit may take {limit} bytes of {self._topic.name}; the commit of "
                    f"{len(offsets)} partitions takes more: commit fewer at a time"
                )
            records.append((key, value))
            if budget.spend():
                yield None
        return records

    def _add_pending(self, index: int, producer_id: int, group: str, offsets: _Offsets) -> None:
        key = index, producer_id
        pending = self._pending.setdefault(key, {}).setdefault(group, {})
        keys = self._pending_keys.setdefault(group, {})
        for tp in offsets.keys() - pending.keys():
            keys.setdefault(tp, set()).add(key)
        pending.update(offsets)
        self._transactions.setdefault(group, set()).add(key)
        self._note_topics(index, offsets)

    def _note_topics(self, index: int, offsets: Iterable[TopicPartition]) -> None:
        for topic in {tp.topic for tp in offsets}:
            self._indexes.setdefault(topic, set()).add(index)

    def on_marker(self, index: int, producer_id: int, is_commit: bool) -> None:
        """Apply or drop the pending offsets of a transaction that ended in a partition of the topic."""
        pending = self._pending.pop((index, producer_id), {})
        for group, offsets in pending.items():
            self._forget_transaction(group, (index, producer_id))
            self._forget_pending(group, (index, producer_id), offsets)
            if is_commit:
                held = self._committed.setdefault(group, {})
                for tp, committed in offsets.items():
                    held[tp] = later(held.get(tp), committed)

    def _forget_transaction(self, group: str, key: tuple[int, int]) -> None:
        keys = self._transactions[group]
        keys.discard(key)
        if not keys:
            del self._transactions[group]

    def _forget_pending(self, group: str, key: tuple[int, int], tps: Iterable[TopicPartition]) -> None:
        """Remove a transaction from the index of pending offsets of these partitions."""
        keys = self._pending_keys[group]
        for tp in tps:
            keys[tp].discard(key)
            if not keys[tp]:
                del keys[tp]
        if not keys:
            del self._pending_keys[group]

    # Reading

    def groups(self) -> Collection[str]:
        """Return the groups with committed or pending offsets."""
        return self._committed.keys() | self._transactions.keys()

    def has(self, group: str) -> bool:
        """Return True if the group has committed or pending offsets."""
        return group in self._committed or group in self._transactions

    def of(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """Return the committed offsets of a group."""
        return self._committed.get(group, {})

    def pending_of(self, group: str) -> Collection[TopicPartition]:
        """Return a view of the partitions with a pending offset."""
        return self._pending_keys.get(group, {}).keys()

    def partitions_of(self, group: str) -> list[TopicPartition]:
        """Return the partitions with a committed or pending offset, in a deterministic order."""
        return list(dict.fromkeys([*self.of(group), *sorted(self.pending_of(group))]))

    def _is_pending(self, group: str, tp: TopicPartition) -> bool:
        return tp in self.pending_of(group)

    def snapshot(self) -> tuple[dict[str, _Offsets], dict[tuple[int, int], dict[str, _Offsets]]]:
        """Return a copy of all committed offsets by group, and of all pending ones, keyed like `_pending`."""
        committed = {group: dict(offsets) for group, offsets in self._committed.items()}
        pending = {
            key: {group: dict(offsets) for group, offsets in groups.items()}
            for key, groups in self._pending.items()
        }
        return committed, pending

    # Forgetting

    def delete(self, group: str, partitions: Iterable[TopicPartition], now_ms: int) -> AppendHandle | None:
        """Delete offsets, including pending ones, by tombstones. Return None if there were none.

        Raises NotCoordinator.
        """
        committed = self.of(group)
        doomed = [tp for tp in dict.fromkeys(partitions) if tp in committed or self._is_pending(group, tp)]
        if not doomed:
            return None
        index, written = self._topic.partition_of(group), None
        batch_size = self._limits.max_tombstones_per_batch
        for first in range(0, len(doomed), batch_size):
            tombstones = doomed[first : first + batch_size]
            written = self._topic.append(index, [(_key(group, tp), None) for tp in tombstones], now_ms)
            for tp in tombstones:
                self._drop(group, tp)
        return written

    def _drop(self, group: str, tp: TopicPartition, before: int | None = None) -> bool:
        """Drop a partition's offsets with records below `before` (None: all). Return True if none is left."""
        is_empty = True
        committed = self._committed.get(group, {})
        if tp in committed:
            is_empty = before is None or committed[tp].record_offset < before
            if is_empty:
                del committed[tp]
                if not committed:
                    del self._committed[group]
        if not self._is_pending(group, tp):
            return is_empty
        for key in list(self._pending_keys[group][tp]):
            pending = self._pending[key][group]
            if before is not None and pending[tp].record_offset >= before:
                is_empty = False
                continue
            del pending[tp]
            self._forget_pending(group, key, (tp,))
            if not pending:
                self._drop_pending(group, key)
        return is_empty

    def _drop_pending(self, group: str, key: tuple[int, int]) -> None:
        del self._pending[key][group]
        if not self._pending[key]:
            del self._pending[key]
        self._forget_transaction(group, key)

    def ends_of(self, topics: Collection[str]) -> dict[str, dict[int, int]]:
        """Return the log end offset of each partition of the log that may hold offsets of these topics.

        Damaged partitions are included: their content is unknown until they are repaired.
        """
        return {
            topic: {
                index: self._topic.last_append(index).last_offset + 1
                for index in sorted(self._indexes.get(topic, set()).union(self._topic.damaged))
            }
            for topic in topics
        }

    def _of_topics(self, topics: Collection[str]) -> Iterator[tuple[str, TopicPartition] | None]:
        """Yield (group, partition) for all offsets of these topics. This examines every offset.

        Yields None at the end of each step, after `expire_step_entries` groups or 100 times as many offsets.
        """
        groups = [*self._committed, *(group for group in self._transactions if group not in self._committed)]
        looked = 0
        for group in groups:
            places = self.partitions_of(group)
            for tp in sorted(tp for tp in places if tp.topic in topics):
                yield group, tp
            looked += 1 + len(places) // 100
            if looked >= self._limits.expire_step_entries:
                looked = 0
                yield None

    def delete_topics(
        self, before: Mapping[str, Mapping[int, int]], now_ms: int
    ) -> Generator[None, None, set[str]]:
        """Delete all offsets of deleted topics in bounded steps, in memory and by tombstones.

        `before` limits this per topic to records below these offsets of the log, because a new topic may have
        the name by now. Return the topics of which offsets stay in the log: the disk is full, a partition is
        damaged, or an open transaction has new offsets with the same key, which a tombstone would delete too.
        """
        batch_size = self._limits.max_tombstones_per_batch
        doomed: list[tuple[int, bytes]] = []
        left = {topic for topic, ends in before.items() if not ends.keys().isdisjoint(self._topic.damaged)}
        with_newer: set[str] = set()
        for item in self._of_topics(before):
            if item is not None:
                group, tp = item
                index = self._topic.partition_of(group)
                if self._drop(group, tp, before[tp.topic].get(index, 0)):
                    doomed.append((index, _key(group, tp)))
                else:
                    with_newer.add(tp.topic)
                    if tp not in self.of(group):
                        left.add(tp.topic)
            if item is None or len(doomed) >= batch_size:
                left |= set() if self._append_tombstones(doomed, now_ms) else before.keys()
                doomed = []
                yield None
        left |= set() if self._append_tombstones(doomed, now_ms) else before.keys()
        # Keep the index of a topic that was created with the name since: its own deletion needs it.
        # See test_offsets_of_a_topic_made_before_a_restart_finished_a_deletion_go_with_it.
        for topic in before.keys() - left - with_newer:
            self._indexes.pop(topic, None)
        return left

    def _append_tombstones(self, doomed: Iterable[tuple[int, bytes]], now_ms: int) -> bool:
        """Append tombstones, grouped by partition of the topic. Return False if any append fails."""
        by_index: dict[int, list[tuple[bytes, None]]] = {}
        for index, key in doomed:
            by_index.setdefault(index, []).append((key, None))
        try:
            for index, records in by_index.items():
                self._topic.append(index, records, now_ms)
        except BrokerError:
            return False
        return True

    def expire(
        self,
        group: str,
        partitions: Iterable[TopicPartition],
        subscribed: Collection[str],
        empty_since_ms: int | None,
        now_ms: int,
    ) -> None:
        """Delete offsets past offsets.retention.minutes, except those of topics that members subscribe to.

        Raises NotCoordinator.
        """
        retention_ms = self._settings["offsets.retention.minutes"] * 60_000
        committed = self.of(group)
        expired = [
            tp
            for tp in partitions
            if tp.topic not in subscribed
            and tp in committed
            and is_expired(
                committed[tp],
                is_pending=self._is_pending(group, tp),
                empty_since_ms=empty_since_ms,
                now_ms=now_ms,
                retention_ms=retention_ms,
            )
        ]
        self.delete(group, expired, now_ms)

    # The start

    def replay(self, index: int, batch: StoredBatch) -> None:
        """Apply a batch to memory. Records other than committed offsets are ignored."""
        if batch.is_commit is not None and batch.producer_id is not None:
            self.on_marker(index, batch.producer_id, batch.is_commit)
            return
        for record in batch.records:
            key = record.key or b""
            if int.from_bytes(key[:2], "big") in KEY_VERSIONS:
                self._replay_record(index, batch.producer_id, key, record.value, record.offset)

    def forget_partition(self, index: int) -> None:
        """Forget all offsets that are stored in a partition of the topic."""
        partition_of = self._topic.partition_of
        self._committed = {
            group: value for group, value in self._committed.items() if partition_of(group) != index
        }
        self._pending = {key: value for key, value in self._pending.items() if key[0] != index}
        self._transactions = {
            group: value for group, value in self._transactions.items() if partition_of(group) != index
        }
        self._pending_keys = {
            group: value for group, value in self._pending_keys.items() if partition_of(group) != index
        }

    def _replay_record(
        self, index: int, producer_id: int | None, key: bytes, value: bytes | None, offset: int
    ) -> None:
        named = OffsetCommitKey.from_bytes(key)
        tp = TopicPartition(named.topic, named.partition)
        if value is None:
            self._drop(named.group, tp)
        elif producer_id is not None:
            self._add_pending(index, producer_id, named.group, {tp: _committed(value, offset)})
        else:
            self._committed.setdefault(named.group, {})[tp] = _committed(value, offset)
            self._note_topics(index, (tp,))


def _key(group: str, tp: TopicPartition) -> bytes:
    return OffsetCommitKey(group=group, topic=tp.topic, partition=tp.partition).to_bytes(_KEY_VERSION)


def _record(group: str, tp: TopicPartition, committed: CommittedOffset) -> tuple[bytes, bytes]:
    value = OffsetCommitValue(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        commit_timestamp=committed.commit_ms,
        expire_timestamp=committed.expire_ms,
    )
    version = _VALUE_VERSION if committed.expire_ms < 0 else _EXPIRING_VALUE_VERSION
    return _key(group, tp), value.to_bytes(version)


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


def _numbered(offsets: Mapping[TopicPartition, CommittedOffset], written: AppendHandle) -> _Offsets:
    """Set the offsets of their records, which are the last records of the batch in this order."""
    first = written.last_offset + 1 - len(offsets)
    return {
        tp: committed._replace(record_offset=first + index)
        for index, (tp, committed) in enumerate(offsets.items())
    }
