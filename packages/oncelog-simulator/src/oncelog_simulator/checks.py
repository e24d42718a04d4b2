"""What must hold in every world. Each check is made of the clients' notes or of the log, not of the rules
that are under test.
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
REPLAY_EVERY_LOOKS = 10
"""A replay reads all that coordinators have stored, so not every look makes one."""


class Known(NamedTuple):
    """What a partition remembers of a producer: (last sequence, last offset) of batches, oldest first."""

    epoch: int | None
    batches: tuple[tuple[int | None, int], ...]
    txn_first_offset: int | None


def batches_of(partition: Partition, from_offset: int | None = None) -> list[tuple[BatchHeader, memoryview]]:
    """Return all that is stored, or what is stored from an offset on."""
    found = []
    offset = partition.log_start_offset if from_offset is None else from_offset
    while offset < partition.log_end_offset:
        piece = partition.read(offset, _EVERYTHING)
        data = memoryview(bytes(piece.records))
        for position, header in iter_batches(data):
            found.append((header, data[position : position + header.size_bytes]))
        if piece.next_offset <= offset:
            break
        offset = piece.next_offset
    return found


def remembered(partition: Partition) -> dict[int, Known]:
    """What the partition has in memory."""
    return {
        each.producer_id: Known(
            each.entry.producer_epoch,
            tuple((batch.last_sequence, batch.last_offset) for batch in each.entry.batches),
            each.entry.current_txn_first_offset,
        )
        for each in partition.describe_producers()
    }


def _last_only(known: dict[int, Known]) -> dict[int, Known]:
    return {producer_id: each._replace(batches=each.batches[-1:]) for producer_id, each in known.items()}


def replayed(stored: list[tuple[BatchHeader, memoryview]]) -> dict[int, Known]:
    """What it should have in memory, told from the log alone."""
    known: dict[int, Known] = {}
    for header, data in stored:
        if header.producer_id is None or header.producer_epoch is None:
            continue
        epoch = header.producer_epoch
        before = known.get(header.producer_id, Known(epoch, (), None))
        batches = before.batches if before.epoch == epoch else ()
        if header.is_control:
            if decode_control(data, verify=False) is not None:
                known[header.producer_id] = Known(epoch, batches, None)
            continue
        first = before.txn_first_offset
        if first is None and header.is_transactional:
            first = header.base_offset
        batches = (*batches, (header.last_sequence, header.last_offset))[-5:]
        known[header.producer_id] = Known(epoch, batches, first)
    return known


class InvariantMonitor:
    """Looks at the broker while it runs, and over its ends and starts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.floors: dict[tuple[TopicPartition, bytes | None], tuple[int, int]] = {}
        """High watermark and last stable offset by partition and topic id, as seen last."""
        self.before: dict[tuple[TopicPartition, bytes | None], tuple[int, dict[int, Known]]] | None = None
        """Log ends and producers of the broker that ended; None when the disk may have lost something."""
        self.state: State | None = None
        """State of the coordinators at that end; None as for `before`."""
        self.metadata: Metadata | None = None
        """What the small files said when the last broker ended; None when it ended in a write."""
        self.writes_failed = False
        """True in a world in which the disk may refuse a write."""
        self.compacted_topics: set[str] = set()
        """Topics that may have been compacted once, whatever their policy is now."""
        self.one_batch_topics: set[str] = set()
        """Topics with snapshots of Apache Kafka's, which tell one batch of a producer."""
        self._look_count = 0
        self.positions: dict[tuple[str, TopicPartition], int] = {}
        """What groups have committed, as seen last."""
        self.compares_producers = True
        """False once producers may have expired: a start takes those of the log for living ones."""
        self.unguarded_groups: set[str] = set()
        """Of which no position is looked at."""

    def look(self, node: BrokerState) -> None:
        """High watermarks, last stable offsets and committed positions do not go back."""
        for tp, partition in node.log_manager.partitions.items():
            high, stable = partition.high_watermark, partition.last_stable_offset
            high_before, stable_before = self.floors.get((tp, partition.topic_id), (0, 0))
            if high < high_before:
                self.world.violate("the high watermark went back", f"{tp} {high_before} to {high}")
            if stable < stable_before:
                self.world.violate("the LSO went back", f"{tp} {stable_before} to {stable}")
            self.floors[tp, partition.topic_id] = (high, stable)
        for group in sorted(set(node.groups.offsets.groups()) - self.unguarded_groups):
            for tp, committed in node.groups.offsets.of(group).items():
                before = self.positions.get((group, tp), 0)
                if committed.offset < before:
                    text = f"{group} {tp} {before} to {committed.offset}"
                    self.world.violate("a committed position went back", text)
                self.positions[group, tp] = committed.offset
        self._look_count += 1
        if self._look_count % REPLAY_EVERY_LOOKS == 0:
            self.replay(node)

    def replay(self, node: BrokerState) -> State:
        """Compare what coordinators have in memory with a replay of their logs; return the former."""
        live = live_state(node)
        stored = replayed_state(node, self.world.now_us // 1000)
        for kind, text in differences(live, stored):
            self.world.violate("coordinator state is not what its log says", f"{kind}: {text}")
        return live

    def ending(self, node: BrokerState, *, is_in_write: bool, lose_power: bool) -> None:
        """The broker is about to end; without a write or a power loss all will be there again.

        What the high watermark covered is there even after a power loss: only what is synced is visible
        where the power may go.
        """
        self.before = self.state = self.metadata = None
        if not is_in_write:
            self.look(node)
            self.metadata = metadata(node)
        if is_in_write or lose_power:
            self.positions.clear()
            return
        self.state = self.replay(node)
        self.before = {
            (tp, partition.topic_id): (partition.log_end_offset, remembered(partition))
            for tp, partition in node.log_manager.partitions.items()
        }

    def recovered(self, node: BrokerState, *, was_stopped: bool = False) -> None:
        """The node is what its disk says: producers, coordinators, small files.

        After a mere kill all of that is what it was. A start after a complete stop has nothing to report.
        """
        for tp, partition in node.log_manager.partitions.items() if was_stopped else ():
            if partition.recovery_warnings:
                text = f"{tp}: {partition.recovery_warnings}"
                self.world.violate("a start after a clean stop reports a loss", text)
        self._compare_coordinators(node)
        for tp, partition in node.log_manager.partitions.items():
            producers = remembered(partition)
            is_kafkas = tp.topic in self.one_batch_topics
            is_whole = not partition.config.is_compacted and tp.topic not in self.compacted_topics
            if is_whole and partition.log_start_offset == 0:
                expected = replayed(batches_of(partition))
                if is_kafkas:
                    self._compare(tp, "the log", _last_only(expected), _last_only(producers))
                else:
                    self._compare(tp, "the log", expected, producers)
            if self.before is not None and (tp, partition.topic_id) in self.before:
                end_offset, known = self.before[tp, partition.topic_id]
                if partition.log_end_offset < end_offset:
                    text = f"{tp} ends at {partition.log_end_offset}, before it ended at {end_offset}"
                    self.world.violate("a kill lost records", text)
                if partition.log_end_offset == end_offset and is_whole and not is_kafkas:
                    self._compare(tp, "before", known, producers)
                elif partition.log_end_offset == end_offset:
                    # Compaction and Kafka's snapshots keep a producer's last batch only.
                    self._compare(tp, "before", _last_only(known), _last_only(producers))
        self.before = None

    def _compare_coordinators(self, node: BrokerState) -> None:
        now = self.replay(node)
        if self.state is not None:
            for kind, text in differences(after_resume(self.state, now), now):
                self.world.violate("recovered coordinator state differs", f"{kind}: {text}")
        if self.metadata is not None:
            found = metadata_differences(self.metadata, metadata(node), writes_failed=self.writes_failed)
            for kind, text in found:
                self.world.violate("the node's files changed with a restart", f"{kind}: {text}")

    def _compare(
        self, tp: TopicPartition, what: str, expected: dict[int, Known], found: dict[int, Known]
    ) -> None:
        for producer_id in sorted(expected.keys() | found.keys()) if self.compares_producers else ():
            if expected.get(producer_id) != found.get(producer_id):
                self.world.violate(
                    "recovered producer state differs",
                    f"{tp} id {producer_id}: {found.get(producer_id)}, by {what} {expected.get(producer_id)}",
                )


def check_log(
    world: World,
    tp: TopicPartition,
    partition: Partition,
    but_for: frozenset[FindingKind] = frozenset(),
    first_sequence: int | None = None,
) -> None:
    """The independent audit of a partition: sequences, epochs, offsets, checksums.

    `first_sequence`: where producers may begin besides 0; the audit is given their distance from it.
    """
    audit = PartitionAudit(log_start_offset=partition.log_start_offset)
    first_sequences: dict[tuple[int | None, int | None], int] = {}
    for header, data in batches_of(partition):
        is_last_epoch = header.producer_epoch == MAX_EPOCH
        if is_last_epoch and header.is_transactional and not header.is_control:
            world.violate("a client has the last epoch", f"{tp} id {header.producer_id}")  # nothing fences it
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
    for finding in (each for each in audit.finish()[0] if each.kind not in but_for):
        world.violate(f"audit of {tp}", f"{finding.kind.value} {finding.explanation}")


def marker_of(data: bytes | memoryview) -> tuple[bool | None, int | None]:
    """Return whether a control batch commits, and its coordinator's epoch; None where it is no marker."""
    control = decode_control(data, 0)
    if control is None or control.coordinator_epoch is None:
        return None, None
    return control.type is ControlType.COMMIT, control.coordinator_epoch


def check_history(world: World, operations: list[Operation], last: str) -> None:
    """What clients were told, against each other and against what process `last` read in the end."""
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
    """A transaction has one outcome, wherever it has a marker (an epoch stands for one transaction)."""
    told: dict[tuple[int | None, int | None], tuple[ControlType, TopicPartition]] = {}
    for tp, partition in logs.items():
        for header, data in batches_of(partition):
            record = decode_control(data, verify=False) if header.is_control else None
            if record is None or record.type is None:
                continue
            who = (header.producer_id, header.producer_epoch)
            outcome, first = told.setdefault(who, (record.type, tp))
            if outcome is not record.type:
                text = f"{who} has {outcome.name} in {first} and {record.type.name} in {tp}"
                world.violate("two outcomes of one transaction", text)


def check_copies(world: World, operations: list[Operation], last: str, source: str, target: str) -> None:
    """Every record of the one topic is in the other, once."""
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
