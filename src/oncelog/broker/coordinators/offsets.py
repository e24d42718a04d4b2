"""Committed offsets, kept in memory and stored in `__consumer_offsets`.

Memory always equals the result of a replay of the log: behaviour T15 (docs/behaviours.md). A tombstone
deletes the committed offset of its key and all pending ones. This applies when the tombstone is appended and
when it is replayed.
Source: behaviours T6 and T7; kafka OffsetMetadataManager.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence

from oncelog.broker.coordinators.internal_topic import AppendHandle, InternalTopic, StoredBatch
from oncelog.broker.stepwise import StepBudget, Work, name_cost, run_work
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
"""The (key, value) of the record that stores a committed offset."""


class Offsets:
    """The committed offsets of all groups, and the pending offsets of open transactions."""

    def __init__(self, topic: InternalTopic, settings: Settings, limits: Limits) -> None:
        self._topic, self._settings, self._limits = topic, settings, limits
        self._committed: dict[str, _Offsets] = {}
        self._pending: dict[tuple[int, int], dict[str, _Offsets]] = {}
        """(partition of `__consumer_offsets`, producer id) -> group -> pending offsets of the open
        transaction.
        """
        self._transactions: dict[str, set[tuple[int, int]]] = {}
        """Group -> keys of `_pending` under which the group has offsets."""
        self._pending_keys: dict[str, dict[TopicPartition, set[tuple[int, int]]]] = {}
        """Group -> partition -> keys of `_pending` under which the group has an offset for the partition.

        Without this index, deleting an offset would examine all open transactions of its group.
        See test_offsets_are_deleted_without_a_look_at_each_open_transaction.
        """
        self._indexes: dict[str, set[int]] = {}
        """Topic -> indexes of the partitions of `__consumer_offsets` that have, or once had, offsets of the
        topic.
        """

    # Committing

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
        now_ms: int,
        records: Sequence[OffsetRecord] | None = None,
    ) -> AppendHandle:
        """Commit offsets. `records` are the encoded offsets if the caller has called `encode`.

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
        """Store offsets of a transaction. They are pending until a marker commits or drops them.

        `records` are the encoded offsets if the caller has called `encode`. Raises InvalidProducerEpoch,
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
        """Return the records of a commit.

        As in Kafka, raises MessageTooLarge if the records together exceed message.max.bytes. Each record
        contains the group id. Without the limit, a small request with a group id of 32,767 bytes could create
        a huge batch, because the batch repeats the group id for every partition.
        """
        limit, size_bytes, records = self._settings["message.max.bytes"], 0, []
        for tp, committed in offsets.items():
            key, value = _record(group, tp, committed)
            size_bytes += len(key) + len(value)
            if size_bytes > limit:
                raise MessageTooLarge(
                    f"the commit of {len(offsets)} partitions exceeds {limit} bytes of "
                    f"{self._topic.name}: commit fewer partitions in one request"
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

    def on_marker(self, index: int, producer_id: int, is_commit: bool) -> int:
        """Apply or drop the pending offsets of a transaction that ended in a partition of
        `__consumer_offsets`. Return their number.
        """
        pending = self._pending.pop((index, producer_id), {})
        for group, offsets in pending.items():
            if self._forget_transaction(group, (index, producer_id)):
                # No other transaction has offsets of the group, so forget all its partitions at once.
                del self._pending_keys[group]
            else:
                self._forget_pending(group, (index, producer_id), offsets)
            if is_commit:
                held = self._committed.get(group)
                if held is None:
                    self._committed[group] = offsets
                    continue
                for tp, committed in offsets.items():
                    held[tp] = later(held.get(tp), committed)
        return sum(map(len, pending.values()))

    def _forget_transaction(self, group: str, key: tuple[int, int]) -> bool:
        """Forget that the transaction has offsets of the group. Return True if no other one has any."""
        keys = self._transactions[group]
        keys.discard(key)
        if not keys:
            del self._transactions[group]
        return not keys

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
        return [*self._committed, *(group for group in self._transactions if group not in self._committed)]

    def has(self, group: str) -> bool:
        """Return True if the group has committed or pending offsets."""
        return group in self._committed or group in self._transactions

    def of(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """Return the committed offsets of a group."""
        return self._committed.get(group, {})

    def pending_of(self, group: str) -> Collection[TopicPartition]:
        """Return a view of the partitions for which the group has a pending offset."""
        return self._pending_keys.get(group, {}).keys()

    def partitions_of(self, group: str) -> list[TopicPartition]:
        """Return the partitions for which the group has a committed or pending offset, in a deterministic
        order.
        """
        return list(dict.fromkeys([*self.of(group), *sorted(self.pending_of(group))]))

    def _is_pending(self, group: str, tp: TopicPartition) -> bool:
        return tp in self.pending_of(group)

    def snapshot(self) -> tuple[dict[str, _Offsets], dict[tuple[int, int], dict[str, _Offsets]]]:
        """Return copies of all committed offsets by group, and of `_pending`."""
        committed = {group: dict(offsets) for group, offsets in self._committed.items()}
        pending = {
            key: {group: dict(offsets) for group, offsets in groups.items()}
            for key, groups in self._pending.items()
        }
        return committed, pending

    # Forgetting

    def delete(self, group: str, partitions: Iterable[TopicPartition], now_ms: int) -> AppendHandle | None:
        """Delete a group's offsets for these partitions, including pending ones, by tombstones.

        Return the last append; None if there were no offsets. Raises NotCoordinator.
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
        """Remove a group's offsets for a partition from memory. Return True if none is left.

        If `before` is set, only offsets whose records are below this offset of the log are removed.
        """
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
        """Return for each topic the log end offset of each partition of `__consumer_offsets` that may have
        the topic's offsets.

        Damaged partitions are always included, because their content is unknown until they are repaired.
        """
        return {
            topic: {
                index: self._topic.last_append(index).last_offset + 1
                for index in sorted(self._indexes.get(topic, set()).union(self._topic.damaged))
            }
            for topic in topics
        }

    def _of_topics(self, topics: Collection[str]) -> Iterator[tuple[str, TopicPartition] | None]:
        """Yield (group, partition) for all offsets of these topics.

        This examines the offsets of all groups, so it yields None at the end of each step. A step ends after
        `expire_step_entries` groups or 100 times as many offsets.
        """
        looked = 0
        for group in self.groups():
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

        `before` has the log end offsets at the deletion of each topic, by partition index of
        `__consumer_offsets`. Later records may belong to a new topic with the same name, so they stay.

        Return the topics with offsets that could not be deleted from the log. This happens if the disk is
        full, the partition is damaged, or an open transaction has a newer offset for the same key. In the
        last case a tombstone would delete the newer offset, too.
        """
        batch_cost, cost = self._limits.max_tombstones_per_batch, 0
        doomed: list[tuple[int, bytes]] = []
        left = {topic for topic, ends in before.items() if not ends.keys().isdisjoint(self._topic.damaged)}
        with_newer: set[str] = set()
        for item in self._of_topics(before):
            if item is not None:
                group, tp = item
                index = self._topic.partition_of(group)
                # Each tombstone has the group id. See test_the_length_of_ids_costs_more_of_a_step.
                cost += name_cost(group)
                if self._drop(group, tp, before[tp.topic].get(index, 0)):
                    doomed.append((index, _key(group, tp)))
                else:
                    with_newer.add(tp.topic)
                    if tp not in self.of(group):
                        left.add(tp.topic)
            if item is None or cost >= batch_cost:
                left |= set() if self._append_tombstones(doomed, now_ms) else before.keys()
                doomed, cost = [], 0
                yield None
        left |= set() if self._append_tombstones(doomed, now_ms) else before.keys()
        # If a new topic with the same name has offsets, keep the entry of the name in `_indexes`: a deletion
        # of the new topic needs the entry.
        # See test_offsets_of_a_recreated_topic_are_deleted_with_it.
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
        """Delete a group's expired offsets. Only offsets for `partitions` are examined.

        Offsets of `subscribed` topics stay. `empty_since_ms` is the time at which a classic group lost its
        last member; None for a group that has members or never had any. Raises NotCoordinator.
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

    # Replay at the start of the broker

    def replay(self, index: int, batch: StoredBatch) -> None:
        """Apply a batch of the log to memory. Records that are not committed offsets are ignored."""
        if batch.is_commit is not None and batch.producer_id is not None:
            self.on_marker(index, batch.producer_id, batch.is_commit)
            return
        for record in batch.records:
            key = record.key or b""
            if int.from_bytes(key[:2], "big") in KEY_VERSIONS:
                self._replay_record(index, batch.producer_id, key, record.value, record.offset)

    def forget_partition(self, index: int) -> None:
        """Forget all offsets in a damaged partition of `__consumer_offsets`."""
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
    """Return the offsets with their `record_offset`.

    Their records are the last ones of `written`, in this order.
    """
    first = written.last_offset + 1 - len(offsets)
    return {
        tp: committed._replace(record_offset=first + index)
        for index, (tp, committed) in enumerate(offsets.items())
    }
