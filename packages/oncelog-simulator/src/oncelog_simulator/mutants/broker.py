"""Mutants of the broker, the log and producers, which seeds with faults catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncelog.broker import group_commit
from oncelog.broker.coordinators import groups, producer_ids, transaction_verification, transactions
from oncelog.broker.coordinators import offsets as coordinators_offsets
from oncelog.broker.topics import topics as topics_topics
from oncelog.client.admin import blocking as admin_blocking
from oncelog.client.consumer import fetch_messages
from oncelog.client.producer import blocking as producer_blocking
from oncelog.errors import KafkaStorageError
from oncelog.log import index, local_log, manager, partition, recovery, segment, segments, snapshot
from oncelog.log.checkpoint import LOG_STARTS, read_offsets
from oncelog.rules.idempotence import append, markers, sequencer
from oncelog.rules.idempotence import producer_state as producer_table
from oncelog.rules.storage.read_committed import Verdict, VisibilityFilter
from oncelog.rules.transactions import coordinator as transactions_coordinator
from oncelog.rules.transactions.entry import TransactionState
from oncelog.spark.sink import decisions as lane_rules
from oncelog.spark.sink import kept_clients
from oncelog.spark.sink import task as sink_task
from oncelog.wire import records
from oncelog_simulator import checks, faults, simulation
from oncelog_simulator.mutants.mutant import Mutant, Patch, false, nothing
from oncelog_simulator.world import BROKER_HOST, World

_ORIGINAL_APPEND = partition.Partition.append
_ORIGINAL_MARKERS = transactions.TransactionCoordinator._write_markers


def _acknowledge_always(self: Any, records: memoryview, **how: Any) -> Any:
    try:
        return _ORIGINAL_APPEND(self, records, **how)
    except KafkaStorageError:
        end = self.log_end_offset
        return partition.Appended(end, end, None, self.log_start_offset, False)


def _one_marker(self: Any, transactional_id: str, now_ms: int) -> None:
    remaining = self._unfinished[transactional_id]
    for tp in sorted(remaining)[1:]:
        remaining.discard(tp)
    _ORIGINAL_MARKERS(self, transactional_id, now_ms)


def _always_commit(self: Any, transactional_id: str, now_ms: int) -> None:
    entry = self._entries[transactional_id]
    if entry.state is TransactionState.PREPARE_ABORT:
        self._entries[transactional_id] = entry._replace(state=TransactionState.PREPARE_COMMIT)
    _ORIGINAL_MARKERS(self, transactional_id, now_ms)
    if transactional_id in self._unfinished:
        self._entries[transactional_id] = entry


def _at_once(_: Any, __: Any, then: Callable[[Any], object]) -> None:
    then(None)


def _same_epoch(entry: Any, fresh: Any, requested: Any) -> Any:
    epoch = max(entry.producer_epoch, 0)
    return transactions_coordinator.Append(fresh._replace(producer_epoch=epoch))


def _pending_at_once(
    self: Any, group: str, producer: Any, offsets: Any, now_ms: int, records: Any = None
) -> Any:
    return self.commit(group, offsets, now_ms, records)


def _offsets_whatever(self: Any, index: int, producer_id: int, is_commit: bool) -> int:
    for group, offsets in self._pending.pop((index, producer_id), {}).items():
        self._forget_transaction(group, (index, producer_id))
        self._committed.setdefault(group, {}).update(offsets)
    return 0


def _offsets_never(self: Any, index: int, producer_id: int, is_commit: bool) -> int:
    for group in self._pending.pop((index, producer_id), {}):
        self._forget_transaction(group, (index, producer_id))
    return 0


def _take_again(self: Any) -> int:
    self._next += 1
    return int(self._next % 2)


def _begin_at_zero(stored: int, seen: int, now_ms: int) -> int:
    return 0


def _number_again(self: Any, batch: Any) -> None:
    if batch.may_be_stored:
        batch.base_sequence, self.next_sequence = self.next_sequence, self.next_sequence + batch.record_count
    batch.is_on_wire = True
    batch.was_first_in_flight = True


def _deliver_all(self: Any, batch: Any, *, is_abort_marker: bool) -> Any:
    return Verdict.MARKER if batch.is_control else Verdict.DELIVER


def _flushed_at_once(self: Any, flushed: Any, wait: Any) -> None:
    wait.on_flushed(None)


def _no_list(*_: Any) -> list[Any]:
    return []


def _no_set(*_: Any) -> set[Any]:
    return set()


def _sync_nothing(self: Any) -> None:
    self.recovery_point = self.end_offset


def _trust_all(self: Any, trusted_offset: int, interval_bytes: int, *_: Any, **__: Any) -> Any:
    self._load_trusted(trusted_offset)
    return self._walk_from_index(interval_bytes, verify=False)


def _pack_one_batch(entry: Any) -> bytes:
    return _PACK(entry._replace(batches=entry.batches[-1:]))


def _wrong_duplicate(entry: Any, batch: Any) -> Any:
    position = _FIND(entry, batch)
    return None if position is None else position._replace(last_offset=position.last_offset + 1)


def _pack_without_epoch(entry: Any) -> bytes:
    return _PACK(entry._replace(producer_epoch=0))


def _load_empty(self: Any, highest_offset: int, now_ms: int, **how: Any) -> Any:
    result = _LOAD(self, highest_offset, now_ms, **how)
    return None if result is None else snapshot.Snapshot(result.offset, {})


def _append_unsynced(self: Any, entry: Any) -> None:
    self._entries.append(entry)


def _surely_not_stored(self: Any, batch: Any, *, may_be_stored: bool) -> None:
    batch.is_on_wire = False


def _count_unacknowledged(self: Any, current: Any) -> bool:
    if self.is_restart_needed or not self.unacknowledged:
        return not self.is_restart_needed
    all_sent = all(batch.is_on_wire for batch in self.unacknowledged)
    return (
        self.identity == current
        and self.unresolved is None
        and len(self.unacknowledged) < self._window
        and all_sent
    )


def _load_as_kafka(self: Any, offset: int, now_ms: int) -> Any:
    data = self._disk.read(self._path(offset, snapshot.SNAPSHOT_SUFFIX))
    packed = {pid: _PACK(entry) for pid, entry in snapshot.decode_snapshot(data, now_ms)}
    return snapshot.Snapshot(offset, packed, has_older_batches=False)


def _draw_many(rng: Any, count: int, *where: Any, **how: Any) -> Any:
    return faults.draw_faults(rng, 60, *where, **how)


def _draw_slow_syncs(rng: Any, count: int, *where: Any, **how: Any) -> Any:
    drawn = faults.draw_faults(rng, 40, *where, **how)
    if not how["loses_power"]:
        return drawn
    slow = faults.Fault(0, "slow-disk", BROKER_HOST, 8_000, 1_500)
    power = faults.Fault(0, "power", BROKER_HOST, 0, 0)
    return [(slow, power)[number % 2]._replace(at_ms=fault.at_ms) for number, fault in enumerate(drawn)]


def _violate_all_but_memory(self: Any, rule: str, text: str) -> None:
    if rule != "a retry was not recognised":
        _VIOLATE(self, rule, text)


def _marker_apart(self: Any, offsets: Any, group: str, timeout: float | None = None) -> None:
    with admin_blocking.Admin({"bootstrap.servers": self.settings["bootstrap.servers"]}) as other:
        other.alter_group_offsets(group, offsets)


def _write_always(*_: Any, **__: Any) -> Any:
    return lane_rules.Write()


def _own_producer(self: Any, transactional_id: str) -> Any:
    _own_producer.count += 1  # type: ignore[attr-defined]
    return _PRODUCER(self, f"{transactional_id}-{_own_producer.count}")  # type: ignore[attr-defined]


def _keep_files(self: Any, deleted: Any, topic_ids: Any) -> Any:
    for tp in deleted:
        if tp in self.partitions:
            self.partitions.pop(tp).abandon()
    yield from ()
    return {}


def _any_id(disk: Any, directory: str, topic_id: bytes | None) -> bytes | None:
    return topic_id


def _named_id(self: Any, name: str, topic_id: bytes, overrides: dict[str, str]) -> Any:
    return _NEW_TOPIC(self, name, name.encode().ljust(16), overrides)


def _no_log_starts(disk: Any, path: str) -> dict[Any, int]:
    return {} if path == LOG_STARTS else _READ_OFFSETS(disk, path)


def _delete_all(self: Any, before_offset: int | None, now_ms: int) -> int:
    return _DELETE_RECORDS(self, None, now_ms)


def _forget_producers(self: Any, before_offset: int | None, now_ms: int) -> int:
    self._producers.table = producer_table.ProducerTable()
    return _DELETE_RECORDS(self, before_offset, now_ms)


def _payload_unchecked(buffer: Any, position: int, header: Any, verify: bool, *limit: int) -> Any:
    return records.payload_of(buffer, position, header, False, *limit)


def _replay_plain(self: Any, index: int, producer_id: int | None, *record: Any) -> None:
    if producer_id is None:
        _REPLAY_RECORD(self, index, producer_id, *record)


_own_producer.count = 0  # type: ignore[attr-defined]
_PRODUCER = kept_clients.TaskClients.producer
_NEW_TOPIC = topics_topics.Topics._new_topic
_READ_OFFSETS = read_offsets
_DELETE_RECORDS = partition.Partition.delete_records
_REPLAY_RECORD = coordinators_offsets.Offsets._replay_record
_FIND = append._find_remembered
_LOAD = snapshot.Snapshots.load_newest
_PACK = producer_table.pack_entry
_VIOLATE = World.violate
_COORDINATOR, _SEQUENCES = transactions.TransactionCoordinator, sequencer.PartitionSequencer

_STOPS = {name: faults.KINDS[name]._replace(weight=1) for name in ("stop", "slow-disk", "partition")}
FORGETFUL: tuple[Patch, ...] = (
    (faults, "KINDS", _STOPS),
    (simulation, "draw_faults", _draw_many),
    (snapshot.Snapshots, "_load", _load_as_kafka),
    (checks.InvariantMonitor, "_compare", nothing),
    (World, "violate", _violate_all_but_memory),
)
"""A broker that remembers only one batch of each producer after a restart, as Apache Kafka does.

