"""Mutants of coordinators, deletion, compaction and transactions, which the matching workloads catch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from oncelog.broker.coordinators import consumer_group_log, groups, internal_topic, producer_ids, transactions
from oncelog.broker.coordinators import offsets as coordinators_offsets
from oncelog.broker.coordinators.group_log import encode_group
from oncelog.broker.coordinators.markers import Marker
from oncelog.broker.coordinators.transaction_log import encode_key
from oncelog.broker.topics import takeover
from oncelog.broker.topics import topics as topics_topics
from oncelog.errors import NotCoordinator
from oncelog.limits import Limits
from oncelog.log import cleaner
from oncelog.log.partition import Partition
from oncelog.rules.groups.classic import ClassicGroup
from oncelog.rules.storage import compaction
from oncelog.rules.transactions.coordinator import is_expired
from oncelog.rules.transactions.entry import TransactionState
from oncelog.types import TopicPartition
from oncelog.wire.stored import OffsetCommitKey
from oncelog_simulator import faults, simulation
from oncelog_simulator.mutants.mutant import Mutant, Patch, false, nothing
from oncelog_simulator.world import BROKER_HOST

_CURRENT = consumer_group_log._current
_REPLAY_RECORD = coordinators_offsets.Offsets._replay_record
_COORDINATOR = transactions.TransactionCoordinator


def _current_of_before(member: Any) -> bytes:
    return _CURRENT(replace(member, epoch=member.previous_epoch))


def _no_generation(group: Any, max_bytes: int) -> Any:
    generation_id, group.generation_id = group.generation_id, 0
    try:
        return encode_group(group, max_bytes)
    finally:
        group.generation_id = generation_id


def _drop_committed(self: Any, group: str, tp: TopicPartition, before: int | None = None) -> bool:
    held = self._committed.get(group, {})
    if tp in held and (before is None or held[tp].record_offset < before):
        del held[tp]
        if not held:
            del self._committed[group]
    return tp not in held


def _committed_places(self: Any, group: str) -> list[TopicPartition]:
    return list(self.of(group))


def _committed_of_topics(self: Any, topics: Collection[str]) -> list[tuple[str, TopicPartition]]:
    return sorted((group, tp) for group, held in self._committed.items() for tp in held if tp.topic in topics)


def _replay_keeps_pending(
    self: Any, index: int, producer_id: int | None, key: bytes, value: bytes | None, offset: int
) -> None:
    if value is not None:
        _REPLAY_RECORD(self, index, producer_id, key, value, offset)
        return
    named = OffsetCommitKey.from_bytes(key)
    _drop_committed(self, named.group, TopicPartition(named.topic, named.partition))


def _no_steps(*_: Any) -> Iterator[None]:
    return iter(())


def _bury_in_memory(self: Any, group: Any, now_ms: int) -> Any:
    del self._groups[group.group_id]
    return self.topic.last_append(self.topic.partition_of(group.group_id))


def _marker_of_own_epoch(self: Any, entry: Any, tp: TopicPartition) -> Any:
    topic = self.topic.topic
    epoch = topic.partition(self.topic.partition_of(entry.transactional_id)).leader_epoch
    is_commit = entry.state is TransactionState.PREPARE_COMMIT
    return Marker(entry.producer_id, entry.producer_epoch, epoch, is_commit)


def _forget_in_memory(self: Any, now_ms: int) -> None:
    expiration_ms = self._settings["transactional.id.expiration.ms"]
    for entry in [
        expired for expired in self._entries.values() if is_expired(expired, now_ms, expiration_ms)
    ]:
        del self._entries[entry.transactional_id]


def _forget_all(self: Any, now_ms: int) -> None:
    for key in list(self._entries):
        with suppress(NotCoordinator):
            self.topic.append(self.topic.partition_of(key), [(encode_key(key), None)], now_ms)
            del self._entries[key]


def _saved_and_forgotten(self: Any, error: Any, mark: Any, now_ms: int) -> None:
    _SAVED(self, error, mark, now_ms)
    self.is_unsaved = False


def _draw_full_disks(rng: Any, count: int, until_ms: int, *clients: Any, **how: Any) -> list[faults.Fault]:
    return [
        faults.Fault(at_ms, "full-disk", BROKER_HOST, 2_000, 100) for at_ms in range(5_000, until_ms, 5_000)
    ]


def _draw_kills_in_writes(
    rng: Any, count: int, until_ms: int, *clients: Any, **how: Any
) -> list[faults.Fault]:
    return [
        faults.Fault(at_ms, "kill-in-write", BROKER_HOST, 2_400, rng.randint(0, 3_000))
        for at_ms in range(2_000, until_ms, 2_500)
    ]


def _drop_after_writing(self: Any, before: Any, now_ms: int) -> Any:
    """Drop the offsets from memory only after writing tombstones. Keep all if the disk refuses these."""
    committed, pending = self.snapshot()
    transactions = {group: set(keys) for group, keys in self._transactions.items()}
    left = yield from _DELETE_TOPICS(self, before, now_ms)
    if left == set(before):
        self._committed, self._pending, self._transactions = committed, pending, transactions
    return left


def _first_of_all(stored: int, seen: int, now_ms: int) -> int:
    return 0


def _no_settings(*_: Any) -> dict[str, str]:
    return {}


def _append_or_refuse(self: Any, index: int, records: Any, now_ms: int) -> Any:
    if now_ms // 60_000 % 2 and all(value is None for _, value in records):
        raise NotCoordinator("the disk is full")
    return _APPEND(self, index, records, now_ms)


def _append_in_time(self: Any, index: int, records: Any, now_ms: int) -> Any:
    if self.name == "__transaction_state" and now_ms // 300 % 3 == 0:
        raise NotCoordinator("the disk is full")
    return _APPEND(self, index, records, now_ms)


def _delete_forgetting_earlier(self: Any, deleted: Any) -> None:
    for topic in deleted:
        self.offsets_to_delete.pop(topic.name, None)
    _BEGIN_DELETION(self, deleted)


def _few_keys(seed: int) -> Limits:
    return Limits(max_compaction_keys=2)


def _take_without_index(self: Any, *how: Any) -> Any:
    self._aborted_by_marker = {}
    return (yield from _TAKE(self, *how))


def _superseded_by_itself(self: Any, key: bytes, offset: int) -> bool:
    return _SUPERSEDED(self, key, offset - 1)


def _alter_in_memory(self: Any, changes: Any) -> None:
    for topic, overrides in changes:
        topic.configure(self._settings, overrides)
        self._reconfigure_partitions(topic)


def _grow_in_memory(self: Any, changes: Any, now_ms: int) -> Any:
    for topic, count in changes:
        topic.partition_count = count
    failures = yield from self._open_missing([topic for topic, _ in changes], now_ms)
    self._changed()
    return failures


_SAVED = ClassicGroup.complete_save
_APPEND = internal_topic.InternalTopic.append
_DELETE_TOPICS = coordinators_offsets.Offsets.delete_topics
_BEGIN_DELETION = topics_topics.Topics.begin_deletion
_TAKE = cleaner.Compaction._take
_SUPERSEDED = compaction.LatestOffsets.is_superseded
_OFFSETS = coordinators_offsets.Offsets
REFUSED: tuple[Patch, ...] = ((internal_topic.InternalTopic, "append", _append_or_refuse),)
"""A disk that refuses tombstones in every other minute, like a disk that becomes full within a request."""
REFUSED_IDS: tuple[Patch, ...] = ((internal_topic.InternalTopic, "append", _append_in_time),)
"""A transaction coordinator that cannot write in 300 of every 900 ms."""
FULL_DISKS: tuple[Patch, ...] = ((simulation, "draw_faults", _draw_full_disks),)
"""A disk that is full for two of every five seconds."""
KILLS_IN_WRITES: tuple[Patch, ...] = ((simulation, "draw_faults", _draw_kills_in_writes),)
"""A broker that is killed in the middle of a write every few seconds."""
FEW_KEYS: tuple[Patch, ...] = ((simulation, "draw_limits", _few_keys),)
"""A broker whose compaction handles two keys at a time."""
MUTANTS = [
    Mutant("a member's epoch is not stored", ((consumer_group_log, "_current", _current_of_before),)),
    Mutant("a group's generation is not stored", ((groups, "encode_group", _no_generation),)),
    Mutant(
        "a deleted group's pending offsets come with their commit",
        ((_OFFSETS, "partitions_of", _committed_places), (_OFFSETS, "_drop", _drop_committed)),
        "deletions",
        findings=("C6",),
    ),
    Mutant(
        "a deleted topic's pending offsets come with their commit",
        ((_OFFSETS, "_of_topics", _committed_of_topics),),
        "deletions",
        findings=("C6",),
    ),
    Mutant(
        "a replayed deletion keeps pending offsets",
        ((_OFFSETS, "_replay_record", _replay_keeps_pending),),
        "deletions",
        findings=("C6",),
    ),
    Mutant(
        "a deleted topic leaves its offsets",
        ((groups.GroupCoordinator, "delete_topic_offsets", _no_steps),),
        "deletions",
    ),
    Mutant(
        "a kill during a deletion leaves a topic's offsets",
        ((groups.GroupCoordinator, "resume_deletions", nothing),),
        "deletions",
        KILLS_IN_WRITES,
        findings=("C19",),
    ),
    Mutant(
        "a deleted group is deleted in memory only",
        ((groups.GroupCoordinator, "_write_tombstone", _bury_in_memory),),
        "deletions",
    ),
    Mutant(
        "a marker of a higher coordinator epoch fences the coordinator",
        ((_COORDINATOR, "_marker", _marker_of_own_epoch),),
        "deletions",
        findings=("F27",),
    ),
    Mutant(
        "an expired transactional id is forgotten in memory only",
        ((_COORDINATOR, "expire", _forget_in_memory),),
        "deletions",
    ),
    Mutant(
        "a transactional id with an open transaction expires",
        ((_COORDINATOR, "expire", _forget_all),),
        "deletions",
    ),
    Mutant(
        "a group that the disk refused is not stored again",
        ((ClassicGroup, "complete_save", _saved_and_forgotten),),
        "deletions",
        FULL_DISKS,
        findings=("R140",),
    ),
    Mutant(
        "a full disk keeps a deleted topic's offsets in memory",
        ((_OFFSETS, "delete_topics", _drop_after_writing),),
        "deletions",
        REFUSED,
        findings=("R41",),
        guards=(
            "broker/test_broker_coordinator_state.py::test_offsets_that_a_full_disk_keeps_do_not_count_for_the_next_topic_of_that_name",
        ),
    ),
    Mutant(
        "a second deletion takes the place of the first",
        ((topics_topics.Topics, "begin_deletion", _delete_forgetting_earlier),),
        "deletions",
        REFUSED,
        findings=("R10",),
        guards=(
            "broker/test_broker_coordinator_state.py::"
            "test_two_deletions_of_a_name_are_forgotten_once_the_tombstones_of_both_are_on_the_disk",
        ),
    ),
    Mutant(
        "a batch overtakes one that the coordinator refused",
        ((Partition, "begin_verification", nothing),),
        "pipelined",
        REFUSED_IDS,
        findings=("F39",),
        guards=("log/test_log_partition.py::test_no_batch_overtakes_one_for_which_the_coordinator_is_asked",),
    ),
    Mutant(
        "a marker after a compaction loses its index entry",
        ((cleaner.Compaction, "_take", _take_without_index),),
        "changed",
        FEW_KEYS,
        findings=("C1",),
    ),
    Mutant(
        "compaction treats aborted records as committed",
        ((compaction.SeenTransactions, "is_aborted", false),),
        "changed",
    ),
    Mutant(
        "compaction removes the newest record of a key",
        ((compaction.LatestOffsets, "is_superseded", _superseded_by_itself),),
        "changed",
    ),
    Mutant(
        "a topic's settings are not stored", ((topics_topics.Topics, "alter", _alter_in_memory),), "changed"
    ),
    Mutant(
        "added partitions are not stored",
        ((topics_topics.Topics, "grow_in_steps", _grow_in_memory),),
        "changed",
    ),
    Mutant(
        "producer ids of Apache Kafka's directory are assigned again",
        ((producer_ids, "first_producer_id", _first_of_all),),
        "takeover",
        findings=("C2",),
    ),
    Mutant(
        "topics of Apache Kafka's directory have no settings",
        ((takeover, "_own_settings", _no_settings),),
        "takeover",
        findings=("C3",),
    ),
]
NOT_CAUGHT = {
    "a full disk keeps a deleted topic's offsets in memory": (
        "seed 0 noticed it before deletions go in steps (R281); none of the first 11 since"
    ),
    "a second deletion takes the place of the first": (
        "seed 15 noticed it before the product changed: no seed of the first 149 since"
    ),
    "a batch overtakes one that the coordinator refused": (
        "needs the first of two pipelined batches refused and the second stored: no seed of the first 13"
    ),
}
"""Mutants that no seed catches, with the reason."""
