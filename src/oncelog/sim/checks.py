"""What must hold in every world. Each check is made of the clients' notes or of the log, not of the rules
that are under test.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from oncelog.broker.node import Node
from oncelog.log.partition import Partition
from oncelog.rules.audit import FindingKind, PartitionAudit, StoredBatch
from oncelog.rules.history import Item, Kind, Operation, Outcome, check
from oncelog.sim.world import World
from oncelog.types import TopicPartition
from oncelog.wire.batch import iter_batches
from oncelog.wire.control import ControlType, decode_control
from oncelog.wire.header import BatchHeader, verify_crc

_EVERYTHING = 1 << 40


class Known(NamedTuple):
    """What a partition remembers of a producer: (last sequence, last offset) of batches, oldest first."""

    epoch: int | None
    batches: tuple[tuple[int | None, int], ...]
    txn_first_offset: int | None


def batches_of(partition: Partition) -> list[tuple[BatchHeader, memoryview]]:
    """All that is stored."""
    found = []
    offset = partition.log_start_offset
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


def coordinated(node: Node) -> dict[str, Any] | None:
    """Return what coordinators know of offsets and transactions; None while a start would finish some.

    What a client may ask again for, that lost an answer, is left out: Kafka's records do not keep all of it.
    """
    entries = {
        entry.transactional_id: entry._replace(last_producer_epoch=-1, previous_producer_id=-1)
        for entry in node.transactions.all()
    }
    if any(entry.state.is_prepared for entry in entries.values()):
        return None
    committed, pending = node.groups.offsets.snapshot()
    return {"transactions": entries, "committed offsets": committed, "pending offsets": pending}


class Watch:
    """Looks at the broker while it runs, and over its ends and starts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.floors: dict[tuple[TopicPartition, bytes | None], tuple[int, int]] = {}
        """High watermark and last stable offset by partition and topic id, as seen last."""
        self.before: dict[tuple[TopicPartition, bytes | None], tuple[int, dict[int, Known]]] | None = None
        """Log ends and producers of the broker that ended; None when the disk may have lost something."""
        self.coordinated: dict[str, Any] | None = None
        """What coordinators knew then; None as for `before`, and when a start goes on with something."""
        self.positions: dict[tuple[str, TopicPartition], int] = {}
        """What groups have committed, as seen last."""
        self.unguarded_groups: set[str] = set()
        """Of which no position is looked at."""

    def look(self, node: Node) -> None:
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

    def ending(self, node: Node, *, keeps_all: bool) -> None:
        """The broker is about to end. `keeps_all`: all that it has written will be there again."""
        self.before = self.coordinated = None
        if keeps_all:
            self.look(node)
            self.coordinated = coordinated(node)
            self.before = {
                (tp, partition.topic_id): (partition.log_end_offset, remembered(partition))
                for tp, partition in node.log_manager.partitions.items()
            }
        else:
            self.floors.clear()
            self.positions.clear()

    def recovered(self, node: Node) -> None:
        """Producer state is what the log says, and after a mere kill what it was.

        So is what coordinators know.
        """
        found = coordinated(node)
        if self.coordinated is not None and found is not None:
            for what, known in self.coordinated.items():
                if known != found[what]:
                    text = f"{what}: {known} before, {found[what]} now"
                    self.world.violate("recovered coordinator state differs", text)
        for tp, partition in node.log_manager.partitions.items():
            producers = remembered(partition)
            if not partition.config.is_compacted and partition.log_start_offset == 0:
                self._compare(tp, "the log", replayed(batches_of(partition)), producers)
            if self.before is not None and (tp, partition.topic_id) in self.before:
                end_offset, known = self.before[tp, partition.topic_id]
                if partition.log_end_offset < end_offset:
                    text = f"{tp} ends at {partition.log_end_offset}, before it ended at {end_offset}"
                    self.world.violate("a kill lost records", text)
                if partition.log_end_offset == end_offset:
                    self._compare(tp, "before", known, producers)
        self.before = None

    def _compare(
        self, tp: TopicPartition, what: str, expected: dict[int, Known], found: dict[int, Known]
    ) -> None:
        for producer_id in sorted(expected.keys() | found.keys()):
            if expected.get(producer_id) != found.get(producer_id):
                self.world.violate(
                    "recovered producer state differs",
                    f"{tp} id {producer_id}: {found.get(producer_id)}, by {what} {expected.get(producer_id)}",
                )


def check_log(
    world: World, tp: TopicPartition, partition: Partition, but_for: frozenset[FindingKind] = frozenset()
) -> None:
    """The independent audit of a partition: sequences, epochs, offsets, checksums."""
    audit = PartitionAudit(log_start_offset=partition.log_start_offset)
    for header, data in batches_of(partition):
        audit.see(
            StoredBatch(
                header.base_offset,
                header.last_offset,
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.last_offset - header.base_offset + 1,
                header.records_count,
                header.is_control,
                verify_crc(data, 0, header.size_bytes),
            )
        )
    for finding in (each for each in audit.finish()[0] if each.kind not in but_for):
        world.violate(f"audit of {tp}", f"{finding.kind.value} {finding.explanation}")


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
