"""Committed offsets: the store over `__consumer_offsets`.

A tombstone ends what is committed for its key and what is pending in open transactions, here and in `replay`:
what is in memory is always what a replay of the log gives (behaviour T15).
Source: rows T6, T7; Kafka's OffsetMetadataManager.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence

from oncelog.broker.coordinators.internal_topic import StateTopic, StoredBatch, Written
from oncelog.broker.stepwise import StepBudget, Work, run_work
from oncelog.errors import BrokerError, MessageTooLarge
from oncelog.limits import Limits
from oncelog.rules.groups.committed_offsets import CommittedOffset, is_expired, later
from oncelog.rules.idempotence.sequencer import Identity
from oncelog.settings import Settings
from oncelog.types import TopicPartition
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord
from oncelog.wire.stored import OffsetCommitKey, OffsetCommitValue

KEY_VERSIONS = (0, 1)
_KEY_VERSION, _VALUE_VERSION, _EXPIRING_VALUE_VERSION = 1, 3, 1

_Offsets = dict[TopicPartition, CommittedOffset]
OffsetRecord = tuple[bytes, bytes]
"""Key and value of a committed offset, as `__consumer_offsets` holds it."""


class Offsets:
    """Every committed offset of every group of this node, and those that wait for a marker."""

    def __init__(self, topic: StateTopic, settings: Settings, limits: Limits) -> None:
        self._topic, self._settings, self._limits = topic, settings, limits
        self._committed: dict[str, _Offsets] = {}
        self._pending: dict[tuple[int, int], dict[str, _Offsets]] = {}
        """(partition of the topic, producer id) -> group -> offsets of the open transaction."""
        self._transactions: dict[str, set[tuple[int, int]]] = {}
        """Group -> keys of `_pending` under which it has offsets."""
        self._pending_keys: dict[str, dict[TopicPartition, set[tuple[int, int]]]] = {}
        """Group -> partition -> keys of `_pending` under which an offset for it waits.

        Without it each offset that is deleted took a look at all open transactions of its group.
        See test_offsets_are_deleted_without_a_look_at_each_open_transaction.
        """
        self._indexes: dict[str, set[int]] = {}
        """Topic -> partitions of `__consumer_offsets` that hold offsets of it, or once did."""

    # Committing

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
        now_ms: int,
        records: Sequence[OffsetRecord] | None = None,
    ) -> Written:
        """They hold from now on. `records`: what `encode` made of them.

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
        who: Identity,
        offsets: Mapping[TopicPartition, CommittedOffset],
        now_ms: int,
        records: Sequence[OffsetRecord] | None = None,
    ) -> Written:
        """They hold when the transaction commits. `records`: what `encode` made of them.

        Raises InvalidProducerEpoch, NotCoordinator, MessageTooLarge.
        """
        index = self._topic.partition_of(group)
        encoded = records or self._records(group, offsets)
        batch = build_batch(
            [NewRecord(now_ms, key, value) for key, value in encoded],
            producer_id=who.producer_id,
            producer_epoch=who.producer_epoch,
            is_transactional=True,
        )
        written = self._topic.append_batch(index, batch, now_ms)
        self._add_pending(index, who.producer_id, group, _numbered(offsets, written))
        return written

    def _records(self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> list[OffsetRecord]:
        """Return the records of one commit, in one step. Raises MessageTooLarge."""
        return run_work(self.encode(group, offsets, StepBudget(len(offsets) + 1)))

    def encode(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], budget: StepBudget
    ) -> Work[list[OffsetRecord]]:
        """Return the records of one commit. Raises MessageTooLarge above message.max.bytes, as Kafka does.

        Each record names its group. Without the limit a small request with a group id of 32,767 bytes would
        make that many bytes for every partition there is, in one batch.
        """
        limit, size_bytes, records = self._settings["message.max.bytes"], 0, []
        for tp, committed in offsets.items():
            key, value = _record(group, tp, committed)
            size_bytes += len(key) + len(value)
            if size_bytes > limit:
                raise MessageTooLarge(
                    f"an offset commit may take {limit} bytes of {self._topic.name}; that of {len(offsets)} "
                    f"partitions takes more: commit fewer at a time"
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
        """A transaction ended in a partition of the topic."""
        pending = self._pending.pop((index, producer_id), {})
        for group, offsets in pending.items():
            self._forget_transaction(group, (index, producer_id))
            self._forget_pending(group, (index, producer_id), offsets)
            if is_commit:
                held = self._committed.setdefault(group, {})
                for at, each in offsets.items():
                    held[at] = later(held.get(at), each)

    def _forget_transaction(self, group: str, key: tuple[int, int]) -> None:
        keys = self._transactions[group]
        keys.discard(key)
        if not keys:
            del self._transactions[group]

    def _forget_pending(self, group: str, key: tuple[int, int], tps: Iterable[TopicPartition]) -> None:
        """Note that a transaction has no offsets for these partitions any more."""
        keys = self._pending_keys[group]
        for tp in tps:
            keys[tp].discard(key)
            if not keys[tp]:
                del keys[tp]
        if not keys:
            del self._pending_keys[group]

    # Reading

    def groups(self) -> Collection[str]:
        """Groups that have committed something, or have something pending in a transaction."""
        return self._committed.keys() | self._transactions.keys()

    def has(self, group: str) -> bool:
        """Return True for a group in `groups`, without a look at the others."""
        return group in self._committed or group in self._transactions

    def of(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        """What a group has committed."""
        return self._committed.get(group, {})

    def pending_of(self, group: str) -> Collection[TopicPartition]:
        """Partitions for which an open transaction may commit another offset, as a view."""
        return self._pending_keys.get(group, {}).keys()

    def places_of(self, group: str) -> list[TopicPartition]:
        """Return the partitions with a committed or a pending offset, in the same order in every run."""
        return list(dict.fromkeys([*self.of(group), *sorted(self.pending_of(group))]))

    def _is_pending(self, group: str, at: TopicPartition) -> bool:
        return at in self.pending_of(group)

    def snapshot(self) -> tuple[dict[str, _Offsets], dict[tuple[int, int], dict[str, _Offsets]]]:
        """Return a copy of everything: committed offsets by group, pending ones as `_pending`."""
        committed = {group: dict(offsets) for group, offsets in self._committed.items()}
        pending = {
            key: {group: dict(offsets) for group, offsets in groups.items()}
            for key, groups in self._pending.items()
        }
        return committed, pending

    # Forgetting

    def delete(self, group: str, partitions: Iterable[TopicPartition], now_ms: int) -> Written | None:
        """Write tombstones, which end pending offsets too; None if there was nothing.

        Raises NotCoordinator.
        """
        committed = self.of(group)
        doomed = [at for at in dict.fromkeys(partitions) if at in committed or self._is_pending(group, at)]
        if not doomed:
            return None
        index, written = self._topic.partition_of(group), None
        most = self._limits.max_tombstones_per_batch
        for first in range(0, len(doomed), most):
            tombstones = doomed[first : first + most]
            written = self._topic.append(index, [(_key(group, at), None) for at in tombstones], now_ms)
            for at in tombstones:
                self._drop(group, at)
        return written

    def _drop(self, group: str, at: TopicPartition, before: int | None = None) -> bool:
        """Drop what stands below offset `before` of the log (None: all); return True when nothing is left."""
        is_empty = True
        committed = self._committed.get(group, {})
        if at in committed:
            is_empty = before is None or committed[at].record_offset < before
            if is_empty:
                del committed[at]
                if not committed:
                    del self._committed[group]
        if not self._is_pending(group, at):
            return is_empty
        for key in list(self._pending_keys[group][at]):
            pending = self._pending[key][group]
            if before is not None and pending[at].record_offset >= before:
                is_empty = False
                continue
            del pending[at]
            self._forget_pending(group, key, (at,))
            if not pending:
                self._drop_pending(group, key)
        return is_empty

    def _drop_pending(self, group: str, key: tuple[int, int]) -> None:
        del self._pending[key][group]
        if not self._pending[key]:
            del self._pending[key]
        self._forget_transaction(group, key)

    def ends_of(self, topics: Collection[str]) -> dict[str, dict[int, int]]:
        """Return where the log ends, for each partition of it that may hold offsets of these topics.

        A damaged partition may hold some, which nobody knows until it is repaired.
        """
        return {
            topic: {
                index: self._topic.newest(index).last_offset + 1
                for index in sorted(self._indexes.get(topic, set()).union(self._topic.damaged))
            }
            for topic in topics
        }

    def _of_topics(self, topics: Collection[str]) -> Iterator[tuple[str, TopicPartition] | None]:
        """Yield everybody's offsets of these topics, by a look at every offset there is.

        None ends a step: as many groups, or a hundred times as many offsets, were looked at as a step may.
        """
        groups = [*self._committed, *(group for group in self._transactions if group not in self._committed)]
        looked = 0
        for group in groups:
            places = self.places_of(group)
            for tp in sorted(tp for tp in places if tp.topic in topics):
                yield group, tp
            looked += 1 + len(places) // 100
            if looked >= self._limits.expire_step_entries:
                looked = 0
                yield None

    def delete_topics(
        self, before: Mapping[str, Mapping[int, int]], now_ms: int
    ) -> Generator[None, None, set[str]]:
        """Forget what was committed for topics that are gone, in bounded steps: in memory, and by tombstones.

        `before`: by topic, only what stands below these offsets of the log, for the name may be another
        topic's by now. Returns the topics of which something stays in the log: the disk is full, a partition
        is damaged, or an open transaction has new offsets for the same key, which a tombstone would end too.
        """
        most = self._limits.max_tombstones_per_batch
        doomed: list[tuple[int, bytes]] = []
        left = {topic for topic, ends in before.items() if not ends.keys().isdisjoint(self._topic.damaged)}
        with_newer: set[str] = set()
        for found in self._of_topics(before):
            if found is not None:
                group, tp = found
                index = self._topic.partition_of(group)
                if self._drop(group, tp, before[tp.topic].get(index, 0)):
                    doomed.append((index, _key(group, tp)))
                else:
                    with_newer.add(tp.topic)
                    if tp not in self.of(group):
                        left.add(tp.topic)
            if found is None or len(doomed) >= most:
                left |= set() if self._append_tombstones(doomed, now_ms) else before.keys()
                doomed = []
                yield None
        left |= set() if self._append_tombstones(doomed, now_ms) else before.keys()
        # A topic of the name that was made meanwhile is found by these when it is deleted.
        # See test_offsets_of_a_topic_made_before_a_restart_finished_a_deletion_go_with_it.
        for topic in before.keys() - left - with_newer:
            self._indexes.pop(topic, None)
        return left

    def _append_tombstones(self, doomed: Iterable[tuple[int, bytes]], now_ms: int) -> bool:
        """Append tombstones, by partition of the topic; return False if the log does not take them all."""
        by_index: dict[int, list[tuple[bytes, None]]] = {}
        for index, key in doomed:
            by_index.setdefault(index, []).append((key, None))
        try:
            for index, records in by_index.items():
                self._topic.append(index, records, now_ms)
        except BrokerError:
            return False
        return True

    def forget_expired(
        self,
        group: str,
        partitions: Iterable[TopicPartition],
        subscribed: Collection[str],
        empty_since_ms: int | None,
        now_ms: int,
    ) -> None:
        """Forget what is older than offsets.retention.minutes among these partitions, less what members read.

        Raises NotCoordinator.
        """
        retention_ms = self._settings["offsets.retention.minutes"] * 60_000
        committed = self.of(group)
        expired = [
            at
            for at in partitions
            if at.topic not in subscribed
            and at in committed
            and is_expired(
                committed[at],
                is_pending=self._is_pending(group, at),
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

    def forget_partition(self, index: int) -> None:
        """Forget what is kept in a partition of the topic."""
        partition_of = self._topic.partition_of
        self._committed = {g: each for g, each in self._committed.items() if partition_of(g) != index}
        self._pending = {key: each for key, each in self._pending.items() if key[0] != index}
        self._transactions = {g: each for g, each in self._transactions.items() if partition_of(g) != index}
        self._pending_keys = {g: each for g, each in self._pending_keys.items() if partition_of(g) != index}

    def _replay_record(
        self, index: int, producer_id: int | None, key: bytes, value: bytes | None, offset: int
    ) -> None:
        named = OffsetCommitKey.from_bytes(key)
        at = TopicPartition(named.topic, named.partition)
        if value is None:
            self._drop(named.group, at)
        elif producer_id is not None:
            self._add_pending(index, producer_id, named.group, {at: _committed(value, offset)})
        else:
            self._committed.setdefault(named.group, {})[at] = _committed(value, offset)
            self._note_topics(index, (at,))


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
