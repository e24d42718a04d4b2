"""Checks that hold in every simulation.

Each check uses what clients noted, or the log itself. It never uses the rules that the simulation tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from oncelog.audit.partition import FindingKind, PartitionAudit, StoredBatch
from oncelog.broker.state import BrokerState
from oncelog.log.partition import Partition
from oncelog.rules.idempotence.sequence import advance
from oncelog.rules.idempotence.sequencer import MAX_EPOCH
from oncelog.types import TopicPartition
from oncelog.wire.batch import iter_batches
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.header import BatchHeader, verify_crc
from oncelog_simulator.coordinator_state import (
    Metadata,
    State,
    after_resume,
    differences,
    live_state,
    metadata,
    metadata_differences,
    replayed_state,
)
from oncelog_simulator.history.check import Item, Kind, Operation, Outcome, check
from oncelog_simulator.world import World

_EVERYTHING = 1 << 40
REPLAY_EVERY = 10
"""The coordinators' logs are replayed at every REPLAY_EVERY-th observation.

Replays are rare because each reads the logs from beginning to end.
"""


class ProducerSummary(NamedTuple):
    """The state that a partition keeps of a producer.

    `batches` has the last sequence and last offset of up to five batches, oldest first.
    """

    epoch: int | None
    batches: tuple[tuple[int | None, int], ...]
    txn_first_offset: int | None


def batches_of(partition: Partition, from_offset: int | None = None) -> list[tuple[BatchHeader, memoryview]]:
    """Return the batches of a partition with their bytes, from `from_offset` onwards.

    None begins at the log start.
    """
    batches = []
    offset = partition.log_start_offset if from_offset is None else from_offset
    while offset < partition.log_end_offset:
        piece = partition.read(offset, _EVERYTHING)
        data = memoryview(bytes(piece.records))
        for position, header in iter_batches(data):
            batches.append((header, data[position : position + header.size_bytes]))
        if piece.next_offset <= offset:
            break
        offset = piece.next_offset
    return batches


def remembered_producers(partition: Partition) -> dict[int, ProducerSummary]:
    """Return the producer state that the partition has in memory, by producer id."""
    return {
        producer.producer_id: ProducerSummary(
            producer.entry.producer_epoch,
            tuple((batch.last_sequence, batch.last_offset) for batch in producer.entry.batches),
            producer.entry.current_txn_first_offset,
        )
        for producer in partition.describe_producers()
    }


def _last_only(summaries: dict[int, ProducerSummary]) -> dict[int, ProducerSummary]:
    return {
        producer_id: summary._replace(batches=summary.batches[-1:])
        for producer_id, summary in summaries.items()
    }


def replayed_producers(stored: list[tuple[BatchHeader, memoryview]]) -> dict[int, ProducerSummary]:
    """Return the producer state that follows from the log alone, by producer id."""
    summaries: dict[int, ProducerSummary] = {}
    for header, data in stored:
        if header.producer_id is None or header.producer_epoch is None:
            continue
        epoch = header.producer_epoch
        before = summaries.get(header.producer_id, ProducerSummary(epoch, (), None))
        batches = before.batches if before.epoch == epoch else ()
        if header.is_control:
            if decode_control(data, verify=False) is not None:
                summaries[header.producer_id] = ProducerSummary(epoch, batches, None)
            continue
        first = before.txn_first_offset
        if first is None and header.is_transactional:
            first = header.base_offset
        batches = (*batches, (header.last_sequence, header.last_offset))[-5:]
        summaries[header.producer_id] = ProducerSummary(epoch, batches, first)
    return summaries


class InvariantMonitor:
    """Checks the broker while it runs, when it ends, and when it has started again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.floors: dict[tuple[TopicPartition, bytes | None], tuple[int, int, int]] = {}
        """The last observed (high watermark, last stable offset, log start), by partition and topic id."""
        self.before: (
            dict[tuple[TopicPartition, bytes | None], tuple[int, dict[int, ProducerSummary]]] | None
        ) = None
        """Log end offsets and producer states when the last broker ended. None if it lost power or ended
        during a write.
        """
        self.state: State | None = None
        """State of the coordinators when the last broker ended. None in the same cases as `before`."""
        self.metadata: Metadata | None = None
        """Contents of the small files when the last broker ended. None if it ended during a write."""
        self.writes_failed = False
        """True if the disk may refuse a write in this seed."""
        self.compacted_topics: set[str] = set()
        """Topics that may have been compacted at any time, whatever their current policy is."""
        self.one_batch_topics: set[str] = set()
        """Topics with Apache Kafka's snapshots, which have one batch of each producer."""
        self._observe_count = 0
        self.positions: dict[tuple[str, TopicPartition], int] = {}
        """Offsets that groups had committed at the last observation."""
        self.compares_producers = True
        """False as soon as producers may have expired.

        The state in memory then differs from a replay, because a replay of the log also restores expired
        producers.
        """
        self.unguarded_groups: set[str] = set()
        """Groups whose committed offsets are not checked."""

    def observe(self, node: BrokerState) -> None:
        """Check that high watermarks, last stable offsets and committed offsets do not go back.

        Every tenth call (REPLAY_EVERY) also replays the coordinators' logs.
        """
        for tp, partition in node.log_manager.partitions.items():
            high, stable = partition.high_watermark, partition.last_stable_offset
            start = partition.log_start_offset
            high_before, stable_before, start_before = self.floors.get((tp, partition.topic_id), (0, 0, 0))
            if high < high_before:
                self.world.violate("the high watermark went back", f"{tp} {high_before} to {high}")
            # If a full disk did not store a new log start offset, a restart restores the older, lower one.
            # Then an open transaction that began below the new offset limits the last stable offset again.
            # Example: seed 333583.
            has_lost_start = start < start_before and self.writes_failed
            if stable < stable_before and not has_lost_start:
                self.world.violate("the LSO went back", f"{tp} {stable_before} to {stable}")
            self.floors[tp, partition.topic_id] = (high, stable, start)
        for group in sorted(set(node.groups.offsets.groups()) - self.unguarded_groups):
            for tp, committed in node.groups.offsets.of(group).items():
                before = self.positions.get((group, tp), 0)
                if committed.offset < before:
                    text = f"{group} {tp} {before} to {committed.offset}"
                    self.world.violate("a committed position went back", text)
                self.positions[group, tp] = committed.offset
        self._observe_count += 1
        if self._observe_count % REPLAY_EVERY == 0:
            self.replay(node)

    def replay(self, node: BrokerState) -> State:
        """Compare the coordinators' state in memory with a replay of their logs. Return the state in
        memory.
        """
        live = live_state(node)
        stored = replayed_state(node, self.world.now_us // 1000)
        for kind, text in differences(live, stored):
            self.world.violate("coordinator state is not what its log says", f"{kind}: {text}")
        return live

    def ending(self, node: BrokerState, *, is_in_write: bool, lose_power: bool) -> None:
        """Note the state of a broker that is about to end.

        The next start must restore all of that state, unless the broker ends during a write or by a power
        loss. Even after a power loss it must restore the records below the high watermark, because in seeds
        with power losses the high watermark covers only synced records.
        """
        self.before = self.state = self.metadata = None
        if not is_in_write:
            self.observe(node)
            self.metadata = metadata(node)
        if is_in_write or lose_power:
            self.positions.clear()
            return
        self.state = self.replay(node)
        self.before = {
            (tp, partition.topic_id): (partition.log_end_offset, remembered_producers(partition))
            for tp, partition in node.log_manager.partitions.items()
        }

    def recovered(self, node: BrokerState, *, was_stopped: bool = False) -> None:
        """Check producers, coordinators and small files after a start.

        If the broker ended between two writes and kept its power, all of that state must be as before. A
        start after a complete stop must not report a loss.
        """
        for tp, partition in node.log_manager.partitions.items() if was_stopped else ():
            if partition.recovery_warnings:
                text = f"{tp}: {partition.recovery_warnings}"
                self.world.violate("a start after a clean stop reports a loss", text)
        self._compare_coordinators(node)
        for tp, partition in node.log_manager.partitions.items():
            producers = remembered_producers(partition)
            is_kafkas = tp.topic in self.one_batch_topics
            is_whole = not partition.config.is_compacted and tp.topic not in self.compacted_topics
            if is_whole and partition.log_start_offset == 0:
                expected = replayed_producers(batches_of(partition))
                if is_kafkas:
                    self._compare(tp, "the log", _last_only(expected), _last_only(producers))
                else:
                    self._compare(tp, "the log", expected, producers)
            if self.before is not None and (tp, partition.topic_id) in self.before:
                end_offset, producers_before = self.before[tp, partition.topic_id]
                if partition.log_end_offset < end_offset:
                    text = f"{tp} ends at {partition.log_end_offset}, before it ended at {end_offset}"
                    self.world.violate("a kill lost records", text)
                if partition.log_end_offset == end_offset and is_whole and not is_kafkas:
                    self._compare(tp, "before", producers_before, producers)
                elif partition.log_end_offset == end_offset:
                    # Compaction and Kafka's snapshots keep only the last batch of a producer.
                    self._compare(tp, "before", _last_only(producers_before), _last_only(producers))
        self.before = None

    def _compare_coordinators(self, node: BrokerState) -> None:
        now = self.replay(node)
        if self.state is not None:
            for kind, text in differences(after_resume(self.state, now), now):
                self.world.violate("recovered coordinator state differs", f"{kind}: {text}")
        if self.metadata is not None:
            changes = metadata_differences(self.metadata, metadata(node), writes_failed=self.writes_failed)
            for kind, text in changes:
                self.world.violate("the node's files changed with a restart", f"{kind}: {text}")

    def _compare(
        self,
        tp: TopicPartition,
        what: str,
        expected: dict[int, ProducerSummary],
        actual: dict[int, ProducerSummary],
    ) -> None:
        for producer_id in sorted(expected.keys() | actual.keys()) if self.compares_producers else ():
            before, now = expected.get(producer_id), actual.get(producer_id)
            if before != now:
                text = f"{tp} id {producer_id}: {now}, by {what} {before}"
                self.world.violate("recovered producer state differs", text)


def check_log(
    world: World,
    tp: TopicPartition,
    partition: Partition,
    but_for: frozenset[FindingKind] = frozenset(),
    first_sequence: int | None = None,
) -> None:
    """Audit a partition independently of the product's rules: sequences, epochs, offsets and checksums.

    `first_sequence` is a first sequence that producers may use instead of 0. The audit gets sequences
    relative to it. `but_for` has the kinds of findings that are allowed.
    """
    audit = PartitionAudit(log_start_offset=partition.log_start_offset)
    first_sequences: dict[tuple[int | None, int | None], int] = {}
    for header, data in batches_of(partition):
        is_last_epoch = header.producer_epoch == MAX_EPOCH
        if is_last_epoch and header.is_transactional and not header.is_control:
            # Clients must never write with the last epoch: it has no higher epoch that could fence it.
            world.violate("a client has the last epoch", f"{tp} id {header.producer_id}")
        sequence = header.base_sequence
        if sequence is not None and first_sequence is not None:
            producer = header.producer_id, header.producer_epoch
            begins_there = sequence == first_sequence
            start = first_sequences.setdefault(producer, first_sequence if begins_there else 0)
            sequence = advance(sequence, -start)
        audit.see(
            StoredBatch(
                header.base_offset,
                header.last_offset,
                header.producer_id,
                header.producer_epoch,
                sequence,
                header.last_offset - header.base_offset + 1,
                header.records_count,
                header.is_control,
                verify_crc(data, 0, header.size_bytes),
                header.is_transactional,
                *(marker_of(data) if header.is_control and header.records_count else (None, None)),
            )
        )
    for finding in (finding for finding in audit.finish()[0] if finding.kind not in but_for):
        world.violate(f"audit of {tp}", f"{finding.kind.value} {finding.explanation}")


def marker_of(data: bytes | memoryview) -> tuple[bool | None, int | None]:
    """Return (True for a commit, the coordinator epoch) of a marker, or (None, None) for other batches."""
    control = decode_control(data, 0)
    if control is None or control.coordinator_epoch is None:
        return None, None
    return control.type is ControlType.COMMIT, control.coordinator_epoch


def check_history(world: World, operations: list[Operation], last: str) -> None:
    """Check the clients' operations against each other, and against the records that the process `last` read
    at the end.
    """
    for anomaly in check(operations, dependencies=("wr",)):
        world.violate("history", str(anomaly))
    read: dict[Any, Item] = {}
    for operation in operations:
        if operation.process == last:
            for item in operation.items:
                if item.value in read:
                    world.violate("twice in the log", f"{read[item.value]} and {item}")
                read[item.value] = item
    for operation in operations:
        if operation.kind is Kind.POLL:
            for item in operation.items:
                if read.get(item.value) != item:
                    world.violate(
                        "shown to a reader, then gone or elsewhere", f"{item}: {read.get(item.value)}"
                    )
        if operation.kind is Kind.SEND and operation.transaction is None:
            (item,) = operation.items
            if operation.outcome is Outcome.OK and read.get(item.value) != item:
                world.violate("acknowledged, then lost or elsewhere", f"{item}: {read.get(item.value)}")
            if operation.outcome is Outcome.FAIL and item.value in read:
                world.violate("refused, and yet stored", f"{read[item.value]}")


def check_outcomes(world: World, logs: dict[TopicPartition, Partition]) -> None:
    """Check that a transaction has the same outcome in every partition with its marker.

    The check identifies a transaction by its producer id and epoch, so each transaction must have its own
    epoch.
    """
    first_outcomes: dict[tuple[int | None, int | None], tuple[ControlType, TopicPartition]] = {}
    for tp, partition in logs.items():
        for header, data in batches_of(partition):
            record = decode_control(data, verify=False) if header.is_control else None
            if record is None or record.type is None:
                continue
            producer = (header.producer_id, header.producer_epoch)
            outcome, first = first_outcomes.setdefault(producer, (record.type, tp))
            if outcome is not record.type:
                text = f"{producer} has {outcome.name} in {first} and {record.type.name} in {tp}"
                world.violate("two outcomes of one transaction", text)


def check_copies(world: World, operations: list[Operation], last: str, source: str, target: str) -> None:
    """Check that every record of the topic `source` was copied to the topic `target` exactly once."""
    read = [item for operation in operations if operation.process == last for item in operation.items]
    there: set[Any] = {item.value for item in read if item.topic == source}
    copied: dict[Any, Item] = {}
    for item in read:
        if item.topic == target:
            value = bytes(item.value).split(b">")[0]  # type: ignore[call-overload]
            if value in copied:
                world.violate("copied twice", f"{copied[value]} and {item}")
            copied[value] = item
    for value in sorted(there ^ copied.keys()):
        text = "was read and not copied" if value in there else "was copied and is not there"
        world.violate("copied once", f"{value!r} {text}")