In every seed it is stopped while several batches wait for its disk.
"""

SLOW_SYNCS = ((simulation, "draw_faults", _draw_slow_syncs),)
"""In every seed the broker repeatedly loses its power during a slow sync."""

MUTANTS = [
    Mutant("no sequence check", ((append, "_check_sequence", nothing),)),
    Mutant("no duplicate is recognised", ((append, "_find_remembered", nothing),)),
    Mutant(
        "duplicates are stored again",
        ((append, "_find_remembered", nothing), (append, "_check_sequence", nothing)),
    ),
    Mutant("a duplicate is answered with another offset", ((append, "_find_remembered", _wrong_duplicate),)),
    Mutant("older producer epochs are accepted", ((append, "_check_epoch", nothing),)),
    Mutant(
        "acknowledged though the write failed",
        (
            (partition.Partition, "append_next", nothing),
            (partition.Partition, "append", _acknowledge_always),
        ),
    ),
    Mutant(
        "acknowledged before it is flushed",
        ((group_commit.FlushQueue, "add", _flushed_at_once),),
        world=SLOW_SYNCS,
    ),
    Mutant("a flush syncs nothing", ((local_log.LocalLog, "flush", _sync_nothing),)),
    Mutant("producers are not recovered", ((recovery, "_recover_producers", nothing),)),
    Mutant("a snapshot keeps one batch of five", ((producer_table, "pack_entry", _pack_one_batch),)),
    Mutant("a snapshot forgets the epoch", ((producer_table, "pack_entry", _pack_without_epoch),)),
    Mutant("a snapshot is dropped", ((snapshot.Snapshots, "load_newest", _load_empty),)),
    Mutant("the log behind the snapshot is not replayed", ((recovery, "_replay", nothing),)),
    Mutant("recovery does not check checksums", ((segment.Segment, "rebuild", _trust_all),)),
    Mutant("aborted transactions are not synced", ((index.TransactionIndex, "append", _append_unsynced),)),
    Mutant(
        "older markers are accepted",
        ((markers, "_check_marker", nothing),),
        guards=("rules/test_rules_markers.py::test_row",),
    ),
    Mutant("a marker goes to one partition only", ((_COORDINATOR, "_write_markers", _one_marker),)),
    Mutant("an abort is written as a commit", ((_COORDINATOR, "_write_markers", _always_commit),)),
    Mutant(
        "records are stored before their transaction is durable",
        ((transaction_verification.TransactionVerification, "awaits_durability", property(false)),),
    ),
    Mutant(
        "markers are written before the decision is durable",
        ((transactions, "when_durable", _at_once),),
        guards=("broker/test_broker_transactions.py::test_answers_and_markers_wait_for_the_disk",),
    ),
    Mutant("decided transactions are not resumed", ((_COORDINATOR, "resume", nothing),)),
    Mutant("the coordinator's log is not loaded", ((_COORDINATOR, "load", nothing),)),
    Mutant("a new instance keeps the epoch", ((transactions_coordinator, "_raise_epoch", _same_epoch),)),
    Mutant(
        "the LSO is ignored",
        ((local_log.LocalLog, "last_stable_offset", property(lambda self: self.end_offset)),),
    ),
    Mutant(
        "readers see unsynced records",
        ((local_log.LocalLog, "high_watermark", property(lambda self: self.end_offset)),),
        world=SLOW_SYNCS,
        findings=("C7",),
    ),
    Mutant(
        "Fetch answers have no aborted transactions",
        ((segments.SegmentList, "aborted_transactions", _no_list),),
    ),
    Mutant("a reader does not filter", ((VisibilityFilter, "decide", _deliver_all),)),
    Mutant(
        "offsets take effect before the commit",
        ((coordinators_offsets.Offsets, "commit_pending", _pending_at_once),),
    ),
    Mutant(
        "offsets take effect after an abort",
        ((coordinators_offsets.Offsets, "on_marker", _offsets_whatever),),
    ),
    Mutant("offsets never take effect", ((coordinators_offsets.Offsets, "on_marker", _offsets_never),)),
    Mutant(
        "offsets are read before their transaction ends",
        ((coordinators_offsets.Offsets, "pending_of", _no_set),),
        guards=(
            "broker/test_broker_transactions.py::test_an_offset_is_not_told_while_a_transaction_may_change_it",
        ),
    ),
    Mutant("members of old generations commit", ((groups.GroupCoordinator, "check_commit", nothing),)),
    Mutant("producer ids are assigned twice", ((producer_ids.ProducerIds, "take", _take_again),)),
    Mutant(
        "producer ids start over after a restart",
        ((producer_ids, "first_producer_id", _begin_at_zero),),
        findings=("C2b",),
    ),
    Mutant("a retry gets a new sequence", ((_SEQUENCES, "send", _number_again),)),
    Mutant(
        "a lost attempt counts as a refusal",
        ((_SEQUENCES, "on_no_outcome", _surely_not_stored),),
        guards=(
            "rules/test_rules_sequencer.py::test_a_batch_that_may_be_stored_is_never_renumbered_in_safe_mode",
        ),
    ),
    Mutant(
        "the first batch of a producer id is not sent alone",
        ((_SEQUENCES, "_window", property(lambda self: self.limit)),),
        guards=("rules/test_rules_sequencer.py::test_the_first_batch_of_an_id_goes_alone",),
    ),
    Mutant(
        "acknowledged batches do not count among the five",
        ((_SEQUENCES, "may_assign_sequence", _count_unacknowledged),),
        guards=(
            "rules/test_rules_sequencer.py::test_acknowledged_batches_count_as_long_as_one_before_them_is_not",
        ),
    ),
    Mutant(
        "a batch that may be stored gets a new sequence",
        ((_SEQUENCES, "_is_unsettled", false),),
        world=FORGETFUL,
    ),
    Mutant(
        "a sink task's marker is not in its transaction",
        ((producer_blocking.Producer, "send_offsets_to_transaction", _marker_apart),),
        "lanes",
    ),
    Mutant(
        "a sink task writes without reading its marker",
        ((sink_task, "decide_task", _write_always),),
        "lanes",
    ),
    Mutant(
        "attempts of a sink task do not fence each other",
        ((kept_clients.TaskClients, "producer", _own_producer),),
        "lanes",
    ),
    Mutant(
        "a deleted topic's data is in the new one",
        ((manager.LogManager, "delete_in_steps", _keep_files), (partition, "_check_topic_id", _any_id)),
        "remade",
    ),
    Mutant("a topic's id comes from its name", ((topics_topics.Topics, "_new_topic", _named_id),), "remade"),
    Mutant("log starts are forgotten at a restart", ((manager, "read_offsets", _no_log_starts),), "trimmed"),
    Mutant(
        "DeleteRecords deletes more than requested",
        ((partition.Partition, "delete_records", _delete_all),),
        "trimmed",
    ),
    Mutant(
        "DeleteRecords forgets the producers of deleted records",
        ((partition.Partition, "delete_records", _forget_producers),),
        "trimmed",
    ),
    Mutant(
        "pending offsets are not replayed", ((coordinators_offsets.Offsets, "_replay_record", _replay_plain),)
    ),
    Mutant("damage is taken for a torn tail", ((segment.Segment, "behind", nothing),), "flip"),
    Mutant(
        "a reader does not check checksums", ((fetch_messages, "payload_of", _payload_unchecked),), "flip"
    ),
]
"""The mutants in the order in which a record passes the mutated code."""
NOT_CAUGHT = {
    "older markers are accepted": "one coordinator writes them in order; an older one needs a second node",
    "offsets are read before their transaction ends": (
        "needs a copier that is cut off, and its group rebalanced, between its offsets and its commit: no"
        " seed of the first 19"
    ),
    "markers are written before the decision is durable": (
        "needs a power loss between a decision and its sync: no seed of the first 375"
    ),
    "a lost attempt counts as a refusal": (
        "seed 26 noticed it before the draws changed: no seed of the first 19 since"
    ),
    "the first batch of a producer id is not sent alone": (
        "needs the first refused and the second stored: no seed of the first 30"
    ),
    "acknowledged batches do not count among the five": (
        "needs answers out of order; one node's come in order"
    ),
}
"""Mutants that no seed catches, with the reason."""
